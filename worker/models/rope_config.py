"""Which rope type a config.json asks for, and with what numbers; the types themselves are in `worker.layers.rotary`."""

import math
from typing import Any

from worker.checkpoint import UnsupportedModel
from worker.layers.rotary import (
    DefaultRope,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    Rope,
    YarnRope,
    yarn_attention_factor,
)

# Of a rope type's numbers, those that have to be positive if they are given.
_POSITIVE = (
    "factor",
    "attention_factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "original_max_position_embeddings",
)


def longest_context(config: dict[str, Any]) -> tuple[int, int]:
    """The longest context, in tokens, that the rope type serves as it is, and the longest that it serves if asked to.

    The two differ only for the dynamic type: within max_position_embeddings it is the plain rotation, and serving more
    costs other frequencies at every length.
    """
    parameters, kind = _rope_parameters(config)
    length = config["max_position_embeddings"]
    if kind == "dynamic":
        return length, int(length * parameters["factor"])
    if kind == "yarn":
        length = max(length, int(_original_length(config, parameters) * (parameters.get("factor") or 1)))
    return length, length


def read_rope(config: dict[str, Any], head_dim: int, context_length: int) -> Rope:
    """The rotation that a model of the Llama family uses.

    Args:
        config: config.json, with a value for max_position_embeddings.
        head_dim: values in a head.
        context_length: the longest context to be served: the dynamic type and LongRoPE use other frequencies if it is
            long. The choice is the same for all sequences, since keys in one cache have to be rotated alike.

    Raises:
        UnsupportedModel: the rope type is not built.
        KeyError: a number is missing.
        ValueError: a number is not valid.
    """
    parameters, kind = _rope_parameters(config)
    theta = parameters.get("rope_theta", config.get("rope_theta", 10_000.0))
    least = 1 if kind == "yarn" else 0  # YaRN divides by its logarithm
    if not theta > least:
        raise ValueError(f"rope_theta is {theta}, and has to be more than {least} for rope type {kind!r}")
    if (parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1) != 1:
        raise UnsupportedModel("a rotation of a part of each head is not supported")
    if head_dim % 2:
        raise ValueError(f"head_dim comes to {head_dim}, and a rotation takes pairs of values")
    if kind == "default":
        return DefaultRope(theta)
    if kind == "linear":
        return LinearRope(theta, parameters["factor"])
    if kind == "llama3":
        return _read_llama3(parameters, theta)
    if kind == "dynamic":
        return DynamicRope(theta, parameters["factor"], config["max_position_embeddings"], context_length)
    if kind == "yarn":
        return _read_yarn(config, parameters, theta)
    if kind == "longrope":
        return _read_longrope(config, parameters, theta, head_dim, context_length)
    supported = "default, linear, llama3, dynamic, yarn and longrope"
    raise UnsupportedModel(f"rope type {kind!r} is not supported, only {supported}")


def _rope_parameters(config: dict[str, Any]) -> tuple[dict[str, Any], str]:
    # transformers 5 keeps everything in rope_parameters; before it, rope_theta stood beside rope_scaling. If both
    # are there, rope_scaling was added by hand, as model cards say to, and transformers uses that alone.
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    parameters = {name: value for name, value in (config.get(field) or {}).items() if value is not None}
    for name in _POSITIVE:
        _check_positive(f"{name} of {field}", parameters.get(name, 1))
    return parameters, parameters.get("rope_type", parameters.get("type", "default"))


def _check_positive(name: str, value: Any) -> None:
    if not (isinstance(value, int | float) and 0 < value < math.inf):
        raise ValueError(f"{name} is {value!r}, and has to be a positive number")


def _original_length(config: dict[str, Any], parameters: dict[str, Any]) -> int:
    name = "original_max_position_embeddings"
    return parameters.get(name) or config.get(name) or config["max_position_embeddings"]


def _read_llama3(parameters: dict[str, Any], theta: float) -> Llama3Rope:
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    if not low < high:
        raise ValueError(f"high_freq_factor is {high}, and has to be more than low_freq_factor, {low}")
    return Llama3Rope(
        theta,
        factor=parameters["factor"],
        low_frequency_factor=low,
        high_frequency_factor=high,
        original_context_length=parameters["original_max_position_embeddings"],
    )


def _read_yarn(config: dict[str, Any], parameters: dict[str, Any], theta: float) -> YarnRope:
    original = _original_length(config, parameters)
    factor = parameters.get("factor") or config["max_position_embeddings"] / original
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = yarn_attention_factor(factor)
        weight, weight_of_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if weight and weight_of_all:
            attention_factor = yarn_attention_factor(factor, weight) / yarn_attention_factor(factor, weight_of_all)
    return YarnRope(
        theta,
        factor=factor,
        original_context_length=original,
        attention_factor=attention_factor,
        beta_fast=parameters.get("beta_fast") or 32,
        beta_slow=parameters.get("beta_slow") or 1,
        truncate=parameters.get("truncate", True),
    )


def _read_longrope(
    config: dict[str, Any], parameters: dict[str, Any], theta: float, head_dim: int, context_length: int
) -> LongRope:
    original = _original_length(config, parameters)
    factor = parameters.get("factor") or config["max_position_embeddings"] / original
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    name = "long_factor" if context_length > original else "short_factor"
    factors = parameters[name]
    if not isinstance(factors, list) or len(factors) != head_dim // 2:
        raise ValueError(f"{name} has to be a list of {head_dim // 2} numbers, for heads of {head_dim}")
    for value in factors:
        _check_positive(f"a number of {name}", value)
    return LongRope(theta, tuple(factors), attention_factor)
