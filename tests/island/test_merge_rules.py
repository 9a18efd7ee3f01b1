"""Merge rules and outer Adam in whole runs: islands agree, outliers hear of it, nothing is lost."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco.errors import ConfigError
from diloco.outer.combination import MergeRule
from diloco.outer.optimizer import OuterOptimizer
from diloco.telemetry.events import AlarmRaised
from diloco.transport.calls.loopback import run_virtual
from diloco.versions.store import FragmentStore
from diloco.versions.version import VersionRecord
from tests.remaking import recompute
from tests.virtual_run import Setting, VirtualIsland, VirtualRun

TARGET = 0.75
#: The rounds in which island c sends a hundred times what it should.
WILD = range(9, 17)


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def approach(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    """Go a tenth of the way to the target, and astray as far, in a direction of one's own."""
    generator = torch.Generator().manual_seed(ord(island) * 1000 + inner_step)
    for parameter in parameters.values():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(0.1 * (TARGET - parameter) + 0.01 * noise)


def go_wild(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    approach(island, inner_step, parameters)
    if island == "c" and inner_step in WILD:
        for name, parameter in parameters.items():
            parameter.add_(99.0 * (parameter - before[name]))


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Three islands; an embedding of 300 values is cut in two of three fragments; 12 rounds."""
    return Setting(
        {"embed": [0.0] * 300, "norm": [1.0] * 5, "w": [0.0] * 200},
        approach,
        tmp_path,
        inner_steps=48,
        islands=("a", "b", "c"),
        tokens={"a": 1, "b": 2, "c": 1},
        num_fragments=3,
        overlap_steps=1,
        uplink_codec="int4",
        downlink_codec="int4",
        flush=True,
    )


def outcomes(island: VirtualIsland) -> list[tuple[int, str]]:
    """Inner step of each merge, and how what was sent for it ended."""
    return [(event["inner_step"], event["outcome"]) for event in island.kinds("fragment_merged")]


def check(setting: Setting, islands: dict[str, VirtualIsland]) -> list[VersionRecord]:
    """Insist on equal digests and versions that can be recomputed; return the newest records."""
    assert len({island.session.digests for island in islands.values()}) == 1
    newest = []
    for fragment in setting.plan().fragments:
        store = FragmentStore(setting.directory, fragment, 4)
        found = store.recover()
        assert found is not None
        version = found.record.version
        for before, after in pairwise([store.load(v) for v in range(version - 4, version + 1)]):
            rules = setting.publication()
            assert recompute(before, after, rules, fragment) == after.lane_digests
        newest.append(found.record)
    return newest


def distance(island: VirtualIsland) -> float:
    """Largest distance from the target of what is published."""
    return max(abs(value - TARGET) for values in island.values().values() for value in values)


@pytest.mark.parametrize("weighting", ["tokens", "tokens_times_rate"])
def test_a_run_of_radial_averages_reaches_the_target(setting: Setting, weighting: str) -> None:
    rule = MergeRule("radial_directional", weighting, 3.0)  # type: ignore[arg-type]
    setting = replace(setting, merge=rule)
    run = VirtualRun(setting)

    islands = run_virtual(run.run())

    newest = check(setting, islands)
    assert all(record.is_flush for record in newest)
    merged = [record for record in run.records if record["version"] and not record["is_flush"]]
    assert all("merge" in record for record in merged)
    assert not any(record["merge"]["rejected"] for record in merged)
    assert distance(islands["a"]) < 0.1


def test_an_island_that_sends_a_hundredfold_is_left_out_and_told(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    setting = replace(
        setting,
        inner_step=go_wild,
        local_mix=0.0,
        merge=MergeRule("radial_directional"),
    )
    run = VirtualRun(setting)

    islands = run_virtual(run.run())

    check(setting, islands)
    rejected = [record for record in run.records if record.get("merge", {}).get("rejected")]
    assert {island for record in rejected for island in record["merge"]["rejected"]} == {"c"}
    assert all([c["island"] for c in record["contributors"]] == ["a", "b"] for record in rejected)
    assert len(rejected) >= 3
    left_out = [step for step, outcome in outcomes(islands["c"]) if outcome == "refused"]
    assert len(left_out) == len(rejected)
    assert {outcome for _, outcome in outcomes(islands["a"])} == {"included"}
    assert sum(run.syncer.meter.counts.rejected.values()) == len(rejected)
    (counted,) = run.syncer.refusals
    assert (counted.island, counted.cause, counted.count) == ("c", "outlier", len(rejected))
    told = [
        r.getMessage() for r in caplog.records if r.name == "diloco.island.exchange.contributions"
    ]
    assert sum("contribution refused" in line and "is usual" in line for line in told) == len(
        rejected
    )
    assert distance(islands["a"]) < 0.1, "what is published never saw it"


def test_without_a_guard_the_same_island_spoils_the_run(setting: Setting) -> None:
    unguarded = replace(setting, inner_step=go_wild, merge=MergeRule(guard=False))
    islands = run_virtual(VirtualRun(unguarded).run())

    published = [abs(v["w"][0] - TARGET) for v in islands["a"].published]
    assert max(published) > 1.0


def test_where_the_guard_refuses_all_that_came_the_round_waits_for_others(
    setting: Setting,
) -> None:
    """With a quorum of one, the fastest island's contributions are merged alone or not at all."""

    def flip(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
        approach(island, inner_step, parameters)
        if island == "a" and inner_step in range(18, 27):
            parameters["w"][7] = 4.8e35

    setting = replace(
        setting,
        inner_step=flip,
        islands=("a", "b"),
        num_fragments=1,
        quorum=1,
        min_members=1,
        steps_s={"b": 1.2},
        total_tokens=160,
        merge=MergeRule(),
    )
    setting = replace(setting, timing=setting.measured(grace_s=0.0))
    run = VirtualRun(setting)

    islands = run_virtual(run.run())

    assert len({island.session.digests for island in islands.values()}) == 1
    assert distance(islands["a"]) < 0.2
    (counted,) = run.syncer.refusals
    assert (counted.island, counted.cause) == ("a", "outlier")
    alarms = [event for event in run.events if isinstance(event, AlarmRaised)]
    refused = [event for event in alarms if event.alarm != "island_late"]  # nobody is waited for
    assert {(event.alarm, event.about) for event in refused} == {("contribution_refused", "a")}
    assert "diloco kick HOST:PORT a" in refused[0].text


def test_outer_adam_reaches_the_target(setting: Setting) -> None:
    adam = OuterOptimizer("adam", 0.1, 0.0, 0, (0.9, 0.95), 0.1)
    setting = replace(setting, optimizer=adam)

    islands = run_virtual(VirtualRun(setting).run())

    newest = check(setting, islands)
    assert all(lane.second_moment is not None for record in newest for lane in record.lanes)
    assert all(lane.second_moment.any() for record in newest for lane in record.lanes)
    assert distance(islands["a"]) < 0.2


def test_a_killed_syncer_goes_on_with_both_moments(setting: Setting, tmp_path: Path) -> None:
    setting = replace(setting, optimizer=OuterOptimizer("adam", 0.1, 0.0, 0))
    undisturbed = run_virtual(VirtualRun(replace(setting, directory=tmp_path / "u")).run())

    async def disturbed() -> dict[str, VirtualIsland]:
        run = VirtualRun(setting)
        await run.start_syncer()
        islands = {name: run.island(name) for name in setting.islands}
        running = asyncio.gather(*(island.run() for island in islands.values()))
        for _ in range(2):
            await asyncio.sleep(17.3)
            await run.kill_syncer()
            await run.start_syncer()
        await running
        for island in islands.values():
            await island.exchange.stop()
        await run.kill_syncer()
        return islands

    islands = run_virtual(disturbed())

    check(setting, islands)
    assert islands["a"].session.digests == undisturbed["a"].session.digests


@pytest.mark.parametrize(("before", "after"), [("nesterov", "adam"), ("adam", "sgd")])
def test_a_store_of_another_outer_optimizer_is_refused(
    setting: Setting, before: str, after: str
) -> None:
    short = replace(setting, inner_steps=8)

    def rules(name: str) -> Setting:
        return replace(short, optimizer=OuterOptimizer(name, 0.1, 0.0, 0))  # type: ignore[arg-type]

    run_virtual(VirtualRun(rules(before)).run())

    with pytest.raises(ConfigError, match=f"name = '{after}', but version .* the moments of"):
        run_virtual(VirtualRun(rules(after)).start_syncer())
