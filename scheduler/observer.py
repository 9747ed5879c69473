"""What metrics and traces say about steps and requests: kept per step and per request, never per token.

**Inter-token latency** is the gap between two steps, counted once for each sequence that continues in the later one.
With chunked prefill every running sequence is in every step, so that is the gap between two of its tokens; tokens that
come together, after a draft that was right, have no gap between them. Two cases are special: the gap of the first token
after a pause runs from the loss of the blocks; and without chunked prefill, where decodes wait during prefill steps,
the gap runs from the decode step before.

Where the worker works on several steps at once, each with other sequences, a step is planned when the tokens before its
own are known, and the gap is the time that it takes. A wait for the next turn, as when the number of sequences changes,
is not counted.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from protos.histogram import REQUEST_SECONDS, STEP_SECONDS, Histogram
from protos.trace_context import TraceContext
from scheduler.plan import Plan, StepOutputs
from scheduler.scheduler import Scheduler
from scheduler.sequence import SequenceGroup
from scheduler.sessions import Ticket
from scheduler.timeline import Pause
from scheduler.trace import record_request

if TYPE_CHECKING:
    from protos.tracing import Tracer

_STEP_TOKENS = tuple(2**power for power in range(15))


class Observer:
    """Keeps the figures; the loop and the sessions tell it what happens.

    Args:
        tracer: gets the spans of traced requests; None for no tracing.

    Attributes:
        queue_s: from a request's arrival to the first plan that contains it.
        prefill_s: from there to its first token here; it may have tokens from another scheduler.
        decode_s: from there to its end.
        inter_token_s: see above.
        step_s: how long steps take, as the scheduler sees it.
        step_tokens: tokens that steps compute.
        num_generated: tokens sampled that are output.
        num_drafts: tokens that were drafted.
        num_accepted: how many of these were right.
    """

    def __init__(self, tracer: "Tracer | None" = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.queue_s = Histogram(REQUEST_SECONDS)
        self.prefill_s = Histogram(REQUEST_SECONDS)
        self.decode_s = Histogram(REQUEST_SECONDS)
        self.inter_token_s = Histogram(STEP_SECONDS)
        self.step_s = Histogram(STEP_SECONDS)
        self.step_tokens = Histogram(_STEP_TOKENS)
        self.num_generated = self.num_drafts = self.num_accepted = 0
        self._tracer = tracer
        self._clock = clock
        self._tickets: dict[int, Ticket] = {}
        # Time of the step from which the next gap counts; None while nothing runs.
        self._last_step: float | None = None
        # Number of a group that runs again, without a token since -> when it lost its blocks.
        self._resuming: dict[int, float] = {}
        self._num_traced = 0

    def added(self, ticket: Ticket) -> None:
        """Takes note that a request was submitted."""
        self._tickets[ticket.group.number] = ticket
        self._num_traced += ticket.timeline.trace is not None

    def planned(self, plan: Plan, now: float) -> None:
        """Takes note that a step was planned."""
        for preemption in plan.preempted:
            self._pause(preemption.group, preemption.reason, preemption.group.preempted_by, now)
        for group in plan.resumed:
            ticket = self._tickets.get(group.number)
            if ticket is not None and (pause := ticket.timeline.paused) is not None:
                pause.end = now
                self._resuming.setdefault(group.number, pause.begin)

    def traces_of(self, plan: Plan) -> Sequence[TraceContext]:
        """The traces that get a span of this step."""
        if not self._num_traced:
            return ()
        # A prompt's last token may be all of it that is left to compute.
        rows = [row for row in plan.rows if row.num_new_tokens > 1 or row.start < row.group.num_prompt_tokens]
        tickets = [self._tickets.get(row.group.number) for row in rows]
        return [ticket.timeline.trace for ticket in tickets if ticket is not None and ticket.timeline.trace is not None]

    def stepped(
        self, plan: Plan, outputs: StepOutputs, begun: Iterable[Ticket], core: Scheduler, took_s: float
    ) -> None:
        """Takes note that a step was answered.

        Args:
            plan: the step.
            outputs: what became of its sequences.
            begun: for each sequence that got its first tokens here, the request's ticket.
            core: the core, after the step.
            took_s: time that the step took.
        """
        now = self._clock()
        num_continued = len(outputs.new_tokens)
        self.num_generated += num_continued + outputs.num_accepted
        self.num_drafts += plan.num_drafts
        self.num_accepted += outputs.num_accepted
        if plan.num_beams:  # the sequences of a search come whole, at its end
            beams = [new.sequence for new in outputs.new_tokens if new.group.beam is not None]
            self.num_generated += sum(len(sequence.output_token_ids) - 1 for sequence in beams)
        for ticket in begun:
            num_continued -= 1
            if ticket.timeline.first_token is None:
                ticket.timeline.first_token = now
        if self._resuming:
            num_continued -= self._end_pauses(outputs, now)
        if num_continued > 0 and self._last_step is not None:
            gap_s = now - self._last_step if core.in_flight.num_concurrent == 1 else took_s
            self.inter_token_s.observe(gap_s, num_continued)
        if num_continued > 0 or self._last_step is None or core.policy.chunked_prefill:
            self._last_step = now
        if not core.num_running:
            self._last_step = None
        self.step_s.observe(took_s)
        self.step_tokens.observe(plan.num_tokens)

    def lost(self, groups: Iterable[SequenceGroup]) -> None:
        """Takes note that the worker was lost, so that all groups wait."""
        now = self._clock()
        self._last_step = None
        for group in groups:
            self._pause(group, "recompute: the worker was lost", "", now)

    def ended(self, ticket: Ticket) -> None:
        """Takes note that a request has ended, or was given up."""
        now, group, timeline = self._clock(), ticket.group, ticket.timeline
        del self._tickets[group.number]
        self._resuming.pop(group.number, None)
        if group.first_scheduled is not None:
            self.queue_s.observe(group.first_scheduled - group.arrival)
            if timeline.first_token is not None:
                self.prefill_s.observe(timeline.first_token - group.first_scheduled)
                self.decode_s.observe(now - timeline.first_token)
        if timeline.trace is not None:
            self._num_traced -= 1
            if self._tracer is not None:
                record_request(self._tracer, ticket, now)

    def _pause(self, group: SequenceGroup, reason: str, by: str, now: float) -> None:
        ticket = self._tickets.get(group.number)
        if ticket is not None and ticket.timeline.paused is None:
            ticket.timeline.pauses.append(Pause(now, reason, by))

    def _end_pauses(self, outputs: StepOutputs, now: float) -> int:
        """Counts the gaps of sequences that go on after a pause; returns how many those were."""
        num_resumed = 0
        for number in {new.group.number for new in outputs.new_tokens} & self._resuming.keys():
            begin = self._resuming.pop(number)
            news = [new for new in outputs.new_tokens if new.group.number == number]
            rows = [new for new in news if new.first_index > new.sequence.num_taken_up]
            if rows:
                self.inter_token_s.observe(now - begin, len(rows))
            num_resumed += len(rows)
        return num_resumed
