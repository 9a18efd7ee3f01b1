"""Addresses as text: ``host:port``, the host a name, an IPv4 address, or IPv6 in brackets.

Where a peer may be reached in several ways, they stand in one text, separated by commas, and are
tried in that order.
"""

from __future__ import annotations

import ipaddress
import socket


def split_address(text: str) -> tuple[str, int]:
    """Split ``host:port``.

    Raises:
        ValueError: If it is not one; names what it should look like.
    """
    host, _, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if (
        not host
        or not port.isdecimal()
        or int(port) > 65535
        or (":" in host and not is_bracketed)
        or any(character.isspace() or character in ",/" for character in host)
    ):
        raise ValueError(
            f'{text!r} must be HOST:PORT, such as "127.0.0.1:4711" or "[2001:db8::1]:4711", '
            f"port 0 to 65535"
        )
    return host, int(port)


def split_candidates(text: str) -> list[str]:
    """Split the addresses of one peer: ``10.0.0.5:4711, eu.example.org:4711``.

    Raises:
        ValueError: If one of them is no ``host:port``.
    """
    candidates = [part.strip() for part in text.split(",")]
    for candidate in candidates:
        split_address(candidate)
    return candidates


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`; false for names other than localhost."""
    address = _ip(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def is_wildcard(host: str) -> bool:
    """Whether `host` means every address of this machine, such as 0.0.0.0."""
    address = _ip(host)
    return address is not None and address.is_unspecified


def is_own(host: str) -> bool:
    """Whether an IP address is one of this machine's, as its network namespace sees it.

    Nothing is sent: the kernel says from which address it would send there, and that is the same
    one for its own addresses alone.
    """
    address = _ip(host)
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if address is None or address.is_unspecified:
        return False
    if address.is_loopback:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))
            return _ip(probe.getsockname()[0]) == address
    except OSError:  # no way there
        return False


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
