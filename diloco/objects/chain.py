"""A chain of objects that one writer at a time can lengthen: the order of what is durable.

    CHAIN/log/0000000000000012         entry 12, JSON; created, never replaced
    CHAIN/snapshot/0000000000000010    all that the entries up to 10 come to

Every entry has the number after the last one, and no store creates an object twice: of two writers
one finds that the number is taken, and is *fenced*. It has written nothing since, and can write
nothing any more. A new writer begins with an entry that *opens* the chain; the one before
finds that entry in place of its own next one, after an hour, too: entries that open the chain stay
when a snapshot takes the place of the others.

An entry whose creation was not acknowledged may be there. Its writer has told its callers that it
failed; if it is found there, the next one says that it is `void`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diloco.errors import Fenced
from diloco.objects.store import ObjectStore, StoreAway

#: Key of an entry that opens the chain, and of the one that does not count.
OPENED, VOID = "opened", "void"
_BY = "by"
#: Times that a chain is read again because its writer has put a snapshot in place of entries.
_ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Read:
    """What a chain holds: a snapshot, the entries after it that count, and who opened it last.

    Args:
        start: Number up to which the snapshot goes; -1: there is none.
        snapshot: Of the chain up to there; empty: of its beginning.
        entries: Number and content of each that counts, ascending.
        number: Of the last entry, whether it counts or not; -1: there is none.
        opened: Of the last entry that opened the chain; empty: nobody has.
        openings: Numbers of all entries that did, those before the snapshot too.
    """

    start: int
    snapshot: Mapping[str, Any]
    entries: tuple[tuple[int, Mapping[str, Any]], ...]
    number: int
    opened: Mapping[str, Any]
    openings: frozenset[int]


class Chain:
    """One chain; `open` it to write. One thread at a time."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        """Assign only."""
        self._store = store
        self._name = name
        self._writer = secrets.token_hex(8)
        self.number = -1
        self._void: list[int] = []
        self._tried: set[bytes] = set()  # at the next number
        self._openings: set[int] = set()

    def read(self) -> Read:
        """Read all of it.

        Raises:
            StoreAway: If the store does not give it, or an object of it is gone.
        """
        for _ in range(_ATTEMPTS):
            if (found := self._read()) is not None:
                return found
        raise StoreAway(0, f"{self._store.url}/{self._name}: an entry of the chain is not there")

    def _read(self) -> Read | None:
        """Read it; None if entries were replaced by a snapshot meanwhile, or one is lost."""
        start, snapshot = -1, b"{}"
        if snapshots := self._store.names(f"{self._name}/snapshot"):
            start = _number(snapshots[-1])
            if (content := self._store.get(snapshots[-1])) is None:
                return None
            snapshot = content
        every = self._store.names(f"{self._name}/log")
        names = [name for name in every if _number(name) > start]
        if [_number(name) for name in names] != [*range(start + 1, start + 1 + len(names))]:
            return None
        bodies = self._store.get_all(names)
        if None in bodies:
            return None
        contents = [json.loads(body or b"{}") for body in bodies]
        void = {number for content in contents for number in content.get(VOID, ())}
        base = json.loads(snapshot)
        opened = base.get(OPENED, {})
        openings = {_number(name) for name in every if _number(name) <= start}
        counted = [(start + 1 + n, content) for n, content in enumerate(contents)]
        for number, content in counted:
            if OPENED in content:
                opened = content[OPENED]
                openings.add(number)
        return Read(
            start,
            base,
            tuple((number, content) for number, content in counted if number not in void),
            start + len(names),
            opened,
            frozenset(openings),
        )

    def open(
        self, opening: Callable[[int], Mapping[str, Any]], check: Callable[[Read], None]
    ) -> Read:
        """Become its writer; the one before is fenced.

        Args:
            opening: Number of the entry that opens the chain -> what it says of the writer.
            check: Raises where the chain is not to be opened, as it is.

        Returns:
            What it held before.
        """
        while True:
            found = self.read()
            check(found)
            self.number = found.number
            try:
                self.append({OPENED: dict(opening(found.number + 1))})
            except Fenced:  # another one has written meanwhile
                self._tried.clear()
                continue
            self._openings = {*found.openings, self.number}
            return found

    def append(self, content: Mapping[str, Any]) -> int:
        """Add an entry; returns its number. It is durable then.

        Raises:
            Fenced: If another writer has opened the chain.
            StoreAway: If the store did not acknowledge it: it does not count.
        """
        while True:
            number = self.number + 1
            said = {**content, _BY: self._writer, **({VOID: self._void} if self._void else {})}
            body, name = json.dumps(said, sort_keys=True).encode(), self._entry(number)
            self._tried.add(body)
            if not self._store.create(name, body) and (there := self._store.get(name)) != body:
                if there not in self._tried:
                    raise Fenced(f"{self._store.url}/{name} is another writer's: {_who(there)}")
                # What was not acknowledged is there, though its caller was told that it failed.
                self.number = number
                self._void.append(number)
                self._tried.clear()
                continue
            self.number = number
            self._void.clear()
            self._tried.clear()
            return number

    def take_back(self, number: int) -> None:
        """Have the next entry say that an earlier one of this writer does not count."""
        self._void.append(number)

    def check_next(self) -> None:
        """Look whether another writer has opened the chain.

        Raises:
            Fenced: If one has.
            StoreAway: If the store does not say.
        """
        name = self._entry(self.number + 1)
        if (there := self._store.get(name)) is not None and there not in self._tried:
            raise Fenced(f"{self._store.url}/{name} is another writer's: {_who(there)}")

    def put_snapshot(self, number: int, content: Mapping[str, Any]) -> None:
        """Have a snapshot take the place of the entries up to a number, but for those that open it.

        Raises:
            StoreAway: If the store fails; what there is is whole at every moment.
        """
        own = f"{self._name}/snapshot/{number:016d}"
        self._store.create(own, json.dumps(content, sort_keys=True).encode())
        older = [name for name in self._store.names(f"{self._name}/snapshot") if name < own]
        entries = [n for n in self._store.names(f"{self._name}/log") if _number(n) <= number]
        done = [name for name in entries if _number(name) not in self._openings]
        self._store.delete([*older, *done])

    def _entry(self, number: int) -> str:
        return f"{self._name}/log/{number:016d}"


def _number(name: str) -> int:
    return int(name.rpartition("/")[2])


def _who(body: bytes | None) -> str:
    """Name the writer of an entry, where it says so."""
    opened = json.loads(body or b"{}").get(OPENED, {})
    return ", ".join(f"{key} {value}" for key, value in sorted(opened.items())) or "unknown"
