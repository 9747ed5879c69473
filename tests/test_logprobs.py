"""Log-probabilities on their way from the worker to the client: in columns, merged, resumed, cut, and in order."""

import asyncio
from array import array

import grpc
import pytest
from fakes import TEXT, FakeWorker, control_plane, request, scripted_logprobs
from scheduler_by_hand import make, submit
from test_session import HandRouter

from protos import session_pb2
from protos.columns import pack, unpack
from protos.logprobs import LogprobReader, Logprobs, to_columns
from protos.pagewire.v1 import generation_pb2 as pb
from protos.rpc import dial
from protos.sampling_pb2 import Sampling
from scheduler import sessions
from scheduler.plan import StepResult, to_request
from scheduler.sequence import Sequence
from scheduler.sessions import Outbox


def told(tokens, num_top=2) -> Logprobs:
    """Of several tokens, ranked 1, 2, ... so that an order can be seen."""
    logprobs = Logprobs(num_top)
    for place, token in enumerate(tokens):
        logprobs.extend(scripted_logprobs(token, num_top, rank=1 + place))
    return logprobs


def sequence_of(tokens, index=0, num_top: int | None = 2) -> Sequence:
    sequence = Sequence(index, 3)
    sequence.output_token_ids = array("i", list(tokens))
    sequence.logprobs = None if num_top is None else told(tokens, num_top)
    return sequence


def rows_of(outputs: session_pb2.StepOutputs) -> dict[int, Logprobs]:
    """Log-probabilities by the place of their row."""
    reader, counts = LogprobReader(outputs.logprobs), unpack(outputs.counts)
    rows = zip(unpack(outputs.logprob_rows), unpack(outputs.logprob_num_tops), strict=True)
    return {place: reader.take(counts[place], num_top) for place, num_top in rows}


# Columns


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_a_part_is_those_tokens_and_parts_add_up_to_the_whole(num_top):
    whole = told(b"abcdef", num_top)
    parts = [whole.part(0, 1), whole.part(1, 4), whole.part(4)]
    assert parts[1] == told(b"abcd", num_top).part(1)
    assert (len(whole), [len(part) for part in parts]) == (6, [1, 3, 2])
    parts[0].extend(parts[1])
    assert parts[0] == whole.part(0, 4)
    whole.cut(4)
    assert whole == parts[0]


def test_columns_are_read_as_they_were_written_though_each_has_others_beside_it():
    parts = [told(b"ab", 3), told(b"c", 0), told(b"", 2), told(b"def", 1)]
    reader = LogprobReader(to_columns(parts))
    assert [reader.take(len(part), part.num_top) for part in parts] == parts
    with pytest.raises(AssertionError, match="too short"):
        reader.take(1, 0)


# The scheduler


async def test_an_outbox_merges_steps_and_keeps_log_probabilities_beside_their_tokens():
    outbox = Outbox()
    asking, silent = sequence_of(b"The quick"), sequence_of(b"brown", num_top=None)
    outbox.put_tokens(7, silent, 0)
    outbox.put_tokens(8, asking, 4)
    more = sequence_of(b"The quick fox")
    outbox.put_tokens(8, more, len(b"The quick"))
    outbox.put_prompt_logprobs(8, told(b"prompt", 1))
    outbox.put_prompt_logprobs(8, told(b"prompt", 1))
    outputs = (await outbox.take()).step_outputs
    assert unpack(outputs.counts).tolist() == [5, 9]
    assert rows_of(outputs) == {1: more.logprobs.part(4)}
    assert (unpack(outputs.prompt_handles)[0], unpack(outputs.prompt_counts)[0]) == (8, 6)
    assert LogprobReader(outputs.prompt_logprobs).take(6, 1) == told(b"prompt", 1)
    outbox.put_tokens(8, more, len(more.output_token_ids) - 1)
    outputs = (await outbox.take()).step_outputs
    assert rows_of(outputs) == {0: more.logprobs.part(12)}, "what was taken is not told again"
    assert not outputs.prompt_handles


