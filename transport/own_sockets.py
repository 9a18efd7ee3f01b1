"""This process's own TCP sockets, found among its descriptors (Linux): gRPC hands out none."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator

_DESCRIPTORS = "/proc/self/fd"
_FAMILIES, _STREAM = (socket.AF_INET, socket.AF_INET6), socket.SOCK_STREAM
_SOCKET = "socket:["


def can_look() -> bool:
    """Whether this system shows a process its descriptors so."""
    return os.path.isdir(_DESCRIPTORS)


def descriptors() -> list[str]:
    """List the open descriptors; none where there is no descriptor left to look with."""
    with contextlib.suppress(OSError):
        return os.listdir(_DESCRIPTORS)
    return []


def sockets(names: list[str]) -> Iterator[tuple[int, int]]:
    """Give the number of each socket among descriptors, and its descriptor.

    The number is never given twice while the system runs, the descriptor may be given again at
    any moment.
    """
    for name in names:
        with contextlib.suppress(OSError):  # closed meanwhile
            place = os.readlink(f"{_DESCRIPTORS}/{name}")
            if place.startswith(_SOCKET):
                yield int(place[len(_SOCKET) : -1]), int(name)


@contextlib.contextmanager
def borrowed(number: int, descriptor: int) -> Iterator[socket.socket | None]:
    """Lend a TCP socket as long as the context lasts; None if it is another one, or closed."""
    try:
        found = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        yield None
        return
    with found:
        is_it = os.fstat(found.fileno()).st_ino == number
        is_tcp = found.family in _FAMILIES and found.type == _STREAM
        yield found if is_it and is_tcp else None


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an address, IPv4 within IPv6 as IPv4; None for a name, and for any address."""
    try:
        ip = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return None if ip.is_unspecified else mapped or ip
