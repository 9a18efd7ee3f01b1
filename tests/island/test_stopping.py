"""A graceful stop of a virtual run, with real membership, syncer and outer loops.

An island is killed between its last send and the end of its checkpoint, and returns: the stop must
end with one checkpoint that all islands have, and a resume must go on from it bit for bit.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from diloco.errors import CoordinatorUnavailable, DilocoError, QuorumLost
from diloco.io_thread import IoThread
from diloco.island.agreement import Agreement
from diloco.island.exchange.exchange import Exchange
from diloco.island.graceful_stop import CommonStop, GracefulStop
from diloco.outer.schedule import Schedule
from diloco.protocol.run.admission import Joined, JoinVerdict
from diloco.protocol.run.membership import Membership
from diloco.transport.calls.loopback import run_virtual
from tests.distributed import run_ranks
from tests.island.test_resume import NAMES, NESTEROV, end_of, resumed, wander
from tests.virtual_run import RUN, Checkpoint, Setting, VirtualIsland, VirtualRun

REPORT_S = 1.0
UNREACHABLE_S = 600.0
#: Due after 2, 4, 6, ...
SCHEDULE = Schedule.make(
    inner_steps_per_round=4, num_fragments=2, overlap_steps=1, inner_steps=20, flush=True
)


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power loss, and waiting for the disk is most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Due after 2, 4, 6, ...; merges one step later; 19 inner steps and a flush."""
    return Setting(
        {name: [0.3 * (i + 1)] * 130 for i, name in enumerate(NAMES)},
        wander,
        tmp_path,
        inner_steps=19,
        num_fragments=2,
        overlap_steps=1,
        flush=True,
        tokens={"a": 3, "b": 2},
        optimizer=NESTEROV,
        uplink_codec="int4",
        downlink_codec="int4",
    )


class Killed(Exception):
    """Stands for SIGKILL."""


class Start:
    """One start of an island: what `DiLoCo` and its word with the coordinator do, virtually."""

    def __init__(self, stop: Stop, name: str, incarnation: int) -> None:
        self.stop = stop
        self.name = name
        self.island = stop.run.island(name, incarnation)
        self.line = GracefulStop(stop.run.setting.schedule())
        self.stopping = CommonStop(
            self.line,
            self.island.exchange,
            Agreement(None),
            unreachable_s=UNREACHABLE_S,
            clock=asyncio.get_running_loop().time,
        )
        self.kept: set[int] = set()
        self.dies_at = ""
        self.reporting = asyncio.create_task(self._report())

    async def live(self) -> None:
        """Train until everybody stops, or to the end of the run."""
        session, schedule = self.island.session, self.stop.run.setting.schedule()
        await self.island.start()
        self.line.begin(session.inner_step, session.first_checkpoint_step)
        while session.inner_step < schedule.inner_steps:
            await self.island.train(1)
            step = session.inner_step
            if schedule.due(step):
                word = self.stopping.word(step)
                await self.island.runner.drive(self.stopping.passing(step, word))
            if self.is_stopping:
                await self._checkpoint(step)
            if self.is_stopping and not self.stop.is_ignored:
                return
        await self.island.finish()

    @property
    def is_stopping(self) -> bool:
        step = self.island.session.inner_step
        return self.stopping.step == step < self.stop.run.setting.inner_steps

    async def _checkpoint(self, step: int) -> None:
        await asyncio.sleep(0.001)  # what is sent is made by a task
        self._may_die("sent")
        await asyncio.sleep(0.1)
        self._may_die("received")
        await self.island.runner.drive(self.island.session.pinning())
        self._may_die("pinned")
        self.stop.saved[self.name] = await self.island.checkpoint()
        self._may_die("saved")
        self.kept.add(step)
        await asyncio.sleep(1.5 * REPORT_S)
        self._may_die("reported")
        await self.island.runner.drive(self.stopping.completing(step))
        self._may_die("complete")

    def _may_die(self, where: str) -> None:
        if self.dies_at == where:
            raise Killed

    async def end(self) -> None:
        self.reporting.cancel()
        await self.island.drop()

    async def _report(self) -> None:
        membership = self.stop.membership
        while True:
            step = self.island.session.inner_step
            membership.apply(membership.keeps(self.name, self.kept, inner_step=step))
            promise = self.line.promise() if membership.is_stopping else None
            if promise is not None:
                membership.apply(membership.promise(self.name, promise))
            stop_step, complete = membership.stop_step, membership.is_stop_complete
            self.line.set_answer(stop_step, is_asked=membership.is_stopping, is_complete=complete)
            await asyncio.sleep(REPORT_S)


