"""Islands that send and merge on arrival: whole runs on a virtual clock, with deaths and losses."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.protocol.island.ledger import LocalMix
from diloco.transport.calls.loopback import run_virtual
from diloco.transport.errors import ConnectError
from diloco.transport.shaping.faulty import Fault, Faults, FaultScript, FaultyTransport
from tests.virtual_run import (
    TOKENS,
    Setting,
    VirtualIsland,
    VirtualRun,
    descend,
    four_islands,
)

NAMES = tuple(TOKENS)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Four islands, the last twice as slow; K = 1 with the grace that is measured."""
    return four_islands(tmp_path, 40, steps_s={"d": 2.0})


def merged(island: VirtualIsland) -> list[dict[str, Any]]:
    return island.kinds("fragment_merged")


def included(run: VirtualRun, fragment_id: int) -> Counter[tuple[str, int]]:
    """Tokens that the records of a fragment count, by start of an island."""
    tokens: Counter[tuple[str, int]] = Counter()
    headers = {r["version"]: r for r in run.records if r["fragment_id"] == fragment_id}
    for header in headers.values():
        for c in header["contributors"]:
            tokens[c["island"], c["incarnation"]] += c["weight_tokens"]
    return tokens


def check_accounts(
    run: VirtualRun, starts: Iterable[tuple[VirtualIsland, int, int]], lost: Counter[Any]
) -> None:
    """trained = included + dropped + lost at a crash + left, for every start and fragment.

    `starts` are islands with their incarnation and the inner steps that they made; `lost` tokens
    are by (island, incarnation, fragment).
    """
    for island, incarnation, steps in starts:
        trained = steps * TOKENS[island.name]
        for p, ledger in enumerate(island.session.state.ledgers):
            counted = included(run, p)[island.name, incarnation]
            dropped = sum(e["dropped_tokens"] for e in merged(island) if e["fragment_id"] == p)
            key = (island.name, incarnation, p)
            rest = lost.get(key, ledger.tokens)
            assert trained == counted + dropped + rest, (key, counted, dropped, rest)


@pytest.mark.parametrize("local_mix", [0.0, 0.5, "since_send"])
def test_a_run_ends_by_tokens_with_equal_digests_and_every_token_accounted(
    setting: Setting, local_mix: LocalMix
) -> None:
    run = VirtualRun(replace(setting, local_mix=local_mix))

    islands = run_virtual(run.run())

    assert len({island.session.digests for island in islands.values()}) == 1
    steps = {name: island.session.inner_step for name, island in islands.items()}
    assert steps["a"] == steps["b"] == steps["c"]
    assert 2 * steps["d"] <= steps["a"] + 2, "nobody waits for the slow one"
    assert all(island.session.blocked_s == 0.0 for island in islands.values())
    check_accounts(run, [(i, 1, i.session.inner_step) for i in islands.values()], Counter())
    for p in range(4):
        assert included(run, p).total() >= setting.total_tokens


@pytest.mark.parametrize("steps", [0, 1], ids=["at once", "heard of too late"])
def test_an_island_that_starts_after_the_end_ends_with_what_was_published(
    setting: Setting, steps: int
) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        islands = await run.run()
        await run.start_syncer()
        late = run.island("d", incarnation=2)
        await late.start(last_inner_step=islands["d"].session.inner_step)
        assert late.session.is_over
        for _ in range(steps):
            with torch.no_grad():
                descend("d", 0, late.parameters)  # type: ignore[arg-type]
            await late.runner.drive(late.session.stepping(1))

        await late.go_on()

        assert late.session.digests == islands["a"].session.digests
        assert late.session.inner_step == islands["d"].session.inner_step + steps
        assert not late.kinds("fragment_sent")

    run_virtual(scenario())


def test_no_step_takes_longer_because_another_island_is_gone(setting: Setting) -> None:
    async def scenario() -> list[float]:
        run = VirtualRun(setting)
        await run.start_syncer()
        islands = {name: run.island(name) for name in NAMES}
        await asyncio.gather(*(island.start() for island in islands.values()))
        tasks = {name: asyncio.create_task(i.train(25)) for name, i in islands.items()}
        await asyncio.sleep(9.5)
        tasks["b"].cancel()  # in the middle of a round, without a word
        await islands["b"].drop()
        clock = asyncio.get_running_loop().time
        began = clock()
        done = islands["a"].session.inner_step
        await tasks["a"]
        took = (clock() - began) / (islands["a"].session.inner_step - done)
        versions = islands["a"].session.versions
        for name in "cd":
            tasks[name].cancel()
        return [took, *versions]

    took, *versions = run_virtual(scenario())

    assert took == pytest.approx(1.0, rel=0.05)
    assert min(versions) >= 2, "rounds go on without it"


