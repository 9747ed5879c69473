"""Rope types against Hugging Face's tables, and the context that each serves."""

import pytest
import torch

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
