"""Linear layers: y = x W^T + b, several of a checkpoint's projections stacked into one where they share their input.

Layers are plain objects that hold tensors and are called. Nothing here is trained, so the registries and hooks of
nn.Module would have no work, and their share of each call shows in a decode step.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear, pad


class Linear:
    """One matrix product for all of `outputs`, whose results stand side by side in the last dimension.

    Args:
        in_features: size of the input.
        outputs: the checkpoint's name of each stacked projection -> its number of outputs, in order.
        bias: whether each has one.
        dtype: of the weights, which is the input's as well.
        device: where they live.
    """

    def __init__(
        self, in_features: int, outputs: Mapping[str, int], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.outputs = dict(outputs)
        out_features = sum(outputs.values())
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self._multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = linear

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

    def pack(self) -> None:
        """Reorders the loaded weight once into oneDNN's blocked layout, where that is known to pay: bfloat16 on a CPU.

        The plain weight is let go. A decode step of SmolLM2-135M spends 6 instead of 14 ms in its products then, since
        otherwise each call reorders the weight afresh.
        """
        weight = self.weight
        if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not _onednn_has_bfloat16():
            return
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._multiply = _multiply_packed

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, the sum of all outputs]."""
        return self._multiply(x, self.weight, self.bias)


def _multiply_packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_rows = x.shape[0]
    num_padding = padded_rows(num_rows) - num_rows
    if num_padding:
        x = pad(x, (0, 0, 0, num_padding))
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")[:num_rows]


def padded_rows(num_rows: int) -> int:
    """The least multiple of the largest power of two below an eighth of `num_rows` that is not less than it.

    oneDNN makes and keeps code for each number of rows that it meets: some milliseconds and two megabytes for a step
    of SmolLM2-135M. Under load a step has another number of rows each time, so they are rounded up, by an eighth at
    most, to eight sizes an octave.
    """
    unit = 1 << max(0, num_rows.bit_length() - 4)
    return -(-num_rows // unit) * unit


def _onednn_has_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
