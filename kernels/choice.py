"""Which implementation of the operations a model runs on: chosen once, when it is built, and handed to its layers.

CUDA: Triton. CPU: C++. Elsewhere, and where these cannot be used, the torch twins, with a note that says why.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kernels import cpu_linear, reference
from kernels.batch_bounds import BatchBounds
from kernels.cpu import INTEGER_LEVELS, CpuKernels, KernelsUnavailable, unit_of
from kernels.cpu_decoder import CpuDecoder, DecoderLayer, DecoderShape
from kernels.forms import FLOATS

_Attention = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, int | None, float | None, BatchBounds | None], Tensor
]
NormalizersAndBest = Callable[[Tensor], tuple[Tensor, Tensor]]
SampleTokens = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...] | None], Tensor]

LinearLayer = Callable[[Tensor], Tensor]


class PackLinear(Protocol):
    """Makes a linear layer from its weight and bias; see `reference.linear`."""

    def __call__(
        self, weight: Tensor, bias: Tensor | None, *, widened: bool = False, gated: bool = False
    ) -> LinearLayer:
        """Returns the layer, whose weight may be a copy in another layout."""


# The largest head that the Triton kernels take, and the lowest compute capability that Triton compiles for.
_MOST_HEAD_DIM = 256
_LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class Operations:
    """One implementation; every operation has the signature and the meaning of its twin in `kernels.reference`.

    Attributes:
        name: for the log.
        int4_linear: None where there are no kernels for it.
        note: why it is not a faster one; empty if none is faster.
        bytes_per_weight: of a weight of `linear`, if it is quantized; the head's may take more.
        reads_behind_context: whether attention reads slots past a row's context and then masks them, so that a block
            that a sequence begins to use must hold finite values.
        decoder: makes one call of all layers of a decoder like Llama's, or returns None if it cannot for these; None:
            it never can. The call computes what the other operations do when the model calls them.
        recordable: whether no operation of a forward pass makes the host read the device's memory, so that the pass can
            be recorded as a CUDA graph.
    """

    name: str
    linear: PackLinear
    int8_linear: PackLinear
    int4_linear: PackLinear | None
    reshape_and_cache: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    rotate_and_cache: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    paged_attention: _Attention
    copy_blocks: Callable[[Tensor, Tensor], None]
    swap_blocks: Callable[[Tensor, Tensor, Tensor], None]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    gelu: Callable[[Tensor, str], Tensor]
    normalizers_and_best: NormalizersAndBest
    sample_tokens: SampleTokens
    note: str = ""
    bytes_per_weight: float | None = None
    reads_behind_context: bool = False
    recordable: bool = False
    decoder: Callable[[DecoderShape, Sequence[DecoderLayer], Tensor], CpuDecoder | None] | None = None

    def __str__(self) -> str:
        return f"{self.name}, since {self.note}" if self.note else self.name


def choose(
    device: torch.device,
    dtype: torch.dtype,
    *,
    head_dim: int,
    block_size: int,
    cache_dtype: torch.dtype | None = None,
) -> Operations:
    """The fastest implementation for a model and its cache.

    Args:
        device: of both.
        dtype: of the model.
        head_dim: values in a head.
        block_size: tokens in a block.
        cache_dtype: of the cache; None: the model's.
    """
    cache_dtype = cache_dtype or dtype
    for kind in (dtype, cache_dtype):
        if kind not in FLOATS:
            return torch_reference(f"there are no kernels for {kind}")
    if device.type == "cuda":
        return _choose_on_cuda(device, head_dim, block_size)
    if device.type != "cpu":
        return torch_reference(f"there are no kernels for {device.type}")
    try:
        unit = unit_of(cache_dtype)
        if head_dim % unit or block_size % unit:
            return torch_reference(
                f"the C++ kernels take a cache in {cache_dtype} in pairs, not {block_size} tokens x {head_dim} values"
            )
        return cpp(CpuKernels())
    except KernelsUnavailable as problem:
        return torch_reference(str(problem))


def _choose_on_cuda(device: torch.device, head_dim: int, block_size: int) -> Operations:
    if head_dim > _MOST_HEAD_DIM:
        return torch_reference(f"the Triton kernels take heads of up to {_MOST_HEAD_DIM} values, not {head_dim}")
    if block_size & (block_size - 1) != 0:
        return torch_reference(f"the Triton kernels take blocks of a power of two of tokens, not {block_size}")
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return torch_reference("Triton needs compute capability 8.0, and this GPU has {}.{}".format(*capability))
    try:
        return triton_kernels()
    except ImportError as problem:
        return torch_reference(f"Triton is missing: {problem}")


def triton_kernels() -> Operations:
    """The Triton kernels.

    Raises:
        ImportError: Triton is not installed.
    """
    # Imported here and nowhere else: a worker on a CPU neither needs Triton installed nor waits for its import.
    from triton import __version__ as version

    from kernels import activation, copy_blocks, paged_attention, reshape_and_cache, rms_norm, sampling

    return Operations(
        name=f"cuda: Triton {'.'.join(version.split('.')[:2])}",
        linear=activation.linear,
        int8_linear=reference.int8_linear,
        int4_linear=None,
        reshape_and_cache=reshape_and_cache.reshape_and_cache,
        rotate_and_cache=reshape_and_cache.rotate_and_cache,
        paged_attention=paged_attention.paged_attention,
        copy_blocks=copy_blocks.copy_blocks,
        swap_blocks=copy_blocks.swap_blocks,
        rms_norm=rms_norm.rms_norm,
        add_rms_norm=rms_norm.add_rms_norm,
        gelu=activation.gelu,
        normalizers_and_best=reference.normalizers_and_best,
        sample_tokens=sampling.sample_tokens,
        recordable=True,
    )


def cpp(kernels: CpuKernels) -> Operations:
    """The C++ kernels at their level; the torch twins where torch is as fast, or where it does not matter to a step."""
    return replace(
        torch_reference(),
        name=f"cpu: C++ {kernels.level}",
        linear=partial(_linear_on_cpu, kernels),
        int8_linear=partial(_int8_linear_on_cpu, kernels),
        int4_linear=partial(_int4_linear_on_cpu, kernels) if kernels.level in INTEGER_LEVELS else None,
        reshape_and_cache=kernels.reshape_and_cache,
        rotate_and_cache=kernels.rotate_and_cache,
        paged_attention=kernels.paged_attention,
        rms_norm=kernels.rms_norm,
        add_rms_norm=kernels.add_rms_norm,
        normalizers_and_best=kernels.normalizers_and_best,
        sample_tokens=kernels.sample_tokens,
        decoder=kernels.decoder,
        reads_behind_context=False,
    )


def torch_reference(note: str = "") -> Operations:
    """The torch twins, which run everywhere; `note` says why they were chosen."""
    return Operations(
        name="reference",
        linear=_torch_linear,
        int8_linear=reference.int8_linear,
        int4_linear=reference.int4_linear,
        reshape_and_cache=reference.reshape_and_cache,
        rotate_and_cache=reference.rotate_and_cache,
        paged_attention=reference.paged_attention,
        copy_blocks=reference.copy_blocks,
        swap_blocks=reference.swap_blocks,
        rms_norm=reference.rms_norm,
        add_rms_norm=reference.add_rms_norm,
        gelu=reference.gelu,
        normalizers_and_best=reference.normalizers_and_best,
        sample_tokens=reference.sample_tokens,
        note=note,
        reads_behind_context=True,
    )


def _linear_on_cpu(
    kernels: CpuKernels, weight: Tensor, bias: Tensor | None, *, widened: bool = False, gated: bool = False
) -> LinearLayer:
    if not cpu_linear.takes(weight, gated=gated):
        return _linear_by_torch(kernels.silu_and_mul, weight, bias, widened=widened, gated=gated)
    return kernels.linear(weight, bias, widened=widened, gated=gated)


def _int8_linear_on_cpu(
    kernels: CpuKernels, weight: Tensor, bias: Tensor | None, *, widened: bool = False, gated: bool = False
) -> LinearLayer:
    if not cpu_linear.takes(weight, gated=gated):
        return reference.int8_linear(weight, bias, widened=widened, gated=gated)
    return kernels.int8_linear(weight, bias, widened=widened, gated=gated)


def _int4_linear_on_cpu(
    kernels: CpuKernels, weight: Tensor, bias: Tensor | None, *, widened: bool = False, gated: bool = False
) -> LinearLayer:
    packed = None
    if cpu_linear.takes(weight, gated=gated):
        packed = kernels.int4_linear(weight, bias, widened=widened, gated=gated)
    return packed or reference.int4_linear(weight, bias, widened=widened, gated=gated)


def _torch_linear(weight: Tensor, bias: Tensor | None, *, widened: bool = False, gated: bool = False) -> LinearLayer:
    return _linear_by_torch(reference.silu_and_mul, weight, bias, widened=widened, gated=gated)


def _linear_by_torch(
    silu_and_mul: LinearLayer, weight: Tensor, bias: Tensor | None, *, widened: bool, gated: bool
) -> LinearLayer:
    finish = reference.linear_finish(silu_and_mul, widened=widened, gated=gated)
    return reference.PlainLinear(weight, bias, finish)


def with_int8_weights(operations: Operations) -> Operations:
    """The same operations, except that linear layers made by them have 8-bit weights."""
    name = f"{operations.name}, int8 weights"
    return replace(operations, name=name, linear=operations.int8_linear, bytes_per_weight=1.0)


def with_int4_weights(operations: Operations) -> Operations:
    """The same operations, except that linear layers made by them have 4-bit weights.

    The head keeps 8 bits, since it decides every token, and so does a weight whose inputs do not come in 64s.

    Args:
        operations: with an `int4_linear`.
    """
    in_4_bits, in_8_bits = operations.int4_linear, operations.int8_linear
    assert in_4_bits is not None, "no kernels for it"

    def linear(weight: Tensor, bias: Tensor | None, *, widened: bool = False, gated: bool = False) -> LinearLayer:
        pack = in_8_bits if widened or weight.shape[1] % cpu_linear.INTEGER_INPUTS else in_4_bits
        return pack(weight, bias, widened=widened, gated=gated)

    # A step and a base of 8 bits for 32 weights.
    return replace(operations, name=f"{operations.name}, int4 weights", linear=linear, bytes_per_weight=0.5 + 2 / 32)
