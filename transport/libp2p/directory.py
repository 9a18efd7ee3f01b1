"""The directories of daemons' sockets: one each, removed with it, at the latest by the next start.

A directory is locked by the process that made it for as long as that lives; what nobody locks was
left by one that was killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

#: Besides hivemind's own; a directory below TMPDIR may be too long for a socket.
PLACE = Path("/tmp")
PREFIX = "diloco-p2pd-"
#: Seconds within which anyone who makes a directory has locked it.
_UNLOCKED_S = 60.0


class SocketDirectory:
    """A directory of one daemon.

    Attributes:
        path: Where it is; only its owner may enter (0700).
    """

    def __init__(self) -> None:
        """Make one.

        Raises:
            OSError: If there is no room, or this process has no file left.
        """
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PLACE))
        try:
            self._lock = _lock(self.path)
        except OSError:
            self.path.rmdir()
            raise

    def remove(self) -> None:
        """Remove it; harmless twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep() -> None:
    """Remove the directories of this user's processes that were killed."""
    for path in PLACE.glob(f"{PREFIX}*"):
        try:
            status = path.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _UNLOCKED_S:
                continue
            lock = _lock(path)
        except OSError:  # somebody lives there, or somebody else sweeps
            continue
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _lock(path: Path) -> int:
    """Lock a directory as long as the descriptor that is returned is open.

    Raises:
        BlockingIOError: If it is locked.
        OSError: If it is none, or this process has no file left.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
