"""Linear layers: y = x W^T + b, several of a checkpoint's projections stacked into one where they share their input.

Layers are plain objects that hold tensors and are called. Nothing here is trained, so the registries and hooks of
nn.Module would have no work, and their share of each call shows in a decode step.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.choice import LinearLayer, Operations
from kernels.reference import PlainLinear


class Linear:
    """One matrix product for all of `outputs`, whose results stand side by side in the last dimension.

    It is filled, then packed, then called.

    Args:
        in_features: size of the input.
        outputs: the checkpoint's name of each stacked projection -> its number of outputs, in order.
        bias: whether each has one.
        dtype: of the weights, which is the input's as well.
        device: where they live.
        widened: whether the results are float32.
        gated: whether the second half of the results comes out, each times silu of its gate in the first.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        widened: bool = False,
        gated: bool = False,
    ) -> None:
        self.outputs = dict(outputs)
        out_features = sum(outputs.values())
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self._widened, self._gated = widened, gated
        self._multiply: LinearLayer | None = None

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        """The name of each tensor in the checkpoint -> the part of our parameters that it fills."""
        tensors = {}
        sizes = list(self.outputs.values())
        for name, weight in zip(self.outputs, self.weight.split(sizes), strict=True):
            tensors[f"{prefix}{name}.weight"] = weight
        if self.bias is not None:
            for name, bias in zip(self.outputs, self.bias.split(sizes), strict=True):
                tensors[f"{prefix}{name}.bias"] = bias
        return tensors

    def pack(self, operations: Operations) -> None:
        """Puts the loaded weight into the layout that these multiply fastest; the plain one is let go then."""
        self._multiply = operations.linear(self.weight, self.bias, widened=self._widened, gated=self._gated)
        if not isinstance(self._multiply, PlainLinear):
            self.weight = self.weight.new_empty(0)

    @property
    def packed(self) -> LinearLayer:
        """What `pack` made of it."""
        assert self._multiply is not None, "not packed"
        return self._multiply

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, the sum of all outputs], or half of it where it is gated."""
        return self.packed(x)
