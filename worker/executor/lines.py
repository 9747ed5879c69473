"""Ranks in processes that the front has not started itself, on any host: a line to each, which is a TCP connection.

Steps go out on all lines, and rank 0 answers on its own. A line ends with the process at either end: at once if the
kernel of its host is alive, within seconds if it is not. So a loss is noticed even while nothing runs, without a
heartbeat, and nothing times out, however long a service idles; a collective of gloo or NCCL can do neither.
"""

import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import NoReturn

from torch.distributed import Store

from protos.process import calm_collector
from protos.worker_pb2 import ExecuteModelRequest, GetInfoResponse
from worker.checkpoint import ModelError
from worker.config import WorkerSettings
from worker.executor.executor import RankLost
from worker.executor.rank import Outcome, Rank
from worker.executor.told import NumberedAnswer, read_outcome, tag_end, tag_info, tag_outcome, wait_for_infos
from worker.ranks import Host, Place

LOOPBACK = "127.0.0.1"
# How long ranks may take to connect, and one that has connected to say which it is.
_MEETING_S, _GREETING_S = 600.0, 5.0
_LOOK_S = 0.25
# The front's address and a secret, in the store.
_FRONT = "pagewire/front"
_SECRET_BYTES, _RANK_BYTES = 16, 4
# A host that vanishes silently is noticed after 5 + 3 * 3 s, or when it has acknowledged nothing for that long.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 14_000}

# The reason that no step can be run any more after an orderly close.
_CLOSED = "closed"

log = logging.getLogger(__name__)


class LinesExecutor:
    """See `Executor`.

    Args:
        connect: returns the line to each rank, in order; raises ModelError or RankLost.
    """

    def __init__(self, connect: Callable[[], list[Connection]]) -> None:
        self._connect = connect
        self._lines: list[Connection] = []
        self._num_launched = 0
        self._num_answered = 0
        # Held by the thread that reads rank 0's line.
        self._reading = threading.Lock()
        self._loss: str | None = None
        self._has_ended = threading.Event()

    def load(self, on_lost: Callable[[], None]) -> GetInfoResponse:
        """See `Executor`."""
        self._lines = self._connect()
        try:
            info = wait_for_infos(self._lines)
        except (EOFError, OSError) as error:
            raise RankLost("a rank has ended while it loaded the model") from error
        threading.Thread(target=self._watch, args=(on_lost,), name="watch", daemon=True).start()
        return info

    def launch(self, request: ExecuteModelRequest) -> NumberedAnswer:
        """See `Executor`."""
        message = request.SerializeToString()
        try:
            # The first stage, which has the highest ranks, should not wait until the last one has read.
            for line in reversed(self._lines):
                line.send_bytes(message)
        except OSError as error:
            self._has_ended.wait(_LOOK_S)  # the watch thread is about to say which one, and why
            raise self._end("a line is broken") from error
        self._num_launched += 1
        return NumberedAnswer(self.answer, self._num_launched)

    def is_usable(self) -> bool:
        """See `Executor`."""
        return self._loss is None

    def close(self) -> None:
        """See `Executor`: ranks end with their lines."""
        self._loss = self._loss or _CLOSED
        self._hang_up()

    def answer(self, number: int) -> Outcome:
        """Rank 0's answer to the `number`th step that was launched; answers to earlier steps are skipped."""
        try:
            with self._reading:
                while True:
                    outcome = read_outcome(self._lines[0].recv_bytes())
                    if isinstance(outcome, RankLost):
                        raise self._end(f"rank 0 failed: {outcome}")
                    self._num_answered += 1
                    if self._num_answered == number:
                        return outcome
        except (EOFError, OSError) as error:
            raise self._end("rank 0 is gone") from error

    def _watch(self, on_lost: Callable[[], None]) -> None:
        """Waits until any line ends, and then ends all ranks."""
        poll = select.poll()
        for line in self._lines:
            poll.register(line.fileno(), select.POLLRDHUP)
        ended = {descriptor for descriptor, _ in poll.poll()}
        for rank, line in enumerate(self._lines):
            if self._loss is None and line.fileno() in ended:
                # Whoever waits for an answer is reading rank 0's line, to its end.
                with self._reading if rank == 0 else contextlib.nullcontext():
                    self._end(_last_word(rank, line))
        if self._loss != _CLOSED:
            on_lost()

    def _end(self, loss: str) -> RankLost:
        """Ends all ranks; the first reason is the one that counts."""
        if self._loss is None:
            self._loss = loss
            log.error("ranks lost: %s", loss)
        self._has_ended.set()
        self._hang_up()
        return RankLost(self._loss)

    def _hang_up(self) -> None:
        """Ends all lines. Closing them is not enough: the kernel keeps a line that a thread is polling."""
        for line in self._lines:
            with socket.socket(fileno=os.dup(line.fileno())) as end, contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _last_word(rank: int, line: Connection) -> str:
    """Why a rank has ended; answers that nobody has read are skipped."""
    with contextlib.suppress(EOFError, OSError):
        while not isinstance(outcome := read_outcome(line.recv_bytes()), RankLost):
            pass
        return f"rank {rank} failed: {outcome}"
    return f"rank {rank} is gone"


