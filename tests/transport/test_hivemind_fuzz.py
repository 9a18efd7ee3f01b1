"""Whatever bytes arrive on a libp2p stream, or from the daemon: read, or refused by name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.transport.errors import FrameError
from diloco.transport.libp2p import control as hivemind_control
from diloco.transport.libp2p.address import multiaddr_from_bytes, parse_peer_address
from diloco.transport.libp2p.control import DaemonRefused
from diloco.transport.libp2p.wire import Opening, read_message, read_opening

few = settings(max_examples=300, deadline=None)
many = settings(few, max_examples=100_000)
Reading = Callable[[asyncio.StreamReader], Awaitable[object]]

#: What reads bytes of strangers, and what it may raise.
STRANGERS: tuple[Reading, ...] = (read_opening, read_message)


async def parse_stream_peer(reader: asyncio.StreamReader) -> object:
    return hivemind_control.parse_stream_peer(await reader.read())


#: What reads bytes of this process's own daemon.
OWN: tuple[Reading, ...] = (
    hivemind_control.read_reply,
    hivemind_control.read_stream_peer,
    parse_stream_peer,
)


async def read(reading: Reading, data: bytes) -> object:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await reading(reader)


async def read_all(data: bytes) -> None:
    for reading in STRANGERS:
        with contextlib.suppress(FrameError, EOFError):
            await read(reading, data)
    for reading in OWN:
        with contextlib.suppress(DaemonRefused, EOFError, ValueError):
            await read(reading, data)
    for parse in (hivemind_control.parse_whereabouts, multiaddr_from_bytes):
        with contextlib.suppress(ValueError):
            parse(data)


openings = st.builds(
    lambda method, token, deadline_s: Opening(method, token, deadline_s).to_bytes(),
    st.text(max_size=20), st.text(max_size=20), st.floats(),
)  # fmt: skip
requests = st.sampled_from(
    [
        hivemind_control.accept_request("/tmp/socket", "/protocol"),
        hivemind_control.connect_request(
            parse_peer_address(
                "/ip4/1.2.3.4/tcp/1/p2p/12D3KooWN5P2Q2iiazQx4nT1YLy7dtk141rSerXCWfCod4awDsn9"
            )
        ),
        b"\x08\x00\x22\x06\x0a\x01x\x12\x01\x04",
    ]
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.one_of(openings, requests, st.binary(max_size=80))))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(data)))
        data[start : start + draw(st.integers(0, 4))] = draw(st.binary(max_size=6))
    prefix = draw(st.sampled_from([b"", bytes([len(data) & 0x7F]), b"\xff" * 12]))
    return prefix + bytes(data)


@few
@given(damaged())
def test_bytes_of_any_kind_are_read_or_refused(data: bytes) -> None:
    asyncio.run(read_all(data))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@many
@given(damaged())
def test_many_bytes_of_any_kind_are_read_or_refused(data: bytes) -> None:
    asyncio.run(read_all(data))


@few
@given(
    st.text(max_size=60),
    st.text(max_size=200),
    st.floats(min_value=0, max_value=1e9, exclude_min=True, exclude_max=True),
)
def test_an_opening_is_read_as_it_was_written(method: str, token: str, deadline_s: float) -> None:
    opening = Opening(method, token, deadline_s)
    assert asyncio.run(read(read_opening, opening.to_bytes())) == opening


def test_a_length_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="does not end"):
        asyncio.run(read(hivemind_control.read_reply, b"\xff" * 1000))
