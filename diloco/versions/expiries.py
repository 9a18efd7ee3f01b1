"""Writes durably which attempt expired last, so that no announced attempt opens again.

    fragment-0003/attempt.json             blake3 of the next line | version, next attempt, why

Durable before the next attempt opens, whatever the store keeps versions in.

Source: PROTOCOL.md, "Deadline and expiry" and "Durable before answered".
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from diloco.durable import read_checked_json, write_checked_json
from diloco.protocol.rounds.terms import RecordExpiry

logger = logging.getLogger(__name__)

#: Next attempt when a damaged file does not say which were announced: a later one must be opened,
#: and numbers may be skipped, since contributors follow whatever attempt is announced.
_LATER_ATTEMPT = 1 << 16


class ExpiredAttempts(NamedTuple):
    """How a version stands: its next attempt, and how those before it ended.

    `expired_in_a_row` counts the expiries recorded since that version was published, less the
    `rejected_in_a_row`; this, `broken_in_a_row`, `missing` and `refused_at` are those of
    `RecordExpiry`; `expired_unix_s` is when the last was, by the syncer's wall clock (None: not
    noted).
    """

    attempt: int = 0
    expired_in_a_row: int = 0
    broken_in_a_row: int = 0
    rejected_in_a_row: int = 0
    missing: tuple[str, ...] = ()
    refused_at: Mapping[str, tuple[int, str]] = MappingProxyType({})
    expired_unix_s: float | None = None


def write_expiry(directory: Path, expiry: RecordExpiry, expired_unix_s: float | None) -> None:
    """Write an expiry durably."""
    noted = {
        "version": expiry.key.version,
        "attempt": expiry.key.attempt + 1,
        "broken_in_a_row": expiry.broken_in_a_row,
        "rejected_in_a_row": expiry.rejected_in_a_row,
        "missing": list(expiry.missing),
        "refused_at": dict(expiry.refused_at),
        "expired_unix_s": expired_unix_s,
    }
    write_checked_json(expiry_path(directory), noted)


def expired_attempts(directory: Path, version: int) -> ExpiredAttempts:
    """Read how attempts at the version after this one ended."""
    path = expiry_path(directory)
    if not path.exists():
        return ExpiredAttempts()
    try:
        noted = read_checked_json(path)
    except ValueError as error:
        logger.warning("what expired is not known: %s", error)
        return ExpiredAttempts(_LATER_ATTEMPT)
    if noted["version"] != version:
        return ExpiredAttempts()
    attempt, rejected = int(noted["attempt"]), int(noted.get("rejected_in_a_row", 0))
    return ExpiredAttempts(
        attempt,
        attempt % _LATER_ATTEMPT - rejected,
        int(noted["broken_in_a_row"]),
        rejected,
        tuple(noted["missing"]),
        {island: (int(n), str(why)) for island, (n, why) in noted.get("refused_at", {}).items()},
        noted.get("expired_unix_s"),
    )


def expiry_path(directory: Path) -> Path:
    """File of a fragment's last expiry."""
    return directory / "attempt.json"
