"""What Prometheus scrapes from a router and a scheduler, over HTTP."""

import asyncio
import contextlib
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import fakes
import grpc
import pytest
from fakes import FakeWorker, request
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_strictly
from prometheus_client.parser import text_string_to_metric_families as parse
from router_fakes import FakeScheduler, router_alone

from pagewire.launch import free_port
from protos.calls import Calls
from protos.errors import CannotListen
from protos.histogram import Histogram
from protos.metrics import Exporter, Metric
from protos.metrics_server import MetricsServer
from router.calls import ClientCalls
from router.config import RouterSettings
from router.metrics import metrics_of as router_metrics
from router.schedulers import Schedulers
from scheduler.config import SchedulerSettings
from scheduler.loop import SchedulerLoop
from scheduler.metrics import metrics_of as scheduler_metrics
from scheduler.observer import Observer
from scheduler.sessions import Sessions
from worker.observer import Observer as WorkerObserver

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
DOCS = Path(__file__).parents[1] / "docs/operations.md"


def fetch(port: int, path: str = "/metrics", accept: str = "text/plain") -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    wanted = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    with opener.open(wanted, timeout=10) as answer:
        return answer.read().decode()


class Scrapes:
    """Both services' metrics; `router` and `scheduler` are ports."""

    def __init__(self) -> None:
        self.router, self.scheduler = free_port(), free_port()

    async def text(self, port: int, accept: str = "text/plain") -> str:
        return await asyncio.to_thread(fetch, port, "/metrics", accept)

    async def values(self, port: int) -> dict[tuple, float]:
        """By name, then the values of all labels except model_name, in order of the labels' names."""
        values = {}
        for family in parse(await self.text(port)):
            for sample in family.samples:
                labels = [value for name, value in sorted(sample.labels.items()) if name != "model_name"]
                values[(sample.name, *labels)] = sample.value
        return values


@contextlib.asynccontextmanager
async def scraped_plane(worker: FakeWorker | None = None, router: dict[str, object] | None = None, **scheduler_options):
    scrapes = Scrapes()
    router = {"metrics_listen": f"127.0.0.1:{scrapes.router}"} | (router or {})
    options = {"metrics_listen": f"127.0.0.1:{scrapes.scheduler}"} | scheduler_options
    async with fakes.control_plane(worker, router=router, **options) as plane:
        yield plane, scrapes


async def test_both_services_count_a_request():
    async with scraped_plane(num_speculative_tokens=0) as (plane, scrapes):
        await plane.generation.Complete(request("hello", max_tokens=9))
        router = await scrapes.values(scrapes.router)
        for name in ("pagewire_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"):
            assert router[f"{name}_count",] == 1
        assert router["pagewire_e2e_request_latency_seconds_count",] == 1
        assert (
            router["pagewire_e2e_request_latency_seconds_sum",] >= router["pagewire_time_to_first_token_seconds_sum",]
        )
        assert router["pagewire_time_per_output_token_seconds_count",] == 1
        assert router["pagewire_request_success_total", "length"] == 1
        assert router["vllm:request_success_total", "stop"] == 0
        assert router["pagewire_num_requests_live",] == 0
        call = ("pagewire.v1.GenerationService", "Complete", "unary")
        sides = (call[1], call[0], call[2])
        assert router["grpc_server_started_total", *sides] == 1
        assert router["grpc_server_handled_total", "OK", *sides] == 1
        assert router["grpc_server_handling_seconds_count", *sides] == 1
        scheduler = await scrapes.values(scrapes.scheduler)
        facts = {
            "pagewire_prompt_tokens_total": 5,
            "vllm:prompt_tokens_total": 5,
            "pagewire_cached_prompt_tokens_total": 0,
            "pagewire_generation_tokens_total": 9,
            "pagewire_prefix_cache_queries_total": 5,
            "pagewire_prefix_cache_hits_total": 0,
            "pagewire_queue_time_seconds_count": 1,
            "pagewire_prefill_time_seconds_count": 1,
            "pagewire_decode_time_seconds_count": 1,
            "pagewire_inter_token_latency_seconds_count": 8,
            "pagewire_step_seconds_count": 9,
            "pagewire_iteration_tokens_count": 9,
            "pagewire_iteration_tokens_sum": 5 + 8,
            "pagewire_num_preemptions_total": 0,
            "pagewire_worker_connected": 1,
        }
        assert {name: scheduler[name,] for name in facts} == facts
        assert ("pagewire_draft_tokens_total",) not in scheduler, "nothing is drafted here"


