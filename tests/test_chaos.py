"""A few faults of each kind under load, on a random model: a short `make chaos`."""

import sys
from collections import Counter
from contextlib import closing

import pytest
from fakes import VOCABULARY_SIZE, write_tokenizer
from models_fakes import save, tiny_model
from rich.console import Console
from terminals import CTRL_C, Terminal

from bench.chaos.__main__ import Plan, disturb
from bench.chaos.requests import PROMPTS
from pagewire.processes import start_ticks, with_descendants

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Its tokens are bytes, many of which are no whole character."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY_SIZE, max_position_embeddings=2048, num_key_value_heads=2, **sizes)
    return write_tokenizer(save(tiny_model(config), tmp_path_factory.mktemp("model")))


async def test_every_stream_stays_the_same_while_processes_die_hang_and_stop(model, tmp_path_factory):
    plan = Plan(
        model,
        num_schedulers=2,
        num_faults=9,
        seed=7,
        num_clients=6,
        max_tokens=80,
        spacing_s=0.3,
        suspensions_s=((0.1, 0.6),),
        prompts=PROMPTS[1:3],
    )
    folder = tmp_path_factory.mktemp("c")
    outcome = await disturb(plan, folder, folder / "log", Console())
    assert outcome.wrong == []
    faults = Counter({(row.service, row.signal): row.num_faults for row in outcome.rows})
    assert (len(faults), faults.total()) == (9, 9), "each service by each signal"
    assert outcome.num_answers > 0


def test_ctrl_c_ends_it_without_a_word_and_with_all_its_processes(model, tmp_path):
    command = [sys.executable, "-m", "bench.chaos", "--model", str(model), "--no-recovery", "--logs", str(tmp_path)]
    with closing(Terminal(command)) as terminal:
        log = tmp_path / "cluster-1.log"
        terminal.wait_for(lambda: log.exists() and "scheduler: " in log.read_text())
        before = with_descendants([terminal.process.pid])
        assert len(before) >= 4, "workers, schedulers and routers run"
        terminal.press(CTRL_C)
        assert terminal.wait() == 130
        assert b"Traceback" not in terminal.written
        assert {start_ticks(pid) for pid in before} == {None}
