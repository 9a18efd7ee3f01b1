"""Cuts: run checkpoints of islands that stand at different inner steps, a pure machine.

    named      the islands at work are asked for their parts; each takes it at its next step
    taken      nobody owes one any more: the syncers are asked to keep a version of each fragment
               that no part is ahead of
    complete   they do; a run can be resumed from it

An island that loses its lease, leaves, cannot write, or says nothing of the cut for too long
(`cut_patience`) owes nothing any more: the cut goes on without it. One that has a part keeps it
there, whatever becomes of it; but a part that is ahead of what the syncers have, which have lost a
version then, does not count. A cut without any part is aborted. There is one at a time; a
last one, after which everybody leaves, takes the place of another. Numbers are counted over all
timelines, so that no directory is ever written twice.

    cut/N            a `Cut`; null: forgotten
    part/N/ISLAND    a `Part` that was taken after that; null: it is in the cut, or does not count

Source: PROTOCOL.md, "Cuts".
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from diloco.protocol.run.admission import Entries

_KIND, _OF_PART = "cut", "part"
#: Cuts that are remembered, the newest, besides those from which a run can be resumed.
_REMEMBERED = 4


@dataclass(frozen=True, slots=True)
class Part:
    """What an island has written.

    Args:
        inner_step: At which it stood.
        versions: That it held, by fragment.
        text: Slot of the text, as digits -> how far it was drawn, in JSON values.
    """

    inner_step: int
    versions: tuple[int, ...]
    text: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut.

    Args:
        number: From 1 on.
        timeline: In which it was named.
        tokens: That all fragments had merged when it was named; a last one, when it was complete.
        told: Slot of the text, as digits -> how far it was known to be drawn when it was named.
        is_last: Whether everybody leaves after it.
        owing: Islands that have not written their part.
        parts: By island.
        is_complete: Whether the syncers keep its versions.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # of a newer program: refused

    number: int
    timeline: int
    tokens: int
    told: Mapping[str, Any]
    is_last: bool
    owing: tuple[str, ...]
    parts: Mapping[str, Part] = field(default_factory=dict)
    is_complete: bool = False

    @property
    def is_void(self) -> bool:
        """Whether it was aborted."""
        return not (self.owing or self.parts)

    @property
    def is_open(self) -> bool:
        """Whether it is under way."""
        return not (self.is_void or self.is_complete)

    @property
    def is_taken(self) -> bool:
        """Whether only the syncers' part is missing."""
        return bool(self.parts) and not (self.owing or self.is_complete)

    @property
    def versions(self) -> tuple[int, ...]:
        """Newest version of each fragment that a part holds."""
        return tuple(map(max, zip(*(part.versions for part in self.parts.values()), strict=True)))

    def with_part(self, island: str, part: Part | None) -> Cut:
        """Return it once an island owes nothing more; None: there is no part of it."""
        parts = self.parts if part is None else {**self.parts, island: part}
        return replace(self, owing=tuple(o for o in self.owing if o != island), parts=parts)


_CUTS, _PARTS = TypeAdapter(Cut), TypeAdapter(Part)


