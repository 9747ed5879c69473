"""Load reports: what a router tells balancers of itself, and that gRPC's own weighted_round_robin acts on it."""

import asyncio
import itertools
import json
import math
from collections import Counter, deque
from dataclasses import dataclass, field

import grpc
import pytest
from cluster import cluster
from google.protobuf.duration_pb2 import Duration
from router_fakes import router_alone

from protos import session_pb2
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub
from protos.rpc import dial
from protos.xds.load_report_pb2 import OrcaLoadReport
from protos.xds.load_service_pb2 import OrcaLoadReportRequest
from protos.xds.load_service_pb2_grpc import OpenRcaServiceStub
from router.load_reports import LoadMeter


@dataclass
class Link:
    """Stands for a scheduler."""

    load: session_pb2.Load
    num_queued: int
    welcome: session_pb2.Welcome = field(
        default_factory=lambda: session_pb2.Welcome(
            limits=session_pb2.Limits(max_num_seqs=10), model=session_pb2.ModelInfo(num_blocks=100)
        )
    )


@dataclass
class Schedulers:
    takers: list[Link]
    num_live: int


@dataclass
class Clocks:
    now: float = 0.0
    cpu: float = 0.0

    def pass_by(self, seconds: float, cpu: float = 0.0) -> None:
        self.now += seconds
        self.cpu += cpu


def measured(schedulers: Schedulers, num_calls: int = 10, cpu: float = 0.2) -> OrcaLoadReport:
    """A meter's report after a minute of so many calls, and so much CPU time, each second."""
    clocks = Clocks()
    meter = LoadMeter(schedulers, lambda: clocks.now, lambda: clocks.cpu)
    for _ in range(60):
        for _ in range(num_calls):
            meter.count()
        clocks.pass_by(1, cpu)
        report = meter.report()
    return report


def test_a_report_holds_calls_a_second_cpu_time_and_the_schedulers_figures():
    first = Link(session_pb2.Load(num_running=6, num_waiting=2, kv_usage=0.5), 8)
    second = Link(session_pb2.Load(num_running=4, kv_usage=0.3), 4)
    report = measured(Schedulers([first, second], num_live=12))
    assert report.rps_fractional == pytest.approx(10, rel=0.01)
    assert report.cpu_utilization == pytest.approx(0.2, rel=0.01)
    assert report.application_utilization == pytest.approx(12 / 20, rel=0.01), "places are scarcer than blocks"
    assert report.utilization == {"kv_cache": pytest.approx(0.4)}
    assert report.named_metrics == {"num_requests_running": 10, "num_requests_waiting": 2}


def test_a_report_is_a_mean_over_about_five_seconds_however_seldom_it_is_asked_for():
    clocks = Clocks()
    meter = LoadMeter(Schedulers([], 0), lambda: clocks.now, lambda: clocks.cpu)
    for _ in range(50):
        meter.count()
    clocks.pass_by(5, cpu=2)
    report = meter.report()
    assert report.rps_fractional == pytest.approx(10 * (1 - 1 / math.e))
    assert report.cpu_utilization == pytest.approx(0.4 * (1 - 1 / math.e))
    clocks.pass_by(5)
    assert meter.report().rps_fractional == pytest.approx(10 * (1 - 1 / math.e) / math.e), "no calls since"


def test_blocks_count_where_they_are_scarcer_and_cpu_where_that_is():
    full = Link(session_pb2.Load(num_running=1, kv_usage=0.9), 1)
    assert measured(Schedulers([full], num_live=1)).application_utilization == pytest.approx(0.9, rel=0.01)
    assert measured(Schedulers([full], num_live=1), cpu=0.95).application_utilization == pytest.approx(0.95, rel=0.01)


def test_of_schedulers_that_others_use_too_a_router_reports_its_own_part():
    shared = Link(session_pb2.Load(num_running=8), 8)
    report = measured(Schedulers([shared], num_live=2), cpu=0)
    assert report.application_utilization == pytest.approx(0.8 * 2 / 8, rel=0.01)


def test_a_router_without_requests_takes_no_part_of_what_others_use():
    shared = Link(session_pb2.Load(kv_usage=0.5), 0)
    assert measured(Schedulers([shared], num_live=0), cpu=0).application_utilization == 0


