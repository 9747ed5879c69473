"""The loop around the core: plan, send, update, deliver, again. It owns the clock and the connection to the worker.

Everything that touches the core runs on one event loop, so submissions and cancellations fall between two plans or
while the worker computes, never into a plan half made or half sent. While the worker computes one step, the tokens of
the one before go to the routers, and the next is planned and sent (`pacing.py` says when).
"""

import asyncio
import contextlib
import logging
import time

import grpc

from protos.errors import CannotServe, Refusal
from protos.patience import Patience
from protos.worker_pb2 import GetInfoResponse
from scheduler.block_manager import BlockManager
from scheduler.config import SchedulerSettings
from scheduler.observer import Observer
from scheduler.pacing import Pacing
from scheduler.plan import Finished, Plan, StepResult
from scheduler.policy import Policy
from scheduler.recorder import Recorder
from scheduler.scheduler import Scheduler
from scheduler.sequence import SequenceGroup
from scheduler.sessions import Sessions
from scheduler.worker_link import WorkerLink, WorkerLost

# How long the end of a request can be reported again: until keepalive has noticed that a router's connection is dead.
_RETENTION_S = 60.0
_RECONNECT_DELAY_S = 0.1
# How early a timer of the event loop may fire: it counts in milliseconds.
_TIMER_S = 0.001
# Requests were checked, and their blocks counted, by these.
_SAME_OF_EVERY_WORKER = ("model", "context_length", "vocabulary_size", "dtype", "quantization", "block_size")
log = logging.getLogger(__name__)


