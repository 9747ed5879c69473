"""Which part of a model each rank holds: integers only (Megatron-LM: Shoeybi et al. 2019, arXiv:1909.08053, section 3).

Heads, the MLP's inner values and the vocabulary are dealt out; what goes from layer to layer is whole at every rank.
Shares need not be of one size: of SmolLM2's three K/V heads, one of two ranks gets two and the other gets one, which
costs no more than giving two to both.
"""

from dataclasses import dataclass

from torch import Tensor

from worker.checkpoint import ModelError

# Values of an MLP are dealt out in units of this many, if there are enough: what our kernels multiply at once.
MLP_UNIT = 16


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's entries of one dimension.

    Attributes:
        total: entries of the whole dimension.
        ranges: (first, last + 1) of each run of entries, in the order in which the runs are laid out.
    """

    total: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Entries of this rank."""
        return sum(end - start for start, end in self.ranges)

    @property
    def start(self) -> int:
        """The first entry."""
        return self.ranges[0][0]

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the dimension."""
        return self.ranges == ((0, self.total),)

    def times(self, count: int) -> "Share":
        """The same part of a dimension where each entry stands for `count` values, side by side."""
        return Share(self.total * count, tuple((start * count, end * count) for start, end in self.ranges))

    def repeated(self, count: int) -> "Share":
        """The same part of each of `count` dimensions of this kind, stacked."""
        if self.is_whole:
            return whole(self.total * count)
        offsets = [index * self.total for index in range(count)]
        return Share(
            self.total * count, tuple((first + start, first + end) for first in offsets for start, end in self.ranges)
        )


def whole(total: int) -> Share:
    """All of a dimension."""
    return Share(total, ((0, total),))


def deal(total: int, rank: int, size: int, unit: int = 1) -> Share:
    """What `rank` of `size` gets of `total` entries: consecutive units, as evenly as possible.

    Raises:
        ModelError: there are fewer entries than ranks.
    """
    if total < size:
        raise ModelError(f"--tensor-parallel-size is {size}, but a dimension of the model has only {total} entries")
    unit = unit if total >= unit * size else 1
    num_units = -(-total // unit)
    start, end = (min(total, index * num_units // size * unit) for index in (rank, rank + 1))
    return Share(total, ((start, end),))


@dataclass(frozen=True, slots=True)
class Heads:
    """A rank's attention heads; those of K and V are all that its query heads use."""

    queries: Share
    kv: Share


def deal_heads(num_heads: int, num_kv_heads: int, rank: int, size: int) -> Heads:
    """Deals out whole groups, a K/V head with its query heads; if there are fewer groups than ranks, several ranks hold
    each K/V head and share its query heads.

    Raises:
        ModelError: they cannot be dealt out.
    """
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        kv = deal(num_kv_heads, rank, size)
        return Heads(kv.times(group), kv)
    if not _divides(num_heads, num_kv_heads, size):
        possible = [n for n in range(1, num_heads + 1) if n <= num_kv_heads or _divides(num_heads, num_kv_heads, n)]
        raise ModelError(
            f"--tensor-parallel-size {size} does not deal out {num_heads} query heads on {num_kv_heads} key/value "
            f"heads: possible are {', '.join(map(str, possible))}"
        )
    copies = size // num_kv_heads
    kv_head, copy = divmod(rank, copies)
    first = kv_head * group + copy * (group // copies)
    return Heads(Share(num_heads, ((first, first + group // copies),)), Share(num_kv_heads, ((kv_head, kv_head + 1),)))


def _divides(num_heads: int, num_kv_heads: int, size: int) -> bool:
    return size % num_kv_heads == 0 and num_heads % size == 0


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a checkpoint's tensor that a rank reads.

    Attributes:
        tensor: to be filled with it.
        dim: the dimension that is dealt out.
        share: which entries of it.
    """

    tensor: Tensor
    dim: int
    share: Share

    @property
    def whole_shape(self) -> list[int]:
        """The shape of the checkpoint's tensor."""
        return [self.share.total if dim == self.dim else size for dim, size in enumerate(self.tensor.shape)]

    def t(self) -> "Part":
        """The same part of a tensor that the checkpoint has transposed."""
        return Part(self.tensor.t(), 1 - self.dim, self.share)


# A tensor that is read whole, or a part of one.
Target = Tensor | Part


def part(tensor: Tensor, dim: int, share: Share) -> Target:
    """Where a rank's share of a checkpoint's tensor goes."""
    return tensor if share.is_whole else Part(tensor, dim, share)
