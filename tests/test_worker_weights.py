"""From a checkpoint's files to a model's tensors, and every way in which that can be impossible."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from worker_fakes import tiny_checkpoint, tiny_llama, tiny_runner

from kernels.choice import choose
from worker.checkpoint import (
    ModelError,
    UnsupportedModel,
    checkpoint_dtype,
    checkpoint_name,
    find_checkpoint,
    read_config,
)
from worker.layers.linear import Linear
from worker.layers.rotary import RotaryTable
from worker.models.llama import LlamaConfig, LlamaForCausalLM
from worker.weights import Piece, load_weights, memory_for_weights

CPU = torch.device("cpu")


@pytest.fixture
def directory(tmp_path):
    return tiny_checkpoint(tmp_path)


def change_config(directory, **changes):
    config = read_config(directory) | changes
    (directory / "config.json").write_text(json.dumps(config))


def change_weights(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def weights_of(directory, dtype="float32"):
    """Before they are packed, after which the plain ones are let go."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "_join_layers", lambda _: None)
        patch.setattr(Linear, "pack", lambda *_: None)
        model = tiny_runner(directory, dtype=dtype)._model
    return {name: tensor for piece in model.pieces() for name, tensor in piece.tensors().items()}, model


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
def test_every_tensor_of_a_checkpoint_arrives_in_its_place(tmp_path, changes):
    ours, _ = weights_of(tiny_checkpoint(tmp_path, **changes))
    theirs = dict(tiny_llama(**changes).named_parameters())
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_a_layer_is_packed_before_the_next_one_takes_memory(directory, monkeypatch):
    operations = choose(CPU, torch.float32, head_dim=8, block_size=16)
    config = LlamaConfig.from_json(read_config(directory))
    model = LlamaForCausalLM(config, operations=operations, dtype=torch.float32, device=CPU)
    last = [layer.mlp.down for layer in model.layers]
    held = {}

    def pack(linear, operations):
        held[linear] = ["weight" in vars(down) for down in last]
        pack_it(linear, operations)

    pack_it = Linear.pack
    monkeypatch.setattr(Linear, "pack", pack)
    load_weights(directory, model.pieces(), model.leaves_out)
    assert [held[down] for down in last] == [[True, False], [True, True]]


