"""How a call goes on whose server goes: it is made again, a stream's with what has arrived of its answer.

A server that dies, drains or is unreachable for a while costs a pause. Nothing is tried for ever: after so many
attempts in a row without output between, the error is the caller's.
"""

import logging
import time
from dataclasses import dataclass

import grpc

from pagewire.access import as_grpc_takes
from pagewire.errors import RequestError
from pagewire.results import Delta, Transcript
from protos.pagewire.v1 import generation_pb2 as pb

# With the delays between them, half a minute.
_MOST_ATTEMPTS = 12
# Before anything has come; eleven seconds.
_MOST_BEFORE_BEGUN = 7
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
# What a server says, or gRPC for it, when it goes and another one may do: ABORTED once a client has tokens, CANCELLED
# for a call that crosses with its end.
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED)
# How gRPC begins its sentence where it has not found a server at all.
_NOBODY_THERE = ("failed to connect", "errors resolving", "DNS resolution failed")
# What Envoy says, or gRPC of other proxies, where a call takes longer than they allow: the next one would, too.
_OVER_A_PROXYS_LIMIT = ("upstream request timeout", "Received http2 header with status: 504")
# Another call has resumed the stream: to take it back would go on for ever.
_TAKEN_OVER = "TAKEN_OVER"
# A server that has no room now, or does not know yet that the broken call is dead. They matter only to who has begun.
_NOT_YET = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ALREADY_EXISTS)
# Of a pause this long, in seconds, whoever waits is told, once until the call goes on.
_TOLD_OF_S = 1.0
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Connection:
    """What the calls of one client tell each other.

    Attributes:
        was_up: whether a server was there for one of them.
    """

    was_up: bool = False


class Attempts:
    """One request through as many calls as it takes until one is answered.

    Args:
        timeout: seconds for all calls together; None for no limit.
        connection: of the client.

    Attributes:
        broken_by: the last call's error, until another call is known to do better.
    """

    def __init__(self, timeout: float | None, connection: Connection) -> None:
        self.broken_by: RequestError | None = None
        timeout = as_grpc_takes(timeout)
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._connection = connection
        self._num_attempts = 0
        self._told = False

    @property
    def timeout(self) -> float | None:
        """Seconds that are left."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def delay_after(self, error: RequestError) -> float:
        """Seconds after which to try again.

        Raises:
            RequestError: the error stands.
        """
        self.broken_by = error
        self._num_attempts += 1
        delay_s = self._delay_after(error)
        if delay_s is None:
            raise error from None
        if delay_s >= _TOLD_OF_S and not self._told:
            self._told = True
            log.warning("no answer (%s); trying again for a while", error)
        return delay_s

    def _delay_after(self, error: RequestError) -> float | None:
        """None where the error stands.

        A call is made once more, at once: the connection may have been a dead one. And then for some seconds, if a
        server was ever there: it may be restarting, or have said when to come back.
        """
        crossed = error.code is grpc.StatusCode.CANCELLED and not error.reason
        not_yet_dead = error.code is grpc.StatusCode.ALREADY_EXISTS and self._num_attempts > 1  # the call before
        if not (error.code is grpc.StatusCode.UNAVAILABLE or crossed or not_yet_dead):
            return None
        if str(error).startswith(_OVER_A_PROXYS_LIMIT):
            return None
        if not str(error).startswith(_NOBODY_THERE):
            self._connection.was_up = True
        if self._num_attempts == 1 and error.retry_after_s is None:
            return 0.0
        if not self._connection.was_up or self._num_attempts > _MOST_BEFORE_BEGUN:
            return None
        return self._delay_s(error.retry_after_s)

    def _delay_s(self, wanted_s: float | None) -> float | None:
        """Ever longer from attempt to attempt, and as long as a server wants if that is more; None for too long."""
        delay_s = max(_FIRST_DELAY_S * 2 ** (self._num_attempts - 1), wanted_s or 0.0)
        left, delay_s = self.timeout, min(delay_s, _LONGEST_DELAY_S)
        return delay_s if left is None or delay_s < left else None


class Resumption(Attempts):
    """A stream through as many calls as it takes.

    Args:
        request: as it is sent first.
        timeout: seconds for all calls together; None for no limit.
        connection: of the client.

    Attributes:
        transcript: what has arrived.
    """

    def __init__(self, request: pb.GenerateRequest, timeout: float | None, connection: Connection) -> None:
        super().__init__(timeout, connection)
        self.transcript = Transcript()
        self._request = request
        # Whether anything has come, and whether the first message told the seed, without which nothing can be resumed.
        self._begun = False
        self._seed: int | None = None

    def request(self) -> pb.GenerateRequest:
        """What the next call sends."""
        if self._seed is not None:
            self._request.resume.seed = self._seed
            del self._request.resume.received[:]
            self._request.resume.received.extend(self.transcript.received())
        return self._request

    def add(self, response: pb.GenerateResponse) -> list[Delta]:
        """Takes the next message; gives its deltas.

        Raises:
            RequestError: what broke the stream, since this server begins it anew: it knows of no resumption.
        """
        if self.broken_by is not None and self._seed is not None and response.seed != self._seed:
            raise self.broken_by
        self._begun = self._connection.was_up = True
        self.broken_by = None
        if response.outputs:
            self._num_attempts, self._told = 0, False
        if response.HasField("seed"):
            self._seed = response.seed
            self._request.request_id = response.request_id
            self._request.model = response.model or self._request.model
        return self.transcript.add(response)

    def is_over_after(self, error: RequestError) -> bool:
        """Whether the answer is whole, so that a call which breaks leaves nothing to resume."""
        return self.transcript.is_whole and error.code in _LOST

    def _delay_after(self, error: RequestError) -> float | None:
        if not self._begun:
            return super()._delay_after(error)
        if self._seed is None or error.reason == _TAKEN_OVER:
            return None
        if error.code not in (*_LOST, *_NOT_YET):
            return None
        if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and self._num_attempts == 1:
            return None  # of the stream itself, as where its client has not read for long
        if self._num_attempts > _MOST_ATTEMPTS:
            return None
        return self._delay_s(error.retry_after_s if error.code in _NOT_YET else None)
