"""Rounds of one fragment: a pure machine, fed with events and `now`, answering with instructions.

It decides who is counted, when a round closes and when it expires; it moves no byte, reads no
clock and knows no tensor. The syncer performs its instructions in the order given and tells it
when a durable write has happened; a simulator and the tests drive the same object.

    UNFOUNDED -> WAITING -> OPEN -> GRACE -> CLOSING -> (published: v+1) WAITING
                              |       `-----------^
                              `-> EXPIRING -> (attempt+1) WAITING

Source: protocol.md sections 4, 5 and 8; grace window of Decoupled DiLoCo (arXiv 2604.21428, Eq. 3).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from diloco.peer_texts import MOST_REASON, bounded_text
from diloco.refusals import Cause
from diloco.rounds.terms import (
    Admission,
    Close,
    Contribution,
    Contributor,
    DropLanes,
    Inclusion,
    Instruction,
    LaneArrival,
    Lost,
    Objection,
    Opened,
    Outcome,
    OutcomeKind,
    PastRound,
    Phase,
    Published,
    RecordExpiry,
    RoundKey,
    RoundRules,
)
from diloco.rounds.timing import FixedTiming, Timing

#: Results in a row that cannot be used and end the run, also where expiries do not.
_MOST_BROKEN = 3


class FragmentRounds:
    """All rounds of one fragment on one timeline.

    Methods named after events return the instructions that follow; the caller performs them in
    order. `next_wake` says when `tick` is due.
    """

    def __init__(
        self, fragment_id: int, timeline: int, rules: RoundRules, timing: Timing | None = None
    ) -> None:
        """Start unfounded: nothing opens before `founded`; no `timing`: what the rules say."""
        if not rules.members or list(rules.members) != sorted(set(rules.members)):
            raise ValueError(f"members must be sorted and distinct, got {rules.members}")
        self.fragment_id = fragment_id
        self.timeline = timeline
        self.rules = rules
        self.version = 0
        self.attempt = 0
        self.phase = Phase.UNFOUNDED
        self.members: tuple[str, ...] = ()
        self.contributions: dict[str, Contribution] = {}
        self.left: dict[str, str] = {}
        self.incarnations: dict[str, int] = {}
        self.past: dict[int, PastRound] = {}
        self.last_included: dict[str, Inclusion] = {}
        self.live = rules.members
        self.is_finishing = False
        self._is_flush_attempt = False
        self._least: dict[str, int] = {}
        self.story: deque[str] = deque(maxlen=40)
        self._timing = timing or FixedTiming(rules.deadline_s, rules.grace_s, rules.opening_floor_s)
        self._deadline = math.inf
        self._deadline_s = rules.deadline_s
        self._grace_end = math.inf
        self._had_quorum = False
        self._expired_in_a_row = 0
        self._broken_in_a_row = 0
        self._missing: tuple[str, ...] = ()
        self._expiry_is_numeric = False
        self._expiry_reason = ""

    @property
    def key(self) -> RoundKey:
        """Key of the current attempt."""
        return RoundKey(self.timeline, self.fragment_id, self.version, self.attempt)

    @property
    def is_open(self) -> bool:
        """Whether contributions to `key` are accepted."""
        return self.phase in (Phase.OPEN, Phase.GRACE)

    @property
    def next_wake(self) -> float:
        """Time at which `tick` must be called, infinity when nothing is awaited."""
        match self.phase:
            case Phase.WAITING if self._can_open():
                return self._timing.opens_at(self.live)
            case Phase.OPEN:
                return self._deadline
            case Phase.GRACE:
                return self._grace_end
            case _:
                return math.inf

    def founded(
        self,
        version: int,
        attempt: int,
        past: Mapping[int, PastRound],
        now: float,
        *,
        last_included: Mapping[str, Inclusion] | None = None,
        expired_in_a_row: int = 0,
        broken_in_a_row: int = 0,
        missing: tuple[str, ...] = (),
        reason: str = "",
    ) -> list[Instruction]:
        """Take the durable state: version 0 was committed, or a restart found its records.

        Args:
            version: That was published last.
            attempt: To open next.
            past: What is remembered, by base version.
            now: Time.
            last_included: The newest contribution of each island that was counted.
            expired_in_a_row: Attempts at the next version that expired before.
            broken_in_a_row: Those whose results could not be used.
            missing: Members that the last of them waited for in vain.
            reason: Of its expiry, where it is known.
        """
        self._require(Phase.UNFOUNDED, "founded")
        self.version, self.attempt = version, attempt
        self.past = {base: _bounded(remembered) for base, remembered in past.items()}
        self.last_included = dict(last_included or {})
        self.phase = Phase.WAITING
        self._expired_in_a_row, self._missing = expired_in_a_row, missing
        self._broken_in_a_row = broken_in_a_row
        self._timing.resumed(expired_in_a_row, now)
        self._tell(now, f"founded at version {version}, attempt {attempt}")
        is_numeric = self._is_beyond(broken_in_a_row, or_at=_MOST_BROKEN)
        if is_numeric or self._is_beyond(expired_in_a_row):
            absent = f"missing: {', '.join(missing) or 'nobody'}"
            last = reason or ("results not usable" if is_numeric else absent)
            return self._lose(
                self.key,
                f"{expired_in_a_row} attempts in a row had expired before this restart; {last}",
                is_numeric=is_numeric,
            )
        return self._open_if_due(now)

    def granted(self, island: str, incarnation: int, now: float) -> list[Instruction]:
        """Take note that `island` presented a valid grant; fences its earlier starts."""
        if incarnation <= self.incarnations.get(island, 0) or self.is_fenced(island, incarnation):
            return []
        self.incarnations[island] = incarnation
        self._tell(now, f"{island} holds grant {incarnation}")
        if not self.is_open:
            return self._open_if_due(now)
        # Who declined or was refused has left the attempt, whatever start it is now.
        earlier = self.contributions.pop(island, None)
        if not self.left and not any(map(self._is_complete, self.contributions.values())):
            # Nobody is left who waits: when all islands start anew, none of them is late yet.
            self._deadline = math.inf
        if earlier is None:
            return []
        return [DropLanes(self.key, island, earlier.incarnation), *self._advance(now)]

    def is_fenced(self, island: str, incarnation: int) -> bool:
        """Whether a newer start of `island` is known, or the coordinator asks for one."""
        return incarnation < max(self.incarnations.get(island, 0), self._least.get(island, 0))

    def admit(self, lane: LaneArrival) -> Admission:
        """Judge a lane by its header, before its payload is read; changes nothing."""
        key = lane.key
        if (objection := self.objection(lane)) is not None:
            return objection.admission
        if self.phase is Phase.UNFOUNDED:
            return Admission.NOT_OPEN
        if key.version > self.version:
            # The store lost a version: polls tell the island so, and end it.
            return Admission.NOT_OPEN
        if self.outcome(key, lane.island, lane.incarnation) is not None:
            return Admission.OVER
        if self.phase is Phase.WAITING:
            return Admission.NOT_OPEN
        if lane.island not in self.members:
            return Admission.NOT_OPEN
        held = self.contributions.get(lane.island)
        if held is not None:
            if not _is_same_contribution(held, lane):
                return Admission.CONFLICT
            if lane.lane_id in held.lanes:
                return Admission.REPEAT
        return Admission.ACCEPTED if self.is_open else Admission.NOT_OPEN

    def objection(self, lane: LaneArrival) -> Objection | None:
        """Say why a lane is fenced or malformed; None if it is neither."""
        key, p, num_lanes = lane.key, self.fragment_id, self.rules.num_lanes
        if key.timeline != self.timeline:
            words = f"the run is in timeline {self.timeline}, not {key.timeline}"
            return Objection(Admission.FENCED, Cause.TIMELINE, words)
        if self.is_fenced(lane.island, lane.incarnation):
            newest = max(self.incarnations.get(lane.island, 0), self._least.get(lane.island, 0))
            words = (
                f"a newer start has joined: incarnation {newest} of island {lane.island!r}, this "
                f"is {lane.incarnation}"
            )
            return Objection(Admission.FENCED, Cause.INCARNATION, words)
        cause, words = Cause.KEY, ""
        if key.fragment_id != p:
            words = f"this is fragment {p}, not {key.fragment_id}"
        elif not 0 <= lane.lane_id < num_lanes:
            cause, words = Cause.LANE, f"fragment {p} has {num_lanes} lanes, none is {lane.lane_id}"
        elif lane.weight_tokens < 0 or (lane.weight_tokens == 0 and not lane.is_flush):
            cause, words = Cause.WEIGHT, f"a weight of {lane.weight_tokens} tokens counts nothing"
        elif (
            self.rules.min_members is not None
            and self.is_open
            and key == self.key
            and lane.is_flush != self._is_flush_attempt
        ):
            taken = "flushes only" if self._is_flush_attempt else "no flushes yet"
            words = f"{key} takes {taken}"
        elif (
            self.phase is not Phase.UNFOUNDED
            and key.version == self.version
            and key.attempt > self.attempt
        ):
            words = (
                f"attempt {self.attempt} at version {self.version} of fragment {p} is open, not "
                f"{key.attempt}"
            )
        return Objection(Admission.INVALID, cause, words) if words else None

    def story_of(self, lane: LaneArrival) -> str:
        """Say in words where a lane that was judged stands."""
        key = lane.key
        if (objection := self.objection(lane)) is not None:
            return objection.words
        if self.phase is not Phase.UNFOUNDED and key.version > self.version:
            return (
                f"version {self.version} of fragment {self.fragment_id} is open, not {key.version}"
            )
        return f"{key} is {self.phase}"

    def lane_received(self, lane: LaneArrival, now: float) -> tuple[Admission, list[Instruction]]:
        """Count a lane whose payload was received and verified."""
        admission = self.admit(lane)
        if admission is Admission.CONFLICT and self.is_open:
            return admission, self.refused(
                lane.key, lane.island, lane.incarnation, f"conflict in lane {lane.lane_id}", now
            )
        if admission is not Admission.ACCEPTED:
            return admission, []
        held = self.contributions.setdefault(
            lane.island,
            Contribution(
                lane.island,
                lane.incarnation,
                lane.weight_tokens,
                lane.weight_steps,
                lane.sent_at_inner_step,
                lane.is_flush,
            ),
        )
        held.lanes[lane.lane_id] = lane.digest
        if len(held.lanes) < self.rules.num_lanes:
            return admission, []
        self._tell(now, f"{lane.island} complete, {held.weight_tokens} tokens")
        self._timing.arrived(lane.island, now)
        self._begin_deadline(now)
        return admission, self._advance(now)

    def refused(
        self, key: RoundKey, island: str, incarnation: int, reason: str, now: float
    ) -> list[Instruction]:
        """Take an island out of this attempt: its contribution is malformed, or it declined.

        The reason, which may be a peer's own words, is kept and announced up to `MOST_REASON`.
        """
        if (
            key != self.key
            or not self.is_open
            or island not in self.members
            or island in self.left
            or self.is_fenced(island, incarnation)
        ):
            return []
        instructions: list[Instruction] = []
        held = self.contributions.pop(island, None)
        if held is not None:
            instructions.append(DropLanes(key, island, held.incarnation))
        reason = self.left[island] = bounded_text(reason, MOST_REASON)
        self._tell(now, f"{island} left the attempt: {reason}")
        # It waits for the round's end too: those that are still to come may be dead.
        self._begin_deadline(now)
        return instructions + self._advance(now)

    def heard_of(
        self, live: Iterable[str], fenced: Mapping[str, int], now: float
    ) -> list[Instruction]:
        """Take who lives, for the next openings, and whose earlier starts count no more.

        Args:
            live: Islands that hold a lease.
            fenced: The least incarnation of islands that were kicked.
            now: Time.
        """
        if self.rules.min_members is not None:
            self.live = tuple(sorted(set(live)))
        instructions: list[Instruction] = []
        for island, least in sorted(fenced.items()):
            held = self.incarnations.get(island)
            if held is not None and held < least:
                key, reason = self.key, "fenced by the coordinator"
                instructions += self.refused(key, island, held, reason, now)
                del self.incarnations[island]  # it is no member before its next start is here
            self._least[island] = max(least, self._least.get(island, 0))
        if self.is_open and not set(self.members) <= set(self.live):
            # Who is left has begun to wait for islands that may never come.
            self._begin_deadline(now)
            active = {m for m in self.members if m not in self.left}
            if active.isdisjoint(self.live) and not any(
                map(self._is_complete, self.contributions.values())
            ):
                instructions += self._expire("none of its members lives", now)
        return instructions + self._open_if_due(now)

    def finishing(self) -> None:
        """Open flush attempts only from now on: the fragment has merged the run's tokens.

        What is open stays what it is. A flush of a run whose members come and go closes with those
        that came by its deadline.
        """
        assert self.rules.min_members is not None, "a run of fixed members ends with its steps"
        self.is_finishing = True

    def tick(self, now: float) -> list[Instruction]:
        """Let time pass: open what is due, end the grace window, expire what is overdue."""
        if self.phase is Phase.WAITING:
            return self._open_if_due(now)
        if self.phase is Phase.GRACE and now >= self._grace_end:
            return self._close(now)
        if self.phase is Phase.OPEN and now >= self._deadline:
            if self._is_flush_attempt and any(map(self._is_complete, self.contributions.values())):
                return self._close(now)
            names = ", ".join(self._absent()) or "nobody (flush and ordinary ones are mixed)"
            return self._expire(f"deadline of {self._deadline_s:g} s; missing: {names}", now)
        return []

    def committed(
        self, key: RoundKey, now: float, rejected: Mapping[str, str] | None = None
    ) -> list[Instruction]:
        """Take note that version `key.version` + 1 is durable.

        Args:
            key: Of the round.
            now: Time.
            rejected: Contributors of the close that the merge has left out, and why.
        """
        self._require(Phase.CLOSING, "committed", key)
        rejected = rejected or {}
        counted = [c for c in self.contributions.values() if c.island not in rejected]
        self.past[key.version] = PastRound(
            key.attempt,
            frozenset((c.island, c.incarnation) for c in counted),
            dict(self.left),
            dict(rejected),
        )
        for c in counted:
            counts = Inclusion(c.incarnation, key.version, key.attempt)
            self.last_included[c.island] = counts
        self.version, self.attempt = key.version + 1, 0
        self._expired_in_a_row = self._broken_in_a_row = 0
        self._timing.published()
        self._leave_round(Phase.WAITING)
        self._tell(now, f"published version {self.version}")
        return [Published(key), *self._open_if_due(now)]

    def malformed(self, key: RoundKey, island: str, reason: str, now: float) -> list[Instruction]:
        """Refuse a contributor of a closing attempt, which goes on without it; nothing moved.

        For an exchange where the payloads of a contribution are first read after the close.
        """
        self._require(Phase.CLOSING, "malformed", key)
        self.phase = Phase.OPEN
        return self.refused(key, island, self.incarnations[island], reason, now)

    def result_broken(self, key: RoundKey, reason: str, now: float) -> list[Instruction]:
        """Expire a closing attempt whose result cannot be used; nothing moved."""
        self._require(Phase.CLOSING, "result_broken", key)
        self._broken_in_a_row += 1
        self._expiry_is_numeric = True
        return self._expire(f"result not usable: {reason}", now)

    def abandoned(
        self, key: RoundKey, missing: tuple[str, ...], reason: str, now: float
    ) -> list[Instruction]:
        """Expire a closing attempt whose commit did not come about, for want of `missing`."""
        self._require(Phase.CLOSING, "abandoned", key)
        return self._expire(reason, now, missing)

    def expiry_recorded(self, key: RoundKey, now: float) -> list[Instruction]:
        """Take note that the expiry of `key` is durable; the next attempt may open."""
        self._require(Phase.EXPIRING, "expiry_recorded", key)
        self.attempt += 1
        self._expired_in_a_row += 1
        is_numeric = self._expiry_is_numeric
        self._expiry_is_numeric = False
        self._timing.expired(now)
        self._leave_round(Phase.WAITING)
        if is_numeric and self._is_beyond(self._broken_in_a_row, or_at=_MOST_BROKEN):
            reason = (
                f"{self._broken_in_a_row} attempts in a row came to nothing: {self._expiry_reason}"
            )
            return self._lose(key, reason, is_numeric=True)
        if self._is_beyond(self._expired_in_a_row):
            return self._lose(
                key,
                f"{self._expired_in_a_row} attempts in a row expired: {self.story[-1]}",
                is_numeric=False,
            )
        return self._open_if_due(now)

    def outcome(self, key: RoundKey, island: str, incarnation: int) -> Outcome | None:
        """Say how a contribution ended; None while its attempt is undecided."""
        if key.version == self.version:
            if key.attempt < self.attempt:
                return Outcome(key, OutcomeKind.EXPIRED, "the attempt is over")
            if island in self.left:
                return Outcome(key, OutcomeKind.REFUSED, self.left[island])
            return None
        if key.version > self.version:
            return None
        past = self.past.get(key.version)
        if past is None:
            counted = self.last_included.get(island)
            if counted == Inclusion(incarnation, key.version, key.attempt):
                return Outcome(key, OutcomeKind.INCLUDED)
            return Outcome(key, OutcomeKind.NOT_INCLUDED, "published long ago")
        if key.attempt < past.attempt:
            return Outcome(key, OutcomeKind.EXPIRED, "the attempt is over")
        if (island, incarnation) in past.contributors:
            return Outcome(key, OutcomeKind.INCLUDED)
        if island in past.refused:
            return Outcome(key, OutcomeKind.REFUSED, past.refused[island])
        why = past.rejected.get(island, f"version {key.version + 1} is published")
        return Outcome(key, OutcomeKind.NOT_INCLUDED, why)

    def forget_before(self, version: int) -> None:
        """Drop the memory of rounds whose base is older than `version`."""
        for old in [v for v in self.past if v < version]:
            del self.past[old]

    def _is_beyond(self, count: int, *, or_at: float = math.inf) -> bool:
        """Whether so many attempts in a row that came to nothing end the run."""
        limit = self.rules.max_expired_in_a_row
        return count >= (or_at if limit is None else limit)

    def _eligible(self) -> tuple[str, ...]:
        return tuple(island for island in self.live if island in self.incarnations)

    def _can_open(self) -> bool:
        if self.rules.min_members is None:
            return self._eligible() == self.rules.members
        least = max(self.rules.min_members, self.rules.min_contributions or 1, 1)
        return len(self._eligible()) >= least

    def _open_if_due(self, now: float) -> list[Instruction]:
        if (
            self.phase is not Phase.WAITING
            or not self._can_open()
            or now < self._timing.opens_at(self.live)
        ):
            return []
        self.phase = Phase.OPEN
        self.members = self._eligible()
        self._is_flush_attempt = self.is_finishing
        self._timing.opened(now)
        self._tell(now, f"opened {self.key}")
        return [Opened(self.key, self.members, self._is_flush_attempt)]

    def _begin_deadline(self, now: float) -> None:
        if math.isinf(self._deadline):
            self._deadline_s = self._timing.deadline_s(self.members)
            self._deadline = now + self._deadline_s

    def _is_complete(self, contribution: Contribution) -> bool:
        return len(contribution.lanes) == self.rules.num_lanes

    def _absent(self) -> tuple[str, ...]:
        done = {c.island for c in self.contributions.values() if self._is_complete(c)}
        return tuple(m for m in self.members if m not in done and m not in self.left)

    def _advance(self, now: float) -> list[Instruction]:
        """Close, begin or end the grace window, or expire, after a contribution came or went."""
        active = [m for m in self.members if m not in self.left]
        quorum = self.rules.min_contributions
        if len(active) < (quorum or 1):
            return self._expire("too few members have anything valid to send", now)
        complete = [c for c in self.contributions.values() if self._is_complete(c)]
        kinds = {c.is_flush for c in complete}
        if not self._had_quorum and len(complete) >= (quorum or len(active)):
            self._had_quorum = True
            self._timing.at_quorum(now)
        if len(complete) == len(active) and len(kinds) == 1:
            return self._close(now)
        # A flush closes only with everybody's flush; a mixed attempt waits for its deadline.
        if quorum is None or True in kinds or len(complete) < quorum:
            self.phase, self._grace_end = Phase.OPEN, math.inf
            return []
        if self.phase is Phase.OPEN:
            self.phase = Phase.GRACE
            self._grace_end = min(now + self._timing.grace_s(self.members), self._deadline)
        return self.tick(now)

    def _close(self, now: float) -> list[Instruction]:
        for island in [i for i, c in self.contributions.items() if not self._is_complete(c)]:
            del self.contributions[island]
        contributors = tuple(
            Contributor(
                c.island,
                c.incarnation,
                c.weight_tokens,
                c.weight_steps,
                c.sent_at_inner_step,
                tuple(c.lanes[lane_id] for lane_id in sorted(c.lanes)),
            )
            for _, c in sorted(self.contributions.items())
        )
        self.phase = Phase.CLOSING
        self._timing.closed(now)
        self._tell(now, f"closing with {', '.join(c.island for c in contributors)}")
        is_flush = all(c.is_flush for c in self.contributions.values())
        return [Close(self.key, contributors, is_flush, dict(self.left))]

    def _expire(
        self, reason: str, now: float, missing: tuple[str, ...] | None = None
    ) -> list[Instruction]:
        self._missing = self._absent() if missing is None else missing
        self.phase = Phase.EXPIRING
        reason = bounded_text(reason)
        self._expiry_reason = reason
        self._tell(now, f"expired {self.key}: {reason}")
        return [RecordExpiry(self.key, reason, self._missing, self._broken_in_a_row)]

    def _lose(self, key: RoundKey, reason: str, *, is_numeric: bool) -> list[Instruction]:
        self.phase = Phase.LOST
        return [Lost(key, self._missing, reason, is_numeric)]

    def _leave_round(self, phase: Phase) -> None:
        self.phase = phase
        self.members = ()
        self.contributions = {}
        self.left = {}
        self._had_quorum = False
        self._deadline = self._grace_end = math.inf

    def _require(self, phase: Phase, event: str, key: RoundKey | None = None) -> None:
        if self.phase is not phase or (key is not None and key != self.key):
            raise InvalidTransition(event, self.phase, key or self.key, self.key, self.story)

    def _tell(self, now: float, what: str) -> None:
        self.story.append(f"{now:.3f} {what}")


class InvalidTransition(Exception):
    """An event that cannot happen in this phase: an error of the caller, with the story so far."""

    def __init__(
        self, event: str, phase: Phase, key: RoundKey, current: RoundKey, story: Iterable[str]
    ) -> None:
        """Carry the event, where the machine stood, and what led there."""
        lines = "\n  ".join(story)
        super().__init__(f"{event}({key}) in phase {phase} of {current}; story:\n  {lines}")


def _bounded(past: PastRound) -> PastRound:
    refused = {island: bounded_text(why, MOST_REASON) for island, why in past.refused.items()}
    return replace(past, refused=refused)


def _is_same_contribution(held: Contribution, lane: LaneArrival) -> bool:
    return (
        held.incarnation == lane.incarnation
        and held.weight_tokens == lane.weight_tokens
        and held.weight_steps == lane.weight_steps
        and held.sent_at_inner_step == lane.sent_at_inner_step
        and held.is_flush == lane.is_flush
        and held.lanes.get(lane.lane_id, lane.digest) == lane.digest
    )
