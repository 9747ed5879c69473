"""Messages to several processes through shared memory; here the readers are threads."""

import multiprocessing
import random
import subprocess
import sys
import threading

import pytest

from worker.executor.ring import RingReader, RingWriter


def ring(num_readers, capacity_bytes):
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(num_readers)]
    writer = RingWriter([write for _, write in pipes], capacity_bytes)
    return writer, [
        RingReader(writer.descriptor, index, places, capacity_bytes) for index, (places, _) in enumerate(pipes)
    ]


def test_every_reader_gets_every_message_though_the_memory_begins_again_and_again():
    source = random.Random(1)
    messages = [source.randbytes(source.randrange(0, 100)) for _ in range(3000)]
    writer, readers = ring(3, capacity_bytes=100)
    got = [[] for _ in readers]

    def read(reader, into):
        for _ in messages:
            into.append(reader.read())

    threads = [threading.Thread(target=read, args=pair) for pair in zip(readers, got, strict=True)]
    for thread in threads:
        thread.start()
    for message in messages:
        writer.write(message)
    for thread in threads:
        thread.join(timeout=30)
    assert got == [messages] * 3


def test_messages_that_fill_the_memory_wait_for_no_reader():
    for messages in ([b"four", b"sixsix"], [b"ten bytes!"]):
        writer, (reader,) = ring(1, capacity_bytes=10)
        for message in messages:
            writer.write(message)
        assert [reader.read() for _ in messages] == messages


def test_a_message_that_never_fits_is_refused_and_the_next_one_goes_through():
    writer, (reader,) = ring(1, capacity_bytes=10)
    with pytest.raises(ValueError, match="11 bytes; there is room for 10"):
        writer.write(bytes(11))
    writer.write(b"next")
    assert reader.read() == b"next"


COUNTING = """
import mmap, os
from worker.executor.ring import _counters
counters, end = _counters(mmap.mmap(-1, 64), 56), 257 * 500_000
if os.fork() == 0:
    while counters[0] < end:
        counters[0] += 257
    os._exit(0)
last = 0
while last < end:
    seen = counters[0]
    assert seen % 257 == 0 and seen >= last, (seen, last)
    last = seen
"""


def test_how_far_a_reader_has_read_is_seen_whole():
    """In threads it would be anyway. In a process of its own, since nothing may fork beside torch's threads."""
    subprocess.run([sys.executable, "-c", COUNTING], check=True, timeout=30)


def test_a_reader_notices_that_the_writer_is_gone():
    writer, (reader,) = ring(1, capacity_bytes=10)
    for pipe in writer._readers:
        pipe.close()
    with pytest.raises(EOFError):
        reader.read()
