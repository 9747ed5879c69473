"""How every part serves and dials gRPC: options, health, reflection, the boundary where exceptions become statuses.

Measured reasons for the options stand in grpc's own keepalive.md and beside each option here.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from protos.errors import CannotListen, Refusal, Violation, invalid_argument, to_status, unavailable

PUBLIC_MESSAGE_BYTES = 16 << 20
INTERNAL_MESSAGE_BYTES = 64 << 20
# Of SessionService; router and scheduler of different ones do not talk.
SESSION_PROTOCOL_VERSION = 3
# A health service name that is SERVING while the process lives, also while it loads and drains.
LIVENESS = "liveness"

_STOP_TIMEOUT_S = 2.0
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
log = logging.getLogger(__name__)


def server_options(max_message_bytes: int, share_port: bool = False) -> list[tuple[str, int]]:
    """Options of every server, public or internal."""
    return [
        *_KEEPALIVE,
        # Without these two a client that pings through a long silent prefill is cut off with GOAWAY too_many_pings.
        # (The key with `recv` in it, which its C macro suggests, is unknown to gRPC and silently ignored.)
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
        # The defaults reset streams at random when thousands open at once.
        ("grpc.server.max_pending_requests", 30_000),
        ("grpc.server.max_pending_requests_hard_limit", 30_000),
        # By default two processes on one port would share it without a word.
        ("grpc.so_reuseport", int(share_port)),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]


def dial(address: str) -> grpc.aio.Channel:
    """A channel between our own processes. `address` is "host:port" or "unix:/path"."""
    options = [
        *_KEEPALIVE,
        ("grpc.max_receive_message_length", INTERNAL_MESSAGE_BYTES),
        ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
        # A peer that starts is there within seconds; the default waits up to two minutes before it looks again.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 250),
        # One channel, one connection: channels to one address would otherwise share their transport and its failure.
        ("grpc.use_local_subchannel_pool", 1),
        # A proxy named in the environment is for the outside world.
        ("grpc.enable_http_proxy", 0),
    ]
    return grpc.aio.insecure_channel(address, options=options)


def _answers(path: str) -> bool:
    """Whether somebody listens on a Unix socket. gRPC would take the path over without a word, and TCP's refusal."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


@dataclass(frozen=True, slots=True)
class Service:
    """A servicer with its registration: `Service(pb2.DESCRIPTOR..., add_XServicer_to_server, servicer)`."""

    full_name: str
    add_to_server: Callable[[Any, grpc.aio.Server], None]
    servicer: object


class Server:
    """A gRPC server with health, reflection and channelz beside the given services.

    Its health names are "", every service's full name, and `LIVENESS`; all but the last are NOT_SERVING until
    `set_serving(True)`.

    Args:
        share_port: whether other servers that say so too may listen on the same port.
    """

    def __init__(
        self,
        services: Sequence[Service],
        *,
        max_message_bytes: int = INTERNAL_MESSAGE_BYTES,
        reflect: bool = True,
        share_port: bool = False,
    ) -> None:
        self._boundary = _Boundary()
        options = server_options(max_message_bytes, share_port)
        self._server = grpc.aio.server(interceptors=[self._boundary], options=options)
        self._health = health.aio.HealthServicer()
        self._names = ["", *(service.full_name for service in services)]
        self._serving: bool | None = None
        self._stopping = False
        for service in services:
            service.add_to_server(service.servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        channelz.add_channelz_servicer(self._server)
        if reflect:
            well_known = [health.SERVICE_NAME, reflection.SERVICE_NAME]
            channelz_name = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name
            reflection.enable_server_reflection([*self._names[1:], *well_known, channelz_name], self._server)

    async def start(self, *addresses: str) -> int:
        """Binds addresses ("host:port", port 0 for any, or "unix:/path") and serves; gives the first one's port.

        Raises:
            CannotListen: an address can not be bound.
        """
        port, *_ = [self._bind(address) for address in addresses]
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_serving(False)
        await self._server.start()
        return port

    def _bind(self, address: str) -> int:
        if address.startswith("unix:") and _answers(address.removeprefix("unix:")):
            raise CannotListen(f"cannot listen on {address}: another process does")
        try:
            return self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {address}: is another process using it?") from error

    async def set_serving(self, serving: bool) -> None:
        """Sets the health of all services, and tells their watchers when it changed; a server that stops stays down."""
        serving = serving and not self._stopping
        if serving == self._serving:
            return
        self._serving = serving
        status = health_pb2.HealthCheckResponse.ServingStatus
        for name in self._names:
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float, delay_s: float = 0) -> None:
        """Says NOT_SERVING, refuses new calls, lets live ones finish for `grace_s` seconds, then cuts them.

        For `delay_s` seconds before that new calls are still taken: from those who have not looked at its health yet.
        """
        self._stopping = True
        await self.set_serving(False)
        await asyncio.sleep(delay_s)
        # gRPC's own grace would wait for every open health watch too, and those end only when we do.
        await self._boundary.drain(grace_s)
        # A connection whose reader has stopped reading does not close, and gRPC would wait for it for ever.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._server.stop(0)


async def wait_for_serving(channel: grpc.aio.Channel, service: str = "") -> None:
    """Returns when the server behind `channel` says SERVING; tries for ever, so bound it with asyncio.timeout."""
    stub = health_pb2_grpc.HealthStub(channel)
    while True:
        call = stub.Watch(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True)
        try:
            async for response in call:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.aio.AioRpcError as error:
            log.debug("health watch ended", extra={"code": error.code().name})
        finally:
            call.cancel()
        await asyncio.sleep(0.1)


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a request whose bytes are no message of its type."""

    refusal: Refusal


class _Boundary(grpc.aio.ServerInterceptor):
    """Turns what our servicers raise into statuses, and knows how many calls of ours are live.

    The servicers' streaming methods are coroutines that call `context.write`.
    """

    def __init__(self) -> None:
        self._num_live = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def drain(self, grace_s: float) -> None:
        """Refuses new calls; returns when none is live, or after `grace_s` seconds."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(details)
        if handler is None or not details.method.startswith("/pagewire."):
            return handler
        kind = ("stream" if handler.request_streaming else "unary", "stream" if handler.response_streaming else "unary")
        behaviour = getattr(handler, "_".join(kind))

        async def guarded(request: object, context: grpc.aio.ServicerContext) -> object:
            self._num_live += 1
            self._idle.clear()
            try:
                if self._draining:
                    raise unavailable("DRAINING", "this server is shutting down; retry, it or another will answer")
                if isinstance(request, _Malformed):
                    raise request.refusal
                return await behaviour(request, context)
            except Refusal as refusal:
                await context.abort_with_status(rpc_status.to_status(to_status(refusal)))
            except DecodeError as error:  # a later message of a stream
                await context.abort_with_status(rpc_status.to_status(to_status(_malformed(error))))
            except (grpc.aio.AbortError, grpc.aio.UsageError):
                raise
            except Exception:
                facts = {"method": details.method, "request_id": getattr(request, "request_id", "")}
                log.exception("bug", extra=facts)
                bug = Refusal(grpc.StatusCode.INTERNAL, "BUG", f"{details.method} failed; the server's log says why")
                await context.abort_with_status(rpc_status.to_status(to_status(bug)))
            finally:
                self._num_live -= 1
                if self._num_live == 0:
                    self._idle.set()

        make = getattr(grpc, "_".join(kind) + "_rpc_method_handler")
        deserialize = handler.request_deserializer
        if not handler.request_streaming:
            deserialize = _forgiving(deserialize)
        return make(guarded, deserialize, handler.response_serializer)


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
