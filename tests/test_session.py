"""The Session stream by hand: what a router that breaks off, comes back or stays away finds at the scheduler."""

import asyncio
import contextlib

import grpc
import pytest
from fakes import TEXT, FakeWorker, control_plane, outputs_of, request, scripted
from scheduler_by_hand import make, submit

from protos import session_pb2 as pb
from protos.columns import pack, unpack
from protos.errors import Refusal
from protos.rpc import SESSION_PROTOCOL_VERSION, dial
from protos.sampling_pb2 import Sampling
from protos.session_pb2_grpc import SessionServiceStub
from protos.worker_pb2 import GetInfoResponse
from scheduler import sessions
from scheduler.config import SchedulerSettings
from scheduler.loop import SchedulerLoop
from scheduler.observer import Observer
from scheduler.plan import Finished, NewTokens
from scheduler.sequence import Sequence, Status
from scheduler.server import SessionService


class HandRouter:
    """A session that a test writes and reads message by message."""

    def __init__(self, channel: grpc.aio.Channel, router_id: str = "by-hand") -> None:
        self._stub = SessionServiceStub(channel)
        self._router_id = router_id

    async def open(self, resume=(), protocol_version=SESSION_PROTOCOL_VERSION) -> pb.SessionResponse:
        self.call = self._stub.Session()
        hello = pb.Hello(router_id=self._router_id, protocol_version=protocol_version, resume=resume)
        await self.call.write(pb.SessionRequest(hello=hello))
        return await self.call.read()

    async def submit(self, handle=1, request_id="r", prompt=b"abc", max_tokens=10, n=1, **options) -> None:
        submit = pb.Submit(
            handle=handle,
            request_id=request_id,
            prompt_token_ids=pack(list(prompt)),
            n=n,
            max_tokens=max_tokens,
            **({"sampling": Sampling(num_prompt_tokens=len(prompt))} | options),
        )
        await self.call.write(pb.SessionRequest(submit=submit))

    async def explain(self, request_id: str) -> pb.ExplainResponse:
        return await self._stub.Explain(pb.ExplainRequest(request_id=request_id))

    async def next(self, kind: str) -> pb.SessionResponse:
        """The next message of this kind; others are passed over."""
        while (message := await self.call.read()).WhichOneof("message") != kind:
            assert message is not grpc.aio.EOF
        return message

    async def tokens(self, num: int) -> list[int]:
        """Collects `num` tokens of sequence 0 and checks that their indices have no gap."""
        tokens: list[int] = []
        while len(tokens) < num:
            for _, _, first, new in outputs_of(await self.next("step_outputs")):
                assert first <= len(tokens)
                tokens += new[len(tokens) - first :]
        return tokens


@contextlib.asynccontextmanager
async def plane_and_router(worker: FakeWorker, **options):
    async with control_plane(worker, **options) as plane, dial(plane.scheduler_address) as channel:
        yield plane, HandRouter(channel)


@contextlib.asynccontextmanager
async def plane_and_two_routers(worker: FakeWorker, **options):
    """Both with open sessions."""
    async with plane_and_router(worker, **options) as (plane, router), dial(plane.scheduler_address) as channel:
        other = HandRouter(channel, "other")
        for each in (router, other):
            await each.open()
        yield plane, router, other
        for each in (router, other):
            each.call.cancel()


async def test_welcome_names_the_epoch_the_model_and_the_limits():
    async with plane_and_router(FakeWorker(), max_num_seqs=7) as (_, router):
        welcome = (await router.open()).welcome
        assert welcome.scheduler_epoch > 0
        assert welcome.model.model == "fake"
        assert welcome.limits.max_num_seqs == 7
        router.call.cancel()


async def test_a_session_that_does_not_open_with_hello_or_speaks_another_protocol_is_refused():
    async with plane_and_router(FakeWorker()) as (_, router):
        with pytest.raises(grpc.aio.AioRpcError, match="speaks protocol 99"):
            await router.open(protocol_version=99)
        call = router._stub.Session()
        await call.write(pb.SessionRequest(ping=pb.Ping()))
        with pytest.raises(grpc.aio.AioRpcError, match="opens with Hello"):
            await call.read()


