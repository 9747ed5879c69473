"""From logits to token ids, with the log-probabilities that a client or a beam search asks for.

A row's logits go through these, in the order of transformers and vLLM:

    logit_bias, repetition penalty, presence and frequency penalties     `worker.adjustments`
    min_tokens: stop tokens that come too early are forbidden            `worker.adjustments`
    temperature, top-k, top-p, min-p, typical-p, and the draw            `sample_tokens` of the model's operations

Log-probabilities are under the model's own distribution, before all of these. For a request that asks for candidates
nothing is drawn: `worker.candidates` finds them, and the sample's token is the best one. Stop strings, stop tokens and
lengths are handled by the scheduler and the router.

Nothing here waits for the device: what the host knows goes there by `worker.transfer`, what comes out stays there, and
whether a row fails is decided there. Two things outside wait: the torch twin of `sample_tokens`, on a GPU without
Triton; and bringing the sampled tokens back, which a penalty makes the next step wait for, since a `TokenHistory` is on
the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kernels import reference
from kernels.choice import NormalizersAndBest, SampleTokens
from worker.adjustments import TokenIds, add_biases, forbid, penalize_occurrences, penalize_repetition
from worker.candidates import Candidates, best_candidates
from worker.logprobs import TokenLogprobs, token_logprobs
from worker.sampling_parameters import Sample
from worker.transfer import Array, to_device


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What was drawn, one entry per sample, on the logits' device.

    Attributes:
        token_ids: [num_samples] int64; for a sample that wants candidates, the best of them; where `failed`, any token.
        logprobs: [num_samples] float32, under the model's own distribution, before all that changes it; not finite
            where `failed`.
        candidates: of the samples that want some; None if none does. Meaningless where `failed`.
        top_logprobs: of the samples that want any; None if none does. Meaningless where `failed`.
    """

    token_ids: Tensor
    logprobs: Tensor
    candidates: Candidates | None
    top_logprobs: TokenLogprobs | None

    @property
    def failed(self) -> Array:
        """[num_samples] bool, on the host: whether the logits gave no distribution, since one of them was NaN or
        infinite, or every token was forbidden.
        """
        return ~np.isfinite(self.logprobs.cpu().numpy())


def draw_tokens(
    logits: Tensor,
    samples: Sequence[Sample],
    sample_tokens: SampleTokens = reference.sample_tokens,
    normalizers_and_best: NormalizersAndBest = reference.normalizers_and_best,
) -> SampledTokens:
    """One token for each sample.

    Args:
        logits: [num_samples, vocabulary_size] float32; overwritten where they are adjusted or forbidden.
        samples: what each row of `logits` is for.
        sample_tokens: the operation that draws, chosen with the others when the model was built.
        normalizers_and_best: likewise.
    """
    normalizers, best = normalizers_and_best(logits)
    kept = [row for row, s in enumerate(samples) if s.parameters.num_top_logprobs is not None or s.parameters.adjusts]
    adjusted = [row for row in kept if samples[row].parameters.adjusts]
    if kept:
        kept_rows = _rows(logits, kept)
        originals = logits[kept_rows]
        _adjust(logits, adjusted, samples)
    are_changed = _forbid_early_stops(logits, samples) or bool(adjusted)
    if any(sample.parameters.draws for sample in samples):
        token_ids = _draw(logits, samples, sample_tokens)
    else:
        token_ids = normalizers_and_best(logits)[1] if are_changed else best
    candidates = None
    if searched := [row for row, sample in enumerate(samples) if sample.parameters.num_candidates > 0]:
        searched_rows = _rows(logits, searched)
        counts = [samples[row].parameters.num_candidates for row in searched]
        candidates = best_candidates(logits[searched_rows], normalizers[searched_rows], counts)
        token_ids[searched_rows] = candidates.best
    # Not finite if the logits give no distribution, for example if min_tokens forbade all and the best was -inf.
    logprobs = logits.gather(-1, token_ids[:, None]).squeeze(-1) - normalizers
    top_logprobs = None
    if kept:
        of_kept = (originals, normalizers[kept_rows], token_ids[kept_rows])
        changed, own = logprobs[kept_rows], originals.gather(-1, of_kept[2][:, None]).squeeze(-1) - of_kept[1]
        logprobs[kept_rows] = own.where(changed.isfinite(), changed)
        top_logprobs = _top_logprobs(*of_kept, [samples[row] for row in kept])
    return SampledTokens(token_ids, logprobs, candidates, top_logprobs)


