"""Damage to the store of a syncer which was killed.

What files may be damaged is what the rules say a run survives: the rest of a record or frame that
was being written, a record that is not the newest, and the newest record once islands hold it and
can give it back. Frames that follow a record are spared.
"""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from diloco.chaos.environment import ChaosEnvironment, fragment_of, held_still, send
from diloco.chaos.injector import Doing, Injector
from diloco.chaos.plan import COORDINATOR, Kind
from diloco.versions.frames import frames_in, locate_version
from diloco.versions.record import RecordInvalid, check_whole, record_path, versions_in

_DEAD_S = 5.0
_LOOK_S = 0.002


def _damage(
    injector: Injector,
    may: Callable[[ChaosEnvironment, Path], bool],
    damage: Callable[[Path, int], str],
) -> Iterator[None]:
    """Kill the syncer and damage a file before there is another one, which leaves it damaged.

    Its supervisor is held still meanwhile. Where a newer version came between, it is another
    moment's turn.

    Args:
        injector: Of the fault.
        may: Whether a fragment's directory has a file that may be damaged.
        damage: Damages that file, by a number that was drawn; says what it did.
    """
    environment, target, seed = injector.environment, injector.fault.target, injector.fault.seed
    pid = environment.serving_pid(target)
    fragments = [each for each in environment.fragments(target) if may(environment, each)]
    if pid is None or not fragments:
        return
    directory = fragments[seed % len(fragments)]
    with held_still(environment.pid(COORDINATOR)):
        send(pid, signal.SIGKILL)
        until = time.monotonic() + _DEAD_S
        while environment.pid(target) == pid and time.monotonic() < until:
            time.sleep(_LOOK_S)
        if environment.pid(target) is not None or not may(environment, directory):
            return
        injector.note, injector.fired = damage(directory, seed), True
    yield


def _has_old_record(_: ChaosEnvironment, directory: Path) -> bool:
    """Whether there is an old record next to the newest, which is the only copy."""
    return len(versions_in(directory)) > 1


def _truncate(directory: Path, seed: int) -> str:
    """Leave what a syncer that dies while it writes does, and cut the end off the oldest record.

    A torn temporary file, where the next version would be written, is never read; the record has to
    be noticed.
    """
    version = max([*versions_in(directory), *frames_in(directory)])
    whole = locate_version(directory, version).path.read_bytes()
    torn = record_path(directory, version + 1)
    torn = torn.with_name(torn.name + ".tmp")
    kept = whole[: seed % len(whole)]
    torn.write_bytes(kept)
    path = record_path(directory, versions_in(directory)[0])
    body = path.read_bytes()
    left = body[: 1 + seed % (len(body) - 1)]
    _replace(path, left)
    return (
        f"{torn.name} of {directory.name} has {len(kept)} of {len(whole)} bytes; {path.name} has "
        f"{len(left)} of {len(body)}"
    )


def _flip(directory: Path, seed: int) -> str:
    """Flip a bit of the oldest record."""
    path = record_path(directory, versions_in(directory)[0])
    body = bytearray(path.read_bytes())
    where = seed % len(body)
    body[where] ^= 1 << seed % 8
    _replace(path, body)
    return f"{path.name} of {directory.name}, byte {where}"


def _is_newest_held(environment: ChaosEnvironment, directory: Path) -> bool:
    """Whether the newest version is a record, and an island that lives can give it back."""
    versions = versions_in(directory)
    if not versions or versions[-1] < max([1, *frames_in(directory)]):
        return False
    try:
        check_whole(record_path(directory, versions[-1]))
    except RecordInvalid:  # it is damaged already, and not repaired yet
        return False
    return environment.is_held(fragment_of(directory), versions[-1])


def _tear_newest(directory: Path, seed: int) -> str:
    """Cut the end off the newest record."""
    path = record_path(directory, versions_in(directory)[-1])
    body = path.read_bytes()
    left = body[: len(body) - 1 - seed % (len(body) // 2)]
    _replace(path, left)
    return f"{path.name} of {directory.name} has {len(left)} of {len(body)} bytes"


def _replace(path: Path, body: bytes | bytearray) -> None:
    """Write a file again under its name: a pin may be a link to the same bytes."""
    path.unlink()
    path.write_bytes(body)


#: What does each kind of damage.
DAMAGES: dict[Kind, Doing] = {
    Kind.TRUNCATE: functools.partial(_damage, may=_has_old_record, damage=_truncate),
    Kind.FLIP: functools.partial(_damage, may=_has_old_record, damage=_flip),
    Kind.TORN_NEWEST: functools.partial(_damage, may=_is_newest_held, damage=_tear_newest),
}
