"""Who writes a run's state: one coordinator and its syncers, until another machine takes over.

    run/                     chain of the coordinator: its journal and files
    syncer/, syncer-N/       chains of the syncers: their stores
    alive/NUMBER             of the lease of that number: written again while its holder lives
    alive/syncer-NAME        the same of a syncer on a machine of its own (`placed_syncer`)

The lease is the entry that opened the chain of the run; its number is the lease's. Taking it fences
the one before, in one write, and no clock is compared: a machine that waits for it looks whether
the holder's object changes, by its own monotonic clock. A syncer's chain is opened for a lease, and
for none that is older than the last.

Source: PROTOCOL.md, "State in an object store".
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco import durable
from diloco.errors import ConfigError, Fenced
from diloco.loop_clock import loop_now
from diloco.objects.chain import Read
from diloco.objects.replica import Replica
from diloco.objects.store import ObjectLost, ObjectStore, StoreAway
from diloco.state_dir import MOVED, StateDir, holder, stop_syncers
from diloco.versions.record import contributions_in

logger = logging.getLogger(__name__)

#: A holder that says nothing for so long is taken for dead; it says something so often.
LEASE_S = 10.0
BEAT_S = 2.0
#: Seconds between two looks whether all that was written is there.
MEND_S = 10.0
_RUN = "run"
#: Files of the coordinator that are kept; the journal is kept by its transactions.
_OF_RUN = ("resolved.toml", "fingerprint", "policy.json", "secret", "timeline.json")
#: Of a syncer's store: a lock, where one process listened, and what only that process reads.
NOT_OF_STORE = frozenset({"lock", "address.json", "spool", "transfers"})


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds the lease of a run, and whether it has let go of it."""

    lease: int
    holder: str
    host: str
    beat: bytes | None

    @property
    def is_over(self) -> bool:
        """Whether it has ended in good order, and can be followed at once."""
        return self._said.get("is_over") is True

    @property
    def address(self) -> str:
        """Where it listens, as it said last; empty: it did not."""
        return str(self._said.get("address") or "")

    @property
    def name(self) -> str:
        """For people: where it is, and where it listens."""
        return f"{self.host}" + (f" at {self.address}" if self.address else "")

    @property
    def _said(self) -> dict[str, Any]:  # JSON values
        try:
            said = json.loads(self.beat or b"{}")
        except ValueError:
            return {}
        return said if isinstance(said, dict) else {}


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What the coordinator keeps in the chain of the run, without its journal.

    Args:
        lease: Of its lease.
        address: Where it listens, as it said last; empty: it did not.
        is_over: Whether it has ended in good order.
        contents: Of each file, by name.
    """

    lease: int
    address: str
    is_over: bool
    contents: Mapping[str, bytes]


class _Overtaken(Exception):
    """Another machine has taken the lease that was to be taken."""


class RunState:
    """The state of one run in an object store, as its coordinator has it."""

    def __init__(
        self,
        url: str,
        run: str,
        fingerprint: str,
        state: StateDir,
        on_fenced: Callable[[Fenced], None],
    ) -> None:
        """Assign only.

        Args:
            url: `run.state`.
            run: Name of the run.
            fingerprint: Of its identity class: the state is of no other run.
            state: The state directory, which the caller holds.
            on_fenced: Called, in any thread, when another machine has taken over.
        """
        self.store = ObjectStore(url)
        self._run = run
        self._fingerprint = fingerprint
        self._state = state
        self._on_fenced = on_fenced
        self._num_beats = 0
        self.lease = -1
        self.replica = Replica(
            self.store,
            _RUN,
            state.root,
            lambda path: path.as_posix() in _OF_RUN,
            on_fenced=on_fenced,
        )

    def holder(self) -> Holder | None:
        """Look who holds the lease; None: nobody ever had it.

        Raises:
            ConfigError: If it is the state of another run.
            StoreAway: If the store does not say.
        """
        opened = self.replica.read().opened
        if not opened:
            return None
        self._check_run(opened["run"], opened["fingerprint"])
        beat = self.store.get(_alive(opened["lease"]))
        return Holder(opened["lease"], opened["holder"], opened["host"], beat)

    def newest(self) -> Holder:
        """Look at the newest holder, whose name and host are not told: by its sign of life alone.

        Raises:
            StoreAway: If the store does not say.
        """
        names = [name.rpartition("/")[2] for name in self.store.names("alive")]
        lease = max((int(name) for name in names if name.isdecimal()), default=-1)
        beat = self.store.get(_alive(lease)) if lease >= 0 else None
        return Holder(lease, "", "", beat)

    def files(self) -> RunFiles | None:
        """Read what a syncer on another machine needs; None: no coordinator has begun the run.

        Raises:
            ConfigError: If it is the state of another run, or objects are lost.
            StoreAway: If the store does not answer.
        """
        if (found := self.holder()) is None:
            return None
        self.replica.look()
        contents = self.replica.contents(_OF_RUN)
        return RunFiles(found.lease, found.address, found.is_over, contents)

    def fetch(self, syncers: Sequence[StateDir]) -> int:
        """Make the state directory hold what the object store does, of a run that others may write.

        Args:
            syncers: What each of the run's syncers would see here.

        Returns:
            Bytes that were fetched; the journal follows when it is opened.

        Raises:
            ConfigError: If no coordinator has begun the run, it is another's, or objects are lost.
            StoreAway: If the store does not answer.
            DiskFull: If there is no room here.
        """
        found = self.holder()
        if found is None:
            raise ConfigError(f"{self.store.url} holds no run: nothing can be fetched from there")
        at_work = [pid for each in syncers if (pid := holder(each.store_lock)) is not None]
        if self._is_alone or at_work:
            what = f"is at work (process {at_work[0]})" if at_work else "holds a run of its own"
            raise ConfigError(
                f"coordinator.state_dir = {self._state.root} {what}, and nothing was fetched: give "
                f"another directory, --set coordinator.state_dir=DIRECTORY"
            )
        durable.write_json(lease_path(self._state), found.lease)
        num_bytes = self.replica.fetch_all(without=self._state.journal.name)
        for each in syncers:
            durable.make_directory_durably(each.store)
            there = Replica(self.store, each.syncer_name, each.store, is_of_store)
            num_bytes += there.fetch_all(only=lambda name: not is_moving(name))
        return num_bytes

    def _check_run(self, run: str, fingerprint: str) -> None:
        if run != self._run:
            raise ConfigError(
                f"run.state = {self.store.url} holds the run {run!r}, and this file is of "
                f"{self._run!r}: give each run a prefix of its own"
            )
        if fingerprint != self._fingerprint:
            raise ConfigError(
                f"run.state = {self.store.url} holds a run {run!r} of another model, seed, plan or "
                f"other islands than this file (fingerprint {fingerprint[:12]}, here "
                f"{self._fingerprint[:12]}: diloco config RUN.toml): undo the change, or give this "
                f"run a prefix of its own"
            )

    async def take(
        self, *, is_standby: bool, syncers: Sequence[str], announce: Callable[[str], None]
    ) -> None:
        """Take the lease once nobody has it, and make the state directory hold the run's state.

        A holder that is silent for `LEASE_S` seconds, by this machine's clock, is taken for dead.
        The same state directory takes its own lease back at once: its lock says that the process
        that had it has ended.

        Args:
            is_standby: Whether to wait for the end of a holder that is at work.
            syncers: Names of those that this machine starts.
            announce: Called with what is found, for people.

        Raises:
            ConfigError: If another machine holds it, and this is no standby; or of another run.
            StoreAway: If the store does not answer, and this is the first start, and no standby.
        """
        own = own_name(self._state)
        announce(f"run.state = {self.store.url}: looking who holds the run")
        if not (is_standby or lease_path(self._state).exists()):  # which wait for the store, too
            await asyncio.to_thread(self.holder)  # what cannot be used is said at once
        while True:
            try:
                before = await self._nobody(own, is_standby, announce)
                await asyncio.to_thread(self._open, before, own)
            except _Overtaken:
                continue  # another machine waited, too
            except StoreAway as error:
                logger.error("%s, the run is taken once it does: %s", error.lack, error)
                await asyncio.sleep(BEAT_S)
                continue
            break
        restore = functools.partial(self._restore, before, own, syncers)
        restoring = asyncio.create_task(_until_there_is_room(restore))
        while not restoring.done():  # hundreds of gigabytes, perhaps
            await asyncio.wait([restoring], timeout=BEAT_S)
            with contextlib.suppress(StoreAway):
                await asyncio.to_thread(self.beat, "")
        logger.info("taken from %s: %d bytes", self.store.url, restoring.result())

    async def _nobody(
        self, own: str, is_standby: bool, announce: Callable[[str], None]
    ) -> Holder | None:
        """Wait until nobody has the lease any more; returns the last that had it."""
        found = await asyncio.to_thread(self.holder)
        if found is not None and found.holder != own and self._is_alone:
            raise ConfigError(
                f"coordinator.state_dir = {self._state.root} holds a run that was begun without "
                f"run.state, and {self.store.url} holds one, too: give an empty directory to go on "
                f"with that one, or an empty prefix to have the directory's run there"
            )
        in_use = (
            f"run.state = {self.store.url}: the run {self._run!r} is held by {{}}, which is at "
            f"work. Watch it with diloco status, or wait for its end: diloco coordinator RUN.toml "
            f"--standby"
        )
        return await until_nobody(
            self.holder,
            own,
            f"the run {self._run!r}",
            in_use="" if is_standby else in_use,
            announce=announce,
        )

    def _open(self, before: Holder | None, own: str) -> None:
        def opening(number: int) -> Mapping[str, Any]:
            host = socket.gethostname()
            return {
                "lease": number,
                "run": self._run,
                "fingerprint": self._fingerprint,
                "holder": own,
                "host": host,
            }

        def check(found: Read) -> None:
            if found.opened.get("lease", -1) != (-1 if before is None else before.lease):
                raise _Overtaken

        self.replica.open(opening, check)
        self.lease = self.replica.number
        if not self._is_alone:
            durable.write_json(lease_path(self._state), self.lease)
        self.beat("")

    @property
    def _is_alone(self) -> bool:
        """Whether the state directory has a run that is in no object store, or not all of it."""
        return self._state.journal.exists() and not lease_path(self._state).exists()

    def _restore(self, before: Holder | None, own: str, syncers: Sequence[str]) -> int:
        """Make the state directory hold the run's state; returns the bytes that were fetched.

        Or put there what the directory has, of a run that was begun without an object store; the
        journal follows when it is opened.
        """
        if before is None or before.holder != own or self._is_alone:
            stop_syncers(self._state)  # of an earlier lease of this machine
        if self._is_alone:
            for each in self._state.of_syncers(syncers):
                store_replica(self.store, each, self.lease, self._run).adopt()
            self.replica.adopt()
            durable.write_json(lease_path(self._state), self.lease)
            return 0
        num_bytes = self.replica.restore(without=self._state.journal.name)
        for each in self._state.of_syncers(syncers):
            if holder(each.store_lock) is None:
                num_bytes += store_replica(self.store, each, self.lease, self._run).restore()
        return num_bytes

    def beat(self, address: str, *, is_over: bool = False) -> None:
        """Say that the holder lives, or that it has ended.

        Raises:
            StoreAway: If the store does not answer.
        """
        self._num_beats += 1
        said = {"beat": self._num_beats, "address": address, "is_over": is_over}
        self.store.put(_alive(self.lease), json.dumps(said).encode(), probes=True)


def is_of_store(path: Path) -> bool:
    """Whether a path in a syncer's store is of a file that is kept."""
    return path.parts[0] not in NOT_OF_STORE


