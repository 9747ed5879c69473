"""What the router exports to Prometheus: latencies as clients see them, and its scheduler's load for gateways.

The load is what the scheduler told last, at most a second old, and is left out while there is no scheduler.
"""

from collections.abc import Callable

from protos import session_pb2
from protos.metrics import Metric
from router.calls import ClientCalls
from router.scheduler_link import SchedulerLink


def metrics_of(link: SchedulerLink, calls: ClientCalls) -> list[Metric]:
    """All of them."""
    return [
        *_load(link),
        Metric(
            "pagewire_num_requests_live",
            "gauge",
            "Requests that this router answers.",
            lambda: link.num_live,
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


def _load(link: SchedulerLink) -> list[Metric]:
    def of_load(read: Callable[[session_pb2.Load], float]) -> Callable[[], float | None]:
        return lambda: read(link.load) if link.connected else None

    def cache_config() -> dict[str, str] | None:
        if link.welcome is None:
            return None
        model = link.welcome.model
        return {
            "block_size": str(model.block_size),
            "num_gpu_blocks": str(model.num_blocks),
            "cache_dtype": model.kv_dtype,
        }

    return [
        Metric(
            "pagewire_num_requests_waiting",
            "gauge",
            "Requests that wait at the scheduler, of all its routers.",
            of_load(lambda load: load.num_waiting),
            aliases=("vllm:num_requests_waiting",),
        ),
        Metric(
            "pagewire_num_requests_running",
            "gauge",
            "Requests that hold blocks at the scheduler, of all its routers.",
            of_load(lambda load: load.num_running),
            aliases=("vllm:num_requests_running",),
        ),
        Metric(
            "pagewire_num_requests_swapped",
            "gauge",
            "Requests whose blocks are in the swap pool, of all the scheduler's routers.",
            of_load(lambda load: load.num_swapped),
            aliases=("vllm:num_requests_swapped",),
        ),
        Metric(
            "pagewire_kv_cache_usage_ratio",
            "gauge",
            "Share of the scheduler's KV blocks that requests hold, 0 to 1.",
            of_load(lambda load: load.kv_usage),
            aliases=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        ),
        Metric(
            "pagewire_scheduler_connected",
            "gauge",
            "1 while there is a session with the scheduler; the four above are there only then.",
            lambda: int(link.connected),
        ),
        Metric(
            "pagewire_cache_config_info",
            "info",
            "How the KV cache is laid out; always 1.",
            cache_config,
            aliases=("vllm:cache_config_info",),
        ),
    ]
