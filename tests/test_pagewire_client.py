"""The Python client against a scripted server: requests as sent, typed results, named errors, streams that cancel."""

import asyncio
import gc
import math
from concurrent.futures import ThreadPoolExecutor
from typing import get_type_hints

import grpc
import pytest
from pagewire_fakes import FakeGeneration, delta, last, serving

from pagewire import AsyncClient, Client, errors, resumption
from pagewire.request import _PLACES, Options, detokenize_request, generate_request, tokenize_request
from pagewire.results import FinishReason, Timings, TokenLogprob, TokenLogprobs, Usage
from protos.errors import Refusal, Violation, invalid_argument, unavailable, unsupported
from protos.pagewire.v1 import generation_pb2 as pb

WAIT_S = 5.0
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.fixture
def fake():
    return FakeGeneration()


@pytest.fixture
def target(fake):
    with serving(fake) as address:
        yield address


@pytest.fixture
def client(target):
    with Client(target) as client:
        yield client


def refuse(refusal: Refusal):
    def script(request):
        raise refusal
        yield

    return script


def endless(fake: FakeGeneration):
    """A script that says one thing and then waits until the call is over."""

    def script(request):
        yield delta("first")
        fake.ended.wait(WAIT_S)

    return script


# Requests


def test_every_option_has_a_place_in_the_request():
    top = pb.GenerateRequest.DESCRIPTOR.fields_by_name
    for option in get_type_hints(Options):
        *parts, field = _PLACES.get(option, option).split(".")
        fields = top[parts[0]].message_type.fields_by_name if parts else top
        assert field in fields, option


def test_an_option_that_is_none_or_absent_is_not_sent():
    request = generate_request("Hi", {"temperature": None, "stop": None, "seed": 0})
    assert request == pb.GenerateRequest(text="Hi", sampling=pb.SamplingParams(seed=0))
    assert not request.sampling.HasField("temperature")


def test_options_reach_their_fields():
    request = generate_request(
        [1, 2],
        {"stop": "END", "stop_token_ids": [5], "token_ids": True, "logit_bias": {3: 1.5}, "early_stopping": "never"}
        | {"priority": -3, "cache_salt": "mine"},
    )
    assert (request.priority, request.cache_salt) == (-3, "mine")
    assert list(request.token_ids.ids) == [1, 2]
    assert (list(request.stop.strings), list(request.stop.token_ids)) == (["END"], [5])
    assert request.output.token_ids
    assert dict(request.sampling.logit_bias) == {3: 1.5}
    assert request.sampling.early_stopping == pb.EARLY_STOPPING_NEVER


def test_what_becomes_of_special_tokens_is_sent_where_it_is_said():
    assert detokenize_request([4], False) == pb.DetokenizeRequest(token_ids=[4], skip_special_tokens=False)
    assert detokenize_request([4], None) == pb.DetokenizeRequest(token_ids=[4])
    assert tokenize_request("Hi", False) == pb.TokenizeRequest(text="Hi", add_special_tokens=False)
    assert tokenize_request("Hi", None) == pb.TokenizeRequest(text="Hi")


def test_a_misspelt_option_is_refused():
    with pytest.raises(TypeError, match="temprature"):
        generate_request("Hi", {"temprature": 0})


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("Hi", {"temperature": "hot"}, "sampling.temperature"),
        ("Hi", {"temperature": 10**400}, "sampling.temperature"),
        ("Hi", {"seed": -1}, "sampling.seed"),
        ("Hi", {"seed": 10**5000}, "sampling.seed"),
        ("Hi", {"stop": [1]}, "stop.strings"),
        ("Hi", {"stop_token_ids": [10**5000]}, "stop.token_ids"),
        ("Hi", {"early_stopping": "soon"}, "sampling.early_stopping"),
        ("Hi", {"early_stopping": []}, "sampling.early_stopping"),
        ([1, -1], {}, "token_ids.ids"),
        ([{"role": "user", "text": "Hi"}], {}, "chat.messages[0]"),
        ([{"role": "user"}], {}, "chat.messages[0]"),
        ([{"role": "user", "content": None}], {}, "chat.messages[0]"),
        ([{"role": "user", "content": "Hi"}, "Hi"], {}, "chat.messages[1]"),
        (b"Hi", {}, "prompt"),
    ],
)
def test_a_value_that_fits_no_field_is_an_invalid_request_naming_it(prompt, options, field):
    with pytest.raises(errors.InvalidRequest) as caught:
        generate_request(prompt, options)
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize("prompt", ["\ud800", [{"role": "user", "content": "\ud800"}]], ids=["text", "chat"])
def test_text_that_is_no_utf_8_is_refused_as_such(prompt):
    with pytest.raises(errors.InvalidRequest, match=r"(text|chat.messages\[0\]): cannot be .*surrogates not allowed"):
        generate_request(prompt, {})


