"""`python -m bench.executors`: what a step costs through each executor, with a model that takes next to no time.

The model has one layer of 64 values, so nearly all of the time goes into sending a step to the ranks and back, and with
two ranks into what they exchange in it: five sums and gathers. Each executor is measured in a process of its own, as
the worker runs it but without gRPC: steps of decodes, one after the other, from the request to the answer.
"""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from bench import machine
from bench.core_speed import Summary
from pagewire.processes import signal_all, tied, with_descendants
from protos.columns import pack
from protos.process import start_logging
from protos.sampling_pb2 import Sampling
from protos.worker_pb2 import ExecuteModelRequest, NewRequest
from worker.config import ExecutorName, WorkerSettings
from worker.executor.choose import is_follower, make_executor
from worker.executor.executor import Executor
from worker.executor.external import follow

EXECUTORS: tuple[ExecutorName, ...] = ("uni", "mp", "ray", "external")
RANKS, ROWS = (1, 2), (1, 32)
_NUM_STEPS, _NUM_WARM_UP = 1000, 200
_PROMPT_TOKENS, _BLOCK_SIZE = 16, 16
_HIDDEN, _HEADS, _HEAD_DIM, _VOCABULARY = 64, 4, 16, 512


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds of a step.

    Attributes:
        num_ranks: in a tensor group.
        num_rows: sequences that decode.
        step: from the request to the answer.
    """

    executor: str
    num_ranks: int
    num_rows: int
    step: Summary


def write_checkpoint(directory: Path) -> None:
    """A random Llama of one small layer, in float32."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": _VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": _HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    matrices = {f"self_attn.{name}_proj": (_HIDDEN, _HIDDEN) for name in "qkvo"}
    matrices |= {f"mlp.{name}_proj": (_HIDDEN, _HIDDEN) for name in ("gate", "up", "down")}
    tensors = {f"model.layers.0.{name}.weight": torch.randn(shape) for name, shape in matrices.items()}
    for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        tensors[f"model.{name}.weight"] = torch.ones(_HIDDEN)
    tensors["model.embed_tokens.weight"] = torch.randn(_VOCABULARY, _HIDDEN)
    save_file(tensors, directory / "model.safetensors")


def measure(executor: Executor, num_rows: int) -> Summary:
    """Times steps of `num_rows` decodes."""
    ids = range(1, num_rows + 1)
    executor.launch(
        _step(num_rows, _PROMPT_TOKENS, new=[NewRequest(request_id=i, sampling=_GREEDY) for i in ids])
    ).result()
    times = []
    for number in range(_NUM_WARM_UP + _NUM_STEPS):
        request = _step(num_rows, 1, computed=_PROMPT_TOKENS, step_id=number)
        begun = time.perf_counter()
        executor.launch(request).result()
        times.append(1e3 * (time.perf_counter() - begun))
    executor.launch(ExecuteModelRequest(finished_request_ids=pack(ids))).result()
    return Summary.of(times[_NUM_WARM_UP:])


_GREEDY = Sampling(temperature=0, top_p=1)


def _step(
    num_rows: int, num_tokens: int, *, computed: int = 0, step_id: int = 0, new: list[NewRequest] | None = None
) -> ExecuteModelRequest:
    return ExecuteModelRequest(
        step_id=step_id,
        new_requests=new or [],
        request_ids=pack(range(1, num_rows + 1)),
        sequence_indexes=pack([0] * num_rows),
        num_computed_tokens=pack([computed] * num_rows),
        num_new_tokens=pack([num_tokens] * num_rows),
        token_ids=pack([7] * num_rows * num_tokens),
        block_table_lengths=pack([2] * num_rows),
        block_tables=pack(range(2 * num_rows)),
        sample_rows=pack(range(num_rows)),
        sample_sequence_indexes=pack([0] * num_rows),
    )


def measure_here(executor: ExecutorName, num_ranks: int, model: str) -> list[Measured]:
    """In this process, which ends afterwards."""
    told: dict[str, Any] = {"num_threads": 1, "device": "cpu", "log_level": "warning"}
    told |= {"tensor_parallel_size": num_ranks, "block_size": _BLOCK_SIZE, "num_gpu_blocks": 2 * max(ROWS)}
    settings = WorkerSettings(model=model, executor=executor, **told)
    start_logging("bench", settings)
    if is_follower(settings, os.environ):
        follow(settings)
    runs = make_executor(settings)
    runs.load(_ignore)
    measured = [Measured(executor, num_ranks, num_rows, measure(runs, num_rows)) for num_rows in ROWS]
    runs.close()
    return measured


def _ignore() -> None:
    """If the ranks end, the step that they do not answer fails."""


def run(executor: ExecutorName, num_ranks: int, model: Path) -> list[Measured]:
    """In a process of its own, or several that torchrun starts."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    out = model / f"{executor}-{num_ranks}.json"
    command = [sys.executable, *(launcher if executor == "external" else ()), "-m", "bench.executors"]
    command += ["--one", executor, str(num_ranks), str(model), str(out)]
    with subprocess.Popen(tied(command), start_new_session=True) as process:  # so a terminal's Ctrl-C is for us alone
        try:
            status = process.wait()
        except KeyboardInterrupt:
            signal_all(with_descendants([process.pid]), signal.SIGKILL)
            raise
    if status != 0:
        raise subprocess.CalledProcessError(status, command)
    rows = json.loads(out.read_text())
    return [Measured(**(row | {"step": Summary(**row["step"])})) for row in rows]


def table(rows: list[Measured]) -> Table:
    """What each executor adds to uni's step."""
    shown = Table("executor", "ranks", "rows", "step, ms (p50)", "p99", "over uni, ms", title="a step")
    uni = {row.num_rows: row.step.p50 for row in rows if row.executor == "uni"}
    for row in rows:
        over = f"{row.step.p50 - uni[row.num_rows]:+.3f}" if row.num_rows in uni else ""
        figures = (f"{row.step.p50:.3f}", f"{row.step.p99:.3f}", over)
        shown.add_row(row.executor, str(row.num_ranks), str(row.num_rows), *figures)
    return shown


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executors", default=",".join(EXECUTORS), help="some of them (default: all)")
    parser.add_argument("--json", type=machine.output_file, help="file to write all figures to")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        executor, num_ranks, model, out = arguments.one
        measured = measure_here(executor, int(num_ranks), model)
        Path(out).write_text(json.dumps([dataclasses.asdict(row) for row in measured]))
        sys.stdout.flush()
        os._exit(0)  # as the worker does
    executors = arguments.executors.split(",")
    if unknown := [name for name in executors if name not in EXECUTORS]:
        parser.error(f"no executor {', '.join(unknown)}; there are {', '.join(EXECUTORS)}")
    rows, failures = [], []
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory))
        for executor in executors:
            for num_ranks in RANKS[:1] if executor == "uni" else RANKS:
                try:
                    rows += run(executor, num_ranks, Path(directory))
                except subprocess.CalledProcessError as error:
                    failures.append(f"{executor}, ranks: {num_ranks}, ended with status {error.returncode}")
    Console().print(table(rows))
    if arguments.json is not None:
        report = machine.facts(["pagewire", "torch"]) | {"steps": [dataclasses.asdict(row) for row in rows]}
        machine.write(arguments.json, report)
    sys.exit("\n".join(failures) or 0)


if __name__ == "__main__":
    machine.run(main)
