"""Penalties, biases and log-probabilities under a real core and a real runner: the same whatever happens around them.

Like `test_memory_pressure.py`, but on a random model so small that every kind of misfortune can be tried.
"""

import random
from array import array
from collections import deque

import pytest

from protos.columns import pack, pack_floats
from protos.sampling_pb2 import Sampling
from scheduler.beam import BeamParams
from scheduler.block_manager import BlockManager
from scheduler.plan import Plan, StepResult, to_request, to_result
from scheduler.policy import Policy, PreemptionMode
from scheduler.scheduler import Scheduler
from scheduler.sequence import SequenceGroup

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BLOCK_SIZE = 4
NUM_TOKENS = 14
AMPLE = 600
KINDS = [
    {"repetition_penalty": 1.6},
    {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 0.4, "n": 3},
    {"temperature": 0.9, "typical_p": 0.8, "repetition_penalty": 1.3, "top_p": 0.95},
    {"num_top_logprobs": 3, "num_prompt_logprobs": 2},
    {"temperature": 1.0, "biases": {5: 3.0, 17: -50.0}, "num_top_logprobs": 0, "n": 2},
    {"temperature": 1.2, "frequency_penalty": -0.5, "num_prompt_logprobs": 0, "n": 3, "top_k": 20},
    {"temperature": 1.0},
    {},
]
# One step at a time, two in flight, and three concurrent ones.
STEPS = [{}, {"max_steps_in_flight": 2}, {"num_concurrent_steps": 3}]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    from real_worker import load_weights
    from worker_fakes import tiny_checkpoint

    return load_weights(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


class Deployment:
    """A core and a model runner, face to face; the core may lose its worker."""

    def __init__(
        self, weights, *, num_blocks=AMPLE, num_swap_blocks=0, budget=64, num_concurrent_steps=1, **policy
    ) -> None:
        self._weights, self._sizes = weights, (num_blocks, num_swap_blocks, budget)
        options = {"max_num_seqs": min(40, budget), "max_waiting_requests": 100, "watermark": 0.0} | policy
        options["max_failed_steps"] = 1000  # so many workers are lost here, and no request is to blame
        self.core = Scheduler(Policy(budget, **options), BlockManager(num_blocks, BLOCK_SIZE, num_swap_blocks))
        self.core.set_num_concurrent_steps(num_concurrent_steps)
        self._answers: deque[tuple[Plan, StepResult]] = deque()
        self._start_worker()

    def _start_worker(self) -> None:
        from real_worker import start_runner

        num_blocks, num_swap_blocks, budget = self._sizes
        sizes = {"num_blocks": num_blocks, "num_cpu_blocks": num_swap_blocks, "block_size": BLOCK_SIZE}
        self.runner = start_runner(self._weights, max_num_batched_tokens=max(budget, 64), **sizes).runner

    def lose_worker(self) -> None:
        self.core.requeue_running()
        self._answers.clear()
        self._start_worker()

    def submit(self, place: int, prompt: list[int], n=1, beam=None, biases=None, **sampling) -> SequenceGroup:
        return self.core.submit(
            request_id=str(place),
            prompt_token_ids=array("i", prompt),
            n=n,
            max_tokens=NUM_TOKENS,
            beam=beam,
            sampling=Sampling(
                top_p=sampling.pop("top_p", 1.0),
                seed=place,
                num_prompt_tokens=len(prompt),
                bias_token_ids=pack(biases or ()),
                biases=pack_floats((biases or {}).values()),
                **sampling,
            ),
            now=float(place),
        )

    def step(self, interrupt=None) -> None:
        """Plans a step; takes the oldest step's answer if no more may be in flight, or if there was nothing to plan.

        `interrupt` is called between plan and answer.
        """
        plan = self.core.schedule(1000.0)
        self.core.check()
        if plan.rows:
            response = self.runner.execute(to_request(plan, epoch=0))
            assert not response.failed_samples
            self._answers.append((plan, to_result(response)))
        if interrupt is not None:
            interrupt()
        if self._answers and (not plan.rows or len(self._answers) == self.core.in_flight.max_steps):
            self.core.update(*self._answers.popleft())
        self.core.check()


def mixed(deployment: Deployment) -> list[SequenceGroup]:
    source = random.Random(5)
    shared = [source.randrange(97) for _ in range(13)]
    groups = []
    for place in range(16):
        prompt = [source.randrange(97) for _ in range(source.randrange(1, 20))]
        prompt = shared + prompt if place % 3 == 0 else prompt  # some find the blocks of others in the cache
        groups.append(deployment.submit(place, prompt, **KINDS[place % len(KINDS)]))
    return groups


def run(deployment: Deployment, misfortune=None) -> list[SequenceGroup]:
    """All requests, answered; `misfortune(deployment, source)` may act before each step, and returns an interrupt."""
    source = random.Random(3)
    groups = mixed(deployment)
    while deployment.core.num_live:
        deployment.step(misfortune(deployment, source) if misfortune is not None else None)
    return groups


def tokens_of(groups: list[SequenceGroup]) -> list[list[list[int]]]:
    return [[sequence.output_token_ids.tolist() for sequence in group.sequences] for group in groups]


def assert_same(groups: list[SequenceGroup], expected: list[SequenceGroup]) -> None:
    """Tokens and ranks are the same, log-probabilities up to what batches change in float32."""
    assert tokens_of(groups) == tokens_of(expected)
    for group, other in zip(groups, expected, strict=True):
        pairs = [(group.prompt_logprobs, other.prompt_logprobs)]
        pairs += [(a.logprobs, b.logprobs) for a, b in zip(group.sequences, other.sequences, strict=True)]
        for ours, theirs in pairs:
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert ours.ranks == theirs.ranks
                assert ours.top_token_ids == theirs.top_token_ids
                assert ours.logprobs.tolist() == pytest.approx(theirs.logprobs.tolist(), abs=1e-3)
                assert ours.top_logprobs.tolist() == pytest.approx(theirs.top_logprobs.tolist(), abs=1e-3)


@pytest.fixture(scope="module")
def ample(weights):
    """The answers when there is no shortage and nothing is lost."""
    deployment = Deployment(weights)
    groups = run(deployment)
    assert deployment.core.num_preemptions == 0
    for group in groups:
        assert group.prompt_logprobs is None or len(group.prompt_logprobs) == group.num_prompt_tokens - 1
        for sequence in group.sequences:
            assert sequence.logprobs is None or len(sequence.logprobs) == len(sequence.output_token_ids) == NUM_TOKENS
    return groups


def test_each_request_gives_the_same_alone(weights, ample):
    alone = []
    for place in range(len(ample)):
        deployment = Deployment(weights)
        group = mixed(deployment)[place]
        for other in list(deployment.core.queues.groups.values()):
            if other is not group:
                deployment.core.abort(other)
        while deployment.core.num_live:
            deployment.step()
        alone.append(group)
    assert_same(alone, ample)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_few_blocks_change_nothing(weights, ample, mode, steps):
    deployment = Deployment(weights, num_blocks=40, num_swap_blocks=200, preemption_mode=mode, **steps)
    assert_same(run(deployment), ample)
    assert deployment.core.num_preemptions > 5


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("options", [{"budget": 5}, {"chunked_prefill": False}, {"prefix_caching": False}])
def test_chunks_and_caches_change_nothing(weights, ample, options, steps):
    assert_same(run(Deployment(weights, **steps, **options)), ample)


def preempt_anyone(deployment, source):
    """Preempts before a step is planned, or while it runs; in that case its samples are still taken."""

    def strike() -> None:
        for group in list(deployment.core.queues.running):
            if source.random() < 0.4:
                deployment.core.preempt(group)

    if source.random() < 0.5:
        strike()
        return None
    return strike


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_preempting_any_request_at_any_moment_changes_nothing(weights, ample, mode, steps):
    deployment = Deployment(weights, num_swap_blocks=AMPLE, preemption_mode=mode, **steps)
    assert_same(run(deployment, preempt_anyone), ample)
    assert deployment.core.num_preemptions > 50


@pytest.mark.parametrize("steps", STEPS)
def test_workers_that_are_lost_before_and_after_their_answers_change_nothing(weights, ample, steps):
    lost = []

    def misfortune(deployment, source):
        if source.random() < 0.2:
            deployment.lose_worker()
            lost.append("between two steps")
        if source.random() < 0.2:
            lost.append("its answer with it")
            return deployment.lose_worker
        return None

    assert_same(run(Deployment(weights, **steps), misfortune), ample)
    assert {"between two steps", "its answer with it"} <= set(lost)


def test_penalties_and_biases_give_what_transformers_gives(weights, ample):
    """Greedy, with the penalties that transformers has: it does not have OpenAI's two."""
    from worker_fakes import tiny_llama

    model = tiny_llama()
    model.generation_config.eos_token_id = None
    deployment = Deployment(weights)
    wanted = [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"biases": {5: 4.0, 17: -9.0}}, {"sequence_bias": [[[5], 4.0], [[17], -9.0]]}),
        (
            {"biases": {5: 4.0}, "repetition_penalty": 1.2},
            {"sequence_bias": [[[5], 4.0]], "repetition_penalty": 1.2},
        ),
    ]
    prompts = [list(group.prompt_token_ids) for group in ample[:3]]
    groups = [
        deployment.submit(place, prompt, **ours)
        for place, (prompt, (ours, _)) in enumerate(zip(prompts, wanted, strict=True))
    ]
    while deployment.core.num_live:
        deployment.step()
    for group, prompt, (_, told) in zip(groups, prompts, wanted, strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
            **told,
        )
        assert group.sequences[0].output_token_ids.tolist() == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("biases", [{5: 2.0, 17: -3.0}, {88: 6.0}])
def test_beams_with_biases_equal_those_of_transformers(weights, ample, biases):
    from worker_fakes import tiny_llama

    model = tiny_llama()
    deployment = Deployment(weights)
    prompts = [list(group.prompt_token_ids) for group in ample[:4]]
    groups = [
        deployment.submit(place, prompt, n=3, beam=BeamParams(3), biases=biases) for place, prompt in enumerate(prompts)
    ]
    while deployment.core.num_live:
        deployment.step()
    for group, prompt in zip(groups, prompts, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            theirs = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_TOKENS,
                num_beams=3,
                num_return_sequences=3,
                do_sample=False,
                pad_token_id=0,
                sequence_bias=[[[token], bias] for token, bias in biases.items()],
                return_dict_in_generate=True,
                output_scores=True,
            )
        for sequence, tokens, score in zip(group.sequences, theirs.sequences, theirs.sequences_scores, strict=True):
            assert sequence.output_token_ids.tolist() == tokens[len(prompt) :].tolist()
            assert sequence.cumulative_logprob / NUM_TOKENS == pytest.approx(float(score), abs=1e-3)
