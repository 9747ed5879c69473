"""Whole models on a GPU, as cases of `bench.gpu`: the time of a decode step, and the tokens that come out of a service.

The model has the shape of Llama 3 8B, with random weights in bfloat16. A decode step is what the worker does with a
request: everything from reading it to sampled tokens, each step launched while the one before runs, so that the host
shows only where it is slower than the device. Its bytes, those of the weights and of the K and V that it attends to,
are set beside the bandwidth that a copy reached, so its share is the shortest time that reading them could take over
the time of the step. `launched` steps are many launches, `recorded` ones replay a CUDA graph.

The service is the scheduler's core face to face with the runner, in this process: all requests at once, prompts of
random tokens, greedy, outputs of one length.
"""

import statistics
import time
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from bench.gpu_cases import Case, Timed
from bench.in_process import FaceToFace, make_runner
from kernels.choice import choose
from protos.columns import pack
from protos.sampling_pb2 import Sampling
from protos.worker_pb2 import ExecuteModelRequest, NewRequest
from scheduler.block_manager import BlockManager
from scheduler.policy import Policy
from scheduler.scheduler import Scheduler
from worker.decode_graphs import CudaRecorder, Recorder
from worker.layers.rotary import DefaultRope
from worker.model_runner import ModelRunner
from worker.models.llama import LlamaConfig, LlamaForCausalLM
from worker.step_in_flight import StepInFlight
from worker.streams import streams_of
from worker.weights import Piece

LLAMA_3_8B = LlamaConfig(
    vocabulary_size=128256,
    hidden_size=4096,
    mlp_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    norm_epsilon=1e-5,
    rope=DefaultRope(500_000.0),
    context_length=8192,
    windows=(None,) * 32,
    tied_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    head_norms=False,
)