async def test_draft_tokens_are_counted_and_how_many_of_them_were_right():
    async with scraped_plane(FakeWorker(lambda index, position: 7 + position % 2)) as (plane, scrapes):
        await plane.generation.Complete(request("hello", max_tokens=20))
        scheduler = await scrapes.values(scrapes.scheduler)
        drafted, accepted = (scheduler[f"pagewire_{name}_tokens_total",] for name in ("draft", "accepted_draft"))
        assert scheduler["pagewire_generation_tokens_total",] == 20
        assert scheduler["pagewire_step_seconds_count",] == 20 - accepted
        assert 10 < accepted <= drafted == scheduler["vllm:spec_decode_num_draft_tokens_total",]
        assert accepted == scheduler["vllm:spec_decode_num_accepted_tokens_total",]


async def test_the_tokens_of_a_beam_search_are_counted_at_its_end():
    async with scraped_plane() as (plane, scrapes):
        wanted = request("hello", max_tokens=6, ignore_eos=True)
        wanted.sampling.beam_width, wanted.sampling.n = 3, 2
        answer = await plane.generation.Complete(wanted)
        scheduler = await scrapes.values(scrapes.scheduler)
        assert scheduler["pagewire_generation_tokens_total",] == answer.usage.completion_tokens == 2 * 6


async def test_a_repeated_prompt_counts_as_cached():
    async with scraped_plane() as (plane, scrapes):
        for _ in range(2):
            await plane.generation.Complete(request("x" * 16, max_tokens=2))
        scheduler = await scrapes.values(scrapes.scheduler)
        assert scheduler["pagewire_cached_prompt_tokens_total",] == scheduler["vllm:prefix_cache_hits_total",] == 12


