"""Addresses of libp2p peers as text: multiaddrs that end with the peer's identity.

    /ip4/192.0.2.7/tcp/4711/p2p/12D3KooW...      where it was last, and who it is
    /p2p/12D3KooW...                             who it is; the DHT knows where
    ADDRESS,ADDRESS                              several routes to one peer

The identity is the hash of a public key: anyone who answers proves that it is that peer, wherever
it is. Pure.

See https://github.com/multiformats/multiaddr (text and bytes), libp2p specs/peer-ids.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from diloco.transport.addresses import is_loopback, split_address

_PEER = re.compile(r"(?P<route>(?:/[^/,\s]+)*)/p2p/(?P<peer_id>[1-9A-HJ-NP-Za-km-z]{40,60})")
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
#: Protocols of a multiaddr: number, and bytes of the value; None: preceded by its length.
_PROTOCOLS: dict[str, tuple[int, int | None]] = {
    "ip4": (4, 4),
    "tcp": (6, 2),
    "ip6": (41, 16),
    "dns": (53, None),
    "dns4": (54, None),
    "dns6": (55, None),
    "udp": (273, 2),
    "p2p-circuit": (290, 0),
    "p2p": (421, None),
    "quic-v1": (461, 0),
}
_NAMES = {number: name for name, (number, _) in _PROTOCOLS.items()}
_TCP = re.compile(r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[^/]+)/tcp/(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A peer and the routes to it.

    Attributes:
        peer_id: Its identity, base58.
        routes: Multiaddrs without the identity; none: the DHT is asked.
    """

    peer_id: str
    routes: tuple[str, ...]

    def __str__(self) -> str:
        """Write it as it is read."""
        return ",".join(f"{route}/p2p/{self.peer_id}" for route in self.routes or ("",))


def is_peer_address(text: str) -> bool:
    """Whether `text` means a libp2p peer rather than ``host:port``."""
    return text.startswith("/")


def parse_peer_address(text: str) -> PeerAddress:
    """Read an address.

    Raises:
        ValueError: If it is none, or names two peers; says what it should look like.
    """
    matches = [_PEER.fullmatch(part.strip()) for part in text.split(",")]
    found = [match for match in matches if match is not None]
    peers = {match["peer_id"] for match in found}
    if len(found) < len(matches) or len(peers) != 1:
        raise ValueError(
            f"{text!r} must be the multiaddr of one peer, such as "
            f'"/ip4/192.0.2.7/tcp/4711/p2p/IDENTITY" or "/p2p/IDENTITY"'
        )
    return PeerAddress(peers.pop(), tuple(match["route"] for match in found if match["route"]))


def to_multiaddr(address: str) -> str:
    """Write ``host:port`` as a multiaddr: ``/ip4/127.0.0.1/tcp/4711``, names as ``/dns/``.

    Raises:
        ValueError: If it is no ``host:port``.
    """
    host, port = split_address(address)
    host = host.strip("[]")
    try:
        kind = f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        kind = "dns"
    return f"/{kind}/{host}/tcp/{port}"


def tcp_port(address: PeerAddress) -> int:
    """Give the TCP port of the first route that has one, relays' apart; 0 when none has."""
    ports = [match["port"] for route in address.routes if (match := _TCP.fullmatch(route))]
    return int(ports[0]) if ports else 0


def through(relay: PeerAddress) -> tuple[str, ...]:
    """Give the routes to a peer that `relay` relays to."""
    return tuple(f"{route}/p2p/{relay.peer_id}/p2p-circuit" for route in relay.routes)


def direct_host(route: str) -> str:
    """Give the host of a route without relays, such as ``192.0.2.7``; empty: it has none."""
    match = _TCP.fullmatch(route)
    return match["host"] if match is not None else ""


def is_relayed_route(route: str) -> bool:
    """Whether a multiaddr leads through a relay."""
    return "p2p-circuit" in route.split("/")


def is_loopback_route(route: str) -> bool:
    """Whether a multiaddr leads no further than this machine."""
    match = _TCP.match(route)
    return match is not None and is_loopback(match["host"])


def peer_id_to_bytes(peer_id: str) -> bytes:
    """Decode base58.

    Raises:
        ValueError: If it is not base58.
    """
    number = 0
    for character in peer_id:
        number = number * 58 + _BASE58.index(character)
    zeros = len(peer_id) - len(peer_id.lstrip("1"))
    return bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")


def peer_id_from_bytes(data: bytes) -> str:
    """Encode as base58."""
    number, text = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        text = _BASE58[digit] + text
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + text


def multiaddr_to_bytes(text: str) -> bytes:
    """Encode a multiaddr.

    Raises:
        ValueError: If it is none, or has a protocol that is not known here.
    """
    words = iter(text.split("/")[1:])
    data = b""
    try:
        for word in words:
            number, size = _PROTOCOLS[word]
            value = b"" if size == 0 else _value_to_bytes(word, next(words))
            data += to_varint(number) + (to_varint(len(value)) if size is None else b"") + value
    except (KeyError, StopIteration, ValueError, OverflowError) as error:
        known = ", ".join(_PROTOCOLS)
        raise ValueError(f"{text!r} is no multiaddr of {known} ({error!r})") from error
    return data


def multiaddr_from_bytes(data: bytes) -> str:
    """Decode a multiaddr.

    Raises:
        ValueError: If it is none, or has a protocol that is not known here.
    """
    text, at = "", 0
    while at < len(data):
        number, at = from_varint(data, at)
        name = _NAMES.get(number)
        if name is None:
            raise ValueError(f"a multiaddr has protocol {number}, which is not known here")
        size = _PROTOCOLS[name][1]
        if size is None:
            size, at = from_varint(data, at)
        value, at = data[at : at + size], at + size
        if len(value) != size:
            raise ValueError("a multiaddr ends early")
        text += f"/{name}" + (f"/{_value_from_bytes(name, value)}" if size else "")
    return text


def to_varint(number: int) -> bytes:
    """Encode an unsigned integer as multiaddrs and protobuf do."""
    data = b""
    while number > 0x7F:
        data += bytes([number & 0x7F | 0x80])
        number >>= 7
    return data + bytes([number])


def from_varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode an unsigned integer at `at`; returns it and where it ends.

    Raises:
        ValueError: If it does not end.
    """
    number = shift = 0
    while at < len(data) and shift < 64:
        byte, at = data[at], at + 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
    raise ValueError("a number does not end")


def _value_to_bytes(protocol: str, text: str) -> bytes:
    match protocol:
        case "ip4" | "ip6":
            address = ipaddress.ip_address(text)
            if f"ip{address.version}" != protocol:
                raise ValueError(f"{text} is no {protocol}")
            return address.packed
        case "tcp" | "udp":
            return int(text).to_bytes(2, "big")
        case "p2p":
            return peer_id_to_bytes(text)
    return text.encode()


def _value_from_bytes(protocol: str, value: bytes) -> str:
    match protocol:
        case "ip4" | "ip6":
            return str(ipaddress.ip_address(value))
        case "tcp" | "udp":
            return str(int.from_bytes(value, "big"))
        case "p2p":
            return peer_id_from_bytes(value)
    return value.decode()
