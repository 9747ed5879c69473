"""A gRPC server that survives calls of methods whose names are not UTF-8.

grpcio decodes the name of each method that it does not know in the one loop that all calls come from, and if that
fails shuts the server down, with all its streams (1.85.1): one packet from any client does it. Here calls of unknown
methods never reach that loop: they have one answer, UNIMPLEMENTED, which needs no name. The known methods are those
added with `add_registered_method_handlers`, as generated code does.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

log = logging.getLogger(__name__)


def server(interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, int]]) -> grpc.aio.Server:
    """Like `grpc.aio.server`, which has no parameter for the class that runs its loop."""
    usual = cygrpc.AioServer
    cygrpc.AioServer = _Server
    try:
        return grpc.aio.server(interceptors=interceptors, options=options)
    finally:
        cygrpc.AioServer = usual


class _Server(cygrpc.AioServer):
    """Keeps calls of unknown methods out of the loop of its base."""

    def _make_request_call_future(self, method: bytes | None) -> "asyncio.Future[Any]":
        """The next call of `method`; with None, of an unknown method: that never comes, since all are refused."""
        if method is None:
            return asyncio.ensure_future(self._refuse_unknown())
        return super()._make_request_call_future(method)

    async def _refuse_unknown(self) -> None:
        loop, nothing = asyncio.get_running_loop(), cygrpc._MethodResolver([], {})
        refusals = set()
        while True:
            call = await self._request_call()  # raises when the server stops
            try:
                answer = cygrpc._handle_rpc("", nothing, (), call, loop, False)
                refusal = loop.create_task(cygrpc._schedule_rpc_coro(answer, call, loop, "unknown"))
            except TypeError:  # grpcio has changed inside; the client gets CANCELLED
                log.exception("bug")
                continue
            refusals.add(refusal)  # the loop itself keeps weak references only
            refusal.add_done_callback(refusals.discard)
