"""Beam search, best_of, priority, salts and explanations through router and scheduler, before a scripted worker."""

import asyncio

import grpc
import pytest
from fakes import EOS, TEXT, FakeWorker, control_plane, request, scripted_candidates

from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1 import introspection_pb2


def search(width=2, n=2, max_tokens=5, prompt="p", **sampling) -> pb.GenerateRequest:
    wanted = request(prompt, max_tokens=max_tokens)
    wanted.sampling.MergeFrom(pb.SamplingParams(beam_width=width, n=n, **sampling))
    return wanted


async def test_a_beam_search_answers_its_hypotheses_best_first_in_one_message():
    async with control_plane() as plane:
        (message,) = [message async for message in plane.generation.Generate(search())]
        # The cheapest deviation from TEXT is that of the first byte, which costs 1.
        assert [(output.index, output.text) for output in message.outputs] == [(0, "The q"), (1, "Uhe q")]
        assert [output.cumulative_logprob for output in message.outputs] == pytest.approx([-2.5, -3.5])
        assert {output.finish_reason for output in message.outputs} == {pb.FINISH_REASON_LENGTH}
        assert message.usage.completion_tokens == 10
        assert 0 < message.timings.ttft_ms <= message.timings.total_ms


async def test_a_search_of_one_beam_is_greedy():
    async with control_plane() as plane:
        answer = await plane.generation.Complete(search(width=1, n=1, max_tokens=20))
        assert answer.outputs[0].text == TEXT[:20]


async def test_a_hypothesis_ends_with_a_stop_id_which_is_not_shown():
    def candidates(last_token_id: int, output_index: int, num: int) -> list[tuple[int, float]]:
        found = scripted_candidates(last_token_id, output_index, num - 1)
        return [(EOS, -0.1), *found] if output_index == 3 else [*found, (EOS, -9.0)]

    async with control_plane(FakeWorker(candidates=candidates)) as plane:
        wanted = search(n=1, early_stopping=pb.EARLY_STOPPING_NEVER)
        wanted.output.token_ids = True
        (output,) = (await plane.generation.Complete(wanted)).outputs
        assert (output.text, output.stop_match.token_id) == ("The", EOS)
        assert list(output.token_ids) == [*b"The", EOS]
        assert output.cumulative_logprob == pytest.approx(-1.6)


async def test_memory_pressure_changes_no_hypothesis():
    async with control_plane(FakeWorker(num_blocks=24, num_cpu_blocks=24)) as plane:
        wanted = search(width=3, n=3, max_tokens=25)
        alone = await plane.generation.Complete(wanted)
        together = await asyncio.gather(*(plane.generation.Complete(wanted) for _ in range(6)))
        assert (await plane.state()).num_preemptions > 0
        for answer in together:
            assert answer.outputs == alone.outputs


async def test_best_of_answers_the_most_probable_sequences_best_first():
    def script(sequence_index: int, output_index: int) -> int:
        """Sequence i says i times its letter: each token costs as much, so the shortest is the most probable."""
        return ord("a") + sequence_index if output_index < 6 - sequence_index else EOS

    async with control_plane(FakeWorker(script)) as plane:
        wanted = request(max_tokens=20)
        wanted.sampling.MergeFrom(pb.SamplingParams(n=2, best_of=4))
        (message,) = [message async for message in plane.generation.Generate(wanted)]
        assert [(output.index, output.text) for output in message.outputs] == [(0, "ddd"), (1, "cccc")]
        assert [output.cumulative_logprob for output in message.outputs] == pytest.approx([-2.0, -2.5])
        assert message.usage.completion_tokens == 7 + 6 + 5 + 4


async def test_the_sum_of_a_sequence_that_a_stop_string_ended_leaves_out_what_was_sampled_since():
    async with control_plane() as plane:
        for _ in range(5):
            answer = await plane.generation.Complete(request(max_tokens=50, strings=["brown"]))
            assert answer.usage.completion_tokens == len("The quick brown")
            assert answer.outputs[0].cumulative_logprob == pytest.approx(-0.5 * len("The quick brown"))


async def test_a_request_of_higher_priority_goes_first():
    worker = FakeWorker()
    async with control_plane(worker, max_num_seqs=1) as plane:
        worker.gate.clear()
        order: list[str] = []

        async def answer(name: str, priority: int) -> None:
            wanted = request(max_tokens=2)
            wanted.request_id, wanted.priority = name, priority
            order.append((await plane.generation.Complete(wanted)).request_id)

        calls = [asyncio.create_task(answer("first", 0))]
        await plane.until(lambda state: state.num_running == 1)
        for place, (name, priority) in enumerate((("low", -10), ("high", 10)), start=1):
            calls.append(asyncio.create_task(answer(name, priority)))
            await plane.until(lambda state, num_waiting=place: state.num_waiting == num_waiting)
        worker.gate.set()
        await asyncio.gather(*calls)
        assert order == ["first", "high", "low"]


async def test_requests_of_different_salts_share_no_cached_prefix():
    async with control_plane() as plane:
        cached = []
        for salt in ("a", "a", "b"):
            wanted = request("a prompt of some blocks", max_tokens=2)
            wanted.cache_salt = salt
            cached.append((await plane.generation.Complete(wanted)).usage.cached_prompt_tokens)
        assert cached == [0, 20, 0]
        state = await plane.state()
        assert state.prefix_cache.num_found_tokens == 20
        assert state.prefix_cache.num_looked_up_tokens >= 3 * 20


async def test_a_request_that_waits_can_be_explained_and_one_that_has_ended_can_not():
    worker = FakeWorker()
    async with control_plane(worker, max_num_seqs=1) as plane:
        worker.gate.clear()
        calls = []
        for num, name in enumerate(("runs", "waits"), start=1):
            wanted = request(max_tokens=2)
            wanted.request_id = name
            calls.append(asyncio.ensure_future(plane.generation.Complete(wanted)))
            await plane.until(lambda state, num=num: state.num_running + state.num_waiting == num)

        async def explain(name: str) -> introspection_pb2.ExplainRequestResponse:
            return await plane.introspection.ExplainRequest(introspection_pb2.ExplainRequestRequest(request_id=name))

        runs, waits = await explain("runs"), await explain("waits")
        assert runs.status == introspection_pb2.REQUEST_STATUS_RUNNING
        assert runs.num_blocks_held > 0
        assert waits.status == introspection_pb2.REQUEST_STATUS_WAITING
        assert waits.reason == introspection_pb2.WAIT_REASON_SEQUENCES
        assert (waits.queue_position, waits.num_running_seqs, waits.max_num_seqs) == (0, 1, 1)
        worker.gate.set()
        await asyncio.gather(*calls)
        with pytest.raises(grpc.aio.AioRpcError, match="no live request is 'runs'"):
            await explain("runs")


async def test_a_watch_follows_a_request_through_the_scheduler():
    worker = FakeWorker()
    async with control_plane(worker) as plane:
        watch = plane.introspection.WatchState(introspection_pb2.WatchStateRequest(interval_ms=10))
        assert (await watch.read()).state.block_pool.num_held == 0
        worker.gate.clear()
        call = asyncio.ensure_future(plane.text(max_tokens=3))
        while not (state := (await watch.read()).state).num_running:
            pass
        assert state.block_pool.num_held > 0
        worker.gate.set()
        assert await call == "The"
        while (await watch.read()).state.num_running:
            pass
        watch.cancel()
