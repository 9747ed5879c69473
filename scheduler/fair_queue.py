"""The waiting queue of all tenants: whose turn it is, so that each is served by its weight while several wait.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI'24, section 4): a tenant's
counter is the service that it got, divided by its weight, and the turn goes to the least. A prompt is charged when it
comes in, as far as it is not in the prefix cache, output as it is planned. What is computed again after a preemption is
no service, and free. Within a tenant the order is that of `waiting_queue.py`: with one tenant it is the only one.

A tenant for which nothing waited gets no credit for that time: its counter is lifted to the clock when it comes back.
The clock is not the least counter, as in the paper, where tenants that come for one request each could go ahead of one
that waits for ever: it is the greatest one that had a turn, or was let in (as in self-clocked fair queueing, Golestani,
INFOCOM'94), so each admission moves it on. Nobody else's share shrinks when a tenant is idle: whoever waits has turns.

WHY THE SHARES ARE FAIR. Let U be the most that is booked for one tenant at a time, by its weight: what its groups that
are in may still output, and one more group, prompt and output. From one of its turns to the next a tenant's counter c
rises by at most U, since only what is booked is charged.

1. c <= clock + U for every tenant: when it had its turn, the clock was put at its counter or above.
2. clock <= c + U for every tenant that waits: at the turn of the one, k, at whose counter it stands, k's counter was
   the least, so at most c, and is at most U more when it is let in; who came to wait since was lifted to the clock.
3. So c - c' <= 2 U for any two that wait, and over any time for which both do, the service that they get, by their
   weights, differs by at most 4 U. From a common start it is U: who has turns has them at the least counter.

The paper's bound is 2 U, for memory reserved up to the end (theorem 4.4). A turn is kept until the group is in, even
though more is charged meanwhile: so what it lacks need not be looked up at each step. Preemption is not by tenants, but
by rank: it must spare the group that has to finish first (`waiting_queue.py`). The bound holds whoever the victim is,
of whatever priority, and its tenant's counter stands still, so that its turn comes the sooner.

WHY NOTHING STARVES, WITH TENANTS. Let G be the first of its tenant, where it gets as `waiting_queue.py` says.

1. Until G is in, its tenant's counter rises by U at most, so it stays below some C, and so do the counters of tenants
   whose groups come in before. Each that comes in for the first time raises one of them by `1 / weight` at least.
   Those that wait below the clock are finitely many, and whoever comes to wait is lifted to it: so after finitely many
   one comes in from the clock or above, and moves the clock by as much. After finitely many such moves the clock is
   past C, and nobody who comes then can go before G.
2. Those that came in before, and were preempted, come back for nothing. But they are finitely many, the running one of
   the least rank goes on as long as none of a lesser rank comes in, and that happens finitely often until one ends.
3. Once in, G loses its blocks to groups of lesser ranks only: finitely many, and each of them ends for the same reason.
"""

import heapq
from collections import Counter
from collections.abc import Iterable

from scheduler.outflow import Outflow
from scheduler.sequence import SequenceGroup
from scheduler.waiting_queue import WaitingQueue

# Service in a token, as in the paper's section 5: an output token takes a step for itself, prompt tokens share one.
PROMPT_TOKEN, OUTPUT_TOKEN = 1.0, 2.0
# Tenants whose counters are remembered though nothing of them is live: else each request could be a new beginning.
_MAX_AWAY = 1024
# Weights are added up as whole numbers of the least float: the sum stays exact, however often it changes.
_PARTS = 2**1074


class _Tenant:
    """One that has live groups."""

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
        num_entered: groups that came, without those that came back.
        num_tokens_entered: prompt tokens of these.
        outflow: how fast they go.
        clock: the counter of whoever had the last turn, or came in, if none before had a greater one.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_entered = 0
        self.num_tokens_entered = 0
        self.outflow = Outflow()
        self.clock = 0.0
        self._num_waiting = 0
        # Weights of the tenants for which something waits.
        self._weight_parts = 0
        self._tenants: dict[str, _Tenant] = {}
        # Counters ahead of the clock of those that have no live groups, who left first first.
        self._away: dict[str, float] = {}
        # Tenants with the counters and the ranks that they had when they were put in: both are looked at again on top.
        self._heap: list[tuple[float, tuple[float, int], _Tenant]] = []
        self._turn: _Tenant | None = None

    def __len__(self) -> int:
        return self._num_waiting

    def __contains__(self, group: SequenceGroup) -> bool:
        tenant = self._tenants.get(group.tenant)
        return tenant is not None and group in tenant.waiting

    def enter(self, group: SequenceGroup) -> None:
        """Takes in a new group; its weight is its tenant's from now on."""
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
        """Takes a group in at its place, a new one or one that was preempted."""
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
        """Lets a group go, from wherever it stands."""
        tenant = self._tenants[group.tenant]
        tenant.waiting.remove(group)
        self._num_waiting -= 1
        self.num_tokens -= group.num_prompt_tokens
        if not tenant.waiting:
            self._weight_parts -= _parts(tenant.weight)
            if tenant is self._turn:
                self._turn = None

    def admit(self, group: SequenceGroup, num_tokens: int) -> None:
        """Lets a group go that comes in; its tenant pays for `num_tokens` of its prompt, and has had its turn."""
        self.remove(group)
        tenant = self._tenants[group.tenant]
        tenant.counter += num_tokens * PROMPT_TOKEN / tenant.weight
        self.clock = max(self.clock, tenant.counter)
        self._turn = None

    def charge(self, sampled_for: Iterable[SequenceGroup]) -> None:
        """Tenants pay for tokens that are sampled, a group for each; one alone need not, who waits for nobody."""
        if len(self._tenants) + len(self._away) > 1:
            sampled = Counter([group.tenant for group in sampled_for])
            for name, num_tokens in sampled.items():
                tenant = self._tenants[name]
                tenant.counter += num_tokens * OUTPUT_TOKEN / tenant.weight

    def leave(self, group: SequenceGroup) -> None:
        """A group, which waits no more, has ended. Its tenant is forgotten with its last one, unless it is ahead."""
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
        """Groups of a tenant that wait."""
        return len(self._tenants[name].waiting) if name in self._tenants else 0

    def share_of(self, name: str) -> float:
        """What a tenant, of which something waits, gets of the service while the others wait."""
        return _parts(self._tenants[name].weight) / self._weight_parts

    def order(self) -> list[SequenceGroup]:
        """All groups as they would go if none came, and their prompts alone were charged; looks at all of them."""
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
        """Clears the heap of tenants for which nothing waits."""
        for *_, tenant in self._heap:
            tenant.in_heap = bool(tenant.waiting)
        self._heap = [entry for entry in self._heap if entry[-1].in_heap]
        heapq.heapify(self._heap)

    def _least(self) -> _Tenant | None:
        """The tenant of the least counter for which something waits."""
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
