"""A coordinator with its syncer, or a syncer alone, as processes; what the kernel knows of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from diloco.config.load import resolved_toml
from diloco.config.schema import Config
from diloco.errors import CoordinatorUnavailable, DilocoError
from diloco.launch.process.children import how_ended, last_words, spawn
from diloco.state_dir import StateDir, read_endpoint, stop_syncer

_START_S = 180.0
_END_S = 20.0
_LOOK_S = 0.1
#: A process is at rest once it has spent no more than a share of so many seconds.
_REST_S, _REST_SHARE = 1.0, 0.02
#: Until then: a compiler on one core that has other work, too.
_SETTLED_S = 180.0


@contextlib.contextmanager
def control_plane(config: Config, *, cpu: int | None = None) -> Iterator[Path]:
    """Coordinate a run while the context lasts; nothing outlives it.

    Args:
        config: The run; its `coordinator.state_dir` does not exist yet.
        cpu: CPU to which coordinator and syncer are bound; None: any.

    Yields:
        The run file, as islands are to read it.

    Raises:
        CoordinatorUnavailable: If no coordinator answers in time; says what its log does.
    """
    state = StateDir(Path(config.coordinator.state_dir))
    state.create()
    run_file = state.root / "bench.toml"
    run_file.write_text(resolved_toml(config), encoding="utf-8")
    words, log = ["diloco", "coordinator", str(run_file)], state.root / "coordinator.log"
    try:
        with _process(words, log, state.coordinator, cpu) as (process, _):
            yield run_file
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)  # it ends by itself once the islands have finished
    finally:
        stop_syncer(state)


@contextlib.contextmanager
def serving(state: StateDir) -> Iterator[tuple[str, SyncerProcess]]:
    """Run a syncer on one CPU while the context lasts; gives its address.

    Raises:
        CoordinatorUnavailable: If it does not serve in time; says what its log does.
    """
    words, cpu = ["diloco.launch.syncer", str(state.root)], max(os.sched_getaffinity(0))
    with _process(words, state.syncer_log, state.syncer, cpu) as (process, address):
        yield address, SyncerProcess(process.pid)


@contextlib.contextmanager
def _process(
    words: list[str], log: Path, endpoint_file: Path, cpu: int | None
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a server, bound to a CPU if there is one, until the context ends."""
    process = spawn([sys.executable, "-m", *words], log)
    try:
        if cpu is not None:
            os.sched_setaffinity(process.pid, {cpu})  # before its first thread: all inherit it
        until = time.monotonic() + _START_S
        while (endpoint := read_endpoint(endpoint_file)) is None or not endpoint.address:
            if process.poll() is not None or time.monotonic() > until:
                is_over = process.returncode is not None
                raise CoordinatorUnavailable(
                    f"{' '.join(words)} {how_ended(process) if is_over else 'did not serve'} "
                    f"before it served the bench; {last_words(log)}"
                )
            time.sleep(_LOOK_S)
        yield process, endpoint.address
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU seconds of a process, by what its threads do; `kernel_s` are those in system calls."""

    loop_s: float
    tensors_s: float
    wire_s: float
    kernel_s: float

    @property
    def cpu_s(self) -> float:
        """All of them."""
        return self.loop_s + self.tensors_s + self.wire_s

    def __sub__(self, before: Spent) -> Spent:
        """Return what was spent since."""
        pairs = zip(astuple(self), astuple(before), strict=True)
        return Spent(*(now - then for now, then in pairs))


class SyncerProcess:
    """A running syncer, as /proc shows it."""

    def __init__(self, pid: int) -> None:
        """Assign only."""
        self._pid = pid
        self._proc = Path(f"/proc/{pid}")

    def spent(self) -> Spent:
        """CPU seconds since its start: its main thread's is the event loop; gRPC names its own.

        The threads of a merge have ended by then, so tensors are what is left of the whole.
        """
        user, kernel = _ticks(self._proc / "stat")
        loop = wire = 0
        for task in (self._proc / "task").iterdir():
            with contextlib.suppress(FileNotFoundError):
                ticks = sum(_ticks(task / "stat"))
                if int(task.name) == self._pid:
                    loop = ticks
                elif not (task / "comm").read_text().startswith("python"):
                    wire += ticks
        per_s = os.sysconf("SC_CLK_TCK")
        whole = user + kernel
        return Spent(loop / per_s, (whole - loop - wire) / per_s, wire / per_s, kernel / per_s)

    async def settle(self, within_s: float = _SETTLED_S) -> None:
        """Wait until it is at rest, with the processes that it has started.

        After its first round a syncer still compiles its codec, which is of no later round.

        Raises:
            DilocoError: If it never is.
        """
        until, per_s = time.monotonic() + within_s, os.sysconf("SC_CLK_TCK")
        since, before = time.monotonic(), self._ticks_of_all()
        while (now := time.monotonic()) < since + _REST_S:
            if now > until:
                raise DilocoError(
                    f"the syncer (process {self._pid}) had work to do for {within_s:g} s after its "
                    f"first round, so that none of its next would be measured alone: see its log, "
                    f"or measure again on a machine with less load"
                )
            await asyncio.sleep(_LOOK_S)
            if (ticks := self._ticks_of_all()) - before > _REST_SHARE * _REST_S * per_s:
                since, before = time.monotonic(), ticks

    def _ticks_of_all(self) -> int:
        """Ticks of it and of its children, also of those that have ended."""
        stats: dict[int, list[str]] = {}
        for place in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                stats[int(place.parent.name)] = _fields(place)
        children: defaultdict[int, list[int]] = defaultdict(list)
        for pid, (_, parent, *_) in stats.items():
            children[int(parent)].append(pid)
        ticks, left = 0, [self._pid]
        while left:
            pid = left.pop()
            ticks += sum(map(int, stats.get(pid, ["0"] * 15)[11:15]))
            left += children[pid]
        return ticks

    def resident_bytes(self) -> int:
        """Return what it has in memory now."""
        return self._status("VmRSS")

    def peak_bytes(self) -> int:
        """Return the most that it has had in memory since `forget_peak`."""
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        """Look for the peak from now on."""
        (self._proc / "clear_refs").write_text("5")

    def _status(self, name: str) -> int:
        lines = (self._proc / "status").read_text().splitlines()
        found = next(line for line in lines if line.startswith(name + ":"))
        return 1024 * int(found.split()[1])


def _ticks(path: Path) -> tuple[int, int]:
    """User and kernel ticks of a process or a thread."""
    user, kernel = _fields(path)[11:13]
    return int(user), int(kernel)


def _fields(path: Path) -> list[str]:
    """Words of a process's or a thread's `stat` after its name: state, parent, and so on."""
    return path.read_text().rpartition(")")[2].split()
