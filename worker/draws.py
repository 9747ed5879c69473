"""Draws from scaled logits: of all tokens, of a head of the most probable ones, of the locally typical ones.

A draw is the argmax of scaled logits plus Gumbel noise (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030), and the
noise is counter-based (`kernels.philox`): a token depends on its logits and (seed, sequence index, position) alone.

Top-k, top-p and min-p each keep a head of the tokens ordered by logit, so each is a threshold; a token that ties with
the last one kept is kept too. Typical sampling keeps a head of what they leave, ordered by how far a token's
information content is from the expected one (Meister et al. 2022, arXiv:2202.00666), again with ties.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from kernels.philox import gumbel_noise, gumbel_noise_of_all
from worker.sampling_parameters import Sample

# Most nuclei are smaller than this. A row whose nucleus is not is looked at again, among so many times more tokens.
_NUM_CANDIDATES = 256
_WIDENING = 16
# Rows whose noise over the whole vocabulary is made at once, so that the intermediate words stay in the CPU's cache.
_ROWS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows that are drawn alike, with their parameters as columns.

    Attributes:
        scaled: [R, V] logits over the temperature, after the best became 0: the other way round, the smallest
            temperatures would make infinities of them.
        top_k: [R, 1] int64, V where nothing is cut.
        top_p: [R, 1] float32.
        min_p: [R, 1] float32.
        names: seeds, positions and sequence indexes, [R] int64 each, as the noise takes them.
    """

    scaled: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    names: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, logits: Tensor, samples: Sequence[Sample]) -> Self:
        """The draws of `samples`; their logits are overwritten."""
        vocabulary_size, device = logits.shape[1], logits.device
        parameters = [sample.parameters for sample in samples]

        def column(values: list[float] | list[int]) -> Tensor:
            return torch.tensor(values, device=device)[:, None]

        seeds = np.array([p.seed for p in parameters], dtype=np.uint64).view(np.int64)
        return cls(
            scaled=logits.sub_(logits.amax(-1, keepdim=True)).div_(column([p.temperature for p in parameters])),
            top_k=column([min(p.top_k or vocabulary_size, vocabulary_size) for p in parameters]),
            top_p=column([p.top_p for p in parameters]),
            min_p=column([p.min_p for p in parameters]),
            names=(
                torch.from_numpy(seeds).to(device),
                torch.tensor([sample.position for sample in samples], device=device),
                torch.tensor([sample.sequence_index for sample in samples], device=device),
            ),
        )

    def __getitem__(self, rows: Tensor | slice) -> "Draws":
        seeds, positions, sequence_indexes = self.names
        names = (seeds[rows], positions[rows], sequence_indexes[rows])
        return Draws(self.scaled[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], names)


def draw(draws: Draws) -> Tensor:
    """Token ids, [R] int64, drawn from the whole vocabulary."""
    num_rows, vocabulary_size = draws.scaled.shape
    drawn = []
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        part = draws[start : start + _ROWS_AT_ONCE]
        drawn.append(gumbel_noise_of_all(vocabulary_size, *part.names).add_(part.scaled).argmax(-1))
    return torch.cat(drawn)


def draw_filtered(draws: Draws, num_candidates: int = _NUM_CANDIDATES) -> Tensor:
    """Token ids, [R] int64, drawn from what the filters keep, as long as that is among the best `num_candidates`."""
    vocabulary_size = draws.scaled.shape[1]
    values, ids = draws.scaled.topk(min(num_candidates, vocabulary_size))  # [R, C], best first
    thresholds = _thresholds(draws, values)
    kept = values.masked_fill(values < thresholds, -torch.inf)
    choices = gumbel_noise(ids, *draws.names).add_(kept).argmax(-1, keepdim=True)
    token_ids = ids.gather(-1, choices).squeeze(-1)
    if num_candidates < vocabulary_size:
        # Where even the last candidate is kept, tokens beyond it may have to be kept as well.
        overflowing = (values[:, -1:] >= thresholds).squeeze(-1).nonzero().squeeze(-1)
        if len(overflowing) > 0:
            token_ids[overflowing] = draw_filtered(draws[overflowing], num_candidates * _WIDENING)
    return token_ids


