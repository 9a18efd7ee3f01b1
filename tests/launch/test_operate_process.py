"""An operator's commands to a real coordinator, and an island that is frozen by a signal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.checkpoint.run_checkpoints import open_journal
from diloco.cli.main import app
from diloco.config.load import load_config
from diloco.errors import RunHalted
from diloco.protos import control_pb2 as control
from diloco.transport.contracts import PROTOCOL_VERSION
from tests.coordinator_site import Site, call, eventually, status
from tests.waiting import exit_code

pytestmark = pytest.mark.timeout(180)

ELASTIC = ("outer.merge=on_arrival", "outer.min_contributions=1")
ISLAND = """
import asyncio, sys
from diloco.protos import control_pb2 as control
from diloco.transport.contracts import PROTOCOL_VERSION
from diloco.transport.errors import TransportError
from diloco.transport.grpc.client import GrpcTransport
from tests.waiting import exit_code

async def live(address, request):
    transport = GrpcTransport(address)
    reply = await transport.call("control.join", request, deadline_s=30)
    grant = control.JoinReply.FromString(reply.header).grant
    report = control.ReportRequest(protocol_version=PROTOCOL_VERSION, grant=grant, inner_step=3)
    while True:
        try:
            header = report.SerializeToString()
            reply = await transport.call("control.report", header, deadline_s=5)
        except TransportError:
            await asyncio.sleep(0.2)
            continue
        told = control.ReportReply.FromString(reply.header)
        if told.stop:
            sys.exit(told.exit_code)
        await asyncio.sleep(0.2)

asyncio.run(live(sys.argv[1], sys.stdin.buffer.read()))
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    try:
        yield site
    finally:
        site.close()


def raw_island(site: Site, address: str, name: str) -> subprocess.Popen[str]:
    """Start a process that joins and reports, and trains nothing."""
    process = subprocess.Popen(
        [sys.executable, "-c", ISLAND, address],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    site.processes.append(process)
    assert process.stdin is not None
    process.stdin.buffer.write(site.join_request(name, name, overrides=ELASTIC).SerializeToString())
    process.stdin.close()
    return process


def leases(address: str) -> dict[str, str]:
    return {island.island: island.lease for island in status(address).islands}


def told(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.exception
    return " ".join(result.stdout.split())


def test_a_frozen_island_is_out_of_the_run_until_it_thaws(site: Site) -> None:
    _, address = site.coordinate_until_up(*ELASTIC, "coordinator.lease=4s")
    east, west = (raw_island(site, address, name) for name in ("east", "west"))
    eventually(lambda: set(leases(address).values()) == {"active"}, "both are there")

    west.send_signal(signal.SIGSTOP)
    eventually(lambda: leases(address)["west"] == "lapsed", "the lease ends")
    west.send_signal(signal.SIGCONT)

    eventually(lambda: leases(address)["west"] == "active", "it is back")
    assert (east.poll(), west.poll()) == (None, None), "nobody was fenced"


def test_an_operator_pauses_sets_kicks_copies_and_stops_a_run(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, address = site.coordinate_until_up(*ELASTIC)
    east, west = (raw_island(site, address, name) for name in ("east", "west"))
    eventually(lambda: set(leases(address).values()) == {"active"}, "both are there")

    assert "diloco unpause HOST:PORT" in told("pause", address)
    assert "paused already" in told("pause", address)
    assert "revision 1" in told("set", address, "outer.optimizer.lr=0.25")
    assert "west is out" in told("kick", address, "west", "--reason", "it is a test")
    assert exit_code(west, 30) == 41
    coordinator.kill()  # all of it is remembered by the next one
    coordinator.wait()
    coordinator, again = site.coordinate_until_up(*ELASTIC)
    assert again == address
    stands = status(address)
    assert (stands.is_paused, leases(address)["west"]) == (True, "kicked")
    refused = control.JoinReply.FromString(
        call(address, "control.join", site.join_request("west", "b", overrides=ELASTIC)).header
    )
    assert refused.status == control.JOIN_STATUS_KICKED and "it is a test" in refused.message
    assert (
        json.loads(site.join(address, "east", "east", overrides=ELASTIC).policy_json)[
            "outer.optimizer.lr"
        ]
        == 0.25
    )
    assert load_config(site.state.resolved).outer.optimizer.lr == 0.25
    assert "may join again" in told("kick", address, "west", "--undo")
    assert "rounds open again" in told("unpause", address)

    monkeypatch.chdir(tmp_path)
    assert str(tmp_path / "copy") in told("backup", address, "copy")
    assert (tmp_path / "copy" / "journal.sqlite").is_file()
    assert "writes its checkpoint and leaves" in told("stop", address)
    assert "already" in told("stop", address)
    assert "goes on where it was" in told("stop", address, "--now")
    assert exit_code(east, 30) == RunHalted.exit_code
    assert exit_code(coordinator, 30) == 0
    assert coordinator.stdout is not None
    assert "nothing is lost: start it again with the same command" in coordinator.stdout.read()


def test_a_coordinator_killed_at_the_end_waits_again_for_who_has_not_fetched_it(
    site: Site,
) -> None:
    def leave(island: str, start_id: str, exit_code: int) -> None:
        grant = site.join(address, island, start_id, overrides=ELASTIC).grant
        request = control.LeaveRequest(
            protocol_version=PROTOCOL_VERSION, grant=grant, exit_code=exit_code
        )
        call(address, "control.leave", request)

    coordinator, address = site.coordinate_until_up(*ELASTIC)
    site.join(address, "east", "a", overrides=ELASTIC)
    leave("west", "b", 1)  # its supervisor starts it again
    leave("east", "a", 0)
    assert coordinator.poll() is None, "it waits for west"
    coordinator.kill()
    coordinator.wait()
    with open_journal(site.state.journal) as journal:  # every fragment has merged the run's tokens
        total = site.config(*ELASTIC).total_tokens
        journal.write([("merged", json.dumps([0, total]))])

    coordinator, again = site.coordinate_until_up(*ELASTIC)

    assert again == address
    leave("west", "c", 0)
    assert exit_code(coordinator, 30) == 0
    assert coordinator.stdout is not None
    assert "the run has finished, but for west" in coordinator.stdout.read()
    assert exit_code(site.coordinate(*ELASTIC), 30) == 0, "now it is over"
