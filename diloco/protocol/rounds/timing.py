"""Decides when a round opens, how long it waits for stragglers, and when it expires. Pure.

Scheduled runs know these times beforehand (`FixedTiming`); decoupled ones measure them
(`MeasuredTiming`), with averages xi of weight 1/2:

    opening    not before H * xi_step(fastest live member) after the fragment's previous close;
               of three or more, the fastest counts at most `MOST_FASTER` times the median's pace
    grace      clamp(gamma * (tau * xi_step(slowest member) - (xi_quorum + xi_sync)), 0, cap)
    deadline   clamp(max over members of (xi_late + 4 * deviation), floor, cap), doubled by every
               expiry since the last publication

xi_quorum is the time from an opening to its quorum, xi_sync that from a close until the last of its
contributors that live was sent the new version (what the windows of the way hold may still be under
way), xi_late how long after the first complete contribution of a round a member's own was complete.
The grace only spends time that the overlap gives anyway; where xi_quorum or xi_sync is unknown, or
the step of every member, it is 0. A member that has not made a step yet (it has just come, and
copies the model) is left out of the slowest: that can only shorten the grace, and without one the
others would not be counted as long as it copies.
Times are in seconds.

Source: PROTOCOL.md, "Opening", "Quorum, grace and close" and "Deadline and expiry"; grace of
Decoupled DiLoCo (arXiv 2604.21428, Eq. 3); deviation as in RFC 6298, section 2.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from diloco.protocol.rounds.terms import RoundRules

_WEIGHT = 0.5
_DEVIATIONS = 4.0
_MOST_DOUBLINGS = 60
#: Seconds of the shortest and the longest inner step that is believed.
_STEP_S = (1e-6, 86400.0)
#: The fastest of three islands or more counts as so many times as fast as the median, at most: by a
#: step of nothing that one says, rounds would open without an end. Two have no median.
MOST_FASTER = 4
_LEAST_OF_MEDIAN = 3


class Average:
    """Exponential moving average of weight 1/2, and that of the distance from it."""

    def __init__(self) -> None:
        """Know nothing."""
        self.value: float | None = None
        self.deviation = 0.0

    def add(self, value: float) -> None:
        """Take one more value; the first is the average, off by half of itself."""
        if self.value is None:
            self.value, self.deviation = value, value / 2
        else:
            self.deviation += _WEIGHT * (abs(value - self.value) - self.deviation)
            self.value += _WEIGHT * (value - self.value)


class StepTimes:
    """What islands say of the duration of their inner steps; one object for all fragments."""

    def __init__(self) -> None:
        """Know nobody."""
        self._averages: dict[str, Average] = {}
        self._fastest: tuple[tuple[str, ...], float] | None = None  # as last asked for

    def stepped(self, island: str, step_s: float) -> None:
        """Take what an island measured lately; what is no duration is not taken."""
        shortest_s, longest_s = _STEP_S
        if shortest_s <= step_s <= longest_s:
            self._averages.setdefault(island, Average()).add(step_s)
            self._fastest = None

    def forget(self, island: str) -> None:
        """Forget an island that has left, or that starts again, perhaps on other hardware."""
        self._averages.pop(island, None)
        self._fastest = None

    def of(self, islands: Collection[str]) -> list[float]:
        """Give the averages of those that are known."""
        known = (self._averages[name].value for name in islands if name in self._averages)
        return [value for value in known if value is not None]

    def fastest(self, islands: tuple[str, ...]) -> float:
        """Give the shortest average, at least the median / `MOST_FASTER`; none: infinite.

        All fragments ask for it at every poll, mostly of the same islands.
        """
        if self._fastest is None or self._fastest[0] != islands:
            steps = self.of(islands)
            least = min(steps, default=math.inf)
            if len(steps) >= _LEAST_OF_MEDIAN:
                least = max(least, statistics.median_high(steps) / MOST_FASTER)
            self._fastest = islands, least
        return self._fastest[1]


class Downtime:
    """What a start of a syncer finds overdue; one object for all its fragments.

    The fragment that is overdue for longest opens at once, the n-th of P after it n / P of a floor
    later: they go on taking turns. However often the syncer is killed, each is the first in time.
    """

    def __init__(self, ended_at: float) -> None:
        """Begin with nothing that is due; `ended_at` is the start, `now` of its clock."""
        self._ended_at = ended_at
        self._floors: list[tuple[float, float]] = []

    def found(self, closed_at: float, share: float) -> None:
        """Take when a fragment's last round closed, and which share of a full floor follows."""
        self._floors.append((closed_at, share))

    def opens_at(self, due: float, full_s: float) -> float:
        """When a fragment opens that was due at `due`, where a full floor is `full_s` long."""
        if due >= self._ended_at:
            return due
        before = sum(at + share * full_s < due for at, share in self._floors)
        return self._ended_at + before * full_s / max(len(self._floors), 1)


