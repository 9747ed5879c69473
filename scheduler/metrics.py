"""What the scheduler exports to Prometheus: queues, blocks, steps, and the phases of requests."""

from collections.abc import Callable

from protos.metrics import Metric, Reading
from scheduler.loop import SchedulerLoop
from scheduler.observer import Observer
from scheduler.scheduler import Scheduler


def metrics_of(loop: SchedulerLoop, observer: Observer) -> list[Metric]:
    """All metrics. They are read only once there is a core, since their labels come with it."""

    def of_core(read: Callable[[Scheduler], Reading]) -> Callable[[], Reading]:
        def value() -> Reading:
            assert loop.core is not None
            return read(loop.core)

        return value

    def found(read: Callable[[Scheduler], int]) -> Callable[[], int | None]:
        return lambda: read(loop.core) if loop.core is not None and loop.core.policy.prefix_caching else None

    def drafted(read: Callable[[], int]) -> Callable[[], int | None]:
        return lambda: read() if loop.core is not None and loop.core.policy.num_speculative_tokens else None

    return [
        *_gauges(loop, of_core),
        Metric(
            "pagewire_num_preemptions_total",
            "counter",
            "Times that a request lost its blocks to another one.",
            of_core(lambda core: core.num_preemptions),
            aliases=("vllm:num_preemptions_total",),
        ),
        Metric(
            "pagewire_prompt_tokens_total",
            "counter",
            "Prompt tokens of requests that were scheduled, cached ones included.",
            of_core(lambda core: core.num_prompt_tokens),
            aliases=("vllm:prompt_tokens_total",),
        ),
        Metric(
            "pagewire_cached_prompt_tokens_total",
            "counter",
            "Prompt tokens whose KV was found in the prefix cache.",
            of_core(lambda core: core.num_found_tokens),
            aliases=("vllm:prompt_tokens_cached_total",),
        ),
        Metric(
            "pagewire_prefix_cache_queries_total",
            "counter",
            "Prompt tokens looked up in the prefix cache; not there when it is off.",
            found(lambda core: core.num_looked_up_tokens),
            aliases=("vllm:prefix_cache_queries_total",),
        ),
        Metric(
            "pagewire_prefix_cache_hits_total",
            "counter",
            "Those of them that were found.",
            found(lambda core: core.num_found_tokens),
            aliases=("vllm:prefix_cache_hits_total",),
        ),
        Metric(
            "pagewire_generation_tokens_total",
            "counter",
            "Tokens sampled.",
            lambda: observer.num_generated,
            aliases=("vllm:generation_tokens_total",),
        ),
        Metric(
            "pagewire_draft_tokens_total",
            "counter",
            "Tokens that were guessed to follow, and computed ahead; not there when none are.",
            drafted(lambda: observer.num_drafts),
            aliases=("vllm:spec_decode_num_draft_tokens_total",),
        ),
        Metric(
            "pagewire_accepted_draft_tokens_total",
            "counter",
            "Those of them that were right, so that a step gave a sequence a token more.",
            drafted(lambda: observer.num_accepted),
            aliases=("vllm:spec_decode_num_accepted_tokens_total",),
        ),
        *_histograms(observer),
    ]


def _gauges(
    loop: SchedulerLoop, of_core: Callable[[Callable[[Scheduler], Reading]], Callable[[], Reading]]
) -> list[Metric]:
    def cache_config() -> dict[str, str] | None:
        info, core = loop.info, loop.core
        if info is None or core is None:
            return None
        return {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(core.blocks.num_blocks),
            "num_cpu_blocks": str(core.blocks.num_swap_blocks),
            "cache_dtype": info.kv_dtype,
            "enable_prefix_caching": str(core.policy.prefix_caching),
        }

    return [
        Metric(
            "pagewire_num_requests_waiting",
            "gauge",
            "Requests that wait for blocks: new ones, and ones to be computed again.",
            of_core(lambda core: core.num_waiting),
            aliases=("vllm:num_requests_waiting",),
        ),
        Metric(
            "vllm:num_requests_waiting_by_reason",
            "gauge",
            "The same by vLLM's reasons: here all wait for capacity.",
            of_core(lambda core: {"capacity": core.num_waiting, "deferred": 0}),
            "reason",
        ),
        Metric(
            "pagewire_num_requests_running",
            "gauge",
            "Requests that hold blocks.",
            of_core(lambda core: core.num_running),
            aliases=("vllm:num_requests_running",),
        ),
        Metric(
            "pagewire_num_requests_swapped",
            "gauge",
            "Requests whose blocks are in the swap pool.",
            of_core(lambda core: core.num_swapped),
            aliases=("vllm:num_requests_swapped",),
        ),
        Metric(
            "pagewire_kv_cache_usage_ratio",
            "gauge",
            "Share of the KV blocks that requests hold, 0 to 1; those kept for their contents alone count as free.",
            of_core(lambda core: core.blocks.num_held / core.blocks.num_blocks),
            aliases=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        ),
        Metric(
            "pagewire_swap_pool_usage_ratio",
            "gauge",
            "Share of the swap pool's blocks that requests hold, 0 to 1.",
            of_core(lambda core: 1 - core.blocks.num_free_swap_blocks / max(1, core.blocks.num_swap_blocks)),
            aliases=("vllm:cpu_cache_usage_perc",),
        ),
        Metric(
            "pagewire_worker_connected",
            "gauge",
            "1 while steps can run.",
            lambda: int(loop.serving),
        ),
        Metric(
            "pagewire_cache_config_info",
            "info",
            "How the KV cache is laid out; always 1.",
            cache_config,
            aliases=("vllm:cache_config_info",),
        ),
    ]


def _histograms(observer: Observer) -> list[Metric]:
    return [
        Metric(
            "pagewire_queue_time_seconds",
            "histogram",
            "From a request's arrival here to the first plan that holds it; told at its end.",
            lambda: observer.queue_s,
            aliases=("vllm:request_queue_time_seconds",),
        ),
        Metric(
            "pagewire_prefill_time_seconds",
            "histogram",
            "From there to its first token.",
            lambda: observer.prefill_s,
            aliases=("vllm:request_prefill_time_seconds",),
        ),
        Metric(
            "pagewire_decode_time_seconds",
            "histogram",
            "From there to its end.",
            lambda: observer.decode_s,
            aliases=("vllm:request_decode_time_seconds",),
        ),
        Metric(
            "pagewire_inter_token_latency_seconds",
            "histogram",
            "Gap between two tokens of a sequence, pauses by preemption included.",
            lambda: observer.inter_token_s,
            aliases=("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        ),
        Metric(
            "pagewire_iteration_tokens",
            "histogram",
            "Tokens that a step computes.",
            lambda: observer.step_tokens,
            aliases=("vllm:iteration_tokens_total",),
        ),
        Metric(
            "pagewire_step_seconds",
            "histogram",
            "Time that a step takes, as the scheduler sees it.",
            lambda: observer.step_s,
        ),
    ]