async def test_one_message_a_step_carries_the_tokens_of_all_requests_in_columns():
    worker = FakeWorker()
    async with plane_and_router(worker) as (_, router):
        await router.open()
        worker.gate.clear()
        for handle in (1, 2):
            await router.submit(handle, f"r{handle}", max_tokens=5)
            await router.next("accepted")
        worker.gate.set()
        sizes = set()
        for _ in range(4):
            sizes.add(len(outputs_of(await router.next("step_outputs"))))
        assert 2 in sizes
        router.call.cancel()


async def test_a_request_outlives_its_lost_stream_and_a_resumption_gets_what_was_missed():
    worker = FakeWorker()
    async with plane_and_router(worker) as (plane, router):
        await router.open()
        await router.submit(max_tokens=30)
        await router.tokens(3)
        router.call.cancel()
        await plane.until(lambda state: state.num_running == 0)  # it finishes while nobody listens
        await router.open(resume=[pb.Resume(handle=1, num_tokens=pack([3]))])
        outputs = await router.next("step_outputs")
        assert outputs_of(outputs) == [(1, 0, 3, [scripted(0, i) for i in range(3, 30)])]
        assert outputs.step_outputs.finished[0].status == pb.FINISH_STATUS_LENGTH_CAPPED
        router.call.cancel()


async def test_the_end_of_a_sequence_that_is_told_twice_is_taken_once():
    """Sequence 0 has ended when the router's session breaks; the resumption tells of its end again."""
    worker = FakeWorker()
    async with control_plane(worker) as plane:
        wanted = request("hello", max_tokens=40, strings=["The quick"])
        wanted.sampling.n = 2
        ends: list[int] = []
        texts = ["", ""]
        async for message in plane.generation.Generate(wanted):
            for output in message.outputs:
                texts[output.index] += output.text
                if output.finish_reason:
                    ends.append(output.index)
                    if output.index == 0:
                        await plane.cut_sessions()
        assert ends == [0, 1]
        assert texts == ["", TEXT[1:41]]


async def test_a_call_that_knows_the_seed_takes_a_live_request_over_and_is_told_of_all_of_it():
    worker = FakeWorker()
    async with plane_and_two_routers(worker) as (_, router, other):
        await router.submit(max_tokens=150)
        await router.tokens(3)
        worker.gate.clear()
        await other.submit(7, max_tokens=150, adopt=True, sampling=Sampling(num_prompt_tokens=3, seed=1))
        assert (await other.next("rejected")).rejected.reason == "REQUEST_ID_IN_USE"
        await other.submit(8, max_tokens=150, adopt=True)
        assert (await router.next("rejected")).rejected.reason == "TAKEN_OVER"
        worker.gate.set()
        assert await other.tokens(150) == [scripted(0, index) for index in range(150)]


async def test_a_call_that_asks_twice_to_take_a_request_over_has_it():
    worker = FakeWorker()
    async with plane_and_two_routers(worker) as (_, router, other):
        worker.gate.clear()
        await router.submit(max_tokens=20)
        await router.next("accepted")
        for _ in range(2):
            await other.submit(8, max_tokens=20, adopt=True)
            await other.next("accepted")
        worker.gate.set()
        assert await other.tokens(20) == [scripted(0, index) for index in range(20)]


async def test_a_lease_begins_anew_with_each_request_that_is_taken_over(monkeypatch):
    leases, lease_s = [], 4321.0
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def noted(delay, *rest, **options):
        timer = call_later(delay, *rest, **options)
        if delay == lease_s:
            leases.append(timer)
        return timer

    monkeypatch.setattr(loop, "call_later", noted)
    worker = FakeWorker()
    async with plane_and_two_routers(worker, lease_s=lease_s) as (_, router, other):
        worker.gate.clear()
        for handle in range(3):
            await router.submit(handle, f"r{handle}", max_tokens=150)
            await router.next("accepted")
        router.call.cancel()
        while not leases:
            await asyncio.sleep(0)
        for num_taken_over in (1, 2):
            await other.submit(num_taken_over, f"r{num_taken_over}", max_tokens=150, adopt=True)
            await other.next("accepted")
            assert [lease.cancelled() for lease in leases] == [True] * num_taken_over + [False]
        worker.gate.set()


