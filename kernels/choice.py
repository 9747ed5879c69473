"""Which implementation of the operations a model runs on: chosen once, when it is built, and handed to its layers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import reference
from kernels.cpu import CpuKernels, KernelsUnavailable, unit_of


@dataclass(frozen=True, slots=True)
class Operations:
    """One implementation; every operation has the signature and the meaning of its twin in `kernels.reference`.

    Attributes:
        name: for the log.
        note: why it is not a faster one; empty when there is none.
    """

    name: str
    reshape_and_cache: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    rotate_and_cache: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    paged_attention: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, int | None, float | None], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    note: str = ""


def choose(device: torch.device, dtype: torch.dtype, *, head_dim: int, block_size: int) -> Operations:
    """The fastest implementation for a model and its cache.

    Args:
        device: where both are.
        dtype: of both.
        head_dim: values of a head.
        block_size: tokens of a block.
    """
    if device.type != "cpu":
        return torch_reference("")
    try:
        unit = unit_of(dtype)
        if head_dim % unit or block_size % unit:
            return torch_reference(
                f"the C++ kernels take {dtype} in pairs, not {block_size} tokens x {head_dim} values"
            )
        return cpp(CpuKernels())
    except KernelsUnavailable as problem:
        return torch_reference(str(problem))


def cpp(kernels: CpuKernels) -> Operations:
    """The C++ kernels at their level."""
    return Operations(
        name=f"cpu: C++ {kernels.level}",
        reshape_and_cache=kernels.reshape_and_cache,
        rotate_and_cache=kernels.rotate_and_cache,
        paged_attention=kernels.paged_attention,
        rms_norm=kernels.rms_norm,
        add_rms_norm=kernels.add_rms_norm,
        silu_and_mul=kernels.silu_and_mul,
    )


def torch_reference(note: str = "") -> Operations:
    """The torch twins, which run everywhere; `note` says why they were chosen."""
    return Operations(
        name="reference",
        reshape_and_cache=reference.reshape_and_cache,
        rotate_and_cache=reference.rotate_and_cache,
        paged_attention=reference.paged_attention,
        rms_norm=reference.rms_norm,
        add_rms_norm=reference.add_rms_norm,
        silu_and_mul=reference.silu_and_mul,
        note=note,
    )
