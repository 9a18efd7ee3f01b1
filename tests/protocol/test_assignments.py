"""Which syncer has which fragments: journalled once, told to syncers and islands."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from diloco.cli.terminal.tables import fragments_table, run_text, syncers_table
from diloco.config.load import load_config
from diloco.coordinator.fragment_moves import FragmentMoves
from diloco.coordinator.grants import sign
from diloco.coordinator.run_status import SILENT_S
from diloco.objects.store import ObjectLost
from diloco.outer.fragments import Plan, TensorSpec, make_plan
from diloco.protocol.run import assignment
from diloco.protos import control_pb2 as control
from diloco.transport.contracts import PROTOCOL_VERSION
from diloco.transport.errors import FrameError
from tests.coordinator_in_memory import SECRET, CoordinatorInMemory, tell
from tests.run_files import write_run


async def hello(
    coord: CoordinatorInMemory,
    syncer_id: int,
    address: str = "",
    moves: Iterable[control.FragmentMove] = (),
) -> control.SyncerHelloReply:
    grant = sign(control.Grant(run="demo", roles=[control.ROLE_SYNCER]), SECRET)
    request = control.SyncerHelloRequest(
        grant=grant, syncer_id=syncer_id, address=address, syncer_epoch=1 + syncer_id, moves=moves
    )
    return control.SyncerHelloReply.FromString(await coord.call("syncer_hello", request))


def test_fragments_stay_where_they_were_put_unless_an_operator_moves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        coord = CoordinatorInMemory(tmp_path, num_syncers=2)
        await coord.start()
        assert not (await hello(coord, 0)).fragment_ids, "nothing before the first join"
        await coord.join("east")
        first = [list((await hello(coord, n)).fragment_ids) for n in (0, 1)]
        assert sorted(first) == [[0], [1]]

        def otherwise(plan: Plan, shares: tuple[float, ...]) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(own) for own in reversed(first))

        monkeypatch.setattr(assignment, "assign_fragments", otherwise)  # of a newer program
        await coord.restart()
        await coord.join("west")
        await coord.restart(resume_step=0)
        assert coord.membership.members.timeline == 1
        coord.membership.members.timeline = 0  # whose grants `hello` shows
        again = [list((await hello(coord, n)).fragment_ids) for n in (0, 1)]
        assert again == first
        await coord.close()

    asyncio.run(story())


COPYING, READY = control.MOVE_STAGE_COPYING, control.MOVE_STAGE_READY

#: In place of the fragments of a syncer of which the object store has lost something.
LOST = -1


class Stores:
    """What syncers have in the object store, as they put it there."""

    def __init__(self, served: dict[int, list[int]]) -> None:
        self.served = served
        self.withdrawn: dict[int, dict[int, int]] = {}

    def read(self, syncer_id: int) -> tuple[list[int] | None, dict[int, int]]:
        if self.served.get(syncer_id) == [LOST]:
            raise ObjectLost("an entry is gone")
        return self.served.get(syncer_id), self.withdrawn.get(syncer_id, {})

    def let_go_for_lost(self, syncer_id: int, fragment_ids: Collection[int]) -> None:
        self.let_go = sorted(fragment_ids)
        self.served[syncer_id] = []

    def withdraw_for_lost(self, syncer_id: int, moves: Mapping[int, int]) -> None:
        self.withdrawn[syncer_id] = dict(moves)


def moves_of(coord: CoordinatorInMemory, stores: Stores) -> FragmentMoves:
    change = coord.coordinator._changes.make
    return FragmentMoves(coord.membership, coord.coordinator.run_status, change, stores)


def test_a_move_is_journalled_then_done_by_who_has_the_fragment_also_over_a_killed_coordinator(
    tmp_path: Path,
) -> None:
    placed = [f"run.state=file://{tmp_path}/objects", "syncers.eu={}", "syncers.us={}"]
    config = load_config(write_run(tmp_path / "run", {"east": "", "west": ""}), placed)

    async def story(coord: CoordinatorInMemory) -> None:
        async def told(number: int) -> tuple[list[int], list[tuple[int, str]]]:
            reply = await hello(coord, number, f"127.0.0.1:{number}")
            return list(reply.fragment_ids), [(t.fragment_id, t.syncer) for t in reply.takes]

        async def routes() -> list[int]:
            request = control.RunStateRequest(protocol_version=PROTOCOL_VERSION)
            reply = control.RunStateReply.FromString(await coord.call("standing", request))
            return list(reply.fragment_syncers)

        def moves() -> FragmentMoves:
            return moves_of(coord, stores)

        def word(stage: control.MoveStage, number: int, **said: Any) -> control.FragmentMove:
            return control.FragmentMove(fragment_id=a, number=number, stage=stage, **said)

        early = await coord.operate("move", fragments="0", to="us")
        assert not early.is_done and "no island has joined" in early.message
        await coord.join("east")
        (a,), (b,) = (await told(0))[0], (await told(1))[0]
        stores = Stores({0: [a], 1: [b]})
        for arguments, words in (
            ({"fragments": "0"}, "name what moves where"),
            ({"from": "eu", "to": "eu"}, "name what moves where"),
            ({"from": "mars"}, "there is no syncer 'mars' in this run; it has eu, us"),
            ({"fragments": "0,2", "to": "us"}, "there is no fragment 2; the run has 0 to 1"),
        ):
            refused = await coord.operate("move", **arguments)
            assert not refused.is_done and words in refused.message
        done = await coord.operate("move", fragments=str(b), to="us")
        assert done.is_done and "nothing to move" in done.message

        done = await coord.operate("move", fragments=str(a), to="us")
        assert (
            done.is_done and f"fragment {a} (" in done.message and "from eu to us" in done.message
        )
        await coord.restart()
        assert await told(1) == ([0, 1], [(a, "syncer-0")])
        assert await told(0) == ([a], []), "it keeps it until the other one has copied it"
        await hello(coord, 1, moves=[word(COPYING, 1, copied_bytes=1 << 20, total_bytes=3 << 20)])
        (said,) = coord.coordinator.status().moves
        assert f"fragment {a} moves from syncer-0 to syncer-1: 1 MiB of 3 MiB copied;" in said
        for number, premature in ((1, word(COPYING, 1)), (1, word(READY, 7)), (0, word(READY, 1))):
            await hello(coord, number, moves=[premature])
            assert await told(0) == ([a], []), "of another move, or of another syncer"
        full = "3 TiB are needed and 1 TiB are free"
        await hello(coord, 1, moves=[word(COPYING, 1, waits=full)])
        assert f"it waits: {full};" in coord.coordinator.status().moves[0]
        await hello(coord, 1, moves=[word(READY, 1)])
        assert (await hello(coord, 0)).fragment_ids == []
        assert "waits until syncer-0 has let go of it" in coord.coordinator.status().moves[0]
        assert a not in (await hello(coord, 0)).elsewhere, "it may not be taken yet"
        again = await coord.operate("move", fragments=str(a), to="us")
        assert again.is_done and "nothing to move" in again.message
        await moves().look()  # it is let go of, and was not taken yet
        stores.served[0] = []
        await moves().look()
        assert await routes() == [int(p == b) for p in (0, 1)], "islands ask who had it, and again"
        for number in (0, 1):  # one has it still, the other has it already
            mine = [control.FragmentStatus(fragment_id=a, version=4)]
            await coord.round_report(syncer_id=number, fragments=mine)

        stores.served[1] = [0, 1]
        await moves().look()
        await coord.restart()
        assert await told(1) == ([0, 1], []) and await told(0) == ([], [])
        assert await routes() == [1, 1]
        assert list((await hello(coord, 0)).elsewhere) == [0, 1]
        assert [list(s.fragment_ids) for s in (await coord.join("east")).syncers] == [[], [0, 1]]
        assert not coord.coordinator.status().moves

        assert (await coord.operate("move", **{"from": "us"})).is_done
        await moves().look()
        assert stores.served[1], "it is not lost, and lets go itself"
        await asyncio.sleep(SILENT_S)
        await hello(coord, 0)
        stores.served[0] = [LOST]  # which holds up nobody else
        del stores.served[1]  # it has never said what it serves
        await moves().look()
        assert stores.let_go == [0, 1]
        assert stores.served[1] == [] and await told(0) == (
            [0, 1],
            [(p, "syncer-1") for p in (0, 1)],
        )

    tell(tmp_path, story, config=config, num_syncers=2)


def test_a_move_gets_another_target_once_the_one_before_says_for_good_that_it_does_not_take_it(
    tmp_path: Path,
) -> None:
    placed = [f"run.state=file://{tmp_path}/objects"]
    placed += [f"syncers.{name}={{}}" for name in ("asia", "eu", "us")]
    run_file = write_run(tmp_path / "run", {"east": "", "west": ""}, num_fragments=3)
    config = load_config(run_file, placed)

    plan = make_plan([TensorSpec(name, (3,)) for name in "uvw"], num_fragments=3).to_json()

    async def story(coord: CoordinatorInMemory) -> None:
        await coord.join("east", plan=plan)
        own = [list((await hello(coord, n, f"127.0.0.1:{n}")).fragment_ids) for n in range(3)]
        p = own[1][0]
        stores = Stores(dict(enumerate(own)))
        ready = control.FragmentMove(fragment_id=p, stage=READY)

        async def move(to: str) -> None:
            done = await coord.operate("move", fragments=str(p), to=to)
            assert done.is_done and f"to {to}" in done.message

        async def told(number: int) -> tuple[bool, list[tuple[int, bool]], list[int]]:
            """Whether it is to serve it, to take it and is held, and the moves to withdraw."""
            ready.number = coord.membership.assignment.last_move
            reply = await hello(coord, number, moves=[ready])
            takes = [(each.number, each.is_held) for each in reply.takes]
            return p in reply.fragment_ids, takes, [each.number for each in reply.withdrawn]

        async def look() -> None:
            await moves_of(coord, stores).look()

        await move("us")
        assert await told(2) == (True, [(1, False)], []) and await told(1) == (False, [], [])
        await move("asia")
        await coord.restart()
        assert await told(0) == (True, [(2, True)], []), "the other may have taken it"
        assert await told(2) == (True, [], [2]), "it may serve it, and let go of it"
        assert await told(1) == (True, [], []), "nobody could take it"
        stores.withdrawn[2] = {p: 1}
        await look()
        assert (await told(0))[1] == [(2, True)], "of an earlier move"
        assert "syncer-2, to which it moved before" in coord.coordinator.status().moves[0]
        stores.withdrawn[2] = {p: 2}
        await look()
        assert (await told(0))[1] == [(2, False)] and await told(1) == (False, [], [])

        stores.served[1] = []  # it has let go of it, and gets it back
        await move("eu")
        assert await told(1) == (True, [(3, True)], [])
        await asyncio.sleep(SILENT_S)  # the one that might take it is lost
        await told(1)
        await look()
        assert stores.withdrawn[0] == {p: 3}
        await look()
        assert await told(1) == (True, [(3, False)], [])
        stores.served[1] = [p]
        await look()
        assert not coord.coordinator.status().moves, "it stays where it was"
        assert coord.membership.assignment.owner(p) == 1

        await move("us")  # which has taken it when it is to go to another
        stores.served[1] = []
        await move("asia")
        stores.served[2] = sorted([*own[2], p])
        assert await told(2) == (True, [], [5]), "nobody knows what it has published since"
        await look()
        assert coord.membership.assignment.owner(p) == 2
        assert (await hello(coord, 0)).takes[0].syncer == "syncer-2"
        assert await told(0) == (True, [(5, False)], []) and not (await told(1))[0]
        done = await coord.operate("move", **{"from": "asia"})  # what comes to it, too
        assert done.is_done and coord.membership.assignment.destination(p) != 0

    tell(tmp_path, story, config=config, num_syncers=3)


def test_an_island_is_sent_to_all_syncers_or_to_none(tmp_path: Path) -> None:
    async def story() -> None:
        coord = CoordinatorInMemory(tmp_path, num_syncers=2)
        await coord.start()
        await coord.join("east")
        await hello(coord, 1, "127.0.0.1:4713")
        assert not (await coord.join("east")).syncers, "one has not said yet where it is"
        await hello(coord, 0, "127.0.0.1:4712")

        told = (await coord.join("east")).syncers
        assert [each.address for each in told] == ["127.0.0.1:4712", "127.0.0.1:4713"]
        assert sorted(p for each in told for p in each.fragment_ids) == [0, 1]
        status = coord.coordinator.status()
        assert [each.syncer_epoch for each in status.syncers] == [1, 2]
        assert [list(each.fragment_ids) for each in status.syncers] == [
            list(each.fragment_ids) for each in told
        ]
        assert status.syncer_address == "127.0.0.1:4712, 127.0.0.1:4713"
        request = control.RunStateRequest(protocol_version=PROTOCOL_VERSION)
        run_state = control.RunStateReply.FromString(await coord.call("standing", request))
        assert list(run_state.syncer_addresses) == ["127.0.0.1:4712", "127.0.0.1:4713"]
        await coord.close()

    asyncio.run(story())


def test_a_syncer_speaks_of_its_own_fragments_alone(tmp_path: Path) -> None:
    async def story() -> None:
        coord = CoordinatorInMemory(tmp_path, num_syncers=2)
        await coord.start()
        await coord.join("east")
        own = list((await hello(coord, 1, "127.0.0.1:4713")).fragment_ids)
        other = list((await hello(coord, 0)).fragment_ids)
        refusal = [control.RefusalCount(island="east", cause="size", count=2)]
        for number, fragment_ids in enumerate((other, own)):
            mine = [control.FragmentStatus(fragment_id=p, version=4) for p in fragment_ids]
            await coord.round_report(syncer_id=number, fragments=mine, refusals=refusal)
        status = coord.coordinator.status()
        assert [fragment.version for fragment in status.fragments] == [4, 4]
        assert [(r.service, r.island, r.cause, r.count) for r in status.refusals] == [
            ("syncer", "east", "size", 4)
        ]

        with pytest.raises(FrameError, match=f"a report of fragment {other[0]}; syncer 1 has"):
            await coord.round_report(
                syncer_id=1, fragments=[control.FragmentStatus(fragment_id=other[0])]
            )
        header = {"timeline": 0, "fragment_id": own[0], "version": 7}
        for changed, why in (
            ({"fragment_id": other[0]}, f"a report of fragment {other[0]}; syncer 1 has"),
            ({"timeline": 1}, "a record of timeline 1; the run's is 0"),
        ):
            with pytest.raises(FrameError, match=why):
                await coord.round_report(syncer_id=1, record={**header, **changed})
        assert list((await hello(coord, 0)).num_indexed) == [0]
        await coord.round_report(syncer_id=1, record=header)
        assert list((await hello(coord, 1)).num_indexed) == [8]
        with pytest.raises(FrameError, match="a word of syncer 2; the run has 2"):
            await hello(coord, 2)
        await coord.close()

    asyncio.run(story())


def test_a_syncer_that_is_lost_is_missed_by_a_coordinator_that_never_knew_of_it(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        coord = CoordinatorInMemory(tmp_path, num_syncers=2)
        await coord.start()
        await coord.join("east")
        for number in (0, 1):
            (own,) = (await hello(coord, number, f"127.0.0.1:{number}")).fragment_ids
            await coord.round_report(
                syncer_id=number, fragments=[control.FragmentStatus(fragment_id=own, version=4)]
            )
        await coord.restart()
        assert [s.age_s for s in coord.coordinator.status().syncers] == [math.inf] * 2
        (kept,) = (await hello(coord, 0, "127.0.0.1:0")).fragment_ids
        stands = control.FragmentStatus(fragment_id=kept, version=9, merged_tokens=70)
        await coord.round_report(syncer_id=0, fragments=[stands])

        status = coord.coordinator.status()
        status.total_tokens = 100

        assert [(s.syncer_id, list(s.fragment_ids)) for s in status.syncers] == [
            (0, [kept]),
            (1, [1 - kept]),
        ]
        assert status.syncers[0].age_s < 60 and status.syncers[1].age_s == math.inf
        assert syncers_table(status).rows[1][4].plain == "never"
        versions = ["9", "-"] if kept == 0 else ["-", "9"]
        assert [row[1].plain for row in fragments_table(status).rows] == versions
        assert run_text(status).endswith(
            f"; versions {', '.join(versions)}; tokens merged - of 100"
        )
        await coord.close()

    asyncio.run(story())
