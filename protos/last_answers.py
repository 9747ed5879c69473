"""Answers that are the last ones of their connections: clients are left time to read them.

gRPC closes the connection of a client that was sent elsewhere (GOAWAY) as soon as its last call has ended, and has then
handed the end of an answer to the kernel, no more. A client that still reads sends window updates; a kernel answers
those at a closed connection with a reset, and throws away what it has not sent (RFC 1122, section 4.2.2.13): on
loopback it broke 9 of 300 drains that each ended with eight answers of 300 kB.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from protos.calls import sides_of

# What a kernel has taken is about what two round trips carry.
_READ_S = 0.25
# Bytes; less is on its way at once.
_LARGE = 64 << 10


class LastAnswers(grpc.aio.ServerInterceptor):
    """Ends calls that have one request some time behind their last message, and with it their connection.

    For gRPC they are all streams, also where one message is the answer: it would send that together with the end.

    Args:
        connections_age: whether gRPC sends clients elsewhere at times that nobody is told of.

    Attributes:
        stopping: whether clients are sent elsewhere now; until then no call is held up, or where connections age one
            with a large answer.
    """

    def __init__(self, connections_age: bool) -> None:
        self._connections_age = connections_age
        self.stopping = False

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(details)
        if handler is None or handler.request_streaming or not details.method.startswith("/pagewire."):
            return handler
        behaviour, serialize = getattr(handler, sides_of(handler)), handler.response_serializer

        async def streamed(request: object, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
            answer = behaviour(request, context)
            del request  # see `protos.rpc`: errors outlive their calls, and with them what our frames hold
            await answer
            if self.stopping:
                await asyncio.sleep(_READ_S)

        async def answered(request: object, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
            answer = behaviour(request, context)
            del request
            message = serialize(await answer)
            await context.write(message)
            if self.stopping or (self._connections_age and len(message) > _LARGE):
                await asyncio.sleep(_READ_S)

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(streamed, handler.request_deserializer, serialize)
        return grpc.unary_stream_rpc_method_handler(answered, handler.request_deserializer)
