"""How long a coordinator of many islands stands still: its real handlers and journal, no network.

All islands are in this process and call the handlers at fixed times, as reports come over a
network: each once a second, with what its link to each syncer does, and with new positions of the
text once an inner step. Next to them a task
wakes up every millisecond; how late it is says how long the event loop stood still. On a machine
with other work it is late for that alone: see the row "idle".

    idle       nobody calls
    reports    of all islands, whose journal is on the disk
    metrics    reports, and Prometheus scrapes the coordinator every five seconds
    cut        reports, and each island brings its part of a run checkpoint
    plan       the same, and one island after the other joins with a large plan that is not the
               run's: reading it is a thread's work, of which single calls keep Python's lock
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from diloco.coordinator.daemon import Coordinator
from diloco.coordinator.journal import Journal
from diloco.extras import require
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.protocol.run.claims import Claims
from diloco.protocol.run.members import MembershipRules
from diloco.protocol.run.membership import Membership
from diloco.protocol.run.plan_bytes import packed
from diloco.protocol.run.terms import Terms
from diloco.protos.control_pb2 import (
    CutPart,
    Grant,
    JoinReply,
    JoinRequest,
    LinkUse,
    ReportReply,
    ReportRequest,
    SyncerLinkUse,
)
from diloco.report.rows import Column, Report, Requirement, Watch, matching
from diloco.transport.calls.loopback import LoopbackNetwork
from diloco.transport.contracts import PROTOCOL_VERSION, Transport
from diloco.transport.errors import Overloaded

_RUN, _WAKE_S, _SCRAPE_S = "bench-coordinator", 0.001, 5.0
_COLUMNS = (
    Column("row", "row"),
    Column("calls", "calls", ",d"),
    Column("stall_ms", "longest stall, ms", ".1f"),
    Column("busy", "loop busy", ".1%"),
    Column("p50_ms", "answer p50, ms", ".1f"),
    Column("p99_ms", "p99", ".1f"),
)


@dataclass(frozen=True, slots=True)
class CoordinatorSetting:
    """What is measured.

    Attributes:
        num_islands: Of the run, which merges on arrival.
        num_syncers: To which each says what its link does.
        seconds: Of reports in each row.
        report_s: Between two reports of an island.
        step_s: Between two positions that differ.
        num_tensors: Of the plan that another island joins with, in the row "plan".
        stalls_ms: Bars of the longest stall, by row.
    """

    num_islands: int = 1000
    num_syncers: int = 16
    seconds: float = 20.0
    report_s: float = 1.0
    step_s: float = 13.0
    num_tensors: int = 47_000
    stalls_ms: dict[str, float] = field(
        default_factory=lambda: {
            "idle": 20.0,
            "reports": 50.0,
            "metrics": 50.0,
            "cut": 50.0,
            "plan": 500.0,
        }
    )


def run(
    watch: Watch, rows: Sequence[str] = (), *, setting: CoordinatorSetting | None = None
) -> Report:
    """Measure all rows whose names match.

    Raises:
        ConfigError: If a pattern matches no row.
    """
    setting = setting or CoordinatorSetting()
    wanted = matching(list(setting.stalls_ms), rows)
    results = []
    for done, row in enumerate(wanted):
        watch(row, done, len(wanted))
        with tempfile.TemporaryDirectory(prefix="diloco-bench-coordinator-") as directory:
            results.append(asyncio.run(_measure(setting, row, Path(directory))))
    requirements = [
        Requirement(f"{r['row']}: longest stall", r["stall_ms"], setting.stalls_ms[r["row"]], "ms")
        for r in results
    ]
    return Report("coordinator", asdict(setting), _COLUMNS, results, requirements)


async def _measure(setting: CoordinatorSetting, row: str, place: Path) -> dict[str, Any]:
    async with (
        coordinating(setting, place, is_cutting=row == "cut") as (coordinator, calls),
        _scraped(coordinator) if row == "metrics" else contextlib.nullcontext(),
    ):
        return {"row": row, **await calls.measure(row)}


@contextlib.asynccontextmanager
async def coordinating(
    setting: CoordinatorSetting, place: Path, *, is_cutting: bool = False
) -> AsyncIterator[tuple[Coordinator, IslandCalls]]:
    """Coordinate islands that have joined, with a journal in `place`; gives their calls, too."""
    names = tuple(f"island-{number:05d}" for number in range(setting.num_islands))
    membership = Membership(
        _RUN, names, "{}", lambda a, b: [], 1, num_checkpoints=1, claims=Claims(len(names), names)
    )
    journal = Journal(place / "journal.sqlite")
    journal.open()
    with contextlib.closing(journal):
        coordinator = Coordinator(
            membership=membership,
            journal=journal,
            secret=secrets.token_bytes(32),
            terms=Terms(
                policy_json=json.dumps({"run.inner_steps": 1}),
                unreachable_s=600.0,
                rules=MembershipRules(is_elastic=True, max_islands=len(names)),
            ),
            unix_clock=time.time,
        )
        network = LoopbackNetwork()
        server = network.server("coordinator", coordinator.handlers)
        await server.start()
        calls = IslandCalls(setting, network.connect("coordinator"))
        await calls.join_all(names)
        watching = asyncio.create_task(coordinator.watch())
        if is_cutting:
            journal.write(entries := membership.cut())
            membership.apply(entries)
        yield coordinator, calls
        watching.cancel()
        await server.stop(0.0)


@contextlib.asynccontextmanager
async def _scraped(coordinator: Coordinator) -> AsyncIterator[None]:
    """Scrape what the coordinator knows every `_SCRAPE_S`, as Prometheus does."""
    require("the row metrics of diloco bench coordinator", "prometheus_client")
    from diloco.telemetry.prometheus import MetricsServer, coordinator_metrics

    server = MetricsServer(
        "127.0.0.1:0", lambda: coordinator_metrics(coordinator.status()), setting="bench"
    )

    def scrape() -> None:
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=60.0) as reply:
            reply.read()

    async def scraping() -> None:
        while True:
            await asyncio.to_thread(scrape)
            await asyncio.sleep(_SCRAPE_S)

    await server.start(is_restart=False)
    task = asyncio.create_task(scraping())
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        await server.stop()


class IslandCalls:
    """The calls of all islands."""

    def __init__(self, setting: CoordinatorSetting, transport: Transport) -> None:
        """Assign only."""
        self._setting = setting
        self._transport = transport
        self._grants: list[Grant] = []
        self._took_s: list[float] = []
        self._passed_s = 0.0  # in earlier measurements
        self._asked: set[int] = set()  # islands whose part of the checkpoint is missing
        use = SyncerLinkUse(up_bps=1.5e9, down_bps=1.5e9, round_trip_s=0.08, failed_calls=300)
        self._link = LinkUse(interval_s=10.1, syncers=[use] * setting.num_syncers)

    async def join_all(self, names: Sequence[str]) -> None:
        """Let all of them join."""
        plan = packed(_plan(1))
        for name in names:
            joined = JoinReply.FromString(await self._call("control.join", _join(name, plan)))
            self._grants.append(joined.grant)

    async def measure(self, row: str) -> dict[str, Any]:
        """Let them report for as long as the setting says; returns the row's figures."""
        loop, setting = asyncio.get_running_loop(), self._setting
        other = packed(_plan(setting.num_tensors)) if row == "plan" else b""
        self._took_s.clear()
        under_way: set[asyncio.Task[Any]] = set()  # what is over would be the collector's work
        joining: asyncio.Task[Any] | None = None
        num_joins = 0
        began, cpu_s, stall_s, num_calls = loop.time(), time.thread_time(), 0.0, 0
        while (now := loop.time()) < began + setting.seconds:
            due = row != "idle" and int((now - began) / setting.report_s * len(self._grants))
            for number in range(num_calls, due):
                under_way.add(
                    call := asyncio.create_task(self._report(number, self._passed_s + now - began))
                )
                call.add_done_callback(under_way.discard)
            num_calls = max(num_calls, due)
            if other and (joining is None or joining.done()):
                joining = asyncio.create_task(self._join_in_vain(num_joins, other))
                num_joins += 1
            await asyncio.sleep(_WAKE_S)
            stall_s = max(stall_s, loop.time() - now - _WAKE_S)
        busy = (time.thread_time() - cpu_s) / setting.seconds
        self._passed_s += setting.seconds
        await asyncio.gather(*under_way, *((joining,) if joining else ()))
        took_s = self._took_s
        return {
            "calls": num_calls,
            "stall_ms": 1e3 * stall_s,
            "busy": busy,
            "p50_ms": 1e3 * median(took_s) if took_s else None,
            "p99_ms": 1e3 * quantiles(took_s, n=100)[98] if took_s else None,
        }

    async def _join_in_vain(self, number: int, plan: bytes) -> None:
        """Join for the next island in turn with a plan that is not the run's."""
        island = f"island-{number % len(self._grants):05d}"
        with contextlib.suppress(Overloaded):
            await self._call("control.join", _join(island, plan))

    async def _report(self, number: int, passed_s: float) -> None:
        """Report for the next island in turn; each takes its inner steps at times of its own."""
        began, island = time.perf_counter(), number % len(self._grants)
        share = island / len(self._grants)
        drawn = int(passed_s / self._setting.step_s + share)
        position = {"drawn": {"web": drawn}, "cursor": {"at": drawn}}
        word = {"grant": 0, "is_final": False, "position": position}
        request = ReportRequest(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grants[island],
            state="training",
            inner_step=drawn,
            link=self._link,
            position_json=json.dumps({"revision": 0, "slots": {str(island): word}}),
        )
        if island in self._asked and drawn > share:
            text = json.dumps({str(island): position})
            part = CutPart(number=1, inner_step=drawn, versions=[0], text_json=text)
            request.cut.CopyFrom(part)
        reply = await self._call("control.report", request.SerializeToString())
        (self._asked.add if ReportReply.FromString(reply).cut else self._asked.discard)(island)
        self._took_s.append(time.perf_counter() - began)

    async def _call(self, method: str, header: bytes) -> bytes:
        reply = await self._transport.call(method, header, deadline_s=60.0)
        return reply.header


def _plan(num_tensors: int) -> str:
    specs = [TensorSpec(f"layers.{n}.experts.weight", (64, 64)) for n in range(num_tensors)]
    return make_plan(specs, num_fragments=1).to_json()


def _join(island: str, plan: bytes) -> bytes:
    return JoinRequest(
        protocol_version=PROTOCOL_VERSION,
        run=_RUN,
        island=island,
        identity_json="{}",
        plan=plan,
        start_id="a",
    ).SerializeToString()
