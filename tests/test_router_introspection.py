"""GetState, WatchState and ExplainRequest before a scripted scheduler: every figure, every end of a watch."""

import asyncio

import grpc
import pytest
from google.rpc.status_pb2 import Status
from router_fakes import router_alone

from protos import session_pb2
from protos.errors import Refusal, from_status
from protos.pagewire.v1 import introspection_pb2 as pb
from router.config import RouterSettings
from router.introspection import MAX_WATCHES, IntrospectionService
from router.schedulers import Schedulers

STATE = session_pb2.GetStateResponse(
    serving=True,
    num_waiting=1,
    num_running=2,
    num_swapped=3,
    num_blocks=40,
    num_free_blocks=5,
    num_held_blocks=6,
    num_cached_blocks=7,
    num_shared_blocks=8,
    num_steps=9,
    num_preemptions=10,
    last_step_ms=11,
    last_step_tokens=12,
    num_block_references=13,
    num_swap_blocks=14,
    num_free_swap_blocks=15,
    num_waiting_tokens=16,
    num_swap_outs=17,
    num_swap_ins=18,
    num_looked_up_tokens=19,
    num_found_tokens=20,
    prefill_tokens_per_s=21,
    swap_blocks_per_s=22,
)
SHOWN = pb.SchedulerState(
    serving=True,
    num_waiting=1,
    num_running=2,
    num_swapped=3,
    block_pool=pb.BlockPool(
        num_total=40,
        num_free=5,
        num_held=6,
        num_cached=7,
        num_shared=8,
        num_references=13,
        num_swap_total=14,
        num_swap_free=15,
    ),
    num_steps=9,
    num_preemptions=10,
    last_step_ms=11,
    last_step_tokens=12,
    num_waiting_tokens=16,
    num_swap_outs=17,
    num_swap_ins=18,
    prefix_cache=pb.PrefixCache(num_looked_up_tokens=19, num_found_tokens=20),
    prefill_tokens_per_s=21,
    swap_blocks_per_s=22,
)


def watch(plane, interval_ms=10):
    return plane.introspection.WatchState(pb.WatchStateRequest(interval_ms=interval_ms))


async def refusal_of(awaitable) -> Refusal:
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await awaitable
    error = info.value
    details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
    return from_status(error.code(), error.details() or "", Status.FromString(details) if details else None)


async def test_every_figure_of_the_scheduler_is_shown():
    assert len(STATE.ListFields()) == len(STATE.DESCRIPTOR.fields), "a field is missing in this test"
    async with router_alone() as plane:
        plane.scheduler.state = STATE
        assert (await plane.introspection.GetState(pb.GetStateRequest())).state == SHOWN


# Watches


async def test_a_watch_shows_the_state_at_once_and_again_as_it_changes():
    async with router_alone() as plane:
        plane.scheduler.state = STATE
        call = watch(plane)
        assert (await call.read()).state == SHOWN
        plane.scheduler.state = session_pb2.GetStateResponse(num_running=77)
        while (await call.read()).state.num_running != 77:
            pass
        call.cancel()


async def test_the_first_message_does_not_wait_for_the_interval():
    async with router_alone() as plane:
        call = watch(plane, interval_ms=3_600_000)
        assert (await asyncio.wait_for(call.read(), 5)).HasField("state")
        call.cancel()


@pytest.mark.parametrize("interval_ms", [-1, 0, 9, 3_600_001])
async def test_an_interval_out_of_range_is_refused_naming_the_field(interval_ms):
    async with router_alone() as plane:
        error = await refusal_of(watch(plane, interval_ms).read())
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert [violation.field for violation in error.violations] == ["interval_ms"]
        assert "must be in 10 .. 3600000" in error.message


async def test_a_watch_ends_with_a_delay_for_the_retry_when_the_scheduler_does_not_answer():
    async with router_alone() as plane:
        call = watch(plane)
        await call.read()
        plane.scheduler.state = None
        error = await refusal_of(_read_to_the_end(call))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_SCHEDULER")
        assert "no worker is ready yet" in error.message
        assert error.retry_delay_ms is not None
        plane.scheduler.state = STATE
        assert (await watch(plane).read()).state == SHOWN, "a retry finds it again"


async def test_a_client_that_leaves_ends_its_watch():
    async with router_alone() as plane:
        call = watch(plane)
        await call.read()
        call.cancel()
        await asyncio.sleep(0.1)
        num_states = plane.scheduler.num_states
        await asyncio.sleep(0.1)
        assert plane.scheduler.num_states == num_states


@pytest.mark.parametrize("interval_ms", [10, 3_600_000])
async def test_a_watch_does_not_hold_up_the_end_of_the_router_and_says_why_it_ends(interval_ms):
    async with router_alone() as plane:
        call = watch(plane, interval_ms)
        await call.read()
        plane.stop.set()
        error = await asyncio.wait_for(refusal_of(_read_to_the_end(call)), 5)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert error.retry_delay_ms is not None
    # the router has ended, far within its grace of a minute


class StalledClient:
    """Stands for the context of a client that has stopped reading, who would not hear of an abort either."""

    code = None

    async def write(self, message) -> None:
        await asyncio.Event().wait()

    def set_code(self, code) -> None:
        self.code = code

    def set_details(self, details) -> None:
        pass

    def set_trailing_metadata(self, metadata) -> None:
        pass


class OneScheduler:
    """Stands for the schedulers, of which there is one that always answers."""

    async def get_states(self) -> dict[str, session_pb2.GetStateResponse]:
        return {"unix:/s": STATE}


