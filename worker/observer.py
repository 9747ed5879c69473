"""What the worker exports to Prometheus, and its spans for traces: its steps, and the device's memory."""

from typing import TYPE_CHECKING

import torch

from protos.histogram import STEP_SECONDS, Histogram
from protos.metrics import Metric
from protos.trace_context import TraceContext
from protos.worker_pb2 import ExecuteModelRequest, ExecuteModelResponse, GetInfoResponse

if TYPE_CHECKING:
    from protos.tracing import Tracer


class Observer:
    """Observes every step.

    A traced request gets a span `execute` for each step that computes its prompt, whole or in chunks, or computes it
    again. Its decodes get none: there is one for each token, shared with all that runs, and the scheduler's span
    `decode` holds their sum.

    Args:
        tracer: None where no spans are made.

    Attributes:
        info: of the model, once it is loaded.
        seconds: how long each phase of a step takes.
    """

    def __init__(self, tracer: "Tracer | None" = None) -> None:
        self.info: GetInfoResponse | None = None
        self.seconds = {phase: Histogram(STEP_SECONDS) for phase in ("prepare", "forward", "sample", "swap")}
        self._tracer = tracer

    def executed(self, request: ExecuteModelRequest, response: ExecuteModelResponse, begin: float, end: float) -> None:
        """Records an answered step, which came at `begin` and was done at `end`, both by `time.monotonic`, in s."""
        timings = response.timings
        for phase, histogram in self.seconds.items():
            histogram.observe(getattr(timings, f"{phase}_ms") / 1e3)
        if self._tracer is None or not request.traces:
            return
        attributes = {
            "pagewire.step_id": request.step_id,
            "pagewire.step_tokens": len(request.token_ids) // 4,
            "pagewire.step_sequences": len(request.request_ids) // 4,
            "pagewire.prepare_ms": timings.prepare_ms,
            "pagewire.forward_ms": timings.forward_ms,
            "pagewire.sample_ms": timings.sample_ms,
            "pagewire.swap_ms": timings.swap_ms,
        }
        for row in request.traces:
            parent = TraceContext.parse(row.traceparent, row.tracestate)
            if parent is not None:
                self._tracer.record("execute", parent, begin, end, attributes)

    def labels(self) -> dict[str, str] | None:
        """Labels of this worker's metrics; None while it loads."""
        return None if self.info is None else {"model_name": self.info.model}

    def metrics(self) -> list[Metric]:
        """All metrics of the worker."""
        texts = {
            "prepare": "Time of a step for building inputs and moving blocks.",
            "forward": "Time of a step for the model's forward pass.",
            "sample": "Time of a step for sampling.",
            "swap": "Time of a step for swapping blocks out and in; part of prepare.",
        }
        return [
            *(
                Metric(f"pagewire_worker_{phase}_seconds", "histogram", texts[phase], lambda h=histogram: h)  # type: ignore[misc]
                for phase, histogram in self.seconds.items()
            ),
            Metric(
                "pagewire_worker_device_memory_bytes",
                "gauge",
                "The GPU's memory: allocated by tensors, reserved by torch, free for anybody; "
                "not there on a CPU, nor where ranks have processes of their own.",
                self._device_memory,
                "kind",
            ),
            Metric(
                "pagewire_worker_info",
                "info",
                "What was loaded; always 1.",
                self._loaded,
            ),
        ]

    def _device_memory(self) -> dict[str, int] | None:
        # Asking would take some hundreds of MiB of a GPU in a process that does not use it, such as the front of ranks.
        if self.info is None or not torch.cuda.is_initialized():
            return None
        return {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "free": torch.cuda.mem_get_info()[0],
        }

    def _loaded(self) -> dict[str, str] | None:
        if self.info is None:
            return None
        names = ("device", "dtype", "kv_dtype", "quantization")
        return {name: getattr(self.info, name) for name in names}
