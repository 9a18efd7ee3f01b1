"""A syncer that is killed: at chosen points, at any moment, with islands that stall and diverge."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.errors import (
    AggregationError,
    QuorumLost,
)
from diloco.outer.optimizer import OuterOptimizer
from diloco.protocol.rounds.terms import OutcomeKind, RoundKey
from diloco.protos import fragment_pb2 as wire
from diloco.syncer.merge import Merger
from diloco.transport.calls.loopback import run_virtual
from diloco.transport.errors import PeerReset
from diloco.versions.store import FragmentStore
from tests.raw_island import KEY, NUMEL, Dead, RawIsland, SlowWorker, founded, restart
from tests.remaking import recompute
from tests.virtual_run import Setting, VirtualIsland, VirtualRun, descend


@pytest.fixture(params=[1, 3], ids=["snapshot", "log"])
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> Setting:
    """Two islands, one fragment of two lanes; only the raw islands below take part."""
    return Setting(
        {"w": [0.0] * NUMEL}, descend, tmp_path, inner_steps=8, snapshot_rounds=request.param
    )


def records_of(setting: Setting) -> FragmentStore:
    return FragmentStore(setting.directory, setting.plan().fragments[0], 4)


def version_of(run: VirtualRun) -> tuple[int, int, bool]:
    (state,) = run.syncer.states
    return state.version, state.attempt, state.is_open


def whole(directory: Path, seed: int = 0) -> Setting:
    """A run of 2 islands; of two seeds one has a record every round, one a log."""
    return Setting(
        {name: [0.5] * 200 for name in ("u", "v", "w")},
        wander,
        directory,
        inner_steps=22,
        inner_steps_per_round=4,
        num_fragments=2,
        overlap_steps=1,
        flush=True,
        uplink_codec="int4",
        downlink_codec="int4",
        optimizer=OuterOptimizer("nesterov", 0.7, 0.9, 2),
        tokens={"a": 3, "b": 5},
        snapshot_rounds=1 if seed % 2 == 0 else 3,
    )


def wander(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    """Move as far as the seed of island and step says."""
    generator = torch.Generator().manual_seed(ord(island) * 1000 + inner_step)
    for parameter in parameters.values():
        parameter.sub_(torch.randn(parameter.shape, generator=generator) * 0.1)


# -- kills at chosen points ----------------------------------------------------------------------


def test_a_syncer_killed_after_the_ack_loses_nothing_once_the_islands_resubmit(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        await a.contribute(value=2.0)
        first = await a.poll(KEY)

        await restart(run)
        second = await a.poll(KEY)

        assert (first.syncer_epoch, second.syncer_epoch) == (1, 2)
        assert not second.outcomes
        assert version_of(run) == (0, 0, True), "open at once: every island had its grant"
        await a.contribute(value=2.0)
        await b.contribute(value=4.0)
        await asyncio.sleep(1.0)
        assert await a.published(1) == [-3.0, -3.0]

    run_virtual(scenario())


def test_the_deadline_runs_in_a_restarted_syncer_though_one_island_never_comes_back(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run, (a, _) = await founded(setting)
        await a.contribute()
        await restart(run)

        await a.contribute()
        await asyncio.sleep(setting.round_deadline_s + 1)

        assert await a.end() is OutcomeKind.EXPIRED

    run_virtual(scenario())


def dying(method: Callable[..., Any], when: str, *, on_call: int) -> Callable[..., Any]:
    """`method`, whose n-th call ends in death before or after its work."""
    calls = 0

    def call(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == on_call and when == "before":
            raise Dead
        result = method(*arguments)
        if calls == on_call:
            raise Dead
        return result

    return call


@pytest.mark.parametrize(
    ("when", "version", "end"),
    [("before", 0, None), ("after", 1, OutcomeKind.INCLUDED)],
    ids=["before-the-commit", "after-the-commit"],
)
def test_a_syncer_killed_while_closing(
    setting: Setting,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    version: int,
    end: OutcomeKind | None,
) -> None:
    # The first commit is version 0.
    monkeypatch.setattr(FragmentStore, "commit", dying(FragmentStore.commit, when, on_call=2))

    async def scenario() -> None:
        run = VirtualRun(setting)
        run.worker = SlowWorker()
        await run.start_syncer()
        a, b = RawIsland(run, "a"), RawIsland(run, "b")
        await a.poll()
        await b.poll()
        await a.upload()
        await a.contribute(value=2.0)
        await b.contribute(value=4.0)
        await run.worker.died.wait()
        assert await a.end() is None, "nobody hears of what may not be durable"
        assert version_of(run)[0] == 0

        run.worker = SlowWorker()
        await restart(run)

        assert version_of(run) == (version, 0, True)
        assert await a.end() is end
        late = await b.submit(value=4.0)
        if version == 0:
            assert late.status == wire.SUBMIT_STATUS_RECEIVED
            await b.submit(lane_id=1, value=4.0)
            await a.contribute(value=2.0)
            await asyncio.sleep(1.0)
        else:
            assert late.outcome.kind == wire.OUTCOME_KIND_INCLUDED
        assert await a.published(1) == [-3.0, -3.0]
        assert await b.end() is OutcomeKind.INCLUDED

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("when", "attempt"), [("before", 0), ("after", 1)], ids=["before", "after"]
)
def test_an_expiry_is_durable_before_it_is_announced(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, when: str, attempt: int
) -> None:
    monkeypatch.setattr(
        FragmentStore, "record_expiry", dying(FragmentStore.record_expiry, when, on_call=1)
    )

    async def scenario() -> None:
        run, (a, _) = await founded(setting)
        run.worker = SlowWorker()
        await restart(run)
        await a.contribute()
        await run.worker.died.wait()
        assert await a.end() is None
        assert version_of(run)[1] == 0

        await restart(run)

        assert version_of(run) == (0, attempt, True)
        assert await a.end() is (OutcomeKind.EXPIRED if attempt else None)

    run_virtual(scenario())


def test_a_quorum_lost_that_only_a_restart_can_announce_names_island_and_command(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The syncer dies between the third recorded expiry and its announcement."""
    record_expiry = FragmentStore.record_expiry
    monkeypatch.setattr(FragmentStore, "record_expiry", dying(record_expiry, "after", on_call=3))

    async def scenario() -> None:
        run, (a, _) = await founded(setting)
        run.worker = SlowWorker()
        await restart(run)
        for attempt in range(3):
            await a.contribute(RoundKey(0, 0, 0, attempt))
            await asyncio.sleep(61.0)
        await run.worker.died.wait()
        assert run.syncer.fatal is None
        monkeypatch.setattr(FragmentStore, "record_expiry", record_expiry)

        await restart(run)

        fatal = (await a.poll()).fatal
        assert fatal.exit_code == 50
        assert "missing: b. The run stops (on_member_lost = stop)" in fatal.reason
        assert "diloco coordinator RUN.toml --resume" in fatal.reason
        assert "diloco island RUN.toml --island b" in fatal.reason

    run_virtual(scenario())


