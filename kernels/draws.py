"""`sample_tokens` by torch: the twin of `kernels.sampling` and `csrc/sampling.hpp`, and typical tokens on CPUs.

A draw is the argmax of scaled logits plus Gumbel noise (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030), and the
noise is counter-based (`kernels.philox`): a token depends only on its row's logits, temperature and filters, and on
(seed, sequence index, position).

Top-k, top-p and min-p each keep a head of the tokens ordered by logit, so each is a threshold; a token that ties with
the last one kept is kept too. Typical sampling keeps a head of what they leave, ordered by how far a token's
information content is from the expected one (Meister et al. 2022, arXiv:2202.00666), again with ties. Both heads are
first looked for among a few of the best tokens, since they mostly end there. Whether to look further depends on the
values, so on a GPU this waits for the device; `kernels.sampling` does not.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.forms import check_sampling
from kernels.philox import gumbel_noise, gumbel_noise_of_all

# Most nuclei are smaller than _NUM_CANDIDATES. If a row's is not, it is searched again among _WIDENING times as many.
_NUM_CANDIDATES = 256
_WIDENING = 16
# Rows whose noise over the whole vocabulary is made at once: few, so that the random words stay in the CPU's cache.
_ROWS_AT_ONCE = 4


def sample_tokens(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    sequence_indexes: Tensor,
    filters: tuple[Tensor, ...] | None = None,
) -> Tensor:
    """One token id for each row: the best one, or one drawn from what the filters keep.

    A row with a NaN or +inf, or of -inf alone, gets some id of the vocabulary; its logsumexp is then not finite.

    Args:
        logits: [num_rows, vocabulary_size] float32; rows may be strided. -inf forbids a token.
        temperatures: [num_rows] float32; 0 takes the best token, the first of those that tie.
        seeds: [num_rows] int64, the bits of an unsigned 64-bit number.
        positions: [num_rows] int64, of the token to be drawn.
        sequence_indexes: [num_rows] int64.
        filters: top_k [num_rows] int64, the vocabulary's size where it cuts nothing; top_p, min_p and typical_p,
            [num_rows] float32 each, 1, 0 and 1 where they cut nothing. A token that ties with the last one kept is
            kept. None if no row has any.

    Returns:
        [num_rows] int64.
    """
    names = (seeds, positions, sequence_indexes)
    check_sampling(logits, temperatures, names, filters)
    token_ids = logits.argmax(-1)  # of the drawn rows too: picking the greedy ones out would cost as much
    drawn = temperatures > 0
    kinds: list[tuple[Tensor, Callable[[_Rows], Tensor]]] = [(drawn, _draw)]
    if filters is not None:
        top_k, top_p, min_p, typical_p = filters
        typical = drawn & (typical_p < 1)
        headed = drawn & ~typical & _is_headed(top_k, top_p, min_p, logits.shape[1])
        kinds = [(drawn & ~typical & ~headed, _draw), (headed, _draw_from_head), (typical, _draw_typical)]
    for of_kind, draw in kinds:
        rows = of_kind.nonzero().squeeze(-1)
        if len(rows) > 0:
            token_ids[rows] = draw(_Rows.of(rows, logits, temperatures, names, filters))
    return token_ids


def _is_headed(top_k: Tensor, top_p: Tensor, min_p: Tensor, vocabulary_size: int) -> Tensor:
    """Which rows keep only a head of their tokens: bool, shaped like the arguments."""
    return (top_k < vocabulary_size) | (top_p < 1) | (min_p > 0)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that are drawn in the same way.

    Attributes:
        scaled: [R, V] logits over the temperature, after the best one was subtracted: in the other order, the smallest
            temperatures would make infinities of them.
        names: seeds, positions and sequence indexes, [R] each, as the noise takes them.
        filters: top_k, top_p, min_p and typical_p, [R, 1] each; empty if no row has any.
    """

    scaled: Tensor
    names: tuple[Tensor, ...]
    filters: tuple[Tensor, ...]

    @classmethod
    def of(
        cls,
        rows: Tensor,
        logits: Tensor,
        temperatures: Tensor,
        names: tuple[Tensor, ...],
        filters: tuple[Tensor, ...] | None,
    ) -> "_Rows":
        """Picks `rows`, [R] int64, from the arguments of `sample_tokens`."""
        scaled = logits[rows]
        scaled.sub_(scaled.amax(-1, keepdim=True)).div_(temperatures[rows, None])
        return cls(scaled, tuple(name[rows] for name in names), tuple(column[rows, None] for column in filters or ()))

    def __getitem__(self, rows: Tensor | slice) -> "_Rows":
        names, filters = tuple(name[rows] for name in self.names), tuple(column[rows] for column in self.filters)
        return _Rows(self.scaled[rows], names, filters)

    def candidates(self, num: int) -> tuple[Tensor, Tensor]:
        """The best scaled logits of each row, best first, and their token ids, [R, C] each: `num` of them, or more.

        If a row has both a top-k and a top-p, all that top-k keeps are among them, ties with its last token included:
        top-p is a share of their mass.
        """
        top_k, top_p, _, _ = self.filters
        vocabulary_size = self.scaled.shape[1]
        has_both = (top_k < vocabulary_size) & (top_p < 1)
        while True:
            values, ids = self.scaled.topk(min(num, vocabulary_size))
            last_kept = values.gather(-1, (top_k - 1).clamp(max=values.shape[1] - 1))
            # What top-k keeps ends further down, or may: the last candidate is its last token, or ties with it.
            is_cut = has_both & (values[:, -1:] == last_kept) & (last_kept > -torch.inf)
            if values.shape[1] == vocabulary_size or not is_cut.any():
                return values, ids
            num *= _WIDENING


