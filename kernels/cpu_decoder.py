"""The layers of a decoder in one call of C++; the structs are those of `csrc/decoder.hpp`."""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels.cpu_forms import (
    DTYPES,
    check_caches,
    check_dense,
    check_dense_slots,
    check_places,
    misfit_row,
    misfit_slot,
)
from kernels.cpu_linear import CpuLinear, Weights
from kernels.forms import check_attention, check_dtypes, check_reach, form

ARGUMENTS = (c_void_p, c_void_p, c_void_p, c_void_p, c_int)


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What the layers of a decoder have in common.

    Attributes:
        num_heads: of the queries.
        num_kv_heads: of keys and values.
        head_dim: values of a head.
        epsilon: of the norms.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer: x += output(attention(qkv(norm(x)))); x += down(gate_up(norm(x))).

    Attributes:
        attention_norm: [hidden_size].
        qkv: a linear layer whose outputs are queries, keys and values, side by side.
        head_norms: for each query head and each key head before rotation, [head_dim] each; None: there are none.
        output: the linear layer after attention.
        mlp_norm: [hidden_size].
        gate_up: a gated linear layer.
        down: the linear layer after it.
        window: how many tokens a query sees, including its own; None: all up to its own.
    """

    attention_norm: Tensor
    qkv: Callable[[Tensor], Tensor]
    head_norms: tuple[Tensor, Tensor] | None
    output: Callable[[Tensor], Tensor]
    mlp_norm: Tensor
    gate_up: Callable[[Tensor], Tensor]
    down: Callable[[Tensor], Tensor]
    window: int | None


class _Layer(ctypes.Structure):
    _fields_ = [
        ("attention_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", Weights),
        ("output", Weights),
        ("gate_up", Weights),
        ("down", Weights),
        ("window", c_int),
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        ("layers", c_void_p),
        ("norm", c_void_p),
        ("dtype", c_int),
        ("num_layers", c_int),
        ("hidden_size", c_int),
        ("num_heads", c_int),
        ("num_kv_heads", c_int),
        ("head_dim", c_int),
        ("epsilon", c_float),
        ("scale", c_float),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("residual", c_void_p),
        ("out", c_void_p),
        ("scratch", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("caches", c_void_p),
        ("block_stride", c_int64),
        ("slot_mapping", c_void_p),
        ("block_tables", c_void_p),
        ("query_starts", c_void_p),
        ("context_lengths", c_void_p),
        ("scored", c_void_p),
        ("table_stride", c_int64),
        ("cache_dtype", c_int),
        ("num_tokens", c_int),
        ("num_rows", c_int),
        ("num_scored", c_int),
        ("num_blocks", c_int),
        ("block_size", c_int),
    ]


class CpuDecoder:
    """The layers, and the norm after them, on weights that stay where they are in memory.

    Args:
        run: the library's function, with its threads.
        shape: of all layers.
        layers: in order.
        norm: [hidden_size], for the sum after the last layer.
    """

    def __init__(
        self,
        run: Callable[[ctypes.Structure, ctypes.Structure], int],
        shape: DecoderShape,
        layers: Sequence[DecoderLayer],
        norm: Tensor,
    ) -> None:
        self._run, self._shape = run, shape
        self._dtype, self._hidden_size = norm.dtype, len(norm)
        for layer in layers:
            _check_layer(shape, layer, norm)
        self._kept = (layers, norm)
        self._layers = (_Layer * len(layers))(*map(_describe, layers))
        self._decoder = _Decoder(
            layers=ctypes.addressof(self._layers),
            norm=norm.data_ptr(),
            dtype=DTYPES[norm.dtype],
            num_layers=len(layers),
            hidden_size=self._hidden_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            epsilon=shape.epsilon,
            scale=shape.head_dim**-0.5,
        )
        heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        mlp_size = max(_packed(layer)["down"].shape[1] for layer in layers)
        self._scratch_values = 2 * self._hidden_size + heads + mlp_size
        self._scratch = torch.empty(0, dtype=norm.dtype)
        # The caches of the last call, already checked, and their addresses: every step has the same ones.
        self._layer_caches: Sequence[tuple[Tensor, Tensor]] = ()
        self._addresses = (c_void_p * 0)()

    def __call__(
        self,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        layer_caches: Sequence[tuple[Tensor, Tensor]],
        slot_mapping: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lengths: Tensor,
        scored: Tensor | None = None,
    ) -> Tensor:
        """Runs the tokens of a step through all layers.

        Args:
            residual: [num_tokens, hidden_size], the embeddings; overwritten.
            cos: [num_tokens, head_dim / 2], of the tokens' positions.
            sin: like `cos`.
            layer_caches: K and V cache of each layer, written to; the sequence itself must never change.
            slot_mapping: see `reference.reshape_and_cache`.
            block_tables: see `reference.paged_attention`, as for the next two.
            query_starts: see there.
            context_lengths: see there.
            scored: [num_scored] int64, ascending: the tokens whose output is wanted; None: all.

        Returns:
            [num_scored, hidden_size], normalized.

        Raises:
            ValueError: the arguments do not fit together.
        """
        num_tokens, k_cache = len(residual), layer_caches[0][0]
        num_blocks, block_size = k_cache.shape[:2]
        self._check(residual, cos, sin)
        if layer_caches is not self._layer_caches:
            self._note_caches(layer_caches)
        check_dense_slots(slot_mapping, num_tokens)
        heads = residual.new_empty(0, self._shape.num_heads, self._shape.head_dim)
        check_attention(heads, *layer_caches[0], block_tables, query_starts, context_lengths)
        check_places(block_tables, query_starts, context_lengths)
        if self._scratch.numel() < num_tokens * self._scratch_values:
            self._scratch = residual.new_empty(num_tokens * self._scratch_values)
        if scored is not None:
            _check_scored(scored, num_tokens)
        out = torch.empty_like(residual if scored is None else residual[: len(scored)])
        step = _Step(
            residual=residual.data_ptr(),
            out=out.data_ptr(),
            scratch=self._scratch.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            caches=ctypes.addressof(self._addresses),
            block_stride=k_cache.stride(0),
            slot_mapping=slot_mapping.data_ptr(),
            block_tables=block_tables.data_ptr(),
            query_starts=query_starts.data_ptr(),
            context_lengths=context_lengths.data_ptr(),
            scored=None if scored is None else scored.data_ptr(),
            table_stride=block_tables.shape[1],
            cache_dtype=DTYPES[k_cache.dtype],
            num_tokens=num_tokens,
            num_rows=len(context_lengths),
            num_scored=len(out),
            num_blocks=num_blocks,
            block_size=block_size,
        )
        misfit = self._run(self._decoder, step)
        if misfit == -1:
            return out
        if misfit == -2:
            raise MemoryError("no memory for the work of a step")
        if misfit > len(context_lengths):
            raise misfit_slot(misfit - len(context_lengths) - 1, slot_mapping, num_blocks, block_size)
        raise misfit_row(misfit, num_tokens, block_tables, query_starts, context_lengths, num_blocks)

    def _check(self, residual: Tensor, cos: Tensor, sin: Tensor) -> None:
        for name, x, size in (
            ("residual", residual, self._hidden_size),
            ("cos", cos, self._shape.head_dim // 2),
            ("sin", sin, self._shape.head_dim // 2),
        ):
            check_dense(x, name)
            if x.shape != (len(residual), size) or x.dtype != self._dtype:
                raise ValueError(f"{name} {form(x)} is to be {self._dtype} of {[len(residual), size]}")

    def _note_caches(self, layer_caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        if len(layer_caches) != self._decoder.num_layers:
            raise ValueError(f"{len(layer_caches)} caches, {self._decoder.num_layers} layers")
        first = layer_caches[0][0]
        check_dtypes(*layer_caches[0], self._kept[1])
        for k_cache, v_cache in layer_caches:
            _, _, num_kv_heads = check_caches(k_cache, v_cache, self._shape.head_dim)
            same = all(cache.shape == first.shape and cache.dtype == first.dtype for cache in (k_cache, v_cache))
            if num_kv_heads != self._shape.num_kv_heads or not same or k_cache.stride() != first.stride():
                raise ValueError(f"k_cache {form(k_cache)} does not fit {self._shape}, or the first layer's")
        addresses = [cache.data_ptr() for layer in layer_caches for cache in layer]
        self._layer_caches, self._addresses = layer_caches, (c_void_p * len(addresses))(*addresses)


def _check_scored(scored: Tensor, num_tokens: int) -> None:
    ends = [-1, *scored.tolist(), num_tokens]
    ascends = all(place < following for place, following in pairwise(ends))
    if not ascends or scored.dtype != torch.int64 or not scored.is_contiguous():
        raise ValueError(f"scored {form(scored)} is to be contiguous int64, ascending and less than {num_tokens}")


def _packed(layer: DecoderLayer) -> dict[str, CpuLinear]:
    """The layer's linear layers, by name."""
    linears = {name: getattr(layer, name) for name in ("qkv", "output", "gate_up", "down")}
    for name, linear in linears.items():
        if not isinstance(linear, CpuLinear):
            raise TypeError(f"{name} is no CpuLinear")
    return linears


