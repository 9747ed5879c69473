"""Messages from one process to several through memory that they share: written once, however many read them.

The memory holds messages one after the other, and wraps around at its end. A pipe to each reader carries only the place
of a message, which wakes the reader up, and ends when the writer does. Each reader tells how far it has read by a
number in the shared memory that only it writes. The memory has no name, so nothing of it outlives the processes.
"""

import mmap
import os
import struct
import time
from multiprocessing.connection import Connection

# Pages are taken when they are first written. A step of a thousand sequences of a thousand blocks each takes 4 MiB.
CAPACITY_BYTES = 32 << 20
_FULL_POLL_S = 0.0005
_COUNTER_BYTES = 8
_PLACE = struct.Struct("<QQ")


class RingWriter:
    """The writer.

    Args:
        readers: the writing end of the pipe to each reader.
        capacity_bytes: most bytes of the messages that not all readers have read.

    Attributes:
        descriptor: of the memory, for the readers.
    """

    def __init__(self, readers: list[Connection], capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._readers = readers
        self._capacity = capacity_bytes
        self.descriptor = os.memfd_create("steps")
        os.ftruncate(self.descriptor, capacity_bytes + len(readers) * _COUNTER_BYTES)
        self._memory = mmap.mmap(self.descriptor, 0)
        self._read = _counters(self._memory, capacity_bytes)
        # Bytes written since the beginning, including those that were skipped at the end of the memory.
        self._written = 0

    def write(self, message: bytes) -> None:
        """Sends a message to all readers; waits until they have read enough for there to be room.

        Raises:
            ValueError: it is larger than the memory.
            OSError: a reader is gone.
        """
        if len(message) > self._capacity:
            raise ValueError(f"a message of {len(message):,} bytes; there is room for {self._capacity:,}")
        start = self._written
        if start % self._capacity + len(message) > self._capacity:
            start += self._capacity - start % self._capacity
        end = start + len(message)
        # The numbers of readers that have read all that was written do not include what is skipped now.
        while end - (read := min(self._read)) > self._capacity and read < self._written:
            time.sleep(_FULL_POLL_S)
        offset = start % self._capacity
        self._memory[offset : offset + len(message)] = message
        self._written = end
        for reader in self._readers:
            reader.send_bytes(_PLACE.pack(start, len(message)))


class RingReader:
    """One of the readers.

    Args:
        descriptor: of the writer's memory.
        index: among the readers.
        places: the reading end of this reader's pipe.
        capacity_bytes: the writer's.
    """

    def __init__(self, descriptor: int, index: int, places: Connection, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._memory = mmap.mmap(descriptor, 0)
        self._capacity, self._index, self._places = capacity_bytes, index, places
        self._read = _counters(self._memory, capacity_bytes)

    def read(self) -> bytes:
        """The next message; waits until it is there.

        Raises:
            EOFError: the writer is gone.
        """
        start, length = _PLACE.unpack(self._places.recv_bytes())
        offset = start % self._capacity
        message = self._memory[offset : offset + length]
        self._read[self._index] = start + length
        return message


def _counters(memory: mmap.mmap, capacity_bytes: int) -> "memoryview[int]":
    """How far each reader has read. An entry is written at once; `struct` would clear it and write byte by byte."""
    return memoryview(memory)[capacity_bytes:].cast("Q")
