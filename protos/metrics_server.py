"""The HTTP side of Prometheus: /metrics, on threads beside the event loop."""

import asyncio
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

from protos.errors import CannotListen
from protos.metrics import Exporter

log = logging.getLogger(__name__)
# A scraper that stops in the middle of its request holds a thread no longer than this.
_SCRAPE_TIMEOUT_S = 10


class MetricsServer:
    """Serves `/metrics` on a thread; each scrape has a thread of its own."""

    def __init__(self, address: str, exporter: Exporter) -> None:
        """Starts it.

        Raises:
            CannotListen: `address` cannot be bound.
        """
        registry = CollectorRegistry(auto_describe=False)
        registry.register(exporter)
        ProcessCollector(registry=registry)
        host, _, port = address.rpartition(":")
        try:
            self._server = _HttpServer((host.strip("[]"), int(port)), _Handler)
        except OverflowError as error:
            raise CannotListen(f"cannot listen on {address} for metrics: ports go from 0 to 65535") from error
        except OSError as error:
            raise CannotListen(f"cannot listen on {address} for metrics: {error.strerror}") from error
        self._server.set_app(_only_metrics(make_wsgi_app(registry)))
        self.port: int = self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    async def close(self) -> None:
        """Stops listening."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()


class _HttpServer(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Binds; the class above would ask DNS for this machine's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        """A scraper that hung up or was too slow is no news; the class above would print a traceback."""
        log.debug("scrape failed", exc_info=True, extra={"peer": client_address})


class _Handler(WSGIRequestHandler):
    timeout = _SCRAPE_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: scrapes are no news."""


def _only_metrics(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    def answer(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/metrics":
            return app(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [b"metrics are at /metrics\n"]

    return answer
