"""Columns: integers and floats as little-endian 32-bit bytes, the form in which they travel on the internal streams.

Touching a protobuf sub-message costs Python a microsecond each; a column costs nothing per entry.
"""

import sys
from array import array
from collections.abc import Container, Iterable

if sys.byteorder != "little":
    raise ImportError("Pagewire's wire format is little-endian, and this machine is not")

# Columns hold int32.
_LARGEST = 2**31 - 1


def pack(values: Iterable[int]) -> bytes:
    """The column of `values`; OverflowError when one does not fit into int32."""
    return array("i", values).tobytes()


def unpack(column: bytes) -> "array[int]":
    """The integers of a column; ValueError when it is not a whole number of them."""
    values = array("i")
    values.frombytes(column)
    return values


def pack_floats(values: Iterable[float]) -> bytes:
    """The float32 column of `values`."""
    return array("f", values).tobytes()


def unpack_floats(column: bytes) -> "array[float]":
    """The floats of a float32 column."""
    values = array("f")
    values.frombytes(column)
    return values


def next_number(last: int, taken: Container[int]) -> int:
    """The next number for a column after `last` that is not in `taken`: 1 to int32's largest, then again from 1."""
    while True:
        last = last % _LARGEST + 1
        if last not in taken:
            return last
