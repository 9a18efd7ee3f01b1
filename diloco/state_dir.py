"""Layout of a run's state directory, and who holds what in it.

    coordinator.lock   held by the coordinator while it lives
    coordinator.json   address and pid of the newest coordinator; its port is bound again
    resolved.toml      the run's configuration, and `fingerprint`, that of its identity class
    policy.json        its policy class, as the coordinator's file has it
    local.toml         the same as `diloco local` gives it to every process
    secret             signs grants, mode 0600
    journal.sqlite     what the coordinator must never forget
    timeline.json      which timeline the coordinator serves, and the checkpoint it began from
    syncer.json        address and pid of the syncer, while one lives
    syncer.log         what all starts of the syncer said
    syncer/            the syncer's store: lock, address, epoch, incarnations, orders, plan,
                       fragments, pins, copies of fragments that move to it, the timeline that it
                       was last taken to, and the spool of what has arrived, which no later start
                       reads
    syncer-N.json, syncer-N.log, syncer-N/    the same of each of several syncers; its store also
                       says in `fragments.json` which fragments are its own
    sites/NAME/        of a syncer with a table of its own, [syncers.NAME]: all of the above that
                       it needs, with syncer-NAME/ for its store; on its machine, and where it was
                       fetched

A lock is a file that its holder keeps locked (`flock`) until it dies, however it dies; the pid in
it says who. The coordinator locks the store on behalf of the syncer that it starts and hands the
descriptor down, so that a syncer holds its store from its first instant.

Source: PROTOCOL.md, "Restart of a syncer" and "Durability".
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import time
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from diloco.durable import read_json, read_text, write_json
from diloco.errors import ConfigError
from diloco.transport.addresses import split_address

logger = logging.getLogger(__name__)

#: Name of the store of a run's only syncer.
ONLY_SYNCER = "syncer"
#: Directory of a store for what its syncer copies of fragments that move to it.
MOVED = "moved"

_LOOK_S = 0.05
_STOP_S = 10.0
_PID_BYTES = 20


@dataclass(frozen=True, slots=True)
class StateDir:
    """Paths below one run's `coordinator.state_dir`, as one of its syncers sees them.

    Args:
        root: The directory.
        syncer_name: Of the store of that syncer: "syncer" of the only one, "syncer-N" of several,
            "syncer-NAME" of those with a table of their own.
        syncer_id: Its number: its place in the order of their names.
    """

    root: Path
    syncer_name: str = ONLY_SYNCER
    syncer_id: int = 0

    def create(self, syncers: Iterable[str] = (ONLY_SYNCER,)) -> None:
        """Make the directory, open to its owner only, and these syncers' stores, where missing.

        Raises:
            ConfigError: If it cannot be made.
        """
        make_directory(self.root, "coordinator.state_dir")
        for state in self.of_syncers(syncers):
            make_directory(state.store, "coordinator.state_dir")

    def of_syncers(self, names: Iterable[str]) -> tuple[StateDir, ...]:
        """Give what each of the run's syncers sees, by their names in order."""
        return tuple(StateDir(self.root, name, number) for number, name in enumerate(names))

    def placed(self, name: str, number: int) -> StateDir:
        """Give what a syncer with a table of its own sees, by its name and number."""
        return StateDir(self.root / "sites" / name, f"{ONLY_SYNCER}-{name}", number)

    def of_run(self, own: Iterable[str], placed: Iterable[str]) -> tuple[StateDir, ...]:
        """Give what each syncer of a run sees here: those that the coordinator starts, or others.

        Args:
            own: Names of those that it starts, in order.
            placed: Sorted names of those with tables of their own.
        """
        others = (self.placed(name, number) for number, name in enumerate(placed))
        return (*self.of_syncers(own), *others)

    @property
    def own_syncers(self) -> tuple[StateDir, ...]:
        """Give what each syncer sees that the coordinator starts; see `syncers`."""
        return tuple(each for each in self.syncers if each.root == self.root)

    @property
    def syncers(self) -> tuple[StateDir, ...]:
        """What each syncer of the run sees, in order, whether its store is still here or not.

        Raises:
            ConfigError: If the file that says how many there are is damaged.
        """
        if not self.resolved.exists():
            return self.of_syncers([ONLY_SYNCER])
        try:
            resolved = tomllib.loads(read_text(self.resolved))
            number = int(resolved.get("coordinator", {}).get("num_syncers", 1))
            numbered = map(_numbered, range(number)) if number > 1 else [ONLY_SYNCER]
            placed = sorted(resolved.get("syncers", {}))
            return self.of_run(() if placed else numbered, placed)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"cannot read {self.resolved}: {error}. Bring it back from a copy, or start the "
                f"coordinator with the run's own file, which makes it again: diloco coordinator "
                f"RUN.toml"
            ) from error

    @property
    def coordinator_lock(self) -> Path:
        """Held by the coordinator while it lives."""
        return self.root / "coordinator.lock"

    @property
    def coordinator(self) -> Path:
        """Endpoint of the newest coordinator."""
        return self.root / "coordinator.json"

    @property
    def resolved(self) -> Path:
        """The run's configuration, every value of it."""
        return self.root / "resolved.toml"

    @property
    def local(self) -> Path:
        """The same, as `diloco local` gives it to every process; there before the journal is."""
        return self.root / "local.toml"

    @property
    def fingerprint(self) -> Path:
        """Fingerprint of the identity class, hex."""
        return self.root / "fingerprint"

    @property
    def policy(self) -> Path:
        """Policy that the coordinator's file has, JSON; operators may have set other values."""
        return self.root / "policy.json"

    @property
    def secret(self) -> Path:
        """The run secret."""
        return self.root / "secret"

    @property
    def journal(self) -> Path:
        """The coordinator's journal."""
        return self.root / "journal.sqlite"

    @property
    def timeline(self) -> Path:
        """Timeline of the run, as its coordinator has it."""
        return self.root / "timeline.json"

    @property
    def syncer(self) -> Path:
        """Endpoint of the syncer, while one lives."""
        return self.root / f"{self.syncer_name}.json"

    @property
    def syncer_log(self) -> Path:
        """Output of all starts of the syncer, appended."""
        return self.root / f"{self.syncer_name}.log"

    @property
    def store(self) -> Path:
        """The syncer's store."""
        return self.root / self.syncer_name

    @property
    def store_lock(self) -> Path:
        """Held by the syncer while it lives."""
        return self.store / "lock"

    @property
    def bound(self) -> Path:
        """Address that the syncer bound; its port is bound again."""
        return self.store / "address.json"

    @property
    def syncer_epoch(self) -> Path:
        """Epoch of the newest syncer."""
        return self.store / "epoch.json"

    @property
    def incarnations(self) -> Path:
        """Highest incarnation of each island that the syncer has accepted."""
        return self.store / "incarnations.json"

    @property
    def orders(self) -> Path:
        """What the coordinator ordered last: who takes part, by which policy."""
        return self.store / "orders.json"

    @property
    def store_timeline(self) -> Path:
        """Timeline that the store was last taken to."""
        return self.store / "timeline.json"

    @property
    def plan(self) -> Path:
        """The run's plan, once the syncer has learned it."""
        return self.store / "plan.json"

    @property
    def moved(self) -> Path:
        """Copies of fragments that move to the syncer: it does not serve them yet."""
        return self.store / MOVED

    @property
    def withdrawn(self) -> Path:
        """Moves to the syncer that it does not make any more: numbers, by fragment."""
        return self.store / "withdrawn.json"

    @property
    def fragments(self) -> Path:
        """Fragments of the plan that are this syncer's, where it is one of several."""
        return self.store / "fragments.json"


