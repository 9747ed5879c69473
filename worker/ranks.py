"""What one rank knows of the others, and what it says to them in the middle of a forward pass.

A model is split twice: each layer over the ranks of a tensor group (`shares.py`), and the layers over stages (GPipe:
Huang et al. 2019, arXiv:1811.06965). All ranks run the same steps in the same order, so no rank has to be told what the
others are about to send. Rank 0 samples and answers, so it belongs to the last stage: stages count in the opposite
direction to ranks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch
from torch import Tensor, distributed

from kernels.cpu_meeting import CpuMeeting
from worker.checkpoint import ModelError
from worker.shares import Heads, Share, deal, deal_heads


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is among all of them.

    Attributes:
        rank: 0-based.
        tensor_size: ranks that a layer is dealt out to.
        num_stages: stages that the layers are dealt out to.
    """

    rank: int = 0
    tensor_size: int = 1
    num_stages: int = 1

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return self.tensor_size * self.num_stages

    @property
    def tensor_rank(self) -> int:
        """Its number in its tensor group."""
        return self.rank % self.tensor_size

    @property
    def stage(self) -> int:
        """Its stage: 0 embeds, the last one samples."""
        return self.num_stages - 1 - self.rank // self.tensor_size

    @property
    def is_first(self) -> bool:
        """Whether it embeds."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it samples."""
        return self.stage == self.num_stages - 1

    def layers(self, num_layers: int) -> range:
        """Its layers.

        Raises:
            ModelError: there are fewer layers than stages.
        """
        if num_layers < self.num_stages:
            raise ModelError(f"--pipeline-parallel-size is {self.num_stages}, but the model has {num_layers} layers")
        (bounds,) = deal(num_layers, self.stage, self.num_stages).ranges
        return range(*bounds)


@dataclass(frozen=True, slots=True)
class Host:
    """A rank's part of its host.

    Attributes:
        index: of this rank among those of the host.
        num_ranks: of the host.
        gpu: its GPU among those that its process sees; None: the one with its index.
    """

    index: int = 0
    num_ranks: int = 1
    gpu: int | None = None

    def cores(self, all_of_them: Iterable[int]) -> list[int]:
        """This rank's cores; if there are fewer cores than ranks, it shares one."""
        cores = sorted(all_of_them)
        return cores[self.index :: self.num_ranks] or [cores[self.index % len(cores)]]


WHOLE_HOST = Host()


class Ranks:
    """A rank and its group; alone, it does not communicate.

    Attributes:
        place: of this rank.
        on_arrival: called when hidden states have come from the stage before this one.
    """

    def __init__(
        self, place: Place, group: distributed.ProcessGroup | None = None, meeting: CpuMeeting | None = None
    ) -> None:
        self.place = place
        self.on_arrival: Callable[[], None] = _nothing
        # The group of the ranks that hold parts of the same layers, and something faster if they have it.
        self._tensor_group, self._meeting = group, meeting

    @classmethod
    def join(
        cls,
        place: Place,
        store: distributed.Store,
        device: torch.device,
        timeout_s: float,
        meeting: CpuMeeting | None = None,
    ) -> Self:
        """Meets the others; returns when all are there.

        Args:
            place: of this rank.
            store: where all of them find each other.
            device: the one that this rank computes on.
            timeout_s: seconds that the others may take to join, and to take part in each communication.
            meeting: for the CPUs of one host, that of this rank's tensor group.
        """
        if place.size == 1:
            return cls(place)
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=timeout_s),
        )
        firsts = range(0, place.size, place.tensor_size)
        groups = [distributed.new_group(range(first, first + place.tensor_size)) for first in firsts]
        return cls(place, groups[place.rank // place.tensor_size] if place.tensor_size > 1 else None, meeting)

    def deal(self, total: int, unit: int = 1) -> Share:
        """This rank's part of a layer's dimension; see `shares.deal`."""
        return deal(total, self.place.tensor_rank, self.place.tensor_size, unit)

    def deal_heads(self, num_heads: int, num_kv_heads: int) -> Heads:
        """This rank's heads; see `shares.deal_heads`."""
        return deal_heads(num_heads, num_kv_heads, self.place.tensor_rank, self.place.tensor_size)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of `x` over the ranks of a layer; `x` is overwritten."""
        if self._meeting is not None:
            self._meeting.sum(x)
        elif self._tensor_group is not None:
            distributed.all_reduce(x, group=self._tensor_group)
        return x

    def gather(self, x: Tensor, share: Share) -> Tensor:
        """[n, share.size] of each rank, side by side in the order of the ranks: [n, share.total]."""
        if self._tensor_group is None:
            return x
        size = self.place.tensor_size
        sizes = [deal(share.total, rank, size).size for rank in range(size)]
        if self._meeting is not None:
            return self._meeting.gather(x, sizes)
        padded = x.new_zeros(len(x), max(sizes))
        padded[:, : x.shape[1]] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        distributed.all_gather(parts, padded, group=self._tensor_group)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    def agree(self, x: Tensor) -> Tensor:
        """The `x` of a layer's first rank, at all of its ranks; x: [n], overwritten."""
        if self._meeting is not None:
            x.copy_(self._meeting.gather(x[:, None], [1] * self.place.tensor_size)[:, 0])
        elif self._tensor_group is not None:
            first = self.place.rank - self.place.tensor_rank
            distributed.broadcast(x, first, group=self._tensor_group)
        return x

    def receive(self, num_tokens: int, like: Tensor) -> Tensor:
        """Hidden states from the previous stage, [num_tokens, hidden_size]; like: [..., hidden_size]."""
        x = like.new_empty(num_tokens, like.shape[-1])
        distributed.recv(x, self.place.rank + self.place.tensor_size)
        self.on_arrival()
        return x

    def send(self, x: Tensor) -> Tensor:
        """Sends hidden states to the next stage, and returns them."""
        distributed.send(x.contiguous(), self.place.rank - self.place.tensor_size)
        return x

    def least(self, *values: int) -> list[int]:
        """For each of `values`, the least that any rank has."""
        if self.place.size == 1:
            return list(values)
        least = torch.tensor(values, dtype=torch.int64)
        distributed.all_reduce(least, distributed.ReduceOp.MIN)
        return [int(value) for value in least]


def _nothing() -> None:
    """Stands for `on_arrival` until that is set."""


ALONE = Ranks(Place())
