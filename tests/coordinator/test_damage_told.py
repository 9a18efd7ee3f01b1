"""What the coordinator knows and shows of a damaged fragment, and from whom it is repaired."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from diloco.config.load import load_config
from diloco.coordinator.grants import sign
from diloco.launch.coordinator_end import asked_to_stop
from diloco.launch.process.ending import StopRequest
from diloco.protos import control_pb2 as control
from diloco.transport.contracts import PROTOCOL_VERSION
from tests.coordinator_in_memory import SECRET, CoordinatorInMemory, joined, tell
from tests.protocol.test_cuts import part_of
from tests.run_files import write_run

CONFIG = load_config(Path(__file__).resolve().parents[2] / "configs" / "runs" / "two-islands.toml")


def test_a_stop_by_signal_waits_for_the_repair_and_is_made_then(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        (east, _) = await joined(coord)
        damaged = control.FragmentStatus(fragment_id=1, version=4, damage="fragment 1 is damaged")
        await coord.round_report(fragments=[damaged])
        signals, said = StopRequest(num_graceful=1), list[str]()
        stopping = asyncio.create_task(
            asked_to_stop(coord.coordinator, coord.membership, signals, said.append)
        )
        signals.note(signal.SIGTERM)
        await asyncio.sleep(5.0)
        assert not coord.membership.is_stopping
        waits = "a stop was asked for, and waits for the repair: fragment 1 is damaged"
        assert coord.coordinator.status().message == waits

        await coord.round_report(fragments=[control.FragmentStatus(fragment_id=1, version=5)])
        await asyncio.sleep(2.0)
        assert (await coord.report(east)).hold
        assert (coord.coordinator.status().message, coord.state()) == ("", "stopping")
        assert [line.partition(":")[0] for line in said] == ["the stop waits", "stopping"]
        signals.note(signal.SIGTERM)
        await stopping

    tell(tmp_path, story, config=CONFIG)


def test_a_syncer_hears_how_many_versions_are_indexed(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        async def indexed() -> list[tuple[int, str]]:
            grant = sign(control.Grant(run="demo", roles=[control.ROLE_SYNCER]), SECRET)
            request = control.SyncerHelloRequest(protocol_version=PROTOCOL_VERSION, grant=grant)
            reply = control.SyncerHelloReply.FromString(await coord.call("syncer_hello", request))
            return list(zip(reply.num_indexed, reply.indexed_digests, strict=True))

        assert await indexed() == [], "no plan yet"
        await joined(coord)
        assert await indexed() == [(0, ""), (0, "")]
        for version in (0, 1, 2):
            header = {"timeline": 0, "fragment_id": 1, "version": version}
            await coord.round_report(record={**header, "digest": f"{version:064d}"})
        assert await indexed() == [(0, ""), (3, f"{2:064d}")]
        with pytest.MonkeyPatch.context() as reading:
            reading.setattr(type(coord.journal), "newest_rounds", None)
            assert await indexed() == [(0, ""), (3, f"{2:064d}")], "no header is read again"
        await coord.restart()
        assert await indexed() == [(0, ""), (3, f"{2:064d}")]

    tell(tmp_path, story)


def test_the_status_says_which_fragment_is_not_served(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        await joined(coord)
        damage = "fragment 1 is damaged and not served: diloco repair RUN.toml"
        fragments = [
            control.FragmentStatus(fragment_id=0, phase="open"),
            control.FragmentStatus(fragment_id=1, phase="damaged", damage=damage),
        ]
        await coord.round_report(fragments=fragments)

        status = coord.coordinator.status()
        assert status.message == damage
        assert [fragment.phase for fragment in status.fragments] == ["open", "damaged"]
        fragments[1].damage = ""
        await coord.round_report(fragments=fragments)
        assert coord.coordinator.status().message == ""

    tell(tmp_path, story)


def test_an_operator_has_a_damaged_fragment_repaired_from_an_island(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        await joined(coord)
        header = {"timeline": 0, "fragment_id": 1, "version": 4, "digest": "ab"}
        await coord.round_report(record=header)

        async def stands(damage: str, *holders: str) -> None:
            fragment = control.FragmentStatus(
                fragment_id=1, damage=damage, lost_version=4, holders=holders
            )
            await coord.round_report(fragments=[fragment])

        async def ask(fragment: str, island: str) -> control.OperateReply:
            return await coord.operate("repair", fragment=fragment, island=island)

        assert "fragment 1 is not damaged" in (await ask("1", "east")).message
        await stands("version 4 cannot be read")
        nobody = (await ask("1", "west")).message
        assert "west does not hold version 4 of fragment 1: no island that has called" in nobody
        await stands("version 4 cannot be read", "west")
        holds = "does not hold version 4 of fragment 1: west does, and it is taken from there"
        for fragment, island, why in (
            ("1", "east", holds),
            ("0", "east", "fragment 0 is not damaged, as far as its syncer says; damaged: 1"),
            ("x", "east", "fragment x is not damaged"),
            ("1", "north", "there is no island 'north'"),
        ):
            refused = await ask(fragment, island)
            assert not refused.is_done
            assert why in refused.message
        assert not (await coord.told_to_syncer()).repairs

        assert (await ask("1", "west")).is_done
        await coord.restart()
        await stands("version 4 cannot be read", "west")
        (told,) = (await coord.told_to_syncer()).repairs
        assert (told.fragment_id, told.island, told.record_json) == (1, "west", "")

        await coord.round_report(record={**header, "repaired": "west"})
        await stands("")
        assert not (await coord.told_to_syncer()).repairs
        kinds = [entry.kind for entry in coord.journal.audit_rows()]
        assert kinds.count("repair") == 1
        assert "operation" in kinds

    tell(tmp_path, story, config=CONFIG)


def test_a_syncer_is_told_what_is_indexed_of_what_it_has_lost_without_an_operator(
    tmp_path: Path,
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        await joined(coord)
        header = {"timeline": 0, "fragment_id": 1, "version": 4, "digest": "ab"}
        await coord.round_report(record=header)
        for wants_header in (True, False):
            damaged = control.FragmentStatus(
                fragment_id=1, damage="torn", lost_version=4, wants_header=wants_header
            )
            await coord.round_report(fragments=[damaged])
            told = [(r.fragment_id, r.island, json.loads(r.record_json))
                    for r in (await coord.told_to_syncer()).repairs]  # fmt: skip
            assert told == ([(1, "", header)] if wants_header else [])

    tell(tmp_path, story, config=CONFIG)


def test_headers_of_all_fragments_have_room_in_the_replies(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        await joined(coord)
        for p in (0, 1):
            header = {"timeline": 0, "fragment_id": p, "version": 4, "digest": "ab"}
            await coord.round_report(record={**header, "lane_digests": ["0" * 64] * 3000})
        wanting = [0, 1]
        for p in (0, 1):
            await coord.round_report(
                fragments=[
                    control.FragmentStatus(
                        fragment_id=each, damage="torn", wants_header=each in wanting
                    )
                    for each in (0, 1)
                ]
            )
            assert [r.fragment_id for r in (await coord.told_to_syncer()).repairs] == [p]
            wanting.remove(p)

    tell(tmp_path, story, config=CONFIG)


def test_an_island_that_is_not_at_work_gives_nothing(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, _ = await joined(coord)
        fragment = control.FragmentStatus(fragment_id=0, damage="rotten")
        await coord.round_report(fragments=[fragment])
        await coord.leave(east)

        refused = await coord.operate("repair", fragment="0", island="east")
        assert not refused.is_done
        assert "east is not at work" in refused.message

    tell(tmp_path, story, config=CONFIG)


def test_each_of_several_syncers_hears_of_its_own_fragments(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        await joined(coord)
        owner = next(
            n for n, own in enumerate(coord.membership.assignment.fragments) if own == (1,)
        )
        header = {"timeline": 0, "fragment_id": 1, "version": 4}
        await coord.round_report(syncer_id=owner, record=header)
        damaged = control.FragmentStatus(
            fragment_id=1, damage="version 4 cannot be read", lost_version=4, holders=["west"]
        )
        await coord.round_report(syncer_id=owner, fragments=[damaged])
        assert (await coord.operate("repair", fragment="1", island="west")).is_done

        async def hears(syncer_id: int) -> tuple[list[int], list[int], list[int]]:
            grant = sign(control.Grant(run="demo", roles=[control.ROLE_SYNCER]), SECRET)
            hello = control.SyncerHelloRequest(grant=grant, syncer_id=syncer_id)
            said = control.SyncerHelloReply.FromString(await coord.call("syncer_hello", hello))
            report = control.RoundReport(grant=grant, syncer_id=syncer_id)
            reply = control.RoundReportReply.FromString(await coord.call("round_report", report))
            repairs = [repair.fragment_id for repair in reply.repairs]
            return list(said.fragment_ids), list(said.num_indexed), repairs

        assert await hears(owner) == ([1], [5], [1])
        assert await hears(1 - owner) == ([0], [0], [])

    tell(tmp_path, story, config=CONFIG, num_syncers=2)


@pytest.mark.parametrize("is_stop", [False, True], ids=["of-a-run", "of-a-stop"])
def test_a_cut_waits_for_the_repair_and_that_of_a_stop_does_not(
    tmp_path: Path, *, is_stop: bool
) -> None:
    path = write_run(tmp_path / "run", dict.fromkeys(("east", "west"), ""))
    config = load_config(path, ["outer.preset=decoupled", "checkpoint.every_tokens=500"])

    async def story(coord: CoordinatorInMemory) -> None:
        grants = await joined(coord)

        async def stands(*versions: int, **fields: Any) -> None:
            fragments = [
                control.FragmentStatus(
                    fragment_id=p,
                    version=version,
                    damage="" if version else f"fragment {p} is damaged",
                )
                for p, version in enumerate(versions)
            ]
            await coord.round_report(fragments=fragments, **fields)

        await stands(4, 0)
        refused = await coord.operate("stop")
        assert not refused.is_done
        assert "fragment 1 is damaged, and no checkpoint is kept without it" in refused.message
        signals, said = StopRequest(num_graceful=1), list[str]()
        stopping = asyncio.create_task(
            asked_to_stop(coord.coordinator, coord.membership, signals, said.append)
        )
        signals.note(signal.SIGTERM)
        await asyncio.sleep(5.0)
        assert len(said) == 1
        assert "the stop waits: fragment 1 is damaged" in said[0]
        assert coord.coordinator.status().message.startswith("a stop was asked for, and waits")
        assert not (coord.membership.is_stopping or coord.coordinator.is_halting or stopping.done())
        signals.note(signal.SIGTERM)
        await stopping
        await stands(4, 5)
        await coord.change(lambda m: m.cut(is_last=is_stop))
        for grant in grants:
            await coord.report(grant, cut=part_of(1, 3, 5))
        assert (await coord.told_to_syncer()).cut == 1
        await stands(4, 0)
        assert coord.membership.cuts[1].is_void is is_stop
        if is_stop:
            for grant in grants:
                await coord.leave(grant, is_stopped=True)
            assert "a syncer has lost what the parts hold" in coord.membership.fatal_reason
            assert coord.membership.fatal_reason.count("fragment 1") == 1
        else:
            await stands(4, 5, pinned_cut=1)
            assert coord.membership.checkpoints == (1,)

    tell(tmp_path, story, config=config)
