"""The syncer of a run in which nobody waits: openings by the floor, quorum, tokens, the end."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from diloco.protocol.rounds.orders import Orders
from diloco.protocol.rounds.state import FragmentRounds
from diloco.protocol.rounds.terms import OutcomeKind, Roster, RoundKey
from diloco.protocol.rounds.timing import MeasuredTiming
from diloco.protos import fragment_pb2 as wire
from diloco.transport.calls.loopback import LoopbackNetwork, run_virtual
from diloco.versions.publication import PublicationRules
from tests.raw_island import NUMEL, RawIsland, SlowWorker, restart
from tests.virtual_run import Setting, VirtualRun

#: Of an inner step, and H: nothing opens earlier than a round after the close before it.
STEP_S, ROUND_S = 1.0, 4.0


def stand_still(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    pass


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Three islands, a quorum of one; only the raw islands below take part."""
    return Setting(
        {"w": [0.0] * NUMEL},
        stand_still,
        tmp_path,
        inner_steps=8,
        islands=("a", "b", "c"),
        overlap_steps=2,
        flush=True,
    ).on_arrival(total_tokens=12)


def version_of(run: VirtualRun) -> tuple[int, int, bool]:
    (state,) = run.syncer.states
    return state.version, state.attempt, state.is_open


async def begun(
    setting: Setting, names: Sequence[str] = "abc", reply_bps: float = math.inf
) -> tuple[VirtualRun, list[RawIsland]]:
    """A run whose first round is open to all of `names`."""
    run = VirtualRun(setting)
    run.network = LoopbackNetwork(reply_bps)
    await run.start_syncer()
    islands = [RawIsland(run, name) for name in names]
    for island in islands:
        await island.poll(step_s=STEP_S)
    assert all(ack.is_accepted for ack in await islands[0].upload())
    await asyncio.sleep(ROUND_S)
    await heartbeat(*islands)
    (state,) = run.syncer.states
    assert state.is_open and list(state.members) == sorted(names)
    return run, islands


async def heartbeat(*islands: RawIsland) -> None:
    for island in islands:
        await island.poll(step_s=STEP_S)


async def fetch(island: RawIsland, version: int) -> None:
    await island.published(version)