async def test_what_went_on_from_elsewhere_is_computed_anew_for_who_takes_it_over():
    """Of what it had output elsewhere not all is known."""
    worker = FakeWorker()
    async with plane_and_two_routers(worker) as (_, router, other):
        begun = pb.Progress(token_ids=pack([scripted(0, index) for index in range(5)]))
        await router.submit(max_tokens=150, continuation=pb.Continuation(progress=[begun]))
        assert outputs_of(await router.next("step_outputs"))[0][2] == 5
        worker.gate.clear()
        await other.submit(max_tokens=150, adopt=True)
        await router.next("rejected")
        worker.gate.set()
        assert await other.tokens(150) == [scripted(0, index) for index in range(150)]


async def test_what_went_on_elsewhere_meanwhile_ends_what_a_lease_still_holds_of_it():
    worker = FakeWorker()
    async with plane_and_two_routers(worker) as (_, router, other):
        worker.gate.clear()
        await router.submit(max_tokens=20)
        await router.next("accepted")
        begun = pb.Progress(token_ids=pack([scripted(0, index) for index in range(5)]))
        going_on = {"max_tokens": 20, "continuation": pb.Continuation(progress=[begun])}
        await other.submit(7, **going_on)
        assert (await other.next("rejected")).rejected.reason == "REQUEST_ID_IN_USE", "its router is there"
        router.call.cancel()
        other_seed = Sampling(num_prompt_tokens=3, seed=1)
        while True:
            await other.submit(8, **going_on | {"sampling": other_seed})
            assert (await other.next("rejected")).rejected.handle == 8
            await other.submit(9, **going_on)
            if (await other.call.read()).HasField("accepted"):
                break
        worker.gate.set()
        assert outputs_of(await other.next("step_outputs"))[0][:3] == (9, 0, 5)


async def test_progress_that_does_not_fit_is_refused():
    async with plane_and_router(FakeWorker()) as (_, router):
        await router.open()
        rows = [pb.Progress(token_ids=pack([1, 2, 3]))], [pb.Progress(), pb.Progress()], [pb.Progress(ended=True)]
        for handle, progress in enumerate(rows):
            await router.submit(handle, max_tokens=3, continuation=pb.Continuation(progress=progress))
            rejected = (await router.next("rejected")).rejected
            assert (rejected.handle, rejected.code) == (handle, grpc.StatusCode.INVALID_ARGUMENT.value[0])
        router.call.cancel()


async def test_a_router_that_stays_away_loses_its_requests_when_the_lease_ends():
    worker = FakeWorker()
    async with plane_and_router(worker, lease_s=0.05) as (plane, router):
        await router.open()
        worker.gate.clear()
        await router.submit(max_tokens=30)
        await router.next("accepted")
        router.call.cancel()
        await plane.until(lambda state: state.block_pool.num_held == 0)
        worker.gate.set()
        welcome = (await router.open(resume=[pb.Resume(handle=1, num_tokens=pack([0]))])).welcome
        assert unpack(welcome.unknown_handles).tolist() == [1]
        router.call.cancel()


class Ending:
    """The server's side of a session that says Hello and nothing more."""

    def __init__(self) -> None:
        self.messages = [pb.SessionRequest(hello=pb.Hello(router_id="r", protocol_version=SESSION_PROTOCOL_VERSION))]

    async def read(self) -> object:
        return self.messages.pop(0) if self.messages else grpc.aio.EOF

    async def write(self, message: pb.SessionResponse) -> None:
        await asyncio.sleep(0)


@pytest.mark.parametrize("num_turns", range(12))
async def test_the_lease_begins_even_if_the_call_is_cancelled_while_it_ends(num_turns):
    held = sessions.Sessions(lambda ticket: None, lambda ticket: None)
    observer = Observer()
    loop = SchedulerLoop(SchedulerSettings(), held, observer)
    loop.info, loop.core = GetInfoResponse(), make()
    loop.ready.set()
    call = asyncio.create_task(SessionService(SchedulerSettings(lease_s=0.001), loop, held, 1).Session(None, Ending()))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    was_there = bool(list(held))
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert all(session.outbox is None for session in held)
    while was_there and list(held):  # until the lease ends
        await asyncio.sleep(0.001)


async def test_a_router_that_comes_back_without_a_request_has_given_it_up():
    worker = FakeWorker()
    async with plane_and_router(worker) as (plane, router):
        await router.open()
        worker.gate.clear()
        await router.submit(max_tokens=30)
        await router.next("accepted")
        router.call.cancel()
        await router.open()
        await plane.until(lambda state: state.block_pool.num_held == 0)
        worker.gate.set()
        router.call.cancel()


