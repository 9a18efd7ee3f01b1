"""Alarms: what an operator should know of a run, as long as it holds. Pure.

Anyone who finds something out emits the event `AlarmRaised`, and `AlarmCleared` once it is over;
one that is neither raised again nor cleared expires. Islands (by their leaders) and syncers report
the alarms that hold; the coordinator shows them (`diloco.coordinator.reported_alarms`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from diloco.bounded_text import MOST_REASON, bounded_text
from diloco.protos.control_pb2 import Alarm as AlarmMessage
from diloco.telemetry.events import AlarmCleared, AlarmRaised, Event

#: Of an alarm that is about no fragment.
NO_FRAGMENT = -1
#: Seconds for which an alarm holds after it was raised, unless it is cleared.
LASTING_S = 300.0
#: Alarms that hold at one process; a further one takes the place of the one raised longest ago.
MOST_ALARMS = 32
#: Rounds for which the loss of one of two opposed islands has to rise before it is named.
_ROUNDS_ALONE = 3


class AlarmKind(StrEnum):
    """What is wrong; metrics and the status have few rows, whatever peers send."""

    LOSS_RISES = "loss_rises"  # the held-out loss, whatever the cause
    LOSS_ACCEPTED = "loss_accepted"  # an island goes on from a loss that nobody could better
    CANDIDATE_BAD = "candidate_bad"  # a candidate of the published parameters was judged bad
    RETURN = "return"  # the run goes back, or went back, to its last good checkpoint
    CONTRIBUTION_REFUSED = "contribution_refused"  # the guard of a merge left an island out
    ISLAND_LATE = "island_late"  # rounds close without it again and again: its work is dropped
    ISLANDS_OPPOSED = "islands_opposed"  # what two islands send goes against each other
    ISLAND_DECLINES = "island_declines"  # an island found its own state broken
    BIT_FLIPPED = "bit_flipped"  # in what an island had left over; found, and not sent
    TEXT_REPEATS = "text_repeats"  # a slot is drawn from the start: its position leads nowhere
    STORE_ROTS = "store_rots"  # a part of a store that is not served at the moment is damaged
    SYNCER_ENDS = "syncer_ends"  # it ended by itself, and is started again
    STATE_AWAY = "state_away"  # the object store of the run's state does not answer, or lost some
    CERTIFICATE = "certificate"  # the coordinator's or the CA's ends soon; or one is not renewed
    DAMAGED_ON_THE_WAY = "damaged_on_the_way"  # a link damages more than it should
    LINK_FULL = "link_full"  # an island's link has had little room left for minutes


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm.

    Args:
        kind: What is wrong.
        text: What happened, with figures, and what to do.
        island: That it is about; empty: the whole run.
        fragment_id: That it is about; `NO_FRAGMENT`: none.
    """

    kind: AlarmKind
    text: str
    island: str = ""
    fragment_id: int = NO_FRAGMENT

    @property
    def key(self) -> tuple[str, str, int]:
        """What it is about: of each there is one alarm at a time."""
        return self.kind, self.island, self.fragment_id


@dataclass(frozen=True, slots=True)
class HeldAlarm:
    """An alarm that holds: since when, when and how often it was raised."""

    alarm: Alarm
    first: float
    last: float
    count: int = 1


class Alarms:
    """Which alarms hold at one process, or were reported by it; used from one thread.

    Args:
        lasting_s: Seconds for which one holds after it was last raised.
        most: Alarms that hold at the same time; a further one takes the place of the one that was
            raised longest ago.
    """

    def __init__(self, lasting_s: float = LASTING_S, most: int = MOST_ALARMS) -> None:
        """Begin with none."""
        self._lasting_s = lasting_s
        self._most = most
        self._held: dict[tuple[str, str, int], HeldAlarm] = {}

    def raise_(self, alarm: Alarm, now: float, count: int = 0) -> bool:
        """Let an alarm hold from `now` on; its newest text counts.

        Args:
            alarm: The alarm.
            now: By the same clock as all other times here.
            count: How often it was raised, where that is known; 0: once more.

        Returns:
            Whether it did not hold before.
        """
        self._expire(now)
        held = self._held.get(alarm.key)
        if held is None:
            if len(self._held) >= self._most:
                del self._held[min(self._held, key=lambda key: self._held[key].last)]
            self._held[alarm.key] = HeldAlarm(alarm, now, now, max(1, count))
            return True
        count = count or held.count + 1
        self._held[alarm.key] = replace(held, alarm=alarm, last=now, count=count)
        return False

    def clear(self, kind: AlarmKind, island: str = "", fragment_id: int = NO_FRAGMENT) -> None:
        """Let an alarm hold no more; harmless if it does not."""
        self._held.pop((kind, island, fragment_id), None)

    def on_event(self, event: Event, now: float) -> bool:
        """Raise or clear what an event tells; returns whether it was one of an alarm."""
        match event:
            case AlarmRaised(alarm=kind, text=text, about=island, fragment_id=fragment_id):
                self.raise_(Alarm(AlarmKind(kind), text, island, fragment_id), now)
            case AlarmCleared(alarm=kind, about=island, fragment_id=fragment_id):
                self.clear(AlarmKind(kind), island, fragment_id)
            case _:
                return False
        return True

    def holding(self, now: float) -> list[HeldAlarm]:
        """Return the alarms that hold, the newest first."""
        self._expire(now)
        return sorted(self._held.values(), key=lambda held: -held.last)

    def _expire(self, now: float) -> None:
        over = [k for k, held in self._held.items() if held.last + self._lasting_s < now]
        for key in over:
            del self._held[key]


def suspect(holding: Iterable[HeldAlarm]) -> Alarm | None:
    """Say which of two opposed islands is the wrong one; None: it cannot be told, or none are.

    That whose own training loss rises, as by shuffled labels, where the other's does not: for
    `_ROUNDS_ALONE` rounds, since what one of them ruins raises both, and the other's may be first.

    Args:
        holding: Alarms that hold; of those about a training loss, only what islands say themselves.
    """
    held = [(each.alarm, each.count) for each in holding]
    opposed = [a for a, _ in held if a.kind is AlarmKind.ISLANDS_OPPOSED and not a.island]
    rising = {a.island: (a, n) for a, n in held if a.kind is AlarmKind.LOSS_RISES and a.island}
    if not opposed or len(rising) != 1:
        return None
    ((island, (loss, num_raised)),) = rising.items()
    if num_raised < _ROUNDS_ALONE:
        return None
    text = (
        f"what it sends and what the other island sends does not go together, and of the two only "
        f"its loss rises: look at its data, or take it out: diloco kick HOST:PORT {island}. "
        f"{loss.text}"
    )
    return Alarm(AlarmKind.ISLANDS_OPPOSED, text, island)


def alarm_message(held: HeldAlarm) -> AlarmMessage:
    """Write an alarm that holds as a message."""
    alarm = held.alarm
    return AlarmMessage(
        kind=alarm.kind,
        island=alarm.island,
        fragment_id=alarm.fragment_id,
        text=bounded_text(alarm.text, MOST_REASON),
        count=held.count,
    )
