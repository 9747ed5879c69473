"""Prefix caching in the core: who finds whose blocks, what is evicted first, and what is never found."""

from array import array

import pytest
from scheduler_model import run

from protos.sampling_pb2 import Sampling
from scheduler.block_manager import BlockManager
from scheduler.plan import StepResult
from scheduler.policy import Policy
from scheduler.prefix_cache import PrefixCache
from scheduler.scheduler import Scheduler
from scheduler.sequence import Progress, SequenceGroup, Status

LONG = list(range(10, 22))  # twelve tokens: three blocks of four


def make(num_blocks=20, budget=32, **policy) -> Scheduler:
    options = {"max_num_seqs": 8, "max_waiting_requests": 100, "watermark": 0.0} | policy
    return Scheduler(Policy(budget, **options), BlockManager(num_blocks, block_size=4))


def submit(core: Scheduler, prompt: list[int], max_tokens=1, **options) -> SequenceGroup:
    return core.submit(
        request_id="r", prompt_token_ids=array("i", prompt), n=1, max_tokens=max_tokens, now=0.0, **options
    )


def step(core: Scheduler, token: int = 7):
    plan = core.schedule(0.0)
    core.check()
    num_samples = sum(len(row.samples) for row in plan.rows)
    core.update(plan, StepResult([token] * num_samples, [0.0] * num_samples))
    core.check()
    return [(row.group.number, row.start, row.num_new_tokens) for row in plan.rows]


def test_a_prompt_seen_before_is_computed_only_behind_its_full_blocks():
    core = make()
    first = submit(core, [*LONG, 1])
    assert step(core) == [(1, 0, 13)]
    assert core.blocks.num_idle == 3
    second = submit(core, [*LONG, 2])
    assert step(core) == [(2, 12, 1)]
    assert (first.num_cached_prompt_tokens, second.num_cached_prompt_tokens) == (0, 12)
    assert (core.num_prompt_tokens, core.num_looked_up_tokens, core.num_found_tokens) == (26, 26, 12)


def test_the_last_token_is_always_computed_though_its_block_is_there():
    core = make()
    submit(core, LONG)
    step(core)
    submit(core, LONG)
    assert step(core) == [(2, 8, 4)]


def test_requests_admitted_in_one_step_share_what_the_first_of_them_computes():
    core = make()
    for last in (1, 2, 3):
        submit(core, [*LONG, last], max_tokens=2)
    assert step(core) == [(1, 0, 13), (2, 12, 1), (3, 12, 1)]
    assert core.blocks.num_shared == 3


def test_only_blocks_that_the_step_fills_are_shared_in_it():
    core = make(budget=8)
    submit(core, [*LONG, 1], max_tokens=2)
    assert step(core) == [(1, 0, 8)]
    core = make(budget=11)
    submit(core, [*LONG, 1, 2], max_tokens=2)
    step(core)  # eleven tokens: the third block is not full
    submit(core, [*LONG, 3], max_tokens=2)
    assert step(core) == [(1, 11, 3), (2, 12, 1)], "this step fills it"


def test_other_tokens_before_the_same_block_are_another_content():
    core = make()
    submit(core, LONG)
    step(core)
    submit(core, [99, *LONG[1:]])
    assert step(core) == [(2, 0, 12)]


def test_tenants_with_different_salts_share_nothing():
    core = make()
    submit(core, LONG, salt="a")
    step(core)
    submit(core, LONG, salt="b")
    assert step(core) == [(2, 0, 12)]
    submit(core, LONG, salt="a")
    assert step(core) == [(3, 8, 4)]


def test_generated_tokens_are_found_again():
    core = make()
    submit(core, LONG[:4], max_tokens=6)
    for _ in range(6):
        step(core, token=7)
    submit(core, [*LONG[:4], 7, 7, 7, 7, 5])
    assert step(core) == [(2, 8, 1)]


def test_output_that_is_found_again_is_not_counted_as_prompt():
    core = make()
    submit(core, LONG, max_tokens=6)
    for _ in range(6):
        step(core, token=7)
    group = submit(core, LONG, max_tokens=9, progress=[Progress(array("i", [7] * 6))])
    assert step(core) == [(2, 16, 2)]
    assert group.num_cached_prompt_tokens == core.num_found_tokens == 12


