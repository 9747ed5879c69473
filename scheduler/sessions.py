"""Sessions: whose request each group is, and what each router has yet to be told. A TOKEN LEAVES THE SCHEDULER HERE.

A router's stream may break and come back; its requests live on here meanwhile, for the lease. A slow socket never holds
up the loop: what it has not taken is merged, so that an outbox is bounded by the output that it describes.
"""

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from protos import session_pb2 as pb
from protos.columns import pack
from protos.errors import Refusal, taken_over
from protos.logprobs import Logprobs, to_columns
from protos.trace_context import TraceContext
from scheduler.plan import Finished, NewTokens
from scheduler.sequence import Sequence, SequenceGroup, Status
from scheduler.timeline import Timeline

_FINISH_STATUS = {
    Status.FINISHED_STOPPED: pb.FINISH_STATUS_STOPPED,
    Status.FINISHED_LENGTH_CAPPED: pb.FINISH_STATUS_LENGTH_CAPPED,
    Status.FINISHED_ABORTED: pb.FINISH_STATUS_ABORTED,
    Status.FINISHED_IGNORED: pb.FINISH_STATUS_IGNORED,
}


# The most entries of a message: tokens, and log-probabilities at their places, of about 8 bytes each. A router takes
# messages of up to 64 MiB.
_MOST_ENTRIES = 1_000_000
# (handle, sequence index)
Key = tuple[int, int]
# Index of the first token, the tokens, the log-probability of each.
Row = tuple[int, "array[int]", "array[float]"]


