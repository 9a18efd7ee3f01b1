"""Which syncer has which fragments: journalled once, told to syncers and islands."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from diloco.cli.terminal.tables import fragments_table, run_text, syncers_table
from diloco.coordinator.grants import sign
from diloco.outer.fragments import Plan
from diloco.protocol.run import assignment
from diloco.protos import control_pb2 as control
from diloco.transport.contracts import PROTOCOL_VERSION
from diloco.transport.errors import FrameError
from tests.coordinator_in_memory import SECRET, CoordinatorInMemory


async def hello(
    coord: CoordinatorInMemory, syncer_id: int, address: str = ""
) -> control.SyncerHelloReply:
    grant = sign(control.Grant(run="demo", roles=[control.ROLE_SYNCER]), SECRET)
    request = control.SyncerHelloRequest(
        grant=grant, syncer_id=syncer_id, address=address, syncer_epoch=1 + syncer_id
    )
    return control.SyncerHelloReply.FromString(await coord.call("syncer_hello", request))


def test_fragments_stay_where_they_were_first_put(
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
