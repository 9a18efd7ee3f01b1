"""Cuts: runs whose islands stand at different steps are stopped, taken back and go on."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from diloco.protocol.island.votes import AgreedCut
from diloco.transport.calls.loopback import run_virtual
from diloco.versions.pins import pinned_version
from tests.several_syncers import Several
from tests.virtual_run import TOKENS, Checkpoint, Setting, VirtualIsland, four_islands

NAMES = tuple(TOKENS)
NUM_FRAGMENTS = 4
CUT = 3


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Four islands of three speeds; K = 1 with the grace that is measured."""
    return four_islands(tmp_path, 30, steps_s={"c": 1.3, "d": 2.0})


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power loss, and waiting for the disk is most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@dataclass
class Start:
    """One start of an island, and what of it stands."""

    island: VirtualIsland
    incarnation: int
    began: int = 0
    ended: int = -1
    until: int = -1  # inner step of its part of the cut
    left: list[int] = field(default_factory=list)  # tokens that nobody has, by fragment

    def end(self) -> None:
        session = self.island.session
        self.ended = session.inner_step
        self.left = [ledger.tokens for ledger in session.state.ledgers]


class Story:
    """A run that is cut after `cut_s` seconds, goes on for `beyond_s`, and is taken back."""

    def __init__(
        self,
        setting: Setting,
        seed: int,
        *,
        beyond_s: float,
        missing: str = "",
        num_syncers: int = 1,
    ) -> None:
        self.rng = random.Random(seed)
        self.run = Several(setting, num_syncers)
        self.beyond_s = beyond_s
        self.missing = missing
        self.kept: dict[str, Checkpoint] = {}
        self.versions: dict[str, tuple[int, ...]] = {}
        self.flying: dict[str, list[Any]] = {}
        self.starts: list[Start] = []
        self.pinned: list[int] = []

    async def _live(self, name: str, cut_s: float) -> None:
        """Train, take the cut where it is heard of, and go on until everything is ended."""
        start = Start(self.run.island(name), 1)
        self.starts.append(start)
        session = start.island.session
        await start.island.start()
        heard_at = asyncio.get_running_loop().time() + cut_s + self.rng.uniform(0.0, 1.5)
        session.asked_cut = lambda: AgreedCut(
            CUT if asyncio.get_running_loop().time() >= heard_at else 0
        )
        try:
            while not session.is_over:
                await start.island.train(1)
                if session.is_cut_due:
                    self.kept[name] = await start.island.take_cut()
                    self.versions[name] = session.versions
                    self.flying[name] = [x.outstanding for x in session.state.ledgers]
                    start.until = session.inner_step
                    start.left = [ledger.tokens for ledger in session.state.ledgers]
                    if not self.beyond_s:
                        return
        finally:
            if start.until < 0:
                start.end()

    async def first_half(self, cut_s: float) -> None:
        await self.run.start()
        lives = {name: asyncio.create_task(self._live(name, cut_s)) for name in NAMES}
        if self.missing:
            await asyncio.sleep(cut_s * self.rng.uniform(0.3, 0.9))
            lives.pop(self.missing).cancel()
            await self._drop(self.missing)
        members = [name for name in NAMES if name != self.missing]
        while self.kept.keys() != set(members):
            await asyncio.sleep(0.25)
        least = [max(v[p] for v in self.versions.values()) for p in range(NUM_FRAGMENTS)]
        for part in self.run.parts:
            part.syncer.keep_cut(CUT, least)
            while part.syncer.pinned_cut != CUT:
                await asyncio.sleep(0.25)
        for p in range(NUM_FRAGMENTS):
            pinned = pinned_version(self.run.of(p).setting.directory, CUT, p)
            assert pinned is not None and pinned >= least[p]
            self.pinned.append(pinned)
        await asyncio.sleep(self.beyond_s)
        for name, life in lives.items():
            life.cancel()
            await self._drop(name)

    async def _drop(self, name: str) -> None:
        await asyncio.sleep(0)
        await next(s.island for s in self.starts if s.island.name == name).drop()

    async def second_half(self) -> list[VirtualIsland]:
        await self.run.resume(CUT)

        async def live(name: str) -> VirtualIsland:
            await asyncio.sleep(self.rng.choice([0.0, self.rng.uniform(0.0, 10.0)]))
            start = Start(self.run.island(name, 2), 2)
            self.starts.append(start)
            if name in self.kept:
                await start.island.resume(self.kept[name])
                session = start.island.session
                assert session.inner_step == int(self.kept[name].outer["meta"][2])
                assert all(x >= y for x, y in zip(session.versions, self.pinned, strict=True)), (
                    "what was pinned is taken before the first step"
                )
            else:
                await start.island.start()
            start.began = start.island.session.inner_step
            await start.island.go_on()
            start.end()
            return start.island

        islands = await asyncio.gather(*map(live, NAMES))
        for island in islands:
            await island.exchange.stop()
        await self.run.kill()
        return list(islands)

    async def tell(self, cut_s: float) -> list[VirtualIsland]:
        await self.first_half(cut_s)
        return await self.second_half()

    def included(self, p: int) -> Counter[tuple[str, int]]:
        """Tokens that the records that stand count, by start of an island."""
        tokens: Counter[tuple[str, int]] = Counter()
        headers = {}
        for header in self.run.records:
            stands = header["timeline"] == 1 or header["version"] <= self.pinned[p]
            if header["fragment_id"] == p and stands:
                headers[header["version"]] = header
        for header in headers.values():
            for c in header["contributors"]:
                tokens[c["island"], c["incarnation"]] += c["weight_tokens"]
        return tokens

    def last_counted(self, name: str, p: int) -> int:
        """Inner step of the newest contribution of a first start in what was pinned; 0: none."""
        return max(
            (
                c["sent_at_inner_step"]
                for header in self.run.records
                if (header["fragment_id"], header["timeline"]) == (p, 0)
                if header["version"] <= self.pinned[p]
                for c in header["contributors"]
                if c["island"] == name
            ),
            default=0,
        )

    def check_accounts(self) -> None:
        """trained = included + dropped + left, over the starts of an island, by fragment."""
        for p in range(NUM_FRAGMENTS):
            counted = self.included(p)
            for name in NAMES:
                first, second = (s for s in self.starts if s.island.name == name)
                until = first.until if first.until >= 0 else first.ended
                if first.until >= 0:  # what it sent after its part, and counts, stays counted
                    until = max(until, self.last_counted(name, p))
                trained = (until + second.ended - second.began) * TOKENS[name]
                dropped = sum(
                    e["dropped_tokens"]
                    for s in (first, second)
                    for e in s.island.kinds("fragment_merged")
                    if e["fragment_id"] == p and (s is second or e["inner_step"] <= until)
                ) + sum(
                    e["dropped_tokens"][p]
                    for s in (first, second)
                    for e in s.island.kinds("published_taken")
                    if s is second or e["inner_step"] <= until
                )
                left = second.left[p] + (first.left[p] if first.until < 0 else 0)
                was_counted = 0
                if first.until < 0:  # killed: it does not know what became of its last
                    sent = first.island.session.state.ledgers[p].outstanding
                    all_counted = counted[name, 1] + counted[name, 2] + dropped + left
                    was_counted = all_counted - trained
                    assert was_counted in (0, sent.weight_tokens if sent else 0)
                have = counted[name, 1] + counted[name, 2] + dropped + left - was_counted
                assert trained == have, (name, p, counted, dropped, left)


