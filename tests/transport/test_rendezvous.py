"""Who is taken for a run's coordinator where its address is found by the run's name."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from diloco.transport.errors import ConnectError, Unauthorised
from diloco.transport.identity import Identity, Role
from diloco.transport.libp2p import server as hivemind_server
from diloco.transport.libp2p.address import PeerAddress, parse_peer_address, tcp_port
from diloco.transport.libp2p.daemon import Daemon, DaemonFailed, Swarm
from diloco.transport.libp2p.rendezvous import (
    NAME_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    PROTOCOL,
    _first_proven,
    entry_of,
    find_by_name,
)
from diloco.transport.libp2p.server import HivemindServer
from diloco.transport.security.tokens import (
    TABLE_FILE,
    TokenTable,
    digest_of,
    make_token,
    name_of,
    proof_of,
)
from tests.transport.test_hivemind import make

RUN = "demo"
WAIT_S = 30.0
SHORT_S = 3.0


@contextlib.asynccontextmanager
async def started(directory: Path, **options: object) -> AsyncIterator[HivemindServer]:
    directory.mkdir()
    server = make(directory, {}, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0.0)


def table(directory: Path, *tokens: str) -> TokenTable:
    path = directory / TABLE_FILE
    uris = [Identity(RUN, Role.ISLAND, f"site-{number}").uri for number in range(len(tokens))]
    path.write_text(json.dumps(dict(zip(uris, map(digest_of, tokens), strict=True))))
    return TokenTable(path)


def peer_of(address: str) -> str:
    return parse_peer_address(address).peer_id


async def enter(daemon: Daemon) -> None:
    """Enter a daemon under the run's name, as soon as it knows a peer."""
    async with asyncio.timeout(WAIT_S):
        while True:
            await daemon.meet()
            with contextlib.suppress(DaemonFailed):
                return await daemon.provide(entry_of(RUN))
            await asyncio.sleep(0.1)


async def see(daemon: Daemon, *peers: str) -> None:
    """Wait until a daemon finds the entries of these peers."""
    async with asyncio.timeout(WAIT_S):
        while not await daemon.providers(entry_of(RUN), 9) >= {*peers}:
            await daemon.meet()
            await asyncio.sleep(0.1)


def test_a_coordinator_is_found_by_the_name_of_its_run(tmp_path: Path) -> None:
    token, other = make_token(), make_token()

    async def find() -> None:
        async with started(tmp_path / "meeting") as meeting:
            swarm = Swarm(initial_peers=(meeting.address,))
            known = table(tmp_path, other, token)
            async with started(tmp_path / "hub", swarm=swarm, tokens=known, run=RUN) as hub:
                found = await find_by_name(RUN, token, swarm, wait_s=WAIT_S)
                assert found == f"/p2p/{peer_of(hub.address)}"
                for run, held in ((RUN, make_token()), ("another", token)):
                    with pytest.raises(ConnectError, match="none proves that it knows this site"):
                        await find_by_name(run, held, swarm, wait_s=SHORT_S)

    asyncio.run(find())


def test_a_stranger_that_passes_the_question_on_is_not_taken_for_the_coordinator(
    tmp_path: Path,
) -> None:
    token = make_token()
    passed_on: list[bytes] = []

    async def find() -> None:
        async with started(tmp_path / "meeting") as meeting:
            swarm = Swarm(initial_peers=(meeting.address,))
            known = table(tmp_path, token)
            async with started(tmp_path / "hub", swarm=swarm, tokens=known, run=RUN) as hub:
                stranger = await Daemon.start(
                    swarm, listen="/ip4/127.0.0.1/tcp/0", identity=tmp_path / "stranger"
                )
                hub_peer, own = peer_of(hub.address), (await stranger.whereabouts()).peer_id

                async def pass_on(
                    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
                ) -> None:
                    question = await reader.readexactly(NAME_BYTES + NONCE_BYTES)
                    to_hub, from_hub = (
                        await stranger.open(parse_peer_address(hub.address), PROTOCOL)
                    )[:2]
                    from_hub.write(question)
                    passed_on.append(await to_hub.readexactly(PROOF_BYTES))
                    from_hub.transport.abort()
                    writer.write(passed_on[-1])
                    await reader.read(1)
                    writer.transport.abort()

                tasks = set()

                def take(peer: PeerAddress, *pipe: object) -> None:
                    tasks.add(asyncio.create_task(pass_on(*pipe)))  # type: ignore[arg-type]

                await stranger.accept(take, PROTOCOL)
                await enter(stranger)
                asker = await Daemon.start(swarm)
                await see(asker, own, hub_peer)
                try:
                    assert await _first_proven(asker, {own}, RUN, digest_of(token)) == ""
                    assert len(passed_on) == 1
                    both = {own, hub_peer}
                    assert await _first_proven(asker, both, RUN, digest_of(token)) == hub_peer
                    found = await find_by_name(RUN, token, swarm, wait_s=WAIT_S)
                    assert found == f"/p2p/{hub_peer}"
                finally:
                    await asker.stop()
                    await stranger.stop()
                    await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(find())


def test_only_a_coordinator_with_tokens_and_initial_peers_answers(tmp_path: Path) -> None:
    token = make_token()

    async def ask() -> None:
        async with started(tmp_path / "meeting") as meeting:
            swarm = Swarm(initial_peers=(meeting.address,))
            known = table(tmp_path, token)
            asker = await Daemon.start(swarm)
            try:
                for number, options in enumerate(
                    (
                        {"swarm": swarm, "tokens": known},  # a syncer
                        {"swarm": swarm, "run": RUN},
                        {"tokens": known, "run": RUN},
                    )
                ):
                    async with started(tmp_path / str(number), **options) as server:
                        peer = parse_peer_address(server.address)
                        await asker._reach(peer)
                        digest = digest_of(token)
                        assert await _first_proven(asker, {peer.peer_id}, RUN, digest) == ""
            finally:
                await asker.stop()

    asyncio.run(ask())


def test_a_table_proves_to_its_own_tokens_alone(tmp_path: Path) -> None:
    token = make_token()
    known = table(tmp_path, make_token(), token)

    proof = known.prove(name_of(digest_of(token)), b"words")

    assert proof == proof_of(digest_of(token), b"words")
    assert proof != proof_of(digest_of(token), b"other words")
    with pytest.raises(Unauthorised):
        known.prove(name_of(digest_of(make_token())), b"words")


def test_an_initial_peer_that_restarts_has_the_entry_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hivemind_server, "_ENTRY_INTERVAL_S", 0.0)  # at every look
    token = make_token()

    async def find() -> None:
        async with started(tmp_path / "meeting") as meeting:
            swarm = Swarm(initial_peers=(meeting.address,))
            known = table(tmp_path, token)
            async with started(tmp_path / "hub", swarm=swarm, tokens=known, run=RUN) as hub:
                address = await find_by_name(RUN, token, swarm, wait_s=WAIT_S)
                await meeting.stop(0.0)
                bind = f"127.0.0.1:{tcp_port(parse_peer_address(meeting.address))}"
                again = make(tmp_path / "meeting", {}, bind)
                await again.start()
                try:
                    assert again.address == meeting.address
                    assert await find_by_name(RUN, token, swarm, wait_s=WAIT_S) == address
                    assert address == f"/p2p/{peer_of(hub.address)}"
                finally:
                    await again.stop(0.0)

    asyncio.run(find())
