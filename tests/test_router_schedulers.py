"""Several schedulers behind a router: who gets a request, and what its client sees when that scheduler goes."""

import asyncio
import contextlib
import math
import signal
import socket
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from cluster import Cluster, cluster, free_port
from fakes import TEXT, FakeWorker, control_plane
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from router_fakes import FakeScheduler, RouterAlone, finished, router_alone, start_scheduler

from protos import session_pb2
from protos.columns import unpack
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1 import introspection_pb2
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub
from protos.pagewire.v1.introspection_pb2_grpc import IntrospectionServiceStub
from protos.rpc import dial
from router import scheduler_link
from router import schedulers as router_schedulers
from router.config import RouterSettings

BLOCK_SIZE = 16
Named = introspection_pb2.NamedScheduler


def wanted(prompt: str, max_tokens: int = 9, **options: object) -> pb.GenerateRequest:
    stop = pb.StopConditions(max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(text=prompt, stop=stop, **options)


async def states(plane: RouterAlone) -> introspection_pb2.GetStateResponse:
    return await plane.introspection.GetState(introspection_pb2.GetStateRequest())


async def until(plane: RouterAlone, holds: Callable[[dict[str, Named]], bool]) -> None:
    """Returns when `holds` for what the router says of its schedulers; the test's own timeout bounds the wait."""
    while not holds({named.address.rpartition("/")[2]: named for named in (await states(plane)).schedulers}):
        await asyncio.sleep(0.005)


async def two(plane: RouterAlone) -> None:
    """Returns when both schedulers get requests."""
    await until(plane, lambda named: not any(each.obstacle for each in named.values()))


async def who_got(plane: RouterAlone) -> tuple[FakeScheduler, FakeScheduler, session_pb2.Submit]:
    """The scheduler that the next request comes to, the other one, and the request."""
    first, second = plane.schedulers
    while first.heard.empty() and second.heard.empty():
        await asyncio.sleep(0.001)
    this, other = (second, first) if first.heard.empty() else (first, second)
    return this, other, (await this.heard.get()).submit


async def all_come_to(plane: RouterAlone, scheduler: FakeScheduler, num: int) -> None:
    """Asserts that of some different requests this scheduler gets all, and no other one any."""
    calls = [plane.generation.Complete(wanted(f"{number} different prompts")) for number in range(num)]
    for _ in calls:
        await scheduler.submitted()
    assert all(other.heard.empty() for other in plane.schedulers if other is not scheduler)
    for call in calls:
        call.cancel()


# With scripted schedulers


async def test_a_request_that_waits_goes_to_another_scheduler_when_its_own_is_lost():
    async with router_alone(FakeScheduler(), FakeScheduler()) as plane:
        await two(plane)
        call = plane.generation.Complete(wanted("a prompt of some blocks", sampling=pb.SamplingParams(seed=7)))
        this, other, submit = await who_got(plane)
        await this.accept(submit.handle)
        await this.tell_load(serving=True)
        await plane.servers[plane.schedulers.index(this)].stop(0)
        again = await other.submitted()
        assert [list(row.token_ids) for row in again.continuation.progress] == [[]]
        assert again.continuation.waited_ms > 0
        again.ClearField("continuation")
        assert again == submit, "the same ids, seed and time left"
        await other.tell({0: b"told"}, finished(handle=again.handle), handle=again.handle)
        assert (await call).outputs[0].text == "told"


async def lose(plane: RouterAlone, scheduler: FakeScheduler, how: str) -> None:
    match how:
        case "lost":
            await plane.servers[plane.schedulers.index(scheduler)].stop(0)
        case "drains":
            await scheduler.drain()
        case "its worker drains":
            await scheduler.tell_load(worker_left=True)
        case "hangs":
            scheduler.is_silent = True


@pytest.mark.parametrize("how", ["lost", "drains", "its worker drains", "hangs"])
async def test_another_scheduler_goes_on_behind_the_tokens_that_the_client_has(how):
    async with router_alone(FakeScheduler(), FakeScheduler(), health_stall_s=1.5) as plane:
        await two(plane)
        call = plane.generation.Generate(wanted("a prompt of some blocks"))
        this, other, submit = await who_got(plane)
        await this.tell({0: b"some"}, handle=submit.handle)
        assert (await call.read()).outputs[0].text == "some"
        await lose(plane, this, how)
        again = await other.submitted()
        assert (again.sampling.seed, again.max_tokens) == (submit.sampling.seed, submit.max_tokens)
        (progress,) = again.continuation.progress
        assert bytes(unpack(progress.token_ids).tolist()) == b"some"
        assert (progress.cumulative_logprob, progress.ended) == (-1.0, False), "four tokens of -0.25"
        await other.tell({0: b"one"}, finished(handle=again.handle), first=4, handle=again.handle)
        last = await call.read()
        assert (last.outputs[0].text, last.usage.completion_tokens) == ("one", 7)


async def test_sequences_that_have_ended_or_met_a_stop_string_are_not_computed_again():
    async with router_alone(FakeScheduler()) as plane:
        stop = pb.StopConditions(max_tokens=9, strings=["top"])
        call = plane.generation.Generate(pb.GenerateRequest(text="p", sampling=pb.SamplingParams(n=3), stop=stop))
        scheduler = plane.scheduler
        await scheduler.submitted()
        await scheduler.tell({0: b"end", 1: b"stop and on", 2: b"so"}, finished(0))
        assert (await scheduler.heard.get()).stop_sequence.num_tokens == 4
        await plane.restart_scheduler()
        ended, stopped, live = (await scheduler.submitted()).continuation.progress
        assert (ended.ended, list(ended.token_ids)) == (True, [])
        assert bytes(unpack(stopped.token_ids).tolist()) == b"stop"
        assert bytes(unpack(live.token_ids).tolist()) == b"so"
        assert (await scheduler.heard.get()).stop_sequence.sequence_index == 1
        await scheduler.tell({2: b"on"}, finished(1, status=session_pb2.FINISH_STATUS_STOPPED), finished(2), first=2)
        texts = ["", "", ""]
        async for message in call:
            for output in message.outputs:
                texts[output.index] += output.text
        assert texts == ["end", "s", "soon"]


async def test_a_stop_string_that_was_met_is_told_to_the_scheduler_that_goes_on():
    async with router_alone(FakeScheduler(), FakeScheduler()) as plane:
        await two(plane)
        asked = wanted("a prompt of some blocks", max_tokens=90)
        asked.stop.strings.append("top")
        call = plane.generation.Generate(asked)
        this, other, submit = await who_got(plane)
        await this.tell({0: b"stop and on"}, handle=submit.handle)
        assert (await this.heard.get()).stop_sequence.num_tokens == 4
        await lose(plane, this, "drains")
        again = await other.submitted()
        assert bytes(unpack(again.continuation.progress[0].token_ids).tolist()) == b"stop"
        stop = (await other.heard.get()).stop_sequence
        assert (stop.handle, stop.sequence_index, stop.num_tokens) == (again.handle, 0, 4)
        end = finished(handle=again.handle, status=session_pb2.FINISH_STATUS_STOPPED)
        await other.tell({}, end, handle=again.handle)
        assert "".join([output.text async for message in call for output in message.outputs]) == "s"


async def test_a_request_goes_only_where_there_could_ever_be_room_for_it():
    small, large = FakeScheduler(num_blocks=4, max_num_seqs=2), FakeScheduler()
    for order in ((small, large), (large, small)):
        async with router_alone(*order, load_slack=0.0) as plane:
            await two(plane)
            model = await plane.generation.GetModel(pb.GetModelRequest())
            assert (model.num_blocks, model.max_n) == (64, 8), "those of the larger one"
            asked = [wanted("x" * 17, request_id=f"long-{place}") for place in range(4)]
            asked += [wanted("x", request_id=f"many-{place}", sampling=pb.SamplingParams(n=4)) for place in range(4)]
            calls = [plane.generation.Generate(each) for each in asked]
            assert {(await large.submitted()).request_id for _ in calls} == {each.request_id for each in asked}
            assert small.heard.empty()
            for call in calls:
                call.cancel()
            assert [(await large.heard.get()).HasField("cancel") for _ in calls] == [True] * 8


async def test_prompts_without_a_full_block_go_wherever_least_is_to_do():
    async with router_alone(FakeScheduler(), FakeScheduler()) as plane:
        await two(plane)
        calls = []
        for num_each in (1, 2, 3):
            calls += [plane.generation.Complete(wanted("p")) for _ in range(2)]
            while [scheduler.heard.qsize() for scheduler in plane.schedulers] != [num_each] * 2:
                await asyncio.sleep(0.001)
        for call in calls:
            call.cancel()


async def test_who_resumes_is_told_by_the_scheduler_that_has_the_request():
    async with router_alone(FakeScheduler(), FakeScheduler()) as plane:
        await two(plane)
        for holder in plane.schedulers:
            holder.explanations["r"] = session_pb2.ExplainResponse()
            call = plane.generation.Generate(wanted("a prompt", request_id="r", resume=pb.Resume(seed=7)))
            assert (await holder.submitted()).adopt
            call.cancel()
            assert (await holder.heard.get()).HasField("cancel")
            holder.explanations.clear()


async def test_requests_in_the_swap_pool_count_as_load():
    async with router_alone(FakeScheduler(), FakeScheduler(), load_slack=0.0) as plane:
        await two(plane)
        full, other = plane.schedulers
        await full.tell_load(serving=False)
        await until(plane, lambda named: named["s0"].obstacle == "has no worker")
        await full.tell_load(serving=True, num_running=1, num_swapped=20)
        await two(plane)  # which is so once that load has come
        await all_come_to(plane, other, num=4)


async def test_handles_begin_anew_behind_the_last_one_and_leave_live_requests_alone(monkeypatch):
    monkeypatch.setattr("protos.columns._LARGEST", 3)
    async with router_alone() as plane:
        calls, handles = [], []
        for _ in range(2):
            calls.append(plane.generation.Generate(wanted("p")))
            handles.append((await plane.scheduler.submitted()).handle)
        for _ in range(3):
            calls.append(plane.generation.Generate(wanted("p")))
            handles.append((await plane.scheduler.submitted()).handle)
            calls.pop().cancel()
            assert (await plane.scheduler.heard.get()).HasField("cancel")
        assert handles == [1, 2, 3, 3, 3]
        for call in calls:
            call.cancel()


async def test_a_request_that_loses_three_schedulers_in_a_row_is_given_up():
    async with router_alone(FakeScheduler()) as plane:
        call = plane.generation.Generate(wanted("a prompt"))
        await plane.scheduler.submitted()
        await plane.scheduler.tell({0: b"x"})
        for _ in range(2):
            await plane.restart_scheduler()
            await plane.scheduler.submitted()
        await plane.scheduler.tell({0: b"y"}, first=1)
        while not (await call.read()).outputs[0].text.endswith("y"):
            pass
        for _ in range(2):  # there was a token between
            await plane.restart_scheduler()
            await plane.scheduler.submitted()
        await plane.restart_scheduler()
        with pytest.raises(grpc.aio.AioRpcError, match="3 schedulers in a row") as info:
            await call.read()
        assert info.value.code() is grpc.StatusCode.INTERNAL


async def test_schedulers_that_were_only_out_of_reach_are_not_taken_for_lost():
    async with router_alone(*[FakeScheduler() for _ in range(3)]) as plane:
        await two(plane)
        addresses = [named.address for named in (await states(plane)).schedulers]
        call = plane.generation.Complete(wanted("a prompt"))

        async def arrival() -> tuple[int, session_pb2.Submit]:
            """The place of the scheduler that the request comes to, and what it is told."""
            while (found := next((each for each in plane.schedulers if not each.heard.empty()), None)) is None:
                await asyncio.sleep(0.001)
            return plane.schedulers.index(found), (await found.heard.get()).submit

        places = []
        for _ in range(2):
            place, _ = await arrival()
            await plane.servers[place].stop(0)
            places.append(place)
        for place in places:  # of the same epoch
            plane.servers[place] = await start_scheduler(plane.schedulers[place], addresses[place])
        await two(plane)
        place, _ = await arrival()
        await plane.servers[place].stop(0)
        place, submit = await arrival()
        await plane.schedulers[place].tell({0: b"told"}, finished(handle=submit.handle), handle=submit.handle)
        assert (await call).outputs[0].text == "told"


async def test_what_is_still_on_its_way_of_an_earlier_stay_is_passed_over_when_a_request_comes_back():
    async with router_alone(FakeScheduler(), FakeScheduler()) as plane:
        await two(plane)
        call = plane.generation.Generate(wanted("a prompt"))
        this, other, submit = await who_got(plane)
        handle = submit.handle
        await this.tell({0: b"ab"}, handle=handle)
        assert (await call.read()).outputs[0].text == "ab"
        await lose(plane, this, "its worker drains")
        await other.submitted()
        assert (await this.heard.get()).HasField("cancel")
        await this.tell_load(serving=True)
        await two(plane)
        await lose(plane, other, "its worker drains")
        again = await this.submitted()
        await this.tell({0: b"d"}, first=3, handle=handle, accepts=False)  # what was before it is lost
        await this.tell({0: b"cde"}, finished(handle=handle), first=2, handle=again.handle)
        assert (await call.read()).outputs[0].text == "cde"


async def test_a_stream_does_not_go_on_with_another_models_tokens():
    async with router_alone() as plane:
        call = plane.generation.Generate(wanted("a prompt"))
        await plane.scheduler.submitted()
        await plane.scheduler.tell({0: b"some"})
        assert (await call.read()).outputs[0].text == "some"
        plane.scheduler.model = "another"
        await plane.restart_scheduler()
        with pytest.raises(grpc.aio.AioRpcError, match="'another' is served now") as info:
            await call.read()
        assert info.value.code() is grpc.StatusCode.FAILED_PRECONDITION, "nothing to be resumed by our client"
        new = plane.generation.Complete(wanted("a prompt", model="another"))
        await plane.scheduler.submitted()
        new.cancel()


async def test_a_connection_that_breaks_for_longer_than_the_lease_again_and_again_gives_no_request_up():
    async with control_plane(FakeWorker(), lease_s=0.01, max_num_seqs=1) as plane:
        plane.worker.gate.clear()
        calls = []
        for num_live in (1, 2):  # one runs, the other one waits for it
            calls.append(asyncio.ensure_future(plane.text("p", max_tokens=5)))
            await plane.until(lambda state, n=num_live: state.num_running + state.num_waiting == n)
        for _ in range(4):
            await plane.cut_sessions(refuse=True)
            await plane.until_scheduler(lambda state: state.num_running + state.num_waiting == 0)  # the lease has ended
            plane.proxy.refusing = False
            await plane.until_scheduler(lambda state: state.num_running + state.num_waiting == 2)
        plane.worker.gate.set()
        assert await asyncio.gather(*calls) == [TEXT[:5]] * 2


async def test_a_request_waits_for_its_scheduler_to_come_back_for_a_while():
    async with router_alone(FakeScheduler(), scheduler_patience_s=0.2) as plane:
        told, untold = (plane.generation.Generate(wanted("a prompt", request_id=name)) for name in ("told", "untold"))
        handles = {each.request_id: each.handle for each in [await plane.scheduler.submitted() for _ in range(2)]}
        await plane.scheduler.tell({0: b"some"}, handle=handles["told"])
        assert (await told.read()).outputs[0].text == "some"
        await plane.scheduler_server.stop(0)
        for call, code in ((told, grpc.StatusCode.ABORTED), (untold, grpc.StatusCode.UNAVAILABLE)):
            with pytest.raises(grpc.aio.AioRpcError, match=r"away for 0\.2 s") as info:
                await call.read()
            assert info.value.code() is code


async def test_a_scheduler_that_just_lost_its_worker_keeps_its_requests_and_one_without_for_long_does_not(monkeypatch):
    monkeypatch.setattr(scheduler_link, "_WORKER_PATIENCE_S", 0.3)
    async with router_alone(FakeScheduler(), FakeScheduler()) as plane:
        await two(plane)
        call = plane.generation.Complete(wanted("a prompt of some blocks", sampling=pb.SamplingParams(n=1, best_of=2)))
        this, other, submit = await who_got(plane)
        await this.tell({0: b"half", 1: b"of"}, handle=submit.handle)
        await this.tell_load(serving=False)
        await this.tell_load(serving=True)
        await this.tell_load(serving=False)
        again = await other.submitted()
        assert [bytes(unpack(row.token_ids).tolist()) for row in again.continuation.progress] == [b"half", b"of"]
        ends = finished(0, -1, again.handle), finished(1, -2, again.handle)
        await other.tell({0: b"a"}, first=4, handle=again.handle)
        await other.tell({1: b"f"}, *ends, first=2, handle=again.handle)
        assert (await call).outputs[0].text == "halfa"
        assert (await this.heard.get()).cancel.handle == submit.handle


async def test_a_request_of_which_nothing_is_told_leaves_a_scheduler_that_has_fallen_silent():
    async with router_alone(FakeScheduler(), FakeScheduler(), health_stall_s=1.5) as plane:
        await two(plane)
        call = plane.generation.Complete(wanted("a prompt of some blocks"))
        this, other, submit = await who_got(plane)
        this.is_silent = True
        again = await other.submitted()
        assert again == submit
        assert sorted(each.obstacle for each in (await states(plane)).schedulers) == ["", "is silent"]
        await other.tell({0: b"told"}, finished(handle=again.handle), handle=again.handle)
        assert (await call).outputs[0].text == "told"
        assert (await this.heard.get()).cancel.handle == submit.handle
        this.is_silent = False
        await this.tell_load(serving=True)
        await two(plane)


async def one_at_each(plane: RouterAlone) -> list[tuple[FakeScheduler, session_pb2.Submit, grpc.aio.UnaryStreamCall]]:
    """Two streams, each at another of two schedulers; wants a `load_slack` of 0."""
    await two(plane)
    calls = {name: plane.generation.Generate(wanted("a prompt", request_id=name)) for name in ("first", "second")}
    submits = [await scheduler.submitted() for scheduler in plane.schedulers]
    return [(each, submit, calls[submit.request_id]) for each, submit in zip(plane.schedulers, submits, strict=True)]


async def test_each_stream_that_waits_hears_its_place_at_its_own_scheduler():
    schedulers = FakeScheduler(position=3), FakeScheduler(position=5)
    async with router_alone(*schedulers, load_slack=0.0, heartbeat_s=0.05) as plane:
        for scheduler, _, call in await one_at_each(plane):
            assert (await call.read()).heartbeat.queue_position == scheduler.position
            call.cancel()


async def test_streams_at_every_scheduler_that_outlast_the_grace_are_told_why():
    async with router_alone(FakeScheduler(), FakeScheduler(), load_slack=0.0, drain_grace_s=0.2) as plane:
        streams = await one_at_each(plane)
        for scheduler, submit, call in streams:
            await scheduler.tell({0: b"some"}, handle=submit.handle)
            assert (await call.read()).outputs[0].text == "some"
        plane.stop.set()
        for *_, call in streams:
            with pytest.raises(grpc.aio.AioRpcError, match="shut down") as info:
                await call.read()
            assert info.value.code() is grpc.StatusCode.ABORTED


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE])
async def test_what_one_scheduler_has_no_room_for_is_given_to_the_next_and_then_refused(code):
    async with router_alone(FakeScheduler(), FakeScheduler()) as plane:
        await two(plane)
        call = plane.generation.Complete(wanted("a prompt of some blocks"))
        this, other, submit = await who_got(plane)
        await this.reject(code, "full", submit.handle)
        again = await other.submitted()
        await other.reject(code, "full here too", again.handle)
        with pytest.raises(grpc.aio.AioRpcError, match="full here too") as info:
            await call
        assert info.value.code() is code