def test_results_of_no_use_are_counted_over_a_restart(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise AggregationError("theta is not finite")

    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        monkeypatch.setattr(Merger, "publish", broken)
        for attempt in range(3):
            assert run.syncer.fatal is None
            await restart(run)
            await a.contribute(RoundKey(0, 0, 0, attempt))
            await b.contribute(RoundKey(0, 0, 0, attempt))
            await asyncio.sleep(1.0)
        assert run.syncer.fatal.exit_code == AggregationError.exit_code

        await restart(run)

        fatal = (await a.poll()).fatal
        assert fatal.exit_code == AggregationError.exit_code
        assert "results not usable" in fatal.reason

    run_virtual(scenario())


def test_a_syncer_whose_worker_fails_ends_and_says_why(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)

        def broken(*_: object) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(FragmentStore, "commit", broken)
        await a.contribute()
        await b.contribute()
        await run.syncer.ended.wait()

        assert isinstance(run.syncer.failure, OSError)
        assert run.syncer.fatal is None
        assert version_of(run)[0] == 0

    run_virtual(scenario())


@pytest.mark.parametrize("lost", ["newest", "all"])
def test_an_island_ahead_of_its_syncer_is_told_that_the_store_lost_a_version(
    setting: Setting, lost: str
) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        await a.contribute()
        await b.contribute()
        await asyncio.sleep(1.0)
        known = (await a.poll()).fragments
        await run.kill_syncer()
        for path in sorted(setting.directory.rglob("*.record"))[-1 if lost == "newest" else 0 :]:
            path.write_bytes(b"rotten")
        await run.start_syncer()

        reply = await a.poll(known=known)

        assert not reply.HasField("fatal")
        assert reply.fragments[0].is_damaged
        assert run.syncer.damage(0)
        with pytest.raises(TimeoutError):  # asked again and again, until it is repaired
            await asyncio.wait_for(a.submit(RoundKey(0, 0, 1, 0)), 1.0)

    run_virtual(scenario())


# -- kills at any moment ---------------------------------------------------------------------------


def truth(records: list[Mapping[str, Any]]) -> dict[tuple[int, int], Any]:
    """What became durable, by fragment and version; every version must have been one thing."""
    made: dict[tuple[int, int], Any] = {}
    for header in records:
        assert made.setdefault((header["fragment_id"], header["version"]), header) == header
    return made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    run = VirtualRun(whole(tmp_path_factory.mktemp("undisturbed")))
    islands = run_virtual(run.run())
    assert islands["a"].values() == islands["b"].values()
    return truth(run.records), {name: island.published for name, island in islands.items()}


async def kill_again_and_again(run: VirtualRun, rng: random.Random, up_s: float) -> None:
    while True:
        await asyncio.sleep(rng.choice([rng.uniform(0.0, 1.0), rng.uniform(0.0, up_s)]))
        await run.kill_syncer()
        await asyncio.sleep(rng.choice([0.0, rng.uniform(0.0, 3.0)]))
        run.worker = SlowWorker(rng.uniform(0.0, 0.2), rng.uniform(0.0, 0.2))
        await run.start_syncer()


async def disturbed(
    run: VirtualRun, *disturbances: Coroutine[Any, Any, None]
) -> tuple[dict[str, VirtualIsland], list[BaseException | None]]:
    """Run all islands while something else goes on; returns them and how they ended."""
    run.worker = SlowWorker(0.1, 0.1)
    await run.start_syncer()
    islands = {name: run.island(name) for name in run.setting.islands}
    others = [asyncio.create_task(disturbance) for disturbance in disturbances]
    ends = await asyncio.gather(
        *(island.run() for island in islands.values()), return_exceptions=True
    )
    for other in others:
        other.cancel()
    for end in await asyncio.gather(*others, return_exceptions=True):
        assert isinstance(end, asyncio.CancelledError), end
    return islands, ends


@pytest.mark.parametrize("seed", range(8))
def test_a_run_whose_syncer_is_killed_at_any_moment_publishes_the_same_bytes(
    tmp_path: Path, undisturbed: tuple[Any, Any], seed: int
) -> None:
    setting = whole(tmp_path, seed)

    async def scenario() -> tuple[VirtualRun, dict[str, VirtualIsland]]:
        run = VirtualRun(setting)
        islands, ends = await disturbed(run, kill_again_and_again(run, random.Random(seed), 4.0))
        assert ends == [None, None]
        return run, islands

    run, islands = run_virtual(scenario())

    records, published = undisturbed
    assert run.epoch > 5
    assert truth(run.records) == records
    assert {name: island.published for name, island in islands.items()} == published
    assert islands["a"].values() == islands["b"].values()
    for island in islands.values():
        assert {event["outcome"] for event in island.kinds("fragment_merged")} == {"included"}
        assert not island.kinds("round_expired")
        assert not island.kinds("digest_mismatch")
        assert island.kinds("syncer_restarted")
    assert_recomputed(setting)


def assert_recomputed(setting: Setting) -> None:
    """Every retained version follows from the one before, bit by bit."""
    for fragment in setting.plan().fragments:
        store = FragmentStore(setting.directory, fragment, 4)
        last = store.recover()
        assert last is not None
        for version in range(max(1, last.record.version - 3), last.record.version + 1):
            after = store.load(version)
            assert after.lane_digests == recompute(
                store.load(version - 1), after, setting.publication(), fragment
            )


@pytest.mark.parametrize("seed", range(8))
def test_with_kills_stalls_and_divergence_islands_never_disagree(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    setting = replace(whole(tmp_path, seed), round_deadline_s=6.0, islands=("a", "b", "c"))

    def stray(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
        wander(island, inner_step, parameters)
        if rng.random() < 0.03:
            parameters["u"].fill_(float("nan"))

    async def stall(islands: list[VirtualIsland]) -> None:
        while True:
            await asyncio.sleep(rng.uniform(0.0, 10.0))
            for island in islands:
                step_s = rng.choice([1.0, 1.0, 1.0, 0.1, 1.5 * setting.round_deadline_s])
                island.setting = replace(island.setting, step_s=step_s)

    async def scenario() -> tuple[VirtualRun, dict[str, VirtualIsland], list[Any]]:
        run = VirtualRun(replace(setting, inner_step=stray))
        made: list[VirtualIsland] = []
        make = run.island
        run.island = lambda name: made.append(make(name)) or made[-1]  # type: ignore[method-assign]
        kills = kill_again_and_again(run, rng, up_s=4 * setting.round_deadline_s)
        islands, ends = await disturbed(run, kills, stall(made))
        return run, islands, ends

    run, islands, ends = run_virtual(scenario())

    made = truth(run.records)
    for (_, version), header in made.items():
        assert len({c["island"] for c in header["contributors"]}) == len(header["contributors"])
        assert bool(header["contributors"]) == bool(version)
    for island in islands.values():
        for event in island.kinds("fragment_merged"):
            header = made[event["fragment_id"], event["version"]]
            assert event["digest"] == header["digest"]
            is_counted = island.name in {c["island"] for c in header["contributors"]}
            assert (event["outcome"] == "included") == is_counted
        assert not island.kinds("digest_mismatch")
    if any(ends):
        # One that diverged for good, or stalled for three deadlines, costs the others the quorum.
        assert all(isinstance(end, QuorumLost | AggregationError) for end in ends), ends
    else:
        assert len({str(island.values()) for island in islands.values()}) == 1
    assert_recomputed(setting)


def test_nothing_is_left_behind_at_the_end_of_a_run(tmp_path: Path) -> None:
    setting = whole(tmp_path)

    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        islands = [run.island(name) for name in setting.islands]
        await asyncio.gather(*(island.run() for island in islands))
        await asyncio.sleep(0.1)

        for service in run.syncer._services.values():
            runner = service.runner
            assert runner._spool == service._initial.lanes == {}
            assert runner.rounds.current.contributions == {}
        assert run.syncer._tasks == set()
        for island in islands:
            assert len(island.exchange._tasks._tasks) == 1, "the poll"
            assert all(not c.sending and not c.staged for c in island.exchange._fragments.values())

    run_virtual(scenario())


def test_calls_of_a_killed_syncer_are_reset_not_answered(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, _) = await founded(setting)
        known = await a.poll()
        waiting = asyncio.create_task(
            a.poll(wait_s=60.0, known=known.fragments, known_epoch=known.syncer_epoch)
        )
        await asyncio.sleep(1.0)

        await run.kill_syncer()

        with pytest.raises(PeerReset):
            await waiting

    run_virtual(scenario())
