"""The most probable tokens of a sample, from which the scheduler's beam search makes hypotheses; nothing is drawn.

Log-probabilities are under the model's own distribution. What min_tokens forbids is removed after that distribution is
made, as in transformers, whose processors act on the log_softmax of the logits in a beam search. If fewer tokens are
possible than candidates are asked for, the impossible ones among the candidates have -inf, and are sent like the
others: the scheduler drops them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from worker.logprobs import most_probable
from worker.transfer import to_device


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best tokens of each row, best first, row after row.

    Attributes:
        token_ids: [sum of the rows' counts] int64.
        logprobs: like `token_ids`, float32.
        best: [num_rows] int64, the first token id of each row.
    """

    token_ids: Tensor
    logprobs: Tensor
    best: Tensor


def best_candidates(logits: Tensor, normalizers: Tensor, counts: Sequence[int]) -> Candidates:
    """The `counts[row]` best tokens of each row.

    Args:
        logits: [num_rows, vocabulary_size] float32, -inf where a token is forbidden.
        normalizers: [num_rows] float32, the log of each row's sum of exponentials with no token forbidden.
        counts: [num_rows], each from 1 to the vocabulary's size.
    """
    token_ids, logprobs = most_probable(logits, normalizers, counts)
    (firsts,) = to_device(logits.device, np.cumsum([0, *counts[:-1]]))
    return Candidates(token_ids, logprobs, token_ids[firsts])
