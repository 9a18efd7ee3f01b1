"""Leases and an operator's commands at a real coordinator, over a loopback network."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import sqlite3
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from diloco.config.classes import policy_json
from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.durable import DiskFull
from diloco.errors import ConfigError, Fenced, RunHalted
from diloco.protocol.run.alarms import AlarmKind
from diloco.protocol.run.operations import LIVE_KEYS
from diloco.protos import control_pb2 as control
from diloco.transport.errors import FrameError, TransportError
from tests.coordinator_in_memory import TERMS, CoordinatorInMemory, joined, tell
from tests.run_files import write_run

ELASTIC = ("outer.preset=decoupled",)
TERM_S = 10.0


@pytest.fixture
def config_of(tmp_path: Path):
    def load(*overrides: str) -> Config:
        return load_config(write_run(tmp_path / "run", {"east": "", "west": ""}), overrides)

    return load


@contextlib.asynccontextmanager
async def watched(coord: CoordinatorInMemory) -> AsyncIterator[None]:
    watching = asyncio.create_task(coord.coordinator.watch())
    yield
    watching.cancel()


async def report_for(coord: CoordinatorInMemory, seconds: int, *grants: control.Grant) -> None:
    for _ in range(seconds):
        await asyncio.sleep(1.0)
        for grant in grants:
            await coord.report(grant)


def leases(coord: CoordinatorInMemory) -> dict[str, str]:
    return {island.island: island.lease for island in coord.coordinator.status().islands}


# -- leases ----------------------------------------------------------------------------------------


def test_a_frozen_island_is_out_within_its_lease_and_back_at_its_next_report(
    tmp_path: Path, config_of
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        assert list((await coord.roster()).live) == []
        east, west = await joined(coord)
        async with watched(coord):
            await report_for(coord, 5, east, west)
            assert list((await coord.roster()).live) == ["east", "west"]
            before = coord.coordinator.status().generation

            await report_for(coord, 11, east)

            assert list((await coord.roster()).live) == ["east"]
            assert leases(coord) == {"east": "active", "west": "lapsed"}
            assert coord.coordinator.status().generation == before + 1
            reply = await coord.report(west)
            assert not reply.stop, "it is not fenced"
            assert list((await coord.roster()).live) == ["east", "west"]
            await report_for(coord, 3, east, west)
            assert leases(coord) == {"east": "active", "west": "active"}

    tell(tmp_path, story, config=config_of(*ELASTIC))


def test_a_restarted_coordinator_gives_everybody_a_full_term(tmp_path: Path, config_of) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, _ = await joined(coord)
        async with watched(coord):
            await report_for(coord, 9, east)
        await coord.restart()
        async with watched(coord):
            await report_for(coord, 8, east)
            assert list((await coord.roster()).live) == ["east", "west"]
            await report_for(coord, 3, east)
            assert list((await coord.roster()).live) == ["east"]
        await coord.restart()
        assert list((await coord.roster()).live) == ["east"], "who holds a lease is remembered"

    tell(tmp_path, story, config=config_of(*ELASTIC))


def test_a_jump_of_the_wall_clock_changes_nothing(tmp_path: Path, config_of) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await joined(coord)
        async with watched(coord):
            for jump in (1e9, -1e9):
                coord.coordinator._unix_clock = lambda jump=jump: jump
                await report_for(coord, 5, east, west)
                assert list((await coord.roster()).live) == ["east", "west"]

    tell(tmp_path, story, config=config_of(*ELASTIC))


def test_a_join_says_the_term_and_what_ends_the_run(tmp_path: Path, config_of) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        reply = await coord.join("east")
        assert (reply.lease_s, reply.total_tokens) == (TERM_S, 2 * 8 * 128)
        assert coord.coordinator.status().total_tokens == 2 * 8 * 128

    tell(tmp_path, story, config=config_of(*ELASTIC))


def test_how_far_an_island_came_survives_a_coordinator_killed_with_it(
    tmp_path: Path, config_of
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await joined(coord)
        await coord.report(east, inner_step=41)
        await coord.report(west, inner_step=40)
        await coord.round_report(record={"timeline": 0, "fragment_id": 0, "version": 1})
        await coord.report(east, inner_step=43)
        await coord.restart()
        assert (await coord.join("east", "b")).last_inner_step == 41, "of the last record"

        await coord.report(west, inner_step=50)
        await coord.leave(west)
        await coord.restart()
        assert (await coord.join("west", "b")).last_inner_step == 50
        await coord.restart(resume_step=0)
        assert (await coord.join("west", "c")).last_inner_step == 0

    tell(tmp_path, story)


# -- scheduled runs that lose an island ------------------------------------------------------------


def test_a_scheduled_run_stops_with_the_command_to_type(tmp_path: Path, config_of) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, _ = await joined(coord)
        async with watched(coord):
            await report_for(coord, 8, east)
            assert not coord.coordinator.ended.is_set()
            await report_for(coord, 4, east)
            told = await coord.report(east)
        assert coord.coordinator.ended.is_set()
        assert (told.stop, told.exit_code) == (True, 50)
        assert "west was not heard of for 10 s (coordinator.lease)" in told.reason
        assert "outer.on_member_lost = stop" in told.reason
        assert "diloco coordinator RUN.toml; then every island that has ended" in told.reason
        await coord.restart()
        assert coord.state() == "running", "nothing is lost"

    tell(tmp_path, story, config=config_of("coordinator.lease=10s"))


def test_nobody_is_lost_where_nobody_waits(tmp_path: Path, config_of) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await joined(coord)
        await coord.restart()
        async with watched(coord):
            await asyncio.sleep(300)  # people come back from lunch
            await coord.report(east)
            await report_for(coord, 8, east)
            await report_for(coord, 20, east, west)
        assert not coord.coordinator.ended.is_set()

    tell(tmp_path, story, config=config_of("coordinator.lease=10s"))


def test_a_scheduled_run_may_wait(tmp_path: Path, config_of) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await joined(coord)
        async with watched(coord):
            await report_for(coord, 60, east)
            assert leases(coord) == {"east": "active", "west": "lapsed"}
            assert await coord.roster() is None, "every round waits for it"
            await coord.report(west)
            assert leases(coord) == {"east": "active", "west": "active"}
        assert not coord.coordinator.ended.is_set()

    tell(tmp_path, story, config=config_of("coordinator.lease=10s", "outer.on_member_lost=wait"))


def test_a_scheduled_run_may_shrink(tmp_path: Path, config_of) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await joined(coord)
        async with watched(coord):
            await report_for(coord, 12, east)
        await coord.restart()
        roster = await coord.roster()
        assert (list(roster.live), dict(roster.fenced)) == (["east"], {"west": 2})
        told = await coord.report(west)
        assert (told.stop, told.exit_code) == (True, 41)
        assert "not heard of for 10 s" in told.reason and "shrink" in told.reason
        refused = await coord.join("west", "b")
        assert refused.status == control.JOIN_STATUS_KICKED
        assert "diloco kick HOST:PORT west --undo" in refused.message
        await coord.leave(east)
        assert coord.state() == "finished"

    tell(tmp_path, story, config=config_of("coordinator.lease=10s", "outer.on_member_lost=shrink"))


# -- commands --------------------------------------------------------------------------------------


def test_pause_and_unpause_reach_the_syncer_and_are_written_down(tmp_path: Path, config_of) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        await joined(coord)
        for _ in range(2):
            done = await coord.operate("pause")
            assert done.is_done and "diloco unpause HOST:PORT" in done.message
        await coord.restart()
        assert (await coord.roster()).is_paused
        assert (coord.state(), coord.coordinator.status().is_paused) == ("paused", True)
        assert (await coord.operate("unpause")).is_done
        assert not (await coord.roster()).is_paused
        assert (await coord.operate("unpause")).message == "the run is not paused"
        operations = [
            json.loads(v) for k, v in coord.journal.entries().items() if "operation/" in k
        ]
        assert [each["command"] for each in sorted(operations, key=lambda o: o["number"])] == [
            "pause", "unpause",
        ]  # fmt: skip

    tell(tmp_path, story, config=config_of(*ELASTIC))


@pytest.mark.parametrize("with_secret", ["", "true"])
def test_a_backup_is_written_down_before_and_after(
    with_secret: str, tmp_path: Path, config_of
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        before = []

        async def back_up(arguments: Mapping[str, str]) -> str:
            before.extend(entry.content for entry in coord.journal.audit_rows())
            if arguments["directory"] == "/full":
                raise ConfigError("no room")
            return "copied"

        assert coord.operations is not None
        coord.operations.backup = back_up
        extra = {"with_secret": with_secret} if with_secret else {}
        assert (await coord.operate("backup", directory="/there", **extra)).is_done
        assert not (await coord.operate("backup", directory="/full")).is_done

        word = "with" if with_secret else "without"
        (begun,) = [each for each in before if each["arguments"]["directory"] == "/there"][:1]
        assert begun["message"] == f"copying to '/there', {word} the run secret"
        told = [e.content for e in coord.journal.audit_rows() if e.kind == "operation"]
        assert [each["message"] for each in told if "copying" not in each["message"]] == [
            "copied", "no room",
        ]  # fmt: skip
        assert len(told) == 4 and all(each["by"] for each in told)

    tell(tmp_path, story, config=config_of(*ELASTIC))


def test_a_backup_that_has_taken_the_last_room_is_answered(
    tmp_path: Path, config_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller would ask again, and hear that the directory is there already."""

    async def full(*_: object, **__: object) -> int:
        raise DiskFull(errno.ENOSPC, "No space left on device")

    async def story(coord: CoordinatorInMemory) -> None:
        async def back_up(arguments: Mapping[str, str]) -> str:
            monkeypatch.setattr(coord.journal, "commit", full)
            return "copied"

        assert coord.operations is not None
        coord.operations.backup = back_up

        reply = await coord.operate("backup", directory="/there")

        assert (reply.is_done, reply.message) == (True, "copied")

    tell(tmp_path, story, config=config_of(*ELASTIC))


