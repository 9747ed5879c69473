"""Whoever runs the ranks, and however many there are: the greedy tokens are those of one, also when blocks are few."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]
pytest.importorskip("torch")
pytest.importorskip("transformers")

SCRIPT = Path(__file__).parent / "rank_parity.py"
AMPLE = 2000


def outcome_of(kind, tensor_size, num_stages, num_blocks, model_dir, folder):
    """What `rank_parity.py` writes."""
    file = folder / "outcome"
    num_ranks = tensor_size * num_stages
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"] if kind == "external" else []
    command = [sys.executable, *torchrun, SCRIPT, kind, tensor_size, num_stages, num_blocks, model_dir, file]
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def one_rank(model_dir, tmp_path_factory):
    return outcome_of("uni", 1, 1, AMPLE, model_dir, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("tensor_size, num_stages", [(2, 1), (3, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("kind", ["mp", "ray", "external"])
def test_ranks_say_what_one_says_though_blocks_are_few(kind, tensor_size, num_stages, one_rank, model_dir, tmp_path):
    assert one_rank["num_preemptions"] == 0
    found = outcome_of(kind, tensor_size, num_stages, one_rank["max_num_held"] // 5, model_dir, tmp_path)
    assert found["tokens"] == one_rank["tokens"]
    assert found["num_preemptions"] > 0
    assert found["num_accepted"] > one_rank["num_accepted"] == 0
    assert found["num_found_tokens"] > 0
