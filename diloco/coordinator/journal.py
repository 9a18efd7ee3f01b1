"""The coordinator's durable memory: one SQLite file.

`entries` hold what membership must never forget. The audit log is `rounds`, an idempotent index of
the records (their headers in the order they were reported), and `audit_log`, what happened between
them. Both are written before anything is answered: a call that finds no room changes nothing, and
is answered that it is to be repeated.

One thread writes, a transaction after the other, so that their order is that of the calls. A
coordinator at work waits for none of them on its event loop: it commits what many calls ask for
at once (`changes`).

Where the run's state lies in an object store, a transaction is in the chain of the run before it is
committed here (`diloco.objects`); `replicated` has the number of its entry.

Source: PROTOCOL.md, "Durable before answered" and "Audit log".
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from diloco.bounded_text import bounded_text
from diloco.durable import DiskFull, unlink
from diloco.objects.replica import Replica
from diloco.transport.contracts import Handler, Handlers, IncomingCall, Reply
from diloco.transport.errors import Overloaded

logger = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rounds (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    timeline INTEGER NOT NULL,
    fragment_id INTEGER NOT NULL,
    version INTEGER NOT NULL,
    header TEXT NOT NULL,
    UNIQUE (timeline, fragment_id, version)
);
CREATE TABLE IF NOT EXISTS replicated (id INTEGER PRIMARY KEY CHECK (id = 0), number INTEGER);
CREATE TABLE IF NOT EXISTS audit_log (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    after_round INTEGER NOT NULL,
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    json TEXT NOT NULL,
    UNIQUE (kind, key)
);
"""
_TELL = (
    "INSERT OR IGNORE INTO audit_log (after_round, kind, key, json) "
    "VALUES ((SELECT COALESCE(MAX(sequence), 0) FROM rounds), ?, ?, ?)"
)
#: An island that starts again and again does not fill the journal.
_MOST_TOLD = 100_000
_FORGET = (
    f"DELETE FROM audit_log WHERE sequence <= (SELECT MAX(sequence) FROM audit_log) - {_MOST_TOLD}"
)
#: How SQLite says that there is no room: for the file, by a limit, or for the index of its log.
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)
_SET_REPLICATED = "INSERT OR REPLACE INTO replicated VALUES (0, ?)"
_REPLICATED = "SELECT number FROM replicated"
_INDEX = "INSERT INTO rounds (timeline, fragment_id, version, header) VALUES (?, ?, ?, ?)"
#: Timeline, fragment, version, and the header of its record, JSON with the version's `digest`.
RoundRow: TypeAlias = tuple[int, int, int, str]


