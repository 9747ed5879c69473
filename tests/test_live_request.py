"""The mailbox between the scheduler's tokens and a client's stream: what is not taken is merged, nothing is lost."""

import asyncio
from array import array
from types import SimpleNamespace

import grpc
import pytest
from fakes import TEXT, scripted_logprobs, tokenizer_of_bytes, write_tokenizer
from router_fakes import finished

from protos import session_pb2
from protos.columns import pack, pack_floats
from protos.errors import Refusal
from protos.logprobs import Logprobs
from protos.pagewire.v1 import generation_pb2 as pb
from protos.sampling_pb2 import Sampling
from router.live_request import LiveRequest, OutputStream
from router.resolve import CheckedRequest
from router.step_outputs import deliver
from router.tokenizer import Tokenizer


@pytest.fixture
def stopped() -> list[OutputStream]:
    """Sequences in which a stop string was found."""
    return []


@pytest.fixture
def make(tmp_path, stopped):
    """A live request with what a test wants of it."""
    tokenizer = Tokenizer(write_tokenizer(tmp_path))

    def make(
        n=1,
        best_of=None,
        stop_strings=(),
        echo="",
        clock=lambda: 0.0,
        resume=None,
        beam_search=None,
        with_token_ids=True,
        **options,
    ) -> LiveRequest:
        request = CheckedRequest(
            request_id="r",
            prompt_token_ids=[1],
            sampling=Sampling(),
            n=n,
            num_sequences=best_of or n,
            beam_search=beam_search,
            priority=0,
            cache_salt="",
            max_tokens=100,
            min_tokens=0,
            stop_strings=stop_strings,
            stop_token_ids=(),
            include_stop_string=False,
            with_token_ids=with_token_ids,
            echo=echo,
            resume=resume,
        )
        return LiveRequest(1, request, tokenizer, arrival=0.0, on_stop=stopped.append, clock=clock, **options)

    return make


@pytest.fixture
def live(make) -> LiveRequest:
    return make()


def end(cumulative_logprob=-1.0, status=session_pb2.FINISH_STATUS_LENGTH_CAPPED, **fields) -> session_pb2.Finished:
    return session_pb2.Finished(handle=1, status=status, cumulative_logprob=cumulative_logprob, **fields)


async def test_a_reader_that_is_away_for_forty_tokens_gets_them_as_one_delta(live):
    for place, token_id in enumerate(TEXT.encode()[:40]):
        live.push(0, place, [token_id], end(message="no room") if place == 39 else None)
    response, last = await live.take()
    assert last
    (output,) = response.outputs
    assert (output.text, bytes(output.token_ids)) == (TEXT[:40], TEXT.encode()[:40])
    assert (output.finish_reason, output.finish_message) == (pb.FINISH_REASON_LENGTH, "no room")
    assert not output.HasField("stop_match")
    assert response.usage.completion_tokens == 40


async def test_tokens_that_are_here_already_are_passed_over(live):
    live.push(0, 0, list(b"The"), None)
    live.push(0, 1, list(b"he quick"), end())
    assert (await live.take())[0].outputs[0].text == "The quick"


async def test_a_gap_in_the_tokens_is_an_error_not_a_wrong_text(live):
    live.push(0, 0, list(b"The"), None)
    live.push(0, 4, list(b"quick"), None)
    assert (await live.take())[0].outputs[0].text == "The"
    with pytest.raises(Refusal, match="tokens were lost") as info:
        await live.take()
    assert info.value.code is grpc.StatusCode.INTERNAL


async def test_what_came_before_a_failure_is_delivered_before_it(live):
    live.push(0, 0, list(b"Th"), None)
    live.fail(Refusal(grpc.StatusCode.ABORTED, "X", "gone"))
    assert (await live.take())[0].outputs[0].text == "Th"
    with pytest.raises(Refusal, match="gone"):
        await live.take()


async def test_a_take_waits_for_text_not_for_half_a_character(live):
    taking = asyncio.create_task(live.take())
    live.push(0, 0, [], None)
    await asyncio.sleep(0)
    assert not taking.done()
    live.push(0, 0, list("é".encode()), None)
    assert (await taking)[0].outputs[0].text == "é"