async def test_a_mistake_is_refused_by_the_first_scheduler_for_all():
    async with router_alone(FakeScheduler(), FakeScheduler()) as plane:
        await two(plane)
        call = plane.generation.Complete(wanted("a prompt of some blocks"))
        this, other, submit = await who_got(plane)
        await this.reject(grpc.StatusCode.INVALID_ARGUMENT, "no", submit.handle)
        with pytest.raises(grpc.aio.AioRpcError, match="no"):
            await call
        assert other.heard.empty()


async def test_a_request_outlives_three_schedulers_at_most():
    """It may be what kills them."""
    async with router_alone(*(FakeScheduler() for _ in range(5))) as plane:
        await two(plane)
        call = plane.generation.Complete(wanted("a prompt of some blocks"))
        lost: list[int] = []
        while len(lost) < 3:
            for place, scheduler in enumerate(plane.schedulers):
                if place not in lost and not scheduler.heard.empty():
                    lost.append(place)
                    await plane.servers[place].stop(0)
            await asyncio.sleep(0.001)
        with pytest.raises(grpc.aio.AioRpcError, match="3 schedulers in a row") as info:
            await call
        assert info.value.code() is grpc.StatusCode.INTERNAL
        assert sum(not each.heard.empty() for each in plane.schedulers) == 3


