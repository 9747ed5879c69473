"""Streams that break off and go on: the client's part, the router's, and both together."""

import asyncio
import contextlib
import threading

import grpc
import pytest
from cluster import cluster
from fakes import TEXT
from pagewire_fakes import FakeGeneration, delta, last, serving
from router_fakes import FakeScheduler, finished, router_alone

from pagewire import AsyncClient, Client, errors, resumption
from protos.errors import Refusal, Violation, invalid_argument, taken_over, unavailable
from protos.pagewire.v1 import generation_pb2 as pb

LOST = unavailable("DRAINING", "this router shut down")
LOST_ON_THE_WAY = Refusal(grpc.StatusCode.UNAVAILABLE, "", "reset")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(resumption, "_FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(resumption, "_LONGEST_DELAY_S", 0.01)


# The client


def breaking(*parts: list[pb.GenerateResponse], refusal: Refusal = LOST):
    """Each call says its part; all but the last break off then."""
    left = list(parts)

    def script(request):
        part = left.pop(0)
        yield from part
        if left:
            raise refusal

    return script


def first(text: str, **fields: object) -> pb.GenerateResponse:
    message = delta(text, **fields)
    message.seed = 2**63 + 5
    return message


def test_a_stream_that_breaks_off_is_resumed_with_what_has_arrived_of_each_sequence():
    fake = FakeGeneration()
    begun = [first("Grüß", token_ids=[1, 2]), delta("b", index=1, token_ids=[3], finish_reason=pb.FINISH_REASON_STOP)]
    fake.script = breaking(begun, [first(" dich", token_ids=[4])], [last(first(".", token_ids=[5]))])
    with serving(fake) as target, Client(target) as client:
        stream = client.stream("Hi", n=2, temperature=0.5, token_ids=True)
        assert [piece.text for piece in stream] == ["Grüß", "b", " dich", "."]
        assert stream.completion.outputs[0].token_ids == (1, 2, 4, 5)
        assert stream.completion.usage is not None
    asked, again, once_more = fake.requests
    assert not asked.HasField("resume")
    assert (again.request_id, again.resume.seed, again.text, again.sampling) == ("r1", 2**63 + 5, "Hi", asked.sampling)
    ended = pb.Received(index=1, text_bytes=1, num_tokens=1, ended=True)
    assert list(again.resume.received) == [pb.Received(index=0, text_bytes=6, num_tokens=2), ended]
    assert list(once_more.resume.received) == [pb.Received(index=0, text_bytes=11, num_tokens=3), ended]


def test_a_stream_is_resumed_by_the_model_that_began_it_or_not_at_all():
    begun = first("a")
    begun.model = "mine"
    fake = FakeGeneration()
    fake.script = breaking([begun], [last(first("b"))])
    with serving(fake) as target, Client(target) as client:
        assert streamed(client) == "ab"
    assert [request.model for request in fake.requests] == ["", "mine"]


async def test_an_asynchronous_stream_is_resumed_too():
    fake = FakeGeneration()
    fake.script = breaking([first("a")], [first("b"), last(delta("c"))])
    with serving(fake) as target:
        async with AsyncClient(target) as client:
            assert [piece.text async for piece in client.stream("Hi", timeout=30)] == ["a", "b", "c"]
    assert 0 < fake.timeouts_s[1] < fake.timeouts_s[0] + 0.1


ENDED = first("a", finish_reason=pb.FINISH_REASON_STOP)
WHOLE = last(first("a", finish_reason=pb.FINISH_REASON_STOP))
THE_REST = last(pb.GenerateResponse(request_id="r1", seed=ENDED.seed))


@pytest.mark.parametrize("parts", [[[WHOLE]], [[ENDED], [THE_REST]]], ids=["at once", "resumed"])
async def test_a_stream_is_resumed_until_its_last_message_has_come_and_not_behind_it(parts):
    fake = FakeGeneration()
    with serving(fake) as target, Client(target) as client:
        fake.script = breaking(*parts, [last(first("again"))])
        stream = client.stream("Hi")
        assert [piece.text for piece in stream] == ["a"]
        assert stream.completion.usage is not None
        async with AsyncClient(target) as asynchronous:
            fake.script = breaking(*parts, [last(first("again"))])
            same = asynchronous.stream("Hi")
            assert [piece.text async for piece in same] == ["a"]
            assert same.completion == stream.completion
    assert len(fake.requests) == 2 * len(parts)


def test_a_stream_that_never_comes_further_is_given_up():
    fake = FakeGeneration()
    fake.script = breaking([first("a")], *[[] for _ in range(20)])
    with serving(fake) as target, Client(target) as client:
        stream = client.stream("Hi")
        assert next(stream).text == "a"
        with pytest.raises(errors.Unavailable, match="shut down"):
            next(stream)
    assert len(fake.requests) == 1 + resumption._MOST_ATTEMPTS


@pytest.mark.parametrize("knows", [False, True], ids=["from the start", "at first"])
def test_a_server_that_knows_of_no_resumption_makes_no_text_come_twice(knows):
    fake = FakeGeneration()
    begun, again = first("a") if knows else delta("a"), first("a")
    again.seed = 1
    fake.script = breaking([begun], [again, delta("b")], [delta("a")], refusal=LOST_ON_THE_WAY)
    with serving(fake) as target, Client(target) as client:
        stream = client.stream("Hi")
        assert next(stream).text == "a"
        with pytest.raises(errors.Unavailable, match="reset"):
            next(stream)
    assert len(fake.requests) == 1 + knows


def test_a_closed_client_resumes_nothing():
    fake, ended = FakeGeneration(), threading.Event()

    def script(request):
        yield first("a")
        ended.wait(5)

    fake.script = script
    with serving(fake) as target:
        client = Client(target)
        stream = client.stream("Hi")
        assert next(stream).text == "a"
        client.close()
        with pytest.raises(errors.RequestError):
            next(stream)
        ended.set()


def test_a_stream_that_is_closed_while_it_waits_is_not_resumed(monkeypatch):
    fake, delay_after = FakeGeneration(), resumption.Attempts.delay_after
    fake.script = breaking([first("a")], [last(first("b"))])
    with serving(fake) as target, Client(target) as client:
        stream = client.stream("Hi")

        def closing(attempts, error):
            stream.close()
            return delay_after(attempts, error)

        monkeypatch.setattr(resumption.Attempts, "delay_after", closing)
        assert [piece.text for piece in stream] == ["a"]
        assert client.generate("Hi").text == "b", "the next part is the next call's"


async def test_nor_is_an_asynchronous_one(monkeypatch):
    fake, delay_after, closed = FakeGeneration(), resumption.Attempts.delay_after, []
    fake.script = breaking([first("a")], [last(first("b"))])
    with serving(fake) as target:
        async with AsyncClient(target) as client:
            stream = client.stream("Hi")

            def closing(attempts, error):
                closed.append(asyncio.ensure_future(stream.aclose()))
                return delay_after(attempts, error)

            monkeypatch.setattr(resumption.Attempts, "delay_after", closing)
            assert [piece.text async for piece in stream] == ["a"]
            assert [each.done() for each in closed] == [True]
            assert (await client.generate("Hi")).text == "b"


@pytest.mark.parametrize(
    "refusal",
    [Refusal(grpc.StatusCode.INTERNAL, "BUG", "no"), invalid_argument([Violation("text", "no")]), taken_over()],
    ids=str,
)
def test_what_no_other_server_mends_is_not_resumed(refusal):
    fake = FakeGeneration()
    fake.script = breaking([first("a")], [first("b")], refusal=refusal)
    with serving(fake) as target, Client(target) as client, pytest.raises(errors.RequestError, match=refusal.message):
        list(client.stream("Hi"))
    assert len(fake.requests) == 1


def test_a_full_server_is_waited_for_by_who_has_begun_only():
    full = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "FULL", "full", retry_delay_ms=60_000)
    refusals = iter([LOST, full, full])

    def script(request):
        yield from [first("a")] if not request.HasField("resume") else []
        if (refusal := next(refusals, None)) is not None:
            raise refusal
        yield last(first("b"))

    fake = FakeGeneration()
    fake.script = script
    with serving(fake) as target, Client(target) as client:
        assert [piece.text for piece in client.stream("Hi")] == ["a", "b"]
        fake.script = breaking([], [], refusal=full)
        with pytest.raises(errors.QueueFull):
            list(client.stream("Hi"))


