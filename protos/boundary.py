"""The boundary of our servicers, where exceptions become statuses: the innermost interceptor."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from protos.errors import Refusal, Violation, invalid_argument, to_status
from protos.interceptor import Context, Interceptor, behaviour_of, cancelled_if_over, with_behaviour
from protos.live_calls import LiveCalls, current_call

# How long an error may be on its way to a client before the client counts as one that does not read.
ABORT_TIMEOUT_S = 1.0
log = logging.getLogger(__name__)


class Boundary(Interceptor):
    """Turns what our servicers raise into statuses, and knows which of our calls are live.

    The servicers' streaming methods are coroutines that call `context.write`.

    Attributes:
        methods: calls whose methods are running.
        calls: calls that are not fully answered: an answer may be on its way when its method has ended.
    """

    def __init__(self) -> None:
        self.methods = LiveCalls()
        self.calls = LiveCalls()

    def around(self, handler: Any, method: str) -> Any:
        behaviour = behaviour_of(handler)

        async def guarded(request: object, context: Context) -> object:
            call = current_call()
            self.methods.add(call)
            self.calls.add_until_done(call)
            request_id = getattr(request, "request_id", "")
            try:
                if isinstance(request, _Malformed):
                    raise request.refusal
                answer = behaviour(request, context)
                # An error given to gRPC stays in a reference cycle until the garbage collector runs, and with it what
                # our frames hold: requests of any size.
                del request
                with cancelled_if_over():
                    return await answer
            except Refusal as refusal:
                refusal.__traceback__ = None
                await _abort(context, refusal)
            except DecodeError as error:  # a later message of a stream
                await _abort(context, _malformed(error))
            except (grpc.aio.AbortError, grpc.aio.UsageError):
                raise
            except Exception as error:
                log.exception("bug", extra={"method": method, "request_id": request_id})
                error.__traceback__ = None
                bug = Refusal(grpc.StatusCode.INTERNAL, "BUG", f"{method} failed; the server's log says why")
                await _abort(context, bug)
            finally:
                self.methods.discard(call)

        deserialize = handler.request_deserializer
        return with_behaviour(handler, guarded, deserialize if handler.request_streaming else _forgiving(deserialize))


async def _abort(context: Context, refusal: Refusal) -> NoReturn:
    """Ends a call with an error, even if the client does not read what was written before.

    gRPC would wait for such a client until its connection dies.

    Raises:
        grpc.aio.AbortError: always, for gRPC itself, unless the call is over already.
    """
    with cancelled_if_over(), contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await context.abort_with_status(rpc_status.to_status(to_status(refusal)))
    await context.send_initial_metadata(())  # raises the error that the timeout cut off
    raise AssertionError("an aborted call goes on")


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a request whose bytes are not a message of its type."""

    refusal: Refusal


def _forgiving(deserialize: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """A deserializer that returns `_Malformed` where gRPC would answer INTERNAL to a client's mistake."""

    def attempt(data: bytes) -> object:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _Malformed(_malformed(error))

    return attempt


def _malformed(error: DecodeError) -> Refusal:
    return invalid_argument([Violation("request", f"not a message of this type (strings must be UTF-8): {error}")])
