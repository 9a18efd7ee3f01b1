"""Frames of a TUN device with `IFF_VNET_HDR`: how many packets one is, and what is left of it.

The kernel hands over up to 64 KiB of one TCP or UDP stream as a single super-packet that stands for
many packets of the wire. Loss belongs to the wire: `without` takes single packets out and leaves
super-packets of those between them, so that a lossy link costs no more than a good one.

    frame     virtio_net_hdr (10 bytes) | IP packet
    segment   the headers, with length, sequence number and checksum of its own | gso_size bytes

Pure: no clock, no devices, no randomness. See virtio 1.2, section 5.1.6 (network header);
Linux, `tcp_gso_segment` and `__udp_gso_segment` (which fields differ between segments).
"""

from __future__ import annotations

import struct
from collections.abc import Collection

#: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset; native byte order, as TUN has it.
VNET_HEADER = struct.Struct("=BBHHHH")
VNET_BYTES = VNET_HEADER.size
#: Longest frame: an IPv4 packet of the longest kind.
MAX_FRAME_BYTES = VNET_BYTES + 65535

_GSO_NONE, _GSO_UDP = 0, 5
_ECN = 0x80
_UDP_HEADER_BYTES = 8
_FIN_PSH, _CWR = 0x09, 0x80
_TCP = 6
#: FIN, SYN, RST, PSH, ACK, URG; an acknowledgement has the fifth alone.
_FLAGS, _ACK = 0x3F, 0x10
_IPV6_HEADER_BYTES = 40
#: Of a TCP packet: the headers of IPv4 and TCP.
_SHORTEST_BYTES = 40


def num_packets(frame: bytes) -> int:
    """Count the packets of the wire that a frame stands for; 1 unless it is a super-packet."""
    gso_size = int(VNET_HEADER.unpack_from(frame)[3])
    if frame[1] == _GSO_NONE or not gso_size:
        return 1
    return max(1, -(-(len(frame) - _payload_start(frame)) // gso_size))


def is_acknowledgement(frame: bytes) -> bool:
    """Whether a frame is a TCP packet that says what has come, and nothing else."""
    if frame[1] != _GSO_NONE or len(frame) < VNET_BYTES + _SHORTEST_BYTES:
        return False
    first = frame[VNET_BYTES]
    if first >> 4 == 6:
        protocol, start = frame[VNET_BYTES + 6], VNET_BYTES + _IPV6_HEADER_BYTES
    else:
        protocol, start = frame[VNET_BYTES + 9], VNET_BYTES + 4 * (first & 0x0F)
    if protocol != _TCP or len(frame) < start + 20 or frame[start + 13] & _FLAGS != _ACK:
        return False
    return start + 4 * (frame[start + 12] >> 4) == len(frame)


def without(frame: bytes, lost: Collection[int]) -> list[bytes]:
    """Take packets out of a frame.

    Args:
        frame: Of `num_packets(frame)` packets.
        lost: Indices of those that are gone.

    Returns:
        Frames of the packets that are left, in order, neighbours together; empty if none is.
    """
    count = num_packets(frame)
    if not lost:
        return [frame]
    runs: list[tuple[int, int]] = []
    begin = 0
    for end in (*sorted(lost), count):
        if begin < end:
            runs.append((begin, end))
        begin = end + 1
    return [_run(frame, first, last, count) for first, last in runs]


def _payload_start(frame: bytes) -> int:
    """Where the payload of a super-packet begins in the frame; the kernel's hdr_len is a hint."""
    transport = VNET_BYTES + int(VNET_HEADER.unpack_from(frame)[4])
    if frame[1] & ~_ECN == _GSO_UDP:
        return transport + _UDP_HEADER_BYTES
    return transport + 4 * (frame[transport + 12] >> 4)


def _run(frame: bytes, first: int, last: int, count: int) -> bytes:
    """Make the frame of the packets first..last-1 of `count`."""
    flags, gso_type, _, gso_size, csum_start, csum_offset = VNET_HEADER.unpack_from(frame)
    start = _payload_start(frame)
    transport = VNET_BYTES + csum_start
    payload = frame[start + first * gso_size : start + last * gso_size]
    headers = bytearray(frame[:start])
    is_single = last - first == 1
    VNET_HEADER.pack_into(
        headers,
        0,
        flags,
        _GSO_NONE if is_single else gso_type,
        start - VNET_BYTES,
        0 if is_single else gso_size,
        csum_start,
        csum_offset,
    )
    shorter = len(frame) - start - len(payload)
    _fix_ip(headers, first, shorter)
    if gso_type & ~_ECN == _GSO_UDP:
        _add16(headers, transport + 4, -shorter)
    else:
        (sequence,) = struct.unpack_from("!I", headers, transport + 4)
        struct.pack_into("!I", headers, transport + 4, (sequence + first * gso_size) % 2**32)
        if last < count:
            headers[transport + 13] &= ~_FIN_PSH & 0xFF
        if first > 0:
            headers[transport + 13] &= ~_CWR & 0xFF
    # What is to be completed is the sum of the pseudo header, which has the length in it.
    at = transport + csum_offset
    (partial,) = struct.unpack_from("!H", headers, at)
    struct.pack_into("!H", headers, at, _fold(partial + (~shorter & 0xFFFF)))
    return bytes(headers) + payload


def _fix_ip(headers: bytearray, first: int, shorter: int) -> None:
    """Set lengths, identification and checksum of the IP header of a run."""
    if headers[VNET_BYTES] >> 4 == 6:
        _add16(headers, VNET_BYTES + 4, -shorter)
        return
    _add16(headers, VNET_BYTES + 2, -shorter)
    _add16(headers, VNET_BYTES + 4, first)
    end = VNET_BYTES + 4 * (headers[VNET_BYTES] & 0x0F)
    struct.pack_into("!H", headers, VNET_BYTES + 10, 0)
    words = struct.unpack(f"!{(end - VNET_BYTES) // 2}H", headers[VNET_BYTES:end])
    struct.pack_into("!H", headers, VNET_BYTES + 10, ~_fold(sum(words)) & 0xFFFF)


def _add16(headers: bytearray, at: int, number: int) -> None:
    (value,) = struct.unpack_from("!H", headers, at)
    struct.pack_into("!H", headers, at, (value + number) % 2**16)


def _fold(total: int) -> int:
    """Fold a sum into 16 bits, carries added back in (RFC 1071)."""
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
