"""Decides about the rounds of one fragment: a pure machine of events, times and instructions.

It decides who is counted, when a round closes and when it expires; it moves no byte, reads no
clock and knows no tensor. The syncer performs its instructions in the order given and tells it
when a durable write has happened; a simulator and the tests drive the same object.

`transitions` lists every move from phase to phase.

Source: PROTOCOL.md, "Rounds"; grace window of Decoupled DiLoCo (arXiv 2604.21428, Eq. 3).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from diloco.bounded_text import MOST_NAMES, MOST_REASON, bounded_text
from diloco.protocol.rounds.members import Attempt, Participants
from diloco.protocol.rounds.past_rounds import PastRounds
from diloco.protocol.rounds.terms import (
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
    Roster,
    RoundKey,
    RoundRules,
)
from diloco.protocol.rounds.timing import FixedTiming, Timing, TimingRules
from diloco.protocol.rounds.transitions import RoundEvent, after
from diloco.refusals import Cause

#: Results in a row that cannot be used and end the run, also where expiries do not.
_MOST_BROKEN = 3


class FragmentRounds:
    """All rounds of one fragment on one timeline.

    Methods named after events return the instructions that follow; the caller performs them in
    order. `next_wake` says when `tick` is due. `current` is the attempt under way, `participants`
    are the islands that may take part in the next one, `past` the rounds that were published.
    """

    def __init__(
        self, fragment_id: int, timeline: int, rules: RoundRules, timing: Timing | None = None
    ) -> None:
        """Start unfounded: nothing opens before `founded`; no `timing`: what the rules say."""
        if not rules.members or list(rules.members) != sorted(set(rules.members)):
            raise ValueError(f"members must be sorted and distinct, got {rules.members}")
        self.fragment_id, self.timeline, self.rules = fragment_id, timeline, rules
        self.version = self.attempt = 0
        self.phase = Phase.UNFOUNDED
        self.participants = Participants(rules.members)
        self.current = Attempt(rules.num_lanes)
        self.past = PastRounds()
        #: Island -> the last expired attempt at the next version that it had left, and why.
        self.refused_at: dict[str, tuple[int, str]] = {}
        self.is_finishing = self.is_over = self._is_held = False
        self.opened_at = self.closed_at = self._quorum_at = -math.inf
        self.history: deque[str] = deque(maxlen=40)
        self._timing = timing or FixedTiming(rules.deadline_s, rules.grace_s, rules.opening_floor_s)
        self._deadline = math.inf
        self._deadline_s = rules.deadline_s
        self._next: tuple[RoundRules, TimingRules | None] | None = None
        self._grace_end = math.inf
        self._had_quorum = False
        self._expired_in_a_row = 0
        self._broken_in_a_row = 0
        self._rejected_in_a_row = 0
        self._rejected = set[str]()  # those whom the guard refused in this attempt
        self._missing: tuple[str, ...] = ()
        self._expiry_is_numeric = False
        self._expiry_reason = ""

    @property
    def next_wake(self) -> float:
        """Time at which `tick` must be called, infinity when nothing is awaited."""
        match self.phase:
            case Phase.WAITING if self._can_open:
                return self._opens_at
            case Phase.OPEN | Phase.GRACE if not self.current.is_held_up:
                return self._ends_at
            case _:
                return math.inf

    # -- questions -------------------------------------------------------------------------------

    @property
    def key(self) -> RoundKey:
        """Key of the current attempt."""
        return RoundKey(self.timeline, self.fragment_id, self.version, self.attempt)

    @property
    def is_open(self) -> bool:
        """Whether contributions to `key` are accepted."""
        return self.phase in (Phase.OPEN, Phase.GRACE)

    @property
    def is_between(self) -> bool:
        """Whether there is no attempt: none is open or on its way to an end."""
        return self.phase in (Phase.UNFOUNDED, Phase.WAITING)

    def admit(self, lane: LaneArrival) -> Admission:
        """Judge a lane by its header, before its payload is read; changes nothing."""
        key = lane.key
        if (objection := self.objection(lane)) is not None:
            return objection.admission
        if self.phase is Phase.UNFOUNDED:
            return Admission.NOT_OPEN
        if key.version > self.version:
            # The store lost a version: polls say so.
            return Admission.NOT_OPEN
        if self.outcome(key, lane.island, lane.incarnation) is not None:
            return Admission.OVER
        if self.phase is Phase.WAITING:
            return Admission.NOT_OPEN
        if lane.island not in self.current.members:
            return Admission.NOT_OPEN
        held = self.current.contributions.get(lane.island)
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
        if self.participants.is_fenced(lane.island, lane.incarnation):
            newest = self.participants.newest(lane.island)
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
            and lane.is_flush != self.current.takes_flush
        ):
            taken = "flushes only" if self.current.takes_flush else "no flushes yet"
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

    def weight_problem(self, lane: LaneArrival) -> str:
        """Say why a contribution cannot count what its lane says; empty if it can."""
        return self.rules.weights.problem(
            tokens=lane.weight_tokens,
            steps=lane.weight_steps,
            sent_at=lane.sent_at_inner_step,
            step_tokens=lane.step_tokens,
        )

    def history_of(self, lane: LaneArrival) -> str:
        """Say in words where a lane that was judged stands."""
        key = lane.key
        if (objection := self.objection(lane)) is not None:
            return objection.words
        if self.phase is not Phase.UNFOUNDED and key.version > self.version:
            return (
                f"version {self.version} of fragment {self.fragment_id} is open, not {key.version}"
            )
        return f"{key} is {self.phase}"

    def outcome(self, key: RoundKey, island: str, incarnation: int) -> Outcome | None:
        """Say how a contribution ended; None while its attempt is undecided.

        One of an earlier timeline counts if what the run was resumed from has it, and else not.
        """
        if key.timeline < self.timeline and key.version >= self.version:
            return Outcome(key, OutcomeKind.EXPIRED, "the run was resumed before it ended")
        if key.version > self.version:
            return None
        if key.version < self.version:
            return self.past.outcome(key, island, incarnation)
        if key.attempt < self.attempt:
            left_at, reason = self.refused_at.get(island, (-1, ""))
            if left_at == key.attempt:
                return Outcome(key, OutcomeKind.REFUSED, reason)
            return Outcome(key, OutcomeKind.EXPIRED, "the attempt is over")
        if island in self.current.left:
            return Outcome(key, OutcomeKind.REFUSED, self.current.left[island])
        return None

    # -- events ----------------------------------------------------------------------------------

    @property
    def waits_for(self) -> list[str]:
        """Live members of an open attempt whose contributions are not there yet."""
        if not self.is_open:
            return []
        absent = set(self.current.absent())
        return [m for m in self.current.awaited(self.participants.live) if m in absent]

    def left_s(self, now: float) -> float:
        """Seconds until an open attempt closes with those it has, or expires; inf: no limit."""
        return max(0.0, self._ends_at - now) if self.is_open else math.inf

    @property
    def grace_spent_s(self) -> float:
        """Seconds for which the attempt that was closed last waited beyond its quorum."""
        return self.closed_at - self._quorum_at if self._quorum_at >= self.opened_at else 0.0

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
        rejected_in_a_row: int = 0,
        missing: tuple[str, ...] = (),
        refused_at: Mapping[str, tuple[int, str]] | None = None,
        reason: str = "",
        closed_at: float | None = None,
        expired_at: float | None = None,
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
            rejected_in_a_row: Further ones, in which the guard refused all that came.
            missing: Members that the last of them waited for in vain.
            refused_at: Island -> the last of them that it had left, and why.
            reason: Of the last expiry, where it is known.
            closed_at: When the round of `version` closed; None: not known, the floor counts from
                the start of the timing.
            expired_at: When the last of the expiries was; None: not known, it counts as now.
        """
        self._require(Phase.UNFOUNDED, "founded")
        self.version, self.attempt = version, attempt
        self.past = PastRounds(past, last_included)
        self._move(RoundEvent.FOUNDED)
        self._expired_in_a_row, self._missing = expired_in_a_row, missing
        self._broken_in_a_row, self._rejected_in_a_row = broken_in_a_row, rejected_in_a_row
        self.refused_at = dict(refused_at or {})
        has_floor = not (self.is_over or self.is_finishing)
        self._timing.resumed(
            version,
            closed_at if has_floor else None,
            expired_in_a_row,
            now if expired_at is None else expired_at,
        )
        self._record(now, f"founded at version {version}, attempt {attempt}")
        is_numeric = self._is_beyond(broken_in_a_row, or_at=_MOST_BROKEN)
        if is_numeric or self._is_beyond(expired_in_a_row):
            absent = f"missing: {', '.join(missing) or 'nobody'}"
            last = reason or ("results not usable" if is_numeric else absent)
            return self._lose(
                self.key,
                f"{expired_in_a_row} attempts in a row had expired before this restart; {last}"
                f"{'' if is_numeric else self._refused_text}",
                is_numeric=is_numeric,
            )
        return self._open_if_due(now)

    def granted(self, island: str, incarnation: int, now: float) -> list[Instruction]:
        """Record that `island` presented a valid grant; fences its earlier starts."""
        participants = self.participants
        known = participants.incarnations.get(island, 0)
        if incarnation <= known or participants.is_fenced(island, incarnation):
            return []
        participants.granted(island, incarnation)
        self._record(now, f"{island} holds grant {incarnation}")
        if not self.is_open:
            return self._open_if_due(now)
        # Who declined or was refused has left the attempt, whatever start it is now.
        was_arriving = self.current.forget_arrived(island)
        if dropped := self._drop_fenced():
            return [*dropped, *self._advance(now)]
        return self.tick(now) if was_arriving else []

    def lane_arrived(self, lane: LaneArrival, now: float) -> None:
        """Record that all of a lane is here, in time, and is being verified.

        A contribution of which all lanes are here or verified holds up the end of its attempt
        until it counts or does not: how long verification takes is no lateness of its island.
        `lane_received` or `lane_given_up` follows with the same object, or `refused`.
        """
        if self.admit(lane) is Admission.ACCEPTED and now <= self._ends_at:
            self.current.arrived(lane)

    def lane_given_up(self, lane: LaneArrival, now: float) -> list[Instruction]:
        """Record that a lane is verified no more: its call was cut, or there is no room."""
        was_arriving = self.current.verified(lane)
        return self.tick(now) if was_arriving and self.is_open else []

    def lane_received(self, lane: LaneArrival, now: float) -> tuple[Admission, list[Instruction]]:
        """Count a lane whose payload was received and verified."""
        self.current.verified(lane)
        admission = self.admit(lane)
        if admission is Admission.CONFLICT and self.is_open:
            return admission, self.refused(
                lane.key, lane.island, lane.incarnation, f"conflict in lane {lane.lane_id}", now
            )
        if admission is not Admission.ACCEPTED:
            return admission, []
        held = self.current.contributions.setdefault(
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
        if not self.current.is_complete(held):
            return admission, []
        self._record(now, f"{lane.island} complete, {held.weight_tokens} tokens")
        self._timing.arrived(lane.island, now)
        self._begin_deadline(now)
        return admission, self._advance(now)

    def refused(
        self, key: RoundKey, island: str, incarnation: int, reason: str, now: float
    ) -> list[Instruction]:
        """Take an island out of this attempt: its contribution is malformed, or it declined.

        The reason, which may be a peer's own words, is kept and announced up to `MOST_REASON`.
        """
        if key != self.key or self.participants.is_fenced(island, incarnation):
            return []
        return self._take_out({island: reason}, now)

    def _drop_fenced(self) -> list[DropLanes]:
        """Forget what earlier starts have contributed to the open attempt."""
        current, participants = self.current, self.participants
        earlier = [
            c
            for island, c in sorted(current.contributions.items())
            if participants.is_fenced(island, c.incarnation)
        ]
        for contribution in earlier:
            del current.contributions[contribution.island]
        is_begun = current.left or current.complete
        if not is_begun and set(current.members) <= set(participants.live):
            # Nobody is left who waits: when all islands start again, none of them is late yet.
            self._deadline = math.inf
        return [DropLanes(self.key, c.island, c.incarnation) for c in earlier]

    def _take_out(self, reasons: Mapping[str, str], now: float) -> list[Instruction]:
        """Let members leave the open attempt, whichever starts of them are here.

        All of them before anything follows: else what one leaves behind could close the attempt
        with the contribution of the next.
        """
        staying = set(self.current.members) - set(self.current.left)
        leaving = {i: reasons[i] for i in sorted(reasons) if i in staying}
        if not self.is_open or not leaving:
            return []
        instructions: list[Instruction] = []
        for island, reason in leaving.items():
            self.current.forget_arrived(island)
            held = self.current.contributions.pop(island, None)
            if held is not None:
                instructions.append(DropLanes(self.key, island, held.incarnation))
            reason = self.current.left[island] = bounded_text(reason, MOST_REASON)
            self._record(now, f"{island} left the attempt: {reason}")
        # It waits for the round's end too: those that are still to come may be dead.
        self._begin_deadline(now)
        return instructions + self._advance(now)

    def has_no_room(
        self, key: RoundKey, island: str, incarnation: int, now: float
    ) -> list[Instruction]:
        """Let the deadline begin again: the syncer itself has no room for what a member sends.

        A deadline is for members that do not come. This one has, and comes again until there is
        room; the deadline passes only once it does so no more. (To count it as late instead would
        let a full disk choose whose work is merged.) A grace window ends without it, as ever.
        """
        is_member = island in self.current.members and island not in self.current.left
        if key != self.key or not is_member or self.participants.is_fenced(island, incarnation):
            return []
        if math.isfinite(self._deadline):
            self._deadline = now + self._deadline_s
        return []

    def set_roster(self, roster: Roster, now: float) -> list[Instruction]:
        """Take who may take part in the next openings, and whose earlier starts count no more.

        Where members are fixed, all of the roster are waited for, be they here or not; one that
        it leaves out is no member any more, of the open attempt either.
        """
        has_fixed_members = self.rules.min_members is None
        self.participants.set_roster(roster, has_fixed_members=has_fixed_members)
        if has_fixed_members:
            self.rules = replace(self.rules, members=self.participants.live)
        return self._go_by_roster({}, now) + self._open_if_due(now)

    def _go_by_roster(self, refused: Mapping[str, str], now: float) -> list[Instruction]:
        """Let who is refused or fenced leave the open attempt, and wait for nobody who is gone."""
        current, participants = self.current, self.participants
        live = participants.live
        leaving = dict.fromkeys(participants.fenced, "fenced by the coordinator")
        if self.rules.min_members is None:
            for island in set(current.members) - set(live):
                leaving[island] = "the run goes on without this island"
        instructions = self._take_out({**leaving, **refused}, now)
        if self.is_open and not set(current.members) - set(current.left) <= set(live):
            # Who is left has begun to wait for islands that may never come.
            self._begin_deadline(now)
            if current.awaited(live):
                instructions += self._advance(now)
            else:
                instructions += self._expire("none of its members lives", now)
        return instructions

    def set_rules(
        self, rules: RoundRules, measured: TimingRules | None, now: float
    ) -> list[Instruction]:
        """Take rules that count from the next opening on; what is open keeps those it has."""
        self._next = rules, measured
        if self.is_between:
            self._take_rules()
        return self._open_if_due(now)

    def fetched(self, now: float) -> None:
        """Record that the last contributor was sent what was published last."""
        self._timing.fetched(now)

    def finishing(self) -> None:
        """Open flush attempts only from now on: the fragment has merged the run's tokens.

        What is open stays what it is. A flush of a run whose members come and go closes with those
        that came by its deadline.
        """
        assert self.rules.min_members is not None, "a run of fixed members ends with its steps"
        self.is_finishing = True

    def end(self) -> None:
        """Open nothing any more: what was published last is the fragment's end."""
        self.is_over = True

    def tick(self, now: float) -> list[Instruction]:
        """Let time pass: open what is due, end the grace window, expire what is overdue."""
        if self.phase is Phase.WAITING:
            return self._open_if_due(now)
        if now < self._ends_at or self.current.is_held_up:
            return []
        if self.phase is Phase.GRACE:
            return self._close(now)
        if self.phase is Phase.OPEN:
            if self.current.takes_flush and self.current.complete:
                return self._close(now)
            names = ", ".join(self.current.absent()) or "nobody (flush and ordinary ones are mixed)"
            return self._expire(f"deadline of {self._deadline_s:g} s; missing: {names}", now)
        return []

    def committed(
        self, key: RoundKey, now: float, rejected: Mapping[str, str] | None = None
    ) -> list[Instruction]:
        """Record that version `key.version` + 1 is durable.

        Args:
            key: Of the round.
            now: Time.
            rejected: Contributors of the close that the merge has left out, and why.
        """
        self._require(Phase.CLOSING, "committed", key)
        rejected = rejected or {}
        counted = [c for c in self.current.contributions.values() if c.island not in rejected]
        contributors = frozenset((c.island, c.incarnation) for c in counted)
        past = PastRound(key.attempt, contributors, dict(self.current.left), dict(rejected))
        self.past.published(key, past)
        self.version, self.attempt = key.version + 1, 0
        self._expired_in_a_row = self._broken_in_a_row = self._rejected_in_a_row = 0
        self.refused_at = {}
        self._timing.published()
        self._leave_round(RoundEvent.COMMITTED)
        self._record(now, f"published version {self.version}")
        return [Published(key), *self._open_if_due(now)]

    def rejected(self, key: RoundKey, rejected: Mapping[str, str], now: float) -> list[Instruction]:
        """Refuse contributors of a closing attempt, as the guard of the merge does; nothing moved.

        It waits for the others, without those who were fenced while it closed. One that has started
        again since is not refused for what its earlier start sent: it is waited for. Where all its
        members are refused, it is no expiry in a row: nobody was away.
        """
        self._require(Phase.CLOSING, "rejected", key)
        self._move(RoundEvent.REJECTED)
        self._deadline += now - self.closed_at  # nobody was late while it was merged
        held, newest = self.current.contributions, self.participants.incarnations
        refused = {i: why for i, why in rejected.items() if held[i].incarnation >= newest[i]}
        self._rejected |= refused.keys()
        instructions = [*self._drop_fenced(), *self._go_by_roster(refused, now)]
        return instructions + (self._advance(now) if self.is_open else [])

    def result_broken(self, key: RoundKey, reason: str, now: float) -> list[Instruction]:
        """Expire a closing attempt whose result cannot be used; nothing moved."""
        self._require(Phase.CLOSING, "result_broken", key)
        self._broken_in_a_row += 1
        self._expiry_is_numeric = True
        return self._expire(f"result not usable: {reason}", now)

    def expiry_recorded(self, key: RoundKey, now: float) -> list[Instruction]:
        """Record that the expiry of `key` is durable; the next attempt may open."""
        self._require(Phase.EXPIRING, "expiry_recorded", key)
        self.refused_at = self._refused_at()
        self.attempt += 1
        self._rejected_in_a_row += self._all_rejected
        self._expired_in_a_row += not self._all_rejected
        is_numeric = self._expiry_is_numeric
        self._expiry_is_numeric = False
        self._timing.expired(now)
        self._leave_round(RoundEvent.RECORDED)
        if is_numeric and self._is_beyond(self._broken_in_a_row, or_at=_MOST_BROKEN):
            reason = (
                f"{self._broken_in_a_row} attempts in a row were of no use: {self._expiry_reason}"
            )
            return self._lose(key, reason, is_numeric=True)
        if self._is_beyond(self._expired_in_a_row):
            return self._lose(
                key,
                f"{self._expired_in_a_row} attempts in a row expired, the last, {key}: "
                f"{self._expiry_reason}{self._refused_text}",
                is_numeric=False,
            )
        return self._open_if_due(now)

    @property
    def _refused_text(self) -> str:
        return "".join(
            f"; of attempt {attempt} {island} was out: {why}"
            for island, (attempt, why) in sorted(self.refused_at.items())[:MOST_NAMES]
        )

    def _is_beyond(self, count: int, *, or_at: float = math.inf) -> bool:
        """Whether so many expired attempts in a row end the run."""
        limit = self.rules.max_expired_in_a_row
        return count >= (or_at if limit is None else limit)

    def held(self, is_held: bool, now: float) -> list[Instruction]:
        """Open nothing while it is held; what is open goes on."""
        self._is_held = is_held
        return self._open_if_due(now)

    @property
    def _can_open(self) -> bool:
        return not (self.is_over or self._is_held) and self.participants.can_open(self.rules)

    @property
    def _ends_at(self) -> float:
        """When the open attempt closes with those it has, or expires."""
        return self._grace_end if self.phase is Phase.GRACE else self._deadline

    @property
    def _opens_at(self) -> float:
        """When the next attempt may open; a first flush at once: its islands would train on."""
        if self.is_finishing and not self._expired_in_a_row:
            return -math.inf
        return self._timing.opens_at(self.participants.live)

    def _open_if_due(self, now: float) -> list[Instruction]:
        if self.phase is not Phase.WAITING or not self._can_open or now < self._opens_at:
            return []
        self._move(RoundEvent.OPENED)
        self.current.members = self.participants.eligible()
        self.current.takes_flush = self.is_finishing
        self.opened_at = now
        self._timing.opened(now)
        self._record(now, f"opened {self.key}")
        return [Opened(self.key, self.current.members, self.current.takes_flush)]

    def _begin_deadline(self, now: float) -> None:
        if math.isinf(self._deadline):
            self._deadline_s = self._timing.deadline_s(self.current.members)
            self._deadline = now + self._deadline_s

    def _advance(self, now: float) -> list[Instruction]:
        """Close, begin or end the grace window, or expire, after a contribution came or went."""
        quorum = self.rules.min_contributions
        if len(set(self.current.members) - set(self.current.left)) < (quorum or 1):
            if self.phase is Phase.GRACE:
                self._move(RoundEvent.QUORUM_GONE)
            return self._expire("too few members have anything valid to send", now)
        complete = self.current.complete
        kinds = {c.is_flush for c in complete}
        awaited = len(self.current.awaited(self.participants.live))
        if not self._had_quorum and len(complete) >= (quorum or awaited):
            self._had_quorum, self._quorum_at = True, now
            self._timing.at_quorum(now)
        if len(complete) == awaited >= (quorum or 1) and len(kinds) == 1:
            return self._close(now)
        # A flush closes only with everybody's flush; a mixed attempt waits for its deadline.
        if quorum is None or True in kinds or len(complete) < quorum:
            if self.phase is Phase.GRACE:
                self._move(RoundEvent.QUORUM_GONE)
            self._grace_end = math.inf
            return self.tick(now)
        if self.phase is Phase.OPEN:
            self._move(RoundEvent.QUORUM)
            self._grace_end = min(now + self._timing.grace_s(self.current.members), self._deadline)
        return self.tick(now)

    def _close(self, now: float) -> list[Instruction]:
        # What was being verified is received again once the attempt is open again.
        self.current.drop_incomplete()
        contributors = tuple(
            Contributor(
                c.island,
                c.incarnation,
                c.weight_tokens,
                c.weight_steps,
                c.sent_at_inner_step,
                tuple(c.lanes[lane_id] for lane_id in sorted(c.lanes)),
            )
            for _, c in sorted(self.current.contributions.items())
        )
        self._move(RoundEvent.CLOSED)
        self.closed_at = now
        self._timing.closed(now)
        self._record(now, f"closing with {', '.join(c.island for c in contributors)}")
        is_flush = all(c.is_flush for c in self.current.contributions.values())
        # A faulty island that was alone then must not change by what the others are judged now.
        is_of_all = self.refused_at.keys() >= set(self.current.members)
        rejected = self._rejected_in_a_row if is_of_all else 0
        return [Close(self.key, contributors, is_flush, dict(self.current.left), rejected)]

    def _expire(self, reason: str, now: float) -> list[Instruction]:
        self._missing = self.current.absent()
        self._move(RoundEvent.EXPIRED)
        reason = bounded_text(reason)
        self._expiry_reason = reason
        self._record(now, f"expired {self.key}: {reason}")
        return [
            RecordExpiry(
                self.key,
                reason,
                self._missing,
                self._broken_in_a_row,
                self._rejected_in_a_row + self._all_rejected,
                self._refused_at(),
            )
        ]

    @property
    def _all_rejected(self) -> bool:
        """Whether the guard has refused every member of this attempt."""
        return self._rejected >= set(self.current.members)

    def _refused_at(self) -> dict[str, tuple[int, str]]:
        """Add those who have left this attempt to those who left earlier ones."""
        return {
            **self.refused_at,
            **{i: (self.attempt, why) for i, why in self.current.left.items()},
        }

    def _lose(self, key: RoundKey, reason: str, *, is_numeric: bool) -> list[Instruction]:
        self._move(RoundEvent.LOST)
        return [Lost(key, self._missing, reason, is_numeric)]

    def _leave_round(self, event: RoundEvent) -> None:
        self._move(event)
        self.current.clear()
        self._had_quorum, self._rejected = False, set()
        self._deadline = self._grace_end = math.inf
        self._take_rules()

    def _take_rules(self) -> None:
        if self._next is None:
            return
        (rules, measured), self._next = self._next, None
        self.rules = (
            rules
            if rules.min_members is not None
            else replace(rules, members=self.participants.live)
        )
        self._timing.set_rules(rules, measured)

    def _move(self, event: RoundEvent) -> None:
        """Go where the table says; a move that it does not list is a defect of this machine."""
        if (phase := after(self.phase, event)) is None:
            raise InvalidTransition(event, self.phase, self.key, self.key, self.history)
        self.phase = phase

    def _require(self, phase: Phase, event: str, key: RoundKey | None = None) -> None:
        if self.phase is not phase or (key is not None and key != self.key):
            raise InvalidTransition(event, self.phase, key or self.key, self.key, self.history)

    def _record(self, now: float, what: str) -> None:
        self.history.append(f"{now:.3f} {what}")


class InvalidTransition(Exception):
    """An event came in a phase where it cannot happen: an error of the caller, with the history."""

    def __init__(
        self, event: str, phase: Phase, key: RoundKey, current: RoundKey, history: Iterable[str]
    ) -> None:
        """Carry the event, where the machine stood, and what led there."""
        lines = "\n  ".join(history)
        super().__init__(f"{event}({key}) in phase {phase} of {current}; history:\n  {lines}")


def _is_same_contribution(held: Contribution, lane: LaneArrival) -> bool:
    return (
        held.incarnation == lane.incarnation
        and held.weight_tokens == lane.weight_tokens
        and held.weight_steps == lane.weight_steps
        and held.sent_at_inner_step == lane.sent_at_inner_step
        and held.is_flush == lane.is_flush
        and held.lanes.get(lane.lane_id, lane.digest) == lane.digest
    )
