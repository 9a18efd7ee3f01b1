"""Where a page's runs are read: from a coordinator that is asked, or from files of events.

However many look, a source is read once a second at most, and not at all while nobody looks.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import os
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from diloco.bounded_text import bounded_text
from diloco.coordinator.status import ask_status, operate
from diloco.errors import ConfigError, CoordinatorUnavailable
from diloco.page.live_run import LiveRun
from diloco.page.recorded_run import RecordedRun
from diloco.page.run_view import RunView
from diloco.state_dir import StateDir, holder, read_endpoint
from diloco.transport.contracts import Transport

#: Seconds between two reads.
LOOK_S = 1.0
#: Seconds for which the first reading of a run is waited for.
_PATIENCE_S = 1.0
#: Bytes of lines of one file that are read at once; and that no event has: what a disk that failed
#: or a stranger has left there without an end of a line is passed over, so much at once.
_LINES_BYTES, _NO_LINE_BYTES = 32 << 10, 4 << 20


class Source(Protocol):
    """One run."""

    async def look(self) -> RunView:
        """Give the run as it is, or as it was less than `LOOK_S` ago."""

    async def act(self, command: str, arguments: Mapping[str, str]) -> str:
        """Give the run a command of an operator; returns in words what was done.

        Raises:
            ConfigError: If it is not done; says why.
            CoordinatorUnavailable: If nobody answers.
        """

    async def close(self) -> None:
        """Release what the source holds."""


class LiveSource:
    """A run whose coordinator is asked, as `diloco status --watch` asks it."""

    def __init__(self, address: str, transport: Transport) -> None:
        """Assign only; `transport` is the operator's, and this source's from now on."""
        self._transport = transport
        self._address = address
        self._run = LiveRun(address)
        self._lock = asyncio.Lock()
        self._view: RunView | None = None
        self._asked_at = 0.0

    async def look(self) -> RunView:
        """Give the run; where the coordinator does not answer, how it was, and why.

        Raises:
            CoordinatorUnavailable: If it has never answered.
        """
        async with self._lock:
            if self._view is None or time.monotonic() - self._asked_at >= LOOK_S:
                problem = ""
                try:
                    reply = await ask_status(self._transport, watches=True)
                    if self._view is not None and self._view.name != reply.run:
                        self._run = LiveRun(self._address)  # another run has taken the address
                    self._run.observe(reply, time.time())
                except CoordinatorUnavailable as error:
                    if self._view is None:
                        raise
                    problem = str(error)
                self._asked_at = time.monotonic()
                self._view = self._run.view(problem)
            return self._view

    async def act(self, command: str, arguments: Mapping[str, str]) -> str:
        """See `Source`."""
        return await operate(self._transport, command, arguments)

    async def close(self) -> None:
        """Close the connection."""
        await self._transport.close()


class RecordedSource:
    """A run in a state directory; of one under way, events are read as they are written.

    Args:
        root: The directory: `coordinator.state_dir`, or a copy of it.
    """

    def __init__(self, root: Path) -> None:
        """Read what does not change.

        Raises:
            ConfigError: If there is no run in the directory, or its files are damaged.
        """
        self._state = StateDir(root)
        settings = _settings(self._state.resolved)
        self._directory = root / "telemetry"
        if not self._directory.is_dir() and settings.get("telemetry.dir"):
            self._directory = Path(settings["telemetry.dir"])
        if not settings and not self._directory.is_dir():
            raise ConfigError(
                f"there is no run in {root}: it has neither {self._state.resolved.name} nor "
                f"telemetry/. Give the coordinator.state_dir of a run, or a copy of it"
            )
        fingerprint = ""
        if self._state.fingerprint.is_file():
            fingerprint = self._state.fingerprint.read_text(errors="replace").strip()
        endpoint = read_endpoint(self._state.coordinator)
        address = "" if endpoint is None else endpoint.address
        self._run = RecordedRun(str(root), settings, fingerprint, address)
        self._read: dict[Path, int] = {}
        self._to_read, self._has_read = 0, False
        self._reading: asyncio.Task[RunView] | None = None
        self._read_at = 0.0
        self._is_closed = False

    async def look(self) -> RunView:
        """Give the run, with what was written since the last look.

        One thread reads for all who look; who goes away meanwhile does not end it. While the first
        reading lasts, it is said how far it is.
        """
        last = self._reading
        if last is None or (last.done() and time.monotonic() - self._read_at >= LOOK_S):
            last = self._reading = asyncio.create_task(asyncio.to_thread(self._read_on))
        if self._has_read:
            return await asyncio.shield(last)
        await asyncio.wait({last}, timeout=_PATIENCE_S)
        if last.done():
            self._has_read = True
            return last.result()
        return self._run.reading(sum(list(self._read.values())), self._to_read, time.time())

    async def act(self, command: str, arguments: Mapping[str, str]) -> str:
        """Refuse: see `Source`."""
        raise ConfigError("this run is read from files: its coordinator is asked by its address")

    async def close(self) -> None:
        """Read no further: the end of the process waits for the thread that does."""
        self._is_closed = True

    def _read_on(self) -> RunView:
        """Read the new lines of all files, in the order of their time; blocks."""
        self._run.unreadable.clear()
        paths = sorted(self._directory.glob("events-*.jsonl"))
        self._to_read = sum(map(_size, paths))
        for _, event in heapq.merge(*map(self._new_events, paths), key=lambda each: each[0]):
            self._run.add(event)
        view = self._run.view(time.time(), is_under_way=self._is_under_way())
        self._read_at = time.monotonic()
        return view

    def _new_events(self, path: Path) -> Iterator[tuple[float, Mapping[str, Any]]]:
        """Yield the events of whole lines that were not read yet, each with its time."""
        while not self._is_closed and (lines := self._new_lines(path)):
            for line in lines:
                try:
                    event = json.loads(line)
                    at = float(event["unix_s"])
                except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                    self._run.num_malformed += line != b"\n"
                    continue
                yield at, event

    def _new_lines(self, path: Path) -> list[bytes]:
        """Read some whole lines; no file stays open, there may be more than a process may open."""
        start, name = self._read.get(path, 0), bounded_text(path.name)
        try:
            if not path.is_file():  # a pipe would never end
                self._run.unreadable[name] = "is not there, or no file"
                return []
            with path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < file.seek(start):
                    self._run.unreadable[name] = "is shorter than when it was read"
                read = file.read(_LINES_BYTES)
                if b"\n" not in read:
                    read += file.read(_NO_LINE_BYTES - len(read))
        except OSError as error:
            self._run.unreadable[name] = f"cannot be read: {error.strerror}"
            return []
        end = read.rfind(b"\n") + 1 or (len(read) if len(read) == _NO_LINE_BYTES else 0)
        self._read[path] = start + end
        return read[:end].splitlines(keepends=True)

    def _is_under_way(self) -> bool:
        try:
            return holder(self._state.coordinator_lock) is not None
        except OSError:  # an archive that may not be written
            return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # it is said when it is read
        return 0


def _settings(path: Path) -> dict[str, str]:
    """Read the run's configuration by dotted key; none where there is no file.

    Raises:
        ConfigError: If it is damaged.
    """
    try:
        return dict(_flat(tomllib.loads(path.read_text(encoding="utf-8"))))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}. Bring it back from a copy") from error


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)
