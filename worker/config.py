"""The worker's settings: flags, or PAGEWIRE_WORKER_* in the environment."""

from typing import Literal

from pydantic import ByteSize, Field

from protos.process import Settings


class WorkerSettings(Settings):
    """Serves one model's forward passes to a scheduler."""

    listen: str = Field("127.0.0.1:50053", description='address to serve on: "host:port" or "unix:/path"')
    drain_grace_s: float = Field(
        5, ge=0, description="seconds that open calls may go on after SIGTERM, for a scheduler that drains as well"
    )

    model: str = Field(
        min_length=1, description="checkpoint directory (Hugging Face layout), or a model's name on the hub"
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="what clients call the model (default: the last part of --model)"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="of weights and KV cache; auto is the checkpoint's own"
    )
    max_model_len: int | None = Field(
        None, ge=1, description="most tokens of a sequence, prompt and output (default: what the model was made for)"
    )

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto is cuda where there is one")
    num_threads: int | None = Field(
        None, ge=1, description="threads that compute on the CPU (default: all cores this process may use)"
    )

    block_size: int = Field(16, ge=1, le=1024, description="tokens of KV in a block")
    num_blocks: int | None = Field(None, ge=1, description="blocks of the KV cache; goes before --kv-cache-bytes")
    kv_cache_bytes: ByteSize | None = Field(
        None, gt=0, description='size of the KV cache, such as "512MiB" (default: a share of the memory that is free)'
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of a GPU's memory to use for weights, a step's work and KV cache together"
    )
    swap_bytes: ByteSize | None = Field(
        None,
        ge=0,
        description='size of the pool in CPU memory that blocks are swapped out to, such as "1GiB"; 0 for none '
        "(default: as many blocks as the KV cache has, but at most 1GiB and a quarter of the memory that is free)",
    )
    max_num_batched_tokens: int = Field(2048, ge=1, description="most tokens computed in one step")
