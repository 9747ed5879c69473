"""HTTP/2 as bytes (RFC 9113, RFC 7541), for clients that misbehave in ways that no library offers."""

import asyncio
import re
import struct
from dataclasses import dataclass

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4
MAGIC = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADER_TABLE_SIZE, _INITIAL_WINDOW_SIZE = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def preface(window: int = 65535) -> bytes:
    """The beginning of a connection; the server may send `window` bytes on each stream until it gets more credit."""
    # Without a header table, the server's headers come uncompressed.
    settings = struct.pack(">HIHI", _HEADER_TABLE_SIZE, 0, _INITIAL_WINDOW_SIZE, window)
    return MAGIC + frame(SETTINGS, 0, 0, settings)


def header_block(*pairs: tuple[bytes, bytes]) -> bytes:
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in pairs)


def opening(path: bytes, *more: tuple[bytes, bytes], content_type: bytes = b"application/grpc") -> bytes:
    """The header block of a call."""
    usual = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x", b"te": b"trailers"}
    return header_block(*usual.items(), (b"content-type", content_type), *more)


def grpc_message(data: bytes, *, flag: int = 0, length: int | None = None) -> bytes:
    """A message with its length prefix, which may be wrong."""
    return struct.pack(">BI", flag, len(data) if length is None else length) + data


def _text(text: bytes) -> bytes:
    length, out = len(text), bytearray()
    if length < 127:
        return bytes([length]) + text
    out.append(127)
    length -= 127
    while length >= 128:
        out.append(length & 127 | 128)
        length >>= 7
    out.append(length)
    return bytes(out) + text


@dataclass(frozen=True, slots=True)
class Heard:
    """What a server sent before it fell silent, or closed the connection.

    Attributes:
        statuses: grpc-status and grpc-message of each answer, in order.
    """

    data: bytes
    closed: bool

    @property
    def statuses(self) -> list[tuple[int, str]]:
        pattern = rb"grpc-status.(\d+)(?:.{1,2}grpc-message.([^\0]*))?"
        found = re.findall(pattern, self.data, re.DOTALL)
        return [(int(code), message.decode(errors="replace")) for code, message in found]


async def say(path: str, data: bytes, *, until_status: bool = True, silence_s: float = 0.05) -> Heard:
    """Sends bytes to a Unix socket, and closes it when the server has answered, closed, or fallen silent."""
    reader, writer = await asyncio.open_unix_connection(path)
    heard, closed = b"", False
    try:
        writer.write(data)
        await writer.drain()
        limit_s = 10.0 if until_status else silence_s
        while not closed and not (until_status and b"grpc-status" in heard):
            async with asyncio.timeout(limit_s):
                part = await reader.read(1 << 16)
            heard, closed = heard + part, not part
    except TimeoutError:
        pass
    except ConnectionError:
        closed = True
    finally:
        writer.transport.abort()
    return Heard(heard, closed)
