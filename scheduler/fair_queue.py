"""The waiting queue of all tenants: whose turn it is, so that each is served by its weight while several wait.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI'24, section 4): a tenant's
counter is the service that it got, divided by its weight, and the tenant with the least counter has the next turn. A
prompt is charged when it is admitted, as far as it is not in the prefix cache; output is charged as it is planned. What
is computed again after a preemption is no service, and is free. Within a tenant the order is that of
`waiting_queue.py`; with one tenant, there is no other.

A tenant for which nothing waited gets no credit for that time: its counter is raised to the clock when it comes back.
The clock is not the least counter, as in the paper, where tenants that come for one request each could go ahead of one
that waits for ever. It is the greatest counter that had a turn or was charged for an admission (as in self-clocked fair
queueing, Golestani, INFOCOM'94), so each admission moves it on. No other tenant's share shrinks while one is idle:
those that wait have turns.

WHY THE SHARES ARE FAIR. Let U be the most service, divided by weight, that is booked for one tenant at a time: what its
admitted groups may still output, and the prompt and output of one more group. From one of its turns to the next, a
tenant's counter c rises by at most U, since only what is booked is charged.

1. c <= clock + U for every tenant: at its last turn, the clock was set to its counter or above.
2. clock <= c + U for every tenant that waits. Let k be the tenant at whose counter the clock stands. At k's turn its
   counter was the least, so at most c, and with k's admission it became at most U more; a tenant that came to wait
   since was raised to the clock.
3. So c - c' <= 2 U for any two tenants that wait; and over any time for which both do, the service that they get,
   divided by weight, differs by at most 4 U. From a common start it is U: a tenant that has a turn has the least
   counter then.

The paper's bound is 2 U, for memory reserved up to the end (theorem 4.4). A tenant keeps its turn until its group is
admitted, even if more is charged to it meanwhile: so what the group lacks need not be looked up at each step.
Preemption goes by rank, not by tenant: it must spare the group that has to finish first (`waiting_queue.py`). The bound
holds whichever group is the victim, of whatever priority; its tenant's counter stands still, so that the tenant's next
turn comes the sooner.

WHY NOTHING STARVES, WITH TENANTS. Let G be the first group of its tenant; `waiting_queue.py` says why it gets there.

1. Until G is admitted, its tenant's counter rises by at most U, so it stays below some C, and so do the counters of
   tenants whose groups are admitted before G. Each group admitted for the first time raises one of these counters by at
   least `1 / weight`. Only finitely many tenants wait below the clock, and one that comes to wait is raised to it: so
   after finitely many admissions there is one at the clock or above, and it moves the clock by that much. After
   finitely many such moves the clock is past C, and no tenant that comes then can go before G.
2. Groups that were admitted before, and preempted, come back free of charge. But they are finitely many; the running
   group of the least rank goes on as long as none of a lesser rank is admitted, and that happens finitely often before
   one ends.
3. Once admitted, G loses its blocks only to groups of lesser rank: they are finitely many, and each of them ends for
   the same reason.
"""

import heapq
from collections import Counter
from collections.abc import Iterable

from scheduler.outflow import Outflow
from scheduler.sequence import SequenceGroup
from scheduler.waiting_queue import WaitingQueue

# Service per token, as in the paper's section 5: an output token takes a step of its own, prompt tokens share one.
PROMPT_TOKEN, OUTPUT_TOKEN = 1.0, 2.0
# The most counters kept of tenants without live groups. If none were, each request could start anew at the clock.
_MAX_AWAY = 1024
# Weights are summed as whole multiples of the smallest float: the sum stays exact, however often it changes.
_PARTS = 2**1074


class _Tenant:
    """A tenant that has live groups."""

    __slots__ = ("counter", "in_heap", "num_live", "waiting", "weight")

    def __init__(self, counter: float) -> None:
        self.counter = counter
        self.weight = 1.0
        self.num_live = 0
        self.waiting = WaitingQueue()
        self.in_heap = False


