"""The attempt after the last that expired, in a file: no attempt that was announced opens again.

    fragment-0003/attempt.json             blake3 of the next line | version, next attempt, why

Durable before the next attempt opens, whatever the store keeps versions in.

Source: protocol.md section 4 (expiry).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from diloco.durable import read_checked_json, write_checked_json
from diloco.rounds.terms import RoundKey

logger = logging.getLogger(__name__)

#: Next attempt when a damaged file does not say which were announced: a later one must be opened,
#: and numbers may be skipped, since contributors follow whatever attempt is announced.
_LATER_ATTEMPT = 1 << 16


class Standing(NamedTuple):
    """How a version stands: its next attempt, and how those before it ended.

    `expired_in_a_row` counts the expiries recorded since that version was published,
    `broken_in_a_row` those whose results could not be used; `missing` are the islands that the last
    of them waited for in vain, `expired_unix_s` when that was, by the syncer's wall clock (None:
    not noted).
    """

    attempt: int = 0
    expired_in_a_row: int = 0
    broken_in_a_row: int = 0
    missing: tuple[str, ...] = ()
    expired_unix_s: float | None = None


def write_expiry(
    directory: Path,
    key: RoundKey,
    missing: Sequence[str],
    broken_in_a_row: int,
    expired_unix_s: float | None,
) -> None:
    """Write durably that `key` expired."""
    noted = {
        "version": key.version,
        "attempt": key.attempt + 1,
        "broken_in_a_row": broken_in_a_row,
        "missing": list(missing),
        "expired_unix_s": expired_unix_s,
    }
    write_checked_json(expiry_path(directory), noted)


def standing_of(directory: Path, version: int) -> Standing:
    """Read how attempts at the version after this one ended."""
    path = expiry_path(directory)
    if not path.exists():
        return Standing()
    try:
        noted = read_checked_json(path)
    except ValueError as error:
        logger.warning("what expired is not known: %s", error)
        return Standing(_LATER_ATTEMPT)
    if noted["version"] != version:
        return Standing()
    attempt, broken = int(noted["attempt"]), int(noted["broken_in_a_row"])
    return Standing(
        attempt,
        attempt % _LATER_ATTEMPT,
        broken,
        tuple(noted["missing"]),
        noted.get("expired_unix_s"),
    )


def expiry_path(directory: Path) -> Path:
    """File of a fragment's last expiry."""
    return directory / "attempt.json"
