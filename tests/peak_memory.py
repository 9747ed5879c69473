"""How much memory some work takes at its peak; each work runs in a process of its own, which this module starts.

growth, base = measure("load", directory)
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def measure(work: str, *arguments: object) -> tuple[int, int]:
    """Bytes by which resident memory grew at the peak of `work`, and what it was before."""
    command = [sys.executable, __file__, work, *map(str, arguments)]
    of_worker = {"GOMP_SPINCOUNT": "2000", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    environment = {"PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[1]}", **of_worker}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    growth, base = ended.stdout.split()
    return int(growth), int(base)


def grown(work: Callable[[], object]) -> tuple[int, int]:
    """The same for a function, in this process."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present size; proc(5)
    before = resident_bytes()
    kept = work()
    growth = _status("VmHWM") - before
    del kept
    return growth, before


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return _status("VmRSS")


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def load(directory: Path) -> tuple[int, int]:
    """Loads the model in `directory`, after a tiny one, so that libraries that the first model loads do not count."""
    import torch

    from worker.checkpoint import checkpoint_dtype, read_config
    from worker.models.registry import load_model

    def load_one(path: Path) -> object:
        config = read_config(path)
        return load_model(path, config, checkpoint_dtype(config), torch.device("cpu"))

    load_one(directory / "tiny")
    return grown(lambda: load_one(directory))


def prompt(directory: Path, *, num_tokens: int, with_logprobs: bool) -> tuple[int, int]:
    """Runs a prompt of so many tokens, in one step, on the model in `directory`."""
    from worker_fakes import Row, step

    from protos.columns import pack
    from protos.sampling_pb2 import Sampling
    from worker.config import WorkerSettings
    from worker.loading import load_worker

    settings = {"model": str(directory), "device": "cpu", "swap_bytes": 0, "max_num_batched_tokens": num_tokens}
    runner = load_worker(WorkerSettings(**settings)).runner
    token_ids = [number % 1000 for number in range(num_tokens)]
    sampling = Sampling(temperature=0, top_p=1, num_prompt_tokens=num_tokens)
    if with_logprobs:
        sampling.num_prompt_logprobs = 5
    request = step(Row(1, token_ids, range(-(-num_tokens // 16))), new={1: sampling})
    if with_logprobs:
        request.new_requests[0].prompt_token_ids = pack(token_ids)
        request.prompt_logprob_rows = request.prompt_logprob_starts = pack([0])
    answers = []
    growth, base = grown(lambda: answers.append(runner.execute(request)))
    told = len(answers[0].prompt_logprobs.logprobs) // 4
    assert told == (num_tokens - 1 if with_logprobs else 0)
    return growth, base


if __name__ == "__main__":
    work, path, *rest = sys.argv[1:]
    if work == "load":
        result = load(Path(path))
    else:
        result = prompt(Path(path), num_tokens=int(rest[0]), with_logprobs=rest[1] == "True")
    print(*result)