def test_a_drained_island_is_told_and_leaves_for_good(tmp_path: Path, config_of) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await joined(coord)
        done = await coord.operate("drain", island="west")
        assert done.is_done and "leaves with exit code 0" in done.message
        assert (await coord.report(west)).drain and not (await coord.report(east)).drain
        assert list((await coord.roster()).live) == ["east"]
        await coord.leave(west)
        assert leases(coord) == {"east": "active", "west": "left"}
        assert (await coord.operate("drain", island="west")).message == "west has left already"
        assert not coord.coordinator.ended.is_set()
        coord.merge_all()
        await coord.leave(east)
        assert coord.state() == "finished"

    tell(tmp_path, story, config=config_of(*ELASTIC))


def test_a_kick_counts_at_once(tmp_path: Path, config_of) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await joined(coord)
        done = await coord.operate("kick", island="west", reason="sends nonsense")
        assert done.is_done and "incarnation 1" in done.message
        assert dict((await coord.roster()).fenced) == {"west": 2}
        told = await coord.report(west)
        assert (told.stop, told.exit_code) == (True, 41)
        assert "kicked by an operator: sends nonsense" in told.reason
        await coord.leave(west)
        assert leases(coord)["west"] == "kicked"
        assert (await coord.join("west", "b")).status == control.JOIN_STATUS_KICKED
        assert (await coord.operate("kick", island="west", undo="true")).is_done
        assert (await coord.join("west", "b")).grant.incarnation == 2
        assert not (await coord.report(east)).stop

    tell(tmp_path, story, config=config_of(*ELASTIC))


