"""The worker's gRPC service in this process on a tiny checkpoint, and the process itself from start to SIGTERM."""

import asyncio
import contextlib
import gc
import json
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from worker_fakes import GREEDY, Row, step, tiny_checkpoint, tokens

from protos.rpc import Server, Service, dial, wait_for_serving
from protos.worker_pb2 import DESCRIPTOR, GetInfoRequest, GetInfoResponse
from protos.worker_pb2_grpc import WorkerServiceStub, add_WorkerServiceServicer_to_server
from worker.config import WorkerSettings
from worker.executor.uni import UniExecutor
from worker.loading import load_worker
from worker.observer import Observer
from worker.server import WorkerService

NAME = DESCRIPTOR.services_by_name["WorkerService"].full_name
PROMPT = [5, 17, 3, 88, 42]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama")


def settings(checkpoint, **changes):
    return WorkerSettings(model=str(checkpoint), block_size=4, num_gpu_blocks=32, num_threads=1, **changes)


@contextlib.asynccontextmanager
async def serving(service):
    """A channel to a real server of `service`."""
    server = Server([Service(NAME, add_WorkerServiceServicer_to_server, service)])
    port = await server.start("127.0.0.1:0")
    try:
        async with dial(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


@pytest.fixture
async def worker(checkpoint):
    """Stub, service and epoch of a loaded worker."""
    service = WorkerService(Observer())
    await service.load(UniExecutor(settings(checkpoint)))
    async with serving(service) as channel:
        stub = WorkerServiceStub(channel)
        yield stub, service, (await stub.GetInfo(GetInfoRequest())).epoch


def prompt(epoch, step_id=0, request_id=1):
    return step(Row(request_id, PROMPT, [0, 1, 2]), new={request_id: GREEDY}, epoch=epoch, step_id=step_id)


def decode(epoch, step_id, request_id=1):
    return step(Row(request_id, [-1], [0, 1, 2], computed=4 + step_id), epoch=epoch, step_id=step_id)


async def code_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return failure.value.code()


async def refusal_of(stream, request):
    """The code of a stream that is refused its first message, maybe before the write of it returns."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        await stream.write(request)
    return await stream.code()


async def test_info_is_unavailable_until_the_model_is_loaded_and_then_says_what_was(checkpoint):
    service = WorkerService(Observer())
    async with serving(service) as channel:
        stub = WorkerServiceStub(channel)
        assert await code_of(stub.GetInfo(GetInfoRequest())) == grpc.StatusCode.UNAVAILABLE
        assert await code_of(stub.ExecuteModel(prompt(0))) == grpc.StatusCode.UNAVAILABLE
        stream = stub.Execute()
        assert await refusal_of(stream, prompt(0)) == grpc.StatusCode.UNAVAILABLE
        await service.load(UniExecutor(settings(checkpoint, max_model_len=100, swap_bytes=10_000)))
        info = await stub.GetInfo(GetInfoRequest())
    assert 0 < info.epoch < 2**63
    assert (info.model, info.dtype, info.kv_dtype) == ("tiny-llama", "float32", "float32")
    assert (info.context_length, info.vocabulary_size) == (100, 97)
    # A block is 2 * 2 layers * 4 tokens * 2 heads * 8 values * 4 bytes.
    assert (info.block_size, info.num_blocks, info.num_cpu_blocks) == (4, 32, 10_000 // 1024)
    assert info.kv_cache_note == "32 blocks of 4 tokens (128) in float32, 0.0312 MiB: as told by --num-gpu-blocks"
    assert info.max_num_batched_tokens == 2048
    assert info.swap_ms_per_block > 0


async def test_a_stream_that_comes_while_the_model_loads_does_not_make_of_that_a_step_that_hangs():
    service, released = WorkerService(Observer(), hang_timeout_s=0.05), threading.Event()

    class Loading:
        def load(self, on_lost):
            assert released.wait(timeout=20)
            return GetInfoResponse()

    loading = asyncio.ensure_future(service.load(Loading()))
    async with serving(service) as channel:
        stream = WorkerServiceStub(channel).Execute()
        assert await refusal_of(stream, prompt(0)) == grpc.StatusCode.UNAVAILABLE
    if service._ending:
        await asyncio.wait(service._ending)
    released.set()
    await loading
    assert not service.device_lost.is_set()


@pytest.mark.parametrize("swap_bytes, num_cpu_blocks", [(None, 32), (0, 0), (1023, 0), (1 << 20, 1024)])
def test_the_swap_pool_is_as_told_and_by_default_as_large_as_the_cache(checkpoint, swap_bytes, num_cpu_blocks):
    info = load_worker(settings(checkpoint, swap_bytes=swap_bytes)).info
    assert info.num_cpu_blocks == num_cpu_blocks
    assert (info.swap_ms_per_block > 0) == (num_cpu_blocks > 0)


async def test_the_stream_answers_steps_in_order_and_takes_the_next_before_the_first_is_answered(worker):
    stub, _, epoch = worker
    alone = [tokens(await stub.ExecuteModel(prompt(epoch)))]
    alone += [tokens(await stub.ExecuteModel(decode(epoch, step_id))) for step_id in range(1, 6)]

    stream = stub.Execute()
    await stream.write(prompt(epoch, step_id=0))
    for step_id in range(1, 6):
        await stream.write(decode(epoch, step_id))
    await stream.done_writing()
    responses = [response async for response in stream]
    assert [response.step_id for response in responses] == list(range(6))
    assert {response.epoch for response in responses} == {epoch}
    assert [tokens(response) for response in responses] == alone


async def test_a_step_of_another_epoch_is_refused_and_does_not_run(worker):
    stub, _, epoch = worker
    assert await code_of(stub.ExecuteModel(prompt(epoch + 1))) == grpc.StatusCode.FAILED_PRECONDITION
    stream = stub.Execute()
    await stream.write(prompt(epoch))
    await stream.write(decode(epoch - 1, 1))
    assert len(tokens(await stream.read())) == 1
    assert await code_of(stream.read()) == grpc.StatusCode.FAILED_PRECONDITION


async def test_a_malformed_step_names_the_field_and_the_next_stream_works(worker):
    stub, _, epoch = worker
    bad = prompt(epoch)
    bad.block_tables = b"\x00"
    with pytest.raises(grpc.aio.AioRpcError, match="block_tables: 1 bytes are no column of int32"):
        await stub.ExecuteModel(bad)
    stream = stub.Execute()
    assert await refusal_of(stream, bad) == grpc.StatusCode.INVALID_ARGUMENT
    stream = stub.Execute()
    await stream.write(prompt(epoch))
    assert len(tokens(await stream.read())) == 1
    stream.cancel()


async def test_bytes_that_are_no_message_are_the_clients_mistake(worker):
    _, service, _ = worker
    async with serving(service) as channel:
        assert await code_of(channel.unary_unary(f"/{NAME}/ExecuteModel")(b"\xff")) == grpc.StatusCode.INVALID_ARGUMENT
        stream = channel.stream_stream(f"/{NAME}/Execute")()
        assert await refusal_of(stream, b"\xff") == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_step_that_explodes_is_named_and_leaves_the_worker_serving(worker, monkeypatch, caplog):
    stub, service, epoch = worker
    runner = service._executor._loaded.runner
    ran = []

    def launch(request, launch=runner.launch):
        ran.append(request.step_id)
        if request.step_id == 1:
            raise RuntimeError("boom")
        return launch(request)

    monkeypatch.setattr(runner, "launch", launch)
    stream = stub.Execute()
    for request in (prompt(epoch), decode(epoch, 1), decode(epoch, 2), decode(epoch, 3)):
        await stream.write(request)
    assert len(tokens(await stream.read())) == 1
    with pytest.raises(grpc.aio.AioRpcError, match="step 1 failed with RuntimeError") as failure:
        await stream.read()
    assert failure.value.code() == grpc.StatusCode.INTERNAL
    assert "boom" in caplog.text
    assert tokens(await stub.ExecuteModel(prompt(epoch, step_id=9, request_id=2)))
    assert ran == [0, 1, 9], "a step behind the one that failed has run"


async def test_a_client_that_leaves_takes_its_waiting_steps_with_it(checkpoint, monkeypatch):
    left, begun, released, ran = asyncio.Event(), asyncio.Event(), threading.Event(), []

    class Watched(WorkerService):
        async def Execute(self, requests, context):
            try:
                await super().Execute(requests, context)
            finally:
                left.set()

    service = Watched(Observer())
    await service.load(UniExecutor(settings(checkpoint)))
    runner, loop = service._executor._loaded.runner, asyncio.get_running_loop()

    def launch(request, launch=runner.launch):
        ran.append(request.step_id)
        loop.call_soon_threadsafe(begun.set)
        assert released.wait(timeout=20)
        return launch(request)

    monkeypatch.setattr(runner, "launch", launch)
    async with serving(service) as channel, asyncio.timeout(20):
        stub = WorkerServiceStub(channel)
        epoch = (await stub.GetInfo(GetInfoRequest())).epoch
        stream = stub.Execute()
        await stream.write(prompt(epoch, step_id=0))
        await stream.write(decode(epoch, 1))
        await begun.wait()
        stream.cancel()
        await left.wait()
        released.set()
        await stub.ExecuteModel(prompt(epoch, step_id=9, request_id=2))
    assert ran == [0, 9]


@contextlib.asynccontextmanager
async def holding_a_step(checkpoint, monkeypatch, **options):
    """A worker whose first step is on its way and does not end: stub, service, the stream, and what lets it go on."""
    service = WorkerService(Observer(), **options)
    await service.load(UniExecutor(settings(checkpoint)))
    runner, loop = service._executor._loaded.runner, asyncio.get_running_loop()
    begun, released = asyncio.Event(), threading.Event()

    def launch(request, launch=runner.launch):
        loop.call_soon_threadsafe(begun.set)
        assert released.wait(timeout=20)
        return launch(request)

    monkeypatch.setattr(runner, "launch", launch)
    async with serving(service) as channel, asyncio.timeout(20):
        stub = WorkerServiceStub(channel)
        stream = stub.Execute()
        await stream.write(prompt((await stub.GetInfo(GetInfoRequest())).epoch))
        await begun.wait()
        try:
            yield stub, service, stream, released
        finally:
            released.set()


async def test_a_worker_is_there_again_when_a_step_that_was_given_up_has_ended(checkpoint, monkeypatch):
    async with holding_a_step(checkpoint, monkeypatch) as (stub, service, stream, released):
        stream.cancel()
        while not service._ending:
            await asyncio.sleep(0)
        info = asyncio.ensure_future(stub.GetInfo(GetInfoRequest()).code())
        await stub.ExecuteModel(step(epoch=0)).code()  # comes behind it, and is answered
        assert not info.done()
        released.set()
        assert await info is grpc.StatusCode.OK
        assert not service.device_lost.is_set()


async def test_a_step_that_was_given_up_and_does_not_end_is_a_device_that_hangs(checkpoint, monkeypatch, caplog):
    async with holding_a_step(checkpoint, monkeypatch, hang_timeout_s=0.05) as (_, service, stream, _):
        stream.cancel()
        await service.device_lost.wait()
        assert "a step hangs" in caplog.text


async def test_a_worker_that_leaves_ends_streams_in_order_behind_the_step_that_runs(checkpoint, monkeypatch):
    async with holding_a_step(checkpoint, monkeypatch) as (stub, service, stream, released):
        idle = stub.Execute()
        while len(service._calls) < 2:
            await asyncio.sleep(0)
        await stub.ExecuteModel(step(epoch=0)).code()  # meanwhile the other one has begun to read
        service.leave()
        assert await idle.read() is grpc.aio.EOF
        assert await idle.code() is grpc.StatusCode.OK
        released.set()
        assert len(tokens(await stream.read())) == 1
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK


async def test_steps_on_another_stream_end_the_one_before_whose_blocks_they_overwrite(worker, caplog):
    stub, _, epoch = worker
    first, second = stub.Execute(timeout=20), stub.Execute(timeout=20)
    await first.write(prompt(epoch))
    assert len(tokens(await first.read())) == 1
    await second.write(prompt(epoch))
    assert len(tokens(await second.read())) == 1
    assert await first.read() is grpc.aio.EOF
    assert await first.code() is grpc.StatusCode.OK
    await second.write(decode(epoch, 1))
    assert len(tokens(await second.read())) == 1
    assert "steps come on another stream" in caplog.text
    second.cancel()


class SlowDevice:
    """A runner's steps on a device that comes to the end of one when it is told to."""

    def __init__(self, runner, monkeypatch):
        self._loop = asyncio.get_running_loop()
        self._launch = runner.launch
        self._ended = [threading.Event() for _ in range(4)]
        self.launched = [asyncio.Event() for _ in range(4)]
        self.asked = [asyncio.Event() for _ in range(4)]  # whether it has ended; from then on it is waited for in order
        self.failing, self.waited_for = set(), []
        monkeypatch.setattr(runner, "launch", self.launch)

    def launch(self, request):
        self._loop.call_soon_threadsafe(self.launched[request.step_id].set)
        return StepOnSlowDevice(self, request.step_id, self._launch(request))

    def wait(self, step_id):
        assert self._ended[step_id].wait(timeout=20)
        self.waited_for.append(step_id)
        if step_id in self.failing:
            raise RuntimeError("the device says no")

    def has_ended(self, step_id):
        has_ended = self._ended[step_id].is_set()
        self._loop.call_soon_threadsafe(self.asked[step_id].set)
        return has_ended

    def end(self, step_id):
        self._ended[step_id].set()


class StepOnSlowDevice:
    def __init__(self, device, step_id, step):
        self._device, self._step_id, self._step = device, step_id, step

    @property
    def is_finished(self):
        return self._device.has_ended(self._step_id)

    def result(self):
        self._device.wait(self._step_id)
        return self._step.result()


async def test_a_step_is_launched_while_the_device_is_at_the_one_before_and_a_third_is_not(worker, monkeypatch):
    stub, service, epoch = worker
    device = SlowDevice(service._executor._loaded.runner, monkeypatch)
    stream = stub.Execute()
    async with asyncio.timeout(20):
        for request in (prompt(epoch), decode(epoch, 1), decode(epoch, 2)):
            await stream.write(request)
        await device.launched[1].wait()
        # The device may well end the second first, as far as the worker can tell; answers keep their order.
        device.end(1)
        answer = asyncio.ensure_future(stream.read())
        assert not device.launched[2].is_set()
        device.end(0)
        assert (await answer).step_id == 0
        await device.launched[2].wait()
        device.end(2)
        assert [(await stream.read()).step_id for _ in range(2)] == [1, 2]
    stream.cancel()


async def test_a_worker_is_there_again_when_the_device_is_at_no_step_of_a_stream_that_was_left(worker, monkeypatch):
    stub, service, epoch = worker
    device = SlowDevice(service._executor._loaded.runner, monkeypatch)
    stream = stub.Execute()
    async with asyncio.timeout(20):
        await stream.write(prompt(epoch))
        await stream.write(decode(epoch, 1))
        await device.asked[1].wait()
        stream.cancel()
        while not service._ending:
            await asyncio.sleep(0)
        device.end(0)
        device.end(1)
        await stub.GetInfo(GetInfoRequest())
        assert device.waited_for == [0, 1]


async def test_a_step_that_fails_on_the_device_takes_those_behind_it_along(worker, monkeypatch, caplog):
    stub, service, epoch = worker
    device = SlowDevice(service._executor._loaded.runner, monkeypatch)
    device.failing = {0}
    stream = stub.Execute()
    async with asyncio.timeout(20):
        await stream.write(prompt(epoch))
        await stream.write(decode(epoch, 1))
        await device.launched[1].wait()
        device.end(0)
        device.end(1)
        with pytest.raises(grpc.aio.AioRpcError, match="step 0 failed with RuntimeError"):
            await stream.read()
        device.end(3)
        response = await stub.ExecuteModel(prompt(epoch, step_id=3, request_id=2))
    assert len(tokens(response)) == 1
    gc.collect()  # when asyncio would tell of errors that nobody took
    assert "the device says no" in caplog.text
    assert "never retrieved" not in caplog.text


async def test_a_device_that_has_failed_for_good_is_told_of(worker, monkeypatch):
    stub, service, epoch = worker
    runner = service._executor._loaded.runner

    def fail(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(runner, "launch", fail)
    assert await code_of(stub.ExecuteModel(prompt(epoch))) == grpc.StatusCode.INTERNAL
    assert not service.device_lost.is_set()
    monkeypatch.setattr(runner._streams, "mark", fail)
    assert await code_of(stub.ExecuteModel(prompt(epoch))) == grpc.StatusCode.INTERNAL
    async with asyncio.timeout(5):
        await service.device_lost.wait()


async def test_the_process_ends_with_1_when_the_device_has_failed(checkpoint, monkeypatch):
    from worker import process

    class Failing(WorkerService):
        async def load(self, load):
            await super().load(load)
            self.device_lost.set()

    monkeypatch.setattr(process, "WorkerService", Failing)
    async with asyncio.timeout(60):
        assert await process.serve(settings(checkpoint, listen="127.0.0.1:0"), asyncio.Event()) == 1


async def test_a_step_that_is_refused_waits_until_the_one_before_is_answered(worker, monkeypatch):
    stub, service, epoch = worker
    device = SlowDevice(service._executor._loaded.runner, monkeypatch)
    bad = decode(epoch, 1)
    bad.block_tables = b""
    stream = stub.Execute()
    async with asyncio.timeout(20):
        await stream.write(prompt(epoch))
        await stream.write(bad)
        await device.launched[1].wait()
        device.end(0)
        assert (await stream.read()).step_id == 0
        assert await code_of(stream.read()) == grpc.StatusCode.INVALID_ARGUMENT


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "worker", *map(str, arguments)], stderr=subprocess.PIPE, text=True, env={"PATH": ""}
    )