class Cuts:
    """All cuts of one run.

    Attributes:
        given: Numbers of those of which islands take inner optimizers now; not durable.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._cuts: dict[int, Cut] = {}
        self.given: set[int] = set()

    def forked(self) -> Cuts:
        """Return a copy; what is applied to it changes nothing here."""
        other = copy.copy(self)
        other._cuts = self._cuts.copy()
        return other

    def apply(self, entries: Iterable[tuple[str, str]]) -> None:
        """Take over what is durable; entries of others are passed over."""
        parts = []
        for key, value in entries:
            kind, _, name = key.partition("/")
            if kind == _OF_PART and value != "null":
                parts.append((*name.split("/"), value))
            elif kind == _KIND and value == "null":
                self._cuts.pop(int(name), None)
            elif kind == _KIND:
                self._cuts[int(name)] = _CUTS.validate_python(json.loads(value))
        for number, island, value in parts:  # a restart gives them in any order
            if (cut := self._cuts.get(int(number))) is not None and island in cut.owing:
                part = _PARTS.validate_python(json.loads(value))
                self._cuts[cut.number] = cut.with_part(island, part)

    def __getitem__(self, number: int) -> Cut:
        """Return a cut by its number."""
        return self._cuts[number]

    def find(self, number: int) -> Cut | None:
        """Return a cut by its number; None: it is not remembered."""
        return self._cuts.get(number)

    def newest(self, timeline: int) -> Cut | None:
        """Return the cut that was named last in a timeline; None: none was."""
        number = max((n for n, cut in self._cuts.items() if cut.timeline == timeline), default=0)
        return self._cuts.get(number)

    def open(self, timeline: int) -> Cut | None:
        """Return the cut that is under way; None: none is."""
        cut = self.newest(timeline)
        return cut if cut is not None and cut.is_open else None

    def is_due(self, timeline: int, begun_at: int, tokens: int, every_tokens: int) -> bool:
        """Whether the next one belongs here: one in so many merged tokens, one at a time.

        None after a last one, whatever became of it: who is there is to leave.

        `begun_at` is the number of the cut that the timeline began from; 0: of none.
        """
        newest = self.newest(timeline)
        if not every_tokens or (newest is not None and (newest.is_last or newest.is_open)):
            return False
        return tokens // every_tokens > self._merged(timeline, begun_at) // every_tokens

    def _merged(self, timeline: int, begun_at: int) -> int:
        """Tokens that were merged when the last cut of a timeline was named, or at its begin."""
        cut = self.newest(timeline) or self._cuts.get(begun_at)
        return 0 if cut is None else cut.tokens

    def named(
        self,
        islands: Collection[str],
        *,
        timeline: int,
        begun_at: int = 0,
        tokens: int,
        told: Mapping[str, Any],
        is_last: bool,
    ) -> Entries:
        """Ask islands for their parts; one that is under way is aborted.

        Fewer tokens than at an earlier cut are not known yet, as after a start of the coordinator.
        """
        number = max(self._cuts, default=0) + 1
        tokens = max(tokens, self._merged(timeline, begun_at))
        cut = Cut(number, timeline, tokens, told, is_last, tuple(sorted(islands)))
        earlier = self.open(timeline)
        return (
            *(() if earlier is None else self._written(replace(earlier, owing=(), parts={}))),
            *cut_entry(cut),
        )

    def taken(self, timeline: int, island: str, number: int, part: Part | None) -> Entries:
        """Record an island's part of the cut that is under way; None: it cannot write it."""
        cut = self.open(timeline)
        if cut is None or cut.number != number or island not in cut.owing:
            return ()
        if part is None:
            return self._written(cut.with_part(island, None))
        return ((f"{_OF_PART}/{number}/{island}", _as_json(part)),)

    def without(self, timeline: int, holders: Collection[str]) -> Entries:
        """Let the cut go on without those who owe a part and do not hold a lease."""
        cut = self.open(timeline)
        if cut is None or not (lost := set(cut.owing).difference(holders)):
            return ()
        return self._written(replace(cut, owing=tuple(o for o in cut.owing if o not in lost)))

    def within(self, timeline: int, newest: Mapping[int, int]) -> Entries:
        """Let the cut go on without the parts that hold what no syncer has any more.

        Args:
            timeline: Of now.
            newest: Fragment -> its newest version at its syncer.
        """
        cut = self.open(timeline)
        if cut is None:
            return ()
        parts = {
            island: part
            for island, part in cut.parts.items()
            if all(part.versions[p] <= version for p, version in newest.items())
        }
        return () if parts.keys() == cut.parts.keys() else self._written(replace(cut, parts=parts))

    def completed(self, number: int, tokens: int) -> Entries:
        """Record that the syncers keep the versions of a cut.

        What was merged while the parts of a last one were written is in it, and a run that goes on
        from there has cut it.
        """
        cut = self._cuts[number]
        tokens = max(cut.tokens, tokens) if cut.is_last else cut.tokens
        return self._written(replace(cut, tokens=tokens, is_complete=True))

    def forgotten(self, needed: Collection[int]) -> Entries:
        """Forget all but the newest cuts, those that are given, and those that are `needed`."""
        old = sorted(self._cuts)[:-_REMEMBERED]
        kept = self.given.union(needed)
        gone = [number for number in old if number not in kept]
        return tuple(e for n in gone for e in ((f"{_KIND}/{n}", "null"), *self._without_parts(n)))

    def asked_of(self, timeline: int, island: str) -> tuple[int, bool]:
        """Return the cut that an island is to take, and whether it leaves then; 0: none."""
        cut = self.open(timeline)
        if cut is None or island not in cut.owing:
            return 0, False
        return cut.number, cut.is_last

    def taken_back(self, timeline: int) -> Entries:
        """Let the run go on after a last cut, or with one that is under way as an ordinary one."""
        cut = self.newest(timeline)
        if cut is None or not cut.is_last or cut.is_complete:
            return ()
        return self._written(replace(cut, is_last=False))

    def last(self, timeline: int) -> Cut | None:
        """Return the cut with which the run stops, unless it was aborted."""
        cut = self.newest(timeline)
        return cut if cut is not None and cut.is_last and not cut.is_void else None

    def _written(self, cut: Cut) -> Entries:
        """Write a cut as a whole, with the parts that had entries of their own."""
        return (*cut_entry(cut), *self._without_parts(cut.number))

    def _without_parts(self, number: int) -> Entries:
        return tuple((f"{_OF_PART}/{number}/{i}", "null") for i in self._cuts[number].parts)


def cut_entry(cut: Cut) -> Entries:
    """Write a cut as its journal entry."""
    return ((f"{_KIND}/{cut.number}", _as_json(cut)),)


def _as_json(value: Cut | Part) -> str:
    """Write what a thousand islands said without a copy of it."""
    return json.dumps(
        value, default=lambda each: {f.name: getattr(each, f.name) for f in fields(each)}
    )