def whole(client: Client) -> str:
    return client.generate("Hi").text


def streamed(client: Client) -> str:
    return "".join(piece.text for piece in client.stream("Hi"))


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
def test_a_call_that_is_cut_before_its_answer_is_made_again_but_not_for_ever(ask, code):
    fake = FakeGeneration()
    cut = Refusal(code, "", "cut")
    fake.script = breaking([], [], [], [last(first("a"))], refusal=cut)
    with serving(fake) as target, Client(target) as client:
        assert ask(client) == "a"
        fake.script = breaking(*[[]] * 99, refusal=cut)
        with pytest.raises(errors.RequestError, match="cut"):
            ask(client)
    assert len(fake.requests) == 4 + 1 + resumption._MOST_BEFORE_BEGUN


@pytest.mark.parametrize("ask", [whole, streamed])
def test_who_is_told_to_come_back_does_so(ask):
    fake = FakeGeneration()
    fake.script = breaking([], [], [last(first("a"))], refusal=unavailable("NO_SCHEDULER", "loading", 1))
    with serving(fake) as target, Client(target) as client:
        assert ask(client) == "a"
    assert len(fake.requests) == 3


def test_a_server_that_says_when_to_come_back_is_not_asked_before(monkeypatch):
    monkeypatch.setattr(resumption, "_LONGEST_DELAY_S", 5.0)
    attempts = resumption.Attempts(None, resumption.Connection())
    assert attempts.delay_after(errors.named(unavailable("NO_SCHEDULER", "loading", 1500))) == 1.5
    hurried = resumption.Attempts(1.0, resumption.Connection())
    with pytest.raises(errors.Unavailable, match="loading"):
        hurried.delay_after(errors.named(unavailable("NO_SCHEDULER", "loading", 1500)))


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize("said", resumption._OVER_A_PROXYS_LIMIT)
def test_what_took_longer_than_a_proxy_allows_is_not_asked_for_again(ask, said):
    fake = FakeGeneration()
    fake.script = breaking([], [last(first("a"))], refusal=Refusal(grpc.StatusCode.UNAVAILABLE, "", said))
    with serving(fake) as target, Client(target) as client, pytest.raises(errors.Unavailable, match=said):
        ask(client)
    assert len(fake.requests) == 1


