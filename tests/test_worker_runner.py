"""Whole steps against transformers' own greedy generation, however the work is cut up."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from late_streams import LateStreams
from real_worker import load_weights, start_runner
from worker_fakes import GREEDY, Row, logprobs, step, tiny_checkpoint, tiny_llama, tiny_runner, tokens

from protos.columns import pack, unpack
from protos.sampling_pb2 import Sampling
from worker.cache_engine import CacheEngine
from worker.inputs import MalformedStep
from worker.last_tokens import LastTokens

PROMPT = [5, 17, 3, 88, 42, 9, 61, 2, 30, 11, 7]
SEEDED = Sampling(temperature=1, top_p=1, seed=11)


def generated(model, prompt, num_tokens):
    """Greedy tokens of transformers, which does not stop at the end of a text either."""
    model.generation_config.eos_token_id = None
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return ids[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def runner(checkpoint):
    return tiny_runner(checkpoint)


def run_alone(runner, prompt, num_tokens, *, sampling=GREEDY, chunk=1000, blocks=range(16), request_id=1):
    """One sequence: its prompt in chunks, then decodes that are told the token sampled before."""
    found, computed, new = [], 0, {request_id: sampling}
    while len(found) < num_tokens:
        chunk_tokens = (prompt + found)[computed:][:chunk]
        row = Row(request_id, chunk_tokens, list(blocks), computed)
        computed += len(chunk_tokens)
        samples = None if computed >= len(prompt) else []
        found += tokens(runner.execute(step(row, new=new, samples=samples)))
        new = {}
    return found


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 1000])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36},
        {"num_attention_heads": 8, "num_key_value_heads": 1},
        {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True, "head_dim": 6},
    ],
    ids=["2 of 4", "3 of 9", "1 of 8", "tied", "biased"],
)
def test_greedy_tokens_are_transformers_own_whatever_the_chunks(tmp_path, changes, chunk):
    runner = tiny_runner(tiny_checkpoint(tmp_path, **changes))
    assert run_alone(runner, PROMPT, 12, chunk=chunk) == generated(tiny_llama(**changes), PROMPT, 12)


def test_log_probabilities_are_transformers_own(runner):
    response = runner.execute(step(Row(1, PROMPT, range(3)), new={1: GREEDY}))
    with torch.inference_mode():
        theirs = tiny_llama()(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    assert logprobs(response) == pytest.approx([theirs.max().item()], abs=1e-4)
    assert tokens(response) == [theirs.argmax().item()]


def test_sequences_of_a_mixed_batch_do_not_disturb_each_other(runner):
    model = tiny_llama()
    prompts = {1: PROMPT, 2: PROMPT[:1], 3: PROMPT[::-1] * 3}
    found = {request_id: [] for request_id in prompts}
    # Request 1 decodes while 2 is prefilled, then both decode while 3 is prefilled in chunks of 10.
    runner.execute(step(Row(1, PROMPT[:-1], [3, 1, 4]), new={1: GREEDY}, samples=[]))
    for number in range(10):
        rows, samples, new = [], [], {}
        if number > 0:
            rows.append(Row(1, [PROMPT[-1] if number == 1 else -1], [3, 1, 4, 15, 9, 2], computed=9 + number))
        if number > 1:
            rows.append(Row(2, [prompts[2][0] if number == 2 else -1], [6, 5, 35], computed=number - 2))
            new |= {2: GREEDY} if number == 2 else {}
        samples = [(row, 0) for row in range(len(rows))]
        if number > 2:
            computed = 10 * (number - 3)
            chunk = prompts[3][computed:][:10] if computed < 33 else [-1]
            rows.append(Row(3, chunk, list(range(40, 52)), computed=min(computed, 33 + number - 7)))
            new |= {3: GREEDY} if number == 3 else {}
            samples += [(len(rows) - 1, 0)] if computed + 10 >= 33 else []
        sampled = tokens(runner.execute(step(*rows, samples=samples, new=new)))
        for (row, _), token in zip(samples, sampled, strict=True):
            found[rows[row].request_id].append(token)
    for request_id, prompt in prompts.items():
        assert found[request_id] == generated(model, prompt, len(found[request_id])), request_id
    assert [len(found[request_id]) for request_id in (1, 2, 3)] == [9, 8, 4]


def test_minus_one_is_the_token_that_this_sequence_of_this_request_sampled_last(runner):
    runner.execute(step(Row(1, PROMPT, range(3)), new={1: SEEDED}, samples=[(0, 0), (0, 1), (0, 2)]))
    runner.execute(step(Row(2, PROMPT[:3], [8]), new={2: SEEDED}))
    told = run_alone(runner, PROMPT, 2, sampling=SEEDED, request_id=3, blocks=[20, 21, 22])
    rows = [Row(1, [-1], [0, 1, block], computed=11, sequence_index=index) for index, block in enumerate((2, 4, 5))]
    copied = step(*rows, copy=[2, 4, 2, 5])
    response = runner.execute(copied)
    assert tokens(response)[0] == told[1]
    with pytest.raises(MalformedStep, match="sequence 1 of request 2, which has sampled nothing"):
        runner.execute(step(Row(2, [-1], [8], computed=3, sequence_index=1)))


def test_samples_of_one_row_are_drawn_apart_and_do_not_depend_on_their_company(runner):
    request = step(Row(1, PROMPT, range(3)), new={1: SEEDED}, samples=[(0, index) for index in range(8)])
    together = tokens(runner.execute(request))
    assert len(set(together)) > 1
    row, other = Row(1, PROMPT, range(3)), Row(9, PROMPT[:5], [20, 21])
    apart = runner.execute(step(other, row, new={1: SEEDED, 9: GREEDY}, samples=[(1, 5), (0, 0), (1, 2)]))
    assert (tokens(apart)[0], tokens(apart)[2]) == (together[5], together[2])


@pytest.mark.parametrize(
    "company",
    [
        SEEDED,
        Sampling(top_p=1, num_top_logprobs=2),
        Sampling(top_p=1, stop_token_ids=[3], min_tokens=5, num_prompt_tokens=5),
    ],
    ids=["drawn", "candidates", "no stop yet"],
)
@pytest.mark.parametrize("has_screen", [False, True])
def test_a_best_token_and_its_log_probability_are_the_same_bits_where_no_logits_are_kept(
    runner, company, has_screen, tmp_path
):
    if has_screen:
        runner = tiny_runner(tiny_checkpoint(tmp_path, hidden_size=64), dtype="bfloat16")
        if not runner._model.head.has_screen:
            pytest.skip("this CPU's level has none")
    assert runner._model.head.can_find_best
    alone = runner.execute(step(Row(1, PROMPT, range(3)), new={1: GREEDY}, samples=[(0, 0), (0, 1)]))
    other = runner.execute(step(Row(4, PROMPT[:5], [20, 21]), new={4: company}))
    rows = [Row(2, PROMPT, range(3)), Row(3, PROMPT[:5], [20, 21])]
    beside = runner.execute(step(*rows, new={2: GREEDY, 3: company}, samples=[(0, 0), (1, 0), (0, 1)]))
    first, second, third = zip(tokens(beside), logprobs(beside), strict=True)
    assert [first, third] == list(zip(tokens(alone), logprobs(alone), strict=True))
    assert [second] == list(zip(tokens(other), logprobs(other), strict=True))
    one_each = runner.execute(step(*rows, new={2: GREEDY, 3: company}))
    assert [first, second] == list(zip(tokens(one_each), logprobs(one_each), strict=True))


def test_blocks_that_are_swapped_out_and_in_again_or_copied_go_on_alike(runner):
    expected = run_alone(runner, PROMPT, 4)
    found = tokens(runner.execute(step(Row(1, PROMPT, [0, 1, 2]), new={1: GREEDY})))
    swapped = step(finished=[77], swap_out=[0, 5, 1, 6, 2, 7])
    assert tokens(runner.execute(swapped)) == []
    run_alone(runner, PROMPT[::-1], 2, blocks=[0, 1, 2, 3], request_id=2)  # somebody else takes the blocks
    back = step(Row(1, [-1], [30, 31, 32], computed=11), swap_in=[5, 30, 6, 31, 7, 32])
    found += tokens(runner.execute(back))
    copied = step(Row(1, [-1], [40, 31, 32, 33], computed=12), copy=[30, 40])
    found += tokens(runner.execute(copied))
    # Out and in within one step: the CPU block that goes out first comes in.
    both = step(Row(1, [-1], [50, 31, 32, 33], computed=13), swap_out=[40, 0], swap_in=[0, 50])
    assert found + tokens(runner.execute(both)) == expected


def test_a_row_whose_logits_are_not_finite_fails_alone_and_leaves_nothing_behind(runner):
    expected = run_alone(runner, PROMPT, 3)
    runner._model.embedding.weight[96] = torch.nan
    response = runner.execute(step(Row(1, PROMPT, [0, 1, 2]), Row(2, [96] * 11, [3, 4, 5]), new={1: GREEDY, 2: GREEDY}))
    assert list(unpack(response.failed_samples)) == [1]
    assert tokens(response)[0] == expected[0]
    # The next step was sent before the failure was known.
    response = runner.execute(step(Row(1, [-1], [0, 1, 2], computed=11), Row(2, [-1], [3, 4, 5], computed=11)))
    assert list(unpack(response.failed_samples)) == [1]
    assert tokens(response)[0] == expected[1]
    # The blocks that are full of NaN now go to somebody else.
    assert run_alone(runner, PROMPT, 3, blocks=[5, 4, 3, 6], request_id=3) == expected


def test_finished_requests_are_forgotten_and_their_ids_may_come_back(runner):
    expected = tokens(runner.execute(step(Row(1, PROMPT, range(3)), new={1: SEEDED})))
    runner.execute(step(finished=[1]))
    for message in (step(Row(1, PROMPT, range(3))), step(Row(1, [-1], range(3), computed=11), samples=[])):
        with pytest.raises(MalformedStep):
            runner.execute(message)
    again = step(Row(1, PROMPT, range(3)), new={1: SEEDED}, finished=[1])
    assert tokens(runner.execute(again)) == expected
    assert (len(runner._live), runner._last_tokens.num_taken) == (1, 1)


def test_who_comes_after_a_finished_request_is_not_told_its_tokens(runner):
    expected = {
        seed: run_alone(runner, PROMPT, 3, sampling=Sampling(temperature=1, top_p=1, seed=seed)) for seed in (1, 2)
    }
    assert expected[1] != expected[2]
    runner.execute(step(finished=[1]))
    news = {seed: Sampling(temperature=1, top_p=1, seed=seed) for seed in (1, 2)}
    found = [tokens(runner.execute(step(Row(1, PROMPT, range(3)), new={1: news[1]})))]
    # Request 1 ends with the step in which request 2 begins, which gets its place; and the other way round.
    found += [tokens(runner.execute(step(Row(2, PROMPT, range(3)), new={2: news[2]}, finished=[1])))]
    found += [tokens(runner.execute(step(Row(2, [-1], range(3), computed=11))))]
    found += [tokens(runner.execute(step(Row(1, PROMPT, range(3)), new={1: news[1]}, finished=[2])))]
    found += [tokens(runner.execute(step(Row(1, [-1], range(3), computed=11))))]
    first, second = expected[1], expected[2]
    assert [token for row in found for token in row] == [first[0], *second[:2], *first[:2]]
    assert runner._last_tokens.num_taken == 1


def test_a_request_that_is_new_again_gives_its_places_back(runner):
    again = step(Row(1, PROMPT, range(3)), new={1: SEEDED}, samples=[(0, index) for index in range(4)])
    for _ in range(3):
        runner.execute(again)
        assert runner._last_tokens.num_taken == 4


def test_more_sequences_than_there_are_places_get_more(runner):
    count = 300
    together = step(Row(1, PROMPT, range(3)), new={1: SEEDED}, samples=[(0, index) for index in range(count)])
    firsts = tokens(runner.execute(together))
    for index in (0, 255, 256, 299):
        told = step(Row(1, [firsts[index]], [0, 1, 4], computed=11, sequence_index=index), copy=[2, 4])
        unknown = step(Row(1, [-1], [0, 1, 5], computed=11, sequence_index=index), copy=[2, 5])
        runner.execute(step(Row(1, PROMPT, range(3)), samples=[(0, index)]))
        assert tokens(runner.execute(unknown)) == tokens(runner.execute(told))


def test_sequences_never_share_a_place_however_many_there_are():
    last_tokens = LastTokens(torch.device("cpu"))
    places = torch.tensor([last_tokens.take() for _ in range(600)])
    last_tokens.write(places, torch.arange(600))
    assert last_tokens.read(places).tolist() == list(range(600))
    assert last_tokens.num_taken == 600


@pytest.fixture
def late(checkpoint):
    """A runner on a device that does not say what it has done before somebody waits for it; and its streams."""
    streams = LateStreams()
    return tiny_runner(checkpoint, streams=streams), streams


def decodes(count, request_id=1):
    """The steps behind `PROMPT`, each of the token that the one before samples."""
    return [step(Row(request_id, [-1], range(8), computed=11 + number)) for number in range(count)]


def test_steps_that_are_given_ahead_of_their_answers_answer_alike(runner, late):
    late_runner, streams = late
    expected = run_alone(runner, PROMPT, 6, sampling=SEEDED)
    before = streams.last_passed
    requests = [step(Row(1, PROMPT, range(8)), new={1: SEEDED}), *decodes(5)]
    in_flight = [late_runner.launch(request) for request in requests]
    assert not any(step.is_finished for step in in_flight)
    assert streams.last_passed == before, "a launch has waited for the device"
    assert [tokens(step.result())[0] for step in reversed(in_flight)] == expected[::-1]
    assert all(step.is_finished for step in in_flight)
    assert in_flight[0].result() is in_flight[0].result()


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.8}, {"presence_penalty": 3.0}, {"frequency_penalty": 3.0}]
)
def test_a_penalty_waits_for_the_tokens_that_it_is_put_on_and_others_do_not(checkpoint, late, penalty):
    late_runner, streams = late
    sampling = Sampling(temperature=1, top_p=1, seed=5, num_prompt_tokens=11, **penalty)
    penalized = step(Row(1, PROMPT, range(8)), new={1: sampling})
    penalized.new_requests[0].prompt_token_ids = pack(PROMPT)
    runner = tiny_runner(checkpoint)
    expected = [tokens(runner.execute(request)) for request in (penalized, *decodes(5))]

    in_flight = [late_runner.launch(penalized)]
    for request in decodes(5):
        # In between somebody whose tokens do not depend on others, which waits for nobody.
        before = streams.last_passed
        other = late_runner.launch(step(Row(2, PROMPT, range(8, 16)), new={2: SEEDED}, finished=[2]))
        assert streams.last_passed == before
        in_flight.append(late_runner.launch(request))
        assert in_flight[-2].is_finished
        assert not in_flight[-1].is_finished
        other.result()
    assert [tokens(step.result()) for step in in_flight] == expected


def test_what_a_finished_request_is_still_sampling_is_noted_nowhere_else(late):
    late_runner, _ = late
    sampling = Sampling(temperature=0, top_p=1, num_prompt_tokens=11, presence_penalty=1)
    first = step(Row(1, PROMPT, range(8)), new={1: sampling})
    first.new_requests[0].prompt_token_ids = pack(PROMPT)
    again = step(Row(1, PROMPT, range(8)), new={1: sampling}, finished=[1])
    again.new_requests[0].prompt_token_ids = pack(PROMPT)
    in_flight = [late_runner.launch(first), late_runner.launch(decodes(1)[0]), late_runner.launch(again)]
    found = [tokens(step.result()) for step in in_flight]
    assert found[0] == found[2]


def test_runners_of_the_same_weights_have_pools_of_their_own(checkpoint, runner):
    model, expected = load_weights(checkpoint), run_alone(runner, PROMPT, 3)
    small = start_runner(model, num_blocks=4, block_size=4)
    large = start_runner(model, num_blocks=50, num_cpu_blocks=20, block_size=16)
    assert (small.info.num_blocks, small.info.num_cpu_blocks, small.info.swap_ms_per_block) == (4, 0, 0)
    assert (large.info.num_blocks, large.info.num_cpu_blocks, large.info.vocabulary_size) == (50, 20, 97)
    small.runner.execute(step(Row(1, PROMPT[::-1], range(3)), new={1: GREEDY}))
    assert run_alone(large.runner, PROMPT, 3, blocks=[2]) == expected
    assert run_alone(small.runner, PROMPT, 3, blocks=range(4), request_id=2) == expected


def test_sampling_out_of_range_is_a_malformed_step(runner):
    with pytest.raises(MalformedStep, match="request 1: top_p 2"):
        runner.execute(step(Row(1, PROMPT, range(3)), new={1: Sampling(top_p=2)}))


def test_a_response_says_what_it_answers_and_how_long_it_took(runner):
    response = runner.execute(step(Row(1, PROMPT, range(3)), new={1: GREEDY}, step_id=7, epoch=9))
    assert (response.step_id, response.epoch) == (7, 9)
    assert response.timings.forward_ms > 0
    assert response.timings.prepare_ms > 0
    assert response.timings.sample_ms > 0


@pytest.mark.model
def test_the_real_model_says_what_transformers_says(model_dir):
    from transformers import AutoModelForCausalLM

    prompt = [504, 3575, 282, 4649, 314, 260, 1, 4093, 198, 19556, 28, 638, 359, 346, 47, 2, 198]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    runner = tiny_runner(model_dir, block_size=16)
    assert run_alone(runner, prompt, 24, chunk=7) == generated(model, prompt, 24)


@pytest.fixture
def between_pieces(runner, monkeypatch):
    """What a runner does between two pieces of its cache's memory that it takes."""
    calls = []
    monkeypatch.setattr(CacheEngine, "populate", lambda cache, on_piece: calls.append(on_piece))
    runner.populate_cache()
    return calls[0]


