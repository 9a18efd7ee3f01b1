"""What happened between versions is in the audit log, once, in its place, over restarts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco.coordinator import journal as journals
from diloco.coordinator.audit_log import audit_entries_of
from diloco.coordinator.journal import AuditEntry, Journal
from diloco.protos import control_pb2 as control
from diloco.transport.errors import FrameError
from tests.coordinator_in_memory import CoordinatorInMemory, joined, tell

RECORD = {"timeline": 0, "fragment_id": 0, "version": 0}


def test_joins_expiries_and_records_are_told_in_order_and_once(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, _ = await joined(coord)
        await coord.round_report(record=RECORD)
        expiry = control.Expiry(version=3, attempt=1, missing=["west", "x"], reason="deadline")
        await coord.round_report(expiry=expiry)
        await coord.restart()
        await coord.round_report(expiry=expiry)
        with pytest.raises(FrameError, match="a report of fragment 7"):
            await coord.round_report(expiry=control.Expiry(fragment_id=7))
        await coord.leave(east)

        rows = coord.journal.audit_rows()

        assert [(e.after_round, e.kind, e.key) for e in rows] == [
            (0, "members", "1"),
            (0, "members", "2"),
            (1, "expiry", "t0/f0/v3/a1"),
            (1, "members", "3"),
        ]
        assert rows[0].content.keys() == {"east"}
        assert rows[0].content["east"]["incarnation"] == 1
        assert rows[2].content == {"missing": ["west"], "reason": "deadline"}
        assert rows[3].content["east"]["lease"] == "left"

    tell(tmp_path, story)


def test_what_an_operator_does_and_a_resume_are_told(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        membership = coord.membership
        entries = (
            *membership.settings.changed("outer.optimizer.lr", 0.5),
            *membership.settings.operated({"command": "set", "message": "done"}),
            *membership.members.paused(True),
            *membership.resumed(8),
        )

        told = {(t.kind, t.key): json.loads(t.json) for t in audit_entries_of(entries)}

        assert told == {
            ("policy", "1"): {"key": "outer.optimizer.lr", "value": 0.5},
            ("operation", "1"): {"number": 1, "command": "set", "message": "done"},
            ("members", "1"): {},
            ("timeline", "1"): {"timeline": 1, "resume_step": 8},
        }

    tell(tmp_path, story)


def test_of_what_was_told_the_newest_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert journals._MOST_TOLD == 100_000
    monkeypatch.setattr(journals, "_FORGET", journals._FORGET.replace("100000", "3"))
    journal = Journal(tmp_path / "journal.sqlite")
    journal.open()

    for number in range(10):
        journal.write((), told=[AuditEntry("members", str(number), "{}")])
        journal.write(())

    assert [entry.key for entry in journal.audit_rows()] == ["7", "8", "9"]
    journal.close()
