"""What the worker's observer makes of steps: times for Prometheus, spans for traces; and what it says of the device."""

import torch

from protos.columns import pack
from protos.histogram import Histogram
from protos.trace_context import TraceContext
from protos.worker_pb2 import ExecuteModelRequest, ExecuteModelResponse, GetInfoResponse, StepTimings
from protos.worker_pb2 import TraceContext as Trace
from worker.observer import Observer

TIMINGS = {"prepare_ms": 2.0, "forward_ms": 40.0, "sample_ms": 3.0, "swap_ms": 1.0}
ANSWER = ExecuteModelResponse(timings=StepTimings(**TIMINGS))
FIRST, SECOND = (f"00-{digit * 32}-{digit * 16}-01" for digit in "12")
# A step of two sequences, five tokens and one token, whose requests are traced; the header of a third is broken.
STEP = ExecuteModelRequest(
    step_id=7,
    request_ids=pack([1, 2]),
    token_ids=pack([5, 5, 5, 5, 5, 6]),
    traces=[Trace(traceparent=FIRST, tracestate="vendor=x"), Trace(traceparent="00-x"), Trace(traceparent=SECOND)],
)


class Spans:
    """Stands in for a tracer: keeps what it is told."""

    def __init__(self) -> None:
        self.recorded = []

    def record(self, *span) -> None:
        self.recorded.append(span)


def read(observer):
    return {metric.name: metric.read() for metric in observer.metrics()}


def test_every_phase_of_a_step_is_counted_in_seconds_under_its_own_name():
    observer = Observer()
    observer.executed(ExecuteModelRequest(), ANSWER, 0.0, 1.0)
    observer.executed(ExecuteModelRequest(), ANSWER, 1.0, 2.0)
    histograms = {name: value for name, value in read(observer).items() if isinstance(value, Histogram)}
    assert {name: (value.sum, value.cumulative()[-1]) for name, value in histograms.items()} == {
        "pagewire_worker_prepare_seconds": (0.004, 2),
        "pagewire_worker_forward_seconds": (0.08, 2),
        "pagewire_worker_sample_seconds": (0.006, 2),
        "pagewire_worker_swap_seconds": (0.002, 2),
    }


def test_a_step_is_a_span_in_each_of_its_traces():
    spans = Spans()
    Observer(spans).executed(STEP, ANSWER, 10.0, 12.0)
    facts = {"pagewire.step_id": 7, "pagewire.step_tokens": 6, "pagewire.step_sequences": 2}
    facts |= {f"pagewire.{phase}": ms for phase, ms in TIMINGS.items()}
    assert spans.recorded == [
        ("execute", TraceContext.parse(FIRST, "vendor=x"), 10.0, 12.0, facts),
        ("execute", TraceContext.parse(SECOND), 10.0, 12.0, facts),
    ]


def test_a_worker_that_sends_no_spans_runs_traced_steps():
    observer = Observer()
    observer.executed(STEP, ANSWER, 10.0, 12.0)
    assert observer.seconds["forward"].sum == 0.04


def test_a_worker_has_labels_and_tells_what_it_has_loaded_once_it_has():
    observer = Observer()
    assert (observer.labels(), read(observer)["pagewire_worker_info"]) == (None, None)
    observer.info = GetInfoResponse(
        model="tiny", device="cpu", dtype="bfloat16", kv_dtype="float32", quantization="int8"
    )
    assert observer.labels() == {"model_name": "tiny"}
    assert read(observer)["pagewire_worker_info"] == {
        "device": "cpu",
        "dtype": "bfloat16",
        "kv_dtype": "float32",
        "quantization": "int8",
    }


def test_the_memory_of_a_gpu_is_told_only_where_this_process_uses_it(monkeypatch):
    observer, asked = Observer(), []

    def free_and_total():
        asked.append(True)
        return 5, 100

    monkeypatch.setattr(torch.cuda, "mem_get_info", free_and_total)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 60)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 90)
    observer.info = GetInfoResponse(model="tiny")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert (read(observer)["pagewire_worker_device_memory_bytes"], asked) == (None, [])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert read(observer)["pagewire_worker_device_memory_bytes"] == {"allocated": 60, "reserved": 90, "free": 5}
