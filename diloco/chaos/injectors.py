"""Injectors of each kind of fault, and how they know that it took effect.

An injector is asked to `begin` again and again until its target is there, and to `end` until it
is over; both say whether they are done. It has `fired` when what it did is known to have met its
target: the process is dead or stopped, a call was met, a publication was kept back.
"""

from __future__ import annotations

import contextlib
import datetime
import resource
import signal
import time
from collections import Counter
from pathlib import Path

from diloco.chaos.environment import ChaosEnvironment, is_frozen, send
from diloco.chaos.injector import Injector
from diloco.chaos.plan import COORDINATOR, CORRUPTING, Kind, TimedFault
from diloco.chaos.store_damage import Flip, TornNewest, Truncate
from diloco.chaos.storm import Storm
from diloco.durable import read_json, write_json
from diloco.faults.process import (
    FLIPPED,
    SLOWED,
    clock_path,
    fired,
    is_read,
    links_path,
    training_name,
    training_path,
)
from diloco.security.run_ca import RunCa
from diloco.transport.shaping.faulty import Fault, Gate

#: Seconds after which processes have read, or told, what they do once a second.
_TOLD_S = 2.2
_STOPPED_S = 1.0
_LOOK_S = 0.002
_CERTIFICATE_DAYS = 30


class Kill(Injector):
    """SIGKILL; coordinator and island are started again at the end, others by their supervisor."""

    number = signal.SIGKILL

    def begin(self) -> bool:
        """Send the signal."""
        environment, target = self.environment, self.fault.target
        pid = environment.pid(target)
        if pid is None:
            return False
        self.note = f"process {pid}"
        if target in environment.run.islands:
            environment.away.add(target)
            environment.run.take_down(target, self.number)
            self.fired = True
        elif target == COORDINATOR and self.fault.lasts_s:
            environment.run.take_down(target, self.number)
            self.fired = True
        else:
            self.fired = send(pid, self.number)
        return self.fired

    def end(self) -> bool:
        """Bring back what nobody else does."""
        environment, target = self.environment, self.fault.target
        is_ours = target in environment.away or (target == COORDINATOR and self.fault.lasts_s > 0)
        if is_ours and not environment.run.bring_back(target):
            return False
        environment.away.discard(target)
        return True


class Restart(Kill):
    """SIGTERM: an end in order, then another start."""

    number = signal.SIGTERM


class Freeze(Injector):
    """SIGSTOP to all processes of the target, SIGCONT at the end."""

    def begin(self) -> bool:
        """Stop them."""
        self._pids = self.environment.pids(self.fault.target)
        for pid in self._pids:
            send(pid, signal.SIGSTOP)
        until = time.monotonic() + _STOPPED_S
        while not (stopped := all(map(is_frozen, self._pids))) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        self.fired = bool(self._pids) and stopped
        self.note = f"{len(self._pids)} processes"
        return bool(self._pids)

    def end(self) -> bool:
        """Let them go on; those that were killed meanwhile are gone."""
        for pid in self._pids:
            send(pid, signal.SIGCONT)
        return True


class DiskFullInjector(Injector):
    """The syncer may write no byte to any file: every write ends with EFBIG, as on a full disk."""

    def begin(self) -> bool:
        """Set the limit."""
        self._pid = self.environment.serving_pid(self.fault.target)
        if self._pid is None or not _limit_files(self._pid, is_full=True):
            return False
        self._newest = self._written()
        return True

    def end(self) -> bool:
        """Lift it; it took effect if no record was written, or the syncer ended of it."""
        assert self._pid is not None
        newest, is_same = self._written(), self.environment.pid(self.fault.target) == self._pid
        # One of a fragment was perhaps renamed just when the limit came.
        num_written = [newest[p] - before for p, before in self._newest.items() if p in newest]
        self.fired = not is_same or max(num_written, default=0) <= 1
        self.note = "the syncer went on" if is_same else "the syncer ended and was started again"
        if is_same:
            _limit_files(self._pid, is_full=False)
        return True

    def _written(self) -> dict[int, int]:
        """Newest version of each of its fragments."""
        return {p: v[-1] for p, v in self.environment.versions(self.fault.target).items() if v}


class ConnectStorm(Injector):
    """Strangers connect by the thousand, and the server's certificate changes under them."""

    def begin(self) -> bool:
        """Let them come, once it serves."""
        target, config = self.fault.target, self.environment.run.config
        self._endpoint = endpoint = self.environment.endpoint(target)
        if endpoint is None:
            return False
        certs = Path(config.transport.certs) if config.transport.certs else None
        island = sorted(config.islands)[self.fault.seed % len(config.islands)]
        certificate = certs / f"island-{island}.pem" if certs else None
        self._storm = Storm(endpoint.address, certificate=certificate)
        self._storm.begin()
        if certs is not None:
            ca = RunCa(certs, lambda: datetime.datetime.now(datetime.UTC))
            ca.issue("coordinator", _CERTIFICATE_DAYS, again=True)
        return True

    def end(self) -> bool:
        """Send them away; it took effect if some of them were let in."""
        self._storm.end()
        self.fired = self._storm.num_connected > 0
        assert self._endpoint is not None
        self.is_same = self.environment.serving_pid(self.fault.target) == self._endpoint.pid
        self.note = (
            f"{self._storm.num_connected} connections, {self._storm.num_handshakes} whole "
            f"handshakes, {'the same process serves' if self.is_same else 'the process ended'}"
        )
        return True


