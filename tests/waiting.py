"""Waiting for what another thread or process does: until it is so, and not for ever.

A deadline here counts what the machine grants, not the wall clock alone: with twenty busy processes
on two cores a second counts a tenth, as no process gets more of it. And where a wait can say what
advances meanwhile (events written, steps made), the deadline starts again whenever that changes.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")
_LOOK_S = 0.03
_CALL_S = 2.0  # between two looks at the deadline of a process that is waited for


class Patience:
    """Seconds that a wait may last, on a machine that does nothing else."""

    def __init__(self, within_s: float, progress: Callable[[], object] | None = None) -> None:
        """Start to count.

        Args:
            within_s: Seconds without progress, of an idle machine.
            progress: What advances while all is well; None: the wait is one step.
        """
        self.within_s = within_s
        self._progress = progress
        self._seen = progress() if progress else None
        self._left_s = within_s
        self._counted_at = time.monotonic()

    def left_s(self) -> float:
        """Return what is left, 0 or less once the wait has lasted too long."""
        now = time.monotonic()
        self._left_s -= (now - self._counted_at) * _granted()
        self._counted_at = now
        if self._left_s <= 0 and self._progress and (seen := self._progress()) != self._seen:
            self._seen, self._left_s = seen, self.within_s
        return self._left_s


def wait_until(
    check: Callable[[], _T],
    within_s: float = 90.0,
    *,
    progress: Callable[[], object] | None = None,
    what: Callable[[], str] = str,
    every_s: float = _LOOK_S,
) -> _T:
    """Return the first true result of `check`; `what` says what is missing if there is none.

    Args:
        check: Looked at every `every_s` seconds: more, where a look is work.
        within_s: Of `Patience`.
        progress: Of `Patience`.
        what: For the message.
        every_s: Between two looks.
    """
    patience = Patience(within_s, progress)
    while not (result := check()):
        assert patience.left_s() > 0, f"not within {within_s:g} s {what()}"
        time.sleep(every_s)
    return result


def exit_code(process: subprocess.Popen[Any], within_s: float) -> int:
    """Wait for the end of a process; return its exit code."""
    wait_until(lambda: process.poll() is not None, within_s, what=lambda: str(process.args))
    return int(process.returncode)


def run_command(
    command: Sequence[str], within_s: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; return its exit code, standard output and error."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            output, errors = said_by(process, within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def said_by(
    process: subprocess.Popen[str],
    within_s: float,
    *,
    progress: Callable[[], object] | None = None,
) -> tuple[str, str]:
    """Wait for the end of a process; return its standard output and error.

    Raises:
        subprocess.TimeoutExpired: If it has not ended; it is the caller's to end.
    """
    patience = Patience(within_s, progress)
    while True:
        try:
            return process.communicate(timeout=_CALL_S)
        except subprocess.TimeoutExpired:
            if patience.left_s() <= 0:
                raise


def written(directory: Path) -> Callable[[], object]:
    """Return what changes whenever a process writes below `directory`: its logs and events."""

    def sizes() -> object:
        found = {}
        for path in directory.rglob("*.jsonl"):
            found[path] = path.stat().st_size
        return found

    return sizes


def _granted() -> float:
    """Return the share of a core that one busy process gets, as averaged over a minute."""
    return min(1.0, (os.cpu_count() or 1) / max(os.getloadavg()[0], 1e-9))
