"""Ports are drawn once; wildcards are not told to islands."""

from __future__ import annotations

import asyncio
import socket

import pytest

from diloco.errors import ConfigError
from diloco.launch.address import advertised, listen


def test_recorded_port_is_bound_again_only_when_none_is_configured() -> None:
    async def bound(bind: str, recorded: str) -> str:
        server = await listen(bind, recorded, {}, insecure=False, chunk_bytes=1 << 20)
        await server.stop(0)
        return server.address

    async def story() -> tuple[str, str, str, str]:
        drawn = await bound("127.0.0.1:0", "")
        other = await bound("127.0.0.1:0", "")
        again = await bound("127.0.0.1:0", drawn)
        configured = await bound(other, drawn)
        return drawn, again, other, configured

    drawn, again, other, configured = asyncio.run(story())

    assert again == drawn
    assert configured == other


def test_busy_port_is_waited_for_and_then_refused_by_name() -> None:
    async def story() -> tuple[str, str]:
        with socket.create_server(("127.0.0.1", 0)) as owner:
            address = f"127.0.0.1:{owner.getsockname()[1]}"
            waiting = asyncio.create_task(
                listen("127.0.0.1:0", address, {}, insecure=False, chunk_bytes=1 << 20)
            )
            with pytest.raises(ConfigError) as caught:
                await listen(
                    "127.0.0.1:0", address, {}, insecure=False, chunk_bytes=1 << 20, busy_s=0.3
                )
            assert not waiting.done()
        server = await waiting
        await server.stop(0)
        assert server.address == address
        return address, str(caught.value)

    address, message = asyncio.run(story())

    assert address in message
    assert "end the process that holds it" in message


@pytest.mark.parametrize(
    ("bound", "public", "expected"),
    [
        ("127.0.0.1:4711", "", "127.0.0.1:4711"),
        ("10.0.0.5:4711", "eu.example.org:80", "10.0.0.5:4711"),
        ("0.0.0.0:4711", "eu.example.org:80", "eu.example.org:4711"),
        ("[::]:4711", "[2001:db8::1]:80", "[2001:db8::1]:4711"),
        ("localhost:4711", "", "localhost:4711"),
    ],
)
def test_islands_are_told_an_address_that_they_can_reach(
    bound: str, public: str, expected: str
) -> None:
    assert advertised(bound, public) == expected


@pytest.mark.parametrize("bound", ["0.0.0.0:0", "[::]:4711"])
def test_wildcard_without_public_address_is_refused(bound: str) -> None:
    with pytest.raises(ConfigError, match=r"coordinator\.address"):
        advertised(bound, "")
