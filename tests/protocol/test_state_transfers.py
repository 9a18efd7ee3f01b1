"""Requests for an inner optimizer: of which checkpoint it is given, by whom, and why it is not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.island.exchange.state_transfer import NotTransferred, TransferReports
from diloco.protos import control_pb2 as control
from tests.coordinator_in_memory import CoordinatorInMemory, tell
from tests.protocol.test_cuts import part_of
from tests.run_files import write_run

NAMES = ("east", "west")
REQUEST = control.TransferPart(is_requested=True)


@pytest.fixture
def elastic(tmp_path: Path) -> Config:
    path = write_run(tmp_path / "run", dict.fromkeys(NAMES, ""))
    overrides = ["outer.preset=decoupled", "run.open=true", "run.max_islands=4"]
    return load_config(path, [*overrides, "coordinator.lease=2s"])


async def work(coord: CoordinatorInMemory, *names: str) -> list[control.Grant]:
    grants = [(await coord.join(name)).grant for name in names]
    for grant in grants:
        await coord.report(grant, inner_step=5)
    return grants


def test_where_nobody_waits_it_is_of_the_cut_that_is_named_for_it(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west, guest = await work(coord, "east", "west", "guest")

        told = await coord.report(guest, transfer=REQUEST)
        assert told.transfer == control.TransferAnswer(), "it waits for the cut"
        assert [(await coord.report(grant)).cut for grant in (east, west)] == [1, 1]
        assert (await coord.report(east)).provide == 0

        await coord.report(west, cut=part_of(1, 3, 3, at=9))
        told = await coord.report(guest, transfer=REQUEST)
        assert (told.transfer.source, told.transfer.checkpoint) == ("west", 1)
        await coord.report(east, cut=part_of(1, 3, 3, at=40))
        assert (await coord.report(guest, transfer=REQUEST)).transfer.source == "west", (
            "it has begun to give"
        )
        assert [(await coord.report(grant)).provide for grant in (east, west)] == [0, 1]
        named = control.StateTransfer(source="west", island="guest", checkpoint=1)
        assert list((await coord.told_to_syncer()).transfers) == [named]

        assert not (await coord.report(guest, cut=part_of(1, 3, 3))).HasField("transfer")
        assert (await coord.report(west)).provide == 0, "nobody asking any more"
        assert not (await coord.told_to_syncer()).transfers

    tell(tmp_path, story, config=elastic)


def test_of_several_the_one_that_has_trained_most_gives(tmp_path: Path, elastic: Config) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west, guest = await work(coord, "east", "west", "guest")
        await coord.report(guest, transfer=REQUEST)
        await coord.report(east, cut=part_of(1, 3, 3, at=40))
        await coord.report(west, cut=part_of(1, 3, 3, at=9))

        assert (await coord.report(guest, transfer=REQUEST)).transfer.source == "east"

    tell(tmp_path, story, config=elastic)


def test_a_source_that_declines_is_followed_by_another_and_then_by_none(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west, guest = await work(coord, "east", "west", "guest")
        await coord.report(guest, transfer=REQUEST)
        for grant in (east, west):
            await coord.report(grant, cut=part_of(1, 3, 3, at=9))
        await coord.report(guest, transfer=REQUEST)

        word = control.TransferPart(declined=1, reason="its disk is broken")
        assert (await coord.report(west, transfer=word)).provide == 0
        assert (await coord.report(guest, transfer=REQUEST)).transfer.source == "east"
        await coord.report(east, transfer=control.TransferPart(declined=1, reason="so is mine"))
        told = (await coord.report(guest, transfer=REQUEST)).transfer
        assert told.refusal == (
            "no island at work can give that of cut 1. east: so is mine; west: its disk is broken"
        )

    tell(tmp_path, story, config=elastic)


def test_a_source_that_could_not_give_once_gives_when_it_is_asked_again(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        given: list[int] = []
        failures = [NotTransferred("its manifest was refused: the disk is full")]

        async def give(checkpoint: int) -> None:
            if failures:
                raise failures.pop()
            given.append(checkpoint)

        east, west = await work(coord, *NAMES)
        for grant in (east, west):
            await coord.report(grant, inner_step=9, checkpoint_steps=[8])
        reports = TransferReports(give)

        async def told(start: str) -> control.TransferAnswer:
            """Answer to the request of a start of west, after east has reported twice."""
            west = (await coord.join("west", start)).grant
            await coord.report(west, transfer=REQUEST)
            for _ in range(2):
                reports.set_answer(await coord.report(east, transfer=reports.report()))
                await asyncio.sleep(0.1)
            return (await coord.report(west, transfer=REQUEST)).transfer

        assert "the disk is full" in (await told("b")).refusal
        assert (await told("c")).source == "east"
        assert given == [8]

    tell(tmp_path, story)


def test_who_asks_first_is_given_first_and_whole(tmp_path: Path, elastic: Config) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, guest, other = await work(coord, "east", "guest", "other")

        async def cut(number: int, asking: control.Grant) -> control.TransferAnswer:
            """Have the cut that is named for a request written by east, and kept by the syncer."""
            await coord.report(asking, transfer=REQUEST)
            await coord.report(east, cut=part_of(number, 3, 3))
            await coord.report(guest, cut=part_of(number), transfer=REQUEST)
            await coord.report(
                other, cut=part_of(number), transfer=REQUEST if asking is other else None
            )
            status = [control.FragmentStatus(fragment_id=p, version=3) for p in (0, 1)]
            await coord.round_report(fragments=status, pinned_cut=number)
            return (await coord.report(asking, transfer=REQUEST)).transfer

        assert (await cut(1, guest)).checkpoint == 1
        assert (await coord.report(east)).provide == 1
        assert (await cut(2, other)).checkpoint == 2
        assert (await coord.report(east)).provide == 1, "what is under way is not broken off"
        await coord.report(guest)
        assert (await coord.report(east)).provide == 2

    tell(tmp_path, story, config=elastic)


def test_a_source_that_gives_of_another_checkpoint_is_asked_last(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west, guest, other = await work(coord, "east", "west", "guest", "other")

        async def cut(number: int, asking: control.Grant) -> control.TransferAnswer:
            await coord.report(asking, transfer=REQUEST)
            await coord.report(east, cut=part_of(number, 3, 3, at=40))
            await coord.report(west, cut=part_of(number, 3, 3, at=9))
            await coord.report(guest, cut=part_of(number), transfer=REQUEST)
            await coord.report(
                other, cut=part_of(number), transfer=REQUEST if asking is other else None
            )
            told = (await coord.report(asking, transfer=REQUEST)).transfer
            status = [control.FragmentStatus(fragment_id=p, version=3) for p in (0, 1)]
            await coord.round_report(fragments=status, pinned_cut=number)
            return told

        assert (await cut(1, guest)).source == "east", "it has trained most"
        told = await cut(2, other)
        assert (told.source, told.checkpoint) == ("west", 2)

    tell(tmp_path, story, config=elastic)


def test_two_requests_of_one_checkpoint_have_one_source(tmp_path: Path, elastic: Config) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west, *guests = await work(coord, "east", "west", "guest", "other")
        for guest in guests:
            await coord.report(guest, transfer=REQUEST)
        await coord.report(east, cut=part_of(1, 3, 3, at=40))
        await coord.report(west, cut=part_of(1, 3, 3, at=9))
        told = [(await coord.report(guest, transfer=REQUEST)).transfer.source for guest in guests]
        assert told == ["east", "east"], "it gives once"

    tell(tmp_path, story, config=elastic)


def test_a_source_whose_lease_has_ended_gives_no_more(tmp_path: Path, elastic: Config) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, guest = await work(coord, "east", "guest")
        await coord.report(guest, transfer=REQUEST)
        await coord.report(east, cut=part_of(1, 3, 3))
        assert (await coord.report(guest, transfer=REQUEST)).transfer.source == "east"

        await coord.leave(east, exit_code=1)  # as its supervisor says of one that was killed
        told = (await coord.report(guest, transfer=REQUEST)).transfer
        assert told.refusal == "no island at work can give that of cut 1. east: it is away"

    tell(tmp_path, story, config=elastic)


def test_who_is_alone_or_comes_at_the_end_hears_so(tmp_path: Path, elastic: Config) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        (guest,) = await work(coord, "guest")
        told = (await coord.report(guest, transfer=REQUEST)).transfer
        assert told.refusal == "no other island is at work"
        (other,) = await work(coord, "east")
        assert (
            await coord.report(other, transfer=REQUEST)
        ).transfer.refusal == "no other island is at work"

        await work(coord, "west")
        await coord.operate("stop")
        assert (
            await coord.report(guest, transfer=REQUEST)
        ).transfer.refusal == "the run is stopping"

    tell(tmp_path, story, config=elastic)


def test_a_request_from_before_a_restart_is_made_again(tmp_path: Path, elastic: Config) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, guest = await work(coord, "east", "guest")
        await coord.report(guest, transfer=REQUEST)
        await coord.report(east, cut=part_of(1, 3, 3))
        await coord.restart()

        told = (await coord.report(guest, transfer=REQUEST)).transfer
        assert (told.source, told.checkpoint) == ("east", 1), "the cut is the same one"
        assert (await coord.report(east)).provide == 1

    tell(tmp_path, story, config=elastic)


def test_a_cut_is_not_forgotten_while_it_is_given_of(tmp_path: Path, elastic: Config) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, guest = await work(coord, "east", "guest")
        await coord.report(guest, transfer=REQUEST)
        for number in range(1, 19):
            await coord.report(east, cut=part_of(number, 3, 3))
            await coord.report(guest, cut=part_of(number), transfer=REQUEST)
            status = [control.FragmentStatus(fragment_id=p, version=3) for p in (0, 1)]
            await coord.round_report(fragments=status, pinned_cut=number)
            await coord.change(lambda m: m.cut())
        assert 1 not in coord.membership.checkpoints

        assert (await coord.report(guest, transfer=REQUEST)).transfer.source == "east"
        assert (await coord.report(east)).provide == 1
        await coord.report(guest)
        await coord.change(lambda m: m.cut())
        assert "cut/1" not in coord.journal.entries(), "nobody asking any more"

    tell(tmp_path, story, config=elastic)


def test_in_a_scheduled_run_it_is_of_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await work(coord, *NAMES)
        told = (await coord.report(west, transfer=REQUEST)).transfer
        assert told.refusal == "no run checkpoint is complete yet (checkpoint.every_inner_steps)"
        for grant in (east, west):
            await coord.report(grant, inner_step=9, checkpoint_steps=[4, 8])

        west = (await coord.join("west", "b")).grant
        told = (await coord.report(west, transfer=REQUEST)).transfer
        assert (told.source, told.checkpoint) == ("east", 8)
        assert (await coord.report(east)).provide == 8

    tell(tmp_path, story)