async def test_queues_and_blocks_are_shown_as_they_are():
    worker = FakeWorker()
    async with scraped_plane(worker, max_num_seqs=1) as (plane, scrapes):
        worker.gate.clear()
        calls = [plane.generation.Complete(request("x" * 15, max_tokens=3)) for _ in range(3)]
        await plane.until(lambda state: (state.num_running, state.num_waiting) == (1, 2))
        scheduler = await scrapes.values(scrapes.scheduler)
        expected = {"num_requests_waiting": 2, "num_requests_running": 1, "num_requests_swapped": 0}
        for name, value in expected.items():
            assert scheduler[f"pagewire_{name}",] == scheduler[f"vllm:{name}",] == value
        assert scheduler["vllm:num_requests_waiting_by_reason", "capacity"] == 2
        held = (await plane.state()).block_pool.num_held
        for name in ("pagewire_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            assert scheduler[name,] == held / 64
        # The router hears within a second.
        while (router := await scrapes.values(scrapes.router))["vllm:num_requests_waiting",] != 2:
            await asyncio.sleep(0.05)
        assert router["vllm:num_requests_running",] == 1
        assert router["pagewire_kv_cache_usage_ratio",] == pytest.approx(held / 64)
        assert router["pagewire_num_requests_live",] == 3
        worker.gate.set()
        await asyncio.gather(*calls)


async def test_the_router_has_no_gauges_of_a_scheduler_it_does_not_hear():
    async with scraped_plane() as (plane, scrapes):
        assert (await scrapes.values(scrapes.router))["vllm:num_requests_running",] == 0
        await plane.cut_sessions(refuse=True)
        while (values := await scrapes.values(scrapes.router))["pagewire_scheduler_connected",]:
            await asyncio.sleep(0.01)
        assert ("vllm:num_requests_running",) not in values
        await plane.cut_sessions(refuse=False)
        while not (await scrapes.values(scrapes.router))["pagewire_scheduler_connected",]:
            await asyncio.sleep(0.05)


async def test_the_gauges_of_several_schedulers_are_added_up_and_their_caches_count_as_one():
    scrapes, schedulers = Scrapes(), (FakeScheduler(num_blocks=64), FakeScheduler(num_blocks=192))
    loads = {"num_waiting": 1, "num_running": 2, "kv_usage": 0.5}, {"num_running": 3, "kv_usage": 0.25}
    async with router_alone(*schedulers, metrics_listen=f"127.0.0.1:{scrapes.router}") as plane:

        async def until_hearing(number: int) -> dict[tuple[str, ...], float]:
            while (values := await scrapes.values(scrapes.router)).get(("pagewire_scheduler_connected",)) != number:
                await asyncio.sleep(0.01)
            return values

        await until_hearing(2)
        for scheduler, load in zip(schedulers, loads, strict=True):
            await scheduler.tell_load(serving=True, **load)
        while (values := await scrapes.values(scrapes.router))["vllm:num_requests_running",] != 2 + 3:
            await asyncio.sleep(0.01)
        assert values["vllm:num_requests_waiting",] == 1
        assert values["pagewire_kv_cache_usage_ratio",] == pytest.approx((32 + 48) / 256)
        assert 'num_gpu_blocks="256"' in await scrapes.text(scrapes.router)
        await plane.servers[0].stop(0)
        assert (await until_hearing(1))["pagewire_kv_cache_usage_ratio",] == pytest.approx(0.25)


async def test_refusals_cancellations_and_deadlines_are_counted_by_their_codes():
    worker = FakeWorker()
    async with scraped_plane(worker, max_num_seqs=1, max_waiting_requests=1) as (plane, scrapes):
        complete = plane.generation.Complete

        async def handled(code: str, method: str, kind: str) -> float:
            values = await scrapes.values(scrapes.router)
            return values.get(("grpc_server_handled_total", code, method, "pagewire.v1.GenerationService", kind), 0)

        with pytest.raises(grpc.aio.AioRpcError):
            await complete(request(""))
        worker.gate.clear()
        running = plane.generation.Generate(request(max_tokens=50))
        await plane.until(lambda state: state.num_running == 1)
        waiting = plane.generation.Generate(request())
        await plane.until(lambda state: state.num_waiting == 1)
        with pytest.raises(grpc.aio.AioRpcError):
            await complete(request())
        waiting.cancel()
        await plane.until(lambda state: state.num_waiting == 0)
        while not await handled("DeadlineExceeded", "Complete", "unary"):  # it can pass on the way to the router
            with pytest.raises(grpc.aio.AioRpcError):
                await complete(request(), timeout=0.05)
            await plane.until(lambda state: state.num_waiting == 0)
        worker.gate.set()
        await running.read()
        running.cancel()
        await plane.until(lambda state: state.num_running + state.num_waiting == 0)
        assert await handled("InvalidArgument", "Complete", "unary") == 1
        assert await handled("ResourceExhausted", "Complete", "unary") == 1
        assert await handled("Canceled", "Generate", "server_stream") == 2
        values = await scrapes.values(scrapes.router)
        assert values["pagewire_admission_rejections_total", "RESOURCE_EXHAUSTED"] == 1
        assert values["vllm:admission_rejections_total", "RESOURCE_EXHAUSTED"] == 1
        assert values["pagewire_request_success_total", "abort"] == 2


async def test_a_call_that_is_refused_unread_counts_under_the_kind_of_its_method(tmp_path):
    (tmp_path / "tokens.toml").write_text("")
    guarded = {"auth_tokens": tmp_path / "tokens.toml", "admin_listen": f"127.0.0.1:{free_port()}"}
    async with scraped_plane(router=guarded) as (plane, scrapes):
        with pytest.raises(grpc.aio.AioRpcError):
            await plane.generation.Generate(request()).read()
        values = await scrapes.values(scrapes.router)
        sides = ("Generate", "pagewire.v1.GenerationService", "server_stream")
        assert values["grpc_server_handled_total", "Unauthenticated", *sides] == 1


async def test_both_formats_are_valid_and_labelled_with_the_model():
    async with scraped_plane(FakeWorker(num_cpu_blocks=8)) as (plane, scrapes):
        await plane.generation.Complete(request("hello", max_tokens=3))
        for port in (scrapes.router, scrapes.scheduler):
            families = list(parse_strictly(await scrapes.text(port, OPENMETRICS)))
            for family in families:
                ours = family.name.startswith(("pagewire_", "vllm:"))
                assert all(sample.labels["model_name"] == "fake" for sample in family.samples if ours), family.name
            text = await scrapes.text(port)
            assert 'vllm:cache_config_info{block_size="4"' in text
            assert 'num_gpu_blocks="64"' in text
            if promtool := shutil.which("promtool"):
                check = await asyncio.to_thread(
                    subprocess.run, [promtool, "check", "metrics"], input=text, capture_output=True, text=True
                )
                # It objects to names that vLLM chose.
                complaints = [line for line in check.stderr.splitlines() if not line.startswith("vllm:")]
                assert not complaints


async def test_a_scraper_that_stops_in_the_middle_delays_no_other():
    async with scraped_plane() as (plane, scrapes):
        with socket.create_connection(("127.0.0.1", scrapes.router)) as stuck:
            stuck.sendall(b"GET /metr")
            assert await plane.text(max_tokens=3) == "The"
            assert "vllm:num_requests_running" in await scrapes.text(scrapes.router)


async def test_metrics_end_with_their_service():
    async with scraped_plane() as (_, scrapes):
        pass
    for port in (scrapes.router, scrapes.scheduler):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


async def test_other_paths_are_not_found():
    async with scraped_plane() as (_, scrapes):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            await asyncio.to_thread(fetch, scrapes.router, "/")


def empty() -> Exporter:
    return Exporter([], lambda: None, Calls())


async def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CannotListen, match=f"cannot listen on {address} for metrics: Address already in use"):
            MetricsServer(address, empty())


