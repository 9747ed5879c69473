"""Log-probabilities that a client sees: of its tokens, with their ranks, and of the most probable tokens beside them.

All are under the model's own distribution, before biases, penalties, temperature and filters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protos.sampling_pb2 import LogprobColumns
from worker.transfer import to_device

# Logits of a prompt that are in memory at once: those of 170 tokens for a vocabulary of 49,152 (32 MiB).
_MAX_LOGITS = 2**23


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of tokens, row after row.

    Attributes:
        logprobs: [num_tokens] float32.
        ranks: [num_tokens] int32: 1 plus the number of tokens that are more probable.
        top_token_ids: [sum of the tokens' counts] int64, best first.
        top_logprobs: like `top_token_ids`, float32.
    """

    logprobs: Tensor
    ranks: Tensor
    top_token_ids: Tensor
    top_logprobs: Tensor

    def to_columns(self) -> LogprobColumns:
        """The columns of the response."""
        return LogprobColumns(
            logprobs=self.logprobs.cpu().numpy().tobytes(),
            ranks=self.ranks.cpu().numpy().tobytes(),
            top_token_ids=self.top_token_ids.cpu().numpy().astype(np.int32).tobytes(),
            top_logprobs=self.top_logprobs.cpu().numpy().tobytes(),
        )


def token_logprobs(logits: Tensor, normalizers: Tensor, token_ids: Tensor, counts: Sequence[int]) -> TokenLogprobs:
    """The log-probabilities of one token of each row, and of the best tokens of the row.

    Args:
        logits: [num_rows, vocabulary_size] float32.
        normalizers: [num_rows] float32, the log of each row's sum of exponentials.
        token_ids: [num_rows] int64.
        counts: [num_rows]: how many of the best tokens.
    """
    own = logits.gather(-1, token_ids[:, None])  # [R, 1]
    top_token_ids, top_logprobs = most_probable(logits, normalizers, counts)
    return TokenLogprobs(
        logprobs=own.squeeze(-1) - normalizers,
        ranks=(logits > own).sum(-1, dtype=torch.int32) + 1,
        top_token_ids=top_token_ids,
        top_logprobs=top_logprobs,
    )


def most_probable(logits: Tensor, normalizers: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The best tokens of each row and their log-probabilities, [sum of the counts] int64 and float32, best first.

    Args:
        logits: [num_rows, vocabulary_size] float32.
        normalizers: [num_rows] float32, the log of each row's sum of exponentials.
        counts: [num_rows]: how many of the best tokens.
    """
    # One search for all rows, as deep as any row needs: its cost hardly depends on the depth.
    most = max(counts)
    values, token_ids = logits.topk(most)  # [R, M], best first
    logprobs = values - normalizers[:, None]
    if min(counts) == most:
        return token_ids.flatten(), logprobs.flatten()
    # Picked by index, which is known here; a mask would have to be counted on the device, and waited for.
    wanted = np.flatnonzero(np.arange(most) < np.array(counts)[:, None])
    (places,) = to_device(logits.device, wanted)
    return token_ids.flatten()[places], logprobs.flatten()[places]


def prompt_logprobs(
    head: Callable[[Tensor], Tensor], vocabulary_size: int, hidden: Tensor, token_ids: Tensor, counts: Sequence[int]
) -> TokenLogprobs:
    """The log-probabilities of a prompt's tokens, some at a time, so that memory does not grow with the prompt.

    Args:
        head: makes logits from hidden states.
        vocabulary_size: of those logits.
        hidden: [num_tokens, hidden_size], from which each token is predicted.
        token_ids: [num_tokens] int64, the tokens.
        counts: [num_tokens]: how many of the best tokens each comes with.
    """
    num_at_once = max(1, _MAX_LOGITS // vocabulary_size)
    # Made first: small results of each part, kept between the large ones, would leave holes too small for the next.
    told = TokenLogprobs(
        torch.empty(len(token_ids), dtype=torch.float32, device=hidden.device),
        torch.empty(len(token_ids), dtype=torch.int32, device=hidden.device),
        torch.empty(sum(counts), dtype=torch.int64, device=hidden.device),
        torch.empty(sum(counts), dtype=torch.float32, device=hidden.device),
    )
    first_top = 0
    for start in range(0, len(token_ids), num_at_once):
        end = start + num_at_once
        logits = head(hidden[start:end])
        part = token_logprobs(logits, logits.logsumexp(-1), token_ids[start:end], counts[start:end])
        tops = slice(first_top, first_top + sum(counts[start:end]))
        told.logprobs[start:end] = part.logprobs
        told.ranks[start:end] = part.ranks
        told.top_token_ids[tops] = part.top_token_ids
        told.top_logprobs[tops] = part.top_logprobs
        first_top = tops.stop
        del logits, part  # before the next ones are made
    return told