@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_call_that_is_made_again_waits_for_the_end_of_the_one_before(ask):
    """A server may still count it as live. Only then: an id that somebody else's request has is an error at once."""
    fake, in_use = FakeGeneration(), Refusal(grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE", "r1 is live")
    refusals = iter([LOST, in_use, in_use, None, in_use])

    def script(request):
        if (refusal := next(refusals)) is not None:
            raise refusal
        yield last(first("a"))

    fake.script = script
    with serving(fake) as target, Client(target) as client:
        assert ask(client) == "a"
        with pytest.raises(errors.AlreadyExists):
            ask(client)


@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_client_that_is_closed_while_a_call_waits_to_be_made_again_says_what_broke_it(ask, monkeypatch):
    fake, delay_after, broken_by = FakeGeneration(), resumption.Attempts.delay_after, []
    fake.script = breaking([], [last(first("a"))])
    with serving(fake) as target, Client(target) as client:

        def closing(attempts, error):
            broken_by.append(error)
            client.close()
            return delay_after(attempts, error)

        monkeypatch.setattr(resumption.Attempts, "delay_after", closing)
        with pytest.raises(errors.Unavailable, match="shut down") as info:
            ask(client)
    assert broken_by == [info.value]


def test_who_waits_for_long_is_told_why_once_in_each_pause(monkeypatch, caplog):
    fake = FakeGeneration()
    fake.script = breaking([first("a")], [], [last(first("b"))])
    with serving(fake) as target, Client(target) as client:
        assert streamed(client) == "ab"
        assert caplog.messages == [], "pauses of a moment are nobody's concern"
        monkeypatch.setattr(resumption, "_TOLD_OF_S", 0.0)
        fake.script = breaking([first("a")], [], [], [first("b")], [last(first("c"))])
        assert streamed(client) == "abc"
    assert caplog.messages == ["no answer (this router shut down); trying again for a while"] * 2


async def test_an_asynchronous_call_of_one_answer_is_made_again_too():
    fake = FakeGeneration()
    fake.script = breaking([], [], [last(first("a"))])
    with serving(fake) as target:
        async with AsyncClient(target) as client:
            assert (await client.generate("Hi", timeout=30)).text == "a"
    assert len(fake.requests) == 3


@pytest.fixture
def restart(monkeypatch):
    """Makes a server come back at an address once a call has been told that nobody is there."""
    monkeypatch.setattr(resumption, "_FIRST_DELAY_S", 0.1)
    monkeypatch.setattr(resumption, "_LONGEST_DELAY_S", 1.0)
    delay_after = resumption.Attempts.delay_after
    with contextlib.ExitStack() as back:

        def restart(address: str) -> None:
            def restarting(attempts, error):
                delay_s = delay_after(attempts, error)
                if delay_s and "failed to connect" in str(error):
                    monkeypatch.setattr(resumption.Attempts, "delay_after", delay_after)
                    back.enter_context(serving(FakeGeneration(), address))
                return delay_s

            monkeypatch.setattr(resumption.Attempts, "delay_after", restarting)

        yield restart


@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_client_that_had_a_server_waits_for_it_to_come_back(ask, restart, tmp_path):
    address = f"unix:{tmp_path}/router"
    with Client(address) as client:
        with serving(FakeGeneration(), address):
            client.generate("Hi")
        restart(address)
        assert ask(client) == "Hello, world"


async def test_an_asynchronous_client_that_had_a_server_waits_for_it_too(restart, tmp_path):
    address = f"unix:{tmp_path}/router"
    async with AsyncClient(address) as client:
        with serving(FakeGeneration(), address):
            await client.generate("Hi")
        restart(address)
        assert (await client.generate("Hi")).text == "Hello, world"


def test_a_call_is_made_again_at_once_and_then_after_ever_longer_pauses_for_eleven_seconds(monkeypatch):
    monkeypatch.setattr(resumption, "_FIRST_DELAY_S", 0.1)
    monkeypatch.setattr(resumption, "_LONGEST_DELAY_S", 5.0)
    attempts, cut = resumption.Attempts(None, resumption.Connection()), errors.named(LOST_ON_THE_WAY)
    assert [attempts.delay_after(cut) for _ in range(7)] == [0, 0.2, 0.4, 0.8, 1.6, 3.2, 5]
    with pytest.raises(errors.Unavailable, match="reset"):
        attempts.delay_after(cut)


def test_a_stream_that_has_begun_is_resumed_after_ever_longer_pauses_for_half_a_minute(monkeypatch):
    monkeypatch.setattr(resumption, "_FIRST_DELAY_S", 0.1)
    monkeypatch.setattr(resumption, "_LONGEST_DELAY_S", 5.0)
    cut = errors.named(LOST)
    stream = resumption.Resumption(pb.GenerateRequest(), None, resumption.Connection())
    stream.add(first("a"))
    pauses = [stream.delay_after(cut) for _ in range(12)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2] + [5] * 6, "another server may be there sooner than this one says"
    stream.add(pb.GenerateResponse(seed=first("").seed, heartbeat=pb.Heartbeat()))
    with pytest.raises(errors.Unavailable, match="shut down"):
        stream.delay_after(cut)
    stream.add(first("b"))
    assert stream.delay_after(cut) == 0.1, "output has come meanwhile"
    full = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "FULL", "full", retry_delay_ms=3000)
    assert stream.delay_after(errors.named(full)) == 3, "the server that it goes on at has no room yet"


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize("target", ["127.0.0.1:1", "nowhere.invalid:1"])
def test_where_no_server_ever_was_that_is_said_soon(ask, target, monkeypatch):
    monkeypatch.setattr(resumption, "_FIRST_DELAY_S", 60.0)  # which would be waited for
    monkeypatch.setattr(resumption, "_LONGEST_DELAY_S", 60.0)
    with Client(target) as client, pytest.raises(errors.Unavailable):
        ask(client)


