"""What changes a row's logits before a token is drawn: biases, penalties for tokens seen before, bans of tokens.

In this order, as in transformers and vLLM: `logit_bias`; `repetition_penalty` over prompt and output, which
divides positive logits and multiplies negative ones (CTRL: Keskar et al. 2019, arXiv:1909.05858); `presence_penalty`
and `frequency_penalty` over the output, which are subtracted once and per occurrence (OpenAI's rule); and stop tokens
that come too early are forbidden.

Only the logits of the tokens in question are touched, those of all rows at once.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.transfer import to_device

TokenIds = npt.NDArray[np.int64]

_NO_TOKENS: TokenIds = np.empty(0, dtype=np.int64)


class TokenHistory:
    """The tokens of one request's sequences, noted by position: a token that is sampled again takes the same place.

    So it does not matter whether the scheduler accepted what a step sampled, or lost it to a preemption.

    Args:
        prompt_token_ids: any integers.
    """

    def __init__(self, prompt_token_ids: npt.NDArray[np.integer]) -> None:
        self.unique_prompt: TokenIds = np.unique(prompt_token_ids).astype(np.int64)
        self._num_prompt_tokens = len(prompt_token_ids)
        # By sequence index: room for the output, and how much of it has been filled.
        self._outputs: dict[int, TokenIds] = {}
        self._num_known: dict[int, int] = {}

    def note(self, sequence_index: int, position: int, token_ids: npt.NDArray[np.integer] | int) -> None:
        """Notes tokens of a sequence from `position` on, which counts from the prompt's first token."""
        start = position - self._num_prompt_tokens
        end = start + np.size(token_ids)
        room = self._outputs.get(sequence_index, _NO_TOKENS)
        if end > len(room):
            grown = np.empty(max(16, 2 * end), dtype=np.int64)
            grown[: len(room)] = room
            self._outputs[sequence_index] = room = grown
        room[start:end] = token_ids
        self._num_known[sequence_index] = max(end, self._num_known.get(sequence_index, 0))

    def output(self, sequence_index: int, position: int) -> TokenIds | None:
        """The output of a sequence before `position`; None if not all of it is known."""
        num_tokens = position - self._num_prompt_tokens
        if not 0 <= num_tokens <= self._num_known.get(sequence_index, 0):
            return None
        return self._outputs.get(sequence_index, _NO_TOKENS)[:num_tokens]


def add_biases(
    logits: Tensor, rows: Sequence[int], token_ids: Sequence[Sequence[int]], biases: Sequence[Sequence[float]]
) -> None:
    """Adds biases to the logits of each row's tokens; in place.

    Args:
        logits: [num_rows, vocabulary_size] float32.
        rows: [R]: those with biases.
        token_ids: [R]: the tokens of each, none of them twice.
        biases: like `token_ids`.
    """
    summands = np.concatenate([np.array(row, dtype=np.float32) for row in biases])
    row, column, summand = to_device(logits.device, *_cells(rows, token_ids), summands)
    logits[row, column] = logits[row, column] + summand


def penalize_repetition(
    logits: Tensor, rows: Sequence[int], token_ids: Sequence[TokenIds], penalties: Sequence[float]
) -> None:
    """Divides positive logits of tokens seen, and multiplies negative ones; in place.

    Args:
        logits: [num_rows, vocabulary_size] float32.
        rows: [R]: those with a penalty.
        token_ids: [R]: the tokens that each has seen; how often one occurs does not matter.
        penalties: [R].
    """
    row, column, factors = to_device(logits.device, *_cells(rows, token_ids), _spread(penalties, token_ids))
    values = logits[row, column]  # read before any is written: a token that occurs twice is penalized once
    penalized = torch.where(values > 0, values / factors, values * factors)
    # No penalty may make a finite logit infinite: no token could be drawn then.
    limit = torch.finfo(torch.float32).max
    logits[row, column] = penalized.clamp_(-limit, limit)


def penalize_occurrences(
    logits: Tensor,
    rows: Sequence[int],
    token_ids: Sequence[TokenIds],
    presence_penalties: Sequence[float],
    frequency_penalties: Sequence[float],
) -> None:
    """Subtracts one penalty from a token's logit once, and the other per occurrence; in place.

    Args:
        logits: [num_rows, vocabulary_size] float32.
        rows: [R]: those with a penalty.
        token_ids: [R]: the output tokens of each, each token as often as it occurs.
        presence_penalties: [R].
        frequency_penalties: [R].
    """
    penalties = (_spread(values, token_ids) for values in (presence_penalties, frequency_penalties))
    row, column, once, each = to_device(logits.device, *_cells(rows, token_ids), *penalties)
    logits[row, column] = logits[row, column] - once
    # The summands of one cell are equal, so their order does not matter.
    logits.index_put_((row, column), -each, accumulate=True)


def forbid(logits: Tensor, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
    """Makes the logits of each row's tokens -inf; in place.

    Args:
        logits: [num_rows, vocabulary_size] float32.
        rows: [R]: those with tokens to be forbidden.
        token_ids: [R]: the tokens of each.
    """
    row, column = to_device(logits.device, *_cells(rows, token_ids))
    logits[row, column] = logits.new_full((), -torch.inf)  # made on the device: for a host number it would wait


def _cells(rows: Sequence[int], token_ids: Sequence[TokenIds] | Sequence[Sequence[int]]) -> tuple[TokenIds, TokenIds]:
    """Row and column of each token's logit."""
    columns = [np.array(ids, dtype=np.int64) for ids in token_ids]
    return np.repeat(np.array(rows, dtype=np.int64), [len(ids) for ids in token_ids]), np.concatenate(columns)


def _spread(values: Sequence[float], token_ids: Sequence[TokenIds]) -> npt.NDArray[np.float32]:
    """Each row's value at each of its tokens."""
    return np.repeat(np.array(values, dtype=np.float32), [len(ids) for ids in token_ids])
