"""Which syncer has which fragments: journalled once, told to syncers and islands."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from pathlib import Path

import pytest

from diloco.cli.terminal.tables import fragments_table, run_text, syncers_table
from diloco.config.load import load_config
from diloco.coordinator.fragment_moves import FragmentMoves
from diloco.coordinator.grants import sign
from diloco.coordinator.run_status import SILENT_S
from diloco.objects.store import ObjectLost
from diloco.outer.fragments import Plan
from diloco.protocol.run import assignment
from diloco.protos import control_pb2 as control
from diloco.transport.contracts import PROTOCOL_VERSION
from diloco.transport.errors import FrameError
from tests.coordinator_in_memory import SECRET, CoordinatorInMemory, tell
from tests.run_files import write_run


async def hello(
    coord: CoordinatorInMemory, syncer_id: int, address: str = ""
) -> control.SyncerHelloReply:
    grant = sign(control.Grant(run="demo", roles=[control.ROLE_SYNCER]), SECRET)
    request = control.SyncerHelloRequest(
        grant=grant, syncer_id=syncer_id, address=address, syncer_epoch=1 + syncer_id
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


#: In place of the fragments of a syncer of which the object store has lost something.
LOST = -1


class Stores:
    """What syncers have in the object store, as they put it there."""

    def __init__(self, served: dict[int, list[int]]) -> None:
        self.served = served

    def served_from(self, syncer_id: int) -> list[int] | None:
        if self.served.get(syncer_id) == [LOST]:
            raise ObjectLost("an entry is gone")
        return self.served.get(syncer_id)

    def let_go_for_lost(self, syncer_id: int, fragment_ids: Collection[int]) -> None:
        self.let_go = sorted(fragment_ids)
        self.served[syncer_id] = []


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
            status = coord.coordinator.run_status
            change = coord.coordinator._changes.make
            return FragmentMoves(coord.membership, status, change, stores)

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
        assert await told(0) == ([a], []), "it keeps it until the other one is heard of"
        assert await told(1) == ([0, 1], [(a, "syncer-0")])
        assert await told(0) == ([], [])
        assert a not in (await hello(coord, 0)).elsewhere, "it may not be taken yet"
        again = await coord.operate("move", fragments=str(a), to="us")
        assert not again.is_done and "moves from eu to us already" in again.message
        (said,) = coord.coordinator.status().moves
        assert f"fragment {a} moves from syncer-0 to syncer-1" in said
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
