"""From logits to token ids, with the log-probabilities that a client or a beam search asks for.

A row's logits go through these, in the order of transformers and vLLM:

    logit_bias, repetition penalty, presence and frequency penalties     `worker.adjustments`
    min_tokens: stop tokens that come too early are forbidden
    temperature, top-k, top-p, min-p, typical-p, and the draw            `worker.draws`; greedy is the argmax

Log-probabilities are under the model's own distribution, before all of these. For a request that asks for candidates
nothing is drawn: `worker.candidates` finds them, and its token is the best one. Stop strings, stop tokens and lengths
are the scheduler's and the router's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.adjustments import TokenIds, add_biases, penalize_occurrences, penalize_repetition
from worker.candidates import Candidates, best_candidates
from worker.draws import Draws, draw, draw_filtered, draw_typical
from worker.logprobs import TokenLogprobs, token_logprobs
from worker.sampling_parameters import Sample, SamplingParameters

__all__ = ["Sample", "SampledTokens", "SamplingParameters", "draw_tokens"]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What was drawn, one entry per sample; for a sample that wants candidates its token is the best of them.

    Attributes:
        token_ids: [num_samples] int64; meaningless where `failed`.
        logprobs: [num_samples] float32, under the model's own distribution, before all that changes it.
        failed: [num_samples] bool: the logits gave no distribution, since one of them was NaN or infinite.
        candidates: of the samples that want some; None when none does. Meaningless where `failed`.
        top_logprobs: of the samples that want any; None when none does. Meaningless where `failed`.
    """

    token_ids: Tensor
    logprobs: Tensor
    failed: Tensor
    candidates: Candidates | None
    top_logprobs: TokenLogprobs | None


def draw_tokens(logits: Tensor, samples: Sequence[Sample]) -> SampledTokens:
    """One token for each sample.

    Args:
        logits: [num_samples, vocabulary_size] float32; overwritten where they are adjusted or forbidden.
        samples: what each row of them is for.
    """
    normalizers = logits.logsumexp(-1)
    kept = [row for row, s in enumerate(samples) if s.parameters.num_top_logprobs is not None or s.parameters.adjusts]
    originals = logits[kept] if kept else logits[:0]
    if kept:
        _adjust(logits, [row for row in kept if samples[row].parameters.adjusts], samples)
    _forbid_early_stops(logits, samples)
    token_ids = logits.argmax(-1)  # of the drawn rows too: picking the greedy ones out would cost as much
    _draw(token_ids, logits, normalizers, samples)
    candidates = None
    if searched := [row for row, sample in enumerate(samples) if sample.parameters.num_candidates > 0]:
        counts = [samples[row].parameters.num_candidates for row in searched]
        candidates = best_candidates(logits[searched], normalizers[searched], counts)
        token_ids[searched] = candidates.best
    logprobs = logits.gather(-1, token_ids[:, None]).squeeze(-1) - normalizers
    # Not finite either where min_tokens forbade every token, and -inf was the best logit.
    failed = ~logprobs.isfinite()
    top_logprobs = None
    if kept:
        logprobs[kept] = originals.gather(-1, token_ids[kept][:, None]).squeeze(-1) - normalizers[kept]
        top_logprobs = _top_logprobs(originals, normalizers[kept], token_ids[kept], [samples[row] for row in kept])
    return SampledTokens(token_ids, logprobs, failed, candidates, top_logprobs)


def _adjust(logits: Tensor, rows: Sequence[int], samples: Sequence[Sample]) -> None:
    """Biases, then penalties."""
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


def _forbid_early_stops(logits: Tensor, samples: Sequence[Sample]) -> None:
    for row, sample in enumerate(samples):
        p = sample.parameters
        if sample.position - p.num_prompt_tokens < p.min_tokens:
            logits[row, list(p.stop_token_ids)] = -torch.inf


def _draw(token_ids: Tensor, logits: Tensor, normalizers: Tensor, samples: Sequence[Sample]) -> None:
    """Puts drawn tokens in place of the best ones, where a request wants that and there is a distribution."""
    finite = normalizers.isfinite().tolist()
    plain: list[int] = []
    filtered: list[int] = []
    typical: list[int] = []
    for row, sample in enumerate(samples):
        p = sample.parameters
        if p.draws and finite[row]:
            (typical if p.typical_p < 1 else filtered if p.filters else plain).append(row)
    if plain:
        token_ids[plain] = draw(Draws.of(logits[plain], [samples[row] for row in plain]))
    if filtered:
        token_ids[filtered] = draw_filtered(Draws.of(logits[filtered], [samples[row] for row in filtered]))
    if typical:
        draws = Draws.of(logits[typical], [samples[row] for row in typical])
        token_ids[typical] = draw_typical(draws, [samples[row].parameters.typical_p for row in typical])


def _top_logprobs(
    originals: Tensor, normalizers: Tensor, token_ids: Tensor, samples: Sequence[Sample]
) -> TokenLogprobs | None:
    """Of those samples that want any; the rows of all arguments are the same."""
    asking = [row for row, sample in enumerate(samples) if sample.parameters.num_top_logprobs is not None]
    if not asking:
        return None
    counts = [samples[row].parameters.num_top_logprobs or 0 for row in asking]
    if len(asking) < len(samples):
        originals, normalizers, token_ids = originals[asking], normalizers[asking], token_ids[asking]
    return token_logprobs(originals, normalizers, token_ids, counts)
