"""Tracks damaged fragments, and the islands that they are repaired from: pure.

A syncer is told the indexed header of what it has lost, and takes it from whichever island holds
it. An operator may name the island that is asked first; that is repeated with every report until
the syncer says that the fragment is whole.

    repair/P    name of the island; null: none is named
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from dataclasses import dataclass

from diloco.bounded_text import MOST_NAMES
from diloco.protocol.run.admission import Entries

_KIND = "repair"


@dataclass(frozen=True, slots=True)
class LostVersion:
    """What the syncer of a damaged fragment says.

    Args:
        version: That it cannot read.
        holders: Islands that hold it, `MOST_NAMES` at most.
        wants_header: Whether the syncer does not have its indexed header yet.
    """

    version: int = 0
    holders: tuple[str, ...] = ()
    wants_header: bool = False


class Repairs:
    """Those of one run.

    Attributes:
        asked: Fragment -> island that it is to be repaired from first.
        damaged: Fragments that their syncer does not serve, and what it said last; not durable.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.asked: dict[int, str] = {}
        self.damaged: dict[int, LostVersion] = {}

    @property
    def against_stop(self) -> str:
        """Why no run checkpoint can be taken now, and what to type; empty: it can."""
        if not self.damaged:
            return ""
        damaged = min(self.damaged)
        return (
            f"fragment {damaged} is damaged, and no checkpoint is kept without it: it is repaired "
            f"as soon as an island that holds what was lost calls (diloco status HOST:PORT); or "
            f"stop without one (diloco stop HOST:PORT)"
        )

    def forked(self) -> Repairs:
        """Return a copy; what is applied to it changes nothing here."""
        other = copy.copy(self)
        other.asked = self.asked.copy()
        return other

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

    def stands(self, fragment_id: int, lost: LostVersion | None) -> Entries:
        """Record what the syncer says of a fragment; entries when it is whole again.

        Args:
            fragment_id: The fragment.
            lost: What it has lost; None: it is whole.
        """
        if lost is not None:
            self.damaged[fragment_id] = lost
            return ()
        self.damaged.pop(fragment_id, None)
        return ((f"{_KIND}/{fragment_id}", "null"),) if fragment_id in self.asked else ()

    def refusal(self, fragment_id: int, island: str) -> str:
        """Why a damaged fragment cannot be repaired from an island; empty: it can."""
        lost = self.damaged[fragment_id]
        if island in lost.holders or len(lost.holders) >= MOST_NAMES:
            return ""  # where others hold it, too, the syncer finds out
        who = (
            f"{', '.join(lost.holders)} {'does' if len(lost.holders) == 1 else 'do'}, and it is "
            f"taken from there without a command"
            if lost.holders
            else "no island that has called its syncer does; the first that does is asked for it "
            "without a command. If none will, resume a checkpoint: diloco coordinator RUN.toml "
            "--resume"
        )
        return f"{island} does not hold version {lost.version} of fragment {fragment_id}: {who}"
