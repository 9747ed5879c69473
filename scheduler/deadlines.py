"""Deadlines: which groups nobody waits for any more, and which cannot have a token in time."""

import heapq

from scheduler.block_manager import BlockManager
from scheduler.plan import Dropped
from scheduler.preemption import Rates
from scheduler.sequence import SequenceGroup


class Deadlines:
    """When each group has to be checked: at its deadline; or, while it waits, when its prompt has to begin to meet it.

    The times are kept in order, so a check costs nothing until the first has come, however many groups wait.
    """

    def __init__(self) -> None:
        # (time, the entry's number, group). The number orders entries of one time; only a group's last entry counts.
        self._heap: list[tuple[float, int, SequenceGroup]] = []
        self._num_entries = 0

    @property
    def next_time(self) -> float | None:
        """The first time at which there is a group to check; None for never."""
        while self._heap and not _counts(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def watch(self, group: SequenceGroup, rates: Rates, num_live: int) -> None:
        """Adds a group that has a deadline; `num_live` is how many groups have not ended."""
        if len(self._heap) > 2 * num_live + 64:
            self._heap = [entry for entry in self._heap if _counts(entry)]
            heapq.heapify(self._heap)
        self._push(_latest_start(group, 0, rates), group)

    def forget(self, group: SequenceGroup) -> None:
        """Stops checking a group, until it is watched again."""
        group.deadline_entry = 0

    def take_late(self, now: float, blocks: BlockManager, rates: Rates) -> list[Dropped]:
        """Takes out the groups whose deadline has passed, and those that wait and cannot have a token by it."""
        late = []
        while (time := self.next_time) is not None and time <= now:
            group = heapq.heappop(self._heap)[2]
            assert group.deadline is not None
            num_cached_tokens, start = 0, group.deadline
            if group.first_scheduled is None and now < group.deadline:
                # The rate, and what is in the prefix cache, may have changed since.
                num_cached_tokens = len(blocks.match(group.prompt_token_ids, group.salt)) * blocks.block_size
                start = _latest_start(group, num_cached_tokens, rates)
            if start > now:
                self._push(start, group)
            else:
                late.append(Dropped(group, _why(group, num_cached_tokens, rates, now)))
        return late

    def _push(self, time: float, group: SequenceGroup) -> None:
        self._num_entries += 1
        group.deadline_entry = self._num_entries
        heapq.heappush(self._heap, (time, self._num_entries, group))


def _counts(entry: tuple[float, int, SequenceGroup]) -> bool:
    _, number, group = entry
    return bool(group.live) and group.deadline_entry == number


def too_late(group: SequenceGroup, num_missing: int, rates: Rates, now: float) -> Dropped | None:
    """The drop of a group about to be admitted, if computing `num_missing` of its tokens would miss its deadline."""
    rate = rates.prefill_tokens_per_s
    if group.deadline is None or group.first_scheduled is not None or not rate:
        return None
    if now + num_missing / rate <= group.deadline:
        return None
    return Dropped(group, _why(group, group.num_prompt_tokens - num_missing, rates, now))


def _latest_start(group: SequenceGroup, num_cached_tokens: int, rates: Rates) -> float:
    """When the group's prompt has to begin for its first token to come by its deadline, at the measured rate."""
    assert group.deadline is not None
    if not rates.prefill_tokens_per_s:
        return group.deadline
    return group.deadline - (group.num_prompt_tokens - num_cached_tokens) / rates.prefill_tokens_per_s


def _why(group: SequenceGroup, num_cached_tokens: int, rates: Rates, now: float) -> str:
    assert group.deadline is not None
    waited_ms, left_ms = (now - group.arrival) * 1e3, (group.deadline - now) * 1e3
    if left_ms <= 0:
        return f"its deadline passed after {waited_ms:.0f} ms"
    rate, num_tokens = rates.prefill_tokens_per_s, group.num_prompt_tokens - num_cached_tokens
    return (
        f"its deadline cannot be met: it has waited {waited_ms:.0f} ms, {left_ms:.0f} ms are left, and computing "
        f"{num_tokens} tokens of its prompt takes {num_tokens / rate * 1e3:.0f} ms at the measured {rate:.0f} tokens/s"
    )
