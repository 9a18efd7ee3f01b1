"""The coordinator's handlers over a loopback network: stops, checkpoints, timelines, restarts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.coordinator.grants import sign
from diloco.coordinator.island_service import ISLAND_STATES
from diloco.island.registration import IslandState
from diloco.protos import control_pb2 as control
from diloco.transport.errors import FrameError, Unauthorised
from diloco.transport.framing import MAX_HEADER_BYTES
from diloco.transport.identity import Identity
from tests.coordinator_in_memory import (
    SECRET,
    UNREACHABLE_S,
    CoordinatorInMemory,
    Story,
    joined,
    tell,
)
from tests.transport.pki import EAST

Play = Callable[[Story], None]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Run a story with a coordinator of two islands."""
    return lambda story: tell(tmp_path, story)


# -- stop ----------------------------------------------------------------------------------------


def test_islands_are_held_then_told_where_to_stop_and_the_run_ends_as_stopped(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await joined(coord)
        assert not (await coord.report(east, inner_step=3)).hold
        assert coord.state() == "running"

        assert await coord.coordinator.request_stop()
        assert coord.state() == "stopping"
        reply = await coord.report(east, inner_step=4)
        assert (reply.hold, reply.has_stop_step, reply.stop) == (True, False, False)
        assert not (await coord.report(east, has_hold=True, hold_step=12)).has_stop_step
        await coord.restart()  # anyone who holds must not be forgotten
        assert coord.state() == "stopping"
        assert (await coord.report(west, has_hold=True, hold_step=6)).stop_step == 12
        reply = await coord.report(east, inner_step=12)
        assert (reply.hold, reply.has_stop_step, reply.stop_step) == (True, True, 12)
        await coord.report(east, inner_step=12, checkpoint_steps=[12])
        reply = await coord.report(west, inner_step=12, checkpoint_steps=[12])
        assert list(reply.checkpoint_steps) == [12], "all may leave"

        await coord.leave(east, is_stopped=True)
        assert not coord.coordinator.ended.is_set()
        await coord.leave(west, is_stopped=True)

        assert coord.coordinator.ended.is_set()
        assert coord.state() == "stopped"
        assert list(coord.coordinator.status().checkpoint_steps) == [12]

    play(story)


def test_there_is_nobody_to_ask_before_every_island_has_joined(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        await coord.join("east")

        assert not await coord.coordinator.request_stop()
        assert coord.state() == "waiting for islands"

    play(story)


def test_a_stop_may_be_asked_for_again_while_it_goes_on(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        (east, _) = await joined(coord)
        await coord.coordinator.request_stop()
        await coord.report(east, has_hold=True, hold_step=12)

        assert await coord.coordinator.request_stop()
        assert coord.membership.promises == {"east": 12}

    play(story)


async def stopping_at_12(coord: CoordinatorInMemory) -> list[control.Grant]:
    grants = await joined(coord)
    await coord.coordinator.request_stop()
    for grant in grants:
        await coord.report(grant, has_hold=True, hold_step=12)
    return grants


def test_the_stop_moves_for_an_island_that_returns_beyond_it(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, _ = await stopping_at_12(coord)
        await coord.report(east, inner_step=12, checkpoint_steps=[12])
        west = (await coord.join("west", "b")).grant
        await coord.restart()

        asked = await coord.report(east, inner_step=12, checkpoint_steps=[12])
        assert (asked.hold, asked.has_stop_step) == (True, False)
        assert (await coord.report(west, has_hold=True, hold_step=18)).stop_step == 18
        assert (await coord.report(east, inner_step=12)).stop_step == 18

    play(story)


def test_an_island_that_starts_after_the_stop_is_told_that_it_has_left(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grants = await stopping_at_12(coord)
        for grant in grants:
            await coord.report(grant, inner_step=12, checkpoint_steps=[12])
        await coord.leave(grants[0], is_stopped=True)

        refused = await coord.join("west", "b")

        assert refused.status == control.JOIN_STATUS_RUN_STOPPED
        assert coord.coordinator.ended.is_set()
        assert coord.state() == "stopped"

    play(story)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_stop_that_an_island_stays_away_from_fails_and_is_taken_back(
    play: Play, is_restarted: bool
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, _ = await stopping_at_12(coord)
        if is_restarted:
            await coord.restart()
        watching = asyncio.create_task(coord.coordinator.watch())
        while not coord.coordinator.ended.is_set():
            await asyncio.sleep(1.0)
            told = await coord.report(east, inner_step=12, checkpoint_steps=[12])
        watching.cancel()

        assert UNREACHABLE_S <= asyncio.get_running_loop().time() <= UNREACHABLE_S + 3.0
        assert (told.stop, told.exit_code) == (True, 50)
        assert "island 'west' owes the checkpoint of inner step 12" in told.reason
        assert "has not reported for 60 s" in told.reason
        assert "The stop is taken back; nothing published is lost, the run goes on" in told.reason
        assert "diloco coordinator RUN.toml; then every island that has ended" in told.reason
        await coord.restart()
        assert coord.state() == "running"
        told = await coord.report(east, inner_step=12)
        assert not (told.stop or told.hold)

    play(story)


def test_a_complete_stop_does_not_wait_for_a_last_word_for_ever(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grants = await stopping_at_12(coord)
        for grant in grants:
            await coord.report(grant, inner_step=12, checkpoint_steps=[12])
        await coord.leave(grants[0], is_stopped=True)
        watching = asyncio.create_task(coord.coordinator.watch())
        await coord.coordinator.ended.wait()
        watching.cancel()

        assert coord.state() == "stopped"
        await coord.restart()
        assert coord.state() == "stopped"

    play(story)


def test_islands_that_report_are_waited_for(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grants = await stopping_at_12(coord)
        watching = asyncio.create_task(coord.coordinator.watch())
        for _ in range(20):
            await asyncio.sleep(UNREACHABLE_S / 2)
            for grant in grants:
                await coord.report(grant, inner_step=6)
        watching.cancel()

        assert coord.state() == "stopping"

    play(story)


# -- checkpoints ---------------------------------------------------------------------------------


def test_a_checkpoint_that_all_keep_is_told_to_syncer_islands_and_operator_also_after_a_restart(
    play: Play,
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await joined(coord)
        await coord.report(east, inner_step=25, checkpoint_steps=[10, 20])
        assert await coord.round_report() == []

        reply = await coord.report(west, inner_step=21, checkpoint_steps=[20])
        assert list(reply.checkpoint_steps) == [20]
        assert await coord.round_report() == [20]
        await coord.restart()

        assert await coord.round_report() == [20]
        assert list((await coord.report(east)).checkpoint_steps) == [20]
        assert list(coord.coordinator.status().checkpoint_steps) == [20]

    play(story)


# -- starts ----------------------------------------------------------------------------------------


def test_a_new_start_is_welcome_and_hears_how_far_the_one_before_had_come(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        (east, _) = await joined(coord)
        assert (await coord.join("east")).last_inner_step == 0
        await coord.report(east, inner_step=41)

        again = await coord.join("east", "b")
        waiting = await coord.report(again.grant)
        third = await coord.join("east", "c")

        assert (again.status, again.grant.incarnation) == (control.JOIN_STATUS_ACCEPTED, 2)
        assert (again.is_resumed, again.last_inner_step) == (False, 41)
        assert not waiting.stop
        assert third.last_inner_step == 41, "the second start had not begun to train"
        fenced = await coord.report(east, inner_step=42)
        assert (fenced.stop, fenced.exit_code) == (True, 41)
        assert "newer start of island 'east' has joined" in fenced.reason
        assert "see whether two were started" in fenced.reason

    play(story)


def test_a_start_at_another_step_is_refused_with_both(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        await coord.join("east", start_step=300)

        refused = await coord.join("west")

        assert refused.status == control.JOIN_STATUS_FINGERPRINT_MISMATCH
        assert "inner step 0 (there), the run started at 300 (here)" in refused.message

    play(story)


def test_what_is_published_is_known_though_the_syncer_has_not_yet_reported(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        await joined(coord)
        await coord.round_report(record={"timeline": 0, "fragment_id": 0, "version": 0})
        assert not coord.coordinator.status().has_published, "initial parameters are no round's"
        await coord.round_report(record={"timeline": 0, "fragment_id": 0, "version": 1})

        await coord.restart()

        status = coord.coordinator.status()
        assert (status.has_published, list(status.fragments)) == (True, [])

    play(story)


def test_an_island_is_told_of_the_run_and_of_itself_alone(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        before = await coord.run_state("east")
        assert (before.run, before.state, before.island.incarnation) == (
            "demo", "waiting for islands", 0,
        )  # fmt: skip
        east = (await coord.join("east", start_step=7)).grant
        west = (await coord.join("west", start_step=7)).grant
        await coord.report(east, inner_step=9, state="training")
        await coord.report(west, inner_step=8, state="waiting")
        await coord.round_report(record={"timeline": 0, "fragment_id": 0, "version": 1})

        told = await coord.run_state("east")

        whole = coord.coordinator.status()
        (own,) = [island for island in whole.islands if island.island == "east"]
        assert own.last_report.inner_step == 9
        assert told == control.RunStateReply(
            run="demo",
            state="running",
            start_step=7,
            has_published=True,
            inner_steps=100,
            island=own,
            syncer_addresses=[""],  # it has told none
        )
        assert not (await coord.run_state("south")).HasField("island")

    play(story)


@pytest.mark.parametrize("caller", [None, EAST], ids=["stranger", "known"])
def test_how_an_island_stands_is_told_to_known_callers_and_on_this_machine(
    caller: Identity | None, play: Play
) -> None:
    class Call:
        method, peer, payload_bytes, is_local = "control.standing", "test", 0, False
        header = control.RunStateRequest(island="east").SerializeToString()

        def __init__(self) -> None:
            self.caller = caller

        async def read_payload(self) -> bytes:
            return b""

    async def story(coord: CoordinatorInMemory) -> None:
        east, _ = await joined(coord)
        await coord.report(east, inner_step=9, state="training")

        answer = await coord.coordinator.handlers["control.standing"](Call())

        told = control.RunStateReply.FromString(answer.header)
        assert (told.run, told.state, told.inner_steps) == ("demo", "running", 100)
        assert told.HasField("island") == (caller is not None)
        assert (await coord.run_state("east")).HasField("island")  # a call on its own machine

    play(story)


# -- timelines -----------------------------------------------------------------------------------


def test_starts_restore_the_checkpoint_until_the_new_timeline_has_published(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        await joined(coord)
        await coord.round_report(record={"timeline": 0, "fragment_id": 0, "version": 5})
        await coord.restart(resume_step=20)
        assert coord.state() == "waiting for islands"

        east, west = [await coord.join(island, "b") for island in ("east", "west")]
        for reply in (east, west):
            assert (reply.is_resumed, reply.resume_step, reply.grant.timeline) == (True, 20, 1)
        again = await coord.join("east", "c")
        assert (again.is_resumed, again.grant.incarnation) == (True, 3)

        await coord.round_report(1, {"timeline": 0, "fragment_id": 0, "version": 4})
        assert (await coord.join("east", "d")).is_resumed, "that is the pinned version"
        await coord.round_report(1, {"timeline": 1, "fragment_id": 0, "version": 5})
        returned = await coord.join("east", "e")
        assert (returned.is_resumed, returned.resume_step) == (False, 0)
        await coord.restart()
        assert not (await coord.join("east", "f")).is_resumed

    play(story)


def test_who_belongs_to_an_earlier_timeline_is_told_so_and_changes_nothing(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, _ = await joined(coord)
        await coord.restart(resume_step=20)

        reply = await coord.report(east, inner_step=50, checkpoint_steps=[50])
        await coord.leave(east)

        assert (reply.stop, reply.exit_code) == (True, 41)
        assert "resumed from inner step 20 (timeline 1)" in reply.reason
        assert "start island 'east' again" in reply.reason
        assert coord.membership.members["east"].exit_code is None
        with pytest.raises(Unauthorised, match="timeline"):
            await coord.round_report(0)

    play(story)


# -- failures --------------------------------------------------------------------------------------


def test_what_ended_the_run_is_remembered_by_the_next_coordinator(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, _ = await joined(coord)
        await coord.round_report(fatal_reason="quorum lost", fatal_exit_code=50)
        assert coord.coordinator.ended.is_set()
        await coord.restart()

        reply = await coord.report(east)

        assert (reply.stop, reply.exit_code, reply.reason) == (True, 50, "quorum lost")
        assert coord.state() == "failed"

    play(story)


def test_why_islands_failed_is_in_the_reason_for_which_the_run_ends(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await joined(coord)
        await coord.leave(west, exit_code=20, reason="the loss is not finite")
        await coord.leave(east, exit_code=50, reason="told to end")
        await coord.round_report(fatal_reason="quorum lost", fatal_exit_code=50)

        assert (await coord.report(east)).reason == (
            "quorum lost. Island west had failed with exit code 20: the loss is not finite"
        )

    play(story)


def test_a_syncer_that_cannot_start_ends_this_coordinator_only(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, _ = await joined(coord)
        coord.coordinator.fail("the port is taken", 2)
        assert (await coord.report(east)).stop
        await coord.restart()

        assert not (await coord.report(east)).stop

    play(story)


# -- broken and hostile callers ------------------------------------------------------------------


def test_an_island_that_joins_again_and_again_does_not_fill_the_journal(
    play: Play, tmp_path: Path
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        sizes = []
        for n in range(600):
            await coord.join("east", f"{n:064x}")
            sizes.append(sum(f.stat().st_size for f in tmp_path.glob("journal.sqlite*")))
        # The write-ahead log is folded back at 1000 pages; what a thousand starts cost is that.
        assert max(sizes) < 8 << 20
        connection = coord.journal._require().writer
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert (tmp_path / "journal.sqlite").stat().st_size < 200_000
        with pytest.raises(FrameError, match="start id of 65 characters"):
            await coord.join("east", "x" * 65)

    play(story)


@pytest.mark.parametrize("state", ["\x1b[2J", "training\n", "x" * 5000])
def test_an_operators_terminal_is_shown_no_state_but_ours(state: str, play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, _ = await joined(coord)
        with pytest.raises(FrameError, match="a report's state is"):
            await coord.report(east, state=state)
        assert (await coord.report(east, state="training")).stop is False

    play(story)


def test_the_status_of_a_thousand_islands_and_16_syncers_fits_into_a_header(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, _ = await joined(coord)
        use = control.SyncerLinkUse(
            up_bps=1.5e9, down_bps=1.5e9, round_trip_s=0.08, failed_calls=300, recent_failed_calls=3
        )
        link = control.LinkUse(
            interval_s=10.1, syncers=[use] * 16, up_capacity_bps=1e10, down_capacity_bps=1e10
        )
        versions, drawn = range(1000, 1200), json.dumps({"east": {"drawn": {"web": 1 << 40}}})
        cut = control.CutPart(number=3, inner_step=120_000, versions=versions, text_json=drawn)
        losses = [control.HeldOut(checkpoint=n << 17, nats_per_byte=0.8) for n in range(1, 5)]
        figures: dict[str, Any] = {"loss_nats": 2.3, "tokens_per_s": 1e5, "utilisation": 0.95}
        figures |= {"step_s": 9.8, "left_s": 1e6, "mfu": 0.4, "inner_step": 1 << 20}
        figures |= dict.fromkeys(("tokens", "bytes_up", "bytes_down"), 10**14)
        figures |= dict.fromkeys(("resident_bytes", "device_bytes"), 10**11)
        await coord.report(east, state="training", link=link, cut=cut, held_out=losses, **figures)

        (told,) = [i for i in coord.coordinator.status().islands if i.island == "east"]

        assert told.last_report.link == link
        of_fragments = 200 * 600  # with 16 names of contributors, and 16 that are waited for
        assert 1000 * (told.ByteSize() + 16) + of_fragments < 0.8 * MAX_HEADER_BYTES

    play(story)


def test_the_states_of_islands_are_those_that_a_coordinator_knows() -> None:
    assert {"", *IslandState} == ISLAND_STATES


def test_a_version_that_is_reported_as_two_things_is_counted(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        await coord.join("east")
        grant = control.Grant(run="demo", roles=[control.ROLE_SYNCER])
        for digest in ("one", "one", "other"):
            header = {"timeline": 0, "fragment_id": 0, "version": 3, "digest": digest}
            request = control.RoundReport(grant=sign(grant, SECRET), record_json=json.dumps(header))
            await coord.call("round_report", request)

        (counted,) = coord.coordinator.status().refusals
        assert (counted.service, counted.cause, counted.count) == ("coordinator", "conflict", 1)
        assert [json.loads(header)["digest"] for header in coord.journal.headers()] == ["one"]

    play(story)


@pytest.mark.parametrize(
    "record",
    ["[" * 5000, "{}", "null", "7", "{", '{"timeline": 1e99, "fragment_id": 0, "version": 0}',
     '{"timeline": 0, "fragment_id": 9223372036854775808, "version": 0}'],
)  # fmt: skip
def test_a_record_that_is_none_is_refused_by_name(record: str, play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grant = control.Grant(run="demo", roles=[control.ROLE_SYNCER])
        request = control.RoundReport(grant=sign(grant, SECRET), record_json=record)
        with pytest.raises(FrameError, match="a report's record is"):
            await coord.call("round_report", request)
        assert coord.journal.headers() == []

    play(story)
