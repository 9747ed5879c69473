"""Noise that depends on names alone: Philox4x32-10 (Salmon, Moraes, Dror & Shaw, SC'11), and Gumbel noise made from it.

The noise of a token is a function of (seed, sequence index, position, token id) and of nothing else: not of what else
is in the batch, nor of which process asks. Triton has the same generator, `tl.philox(seed, c0, c1, c2, c3)`.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
# The fractional parts of the golden ratio and of sqrt(3) - 1: the steps of the two halves of the key.
_WEYL_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10


def philox_4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random 32-bit words for each counter.

    Args:
        counter: four int64 tensors of values in [0, 2^32) that broadcast together.
        key: two more of them.

    Returns:
        Four int64 tensors of values in [0, 2^32), of the broadcast shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        # Products of 32 by 32 bits wrap into int64's sign; the shift smears that sign upwards and the mask cuts it off.
        # c1 and c3 keep their upper halves: they only go into xors whose result is masked.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((product1 >> 32) ^ c1 ^ k0) & _MASK, product1
        c2, c3 = ((product0 >> 32) ^ c3 ^ k1) & _MASK, product0
        k0, k1 = (k0 + _WEYL_STEPS[0]) & _MASK, (k1 + _WEYL_STEPS[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def gumbel_noise(token_ids: Tensor, seeds: Tensor, positions: Tensor, sequence_indexes: Tensor) -> Tensor:
    """Standard Gumbel noise of chosen tokens.

    The key is the seed, the counter is (token_id // 4, position, sequence index, 0), and token_id % 4 says which of the
    four words is the token's.

    Args:
        token_ids: [num_rows, num_candidates] int64.
        seeds: [num_rows] int64, the bits of an unsigned 64-bit number.
        positions: [num_rows] int64, of the token to be drawn.
        sequence_indexes: [num_rows] int64.

    Returns:
        [num_rows, num_candidates] float32.
    """
    words = torch.stack(_words(token_ids // 4, seeds, positions, sequence_indexes), dim=-1)  # [R, C, 4]
    return _gumbel(words.gather(-1, (token_ids % 4)[..., None]).squeeze(-1))


def gumbel_noise_of_all(vocabulary_size: int, seeds: Tensor, positions: Tensor, sequence_indexes: Tensor) -> Tensor:
    """`gumbel_noise` of every token id, each at a quarter of the cost: [num_rows, vocabulary_size]."""
    counters = torch.arange(-(-vocabulary_size // 4), device=seeds.device)[None]
    words = torch.stack(_words(counters, seeds, positions, sequence_indexes), dim=-1)  # [R, V / 4, 4]
    return _gumbel(words.flatten(1)[:, :vocabulary_size])


def _words(
    counters: Tensor, seeds: Tensor, positions: Tensor, sequence_indexes: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    counter = (counters, positions[:, None], sequence_indexes[:, None], torch.zeros_like(positions)[:, None])
    key = ((seeds & _MASK)[:, None], ((seeds >> 32) & _MASK)[:, None])
    return philox_4x32(counter, key)


def _gumbel(words: Tensor) -> Tensor:
    """-log(-log(u)) with u = 1 - (word + 1/2) / 2^32: the large values, which win, have float32's full precision.

    The clamp keeps u above 0 when float32 rounds the largest words up to 2^32: noise of -inf would tie with the tokens
    that a filter has cut.
    """
    complement = words.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return torch.log1p(complement.neg_()).neg_().log_().neg_()
