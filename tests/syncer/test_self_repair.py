"""A damaged fragment is repaired from whichever island holds what was lost, without an operator."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from diloco.syncer.damaged import NO_LANE_S
from diloco.telemetry.round_events import FragmentRepaired
from diloco.transport.calls.loopback import run_virtual
from tests.syncer.test_damaged_fragment import header_of, newest_record, versions
from tests.virtual_run import Setting, VirtualIsland, VirtualRun, descend


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Two islands, two fragments, in rounds that wait for all."""
    return Setting(
        {name: [16.0] * 2 for name in "uv"},
        descend,
        tmp_path,
        inner_steps=90,
        tokens={"a": 3, "b": 5},
        num_fragments=2,
        flush=True,
    )


class Damaged:
    """A run of a and b, whose syncer has lost the newest version of fragment 0 at some moment."""

    def __init__(self, setting: Setting) -> None:
        self.run = VirtualRun(setting)
        self.islands: dict[str, VirtualIsland] = {}
        self.training: dict[str, asyncio.Task[None]] = {}
        self.header = ""
        self.lost = -1
        self._coordinator: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        await self.run.start_syncer()
        for name in "ab":
            self.start(name)
        await asyncio.sleep(25.0)
        self.lost = versions(self.run)[0]
        await self.run.kill_syncer()
        newest_record(self.run.setting, 0).write_bytes(b"rotten")
        await self.run.start_syncer()
        self.header = header_of(self.run, 0, self.lost)
        self.run.syncer.indexed({0: self.lost + 1, 1: 0})
        assert self.run.syncer.phase(0) == "damaged"

    def start(self, name: str, incarnation: int = 1) -> None:
        island = self.islands[name] = self.run.island(name, incarnation)
        self.training[name] = asyncio.create_task(island.run())

    async def kill(self, name: str) -> None:
        self.training[name].cancel()
        await asyncio.gather(self.training[name], return_exceptions=True)
        await self.islands[name].exchange.stop()

    def mute(self, name: str) -> None:
        """Have an island give nothing, though it says that it holds the version."""
        (link,) = self.islands[name].exchange._links
        link.entry.give = lambda carried: None  # type: ignore[method-assign]

    def unmute(self, name: str) -> None:
        (link,) = self.islands[name].exchange._links
        del link.entry.give

    def coordinate(self) -> None:
        """Tell the syncer what is indexed of what it has lost, again and again."""

        async def tell() -> None:
            while True:
                if self.run.syncer.awaits(0).wants_header:
                    self.run.syncer.repair(0, "", self.header)
                await asyncio.sleep(1.0)

        self._coordinator = asyncio.create_task(tell())

    async def until_repaired(self, within_s: float) -> None:
        async with asyncio.timeout(within_s):
            while self.run.syncer.damage(0):
                await asyncio.sleep(0.1)

    @property
    def repaired(self) -> list[tuple[int, str]]:
        """Versions of fragment 0 that were repaired, and from whom."""
        events = [e for e in self.run.events if isinstance(e, FragmentRepaired)]
        return [(event.version, event.from_island) for event in events]

    async def end(self) -> None:
        """Have every island come to its end; all must hold the same."""
        await asyncio.gather(*self.training.values())
        assert len({island.session.digests for island in self.islands.values()}) == 1
        await self.stop()

    async def stop(self) -> None:
        if self._coordinator is not None:
            self._coordinator.cancel()
        for name in self.islands:
            await self.kill(name)
        await self.run.kill_syncer()


MODES = pytest.mark.parametrize("is_on_arrival", [False, True], ids=["scheduled", "on-arrival"])


def of_mode(setting: Setting, is_on_arrival: bool) -> Setting:
    return setting.on_arrival(total_tokens=90 * 8) if is_on_arrival else setting


@MODES
def test_a_lost_version_is_taken_from_an_island_that_holds_it_and_the_run_comes_to_its_end(
    setting: Setting, is_on_arrival: bool
) -> None:
    async def scenario() -> None:
        run = Damaged(of_mode(setting, is_on_arrival))
        await run.begin()
        assert "once the coordinator says its digests" in run.run.syncer.damage(0)
        run.coordinate()
        await run.until_repaired(5.0)
        assert [version for version, _ in run.repaired] == [run.lost]
        assert versions(run.run)[0] == run.lost
        await run.end()

    run_virtual(scenario())


