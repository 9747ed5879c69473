"""From logits to token ids: greedy, or drawn after temperature, top-k, top-p and min-p, in that order.

A draw is the argmax of scaled logits plus Gumbel noise (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030), and the
noise is counter-based (`kernels.philox`): a token depends on its logits and (seed, sequence index, position) alone.

Every filter keeps a head of the tokens ordered by logit, so every filter is a threshold; a token that ties with the
last one kept is kept too. Stop strings, stop tokens and lengths are the scheduler's and the router's.

For a request that asks for candidates nothing is drawn: `worker.candidates` finds them, and its token is the best one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from kernels.philox import gumbel_noise, gumbel_noise_of_all
from protos.sampling_pb2 import Sampling
from worker.candidates import Candidates, best_candidates

# Most nuclei are smaller than this. A row whose nucleus is not is looked at again, among so many times more tokens.
_NUM_CANDIDATES = 256
_WIDENING = 16
# Rows whose noise over the whole vocabulary is made at once, so that the intermediate words stay in the CPU's cache.
_ROWS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """A `Sampling` message read once, field by field; top_k is None where the message's 0 keeps all."""

    temperature: float
    top_p: float
    top_k: int | None
    min_p: float
    seed: int
    stop_token_ids: tuple[int, ...]
    min_tokens: int
    num_prompt_tokens: int
    num_candidates: int

    @classmethod
    def from_message(cls, message: Sampling, vocabulary_size: int) -> Self:
        """Reads and checks a message.

        Raises:
            ValueError: a value is out of its range.
        """
        if not 0 <= message.temperature < float("inf"):
            raise ValueError(f"temperature {message.temperature} is no finite number from 0 up")
        if not 0 < message.top_p <= 1:
            raise ValueError(f"top_p {message.top_p} is not in (0, 1]")
        if not 0 <= message.min_p <= 1:
            raise ValueError(f"min_p {message.min_p} is not in [0, 1]")
        if message.top_k < 0:
            raise ValueError(f"top_k {message.top_k} is less than 0")
        if not 0 <= message.num_candidates <= vocabulary_size:
            raise ValueError(f"num_candidates {message.num_candidates} is not in 0 .. {vocabulary_size}")
        return cls(
            temperature=message.temperature,
            top_p=message.top_p,
            top_k=message.top_k or None,
            min_p=message.min_p,
            seed=message.seed,
            # One beyond the vocabulary is never drawn anyway.
            stop_token_ids=tuple(id_ for id_ in message.stop_token_ids if 0 <= id_ < vocabulary_size),
            min_tokens=message.min_tokens,
            num_prompt_tokens=message.num_prompt_tokens,
            num_candidates=message.num_candidates,
        )

    @property
    def draws(self) -> bool:
        """Whether chance decides; otherwise the token is the most probable one."""
        return self.temperature > 0 and self.num_candidates == 0

    @property
    def filters(self) -> bool:
        """Whether any token is cut before the draw."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One token to be drawn: how, and the names that its randomness hangs on.

    Attributes:
        parameters: of its request.
        sequence_index: which of the request's sequences it is for.
        position: of the token, 0-based in that sequence, prompt included.
    """

    parameters: SamplingParameters
    sequence_index: int
    position: int


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What was drawn, one entry per sample; for a sample that wants candidates its token is the best of them.

    Attributes:
        token_ids: [num_samples] int64; meaningless where `failed`.
        logprobs: [num_samples] float32, under the model's own distribution, before temperature and filters.
        failed: [num_samples] bool: the logits gave no distribution, since one of them was NaN or infinite.
        candidates: of the samples that want some; None when none does. Meaningless where `failed`.
    """

    token_ids: Tensor
    logprobs: Tensor
    failed: Tensor
    candidates: Candidates | None


def draw_tokens(logits: Tensor, samples: Sequence[Sample]) -> SampledTokens:
    """One token for each sample.

    Args:
        logits: [num_samples, vocabulary_size] float32; overwritten where min_tokens forbids a token.
        samples: what each row of them is for.
    """
    normalizers = logits.logsumexp(-1)
    _forbid_early_stops(logits, samples)
    token_ids = logits.argmax(-1)  # of the drawn rows too: picking the greedy ones out would cost as much
    finite = normalizers.isfinite().tolist()
    drawn = [row for row, sample in enumerate(samples) if sample.parameters.draws and finite[row]]
    for filters, draw in ((False, _draw), (True, _draw_filtered)):
        rows = [row for row in drawn if samples[row].parameters.filters == filters]
        if rows:
            token_ids[rows] = draw(_Draws.of(logits[rows], [samples[row] for row in rows]))
    candidates = None
    if searched := [row for row, sample in enumerate(samples) if sample.parameters.num_candidates > 0]:
        counts = [samples[row].parameters.num_candidates for row in searched]
        candidates = best_candidates(logits[searched], normalizers[searched], counts)
        token_ids[searched] = candidates.best
    logprobs = logits.gather(-1, token_ids[:, None]).squeeze(-1) - normalizers
    # Not finite either where min_tokens forbade every token, and -inf was the best logit.
    return SampledTokens(token_ids, logprobs, ~logprobs.isfinite(), candidates)


def _forbid_early_stops(logits: Tensor, samples: Sequence[Sample]) -> None:
    for row, sample in enumerate(samples):
        p = sample.parameters
        if sample.position - p.num_prompt_tokens < p.min_tokens:
            logits[row, list(p.stop_token_ids)] = -torch.inf


@dataclass(frozen=True, slots=True)
class _Draws:
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

    def __getitem__(self, rows: Tensor | slice) -> "_Draws":
        seeds, positions, sequence_indexes = self.names
        names = (seeds[rows], positions[rows], sequence_indexes[rows])
        return _Draws(self.scaled[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], names)


def _draw(draws: _Draws) -> Tensor:
    """Token ids, [R] int64, drawn from the whole vocabulary."""
    num_rows, vocabulary_size = draws.scaled.shape
    drawn = []
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        part = draws[start : start + _ROWS_AT_ONCE]
        drawn.append(gumbel_noise_of_all(vocabulary_size, *part.names).add_(part.scaled).argmax(-1))
    return torch.cat(drawn)


def _draw_filtered(draws: _Draws, num_candidates: int = _NUM_CANDIDATES) -> Tensor:
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
            token_ids[overflowing] = _draw_filtered(draws[overflowing], num_candidates * _WIDENING)
    return token_ids


def _thresholds(draws: _Draws, values: Tensor) -> Tensor:
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
