"""The journal: what was written is there after a restart, whole or not at all."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.coordinator.journal import Journal


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
    journal.write([])

    other = reopened(tmp_path)

    assert other.entries() == {"plan": "p", "island/east": "2"}
    other.close()


def test_failed_write_leaves_nothing_and_the_next_one_works(journal: Journal) -> None:
    with pytest.raises(sqlite3.IntegrityError):
        journal.write([("plan", "p"), ("island/east", None)])  # type: ignore[list-item]

    assert journal.entries() == {}
    journal.write([("plan", "q")])
    assert journal.entries() == {"plan": "q"}


def test_tape_holds_each_record_once_in_the_order_of_reports(
    journal: Journal, tmp_path: Path
) -> None:
    for timeline, fragment_id, version in [(0, 1, 0), (0, 0, 0), (0, 1, 0), (0, 1, 1), (1, 1, 1)]:
        journal.index_round(timeline, fragment_id, version, f"{timeline}/{fragment_id}/{version}")
    journal.index_round(0, 0, 0, "another word on the same record")

    journal.index_round(3, 0, 0, "3/0/0")

    other = reopened(tmp_path)

    assert other.tape() == ["0/1/0", "0/0/0", "0/1/1", "1/1/1", "3/0/0"]
    assert [other.has_rounds(timeline) for timeline in range(4)] == [True, True, False, False]
    other.close()


def test_commit_reaches_the_disk_before_it_returns(journal: Journal, tmp_path: Path) -> None:
    connection = journal._require()

    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_closing_twice_is_harmless_and_opening_again_finds_everything(journal: Journal) -> None:
    journal.write([("plan", "{}")])

    journal.close()
    journal.close()
    journal.open()

    assert journal.entries() == {"plan": "{}"}