async def test_log_probabilities_count_in_the_size_of_a_message_as_their_tokens_do(monkeypatch):
    """Three tokens, and three log-probabilities with two more beside each: twelve entries."""
    monkeypatch.setattr(sessions, "_MOST_ENTRIES", 12)
    outbox = Outbox()
    for handle in (0, 1):
        outbox.put_tokens(handle, sequence_of(b"abc"), 0)
    for handle in (2, 3):
        outbox.put_tokens(handle, sequence_of(b"abc", num_top=None), 0)
        outbox.put_prompt_logprobs(handle, told(b"pro"))
    taken = [(await outbox.take()).step_outputs for _ in range(4)]
    assert [unpack(outputs.handles).tolist() for outputs in taken] == [[0], [1], [2], [3]]
    assert [unpack(outputs.prompt_handles).tolist() for outputs in taken] == [[], [], [2], [3]]


async def test_who_does_not_ask_has_nothing_of_it_on_the_wire():
    outbox = Outbox()
    outbox.put_tokens(7, sequence_of(b"brown", num_top=None), 0)
    outputs = (await outbox.take()).step_outputs
    assert not outputs.logprob_rows
    assert not outputs.HasField("logprobs")
    assert not outputs.HasField("prompt_logprobs")
    core = make()
    submit(core, 4, sampling=Sampling(temperature=1))
    wire = to_request(core.schedule(0.0), 1)
    assert not wire.prompt_logprob_rows
    assert wire.new_requests[0].ByteSize() < 20


def answer(plan, tokens) -> StepResult:
    """The fake model's: of sampled tokens, and of prompts."""
    samples = [(row, sequence) for row in plan.rows for sequence in row.samples]
    tops = [
        told([tokens[0]], row.group.num_top_logprobs) for row, _ in samples if row.group.num_top_logprobs is not None
    ]
    prompts = []
    for place, start in plan.telling:
        row = plan.rows[place]
        prompt = row.group.prompt_token_ids[start + 1 : row.prompt_logprobs_end + 1]
        prompts.append(told(prompt, row.group.prompt_logprobs.num_top))
    return StepResult(
        tokens * len(samples), [-0.5] * len(samples), top_logprobs=to_columns(tops), prompt_logprobs=to_columns(prompts)
    )


def test_a_sequence_cut_at_a_stop_string_keeps_those_of_the_tokens_that_count():
    core = make()
    group = submit(core, 4, n=2, sampling=Sampling(num_top_logprobs=2))
    for token in (7, 8, 9):
        plan = core.schedule(0.0)
        core.update(plan, answer(plan, [token]))
    core.stop(group, 0, 2)
    first, second = group.sequences
    assert (len(first.logprobs), len(second.logprobs)) == (2, 3)
    assert second.logprobs.top_token_ids.tolist() == [7, 8, 8, 9, 9, 10]


def test_the_log_probabilities_of_one_group_are_not_taken_for_those_of_another_that_was_given_up():
    core = make()
    lost, kept = (submit(core, 4, sampling=Sampling(num_top_logprobs=num)) for num in (3, 1))
    plan = core.schedule(0.0)
    core.abort(lost)
    core.update(plan, StepResult([5, 7], [-0.5, -0.5], top_logprobs=to_columns([told([5], 3), told([7], 1)])))
    assert kept.sequences[0].logprobs == told([7], 1)
    assert len(lost.sequences[0].logprobs) == 0


def test_a_prompt_is_told_of_once_in_chunks_though_it_is_computed_again_after_a_preemption():
    core = make(budget=3, max_num_seqs=1)
    group = submit(core, 8, sampling=Sampling(num_prompt_logprobs=1))
    asked = []
    for turn in range(8):
        plan = core.schedule(0.0)
        wire = to_request(plan, 1)
        asked.append(unpack(wire.prompt_logprob_starts).tolist())
        core.update(plan, answer(plan, [7]))
        if turn in (1, 4):
            core.preempt(group)
    # Six tokens, everything again: the third chunk is the first with news. The first sampled token, everything again.
    assert asked == [[0], [3], [], [], [6], [], [], []]
    assert group.prompt_logprobs.top_token_ids.tolist() == list(range(11, 18))


