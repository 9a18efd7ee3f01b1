"""Turns a call's header and payload into messages, and back.

    first message  checksum (8) | magic (4) | version (2) | failure (2) | header bytes (4)
                   | chunk bytes (4) | payload bytes (8) | flags (1) | transfer (16) | reply (16)
                   | offset (8) | header | payload, if flag 4
    every other    checksum (8) | form (1) | data: `chunk_bytes` of the payload, the last one less,
                   as they are (form 0) or as one frame of zstandard that is shorter (form 1)
    position       checksum (8) | magic (4) | offset (8)

A reply may be a failure instead: then its number is not 0 and the header is a message for people.

A call with a name (`transfer`, not 0) goes on where an earlier attempt broke. The caller of such an
attempt, or of a first one that waits for its turn (flag 1), says how many bytes (`offset`) of which
`reply` it has, and sends no chunk before the peer has said, in a message of its own ahead of the
reply, at which position the payload goes on. In a reply, `reply` is its name and `offset` the byte
at which its chunks begin; 0 when the caller's part of it is worth nothing. Flag 2: payloads of
other calls go first. Flag 4: the payload is in this message, there is no other; at most
`WHOLE_BYTES`, and never with flag 1. Flag 8: the caller takes no payload in reply. Flag 16: the
reply comes in chunks of about `SMALL_CHUNK_BYTES`, as the way is thin or damages what travels.

Integers are little-endian; a checksum is the xxh3_64 (canonical, big-endian) of everything after
it in its message. Positions count bytes of the payload, however its chunks travel. Both directions
of a call use the same messages. Pure; content is never parsed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import xxhash
import zstandard

from diloco.transport.contracts import PROTOCOL_VERSION, Buffer
from diloco.transport.errors import (
    ChecksumMismatch,
    DamagedFrame,
    DeadlineExceeded,
    FrameError,
    HandlerFailed,
    MessageTooLarge,
    NotYet,
    OutOfRange,
    Overloaded,
    TransportError,
    Unauthorised,
    VersionMismatch,
)
from diloco.transport.transfer import NO_NAME, Partial

#: Largest header, in bytes. Headers are small messages; what is large is a payload.
MAX_HEADER_BYTES = 1 << 20
#: Chunk size used unless said otherwise; 1 to 4 MiB move fastest through gRPC.
DEFAULT_CHUNK_BYTES = 1 << 20
#: Largest chunk that a receiver accepts, so that a message has a bound before it is read.
MAX_CHUNK_BYTES = 8 << 20
#: A payload of up to so many bytes travels in the first message; a broken one is sent again.
WHOLE_BYTES = 256 << 10
#: Chunk of a payload over a way that is thin or damages: what has come of one that does not come
#: whole is lost.
SMALL_CHUNK_BYTES = 64 << 10
#: Most chunks of one payload: 64 GiB at the usual size. Without it a peer could declare a payload
#: without end, or one of single bytes that costs a message each.
MAX_CHUNKS = 1 << 16

_MAGIC = b"DLCO"
_POSITION_MAGIC = b"DLCP"
_CHECKSUM_BYTES = 8
_CHUNK_AT = _CHECKSUM_BYTES + 1
_PLAIN, _PACKED = bytes([0]), bytes([1])  # forms
_RELEASE = struct.Struct("<4sH")  # what an opening of any version begins with
_OPENING = struct.Struct("<4sHHIIQB16s16sQ")
_POSITION = struct.Struct("<4sQ")
_IS_RESUMING, _IS_BULK, _IS_WHOLE, _TAKES_NONE, _TAKES_SMALL = 1, 2, 4, 8, 16
#: Failures by their number on the wire; numbers are never used again.
_FAILURES: dict[int, type[TransportError]] = {
    1: HandlerFailed,
    2: FrameError,
    3: ChecksumMismatch,
    4: MessageTooLarge,
    5: VersionMismatch,
    6: Unauthorised,
    7: Overloaded,
    8: NotYet,
    9: OutOfRange,
    10: DamagedFrame,
    11: DeadlineExceeded,
}
_MAX_FAILURE_BYTES = 1 << 16
#: Largest message of this protocol.
MAX_MESSAGE_BYTES = (
    _CHECKSUM_BYTES + _OPENING.size + max(MAX_HEADER_BYTES + WHOLE_BYTES, MAX_CHUNK_BYTES)
)


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a first message says of a call that may go on after a break; see above.

    Attributes:
        transfer: Name of the call; `NO_NAME`: it cannot go on.
        is_resuming: Whether an earlier attempt may have left something at the peer.
        is_bulk: Whether its payloads let those of other calls go first.
        takes_none: Whether its caller takes no payload in reply.
        takes_small: Whether its caller takes a reply in small chunks.
        reply: Name of a reply.
        offset: Bytes of that reply.
    """

    transfer: bytes = NO_NAME
    is_resuming: bool = False
    is_bulk: bool = False
    takes_none: bool = False
    takes_small: bool = False
    reply: bytes = NO_NAME
    offset: int = 0


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


