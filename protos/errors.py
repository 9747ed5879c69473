"""Errors with a meaning on the wire, and their one translation to gRPC status and back.

A service raises a `Refusal`; `protos.boundary` turns it into a status with google.rpc details. INVALID_ARGUMENT: never
retry. RESOURCE_EXHAUSTED: retry later. UNAVAILABLE: retry elsewhere or later. INTERNAL: our bug.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from google.protobuf.any_pb2 import Any
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

DOMAIN = "pagewire"
# A status travels in trailers, which many peers limit to 8 KiB: text that quotes or lists a request's parts is cut.
_MAX_VIOLATIONS = 16
_MAX_CHARS = 160
_MAX_MESSAGE_CHARS = 1024


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing wrong with a request: the field's path as the client wrote it, and what would be right."""

    field: str
    description: str


class Refusal(Exception):
    """A request is answered with an error status.

    Args:
        code: the gRPC status code.
        reason: stable UPPER_SNAKE_CASE word for programs (ErrorInfo.reason).
        message: a sentence for people.
        violations: the fields at fault (BadRequest).
        retry_delay_ms: when a retry makes sense (RetryInfo); None where it never does.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        violations: Sequence[Violation] = (),
        retry_delay_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.violations = tuple(violations)
        self.retry_delay_ms = retry_delay_ms


class CannotListen(OSError):
    """A server's address cannot be bound; the message names it."""


class CannotServe(RuntimeError):
    """What a process was told to do does not fit what it found; the message says what to change."""


class CannotTrace(RuntimeError):
    """Spans were asked for, but cannot be made; the message says what is missing."""


def invalid_argument(violations: Sequence[Violation]) -> Refusal:
    """INVALID_ARGUMENT naming the violations, or the first ones of many; the message repeats them for plain clients."""
    if len(violations) > _MAX_VIOLATIONS:
        left_out = Violation("request", f"{len(violations) - _MAX_VIOLATIONS} more violations are left out here")
        violations = [*violations[:_MAX_VIOLATIONS], left_out]
    violations = [Violation(_cut(v.field, _MAX_CHARS), _cut(v.description, _MAX_CHARS)) for v in violations]
    message = "; ".join(f"{violation.field}: {violation.description}" for violation in violations)
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", message, violations=violations)


def unsupported(fields: Sequence[str]) -> Refusal:
    """UNIMPLEMENTED naming every field that this server knows but does not support yet."""
    names = ", ".join(fields)
    verb = "is" if len(fields) == 1 else "are"
    violations = [Violation(field, "not supported yet; leave it unset") for field in fields]
    message = f"{names} {verb} not supported yet"
    return Refusal(grpc.StatusCode.UNIMPLEMENTED, "FIELD_NOT_SUPPORTED", message, violations=violations)


def unavailable(reason: str, message: str, retry_delay_ms: int = 1000) -> Refusal:
    """UNAVAILABLE with a delay after which a retry makes sense."""
    return Refusal(grpc.StatusCode.UNAVAILABLE, reason, message, retry_delay_ms=retry_delay_ms)


def taken_over() -> Refusal:
    """ABORTED, for a call whose request another call has resumed."""
    return Refusal(grpc.StatusCode.ABORTED, "TAKEN_OVER", "another call has taken this request over")


def code_from_number(number: int) -> grpc.StatusCode:
    """The status code of a google.rpc.Code; UNKNOWN for a number that is none."""
    return next((code for code in grpc.StatusCode if code.value[0] == number), grpc.StatusCode.UNKNOWN)


def to_status(refusal: Refusal) -> Status:
    """The google.rpc.Status that carries everything in `refusal`."""
    details: list[BadRequest | RetryInfo | ErrorInfo] = [ErrorInfo(reason=refusal.reason, domain=DOMAIN)]
    if refusal.violations:
        rows = [BadRequest.FieldViolation(field=v.field, description=v.description) for v in refusal.violations]
        details.append(BadRequest(field_violations=rows))
    if refusal.retry_delay_ms is not None:
        retry = RetryInfo()
        retry.retry_delay.FromMilliseconds(refusal.retry_delay_ms)
        details.append(retry)
    status = Status(code=refusal.code.value[0], message=_cut(refusal.message, _MAX_MESSAGE_CHARS))
    for detail in details:
        packed = Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _cut(text: str, num_chars: int) -> str:
    return text if len(text) <= num_chars else text[: num_chars - 1] + "…"


def from_status(code: grpc.StatusCode, message: str, status: Status | None) -> Refusal:
    """What a server meant by its status, read back on the client's side; `status` is None where it sent no details."""
    reason, violations, retry_delay_ms = "", [], None
    for detail in status.details if status is not None else ():
        info, bad_request, retry = ErrorInfo(), BadRequest(), RetryInfo()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(bad_request):
            violations = [Violation(row.field, row.description) for row in bad_request.field_violations]
        elif detail.Unpack(retry):
            retry_delay_ms = retry.retry_delay.ToMilliseconds()
    return Refusal(code, reason, message, violations=violations, retry_delay_ms=retry_delay_ms)
