"""What the wrappers of the Triton kernels check alike, and how their messages put it."""

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INDICES = (torch.int32, torch.int64)


def form(x: Tensor) -> str:
    """Dtype and shape, for messages."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def check_floats(**tensors: Tensor) -> None:
    """Raises ValueError unless all have one dtype that the kernels take, one device, and a dense last dimension."""
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS or tensor.dtype != first.dtype:
            kinds = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
            raise ValueError(f"not of one dtype, or of none that the kernels take: {kinds}")
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device}, the others on {first.device}")
        if tensor.ndim > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} {form(tensor)} has strides {tensor.stride()}: its last dimension is not dense")


def check_indices(**tensors: Tensor) -> None:
    """Raises ValueError unless all are integers, dense in the last dimension."""
    for name, tensor in tensors.items():
        if tensor.dtype not in INDICES:
            raise ValueError(f"{name} is {form(tensor)}; it is to be int32 or int64")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} {form(tensor)} has strides {tensor.stride()}: its last dimension is not dense")