@MODES
@pytest.mark.parametrize("dead", ["a", "b"])
def test_one_of_two_islands_that_restarts_meanwhile_leads_to_no_standstill(
    setting: Setting, is_on_arrival: bool, dead: str
) -> None:
    async def scenario() -> None:
        run = Damaged(of_mode(setting, is_on_arrival))
        await run.begin()
        await run.kill(dead)
        run.start(dead, incarnation=2)
        await asyncio.sleep(30.0)
        entered = [run.islands[dead].exchange.view(p).anchor_version for p in (0, 1)]
        assert entered[1] >= 0, "the other fragment has come"
        assert entered[0] == (run.lost - 1 if is_on_arrival else -1)
        other = "ab".replace(dead, "")
        assert run.run.syncer.awaits(0).holders == [other]

        run.coordinate()
        await run.until_repaired(5.0)
        assert run.repaired == [(run.lost, other)]
        await run.end()

    run_virtual(scenario())


@MODES
def test_who_waits_for_a_repair_says_for_which_fragment(
    setting: Setting, is_on_arrival: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        run = Damaged(of_mode(setting, is_on_arrival))
        await run.begin()
        for path in newest_record(setting, 0).parent.glob("*.record"):
            path.write_bytes(b"rotten")
        await run.run.kill_syncer()
        await run.run.start_syncer()
        await run.kill("a")
        run.start("a", incarnation=2)
        await asyncio.sleep(70.0)
        assert "1 of 2 fragments have come" in caplog.text
        assert "has lost the newest version of fragment 0 and does not serve it" in caplog.text
        run.coordinate()
        await run.until_repaired(5.0)
        await run.end()

    run_virtual(scenario())


def test_a_version_that_no_island_holds_waits_and_says_so(setting: Setting) -> None:
    async def scenario() -> None:
        run = Damaged(setting.on_arrival(total_tokens=90 * 8))
        await run.begin()
        for name in "ab":
            await run.kill(name)
            run.start(name, incarnation=2)
        run.coordinate()
        await asyncio.sleep(30.0)
        told = run.run.syncer.damage(0)
        assert f"No island that has called holds version {run.lost} (called: a, b)" in told
        assert "diloco coordinator RUN.toml --resume" in told
        assert run.run.syncer.awaits(0).holders == []
        await run.stop()

    run_virtual(scenario())


def test_a_version_that_is_only_staged_is_given_too(setting: Setting) -> None:
    async def scenario() -> None:
        run = Damaged(setting.on_arrival(total_tokens=90 * 8))
        await run.begin()
        await run.kill("b")
        held = run.islands["a"].exchange._fragments[0]
        assert held.anchor_version == run.lost
        held.staged, held.staged_version = held.anchor, run.lost
        held.anchor_version -= 1  # as it is between the last lane and the merge
        held.anchor = {lane_id: lane + 1 for lane_id, lane in held.anchor.items()}
        run.coordinate()
        await run.until_repaired(5.0)
        assert run.repaired == [(run.lost, "a")]
        await run.stop()

    run_virtual(scenario())


@pytest.mark.parametrize("what", ["restarts", "is silent", "holds something else"])
def test_another_island_is_asked_where_the_first_does_not_give_it(
    setting: Setting, what: str
) -> None:
    async def scenario() -> None:
        run = Damaged(setting.on_arrival(total_tokens=90 * 8))
        await run.begin()
        for name in "ab":  # nothing is given at first
            run.mute(name)
        run.coordinate()
        await asyncio.sleep(3.0)
        assert run.run.syncer.damage(0)
        (first,) = run.run.syncer._services[0].runner.damage._sources.asked
        second = "ab".replace(first, "")
        run.unmute(second)
        if what == "restarts":
            await run.kill(first)
            run.start(first, incarnation=2)
        elif what == "holds something else":
            anchor = run.islands[first].exchange._fragments[0].anchor
            anchor[0] = anchor[0] + 1.0
            run.unmute(first)
        await run.until_repaired(NO_LANE_S + 15.0)
        assert run.repaired == [(run.lost, second)]
        await run.stop()

    run_virtual(scenario())


def test_a_syncer_killed_during_the_repair_asks_again(setting: Setting) -> None:
    async def scenario() -> None:
        run = Damaged(setting)
        await run.begin()
        for name in "ab":
            run.mute(name)
        run.coordinate()
        await asyncio.sleep(3.0)
        for name in "ab":
            run.unmute(name)
        for _ in range(3):
            await run.run.kill_syncer()
            await run.run.start_syncer()
            run.run.syncer.indexed({0: run.lost + 1})
        await run.until_repaired(5.0)
        await run.end()

    run_virtual(scenario())


def test_an_operator_names_who_is_asked_first(setting: Setting) -> None:
    async def scenario(name: str) -> None:
        run = Damaged(setting)
        await run.begin()
        await asyncio.sleep(2.0)
        assert run.run.syncer.awaits(0).holders == ["a", "b"]
        run.run.syncer.repair(0, name, run.header)
        await run.until_repaired(5.0)
        assert run.repaired == [(run.lost, name)]
        await run.stop()

    for name in "ab":
        for path in setting.directory.glob("fragment-*/*"):
            path.unlink()
        run_virtual(scenario(name))
