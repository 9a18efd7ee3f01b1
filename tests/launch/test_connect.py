"""`diloco.connect`: where it finds the coordinator, and what it refuses before anything is sent."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import diloco
from diloco.errors import ConfigError
from diloco.launch.rank.connect import _Wires
from diloco.protos.control_pb2 import RunStateReply
from diloco.security.security import Security
from diloco.simulations.emulate.namespaces import Namespaces, inside
from diloco.state_dir import Endpoint, StateDir
from diloco.transport.calls.limits import Limits
from diloco.transport.contracts import Transport
from diloco.transport.errors import ConnectError
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.identity import Role
from tests.island.test_session import make_model
from tests.run_files import write_run
from tests.served_run import ServedRun
from tests.simulations.emulated_site import needs_namespaces


def test_no_island_is_refused_with_the_choices(tmp_path: Path) -> None:
    config = diloco.load_config(write_run(tmp_path, {"east": "", "west": ""}))

    with pytest.raises(ConfigError, match=r"load_config\(path, island=\.\.\.\) .* east, west"):
        diloco.connect(config)


def test_an_unknown_address_says_how_to_give_it(tmp_path: Path) -> None:
    config = diloco.load_config(write_run(tmp_path, {"east": ""}), island="east")

    with pytest.raises(ConfigError, match=r"(?s)where is the coordinator\?.*diloco coordinator"):
        diloco.connect(config)


def test_what_is_no_address_is_refused_at_once(tmp_path: Path) -> None:
    config = diloco.load_config(write_run(tmp_path, {"east": ""}), island="east")

    with pytest.raises(ConfigError, match=r"address 'foo' must be HOST:PORT"):
        diloco.connect(config, "foo")


def test_an_unknown_link_is_refused(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, {"east": ""})
    config = diloco.load_config(run_file, ["transport.link=warp"], island="east")

    with pytest.raises(ConfigError, match=r"transport.link = 'warp'"):
        diloco.connect(config, "127.0.0.1:9")


@pytest.mark.parametrize(
    ("stands", "said"),
    [
        ({"is_finished": True}, r"has finished, nothing is left to train: .* \(diloco export"),
        ({"fatal_reason": "quorum lost"}, "failed: quorum lost. Resume it: diloco coordinator"),
        ({"is_stopped": True}, "is stopped after inner step 4. Resume it: diloco coordinator"),
        ({}, ""),
    ],
    ids=["finished", "failed", "stopped", "killed"],
)
def test_a_loop_of_a_run_that_is_over_says_so_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stands: dict[str, object],
    said: str,
) -> None:
    config = diloco.load_config(write_run(tmp_path, {"east": ""}), island="east")
    state = StateDir(Path(config.coordinator.state_dir))
    state.root.mkdir(parents=True)
    state.journal.touch()
    there = {"is_finished": False, "fatal_reason": "", "is_stopped": False, **stands}
    membership = SimpleNamespace(
        members=SimpleNamespace(away=()), stop_name="after inner step 4", **there
    )
    monkeypatch.setattr("diloco.launch.rank.connect.membership_of", lambda _: membership)
    monkeypatch.setattr("diloco.launch.rank.connect.Connection", Mock())

    if there["is_finished"]:
        with pytest.raises(ConfigError, match=said):
            diloco.connect(config, "127.0.0.1:9")
        diloco.connect(config, "192.0.2.7:9")  # another coordinator than that of this directory
    else:
        diloco.connect(config, "127.0.0.1:9")
        assert re.search(said, caplog.text)
        assert bool(caplog.text) == bool(said)


@pytest.mark.parametrize("source", ["argument", "run file", "state_dir"])
def test_the_coordinator_is_found(tmp_path: Path, source: str) -> None:
    with ServedRun(tmp_path, {"east": ""}, inner_steps=1) as served:
        overrides, address = [], ""
        if source == "argument":
            address = served.address
        elif source == "run file":
            overrides = [f"coordinator.address={served.address}"]
        else:
            state = StateDir(tmp_path / "state")
            state.create()
            Endpoint(served.address, os.getpid()).write(state.coordinator)
        config = diloco.load_config(served.run_file, overrides, island="east")
        with diloco.connect(config, address) as connection:
            outer = diloco.DiLoCo(make_model(), config.outer, transport=connection)
            outer.step(num_tokens=1)
            outer.finish()

    assert len(served.joins) == 1


@needs_namespaces
@pytest.mark.parametrize(
    ("address", "is_leader", "times"),
    [
        pytest.param("192.0.2.7:4711", True, 1, id="leader"),
        pytest.param("192.0.2.7:4711", False, 0, id="other-rank"),
        pytest.param("127.0.0.1:4711", True, 0, id="on-this-machine"),
    ],
)
def test_a_loop_of_ones_own_is_warned_of_a_slow_tcp_once_by_its_leader(
    address: str,
    is_leader: bool,
    times: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Security, "transport", Mock())
    overrides = ["transport.insecure=true"]
    config = diloco.load_config(write_run(tmp_path, {"east": ""}), overrides, island="east")
    with Namespaces(["here"]) as spaces, inside(spaces.path("here")):
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")
        with diloco.connect(config, address) as connection:
            wires = connection._wires
            if is_leader:
                wires.coordinator()
            wires.syncers(["192.0.2.7:4712"], island_rank=0, carriers=[0])

    told = [r for r in caplog.records if "tcp_congestion_control=bbr" in r.getMessage()]
    assert [r.levelname for r in told] == ["WARNING"] * times


def test_what_cannot_be_reached_is_told_with_its_address(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, {"east": ""})
    config = diloco.load_config(run_file, ["transport.unreachable=1s"], island="east")
    told = "the coordinator at 127.0.0.1:9 gave no answer"
    with (
        pytest.raises(diloco.CoordinatorUnavailable, match=told),
        diloco.connect(config, "127.0.0.1:9") as connection,
    ):
        diloco.DiLoCo(make_model(), config.outer, transport=connection)


def opened(ways: list[tuple[Transport, Transport]]) -> list[tuple[Transport, Transport]]:
    """Give what is under the transports that follow the syncers."""
    pairs: list[tuple[Any, Any]] = [*ways]
    return [(control._inner, data._inner) for control, data in pairs]


def wires(tmp_path: Path, *overrides: str) -> _Wires:
    config = diloco.load_config(write_run(tmp_path, {"east": ""}), overrides, island="east")
    return _Wires(config, "127.0.0.1:9", Security.of(config, Role.ISLAND, "east"), None)


def test_rates_and_connections_of_the_run_file_reach_the_ways_of_a_carrier(tmp_path: Path) -> None:
    rates = ("transport.rate=100Mbit/s", "transport.snapshot_rate=20Mbit/s")
    site = wires(tmp_path, *rates, "transport.channels=4")

    ((control, data),) = opened(site.syncers(["127.0.0.1:1"], island_rank=1, carriers=[0, 1, 1, 3]))
    assert isinstance(control, GrpcTransport) and isinstance(data, GrpcTransport)
    assert data._packers.pacer is control._packers.pacer, "one for all that a process sends"
    assert data._packers.pacer.rate_bps == pytest.approx(100e6 / 3)
    assert data._packers.pacer.bulk_rate_bps == pytest.approx(20e6 / 3)
    assert (control._dealt.num_channels, data._dealt.num_channels) == (1, 4)
    assert (control._meter, data._meter) == (None, None)

    server = site._security.server("127.0.0.1:0", {}, limits=Limits())
    assert isinstance(server, GrpcServer) and server._packers.pacer.rate_bps == 100e6
    ways = wires(tmp_path).syncers(["127.0.0.1:1"], island_rank=0, carriers=[0])
    ((_, chosen),) = opened(ways)
    assert isinstance(chosen, GrpcTransport) and chosen._meter is not None, "auto: by the loss"


def test_the_environments_proxy_is_asked_for_a_syncer_beyond_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.close()

    async def run() -> None:
        proxy = await asyncio.start_server(refuse, "127.0.0.1", 0)
        port = proxy.sockets[0].getsockname()[1]
        monkeypatch.setenv("grpc_proxy", f"http://127.0.0.1:{port}")
        (ways,) = wires(tmp_path, "transport.insecure=true").syncers(
            ["10.255.255.1:4711"], island_rank=0, carriers=[0]
        )
        for way in ways:
            with pytest.raises(ConnectError, match=rf"the proxy 127.0.0.1:{port} \(grpc_proxy\)"):
                await way.call("fragment.poll", b"", deadline_s=30.0)
            await way.close()
        proxy.close()
        await proxy.wait_closed()

    asyncio.run(run())
    assert set(asked) == {b"CONNECT 10.255.255.1:4711 HTTP/1.1\r\n"}
    assert len(asked) >= 2


def test_one_question_where_the_syncers_are_is_for_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = wires(tmp_path)
    site._finding = "127.0.0.1:1,127.0.0.1:2"
    asked: list[str] = []
    found: list[Sequence[int]] = []
    site.on_found = found.append

    async def answer(transport: Transport, island: str) -> RunStateReply:
        asked.append(transport.peer)
        if len(asked) == 1:
            raise diloco.CoordinatorUnavailable("silent")
        addresses = ["127.0.0.1:7", "127.0.0.1:8"]
        return RunStateReply(syncer_addresses=addresses, fragment_syncers=[1, 0, 1])

    async def run() -> list[object]:
        first = await asyncio.gather(*map(site._find, (0, 1, 0)), return_exceptions=True)
        assert all(isinstance(each, diloco.CoordinatorUnavailable) for each in first)
        return await asyncio.gather(*map(site._find, (0, 1, 0)))

    monkeypatch.setattr("diloco.launch.rank.connect.ask_run_state", answer)
    monkeypatch.setattr("diloco.launch.rank.connect._SPREAD_S", 0.01)

    assert asyncio.run(run()) == ["127.0.0.1:7", "127.0.0.1:8", "127.0.0.1:7"]
    assert asked == ["127.0.0.1:1,127.0.0.1:2", "127.0.0.1:2,127.0.0.1:1"]
    assert [*map(list, found)] == [[1, 0, 1]], "fragments have perhaps moved, too"


def test_an_environment_that_no_client_can_use_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "socks9://127.0.0.1:1")
    site = wires(tmp_path, "transport.payloads=bucket")

    async def open_them() -> None:
        site.syncers(["127.0.0.1:1"], island_rank=0, carriers=[0])

    with pytest.raises(ConfigError, match=r"no client of the object store.*See to HTTPS_PROXY"):
        asyncio.run(open_them())


def test_a_directory_signs_no_addresses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"transport\.payloads.*a directory signs no addresses"):
        wires(tmp_path, "transport.payloads=bucket", f"run.state=file://{tmp_path}")
