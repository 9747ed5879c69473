"""Writing to clients that may have stopped reading."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from protos.errors import Refusal
from protos.patience import Patience


@contextlib.asynccontextmanager
async def writing_to(
    context: grpc.aio.ServicerContext[Any, Any], stall_s: float
) -> AsyncIterator[Callable[[Message], Awaitable[None]]]:
    """A function that writes to a client; one that has stopped reading keeps its place for `stall_s` seconds only.

    Raises:
        Refusal: RESOURCE_EXHAUSTED, the client has read nothing for `stall_s` seconds.
    """
    try:
        async with Patience(stall_s) as patience:

            async def write(message: Message) -> None:
                patience.begin()
                await context.write(message)
                patience.end()

            yield write
    except TimeoutError:
        text = f"the client has read nothing for {stall_s:g} s"
        raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT_STALLED", text) from None
