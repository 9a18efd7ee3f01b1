"""Logs of processes, for people who ask why one ended.

What peers say gets into them. It cannot look like a line of ours, nor command a terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
from pathlib import Path

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_TAIL_BYTES = 64 << 10
_MOST_BYTES = 64 << 20
_LOOK_S = 1.0
_STDERR = 2


class LogFormatter(logging.Formatter):
    """One record a line, what follows of it indented; control characters as escapes."""

    def __init__(self) -> None:
        """Fix the form: time, level, logger, message."""
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Write a record, its traceback included."""
        text = super().format(record).replace("\n", "\n    ")
        return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def log_to(path: Path | None, level: int) -> None:
    """Send what this process logs to a file, or with None to stderr, in our form."""
    handler = logging.FileHandler(path) if path else logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level)


def bound_log(log: Path) -> None:
    """Put what a process has appended aside, as LOG.1, once that is much; called now and then.

    gRPC writes a line for each handshake that fails: a stranger can make it gigabytes a day. What
    is appended while it is copied is lost.
    """
    with contextlib.suppress(OSError):  # it is gone
        if stat.S_ISREG((status := log.stat()).st_mode) and status.st_size > _MOST_BYTES:
            aside, copy = (log.with_name(f"{log.name}.{end}") for end in ("1", f"1-{os.getpid()}"))
            try:
                with copy.open("xb") as file, log.open("rb") as old:
                    shutil.copyfileobj(old, file)
                copy.replace(aside)
            except OSError:  # no room: others need it more
                copy.unlink(missing_ok=True)
            os.truncate(log, 0)


async def bound_output() -> None:
    """Bound the file that a shell or a scheduler gave this process for stderr, for ever.

    It is appended to from now on. Systems without /proc are left to themselves.
    """
    with contextlib.suppress(OSError):
        fcntl.fcntl(_STDERR, fcntl.F_SETFL, fcntl.fcntl(_STDERR, fcntl.F_GETFL) | os.O_APPEND)
    while True:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(bound_log, Path(os.readlink(f"/proc/self/fd/{_STDERR}")))
        await asyncio.sleep(_LOOK_S)


def tail(log: Path, num_lines: int = 10) -> str:
    """Return the last lines of a log, of its last 64 KiB; empty if there is none."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-num_lines:])
