"""A collector that takes spans as OTLP over gRPC, as a real one would, and keeps them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


@dataclass(frozen=True)
class Received:
    """A span as it arrived."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, object]
    error: str | None
    tracestate: str


@dataclass
class Collector(TraceServiceServicer):
    """Attributes: endpoint: for --otlp-endpoint. spans: in order of arrival."""

    endpoint: str = ""
    spans: list[Received] = field(default_factory=list)

    async def Export(self, request, context):
        for resource_spans in request.resource_spans:
            resource = {row.key: row.value.string_value for row in resource_spans.resource.attributes}
            for scope in resource_spans.scope_spans:
                self.spans += [_received(resource["service.name"], span) for span in scope.spans]
        return ExportTraceServiceResponse()

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]

    async def until(self, holds: Callable[["Collector"], object]) -> None:
        """Returns when `holds`; the test's own timeout bounds the wait."""
        while not holds(self):
            await asyncio.sleep(0.01)


def _received(service, span) -> Received:
    values = {row.key: getattr(row.value, row.value.WhichOneof("value")) for row in span.attributes}
    return Received(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        values,
        span.status.message if span.status.code == 2 else None,
        span.trace_state,
    )


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    fake = Collector()
    server = grpc.aio.server()
    add_TraceServiceServicer_to_server(fake, server)
    fake.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield fake
    finally:
        await server.stop(0)
