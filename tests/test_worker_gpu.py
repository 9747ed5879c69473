"""Steps on a real GPU: a launch waits for nothing, recorded or not, and answers are those of a worker on the CPU."""

import pytest
import torch
from models_fakes import assert_alike, ours
from worker_fakes import GREEDY, Row, step, tiny_checkpoint, tiny_runner, tokens

from protos.sampling_pb2 import Sampling
from worker.decode_graphs import CudaRecorder
from worker.streams import CudaStreams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: no step was given to one"),
]

CUDA = torch.device("cuda")
PROMPT = [5, 17, 3, 88, 42, 9, 61, 2, 30, 11, 7]
# Of the GPU's clock: about a second.
BUSY_CYCLES = 2_000_000_000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=[False, True], ids=["launched", "recorded"])
def runner(request, checkpoint):
    runner = tiny_runner(checkpoint, device=CUDA)
    if request.param:
        runner.record_decodes(CudaRecorder(CUDA), most_rows=4)
    return runner


SAMPLINGS = {
    "greedy": GREEDY,
    "drawn": Sampling(temperature=1, top_p=1, seed=3),
    "filtered": Sampling(temperature=1, top_p=0.9, top_k=20, min_p=0.01, typical_p=0.9, seed=3),
    "told": Sampling(temperature=0, top_p=1, num_top_logprobs=3),
    "biased": Sampling(temperature=0, top_p=1, stop_token_ids=[4], min_tokens=40, num_prompt_tokens=len(PROMPT)),
    "searched": Sampling(temperature=0, top_p=1, num_candidates=4),
}


def requests(sampling):
    """A prompt, decodes of it in company, and blocks that are copied and swapped meanwhile."""
    next_token = 30 if sampling.num_candidates else -1
    company = [Row(2, [7], [10], computed=number) for number in range(4)]
    return [
        step(Row(1, PROMPT, [0, 1, 2]), Row(2, [3, 4, 5], [11]), new={1: sampling, 2: GREEDY}, samples=[(0, 0)]),
        step(Row(1, [next_token], [0, 1, 2], computed=11), company[0]),
        step(Row(1, [next_token], [0, 1, 2, 3], computed=12), company[1], swap_out=[20, 1], copy=[11, 12]),
        step(Row(1, [next_token], [0, 1, 2, 3], computed=13), company[2], swap_out=[0, 2, 1, 3], swap_in=[1, 21]),
        step(Row(1, [next_token], [30, 31, 2, 3], computed=14), company[3], swap_in=[2, 30, 3, 31]),
    ]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_a_launch_waits_for_nothing_that_the_device_has_to_do(runner, sampling):
    expected = [runner.execute(request) for request in requests(sampling)]  # compiles
    for is_warm in (False, True):  # to get memory for so many steps at once may mean to wait, the first time
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)
        busy = torch.cuda.Event()
        busy.record()
        in_flight = [runner.launch(request) for request in requests(sampling)]
        assert not (is_warm and busy.query()), "the host has waited for the device"
        assert not (is_warm and any(step.is_finished for step in in_flight))
        torch.cuda.synchronize()
    found = [step.result() for step in in_flight]
    assert [tokens(response) for response in found] == [tokens(response) for response in expected]
    assert [response.top_logprobs for response in found] == [response.top_logprobs for response in expected]
    assert [response.candidate_token_ids for response in found] == [row.candidate_token_ids for row in expected]


def test_answers_are_those_of_a_worker_on_the_cpu(runner, checkpoint):
    assert_alike(ours(runner), ours(tiny_runner(checkpoint)), tolerance=1e-3)


def test_the_parts_of_a_step_take_time_on_the_device(runner):
    timings = runner.execute(requests(GREEDY)[0]).timings
    assert timings.forward_ms > 0
    assert timings.sample_ms > 0
    assert timings.prepare_ms > timings.swap_ms == 0
    timings = runner.execute(step(swap_out=[0, 1, 1, 2])).timings
    assert timings.prepare_ms >= timings.swap_ms > 0


def test_what_runs_beside_the_steps_sees_what_was_before_and_is_waited_for_where_asked():
    streams = CudaStreams(CUDA)
    written, copied = torch.zeros(2, 1 << 20, device=CUDA)

    def work():
        torch.cuda._sleep(BUSY_CYCLES // 20)
        copied.copy_(written)

    torch.cuda._sleep(BUSY_CYCLES // 20)
    written.fill_(1)
    begun, ended = streams.beside(work)
    assert not ended.is_passed
    streams.wait_for(ended)
    assert copied.sum().item() == len(copied)
    assert ended.is_passed
    assert ended.ms_since(begun) > 5
