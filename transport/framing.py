"""How a call's header and payload become messages, and back.

    first message  checksum (8) | magic (4) | version (2) | failure (2) | header bytes (4)
                   | chunk bytes (4) | payload bytes (8) | header
    every other    checksum (8) | data: `chunk_bytes` of the payload, the last one less

A reply may be a failure instead: then its number is not 0 and the header is a message for people.

Integers are little-endian; a checksum is the xxh3_64 (canonical, big-endian) of everything after
it in its message. Both directions of a call use the same form. Pure; content is never parsed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import xxhash

from transport.contracts import PROTOCOL_VERSION, Buffer
from transport.errors import (
    ChecksumMismatch,
    FrameError,
    HandlerFailed,
    MessageTooLarge,
    Overloaded,
    TransportError,
    Unauthorised,
    VersionMismatch,
)

#: Largest header, in bytes. Headers are small messages; what is large is a payload.
MAX_HEADER_BYTES = 1 << 20
#: Chunk size used unless said otherwise; 1 to 4 MiB move fastest through gRPC.
DEFAULT_CHUNK_BYTES = 1 << 20
#: Largest chunk that a receiver accepts, so that a message has a bound before it is read.
MAX_CHUNK_BYTES = 8 << 20
#: Most chunks of one payload: 64 GiB at the usual size. Without it a peer could declare a payload
#: without end, or one of single bytes that costs a message each.
MAX_CHUNKS = 1 << 16

_MAGIC = b"DLCO"
_CHECKSUM_BYTES = 8
_OPENING = struct.Struct("<4sHHIIQ")
#: Failures by their number on the wire; numbers are never used again.
_FAILURES: dict[int, type[TransportError]] = {
    1: HandlerFailed,
    2: FrameError,
    3: ChecksumMismatch,
    4: MessageTooLarge,
    5: VersionMismatch,
    6: Unauthorised,
    7: Overloaded,
}
_MAX_FAILURE_BYTES = 1 << 16
#: Largest message of this protocol.
MAX_MESSAGE_BYTES = _CHECKSUM_BYTES + _OPENING.size + max(MAX_HEADER_BYTES, MAX_CHUNK_BYTES)


def check_call(header: bytes, *, deadline_s: float, max_reply_bytes: int) -> None:
    """Refuse arguments of a call that no transport can serve.

    Raises:
        MessageTooLarge: If the header is over `MAX_HEADER_BYTES`.
        ValueError: If `deadline_s` is not positive and finite or `max_reply_bytes` is negative.
    """
    if not 0 < deadline_s < float("inf"):
        raise ValueError(f"deadline_s = {deadline_s}: must be finite and over 0 seconds")
    if max_reply_bytes < 0:
        raise ValueError(f"max_reply_bytes = {max_reply_bytes}: must be 0 or more")
    check_header(len(header))


def check_header(header_bytes: int) -> None:
    """Refuse a header over `MAX_HEADER_BYTES`.

    Raises:
        MessageTooLarge: If it is.
    """
    if header_bytes > MAX_HEADER_BYTES:
        raise MessageTooLarge(f"header of {header_bytes} bytes; {MAX_HEADER_BYTES} are allowed")


def check_chunk_bytes(chunk_bytes: int) -> None:
    """Refuse a chunk size outside 1 .. `MAX_CHUNK_BYTES`.

    Raises:
        ValueError: If it is outside.
    """
    if not 1 <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise ValueError(f"chunk_bytes = {chunk_bytes}: must be in 1 .. {MAX_CHUNK_BYTES}")


def frame_messages(header: bytes, payload: Buffer, chunk_bytes: int) -> Iterator[bytes]:
    """Return the messages of one direction of a call; a chunk is copied once, when asked for.

    Args:
        header: At most `MAX_HEADER_BYTES`.
        payload: C-contiguous buffer of any item type; empty gives no chunk at all.
        chunk_bytes: Payload bytes of every chunk but the last, 1 .. `MAX_CHUNK_BYTES`.

    Raises:
        MessageTooLarge: If the header is too large.
        ValueError: If `chunk_bytes` is out of range.
    """
    check_header(len(header))
    check_chunk_bytes(chunk_bytes)
    return _frame(0, header, memoryview(payload).cast("B"), chunk_bytes)


def frame_failure(error: TransportError) -> bytes:
    """Return the one message of a reply that is a failure; reading it raises `error` again."""
    code = next(code for code, kind in _FAILURES.items() if type(error) is kind)
    return next(_frame(code, str(error).encode()[:_MAX_FAILURE_BYTES], memoryview(b""), 1))


def _frame(failure: int, header: bytes, view: memoryview, chunk_bytes: int) -> Iterator[bytes]:
    opening = (_MAGIC, PROTOCOL_VERSION, failure, len(header), chunk_bytes, len(view))
    yield _seal(_OPENING.pack(*opening) + header)
    for start in range(0, len(view), chunk_bytes):
        yield _seal(view[start : start + chunk_bytes])


class FrameReader:
    """Rebuilds one direction of a call, message by message.

    The first message makes the reader and tells header and declared size; nothing is allocated
    for the payload until `accept` has agreed to that size. Then `feed` takes the chunks in order.
    """

    def __init__(self, first_message: bytes) -> None:
        """Parse the first message.

        Raises:
            FrameError: If it is not a first message of this protocol.
            VersionMismatch: If the peer speaks another version.
            ChecksumMismatch: If it arrived damaged.
            MessageTooLarge: If it declares a header over `MAX_HEADER_BYTES`.
            TransportError: The failure that the peer sent instead of a reply.
        """
        body = memoryview(first_message)[_CHECKSUM_BYTES:]
        if len(body) < _OPENING.size:
            raise FrameError(f"first message has {len(first_message)} bytes, too few for a frame")
        opening = _OPENING.unpack_from(body)
        magic, version, failure, header_bytes, chunk_bytes, payload_bytes = opening
        if magic != _MAGIC:
            raise FrameError(f"first message starts with {magic!r}: the peer is not a diloco peer")
        if version != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"the peer speaks wire protocol {version}, this process {PROTOCOL_VERSION}: "
                "run the same release at both ends"
            )
        check_header(header_bytes)
        _verify(first_message, "the first message")
        if len(body) != _OPENING.size + header_bytes:
            raise FrameError(
                f"first message declares a header of {header_bytes} bytes "
                f"and holds {len(body) - _OPENING.size}"
            )
        if not 1 <= chunk_bytes <= MAX_CHUNK_BYTES:
            raise FrameError(f"the peer declares chunks of {chunk_bytes} bytes")
        if payload_bytes > MAX_CHUNKS * chunk_bytes:
            raise FrameError(
                f"the peer declares {payload_bytes} bytes in chunks of {chunk_bytes}; "
                f"{MAX_CHUNKS} chunks are allowed"
            )
        self.header = bytes(body[_OPENING.size :])
        if failure:
            raise _FAILURES.get(failure, HandlerFailed)(self.header.decode(errors="replace"))
        self.payload_bytes: int = payload_bytes
        self._chunk_bytes: int = chunk_bytes
        self._payload: bytearray | None = None
        self._filled = 0

    @property
    def is_complete(self) -> bool:
        """Whether every declared byte has arrived (true at once for an empty payload)."""
        return self._filled == self.payload_bytes

    @property
    def payload(self) -> bytearray:
        """The received payload; only after `accept` and when `is_complete`."""
        assert self._payload is not None and self.is_complete, "payload asked for too early"
        return self._payload

    def accept(self, max_payload_bytes: int) -> None:
        """Allocate the payload if its declared size is at most `max_payload_bytes`.

        Raises:
            MessageTooLarge: If more was declared; nothing was allocated.
        """
        if self.payload_bytes > max_payload_bytes:
            raise MessageTooLarge(
                f"the peer declares a payload of {self.payload_bytes} bytes; "
                f"{max_payload_bytes} are allowed"
            )
        self._payload = bytearray(self.payload_bytes)

    def feed(self, message: bytes) -> None:
        """Take the next chunk.

        Raises:
            FrameError: If the chunk has not exactly the size that is due.
            ChecksumMismatch: If it arrived damaged.
        """
        assert self._payload is not None, "chunk fed before the size was accepted"
        data = memoryview(message)[_CHECKSUM_BYTES:]
        due = min(self._chunk_bytes, self.payload_bytes - self._filled)
        if len(message) != _CHECKSUM_BYTES + due or due == 0:
            raise FrameError(
                f"chunk of {len(data)} bytes where {due} are due, "
                f"at byte {self._filled} of {self.payload_bytes}"
            )
        _verify(message, f"the chunk at byte {self._filled} of {self.payload_bytes}")
        self._payload[self._filled : self._filled + due] = data
        self._filled += due

    def truncated(self) -> FrameError:
        """The error of a peer that ended before its declared size."""
        return FrameError(f"the peer sent {self._filled} bytes of {self.payload_bytes} and stopped")


def _seal(data: Buffer) -> bytes:
    return b"".join((xxhash.xxh3_64_digest(data), data))


def _verify(message: bytes, what: str) -> None:
    if xxhash.xxh3_64_digest(memoryview(message)[_CHECKSUM_BYTES:]) != message[:_CHECKSUM_BYTES]:
        raise ChecksumMismatch(f"{what} ({len(message)} bytes) does not match its checksum")
