"""What the core decides and what it is told: the plan of a step, the step's result, and what became of the sequences.

Plain values without behaviour beyond the columns in which a plan travels to the worker.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from protos.columns import pack
from protos.worker_pb2 import ExecuteModelRequest, NewRequest
from scheduler.sequence import Sequence, SequenceGroup


@dataclass(slots=True)
class Row:
    """Tokens of one sequence to be computed in a step.

    Attributes:
        start: `num_computed_tokens` when planned: the position of the first of them.
        num_new_tokens: how many.
        samples: the sequences that get a token from the logits behind the last one; none for a chunk that ends earlier,
            all of the group's for the prompt that they fork from.
    """

    group: SequenceGroup
    sequence: Sequence
    start: int
    num_new_tokens: int
    samples: Seq[Sequence]


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence reached its final status, which stands in it.

    Attributes:
        stop_token_id: the sampled id that stopped it, if one did.
        message: why, where the client could not know.
    """

    group: SequenceGroup
    sequence: Sequence
    stop_token_id: int | None = None
    message: str = ""


@dataclass(slots=True)
class Plan:
    """One step. Without rows there is nothing to run, though `ignored` and `expired` may tell of groups that ended.

    Attributes:
        blocks_to_copy: pairs (from, to), before the forward.
        ignored: sequences of groups that are too large for the pool, or for the one that replaced it; they have ended.
        expired: groups whose deadline passed; they have ended.
        new_groups: groups in the rows that the worker has not seen.
        forget: numbers of requests that the worker has seen and nobody needs.
    """

    step_id: int
    rows: list[Row] = field(default_factory=list)
    new_groups: list[SequenceGroup] = field(default_factory=list)
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)
    ignored: list[Finished] = field(default_factory=list)
    expired: list[SequenceGroup] = field(default_factory=list)
    forget: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_preempted: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the worker answers, one entry per sample of the plan, in the plan's order.

    Attributes:
        failed: places of samples whose logits were not finite; their groups end.
    """

    token_ids: Seq[int]
    logprobs: Seq[float]
    failed: Seq[int] = ()


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens that `sequence` got in a step: its output from `first_index` on."""

    group: SequenceGroup
    sequence: Sequence
    first_index: int


@dataclass(slots=True)
class StepOutputs:
    """What one step gave.

    Attributes:
        failed: groups that the step could not sample for; they have ended.
    """

    new_tokens: list[NewTokens] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    failed: list[SequenceGroup] = field(default_factory=list)


def to_request(plan: Plan, epoch: int) -> ExecuteModelRequest:
    """The plan in the columns of the worker's protocol."""
    rows = plan.rows
    samples = [(i, sequence.index) for i, row in enumerate(rows) for sequence in row.samples]
    return ExecuteModelRequest(
        step_id=plan.step_id,
        epoch=epoch,
        new_requests=[NewRequest(request_id=group.number, sampling=group.sampling) for group in plan.new_groups],
        request_ids=pack(row.group.number for row in rows),
        sequence_indexes=pack(row.sequence.index for row in rows),
        num_computed_tokens=pack(row.start for row in rows),
        num_new_tokens=pack(row.num_new_tokens for row in rows),
        token_ids=b"".join(
            row.group.token_ids(row.sequence, row.start, row.start + row.num_new_tokens).tobytes() for row in rows
        ),
        block_table_lengths=pack(len(row.sequence.block_table) for row in rows),
        block_tables=b"".join(row.sequence.block_table.tobytes() for row in rows),
        sample_rows=pack(i for i, _ in samples),
        sample_sequence_indexes=pack(index for _, index in samples),
        blocks_to_copy=pack(block for pair in plan.blocks_to_copy for block in pair),
        finished_request_ids=pack(plan.forget),
    )
