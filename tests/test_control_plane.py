"""Router and scheduler over real gRPC, with a worker that answers by a script: what a client sees, and what is left.

With two steps in flight, as behind a GPU, where a test does not say otherwise; `test_session.py` has one.
"""

import asyncio
import gc
from contextlib import AbstractAsyncContextManager

import fakes
import grpc
import pytest
from fakes import CONTEXT_LENGTH, EOS, TEXT, ControlPlane, FakeWorker, request
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from protos.columns import unpack
from protos.errors import Refusal, from_status
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub
from protos.rpc import wait_for_serving
from router import server as router_server


def control_plane(worker: FakeWorker | None = None, **options) -> AbstractAsyncContextManager[ControlPlane]:
    return fakes.control_plane(worker, **{"max_steps_in_flight": 2} | options)


async def _read_all(call) -> None:
    async for _ in call:
        pass


async def refusal_of(call) -> Refusal:
    """The error that a unary call or a stream ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await (_read_all(call) if hasattr(call, "__aiter__") else call)
    error = info.value
    details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
    return from_status(error.code(), error.details() or "", Status.FromString(details) if details else None)


async def test_text_streams_token_by_token_and_the_last_message_tells_usage_and_timings():
    async with control_plane() as plane:
        messages = [message async for message in plane.generation.Generate(request("hello", max_tokens=9))]
        assert "".join(message.outputs[0].text for message in messages) == TEXT[:9]
        assert len(messages) > 1
        last = messages[-1]
        assert last.outputs[0].finish_reason == pb.FINISH_REASON_LENGTH
        assert last.outputs[0].cumulative_logprob == pytest.approx(-4.5)
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 9)
        assert 0 < last.timings.ttft_ms <= last.timings.total_ms
        assert not any(message.HasField("usage") for message in messages[:-1])


async def test_the_first_text_arrives_before_the_last_token_is_computed():
    worker = FakeWorker()
    async with control_plane(worker) as plane:
        call = plane.generation.Generate(request(max_tokens=100))
        first = await call.read()
        assert first.outputs[0].text
        assert len(worker.requests) < 100
        call.cancel()


async def test_complete_answers_the_same_request_whole():
    async with control_plane() as plane:
        answer = await plane.generation.Complete(request("hello", max_tokens=9))
        assert answer.outputs[0].text == TEXT[:9]
        assert answer.usage.completion_tokens == 9


async def test_an_answer_too_long_for_one_message_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr("router.server.PUBLIC_MESSAGE_BYTES", 100)
    async with control_plane() as plane:
        error = await refusal_of(plane.generation.Complete(request(max_tokens=60)))
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert "at most 100: use Generate, or ask for less" in error.message
        assert await plane.text(max_tokens=9) == TEXT[:9]


async def test_n_sequences_come_by_index():
    async with control_plane() as plane:
        wanted = request(max_tokens=6)
        wanted.sampling.n = 3
        answer = await plane.generation.Complete(wanted)
        assert [output.text for output in answer.outputs] == [TEXT[i : i + 6] for i in range(3)]
        assert answer.usage.completion_tokens == 18


async def test_a_stop_string_across_token_borders_ends_the_text_before_it():
    async with control_plane() as plane:
        answer = await plane.generation.Complete(request(max_tokens=50, strings=["zebra", "brown"]))
        assert answer.outputs[0].text == "The quick "
        assert answer.outputs[0].finish_reason == pb.FINISH_REASON_STOP
        assert answer.outputs[0].stop_match.string == "brown"
        assert answer.usage.completion_tokens == len("The quick brown")


async def test_include_stop_string_keeps_it():
    async with control_plane() as plane:
        assert await plane.text(max_tokens=50, strings=["brown"], include_stop_string=True) == "The quick brown"


async def test_a_stop_string_in_one_sequence_leaves_the_others_running():
    async with control_plane() as plane:
        wanted = request(max_tokens=30, strings=["The quick"])
        wanted.sampling.n = 2
        answer = await plane.generation.Complete(wanted)
        assert answer.outputs[0].text == ""
        assert answer.outputs[0].finish_reason == pb.FINISH_REASON_STOP
        assert len(answer.outputs[1].text) == 30
        assert answer.outputs[1].finish_reason == pb.FINISH_REASON_LENGTH


async def test_min_tokens_holds_stop_strings_off():
    async with control_plane() as plane:
        text = await plane.text(max_tokens=100, min_tokens=20, strings=["The"])
        assert text == TEXT, 'the second "The" ends it'
        assert await plane.text(max_tokens=100, min_tokens=2, strings=["e"]) == "Th", "the third token may end it"
        assert await plane.text(max_tokens=100, min_tokens=3, strings=["e"]) == "The quick brown fox jumps ov"


async def test_a_stop_id_ends_the_text_before_it_and_is_reported():
    async with control_plane() as plane:
        answer = await plane.generation.Complete(request(max_tokens=50, token_ids=[ord("k")]))
        assert answer.outputs[0].text == "The quic"
        assert answer.outputs[0].stop_match.token_id == ord("k")


async def test_end_of_sequence_ends_the_text_unless_ignored():
    def script(sequence_index: int, output_index: int) -> int:
        return EOS if output_index == 3 else ord("a")

    async with control_plane(FakeWorker(script)) as plane:
        answer = await plane.generation.Complete(request(max_tokens=6))
        assert answer.outputs[0].text == "aaa"
        assert answer.outputs[0].finish_reason == pb.FINISH_REASON_STOP
        assert await plane.text(max_tokens=6, ignore_eos=True) == "aaaaa"


async def test_no_delta_holds_half_a_character():
    text = "né漢🙂".encode()

    async with control_plane(FakeWorker(lambda _, index: text[index % len(text)])) as plane:
        deltas = [m.outputs[0].text async for m in plane.generation.Generate(request(max_tokens=len(text) + 3))]
        assert "".join(deltas) == "né漢🙂né", "the three bytes after n and é are the start of nothing"
        assert not any("�" in delta for delta in deltas)
        assert await plane.text(max_tokens=len(text) - 1) == "né漢", "an incomplete character at the end is left out"


async def test_a_prompt_that_ends_in_the_middle_of_a_character_is_continued():
    async with control_plane(FakeWorker(lambda _, index: "é!".encode()[1 + index % 2])) as plane:
        wanted = pb.GenerateRequest(token_ids=pb.TokenIds(ids="é".encode()[:1]), stop=pb.StopConditions(max_tokens=2))
        answer = await plane.generation.Complete(wanted)
        assert answer.outputs[0].text == "é!"


async def test_echo_and_token_ids_come_when_asked_for():
    async with control_plane() as plane:
        wanted = request("say: ", max_tokens=3)
        wanted.output.echo = wanted.output.token_ids = True
        answer = await plane.generation.Complete(wanted)
        assert answer.outputs[0].text == "say: The"
        assert list(answer.outputs[0].token_ids) == list(b"The")


async def test_chat_goes_through_the_template():
    async with control_plane() as plane:
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
        tokens = await plane.generation.Tokenize(pb.TokenizeRequest(chat=chat))
        assert bytes(tokens.token_ids) == b"<user>hi<assistant>"
        answer = await plane.generation.Complete(pb.GenerateRequest(chat=chat, stop=pb.StopConditions(max_tokens=3)))
        assert answer.usage.prompt_tokens == len("<user>hi<assistant>")


async def test_tokenize_and_detokenize_are_each_others_inverse():
    async with control_plane() as plane:
        tokens = await plane.generation.Tokenize(pb.TokenizeRequest(text="héllo"))
        text = await plane.generation.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))
        assert text.text == "héllo"


async def test_get_model_names_the_limits():
    async with control_plane() as plane:
        model = await plane.generation.GetModel(pb.GetModelRequest())
        assert (model.model, model.context_length, model.vocabulary_size) == ("fake", CONTEXT_LENGTH, 260)
        assert (model.block_size, model.num_blocks, model.max_prompt_tokens) == (4, 64, CONTEXT_LENGTH - 1)
        assert list(model.eos_token_ids) == [EOS]


async def test_sixty_four_streams_at_once_all_finish_whole():
    async with control_plane() as plane:

        async def stream(i: int) -> str:
            deltas = [m.outputs[0].text async for m in plane.generation.Generate(request("x" * i, max_tokens=40))]
            return "".join(deltas)

        texts = await asyncio.gather(*(stream(1 + i % 30) for i in range(64)))
        assert texts == [TEXT[:40]] * 64


async def test_a_cancelled_stream_frees_its_blocks():
    worker = FakeWorker()
    async with control_plane(worker) as plane:
        call = plane.generation.Generate(request(max_tokens=150))
        await call.read()
        assert (await plane.state()).block_pool.num_held > 0
        call.cancel()
        await plane.until(lambda state: state.block_pool.num_held == 0)
        await plane.text(max_tokens=2)
        assert len(worker.known) == 1, "the worker has forgotten the cancelled one"


async def test_a_request_cancelled_while_it_waits_is_gone():
    worker = FakeWorker()
    async with control_plane(worker, max_num_seqs=1) as plane:
        worker.gate.clear()
        running = plane.generation.Generate(request(max_tokens=3))
        await plane.until(lambda state: state.num_running == 1)
        waiting = plane.generation.Generate(request(max_tokens=3))
        await plane.until(lambda state: state.num_waiting == 1)
        waiting.cancel()
        await plane.until(lambda state: state.num_waiting == 0)
        worker.gate.set()
        assert "".join([m.outputs[0].text async for m in running]) == "The"


async def test_a_deadline_reaches_the_scheduler():
    worker = FakeWorker()
    async with control_plane(worker, max_num_seqs=1) as plane:
        worker.gate.clear()
        first = plane.generation.Generate(request(max_tokens=3))
        await plane.until(lambda state: state.num_running == 1)
        error = await refusal_of(plane.generation.Complete(request(max_tokens=3), timeout=0.2))
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        worker.gate.set()
        await plane.until(lambda state: state.num_waiting == 0)
        async for _ in first:
            pass


async def test_a_request_id_in_use_is_refused_and_free_again_afterwards():
    worker = FakeWorker()
    async with control_plane(worker) as plane:
        worker.gate.clear()
        wanted = request(max_tokens=3)
        wanted.request_id = "mine"
        first = plane.generation.Generate(wanted)
        await plane.until(lambda state: state.num_running == 1)
        error = await refusal_of(plane.generation.Generate(wanted))
        assert error.code is grpc.StatusCode.ALREADY_EXISTS
        assert "mine" in error.message
        worker.gate.set()
        assert {message.request_id async for message in first} == {"mine"}
        assert (await plane.generation.Complete(wanted)).request_id == "mine"


async def test_a_full_waiting_queue_is_refused_with_a_delay():
    worker = FakeWorker()
    async with control_plane(worker, max_num_seqs=1, max_waiting_requests=1) as plane:
        worker.gate.clear()
        calls = [plane.generation.Generate(request(max_tokens=2))]
        await plane.until(lambda state: state.num_running == 1)
        calls.append(plane.generation.Generate(request(max_tokens=2)))
        await plane.until(lambda state: state.num_waiting == 1)
        error = await refusal_of(plane.generation.Generate(request(max_tokens=2)))
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.retry_delay_ms is not None
        worker.gate.set()
        for call in calls:
            assert "".join([m.outputs[0].text async for m in call]) == "Th"


async def test_a_router_answers_so_many_requests_at_once_and_refuses_more_with_a_delay():
    worker = FakeWorker()
    async with control_plane(worker, router={"max_live_requests": 2}) as plane:
        worker.gate.clear()
        calls = [plane.generation.Generate(request(max_tokens=2)) for _ in range(2)]
        await plane.until(lambda state: state.num_running + state.num_waiting == 2)
        error = await refusal_of(plane.generation.Generate(request(max_tokens=2)))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
        assert error.retry_delay_ms is not None
        worker.gate.set()
        for call in calls:
            assert "".join([m.outputs[0].text async for m in call]) == "Th"
        assert await plane.text(max_tokens=2) == "Th", "both places are free again"


async def test_a_step_that_takes_too_long_is_a_lost_worker():
    worker = FakeWorker()
    async with control_plane(worker, step_timeout_s=0.1) as plane:
        worker.gate.clear()
        error = await refusal_of(plane.generation.Generate(request(max_tokens=5)))
        assert error.code is grpc.StatusCode.INTERNAL
        assert "workers lost in a row while they computed it: 3" in error.message
        assert "a step was not answered within 0.1 s" in error.message
        worker.gate.set()
        assert await plane.text(max_tokens=3) == "The"


async def test_what_a_worker_that_was_given_up_answers_late_is_nobodys():
    worker = FakeWorker()
    async with control_plane(worker, step_timeout_s=0.3) as plane:
        worker.gate.clear()
        text = asyncio.create_task(plane.text(max_tokens=9))
        while len(worker.requests) < 2:
            await asyncio.sleep(0.005)
        worker.gate.set()  # both steps are answered now, each on its stream
        assert await text == TEXT[:9]


async def test_a_prompt_that_can_never_fit_is_ignored_with_the_reason():
    async with control_plane(FakeWorker(num_blocks=4)) as plane:
        answer = await plane.generation.Complete(request("x" * 20, max_tokens=2))
        assert answer.outputs[0].finish_reason == pb.FINISH_REASON_IGNORED
        assert "4 KV blocks" in answer.outputs[0].finish_message


async def test_an_answer_that_the_kv_cache_has_no_room_for_says_so_at_its_end():
    async with control_plane(FakeWorker(num_blocks=4)) as plane:
        for beam_width in (0, 2):
            wanted = request("x" * 8, max_tokens=50, ignore_eos=True)
            wanted.sampling.beam_width = beam_width
            (output,) = (await plane.generation.Complete(wanted)).outputs
            assert output.finish_reason == pb.FINISH_REASON_LENGTH
            assert "4 KV blocks of 4 tokens" in output.finish_message, beam_width
            wanted.stop.max_tokens = 2
            (output,) = (await plane.generation.Complete(wanted)).outputs
            assert (output.finish_reason, output.finish_message) == (pb.FINISH_REASON_LENGTH, "")


async def test_preemption_changes_no_text():
    async with control_plane(FakeWorker(num_blocks=12)) as plane:
        texts = await asyncio.gather(*(plane.text("prompt", max_tokens=30) for _ in range(6)))
        assert texts == [TEXT[:30]] * 6
        assert (await plane.state()).num_preemptions > 0


async def test_a_client_that_pings_through_a_long_silence_keeps_its_stream():
    """A server without our options ends it with GOAWAY too_many_pings after the third ping."""
    worker = FakeWorker()
    pinging = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with (
        control_plane(worker) as plane,
        grpc.aio.insecure_channel(plane.router_address, options=pinging) as channel,
    ):
        worker.gate.clear()
        stream = GenerationServiceStub(channel).Generate(request(max_tokens=3))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await asyncio.shield(asyncio.ensure_future(stream.initial_metadata()))
        worker.gate.set()
        assert "".join([m.outputs[0].text async for m in stream]) == "The"


async def test_a_step_that_explodes_is_computed_again_and_no_token_is_lost_or_repeated():
    worker = FakeWorker()
    async with control_plane(worker) as plane:
        call = plane.generation.Generate(request(max_tokens=60))
        messages = aiter(call)
        text = (await anext(messages)).outputs[0].text
        worker.explode = 1
        text += "".join([m.outputs[0].text async for m in messages])
        assert text == (TEXT * 2)[:60]


async def test_a_worker_that_is_replaced_goes_on_where_the_old_one_died():
    async with control_plane() as plane:
        messages = aiter(plane.generation.Generate(request("hello", max_tokens=60)))
        text = (await anext(messages)).outputs[0].text
        await plane.replace_worker(FakeWorker(epoch=2, num_blocks=32))
        text += "".join([m.outputs[0].text async for m in messages])
        assert text == (TEXT * 2)[:60]
        assert (await plane.state()).block_pool.num_total == 32
        while (await plane.generation.GetModel(pb.GetModelRequest())).num_blocks != 32:
            await asyncio.sleep(0.01)


class ReadingAhead(FakeWorker):
    """Reads steps while it holds another, as the real worker does."""

    num_answered = 0

    async def Execute(self, requests, context):
        waiting = asyncio.Queue()

        async def read() -> None:
            async for request in requests:
                self.requests.append(request)
                waiting.put_nowait(request)

        reading = asyncio.create_task(read())
        try:
            while True:
                request = await waiting.get()
                await self.gate.wait()
                self.num_answered += 1
                await context.write(self.answer(request))
        finally:
            reading.cancel()

    async def until_in_flight(self, num_steps: int) -> None:
        while len(self.requests) - self.num_answered < num_steps:
            await asyncio.sleep(0.005)


async def test_a_second_step_is_sent_before_the_first_is_answered_but_no_third():
    worker = ReadingAhead()
    async with control_plane(worker) as plane:
        worker.gate.clear()
        first = asyncio.create_task(plane.text("hello", max_tokens=9))
        await worker.until_in_flight(2)
        assert [unpack(sent.token_ids).tolist() for sent in worker.requests] == [list(b"hello"), [-1]]
        second = asyncio.create_task(plane.text("p", max_tokens=9))
        await plane.until(lambda state: state.num_waiting == 1)
        assert len(worker.requests) == 2, "who comes meanwhile waits for a result"
        worker.gate.set()
        assert [await first, await second] == [TEXT[:9]] * 2


async def test_one_step_at_a_time_where_that_is_asked_for():
    worker = ReadingAhead()
    async with control_plane(worker, max_steps_in_flight=1) as plane:
        worker.gate.clear()
        first = asyncio.create_task(plane.text("hello", max_tokens=9))
        await worker.until_in_flight(1)
        second = asyncio.create_task(plane.text("p", max_tokens=9))
        await plane.until(lambda state: state.num_waiting == 1)
        assert len(worker.requests) == 1
        worker.gate.set()
        assert [await first, await second] == [TEXT[:9]] * 2
        assert all(-1 not in unpack(sent.token_ids) for sent in worker.requests)


async def test_a_worker_lost_with_two_steps_in_flight_loses_no_token_and_repeats_none():
    worker = ReadingAhead()
    async with control_plane(worker) as plane:
        messages = aiter(plane.generation.Generate(request("hello", max_tokens=60)))
        text = (await anext(messages)).outputs[0].text
        worker.gate.clear()
        await worker.until_in_flight(2)
        await plane.replace_worker(ReadingAhead(epoch=2))
        text += "".join([m.outputs[0].text async for m in messages])
        assert text == (TEXT * 2)[:60]


async def test_a_stop_string_that_is_found_while_two_more_steps_are_in_flight_ends_the_text():
    async with control_plane(ReadingAhead()) as plane:
        answer = await plane.generation.Complete(request(max_tokens=50, strings=["brown"]))
        assert answer.outputs[0].text == "The quick "
        assert answer.usage.completion_tokens == len("The quick brown")


async def test_a_worker_of_another_block_size_is_refused_until_the_right_one_comes(caplog):
    async with control_plane() as plane:
        await plane.replace_worker(FakeWorker(epoch=2, block_size=8))
        while "worker refused: its block_size is 8, and requests are served with 4; start one like" not in caplog.text:
            await asyncio.sleep(0.005)
        assert not (await plane.state()).serving
        await plane.replace_worker(FakeWorker(epoch=3))
        await wait_for_serving(plane.channel)
        assert await plane.text(max_tokens=3) == "The"


async def test_workers_lost_now_and_then_do_not_add_up():
    worker = FakeWorker()
    async with control_plane(worker) as plane:
        messages = aiter(plane.generation.Generate(request(max_tokens=150)))
        text = ""
        for _ in range(4):
            text += (await anext(messages)).outputs[0].text
            worker.explode = 1
            while worker.explode:
                text += (await anext(messages)).outputs[0].text
        text += "".join([m.outputs[0].text async for m in messages])
        assert text == (TEXT * 4)[:150]


async def test_a_request_that_loses_three_workers_fails_alone():
    worker = FakeWorker()
    async with control_plane(worker) as plane:
        worker.explode = 3
        error = await refusal_of(plane.generation.Generate(request(max_tokens=5), metadata=(("x-request-id", "bad"),)))
        assert error.code is grpc.StatusCode.INTERNAL
        assert error.message.startswith("request 'bad' is given up: workers lost in a row while they computed it: 3, ")
        assert await plane.text(max_tokens=3) == "The"


BAD = [
    (pb.GenerateRequest(), "prompt", "is required"),
    (pb.GenerateRequest(text=""), "text", "must not be empty"),
    (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids.ids", "must not be empty"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 260])), "token_ids.ids[1]", "260 is outside the vocabulary"),
    (pb.GenerateRequest(chat=pb.Chat()), "chat.messages", "must not be empty"),
    (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(content="x")])), "chat.messages[0].role", "empty"),
    (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="elf")])), "chat", "no role elf"),
    (pb.GenerateRequest(text="x" * 200), "text", "at most 199"),
    (pb.GenerateRequest(text="x" * 5_000_000), "text", "at most 199"),
    (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(temperature=float("nan"))), "sampling.temperature", "nan"),
    (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(temperature=-1)), "sampling.temperature", "is -1"),
    (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(top_p=-33)), "sampling.top_p", "is -33"),
    (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(top_p=0)), "sampling.top_p", "(0, 1]"),
    (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(top_k=-1)), "sampling.top_k", "is -1"),
    (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(min_p=2)), "sampling.min_p", "[0, 1]"),
    (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(n=0)), "sampling.n", "is 0; must be in 1 .."),
    (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(n=1000)), "sampling.n", "must be in 1 .."),
    (pb.GenerateRequest(text="x", stop=pb.StopConditions(max_tokens=0)), "stop.max_tokens", "at least 1"),
    (pb.GenerateRequest(text="x", stop=pb.StopConditions(max_tokens=200)), "stop.max_tokens", "at most 199"),
    (pb.GenerateRequest(text="x", stop=pb.StopConditions(max_tokens=2, min_tokens=3)), "stop.min_tokens", "at most"),
    (pb.GenerateRequest(text="x", stop=pb.StopConditions(min_tokens=-1)), "stop.min_tokens", "0 or more"),
    (pb.GenerateRequest(text="x", stop=pb.StopConditions(min_tokens=200)), "stop.min_tokens", "at most 199"),
    (pb.GenerateRequest(text="x", stop=pb.StopConditions(strings=["a", ""])), "stop.strings[1]", "1 .. 1024"),
    (pb.GenerateRequest(text="x", stop=pb.StopConditions(strings=["a"] * 17)), "stop.strings", "at most 16"),
    (pb.GenerateRequest(text="x", stop=pb.StopConditions(token_ids=[999])), "stop.token_ids[0]", "outside"),
    (pb.GenerateRequest(text="x", request_id="é"), "request_id", "printable ASCII"),
    (pb.GenerateRequest(text="x", request_id="i" * 129), "request_id", "128 bytes"),
]


async def test_each_bad_field_is_named_with_what_would_be_right_and_the_service_goes_on():
    async with control_plane() as plane:
        for wanted, field, words in BAD:
            for call in (plane.generation.Generate(wanted), plane.generation.Complete(wanted)):
                error = await refusal_of(call)
                assert error.code is grpc.StatusCode.INVALID_ARGUMENT, (field, error.message)
                assert error.reason == "INVALID_REQUEST"
                assert [v for v in error.violations if v.field == field and words in v.description], error.violations
        assert await plane.text(max_tokens=3) == "The"


async def test_errors_about_very_large_requests_are_cut_to_what_trailers_hold():
    many = [pb.ChatMessage(content="x")] * 5000
    bias, some = (dict.fromkeys(range(num), 1000000.0) for num in (5000, 1000))
    refused = [
        (pb.GenerateRequest(chat=pb.Chat(messages=many)), "chat.messages"),
        (pb.GenerateRequest(chat=pb.Chat(messages=many[:199])), "chat.messages[0].role"),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(logit_bias=bias)), "sampling.logit_bias"),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(logit_bias=some)), "sampling.logit_bias[0]"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[999] * 100_000)), "token_ids.ids[0]"),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="é" * 90_000)])), "chat"),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="é" * 450)])), "chat"),
    ]
    async with control_plane() as plane:
        for wanted, field in refused:
            error = await refusal_of(plane.generation.Complete(wanted))
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT
            assert any(violation.field.startswith(field) for violation in error.violations)
        error = await refusal_of(plane.generation.Complete(pb.GenerateRequest(text="x", model="m" * 1_000_000)))
        assert error.code is grpc.StatusCode.NOT_FOUND
        assert await plane.text(max_tokens=3) == "The"


async def test_what_is_in_a_list_that_is_too_long_is_not_looked_at():
    num = 100_000
    stops = pb.StopConditions(strings=[""] * num), pb.StopConditions(token_ids=[10**6] * num)
    refused = [
        (pb.GenerateRequest(text="x", stop=stops[0]), "stop.strings", 17),
        (pb.GenerateRequest(text="x", stop=stops[1]), "stop.token_ids", 9),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(num), 1e6))), "", 1),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage()] * num)), "chat.messages", 1),
    ]
    async with control_plane() as plane:
        for wanted, field, num_violations in refused:
            error = await refusal_of(plane.generation.Complete(wanted))
            assert len(error.violations) == num_violations
            assert error.violations[0].field.endswith(field)


async def test_a_refused_request_takes_no_memory_until_somebody_collects_it():
    async with control_plane() as plane:
        wanted = pb.GenerateRequest(text="x", stop=pb.StopConditions(max_tokens=0))
        for call in (plane.generation.Generate, plane.generation.Complete):
            await refusal_of(call(wanted))
            gc.collect()
            gc.disable()
            try:
                await refusal_of(call(wanted))
                await plane.text(max_tokens=1)  # the call before it has ended
                gc.set_debug(gc.DEBUG_SAVEALL)
                gc.collect()
                left = [each for each in gc.garbage if isinstance(each, pb.GenerateRequest)]
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()
            assert not left


async def test_long_chats_and_ids_are_rendered_and_decoded_as_short_ones_are(monkeypatch):
    async with control_plane() as plane:
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")] * 8)
        for num_inline in (256, 2):  # beside the event loop, the second time
            monkeypatch.setattr(router_server, "_INLINE_MESSAGES", num_inline)
            monkeypatch.setattr(router_server, "_INLINE_TOKENS", num_inline)
            ids = (await plane.generation.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids
            text = (await plane.generation.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text
            echoed = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), output=pb.OutputOptions(echo=True))
            echoed.stop.max_tokens = 3
            assert (await plane.generation.Complete(echoed)).outputs[0].text == text + "The"
            if num_inline == 256:
                expected = (list(ids), text)
            assert (list(ids), text) == expected


async def test_tokenize_refuses_the_chats_that_generate_refuses():
    async with control_plane() as plane:
        for chat, field in (
            (pb.Chat(), "chat.messages"),
            (pb.Chat(messages=[pb.ChatMessage(content="x")]), "chat.messages[0].role"),
        ):
            error = await refusal_of(plane.generation.Tokenize(pb.TokenizeRequest(chat=chat)))
            assert [violation.field for violation in error.violations] == [field]


async def test_all_violations_are_reported_at_once():
    async with control_plane() as plane:
        wanted = pb.GenerateRequest(
            sampling=pb.SamplingParams(temperature=-1, top_p=2), stop=pb.StopConditions(max_tokens=0)
        )
        error = await refusal_of(plane.generation.Generate(wanted))
        fields = [violation.field for violation in error.violations]
        assert fields == ["prompt", "sampling.temperature", "sampling.top_p", "stop.max_tokens"]


LATER = [
    ({"structure": {"regex": "a+"}}, "structure"),
    ({"adapter": "mine"}, "adapter"),
]


async def test_a_field_of_a_later_version_is_answered_with_its_name_never_ignored():
    async with control_plane() as plane:
        for fields, name in LATER:
            error = await refusal_of(plane.generation.Generate(pb.GenerateRequest(text="x", **fields)))
            assert error.code is grpc.StatusCode.UNIMPLEMENTED, name
            assert [violation.field for violation in error.violations] == [name]


async def test_another_model_is_not_found():
    async with control_plane() as plane:
        for call in (
            plane.generation.Generate(pb.GenerateRequest(text="x", model="gpt")),
            plane.generation.GetModel(pb.GetModelRequest(model="gpt")),
            plane.generation.Tokenize(pb.TokenizeRequest(text="x", model="gpt")),
        ):
            error = await refusal_of(call)
            assert error.code is grpc.StatusCode.NOT_FOUND
            assert "'fake'" in error.message


async def test_bytes_that_are_no_utf8_or_no_message_are_the_clients_mistake():
    async with control_plane() as plane:
        generate = plane.channel.unary_stream("/pagewire.v1.GenerationService/Generate")
        for body in (b"\x1a\x02\xc3\x28", b"\xff\xff\xff"):  # field 3 (text) with broken UTF-8; no message at all
            error = await refusal_of(generate(body))
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT
            assert error.violations[0].field == "request"
        assert await plane.text(max_tokens=3) == "The"


async def test_details_travel_as_google_rpc_messages():
    async with control_plane() as plane:
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await plane.generation.Complete(pb.GenerateRequest())
        details = dict(info.value.trailing_metadata())["grpc-status-details-bin"]
        kinds = {detail.TypeName() for detail in Status.FromString(details).details}
        assert kinds == {"google.rpc.ErrorInfo", BadRequest.DESCRIPTOR.full_name}
        assert RetryInfo.DESCRIPTOR.full_name not in kinds


async def health_of(plane, service: str) -> int:
    answer = await HealthStub(plane.channel).Check(HealthCheckRequest(service=service))
    return answer.status


async def test_health_follows_the_chain_down_and_up_again():
    async with control_plane() as plane:
        await plane.worker_server.stop(0)
        while await health_of(plane, "") == HealthCheckResponse.SERVING:
            await asyncio.sleep(0.005)
        for service in ("", "pagewire.v1.GenerationService", "pagewire.v1.IntrospectionService"):
            assert await health_of(plane, service) == HealthCheckResponse.NOT_SERVING
        assert await health_of(plane, "liveness") == HealthCheckResponse.SERVING
        waiting = asyncio.create_task(plane.text(max_tokens=3))
        await plane.until(lambda state: state.num_waiting == 1)
        await plane.replace_worker(FakeWorker(epoch=2))
        await wait_for_serving(plane.channel, "pagewire.v1.GenerationService")
        assert await waiting == "The", "what came meanwhile has waited"


async def test_an_open_health_watch_does_not_hold_up_the_end_of_a_server():
    async with control_plane(drain_grace_s=60.0) as plane:
        watch = HealthStub(plane.channel).Watch(HealthCheckRequest())
        assert (await watch.read()).status == HealthCheckResponse.SERVING
    # the plane has ended, far within its grace, though nobody closed the watch
    watch.cancel()


async def test_a_router_that_is_about_to_stop_is_not_serving_but_alive_and_takes_calls():
    worker = FakeWorker()
    async with control_plane(worker, router={"drain_delay_s": 2.0}) as plane:
        worker.gate.clear()
        stream = plane.generation.Generate(request(max_tokens=3))
        await plane.until(lambda state: state.num_running == 1)
        plane.stop_router.set()
        while await health_of(plane, "") == HealthCheckResponse.SERVING:
            await asyncio.sleep(0.005)
        assert await health_of(plane, "liveness") == HealthCheckResponse.SERVING
        worker.gate.set()
        assert await plane.text(max_tokens=5) == "The q"
        assert "".join([m.outputs[0].text async for m in stream]) == "The"


async def test_a_draining_router_takes_no_new_calls_and_lets_live_streams_finish():
    worker = FakeWorker()
    async with control_plane(worker) as plane:
        messages = aiter(plane.generation.Generate(request(max_tokens=40)))
        text = (await anext(messages)).outputs[0].text
        worker.gate.clear()
        plane.stop_router.set()
        while plane.channel.get_state() is grpc.ChannelConnectivity.READY:
            await asyncio.sleep(0.005)
        error = await refusal_of(plane.generation.Generate(request(max_tokens=2)))
        assert error.code is grpc.StatusCode.UNAVAILABLE
        worker.gate.set()
        text += "".join([m.outputs[0].text async for m in messages])
        assert text == TEXT[:40]


async def test_streams_that_outlast_the_grace_end_in_an_error_that_says_whether_anything_was_told():
    worker = FakeWorker()
    async with control_plane(worker, router={"drain_grace_s": 0.2}) as plane:
        begun = aiter(plane.generation.Generate(request(max_tokens=150)))
        await anext(begun)
        worker.gate.clear()
        waiting = plane.generation.Generate(request(max_tokens=2))
        await plane.until(lambda state: state.num_running + state.num_waiting == 2)
        plane.stop_router.set()
        for call, code in ((begun, grpc.StatusCode.ABORTED), (waiting, grpc.StatusCode.UNAVAILABLE)):
            error = await refusal_of(call)
            assert (error.code, error.reason) == (code, "DRAINING")
            assert error.retry_delay_ms is not None
        await plane.until_scheduler(lambda state: state.num_running + state.num_waiting == 0)
        worker.gate.set()


async def test_a_worker_that_drains_while_its_scheduler_lives_interrupts_streams_and_ends_none():
    worker = FakeWorker()
    async with control_plane(worker) as plane:
        messages = aiter(plane.generation.Generate(request("hello", max_tokens=150)))
        text = (await anext(messages)).outputs[0].text
        worker.gate.clear()
        await plane.worker_server.stop(grace_s=0.2)
        plane.worker_server = await fakes.start_worker(FakeWorker(epoch=2), f"unix:{plane.directory}/w")
        text += "".join([m.outputs[0].text async for m in messages])
        assert text == (TEXT * 4)[:150]