@pytest.mark.parametrize(
    ("pages", "told", "expected"),
    [
        ("always [madvise] never", {}, "glibc.malloc.hugetlb=1"),
        ("[always] madvise never", {}, None),
        ("always madvise [never]", {}, None),
        (None, {}, None),
        ("always [madvise] never", {"GLIBC_TUNABLES": "glibc.malloc.check=0"}, "glibc.malloc.check=0"),
    ],
)
def test_a_worker_begins_again_once_where_malloc_can_ask_for_huge_pages(tmp_path, pages, told, expected):
    (tmp_path / "asks.py").write_text(
        "import os, pathlib, worker.__main__ as main\n"
        f"main._HUGE_PAGES = pathlib.Path({str(tmp_path / 'enabled')!r})\n"
        "print('begins', flush=True)\n"
        "main.ask_for_huge_pages()\n"
        "print(os.environ.get('GLIBC_TUNABLES'))\n"
    )
    if pages is not None:
        (tmp_path / "enabled").write_text(f"{pages}\n")
    begins_again = pages is not None and "[madvise]" in pages and not told
    assert lines_of(tmp_path / "asks.py", told) == ["begins"] * (1 + begins_again) + [str(expected)]


def test_a_worker_that_glibc_does_not_let_ask_for_huge_pages_goes_without(tmp_path):
    """As where a program has more rights than who starts it: the variable is gone before Python begins."""
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    (tmp_path / "asks.py").write_text(
        "import os, pathlib, worker.__main__ as main\n"
        f"main._HUGE_PAGES = pathlib.Path({str(tmp_path / 'enabled')!r})\n"
        "os.environ.pop('GLIBC_TUNABLES', None)\n"
        "print('begins', flush=True)\n"
        "main.ask_for_huge_pages()\n"
    )
    assert lines_of(tmp_path / "asks.py") == ["begins", "begins"]


