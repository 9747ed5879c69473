"""The named errors of this package: those of a server's refusals, and the base of those that arise on this side.

InvalidRequest, Unsupported and NotFound are never worth a retry; QueueFull and Unavailable are, after `retry_after_s`.
"""

from typing import cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status

from protos.errors import Refusal, from_status

_DETAILS_KEY = "grpc-status-details-bin"


class PagewireError(Exception):
    """The base of every error that Pagewire raises on purpose; its text is written for people."""


class RequestError(PagewireError):
    """A call ended with an error status; the base of the named errors, and raised itself if none of them fits.

    Attributes:
        code: the gRPC status code.
        reason: a stable UPPER_SNAKE_CASE word for programs; "" if the server gave none.
        violations: every field at fault, as `protos.errors.Violation(field, description)`.
        retry_after_s: seconds after which a retry makes sense; None if the server did not say.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.code = refusal.code
        self.reason = refusal.reason
        self.violations = refusal.violations
        self.retry_after_s = None if refusal.retry_delay_ms is None else refusal.retry_delay_ms / 1000


class InvalidRequest(RequestError):
    """The request can never succeed as it is: `violations` names every field at fault. Nothing was computed."""


class Unsupported(RequestError):
    """The server understands the request but cannot do it yet; `violations` names the fields to leave unset."""


class NotFound(RequestError):
    """The model asked for is not the one served, or no live request has the id asked about."""


class AlreadyExists(RequestError):
    """A live request already has this `request_id`."""


class QueueFull(RequestError):
    """The server accepts no more requests now; try again after `retry_after_s`."""


class Unauthenticated(RequestError):
    """The server requires a token, and got none or one that it does not know."""


class DeadlineExceeded(RequestError):
    """The request's `timeout` has passed."""


class Cancelled(RequestError):
    """The request was cancelled: its client was closed, or the server, or gRPC on the way there, gave it up."""


class Unavailable(RequestError):
    """No server answers, or it is draining or has lost what it needs; try elsewhere or after `retry_after_s`."""


class InternalError(RequestError):
    """A bug in the server; its log has the request id."""


_NAMED: dict[grpc.StatusCode, type[RequestError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFull,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.INTERNAL: InternalError,
}


def named(refusal: Refusal) -> RequestError:
    """The named error for a refusal."""
    error = _NAMED.get(refusal.code, RequestError)
    if error is QueueFull and refusal.retry_delay_ms is None:
        # gRPC itself answers RESOURCE_EXHAUSTED to a message over the size limit, and no retry helps.
        error = InvalidRequest
    return error(refusal)


def from_rpc_error(error: grpc.RpcError) -> RequestError:
    """The named error for a failed call of a sync or an asyncio stub."""
    # The stubs raise the call itself (sync) or an error with its methods (asyncio); the base class declares neither.
    call = cast(grpc.Call, error)
    return named(from_status(call.code(), call.details() or call.code().name, _details(call)))


def _details(call: grpc.Call) -> Status | None:
    # Read here rather than with grpc_status, whose asyncio half needs the call itself, not the error that it raised.
    for key, value in call.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return Status.FromString(value)
            except DecodeError:
                return None
    return None
