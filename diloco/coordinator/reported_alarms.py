"""Collects the alarms of islands, syncers and the coordinator for operators.

Memory, and for each time that one begins to hold an entry of the audit log. Entries are written
together, with `write`: a thousand islands may report at once. Bounded, whatever is reported: alarms
a reporter, characters a text, kinds and islands that there are, and entries of the audit log a
time.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from diloco.bounded_text import MOST_REASON, bounded_text
from diloco.coordinator.journal import AuditEntry
from diloco.protocol.run.alarms import (
    MOST_ALARMS,
    NO_FRAGMENT,
    Alarm,
    AlarmKind,
    Alarms,
    HeldAlarm,
    alarm_message,
    suspect,
)
from diloco.protos.control_pb2 import Alarm as AlarmMessage
from diloco.protos.control_pb2 import AlarmStatus

logger = logging.getLogger(__name__)

#: Reporter of alarms that the coordinator raises itself.
COORDINATOR = "coordinator"
#: What a syncer's name as a reporter begins with; no island has one with a space.
SYNCER = "syncer "
#: Seconds for which an alarm is shown after it was last reported.
SHOWN_S = 3600.0
#: Seconds since its last report within which an alarm holds; islands and syncers report sooner.
HOLDS_S = 15.0
#: Alarms of one island that are taken, the last that were reported.
MOST_OF_ISLAND = 8
#: Alarms that are shown; of each kind so many, before more of another: all islands may have one.
_MOST_SHOWN, _OF_KIND = 64, 4
#: Seconds between two entries of the audit log about the same alarm of the same reporter.
_TOLD_AGAIN_S = 60.0
#: Entries of the audit log about what one island reports, in an hour: the log keeps a number of
#: entries, operators' among them.
_MOST_AN_HOUR, _HOUR_S = 120, 3600.0


class ReportedAlarms:
    """Of one run.

    Args:
        record: Writes entries of the audit log, all at once.
        unix_clock: By which the audit log's entries are named.
    """

    def __init__(
        self, *, record: Callable[[list[AuditEntry]], object], unix_clock: Callable[[], float]
    ) -> None:
        """Begin with none."""
        self._record = record
        self._unix_clock = unix_clock
        self._by_reporter: dict[str, Alarms] = {}
        # Reporter -> alarm -> when an entry was last made of it.
        self._noted: dict[str, dict[tuple[str, str, int], float]] = {}
        # Island -> when its hour began, and how many entries were made in it.
        self._hours: dict[str, tuple[float, int]] = {}
        self._unwritten: list[AuditEntry] = []

    def reported(
        self,
        reporter: str,
        alarms: Iterable[AlarmMessage],
        *,
        islands: Collection[str],
        now: float,
        most: int = MOST_ALARMS,
    ) -> None:
        """Take what a report says; what no process of this version says is passed over.

        Args:
            reporter: Who reports; its name is known to be true.
            alarms: That hold there.
            islands: Of the run.
            now: Loop time.
            most: Of the reporter's alarms that are taken.
        """
        kinds = set(map(str, AlarmKind))
        for message in list(alarms)[:most]:
            if message.kind not in kinds or (message.island and message.island not in islands):
                continue
            alarm = Alarm(
                AlarmKind(message.kind),
                bounded_text(message.text, MOST_REASON),
                message.island,
                max(NO_FRAGMENT, message.fragment_id),
            )
            self.raise_(alarm, now, reporter=reporter, count=message.count, most=most)

    def raise_(
        self,
        alarm: Alarm,
        now: float,
        *,
        reporter: str = COORDINATOR,
        count: int = 0,
        most: int = MOST_ALARMS,
    ) -> None:
        """Take an alarm that holds now."""
        alarms = self._by_reporter.setdefault(reporter, Alarms(SHOWN_S, most))
        before = {held.alarm.key: held.last for held in alarms.holding(now)}
        alarms.raise_(alarm, now, count)
        held = {each.alarm.key: each for each in alarms.holding(now)}.get(alarm.key)
        if held is not None and now - before.get(alarm.key, -SHOWN_S) > HOLDS_S:
            self._note(reporter, held, now, most)

    def suspect(self, now: float) -> None:
        """Raise what syncers say of two islands, and these of themselves, together.

        See `diloco.protocol.run.alarms.suspect`.
        """
        said = (
            held
            for reporter, alarms in self._by_reporter.items()
            for held in alarms.holding(now)
            if now - held.last <= HOLDS_S
            and (reporter.startswith(SYNCER) or reporter == held.alarm.island)
        )
        if (suspected := suspect(said)) is not None:
            self.raise_(suspected, now, count=1)

    def _note(self, reporter: str, held: HeldAlarm, now: float, most: int) -> None:
        """Make an entry for the audit log: an alarm began to hold; at most once in a while.

        And at most `most` of one kind and reporter in that time, and so many of an island in an
        hour.
        """
        before, key = self._noted.get(reporter, {}), held.alarm.key
        noted = {k: at for k, at in before.items() if now - at < _TOLD_AGAIN_S}
        if key in noted or sum(kind == key[0] for kind, _, _ in noted) >= most:
            return
        if reporter != COORDINATOR and not reporter.startswith(SYNCER):
            began, num_told = self._hours.get(reporter, (now, 0))
            began, num_told = (began, num_told) if now < began + _HOUR_S else (now, 0)
            if num_told >= _MOST_AN_HOUR:
                return
            self._hours[reporter] = began, num_told + 1
        self._noted[reporter] = {**noted, key: now}
        logger.warning("alarm %s, reporter=%s: %s", key, reporter, held.alarm.text)
        unix_s = self._unix_clock()
        what = {
            "kind": held.alarm.kind, "island": held.alarm.island,
            "fragment_id": held.alarm.fragment_id, "text": held.alarm.text,
            "reporter": reporter, "unix_s": unix_s,
        }  # fmt: skip
        name = "/".join(map(str, (reporter, *key)))
        self._unwritten.append(AuditEntry("alarm", f"{name}/{unix_s:.3f}", json.dumps(what)))

    def write(self) -> None:
        """Write the entries that were made since the last call into the audit log."""
        unwritten, self._unwritten = self._unwritten, []
        if unwritten:
            self._record(unwritten)

    def accused(self, now: float, since: float) -> tuple[set[str], set[str]]:
        """Return the islands that something speaks against, since this process serves the timeline.

        What one island says of another does not count.

        Args:
            now: Loop time.
            since: Loop time from which on what was reported counts.

        Returns:
            Those of whose contributions a syncer has refused one, and those that have found their
            own state broken.
        """
        refused, broken = set[str](), set[str]()
        for reporter, alarms in self._by_reporter.items():
            for held in alarms.holding(now):
                alarm = held.alarm
                if not alarm.island or held.last < since:
                    continue
                if alarm.kind is AlarmKind.CONTRIBUTION_REFUSED and reporter.startswith(SYNCER):
                    refused.add(alarm.island)
                elif alarm.kind is AlarmKind.ISLAND_DECLINES and reporter == alarm.island:
                    broken.add(alarm.island)
        return refused, broken

    def status(self, now: float) -> list[AlarmStatus]:
        """Return the alarms that hold, or did within the last hour; the newest first.

        Of too many the same ones every time, though all are reported again and again.
        """

        def age(each: tuple[str, HeldAlarm]) -> tuple[bool, float, str, tuple[str, str, int]]:
            reporter, held = each
            is_over = now - held.last > HOLDS_S
            return is_over, -(held.last if is_over else held.first), reporter, held.alarm.key

        of_kind = Counter[str]()
        seen, others = list[tuple[str, HeldAlarm]](), list[tuple[str, HeldAlarm]]()
        every = (
            (r, held) for r, alarms in self._by_reporter.items() for held in alarms.holding(now)
        )
        for each in sorted(every, key=age):
            kind = each[1].alarm.kind
            of_kind[kind] += 1
            (seen if of_kind[kind] <= _OF_KIND else others).append(each)
        return [
            AlarmStatus(
                alarm=alarm_message(held),
                reporter=reporter,
                first_age_s=now - held.first,
                last_age_s=now - held.last,
                holds=now - held.last <= HOLDS_S,
            )
            for reporter, held in sorted((seen + others)[:_MOST_SHOWN], key=age)
        ]
