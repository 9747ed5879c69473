"""What the core decides and what it is told: the plan of a step, the step's result, and what became of the sequences.

Plain values, and the columns in which a plan travels to the worker and its result comes back.
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from protos import worker_pb2
from protos.columns import pack, unpack, unpack_floats
from protos.sampling_pb2 import LogprobColumns
from protos.trace_context import TraceContext
from protos.worker_pb2 import ExecuteModelRequest, ExecuteModelResponse, NewRequest
from scheduler.preemption import Preemption
from scheduler.sequence import Sequence, SequenceGroup

# Stands for the token that a step in flight samples for the row's sequence. No row has two of them.
_LAST_SAMPLED = array("i", [-1])


@dataclass(slots=True)
class Row:
    """Tokens of one sequence to be computed in a step.

    Attributes:
        start: the position of the first of them: `num_computed_tokens` when planned, but for drafts.
        num_new_tokens: how many there are.
        samples: the sequences that get a token from the logits of the last one; none for a chunk that ends earlier, all
            of the group's live ones for the prompt that they fork from.
        draft: the row's only token, if it is a guess at what the sequence's row before it samples (`drafts.py`).
    """

    group: SequenceGroup
    sequence: Sequence
    start: int
    num_new_tokens: int
    samples: Seq[Sequence]
    draft: int | None = None

    @property
    def prompt_logprobs_end(self) -> int:
        """The end of the positions whose logits give a prompt token's log-probability: the last one's give none."""
        return min(self.start + self.num_new_tokens, self.group.num_prompt_tokens - 1)


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence that has ended; its status says how.

    Attributes:
        message: why, where the client could not know.
    """

    group: SequenceGroup
    sequence: Sequence
    message: str = ""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group that was given up because of its deadline; in a plan that is ready, it has ended."""

    group: SequenceGroup
    message: str


@dataclass(slots=True)
class NewTokens:
    """Tokens that `sequence` got in a step: its output from `first_index` on."""

    group: SequenceGroup
    sequence: Sequence
    first_index: int


@dataclass(slots=True)
class Plan:
    """One step. Without rows there is nothing to run, but `finished` and `dropped` may name groups that ended.

    Attributes:
        new_groups: groups in the rows that the worker has not seen.
        blocks_to_swap_out: pairs (block, swap block), done first.
        blocks_to_swap_in: pairs (swap block, block), done next.
        blocks_to_copy: pairs (from, to), done before the forward pass.
        new_tokens: the output of beam searches in `finished`.
        finished: sequences that ended because the pool, or the one that replaced it, is too small for them.
        dropped: groups whose deadline has passed, or cannot be met; they have ended.
        preempted: groups that lost their blocks to others.
        resumed: groups that had lost their blocks before, and run again.
        forget: numbers of requests that the worker has seen, and that have ended.
        telling: rows that give log-probabilities of prompt tokens: place in `rows`, and the position of the first.
        num_prefills_done: rows of more than one token that sample.
        num_beams: samples for beam searches; nothing more can be planned for these before the answer.
        num_drafts: rows of drafts.
    """

    step_id: int
    rows: list[Row] = field(default_factory=list)
    new_groups: list[SequenceGroup] = field(default_factory=list)
    blocks_to_swap_out: list[tuple[int, int]] = field(default_factory=list)
    blocks_to_swap_in: list[tuple[int, int]] = field(default_factory=list)
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)
    new_tokens: list[NewTokens] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    resumed: list[SequenceGroup] = field(default_factory=list)
    forget: list[int] = field(default_factory=list)
    telling: list[tuple[int, int]] = field(default_factory=list)
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    num_prefills_done: int = 0
    num_beams: int = 0
    num_drafts: int = 0

    def add(self, row: Row) -> None:
        """Adds a row."""
        num_new_tokens = row.num_new_tokens
        self.rows.append(row)
        self.num_tokens += num_new_tokens
        if num_new_tokens > 1:
            self.num_prefill_tokens += num_new_tokens
            self.num_prefills_done += bool(row.samples)
        self.num_drafts += row.draft is not None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the worker answers.

    Attributes:
        token_ids: one per sample of the plan, in the plan's order.
        logprobs: one per sample.
        failed: places of samples whose logits were not finite; their groups end.
        candidate_token_ids: for the samples of beam searches, in order: `num_candidates` of its search for each.
        candidate_logprobs: one per candidate.
        step_s: time that the worker took, without swapping.
        swap_s: time that swapping took.
        top_logprobs: for the samples of groups with num_top_logprobs, in order.
        prompt_logprobs: for the plan's `telling` rows, in order.
    """

    token_ids: Seq[int]
    logprobs: Seq[float]
    failed: Seq[int] = ()
    candidate_token_ids: Seq[int] = ()
    candidate_logprobs: Seq[float] = ()
    step_s: float = 0.0
    swap_s: float = 0.0
    top_logprobs: LogprobColumns = field(default_factory=LogprobColumns)
    prompt_logprobs: LogprobColumns = field(default_factory=LogprobColumns)


