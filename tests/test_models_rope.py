"""Rope types against Hugging Face's tables, and the context that each serves."""

import pytest
import torch
from test_worker_weights import LLAMA3

from worker.checkpoint import UnsupportedModel
from worker.layers.rotary import RotaryTable
from worker.models.llama import LlamaConfig

NUMBERS = {
    "vocab_size": 9,
    "hidden_size": 64,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.01 * index for index in range(16)],
    "long_factor": [1.5 + 0.5 * index for index in range(16)],
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}


def their_table(parameters, positions):
    """cos and sin, [num_positions, head_dim / 2], of a sequence as long as its last position says."""
    from transformers import LlamaConfig as TheirConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaRotaryEmbedding(TheirConfig(**NUMBERS, rope_parameters=parameters))
    cos, sin = theirs(torch.zeros(1), positions[None])
    return cos[0, :, :16], sin[0, :, :16]


def our_table(parameters, positions, context_length=None):
    config = LlamaConfig.from_json(NUMBERS | {"rope_parameters": parameters}, context_length)
    return RotaryTable(
        config.rope, config.head_dim, config.context_length, dtype=torch.float32, device=torch.device("cpu")
    ).at(positions)


@pytest.mark.parametrize(
    "parameters",
    [
        YARN,
        YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False},
        YARN | {"attention_factor": 0.7},
        YARN | {"mscale": 0.8, "mscale_all_dim": 0.5},
        YARN | {"rope_theta": 20.0},
        LONG,
        LONG | {"attention_factor": 1.3},
        LONG | {"factor": 2.0},
        DYNAMIC,
    ],
)
def test_tables_are_hugging_faces_at_the_full_context(parameters):
    positions = torch.tensor([0, 1, 77, 255])
    for ours, theirs in zip(our_table(parameters, positions), their_table(parameters, positions), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_a_context_no_longer_than_the_original_turns_by_short_factors():
    positions = torch.tensor([0, 1, 63])
    for ours, theirs in zip(our_table(LONG, positions, 64), their_table(LONG, positions), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_the_dynamic_type_serves_longer_contexts_when_asked_and_then_turns_as_hugging_face_does_at_their_end():
    positions = torch.tensor([0, 1, 300, 599])
    for ours, theirs in zip(our_table(DYNAMIC, positions, 600), their_table(DYNAMIC, positions), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "parameters, asked, served",
    [
        (DYNAMIC, None, 256),
        (DYNAMIC, 600, 600),
        (DYNAMIC, 9999, 768),
        (YARN, None, 256),
        (YARN | {"original_max_position_embeddings": 256}, None, 1024),
        (YARN, 9999, 256),
        (LONG, 100, 100),
        ({"rope_type": "default"}, 300, 256),
    ],
)
def test_the_context_served_is_the_one_asked_for_within_what_the_rope_type_reaches(parameters, asked, served):
    assert LlamaConfig.from_json(NUMBERS | {"rope_parameters": parameters}, asked).context_length == served


def test_rotating_a_part_of_a_head_is_not_ours():
    with pytest.raises(UnsupportedModel, match="a part of each head"):
        LlamaConfig.from_json(NUMBERS | {"partial_rotary_factor": 0.5})


def test_yarn_with_a_theta_whose_logarithm_is_none_is_refused_in_words():
    with pytest.raises(ValueError, match="rope_theta is 1, and has to be more than 1 for rope type 'yarn'"):
        LlamaConfig.from_json(NUMBERS | {"rope_parameters": YARN | {"rope_theta": 1}})


@pytest.mark.parametrize(
    "scaling, complaint",
    [
        (LINEAR | {"factor": 0}, "factor of rope_scaling is 0, and has to be a positive number"),
        (LINEAR | {"factor": -2.0}, "factor of rope_scaling is -2.0"),
        (LINEAR | {"factor": "2"}, "factor of rope_scaling is '2'"),
        (DYNAMIC | {"factor": float("nan")}, "factor of rope_scaling is nan"),
        (YARN | {"factor": float("inf")}, "factor of rope_scaling is inf"),
        (YARN | {"beta_fast": -1}, "beta_fast of rope_scaling is -1"),
        (LONG | {"original_max_position_embeddings": -64}, "original_max_position_embeddings of rope_scaling is -64"),
        (LONG | {"attention_factor": 0}, "attention_factor of rope_scaling is 0"),
        (LONG | {"long_factor": [1.0]}, "long_factor has to be a list of 16 numbers, for heads of 32"),
        (LONG | {"long_factor": 16}, "long_factor has to be a list of 16 numbers"),
        (LONG | {"long_factor": [1.0] * 15 + [0.0]}, "a number of long_factor is 0.0"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor is 1.0, and has to be more than low_freq_factor, 1.0"),
    ],
    ids=str,
)
def test_a_number_that_no_rotation_can_have_is_refused_by_its_name(scaling, complaint):
    with pytest.raises(ValueError, match=complaint):
        LlamaConfig.from_json(NUMBERS | {"rope_scaling": scaling})


@pytest.mark.parametrize("given", [LINEAR, DYNAMIC, LLAMA3], ids=str)
@pytest.mark.parametrize("missing", [{}, {"factor": None}], ids=str)
def test_a_number_that_a_rope_type_needs_is_missing_if_it_is_left_out_or_null(given, missing):
    scaling = {name: value for name, value in given.items() if name != "factor"} | missing
    with pytest.raises(KeyError, match="factor"):
        LlamaConfig.from_json(NUMBERS | {"rope_scaling": scaling})
