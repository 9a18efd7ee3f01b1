"""Frames as a kernel hands them to a TUN device."""

import struct

from diloco.simulations.emulate.packets import VNET_HEADER

NEEDS_CSUM = 1
TCP4, TCP6, UDP = 1, 4, 5
MSS = 100


def fold(total: int) -> int:
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def sum16(data: bytes) -> int:
    return sum(struct.unpack(f"!{len(data) // 2}H", data))


def pseudo_sum(packet: bytes) -> int:
    """Sum that a kernel puts where the checksum of a packet is to be completed."""
    if packet[0] >> 4 == 4:
        length, protocol, addresses = len(packet) - 20, packet[9], packet[12:20]
    else:
        length, protocol, addresses = len(packet) - 40, packet[6], packet[8:40]
    return fold(sum16(addresses) + length + protocol)


def make_frame(
    kind: int, payload: bytes, *, flags: int = 0x10, sequence: int = 2**32 - 150
) -> bytes:
    """Build the frame of one stream's `payload` as the kernel hands it over."""
    if kind == UDP:
        protocol, transport = 17, struct.pack("!HHHH", 1000, 2000, 8 + len(payload), 0)
        offset = 6
    else:
        words = 8  # 12 bytes of options
        protocol, offset = 6, 16
        transport = struct.pack("!HHIIBBHHH", 1000, 2000, sequence, 7, words << 4, flags, 512, 0, 0)
        transport += bytes(12)
    if kind == TCP6:
        ip = struct.pack("!IHBB", 6 << 28, len(transport) + len(payload), protocol, 64)
        ip += bytes(range(32))
    else:
        length = 20 + len(transport) + len(payload)
        ip = struct.pack("!BBHHHBBH", 0x45, 0, length, 65535, 0x4000, 64, protocol, 0)
        ip += bytes([10, 77, 0, 2, 10, 77, 0, 3])
        ip = ip[:10] + struct.pack("!H", ~fold(sum16(ip)) & 0xFFFF) + ip[12:]
    packet = bytearray(ip + transport + payload)
    struct.pack_into("!H", packet, len(ip) + offset, pseudo_sum(bytes(packet)))
    # The kernel's hdr_len is the length of the linear part: no use for finding the payload.
    header = VNET_HEADER.pack(NEEDS_CSUM, kind, len(packet), MSS, len(ip), offset)
    return header + bytes(packet)