def test_what_a_lost_step_told_of_a_prompt_is_asked_for_again():
    core = make(budget=4, max_num_seqs=1)
    group = submit(core, 8, sampling=Sampling(num_prompt_logprobs=0))
    core.schedule(0.0)
    core.requeue_running(in_order=True)  # nobody is a suspect, whose steps are short
    assert len(group.prompt_logprobs) == 0
    for _ in range(2):
        plan = core.schedule(0.0)
        core.update(plan, answer(plan, [7]))
    assert len(group.prompt_logprobs) == 7


def test_a_prompt_to_be_told_of_is_not_read_from_the_prefix_cache_until_it_is_told():
    core = make(budget=16, prefix_caching=True)
    first = submit(core, 12, max_tokens=1)
    second = submit(core, 12, max_tokens=9, sampling=Sampling(num_prompt_logprobs=0))
    third = submit(core, 12, max_tokens=9)
    for _ in range(3):
        plan = core.schedule(0.0)
        core.check()
        core.update(plan, answer(plan, [7]))
    assert [group.num_cached_prompt_tokens for group in (first, second, third)] == [0, 0, 8]
    core.preempt(second)
    plan = core.schedule(0.0)
    assert [row.start for row in plan.rows if row.group is second] == [12], "now it may be read"
    core.check()


def test_a_prompt_whose_logits_are_no_numbers_fails_its_group_alone():
    core = make()
    bad, good = (submit(core, 4, sampling=Sampling(num_prompt_logprobs=0)) for _ in range(2))
    plan = core.schedule(0.0)
    result = answer(plan, [7])
    nan = told([1, 2, 3], 0)
    nan.logprobs[1] = float("nan")
    result = StepResult([7, 7], [0.0, 0.0], prompt_logprobs=to_columns([nan, told([1, 2, 3], 0)]))
    outputs = core.update(plan, result)
    assert outputs.failed == [bad]
    assert len(good.prompt_logprobs) == 3
    core.check()


def test_a_worker_is_told_of_all_tokens_where_a_penalty_is_on_and_only_there():
    core = make()
    plain, penalized = submit(core, 3), submit(core, 3, n=2, sampling=Sampling(presence_penalty=0.5))
    plan = core.schedule(0.0)
    assert unpack(to_request(plan, 1).new_requests[1].prompt_token_ids) == penalized.prompt_token_ids
    for token in (7, 8):
        core.update(plan, answer(plan, [token]))
        plan = core.schedule(0.0)
    core.requeue_running(in_order=True)
    core.stop(penalized, 0)
    first, second = to_request(core.schedule(0.0), 1).new_requests
    assert (first.request_id, bool(first.prompt_token_ids)) == (plain.number, False)
    assert (unpack(second.output_sequence_indexes).tolist(), unpack(second.output_counts).tolist()) == ([1], [2])
    assert unpack(second.output_token_ids).tolist() == [7, 8]


@pytest.mark.parametrize("sampling", [{"num_top_logprobs": 1}, {"repetition_penalty": 2}, {"frequency_penalty": 1}])
def test_a_beam_search_takes_neither_penalties_nor_log_probabilities(sampling):
    from scheduler.beam import BeamParams

    core = make()
    with pytest.raises(ValueError, match="beam search"):
        submit(core, 4, beam=BeamParams(2), sampling=Sampling(**sampling))
    assert core.num_live == 0