class FairQueue:
    """Groups that wait for blocks, of all tenants.

    Attributes:
        num_tokens: prompt tokens of all of them.
        num_entered: new groups so far, without preempted ones that came back.
        num_tokens_entered: prompt tokens of these.
        outflow: how fast groups leave the queue.
        clock: the greatest counter that a tenant had at a turn, or after a group of it was admitted.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_entered = 0
        self.num_tokens_entered = 0
        self.outflow = Outflow()
        self.clock = 0.0
        self._num_waiting = 0
        # Sum of the weights of tenants for which something waits, in parts.
        self._weight_parts = 0
        self._tenants: dict[str, _Tenant] = {}
        # Counters of tenants that have no live groups, in the order in which they left; dropped once behind the clock.
        self._away: dict[str, float] = {}
        # Tenants, each with its counter and a group's rank when it was put in. Where the counter of the one on top has
        # changed since, `_least` renews both; ranks only break ties.
        self._heap: list[tuple[float, tuple[float, int], _Tenant]] = []
        self._turn: _Tenant | None = None

    def __len__(self) -> int:
        return self._num_waiting

    def __contains__(self, group: SequenceGroup) -> bool:
        tenant = self._tenants.get(group.tenant)
        return tenant is not None and group in tenant.waiting

    def enter(self, group: SequenceGroup) -> None:
        """Adds a new group; its weight is its tenant's from now on."""
        tenant = self._tenants.get(group.tenant)
        if tenant is None:
            tenant = self._tenants[group.tenant] = _Tenant(self._away.pop(group.tenant, 0.0))
        if tenant.waiting:
            self._weight_parts += _parts(group.tenant_weight) - _parts(tenant.weight)
        tenant.weight = group.tenant_weight
        tenant.num_live += 1
        self.num_entered += 1
        self.num_tokens_entered += group.num_prompt_tokens
        self.push(group)

    def push(self, group: SequenceGroup) -> None:
        """Puts a group, new or preempted, in its place."""
        tenant = self._tenants[group.tenant]
        if not tenant.waiting:
            tenant.counter = max(tenant.counter, self.clock)
            self._weight_parts += _parts(tenant.weight)
        tenant.waiting.push(group)
        self._num_waiting += 1
        self.num_tokens += group.num_prompt_tokens
        if not tenant.in_heap:
            tenant.in_heap = True
            heapq.heappush(self._heap, (tenant.counter, group.rank, tenant))
            if len(self._heap) > 2 * len(self._tenants) + 64:
                self._drop_idle()

    def head(self) -> SequenceGroup | None:
        """The group that goes first."""
        if self._turn is None:
            self._turn = self._least()
        return None if self._turn is None else self._turn.waiting.head()

    def remove(self, group: SequenceGroup) -> None:
        """Removes a group from wherever it stands."""
        tenant = self._tenants[group.tenant]
        tenant.waiting.remove(group)
        self._num_waiting -= 1
        self.num_tokens -= group.num_prompt_tokens
        if not tenant.waiting:
            self._weight_parts -= _parts(tenant.weight)
            if tenant is self._turn:
                self._turn = None

    def admit(self, group: SequenceGroup, num_tokens: int) -> None:
        """Removes a group that is admitted; its tenant pays for `num_tokens` of its prompt, and has had its turn."""
        self.remove(group)
        tenant = self._tenants[group.tenant]
        tenant.counter += num_tokens * PROMPT_TOKEN / tenant.weight
        self.clock = max(self.clock, tenant.counter)
        self._turn = None

    def charge(self, sampled_for: Iterable[SequenceGroup]) -> None:
        """Charges tenants for sampled tokens, given a group for each; not a lone tenant, which waits for none."""
        if len(self._tenants) + len(self._away) > 1:
            sampled = Counter([group.tenant for group in sampled_for])
            for name, num_tokens in sampled.items():
                tenant = self._tenants[name]
                tenant.counter += num_tokens * OUTPUT_TOKEN / tenant.weight

    def leave(self, group: SequenceGroup) -> None:
        """Takes note that a group, not waiting any more, has ended. Its tenant goes with its last one, unless ahead."""
        tenant = self._tenants[group.tenant]
        tenant.num_live -= 1
        if not tenant.num_live:
            del self._tenants[group.tenant]
            self._away[group.tenant] = tenant.counter
        while self._away:
            name, counter = next(iter(self._away.items()))
            if counter > self.clock and len(self._away) <= _MAX_AWAY:
                break
            del self._away[name]

    def num_waiting_of(self, name: str) -> int:
        """How many groups of a tenant wait."""
        return len(self._tenants[name].waiting) if name in self._tenants else 0

    def share_of(self, name: str) -> float:
        """The share of the service that a tenant with waiting groups gets while the others wait."""
        return _parts(self._tenants[name].weight) / self._weight_parts

    def order(self) -> list[SequenceGroup]:
        """All groups in the order in which they would go if no more came and only prompts were charged; checks all."""
        places = []
        for tenant in self._tenants.values():
            counter = tenant.counter
            for group in tenant.waiting.order():
                first = tenant is self._turn and group is tenant.waiting.head()
                places.append((not first, counter, group.rank, group))
                if group.first_scheduled is None:
                    counter += group.num_prompt_tokens * PROMPT_TOKEN / tenant.weight
        return [group for *_, group in sorted(places)]

    def check(self, groups: Iterable[SequenceGroup]) -> None:
        """Asserts that tenants are as the live groups say, and that each that waits can have its turn."""
        num_live = Counter(group.tenant for group in groups)
        assert num_live == {name: tenant.num_live for name, tenant in self._tenants.items()}
        waiting = [tenant for tenant in self._tenants.values() if tenant.waiting]
        assert self._num_waiting == sum(len(tenant.waiting) for tenant in waiting)
        assert self._weight_parts == sum(_parts(tenant.weight) for tenant in waiting)
        in_heap = [tenant for *_, tenant in self._heap]
        assert all(tenant.in_heap and in_heap.count(tenant) == 1 for tenant in waiting), "a tenant has no turn"
        assert all(counter <= tenant.counter for counter, _, tenant in self._heap), "a counter went down"
        assert self._turn is None or self._turn in waiting, "a tenant has a turn for nothing"

    def _drop_idle(self) -> None:
        """Removes from the heap the tenants for which nothing waits."""
        for *_, tenant in self._heap:
            tenant.in_heap = bool(tenant.waiting)
        self._heap = [entry for entry in self._heap if entry[-1].in_heap]
        heapq.heapify(self._heap)

    def _least(self) -> _Tenant | None:
        """The tenant with the least counter among those for which something waits."""
        while self._heap:
            counter, _, tenant = self._heap[0]
            head = tenant.waiting.head()
            if head is None:
                heapq.heappop(self._heap)
                tenant.in_heap = False
            elif counter < tenant.counter:
                heapq.heapreplace(self._heap, (tenant.counter, head.rank, tenant))
            else:
                self.clock = max(self.clock, counter)
                return tenant
        return None


def _parts(weight: float) -> int:
    numerator, denominator = weight.as_integer_ratio()
    return numerator * (_PARTS // denominator)
