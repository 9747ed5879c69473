"""Arrays from the host to the device: all of them in one transfer, which the host does not wait for."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

# Bytes. Triton compiles a kernel anew, with narrower loads, for pointers that are not a multiple of this.
_ALIGNMENT = 16


def to_device(device: torch.device, *arrays: Array) -> list[Tensor]:
    """A tensor on the device for each array, of its shape and dtype.

    On the CPU they share the arrays' memory. On a GPU the arrays go through one piece of pinned memory, which torch
    does not reuse before the copy is done.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return _unpack(_pack(arrays, pin_memory=device.type == "cuda").to(device, non_blocking=True), arrays)


def _pack(arrays: Sequence[Array], *, pin_memory: bool) -> Tensor:
    """All arrays one after another, [num_bytes] uint8."""
    packed = torch.empty(_starts(arrays)[-1], dtype=torch.uint8, pin_memory=pin_memory)
    room = packed.numpy()
    for array, start in zip(arrays, _starts(arrays), strict=False):
        room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    return packed


def _unpack(packed: Tensor, arrays: Sequence[Array]) -> list[Tensor]:
    """Views of what `_pack` made of the arrays."""
    return [
        packed[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, start in zip(arrays, _starts(arrays), strict=False)
    ]


def _starts(arrays: Sequence[Array]) -> list[int]:
    """The first byte of each array, and the end of all."""
    room = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    return np.cumsum([0, *room]).tolist()
