"""Copies a run's state while it is under way, laid out as the state directory is.

    journal.sqlite, resolved.toml, fingerprint, timeline.json    of the coordinator
    syncer/    plan, incarnations, epoch, timeline, the records of every fragment, the pins; of
               several syncers syncer-N/, each with its own fragments

The journal comes first and as one: what the records say beyond it is indexed when a run is started
from the copy. The syncers go on and let records go, so the files of all are linked first, which
takes an instant, and copied from there, as they are: zstandard leaves 0.91 to 0.92 of a record
(float32; levels 1 and 3, 0.8 and 0.5 GB/s a core). Imports no torch, and does not hold up the loop
of the coordinator.

Source: PROTOCOL.md, "Durability".
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from diloco.checkpoint.stores import check_stores
from diloco.durable import sync_directory
from diloco.errors import ConfigError
from diloco.state_dir import StateDir
from diloco.transport.units import format_bytes

#: Of the syncer's store: a lock, where one process listened, and what only that process reads.
_NOT_COPIED = frozenset({"lock", "address.json", "spool"})
#: Times that the files are linked again because one was removed meanwhile.
_ATTEMPTS = 20
_COMPLETE = "SELECT value FROM entries WHERE key = 'checkpoint'"


class Backups:
    """Copies of one run's state, one after the other."""

    def __init__(self, state: StateDir) -> None:
        """Assign only."""
        self._state = state
        self._lock = asyncio.Lock()

    async def make(self, arguments: Mapping[str, str]) -> str:
        """Copy the state of the run; returns in words what there is, and what there is not.

        Args:
            arguments: `directory`, absolute, on this machine and not there yet; `with_secret`, if
                it is not empty, for the run secret too.

        Raises:
            ConfigError: If the directory cannot be made or filled.
        """
        directory = Path(arguments.get("directory", ""))
        if not self._state.own_syncers:
            raise ConfigError(
                "backup: the syncers of this run are on machines of their own, and the whole run "
                "is in run.state: copy that prefix with the object store's own tools, or have its "
                "bucket keep versions; diloco fetch RUN.toml brings it into a directory"
            )
        if not directory.is_absolute():
            raise ConfigError(
                f"backup to {str(directory)!r}: give an absolute path; it is on the coordinator's "
                f"machine"
            )
        with_secret = bool(arguments.get("with_secret"))
        async with self._lock:
            try:
                num_bytes = await asyncio.to_thread(_copy_run, self._state, directory, with_secret)
            except FileExistsError as error:
                raise ConfigError(
                    f"backup to {directory} on the coordinator's machine: it is there already, and "
                    f"left as it is. Give a directory that is not there yet"
                ) from error
            except (OSError, sqlite3.Error) as error:
                raise ConfigError(
                    f"backup to {directory} on the coordinator's machine: {error}. Give a "
                    f"directory that is not there yet, on a disk with room; remove what was begun"
                ) from error
        return _told(directory, num_bytes, with_secret)


def _told(directory: Path, num_bytes: int, with_secret: bool) -> str:
    secret = (
        "the run secret is in it: who has that can speak for any island"
        if with_secret
        else "the run secret is not in it (--with-secret): islands that are at work have to be "
        "started again then"
    )
    return (
        f"{format_bytes(num_bytes)} in {directory} on the coordinator's machine: the journal, the "
        f"resolved configuration, the plan, the syncer's records and pins. Not in it: the islands' "
        f"checkpoints (checkpoint.dir at every site), contributions under way, certificates and "
        f"tokens, logs and telemetry; {secret}. To go on from it: stop what is left of the run, "
        f"then diloco coordinator RUN.toml --set coordinator.state_dir={directory}"
    )


def _copy_run(state: StateDir, directory: Path, with_secret: bool) -> int:
    check_stores(state)
    directory.mkdir(mode=0o700, parents=True)  # never over another one
    copy = StateDir(directory)
    links = state.root / "backup"
    try:
        _take(state, copy, links)
        for each in state.own_syncers:
            shutil.copytree(links / each.syncer_name, StateDir(directory, each.syncer_name).store)
    finally:
        shutil.rmtree(links, ignore_errors=True)
    for source in (state.resolved, state.fingerprint, state.timeline):
        shutil.copy2(source, directory)
    if with_secret:
        shutil.copy2(state.secret, directory)
    files = [path for path in directory.rglob("*") if path.is_file()]
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    for below in {directory, *(path.parent for path in files)}:
        sync_directory(below)
    return sum(path.stat().st_size for path in files)


def _take(state: StateDir, copy: StateDir, links: Path) -> None:
    """Copy the journal and link all stores as of one instant: again, where a checkpoint completed.

    The older one that it replaces may have been let go of by some stores and not by others.
    """
    with contextlib.closing(sqlite3.connect(state.journal)) as journal:
        for _ in range(_ATTEMPTS):
            shutil.rmtree(links, ignore_errors=True)  # of a process that was killed, too
            copy.journal.unlink(missing_ok=True)
            complete = journal.execute(_COMPLETE).fetchall()
            journal.execute("VACUUM INTO ?", (str(copy.journal),))
            for each in state.own_syncers:
                _link(each.store, links / each.syncer_name)
            if journal.execute(_COMPLETE).fetchall() == complete:
                return
    raise OSError("one checkpoint after the other completed meanwhile: try again")


def _link(source: Path, target: Path) -> None:
    """Link every file of a store at one instant: again, while one is let go of meanwhile."""
    for attempt in range(_ATTEMPTS):
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(mode=0o700, parents=True)
        try:
            for path in sorted(source.rglob("*")):
                name = path.relative_to(source)
                if name.parts[0] in _NOT_COPIED or path.suffix == ".tmp":
                    continue
                if path.is_dir():
                    (target / name).mkdir(mode=0o700)
                else:
                    (target / name).hardlink_to(path)
        except FileNotFoundError:
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            return