# The router


def resuming(seed: int | None = 7, *received: pb.Received, **fields: object) -> pb.GenerateRequest:
    stop = pb.StopConditions(max_tokens=9, ignore_eos=True)
    resume = pb.Resume(seed=seed, received=received)
    return pb.GenerateRequest(**({"request_id": "r", "text": "p", "stop": stop, "resume": resume} | fields))


async def test_the_first_message_tells_the_seed_and_the_model_and_no_other_does():
    async with router_alone() as plane:
        call = plane.generation.Generate(pb.GenerateRequest(text="p", stop=pb.StopConditions(max_tokens=2)))
        submit = await plane.scheduler.submitted()
        assert not submit.adopt
        await plane.scheduler.tell({0: b"a"})
        message = await call.read()
        assert (message.seed, message.model) == (submit.sampling.seed, "fake")
        await plane.scheduler.tell({0: b"b"}, finished(), first=1)
        message = await call.read()
        assert not message.HasField("seed")
        assert not message.model


async def test_a_resumed_stream_begins_behind_what_its_client_has():
    received = pb.Received(index=0, text_bytes=3, num_tokens=3), pb.Received(index=1, text_bytes=2, ended=True)
    output, sampling = pb.OutputOptions(token_ids=True), pb.SamplingParams(n=2)
    async with router_alone() as plane:
        call = plane.generation.Generate(resuming(7, *received, output=output, sampling=sampling))
        submit = await plane.scheduler.submitted()
        assert (submit.adopt, submit.sampling.seed, submit.request_id) == (True, 7, "r")
        await plane.scheduler.tell({0: b"ab", 1: b"no"}, finished(1))
        await plane.scheduler.tell({0: b"cde"}, first=2)
        message = await call.read()
        assert [(row.index, row.text, bytes(row.token_ids)) for row in message.outputs] == [(0, "de", b"de")]
        await plane.scheduler.tell({0: b"f"}, finished(), first=5)
        message = await call.read()
        assert (message.outputs[0].text, message.usage.completion_tokens) == ("f", 8)
        assert await call.read() is grpc.aio.EOF


