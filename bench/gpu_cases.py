"""What `bench.gpu` measures on a GPU: the Triton kernels, beside them torch on contiguous K/V, and the card's ceilings.

A case is a function that sets its tensors up and gives what to time and how much it moves or computes. Sizes are those
of Llama 3 8B in bfloat16: 32 query heads and 8 K/V heads of 128, hidden size 4096, MLP 14336, vocabulary 128256.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.activation import silu_and_mul
from kernels.batch_bounds import BatchBounds
from kernels.copy_blocks import copy_blocks, swap_blocks
from kernels.paged_attention import paged_attention
from kernels.reshape_and_cache import reshape_and_cache, rotate_and_cache
from kernels.rms_norm import add_rms_norm
from kernels.sampling import sample_tokens

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
HIDDEN, MLP, VOCABULARY, NUM_LAYERS = 4096, 14336, 128256, 32
TOKEN_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 2  # K and V of one layer
DTYPE = torch.bfloat16
CUDA = torch.device("cuda")

AttentionTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Work:
    """What is timed.

    Attributes:
        run: does it once, on the current stream.
        bytes_moved: read and written, as the operation needs it at least; 0 where computing is what counts.
        operations: floating-point, as the operation needs them at least; 0 where memory is what counts.
        beside: the same by torch on contiguous tensors, None where there is nothing to compare with.
        recorded: time it as a CUDA graph, without the host's share; what copies from the host's memory cannot be.
    """

    run: Callable[[], object]
    bytes_moved: int = 0
    operations: int = 0
    beside: Callable[[], object] | None = None
    recorded: bool = True


@dataclass(frozen=True, slots=True)
class Timed:
    """What a case has timed itself, since it is not a single launch.

    Attributes:
        time_us: of one unit of what it counts.
        host_us: that the host takes to launch one, as far as it is known.
        bytes_moved: as in `Work`, by one unit.
        tokens: that one gives; 0 where memory is what counts.
    """

    time_us: float
    host_us: float = 0.0
    bytes_moved: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the results.

    Attributes:
        group: of cases in one table.
        name: what distinguishes it there.
        make: sets it up on the GPU; returns what to time, or what it has timed.
        ceiling: which ceiling its rate is a share of: "copy", "matmul", "to_device", "to_host"; None: none.
    """

    group: str
    name: str
    make: Callable[[], Work | Timed]
    ceiling: str | None = None


def ceilings() -> Iterator[Case]:
    """What the card and its link do at best."""
    yield Case("ceiling", "copy", _device_copy)
    yield Case("ceiling", "matmul", _matmul)
    yield Case("ceiling", "to_device", partial(_link_copy, to_device=True))
    yield Case("ceiling", "to_host", partial(_link_copy, to_device=False))


def cases(most_kv_bytes: int) -> Iterator[Case]:
    """Everything else; decode batches whose K and V of a layer need more than `most_kv_bytes` are left out."""
    for context in (512, 4096, 32768):
        for batch in (1, 8, 32, 128, 256):
            if batch * context * TOKEN_BYTES <= most_kv_bytes:
                yield Case("decode", f"batch {batch} x {context}", partial(_decode, [context] * batch), "copy")
    uneven = [32768] + [1024] * 63
    if sum(uneven) * TOKEN_BYTES <= most_kv_bytes:
        yield Case("decode", "1 x 32768 among 63 x 1024", partial(_decode, uneven), "copy")
    for rows in ([(2048, 2048)], [(8192, 8192)], [(1024, 1024)] * 8, [(512, 16384)], [(2048, 32768)]):
        queries, context = rows[0]
        yield Case("prefill", f"{len(rows)} x {queries} of {context}", partial(_prefill, rows), "matmul")
    mixed = [(512, 4096)] + [(1, 4096)] * 64
    yield Case("prefill", "512 of 4096 with 64 decodes of 4096", partial(_prefill, mixed), "matmul")
    for num_tokens in (1, 256, 8192):
        yield Case("reshape_and_cache", f"{num_tokens} tokens", partial(_reshape_and_cache, num_tokens), "copy")
        yield Case("rotate_and_cache", f"{num_tokens} tokens", partial(_rotate_and_cache, num_tokens), "copy")
    for num_blocks in (1, 16, 256):
        yield Case("copy_blocks", f"{num_blocks} blocks", partial(_copy_blocks, num_blocks), "copy")
        yield Case("swap out", f"{num_blocks} blocks", partial(_swap_blocks, num_blocks, out=True), "to_host")
        yield Case("swap in", f"{num_blocks} blocks", partial(_swap_blocks, num_blocks, out=False), "to_device")
    for num_tokens in (32, 8192):
        yield Case("add_rms_norm", f"{num_tokens} tokens", partial(_add_rms_norm, num_tokens), "copy")
        yield Case("silu_and_mul", f"{num_tokens} tokens", partial(_silu_and_mul, num_tokens), "copy")
    for batch in (1, 32, 256):
        yield Case("sampling", f"batch {batch}", partial(_sampling, batch, filtered=False), "copy")
        yield Case("sampling", f"batch {batch}, top-k and top-p", partial(_sampling, batch, filtered=True), "copy")


