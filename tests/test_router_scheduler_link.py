"""What the router sends to a scheduler, here a script, and what its client gets for what the scheduler tells."""

import grpc
import pytest
from fakes import EOS
from router_fakes import finished, router_alone

from pagewire.errors import from_rpc_error
from protos import session_pb2
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