async def test_a_deadline_ends_a_request_at_the_scheduler_by_itself():
    worker = FakeWorker()
    async with plane_and_router(worker, max_num_seqs=1) as (plane, router):
        await router.open()
        worker.gate.clear()
        await router.submit(handle=1, request_id="r1", max_tokens=30)
        await plane.until(lambda state: state.num_running == 1)
        await router.submit(handle=2, request_id="r2", max_tokens=30, timeout_ms=1)
        await router.next("accepted")
        await router.next("accepted")
        worker.gate.set()
        rejected = (await router.next("rejected")).rejected
        assert (rejected.handle, rejected.code) == (2, grpc.StatusCode.DEADLINE_EXCEEDED.value[0])
        router.call.cancel()


async def test_an_error_that_nobody_was_there_to_hear_is_told_on_resumption():
    worker = FakeWorker()
    async with plane_and_router(worker) as (plane, router):
        await router.open()
        worker.gate.clear()
        worker.explode = 3
        await router.submit(max_tokens=30)
        await router.next("accepted")
        router.call.cancel()
        worker.gate.set()
        await plane.until(lambda state: state.num_running + state.num_waiting == 0)
        welcome = (await router.open(resume=[pb.Resume(handle=1, num_tokens=pack([0]))])).welcome
        assert not welcome.unknown_handles
        assert (await router.next("rejected")).rejected.code == grpc.StatusCode.INTERNAL.value[0]
        router.call.cancel()


async def test_an_older_stream_of_a_router_is_not_obeyed_any_more():
    worker = FakeWorker()
    async with plane_and_router(worker) as (plane, router), dial(plane.scheduler_address) as channel:
        await router.open()
        newer = HandRouter(channel)
        await newer.open()
        await router.submit(handle=7, max_tokens=50)
        await newer.submit(handle=8, request_id="r8", max_tokens=2)
        assert await newer.tokens(2)
        assert (await plane.state()).num_running == 0
        router.call.cancel()
        newer.call.cancel()


@pytest.mark.parametrize("end", ["leave", "explode"])
async def test_routers_hear_whether_no_steps_run_because_the_worker_left_in_order(end):
    worker = FakeWorker()
    async with plane_and_router(worker) as (_, router):
        await router.open()
        assert (await router.next("load")).load.serving
        setattr(worker, end, 1)
        await router.submit(max_tokens=10)
        while (load := (await router.next("load")).load).serving:
            pass
        assert load.worker_left == (end == "leave")
        while not (load := (await router.next("load")).load).serving:
            pass
        assert not load.worker_left
        router.call.cancel()


async def test_submitting_twice_is_as_once_and_another_routers_id_is_refused():
    worker = FakeWorker()
    async with plane_and_two_routers(worker) as (plane, router, other):
        worker.gate.clear()
        for _ in range(2):
            await router.submit(max_tokens=4)
            await router.next("accepted")
        state = await plane.state()
        assert state.num_running + state.num_waiting == 1
        await other.submit(handle=1, request_id="r")
        rejected = (await other.next("rejected")).rejected
        assert rejected.code == grpc.StatusCode.ALREADY_EXISTS.value[0]
        worker.gate.set()
        assert await router.tokens(4) == [scripted(0, i) for i in range(4)]


async def test_the_id_of_a_request_whose_router_is_away_is_free_for_who_asks_again():
    """Its client may have been told by the router's death, and use another router; what the lease holds goes on."""
    worker = FakeWorker()
    async with plane_and_two_routers(worker) as (_, router, other):
        worker.gate.clear()
        await router.submit(max_tokens=4)
        await router.next("accepted")
        router.call.cancel()
        while True:
            await other.submit(7, max_tokens=4)
            if (await other.call.read()).HasField("accepted"):
                break
        worker.gate.set()
        assert await other.tokens(4) == [scripted(0, index) for index in range(4)]
        await router.open(resume=[pb.Resume(handle=1, num_tokens=pack([0]))])
        assert await router.tokens(4) == [scripted(0, index) for index in range(4)]


