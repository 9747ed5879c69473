"""The schedulers behind this router: which exist, which one gets a request, and what happens when that one is lost.

All serve one model. No request is tied to its scheduler: when that is lost, hangs or goes away, another one continues
the request after the tokens that are already here, and so does the same one when it is back. Sampling is counter-based,
keyed by request and position, so the tokens to come are those that would have come anyway.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc

from protos import rpc
from protos import session_pb2 as pb
from protos.columns import next_number
from protos.errors import Refusal, unavailable
from protos.tls import TlsError
from router.balance import choose, prefix_key
from router.config import RouterSettings
from router.live_request import LiveRequest, OutputStream
from router.scheduler_link import SchedulerLink, give_up, model_of

_DNS = "dns:///"
# How often a name's addresses are looked up.
_LOOKUP_INTERVAL_S = 5.0
_ELSEWHERE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
T = TypeVar("T")
log = logging.getLogger(__name__)


class Schedulers:
    """All of this router's requests, at whichever scheduler each is.

    Args:
        on_change: called when `serving` or `welcome` may have changed.

    Attributes:
        welcome: what a scheduler said about itself and the model that all serve; None before the first connection.
    """

    def __init__(self, settings: RouterSettings, on_change: Callable[[], None]) -> None:
        self.welcome: pb.Welcome | None = None
        self._targets = settings.scheduler.split(",")
        self._tls = settings.scheduler_tls
        self._stall_s = settings.health_stall_s
        self._patience_s = settings.scheduler_patience_s
        self._max_blocks = settings.affinity_blocks
        self._slack = settings.load_slack
        self._on_change = on_change
        self._last_handle = 0
        self._links: dict[str, SchedulerLink] = {}
        # The model that all must serve; None before the first connection.
        self._model: tuple[str, int, int, str, str] | None = None
        # The schedulers that get requests now: those that serve, else those where requests have to wait.
        self._takers: list[SchedulerLink] = []
        # Where each live request is.
        self._places: dict[int, SchedulerLink] = {}

    @property
    def serving(self) -> bool:
        """Whether a request submitted now would run at once."""
        return any(link.serving for link in self._takers)

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._places)

    @property
    def takers(self) -> Sequence[SchedulerLink]:
        """The schedulers that get requests now."""
        return self._takers

    @property
    def heard(self) -> Sequence[SchedulerLink]:
        """The schedulers of the served model with which there is a session now. Any thread may ask."""
        return [link for link in list(self._links.values()) if link.connected and link.accepted]

    def labels(self) -> dict[str, str] | None:
        """The labels of this router's metrics; None before the first connection."""
        return None if self.welcome is None else {"model_name": self.welcome.model.model}

    def new_handle(self) -> int:
        """A number that no other request of this router has."""
        self._last_handle = next_number(self._last_handle, self._places)
        return self._last_handle

    async def who_has(self, scoped_id: str) -> SchedulerLink | None:
        """The scheduler that has this live request, whichever router submitted it."""
        asked = [link for link in self._takers if link.serving]
        answers = await asyncio.gather(*(_answer(link.explain(scoped_id, scoped_id, briefly=True)) for link in asked))
        told = zip(asked, answers, strict=True)
        return next((link for link, answer in told if not isinstance(answer, Refusal)), None)

    def submit(self, live: LiveRequest, timeout_s: float | None, holder: SchedulerLink | None = None) -> None:
        """Sends a request to a scheduler; `timeout_s` is how long its client still waits, None for ever.

        Args:
            live: the request.
            timeout_s: from now on.
            holder: a scheduler that already has it, from another call.

        Raises:
            Refusal: UNAVAILABLE, no scheduler takes it.
        """
        link = holder if holder in self._takers else self._pick(live, self._takers)
        if link is None:
            raise unavailable("NO_SCHEDULER", "no scheduler is ready; retry")
        live.deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._places[live.handle] = link
        link.submit(live)

    def release(self, live: LiveRequest) -> None:
        """Drops a request that is answered, or whose client is gone; in that case its blocks are free within a step."""
        link = self._places.pop(live.handle, None)
        if link is not None:
            link.release(live)

    def stop_sequence(self, handle: int, stream: OutputStream) -> None:
        """Reports a stop string in this sequence, which ends with the last of its tokens that count."""
        if handle in self._places:
            self._places[handle].stop_sequence(handle, stream)

    async def get_states(self) -> dict[str, pb.GetStateResponse | Refusal]:
        """Each scheduler's queues and blocks by its address, or why it does not answer."""
        away = unavailable("NO_SCHEDULER", "the scheduler does not answer: it is away")
        states: dict[str, pb.GetStateResponse | Refusal] = dict.fromkeys(self._links, away)
        asked = self._asked()
        answers = await asyncio.gather(*(_answer(link.get_state()) for link in asked))
        return states | {link.address: answer for link, answer in zip(asked, answers, strict=True)}

    async def locate(self, handles: Sequence[int]) -> list[tuple[int, int]]:
        """(session_pb2.Status, place in its scheduler's queue or -1) of each live request; status 0 if unknown."""
        known = dict.fromkeys(handles, (int(pb.STATUS_UNSPECIFIED), -1))
        asked = {link: [handle for handle in handles if self._is_at(link, handle)] for link in self._asked()}
        asked = {link: there for link, there in asked.items() if there}
        answers = await asyncio.gather(*(link.locate(there) for link, there in asked.items()))
        for there, answer in zip(asked.values(), answers, strict=True):
            known.update(zip(there, answer, strict=True))
        return [known[handle] for handle in handles]

    async def explain(self, scoped_id: str, request_id: str) -> pb.ExplainResponse:
        """Why a live request, of this router or another, is where it is; the client calls it `request_id`.

        Raises:
            Refusal: NOT_FOUND, there is no such live request; UNAVAILABLE.
        """
        asked = self._asked()
        away = {link: _has(link, scoped_id) for link in self._links.values() if link not in asked}
        refusals = []
        for link in sorted(away, key=lambda link: not away[link]):
            who = f"{link.address}, which {'has' if away[link] else 'may have'} {request_id[:128]!r}"
            refusals.append(unavailable("NO_SCHEDULER", f"no answer of {who}: {self.obstacle(link.address)}; retry"))
        for answer in await asyncio.gather(*(_answer(link.explain(scoped_id, request_id)) for link in asked)):
            if not isinstance(answer, Refusal):
                return answer
            refusals.append(answer)
        if not refusals:
            raise unavailable("NO_SCHEDULER", "no scheduler is known yet; retry")
        # It is certain that no scheduler has it only if all have said so.
        raise next((each for each in refusals if each.code is not grpc.StatusCode.NOT_FOUND), refusals[0])

    def obstacle(self, address: str) -> str:
        """Why a scheduler gets no requests; empty if it does."""
        link = self._links.get(address)
        if link is None or not link.connected:
            return "not connected"
        if not link.accepted:
            assert link.welcome is not None
            return f"serves another model, {link.welcome.model.model!r}"
        if link.draining:
            return "drains"
        if link.stalled:
            return "is silent"
        return "" if link.serving else "has no worker"

    async def run(self) -> None:
        """Keeps a session to each scheduler, for ever."""
        async with asyncio.TaskGroup() as group:
            names = [target.removeprefix(_DNS) for target in self._targets if target.startswith(_DNS)]
            fixed = [target for target in self._targets if not target.startswith(_DNS)]
            tasks: dict[str, asyncio.Task[None]] = {}
            found: dict[str, list[str]] = {}
            while True:
                for name in names:
                    found[name] = await _addresses(name, found.get(name, []))
                # The name that each one's certificate must have, if not its address.
                wanted = dict.fromkeys(fixed, "")
                for name, addresses in found.items():
                    wanted |= dict.fromkeys(addresses, name.rpartition(":")[0])
                for address in wanted.keys() - self._links.keys():
                    try:
                        link = self._link(address, wanted[address])
                    except TlsError as error:
                        if address in fixed:  # at the start
                            raise
                        log.warning("a scheduler cannot be dialled yet", extra={"error": str(error)})
                        continue
                    self._links[address] = link
                    tasks[address] = group.create_task(link.run())
                for address in self._links.keys() - wanted.keys():
                    # An address may be missing from the name for a moment; a session is better evidence.
                    if not self._links[address].connected and not self._links[address].num_live:
                        task = tasks.pop(address)
                        task.cancel()
                        await asyncio.gather(task, return_exceptions=True)
                        await self._links.pop(address).close()
                        self._changed()
                if not names:
                    return  # the group waits for the links
                await asyncio.sleep(_LOOKUP_INTERVAL_S)

    def break_off(self) -> None:
        """Ends all live requests with an error: this router is about to go."""
        for link in self._links.values():
            link.break_off()

    async def close(self) -> None:
        """Hangs up."""
        await asyncio.gather(*(link.close() for link in self._links.values()))

    def _link(self, address: str, server_name: str) -> SchedulerLink:
        line = rpc.Line(address, self._tls, server_name)
        return SchedulerLink(address, self._stall_s, self._patience_s, self._changed, self._refused, line)

    def _asked(self) -> list[SchedulerLink]:
        """The schedulers to ask: one that is known to be away would keep the caller waiting."""
        links = list(self._links.values())
        return links if len(links) == 1 else [link for link in links if link.connected and not link.stalled]

    def _is_at(self, link: SchedulerLink, handle: int) -> bool:
        return self._places.get(handle) is link

    def _pick(self, live: LiveRequest, links: Sequence[SchedulerLink]) -> SchedulerLink | None:
        links = [link for link in links if _has_room(link, live)] or links
        if len(links) < 2:
            return links[0] if links else None
        assert self.welcome is not None
        prompt = live.request.prompt_token_ids
        key = prefix_key(prompt, self.welcome.model.block_size, self._max_blocks, live.request.cache_salt)
        names, loads = [link.name for link in links], [link.num_queued for link in links]
        if key is None:
            return links[choose(live.request.request_id.encode(), names, loads, slack=0.0)]
        return links[choose(key, names, loads, self._slack)]

    def _move(self, live: LiveRequest) -> bool:
        """Gives a request to another scheduler that takes requests; False if there is none."""
        here = self._places[live.handle]
        others = [link for link in self._takers if link is not here and link.address not in live.refused_by]
        link = self._pick(live, others)
        if link is None:
            return False
        facts = {"request_id": live.request.request_id, "from": here.address, "to": link.address}
        log.info("request goes to another scheduler", extra=facts | {"tokens": live.num_tokens})
        here.release(live, moved=True)
        self._places[live.handle] = link
        link.submit(live)
        return True

    def _refused(self, live: LiveRequest, refusal: Refusal) -> None:
        here = self._places[live.handle]
        if refusal.reason == "REQUEST_ID_IN_USE" and live.rename():
            return here.submit(live)
        live.refused_by.add(here.address)
        if refusal.code not in _ELSEWHERE or not (self._move(live) or here.draining):
            live.fail(refusal)
        return None

    def _changed(self) -> None:
        """Called when a scheduler has come, gone, or said something new about itself."""
        self._compare_models()
        accepted = [link for link in self._links.values() if link.accepted]
        serving = [link for link in accepted if link.serving]
        self._takers = serving or [link for link in accepted if link.connected and not link.draining]
        alive = {link.life for link in self._links.values() if link.connected and not link.stalled}
        for link in self._links.values():
            for live in link.live:
                live.spare(alive)
        if serving:
            for link in self._links.values():
                if link.gone:
                    for live in link.live:
                        self._hand_over(live, link)
        self._on_change()

    def _hand_over(self, live: LiveRequest, link: SchedulerLink) -> None:
        """Moves a request away from a scheduler that is gone, or about to go."""
        live.refused_by.clear()
        if link.gone_in_order or not give_up(live, link.life):
            self._move(live)

    def _compare_models(self) -> None:
        """Accepts the schedulers of the model served so far or, if none has it any more, of the first one's model.

        A scheduler that is away counts with the model that it had: it may come back.
        """
        # Connected ones first.
        known = sorted((link for link in self._links.values() if link.welcome), key=lambda link: not link.connected)
        models = {link: model_of(link.welcome) for link in known if link.welcome}
        if not models:
            return
        if self._model not in models.values():
            self._model = models[known[0]]
        for link, model in models.items():
            if link.accepted and model != self._model:
                facts = {"scheduler": link.address, "its": model, "ours": self._model}
                log.error("a scheduler serves another model than the others, and gets no requests", extra=facts)
            link.accepted = model == self._model
        # From the one with the most room, since requests that only that one can run go there.
        accepted = [
            (link.connected, _size(link.welcome), link.welcome) for link in known if link.accepted and link.welcome
        ]
        *_, self.welcome = max(accepted, key=lambda each: each[:2])


