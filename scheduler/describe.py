"""The scheduler's state, as the messages that report it."""

from collections.abc import Sequence

from protos import session_pb2 as pb
from protos.columns import pack
from scheduler.admission import Reason
from scheduler.explain import explain
from scheduler.loop import SchedulerLoop
from scheduler.scheduler import Scheduler
from scheduler.sequence import SequenceGroup, Status

_STATUS = {
    Status.WAITING: pb.STATUS_WAITING,
    Status.RUNNING: pb.STATUS_RUNNING,
    Status.SWAPPED: pb.STATUS_SWAPPED,
}
_REASON = {
    None: pb.REASON_UNSPECIFIED,
    Reason.NO_WORKER: pb.REASON_NO_WORKER,
    Reason.NEXT_STEP: pb.REASON_NEXT_STEP,
    Reason.QUEUE: pb.REASON_QUEUE,
    Reason.BLOCKS: pb.REASON_BLOCKS,
    Reason.SEQUENCES: pb.REASON_SEQUENCES,
    Reason.TOKENS: pb.REASON_TOKENS,
    Reason.SWAPPED_GROUPS: pb.REASON_SWAPPED_GROUPS,
    Reason.DELAY: pb.REASON_DELAY,
    Reason.SUSPECTS: pb.REASON_SUSPECTS,
}


def describe(core: Scheduler, loop: SchedulerLoop) -> pb.GetStateResponse:
    """Queues and blocks as they are now."""
    blocks = core.blocks
    return pb.GetStateResponse(
        serving=loop.serving,
        num_waiting=core.num_waiting,
        num_running=core.num_running,
        num_swapped=core.num_swapped,
        num_blocks=blocks.num_blocks,
        num_free_blocks=blocks.num_free - blocks.num_idle,
        num_held_blocks=blocks.num_held,
        num_cached_blocks=blocks.num_idle,
        num_shared_blocks=blocks.num_shared,
        num_block_references=blocks.num_references,
        num_swap_blocks=blocks.num_swap_blocks,
        num_free_swap_blocks=blocks.num_free_swap_blocks,
        num_steps=core.num_steps,
        num_preemptions=core.num_preemptions,
        last_step_ms=loop.last_step_ms,
        last_step_tokens=loop.last_step_tokens,
        num_waiting_tokens=core.queues.waiting.num_tokens,
        num_swap_outs=core.num_swap_outs,
        num_swap_ins=core.num_swap_ins,
        num_looked_up_tokens=core.num_looked_up_tokens,
        num_found_tokens=core.num_found_tokens,
        prefill_tokens_per_s=core.rates.prefill_tokens_per_s,
        swap_blocks_per_s=core.rates.swap_blocks_per_s,
    )


def locate(core: Scheduler, groups: Sequence[SequenceGroup | None]) -> pb.LocateResponse:
    """The status of each group and its place in its queue; looks at all queues, which takes ms for thousands."""
    positions: dict[int, int] = {}
    for queue in (core.queues.waiting.order(), core.queues.swapped):
        positions |= {group.number: position for position, group in enumerate(queue)}
    return pb.LocateResponse(
        statuses=pack(0 if group is None else _STATUS[group.status] for group in groups),
        positions=pack(-1 if group is None else positions.get(group.number, -1) for group in groups),
    )


def describe_request(core: Scheduler, loop: SchedulerLoop, group: SequenceGroup, now: float) -> pb.ExplainResponse:
    """Why a live request is where it is."""
    explanation = explain(core, group, loop.connected)
    return pb.ExplainResponse(
        status=_STATUS[explanation.status],
        reason=_REASON[explanation.reason],
        message=explanation.message,
        queue_position=explanation.queue_position or 0,
        num_blocks_needed=explanation.num_blocks_needed,
        num_blocks_free=core.blocks.num_free,
        num_blocks_held=explanation.num_blocks_held,
        num_preemptions=group.num_preemptions,
        preempted_by=group.preempted_by,
        preemption_reason=group.preemption_reason,
        num_computed_tokens=explanation.num_computed_tokens,
        num_cached_prompt_tokens=group.num_cached_prompt_tokens,
        num_output_tokens=explanation.num_output_tokens,
        num_running_seqs=core.queues.num_running_seqs,
        max_num_seqs=core.policy.max_num_seqs,
        waited_ms=(now - group.arrival) * 1e3,
        last_step_tokens=loop.last_step_tokens,
        max_num_batched_tokens=core.policy.max_num_batched_tokens,
    )
