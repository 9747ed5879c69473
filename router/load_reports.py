"""How busy this router and the schedulers behind it are, for balancers: ORCA, out of band and in trailers of calls.

Balancers give a server calls in proportion to its calls per second divided by its utilization (gRPC's
weighted_round_robin, Envoy's client_side_weighted_round_robin). That finds what each server can do only if its
utilization is what its own calls cause: where routers share schedulers, a figure common to all would let their shares
drift apart. A stream's trailers come when it is over, so a balancer of streams asks for reports out of band.
https://github.com/grpc/proposal/blob/master/A51-custom-backend-metrics.md
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence

import grpc

from protos.xds import load_service_pb2
from protos.xds.load_report_pb2 import OrcaLoadReport
from router.schedulers import Schedulers, load_of

# gRPC's name for it.
TRAILER = "endpoint-load-metrics-bin"
# Balancers may want reports more often, but there may be a thousand of them.
_INTERVAL_S = 1.0
# Reports are means over about this long.
_WINDOW_S = 5.0


class LoadMeter:
    """Measures at most once a second, when it is asked.

    Args:
        clock: seconds.
        cpu_clock: seconds of CPU time that this process has used.
    """

    def __init__(
        self,
        schedulers: Schedulers,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._schedulers = schedulers
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._measured_at, self._cpu_s = clock(), cpu_clock()
        self._num_calls = 0
        self._means = (0.0, 0.0, 0.0)
        self._report = OrcaLoadReport()
        self._trailers = ((TRAILER, b""),)

    def count(self) -> Sequence[tuple[str, bytes]]:
        """Counts a call that ends; returns its trailers."""
        self._num_calls += 1
        self.report()
        return self._trailers

    def report(self) -> OrcaLoadReport:
        """The load now, or as it was less than a second ago; empty in the first second."""
        now = self._clock()
        if now - self._measured_at >= _INTERVAL_S:
            self._measure(now)
            self._trailers = ((TRAILER, self._report.SerializeToString()),)
        return self._report

    def _measure(self, now: float) -> None:
        passed_s, cpu_s = now - self._measured_at, self._cpu_clock()
        links = self._schedulers.takers
        load = load_of(links)
        num_queued = sum(link.num_queued for link in links)
        max_num_seqs = sum(link.welcome.limits.max_num_seqs for link in links if link.welcome)
        # This router's part of whichever is scarcer, blocks or places in the batches.
        part = min(1.0, self._schedulers.num_live / num_queued) if num_queued else 0.0
        taken = part * max(load.kv_usage, num_queued / max_num_seqs if max_num_seqs else 0.0)
        newest = (self._num_calls / passed_s, (cpu_s - self._cpu_s) / passed_s, taken)
        fading = math.exp(-passed_s / _WINDOW_S)
        calls_per_s, cpu, taken = self._means = tuple(  # type: ignore[assignment]
            fading * mean + (1 - fading) * new for mean, new in zip(self._means, newest, strict=True)
        )
        self._measured_at, self._cpu_s, self._num_calls = now, cpu_s, 0
        self._report = OrcaLoadReport(
            cpu_utilization=cpu,
            application_utilization=max(cpu, taken),
            rps_fractional=calls_per_s,
            utilization={"kv_cache": load.kv_usage},
            named_metrics={
                "num_requests_running": load.num_running,
                "num_requests_waiting": load.num_waiting,
            },
        )


class OpenRcaService:
    """Reports out of band. Its streams end with the server, and hold up no drain."""

    def __init__(self, meter: LoadMeter) -> None:
        self._meter = meter

    async def StreamCoreMetrics(
        self, request: load_service_pb2.OrcaLoadReportRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """A report at once, and then one each interval."""
        interval_s = max(_INTERVAL_S, request.report_interval.ToMilliseconds() / 1e3)
        while True:
            await context.write(self._meter.report())
            await asyncio.sleep(interval_s)
