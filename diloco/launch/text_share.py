"""One rank's part in sharing out the text: slots come and go between two inner steps.

Only in runs in which nobody waits: elsewhere an island has one slot for ever. The leader tells the
coordinator how far each slot has been drawn, each time half of `data.handover_samples` are, and
hears which slots are whose; all ranks of the island change at one inner step. A slot that is asked
back is let go at once, and its final position told until the coordinator has taken note.

`say` and `hear` belong to the thread of the network, all else to the training thread; what both see
is replaced whole.

Source: protocol.md section 9.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from diloco.data.batches import Batches
from diloco.data.claims import SlotPosition
from diloco.sync.groups import Groups
from diloco.telemetry.events import Event, SlotDrawn

logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class _Slot:
    """A slot that this start draws from, or has let go and still owes the final position of."""

    grant: int
    begun: Mapping[str, int]
    position: SlotPosition
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class _Word:
    """What there is to say: slots by number, as they are under a revision of who holds what."""

    revision: int
    slots: Mapping[int, _Slot]

    @property
    def held(self) -> dict[int, SlotPosition]:
        """Slots that are drawn from, and where they stand."""
        return {number: s.position for number, s in self.slots.items() if not s.is_final}

    @property
    def drawn(self) -> dict[tuple[int, int], int]:
        """Draws by slot and grant, those of others before included."""
        return {(number, s.grant): s.position.num_drawn for number, s in self.slots.items()}

    def growth(self, before: Mapping[tuple[int, int], int]) -> int:
        """Add up what was drawn since `before`; of a slot that is not in it, since it was taken."""
        begun = {(number, s.grant): sum(s.begun.values()) for number, s in self.slots.items()}
        return sum(drawn - before.get(key, begun[key]) for key, drawn in self.drawn.items())


class TextShare:
    """Slots of one rank; every rank of the island makes the same calls."""

    def __init__(
        self,
        batches: Batches,
        *,
        groups: Groups,
        handover_samples: int,
        samples_per_draw: int,
        on_event: Callable[[Event], None],
        check: Callable[[], None],
    ) -> None:
        """Assign only.

        Args:
            batches: The island's text.
            groups: The island's ranks.
            handover_samples: How many samples another may repeat.
            samples_per_draw: Samples of one draw: 1, of the standard library a batch.
            on_event: Hears, on the leader, what was drawn.
            check: Called while the island waits for a slot; raises when it must not go on.
        """
        self._batches = batches
        self._groups = groups
        self._most_untold = max(1, handover_samples // (2 * samples_per_draw))
        self._on_event = on_event
        self._check = check
        self._word = _Word(-1, {})
        self._is_last = False
        self._noted: Mapping[tuple[int, int], int] = {}  # in the last events
        self._news = ""  # what was heard and is not taken up
        self._said: Mapping[tuple[int, int], int] = {}  # in the report under way
        self._told: Mapping[tuple[int, int], int] = {}  # in those that were answered

    # -- the training thread -----------------------------------------------------------------------

    def take_up(self, claims_json: str, *, inner_step: int) -> None:
        """Draw from the slots of the join's answer; waits where others must let go of one first.

        Raises:
            ConfigError: If the text is not what a position was written for.
        """
        self._take(claims_json, inner_step)
        self._insist_on_slots(inner_step)

    def settle(self, inner_step: int) -> None:
        """Note how far the text is drawn after an inner step, and take up what was heard."""
        self._note(inner_step)
        if self._groups.sum([int(bool(self._news))])[0]:
            self._take(self._groups.leader_says("heard of its text", self._heard), inner_step)
            self._insist_on_slots(inner_step)

    def close(self, inner_step: int) -> None:
        """Let the next report tell all positions: nothing is drawn any more."""
        self._is_last = True
        self._note(inner_step)
        for number, slot in sorted(self._word.slots.items()):
            begun, drawn = dict(slot.begun), dict(slot.position.drawn)
            logger.info("text at the end, slot=%d begun=%s drawn=%s", number, begun, drawn)

    def _note(self, inner_step: int) -> None:
        positions = self._batches.positions()
        slots = {
            number: slot if slot.is_final else replace(slot, position=positions[number])
            for number, slot in self._word.slots.items()
        }
        self._word = _Word(self._word.revision, slots)
        if self._is_last or self._word.growth(self._noted) >= self._most_untold:
            self._write(inner_step, self._word.slots)
            self._noted = self._word.drawn

    def _take(self, claims_json: str, inner_step: int) -> None:
        """Change to what a word of the coordinator says."""
        said, before = json.loads(claims_json), self._word
        slots: dict[int, _Slot] = {}
        for name, is_final in (("slots", False), ("owed", True)):
            for text, claim in said[name].items():
                number, known = int(text), before.slots.get(int(text))
                if known is not None and known.grant == claim["grant"]:
                    slots[number] = replace(known, is_final=is_final)
                else:
                    position = self._beginning(number, claim["position"])
                    slots[number] = _Slot(claim["grant"], position.drawn, position, is_final)
        gone = {
            number: slot
            for number, slot in before.slots.items()
            if number not in slots or slots[number].is_final or slots[number].grant != slot.grant
        }
        self._write(inner_step, gone)
        self._word = word = _Word(said["revision"], slots)
        self._write(inner_step, slots)  # what begins here, too: a resume has gone back to it
        self._noted = word.drawn
        if word.held:
            self._batches.hold(word.held, inner_step=inner_step)
        if word.held.keys() != before.held.keys():
            logger.info("text, inner_step=%d slots=%s", inner_step, sorted(word.held))

    def _beginning(self, number: int, told: Mapping[str, Any]) -> SlotPosition:
        """Say where to draw on: of a slot that nobody has drawn from, where a warm start ended."""
        position = SlotPosition.from_json(told)
        is_untouched = not position.num_drawn and self._word.revision < 0
        own = self._batches.positions() if is_untouched else {}
        return own.get(number, position)

    def _insist_on_slots(self, inner_step: int) -> None:
        """Wait until there is a slot to draw from."""
        while not self._word.held:
            self._take(self._groups.leader_says("waited for text", self._await_news), inner_step)

    def _await_news(self) -> str:
        logger.info("waiting until another island lets go of its text")
        while not self._news:
            self._check()
            time.sleep(_ASK_AGAIN_S)
        return self._heard()

    def _heard(self) -> str:
        # What is heard between these two is told again: its revision is newer than ours.
        news, self._news = self._news, ""
        return news

    def _write(self, inner_step: int, slots: Mapping[int, _Slot]) -> None:
        if not self._groups.is_leader:
            return
        untold = self._word.growth(self._told)
        for number, slot in slots.items():
            begun, drawn = dict(slot.begun), dict(slot.position.drawn)
            self._on_event(SlotDrawn(inner_step, number, slot.grant, begun, drawn, untold))

    # -- the network's thread, on the leader -------------------------------------------------------

    def say(self) -> str:
        """Give what a report says: positions when they are due, and what this island knows."""
        word = self._word
        is_owed = any(slot.is_final for slot in word.slots.values())
        untold = word.growth(self._told)
        is_due = is_owed or self._is_last or untold >= self._most_untold
        self._said = word.drawn if is_due else {}
        slots = {
            str(number): {
                "grant": slot.grant,
                "is_final": slot.is_final,
                "position": slot.position.as_json(),
            }
            for number, slot in word.slots.items()
            if is_due
        }
        return json.dumps({"revision": word.revision, "slots": slots})

    def hear(self, claims_json: str) -> None:
        """Take note of the answer to what was said last; empty: there is no news."""
        self._told = {**self._told, **self._said}
        if claims_json and json.loads(claims_json)["revision"] > self._word.revision:
            self._news = claims_json
