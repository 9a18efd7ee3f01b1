"""What `transport.kind = "hivemind"` changes where a run is put together."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.security.address import (
    coordinator_address,
    find_coordinator,
    listen,
    local_address,
    syncer_address,
)
from diloco.security.security import Security
from diloco.transport.identity import Role
from diloco.transport.libp2p.client import HivemindTransport
from diloco.transport.security.tokens import make_token
from tests.run_files import write_run

PEER = "12D3KooWN5P2Q2iiazQx4nT1YLy7dtk141rSerXCWfCod4awDsn9"
OTHER = "QmQLxPbD2BoyiGKB3RuTTZEs2uK1avhQZZyPkagYHoKiim"
BOUND = f"/ip4/10.0.0.5/tcp/4711/p2p/{PEER}"
HIVEMIND = "transport.kind=hivemind"


def run(directory: Path, *overrides: str) -> Config:
    return load_config(write_run(directory, {"east": ""}), overrides)


def test_a_peer_is_told_as_it_sees_itself_or_as_the_run_file_says(tmp_path: Path) -> None:
    plain = run(tmp_path, HIVEMIND).coordinator
    public = run(tmp_path, HIVEMIND, "coordinator.address=hub.example.org:0,192.0.2.7:99")

    assert coordinator_address(BOUND, plain) == syncer_address(BOUND, plain) == BOUND
    assert local_address(BOUND) == BOUND
    assert coordinator_address(BOUND, public.coordinator) == (
        f"/dns/hub.example.org/tcp/4711/p2p/{PEER},/ip4/192.0.2.7/tcp/99/p2p/{PEER}"
    )
    assert syncer_address(BOUND, public.coordinator) == (
        f"/dns/hub.example.org/tcp/4711/p2p/{PEER},/ip4/192.0.2.7/tcp/4711/p2p/{PEER}"
    )


def test_an_address_that_names_another_peer_is_refused(tmp_path: Path) -> None:
    config = run(tmp_path, HIVEMIND, f"coordinator.address=/ip4/10.0.0.5/tcp/1/p2p/{OTHER}")

    with pytest.raises(ConfigError, match=f"coordinator.address names the peer {OTHER}"):
        coordinator_address(BOUND, config.coordinator)
    assert syncer_address(BOUND, config.coordinator) == BOUND
    same = run(tmp_path, HIVEMIND, f"coordinator.address=/p2p/{PEER}")
    assert coordinator_address(BOUND, same.coordinator) == f"/p2p/{PEER}"


@pytest.mark.parametrize(
    ("kind", "address"), [("grpc", BOUND), ("hivemind", "10.0.0.5:4711")], ids=["grpc", "hivemind"]
)
def test_the_kinds_of_two_sites_must_be_the_same(tmp_path: Path, kind: str, address: str) -> None:
    with pytest.raises(ConfigError, match="give both sites the same kind"):
        find_coordinator(run(tmp_path, f"transport.kind={kind}"), address)


def test_a_coordinator_is_found_by_its_multiaddr(tmp_path: Path) -> None:
    assert find_coordinator(run(tmp_path, HIVEMIND), BOUND) == BOUND
    with pytest.raises(ConfigError, match="as `diloco coordinator` printed it"):
        find_coordinator(run(tmp_path, HIVEMIND), "/ip4/10.0.0.5/tcp/4711")


def test_an_island_needs_a_token_and_a_peer_to_find_the_run_by_its_name(tmp_path: Path) -> None:
    known = f"transport.hivemind.initial_peers=['/ip4/127.0.0.1/tcp/9/p2p/{PEER}']"
    (tmp_path / "island-east.token").write_text(make_token())
    (tmp_path / "island-east.token").chmod(0o600)

    def found(*overrides: str) -> str:
        config = load_config(write_run(tmp_path, {"east": ""}), overrides, island="east")
        return find_coordinator(config, "", wait_s=0.5)

    with pytest.raises(ConfigError, match=r"needs none with transport\.tokens"):
        found(HIVEMIND, known)
    with pytest.raises(ConfigError, match=r"needs none with transport\.tokens"):
        found(HIVEMIND, f"transport.tokens={tmp_path}")
    with pytest.raises(ConfigError, match=r"found within 0\.5 s: 0 peers.* Is it started"):
        found(HIVEMIND, known, f"transport.tokens={tmp_path}")


def test_listening_beyond_this_machine_needs_tokens(tmp_path: Path) -> None:
    beyond = ("coordinator.listen=0.0.0.0:4711", "coordinator.syncer_listen=0.0.0.0:0")

    with pytest.raises(ConfigError, match="knows no callers"):
        run(tmp_path, HIVEMIND, *beyond)
    placed = (f"run.state=file://{tmp_path}", "syncers.eu.listen=0.0.0.0:4711")
    with pytest.raises(ConfigError, match=r"syncers\.eu\.listen.* knows no callers"):
        run(tmp_path, HIVEMIND, *placed)
    run(tmp_path, HIVEMIND, *beyond, "transport.tokens=tokens")
    run(tmp_path, HIVEMIND, *placed, "transport.tokens=tokens")


def test_without_hivemind_its_kind_is_refused_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = Security.of(run(tmp_path, HIVEMIND), Role.COORDINATOR)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    wanted = r"transport.kind = \"hivemind\": .*pip install 'diloco\[hivemind\]'"
    with pytest.raises(ConfigError, match=wanted):
        security.transport(BOUND, Role.COORDINATOR)
    with pytest.raises(ConfigError, match=wanted):
        asyncio.run(listen("127.0.0.1:0", "", {}, security=security))


def test_a_restarted_peer_is_where_and_who_it_was(tmp_path: Path) -> None:
    config = run(tmp_path, HIVEMIND)
    Path(config.coordinator.state_dir).mkdir()
    security = Security.of(config, Role.SYNCER)

    async def start_and_stop(recorded: str) -> str:
        server = await listen("127.0.0.1:0", recorded, {}, security=security, busy_s=0.0)
        await server.stop(0.0)
        return server.address

    first = asyncio.run(start_and_stop(""))
    assert asyncio.run(start_and_stop(first)) == first


@pytest.mark.parametrize("wanted", [True, False])
def test_a_port_is_mapped_where_the_run_file_says_so(tmp_path: Path, wanted: bool) -> None:
    config = run(tmp_path, HIVEMIND, f"transport.hivemind.map_port={str(wanted).lower()}")

    swarm = Security.of(config, Role.COORDINATOR).swarm
    assert swarm is not None and swarm.maps_port is wanted


def test_others_are_found_through_the_coordinator(tmp_path: Path) -> None:
    peer = f"/dns/relay.example.org/tcp/1/p2p/{OTHER}"
    config = run(tmp_path, HIVEMIND, f"transport.hivemind.initial_peers=['{peer}']")
    security = Security.of(config, Role.ISLAND, "east")

    assert security.knowing("").swarm == security.swarm
    known = security.knowing(BOUND).swarm
    assert known is not None and known.initial_peers == (BOUND, peer)
    assert Security().knowing(BOUND) == Security()
    assert isinstance(Security().transport(BOUND, Role.COORDINATOR), HivemindTransport)
