"""The worker's gRPC service in this process on a tiny checkpoint, and the process itself from start to SIGTERM."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading

import grpc
import pytest
from worker_fakes import GREEDY, Row, step, tiny_checkpoint, tokens

from protos.rpc import Server, Service, dial, wait_for_serving
from protos.worker_pb2 import DESCRIPTOR, GetInfoRequest
from protos.worker_pb2_grpc import WorkerServiceStub, add_WorkerServiceServicer_to_server
from worker.config import WorkerSettings
from worker.loading import load_worker
from worker.server import WorkerService

NAME = DESCRIPTOR.services_by_name["WorkerService"].full_name
PROMPT = [5, 17, 3, 88, 42]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama")


def settings(checkpoint, **changes):
    return WorkerSettings(model=str(checkpoint), block_size=4, num_blocks=32, num_threads=1, **changes)


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
    service = WorkerService()
    await service.load(lambda: load_worker(settings(checkpoint)))
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


async def test_info_is_unavailable_until_the_model_is_loaded_and_then_says_what_was(checkpoint):
    service = WorkerService()
    async with serving(service) as channel:
        stub = WorkerServiceStub(channel)
        assert await code_of(stub.GetInfo(GetInfoRequest())) == grpc.StatusCode.UNAVAILABLE
        assert await code_of(stub.ExecuteModel(prompt(0))) == grpc.StatusCode.UNAVAILABLE
        stream = stub.Execute()
        await stream.write(prompt(0))
        assert await code_of(stream.read()) == grpc.StatusCode.UNAVAILABLE
        await service.load(lambda: load_worker(settings(checkpoint, max_model_len=100, swap_bytes=10_000)))
        info = await stub.GetInfo(GetInfoRequest())
    assert 0 < info.epoch < 2**63
    assert (info.model, info.dtype, info.kv_dtype) == ("tiny-llama", "float32", "float32")
    assert (info.context_length, info.vocabulary_size) == (100, 97)
    # A block is 2 * 2 layers * 4 tokens * 2 heads * 8 values * 4 bytes.
    assert (info.block_size, info.num_blocks, info.num_cpu_blocks) == (4, 32, 10_000 // 1024)
    assert info.kv_cache_note == "32 blocks of 4 tokens (128) in 0.00 GiB: as told by --num-blocks"
    assert info.max_num_batched_tokens == 2048
    assert info.swap_ms_per_block > 0


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
    await stream.write(bad)
    assert await code_of(stream.read()) == grpc.StatusCode.INVALID_ARGUMENT
    stream = stub.Execute()
    await stream.write(prompt(epoch))
    assert len(tokens(await stream.read())) == 1
    stream.cancel()


async def test_bytes_that_are_no_message_are_the_clients_mistake(worker):
    _, service, _ = worker
    async with serving(service) as channel:
        assert await code_of(channel.unary_unary(f"/{NAME}/ExecuteModel")(b"\xff")) == grpc.StatusCode.INVALID_ARGUMENT
        stream = channel.stream_stream(f"/{NAME}/Execute")()
        await stream.write(b"\xff")
        assert await code_of(stream.read()) == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_step_that_explodes_is_named_and_leaves_the_worker_serving(worker, monkeypatch, caplog):
    stub, service, epoch = worker
    runner = service._loaded.runner
    ran = []

    def execute(request, execute=runner.execute):
        ran.append(request.step_id)
        if request.step_id == 1:
            raise RuntimeError("boom")
        return execute(request)

    monkeypatch.setattr(runner, "execute", execute)
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

    service = Watched()
    await service.load(lambda: load_worker(settings(checkpoint)))
    runner, loop = service._loaded.runner, asyncio.get_running_loop()

    def execute(request, execute=runner.execute):
        ran.append(request.step_id)
        loop.call_soon_threadsafe(begun.set)
        assert released.wait(timeout=20)
        return execute(request)

    monkeypatch.setattr(runner, "execute", execute)
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


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "worker", *map(str, arguments)], stderr=subprocess.PIPE, text=True, env={"PATH": ""}
    )


def test_the_process_spins_briefly_and_loads_nothing_heavy_beside_torch():
    code = (
        "import os, sys, worker.__main__;"
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
            assert (info.model, info.num_blocks) == ("tiny-llama", 64 * 128 // 16)
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
