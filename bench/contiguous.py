"""Contiguous KV memory, for comparison: the reservation policies that PagedAttention was measured against.

Kwon et al., SOSP'23, section 6.1: an Orca that keeps the KV of a request in one contiguous run of slots, reserved
whole when the request begins, in memory that a buddy allocator hands out. Its three versions differ in what they know:

    max      reserves the model's greatest length, 2,048 slots
    pow2     reserves the prompt and the output rounded up to a power of two (25 -> 32), so over-reserves at most 2x
    oracle   reserves the prompt and the output exactly, as if it knew

Slots fall into the categories of the paper's figure 2: token states, reservation (slots that the request will use),
internal fragmentation (reserved slots that it never uses), external fragmentation and others (slots outside all
reservations: what the allocator rounds up, and room that is too small, or in too small pieces, for the next request).
"""

import enum
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from bench.trace import MAX_TOKENS, TraceRequest


class Reservation(enum.Enum):
    """How many slots a request gets."""

    MAX = "Orca (Max)"
    POW2 = "Orca (Pow2)"
    ORACLE = "Orca (Oracle)"

    def num_slots(self, request: TraceRequest) -> int:
        """Slots that are reserved for `request`; never more than the model's greatest length."""
        match self:
            case Reservation.MAX:
                return MAX_TOKENS
            case Reservation.POW2:
                return min(MAX_TOKENS, request.num_prompt_tokens + power_of_two(request.num_output_tokens))
        return request.num_prompt_tokens + request.num_output_tokens


class Allocator(Protocol):
    """Hands out contiguous runs of slots."""

    def allocate(self, num_slots: int) -> int | None:
        """The first slot of a free run, which is taken; None where there is none."""

    def free(self, start: int) -> None:
        """Gives a run back."""


class FirstFitAllocator:
    """Takes the first gap that is large enough; gaps that touch are one."""

    def __init__(self, num_slots: int) -> None:
        # (start, end) of free runs, by start; no two touch.
        self._gaps = [(0, num_slots)]
        self._ends: dict[int, int] = {}

    def allocate(self, num_slots: int) -> int | None:
        """The start of the first gap of `num_slots`, which is taken; None where there is none."""
        for place, (start, end) in enumerate(self._gaps):
            if end - start >= num_slots:
                self._gaps[place : place + 1] = [(start + num_slots, end)] if end - start > num_slots else []
                self._ends[start] = start + num_slots
                return start
        return None

    def free(self, start: int) -> None:
        """Gives a run back, and joins it with its free neighbours."""
        end = self._ends.pop(start)
        place = sum(gap_start < start for gap_start, _ in self._gaps)
        if place < len(self._gaps) and self._gaps[place][0] == end:
            end = self._gaps.pop(place)[1]
        if place and self._gaps[place - 1][1] == start:
            place -= 1
            start = self._gaps.pop(place)[0]
        self._gaps.insert(place, (start, end))


class BuddyAllocator:
    """Runs of power-of-two sizes at multiples of their size; when both halves of a run are free, they are joined.

    A pool whose size is no power of two begins as several runs, the largest first.
    """

    def __init__(self, num_slots: int) -> None:
        self._free: dict[int, set[int]] = {}
        self._sizes: dict[int, int] = {}
        start = 0
        for bit in reversed(range(num_slots.bit_length())):
            if num_slots >> bit & 1:
                self._free[1 << bit] = {start}
                start += 1 << bit

    def allocate(self, num_slots: int) -> int | None:
        """The start of a run of the next power of two, split off the smallest free one that holds it, or None."""
        wanted = power_of_two(num_slots)
        size = min((size for size, starts in self._free.items() if size >= wanted and starts), default=None)
        if size is None:
            return None
        start = min(self._free[size])
        self._free[size].remove(start)
        while size > wanted:
            size //= 2
            self._free.setdefault(size, set()).add(start + size)
        self._sizes[start] = size
        return start

    def free(self, start: int) -> None:
        """Gives a run back, and joins it with its other half, as often as that is free too."""
        size = self._sizes.pop(start)
        while (start ^ size) in self._free.get(size, ()):
            self._free[size].remove(start ^ size)
            start &= ~size
            size *= 2
        self._free.setdefault(size, set()).add(start)


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the pool's slots, averaged over steps, in the categories of figure 2; they add up to 1.

    Attributes:
        num_running: requests that hold memory, on average.
        num_steps: how many steps the averages are over: those in which a request had to wait.
        makespan_s: simulated time until all requests were answered.
    """

    used: float
    reservation: float
    internal: float
    external: float
    num_running: float
    num_steps: int
    makespan_s: float


class Averages:
    """Sums of slots by category, over the steps that count."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._sums = [0, 0, 0, 0]
        self._num_steps = 0

    def add(self, used: int, reservation: int, internal: int, num_running: int) -> None:
        """Counts one step's slots and requests."""
        for place, value in enumerate((used, reservation, internal, num_running)):
            self._sums[place] += value
        self._num_steps += 1

    def shares(self, makespan_s: float) -> Shares:
        """The averages; all slots that were in no other category are external fragmentation and others."""
        num_steps = max(1, self._num_steps)
        *slots, num_running = (total / num_steps for total in self._sums)
        used, reservation, internal = (value / self._num_slots for value in slots)
        external = 1 - used - reservation - internal
        return Shares(used, reservation, internal, external, num_running, self._num_steps, makespan_s)


@dataclass(slots=True)
class _Running:
    request: TraceRequest
    start: int
    num_reserved: int
    num_outputs: int = 0


def replay(
    trace: Iterable[TraceRequest],
    reservation: Reservation,
    allocator: Allocator,
    *,
    num_slots: int,
    max_num_seqs: int,
    step_s: float,
) -> Shares:
    """Serves the trace first come first served, step by step (Orca, OSDI'22), and averages what the memory holds.

    A request computes its prompt and its first token in its first step, then one token a step. Memory is looked at when
    a step is computed, before what ends with it is freed, and counted while a request waits.
    """
    coming = deque(trace)
    waiting: deque[TraceRequest] = deque()
    running: list[_Running] = []
    averages = Averages(num_slots)
    now = 0.0
    while coming or waiting or running:
        if not waiting and not running:
            now = max(now, coming[0].arrival_s)
        while coming and coming[0].arrival_s <= now:
            waiting.append(coming.popleft())
        while waiting and len(running) < max_num_seqs:
            num_reserved = reservation.num_slots(waiting[0])
            start = allocator.allocate(num_reserved)
            if start is None:
                assert running, "a request fits into no empty pool"
                break
            running.append(_Running(waiting.popleft(), start, num_reserved))
        now += step_s
        for one in running:
            one.num_outputs += 1
        if waiting:
            _count(averages, running)
        for one in running:
            if one.num_outputs == one.request.num_output_tokens:
                allocator.free(one.start)
        running = [one for one in running if one.num_outputs < one.request.num_output_tokens]
    return averages.shares(now)


def _count(averages: Averages, running: list[_Running]) -> None:
    # The KV of the last sampled token is computed by the next step.
    used = sum(one.request.num_prompt_tokens + one.num_outputs - 1 for one in running)
    needed = sum(one.request.num_prompt_tokens + one.request.num_output_tokens for one in running)
    reserved = sum(one.num_reserved for one in running)
    averages.add(used, needed - used, reserved - needed, len(running))


def power_of_two(number: int) -> int:
    """The least power of two that is not less than `number`."""
    return 1 << (number - 1).bit_length()
