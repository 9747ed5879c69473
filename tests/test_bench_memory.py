"""The memory bench: its traces, the allocators and reservations it compares with, and what it counts."""

import math
import random
import statistics
from dataclasses import replace

import pytest
from rich.console import Console

from bench import trace
from bench.candidates import MEASURED
from bench.contiguous import BuddyAllocator, FirstFitAllocator, Reservation, power_of_two
from bench.contiguous import replay as replay_contiguous
from bench.kv_memory import contiguous_rows, memory_table, paged_row, sharing_row, sharing_table
from bench.paged import Decoding, Pool, Replay
from bench.trace import ALPACA, SHAREGPT, TraceRequest

SMALL = Pool(num_slots=1024, block_size=4, max_num_seqs=32, max_num_batched_tokens=64, stride=1)


def requests(count=40, prompt=30, output=50) -> list[TraceRequest]:
    return [TraceRequest(i * 0.01, prompt + i % 7, output + i % 5) for i in range(count)]


@pytest.mark.parametrize("dataset", [SHAREGPT, ALPACA])
def test_a_trace_has_the_means_of_the_paper(dataset):
    made = trace.make(dataset, 30_000)
    assert statistics.mean(r.num_prompt_tokens for r in made) == pytest.approx(dataset.input.mean, rel=0.03)
    assert statistics.mean(r.num_output_tokens for r in made) == pytest.approx(dataset.output.mean, rel=0.03)
    assert made[-1].arrival_s == pytest.approx(30_000 / dataset.rate, rel=0.03)
    assert all(r.num_prompt_tokens >= 1 and r.num_output_tokens >= 1 for r in made)
    assert max(r.num_prompt_tokens + r.num_output_tokens for r in made) <= trace.MAX_TOKENS


def test_a_trace_is_the_same_every_time():
    assert trace.make(ALPACA, 50) == trace.make(ALPACA, 50) != trace.make(ALPACA, 50, seed=1)