def test_trailers_hold_the_report():
    clocks = Clocks()
    meter = LoadMeter(Schedulers([], 0), lambda: clocks.now, lambda: clocks.cpu)
    clocks.pass_by(1, cpu=0.5)
    ((name, value),) = meter.count()
    report = OrcaLoadReport.FromString(value)
    assert (name, report) == ("endpoint-load-metrics-bin", meter.report())
    assert report.cpu_utilization > 0


def test_more_than_all_places_is_more_than_one():
    assert measured(Schedulers([Link(session_pb2.Load(), 30)], num_live=30)).application_utilization > 2.5


def test_it_is_measured_once_a_second_however_many_calls_end():
    clocks, reads = Clocks(), []
    meter = LoadMeter(Schedulers([], 0), lambda: clocks.now, lambda: reads.append(clocks.now) or 0.0)
    for _ in range(100):
        meter.count()
        clocks.pass_by(1 / 16)  # exact in binary
    assert reads == [0, 1, 2, 3, 4, 5, 6]


async def test_reports_come_out_of_band():
    # In trailers too, but gRPC's clients take them out for their balancer: the last test sees what that does.
    async with router_alone() as plane, dial(plane.address) as channel:
        await plane.scheduler.tell_load(serving=True, num_running=3, kv_usage=0.25)
        stub = OpenRcaServiceStub(channel)
        stream = stub.StreamCoreMetrics(OrcaLoadReportRequest(report_interval=Duration(seconds=1)))
        reports = [await stream.read() for _ in range(3)]
        assert reports[-1].utilization["kv_cache"] == 0.25
        stream.cancel()


async def test_they_can_be_switched_off():
    async with router_alone(load_reports=False) as plane, dial(plane.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await OpenRcaServiceStub(channel).StreamCoreMetrics(OrcaLoadReportRequest()).read()
        assert info.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_an_open_report_does_not_hold_up_the_end_of_a_router():
    async with router_alone() as plane, dial(plane.address) as channel:
        stream = OpenRcaServiceStub(channel).StreamCoreMetrics(OrcaLoadReportRequest())
        await stream.read()
        plane.stop.set()
        # Of a grace of 60.
        assert await asyncio.wait_for(stream.code(), 10) is not grpc.StatusCode.OK


@pytest.mark.slow
@pytest.mark.parametrize("out_of_band", [True, pytest.param(False, marks=pytest.mark.long)])
async def test_weighted_round_robin_sends_most_calls_to_the_router_that_answers_faster(out_of_band):
    """Each has a scheduler of its own, with as many places; calls that are done sooner take less of them."""
    policy = {
        "enableOobLoadReport": out_of_band,
        "oobReportingPeriod": "1s",
        "blackoutPeriod": "1s",
        "weightUpdatePeriod": "0.5s",
    }
    config = {"loadBalancingConfig": [{"weighted_round_robin": policy}]}
    places = ("--max-num-seqs", "16")
    with (
        cluster(step_ms=40, text="slow", scheduler_options=places) as slow,
        cluster(step_ms=2, text="fast", scheduler_options=places) as fast,
    ):
        target = f"ipv4:{slow.target},{fast.target}"
        options = [("grpc.service_config", json.dumps(config)), ("grpc.enable_http_proxy", 0)]
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            stub, latest, everyone = GenerationServiceStub(channel), deque(maxlen=60), Counter()

            async def client(name: str) -> None:
                for number in itertools.count():
                    request = pb.GenerateRequest(text=f"{name} {number}", stop=pb.StopConditions(max_tokens=8))
                    text = (await stub.Complete(request)).outputs[0].text
                    who = "slow" if set(text) <= set("slow") else "fast"
                    latest.append(who)
                    everyone[who] += 1

            clients = [asyncio.create_task(client(str(number))) for number in range(12)]
            while len(latest) < 60 or latest.count("fast") < 0.75 * 60:
                await asyncio.sleep(0.05)
                for each in clients:
                    assert not each.done(), each.exception()
            for each in clients:
                each.cancel()
        print(out_of_band, everyone)