@dataclass(frozen=True, slots=True)
class Load:
    """What the cases do.

    Attributes:
        batches: rows of a decode step, and requests of a service.
        context: tokens of each row of a decode step.
        prompt_tokens: of a request.
        output_tokens: of a request.
        steps: decode steps in a row that are timed together, which is done `rounds` times.
        rounds: see `steps`; the median counts.
        budget: most tokens of a step of the service.
    """

    batches: tuple[int, ...] = (1, 32, 128)
    context: int = 1024
    prompt_tokens: int = 512
    output_tokens: int = 128
    steps: int = 20
    rounds: int = 5
    budget: int = 4096

    @property
    def num_blocks(self) -> int:
        """Blocks of 16 tokens that the largest case needs."""
        longest = max(self.context, self.prompt_tokens + self.output_tokens)
        return max(self.batches) * -(-longest // 16)


class ModelCases:
    """The cases, and what they share, which is made when the first of them needs it.

    Args:
        device: a GPU; a CPU for tests.
        config: of the model.
        dtype: of weights and cache.
        load: what is done.
        record: makes graphs; None: those of CUDA.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        config: LlamaConfig = LLAMA_3_8B,
        dtype: torch.dtype = torch.bfloat16,
        load: Load | None = None,
        record: Recorder | None = None,
    ) -> None:
        self._device = device
        self._config = config
        self._dtype = dtype
        self._load = load or Load()
        self._given_recorder = record

    @property
    def bytes_needed(self) -> int:
        """Of the device's memory, at least: weights and cache."""
        c = self._config
        per_layer = c.hidden_size * (c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads) + 3 * c.mlp_size)
        values = c.num_layers * per_layer + 2 * c.vocabulary_size * c.hidden_size
        return (values + self._load.num_blocks * 16 * self._kv_values) * self._dtype.itemsize

    def cases(self) -> Iterator[Case]:
        """Decode steps, launched before anything is recorded; then the service with both."""
        for kind in ("launched", "recorded"):
            for batch in self._load.batches:
                make = partial(self._decode, batch, is_recorded=kind == "recorded")
                yield Case("model decode", f"batch {batch} x {self._load.context}, {kind}", make, "copy")
        for in_flight in (1, 2):
            for batch in self._load.batches:
                name = f"{batch} at once, {in_flight} step{'s' * (in_flight - 1)} in flight"
                yield Case("model service", name, partial(self._serve, batch, in_flight))

    @property
    def _kv_values(self) -> int:
        """K and V of a token, in all layers."""
        return 2 * self._config.num_layers * self._config.num_kv_heads * self._config.head_dim

    @cached_property
    def _model(self) -> LlamaForCausalLM:
        operations = choose(self._device, self._dtype, head_dim=self._config.head_dim, block_size=16)
        model = LlamaForCausalLM(self._config, operations=operations, dtype=self._dtype, device=self._device)
        for piece in model.pieces():
            for name, tensor in _tensors(piece).items():
                if "norm" in name:
                    tensor.fill_(1)
                else:
                    tensor.normal_(0, 0.02)
            piece.pack()
        return model

    @cached_property
    def _runner(self) -> ModelRunner:
        runner, cache = make_runner(
            self._model,
            num_blocks=self._load.num_blocks,
            max_num_batched_tokens=self._load.budget,
            dtype=self._dtype,
            device=self._device,
        )
        for layer in cache.layers:
            for part in layer:
                part.normal_()  # products of zeros take less power, and so less time
        return runner

    @cached_property
    def _recorded(self) -> ModelRunner:
        self._runner.record_decodes(self._given_recorder or CudaRecorder(self._device), max(self._load.batches))
        return self._runner

    def _decode(self, batch: int, *, is_recorded: bool) -> Timed:
        """One step of `batch` rows, repeated on the same context."""
        runner = self._recorded if is_recorded else self._runner
        context = self._load.context
        width = -(-context // 16)
        new = [NewRequest(request_id=number, sampling=Sampling(top_p=1)) for number in range(batch)]
        step = ExecuteModelRequest(
            new_requests=new,
            request_ids=pack(range(batch)),
            sequence_indexes=pack([0] * batch),
            num_computed_tokens=pack([context - 1] * batch),
            num_new_tokens=pack([1] * batch),
            token_ids=pack([1] * batch),
            block_table_lengths=pack([width] * batch),
            block_tables=torch.randperm(batch * width, dtype=torch.int32).numpy().tobytes(),
            sample_rows=pack(range(batch)),
            sample_sequence_indexes=pack([0] * batch),
        )
        runner.execute(step)
        step.ClearField("new_requests")
        step.token_ids = pack([-1] * batch)
        _time_steps(runner, step, 3, self._device)
        times = [_time_steps(runner, step, self._load.steps, self._device) for _ in range(self._load.rounds)]
        runner.execute(ExecuteModelRequest(finished_request_ids=pack(range(batch))))
        weights = sum(
            tensor.nbytes
            for piece in self._model.pieces()
            for name, tensor in _tensors(piece).items()
            if "embed" not in name
        )
        return Timed(
            time_us=statistics.median(time_us for time_us, _ in times),
            host_us=statistics.median(host_us for _, host_us in times),
            bytes_moved=weights + batch * context * self._kv_values * self._dtype.itemsize,
        )

    def _serve(self, num_requests: int, in_flight: int) -> Timed:
        """All requests at once, from the first submission to the last token; the second time, when all is compiled."""
        self._serve_once(num_requests, in_flight, output_tokens=2)
        return self._serve_once(num_requests, in_flight, self._load.output_tokens)

    def _serve_once(self, num_requests: int, in_flight: int, output_tokens: int) -> Timed:
        policy = Policy(
            self._load.budget,
            max_num_seqs=num_requests,
            max_waiting_requests=num_requests,
            watermark=0.0,
            prefix_caching=False,
            max_steps_in_flight=in_flight,
        )
        core = Scheduler(policy, BlockManager(self._load.num_blocks, 16, 0))
        size = (num_requests, self._load.prompt_tokens)
        prompts = torch.randint(self._config.vocabulary_size, size, dtype=torch.int32)
        begun = time.perf_counter()
        for number, prompt in enumerate(prompts):
            core.submit(
                request_id=str(number),
                prompt_token_ids=array("i", prompt.numpy().tobytes()),
                n=1,
                max_tokens=output_tokens,
                sampling=Sampling(top_p=1, num_prompt_tokens=self._load.prompt_tokens),
                now=0.0,
            )
        FaceToFace(core, self._recorded).run()
        took_s = time.perf_counter() - begun
        self._recorded.execute(ExecuteModelRequest(finished_request_ids=pack(range(1, num_requests + 1))))
        return Timed(1e6 * took_s, tokens=num_requests * output_tokens)


def _time_steps(
    runner: ModelRunner, request: ExecuteModelRequest, count: int, device: torch.device
) -> tuple[float, float]:
    """Microseconds of a step on the device, and of launching one, over `count` steps in a row, two in flight."""
    streams = streams_of(device)
    in_flight: deque[StepInFlight] = deque()
    host_s = 0.0
    begun = streams.mark()
    for _ in range(count):
        if len(in_flight) == 2:
            in_flight.popleft().result()
        asked = time.perf_counter()
        in_flight.append(runner.launch(request))
        host_s += time.perf_counter() - asked
    ended = streams.mark()
    for step in in_flight:
        step.result()
    ended.wait()
    return 1e3 * ended.ms_since(begun) / count, 1e6 * host_s / count


def _tensors(piece: Piece) -> dict[str, Tensor]:
    """Its weights by their names in a checkpoint; all of them, since no other rank has any."""
    return {name: target for name, target in piece.tensors().items() if isinstance(target, Tensor)}