def _rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Row indices as a tensor, on the logits' device."""
    return to_device(logits.device, np.array(rows, dtype=np.int64))[0]


def _adjust(logits: Tensor, rows: Sequence[int], samples: Sequence[Sample]) -> None:
    """Applies biases, then penalties, in place."""
    of = [samples[row].parameters for row in rows]
    if biased := [(row, p) for row, p in zip(rows, of, strict=True) if p.bias_token_ids]:
        add_biases(
            logits, [row for row, _ in biased], [p.bias_token_ids for _, p in biased], [p.biases for _, p in biased]
        )
    if repeating := [(row, p) for row, p in zip(rows, of, strict=True) if p.repetition_penalty != 1]:
        seen = [ids for row, _ in repeating for ids in _seen(samples[row])]
        penalties = [p.repetition_penalty for _, p in repeating for _ in range(2)]
        penalize_repetition(logits, [row for row, _ in repeating for _ in range(2)], seen, penalties)
    if occurring := [(row, p) for row, p in zip(rows, of, strict=True) if p.penalizes_occurrences]:
        outputs = [_seen(samples[row])[1] for row, _ in occurring]
        presence, frequency = zip(*((p.presence_penalty, p.frequency_penalty) for _, p in occurring), strict=True)
        penalize_occurrences(logits, [row for row, _ in occurring], outputs, presence, frequency)


def _seen(sample: Sample) -> tuple[TokenIds, TokenIds]:
    """The tokens of the prompt, each once, and those of the output."""
    assert sample.history is not None, "a penalty needs the tokens before"
    output = sample.history.output(sample.sequence_index, sample.position)
    assert output is not None, "the output has a gap"
    return sample.history.unique_prompt, output


def _forbid_early_stops(logits: Tensor, samples: Sequence[Sample]) -> bool:
    """Forbids stop tokens that would come too early; returns whether there were any."""
    early = [
        (row, sample.parameters.stop_token_ids) for row, sample in enumerate(samples) if sample.is_too_early_to_stop
    ]
    if early:
        forbid(logits, [row for row, _ in early], [token_ids for _, token_ids in early])
    return bool(early)


def _draw(logits: Tensor, samples: Sequence[Sample], sample_tokens: SampleTokens) -> Tensor:
    """Draws tokens, or takes the best ones where a request wants those; [num_samples] int64."""
    of = [sample.parameters for sample in samples]
    size = logits.shape[1]
    columns: list[Array] = [
        np.array([p.temperature if p.draws else 0 for p in of], dtype=np.float32),
        np.array([p.seed for p in of], dtype=np.uint64).view(np.int64),
        np.array([sample.position for sample in samples], dtype=np.int64),
        np.array([sample.sequence_index for sample in samples], dtype=np.int64),
    ]
    if any(p.filters and p.draws for p in of):
        columns += [
            np.array([min(p.top_k or size, size) for p in of], dtype=np.int64),
            np.array([p.top_p for p in of], dtype=np.float32),
            np.array([p.min_p for p in of], dtype=np.float32),
            np.array([p.typical_p for p in of], dtype=np.float32),
        ]
    temperatures, seeds, positions, indexes, *filters = to_device(logits.device, *columns)
    return sample_tokens(logits, temperatures, seeds, positions, indexes, tuple(filters) or None)


def _top_logprobs(
    originals: Tensor, normalizers: Tensor, token_ids: Tensor, samples: Sequence[Sample]
) -> TokenLogprobs | None:
    """The top log-probabilities of the samples that want any; all arguments have the same rows."""
    asking = [row for row, sample in enumerate(samples) if sample.parameters.num_top_logprobs is not None]
    if not asking:
        return None
    counts = [samples[row].parameters.num_top_logprobs or 0 for row in asking]
    if len(asking) < len(samples):
        rows = _rows(originals, asking)
        originals, normalizers, token_ids = originals[rows], normalizers[rows], token_ids[rows]
    return token_logprobs(originals, normalizers, token_ids, counts)
