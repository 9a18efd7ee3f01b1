"""Who is away, what comes of it, and islands that leave before the end: said within the lease."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.protocol.run import absences
from diloco.protocol.run.absences import MOST_NAMED, OTHERS
from diloco.protos import control_pb2 as control
from tests.coordinator_in_memory import CoordinatorInMemory, tell
from tests.run_files import write_run

ELASTIC = ("outer.preset=decoupled",)


def config_of(tmp_path: Path, *overrides: str) -> Config:
    return load_config(write_run(tmp_path / "run", {"east": "", "west": ""}), overrides)


async def joined(coord: CoordinatorInMemory) -> tuple[control.Grant, control.Grant]:
    return (await coord.join("east")).grant, (await coord.join("west")).grant


async def away(
    coord: CoordinatorInMemory, grant: control.Grant, seconds: int, **fields: int
) -> list[str]:
    """What a survivor that reports every second is told of the others at last."""
    for _ in range(seconds):
        await asyncio.sleep(1.0)
        await coord.report(grant, **fields)
    return list((await coord.report(grant, **fields)).away)


@pytest.mark.parametrize(
    ("overrides", "within_s", "words"),
    [
        (ELASTIC, 8, "no report for more than 5 s. Rounds go on without it"),
        ((), 12, "for more than 10 s. Every round waits for it until 300 s after its last report"),
        (("outer.on_member_lost=stop",), 12, "then the run ends with exit code 50"),
        (("outer.on_member_lost=shrink",), 12, "then they go on without it"),
        (("outer.on_member_lost=wait",), 12, "waits for it for as long as it takes"),
    ],
    ids=["elastic", "scheduled", "stop", "shrink", "wait"],
)
def test_a_silent_island_is_named_to_all_within_its_lease_with_what_comes_of_it(
    tmp_path: Path,
    overrides: tuple[str, ...],
    within_s: int,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await joined(coord)
        watching = asyncio.create_task(coord.coordinator.watch())
        assert await away(coord, east, 2) == []

        (text,) = await away(coord, east, within_s)
        assert text.startswith("island west is away: no report") and words in text
        assert "start it again" in text
        assert [m for m in caplog.messages if m.startswith("island west is away")] == [text]
        said = list(coord.coordinator.status().away)
        assert [line for line in said if not line.startswith("syncer ")] == [text]

        assert list((await coord.report(west)).away) == []
        watching.cancel()

    tell(tmp_path, story, config=config_of(tmp_path, *overrides))


def test_a_syncer_that_hangs_is_in_the_status_until_it_speaks_again(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grants = await joined(coord)
        await coord.told_to_syncer()
        for _ in range(14):
            await asyncio.sleep(1.0)
            for grant in grants:
                await coord.report(grant)
        assert list(coord.coordinator.status().away) == []

        await away(coord, grants[0], 2)
        (text,) = [t for t in coord.coordinator.status().away if t.startswith("syncer ")]
        assert text.startswith("syncer (address not known) is not heard of: its process hangs")

        await coord.told_to_syncer()
        assert list(coord.coordinator.status().away) == []

    tell(tmp_path, story, config=config_of(tmp_path))


def test_a_syncer_that_has_spoken_and_hangs_is_told_while_islands_are_waited_for(
    tmp_path: Path,
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        await asyncio.sleep(20.0)
        assert list(coord.coordinator.status().away) == [], "it may still be starting"
        await coord.told_to_syncer()
        assert list(coord.coordinator.status().away) == []
        await asyncio.sleep(20.0)
        (text,) = coord.coordinator.status().away
        assert coord.state() == "waiting for islands" and "is not heard of" in text

    tell(tmp_path, story, config=config_of(tmp_path))


def test_of_hundreds_that_are_away_a_few_are_named_and_reports_do_not_look_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    find = absences.away_texts

    def counted(*arguments: Any) -> list[str]:
        nonlocal looks
        looks += 1
        return find(*arguments)

    monkeypatch.setattr("diloco.coordinator.run_status.away_texts", counted)

    async def story(coord: CoordinatorInMemory) -> None:
        grants = [(await coord.join(name)).grant for name in coord.names]
        watching = asyncio.create_task(coord.coordinator.watch())
        texts = await away(coord, grants[0], 12)
        before = looks
        for _ in range(100):
            await coord.report(grants[0])
        assert looks == before
        assert len(texts) == MOST_NAMED + 1 and texts[-1] == OTHERS
        assert len([m for m in caplog.messages if "away" in m]) == len(texts)

        await coord.report(grants[1])  # it was named: another is, instead
        texts = await away(coord, grants[0], 1)
        assert len(texts) == MOST_NAMED + 1 and f"island {coord.names[1]} " not in "".join(texts)
        watching.cancel()

    names = tuple(f"island-{number:03d}" for number in range(200))
    tell(tmp_path, story, names=names)


def test_an_island_that_failed_is_named_at_once_until_it_starts_again(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await joined(coord)
        await coord.leave(west, exit_code=40)
        assert "island west is away: it failed with exit code 40" in (await away(coord, east, 0))[0]
        await coord.join("west", "b")
        assert await away(coord, east, 0) == []

    tell(tmp_path, story, config=config_of(tmp_path))


def test_a_scheduled_run_goes_on_without_an_island_that_leaves_early(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await joined(coord)
        await coord.report(west, inner_step=25)
        await coord.leave(west, is_early=True)

        (text,) = await away(coord, east, 0, inner_step=25)
        assert "island west is out of the run, and the others go on without it" in text
        assert "its loop called outer.finish() after inner step 25 of 100" in text
        assert (await coord.roster()).live == ["east"]
        refused = await coord.join("west", "b")
        assert refused.status == control.JOIN_STATUS_KICKED and "--undo" in refused.message
        assert not coord.membership.is_finished
        await coord.leave(east)
        assert coord.membership.is_finished

    tell(tmp_path, story, config=config_of(tmp_path))


def test_a_run_ends_with_the_last_island_that_leaves_early(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        for grant in await joined(coord):
            assert not coord.membership.is_finished
            await coord.leave(grant, is_early=True)
        assert coord.membership.is_finished and coord.coordinator.ended.is_set()

    tell(tmp_path, story, config=config_of(tmp_path))


def test_an_island_that_leaves_a_decoupled_run_early_does_not_end_it(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await joined(coord)
        await coord.leave(west, is_early=True)
        assert (await coord.roster()).live == ["east"]
        assert await away(coord, east, 0) == []
        await coord.leave(east, is_early=True)
        assert not coord.membership.is_finished
        (text,) = coord.coordinator.status().away
        assert "no island is at work" in text and "diloco stop HOST:PORT" in text
        assert (await coord.join("west", "b")).status == control.JOIN_STATUS_ACCEPTED
        assert list(coord.coordinator.status().away) == []

    tell(tmp_path, story, config=config_of(tmp_path, *ELASTIC))


def test_rounds_go_on_without_an_island_that_left_while_the_other_was_to_start_again(
    tmp_path: Path,
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await joined(coord)
        await coord.leave(east, exit_code=40)
        await coord.leave(west, is_early=True)
        await coord.join("east", "b")
        assert (await coord.roster()).live == ["east"]

    tell(tmp_path, story, config=config_of(tmp_path))