def test_a_worker_that_can_not_see_who_gets_huge_pages_goes_without(tmp_path):
    (tmp_path / "asks.py").write_text(
        "import pathlib, worker.__main__ as main\n"
        f"main._HUGE_PAGES = pathlib.Path({str(tmp_path)!r})\n"  # a folder
        "main.ask_for_huge_pages()\n"
        "print('goes on')\n"
    )
    assert lines_of(tmp_path / "asks.py") == ["goes on"]


def lines_of(program, variables=()):
    """What a Python program says that imports us."""
    variables = {"PYTHONPATH": str(Path(__file__).parents[1]), **dict(variables)}
    command = [sys.executable, "-P", str(program)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_process_spins_briefly_and_loads_nothing_heavy_beside_torch():
    code = (
        "import os, sys, worker.__main__, worker.process;"
        "print(os.environ['GOMP_SPINCOUNT'], {'torch', 'transformers', 'gguf', 'tokenizers'} & sys.modules.keys())"
    )
    ended = subprocess.run([sys.executable, "-c", code], env={}, capture_output=True, text=True, check=True)
    assert ended.stdout == "2000 {'torch'}\n"


async def test_the_process_serves_and_ends_with_0_on_sigterm(checkpoint, tmp_path):
    address = f"unix:{tmp_path}/worker.sock"
    process = start("--model", checkpoint, "--listen", address, "--num-threads", 1, "--drain-grace-s", 0)
    try:
        async with asyncio.timeout(60), dial(address) as channel:
            await wait_for_serving(channel, NAME)
            info = await WorkerServiceStub(channel).GetInfo(GetInfoRequest())
            assert (info.model, info.context_length) == ("tiny-llama", 128)
            assert info.num_blocks * info.block_size >= 128
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0, log
    for line in ("listening", "weights loaded", "KV cache sized", "warmed up", "serving", "stopping"):
        assert line in log


def test_a_model_that_can_not_be_loaded_ends_the_process_with_one_clear_line(tmp_path):
    process = start("--model", tmp_path, "--listen", "127.0.0.1:0")
    _, log = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"cannot load the model: {tmp_path} is no Hugging Face checkpoint" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    "line, status, complaint",
    [
        ("", 0, ""),
        ("[]\n", 2, "python -m worker: error: --model: Field required\n"),
        (json.dumps(["--model", "/none", "--listen", "127.0.0.1:0"]) + "\n", 1, "cannot load the model"),
    ],
    ids=["nothing", "wrong options", "right ones"],
)
def test_one_that_began_early_ends_without_a_word_if_it_is_told_nothing_and_else_is_what_it_is_told(
    line, status, complaint
):
    command = [sys.executable, "-m", "worker", "-"]
    ended = subprocess.run(command, input=line, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, bool(ended.stderr)) == (status, bool(complaint))
    assert complaint in ended.stderr


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ([], "--model: Field required"),
        (["--model", "x", "--modle", "y"], "modle"),
        (["--model", "x", "--block-size", "0"], "--block-size"),
        (["--model", "x", "--kv-cache-bytes", "much"], "--kv-cache-bytes"),
        (["--model", "x", "--dtype", "int8"], "--dtype"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as stop:
        WorkerSettings.parse("worker", arguments)
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


def test_decodes_are_recorded_on_a_gpu_only_if_they_are_to_be_and_can_be(checkpoint):
    import torch
    from real_worker import load_weights

    from kernels.choice import torch_reference
    from worker import loading

    assert WorkerSettings.parse("worker", ["--model", "x"]).cuda_graphs
    assert not WorkerSettings.parse("worker", ["--model", "x", "--no-cuda-graphs"]).cuda_graphs
    model = load_weights(checkpoint)
    model.operations = replace(torch_reference(), recordable=True)
    assert loading._recorder(settings(checkpoint), model, torch.device("cpu")) is None
    assert loading._recorder(settings(checkpoint, cuda_graphs=False), model, torch.device("cuda")) is None
    model.operations = torch_reference()
    assert loading._recorder(settings(checkpoint), model, torch.device("cuda")) is None


def test_sizes_are_read_with_their_units():
    parsed = WorkerSettings.parse("worker", ["--model", "x", "--kv-cache-bytes", "512MiB", "--swap-bytes", "1GiB"])
    assert (parsed.kv_cache_bytes, parsed.swap_bytes) == (512 << 20, 1 << 30)


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"max_model_len": 4096}, "--max-model-len is 4096, but the model was made for 128"),
        ({"device": "cuda"}, "torch sees no CUDA device"),
    ],
)
def test_settings_that_do_not_fit_the_model_or_the_machine_are_refused(checkpoint, changes, complaint):
    import torch

    from worker.checkpoint import ModelError

    if torch.cuda.is_available() and "device" in changes:
        pytest.skip("there is a CUDA device")
    with pytest.raises(ModelError, match=complaint):
        load_worker(settings(checkpoint, **changes))
