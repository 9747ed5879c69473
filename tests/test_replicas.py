"""`pagewire up --replicas`: their options, their shares of the machine, and that they stand in for each other."""

import asyncio
import os
import re
import signal

import grpc
import pytest
from fakes import VOCABULARY_SIZE, write_tokenizer
from launched import launched_with, wait_for
from worker_fakes import tiny_checkpoint

from pagewire import shares, state
from pagewire.cluster import LaunchError, stages
from pagewire.launch import LaunchOptions, Setting, services, shared_settings
from pagewire.shares import Share
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1 import introspection_pb2
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub
from protos.pagewire.v1.introspection_pb2_grpc import IntrospectionServiceStub

# Their shares of the machine


@pytest.mark.parametrize(
    "num_things, num_parts, expected",
    [
        (4, 2, [(0, 1), (2, 3)]),
        (5, 2, [(0, 1), (2, 3, 4)]),
        (3, 3, [(0,), (1,), (2,)]),
        (2, 5, [(0,), (1,), (0,), (1,), (0,)]),
        (0, 2, [(), ()]),
    ],
)
def test_things_are_shared_out_evenly_and_in_turn_if_there_are_too_few(num_things, num_parts, expected):
    assert shares.parts(range(num_things), num_parts) == expected


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Sockets 0 and 1 of two cores with two hardware threads each, the second ones numbered from 4; and two GPUs."""
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu % 2}\n")
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    for name in ("nvidia0", "nvidia3", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr(shares, "_CPUS", tmp_path)
    monkeypatch.setattr(shares, "_DEVICES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_workers_share_no_core_and_if_possible_no_socket(machine):
    assert [share.cores for share in shares.shares(2)] == [(0, 4, 2, 6), (1, 5, 3, 7)]
    assert [share.cores for share in shares.shares(4)] == [(0, 4), (2, 6), (1, 5), (3, 7)]


def test_each_worker_sees_gpus_of_its_own(machine, monkeypatch):
    assert [share.environment for share in shares.shares(2)] == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b,GPU-c")
    assert [share.gpus for share in shares.shares(2)] == [("GPU-a",), ("GPU-b", "GPU-c")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [share.environment for share in shares.shares(2)] == [{}, {}], "none for any of them, as for the launcher"


def test_a_single_worker_gets_what_the_launcher_has(machine):
    assert [share.environment for share in shares.shares(1)] == [{}]
    assert shares.shares(1) == [Share()]


# Their options


def told(options: LaunchOptions) -> dict[str, str]:
    """The command lines of all processes by name, without `python -P`."""
    return {service.name: " ".join(service.command[2:]) for service in services(options, "/d")}


def test_each_scheduler_has_a_worker_and_routers_know_all_schedulers():
    options = LaunchOptions("/m", port=7000, replicas=2)
    assert told(options) == {
        "worker-1": "-m worker --listen unix:/d/worker-1.sock --model /m --memory-share=0.5000"
        " --log-name=worker-1 --drain-grace-s=0",
        "worker-2": "-m worker --listen unix:/d/worker-2.sock --model /m --memory-share=0.5000"
        " --log-name=worker-2 --drain-grace-s=0",
        "scheduler-1": "-m scheduler --listen unix:/d/scheduler-1.sock --worker unix:/d/worker-1.sock"
        " --log-name=scheduler-1 --drain-grace-s=0",
        "scheduler-2": "-m scheduler --listen unix:/d/scheduler-2.sock --worker unix:/d/worker-2.sock"
        " --log-name=scheduler-2 --drain-grace-s=0",
        "router": "-m router --listen 127.0.0.1:7000"
        " --scheduler unix:/d/scheduler-1.sock,unix:/d/scheduler-2.sock --model /m",
    }
    assert [len(stage) for stage in stages(services(options, "/d"))] == [2, 2, 1], "those of a kind stop together"


def test_options_for_ranks_go_to_every_worker_and_to_no_other_process():
    ranks = shared_settings(executor="mp", tensor_parallel_size=2, pipeline_parallel_size=3)
    lines = told(LaunchOptions("/m", replicas=2, routers=2, settings=ranks))
    words = "--executor=mp --tensor-parallel-size=2 --pipeline-parallel-size=3"
    assert [name for name, line in lines.items() if words in line] == ["worker-1", "worker-2"]
    assert not [name for name, line in lines.items() if "parallel" in line and "worker-" not in name]


def test_replicas_that_cannot_share_a_port_or_a_file_have_one_each():
    texts = ("worker.metrics-listen=[::1]:9093", "scheduler.record=/r")
    lines = told(LaunchOptions("/m", replicas=2, settings=tuple(map(Setting.parse, texts))))
    assert [line.rpartition("=")[2] for line in lines.values()][:4] == ["[::1]:9093", "[::1]:9094", "/r-1", "/r-2"]
    with pytest.raises(LaunchError, match=r'worker.metrics-listen: 2 workers cannot share nine; write "host:port"'):
        LaunchOptions("/m", replicas=2, settings=(Setting.parse("worker.metrics-listen=nine"),))


# Their behaviour

NUM_TOKENS = 900
PROMPTS = [f"prompt {number}" for number in range(4)]  # no full block: each goes where the fewest wait


def requests() -> list[pb.GenerateRequest]:
    stop = pb.StopConditions(max_tokens=NUM_TOKENS, ignore_eos=True)
    output = pb.OutputOptions(token_ids=True)
    sampling = pb.SamplingParams(temperature=1, seed=3)
    return [pb.GenerateRequest(text=text, sampling=sampling, stop=stop, output=output) for text in PROMPTS]


async def tokens_of(stub: GenerationServiceStub, request: pb.GenerateRequest) -> list[int]:
    return [
        id_
        async for message in stub.Generate(request, timeout=60)
        for output in message.outputs
        for id_ in output.token_ids
    ]


async def num_running(channel: grpc.aio.Channel) -> dict[str, int]:
    """Sequences that run at each scheduler, by the last part of its address."""
    answer = await IntrospectionServiceStub(channel).GetState(introspection_pb2.GetStateRequest(), timeout=10)
    return {row.address.rpartition("/")[2]: row.state.num_running for row in answer.schedulers}


@pytest.mark.slow
async def test_no_stream_breaks_when_a_scheduler_and_a_worker_of_two_replicas_die(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    model = tiny_checkpoint(tmp_path / "model", vocab_size=VOCABULARY_SIZE, max_position_embeddings=2048)
    settings = ("--set", "worker.dtype=float32", "--set", "worker.num-gpu-blocks=512")
    with launched_with(write_tokenizer(model), "--replicas", "2", *settings) as (process, running):
        pids = running.service_pids
        cores = [os.sched_getaffinity(pids[name]) for name in ("worker-1", "worker-2")]
        assert cores == [set(share.cores) for share in shares.shares(2)]
        async with grpc.aio.insecure_channel(running.target) as channel:
            stub = GenerationServiceStub(channel)
            expected = await asyncio.gather(*(tokens_of(stub, request) for request in requests()))
            streams = [asyncio.create_task(tokens_of(stub, request)) for request in requests()]
            while (now := await num_running(channel)) != {"scheduler-1.sock": 2, "scheduler-2.sock": 2}:
                assert not all(stream.done() for stream in streams), now
            os.kill(pids["scheduler-1"], signal.SIGKILL)
            while (await num_running(channel))["scheduler-2.sock"] < len(streams):
                assert not any(stream.done() for stream in streams), "they continue at the other one"
            os.kill(pids["worker-2"], signal.SIGKILL)
            assert await asyncio.gather(*streams) == expected
        now = wait_for(lambda: (found := state.load(running.port).service_pids).keys() == pids.keys() and found)
        assert {name for name in pids if pids[name] != now[name]} == {"scheduler-1", "worker-2"}
        process.send_signal(signal.SIGINT)
        output, _ = await asyncio.to_thread(process.communicate, timeout=30)
    assert process.returncode == 0, output
    assert [name for name in pids if not re.search(rf"^\S+ INFO +{name} ", output, re.MULTILINE)] == [], "all logged"
