"""What the router exports to Prometheus: latencies as clients see them, and its schedulers' load for gateways.

The load is what the schedulers reported last, at most a second ago, added up; it is left out while none is connected.
"""

from collections.abc import Callable

from protos import session_pb2
from protos.metrics import Metric
from router.calls import ClientCalls
from router.schedulers import Schedulers, load_of


def metrics_of(schedulers: Schedulers, calls: ClientCalls) -> list[Metric]:
    """All metrics of the router."""
    return [
        *_load(schedulers),
        Metric(
            "pagewire_num_requests_live",
            "gauge",
            "Requests that this router answers.",
            lambda: schedulers.num_live,
        ),
        Metric(
            "pagewire_time_to_first_token_seconds",
            "histogram",
            "From a request's arrival at this router to its first token; told at its end.",
            lambda: calls.ttft_s,
            aliases=("vllm:time_to_first_token_seconds",),
        ),
        Metric(
            "pagewire_time_per_output_token_seconds",
            "histogram",
            "Mean time per token behind the first, of a request that was answered.",
            lambda: calls.output_token_s,
            aliases=("vllm:request_time_per_output_token_seconds",),
        ),
        Metric(
            "pagewire_e2e_request_latency_seconds",
            "histogram",
            "From arrival at this router to the end, of a request that was answered.",
            lambda: calls.request_s,
            aliases=("vllm:e2e_request_latency_seconds",),
        ),
        Metric(
            "pagewire_request_success_total",
            "counter",
            "Requests that were answered, or given up by their clients (abort), by why their first output ended.",
            lambda: calls.num_finished,
            "finished_reason",
            aliases=("vllm:request_success_total",),
        ),
        Metric(
            "pagewire_admission_rejections_total",
            "counter",
            "Requests refused before their first token with RESOURCE_EXHAUSTED or UNAVAILABLE, by reason.",
            lambda: calls.num_turned_away,
            "reason",
            aliases=("vllm:admission_rejections_total",),
        ),
    ]


def _load(schedulers: Schedulers) -> list[Metric]:
    def of_load(read: Callable[[session_pb2.Load], float]) -> Callable[[], float | None]:
        def sum_up() -> float | None:
            links = schedulers.heard
            return read(load_of(links)) if links else None

        return sum_up

    def cache_config() -> dict[str, str] | None:
        if schedulers.welcome is None:
            return None
        model = schedulers.welcome.model
        blocks = [link.welcome.model.num_blocks for link in schedulers.heard if link.welcome]
        return {
            "block_size": str(model.block_size),
            "num_gpu_blocks": str(sum(blocks) if blocks else model.num_blocks),
            "cache_dtype": model.kv_dtype,
        }

    return [
        Metric(
            "pagewire_num_requests_waiting",
            "gauge",
            "Requests that wait at this router's schedulers, of all their routers.",
            of_load(lambda load: load.num_waiting),
            aliases=("vllm:num_requests_waiting",),
        ),
        Metric(
            "pagewire_num_requests_running",
            "gauge",
            "Requests that hold blocks at this router's schedulers, of all their routers.",
            of_load(lambda load: load.num_running),
            aliases=("vllm:num_requests_running",),
        ),
        Metric(
            "pagewire_num_requests_swapped",
            "gauge",
            "Requests whose blocks are in the swap pools, of all the schedulers' routers.",
            of_load(lambda load: load.num_swapped),
            aliases=("vllm:num_requests_swapped",),
        ),
        Metric(
            "pagewire_kv_cache_usage_ratio",
            "gauge",
            "Share of the schedulers' KV blocks that requests hold, 0 to 1.",
            of_load(lambda load: load.kv_usage),
            aliases=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        ),
        Metric(
            "pagewire_scheduler_connected",
            "gauge",
            "Schedulers with which there is a session; the four above are there only while there is one.",
            lambda: len(schedulers.heard),
        ),
        Metric(
            "pagewire_cache_config_info",
            "info",
            "How the KV cache is laid out; always 1.",
            cache_config,
            aliases=("vllm:cache_config_info",),
        ),
    ]
