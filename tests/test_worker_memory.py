"""What the worker takes of the machine's memory, at its peak, in processes of its own."""

import ctypes
import json
import math
import sys

import pytest
import torch
from peak_memory import measure, resident_bytes
from safetensors.torch import save_file
from worker_fakes import tiny_checkpoint

from worker.loading import give_back_freed_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MIB = 1 << 20
# What libraries and the allocator keep beside.
SLACK = 40 * MIB
# 8 layers of 32 MiB, and 2 * 8 MiB of embedding and head, in bfloat16.
SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 4096}
NUMBERS = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64, "max_position_embeddings": 128}
MODEL_BYTES = 272 * MIB
# An activation that our own Llama does not have.
BY_TRANSFORMERS = {"hidden_act": "gelu"}


def layer_tensors(index):
    size, mlp_size = SIZES["hidden_size"], SIZES["intermediate_size"]
    shapes = {f"self_attn.{name}_proj": (size, size) for name in "qkvo"}
    shapes |= {f"mlp.{name}_proj": (mlp_size, size) for name in ("gate", "up")}
    shapes |= {"mlp.down_proj": (size, mlp_size), "input_layernorm": (size,), "post_attention_layernorm": (size,)}
    values = torch.randn(mlp_size * size).mul_(0.02).bfloat16()
    return {
        f"model.layers.{index}.{name}.weight": values[: math.prod(shape)].view(shape).clone()
        for name, shape in shapes.items()
    }


def large_checkpoint(directory, num_files, **changes):
    """A random Llama in so many files of about the same size; and beside it a tiny one to warm up with."""
    layers = [layer_tensors(index) for index in range(SIZES["num_hidden_layers"])]
    ends = torch.randn(SIZES["vocab_size"], SIZES["hidden_size"]).bfloat16()
    layers[0] |= {"model.embed_tokens.weight": ends, "model.norm.weight": ends[0].clone()}
    layers[-1] |= {"lm_head.weight": ends.clone()}
    files, weight_map = [{} for _ in range(num_files)], {}
    for index, tensors in enumerate(layers):
        number = index * num_files // len(layers)
        files[number] |= tensors
        weight_map |= dict.fromkeys(tensors, f"{number}.safetensors")
    directory.mkdir()
    for number, tensors in enumerate(files):
        save_file(tensors, directory / ("model.safetensors" if num_files == 1 else f"{number}.safetensors"))
    if num_files > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", **SIZES, **NUMBERS}
    config |= changes
    (directory / "config.json").write_text(json.dumps(config))
    tiny_checkpoint(directory / "tiny", dtype=torch.bfloat16, **changes)
    return directory


def largest_file_bytes(directory):
    return max(path.stat().st_size for path in directory.glob("*.safetensors"))


@pytest.mark.parametrize("num_files", [1, 4])
def test_loading_takes_the_model_and_a_shard_of_64_mib(tmp_path, num_files):
    growth, _ = measure("load", large_checkpoint(tmp_path / "large", num_files))
    # Some instruction sets compute with weights of 12 bits.
    assert 12 / 16 * MODEL_BYTES < growth < MODEL_BYTES + 64 * MIB + SLACK


@pytest.mark.long
def test_loading_by_transformers_takes_the_model_and_a_shard(tmp_path):
    directory = large_checkpoint(tmp_path / "large", 4, **BY_TRANSFORMERS)
    growth, _ = measure("load", directory)
    assert MODEL_BYTES < growth < MODEL_BYTES + largest_file_bytes(directory) + SLACK


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another malloc than glibc's")
def test_what_was_freed_below_something_that_is_kept_goes_back_to_the_system():
    library, size = ctypes.CDLL(None), 64 << 10
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [library.malloc(size) for _ in range(2000)]
    for piece in pieces:
        ctypes.memset(piece, 1, size)
    for piece in pieces[:-1]:
        library.free(piece)
    before = resident_bytes()
    give_back_freed_memory()
    assert before - resident_bytes() > 100 * MIB
    library.free(pieces[-1])


@pytest.mark.parametrize("num_tokens", [4000, pytest.param(8000, marks=pytest.mark.long)])
def test_log_probabilities_of_a_long_prompt_do_not_double_the_worker(tmp_path, num_tokens):
    """All logits at once would be 0.8 or 1.5 GB."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 49_152, "max_position_embeddings": 8192}
    directory = tiny_checkpoint(tmp_path, **sizes, head_dim=16)
    without, base = measure("prompt", directory, num_tokens, False)
    growth, _ = measure("prompt", directory, num_tokens, True)
    assert base + growth < 2 * (base + without)
    assert growth - without < 300 * MIB
