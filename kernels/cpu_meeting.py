"""How the processes of one host exchange tensors in the middle of a forward pass, by `csrc/meeting.hpp`.

Summing a decode step's hidden states this way takes a few microseconds, if each process has a core; over sockets it
takes a hundred, and there are two sums in each layer.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from ctypes import c_double, c_int, c_int64, c_uint64, c_void_p

import torch
from torch import Tensor

from kernels.cpu_forms import DTYPES, check_dense
from kernels.forms import form

SUM = (c_void_p, c_int, c_void_p, c_int64)
GATHER = (c_void_p, c_void_p, c_void_p, c_int64, c_void_p)

_LINE = 64
# Bytes of a side: a prompt's hidden states are summed in pieces of this size, which stay in a cache.
_ROOM = 1 << 20


class _Meeting(ctypes.Structure):
    _fields_ = [
        ("memory", c_void_p),
        ("room", c_int64),
        ("rank", c_int),
        ("size", c_int),
        ("turn", c_void_p),
        ("timeout_s", c_double),
    ]


def shared_memory(size: int) -> int:
    """A file descriptor of memory for `size` processes to meet in; it has no name, and ends with the last of them."""
    descriptor = os.memfd_create("meeting")
    os.ftruncate(descriptor, size * (_LINE + 2 * _ROOM))
    return descriptor


class CpuMeeting:
    """One process's part. All processes must call the same functions in the same order, each from one thread.

    Args:
        sum_shares: the library's function.
        gather_shares: likewise.
        descriptor: of the memory; see `shared_memory`.
        rank: of this process.
        size: how many there are.
        timeout_s: how long the others may take to come.
    """

    def __init__(
        self,
        sum_shares: Callable[..., int],
        gather_shares: Callable[..., int],
        *,
        descriptor: int,
        rank: int,
        size: int,
        timeout_s: float,
    ) -> None:
        self._sum_shares, self._gather_shares = sum_shares, gather_shares
        self._rank, self._size = rank, size
        self._memory = mmap.mmap(descriptor, size * (_LINE + 2 * _ROOM))
        self._turn = c_uint64(0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._meeting = _Meeting(address, _ROOM, rank, size, ctypes.addressof(self._turn), timeout_s)

    def sum(self, x: Tensor) -> None:
        """Sums the tensors of all processes in place; x: contiguous, of the same shape everywhere.

        Raises:
            TimeoutError: a process did not come.
        """
        check_dense(x, "x")
        self._check(self._sum_shares(ctypes.byref(self._meeting), DTYPES[x.dtype], x.data_ptr(), x.numel()))

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Puts the processes' rows side by side; x: [n, sizes[rank]], contiguous. Returns [n, sum(sizes)].

        Raises:
            TimeoutError: a process did not come.
        """
        if x.device.type != "cpu" or not x.is_contiguous() or x.shape[1:] != (sizes[self._rank],):
            raise ValueError(f"x {form(x)} is to be contiguous on the CPU, with rows of {sizes[self._rank]}")
        if max(sizes) * x.element_size() > _ROOM:
            raise ValueError(f"rows of {max(sizes)} {x.dtype} are longer than {_ROOM} bytes")
        out = torch.empty(len(x), sum(sizes), dtype=x.dtype)
        row_bytes = (c_int64 * self._size)(*(size * x.element_size() for size in sizes))
        arguments = (x.data_ptr(), out.data_ptr(), len(x), row_bytes)
        self._check(self._gather_shares(ctypes.byref(self._meeting), *arguments))
        return out

    def _check(self, missing: int) -> None:
        if missing != -1:
            raise TimeoutError(f"rank {missing} did not come within {self._meeting.timeout_s:g} s")
