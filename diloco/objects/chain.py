"""A chain of objects that one writer at a time can lengthen: the order of what is durable.

    CHAIN/log/0000000000000012                          entry 12; created, never replaced
    CHAIN/snapshot/0000000000000003-0000000000000010    of the writer that opened it with entry 3:
                                                        all that the entries up to 10 come to

Each is JSON that ends with a digest of the rest; what does not agree with it is read again.

Every entry has the number after the last one, and no store creates an object that is there: of two
writers one finds that the number is taken, and is *fenced*. It has written nothing since, and can
write nothing any more. A new writer begins with an entry that *opens* the chain; the one before
finds that entry in place of its own next one, after an hour, too, since entries that open the chain
are never removed. Others are, once an entry says which snapshot has what they came to: a writer
that was fenced before that entry has removed nothing.

A number that was removed can be created again, by one that read the chain before it was used. Then
there is a later entry: the opening does not count, and the one that made it looks again. Whose the
chain is says its last entry.

An entry whose creation was not acknowledged may be there. Its writer has told its callers that it
failed; if it is found there, the next one says that it is `void`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import blake3

from diloco.errors import ConfigError, Fenced
from diloco.objects.store import ObjectLost, ObjectStore, StoreAway

#: Key of an entry that opens the chain, of one that does not count, and of a snapshot's.
OPENED, VOID, _SNAPSHOT = "opened", "void", "snapshot"
#: Writer of an entry, and number of the entry with which it opened the chain.
_BY, _OF = "by", "of"
_ENTRY = re.compile(r"[0-9]{16}")
#: What the digest comes after.
_DIGEST = b', "digest": "'
#: Times that a chain is read again because its writer has put a snapshot in place of entries, or
#: other bytes came than were written.
_ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Read:
    """What a chain holds: a snapshot, the entries after it that count, and who opened it last.

    Args:
        snapshot: Of the chain up to some entry; empty: of its beginning.
        entries: Number and content of each after it that counts, ascending.
        number: Of the last entry, whether it counts or not; -1: there is none.
        opened: Of the entry that opened the chain for the writer of the last one; empty: nobody
            has.
    """

    snapshot: Mapping[str, Any]
    entries: tuple[tuple[int, Mapping[str, Any]], ...]
    number: int
    opened: Mapping[str, Any]


class Chain:
    """One chain; `open` it to write. One thread at a time."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        """Assign only."""
        self._store = store
        self._name = name
        self._writer = secrets.token_hex(8)
        self.number = self.opening = -1
        self._void: list[int] = []
        self._tried: set[bytes] = set()  # digests of what was tried at the next number
        self._openings: set[int] = set()
        self._start, self._kept = -1, ""  # the last entry that a snapshot has, and its name
        # What was read, until the chain is open: entries, and a snapshot with its name.
        self._known: dict[int, dict[str, Any]] = {}  # JSON values
        self._snapshot: tuple[str, dict[str, Any]] = "", {}
        self._damaged = ""

    # -- reading ---------------------------------------------------------------------------------

    def read(self) -> Read:
        """Read all of it; read again, only what is new.

        Raises:
            ObjectLost: If an entry of it is gone.
            StoreAway: If the store does not give it.
        """
        for _ in range(_ATTEMPTS):
            self._damaged = ""
            if (found := self._read()) is not None:
                return found
        if self._damaged:
            raise ObjectLost(
                f"{self._store.url}/{self._damaged} does not hold what was written: bring that "
                f"object back from a copy or a version of it"
            )
        raise ObjectLost(
            f"{self._store.url}/{self._name}/log lacks an entry: objects of the run were removed. "
            f"Bring them back (a version or a copy of the bucket)"
        )

    def _read(self) -> Read | None:
        """Read it; None if entries were replaced by a snapshot meanwhile, or one is lost."""
        numbers = self._numbers()
        new = [number for number in numbers if number not in self._known]
        bodies = self._store.get_all([self._entry(number) for number in new])
        for number, body in zip(new, bodies, strict=True):
            if body is None or (content := self._read_as(self._entry(number), body)) is None:
                continue
            self._known[number] = content
        if not self._known.keys() >= {*numbers}:  # the others need not be read again
            return None
        entries = {number: self._known[number] for number in numbers}
        void = {number for content in entries.values() for number in content.get(VOID, ())}
        counted = {n: content for n, content in entries.items() if n not in void}
        self._known = entries
        self._openings = {n for n, content in entries.items() if OPENED in content}
        start, name = -1, ""
        for content in counted.values():
            start, name = content.get(_SNAPSHOT, (start, name))
        last = numbers[-1] if numbers else -1
        if [n for n in numbers if n > start] != [*range(start + 1, last + 1)]:
            return None
        if name and self._snapshot[0] != name:
            there = self._store.get_large(where := f"{self._name}/snapshot/{name}")
            if there is None or (content := self._read_as(where, there)) is None:
                return None
            self._snapshot = name, content
        self._start, self._kept = start, name
        snapshot = self._snapshot[1] if name else {}
        opener = entries.get(entries[last][_OF], {}) if numbers else {OPENED: {}}
        if OPENED not in opener:
            return None
        after = tuple((n, content) for n, content in counted.items() if n > start)
        return Read(snapshot, after, last, opener[OPENED])

    def _read_as(self, name: str, body: bytes) -> dict[str, Any] | None:
        """Read what an object holds; None if it is not what was written."""
        if (content := unsealed(body)) is None:
            self._damaged = name
        return content

    # -- writing ---------------------------------------------------------------------------------

    def open(
        self, opening: Callable[[int], Mapping[str, Any]], check: Callable[[Read], None]
    ) -> Read:
        """Become its writer; the one before is fenced.

        Args:
            opening: Number of the entry that opens the chain -> what it says of the writer.
            check: Raises where the chain is not to be opened, as it is.

        Returns:
            What it held before.

        Raises:
            ConfigError: If the store replaces what is to be created.
            StoreAway: If the store does not answer.
        """
        while True:
            found = self.read()
            check(found)
            self.number, self.opening = found.number, found.number + 1
            try:
                self.append({OPENED: dict(opening(self.opening))})
            except Fenced:  # another one has written meanwhile
                self._tried.clear()
                continue
            if self._numbers()[-1] != self.opening:  # it was that of an entry that is gone
                continue
            if self._store.create(self._entry(self.opening), b"{}"):
                raise ConfigError(
                    f"{self._store.url} replaces objects that are to be created only where they "
                    f"are not there (If-None-Match: *): two machines could write the same run. "
                    f"Choose a store that honours it, as S3, GCS, Azure, R2 and MinIO do"
                )
            self._openings.add(self.opening)
            self._known, self._snapshot = {}, ("", {})
            return found

    def append(self, content: Mapping[str, Any]) -> int:
        """Add an entry; returns its number. It is durable then.

        Raises:
            Fenced: If another writer has opened the chain.
            StoreAway: If the store did not acknowledge it: it does not count.
        """
        while True:
            number = self.number + 1
            said = {**content, _BY: self._writer, _OF: self.opening}
            body = sealed({**said, **({VOID: self._void} if self._void else {})})
            if self._is_created(number, body):
                self.number = number
                self._void.clear()
                self._tried.clear()
                return number
            # What was not acknowledged is there, though its caller was told that it failed.
            self.number = number
            self._void.append(number)
            self._tried.clear()

    def _is_created(self, number: int, body: bytes) -> bool:
        """Create an entry; false if an earlier try with another content is there.

        Raises:
            Fenced: If another writer's is there.
            StoreAway: If the store does not say.
        """
        name, digest = self._entry(number), _digest(body)
        is_new = digest not in self._tried
        self._tried.add(digest)
        try:
            if self._store.create(name, body):
                return True
        except StoreAway as error:
            if is_new and error.is_unsent:
                self._tried.discard(digest)
            raise
        if (there := self._store.get(name)) is None or unsealed(there) is None:
            raise StoreAway(0, f"{self._store.url}/{name} is there, and cannot be read")
        if _digest(there) == digest:
            return True
        if _digest(there) in self._tried:
            return False
        raise Fenced(f"{self._store.url}/{name} is another writer's: {_who(there)}")

    def take_back(self, number: int) -> None:
        """Have the next entry say that an earlier one of this writer does not count."""
        self._void.append(number)

    def look(self) -> tuple[int, bytes | None, bytes | None]:
        """Read the next entry and the one that opened the chain, while another thread may write.

        Raises:
            StoreAway: If the store does not say.
        """
        number = self.number
        there = self._store.get(self._entry(number + 1))
        return number, there, self._store.get(self._entry(self.opening))

    def check(self, looked: tuple[int, bytes | None, bytes | None]) -> None:
        """Judge by a look whether another writer has opened the chain.

        Raises:
            Fenced: If one has.
            ObjectLost: If what this writer wrote is not there any more.
        """
        number, there, opening = looked
        is_next = number == self.number
        if there and is_next and _digest(there) not in self._tried and unsealed(there):
            name = self._entry(number + 1)
            raise Fenced(f"{self._store.url}/{name} is another writer's: {_who(there)}")
        if opening is None:
            raise ObjectLost(
                f"{self._store.url}/{self._entry(self.opening)} is not there any more: objects of "
                f"the run were removed. Bring them back (a version or a copy of the bucket); until "
                f"then the run is on this machine's disk alone (diloco backup)"
            )

    def lacks(self) -> str:
        """Name what is gone of it, while another thread may write; empty: nothing is.

        A snapshot of all so far makes up for that.

        Raises:
            StoreAway: If the store does not say.
        """
        start, kept, number = self._start, self._kept, self.number
        gone = {*range(start + 1, number + 1)}.difference(self._numbers())
        names = [self._entry(min(gone))] if gone else []
        if kept and self._store.size(snapshot := f"{self._name}/snapshot/{kept}") is None:
            names.append(snapshot)
        return names[0] if names and kept == self._kept else ""

    def put_snapshot(self, content: Mapping[str, Any]) -> None:
        """Have a snapshot of all so far take the place of the entries, but for those that open it.

        Raises:
            Fenced: If another writer has opened the chain: nothing was removed.
            StoreAway: If the store fails; what there is is whole at every moment.
        """
        number, of = self.number, f"{self.opening:016d}"
        name = f"{of}-{number:016d}"
        self._store.put(f"{self._name}/snapshot/{name}", sealed(content))
        self.append({_SNAPSHOT: [number, name]})
        self._start, self._kept = number, name
        kept = f"{self._name}/snapshot/{name}"
        older = [n for n in self._store.names(f"{self._name}/snapshot") if n < kept]
        done = [n for n in self._numbers() if n <= number and n not in self._openings]
        self._store.delete([*older, *map(self._entry, done)])

    def _entry(self, number: int) -> str:
        return f"{self._name}/log/{number:016d}"

    def _numbers(self) -> list[int]:
        """List the numbers of the entries, ascending; objects of others are passed over."""
        names = (name.rpartition("/")[2] for name in self._store.names(f"{self._name}/log"))
        return [int(name) for name in names if _ENTRY.fullmatch(name)]


def sealed(content: Mapping[str, Any]) -> bytes:
    """Write what an object of a chain says, which is not nothing, with its digest."""
    body = json.dumps(content).encode()
    return body[:-1] + _DIGEST + _digest(body).hex().encode() + b'"}'


def unsealed(body: bytes) -> dict[str, Any] | None:  # JSON values
    """Read it; None if it does not hold what was written."""
    start, _, told = body.rpartition(_DIGEST)
    if told != _digest(start + b"}").hex().encode() + b'"}':
        return None
    content: dict[str, Any] = json.loads(start + b"}")
    return content


def _digest(body: bytes) -> bytes:
    return blake3.blake3(body).digest()


def _who(body: bytes) -> str:
    """Name the writer of an entry, where it says so."""
    opened = json.loads(body).get(OPENED, {})
    return ", ".join(f"{key} {value}" for key, value in sorted(opened.items())) or "unknown"
