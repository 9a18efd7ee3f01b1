"""Keeps the durable files of a directory in an object store, each change there before it is here.

    CHAIN/data/OPENING-NAME      the bytes of a file, by the writer that wrote them and their
                                 blake3; small ones are in their entry, and what came by the store
                                 (`payload_shelf`) is in the object that it came in
    CHAIN/log, snapshot          what each file holds, in order (`chain`)

The directory stays what its processes read and write, by way of `diloco.durable`, which says here
what becomes durable. A file that gets its name is first written to the store, and then an entry of
the chain says so; only then has it its name here. What is removed or moved is said with the next
entry, at the latest when its directory is synced. So a directory is never ahead of its chain but by
what a crash makes it do again, and any machine makes the directory out of the chain.

No writer removes an object of a later one, whatever it does and however late: it is not the one
whose names begin with its own opening, or an earlier.

The coordinator's journal is in the same chain: its transactions are entries; snapshots join them to
objects, and have the whole file once these are larger than it.

Source: PROTOCOL.md, "State in an object store".
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import blake3

from diloco import durable
from diloco.errors import ConfigError, Fenced
from diloco.objects.chain import OPENED, Chain, Read
from diloco.objects.reusable import ReusableObjects
from diloco.objects.store import ObjectLost, ObjectStore, StoreAway
from diloco.objects.stored_file import UNFINISHED, Part, StoredFile, composed, gaps
from diloco.versions.record import RecordSection

logger = logging.getLogger(__name__)

#: Entries, and their bytes, after which a snapshot takes their place; bytes of transactions after
#: which the whole journal does, more if that is larger.
_SNAPSHOT_ENTRIES = 200
_SNAPSHOT_BYTES = 4 << 20
#: Files that are fetched at once; times that one is whose object holds other bytes.
_FETCHES = 16
_ATTEMPTS = 3
#: Times that a run under way is looked at to be fetched whole.
_LOOKS = 20
#: Of objects that nothing names any more, a few of which are no matter.
_LEAST_DROPPED_BYTES = 64 << 20
#: Of what is here of a file that comes, bytes that are read at a time.
_READ_BYTES = 1 << 20
_FILES, _ROWS, _JOURNAL = "files", "rows", "journal"


class Replica:
    """The files of one directory in one chain; any thread may use it once it is open."""

    def __init__(
        self,
        store: ObjectStore,
        name: str,
        root: Path,
        is_tracked: Callable[[Path], bool],
        *,
        on_fenced: Callable[[Fenced], None] = lambda error: None,
        sections: Callable[[Path], Iterable[RecordSection]] = lambda path: (),
        reads: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Assign only.

        Args:
            store: Where the chain is.
            name: Of the chain.
            root: The directory.
            is_tracked: Whether a path, relative to it, is of a file that is kept.
            on_fenced: Called, in whatever thread finds out, when another writer has taken over.
            sections: Where in a file there is what may be in the store already (`reuse`).
            reads: Which files a `look` knows of: one that has a million objects takes seconds.
        """
        self._reads = reads
        self._sections = sections
        self._reusable = ReusableObjects()
        self._store = store
        self.name = name
        self.root = root
        self._is_tracked = is_tracked
        self._on_fenced = on_fenced
        self._chain = Chain(store, name)
        self._lock = threading.RLock()
        self._files: dict[str, StoredFile] = {}
        self._said: dict[str, StoredFile | None] = {}  # with the next entry
        self._seen: tuple[Read, dict[str, StoredFile]] | None = None  # by the last look
        self._opened: Mapping[str, Any] = {}
        # Transactions of the journal that are in entries; names of the objects that have earlier
        # ones; bytes of both.
        self._rows: list[tuple[int, Any]] = []
        self._joined: list[str] = []
        self._journal_bytes = self._copy_bytes = 0
        self._is_committing = self._is_journal_lost = False
        self._dropped: set[str] = set()
        self._dropped_bytes = 0
        self._lost: list[str] = []  # by the last `restore`
        self._on_piece: Callable[[int], None] = lambda num_bytes: None
        self._uploading: Counter[str] = Counter()
        self._entries_since = self._bytes_since = 0
        #: Of the last transaction that the whole journal of a snapshot has, and of the last.
        self.rows_start = self.rows_until = -1

    # -- opening ---------------------------------------------------------------------------------

    def read(self) -> Read:
        """Read the chain, not to write it; read again, only what is new."""
        return self._chain.read()

    def open(
        self, opening: Callable[[int], Mapping[str, Any]], check: Callable[[Read], None]
    ) -> None:
        """Become the chain's writer, and know what it holds; see `Chain.open`."""
        with self._lock:
            found = self._chain.open(opening, check)
            self._know(found, _held_by(found))
            self._reusable = ReusableObjects()
            for file in self._files.values():
                self._reusable.used(file.parts)
            self._opened = opening(self._chain.number)
            self._forget_unnamed()

    def look(self) -> None:
        """Know what the chain holds, not to write it; looked again, only what is new is parsed.

        Raises:
            ObjectLost: If an entry is gone.
            StoreAway: If the store does not answer.
        """
        found, new = self._chain.read(), None
        if self._seen is not None:
            before, files = self._seen
            is_same = found.snapshot is before.snapshot or not (found.snapshot or before.snapshot)
            if is_same and found.entries[: len(before.entries)] == before.entries:
                new = found.entries[len(before.entries) :]
        if new is None:
            files = _held_by(found, self._reads)
        for _, content in new or ():
            _apply(files, _files_of(content, self._reads))
        self._seen = found, files
        self._know(found, dict(files))

    def _know(self, found: Read, files: dict[str, StoredFile]) -> None:
        told = found.snapshot.get(_JOURNAL, [-1, -1, [], 0, 0])
        self.rows_start, self.rows_until, self._joined = told[:3]
        self._journal_bytes, self._copy_bytes = told[3:]
        self._entries_since = len(found.entries)
        self._files, self._rows, self._said = files, [], {}
        for number, content in found.entries:
            if _ROWS in content:
                self._rows.append((number, content[_ROWS]))
                self.rows_until = number

    def _forget_unnamed(self) -> None:
        """Remove objects of earlier writers that no entry names."""
        held, own = self._objects(), f"{self._chain.opening:016d}"
        try:
            names = (n.rpartition("/")[2] for n in self._store.names(f"{self.name}/data"))
            self._delete(name for name in names if name not in held and name < own)
        except StoreAway as error:
            logger.warning("objects that no entry of %s names stay: %s", self.name, error)

    @property
    def number(self) -> int:
        """Of the last entry."""
        return self._chain.number

    def rows_after(self, number: int) -> Iterator[tuple[int, Any]]:
        """Give the journal's transactions after an entry, as the chain held them when opened.

        Raises:
            ObjectLost: If some are gone.
            StoreAway: If the store does not answer.
        """
        for name in self._joined:
            for _ in range(_ATTEMPTS):
                joined = self._store.get(f"{self.name}/data/{name}") or b""
                if name.endswith(blake3.blake3(joined).hexdigest()):
                    break
            else:
                raise ObjectLost(
                    f"{self._url_of(name)}, transactions of the journal, is gone or does not hold "
                    f"what was written: bring that object back from a copy or a version of it"
                )
            yield from ((n, rows) for n, rows in json.loads(joined) if n > number)
        yield from ((n, rows) for n, rows in self._rows if n > number)

    def restore(self, *, without: str = "", only: Callable[[str], bool] = lambda name: True) -> int:
        """Make the directory hold what the chain does; returns the bytes that were fetched.

        Args:
            without: A file that is left as it is.
            only: Whether a file is to be here; others are not fetched.

        An object that is lost, or holds other bytes, is named in the log; who reads that file finds
        that it is not here, and makes it again or says what to do.

        Raises:
            ConfigError: If the chain keeps nothing, and there are files here.
            StoreAway: If the store does not answer.
            DiskFull: If there is no room here.
        """
        num_bytes = self._restore_all(without, only)
        for problem in self._lost:
            logger.error("%s", problem)
        return num_bytes

    def _restore_all(self, without: str, only: Callable[[str], bool]) -> int:
        there = [p for p in self.root.rglob("*") if p.is_file() or p.is_symlink()]
        here = {path.relative_to(self.root).as_posix(): path for path in there}
        kept = {n: path for n, path in here.items() if n != without and self._is_kept(Path(n))}
        if kept and not self._files:
            raise ConfigError(
                f"run.state = {self._store.url} has nothing of {self.root}, where there is "
                f"{min(kept)}: objects were removed, or that directory is of another run. Bring "
                f"the objects back, or give an empty coordinator.state_dir; or, where this is the "
                f"newest that is left, remove lease.json in coordinator.state_dir and start the "
                f"coordinator again: what is here is put there"
            )
        self._lost.clear()
        for name in kept.keys() - self._files.keys():
            logger.info("removed, the state in %s has no %s", self._store.url, name)
            durable.unlink(kept[name])
        alike: dict[object, list[str]] = {}
        for name in sorted(filter(only, self._files.keys() - {without})):
            file = self._files[name]
            alike.setdefault((file.digest, file.mode) if file.parts else name, []).append(name)
        with ThreadPoolExecutor(_FETCHES, "fetch") as pool:
            return sum(pool.map(self._restore_alike, alike.values()))

    def fetch_all(
        self,
        *,
        without: str = "",
        only: Callable[[str], bool] = lambda name: True,
        on_piece: Callable[[int], None] = lambda num_bytes: None,
    ) -> int:
        """Look and restore until nothing was replaced meanwhile; returns the bytes fetched.

        `on_piece` is called with the bytes of each piece that comes, in any thread; what it raises
        ends this.

        Raises:
            ObjectLost: If an object is gone, or does not hold what was written.
            StoreAway: If the store does not answer.
            DiskFull: If there is no room here.
        """
        num_bytes, self._on_piece = 0, on_piece
        for _ in range(_LOOKS):
            self.look()
            num_bytes += self._restore_all(without, only)
            if not self._lost:
                return num_bytes
        raise ObjectLost(self._lost[0])

    def files(self, *, only: Callable[[str], bool]) -> dict[str, StoredFile]:
        """Give the files that the chain holds, by name."""
        return {name: file for name, file in self._files.items() if only(name)}

    def _restore_alike(self, names: Sequence[str]) -> int:
        """Have files of the same bytes here, one file with several names; returns what it took.

        A version that a checkpoint pins is such a file, and is fetched and kept once.
        """
        first, *others = names
        num_bytes = self._restore_file(first)
        source, there = self.root / first, self._files[first]
        for name in others:
            path = self.root / name
            if there.is_at(path):
                continue
            if not there.is_at(source):  # it is lost, as the log says, and the next one may not be
                num_bytes += self._restore_file(name)
                continue
            durable.make_directory_durably(path.parent)
            durable.unlink(path)
            durable.link(source, path)
            durable.sync_directory(path.parent)
        return num_bytes

    def _restore_file(self, name: str) -> int:
        """Have a file here as the chain has it; returns the bytes that were fetched."""
        file = self._files[name]
        if file.is_at(self.root / name):
            return 0
        try:
            self.fetch(name)
        except ObjectLost as error:
            self._lost.append(str(error))
            return 0
        return file.num_bytes

    def adopt(self) -> None:
        """Keep all that is here, of a directory that was in no store; again, what is new.

        Raises:
            StoreAway: If the store does not take it.
        """
        for path in sorted(path for path in self.root.rglob("*") if path.is_file()):
            name = path.relative_to(self.root).as_posix()
            known = self._files.get(name)
            if self._is_kept(Path(name)) and (known is None or not known.is_at(path)):
                self._keep(path, name)

    def contents(self, names: Iterable[str]) -> dict[str, bytes]:
        """Read what each of some files holds; those that there are.

        Raises:
            StoreAway: If the store does not answer.
        """
        files = {name: self._files[name] for name in names if name in self._files}
        return {name: b"".join(self._pieces(file, 0)) for name, file in files.items()}

    def lacks(self, directory: str) -> str:
        """Say what is not there of the files of a directory; empty: all that there should be is.

        Raises:
            StoreAway: If the store does not say.
        """
        names = [name for name in self._files if _is_below(name, directory)]
        parts = ((name, part) for name in names for part in self._files[name].parts)
        for object_name, name in self._gone(parts).items():
            return f"{self._url_of(object_name)}, which is {name}, is gone or cut off"
        return "" if names else f"{self._store.url}/{self.name} has no {directory}"

    def _gone(self, parts: Iterable[tuple[str, Part]]) -> dict[str, str]:
        """Find objects that are not there, or are cut off, each with a file that is in it."""
        there = self._store.sizes(f"{self.name}/data")
        return {
            part.object_name: name
            for name, part in parts
            if there.get(f"{self.name}/data/{part.object_name}", -1) < part.start + part.num_bytes
        }

    def mend(self, journal: str = "") -> str:
        """Write objects again that are gone, out of this directory.

        Args:
            journal: Name of the journal's file, where this chain has it: the next transaction
                puts all of it there.

        Returns:
            What was gone, and what to do; empty: nothing was.

        Raises:
            Fenced: If another writer has taken over.
            ObjectLost: If what is gone is not here either.
            StoreAway: If the store does not answer.
        """
        self.check()
        with self._lock:
            files = dict(self._files)
            parts = [(name, part) for name, file in files.items() for part in file.parts]
            parts += [(journal, Part(joined, 0, 0)) for joined in self._joined]
        gone, entry = self._gone(parts), self._chain.lacks()
        with self._lock:
            if entry and not self._is_committing:
                self.put_snapshot()
            self._is_journal_lost |= journal in gone.values()
            again = {
                object_name: (name, files[name])
                for object_name, name in gone.items()
                if name != journal and self._files.get(name) is files[name]  # it is still needed
            }
            self._uploading.update([*again])
        failed = None
        try:
            for object_name, (name, file) in again.items():
                try:
                    self._write_again(object_name, name, file)
                except ObjectLost as error:
                    failed = error
        finally:
            with self._lock:
                self._uploading -= Counter([*again])
        if failed is not None:
            raise failed
        lost = [*map(self._url_of, gone), *([f"{self._store.url}/{entry}"] if entry else [])]
        if not lost:
            return ""
        return (
            f"{lost[0]} was gone, one of {len(lost)} objects of the run, and is written again from "
            f"this machine's disk: find out who removes them (a rule of the bucket, a job that "
            f"cleans up), since a machine that is lost now takes with it what they hold"
        )

    def _write_again(self, object_name: str, name: str, file: StoredFile) -> None:
        """Write an object again out of a file that is in it."""
        path, is_whole = self.root / name, False
        with contextlib.suppress(FileNotFoundError):
            is_whole = StoredFile.of(path).digest == file.digest
        if not is_whole and self._files.get(name) is file:
            raise ObjectLost(
                f"{self._url_of(object_name)}, which is {name} of the run, is gone, and that file "
                f"is not whole here: bring it back from a copy or a version of it"
            )
        if not is_whole:
            return
        pieces = file.places_of(object_name)
        size = sum(part.num_bytes for _, part in pieces)
        where = f"{self.name}/data/{object_name}"
        self._store.put(where, gaps(path, pieces), num_bytes=size)
        logger.warning("written again, it was gone: %s", self._url_of(object_name))

    def _url_of(self, object_name: str) -> str:
        return f"{self._store.url}/{self.name}/data/{object_name}"

    def has(self, name: str) -> bool:
        """Whether a file is kept."""
        return name in self._files

    def has_journal(self, name: str) -> bool:
        """Whether the chain has anything of a journal: the file of a snapshot, or transactions."""
        return name in self._files or self.rows_until >= 0

    def fetch(self, name: str) -> None:
        """Write a file here as the chain has it; goes on where the store failed before.

        Raises:
            ObjectLost: If its object is not there, or does not hold what was written.
            StoreAway: If the store does not answer.
            DiskFull: If there is no room here.
        """
        file, path = self._files[name], self.root / name
        durable.make_directory_durably(path.parent)
        fresh = file.unfinished_at(path)
        for _ in range(_ATTEMPTS):
            descriptor, digest, at = durable.go_on(fresh, mode=file.mode), blake3.blake3(), 0
            try:
                while here := durable.read_at(descriptor, at, _READ_BYTES):
                    digest.update(here)
                    at += len(here)
                    self._on_piece(len(here))  # of a large file this takes minutes
                for piece in self._pieces(file, at):
                    digest.update(piece)
                    at += durable.write_at(descriptor, at, piece)
                    self._on_piece(len(piece))
                durable.sync(descriptor)
            except BaseException as error:
                if not isinstance(error, StoreAway):  # which gives the rest another time
                    durable.unlink(fresh)
                raise
            finally:
                durable.close(descriptor)
            if digest.hexdigest() == file.digest:
                durable.rename(fresh, path)
                durable.sync_directory(path.parent)
                return
            durable.unlink(fresh)
        raise ObjectLost(
            f"{self._store.url}/{self.name}/data/{', '.join(sorted(file.objects))}, which is "
            f"{name} of the run, is gone or does not hold what was written: bring it back from a "
            f"copy or a version of it"
        )

    def _pieces(self, file: StoredFile, start: int) -> Iterator[bytes]:
        """Read a file from a byte on."""
        if file.content is not None:
            return iter([file.content[start:]])
        return self._store.read(
            (f"{self.name}/data/{part.object_name}", part.start, part.num_bytes)
            for part in file.parts_from(start)
        )

    # -- what becomes durable: called by diloco.durable -------------------------------------------

    def renaming(self, source: Path, target: Path) -> None:
        """Keep what a file or directory holds under its new name, before it has it.

        Raises:
            StoreAway: If the store does not take it: it must not get its name.
        """
        old, new = self._name(source), self._name(target)
        if old is None and new is None:
            return
        with self._lock:
            moved = {n: f for n, f in self._files.items() if old is not None and _is_below(n, old)}
            if moved:
                self._say(dict.fromkeys(moved))
                if new is not None:
                    renamed = {new + name[len(old or "") :]: f for name, f in moved.items()}
                    self._say(dict(renamed))
                return
        if new is not None:
            self._keep(source, new)

    def _keep(self, path: Path, name: str) -> None:
        """Keep what a file holds under a name."""
        file = self._uploaded(path)
        with self._lock:
            try:
                self._append({}, {name: file})
            finally:
                self._release(file)

    def linked(self, source: Path, target: Path) -> None:
        """Keep one more name of a file."""
        old, new = self._name(source), self._name(target)
        with self._lock:
            if new is not None and old is not None and (file := self._files.get(old)) is not None:
                self._say({new: file})

    def removed(self, path: Path) -> None:
        """Keep a file, or all in a directory, no more."""
        if (name := self._name(path)) is not None:
            with self._lock:
                self._say({each: None for each in self._files if _is_below(each, name)})

    def synced(self, directory: Path) -> None:
        """Have what was said of names in the store.

        Raises:
            StoreAway: If the store does not take it.
        """
        if self._name(directory) is not None or directory == self.root:
            with self._lock:
                if self._said:
                    self._append({}, {})

    @contextlib.contextmanager
    def transaction(self, rows: Any) -> Iterator[int]:  # JSON values
        """Keep a transaction of the journal, before it is committed in the context.

        Gives the number of its entry; it does not count if the context raises.

        Raises:
            StoreAway: If the store does not take it: it is not to be committed.
        """
        with self._lock:
            number, before = self._append({_ROWS: rows}, {}), self.rows_until
            self._rows.append((number, rows))
            self.rows_until, self._is_committing = number, True
        try:
            yield number
        except BaseException:
            with self._lock:
                self._chain.take_back(number)
                self._rows.pop()
                self.rows_until = before
            raise
        finally:
            self._is_committing = False

    # -- the chain -------------------------------------------------------------------------------

    @property
    def is_journal_due(self) -> bool:
        """Whether the whole journal is to take the place of its transactions."""
        is_long = self._journal_bytes > max(_SNAPSHOT_BYTES, self._copy_bytes)
        return is_long or self._is_journal_lost

    def put_journal_off(self) -> None:
        """Have the whole journal due again once there are as many bytes of transactions more."""
        self._copy_bytes += max(_SNAPSHOT_BYTES, self._copy_bytes)
        self._is_journal_lost = False  # until it is looked for again

    def put_snapshot(self, journal: Path | None = None) -> None:
        """Put a snapshot in place of the entries so far.

        Args:
            journal: A copy of the whole journal, of that name but for its suffix; None: its
                transactions are joined to an object.

        Raises:
            StoreAway: If the store does not take it: a later one may.
        """
        copy = None if journal is None else self._uploaded(journal)
        with self._lock, self._fencing():
            if journal is not None and copy is not None:
                self._drop({journal.stem})
                self._dropped.update(self._joined)
                self._files[journal.stem] = copy
                self._release(copy)
                self._joined, self.rows_start = [], self.rows_until
                self._journal_bytes, self._copy_bytes = 0, copy.num_bytes
                self._is_journal_lost = False
            elif self._rows:
                body = json.dumps(self._rows).encode()
                name = f"{self._chain.opening:016d}-{blake3.blake3(body).hexdigest()}"
                self._store.put(f"{self.name}/data/{name}", body)
                self._joined.append(name)
            self._rows = []
            files = {name: file.to_json() for name, file in self._files.items()}
            numbers = self.rows_start, self.rows_until
            told = [*numbers, self._joined, self._journal_bytes, self._copy_bytes]
            self._chain.put_snapshot({_FILES: files, OPENED: dict(self._opened), _JOURNAL: told})
            self._entries_since = self._bytes_since = 0
            gone = self._dropped - self._objects() - set(self._uploading)
            self._reusable.removed(gone)
            self._delete(gone)
            self._dropped.clear()
            self._dropped_bytes = 0

    def check(self) -> None:
        """Look whether another writer has taken over.

        Raises:
            Fenced: If one has.
            StoreAway: If the store does not say.
        """
        looked = self._chain.look()
        with self._lock, self._fencing():
            self._chain.check(looked)

    def _append(self, content: Mapping[str, Any], files: Mapping[str, StoredFile | None]) -> int:
        most = max(_SNAPSHOT_ENTRIES, len(self._files) // 10)
        is_due = self._entries_since >= most or self._bytes_since > _SNAPSHOT_BYTES
        # Objects that nothing names go with a snapshot: few, by what those that count come to.
        if self._dropped_bytes > _LEAST_DROPPED_BYTES:
            is_due |= 4 * self._dropped_bytes > self._held_bytes
        if is_due and not self._is_committing:
            try:
                self.put_snapshot()
            except StoreAway as error:
                logger.warning("a snapshot of %s comes later: %s", self.name, error)
                self._entries_since = self._bytes_since = 0
        changed = self._said | dict(files)
        said = {n: None if file is None else file.to_json() for n, file in changed.items()}
        body = {**content, **({_FILES: said} if said else {})}
        with self._fencing():
            number = self._chain.append(body)
        self._hold(files)
        self._said = {}
        self._entries_since += 1
        num_bytes = len(str(body))
        self._bytes_since += num_bytes
        self._journal_bytes += num_bytes if _ROWS in content else 0
        return number

    @contextlib.contextmanager
    def _fencing(self) -> Iterator[None]:
        """Say that another writer has taken over, before the error is raised."""
        try:
            yield
        except Fenced as error:
            self._on_fenced(error)
            raise

    def _say(self, files: Mapping[str, StoredFile | None]) -> None:
        """Change what is kept; the chain has it with the next entry."""
        self._hold(files)
        self._said.update(files)

    def _hold(self, files: Mapping[str, StoredFile | None]) -> None:
        """Have files, or have them no more, in place of what has their names."""
        self._drop(files)
        for file in filter(None, files.values()):
            self._reusable.used(file.parts)
        for name in files:
            if (before := self._files.get(name)) is not None:
                self._reusable.unused(before.parts)
        _apply(self._files, files)

    def _drop(self, names: Iterable[str]) -> None:
        """Have the objects of files removed with the next snapshot, unless others are in them."""
        found = (self._files.get(name) for name in names)
        for file in found:
            if file and not file.objects <= self._dropped:
                self._dropped |= file.objects
                self._dropped_bytes += file.num_bytes

    @property
    def _held_bytes(self) -> int:
        """Bytes of the files, each name counted."""
        return sum(file.num_bytes for file in self._files.values())

    def _objects(self) -> set[str]:
        """Names of the objects that files and transactions are in."""
        return {*self._joined}.union(*(file.objects for file in self._files.values()))

    def _delete(self, objects: Iterable[str]) -> None:
        self._store.delete(f"{self.name}/data/{each}" for each in objects)

    def _uploaded(self, path: Path) -> StoredFile:
        """Write what a file holds to the store; nothing forgets it meanwhile."""
        file = StoredFile.of(path, self._chain.opening)
        found = [*self._sections(path)] if file.parts else []
        with self._lock:
            copied = {s.start: self._reusable.of(s.digest) for s in found}
            there = {s.start: s for s in found if copied[s.start]}
            file, own = composed(file, there, copied)
            alike = (f for f in self._files.values() if f.digest == file.digest)
            is_there = any(file.objects <= each.objects for each in alike)  # by another name
            self._uploading.update(file.objects)
        try:
            if own and not is_there:
                name = f"{self.name}/data/{own[0][1].object_name}"
                size = sum(part.num_bytes for _, part in own)
                self._store.put(name, gaps(path, own) if there else path, num_bytes=size)
        except StoreAway:
            with self._lock:
                self._release(file)
            raise
        return file

    def _release(self, file: StoredFile) -> None:
        """Let the objects of a file go with what names them."""
        self._uploading -= Counter(file.objects)

    def objects_of(self, digest: str) -> Sequence[Part]:
        """Give the objects of this chain in which something is, by blake3 in hex; or none."""
        with self._lock:
            return self._reusable.of(digest)

    def reuse(self, digest: str, objects: Mapping[str, int]) -> None:
        """Have files made of objects of this chain, which nobody else writes, where they can be.

        Those that no file is made of for long go with a later snapshot.

        Args:
            digest: blake3, in hex, of their bytes, one after the other.
            objects: Bytes of each, by name (`reusable`).
        """
        parts = [Part(name, 0, num_bytes) for name, num_bytes in objects.items()]
        with self._lock:
            for part in self._reusable.add(digest, parts, time.monotonic()):
                if part.object_name not in self._dropped:
                    self._dropped.add(part.object_name)
                    self._dropped_bytes += part.num_bytes

    @property
    def opening(self) -> int:
        """Number with which the names of this writer's objects begin."""
        return self._chain.opening

    def _name(self, path: Path) -> str | None:
        """Name of a path below the directory; None of what is not kept."""
        try:
            relative = path.relative_to(self.root)
        except ValueError:
            return None
        return relative.as_posix() if self._is_kept(relative) else None

    def _is_kept(self, relative: Path) -> bool:
        is_whole = bool(relative.parts) and relative.suffix != UNFINISHED
        return is_whole and self._is_tracked(relative)


def _held_by(read: Read, reads: Callable[[str], bool] = lambda name: True) -> dict[str, StoredFile]:
    """Give the files that a chain keeps, of those that are asked for."""
    files: dict[str, StoredFile] = {}
    for content in (read.snapshot, *(content for _, content in read.entries)):
        _apply(files, _files_of(content, reads))
    return files


def _files_of(
    content: Mapping[str, Any], reads: Callable[[str], bool]
) -> dict[str, StoredFile | None]:
    said = {name: each for name, each in content.get(_FILES, {}).items() if reads(name)}
    return {n: None if each is None else StoredFile.from_json(each) for n, each in said.items()}


def _apply(files: dict[str, StoredFile], said: Mapping[str, StoredFile | None]) -> None:
    for name, file in said.items():
        if file is None:
            files.pop(name, None)
        else:
            files[name] = file


def _is_below(name: str, directory: str) -> bool:
    return name == directory or name.startswith(directory + "/")
