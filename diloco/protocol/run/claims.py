"""Shares the slots of the text out to islands, and counts how far each is drawn: pure.

Every slot has at most one holder. It goes on to another where the holder has lost its lease or has
left: at once, from the last position that was told, to the live island with the fewest slots. Where
a live island has two slots more than another, as after a join, one is asked back: its holder draws
no more from it and tells the final position, then the other goes on there, and nothing is repeated.

    told        position of a slot by its holder, under the grant by which it holds it
    grant       counter of the slot's holders: what an earlier holder tells does not count
    heir        who gets the slot once its holder has told the final position
    revision    counter of all changes of holders and heirs: who knows the newest needs no news

An island of the file that has not joined yet keeps its slots, but for what others would have less
of. With nobody live all stay as they are. What must never be forgotten comes back as entries, a
key-value pair a slot, for the caller to write durably and then to apply.

Source: PROTOCOL.md, "Shares of the text"; `diloco.protocol.run.slots` says what a slot is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import asdict, dataclass, replace
from typing import Any

from diloco.bounded_text import read_peer_json
from diloco.errors import ConfigError
from diloco.protocol.run.slots import SlotPosition

Entries = tuple[tuple[str, str], ...]

_KIND = "slot"
#: Characters of all positions together: they travel in one message to anyone who inherits all
#: slots.
_MOST_POSITIONS = 1 << 19
#: Draws that a slot may be ahead of what was told last: no island makes more while its coordinator
#: is away. Anyone who inherits the slot goes on from there, and tells it in turn.
_MOST_UNTOLD = 1 << 32


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot: who draws from it, who will, since which revision, and how far it is drawn."""

    holder: str
    grant: int = 0
    heir: str = ""
    revision: int = 0
    position: Mapping[str, Any] | None = None

    @property
    def told(self) -> Mapping[str, Any]:
        """How far it is known to be drawn: at its start, unless somebody has told."""
        return self.position or SlotPosition().as_json()

    @property
    def destined(self) -> str:
        """Who has it, or will have it once it is told."""
        return self.heir or self.holder