def _limit_files(pid: int, *, is_full: bool) -> bool:
    """Let a process write no byte, or as many as it may; false if it has just ended."""
    with contextlib.suppress(ProcessLookupError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0 if is_full else hard, hard))
        return True
    return False


class EntryInjector(Injector):
    """A fault that a process has from within, by its entry of a file that it reads once a second.

    Args:
        environment: The run.
        fault: The fault.
        place: The file, and the name of the entry.
        value: The entry.
        counted: What the process counts when it meets the fault.
        noted: What it counts as well, for the note; empty: nothing.
    """

    def __init__(
        self,
        environment: ChaosEnvironment,
        fault: TimedFault,
        place: tuple[Path, str],
        value: object,
        counted: str,
        noted: str = "",
    ) -> None:
        """Do nothing yet."""
        super().__init__(environment, fault)
        self.place = place
        self._path, self._who = place
        self._value, self._counted, self._noted = value, counted, noted

    def begin(self) -> bool:
        """Write the file, once somebody reads it."""
        target, chaos_dir = self.fault.target, self.environment.chaos_dir
        if self.environment.pid(target) is None or not is_read(chaos_dir, self._who):
            return False
        self._before = fired(self.environment.chaos_dir, self._who)
        self._told_s = 0.0
        write_json(self._path, {**(read_json(self._path) or {}), self._who: self._value})
        return True

    @property
    def is_awaiting(self) -> bool:
        """Whether its target has been starting again, or silent, and is to come back."""
        met = self._met[self._counted]
        return not (self._told_s or met or self.environment.is_gone(self.fault.target))

    @property
    def _met(self) -> Counter[str]:
        """How often it was met, as its target has told so far."""
        return fired(self.environment.chaos_dir, self._who) - self._before

    def end(self) -> bool:
        """Take it back, and wait until it is known what it did."""
        if not self._told_s:
            self._told_s = time.monotonic() + _TOLD_S
            values = read_json(self._path) or {}
            values.pop(self._who, None)
            write_json(self._path, values)
        if time.monotonic() < self._told_s:
            return False
        met = self._met
        self.fired, self.note = met[self._counted] > 0, f"{met[self._counted]} times"
        self.had_chance = self.fired or not self.environment.is_gone(self.fault.target)
        if self._noted:
            self.note += f", {met[self._noted]} {self._noted}"
        return True


#: On a thin line a bit flips about every so many bytes of one way.
_DAMAGE_EVERY_BYTES = 128 << 10
_WITH_DIGESTS = ["fragment.fetch", "fragment.submit"]
_GATES = {
    Kind.CUT: Gate.CUT,
    Kind.CUT_REQUESTS: Gate.NO_REQUESTS,
    Kind.CUT_REPLIES: Gate.NO_REPLIES,
}
_RATES = {
    Kind.DELAY: Fault.DELAY,
    Kind.THROTTLE: Fault.SLOW_READER,
    Kind.CORRUPT: Fault.CORRUPT,
    Kind.DUPLICATE: Fault.DUPLICATE,
    Kind.REORDER: Fault.REORDER,
}
_INJECTORS: dict[Kind, type[Injector]] = {
    Kind.KILL: Kill,
    Kind.RESTART: Restart,
    Kind.FREEZE: Freeze,
    Kind.TRUNCATE: Truncate,
    Kind.FLIP: Flip,
    Kind.TORN_NEWEST: TornNewest,
    Kind.DISK_FULL: DiskFullInjector,
    Kind.CONNECT_STORM: ConnectStorm,
}


def injector_of(environment: ChaosEnvironment, fault: TimedFault) -> Injector:
    """Prepare to do a fault."""
    if (injector := _INJECTORS.get(fault.kind)) is not None:
        return injector(environment, fault)
    directory, target, kind = environment.chaos_dir, fault.target, fault.kind
    value: object = fault.clock_s
    if kind is Kind.CLOCK:
        return EntryInjector(environment, fault, (clock_path(directory), target), value, "clock")
    if kind in CORRUPTING:
        value = {"how": fault.how, "seed": fault.seed}
        if kind is Kind.FLIP_BIT:
            value = {
                "number": fault.number, "what": fault.what, "bit": fault.bit, "seed": fault.seed
            }  # fmt: skip
        place = training_path(directory), training_name(target)
        return EntryInjector(environment, fault, place, value, kind.value)
    place = links_path(directory), target
    if kind in _GATES:
        return EntryInjector(environment, fault, place, {"gate": _GATES[kind]}, "held")
    if kind is Kind.THIN_LINE:
        rate_bps = fault.bandwidth_bps / environment.run.config.islands[target].ranks
        value = {"rate_bps": rate_bps, "damage_every_bytes": _DAMAGE_EVERY_BYTES}
        return EntryInjector(environment, fault, place, value, SLOWED, FLIPPED)
    is_partial = kind in (Kind.CORRUPT, Kind.DUPLICATE, Kind.REORDER)
    value = {
        "rates": {_RATES[kind]: fault.share if is_partial else 1.0},
        "seed": fault.seed,
        # What has a digest: initial parameters are taken once, before anything happens here.
        "methods": _WITH_DIGESTS if kind is Kind.CORRUPT else [],
        "delay_s": fault.delay_s,
        "slow_bps": fault.bandwidth_bps,
    }
    return EntryInjector(environment, fault, place, value, _RATES[kind].value)
