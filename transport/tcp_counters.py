"""What the kernel has counted on this process's own TCP connections (Linux).

gRPC does not hand out its sockets; they are found among this process's descriptors, and only read.

Source: struct tcp_info of include/uapi/linux/tcp.h; tcp(7), TCP_INFO and TCP_CONGESTION.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Collection

from transport.channels import SegmentCounts

_DESCRIPTORS = "/proc/self/fd"
#: Offsets of the fields within struct tcp_info.
_TOTAL_RETRANS, _DATA_SEGS_IN, _DATA_SEGS_OUT, _RCV_OOOPACK = 100, 152, 156, 224
_INFO_BYTES = 232
_CONTROL_BYTES = 16
_FAMILIES, _STREAM = (socket.AF_INET, socket.AF_INET6), socket.SOCK_STREAM


def can_count() -> bool:
    """Whether this system has these counts."""
    return hasattr(socket, "TCP_INFO") and os.path.isdir(_DESCRIPTORS)


def segment_counts(places: Collection[tuple[str, int]]) -> dict[int, SegmentCounts]:
    """Read the counts of all connections to hosts and ports, by the number of their socket.

    A host's name stands for any address, for it is resolved anew at every reconnection. Nothing is
    found while this process has no descriptor left to look with.
    """
    wanted = {(_ip(host), port) for host, port in places}
    found: dict[int, SegmentCounts] = {}
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(_DESCRIPTORS)
    for name in names:
        with contextlib.suppress(OSError):  # it was closed meanwhile, or is no such connection
            place = os.readlink(f"{_DESCRIPTORS}/{name}")
            if place.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    is_tcp = connection.family in _FAMILIES and connection.type == _STREAM
                    if is_tcp:
                        host, port = connection.getpeername()[:2]
                        if wanted & {(_ip(host), port), (None, port)}:
                            found[int(place[8:-1])] = _counts(connection)
    return found


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an address, IPv4 within IPv6 as IPv4; None for a name, and for any address."""
    try:
        ip = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return None if ip.is_unspecified else mapped or ip


def _counts(connection: socket.socket) -> SegmentCounts:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    info = info.ljust(_INFO_BYTES, b"\0")  # an older kernel counts less
    sent, retransmitted, received, out_of_order = (
        struct.unpack_from("=I", info, offset)[0]
        for offset in (_DATA_SEGS_OUT, _TOTAL_RETRANS, _DATA_SEGS_IN, _RCV_OOOPACK)
    )
    control = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _CONTROL_BYTES)
    name = control.partition(b"\0")[0].decode()
    return SegmentCounts(sent, retransmitted, received, out_of_order, name)
