"""Objects of a chain that became it by a call, and of which files can be made: each by its digest.

    OPENING-DIGEST-RANDOM-N    piece N of something with that blake3, copied by the writer that
                               opened the chain with entry OPENING

No state of a store is here: who owns it says which objects its files are in, and removes what is
given back. Not safe for several threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from diloco.objects.stored_file import Part

#: Seconds for which what no file is made of can be reused.
KEPT_S = 3600.0
#: Parts of a name, and which of them is the digest.
_NAME_PARTS, _DIGEST = 4, 1


class ReusableObjects:
    """Knows in which objects something is that was sent once."""

    def __init__(self) -> None:
        """Know nothing."""
        self._parts: dict[str, Sequence[Part]] = {}
        self._until: dict[str, float] = {}  # of those that came lately, oldest first
        self._uses: Counter[str] = Counter()  # by files, of each digest

    def of(self, digest: str) -> Sequence[Part]:
        """Give the objects in which something is, one after the other; none: it is not known."""
        return self._parts.get(digest, ())

    def add(self, digest: str, parts: Sequence[Part], now: float) -> list[Part]:
        """Know where something is; returns objects that nothing needs any more.

        Those are the new ones, where it is known in others.
        """
        unneeded = self._expired(now)
        if digest in self._parts:
            return [*unneeded, *parts]
        self._parts[digest], self._until[digest] = parts, now + KEPT_S
        return unneeded

    def used(self, parts: Iterable[Part]) -> None:
        """Note that a file is made of these, among other things."""
        found: dict[str, list[Part]] = {}
        for part in parts:
            if digest := _digest_in(part):
                found.setdefault(digest, []).append(part)
        for digest, pieces in found.items():
            self._parts.setdefault(digest, pieces)
            self._uses[digest] += 1

    def unused(self, parts: Iterable[Part]) -> None:
        """Note that such a file is no more."""
        for digest in {_digest_in(part) for part in parts} - {""}:
            self._uses[digest] -= 1
            if self._uses[digest] <= 0:
                del self._uses[digest]
                if digest not in self._until:
                    self._parts.pop(digest, None)

    def removed(self, objects: set[str]) -> None:
        """Forget what objects held that are removed."""
        for name in objects:
            if digest := _digest_in(Part(name, 0, 0)):
                parts = self._parts.get(digest, ())
                if any(part.object_name == name for part in parts):
                    del self._parts[digest]
                    self._until.pop(digest, None)

    def _expired(self, now: float) -> list[Part]:
        """Forget what came long ago and is in no file."""
        unneeded: list[Part] = []
        while self._until and self._until[digest := next(iter(self._until))] < now:
            del self._until[digest]
            if not self._uses[digest]:
                unneeded += self._parts.pop(digest, ())
        return unneeded


def _digest_in(part: Part) -> str:
    """Read the digest out of an object's name; empty: it is no such object."""
    names = part.object_name.split("-")
    return names[_DIGEST] if len(names) == _NAME_PARTS else ""