class Timing(Protocol):
    """What one fragment's rounds ask, and what they tell; `now` is a monotonic clock's."""

    def opens_at(self, live: Collection[str]) -> float:
        """When the next attempt may open; infinity: not known yet."""

    def grace_s(self, members: Collection[str]) -> float:
        """Seconds from a quorum that is not everybody to the close."""

    def deadline_s(self, members: Collection[str]) -> float:
        """Seconds from the first complete contribution, or decline, to the expiry."""

    def opened(self, now: float) -> None:
        """An attempt has opened."""

    def arrived(self, island: str, now: float) -> None:
        """A contribution is complete."""

    def at_quorum(self, now: float) -> None:
        """The quorum of this attempt is reached."""

    def closed(self, now: float) -> None:
        """The contributors are decided."""

    def fetched(self, now: float) -> None:
        """The last contributor was sent what the previous close has published."""

    def published(self) -> None:
        """What was closed last is durable."""

    def expired(self, now: float) -> None:
        """The attempt has expired."""

    def resumed(
        self, version: int, closed_at: float | None, expiries: int, expired_at: float
    ) -> None:
        """A start found a version, and so many expiries since it was published.

        `closed_at` is when its round closed, None where that is not known; `expired_at` is of the
        last of the expiries.
        """

    def set_rules(self, rules: RoundRules, measured: TimingRules | None) -> None:
        """Rules have changed, between two attempts."""


class FixedTiming:
    """The same times for every round."""

    def __init__(
        self, deadline_s: float, grace_s: float = 0.0, opening_floor_s: float = 0.0
    ) -> None:
        """Keep them, in seconds; the floor counts from the previous close."""
        self._deadline_s, self._grace_s = deadline_s, grace_s
        self._opening_floor_s = opening_floor_s
        self._open_after = -math.inf

    def opens_at(self, live: Collection[str]) -> float:
        """See `Timing`."""
        return self._open_after

    def grace_s(self, members: Collection[str]) -> float:
        """See `Timing`."""
        return self._grace_s

    def deadline_s(self, members: Collection[str]) -> float:
        """See `Timing`."""
        return self._deadline_s

    def closed(self, now: float) -> None:
        """See `Timing`."""
        self._open_after = now + self._opening_floor_s

    def opened(self, now: float) -> None:
        """See `Timing`; nothing is measured, here and below."""

    def arrived(self, island: str, now: float) -> None:
        """See `Timing`."""

    def at_quorum(self, now: float) -> None:
        """See `Timing`."""

    def fetched(self, now: float) -> None:
        """See `Timing`."""

    def published(self) -> None:
        """See `Timing`."""

    def expired(self, now: float) -> None:
        """See `Timing`."""

    def resumed(
        self, version: int, closed_at: float | None, expiries: int, expired_at: float
    ) -> None:
        """See `Timing`."""

    def set_rules(self, rules: RoundRules, measured: TimingRules | None) -> None:
        """See `Timing`; the floor of what is waited for already stays."""
        self._deadline_s, self._grace_s = rules.deadline_s, rules.grace_s
        self._opening_floor_s = rules.opening_floor_s


@dataclass(frozen=True, slots=True)
class TimingRules:
    """Within which bounds times are measured.

    Args:
        inner_steps_per_round: H.
        overlap_steps: tau.
        grace_share: gamma, the share of the slack that is spent on stragglers.
        grace_cap_s: Longest grace.
        deadline_cap_s: Longest deadline, and that of members who are not known yet.
        deadline_floor_s: Shortest deadline.
        phase: Share of the first interval after which a fragment opens first, so that fragments
            take turns: (p + 1) / P.
        grace_s: The grace where it is not measured; None: it is.
        first_round: H of the first round, each of the next is one more, up to H; 0: all have H.
    """

    inner_steps_per_round: int
    overlap_steps: int
    grace_share: float
    grace_cap_s: float
    deadline_cap_s: float
    deadline_floor_s: float = 5.0
    phase: float = 1.0
    grace_s: float | None = None
    first_round: int = 0

    def inner_steps(self, version: int) -> int:
        """Return the inner steps of the round that follows a version."""
        full = self.inner_steps_per_round
        return min(self.first_round + version, full) if self.first_round else full