async def test_a_client_that_lacks_only_the_last_message_gets_it():
    async with router_alone() as plane:
        call = plane.generation.Generate(resuming(7, pb.Received(index=0, text_bytes=2, ended=True)))
        await plane.scheduler.submitted()
        await plane.scheduler.tell({0: b"ab"}, finished())
        message = await call.read()
        assert (len(message.outputs), message.usage.completion_tokens) == (0, 2)
        assert await call.read() is grpc.aio.EOF


@pytest.mark.parametrize("limit", [{}, {"tenant_max_requests": 1}, {"max_live_requests": 1}], ids=str)
async def test_a_request_that_is_resumed_leaves_the_call_whose_connection_is_dead(limit):
    """And counts as one with it."""
    async with router_alone(**limit) as plane:
        asked = resuming(sampling=pb.SamplingParams(seed=7))
        asked.ClearField("resume")
        dead = plane.generation.Generate(asked)
        handle = (await plane.scheduler.submitted()).handle
        with pytest.raises(grpc.aio.AioRpcError, match="is in use"):
            await plane.generation.Generate(resuming(8)).read()
        call = plane.generation.Generate(resuming(7))
        with pytest.raises(grpc.aio.AioRpcError, match="taken this request over"):
            await dead.read()
        heard = {
            message.WhichOneof("message"): message for message in [await plane.scheduler.heard.get() for _ in "ab"]
        }
        assert heard["cancel"].cancel.handle == handle
        await plane.scheduler.tell({0: b"ab"}, finished(handle=handle + 1), handle=heard["submit"].submit.handle)
        assert (await call.read()).outputs[0].text == "ab"


