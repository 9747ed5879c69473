"""Whether operations, and a model on them, compute what their torch twins do: small and odd shapes, a second or two.

The twins compute in float32 on what the operations are given: for K and V that is what the cache's dtype leaves of
them. Caches are never compared, since each implementation lays a block out in its own way: attention has to read from a
cache what was written to it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from kernels import reference
from kernels.batch_bounds import BatchBounds
from kernels.choice import Operations, torch_reference
from worker.cache_engine import CacheEngine, CacheShape
from worker.layers.attention import AttentionMetadata
from worker.models.llama import LlamaForCausalLM
from worker.models.model import Model

# The relative error, as vectors, that one operation and a whole model's logits may have.
OPERATION_TOLERANCES = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}
MODEL_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}

_HEAD_DIM = 64
_NUM_HEADS, _NUM_KV_HEADS = 6, 2
_MOST_ROWS, _MOST_TOKENS = 3, 66  # of a case, the latter in all contexts together


@dataclass(frozen=True, slots=True)
class Check:
    """What was checked, whether it is right, and how it came out."""

    name: str
    passed: bool
    outcome: str


@dataclass(frozen=True, slots=True)
class Setting:
    """What operations are checked with."""

    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    block_size: int
    generator: torch.Generator = field(default_factory=torch.Generator)

    @property
    def num_blocks(self) -> int:
        """Blocks enough for any case, and one more that no case fills."""
        return _MOST_TOKENS // self.block_size + _MOST_ROWS + 1

    def random(self, *shape: int) -> Tensor:
        """Normally distributed values in the dtype."""
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def cached(self, x: Tensor) -> Tensor:
        """What a cache keeps of values, in float32."""
        return x.to(self.cache_dtype).float()

    def integers(self, values: object, dtype: torch.dtype = torch.int32) -> Tensor:
        """Integers as a tensor on the device."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def caches(self, dtype: torch.dtype) -> Tensor:
        """K and V caches of one layer, of zeros."""
        shape = (2, self.num_blocks, self.block_size, _NUM_KV_HEADS, _HEAD_DIM)
        return torch.zeros(shape, dtype=dtype, device=self.device)


# The results of an operation and of its twin; and rows of (queries, tokens of context).
_Results = tuple[Tensor, Tensor]
_Rows = tuple[tuple[int, int], ...]


def check_operations(operations: Operations, setting: Setting) -> list[Check]:
    """One check or several of each operation that there is against its twin."""
    checks = []
    for name, what, compare in _cases():
        if getattr(operations, name) is None:
            continue
        setting.generator.manual_seed(0)
        label = f"{name}, {what}" if what else name
        try:
            found, expected = compare(operations, setting)
        except Exception as error:  # whatever a kernel dies of is the finding
            checks.append(Check(label, False, f"{type(error).__name__}: {str(error).strip() or 'without a word'}"))
            continue
        exact = not found.is_floating_point()
        checks.append(_judge(label, found, expected, 0 if exact else OPERATION_TOLERANCES[setting.dtype]))
    return checks


def checked_operations() -> set[str]:
    """The operations that have a check."""
    return {name for name, _, _ in _cases()}


def all_operations() -> set[str]:
    """The names of all operations."""
    return {each.name for each in fields(Operations) if callable(getattr(torch_reference(), each.name))}


def _judge(name: str, found: Tensor, expected: Tensor, tolerance: float) -> Check:
    if found.shape != expected.shape:
        return Check(name, False, f"gives {list(found.shape)} for {list(expected.shape)}")
    if not found.is_floating_point():
        num_wrong = int((found != expected).sum())
        return Check(name, num_wrong == 0, f"{num_wrong} of {found.numel()} differ" if num_wrong else "the same")
    found, expected = found.double(), expected.double()
    error = ((found - expected).norm() / expected.norm()).item()  # NaN if either has one, which does not pass
    return Check(name, error <= tolerance, f"off by {error:.1e}, {tolerance:.0e} allowed")


