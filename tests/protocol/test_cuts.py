"""Cuts: who owes a part, when they are named, and what a resume makes of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.protocol.run.admission import Entries
from diloco.protocol.run.cut_patience import MOST_WRITING
from diloco.protocol.run.cuts import Cuts, Part
from diloco.protos import control_pb2 as control
from diloco.transport.errors import TransportError
from tests.coordinator_in_memory import CoordinatorInMemory, tell
from tests.run_files import write_run

NAMES = ("east", "west")


@pytest.fixture
def elastic(tmp_path: Path) -> Config:
    path = write_run(tmp_path / "run", dict.fromkeys(NAMES, ""))
    return load_config(path, ["outer.preset=decoupled", "checkpoint.every_tokens=500"])


def part_of(number: int, *versions: int, at: int = 7, **drawn: int) -> control.CutPart:
    text = {
        slot.removeprefix("slot"): {"drawn": {"web": count}, "cursor": {}}
        for slot, count in drawn.items()
    }
    return control.CutPart(
        number=number, versions=versions, inner_step=at, text_json=json.dumps(text)
    )


def told(**drawn: int) -> str:
    slots = {
        slot.removeprefix("slot"): {
            "grant": 0,
            "is_final": False,
            "position": {"drawn": {"web": count}, "cursor": {}},
        }
        for slot, count in drawn.items()
    }
    return json.dumps({"revision": 0, "slots": slots})


def merged(tokens: int) -> list[control.FragmentStatus]:
    return [
        control.FragmentStatus(fragment_id=p, version=4, merged_tokens=tokens + p) for p in (0, 1)
    ]


async def syncer_merged(coord: CoordinatorInMemory, tokens: int, **fields: Any) -> None:
    """Have the syncer report what is merged by now, and the cut named that is due."""
    await coord.round_report(coord.membership.timeline, fragments=merged(tokens), **fields)
    await coord.coordinator._cut_when_due()


async def asked(coord: CoordinatorInMemory, grant: control.Grant, tokens: int) -> int:
    """Give the cut that an island is asked for once so many tokens are merged."""
    await syncer_merged(coord, tokens)
    return (await coord.report(grant)).cut


async def told_to_syncer(coord: CoordinatorInMemory, **fields: Any) -> control.RoundReportReply:
    await coord.round_report(coord.membership.timeline, fragments=merged(600), **fields)
    return await coord.told_to_syncer()


async def stop(coord: CoordinatorInMemory) -> None:
    assert (await coord.operate("stop")).is_done


def test_a_stop_is_a_cut_after_which_everybody_leaves(tmp_path: Path, elastic: Config) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grants = [(await coord.join(name)).grant for name in NAMES]
        assert (await coord.report(grants[0])).cut == 0
        await stop(coord)
        for grant in grants:
            told = await coord.report(grant)
            assert (told.cut, told.is_last_cut, told.hold, told.drain) == (1, True, False, False)
        assert "already" in (await coord.operate("stop")).message

        told = await coord.report(grants[0], cut=part_of(1, 3, 5))
        assert told.cut == 0, "it has its part"
        await coord.leave(grants[0], is_stopped=True)
        assert (await told_to_syncer(coord)).cut == 0, "west has none yet"
        await coord.restart()
        await coord.report(grants[1], cut=part_of(1, 4, 2, at=3))
        asked = await told_to_syncer(coord)
        assert (asked.cut, list(asked.cut_versions)) == (1, [4, 5])
        assert (await coord.join("east", "b")).status == control.JOIN_STATUS_RUN_STOPPED
        await told_to_syncer(coord, pinned_cut=1)
        assert coord.membership.checkpoints == (1,)
        assert not coord.coordinator.ended.is_set(), "west has not left"
        await coord.leave(grants[1], is_stopped=True)
        assert (coord.coordinator.ended.is_set(), coord.state()) == (True, "stopped")

    tell(tmp_path, story, config=elastic)


def test_who_resumes_before_there_is_a_checkpoint_goes_on_with_the_last_cut_as_any_other(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grants = [(await coord.join(name)).grant for name in NAMES]
        await stop(coord)
        await coord.report(grants[0], cut=part_of(1, 3, 5))
        await coord.leave(grants[0], is_stopped=True)

        coord.journal.write(coord.membership.stop_taken_back())
        await coord.restart()

        assert not coord.membership.is_stopping
        assert (await coord.join("east", "b")).status == control.JOIN_STATUS_ACCEPTED
        told = await coord.report(grants[1])
        assert (told.cut, told.is_last_cut) == (1, False)
        await coord.report(grants[1], cut=part_of(1, 4, 2))
        await told_to_syncer(coord, pinned_cut=1)
        assert coord.membership.checkpoints == (1,)
        assert coord.state() == "running"

    tell(tmp_path, story, config=elastic)


def test_a_stop_of_which_every_island_has_its_part_is_not_taken_back(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grants = [(await coord.join(name)).grant for name in NAMES]
        await stop(coord)
        for grant in grants:
            await coord.report(grant, cut=part_of(1, 3, 5))
            await coord.leave(grant, is_stopped=True)
        assert coord.membership.cuts[1].is_taken

        assert coord.membership.stop_taken_back() == ()

        await coord.restart()
        await told_to_syncer(coord)
        await told_to_syncer(coord, pinned_cut=1)
        assert coord.membership.checkpoints == (1,)
        assert coord.state() == "stopped"

    tell(tmp_path, story, config=elastic)


def test_who_lapses_leaves_the_cut_and_takes_what_is_published_on_a_resume(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = [(await coord.join(name)).grant for name in NAMES]
        await coord.report(west, inner_step=30, position_json=told(slot1=17))
        await stop(coord)
        await coord.report(west, inner_step=30, position_json=told(slot1=60))
        await coord.report(east, cut=part_of(1, 3, 5, slot0=40))
        await coord.leave(west, exit_code=40)  # it has died
        assert (await told_to_syncer(coord)).cut == 1
        await told_to_syncer(coord, pinned_cut=1)
        await coord.leave(east, is_stopped=True)
        assert coord.membership.is_stopped

        await coord.restart(resume_step=1)
        with_part, without = await coord.join("east", "b"), await coord.join("west", "b")
        assert (with_part.is_resumed, with_part.resume_step) == (True, 1)
        assert with_part.last_inner_step == 7, "where it stood at the cut"
        assert (without.is_resumed, without.last_inner_step) == (False, 30)
        claims = [json.loads(reply.claims_json)["slots"] for reply in (with_part, without)]
        drawn = {slot: claim["position"]["drawn"] for of in claims for slot, claim in of.items()}
        assert drawn == {"0": {"web": 40}, "1": {"web": 17}}, "as was known at the naming"

        assert (await coord.join("east", "b")).is_resumed, "the same start asks again"
        again = await coord.join("east", "c")
        assert not again.is_resumed, "what its first start has contributed counts"

    tell(tmp_path, story, config=elastic)


def test_a_resume_is_not_followed_by_a_cut_of_what_was_cut_before(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grants = [(await coord.join(name)).grant for name in NAMES]

        async def taken(number: int, tokens: int) -> bool:
            await syncer_merged(coord, tokens)
            for grant in grants:
                if (await coord.report(grant)).cut != number:
                    return False
                await coord.report(grant, cut=part_of(number, 1, 1))
            await told_to_syncer(coord)
            await told_to_syncer(coord, pinned_cut=number)
            return True

        assert await taken(1, 600)
        await stop(coord)
        assert await taken(2, 600)
        for grant in grants:
            await coord.leave(grant, is_stopped=True)

        await coord.restart(resume_step=2)
        grants[:] = [(await coord.join(name, "b")).grant for name in NAMES]
        assert not await taken(3, 600), "nothing was merged since"
        await coord.restart()
        await coord.change(lambda m: m.cut())  # for a state transfer, before a syncer has reported
        assert await taken(3, 700)
        assert not await taken(4, 700)
        assert await taken(4, 1100)

        await coord.restart(resume_step=2)
        grants[:] = [(await coord.join(name, "c")).grant for name in NAMES]
        assert await taken(5, 1000), "what was cut in an abandoned timeline is cut again"

    tell(tmp_path, story, config=elastic)


def test_a_resume_makes_no_cut_of_what_was_merged_while_the_last_one_was_taken(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grants = [(await coord.join(name)).grant for name in NAMES]

        async def newest_cut(tokens: int, **fields: Any) -> int:
            await syncer_merged(coord, tokens, **fields)
            cut = coord.membership.cuts.newest(coord.membership.timeline)
            return 0 if cut is None else cut.number

        await newest_cut(480)
        await stop(coord)
        for grant in grants:
            await coord.report(grant, cut=part_of(1, 4, 4))
        await newest_cut(520)  # rounds under way have come to their end
        await newest_cut(520, pinned_cut=1)
        for grant in grants:
            await coord.leave(grant, is_stopped=True)

        await coord.restart(resume_step=1)
        await coord.join("east", "b")
        assert [await newest_cut(tokens) for tokens in (520, 999, 1000)] == [0, 0, 2]

    tell(tmp_path, story, config=elastic)


def test_an_island_that_thaws_in_a_stop_that_goes_on_without_it_leaves(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = [(await coord.join(name)).grant for name in NAMES]
        await stop(coord)
        await coord.change(lambda m: m.members.lapsed(["west"]))
        await coord.report(east, cut=part_of(1, 3, 5))

        thawed = await coord.report(west)

        assert (thawed.drain, thawed.cut, thawed.stop) == (True, 0, False)
        assert not (await coord.report(east)).drain, "it has its part, and leaves with that"
        await told_to_syncer(coord)
        await told_to_syncer(coord, pinned_cut=1)
        await coord.leave(east, is_stopped=True)
        assert not coord.coordinator.ended.is_set(), "west merges what is outstanding"
        await coord.leave(west)
        assert (coord.coordinator.ended.is_set(), coord.state()) == (True, "stopped")

    tell(tmp_path, story, config=elastic)


def test_a_part_that_holds_what_its_syncer_has_lost_does_not_count(
    tmp_path: Path, elastic: Config
) -> None:
    """The syncer has version 4 of both fragments; nobody waits for what cannot be."""

    async def story(coord: CoordinatorInMemory) -> None:
        grants = [(await coord.join(name)).grant for name in NAMES]

        assert await asked(coord, grants[0], 500) == 1
        await coord.report(grants[0], cut=part_of(1, 4, 4))
        await coord.report(grants[1], cut=part_of(1, 4, 5))
        assert list((await told_to_syncer(coord)).cut_versions) == [4, 5], "it may be on its way"
        assert list((await told_to_syncer(coord)).cut_versions) == [4, 4]
        assert list(coord.membership.cuts[1].parts) == ["east"]
        await told_to_syncer(coord, pinned_cut=1)
        assert coord.membership.checkpoints == (1,)

        assert await asked(coord, grants[0], 1000) == 2
        for grant in grants:
            await coord.report(grant, cut=part_of(2, 9, 4))
        await told_to_syncer(coord)
        await told_to_syncer(coord)
        assert coord.membership.cuts[2].is_void
        assert await asked(coord, grants[0], 1500) == 3

    tell(tmp_path, story, config=elastic)


def test_a_cut_is_named_after_so_many_tokens_and_one_at_a_time(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grants = [(await coord.join(name)).grant for name in NAMES]

        assert [await asked(coord, grants[0], tokens) for tokens in (499, 500, 1200)] == [0, 1, 1]
        for grant in grants:
            told = await coord.report(grant, cut=part_of(1, 1, 1))
            assert not told.is_last_cut
        assert await asked(coord, grants[0], 1200) == 0, "the syncer's part is missing"
        await told_to_syncer(coord, pinned_cut=1)
        late = [await asked(coord, grants[0], tokens) for tokens in (1200, 1300)]
        assert late == [2, 2], "of 1000"
        for grant in grants:
            await coord.report(grant, cut=part_of(2))  # no room on their disks
        assert coord.membership.cuts[2].is_void and coord.membership.checkpoints == (1,)
        assert [await asked(coord, grants[0], 1499), await asked(coord, grants[0], 1500)] == [0, 3]

    tell(tmp_path, story, config=elastic)


@pytest.mark.parametrize("is_stop", [True, False])
def test_an_island_that_reports_and_hangs_keeps_no_cut_from_its_end(
    is_stop: bool, tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = [(await coord.join(name)).grant for name in NAMES]
        await coord.change(lambda m: m.cut(is_last=is_stop))
        watching = asyncio.create_task(coord.coordinator.watch())

        async def hear(seconds: int, *grants: control.Grant) -> None:
            for _ in range(seconds // 5):
                await asyncio.sleep(5.0)
                for grant in grants:
                    await coord.report(grant)

        await hear(100, east, west)
        await coord.report(east, cut=part_of(1, 3, 5))
        if is_stop:
            await coord.leave(east, is_stopped=True)
        message = coord.coordinator.status().message
        assert message.endswith("waits for west"), message
        at_work = [west] if is_stop else [east, west]
        await hear(int(elastic.transport.unreachable.seconds) - 10, *at_work)
        assert coord.membership.cuts[1].owing == ("west",)

        await hear(20, *at_work)

        assert coord.membership.cuts[1].is_taken
        await told_to_syncer(coord)
        await told_to_syncer(coord, pinned_cut=1)
        await asyncio.sleep(2.0)
        assert coord.membership.checkpoints == (1,)
        assert coord.coordinator.ended.is_set() == is_stop
        assert (await coord.report(west)).drain == is_stop
        watching.cancel()

    tell(tmp_path, story, config=elastic)


@pytest.mark.parametrize("is_stop", [True, False])
def test_who_writes_its_part_is_waited_for_however_long_that_takes(
    is_stop: bool, tmp_path: Path, elastic: Config
) -> None:
    """West hangs, and the cut goes on without it, while east writes."""

    async def story(coord: CoordinatorInMemory) -> None:
        east, west = [(await coord.join(name)).grant for name in NAMES]
        await coord.change(lambda m: m.cut(is_last=is_stop))
        watching = asyncio.create_task(coord.coordinator.watch())
        writing = control.CutPart(number=1, is_being_written=True)
        for _ in range(2 * int(elastic.transport.unreachable.seconds) // 5):
            await asyncio.sleep(5.0)
            told = await coord.report(east, cut=writing)
            assert (told.cut, told.is_last_cut, told.drain) == (1, is_stop, False)
            await coord.report(west)
        assert coord.membership.cuts[1].owing == ("east",)
        message = coord.coordinator.status().message
        assert message.endswith("waits for east (writes its part)"), message

        await coord.report(east, cut=part_of(1, 3, 5))
        await told_to_syncer(coord)
        await told_to_syncer(coord, pinned_cut=1)
        assert coord.membership.checkpoints == (1,)
        assert coord.coordinator.status().message.endswith("waits for east") == is_stop
        watching.cancel()

    tell(tmp_path, story, config=elastic)


@pytest.mark.parametrize("is_stop", [True, False])
def test_a_part_that_is_said_to_be_written_for_ever_holds_up_neither_checkpoints_nor_a_stop(
    is_stop: bool, tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = [(await coord.join(name)).grant for name in NAMES]
        await coord.change(lambda m: m.cut(is_last=is_stop))
        watching = asyncio.create_task(coord.coordinator.watch())
        writing = control.CutPart(number=1, is_being_written=True)
        for _ in range((MOST_WRITING + 2) * int(elastic.transport.unreachable.seconds) // 5):
            await asyncio.sleep(5.0)
            await coord.report(east, cut=part_of(1, 3, 5))
            await coord.report(west, cut=writing)

        assert coord.membership.cuts[1].is_taken
        assert [*coord.membership.cuts[1].parts] == ["east"]
        watching.cancel()

    tell(tmp_path, story, config=elastic)


def test_who_joins_meanwhile_is_not_asked_and_takes_what_is_published_on_a_resume(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east = (await coord.join("east")).grant
        await coord.change(lambda m: m.cut())
        west = (await coord.join("west")).grant
        assert (await coord.report(west)).cut == 0
        assert not (await coord.report(west, cut=part_of(1, 9, 9))).cut
        await coord.report(east, cut=part_of(1, 3, 5))
        assert [*coord.membership.cuts[1].parts] == ["east"]
        await told_to_syncer(coord, pinned_cut=1)

        await coord.restart(resume_step=1)
        assert not (await coord.join("west", "b")).is_resumed
        assert (await coord.join("east", "b")).is_resumed

    tell(tmp_path, story, config=elastic)


def test_a_taken_cut_is_asked_for_until_it_is_kept_who_starts_again(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grant = (await coord.join("east")).grant
        await coord.change(lambda m: m.cut())
        await coord.report(grant, cut=part_of(1, 3, 5))
        for _ in range(2):  # what a syncer that started again has kept, it does not say
            asked = await told_to_syncer(coord)
            assert (asked.cut, list(asked.cut_versions)) == (1, [3, 5])
            await coord.restart()
        assert not coord.membership.cuts[1].is_complete
        await told_to_syncer(coord, pinned_cut=1)
        await coord.restart()
        assert coord.membership.checkpoints == (1,)
        assert (await told_to_syncer(coord)).cut == 0

    tell(tmp_path, story, config=elastic)


def test_old_cuts_are_forgotten_but_for_those_that_a_run_can_go_back_to(
    tmp_path: Path, elastic: Config
) -> None:
    def remembered(coord: CoordinatorInMemory) -> list[int]:
        keys = [key.partition("/") for key in coord.journal.entries()]
        return sorted(int(number) for kind, _, number in keys if kind == "cut")

    async def one(
        coord: CoordinatorInMemory, grant: control.Grant, number: int, *, has_part: bool
    ) -> None:
        await coord.change(lambda m: m.cut())
        part = part_of(number, 1, 1, slot0=number) if has_part else part_of(number)
        await coord.report(grant, cut=part)
        if has_part:
            await told_to_syncer(coord, pinned_cut=number)

    async def story(coord: CoordinatorInMemory) -> None:
        grant = (await coord.join("east")).grant
        for number in range(1, 13):
            await one(coord, grant, number, has_part=number in (3, 5))
        assert coord.membership.checkpoints == (3, 5)
        assert remembered(coord) == [3, 5, 9, 10, 11, 12]

        await coord.restart(resume_step=3)
        assert coord.membership.cuts[3].parts["east"].text["0"]["drawn"] == {"web": 3}
        grant = (await coord.join("east", "b")).grant
        for number in range(13, 30):
            await one(coord, grant, number, has_part=True)
        assert remembered(coord) == [3, 26, 27, 28, 29], "an island of this timeline may yet need 3"

    tell(tmp_path, story, config=elastic)


def test_a_cut_needs_the_word_of_the_syncers_of_all_fragments(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grants = [(await coord.join(name)).grant for name in NAMES]

        async def says(syncer_id: int, **fields: Any) -> None:
            own = coord.membership.assignment.fragments[syncer_id]
            fragments = [status for status in merged(600) if status.fragment_id in own]
            await coord.round_report(syncer_id=syncer_id, fragments=fragments, **fields)
            await coord.coordinator._cut_when_due()

        await says(1)
        assert (await coord.report(grants[0])).cut == 0, "the other may have merged less"
        await says(0)
        for grant in grants:
            assert (await coord.report(grant)).cut == 1
            await coord.report(grant, cut=part_of(1, 3, 5))
        assert list((await coord.told_to_syncer()).cut_versions) == [3, 5]
        await says(0, pinned_cut=1)
        await says(0, pinned_cut=1)
        await says(1)
        assert coord.membership.checkpoints == (), "one of two keeps its fragment"

        await coord.restart()
        await says(1, pinned_cut=1)
        assert coord.membership.checkpoints == (), "what was said to another start is said again"
        await says(0, pinned_cut=1)
        assert coord.membership.checkpoints == (1,)

    tell(tmp_path, story, config=elastic, num_syncers=2)


def test_a_stop_of_which_nobody_has_a_part_is_taken_back(tmp_path: Path, elastic: Config) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        (grant,) = [(await coord.join("east")).grant]
        await stop(coord)
        await coord.report(grant, cut=part_of(1))
        await coord.leave(grant, exit_code=1)
        await coord.coordinator._end_if_over()
        assert coord.coordinator.ended.is_set()
        assert "was aborted" in coord.membership.fatal_reason

        await coord.restart()  # with the command that it names
        assert not coord.membership.is_stopping
        assert (await coord.join("east", "b")).status == control.JOIN_STATUS_ACCEPTED
        await coord.coordinator._end_if_over()
        assert not coord.coordinator.ended.is_set()

    tell(tmp_path, story, config=elastic)


async def void_stop(coord: CoordinatorInMemory) -> tuple[control.Grant, control.Grant]:
    """Stop: east leaves with its part, west stays; a syncer has lost what the parts hold."""
    east, west = [(await coord.join(name)).grant for name in NAMES]
    await stop(coord)
    for grant in (east, west):
        await coord.report(grant, cut=part_of(1, 9, 9))
    await coord.leave(east, is_stopped=True)
    for _ in range(2):
        await told_to_syncer(coord)
    assert coord.membership.cuts[1].is_void
    return east, west


def test_a_stop_that_came_to_nothing_does_not_wait_for_an_island_that_hangs(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        _, west = await void_stop(coord)
        watching = asyncio.create_task(coord.coordinator.watch())
        for _ in range(int(elastic.transport.unreachable.seconds) // 5 - 2):
            await asyncio.sleep(5.0)
            await coord.report(west)
            message = coord.coordinator.status().message
            assert message == "the stop with a checkpoint waits for west"
        await asyncio.sleep(12.0)
        assert coord.coordinator.ended.is_set()
        assert "was aborted" in coord.membership.fatal_reason
        watching.cancel()

    tell(tmp_path, story, config=elastic)


def test_who_starts_again_after_a_stop_came_to_nothing_trains_on(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        _, west = await void_stop(coord)
        east = await coord.join("east", "b")
        assert east.status == control.JOIN_STATUS_ACCEPTED
        await coord.leave(west)
        watching = asyncio.create_task(coord.coordinator.watch())
        for _ in range(int(elastic.transport.unreachable.seconds) // 5 + 4):
            await asyncio.sleep(5.0)
            assert not (await coord.report(east.grant)).drain
        assert not coord.coordinator.ended.is_set()
        watching.cancel()

    tell(tmp_path, story, config=elastic)


def test_who_comes_to_the_end_of_the_run_first_is_not_stopped(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grants = [(await coord.join(name)).grant for name in NAMES]
        await stop(coord)
        coord.merge_all()
        for grant in grants:
            await coord.leave(grant)  # it was in its last flush
        assert (coord.membership.is_finished, coord.membership.is_stopped) == (True, False)
        assert coord.coordinator.ended.is_set()

    tell(tmp_path, story, config=elastic)


BAD: dict[str, Callable[[control.CutPart], None]] = {
    "versions": lambda part: part.versions.append(1),
    "not JSON": lambda part: setattr(part, "text_json", "{"),
    "a list": lambda part: setattr(part, "text_json", "[]"),
    "slot": lambda part: setattr(part, "text_json", '{"9": {"drawn": {}, "cursor": {}}}'),
    "position": lambda part: setattr(part, "text_json", '{"0": {"drawn": {"web": -1}}}'),
}


@pytest.mark.parametrize("what", BAD)
def test_a_part_that_no_island_says_is_refused_and_counted(
    what: str, tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        grant = (await coord.join("east")).grant
        await stop(coord)
        part = part_of(1, 1, 1)
        BAD[what](part)
        before = coord.journal.entries()

        with pytest.raises(TransportError):
            await coord.report(grant, cut=part)

        assert coord.journal.entries() == before
        (refused,) = coord.coordinator.status().refusals
        assert (refused.island, refused.count) == ("east", 1)

    tell(tmp_path, story, config=elastic)


def test_what_is_not_asked_for_changes_nothing() -> None:
    cuts = Cuts()
    part = Part(1, (2, 3))
    cuts.apply(cuts.named(["a", "b"], timeline=0, tokens=0, told={}, is_last=False))

    assert cuts.taken(0, "a", 2, part) == cuts.taken(0, "c", 1, part) == ()
    assert cuts.taken(1, "a", 1, part) == (), "of another timeline"
    cuts.apply(cuts.taken(0, "a", 1, part))
    assert cuts.taken(0, "a", 1, Part(9, (9, 9))) == (), "it has said so"
    cuts.apply(cuts.named(["a", "b"], timeline=0, tokens=0, told={}, is_last=True))
    assert cuts[1].is_void, "a last one takes its place"
    assert cuts.asked_of(0, "a") == (2, True)
    assert cuts.asked_of(1, "a") == (0, False)
    cuts.apply(cuts.named(["b"], timeline=1, tokens=0, told={}, is_last=False))
    assert cuts.asked_of(1, "b") == (3, False), "numbers are counted over all timelines"


def test_a_cut_that_a_newer_program_wrote_is_refused_and_not_half_read() -> None:
    cut = {"number": 1, "timeline": 0, "tokens": 8, "told": {}, "is_last": False, "owing": []}
    Cuts().apply([("cut/1", json.dumps(cut))])
    with pytest.raises(ValueError, match="later"):
        Cuts().apply([("cut/1", json.dumps({**cut, "later": 1}))])


def test_a_part_is_written_without_those_of_others_and_they_are_one_entry_in_the_end() -> None:
    cuts, journal = Cuts(), dict[str, str]()

    def write(entries: Entries) -> None:
        journal.update(entries)
        cuts.apply(entries)

    def restarted() -> Cuts:
        again = Cuts()
        again.apply(reversed([e for e in journal.items() if e[1] != "null"]))  # in any order
        return again

    write(cuts.named(["a", "b", "c"], timeline=0, tokens=0, told={}, is_last=False))
    for island in ("a", "b"):
        write(taken := cuts.taken(0, island, 1, Part(7, (3, 5), {"0": {"drawn": {}}})))
        assert [key for key, _ in taken] == [f"part/1/{island}"]
    assert restarted()[1] == cuts[1]
    assert (cuts[1].owing, sorted(cuts[1].parts)) == (("c",), ["a", "b"])

    write(cuts.without(0, ["a"]))
    write(cuts.completed(1, 8))

    assert [key for key, value in journal.items() if value != "null"] == ["cut/1"]
    assert restarted()[1] == cuts[1]
    for number in range(2, 8):
        write(cuts.named(["a"], timeline=number, tokens=0, told={}, is_last=False))
        write(cuts.taken(number, "a", number, Part(9, (9, 9))))
    write(cuts.forgotten([]))
    assert {key for key, value in journal.items() if value != "null"} == {
        f"{kind}/{n}{of}" for n in range(4, 8) for kind, of in (("cut", ""), ("part", "/a"))
    }
