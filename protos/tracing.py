"""OpenTelemetry spans, for a service that was told where to send them. No other service imports it: that takes 0.3 s.

Spans are made from recorded times, most of them when their request has ended. A thread sends them in batches; what a
slow or absent collector does not take is dropped, oldest first, and the log says so now and then. The standard OTEL_*
environment variables apply: sampler, batches, headers, resource.
"""

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from protos.trace_context import TraceContext

# What is left when the service stops gets this long to be sent.
_FLUSH_TIMEOUT_S = 2.0
Attributes = Mapping[str, str | bool | int | float | Sequence[str]]


class Tracer:
    """Makes the spans of one service.

    Args:
        service: its name, unless OTEL_SERVICE_NAME gives another.
        endpoint: of a collector that takes OTLP over gRPC, "http://host:4317" or "https://host:4317".
    """

    def __init__(self, service: str, endpoint: str) -> None:
        from_environment = OTELResourceDetector().detect()
        resource = Resource.create({SERVICE_NAME: f"pagewire-{service}"}).merge(from_environment)
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("pagewire")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, parent: TraceContext | None) -> Span:
        """The span of a call to this service, from now on; without a parent it begins a trace, if it is sampled."""
        return self._tracer.start_span(name, self._context(parent), SpanKind.SERVER)

    def record(
        self, name: str, parent: TraceContext, begin: float, end: float, attributes: Attributes, error: str = ""
    ) -> None:
        """Makes a span that is over; `begin` and `end` are times of `time.monotonic`."""
        # Each process has a monotonic clock of its own; what they share is the time of day.
        zero_s = time.time() - time.monotonic()
        span = self._tracer.start_span(
            name, self._context(parent), attributes=attributes, start_time=int((zero_s + begin) * 1e9)
        )
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(int((zero_s + end) * 1e9))

    def context_of(self, span: Span) -> TraceContext | None:
        """The context to pass on to the services that this one calls."""
        headers: dict[str, str] = {}
        self._propagator.inject(headers, set_span_in_context(span))
        return TraceContext.parse(headers.get("traceparent", ""), headers.get("tracestate", ""))

    def fail(self, span: Span, description: str) -> None:
        """Marks a span as failed."""
        span.set_status(Status(StatusCode.ERROR, description))

    async def close(self) -> None:
        """Sends what is left, within a time limit."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        flush = threading.Thread(target=self._provider.shutdown, name="flush spans", daemon=True)
        flush.start()
        flush.join(_FLUSH_TIMEOUT_S)
        if flush.is_alive():
            self._exporter.shutdown()  # ends its retries

    def _context(self, parent: TraceContext | None) -> Context:
        headers = {} if parent is None else {"traceparent": parent.traceparent, "tracestate": parent.tracestate}
        return self._propagator.extract(headers)
