"""Sequences whose blocks are swapped out and in, through whole steps of a tiny model: not one bit may differ.

They move beside the steps: here at once, or at the last moment that they may. Each step asks for every token of the
vocabulary as a candidate, so that a step's answer is its whole distribution.
"""

from dataclasses import replace

import pytest
import torch
from late_streams import LateStreams
from worker_fakes import GREEDY, Row, candidates, step, tiny_checkpoint, tiny_runner, tokens

from protos.sampling_pb2 import Sampling
from worker.streams import HostStreams

PROMPT = [5, 17, 3, 88, 42, 9, 61, 2, 30, 11, 7]  # 2 full blocks of 4, and 3 tokens of a third
WHOLE = Sampling(temperature=0, top_p=1, num_candidates=97)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


ON_GPU = pytest.param(
    ("cuda", lambda: None),
    id="on a GPU",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: no side stream")],
)


@pytest.fixture(params=[("cpu", HostStreams), ("cpu", LateStreams), ON_GPU], ids=["at once", "at the last moment", ""])
def start(request, checkpoint):
    """Makes runners on one device, each with streams of its own."""
    device, make_streams = request.param
    return lambda: tiny_runner(checkpoint, device=torch.device(device), streams=make_streams())


@pytest.fixture
def runner(start):
    return start()


def forked(runner):
    """Request 1 as two sequences that share blocks 0 and 1, one token further; the first owns block 2, the other 3."""
    runner.execute(step(Row(1, PROMPT, [0, 1, 2]), new={1: WHOLE}))
    return runner.execute(step(*pair([0, 1], 2, 3, [[21], [22]], computed=11), copy=[2, 3]))


def pair(shared, first, second, two_tokens, computed, **tails):
    """The rows of both sequences: the blocks that they share, then each one's own."""
    return [
        Row(1, two_tokens[0], [*shared, first, *tails.get("first_tail", [])], computed, sequence_index=0),
        Row(1, two_tokens[1], [*shared, second, *tails.get("second_tail", [])], computed, sequence_index=1),
    ]


def intrude(runner, blocks):
    """Another request writes all slots of these blocks."""
    prompt = [(7 * number + 3) % 97 for number in range(4 * len(blocks))]
    runner.execute(step(Row(9, prompt, blocks), new={9: GREEDY}, finished=[9]))


def test_shared_blocks_that_others_overwrite_meanwhile_come_back_to_other_places_bit_by_bit(start, runner):
    undisturbed = start()
    assert candidates(forked(runner)) == candidates(forked(undisturbed))

    out = step(swap_out=[0, 7, 1, 2, 2, 5, 3, 0], step_id=3)  # each shared block once
    assert (runner.execute(out).step_id, tokens(runner.execute(step()))) == (3, [])
    intrude(runner, [0, 1, 2, 3])
    runner.execute(step(swap_in=[7, 33, 2, 12, 5, 0, 0, 40]))
    intrude(runner, [1, 2, 3, 4])

    for number in range(5):  # into the fourth block
        computed, next_tokens = 12 + number, [[30 + number], [60 + number]]
        here = pair([33, 12], 0, 40, next_tokens, computed, first_tail=[1, 9], second_tail=[50, 51])
        there = pair([0, 1], 2, 3, next_tokens, computed, first_tail=[20, 21], second_tail=[22, 23])
        found, expected = runner.execute(step(*here)), undisturbed.execute(step(*there))
        assert tokens(found) == tokens(expected)
        assert candidates(found) == candidates(expected)


def test_a_step_swaps_out_then_in_then_copies_then_computes(start, runner):
    expected = candidates(forked(start()))
    runner.execute(step(Row(1, PROMPT, [0, 1, 2]), new={1: WHOLE}))
    # Block 2 by way of the CPU to 30, from there to 31 and 32; then others begin in 2 and in 30.
    rows = pair([0, 1], 31, 32, [[21], [22]], computed=11)
    others = [Row(2, [4, 5, 6], [2]), Row(3, [4, 5, 6, 7], [30])]
    everything = step(
        *rows,
        *others,
        new={2: GREEDY, 3: GREEDY},
        swap_out=[2, 5],
        swap_in=[5, 30],
        copy=[30, 31, 30, 32],
    )
    found = candidates(runner.execute(everything))
    assert [token for token, _ in found] == [token for token, _ in expected]
    assert [value for _, value in found] == pytest.approx([value for _, value in expected], abs=1e-5)


