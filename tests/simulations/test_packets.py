"""Super-packets taken apart: what is left must be what the wire would have delivered."""

import struct

import pytest

from diloco.simulations.emulate.packets import (
    VNET_BYTES,
    VNET_HEADER,
    is_acknowledgement,
    num_packets,
    without,
)
from tests.simulations.frames import (
    MSS,
    NEEDS_CSUM,
    TCP4,
    TCP6,
    UDP,
    fold,
    make_frame,
    pseudo_sum,
    sum16,
)


def payload_of(frame: bytes) -> bytes:
    packet, start = frame[VNET_BYTES:], VNET_HEADER.unpack_from(frame)[4]
    is_udp = (packet[9] if packet[0] >> 4 == 4 else packet[6]) == 17
    return packet[start + (8 if is_udp else 4 * (packet[start + 12] >> 4)) :]


def assert_whole(frame: bytes) -> None:
    """Check what a receiving kernel would: lengths, both checksums, the vnet header."""
    _, kind, header_bytes, gso_size, start, offset = VNET_HEADER.unpack_from(frame)
    packet = frame[VNET_BYTES:]
    if packet[0] >> 4 == 4:
        assert struct.unpack_from("!H", packet, 2)[0] == len(packet)
        assert fold(sum16(packet[:20])) == 0xFFFF
    else:
        assert struct.unpack_from("!H", packet, 4)[0] == len(packet) - 40
    assert fold(struct.unpack_from("!H", packet, start + offset)[0]) == pseudo_sum(packet)
    assert header_bytes == len(packet) - len(payload_of(frame))
    assert (kind != 0) == (len(payload_of(frame)) > MSS) == (gso_size == MSS)
    if offset == 6:
        assert struct.unpack_from("!H", packet, start + 4)[0] == len(packet) - start


@pytest.mark.parametrize("kind", [TCP4, TCP6, UDP], ids=["tcp4", "tcp6", "udp"])
@pytest.mark.parametrize(
    ("lost", "left"),
    [
        ([], [range(5)]),
        ([0], [range(1, 5)]),
        ([4], [range(4)]),
        ([2], [range(2), range(3, 5)]),
        ([3, 1], [range(1), range(2, 3), range(4, 5)]),
        ([0, 1, 2, 3, 4], []),
    ],
    ids=str,
)
def test_what_is_left_has_valid_headers_and_its_own_bytes(
    kind: int, lost: list[int], left: list[range]
) -> None:
    payload = bytes(n % 251 for n in range(4 * MSS + 30))
    frame = make_frame(kind, payload)

    runs = without(frame, lost)

    assert num_packets(frame) == 5
    assert [payload_of(run) for run in runs] == [
        payload[part.start * MSS : part.stop * MSS] for part in left
    ]
    assert [num_packets(run) for run in runs] == [len(part) for part in left]
    if lost:
        for run in runs:
            assert_whole(run)
    if kind != UDP:
        numbers = [
            struct.unpack_from("!I", run, VNET_BYTES + (44 if kind == TCP6 else 24))[0]
            for run in runs
        ]
        assert numbers == [(2**32 - 150 + part.start * MSS) % 2**32 for part in left]


def test_flags_of_ends_stay_at_the_ends() -> None:
    fin_psh_ack_cwr = 0x01 | 0x08 | 0x10 | 0x80
    frame = make_frame(TCP4, bytes(3 * MSS), flags=fin_psh_ack_cwr)

    first, last = without(frame, [1])

    assert first[VNET_BYTES + 33] == 0x10 | 0x80
    assert last[VNET_BYTES + 33] == 0x10 | 0x01 | 0x08


def test_an_ordinary_packet_is_one_and_is_lost_whole() -> None:
    frame = bytearray(make_frame(TCP4, bytes(50)))
    VNET_HEADER.pack_into(frame, 0, NEEDS_CSUM, 0, 52, 0, 20, 16)

    assert num_packets(bytes(frame)) == 1
    assert without(bytes(frame), []) == [bytes(frame)]
    assert without(bytes(frame), [0]) == []


@pytest.mark.parametrize("kind", [TCP4, TCP6], ids=["tcp4", "tcp6"])
def test_an_acknowledgement_is_a_tcp_packet_of_headers_that_says_nothing_else(kind: int) -> None:
    def single(frame: bytes) -> bytes:
        return frame[:1] + b"\0" + frame[2:]

    ack = single(make_frame(kind, b""))
    assert is_acknowledgement(ack)
    assert not is_acknowledgement(single(make_frame(kind, b"x")))
    assert not is_acknowledgement(make_frame(kind, bytes(4 * MSS)))
    for other in (0x11, 0x12, 0x14, 0x18):  # FIN, SYN, RST, PSH too
        assert not is_acknowledgement(single(make_frame(kind, b"", flags=other)))
    assert not is_acknowledgement(single(make_frame(UDP, b"")))
    assert not any(is_acknowledgement(ack[:n]) for n in range(VNET_BYTES, len(ack)))