@dataclass
class Stop:
    """A run of islands a and b that is asked to stop; `victim` dies somewhere, and returns.

    `is_taken_back`: not before the stop was taken back, because it stayed away.
    """

    run: VirtualRun
    ask_after_s: float
    dies_at: str = ""
    away_s: float = 3.0
    victim: str = "b"
    is_ignored: bool = False
    is_taken_back: bool = False
    saved: dict[str, Checkpoint] = field(default_factory=dict)
    refused: list[Joined] = field(default_factory=list)
    ends: dict[str, VirtualIsland] = field(default_factory=dict)
    first_stop_step: int | None = None

    def __post_init__(self) -> None:
        steps = self.run.setting.inner_steps
        islands = tuple(sorted(self.run.setting.islands))
        self.membership = Membership(RUN, islands, "{}", lambda a, b: [], steps, num_checkpoints=2)

    async def play(self) -> None:
        await self.run.start_syncer()
        asking = asyncio.create_task(self._ask())
        await asyncio.gather(*(self._island(name) for name in self.run.setting.islands))
        await asking

    async def _ask(self) -> None:
        await asyncio.sleep(self.ask_after_s)
        self.membership.apply(self.membership.request_stop())

    async def _island(self, name: str) -> None:
        """Start an island, again after it was killed, as its supervisor does."""
        dies_at = self.dies_at if name == self.victim else ""
        while (joined := self._join(name, dies_at or "last")).verdict is JoinVerdict.ACCEPTED:
            start = Start(self, name, joined.incarnation)
            start.dies_at, dies_at = dies_at, ""
            self.ends[name] = start.island
            try:
                await start.live()
            except Killed:
                self.first_stop_step = self.membership.stop_step
                await start.end()
                await asyncio.sleep(self.away_s)
                if self.is_taken_back:
                    self.membership.apply(self.membership.stop_without([name]))
                continue
            await asyncio.sleep(1.5 * REPORT_S)
            await start.end()
            is_stopped = start.is_stopping
            self.membership.apply(self.membership.left(name, 0, is_stopped=is_stopped))
            return
        self.refused.append(joined)

    def _join(self, name: str, start_id: str) -> Joined:
        joined = self.membership.join(
            run=RUN,
            island=name,
            identity_json="{}",
            plan_json=self.run.setting.plan().to_json(),
            corpus_sha256="",
            tokenizer_digest="",
            start_step=0,
            start_id=start_id,
        )
        self.membership.apply(joined.entries)
        return joined


SHAPES: dict[str, dict[str, Any]] = {
    "P2 tau1": {},
    "P1 tau0": {"num_fragments": 1, "overlap_steps": 0},
    "P4 tau3": {"num_fragments": 4, "overlap_steps": 3},
}
SOON, AFTER_AN_EXPIRY = 3.0, 100.0


def play(setting: Setting, directory: str, resumes: bool = False, **how: Any) -> tuple[Stop, Any]:
    """Play a stop, and the run to its end: resumed from the stop, or as if it had gone on."""

    async def scenario() -> tuple[Stop, Any]:
        stop = Stop(VirtualRun(replace(setting, directory=setting.directory / directory)), **how)
        await stop.play()
        if resumes:
            return stop, end_of(await resumed(stop.run, stop.saved))
        await stop.run.kill_syncer()
        return stop, end_of(stop.ends)

    return run_virtual(scenario())


@pytest.mark.parametrize(
    ("shape", "dies_at", "away_s", "moved"),
    [
        *(("P2 tau1", moment, SOON, (6, 8)) for moment in ("sent", "received", "pinned", "saved")),
        *(("P2 tau1", moment, AFTER_AN_EXPIRY, (6, 8)) for moment in ("sent", "received")),
        ("P1 tau0", "received", SOON, (8, 12)),
        ("P4 tau3", "sent", SOON, (7, 10)),
        ("P4 tau3", "received", AFTER_AN_EXPIRY, (7, 10)),
    ],
)
def test_a_stop_ends_with_a_whole_checkpoint_wherever_an_island_dies(
    setting: Setting, shape: str, dies_at: str, away_s: float, moved: tuple[int, int]
) -> None:
    setting = replace(setting, **SHAPES[shape])
    how = {"ask_after_s": 5.5, "dies_at": dies_at, "away_s": away_s}

    stop, end = play(setting, "stopped", resumes=True, **how)

    membership = stop.membership
    assert membership.is_stopped and membership.is_stop_complete
    assert (stop.first_stop_step, membership.stop_step) == moved
    steps = {checkpoint.inner_step for checkpoint in stop.saved.values()}
    assert steps == {membership.stop_step}, "all have saved the same step"
    assert not stop.refused
    assert end == play(setting, "whole", is_ignored=True, **how)[1]


@pytest.mark.parametrize("dies_at", ["reported", "complete"])
def test_who_dies_after_the_checkpoint_is_complete_has_stopped(
    setting: Setting, dies_at: str
) -> None:
    stop, end = play(setting, "stopped", resumes=True, ask_after_s=5.5, dies_at=dies_at)

    assert stop.membership.is_stopped
    assert [joined.verdict for joined in stop.refused] == [JoinVerdict.RUN_STOPPED]
    assert end == play(setting, "whole", is_ignored=True, ask_after_s=5.5)[1]


@pytest.mark.parametrize("dies_at", ["received", "saved"])
def test_a_stop_that_is_taken_back_leaves_no_trace(setting: Setting, dies_at: str) -> None:
    how = {"ask_after_s": 5.5, "dies_at": dies_at, "away_s": SOON}
    stop, end = play(setting, "taken back", is_taken_back=True, **how)

    assert stop.first_stop_step == 6
    assert stop.saved["a"].inner_step == 6, "it had its checkpoint, and waited"
    assert stop.membership.is_finished and not stop.membership.is_stopped
    assert {island.session.inner_step for island in stop.ends.values()} == {setting.inner_steps}
    assert end == play(setting, "whole", is_ignored=True, **how)[1]


