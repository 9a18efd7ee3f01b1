"""One rank's part in sharing out the text: slots come and go between two inner steps.

Who gets which slot is decided in `diloco.protocol.run.claims`, at the coordinator.

Only in runs in which nobody waits: elsewhere an island has one slot for ever. The leader tells the
coordinator how far each slot has been drawn, at once when half of `data.handover_samples` are, and
hears which slots are whose; all ranks of the island change at one inner step. A slot that is asked
back is let go at once, and its final position told until the coordinator has recorded it.

Of an island that dies others draw again what it had not told. Before that would be more than
`data.handover_samples` the island waits for an answer, but a second at most, and not again before
the coordinator has answered: that is away then, and no island stands still for it. What is drawn
meanwhile is a warning with its figures, an event, and in the summary; it is not bounded.

`say` and `hear` belong to the thread of the network, all else to the training thread; what both see
is replaced whole. What is told was written as an event before, so that events miss nothing that
others begin after.

Source: PROTOCOL.md, "Shares of the text".
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from diloco.data.batches import Batches
from diloco.island.connection import Connection
from diloco.island.groups import Groups, make_groups
from diloco.protocol.run.alarms import AlarmKind
from diloco.protocol.run.slots import SlotPosition
from diloco.telemetry.events import AlarmRaised, Event, SlotDrawn, TextUntold

logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.05
#: Seconds that an island waits for the coordinator's answer before it draws beyond the bound.
_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Slot:
    """A slot that this start draws from, or has let go and still owes the final position of."""

    grant: int
    begun: Mapping[str, int]
    position: SlotPosition
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class _Word:
    """One report: slots by number, under one revision of their assignment."""

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
        most_untold: int,
        draws_per_step: int,
        on_event: Callable[[Event], None],
        on_due: Callable[[], None],
        check: Callable[[], None],
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """Assign only.

        Args:
            batches: The island's text.
            groups: The island's ranks.
            most_untold: Draws that another may repeat; at least those of two inner steps.
            draws_per_step: Draws of an inner step.
            on_event: Called, on the leader, with what was drawn and with alarms.
            on_due: Called, on the leader, when `say` should be called soon.
            check: Called while the island waits; raises when it must not go on.
            patience_s: Seconds that it waits for an answer before it draws beyond `most_untold`.
        """
        self._batches = batches
        self._groups = groups
        self._most_untold = most_untold
        self._draws_per_step = draws_per_step
        self._due_at = max(1, most_untold // 2)
        self._on_event = on_event
        self._on_due = on_due
        self._check = check
        self._patience_s = patience_s
        self._word = _Word(-1, {})
        self._written = self._word  # in the last events
        self._is_last = False
        self._is_called = False  # for a report, since the last answer
        self._is_alone = False  # no answer came in time, and none has since
        self._answered = threading.Event()
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
        self._check_slots(inner_step)

    def settle(self, inner_step: int) -> None:
        """Note how far the text is drawn after an inner step, and take up what was heard."""
        self._note(inner_step)
        is_full = self._groups.is_leader and self._is_full
        must_wait, has_news = self._groups.sum([int(is_full), int(bool(self._news))])
        if must_wait:
            self._groups.leader_says(
                "waited to tell its text", lambda: self._await_answer(inner_step)
            )
            (has_news,) = self._groups.sum([int(bool(self._news))])
        if has_news:
            self._take(self._groups.leader_says("heard of its text", self._heard), inner_step)
            self._check_slots(inner_step)

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
        self._word = word = _Word(self._word.revision, slots)
        untold, is_due = word.growth(self._told), self._is_due(self._written)
        is_to_be_told = untold >= self._due_at and not is_due
        if self._is_last or is_to_be_told or word.growth(self._written.drawn) >= self._due_at:
            self._write(inner_step, word.slots)
            self._written = word
        if self._groups.is_leader and self._is_due(self._written) and not self._is_called:
            self._is_called = True
            self._on_due()

    def _is_due(self, word: _Word) -> bool:
        return word.growth(self._told) >= self._due_at

    @property
    def _is_full(self) -> bool:
        """Whether the next inner step would draw more than may be untold."""
        untold = self._word.growth(self._told)
        return not self._is_alone and untold + self._draws_per_step > self._most_untold

    def _await_answer(self, inner_step: int) -> None:
        """Wait until what is due was reported, or the coordinator is known to be away."""
        until = time.monotonic() + self._patience_s
        while True:
            self._answered.clear()
            if not self._is_full:
                return
            if time.monotonic() >= until:
                break
            self._check()
            self._answered.wait(_ASK_AGAIN_S)
        self._is_alone = True
        untold = self._word.growth(self._told)
        self._on_event(TextUntold(inner_step, untold, self._most_untold))
        logger.warning(
            "the coordinator does not answer, training goes on beyond data.handover_samples: "
            "inner_step=%d untold=%d bound=%d; should this island end before it does, others train "
            "on that text again",
            inner_step, untold, self._most_untold,
        )  # fmt: skip

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
        self._written = word
        if word.held and (problems := self._batches.hold(word.held, inner_step=inner_step)):
            self._raise_repeated(problems)
        if word.held.keys() != before.held.keys():
            logger.info("text, inner_step=%d slots=%s", inner_step, sorted(word.held))

    def _beginning(self, number: int, told: Mapping[str, Any]) -> SlotPosition:
        """Say where to draw on: of a slot that nobody has drawn from, where a warm start ended."""
        position = SlotPosition.from_json(told)
        is_untouched = not position.num_drawn and self._word.revision < 0
        own = self._batches.positions() if is_untouched else {}
        return own.get(number, position)

    def _raise_repeated(self, problems: Mapping[int, str]) -> None:
        text = (
            f"slots {', '.join(map(str, problems))} of the text cannot go on where their last "
            f"holder said, and are drawn from the start, so that their text comes again: see "
            f"whether the text here has changed, else that holder was wrong; the first one: "
            f"{next(iter(problems.values()))}"
        )
        logger.error("%s", text)
        if self._groups.is_leader:
            self._on_event(AlarmRaised(AlarmKind.TEXT_REPEATS, text))

    def _check_slots(self, inner_step: int) -> None:
        """Wait until there is a slot to draw from."""
        while not self._word.held:
            self._take(self._groups.leader_says("waited for text", self._await_news), inner_step)

    def _await_news(self) -> str:
        logger.info("waiting until another island lets go of its text")
        while True:
            self._answered.clear()
            if self._news:
                break
            self._check()
            self._answered.wait(_ASK_AGAIN_S)
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
        word = self._written
        is_owed = any(slot.is_final for slot in word.slots.values())
        is_due = is_owed or self._is_last or self._is_due(word)
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
        """Record the answer to what was said last; empty: there is no news."""
        self._told = {**self._told, **self._said}
        self._is_called = self._is_alone = False
        if claims_json and json.loads(claims_json)["revision"] > self._word.revision:
            self._news = claims_json
        self._answered.set()


def open_text(
    connection: Connection,
    batches: Batches,
    claims_json: str,
    *,
    inner_step: int,
    on_event: Callable[[Event], None],
) -> TextShare | None:
    """Take up this island's slots of the text.

    Args:
        connection: With the run's policy.
        batches: The island's text.
        claims_json: Of the join's answer; empty where an island has one slot for ever.
        inner_step: At which training begins.
        on_event: Called, on the leader, with what was drawn.

    Returns:
        None where the island has one slot for ever.

    Raises:
        ConfigError: If the text is not what a position was written for.
    """
    if not claims_json:
        return None

    def tell(event: Event) -> None:
        on_event(event)
        connection.on_event(event)

    config = connection.config
    is_by_batch = config.data.source == "stdlib"
    batch_size = config.island.tokens_per_inner_step // config.data.sequence_length
    text = TextShare(
        batches,
        groups=make_groups(
            None,
            patience_s=config.transport.unreachable.seconds,
            collective_s=config.island.collective_timeout.seconds,
        ),
        most_untold=config.data.handover_samples // (batch_size if is_by_batch else 1),
        draws_per_step=1 if is_by_batch else batch_size,
        on_event=tell,
        on_due=connection.report_soon,
        check=connection.check_going_on,
    )
    connection.reports.text = text
    text.take_up(claims_json, inner_step=inner_step)
    return text
