"""Frames of a call on a libp2p stream, which is a pipe of bytes without half-closing.

    caller   opening | message ...       peer   ACCEPTED | message ...

    opening  deadline_s (8, float) | method bytes (2) | token bytes (2) | method | token
    message  length (4) | message of `framing`

Integers are little-endian. The caller closes the stream, once the reply is whole.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass

from diloco.transport.errors import DamagedFrame, MessageTooLarge
from diloco.transport.framing import MAX_CHUNKS, MAX_MESSAGE_BYTES
from diloco.transport.units import format_bytes

#: Sent by a server as soon as it takes a call; one that broke without it is taken for one that
#: never arrived, though a peer that dies may take the byte with it.
ACCEPTED = b"\x01"

#: Chunks over a relay, at most: it cuts a connection after 128 KiB, which 16 lanes may share, and
#: each of them must get on by a chunk before.
RELAYED_CHUNK_BYTES = 4 << 10

#: Deadline that travels with a call whose own one counts from its last movement, in seconds.
LONGEST_S = 1e6
MAX_METHOD_BYTES = 256
MAX_TOKEN_BYTES = 1024

_OPENING = struct.Struct("<dHH")
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Opening:
    """What a caller says before its header; `deadline_s` only lets the peer give up too."""

    method: str
    token: str
    deadline_s: float

    def to_bytes(self) -> bytes:
        """Write it."""
        method, token = self.method.encode(), self.token.encode()
        return _OPENING.pack(self.deadline_s, len(method), len(token)) + method + token


def largest_chunk(chunk_bytes: int, payload_bytes: int, *, is_relayed: bool) -> int:
    """Return the largest chunk of a payload, that of the configuration or what a relay takes.

    Raises:
        MessageTooLarge: If a relay would need more than `MAX_CHUNKS` of them.
    """
    if not is_relayed:
        return chunk_bytes
    largest = min(RELAYED_CHUNK_BYTES, chunk_bytes)
    if payload_bytes > MAX_CHUNKS * largest:
        raise MessageTooLarge(
            f"{payload_bytes} bytes cannot travel through a relay, at most "
            f"{format_bytes(MAX_CHUNKS * largest)}: dial the peer directly (open a port to it)"
        )
    return largest


async def read_opening(reader: asyncio.StreamReader) -> Opening:
    """Read what `Opening.to_bytes` wrote.

    Raises:
        DamagedFrame: If it is none.
        EOFError: If the stream ends.
    """
    deadline_s, *sizes = _OPENING.unpack(await reader.readexactly(_OPENING.size))
    if sizes[0] > MAX_METHOD_BYTES or sizes[1] > MAX_TOKEN_BYTES or not 0 < deadline_s < 1e9:
        raise DamagedFrame(f"a call opens with {deadline_s} s and texts of {sizes} bytes")
    try:
        method, token = [(await reader.readexactly(size)).decode() for size in sizes]
    except UnicodeDecodeError as error:
        raise DamagedFrame(f"a call opens with bytes that are no text: {error}") from error
    return Opening(method, token, deadline_s)


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """Read one message.

    Raises:
        DamagedFrame: If it declares more than a message may have; nothing was read of it.
        EOFError: If the stream ends.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise DamagedFrame(f"a message of {length} bytes is announced; {MAX_MESSAGE_BYTES} at most")
    return await reader.readexactly(length)


async def write_message(writer: asyncio.StreamWriter, message: bytes) -> None:
    """Write one message, and wait until the stream takes another."""
    writer.write(_LENGTH.pack(len(message)))
    writer.write(message)
    await writer.drain()
