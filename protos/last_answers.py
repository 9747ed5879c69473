"""Answers that are the last ones on their connections: clients are left time to read them.

gRPC closes the connection of a client that was sent elsewhere (GOAWAY) as soon as its last call has ended; by then it
has only handed the end of the answer to the kernel. A client that still reads sends window updates; a kernel answers
those on a closed connection with a reset, and discards what it has not sent (RFC 1122, section 4.2.2.13): on loopback
that broke 9 of 300 drains, each of which ended with eight answers of 300 kB.
"""

import asyncio
import contextlib
from typing import Any

import grpc

from protos.interceptor import Context, Interceptor, behaviour_of, cancelled_if_over
from protos.live_calls import LiveCalls, current_call

# A kernel has taken about as much as two round trips carry.
_READ_S = 0.25
# In bytes. A smaller answer has mostly left the kernel when its call ends.
_LARGE = 64 << 10


class LastAnswers(Interceptor):
    """Ends calls that have one request, and so their connection, only some time after their last message.

    To gRPC they are all streams, even where the answer is one message, which it would otherwise send with the end.

    Args:
        connections_age: whether gRPC sends clients elsewhere at times of its own, which it tells nobody.

    Attributes:
        stopping: whether all clients are sent elsewhere now; before that, a call is held only if connections age and
            its one answer is large.
    """

    def __init__(self, connections_age: bool) -> None:
        self._connections_age = connections_age
        self.stopping = False
        self._held = LiveCalls()
        self._let_go = asyncio.Event()

    async def let_go(self, timeout_s: float) -> None:
        """Ends the calls that are held, and from now on holds none; waits at most `timeout_s` seconds for that."""
        self._let_go.set()
        await self._held.none_within(timeout_s)

    def around(self, handler: Any, method: str) -> Any:
        if handler.request_streaming:
            return handler
        behaviour, serialize = behaviour_of(handler), handler.response_serializer

        async def streamed(request: object, context: Context) -> None:
            answer = behaviour(request, context)
            del request  # see `protos.boundary`: errors outlive their calls, and with them what our frames hold
            await answer
            if self.stopping:
                await self._hold(context)

        async def answered(request: object, context: Context) -> None:
            answer = behaviour(request, context)
            del request
            message = serialize(await answer)
            with cancelled_if_over():
                await context.write(message)
            if self.stopping or (self._connections_age and len(message) > _LARGE):
                await self._hold(context)

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(streamed, handler.request_deserializer, serialize)
        return grpc.unary_stream_rpc_method_handler(answered, handler.request_deserializer)

    async def _hold(self, context: Context) -> None:
        left_s = context.time_remaining()
        if left_s is not None and left_s < 2 * _READ_S:
            return  # the deadline would come first, and turn the answer into an error
        self._held.add_until_done(current_call())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READ_S):
                await self._let_go.wait()
