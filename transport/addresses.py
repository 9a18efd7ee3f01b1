"""Addresses as text: ``host:port``, the host a name, an IPv4 address, or IPv6 in brackets.

Where a peer may be reached in several ways, they stand in one text, separated by commas, and are
tried in that order.
"""

from __future__ import annotations

import ipaddress


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


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
