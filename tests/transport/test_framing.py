import struct
import sys
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from diloco.transport.errors import (
    ChecksumMismatch,
    FrameError,
    MessageTooLarge,
    TransportError,
    VersionMismatch,
)
from diloco.transport.framing import (
    MAX_CHUNK_BYTES,
    MAX_HEADER_BYTES,
    WHOLE_BYTES,
    FrameReader,
    Resumption,
    check_call,
    frame_messages,
    frame_whole,
)


def sealed(message: bytes | bytearray) -> bytes:
    """Return the message under a checksum of what it says now."""
    return xxhash.xxh3_64_digest(message[8:]) + bytes(message[8:])


def read(messages: list[bytes], max_payload_bytes: int) -> tuple[bytes, bytes]:
    reader = FrameReader(messages[0])
    reader.accept(max_payload_bytes)
    for message in messages[1:]:
        reader.feed(message)
    assert reader.is_complete
    return reader.header, bytes(reader.payload)


@given(header=st.binary(max_size=64), payload=st.binary(max_size=600), chunk=st.integers(1, 700))
def test_framing_covers_every_byte_for_any_chunk_size(
    header: bytes, payload: bytes, chunk: int
) -> None:
    messages = list(frame_messages(header, payload, chunk))

    assert read(messages, len(payload)) == (header, payload)
    assert len(messages) == 1 + -(-len(payload) // chunk)
    assert all(type(message) is bytes for message in messages)


@given(header=st.binary(max_size=64), payload=st.binary(max_size=600))
def test_a_whole_message_holds_header_and_payload(header: bytes, payload: bytes) -> None:
    message = frame_whole(header, payload)

    assert read([message], len(payload)) == (header, payload)
    if payload:
        with pytest.raises(MessageTooLarge):
            FrameReader(message).accept(len(payload) - 1)


@pytest.mark.parametrize("cut", [1, -1], ids=["longer", "shorter"])
def test_a_whole_message_of_another_size_than_declared_is_refused(cut: int) -> None:
    body = frame_whole(b"header", b"payload")[8:]
    body = body + b"!" if cut < 0 else body[:-cut]

    with pytest.raises(FrameError, match="declares 13 bytes of header and payload and holds"):
        FrameReader(xxhash.xxh3_64_digest(body) + body)


@pytest.mark.parametrize("resumption", [Resumption(), Resumption(offset=3)], ids=["call", "reply"])
def test_a_whole_message_has_a_bound_and_is_never_gone_on_with(resumption: Resumption) -> None:
    assert FrameReader(frame_whole(b"", bytes(WHOLE_BYTES), resumption)).is_whole
    with pytest.raises(FrameError, match=f"payload of {WHOLE_BYTES + 1} bytes, flags 4; up to"):
        FrameReader(frame_whole(b"", bytes(WHOLE_BYTES + 1), resumption))
    with pytest.raises(FrameError, match=r"payload of 7 bytes, flags 5; .* never go on"):
        FrameReader(frame_whole(b"", b"payload", replace(resumption, is_resuming=True)))


def test_no_message_is_held_on_to_next_to_its_payload() -> None:
    whole, opening = frame_whole(b"h", bytes(1000)), next(frame_messages(b"h", bytes(1000), 100))
    before = [sys.getrefcount(message) for message in (whole, opening)]

    readers = [FrameReader(whole), FrameReader(opening)]
    for reader in readers:
        reader.accept(1000)

    assert [sys.getrefcount(message) for message in (whole, opening)] == before


@given(payload=st.binary(min_size=1, max_size=100), chunk=st.integers(1, 40), data=st.data())
def test_a_flipped_bit_anywhere_is_found(payload: bytes, chunk: int, data: st.DataObject) -> None:
    messages = [frame_whole(b"header", payload)]
    if data.draw(st.booleans()):
        messages = list(frame_messages(b"header", payload, chunk))
    index = data.draw(st.integers(0, len(messages) - 1))
    position = data.draw(st.integers(0, len(messages[index]) * 8 - 1))
    damaged = bytearray(messages[index])
    damaged[position // 8] ^= 1 << position % 8
    messages[index] = bytes(damaged)

    with pytest.raises(TransportError) as found:
        read(messages, 1 << 40)
    assert found.value.is_damage and found.value.is_retryable


@pytest.mark.parametrize(
    "payload",
    [b"abcdefgh", bytearray(b"abcdefgh"), memoryview(b"abcdefgh").cast("I")],
    ids=["bytes", "bytearray", "memoryview-of-integers"],
)
def test_any_buffer_is_framed_by_its_bytes(payload: bytes) -> None:
    assert read(list(frame_messages(b"", payload, 3)), 8) == (b"", b"abcdefgh")


def test_declared_size_over_the_allowed_is_refused_before_anything_is_allocated() -> None:
    first = next(frame_messages(b"h", bytes(10), 4))
    reader = FrameReader(first)

    assert (reader.header, reader.payload_bytes) == (b"h", 10)
    with pytest.raises(MessageTooLarge, match=r"10 bytes.* 9 are allowed"):
        reader.accept(9)
    assert reader.partial is None


def test_header_over_the_limit_is_refused_at_both_ends() -> None:
    assert len(next(frame_messages(bytes(MAX_HEADER_BYTES), b"", 1))) > MAX_HEADER_BYTES
    with pytest.raises(MessageTooLarge, match="header"):
        next(frame_messages(bytes(MAX_HEADER_BYTES + 1), b"", 1))
    first = bytearray(next(frame_messages(b"", b"", 1)))
    struct.pack_into("<I", first, 8 + 8, MAX_HEADER_BYTES + 1)
    with pytest.raises(MessageTooLarge, match="header"):
        FrameReader(sealed(first))


@pytest.mark.parametrize("size", [0, 7, 29], ids=["empty", "no-checksum", "short"])
def test_too_short_a_first_message_is_no_frame(size: int) -> None:
    with pytest.raises(FrameError):
        FrameReader(bytes(size))


def test_foreign_bytes_and_other_versions_are_named() -> None:
    first = next(frame_messages(b"", b"", 1))
    with pytest.raises(FrameError, match="not a diloco peer"):
        FrameReader(first.replace(b"DLCO", b"HTTP"))
    other = bytearray(first)
    struct.pack_into("<H", other, 8 + 4, 77)
    with pytest.raises(VersionMismatch, match="77"):
        FrameReader(sealed(other))
    with pytest.raises(ChecksumMismatch):
        FrameReader(bytes(other))


@pytest.mark.parametrize("header", [b"", bytes(60)], ids=["shorter", "longer"])
def test_the_first_version_is_named_whatever_the_size_of_its_opening(header: bytes) -> None:
    first = struct.pack("<4sHHIIQ", b"DLCO", 1, 0, len(header), 1 << 20, 0) + header

    with pytest.raises(VersionMismatch, match="wire protocol 1"):
        FrameReader(xxhash.xxh3_64_digest(first) + first)


def test_damage_is_told_from_misplacement() -> None:
    first, chunk, last = frame_messages(b"", b"abcde", 3)
    reader = FrameReader(first)
    reader.accept(5)

    with pytest.raises(ChecksumMismatch, match="byte 0 of 5"):
        reader.feed(chunk[:-1] + b"?")
    with pytest.raises(FrameError, match="2 bytes where 3 are due"):
        reader.feed(last)
    reader.feed(chunk)
    assert "3 bytes of 5" in str(reader.truncated())
    reader.feed(last)
    with pytest.raises(FrameError, match="0 are due"):
        reader.feed(last)


@pytest.mark.parametrize("chunk_bytes", [0, -1, MAX_CHUNK_BYTES + 1])
def test_chunk_size_out_of_range_is_refused(chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match="chunk_bytes"):
        next(frame_messages(b"", b"", chunk_bytes))


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_call_needs_a_finite_positive_deadline(deadline_s: float) -> None:
    with pytest.raises(ValueError, match="deadline_s"):
        check_call(b"", deadline_s=deadline_s, max_reply_bytes=0)


def test_a_negative_reply_size_is_refused() -> None:
    with pytest.raises(ValueError, match="max_reply_bytes"):
        check_call(b"", deadline_s=1.0, max_reply_bytes=-1)
