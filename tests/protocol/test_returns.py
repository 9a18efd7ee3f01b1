"""A run whose checkpoints are judged bad returns to its last good one: as its coordinator says."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.config.load import load_config
from diloco.coordinator.audit_log import audit_entries_of
from diloco.errors import AggregationError, Fenced, RunReturned
from diloco.launch.coordinator import _Run
from diloco.launch.held_state import HeldState
from diloco.protocol.run.candidates import JudgeRules
from diloco.protos import control_pb2 as control
from diloco.refusals import Cause
from diloco.state_dir import StateDir
from tests.coordinator_in_memory import TERMS, CoordinatorInMemory, joined, tell
from tests.run_files import write_run


def held_out(*losses: tuple[int, float]) -> list[control.HeldOut]:
    return [control.HeldOut(checkpoint=n, nats_per_byte=loss) for n, loss in losses]


async def reported(
    coord: CoordinatorInMemory, grants: list[control.Grant], step: int, loss: float
) -> list[control.ReportReply]:
    """Let islands report a checkpoint that they have written, and its held-out loss."""
    return [
        await coord.report(
            grant, inner_step=step, checkpoint_steps=[step], held_out=held_out((step, loss))
        )
        for grant in grants
    ]


def alarms(coord: CoordinatorInMemory) -> dict[str, str]:
    return {a.alarm.kind: a.alarm.text for a in coord.coordinator.status().alarms if a.holds}


async def begun(coord: CoordinatorInMemory) -> list[control.Grant]:
    """Let two islands train, with good checkpoints of steps 10 and 20."""
    grants = await joined(coord)
    await reported(coord, grants, 10, 2.0)
    await reported(coord, grants, 20, 1.9)
    return grants


def test_two_bad_checkpoints_send_every_island_back_to_the_last_good_one(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        watching = asyncio.create_task(coord.coordinator.watch())
        grants = await begun(coord)
        assert not any(reply.stop for reply in await reported(coord, grants, 30, 5.5))
        await asyncio.sleep(2.0)
        assert alarms(coord).keys() == {"candidate_bad"}
        assert "checkpoint 30: held-out loss 5.5000" in alarms(coord)["candidate_bad"]
        assert coord.membership.checkpoints == (10, 20, 30), "the good ones stay"

        await reported(coord, grants, 40, 5.5)
        await asyncio.sleep(2.0)

        assert coord.coordinator.ended.is_set()
        assert alarms(coord).keys() == {"candidate_bad", "loss_rises", "return"}
        assert alarms(coord)["return"].startswith("the run is to return to inner step 20: held-out")
        reply = await coord.report(grants[0], inner_step=41)
        assert (reply.stop, reply.exit_code) == (True, RunReturned.exit_code)
        await coord.restart()
        assert coord.membership.is_returning, "a coordinator that was killed goes on with it"
        assert not (await coord.join("east", "b")).syncers, "who joins waits for it"
        watching.cancel()

    tell(tmp_path, story)


def test_after_the_return_starts_of_the_old_timeline_are_to_start_again(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grants = await begun(coord)
        coord.journal.write(kicked := coord.membership.members.kicked(["west"], "it poisoned"))
        coord.membership.apply(kicked)
        await reported(coord, grants[:1], 30, math.nan)
        assert coord.membership.is_returning

        entries = coord.membership.resumed(20, is_return=True)
        coord.journal.write(entries)
        await coord.restart()

        assert coord.membership.checkpoints == (10, 20)
        assert not coord.membership.is_returning
        east, west = [await coord.report(grant, inner_step=31) for grant in grants]
        assert east.exit_code == RunReturned.exit_code
        assert "resumed from inner step 20 (timeline 1)" in east.reason
        assert west.exit_code == RunReturned.exit_code, "a new timeline begins with everybody"
        assert (await coord.join("east", "b")).is_resumed

    tell(tmp_path, story)


def test_what_an_operator_resumes_ends_the_starts_of_the_old_timeline(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grants = await begun(coord)
        await coord.restart(resume_step=10)

        reply = await coord.report(grants[0], inner_step=31)

        assert (reply.stop, reply.exit_code) == (True, Fenced.exit_code)

    tell(tmp_path, story)


def test_votes_for_what_can_be_no_checkpoint_keep_no_judging_off(tmp_path: Path) -> None:
    terms = replace(TERMS, judging=JudgeRules(every_inner_steps=10))

    async def story(coord: CoordinatorInMemory) -> None:
        grants = await begun(coord)
        for first in (10**12, 31, 110):
            absurd = held_out(*[(first + 10 * k, 0.0) for k in range(8)])
            await coord.report(grants[0], held_out=absurd)
        # Nor do those that it may give: the room that they take is its own.
        await coord.report(grants[0], held_out=held_out(*[(10 * k, 0.0) for k in range(3, 11)]))

        await reported(coord, grants, 30, 5.5)
        await reported(coord, grants, 40, 5.5)

        assert coord.membership.is_returning
        votes = coord.membership.candidates._votes["east"]
        assert max(votes) <= 100 and len(votes) <= 8

    tell(tmp_path, story, terms=terms)


def test_one_island_alone_sends_nobody_back(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grants = await begun(coord)
        for step in range(30, 90, 10):
            await reported(coord, grants[:1], step, math.nan)
            await reported(coord, grants[1:], step, 1.8)

        assert not coord.membership.is_returning
        assert coord.membership.checkpoints == (10, 20, 80)
        assert "disputed" in coord.membership.candidates.alarm
        # Nor does it if it says so of checkpoints without end.
        await coord.report(grants[0], held_out=held_out(*[(n, math.nan) for n in range(8)]))
        assert not coord.membership.is_returning

    tell(tmp_path, story)


async def watched(coord: CoordinatorInMemory, directory: Path) -> None:
    watching = asyncio.create_task(coord.coordinator.watch())
    await asyncio.sleep(2.0)
    watching.cancel()


async def killed_before_it_looked(coord: CoordinatorInMemory, directory: Path) -> None:
    config = load_config(write_run(directory / "run", {"east": "", "west": ""}))
    signals: Any = SimpleNamespace(forced=asyncio.Event())
    state = StateDir(directory)
    run = _Run(config, state, HeldState(), coord.journal, lambda line: None, 0.0, signals, None)
    run.membership = coord.membership
    await run._return()
    await coord.restart()


@pytest.mark.parametrize("look", [watched, killed_before_it_looked])
def test_returns_that_do_not_help_end_the_run_with_the_command(
    tmp_path: Path, look: Callable[[CoordinatorInMemory, Path], Awaitable[None]]
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grants = await begun(coord)
        for start in range(3):
            await reported(coord, grants, 30, math.inf)
            if start < 2:
                pending = coord.membership.candidates.pending
                assert pending is not None
                assert pending.to == (20, 10)[start], "where it did not help to an older one"
                coord.journal.write(coord.membership.resumed(pending.to, is_return=True))
                await coord.restart()
                grants = await joined(coord, str(start))
        await look(coord, tmp_path)

        assert coord.membership.fatal_exit_code == AggregationError.exit_code == 20
        reason = coord.membership.fatal_reason
        assert "2 returns to a good checkpoint did not help" in reason
        assert "diloco coordinator RUN.toml --resume --at 10" in reason
        reply = await coord.report(grants[0], inner_step=31)
        assert (reply.stop, reply.exit_code) == (True, 20)

    tell(tmp_path, story)


REFUSED = control.Alarm(kind="contribution_refused", island="west", fragment_id=1, text="norm 3e9")
DECLINES = control.Alarm(kind="island_declines", island="west", fragment_id=-1, text="far off")
FLIPPED = control.Alarm(kind="bit_flipped", island="west", fragment_id=1, text="lane 0")


async def ruined(coord: CoordinatorInMemory, grants: list[control.Grant]) -> None:
    """Let the newest checkpoint be bad, and the run return."""
    await reported(coord, grants, 30, math.nan)
    watching = asyncio.create_task(coord.coordinator.watch())
    await asyncio.sleep(2.0)
    watching.cancel()
    pending = coord.membership.candidates.pending
    assert pending is not None
    coord.journal.write(entries := coord.membership.resumed(pending.to, is_return=True))
    if coord.membership.candidates.without:
        assert [each.kind for each in audit_entries_of(entries)] == ["timeline", "members"], (
            "audit log"
        )
    await coord.restart()


@pytest.mark.parametrize(
    ("who", "accusing", "fenced"),
    [
        ("by a syncer", REFUSED, True),
        ("by itself", DECLINES, True),
        ("by itself, before the last good one", DECLINES, False),
        ("by itself, of what it did not send", FLIPPED, False),
        ("by another island", REFUSED, False),
    ],
)
def test_who_is_spoken_against_is_fenced_before_the_second_return(
    tmp_path: Path, who: str, accusing: control.Alarm, fenced: bool
) -> None:
    async def accuse(coord: CoordinatorInMemory, grants: list[control.Grant]) -> None:
        if who == "by a syncer":
            await coord.round_report(timeline=coord.membership.timeline, alarms=[accusing])
            for grant in grants:  # as on ruined parameters
                declines = control.Alarm(kind="island_declines", island=grant.island)
                await coord.report(grant, alarms=[declines])
        else:
            by = grants[coord.names.index("west" if "by itself" in who else "east")]
            await coord.report(by, alarms=[accusing])

    async def story(coord: CoordinatorInMemory) -> None:
        grants = await begun(coord)
        await accuse(coord, grants)
        if "before" in who:
            await asyncio.sleep(1.0)
            await reported(coord, grants, 25, 1.9)
        await ruined(coord, grants)
        assert len(coord.membership.members.live) == 3, "the first return is with everybody"
        grants = await joined(coord, "b")

        await ruined(coord, grants)

        assert coord.membership.members.live == (
            ("east", "north") if fenced else ("east", "north", "west")
        )
        again = await coord.join("west", "c")
        assert (again.status == control.JOIN_STATUS_KICKED) is fenced
        if fenced:
            assert "was ruined again" in again.message
            told = await coord.report(grants[2], inner_step=31)
            assert (told.stop, told.exit_code) == (True, Fenced.exit_code)
            roster = await coord.roster()
            assert roster is not None and list(roster.live) == ["east", "north"]
            assert coord.membership.candidates.last_return.startswith(
                "the run returned to checkpoint 10 by itself without west: held-out loss"
            )

    tell(tmp_path, story, names=("east", "north", "west"))


def test_nobody_is_fenced_where_half_of_the_islands_are_spoken_against(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grants = await begun(coord)
        for start in "bc":
            await coord.round_report(timeline=coord.membership.timeline, alarms=[REFUSED])
            await ruined(coord, grants)
            grants = await joined(coord, start)
        assert coord.membership.members.live == ("east", "west")

    tell(tmp_path, story)


def test_a_stop_that_is_under_way_goes_before_a_return(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grants = await begun(coord)
        await coord.coordinator.request_stop()
        await reported(coord, grants, 30, math.nan)

        assert not coord.membership.is_returning
        assert not (await coord.report(grants[0], inner_step=31)).stop
        assert coord.membership.to_resume == 20, "an operator resumes what is good"

    tell(tmp_path, story)


def test_so_many_losses_in_a_report_are_refused(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grants = await joined(coord)
        try:
            await coord.report(grants[0], held_out=held_out(*[(n, 1.0) for n in range(9)]))
        except Exception as error:
            assert "held-out losses of 9 checkpoints; 8 are allowed" in str(error)
        counts = {(r.island, r.cause): r.count for r in coord.coordinator.status().refusals}
        assert counts == {("east", Cause.FRAME): 1}

    tell(tmp_path, story)
