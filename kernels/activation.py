"""Activations of the MLP: gated SiLU, and GELU in both of its forms, gated and plain.

SwiGLU and GEGLU: Shazeer 2020, arXiv:2002.05202; GELU: Hendrycks & Gimpel 2016, arXiv:1606.08415. One program per (row,
part of 1,024 columns). It rounds where the twins in `kernels.reference` round: after the activation, before the
product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forms import check_floats, form
from kernels.reference import PlainLinear, linear_finish

_COLUMNS = 1024


@triton.jit
def _activation_kernel(
    out: tl.tensor,
    x: tl.tensor,
    row_stride: tl.tensor,
    size: tl.tensor,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = columns < size
    values = tl.load(x + row * row_stride + columns, mask=there, other=0.0)
    wide = values.to(tl.float32)
    if KIND == "silu":
        active = wide * tl.sigmoid(wide)
    elif KIND == "none":
        active = 0.5 * wide * (1.0 + tl.erf(wide * 0.7071067811865476))
    else:
        # (1 + tanh(y)) / 2 is sigmoid(2 y), y = sqrt(2 / pi) (x + 0.044715 x^3).
        active = wide * tl.sigmoid(1.5957691216057308 * (wide + 0.044715 * wide * wide * wide))
    active = active.to(values.dtype)
    if GATED:
        up = tl.load(x + row * row_stride + size + columns, mask=there, other=0.0)
        active = (active.to(tl.float32) * up.to(tl.float32)).to(values.dtype)
    tl.store(out + row * size + columns, active, mask=there)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(first half) * second half of the last dimension: SwiGLU's gate.

    Args:
        x: [num_tokens, 2 * size]; rows may be strided.

    Returns:
        [num_tokens, size], contiguous.
    """
    return _activate(x, "silu", gated=True)


def linear(weight: Tensor, bias: Tensor | None, *, widened: bool = False, gated: bool = False) -> PlainLinear:
    """See `reference.linear`: torch's product, followed by a launch of our own for the gate."""
    return PlainLinear(weight, bias, linear_finish(silu_and_mul, widened=widened, gated=gated))


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """gelu(first half) * second half of the last dimension: GEGLU's gate; otherwise like `silu_and_mul`.

    Args:
        x: [num_tokens, 2 * size]; rows may be strided.
        approximate: "none" or "tanh", as torch names them.
    """
    return _activate(x, approximate, gated=True)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU of every value.

    Args:
        x: [num_tokens, size]; rows may be strided.
        approximate: "none" for the exact Gaussian integral, "tanh" for its approximation, as torch names them.

    Returns:
        Like `x`, contiguous.
    """
    return _activate(x, approximate, gated=False)


def _activate(x: Tensor, kind: str, *, gated: bool) -> Tensor:
    if kind not in ("silu", "none", "tanh"):
        raise ValueError(f"approximate is {kind!r}; it is to be 'none' or 'tanh'")
    if x.ndim != 2 or (gated and x.shape[1] % 2 != 0):
        raise ValueError(f"x {form(x)} is no matrix{' with two halves' if gated else ''}")
    check_floats(x=x)
    num_rows, size = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if out.numel() > 0:
        _activation_kernel[(num_rows, triton.cdiv(size, _COLUMNS))](
            *(out, x, x.stride(0), size), KIND=kind, GATED=gated, COLUMNS=_COLUMNS
        )
    return out