async def test_what_a_scheduler_tells_of_requests_that_are_gone_is_passed_over(live):
    outputs = session_pb2.StepOutputs(
        handles=pack([8, 1, 9]),
        sequence_indexes=pack([0, 0, 0]),
        first_indexes=pack([0, 0, 0]),
        counts=pack([1, 2, 1]),
        token_ids=pack(list(b"xaby")),
        token_logprobs=pack_floats([-0.5] * 4),
        finished=[finished(handle=handle) for handle in (7, 8, 1)],
    )
    deliver(outputs, {1: live})
    response, last = await live.take()
    assert (response.outputs[0].text, last) == ("ab", True)


async def test_a_bug_in_the_text_of_one_request_ends_that_one_alone(make, caplog):
    broken, whole = make(), make()
    broken.streams[0].push = None
    outputs = session_pb2.StepOutputs(
        handles=pack([1, 2]),
        sequence_indexes=pack([0, 0]),
        first_indexes=pack([0, 0]),
        counts=pack([1, 2]),
        token_ids=pack(list(b"abc")),
        token_logprobs=pack_floats([-0.5] * 3),
    )
    deliver(outputs, {1: broken, 2: whole})
    assert (await whole.take())[0].outputs[0].text == "bc"
    with pytest.raises(Refusal, match="the router's log says why") as info:
        await broken.take()
    assert info.value.code is grpc.StatusCode.INTERNAL
    assert [(record.message, record.request_id) for record in caplog.records] == [("bug", "r")]


# Stop strings


@pytest.mark.parametrize("stop_strings, text", [((), "a "), ((" ",), "a")])
async def test_whole_characters_of_a_last_token_that_ends_within_another_one_are_told(make, stop_strings, text):
    cutting = SimpleNamespace(backend=tokenizer_of_bytes({256: b" \xf0\x9f\x98"}))
    stream = OutputStream(0, make(stop_strings=stop_strings).request, cutting)
    stream.push([ord("a"), 256], end())
    delta = stream.take_delta()
    assert (delta.text, delta.stop_match.string, stream.num_tokens) == (text, "".join(stop_strings), 2)


async def test_the_token_that_completes_a_stop_string_is_the_last_that_counts(make, stopped):
    live = make(stop_strings=["ick"])
    live.push(0, 0, list(b"The quick brown"), None)
    assert [(stream.index, stream.num_tokens) for stream in stopped] == [(0, len("The quick"))]
    live.push(0, len("The quick brown"), list(b" fox"), None)
    assert len(stopped) == 1, "the scheduler is told once"
    assert (live.num_tokens, live.streams[0].num_received) == (9, 19)


async def test_text_before_a_stop_string_is_told_at_once_and_its_end_when_the_scheduler_has_ended_it(make):
    live = make(stop_strings=["ick"])
    live.push(0, 0, list(b"The quick brown"), None, None, [-0.5] * 15)
    response, last = await live.take()
    assert not last
    (output,) = response.outputs
    assert (output.text, output.finish_reason) == ("The qu", pb.FINISH_REASON_UNSPECIFIED)
    assert not output.HasField("cumulative_logprob")
    live.push(0, 15, [], end(-4.5, session_pb2.FINISH_STATUS_STOPPED))
    response, last = await live.take()
    assert last
    (output,) = response.outputs
    assert (output.text, output.finish_reason, output.stop_match.string) == ("", pb.FINISH_REASON_STOP, "ick")
    assert output.cumulative_logprob == -4.5


async def test_the_sum_leaves_out_what_came_behind_a_stop_string_where_the_sequence_ended_by_itself(make):
    live = make(stop_strings=["ick"])
    live.push(0, 0, list(b"The quick brown"), end(-7.5), None, [-0.5] * 15)
    (output,) = (await live.take())[0].outputs
    assert (output.stop_match.string, output.cumulative_logprob) == ("ick", -4.5)


