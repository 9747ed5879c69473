"""What every call to a server came to: the outermost interceptor, which sees refusals, cancellations and bugs alike.

Calls of our own services only: health checks and reflection are no traffic.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from protos.histogram import REQUEST_SECONDS, Histogram

_DETAILS = "grpc-status-details-bin"
_KINDS = {
    "unary_unary": "unary",
    "unary_stream": "server_stream",
    "stream_unary": "client_stream",
    "stream_stream": "bidi_stream",
}


@dataclass(slots=True, eq=False)
class Call:
    """One call, while it is answered and at its end.

    Attributes:
        service: full name.
        kind: "unary", "server_stream", "client_stream" or "bidi_stream".
        arrival: by `time.monotonic`, s.
        code: how it ended.
        reason: of a refusal: its stable word; else empty.
        message: of a refusal: its sentence; else empty.
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


def sides_of(handler: Any) -> str:
    """How gRPC names handlers of this kind, as "unary_stream" where one request is answered by a stream."""
    return "_".join(
        "stream" if streams else "unary" for streams in (handler.request_streaming, handler.response_streaming)
    )


class Calls(grpc.aio.ServerInterceptor, Generic[C]):
    """Counts calls by method, and tells of each at its begin and its end.

    Attributes:
        counts: by kind, service and method.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str, str], MethodCounts] = {}
        self._live: dict[Any, C] = {}

    def begin(self, service: str, method: str, kind: str, context: "grpc.aio.ServicerContext[Any, Any]") -> C:
        """A call arrives."""
        return Call(service, method, kind, time.monotonic())  # type: ignore[return-value]

    def end(self, call: C, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        """The call has ended, as it says."""

    def of(self, context: "grpc.aio.ServicerContext[Any, Any]") -> C:
        """The live call that a servicer answers."""
        return self._live[context]

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(details)
        if handler is None or not details.method.startswith("/pagewire."):
            return handler
        sides = sides_of(handler)
        kind = _KINDS[sides]
        behaviour = getattr(handler, sides)
        _, service, method = details.method.split("/")
        counts = self.counts.setdefault((kind, service, method), MethodCounts())

        async def observed(request: object, context: "grpc.aio.ServicerContext[Any, Any]") -> object:
            call = self._live[context] = self.begin(service, method, kind, context)
            counts.num_started += 1
            answer = behaviour(request, context)
            del request  # see `protos.rpc`: errors outlive their calls, and with them what our frames hold
            try:
                return await answer
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

        make = getattr(grpc, f"{sides}_rpc_method_handler")
        return make(observed, handler.request_deserializer, handler.response_serializer)


def _read_refusal(call: Call, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
    """Takes over what the call was aborted with."""
    code: Any = context.code()
    call.code = code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN
    call.message = str(context.details() or "")
    for key, value in context.trailing_metadata() or ():
        if key == _DETAILS:
            for detail in Status.FromString(value).details:
                info = ErrorInfo()
                if detail.Unpack(info):
                    call.reason = info.reason
