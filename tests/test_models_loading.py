"""What the worker says of models other than Llama when it is started on them: context, dtype, cache."""

import pytest
import torch
from models_fakes import VOCABULARY_SIZE, save, tiny_model

from worker.checkpoint import ModelError
from worker.config import WorkerSettings
from worker.loading import load_worker

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
