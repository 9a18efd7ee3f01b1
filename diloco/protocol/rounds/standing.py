"""Where the rounds of one fragment stand, and what follows for a lane or a contribution.

Questions only, asked by the syncer before and after a payload is read; what changes the answers is
in `state`.

Source: PROTOCOL.md, "Outcomes", "Members" and "Fencing".
"""

from __future__ import annotations

from collections.abc import Set

from diloco.protocol.rounds.terms import (
    Admission,
    Contribution,
    Inclusion,
    LaneArrival,
    Objection,
    Outcome,
    OutcomeKind,
    PastRound,
    Phase,
    Roster,
    RoundKey,
    RoundRules,
)
from diloco.refusals import Cause


class Standing:
    """The public state of `FragmentRounds`, and the questions that it answers."""

    def __init__(self, fragment_id: int, timeline: int, rules: RoundRules) -> None:
        """Stand at the beginning: nothing is founded."""
        self.fragment_id = fragment_id
        self.timeline = timeline
        self.rules = rules
        self.version = 0
        self.attempt = 0
        self.phase = Phase.UNFOUNDED
        self.members: tuple[str, ...] = ()
        self.contributions: dict[str, Contribution] = {}
        self.left: dict[str, str] = {}
        #: Island -> the last expired attempt at the next version that it had left, and why.
        self.refused_at: dict[str, tuple[int, str]] = {}
        self.incarnations: dict[str, int] = {}
        self.past: dict[int, PastRound] = {}
        self.last_included: dict[str, Inclusion] = {}
        self.takes_flush = False
        self.live = rules.members
        self.is_finishing = False
        self.is_over = False
        self._is_held = False
        self._roster = Roster(rules.members)
        self._least: dict[str, int] = {}
        #: Here and not verified yet, by identity: of a lane that came twice each is on its own.
        self._arrived: dict[int, LaneArrival] = {}

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
            # The store lost a version: polls say so.
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
            and lane.is_flush != self.takes_flush
        ):
            taken = "flushes only" if self.takes_flush else "no flushes yet"
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
        if key.version == self.version:
            if key.attempt < self.attempt:
                left_at, reason = self.refused_at.get(island, (-1, ""))
                if left_at == key.attempt:
                    return Outcome(key, OutcomeKind.REFUSED, reason)
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
        why = past.refused.get(island) or past.rejected.get(island)
        if why is not None:
            return Outcome(key, OutcomeKind.REFUSED, why)
        published = f"version {key.version + 1} is published"
        return Outcome(key, OutcomeKind.NOT_INCLUDED, published)

    def has_whole(self, island: str, incarnation: int) -> bool:
        """Whether the present attempt has all of the contribution of a start."""
        held = self.contributions.get(island)
        return held is not None and held.incarnation == incarnation and self._is_complete(held)

    def newest_counted(self, island: str, incarnation: int) -> Inclusion | None:
        """Return the newest contribution of a start that counts, as far as is remembered."""
        newest = self.last_included.get(island)
        if newest is not None and newest.incarnation == incarnation:
            return newest
        versions = [v for v, p in self.past.items() if (island, incarnation) in p.contributors]
        if not versions:
            return None
        return Inclusion(incarnation, max(versions), self.past[max(versions)].attempt)

    def _eligible(self) -> tuple[str, ...]:
        """Who lives, and is here with a start that counts."""
        return tuple(
            island
            for island in self.live
            if island in self.incarnations and not self.is_fenced(island, self.incarnations[island])
        )

    def _can_open(self) -> bool:
        roster = self._roster
        if self.is_over or self._is_held or roster.is_paused or roster.is_gathering:
            return False
        eligible = self._eligible()
        if self.rules.min_members is None:
            return bool(eligible) and eligible == self.rules.members
        least = self._roster.min_islands or self.rules.min_members
        return len(eligible) >= max(least, self.rules.min_contributions or 1, 1)

    def _awaited(self) -> list[str]:
        """Members whose contributions are there or may come: not those who left or lapsed."""
        live = set(self.live)
        return [m for m in self.members if m not in self.left and (m in live or self._is_here(m))]

    def _is_here(self, island: str) -> bool:
        """Whether every lane of the contribution of an island is here, verified or not yet."""
        arrived = {lane.lane_id for lane in self._arrived.values() if lane.island == island}
        return len(self._verified(island) | arrived) == self.rules.num_lanes

    def _verified(self, island: str) -> Set[int]:
        held = self.contributions.get(island)
        return held.lanes.keys() if held is not None else set()

    def _is_held_up(self) -> bool:
        """Whether a contribution that came whole, and in time, is still being verified."""
        return any(
            lane.lane_id not in self._verified(lane.island) and self._is_here(lane.island)
            for lane in self._arrived.values()
        )

    def _absent(self) -> tuple[str, ...]:
        done = {c.island for c in self.contributions.values() if self._is_complete(c)}
        return tuple(m for m in self.members if m not in done and m not in self.left)

    def _is_complete(self, contribution: Contribution) -> bool:
        return len(contribution.lanes) == self.rules.num_lanes


def _is_same_contribution(held: Contribution, lane: LaneArrival) -> bool:
    return (
        held.incarnation == lane.incarnation
        and held.weight_tokens == lane.weight_tokens
        and held.weight_steps == lane.weight_steps
        and held.sent_at_inner_step == lane.sent_at_inner_step
        and held.is_flush == lane.is_flush
        and held.lanes.get(lane.lane_id, lane.digest) == lane.digest
    )
