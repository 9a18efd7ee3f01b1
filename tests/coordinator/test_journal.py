"""The journal: what was written is there after a restart, whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import resource
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.coordinator.journal import Journal, RoundRow, repeated_when_full
from diloco.durable import DiskFull
from diloco.transport.contracts import IncomingCall, Reply
from diloco.transport.errors import Overloaded


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.open()
    yield journal
    journal.close()


def reopened(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.open()
    return journal


def test_entries_survive_and_later_values_replace_earlier_ones(
    journal: Journal, tmp_path: Path
) -> None:
    journal.write([("plan", "p"), ("island/east", "1")])
    journal.write([("island/east", "2")])
    journal.write([("cut/1", "{}"), ("cut/2", "{}")])
    journal.write([("cut/1", "null")])
    journal.write([])

    other = reopened(tmp_path)

    assert other.entries() == {"plan": "p", "island/east": "2", "cut/2": "{}"}
    other.close()


def test_failed_write_leaves_nothing_and_the_next_one_works(journal: Journal) -> None:
    with pytest.raises(sqlite3.IntegrityError):
        journal.write([("plan", "p"), ("island/east", None)])  # type: ignore[list-item]

    assert journal.entries() == {}
    journal.write([("plan", "q")])
    assert journal.entries() == {"plan": "q"}


def row(timeline: int, fragment_id: int, version: int, **changes: str) -> RoundRow:
    header = {"digest": f"{timeline}/{fragment_id}/{version}"} | changes
    return timeline, fragment_id, version, json.dumps(header)


def test_a_version_that_is_indexed_as_something_else_is_told_aloud(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    journal.write((), [row(0, 1, 7)])
    assert journal.write((), [row(0, 1, 7, attempt="said in other words")]) == 0
    assert not caplog.records

    for _ in range(2):
        rows = [row(0, 1, 7, digest="another"), row(0, 1, 8)]
        assert journal.write([("plan", "p")], rows) == 1

    assert [json.loads(h)["digest"] for h in journal.headers()] == ["0/1/7", "0/1/8"]
    (told,) = journal.audit_rows()
    assert (told.kind, told.key) == ("conflict", "t0/f1/version 7: another")
    assert told.content == {"indexed": "0/1/7", "reported": "another"}
    assert [r.levelname for r in caplog.records] == ["ERROR"] * 2
    assert "published as two things" in caplog.text


def test_each_record_is_indexed_once_in_the_order_of_reports(
    journal: Journal, tmp_path: Path
) -> None:
    for timeline, fragment_id, version in [(0, 1, 0), (0, 0, 0), (0, 1, 0), (0, 1, 1), (1, 1, 1)]:
        assert journal.write((), [row(timeline, fragment_id, version)]) == 0

    journal.write((), [row(3, 0, 0)])

    other = reopened(tmp_path)

    assert [json.loads(header)["digest"] for header in other.headers()] == [
        "0/1/0",
        "0/0/0",
        "0/1/1",
        "1/1/1",
        "3/0/0",
    ]
    assert [other.has_rounds(timeline) for timeline in range(4)] == [True, True, False, False]
    other.close()


def test_commit_reaches_the_disk_before_it_returns(journal: Journal, tmp_path: Path) -> None:
    connection = journal._require().writer

    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_closing_twice_is_harmless_and_opening_again_finds_everything(journal: Journal) -> None:
    journal.write([("plan", "{}")])

    journal.close()
    journal.close()
    journal.open()

    assert journal.entries() == {"plan": "{}"}


# -- a full disk -----------------------------------------------------------------------------------


def test_a_full_disk_stores_nothing_and_the_same_is_stored_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = reopened(tmp_path)
    journal.write([("plan", "p")])
    (pages,) = journal._require().writer.execute("PRAGMA page_count").fetchone()
    journal._require().writer.execute(f"PRAGMA max_page_count = {pages}")
    large = [(f"island/{number}", "x" * 500) for number in range(100)]

    with caplog.at_level(logging.INFO):
        for _ in range(3):
            with pytest.raises(DiskFull, match=r"journal\.sqlite: database or disk is full"):
                journal.write(large)
        with pytest.raises(DiskFull):
            journal.write((), [row(0, 0, 0, digest="x" * 50_000)])
        assert journal.entries() == {"plan": "p"}
        journal._require().writer.execute("PRAGMA max_page_count = 1000000")
        journal.write(large)

    assert len(journal.entries()) == 101
    assert [record.message.partition(",")[0] for record in caplog.records] == [
        "the disk is full",
        f"there is room for {tmp_path}/journal.sqlite again",
    ]
    journal.close()


def test_a_journal_that_finds_no_room_at_its_start_is_opened_once_there_is_some(
    tmp_path: Path,
) -> None:
    with contextlib.closing(Journal(tmp_path / "journal.sqlite")) as journal:
        journal.open()
        journal.write([("a", "1")])
        shutil.copytree(tmp_path, tmp_path / "killed")  # what a killed coordinator leaves
    (tmp_path / "killed" / "journal.sqlite-shm").unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.closing(Journal(tmp_path / "killed" / "journal.sqlite")) as journal:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(DiskFull):
                journal.open()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        journal.open()
        assert journal.entries() == {"a": "1"}


def test_a_call_that_finds_the_disk_full_is_to_be_repeated() -> None:
    async def full(call: IncomingCall) -> Reply:
        raise DiskFull(errno.ENOSPC, "No space left on device")

    async def other(call: IncomingCall) -> Reply:
        raise ValueError("another one")

    handlers = repeated_when_full({"control.join": full, "control.leave": other})

    call: Any = None
    with pytest.raises(Overloaded, match="call again") as refused:
        asyncio.run(handlers["control.join"](call))
    assert refused.value.is_retryable
    with pytest.raises(ValueError, match="another one"):
        asyncio.run(handlers["control.leave"](call))


def test_a_start_reads_the_newest_rounds_of_a_fragment_and_timeline(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.open()
    for timeline, p, version in [(0, 0, 9), *((1, p, v) for v in range(8) for p in (0, 1))]:
        journal.write([], [(timeline, p, version, json.dumps({"version": version, "p": p}))])

    newest = [json.loads(text) for text in journal.newest_rounds(1, 1, 3)]

    assert newest == [{"version": version, "p": 1} for version in (7, 6, 5)]
    assert len(journal.newest_rounds(1, 0, 100)) == 8
    journal.close()
