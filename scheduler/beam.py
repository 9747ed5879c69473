"""Beam search: which continuations of a group's sequences go on, which are finished, and when the search is over.

The rules are those of Hugging Face's `generate(num_beams=...)`. The search sees tokens and log-probabilities; the
scheduler carries out its decisions by fork, append and free, the three operations that need no more memory than
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
    """When a search ends, once it has `width` hypotheses."""

    # At once.
    TRUE = enum.auto()
    # When the best beam, judged at its present length, is no better than the worst hypothesis.
    FALSE = enum.auto()
    # When even a beam that grew to the greatest length without losing probability would be no better.
    NEVER = enum.auto()


@dataclass(frozen=True, slots=True)
class BeamParams:
    """What the client asks of a search.

    Attributes:
        width: the number of beams, and of hypotheses that are kept.
        length_penalty: exponent of the length by which a hypothesis's cumulative log-probability is divided.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.FALSE


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence of the search, with its most probable next tokens.

    Attributes:
        output_token_ids: its output so far.
        cumulative_logprob: the log-probability of that output.
        candidates: (token id, log-probability), best first.
    """

    output_token_ids: "array[int]"
    cumulative_logprob: float
    candidates: Seq[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Extension:
    """A beam that goes on: its parent's place among the beams, its new token, and that token's log-probability."""

    parent: int
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished output.

    Attributes:
        score: `cumulative_logprob` divided by length ** length_penalty.
        stop_token_id: the id that ended it; None if its length did.
    """

    score: float
    token_ids: "array[int]"
    cumulative_logprob: float
    stop_token_id: int | None


class BeamSearch:
    """One group's search.

    Attributes:
        width: the most beams.
        hypotheses: the best finished outputs so far, `width` at most, best first.
        done: whether the search is over.
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
        """How many candidates of each beam suffice: even if all stop ids are among them, so are `width` others."""
        return self.width + len(self._stop_token_ids)

    def step(self, beams: Seq[Beam], max_tokens: int) -> list[Extension]:
        """Takes each beam one token further; returns those that go on, best first.

        Args:
            beams: all of one length.
            max_tokens: the length at which all end.
        """
        length = len(beams[0].output_token_ids) + 1
        extensions: list[Extension] = []
        best = -math.inf
        for place, (total, parent, token_id, logprob) in enumerate(_best_first(beams)):
            if len(extensions) == self.width:
                break
            stops = token_id in self._stop_token_ids and length > self._min_tokens
            if stops or length >= max_tokens:
                if place < self.width:  # one that stops further down would be a hypothesis by default, not by merit
                    tokens = beams[parent].output_token_ids + array("i", [token_id])
                    self._add(tokens, total, token_id if stops else None)
            else:
                best = max(best, total)
                extensions.append(Extension(parent, token_id, logprob))
        self.done = not extensions or not self._can_improve(best, length, max_tokens)
        return extensions

    def conclude(self, beams: Seq[Beam]) -> None:
        """Ends the search where it stands: `beams` count as finished by length."""
        for beam in beams:
            self._add(beam.output_token_ids, beam.cumulative_logprob, None)
        self.done = True

    def _add(self, token_ids: "array[int]", cumulative_logprob: float, stop_token_id: int | None) -> None:
        score = cumulative_logprob / len(token_ids) ** self._params.length_penalty
        self.hypotheses.append(Hypothesis(score, token_ids, cumulative_logprob, stop_token_id))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.width :]

    def _can_improve(self, best: float, length: int, max_tokens: int) -> bool:
        """Whether a beam may still beat the worst hypothesis.

        Args:
            best: cumulative log-probability of the best beam that goes on.
            length: its length.
            max_tokens: the greatest length.
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
    """The candidates of all beams, best first: cumulative log-probability, beam's place, token, its log-probability.

    Of equal candidates, that of the better beam comes first.
    """

    def of(parent: int, beam: Beam) -> Iterator[tuple[float, int, int, float]]:
        for token_id, logprob in beam.candidates:
            if logprob > -math.inf:
                yield beam.cumulative_logprob + logprob, parent, token_id, logprob

    return heapq.merge(*(of(*pair) for pair in enumerate(beams)), key=lambda candidate: -candidate[0])
