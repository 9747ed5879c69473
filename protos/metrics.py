"""Prometheus metrics as a service describes them: values are read when they are scraped.

A service says once what it exports, as a list of `Metric`; the counts and histograms behind it are kept whether anybody
scrapes or not. Besides its own name, a metric may have the one that vLLM gave it, which gateways look for.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from protos.calls import Call, Calls
from protos.histogram import Histogram

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

_CALL_LABELS = ("grpc_type", "grpc_service", "grpc_method")

Number = int | float
# One value, a histogram, or values by label.
Reading = Number | Histogram | Mapping[str, Number]


@dataclass(frozen=True, slots=True)
class Metric:
    """What is exported, and where it is read.

    Attributes:
        name: a counter's name includes its `_total`.
        read: called on another thread; returns None while there is nothing to export.
        label: what tells the values apart if `read` returns several; those of an "info" are all labels.
        aliases: other names of the same metric.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram", "info"]
    help: str
    read: Callable[[], Reading | Mapping[str, str] | None]
    label: str = ""
    aliases: tuple[str, ...] = ()


class Exporter:
    """What one service exports.

    Args:
        labels: labels of all metrics except those of calls; None while not known, and then only those are exported.
        calls: their counts are exported under the names of go-grpc-prometheus.
    """

    def __init__(
        self, metrics: Sequence[Metric], labels: Callable[[], Mapping[str, str] | None], calls: Calls[Any]
    ) -> None:
        self._metrics = metrics
        self._labels = labels
        self._calls = calls

    def collect(self) -> "Iterator[Family]":
        """All metrics as they are now: what prometheus_client asks a collector for."""
        yield from _of_calls(self._calls)
        labels = self._labels()
        if labels is None:
            return
        for metric in self._metrics:
            reading = metric.read()
            if reading is not None:
                for name in (metric.name, *metric.aliases):
                    yield _family(metric, name, reading, labels)

    def describe(self) -> "Iterable[Family]":
        """Nothing: what is collected is not known beforehand."""
        return ()


def _family(metric: Metric, name: str, reading: Reading | Mapping[str, str], constant: Mapping[str, str]) -> "Family":
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    if isinstance(reading, Histogram):
        return _histogram(name, metric.help, list(constant), [(list(constant.values()), reading)])
    if metric.kind == "info":
        gauge = GaugeMetricFamily(name, metric.help, labels=[*constant, *reading])  # type: ignore[misc]
        gauge.add_metric([*constant.values(), *reading.values()], 1)  # type: ignore[union-attr]
        return gauge
    # prometheus_client wants a counter's name without its suffix.
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    if not isinstance(reading, Mapping):
        family = make(name.removesuffix("_total"), metric.help, labels=list(constant))
        family.add_metric(list(constant.values()), reading)
        return family
    family = make(name.removesuffix("_total"), metric.help, labels=[*constant, metric.label])
    for value, number in list(reading.items()):  # a copy: another thread may add one meanwhile
        family.add_metric([*constant.values(), value], number)  # type: ignore[arg-type]
    return family


def _histogram(name: str, text: str, labels: list[str], rows: Iterable[tuple[list[str], Histogram]]) -> "Family":
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(name, text, labels=labels)
    for values, histogram in rows:
        bounds = [*(repr(float(bound)) for bound in histogram.bounds), "+Inf"]
        family.add_metric(values, list(zip(bounds, histogram.cumulative(), strict=True)), histogram.sum)
    return family


def _of_calls(calls: Calls[Call]) -> "Iterator[Family]":
    from prometheus_client.core import CounterMetricFamily

    rows = [(list(key), counts) for key, counts in list(calls.counts.items())]
    started = CounterMetricFamily("grpc_server_started", "Calls that arrived.", labels=_CALL_LABELS)
    handled = CounterMetricFamily(
        "grpc_server_handled", "Calls that ended, by status code.", labels=(*_CALL_LABELS, "grpc_code")
    )
    for key, counts in rows:
        started.add_metric(key, counts.num_started)
        for code, number in list(counts.num_by_code.items()):
            handled.add_metric([*key, _camel(code.name)], number)
    yield started
    yield handled
    seconds = [(key, counts.seconds) for key, counts in rows]
    yield _histogram("grpc_server_handling_seconds", "Time from arrival to end.", list(_CALL_LABELS), seconds)


def _camel(code: str) -> str:
    """`DeadlineExceeded`, as go-grpc-prometheus writes codes, and dashboards expect them."""
    return {"OK": "OK", "CANCELLED": "Canceled"}.get(code, code.title().replace("_", ""))