@dataclass(slots=True)
class StepOutputs:
    """What became of the sequences in one step.

    Attributes:
        new_tokens: one entry for each sequence that got any.
        failed: groups that the step could not sample for; they have ended.
        num_accepted: drafts that proved right: their sequences sampled these tokens.
    """

    new_tokens: list[NewTokens] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    failed: list[SequenceGroup] = field(default_factory=list)
    num_accepted: int = 0


def to_request(plan: Plan, epoch: int, traces: Seq[TraceContext] = ()) -> ExecuteModelRequest:
    """The plan in the columns of the worker's protocol. Call it before anything else changes a block table."""
    numbers: list[int] = []
    indexes: list[int] = []
    starts: list[int] = []
    counts: list[int] = []
    lengths: list[int] = []
    sample_rows: list[int] = []
    sample_indexes: list[int] = []
    tokens: list[array[int]] = []
    tables: list[array[int]] = []
    for place, row in enumerate(plan.rows):  # one pass: a generator for each column takes half as long again
        sequence, start, count = row.sequence, row.start, row.num_new_tokens
        numbers.append(row.group.number)
        indexes.append(sequence.index)
        starts.append(start)
        counts.append(count)
        if row.draft is not None:
            tokens.append(array("i", [row.draft]))
        else:
            tokens.append(known := row.group.token_ids(sequence, start, start + count))
            if len(known) < count:
                tokens.append(_LAST_SAMPLED)
        lengths.append(len(sequence.block_table))
        tables.append(sequence.block_table)
        for sampled in row.samples:
            sample_rows.append(place)
            sample_indexes.append(sampled.index)
    return ExecuteModelRequest(
        step_id=plan.step_id,
        epoch=epoch,
        new_requests=[_new_request(group) for group in plan.new_groups],
        request_ids=pack(numbers),
        sequence_indexes=pack(indexes),
        num_computed_tokens=pack(starts),
        num_new_tokens=pack(counts),
        token_ids=b"".join(tokens),
        block_table_lengths=pack(lengths),
        block_tables=b"".join(tables),
        sample_rows=pack(sample_rows),
        sample_sequence_indexes=pack(sample_indexes),
        blocks_to_swap_out=_pairs(plan.blocks_to_swap_out),
        blocks_to_swap_in=_pairs(plan.blocks_to_swap_in),
        blocks_to_copy=_pairs(plan.blocks_to_copy),
        finished_request_ids=pack(plan.forget),
        prompt_logprob_rows=pack(place for place, _ in plan.telling),
        prompt_logprob_starts=pack(start for _, start in plan.telling),
        traces=[worker_pb2.TraceContext(traceparent=t.traceparent, tracestate=t.tracestate) for t in traces],
    )


def to_result(response: ExecuteModelResponse) -> StepResult:
    """The worker's answer, unpacked from its columns."""
    timings = response.timings
    return StepResult(
        unpack(response.token_ids),
        unpack_floats(response.logprobs),
        unpack(response.failed_samples),
        unpack(response.candidate_token_ids),
        unpack_floats(response.candidate_logprobs),
        step_s=(timings.prepare_ms + timings.forward_ms + timings.sample_ms - timings.swap_ms) / 1e3,
        swap_s=timings.swap_ms / 1e3,
        top_logprobs=response.top_logprobs,
        prompt_logprobs=response.prompt_logprobs,
    )


def _new_request(group: SequenceGroup) -> NewRequest:
    new = NewRequest(request_id=group.number, sampling=group.sampling)
    if group.beam is not None:
        new.sampling.num_candidates = group.beam.num_candidates
    if group.penalized or group.prompt_logprobs is not None:
        new.prompt_token_ids = group.prompt_token_ids.tobytes()
    if group.penalized:
        begun = [sequence for sequence in group.live if sequence.output_token_ids]
        new.output_sequence_indexes = pack(sequence.index for sequence in begun)
        new.output_counts = pack(len(sequence.output_token_ids) for sequence in begun)
        new.output_token_ids = b"".join(sequence.output_token_ids.tobytes() for sequence in begun)
    return new


def _pairs(pairs: list[tuple[int, int]]) -> bytes:
    return pack(block for pair in pairs for block in pair)