class MeasuredTiming:
    """Times of one fragment's rounds, from what its members have shown."""

    def __init__(
        self,
        rules: TimingRules,
        steps: StepTimes,
        begins_at: float,
        downtime: Downtime | None = None,
    ) -> None:
        """Begin at `begins_at` as if a round had closed then; `downtime` is its syncer's."""
        self._rules = rules
        self._downtime = downtime
        self._steps = steps
        self._late: dict[str, Average] = {}
        self._until_quorum, self._until_fetched = Average(), Average()
        self._opened_at = self._first_at = math.nan
        self._closed_at, self._share = begins_at, rules.phase
        self._fetching_since = begins_at
        self._expired_at, self._expiries = -math.inf, 0
        self._version = 0

    def opens_at(self, live: Collection[str]) -> float:
        """See `Timing`; after an expiry one fastest step later, twice as late after each more."""
        if math.isinf(fastest := self._steps.fastest(tuple(live))):
            return math.inf
        full = self._rules.inner_steps(self._version) * fastest
        if self._expiries:
            return self._expired_at + min(
                fastest * 2.0 ** min(self._expiries - 1, _MOST_DOUBLINGS), full
            )
        due = self._closed_at + self._share * full
        return due if self._downtime is None else self._downtime.opens_at(due, full)

    def grace_s(self, members: Collection[str]) -> float:
        """See `Timing`."""
        if self._rules.grace_s is not None:
            return self._rules.grace_s
        if (terms := self.slack_terms(members)) is None:
            return 0.0
        overlap_s, exchange_s = terms
        slack_s = overlap_s - exchange_s
        return min(max(self._rules.grace_share * slack_s, 0.0), self._rules.grace_cap_s)

    def slack_terms(self, members: Collection[str]) -> tuple[float, float] | None:
        """Give tau * xi_step(slowest known) and xi_quorum + xi_sync; None while one is unknown."""
        steps = self._steps.of(members)
        quorum, fetched = self._until_quorum.value, self._until_fetched.value
        if not steps or quorum is None or fetched is None:
            return None
        return self._rules.overlap_steps * max(steps), quorum + fetched

    def lacks_grace(self, members: Collection[str]) -> tuple[float, float] | None:
        """Give `slack_terms` where a grace that is measured comes to 0 for want of slack.

        None while a member's step is unknown, too: it may be the slowest.
        """
        if self._rules.grace_s is not None or len(self._steps.of(members)) < len(members):
            return None
        terms = self.slack_terms(members)
        return terms if terms is not None and terms[0] <= terms[1] else None

    def deadline_s(self, members: Collection[str]) -> float:
        """See `Timing`."""
        rules = self._rules
        late = [self._late[island] for island in members if island in self._late]
        if len(late) < max(len(members), 1):
            return rules.deadline_cap_s
        expected = max((each.value or 0.0) + _DEVIATIONS * each.deviation for each in late)
        doubled = max(expected, rules.deadline_floor_s) * 2.0 ** min(
            self._expiries, _MOST_DOUBLINGS
        )
        return min(doubled, rules.deadline_cap_s)

    def opened(self, now: float) -> None:
        """See `Timing`."""
        self._opened_at, self._first_at = now, math.nan

    def arrived(self, island: str, now: float) -> None:
        """See `Timing`."""
        if math.isnan(self._first_at):
            self._first_at = now
        self._late.setdefault(island, Average()).add(now - self._first_at)

    def at_quorum(self, now: float) -> None:
        """See `Timing`."""
        self._until_quorum.add(now - self._opened_at)

    def closed(self, now: float) -> None:
        """See `Timing`."""
        self._closed_at, self._share, self._downtime = now, 1.0, None

    def fetched(self, now: float) -> None:
        """See `Timing`."""
        self._until_fetched.add(now - self._fetching_since)

    def published(self) -> None:
        """See `Timing`."""
        self._expiries, self._fetching_since = 0, self._closed_at
        self._version += 1

    def expired(self, now: float) -> None:
        """See `Timing`."""
        self._expired_at, self._expiries = now, self._expiries + 1

    def resumed(
        self, version: int, closed_at: float | None, expiries: int, expired_at: float
    ) -> None:
        """See `Timing`; the floor counts from that close, however late the start is."""
        self._version = version
        if closed_at is not None:
            self._closed_at, self._share = closed_at, 1.0 if version else self._share
        if expiries:
            self._expired_at, self._expiries = expired_at, expiries
        elif closed_at is not None and self._downtime is not None:
            self._downtime.found(self._closed_at, self._share)

    def set_rules(self, rules: RoundRules, measured: TimingRules | None) -> None:
        """See `Timing`."""
        assert measured is not None, "times that are measured have rules"
        self._rules = measured