class AuditEntry(NamedTuple):
    """What happened between versions: its kind, what makes it one of its kind, and JSON of it."""

    kind: str
    key: str
    json: str


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One row of the audit log, and how many versions had been indexed before it."""

    after_round: int
    kind: str
    key: str
    content: Any  # JSON values


class _Opened(NamedTuple):
    """What writes, in which thread; and what reads meanwhile all that is durable."""

    writer: sqlite3.Connection
    thread: ThreadPoolExecutor
    reader: sqlite3.Connection


class Journal:
    """One run's journal; used from one thread, next to its own."""

    def __init__(self, path: Path, replica: Replica | None = None) -> None:
        """Assign only; `open` acquires the file.

        Args:
            path: The file.
            replica: Where each transaction is before it is here, open; None: nowhere else.
        """
        self._path = path
        self._replica = replica
        self._opened: _Opened | None = None
        self._is_full = False

    def open(self) -> None:
        """Open or create the file; every commit reaches the disk before it returns.

        Raises:
            DiskFull: If there is no room for what SQLite keeps next to it.
            sqlite3.DatabaseError: If the file is not a journal.
        """
        if self._replica is not None:
            self._fetch(self._replica)
        with self._checking_space():
            writer = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            try:
                writer.execute("PRAGMA journal_mode=WAL")
                writer.execute("PRAGMA synchronous=FULL")
                writer.executescript(_SCHEMA)
                reader = sqlite3.connect(self._path, isolation_level=None)
            except sqlite3.Error:
                writer.close()
                raise
        self._opened = _Opened(writer, ThreadPoolExecutor(1, "journal"), reader)
        if self._replica is not None:
            if not self._replica.has_journal(self._path.name) and not self.is_empty:
                self._write_replicated(self._replica.number)
                self._put_snapshot(self._replica)
            for number, (entries, rounds, told) in self._replica.rows_after(self._replicated()):
                rows = tuple((t, f, v, header) for t, f, v, header in rounds)
                audit = tuple(AuditEntry(*each) for each in told)
                self._store(dict(entries), rows, audit, number)

    def _fetch(self, replica: Replica) -> None:
        """Have the file that the chain's snapshot has, unless this one is that or newer.

        Where the chain has nothing of a journal this one is the first: of a run that was begun
        without.
        """
        if not replica.has_journal(self._path.name):
            return
        try:
            with contextlib.closing(sqlite3.connect(self._path)) as there:
                (number,) = there.execute(_REPLICATED).fetchone() or (-1,)
        except sqlite3.DatabaseError:
            number = -1
        if number < max(0, replica.rows_start) or number > replica.rows_until:
            for end in ("-wal", "-shm"):  # a sound file has none: it was closed just now
                unlink(self._path.with_name(self._path.name + end))
            if replica.has(self._path.name):
                replica.fetch(self._path.name)
            else:
                unlink(self._path)

    def _write_replicated(self, number: int) -> None:
        with self._require().writer as writer:
            writer.execute(_SET_REPLICATED, (number,))

    def _replicated(self) -> int:
        (number,) = self._require().writer.execute(_REPLICATED).fetchone() or (-1,)
        return int(number)

    def close(self) -> None:
        """Release the file, once a transaction that is being written is. Twice is harmless."""
        if self._opened is None:
            return
        self._opened.thread.shutdown()
        self._opened.reader.close()
        self._opened.writer.close()
        self._opened = None

    def write(
        self,
        entries: Iterable[tuple[str, str]],
        rounds: Iterable[RoundRow] = (),
        told: Iterable[AuditEntry] = (),
    ) -> int:
        """Store entries, index `rounds`, add `told` to the audit log; all, or none.

        Later values replace earlier ones, and `null` is no entry any more; what is told again
        changes nothing; of what was told the newest 100,000 are kept. A version that is indexed
        with another digest stays as it is: the other is in the audit log as a `conflict`, and in
        the log as an error.

        Returns:
            How many of `rounds` contradict what is indexed.

        Raises:
            DiskFull: If there is no room for it; nothing was stored.
        """
        thread = self._require().thread
        return thread.submit(self._store, dict(entries), tuple(rounds), tuple(told)).result()

    async def commit(
        self,
        entries: Iterable[tuple[str, str]],
        rounds: Iterable[RoundRow] = (),
        told: Iterable[AuditEntry] = (),
    ) -> int:
        """Do as `write`; the event loop goes on meanwhile."""
        loop, thread = asyncio.get_running_loop(), self._require().thread
        return await loop.run_in_executor(
            thread, self._store, dict(entries), tuple(rounds), tuple(told)
        )

    def _store(
        self,
        entries: dict[str, str],
        rounds: tuple[RoundRow, ...],
        told: tuple[AuditEntry, ...],
        number: int | None = None,
    ) -> int:
        """Make a transaction, in the thread; `number`: that of its entry, which has it already."""
        if (replica := self._replica) is None or number is not None:
            return self._commit_rows(entries, rounds, told, number)
        with replica.transaction([list(entries.items()), rounds, told]) as number:
            num_conflicts = self._commit_rows(entries, rounds, told, number)
        if replica.is_journal_due:
            try:
                self._put_snapshot(replica)
            except (sqlite3.Error, OSError) as error:
                logger.warning("a snapshot of the journal comes later: %s", error)
                replica.put_journal_off()
        return num_conflicts

    def _put_snapshot(self, replica: Replica) -> None:
        """Have a copy of the file take the place of its transactions in the chain."""
        copy = self._path.with_name(self._path.name + ".tmp")
        unlink(copy)
        try:
            with self._checking_space():
                self._require().writer.execute("VACUUM INTO ?", (str(copy),))
            replica.put_snapshot(copy)
        finally:
            unlink(copy)

    def _commit_rows(
        self,
        entries: dict[str, str],
        rounds: tuple[RoundRow, ...],
        told: tuple[AuditEntry, ...],
        number: int | None,
    ) -> int:
        with (
            self._checking_space(),
            self._require().writer as writer,
        ):  # commits, or rolls back and raises
            writer.execute("BEGIN IMMEDIATE")
            writer.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?)", entries.items())
            gone = [(key,) for key, value in entries.items() if value == "null"]
            writer.executemany("DELETE FROM entries WHERE key = ?", gone)
            conflicts = [c for row in rounds if (c := _index(writer, row)) is not None]
            writer.executemany(_TELL, (*told, *conflicts))
            writer.execute(_FORGET)
            if number is not None:
                writer.execute(_SET_REPLICATED, (number,))
        for conflict in conflicts:
            logger.error(
                "one version was published as two things, see which of its islands have which: "
                "%s: %s",
                conflict.key,
                conflict.json,
            )
        return len(conflicts)

    def check(self) -> None:
        """Read all of the file, and all that it says.

        Raises:
            sqlite3.DatabaseError: If a page of it is damaged, or holds what was not written here.
        """
        (found,) = self._require().reader.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        self.entries()
        self.audit_rows()
        for (header,) in self._require().reader.execute("SELECT header FROM rounds"):
            _read(header)

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing of any run."""
        count = "SELECT (SELECT COUNT(*) FROM entries) + (SELECT COUNT(*) FROM rounds)"
        (number,) = self._require().reader.execute(count).fetchone()
        return not number

    def entries(self) -> dict[str, str]:
        """Return all key-value pairs."""
        return dict(self._require().reader.execute("SELECT key, value FROM entries"))

    def has_rounds(self, timeline: int) -> bool:
        """Whether a round of this timeline is indexed; version 0 is not the work of any."""
        rows = self._require().reader.execute(
            "SELECT 1 FROM rounds WHERE timeline = ? AND version > 0 LIMIT 1", (timeline,)
        )
        return rows.fetchone() is not None

    def newest_rounds(self, timeline: int, fragment_id: int, limit: int) -> list[str]:
        """Return the headers of the newest indexed versions of a fragment, newest first."""
        rows = self._require().reader.execute(
            "SELECT header FROM rounds WHERE timeline = ? AND fragment_id = ? "
            "ORDER BY version DESC LIMIT ?",
            (timeline, fragment_id, limit),
        )
        headers = [header for (header,) in rows]
        for header in headers:
            _read(header)
        return headers

    def headers(self) -> list[str]:
        """Return the headers of all indexed records, in the order of their reports."""
        rows = self._require().reader.execute("SELECT header FROM rounds ORDER BY sequence")
        return [header for (header,) in rows]

    def audit_rows(self) -> list[AuditRow]:
        """Return the audit log without the records, in the order of its entries."""
        rows = self._require().reader.execute(
            "SELECT after_round, kind, key, json FROM audit_log ORDER BY sequence"
        )
        return [AuditRow(after, kind, key, _read(text)) for after, kind, key, text in rows]

    @contextlib.contextmanager
    def _checking_space(self) -> Iterator[None]:
        """Raise `DiskFull` where SQLite finds no room, and say so once until there is some again.

        SQLite tells a limit on the size of files as a failed write.
        """
        try:
            yield
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode not in _FULL:
                raise
            if not self._is_full:
                self._is_full = True
                logger.error("the disk is full, calls wait for room: make some, %s", self._path)
            raise DiskFull(errno.ENOSPC, f"{self._path}: {error}") from error
        if self._is_full:
            self._is_full = False
            logger.info("there is room for %s again", self._path)

    def _require(self) -> _Opened:
        assert self._opened is not None, "journal used before open()"
        return self._opened


def _index(connection: sqlite3.Connection, row: RoundRow) -> AuditEntry | None:
    """Index a durable record once; return an entry if another was indexed in its place."""
    timeline, fragment_id, version, header = row
    indexed = _header(connection, timeline, fragment_id, version)
    if indexed is None:
        connection.execute(_INDEX, row)
        return None
    was, now = (bounded_text(str(json.loads(h).get("digest"))) for h in (indexed, header))
    if was == now:
        return None
    key = f"t{timeline}/f{fragment_id}/version {version}: {now}"
    return AuditEntry("conflict", key, json.dumps({"indexed": was, "reported": now}))


def _header(connection: sqlite3.Connection, *key: int) -> str | None:
    rows = connection.execute(
        "SELECT header FROM rounds WHERE timeline = ? AND fragment_id = ? AND version = ?", key
    )
    row = rows.fetchone()
    return None if row is None else str(row[0])


def _read(text: str) -> Any:  # JSON values
    """Read what was written as JSON.

    Raises:
        sqlite3.DatabaseError: If it is none any more.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise sqlite3.DatabaseError(f"it holds {text[:40]!r}, which is no JSON: {error}") from error


def repeated_when_full(handlers: Handlers) -> Handlers:
    """Have calls that find no room in the journal answered so that they are made again."""

    def guard(handler: Handler) -> Handler:
        async def handle(call: IncomingCall) -> Reply:
            try:
                return await handler(call)
            except DiskFull as error:
                message = f"at the coordinator {error.lack}, call again: {error}"
                raise Overloaded(message) from error

        return handle

    return {method: guard(handler) for method, handler in handlers.items()}
