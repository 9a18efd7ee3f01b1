"""Every version of a run is made again from what was kept; what is wrong is found and named."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from torch import Tensor

from diloco.outer.combination import MergeRule
from diloco.outer.optimizer import OuterOptimizer
from diloco.protocol.rounds.orders import Orders
from diloco.transport.calls.loopback import run_virtual
from diloco.versions import replay as replaying
from diloco.versions.frames import KEPT, frames_in
from diloco.versions.record import locate, record_path, versions_in
from diloco.versions.replay import FORGOTTEN, FragmentReplay, Replayed, ReplayVerdict
from tests.island.test_resume import resumed, stopped
from tests.virtual_run import Setting, VirtualIsland, VirtualRun

NAMES = ("a", "b", "c", "d")
PACE = {"a": 1.0, "b": -2.0, "c": 1.5, "d": 0.5}


def wander(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    """Move each value a little, as island and inner step say; now and then one goes wild."""
    for number, parameter in enumerate(parameters.values()):
        size = parameter.numel()
        step = torch.sin(torch.arange(size) * 0.1 + inner_step * PACE[island] + number)
        parameter.sub_(step * (40.0 if island == "d" and inner_step % 16 < 8 else 0.1))


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power loss, and waiting for the disk is most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(params=[1, 5], ids=["snapshot", "log"])
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> Setting:
    """Four islands, the last twice as slow; angles decide, and who is beyond the median is out."""
    setting = Setting(
        {name: [4.0] * 300 for name in "uvw"},
        wander,
        tmp_path / "store",
        inner_steps=60,
        islands=NAMES,
        tokens={"a": 3, "b": 5, "c": 7, "d": 11},
        num_fragments=2,
        inner_steps_per_round=2,
        overlap_steps=1,
        optimizer=OuterOptimizer("nesterov", 0.5, 0.8, 0),
        uplink_codec="int4",
        downlink_codec="int4",
        flush=True,
        min_members=1,
        quorum=1,
        total_tokens=25 * 26,
        steps_s={"d": 2.0},
        snapshot_rounds=request.param,
        merge=MergeRule("radial_directional", clip_norm_ratio=2.0),
    )
    return replace(setting, timing=setting.measured(grace_s=2.0))


async def live(run: VirtualRun, name: str, rng: random.Random, deaths: int) -> VirtualIsland:
    """One island that dies, and freezes, and comes back until the run ends."""
    incarnation, last = 1, 0
    while True:
        island = run.island(name, incarnation)
        await island.start(last_inner_step=last)
        life = asyncio.create_task(island.go_on())
        until = rng.uniform(5.0, 10.0) if incarnation <= deaths else 1e6
        done, _ = await asyncio.wait([life], timeout=until)
        if done:
            life.result()
            return island
        if incarnation == 1:  # frozen for longer than a lease, then it goes on where it was
            island.setting = replace(run.setting, step_s=11.0, steps_s={})
            await asyncio.sleep(12.0)
            island.setting = run.setting
            await asyncio.sleep(4.0)
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)
        await island.drop()
        last, incarnation = island.session.inner_step, incarnation + 1
        await asyncio.sleep(rng.uniform(0.0, 4.0))


async def kill_syncer(run: VirtualRun, rng: random.Random) -> None:
    while True:
        await asyncio.sleep(rng.uniform(5.0, 15.0))
        await run.kill_syncer()
        await asyncio.sleep(rng.uniform(0.0, 5.0))
        await run.start_syncer()


def disturbed(setting: Setting, seed: int = 3) -> tuple[VirtualRun, list[VirtualIsland]]:
    """Run it to its end with kills, freezes and a change of its policy on the way."""
    rng = random.Random(seed)
    run = VirtualRun(setting)
    run.keeps_all = True
    steeper = replace(setting, optimizer=replace(setting.optimizer, lr=0.25))
    run.orders.rules = lambda orders: replace(  # type: ignore[method-assign]
        (steeper if orders.policy_revision else setting).rules(),
        policy_revision=orders.policy_revision,
    )
    islands: list[VirtualIsland] = []

    async def change_policy() -> None:
        await asyncio.sleep(30.0)
        run.syncer.set_orders(Orders(policy_json="{}", policy_revision=1))

    async def scenario() -> None:
        await run.start_syncer()
        others = [asyncio.create_task(change_policy()), asyncio.create_task(kill_syncer(run, rng))]
        islands.extend(
            await asyncio.gather(
                *(live(run, name, rng, deaths=2 if name in "bd" else 0) for name in NAMES)
            )
        )
        for other in others:
            other.cancel()
        for island in islands:
            await island.exchange.stop()
        await run.kill_syncer()
        assert len({island.session.digests for island in islands}) == 1

    run_virtual(scenario())
    return run, islands


def replayed(run: VirtualRun, fragment_id: int, first: int = 1) -> list[Replayed]:
    plan = run.setting.plan()
    replay = FragmentReplay(
        run.setting.directory, plan, fragment_id, indexed=headers_of(run), timeline=run.timeline
    )
    return list(replay.run(first, num_threads=2))


def headers_of(run: VirtualRun) -> list[Mapping[str, Any]]:
    """What a coordinator would have indexed: each record once, as JSON values."""
    rows = {(h["timeline"], h["fragment_id"], h["version"]): h for h in run.records}
    return [json.loads(json.dumps(header)) for header in rows.values()]


def counted(replayed: Sequence[Replayed]) -> Counter[ReplayVerdict]:
    return Counter(each.verdict for each in replayed)


def test_every_version_of_a_disturbed_run_is_made_again_to_the_bit(setting: Setting) -> None:
    run, islands = disturbed(setting)

    headers = headers_of(run)
    assert run.epoch > 3 and {c["incarnation"] for h in headers for c in h["contributors"]} >= {
        1,
        2,
    }
    outcomes = {e["outcome"] for i in islands for e in i.kinds("fragment_merged")}
    assert {"included", "not_included"} <= outcomes
    assert any(h.get("merge", {}).get("rejected") for h in headers)
    assert {h["rules"]["policy_revision"] for h in headers if h["version"]} == {0, 1}
    for p in range(2):
        found = replayed(run, p)
        newest = max(h["version"] for h in headers if h["fragment_id"] == p)
        assert [each.version for each in found] == list(range(1, newest + 1))
        assert newest > 9 and counted(found) == {ReplayVerdict.RECOMPUTED: newest}, found
        (own,) = {h["digest"] for h in headers if (h["fragment_id"], h["version"]) == (p, newest)}
        assert all(own in island.session.digests for island in islands)
        assert replayed(run, p, newest - 1) == found[-2:]


# -- what is wrong is named ----------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def short(setting: Setting) -> VirtualRun:
    """A scheduled run of two islands and one fragment, all contributions of it kept."""
    run = VirtualRun(
        replace(
            setting,
            islands=("a", "b"),
            num_fragments=1,
            inner_steps=40,
            inner_steps_per_round=4,
            min_members=None,
            quorum=None,
            timing=None,
            total_tokens=0,
            steps_s={},
        )
    )
    run.keeps_all = True
    return run


#: Last version of the scheduled run.
NEWEST = 10


def wrong(found: Sequence[Replayed]) -> list[tuple[int, ReplayVerdict]]:
    return [(each.version, each.verdict) for each in found if each.is_wrong]


def test_one_flipped_bit_in_a_kept_contribution_is_found_and_named(short: VirtualRun) -> None:
    run_virtual(short.run())
    before = replayed(short, 0)
    directory = short.setting.directory / "fragment-0000"
    kept = frames_in(directory / KEPT)[3]
    flip(kept.path, kept.sections["contribution/b/0"].start + 7)

    found = replayed(short, 0)

    assert counted(before) == {ReplayVerdict.RECOMPUTED: NEWEST}
    assert wrong(found) == [(3, ReplayVerdict.DAMAGED)]
    assert found[2].detail == f"{kept.path} is torn or damaged in section contribution/b/0"
    assert found[:2] == before[:2]
    after = {each.detail for each in found[3:] if each.verdict is ReplayVerdict.UNKNOWN}
    assert after == {"nothing here leads to the version before it"}
    assert found[-1].verdict is ReplayVerdict.RECOMPUTED, "from a record that is whole"


def test_what_is_whole_and_does_not_come_to_what_was_published_is_different(
    short: VirtualRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_virtual(short.run())
    headers = headers_of(short)
    headers[5]["digest"] = "00"
    plan, directory = short.setting.plan(), short.setting.directory

    (told,) = [e for e in FragmentReplay(directory, plan, 0, indexed=headers).run() if e.is_wrong]
    monkeypatch.setattr(replaying, "COEFFICIENT_TOLERANCE", -1.0)
    found = list(FragmentReplay(directory, plan, 0).run())

    assert (told.version, told.verdict) == (5, ReplayVerdict.DIFFERENT)
    assert told.detail == "the audit log says otherwise of its digest"
    assert all(each.detail.startswith("coefficients are 0 from what") for each in found)


def test_a_record_that_names_bytes_that_nobody_can_make_is_different(short: VirtualRun) -> None:
    run_virtual(short.run())
    kept = frames_in(short.setting.directory / "fragment-0000" / KEPT)[3]
    whole, forged = kept.path.read_bytes(), kept.header["lane_blake3"][0][::-1]
    start, end = 48, 48 + int.from_bytes(whole[8:16], "little")
    header = whole[start:end].replace(kept.header["lane_blake3"][0].encode(), forged.encode())
    kept.path.write_bytes(whole[:16] + blake3(header).digest() + header + whole[end:])

    found = replayed(short, 0)

    assert wrong(found) == [(3, ReplayVerdict.DIFFERENT)] and forged in found[2].detail


def test_a_version_that_was_published_and_is_gone_is_told(short: VirtualRun) -> None:
    run_virtual(short.run())
    directory = short.setting.directory / "fragment-0000"
    newest = max(versions_in(directory))
    gone = range(newest, NEWEST + 1)
    for path in [*directory.glob("v*.*")]:
        if int(path.stem[1:]) >= newest:
            path.unlink()

    found = replayed(short, 0)

    assert wrong(found) == [(version, ReplayVerdict.DAMAGED) for version in gone]
    assert "it was published, as the audit log says" in found[-1].detail


def test_without_kept_contributions_the_retained_versions_are_made_again(
    short: VirtualRun,
) -> None:
    short.keeps_all = False
    run_virtual(short.run())

    found = replayed(short, 0)

    assert {e.verdict for e in found} == {ReplayVerdict.RECOMPUTED, ReplayVerdict.UNKNOWN}
    assert {e.detail for e in found if e.verdict is ReplayVerdict.UNKNOWN} <= {
        FORGOTTEN,
        "nothing here leads to the version before it",
    }
    assert all(each.verdict is ReplayVerdict.RECOMPUTED for each in found[-4:])
    assert counted(replayed(short, 0, NEWEST - 3)) == {ReplayVerdict.RECOMPUTED: 4}


def test_a_damaged_state_and_a_torn_frame_are_named(short: VirtualRun) -> None:
    run_virtual(short.run())
    directory = short.setting.directory / "fragment-0000"
    newest = max(versions_in(directory))
    path = record_path(directory, newest)
    flip(path, locate(path).sections["theta/0"].start)
    kept = frames_in(directory / KEPT)[2]
    kept.path.write_bytes(kept.path.read_bytes()[:-1])

    found = replayed(short, 0)

    assert found[0].verdict is ReplayVerdict.RECOMPUTED
    assert (
        found[1].detail == f"{kept.path} has {kept.end - 1} bytes, its header announces {kept.end}"
    )
    assert "section theta/0" in found[newest - 1].detail


@pytest.mark.parametrize("beyond", [0, 22])
def test_after_a_resume_abandoned_versions_are_told(short: VirtualRun, beyond: int) -> None:
    async def scenario() -> None:
        _, kept = await stopped(short, 14, beyond=beyond)
        await resumed(short, kept)

    run_virtual(scenario())

    found = replayed(short, 0)

    left = [each for each in found if each.verdict is ReplayVerdict.ABANDONED]
    pinned = 3
    assert [each.version for each in left] == list(range(pinned + 1, pinned + 1 + len(left)))
    assert bool(left) == bool(beyond) and {each.timeline for each in left} <= {0}
    stands = found[: len(found) - len(left)]
    assert [e.timeline for e in stands] == [0] * pinned + [1] * (NEWEST - pinned)
    assert counted(stands) == {ReplayVerdict.RECOMPUTED: NEWEST}, stands
    assert {each.detail for each in left} <= {"a resume left timeline 0 behind"}
