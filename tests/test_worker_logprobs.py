"""Log-probabilities beside tokens and of prompts, held against transformers' log_softmax through whole steps."""

import math
from dataclasses import replace

import pytest
import torch
from worker_fakes import GREEDY, Row, logprobs, step, tiny_checkpoint, tiny_llama, tiny_runner, tokens

import worker.logprobs
from protos.columns import pack, unpack
from protos.logprobs import LogprobReader
from protos.sampling_pb2 import Sampling
from worker.inputs import MalformedStep
from worker.logprobs import token_logprobs
from worker.sampler import draw_tokens
from worker.sampling_parameters import Sample, SamplingParameters

PROMPT = [5, 17, 3, 88, 42, 9, 61, 2, 30, 11, 7]
PARAMETERS = SamplingParameters.from_message(Sampling(top_p=1), vocabulary_size=5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def runner(checkpoint):
    return tiny_runner(checkpoint)


@pytest.fixture(scope="module")
def theirs():
    """transformers' log-probabilities at each position of a prompt."""
    model = tiny_llama()

    def theirs(prompt) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([prompt])).logits[0].log_softmax(-1)

    return theirs


def telling(request, prompts, *pairs):
    """The step with rows (row, first position) that tell of their prompts, and the prompts of its new requests."""
    request.prompt_logprob_rows = pack(row for row, _ in pairs)
    request.prompt_logprob_starts = pack(start for _, start in pairs)
    for new in request.new_requests:
        new.prompt_token_ids = pack(prompts.get(new.request_id, []))
    return request


def asks(num_tokens, num_top, **sampling):
    return Sampling(top_p=1, num_prompt_tokens=num_tokens, num_prompt_logprobs=num_top, **sampling)


def check(told, expected, token_ids):
    """Columns against rows of log-probabilities, one row for each token."""
    assert len(told) == len(token_ids)
    for place, token in enumerate(token_ids):
        row = expected[place]
        assert told.logprobs[place] == pytest.approx(row[token].item(), abs=1e-4)
        assert told.ranks[place] == 1 + (row > row[token]).sum().item()
        tops = slice(place * told.num_top, (place + 1) * told.num_top)
        values, ids = row.topk(told.num_top)
        assert told.top_token_ids[tops].tolist() == ids.tolist()
        assert told.top_logprobs[tops].tolist() == pytest.approx(values.tolist(), abs=1e-4)


# Beside sampled tokens


@pytest.mark.parametrize("num_top", [0, 1, 5, 97])
def test_a_sampled_token_comes_with_its_rank_and_the_most_probable_ones(runner, theirs, num_top):
    sampling = Sampling(temperature=50, top_p=1, top_k=50, seed=5, num_top_logprobs=num_top)
    response = runner.execute(step(Row(1, PROMPT, range(3)), new={1: sampling}))
    told = LogprobReader(response.top_logprobs).take(1, num_top)
    check(told, theirs(PROMPT)[-1:], tokens(response))
    assert told.logprobs.tolist() == pytest.approx(logprobs(response))
    assert told.ranks[0] > 1, "the seed draws one that is not the best"


def test_requests_that_want_different_numbers_stand_in_the_order_of_the_samples(runner, theirs):
    rows = [
        Row(request_id, PROMPT[: 4 + request_id], [3 * request_id + n for n in range(3)]) for request_id in range(4)
    ]
    new = {number: Sampling(top_p=1, num_top_logprobs=num) for number, num in ((0, 3), (2, 0), (3, 5))} | {1: GREEDY}
    response = runner.execute(step(*rows, new=new))
    reader = LogprobReader(response.top_logprobs)
    for number, num_top in ((0, 3), (2, 0), (3, 5)):
        check(reader.take(1, num_top), theirs(rows[number].tokens)[-1:], tokens(response)[number : number + 1])
    assert len(unpack(response.top_logprobs.top_token_ids)) == 8


def test_who_does_not_ask_is_drawn_and_answered_as_without_those_who_do(runner):
    rows = [Row(1, PROMPT, [0, 1, 2]), Row(2, PROMPT[::-1], [3, 4, 5])]
    seeded = Sampling(temperature=1, top_p=0.9, seed=11)
    expected = runner.execute(step(*rows, new={1: seeded, 2: GREEDY}))
    found = runner.execute(step(*rows, new={1: seeded, 2: Sampling(top_p=1, num_top_logprobs=7)}))
    assert (tokens(found), logprobs(found)) == (tokens(expected), logprobs(expected))
    assert not expected.HasField("top_logprobs")


