"""Linear layers: y = x W^T + b, several of a checkpoint's projections stacked into one where they share their input.

Layers are plain objects that hold tensors and are called. Nothing here is trained, so the registries and hooks of
nn.Module would be of no use, and their cost in each call shows in a decode step.
"""

from collections.abc import Mapping
from functools import cached_property, partial

import torch
from torch import Tensor

from kernels.choice import LinearLayer, Operations
from kernels.reference import PlainLinear
from worker.ranks import Ranks
from worker.shares import Share, Target, part, whole


class Linear:
    """One matrix product for all of `outputs`, whose results are side by side in the last dimension.

    It is filled, then packed, then called. With several ranks, each may hold a share of every projection's outputs.

    Args:
        in_features: size of the input.
        outputs: the checkpoint's name of each stacked projection -> its number of outputs, or this rank's share of
            them, in order.
        bias: whether each projection has one.
        dtype: of the weights and of the input.
        device: where they live.
        widened: whether the results are float32.
        gated: whether only the second half of the results is returned, each times the silu of its gate in the first.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, int | Share],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        widened: bool = False,
        gated: bool = False,
    ) -> None:
        self.outputs = {name: share if isinstance(share, Share) else whole(share) for name, share in outputs.items()}
        out_features = sum(share.size for share in self.outputs.values())
        self._make_weight = partial(torch.empty, out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self._widened, self._gated = widened, gated
        self._multiply: LinearLayer | None = None

    @cached_property
    def weight(self) -> Tensor:
        """[out_features, in_features], plain. It takes its memory when it is first asked for, to be filled."""
        return self._make_weight()

    def checkpoint_tensors(self, prefix: str) -> dict[str, Target]:
        """The name of each tensor in the checkpoint -> the part of our parameters that it fills."""
        tensors: dict[str, Target] = {}
        for kind, stacked in (("weight", self.weight), ("bias", self.bias)):
            if stacked is not None:
                parts = stacked.split([share.size for share in self.outputs.values()])
                for (name, share), rows in zip(self.outputs.items(), parts, strict=True):
                    tensors[f"{prefix}{name}.{kind}"] = part(rows, 0, share)
        return tensors

    def pack(self, operations: Operations) -> None:
        """Puts the loaded weight into the layout that `operations` multiply fastest, and lets the plain one go."""
        self._multiply = operations.linear(self.weight, self.bias, widened=self._widened, gated=self._gated)
        if not isinstance(self._multiply, PlainLinear):
            self.weight = self.weight.new_empty(0)

    @property
    def packed(self) -> LinearLayer:
        """What `pack` made of the weight."""
        assert self._multiply is not None, "not packed"
        return self._multiply

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, the sum of all outputs], or half of that if it is gated."""
        return self.packed(x)


class SummedLinear(Linear):
    """A product whose input is shared among ranks: each multiplies its share, and gets the sum of all results.

    Args:
        share: this rank's part of the input.
        name: the checkpoint's name.
        out_features: size of the output, which is whole at every rank.
        ranks: those whose results are summed.
        bias: see `Linear`; the first rank adds it.
        dtype: see `Linear`.
        device: see `Linear`.
    """

    def __init__(
        self,
        share: Share,
        name: str,
        out_features: int,
        *,
        ranks: Ranks,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(share.size, {name: out_features}, bias=bias, dtype=dtype, device=device)
        self._share, self._ranks = share, ranks

    def checkpoint_tensors(self, prefix: str) -> dict[str, Target]:
        """As `Linear.checkpoint_tensors`."""
        (name,) = self.outputs
        tensors: dict[str, Target] = {f"{prefix}{name}.weight": part(self.weight, 1, self._share)}
        if self.bias is not None:
            tensors[f"{prefix}{name}.bias"] = self.bias
        return tensors

    def pack(self, operations: Operations) -> None:
        """As `Linear.pack`."""
        if self._ranks.place.tensor_rank > 0:
            self.bias = None
        super().pack(operations)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, share.size] -> [num_tokens, out_features]."""
        return self._ranks.sum(super().__call__(x))