def _draw(rows: _Rows) -> Tensor:
    """Token ids, [R] int64, drawn from the whole vocabulary."""
    num_rows, vocabulary_size = rows.scaled.shape
    drawn = []
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        part = rows[start : start + _ROWS_AT_ONCE]
        drawn.append(gumbel_noise_of_all(vocabulary_size, *part.names).add_(part.scaled).argmax(-1))
    return torch.cat(drawn)


def _draw_from_head(rows: _Rows, num_candidates: int = _NUM_CANDIDATES) -> Tensor:
    """Token ids, [R] int64, drawn from what top-k, top-p and min-p keep, first searched among `num_candidates`."""
    values, ids = rows.candidates(num_candidates)
    thresholds = _thresholds(rows, values)
    kept = values.masked_fill(values < thresholds, -torch.inf)
    choices = gumbel_noise(ids, *rows.names).add_(kept).argmax(-1, keepdim=True)
    token_ids = ids.gather(-1, choices).squeeze(-1)
    overflowing = _overflowing(values, thresholds, rows.scaled.shape[1])
    if len(overflowing) > 0:
        token_ids[overflowing] = _draw_from_head(rows[overflowing], num_candidates * _WIDENING)
    return token_ids


def _draw_typical(rows: _Rows) -> Tensor:
    """Token ids, [R] int64, drawn from the locally typical ones among what the other filters keep.

    The information content of a token is log(sum of all exp(scaled)) - scaled, and the expected content is the same
    with the expected scaled logit; so the two are as far apart as the scaled logit is from the expected one.
    """
    scaled = rows.scaled
    top_k, top_p, min_p, shares = rows.filters
    headed = _is_headed(top_k, top_p, min_p, scaled.shape[1]).squeeze(-1).nonzero().squeeze(-1)
    if len(headed) > 0:
        heads = scaled[headed]
        scaled[headed] = heads.masked_fill_(heads < _head_thresholds(rows[headed]), -torch.inf)
    masses = scaled.softmax(-1)
    expected = (masses * scaled).nansum(-1, keepdim=True)  # skips 0 * -inf, of tokens that were cut
    distances = (scaled - expected).abs_()
    scaled.masked_fill_(distances > _typical_thresholds(distances, masses, shares), -torch.inf)
    return _draw(rows)


def _head_thresholds(rows: _Rows, num_candidates: int = _NUM_CANDIDATES) -> Tensor:
    """`_thresholds`, searched as far down as necessary: [R, 1]."""
    values, _ = rows.candidates(num_candidates)
    thresholds = _thresholds(rows, values)
    overflowing = _overflowing(values, thresholds, rows.scaled.shape[1])
    if len(overflowing) > 0:
        thresholds[overflowing] = _head_thresholds(rows[overflowing], num_candidates * _WIDENING)
    return thresholds


def _overflowing(values: Tensor, thresholds: Tensor, vocabulary_size: int) -> Tensor:
    """The rows, [n] int64, whose last candidate is kept, so that tokens beyond it may have to be kept as well."""
    if values.shape[1] == vocabulary_size:
        return torch.empty(0, dtype=torch.int64)
    return (values[:, -1:] >= thresholds).squeeze(-1).nonzero().squeeze(-1)


def _typical_thresholds(
    distances: Tensor, masses: Tensor, shares: Tensor, num_candidates: int = _NUM_CANDIDATES
) -> Tensor:
    """The greatest distance within which the nearest tokens reach each row's share of the mass, [R, 1].

    Args:
        distances: [R, V].
        masses: [R, V], each row's sum 1.
        shares: [R, 1].
        num_candidates: how many of the nearest are looked at first.
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


def _thresholds(rows: _Rows, values: Tensor) -> Tensor:
    """The least scaled logit that each row's top-k, top-p and min-p keep, [R, 1].

    Args:
        rows: the rows.
        values: [R, C], their C best scaled logits, best first. A threshold below all of them becomes the last of them.
    """
    top_k, top_p, min_p, _ = rows.filters
    num_candidates = values.shape[1]
    cut = top_k < rows.scaled.shape[1]
    least_of_k = values.gather(-1, (top_k - 1).clamp(max=num_candidates - 1)).masked_fill_(~cut, -torch.inf)

    # Top-p is a share of the mass that top-k leaves, including ties with its last token.
    masses = values.exp().masked_fill_(values < least_of_k, 0)
    total = torch.where(cut, masses.sum(-1, keepdim=True), rows.scaled.exp().sum(-1, keepdim=True))
    last = (masses.cumsum(-1) < top_p * total).sum(-1, keepdim=True).clamp_(max=num_candidates - 1)
    least_of_p = values.gather(-1, last).masked_fill_(top_p >= 1, -torch.inf)

    # Min-p is a share of the best token's probability, whose scaled logit is 0.
    return least_of_k.maximum(least_of_p).maximum(min_p.log())