def _cases() -> Iterator[tuple[str, str, Callable[[Operations, Setting], _Results]]]:
    """For each case: the operation, what is special, and a function that returns its result and the twin's."""
    for name in ("linear", "int8_linear"):
        yield name, "5 x 72 to 33", partial(_linear, name=name)
        yield name, "5 x 72 to 2 x 48, gated", partial(_linear, name=name, gated=True)
    yield "int4_linear", "5 x 192 to 33", partial(_linear, name="int4_linear", num_inputs=192)
    yield "int4_linear", "5 x 192 to 2 x 48, gated", partial(_linear, name="int4_linear", num_inputs=192, gated=True)
    yield "rms_norm", "3 x 72", _rms_norm
    yield "add_rms_norm", "3 x 72", _add_rms_norm
    for approximate in ("none", "tanh"):
        yield "gelu", f"5 x 33, {approximate}", partial(_gelu, approximate=approximate)
    yield "rotate_and_cache", "queries", partial(_rotate_and_cache, is_cache=False)
    yield "rotate_and_cache", "keys and values", partial(_rotate_and_cache, is_cache=True)
    yield "paged_attention", "decodes", partial(_attend, rows=((1, 1), (1, 17), (1, 40)))
    yield "paged_attention", "a prompt", partial(_attend, rows=((37, 37),))
    yield "paged_attention", "chunks and decodes", partial(_attend, rows=((5, 21), (1, 30), (13, 13)))
    yield "paged_attention", "a window", partial(_attend, rows=((9, 25), (1, 33)), window=7)
    yield "paged_attention", "bounded scores", partial(_attend, rows=((9, 25), (1, 33)), softcap=3.0)
    yield "reshape_and_cache", "with padding", partial(_attend, rows=((11, 11), (1, 4)), is_padded=True)
    yield "copy_blocks", "bit for bit", _copy_blocks
    yield "swap_blocks", "out and in, bit for bit", _swap_blocks
    yield "normalizers_and_best", "normalizers", partial(_normalizers_and_best, is_best=False)
    yield "normalizers_and_best", "best tokens", partial(_normalizers_and_best, is_best=True)
    yield "sample_tokens", "greedy and drawn", partial(_sample_tokens, is_filtered=False)
    yield "sample_tokens", "filtered", partial(_sample_tokens, is_filtered=True)


def _widened(x: Tensor) -> Tensor:
    """A copy in float32, which an operation may overwrite with its result."""
    return x.to(torch.float32, copy=True)


def _linear(
    operations: Operations, setting: Setting, *, name: str, num_inputs: int = 72, gated: bool = False
) -> _Results:
    num_outputs = 96 if gated else 33
    x, bias = setting.random(5, num_inputs), setting.random(num_outputs)
    weight = setting.random(num_outputs, num_inputs)
    twin = getattr(reference, name)(weight.float(), bias.float(), gated=gated)
    return getattr(operations, name)(weight, bias, gated=gated)(x), twin(x.float())


def _rms_norm(operations: Operations, setting: Setting) -> _Results:
    x, weight = setting.random(3, 72), setting.random(72)
    return operations.rms_norm(x, weight, 1e-5), reference.rms_norm(x.float(), weight.float(), 1e-5)


def _add_rms_norm(operations: Operations, setting: Setting) -> _Results:
    x, residual, weight = setting.random(3, 72), setting.random(3, 72), setting.random(72)
    expected_sum = _widened(residual)
    expected = reference.add_rms_norm(x.float(), expected_sum, weight.float(), 1e-5)
    found = operations.add_rms_norm(x, residual, weight, 1e-5)
    return torch.stack([found, residual]), torch.stack([expected, expected_sum])


def _gelu(operations: Operations, setting: Setting, *, approximate: str) -> _Results:
    x = setting.random(5, 33)
    return operations.gelu(x, approximate), reference.gelu(x.float(), approximate)


