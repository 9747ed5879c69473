"""What a person asks when something waits: the schedulers' state, once or repeatedly, and one request's own.

A watch ends with UNAVAILABLE and a retry delay when no scheduler answers, and as soon as this router drains: it never
ends without a reason, and never holds up a shutdown.

Where tenants are known, a tenant can ask only about its own requests; operators can ask about all, by the ids that
scheduler and logs use.
"""

import asyncio
from collections.abc import Sequence

import grpc
from google.protobuf.message import Message
from grpc_status import rpc_status

from protos import session_pb2
from protos.errors import Refusal, Violation, invalid_argument, to_status, unavailable
from protos.pagewire.v1 import introspection_pb2 as pb
from router.client_stream import writing_to
from router.schedulers import Schedulers
from router.tenants import Tenants

# Each asks the scheduler, which has steps to plan, up to a hundred times a second.
MAX_WATCHES = 16
_MIN_INTERVAL_MS, _DEFAULT_INTERVAL_MS, _MAX_INTERVAL_MS = 10, 1000, 3_600_000

# What a scheduler says about a request, in the words of the public API.
REQUEST_STATUS: dict[int, pb.RequestStatus] = {
    session_pb2.STATUS_WAITING: pb.REQUEST_STATUS_WAITING,
    session_pb2.STATUS_RUNNING: pb.REQUEST_STATUS_RUNNING,
    session_pb2.STATUS_SWAPPED: pb.REQUEST_STATUS_SWAPPED,
}
_REASON = {
    session_pb2.REASON_UNSPECIFIED: pb.WAIT_REASON_UNSPECIFIED,
    session_pb2.REASON_NO_WORKER: pb.WAIT_REASON_NO_WORKER,
    session_pb2.REASON_NEXT_STEP: pb.WAIT_REASON_NEXT_STEP,
    session_pb2.REASON_QUEUE: pb.WAIT_REASON_QUEUE,
    session_pb2.REASON_BLOCKS: pb.WAIT_REASON_BLOCKS,
    session_pb2.REASON_SEQUENCES: pb.WAIT_REASON_SEQUENCES,
    session_pb2.REASON_TOKENS: pb.WAIT_REASON_TOKENS,
    session_pb2.REASON_SWAPPED_GROUPS: pb.WAIT_REASON_SWAPPED_GROUPS,
    session_pb2.REASON_DELAY: pb.WAIT_REASON_DELAY,
    session_pb2.REASON_SUSPECTS: pb.WAIT_REASON_SUSPECTS,
}