SEEDS = [1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 25))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("is_stop", "num_syncers"),
    [(True, 1), (False, 1), (False, 2)],
    ids=["stopped", "taken-back", "of-two-syncers"],
)
def test_a_run_is_cut_at_random_and_goes_on_with_every_token_accounted(
    setting: Setting, seed: int, is_stop: bool, num_syncers: int
) -> None:
    rng = random.Random(100 + seed)
    changed = replace(setting, local_mix=rng.choice([0.0, 0.5, "since_send"]))
    beyond_s = 0.0 if is_stop else rng.uniform(3.0, 10.0)
    story = Story(changed, seed, beyond_s=beyond_s, num_syncers=num_syncers)

    islands = run_virtual(story.tell(rng.uniform(4.0, 14.0)))

    assert len({island.session.digests for island in islands}) == 1
    assert all(island.session.digests for island in islands)
    story.check_accounts()
    assert all(island.session.blocked_s == 0.0 for island in islands)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_island_that_is_missing_from_the_cut_takes_what_is_published(
    setting: Setting, seed: int
) -> None:
    rng = random.Random(200 + seed)
    story = Story(setting, seed, beyond_s=rng.uniform(0.1, 5.0), missing=rng.choice(NAMES))

    islands = run_virtual(story.tell(rng.uniform(6.0, 14.0)))

    assert len({island.session.digests for island in islands}) == 1
    story.check_accounts()
