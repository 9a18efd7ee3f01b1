"""Keeps the state of an all-reduce's fragments in the coordinator's journal.

A version exists if and only if its entry is here, and so does an expiry; either is written before
anybody hears of it.

    round/3    how fragment 3 stands: {timeline, **SavedRound}

Source: PROTOCOL.md, "Decider".
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import blake3

from diloco.coordinator.audit_log import expiry_entry
from diloco.coordinator.journal import Journal
from diloco.errors import DilocoError
from diloco.protocol.rounds.messages import DIGEST_BYTES
from diloco.protocol.rounds.terms import PastRound, RoundKey
from diloco.transport.errors import FrameError


@dataclass(frozen=True, slots=True)
class SavedRound:
    """What is durable of a fragment: its newest commit record, and the attempts after it.

    Args:
        record: Header of the newest version, JSON values.
        state_digest: Of that version: theta, published, momentum and payloads.
        attempt: To open next.
        expired_in_a_row: Attempts that expired since that version.
        broken_in_a_row: Those whose results could not be used.
        missing: Islands that the last of them waited for in vain.
        reason: Why it expired.
    """

    record: Mapping[str, Any]
    state_digest: bytes
    attempt: int = 0
    expired_in_a_row: int = 0
    broken_in_a_row: int = 0
    missing: tuple[str, ...] = ()
    reason: str = ""


class RoundJournal:
    """The rounds of one timeline in an open journal."""

    def __init__(self, journal: Journal, timeline: int) -> None:
        """Assign only."""
        self._journal = journal
        self._timeline = timeline

    def saved(self, fragment_id: int) -> SavedRound | None:
        """Return how a fragment stands; None before this timeline has founded it."""
        value = json.loads(self._journal.entries().get(_entry_key(fragment_id), "null"))
        if value is None or value["timeline"] != self._timeline:
            return None
        return SavedRound(
            value["record"],
            bytes.fromhex(value["state_digest"]),
            value["attempt"],
            value["expired_in_a_row"],
            value["broken_in_a_row"],
            tuple(value["missing"]),
            value["reason"],
        )

    def past(self, fragment_id: int, num_rounds: int) -> dict[int, PastRound]:
        """Return the outcomes of a fragment's newest rounds, by base version."""
        past = {}
        for text in self._journal.newest_rounds(self._timeline, fragment_id, num_rounds):
            header = json.loads(text)
            if header["version"] > 0:
                past[header["version"] - 1] = PastRound(
                    header["attempt"],
                    frozenset((c["island"], c["incarnation"]) for c in header["contributors"]),
                    header["refused"],
                )
        return past

    def has_committed(self, record: Mapping[str, Any]) -> bool:
        """Whether this very record is that of a version, of whichever timeline."""
        key = record["timeline"], record["fragment_id"], record["version"]
        return self._journal.round_header(*key) == _text(record)

    def write(self, saved: SavedRound) -> None:
        """Make it durable how a fragment stands.

        Raises:
            JournalUnwritable: If it cannot be: what is durable now is not known here.
        """
        record = saved.record
        p = record["fragment_id"]
        # What a resume begins from is a version of the earlier timeline: it is indexed there.
        is_own = record["timeline"] == self._timeline
        rounds = [(self._timeline, p, record["version"], _text(record))] if is_own else []
        expired = RoundKey(self._timeline, p, record["version"], saved.attempt - 1)
        told = [expiry_entry(expired, saved.missing, saved.reason)] if saved.attempt else []
        try:
            self._journal.write([round_entry(self._timeline, saved)], rounds, told)
        except (sqlite3.Error, OSError) as error:
            raise JournalUnwritable(
                f"cannot write version {record['version']}, attempt {saved.attempt} of fragment "
                f"{p} into the journal: {error}. Free the disk, then start the coordinator again: "
                f"diloco coordinator RUN.toml; nothing published is lost, and the islands ask for "
                f"it for transport.unreachable"
            ) from error


def round_entry(timeline: int, saved: SavedRound) -> tuple[str, str]:
    """Write how a fragment stands in a timeline as an entry of the journal."""
    value = {
        "timeline": timeline,
        "attempt": saved.attempt,
        "expired_in_a_row": saved.expired_in_a_row,
        "broken_in_a_row": saved.broken_in_a_row,
        "missing": list(saved.missing),
        "reason": saved.reason,
        "record": saved.record,
        "state_digest": saved.state_digest.hex(),
    }
    return _entry_key(saved.record["fragment_id"]), json.dumps(value)


class JournalUnwritable(DilocoError):
    """The coordinator's journal cannot be written: only a restart finds out what is durable."""


def read_record(text: str, fragment_id: int) -> dict[str, Any]:
    """Read the header of a record that an island says it holds.

    Raises:
        FrameError: If it is no header of this fragment's.
    """
    try:
        record = json.loads(text)
        key = record["timeline"], record["fragment_id"], record["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FrameError(f"a founding record is no header: {type(error).__name__}") from error
    if not isinstance(record, dict) or not all(type(n) is int and 0 <= n < 2**63 for n in key):
        raise FrameError(f"a founding record is of round {key}"[:200])
    if record["fragment_id"] != fragment_id:
        raise FrameError(f"a founding record of fragment {fragment_id} is of round {key}")
    return record


def check_initial(record: Mapping[str, Any], num_lanes: int) -> None:
    """Refuse a version 0 that is not wholly what initial parameters make.

    Raises:
        FrameError: If it is not.
    """
    digests: Any = record.get("lane_digests")  # JSON
    try:
        lanes = [bytes.fromhex(digest) for digest in digests]
        # Spaces between the digits would be read, too, however many.
        is_exact = [lane.hex() for lane in lanes] == digests
    except (TypeError, ValueError) as error:
        raise FrameError("the lanes' digests of a founding record are no digests") from error
    initial = {
        "version": 0,
        "fragment_id": record["fragment_id"],
        "timeline": 0,
        "attempt": 0,
        "is_flush": False,
        "payload_codec": "float32",
        "digest": blake3.blake3(b"".join(lanes)).hexdigest(),
        "lane_digests": digests,
        "contributors": [],
        "refused": {},
        "last_included": {},
    }
    has_lanes = [len(lane) for lane in lanes] == [DIGEST_BYTES] * num_lanes
    if not (is_exact and has_lanes and record == initial):
        raise FrameError(f"a founding record of {num_lanes} lanes is not of initial parameters")


def _text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, sort_keys=True)


def _entry_key(fragment_id: int) -> str:
    return f"round/{fragment_id}"
