"""A transport that asks where its peer is, once a call to it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from diloco.transport.calls.following import FollowingTransport
from diloco.transport.contracts import Buffer, Reply
from diloco.transport.errors import ConnectError, PeerReset, TransportClosed
from diloco.transport.transfer import Transfer


class Peers:
    """Peers by address, of which those in `here` answer; a call to `slow` waits for its close."""

    def __init__(self, *here: str) -> None:
        self.here = set(here)
        self.opened: list[str] = []
        self.slow: set[str] = set()

    def open_at(self, address: str) -> Peer:
        self.opened.append(address)
        return Peer(self, address)


class Peer:
    def __init__(self, peers: Peers, address: str) -> None:
        self.peers, self.peer = peers, address
        self.closed = asyncio.Event()

    async def call(
        self,
        method: str,
        header: bytes,
        payload: Buffer = b"",
        *,
        deadline_s: float,
        max_reply_bytes: int = 0,
        transfer: Transfer | None = None,
    ) -> Reply:
        if method == "slow":
            await self.closed.wait()
        if self.closed.is_set():
            raise TransportClosed("closed", peer=self.peer, method=method)
        if self.peer not in self.peers.here:
            raise ConnectError("nobody there", peer=self.peer, method=method)
        return Reply(self.peer.encode())

    async def close(self) -> None:
        self.closed.set()


def run(
    story: Callable[[FollowingTransport, Peers], Awaitable[None]],
    find: Callable[[], Awaitable[str]],
    *here: str,
    first: str = "old",
) -> Peers:
    async def main() -> Peers:
        peers = Peers(*here)
        transport = FollowingTransport(first, peers.open_at, find)
        await story(transport, peers)
        await transport.close()
        return peers

    return asyncio.run(main())


async def at_new() -> str:
    return "new"


def test_a_call_that_is_made_again_reaches_the_peer_where_it_is_now() -> None:
    async def story(transport: FollowingTransport, peers: Peers) -> None:
        with pytest.raises(ConnectError):
            await transport.call("m", b"", deadline_s=1.0)
        await asyncio.sleep(0.01)
        assert (await transport.call("m", b"", deadline_s=1.0)).header == b"new"
        assert transport.peer == "new"

    assert run(story, at_new, "new").opened == ["old", "new"]


def test_a_peer_that_is_nowhere_yet_is_called_once_somebody_knows_where_it_is() -> None:
    async def story(transport: FollowingTransport, peers: Peers) -> None:
        with pytest.raises(ConnectError, match="nobody knows where it is"):
            await transport.call("m", b"", deadline_s=1.0)
        await asyncio.sleep(0.01)
        assert (await transport.call("m", b"", deadline_s=1.0)).header == b"new"

    assert run(story, at_new, "new", first="").opened == ["new"]


def test_calls_under_way_to_where_it_was_are_to_be_made_again() -> None:
    async def story(transport: FollowingTransport, peers: Peers) -> None:
        waiting = asyncio.create_task(transport.call("slow", b"", deadline_s=9.0))
        await asyncio.sleep(0)
        with pytest.raises(ConnectError):
            await transport.call("m", b"", deadline_s=1.0)
        with pytest.raises(PeerReset, match="has moved to new") as found:
            await waiting
        assert found.value.is_retryable

    run(story, at_new, "new")


def test_nobody_is_asked_while_it_answers_nor_more_than_once_a_second() -> None:
    asked = 0

    async def find() -> str:
        nonlocal asked
        asked += 1
        raise OSError("nobody knows")

    async def story(transport: FollowingTransport, peers: Peers) -> None:
        await transport.call("m", b"", deadline_s=1.0)
        assert asked == 0
        peers.here.clear()
        for _ in range(5):
            with pytest.raises(ConnectError):
                await transport.call("m", b"", deadline_s=1.0)
            await asyncio.sleep(0.01)
        assert asked == 1

    assert run(story, find, "old").opened == ["old"]


def test_closed_it_stays_closed() -> None:
    async def story(transport: FollowingTransport, peers: Peers) -> None:
        waiting = asyncio.create_task(transport.call("slow", b"", deadline_s=9.0))
        await asyncio.sleep(0)
        await transport.close()
        with pytest.raises(TransportClosed):
            await waiting

    assert run(story, at_new, "old").opened == ["old"]
