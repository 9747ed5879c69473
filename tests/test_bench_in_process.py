"""The real core and the real runner face to face: two steps in flight, on a late device, give what one gives."""

from array import array

import pytest
import torch
from late_streams import LateStreams
from real_worker import load_weights
from worker_fakes import tiny_checkpoint

from bench.in_process import FaceToFace, make_runner
from protos.sampling_pb2 import Sampling
from scheduler.beam import BeamParams
from scheduler.block_manager import BlockManager
from scheduler.policy import Policy, PreemptionMode
from scheduler.scheduler import Scheduler
from worker.streams import HostStreams

AMPLE = 400
SAMPLINGS = (
    {"temperature": 0},
    {"temperature": 1, "seed": 3},
    {"temperature": 1, "seed": 3, "top_p": 0.9, "top_k": 30},
    {"temperature": 1, "seed": 4, "repetition_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 0, "frequency_penalty": 1.0},
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return load_weights(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def outputs(weights, *, in_flight, streams, num_blocks=AMPLE, num_swap_blocks=0, mode=PreemptionMode.AUTO):
    """The outputs of twenty requests of all kinds, and how often one of them was preempted."""
    policy = Policy(
        16,
        max_num_seqs=16,
        max_waiting_requests=100,
        watermark=0.0,
        max_steps_in_flight=in_flight,
        preemption_mode=mode,
    )
    core = Scheduler(policy, BlockManager(num_blocks, 4, num_swap_blocks))
    groups = []
    for number in range(20):
        prompt = array("i", [(7 * number + 3 * place) % 97 for place in range(1 + number % 7 * 3)])
        sampling = {"top_p": 1.0} | SAMPLINGS[number % len(SAMPLINGS)]
        group = core.submit(
            request_id=str(number),
            prompt_token_ids=prompt,
            n=1 + number % 3,
            max_tokens=20,
            stop_token_ids=[5, 6, 7, 8],
            beam=BeamParams(2) if number % 10 == 0 else None,
            sampling=Sampling(num_prompt_tokens=len(prompt), **sampling),
            now=0.0,
        )
        groups.append(group)
    runner, _ = make_runner(
        weights,
        num_blocks=num_blocks,
        num_cpu_blocks=num_swap_blocks,
        block_size=4,
        max_num_batched_tokens=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
        streams=streams,
    )
    FaceToFace(core, runner).run()
    found = [[sequence.output_token_ids.tolist() for sequence in group.sequences] for group in groups]
    return found, core.num_preemptions


@pytest.fixture(scope="module")
def expected(weights):
    found, num_preemptions = outputs(weights, in_flight=1, streams=HostStreams())
    assert num_preemptions == 0
    assert any(len(tokens) == 20 for group in found for tokens in group)
    assert any(len(tokens) < 20 for group in found for tokens in group)
    return found


def test_two_steps_in_flight_give_the_outputs_of_one(weights, expected):
    assert outputs(weights, in_flight=2, streams=LateStreams())[0] == expected


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_few_blocks_change_nothing_even_if_swaps_are_late(weights, expected, mode, in_flight):
    found, num_preemptions = outputs(
        weights, in_flight=in_flight, streams=LateStreams(), num_blocks=24, num_swap_blocks=100, mode=mode
    )
    assert num_preemptions > 0
    assert found == expected
