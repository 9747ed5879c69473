"""Log-probabilities of tokens and of the most probable tokens in their places, as sent on the internal streams."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from protos.columns import unpack, unpack_floats
from protos.sampling_pb2 import LogprobColumns


def _ints() -> "array[int]":
    return array("i")


def _floats() -> "array[float]":
    return array("f")


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of consecutive tokens, as columns.

    Attributes:
        num_top: how many of the most probable tokens come with each token.
        logprobs: one per token.
        ranks: one per token; 1 for the most probable one.
        top_token_ids: `num_top` per token, best first.
        top_logprobs: like `top_token_ids`.
    """

    num_top: int
    logprobs: "array[float]" = field(default_factory=_floats)
    ranks: "array[int]" = field(default_factory=_ints)
    top_token_ids: "array[int]" = field(default_factory=_ints)
    top_logprobs: "array[float]" = field(default_factory=_floats)

    @classmethod
    def unknown(cls, num_top: int, num_tokens: int) -> Self:
        """Zeros for tokens whose log-probabilities are not known."""
        tokens, tops = bytes(4 * num_tokens), bytes(4 * num_tokens * num_top)
        return cls(num_top, array("f", tokens), array("i", tokens), array("i", tops), array("f", tops))

    def __len__(self) -> int:
        return len(self.logprobs)

    def part(self, start: int, end: int | None = None) -> Self:
        """A copy of tokens `start:end`."""
        end = len(self) if end is None else end
        tops = slice(start * self.num_top, end * self.num_top)
        columns = (self.logprobs[start:end], self.ranks[start:end], self.top_token_ids[tops], self.top_logprobs[tops])
        return type(self)(self.num_top, *columns)

    def extend(self, other: "Logprobs") -> None:
        """Appends the tokens that follow."""
        assert other.num_top == self.num_top, "of two requests"
        self.logprobs += other.logprobs
        self.ranks += other.ranks
        self.top_token_ids += other.top_token_ids
        self.top_logprobs += other.top_logprobs

    def cut(self, num_tokens: int) -> None:
        """Drops all tokens after the first `num_tokens`."""
        del self.logprobs[num_tokens:], self.ranks[num_tokens:]
        del self.top_token_ids[num_tokens * self.num_top :], self.top_logprobs[num_tokens * self.num_top :]


class LogprobReader:
    """Reads columns in parts, from the front."""

    def __init__(self, columns: LogprobColumns) -> None:
        self._logprobs = unpack_floats(columns.logprobs)
        self._ranks = unpack(columns.ranks)
        self._top_token_ids = unpack(columns.top_token_ids)
        self._top_logprobs = unpack_floats(columns.top_logprobs)
        self._token = 0
        self._top = 0

    def take(self, num_tokens: int, num_top: int) -> Logprobs:
        """The next tokens, each with the `num_top` most probable ones."""
        tokens = slice(self._token, self._token + num_tokens)
        tops = slice(self._top, self._top + num_tokens * num_top)
        self._token, self._top = tokens.stop, tops.stop
        columns = (self._logprobs[tokens], self._ranks[tokens], self._top_token_ids[tops], self._top_logprobs[tops])
        taken = Logprobs(num_top, *columns)
        assert len(taken) == num_tokens, "columns too short"
        return taken


def to_columns(parts: Iterable[Logprobs]) -> LogprobColumns:
    """All tokens of `parts`, one after the other."""
    parts = list(parts)
    return LogprobColumns(
        logprobs=b"".join(part.logprobs.tobytes() for part in parts),
        ranks=b"".join(part.ranks.tobytes() for part in parts),
        top_token_ids=b"".join(part.top_token_ids.tobytes() for part in parts),
        top_logprobs=b"".join(part.top_logprobs.tobytes() for part in parts),
    )