class SchedulerLoop:
    """Runs steps for as long as there are sequences and a worker.

    Attributes:
        core: None until the first worker has said how many blocks there are.
        info: what the last worker loaded; None before the first.
        ready: set once `core` and `info` are there.
        connected: whether there is a worker.
        worker_left: whether there is none because it left in order.
        stall: why steps do not seem to come back from the worker; None while they do, or would.
        num_answered: steps that all workers have answered.
        last_step_ms: time that the last answered step took.
        last_step_tokens: tokens that it computed.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        sessions: Sessions,
        observer: Observer,
        recorder: Recorder | None = None,
    ) -> None:
        self.core: Scheduler | None = None
        self.info: GetInfoResponse | None = None
        self.ready = asyncio.Event()
        self.connected = False
        self.worker_left = False
        self.stall: str | None = None
        self.num_answered = 0
        self.last_step_ms = 0.0
        self.last_step_tokens = 0
        self._settings = settings
        self._link = WorkerLink(settings.worker, on_lost=self.wake, tls=settings.worker_tls)
        self._sessions = sessions
        self._observer = observer
        self._recorder = recorder
        self._work = asyncio.Event()
        self._settled = asyncio.Event()
        self._changed = asyncio.Event()
        self._pacing: Pacing | None = None
        # Why the last worker was refused; None if it was not.
        self._refusal: str | None = None

    @property
    def serving(self) -> bool:
        """Whether steps complete, or could if there were any."""
        return self.connected and self.stall is None

    @property
    def in_flight(self) -> Pacing | None:
        """The steps that the worker has; None if it has none."""
        return self._pacing if self._pacing is not None and self._pacing.oldest is not None else None

    def labels(self) -> dict[str, str] | None:
        """The labels of this scheduler's metrics; None before the first worker."""
        return None if self.info is None else {"model_name": self.info.model}

    def wake(self) -> None:
        """Wakes the loop: there may be something to plan, or no worker to plan for any more."""
        self._work.set()
        self._settled.set()
        if self._pacing is not None and self._pacing.stir():
            self._link.interrupt()

    async def run(self) -> None:
        """Runs for ever: through idle times, and through as many workers as it takes.

        Raises:
            CannotServe: the first worker has no room for steps of the size that the settings ask for.
        """
        while True:
            info = await self._link.connect()
            if not self._adopt(info):
                await asyncio.sleep(1.0)  # a worker of another model: look again, it may be replaced
                continue
            self._set_connected(True)
            try:
                async with Patience(self._settings.step_timeout_s) as patience:
                    await self._steps(patience)
            except TimeoutError:
                self._lose(f"a step was not answered within {self._settings.step_timeout_s} s")
            except WorkerLost as lost:
                self._lose(str(lost), in_order=lost.in_order)
            await asyncio.sleep(_RECONNECT_DELAY_S)

    async def look_at_worker(self, timeout_s: float) -> str | None:
        """Why the worker does not answer a health check within `timeout_s` seconds; None if it does."""
        return await self._link.look(timeout_s)

    def set_stall(self, stall: str | None) -> None:
        """Notes why steps do not seem to come back; None if they do."""
        changed = (stall is None) != (self.stall is None)
        self.stall = stall
        if changed:
            self._tell_change()

    async def wait_for_change(self, timeout_s: float | None) -> None:
        """Returns when `serving` may have changed, or after `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def close(self) -> None:
        """Hangs up on the worker, after `run` was cancelled."""
        await self._link.close()

    async def drained(self, grace_s: float) -> None:
        """Returns when no request is live, or after `grace_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self.core is not None and self.core.num_live:
                    self._settled.clear()
                    await self._settled.wait()

    def _set_connected(self, connected: bool, *, worker_left: bool = False) -> None:
        self.connected = connected
        self.worker_left = worker_left
        self.stall = None
        self._tell_change()

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _adopt(self, info: GetInfoResponse) -> bool:
        """Takes a worker for the model that is served; returns False if it cannot serve as the one before did.

        Raises:
            CannotServe: it is the first, and has no room for steps of the size that the settings ask for.
        """
        policy = self._settings.policy(info.device)
        if (refusal := _why_not(info, self.info, policy)) is not None:
            if self.core is None:
                raise CannotServe(refusal)
            if refusal != self._refusal:
                log.error("worker refused: %s", refusal)
            self._refusal = refusal
            return False
        self._refusal = None
        pools = BlockManager(info.num_blocks, info.block_size, info.num_cpu_blocks)
        if self.core is None:
            self.core = Scheduler(policy, pools)
            if self._recorder is not None:
                facts = {name: getattr(info, name) for name in ("model", "dtype", "quantization", "device")}
                self._recorder.attach(self.core, facts)
        elif (info.num_blocks, info.num_cpu_blocks) != (self.core.blocks.num_blocks, self.core.blocks.num_swap_blocks):
            self.core.replace_pool(pools)
        if (num_concurrent_steps := max(1, info.num_concurrent_steps)) != self.core.in_flight.num_concurrent:
            self.core.set_num_concurrent_steps(num_concurrent_steps)
        if info.swap_ms_per_block:
            self.core.note_swap(1, info.swap_ms_per_block / 1e3)
        self.info = info
        self.ready.set()
        facts = {"model": info.model, "blocks": info.num_blocks, "block_size": info.block_size, "epoch": info.epoch}
        log.info("worker connected", extra=facts | {"num_concurrent_steps": num_concurrent_steps})
        return True

    async def _steps(self, patience: Patience) -> None:
        """Runs steps until the worker is lost; `patience` ends it when the oldest step in flight is late."""
        assert self.core is not None
        pacing = self._pacing = Pacing(self.core.in_flight.max_steps, self.core.in_flight.num_concurrent)
        while True:
            now, plan_time = time.monotonic(), pacing.next_plan_time()
            if plan_time is not None and plan_time < now + _TIMER_S:
                plan = self._plan(now)
                if plan.rows:
                    if pacing.oldest is None:
                        patience.begin()
                    pacing.add(plan, self.core.rates.expected_step_s(plan.num_tokens, plan.num_prefill_tokens), now)
                    await self._link.send(plan, self._observer.traces_of(plan))
                elif pacing.oldest is not None:
                    pacing.rest()
                else:
                    await self._link.check()
                    await self._idle()
                continue
            oldest = pacing.oldest
            assert oldest is not None
            result = await self._link.receive(oldest, None if plan_time is None else plan_time - now)
            if result is not None:
                self.last_step_ms = pacing.pop(time.monotonic()) * 1e3
                self.last_step_tokens = oldest.num_tokens
                self.num_answered += 1
                if pacing.oldest is None:
                    patience.end()
                else:
                    patience.begin()
                self._update(oldest, result)

    def _plan(self, now: float) -> Plan:
        """Plans the next step, and delivers the news that this made."""
        assert self.core is not None
        self._sessions.purge(now - max(_RETENTION_S, self._settings.lease_s))
        plan = self.core.schedule(now)
        self._observer.planned(plan, now)
        self._sessions.deliver_tokens(plan.new_tokens)
        self.deliver_finished(plan.finished)
        for dropped in plan.dropped:
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            self._fail(dropped.group, Refusal(code, "DEADLINE_EXCEEDED", dropped.message))
        for preemption in plan.preempted:
            facts = {"request_id": preemption.group.request_id, "by": preemption.group.preempted_by}
            log.info("preempted", extra=facts | {"reason": preemption.reason})
        return plan

    def _update(self, plan: Plan, result: StepResult) -> None:
        assert self.core is not None
        outputs = self.core.update(plan, result)
        for group in outputs.failed:
            message = "the model's logits are not finite for this request"
            self._fail(group, Refusal(grpc.StatusCode.INTERNAL, "INTERNAL", message))
        begun = self._sessions.deliver_tokens(outputs.new_tokens)
        self._observer.stepped(plan, outputs, begun, self.core, self.last_step_ms / 1e3)
        self.deliver_finished(outputs.finished)
        self._settled.set()

    async def _idle(self) -> None:
        """Waits for work, but not past the next deadline."""
        assert self.core is not None
        self._work.clear()
        deadline = self.core.next_deadline
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._work.wait()

    def _lose(self, reason: str, *, in_order: bool = False) -> None:
        """Requeues what ran: the worker is gone, with all that it had computed."""
        assert self.core is not None
        self._set_connected(False, worker_left=in_order)
        self._pacing = None
        groups, conviction = self.core.requeue_running(in_order=in_order)
        self._observer.lost(groups)
        facts = {"reason": reason, "requeued": len(groups), "suspects": self.core.suspects.num_suspects}
        log.log(logging.INFO if in_order else logging.ERROR, "worker lost", extra=facts)
        if conviction is not None:
            group, num_workers = conviction.group, conviction.num_workers
            message = (
                f"request {group.request_id!r} is given up: workers lost in a row while they computed it: "
                f"{num_workers}, the last one while it computed nothing else ({reason})"
            )
            self._fail(group, Refusal(grpc.StatusCode.INTERNAL, "INTERNAL", message))

    def _fail(self, group: SequenceGroup, refusal: Refusal) -> None:
        """Tells the router that a group has ended in an error."""
        ticket = self._sessions.ticket(group)
        if ticket is not None:
            level = logging.ERROR if refusal.code is grpc.StatusCode.INTERNAL else logging.INFO
            log.log(level, refusal.message, extra={"request_id": group.request_id})
            self._sessions.reject(ticket, refusal, time.monotonic())

    def deliver_finished(self, finished: list[Finished]) -> None:
        """Tells routers which sequences have ended."""
        now = time.monotonic()
        for ticket in self._sessions.deliver_finished(finished):
            self._sessions.end(ticket, now)
            group = ticket.group
            facts = {
                "request_id": group.request_id,
                "prompt_tokens": group.num_prompt_tokens,
                "output_tokens": sum(len(sequence.output_token_ids) for sequence in group.sequences),
                "preemptions": group.num_preemptions,
                "total_ms": round((now - group.arrival) * 1e3, 1),
            }
            log.info("request finished", extra=facts)


def _why_not(info: GetInfoResponse, before: GetInfoResponse | None, policy: Policy) -> str | None:
    """Why a worker cannot take the place of the one `before` (None for the first worker); None if it can."""
    if info.max_num_batched_tokens < policy.max_num_batched_tokens:
        return (
            f"--max-num-batched-tokens {policy.max_num_batched_tokens} is more than the "
            f"{info.max_num_batched_tokens} that the worker has room for: lower it, or raise the worker's"
        )
    for name in _SAME_OF_EVERY_WORKER if before is not None else ():
        if getattr(info, name) != getattr(before, name):
            return (
                f"its {name} is {getattr(info, name)}, and requests are served with {getattr(before, name)}; "
                "start one like the worker before, or this scheduler anew"
            )
    return None
