"""What a person with grpcurl and no .proto file can do: find everything out, call it all, read the errors."""

import contextlib
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from cluster import Cluster, cluster

from docs import api
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub

TOOL = Path(sys.executable).parent / "grpcurl"
EXAMPLES = {name: commands[0] for file in api.read() for name, commands in api.examples(file).items()}
# Who asks for a watch until a time has the status of that time: 64, and DEADLINE_EXCEEDED.
EXIT_CODES = {"WatchState": 68}
ANSWERS = {
    "Generate": '"finish_reason": "FINISH_REASON_LENGTH"',
    "Complete": '"completion_tokens": 8',
    "Tokenize": '"token_ids"',
    "Detokenize": '"text": "Hi"',
    "GetModel": '"context_length": 8192',
    "GetState": '"serving": true',
    "WatchState": '"serving": true',
    "ExplainRequest": '"status": "REQUEST_STATUS_RUNNING"',
}


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster(step_ms=5) as running:
        yield running


def grpcurl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(TOOL), "-plaintext", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def printed(*arguments: str) -> str:
    run = grpcurl(*arguments)
    assert run.returncode == 0, run.stderr
    return run.stdout


@contextlib.contextmanager
def live_request(target: str, request_id: str) -> Iterator[None]:
    """A request that is being answered."""
    with grpc.insecure_channel(target) as channel:
        request = pb.GenerateRequest(request_id=request_id, text="p", stop=pb.StopConditions(max_tokens=8000))
        call = GenerationServiceStub(channel).Generate(request)
        next(call)
        yield
        call.cancel()


def test_list_shows_our_services_and_the_well_known_ones(running):
    assert printed(running.target, "list").split() == [
        "grpc.channelz.v1.Channelz",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "pagewire.v1.GenerationService",
        "pagewire.v1.IntrospectionService",
        "xds.service.orca.v3.OpenRcaService",
    ]


def test_describe_shows_services_messages_and_their_http_paths(running):
    described = printed(running.target, "describe")
    assert "rpc Generate ( .pagewire.v1.GenerateRequest ) returns ( stream .pagewire.v1.GenerateResponse )" in described
    assert 'post:"/v1/generate"' in described.replace(" ", "")
    assert ".pagewire.v1.SamplingParams sampling = 6;" in printed(
        running.target, "describe", "pagewire.v1.GenerateRequest"
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_each_method_in_the_documentation_works(running, name):
    command = EXAMPLES[name].replace("127.0.0.1:50051", running.target).replace("\\\n", " ")
    with live_request(running.target, "report-17"):
        run = grpcurl(*shlex.split(command)[2:])
    assert run.returncode == EXIT_CODES.get(name, 0), run.stderr
    assert ANSWERS[name] in run.stdout


def test_a_stream_is_printed_message_by_message(running):
    command = [str(TOOL), "-plaintext", "-d", '{"text": "p", "stop": {"max_tokens": 8000}}']
    process = subprocess.Popen(
        [*command, running.target, "pagewire.v1.GenerationService/Generate"], stdout=subprocess.PIPE, text=True
    )
    guard = threading.Timer(60, process.kill)
    guard.start()
    try:
        assert process.stdout is not None
        assert any('"text":' in line for line in process.stdout), "the first is read while the rest is still computed"
        assert running.state().num_running == 1
    finally:
        process.kill()
        process.communicate()
        guard.cancel()


def test_an_error_names_every_field_at_fault_and_its_reason(running):
    bad = '{"text": "x", "sampling": {"top_p": -1, "temperature": -1}}'
    run = grpcurl("-d", bad, running.target, "pagewire.v1.GenerationService/Generate")
    assert run.returncode == 64 + grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "Code: InvalidArgument" in run.stderr
    details = run.stderr.partition("Details:")[2]
    for word in ("google.rpc.ErrorInfo", '"INVALID_REQUEST"', '"sampling.top_p"', '"sampling.temperature"'):
        assert word in details


def test_health_can_be_asked_for_by_name(running):
    health = ("-d", '{"service": "pagewire.v1.GenerationService"}', running.target, "grpc.health.v1.Health/Check")
    assert '"status": "SERVING"' in printed(*health)
