"""The coordinator's journal in a chain of objects: a transaction is there before it is here."""

from __future__ import annotations

import asyncio
import errno
import json
import sqlite3
from pathlib import Path

import pytest

from diloco.coordinator.journal import AuditEntry, Journal
from diloco.durable import DiskFull
from diloco.objects.replica import Replica
from diloco.objects.store import ObjectLost, ObjectStore, StoreAway


class Failing(ObjectStore):
    """Fails, or loses answers, as often as it is told to."""

    num_failures = num_lost_answers = 0

    def create(self, name: str, data: bytes) -> bool:
        if self.num_failures:
            self.num_failures -= 1
            raise StoreAway(errno.EIO, "503 Slow Down")
        created = super().create(name, data)
        if self.num_lost_answers:
            self.num_lost_answers -= 1
            raise StoreAway(errno.EIO, "connection reset")
        return created


@pytest.fixture
def store(tmp_path: Path) -> Failing:
    return Failing(f"file://{tmp_path / 'objects'}")


def opened(store: ObjectStore, root: Path) -> Journal:
    """Open the journal of a machine that takes the run over."""
    root.mkdir(exist_ok=True)
    replica = Replica(store, "run", root, lambda path: False)
    replica.open(lambda number: {"lease": number}, lambda found: None)
    journal = Journal(root / "journal.sqlite", replica)
    journal.open()
    return journal


def content(journal: Journal) -> tuple[object, ...]:
    return journal.entries(), journal.headers(), journal.audit_rows()


def row(version: int) -> tuple[int, int, int, str]:
    return 0, 0, version, json.dumps({"version": version, "digest": f"d{version}"})


def test_another_machine_has_every_transaction_that_was_answered(
    store: Failing, tmp_path: Path
) -> None:
    one = opened(store, tmp_path / "one")
    one.write([("a", "1"), ("b", "2")], [row(0)], [AuditEntry("join", "east", "{}")])
    one.write([("a", "null"), ("c", "3")], [row(1)])
    asyncio.run(one.commit([("position", "7")]))

    two = opened(store, tmp_path / "two")

    assert content(two) == content(one)
    assert two.entries() == {"b": "2", "c": "3", "position": "7"}
    one.close()
    two.close()


def test_a_transaction_that_the_store_does_not_take_is_not_here_either(
    store: Failing, tmp_path: Path
) -> None:
    one = opened(store, tmp_path / "one")
    one.write([("a", "1")])
    store.num_failures = 1
    with pytest.raises(DiskFull, match="503"):
        one.write([("a", "2")], [row(0)])
    assert one.entries() == {"a": "1"} and one.headers() == []
    store.num_lost_answers = 1
    with pytest.raises(DiskFull, match="reset"):
        one.write([("a", "3")])

    one.write([("b", "4")])

    two = opened(store, tmp_path / "two")
    assert two.entries() == one.entries() == {"a": "1", "b": "4"}
    one.close()
    two.close()


def test_a_transaction_that_the_disk_does_not_take_is_not_there_either(
    store: Failing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = opened(store, tmp_path / "one")
    one.write([("a", "1")])

    def full(*arguments: object) -> int:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(one, "_commit_rows", full)
        with pytest.raises(sqlite3.OperationalError):
            one.write([("a", "2")])
    one.write([("b", "3")])

    two = opened(store, tmp_path / "two")
    assert two.entries() == one.entries() == {"a": "1", "b": "3"}
    one.close()
    two.close()


def test_a_journal_that_lags_is_brought_up_and_one_of_another_past_replaced(
    store: Failing, tmp_path: Path
) -> None:
    one = opened(store, tmp_path / "one")
    one.write([("a", "1")])
    one.close()
    two = opened(store, tmp_path / "two")
    two.write([("b", "2")])
    two.close()

    back = opened(store, tmp_path / "one")
    assert back.entries() == {"a": "1", "b": "2"}
    back.close()
    with sqlite3.connect(tmp_path / "two/journal.sqlite") as other:
        other.execute("UPDATE replicated SET number = 1000")
        other.execute("INSERT INTO entries VALUES ('z', '26')")
    other.close()
    again = opened(store, tmp_path / "two")
    assert again.entries() == {"a": "1", "b": "2"}
    again.close()


@pytest.mark.parametrize("most_bytes", [4 << 20, 1500], ids=["joined", "whole"])
@pytest.mark.parametrize("begins", ["empty", "behind"])
def test_snapshots_have_the_transactions_or_the_journal_and_the_entries_go(
    store: Failing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: str, most_bytes: int
) -> None:
    monkeypatch.setattr("diloco.objects.replica._SNAPSHOT_ENTRIES", 8)
    monkeypatch.setattr("diloco.objects.replica._SNAPSHOT_BYTES", most_bytes)
    if begins == "behind":
        behind = opened(store, tmp_path / "two")
        behind.write([("old", "1")])
        behind.close()
    one = opened(store, tmp_path / "one")
    for number in range(300):
        one.write([("n", str(number))], [row(number)])
        if number == 200:
            store.num_failures = 3
            for _ in range(3):
                with pytest.raises(DiskFull):
                    one.write([("n", "lost")])

    has_copy = one._replica is not None and one._replica.has("journal.sqlite")
    assert has_copy is (most_bytes == 1500)
    assert len(store.names("run/log")) <= 13
    two = opened(store, tmp_path / "two")
    assert content(two) == content(one)
    assert len(two.headers()) == 300
    one.close()
    two.close()


def test_a_lost_copy_of_the_journal_takes_nothing_from_the_one_that_is_here(
    store: Failing, tmp_path: Path
) -> None:
    one = opened(store, tmp_path / "one")
    one.write([("a", "1")])
    assert one._replica is not None
    one._put_snapshot(one._replica)
    one.close()
    with sqlite3.connect(tmp_path / "one/journal.sqlite") as there:
        there.execute("UPDATE replicated SET number = 0")  # as of a machine that was away
    there.close()
    store.delete(store.names("run/data"))

    with pytest.raises(ObjectLost, match=r"which is journal\.sqlite of the run, is gone"):
        opened(store, tmp_path / "one")

    with sqlite3.connect(tmp_path / "one/journal.sqlite") as there:
        assert there.execute("SELECT key, value FROM entries").fetchall() == [("a", "1")]
    there.close()


def test_a_journal_whose_objects_are_gone_is_put_there_with_the_next_transaction(
    store: Failing, tmp_path: Path
) -> None:
    one = opened(store, tmp_path / "one")
    replica = one._replica
    assert replica is not None
    one.write([("a", "1")])
    one._put_snapshot(replica)
    one.write([("b", "2")])
    replica.put_snapshot()
    gone = store.names("run/data")
    assert len(gone) == 2
    store.delete(gone)

    assert "one of 2 objects" in replica.mend("journal.sqlite")
    one.write([("c", "3")])

    assert not replica.mend("journal.sqlite")
    two = opened(store, tmp_path / "two")
    assert two.entries() == {"a": "1", "b": "2", "c": "3"}
    one.close()
    two.close()
