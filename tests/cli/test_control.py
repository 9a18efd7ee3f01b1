"""`diloco status` and `diloco coordinator`: tables, JSON and refusals."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.cli.run import control, island
from diloco.cli.run.control import as_plain
from diloco.cli.terminal.fitted_table import FittedTable
from diloco.cli.terminal.tables import (
    fragments_table,
    island_text,
    islands_table,
    run_line,
    run_text,
    status_view,
)
from diloco.coordinator.status import ask_run_state, ask_status, operate
from diloco.errors import ConfigError, CoordinatorUnavailable
from diloco.protos.control_pb2 import (
    FragmentStatus,
    Grant,
    IslandStatus,
    ReportRequest,
    RunStateReply,
    RunStateRequest,
    StatusReply,
)
from diloco.transport.contracts import Handler, IncomingCall, Reply, Transport
from diloco.transport.errors import ConnectError, Unauthorised
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.identity import Identity, Role
from tests.guarded_server import serving
from tests.transport.pki import COORDINATOR, EAST, Pki

REPLY = StatusReply(
    run="demo",
    inner_steps=325,
    state="running",
    syncer_address="127.0.0.1:4712",
    syncer_epoch=3,
    islands=[
        IslandStatus(island="west", incarnation=1, island_slot=1, lease="lapsed"),
        IslandStatus(
            island="east",
            incarnation=2,
            island_slot=0,
            lease="active",
            lease_left_s=9.74,
            report_age_s=0.25,
            last_report=ReportRequest(
                inner_step=120,
                loss_nats=2.34567,
                tokens_per_s=15360.4,
                fragments_in_flight=2,
                bytes_up=3 << 20,
                bytes_down=5 << 10,
                blocked_s=1.25,
                utilisation=0.9312,
                state="training",
            ),
        ),
        IslandStatus(island="north", island_slot=2, lease="absent"),
    ],
    fragments=[
        FragmentStatus(
            fragment_id=0,
            version=5,
            attempt=1,
            digest="0123456789abcdef" * 4,
            contributors=["east", "west"],
            age_s=3725.04,
            phase="grace",
            waits_for=["north"],
            num_waits_for=3,
            left_s=3.1,
        ),
        FragmentStatus(fragment_id=1, phase="unfounded"),
    ],
)


async def status(_: IncomingCall) -> Reply:
    return Reply(REPLY.SerializeToString())


async def run_state(call: IncomingCall) -> Reply:
    name = RunStateRequest.FromString(call.header).island
    own = next(island for island in REPLY.islands if island.island == name)
    return Reply(RunStateReply(island=own, inner_steps=REPLY.inner_steps).SerializeToString())


async def run_state_of_all(_: IncomingCall) -> Reply:
    return Reply(RunStateReply(state="running", inner_steps=325).SerializeToString())


ANSWERS = {"control.status": status, "control.standing": run_state}


def shown(renderable: object, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


def rows(table: FittedTable) -> list[list[str]]:
    """Cells of every row."""
    return [[cell.plain for cell in row] for row in table.rows]


@pytest.fixture
def coordinator() -> Iterator[str]:
    """Address of a coordinator that answers operators and islands with REPLY."""
    with serving(ANSWERS) as address:
        yield address


def test_islands_stand_in_slot_order_with_what_they_last_reported() -> None:
    assert rows(islands_table(REPLY)) == [
        [
            "east", "2", "active 9.7 s", "training", "120/325", "2.3457", "15,360", "2", "3 MiB",
            "5 KiB", "1.2 s", "93.1%", "-", "0.2 s ago",
        ],
        ["west", "1", "lapsed", "joined", *["-"] * 10],
        ["north", "-", "absent", "not joined", *["-"] * 10],
    ]  # fmt: skip


def test_fragments_show_version_attempt_when_published_and_contributors() -> None:
    assert rows(fragments_table(REPLY)) == [
        [
            "0",
            "5",
            "1",
            "grace 3.1 s for north, 2 more",
            "3,725.0 s ago",
            "0123456789ab",
            "east, west",
        ],
        ["1", "0", "0", "unfounded", "-", "-", "-"],
    ]


@pytest.mark.parametrize(
    ("changes", "words", "absent"),
    [
        ({}, ["demo", "running", "127.0.0.1:4712", "epoch 3"], ["timeline", "checkpoints"]),
        ({"syncer_address": ""}, ["not there yet"], []),
        ({"timeline": 2}, ["timeline 2"], ["tokens merged", "no round opens"]),
        ({"generation": 7, "is_paused": True}, ["generation 7", "no round opens"], []),
        ({"total_tokens": 9000}, ["tokens merged 0 of 9,000"], ["solo"]),
        (
            {
                "total_tokens": 9000,
                "fragments": [FragmentStatus(fragment_id=2, rounds=8, solo_rounds=2)],
            },
            ["(25% of rounds solo)"],
            [],
        ),
        ({"checkpoint_steps": [60, 120]}, ["checkpoints 60, 120"], []),
        ({"state": "failed", "message": "quorum lost"}, ["failed", "quorum lost"], []),
    ],
    ids=["running", "no-syncer", "resumed", "paused", "tokens", "solo", "checkpoints", "failed"],
)
def test_first_line_says_what_state_the_run_is_in(
    changes: dict[str, object], words: list[str], absent: list[str]
) -> None:
    reply = StatusReply()
    reply.CopyFrom(REPLY)
    reply.MergeFrom(StatusReply(**changes))
    if "syncer_address" in changes:
        reply.syncer_address = ""

    text = shown(run_line(reply))

    assert all(word in text for word in words), text
    assert not any(word in text for word in absent), text


def test_view_of_a_run_that_nobody_joined_is_whole() -> None:
    text = shown(status_view(StatusReply(run="demo", state="waiting for islands")))

    assert "waiting for islands" in text
    assert "island" in text and "fragment" in text


def test_view_fits_a_narrow_terminal() -> None:
    lines = shown(status_view(REPLY), width=80).splitlines()

    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)


def test_plain_values_keep_integers_and_say_what_is_not_set() -> None:
    plain = as_plain(REPLY)

    assert plain["syncer_epoch"] == 3
    assert plain["islands"][0]["last_report"] is None
    assert plain["islands"][1]["last_report"]["bytes_up"] == 3 << 20
    assert plain["fragments"][0]["contributors"] == ["east", "west"]
    assert as_plain(Grant(roles=[1, 2]))["roles"] == [1, 2]


def test_status_prints_tables(coordinator: str) -> None:
    result = CliRunner().invoke(app, ["status", coordinator], env={"COLUMNS": "200"})

    assert result.exit_code == 0
    assert "training" in result.output
    assert "unfounded" in result.output


def test_status_prints_one_line_of_json(coordinator: str) -> None:
    result = CliRunner().invoke(app, ["status", coordinator, "--json"])

    assert json.loads(result.output) == as_plain(REPLY)
    assert result.output.count("\n") == 1


def test_one_line_says_where_every_island_stands() -> None:
    reply = StatusReply()
    reply.CopyFrom(REPLY)
    founding = ReportRequest(state="waiting", bytes_up=3 << 20, bytes_down=5 << 10)
    reply.islands[0].last_report.CopyFrom(founding)

    assert run_text(reply) == (
        "running: east training, step 120/325 loss 2.346 15,360 tokens/s; west waiting, 3 MiB up, "
        "5 KiB down; north not joined; versions 5, 0"
    )
    reply.inner_steps, reply.total_tokens = 0, 9000  # a run that tokens end
    assert "step 120 loss" in run_text(reply) and "merged 0 of 9,000" in run_text(reply)
    assert rows(islands_table(reply))[0][4] == "120"
    assert island_text(REPLY.islands[0], 325) == "joined"
    assert island_text(IslandStatus(), 325) == "not joined"


def test_what_an_island_has_not_told_is_left_out_and_what_is_left_is_shown() -> None:
    reply = StatusReply()
    reply.CopyFrom(REPLY)
    (east,) = (island for island in reply.islands if island.island == "east")
    east.last_report.loss_nats, east.last_report.left_s = 0.0, 90.0
    reply.away.append("island west is away: no report for more than 10 s")

    first, second = run_text(reply).splitlines()
    assert "step 120/325 15,360 tokens/s, 1.5 min left; " in first
    assert second == "island west is away: no report for more than 10 s"


@pytest.mark.parametrize(
    ("states", "exit_code"),
    [
        (("running", "finished"), 0),
        (("running", "stopping", "stopped"), 0),
        (("running", "stopping", ""), 30),
        (("running", "failed"), 50),
        (("running", ""), 30),
    ],
    ids=["finished", "stopped", "killed-while-stopping", "failed", "gone"],
)
def test_who_watches_a_run_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, states: tuple[str, ...], exit_code: int
) -> None:
    answers = iter(states)

    async def answer(*_: object, watches: bool, **__: object) -> StatusReply:
        if not (state := next(answers)):
            raise CoordinatorUnavailable("no coordinator answered")
        assert watches
        return StatusReply(run="demo", state=state, exit_code=50 if state == "failed" else 0)

    monkeypatch.setattr("diloco.coordinator.status.ask_status", answer)
    monkeypatch.setattr(control, "_WATCH_S", 0.0)
    result = CliRunner().invoke(app, ["status", "127.0.0.1:1", "--insecure", "--watch", "--json"])

    code = getattr(result.exception, "exit_code", result.exit_code)
    assert code == exit_code, result.output
    assert list(answers) == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        pytest.param(run_state, "island east training, step 120/325 loss", id="there"),
        pytest.param(run_state_of_all, "island east: the run is running", id="unproved"),
        pytest.param(None, "does not run, start it: diloco coordinator", id="away"),
    ],
)
def test_an_island_says_where_it_stands_while_it_lives(
    tmp_path: Path,
    answer: Handler | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pki = Pki(tmp_path, "two-islands")
    who = Identity("two-islands", Role.ISLAND, "east")
    pki.issue(who)
    tls = pki.tls(Identity("two-islands", Role.COORDINATOR))
    looks = threading.Semaphore(0)

    async def counted(transport: Transport, name: str) -> RunStateReply:
        looks.release()
        return await ask_run_state(transport, name)

    def run_island(*_: object) -> int:
        # At the second look the first has been shown.
        assert looks.acquire(timeout=20) and looks.acquire(timeout=20)
        return 0

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("diloco.coordinator.status.ask_run_state", counted)
    monkeypatch.setattr("diloco.launch.island.run_island", run_island)
    monkeypatch.setattr(island, "_LINE_EVERY_S", 0.05)
    run_file = Path(__file__).resolve().parents[2] / "configs" / "runs" / "two-islands.toml"

    with serving({"control.standing": answer or run_state}, tls) as address:
        arguments = ["island", str(run_file), "--island", "east", "--coordinator"]
        arguments += [address if answer else "127.0.0.1:1"]
        result = CliRunner().invoke(app, [*arguments, "--set", f"transport.certs={tmp_path}"])

    assert result.exit_code == 0, result.output
    assert words in result.stderr, result.output


def test_a_coordinator_that_refuses_is_not_taken_for_dead(tmp_path: Path) -> None:
    pki = Pki(tmp_path)

    async def ask(address: str) -> None:
        transport = GrpcTransport(address, tls=pki.tls(EAST))
        try:
            await ask_status(transport)
        finally:
            await transport.close()

    refusal = pytest.raises(CoordinatorUnavailable, match=r"refused to answer: .*role operator")
    with serving(ANSWERS, pki.tls(COORDINATOR)) as address, refusal:
        asyncio.run(ask(address))


def test_a_call_that_did_not_arrive_is_made_once_more() -> None:
    answers = [ConnectError("hung up"), ConnectError("hung up"), Unauthorised("no"), None]

    class Away:
        peer = "there"

        async def call(self, *_: object, **__: object) -> Reply:
            if error := answers.pop(0):
                raise error
            return Reply(b"")

    way = cast("Transport", Away())
    for reason in ("no coordinator answered at there: hung up", "refused to answer: no"):
        with pytest.raises(CoordinatorUnavailable, match=reason):
            asyncio.run(operate(way, "pause", {}))
    answers.insert(0, ConnectError("hung up"))
    asyncio.run(ask_status(way))


def test_coordinator_that_cannot_be_reached_is_named_with_the_next_command() -> None:
    result = CliRunner().invoke(app, ["status", "127.0.0.1:1"])

    assert isinstance(result.exception, CoordinatorUnavailable)
    assert result.exception.exit_code == 30
    message = str(result.exception)
    assert "127.0.0.1:1" in message
    assert message.endswith("diloco coordinator RUN.toml")


@pytest.mark.parametrize("address", ["localhost", "localhost:", ":4711", "host:0", "host:65536"])
def test_address_without_host_or_port_is_refused(address: str) -> None:
    result = CliRunner().invoke(app, ["status", address])

    assert isinstance(result.exception, ConfigError)
    assert repr(address) in str(result.exception)


def test_coordinator_refuses_a_bad_override_before_it_starts(tmp_path: Path) -> None:
    run_file = Path(__file__).resolve().parents[2] / "configs" / "runs" / "two-islands.toml"
    state_dir = tmp_path / "state"
    arguments = ["--set", f"coordinator.state_dir={state_dir}", "--set", "outer.overlap_steps=-1"]

    result = CliRunner().invoke(app, ["coordinator", str(run_file), *arguments])

    assert isinstance(result.exception, ConfigError)
    assert "outer.overlap_steps" in str(result.exception)
    assert not state_dir.exists()


def test_a_step_to_resume_at_needs_resume_and_a_run_to_resume(tmp_path: Path) -> None:
    run_file = Path(__file__).resolve().parents[2] / "configs" / "runs" / "two-islands.toml"
    state_dir = tmp_path / "state"
    arguments = ["coordinator", str(run_file), "--set", f"coordinator.state_dir={state_dir}"]

    without = CliRunner().invoke(app, [*arguments, "--at", "60"])
    nothing = CliRunner().invoke(app, [*arguments, "--resume", "--at", "60"])

    assert isinstance(without.exception, ConfigError)
    assert str(without.exception) == "--at 60 says where to resume: add --resume, or leave it out"
    assert isinstance(nothing.exception, ConfigError)
    assert f"there is no run in coordinator.state_dir = {state_dir}" in str(nothing.exception)
    assert not state_dir.exists()


def test_importing_the_commands_is_light() -> None:
    program = (
        "import sys, diloco.cli.run.control\n"
        "heavy = {'torch', 'grpc', 'pydantic', 'google.protobuf'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )

    subprocess.run([sys.executable, "-c", program], check=True)
