"""Arrays to the device in one piece."""

import numpy as np
import pytest
import torch

from worker import transfer
from worker.transfer import to_device

ARRAYS = (
    np.array([2**40, -1], dtype=np.int64),
    np.array([[1, 2, 3]], dtype=np.int32),
    np.array([], dtype=np.int64),
    np.array([0.5, -np.inf, 1e-40], dtype=np.float32),
    np.arange(8, dtype=np.int32).reshape(2, 4)[:, ::2],
    np.zeros((0, 3), dtype=np.int32),
)
DTYPES = [torch.int64, torch.int32, torch.int64, torch.float32, torch.int32, torch.int32]


def assert_are_the_arrays(tensors):
    assert [tensor.dtype for tensor in tensors] == DTYPES
    assert [tuple(tensor.shape) for tensor in tensors] == [array.shape for array in ARRAYS]
    assert [tensor.tolist() for tensor in tensors] == [array.tolist() for array in ARRAYS]


def test_on_a_cpu_the_arrays_are_not_copied():
    tensors = to_device(torch.device("cpu"), *ARRAYS)
    assert_are_the_arrays(tensors)
    assert tensors[0].data_ptr() == ARRAYS[0].ctypes.data
    assert to_device(torch.device("cpu")) == []


def test_what_goes_through_one_piece_of_memory_comes_out_as_it_was_and_aligned():
    packed = transfer._pack(ARRAYS, pin_memory=False)
    tensors = transfer._unpack(packed, ARRAYS)
    assert_are_the_arrays(tensors)
    assert all((tensor.data_ptr() - packed.data_ptr()) % 16 == 0 for tensor in tensors if tensor.numel())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU: nothing was transferred")
def test_on_a_gpu_nobody_waits_and_the_memory_is_kept_until_it_was_read():
    device = torch.device("cuda")
    to_device(device, *ARRAYS)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sent = [to_device(device, *ARRAYS) for _ in range(50)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for tensors in sent:
        assert_are_the_arrays(tensors)
