"""What the router sends to a scheduler, here a script, and what its client gets for what the scheduler tells."""

import asyncio

import grpc
import pytest
from fakes import CONTEXT_LENGTH, EOS, VOCABULARY_SIZE
from router_fakes import FakeScheduler, RouterAlone, finished, router_alone, start_scheduler
from test_logprobs import told
from test_router_schedulers import two, until

from pagewire.errors import from_rpc_error
from protos import session_pb2
from protos.columns import pack
from protos.logprobs import to_columns
from protos.pagewire.v1 import generation_pb2 as pb


def wanted(prompt="abc", max_tokens=9, strings=(), **sampling) -> pb.GenerateRequest:
    stop = pb.StopConditions(max_tokens=max_tokens, strings=strings)
    return pb.GenerateRequest(text=prompt, sampling=pb.SamplingParams(**sampling), stop=stop)


async def test_a_beam_search_is_submitted_as_one_that_returns_n_hypotheses():
    async with router_alone() as plane:
        request = wanted(beam_width=4, n=2, length_penalty=2, early_stopping=pb.EARLY_STOPPING_NEVER)
        request.priority, request.cache_salt = -3, "tenant 7"
        call = plane.generation.Complete(request)
        submit = await plane.scheduler.submitted()
        search = session_pb2.BeamSearch(width=4, length_penalty=2, early_stopping=session_pb2.EARLY_STOPPING_NEVER)
        assert (submit.n, submit.beam_search) == (2, search)
        assert list(submit.stop_token_ids) == [EOS]
        assert (submit.sampling.temperature, submit.priority, submit.cache_salt) == (0, -3, "tenant 7")
        call.cancel()


async def test_best_of_is_submitted_as_so_many_sequences_and_no_beam_search():
    async with router_alone() as plane:
        call = plane.generation.Complete(wanted(n=2, best_of=5))
        submit = await plane.scheduler.submitted()
        assert (submit.n, submit.HasField("beam_search")) == (5, False)
        assert (submit.priority, submit.cache_salt) == (0, "")
        call.cancel()


async def test_hypotheses_are_answered_in_one_message_as_the_scheduler_ranked_them():
    async with router_alone() as plane:
        stream = plane.generation.Generate(wanted(beam_width=3, n=2))
        await plane.scheduler.submitted()
        stopped = {"status": session_pb2.FINISH_STATUS_STOPPED, "stop_token_id": EOS}
        ends = (finished(0, -1.5, **stopped), finished(1, -2.5))
        await plane.scheduler.tell({0: bytes([ord("b"), 0]), 1: b"cd"}, *ends)
        (message,) = [message async for message in stream]
        assert [(output.index, output.cumulative_logprob) for output in message.outputs] == [(0, -1.5), (1, -2.5)]
        assert [output.text for output in message.outputs] == ["b", "cd"], "the stop id itself is hidden"
        assert message.outputs[0].stop_match.token_id == EOS
        assert (message.usage.completion_tokens, message.timings.ttft_ms > 0) == (4, True)


async def test_the_scheduler_hears_how_many_tokens_a_stop_string_leaves_and_their_sum_is_told():
    async with router_alone() as plane:
        stream = plane.generation.Generate(wanted(strings=["lo"]))
        await plane.scheduler.submitted()
        await plane.scheduler.tell({0: b"hel"})
        assert (await stream.read()).outputs[0].text == "he", "the l may begin the stop string"
        await plane.scheduler.tell({0: b"l"}, first=3)
        assert (await stream.read()).outputs[0].text == "l"
        await plane.scheduler.tell({0: b"o you"}, first=4)
        stop = (await plane.scheduler.heard.get()).stop_sequence
        assert (stop.handle, stop.sequence_index, stop.num_tokens) == (1, 0, 5)
        await plane.scheduler.tell({}, finished(0, -2.5, status=session_pb2.FINISH_STATUS_STOPPED))
        last = await stream.read()
        assert (last.outputs[0].text, last.outputs[0].finish_reason) == ("", pb.FINISH_REASON_STOP)
        assert (last.outputs[0].stop_match.string, last.outputs[0].cumulative_logprob) == ("lo", 5 * -0.25)
        assert last.usage.completion_tokens == 5


@pytest.mark.parametrize("name", ["Generate", "Complete"])
async def test_best_of_is_answered_whole(name):
    async with router_alone() as plane:
        call = getattr(plane.generation, name)(wanted(n=1, best_of=2))
        await plane.scheduler.submitted()
        await plane.scheduler.tell({0: b"ab"}, finished(0, -2))
        await plane.scheduler.tell({1: b"c"}, finished(1, -1))
        answer = await (call if name == "Complete" else call.read())
        assert [(output.index, output.text) for output in answer.outputs] == [(0, "c")]
        assert answer.usage.completion_tokens == 3


async def test_best_of_that_is_refused_or_fails_half_way_ends_in_the_error():
    async with router_alone() as plane:
        call = plane.generation.Generate(wanted(best_of=2))
        await plane.scheduler.submitted()
        await plane.scheduler.tell({0: b"ab"}, finished(0, -2))
        await plane.scheduler.reject(grpc.StatusCode.DEADLINE_EXCEEDED, "too late", reason="LATE")
        with pytest.raises(grpc.aio.AioRpcError, match="too late") as info:
            await call.read()
        assert info.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert from_rpc_error(info.value).reason == "LATE"