async def test_a_resumption_gets_the_log_probabilities_that_were_missed_and_the_prompts_with_the_first_token():
    worker = FakeWorker()
    async with control_plane(worker) as plane, dial(plane.scheduler_address) as channel:
        router = HandRouter(channel)
        await router.open()
        worker.gate.clear()
        submit = session_pb2.Submit(
            handle=1,
            request_id="r",
            prompt_token_ids=pack(list(b"abc")),
            sampling=Sampling(num_prompt_tokens=3, num_top_logprobs=2, num_prompt_logprobs=1),
            n=1,
            max_tokens=6,
        )
        await router.call.write(session_pb2.SessionRequest(submit=submit))
        await router.next("accepted")
        router.call.cancel()
        worker.gate.set()
        await plane.until(lambda state: state.num_running + state.num_waiting == 0)
        for num_tokens in (0, 4):
            await router.open(resume=[session_pb2.Resume(handle=1, num_tokens=pack([num_tokens]))])
            outputs = (await router.next("step_outputs")).step_outputs
            assert rows_of(outputs) == {0: told(TEXT.encode()[:6]).part(num_tokens)}
            assert unpack(outputs.prompt_counts).tolist() == ([] if num_tokens else [2])
            router.call.cancel()


# From the worker to the client


def wanted(logprobs=2, prompt="p", **stop) -> pb.GenerateRequest:
    message = request(prompt, **stop)
    message.output.MergeFrom(pb.OutputOptions(logprobs=logprobs, token_ids=True))
    return message


def check(output: pb.Output, text: str, num_top=2) -> None:
    """Tokens and their log-probabilities are those of the fake model's text, place by place."""
    assert bytes(output.token_ids) == text.encode()
    assert [token.token_id for token in output.logprobs] == list(output.token_ids)
    assert [token.rank for token in output.logprobs] == list(range(1, 1 + len(text)))
    for token in output.logprobs:
        assert [(top.token_id, top.logprob) for top in token.top] == [
            ((token.token_id + n) % 256, -0.5 - n) for n in range(num_top)
        ]


async def test_each_token_comes_with_its_log_probability_streamed_or_whole():
    async with control_plane() as plane:
        whole = (await plane.generation.Complete(wanted(max_tokens=20))).outputs[0]
        check(whole, TEXT[:20])
        merged = pb.Output()
        async for message in plane.generation.Generate(wanted(max_tokens=20)):
            (output,) = message.outputs
            assert len(output.logprobs) == len(output.token_ids)
            merged.MergeFrom(output)
        check(merged, TEXT[:20])


async def test_log_probabilities_come_without_token_ids_too_and_none_beside_them():
    async with control_plane() as plane:
        message = wanted(logprobs=0, max_tokens=3)
        message.output.token_ids = False
        output = (await plane.generation.Complete(message)).outputs[0]
        assert (list(output.token_ids), [token.token_id for token in output.logprobs]) == ([], list(b"The"))
        assert [(token.logprob, list(token.top)) for token in output.logprobs] == [(-0.5, [])] * 3


async def test_log_probabilities_end_where_a_stop_string_ends():
    async with control_plane() as plane:
        output = (await plane.generation.Complete(wanted(max_tokens=50, strings=["brown"]))).outputs[0]
        assert output.text == "The quick "
        check(output, "The quick brown")


async def test_of_best_of_the_log_probabilities_are_those_of_the_sequences_that_are_answered():
    def script(sequence_index: int, output_index: int) -> int:
        return ord("a") + sequence_index if output_index < 6 - sequence_index else 257

    async with control_plane(FakeWorker(script)) as plane:
        message = wanted(max_tokens=20)
        message.sampling.MergeFrom(pb.SamplingParams(n=2, best_of=4))
        answer = await plane.generation.Complete(message)
        ids = [[token.token_id for token in output.logprobs] for output in answer.outputs]
        assert ids == [[*b"ddd", 257], [*b"cccc", 257]]


async def test_a_broken_session_loses_and_doubles_no_log_probability():
    worker = FakeWorker()
    async with control_plane(worker) as plane:
        message = wanted(max_tokens=150, prompt="hello")
        message.output.prompt_logprobs = 1
        stream = aiter(plane.generation.Generate(message))
        first = await anext(stream)
        messages = [first]
        await plane.cut_sessions()
        messages += [message async for message in stream]
        merged = pb.Output()
        for message in messages:
            merged.MergeFrom(message.outputs[0])
        check(merged, (TEXT * 4)[:150])
        assert [token.token_id for message in messages for token in message.prompt_logprobs] == list(b"ello")


