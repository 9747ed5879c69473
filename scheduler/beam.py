"""Beam search: which continuations of a group's sequences go on, which are finished, and when it is over.

The rules are those of Hugging Face's `generate(num_beams=...)`. The search sees tokens and log-probabilities; the
scheduler makes what it decides true by fork, append and free, the three operations that need no more memory than
copy-on-write takes (Kwon et al., SOSP'23, section 5.2).
"""

import enum
import heapq
import math
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass


class EarlyStopping(enum.Enum):
    """When a search that has its `width` hypotheses ends."""

    # At once.
    TRUE = enum.auto()
    # When the best beam, judged at its present length, is no better than the worst hypothesis.
    FALSE = enum.auto()
    # When even a beam of the greatest length that loses no more probability could not be better.
    NEVER = enum.auto()


@dataclass(frozen=True, slots=True)
class BeamParams:
    """What the client asks of a search.

    Attributes:
        width: beams, and hypotheses that are kept.
        length_penalty: exponent of the length that divides a hypothesis' cumulative log-probability.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.FALSE


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence that is searched, with the most probable tokens behind it.

    Attributes:
        output_token_ids: its output so far.
        cumulative_logprob: of that output.
        candidates: (token id, log-probability), best first.
    """

    output_token_ids: "array[int]"
    cumulative_logprob: float
    candidates: Seq[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Extension:
    """A beam that goes on: which of those given, by which token, and the token's own log-probability."""

    parent: int
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished output.

    Attributes:
        score: `cumulative_logprob` over the length to the power of the length penalty.
        stop_token_id: what ended it; None for its length.
    """

    score: float
    token_ids: "array[int]"
    cumulative_logprob: float
    stop_token_id: int | None


class BeamSearch:
    """One group's search.

    Attributes:
        width: beams at most.
        hypotheses: the best finished outputs so far, `width` at most, best first.
        done: whether nothing better is looked for any more.
    """

    def __init__(self, params: BeamParams, stop_token_ids: frozenset[int], min_tokens: int) -> None:
        self.width = params.width
        self.hypotheses: list[Hypothesis] = []
        self.done = False
        self._params = params
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens

    @property
    def num_candidates(self) -> int:
        """Candidates of each beam that suffice: if all stop ids are among them, `width` others are too."""
        return self.width + len(self._stop_token_ids)

    def step(self, beams: Seq[Beam], max_tokens: int) -> list[Extension]:
        """Takes all beams, one token further each, and gives those that go on, best first.

        Args:
            beams: of one length.
            max_tokens: the length at which all end.
        """
        length = len(beams[0].output_token_ids) + 1
        extensions: list[Extension] = []
        best = -math.inf
        for place, (total, parent, token_id, logprob) in enumerate(_best_first(beams)):
            if place >= self.width and len(extensions) == self.width:
                break
            stops = token_id in self._stop_token_ids and length > self._min_tokens
            if stops or length >= max_tokens:
                if place < self.width:  # one that stops further down would be a hypothesis by default, not by merit
                    tokens = beams[parent].output_token_ids + array("i", [token_id])
                    self._add(tokens, total, token_id if stops else None)
            elif len(extensions) < self.width:
                best = max(best, total)
                extensions.append(Extension(parent, token_id, logprob))
        self.done = not extensions or not self._can_improve(best, length, max_tokens)
        return extensions

    def conclude(self, beams: Seq[Beam]) -> None:
        """Ends the search where it stands: what goes on counts as finished by its length."""
        for beam in beams:
            self._add(beam.output_token_ids, beam.cumulative_logprob, None)
        self.done = True

    def _add(self, token_ids: "array[int]", cumulative_logprob: float, stop_token_id: int | None) -> None:
        score = cumulative_logprob / len(token_ids) ** self._params.length_penalty
        self.hypotheses.append(Hypothesis(score, token_ids, cumulative_logprob, stop_token_id))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.width :]

    def _can_improve(self, best: float, length: int, max_tokens: int) -> bool:
        """Whether a beam may still become better than the worst hypothesis.

        Args:
            best: cumulative log-probability of the best beam that goes on.
            length: its length.
            max_tokens: the greatest.
        """
        if len(self.hypotheses) < self.width:
            return True
        params = self._params
        if params.early_stopping is EarlyStopping.TRUE:
            return False
        if params.early_stopping is EarlyStopping.NEVER and params.length_penalty > 0:
            length = max_tokens
        return best / length**params.length_penalty > self.hypotheses[-1].score


def _best_first(beams: Seq[Beam]) -> Iterator[tuple[float, int, int, float]]:
    """The candidates of all beams, merged: cumulative log-probability, which beam, token, its own log-probability.

    Among equals the better beam's goes first.
    """

    def of(parent: int, beam: Beam) -> Iterator[tuple[float, int, int, float]]:
        for token_id, logprob in beam.candidates:
            if logprob > -math.inf:
                yield beam.cumulative_logprob + logprob, parent, token_id, logprob

    return heapq.merge(*(of(*pair) for pair in enumerate(beams)), key=lambda candidate: -candidate[0])
