"""Sums and gathers of processes through shared memory; here each process is a thread with a mapping of its own."""

from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from kernels import cpu_meeting  # noqa: E402
from kernels.cpu import CpuKernels, runnable_levels  # noqa: E402
from worker.ranks import Place, Ranks  # noqa: E402


def meetings(size, level=None, timeout_s=20.0):
    descriptor = cpu_meeting.shared_memory(size)
    return [CpuKernels(level).meeting(descriptor, rank, size, timeout_s) for rank in range(size)]


def at_all(meetings, act):
    """The results of `act(rank, meeting)` in all of them at the same time."""
    with ThreadPoolExecutor(len(meetings)) as pool:
        return list(pool.map(act, range(len(meetings)), meetings))


@pytest.mark.parametrize("level", runnable_levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_get_the_same_sum_added_in_float32_in_the_order_of_the_ranks(level, dtype):
    torch.manual_seed(0)
    parts = torch.randn(3, 7, 33).to(dtype)
    expected = (parts[0].float() + parts[1].float() + parts[2].float()).to(dtype)

    def act(rank, meeting):
        mine = parts[rank].clone()
        meeting.sum(mine)
        return mine

    assert all(torch.equal(got, expected) for got in at_all(meetings(3, level), act))


def test_many_sums_in_a_row_do_not_mix():
    def act(rank, meeting):
        sums = []
        for turn in range(2000):
            x = torch.full((5,), float(rank + turn))
            meeting.sum(x)
            sums.append(x[0].item())
        return sums

    assert at_all(meetings(2), act) == [[2.0 * turn + 1 for turn in range(2000)]] * 2


def test_a_tensor_larger_than_the_room_is_summed_in_pieces(monkeypatch):
    monkeypatch.setattr(cpu_meeting, "_ROOM", 256)

    def act(rank, meeting):
        x = torch.arange(1000, dtype=torch.float32) * (rank + 1)
        meeting.sum(x)
        return x

    for got in at_all(meetings(2), act):
        assert torch.equal(got, torch.arange(1000, dtype=torch.float32) * 3)


def test_rows_of_different_sizes_are_gathered_side_by_side(monkeypatch):
    monkeypatch.setattr(cpu_meeting, "_ROOM", 64)
    parts = [torch.randn(9, size) for size in (5, 6, 3)]
    for got in at_all(meetings(3), lambda rank, meeting: meeting.gather(parts[rank], [5, 6, 3])):
        assert torch.equal(got, torch.cat(parts, dim=1))


def test_ranks_that_drew_different_tokens_go_on_with_those_of_the_first():
    def act(rank, meeting):
        return Ranks(Place(rank, 3), meeting=meeting).agree(torch.tensor([10, 20]) + rank).tolist()

    assert at_all(meetings(3), act) == [[10, 20]] * 3


def test_a_rank_that_does_not_come_is_named():
    first, _ = meetings(2, timeout_s=0.05)
    with pytest.raises(TimeoutError, match=r"rank 1 did not come within 0\.05 s"):
        first.sum(torch.ones(3))


def test_tensors_that_do_not_fit_are_refused():
    (alone,) = meetings(1)
    with pytest.raises(ValueError, match="contiguous"):
        alone.sum(torch.ones(4, 4).t())
    with pytest.raises(ValueError, match="rows of 4"):
        alone.gather(torch.ones(2, 3), [4])
