"""Child processes of a supervisor: each has its own log and session, and is ended in time."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from diloco.launch.process.logs import tail

_LOOK_S = 0.05


def spawn(
    command: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
    inherited: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own: Ctrl-C in a terminal is for its supervisor alone.

    Args:
        command: Program and arguments.
        log: File that its output is appended to.
        environment: All its variables; None: those of this process.
        stdin: As for `Popen`.
        stdout: As for `Popen`; None: the log.
        inherited: Descriptors that it keeps.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=stdin,
            stdout=output if stdout is None else stdout,
            stderr=output,
            pass_fds=tuple(inherited),
            start_new_session=True,
        )


def end_all(processes: Collection[subprocess.Popen[bytes]], at_most_s: float) -> None:
    """End processes that still run: SIGTERM, and after `at_most_s` seconds SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)
        wait_for_all(processes, at_most_s)


def wait_for_all(processes: Collection[subprocess.Popen[bytes]], at_most_s: float) -> None:
    """Wait until all processes have ended, or for so many seconds."""
    until = time.monotonic() + at_most_s
    while time.monotonic() < until and any(process.poll() is None for process in processes):
        time.sleep(_LOOK_S)


def how_ended(process: subprocess.Popen[bytes]) -> str:
    """Say how a process that has ended did."""
    code = process.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return f"(pid {process.pid}) {how}"


def last_words(log: Path) -> str:
    """Quote the end of a log, for messages."""
    return f"{log} ends with:\n{tail(log)}"