def test_ranks_and_the_most_probable_tokens_are_those_before_anything_is_forbidden_biased_or_filtered():
    logits = torch.tensor([[0.1, 0.2, 0.4, 0.25, 0.05]]).log()
    p = replace(PARAMETERS, num_top_logprobs=2, stop_token_ids=(2,), min_tokens=1, bias_token_ids=(4,), biases=(9.0,))
    drawn = draw_tokens(logits.clone(), [Sample(p, 0, 0)])
    assert drawn.token_ids.tolist() == [4]
    assert drawn.top_logprobs.ranks.tolist() == [5]
    assert drawn.top_logprobs.logprobs.exp().tolist() == pytest.approx([0.05])
    assert drawn.top_logprobs.top_token_ids.tolist() == [2, 3]
    assert drawn.top_logprobs.top_logprobs.exp().tolist() == pytest.approx([0.4, 0.25])


def test_tokens_that_tie_have_one_rank():
    told = token_logprobs(torch.zeros(3, 4), torch.full((3,), math.log(4)), torch.tensor([0, 1, 3]), [0, 0, 0])
    assert told.ranks.tolist() == [1, 1, 1]
    assert told.top_token_ids.tolist() == []


# Of prompts


@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("chunk", [1, 3, 4, 11])
def test_a_prompts_tokens_are_told_of_whatever_the_chunks(runner, theirs, chunk, num_top):
    told = None
    for start in range(0, len(PROMPT), chunk):
        end = min(start + chunk, len(PROMPT))
        new = {1: asks(len(PROMPT), num_top)} if start == 0 else None
        samples = None if end == len(PROMPT) else []
        request = step(Row(1, PROMPT[start:end], range(3), computed=start), new=new, samples=samples)
        last = min(end, len(PROMPT) - 1)
        response = runner.execute(telling(request, {1: PROMPT}, *([(0, start)] if start < last else [])))
        part = LogprobReader(response.prompt_logprobs).take(last - start, num_top) if start < last else None
        if told is None:
            told = part
        elif part is not None:
            told.extend(part)
    check(told, theirs(PROMPT), PROMPT[1:])


def test_prompts_of_several_requests_and_a_row_that_tells_of_its_end_only(runner, theirs):
    prompts = {1: PROMPT, 2: PROMPT[::-1], 3: PROMPT[3:9]}
    rows = [Row(number, prompt, [3 * number + n for n in range(3)]) for number, prompt in prompts.items()]
    new = {1: asks(11, 2), 2: GREEDY, 3: asks(6, 4)}
    response = runner.execute(telling(step(*rows, new=new), prompts, (0, 7), (2, 0)))
    reader = LogprobReader(response.prompt_logprobs)
    check(reader.take(3, 2), theirs(PROMPT)[7:], PROMPT[8:])
    check(reader.take(5, 4), theirs(prompts[3]), prompts[3][1:])


def test_logits_of_a_prompt_are_made_a_few_at_a_time_and_say_the_same(runner, monkeypatch):
    request = telling(step(Row(1, PROMPT, range(3)), new={1: asks(11, 3)}), {1: PROMPT}, (0, 0))
    whole = runner.execute(request).prompt_logprobs
    head, seen = runner._model.head, []

    def noting(hidden):
        seen.append(len(hidden))
        return head(hidden)

    monkeypatch.setattr(worker.logprobs, "_MAX_LOGITS", 4 * 97 + 1)
    monkeypatch.setattr(runner._model, "head", noting)
    parts = runner.execute(request).prompt_logprobs
    assert seen == [1, 4, 4, 2], "the sample's row, and the prompt's ten in fours"
    ours, theirs = (LogprobReader(columns).take(10, 3) for columns in (parts, whole))
    assert ours.top_token_ids == theirs.top_token_ids
    assert ours.logprobs.tolist() == pytest.approx(theirs.logprobs.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ((1, 0), "1 is more than 0"),
        ((0, 11), "not among its row's tokens"),
        ((0, -1), "not among its row's tokens"),
        ((0, 10), "behind the prompt's last token but one"),
    ],
)
def test_a_row_that_can_not_tell_is_a_malformed_step(runner, pair, words):
    request = telling(step(Row(1, PROMPT, range(3)), new={1: asks(11, 3)}), {1: PROMPT}, pair)
    with pytest.raises(MalformedStep, match=words):
        runner.execute(request)


def test_a_prompt_that_is_asked_about_and_was_not_sent_is_a_malformed_step(runner):
    with pytest.raises(MalformedStep, match="0 tokens; its prompt has 11"):
        runner.execute(telling(step(Row(1, PROMPT, range(3)), new={1: asks(11, 3)}), {}, (0, 0)))
    request = telling(step(Row(1, PROMPT, range(3)), new={1: GREEDY}), {1: PROMPT}, (0, 0))
    with pytest.raises(MalformedStep, match="of a request that did not ask"):
        runner.execute(request)


# Penalties: what the worker is told, and what it notes itself


def penalized(num_tokens=11, **sampling):
    return Sampling(
        top_p=1, num_prompt_tokens=num_tokens, **({"repetition_penalty": 1.5, "frequency_penalty": 0.5} | sampling)
    )


