"""Interceptors for calls of our own services: health checks, reflection and channelz pass untouched."""

import abc
import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc

_OURS = "/pagewire."

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Awaitable[object]]


class Interceptor(grpc.aio.ServerInterceptor, abc.ABC):
    """Puts a handler of its own around each method of our services."""

    @abc.abstractmethod
    def around(self, handler: Any, method: str) -> Any:
        """The handler that gRPC gets instead of `handler`; `method` as in "/pagewire.v1.Service/Method"."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(_OURS):
            return handler
        return self.around(handler, details.method)


def sides_of(handler: Any) -> str:
    """How gRPC names this kind of handler: "unary_stream" if one request is answered by a stream."""
    return "_".join(
        "stream" if streams else "unary" for streams in (handler.request_streaming, handler.response_streaming)
    )


def behaviour_of(handler: Any) -> Behaviour:
    """The function of a handler that answers calls."""
    behaviour: Behaviour = getattr(handler, sides_of(handler))
    return behaviour


def with_behaviour(handler: Any, behaviour: Behaviour, deserialize: Callable[[bytes], object] | None = None) -> Any:
    """A handler of the same kind that answers with `behaviour`, and reads requests with `deserialize` if given."""
    make = getattr(grpc, f"{sides_of(handler)}_rpc_method_handler")
    return make(behaviour, deserialize or handler.request_deserializer, handler.response_serializer)


@contextlib.contextmanager
def cancelled_if_over() -> Iterator[None]:
    """Makes a write that fails a cancellation, which is what gRPC makes of a call that is over.

    Where the client leaves or the deadline passes while a message is on its way, gRPC tells of the message first.
    """
    try:
        yield
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
