"""An island that returns: where it goes on, what it takes, and that it disturbs nobody."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.errors import FingerprintMismatch
from diloco.outer.optimizer import OuterOptimizer
from diloco.transport.calls.loopback import run_virtual
from tests.raw_island import SlowWorker
from tests.virtual_run import Setting, VirtualIsland, VirtualRun

DESCENT = {"a": 1.0, "b": 3.0, "c": 2.0}


def descend(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    for parameter in parameters.values():
        parameter.sub_(torch.linspace(0.1, DESCENT[island], parameter.numel()))


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Two fragments, H = 4, tau = 1: due after 2, 4, 6, 8, 10; 12 inner steps and a flush."""
    return Setting(
        {name: [16.0] * 5 for name in "tuvw"},
        descend,
        tmp_path,
        inner_steps=12,
        num_fragments=2,
        overlap_steps=1,
        flush=True,
        optimizer=OuterOptimizer("nesterov", 0.7, 0.9, 2),
        uplink_codec="int4",
        downlink_codec="int4",
    )


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power loss, and waiting for the disk is most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Starts:
    """Starts of islands one after another, each ended without a word by `kill`."""

    def __init__(self, run: VirtualRun) -> None:
        self.run = run
        self.islands: dict[str, VirtualIsland] = {}
        self.ended: list[VirtualIsland] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._incarnations = {name: count(1) for name in run.setting.islands}

    def begin(self, *names: str) -> None:
        for name in names:
            before = self.islands.get(name)
            last_inner_step = 0 if before is None else before.session.inner_step
            island = self.islands[name] = self.run.island(name, next(self._incarnations[name]))
            self._tasks[name] = asyncio.create_task(self._live(island, last_inner_step))

    async def _live(self, island: VirtualIsland, last_inner_step: int) -> None:
        await island.start(last_inner_step=last_inner_step)
        await island.go_on()

    async def kill(self, name: str) -> VirtualIsland:
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks[name], return_exceptions=True)
        await self.islands[name].drop()
        self.ended.append(self.islands[name])
        return self.islands[name]

    async def end(self) -> None:
        await asyncio.gather(*self._tasks.values())
        for island in self.islands.values():
            await island.drop()
        await self.run.kill_syncer()


async def living(setting: Setting, *, work_s: float = 0.0) -> Starts:
    """A run in which every piece of the syncer's work takes a while, and all its islands."""
    run = VirtualRun(setting)
    run.worker = SlowWorker(before_s=work_s)
    await run.start_syncer()
    starts = Starts(run)
    starts.begin(*setting.islands)
    return starts


def returned_at(
    setting: Setting, kill_s: float, *, away_s: float = 0.5, work_s: float = 0.3
) -> dict[str, VirtualIsland]:
    """Kill island a at a time, start it again a while later, and run to the end."""

    async def scenario() -> dict[str, VirtualIsland]:
        starts = await living(setting, work_s=work_s)
        await asyncio.sleep(kill_s)
        await starts.kill("a")
        await asyncio.sleep(away_s)
        starts.begin("a")
        await starts.end()
        return starts.islands

    return run_virtual(scenario())


def check_one_run(islands: dict[str, VirtualIsland]) -> None:
    first, *others = islands.values()
    for island in (first, *others):
        assert island.kinds("round_expired") == []
        assert island.session.inner_step == island.setting.inner_steps
        assert island.session.digests == first.session.digests
        assert island.session.versions == first.session.versions
        if island.setting.flush:
            assert island.values() == first.values()


