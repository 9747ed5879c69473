"""How every part serves and dials gRPC: options, health, reflection, and how a server stops.

Measured reasons for the options are in grpc's own keepalive.md and beside each option here.
"""

import asyncio
import contextlib
import logging
import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import unknown_methods
from protos.boundary import ABORT_TIMEOUT_S, Boundary
from protos.calls import Calls
from protos.errors import CannotListen
from protos.last_answers import LastAnswers
from protos.tls import ClientTls, ServerTls, TlsError
from protos.watched_files import WatchedFiles

PUBLIC_MESSAGE_BYTES = 16 << 20
INTERNAL_MESSAGE_BYTES = 64 << 20
# Of SessionService; a router and a scheduler with different versions do not talk.
SESSION_PROTOCOL_VERSION = 4
# A health service name that is SERVING while the process lives, even while it loads or drains.
LIVENESS = "liveness"

_STOP_TIMEOUT_S = 2.0
_SETTLE_S = 0.1
_LAST_PORT = 65_535
_TCP_ADDRESS = re.compile(r"(\[.+\]|[^:\[\]]+):(?P<port>-?\d+)")
_UNIX_ADDRESS = re.compile(r"unix(-abstract)?:.+")
# In bytes, of a Unix socket.
_LONGEST_PATH = 107
# How long a server that stops waits for an answer, which may be large.
_ANSWER_TIMEOUT_S = 5.0
# How long calls may go on over a channel that was replaced; ours have shorter deadlines, or are ended before.
_LAST_ANSWERS_S = 10.0
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
log = logging.getLogger(__name__)


def server_options(max_message_bytes: int, share_port: bool = False) -> list[tuple[str, int]]:
    """Options of every server, public or internal; `max_message_bytes` bounds each incoming message."""
    return [
        *_KEEPALIVE,
        # Without these two a client that pings through a long silent prefill is cut off with GOAWAY too_many_pings.
        # (The key with `recv` in it, which its C macro suggests, is unknown to gRPC and silently ignored.)
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
        # The defaults reset streams at random when thousands open at once.
        ("grpc.server.max_pending_requests", 30_000),
        ("grpc.server.max_pending_requests_hard_limit", 30_000),
        # By default a call that a busy server has not begun in half a minute is cancelled; here its deadline decides.
        ("grpc.server_max_unrequested_time_in_server", 86_400),
        # By default two processes on one port would share it without a word.
        ("grpc.so_reuseport", int(share_port)),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max(max_message_bytes, PUBLIC_MESSAGE_BYTES)),
    ]


def client_options() -> list[tuple[str, int]]:
    """Options of every channel between our own processes."""
    return [
        *_KEEPALIVE,
        ("grpc.max_receive_message_length", INTERNAL_MESSAGE_BYTES),
        ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
        # A peer that starts is up within seconds; the default waits up to two minutes before it tries again.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 250),
        # One channel, one connection: channels to one address would otherwise share their transport and its failure.
        ("grpc.use_local_subchannel_pool", 1),
        # A proxy named in the environment is for the outside world.
        ("grpc.enable_http_proxy", 0),
    ]


def options_towards(address: str) -> list[tuple[str, int]]:
    """Options that a client's channel needs because of its address."""
    if not address.startswith(("unix:", "unix-abstract:")):
        return []
    # gRPC times pings to estimate bandwidth. Once a draining server has closed after a stream's last bytes, a ping into
    # a Unix socket fails at once (TCP takes it), and gRPC drops what it has not read: that stream's end.
    return [("grpc.http2.bdp_probe", 0)]


def dial(address: str, tls: ClientTls | None = None, server_name: str = "") -> grpc.aio.Channel:
    """A channel between our own processes.

    Args:
        address: "host:port" or "unix:/path".
        tls: None for plaintext.
        server_name: the name that the certificate must have, if not the address's host.

    Raises:
        TlsError: the files of `tls` cannot be used.
    """
    options: list[tuple[str, int | str]] = [*client_options(), *options_towards(address)]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if address.startswith("unix:"):
        # No certificate can name a socket's path.
        server_name = server_name or "localhost"
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    return grpc.aio.secure_channel(address, tls.credentials(), options=options)


