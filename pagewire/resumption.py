"""How a call continues when its server goes away: it is made again, for a stream with how much of it has arrived.

A server that dies, drains or is unreachable for a while costs only a pause. Nothing is tried for ever: after a number
of attempts in a row without output in between, the caller gets the error.
"""

import logging
import time
from dataclasses import dataclass

import grpc

from pagewire.access import as_grpc_takes
from pagewire.errors import RequestError, named
from pagewire.results import Delta, Transcript
from protos.errors import Refusal
from protos.pagewire.v1 import generation_pb2 as pb

# With the delays between them, about half a minute.
_MOST_ATTEMPTS = 12
# The same before anything has arrived; eleven seconds.
_MOST_BEFORE_BEGUN = 7
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
# Codes from a server, or from gRPC for it, when it goes away and another one may do: ABORTED once a client has tokens,
# CANCELLED for a call that arrives as the server ends.
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED)
# How gRPC's message begins if it has not found a server at all.
_NOBODY_THERE = ("failed to connect", "errors resolving", "DNS resolution failed")
# What Envoy says, or gRPC about other proxies, if a call takes longer than they allow: the next one would, too.
_OVER_A_PROXYS_LIMIT = ("upstream request timeout", "Received http2 header with status: 504")
# How a call ends when a proxy keeps its deadline too, and is first; with less time than this left it is that.
_AT_THE_DEADLINE = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
_NO_TIME_S = 0.01
# Another call has resumed the stream: the two would take it from each other for ever.
_TAKEN_OVER = "TAKEN_OVER"
# The server has no room now, or does not know yet that the broken call is dead. For streams that have begun.
_NOT_YET = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ALREADY_EXISTS)
# A pause of at least this many seconds is logged, once until the call goes on.
_TOLD_OF_S = 1.0
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Connection:
    """What the calls of one client share.

    Attributes:
        was_up: whether one of them found a server.
    """

    was_up: bool = False


class Attempts:
    """One request, through call after call until one is answered.

    Args:
        timeout: seconds for all calls together; None for no limit.
        connection: the client's.

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
        """Seconds that are left; None for no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def delay_after(self, error: RequestError) -> float:
        """Seconds after which to try again.

        Raises:
            RequestError: `error`, if it is final, or DeadlineExceeded if it only tells that the time is up.
        """
        left = self.timeout
        if left is not None and left < _NO_TIME_S and error.code in _AT_THE_DEADLINE and not error.reason:
            error = named(Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "", f"the timeout has passed ({error})"))
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
        """Seconds after which to try again; None if the error is final.

        A call is made again once without delay: the connection may have been a dead one. After that it is repeated for
        some seconds, if a server was ever there: it may be restarting, or have said when to try again.
        """
        crossed = error.code is grpc.StatusCode.CANCELLED and not error.reason
        not_yet_dead = error.code is grpc.StatusCode.ALREADY_EXISTS and self._num_attempts > 1  # of our last call
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
        """Ever longer, or what the server wants if that is more, up to a limit; None if the timeout ends before."""
        delay_s = max(_FIRST_DELAY_S * 2 ** (self._num_attempts - 1), wanted_s or 0.0)
        left, delay_s = self.timeout, min(delay_s, _LONGEST_DELAY_S)
        return delay_s if left is None or delay_s < left else None


class Resumption(Attempts):
    """One stream, through as many calls as it takes.

    Args:
        request: as first sent.
        timeout: seconds for all calls together; None for no limit.
        connection: the client's.

    Attributes:
        transcript: what has arrived.
    """

    def __init__(self, request: pb.GenerateRequest, timeout: float | None, connection: Connection) -> None:
        super().__init__(timeout, connection)
        self.transcript = Transcript()
        self._request = request
        # Whether anything has arrived; and the seed that the first message told, without which nothing can be resumed.
        self._begun = False
        self._seed: int | None = None

    def request(self) -> pb.GenerateRequest:
        """The request that the next call sends."""
        if self._seed is not None:
            self._request.resume.seed = self._seed
            del self._request.resume.received[:]
            self._request.resume.received.extend(self.transcript.received())
        return self._request

    def add(self, response: pb.GenerateResponse) -> list[Delta]:
        """Takes the next message; returns its deltas.

        Raises:
            RequestError: what broke the stream, if this server starts it afresh: it does not support resumption.
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
        """Whether the answer is complete, so that a call that breaks leaves nothing to resume."""
        return self.transcript.is_whole and error.code in _LOST

    def _delay_after(self, error: RequestError) -> float | None:
        if not self._begun:
            return super()._delay_after(error)
        if self._seed is None or error.reason == _TAKEN_OVER:
            return None
        if error.code not in (*_LOST, *_NOT_YET):
            return None
        if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and self._num_attempts == 1:
            return None  # about the stream itself, as when its client has not read for long
        if self._num_attempts > _MOST_ATTEMPTS:
            return None
        return self._delay_s(error.retry_after_s if error.code in _NOT_YET else None)
