"""The inner loop of paged attention: a tile of queries attends to a range of tokens, a tile of K and V at a time.

Online softmax: Milakov & Gimelshein 2018, arXiv:1805.02867, Alg. 3; in tiles: FlashAttention-2, Dao 2023,
arXiv:2307.08691, Alg. 1. Tokens are looked up in the block table one by one, so a tile may begin anywhere, and may be
longer or shorter than a block. If q and the cache differ in dtype, both are widened to float32.
"""

import triton
import triton.language as tl


@triton.jit
def attend_tiles(
    accumulator: tl.tensor,  # [M, D] float32: the weighted sum of V so far
    maximum: tl.tensor,  # [M] float32: the largest score so far, to the base 2
    normalizer: tl.tensor,  # [M] float32: the sum of the weights so far
    q: tl.tensor,  # [M, D]
    positions: tl.tensor,  # [M], of the queries in their sequence; for CAUSAL and WINDOW
    k_head: tl.tensor,  # pointer to slot 0 of the K/V head
    v_head: tl.tensor,
    table: tl.tensor,  # pointer to the row's block table
    begin: tl.tensor,  # the range of tokens
    end: tl.tensor,
    score_scale: tl.tensor,  # makes a product a score to the base 2, or, for CAPPED, tanh's argument
    cap: tl.tensor,  # for CAPPED, the largest score to the base 2
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,  # D, a power of two
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,  # some query may see only some of the tokens
    RAGGED: tl.constexpr,  # `end` may lie inside a tile
    WINDOW: tl.constexpr,  # tokens that a query sees, including its own; 0: all
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    if q.dtype != k_head.dtype.element_ty:
        q = q.to(tl.float32)
    offsets = tl.arange(0, TILE)
    dims = tl.arange(0, PADDED_DIM)
    for start in tl.range(begin, end, TILE):
        # -- load K and V; nothing past `end` is read: 0 * NaN would be NaN --
        tokens = start + offsets
        inside = tokens < end
        if RAGGED:
            blocks = tl.load(table + tokens // BLOCK_SIZE, mask=inside, other=0)
            present = inside[:, None] & (dims < HEAD_DIM)[None, :]
        else:
            blocks = tl.load(table + tokens // BLOCK_SIZE)
            present = (dims < HEAD_DIM)[None, :]
        slots = blocks.to(tl.int64) * block_stride + (tokens % BLOCK_SIZE) * token_stride
        addresses = slots[:, None] + dims[None, :]
        if RAGGED or HEAD_DIM != PADDED_DIM:
            k = tl.load(k_head + addresses, mask=present, other=0.0)  # [N, D]
            v = tl.load(v_head + addresses, mask=present, other=0.0)
        else:
            k = tl.load(k_head + addresses)
            v = tl.load(v_head + addresses)

        k, v = k.to(q.dtype), v.to(q.dtype)

        # -- scores --
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * score_scale  # [M, N]
        if CAPPED:
            scores = cap * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)  # tanh
        if RAGGED:
            scores = tl.where(inside[None, :], scores, float("-inf"))
        if CAUSAL:
            scores = tl.where(tokens[None, :] <= positions[:, None], scores, float("-inf"))
        if WINDOW > 0:
            scores = tl.where(tokens[None, :] > positions[:, None] - WINDOW, scores, float("-inf"))

        # -- update maximum, normalizer and accumulator --
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        base = new_maximum
        if CAUSAL or WINDOW > 0:
            base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a query that has seen nothing yet
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(maximum - base)
        normalizer = normalizer * decay + tl.sum(weights, 1)
        accumulator = accumulator * decay[:, None]
        accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision=PRECISION)
        maximum = new_maximum
    return accumulator, maximum, normalizer