@pytest.mark.parametrize("why", ["drains", "has no worker"])
async def test_who_drains_or_has_no_worker_gets_nothing_while_another_one_serves(why):
    async with router_alone(FakeScheduler(), FakeScheduler()) as plane:
        await two(plane)
        first, second = plane.schedulers
        await (first.drain() if why == "drains" else first.tell_load(serving=False))
        await until(plane, lambda named: named["s0"].obstacle == why)
        await all_come_to(plane, second, num=8)


@pytest.mark.parametrize("how", ["lost", "drains"])
async def test_while_every_scheduler_is_away_or_drains_who_comes_is_sent_elsewhere(how):
    async with router_alone(FakeScheduler()) as plane, dial(plane.address) as channel:
        await lose(plane, plane.scheduler, how)
        health = HealthStub(channel)
        while (await health.Check(HealthCheckRequest())).status == HealthCheckResponse.SERVING:
            await asyncio.sleep(0.005)
        with pytest.raises(grpc.aio.AioRpcError, match="no scheduler is ready; retry") as info:
            await plane.generation.Complete(wanted("a prompt"))
        assert info.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_without_any_worker_requests_wait_at_a_scheduler_until_one_serves(monkeypatch):
    monkeypatch.setattr(scheduler_link, "_WORKER_PATIENCE_S", 0.2)
    async with router_alone(FakeScheduler(), FakeScheduler()) as plane:
        await two(plane)
        for scheduler in plane.schedulers:
            await scheduler.tell_load(serving=False)
        await until(plane, lambda named: all(each.obstacle == "has no worker" for each in named.values()))
        call = plane.generation.Complete(wanted("a prompt of some blocks"))
        this, other, _ = await who_got(plane)
        await other.tell_load(serving=True)
        assert (await other.submitted()).prompt_token_ids
        assert (await this.heard.get()).HasField("cancel")
        call.cancel()