def test_each_direction_is_one_call_for_all_blocks_of_all_layers(runner):
    moved = []

    def swap_blocks(source, destination, block_pairs):
        moved.append((source.shape[2], destination.shape[2], block_pairs.tolist()))

    runner._cache._operations = replace(runner._cache._operations, swap_blocks=swap_blocks)
    runner.execute(step(swap_out=[9, 1, 8, 2, 7, 3], swap_in=[4, 5, 1, 6]))
    assert moved == [(64, 8, [[9, 1], [8, 2], [7, 3]]), (8, 64, [[4, 5], [1, 6]])]


def test_steps_in_flight_see_the_blocks_as_the_steps_before_leave_them(start, runner):
    undisturbed = start()
    expected = [candidates(undisturbed.execute(request)) for request in (prompt(), decode([0, 1, 2]))]
    steps = [runner.launch(prompt())]
    steps.append(runner.launch(step(swap_out=[0, 5, 1, 6, 2, 7])))
    steps.append(runner.launch(step(Row(9, [4] * 12, [0, 1, 2]), new={9: GREEDY}, finished=[9])))
    steps.append(
        runner.launch(step(Row(9, [5] * 8, [20, 21]), new={9: GREEDY}, swap_out=[2, 1], swap_in=[5, 20, 6, 21]))
    )
    steps.append(runner.launch(step(swap_in=[7, 3, 5, 0, 6, 1])))
    steps.append(runner.launch(decode([0, 1, 3])))
    found = [candidates(in_flight.result()) for in_flight in steps]
    assert [found[0], found[-1]] == expected


def prompt():
    return step(Row(1, PROMPT, [0, 1, 2]), new={1: WHOLE})


def decode(blocks):
    return step(Row(1, [40], blocks, computed=11))


def test_a_step_waits_for_a_swap_only_if_it_touches_what_is_moved(checkpoint):
    streams = LateStreams()
    runner = tiny_runner(checkpoint, streams=streams)
    for request, waits in (
        (step(Row(1, PROMPT, [0, 1, 2]), new={1: GREEDY}, swap_out=[30, 5]), 0),
        (step(Row(1, [-1], [0, 1, 2], computed=11), swap_in=[5, 31]), 0),
        (step(Row(1, [-1], [0, 1, 2, 33], computed=12), copy=[2, 32]), 0),
        (step(copy=[31, 32]), 1),
        (step(Row(2, [5], [30]), new={2: GREEDY}), 0),  # behind the later swap it is behind the earlier one too
        (step(Row(1, [-1], [0, 1, 34, 33], computed=13), swap_in=[5, 34]), 1),
    ):
        before = streams.num_waits
        runner.launch(request)
        assert streams.num_waits - before == waits


def test_a_step_is_finished_when_its_swap_is_too(checkpoint):
    runner = tiny_runner(checkpoint, streams=LateStreams())
    swapping = runner.launch(step(Row(1, PROMPT, [0, 1, 2]), new={1: GREEDY}, swap_out=[30, 5]))
    behind = runner.launch(step(Row(1, [-1], [0, 1, 2], computed=11)))
    behind.result()
    assert behind.is_finished
    assert not swapping.is_finished
    swapping.result()
    assert swapping.is_finished


@pytest.mark.parametrize("swaps", [{"swap_out": [0, 1]}, {"swap_in": [1, 0]}, {"swap_out": [0, 1], "swap_in": [2, 3]}])
def test_the_time_of_swaps_is_reported_as_part_of_the_preparation(runner, swaps):
    timings = runner.execute(step(**swaps)).timings
    assert 0 < timings.swap_ms <= timings.prepare_ms


def test_a_step_without_swaps_reports_no_time_for_them(runner):
    timings = runner.execute(step(Row(1, PROMPT, [0, 1, 2]), new={1: GREEDY}, copy=[5, 6])).timings
    assert timings.swap_ms == 0
    assert timings.prepare_ms > 0
