"""Slots of the text at a real coordinator, over a loopback network and restarts."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.protocol.run.claims import Claims
from diloco.protos import control_pb2 as control
from diloco.transport.errors import FrameError, TransportError
from tests.coordinator_in_memory import CoordinatorInMemory, joined, tell
from tests.run_files import write_run


@pytest.fixture
def elastic(tmp_path: Path) -> Config:
    path = write_run(tmp_path / "run", {"east": "", "west": ""})
    return load_config(path, ["outer.preset=decoupled"])


def word(revision: int, **slots: tuple[int, int, bool]) -> str:
    """A report's positions: slotN = (grant, draws, whether it is the final one)."""
    return json.dumps(
        {
            "revision": revision,
            "slots": {
                name.removeprefix("slot"): {
                    "grant": grant,
                    "is_final": is_final,
                    "position": {"drawn": {"web": drawn}, "cursor": {"at": drawn}},
                }
                for name, (grant, drawn, is_final) in slots.items()
            },
        }
    )


def slots(claims_json: str) -> dict[str, int]:
    """Slot -> draws at which the island goes on."""
    said = json.loads(claims_json)
    return {slot: sum(claim["position"]["drawn"].values()) for slot, claim in said["slots"].items()}


def test_positions_outlive_the_coordinator_and_go_to_the_heir_and_back(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await coord.join("east"), await coord.join("west")
        assert (slots(east.claims_json), slots(west.claims_json)) == ({"0": 0}, {"1": 0})
        await coord.report(east.grant, position_json=word(0, slot0=(0, 70, False)))
        reply = await coord.report(west.grant, position_json=word(0, slot1=(0, 50, False)))
        assert reply.claims_json == "", "nothing is news"

        await coord.restart()
        await coord.leave(east.grant)
        reply = await coord.report(west.grant, position_json=word(0))

        assert slots(reply.claims_json) == {"0": 70, "1": 50}
        revision = json.loads(reply.claims_json)["revision"]
        said = word(revision, slot0=(revision, 90, False), slot1=(0, 95, False))
        assert not (await coord.report(west.grant, position_json=said)).claims_json
        again = await coord.join("east", "b")
        assert slots(again.claims_json) == {}, "one is asked back first"
        asked = json.loads((await coord.report(west.grant, position_json=said)).claims_json)
        ((number, owed),) = asked["owed"].items()
        final = {f"slot{number}": (owed["grant"], 99, True)}
        await coord.report(west.grant, position_json=word(asked["revision"], **final))
        reply = await coord.report(again.grant, position_json=word(0))
        assert slots(reply.claims_json) == {number: 99}

    tell(tmp_path, story, config=elastic)


def test_positions_of_all_islands_at_once_are_few_transactions_and_durable_once_answered(
    tmp_path: Path, elastic: Config
) -> None:
    names = tuple(f"i{number:03d}" for number in range(200))

    async def story(coord: CoordinatorInMemory) -> None:
        grants = await joined(coord)
        commits: list[str] = []
        coord.journal._require().writer.set_trace_callback(
            lambda statement: commits.append(statement) if statement == "COMMIT" else None
        )
        other = sqlite3.connect(coord.path)

        async def report(number: int, grant: control.Grant) -> int:
            said = word(0, **{f"slot{number}": (0, 7, False)})
            await coord.report(grant, position_json=said)
            found = other.execute("SELECT value FROM entries WHERE key = ?", (f"slot/{number}",))
            return sum(json.loads(found.fetchone()[0])["position"]["drawn"].values())

        drawn = await asyncio.gather(*(report(n, grant) for n, grant in enumerate(grants)))

        assert drawn == [7] * 200
        assert len(commits) < 10
        other.close()

    tell(tmp_path, story, config=elastic, names=names)


def test_while_the_disk_is_full_reports_that_tell_no_position_are_answered(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await joined(coord)
        writer = coord.journal._require().writer
        (pages,) = writer.execute("PRAGMA page_count").fetchone()
        writer.execute(f"PRAGMA max_page_count = {pages}")
        drawn = {f"source{number}" * 20: 1 for number in range(40)}
        said = json.loads(word(0, slot0=(0, 7, False)))
        said["slots"]["0"]["position"]["drawn"] = drawn

        for _ in range(2):
            with pytest.raises(TransportError, match="disk is full"):
                await coord.report(east, position_json=json.dumps(said))
        await coord.report(west, position_json=word(0))

        writer.execute("PRAGMA max_page_count = 1000000")
        await coord.report(east, position_json=json.dumps(said))

    tell(tmp_path, story, config=elastic)


def test_an_heir_is_given_nothing_that_a_killed_coordinator_would_not_know(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east = (await coord.join("east")).grant
        await coord.leave((await coord.join("west")).grant, exit_code=40)  # it has died
        await coord.report(east, position_json=word(0, slot0=(0, 40, False)))
        again = await coord.join("west", "b")
        told = await coord.report(east, position_json=word(0))
        ((number, owed),) = json.loads(told.claims_json)["owed"].items()
        is_free = threading.Event()
        coord.journal._require().thread.submit(is_free.wait)  # as a slow disk

        final = word(0, **{f"slot{number}": (owed["grant"], 99, True)})
        answer = asyncio.create_task(coord.report(east, position_json=final))
        heard = await coord.report(again.grant, position_json=word(0))
        assert slots(heard.claims_json) == {}, "it is answered at once, and not told of it yet"
        assert not answer.done()
        is_free.set()

        await answer
        heard = await coord.report(again.grant, position_json=word(0))
        assert slots(heard.claims_json) == {number: 99}

    tell(tmp_path, story, config=elastic)


def of_size(num_characters: int) -> str:
    said = json.loads(word(0, slot0=(0, 1, False)))
    said["slots"]["0"]["position"]["cursor"] = {"at": "x" * num_characters}
    return json.dumps(said)


@pytest.mark.parametrize(
    "said",
    [
        "[]", "{", word(0, slot2=(0, 1, False)), of_size(300_000),
        word(0, slot0=(0, 2**40, False)),  # heirs would go on from there, and be refused in turn
    ],
    ids=lambda said: said[-40:],
)  # fmt: skip
def test_what_no_island_says_is_refused_and_counted(
    said: str, tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east = (await coord.join("east")).grant
        with pytest.raises((FrameError, TransportError), match="positions"):
            await coord.report(east, position_json=said)
        counts = {(r.island, r.cause): r.count for r in coord.coordinator.status().refusals}
        assert counts == {("east", "frame"): 1}
        assert not (await coord.report(east, position_json=word(0))).stop

    tell(tmp_path, story, config=elastic)


def test_the_status_has_room_for_all_islands_whatever_their_positions(
    tmp_path: Path, elastic: Config
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        for island in ("east", "west"):
            grant = (await coord.join(island)).grant
            await coord.report(grant, inner_step=3, position_json=of_size(200_000))

        status = coord.coordinator.status()

        assert [i.last_report.inner_step for i in status.islands] == [3, 3]
        assert status.ByteSize() < 1000

    tell(tmp_path, story, config=elastic)


def test_a_report_that_is_handled_late_takes_nothing_back(tmp_path: Path, elastic: Config) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, west = [(await coord.join(name)).grant for name in ("east", "west")]
        for drawn in (200, 100):
            await coord.report(
                east, inner_step=drawn, position_json=word(0, slot0=(0, drawn, False))
            )
        await coord.leave(east, exit_code=40)  # it has died

        heard = await coord.report(west, position_json=word(0, slot1=(0, 7, False)))
        assert slots(heard.claims_json)["0"] == 200
        again = await coord.join("east", "b")
        assert again.last_inner_step == 200
        await coord.report(again.grant, inner_step=150)
        assert (await coord.join("east", "c")).last_inner_step == 150, "a later start counts"

    tell(tmp_path, story, config=elastic)


def test_islands_of_a_scheduled_run_hear_of_no_slots(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east: Any = await coord.join("east")
        assert east.claims_json == ""
        assert (await coord.report(east.grant, position_json="?")).claims_json == ""

    tell(tmp_path, story)


def test_text_that_was_divided_otherwise_is_refused_with_both_numbers() -> None:
    entries = Claims(3, ["a"]).shared_out({"b"})

    with pytest.raises(ConfigError, match=r"run.max_islands: 4 here, .* for 3 islands for ever"):
        Claims(4, ["a"]).apply(entries)
