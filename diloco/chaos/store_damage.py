"""Injectors that damage the store of a syncer which was killed.

What files may be damaged is what the rules say a run survives: the rest of a record or frame that
was being written, a record that is not the newest, and the newest record once islands hold it and
can give it back. Frames that follow a record are spared.
"""

from __future__ import annotations

import signal
import time
from abc import abstractmethod
from pathlib import Path

from diloco.chaos.environment import fragment_of, held_still, send
from diloco.chaos.injector import Injector
from diloco.chaos.plan import COORDINATOR
from diloco.versions.frames import frames_in, locate_version
from diloco.versions.record import (
    RecordInvalid,
    check_whole,
    record_path,
    versions_in,
)

_DEAD_S = 5.0
_LOOK_S = 0.002


class _Damage(Injector):
    """Damage to the store of a syncer that was killed; its supervisor is held still meanwhile."""

    def begin(self) -> bool:
        """Kill the syncer and damage a file before there is another one."""
        target = self.fault.target
        pid = self.environment.serving_pid(target)
        fragments = [each for each in self.environment.fragments(target) if self.may(each)]
        if pid is None or not fragments:
            return False
        directory = fragments[self.fault.seed % len(fragments)]
        with held_still(self.environment.pid(COORDINATOR)):
            send(pid, signal.SIGKILL)
            until = time.monotonic() + _DEAD_S
            while self.environment.pid(target) == pid and time.monotonic() < until:
                time.sleep(_LOOK_S)
            if self.environment.pid(target) is None and self.may(directory):
                self.damage(directory)
                self.fired = True
        return True

    @abstractmethod
    def may(self, directory: Path) -> bool:
        """Whether a fragment has a file that may be damaged."""

    @abstractmethod
    def damage(self, directory: Path) -> None:
        """Damage that file."""

    def end(self) -> bool:
        """Leave it damaged."""
        return True


class Truncate(_Damage):
    """The syncer dies while it writes, and a file has lost its end.

    A torn temporary file, which is never read; and what has to be noticed: a part of the oldest
    record.
    """

    def may(self, directory: Path) -> bool:
        """Whether there is an old record next to the newest, which is the only copy."""
        return len(versions_in(directory)) > 1

    def damage(self, directory: Path) -> None:
        """Leave parts of what was written last where the next version would be written."""
        version = max([*versions_in(directory), *frames_in(directory)])
        whole = locate_version(directory, version).path.read_bytes()
        torn = record_path(directory, version + 1)
        torn = torn.with_name(torn.name + ".tmp")
        kept = whole[: self.fault.seed % len(whole)]
        torn.write_bytes(kept)
        self.note = f"{torn.name} of {directory.name} has {len(kept)} of {len(whole)} bytes"
        path = record_path(directory, versions_in(directory)[0])
        body = path.read_bytes()
        left = body[: 1 + self.fault.seed % (len(body) - 1)]
        _replace(path, left)
        self.note += f"; {path.name} has {len(left)} of {len(body)}"


class Flip(_Damage):
    """A bit of the oldest record rots."""

    def may(self, directory: Path) -> bool:
        """Whether it is not the newest record as well, the only copy."""
        return len(versions_in(directory)) > 1

    def damage(self, directory: Path) -> None:
        """Flip one of its bits."""
        path = record_path(directory, versions_in(directory)[0])
        body = bytearray(path.read_bytes())
        where = self.fault.seed % len(body)
        body[where] ^= 1 << self.fault.seed % 8
        _replace(path, body)
        self.note = f"{path.name} of {directory.name}, byte {where}"


class TornNewest(_Damage):
    """The newest record of a fragment has lost its end, and islands hold what it was."""

    def may(self, directory: Path) -> bool:
        """Whether the newest version is a record, and an island that lives can give it back."""
        versions = versions_in(directory)
        if not versions or versions[-1] < max([1, *frames_in(directory)]):
            return False
        path = record_path(directory, versions[-1])
        try:
            check_whole(path)
        except RecordInvalid:  # it is damaged already, and not repaired yet
            return False
        return self.environment.is_held(fragment_of(directory), versions[-1])

    def begin(self) -> bool:
        """Wait for another moment where a newer version came between."""
        return super().begin() and self.fired

    def damage(self, directory: Path) -> None:
        """Cut the end off."""
        path = record_path(directory, versions_in(directory)[-1])
        body = path.read_bytes()
        left = body[: len(body) - 1 - self.fault.seed % (len(body) // 2)]
        _replace(path, left)
        self.note = f"{path.name} of {directory.name} has {len(left)} of {len(body)} bytes"


def _replace(path: Path, body: bytes | bytearray) -> None:
    """Write a file again under its name: a pin may be a link to the same bytes."""
    path.unlink()
    path.write_bytes(body)