def _device_copy() -> Work:
    # By a kernel: the driver's own copy reached two thirds of that on an H200.
    source = torch.ones(1 << 28, dtype=torch.float32, device=CUDA)
    target = torch.empty_like(source)
    return Work(lambda: torch.neg(source, out=target), bytes_moved=2 * source.nbytes)


def _matmul() -> Work:
    a, b = (torch.randn(8192, 8192, dtype=DTYPE, device=CUDA) for _ in range(2))
    out = torch.empty_like(a)
    return Work(lambda: torch.matmul(a, b, out=out), operations=2 * 8192**3)


def _link_copy(*, to_device: bool) -> Work:
    on_host = torch.ones(256 << 20, dtype=torch.uint8, pin_memory=True)
    on_device = torch.ones(256 << 20, dtype=torch.uint8, device=CUDA)
    target, source = (on_device, on_host) if to_device else (on_host, on_device)
    return Work(lambda: target.copy_(source, non_blocking=True), bytes_moved=source.nbytes, recorded=False)


def _paged(rows: list[tuple[int, int]]) -> tuple[AttentionTensors, BatchBounds]:
    """Arguments of `paged_attention` up to the lengths, for rows of (queries, context), over blocks in random order."""
    widths = [-(-context // BLOCK_SIZE) for _, context in rows]
    num_blocks = sum(widths)
    k_cache, v_cache = torch.randn(2, num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=DTYPE, device=CUDA)
    shuffled = torch.randperm(num_blocks, device=CUDA).int()
    tables = torch.zeros(len(rows), max(widths), dtype=torch.int32, device=CUDA)
    taken = 0
    for row, width in enumerate(widths):
        tables[row, :width] = shuffled[taken : taken + width]
        taken += width
    queries, contexts = [row[0] for row in rows], [row[1] for row in rows]
    q = torch.randn(sum(queries), NUM_HEADS, HEAD_DIM, dtype=DTYPE, device=CUDA)
    starts = torch.tensor([0, *queries]).cumsum(0).int().to(CUDA)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=CUDA)
    bounds = BatchBounds(max(contexts), sum(contexts), min(queries), max(queries))
    return (q, k_cache, v_cache, tables, starts, lengths), bounds


def _contiguous(cache: Tensor, batch: int, context: int) -> Tensor:
    """The same memory as if it were [batch, num_kv_heads, context, head_dim] without blocks."""
    return (
        cache.view(-1, NUM_KV_HEADS, HEAD_DIM)[: batch * context].view(batch, context, NUM_KV_HEADS, -1).transpose(1, 2)
    )


def _decode(contexts: list[int]) -> Work:
    tensors, bounds = _paged([(1, context) for context in contexts])
    q, k_cache, v_cache = tensors[:3]
    beside = None
    if min(contexts) == max(contexts):
        k, v = (_contiguous(cache, len(contexts), contexts[0]) for cache in (k_cache, v_cache))
        beside = partial(scaled_dot_product_attention, q[:, :, None], k, v, scale=HEAD_DIM**-0.5, enable_gqa=True)
    run = partial(paged_attention, *tensors, HEAD_DIM**-0.5, bounds=bounds)
    return Work(run, bytes_moved=sum(contexts) * TOKEN_BYTES + 2 * q.nbytes, beside=beside)


def _prefill(rows: list[tuple[int, int]]) -> Work:
    tensors, bounds = _paged(rows)
    q, k_cache, v_cache = tensors[:3]
    beside = None
    if len(set(rows)) == 1 and rows[0][0] == rows[0][1]:
        batch, length = len(rows), rows[0][0]
        k, v = (_contiguous(cache, batch, length) for cache in (k_cache, v_cache))
        dense = q.view(batch, length, NUM_HEADS, HEAD_DIM).transpose(1, 2)
        beside = partial(
            scaled_dot_product_attention, dense, k, v, is_causal=True, scale=HEAD_DIM**-0.5, enable_gqa=True
        )
    seen = sum(queries * (2 * context - queries + 1) // 2 for queries, context in rows)
    run = partial(paged_attention, *tensors, HEAD_DIM**-0.5, bounds=bounds)
    return Work(run, operations=4 * seen * NUM_HEADS * HEAD_DIM, beside=beside)


def _cache_write(num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A fused projection, the two caches and slots in random order."""
    heads = torch.randn(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, dtype=DTYPE, device=CUDA)
    caches = torch.zeros(2, 1024, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=DTYPE, device=CUDA)
    return heads, caches[0], caches[1], torch.randperm(1024 * BLOCK_SIZE, device=CUDA)[:num_tokens]


def _reshape_and_cache(num_tokens: int) -> Work:
    heads, k_cache, v_cache, slots = _cache_write(num_tokens)
    k, v = heads[:, NUM_HEADS:].split(NUM_KV_HEADS, dim=1)
    run = partial(reshape_and_cache, k, v, k_cache, v_cache, slots)
    return Work(run, bytes_moved=2 * num_tokens * TOKEN_BYTES)


def _rotate_and_cache(num_tokens: int) -> Work:
    heads, k_cache, v_cache, slots = _cache_write(num_tokens)
    cos, sin = torch.randn(2, num_tokens, HEAD_DIM // 2, dtype=DTYPE, device=CUDA)
    run = partial(rotate_and_cache, heads, cos, sin, k_cache, v_cache, slots)
    rotated = (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM * DTYPE.itemsize
    return Work(run, bytes_moved=num_tokens * (2 * rotated + 3 * TOKEN_BYTES // 2) + cos.nbytes + sin.nbytes)


def _pools(num_blocks: int, *, on_host: bool) -> tuple[Tensor, Tensor, int]:
    """A pool on the GPU, one to swap to or the first again, and the bytes of `num_blocks` blocks in all layers."""
    shape = (NUM_LAYERS, 2, 2 * num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    pool = torch.ones(shape, dtype=DTYPE, device=CUDA)
    other = torch.ones(shape, dtype=DTYPE, pin_memory=True) if on_host else pool
    return pool, other, num_blocks * BLOCK_SIZE * TOKEN_BYTES * NUM_LAYERS


def _copy_blocks(num_blocks: int) -> Work:
    pool, _, moved = _pools(num_blocks, on_host=False)
    order = torch.randperm(2 * num_blocks)
    pairs = torch.stack([order[:num_blocks], order[num_blocks:]], 1)
    return Work(partial(copy_blocks, pool, pairs), bytes_moved=2 * moved, recorded=False)


def _swap_blocks(num_blocks: int, *, out: bool) -> Work:
    pool, host_pool, moved = _pools(num_blocks, on_host=True)
    order = torch.randperm(2 * num_blocks)
    pairs = torch.stack([order[:num_blocks], order[num_blocks:]], 1)
    pools = (pool, host_pool) if out else (host_pool, pool)
    return Work(partial(swap_blocks, *pools, pairs), bytes_moved=moved, recorded=False)


def _add_rms_norm(num_tokens: int) -> Work:
    x, residual = torch.randn(2, num_tokens, HIDDEN, dtype=DTYPE, device=CUDA)
    weight = torch.ones(HIDDEN, dtype=DTYPE, device=CUDA)
    return Work(partial(add_rms_norm, x, residual, weight, 1e-5), bytes_moved=4 * x.nbytes)


def _silu_and_mul(num_tokens: int) -> Work:
    x = torch.randn(num_tokens, 2 * MLP, dtype=DTYPE, device=CUDA)
    return Work(partial(silu_and_mul, x), bytes_moved=3 * x.nbytes // 2)


def _sampling(batch: int, *, filtered: bool) -> Work:
    logits = 3 * torch.randn(batch, VOCABULARY, device=CUDA)
    numbers = torch.arange(batch, device=CUDA)
    heat = torch.ones(batch, device=CUDA)
    filters = (torch.full_like(numbers, 50), 0.9 * heat, 0.0 * heat, heat) if filtered else None

    def sort_and_draw() -> Tensor:
        return logits.softmax(-1).sort(descending=True).values.cumsum(-1)

    run = partial(sample_tokens, logits, heat, numbers, numbers, numbers, filters)
    return Work(run, bytes_moved=logits.nbytes, beside=sort_and_draw if filtered else None)
