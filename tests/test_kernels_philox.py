"""Philox against its authors' known answers, and the Gumbel noise made from it."""

import math

import pytest
import torch

from kernels.philox import gumbel_noise, gumbel_noise_of_all, philox_4x32

ONES = 0xFFFFFFFF
# philox4x32-10 in Random123's kat_vectors: counter, key, words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, words", KNOWN_ANSWERS)
def test_philox_gives_its_authors_known_answers(counter, key, words):
    tensors = [torch.tensor([value]) for value in counter + key]
    found = philox_4x32(tuple(tensors[:4]), tuple(tensors[4:]))
    assert tuple(int(word) for word in found) == words


def column(*values):
    return torch.tensor(values, dtype=torch.int64)


def test_noise_of_a_token_comes_from_its_own_lane_of_its_own_counter():
    seed, position, sequence_index, token_id = 0x123456789ABCDEF0, 7, 2, 4 * 5 + 3
    words = philox_4x32(
        (column(5), column(position), column(sequence_index), column(0)), (column(0x9ABCDEF0), column(0x12345678))
    )
    complement = (int(words[3]) + 0.5) / 2**32
    noise = gumbel_noise(column(token_id)[None], column(seed), column(position), column(sequence_index))
    assert noise.item() == pytest.approx(-math.log(-math.log1p(-complement)), rel=1e-5)


@pytest.mark.parametrize("vocabulary_size", [1, 4, 7, 130])
def test_noise_of_some_tokens_is_their_part_of_the_noise_of_all(vocabulary_size):
    names = (column(1, -1), column(5, 6), column(0, 3))
    everything = gumbel_noise_of_all(vocabulary_size, *names)
    assert everything.shape == (2, vocabulary_size)
    ids = torch.arange(vocabulary_size - 1, -1, -1).expand(2, -1)
    assert torch.equal(gumbel_noise(ids, *names), everything.flip(-1))


def test_noise_changes_with_each_of_its_keys():
    base = gumbel_noise_of_all(64, column(1), column(1), column(1))
    others = [(column(2), column(1), column(1)), (column(1), column(2), column(1)), (column(1), column(1), column(2))]
    others.append((column(1 + (1 << 32)), column(1), column(1)))
    for names in others:
        assert not (gumbel_noise_of_all(64, *names) == base).any()


def test_noise_of_a_word_that_rounds_to_the_end_of_the_range_is_finite():
    noise = gumbel_noise(column(138)[None], column(13_045), column(0), column(0))
    assert noise.item() == pytest.approx(-math.log(24 * math.log(2)), abs=1e-4), "the word is 0xFFFFFFD7"


def test_noise_is_standard_gumbel():
    noise = gumbel_noise_of_all(100_000, column(42), column(0), column(0))[0].double()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.03)
    # P(noise < 0) = exp(-1).
    assert (noise < 0).double().mean().item() == pytest.approx(math.exp(-1), abs=0.01)