async def test_a_scheduler_of_another_model_gets_nothing_and_is_named(caplog):
    async with router_alone(FakeScheduler(), FakeScheduler(model="odd")) as plane:
        await until(plane, lambda named: any("another model" in each.obstacle for each in named.values()))
        model = (await plane.generation.GetModel(pb.GetModelRequest())).model
        obstacles = {named.address.rpartition("/")[2]: named.obstacle for named in (await states(plane)).schedulers}
        odd, right = ("s1", 0) if model == "fake" else ("s0", 1)
        assert obstacles[odd] == f"serves another model, {plane.schedulers[1 - right].model!r}"
        calls = [plane.generation.Complete(wanted(f"{number} different prompts")) for number in range(8)]
        for _ in calls:
            await plane.schedulers[right].submitted()
        assert plane.schedulers[1 - right].heard.empty()
        for call in calls:
            call.cancel()
    assert "serves another model than the others" in caplog.text


async def test_the_model_changes_when_no_scheduler_has_the_old_one_any_more():
    async with router_alone(FakeScheduler(), FakeScheduler()) as plane:
        await two(plane)
        addresses = [named.address for named in (await states(plane)).schedulers]
        for index, (odd_before, model) in enumerate([(True, "fake"), (False, "new")]):
            await plane.servers[index].stop(0)
            larger = FakeScheduler(model="new", num_blocks=128)
            plane.servers[index] = await start_scheduler(larger, addresses[index])
            if odd_before:
                await until(plane, lambda named: "another model" in named["s0"].obstacle)
            else:
                await two(plane)
            assert (await plane.generation.GetModel(pb.GetModelRequest())).model == model


