"""Where chunks are packed: what is decided from measurements, and what crosses a line then."""

from __future__ import annotations

import random

import pytest
import zstandard

from diloco.transport.errors import ChecksumMismatch, DamagedFrame
from diloco.transport.framing import FrameReader, frame_chunk, frame_opening
from diloco.transport.shaping.pacing import Pacer
from diloco.transport.shaping.packing import (
    MOST_LEFT,
    TRIED_AGAIN,
    UNKNOWN_BYTES,
    LineTime,
    Packers,
    Packing,
    Work,
)

MIB = 1 << 20
#: Leaves a quarter of its bytes.
SHRINKING = bytes(b & 0x03 for b in random.Random(1).randbytes(MIB))
FIXED = random.Random(2).randbytes(MIB)


def line(s_per_byte: float, num_bytes: int = UNKNOWN_BYTES) -> LineTime:
    made = LineTime(Work())
    made.waits(0.0)
    made.moved(s_per_byte * num_bytes, num_bytes)
    return made


def test_a_line_takes_as_long_as_it_keeps_anyone_waiting_by_what_it_took() -> None:
    made = LineTime(Work())
    made.waits(10.0)
    made.waits(11.0)
    made.moved(12.0, UNKNOWN_BYTES // 2)
    assert made.s_per_byte is None, "too little to say"
    made.moved(14.0, UNKNOWN_BYTES // 2)
    made.waits(100.0)  # nobody waited in between

    assert made.s_per_byte == 4.0 / UNKNOWN_BYTES


def test_own_work_and_messages_that_never_left_are_no_waiting() -> None:
    made = LineTime(Work())
    made.waits(0.0)
    made.work.seconds += 1.5  # for whichever line
    made.moved(2.0, UNKNOWN_BYTES)
    made.waits(2.0)
    made.gave_up(50.0)

    assert made.s_per_byte == 0.5 / UNKNOWN_BYTES


def test_a_line_that_was_slow_once_is_soon_known_as_fast() -> None:
    made = line(1e-6)
    for _ in range(1000):
        made.waits(1.0)
        made.moved(1.0, MIB)

    assert made.s_per_byte is not None and made.s_per_byte < 1e-12


@pytest.mark.parametrize(
    ("left", "seconds", "s_per_byte", "is_packed"),
    [
        (0.75, 0.001, 80e-9, True),  # 100 Mbit/s
        (0.75, 0.001, 0.5e-9, False),  # loopback
        (0.75, 0.001, 0.0, False),
        (0.75, 0.001, None, True),
        (0.75, 0.2, 80e-9, False),  # a starved processor
        (0.96, 0.001, 80e-6, False),
        (0.96, 0.001, None, False),
    ],
)
def test_chunks_are_packed_where_the_line_takes_longer_for_what_that_saves(
    left: float, seconds: float, s_per_byte: float | None, is_packed: bool
) -> None:
    packing = Packing()
    assert packing.wants(s_per_byte), "the first is tried"

    assert packing.tried(MIB, int(left * MIB), seconds, s_per_byte) == is_packed
    assert packing.wants(s_per_byte) == is_packed


def test_it_is_tried_again_now_and_then_and_found_out() -> None:
    packing = Packing()
    packing.tried(MIB, MIB, 0.001, 80e-9)

    assert [packing.wants(80e-9) for _ in range(TRIED_AGAIN + 1)] == [False] * TRIED_AGAIN + [True]
    assert packing.tried(MIB, MIB // 2, 0.001, 80e-9)
    assert packing.wants(80e-9)
    assert not packing.wants(0.5e-9), "another line"


def test_a_chunk_that_does_not_shrink_travels_as_it_is_among_those_that_do() -> None:
    packing = Packing()

    assert packing.tried(MIB, MIB // 4, 0.001, 80e-9)
    assert not packing.tried(MIB, MIB, 0.001, 80e-9)
    assert packing.wants(80e-9)


def test_a_configured_rate_counts_where_it_is_slower_than_the_line() -> None:
    for rate_bps, is_packed in ((1e8, True), (1e11, False)):
        packers = Packers(Pacer(rate_bps))
        packer = packers.of("", "take")
        fast = bytes(UNKNOWN_BYTES)
        with packer.waiting(fast):
            pass
        (message,) = packer.chunks(SHRINKING, MIB, 0, is_bulk=False)
        assert (len(message) < MIB) == is_packed


def test_methods_are_tried_apart_and_peers_are_forgotten() -> None:
    packers = Packers(Pacer())
    assert packers.of("a", "take") is packers.of("a", "take")
    assert packers.of("a", "take") is not packers.of("a", "give")
    first = packers.of("a", "take")
    for number in range(5000):
        packers.of(f"stranger {number}", "take")

    assert packers.of("a", "take") is not first


def test_packed_and_plain_chunks_of_one_payload_are_put_together_from_any_byte() -> None:
    payload = SHRINKING + FIXED + SHRINKING[:1000]
    for offset in (0, MIB, 2 * MIB):
        reader = FrameReader(frame_opening(b"", len(payload), MIB))
        partial = reader.accept(len(payload))
        partial.payload[:], partial.filled = payload[:offset] + bytes(len(payload) - offset), offset
        messages = Packers(Pacer()).of("", "").chunks(payload, MIB, offset, is_bulk=False)
        fed = [(len(message), reader.feed(message)) for message in messages]

        assert reader.payload == payload
        assert sum(num_bytes for _, num_bytes in fed) == len(payload) - offset
        is_packed = any(size < num_bytes * MOST_LEFT for size, num_bytes in fed)
        assert is_packed == (offset != MIB), "after one that did not shrink the next is not tried"


def reader_of(num_bytes: int) -> FrameReader:
    reader = FrameReader(frame_opening(b"", num_bytes, MIB))
    reader.accept(num_bytes)
    return reader


def bomb(num_bytes: int) -> bytes:
    return zstandard.ZstdCompressor().compress(bytes(num_bytes))


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (bomb(8 * MIB), "chunk that unpacks to 8388608 bytes where 1000 are due"),
        (bomb(999), "unpacks to 999 bytes where 1000 are due"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000)), "to -1 bytes"),
        (bomb(1000) + b"!", "not of zstandard"),
        (bomb(1000) + bomb(1000), "not of zstandard"),
        (bomb(1000)[:-1], "not of zstandard"),
        (b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip", "unpacks to 0 bytes"),
        (bytes(999), "not of zstandard"),
        (bytes(1000), "chunk of 1000 bytes where 1000 are due, form '01'"),
    ],
    ids=["bomb", "short", "no-size", "more", "twice", "torn", "skippable", "garbage", "long"],
)
def test_what_is_not_a_packed_chunk_of_the_size_that_is_due_is_refused(
    packed: bytes, reason: str
) -> None:
    reader = reader_of(1000)

    with pytest.raises(DamagedFrame, match=reason):
        reader.feed(frame_chunk(b"", packed))
    assert reader.partial is not None and not reader.partial.payload, "nothing was allocated"


def test_a_frame_that_lies_about_its_size_is_refused() -> None:
    packed = bytearray(bomb(100_000))
    at = packed.index((100_000).to_bytes(4, "little"))
    packed[at : at + 4] = (1000).to_bytes(4, "little")

    with pytest.raises(DamagedFrame, match="not of zstandard"):
        reader_of(1000).feed(frame_chunk(b"", bytes(packed)))


def test_a_flipped_bit_anywhere_in_a_packed_chunk_is_found() -> None:
    message = frame_chunk(b"", bomb(1000))
    for position in range(8 * len(message)):
        damaged = bytearray(message)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises((ChecksumMismatch, DamagedFrame)):
            reader_of(1000).feed(bytes(damaged))
    assert reader_of(1000).feed(message) == 1000