def test_near_its_end_the_run_finishes_instead(setting: Setting) -> None:
    stop, _ = play(setting, "late", ask_after_s=15.5, dies_at="received")

    assert stop.membership.stop_step == setting.inner_steps
    assert stop.membership.is_finished and not stop.membership.is_stopped
    assert {island.session.inner_step for island in stop.ends.values()} == {setting.inner_steps}


def test_nothing_moves_where_nobody_dies(setting: Setting) -> None:
    stop, end = play(setting, "stopped", resumes=True, ask_after_s=5.5)

    assert stop.membership.stop_step == 6
    assert end == play(setting, "whole", is_ignored=True, ask_after_s=5.5)[1]


# -- waiting ---------------------------------------------------------------------------------------


def held(
    setting: Setting, words: Sequence[int | None], failure: DilocoError | None = None
) -> tuple[CommonStop, float]:
    """Hold after inner step 2 and checkpoint there while the coordinator says `words`.

    A word is the stop step, None while it is not decided, 0 once nobody asks for a stop.
    """

    async def scenario() -> tuple[CommonStop, float]:
        run = VirtualRun(setting)
        await run.start_syncer()
        island, loop = run.island("a"), asyncio.get_running_loop()
        line = GracefulStop(setting.schedule())
        stopping = CommonStop(
            line, island.exchange, Agreement(None), unreachable_s=UNREACHABLE_S, clock=loop.time
        )
        line.begin(0)
        line.promise()
        for number, word in enumerate(words):
            hear = functools.partial(
                line.set_answer, word or None, is_asked=word != 0, is_complete=False
            )
            loop.call_later(100.0 * (number + 1), hear)
        if failure is not None:
            loop.call_later(50.5, island.exchange.fail, failure)
        try:
            await island.runner.drive(stopping.passing(2, stopping.word(2)))
            if stopping.step == 2:
                await island.runner.drive(stopping.completing(2))
            return stopping, loop.time()
        except DilocoError as error:
            error.add_note(str(loop.time()))
            raise
        finally:
            await island.drop()
            await run.kill_syncer()

    return run_virtual(scenario())


def test_who_holds_goes_on_as_the_coordinator_says(setting: Setting) -> None:
    stopping, at_s = held(setting, [None, 2, None, 4])

    assert (stopping.step, at_s) == (4, 400.0)


@pytest.mark.parametrize("words", [[None, 0], [None, 2, None, 0]], ids=["holding", "checkpointed"])
def test_who_waits_goes_on_when_the_stop_is_taken_back(
    setting: Setting, words: list[int | None]
) -> None:
    stopping, at_s = held(setting, words)

    assert (stopping.step, at_s) == (None, 100.0 * len(words))


def test_who_holds_hears_of_a_failure_at_once(setting: Setting) -> None:
    with pytest.raises(QuorumLost, match="b is missing") as raised:
        held(setting, [], QuorumLost("b is missing"))

    assert float(raised.value.__notes__[0]) <= 52.0


def test_who_holds_gives_up_a_coordinator_that_stays_away(setting: Setting) -> None:
    told = r"not said for 600 s .* after inner step 2: start it again .*diloco coordinator"
    with pytest.raises(CoordinatorUnavailable, match=told) as raised:
        held(setting, [None, 2])

    assert 800.0 < float(raised.value.__notes__[0]) <= 803.0


def hold_in_turns(island_rank: int) -> dict[str, Any]:
    """Hold for longer than the group's collectives may take; then a rank fails meanwhile."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=4))
    io, exchange = IoThread(), SimpleNamespace(failure=None)
    io.start()
    line = GracefulStop(SCHEDULE)
    line.begin(0)
    line.promise()
    stopping = CommonStop(
        line,
        cast(Exchange, exchange),
        Agreement(group),
        unreachable_s=UNREACHABLE_S,
        clock=time.monotonic,
    )
    if island_rank == 0:
        later = threading.Timer(5.0, line.set_answer, [2], {"is_asked": True, "is_complete": False})
    else:
        missing = QuorumLost("b is missing")
        later = threading.Timer(6.0, lambda: setattr(exchange, "failure", missing))
    later.start()
    io.drive(stopping.passing(2, -1))
    seen: dict[str, Any] = {"step": stopping.step}
    try:
        io.drive(stopping.completing(2))
    except DilocoError as error:
        seen["failure"] = (type(error).__name__, error.exit_code)
    io.stop()
    return seen


@pytest.mark.slow
def test_ranks_hold_longer_than_a_collective_may_take_and_fail_together() -> None:
    leader, other = run_ranks(hold_in_turns, 2)

    assert (leader["step"], other["step"]) == (2, 2)
    assert leader["failure"] == ("IslandFailed", 50)
    assert other["failure"] == ("QuorumLost", 50)
