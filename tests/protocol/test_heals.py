"""Wishes for an inner optimizer: of which checkpoint it is given, by whom, and why it is not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.island.exchange.heal import HealTalk, NotHealed
from diloco.protos import control_pb2 as control
from tests.coordinator_desk import Desk, tell
from tests.protocol.test_cuts import part_of
from tests.run_files import write_run

NAMES = ("east", "west")
WISH = control.HealWord(is_wished=True)


@pytest.fixture
def elastic(tmp_path: Path) -> Config:
    path = write_run(tmp_path / "run", dict.fromkeys(NAMES, ""))
    overrides = ["outer.preset=decoupled", "run.open=true", "run.max_islands=4"]
    return load_config(path, [*overrides, "coordinator.lease=2s"])


async def work(desk: Desk, *names: str) -> list[control.Grant]:
    grants = [(await desk.join(name)).grant for name in names]
    for grant in grants:
        await desk.report(grant, inner_step=5)
    return grants


def test_where_nobody_waits_it_is_of_the_cut_that_is_named_for_it(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(desk: Desk) -> None:
        east, west, guest = await work(desk, "east", "west", "guest")

        told = await desk.report(guest, heal=WISH)
        assert told.heal == control.HealAnswer(), "it waits for the cut"
        assert [(await desk.report(grant)).cut for grant in (east, west)] == [1, 1]
        assert (await desk.report(east)).donate == 0

        await desk.report(west, cut=part_of(1, 3, 3, at=9))
        told = await desk.report(guest, heal=WISH)
        assert (told.heal.donor, told.heal.checkpoint) == ("west", 1)
        await desk.report(east, cut=part_of(1, 3, 3, at=40))
        assert (await desk.report(guest, heal=WISH)).heal.donor == "west", "it has begun to give"
        assert [(await desk.report(grant)).donate for grant in (east, west)] == [0, 1]

        assert not (await desk.report(guest, cut=part_of(1, 3, 3))).HasField("heal")
        assert (await desk.report(west)).donate == 0, "nobody wishes any more"

    tell(tmp_path, story, config=elastic)


def test_of_several_the_one_that_has_trained_most_gives(tmp_path: Path, elastic: Config) -> None:
    async def story(desk: Desk) -> None:
        east, west, guest = await work(desk, "east", "west", "guest")
        await desk.report(guest, heal=WISH)
        await desk.report(east, cut=part_of(1, 3, 3, at=40))
        await desk.report(west, cut=part_of(1, 3, 3, at=9))

        assert (await desk.report(guest, heal=WISH)).heal.donor == "east"

    tell(tmp_path, story, config=elastic)


def test_a_donor_that_declines_is_followed_by_another_and_then_by_none(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(desk: Desk) -> None:
        east, west, guest = await work(desk, "east", "west", "guest")
        await desk.report(guest, heal=WISH)
        for grant in (east, west):
            await desk.report(grant, cut=part_of(1, 3, 3, at=9))
        await desk.report(guest, heal=WISH)

        word = control.HealWord(declined=1, reason="its disk is broken")
        assert (await desk.report(west, heal=word)).donate == 0
        assert (await desk.report(guest, heal=WISH)).heal.donor == "east"
        await desk.report(east, heal=control.HealWord(declined=1, reason="so is mine"))
        told = (await desk.report(guest, heal=WISH)).heal
        assert told.refusal == (
            "no island at work can give that of cut 1. east: so is mine; west: its disk is broken"
        )

    tell(tmp_path, story, config=elastic)


def test_a_donor_that_could_not_give_once_gives_when_it_is_asked_again(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        given: list[int] = []
        failures = [NotHealed("its manifest was refused: the disk is full")]

        async def give(checkpoint: int) -> None:
            if failures:
                raise failures.pop()
            given.append(checkpoint)

        east, west = await work(desk, *NAMES)
        for grant in (east, west):
            await desk.report(grant, inner_step=9, checkpoint_steps=[8])
        talk = HealTalk(give)

        async def told(start: str) -> control.HealAnswer:
            """Answer to the wish of a start of west, after east has reported twice."""
            west = (await desk.join("west", start)).grant
            await desk.report(west, heal=WISH)
            for _ in range(2):
                talk.hear(await desk.report(east, heal=talk.say()))
                await asyncio.sleep(0.1)
            return (await desk.report(west, heal=WISH)).heal

        assert "the disk is full" in (await told("b")).refusal
        assert (await told("c")).donor == "east"
        assert given == [8]

    tell(tmp_path, story)


def test_who_wishes_first_is_given_first_and_whole(tmp_path: Path, elastic: Config) -> None:
    async def story(desk: Desk) -> None:
        east, guest, other = await work(desk, "east", "guest", "other")

        async def cut(number: int, wishes: control.Grant) -> control.HealAnswer:
            """Have the cut that is named for a wish written by east, and kept by the syncer."""
            await desk.report(wishes, heal=WISH)
            await desk.report(east, cut=part_of(number, 3, 3))
            await desk.report(guest, cut=part_of(number), heal=WISH)
            await desk.report(other, cut=part_of(number), heal=WISH if wishes is other else None)
            status = [control.FragmentStatus(fragment_id=p, version=3) for p in (0, 1)]
            await desk.round_report(fragments=status, pinned_cut=number)
            return (await desk.report(wishes, heal=WISH)).heal

        assert (await cut(1, guest)).checkpoint == 1
        assert (await desk.report(east)).donate == 1
        assert (await cut(2, other)).checkpoint == 2
        assert (await desk.report(east)).donate == 1, "what is under way is not broken off"
        await desk.report(guest)
        assert (await desk.report(east)).donate == 2

    tell(tmp_path, story, config=elastic)


def test_a_donor_that_gives_of_another_checkpoint_is_asked_last(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(desk: Desk) -> None:
        east, west, guest, other = await work(desk, "east", "west", "guest", "other")

        async def cut(number: int, wishes: control.Grant) -> control.HealAnswer:
            await desk.report(wishes, heal=WISH)
            await desk.report(east, cut=part_of(number, 3, 3, at=40))
            await desk.report(west, cut=part_of(number, 3, 3, at=9))
            await desk.report(guest, cut=part_of(number), heal=WISH)
            await desk.report(other, cut=part_of(number), heal=WISH if wishes is other else None)
            told = (await desk.report(wishes, heal=WISH)).heal
            status = [control.FragmentStatus(fragment_id=p, version=3) for p in (0, 1)]
            await desk.round_report(fragments=status, pinned_cut=number)
            return told

        assert (await cut(1, guest)).donor == "east", "it has trained most"
        told = await cut(2, other)
        assert (told.donor, told.checkpoint) == ("west", 2)

    tell(tmp_path, story, config=elastic)


def test_two_wishes_of_one_checkpoint_have_one_donor(tmp_path: Path, elastic: Config) -> None:
    async def story(desk: Desk) -> None:
        east, west, *guests = await work(desk, "east", "west", "guest", "other")
        for guest in guests:
            await desk.report(guest, heal=WISH)
        await desk.report(east, cut=part_of(1, 3, 3, at=40))
        await desk.report(west, cut=part_of(1, 3, 3, at=9))
        told = [(await desk.report(guest, heal=WISH)).heal.donor for guest in guests]
        assert told == ["east", "east"], "it gives once"

    tell(tmp_path, story, config=elastic)


def test_a_donor_whose_lease_has_ended_gives_no_more(tmp_path: Path, elastic: Config) -> None:
    async def story(desk: Desk) -> None:
        east, guest = await work(desk, "east", "guest")
        await desk.report(guest, heal=WISH)
        await desk.report(east, cut=part_of(1, 3, 3))
        assert (await desk.report(guest, heal=WISH)).heal.donor == "east"

        await desk.leave(east, exit_code=1)  # as its supervisor says of one that was killed
        told = (await desk.report(guest, heal=WISH)).heal
        assert told.refusal == "no island at work can give that of cut 1. east: it is away"

    tell(tmp_path, story, config=elastic)


def test_who_is_alone_or_comes_at_the_end_hears_so(tmp_path: Path, elastic: Config) -> None:
    async def story(desk: Desk) -> None:
        (guest,) = await work(desk, "guest")
        told = (await desk.report(guest, heal=WISH)).heal
        assert told.refusal == "no other island is at work"
        (other,) = await work(desk, "east")
        assert (await desk.report(other, heal=WISH)).heal.refusal == "no other island is at work"

        await work(desk, "west")
        await desk.operate("stop", checkpoint="true")
        assert (await desk.report(guest, heal=WISH)).heal.refusal == "the run is stopping"

    tell(tmp_path, story, config=elastic)


def test_a_wish_that_was_heard_before_a_restart_is_heard_again(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(desk: Desk) -> None:
        east, guest = await work(desk, "east", "guest")
        await desk.report(guest, heal=WISH)
        await desk.report(east, cut=part_of(1, 3, 3))
        await desk.restart()

        told = (await desk.report(guest, heal=WISH)).heal
        assert (told.donor, told.checkpoint) == ("east", 1), "the cut is the same one"
        assert (await desk.report(east)).donate == 1

    tell(tmp_path, story, config=elastic)


def test_a_cut_is_not_forgotten_while_it_is_given_of(tmp_path: Path, elastic: Config) -> None:
    async def story(desk: Desk) -> None:
        east, guest = await work(desk, "east", "guest")
        await desk.report(guest, heal=WISH)
        for number in range(1, 19):
            await desk.report(east, cut=part_of(number, 3, 3))
            await desk.report(guest, cut=part_of(number), heal=WISH)
            status = [control.FragmentStatus(fragment_id=p, version=3) for p in (0, 1)]
            await desk.round_report(fragments=status, pinned_cut=number)
            desk.coordinator._keep(desk.membership.cut())
        assert 1 not in desk.membership.checkpoints

        assert (await desk.report(guest, heal=WISH)).heal.donor == "east"
        assert (await desk.report(east)).donate == 1
        await desk.report(guest)
        desk.coordinator._keep(desk.membership.cut())
        assert "cut/1" not in desk.journal.entries(), "nobody wishes any more"

    tell(tmp_path, story, config=elastic)


def test_in_a_scheduled_run_it_is_of_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        east, west = await work(desk, *NAMES)
        told = (await desk.report(west, heal=WISH)).heal
        assert told.refusal == "no run checkpoint is complete yet (checkpoint.every_inner_steps)"
        for grant in (east, west):
            await desk.report(grant, inner_step=9, checkpoint_steps=[4, 8])

        west = (await desk.join("west", "b")).grant
        told = (await desk.report(west, heal=WISH)).heal
        assert (told.donor, told.checkpoint) == ("east", 8)
        assert (await desk.report(east)).donate == 8

    tell(tmp_path, story)
