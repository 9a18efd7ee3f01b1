"""What does each kind of fault, and how it is known that it took effect.

A fault has `fired` when what was done is known to have met its target: the process is dead or
stopped, a call was met, a publication was kept back.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import resource
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from diloco.chaos.bucket import WRITTEN_AGAIN
from diloco.chaos.environment import ChaosEnvironment, is_frozen, send
from diloco.chaos.injector import Doing, Injector
from diloco.chaos.plan import BUCKET, COORDINATOR, CORRUPTING, Kind, TimedFault
from diloco.chaos.store_damage import DAMAGES
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
from diloco.protocol.run.alarms import AlarmKind
from diloco.security.run_ca import RunCa
from diloco.transport.shaping.faulty import Fault, Gate

#: Seconds after which processes have read, or told, what they do once a second.
_TOLD_S = 2.2
#: Seconds after which a syncer's alarm is in the status.
_REPORTED_S = 5.0
_STOPPED_S = 1.0
_LOOK_S = 0.002
_CERTIFICATE_DAYS = 30


def _kill(injector: Injector, number: int) -> Iterator[None]:
    """End the target; coordinator and island are started again, others by their supervisor."""
    environment, target = injector.environment, injector.fault.target
    pid, run = environment.pid(target), environment.run
    if pid is None:
        return
    injector.note = f"process {pid}"
    is_ours = target in run.islands or (target == COORDINATOR and injector.fault.lasts_s > 0)
    if target in run.islands:
        environment.away.add(target)
    if is_ours:
        run.take_down(target, number)
    elif not send(pid, number):
        return
    injector.fired = True
    yield
    while is_ours and not run.bring_back(target):
        yield
    environment.away.discard(target)


def _freeze(injector: Injector) -> Iterator[None]:
    """SIGSTOP to all processes of the target, SIGCONT at the end."""
    pids = injector.environment.pids(injector.fault.target)
    if not pids:
        return
    for pid in pids:
        send(pid, signal.SIGSTOP)
    until = time.monotonic() + _STOPPED_S
    while not (stopped := all(map(is_frozen, pids))) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    injector.fired, injector.note = stopped, f"{len(pids)} processes"
    yield
    for pid in pids:  # those that were killed meanwhile are gone
        send(pid, signal.SIGCONT)


def _fill_disk(injector: Injector) -> Iterator[None]:
    """Let the syncer write no byte to any file: every write ends with EFBIG, as on a full disk.

    It took effect if no record was written, or the syncer ended of it.
    """
    environment, target = injector.environment, injector.fault.target
    pid = environment.serving_pid(target)
    if pid is None or not _limit_files(pid, is_full=True):
        return
    before = {p: v[-1] for p, v in environment.versions(target).items() if v}
    yield
    newest = {p: v[-1] for p, v in environment.versions(target).items() if v}
    is_same = environment.pid(target) == pid
    # One of a fragment was perhaps renamed just when the limit came.
    num_written = [newest[p] - version for p, version in before.items() if p in newest]
    injector.fired = not is_same or max(num_written, default=0) <= 1
    injector.note = "the syncer went on" if is_same else "the syncer ended and was started again"
    if is_same:
        _limit_files(pid, is_full=False)


def _limit_files(pid: int, *, is_full: bool) -> bool:
    """Let a process write no byte, or as many as it may; false if it has just ended."""
    with contextlib.suppress(ProcessLookupError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0 if is_full else hard, hard))
        return True
    return False


def _storm(injector: Injector) -> Iterator[None]:
    """Have strangers connect by the thousand, while the server's certificate changes.

    It took effect if some of them were let in.
    """
    environment, target = injector.environment, injector.fault.target
    config, endpoint = environment.run.config, environment.endpoint(target)
    if endpoint is None:
        return
    certs = Path(config.transport.certs) if config.transport.certs else None
    island = sorted(config.islands)[injector.fault.seed % len(config.islands)]
    storm = Storm(endpoint.address, certificate=certs / f"island-{island}.pem" if certs else None)
    storm.begin()
    if certs is not None:
        ca = RunCa(certs, lambda: datetime.datetime.now(datetime.UTC))
        ca.issue("coordinator", _CERTIFICATE_DAYS, again=True)
    yield
    storm.end()
    injector.fired = storm.num_connected > 0
    injector.is_same = environment.serving_pid(target) == endpoint.pid
    injector.note = (
        f"{storm.num_connected} connections, {storm.num_handshakes} whole handshakes, "
        f"{'the same process serves' if injector.is_same else 'the process ended'}"
    )


def _break_bucket(injector: Injector) -> Iterator[None]:
    """Have the object store's proxy do it; it took effect if a request was met.

    An object that was removed is awaited: until it was written again, or is not needed any more.
    """
    environment, fault, bucket = injector.environment, injector.fault, injector.environment.bucket
    if bucket is None or not bucket.begin(fault):
        return
    injector.note, is_lost = bucket.lost, fault.kind is Kind.LOSE_OBJECT
    injector.is_unmet = lambda: not bucket.num_met
    yield
    alarm = ""
    if fault.takes_nothing or (is_lost and bucket.lost_is == WRITTEN_AGAIN):
        until = time.monotonic() + _REPORTED_S
        while (has := environment.has_alarm(AlarmKind.STATE_AWAY)) is False:
            if time.monotonic() > until:
                break
            yield
        injector.is_told = has is not False  # a coordinator that was killed tells nothing
        alarm = {None: ", no status", True: ", an alarm", False: ", no alarm"}[has]
    bucket.end()
    injector.fired = bucket.num_met > 0
    met = f"{bucket.lost}: {bucket.lost_is}" if is_lost else f"{bucket.num_met} requests"
    injector.note = met + alarm


def _write_entry(
    injector: Injector, place: tuple[Path, str], value: object, counted: str, noted: str = ""
) -> Iterator[None]:
    """Do a fault from within a process, by its entry of a file that it reads once a second.

    Args:
        injector: Of the fault.
        place: The file, and the name of the entry.
        value: The entry.
        counted: What the process counts when it meets the fault.
        noted: What it counts as well, for the note; empty: nothing.
    """
    (path, who), environment = place, injector.environment
    target, directory = injector.fault.target, environment.chaos_dir
    if environment.pid(target) is None or not is_read(directory, who):
        return
    before = fired(directory, who)

    def met() -> Counter[str]:
        return fired(directory, who) - before

    # Its target has been starting again, or silent, and is to come back.
    injector.is_unmet = lambda: not (met()[counted] or environment.is_gone(target))
    write_json(path, {**(read_json(path) or {}), who: value})
    yield
    injector.is_unmet = lambda: False
    write_json(path, {n: each for n, each in (read_json(path) or {}).items() if n != who})
    until = time.monotonic() + _TOLD_S
    while time.monotonic() < until:  # until it is known what it did
        yield
    told = met()
    injector.fired, injector.note = told[counted] > 0, f"{told[counted]} times"
    injector.had_chance = injector.fired or not environment.is_gone(target)
    if noted:
        injector.note += f", {told[noted]} {noted}"


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
_DOINGS: dict[Kind, Doing] = {
    Kind.KILL: functools.partial(_kill, number=signal.SIGKILL),
    Kind.RESTART: functools.partial(_kill, number=signal.SIGTERM),
    Kind.FREEZE: _freeze,
    Kind.DISK_FULL: _fill_disk,
    Kind.CONNECT_STORM: _storm,
    **DAMAGES,
}


def injector_of(environment: ChaosEnvironment, fault: TimedFault) -> Injector:
    """Prepare to do a fault."""
    if fault.role == BUCKET:
        place = environment.chaos_dir, BUCKET
        return Injector(environment, fault, _break_bucket, place)
    if (doing := _DOINGS.get(fault.kind)) is not None:
        return Injector(environment, fault, doing)
    place, value, counted, noted = _entry_of(environment, fault)
    doing = functools.partial(_write_entry, place=place, value=value, counted=counted, noted=noted)
    return Injector(environment, fault, doing, place)


def _entry_of(
    environment: ChaosEnvironment, fault: TimedFault
) -> tuple[tuple[Path, str], object, str, str]:
    """Give the arguments of `_write_entry`: place, value, what is counted and what is noted."""
    directory, target, kind = environment.chaos_dir, fault.target, fault.kind
    strength = fault.strength
    if kind is Kind.CLOCK:
        return (clock_path(directory), target), strength.clock.seconds, "clock", ""
    if kind in CORRUPTING:
        value: object = {"how": strength.how, "seed": fault.seed}
        if kind is Kind.FLIP_BIT:
            own = {"what": strength.what, "bit": strength.bit}
            value = {"number": fault.number, "seed": fault.seed, **own}
        return (training_path(directory), training_name(target)), value, kind.value, ""
    place = links_path(directory), target
    if kind in _GATES:
        return place, {"gate": _GATES[kind]}, "held", ""
    if kind is Kind.THIN_LINE:
        rate_bps = strength.bandwidth.bps / environment.run.config.islands[target].ranks
        value = {"rate_bps": rate_bps, "damage_every_bytes": _DAMAGE_EVERY_BYTES}
        return place, value, SLOWED, FLIPPED
    is_partial = kind in (Kind.CORRUPT, Kind.DUPLICATE, Kind.REORDER)
    value = {
        "rates": {_RATES[kind]: strength.share if is_partial else 1.0},
        "seed": fault.seed,
        # What has a digest: initial parameters are taken once, before anything happens here.
        "methods": _WITH_DIGESTS if kind is Kind.CORRUPT else [],
        "delay_s": strength.delay.seconds,
        "slow_bps": strength.bandwidth.bps,
    }
    return place, value, _RATES[kind].value, ""
