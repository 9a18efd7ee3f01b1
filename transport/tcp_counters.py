"""Reads the kernel's counters of this process's own TCP connections (Linux).

gRPC does not hand out its sockets; they are found among this process's descriptors, and only read.

See struct tcp_info of include/uapi/linux/tcp.h; tcp(7), TCP_INFO and TCP_CONGESTION.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Collection

from diloco.transport.channels import SegmentCounts
from diloco.transport.own_sockets import borrowed, can_look, descriptors, ip_of, sockets

#: Offsets of the fields within struct tcp_info.
_TOTAL_RETRANS, _DATA_SEGS_IN, _DATA_SEGS_OUT, _RCV_OOOPACK = 100, 152, 156, 224
_INFO_BYTES = 232
_CONTROL_BYTES = 16


def can_count() -> bool:
    """Whether this system has these counts."""
    return hasattr(socket, "TCP_INFO") and can_look()


def segment_counts(places: Collection[tuple[str, int]]) -> dict[int, SegmentCounts]:
    """Read the counts of all connections to hosts and ports, by the number of their socket.

    A host's name stands for any address, for it is resolved again at every reconnection. Nothing is
    found while this process has no descriptor left to look with.
    """
    wanted = {(ip_of(host), port) for host, port in places}
    found: dict[int, SegmentCounts] = {}
    for number, descriptor in sockets(descriptors()):
        with borrowed(number, descriptor) as connection, contextlib.suppress(OSError):
            if connection is not None:
                host, port = connection.getpeername()[:2]
                if wanted & {(ip_of(host), port), (None, port)}:
                    found[number] = _counts(connection)
    return found


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
