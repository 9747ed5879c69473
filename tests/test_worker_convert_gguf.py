"""A tiny Llama written as GGUF, the way llama.cpp lays it out, comes back as the checkpoint it was."""

import json
import sys

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from worker_fakes import GREEDY, Row, step, tiny_llama, tiny_runner, tokens

from worker.convert_gguf import ConversionError, convert, main

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = sorted(ByteLevel.alphabet())[: 97 - len(SPECIAL) - 2]
VOCABULARY = [*SPECIAL, *LETTERS, "12", "ab"]
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def as_llama_cpp_orders(rows, num_heads):
    """The permutation of llama.cpp's convert_hf_to_gguf.py."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path, model, **changes):
    config, writer = model.config, gguf.GGUFWriter(path, changes.pop("architecture", "llama"))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.pop("pre_tokenizer", "smollm"))
    writer.add_token_list(VOCABULARY)
    writer.add_token_types(changes.pop("kinds", [3] * len(SPECIAL) + [1] * (len(VOCABULARY) - len(SPECIAL))))
    writer.add_token_merges(["1 2", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, parameter in model.named_parameters():
        stem, suffix = name.rsplit(".", 1)
        values = parameter.detach().numpy()
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        else:
            prefix = ""
        heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
        if stem in heads:
            values = as_llama_cpp_orders(values, heads[stem])
        values = values.astype(changes.get("dtype", np.float32))
        writer.add_tensor(f"{prefix}{GGUF_NAMES[stem]}.{suffix}", np.ascontiguousarray(values))
    for name in changes.pop("more_tensors", ()):
        writer.add_tensor(name, np.zeros(4, dtype=np.float32))
    for key in changes.pop("without", ()):
        del writer.kv_data[0][key]
    for key, value in changes.pop("metadata", {}).items():
        entry = writer.kv_data[0][key]
        entry.value, entry.type = value, gguf.GGUFValueType.get_type(value)
    for key, value in changes.pop("more_metadata", {}).items():
        writer.add_string(key, value)
    for name in changes.pop("lacks", ()):
        del writer.tensors[0][name]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
def test_weights_and_numbers_come_back(tmp_path, changes):
    model = tiny_llama(**changes)
    out = tmp_path / "new" / "checkpoint"
    convert(write_gguf(tmp_path / "tiny.gguf", model), out)
    converted = load_file(out / "model.safetensors")
    theirs = dict(model.named_parameters())
    assert converted.keys() == theirs.keys()
    for name, tensor in converted.items():
        assert torch.equal(tensor, theirs[name].detach().bfloat16()), name
    # And the worker reads it: nothing is missing in config.json.
    assert len(tokens(tiny_runner(out).execute(step(Row(1, [5, 17], [0]), new={1: GREEDY})))) == 1
    assert sorted(path.name for path in out.parent.iterdir()) == ["checkpoint"]


def test_numbers_that_a_file_leaves_out_are_those_that_gguf_means(tmp_path):
    out, model = tmp_path / "checkpoint", tiny_llama(num_key_value_heads=4)
    left_out = ["llama.attention.key_length", "llama.attention.head_count_kv", "llama.rope.freq_base"]
    convert(write_gguf(tmp_path / "tiny.gguf", model, without=left_out), out)
    config = json.loads((out / "config.json").read_text())
    assert (config["head_dim"], config["num_key_value_heads"]) == (8, 4)
    assert config["rope_parameters"]["rope_theta"] == 10_000


def test_digits_stand_alone_special_tokens_are_whole_and_settings_come_along(tmp_path):
    out = tmp_path / "checkpoint"
    convert(write_gguf(tmp_path / "tiny.gguf", tiny_llama()), out)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>ab12").tokens == ["<|im_start|>", "ab", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("ab12").ids) == "ab12"
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"], settings["pad_token"]) == (SPECIAL[1], SPECIAL[2], SPECIAL[2])
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"


def test_tokens_that_a_user_defined_are_whole_and_come_out_as_text(tmp_path):
    out = tmp_path / "checkpoint"
    kinds = [4, 3, 3] + [1] * (len(VOCABULARY) - 3)
    convert(write_gguf(tmp_path / "tiny.gguf", tiny_llama(), kinds=kinds), out)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    encoded = tokenizer.encode("ab<|endoftext|><|im_start|>")
    assert encoded.tokens == ["ab", "<|endoftext|>", "<|im_start|>"]
    assert tokenizer.decode(encoded.ids) == "ab<|endoftext|>"


def test_without_the_fix_numbers_would_be_merged(tmp_path):
    out = tmp_path / "checkpoint"
    convert(write_gguf(tmp_path / "tiny.gguf", tiny_llama(), pre_tokenizer="gpt-2"), out)
    assert Tokenizer.from_file(str(out / "tokenizer.json")).encode("ab12").tokens == ["ab", "12"]


NEEDED = [
    "llama.context_length",
    "llama.embedding_length",
    "llama.block_count",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges",
]


@pytest.mark.parametrize(
    "changes, complaint",
    [
        (
            {"architecture": "gemma", "more_tensors": ["blk.0.post_ffw_norm.weight"]},
            "general.architecture is 'gemma'; only llama is supported",
        ),
        ({"pre_tokenizer": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe'"),
        ({"more_tensors": ["rope_freqs.weight"]}, "tensor rope_freqs.weight has no place"),
        ({"more_tensors": ["blk.0.attn_q_norm.weight"]}, "tensor blk.0.attn_q_norm.weight has no place"),
        ({"more_tensors": ["undotted"]}, "tensor undotted has no place"),
        ({"more_tensors": ["blk.7.attn_norm.weight"]}, "holds model.layers.7.input_layernorm.weight, which"),
        ({"lacks": ["blk.1.ffn_up.weight"]}, "lacks model.layers.1.mlp.up_proj.weight; fetch it again"),
        (
            {"metadata": {"llama.feed_forward_length": 60}},
            r"gate_proj.weight is \[48, 32\], but the metadata mean \[60",
        ),
        ({"metadata": {"llama.block_count": 99}}, "llama.block_count is 99, but it has 21 tensors"),
        ({"metadata": {"llama.attention.head_count": 0}}, "head_count is 0, and has to be a positive int"),
        ({"metadata": {"llama.attention.key_length": 7}}, "a head of 7 values"),
        ({"metadata": {"tokenizer.ggml.eos_token_id": 97}}, "eos_token_id is 97, but there are 97 tokens"),
        ({"metadata": {"tokenizer.ggml.merges": ["1 zz"]}}, "merges do not fit the tokens"),
        ({"metadata": {"tokenizer.ggml.merges": "1 2"}}, "merges is '1 2', and has to be a list"),
        ({"dtype": np.int32}, "tensor token_embd.weight cannot be read: .*I32"),
        ({"more_metadata": {"llama.rope.scaling.type": "linear"}}, "scaled rotary positions are not supported"),
        (
            {"metadata": {"llama.embedding_length": 2**31 - 1, "llama.feed_forward_length": 2**31 - 1}},
            "its metadata mean a model that cannot be",
        ),
        ({"kinds": [1, 1]}, "token_type has 2 entries for 97 tokens"),
        *(({"without": [key]}, f"its metadata lack {key}$") for key in NEEDED),
    ],
)
def test_a_file_that_is_not_known_is_refused_and_leaves_nothing(tmp_path, changes, complaint):
    source = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), **changes)
    with pytest.raises(ConversionError, match=complaint):
        convert(source, tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.03, 0.5, 0.99])
def test_a_file_that_is_cut_short_is_told_so_and_leaves_nothing(tmp_path, share):
    source = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    content = source.read_bytes()
    source.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ConversionError, match="damaged or cut short, so fetch it again"):
        convert(source, tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == [source]


def test_the_command_line_says_what_is_wrong_in_one_line(tmp_path, monkeypatch):
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"no gguf at all, though long enough to be looked at")
    for arguments, complaint in (
        ((), "usage: "),
        ((garbage, tmp_path / "out"), "is no GGUF file"),
        ((garbage, tmp_path), "exists already"),
        ((tmp_path / "nothing", tmp_path / "out"), "No such file"),
    ):
        monkeypatch.setattr(sys, "argv", ["convert_gguf", *map(str, arguments)])
        with pytest.raises(SystemExit, match=complaint):
            main()