def test_a_conversation_without_a_message_is_not_taken_for_token_ids(client, fake):
    for ask in (client.chat, client.stream_chat):
        with pytest.raises(errors.InvalidRequest) as caught:
            ask([])
        assert [violation.field for violation in caught.value.violations] == ["chat.messages"]
    assert not fake.requests


# Results


def test_generate_gives_a_whole_typed_answer(client, fake):
    completion = client.generate("Hi", max_tokens=3)
    assert completion.text == "Hello, world"
    (output,) = completion.outputs
    assert (output.index, output.token_ids) == (0, (1, 2, 3))
    assert (output.finish_reason, output.stop_match, output.cumulative_logprob) == (FinishReason.STOP, 2, -1.5)
    assert completion.usage == Usage(5, 2, 3)
    assert completion.timings == Timings(1, 100, 300, 0)
    assert fake.requests[0].stop.max_tokens == 3


def test_a_stream_gives_deltas_and_adds_up_to_the_answer(client):
    stream = client.stream("Hi")
    first = next(stream)
    assert (first.text, first.finish_reason, first.stop_match, first.cumulative_logprob) == ("Hel", None, None, None)
    begun = stream.completion
    assert (begun.text, begun.usage, begun.timings) == ("Hel", None, None)
    assert [delta.text for delta in stream] == ["lo,", " world"]
    assert stream.completion == client.generate("Hi")


def test_sequences_of_one_request_are_told_apart(client, fake):
    fake.script = lambda request: [
        pb.GenerateResponse(outputs=[pb.Output(index=1, text="b"), pb.Output(index=0, text="a")]),
        delta("A", index=0, finish_reason=pb.FINISH_REASON_LENGTH),
        last(delta("B", index=1, finish_reason=pb.FINISH_REASON_STOP, stop_match=pb.StopMatch(string="."))),
    ]
    stream = client.stream("Hi", n=2)
    assert [(delta.index, delta.text) for delta in stream] == [(1, "b"), (0, "a"), (0, "A"), (1, "B")]
    first, second = stream.completion.outputs
    assert (first.text, first.finish_reason, first.stop_match) == ("aA", FinishReason.LENGTH, None)
    assert (second.text, second.stop_match) == ("bB", ".")


def test_a_prompt_is_text_or_ids_or_messages(client, fake):
    client.generate("Hi")
    client.generate([1, 2])
    client.generate(CHAT)
    client.chat("Hi")
    list(client.stream_chat(CHAT, add_generation_prompt=False))
    kinds = [request.WhichOneof("prompt") for request in fake.requests]
    assert kinds == ["text", "token_ids", "chat", "chat", "chat"]
    assert [message.role for message in fake.requests[2].chat.messages] == ["system", "user"]
    assert [message.content for message in fake.requests[3].chat.messages] == ["Hi"]
    assert fake.requests[4].chat.add_generation_prompt is False


def test_tokenize_detokenize_and_model(client, fake):
    assert client.tokenize("Hi", add_special_tokens=False) == [7, 8, 9]
    assert client.tokenize(CHAT) == [7, 8, 9]
    assert (fake.requests[0].add_special_tokens, len(fake.requests[1].chat.messages)) == (False, 2)
    with pytest.raises(errors.InvalidRequest, match="prompt: must be a str or a list of messages"):
        client.tokenize([1, 2])
    assert client.detokenize([4, 5]) == "4 5"
    model = client.model()
    assert (model.model, model.context_length, model.eos_token_ids, model.adapters) == ("fake", 64, (2,), ())


# Errors


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (invalid_argument([Violation("sampling.n", "must be 1 or more")]), errors.InvalidRequest),
        (unsupported(["priority"]), errors.Unsupported),
        (Refusal(grpc.StatusCode.NOT_FOUND, "MODEL", "no such model"), errors.NotFound),
        (Refusal(grpc.StatusCode.ALREADY_EXISTS, "ID", "r1 is live"), errors.AlreadyExists),
        (Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "FULL", "full", retry_delay_ms=500), errors.QueueFull),
        (Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "LATE", "late"), errors.DeadlineExceeded),
        (Refusal(grpc.StatusCode.CANCELLED, "GONE", "gone"), errors.Cancelled),
        (unavailable("DRAINING", "draining"), errors.Unavailable),
        (Refusal(grpc.StatusCode.INTERNAL, "BUG", "a bug"), errors.InternalError),
        (Refusal(grpc.StatusCode.DATA_LOSS, "ODD", "odd"), errors.RequestError),
    ],
)
async def test_a_status_is_the_same_named_error_in_both_clients(target, client, fake, refusal, kind, monkeypatch):
    monkeypatch.setattr(resumption, "_LONGEST_DELAY_S", 0.01)
    fake.script = refuse(refusal)
    caught = []
    for call in (lambda: client.generate("Hi"), lambda: next(client.stream("Hi"))):
        with pytest.raises(errors.RequestError) as error:
            call()
        caught.append(error.value)
    async with AsyncClient(target) as asynchronous:
        with pytest.raises(errors.RequestError) as error:
            await asynchronous.generate("Hi")
        caught.append(error.value)
        with pytest.raises(errors.RequestError) as error:
            await anext(asynchronous.stream("Hi"))
        caught.append(error.value)
    retry_after_s = None if refusal.retry_delay_ms is None else refusal.retry_delay_ms / 1000
    for error in caught:
        assert type(error) is kind
        assert (str(error), error.reason, error.code) == (refusal.message, refusal.reason, refusal.code)
        assert (error.violations, error.retry_after_s) == (refusal.violations, retry_after_s)


