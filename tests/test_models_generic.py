"""Models that are none of ours, through transformers' layers on the paged cache, and those that are refused."""

import json
import logging
import sys

import pytest
import torch
from models_fakes import PROMPTS, VOCABULARY_SIZE, assert_alike, ours, save, theirs, tiny_model
from real_worker import start_runner
from torch import nn
from worker_fakes import tiny_runner

from bench.in_process import make_runner
from worker.checkpoint import UnsupportedModel, read_config
from worker.models import generic
from worker.models.generic import GenericForCausalLM
from worker.models.llama import LlamaForCausalLM
from worker.models.registry import load_model

CPU = torch.device("cpu")
NUMBERS = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
GEMMA2 = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "query_pre_attn_scalar": 9,
    "sliding_window": 5,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 4.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 6.0],
    "original_max_position_embeddings": 16,
}
LONG = {"sliding_window": None, "rope_parameters": LONGROPE, "original_max_position_embeddings": 16}
GPT_OSS = {"num_local_experts": 2, "num_experts_per_tok": 1, "hidden_size": 32, "intermediate_size": 32}
CASES = {
    "gemma2": ("Gemma2Config", GEMMA2),
    "gemma2, no softcap": ("Gemma2Config", GEMMA2 | {"attn_logit_softcapping": None}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "phi3, windows": ("Phi3Config", {"sliding_window": 6}),
    "gpt-neox, a part of each head rotated": ("GPTNeoXConfig", {"rotary_pct": 0.5, "num_key_value_heads": 3}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "cohere, scaled logits": ("CohereConfig", {"logit_scale": 0.3}),
}


def make(case):
    import transformers

    name, changes = CASES[case]
    return tiny_model(getattr(transformers, name)(**(NUMBERS | {"tie_word_embeddings": False} | changes)))


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_log_probabilities_are_hugging_faces(tmp_path, case):
    model = make(case)
    runner = tiny_runner(save(model, tmp_path))
    assert isinstance(runner._model, GenericForCausalLM)
    model.set_attn_implementation("eager")
    expected = theirs(model)
    for budget in (5, 1000):
        assert_alike(ours(runner, budget=budget), expected)


def test_a_window_that_a_model_keeps_to_its_mask_is_refused_and_not_forgotten(tmp_path):
    import transformers

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.PhimoeConfig(**NUMBERS | experts, tie_word_embeddings=False, sliding_window=7)
    directory = save(tiny_model(config), tmp_path)
    with pytest.raises(UnsupportedModel, match="does not tell its attention of its sliding window"):
        served_by(directory, torch.float32)


def test_shards_and_bfloat16_are_read_alike(tmp_path):
    model = make("gemma2")
    model.set_attn_implementation("eager")
    save(model, tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_alike(ours(tiny_runner(tmp_path)), theirs(model))
    runner = tiny_runner(tmp_path, dtype="bfloat16")
    assert runner._model.embedding.weight.dtype == torch.bfloat16
    for found, exact in zip(ours(runner, num_tokens=1), theirs(model, num_tokens=1), strict=True):
        assert abs(found[0][1] - exact[0][1]) < 0.5


def served_by(directory, dtype, cache_dtype=None):
    return load_model(directory, read_config(directory), dtype, CPU, block_size=4, cache_dtype=cache_dtype)


@pytest.mark.parametrize("case", ["gemma2", "phi3"])
def test_products_in_bfloat16_are_packed_and_say_the_same(tmp_path, monkeypatch, case):
    directory = save(make(case), tmp_path)
    packed = served_by(directory, torch.bfloat16)
    assert not [module for module in packed._whole.modules() if type(module) is nn.Linear]
    monkeypatch.setattr(generic, "_pack", lambda plain, operations: None)
    plain = served_by(directory, torch.bfloat16)
    found, expected = (
        ours(start_runner(model, num_blocks=64, block_size=4).runner, num_tokens=1) for model in (packed, plain)
    )
    for [(_, value)], [(_, other_value)] in zip(found, expected, strict=True):
        assert abs(value - other_value) < 0.1


def test_weights_that_are_not_packed_are_no_longer_in_the_checkpoints_files(tmp_path):
    directory = save(make("phi3"), tmp_path)
    model = served_by(directory, torch.float32)
    expected = ours(start_runner(model, num_blocks=64, block_size=4).runner)
    (path,) = directory.glob("*.safetensors")
    path.write_bytes(bytes(path.stat().st_size))
    assert ours(start_runner(model, num_blocks=64, block_size=4).runner) == expected


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16])
def test_the_cache_may_be_narrower_than_the_weights(tmp_path, cache_dtype):
    model = make("gemma2")
    served = served_by(save(model, tmp_path), torch.float32, cache_dtype)
    runner = make_runner(served, num_blocks=64, block_size=4, dtype=cache_dtype, device=CPU)[0]
    model.set_attn_implementation("eager")
    for found, exact in zip(ours(runner, num_tokens=1), theirs(model, num_tokens=1), strict=True):
        assert abs(found[0][1] - exact[0][1]) < (0.3 if cache_dtype == torch.bfloat16 else 0.05)


@pytest.mark.parametrize("context_length", [16, 64])
def test_longrope_turns_by_the_served_context_and_not_by_the_step(tmp_path, context_length):
    import transformers

    model = tiny_model(transformers.Phi3Config(**(NUMBERS | LONG)))
    directory = save(model, tmp_path)
    served = load_model(directory, read_config(directory), torch.float32, CPU, context_length=context_length)
    rotation = served._layers.rotary_emb
    long = torch.tensor(LONGROPE["long_factor"])
    short = torch.tensor(LONGROPE["short_factor"])
    expected = 1e4 ** -(torch.arange(6) / 6) / (long if context_length > 16 else short)
    for length in (3, 64):
        rotation(torch.zeros(1), torch.arange(length)[None])
        torch.testing.assert_close(rotation.inv_freq, expected)
    # transformers turns a whole prompt by its own length, so those that are long enough are turned alike by both.
    prompts = [PROMPTS[0], PROMPTS[3]] if context_length > 16 else [PROMPTS[2]]
    runner = start_runner(served, num_blocks=64, block_size=4).runner
    assert_alike(ours(runner, prompts), theirs(model, prompts))


def test_the_log_says_which_path_and_why(tmp_path, caplog):
    import transformers

    caplog.set_level(logging.INFO)
    tiny_runner(save(make("phi3"), tmp_path / "phi3"))
    assert "transformers' layers on the paged cache, slower than our own, since Phi3ForCausalLM is none" in caplog.text
    tiny_runner(save(tiny_model(transformers.LlamaConfig(**NUMBERS)), tmp_path / "llama"))
    assert "model path: our own, since LlamaForCausalLM is one of ours" in caplog.text


def test_what_our_own_class_does_not_build_is_left_to_transformers(tmp_path, caplog):
    import transformers

    model = tiny_model(transformers.LlamaConfig(**(NUMBERS | {"hidden_act": "gelu"})))
    runner = tiny_runner(save(model, tmp_path))
    assert not isinstance(runner._model, LlamaForCausalLM)
    assert "our LlamaForCausalLM can not: activation 'gelu'" in caplog.text
    assert_alike(ours(runner, budget=6), theirs(model))


MAMBA = {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
LATENT = NUMBERS | {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "head_dim": 4,
    "first_k_dense_replace": 3,
}
BLOOM = {"vocab_size": 97, "hidden_size": 16, "n_layer": 2, "n_head": 2}


@pytest.mark.parametrize(
    "name, numbers, complaint",
    [
        ("MambaConfig", MAMBA, "state space"),
        ("DeepseekV3Config", LATENT, "latent attention"),
        ("BloomConfig", BLOOM, "do not call the attention"),
        (
            "GptOssConfig",
            NUMBERS | GPT_OSS,
            "takes s_aux",
        ),
    ],
)
def test_what_is_more_than_plain_attention_is_refused_in_words(tmp_path, name, numbers, complaint):
    import transformers

    config = getattr(transformers, name)(**numbers)
    with pytest.raises(UnsupportedModel, match=complaint):
        tiny_runner(save(tiny_model(config), tmp_path))


@pytest.mark.parametrize("architecture", ["NobodysForCausalLM", "BertModel"])
def test_an_unknown_architecture_is_refused_naming_ours(tmp_path, architecture):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": "nobodys"}))
    with pytest.raises(
        UnsupportedModel, match=rf"{architecture} is none of ours \(LlamaForCausalLM, .*does not know it"
    ):
        tiny_runner(tmp_path)


def test_a_quantized_checkpoint_is_refused_by_either_path(tmp_path):
    for architecture in ("LlamaForCausalLM", "Phi3ForCausalLM"):
        config = {"architectures": [architecture], "quantization_config": {"bits": 4}}
        with pytest.raises(UnsupportedModel, match="quantized checkpoints"):
            load_model(tmp_path, config, torch.float32, CPU)


def test_without_transformers_the_message_says_what_to_install(tmp_path, monkeypatch):
    directory = save(make("phi3"), tmp_path)
    monkeypatch.delitem(sys.modules, "worker.models.generic")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedModel, match=r"\.\[transformers\]"):
        load_model(directory, read_config(directory), torch.float32, CPU)