class IntrospectionService:
    """Shows what the schedulers say about themselves.

    Args:
        schedulers: behind this router.
        stopping: set when this router begins to drain.
        write_stall_s: seconds after which a client that does not read is given up.
        tenants: who clients are; None for a port that only operators reach.
    """

    def __init__(
        self, schedulers: Schedulers, stopping: asyncio.Event, write_stall_s: float, tenants: Tenants | None = None
    ) -> None:
        self._schedulers = schedulers
        self._stopping = stopping
        self._write_stall_s = write_stall_s
        self._tenants = tenants
        self._num_watches = 0

    async def GetState(self, request: pb.GetStateRequest, context: grpc.aio.ServicerContext) -> pb.GetStateResponse:
        """The state now."""
        state, schedulers = await self._states()
        return pb.GetStateResponse(state=state, schedulers=schedulers)

    async def WatchState(self, request: pb.WatchStateRequest, context: grpc.aio.ServicerContext) -> None:
        """The same repeatedly, until the client leaves."""
        interval_ms = request.interval_ms if request.HasField("interval_ms") else _DEFAULT_INTERVAL_MS
        if not _MIN_INTERVAL_MS <= interval_ms <= _MAX_INTERVAL_MS:
            description = f"is {interval_ms}; must be in {_MIN_INTERVAL_MS} .. {_MAX_INTERVAL_MS}"
            raise invalid_argument([Violation("interval_ms", description)])
        if self._num_watches >= MAX_WATCHES:
            message = f"{MAX_WATCHES} clients watch already; retry, or ask for single states"
            raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHES", message, retry_delay_ms=1000)
        self._num_watches += 1
        watch = asyncio.create_task(self._watch(context, interval_ms / 1e3))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([watch, stopping], return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()  # raises: a watch ends in no other way
            _end(context, unavailable("DRAINING", "this server is shutting down; retry, it or another will answer"))
        finally:
            self._num_watches -= 1
            watch.cancel()
            stopping.cancel()
            await asyncio.gather(watch, stopping, return_exceptions=True)

    async def ExplainRequest(
        self, request: pb.ExplainRequestRequest, context: grpc.aio.ServicerContext
    ) -> pb.ExplainRequestResponse:
        """Why a live request is where it is."""
        if not request.request_id:
            raise invalid_argument([Violation("request_id", "must not be empty")])
        if self._tenants is None:
            return _explanation(await self._schedulers.explain(request.request_id, request.request_id))
        tenant = self._tenants.of(context)
        facts = await self._schedulers.explain(self._tenants.scoped(tenant, request.request_id), request.request_id)
        if facts.preempted_by:
            by, own = facts.preempted_by, self._tenants.scoped(tenant, "")
            facts.preempted_by = by.removeprefix(own) if by.startswith(own) else "another tenant's request"
        return _explanation(facts)

    async def _watch(self, context: grpc.aio.ServicerContext, interval_s: float) -> None:
        async with writing_to(context, self._write_stall_s) as write:
            while True:
                state, schedulers = await self._states()
                await write(pb.WatchStateResponse(state=state, schedulers=schedulers))
                await asyncio.sleep(interval_s)

    async def _states(self) -> tuple[pb.SchedulerState, list[pb.NamedScheduler]]:
        """The state of all schedulers together, and of each if there are several.

        Raises:
            Refusal: UNAVAILABLE, none answers.
        """
        answers = await self._schedulers.get_states()
        states = {address: _state(answer) for address, answer in answers.items() if not isinstance(answer, Refusal)}
        if not states:
            refusals = [answer for answer in answers.values() if isinstance(answer, Refusal)]
            raise refusals[0] if refusals else unavailable("NO_SCHEDULER", "no scheduler is known yet; retry")
        if len(answers) == 1:
            return next(iter(states.values())), []
        obstacle = self._schedulers.obstacle
        named = [
            pb.NamedScheduler(address=address, state=states.get(address), obstacle=obstacle(address))
            for address in sorted(answers)
        ]
        return _together(list(states.values())), named


def _end(context: grpc.aio.ServicerContext, refusal: Refusal) -> None:
    """Ends a stream with an error when its method has returned; raising it would wait for the client to read it."""
    status = rpc_status.to_status(to_status(refusal))
    context.set_code(status.code)
    context.set_details(status.details)
    context.set_trailing_metadata(status.trailing_metadata)


def _state(state: session_pb2.GetStateResponse) -> pb.SchedulerState:
    return pb.SchedulerState(
        serving=state.serving,
        num_waiting=state.num_waiting,
        num_running=state.num_running,
        num_swapped=state.num_swapped,
        block_pool=pb.BlockPool(
            num_total=state.num_blocks,
            num_free=state.num_free_blocks,
            num_held=state.num_held_blocks,
            num_cached=state.num_cached_blocks,
            num_shared=state.num_shared_blocks,
            num_references=state.num_block_references,
            num_swap_total=state.num_swap_blocks,
            num_swap_free=state.num_free_swap_blocks,
        ),
        num_steps=state.num_steps,
        num_preemptions=state.num_preemptions,
        last_step_ms=state.last_step_ms,
        last_step_tokens=state.last_step_tokens,
        num_waiting_tokens=state.num_waiting_tokens,
        num_swap_outs=state.num_swap_outs,
        num_swap_ins=state.num_swap_ins,
        prefix_cache=pb.PrefixCache(
            num_looked_up_tokens=state.num_looked_up_tokens, num_found_tokens=state.num_found_tokens
        ),
        prefill_tokens_per_s=state.prefill_tokens_per_s,
        swap_blocks_per_s=state.swap_blocks_per_s,
    )


def _together(states: Sequence[pb.SchedulerState]) -> pb.SchedulerState:
    """Counts and rates of several schedulers added up."""
    whole = pb.SchedulerState()
    for state in states:
        _add(whole, state)
    whole.serving = any(state.serving for state in states)
    whole.last_step_ms = max(state.last_step_ms for state in states)
    return whole


def _add(whole: Message, part: Message) -> None:
    for field, value in part.ListFields():
        if isinstance(value, Message):
            _add(getattr(whole, field.name), value)
        elif not isinstance(value, bool):
            setattr(whole, field.name, getattr(whole, field.name) + value)


def _explanation(facts: session_pb2.ExplainResponse) -> pb.ExplainRequestResponse:
    queued = facts.status in (session_pb2.STATUS_WAITING, session_pb2.STATUS_SWAPPED)
    return pb.ExplainRequestResponse(
        status=REQUEST_STATUS.get(facts.status, pb.REQUEST_STATUS_UNSPECIFIED),
        reason=_REASON.get(facts.reason, pb.WAIT_REASON_UNSPECIFIED),
        message=facts.message,
        queue_position=facts.queue_position if queued else None,
        num_blocks_needed=facts.num_blocks_needed,
        num_blocks_free=facts.num_blocks_free,
        num_blocks_held=facts.num_blocks_held,
        num_preemptions=facts.num_preemptions,
        preempted_by=facts.preempted_by,
        preemption_reason=facts.preemption_reason,
        num_computed_tokens=facts.num_computed_tokens,
        num_cached_prompt_tokens=facts.num_cached_prompt_tokens,
        num_output_tokens=facts.num_output_tokens,
        num_running_seqs=facts.num_running_seqs,
        max_num_seqs=facts.max_num_seqs,
        waited_ms=facts.waited_ms,
        last_step_tokens=facts.last_step_tokens,
        max_num_batched_tokens=facts.max_num_batched_tokens,
    )
