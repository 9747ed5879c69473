"""What each service switches on with `--metrics-listen` and `--otlp-endpoint`, and off again at its end."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from protos import pollers as pollers  # what follows imports grpc
from protos.calls import Calls
from protos.errors import CannotTrace
from protos.metrics import Exporter, Metric
from protos.process import Settings

if TYPE_CHECKING:
    from protos.metrics_server import MetricsServer
    from protos.tracing import Tracer

log = logging.getLogger(__name__)


def start_tracer(service: str, settings: Settings) -> "Tracer | None":
    """The service's tracer; None if there is nowhere to send spans to.

    Raises:
        CannotTrace: what it needs is not installed.
    """
    if not settings.otlp_endpoint:
        return None
    try:
        from protos.tracing import Tracer
    except ModuleNotFoundError as error:
        raise CannotTrace(f"--otlp-endpoint needs {error.name}: pip install -e '.[otel]'") from error
    return Tracer(service, settings.otlp_endpoint)


def serve_metrics(
    settings: Settings,
    metrics: Sequence[Metric],
    labels: Callable[[], Mapping[str, str] | None],
    calls: Calls[Any],
) -> "MetricsServer | None":
    """The running metrics server; None if the settings give it no address.

    Raises:
        CannotListen: the address cannot be bound.
    """
    if not settings.metrics_listen:
        return None
    from protos.metrics_server import MetricsServer  # importing it takes time, and nothing else needs it

    server = MetricsServer(settings.metrics_listen, Exporter(metrics, labels, calls))
    log.info("metrics", extra={"address": settings.metrics_listen, "port": server.port})
    return server


async def close(metrics: "MetricsServer | None", tracer: "Tracer | None") -> None:
    """Sends the spans that are left, and stops listening."""
    if tracer is not None:
        await tracer.close()
    if metrics is not None:
        await metrics.close()