def test_a_preempted_sequence_finds_its_own_blocks_again():
    core = make(num_blocks=5)
    submit(core, LONG[:7], max_tokens=6)
    new = submit(core, [90 + token for token in range(7)], max_tokens=4)
    while new.num_preemptions == 0:
        step(core)
    num_tokens = new.sequences[0].num_tokens
    while new.status is not Status.RUNNING:
        planned = step(core)
    assert planned == [(2, 8, num_tokens - 8)], "both its full blocks were left alone"


def test_the_block_left_longest_ago_is_evicted_first_and_of_one_sequence_the_deepest():
    core = make(num_blocks=7)
    submit(core, LONG)  # blocks of three contents, left first
    step(core)
    submit(core, [token + 50 for token in LONG])
    step(core)
    assert core.blocks.num_idle == 6
    submit(core, [200, 201, 202, 203, 204])  # two blocks: the free one, and the deepest of the oldest
    step(core)
    submit(core, [*LONG, 1])
    assert step(core)[0][1] == 8, "two of the three are still there"


def test_a_shared_idle_block_is_not_counted_twice_at_admission():
    core = make(num_blocks=4)
    submit(core, LONG)
    step(core)
    submit(core, [*LONG, 1, 2, 3])  # needs four blocks, three of which are idle and its own
    assert step(core) == [(2, 12, 3)]


def test_a_lost_worker_takes_all_contents_with_it():
    core = make()
    submit(core, LONG)
    step(core)
    core.requeue_running()
    core.check()
    assert core.blocks.num_idle == 0
    submit(core, LONG)
    assert step(core) == [(2, 0, 12)]


def test_what_a_failed_sample_came_from_is_not_found_again():
    core = make()
    submit(core, LONG)
    plan = core.schedule(0.0)
    core.update(plan, StepResult([0], [0.0], failed=[0]))
    core.check()
    submit(core, LONG)
    assert step(core) == [(2, 0, 12)]


def test_switched_off_nothing_is_kept():
    core = make(prefix_caching=False)
    submit(core, LONG)
    step(core)
    assert core.blocks.num_idle == 0
    submit(core, LONG)
    assert step(core) == [(2, 0, 12)]


def test_two_blocks_of_one_content_keep_it_in_the_first():
    cache = PrefixCache()
    number = cache.add(5, "", b"tokens")
    assert cache.add(6, "", b"tokens") == number
    assert cache.find("", b"tokens") == (5, number)
    assert not cache.leave(6), "the second has nothing to keep"
    with pytest.raises(AssertionError, match="was written"):
        cache.add(5, "", b"others")


def test_a_group_that_was_too_large_comes_in_when_its_prefix_is_there_to_share():
    core = make(num_blocks=8, budget=8)
    submit(core, [*LONG, 1, 2, 3, 4, 5, 6, 7, 8], max_tokens=9)  # five blocks, computed in three steps
    sharing = submit(core, [*LONG, 1, 2, 3, 4, 9], max_tokens=9)
    step(core)
    step(core)
    assert sharing.status is Status.WAITING, "five blocks of its own are not free"
    step(core)
    assert sharing.status is Status.RUNNING, "with four shared ones it needs two"


def test_a_group_that_lacks_a_block_comes_in_when_another_one_has_filled_it():
    core = make(num_blocks=5)
    submit(core, LONG, max_tokens=6)
    step(core)
    sharing = submit(core, [*LONG, 7, 7, 7, 7, 1], max_tokens=3)  # five blocks
    for _ in range(3):
        step(core)
        assert sharing.status is Status.WAITING, "one is free, and one more is needed beside the first three"
    step(core)
    assert sharing.status is Status.RUNNING, "four are there to share"


@pytest.mark.parametrize(("wanted", "num_looked_up"), [(None, 8), (0, 0), (1, 0)])
def test_a_prompt_whose_log_probabilities_are_wanted_is_not_looked_up_and_counts_as_a_prompt(wanted, num_looked_up):
    core = make(prefix_caching=True)
    submit(core, LONG[:8], sampling=Sampling(num_prompt_tokens=8, num_prompt_logprobs=wanted))
    core.schedule(0.0)
    assert (core.num_prompt_tokens, core.num_looked_up_tokens) == (8, num_looked_up)


def test_a_prompt_that_was_told_of_is_looked_up_when_it_is_computed_again():
    core = make()
    group = submit(core, LONG, max_tokens=9, sampling=Sampling(num_prompt_tokens=12, num_prompt_logprobs=0))
    plan = core.schedule(0.0)
    core.update(plan, run(plan))
    core.preempt(group)
    assert step(core) == [(1, 12, 1)]
