"""The worker's settings: flags, or PAGEWIRE_WORKER_* in the environment."""

from typing import Literal

from pydantic import ByteSize, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from protos.tls_settings import ServerTlsSettings

DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
ExecutorName = Literal["auto", "uni", "mp", "ray", "external"]


class WorkerSettings(ServerTlsSettings):
    """Serves one model's forward passes to a scheduler."""

    selftest: bool = Field(
        False,
        description="check this machine, the kernels and, where --model names one, the model; print what was found and "
        "end, with status 1 if anything is wrong",
    )

    listen: str = Field("127.0.0.1:50053", description='address to serve on: "host:port" or "unix:/path"')
    drain_grace_s: float = Field(
        5, ge=0, description="seconds that open calls may go on after SIGTERM, for a scheduler that drains as well"
    )
    hang_timeout_s: float = Field(
        60,
        gt=0,
        description="seconds that a step may go on after its scheduler gave it up or died, before this process ends "
        "with status 1, for another one to take its place: its device hangs",
    )

    model: str = Field(
        "",
        validate_default=True,
        description="checkpoint directory (Hugging Face layout), or a model's name on the hub; --selftest needs none",
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="what clients call the model; without it, the last part of --model"
    )
    dtype: DtypeName = Field("auto", description="of weights and all that is computed; auto is the checkpoint's own")
    quantization: Literal["none", "int8", "int4"] = Field(
        "none",
        description="int8 keeps the weights of linear layers in 8 bits, a factor for each output; for CPUs. int4 keeps "
        "them in 4.5, a step and a base for each 32 inputs, but the head and layers without 64s of inputs in 8; for "
        "bfloat16 on CPUs with AVX2 or AVX-512, without AMX",
    )
    max_model_len: int | None = Field(
        None, ge=1, description="most tokens of a sequence, prompt and output; without it, what the model was made for"
    )

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto is cuda where there is one")
    memory_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of the free memory of this machine, or container, that is ours to take; `pagewire up "
        "--replicas` gives each worker its own",
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        description="threads that compute on the CPU, in each rank; without it, all cores this process may use, shared "
        "out among the ranks of this host",
    )

    executor: ExecutorName = Field(
        "auto",
        description="how ranks are run: uni, one in this process; mp, a process each on this host; ray, actors of Ray; "
        "external, by torchrun, of whose processes this is one; auto takes the first that the sizes below and "
        "this host allow, and logs why",
    )
    tensor_parallel_size: int = Field(1, ge=1, description="ranks that each layer is shared out to")
    pipeline_parallel_size: int = Field(
        1, ge=1, description="stages that the layers are shared out to, each of so many ranks"
    )
    ray_address: str = Field(
        "",
        description='cluster of --executor ray: "host:6379", or "auto" for the one of this host; empty starts one',
    )

    block_size: int = Field(16, ge=1, le=1024, description="tokens of KV in a block")
    kv_cache_dtype: DtypeName = Field("auto", description="of K and V in the cache; auto is --dtype")
    num_gpu_blocks: int | None = Field(
        None, ge=1, description="blocks of the KV cache, on a CPU too; goes before --kv-cache-bytes"
    )
    kv_cache_bytes: ByteSize | None = Field(
        None,
        gt=0,
        description='size of the KV cache, such as "512MiB", at each rank (default on a GPU: see '
        "--gpu-memory-utilization; on a CPU: that of the checkpoint, but room for two sequences of full length, and at "
        "most a quarter of the free memory)",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of a GPU's memory to use for weights, a step's work and KV cache together"
    )
    swap_bytes: ByteSize | None = Field(
        None,
        ge=0,
        description='size of the pool in CPU memory that blocks are swapped out to, such as "1GiB", at each rank; 0 '
        "for none; without it, as many blocks as the KV cache has, but at most 1GiB and a quarter of the free memory",
    )
    max_num_batched_tokens: int = Field(2048, ge=1, description="most tokens computed in one step")
    cuda_graphs: bool = Field(
        True,
        description="on a GPU, record decode steps at the start and replay them: some seconds and some memory then, "
        "and less time of the host in each step",
    )

    @property
    def num_ranks(self) -> int:
        """The number of ranks of a worker."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @field_validator("model")
    @classmethod
    def _require_model(cls, model: str, info: ValidationInfo) -> str:
        if not model and not info.data.get("selftest"):
            raise PydanticCustomError("missing", "Field required")
        return model
