"""Closes excess connections of unknown callers: of one address, and in all.

A stranger's connection is one over which no caller has been let in yet: still silent, within its
TLS handshake, or refused. gRPC accepts connections by itself and asks nobody, so they are found
among the descriptors of this process (Linux) and shut down before they say anything: an address
keeps its newest ones, because anyone who may come in calls within a second of connecting.
Connections of callers are never touched, however many an address has.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import unquote

from diloco.transport.own_sockets import borrowed, descriptors, ip_of, sockets

_log = logging.getLogger(__name__)

#: Anyone who has one address of IPv6 has all of its network.
_IPV6_PREFIX = 64
#: Places of callers that are kept without a look at which of them are still connected.
_KEPT_CALLERS = 4096
#: Seconds between two lines of the log.
_LOG_S = 10.0
#: Addresses named in it.
_SHOWN = 3

Place: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Connection:
    """One that was accepted here; all of one `host` are counted together."""

    place: Place
    host: str


class ConnectionLimits:
    """Counts and closes the connections of strangers to the servers at one port."""

    def __init__(self, *, per_address: int, in_all: int) -> None:
        """Remember the bounds.

        Args:
            per_address: Connections of one address, or network of IPv6, that are left open.
            in_all: Connections of all addresses that are left open.
        """
        self._per_address = per_address
        self._in_all = in_all
        self._seen: dict[int, _Connection | None] = {}
        self._callers: set[Place] = set()
        self._closed: Counter[str] = Counter()
        self._logged_at = float("-inf")

    def called(self, peer: str) -> None:
        """Note that a caller was let in over a connection, by gRPC's name of its other end."""
        if (place := _place_of(peer)) is not None:
            self._callers.add(place)

    def close_excess(self, port: int, now: float) -> int:
        """Close what is too much at a port, the oldest first; returns how many that were."""
        callers = set(self._callers)  # who calls meanwhile is not forgotten below
        names = descriptors()
        if len(names) <= self._per_address and len(callers) <= _KEPT_CALLERS:
            return 0
        found = dict(sockets(names))
        # In the order in which they were found: the oldest first.
        self._seen = {number: c for number, c in self._seen.items() if number in found}
        for number, descriptor in found.items():
            if number not in self._seen:
                self._seen[number] = _look(number, descriptor, port)
        self._callers -= callers - {c.place for c in self._seen.values() if c}
        strangers = {
            number: c.host
            for number, c in self._seen.items()
            if c is not None and c.place not in self._callers
        }
        chosen = excess(strangers, per_address=self._per_address, in_all=self._in_all)
        for number in chosen:
            with borrowed(number, found[number]) as connection, contextlib.suppress(OSError):
                if connection is not None:
                    connection.shutdown(socket.SHUT_RDWR)  # gRPC finds its end, and closes it
            self._closed[strangers[number]] += 1
            self._seen[number] = None
        self._report(now)
        return len(chosen)

    def _report(self, now: float) -> None:
        if self._closed and now >= self._logged_at + _LOG_S:
            self._logged_at = now
            worst = ", ".join(f"{host}: {n}" for host, n in self._closed.most_common(_SHOWN))
            _log.warning(
                "connections of strangers closed, num=%d (%s): %d of one address and %d in all may "
                "wait for their first call; if these are not yours, close the port to them",
                self._closed.total(), worst, self._per_address, self._in_all,
            )  # fmt: skip
            self._closed.clear()


def excess(hosts: dict[int, str], *, per_address: int, in_all: int) -> list[int]:
    """Choose which connections are too many.

    Args:
        hosts: Number of a connection -> where it comes from, the oldest first.
        per_address: Connections of one host that may stay.
        in_all: Connections that may stay; where there are more, each host keeps an equal share.

    Returns:
        Their numbers, of each host the oldest.
    """
    counts = Counter(hosts.values())
    if sum(min(count, per_address) for count in counts.values()) > in_all:
        per_address = min(per_address, max(in_all // len(counts), 1))
    left: Counter[str] = Counter()
    num_left = 0
    chosen: list[int] = []
    for number, host in reversed(hosts.items()):
        if left[host] < per_address and num_left < in_all:
            left[host] += 1
            num_left += 1
        else:
            chosen.append(number)
    return chosen


def _look(number: int, descriptor: int, port: int) -> _Connection | None:
    """Say who is at the other end of a socket; None if it was not accepted at `port`."""
    with borrowed(number, descriptor) as connection, contextlib.suppress(OSError):
        if connection is not None and connection.getsockname()[1] == port:
            host, other = connection.getpeername()[:2]  # fails of what listens
            return _Connection((_plain(host), other), _counted(host))
    return None


def _place_of(peer: str) -> Place | None:
    # gRPC writes ipv4:127.0.0.1:4711, and ipv6:%5B::1%5D:4711
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return (_plain(host), int(port)) if port.isdecimal() else None


def _plain(host: str) -> str:
    return str(ip_of(host) or host)


def _counted(host: str) -> str:
    ip = ip_of(host)
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((ip, _IPV6_PREFIX), strict=False))
    return str(ip or host)