class Outbox:
    """What a router has yet to be told, merged while its socket is slow."""

    def __init__(self) -> None:
        self._messages: deque[pb.SessionResponse] = deque()
        self._load: Callable[[], pb.Load] | None = None
        self._told_load: pb.Load | None = None
        self._rows: dict[Key, Row] = {}
        # Log-probabilities of the tokens, for requests that asked for them.
        self._logprobs: dict[Key, Logprobs] = {}
        # handle -> log-probabilities of the prompt's tokens
        self._prompts: dict[int, Logprobs] = {}
        self._finished: list[pb.Finished] = []
        # handle -> the error that its request ends in
        self._rejected: dict[int, pb.Rejected] = {}
        self._closed = False
        self._filled = asyncio.Event()

    def close(self) -> None:
        """Lets `take` end once all has been taken; nothing more will be put."""
        self._closed = True
        self._filled.set()

    def put(self, message: pb.SessionResponse) -> None:
        """Queues a message to the router; it goes before what is merged."""
        self._messages.append(message)
        self._filled.set()

    def put_load(self, load: Callable[[], pb.Load]) -> None:
        """Queues the load, to go when all else has been taken, if it differs from the load sent last.

        `load` is called only then: a router adds to a load what it has done since receiving it.
        """
        self._load = load
        self._filled.set()

    def put_tokens(self, handle: int, sequence: Sequence, first_index: int) -> None:
        """Queues a sequence's output from `first_index` on, behind that which still waits."""
        key = (handle, sequence.index)
        token_ids, token_logprobs = sequence.output_token_ids[first_index:], sequence.output_logprobs[first_index:]
        row = self._rows.get(key)
        assert row is None or row[0] + len(row[1]) == first_index, "a gap in what is told"
        if row is None:
            self._rows[key] = (first_index, token_ids, token_logprobs)
        else:
            row[1].extend(token_ids)
            row[2].extend(token_logprobs)
        if sequence.logprobs is not None:
            logprobs = sequence.logprobs.part(first_index)
            if row is None:
                self._logprobs[key] = logprobs
            else:
                self._logprobs[key].extend(logprobs)
        self._filled.set()

    def put_prompt_logprobs(self, handle: int, logprobs: Logprobs) -> None:
        """Queues the log-probabilities of a request's prompt, to go with its first tokens."""
        self._prompts[handle] = logprobs
        self._filled.set()

    def put_finished(self, finished: pb.Finished) -> None:
        """Queues the end of a sequence, to go with its last tokens."""
        self._finished.append(finished)
        self._filled.set()

    def put_rejected(self, rejected: pb.Rejected) -> None:
        """Queues the error that a live request ends in, behind its last tokens."""
        self._rejected[rejected.handle] = rejected
        self._filled.set()

    def drop(self, handle: int) -> None:
        """Forgets what still waits to be told of a request: the router may submit it again under the same handle."""
        for key in [key for key in self._rows if key[0] == handle]:
            del self._rows[key]
            self._logprobs.pop(key, None)
        self._prompts.pop(handle, None)
        self._rejected.pop(handle, None)
        self._finished = [end for end in self._finished if end.handle != handle]

    async def take(self) -> pb.SessionResponse | None:
        """The next message, as soon as there is one; None when all are taken and no more come."""
        while True:
            await self._filled.wait()
            if self._messages:
                return self._messages.popleft()
            if (rejected := self._take_rejected()) is not None:
                return pb.SessionResponse(rejected=rejected)
            if self._rows or self._finished:
                return self._take_outputs()
            if self._load is not None:
                load, self._load = self._load(), None
                if load != self._told_load:
                    self._told_load = load
                    return pb.SessionResponse(load=load)
            if self._closed:
                return None
            self._filled.clear()

    def _take_rejected(self) -> pb.Rejected | None:
        """One of the errors whose requests have no more output to go before it; None if there is none."""
        if not self._rejected:
            return None
        telling = {handle for handle, _ in self._rows}
        handle = next((handle for handle in self._rejected if handle not in telling), None)
        return None if handle is None else self._rejected.pop(handle)

    def _take_outputs(self) -> pb.SessionResponse:
        rows, logprobs, prompts = self._take_rows()
        # The end of a sequence goes with its last tokens.
        finished = [end for end in self._finished if (end.handle, end.sequence_index) not in self._rows]
        self._finished = [end for end in self._finished if (end.handle, end.sequence_index) in self._rows]
        outputs = pb.StepOutputs(
            handles=pack(handle for handle, _ in rows),
            sequence_indexes=pack(index for _, index in rows),
            first_indexes=pack(first for first, _, _ in rows.values()),
            counts=pack(len(token_ids) for _, token_ids, _ in rows.values()),
            token_ids=b"".join([token_ids.tobytes() for _, token_ids, _ in rows.values()]),
            finished=finished,
            token_logprobs=b"".join([token_logprobs.tobytes() for _, _, token_logprobs in rows.values()]),
        )
        if logprobs:
            asking = [(place, logprobs[key]) for place, key in enumerate(rows) if key in logprobs]
            outputs.logprob_rows = pack(place for place, _ in asking)
            outputs.logprob_num_tops = pack(part.num_top for _, part in asking)
            outputs.logprobs.CopyFrom(to_columns(part for _, part in asking))
        if prompts:
            outputs.prompt_handles = pack(prompts)
            outputs.prompt_counts = pack(map(len, prompts.values()))
            outputs.prompt_num_tops = pack(part.num_top for part in prompts.values())
            outputs.prompt_logprobs.CopyFrom(to_columns(prompts.values()))
        return pb.SessionResponse(step_outputs=outputs)

    def _take_rows(self) -> tuple[dict[Key, Row], dict[Key, Logprobs], dict[int, Logprobs]]:
        """Takes the first waiting rows that fit into a message, and what goes with them."""
        rows: dict[Key, Row] = {}
        logprobs: dict[Key, Logprobs] = {}
        prompts: dict[int, Logprobs] = {}
        num_entries = 0
        for key in list(self._rows):
            if num_entries >= _MOST_ENTRIES:
                break
            rows[key] = row = self._rows.pop(key)
            num_entries += len(row[1])
            if key in self._logprobs:
                logprobs[key] = part = self._logprobs.pop(key)
                num_entries += len(part) * (1 + part.num_top)
            if key[0] in self._prompts:
                prompts[key[0]] = part = self._prompts.pop(key[0])
                num_entries += len(part) * (1 + part.num_top)
        return rows, logprobs, prompts


@dataclass(slots=True, eq=False)
class Ticket:
    """A router's request: its group; and how it ended, for a router that must be told again.

    Attributes:
        timeline: when the request was where.
        moved: whether it goes on at another scheduler, or at this one after a restart.
    """

    session: "RouterSession"
    handle: int
    group: SequenceGroup
    timeline: Timeline
    finished: list[pb.Finished] = field(default_factory=list)
    rejected: pb.Rejected | None = None
    moved: bool = False


@dataclass(slots=True, eq=False)
class RouterSession:
    """One router process, connected or away for a while.

    Attributes:
        tickets: its requests by handle. Ended ones stay for a while, in case their end was lost on the way.
        outbox: None while disconnected.
    """

    router_id: str
    tickets: dict[int, Ticket] = field(default_factory=dict)
    outbox: Outbox | None = None


