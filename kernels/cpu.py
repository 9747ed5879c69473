"""The operations in C++ for CPUs: `csrc/`, compiled at installation, called through ctypes on the tensors' addresses.

Each level of `kernels.build` is a whole set of operations; `CpuKernels` takes the best that this CPU runs, or the one
it is told. What an operation means is said in `kernels.reference`; here are the checks, and what is this backend's own:
the layout of the cache. A block holds, for each K/V head in turn,

    K: [head_dim / unit, block_size, unit]        V: [block_size / unit, head_dim, unit]

where a unit is what a dot product takes in at once: 2 bfloat16, or 1 value of another dtype. The tensors keep the
shape that they have everywhere, [num_blocks, block_size, num_kv_heads, head_dim], for those who move whole blocks.
"""

import ctypes
import os
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kernels import build
from kernels.batch_bounds import BatchBounds
from kernels.cpu_linear import ARGUMENTS, CpuLinear, packed_as_int8, packed_plainly
from kernels.forms import FLOATS, check_attention, check_dtypes, check_slots, form

# As csrc/elements.hpp numbers them.
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_MOST_BLOCK_SIZE = 1024  # what csrc/tile.hpp has room for

_THREADS = (c_void_p, c_int)
_SCORES = (c_float, c_int, c_float)
_PLACES = (*[c_void_p] * 3, c_int64, *[c_void_p] * 3)
_ATTENTION = (c_int, c_int, c_void_p, c_int64, *_PLACES, c_int64, *[c_int] * 6, *_SCORES, *_THREADS)
_RESHAPE = (c_int, c_int, c_void_p, c_int64, c_void_p, c_int64, *[c_void_p] * 3, *[c_int] * 5, *_THREADS)
_ROTATE = (c_int, c_int, c_void_p, c_int64, *[c_void_p] * 5, *[c_int] * 6, *_THREADS)
_NORM = (c_int, c_void_p, c_void_p, c_void_p, c_float, c_void_p, c_int64, c_int64, *_THREADS)
_GATE = (c_int, c_void_p, c_void_p, c_int64, c_int64, *_THREADS)


class KernelsUnavailable(Exception):
    """The library can not be used here, and why."""


def unit_of(dtype: torch.dtype) -> int:
    """Values of a cache of this dtype that a dot product takes in at once."""
    return 2 if dtype == torch.bfloat16 else 1