def meet_ranks(
    store: Store, address: str, expected: Collection[int], look: Callable[[list[int]], None]
) -> Mapping[int, Connection]:
    """The lines to ranks, by their number, once all of them have connected.

    Args:
        store: where they find this address.
        address: of this host, as they know it.
        expected: their numbers.
        look: called with those that have not connected; raises if it knows that one never will.

    Raises:
        RankLost: not all connected in time.
    """
    secret = secrets.token_bytes(_SECRET_BYTES)
    lines: dict[int, Connection] = {}
    deadline = time.monotonic() + _MEETING_S
    with socket.create_server((LOOPBACK if address == LOOPBACK else "", 0)) as server:
        server.settimeout(_LOOK_S)
        store.set(_FRONT, f"{address} {server.getsockname()[1]} {secret.hex()}")
        while missing := sorted(set(expected) - lines.keys()):
            look(missing)
            if time.monotonic() > deadline:
                raise RankLost(f"ranks {missing} have not come within {_MEETING_S:.0f} s")
            with contextlib.suppress(TimeoutError, ConnectionError):
                peer, _ = server.accept()
                peer.settimeout(_GREETING_S)
                greeting = peer.recv(_SECRET_BYTES + _RANK_BYTES)
                rank = int.from_bytes(greeting[_SECRET_BYTES:])
                if hmac.compare_digest(greeting[:_SECRET_BYTES], secret) and rank in missing:
                    lines[rank] = _line(peer)
                else:
                    peer.close()
    return lines


def run_here(line: Connection, rank: Rank, number: int, receive: Callable[[], bytes] | None = None) -> None:
    """Loads and runs a rank until its line ends or it fails.

    Args:
        line: to the front.
        rank: the rank to run.
        number: its number; only rank 0 answers.
        receive: waits for the next step, as `line.recv_bytes` does; None: it is that.
    """
    receive = receive or line.recv_bytes

    def steps() -> bytes | None:
        with contextlib.suppress(EOFError, OSError):
            return receive()
        return None

    def answer(outcome: Outcome) -> None:
        line.send_bytes(tag_outcome(outcome))

    try:
        info = rank.load()
        calm_collector()
        line.send_bytes(tag_info(info))
        rank.run(steps, answer if number == 0 else None)
    except Exception as error:
        known = isinstance(error, ModelError)
        if not known:
            log.exception("rank failed")
        told = ModelError(f"{error} (rank {number} on {socket.gethostname()})") if known else error
        with contextlib.suppress(OSError):
            line.send_bytes(tag_end(told))
    finally:
        line.close()


def be_rank(line: Connection, settings: WorkerSettings, place: Place, host: Host, store: Store) -> NoReturn:
    """Runs a process that is a rank and nothing else: it ends when the front does, with status 0 then.

    Args:
        line: to the front.
        settings: of the worker.
        place: the rank's.
        host: its part of its host.
        store: where it finds the other ranks.
    """
    steps: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(line, steps), name="steps", daemon=True).start()
    run_here(line, Rank(settings, place, host, store), place.rank, steps.get)
    logging.shutdown()
    os._exit(1)


def dial(store: Store, rank: int) -> Connection:
    """The line to the front, for a rank's process."""
    address, port, secret = store.get(_FRONT).decode().split()
    peer = socket.create_connection((address, int(port)), timeout=_GREETING_S)
    peer.sendall(bytes.fromhex(secret) + rank.to_bytes(_RANK_BYTES))
    return _line(peer)


def _line(peer: socket.socket) -> Connection:
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)  # not every system knows all of them
    return Connection(peer.detach())


def _read(line: Connection, steps: SimpleQueue[bytes]) -> NoReturn:
    """Takes steps off a line as they come, however long the rank computes: TCP ends a line that nobody reads for long.

    Ends this process when the front is gone, whatever it is doing: it is not needed any more.
    """
    with contextlib.suppress(EOFError, OSError):
        while True:
            steps.put(line.recv_bytes())  # the front sends only a few ahead
    os._exit(0)
