"""`python -m worker.convert_gguf FILE.gguf OUT_DIR`: a Llama in GGUF becomes a Hugging Face checkpoint in bfloat16.

Quantized tensors are dequantized, the query and key rows go back into Hugging Face's rotary order, and the tokenizer is
rebuilt from the vocabulary, the merges and the name of its pre-tokenizer. OUT_DIR appears complete or not at all.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence
from torch import Tensor

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
_CONTROL_TOKEN = 3  # GGUF's token_type


class ConversionError(Exception):
    """The file can not be converted; the message says why."""


def convert(source: Path, target: Path) -> None:
    """Writes the checkpoint.

    Raises:
        ConversionError: the file is none that this converter knows, or `target` exists.
        OSError: a file can not be read or written.
    """
    if target.exists():
        raise ConversionError(f"{target} exists already")
    _say(f"reading {source}")
    try:
        reader = GGUFReader(source)
    except ValueError as error:
        raise ConversionError(f"{source} is no GGUF file: {error}") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    for key, supported in (("general.architecture", ["llama"]), ("tokenizer.ggml.model", ["gpt2"])):
        if metadata.get(key) not in supported:
            raise ConversionError(f"{key} is {metadata.get(key)!r}; only {', '.join(supported)} is supported")

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write_tokenizer(metadata, partial)
        tensors = dict(_tensors(reader, metadata))
        _write_json(partial / "config.json", _config(metadata, set(tensors)))
        _write_json(partial / "generation_config.json", _special_ids(metadata))
        _say("writing the weights")
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        partial.chmod(0o755)  # mkdtemp's folders, and safetensors' files, are for their owner alone
        (partial / "model.safetensors").chmod(0o644)
        for path in partial.iterdir():  # else the name may outlive a power cut, and the content not
            with path.open("rb") as file:
                os.fsync(file.fileno())
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _say(f"wrote {target}")


def _tensors(reader: GGUFReader, metadata: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor in bfloat16, by its Hugging Face name."""
    num_heads = metadata["llama.attention.head_count"]
    heads = {"attn_q": num_heads, "attn_k": metadata.get("llama.attention.head_count_kv", num_heads)}
    for number, entry in enumerate(reader.tensors, 1):
        *layer, part, suffix = entry.name.split(".")
        names = _LAYER_TENSORS if layer else _MODEL_TENSORS
        if part not in names or suffix not in ("weight", "bias") or (layer and layer[0] != "blk"):
            raise ConversionError(f"tensor {entry.name} has no place in a Llama checkpoint")
        prefix = f"model.layers.{layer[1]}." if layer else ""
        # Tensors that are not quantized come as a read-only view of the file, which torch does not take.
        values = torch.from_numpy(np.require(dequantize(entry.data, entry.tensor_type), requirements="W"))
        if part in heads:
            values = _restore_rotary_order(values, heads[part])
        yield f"{prefix}{names[part]}.{suffix}", values.to(torch.bfloat16).contiguous()
        if number % 50 == 0 or number == len(reader.tensors):
            _say(f"dequantized {number} of {len(reader.tensors)} tensors")


def _restore_rotary_order(rows: Tensor, num_heads: int) -> Tensor:
    """GGUF pairs each row of a head with its neighbour, Hugging Face with the row half a head away."""
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(rows.shape)


def _config(metadata: dict[str, Any], tensor_names: set[str]) -> dict[str, Any]:
    def number(name: str, default: Any = None) -> Any:
        return metadata.get(f"llama.{name}", default)

    hidden_size, num_heads = number("embedding_length"), number("attention.head_count")
    if number("rope.scaling.type", "none") != "none":
        raise ConversionError("scaled rotary positions are not supported")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": number("attention.head_count_kv", num_heads),
        "head_dim": number("attention.key_length", hidden_size // num_heads),
        "hidden_act": "silu",
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": number("rope.freq_base", 10_000.0)},
        "max_position_embeddings": number("context_length"),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensor_names,
        "mlp_bias": "model.layers.0.mlp.down_proj.bias" in tensor_names,
        "tie_word_embeddings": "lm_head.weight" not in tensor_names,
        **_special_ids(metadata),
    }


def _special_ids(metadata: dict[str, Any]) -> dict[str, int]:
    kinds = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{kind}_token_id") for name, kind in kinds.items()}
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def _write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    pre_tokenizer = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre_tokenizer not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ConversionError(f"tokenizer.ggml.pre is {pre_tokenizer!r}; only {known} are supported")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre_tokenizer]
    tokenizer.decoder = ByteLevelDecoder()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))

    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {name: metadata.get(f"tokenizer.ggml.{kind}_token_id") for name, kind in roles.items()}
    named = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
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