class CpuKernels:
    """The operations at one level, on as many threads as torch has when this is made.

    Args:
        level: one of `kernels.build.levels()`, or for tests of its `MODELS`; None for the best.

    Raises:
        KernelsUnavailable: there is no library, it is older than its sources, or the CPU does not run the level.
    """

    def __init__(self, level: str | None = None) -> None:
        library = _load_library()
        runnable = runnable_levels(library)
        self.level = level or runnable[-1]
        if self.level not in (*runnable, *build.MODELS):
            raise KernelsUnavailable(f"this CPU runs {', '.join(runnable)}, but not {self.level}")
        self._num_threads = torch.get_num_threads()
        self._region = _parallel_region()

        def function(operation: str, arguments: tuple[type, ...], result: type | None) -> Callable[..., int]:
            found = library[f"{operation}_{self.level}"]
            found.argtypes, found.restype = arguments, result
            return found

        self._paged_attention = function("paged_attention", _ATTENTION, c_int)
        self._reshape_and_cache = function("reshape_and_cache", _RESHAPE, c_int)
        self._rotate_and_cache = function("rotate_and_cache", _ROTATE, c_int)
        self._rms_norm = function("rms_norm", _NORM, None)
        self._silu_and_mul = function("silu_and_mul", _GATE, None)
        self._linear = function("linear", ARGUMENTS, c_int)

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lengths: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        bounds: BatchBounds | None = None,
    ) -> Tensor:
        """See `reference.paged_attention`; slots behind the context may hold anything, and indices are int32."""
        if (window is not None and window < 1) or (softcap is not None and softcap <= 0):
            raise ValueError(f"window {window} and softcap {softcap} are to be positive, or None")
        check_attention(q, k_cache, v_cache, block_tables, query_starts, context_lengths)
        num_tokens, num_heads, head_dim = q.shape
        num_blocks, block_size, num_kv_heads = _check_caches(k_cache, v_cache, head_dim)
        num_rows = context_lengths.shape[0]
        _check_tokens(q, "q")
        for name, indices in (("block_tables", block_tables), ("starts", query_starts), ("lengths", context_lengths)):
            if indices.dtype != torch.int32 or not indices.is_contiguous():
                raise ValueError(f"{name} {form(indices)} are not contiguous int32")
        out = torch.empty(q.shape, dtype=q.dtype)
        misfit = self._paged_attention(
            _DTYPES[q.dtype],
            _DTYPES[k_cache.dtype],
            q.data_ptr(),
            q.stride(0),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            block_tables.data_ptr(),
            block_tables.shape[1],
            query_starts.data_ptr(),
            context_lengths.data_ptr(),
            out.data_ptr(),
            num_tokens,
            num_rows,
            num_blocks,
            block_size,
            num_heads,
            num_kv_heads,
            head_dim,
            scale,
            window or 0,
            softcap or 0.0,
            self._region,
            self._num_threads,
        )
        if misfit == -1:
            return out
        if misfit == -2:
            raise MemoryError("no memory for the parts of a split context")
        if misfit == num_rows:
            raise ValueError(f"query_starts ends at {query_starts[-1]}, but q holds {num_tokens} tokens")
        raise ValueError(
            f"row {misfit} has {query_starts[misfit + 1] - query_starts[misfit]} queries, a context of "
            f"{context_lengths[misfit]} and {block_tables.shape[1]} blocks, of {num_blocks} in the cache"
        )

    def reshape_and_cache(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """See `reference.reshape_and_cache`."""
        num_tokens, num_heads, head_dim = k.shape
        num_blocks, block_size, num_kv_heads = _check_caches(k_cache, v_cache, head_dim)
        check_dtypes(k_cache, v_cache, k, v)
        if v.shape != k.shape or num_heads != num_kv_heads:
            raise ValueError(f"k {form(k)} and v {form(v)} do not fit together, or {num_kv_heads} K/V heads")
        _check_tokens(k, "k")
        _check_tokens(v, "v")
        _check_slots(slot_mapping, num_tokens)
        misfit = self._reshape_and_cache(
            _DTYPES[k.dtype],
            _DTYPES[k_cache.dtype],
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            slot_mapping.data_ptr(),
            num_tokens,
            num_blocks,
            block_size,
            num_kv_heads,
            head_dim,
            self._region,
            self._num_threads,
        )
        if misfit >= 0:
            raise ValueError(f"token {misfit} has slot {slot_mapping[misfit]} in {num_blocks} blocks of {block_size}")

    def rotate_and_cache(
        self, heads: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        """See `reference.rotate_and_cache`."""
        num_tokens, num_all_heads, head_dim = heads.shape
        num_blocks, block_size, num_kv_heads = _check_caches(k_cache, v_cache, head_dim)
        num_heads = num_all_heads - 2 * num_kv_heads
        check_dtypes(k_cache, v_cache, heads, cos, sin)
        _check_tokens(heads, "heads")
        _check_slots(slot_mapping, num_tokens)
        angles = (num_tokens, head_dim // 2)
        if cos.shape != angles or sin.shape != angles:
            raise ValueError(f"cos {form(cos)} and sin {form(sin)} do not fit heads {form(heads)}")
        if num_heads < 1 or head_dim % 2 != 0 or not (cos.is_contiguous() and sin.is_contiguous()):
            raise ValueError(f"heads {form(heads)} with {num_kv_heads} K/V heads, or strided cos and sin")
        misfit = self._rotate_and_cache(
            _DTYPES[heads.dtype],
            _DTYPES[k_cache.dtype],
            heads.data_ptr(),
            heads.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            slot_mapping.data_ptr(),
            num_tokens,
            num_blocks,
            block_size,
            num_heads,
            num_kv_heads,
            head_dim,
            self._region,
            self._num_threads,
        )
        if misfit >= 0:
            raise ValueError(f"token {misfit} has slot {slot_mapping[misfit]} in {num_blocks} blocks of {block_size}")
        return heads[:, :num_heads]

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """See `reference.rms_norm`; x is contiguous."""
        return self._normalize(x, None, weight, epsilon)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """See `reference.add_rms_norm`; x and residual are contiguous."""
        if x.shape != residual.shape or x.dtype != residual.dtype or not residual.is_contiguous():
            raise ValueError(f"x {form(x)} and residual {form(residual)} differ, or the latter is strided")
        return self._normalize(x, residual, weight, epsilon)

    def _normalize(self, x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        size = x.shape[-1]
        if weight.shape != (size,) or weight.dtype != x.dtype:
            raise ValueError(f"weight {form(weight)} does not fit x {form(x)}")
        _check_dense(x, "x")
        _check_dense(weight, "weight")
        out = torch.empty_like(x)
        self._rms_norm(
            _DTYPES[x.dtype],
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            epsilon,
            out.data_ptr(),
            x.numel() // size,
            size,
            self._region,
            self._num_threads,
        )
        return out

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """See `reference.silu_and_mul`; x is contiguous."""
        num_rows, size = x.shape
        if size % 2 != 0:
            raise ValueError(f"x {form(x)} has no two halves")
        _check_dense(x, "x")
        out = torch.empty(num_rows, size // 2, dtype=x.dtype)
        pointers = (_DTYPES[x.dtype], x.data_ptr(), out.data_ptr())
        self._silu_and_mul(*pointers, num_rows, size // 2, self._region, self._num_threads)
        return out

    def linear(self, weight: Tensor, bias: Tensor | None, *, widened: bool = False, gated: bool = False) -> CpuLinear:
        """See `reference.linear`."""
        unit = unit_of(weight.dtype)
        return self._pack(weight, bias, packed_plainly(weight, unit, gated=gated), widened=widened, gated=gated)

    def int8_linear(
        self, weight: Tensor, bias: Tensor | None, *, widened: bool = False, gated: bool = False
    ) -> CpuLinear:
        """See `reference.int8_linear`."""
        return self._pack(weight, bias, packed_as_int8(weight, gated=gated), widened=widened, gated=gated)

    def _pack(
        self, weight: Tensor, bias: Tensor | None, panels: tuple[Tensor, Tensor | None], *, widened: bool, gated: bool
    ) -> CpuLinear:
        run = partial(self._linear, _DTYPES[weight.dtype])
        return CpuLinear(
            run, weight, bias, *panels, widened=widened, gated=gated, threads=(self._region, self._num_threads)
        )


def pin_threads() -> bool:
    """Binds the OpenMP threads of the calling thread to a core each, if they are to have all cores of this process.

    Linux may leave two threads that wake each other in turn on one core for minutes while another one is idle. Each of
    the hundreds of barriers of a step then costs a switch between them: 110 us instead of 1.3, measured, and two to
    three times the time for a decode step. `OMP_PROC_BIND` would do, but would bind the process's other threads as
    well, since it is read before they are started.

    Returns:
        Whether they are bound.
    """
    if not hasattr(os, "sched_getaffinity"):
        return False
    cpus, region = sorted(os.sched_getaffinity(0)), _parallel_region()
    try:
        library = _load_library()
    except KernelsUnavailable:
        return False
    if region is None or torch.get_num_threads() != len(cpus) or "OMP_PROC_BIND" in os.environ:
        return False
    library.pin_threads.argtypes = (c_void_p, c_int, c_void_p)
    return library.pin_threads((c_int * len(cpus))(*cpus), len(cpus), region) == 0


def runnable_levels(library: ctypes.CDLL | None = None) -> list[str]:
    """The levels that the library has and this CPU runs, the best one last.

    Raises:
        KernelsUnavailable: there is no library.
    """
    library = library or _load_library()
    library.best_level.restype = ctypes.c_char_p
    names = list(build.levels())
    return names[: names.index(library.best_level().decode()) + 1]


def _load_library() -> ctypes.CDLL:
    if not build.LIBRARY.exists():
        raise KernelsUnavailable(f"{build.LIBRARY} was not built; `python -m kernels.build` says why")
    if not build.is_built_from(build.source_digest()):
        raise KernelsUnavailable(f"{build.LIBRARY} is older than its sources; `python -m kernels.build` renews it")
    try:
        return ctypes.CDLL(str(build.LIBRARY))
    except OSError as error:
        raise KernelsUnavailable(f"{build.LIBRARY} can not be loaded: {error}") from error


def _parallel_region() -> int | None:
    """The address of GOMP_parallel in the OpenMP runtime that torch has loaded; None (one thread) if it has none.

    See csrc/threads.hpp for what it is for.
    """
    folder = Path(torch.__file__).parent
    candidates = [*folder.glob("lib/lib*omp*"), *folder.parent.glob("torch.libs/lib*omp*"), None]
    for path in candidates:
        try:
            runtime = ctypes.CDLL(None if path is None else str(path))
            return ctypes.cast(runtime.GOMP_parallel, c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def _check_caches(k_cache: Tensor, v_cache: Tensor, head_dim: int) -> tuple[int, int, int]:
    """num_blocks, block_size and num_kv_heads."""
    num_blocks, block_size, num_kv_heads, cache_head_dim = k_cache.shape
    if v_cache.shape != k_cache.shape or cache_head_dim != head_dim:
        raise ValueError(f"k_cache {form(k_cache)} and v_cache {form(v_cache)} do not fit heads of {head_dim}")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()) or block_size > _MOST_BLOCK_SIZE:
        raise ValueError(f"k_cache {form(k_cache)} is strided, or has blocks of more than {_MOST_BLOCK_SIZE} tokens")
    if k_cache.dtype == torch.bfloat16 and (block_size % 2 or head_dim % 2):
        raise ValueError(f"blocks of {block_size} tokens with heads of {head_dim} are no pairs of bfloat16")
    return num_blocks, block_size, num_kv_heads


def _check_tokens(x: Tensor, name: str) -> None:
    """That each token's heads stand side by side, [num_tokens, num_heads, head_dim], in CPU memory."""
    together = x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)
    if x.device.type != "cpu" or not together:
        raise ValueError(f"{name} {form(x)} of strides {x.stride()} on {x.device}: heads are to stand side by side")


def _check_slots(slot_mapping: Tensor, num_tokens: int) -> None:
    check_slots(slot_mapping, num_tokens)
    if not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping {form(slot_mapping)} is not contiguous")


def _check_dense(x: Tensor, name: str) -> None:
    if x.dtype not in _DTYPES or x.device.type != "cpu" or not x.is_contiguous():
        raise ValueError(f"{name} {form(x)} is to be contiguous on the CPU, in one of {', '.join(map(str, FLOATS))}")