async def test_an_id_that_a_request_has_given_up_for_another_is_free_again():
    """The id is its caller's x-request-id, under which a request of another router lives at the scheduler."""
    async with router_alone() as plane:
        call = plane.generation.Generate(wanted(), metadata=(("x-request-id", "mine"),))
        first = await plane.scheduler.submitted()
        await plane.scheduler.reject(grpc.StatusCode.ALREADY_EXISTS, "in use", reason="REQUEST_ID_IN_USE")
        assert (await plane.scheduler.submitted()).request_id.startswith(f"{first.request_id}-")
        named = wanted()
        named.request_id = "mine"
        other = plane.generation.Generate(named)
        assert (await plane.scheduler.submitted()).request_id == first.request_id
        for each in (call, other):
            each.cancel()


class Hesitant(FakeScheduler):
    """Answers no greeting while `gate` is clear."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.greeted = asyncio.Event(), asyncio.Event()
        self.gate.set()

    async def _write(self, **message: object) -> None:
        self.greeted.set()
        await self.gate.wait()
        await super()._write(**message)


async def test_a_scheduler_hears_of_who_left_between_the_routers_greeting_and_its_own():
    """The greeting asked for the request, which the scheduler would go on computing for nobody."""
    async with router_alone(Hesitant()) as plane:
        named, scheduler = wanted(), plane.scheduler
        named.request_id = "r"
        call = plane.generation.Generate(named)
        handle = (await scheduler.submitted()).handle
        scheduler.gate.clear()
        scheduler.greeted.clear()
        await plane.servers[0].stop(0)
        plane.servers[0] = await start_scheduler(scheduler, plane.scheduler_address)
        await scheduler.greeted.wait()
        call.cancel()
        while await plane.generation.Complete(named).code() is grpc.StatusCode.ALREADY_EXISTS:
            pass  # the router has not noticed yet
        scheduler.gate.set()
        assert (await scheduler.heard.get()).cancel.handle == handle


async def test_what_a_scheduler_says_of_another_worker_counts_at_once():
    """Requests are checked against the scheduler with the most room."""
    async with router_alone(FakeScheduler(num_blocks=64), FakeScheduler(num_blocks=32)) as plane:
        while (await plane.generation.GetModel(pb.GetModelRequest())).num_blocks != 64:
            await asyncio.sleep(0.01)  # until the first one is heard too
        size = {"context_length": CONTEXT_LENGTH, "vocabulary_size": VOCABULARY_SIZE, "block_size": 4}
        await plane.schedulers[1]._write(model=session_pb2.ModelInfo(model="fake", **size, num_blocks=128))
        while (await plane.generation.GetModel(pb.GetModelRequest())).num_blocks != 128:
            await asyncio.sleep(0.01)


async def hears_load(plane: RouterAlone, place: int, num_running: int) -> None:
    """Returns when the router has heard that so many requests run at a scheduler."""
    await plane.schedulers[place].tell_load(serving=False)
    await until(plane, lambda named: named[f"s{place}"].obstacle == "has no worker")
    await plane.schedulers[place].tell_load(serving=True, num_running=num_running)
    await two(plane)


async def test_a_request_that_its_scheduler_counts_already_is_counted_once():
    async with router_alone(FakeScheduler(), FakeScheduler()) as plane:
        await two(plane)
        first, _ = plane.schedulers
        await hears_load(plane, 1, num_running=4)
        calls = [plane.generation.Complete(wanted("p")) for _ in range(3)]
        for _ in calls:
            await first.accept((await first.submitted()).handle)
        await hears_load(plane, 0, num_running=3)
        calls.append(plane.generation.Complete(wanted("p")))
        await first.submitted()
        for call in calls:
            call.cancel()


async def test_a_scheduler_that_goes_on_is_not_asked_again_for_the_log_probabilities_of_the_prompt():
    """To have them, it would compute the prompt without its prefix cache."""
    async with router_alone() as plane:
        scheduler, request = plane.scheduler, wanted()
        request.output.prompt_logprobs = 0
        stream = plane.generation.Generate(request)
        assert (await scheduler.submitted()).sampling.HasField("num_prompt_logprobs")
        await scheduler.accept()
        of_prompt = {"prompt_handles": pack([1]), "prompt_counts": pack([2]), "prompt_num_tops": pack([0])}
        of_prompt["prompt_logprobs"] = to_columns([told(b"bc", 0)])
        await scheduler._write(step_outputs=session_pb2.StepOutputs(**of_prompt))
        await scheduler.tell({0: b"d"})
        assert [token.token_id for token in (await stream.read()).prompt_logprobs] == list(b"bc")
        await plane.restart_scheduler()
        again = await scheduler.submitted()
        assert (len(again.continuation.progress), again.sampling.HasField("num_prompt_logprobs")) == (1, False)
        stream.cancel()
