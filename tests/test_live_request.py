"""The mailbox between the scheduler's tokens and a client's stream: what is not taken is merged, nothing is lost."""

import asyncio

import grpc
import pytest
from fakes import TEXT, write_tokenizer

from protos import session_pb2
from protos.errors import Refusal
from protos.sampling_pb2 import Sampling
from router.check import CheckedRequest
from router.live_request import LiveRequest
from router.tokenizer import Tokenizer


@pytest.fixture
def live(tmp_path) -> LiveRequest:
    request = CheckedRequest(
        request_id="r",
        prompt_token_ids=[1],
        sampling=Sampling(),
        n=1,
        max_tokens=100,
        min_tokens=0,
        stop_strings=(),
        stop_token_ids=(),
        include_stop_string=False,
        with_token_ids=True,
        echo="",
    )
    return LiveRequest(1, request, Tokenizer(write_tokenizer(tmp_path)), arrival=0.0, on_stop=lambda index: None)


def end() -> session_pb2.Finished:
    return session_pb2.Finished(handle=1, status=session_pb2.FINISH_STATUS_LENGTH_CAPPED)


async def test_a_reader_that_is_away_for_forty_tokens_gets_them_as_one_delta(live):
    for place, token_id in enumerate(TEXT.encode()[:40]):
        live.push(0, place, [token_id], end() if place == 39 else None)
    response, last = await live.take()
    assert last
    assert response.outputs[0].text == TEXT[:40]
    assert bytes(response.outputs[0].token_ids) == TEXT.encode()[:40]
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