def test_nothing_opens_before_a_step_time_is_known_and_a_round_has_passed(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        a, began = RawIsland(run, "a"), asyncio.get_running_loop().time()
        await a.poll()
        await a.upload()
        await asyncio.sleep(2 * ROUND_S)
        assert version_of(run) == (0, 0, False)

        reply = await a.poll(step_s=STEP_S)

        assert reply.fragments[0].is_open
        await a.contribute(KEY)
        closed = asyncio.get_running_loop().time()
        assert version_of(run) == (1, 0, False)
        reply = await a.poll(wait_s=60.0, known_epoch=1, known=reply.fragments, step_s=STEP_S)
        reply = await a.poll(wait_s=60.0, known_epoch=1, known=reply.fragments, step_s=STEP_S)
        assert reply.fragments[0].is_open
        assert asyncio.get_running_loop().time() == pytest.approx(closed + ROUND_S)
        assert closed - began < 3 * ROUND_S

    run_virtual(scenario())


def test_step_times_are_looked_at_between_attempts_alone(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks: list[bool] = []
    tick = FragmentRounds.tick

    def counted(rounds: FragmentRounds, now: float) -> Any:
        ticks.append(rounds.is_open)
        return tick(rounds, now)

    async def scenario() -> None:
        _, islands = await begun(setting)
        monkeypatch.setattr(FragmentRounds, "tick", counted)

        await heartbeat(*islands)
        assert not ticks, "an attempt is open"

        await islands[0].contribute(KEY)
        ticks.clear()
        await heartbeat(*islands)
        assert ticks == [False] * 3

    run_virtual(scenario())


def test_no_island_has_versions_kept_where_checkpoints_are_cuts(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, *_) = await begun(setting)
        request = wire.PinRequest(checkpoint_step=1, versions=[wire.Pinned(fragment_id=0)])

        ack = wire.Ack.FromString((await a.call("fragment.pin", request)).header)

        assert "are cuts" in ack.message
        run.syncer.keep_cut(1, [0])
        await asyncio.sleep(0.1)
        assert run.syncer.pinned_cut == 1

    run_virtual(scenario())


@pytest.mark.parametrize("step_s", [math.nan, math.inf, -math.inf, -1.0, 5e-324, 1e308])
def test_what_is_no_step_time_opens_nothing(setting: Setting, step_s: float) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        a = RawIsland(run, "a")
        await a.poll(step_s=step_s)
        await a.upload()
        await asyncio.sleep(2 * ROUND_S)

        reply = await a.poll(step_s=step_s, wait_s=math.nan)

        assert not reply.fragments[0].is_open
        assert (await a.poll(step_s=STEP_S)).fragments[0].is_open, "the next one counts"

    run_virtual(scenario())


KEY = RoundKey(0, 0, 0, 0)


def test_tokens_add_up_and_end_the_fragment_with_one_flush(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b, c) = await begun(setting)
        key = KEY
        for version in (1, 2):
            await a.contribute(key, weight_tokens=6)
            (state,) = run.syncer.states
            assert (state.version, state.merged_tokens) == (version, 6 * version)
            await asyncio.sleep(ROUND_S)
            await heartbeat(a, b, c)
            key = replace(key, version=version)
        (state,) = run.syncer.states
        assert state.is_open and state.takes_flush

        await restart(run)
        await heartbeat(a, b, c)
        await asyncio.sleep(ROUND_S)

        (state,) = run.syncer.states
        assert state.is_open and state.takes_flush, "a restart knows it, too"
        refused = await a.submit(key)
        assert refused.status == wire.SUBMIT_STATUS_INVALID
        assert "takes flushes only" in refused.message
        for island in (a, b, c):
            await island.contribute(key, is_flush=True, weight_tokens=1)
        for _ in range(10):
            await asyncio.sleep(ROUND_S)
            await heartbeat(a, b, c)
        (state,) = run.syncer.states
        assert (state.version, state.is_flush, state.is_open) == (3, True, False)
        assert state.merged_tokens == 15
        await restart(run)
        await heartbeat(a, b, c)
        await asyncio.sleep(10 * ROUND_S)
        assert version_of(run) == (3, 0, False)
        assert run.syncer.phase(0) == "ended"

    run_virtual(scenario())


def test_a_flush_closes_by_its_deadline_with_those_that_came(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b, c) = await begun(replace(setting, total_tokens=4))
        await a.contribute(KEY)
        await asyncio.sleep(ROUND_S)
        key = replace(KEY, version=1)
        await a.contribute(key, is_flush=True)
        await b.contribute(key, is_flush=True)
        assert version_of(run) == (1, 0, True)

        for _ in range(16):
            await asyncio.sleep(4.0)
            await heartbeat(a, b, c)

        assert version_of(run) == (2, 0, False)
        assert await c.end(key) is OutcomeKind.NOT_INCLUDED

    run_virtual(scenario())


# -- who takes part --------------------------------------------------------------------------------


async def order(run: VirtualRun, *live: str, **roster: Any) -> None:
    """Have the coordinator say who lives; durable and in force when this returns."""
    run.syncer.set_orders(replace(run.orders.saved, roster=Roster(live, **roster)))
    await asyncio.sleep(0.01)


async def next_opening(run: VirtualRun, *islands: RawIsland) -> wire.FragmentState:
    for _ in range(int(ROUND_S) + 1):
        await asyncio.sleep(STEP_S)
        await heartbeat(*islands)
    (state,) = run.syncer.states
    return state


def test_who_is_not_on_the_roster_is_not_opened_for(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b, c) = await begun(setting)
        await order(run, "a", "c")
        await a.contribute(KEY)
        assert version_of(run)[0] == 1

        state = await next_opening(run, a, b, c)

        assert list(state.members) == ["a", "c"]
        key = replace(KEY, version=1)
        assert (await b.submit(key)).status == wire.SUBMIT_STATUS_NOT_OPEN

    run_virtual(scenario())


def test_an_island_that_no_file_names_takes_part_once_it_is_on_the_roster(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run, (a, b, c) = await begun(setting)
        stranger = RawIsland(run, "z")
        reply = await stranger.poll(step_s=STEP_S)
        assert not reply.is_fenced, "its grant is good"
        await a.contribute(KEY)
        state = await next_opening(run, a, b, c, stranger)
        assert list(state.members) == ["a", "b", "c"]
        await order(run, "a", "b", "c", "z")
        key = replace(KEY, version=1)
        await b.contribute(key)

        state = await next_opening(run, a, b, c, stranger)

        assert list(state.members) == ["a", "b", "c", "z"]
        key = replace(KEY, version=2)
        await stranger.contribute(key)
        assert await stranger.end(key) is OutcomeKind.INCLUDED

    run_virtual(scenario())


def test_a_paused_run_opens_nothing_until_it_goes_on(setting: Setting) -> None:
    async def scenario() -> None:
        run, islands = await begun(setting)
        await order(run, "a", "b", "c", is_paused=True)
        await islands[0].contribute(KEY)
        assert version_of(run) == (1, 0, False), "what is open goes on"
        for _ in range(5):
            assert not (await next_opening(run, *islands)).is_open

        await order(run, "a", "b", "c")

        assert version_of(run) == (1, 0, True)

    run_virtual(scenario())


def test_fewer_than_the_run_needs_wait(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b, c) = await begun(setting)
        await order(run, "a", min_islands=2)
        await a.contribute(KEY)
        assert not (await next_opening(run, a, b, c)).is_open

        await order(run, "a", "c", min_islands=2)

        assert version_of(run) == (1, 0, True)

    run_virtual(scenario())


def test_a_kicked_start_is_fenced_and_stays_so_over_a_restart(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b, c) = await begun(setting)
        await b.submit(KEY, 0)
        await order(run, "a", "c", fenced={"b": 2})
        assert (await b.poll()).is_fenced
        assert (await b.submit(KEY, 1)).status == wire.SUBMIT_STATUS_FENCED

        await restart(run)  # the coordinator is away: nobody tells the new start anything

        assert (await b.poll()).is_fenced
        assert not (await a.poll()).is_fenced
        await order(run, "a", "b", "c", fenced={"b": 2})
        again = RawIsland(run, "b", incarnation=2)
        assert not (await again.poll(step_s=STEP_S)).is_fenced
        assert list((await next_opening(run, a, again, c)).members) == ["a", "b", "c"]

    run_virtual(scenario())


def test_orders_count_once_they_are_durable(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    def full_disk() -> None:
        raise OSError(28, "No space left on device")

    async def scenario() -> None:
        run, (_, b, _) = await begun(setting)
        run.orders.before_store = full_disk
        for _ in range(3):  # with every report
            await order(run, "a", "c", fenced={"b": 2})
        assert not (await b.poll()).is_fenced
        assert run.syncer.failure is None
        assert sum("orders cannot be kept" in r.message for r in caplog.records) == 1

        run.orders.before_store = lambda: None
        await order(run, "a", "c", fenced={"b": 2})

        assert (await b.poll()).is_fenced

    run_virtual(scenario())


def test_a_silent_member_is_not_opened_for_though_nobody_says_so(setting: Setting) -> None:
    """The coordinator may be away: the last roster stays, and silence speaks.

    Source: PROTOCOL.md, "Coordinator away".
    """

    async def scenario() -> None:
        run, (a, b, c) = await begun(replace(setting, total_tokens=100))
        await order(run, "a", "b", "c")
        await a.contribute(KEY)
        key = replace(KEY, version=1)
        for _ in range(12):  # c is frozen
            await asyncio.sleep(STEP_S)
            await heartbeat(a, b)
        (state,) = run.syncer.states
        assert list(state.members) == ["a", "b", "c"], "opened within its lease"
        await a.contribute(key)

        assert list((await next_opening(run, a, b)).members) == ["a", "b"]

        await a.contribute(replace(key, version=2))
        assert list((await next_opening(run, a, b, c)).members) == ["a", "b", "c"], "it thawed"

    run_virtual(scenario())


@pytest.mark.parametrize("is_heard_first", [False, True])
def test_what_the_syncer_slept_through_is_nobodys_silence(
    setting: Setting, is_heard_first: bool
) -> None:
    """Whether its own alarm is first to run again, or a call that waited in its sockets."""

    async def scenario() -> None:
        run, (a, b, c) = await begun(replace(setting, quorum=None))
        await heartbeat(a, b, c)
        await asyncio.sleep(STEP_S)
        await a.contribute(KEY)
        waiting = asyncio.create_task(heartbeat(b))
        await asyncio.sleep(0.0)

        loop = asyncio.get_running_loop()
        loop._jumping.now += setting.lease_s + 2.0  # type: ignore[attr-defined]
        if is_heard_first:
            await waiting
        await asyncio.sleep(STEP_S)

        (state,) = run.syncer.states
        assert (state.version, state.attempt, state.is_open) == (0, 0, True)
        for island in (b, c):
            await island.contribute(KEY)
        assert version_of(run)[0] == 1
        for _ in range(int(setting.lease_s) + 1):  # now c is really silent
            await asyncio.sleep(STEP_S)
            await heartbeat(a, b)
        assert list(run.syncer._admission.roster.live) == ["a", "b"]

    run_virtual(scenario())


def test_nobody_waits_for_a_member_that_lapsed(setting: Setting) -> None:
    """Also where all members are the quorum."""

    async def scenario() -> None:
        run, (a, b, _) = await begun(replace(setting, quorum=None))
        await a.contribute(KEY)
        await b.contribute(KEY)
        assert version_of(run) == (0, 0, True)

        for _ in range(11):  # c is frozen
            await asyncio.sleep(STEP_S)
            await heartbeat(a, b)

        assert version_of(run)[0] == 1
        assert await a.end(KEY) is OutcomeKind.INCLUDED

    run_virtual(scenario())


def test_a_poll_is_answered_within_a_lease(setting: Setting) -> None:
    """A poll that waits is no sign of life of who froze meanwhile; one that is answered is."""

    async def scenario() -> None:
        _, (a, *_) = await begun(setting)
        reply = await a.poll(step_s=STEP_S)
        began = asyncio.get_running_loop().time()

        await a.poll(wait_s=60.0, known_epoch=1, known=reply.fragments, step_s=STEP_S)

        assert asyncio.get_running_loop().time() - began == pytest.approx(5.0)

    run_virtual(scenario())


def test_version_0_is_founded_by_who_is_there(setting: Setting) -> None:
    """No configured island is waited for; one that freezes as it founds is replaced."""

    async def scenario() -> None:
        run = VirtualRun(replace(setting, min_members=2))
        await run.start_syncer()
        b, c = RawIsland(run, "b"), RawIsland(run, "c")
        assert not (await b.poll()).fragments[0].wants_initial
        assert not (await c.poll()).fragments[0].wants_initial
        assert (await b.poll()).fragments[0].wants_initial
        await b.upload_lane(0)
        a = RawIsland(run, "a")
        assert not (await a.poll()).fragments[0].wants_initial, "it is being founded"
        for _ in range(12):
            await asyncio.sleep(1.0)
            await a.poll()
            await c.poll()

        assert (await a.poll()).fragments[0].wants_initial
        assert all(ack.is_accepted for ack in await a.upload(3.0))
        assert (await c.poll()).fragments[0].is_founded

    run_virtual(scenario())


def test_a_grace_of_auto_that_comes_to_nothing_is_said_once_with_the_key_to_set(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        run, islands = await begun(replace(setting, total_tokens=1000))
        for version in range(4):
            await asyncio.sleep(3 * STEP_S)  # until the quorum: more than tau steps
            await islands[0].contribute(replace(KEY, version=version))
            await fetch(islands[0], version + 1)
            await next_opening(run, *islands)

    run_virtual(scenario())

    (said,) = (r.getMessage() for r in caplog.records if "outer.grace = auto" in r.message)
    assert "tau inner steps of the slowest island take 2 s" in said
    assert "diloco set HOST:PORT outer.grace=" in said


# -- restarts --------------------------------------------------------------------------------------


def test_a_syncer_that_is_killed_more_often_than_rounds_open_still_opens_them(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run, islands = await begun(replace(setting, total_tokens=100))
        await islands[0].contribute(KEY)
        closed = asyncio.get_running_loop().time()
        for _ in range(2):
            await asyncio.sleep(ROUND_S / 2 - 0.5)
            await restart(run)
            await heartbeat(*islands)
            assert not run.syncer.states[0].is_open
        reply = await islands[0].poll(step_s=STEP_S)

        await islands[0].poll(
            wait_s=60.0, known_epoch=run.epoch, known=reply.fragments, step_s=STEP_S
        )

        assert run.syncer.states[0].is_open
        assert asyncio.get_running_loop().time() == pytest.approx(closed + ROUND_S)
        for version in (1, 2, 3):
            await asyncio.sleep(2 * ROUND_S)  # away for longer than a floor
            await restart(run)
            await heartbeat(*islands)
            assert version_of(run) == (version, 0, True), "overdue: at once"
            await islands[0].contribute(replace(KEY, version=version))

    run_virtual(scenario())


def test_an_expiry_counts_its_wait_over_restarts(setting: Setting) -> None:
    async def scenario() -> None:
        run, islands = await begun(replace(setting, quorum=2))
        for _ in range(3):
            for island in islands:
                await island.decline(replace(KEY, attempt=version_of(run)[1]))
            while not version_of(run)[2]:
                await asyncio.sleep(0.4 * STEP_S)  # of waits of 1, 2 and 4 steps
                await restart(run)
                await heartbeat(*islands)
                assert asyncio.get_running_loop().time() < 6 * ROUND_S
        assert version_of(run) == (0, 3, True)

    run_virtual(scenario())


def test_after_a_restart_a_round_waits_for_those_that_are_only_reconnecting(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run, (a, b, c) = await begun(setting)
        await restart(run)
        await asyncio.sleep(2 * ROUND_S)
        await heartbeat(a)
        await heartbeat(b)
        assert version_of(run) == (0, 0, False)

        await heartbeat(c)

        (state,) = run.syncer.states
        assert state.is_open and list(state.members) == ["a", "b", "c"]

    run_virtual(scenario())


def test_after_a_restart_nobody_waits_for_longer_than_a_lease(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b, _) = await begun(setting)
        await restart(run)  # and c died meanwhile
        began = asyncio.get_running_loop().time()
        while not version_of(run)[2]:
            await asyncio.sleep(STEP_S / 2)
            await heartbeat(a, b)

        assert list(run.syncer.states[0].members) == ["a", "b"]
        assert asyncio.get_running_loop().time() - began == pytest.approx(10.0, abs=STEP_S)

    run_virtual(scenario())


# -- policy ----------------------------------------------------------------------------------------


def test_what_an_operator_sets_counts_from_the_next_opening_and_is_in_the_record(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run, (a, b, c) = await begun(setting)
        run.syncer.set_orders(Orders(None, '{"quorum": 2}', 5))
        await asyncio.sleep(0.01)
        await a.contribute(KEY)
        assert version_of(run)[0] == 1, "what is open keeps its rules"
        await next_opening(run, a, b, c)
        key = replace(KEY, version=1)
        await a.contribute(key)
        assert version_of(run) == (1, 0, True)
        await restart(run)  # and nobody tells it anything
        state = await next_opening(run, a, b, c)
        await a.contribute(replace(key, attempt=state.attempt))
        assert version_of(run)[0] == 1
        await b.contribute(replace(key, attempt=state.attempt))

        assert version_of(run)[0] == 2

        told = {header["version"]: header["rules"] for header in run.records if "rules" in header}
        assert (told[1]["min_contributions"], told[1]["policy_revision"]) == (1, 0)
        assert (told[2]["min_contributions"], told[2]["policy_revision"]) == (2, 5)
        assert PublicationRules.from_json(told[2]) == setting.publication()

    run_virtual(scenario())


@pytest.mark.parametrize("change", ['{"uplink_codec": "int4"}', '{"quorum": 0.5, "x": 1}'])
def test_what_cannot_be_set_while_a_run_is_under_way_leaves_the_rules_as_they_are(
    setting: Setting, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        run, (a, b, c) = await begun(setting)
        run.syncer.set_orders(Orders(None, change, 5))
        await asyncio.sleep(0.01)
        for _ in range(2):
            await publish(run, a, b, c)
        rules = [header["rules"] for header in run.records if "rules" in header]
        assert [(r["uplink_codec"], r["policy_revision"]) for r in rules] == 2 * [("float32", 0)]

    run_virtual(scenario())
    assert "policy is not applied, revision=5" in caplog.text


# -- what is told ----------------------------------------------------------------------------------


def test_events_say_who_was_waited_for_and_how_long(setting: Setting) -> None:
    async def scenario() -> None:
        timing = replace(setting.measured(grace_s=3.0), deadline_cap_s=5.0)
        run, (a, b, c) = await begun(replace(setting, timing=timing))
        await asyncio.sleep(1.0)
        await a.contribute(KEY, weight_tokens=1)
        await b.decline(KEY)
        await asyncio.sleep(3.5)
        state = await next_opening(run, a, b, c)
        key = replace(KEY, version=1, attempt=state.attempt)
        for island in (a, b, c):
            await island.decline(key)
        await asyncio.sleep(STEP_S)

        told = [event.as_dict() for event in run.events]
        assert [event["kind"] for event in told] == [
            "round_opened", "round_closed", "round_opened", "round_expired", "round_opened",
        ]  # fmt: skip
        assert told[0]["members"] == ("a", "b", "c")
        closed = told[1]
        assert (closed["contributors"], closed["is_solo"], closed["quorum"]) == (("a",), True, 1)
        assert closed["waited_s"] == pytest.approx(4.0, abs=0.1)
        assert closed["grace_s"] == pytest.approx(3.0)
        assert closed["refused"] == {"b": "declined: not finite"}
        assert closed["merged_tokens"] == 1
        assert told[3]["reason"] == "too few members have anything valid to send"
        assert told[4]["attempt"] == 1
        counts = run.syncer.meter.counts
        assert (counts.solo[0], counts.published[0], counts.expired[0]) == (1, 1, 1)
        assert counts.grace[0].sum_s == pytest.approx(3.0)

    run_virtual(scenario())


def test_whom_versions_are_published_without_in_a_row_an_alarm_names_until_it_is_counted(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        timing = setting.measured(grace_s=1.0)
        run, (a, b, c) = await begun(replace(setting, timing=timing, total_tokens=1000))

        async def published_by(*by: RawIsland) -> list[tuple[str, str]]:
            num_told = len(run.events)
            key = replace(KEY, version=run.syncer.states[0].version)
            for island in by:
                await island.contribute(key, weight_tokens=1)
            await asyncio.sleep(1.0)
            await next_opening(run, a, b, c)
            told = [event.as_dict() for event in run.events[num_told:]]
            return [
                (e["kind"], e.get("text", "")[:23]) for e in told if e["kind"].startswith("alarm")
            ]

        async def declined() -> None:
            await c.decline(replace(KEY, version=run.syncer.states[0].version))

        for _ in range(2):  # a decline is heard
            await declined()
            assert await published_by(a) == []
        await declined()
        assert await published_by(a) == [("alarm", "1 of 3 members (b) are ")]
        assert await published_by(a, c) == [("alarm", "1 of 3 members (b) are ")]
        assert await published_by(a, b, c) == [("alarm_cleared", "")]

    run_virtual(scenario())


# -- outcomes, expiries and the floor --------------------------------------------------------------


async def publish(run: VirtualRun, island: RawIsland, *others: RawIsland) -> RoundKey:
    """Have one island make the next version; returns the key of the round after it, once open."""
    (state,) = run.syncer.states
    await island.contribute(RoundKey(0, 0, state.version, state.attempt), weight_tokens=1)
    state = await next_opening(run, island, *others)
    assert state.is_open
    return RoundKey(0, 0, state.version, state.attempt)


def test_who_was_counted_hears_so_however_long_ago_it_was(setting: Setting) -> None:
    """A frozen island thaws when nobody remembers its round: its tokens were counted.

    Source: PROTOCOL.md, "Outcomes".
    """

    async def scenario() -> None:
        run, (a, b, c) = await begun(replace(setting, total_tokens=100))
        await a.contribute(KEY, weight_tokens=1)
        await next_opening(run, a, b, c)
        late = replace(KEY, version=1)
        await b.contribute(late, weight_tokens=1)
        await next_opening(run, a, c)
        for _ in range(7):
            await publish(run, a, c)
        assert len(run.syncer._services[0].runner.rounds.past.by_base) < 7

        assert await b.end(late) is OutcomeKind.INCLUDED
        assert await b.end(KEY) is OutcomeKind.NOT_INCLUDED
        await restart(run)
        assert await b.end(late) is OutcomeKind.INCLUDED

    run_virtual(scenario())


def test_expiries_never_end_a_run_in_which_nobody_waits_and_come_ever_slower(
    setting: Setting,
) -> None:
    """All decline: the next attempt opens after a step, then two, up to a round's.

    Source: PROTOCOL.md, "Deadline and expiry".
    """

    async def scenario() -> None:
        run, islands = await begun(setting)
        opened_at = []
        for attempt in range(6):
            while version_of(run) != (0, attempt, True):
                await heartbeat(*islands)
                await asyncio.sleep(0.01)
            opened_at.append(asyncio.get_running_loop().time())
            for island in islands:
                await island.decline(replace(KEY, attempt=attempt))

        waits = [after - before for before, after in itertools.pairwise(opened_at)]
        assert waits == pytest.approx([1.0, 2.0, 4.0, 4.0, 4.0], abs=0.2)
        assert run.syncer.fatal is None
        await restart(run)
        assert run.syncer.fatal is None
        await heartbeat(*islands)
        assert not version_of(run)[2], "a restart goes on waiting"
        state = await next_opening(run, *islands)
        assert state.attempt == 6 and state.is_open

    run_virtual(scenario())


def test_the_floor_counts_from_the_close_not_from_the_publication(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        run.worker = worker = SlowWorker()
        await run.start_syncer()
        a = RawIsland(run, "a")
        await heartbeat(a)
        await a.upload()
        await asyncio.sleep(ROUND_S)
        await heartbeat(a)
        assert version_of(run) == (0, 0, True)
        loop = asyncio.get_running_loop()
        worker.before_s = 0.0
        for lane_id in range(2):
            worker.before_s = 3.0 * lane_id  # the last lane's check, then merge and commit
            await a.submit(KEY, lane_id)
        closed = loop.time()
        while version_of(run)[0] == 0:
            await asyncio.sleep(0.1)
        assert loop.time() - closed == pytest.approx(3.0, abs=0.2)
        worker.before_s = 0.0

        while not version_of(run)[2]:
            await asyncio.sleep(0.1)

        assert loop.time() - closed == pytest.approx(ROUND_S, abs=0.2)

    run_virtual(scenario())


@pytest.mark.parametrize("is_link_slow", [False, True])
def test_the_grace_is_measured_from_steps_quorums_and_fetches(
    setting: Setting, is_link_slow: bool
) -> None:
    """Whether it is the island that asks late, or the version that is long on its way."""
    reply_bps = 8 * 4 * NUMEL / 0.2 if is_link_slow else math.inf

    async def scenario() -> None:
        run, (a, b, c) = await begun(replace(setting, total_tokens=100), reply_bps=reply_bps)
        for version in (0, 1):
            key = replace(KEY, version=version)
            await asyncio.sleep(0.4)  # until the quorum
            await a.contribute(key, weight_tokens=1)
            if version == 0:
                assert version_of(run)[0] == 1, "nothing is known yet: no grace"
                await asyncio.sleep(0.0 if is_link_slow else 0.2)
                await fetch(a, 1)
                await asyncio.sleep(ROUND_S - 0.2)
                await heartbeat(a, b, c)
        # half of what two steps of a second leave when 0.4 s and 0.2 s are taken off
        assert version_of(run) == (1, 0, True)
        await asyncio.sleep(0.6)
        assert version_of(run) == (1, 0, True)
        await asyncio.sleep(0.2)
        assert version_of(run)[0] == 2
        assert run.events[-1].as_dict()["grace_s"] == pytest.approx(0.7, abs=0.05)

    run_virtual(scenario())


@pytest.mark.parametrize("end", ["dies", "leaves", "starts again", "is slow"])
def test_a_contributor_that_is_gone_measures_no_fetch(setting: Setting, end: str) -> None:
    """As long as it takes to be noticed: the grace would be 0 for rounds."""

    async def scenario() -> None:
        run, (a, b, c) = await begun(replace(setting, quorum=2, total_tokens=100))
        await a.contribute(KEY, weight_tokens=1)
        await b.contribute(KEY, weight_tokens=1)
        assert version_of(run)[0] == 1
        await asyncio.sleep(0.2)
        await fetch(a, 1)
        await asyncio.sleep(1.0)
        match end:
            case "leaves":
                await order(run, "a", "c")
            case "starts again":
                await RawIsland(run, "b", 2).poll()
            case "is slow":
                await fetch(b, 1)
        await asyncio.sleep(ROUND_S - 1.2)
        await heartbeat(a, c)
        assert version_of(run) == (1, 0, True)

        timing = run.syncer._services[0].runner.rounds._timing
        assert isinstance(timing, MeasuredTiming)
        measured = {"dies": None, "is slow": pytest.approx(1.2)}
        assert timing._until_fetched.value == measured.get(end, pytest.approx(0.2, abs=0.05))

    run_virtual(scenario())
