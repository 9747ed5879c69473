"""Rotary position embedding, in place (RoFormer: Su et al. 2021, arXiv:2104.09864).

One program per (head, token). It rounds where the torch twin rounds: after the first product of each sum.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.forms import check_floats, form


@triton.jit
def rotated(first: tl.tensor, second: tl.tensor, cosine: tl.tensor, sine: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The two halves of a head, rotated; all arguments share one dtype, and the result has it too."""
    dtype = first.dtype
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    cosine, sine = cosine.to(tl.float32), sine.to(tl.float32)
    turned_first = (wide_first * cosine).to(dtype).to(tl.float32) - wide_second * sine
    turned_second = (wide_second * cosine).to(dtype).to(tl.float32) + wide_first * sine
    return turned_first.to(dtype), turned_second.to(dtype)


@triton.jit
def _rotary_embedding_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    cos_stride: tl.tensor,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
) -> None:
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, PADDED_HALF)
    there = dims < HALF
    place = x + token * token_stride + head * head_stride + dims
    first = tl.load(place, mask=there)
    second = tl.load(place + HALF, mask=there)
    cosine = tl.load(cos + token * cos_stride + dims, mask=there)
    sine = tl.load(sin + token * cos_stride + dims, mask=there)
    first, second = rotated(first, second, cosine, sine)
    tl.store(place, first, mask=there)
    tl.store(place + HALF, second, mask=there)


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates each head of each token by its position, in place; component i is rotated with i + head_dim / 2.

    Args:
        x: [num_tokens, num_heads, head_dim]; may be a strided view, such as the q and k part of a fused projection.
        cos: [num_tokens, head_dim / 2], in x's dtype: the rows of the table at the tokens' positions.
        sin: like `cos`, including strides.
    """
    check_rotary(x, cos, sin)
    num_tokens, num_heads, head_dim = x.shape
    if num_tokens == 0 or num_heads == 0:
        return
    _rotary_embedding_kernel[(num_heads, num_tokens)](
        *(x, cos, sin, x.stride(0), x.stride(1), cos.stride(0)),
        HALF=head_dim // 2,
        PADDED_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=1,
    )


def check_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raises ValueError unless the three fit together."""
    if x.ndim != 3 or x.shape[2] % 2 != 0 or cos.shape != (x.shape[0], x.shape[2] // 2) or sin.shape != cos.shape:
        raise ValueError(f"cos {form(cos)} and sin {form(sin)} do not fit x {form(x)}")
    check_floats(x=x, cos=cos, sin=sin)
    if cos.stride() != sin.stride():
        raise ValueError(f"the strides of cos, {cos.stride()}, and sin, {sin.stride()}, differ")