def test_a_setting_counts_is_told_and_outlives_the_coordinator(tmp_path: Path, config_of) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, _ = await joined(coord)
        done = await coord.operate("set", key="outer.optimizer.lr", value="0.25")
        assert done.is_done
        assert "outer.optimizer.lr = 0.25 (before: 0.9), revision 1" in done.message
        told = await coord.told_to_syncer()
        assert (told.policy_revision, json.loads(told.policy_json)) == (
            1, {"outer.optimizer.lr": 0.25},
        )  # fmt: skip
        report = await coord.report(east)
        assert (report.policy_revision, report.policy_json) == (1, told.policy_json)
        again = await coord.operate("set", key="outer.optimizer.lr", value="0.25")
        assert again.message == "outer.optimizer.lr = 0.25 already"
        await coord.restart()
        assert coord.in_force.outer.optimizer.lr == 0.25
        policy = json.loads((await coord.join("west", "b")).policy_json)
        assert policy["outer.optimizer.lr"] == 0.25
        assert (await coord.operate("set", key="outer.grace", value="100ms")).is_done
        assert (await coord.told_to_syncer()).policy_revision == 2

    tell(tmp_path, story, config=config_of(*ELASTIC))


def test_what_the_coordinator_applies_itself_counts_at_once(tmp_path: Path, config_of) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, _ = await joined(coord)
        assert (await coord.operate("set", key="coordinator.lease", value="3s")).is_done
        assert (await coord.operate("set", key="run.min_islands", value="2")).is_done
        assert (await coord.roster()).min_islands == 2
        async with watched(coord):
            await report_for(coord, 5, east)
        assert leases(coord)["west"] == "lapsed"
        assert coord.state() == "waiting for islands"

    tell(tmp_path, story, config=config_of(*ELASTIC))


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("dance", {}, ["no command 'dance'", "pause, unpause"]),
        ("pause", {"island": "east"}, ["pause takes no 'island'"]),
        ("drain", {"island": "south"}, ["no island 'south'", "east, west"]),
        ("drain", {"island": "west"}, ["west has not joined"]),
        ("kick", {}, ["no island ''"]),
        ("set", {"key": "outer.optimiser.lr", "value": "1"}, ['did you mean "optimizer"']),
        ("set", {"key": "outer.optimizer.lr", "value": "-1"}, ["-1", ">"]),
        ("set", {"key": "outer.grace", "value": "soon"}, ["outer.grace", '"auto" or 0s to 1h']),
        ("set", {"key": "run.seed", "value": "8"}, ["the same for the whole run", "outer.grace"]),
        (
            "set",
            {"key": "model.preset", "value": "tiny"},
            ["cannot be set", "coordinator.state_dir", "diloco coordinator RUN.toml"],
        ),
        ("set", {"key": "model.dim", "value": "no number"}, ["cannot be set"]),
        ("set", {"key": "outer.uplink_codec", "value": "float32"}, ["--resume"]),
        ("set", {"key": "run.max_islands", "value": "9"}, ["--resume"]),
        ("set", {"key": "inner.threads", "value": "2"}, ["unknown key"]),
        ("set", {"key": "transport.rpc_timeout", "value": "3s"}, ["a site's own"]),
        ("set", {"key": "outer.min_contributions", "value": "3"}, ["min_contributions", "3"]),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_way_and_changes_nothing(
    command: str, arguments: dict[str, str], words: list[str], tmp_path: Path, config_of
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        await coord.join("east")
        before = coord.journal.entries()

        refused = await coord.operate(command, **arguments)

        assert not refused.is_done
        assert all(word in refused.message for word in words), refused.message
        assert coord.journal.entries() == before
        assert not coord.coordinator.ended.is_set()

    tell(tmp_path, story, config=config_of(*ELASTIC))


def test_scheduled_runs_drain_nobody_and_stop_with_a_checkpoint(tmp_path: Path, config_of) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, _ = await joined(coord)
        refused = await coord.operate("drain", island="west")
        assert not refused.is_done and "diloco kick HOST:PORT west" in refused.message
        assert (await coord.operate("kick", island="west")).is_done
        refused = await coord.operate("kick", island="east")
        assert not refused.is_done and "the last island" in refused.message
        assert (await coord.operate("kick", island="west", undo="true")).is_done
        west = (await coord.join("west", "b")).grant
        await coord.operate("pause")
        done = await coord.operate("stop")
        assert done.is_done and "the pause is over" in done.message
        assert (await coord.report(east)).hold and (await coord.report(west)).hold
        assert not (await coord.roster()).is_paused
        assert not (await coord.operate("pause")).is_done
        assert "already" in (await coord.operate("stop")).message

    tell(tmp_path, story, config=config_of())


@pytest.mark.parametrize("overrides", [ELASTIC, ()], ids=["elastic", "scheduled"])
def test_a_stop_at_once_ends_everybody_and_nothing_is_over(
    overrides: tuple[str, ...], tmp_path: Path, config_of
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await joined(coord)
        done = await coord.operate("stop", now="true")
        assert done.is_done and "goes on where it was: diloco coordinator RUN.toml" in done.message
        assert (coord.coordinator.ended.is_set(), coord.state()) == (True, "stopping")
        for grant in (east, west):
            told = await coord.report(grant)
            assert (told.stop, told.exit_code) == (True, RunHalted.exit_code)
            assert "the operator has stopped the run" in told.reason
            await coord.leave(grant, exit_code=told.exit_code)
        assert not coord.membership.is_finished and not coord.membership.is_stopped
        assert coord.membership.is_deserted
        await coord.restart()
        for island in ("east", "west"):
            reply = await coord.join(island, "b")
            assert (reply.status, reply.grant.incarnation) == (control.JOIN_STATUS_ACCEPTED, 2)
        assert coord.state() == "running"

    tell(tmp_path, story, config=config_of(*overrides))


def test_a_stop_before_all_have_joined_has_no_checkpoint_and_is_made_at_once(
    tmp_path: Path, config_of
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east = (await coord.join("east")).grant
        done = await coord.operate("stop")
        assert done.is_done and "no island could write a checkpoint" in done.message
        assert (await coord.report(east)).exit_code == RunHalted.exit_code
        assert coord.coordinator.ended.is_set()

    tell(tmp_path, story, config=config_of())


def test_a_command_that_cannot_be_written_down_changes_nothing(tmp_path: Path, config_of) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        await joined(coord)
        before, roster = dict(coord.membership.members), await coord.roster()
        coord.journal._require().writer.execute("PRAGMA query_only=ON")

        commands = [
            ("pause", {}),
            ("kick", {"island": "west"}),
            ("drain", {"island": "west"}),
            ("set", {"key": "outer.optimizer.lr", "value": "0.25"}),
            ("stop", {}),
        ]
        for command, arguments in commands:
            with pytest.raises((TransportError, sqlite3.Error)):
                await coord.operate(command, **arguments)

        assert (coord.membership.members, await coord.roster()) == (before, roster)
        assert coord.in_force.outer.optimizer.lr == 0.9
        assert not coord.coordinator.ended.is_set()

    tell(tmp_path, story, config=config_of(*ELASTIC))


def test_a_stop_at_once_needs_no_room(
    tmp_path: Path, config_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object, **__: object) -> int:
        raise DiskFull(errno.ENOSPC, "No space left on device")

    async def story(coord: CoordinatorInMemory) -> None:
        east, _ = await joined(coord)
        monkeypatch.setattr(coord.journal, "commit", full)
        with pytest.raises(TransportError, match="No space left"):
            await coord.operate("pause")

        assert (await coord.operate("stop", now="true")).is_done

        assert coord.coordinator.ended.is_set()
        assert (await coord.report(east)).stop

    tell(tmp_path, story, config=config_of(*ELASTIC))


def test_commands_are_bounded_and_need_a_run_that_takes_them(tmp_path: Path, config_of) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        with pytest.raises(FrameError, match="4096 are allowed"):
            await coord.operate("kick", island="x" * 5000)

    async def bare(coord: CoordinatorInMemory) -> None:
        assert not (await coord.operate("pause")).is_done

    tell(tmp_path, story, config=config_of(*ELASTIC))
    tell(tmp_path, bare, terms=TERMS)


def test_every_live_key_is_a_policy_of_the_schema(config_of) -> None:
    assert json.loads(policy_json(config_of(*ELASTIC))).keys() >= LIVE_KEYS.keys()


def test_a_promise_to_stop_far_beyond_the_others_is_not_taken(tmp_path: Path, config_of) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await joined(coord)
        for grant in (east, west):
            await coord.report(grant, inner_step=10)
        assert (await coord.operate("stop")).is_done
        await coord.report(east, inner_step=11, has_hold=True, hold_step=12)
        most = 11 + coord.membership.members.rules.most_lead_steps

        told = await coord.report(west, inner_step=most, has_hold=True, hold_step=most + 1)
        assert told.hold and not told.has_stop_step
        assert (await coord.operate("kick", island="west")).is_done
        told = await coord.report(east, inner_step=12)
        assert (told.has_stop_step, told.stop_step) == (True, 12)

    async def honest(coord: CoordinatorInMemory) -> None:
        east, west = await joined(coord)
        assert (await coord.operate("stop")).is_done
        await coord.report(west, inner_step=100, has_hold=True, hold_step=101)
        await coord.report(east, inner_step=99, has_hold=True, hold_step=101)
        told = await coord.report(west, inner_step=101, has_hold=True, hold_step=101)
        assert (told.has_stop_step, told.stop_step) == (True, 101), "its own word came first"

    config = config_of("run.inner_steps=100000")
    for name, each in (("lie", story), ("honest", honest)):
        (tmp_path / name).mkdir()
        tell(tmp_path / name, each, config=config)


# -- certificates ----------------------------------------------------------------------------------


def test_who_is_revoked_is_out_at_once_and_stays_refused_after_a_restart(
    tmp_path: Path, config_of
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        _, west = await joined(coord)
        is_revoked = coord.coordinator._membership.settings.is_revoked
        for identity, serials, problem in [
            ("island/../x", "7", "write coordinator, syncer, operator or island/NAME"),
            ("island/west", "x", "invalid literal"),
            ("island/west", "", "invalid literal"),
        ]:
            reply = await coord.operate("revoke", identity=identity, serials=serials)
            assert not reply.is_done
            assert problem in reply.message

        earlier = {"identity": "island/west", "serials": "a", "earlier": "true"}
        assert "its newest one is not" in (await coord.operate("revoke", **earlier)).message
        assert not (await coord.report(west)).stop
        assert (is_revoked(10), is_revoked(255)) == (True, False)

        reply = await coord.operate("revoke", identity="island/west", serials="a,ff")
        assert reply.is_done
        assert "2 certificates of island/west are refused" in reply.message
        assert "west is out" in reply.message
        assert (await coord.report(west)).stop
        assert (await coord.operate("revoke", identity="operator", serials="c")).is_done
        await coord.restart()
        is_revoked = coord.coordinator._membership.settings.is_revoked
        assert all(map(is_revoked, (10, 255, 12)))
        assert leases(coord)["west"] == "kicked"

    tell(tmp_path, story, config=config_of(*ELASTIC))


def test_a_start_that_was_kicked_and_readmitted_hears_that_it_is_to_be_made_again(
    tmp_path: Path, config_of
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        _, west = await joined(coord)
        await coord.operate("kick", island="west")
        await coord.operate("kick", island="west", undo="true")
        told = await coord.report(west)
        assert told.stop and told.exit_code == Fenced.exit_code
        assert "'west' was taken out of the run while it was at work" in told.reason
        again = (await coord.join("west", start_id="another")).grant
        assert again.incarnation == 2
        assert not (await coord.report(again)).stop

    tell(tmp_path, story, config=config_of(*ELASTIC))


def test_certificates_that_end_soon_are_an_alarm(tmp_path: Path, config_of) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        coord.coordinator._problems = lambda: {
            AlarmKind.CERTIFICATE: "the CA of this run expires in 3.0 days"
        }
        async with watched(coord):
            await asyncio.sleep(2.0)
        alarms = coord.coordinator.status().alarms
        assert [each.alarm.kind for each in alarms] == ["certificate"]

    tell(tmp_path, story, config=config_of(*ELASTIC))
