"""The outcome of each client's call: the access log, the figures behind the metrics, and the span.

The log has a line for every call, INFO for those that generate and DEBUG for the others, whether it was answered,
refused before it reached a service, given up by its client or failed.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from protos.calls import Call, Calls
from protos.histogram import REQUEST_SECONDS, STEP_SECONDS, Histogram
from protos.pagewire.v1 import generation_pb2 as pb
from protos.trace_context import TraceContext
from router.live_request import LiveRequest

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from protos.tracing import Tracer

_GENERATING = {"Generate", "Complete"}
# By vLLM's names.
_FINISHED_REASON = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORTED: "abort",
    pb.FINISH_REASON_IGNORED: "ignored",
}
# Codes that tell a client to try again: its request was not let in.
TURNED_AWAY = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
log = logging.getLogger("router.access")


@dataclass(slots=True, eq=False)
class ClientCall(Call):
    """A call, and what its answer adds to it.

    Attributes:
        header_id: the header x-request-id, which names a request that has no `request_id`; may be empty.
        trace: the span that the request is part of: ours, or the caller's where we make none.
        request_id: the request's id once it is admitted; before that, as the client gave it.
        model: the one that answers it.
        operation: as the semantic conventions call it: "chat" or "text_completion".
        live: the request, once it is admitted.
        tokenizing: when that began and ended, by `time.monotonic`.
    """

    header_id: str = ""
    trace: TraceContext | None = None
    span: "Span | None" = None
    request_id: str = ""
    model: str = ""
    operation: str = "text_completion"
    live: LiveRequest | None = None
    tokenizing: tuple[float, float] | None = None

    @property
    def generates(self) -> bool:
        """Whether it asks for tokens."""
        return self.method in _GENERATING


class ClientCalls(Calls[ClientCall]):
    """Observes every call to the router.

    Args:
        tracer: None where no spans are made.

    Attributes:
        ttft_s: from arrival to first token, of requests that have one.
        request_s: from arrival to end, of requests that were answered.
        output_token_s: mean time per output token after the first, of requests that were answered.
        num_finished: requests that were answered or given up, by the finish reason of their first output.
        num_turned_away: requests that were not let in, by reason.
    """

    def __init__(self, tracer: "Tracer | None" = None) -> None:
        super().__init__()
        self.ttft_s = Histogram(REQUEST_SECONDS)
        self.request_s = Histogram(REQUEST_SECONDS)
        self.output_token_s = Histogram(STEP_SECONDS)
        self.num_finished = dict.fromkeys(_FINISHED_REASON.values(), 0)
        self.num_turned_away: dict[str, int] = {}
        self._tracer = tracer

    def begin(self, service: str, method: str, kind: str, context: "grpc.aio.ServicerContext[Any, Any]") -> ClientCall:
        """See `Calls`."""
        call = ClientCall(service, method, kind, time.monotonic())
        traceparent = tracestate = ""
        for key, value in context.invocation_metadata() or ():
            if key == "x-request-id":
                call.header_id = str(value)
            elif key == "traceparent":
                traceparent = str(value)
            elif key == "tracestate":
                tracestate = str(value)
        call.trace = TraceContext.parse(traceparent, tracestate)
        if self._tracer is not None:
            call.span = self._tracer.begin(f"{service}/{method}", call.trace)
            call.trace = self._tracer.context_of(call.span)
        return call

    def end(self, call: ClientCall, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        """See `Calls`."""
        if call.generates:
            self._count(call)
        level = logging.INFO if call.generates else logging.DEBUG
        if log.isEnabledFor(level):
            log.log(level, "request" if call.generates else "call", extra=_facts(call, context.peer()))
        if self._tracer is not None and call.span is not None:
            _end_span(self._tracer, call.span, call)

    def _count(self, call: ClientCall) -> None:
        live = call.live
        num_tokens = live.num_tokens if live is not None else 0
        if call.code in TURNED_AWAY and not num_tokens:
            reason = call.reason or call.code.name
            self.num_turned_away[reason] = self.num_turned_away.get(reason, 0) + 1
        if live is None:
            return
        if num_tokens:
            self.ttft_s.observe(live.ttft_ms / 1e3)
        if call.code is grpc.StatusCode.OK:
            self.num_finished[_FINISHED_REASON[live.finish_reasons[0]]] += 1
            self.request_s.observe(call.total_s)
            # All tokens of a beam search come at once, at its end.
            if num_tokens > len(live.streams) and live.request.beam_search is None:
                behind_first = num_tokens - len(live.streams)
                decode_s = call.total_s - live.ttft_ms / 1e3
                self.output_token_s.observe(decode_s * len(live.streams) / behind_first)
        elif call.code is grpc.StatusCode.CANCELLED:
            self.num_finished["abort"] += 1


def _facts(call: ClientCall, peer: str) -> Mapping[str, object]:
    """The facts for the access log, leaving out empty ones."""
    live = call.live
    facts: dict[str, object] = {"method": call.method, "request_id": call.request_id or call.header_id[:128]}
    facts |= {"peer": peer, "code": call.code.name}
    if call.code is not grpc.StatusCode.OK:
        facts |= {"reason": call.reason, "error": call.message[:256]}
    if live is not None:
        facts["tenant"] = live.request.tenant
        facts |= {"prompt_tokens": len(live.request.prompt_token_ids), "output_tokens": live.num_tokens}
        if live.ttft_ms:
            facts["ttft_ms"] = round(live.ttft_ms, 1)
        if live.stats is not None:
            facts["cached_tokens"] = live.stats.num_cached_prompt_tokens
            facts["queue_ms"] = round(live.stats.queue_ms, 1)
            facts["preemptions"] = live.stats.num_preemptions
    facts["total_ms"] = round(call.total_s * 1e3, 1)
    if call.trace is not None:
        facts["trace_id"] = call.trace.trace_id
    return {name: value for name, value in facts.items() if value != ""}


def _end_span(tracer: "Tracer", span: "Span", call: ClientCall) -> None:
    """Ends the span with the call's outcome, by the semantic conventions of RPCs and of generative AI."""
    if span.is_recording():
        assert call.trace is not None
        attributes: dict[str, Any] = {
            "rpc.system": "grpc",
            "rpc.service": call.service,
            "rpc.method": call.method,
            "rpc.grpc.status_code": call.code.value[0],
        }
        if call.generates:
            attributes |= {"gen_ai.provider.name": "pagewire", "gen_ai.response.id": call.request_id}
            attributes |= {"gen_ai.operation.name": call.operation, "gen_ai.response.model": call.model}
        if call.reason:
            attributes["error.type"] = call.reason
        if (live := call.live) is not None:
            attributes["gen_ai.request.max_tokens"] = live.request.max_tokens
            attributes["gen_ai.usage.input_tokens"] = len(live.request.prompt_token_ids)
            attributes["gen_ai.usage.output_tokens"] = live.num_tokens
            attributes["gen_ai.response.finish_reasons"] = [
                _FINISHED_REASON[reason] for reason in live.finish_reasons if reason
            ]
            if live.ttft_ms:
                attributes["gen_ai.response.time_to_first_chunk"] = live.ttft_ms / 1e3
        span.set_attributes(attributes)
        if call.tokenizing is not None:
            tracer.record("tokenize", call.trace, *call.tokenizing, {"pagewire.request_id": call.request_id})
        if call.code is not grpc.StatusCode.OK:
            tracer.fail(span, f"{call.code.name}: {call.message}" if call.message else call.code.name)
    span.end()