def lossy(run: VirtualRun, name: str, incarnation: int, seed: int) -> VirtualIsland:
    """An island whose calls are lost, repeated and overtake each other."""
    rates = {Fault.RESET: 0.1, Fault.DUPLICATE: 0.05, Fault.DELAY: 0.05}
    control, data = (
        FaultyTransport(
            run.network.connect("syncer"),
            Faults(
                FaultScript(seed=seed, rates=rates, delay_s=1.5), f"{name}/{incarnation}/{channel}"
            ),
        )
        for channel in ("control", "data")
    )
    return VirtualIsland(name, run.setting, control, data, incarnation, run.timeline)


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))]
)
def test_deaths_of_islands_and_syncer_and_a_lossy_network(setting: Setting, seed: int) -> None:
    """Islands are killed and return, the syncer is, and one call of five is lost or repeated."""
    rng = random.Random(seed)
    run = VirtualRun(replace(setting, total_tokens=25 * sum(TOKENS.values())))
    starts: list[tuple[VirtualIsland, int, int]] = []
    lost: Counter[Any] = Counter()

    async def live(name: str) -> VirtualIsland:
        incarnation, last = 1, 0
        while True:
            island = lossy(run, name, incarnation, seed)
            await island.start(last_inner_step=last)
            began = island.session.inner_step
            life = asyncio.create_task(island.go_on())
            deadline = rng.uniform(5.0, 40.0) if incarnation < 3 else 1e6
            done, _ = await asyncio.wait([life], timeout=deadline)
            if done:
                life.result()
                starts.append((island, incarnation, island.session.inner_step - began))
                return island
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
            await island.drop()
            died.append((island, incarnation, began))
            last, incarnation = island.session.inner_step, incarnation + 1
            await asyncio.sleep(rng.uniform(0.0, 15.0))

    died: list[tuple[VirtualIsland, int, int]] = []

    async def kill_syncer() -> None:
        for _ in range(4):
            await asyncio.sleep(rng.uniform(4.0, 15.0))
            await run.kill_syncer()
            await asyncio.sleep(rng.uniform(0.0, 5.0))
            await run.start_syncer()

    async def scenario() -> list[VirtualIsland]:
        await run.start_syncer()
        killing = asyncio.create_task(kill_syncer())
        islands = await asyncio.gather(*(live(name) for name in NAMES))
        killing.cancel()
        for island in islands:
            await island.exchange.stop()
        await run.kill_syncer()
        return list(islands)

    islands = run_virtual(scenario())

    assert len({island.session.digests for island in islands}) == 1
    assert all(island.session.digests for island in islands)
    for island, incarnation, began in died:
        for p, ledger in enumerate(island.session.state.ledgers):
            # What was sent last may have been counted after the death; its own table says not.
            sent = ledger.outstanding
            known = sum(
                e["weight_tokens"]
                for e in island.kinds("fragment_sent")
                if e["fragment_id"] == p and (sent is None or e["version"] != sent.key.version)
                and any(m["outcome"] == "included" and m["fragment_id"] == p
                        and m["inner_step"] - m["staleness_steps"] == e["inner_step"]
                        for m in merged(island))
            )  # fmt: skip
            counted = included(run, p)[island.name, incarnation]
            is_counted = sent is not None and counted == known + sent.weight_tokens
            assert is_counted or counted == known
            lost[island.name, incarnation, p] = ledger.tokens - (
                sent.weight_tokens if is_counted and sent is not None else 0
            )
        starts.append((island, incarnation, island.session.inner_step - began))
    check_accounts(run, starts, lost)
    assert all(island.session.blocked_s == 0.0 for island, *_ in starts)


class CutTransport:
    """A way to the syncer that can be cut."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.is_cut = False
        self.peer = inner.peer

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        if self.is_cut:
            raise ConnectError("cut", peer=self.peer, method=method)
        reply = await self._inner.call(method, *arguments, **options)
        if self.is_cut:
            raise ConnectError("cut", peer=self.peer, method=method)
        return reply

    async def close(self) -> None:
        await self._inner.close()


@pytest.mark.parametrize(
    ("codec", "retained", "how"),
    [("int4", 16, {"deltas"}), ("float32", 16, {"whole"}), ("int4", 2, {"whole"})],
    ids=["deltas", "too-large", "gone"],
)
def test_an_island_many_versions_behind_leaps_to_the_newest(
    setting: Setting, codec: str, retained: int, how: set[str]
) -> None:
    """It trains on without its network, and is back in one merge a fragment."""
    setting = replace(setting, downlink_codec=codec, initial={"w": [16.0] * 4096}, num_fragments=1)

    async def scenario() -> list[VirtualIsland]:
        run = VirtualRun(setting)
        run.retained_versions = retained
        await run.start_syncer()
        control, data = (CutTransport(run.network.connect("syncer")) for _ in range(2))
        cut = VirtualIsland("b", setting, control, data)
        islands = [run.island("a"), cut]
        await asyncio.gather(*(island.start() for island in islands))
        lives = [asyncio.create_task(island.go_on()) for island in islands]
        await asyncio.sleep(10.0)
        control.is_cut = data.is_cut = True
        await asyncio.sleep(50.0)
        control.is_cut = data.is_cut = False
        await asyncio.gather(*lives)
        return islands

    a, b = run_virtual(scenario())

    assert a.session.digests == b.session.digests
    leaps = b.kinds("caught_up")
    assert {leap["how"] for leap in leaps} == how
    assert max(leap["version"] - leap["from_version"] for leap in leaps) >= 4
    assert b.session.blocked_s == 0.0
    assert not a.kinds("caught_up") and not b.kinds("digest_mismatch")


def test_an_island_that_is_told_to_leave_finishes_what_is_outstanding(setting: Setting) -> None:
    async def scenario() -> tuple[VirtualRun, dict[str, VirtualIsland]]:
        run = VirtualRun(setting)
        await run.start_syncer()
        islands = {name: run.island(name) for name in NAMES}
        await asyncio.gather(*(island.start() for island in islands.values()))
        leaver = islands["c"].session
        leaver.must_leave = lambda: leaver.inner_step >= 20
        await asyncio.gather(*(island.go_on() for island in islands.values()))
        return run, islands

    run, islands = run_virtual(scenario())

    leaver = islands.pop("c")
    assert leaver.session.is_leaving and leaver.session.inner_step == 20
    assert leaver.session.num_in_flight == 0 and leaver.session.digests == ()
    assert len({island.session.digests for island in islands.values()}) == 1
    check_accounts(
        run,
        [(i, 1, i.session.inner_step) for i in (leaver, *islands.values())],
        Counter(),
    )
