"""Our own models against Hugging Face: greedy tokens and log-probabilities, in mixed batches of chunks and decodes."""

import json

import pytest
import torch
from models_fakes import PROMPTS, VOCABULARY_SIZE, assert_alike, ours, save, theirs, tiny_model
from safetensors.torch import load_file, save_file
from worker_fakes import tiny_runner

from worker.checkpoint import UnsupportedModel
from worker.layers.rotary import DefaultRope
from worker.models.gpt2 import GPT2Config, GPT2ForCausalLM
from worker.models.llama import LlamaConfig, LlamaForCausalLM
from worker.models.opt import OPTConfig, OPTForCausalLM

LLAMA_LIKE = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 30,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GPT2 = {"vocab_size": VOCABULARY_SIZE, "n_positions": 64, "n_embd": 30, "n_layer": 3, "n_head": 3, "eos_token_id": None}
OPT = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 30,
    "ffn_dim": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "eos_token_id": None,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}

# Every case: the class of transformers' config, what differs from the tiny one, and the class that is to run it.
CASES = {
    "llama": ("LlamaConfig", LLAMA_LIKE, {}),
    "llama, biased, 2 of 4 heads": (
        "LlamaConfig",
        LLAMA_LIKE,
        {
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_size": 40,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    "llama, yarn": ("LlamaConfig", LLAMA_LIKE, {"rope_parameters": YARN}),
    "smollm": ("LlamaConfig", LLAMA_LIKE, {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "mistral": ("MistralConfig", LLAMA_LIKE, {"sliding_window": 6, "head_dim": 14}),
    "mistral, window of one": ("MistralConfig", LLAMA_LIKE, {"sliding_window": 1}),
    "mistral, no window": ("MistralConfig", LLAMA_LIKE, {"sliding_window": None, "num_key_value_heads": 3}),
    "qwen2": ("Qwen2Config", LLAMA_LIKE, {"tie_word_embeddings": True}),
    "qwen2, windows from layer 1": ("Qwen2Config", LLAMA_LIKE, WINDOWED),
    "qwen2, windows by layer": (
        "Qwen2Config",
        LLAMA_LIKE,
        WINDOWED | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen3": ("Qwen3Config", LLAMA_LIKE, {"head_dim": 14, "num_attention_heads": 4}),
    "qwen3, windows": ("Qwen3Config", LLAMA_LIKE, WINDOWED | {"head_dim": 14, "attention_bias": True}),
    "gpt2": ("GPT2Config", GPT2, {}),
    "gpt2, scaled by layer, untied": (
        "GPT2Config",
        GPT2,
        {"scale_attn_by_inverse_layer_idx": True, "n_inner": 50, "tie_word_embeddings": False},
    ),
    "opt": ("OPTConfig", OPT, {}),
    "opt-350m": ("OPTConfig", OPT, {"do_layer_norm_before": False, "word_embed_proj_dim": 18}),
    "opt, untied": ("OPTConfig", OPT, {"tie_word_embeddings": False}),
    "opt, projected, no biases": (
        "OPTConfig",
        OPT,
        {"word_embed_proj_dim": 18, "enable_bias": False, "layer_norm_elementwise_affine": False},
    ),
}
CLASSES = {"GPT2Config": GPT2ForCausalLM, "OPTConfig": OPTForCausalLM}


def make(case):
    import transformers

    name, numbers, changes = CASES[case]
    return tiny_model(getattr(transformers, name)(**(numbers | changes)))


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_log_probabilities_are_hugging_faces(tmp_path, case):
    model = make(case)
    runner = tiny_runner(save(model, tmp_path))
    assert isinstance(runner._model, CLASSES.get(CASES[case][0], LlamaForCausalLM))
    expected = theirs(model)
    for budget in (4, 17, 1000):
        assert_alike(ours(runner, budget=budget), expected)


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen3", "gpt2", "opt-350m"])
def test_shards_and_bfloat16_are_read_alike(tmp_path, case):
    model = make(case)
    save(model, tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_alike(ours(tiny_runner(tmp_path)), theirs(model))
    found = ours(tiny_runner(tmp_path, dtype="bfloat16"), num_tokens=1)
    for ((token, value),), prompt in zip(found, PROMPTS, strict=True):
        with torch.inference_mode():
            exact = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        assert exact.max() - exact[token] < 1.0
        assert abs(value - exact[token].item()) < 0.5


@pytest.mark.parametrize("name", ["LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config"])
def test_numbers_left_out_of_a_config_have_hugging_faces_defaults(name):
    import transformers

    least = {key: LLAMA_LIKE[key] for key in ("vocab_size", "intermediate_size", "num_hidden_layers")}
    least |= {"hidden_size": 128, "num_attention_heads": 32}
    theirs = getattr(transformers, name)(**least)
    ours = LlamaConfig.from_json(least | {"architectures": [name.replace("Config", "ForCausalLM")]})
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 4)
    assert ours.norm_epsilon == theirs.rms_norm_eps
    assert ours.context_length == theirs.max_position_embeddings
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.windows == (getattr(theirs, "sliding_window", None),) * 3
    assert ours.rope == DefaultRope(theirs.rope_parameters["rope_theta"])


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_of_nothing_is_no_model_that_we_serve(window):
    config = LLAMA_LIKE | {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    with pytest.raises(UnsupportedModel, match=f"sliding_window is {window}: it has to be positive"):
        LlamaConfig.from_json(config)


@pytest.mark.parametrize("name, ours", [("GPT2Config", GPT2Config), ("OPTConfig", OPTConfig)])
def test_what_transformers_saves_of_its_defaults_reads_as_if_it_were_left_out(name, ours):
    import transformers

    full = getattr(transformers, name)().to_dict()
    needed = ("vocab_size", "hidden_size", "num_attention_heads", "ffn_dim", "num_hidden_layers")
    assert ours.from_json(full) == ours.from_json({key: full[key] for key in needed if key in full})


def by_config(directory, **changes):
    """Transformers' model of a checkpoint whose config.json now says something else."""
    from transformers import AutoModelForCausalLM

    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen3", "gpt2, scaled by layer, untied", "opt, untied"])
def test_a_head_of_its_own_is_not_tied_though_config_json_says_so(tmp_path, case):
    model = by_config(save(make(case), tmp_path), tie_word_embeddings=True)
    assert_alike(ours(tiny_runner(tmp_path)), theirs(model))


@pytest.mark.parametrize("kinds", [["full_attention", "sliding_attention", "full_attention"], ["full_attention"] * 3])
def test_a_mistral_with_windows_by_layer_is_a_ministral(tmp_path, kinds):
    model = by_config(save(make("mistral"), tmp_path), layer_types=kinds)
    assert_alike(ours(tiny_runner(tmp_path)), theirs(model))


def test_rope_scaling_that_was_added_to_a_config_of_transformers_5_counts(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    model = by_config(save(make("qwen3"), tmp_path), rope_scaling=yarn)
    assert_alike(ours(tiny_runner(tmp_path)), theirs(model))


def rename(directory, change):
    path = directory / "model.safetensors"
    renamed = {change(name): tensor for name, tensor in load_file(path).items()}
    save_file(renamed, path)
    return renamed


def test_gpt2_checkpoints_have_a_prefix_or_none_and_may_hold_the_causal_mask(tmp_path):
    model = make("gpt2")
    expected = theirs(model)
    save(model, tmp_path)
    assert all(name.startswith("transformer.") for name in load_file(tmp_path / "model.safetensors"))
    tensors = rename(tmp_path, lambda name: name.removeprefix("transformer."))
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_alike(ours(tiny_runner(tmp_path)), expected)


def test_opt_checkpoints_may_leave_out_the_first_part_of_the_prefix(tmp_path):
    model = make("opt-350m")
    save(model, tmp_path)
    assert "decoder.embed_tokens.weight" in rename(tmp_path, lambda name: name.removeprefix("model."))
    assert_alike(ours(tiny_runner(tmp_path)), theirs(model))
