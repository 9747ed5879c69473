"""Writing to clients, who may have stopped reading."""

import asyncio
from typing import Any

import grpc
from google.protobuf.message import Message

from protos.errors import Refusal


async def write(context: grpc.aio.ServicerContext[Any, Any], message: Message, stall_s: float) -> None:
    """Writes to a client; one that has stopped reading holds its place for `stall_s` seconds only.

    Raises:
        Refusal: RESOURCE_EXHAUSTED, the client has read nothing for so long.
    """
    try:
        async with asyncio.timeout(stall_s):
            await context.write(message)
    except TimeoutError:
        text = f"the client has read nothing for {stall_s:g} s"
        raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT_STALLED", text) from None