class Claims:
    """All slots of one run.

    Attributes:
        slots: By index.
        revision: Counter of all changes of holders and heirs.
    """

    def __init__(self, num_slots: int, islands: Iterable[str]) -> None:
        """Share the slots out among the configured islands in turn; `num_slots` is not less."""
        names = sorted(islands)
        self.slots = tuple(Slot(names[slot % len(names)]) for slot in range(num_slots))
        self.revision = 0
        self._digits = frozenset(map(str, range(num_slots)))

    @property
    def positions(self) -> dict[str, Mapping[str, Any]]:
        """How far each slot is known to be drawn: slot as digits -> position in JSON values."""
        return {str(number): slot.told for number, slot in enumerate(self.slots)}

    def apply(self, entries: Iterable[tuple[str, str]]) -> None:
        """Take over what is durable; entries of others are passed over.

        Raises:
            ConfigError: If the text was divided into another number of slots.
        """
        slots = list(self.slots)
        for key, value in entries:
            kind, _, number = key.partition("/")
            if kind == _KIND:
                saved = json.loads(value)
                if (there := saved.pop("num_slots")) != len(slots):
                    raise ConfigError(
                        f"run.max_islands: {len(slots)} here, and the text of this run was divided "
                        f"for {there} islands for ever: set run.max_islands = {there}, or start a "
                        f"new run from the weights: diloco export"
                    )
                slots[int(number)] = slot = Slot(**saved)
                self.revision = max(self.revision, slot.revision)
        self.slots = tuple(slots)

    def shared_out(self, live: Set[str], awaited: Set[str] = frozenset()) -> Entries:
        """Give every slot a live holder, and the live about equally many.

        Args:
            live: Islands that hold a lease.
            awaited: Islands that have not joined yet and keep as much as the live have.
        """
        if not live:
            return ()
        slots, revision = list(self.slots), self.revision + 1
        loads = Counter(slot.destined for slot in slots)

        def change(number: int, slot: Slot) -> None:
            loads[slots[number].destined] -= 1
            slots[number] = slot
            loads[slot.destined] += 1

        def by_load(island: str) -> tuple[int, str]:
            return loads[island], island

        for number in range(len(slots)):
            if slots[number].heir and slots[number].heir not in live:
                change(number, replace(slots[number], heir="", revision=revision))
            slot = slots[number]
            if slot.holder not in live and (slot.heir or slot.holder not in awaited):
                holder = slot.heir or min(live, key=by_load)
                change(
                    number, replace(slot, holder=holder, grant=revision, heir="", revision=revision)
                )
        while True:
            least, most = min(live, key=by_load), max((*live, *awaited), key=by_load)
            if loads[most] - loads[least] < 2:
                return self._changes(enumerate(slots))
            # What it does not have yet goes first, so that nobody is left without any slot.
            number = max(
                (number for number, slot in enumerate(slots) if slot.destined == most),
                key=lambda number: (bool(slots[number].heir), number),
            )
            slot = slots[number]
            if slot.holder in awaited:  # it has not begun
                begun = Slot(least, revision, revision=revision, position=slot.position)
                change(number, begun)
            else:
                heir = "" if slot.holder == least else least
                change(number, replace(slot, heir=heir, revision=revision))

    def told(self, island: str, said: Mapping[int, Mapping[str, Any]]) -> Entries:
        """Record how far an island has drawn its slots; what is older changes nothing.

        Who is to have which slot stays as it is: nothing else follows from it.

        Args:
            island: Who says so; its newest start.
            said: What `read_word` has given.
        """
        slots, revision = dict[int, Slot](), self.revision + 1
        for number, word in said.items():
            slot = self.slots[number]
            if (slot.holder, slot.grant) != (island, word["grant"]):
                continue  # it was taken away: its next owner began where it had been told
            slot = replace(slot, position=max(slot.told, word["position"], key=_num_drawn))
            if word["is_final"] and slot.heir:
                slot = replace(slot, holder=slot.heir, grant=revision, heir="", revision=revision)
            slots[number] = slot
        return self._changes(slots.items())

    def restored(
        self,
        told: Mapping[str, Mapping[str, Any]],
        parts: Collection[Mapping[str, Mapping[str, Any]]],
    ) -> Entries:
        """Let every slot go on where it stood in the checkpoint that is resumed.

        One that is in several parts changed hands between them, and goes on from the earlier: what
        was drawn after it is in no part's weights. One that is in no part (its island died or could
        not write, or it was on its way to another) goes on from where it was known to be when the
        checkpoint was named. So nothing is left out, and what is drawn again was drawn since the
        last word before the naming. What an earlier timeline's starts still tell does not count.

        Args:
            told: Slot as digits -> position in JSON values, when the checkpoint was named.
            parts: Of each island, slot as digits -> position in JSON values.
        """
        positions = dict(told)
        for number in positions:
            found = [part[number] for part in parts if number in part]
            positions[number] = min(found, key=_num_drawn, default=positions[number])
        revision = self.revision + 1
        slots = (
            replace(slot, position=positions[str(n)], heir="", grant=revision, revision=revision)
            for n, slot in enumerate(self.slots)
        )
        return self._changes(enumerate(slots))

    def read_word(self, position_json: str) -> tuple[int, dict[int, dict[str, Any]]]:
        """Read what an island says of its slots: the newest revision it knows, and positions.

        Raises:
            ValueError: If it is nothing that an island says.
        """
        try:
            said = read_peer_json(position_json)
            revision, words = said["revision"], said["slots"]
            found = {}
            for number, word in words.items():
                slot, grant, is_final = int(number), word["grant"], word["is_final"]
                position = SlotPosition.from_json(word["position"])
                size, most = len(json.dumps(position.as_json())), _MOST_POSITIONS // len(self.slots)
                if size > most:
                    raise ValueError(f"a position of {size} characters; {most} are allowed")
                if not (0 <= slot < len(self.slots) and type(grant) is int):
                    raise ValueError(f"slot {slot} of {len(self.slots)}")
                self._check_progress(slot, position)
                if type(is_final) is not bool:
                    raise ValueError("is_final is true or false")
                found[slot] = {
                    "grant": grant,
                    "is_final": is_final,
                    "position": position.as_json(),
                }
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if type(revision) is not int:
            raise ValueError("the revision is a number")
        return revision, found

    def read_positions(self, text_json: str) -> dict[str, dict[str, Any]]:
        """Read how far slots were drawn when a checkpoint was written; empty: nothing is said.

        Raises:
            ValueError: If it is nothing that an island says.
        """
        said = read_peer_json(text_json or "{}")
        if not isinstance(said, dict):
            raise ValueError("positions are an object")
        if odd := said.keys() - self._digits:
            raise ValueError(f"slot {min(odd)} of {len(self.slots)}")
        found = {text: SlotPosition.from_json(value) for text, value in said.items()}
        for text, position in found.items():
            self._check_progress(int(text), position)
        return {text: position.as_json() for text, position in found.items()}

    def _check_progress(self, number: int, position: SlotPosition) -> None:
        told = _num_drawn(self.slots[number].told)
        if position.num_drawn > told + _MOST_UNTOLD:
            raise ValueError(
                f"slot {number}: {position.num_drawn} draws, {told} were told before; at most "
                f"{_MOST_UNTOLD} more are believed"
            )

    def of(self, island: str) -> str:
        """Say which slots an island is to draw from and where from, and which it owes: JSON.

        One that is asked back is owed until its final position was told.
        """
        said: dict[str, dict[str, Any]] = {"slots": {}, "owed": {}}
        for number, slot in enumerate(self.slots):
            if slot.holder == island:
                claim = {"grant": slot.grant, "position": slot.told}
                said["owed" if slot.heir else "slots"][str(number)] = claim
        return json.dumps({"revision": self.revision, **said})

    def _changes(self, slots: Iterable[tuple[int, Slot]]) -> Entries:
        return tuple(
            (f"{_KIND}/{number}", json.dumps({**asdict(slot), "num_slots": len(self.slots)}))
            for number, slot in slots
            if slot is not self.slots[number] and slot != self.slots[number]
        )


def _num_drawn(position: Mapping[str, Any]) -> int:
    return SlotPosition.from_json(position).num_drawn