def frame_messages(
    header: bytes,
    payload: Buffer,
    chunk_bytes: int,
    resumption: Resumption = Resumption(),
) -> Iterator[bytes]:
    """Return the messages of one direction of a call; a chunk is copied once, when asked for.

    Args:
        header: At most `MAX_HEADER_BYTES`.
        payload: C-contiguous buffer of any item type; empty gives no chunk at all.
        chunk_bytes: Payload bytes of every chunk but the last, 1 .. `MAX_CHUNK_BYTES`.
        resumption: Its `offset` is where a reply's chunks begin.

    Raises:
        MessageTooLarge: If the header is too large.
        ValueError: If `chunk_bytes` is out of range.
    """
    first = frame_opening(header, memoryview(payload).nbytes, chunk_bytes, resumption)
    return _chain(first, frame_chunks(payload, chunk_bytes, resumption.offset))


def frame_opening(
    header: bytes,
    payload_bytes: int,
    chunk_bytes: int,
    resumption: Resumption = Resumption(),
) -> bytes:
    """Return the first message of a call; as `frame_messages`."""
    check_header(len(header))
    check_chunk_bytes(chunk_bytes)
    return _frame_first(0, header, payload_bytes, chunk_bytes, resumption)


def frame_whole(header: bytes, payload: Buffer, resumption: Resumption = Resumption()) -> bytes:
    """Return the only message of a call whose payload has at most `WHOLE_BYTES`.

    Raises:
        MessageTooLarge: If the header is too large.
    """
    check_header(len(header))
    size = memoryview(payload).nbytes
    return _frame_first(0, header, size, max(size, 1), resumption, payload)


def frame_chunk(data: Buffer, packed: bytes = b"") -> bytes:
    """Return the message of a chunk, with what zstandard has made of it if that is given."""
    return _seal(_PACKED, packed) if packed else _seal(_PLAIN, data)


def frame_chunks(
    payload: Buffer,
    chunk_bytes: int,
    offset: int = 0,
    frame: Callable[[memoryview], bytes] = frame_chunk,
) -> Iterator[bytes]:
    """Return the chunks of a payload from byte `offset` on, each made by `frame` when asked for."""
    view = memoryview(payload).cast("B")
    for start in range(offset, len(view), chunk_bytes):
        yield frame(view[start : start + chunk_bytes])


def frame_failure(error: TransportError) -> bytes:
    """Return the one message of a reply that is a failure; reading it raises `error` again."""
    code = next(code for code, kind in _FAILURES.items() if type(error) is kind)
    return _frame_first(code, str(error).encode()[:_MAX_FAILURE_BYTES], 0, 1, Resumption())


def frame_position(offset: int) -> bytes:
    """Return the message that says at which byte the payload of a resumed call goes on."""
    return _seal(_POSITION.pack(_POSITION_MAGIC, offset))


def read_position(message: bytes, payload_bytes: int) -> int | None:
    """Read what `frame_position` wrote; None: the message is something else.

    Raises:
        FrameError: If it lies beyond the payload.
        ChecksumMismatch: If it arrived damaged.
    """
    body = memoryview(message)[_CHECKSUM_BYTES:]
    if len(body) != _POSITION.size or body[: len(_POSITION_MAGIC)] != _POSITION_MAGIC:
        return None
    _verify(message, "the position")
    _, offset = _POSITION.unpack(body)
    if offset > payload_bytes:
        raise FrameError(f"the peer claims to have {offset} bytes of {payload_bytes}")
    return int(offset)


