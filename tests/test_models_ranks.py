"""Our own models on ranks: what several say together is what one says, whichever way the model is shared out."""

import time
from types import SimpleNamespace

import pytest
from models_fakes import assert_alike, ours, save, tiny_model
from ranks_fakes import ThreadRanks, ThreadRunner
from test_models_families import CASES, LLAMA_LIKE, WINDOWED
from worker_fakes import GREEDY, Row, step, tiny_runner, tokens

from protos.columns import pack
from protos.sampling_pb2 import Sampling

DEALT = {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
BY_LAYER = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
# In all of them 97 token ids and three layers, which do not divide by two.
RANKED = {
    "llama, biased": CASES["llama, biased, 2 of 4 heads"],
    "llama, one K/V head at both": ("LlamaConfig", LLAMA_LIKE, DEALT | {"num_key_value_heads": 1}),
    "smollm, 3 K/V heads, tied": (*CASES["smollm"][:2], CASES["smollm"][2] | {"tie_word_embeddings": True}),
    "mistral, windows": ("MistralConfig", LLAMA_LIKE, DEALT | {"sliding_window": 6, "head_dim": 14}),
    "qwen2, tied": ("Qwen2Config", LLAMA_LIKE, DEALT | {"tie_word_embeddings": True}),
    "qwen2, windows by layer": ("Qwen2Config", LLAMA_LIKE, DEALT | WINDOWED | BY_LAYER),
    "qwen3": ("Qwen3Config", LLAMA_LIKE, DEALT | {"head_dim": 14, "attention_bias": True}),
    "gpt2": CASES["gpt2"],
    "gpt2, scaled by layer, untied": CASES["gpt2, scaled by layer, untied"],
    "opt": CASES["opt"],
    "opt-350m": CASES["opt-350m"],
}


@pytest.fixture
def checkpoint(tmp_path, request):
    import transformers

    name, numbers, changes = RANKED[request.param]
    return save(tiny_model(getattr(transformers, name)(**(numbers | changes))), tmp_path)


SHAPES = ((2, 1), (1, 2), (2, 2))


@pytest.mark.parametrize("checkpoint", RANKED, indirect=True)
def test_ranks_say_what_one_says(checkpoint):
    expected = ours(tiny_runner(checkpoint))
    for shape in SHAPES:
        with ThreadRunner(checkpoint, *shape) as ranks:
            assert_alike(ours(ranks), expected, tolerance=5e-5)


PROMPT = [5, 17, 3, 88, 42]
PENALIZED = Sampling(
    temperature=0.8,
    top_p=0.95,
    seed=3,
    repetition_penalty=1.3,
    frequency_penalty=0.5,
    num_prompt_tokens=len(PROMPT),
    num_prompt_logprobs=2,
)
SEARCHED = Sampling(temperature=0, top_p=1, num_candidates=4)


def steps_of(runner):
    """A prompt that is told about and penalized, and one that a beam search goes on from; then the first one's blocks
    are swapped out and come back elsewhere, while a shared block of the other one is copied. The answers."""
    prompts = step(Row(1, PROMPT, [0, 1]), Row(2, PROMPT, [2, 3]), new={1: PENALIZED, 2: SEARCHED})
    prompts.new_requests[0].prompt_token_ids = pack(PROMPT)
    prompts.prompt_logprob_rows = prompts.prompt_logprob_starts = pack([0])
    answers = [runner.execute(prompts)]
    first, second = tokens(answers[-1])
    answers.append(runner.execute(step(Row(2, [second], [2, 4], 5), swap_out=[0, 6, 1, 7], copy=[3, 4])))
    back = step(Row(1, [first], [8, 9], 5), Row(2, tokens(answers[-1]), [2, 4], 6), swap_in=[6, 8, 7, 9])
    answers.append(runner.execute(back))
    first, second = tokens(answers[-1])
    return [*answers, runner.execute(step(Row(1, [first], [8, 9], 6), Row(2, [second], [2, 4], 7)))]


@pytest.mark.parametrize("checkpoint", ["smollm, 3 K/V heads, tied"], indirect=True)
def test_ranks_penalize_search_tell_of_prompts_and_move_blocks_as_one_does(checkpoint):
    def told(runner):
        return [
            (answer.token_ids, answer.candidate_token_ids, answer.prompt_logprobs.top_token_ids, answer.failed_samples)
            for answer in steps_of(runner)
        ]

    expected = told(tiny_runner(checkpoint))
    for shape in SHAPES:
        with ThreadRunner(checkpoint, *shape) as ranks:
            assert told(ranks) == expected


@pytest.mark.parametrize("checkpoint", ["qwen3"], indirect=True)
def test_a_stage_has_no_memory_for_the_vectors_of_tokens_that_it_does_not_look_at(checkpoint):
    with ThreadRunner(checkpoint, 1, 3) as ranks:
        last, middle, first = [(model.embedding.weight.is_meta, model.head.weight.is_meta) for model in ranks.models]
    assert (first, middle, last) == ((False, True), (True, True), (True, False))


@pytest.mark.parametrize("checkpoint", ["qwen2, tied"], indirect=True)
def test_what_a_head_has_packed_is_not_kept_for_an_embedding_at_another_stage(checkpoint):
    with ThreadRunner(checkpoint, 1, 2) as ranks:
        last, first = ranks.models
    assert last.embedding.weight is last.head.weight  # and that is let go where it has been packed
    assert len(first.embedding.weight) == 97


@pytest.mark.parametrize("checkpoint", ["gpt2"], indirect=True)
def test_a_step_without_tokens_is_not_timed_from_the_hidden_states_of_the_one_before(checkpoint):
    with ThreadRunner(checkpoint, 1, 2) as ranks:
        ranks.execute(step(Row(1, PROMPT, [0, 1]), new={1: GREEDY}))
        begun = time.perf_counter()
        forward_ms = ranks.execute(step()).timings.forward_ms
        took_ms = 1e3 * (time.perf_counter() - begun)
    assert forward_ms <= 2 * took_ms, "each of two stages tells its part, and no longer than the step"


@pytest.mark.parametrize("checkpoint", ["gpt2"], indirect=True)
def test_a_stage_does_not_count_its_wait_for_the_one_before_as_its_own_time(checkpoint, monkeypatch):
    now_s = 0.0

    def send_late(ranks, x, send=ThreadRanks.send):
        nonlocal now_s
        now_s += 1000
        return send(ranks, x)

    monkeypatch.setattr(ThreadRanks, "send", send_late)
    monkeypatch.setattr("worker.streams.time", SimpleNamespace(perf_counter=lambda: now_s))
    with ThreadRunner(checkpoint, 1, 2) as ranks:
        assert ranks.execute(step(Row(1, PROMPT, [0, 1]), new={1: GREEDY})).timings.forward_ms == 0
