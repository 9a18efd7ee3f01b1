"""What the page of a run costs its coordinator, with ten viewers and 1,000 islands that report.

The coordinator and its islands are those of `diloco bench coordinator`, in this process. It is
served by gRPC on loopback, too: there `diloco page`, a process of its own, asks it for ten viewers,
another process, each of which holds a live stream of a view open. Times with viewers and without
alternate, so that what else the machine does comes to both.

    without    nobody looks at the page, which asks for nothing then
    page       ten look
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diloco.bench.syncer.coordinator import CoordinatorSetting, coordinating
from diloco.errors import DilocoError
from diloco.extras import require
from diloco.report.rows import Column, Report, Requirement, Watch
from diloco.security.address import listen
from diloco.security.security import Security

_START_S = 60.0
_COLUMNS = (
    Column("row", "row"),
    Column("calls", "calls", ",d"),
    Column("stall_ms", "longest stall, ms", ".1f"),
    Column("cpu", "coordinator's CPU", ".1%"),
    Column("page_cpu", "page's CPU", ".1%"),
    Column("events", "events to viewers", ",d"),
    Column("sent", "bytes to viewers", ",d"),
)


@dataclass(frozen=True, slots=True)
class PageSetting:
    """What is measured.

    Attributes:
        coordinator: Its islands, and the seconds of each time with viewers and without.
        num_times: Of each.
        num_viewers: Of the page.
        stall_ms: Bar of the longest stall of the coordinator's loop.
        share: Bar of what the page adds to the CPU time of the coordinator's process, of a core.
    """

    coordinator: CoordinatorSetting = field(default_factory=lambda: CoordinatorSetting(seconds=8.0))
    num_times: int = 4
    num_viewers: int = 10
    stall_ms: float = 50.0
    share: float = 0.02


def run(watch: Watch, *, setting: PageSetting | None = None) -> Report:
    """Measure both rows.

    Raises:
        DilocoError: If the page, or its viewers, end before the bench does.
    """
    require("diloco bench page", "starlette")
    setting = setting or PageSetting()
    with tempfile.TemporaryDirectory(prefix="diloco-bench-page-") as directory:
        without, with_page = rows = asyncio.run(_measure(setting, Path(directory), watch))
    share = with_page["cpu"] - without["cpu"]
    requirements = [
        Requirement("the page", share, setting.share, "of a core"),
        Requirement("page: longest stall", with_page["stall_ms"], setting.stall_ms, "ms"),
    ]
    return Report("page", asdict(setting), _COLUMNS, rows, requirements)


async def _measure(setting: PageSetting, place: Path, watch: Watch) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"row": name, "calls": 0, "stall_ms": 0.0, "cpu": 0.0, "page_cpu": 0.0, "events": 0,
         "sent": 0}
        for name in ("without", "page")
    ]  # fmt: skip
    total, seconds = 2 * setting.num_times, setting.coordinator.seconds
    async with contextlib.AsyncExitStack() as stack:
        coordinator, calls = await stack.enter_async_context(
            coordinating(setting.coordinator, place)
        )
        server = await listen("127.0.0.1:0", "", coordinator.handlers, security=Security())
        stack.push_async_callback(server.stop, 0.0)
        page, line = await stack.enter_async_context(_process("diloco", "page", server.address))
        url = line.removeprefix("page: ")
        for done in range(total):
            row = rows[done % 2]
            watch(row["row"], done, total)
            looking: Any = contextlib.nullcontext()
            if row["row"] == "page":
                number = str(setting.num_viewers)
                looking = _process("diloco.bench.syncer.page_viewers", url, number)
            async with looking as viewers:
                cpu_s, page_s = time.process_time(), _cpu_s(page.pid)
                figures = await calls.measure("reports")
                row["cpu"] += (time.process_time() - cpu_s) / seconds / setting.num_times
                row["page_cpu"] += (_cpu_s(page.pid) - page_s) / seconds / setting.num_times
                row["calls"] += figures["calls"]
                row["stall_ms"] = max(row["stall_ms"], figures["stall_ms"])
                if viewers is not None:
                    said, _ = await viewers[0].communicate(b"")
                    for name, value in json.loads(said).items():
                        row[name] += value
    return rows


@contextlib.asynccontextmanager
async def _process(*words: str) -> AsyncIterator[tuple[Process, str]]:
    """Run a module while the context lasts; gives it, and the first line that it says.

    Raises:
        DilocoError: If it says none.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *words, stdin=PIPE, stdout=PIPE, limit=1 << 20
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(_START_S):
            line = (await process.stdout.readline()).decode().strip()
        if not line:
            raise DilocoError(f"python -m {' '.join(words)} ended before it served the bench")
        yield process, line
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process: by its clock, whose number is made as clock_getcpuclockid does."""
    return time.clock_gettime((~pid << 3) | 2)
