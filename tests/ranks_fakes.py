"""Ranks that are threads of this process, which meet at barriers: as many as a test likes, at the price of one."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import torch
from real_worker import CPU

from bench.in_process import make_runner
from protos.worker_pb2 import ExecuteModelRequest, ExecuteModelResponse
from worker.checkpoint import read_config
from worker.models.registry import load_model
from worker.ranks import Place, Ranks

# A rank that raises leaves the others behind; they then say so.
_TIMEOUT_S = 20.0


class _Group:
    """The ranks of a layer: what each has put down, for all to look at."""

    def __init__(self, size):
        self.parts = [None] * size
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT_S)


class ThreadRanks(Ranks):
    """One of them; see `Ranks`."""

    def __init__(self, place, groups, links):
        super().__init__(place)
        self._group, self._links = groups[place.stage], links

    def _put(self, x):
        """What all of them have, in their order."""
        self._group.parts[self.place.tensor_rank] = x.clone()
        self._group.barrier.wait()
        parts = list(self._group.parts)
        self._group.barrier.wait()
        return parts

    def sum(self, x):
        return x.copy_(sum(self._put(x)))

    def gather(self, x, share):
        gathered = torch.cat(self._put(x), dim=1)
        assert gathered.shape[1] == share.total
        return gathered

    def agree(self, x):
        return x.copy_(self._put(x)[0])

    def receive(self, num_tokens, like):
        x = self._links[self.place.rank].get(timeout=_TIMEOUT_S)
        assert x.shape == (num_tokens, like.shape[-1])
        self.on_arrival()
        return x

    def send(self, x):
        self._links[self.place.rank - self.place.tensor_size].put(x.clone())
        return x


class ThreadRunner:
    """The runners of all ranks of a checkpoint, as one.

    Args:
        directory: of the checkpoint.
        tensor_size: ranks that a layer is dealt out to.
        num_stages: that the layers are dealt out to.

    Attributes:
        models: of the ranks, rank 0's first.
    """

    def __init__(self, directory: Path, tensor_size: int, num_stages: int) -> None:
        groups = [_Group(tensor_size) for _ in range(num_stages)]
        places = [Place(rank, tensor_size, num_stages) for rank in range(tensor_size * num_stages)]
        links = [SimpleQueue() for _ in places]
        config = read_config(directory)
        self.models = [
            load_model(directory, config, torch.float32, CPU, ranks=ThreadRanks(place, groups, links), block_size=4)
            for place in places
        ]
        pools = {"num_blocks": 64, "num_cpu_blocks": 8, "block_size": 4}
        self._runners = [make_runner(model, **pools, dtype=torch.float32, device=CPU)[0] for model in self.models]
        self.limits = self._runners[0].limits
        self._pool = ThreadPoolExecutor(len(places))

    def execute(self, request: ExecuteModelRequest) -> ExecuteModelResponse:
        """What rank 0 answers."""
        answer, *_ = self._pool.map(lambda runner: runner.execute(request), self._runners)
        return answer

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._pool.shutdown()
