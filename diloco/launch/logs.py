"""Logs of processes, for people who ask why one ended."""

from __future__ import annotations

from pathlib import Path


def tail(log: Path, num_lines: int = 10) -> str:
    """Return the last lines of a log; empty if there is none."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