def _numbered(syncer_id: int) -> str:
    return f"{ONLY_SYNCER}-{syncer_id}"


def make_directory(path: Path, key: str) -> None:
    """Make a directory that a key of the configuration names, open to its owner only.

    Raises:
        ConfigError: If it cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot make the directory {path}: {error.strerror}; choose another one"
        ) from error


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a process listens; the address is empty before it does."""

    address: str
    pid: int

    def write(self, path: Path) -> None:
        """Record it durably."""
        write_json(path, {"address": self.address, "pid": self.pid})


def read_endpoint(path: Path) -> Endpoint | None:
    """Return what was recorded; None if nothing was.

    Raises:
        ConfigError: If the file is damaged.
    """
    try:
        value = read_json(path)
        return None if value is None else Endpoint(str(value["address"]), int(value["pid"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}, which says where a process listens, is damaged: {error!s:.200}. Bring it "
            f"back from a copy; or remove it (rm {path}) and start that process again: it is "
            f"written at each start. Where its port is drawn (0 in the run file) it is another one "
            f"then, and those who know the last one have to be started again"
        ) from error


def read_bound(path: Path) -> str:
    """Return the address that a syncer bound before; empty: none that can be read.

    Where it is empty a free port will do, which islands hear from the coordinator.
    """
    try:
        bound = read_json(path) or ""
        if not isinstance(bound, str):
            raise ValueError(f"{path} is damaged, it does not hold an address: {bound!r:.100}")
        if bound and not bound.startswith("/"):  # as a peer's of libp2p does
            split_address(bound)
        return bound
    except ValueError as error:
        logger.error("a free port is bound in place of the last one: %s", error)
        return ""


def directory_in_place(error: IsADirectoryError) -> ConfigError:
    """Say of a directory that is where a file belongs what to do about it."""
    path = error.filename2 or error.filename
    return ConfigError(
        f"{path} is a directory, and a file belongs there. Move it away (mv {path} "
        f"{path}.aside), bring the file back if there is a copy, and start again: what can be made "
        f"without it is made again, and else the next message says what is missing"
    )


@dataclass(frozen=True, slots=True)
class Timeline:
    """How often the run was resumed, and at which inner step's checkpoint it last began."""

    number: int = 0
    resume_step: int = 0

    def write(self, path: Path) -> None:
        """Record it durably."""
        write_json(path, {"timeline": self.number, "resume_step": self.resume_step})


def read_timeline(path: Path) -> Timeline:
    """Return what was recorded; the first timeline if nothing was.

    Raises:
        ConfigError: If the file is damaged.
    """
    try:
        if (value := read_json(path)) is None:
            return Timeline()
        number, resume_step = value["timeline"], value["resume_step"]
        if not (type(number) is type(resume_step) is int and 0 <= number < 2**31):
            raise ValueError(f"timeline {number!r:.50}, resumed at {resume_step!r:.50}")
        return Timeline(number, resume_step)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}, which says how often the run was resumed, is damaged: {error!r}. Remove it "
            f"(rm {path}) and start again: journal and records say it, too"
        ) from error


