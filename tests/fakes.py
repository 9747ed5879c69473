"""A worker that answers at once with a scripted text, a tokenizer of bytes, and a control plane around them."""

import asyncio
import contextlib
import itertools
import json
import tempfile
from array import array
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import router.__main__ as router_main
import scheduler.__main__ as scheduler_main
from protos import session_pb2, worker_pb2
from protos.columns import pack, pack_floats, unpack
from protos.logprobs import Logprobs, to_columns
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1 import introspection_pb2
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub
from protos.pagewire.v1.introspection_pb2_grpc import IntrospectionServiceStub
from protos.rpc import Server, Service, dial, wait_for_serving
from protos.sampling_pb2 import LogprobColumns, Sampling
from protos.session_pb2_grpc import SessionServiceStub
from protos.tls import ClientTls, ServerTls
from protos.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from router.config import RouterSettings
from router.tokenizer import Tokenizer
from scheduler.config import SchedulerSettings

BOS, EOS = 256, 257
VOCABULARY_SIZE = 260
CONTEXT_LENGTH = 200
TEXT = "The quick brown fox jumps over the lazy dog. "

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer_of_bytes(longer: Mapping[int, bytes] | None = None) -> tokenizers.Tokenizer:
    """A tokenizer whose ids below 256 are bytes, so that a test can count them; it also has tokens of several bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # ByteLevel writes byte b as a printable character; give that character the id b.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = {byte: chr(256 + n) for n, byte in enumerate(b for b in range(256) if b not in printable)}
    written = [shifted.get(byte, chr(byte)) for byte in range(256)]
    assert sorted(written) == alphabet
    vocabulary = {character: byte for byte, character in enumerate(written)}
    vocabulary |= {"".join(written[byte] for byte in row): token_id for token_id, row in (longer or {}).items()}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_tokenizer(directory: Path) -> Path:
    """A checkpoint directory without weights whose token ids are bytes."""
    tokenizer = tokenizer_of_bytes()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<x>", "<y>"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "chat_template": CHAT_TEMPLATE}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return directory


def scripted(sequence_index: int, output_index: int) -> int:
    """The fake model: every sequence says TEXT again and again, sequence i from its i-th byte on."""
    return TEXT.encode()[(sequence_index + output_index) % len(TEXT)]


def scripted_candidates(last_token_id: int, output_index: int, num: int) -> list[tuple[int, float]]:
    """The fake model's beams: TEXT is the most probable continuation, and each byte over TEXT's costs one more.

    An early deviation costs a little less than the same one later, so that no two outputs are equally probable.
    """
    best = scripted(0, output_index)
    return [((best + rank) % 256, -0.5 - rank * (1 + output_index / 1000)) for rank in range(num)]


def scripted_logprobs(token_id: int, num_top: int, rank: int = 1) -> Logprobs:
    """The log-probabilities that the fake model gives one token and its alternatives."""
    tops = [(token_id + n) % 256 for n in range(num_top)]
    columns = (array("f", [-0.5]), array("i", [rank]), array("i", tops), array("f", [-0.5 - n for n in range(num_top)]))
    return Logprobs(num_top, *columns)


@dataclass
class FakeWorker:
    """Answers steps by a script; holds them while `gate` is clear.

    Attributes:
        script: (sequence index, output index) -> token id.
        candidates: for beams: (last token id, output index, how many) -> (token id, log-probability), best first.
        requests: every step it was sent.
        known: ids of requests whose sampling parameters it holds.
        new_requests: all new requests that it was sent, in order.
        explode: how many more steps fail with an exception.
        leave: how many more streams end normally after their first step.
        spoil: functions that spoil the answers to the next steps, in order.
    """

    script: Callable[[int, int], int] = scripted
    candidates: Callable[[int, int, int], list[tuple[int, float]]] = scripted_candidates
    num_blocks: int = 64
    num_cpu_blocks: int = 0
    block_size: int = 4
    epoch: int = 1
    num_concurrent_steps: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[worker_pb2.ExecuteModelRequest] = field(default_factory=list)
    known: dict[int, Sampling] = field(default_factory=dict)
    new_requests: list[worker_pb2.NewRequest] = field(default_factory=list)
    explode: int = 0
    leave: int = 0
    spoil: list[Callable[[worker_pb2.ExecuteModelResponse], object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    async def GetInfo(self, request, context):
        return worker_pb2.GetInfoResponse(
            epoch=self.epoch,
            model="fake",
            context_length=CONTEXT_LENGTH,
            vocabulary_size=VOCABULARY_SIZE,
            dtype="float32",
            kv_dtype="float32",
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            num_cpu_blocks=self.num_cpu_blocks,
            swap_ms_per_block=0.1 if self.num_cpu_blocks else 0,
            kv_cache_note="as the test wants",
            max_num_batched_tokens=4096,
            quantization="none",
            num_concurrent_steps=self.num_concurrent_steps,
        )

    async def Execute(self, requests, context):
        async for request in requests:
            self.requests.append(request)
            await self.gate.wait()
            if self.explode:
                self.explode -= 1
                raise RuntimeError("the step explodes, as the test wants")
            response = self.answer(request)
            if self.spoil:
                self.spoil.pop(0)(response)
            await context.write(response)
            if self.leave:
                self.leave -= 1
                return

    async def ExecuteModel(self, request, context):
        return self.answer(request)

    def answer(self, request: worker_pb2.ExecuteModelRequest) -> worker_pb2.ExecuteModelResponse:
        assert request.epoch == self.epoch
        for number in unpack(request.finished_request_ids):
            del self.known[number]
        for new in request.new_requests:
            self.known[new.request_id] = new.sampling
            self.new_requests.append(new)
        ids, starts, counts = map(unpack, (request.request_ids, request.num_computed_tokens, request.num_new_tokens))
        token_ids, ends = unpack(request.token_ids), list(itertools.accumulate(counts))
        rows, indexes = map(unpack, (request.sample_rows, request.sample_sequence_indexes))
        samples: list[tuple[int, float]] = []
        candidates: list[tuple[int, float]] = []
        tops: list[Logprobs] = []
        for row, index in zip(rows, indexes, strict=True):
            sampling = self.known[ids[row]]
            output_index = starts[row] + counts[row] - sampling.num_prompt_tokens
            if sampling.num_candidates:
                found = self.candidates(token_ids[ends[row] - 1], output_index, sampling.num_candidates)
                assert len({token_id for token_id, _ in found}) == sampling.num_candidates
                candidates += found
                samples.append(found[0])
            else:
                samples.append((self.script(index, output_index), -0.5))
            if sampling.HasField("num_top_logprobs"):
                tops.append(scripted_logprobs(samples[-1][0], sampling.num_top_logprobs, rank=1 + output_index))
        return worker_pb2.ExecuteModelResponse(
            step_id=request.step_id,
            epoch=self.epoch,
            token_ids=pack(token_id for token_id, _ in samples),
            logprobs=pack_floats(logprob for _, logprob in samples),
            candidate_token_ids=pack(token_id for token_id, _ in candidates),
            candidate_logprobs=pack_floats(logprob for _, logprob in candidates),
            top_logprobs=to_columns(tops),
            prompt_logprobs=self._prompt_logprobs(request),
        )

    def _prompt_logprobs(self, request: worker_pb2.ExecuteModelRequest) -> LogprobColumns:
        """Each token of a prompt has its position as its rank."""
        ids, starts, counts = map(unpack, (request.request_ids, request.num_computed_tokens, request.num_new_tokens))
        prompts = {new.request_id: unpack(new.prompt_token_ids) for new in self.new_requests}
        parts = []
        for row, start in zip(*map(unpack, (request.prompt_logprob_rows, request.prompt_logprob_starts)), strict=True):
            num_top, prompt = self.known[ids[row]].num_prompt_logprobs, prompts[ids[row]]
            for position in range(start + 1, min(starts[row] + counts[row] + 1, len(prompt))):
                parts.append(scripted_logprobs(prompt[position], num_top, rank=position))
        return to_columns(parts)


class Proxy:
    """Passes bytes between two Unix sockets until it is cut."""

    def __init__(self, target: str) -> None:
        self.refusing = False
        self._target = target
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self, path: str) -> None:
        await asyncio.start_unix_server(self._connect, path)

    async def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.close()
            return
        try:
            back, forth = await asyncio.open_unix_connection(self._target)
        except OSError:
            writer.close()
            return
        self._writers += [writer, forth]
        await asyncio.gather(pass_on(reader, forth), pass_on(back, writer))


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies bytes until one side has ended."""
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@dataclass
class ControlPlane:
    """A router and a scheduler in process, with a fake worker behind them."""

    worker: FakeWorker
    worker_server: Server
    proxy: "Proxy"
    stop_router: asyncio.Event
    directory: str
    generation: GenerationServiceStub
    introspection: IntrospectionServiceStub
    channel: grpc.aio.Channel

    @property
    def scheduler_address(self) -> str:
        return f"unix:{self.directory}/s"

    @property
    def router_address(self) -> str:
        return f"unix:{self.directory}/r"

    async def state(self) -> introspection_pb2.SchedulerState:
        return (await self.introspection.GetState(introspection_pb2.GetStateRequest())).state

    async def until(
        self, holds: Callable[[introspection_pb2.SchedulerState], bool]
    ) -> introspection_pb2.SchedulerState:
        """The first state for which `holds` is true; the test's own timeout bounds the wait."""
        while not holds(state := await self.state()):
            await asyncio.sleep(0.005)
        return state

    async def replace_worker(self, worker: FakeWorker) -> None:
        """Kills the worker and starts another at its address."""
        await self.worker_server.stop(0)
        self.worker = worker
        self.worker_server = await start_worker(worker, f"unix:{self.directory}/w")

    async def cut_sessions(self, refuse: bool = False) -> None:
        """Breaks the connection between router and scheduler, which both stay up, and may keep it broken."""
        self.proxy.refusing = refuse
        await self.proxy.cut()

    async def until_scheduler(self, holds: Callable[[session_pb2.GetStateResponse], bool]) -> None:
        """Returns when `holds` is true for what the scheduler itself answers, without a router."""
        async with dial(self.scheduler_address) as channel:
            stub = SessionServiceStub(channel)
            while not holds(await stub.GetState(session_pb2.GetStateRequest())):
                await asyncio.sleep(0.005)

    async def text(self, prompt: str = "p", **stop: object) -> str:
        response = await self.generation.Complete(request(prompt, **stop))
        return response.outputs[0].text


