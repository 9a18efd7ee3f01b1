"""The processes and files of a run under chaos, for the injectors of faults.

Which processes run is read from locks and /proc, never remembered: a process that died was
replaced by its own supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.chaos.bucket import Bucket
from diloco.chaos.plan import COORDINATOR
from diloco.coordinator.status import ask_status
from diloco.errors import CoordinatorUnavailable
from diloco.launch.local import LocalRun
from diloco.protocol.run.alarms import AlarmKind
from diloco.protos.control_pb2 import StatusReply
from diloco.security.security import Security
from diloco.state_dir import Endpoint, StateDir, holder, read_endpoint
from diloco.telemetry.events import Event, FragmentMerged, InnerStepDone
from diloco.transport.identity import Role
from diloco.versions.frames import frames_in
from diloco.versions.record import RecordInvalid, check_whole, record_path, versions_in

_FRAGMENTS = "fragment-[0-9]*"
#: Of a file of events: its last step is among them.
_TAIL_BYTES = 1 << 16
_MOMENT_S = 3.0


@dataclass(slots=True)
class ChaosEnvironment:
    """One run, and the directory through which its processes are reached from within.

    `away` are islands that were taken down, `bucket` is the object store that has its state.
    """

    run: LocalRun
    chaos_dir: Path
    away: set[str] = field(default_factory=set)
    bucket: Bucket | None = None

    @property
    def state(self) -> StateDir:
        """The run's state directory."""
        return self.run.state

    @property
    def syncers(self) -> dict[str, StateDir]:
        """What each syncer sees, by its name."""
        config = self.run.config
        found = self.state.of_run(config.own_syncers, sorted(config.syncers))
        return {each.syncer_name: each for each in found}

    def pid(self, target: str) -> int | None:
        """Process of a coordinator, a syncer, an island's supervisor or a rank that lives."""
        if target == COORDINATOR:
            return holder(self.state.coordinator_lock)
        if (syncer := self.syncers.get(target)) is not None:
            return holder(syncer.store_lock)
        island, slash, rank = target.partition("/")
        supervisor = self.run.islands[island]
        if island in self.away or supervisor.poll() is not None:
            return None
        return ranks_of(supervisor.pid).get(int(rank)) if slash else supervisor.pid

    def is_gone(self, target: str) -> bool:
        """Whether a target has ended and nobody starts it again: an island that came to its end."""
        supervisor = self.run.islands.get(target)
        return supervisor is not None and target not in self.away and supervisor.poll() is not None

    def pids(self, target: str) -> list[int]:
        """All processes of a target: of an island its supervisor and every rank."""
        pid = self.pid(target)
        if pid is None:
            return []
        return [pid, *ranks_of(pid).values()] if target in self.run.islands else [pid]

    def serving_pid(self, target: str) -> int | None:
        """Process of a coordinator or syncer that serves."""
        endpoint = self.endpoint(target)
        return endpoint.pid if endpoint is not None else None

    def endpoint(self, target: str) -> Endpoint | None:
        """Where a coordinator or syncer serves; None while it does not."""
        pid = self.pid(target)
        path = self.state.coordinator if target == COORDINATOR else self.syncers[target].syncer
        endpoint = None if pid is None else read_endpoint(path)
        is_its_own = endpoint is not None and endpoint.pid == pid and endpoint.address
        return endpoint if is_its_own else None

    def has_alarm(self, kind: AlarmKind) -> bool | None:
        """Whether `diloco status` shows an alarm that was raised a moment ago; None: no answer."""
        if (endpoint := self.endpoint(COORDINATOR)) is None:
            return None

        async def ask() -> StatusReply:
            security = Security.of(self.run.config, Role.OPERATOR)
            transport = security.transport(endpoint.address, Role.COORDINATOR)
            try:
                return await ask_status(transport)
            finally:
                await transport.close()

        try:
            alarms = asyncio.run(ask()).alarms
        except CoordinatorUnavailable:
            return None
        return any(a.alarm.kind == kind and a.last_age_s <= _MOMENT_S for a in alarms)

    def inner_step(self, island: str) -> int:
        """Return the newest inner step that an island has done; 0: none yet."""
        steps = (e["inner_step"] for e in self._last_events(island) if _is(e, InnerStepDone))
        return int(next(steps, 0))

    def is_held(self, fragment_id: int, version: int) -> bool:
        """Whether an island whose leader lives has merged a version, and so can give it back."""
        for island in self.run.islands:
            leader = self.pid(f"{island}/0")
            since = _started_unix_s(leader) if leader is not None else math.inf
            if any(
                _is(event, FragmentMerged)
                and (event["fragment_id"], event["version"]) == (fragment_id, version)
                and event["unix_s"] >= since
                for event in self._last_events(island)
            ):
                return True
        return False

    def _last_events(self, island: str) -> Iterator[dict[str, Any]]:
        """Yield what an island's leader wrote last, newest first."""
        path = self.run.config.telemetry_dir / f"events-{island}-0.jsonl"
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            for line in reversed(file.read().splitlines()):
                with contextlib.suppress(ValueError):  # not all of a line is there
                    yield json.loads(line)

    @property
    def trained_tokens(self) -> int:
        """What islands have trained so far; about `Config.total_tokens` at the run's end."""
        islands = self.run.config.islands
        steps = {name: self.inner_step(name) for name in self.run.islands}
        return sum(n * islands[name].tokens_per_inner_step for name, n in steps.items())

    def fragments(self, *syncers: str) -> list[Path]:
        """Directories of the fragments of these syncers; of all, if none is named."""
        return sorted(
            directory
            for name in syncers or self.syncers
            for directory in self.syncers[name].store.glob(_FRAGMENTS)
        )

    def versions(self, *syncers: str) -> dict[int, list[int]]:
        """Versions of each of their fragments that have a whole record or frame on disk, ascending.

        Of all syncers, if none is named.
        """
        return {
            fragment_of(directory): _whole_versions(directory)
            for directory in self.fragments(*syncers)
        }


def fragment_of(directory: Path) -> int:
    """Which fragment's directory of a store it is."""
    return int(directory.name.removeprefix("fragment-"))


def _whole_versions(directory: Path) -> list[int]:
    found = set(frames_in(directory))
    for version in versions_in(directory):
        with contextlib.suppress(RecordInvalid):  # damaged on purpose, or forgotten meanwhile
            check_whole(record_path(directory, version))
            found.add(version)
    return sorted(found)


def ranks_of(supervisor: int) -> dict[int, int]:
    """Find the ranks below an island's supervisor: rank -> process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            parent = re.search(r"PPid:\s+(\d+)", (entry / "status").read_text())
            if parent is None or int(parent[1]) != supervisor:
                continue
            for variable in (entry / "environ").read_bytes().split(b"\0"):
                if variable.startswith(b"RANK="):
                    found[int(variable.removeprefix(b"RANK="))] = int(entry.name)
    return found


def _is(event: dict[str, Any], kind: type[Event]) -> bool:
    return bool(event["kind"] == kind.kind)


def _started_unix_s(pid: int) -> float:
    """When a process was started, as events tell time; never, of one that has ended."""
    with contextlib.suppress(OSError):
        ticks = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
        ago_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
        return time.time() - ago_s
    return math.inf


def is_frozen(pid: int) -> bool:
    """Whether a process is stopped; false of one that has ended."""
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def send(pid: int, number: int) -> bool:
    """Send a signal; false if the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


@contextlib.contextmanager
def held_still(pid: int | None) -> Iterator[None]:
    """Keep a process from doing anything while the context lasts."""
    if pid is not None:
        send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if pid is not None:
            send(pid, signal.SIGCONT)
