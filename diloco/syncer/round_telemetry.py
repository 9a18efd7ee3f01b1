"""Writes events, metrics and warnings about the rounds of one fragment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from diloco.outer.guard import LEAST_COMPARED, History
from diloco.protocol.rounds.state import FragmentRounds
from diloco.protocol.rounds.terms import (
    Admission,
    Close,
    LaneArrival,
    Opened,
    RecordExpiry,
    RoundKey,
)
from diloco.protocol.run.alarms import AlarmKind
from diloco.refusals import Cause
from diloco.telemetry.events import AlarmCleared, AlarmRaised, Event
from diloco.telemetry.round_events import RoundClosed, RoundExpired, RoundOpened
from diloco.telemetry.syncer_meter import SyncerMeter
from diloco.versions.version import VersionRecord

logger = logging.getLogger(__name__)

#: Versions in a row that are published without a member before an alarm says so.
_LATE_IN_A_ROW = 3
#: Late islands whose names it says.
_MOST_NAMED = 4


class RoundTelemetry:
    """Writes about the rounds of one fragment; decides nothing."""

    def __init__(
        self, fragment_id: int, meter: SyncerMeter, on_event: Callable[[Event], None]
    ) -> None:
        """Assign only."""
        self._fragment_id = fragment_id
        self._meter = meter
        self._on_event = on_event
        self._has_warned = self._are_opposed = False
        self._late: dict[str, int] = {}  # island -> last versions that were published without it

    def opened(self, opened: Opened) -> None:
        """Tell that an attempt is open."""
        key = opened.key
        self._on_event(
            RoundOpened(key.fragment_id, key.version, key.attempt, opened.members, opened.is_flush)
        )

    def refused(self, rounds: FragmentRounds, lane: LaneArrival, admission: Admission) -> None:
        """Count a lane that is refused for what it says, if it is."""
        if (objection := rounds.objection(lane)) is not None:
            self._meter.refusal(lane.island, objection.cause)
        elif admission is Admission.CONFLICT:
            self._meter.refusal(lane.island, Cause.CONFLICT)

    def closed(
        self, close: Close, record: VersionRecord, rounds: FragmentRounds, quorum: int, now: float
    ) -> None:
        """Tell of a version that is durable by `now`; `rounds` stand where they closed."""
        key = close.key
        closed = RoundClosed(
            key.fragment_id,
            key.version,
            key.attempt,
            members=rounds.current.members,
            contributors=tuple(c.island for c in record.contributors),
            quorum=quorum,
            waited_s=rounds.closed_at - rounds.opened_at,
            grace_s=rounds.grace_spent_s,
            commit_s=now - rounds.closed_at,
            is_solo=len(record.contributors) == 1 < len(rounds.current.members),
            is_flush=close.is_flush,
            refused=dict(close.refused),
            rejected=dict(record.rejected),
            merged_tokens=record.merged_tokens,
            digest=record.digest.hex(),
        )
        self._meter.published(closed)
        self._on_event(closed)
        self.rejected(key, record.rejected)
        if not close.is_flush:
            self._left_out(closed)

    def _left_out(self, closed: RoundClosed) -> None:
        """Raise one alarm about the members without which versions are published in a row."""
        late = set(closed.members).difference(closed.contributors, closed.rejected, closed.refused)
        had_late = any(num >= _LATE_IN_A_ROW for num in self._late.values())
        self._late = {island: self._late.get(island, 0) + 1 for island in sorted(late)}
        names = [island for island, num in self._late.items() if num >= _LATE_IN_A_ROW]
        alarm, p = AlarmKind.ISLAND_LATE.value, closed.fragment_id
        if p != 0:
            return  # it is mostly the same with all of them, and alarms are few
        if names:
            text = (
                f"{len(names)} of {len(closed.members)} members ({', '.join(names[:_MOST_NAMED])}) "
                f"are late: versions of fragment {p} are published without them, and what they "
                "trained is dropped. Give them time: diloco set HOST:PORT outer.grace=10s, or less "
                "to send: outer.uplink_codec"
            )
            self._on_event(AlarmRaised(alarm, text))
        elif had_late:
            self._on_event(AlarmCleared(alarm))

    def rejected(self, key: RoundKey, islands: Mapping[str, str]) -> None:
        """Count contributions that the guard refused, and raise an alarm for each."""
        for island, why in islands.items():
            self._meter.refusal(island, Cause.OUTLIER)
            text = (
                f"what {island} sent to version {key.version} was not merged: {why}; if it goes "
                "on, look at that machine's memory, devices and data, or take the island out: "
                f"diloco kick HOST:PORT {island}"
            )
            alarm = AlarmKind.CONTRIBUTION_REFUSED.value
            self._on_event(AlarmRaised(alarm, text, island, key.fragment_id))

    def compared(self, record: VersionRecord, history: History) -> None:
        """Raise an alarm about two islands that go against each other, or clear it."""
        was_opposed, self._are_opposed = self._are_opposed, history.is_opposed
        alarm, p = AlarmKind.ISLANDS_OPPOSED.value, self._fragment_id
        islands = [c.island for c in record.contributors]
        if history.is_opposed and len(islands) == LEAST_COMPARED:
            text = (
                f"what {' and '.join(islands)} sent to the last {history.num_opposed} versions "
                f"does not go together: cosine {history.cosine:.2f}, below "
                f"{history.least_cosine:.2f}. Compare their training losses, look at their memory, "
                "devices and data, and take the faulty one out: diloco kick HOST:PORT ISLAND"
            )
            self._on_event(AlarmRaised(alarm, text, fragment_id=p))
        elif was_opposed and not history.is_opposed:
            self._on_event(AlarmCleared(alarm, fragment_id=p))

    def lacking_grace(self, terms: tuple[float, float] | None) -> None:
        """Say once that rounds wait for nobody, where that is not what `outer.grace` asks for.

        `terms` are those of `MeasuredTiming.lacks_grace`; None: they do wait.
        """
        is_speaker = self._fragment_id == 0  # it is the same with all of them
        if terms is None or self._has_warned or not is_speaker:
            return
        self._has_warned = True
        logger.warning(
            "outer.grace = auto comes to 0, rounds close with the first that are whole: tau inner "
            "steps of the slowest island take %.3g s, a quorum and the fetch of its version "
            "%.3g s; give it a time: diloco set HOST:PORT outer.grace=%.1fs",
            *terms,
            max(0.1, terms[1]),
        )

    def expired(self, expiry: RecordExpiry, members: tuple[str, ...]) -> None:
        """Tell that an attempt has expired, durably."""
        key = expiry.key
        self._meter.expired(key.fragment_id)
        self._on_event(
            RoundExpired(
                key.fragment_id, key.version, key.attempt, members, expiry.missing, expiry.reason
            )
        )
