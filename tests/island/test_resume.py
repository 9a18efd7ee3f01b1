"""Run checkpoints: a run that was stopped and resumed equals one that was not, bit for bit."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.errors import ConfigError, DilocoError, FingerprintMismatch, IslandFailed
from diloco.island.agreement import Agreement
from diloco.island.lanes.place import LanePlace
from diloco.island.outer_state import LOOK_S
from diloco.outer.optimizer import OuterOptimizer
from diloco.protocol.island.soundness import StepBound
from diloco.transport.calls.loopback import run_virtual
from diloco.versions.pins import pinned_steps
from tests.virtual_run import Checkpoint, Setting, VirtualIsland, VirtualRun

NESTEROV = OuterOptimizer("nesterov", 0.7, 0.9, 2)
NAMES = ("t", "u", "v", "w")
T = TypeVar("T")


def wander(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    """Move every value by an amount that depends on where it is, and on the step."""
    seed = int.from_bytes(hashlib.blake2b(f"{island}/{inner_step}".encode()).digest()[:6])
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(parameters):
        parameter = parameters[name]
        move = torch.randn(parameter.shape, generator=generator)
        parameter.add_(0.1 * move - 0.05 * parameter)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Two fragments, H = 4, tau = 1: due after 2, 4, 6, ...; 13 inner steps and a flush."""
    return Setting(
        {name: [0.3 * (i + 1)] * 130 for i, name in enumerate(NAMES)},
        wander,
        tmp_path,
        inner_steps=13,
        num_fragments=2,
        overlap_steps=1,
        flush=True,
        tokens={"a": 3, "b": 2},
        optimizer=NESTEROV,
    )


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power loss, and waiting for the disk is most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def streaming(setting: Setting, **changes: Any) -> Setting:
    both = {"uplink_codec": "int4", "downlink_codec": "int4"}
    return replace(setting, **(both | changes))


def end_of(islands: dict[str, VirtualIsland]) -> dict[str, Any]:
    """What must not differ: parameters, published digests, versions and counters."""
    return {
        name: (
            island.values(),
            island.session.digests,
            [(x.version, x.tokens, x.steps, x.local_steps) for x in island.session.state.ledgers],
        )
        for name, island in islands.items()
    }


def uninterrupted(setting: Setting, directory: Path) -> dict[str, Any]:
    return end_of(run_virtual(VirtualRun(replace(setting, directory=directory)).run()))


async def stopped(
    run: VirtualRun, step: int, *, beyond: int = 0
) -> tuple[dict[str, VirtualIsland], dict[str, Checkpoint]]:
    """Take a checkpoint at a step on all islands, go `beyond` steps further, and end them all."""
    await run.start_syncer()
    islands = {name: run.island(name) for name in run.setting.islands}

    async def train(island: VirtualIsland) -> Checkpoint:
        await island.start()
        await island.train(step)
        kept = await island.checkpoint()
        await island.train(beyond)
        return kept

    kept = await asyncio.gather(*(train(island) for island in islands.values()))
    for island in islands.values():
        await island.drop()
    return islands, dict(zip(islands, kept, strict=True))


async def resumed(run: VirtualRun, kept: dict[str, Checkpoint]) -> dict[str, VirtualIsland]:
    """Resume all islands from a checkpoint and run them to their ends."""
    await run.resume(next(iter(kept.values())).inner_step)
    islands = {name: run.island(name, run.timeline + 1) for name in run.setting.islands}

    async def go_on(island: VirtualIsland) -> None:
        await island.resume(kept[island.name])
        await island.go_on()
        await island.drop()

    await asyncio.gather(*map(go_on, islands.values()))
    await run.kill_syncer()
    return islands


def stopped_and_resumed(setting: Setting, step: int, *, beyond: int = 0) -> dict[str, Any]:
    async def scenario() -> dict[str, VirtualIsland]:
        run = VirtualRun(setting)
        _, kept = await stopped(run, step, beyond=beyond)
        return await resumed(run, kept)

    return end_of(run_virtual(scenario()))


# -- equal, bit for bit --------------------------------------------------------------------------

