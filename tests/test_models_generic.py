"""Models that are none of ours, through transformers' layers on the paged cache, and those that are refused."""

import json
import logging
import sys

import pytest
import torch
from models_fakes import NUM_TOKENS, PROMPTS, VOCABULARY_SIZE, assert_alike, ours, save, theirs, tiny_model
from real_worker import start_runner
from safetensors.torch import load_file, save_file
from torch import nn
from worker_fakes import tiny_runner

from bench.in_process import make_runner
from kernels.choice import choose, with_int4_weights, with_int8_weights
from kernels.cpu_linear import Form
from worker.checkpoint import ModelError, UnsupportedModel, read_config
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
    monkeypatch.setattr(generic, "_pack", lambda *_, is_head: None)
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


def served_by_config(directory, config, **numbers):
    """Transformers' model, saved, and the one that serves it."""
    import transformers

    model = tiny_model(getattr(transformers, config)(**numbers))
    runner = tiny_runner(save(model, directory))
    assert isinstance(runner._model, GenericForCausalLM)
    model.set_attn_implementation("eager")
    return model, runner


GPT2 = {"vocab_size": VOCABULARY_SIZE, "n_embd": 36, "n_layer": 2, "n_head": 3, "n_positions": 64, "eos_token_id": None}
OPT = NUMBERS | {"ffn_dim": 44, "activation_function": "gelu", "word_embed_proj_dim": 20, "num_key_value_heads": 3}
GEMMA4 = NUMBERS | {
    "vocab_size_per_layer_input": VOCABULARY_SIZE,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 12,
    "num_kv_shared_layers": 0,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
GEMMA3 = {
    "text_config": NUMBERS | {"model_type": "gemma3_text", "sliding_window": 11},
    "vision_config": VISION | {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
    "mm_tokens_per_image": 4,
}


@pytest.mark.parametrize(
    "config, numbers",
    [
        ("GPT2Config", GPT2 | {"activation_function": "relu"}),
        ("GPTBigCodeConfig", GPT2),
        ("OPTConfig", OPT),
        ("Gemma4TextConfig", GEMMA4),
        ("Gemma3Config", GEMMA3),
    ],
)
def test_a_head_may_hand_on_whatever_else_its_layers_give(tmp_path, config, numbers):
    model, runner = served_by_config(tmp_path, config, **numbers)
    assert_alike(ours(runner), theirs(model))


@pytest.mark.parametrize("case", ["phi3", "mixtral"])
def test_weights_of_8_bits_are_no_fault_of_the_architecture(tmp_path, case):
    directory = save(make(case), tmp_path)
    served = load_model(directory, read_config(directory), torch.float32, CPU, wrap=with_int8_weights)
    assert not [module for module in served._whole.modules() if type(module) is nn.Linear]
    assert not [module for module in served._layers.modules() if type(module) is nn.Linear]
    found = ours(make_runner(served, num_blocks=64, block_size=16, dtype=torch.float32, device=CPU)[0])
    assert [len(generation) for generation in found] == [NUM_TOKENS] * len(PROMPTS)


def test_layers_have_weights_of_4_bits_and_the_head_keeps_8(tmp_path):
    import transformers

    operations = choose(CPU, torch.bfloat16, head_dim=16, block_size=16)
    if operations.note or operations.int4_linear is None:
        pytest.skip("this CPU has no products of 4 bits")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
    model = tiny_model(transformers.Phi3Config(**(NUMBERS | {"tie_word_embeddings": False} | sizes)))
    directory = save(model, tmp_path)
    served = load_model(directory, read_config(directory), torch.bfloat16, CPU, wrap=with_int4_weights)
    assert served._whole.lm_head._product.form is Form.INT8
    packed = [module for module in served._layers.modules() if isinstance(module, generic._Packed)]
    assert {module._product.form for module in packed} == {Form.INT4}
    found = ours(make_runner(served, num_blocks=64, block_size=16, dtype=torch.bfloat16, device=CPU)[0])
    assert [len(generation) for generation in found] == [NUM_TOKENS] * len(PROMPTS)


def test_an_architecture_that_says_something_else_is_refused_with_weights_of_8_bits_too(tmp_path, monkeypatch):
    directory = save(make("phi3"), tmp_path)
    monkeypatch.setattr(generic, "attend", lambda operations, q, *_: q)
    with pytest.raises(UnsupportedModel, match="are off by"):
        load_model(directory, read_config(directory), torch.float32, CPU, wrap=with_int8_weights)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "change, complaint",
    [
        (
            lambda path, t: path.write_bytes(path.read_bytes()[:-100]),
            "model.safetensors cannot be read.*fetch or save",
        ),
        (
            lambda path, t: path.write_bytes(b"garbage, not a header"),
            "model.safetensors cannot be read.*fetch or save",
        ),
        (lambda path, t: path.unlink(), "holds neither model.safetensors nor"),
        (lambda path, t: save_file(t | {NORM: t[NORM][1:].clone()}, path), rf"{NORM} is \[35\] in .* means \[36\]"),
        (lambda path, t: save_file({NORM: t[NORM]}, path, {"format": "pt"}), r"lacks lm_head.weight, .* more tensors"),
        (lambda path, t: save_file(t | {NORM: t[NORM] / 0}, path), rf"not finite: NaN or infinity is in {NORM} of /"),
    ],
)
def test_what_is_wrong_with_the_files_is_said_of_them_and_not_of_the_architecture(tmp_path, change, complaint):
    directory = save(make("phi3"), tmp_path)
    path = directory / "model.safetensors"
    change(path, {name: tensor.clone() for name, tensor in load_file(path).items()})
    with pytest.raises(ModelError, match=complaint) as caught:
        served_by(directory, torch.float32)
    assert "none of ours" not in str(caught.value)


def test_what_overflows_in_a_narrower_dtype_is_told_so(tmp_path):
    model = make("phi3")
    with torch.no_grad():
        model.model.norm.weight *= 1e4
        model.lm_head.weight *= 1e3
    with pytest.raises(ModelError, match="not finite: a value overflows as float16; choose another --dtype"):
        served_by(save(model, tmp_path), torch.float16)


def test_memory_that_is_not_there_is_said_to_be_wanted_for_the_weights(tmp_path):
    directory = save(make("phi3"), tmp_path)
    config = read_config(directory) | {"intermediate_size": 10**12}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"no memory for the weights of /.*you tried to allocate .*narrower --dtype"):
        served_by(directory, torch.float32)


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
    assert "our LlamaForCausalLM cannot: activation 'gelu'" in caplog.text
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
