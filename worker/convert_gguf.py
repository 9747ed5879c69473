"""`python -m worker.convert_gguf FILE.gguf OUT_DIR`: a Llama in GGUF becomes a Hugging Face checkpoint in bfloat16.

Quantized tensors are dequantized, the query and key rows go back into Hugging Face's rotary order, and the tokenizer is
rebuilt from the vocabulary, the merges and the name of its pre-tokenizer. OUT_DIR appears complete or not at all.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence
from torch import Tensor

from kernels.choice import torch_reference
from worker.models.llama import LlamaConfig, LlamaForCausalLM
from worker.weights import listed

_MODEL_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# GGUF's name of a pre-tokenizer -> what it does. GPT-2's splitting is ByteLevel's own.
_PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": ByteLevel(add_prefix_space=False),
    "smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
}
# Values of GGUF's token_type. Tokens of both are matched whole in a text; only the first are special, and not decoded.
_CONTROL_TOKEN = 3
_USER_DEFINED_TOKEN = 4
# Hugging Face's name of a token's id -> GGUF's word for it.
_GENERATION_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


class ConversionError(Exception):
    """The file cannot be converted; the message says why."""


def convert(source: Path, target: Path) -> None:
    """Writes the checkpoint.

    Raises:
        ConversionError: this converter does not know such a file, or `target` exists.
        OSError: a file cannot be read or written.
    """
    if target.exists():
        raise ConversionError(f"{target} exists already")
    _say(f"reading {source}")
    stored, metadata = _read(source)
    for key, supported in (("general.architecture", ["llama"]), ("tokenizer.ggml.model", ["gpt2"])):
        if metadata.get(key) not in supported:
            raise ConversionError(f"{key} is {metadata.get(key)!r}; only {', '.join(supported)} is supported")
    entries = {_name(entry.name): entry for entry in stored}
    config = _config(metadata, entries.keys())
    _check_tensors(entries, config)

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write_tokenizer(metadata, partial)
        tensors = dict(_tensors(entries, config))
        _write_json(partial / "config.json", config)
        _write_json(partial / "generation_config.json", _special_ids(metadata, _GENERATION_IDS))
        _say("writing the weights")
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        partial.chmod(0o755)  # mkdtemp's folders, and safetensors' files, are for their owner alone
        (partial / "model.safetensors").chmod(0o644)
        for path in partial.iterdir():  # else the name may outlive a power cut, but not the content
            with path.open("rb") as file:
                os.fsync(file.fileno())
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _say(f"wrote {target}")


def _read(source: Path) -> tuple[list[ReaderTensor], dict[str, Any]]:
    """Tensors and metadata."""
    with source.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ConversionError("it is no GGUF file")
    try:
        reader = GGUFReader(source)
        return reader.tensors, {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, LookupError, TypeError, OverflowError) as error:  # depending on what the bytes are
        raise ConversionError(f"it is damaged or cut short, so fetch it again: {error}") from error


def _name(name: str) -> str:
    """Hugging Face's name of a tensor."""
    match name.split("."):
        case ["blk", layer, part, ("weight" | "bias") as suffix] if part in _LAYER_TENSORS:
            return f"model.layers.{layer}.{_LAYER_TENSORS[part]}.{suffix}"
        case [part, ("weight" | "bias") as suffix] if part in _MODEL_TENSORS:
            return f"{_MODEL_TENSORS[part]}.{suffix}"
    raise ConversionError(f"tensor {name} has no place in a Llama checkpoint")


def _check_tensors(entries: dict[str, ReaderTensor], config: dict[str, Any]) -> None:
    """Refuses tensors whose names and shapes are not those that the worker will look for."""
    if config["num_hidden_layers"] > len(entries):
        raise ConversionError(f"llama.block_count is {config['num_hidden_layers']}, but it has {len(entries)} tensors")
    numbers, nowhere = LlamaConfig.from_json(config, context_length=1), torch.device("meta")
    try:
        model = LlamaForCausalLM(numbers, operations=torch_reference(), dtype=torch.bfloat16, device=nowhere)
        targets = {name: target for piece in model.pieces() for name, target in piece.tensors().items()}
    except RuntimeError as error:
        raise ConversionError(f"its metadata mean a model that cannot be: {error}") from error
    if missing := targets.keys() - entries.keys():
        raise ConversionError(f"it lacks {listed(missing)}; fetch it again, or another one")
    if unexpected := entries.keys() - targets.keys():
        raise ConversionError(f"it holds {listed(unexpected)}, which its metadata have no place for")
    for name, target in targets.items():
        assert isinstance(target, Tensor)  # a whole one, since no other rank shares it
        found, meant = entries[name].shape.tolist()[::-1], list(target.shape)
        if found != meant:
            raise ConversionError(f"{name} is {found}, but the metadata mean {meant}; fetch it again, or another one")


