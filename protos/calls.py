"""The outcome of every call to a server: an interceptor around all that may refuse a call, end it or have bugs."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf import descriptor_pool
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from protos.histogram import REQUEST_SECONDS, Histogram
from protos.interceptor import Context, Interceptor, behaviour_of, with_behaviour

_DETAILS = "grpc-status-details-bin"
# By whether the client and the server send several messages.
_KINDS = {
    (False, False): "unary",
    (False, True): "server_stream",
    (True, False): "client_stream",
    (True, True): "bidi_stream",
}


@dataclass(slots=True, eq=False)
class Call:
    """One call, while it is answered and at its end.

    Attributes:
        service: full name.
        kind: "unary", "server_stream", "client_stream" or "bidi_stream".
        arrival: by `time.monotonic`, s.
        code: how it ended.
        reason: the stable word of a refusal; else empty.
        message: the sentence of a refusal; else empty.
        total_s: from arrival to end.
    """

    service: str
    method: str
    kind: str
    arrival: float
    code: grpc.StatusCode = grpc.StatusCode.OK
    reason: str = ""
    message: str = ""
    total_s: float = 0.0


@dataclass(slots=True)
class MethodCounts:
    """All calls of one method, so far."""

    num_started: int = 0
    num_by_code: dict[grpc.StatusCode, int] = field(default_factory=dict)
    seconds: Histogram = field(default_factory=lambda: Histogram(REQUEST_SECONDS))


C = TypeVar("C", bound=Call)


class Calls(Interceptor, Generic[C]):
    """Counts calls by method, and lets a subclass act when each begins and ends.

    Attributes:
        counts: by kind, service and method.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str, str], MethodCounts] = {}
        self._live: dict[Any, C] = {}

    def begin(self, service: str, method: str, kind: str, context: Context) -> C:
        """Called when a call arrives."""
        return Call(service, method, kind, time.monotonic())  # type: ignore[return-value]

    def end(self, call: C, context: Context) -> None:
        """Called when the call has ended, as its fields say."""

    def of(self, context: Context) -> C:
        """The live call that a servicer answers."""
        return self._live[context]

    def around(self, handler: Any, method: str) -> Any:
        behaviour, (_, service, name) = behaviour_of(handler), method.split("/")
        kind = _kind(service, name, handler)
        counts = self.counts.setdefault((kind, service, name), MethodCounts())

        async def observed(request: object, context: Context) -> object:
            call = self._live[context] = self.begin(service, name, kind, context)
            counts.num_started += 1
            answer = behaviour(request, context)
            del request  # see `protos.boundary`: errors outlive their calls, and with them what our frames hold
            try:
                answered = await answer
                if context.code() not in (0, None, grpc.StatusCode.OK):  # set without waiting for the client
                    _read_refusal(call, context)
                return answered
            except asyncio.CancelledError:
                # The client hung up, or gRPC did at the deadline.
                left_s = context.time_remaining()
                late = left_s is not None and left_s <= 0
                call.code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
                raise
            except grpc.aio.AbortError:
                _read_refusal(call, context)
                raise
            except BaseException:  # the client is gone, and gRPC says so in one of several ways
                call.code = grpc.StatusCode.CANCELLED
                raise
            finally:
                del self._live[context]
                call.total_s = time.monotonic() - call.arrival
                counts.num_by_code[call.code] = counts.num_by_code.get(call.code, 0) + 1
                counts.seconds.observe(call.total_s)
                self.end(call, context)

        return with_behaviour(handler, observed)


def _kind(service: str, name: str, handler: Any) -> str:
    """The kind of the method as declared, if it is: its handler may be one that refuses calls of any kind."""
    try:
        method = descriptor_pool.Default().FindMethodByName(f"{service}.{name}")
    except KeyError:
        return _KINDS[handler.request_streaming, handler.response_streaming]
    return _KINDS[method.client_streaming, method.server_streaming]


def _read_refusal(call: Call, context: Context) -> None:
    """Copies the status that the call was ended with."""
    code: Any = context.code()
    call.code = code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN
    call.message = str(context.details() or "")
    for key, value in context.trailing_metadata() or ():
        if key == _DETAILS:
            for detail in Status.FromString(value).details:
                info = ErrorInfo()
                if detail.Unpack(info):
                    call.reason = info.reason