def request(prompt: str = "p", **stop: object) -> pb.GenerateRequest:
    """A request for text with stop conditions by name."""
    return pb.GenerateRequest(text=prompt, stop=pb.StopConditions(**stop))  # type: ignore[arg-type]


async def start_worker(worker: FakeWorker, address: str, tls: ServerTls | None = None) -> Server:
    name = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
    server = Server([Service(name, add_WorkerServiceServicer_to_server, worker)])
    await server.start(address, tls=tls)
    await server.set_serving(True)
    return server


@contextlib.asynccontextmanager
async def running(main: Callable[[asyncio.Event], object]) -> AsyncIterator[asyncio.Event]:
    """A service's `serve` as a task, stopped as SIGTERM would."""
    stop = asyncio.Event()
    task = asyncio.create_task(main(stop))  # type: ignore[arg-type]
    try:
        yield stop
    finally:
        stop.set()
        await task


@contextlib.asynccontextmanager
async def control_plane(
    worker: FakeWorker | None = None,
    *,
    router: dict[str, object] | None = None,
    client_tls: ClientTls | None = None,
    worker_tls: ServerTls | None = None,
    **scheduler_options: object,
) -> AsyncIterator[ControlPlane]:
    """Everything except a real worker, SERVING; at the end no request may be live and no block held.

    If the router has a port for operators, introspection uses that.
    """
    worker = worker or FakeWorker()
    with tempfile.TemporaryDirectory(prefix="pw") as directory:
        tokenizer = Tokenizer(write_tokenizer(Path(directory) / "model"))
        options = {"listen": f"unix:{directory}/s", "worker": f"unix:{directory}/w", "drain_grace_s": 2.0}
        scheduler_settings = SchedulerSettings(**(options | scheduler_options))
        router_options = {"listen": f"unix:{directory}/r", "scheduler": f"unix:{directory}/p", "drain_grace_s": 60.0}
        router_settings = RouterSettings(model=directory, **(router_options | (router or {})))
        server = await start_worker(worker, f"unix:{directory}/w", worker_tls)
        proxy = Proxy(f"{directory}/s")
        await proxy.start(f"{directory}/p")
        plane = None
        try:
            async with (
                running(lambda stop: scheduler_main.serve(scheduler_settings, stop)),
                running(lambda stop: router_main.serve(router_settings, tokenizer, stop)) as stop_router,
                dial(router_settings.listen, client_tls) as channel,
                dial(
                    router_settings.admin_listen or router_settings.listen,
                    None if router_settings.admin_listen else client_tls,
                ) as operators,
            ):
                await wait_for_serving(channel)
                generation, introspection = GenerationServiceStub(channel), IntrospectionServiceStub(operators)
                plane = ControlPlane(worker, server, proxy, stop_router, directory, generation, introspection, channel)
                yield plane
                if not stop_router.is_set():
                    await plane.until(lambda state: state.num_running + state.num_waiting == 0)
                    assert (await plane.state()).block_pool.num_held == 0
        finally:
            await proxy.cut()
            await (plane.worker_server if plane else server).stop(0)


def outputs_of(message: session_pb2.SessionResponse) -> list[tuple[int, int, int, list[int]]]:
    """(handle, sequence index, first index, tokens) of each row of a session's StepOutputs."""
    outputs = message.step_outputs
    tokens = unpack(outputs.token_ids).tolist()
    rows = []
    columns = (outputs.handles, outputs.sequence_indexes, outputs.first_indexes, outputs.counts)
    for handle, index, first, count in zip(*map(unpack, columns), strict=True):
        rows.append((handle, index, first, tokens[:count]))
        tokens = tokens[count:]
    return rows