def _frame_first(
    failure: int,
    header: bytes,
    payload_bytes: int,
    chunk_bytes: int,
    resumption: Resumption,
    whole: Buffer | None = None,
) -> bytes:
    flags = (
        _IS_RESUMING * resumption.is_resuming
        | _IS_BULK * resumption.is_bulk
        | _IS_WHOLE * (whole is not None)
        | _TAKES_NONE * resumption.takes_none
        | _TAKES_SMALL * resumption.takes_small
    )
    opening = (_MAGIC, PROTOCOL_VERSION, failure, len(header), chunk_bytes, payload_bytes)
    named = (flags, resumption.transfer, resumption.reply, resumption.offset)
    return _seal(_OPENING.pack(*opening, *named), header, whole or b"")


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


class FrameReader:
    """Rebuilds one direction of a call, message by message; `is_whole`: the first has it all.

    The first message makes the reader and tells header and declared size; nothing is allocated
    for the payload until `accept` has agreed to that size, nor before its first chunk: one that
    waits in its stream is not in memory twice. `feed` takes the chunks in order.
    """

    def __init__(self, first_message: bytes) -> None:
        """Parse the first message.

        Raises:
            DamagedFrame: If it is not a first message of this protocol.
            ChecksumMismatch: If it arrived damaged.
            VersionMismatch: If the peer speaks another version.
            FrameError: If it says what no peer says.
            MessageTooLarge: If it declares a header over `MAX_HEADER_BYTES`.
            TransportError: The failure that the peer sent instead of a reply.
        """
        body = memoryview(first_message)[_CHECKSUM_BYTES:]
        if len(body) >= _RELEASE.size:  # before the rest, which has other sizes in other versions
            magic, version = _RELEASE.unpack_from(body)
            if magic != _MAGIC:
                raise DamagedFrame(
                    f"first message starts with {magic!r}: the peer is not a diloco peer"
                )
            _verify(first_message, "the first message")  # of every version
            if version != PROTOCOL_VERSION:
                raise VersionMismatch(
                    f"the peer speaks wire protocol {version}, this process {PROTOCOL_VERSION}: "
                    "run the same release at both ends"
                )
        if len(body) < _OPENING.size:
            raise DamagedFrame(f"first message has {len(first_message)} bytes, too few for a frame")
        _, _, failure, header_bytes, chunk_bytes, payload_bytes, *named = _OPENING.unpack_from(body)
        check_header(header_bytes)
        flags, transfer, reply, offset = named
        self.is_whole = bool(flags & _IS_WHOLE)
        if self.is_whole and (payload_bytes > WHOLE_BYTES or flags & _IS_RESUMING):
            raise FrameError(
                f"first message declares that it holds a payload of {payload_bytes} bytes, flags "
                f"{flags}; up to {WHOLE_BYTES} bytes may travel so, and never go on after a break"
            )
        declared = header_bytes + payload_bytes * self.is_whole
        if len(body) != _OPENING.size + declared:
            raise FrameError(
                f"first message declares {declared} bytes of header "
                f"{'and payload ' * self.is_whole}and holds {len(body) - _OPENING.size}"
            )
        if not 1 <= chunk_bytes <= MAX_CHUNK_BYTES:
            raise FrameError(f"the peer declares chunks of {chunk_bytes} bytes")
        if payload_bytes > MAX_CHUNKS * chunk_bytes:
            raise FrameError(
                f"the peer declares {payload_bytes} bytes in chunks of {chunk_bytes}; "
                f"{MAX_CHUNKS} chunks are allowed"
            )
        self.header = bytes(body[_OPENING.size : _OPENING.size + header_bytes])
        if failure:
            raise _FAILURES.get(failure, HandlerFailed)(self.header.decode(errors="replace"))
        self.resumption = Resumption(
            transfer=transfer,
            is_resuming=bool(flags & _IS_RESUMING),
            is_bulk=bool(flags & _IS_BULK),
            takes_none=bool(flags & _TAKES_NONE),
            takes_small=bool(flags & _TAKES_SMALL),
            reply=reply,
            offset=offset,
        )
        self.payload_bytes: int = payload_bytes
        self.partial: Partial | None = None
        self._chunk_bytes: int = chunk_bytes
        # Nothing else of the message is held on to.
        self._whole = body[_OPENING.size + header_bytes :] if self.is_whole else None

    @property
    def held_bytes(self) -> int:
        """What the first message holds in memory: header, and payload until it is accepted."""
        return len(self.header) + (self._whole.nbytes if self._whole is not None else 0)

    @property
    def is_complete(self) -> bool:
        """Whether every declared byte has arrived (true at once for an empty payload)."""
        return self.payload_bytes == (self.partial.filled if self.partial else 0)

    @property
    def payload(self) -> bytearray:
        """The received payload; only after `accept` and when `is_complete`."""
        assert self.partial is not None and self.is_complete, "payload asked for too early"
        return self.partial.payload

    def accept(self, max_payload_bytes: int, partial: Partial | None = None) -> Partial:
        """Agree to the payload if its declared size is at most `max_payload_bytes`; once.

        Args:
            max_payload_bytes: What may be held.
            partial: What an earlier attempt left; gone on with if it is of the declared size.

        Returns:
            What the chunks go into, in order, from its first missing byte on.

        Raises:
            MessageTooLarge: If more was declared; nothing was allocated.
        """
        if self.payload_bytes > max_payload_bytes:
            raise MessageTooLarge(
                f"the peer declares a payload of {self.payload_bytes} bytes; "
                f"{max_payload_bytes} are allowed"
            )
        assert self.partial is None, "a payload is accepted once"
        if self._whole is not None:
            partial = Partial(bytearray(self._whole), self.payload_bytes)
            self._whole = None
        elif partial is None or len(partial.payload) != self.payload_bytes:
            partial = Partial()
        self.partial = partial
        return partial

    def feed(self, message: bytes) -> int:
        """Take the next chunk; returns its bytes of the payload.

        Raises:
            DamagedFrame: If the chunk has not exactly the size that is due; nothing is unpacked
                that says of itself that it is of another.
            ChecksumMismatch: If it arrived damaged.
        """
        assert self.partial is not None, "chunk fed before the size was accepted"
        filled = self.partial.filled
        due = min(self._chunk_bytes, self.payload_bytes - filled)
        where = f"at byte {filled} of {self.payload_bytes}"
        form, data = message[_CHECKSUM_BYTES:_CHUNK_AT], memoryview(message)[_CHUNK_AT:]
        is_plain = form == _PLAIN
        if (len(data) != due if is_plain else form != _PACKED or len(data) >= due) or due == 0:
            raise DamagedFrame(
                f"chunk of {len(data)} bytes where {due} are due, form {form.hex()!r}, {where}"
            )
        _verify(message, f"the chunk {where}")
        if not is_plain:
            data = _unpacked(data, due, where)
        if due == self.payload_bytes:
            self.partial.payload = bytearray(data)
        else:
            self.partial.payload = self.partial.payload or bytearray(self.payload_bytes)
            self.partial.payload[filled : filled + due] = data
        self.partial.filled += due
        return due

    def truncated(self) -> DamagedFrame:
        """The error of a peer that ended before its declared size."""
        filled = self.partial.filled if self.partial else 0
        return DamagedFrame(f"the peer sent {filled} bytes of {self.payload_bytes} and stopped")


def _seal(*parts: Buffer) -> bytes:
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    return b"".join((checksum.digest(), *parts))


def _unpacked(packed: memoryview, due: int, where: str) -> memoryview:
    """Return what a chunk was before it was packed; its own word on its size is checked first."""
    try:
        size = zstandard.frame_content_size(packed)
        if size != due:
            raise DamagedFrame(f"chunk that unpacks to {size} bytes where {due} are due, {where}")
        return memoryview(zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise DamagedFrame(f"chunk that is not of zstandard, {where}: {error}") from error


def _verify(message: bytes, what: str) -> None:
    if xxhash.xxh3_64_digest(memoryview(message)[_CHECKSUM_BYTES:]) != message[:_CHECKSUM_BYTES]:
        raise ChecksumMismatch(f"{what} ({len(message)} bytes) does not match its checksum")