async def test_a_watch_that_nobody_reads_ends_with_the_router_and_waits_for_nobody():
    stop, client = asyncio.Event(), StalledClient()
    service = IntrospectionService(OneScheduler(), stop, write_stall_s=60)
    watch = asyncio.create_task(service.WatchState(pb.WatchStateRequest(), client))
    await asyncio.sleep(0.001)
    stop.set()
    await asyncio.wait_for(watch, 5)
    assert client.code is grpc.StatusCode.UNAVAILABLE


async def test_a_watch_that_nobody_reads_is_given_up():
    service = IntrospectionService(OneScheduler(), asyncio.Event(), write_stall_s=0.01)
    with pytest.raises(Refusal, match=r"has read nothing for 0\.01 s"):
        await asyncio.wait_for(service.WatchState(pb.WatchStateRequest(), StalledClient()), 5)


async def test_so_many_clients_may_watch_and_one_more_when_one_has_left():
    async with router_alone() as plane:
        calls = [watch(plane, 3_600_000) for _ in range(MAX_WATCHES)]
        for call in calls:
            await call.read()
        error = await refusal_of(watch(plane).read())
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHES")
        calls[0].cancel()
        while await _code(one_more := watch(plane, 3_600_000)) is not None:
            await asyncio.sleep(0.01)
        for call in [one_more, *calls]:
            call.cancel()


async def _read_to_the_end(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def _code(call) -> grpc.StatusCode | None:
    """The error that a watch begins with; None for one that works."""
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


# Explanations


async def explain(plane, request_id="r1") -> pb.ExplainRequestResponse:
    return await plane.introspection.ExplainRequest(pb.ExplainRequestRequest(request_id=request_id))


async def test_a_requests_explanation_is_the_schedulers_own():
    facts = {
        "message": "3 blocks are too few",
        "num_blocks_needed": 5,
        "num_blocks_free": 3,
        "num_blocks_held": 1,
        "num_preemptions": 2,
        "preempted_by": "r0",
        "preemption_reason": "recompute: one sequence",
        "num_computed_tokens": 16,
        "num_cached_prompt_tokens": 8,
        "num_output_tokens": 4,
        "num_running_seqs": 6,
        "max_num_seqs": 7,
        "waited_ms": 1234.5,
        "last_step_tokens": 16,
        "max_num_batched_tokens": 17,
    }
    async with router_alone() as plane:
        status, reason = session_pb2.STATUS_WAITING, session_pb2.REASON_BLOCKS
        told = session_pb2.ExplainResponse(status=status, reason=reason, queue_position=9, **facts)
        assert len(told.ListFields()) == len(told.DESCRIPTOR.fields), "a field is missing in this test"
        plane.scheduler.explanations["r1"] = told
        shown = await explain(plane)
        status, reason = pb.REQUEST_STATUS_WAITING, pb.WAIT_REASON_BLOCKS
        assert shown == pb.ExplainRequestResponse(status=status, reason=reason, queue_position=9, **facts)


@pytest.mark.parametrize(("name", "queued"), [("WAITING", True), ("SWAPPED", True), ("RUNNING", False)])
async def test_what_does_not_wait_has_no_place_in_a_queue(name, queued):
    async with router_alone() as plane:
        status = session_pb2.Status.Value(f"STATUS_{name}")
        plane.scheduler.explanations["r1"] = session_pb2.ExplainResponse(status=status)
        shown = await explain(plane)
        assert shown.status == pb.RequestStatus.Value(f"REQUEST_STATUS_{name}")
        assert shown.HasField("queue_position") is queued, "the first place is 0"


@pytest.mark.parametrize("name", [value.name for value in session_pb2.Reason.DESCRIPTOR.values])
async def test_every_reason_of_the_scheduler_has_its_public_name(name):
    async with router_alone() as plane:
        reason = session_pb2.Reason.Value(name)
        plane.scheduler.explanations["r1"] = session_pb2.ExplainResponse(reason=reason)
        assert pb.WaitReason.Name((await explain(plane)).reason) == f"WAIT_{name}"


async def test_a_request_that_is_not_live_is_not_found_and_named():
    async with router_alone() as plane:
        error = await refusal_of(explain(plane, "nobody"))
        assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
        assert "no live request is 'nobody'" in error.message


async def test_an_empty_request_id_is_refused():
    async with router_alone() as plane:
        error = await refusal_of(explain(plane, ""))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert [violation.field for violation in error.violations] == ["request_id"]


async def test_a_scheduler_that_is_away_is_unavailable_with_a_delay():
    async with router_alone() as plane:
        await plane.scheduler_server.stop(0)
        for call in (explain(plane), plane.introspection.GetState(pb.GetStateRequest())):
            error = await refusal_of(call)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_SCHEDULER")
            assert error.retry_delay_ms is not None


async def test_before_any_scheduler_is_known_who_asks_is_told_to_retry():
    schedulers = Schedulers(RouterSettings(model="fake", scheduler="dns:///nowhere.test:1"), lambda: None)
    service = IntrospectionService(schedulers, asyncio.Event(), write_stall_s=60)
    state, explanation = pb.GetStateRequest(), pb.ExplainRequestRequest(request_id="r")
    for answer in (service.GetState(state, None), service.ExplainRequest(explanation, None)):
        with pytest.raises(Refusal, match="no scheduler is known yet; retry") as info:
            await answer
        assert (info.value.code, info.value.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_SCHEDULER")