def is_moving(name: str) -> bool:
    """Whether a file of a store is of a fragment that its syncer copies, and does not have yet."""
    return name.startswith(f"{MOVED}/")


def store_replica(
    store: ObjectStore,
    state: StateDir,
    lease: int,
    run: str,
    on_fenced: Callable[[Fenced], None] = lambda error: None,
    *,
    follows: Sequence[str | None] | None = None,
) -> Replica:
    """Open the chain of a syncer's store, for a lease; the writer before is fenced.

    Args:
        store: Where it is.
        state: As the syncer sees it.
        lease: For which it writes.
        run: Name of the run.
        on_fenced: As of `Replica`.
        follows: Holders whose place may be taken, besides the own; None: anybody's.

    Raises:
        Fenced: If it was opened for a later lease, or by a holder whose place may not be taken:
            another machine has taken over.
        StoreAway: If the store does not answer.
    """
    replica = Replica(
        store,
        state.syncer_name,
        state.store,
        is_of_store,
        on_fenced=on_fenced,
        sections=contributions_in,
    )

    def check(found: Read) -> None:
        if (later := found.opened.get("lease", -1)) > lease:
            raise Fenced(
                f"{store.url}: {found.opened.get('host')} has taken the run over (lease {later}, "
                f"this machine has {lease})"
            )
        there = found.opened.get("holder")
        if follows is not None and there not in (None, own_name(state), *follows):
            raise Fenced(f"{store.url}: {found.opened.get('host')} serves as {state.syncer_name}")

    who = {"lease": lease, "run": run, "holder": own_name(state), "host": socket.gethostname()}
    replica.open(lambda number: who, check)
    return replica


