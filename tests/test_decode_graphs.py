"""Decodes that are recorded and replayed: which steps are, how they are padded, and that nothing comes out different.

The Triton kernels do the work, since they alone take padding; a recorder that does everything again stands for CUDA's.
"""

from dataclasses import replace

import pytest
import torch
from triton_device import ON_GPU, never_waits
from worker_fakes import GREEDY, Row, candidates, step, tiny_checkpoint, tokens

from bench.in_process import make_runner
from kernels.choice import torch_reference, triton_kernels
from protos.sampling_pb2 import Sampling
from worker.checkpoint import read_config
from worker.decode_graphs import CudaRecorder, DecodeGraphs, ladder
from worker.models import registry

# On a GPU these are tests of CUDA's graphs.
pytestmark = [pytest.mark.gpu] if ON_GPU else []

WHOLE = Sampling(temperature=0, top_p=1, num_candidates=97)
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BLOCK_SIZE = 4


class FakeRecorder:
    """Does everything again into the tensor of the first time.

    Attributes:
        num_replays: of all that was recorded.
    """

    def __init__(self):
        self.num_replays = 0

    def __call__(self, run):
        result = run()

        def replay():
            self.num_replays += 1
            return result.copy_(run())

        return replay


def test_the_ladder_has_small_steps_for_small_batches():
    assert ladder(1) == [1]
    assert ladder(3) == [1, 2, 4]
    assert ladder(9) == [1, 2, 4, 8, 16]
    assert ladder(40) == [1, 2, 4, 8, 16, 32, 48]
    assert len(ladder(256)) == 20


def nothing(token_ids, positions, attention):
    return torch.zeros(len(token_ids), 1)


def test_a_step_of_decodes_alone_takes_the_next_size_and_others_none():
    graphs = DecodeGraphs(
        nothing, FakeRecorder(), most_rows=40, block_size=4, context_length=10, device=torch.device("cpu")
    )
    assert [graphs.size_for(count, count) for count in (1, 2, 3, 8, 9, 17, 48)] == [1, 2, 4, 8, 16, 32, 48]
    assert graphs.size_for(49, 49) is None
    assert graphs.size_for(0, 0) is None
    assert graphs.size_for(3, 4) is None


def test_the_largest_size_is_recorded_first_and_all_as_padding():
    recorded = []

    def forward(token_ids, positions, attention):
        assert attention.slot_mapping.tolist() == [-1] * len(token_ids)
        assert attention.context_lengths.tolist() == [0] * len(token_ids)
        assert attention.query_starts.tolist() == list(range(len(token_ids) + 1))
        assert attention.block_tables.shape == (len(token_ids), 3)
        recorded.append(len(token_ids))
        return torch.zeros(len(token_ids), 1)

    DecodeGraphs(forward, FakeRecorder(), most_rows=8, block_size=4, context_length=10, device=torch.device("cpu"))
    assert recorded == [8, 4, 2, 1]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Makes runners of one model on the Triton kernels, and their caches."""
    directory = tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "choose", lambda *_, **__: triton_kernels())
        model = registry.load_model(directory, read_config(directory), torch.float32, DEVICE)
    return lambda: make_runner(model, num_blocks=64, block_size=BLOCK_SIZE, dtype=torch.float32, device=DEVICE)


def recorder():
    return CudaRecorder(DEVICE) if ON_GPU else FakeRecorder()


@pytest.fixture(scope="module")
def runners(start):
    """One that launches and one that replays, and what the latter was recorded with."""
    (plain, _), (recorded, _), record = start(), start(), recorder()
    recorded.record_decodes(record, most_rows=4)
    return plain, recorded, record


def batches(sampling, lives=((0, 1, 2), (2, 0), (1,), (2, 1, 0))):
    """Steps of 3 sequences with contexts of 1, 5 and 9 tokens: prompts, decodes of those that live, and the end."""
    prompts = [[(7 * row + 3 * place) % 97 for place in range(1 + 4 * row)] for row in range(3)]
    tables = [[row, 10 + row, 20 + row, 30 + row] for row in range(3)]
    steps = [step(*(Row(row, prompts[row], tables[row]) for row in range(3)), new=dict.fromkeys(range(3), sampling))]
    computed = [len(prompt) for prompt in prompts]
    for live in lives:
        token = 50 if sampling.num_candidates else -1
        steps.append(step(*(Row(row, [token], tables[row], computed[row]) for row in live)))
        for row in live:
            computed[row] += 1
    return [*steps, step(finished=range(3))]


def test_a_padded_and_recorded_step_gives_every_logit_of_the_plain_one(runners):
    plain, recorded, _ = runners
    for request in batches(WHOLE):
        expected, found = (logits_of(runner.execute(request)) for runner in (plain, recorded))
        assert len(found) == len(expected) == len(request.sample_rows) // 4
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)


def logits_of(response):
    """The log-probability of each token, of each sample."""
    told = candidates(response)
    return [dict(told[start : start + 97]) for start in range(0, len(told), 97)]


def test_recorded_decodes_go_on_from_tokens_that_never_leave_the_device(runners):
    plain, recorded, record = runners
    expected = [tokens(plain.execute(request)) for request in batches(GREEDY)]
    if not ON_GPU:
        record.num_replays = 0
    found = [recorded.launch(request) for request in batches(GREEDY)]
    assert [tokens(step.result()) for step in found] == expected
    assert ON_GPU or record.num_replays == 4, "the step of prompts is no replay, the others are"


SAMPLINGS = {
    "greedy": GREEDY,
    "filtered": Sampling(temperature=1, top_p=0.9, top_k=20, min_p=0.01, typical_p=0.9, seed=3),
    "told": Sampling(temperature=0, top_p=1, num_top_logprobs=3),
    "biased": Sampling(temperature=0, top_p=1, stop_token_ids=[4], min_tokens=40, num_prompt_tokens=1),
    "searched": WHOLE,
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_no_launch_looks_at_what_the_device_computes(runners, sampling):
    _, runner, _ = runners
    requests = batches(sampling, lives=((0, 1, 2),))
    expected = [tokens(runner.execute(request)) for request in requests]
    with never_waits(DEVICE):
        in_flight = [runner.launch(request) for request in requests]
    assert [tokens(step.result()) for step in in_flight] == expected


def test_padding_and_recording_write_nothing_to_the_cache(start):
    runner, cache = start()
    before = torch.randn_like(cache._cache)
    before[:, :, 7] = torch.nan  # which a kernel that read behind a context would spread
    cache._cache.copy_(before)
    runner.record_decodes(recorder(), most_rows=8)
    assert torch.equal(cache._cache.nan_to_num(9.0), before.nan_to_num(9.0))
    row = Row(1, [5], [0])
    response = runner.execute(step(row, replace_request(row, 2, 7), replace_request(row, 3, 63), new=greedy(1, 2, 3)))
    assert len(set(tokens(response))) == 1
    assert not response.failed_samples
    changed = (cache._cache.nan_to_num(9.0) != before.nan_to_num(9.0)).flatten(3).any(-1).any(0).any(0)
    assert changed.nonzero().flatten().tolist() == [0, 7, 63]


def replace_request(row, request_id, block):
    return replace(row, request_id=request_id, blocks=[block])


def greedy(*request_ids):
    return dict.fromkeys(request_ids, GREEDY)


def test_operations_say_whether_they_can_be_recorded_and_what_they_read():
    assert (triton_kernels().recordable, triton_kernels().reads_behind_context) == (True, False)
    assert (torch_reference().recordable, torch_reference().reads_behind_context) == (False, True)