def _check_layer(shape: DecoderShape, layer: DecoderLayer, norm: Tensor) -> None:
    linears, size, q_size = _packed(layer), len(norm), shape.num_heads * shape.head_dim
    mlp_size = linears["down"].shape[1]
    check_reach(layer.window, None)
    expected = {
        "qkv": (q_size + 2 * shape.num_kv_heads * shape.head_dim, size),
        "output": (size, q_size),
        "gate_up": (2 * mlp_size, size),
        "down": (size, mlp_size),
    }
    for name, linear in linears.items():
        if linear.shape != expected[name] or linear.dtype != norm.dtype or linear.is_gated != (name == "gate_up"):
            raise ValueError(f"{name} is {linear.dtype} {list(linear.shape)}, not {norm.dtype} {list(expected[name])}")
    weights = [(norm, size), (layer.attention_norm, size), (layer.mlp_norm, size)]
    weights += [(head_norm, shape.head_dim) for head_norm in layer.head_norms or ()]
    for weight, length in weights:
        check_dense(weight, "a norm's weight")
        if weight.shape != (length,) or weight.dtype != norm.dtype:
            raise ValueError(f"a norm's weight is {form(weight)}, not {norm.dtype} of {length}")


def _describe(layer: DecoderLayer) -> _Layer:
    q_norm, k_norm = layer.head_norms or (None, None)
    return _Layer(
        attention_norm=layer.attention_norm.data_ptr(),
        q_norm=None if q_norm is None else q_norm.data_ptr(),
        k_norm=None if k_norm is None else k_norm.data_ptr(),
        mlp_norm=layer.mlp_norm.data_ptr(),
        window=layer.window or 0,
        **{name: linear.weights for name, linear in _packed(layer).items()},
    )
