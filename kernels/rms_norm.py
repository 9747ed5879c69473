"""RMSNorm, alone and fused with the residual addition before it (Zhang & Sennrich 2019, arXiv:1910.07467).

One program per row. It rounds where the twins in `kernels.reference` round: the sum before the norm, and the norm
before the product with the weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forms import check_floats, form

_MOST_SIZE = 65536


@triton.jit
def _rms_norm_kernel(
    out: tl.tensor,
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    epsilon: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    there = columns < SIZE
    values = tl.load(x + row * x_stride + columns, mask=there, other=0.0)
    if ADD:
        place = residual + row * residual_stride + columns
        old = tl.load(place, mask=there, other=0.0)
        values = (old.to(tl.float32) + values.to(tl.float32)).to(values.dtype)
        tl.store(place, values, mask=there)
    wide = values.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)
    normed = (wide * inverse_rms).to(values.dtype).to(tl.float32)
    scaled = normed * tl.load(weight + columns, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, scaled.to(values.dtype), mask=there)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm over the last dimension, in float32 inside.

    Args:
        x: [..., size]; rows are dense, and may be strided if x is [num_rows, size].
        weight: [size], in x's dtype; multiplied after rounding to that dtype, as in Hugging Face.
        epsilon: added to the mean square.

    Returns:
        Like `x`, contiguous.
    """
    _check(x, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(out, x, x, weight, epsilon, add=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Adds `x` to `residual` in place, and returns the RMSNorm of the sum; shapes as in `rms_norm`."""
    if x.shape != residual.shape:
        raise ValueError(f"x {form(x)} and residual {form(residual)} differ")
    check_floats(x=x, residual=residual)
    _check(residual, weight)
    _check(x, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(out, x, residual, weight, epsilon, add=True)
    return out


def _launch(out: Tensor, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, *, add: bool) -> None:
    size = x.shape[-1]
    num_rows = x.numel() // size if size > 0 else 0
    if num_rows == 0:
        return
    padded = triton.next_power_of_2(size)
    _rms_norm_kernel[(num_rows,)](
        *(out, x, residual, weight, epsilon, x.stride(-2) if x.ndim > 1 else size),
        residual.stride(-2) if x.ndim > 1 else size,
        SIZE=size,
        PADDED=padded,
        ADD=add,
        num_warps=min(16, max(1, padded // 512)),
    )


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {form(weight)} does not fit x {form(x)}")
    check_floats(x=x, weight=weight)
    if x.ndim != 2 and not x.is_contiguous():
        raise ValueError(f"x {form(x)} has strides {x.stride()}: only a matrix may be strided")
    if x.shape[-1] > _MOST_SIZE:
        raise ValueError(f"rows of {x.shape[-1]} are longer than {_MOST_SIZE}")