def load_of(links: Sequence[SchedulerLink]) -> pb.Load:
    """The last load reports of schedulers, added up, their KV caches taken as one."""
    blocks = [link.welcome.model.num_blocks if link.welcome else 0 for link in links]
    used = sum(link.load.kv_usage * num_blocks for link, num_blocks in zip(links, blocks, strict=True))
    return pb.Load(
        serving=any(link.load.serving for link in links),
        num_waiting=sum(link.load.num_waiting for link in links),
        num_running=sum(link.load.num_running for link in links),
        num_swapped=sum(link.load.num_swapped for link in links),
        kv_usage=used / max(1, sum(blocks)),
    )


def _size(welcome: pb.Welcome) -> tuple[int, int]:
    """How many sequences run together, and how many tokens the KV cache holds."""
    return welcome.limits.max_num_seqs, welcome.model.num_blocks * welcome.model.block_size


def _has_room(link: SchedulerLink, live: LiveRequest) -> bool:
    """Whether a scheduler could ever run all of a request's sequences together, up to their first tokens."""
    assert link.welcome is not None
    model, num_seqs = link.welcome.model, live.request.num_sequences
    # The prompt's full blocks once, and for each sequence the block that its first token goes into.
    num_blocks = len(live.request.prompt_token_ids) // model.block_size + num_seqs
    return num_seqs <= link.welcome.limits.max_num_seqs and num_blocks <= model.num_blocks


def _has(link: SchedulerLink, scoped_id: str) -> bool:
    """Whether this router has given a live request to that scheduler."""
    return any(live.request.scoped_id == scoped_id for live in link.live)


async def _answer(question: Awaitable[T]) -> T | Refusal:
    try:
        return await question
    except Refusal as refusal:
        return refusal


async def _addresses(name: str, before: list[str]) -> list[str]:
    """All addresses of "host:port"; those from `before` while the lookup fails."""
    host, _, port = name.rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError as error:
        log.warning("the schedulers' name cannot be looked up", extra={"host": host, "error": str(error)})
        return before
    # A host with addresses of both families is one scheduler.
    family = min(row[0] for row in found)
    hosts = sorted({str(row[4][0]) for row in found if row[0] == family})
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
