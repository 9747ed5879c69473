"""Answers of a worker that do not fit their step: each costs a worker, and neither the scheduler nor a request."""

import asyncio

import pytest
from fakes import TEXT, FakeWorker, control_plane, request
from scheduler_by_hand import make, submit

from protos.columns import pack
from protos.sampling_pb2 import Sampling
from scheduler.answers import MalformedAnswer, check_answer
from scheduler.beam import BeamParams
from scheduler.plan import to_request

# Five samples: of two sequences, of a search that wants 3 candidates, of one that wants 2 others beside each token, and
# of one that wants 1 beside each of its prompt's 3 last ones.
COLUMNS = {
    "token_ids": 5,
    "logprobs": 5,
    "candidate_token_ids": 3,
    "candidate_logprobs": 3,
    "top_logprobs.logprobs": 1,
    "top_logprobs.ranks": 1,
    "top_logprobs.top_token_ids": 2,
    "top_logprobs.top_logprobs": 2,
    "prompt_logprobs.logprobs": 3,
    "prompt_logprobs.ranks": 3,
    "prompt_logprobs.top_token_ids": 3,
    "prompt_logprobs.top_logprobs": 3,
}


def asked_and_answered():
    """A step in which all that can be asked for is, and the answer of a worker."""
    core = make(budget=32)
    plain = {"num_prompt_tokens": 4}
    submit(core, 4, n=2, sampling=Sampling(**plain))
    submit(core, 4, sampling=Sampling(**plain), beam=BeamParams(2))
    submit(core, 4, sampling=Sampling(num_top_logprobs=2, **plain))
    submit(core, 4, sampling=Sampling(num_prompt_logprobs=1, **plain))
    plan = core.schedule(0.0)
    return core, plan, FakeWorker().answer(to_request(plan, 1))


def test_an_answer_that_fits_is_taken():
    core, plan, response = asked_and_answered()
    check_answer(plan, 1, response)
    response.failed_samples = pack([0, 4])
    check_answer(plan, 1, response)
    core.check()


@pytest.mark.parametrize("spoil", [lambda column: column[4:], lambda column: column + bytes(4), lambda c: c[:-1]])
@pytest.mark.parametrize("field", COLUMNS)
def test_a_column_that_is_too_short_too_long_or_cut_inside_an_entry_is_named(field, spoil):
    _, plan, response = asked_and_answered()
    *above, name = field.split(".")
    holder = getattr(response, above[0]) if above else response
    setattr(holder, name, spoil(getattr(holder, name)))
    with pytest.raises(MalformedAnswer, match=rf"malformed: {field} has \d+ bytes, and should have {COLUMNS[field]} "):
        check_answer(plan, 1, response)


@pytest.mark.parametrize("failed", [pack([5]), pack([-1]), b"\0"])
def test_failed_samples_are_samples_of_the_step(failed):
    _, plan, response = asked_and_answered()
    response.failed_samples = failed
    with pytest.raises(MalformedAnswer, match="failed_samples names others than the 5 samples"):
        check_answer(plan, 1, response)


@pytest.mark.parametrize("wrong", [{"step_id": 2}, {"epoch": 7}])
def test_an_answer_to_another_step_or_of_another_worker_is_named(wrong):
    _, plan, response = asked_and_answered()
    for field, value in wrong.items():
        setattr(response, field, value)
    with pytest.raises(MalformedAnswer, match=r"came for step_id . of epoch ., and 1 of epoch 1 is the oldest"):
        check_answer(plan, 1, response)


async def test_a_malformed_answer_costs_a_worker_and_the_streams_go_on_token_for_token(caplog):
    def forget_tokens(response):
        response.token_ids = response.token_ids[4:]

    def answer_another(response):
        response.step_id += 1

    worker = FakeWorker()
    async with control_plane(worker) as plane:
        streams = [aiter(plane.generation.Generate(request(max_tokens=150))) for _ in range(2)]
        texts = [(await anext(stream)).outputs[0].text for stream in streams]
        for spoil in (forget_tokens, answer_another):
            worker.spoil = [spoil]
            while worker.spoil:
                texts[0] += (await anext(streams[0])).outputs[0].text
        for place, stream in enumerate(streams):
            texts[place] += "".join([message.outputs[0].text async for message in stream])
        assert texts == [(TEXT * 4)[:150]] * 2
    reasons = [record.reason for record in caplog.records if record.message == "worker lost"]
    assert any("malformed: token_ids has" in reason for reason in reasons)
    assert any("is the oldest in flight" in reason for reason in reasons)


async def test_a_request_whose_answers_never_fit_is_given_up_alone():
    worker = FakeWorker(spoil=[lambda response: response.ClearField("logprobs")] * 3)
    async with control_plane(worker) as plane:
        refused = await asyncio.gather(plane.text(max_tokens=5), return_exceptions=True)
        assert "workers lost in a row while they computed it: 3" in refused[0].details()
        assert "logprobs has 0 bytes, and should have 1 entries of 4" in refused[0].details()
        assert await plane.text(max_tokens=3) == "The"