class Held(Exception):
    """A lock is held by another living process."""


def acquire(path: Path) -> int:
    """Take a lock for anyone who keeps the returned descriptor open; `write_pid` says who that is.

    Args:
        path: Lock file, made if missing; its directory must be there.

    Raises:
        Held: If another process holds it; names its pid.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if not _is_locked(descriptor, fcntl.LOCK_EX):
        pid = _read_pid(descriptor)
        os.close(descriptor)
        raise Held(f"{path} is held by process {pid}")
    os.ftruncate(descriptor, 0)
    return descriptor


def write_pid(descriptor: int, pid: int) -> None:
    """Say in a lock file who holds it."""
    os.pwrite(descriptor, f"{pid:<{_PID_BYTES}}".encode(), 0)


@contextlib.contextmanager
def hold(path: Path, *, inherited: int | None = None) -> Iterator[None]:
    """Hold a lock while the context lasts.

    Args:
        path: Lock file, made if missing; its directory must be there.
        inherited: Descriptor of `path` that was locked for this process before it started.

    Raises:
        Held: If another process holds it; names its pid.
    """
    descriptor = acquire(path) if inherited is None else inherited
    try:
        write_pid(descriptor, os.getpid())
        yield
    finally:
        os.close(descriptor)


def holder(path: Path) -> int | None:
    """Pid of the living process that holds a lock, None when it is free.

    Blocks while the lock is taken and its holder has not yet said who it is: an instant.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        while not _is_locked(descriptor, fcntl.LOCK_SH):
            if (pid := _read_pid(descriptor)) is not None:
                return pid
            time.sleep(_LOOK_S)
        return None
    finally:
        os.close(descriptor)


def stop_syncers(state: StateDir) -> None:
    """Stop whatever serves a store of a run, one after the other; blocks."""
    for lock in sorted(state.root.glob(f"{ONLY_SYNCER}*/lock")):
        stop_syncer(StateDir(state.root, lock.parent.name))


def stop_syncer(state: StateDir) -> None:
    """Stop the syncer that lives in `state`, if one does: ask, wait, insist; blocks."""
    signals = [signal.SIGTERM, signal.SIGKILL]
    while signals and (pid := holder(state.store_lock)) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signals.pop(0))
        until = time.monotonic() + _STOP_S
        while holder(state.store_lock) == pid and time.monotonic() < until:
            time.sleep(_LOOK_S)


def _is_locked(descriptor: int, kind: int) -> bool:
    """Try to lock; true when this process has the lock now."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_pid(descriptor: int) -> int | None:
    """Pid that the holder wrote; None before its first word."""
    text = os.pread(descriptor, _PID_BYTES, 0).strip()
    return int(text) if text else None