async def test_when_the_model_is_gone_that_of_a_scheduler_that_is_there_is_served():
    async with router_alone(FakeScheduler(), FakeScheduler(model="odd")) as plane:
        await until(plane, lambda named: any("another model" in each.obstacle for each in named.values()))
        served = (await plane.generation.GetModel(pb.GetModelRequest())).model
        right, odd = (0, 1) if served == "fake" else (1, 0)
        addresses = [named.address for named in (await states(plane)).schedulers]
        await plane.servers[odd].stop(0)
        await until(plane, lambda named: named[f"s{odd}"].obstacle == "not connected")
        await plane.servers[right].stop(0)
        plane.servers[right] = await start_scheduler(FakeScheduler(model="new"), addresses[right])
        while (await plane.generation.GetModel(pb.GetModelRequest())).model != "new":
            await asyncio.sleep(0.005)


async def test_state_is_each_schedulers_own_and_all_together():
    async with router_alone(FakeScheduler(), FakeScheduler()) as plane:
        await two(plane)
        first, second = plane.schedulers
        first.state = session_pb2.GetStateResponse(serving=True, num_running=2, num_free_blocks=5, last_step_ms=3)
        second.state = session_pb2.GetStateResponse(num_running=1, num_free_blocks=7, last_step_ms=9, num_steps=4)
        answer = await states(plane)
        whole = answer.state
        assert (whole.serving, whole.num_running, whole.num_steps, whole.last_step_ms) == (True, 3, 4, 9)
        assert whole.block_pool.num_free == 12
        assert [named.state.num_running for named in answer.schedulers] == [2, 1]
        second.state = None
        answer = await states(plane)
        assert (answer.state.num_running, [named.HasField("state") for named in answer.schedulers]) == (
            2,
            [True, False],
        )