class Sessions:
    """All routers and their requests.

    Args:
        on_begin: called with each request that is added.
        on_end: called once with each of these, when it ends or is given up.
    """

    def __init__(self, on_begin: Callable[[Ticket], None], on_end: Callable[[Ticket], None]) -> None:
        self._on_begin = on_begin
        self._on_end = on_end
        self._sessions: dict[str, RouterSession] = {}
        self._by_number: dict[int, Ticket] = {}
        self._by_request_id: dict[str, Ticket] = {}
        # (time of the end, ticket), oldest first
        self._ended: deque[tuple[float, Ticket]] = deque()

    def __iter__(self) -> Iterator[RouterSession]:
        return iter(self._sessions.values())

    def connect(self, router_id: str) -> RouterSession:
        """The session of a router whose stream just opened, with a new outbox; an older stream's gets nothing more."""
        session = self._sessions.setdefault(router_id, RouterSession(router_id))
        session.outbox = Outbox()
        return session

    def disconnect(self, session: RouterSession, outbox: Outbox) -> bool:
        """Marks a session away: its stream with `outbox` ended. Returns False if a newer stream has taken over."""
        if session.outbox is not outbox:
            return False
        session.outbox = None
        return True

    def drop(self, session: RouterSession) -> list[SequenceGroup]:
        """Forgets a session whose lease is over; returns its groups, for which nobody waits any more."""
        del self._sessions[session.router_id]
        tickets = list(session.tickets.values())
        for ticket in tickets:
            self.forget(ticket)
        return [ticket.group for ticket in tickets]

    def add(self, session: RouterSession, handle: int, group: SequenceGroup, trace: TraceContext | None = None) -> None:
        """Adds a submitted request; `trace` is the router's span, if the request is traced."""
        ticket = Ticket(session, handle, group, Timeline(trace))
        session.tickets[handle] = ticket
        self._by_number[group.number] = ticket
        self._by_request_id[group.request_id] = ticket
        self._on_begin(ticket)

    def find(self, request_id: str) -> Ticket | None:
        """The ticket of a live request."""
        return self._by_request_id.get(request_id)

    def find_all(self, router_id: str, handles: "array[int]") -> list[SequenceGroup | None]:
        """A router's requests by their handles; None for those that are not live."""
        session = self._sessions.get(router_id)
        tickets = map((session.tickets if session is not None else {}).get, handles)
        return [ticket.group if ticket is not None and ticket.group.live else None for ticket in tickets]

    def adopt(self, ticket: Ticket, session: RouterSession, handle: int) -> None:
        """Gives a request to another call, of any router, which is sent its output from the first token on."""
        del ticket.session.tickets[ticket.handle]
        if ticket.session.outbox is not None:
            ticket.session.outbox.put_rejected(to_rejected(ticket.handle, taken_over()))
        ticket.session, ticket.handle = session, handle
        # Copies: the rows themselves may still wait for the router that had the request.
        ticket.finished = [_of_handle(row, handle) for row in ticket.finished]
        session.tickets[handle] = ticket
        self.resume(ticket, array("i", [0] * len(ticket.group.sequences)))

    def end(self, ticket: Ticket, now: float) -> None:
        """Ends a request: its id is free for another, and its ticket stays for resumption until `purge`."""
        self._release(ticket)
        self._ended.append((now, ticket))

    def purge(self, before: float) -> None:
        """Drops the tickets of requests that ended earlier than `before`."""
        while self._ended and self._ended[0][0] < before:
            self.forget(self._ended.popleft()[1])

    def forget(self, ticket: Ticket) -> None:
        """Drops a request; what waits in its router's outbox is still sent."""
        self._release(ticket)
        # Another ticket may have the handle by now: a request that went elsewhere comes back under the same one.
        if ticket.session.tickets.get(ticket.handle) is ticket:
            del ticket.session.tickets[ticket.handle]

    def leave(self) -> None:
        """Drops all live requests: this scheduler ends, and they go on elsewhere."""
        for ticket in list(self._by_number.values()):
            ticket.moved = True
            self.forget(ticket)

    def give_up(self, session: RouterSession, handle: int, *, moved: bool) -> Ticket | None:
        """Drops a request of a connected router, if it is there still, and all that waits to be told of it."""
        assert session.outbox is not None
        session.outbox.drop(handle)
        ticket = session.tickets.get(handle)
        if ticket is not None:
            ticket.moved = moved
            self.forget(ticket)
        return ticket

    def _release(self, ticket: Ticket) -> None:
        if self._by_number.pop(ticket.group.number, None) is not None:
            self._on_end(ticket)
        if self._by_request_id.get(ticket.group.request_id) is ticket:
            del self._by_request_id[ticket.group.request_id]

    def ticket(self, group: SequenceGroup) -> Ticket | None:
        """The ticket of a live request by its group; None if its router has given it up."""
        return self._by_number.get(group.number)

    def deliver_tokens(self, new_tokens: list[NewTokens]) -> list[Ticket]:
        """Queues a step's tokens for their routers; returns a ticket for each sequence that got its first ones here."""
        begun = []
        for new in new_tokens:
            ticket = self._by_number.get(new.group.number)
            if ticket is None:
                continue
            if new.first_index == new.sequence.num_taken_up:
                begun.append(ticket)
            if ticket.session.outbox is not None:
                self._put_tokens(ticket.session.outbox, ticket, new.sequence, new.first_index)
        return begun

    def _put_tokens(self, outbox: Outbox, ticket: Ticket, sequence: Sequence, first_index: int) -> None:
        outbox.put_tokens(ticket.handle, sequence, first_index)
        if first_index == 0 and ticket.group.prompt_logprobs is not None:
            outbox.put_prompt_logprobs(ticket.handle, ticket.group.prompt_logprobs)

    def deliver_finished(self, finished: list[Finished]) -> list[Ticket]:
        """Queues the ends of sequences for their routers; returns the tickets whose last sequence has ended."""
        ended: dict[int, Ticket] = {}  # by number: several sequences of a group may end in one step
        for end in finished:
            ticket = self._by_number.get(end.group.number)
            if ticket is None:
                continue
            row = _finished_row(ticket, end)
            ticket.finished.append(row)
            if ticket.session.outbox is not None:
                ticket.session.outbox.put_finished(row)
            if not end.group.live:
                ended[end.group.number] = ticket
        return list(ended.values())

    def reject(self, ticket: Ticket, refusal: Refusal, now: float) -> None:
        """Ends a request whose group has ended, with an error that is queued for its router."""
        ticket.rejected = to_rejected(ticket.handle, refusal)
        if ticket.session.outbox is not None:
            ticket.session.outbox.put_rejected(ticket.rejected)
        self.end(ticket, now)

    def resume(self, ticket: Ticket, num_tokens: "array[int]") -> None:
        """Queues what a reconnected router has not got yet: it has `num_tokens` tokens of each sequence."""
        outbox = ticket.session.outbox
        assert outbox is not None
        group = ticket.group
        searching = group.beam is not None and not ticket.finished  # of a search, nothing is sent before its end
        for sequence, num in zip(() if searching else group.sequences, num_tokens, strict=False):
            if len(sequence.output_token_ids) > num:
                self._put_tokens(outbox, ticket, sequence, num)
        for row in ticket.finished:
            outbox.put_finished(row)
        if ticket.rejected is not None:
            outbox.put_rejected(ticket.rejected)


def _of_handle(row: pb.Finished, handle: int) -> pb.Finished:
    copy = pb.Finished()
    copy.CopyFrom(row)
    copy.handle = handle
    return copy


def to_rejected(handle: int, refusal: Refusal) -> pb.Rejected:
    """The message that tells a router that a request ends in an error."""
    return pb.Rejected(
        handle=handle,
        code=refusal.code.value[0],
        reason=refusal.reason,
        message=refusal.message,
        retry_delay_ms=refusal.retry_delay_ms or 0,
    )


def _finished_row(ticket: Ticket, end: Finished) -> pb.Finished:
    group, sequence = end.group, end.sequence
    waited = 0.0 if group.first_scheduled is None else group.first_scheduled - group.arrival
    return pb.Finished(
        handle=ticket.handle,
        sequence_index=sequence.index,
        status=_FINISH_STATUS[sequence.status],
        stop_token_id=sequence.stop_token_id,
        cumulative_logprob=sequence.cumulative_logprob,
        stats=pb.RequestStats(
            queue_ms=waited * 1e3,
            num_preemptions=group.num_preemptions,
            num_cached_prompt_tokens=group.num_cached_prompt_tokens,
        ),
        message=end.message,
    )
