"""The end of a run in which islands come and go, at a real coordinator over a loopback network."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path

import pytest

from diloco.checkpoint.run_checkpoints import read_membership
from diloco.config.load import load_config
from diloco.coordinator.daemon import RETURN_S
from diloco.durable import DiskFull
from diloco.protos.control_pb2 import FragmentStatus
from tests.coordinator_in_memory import CoordinatorInMemory, tell
from tests.run_files import write_run


def test_an_island_that_starts_again_at_the_end_still_hears_of_it(tmp_path: Path) -> None:
    config = load_config(
        write_run(tmp_path / "run", {"east": "", "west": ""}), ["outer.preset=decoupled"]
    )

    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await coord.join("east"), await coord.join("west")
        watching = asyncio.create_task(coord.coordinator.watch())
        coord.merge_all()
        await coord.leave(west.grant, exit_code=1)  # it dies, and its supervisor starts it again
        await coord.leave(east.grant)
        await asyncio.sleep(RETURN_S / 2)
        assert not coord.coordinator.ended.is_set()

        again = await coord.join("west", "b")
        await asyncio.sleep(RETURN_S)
        assert not coord.coordinator.ended.is_set(), "it is at work"
        await coord.leave(again.grant)

        assert coord.coordinator.ended.is_set()
        watching.cancel()

    tell(tmp_path, story, config=config)


def test_an_island_that_stays_away_does_not_keep_a_run_from_its_end(tmp_path: Path) -> None:
    config = load_config(
        write_run(tmp_path / "run", {"east": "", "west": ""}), ["outer.preset=decoupled"]
    )

    async def story(coord: CoordinatorInMemory) -> None:
        east, _ = await coord.join("east"), await coord.join("west")
        watching = asyncio.create_task(coord.coordinator.watch())
        for _ in range(int(config.lease_s) + 2):  # its lease ends, the other's does not
            await asyncio.sleep(1.0)
            await coord.report(east.grant)
        coord.merge_all()
        await coord.leave(east.grant)
        assert not coord.coordinator.ended.is_set()

        await asyncio.sleep(RETURN_S)

        assert coord.coordinator.ended.is_set()
        watching.cancel()

    tell(tmp_path, story, config=config)


def test_an_island_that_says_that_it_has_finished_does_not_end_the_run_of_others(
    tmp_path: Path,
) -> None:
    config = load_config(
        write_run(tmp_path / "run", {"east": "", "west": ""}), ["outer.preset=decoupled"]
    )

    async def story(coord: CoordinatorInMemory) -> None:
        liar, _ = await coord.join("east"), await coord.join("west")
        watching = asyncio.create_task(coord.coordinator.watch())
        for p, merged in enumerate((config.total_tokens, 1)):
            status = FragmentStatus(fragment_id=p, version=3, merged_tokens=merged)
            coord.coordinator.fragment_stands(status)
        await coord.leave(liar.grant)
        await asyncio.sleep(config.lease_s + RETURN_S + 2)  # the other cannot be reached for long

        assert not coord.coordinator.ended.is_set()
        coord.merge_all()
        await asyncio.sleep(2)
        assert coord.coordinator.ended.is_set()
        watching.cancel()

    tell(tmp_path, story, config=config)


@pytest.mark.parametrize("restarts", [False, True])
def test_who_comes_first_and_says_that_it_has_finished_ends_nothing(
    tmp_path: Path, restarts: bool
) -> None:
    config = load_config(
        write_run(tmp_path / "run", {"east": "", "west": ""}), ["outer.preset=decoupled"]
    )

    async def story(coord: CoordinatorInMemory) -> None:
        await coord.leave((await coord.join("east")).grant)  # before anything is founded
        if restarts:
            await coord.restart()
        watching = asyncio.create_task(coord.coordinator.watch())
        await asyncio.sleep(RETURN_S + 2)
        assert not coord.coordinator.ended.is_set()
        assert not coord.membership.is_finished

        honest = await coord.join("west")
        header = {"timeline": 0, "version": 1, "merged_tokens": config.total_tokens}
        for p in range(2):
            await coord.round_report(record={**header, "fragment_id": p})
        await coord.restart()  # it knows from its index that all is merged
        await coord.leave(honest.grant)
        assert coord.membership.is_finished
        watching.cancel()

    tell(tmp_path, story, config=config)


def test_a_syncer_that_serves_an_older_version_again_does_not_keep_a_run_from_its_end(
    tmp_path: Path,
) -> None:
    config = load_config(
        write_run(tmp_path / "run", {"east": "", "west": ""}), ["outer.preset=decoupled"]
    )

    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await coord.join("east"), await coord.join("west")
        coord.merge_all()
        older = FragmentStatus(fragment_id=1, version=0, damage="torn", lost_version=1)
        await coord.round_report(fragments=[older])
        await coord.leave(east.grant)
        await coord.leave(west.grant)

        assert coord.coordinator.ended.is_set()

    tell(tmp_path, story, config=config)


def test_a_run_that_has_finished_is_known_to_have_where_no_syncer_answers(tmp_path: Path) -> None:
    config = load_config(
        write_run(tmp_path / "run", {"east": "", "west": ""}), ["outer.preset=decoupled"]
    )

    async def story(coord: CoordinatorInMemory) -> None:
        east = await coord.join("east")
        coord.merge_all()  # by versions that the index of this timeline does not have
        assert not read_membership(config, coord.journal).is_finished
        await coord.leave(east.grant)

        assert read_membership(config, coord.journal).is_finished
        coord.journal.write([("timeline", json.dumps({"timeline": 1, "resume_step": 0}))])
        assert not read_membership(config, coord.journal).is_finished, "another timeline"

    tell(tmp_path, story, config=config)


def test_a_full_disk_does_not_end_the_watch_and_what_it_found_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(
        write_run(tmp_path / "run", {"east": "", "west": ""}), ["outer.preset=decoupled"]
    )

    async def full(*_: object, **__: object) -> int:
        raise DiskFull(errno.ENOSPC, "No space left on device")

    async def story(coord: CoordinatorInMemory) -> None:
        east, _ = await coord.join("east"), await coord.join("west")
        watching = asyncio.create_task(coord.coordinator.watch())
        with monkeypatch.context() as patch:
            patch.setattr(coord.journal, "commit", full)
            for _ in range(int(config.lease_s) + 5):  # west's lease ends
                await asyncio.sleep(1.0)
                await coord.report(east.grant)
            assert not watching.done()
            assert coord.membership.members.live == ("east", "west"), "it cannot be written down"

        await asyncio.sleep(2.0)

        assert coord.membership.members.live == ("east",)
        watching.cancel()

    tell(tmp_path, story, config=config)