async def test_log_probabilities_do_not_depend_on_preemptions_and_lost_workers():
    worker = FakeWorker(num_blocks=24)
    async with control_plane(worker, max_num_batched_tokens=8, max_num_seqs=8) as plane:
        message = wanted(max_tokens=40, prompt="a prompt of some blocks")
        message.output.prompt_logprobs = 2
        calls = [asyncio.ensure_future(plane.generation.Complete(message)) for _ in range(6)]
        await plane.until(lambda state: state.num_preemptions > 0)
        await plane.replace_worker(FakeWorker(num_blocks=24, epoch=2))
        for answer in await asyncio.gather(*calls):
            check(answer.outputs[0], TEXT[:40])
            assert [token.token_id for token in answer.prompt_logprobs] == list(b" prompt of some blocks")
            assert [token.rank for token in answer.prompt_logprobs] == list(range(1, 23))


async def test_a_prompts_log_probabilities_come_once_with_the_first_message_that_has_tokens():
    async with control_plane() as plane:
        message = request("hello", max_tokens=5)
        message.output.MergeFrom(pb.OutputOptions(prompt_logprobs=3, echo=True))
        message.sampling.n = 3
        messages = [message async for message in plane.generation.Generate(message)]
        told = [message for message in messages if message.prompt_logprobs]
        assert len(told) == 1
        assert [token.token_id for token in told[0].prompt_logprobs] == list(b"ello")
        assert [len(token.top) for token in told[0].prompt_logprobs] == [3] * 4
        assert (await plane.generation.Complete(message)).prompt_logprobs == told[0].prompt_logprobs


async def test_a_prompt_of_one_token_has_none():
    async with control_plane() as plane:
        message = request("h", max_tokens=2)
        message.output.prompt_logprobs = 1
        assert not (await plane.generation.Complete(message)).prompt_logprobs


async def test_a_beam_search_tells_of_its_prompt():
    async with control_plane() as plane:
        message = request("hello", max_tokens=3)
        message.sampling.MergeFrom(pb.SamplingParams(beam_width=2, n=2))
        message.output.prompt_logprobs = 1
        answer = await plane.generation.Complete(message)
        assert [token.token_id for token in answer.prompt_logprobs] == list(b"ello")
        assert len(answer.outputs) == 2


async def test_what_a_client_wants_of_sampling_reaches_the_worker():
    worker = FakeWorker()
    async with control_plane(worker) as plane:
        message = request("hello", max_tokens=3)
        message.sampling.MergeFrom(
            pb.SamplingParams(
                typical_p=0.5,
                repetition_penalty=1.25,
                presence_penalty=-1,
                frequency_penalty=2,
                logit_bias={7: 1.5, 3: -100},
            )
        )
        await plane.generation.Complete(message)
        (new,) = worker.new_requests
        sampling = new.sampling
        assert (sampling.typical_p, sampling.repetition_penalty) == (0.5, 1.25)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1, 2)
        biases = zip(unpack(sampling.bias_token_ids), array("f", sampling.biases), strict=True)
        assert dict(biases) == {7: 1.5, 3: -100}
        assert unpack(new.prompt_token_ids).tolist() == list(b"hello")
        await plane.generation.Complete(request("hello", max_tokens=3))
        assert not worker.new_requests[1].prompt_token_ids


async def test_an_old_client_asks_for_nothing_and_gets_nothing_new():
    async with control_plane() as plane:
        answer = await plane.generation.Complete(request(max_tokens=3))
        assert not answer.prompt_logprobs
        assert not answer.outputs[0].logprobs
        with pytest.raises(grpc.aio.AioRpcError, match=r"must be in 0 \.\. 20"):
            await plane.generation.Complete(wanted(logprobs=21))