# -- at every instant ----------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "P2 tau1": {},
    "P1 tau0": {"num_fragments": 1, "overlap_steps": 0},
    "P4 tau3, three in flight": {"num_fragments": 4, "overlap_steps": 3},
    "phases, no flush": {"phases": (3, 1), "overlap_steps": 2, "flush": False},
    "both due at once, alpha": {"phases": (2, 2), "overlap_steps": 2, "local_mix": 0.5},
    "three islands, warm start": {
        "islands": ("a", "b", "c"), "start_step": 5, "inner_steps": 15, "num_fragments": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "begin",
    [pytest.param(1, id="amid-a-step"), pytest.param(2, id="at-a-step", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_island_may_return_at_any_time(
    setting: Setting, tmp_path: Path, shape: str, begin: int
) -> None:
    changed = replace(setting, **SHAPES[shape])

    # Steps take 1 s and pieces of work 0.3 s: at every half of a second is another situation,
    # until the flush is over.
    for tick in range(begin, 30, 2):
        islands = returned_at(replace(changed, directory=tmp_path / str(tick)), tick / 2)
        check_one_run(islands)


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_islands_return_to_any_schedule_again_and_again(
    setting: Setting, data: st.DataObject
) -> None:
    period = data.draw(st.integers(1, 6), "H")
    fragments = data.draw(st.integers(1, 4), "P")
    phases = st.lists(st.integers(0, period), min_size=fragments, max_size=fragments)
    changed = replace(
        setting,
        islands=data.draw(st.sampled_from([("a", "b"), ("a", "b", "c")]), "islands"),
        inner_steps_per_round=period,
        num_fragments=fragments,
        inner_steps=data.draw(st.integers(1, 12), "inner steps"),
        overlap_steps=data.draw(st.integers(0, period - 1), "tau"),
        phases=tuple(data.draw(st.one_of(st.just([]), phases), "phases")),
        flush=data.draw(st.booleans(), "flush"),
        error_feedback=data.draw(st.booleans(), "error feedback"),
        round_deadline_s=600.0,
    )
    kills = data.draw(
        st.lists(
            st.tuples(st.sampled_from(changed.islands), st.floats(0.0, 6.0), st.floats(0.0, 3.0)),
            max_size=5,
        ),
        "kills",
    )

    async def scenario(directory: str) -> dict[str, VirtualIsland]:
        starts = await living(replace(changed, directory=Path(directory)), work_s=0.3)
        for name, lives_s, away_s in kills:
            await asyncio.sleep(lives_s)
            await starts.kill(name)
            await asyncio.sleep(away_s)
            starts.begin(name)
        await starts.end()
        return starts.islands

    with TemporaryDirectory() as directory:
        check_one_run(run_virtual(scenario(directory)))


# -- what it takes, and what it says -------------------------------------------------------------


def test_it_takes_what_is_published_and_says_what_was_lost(setting: Setting) -> None:
    async def scenario() -> None:
        starts = await living(setting)
        await asyncio.sleep(7.5)
        before = await starts.kill("a")
        assert before.session.inner_step == 7
        starts.begin("a")
        await asyncio.sleep(0.1)
        a = starts.islands["a"]

        # The fragments were sent after 6 and 4; the second is due after 8.
        assert (a.session.inner_step, a.session.versions) == (6, (2, 1))
        assert a.values() == published_of(starts.run)
        assert a.kinds("island_rejoined") == [
            {"kind": "island_rejoined", "inner_step": 6, "lost_steps": 1}
        ]
        assert a.kinds("initial_overwritten") == []
        await starts.end()

    run_virtual(scenario())


def published_of(run: VirtualRun) -> dict[str, list[float]]:
    plan, values = run.setting.plan(), {}
    for fragment in plan.fragments:
        record = run.syncer._services[fragment.fragment_id].runner.record
        assert record is not None
        whole = torch.cat([lane.published for lane in record.lanes])
        for entry in fragment.entries:
            size = entry.end - entry.start
            values[entry.name] = whole[entry.offset : entry.offset + size].tolist()
    return values


def test_only_lanes_that_differ_are_fetched(setting: Setting) -> None:
    fetched = []

    async def scenario() -> None:
        starts = await living(replace(setting, phases=(2, 0)))
        await asyncio.sleep(3.9)  # version 1 of the first fragment, version 0 of the second
        await starts.kill("a")
        island = starts.run.island("a", 2)
        real = island.exchange._links[0].calls.fetch

        async def fetch(fragment_id: int, version: int, *rest: Any, **named: Any) -> Any:
            fetched.append((fragment_id, version))
            return await real(fragment_id, version, *rest, **named)

        island.exchange._links[0].calls.fetch = fetch  # type: ignore[method-assign]
        await island.start()

    run_virtual(scenario())

    assert fetched == [(0, 1)]


def test_a_closing_round_is_waited_for(setting: Setting) -> None:
    async def scenario() -> None:
        starts = await living(setting)
        await asyncio.sleep(5.9)
        starts.run.worker.before_s = 2.0  # type: ignore[attr-defined]
        while starts.run.syncer.phase(0) != "closing":
            await asyncio.sleep(0.1)
        await starts.kill("a")
        starts.begin("a")
        await asyncio.sleep(1.0)
        assert starts.run.syncer.phase(0) == "closing"
        assert starts.islands["a"].session.versions == (0, 0), "it has not entered yet"
        await asyncio.sleep(3.0)

        assert starts.islands["a"].session.versions == (2, 1)
        assert starts.islands["a"].kinds("fragment_sent") == []
        await starts.end()
        check_one_run(starts.islands)

    run_virtual(scenario())


def test_two_starts_at_once_leave_the_newer_one(setting: Setting) -> None:
    async def scenario() -> None:
        starts = await living(setting)
        await asyncio.sleep(5.5)
        first = starts.islands["a"]
        starts.begin("a")
        await asyncio.sleep(2.0)
        assert first.exchange.failure is not None
        assert "a newer start of island 'a' has joined" in str(first.exchange.failure)
        await starts.end()
        check_one_run(starts.islands)

    run_virtual(scenario())


def test_all_islands_may_return_at_once(setting: Setting) -> None:
    async def scenario() -> None:
        starts = await living(setting)
        await asyncio.sleep(5.5)
        for name in setting.islands:
            await starts.kill(name)
        starts.begin(*setting.islands)
        await asyncio.sleep(0.1)
        assert {island.session.inner_step for island in starts.islands.values()} == {4}
        await starts.end()
        check_one_run(starts.islands)

    run_virtual(scenario())


def test_while_the_others_flush_it_makes_its_last_steps_again_and_flushes(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        starts = await living(setting)
        await asyncio.sleep(11.5)
        await starts.kill("a")
        await asyncio.sleep(5.0)
        assert starts.islands["b"].session.inner_step == 12
        starts.begin("a")
        await asyncio.sleep(0.1)
        assert starts.islands["a"].session.inner_step == 10
        await starts.end()
        check_one_run(starts.islands)

    run_virtual(scenario())


def test_what_is_flushed_is_not_flushed_again(setting: Setting) -> None:
    async def scenario() -> None:
        starts = await living(setting)
        await asyncio.sleep(12.1)
        b = starts.islands["b"]
        assert all(record.is_flush for record in records(starts.run))
        await starts.kill("a")
        starts.begin("a")
        await starts.end()

        a = starts.islands["a"]
        assert a.kinds("fragment_sent") == []
        assert (a.session.inner_step, a.session.num_in_flight) == (12, 0)
        assert a.values() == b.values()
        assert a.session.digests == b.session.digests

    run_virtual(scenario())


def test_a_flush_of_one_fragment_only_is_kept_while_the_other_is_made_up(setting: Setting) -> None:
    """The first fragment's flush arrived before the island died, the second's did not."""

    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        starts = Starts(run)
        starts.begin("a", "b")
        a = starts.islands["a"]
        real = a.exchange._links[0].calls.submit

        async def submit(sent: Any, *rest: Any, **named: Any) -> Any:
            if sent.is_flush and sent.key.fragment_id == 1:
                await asyncio.Event().wait()
            return await real(sent, *rest, **named)

        a.exchange._links[0].calls.submit = submit  # type: ignore[method-assign]
        await asyncio.sleep(14.0)
        assert [record.is_flush for record in records(run)] == [True, False]
        await starts.kill("a")
        starts.begin("a")
        await asyncio.sleep(0.1)
        # The second fragment was sent after 8 and is sent after 12 by the flush alone.
        assert starts.islands["a"].session.inner_step == 8
        await starts.end()

        sent = starts.islands["a"].kinds("fragment_sent")
        assert [(e["fragment_id"], e["is_flush"]) for e in sent] == [(1, True)]
        check_one_run(starts.islands)

    run_virtual(scenario())


def records(run: VirtualRun) -> list[Any]:
    return [service.runner.record for service in run.syncer._services.values()]


def test_after_expiries_it_joins_the_others_at_the_due_step_they_come_to(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        starts = await living(replace(setting, round_deadline_s=20.0))
        await asyncio.sleep(4.7)
        await starts.kill("a")
        # b sends the first fragment after 6 and the second after 8; both expire.
        await asyncio.sleep(60.0)
        b = starts.islands["b"]
        assert [e["inner_step"] for e in b.kinds("round_expired")] == [7, 9]
        assert b.session.inner_step == 11
        starts.begin("a")
        await asyncio.sleep(0.1)
        a = starts.islands["a"]
        assert a.session.inner_step == 8
        await starts.end()

        assert a.kinds("round_expired") == []
        assert [e["attempt"] for e in a.kinds("fragment_sent")][:1] == [1]
        assert a.session.digests == b.session.digests
        assert a.values() == b.values()

    run_virtual(scenario())


# -- the first start -----------------------------------------------------------------------------


def other_initial(setting: Setting) -> Setting:
    return replace(setting, initial={name: [15.0] * 5 for name in setting.initial})


def test_initial_parameters_that_differ_are_refused(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        a = run.island("a")
        run.setting = other_initial(setting)
        b = run.island("b")
        entering = asyncio.create_task(a.start())
        with pytest.raises(FingerprintMismatch, match=r"initial parameters of island 'b' differ"):
            await b.start()
        await entering

    run_virtual(scenario())


def test_initial_parameters_that_differ_are_overwritten_with_an_event(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        a = run.island("a")
        run.setting = replace(setting, initial={**setting.initial, "w": [15.0] * 5})
        b = run.island("b")
        await asyncio.gather(a.start(overwrite_initial=True), b.start(overwrite_initial=True))

        assert a.values() == b.values() == {name: [16.0] * 5 for name in "tuvw"}
        assert a.events == []
        (event,) = b.kinds("initial_overwritten")
        of_w = [
            f.fragment_id for f in setting.plan().fragments
            if any(entry.name == "w" for entry in f.entries)
        ]  # fmt: skip
        assert event["fragment_ids"] == tuple(of_w)
        assert b.kinds("island_rejoined") == []

    run_virtual(scenario())


def test_a_warm_start_begins_at_its_step_with_a_shorter_first_interval(setting: Setting) -> None:
    warm = replace(setting, start_step=5, inner_steps=15, num_fragments=1)

    islands = run_virtual(VirtualRun(warm).run())

    sent = islands["a"].kinds("fragment_sent")
    assert [(e["inner_step"], e["weight_steps"], e["is_flush"]) for e in sent] == [
        (8, 3, False),
        (12, 4, False),
        (15, 3, True),
    ]
    assert len(islands["a"].local) == 10


# -- checkpoints of one that returned --------------------------------------------------------------


def test_no_checkpoint_is_taken_where_the_others_held_other_versions(setting: Setting) -> None:
    async def scenario() -> None:
        slow = replace(setting, overlap_steps=3, inner_steps=20)
        run = VirtualRun(slow)
        await run.start_syncer()
        first, b = run.island("a"), run.island("b")
        await asyncio.gather(first.start(), b.start())
        await asyncio.gather(first.train(6), b.train(6))
        await asyncio.sleep(0.1)
        await first.drop()
        a = run.island("a", 2)
        await a.start(last_inner_step=6)
        # Both were sent after 6 and 4; b merges them after 9 and 7.
        assert (a.session.inner_step, a.session.first_checkpoint_step) == (6, 9)
        assert a.session.versions == (2, 1)
        assert b.session.versions == (1, 0)

        with pytest.raises(ValueError, match=r"after inner step 6: .* inner step 9 on"):
            await a.checkpoint()
        await asyncio.gather(a.train(3), b.train(3))
        assert a.session.versions == b.session.versions
        await asyncio.gather(a.checkpoint(), b.checkpoint())

    run_virtual(scenario())