def test_heartbeats_are_no_deltas(client, fake):
    fake.script = lambda request: iter([pb.GenerateResponse(heartbeat=pb.Heartbeat(queue_position=2)), delta("some")])
    assert [piece.text for piece in client.stream("Hi")] == ["some"]


def test_what_came_before_an_error_is_given_first(client, fake):
    def script(request):
        yield delta("some")
        raise unavailable("LOST", "the worker is lost")

    fake.script = script
    stream = client.stream("Hi")
    assert next(stream).text == "some"
    with pytest.raises(errors.Unavailable):
        next(stream)
    assert stream.completion.text == "some"


def test_a_passed_deadline_is_named(client, fake):
    fake.script = endless(fake)
    stream = client.stream("Hi", timeout=0.5)
    assert next(stream).text == "first"
    with pytest.raises(errors.DeadlineExceeded):
        next(stream)
    assert 0 < fake.timeouts_s[0] <= 0.6


@pytest.mark.parametrize("timeout", [1e10, 1e12, math.inf])
async def test_a_timeout_that_grpc_cannot_count_is_no_limit(target, client, timeout):
    assert client.generate("Hi", timeout=timeout).text == "Hello, world"
    assert next(client.stream("Hi", timeout=timeout)).text == "Hel"
    assert client.model(timeout=timeout).model == "fake"
    async with AsyncClient(target) as asynchronous:
        assert (await asynchronous.generate("Hi", timeout=timeout)).text == "Hello, world"
        assert (await anext(asynchronous.stream("Hi", timeout=timeout))).text == "Hel"
        assert (await asynchronous.model(timeout=timeout)).model == "fake"


def test_a_message_over_grpcs_size_limit_is_not_a_full_queue(client):
    with pytest.raises(errors.InvalidRequest, match="larger than max"):
        client.generate("x" * (17 << 20))


def test_nobody_there_is_unavailable(target):
    with Client("127.0.0.1:1") as client, pytest.raises(errors.Unavailable):
        client.generate("Hi")


# Cancellation


def test_leaving_the_with_block_cancels_the_request(client, fake):
    fake.script = endless(fake)
    with client.stream("Hi") as stream:
        assert next(stream).text == "first"
    assert fake.ended.wait(WAIT_S)
    assert list(stream) == []


def test_breaking_out_of_a_loop_cancels_the_request(client, fake):
    fake.script = endless(fake)
    for piece in client.stream("Hi"):
        assert piece.text == "first"
        break
    assert fake.ended.wait(WAIT_S)


def test_closing_a_stream_ends_the_thread_that_reads_it(client, fake):
    fake.script = endless(fake)
    stream = client.stream("Hi")
    assert next(stream).text == "first"
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(list, stream)
        stream.close()
        assert rest.result(WAIT_S) == []


async def test_a_closed_stream_does_not_give_the_rest_of_its_message_either(target, client, fake):
    fake.script = lambda request: [pb.GenerateResponse(outputs=[pb.Output(text="a"), pb.Output(index=1, text="b")])]
    stream = client.stream("Hi", n=2)
    assert next(stream).text == "a"
    stream.close()
    assert list(stream) == []
    async with AsyncClient(target) as asynchronous:
        same = asynchronous.stream("Hi", n=2)
        assert (await anext(same)).text == "a"
        await same.aclose()
        assert await _all_of(same) == []


def test_a_finished_stream_is_not_cancelled(client, fake):
    with client.stream("Hi") as stream:
        list(stream)
    assert not fake.ended.is_set()