def _tensors(entries: dict[str, ReaderTensor], config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor in bfloat16, by its Hugging Face name."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for number, (name, entry) in enumerate(entries.items(), 1):
        try:
            values = dequantize(entry.data, entry.tensor_type)
        except NotImplementedError as error:
            raise ConversionError(f"tensor {entry.name} cannot be read: {error}") from error
        # Tensors that are not quantized come as a read-only view of the file, which torch does not accept.
        rows = torch.from_numpy(np.require(values, requirements="W"))
        projection = name.split(".")[-2]
        if projection in heads:
            rows = _restore_rotary_order(rows, heads[projection])
        yield name, rows.to(torch.bfloat16).contiguous()
        if number % 50 == 0 or number == len(entries):
            _say(f"dequantized {number} of {len(entries)} tensors")


def _restore_rotary_order(rows: Tensor, num_heads: int) -> Tensor:
    """GGUF pairs each row of a head with its neighbour, Hugging Face with the row half a head away."""
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(rows.shape)


def _config(metadata: dict[str, Any], tensor_names: Collection[str]) -> dict[str, Any]:
    if metadata.get("llama.rope.scaling.type", "none") != "none":
        raise ConversionError("scaled rotary positions are not supported")
    hidden_size = _number(metadata, "embedding_length")
    num_heads = _number(metadata, "attention.head_count")
    head_dim = _number(metadata, "attention.key_length", default=hidden_size // num_heads)
    if head_dim % 2:
        raise ConversionError(f"a head of {head_dim} values cannot be rotated in pairs")
    rope_theta = _number(metadata, "rope.freq_base", float, default=10_000.0)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(_list(metadata, "tokenizer.ggml.tokens")),
        "hidden_size": hidden_size,
        "intermediate_size": _number(metadata, "feed_forward_length"),
        "num_hidden_layers": _number(metadata, "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _number(metadata, "attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _number(metadata, "attention.layer_norm_rms_epsilon", float),
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "max_position_embeddings": _number(metadata, "context_length"),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensor_names,
        "mlp_bias": "model.layers.0.mlp.down_proj.bias" in tensor_names,
        "tie_word_embeddings": "lm_head.weight" not in tensor_names,
        **_special_ids(metadata, _GENERATION_IDS),
    }


def _number(
    metadata: dict[str, Any], name: str, kind: type[int] | type[float] = int, default: float | None = None
) -> Any:
    """A positive number of the architecture; without a default, it has to be there."""
    value = _lookup(metadata, f"llama.{name}", default)
    if not isinstance(value, kind) or not value > 0:
        raise ConversionError(f"llama.{name} is {value!r}, and has to be a positive {kind.__name__}")
    return value


def _list(metadata: dict[str, Any], key: str) -> list[Any]:
    value = _lookup(metadata, key)
    if not isinstance(value, list):
        raise ConversionError(f"{key} is {value!r}, and has to be a list")
    return value


def _lookup(metadata: dict[str, Any], key: str, default: Any = None) -> Any:
    value = metadata.get(key, default)
    if value is None:
        raise ConversionError(f"its metadata lack {key}")
    return value


def _special_ids(metadata: dict[str, Any], kinds: dict[str, str]) -> dict[str, int]:
    """The ids that the file has, by Hugging Face's names; see `_GENERATION_IDS`."""
    ids, num_tokens = {}, len(_list(metadata, "tokenizer.ggml.tokens"))
    for name, kind in kinds.items():
        key = f"tokenizer.ggml.{kind}_token_id"
        if key not in metadata:
            continue
        if metadata[key] not in range(num_tokens):
            raise ConversionError(f"{key} is {metadata[key]!r}, but there are {num_tokens} tokens")
        ids[name] = metadata[key]
    return ids


def _write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template."""
    tokens, kinds = _list(metadata, "tokenizer.ggml.tokens"), _list(metadata, "tokenizer.ggml.token_type")
    if len(kinds) != len(tokens):
        raise ConversionError(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    pre_tokenizer = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre_tokenizer not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ConversionError(f"tokenizer.ggml.pre is {pre_tokenizer!r}; only {known} are supported")
    merges = [tuple(merge.split(" ")) for merge in _list(metadata, "tokenizer.ggml.merges")]
    try:
        tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    except Exception as error:  # tokenizers has no exception of its own
        raise ConversionError(f"tokenizer.ggml.merges do not fit the tokens: {error}") from error
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre_tokenizer]
    tokenizer.decoder = ByteLevelDecoder()
    for chosen, is_special in ((_CONTROL_TOKEN, True), (_USER_DEFINED_TOKEN, False)):
        texts = [token for token, kind in zip(tokens, kinds, strict=True) if kind == chosen]
        tokenizer.add_tokens([AddedToken(text, special=is_special, normalized=False) for text in texts])
    tokenizer.save(str(folder / "tokenizer.json"))

    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    named = {name: tokens[token_id] for name, token_id in _special_ids(metadata, roles).items()}
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named})
    if template := metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    """Converts what the command line names; a failure is one line and status 1."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m worker.convert_gguf FILE.gguf OUT_DIR")
    source, target = (Path(os.path.abspath(argument)) for argument in sys.argv[1:])
    try:
        convert(source, target)
    except (ConversionError, OSError) as error:
        sys.exit(f"cannot convert {source}: {error}")


if __name__ == "__main__":
    main()