async def test_cancel_is_idempotent_and_an_unknown_handle_is_no_error():
    worker = FakeWorker()
    async with plane_and_router(worker) as (plane, router):
        await router.open()
        worker.gate.clear()
        await router.submit(max_tokens=30)
        await router.next("accepted")
        for handle in (1, 1, 99):
            await router.call.write(pb.SessionRequest(cancel=pb.Cancel(handle=handle)))
        await plane.until(lambda state: state.block_pool.num_held == 0)
        worker.gate.set()
        await router.submit(handle=2, request_id="r2", max_tokens=3)
        assert len(await router.tokens(3)) == 3
        await router.call.write(pb.SessionRequest(ping=pb.Ping(nonce=5)))
        assert (await router.next("pong")).pong.nonce == 5
        router.call.cancel()


async def test_tenants_take_turns_and_one_can_not_fill_the_queue():
    worker = FakeWorker()
    async with plane_and_router(worker, max_num_seqs=1, max_waiting_requests_per_tenant=4) as (plane, router):
        await router.open()
        worker.gate.clear()
        await router.submit(max_tokens=1, tenant="many")
        await plane.until(lambda state: state.num_running == 1)
        for handle in range(2, 7):
            await router.submit(handle, f"many-{handle}", max_tokens=1, tenant="many")
        rejected = (await router.next("rejected")).rejected
        assert (rejected.handle, rejected.code) == (6, grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
        assert 100 <= rejected.retry_delay_ms <= 60_000
        for handle in range(7, 10):
            await router.submit(handle, f"few-{handle}", max_tokens=1, tenant="few", tenant_weight=100.0)
        await plane.until(lambda state: state.num_waiting == 7)
        last = await router.explain("many-5")
        assert (last.queue_position, last.message) == (6, "6 requests go first, 3 of them its tenant's")
        worker.gate.set()
        order: list[int] = []
        while len(order) < 8:
            order += [row[0] for row in outputs_of(await router.next("step_outputs"))]
        assert order in ([1, 7, 8, 9, 2, 3, 4, 5], [1, 2, 7, 8, 9, 3, 4, 5])
        router.call.cancel()


async def test_a_request_the_core_refuses_is_rejected_and_the_session_goes_on():
    async with plane_and_router(FakeWorker()) as (_, router):
        await router.open()
        await router.submit(prompt=b"")
        rejected = (await router.next("rejected")).rejected
        assert rejected.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        await router.submit(handle=2, max_tokens=2)
        assert len(await router.tokens(2)) == 2
        router.call.cancel()


async def test_a_client_that_leaves_during_an_outage_leaves_nothing_running():
    worker = FakeWorker()
    async with control_plane(worker) as plane:
        call = plane.generation.Generate(request("hello", max_tokens=150))
        await anext(aiter(call))
        worker.gate.clear()
        await plane.cut_sessions()
        call.cancel()
        await plane.until_scheduler(lambda state: state.num_running == 0)
        worker.gate.set()


async def test_a_request_that_the_scheduler_has_forgotten_goes_on_where_it_was():
    worker = FakeWorker()
    async with control_plane(worker, lease_s=0.05) as plane:
        messages = aiter(plane.generation.Generate(request("hello", max_tokens=150)))
        text = (await anext(messages)).outputs[0].text
        worker.gate.clear()
        await plane.cut_sessions(refuse=True)
        await plane.until_scheduler(lambda state: state.num_running == 0)
        plane.proxy.refusing = False
        worker.gate.set()
        text += "".join([message.outputs[0].text async for message in messages])
        assert text == (TEXT * 4)[:150]


async def test_the_router_takes_its_stream_up_again_after_the_connection_broke():
    """The real router, whose session is cut by the scheduler's side."""
    worker = FakeWorker()
    async with control_plane(worker) as plane:
        streams = [aiter(plane.generation.Generate(request("hello", max_tokens=150))) for _ in range(3)]
        texts = [(await anext(stream)).outputs[0].text for stream in streams]
        worker.gate.clear()
        await plane.cut_sessions()
        worker.gate.set()
        for stream, text in zip(streams, texts, strict=True):
            text += "".join([message.outputs[0].text async for message in stream])
            assert text == (TEXT * 4)[:150]


def sequence_with(tokens, **options) -> Sequence:
    sequence = Sequence(0, 1, **options)
    for token in tokens:
        sequence.append(token, -1.0)
    return sequence


async def test_what_waits_for_a_slow_router_comes_in_messages_of_a_bounded_size_and_ends_with_the_last_tokens(
    monkeypatch,
):
    monkeypatch.setattr(sessions, "_MOST_ENTRIES", 5)
    outbox = sessions.Outbox()
    for handle in range(4):
        outbox.put_tokens(handle, sequence_with([7, 8, 9]), 0)
        outbox.put_finished(pb.Finished(handle=handle))
    taken = [(await outbox.take()).step_outputs for _ in range(2)]
    assert [unpack(outputs.handles).tolist() for outputs in taken] == [[0, 1], [2, 3]]
    assert [[end.handle for end in outputs.finished] for outputs in taken] == [[0, 1], [2, 3]]
    assert [unpack(outputs.token_ids).tolist() for outputs in taken] == [[7, 8, 9] * 2] * 2
    outbox.close()
    assert await outbox.take() is None


async def test_what_waits_of_a_request_is_not_told_once_its_router_has_given_it_up():
    """It may send it again under the same handle, behind other tokens than those."""
    tickets, core = sessions.Sessions(lambda ticket: None, lambda ticket: None), make()
    session = tickets.connect("router")
    for handle in (1, 2):
        tickets.add(session, handle, submit(core, 1))
        session.outbox.put_tokens(handle, sequence_with([7, 8]), 0)
        session.outbox.put_finished(pb.Finished(handle=handle))
        session.outbox.put_rejected(pb.Rejected(handle=handle))
    tickets.give_up(session, 1, moved=False)
    outputs = (await session.outbox.take()).step_outputs
    assert (unpack(outputs.handles).tolist(), [end.handle for end in outputs.finished]) == ([2], [2])
    assert (await session.outbox.take()).rejected.handle == 2


async def test_an_error_comes_behind_the_tokens_that_wait_for_a_slow_router(monkeypatch):
    monkeypatch.setattr(sessions, "_MOST_ENTRIES", 3)
    tickets, core = sessions.Sessions(lambda ticket: None, lambda ticket: None), make()
    session = tickets.connect("router")
    for handle in (1, 2):
        tickets.add(session, handle, submit(core, 1))
        session.outbox.put_tokens(handle, sequence_with([7, 8, 9]), 0)
    refusal = Refusal(grpc.StatusCode.INTERNAL, "WORKER_LOST", "three workers died of it")
    tickets.reject(session.tickets[2], refusal, now=0.0)
    first, second, last = [await session.outbox.take() for _ in range(3)]
    assert [unpack(message.step_outputs.handles).tolist() for message in (first, second)] == [[1], [2]]
    assert last.rejected.handle == 2


async def test_what_has_ended_long_ago_is_not_told_either_once_its_router_has_given_it_up():
    tickets, core = sessions.Sessions(lambda ticket: None, lambda ticket: None), make()
    session = tickets.connect("router")
    tickets.add(session, 1, submit(core, 1))
    session.outbox.put_tokens(1, sequence_with([7, 8]), 0)
    tickets.end(session.tickets[1], now=10.0)
    tickets.purge(before=11.0)
    assert tickets.give_up(session, 1, moved=False) is None
    session.outbox.put_tokens(1, sequence_with([9]), 0)  # of another stay
    assert unpack((await session.outbox.take()).step_outputs.token_ids).tolist() == [9]


async def test_what_has_ended_long_ago_is_still_told_to_a_router_that_was_slow():
    tickets, core = sessions.Sessions(lambda ticket: None, lambda ticket: None), make()
    session = tickets.connect("router")
    tickets.add(session, 1, submit(core, 1))
    session.outbox.put_tokens(1, sequence_with([7, 8]), 0)
    session.outbox.put_finished(pb.Finished(handle=1))
    tickets.end(session.tickets[1], now=10.0)
    tickets.purge(before=11.0)
    outputs = (await session.outbox.take()).step_outputs
    assert (unpack(outputs.handles).tolist(), [end.handle for end in outputs.finished]) == ([1], [1])


def test_forgetting_a_request_leaves_another_one_alone_that_has_come_under_its_handle():
    tickets = sessions.Sessions(lambda ticket: None, lambda ticket: None)
    session = tickets.connect("router")
    core = make()
    tickets.add(session, 7, submit(core, 1))
    tickets.end(session.tickets[7], now=10.0)
    tickets.forget(session.tickets[7])
    tickets.add(session, 7, submit(core, 1))
    tickets.purge(before=11.0)
    assert 7 in session.tickets


async def test_a_load_is_told_as_it_is_behind_all_else_and_only_where_it_changed():
    outbox, num_waiting = sessions.Outbox(), 0
    accepted = pb.SessionResponse(accepted=pb.Accepted(handle=1))

    def load() -> pb.Load:
        return pb.Load(num_waiting=num_waiting)

    outbox.put_load(load)
    outbox.put(accepted)
    num_waiting = 1
    assert [await outbox.take(), await outbox.take()] == [accepted, pb.SessionResponse(load=pb.Load(num_waiting=1))]
    outbox.put_load(load)
    outbox.close()
    assert await outbox.take() is None


async def test_who_waits_for_news_gets_each_kind_when_it_is_there():
    outbox = sessions.Outbox()
    for put, kind in (
        (lambda: outbox.put(pb.SessionResponse(accepted=pb.Accepted(handle=1))), "accepted"),
        (lambda: outbox.put_tokens(1, sequence_with([7]), 0), "step_outputs"),
        (lambda: outbox.put_finished(pb.Finished(handle=1)), "step_outputs"),
        (lambda: outbox.put_rejected(pb.Rejected(handle=2)), "rejected"),
        (lambda: outbox.put_load(pb.Load), "load"),
    ):
        taking = asyncio.create_task(outbox.take())
        await asyncio.sleep(0)
        assert not taking.done()
        put()
        assert (await taking).WhichOneof("message") == kind
    ending = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.close()
    assert await ending is None


def test_of_a_router_whose_lease_is_over_nothing_is_left():
    given_up = []
    tickets, core = sessions.Sessions(lambda ticket: None, given_up.append), make()
    session = tickets.connect("router")
    group = submit(core, 1)
    tickets.add(session, 1, group)
    assert tickets.drop(session) == [group]
    assert [ticket.group for ticket in given_up] == [group]
    assert (list(tickets), tickets.find(group.request_id), tickets.ticket(group)) == ([], None, None)


def test_a_scheduler_that_leaves_knows_that_its_requests_go_on_elsewhere():
    left = []
    tickets, core = sessions.Sessions(lambda ticket: None, left.append), make()
    session = tickets.connect("router")
    for handle in (1, 2):
        tickets.add(session, handle, submit(core, 1))
    tickets.leave()
    assert [(ticket.handle, ticket.moved) for ticket in left] == [(1, True), (2, True)]
    assert not session.tickets


async def test_who_takes_a_request_over_hears_how_its_sequences_ended_under_its_own_handle():
    tickets, core = sessions.Sessions(lambda ticket: None, lambda ticket: None), make()
    before, now = tickets.connect("before"), tickets.connect("now")
    tickets.add(before, 1, submit(core, 1, n=2))
    ticket = before.tickets[1]
    ticket.finished.append(pb.Finished(handle=1, sequence_index=1))
    before.outbox.put_finished(ticket.finished[0])
    tickets.adopt(ticket, now, 7)
    assert (await before.outbox.take()).rejected.reason == "TAKEN_OVER"
    for session, handle in ((before, 1), (now, 7)):
        (end,) = (await session.outbox.take()).step_outputs.finished
        assert (end.handle, end.sequence_index) == (handle, 1)


async def test_of_what_a_router_has_given_up_it_is_told_nothing_more():
    tickets, core = sessions.Sessions(lambda ticket: None, lambda ticket: None), make()
    session = tickets.connect("router")
    kept, gone = submit(core, 1), submit(core, 1)
    for handle, group in enumerate((kept, gone)):
        tickets.add(session, handle, group)
    tickets.give_up(session, 1, moved=False)
    ends = [(group, group.sequences[0]) for group in (gone, kept)]
    assert [ticket.handle for ticket in tickets.deliver_tokens([NewTokens(*end, 0) for end in ends])] == [0]
    for _, sequence in ends:
        sequence.status = Status.FINISHED_STOPPED
    tickets.deliver_finished([Finished(*end) for end in ends])
    outputs = (await session.outbox.take()).step_outputs
    assert (unpack(outputs.handles).tolist(), [end.handle for end in outputs.finished]) == ([0], [0])