class Line:
    """A channel to one of our own processes that follows its TLS files: gRPC itself reads them only once.

    Attributes:
        channel: the newest; one that is replaced is closed.
    """

    def __init__(self, address: str, tls: ClientTls | None = None, server_name: str = "") -> None:
        self._address = address
        self._tls = tls
        self._server_name = server_name
        self._files = WatchedFiles(tls.files if tls is not None else ())
        self._files.changed()
        self._closing: asyncio.Task[None] | None = None  # of the last one that was replaced
        self.channel = dial(address, tls, server_name)

    async def renew(self) -> bool:
        """Dials again if the files have changed, and returns whether it did; call it while nothing is connected."""
        if not self._files.changed():
            return False
        try:
            channel = dial(self._address, self._tls, self._server_name)
        except TlsError as error:
            log.warning("new certificate files are no use, the old ones stay", extra={"error": str(error)})
            return False
        # Calls on the old channel are still answered, or end at their own deadlines.
        self._closing = asyncio.create_task(self.channel.close(_LAST_ANSWERS_S))
        self.channel = channel
        return True

    async def obstacle(self) -> str:
        """Why there is no connection, in gRPC's words; "" when there is one."""
        try:
            await health_pb2_grpc.HealthStub(self.channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
        except grpc.aio.AioRpcError as error:
            return error.details() or error.code().name
        return ""


def _answers(path: str) -> bool:
    """Whether a process listens on a Unix socket: gRPC refuses a used TCP port, but silently takes over a path."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def _obstacle(address: str) -> str:
    """The probable reason why an address cannot be bound; gRPC does not say."""
    path = address.removeprefix("unix:")
    host, _, port = address.rpartition(":")
    if path != address:
        if len(os.fsencode(path)) > _LONGEST_PATH:
            return f"a socket's path has {_LONGEST_PATH} bytes at most"
        if not os.path.isdir(os.path.dirname(path) or "."):
            return f"there is no folder {os.path.dirname(path)}"
    else:
        try:
            socket.getaddrinfo(host.strip("[]") or None, port)
        except (OSError, UnicodeError):
            return "its host is not known"
    return "is another process using it?"


@dataclass(frozen=True, slots=True)
class Service:
    """A servicer with its registration: `Service(pb2.DESCRIPTOR..., add_XServicer_to_server, servicer)`."""

    full_name: str
    add_to_server: Callable[[Any, grpc.aio.Server], None]
    servicer: object


class Server:
    """A gRPC server with health, and unless told otherwise reflection and channelz, beside the given services.

    Its health names are "", every service's full name, and `LIVENESS`; all but the last are NOT_SERVING until
    `set_serving(True)`.

    Args:
        calls: observes every call of the services.
        share_port: whether other servers with this option may listen on the same port.
    """

    def __init__(
        self,
        services: Sequence[Service],
        *,
        max_message_bytes: int = INTERNAL_MESSAGE_BYTES,
        reflect: bool = True,
        show_channels: bool = True,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        calls: Calls[Any] | None = None,
        options: Sequence[tuple[str, int]] = (),
        share_port: bool = False,
    ) -> None:
        self.calls: Calls[Any] = calls or Calls()
        self._boundary = Boundary()
        self._last_answers = LastAnswers("grpc.max_connection_age_ms" in dict(options))
        self._server = unknown_methods.server(
            [self._last_answers, self.calls, *interceptors, self._boundary],
            [*server_options(max_message_bytes, share_port), *options],
        )
        self._health = health.aio.HealthServicer()
        self._names = ["", *(service.full_name for service in services)]
        self._serving: bool | None = None
        self._stopping = False
        for service in services:
            service.add_to_server(service.servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        shown = [*self._names[1:], health.SERVICE_NAME]
        if show_channels:
            channelz.add_channelz_servicer(self._server)
            shown.append(channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name)
        if reflect:
            reflection.enable_server_reflection([*shown, reflection.SERVICE_NAME], self._server)

    async def start(self, *addresses: str, tls: ServerTls | None = None) -> int:
        """Binds addresses ("host:port", port 0 for any, or "unix:/path") and serves; returns the first one's port.

        Without `tls`, in plaintext.

        Raises:
            CannotListen: an address cannot be bound.
            TlsError: the files of `tls` cannot be used.
        """
        port, *_ = [self._bind(address, tls) for address in addresses]
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_serving(False)
        await self._server.start()
        return port

    def _bind(self, address: str, tls: ServerTls | None) -> int:
        if _UNIX_ADDRESS.fullmatch(address):
            if _answers(address.removeprefix("unix:")):
                raise CannotListen(f"cannot listen on {address}: another process does")
        elif (tcp := _TCP_ADDRESS.fullmatch(address)) is None:
            # gRPC would take port 443 where none is named.
            raise CannotListen(f"cannot listen on {address}: write HOST:PORT, [HOST]:PORT or unix:PATH")
        elif not 0 <= int(tcp["port"]) <= _LAST_PORT:
            # gRPC would take it modulo 65,536.
            raise CannotListen(f"cannot listen on {address}: ports go from 0 to {_LAST_PORT}")
        try:
            if tls is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, tls.credentials())
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {address}: {_obstacle(address)}") from error

    async def set_serving(self, serving: bool) -> None:
        """Sets the health of all services, and tells their watchers when it changed; a server that stops stays down."""
        serving = serving and not self._stopping
        if serving == self._serving:
            return
        self._serving = serving
        status = health_pb2.HealthCheckResponse.ServingStatus
        for name in self._names:
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def withdraw(self) -> None:
        """Says NOT_SERVING from now on, whatever `set_serving` is told; calls are taken as before."""
        self._stopping = True
        await self.set_serving(False)

    async def stop(
        self, grace_s: float, end_live: Callable[[], None] | None = None, end_within_s: float = ABORT_TIMEOUT_S
    ) -> None:
        """Sends clients elsewhere (GOAWAY), lets live calls finish for `grace_s` seconds, then ends them.

        Args:
            grace_s: cut short once no call is live any more.
            end_live: called then; is to end the methods that still run in another way than by gRPC's error.
            end_within_s: seconds that these methods have for that.
        """
        await self.withdraw()
        self._last_answers.stopping = True
        # Takes no more calls. gRPC's own grace would wait for every open health watch too, and those end only when we
        # do.
        closing = asyncio.ensure_future(self._server.stop(grace_s + end_within_s + _STOP_TIMEOUT_S))
        loop = asyncio.get_running_loop()
        grace_ends = loop.time() + grace_s
        # The calls that it took last reach our methods now.
        await asyncio.sleep(min(grace_s, _SETTLE_S))
        if await self._boundary.methods.none_within(grace_ends - loop.time()):
            # gRPC may only have begun to send their answers.
            await self._boundary.calls.none_within(min(grace_ends - loop.time(), _ANSWER_TIMEOUT_S))
        elif end_live is not None:
            end_live()
            await self._boundary.calls.none_within(end_within_s)
        await self._last_answers.let_go(_SETTLE_S)
        # A connection whose client has stopped reading does not close, and gRPC would wait for it for ever.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._server.stop(0)
        closing.cancel()


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
