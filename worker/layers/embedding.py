"""Token ids to vectors, and vectors to logits."""

import torch
from torch import Tensor
from torch.nn.functional import embedding

from kernels.choice import Operations
from kernels.cpu_linear import CpuLinear
from worker.layers.linear import Linear
from worker.ranks import ALONE, Ranks
from worker.shares import Target, part

# Tensors on this device have a shape but no memory.
_NOWHERE = torch.device("meta")


class Embedding:
    """One learned vector for each token id; each rank holds some of them.

    Args:
        vocabulary_size: number of token ids.
        size: values in a vector.
        ranks: those that share the vectors.
        tied: whether the head, which is on the last stage, uses them as its weights. They take no memory on a stage
            that does not use them.
        dtype: of the vectors.
        device: where they live.
    """

    def __init__(
        self,
        vocabulary_size: int,
        size: int,
        *,
        ranks: Ranks = ALONE,
        tied: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._ranks = ranks
        self.share = ranks.deal(vocabulary_size)
        self._is_held = ranks.place.is_first or (ranks.place.is_last and tied)
        device = device if self._is_held else _NOWHERE
        self.weight = torch.empty(self.share.size, size, dtype=dtype, device=device)

    def checkpoint_tensors(self, name: str) -> dict[str, Target]:
        """The name of the tensor in the checkpoint -> the one that its rows fill; empty if that is not held here."""
        return {name: part(self.weight, 0, self.share)} if self._is_held else {}

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, size]."""
        if self.share.is_whole:
            return embedding(token_ids, self.weight)
        rows = token_ids - self.share.start
        elsewhere = (rows < 0) | (rows >= self.share.size)
        x = embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return self._ranks.sum(x.masked_fill_(elsewhere[:, None], 0))


class Head(Linear):
    """The product that scores every token id of the vocabulary: [num_samples, size] -> float32 logits.

    Args:
        size: values of a hidden state.
        vocabulary_size: number of token ids; each rank scores some, and gets the scores of all.
        ranks: those that share them; the weights take no memory outside the last stage.
        dtype: of the weights.
        device: where they live.
    """

    def __init__(
        self, size: int, vocabulary_size: int, *, ranks: Ranks = ALONE, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._ranks, self._share = ranks, ranks.deal(vocabulary_size)
        device = device if ranks.place.is_last else _NOWHERE
        super().__init__(size, {"lm_head": self._share}, bias=False, dtype=dtype, device=device, widened=True)
        self._tied: Embedding | None = None
        self._room: Tensor | None = None

    def tie(self, embedding: Embedding) -> None:
        """Uses the embedding's vectors as weights."""
        self.weight = embedding.weight
        self._tied = embedding

    def pack(self, operations: Operations) -> None:
        """As `Linear.pack`, on the last stage; lets tied vectors go as well if only the head uses them."""
        if not self._ranks.place.is_last:
            return
        super().pack(operations)
        if self._tied is not None and not self._ranks.place.is_first:
            self._tied.weight = self.weight
        if self._share.is_whole and isinstance(self._multiply, CpuLinear):
            self._multiply.make_screen()

    def __call__(self, x: Tensor) -> Tensor:
        """[num_samples, size] -> [num_samples, vocabulary_size]; if made in C++, valid until the next call."""
        return self._ranks.gather(self._scores(x), self._share)

    @property
    def can_find_best(self) -> bool:
        """Whether `find_best` can be called: only if this rank scores all token ids, in C++."""
        return self._share.is_whole and isinstance(self.packed, CpuLinear)

    @property
    def has_screen(self) -> bool:
        """Whether `find_best` uses a screen, so that the normalizers that it returns are off by some thousandths."""
        return isinstance(self.packed, CpuLinear) and self.packed.has_screen

    def find_best(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalizers, best tokens and their logits, without memory for the other logits; see `CpuLinear.score`."""
        assert isinstance(self.packed, CpuLinear)
        return self.packed.score(x)

    def _scores(self, x: Tensor) -> Tensor:
        """This rank's scores; if made in C++, in memory that is kept.

        Tens of megabytes at a time are too much for malloc to keep: it returns them to the system, and the next step
        would take them anew, page by page.
        """
        if not isinstance(self.packed, CpuLinear):
            return super().__call__(x)
        if self._room is None or len(self._room) < len(x):
            self._room = None  # freed before the next one is taken
            # A power of two, so that it is soon large enough; rows that were never written take no memory.
            num_rows = 1 << (len(x) - 1).bit_length()
            self._room = torch.empty(num_rows, self._share.size, dtype=torch.float32)
        return self.packed(x, self._room[: len(x)])
