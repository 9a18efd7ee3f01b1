"""Ports are drawn once; wildcards are not told to islands."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.config.network import CoordinatorConfig
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.protocol.run.peer_bounds import limits_of
from diloco.protos.control_pb2 import ReportRequest
from diloco.security.address import (
    coordinator_address,
    listen,
    local_address,
    of_syncer,
    syncer_address,
)
from diloco.security.security import Security
from diloco.transport.calls.limits import Limits, Turnstile
from diloco.transport.contracts import PROTOCOL_VERSION, IncomingCall, Reply
from diloco.transport.errors import ConnectError, Overloaded, PeerReset
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from tests.run_files import write_run


def test_recorded_port_is_bound_again_only_when_none_is_configured() -> None:
    async def bound(bind: str, recorded: str) -> str:
        server = await listen(bind, recorded, {}, security=Security())
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
            waiting = asyncio.create_task(listen("127.0.0.1:0", address, {}, security=Security()))
            with pytest.raises(ConfigError) as caught:
                await listen("127.0.0.1:0", address, {}, security=Security(), busy_s=0.3)
            assert not waiting.done()
        server = await waiting
        await server.stop(0)
        assert server.address == address
        return address, str(caught.value)

    address, message = asyncio.run(story())

    assert f"cannot listen on {address}: is another process using it? " in message
    assert "(Address already in use). Islands expect" in message
    assert "end the process that holds it" in message


def test_all_ranks_of_an_island_may_connect_at_once_from_one_address(tmp_path: Path) -> None:
    text = dict.fromkeys(["islands.east.ranks", "islands.east.mesh.dp_replicate"], 512)
    text["islands.east.tokens_per_inner_step"] = 512 * 32
    run = load_config(
        write_run(tmp_path, {"east": "", "west": ""}), [f"{k}={v}" for k, v in text.items()]
    )

    assert limits_at(run).strangers_per_address == 1024


def limits_at(run: Config) -> Limits:
    async def limits() -> Limits:
        server = await listen("127.0.0.1:0", "", {}, security=Security(), limits=limits_of(run))
        await server.stop(0)
        assert isinstance(server, GrpcServer)
        return server._limits

    return asyncio.run(limits())


@pytest.mark.parametrize(("num_islands", "ranks"), [(8, 512), (2, 1024)])
def test_every_rank_may_poll_while_its_island_sends_all_lanes_of_a_flush(
    num_islands: int, ranks: int, tmp_path: Path
) -> None:
    names = [f"island-{number}" for number in range(num_islands)]
    text = {"outer.preset": "streaming", "outer.num_fragments": 8, "outer.num_lanes": ranks}
    for name in names:
        text |= dict.fromkeys([f"islands.{name}.ranks", f"islands.{name}.mesh.dp_replicate"], ranks)
        text[f"islands.{name}.tokens_per_inner_step"] = ranks * 32
    run = load_config(
        write_run(tmp_path, dict.fromkeys(names, "")), [f"{k}={v}" for k, v in text.items()]
    )
    turnstile = Turnstile(limits_at(run))

    for name in names:
        for _ in range(ranks):
            turnstile.enter(name, "fragment.poll", 0.0)
        for _ in range(8 * ranks):
            turnstile.enter(name, "fragment.submit", 0.0)

    with pytest.raises(Overloaded, match="calls of this caller"):
        for _ in range(4 * ranks):
            turnstile.enter(names[0], "fragment.poll", 0.0)
    turnstile.enter(names[1], "fragment.poll", 0.0)
    small = limits_at(load_config(write_run(tmp_path, {"east": ""})))
    assert (small.calls, small.calls_per_caller) == (Limits().calls, Limits().calls_per_caller)


def config(**addresses: str) -> CoordinatorConfig:
    return CoordinatorConfig(state_dir="runs/test", **addresses)


def test_reports_of_one_island_have_a_rate_and_others_get_through() -> None:
    async def report(call: IncomingCall) -> Reply:
        return Reply(b"heard")

    async def story() -> tuple[list[int], float]:
        server = await listen("127.0.0.1:0", "", {"control.report": report}, security=Security())
        header = ReportRequest(protocol_version=PROTOCOL_VERSION).SerializeToString()
        heard, began = [], time.monotonic()
        for num_calls in (1000, 10):
            island = GrpcTransport(server.address)
            calls = [
                island.call("control.report", header, deadline_s=300.0) for _ in range(num_calls)
            ]
            replies = await asyncio.gather(*calls, return_exceptions=True)
            refused = [reply for reply in replies if not isinstance(reply, Reply)]
            kinds = Overloaded | PeerReset | ConnectError  # the last as a connection is reset
            assert all(isinstance(each, kinds) for each in refused), refused
            heard.append(num_calls - len(refused))
            await island.close()
        await server.stop(0)
        return heard, time.monotonic() - began

    (flooding, other), seconds = asyncio.run(story())

    assert 250 <= flooding <= 250 + 25 * seconds, "ten seconds' worth at once"
    assert other == 10


@pytest.mark.parametrize(
    ("bound", "address", "expected"),
    [
        ("127.0.0.1:4711", "", "127.0.0.1:4711"),
        ("localhost:4711", "", "localhost:4711"),
        ("10.0.0.5:4711", "eu.example.org:80", "eu.example.org:80"),
        ("0.0.0.0:4711", "eu.example.org:4711", "eu.example.org:4711"),
        ("0.0.0.0:4711", "eu.example.org:0", "eu.example.org:4711"),
        ("[::]:4711", "[2001:db8::1]:80", "[2001:db8::1]:80"),
    ],
)
def test_islands_are_told_how_they_reach_the_coordinator(
    bound: str, address: str, expected: str
) -> None:
    assert coordinator_address(bound, config(address=address)) == expected


@pytest.mark.parametrize(
    ("bound", "address", "own", "expected"),
    [
        ("127.0.0.1:4712", "", "", "127.0.0.1:4712"),
        ("0.0.0.0:4712", "eu.example.org:80", "", "eu.example.org:4712"),
        ("10.0.0.5:4712", "eu.example.org:80", "", "eu.example.org:4712"),
        ("[::]:4712", "[2001:db8::1]:80", "", "[2001:db8::1]:4712"),
        ("10.0.0.5:4712", "eu.example.org:80", "us.example.org:81", "us.example.org:81"),
        ("0.0.0.0:4712", "", "us.example.org:0", "us.example.org:4712"),
    ],
    ids=["bound", "follows", "follows-behind-nat", "v6", "its-own", "its-own-host"],
)
def test_islands_are_told_how_they_reach_the_syncer(
    bound: str, address: str, own: str, expected: str
) -> None:
    assert syncer_address(bound, config(address=address, syncer_address=own)) == expected


@pytest.mark.parametrize("bound", ["0.0.0.0:0", "[::]:4711"])
def test_wildcard_without_public_address_is_refused(bound: str) -> None:
    with pytest.raises(ConfigError, match=r"coordinator\.address"):
        coordinator_address(bound, config())
    with pytest.raises(ConfigError, match=r"coordinator\.syncer_address"):
        syncer_address(bound, config())


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        ("10.0.0.5:4711", "10.0.0.5:4711"),
        ("0.0.0.0:4711", "127.0.0.1:4711"),
        ("[::]:4711", "[::1]:4711"),
    ],
)
def test_processes_besides_it_need_no_way_through_the_outside(bound: str, expected: str) -> None:
    assert local_address(bound) == expected


def test_address_that_is_no_address_is_refused() -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        config(syncer_address="eu.example.org")


def test_each_of_several_syncers_has_the_port_behind_the_one_before_it() -> None:
    config = CoordinatorConfig(state_dir="runs", syncer_address="eu:4712, us:0", num_syncers=3)

    assert of_syncer("0.0.0.0:4712", 2) == "0.0.0.0:4714"
    assert of_syncer("127.0.0.1:0", 2) == "127.0.0.1:0", "each draws its own"
    assert of_syncer("", 2) == ""
    assert syncer_address("0.0.0.0:9000", config, 0) == "eu:4712,us:9000"
    assert syncer_address("0.0.0.0:9002", config, 2) == "eu:4714,us:9002"
