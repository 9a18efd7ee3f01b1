"""Messages of the control protocol of a libp2p daemon, over its local socket.

Each is a protobuf message with its length before it. Written out here, because hivemind's own
module of them cannot be imported without all of hivemind, and that loads torch.

See p2pd.proto of https://github.com/learning-at-home/go-libp2p-daemon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from diloco.transport.libp2p.address import (
    PeerAddress,
    from_varint,
    multiaddr_from_bytes,
    multiaddr_to_bytes,
    peer_id_from_bytes,
    peer_id_to_bytes,
    to_varint,
)

_MAX_BYTES = 1 << 20
_MAX_VARINT_BYTES = 10
_UNIX = 400
_DHT_END = 2


class DaemonRefused(Exception):
    """The daemon answered that it cannot; its words."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Who a daemon is, and the multiaddrs at which it believes to be reached."""

    peer_id: str
    routes: tuple[str, ...]


def connect_request(peer: PeerAddress) -> bytes:
    """Ask for a connection to a peer by the routes of its address."""
    fields = [(1, peer_id_to_bytes(peer.peer_id))]
    fields += [(2, multiaddr_to_bytes(route)) for route in peer.routes]
    return _varint_field(1, 1) + _fields([(2, _fields(fields))])


def open_request(peer_id: str, protocol: str) -> bytes:
    """Ask for a stream to a peer, which the socket then becomes."""
    body = _fields([(1, peer_id_to_bytes(peer_id)), (2, protocol.encode())])
    return _varint_field(1, 2) + _fields([(3, body)])


def accept_request(socket_path: str, protocol: str) -> bytes:
    """Ask for streams of a protocol to be handed to a local socket."""
    path = socket_path.encode()
    address = to_varint(_UNIX) + to_varint(len(path)) + path
    body = _fields([(1, address), (2, protocol.encode())]) + _varint_field(3, 0)
    return _varint_field(1, 3) + _fields([(4, body)])


def identify_request() -> bytes:
    """Ask who the daemon is."""
    return _varint_field(1, 0)


def bind_life_request() -> bytes:
    """Ask the daemon to end when this socket does (its persistent connection)."""
    return _varint_field(1, 9)


def provide_request(key: bytes, within_s: int) -> bytes:
    """Ask for this daemon to be entered in the DHT under a key."""
    return _dht_request(8, key, _varint_field(7, within_s))


def providers_request(key: bytes, count: int, within_s: int) -> bytes:
    """Ask which peers the DHT has entered under a key; `read_provider` reads each of them."""
    return _dht_request(2, key, _varint_field(6, count) + _varint_field(7, within_s))


def _dht_request(kind: int, key: bytes, bounds: bytes) -> bytes:
    body = _varint_field(1, kind) + _fields([(3, key)]) + bounds
    return _varint_field(1, 4) + _fields([(5, body)])


async def write_request(writer: asyncio.StreamWriter, request: bytes) -> None:
    """Send a request."""
    writer.write(to_varint(len(request)) + request)
    await writer.drain()


async def read_reply(reader: asyncio.StreamReader) -> bytes:
    """Read the answer to a request.

    Raises:
        DaemonRefused: If it is a refusal.
        EOFError: If the daemon ends.
        ValueError: If it is no answer.
    """
    reply = await _read(reader)
    fields = _parse(reply)
    if fields.get(1) != [0]:
        error = fields.get(2, [b""])[0]
        said = _parse(error) if isinstance(error, bytes) else {}
        raise DaemonRefused(_text(said.get(1, [b""])[0]))
    return reply


async def read_stream_peer(reader: asyncio.StreamReader) -> PeerAddress:
    """Read who opened the stream that was handed over, and from where; the stream follows.

    Raises:
        EOFError: If the daemon ends.
        ValueError: If it is no stream.
    """
    return _stream_peer(_parse(await _read(reader)))


async def read_provider(reader: asyncio.StreamReader) -> str:
    """Read the identity of the next peer that is entered under a key; empty: there is no more.

    Raises:
        EOFError: If the daemon ends.
        ValueError: If it is none.
    """
    fields = _parse(await _read(reader))
    if fields.get(1) == [_DHT_END]:
        return ""
    return peer_id_from_bytes(_bytes(_parse(_bytes(fields, 2)), 1))


def parse_stream_peer(reply: bytes) -> PeerAddress:
    """Read to whom, and by which route, a stream was opened from the answer to `open_request`.

    Raises:
        ValueError: If it is none.
    """
    return _stream_peer(_parse(_bytes(_parse(reply), 3)))


def _stream_peer(fields: dict[int, list[int | bytes]]) -> PeerAddress:
    try:
        routes: tuple[str, ...] = (multiaddr_from_bytes(_bytes(fields, 2)),)
    except ValueError:  # of a kind that is unknown here
        routes = ()
    return PeerAddress(peer_id_from_bytes(_bytes(fields, 1)), routes)


def parse_whereabouts(reply: bytes) -> Whereabouts:
    """Read the answer to `identify_request`; multiaddrs of unknown kinds are left out.

    Raises:
        ValueError: If it is none.
    """
    fields = _parse(_bytes(_parse(reply), 4))
    routes = []
    for address in fields.get(2, []):
        try:
            routes.append(multiaddr_from_bytes(address if isinstance(address, bytes) else b""))
        except ValueError:
            continue
    return Whereabouts(peer_id_from_bytes(_bytes(fields, 1)), tuple(routes))


async def _read(reader: asyncio.StreamReader) -> bytes:
    prefix = b""
    while not prefix or (prefix[-1] >= 0x80 and len(prefix) < _MAX_VARINT_BYTES):
        prefix += await reader.readexactly(1)
    size, _ = from_varint(prefix, 0)
    if size > _MAX_BYTES:
        raise ValueError(f"the daemon announces {size} bytes")
    return await reader.readexactly(size)


def _fields(fields: Sequence[tuple[int, bytes]]) -> bytes:
    return b"".join(to_varint(number << 3 | 2) + to_varint(len(v)) + v for number, v in fields)


def _varint_field(number: int, value: int) -> bytes:
    return to_varint(number << 3) + to_varint(value)


def _parse(message: bytes) -> dict[int, list[int | bytes]]:
    fields: dict[int, list[int | bytes]] = {}
    at = 0
    while at < len(message):
        key, at = from_varint(message, at)
        value: int | bytes
        number, at = from_varint(message, at)
        if key & 7 == 2:
            value, at = message[at : at + number], at + number
        elif key & 7 == 0:
            value = number
        else:
            raise ValueError(f"the daemon sent a field of kind {key & 7}")
        fields.setdefault(key >> 3, []).append(value)
    return fields


def _bytes(fields: dict[int, list[int | bytes]], number: int) -> bytes:
    value = fields.get(number, [b""])[0]
    if not isinstance(value, bytes) or not value:
        raise ValueError(f"the daemon's message lacks field {number}")
    return value


def _text(value: int | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
