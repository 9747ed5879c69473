"""Which class runs a checkpoint: one of ours, or transformers' own on the same paged cache.

Ours are chosen by the architecture that config.json names. If it asks for something that they do not have, such as a
rope type or an activation, the checkpoint is left to transformers, like one of an architecture that we do not have.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from kernels.choice import Operations, choose
from worker.checkpoint import ModelError, UnsupportedModel
from worker.models.gpt2 import GPT2Config, GPT2ForCausalLM
from worker.models.llama import LlamaConfig, LlamaForCausalLM
from worker.models.model import Model, ModelNumbers
from worker.models.opt import OPTConfig, OPTForCausalLM
from worker.ranks import ALONE, Place, Ranks
from worker.shares import deal_heads
from worker.weights import Piece, check_memory, has_own_head, load_weights, memory_for_weights

log = logging.getLogger(__name__)


class OurNumbers(ModelNumbers, Protocol):
    """The numbers of one of our models."""

    @property
    def num_heads(self) -> int:
        """The number of query heads of each layer."""

    @property
    def tied_embeddings(self) -> bool:
        """Whether the head's weights are the embedding's vectors."""

    @classmethod
    def from_json(cls, config: dict[str, Any], context_length: int | None = None) -> Self:
        """Reads a config.json; see `LlamaConfig.from_json`."""


class OurModel(Model, Protocol):
    """A model that is filled from a checkpoint by `worker.weights`."""

    def pieces(self) -> Iterator[Piece]:
        """What is loaded at a time, in order; once the last one is packed, the model can be called."""

    def checkpoint_name(self, name: str) -> str:
        """Our name for a tensor that checkpoints may name in several ways."""

    def leaves_out(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although we compute its values, or already have them."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """How an architecture's numbers are read, and what is built from them.

    Attributes:
        numbers: reads them.
        model: is built from them.
        embedding: how the name of the embedding's tensor ends, whatever the prefix.
    """

    numbers: type[OurNumbers]
    model: Callable[..., OurModel]
    embedding: str = "embed_tokens.weight"


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(LlamaConfig, LlamaForCausalLM),
    "MistralForCausalLM": Architecture(LlamaConfig, LlamaForCausalLM),
    "Qwen2ForCausalLM": Architecture(LlamaConfig, LlamaForCausalLM),
    "Qwen3ForCausalLM": Architecture(LlamaConfig, LlamaForCausalLM),
    "GPT2LMHeadModel": Architecture(GPT2Config, GPT2ForCausalLM, "wte.weight"),
    "OPTForCausalLM": Architecture(OPTConfig, OPTForCausalLM),
}


def check_place(directory: Path, config: dict[str, Any], place: Place) -> None:
    """Refuses ranks that one of our models cannot be shared among; `load_model` reports all else.

    Raises:
        ModelError: it has too few layers, or heads that cannot be dealt out.
    """
    architecture = ARCHITECTURES.get((config.get("architectures") or [""])[0])
    if architecture is None:
        return
    try:
        numbers = _read_numbers(architecture, directory, config)
    except ModelError:
        return
    place.layers(numbers.num_layers)
    deal_heads(numbers.num_heads, numbers.num_kv_heads, place.tensor_rank, place.tensor_size)


def load_model(
    directory: Path,
    config: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    block_size: int = 16,
    context_length: int | None = None,
    cache_dtype: torch.dtype | None = None,
    wrap: Callable[[Operations], Operations] | None = None,
    ranks: Ranks = ALONE,
) -> Model:
    """The model of a checkpoint with its weights; the log says which path was taken, and why.

    Args:
        directory: of the checkpoint.
        config: its config.json.
        dtype: of the weights.
        device: where they and the KV cache are to be.
        block_size: tokens in a block of the cache that the model will run on.
        context_length: the longest context to be served; None: as long as the model was made for.
        cache_dtype: of the cache; None: that of the weights.
        wrap: turns the chosen operations into those that the model is built on; None: they are used as they are.
        ranks: those that share the model.

    Raises:
        UnsupportedModel: neither path runs it; the message names what is supported.
        ModelError: `config` or the weights do not fit the architecture, or the memory.
    """
    if config.get("quantization_config"):
        raise UnsupportedModel("quantized checkpoints are not supported yet")

    def choose_operations(head_dim: int) -> Operations:
        chosen = choose(device, dtype, head_dim=head_dim, block_size=block_size, cache_dtype=cache_dtype)
        return chosen if wrap is None else wrap(chosen)

    name = (config.get("architectures") or ["no architecture"])[0]
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        reason = f"{name} is none of ours ({', '.join(ARCHITECTURES)})"
    else:
        try:
            numbers = _read_numbers(architecture, directory, config, context_length)
        except UnsupportedModel as problem:
            reason = f"our {name} cannot: {problem}"
        else:
            log.info("model path: our own, since %s is one of ours", name)
            numbers = _untied_if_they_differ(numbers, directory, architecture.embedding)
            operations = choose_operations(numbers.head_dim)
            if device.type == "cpu":
                check_memory(directory, operations.bytes_per_weight or dtype.itemsize, ranks.place.size)
            with memory_for_weights(directory):
                model = architecture.model(numbers, operations=operations, dtype=dtype, device=device, ranks=ranks)
                return _fill(model, directory)
    if ranks.place.size > 1:
        raise UnsupportedModel(
            f"{reason}, and only models of ours are shared out: --tensor-parallel-size and "
            "--pipeline-parallel-size have to be 1"
        )
    log.warning("model path: transformers' layers on the paged cache, slower than our own, since %s", reason)
    # Imported here and nowhere else: it takes seconds, and a worker that runs one of ours does not need it installed.
    try:
        from worker.models.generic import load_generic
    except ImportError as error:
        hint = "install it beside the worker: pip install -e '.[transformers]'"
        raise UnsupportedModel(
            f"{reason}, and transformers, which may know it, is missing ({hint}): {error}"
        ) from error
    try:
        return load_generic(directory, dtype, device, choose_operations, context_length, cache_dtype or dtype)
    except UnsupportedModel as problem:
        raise UnsupportedModel(f"{reason}, and transformers cannot run it on the paged cache: {problem}") from problem


def _read_numbers(
    architecture: Architecture, directory: Path, config: dict[str, Any], context_length: int | None = None
) -> OurNumbers:
    """An architecture's numbers, checked.

    Raises:
        UnsupportedModel: `config` asks for something that is not built.
        ModelError: a number is missing or invalid.
    """
    try:
        numbers = architecture.numbers.from_json(config, context_length)
        _check(numbers)
    except KeyError as error:
        raise ModelError(f"{directory / 'config.json'} lacks {error}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelError(f"{directory / 'config.json'} has a value that cannot be: {error}") from error
    return numbers


def _untied_if_they_differ(numbers: OurNumbers, directory: Path, embedding: str) -> OurNumbers:
    """The numbers, untied whatever they say if the checkpoint has a head of its own, as in transformers."""
    if not numbers.tied_embeddings or not has_own_head(directory, embedding):
        return numbers
    log.warning(
        "%s ties the head to the embedding, but the checkpoint's lm_head.weight is another one and is taken: set "
        "tie_word_embeddings to false there to say so",
        directory / "config.json",
    )
    return dataclasses.replace(numbers, tied_embeddings=False)  # type: ignore[type-var]  # see `_check`


def _check(numbers: ModelNumbers) -> None:
    """Raises ValueError for a count that is no positive integer, or a float that is no number: JSON may hold any."""
    for field in dataclasses.fields(numbers):  # type: ignore[arg-type]  # of each architecture's own class
        value = getattr(numbers, field.name)
        if field.type is int and not (type(value) is int and value > 0):
            raise ValueError(f"{field.name} comes to {value!r}, and has to be a positive integer")
        if field.type is float and not isinstance(value, int | float):
            raise ValueError(f"{field.name} comes to {value!r}, and has to be a number")


def _fill(model: OurModel, directory: Path) -> OurModel:
    # A tensor that this stage does not use is taken to be another stage's; whether it is one's is not checked.
    is_stage = model.ranks.place.num_stages > 1
    load_weights(
        directory, model.pieces(), lambda name: is_stage or model.leaves_out(name), one_name=model.checkpoint_name
    )
    return model
