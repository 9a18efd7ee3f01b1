"""What islands give back, and each other, goes to the syncer that has the fragment."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import blake3
import pytest

from diloco.island.exchange.state_transfer import (
    LaneKey,
    TransferReports,
    fetch_lanes,
    find_manifest,
    give,
    lanes_of,
)
from diloco.protocol.rounds.transfer_manifest import LaneDigest, TransferManifest, lane_name
from diloco.protos.control_pb2 import ReportReply, StateTransfer, TransferAnswer
from diloco.telemetry.round_events import FragmentRepaired
from diloco.transport.calls.loopback import run_virtual
from diloco.versions.record import fragment_directory, record_path, versions_in
from tests.several_syncers import Several
from tests.virtual_run import RUN, Setting, descend, grant

CUT = 7


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(
        {name: [16.0] * numel for name, numel in zip("uvwx", (2, 300, 40, 700), strict=True)},
        descend,
        tmp_path,
        inner_steps=60,
        num_fragments=4,
        flush=True,
    ).on_arrival(total_tokens=60 * 2)


def test_a_lost_version_is_taken_back_by_the_syncer_that_has_the_fragment(setting: Setting) -> None:
    async def scenario() -> None:
        run = Several(setting)
        await run.start()
        islands = [run.island(name) for name in "ab"]
        training = [asyncio.create_task(island.run()) for island in islands]
        await asyncio.sleep(20.0)
        part = run.parts[1]
        p = part.own[-1]
        await part.kill_syncer()
        directory = fragment_directory(part.setting.directory, p)
        lost = versions_in(directory)[-1]
        record = record_path(directory, lost)
        record.write_bytes(record.read_bytes()[:-3])
        await part.start_syncer()
        before = len(run.kept.records)
        await asyncio.sleep(5.0)

        assert part.syncer.phase(p) == "damaged"
        assert not any(run.kept.syncer.damage(other) for other in run.kept.own)
        assert len(run.kept.records) > before, "the other one goes on"
        header = next(r for r in part.records if (r["fragment_id"], r["version"]) == (p, lost))
        part.syncer.repair(p, "b", json.dumps(header))
        await asyncio.sleep(1.0)
        assert part.syncer.damage(p) == ""
        assert FragmentRepaired(p, lost, "b") in part.events
        await asyncio.gather(*training)

        assert len({island.session.digests for island in islands}) == 1
        assert max(r["version"] for r in part.records if r["fragment_id"] == p) > lost
        for island in islands:
            await island.exchange.stop()
        await run.kill()

    run_virtual(scenario())


def test_an_inner_optimizer_is_given_over_the_syncers_that_have_its_fragments(
    setting: Setting,
) -> None:
    plan = setting.plan()
    lanes = {
        (p, i): bytes([p, i]) * (4 * plan.fragments[p].lanes[i].numel) for p, i in lanes_of(plan)
    }
    given = {
        lane_name(*lane): LaneDigest(len(data), blake3.blake3(data).hexdigest())
        for lane, data in lanes.items()
    }
    manifest = TransferManifest(
        RUN, 0, "a", CUT, 40, "adamw", 3, (5,) * 4, plan.fingerprint(), given
    )

    async def nothing(number: int) -> None:
        raise AssertionError

    async def scenario() -> dict[LaneKey, bytes]:
        run = Several(setting)
        for part in run.parts:
            part.named_transfers = [StateTransfer(source="a", island="b", checkpoint=CUT)]
        await run.start()
        source, joiner = (run.island(name).exchange for name in "ab")
        reports = TransferReports(nothing)
        reports.request(is_requested=True)
        reports.set_answer(ReportReply(transfer=TransferAnswer(source="a", checkpoint=CUT)))

        async def taken() -> dict[LaneKey, bytes]:
            found = await find_manifest(joiner, plan, grant("b"), reports, 30.0)
            fetched = await fetch_lanes(joiner, found, lanes, at_most_s=30.0, is_given=lambda: True)
            return {lane: bytes(data) for lane, data in fetched.items()}

        taking = asyncio.create_task(taken())
        await give(source, plan, manifest, lanes.__getitem__)
        result = await taking
        for part in run.parts:
            kept = [path.stem for path in part.setting.directory.glob("transfers/*/*.safetensors")]
            assert {int(name.partition("-")[0]) for name in kept} == set(part.own)
        for exchange in (source, joiner):
            await exchange.stop()
        await run.kill()
        return result

    assert run_virtual(scenario()) == lanes