def test_shards_are_read_through_their_index(tmp_path):
    tiny_checkpoint(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    sharded, _ = weights_of(tmp_path / "sharded")
    single, _ = weights_of(tiny_checkpoint(tmp_path / "single"))
    assert all(torch.equal(sharded[name], single[name]) for name in single)


def test_weights_are_converted_to_the_wanted_dtype_on_the_way(directory):
    ours, _ = weights_of(directory, "float16")
    theirs = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(ours[name], theirs[name].half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tied_checkpoint_may_hold_the_head_once_more(tmp_path, dtype):
    directory = tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    change_weights(
        directory, lambda t: t.__setitem__("lm_head.weight", t["model.embed_tokens.weight"].to(dtype, copy=True))
    )
    _, model = weights_of(directory)
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("other", [torch.zeros(97, 32), torch.zeros(97, 32, dtype=torch.bfloat16)])
def test_a_head_that_is_not_the_embedding_is_taken_whatever_config_json_says(tmp_path, caplog, other):
    directory = tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    change_weights(directory, lambda t: t.__setitem__("lm_head.weight", other))
    ours, _ = weights_of(directory)
    assert torch.equal(ours["lm_head.weight"], torch.zeros(97, 32))
    assert "set tie_word_embeddings to false" in caplog.text


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lacks model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.__setitem__("extra", torch.zeros(1)), "holds extra, which"),
        (lambda t: t.__setitem__("model.norm.weight", torch.zeros(5)), r"model.norm.weight is \[5\]"),
        (lambda t: [t.pop(name) for name in list(t)[:9]], "and 6 more tensors"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(directory, change, complaint):
    change_weights(directory, change)
    with pytest.raises(ModelError, match=complaint):
        weights_of(directory)


def test_a_tensor_that_a_checkpoint_has_under_two_names_is_refused(tmp_path):
    save_file({"norm": torch.zeros(2), "model.norm": torch.ones(2)}, tmp_path / "model.safetensors")
    pieces = [Piece(lambda: {"norm": torch.empty(2)}, lambda: None)]
    with pytest.raises(ModelError, match="holds norm, which"):
        load_weights(tmp_path, pieces, lambda name: False, lambda name: name.removeprefix("model."))


def test_memory_that_is_not_there_is_said_to_be_wanted_for_the_weights(directory):
    change_config(directory, intermediate_size=10**12)
    with pytest.raises(ModelError, match=r"no memory for the weights of /.*you tried to allocate .*narrower --dtype"):
        weights_of(directory)


def test_only_an_error_for_want_of_memory_is_said_to_be_one(directory):
    wanted = r"no memory for the weights of /.*: Tried to allocate 2\.00 GiB; take a narrower --dtype"
    with pytest.raises(ModelError, match=wanted), memory_for_weights(directory):
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
    with pytest.raises(RuntimeError, match=r"^an index is out of range$"), memory_for_weights(directory):
        raise RuntimeError("an index is out of range")


def test_files_that_are_missing_or_broken_are_refused(directory):
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot be read"):
        weights_of(directory)
    weights.rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights are not read"):
        weights_of(directory)
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ModelError, match=r"gone.safetensors cannot be read"):
        weights_of(directory)
    (directory / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match="is no index"):
        weights_of(directory)


def test_config_json_is_read_or_refused(directory):
    assert checkpoint_dtype(read_config(directory)) == torch.float32
    assert checkpoint_dtype({"torch_dtype": "bfloat16"}) == torch.bfloat16
    assert checkpoint_dtype({}) == torch.float32
    with pytest.raises(UnsupportedModel, match="'float8': choose by --dtype one of"):
        checkpoint_dtype({"dtype": "float8"})
    with pytest.raises(UnsupportedModel, match="choose by --dtype one of"):
        checkpoint_dtype({"dtype": ["bfloat16"]})
    for content, complaint in (("{", "is not JSON"), ("[]", "is not a JSON object")):
        (directory / "config.json").write_text(content)
        with pytest.raises(ModelError, match=complaint):
            read_config(directory)
    with pytest.raises(ModelError, match=r"no readable config.json"):
        read_config(directory / "nowhere")


def test_a_model_is_a_directory_or_a_name_on_the_hub(directory, monkeypatch):
    assert find_checkpoint(str(directory)) == directory
    assert checkpoint_name(f"{directory}/") == directory.name
    assert checkpoint_name("owner/Name-1B") == "Name-1B"
    with pytest.raises(ModelError, match="there is no directory /no/where"):
        find_checkpoint("/no/where")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: directory / name)
    assert find_checkpoint("owner/name") == directory / "owner" / "name"

    def fail(*_, **__):
        raise ValueError("no such\nname")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(
        ModelError, match=r"'a b' is neither a directory here nor a model that the hub gives us: no such$"
    ):
        find_checkpoint("a b")

    def fail_without_a_word(*_, **__):
        raise OSError

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail_without_a_word)
    with pytest.raises(ModelError, match=r"gives us: OSError$"):
        find_checkpoint("a b")


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope type 'proportional'"),
    ],
)
def test_what_is_not_built_is_refused_in_words(directory, changes, complaint):
    change_config(directory, **changes)
    with pytest.raises(UnsupportedModel, match=complaint):
        LlamaConfig.from_json(read_config(directory))


def test_numbers_left_out_have_hugging_faces_defaults():
    from transformers import LlamaConfig as TheirConfig

    least = {
        "vocab_size": 9,
        "hidden_size": 8,
        "intermediate_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    ours, theirs = LlamaConfig.from_json(least), TheirConfig(**least)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == theirs.head_dim
    assert ours.norm_epsilon == theirs.rms_norm_eps
    assert ours.context_length == theirs.max_position_embeddings
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
@pytest.mark.parametrize("form", ["transformers 5", "transformers 4"])
def test_rotary_tables_equal_hugging_faces_for_each_rope_type(scaling, form):
    from transformers import LlamaConfig as TheirConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    numbers = {
        "vocab_size": 9,
        "hidden_size": 64,
        "intermediate_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
    }
    theirs = LlamaRotaryEmbedding(TheirConfig(**numbers, rope_parameters={"rope_theta": 500.0, **scaling}))
    if form == "transformers 5":
        numbers["rope_parameters"] = {"rope_theta": 500.0, **scaling}
    else:
        numbers |= {"rope_theta": 500.0, "rope_scaling": None if scaling["rope_type"] == "default" else scaling}
    config = LlamaConfig.from_json(numbers)
    positions = torch.tensor([0, 1, 77, 511])
    cos, sin = theirs(torch.zeros(1), positions[None])
    table = RotaryTable(config.rope, config.head_dim, 512, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(table.at(positions)[0].repeat(1, 2), cos[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(table.at(positions)[1].repeat(1, 2), sin[0], atol=1e-4, rtol=0)