async def until_nobody(
    look: Callable[[], Holder | None],
    own: str,
    what: str,
    *,
    in_use: str,
    announce: Callable[[str], None],
) -> Holder | None:
    """Wait until nobody else holds something any more; returns the last that did, None: nobody.

    A holder whose sign of life does not change for `LEASE_S` seconds, by this machine's clock, is
    taken for dead.

    Args:
        look: Reads who holds it.
        own: Name of this machine as a holder.
        what: Is held, for people.
        in_use: Says what to do where it is held by {}, which lives; empty: its end is waited for.
        announce: Called with what is found, for people.

    Raises:
        ConfigError: `in_use`.
        StoreAway: If the store does not answer at first.
    """
    found = await asyncio.to_thread(look)
    silent_s, looked, said = 0.0, loop_now(), ""
    while found is not None and found.holder != own and not found.is_over:
        if said != found.name:
            said = found.name
            waits = f"looking for {LEASE_S:g} s" if in_use else "waiting for its end"
            announce(f"{what} is held by {found.name}: {waits}")
        if silent_s >= LEASE_S:
            announce(f"{found.name} has been silent for {LEASE_S:g} s: taking {what} over")
            break
        await asyncio.sleep(BEAT_S / 2)
        try:
            newer = await asyncio.to_thread(look)
        except (StoreAway, ObjectLost) as error:  # it may be alive, as far as is known here
            logger.warning("%s", error)
            silent_s = 0.0
            continue
        # By looks: time for which this machine was frozen itself does not count.
        silent_s += min((now := loop_now()) - looked, BEAT_S)
        looked = now
        if newer == found:
            continue
        found, silent_s = newer, 0.0
        if in_use and found is not None and not found.is_over:
            raise ConfigError(in_use.format(found.name))
    return found