# changes of the setting -> steps to stop at: in quiet, at due steps, with contributions in flight,
# at merge steps, at the last step.
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "P1 tau0": ({"num_fragments": 1, "overlap_steps": 0}, (1, 4, 5)),
    "P1 tau3 alpha": ({"num_fragments": 1, "overlap_steps": 3, "local_mix": 0.5}, (4, 6, 7)),
    "P2 tau1": ({}, (0, 2, 3, 4, 12, 13)),
    "P4 tau3, three in flight": ({"num_fragments": 4, "overlap_steps": 3}, (1, 3, 6, 9)),
    "P1 tau3 since the send": (
        {"num_fragments": 1, "overlap_steps": 3, "local_mix": "since_send"},
        (4, 6, 7),
    ),
    "P4 tau3 since the send, error feedback": (
        {
            "num_fragments": 4,
            "overlap_steps": 3,
            "local_mix": "since_send",
            "error_feedback": True,
            "error_feedback_decay": 0.9,
        },
        (3, 8),
    ),
    "P4 tau2 alpha": ({"num_fragments": 4, "overlap_steps": 2, "local_mix": 0.25}, (2, 7)),
    "float32": ({"uplink_codec": "float32", "downlink_codec": "float32"}, (2, 6)),
    "int4 up only": ({"downlink_codec": "float32"}, (6,)),
    "error feedback": ({"error_feedback": True, "overlap_steps": 3}, (3, 8, 9)),
    "error feedback that decays": (
        {"error_feedback": True, "error_feedback_decay": 0.9, "overlap_steps": 3},
        (3, 9),
    ),
    "stochastic, by name": (
        {
            "uplink_codec": "int4-stochastic u=bfloat16",
            "downlink_codec": "e3m0-stochastic v=float32",
            "overlap_steps": 3,
        },
        (3, 9),
    ),
    "sparse": (
        {"uplink_codec": "topk64", "error_feedback": True, "error_feedback_decay": 0.95},
        (3,),
    ),
    "no flush": ({"flush": False, "overlap_steps": 2}, (4, 12)),
    "phases": ({"phases": (3, 3), "overlap_steps": 2}, (3, 4, 5)),
    "warm start": ({"start_step": 7, "inner_steps": 20}, (3, 6)),
}


@pytest.mark.parametrize("name", CASES)
def test_resumed_equals_uninterrupted(setting: Setting, tmp_path: Path, name: str) -> None:
    changes, steps = CASES[name]
    changed = streaming(setting, **changes)
    expected = uninterrupted(changed, tmp_path / "uninterrupted")

    for step in steps:
        kept_in = replace(changed, directory=tmp_path / f"stopped-{step}")
        assert stopped_and_resumed(kept_in, step) == expected, f"stopped after {step}"


@pytest.mark.parametrize("step", [3, 4])
def test_what_was_published_after_the_checkpoint_is_abandoned(
    setting: Setting, tmp_path: Path, step: int
) -> None:
    changed = streaming(setting, overlap_steps=2, error_feedback=True)

    expected = uninterrupted(changed, tmp_path / "uninterrupted")

    assert stopped_and_resumed(changed, step, beyond=7) == expected


def test_a_run_is_resumed_twice(setting: Setting, tmp_path: Path) -> None:
    changed = streaming(setting, overlap_steps=3)

    async def scenario() -> dict[str, VirtualIsland]:
        run = VirtualRun(changed)
        _, kept = await stopped(run, 4)
        await run.resume(4)
        islands = {name: run.island(name, 2) for name in run.setting.islands}

        async def again(island: VirtualIsland) -> Checkpoint:
            await island.resume(kept[island.name])
            await island.train(5)
            return await island.checkpoint()

        kept = dict(zip(islands, await asyncio.gather(*map(again, islands.values())), strict=True))
        for island in islands.values():
            await island.drop()
        return await resumed(run, kept)

    expected = uninterrupted(changed, tmp_path / "uninterrupted")

    assert end_of(run_virtual(scenario())) == expected


def test_after_an_expired_attempt_the_next_send_carries_all_as_it_would_have(
    setting: Setting, tmp_path: Path
) -> None:
    # b starts so late that both first attempts expire; the checkpoint is taken after that.
    changed = streaming(setting, error_feedback=True, step_s=0.001)

    async def scenario(directory: Path, *, with_stop: bool) -> dict[str, VirtualIsland]:
        run = VirtualRun(replace(changed, directory=directory))
        await run.start_syncer()
        islands = {name: run.island(name) for name in run.setting.islands}
        await asyncio.gather(*(island.start() for island in islands.values()))
        early = asyncio.create_task(islands["a"].train(5))
        await asyncio.sleep(150.0)
        await islands["b"].train(5)
        await early
        for island in islands.values():
            expired = island.kinds("round_expired")
            assert [(e["fragment_id"], e["attempt"]) for e in expired] == [(0, 0), (1, 0)]
            assert island.session.versions == (0, 0)
        if not with_stop:
            await asyncio.gather(*(island.go_on() for island in islands.values()))
            return islands
        kept = {name: await island.checkpoint() for name, island in islands.items()}
        for island in islands.values():
            await island.drop()
        return await resumed(run, kept)

    expected = end_of(run_virtual(scenario(tmp_path / "uninterrupted", with_stop=False)))

    assert end_of(run_virtual(scenario(tmp_path / "stopped", with_stop=True))) == expected


