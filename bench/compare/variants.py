"""The engines that are compared, the variants of each, and how their drivers are started."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from bench.compare.engine import Command
from bench.compare.install import Peers
from bench.compare.workload import NAMES
from pagewire.processes import environment, module_command
from protos import pollers

OURS = "pagewire"
_DRIVERS = Path(__file__).parent / "drivers"
# The same room for KV in all peers: 46,600 tokens of SmolLM2-135M, twice what the workload ever holds.
_LIMITS = {"kv_gib": 1, "max_num_seqs": 64, "max_num_batched_tokens": 2048}


class Precision(Enum):
    """What the weights are; engines are compared with those of their own kind."""

    BF16 = "bf16"
    QUANTIZED = "quantized"


@dataclass(frozen=True, slots=True)
class Variant:
    """One engine in one way to run it.

    Attributes:
        peer: whose driver and environment it has; `ENGINES` may name it for all its variants.
        form: in which it loads the model, see `Peers.checkpoint`; empty for the folder itself.
        options: as its driver takes them.
        tests: of the workload, that it can play.
    """

    name: str
    peer: str
    precision: Precision = Precision.BF16
    form: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    tests: tuple[str, ...] = NAMES


_ONE_STREAM = ("w1",)
_INT8, _INT4 = "worker.quantization=int8", "worker.quantization=int4"
_NO_LOOKUP = "scheduler.num-speculative-tokens=0"
_VLLM = _LIMITS | {"max_model_len": 2048}
_LLAMACPP = {"kv_tokens": 32768, "slots": 32}
_STATIC = {"batching": "static"}
# Drafts that a peer looks up in the prompt and the answer so far, with its best settings; README.md tells more.
_OPENVINO_LOOKUP = {"lookup": {"num_assistant_tokens": 5, "max_ngram_size": 3}}
_VLLM_LOOKUP = {"lookup": {"num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}}
_LLAMACPP_LOOKUP = {
    "lookup": {"spec-type": "ngram-simple", "spec-ngram-simple-size-n": 3, "spec-ngram-simple-size-m": 8}
}
_TRANSFORMERS_LOOKUP = {"lookup": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 3}}
VARIANTS = (
    # As for a user who sets nothing: it has room for the KV of 16,384 tokens. No test holds more, except a w4 whose
    # requests come faster than they are served; some of them then wait or are preempted.
    Variant("pagewire", OURS, options={"settings": []}),
    # Ours looks drafts up by default, so the variant that does not has the longer name.
    Variant("pagewire-plain", OURS, options={"settings": [_NO_LOOKUP]}),
    Variant("openvino", "openvino", form="openvino-bf16", options=_LIMITS),
    Variant("openvino-lookup", "openvino", form="openvino-bf16", options=_LIMITS | _OPENVINO_LOOKUP),
    Variant("vllm", "vllm", form="copy", options=_VLLM),
    Variant("vllm-lookup", "vllm", form="copy", options=_VLLM | _VLLM_LOOKUP),
    Variant("llamacpp", "llamacpp", form="gguf-bf16", options=_LLAMACPP),
    # With many streams it takes 1.7 times as long as without drafts, and even that is not the best peer there.
    Variant("llamacpp-lookup", "llamacpp", form="gguf-bf16", options=_LLAMACPP | _LLAMACPP_LOOKUP, tests=_ONE_STREAM),
    Variant("transformers", "transformers", form="copy", options=_STATIC, tests=("w1", "w2", "w3")),
    # It drafts for a single sequence only, and not with continuous batching.
    Variant(
        "transformers-lookup",
        "transformers",
        form="copy",
        options=_STATIC | _TRANSFORMERS_LOOKUP,
        tests=_ONE_STREAM,
    ),
    Variant("transformers-continuous", "transformers", form="copy", options=_LIMITS | {"batching": "continuous"}),
    Variant(
        "pagewire-int8",
        OURS,
        Precision.QUANTIZED,
        options={"settings": [_INT8]},
        tests=_ONE_STREAM,
    ),
    Variant(
        "pagewire-int8-plain",
        OURS,
        Precision.QUANTIZED,
        options={"settings": [_INT8, _NO_LOOKUP]},
        tests=_ONE_STREAM,
    ),
    # It stands beside the others: the row's goal is for the variant of 8 bits.
    Variant("pagewire-int4", OURS, Precision.QUANTIZED, options={"settings": [_INT4]}, tests=_ONE_STREAM),
    Variant("openvino-int8", "openvino", Precision.QUANTIZED, "openvino-int8", _LIMITS, _ONE_STREAM),
    Variant(
        "openvino-int8-lookup",
        "openvino",
        Precision.QUANTIZED,
        "openvino-int8",
        _LIMITS | _OPENVINO_LOOKUP,
        _ONE_STREAM,
    ),
    Variant("llamacpp-q8_0", "llamacpp", Precision.QUANTIZED, "gguf-q8_0", _LLAMACPP, _ONE_STREAM),
    Variant(
        "llamacpp-q8_0-lookup", "llamacpp", Precision.QUANTIZED, "gguf-q8_0", _LLAMACPP | _LLAMACPP_LOOKUP, _ONE_STREAM
    ),
    Variant("llamacpp-q4_1", "llamacpp", Precision.QUANTIZED, "gguf-q4_1", _LLAMACPP, _ONE_STREAM),
    Variant(
        "llamacpp-q4_1-lookup", "llamacpp", Precision.QUANTIZED, "gguf-q4_1", _LLAMACPP | _LLAMACPP_LOOKUP, _ONE_STREAM
    ),
)


def select(names: Sequence[str], tests: Sequence[str], variants: Sequence[Variant] = VARIANTS) -> list[Variant]:
    """The variants of these names, or of peers of these names, that play one of the tests.

    Raises:
        ValueError: a name is not known.
    """
    known = {variant.peer for variant in variants} | {variant.name for variant in variants}
    unknown = [name for name in names if name not in known] + [test for test in tests if test not in NAMES]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: no engine or workload; there are {', '.join((*sorted(known), *NAMES))}"
        )
    chosen = [variant for variant in variants if {variant.name, variant.peer} & set(names)]
    return [variant for variant in chosen if set(variant.tests) & set(tests)]


def prepare(variant: Variant, model: Path, peers: Peers, logs: Path) -> Command:
    """The command of a variant's driver; installs its peer and converts the model if need be.

    Raises:
        InstallError: that failed.
    """
    options, log = dict(variant.options), logs / f"{variant.name}.log"
    program = str(_DRIVERS / f"drive_{variant.peer}.py")
    if variant.peer == OURS:
        options["log"] = str(logs / f"{variant.name}-cluster.log")
        # Its client polls its connections as our processes do.
        python, variables = module_command(OURS)[0], environment() | {"GRPC_EXPERIMENTS": pollers.EXPERIMENTS}
    else:
        python = str(peers.python(variant.peer))
        # Our paths are not for peers. They do not ask a hub for what is on disk.
        ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        variables = {name: value for name, value in os.environ.items() if name not in ours} | {"HF_HUB_OFFLINE": "1"}
    if variant.peer == "llamacpp":
        options["server"] = str(peers.llama_server())
    # Peers are installed with their bytecode. Without this, each of our processes would compile ours at each start.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    loaded = peers.checkpoint(model, variant.form) if variant.form else model
    return Command((python, program, str(loaded), json.dumps(options)), variables, log)
