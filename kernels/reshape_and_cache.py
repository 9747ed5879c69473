"""Writing the K and V of a step's tokens into the blocks of the paged cache (Kwon et al., SOSP'23, arXiv:2309.06180).

One launch for K and V: one program per token, which copies all its K/V heads. `rotate_and_cache` instead has one
program per up to 16 heads of a token, and rotates queries and keys on the way (RoFormer: Su et al. 2021,
arXiv:2104.09864), so that a projection is read and written once between the matrix product and attention.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.forms import check_dense, check_dtypes, check_slots, form
from kernels.rotary_embedding import check_rotary, rotated

_HEADS = 16  # heads of a token that a program takes


@triton.jit
def _reshape_and_cache_kernel(
    k: tl.tensor,
    v: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slot_mapping: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    cache_head_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
    values = tl.arange(0, PADDED)
    head, dim = values // HEAD_DIM, values % HEAD_DIM
    there = values < NUM_HEADS * HEAD_DIM
    k_values = tl.load(k + token * k_token_stride + head * k_head_stride + dim, mask=there)
    v_values = tl.load(v + token * v_token_stride + head * v_head_stride + dim, mask=there)
    places = place + head * cache_head_stride + dim
    tl.store(k_cache + places, k_values.to(k_cache.dtype.element_ty), mask=there)
    tl.store(v_cache + places, v_values.to(v_cache.dtype.element_ty), mask=there)


def reshape_and_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes each token's K and V into its slot, block_id * block_size + offset.

    Args:
        k: [num_tokens, num_kv_heads, head_dim]; may be a strided view, dense in head_dim.
        v: like `k`, except for strides.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim], perhaps of another dtype; written in place.
        v_cache: like `k_cache`, including strides.
        slot_mapping: [num_tokens] int64; -1 skips the token (padding). No slot occurs twice.
    """
    if k.shape != v.shape or k.ndim != 3 or k.shape[1:] != k_cache.shape[2:]:
        raise ValueError(f"k {form(k)}, v {form(v)} and k_cache {form(k_cache)} do not fit together")
    check_dtypes(k_cache, v_cache, k, v)
    check_dense(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    _check_slots(k_cache, v_cache, slot_mapping, len(k))
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    _reshape_and_cache_kernel[(num_tokens,)](
        *(k, v, k_cache, v_cache, slot_mapping),
        *(k.stride(0), k.stride(1), v.stride(0), v.stride(1), *k_cache.stride()[:3]),
        BLOCK_SIZE=k_cache.shape[1],
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PADDED=triton.next_power_of_2(num_heads * head_dim),
    )


@triton.jit
def _rotate_and_cache_kernel(
    heads: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slot_mapping: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    cos_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    cache_head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    token = tl.program_id(1).to(tl.int64)
    head = (tl.program_id(0) * HEADS + tl.arange(0, HEADS))[:, None]
    dims = tl.arange(0, PADDED_HALF)[None, :]
    there = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (dims < HALF)
    source = heads + token * token_stride + head * head_stride + dims
    first = tl.load(source, mask=there)
    second = tl.load(source + HALF, mask=there)
    cosine = tl.load(cos + token * cos_stride + dims, mask=dims < HALF)
    sine = tl.load(sin + token * cos_stride + dims, mask=dims < HALF)
    turned_first, turned_second = rotated(first, second, cosine, sine)
    is_turned = there & (head < NUM_HEADS + NUM_KV_HEADS)
    tl.store(source, turned_first, mask=is_turned)
    tl.store(source + HALF, turned_second, mask=is_turned)

    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride + dims
        k_place = k_cache + place + (head - NUM_HEADS) * cache_head_stride
        is_key = is_turned & (head >= NUM_HEADS)
        tl.store(k_place, turned_first.to(k_cache.dtype.element_ty), mask=is_key)
        tl.store(k_place + HALF, turned_second.to(k_cache.dtype.element_ty), mask=is_key)
        v_place = v_cache + place + (head - NUM_HEADS - NUM_KV_HEADS) * cache_head_stride
        is_value = there & (head >= NUM_HEADS + NUM_KV_HEADS)
        tl.store(v_place, first.to(v_cache.dtype.element_ty), mask=is_value)
        tl.store(v_place + HALF, second.to(v_cache.dtype.element_ty), mask=is_value)


def rotate_and_cache(
    heads: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """Splits a fused projection: rotates queries and keys in place, and writes keys and values into their slots.

    Args:
        heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: each token's queries, keys and values.
        cos: [num_tokens, head_dim / 2], as in `rotary_embedding`.
        sin: like `cos`.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim], perhaps of another dtype; written in place.
        v_cache: like `k_cache`, including strides.
        slot_mapping: as in `reshape_and_cache`.

    Returns:
        The rotated queries, [num_tokens, num_heads, head_dim]: a view of `heads`.
    """
    num_kv_heads = k_cache.shape[2]
    num_heads = heads.shape[1] - 2 * num_kv_heads
    if num_heads < 1:
        raise ValueError(f"heads {form(heads)} hold no queries beside {num_kv_heads} K/V heads")
    check_rotary(heads, cos, sin)
    if heads.shape[2] != k_cache.shape[3]:
        raise ValueError(f"heads {form(heads)} and k_cache {form(k_cache)} do not fit together")
    check_dtypes(k_cache, v_cache, heads)
    check_dense(heads=heads, k_cache=k_cache, v_cache=v_cache)
    _check_slots(k_cache, v_cache, slot_mapping, len(heads))
    num_tokens, _, head_dim = heads.shape
    if num_tokens > 0:
        _rotate_and_cache_kernel[(triton.cdiv(heads.shape[1], _HEADS), num_tokens)](
            *(heads, cos, sin, k_cache, v_cache, slot_mapping),
            *(heads.stride(0), heads.stride(1), cos.stride(0), *k_cache.stride()[:3]),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=head_dim // 2,
            PADDED_HALF=triton.next_power_of_2(head_dim // 2),
            BLOCK_SIZE=k_cache.shape[1],
            HEADS=_HEADS,
        )
    return heads[:, :num_heads]


def _check_slots(k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, num_tokens: int) -> None:
    if k_cache.ndim != 4 or k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride():
        raise ValueError(f"k_cache {form(k_cache)} and v_cache {form(v_cache)} differ in shape or strides")
    check_slots(slot_mapping, num_tokens)
