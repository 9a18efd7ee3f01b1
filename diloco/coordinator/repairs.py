"""Damaged fragments that an operator has repaired from an island: a pure machine.

The syncer is told with every report which island holds what it has lost, and what of it is indexed,
until it says that the fragment is whole.

    repair/P    name of the island; null: nothing is asked for
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from diloco.coordinator.admission import Entries

_KIND = "repair"


class Repairs:
    """Those of one run.

    Attributes:
        asked: Fragment -> island that it is to be repaired from.
        damaged: Fragments that their syncer does not serve, as it said last; not durable.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.asked: dict[int, str] = {}
        self.damaged: set[int] = set()

    @property
    def against_stop(self) -> str:
        """Why no run checkpoint can be taken now, and what to type; empty: it can."""
        if not self.damaged:
            return ""
        damaged = min(self.damaged)
        return (
            f"fragment {damaged} is damaged, and no checkpoint is kept without it: repair it "
            f"(diloco repair HOST:PORT --fragment {damaged} --from-island NAME), or stop without "
            f"one (diloco stop HOST:PORT)"
        )

    def apply(self, entries: Iterable[tuple[str, str]]) -> None:
        """Take over what is durable; entries of others are passed over."""
        for key, value in entries:
            kind, _, name = key.partition("/")
            if kind == _KIND and (island := json.loads(value)) is not None:
                self.asked[int(name)] = island
            elif kind == _KIND:
                self.asked.pop(int(name), None)

    def ask(self, fragment_id: int, island: str) -> Entries:
        """Have a fragment repaired from an island."""
        return ((f"{_KIND}/{fragment_id}", json.dumps(island)),)

    def stands(self, fragment_id: int, *, is_damaged: bool) -> Entries:
        """Take note of what the syncer says of a fragment; entries when it is whole again."""
        if is_damaged:
            self.damaged.add(fragment_id)
            return ()
        self.damaged.discard(fragment_id)
        return ((f"{_KIND}/{fragment_id}", "null"),) if fragment_id in self.asked else ()