async def test_the_async_client_streams_and_chats(target, fake):
    async with AsyncClient(target) as client:
        stream = client.stream("Hi", temperature=0)
        assert [delta.text async for delta in stream] == ["Hel", "lo,", " world"]
        assert stream.completion == await client.generate("Hi")
        assert (await client.chat("Hi")).text == "Hello, world"
        assert (await anext(client.stream_chat(CHAT))).text == "Hel"
        assert await client.tokenize("Hi") == [7, 8, 9]
        assert await client.detokenize([4]) == "4"
        assert (await client.model()).model == "fake"


async def test_leaving_the_async_with_block_cancels_the_request(target, fake):
    fake.script = endless(fake)
    async with AsyncClient(target) as client:
        async with client.stream("Hi") as stream:
            assert (await anext(stream)).text == "first"
        assert await asyncio.to_thread(fake.ended.wait, WAIT_S)
        assert [delta async for delta in stream] == []


async def test_breaking_out_of_an_async_loop_cancels_the_request(target, fake):
    fake.script = endless(fake)
    async with AsyncClient(target) as client:
        async for piece in client.stream("Hi"):
            assert piece.text == "first"
            break
        gc.collect()
        assert await asyncio.to_thread(fake.ended.wait, WAIT_S)


async def test_cancelling_the_task_cancels_the_request(target, fake):
    fake.script = endless(fake)
    async with AsyncClient(target) as client:
        first = asyncio.Event()

        async def read() -> None:
            async for _ in client.stream("Hi"):
                first.set()

        task = asyncio.create_task(read())
        await asyncio.wait_for(first.wait(), WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(fake.ended.wait, WAIT_S)


async def test_closing_an_async_stream_ends_who_reads_it(target, fake):
    fake.script = endless(fake)
    async with AsyncClient(target) as client:
        stream = client.stream("Hi")
        assert (await anext(stream)).text == "first"
        rest = asyncio.create_task(_all_of(stream))
        await asyncio.sleep(0)  # until it waits
        await stream.aclose()
        assert await asyncio.wait_for(rest, WAIT_S) == []


@pytest.mark.parametrize("resumable", [False, True])
async def test_closing_the_async_client_is_an_error_to_who_waits_and_cancels_no_task(target, fake, resumable):
    def script(request):
        yield pb.GenerateResponse(outputs=[pb.Output(text="first")], seed=5 if resumable else None)
        fake.ended.wait(WAIT_S)

    fake.script = script
    client = AsyncClient(target)
    stream = client.stream("Hi")
    assert (await anext(stream)).text == "first"
    rest, whole = asyncio.create_task(_all_of(stream)), asyncio.create_task(client.generate("Hi"))
    await asyncio.sleep(0)
    await client.close()
    for task in (rest, whole):
        with pytest.raises(errors.Cancelled):
            await asyncio.wait_for(task, WAIT_S)
    assert await asyncio.to_thread(fake.ended.wait, WAIT_S)


async def _all_of(stream) -> list[str]:
    return [delta.text async for delta in stream]


async def test_many_streams_run_at_once(target):
    async def one(client: AsyncClient) -> str:
        return "".join([delta.text async for delta in client.stream("Hi")])

    async with AsyncClient(target) as client:
        assert await asyncio.gather(*(one(client) for _ in range(32))) == ["Hello, world"] * 32


# Log-probabilities


def token(token_id: int, logprob: float, rank: int, *top: tuple[int, float]) -> pb.TokenLogprobs:
    tops = [pb.TokenLogprob(token_id=top_id, logprob=value) for top_id, value in top]
    return pb.TokenLogprobs(token_id=token_id, logprob=logprob, rank=rank, top=tops)


def with_logprobs(request):
    """Two tokens with log-probabilities, behind a prompt with some."""
    first = delta("a", token_ids=[1], logprobs=[token(1, -0.5, 1, (1, -0.5), (2, -1.0))])
    first.prompt_logprobs.append(token(7, -2.5, 9))
    return [first, last(delta("b", token_ids=[2], logprobs=[token(2, -1.5, 2)]))]


def test_log_probabilities_come_with_their_deltas_and_add_up(client, fake):
    fake.script = with_logprobs
    expected = (
        TokenLogprobs(1, -0.5, 1, (TokenLogprob(1, -0.5), TokenLogprob(2, -1.0))),
        TokenLogprobs(2, -1.5, 2, ()),
    )
    stream = client.stream("Hi", logprobs=2, prompt_logprobs=0)
    assert [delta.logprobs for delta in stream] == [expected[:1], expected[1:]]
    assert stream.completion.outputs[0].logprobs == expected
    assert stream.completion.prompt_logprobs == (TokenLogprobs(7, -2.5, 9, ()),)
    assert stream.completion == client.generate("Hi")
    output = fake.requests[0].output
    assert (output.logprobs, output.prompt_logprobs, output.HasField("prompt_logprobs")) == (2, 0, True)