def _rotate_and_cache(operations: Operations, setting: Setting, *, is_cache: bool) -> _Results:
    """The rotated queries; or, if `is_cache`, what other queries find in the cache that was written with them."""
    num_tokens = 19
    heads = setting.random(num_tokens, _NUM_HEADS + 2 * _NUM_KV_HEADS, _HEAD_DIM)
    angles = torch.rand(num_tokens, _HEAD_DIM // 2, generator=setting.generator) * 6
    cos, sin = (table.to(setting.device, setting.dtype) for table in (angles.cos(), angles.sin()))
    places = _Places.of(setting, ((num_tokens, num_tokens),))
    caches, wide_caches = setting.caches(setting.cache_dtype), setting.caches(torch.float32)
    wide = _widened(heads)
    queries = operations.rotate_and_cache(heads, cos, sin, caches[0], caches[1], places.slots)
    wide_queries = reference.rotate_and_cache(
        wide, cos.float(), sin.float(), wide_caches[0], wide_caches[1], places.slots
    )
    if not is_cache:
        return queries, wide_queries
    wide_caches = setting.cached(wide_caches)
    probe = setting.random(num_tokens, _NUM_HEADS, _HEAD_DIM)
    return places.attend(operations, probe, caches, wide_caches)


@dataclass(frozen=True, slots=True)
class _Places:
    """Rows of (queries, tokens of context) in a cache, their blocks in random order.

    Attributes:
        slots: [tokens of all contexts] int64.
        queries: [num_queries] int64, indices of those tokens that are queries.
    """

    slots: Tensor
    queries: Tensor
    metadata: tuple[Tensor, Tensor, Tensor]
    bounds: BatchBounds

    @classmethod
    def of(cls, setting: Setting, rows: _Rows) -> "_Places":
        """Places for such rows; together they have to fit into the cache."""
        blocks = iter(torch.randperm(setting.num_blocks, generator=setting.generator).tolist())
        size = setting.block_size
        tables = [[next(blocks) for _ in range(-(-context // size))] for _, context in rows]
        slots: list[int] = []
        queries: list[int] = []
        starts = [0]
        for (num_queries, context), table in zip(rows, tables, strict=True):
            queries += range(len(slots) + context - num_queries, len(slots) + context)
            slots += [table[position // size] * size + position % size for position in range(context)]
            starts.append(starts[-1] + num_queries)
        width = max(map(len, tables))
        contexts = [context for _, context in rows]
        return cls(
            setting.integers(slots, torch.int64),
            setting.integers(queries, torch.int64),
            (
                setting.integers([table + table[-1:] * (width - len(table)) for table in tables]),
                setting.integers(starts),
                setting.integers(contexts),
            ),
            BatchBounds(longest_context=max(contexts), total_context=sum(contexts)),
        )

    def attend(
        self,
        operations: Operations,
        q: Tensor,
        caches: Tensor,
        wide_caches: Tensor,
        window: int | None = None,
        softcap: float | None = None,
    ) -> _Results:
        """Attention over one cache, and the twin's over the other."""
        scale = 2 * _HEAD_DIM**-0.5  # twice the usual, so that scores differ more
        others = (*self.metadata, scale, window, softcap)
        found = operations.paged_attention(q, caches[0], caches[1], *others, self.bounds)
        return found, reference.paged_attention(q.float(), wide_caches[0], wide_caches[1], *others)


def _attend(
    operations: Operations,
    setting: Setting,
    *,
    rows: _Rows,
    window: int | None = None,
    softcap: float | None = None,
    is_padded: bool = False,
) -> _Results:
    places = _Places.of(setting, rows)
    k, v = (setting.random(len(places.slots), _NUM_KV_HEADS, _HEAD_DIM) for _ in range(2))
    caches, wide_caches = setting.caches(setting.cache_dtype), setting.caches(torch.float32)
    written = places.slots
    if is_padded:  # the second token of a context is not written: its slot stays as it is
        written = written.clone()
        written[1] = -1
    operations.reshape_and_cache(k, v, caches[0], caches[1], written)
    reference.reshape_and_cache(setting.cached(k), setting.cached(v), wide_caches[0], wide_caches[1], written)
    q = setting.random(len(places.queries), _NUM_HEADS, _HEAD_DIM)
    return places.attend(operations, q, caches, wide_caches, window, softcap)


def _pool(setting: Setting, num_blocks: int, *, is_random: bool, device: torch.device) -> Tensor:
    shape = (3, 2, num_blocks, setting.block_size, _NUM_KV_HEADS, _HEAD_DIM)
    pool = torch.zeros(shape, dtype=setting.cache_dtype, device=device)
    if is_random:
        pool.copy_(torch.randn(shape, generator=setting.generator))
    return pool


def _bits(pool: Tensor) -> Tensor:
    return pool.cpu().view(torch.uint8)


def _copy_blocks(operations: Operations, setting: Setting) -> _Results:
    pool = _pool(setting, 6, is_random=True, device=setting.device)
    twin = pool.clone()
    pairs = torch.tensor([[0, 3], [3, 5], [2, 1]])  # one block is both read and written
    operations.copy_blocks(pool, pairs)
    reference.copy_blocks(twin, pairs)
    return _bits(pool), _bits(twin)


def _swap_blocks(operations: Operations, setting: Setting) -> _Results:
    pool = _pool(setting, 6, is_random=True, device=setting.device)
    host = _pool(setting, 4, is_random=False, device=torch.device("cpu"))
    host = host.pin_memory() if setting.device.type == "cuda" else host
    twin, twin_host = pool.clone(), host.clone()
    for source, destination, twin_source, twin_destination, pairs in (
        (pool, host, twin, twin_host, [[5, 0], [1, 3]]),
        (host, pool, twin_host, twin, [[3, 2], [0, 4]]),
    ):
        operations.swap_blocks(source, destination, setting.integers(pairs, torch.int64))
        reference.swap_blocks(twin_source, twin_destination, torch.tensor(pairs))
    if setting.device.type == "cuda":
        torch.cuda.synchronize(setting.device)
    return _bits(pool), _bits(twin)


def _normalizers_and_best(operations: Operations, setting: Setting, *, is_best: bool) -> _Results:
    logits = torch.randn(5, 211, generator=setting.generator).mul_(3)
    logits[1, 20:] = -torch.inf
    logits[2, 7] = logits[2, 90] = 20  # they tie
    found, expected = operations.normalizers_and_best(logits.to(setting.device)), reference.normalizers_and_best(logits)
    return found[is_best].cpu(), expected[is_best]


def _sample_tokens(operations: Operations, setting: Setting, *, is_filtered: bool) -> _Results:
    num_rows, size = 7, 211
    logits = torch.randn(num_rows, size, generator=setting.generator).mul_(3)
    rows = torch.arange(num_rows)
    temperatures = torch.tensor([0, 1, 0.7, 1.3, 1, 0.2, 1])
    filters = None
    if is_filtered:
        filters = (
            torch.tensor([size, 5, size, size, 40, size, 1]),
            torch.tensor([1, 1, 0.8, 1, 0.9, 1, 1.0]),
            torch.tensor([0, 0, 0, 0.1, 0.01, 0, 0.0]),
            torch.tensor([1, 1, 1, 1, 1, 0.5, 1.0]),
        )
    columns = (temperatures, rows * 977, rows + 3, rows % 2)
    expected = reference.sample_tokens(logits, *columns, filters)
    temperatures, seeds, positions, indexes = (column.to(setting.device) for column in columns)
    there = None if filters is None else tuple(column.to(setting.device) for column in filters)
    found = operations.sample_tokens(logits.to(setting.device), temperatures, seeds, positions, indexes, there)
    return found.cpu(), expected


class Switch:
    """Operations that are those of `current`, which may be changed: so one model runs on two implementations.

    Args:
        first: `current` at first.
    """

    def __init__(self, first: Operations) -> None:
        self.current = first
        names = all_operations()

        def forward(name: str) -> Callable[..., object]:
            return lambda *arguments, **options: getattr(self.current, name)(*arguments, **options)

        others = {each.name: getattr(first, each.name) for each in fields(Operations) if each.name not in names}
        self.operations = Operations(**{name: forward(name) for name in names}, **others)  # type: ignore[arg-type]


@torch.inference_mode()
def check_model(model: Model, switch: Switch, shape: CacheShape, device: torch.device, dtype: torch.dtype) -> Check:
    """A forward pass on the paged cache against one with the same weights on the torch twins, each on its own cache.

    Args:
        model: built on `switch`.
        switch: set to the implementation in use.
        shape: of a block.
        device: of the model.
        dtype: of the model.
    """
    in_use = switch.current
    found = _logits(model, shape, device, in_use)
    switch.current = torch_reference()
    try:
        with _one_by_one(model):
            expected = _logits(model, shape, device, switch.current)
    finally:
        switch.current = in_use
    return _judge("forward in two chunks and a decode", found, expected, MODEL_TOLERANCES[dtype])


@contextmanager
def _one_by_one(model: Model) -> Iterator[None]:
    """Runs layers one by one, without the one call of all layers if the model has it: that bypasses the switch."""
    if not isinstance(model, LlamaForCausalLM):
        yield
        return
    at_once, model.layers_at_once = model.layers_at_once, None
    try:
        yield
    finally:
        model.layers_at_once = at_once


def _logits(model: Model, shape: CacheShape, device: torch.device, operations: Operations) -> Tensor:
    """Logits after each part of a sequence, [3, vocabulary_size]."""
    length = min(38, model.config.context_length)
    ends = [0, length // 2, length - 1, length]
    num_blocks = -(-length // shape.block_size)
    cache = CacheEngine(shape, num_blocks, 0, device, operations)
    token_ids = torch.arange(length, device=device) * 7 % model.config.vocabulary_size
    table = torch.arange(num_blocks, dtype=torch.int32, device=device).flip(0)
    logits = []
    for start, end in pairwise(ends):
        positions = torch.arange(start, end, device=device)
        metadata = AttentionMetadata(
            slot_mapping=table[positions // shape.block_size].long() * shape.block_size + positions % shape.block_size,
            block_tables=table[None],
            query_starts=torch.tensor([0, end - start], dtype=torch.int32, device=device),
            context_lengths=torch.tensor([end], dtype=torch.int32, device=device),
            bounds=BatchBounds(longest_context=end, total_context=end),
        )
        hidden = model(token_ids[start:end], positions, cache.layers, metadata)
        logits.append(model.head(hidden[-1:]).clone())
    return torch.cat(logits)
