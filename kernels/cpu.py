"""The operations in C++ for CPUs: `csrc/`, compiled at installation, called through ctypes on the tensors' addresses.

Each level of `kernels.build` is a full set of operations; `CpuKernels` takes the best level that this CPU runs, or the
one it is told. `kernels.reference` says what each operation means; here are the checks, and what is specific to this
backend: the layout of the cache. A block holds, for each K/V head in turn,

    K: [head_dim / unit, block_size, unit]        V: [block_size / unit, head_dim, unit]

where a unit is what a dot product takes in at once: 2 bfloat16, or 1 value of another dtype. The tensors keep the
shape that they have everywhere, [num_blocks, block_size, num_kv_heads, head_dim], for code that moves whole blocks.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kernels import build, cpu_decoder, cpu_linear, cpu_meeting, reference
from kernels.batch_bounds import BatchBounds
from kernels.cpu_decoder import CpuDecoder, DecoderLayer, DecoderShape
from kernels.cpu_forms import (
    DTYPES,
    check_caches,
    check_dense,
    check_dense_slots,
    check_places,
    check_tokens,
    misfit_row,
    misfit_slot,
)
from kernels.cpu_linear import (
    CpuLinear,
    Functions,
    Panels,
    as_integers,
    coded,
    in_order,
    packed_as_int4,
    packed_as_int8,
    packed_plainly,
)
from kernels.cpu_meeting import CpuMeeting
from kernels.forms import check_attention, check_dtypes, check_reach, check_sampling, form

_THREADS = (c_void_p, c_int)
_SCORES = (c_float, c_int, c_float)
_CACHES = (c_void_p, c_void_p, c_int64)
_PLACES = (*_CACHES, c_void_p, c_int64, *[c_void_p] * 3)
_ATTENTION = (c_int, c_int, c_void_p, c_int64, *_PLACES, c_int64, *[c_int] * 6, *_SCORES, *_THREADS)
_RESHAPE = (c_int, c_int, c_void_p, c_int64, c_void_p, c_int64, *_CACHES, c_void_p, *[c_int] * 5, *_THREADS)
_ROTATE = (c_int, c_int, c_void_p, c_int64, c_void_p, c_void_p, *_CACHES, c_void_p, *[c_int] * 6, *_THREADS)
_NORM = (c_int, c_void_p, c_void_p, c_void_p, c_float, c_void_p, c_int64, c_int64, *_THREADS)
_SCORES_OF_ROWS = (c_void_p, c_int64, c_void_p, c_void_p, c_int, c_int, *_THREADS)
_SAMPLING = (c_void_p, c_int64, *[c_void_p] * 8, c_int, c_int, *_THREADS)
_GATE = (c_int, c_void_p, c_void_p, c_int64, c_int64, *_THREADS)

# Levels at which the time to decode a weight hides behind that of reading it.
_CODING_LEVELS = ("avx2", "avx512", "avx512_bf16", "amx_bf16", "amx_model")
# Levels that multiply bfloat16 as integers of 16 bits, see csrc/integers.hpp.
INTEGER_LEVELS = ("avx2", "avx512", "avx512_bf16")
# Levels with dot products of 8 bits.
SCREENING_LEVELS = ("avx512", "avx512_bf16")


class KernelsUnavailable(Exception):
    """The library cannot be used here; the message says why."""


def unit_of(dtype: torch.dtype) -> int:
    """Values of a cache of this dtype that a dot product takes in at once."""
    return 2 if dtype == torch.bfloat16 else 1


class CpuKernels:
    """The operations at one level, on as many threads as torch has when this is made.

    Args:
        level: one of `kernels.build.levels()`, or, for tests, of `kernels.build.MODELS`; None for the best.

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
        self._region, self._team_size = _parallel_region()

        def function(operation: str, arguments: tuple[type, ...], result: type | None) -> Callable[..., int]:
            found = library[f"{operation}_{self.level}"]
            found.argtypes, found.restype = arguments, result
            return found

        self._paged_attention = function("paged_attention", _ATTENTION, c_int)
        self._reshape_and_cache = function("reshape_and_cache", _RESHAPE, c_int)
        self._rotate_and_cache = function("rotate_and_cache", _ROTATE, c_int)
        self._rms_norm = function("rms_norm", _NORM, None)
        self._silu_and_mul = function("silu_and_mul", _GATE, None)
        self._normalizers_and_best = function("normalizers_and_best", _SCORES_OF_ROWS, c_int)
        self._sample_tokens = function("sample_tokens", _SAMPLING, c_int)
        self._linear = function("linear", cpu_linear.ARGUMENTS, c_int)
        self._score_outputs = function("score_outputs", cpu_linear.SCORE, c_int)
        self._write_screen = function("write_screen", cpu_linear.WRITE_SCREEN, c_int)
        self._encode = function("encode", cpu_linear.ENCODE, c_int64)
        self._encode_integers = function("encode_integers", cpu_linear.ENCODE_INTEGERS, c_int)
        self._pack_int4 = function("pack_int4", cpu_linear.PACK_INT4, c_int)
        self._decode = function("decode", cpu_decoder.ARGUMENTS, c_int)
        self._sum_shares = function("sum_shares", cpu_meeting.SUM, c_int)
        self._gather_shares = function("gather_shares", cpu_meeting.GATHER, c_int)

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
        """See `reference.paged_attention`; slots past the context may hold anything, and indices are int32."""
        check_reach(window, softcap)
        check_attention(q, k_cache, v_cache, block_tables, query_starts, context_lengths)
        num_tokens, num_heads, head_dim = q.shape
        num_blocks, block_size, num_kv_heads = check_caches(k_cache, v_cache, head_dim)
        num_rows = context_lengths.shape[0]
        check_tokens(q, "q")
        check_places(block_tables, query_starts, context_lengths)
        out = torch.empty(q.shape, dtype=q.dtype)
        misfit = self._paged_attention(
            DTYPES[q.dtype],
            DTYPES[k_cache.dtype],
            q.data_ptr(),
            q.stride(0),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            k_cache.stride(0),
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
        if misfit == -2:
            raise MemoryError("no memory for the parts of a split context")
        if misfit >= 0:
            raise misfit_row(misfit, num_tokens, block_tables, query_starts, context_lengths, num_blocks)
        return out

    def reshape_and_cache(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """See `reference.reshape_and_cache`."""
        num_tokens, num_heads, head_dim = k.shape
        num_blocks, block_size, num_kv_heads = check_caches(k_cache, v_cache, head_dim)
        check_dtypes(k_cache, v_cache, k, v)
        if v.shape != k.shape or num_heads != num_kv_heads:
            raise ValueError(f"k {form(k)} and v {form(v)} do not fit together, or {num_kv_heads} K/V heads")
        check_tokens(k, "k")
        check_tokens(v, "v")
        check_dense_slots(slot_mapping, num_tokens)
        misfit = self._reshape_and_cache(
            DTYPES[k.dtype],
            DTYPES[k_cache.dtype],
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            k_cache.stride(0),
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
            raise misfit_slot(misfit, slot_mapping, num_blocks, block_size)

    def rotate_and_cache(
        self, heads: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        """See `reference.rotate_and_cache`."""
        num_tokens, num_all_heads, head_dim = heads.shape
        num_blocks, block_size, num_kv_heads = check_caches(k_cache, v_cache, head_dim)
        num_heads = num_all_heads - 2 * num_kv_heads
        check_dtypes(k_cache, v_cache, heads, cos, sin)
        check_tokens(heads, "heads")
        check_dense_slots(slot_mapping, num_tokens)
        angles = (num_tokens, head_dim // 2)
        if cos.shape != angles or sin.shape != angles:
            raise ValueError(f"cos {form(cos)} and sin {form(sin)} do not fit heads {form(heads)}")
        if num_heads < 1 or head_dim % 2 != 0 or not (cos.is_contiguous() and sin.is_contiguous()):
            raise ValueError(f"heads {form(heads)} with {num_kv_heads} K/V heads, or strided cos and sin")
        misfit = self._rotate_and_cache(
            DTYPES[heads.dtype],
            DTYPES[k_cache.dtype],
            heads.data_ptr(),
            heads.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            k_cache.stride(0),
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
            raise misfit_slot(misfit, slot_mapping, num_blocks, block_size)
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
        check_dense(x, "x")
        check_dense(weight, "weight")
        out = torch.empty_like(x)
        self._rms_norm(
            DTYPES[x.dtype],
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
        check_dense(x, "x")
        out = torch.empty(num_rows, size // 2, dtype=x.dtype)
        pointers = (DTYPES[x.dtype], x.data_ptr(), out.data_ptr())
        self._silu_and_mul(*pointers, num_rows, size // 2, self._region, self._num_threads)
        return out

    def normalizers_and_best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `reference.normalizers_and_best`."""
        num_rows, size = logits.shape
        if logits.dtype != torch.float32 or logits.device.type != "cpu" or size == 0 or logits.stride(1) != 1:
            raise ValueError(f"logits {form(logits)} are to be float32 with dense rows, on the CPU")
        normalizers, best = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
        results = (normalizers.data_ptr(), best.data_ptr(), num_rows, size, self._region, self._num_threads)
        if self._normalizers_and_best(logits.data_ptr(), logits.stride(0), *results) != -1:
            raise MemoryError("no memory for what logits come to")
        return normalizers, best

    def sample_tokens(
        self,
        logits: Tensor,
        temperatures: Tensor,
        seeds: Tensor,
        positions: Tensor,
        sequence_indexes: Tensor,
        filters: tuple[Tensor, ...] | None = None,
    ) -> Tensor:
        """See `reference.sample_tokens`, which is called if any row asks for typical tokens."""
        names = (seeds, positions, sequence_indexes)
        check_sampling(logits, temperatures, names, filters)
        if filters is not None and bool((filters[3] < 1).any()):
            return reference.sample_tokens(logits, temperatures, *names, filters)
        num_rows, size = logits.shape
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        columns = (temperatures, *names, *(filters[:3] if filters is not None else (None,) * 3), token_ids)
        addresses = (None if column is None else column.data_ptr() for column in columns)
        threads = (self._region, self._num_threads)
        if self._sample_tokens(logits.data_ptr(), logits.stride(0), *addresses, num_rows, size, *threads) != -1:
            raise MemoryError("no memory for a row of logits")
        return token_ids

    def linear(self, weight: Tensor, bias: Tensor | None, *, widened: bool = False, gated: bool = False) -> CpuLinear:
        """See `reference.linear`."""
        panels, ordered = None, in_order(weight, gated=gated)
        if weight.dtype == torch.bfloat16:
            panels = as_integers(self._encode_weight_as_integers, ordered)
            if panels is None and self.level in _CODING_LEVELS:
                panels = coded(self._encode_weight, ordered)
        if panels is None:
            panels = packed_plainly(ordered, unit_of(weight.dtype))
        return self._pack(weight, bias, panels, widened=widened, gated=gated)

    def int8_linear(
        self, weight: Tensor, bias: Tensor | None, *, widened: bool = False, gated: bool = False
    ) -> CpuLinear:
        """See `reference.int8_linear`."""
        panels = packed_as_int8(in_order(weight, gated=gated))
        return self._pack(weight, bias, panels, widened=widened, gated=gated)

    def int4_linear(
        self, weight: Tensor, bias: Tensor | None, *, widened: bool = False, gated: bool = False
    ) -> CpuLinear | None:
        """See `reference.int4_linear`; None for weights that are not multiplied as integers (`csrc/integers.hpp`)."""
        is_bfloat16, num_inputs = weight.dtype == torch.bfloat16, weight.shape[1]
        if self.level not in INTEGER_LEVELS or not is_bfloat16 or num_inputs % cpu_linear.INTEGER_INPUTS != 0:
            return None
        panels = packed_as_int4(self._pack_as_int4, in_order(weight, gated=gated))
        return self._pack(weight, bias, panels, widened=widened, gated=gated)

    def _pack(self, weight: Tensor, bias: Tensor | None, panels: Panels, *, widened: bool, gated: bool) -> CpuLinear:
        if widened and gated:
            raise ValueError("what a gate gives is not widened")
        functions = Functions(
            multiply=partial(self._linear, DTYPES[weight.dtype]),
            score=partial(self._score_outputs, DTYPES[weight.dtype]),
            write_screen=self._write_screen if self.level in SCREENING_LEVELS else None,
        )
        threads = (self._region, self._num_threads)
        return CpuLinear(functions, weight, bias, panels, widened=widened, gated=gated, threads=threads)

    def _encode_weight_as_integers(self, *arguments: int) -> int:
        return self._encode_integers(*arguments, self._region, self._num_threads)

    def _pack_as_int4(self, *arguments: int) -> int:
        return self._pack_int4(*arguments, self._region, self._num_threads)

    def _encode_weight(self, *arguments: int) -> int:
        return self._encode(*arguments, self._region, self._num_threads)

    def decoder(self, shape: DecoderShape, layers: Sequence[DecoderLayer], norm: Tensor) -> CpuDecoder | None:
        """The layers of a decoder like Llama's as one call; None if they are not all made of `CpuLinear`."""
        parts = [part for layer in layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        if not all(isinstance(part, CpuLinear) for part in parts):
            return None
        return CpuDecoder(self._run_decoder, shape, layers, norm)

    def meeting(self, descriptor: int, rank: int, size: int, timeout_s: float) -> CpuMeeting:
        """A place to meet the other processes of this host; see `CpuMeeting`."""
        functions = (self._sum_shares, self._gather_shares)
        return CpuMeeting(*functions, descriptor=descriptor, rank=rank, size=size, timeout_s=timeout_s)

    def _run_decoder(self, decoder: ctypes.Structure, step: ctypes.Structure) -> int:
        threads = (self._region, self._team_size, self._num_threads)
        return self._decode(ctypes.byref(decoder), ctypes.byref(step), *threads)


def pin_threads() -> bool:
    """Binds each OpenMP thread of the calling thread to a core, if there is one thread for each core of this process.

    Linux may leave two threads that wake each other in turn on one core for minutes while another core is idle. Each of
    the hundreds of barriers of a step then costs a switch between them: 110 us instead of 1.3, measured, and a decode
    step takes two to three times as long. `OMP_PROC_BIND` would do, but would also bind the process's other threads,
    since it is read before they are started.

    Returns:
        Whether they are bound.
    """
    if not hasattr(os, "sched_getaffinity"):
        return False
    cpus, (region, _) = sorted(os.sched_getaffinity(0)), _parallel_region()
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
        raise KernelsUnavailable(f"{build.LIBRARY} cannot be loaded: {error}") from error


def _parallel_region() -> tuple[int | None, int | None]:
    """The addresses of GOMP_parallel and omp_get_num_threads in torch's OpenMP runtime; None (one thread) without one.

    See csrc/threads.hpp for what they are for.
    """
    folder = Path(torch.__file__).parent
    candidates = [*folder.glob("lib/lib*omp*"), *folder.parent.glob("torch.libs/lib*omp*"), None]
    for path in candidates:
        try:
            runtime = ctypes.CDLL(None if path is None else str(path))
            functions = (runtime.GOMP_parallel, runtime.omp_get_num_threads)
            region, team_size = (ctypes.cast(function, c_void_p).value for function in functions)
            return region, team_size
        except (OSError, AttributeError):
            continue
    return None, None
