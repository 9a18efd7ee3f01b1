"""Deaths in an all-reduce, at every word of it: one truth everywhere, and the run goes on.

The clock is virtual; who is killed has served, or said, exactly so much.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import blake3
import pytest
import torch
from torch import Tensor

from diloco.outer.optimizer import OuterOptimizer
from diloco.protos import allreduce_pb2 as wire
from diloco.security.access import RULES
from diloco.transport.calls.loopback import run_virtual
from diloco.transport.contracts import Handler, Handlers, IncomingCall, Reply
from diloco.versions.store import FragmentStore
from tests.virtual_allreduce import AllReduceIsland, AllReduceRun
from tests.virtual_run import Setting

ISLANDS = ("a", "b", "c")
DESCENT = {"a": 1.0, "b": 3.0, "c": 2.0}


def descend(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    for parameter in parameters.values():
        parameter.sub_(torch.linspace(0.1, DESCENT[island], parameter.numel()))


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(
        {name: [16.0] * 5 for name in "tuvw"},
        descend,
        tmp_path,
        inner_steps=12,
        islands=ISLANDS,
        num_fragments=2,
        overlap_steps=1,
        flush=True,
        optimizer=OuterOptimizer("nesterov", 0.7, 0.9, 2),
        uplink_codec="int4",
        downlink_codec="int4",
        round_deadline_s=20.0,
    )


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power loss, and waiting for the disk is most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@dataclass
class Trigger:
    """Reports the nth call of a method, before or after it is served, and answers it no more.

    `of` names whose handlers are watched ("decider" or an island), `caller` whose call it is.
    """

    method: str
    of: str
    caller: str = ""
    nth: int = 1
    is_served: bool = False
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    num_calls: int = 0

    def intercept(self, name: str, handlers: Handlers) -> Handlers:
        if name != self.of:
            return handlers
        return {**handlers, self.method: self._watched(handlers[self.method])}

    def _watched(self, handler: Handler) -> Handler:
        async def handle(call: IncomingCall) -> Reply:
            if not self._is_it(call):
                return await handler(call)
            if self.is_served:
                await handler(call)
            self.reached.set()
            await asyncio.Event().wait()
            raise AssertionError

        return handle

    def _is_it(self, call: IncomingCall) -> bool:
        message: Any = RULES[self.method].message.FromString(call.header)
        caller = message.grant.island
        if self.reached.is_set() or (self.caller and caller != self.caller):
            return False
        self.num_calls += 1
        return self.num_calls == self.nth


class Living:
    """Islands that train, each of which can be killed and started again."""

    def __init__(self, run: AllReduceRun) -> None:
        self.run = run
        self.starts: dict[str, AllReduceIsland] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, name: str) -> None:
        before = self.starts.get(name)
        last_inner_step = 0 if before is None else before.island.session.inner_step
        start = self.starts[name] = await self.run.start(name)
        self.tasks[name] = asyncio.create_task(self._live(start, last_inner_step))

    async def _live(self, start: AllReduceIsland, last_inner_step: int) -> None:
        await start.island.start(last_inner_step=last_inner_step)
        await start.island.go_on()

    async def kill(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks[name], return_exceptions=True)
        await self.starts[name].kill()

    async def end(self) -> None:
        await asyncio.gather(*self.tasks.values())
        await self.run.end(list(self.starts.values()))


async def living(run: AllReduceRun) -> Living:
    await run.start_decider()
    islands = Living(run)
    for name in run.setting.islands:
        await islands.begin(name)
    return islands


def check_same_bytes(run: AllReduceRun, islands: Living) -> None:
    """Check that all ended with the same bytes, which are those that the journal names."""
    run.journal.open()
    headers = {(h["fragment_id"], h["version"]): h for h in headers_of_run(run)}
    run.journal.close()
    newest: dict[int, int] = {}
    for p, version in headers:
        newest[p] = max(newest.get(p, 0), version)
    for name, start in islands.starts.items():
        island = start.island
        assert island.session.inner_step == run.setting.inner_steps
        assert island.session.versions == tuple(newest[p] for p in sorted(newest))
        assert island.values() == islands.starts["a"].island.values()
        for fragment in run.setting.plan().fragments:
            p = fragment.fragment_id
            record = FragmentStore(run.setting.directory / "peers" / name, fragment, 4).newest()
            assert record is not None
            assert record.header() == headers[p, newest[p]]
    for p, last in newest.items():
        assert [v for q, v in sorted(headers) if q == p] == list(range(last + 1)), "none is lost"


def headers_of_run(run: AllReduceRun) -> list[dict[str, Any]]:
    return [json.loads(text) for text in run.journal.headers()]


def num_expired(islands: Mapping[str, AllReduceIsland]) -> int:
    return sum(len(start.island.kinds("round_expired")) for start in islands.values())


POINTS = {
    "before its contribution is declared": Trigger("allreduce.declare", "decider", "b"),
    "once it is declared": Trigger("allreduce.declare", "decider", "b", is_served=True),
    "asked for a contribution": Trigger("allreduce.contribution", "b", nth=2),
    "having given one": Trigger("allreduce.contribution", "b", is_served=True),
    "asked for a result": Trigger("allreduce.result", "b"),
    "having given one result": Trigger("allreduce.result", "b", is_served=True),
    "before it is prepared": Trigger("allreduce.prepared", "decider", "b"),
    "once it is prepared": Trigger("allreduce.prepared", "decider", "b", is_served=True),
    "in the second round": Trigger("allreduce.prepared", "decider", "b", nth=3),
    "when it founds the run": Trigger("allreduce.found", "decider", "a"),
    "once it has founded it": Trigger("allreduce.found", "decider", "a", is_served=True),
}


_DISK_LOST = pytest.param(True, id="and its disk is lost", marks=pytest.mark.slow)


@pytest.mark.parametrize("loses_disk", [pytest.param(False, id="alone"), _DISK_LOST])
@pytest.mark.parametrize("point", POINTS.values(), ids=POINTS)
def test_an_island_dies(setting: Setting, point: Trigger, loses_disk: bool) -> None:
    trigger = replace(point, reached=asyncio.Event())
    victim = trigger.caller if trigger.of == "decider" else trigger.of
    run = AllReduceRun(setting, intercept=trigger.intercept)

    async def scenario() -> Living:
        islands = await living(run)
        await trigger.reached.wait()
        await islands.kill(victim)
        if loses_disk and trigger.method != "allreduce.found":
            shutil.rmtree(setting.directory / "peers" / victim)
        await asyncio.sleep(2.0)
        await islands.begin(victim)
        await islands.end()
        return islands

    islands = run_virtual(scenario())

    check_same_bytes(run, islands)
    assert run.lost == []


DECIDER_POINTS = {
    f"{'once' if is_served else 'before'} it has heard {method} ({nth})": Trigger(
        f"allreduce.{method}", "decider", nth=nth, is_served=is_served
    )
    for method, nths in {"found": (1, 2), "declare": (1, 3), "prepared": (1, 3, 6)}.items()
    for nth in nths
    for is_served in (False, True)
}


#: Before and after the first word, and around the first commit.
_DEFAULT_POINTS = [name for name, p in DECIDER_POINTS.items() if (p.method[10:], p.nth) in (
    ("found", 1), ("prepared", 3)
)]  # fmt: skip


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(p, id=name, marks=[] if name in _DEFAULT_POINTS else pytest.mark.slow)
        for name, p in DECIDER_POINTS.items()
    ],
)
def test_the_decider_dies(setting: Setting, point: Trigger) -> None:
    """Its third prepared commits: killed after that, the journal knows what nobody has heard."""
    trigger = replace(point, reached=asyncio.Event())
    run = AllReduceRun(setting, intercept=trigger.intercept)

    async def scenario() -> Living:
        islands = await living(run)
        await trigger.reached.wait()
        await run.kill_decider()
        await asyncio.sleep(3.0)
        run.statuses.clear()
        await run.start_decider()
        await islands.end()
        return islands

    islands = run_virtual(scenario())

    check_same_bytes(run, islands)
    assert num_expired(islands.starts) == 0, "a restart of the decider costs no round"
    first = {status.fragment_id: status for status in reversed(run.statuses)}
    assert not any(s.age_s for s in first.values()), "it knows of no time before its own start"


def test_an_island_whose_disk_was_lost_is_healed_by_the_others(setting: Setting) -> None:
    test_an_island_dies(setting, POINTS["once it is prepared"], loses_disk=True)


def test_an_island_that_stays_away_ends_the_run(setting: Setting) -> None:
    """Three attempts in a row expire by their deadlines; the others hear who is missing."""
    trigger = replace(POINTS["asked for a result"], reached=asyncio.Event())
    run = AllReduceRun(setting, intercept=trigger.intercept)

    async def scenario() -> list[BaseException | None]:
        islands = await living(run)
        await trigger.reached.wait()
        await islands.kill("b")
        others = [islands.tasks[name] for name in ("a", "c")]
        ends = await asyncio.gather(*others, return_exceptions=True)
        for name in ("a", "c"):
            await islands.starts[name].kill()
        await run.kill_decider()
        return list(ends)

    ends = run_virtual(scenario())

    assert [type(end).__name__ for end in ends] == ["QuorumLost", "QuorumLost"]
    (lost,) = run.lost
    assert lost[1] == 50
    assert "diloco island RUN.toml --island b" in lost[0]


def test_a_peer_that_sends_rubbish_costs_rounds_and_no_truth(setting: Setting) -> None:
    """What is pulled is held against the declared digest; where b owns the lane, all is well."""

    def rubbish(name: str, handlers: Handlers) -> Handlers:
        if name != "b":
            return handlers

        async def handle(call: IncomingCall) -> Reply:
            reply = await handlers["allreduce.contribution"](call)
            answer = wire.LaneReply.FromString(reply.header)
            if answer.status != wire.LANE_STATUS_OK:
                return reply
            payload = bytes(len(reply.payload))
            answer.digest = blake3.blake3(payload).digest()
            return Reply(answer.SerializeToString(), payload)

        return {**handlers, "allreduce.contribution": handle}

    run = AllReduceRun(setting, intercept=rubbish)

    async def scenario() -> Living:
        islands = await living(run)
        await islands.end()
        return islands

    islands = run_virtual(scenario())

    check_same_bytes(run, islands)
    assert num_expired(islands.starts) > 0