def draw_typical(draws: Draws, typical_p: Sequence[float]) -> Tensor:
    """Token ids, [R] int64, drawn from the locally typical ones among what the filters keep."""
    vocabulary_size = draws.scaled.shape[1]
    cut = ((draws.top_k < vocabulary_size) | (draws.top_p < 1) | (draws.min_p > 0)).squeeze(-1)
    filtered = cut.nonzero().squeeze(-1)
    if len(filtered) > 0:
        thresholds = _head_thresholds(draws[filtered])
        kept = draws.scaled[filtered]
        draws.scaled[filtered] = kept.masked_fill_(kept < thresholds, -torch.inf)
    logprobs = draws.scaled.log_softmax(-1)
    masses = logprobs.exp()
    entropy = -(logprobs * masses).nansum(-1, keepdim=True)  # 0 * -inf, of a token that was cut, is no summand
    distances = (logprobs + entropy).abs_()
    shares = torch.tensor(typical_p, device=masses.device)[:, None]
    draws.scaled.masked_fill_(distances > _typical_thresholds(distances, masses, shares), -torch.inf)
    return draw(draws)


def _head_thresholds(draws: Draws, num_candidates: int = _NUM_CANDIDATES) -> Tensor:
    """`_thresholds`, looked for as far down as it takes: [R, 1]."""
    vocabulary_size = draws.scaled.shape[1]
    values = draws.scaled.topk(min(num_candidates, vocabulary_size)).values
    thresholds = _thresholds(draws, values)
    if num_candidates < vocabulary_size:
        overflowing = (values[:, -1:] >= thresholds).squeeze(-1).nonzero().squeeze(-1)
        if len(overflowing) > 0:
            thresholds[overflowing] = _head_thresholds(draws[overflowing], num_candidates * _WIDENING)
    return thresholds


def _typical_thresholds(
    distances: Tensor, masses: Tensor, shares: Tensor, num_candidates: int = _NUM_CANDIDATES
) -> Tensor:
    """The greatest distance within which the nearest tokens reach each row's share of the mass, [R, 1].

    Args:
        distances: [R, V].
        masses: [R, V], each row's sum 1.
        shares: [R, 1].
        num_candidates: of the nearest, looked at first.
    """
    num_candidates = min(num_candidates, distances.shape[1])
    nearest, ids = distances.topk(num_candidates, largest=False)  # [R, C], nearest first
    last = (masses.gather(-1, ids).cumsum(-1) < shares).sum(-1, keepdim=True)
    thresholds = nearest.gather(-1, last.clamp(max=num_candidates - 1))
    if num_candidates < distances.shape[1]:
        overflowing = (last == num_candidates).squeeze(-1).nonzero().squeeze(-1)
        if len(overflowing) > 0:
            thresholds[overflowing] = _typical_thresholds(
                distances[overflowing], masses[overflowing], shares[overflowing], num_candidates * _WIDENING
            )
    return thresholds


def _thresholds(draws: Draws, values: Tensor) -> Tensor:
    """The least scaled logit that each row's filters keep, [R, 1].

    Args:
        draws: the rows.
        values: [R, C], their C best scaled logits, best first. A threshold beyond them comes out as the last of them.
    """
    num_candidates = values.shape[1]
    cut = draws.top_k < draws.scaled.shape[1]
    top_k = values.gather(-1, (draws.top_k - 1).clamp(max=num_candidates - 1)).masked_fill_(~cut, -torch.inf)

    # Top-p is a share of the mass that top-k left, ties with its last token included.
    masses = values.exp().masked_fill_(values < top_k, 0)
    total = torch.where(cut, masses.sum(-1, keepdim=True), draws.scaled.exp().sum(-1, keepdim=True))
    last = (masses.cumsum(-1) < draws.top_p * total).sum(-1, keepdim=True).clamp_(max=num_candidates - 1)
    top_p = values.gather(-1, last).masked_fill_(draws.top_p >= 1, -torch.inf)

    min_p = draws.min_p.log()  # a share of the best token's probability, whose scaled logit is 0
    return top_k.maximum(top_p).maximum(min_p)