async def test_a_request_is_explained_by_the_scheduler_that_has_it():
    async with router_alone(FakeScheduler(), FakeScheduler()) as plane:
        await two(plane)
        plane.schedulers[1].explanations["r"] = session_pb2.ExplainResponse(waited_ms=5)
        answer = await plane.introspection.ExplainRequest(introspection_pb2.ExplainRequestRequest(request_id="r"))
        assert answer.waited_ms == 5
        with pytest.raises(grpc.aio.AioRpcError, match="no live request") as info:
            await plane.introspection.ExplainRequest(introspection_pb2.ExplainRequestRequest(request_id="other"))
        assert info.value.code() is grpc.StatusCode.NOT_FOUND


async def test_while_a_scheduler_is_away_nobody_says_that_a_request_is_not_live():
    async def refusal(request_id: str) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await plane.introspection.ExplainRequest(introspection_pb2.ExplainRequestRequest(request_id=request_id))
        assert info.value.code() is grpc.StatusCode.UNAVAILABLE
        return info.value.details()

    async with router_alone(FakeScheduler(), FakeScheduler()) as plane:
        await two(plane)
        plane.schedulers[0].explanations["r"] = session_pb2.ExplainResponse(waited_ms=5)
        await plane.servers[1].stop(0)
        await until(plane, lambda named: named["s1"].obstacle == "not connected")
        assert "s1, which may have 'other': not connected; retry" in await refusal("other")
        answer = await plane.introspection.ExplainRequest(introspection_pb2.ExplainRequestRequest(request_id="r"))
        assert answer.waited_ms == 5
        call = plane.generation.Complete(wanted("a prompt", request_id="mine"))
        await plane.schedulers[0].submitted()
        await plane.servers[0].stop(0)
        while "s0, which has 'mine': not connected; retry" not in await refusal("mine"):
            await asyncio.sleep(0.005)
        call.cancel()