@given(data=st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_schedule_stopped_anywhere_is_resumed_to_the_bit(
    setting: Setting, data: st.DataObject
) -> None:
    period = data.draw(st.integers(1, 6), "H")
    fragments = data.draw(st.integers(1, 4), "P")
    inner_steps = data.draw(st.integers(1, 14), "inner steps")
    phases = st.lists(st.integers(0, period), min_size=fragments, max_size=fragments)
    changed = streaming(
        setting,
        inner_steps_per_round=period,
        num_fragments=fragments,
        inner_steps=inner_steps,
        overlap_steps=data.draw(st.integers(0, period - 1), "tau"),
        phases=tuple(data.draw(st.one_of(st.just([]), phases), "phases")),
        flush=data.draw(st.booleans(), "flush"),
        local_mix=data.draw(st.sampled_from([0.0, 0.5, "since_send"]), "alpha"),
        error_feedback=data.draw(st.booleans(), "error feedback"),
        uplink_codec=data.draw(st.sampled_from(["int4", "float32"]), "codec"),
    )
    step = data.draw(st.integers(0, inner_steps), "step")
    beyond = data.draw(st.integers(0, inner_steps - step), "beyond")

    with TemporaryDirectory() as directory:
        expected = uninterrupted(changed, Path(directory) / "uninterrupted")
        kept_in = replace(changed, directory=Path(directory) / "stopped")
        assert stopped_and_resumed(kept_in, step, beyond=beyond) == expected


# -- what is kept --------------------------------------------------------------------------------


def test_names_and_shapes_of_the_state_are_the_same_at_every_step(setting: Setting) -> None:
    changed = streaming(setting, overlap_steps=3, error_feedback=True)

    async def scenario() -> list[dict[str, Any]]:
        run = VirtualRun(changed)
        await run.start_syncer()
        a, b = run.island("a"), run.island("b")
        await asyncio.gather(a.start(), b.start())
        shapes = []
        for _ in range(9):
            await asyncio.gather(a.train(1), b.train(1))
            outer = await a.runner.drive(a.session.capturing())
            shapes.append({name: (v.dtype, v.shape) for name, v in outer.items()})
        return shapes

    first, *others = run_virtual(scenario())

    assert all(shapes == first for shapes in others)
    sections = {name.split("/")[0] for name in first}
    of_lanes = {"anchor", "payload", "residual", "residual_after"}
    assert sections == {"meta", "ledger", "reach", *of_lanes}


def test_what_is_in_flight_is_sent_again_as_it_was(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(streaming(setting, overlap_steps=3))
        islands, kept = await stopped(run, 4)
        before = [s for s in islands["a"].kinds("fragment_sent") if s["inner_step"] in (2, 4)]
        payloads = {n: v for n, v in kept["a"].outer.items() if n.startswith("payload/")}
        await run.resume(4)
        a = run.island("a", 2)
        b = run.island("b", 2)
        await asyncio.gather(a.resume(kept["a"]), b.resume(kept["b"]))
        await asyncio.sleep(1.0)

        assert a.kinds("fragment_sent") == [], "nothing is encoded again"
        assert a.session.num_in_flight == len(before) == 2
        for p, fragment in enumerate(run.setting.plan().fragments):
            record = run.syncer._services[p].runner._store.load(1)
            assert record.key is not None
            assert (record.key.timeline, record.key.attempt) == (1, 0)
            (contributor,) = [c for c in record.contributors if c.island == "a"]
            assert contributor.sent_at_inner_step == before[p]["inner_step"]
            assert contributor.weight_tokens == before[p]["weight_tokens"]
            assert contributor.incarnation == 2
            for lane in fragment.lanes:
                sent = bytes(record.contributions["a"][lane.lane_id])
                assert sent == bytes(payloads[f"payload/{p}/{lane.lane_id}"].numpy())

        (event,) = a.kinds("island_resumed")
        assert (event["inner_step"], event["timeline"]) == (4, 1)

    run_virtual(scenario())


class Slow(LanePlace):
    """One in which work takes time, as that on large lanes does."""

    async def run(self, work: Callable[[], T]) -> T:
        await asyncio.sleep(5.0)
        return work()


def test_no_step_is_made_before_what_is_sent_again_is_there_for_its_outcome(
    setting: Setting,
) -> None:
    """Other ranks of the island may be ready sooner, and agree on an outcome at the next step."""

    async def scenario() -> None:
        run = VirtualRun(streaming(setting, overlap_steps=3))
        _, kept = await stopped(run, 4)
        await run.resume(4)
        a, b = run.island("a", 2, place=Slow()), run.island("b", 2)
        await asyncio.gather(a.resume(kept["a"]), b.resume(kept["b"]))

        sent = [x.outstanding.key for x in a.session.state.ledgers if x.outstanding is not None]
        assert len(sent) == 2
        assert [a.exchange.view(p).key for p in range(2)] == sent

    run_virtual(scenario())


def test_a_decline_in_flight_is_declined_again(setting: Setting) -> None:
    def diverge(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
        wander(island, inner_step, parameters)
        if island == "a" and inner_step == 2:
            parameters["t"].fill_(float("inf"))

    async def scenario() -> dict[str, VirtualIsland]:
        run = VirtualRun(streaming(setting, inner_step=diverge, inner_steps=5))
        _, kept = await stopped(run, 2)
        return await resumed(run, kept)

    islands = run_virtual(scenario())

    outcomes = [e["outcome"] for e in islands["a"].kinds("fragment_merged")]
    assert outcomes[0] == "declined"
    assert islands["a"].session.digests == islands["b"].session.digests


def test_an_island_that_resumes_late_takes_the_outcome_that_the_run_has(setting: Setting) -> None:
    """a resumes, all its rounds close, it dies, and resumes the same checkpoint once more."""

    async def scenario() -> None:
        run = VirtualRun(streaming(setting, overlap_steps=3))
        _, kept = await stopped(run, 4)
        await run.resume(4)
        first, b = run.island("a", 2), run.island("b", 2)
        await asyncio.gather(first.resume(kept["a"]), b.resume(kept["b"]))
        await asyncio.sleep(1.0)
        await first.drop()
        a = run.island("a", 3)
        await a.resume(kept["a"])

        await asyncio.gather(a.go_on(), b.go_on())

        assert a.kinds("fragment_merged")[0]["outcome"] == "not_included"
        assert a.session.digests == b.session.digests
        assert a.values() == b.values()

    run_virtual(scenario())


def test_broken_sends_in_a_row_are_counted_over_a_resume(setting: Setting) -> None:
    def diverge(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
        wander(island, inner_step, parameters)
        if island == "a" and inner_step % 4 == 2:
            parameters["t"].fill_(float("nan"))

    async def scenario() -> int:
        run = VirtualRun(streaming(setting, inner_step=diverge, num_fragments=1, phases=(2,)))
        _, kept = await stopped(run, 7)
        await run.resume(7)
        a, b = run.island("a", 2), run.island("b", 2)
        await asyncio.gather(a.resume(kept["a"]), b.resume(kept["b"]))
        await asyncio.gather(a.train(4), b.train(4), return_exceptions=True)
        assert a.exchange.failure is not None
        assert "3 pseudo-gradients in a row" in str(a.exchange.failure)
        return a.session.inner_step

    assert run_virtual(scenario()) == 11


# -- pins ----------------------------------------------------------------------------------------


_REFUSED = (
    r"checkpoint of inner step 3: .*holds version 1.*diloco island RUN.toml --island b\..*"
    r"diloco coordinator RUN.toml --resume$"
)


def test_a_pin_of_another_version_for_the_same_step_ends_the_island(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        a, b = run.island("a"), run.island("b")
        await asyncio.gather(a.start(), b.start())
        await asyncio.gather(a.train(3), b.train(3))
        await a.checkpoint()
        await a.checkpoint()
        b.session.state.inner_step, b.session.state.ledgers[0].version = 3, 0
        with pytest.raises(IslandFailed, match=_REFUSED):
            await b.checkpoint()

    run_virtual(scenario())


# -- bad input -----------------------------------------------------------------------------------


def lose(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(outer: dict[str, Tensor]) -> None:
        del outer[name]

    return change


def put(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    def change(outer: dict[str, Tensor]) -> None:
        outer[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        pytest.param(lose("anchor/1/0"), ConfigError, "'anchor/1/0' must be .* found nothing",
                     id="lane"),
        pytest.param(put("payload/0/0", torch.zeros(3)), ConfigError,
                     r"'payload/0/0' must be torch.uint8 .* found torch.float32 \[3\]", id="shape"),
        pytest.param(put("meta", torch.tensor([9, 0, 4])), ConfigError, "format 9", id="format"),
        pytest.param(put("anchor/0/0", torch.zeros(512)), FingerprintMismatch,
                     r"version 1 of fragment 0.* lanes \[0\] of it differ.*--resume --at STEP",
                     id="another run's"),
    ],
)  # fmt: skip
def test_a_state_that_does_not_fit_is_refused_by_name(
    setting: Setting,
    change: Callable[[dict[str, Tensor]], None],
    error: type[Exception],
    words: str,
) -> None:
    async def scenario() -> None:
        run = VirtualRun(streaming(setting))
        _, kept = await stopped(run, 4)
        await run.resume(4)
        a, b = run.island("a", 2), run.island("b", 2)
        other = asyncio.create_task(b.resume(kept["b"]))
        change(kept["a"].outer)
        with pytest.raises(error, match=words):
            await a.resume(kept["a"])
        other.cancel()

    run_virtual(scenario())


def test_a_checkpoint_newer_than_what_the_syncer_restored_is_refused(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        a, b = run.island("a"), run.island("b")
        await asyncio.gather(a.start(), b.start())
        await asyncio.gather(a.train(2), b.train(2))
        await asyncio.gather(a.checkpoint(), b.checkpoint())
        await asyncio.gather(a.train(4), b.train(4))
        later = await a.checkpoint()
        await asyncio.gather(a.drop(), b.drop())
        await run.resume(2)
        again, other = run.island("a", 2), run.island("b", 2)
        entering = asyncio.create_task(other.start())
        with pytest.raises(FingerprintMismatch, match=r"has version 1 .*syncer has version 0"):
            await again.resume(later)
        entering.cancel()

    run_virtual(scenario())


def test_ranks_look_at_each_other_while_their_leader_waits_for_the_pin(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    smallest = Agreement.smallest

    def noting(
        self: Agreement, values: Sequence[int], failure: DilocoError | None = None
    ) -> list[int]:
        looks.append(asyncio.get_running_loop().time())
        return smallest(self, values, failure)

    async def scenario() -> tuple[float, float]:
        run = VirtualRun(setting)
        await run.start_syncer()
        a, b = run.island("a"), run.island("b")
        await asyncio.gather(a.start(), b.start())
        await run.kill_syncer()
        monkeypatch.setattr(Agreement, "smallest", noting)
        began = asyncio.get_running_loop().time()
        asyncio.get_running_loop().call_later(
            400.0, lambda: asyncio.ensure_future(run.start_syncer())
        )
        await a.runner.drive(a.session.pinning())
        return began, asyncio.get_running_loop().time()

    began, ended = run_virtual(scenario())

    assert ended - began > 400.0
    assert max(later - look for look, later in pairwise([began, *looks, ended])) <= LOOK_S
    assert pinned_steps(setting.directory) == [0]


def test_a_bit_that_flips_before_the_first_send_after_a_resume_is_not_sent(
    setting: Setting,
) -> None:
    """How far the steps before the checkpoint can have moved values is in the checkpoint."""
    bound = StepBound(1.0)  # 0.1 times normal numbers, and a little

    async def step(island: VirtualIsland) -> None:
        await asyncio.sleep(1.0)
        with torch.no_grad():
            wander(island.name, island.session.inner_step + 1, island.parameters)
        await island.runner.drive(island.session.stepping(1, bound=bound))

    async def scenario() -> list[dict[str, Any]]:
        run = VirtualRun(setting)
        await run.start_syncer()
        islands = [run.island(name) for name in "ab"]

        async def train(island: VirtualIsland) -> Checkpoint:
            await island.start()
            for _ in range(5):
                await step(island)
            return await island.checkpoint()

        kept = await asyncio.gather(*map(train, islands))
        for island in islands:
            await island.drop()
        await run.resume(5)
        a, b = (run.island(name, run.timeline + 1) for name in "ab")
        await asyncio.gather(a.resume(kept[0]), b.resume(kept[1]))
        with torch.no_grad():
            for parameter in a.parameters.values():
                parameter[0] = 20.0
        await asyncio.gather(step(a), step(b))  # a fragment is due after 6
        sent = a.kinds("fragment_sent")
        for island in (a, b):
            await island.drop()
        await run.kill_syncer()
        return sent

    (sent,) = run_virtual(scenario())
    assert "value 0 is" in sent["declined"], sent
