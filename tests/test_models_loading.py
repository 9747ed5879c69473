"""What the worker says of models other than Llama when it is started on them: context, dtype, cache."""

import json
import re

import pytest
import torch
from models_fakes import VOCABULARY_SIZE, save, tiny_model
from safetensors.torch import load_file, save_file

from worker.checkpoint import ModelError, UnsupportedModel
from worker.config import WorkerSettings
from worker.loading import load_worker
from worker.models.llama import LlamaConfig

NUMBERS = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "eos_token_id": None,
    "pad_token_id": None,
}
MLP = {"intermediate_size": 20}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
MODELS = {
    "dynamic rope": ("LlamaConfig", NUMBERS | MLP | DYNAMIC),
    "gpt2": ("GPT2Config", NUMBERS),
    "opt": ("OPTConfig", NUMBERS | {"ffn_dim": 20}),
    "phi3": ("Phi3Config", NUMBERS | MLP),
}


def checkpoint(directory, name, dtype=torch.float32):
    import transformers

    config, numbers = MODELS[name]
    return save(tiny_model(getattr(transformers, config)(**numbers)).to(dtype), directory)


def load(directory, **changes):
    settings = {"model": str(directory), "num_gpu_blocks": 20, "swap_bytes": 0, "device": "cpu", "num_threads": 1}
    return load_worker(WorkerSettings(**(settings | changes))).info


@pytest.mark.parametrize("name", MODELS)
def test_the_dtype_is_the_checkpoints_or_the_one_told(tmp_path, name):
    directory = checkpoint(tmp_path, name, torch.bfloat16)
    assert (load(directory).dtype, load(directory).vocabulary_size) == ("bfloat16", VOCABULARY_SIZE)
    assert load(directory, dtype="float32").dtype == "float32"


@pytest.mark.parametrize("name, longest", [("dynamic rope", 128), ("gpt2", 64), ("opt", 64), ("phi3", 64)])
def test_the_context_is_the_one_told_within_what_the_model_reaches(tmp_path, name, longest):
    directory = checkpoint(tmp_path, name)
    assert load(directory).context_length == 64
    assert load(directory, max_model_len=40).context_length == 40
    assert load(directory, max_model_len=longest).context_length == longest
    with pytest.raises(ModelError, match=f"made for {longest}"):
        load(directory, max_model_len=longest + 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": "96"}, "vocabulary_size comes to '96', and has to be a positive integer"),
        ({"num_hidden_layers": None}, "has a value that cannot be"),
        ({"num_hidden_layers": 0}, "num_layers comes to 0"),
        ({"max_position_embeddings": None}, "has a value that cannot be"),
        ({"max_position_embeddings": 0}, "context_length comes to 0"),
        ({"head_dim": 8.0}, "head_dim comes to 8.0"),
        ({"head_dim": 7}, "head_dim comes to 7, and a rotation takes pairs of values"),
        ({"num_attention_heads": 0}, "has a value that cannot be"),
        ({"rms_norm_eps": None}, "norm_epsilon comes to None, and has to be a number"),
        ({"rope_parameters": "x"}, "has a value that cannot be"),
        ({"hidden_size": "DELETED"}, "lacks 'hidden_size'"),
    ],
    ids=str,
)
def test_a_number_in_config_json_that_is_none_is_named(tmp_path, changes, words):
    path = checkpoint(tmp_path, "dynamic rope") / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "DELETED"}))
    with pytest.raises(ModelError, match=re.escape(words)) as caught:
        load(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("kinds", [["sliding_attention"], ["sliding_attention", "chunked_attention"]])
def test_kinds_of_layers_that_are_not_one_of_ours_for_each_layer_are_refused(kinds):
    config = {"architectures": ["Qwen2ForCausalLM"], "layer_types": kinds, "use_sliding_window": True}
    with pytest.raises(UnsupportedModel, match="for each of 2 layers"):
        LlamaConfig.from_json(NUMBERS | MLP | config | {"sliding_window": 8})


@pytest.mark.parametrize(
    "name, tensor, value",
    [
        ("dynamic rope", "model.layers.1.mlp.down_proj.weight", "nan"),
        ("dynamic rope", "model.layers.0.input_layernorm.weight", "inf"),
        ("dynamic rope", "lm_head.weight", "nan"),
        ("gpt2", "transformer.h.1.attn.c_attn.bias", "-inf"),
        ("opt", "model.decoder.layers.0.fc1.weight", "nan"),
    ],
)
def test_weights_with_nan_or_infinity_are_refused_by_name(tmp_path, name, tensor, value):
    path = checkpoint(tmp_path, name, torch.bfloat16) / "model.safetensors"
    tensors = load_file(path)
    tensors[tensor].view(-1)[5] = float(value)
    save_file(tensors, path)
    complaint = (
        f"not finite: NaN or infinity is in {tensor} of {tmp_path} as bfloat16; choose another --dtype, or fetch"
    )
    with pytest.raises(ModelError, match=re.escape(complaint)):
        load(tmp_path)


def test_weights_that_a_narrower_dtype_does_not_hold_are_refused_by_name(tmp_path):
    path = checkpoint(tmp_path, "dynamic rope") / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] *= 1e5
    save_file(tensors, path)
    load(tmp_path)
    with pytest.raises(
        ModelError, match=r"infinity is in model\.norm\.weight of .* as float16; choose another --dtype"
    ):
        load(tmp_path, dtype="float16")


@pytest.mark.parametrize("name", ["dynamic rope", "gpt2", "opt"])
def test_weights_that_the_memory_cannot_hold_are_refused_before_they_are_read(tmp_path, monkeypatch, name):
    directory = checkpoint(tmp_path, name)
    least_bytes = 2 * sum(tensor.numel() for tensor in load_file(directory / "model.safetensors").values())
    monkeypatch.setattr("worker.weights.most_memory", lambda: least_bytes)
    load(directory, dtype="bfloat16")
    monkeypatch.setattr("worker.models.registry.load_weights", None)
    words = r"take 0\.\d+ MiB of memory or more, and 0\.\d+ MiB are left with all swap space: take a narrower --dtype"
    with pytest.raises(ModelError, match=words):
        load(directory, dtype="float32")


def test_where_nothing_tells_of_the_memory_weights_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("worker.weights.most_memory", lambda: None)
    assert load(checkpoint(tmp_path, "gpt2")).dtype == "float32"