def with_history(request, prompt, outputs=()):
    """The step with its one new request's prompt, and the outputs of its sequences (index, tokens)."""
    (new,) = request.new_requests
    new.prompt_token_ids = pack(prompt)
    new.output_sequence_indexes = pack(index for index, _ in outputs)
    new.output_counts = pack(len(output) for _, output in outputs)
    new.output_token_ids = pack(token for _, output in outputs for token in output)
    return request


def decode(runner, prompt, num_tokens, found=(), blocks=range(16), request_id=1, sampling=None):
    """Greedy output; what it begins with comes with the new request, as after a restart of the worker."""
    found = list(found)
    sampling = sampling or penalized(len(prompt))
    request = step(Row(request_id, [*prompt, *found], blocks), new={request_id: sampling})
    request = with_history(request, prompt, [(0, found)] if found else [])
    while True:
        found += tokens(runner.execute(request))
        if len(found) >= num_tokens:
            return found
        request = step(Row(request_id, [found[-1]], blocks, computed=len(prompt) + len(found) - 1))


@pytest.mark.parametrize("penalty", [1.2, 3.0])
def test_repetition_penalty_generates_what_transformers_generates(runner, penalty):
    model = tiny_llama()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    expected = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0, repetition_penalty=penalty)
    ours = decode(runner, PROMPT, 20, sampling=Sampling(top_p=1, num_prompt_tokens=11, repetition_penalty=penalty))
    assert ours == expected[0, 11:].tolist()


def test_a_worker_that_is_told_of_the_output_so_far_goes_on_alike(checkpoint, runner):
    expected = decode(runner, PROMPT, 16)
    assert expected != decode(runner, PROMPT, 16, sampling=GREEDY), "the penalties make a difference"
    for num in (1, 5, 15):
        assert decode(tiny_runner(checkpoint), PROMPT, 16, expected[:num]) == expected


def test_a_token_that_is_sampled_again_counts_once(runner):
    expected = decode(runner, PROMPT, 12)
    found = decode(runner, PROMPT, 6, request_id=2)
    # A preemption: everything is computed again in other blocks, and the last token sampled again.
    for _ in range(3):
        again = step(Row(2, [*PROMPT, *found[:-1]], range(20, 36), sequence_index=0))
        assert tokens(runner.execute(again)) == found[-1:]
    for _ in range(6):
        found += tokens(runner.execute(step(Row(2, found[-1:], range(20, 36), computed=10 + len(found)))))
    assert found == expected


def test_sequences_of_one_request_see_their_own_output_alone(runner):
    seeded = penalized(temperature=1, seed=4)
    rows = step(Row(1, PROMPT, range(3)), new={1: seeded}, samples=[(0, 0), (0, 1)])
    first = tokens(runner.execute(with_history(rows, PROMPT)))
    for index in (0, 1):
        alone = penalized(temperature=1, seed=4)
        row = Row(9, [*PROMPT, first[index]], range(10, 14), sequence_index=index)
        request = with_history(step(row, new={9: alone}), PROMPT, [(index, first[index : index + 1])])
        expected = tokens(runner.execute(request))
        blocks = [0, 1, 2] if index == 0 else [0, 1, 5]
        told = step(Row(1, [first[index]], blocks, computed=11, sequence_index=index), copy=[2, 5])
        assert tokens(runner.execute(told)) == expected


@pytest.mark.parametrize(
    ("outputs", "words"),
    [([(0, [1])], "has a gap before 14"), ([(1, [1, 2, 3])], "has a gap before 14"), ([(0, [97, 1, 2])], "97 is more")],
)
def test_penalties_over_tokens_that_nobody_told_are_a_malformed_step(runner, outputs, words):
    request = with_history(step(Row(1, [*PROMPT, 1, 2, 3], range(4)), new={1: penalized()}), PROMPT, outputs)
    with pytest.raises(MalformedStep, match=words):
        runner.execute(request)


def test_a_sequence_without_output_may_be_told_of_beside_one_with_some(runner):
    request = step(Row(1, PROMPT, range(3)), new={1: penalized()})
    expected = tokens(runner.execute(with_history(request, PROMPT)))
    assert tokens(runner.execute(with_history(request, PROMPT, [(0, []), (1, [5, 17])]))) == expected


@pytest.mark.parametrize(("indexes", "counts"), [([0], [2]), ([0], [1, 2]), ([0, 1], [4, -1])])
def test_outputs_whose_columns_do_not_fit_together_are_a_malformed_step(runner, indexes, counts):
    request = step(Row(1, [*PROMPT, 1, 2, 3], range(4)), new={1: penalized()})
    (new,) = with_history(request, PROMPT, [(0, [1, 2, 3])]).new_requests
    new.output_sequence_indexes, new.output_counts = pack(indexes), pack(counts)
    with pytest.raises(MalformedStep, match="output_counts: do not fit"):
        runner.execute(request)