async def test_a_continuation_knows_the_sum_up_to_a_stop_string(make):
    live = make(stop_strings=["ick"])
    live.push(0, 0, list(b"The quick brown"), None, None, [-0.5] * 15)
    (progress,) = live.continuation().progress
    assert (len(progress.token_ids) // 4, progress.cumulative_logprob) == (9, -4.5)


async def test_a_stop_string_in_the_last_token_of_all_needs_no_word_to_the_scheduler(make, stopped):
    live = make(stop_strings=["ick"])
    live.push(0, 0, list(b"The quick"), end(-4.5), None, [-0.5] * 9)
    (output,) = (await live.take())[0].outputs
    assert (output.text, output.stop_match.string, output.cumulative_logprob) == ("The qu", "ick", -4.5)
    assert stopped == []


async def test_a_stop_string_counts_though_the_sequence_ended_by_itself_behind_it(make, stopped):
    live = make(stop_strings=["ick"])
    live.push(0, 0, list(b"The quick brown"), end(stop_token_id=7))
    response, last = await live.take()
    assert last
    (output,) = response.outputs
    assert (output.text, output.finish_reason, output.stop_match.string) == ("The qu", pb.FINISH_REASON_STOP, "ick")
    assert (response.usage.completion_tokens, stopped) == (9, [])


# best_of: more sequences than are answered


async def test_nothing_is_told_before_the_last_of_best_of_has_ended(make):
    live = make(best_of=2, echo="say: ")
    taking = asyncio.create_task(live.take())
    live.push(0, 0, list(b"ab"), end(-1))
    live.push(1, 0, list(b"cd"), None)
    await asyncio.sleep(0)
    assert not taking.done()
    live.push(1, 2, list(b"e"), end(-2))
    response, last = await taking
    assert last
    assert [output.text for output in response.outputs] == ["say: ab"]


async def test_the_n_most_probable_of_best_of_come_best_first_with_indexes_of_their_own(make):
    live = make(n=2, best_of=4)
    for index, logprob in enumerate((-3, -1, -4, -2)):
        live.push(index, 0, [ord("a") + index], end(logprob, stop_token_id=7))
    response, _ = await live.take()
    assert [(output.index, bytes(output.token_ids)) for output in response.outputs] == [(0, b"b"), (1, b"d")]
    assert [output.cumulative_logprob for output in response.outputs] == [-1, -2]
    assert response.outputs[0].stop_match.token_id == 7


async def test_why_outputs_ended_is_told_of_those_that_are_answered_and_in_their_order(make):
    live = make(n=1, best_of=2)
    live.push(0, 0, [ord("a")], end(-3))
    assert live.finish_reasons == []
    live.push(1, 0, [ord("b")], end(-1, stop_token_id=7, status=session_pb2.FINISH_STATUS_STOPPED))
    assert live.finish_reasons == [pb.FINISH_REASON_STOP]


async def test_of_equally_probable_sequences_the_first_is_taken(make):
    live = make(n=2, best_of=3)
    for index in (2, 1, 0):
        live.push(index, 0, [ord("a") + index], end(-1))
    response, _ = await live.take()
    assert [output.text for output in response.outputs] == ["a", "b"]


async def test_the_usage_of_best_of_counts_what_was_sampled_not_what_is_answered(make):
    live = make(best_of=3)
    for index in range(3):
        live.push(index, 0, list(b"abcd"), end(-index))
    response, _ = await live.take()
    assert response.usage.completion_tokens == 12
    assert len(response.outputs[0].token_ids) == 4


async def test_a_sequence_that_a_stop_string_ended_is_compared_by_its_sum_up_to_there(make, stopped):
    live = make(best_of=2, stop_strings=["!"])
    live.push(0, 0, list(b"ab"), end(-2))
    live.push(1, 0, list(b"c!xyz"), None, None, [-0.5] * 5)
    assert [(stream.index, stream.num_tokens) for stream in stopped] == [(1, 2)]
    live.push(1, 5, [], end(-1, session_pb2.FINISH_STATUS_STOPPED))
    response, _ = await live.take()
    assert [output.text for output in response.outputs] == ["c"]
    assert response.usage.completion_tokens == 4


async def test_best_of_that_fails_half_way_gives_the_error_alone(make):
    live = make(best_of=2)
    live.push(0, 0, list(b"ab"), end(-1))
    assert not live.has_told
    live.fail(Refusal(grpc.StatusCode.INTERNAL, "X", "gone"))
    with pytest.raises(Refusal, match="gone"):
        await live.take()


def test_a_client_of_one_answer_is_told_nothing_before_its_end(make):
    for whole in (False, True):
        live = make(whole=whole)
        live.push(0, 0, list(b"ab"), None)
        assert live.has_told is not whole


# Beam searches: the scheduler tells everything at the end


async def test_the_first_token_of_a_beam_search_is_there_when_all_are(make):
    now = [0.0]
    live = make(n=2, clock=lambda: now[0])
    now[0] = 2.5
    live.push(0, 0, list(b"ab"), end(-1))
    live.push(1, 0, list(b"cd"), end(-2))
    response, last = await live.take()
    assert last
    assert [(output.index, output.text) for output in response.outputs] == [(0, "ab"), (1, "cd")]
    assert response.timings.ttft_ms == response.timings.total_ms == 2500


def test_a_beam_search_begins_anew_at_another_scheduler(make):
    live = make(n=2, clock=lambda: 2.5, beam_search=session_pb2.BeamSearch(width=2))
    assert live.continuation() == session_pb2.Continuation(waited_ms=2500)


# Log-probabilities


def told(token_ids: bytes, rank: int = 1) -> Logprobs:
    """Of several tokens, ranked from `rank` on, so that an order can be seen."""
    logprobs = Logprobs(1)
    for place, token_id in enumerate(token_ids):
        logprobs.extend(scripted_logprobs(token_id, 1, rank=rank + place))
    return logprobs


def ranks(output: pb.Output) -> list[tuple[int, int]]:
    return [(token.token_id, token.rank) for token in output.logprobs]


async def test_log_probabilities_are_merged_with_their_tokens_and_those_that_are_here_already_passed_over(live):
    live.push(0, 0, list(b"The"), None, told(b"The"))
    live.push(0, 1, list(b"he q"), None, told(b"he q", rank=2))
    (output,) = (await live.take())[0].outputs
    assert (output.text, ranks(output)) == ("The q", [(token, 1 + n) for n, token in enumerate(b"The q")])
    live.push(0, 5, list(b"u"), end(), told(b"u", rank=6))
    (output,) = (await live.take())[0].outputs
    assert ranks(output) == [(ord("u"), 6)]


async def test_log_probabilities_end_with_the_token_that_completes_a_stop_string(make):
    live = make(stop_strings=["ick"])
    live.push(0, 0, list(b"The quick brown"), end(), told(b"The quick brown"))
    (output,) = (await live.take())[0].outputs
    assert bytes(output.token_ids) == bytes(token for token, _ in ranks(output)) == b"The quick"


async def test_a_stop_id_that_is_not_shown_has_its_log_probability(live):
    live.push(0, 0, [65, 7], end(stop_token_id=7), told(b"A\x07"))
    (output,) = (await live.take())[0].outputs
    assert (output.text, ranks(output)) == ("A", [(65, 1), (7, 2)])


@pytest.mark.parametrize("with_token_ids", [True, False])
async def test_half_a_character_is_told_with_its_log_probability_before_its_text(make, with_token_ids):
    live = make(with_token_ids=with_token_ids)
    first, second = "é".encode()
    live.push(0, 0, [first], None, told(bytes([first])))
    (output,) = (await live.take())[0].outputs
    assert (output.text, ranks(output)) == ("", [(first, 1)])
    live.push(0, 1, [second], end(), told(bytes([second]), rank=2))
    (output,) = (await live.take())[0].outputs
    assert (output.text, ranks(output)) == ("é", [(second, 2)])


def tops(num_tokens: int, num_top: int = 20) -> Logprobs:
    """Of many tokens, with the most there may be beside each."""
    floats, ids = array("f", [-0.5] * num_tokens), array("i", [200_000] * num_tokens)
    return Logprobs(num_top, floats, ids, ids * num_top, floats * num_top)


@pytest.mark.parametrize("options", [{"n": 3}, {"n": 2, "best_of": 3}])
async def test_a_reader_that_is_away_gets_many_log_probabilities_in_several_messages_and_loses_nothing(options, make):
    live = make(**options)
    text, num_tokens = TEXT * 300, 6_000
    for index in range(3):
        live.push(index, 0, list(text[:num_tokens].encode()), end(index), tops(num_tokens))
    messages, last = [], False
    while not last:
        response, last = await live.take()
        assert response.ByteSize() < 2 << 20
        messages.append(response)
    assert len(messages) >= 8
    assert [message.HasField("usage") for message in messages] == [*[False] * (len(messages) - 1), True]
    for index in range(live.request.n):
        whole = pb.Output()
        for delta in (message.outputs[index] for message in messages):
            assert delta.text.encode() == bytes(delta.token_ids), "each delta has the text of its tokens"
            assert len(delta.logprobs) == len(delta.token_ids)
            whole.text += delta.text
            whole.finish_reason = delta.finish_reason
        assert whole.text == text[:num_tokens]
        assert whole.finish_reason == pb.FINISH_REASON_LENGTH


async def test_a_reader_that_leaves_as_many_as_twenty_messages_unread_gets_them_and_an_error(make, monkeypatch):
    monkeypatch.setattr("router.live_request._LOGPROBS_OF_A_MESSAGE", 210)  # ten tokens
    live = make()
    for place in range(0, 1000, 5):
        live.push(0, place, [65] * 5, None, tops(5))
    told = [(await live.take())[0] for _ in range(21)]
    assert [len(message.outputs[0].token_ids) for message in told] == [10] * 21, "what came then is not kept"
    with pytest.raises(Refusal, match="more than 1000000 log-probabilities are unread") as info:
        await live.take()
    assert info.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_what_a_client_has_that_resumes_does_not_count_as_unread(make, monkeypatch):
    monkeypatch.setattr("router.live_request._LOGPROBS_OF_A_MESSAGE", 210)  # ten tokens
    has = pb.Received(index=0, text_bytes=995, num_tokens=995)
    live = make(resume=pb.Resume(seed=1, received=[has]))
    live.push(0, 0, [65] * 1000, None, tops(1000))
    message, _ = await live.take()
    assert [len(message.outputs[0].token_ids), message.outputs[0].text] == [5, "AAAAA"]


async def test_an_echo_is_told_to_who_has_been_taken_in(make):
    live = make(echo="x")
    taken = asyncio.ensure_future(live.take())
    await asyncio.sleep(0)
    assert not taken.done()
    live.accept()
    assert (await taken)[0].outputs[0].text == "x"


async def test_who_is_refused_gets_no_echo_before(make):
    live = make(echo="x")
    live.fail(Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED", "full"))
    with pytest.raises(Refusal, match="full"):
        await live.take()


async def test_a_prompts_log_probabilities_are_told_once_though_they_come_twice(make):
    live = make(echo="x")
    live.accept()
    live.request.prompt_token_ids.extend([2, 3])
    assert not (await live.take())[0].prompt_logprobs, "the echo does not wait for them"
    for token_id in b"ab":
        live.push_prompt_logprobs(told(bytes([2, 3])))
        live.push(0, live.num_tokens, [token_id], None)
        response, _ = await live.take()
        expected = [(2, 1), (3, 2)] if token_id == ord("a") else []
        assert [(token.token_id, token.rank) for token in response.prompt_logprobs] == expected


async def test_while_a_long_prompts_log_probabilities_are_written_tokens_may_come_and_nothing_is_lost(make):
    live = make()
    live.request.prompt_token_ids.extend([7] * 999)
    live.push_prompt_logprobs(told(bytes([7] * 999)))
    live.push(0, 0, list(b"a"), None)
    taking = asyncio.create_task(live.take())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not taking.done(), "others get their turn"
    live.push(0, 1, list(b"b"), end())
    response, last = await taking
    assert (response.outputs[0].text, len(response.prompt_logprobs), last) == ("ab", 999, True)


async def test_a_heartbeat_is_sent_alone_and_output_goes_before_it(live):
    live.beat(pb.Heartbeat(queue_position=3))
    assert await live.take() == (pb.GenerateResponse(request_id="r", heartbeat=pb.Heartbeat(queue_position=3)), False)
    assert live.num_taken == 0
    live.push(0, 0, list(b"a"), None)
    live.beat(pb.Heartbeat(queue_position=0))
    response, _ = await live.take()
    assert (response.outputs[0].text, live.num_taken) == ("a", 1)
    assert not response.HasField("heartbeat")
    live.push(0, 1, list(b"b"), end())
    response, last = await live.take()
    assert (response.outputs[0].text, last, response.HasField("heartbeat")) == ("b", True, False)


async def test_a_request_takes_another_id_as_long_as_its_client_neither_chose_it_nor_was_told_it(make):
    renamed = []
    live = make(on_id_in_use=renamed.append)
    assert live.rename()
    live.beat(pb.Heartbeat())
    await live.take()
    assert not live.rename()
    assert renamed == [live]
    assert not make().rename()
