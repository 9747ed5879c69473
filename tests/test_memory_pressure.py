"""Memory pressure changes nothing: the real model, under the real core, says the same with many blocks and with few.

Forty requests, greedy, sampled, n = 4 and beams of 4, in float32, in this process: the plan of each step goes straight
to the model runner, and the answer to the core, before or after the next step is planned, with the same
sequences or others. Beams are compared with Hugging Face's as well.
"""

import random
from pathlib import Path

import pytest
from direct import Deployment

from scheduler.beam import BeamParams, EarlyStopping
from scheduler.policy import PreemptionMode
from scheduler.sequence import SequenceGroup

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPTS = (Path(__file__).parent / "prompts.txt").read_text().rstrip("\n").split("\n\n")
NUM_REQUESTS = 40
NUM_TOKENS = 16
EOS = 2
AMPLE = 2000


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return transformers.AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def weights(model_dir):
    from real_worker import load_weights

    return load_weights(model_dir)


def start(weights, *, num_blocks=AMPLE, num_swap_blocks=0, budget=512, **options) -> Deployment:
    """A core and a model runner, face to face."""
    from real_worker import start_runner

    worker = start_runner(weights, num_blocks=num_blocks, num_cpu_blocks=num_swap_blocks, max_num_batched_tokens=budget)
    return Deployment(worker.runner.launch, num_blocks, num_swap_blocks, budget=budget, **options)


def mixed(deployment: Deployment, tokenizer) -> list[SequenceGroup]:
    """The forty requests, submitted."""
    kinds = (
        {},
        {"temperature": 1.0, "top_p": 0.9, "seed": 7},
        {"temperature": 0.8, "seed": 7, "n": 4},
        {"n": 4, "beam": BeamParams(4)},
    )
    groups = []
    for place in range(NUM_REQUESTS):
        prompt = PROMPTS[place % len(PROMPTS)]
        if place >= len(PROMPTS):
            prompt = "\n".join([*PROMPTS[:5], prompt])  # the second half shares a long prefix
        groups.append(deployment.submit(place, tokenizer(prompt).input_ids, **kinds[(place + place // 20) % 4]))
    return groups


def outputs_of(groups: list[SequenceGroup]) -> list[list[list[int]]]:
    return [[sequence.output_token_ids.tolist() for sequence in group.sequences] for group in groups]


def answers(deployment: Deployment, tokenizer, preempt_share: float = 0.0) -> list[list[list[int]]]:
    """All outputs; running groups are preempted at random, each with this probability in each step."""
    source = random.Random(3)
    groups = mixed(deployment, tokenizer)
    while deployment.core.num_live:
        for group in list(deployment.core.queues.running):
            if source.random() < preempt_share:
                deployment.core.preempt(group)
        deployment.step()
    return outputs_of(groups)


@pytest.fixture(scope="module")
def ample(weights, tokenizer):
    """The answers when there is no shortage, and the blocks that they took."""
    deployment = start(weights)
    outputs = answers(deployment, tokenizer)
    assert deployment.core.num_preemptions == 0
    assert deployment.core.num_found_tokens > 0
    return outputs, deployment.max_num_held


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"max_steps_in_flight": 2},
        pytest.param({"num_concurrent_steps": 3}, marks=pytest.mark.long),
    ],
)
def test_a_tenth_of_the_blocks_changes_no_token(weights, tokenizer, ample, steps):
    expected, num_blocks = ample
    deployment = start(weights, num_blocks=num_blocks // 10, preemption_mode=PreemptionMode.RECOMPUTE, **steps)
    assert answers(deployment, tokenizer) == expected
    assert deployment.core.num_preemptions > 0
    assert deployment.core.num_swap_outs == 0


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"max_steps_in_flight": 2}, marks=pytest.mark.long),
        {"num_speculative_tokens": 8},
    ],
)
def test_swapping_changes_no_token(weights, tokenizer, ample, steps):
    expected, num_blocks = ample
    options = {"preemption_mode": PreemptionMode.SWAP, **steps}
    deployment = start(weights, num_blocks=num_blocks // 10, num_swap_blocks=num_blocks, **options)
    assert answers(deployment, tokenizer) == expected
    assert deployment.core.num_swap_outs == deployment.core.num_swap_ins > 0
    assert bool(deployment.num_accepted) == bool(steps.get("num_speculative_tokens"))


def test_computing_every_prefix_again_changes_no_token(weights, tokenizer, ample):
    deployment = start(weights, prefix_caching=False)
    assert answers(deployment, tokenizer) == ample[0]
    assert deployment.core.num_found_tokens == 0


@pytest.mark.parametrize("budget", [pytest.param(8, marks=pytest.mark.long), 64])
def test_the_size_of_chunks_changes_no_token(weights, tokenizer, ample, budget):
    assert answers(start(weights, budget=budget), tokenizer) == ample[0]


def test_classic_steps_change_no_token(weights, tokenizer, ample):
    assert answers(start(weights, chunked_prefill=False), tokenizer) == ample[0]


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, pytest.param(PreemptionMode.SWAP, marks=pytest.mark.long)])
def test_preempting_any_request_at_any_step_changes_no_token(weights, tokenizer, ample, mode, depth):
    deployment = start(weights, num_swap_blocks=AMPLE, preemption_mode=mode, max_steps_in_flight=depth)
    assert answers(deployment, tokenizer, preempt_share=0.3) == ample[0]
    assert deployment.core.num_preemptions > 100


@pytest.fixture(scope="module")
def reference(model_dir):
    return transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@pytest.mark.long
@pytest.mark.parametrize(
    ("early_stopping", "told", "length_penalty"),
    [(EarlyStopping.FALSE, False, 1.0), (EarlyStopping.TRUE, True, 0.5), (EarlyStopping.NEVER, "never", 2.0)],
)
def test_beams_equal_those_of_hugging_face(weights, tokenizer, reference, early_stopping, told, length_penalty):
    width = 4
    deployment = start(weights)
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS[:10]]
    params = BeamParams(width, length_penalty, early_stopping)
    groups = [deployment.submit(place, prompt, n=width, beam=params) for place, prompt in enumerate(prompts)]
    while deployment.core.num_live:
        deployment.step()
    for group, prompt in zip(groups, prompts, strict=True):
        with torch.inference_mode():
            theirs = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=NUM_TOKENS,
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                early_stopping=told,
                length_penalty=length_penalty,
                eos_token_id=EOS,
                pad_token_id=EOS,
                return_dict_in_generate=True,
                output_scores=True,
            )
        for sequence, tokens, score in zip(group.sequences, theirs.sequences, theirs.sequences_scores, strict=True):
            ours = sequence.output_token_ids.tolist()
            assert ours == tokens[len(prompt) :][: len(ours)].tolist()
            assert set(tokens[len(prompt) + len(ours) :].tolist()) <= {EOS}, "padding"
            assert sequence.cumulative_logprob / len(ours) ** length_penalty == pytest.approx(float(score), abs=1e-4)