def test_the_caches_memory_is_taken_when_no_steps_have_come_for_a_while(runner, between_pieces, monkeypatch):
    now, request_ids, steps_while_asleep = 100.0, itertools.count(1), iter([2, 1, 0, 0])

    def run_steps(num_steps):
        for _ in range(num_steps):
            run_alone(runner, PROMPT, 1, request_id=next(request_ids))

    def sleep(seconds):
        nonlocal now
        now += 1.5 * seconds
        run_steps(next(steps_while_asleep))

    monkeypatch.setattr("worker.model_runner.time", SimpleNamespace(sleep=sleep, monotonic=lambda: now))
    between_pieces()
    assert now == 100.0
    run_steps(1)
    between_pieces()
    assert list(steps_while_asleep) == [0]
    between_pieces()


def test_the_caches_memory_is_not_taken_during_a_step_however_long_it_takes(runner, between_pieces, monkeypatch):
    class Asleep(Exception):
        pass

    def sleep(seconds):
        raise Asleep

    def swap(cache, blocks_out, blocks_in):
        with pytest.raises(Asleep):
            between_pieces()

    clock = itertools.count(100.0, 50.0)
    monkeypatch.setattr("worker.model_runner.time", SimpleNamespace(sleep=sleep, monotonic=lambda: next(clock)))
    monkeypatch.setattr(CacheEngine, "swap", swap)
    run_alone(runner, PROMPT, 2)
    between_pieces()
    with pytest.raises(MalformedStep):
        runner.launch(step(Row(2, [1_000_000], range(3)), new={2: GREEDY}))
    between_pieces()
