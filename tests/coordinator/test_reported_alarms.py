"""Alarms of islands and syncers as an operator sees them, and in the audit log."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from diloco.bounded_text import MOST_REASON
from diloco.cli.terminal.tables import alarm_lines, run_text
from diloco.coordinator.reported_alarms import HOLDS_S, MOST_OF_ISLAND, SHOWN_S
from diloco.protocol.run.alarms import AlarmKind
from diloco.protos.control_pb2 import Alarm, AlarmStatus
from diloco.telemetry.prometheus import coordinator_metrics
from tests.coordinator_in_memory import CoordinatorInMemory, joined, tell

DECLINES = Alarm(kind="island_declines", island="west", fragment_id=-1, text="NaN", count=3)
REFUSED = Alarm(kind="contribution_refused", island="west", fragment_id=1, text="norm 3e9")


def shown(coord: CoordinatorInMemory) -> list[AlarmStatus]:
    return list(coord.coordinator.status().alarms)


async def recorded(coord: CoordinatorInMemory) -> list[tuple[str, str]]:
    await coord.coordinator.settled()
    entries = [e.content for e in coord.journal.audit_rows() if e.kind == "alarm"]
    return [(content["reporter"], content["kind"]) for content in entries]


def test_what_islands_and_syncers_report_is_shown_and_recorded_once(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        _, west = await joined(coord)
        for _ in range(3):
            await coord.report(west, alarms=[DECLINES])
            await coord.round_report(alarms=[REFUSED])
            await asyncio.sleep(5.0)

        status = coord.coordinator.status()

        assert alarm_lines(status) == [
            "alarm: contribution_refused, island west, fragment 1: norm 3e9 (syncer 0, 3 times, "
            "first 15.0 s ago, it holds)",
            "alarm: island_declines, island west: NaN (west, 3 times, first 15.0 s ago, it holds)",
        ]
        assert run_text(status).splitlines()[1:] == [*status.away, *alarm_lines(status)]
        assert await recorded(coord) == [
            ("west", "island_declines"),
            ("syncer 0", "contribution_refused"),
        ]
        assert not status.islands[1].last_report.alarms

    tell(tmp_path, story)


@pytest.mark.parametrize(
    ("about", "named"),
    [
        pytest.param({"east": "", "west": "west"}, {"west"}, id="one-rises"),
        pytest.param({"east": "", "west": "west 2"}, set(), id="one-rises-first"),
        pytest.param({"east": "", "west": ""}, set(), id="none-rises"),
        pytest.param({"east": "east", "west": "west"}, set(), id="both-rise"),
        pytest.param({"east": "west", "west": ""}, set(), id="another-says-so"),
        pytest.param({"east": "", "west": "", "north": "north"}, set(), id="of-a-third"),
    ],
)
def test_of_two_opposed_islands_that_whose_own_loss_rises_is_named(
    tmp_path: Path, about: dict[str, str], named: set[str]
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        await coord.round_report(alarms=[Alarm(kind="islands_opposed", fragment_id=0, text="-0.6")])
        for grant in await joined(coord):
            rising, _, count = about[grant.island].partition(" ")
            loss = Alarm(kind="loss_rises", island=rising, text="loss 3", count=int(count or 3))
            loss.fragment_id = -1
            await coord.report(grant, alarms=[loss] if rising else [])

        coord.coordinator._raise_alarms()

        assert {a.alarm.island for a in shown(coord) if a.reporter == "coordinator"} == named

    tell(tmp_path, story, names=tuple(about))


def test_what_is_not_reported_any_more_is_shown_for_an_hour(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        _, west = await joined(coord)
        await coord.report(west, alarms=[DECLINES])
        await asyncio.sleep(HOLDS_S + 1)

        (over,) = shown(coord)
        assert not over.holds
        assert "alarm" not in run_text(coord.coordinator.status())
        metrics = {m.name: m.samples for m in coordinator_metrics(coord.coordinator.status())}
        (gauge,), (counter,) = metrics["diloco_run_alarm"], metrics["diloco_run_alarms"]
        assert (gauge.value, counter.value, counter.labels["alarm"]) == (0, 3, "island_declines")
        await coord.report(west, alarms=[DECLINES])
        assert shown(coord)[0].holds
        assert not (await recorded(coord))[1:], "less than a minute later it is the same entry"
        await asyncio.sleep(SHOWN_S + 1)
        assert not shown(coord)

    tell(tmp_path, story)


def test_what_is_over_keeps_no_new_alarm_out(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        _, west = await joined(coord)
        over = [Alarm(kind="contribution_refused", fragment_id=p) for p in range(MOST_OF_ISLAND)]
        await coord.report(west, alarms=over)
        await asyncio.sleep(HOLDS_S + 1)

        await coord.report(west, alarms=[DECLINES])

        assert [each.alarm.kind for each in shown(coord) if each.holds] == ["island_declines"]
        assert (await recorded(coord))[-1] == ("west", "island_declines")
        assert len(shown(coord)) == MOST_OF_ISLAND

    tell(tmp_path, story)


def test_an_island_cannot_flood_what_is_shown(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        _, west = await joined(coord)
        odd = [Alarm(kind="x" * 9000), Alarm(kind="loss_rises", island="stranger")]
        text = "\N{SNOWMAN}" * 200
        many = [Alarm(kind="loss_rises", fragment_id=p, text=text) for p in range(500)]
        await coord.report(west, alarms=odd)
        for n in range(0, 500, MOST_OF_ISLAND):
            await coord.report(west, alarms=many[n:])

        alarms = shown(coord)

        assert len(alarms) == len(await recorded(coord)) == MOST_OF_ISLAND
        assert all(len(each.alarm.text) <= MOST_REASON for each in alarms)
        assert {each.alarm.kind for each in alarms} <= set(map(str, AlarmKind))

    tell(tmp_path, story)


def test_an_island_cannot_fill_the_audit_log(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, _ = await joined(coord)
        for number in range(3000):  # two hours of ever other alarms
            alarms = [Alarm(kind=AlarmKind.LOSS_RISES, fragment_id=number, text="other")]
            await coord.report(east, alarms=alarms)
            await asyncio.sleep(2.4)
        assert len(await recorded(coord)) == 240

    tell(tmp_path, story)


def test_what_all_islands_report_hides_no_other_alarm_and_looks_the_same_every_time(
    tmp_path: Path,
) -> None:
    names = tuple(f"island-{n:02d}" for n in range(70))

    async def story(coord: CoordinatorInMemory) -> None:
        grants, seen = await joined(coord), list[list[str]]()
        await coord.round_report(alarms=[Alarm(kind="bit_flipped", fragment_id=0, text="bit 3")])
        for rotated in (0, 35):
            for grant in [*grants[rotated:], *grants[:rotated]]:
                full = Alarm(kind="link_full", island=grant.island, fragment_id=-1)
                await coord.report(grant, alarms=[full])
                await asyncio.sleep(0.1)
            seen.append([each.alarm.island for each in shown(coord)])

        assert seen[0] == seen[1] and "" in seen[0], "the island of an alarm that is about none"
        assert len(seen[0]) == 64

    tell(tmp_path, story, names=names)


def test_alarms_of_all_islands_at_once_are_one_durable_write(tmp_path: Path) -> None:
    names = tuple(f"island-{n:02d}" for n in range(50))

    async def story(coord: CoordinatorInMemory) -> None:
        grants, writes = await joined(coord), list[str]()
        for grant in grants:
            await coord.report(grant)
        watching = asyncio.create_task(coord.coordinator.watch())
        await asyncio.sleep(0)
        coord.journal._require().writer.set_trace_callback(
            lambda statement: writes.append(statement) if statement == "COMMIT" else None
        )
        for grant in grants:
            declines = Alarm(kind="island_declines", island=grant.island, fragment_id=-1)
            await coord.report(grant, alarms=[declines])
        assert not writes
        await asyncio.sleep(2.0)

        assert len(writes) == 1
        assert len([e for e in coord.journal.audit_rows() if e.kind == "alarm"]) == len(names)
        watching.cancel()

    tell(tmp_path, story, names=names)