async def test_a_name_is_looked_up_again_and_again_for_the_schedulers_at_its_addresses(monkeypatch):
    port, hosts = free_port(), ["127.0.0.1"]

    def lookup(host: str, port: str, *rest: object, **options: object) -> list[tuple]:
        if host != "scheduler.test":
            return known(host, port, *rest, **options)
        both = [(socket.AF_INET, (each, int(port))) for each in hosts] + [(socket.AF_INET6, ("::1", int(port), 0, 0))]
        return [(family, socket.SOCK_STREAM, 6, "", address) for family, address in both]

    known = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(router_schedulers, "_LOOKUP_INTERVAL_S", 0.02)
    servers = [await start_scheduler(FakeScheduler(), f"127.0.0.{last}:{port}") for last in (1, 2)]
    async with router_alone(scheduler=f"dns:///scheduler.test:{port}") as plane:
        assert not (await states(plane)).schedulers, "one scheduler is no several"
        hosts.append("127.0.0.2")
        await until(plane, lambda named: len(named) == 2)
        await two(plane)
        hosts.remove("127.0.0.1")
        await asyncio.sleep(0.1)
        assert len((await states(plane)).schedulers) == 2, "who has a session is not forgotten"
        await servers[0].stop(0)
        await until(plane, lambda named: not named)
    await servers[1].stop(0)


@pytest.mark.parametrize("scheduler", ["", "a:1,", "dns:///name", "host", "a:1, b:2"])
def test_a_malformed_address_is_refused(scheduler):
    with pytest.raises(ValueError, match="is none of"):
        RouterSettings(model="m", scheduler=scheduler)


