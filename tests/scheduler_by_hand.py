"""A scheduler core driven by hand: numbers small enough to count, every answer chosen by the test."""

from array import array

from scheduler.block_manager import BlockManager
from scheduler.plan import Plan, StepOutputs, StepResult
from scheduler.policy import Policy
from scheduler.scheduler import Scheduler
from scheduler.sequence import SequenceGroup

STOP = 2


def make(num_blocks=100, block_size=4, budget=16, max_num_seqs=8, num_swap_blocks=0, **options) -> Scheduler:
    options = {"max_waiting_requests": 100, "watermark": 0.0, "prefix_caching": False} | options
    policy = Policy(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, **options)
    return Scheduler(policy, BlockManager(num_blocks, block_size, num_swap_blocks))


def submit(core: Scheduler, prompt: int | list[int], max_tokens=100, n=1, now=0.0, **options) -> SequenceGroup:
    tokens = list(range(10, 10 + prompt)) if isinstance(prompt, int) else prompt
    return core.submit(
        request_id="r",
        prompt_token_ids=array("i", tokens),
        n=n,
        max_tokens=max_tokens,
        stop_token_ids=[STOP],
        now=now,
        **options,
    )


def step(core: Scheduler, token: int = 7, now: float = 0.0) -> tuple[Plan, StepOutputs]:
    """Plans, and answers each sample with `token`."""
    plan = core.schedule(now)
    core.check()
    num_samples = sum(len(row.samples) for row in plan.rows)
    outputs = core.update(plan, StepResult([token] * num_samples, [-0.5] * num_samples))
    core.check()
    return plan, outputs


def rows(plan: Plan) -> list[tuple[int, int, int]]:
    """(request number, first position, tokens) of each row."""
    return [(row.group.number, row.start, row.num_new_tokens) for row in plan.rows]
