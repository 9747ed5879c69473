"""Sequences and sequence groups: what the scheduler knows of a request, and which changes of status are legal.

Token ids are numbers here; text is the router's, tensors are the worker's.
"""

import enum
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from protos.logprobs import Logprobs
from protos.sampling_pb2 import Sampling
from scheduler.beam import BeamSearch


class Status(enum.Enum):
    """Where a sequence is. The FINISHED ones are final; each sequence reaches exactly one of them."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_IGNORED = enum.auto()

    @property
    def finished(self) -> bool:
        """Whether this status is final."""
        return self not in _LEGAL


_LEGAL = {
    Status.WAITING: {
        Status.RUNNING,
        Status.FINISHED_STOPPED,
        Status.FINISHED_LENGTH_CAPPED,  # its last token came after it was preempted, or a smaller pool has no more room
        Status.FINISHED_ABORTED,
        Status.FINISHED_IGNORED,
    },
    Status.RUNNING: {
        Status.WAITING,  # preempted by recompute
        Status.SWAPPED,  # preempted by swap
        Status.FINISHED_STOPPED,
        Status.FINISHED_LENGTH_CAPPED,
        Status.FINISHED_ABORTED,
    },
    Status.SWAPPED: {
        Status.RUNNING,
        Status.WAITING,  # the worker is gone, and the swap pool with it
        Status.FINISHED_STOPPED,
        Status.FINISHED_LENGTH_CAPPED,  # its last token came after it was preempted
        Status.FINISHED_ABORTED,
    },
}


@dataclass(frozen=True, slots=True)
class Progress:
    """What a sequence had output at another scheduler, where its request began.

    Attributes:
        ended: no more output is wanted of it.
    """

    token_ids: "array[int]"
    cumulative_logprob: float = 0.0
    ended: bool = False


class Sequence:
    """One run of token ids, prompt first, with its block table.

    Attributes:
        index: its place in its group, from 0.
        num_tokens: prompt and output tokens together.
        num_expected_tokens: the same, plus those that steps in flight will sample, as far as they can be counted on.
        num_computed_tokens: how many of these have their KV in the blocks, or get it from a step in flight.
        output_token_ids: tokens sampled so far. The last one's KV is not computed yet.
        output_logprobs: the log-probability of each.
        logprobs: the same with ranks and the most probable tokens; None where the client does not want them.
        block_table: physical block of each logical one. Only the block manager writes it.
        swap_table: while swapped, the swap pool's block for each logical one. Only the block manager writes it.
        contents: for each full block, the prefix cache's number of its content. Only the block manager writes it.
        cumulative_logprob: the sum of the output's log-probabilities.
        stop_token_id: the sampled id that stopped it, if one did.
        num_taken_up: output tokens that another scheduler had sampled.
    """

    __slots__ = (
        "block_table",
        "contents",
        "cumulative_logprob",
        "index",
        "logprobs",
        "num_computed_tokens",
        "num_expected_tokens",
        "num_taken_up",
        "num_tokens",
        "output_logprobs",
        "output_token_ids",
        "status",
        "stop_token_id",
        "swap_table",
    )

    def __init__(self, index: int, num_prompt_tokens: int) -> None:
        self.index = index
        self.num_tokens = num_prompt_tokens
        self.num_expected_tokens = num_prompt_tokens
        self.num_computed_tokens = 0
        self.output_token_ids: array[int] = array("i")
        self.output_logprobs: array[float] = array("f")
        self.logprobs: Logprobs | None = None
        self.block_table: array[int] = array("i")
        self.swap_table: array[int] = array("i")
        self.contents: list[int] = []
        self.cumulative_logprob = 0.0
        self.stop_token_id: int | None = None
        self.num_taken_up = 0
        self.status = Status.WAITING

    def append(self, token_id: int, logprob: float) -> None:
        """Appends a sampled token, whether or not it was expected."""
        self.output_token_ids.append(token_id)
        self.output_logprobs.append(logprob)
        self.num_tokens += 1
        if self.num_expected_tokens < self.num_tokens:
            self.num_expected_tokens = self.num_tokens
        self.cumulative_logprob += logprob

    def go_on_from(self, begun: Progress) -> None:
        """Takes tokens that another scheduler sampled; their single log-probabilities are not known here."""
        self.output_token_ids = begun.token_ids
        self.num_taken_up = len(begun.token_ids)
        self.output_logprobs = array("f", bytes(4 * len(begun.token_ids)))
        self.num_tokens += len(begun.token_ids)
        self.num_expected_tokens = self.num_tokens
        self.cumulative_logprob = begun.cumulative_logprob
        if self.logprobs is not None:
            self.logprobs = Logprobs.unknown(self.logprobs.num_top, len(begun.token_ids))

    def cut(self, num_output_tokens: int) -> None:
        """Drops what was sampled beyond `num_output_tokens`."""
        dropped = self.output_logprobs[num_output_tokens:]
        self.cumulative_logprob -= sum(dropped)
        self.num_tokens -= len(dropped)
        del self.output_token_ids[num_output_tokens:], self.output_logprobs[num_output_tokens:]
        if self.logprobs is not None:
            self.logprobs.cut(num_output_tokens)

    def fork(self, into: "Sequence | int") -> "Sequence":
        """Returns a sequence with the same tokens: `into` itself, which loses its own, or a new one with that index."""
        child = Sequence(into, self.num_tokens) if isinstance(into, int) else into
        child.num_tokens = self.num_tokens
        child.num_expected_tokens = self.num_expected_tokens
        child.output_token_ids = self.output_token_ids[:]
        child.output_logprobs = self.output_logprobs[:]
        child.cumulative_logprob = self.cumulative_logprob
        child.status = self.status
        return child

    def move_to(self, status: Status) -> None:
        """Changes status; raises AssertionError if the change is not legal."""
        assert status in _LEGAL.get(self.status, ()), f"sequence {self.index}: {self.status.name} -> {status.name}"
        self.status = status


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The sequences sampled from one prompt: admitted, preempted and swapped together.

    Until the prompt is computed only one of them, the root, has blocks. Then the others fork from it and share its
    blocks; a write to a shared block copies it first (Kwon et al., SOSP'23, section 4.4).

    Attributes:
        number: the scheduler's number of the request, in order of arrival.
        n: sequences that the client gets.
        max_tokens: the most output tokens that each sequence gets: no more than the pool can hold. Set by `cap`.
        min_tokens: output tokens before which no stop id ends a sequence.
        sampling: for the worker; read here only for what the worker has to be told, or has to report.
        arrival: time of submission, s.
        rank: its place in the queues: the least goes first. Unique.
        salt: groups with different salts never share blocks.
        tenant: whose request it is; groups of one tenant wait for each other.
        tenant_weight: the tenant's share of the service, relative to the weights of others.
        deadline: time after which its client does not wait any longer, s; None for never.
        beam: set for a beam search, whose sequences come and go; it starts with one.
        runs_ahead: whether more may be planned for a sequence before the step that samples its last token is answered.
        wanted_max_tokens: the most output tokens of each sequence that the client wants.
        sequences: all that the client gets, by index; of a beam search, its beams until it has ended.
        live: its unfinished sequences, by index; those of a beam search, most probable first.
        expects_below: a sequence shorter than this counts on the token that a planned step samples for it. It does not
            count on its last token, whose KV is never computed; and a beam counts on none, since only the search
            chooses its tokens. Set by `cap`.
        forked: whether no live sequence has still to fork from the root.
        first_scheduled: time of the first plan that contained it, s.
        preempted_by: the request that its last preemption made room for; empty for none.
        preemption_reason: the mode of its last preemption, and why, in words.
        num_cached_prompt_tokens: prompt tokens whose KV was in the prefix cache when it was first admitted.
        returns_after: the last step in flight when it was preempted. What that step samples for it still counts, so it
            does not run again before the answer.
        known_to_worker: whether a plan has introduced it to the worker.
        penalized: whether sampling depends on all earlier tokens, which the worker then has to be told.
        num_top_logprobs: most probable tokens reported with each output token; None if the client wants no logprobs.
        prompt_logprobs: those of the prompt's tokens but the first, as far as computed; None if the client wants none.
        num_told: how many of these are there, or come with a step in flight.
        taken_up: whether it goes on from output of another scheduler, whose log-probabilities are not known here.
        deadline_entry: the number of its valid entry in `Deadlines`; 0 for none.
    """

    number: int
    request_id: str
    prompt_token_ids: "array[int]"
    n: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]
    sampling: Sampling | None
    arrival: float
    rank: tuple[float, int]
    salt: str = ""
    tenant: str = ""
    tenant_weight: float = 1.0
    deadline: float | None = None
    beam: BeamSearch | None = None
    runs_ahead: bool = True
    wanted_max_tokens: int = field(init=False)
    sequences: list[Sequence] = field(init=False)
    live: list[Sequence] = field(init=False)
    expects_below: int = field(init=False)
    forked: bool = field(init=False)
    first_scheduled: float | None = None
    num_preemptions: int = 0
    preempted_by: str = ""
    preemption_reason: str = ""
    num_cached_prompt_tokens: int = 0
    returns_after: int = 0
    known_to_worker: bool = False
    penalized: bool = field(init=False, default=False)
    num_top_logprobs: int | None = field(init=False, default=None)
    prompt_logprobs: Logprobs | None = field(init=False, default=None)
    num_told: int = 0
    taken_up: bool = False
    deadline_entry: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.tenant_weight < float("inf"):
            raise ValueError(f"tenant_weight ({self.tenant_weight}) must be over 0, and finite")
        self.wanted_max_tokens = self.max_tokens
        self.cap(self.max_tokens)
        num_sequences = self.n if self.beam is None else 1
        self.sequences = [Sequence(index, len(self.prompt_token_ids)) for index in range(num_sequences)]
        self.live = list(self.sequences)
        self.forked = num_sequences == 1
        if (wanted := self.sampling) is None:
            return
        off = wanted.repetition_penalty in (0, 1) and wanted.presence_penalty == wanted.frequency_penalty == 0
        self.penalized = not off
        if wanted.HasField("num_prompt_logprobs"):
            self.prompt_logprobs = Logprobs(wanted.num_prompt_logprobs)
        if wanted.HasField("num_top_logprobs"):
            self.num_top_logprobs = wanted.num_top_logprobs
            for sequence in self.sequences:
                sequence.logprobs = Logprobs(wanted.num_top_logprobs)
        if self.beam is not None and (self.penalized or self.num_top_logprobs is not None):
            raise ValueError("penalties and logprobs cannot be combined with a beam search")

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_seqs(self) -> int:
        """How many of its sequences may run at once, as `max_num_seqs` counts them."""
        if self.beam is not None and self.live:
            return self.beam.width
        return len(self.live)

    @property
    def root(self) -> Sequence:
        """The sequence that computes the prompt for all."""
        return self.live[0]

    @property
    def status(self) -> Status:
        """The status that its live sequences share; once it has ended, that of its first sequence."""
        return (self.live or self.sequences)[0].status

    @property
    def prefilling(self) -> bool:
        """Whether more has to be computed than the last token of each sequence."""
        if not self.forked:
            return True
        return any(sequence.num_expected_tokens - sequence.num_computed_tokens > 1 for sequence in self.live)

    @property
    def num_rows(self) -> int:
        """How many of its sequences compute tokens in a step."""
        return len(self.live) if self.forked else 1

    def targets(self) -> list[tuple[Sequence, int]]:
        """The sequences that compute tokens, each with the number of tokens up to which it can be computed now.

        A root that others fork from stops at the prompt's end. Beams sample in the same step or not at all, so a beam
        that is ahead waits before its last token while others are recomputed.
        """
        if not self.forked:
            return [(self.root, self.num_prompt_tokens)]
        waits = self.beam is not None and len(self.live) > 1 and self.prefilling
        return [(sequence, sequence.num_expected_tokens - waits) for sequence in self.live]

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether the prompt has to be computed, even if its KV is cached, to get its log-probabilities."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def can_be_drafted_for(self) -> bool:
        """Whether its sequences can have drafts: not in a beam search, which chooses the tokens, nor with penalties."""
        return self.beam is None and not self.penalized

    def cap(self, max_tokens: int) -> None:
        """Sets the most output tokens that each sequence gets."""
        self.max_tokens = max_tokens
        counts_on_samples = self.runs_ahead and self.beam is None
        self.expects_below = self.num_prompt_tokens + max_tokens - 1 if counts_on_samples else 0

    def take_up(self, progress: Iterable[Progress]) -> None:
        """Goes on from what its sequences had output at another scheduler, as if they had been preempted since.

        Raises:
            ValueError: `progress` has more or fewer sequences, leaves nothing to do, or has output for only some.
        """
        for sequence, begun in zip(self.sequences, progress, strict=True):
            if begun.ended:
                sequence.move_to(Status.FINISHED_ABORTED)
                self.live.remove(sequence)
            elif len(begun.token_ids) < self.wanted_max_tokens:
                sequence.go_on_from(begun)
            else:
                raise ValueError(f"sequence {sequence.index} has all of its {len(begun.token_ids)} tokens already")
        if not self.live:
            raise ValueError("all sequences have ended already")
        if len({not sequence.output_token_ids for sequence in self.live}) > 1:
            raise ValueError("some sequences have tokens and others none, and all get their first ones together")
        self.forked = len(self.live) == 1
        self.taken_up = True

    def forget_steps_in_flight(self) -> None:
        """Expects nothing more of the steps in flight: they are lost, and what they were to sample with them."""
        for sequence in self.live:
            sequence.num_expected_tokens = sequence.num_tokens
        self.num_told = len(self.prompt_logprobs) if self.prompt_logprobs is not None else 0

    def move_to(self, status: Status) -> None:
        """Changes the status of all live sequences."""
        for sequence in self.live:
            sequence.move_to(status)

    def token_ids(self, sequence: Sequence, start: int, end: int) -> "array[int]":
        """Token ids `start:end` of `sequence`, counted from the prompt's first, as far as they are known."""
        num_prompt_tokens = len(self.prompt_token_ids)
        if start >= num_prompt_tokens:
            return sequence.output_token_ids[start - num_prompt_tokens : end - num_prompt_tokens]
        if end <= num_prompt_tokens:
            return self.prompt_token_ids[start:end]
        return self.prompt_token_ids[start:] + sequence.output_token_ids[: end - num_prompt_tokens]
