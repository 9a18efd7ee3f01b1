"""Reads the kernel's counters of this process's own TCP connections (Linux).

gRPC does not hand out its sockets; they are found among this process's descriptors, and only read.

See struct tcp_info of include/uapi/linux/tcp.h; tcp(7), TCP_INFO and TCP_CONGESTION.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from diloco.transport.channels import SegmentCounts
from diloco.transport.own_sockets import borrowed, can_look, descriptors, ip_of, sockets

#: Offsets of the fields within struct tcp_info.
_RTT_US, _TOTAL_RETRANS, _DATA_SEGS_IN, _DATA_SEGS_OUT, _RCV_OOOPACK = 68, 100, 152, 156, 224
_BYTES_ACKED, _BYTES_RECEIVED = 120, 128
_INFO_BYTES = 232
_CONTROL_BYTES = 16
#: A line that carries less between two looks carries pings and reports, and nothing else.
MOVED_BYTES = 64 << 10

_Read = TypeVar("_Read")


def can_count() -> bool:
    """Whether this system has these counts."""
    return hasattr(socket, "TCP_INFO") and can_look()


def segment_counts(places: Collection[tuple[str, int]]) -> dict[int, SegmentCounts]:
    """Read the counts of all connections to hosts and ports, by the number of their socket.

    A host's name stands for any address, for it is resolved again at every reconnection. Nothing is
    found while this process has no descriptor left to look with.
    """
    return dict(_of_each(places, _counts))


def round_trips_s(places: Collection[tuple[str, int]]) -> dict[tuple[str, int], float]:
    """Give the least round trip of the connections to each host and port, smoothed by the kernel.

    Those to which there is no connection now are left out. All of them in one go: each look goes
    through all descriptors of this process.
    """
    read = [trip for _, trip in _of_each(places, _round_trip)]
    found = {
        (host, port): [
            us / 1e6 for ip, at, us in read if us and at == port and ip_of(host) in (ip, None)
        ]
        for host, port in places
    }
    return {place: min(trips) for place, trips in found.items() if trips}


class BytesMoved:
    """Whether bytes move over the connections to a peer, whatever messages they are part of.

    Nothing is seen to move where this cannot be counted.
    """

    def __init__(self) -> None:
        """Have seen nothing move yet."""
        self._before: dict[int, int] = {}

    def have(self, places: Collection[tuple[str, int]]) -> bool:
        """Say whether `MOVED_BYTES` have crossed, one way or the other, since it last said so."""
        now = dict(_of_each(places, _num_bytes)) if can_count() else {}
        before = self._before
        if sum(max(num - before.get(key, 0), 0) for key, num in now.items()) < MOVED_BYTES:
            return False
        self._before = now
        return True


def _of_each(
    places: Collection[tuple[str, int]], read: Callable[[socket.socket], _Read]
) -> Iterator[tuple[int, _Read]]:
    """Give the number of each connection to hosts and ports, and what is read of it."""
    wanted = {(ip_of(host), port) for host, port in places}
    for number, descriptor in sockets(descriptors()):
        with borrowed(number, descriptor) as connection, contextlib.suppress(OSError):
            if connection is not None:
                host, port = connection.getpeername()[:2]
                if wanted & {(ip_of(host), port), (None, port)}:
                    yield number, read(connection)


def _num_bytes(connection: socket.socket) -> int:
    """Count the bytes that the peer has acknowledged, and those that have come."""
    info = _info(connection)
    return sum(struct.unpack_from("=Q", info, at)[0] for at in (_BYTES_ACKED, _BYTES_RECEIVED))


def _round_trip(
    connection: socket.socket,
) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address | None, int, int]:
    """Give where the peer is, and microseconds."""
    host, port = connection.getpeername()[:2]
    return ip_of(host), port, int(struct.unpack_from("=I", _info(connection), _RTT_US)[0])


def _info(connection: socket.socket) -> bytes:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    return info.ljust(_INFO_BYTES, b"\0")  # an older kernel counts less


def _counts(connection: socket.socket) -> SegmentCounts:
    info = _info(connection)
    sent, retransmitted, received, out_of_order = (
        struct.unpack_from("=I", info, offset)[0]
        for offset in (_DATA_SEGS_OUT, _TOTAL_RETRANS, _DATA_SEGS_IN, _RCV_OOOPACK)
    )
    control = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _CONTROL_BYTES)
    name = control.partition(b"\0")[0].decode()
    return SegmentCounts(sent, retransmitted, received, out_of_order, name)
