"""Linear layers by oneDNN, which torch brings: bfloat16 weights on a CPU, reordered once into its blocked layout.

Otherwise each call would reorder the weight afresh, which takes longer than the product of a small batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad


class OneDnnLinear:
    """y = finish(x W^T + b) for one weight; see `reference.PlainLinear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, finish: Callable[[Tensor], Tensor] | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias, self._finish = bias, finish

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, num_inputs] -> [num_tokens, num_outputs], or what `finish` makes of them."""
        num_tokens = x.shape[0]
        num_padding = padded_rows(num_tokens) - num_tokens
        if num_padding:
            x = pad(x, (0, 0, 0, num_padding))
        y = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")[:num_tokens]
        return y if self._finish is None else self._finish(y)


def takes(weight: Tensor) -> bool:
    """Whether that is known to pay for this weight."""
    is_bfloat16 = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return is_bfloat16 and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def padded_rows(num_rows: int) -> int:
    """The least multiple of the largest power of two below an eighth of `num_rows` that is not less than it.

    oneDNN makes and keeps code for each number of rows that it meets: some milliseconds and two megabytes for a step
    of SmolLM2-135M. Under load a step has another number of rows each time, so they are rounded up, by an eighth at
    most, to eight sizes an octave.
    """
    unit = 1 << max(0, num_rows.bit_length() - 4)
    return -(-num_rows // unit) * unit