class Slow(FakeScheduler):
    """One that says who has a request only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: asyncio.Queue[asyncio.Event] = asyncio.Queue()
        self.was_cancelled = asyncio.Event()

    async def Explain(self, request, context):
        gate = asyncio.Event()
        await self.gates.put(gate)
        try:
            await gate.wait()
        except asyncio.CancelledError:
            self.was_cancelled.set()
            raise
        return await super().Explain(request, context)


async def test_calls_that_resume_one_request_at_once_and_break_off_leave_nothing_behind():
    scheduler = Slow()
    async with router_alone(scheduler, tenant_max_requests=2) as plane:
        asked = resuming(sampling=pb.SamplingParams(seed=7))
        asked.ClearField("resume")
        begun = plane.generation.Generate(asked)
        await scheduler.submitted()
        first_call = plane.generation.Generate(resuming(7))
        first_gate = await scheduler.gates.get()
        begun.cancel()
        assert (await scheduler.heard.get()).HasField("cancel")
        second_call = plane.generation.Generate(resuming(7))
        await scheduler.gates.get()
        first_gate.set()
        await scheduler.submitted()
        first_call.cancel()
        assert (await scheduler.heard.get()).HasField("cancel")
        second_call.cancel()
        await scheduler.was_cancelled.wait()
        calls = [plane.generation.Generate(pb.GenerateRequest(text="p")) for _ in range(2)]
        for _ in calls:
            await scheduler.submitted()  # neither is refused for what the others have left behind
        for call in calls:
            call.cancel()


@pytest.mark.parametrize(
    "request_, field",
    [
        (resuming(request_id=""), "request_id"),
        (resuming(None), "resume.seed"),
        (resuming(7, sampling=pb.SamplingParams(seed=8)), "resume.seed"),
        (resuming(7, pb.Received(index=1)), "resume.received[0]"),
        (resuming(7, pb.Received(text_bytes=-1)), "resume.received[0]"),
        (resuming(7, pb.Received(), pb.Received()), "resume.received"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_resumption_that_is_not_whole_is_refused_by_field(request_, field):
    async with router_alone() as plane:
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await plane.generation.Generate(request_).read()
        assert [row.field for row in errors.from_rpc_error(info.value).violations] == [field]


# Real processes


@pytest.mark.slow
@pytest.mark.parametrize("num_schedulers", [pytest.param(1, marks=pytest.mark.long), 2])
async def test_clients_go_on_at_another_router_when_theirs_is_killed(num_schedulers):
    with cluster(num_routers=2, num_schedulers=num_schedulers, step_ms=5) as running:
        first, second = running.routers
        running.wait_for_serving(second)
        async with AsyncClient(f"ipv4:127.0.0.1:{first},127.0.0.1:{second}") as client:
            streams = [client.stream(f"{n} p", max_tokens=200, ignore_eos=True, token_ids=True) for n in range(8)]
            begun = [await anext(stream) for stream in streams]
            running.routers.pop(first).process.kill()
            for stream, begin in zip(streams, begun, strict=True):
                text = begin.text + "".join([piece.text async for piece in stream])
                assert text in TEXT * 6
                output = stream.completion.outputs[0]
                assert (output.text, len(output.token_ids)) == (text, 200)
                assert stream.completion.usage.completion_tokens == 200
        while (state := running.state()).num_running + state.num_waiting:
            pass
        assert state.block_pool.num_held == 0