@contextlib.asynccontextmanager
async def repeating(*signs: Callable[[], None], every_s: float = 0.0) -> AsyncIterator[None]:
    """Do each of some things in a thread, whatever the event loop does; 0: every `BEAT_S`."""
    is_over = threading.Event()

    def again(sign: Callable[[], None]) -> None:
        while not is_over.wait(every_s or BEAT_S):
            try:
                sign()
            except Exception:  # the next may do: without any this machine counts as dead
                logger.exception("no sign of life was given")

    threads = [threading.Thread(target=again, args=(sign,), daemon=True) for sign in signs]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            await asyncio.to_thread(thread.join)


async def _until_there_is_room(work: Callable[[], int]) -> int:
    """Do work in a thread, again while there is no room for it here, or the store is away."""
    while True:
        try:
            return await asyncio.to_thread(work)
        except durable.DiskFull as error:
            logger.error("the state is taken once it can be: %s, %s: %s",
                         error.lack, error.remedy, error)  # fmt: skip
            await asyncio.sleep(BEAT_S)


def lease_path(state: StateDir) -> Path:
    """File of the lease for which this machine's syncers write."""
    return state.root / "lease.json"


def follows_path(state: StateDir) -> Path:
    """File of the holders whose place this machine's syncer may take, where it has its own."""
    return state.root / "follows.json"


def own_name(state: StateDir) -> str:
    """Name of this state directory as a holder, which no other has, nor a copy of it."""
    path = state.root / "holder.json"
    try:
        name = durable.read_json(path)
    except ValueError as error:  # with another one it waits for its own silence
        logger.error("%s", error)
        name = None
    if not name:
        name = secrets.token_hex(8)
        durable.write_json(path, name)
    return f"{name}-{state.root.stat().st_ino:x}-{socket.gethostname()}"


def _alive(lease: int) -> str:
    return f"alive/{lease:016d}"