def test_each_version_of_orca_reserves_what_it_knows():
    request = TraceRequest(0.0, num_prompt_tokens=100, num_output_tokens=25)
    assert Reservation.MAX.num_slots(request) == 2048
    assert Reservation.POW2.num_slots(request) == 100 + 32  # the paper's own example
    assert Reservation.ORACLE.num_slots(request) == 125
    assert [power_of_two(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


def test_first_fit_takes_the_first_gap_that_is_large_enough():
    memory = FirstFitAllocator(100)
    assert [memory.allocate(30), memory.allocate(20), memory.allocate(30)] == [0, 30, 50]
    memory.free(0)
    assert memory.allocate(25) == 0
    assert memory.allocate(10) == 80  # 5 are left of the first gap
    assert memory.allocate(5) == 25


def test_first_fit_joins_gaps_that_touch():
    memory = FirstFitAllocator(90)
    starts = [memory.allocate(30) for _ in range(3)]
    assert memory.allocate(1) is None
    memory.free(starts[0])
    memory.free(starts[2])
    assert memory.allocate(31) is None  # 60 are free, but in two pieces: external fragmentation
    memory.free(starts[1])
    assert memory.allocate(90) == 0


def test_a_buddy_allocator_rounds_up_splits_and_joins():
    memory = BuddyAllocator(64)
    assert memory.allocate(9) == 0  # 16
    assert memory.allocate(16) == 16
    assert memory.allocate(17) == 32  # 32
    assert memory.allocate(1) is None
    memory.free(0)
    assert memory.allocate(17) is None  # 16 are free
    memory.free(16)
    assert memory.allocate(32) == 0  # two halves have become one
    memory.free(0)
    memory.free(32)
    assert memory.allocate(64) == 0


def test_a_pool_whose_size_is_no_power_of_two_is_several_runs():
    memory = BuddyAllocator(15_680)
    assert sum(memory.allocate(2048) is not None for _ in range(10)) == 7
    assert memory.allocate(1024) is not None


def test_an_allocator_never_hands_out_a_slot_twice():
    rng = random.Random(3)
    for make in (FirstFitAllocator, BuddyAllocator):
        memory, taken = make(1000), {}
        for _ in range(2000):
            if taken and rng.random() < 0.5:
                start = rng.choice(list(taken))
                memory.free(start)
                del taken[start]
            else:
                size = rng.randrange(1, 100)
                start = memory.allocate(size)
                if start is not None:
                    assert all(start + size <= other or other + length <= start for other, length in taken.items())
                    assert start + size <= 1000
                    taken[start] = size
        for start in taken:
            memory.free(start)
        assert memory.allocate(512) is not None


def test_the_categories_add_up_and_max_runs_as_many_as_fit():
    for row in contiguous_rows(ALPACA, requests(200), Pool(num_slots=5000)):
        shares = row.shares
        parts = (shares.used, shares.reservation, shares.internal, shares.external)
        assert sum(parts) == pytest.approx(1.0)
        assert all(part >= 0 for part in parts)
        assert shares.num_steps > 10
        if row.name == "Orca (Max)":
            assert shares.num_running == pytest.approx(2.0, abs=0.1)
        if row.name == "Orca (Oracle)":
            assert shares.internal == 0


def test_one_request_fills_its_reservation_slot_by_slot():
    two = [TraceRequest(0.0, 4, 4), TraceRequest(0.0, 4, 4)]  # the second waits for the first one's 8 slots
    shares = replay_contiguous(two, Reservation.ORACLE, FirstFitAllocator(10), num_slots=10, max_num_seqs=2, step_s=1.0)
    assert shares.num_steps == 4
    assert shares.used == pytest.approx((4 + 5 + 6 + 7) / 4 / 10)
    assert shares.reservation == pytest.approx(0.8 - shares.used)
    assert shares.external == pytest.approx(0.2)
    assert shares.makespan_s == 8.0


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_small_trace_is_answered_completely_and_fills_its_blocks_with_tokens(prefix_caching):
    row = paged_row(ALPACA, requests(), replace(SMALL, prefix_caching=prefix_caching))
    shares = row.shares
    assert shares.used + shares.reservation + shares.internal + shares.external == pytest.approx(1.0)
    assert row.used_of_allocated > 0.9
    assert row.cached <= shares.external + 1e-9
    assert shares.num_steps > 10


def test_larger_blocks_waste_more():
    rows = [paged_row(ALPACA, requests(), replace(SMALL, block_size=size)) for size in (4, 16)]
    assert rows[0].shares.internal < rows[1].shares.internal


def test_sharing_saves_blocks_and_beams_save_more_than_samples():
    few = requests(12, prompt=40, output=20)
    one = Replay(few, SMALL).run()
    assert one.saved_by_sharing == 0
    parallel = Replay(few, SMALL, Decoding(n=4)).run()
    beam = Replay(few, SMALL, Decoding(beam_width=4)).run()
    assert parallel.num_finished == beam.num_finished == 12
    assert 0.2 < parallel.saved_by_sharing < beam.saved_by_sharing < 0.75  # 1 - 1/4 at most


def test_a_sharing_row_names_its_method():
    row = sharing_row(ALPACA, requests(3), Decoding(beam_width=2), "measured")
    assert (row.method, row.candidates) == ("beam width 2", "measured")


def test_a_trace_whose_requests_never_wait_has_no_figures():
    console = Console(record=True, width=160)
    console.print(memory_table([paged_row(ALPACA, requests(3), Pool())]))
    console.print(sharing_table([sharing_row(ALPACA, requests(3), Decoding(n=2))]))
    memory, sharing = (line.split() for line in console.export_text().splitlines() if line.startswith("Alpaca-like"))
    assert memory == ["Alpaca-like", "Pagewire", "16", *"------", "0"]
    assert sharing == ["Alpaca-like", "parallel", "n=2", "-", "6.1-9.8", "-", "0"]


def test_candidates_come_best_first_and_are_a_distribution():
    logprobs = MEASURED.draw(random.Random(0), 8)
    assert len(logprobs) == 8
    assert logprobs == sorted(logprobs, reverse=True)
    assert sum(map(math.exp, logprobs)) == pytest.approx(1.0)


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the bench extra")
    from bench.figure import draw

    memory = [*contiguous_rows(ALPACA, requests(5), Pool(num_slots=5000)), paged_row(ALPACA, requests(5), Pool())]
    sharing = [sharing_row(ALPACA, requests(3), Decoding(n=2))]
    draw(memory, sharing, tmp_path / "figure.svg")
    assert "token states" in (tmp_path / "figure.svg").read_text()