@pytest.mark.parametrize(
    ("address", "words"),
    [("127.0.0.1:99999", "ports go from 0 to 65535"), ("nobody.invalid:1", "(?!.*process)")],
)
def test_an_address_for_metrics_that_cannot_be_bound_is_named_with_the_reason(address, words):
    with pytest.raises(CannotListen, match=f"cannot listen on {address} for metrics: {words}"):
        MetricsServer(address, empty())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
async def test_a_closed_port_can_be_bound_again(host):
    if host == "[::1]" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    server = MetricsServer(f"{host}:0", empty())
    await server.close()
    again = MetricsServer(f"{host}:{server.port}", empty())
    await again.close()


def test_a_histogram_counts_up_to_its_bounds():
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 9):
        histogram.observe(value)
    histogram.observe(3, count=4)
    assert histogram.cumulative() == [2, 3, 7, 8]
    assert histogram.sum == 24


# The table of metrics


def _loop(observer: Observer) -> SchedulerLoop:
    return SchedulerLoop(SchedulerSettings(), Sessions(observer.added, observer.ended), observer)


async def test_the_documentation_lists_every_metric_with_its_kind_and_its_aliases():
    observer = Observer()
    services = {
        "router": router_metrics(Schedulers(RouterSettings(model="none"), lambda: None), ClientCalls()),
        "scheduler": scheduler_metrics(_loop(observer), observer),
        "worker": WorkerObserver().metrics(),
    }
    wanted: dict[str, tuple[str, set[str], set[str]]] = {}
    for service, metrics in services.items():
        for metric in metrics:
            row = wanted.setdefault(metric.name, (metric.kind, set(), set(metric.aliases)))
            assert (row[0], row[2]) == (metric.kind, set(metric.aliases)), "two services use it for different things"
            row[1].add(service)
    told = {}
    for line in DOCS.read_text().splitlines():
        if line.startswith("| `"):
            name, kind, where, aliases = (cell.strip() for cell in line.split("|")[1:5])
            told[name.strip("`")] = (kind, set(where.split(", ")), set(re.findall(r"`([^`]+)`", aliases)))
    calls = {name for name in told if name.startswith("grpc_server_")}
    assert calls == {"grpc_server_started_total", "grpc_server_handled_total", "grpc_server_handling_seconds"}
    assert {name: row for name, row in told.items() if name not in calls} == wanted


async def test_no_two_metrics_of_a_service_share_a_name():
    observer = Observer()
    metrics: list[Metric] = scheduler_metrics(_loop(observer), observer)
    names = [name for metric in metrics for name in (metric.name, *metric.aliases)]
    assert len(names) == len(set(names))