# With real ones


def prompt_of(name: str, tail: str) -> str:
    """A prompt whose first four blocks are its name's."""
    return (name * (4 * BLOCK_SIZE))[: 4 * BLOCK_SIZE] + tail


@contextlib.asynccontextmanager
async def client(running: Cluster) -> AsyncIterator[tuple[GenerationServiceStub, IntrospectionServiceStub]]:
    async with dial(running.target) as channel:
        yield GenerationServiceStub(channel), IntrospectionServiceStub(channel)


async def several(introspection: IntrospectionServiceStub, holds: Callable[[list[Named]], bool]) -> list[Named]:
    """What the router says of its schedulers once `holds`."""
    while True:
        named = list((await introspection.GetState(introspection_pb2.GetStateRequest())).schedulers)
        if holds(named):
            return named
        await asyncio.sleep(0.01)


def all_serve(named: list[Named]) -> bool:
    return not any(each.obstacle for each in named)


@pytest.fixture(scope="module")
def site():
    with cluster(num_schedulers=2, scheduler_options=("--max-num-seqs", "64"), step_ms=5) as running:
        yield running


async def test_prompts_that_begin_alike_meet_at_one_scheduler_and_find_their_blocks(site):
    async with client(site) as (generation, introspection):
        before = await several(introspection, all_serve)
        answers: dict[str, list[int]] = {}
        for tail in ("one", "two", "three", "four"):
            for name in "abcdefgh":
                answer = await generation.Complete(wanted(prompt_of(name, tail), max_tokens=1))
                answers.setdefault(name, []).append(answer.usage.cached_prompt_tokens)
        assert answers == {name: [0, 64, 64, 64] for name in "abcdefgh"}
        after = await several(introspection, all_serve)
        served = [new.state.num_steps - old.state.num_steps for new, old in zip(after, before, strict=True)]
        assert all(served), "each scheduler is preferred by some"


async def test_load_is_bounded_also_where_all_prompts_begin_alike(site):
    async with client(site) as (generation, introspection):
        await several(introspection, all_serve)
        calls = [generation.Generate(wanted(prompt_of("z", str(n)), max_tokens=2000)) for n in range(40)]
        for call in calls:
            await call.read()
        named = (await introspection.GetState(introspection_pb2.GetStateRequest())).schedulers
        loads = [each.state.num_running + each.state.num_waiting for each in named]
        assert (sum(loads), max(loads) <= math.ceil(1.25 * 40 / 2)) == (40, True), loads
        for call in calls:
            call.cancel()


async def _text(call: grpc.aio.UnaryStreamCall) -> tuple[str, grpc.StatusCode]:
    text = ""
    try:
        async for message in call:
            text += "".join(output.text for output in message.outputs)
    except grpc.aio.AioRpcError as error:
        return text, error.code()
    return text, grpc.StatusCode.OK


async def _under_load(end: signal.Signals) -> list[tuple[str, grpc.StatusCode]]:
    """What forty clients get while one of two schedulers, at which many of them wait, is ended."""
    options = ("--max-num-seqs", "4", "--lease-s", "0.5")
    with cluster(num_schedulers=2, scheduler_options=options, step_ms=10) as running:
        async with client(running) as (generation, introspection):
            await several(introspection, all_serve)
            prompts = [prompt_of(f"{n:02}", "") for n in range(40)]
            tasks = [asyncio.create_task(_text(generation.Generate(wanted(prompt, 20)))) for prompt in prompts]
            await several(introspection, lambda named: all(each.state.num_waiting > 8 for each in named))
            lost = running.schedulers.pop(0)
            lost.process.send_signal(end)
            answers = await asyncio.gather(*tasks)
            assert lost.process.wait() == (0 if end is signal.SIGTERM else -end)
            await several(introspection, lambda named: named[0].obstacle == "not connected")
            assert (await generation.Complete(wanted("after", 1))).usage.completion_tokens == 1
            running.workers.pop(0).process.kill()
            return answers


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=lambda end: end.name)
async def test_nobody_notices_that_a_scheduler_goes(end):
    answers = await _under_load(end)
    assert {code for _, code in answers} == {grpc.StatusCode.OK}
    assert all(len(text) == 20 and text in TEXT * 2 for text, _ in answers)
