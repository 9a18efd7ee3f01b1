"""One round of the all-reduce exchange: two pure machines, the decider's and a peer's.

No syncer: every island has a peer, which holds theta, published and momentum of all fragments.
Carriers give their contributions to the peer of their own island; who is counted is decided by
`FragmentRounds`, here in the coordinator, from declared digests alone. Then

    CLOSING   an assignment names the contributors, their weights, and the owner of each lane
              a contributor whose payload does not decode is refused, the rest assigned again
              owners pull contributions, sum them and take the outer step (reduce-scatter);
              the others pull the results (all-gather); each stages the next version durably
              and reports PREPARED(digest)
    commit    when all members have voted, or at the deadline, and most, or both of two, are
              prepared with one digest: one journal entry, then the news
    refusal   a contributor whose payload does not decode leaves the attempt, the others' are
              assigned again
    abort     a deadline without such a digest, a contributor that started again, a result that
              most cannot use: EXPIRED

Only the decider decides. A peer in doubt keeps what it has staged and asks again.

Source: PROTOCOL.md, "All-reduce".
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import Any

import blake3

from diloco.protocol.rounds.state import FragmentRounds
from diloco.protocol.rounds.terms import (
    Admission,
    Close,
    Contributor,
    Instruction,
    LaneArrival,
    Phase,
    RoundKey,
    RoundRules,
)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A closed round: its contributors, and the owner of each lane.

    Everything that a peer sends for it carries its `id`, a digest of its content: an assignment
    made again after a restart of the decider is the same one if and only if its result must be.

    Args:
        key: Of the round.
        members: Islands that must be prepared, sorted.
        contributors: Those that are counted, sorted by island.
        is_flush: Whether the contributions are a flush's.
        refused: Why other members left the attempt.
        generation: Sum of the members' incarnations: it grows whenever one starts again.
    """

    key: RoundKey
    members: tuple[str, ...]
    contributors: tuple[Contributor, ...]
    is_flush: bool
    refused: Mapping[str, str]
    generation: int

    def owner(self, lane_id: int) -> str:
        """Name the contributor that reduces a lane.

        Lanes are dealt in turn, from another island in every round: everybody has the state, and
        a fragment of one lane would have one owner for ever.
        """
        key = self.key
        turn = lane_id + key.fragment_id + key.version + key.attempt + self.generation
        return self.contributors[turn % len(self.contributors)].island

    def contributor(self, island: str) -> Contributor | None:
        """Return what an island contributed, None if it is not counted."""
        return next((c for c in self.contributors if c.island == island), None)

    @property
    def id(self) -> bytes:
        """Digest of the content, 32 bytes."""
        key = self.key
        content = [
            [*astuple(key)],
            self.members,
            [[*c.to_json().values()] for c in self.contributors],
            self.is_flush,
            sorted(self.refused.items()),
            self.generation,
        ]
        return blake3.blake3(json.dumps(content, separators=(",", ":")).encode()).digest()


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a peer has staged durably: digests of the published lanes, and of the whole state."""

    lane_digests: tuple[bytes, ...]
    state_digest: bytes


def commit_record(assignment: Assignment, prepared: Prepared, payload_codec: str) -> dict[str, Any]:
    """Return what the journal keeps of a version: the header of its records, as JSON values."""
    key = assignment.key
    return {
        "version": key.version + 1,
        "fragment_id": key.fragment_id,
        "timeline": key.timeline,
        "attempt": key.attempt,
        "is_flush": assignment.is_flush,
        "payload_codec": payload_codec,
        "digest": blake3.blake3(b"".join(prepared.lane_digests)).hexdigest(),
        "lane_digests": [digest.hex() for digest in prepared.lane_digests],
        "contributors": [c.to_json() for c in assignment.contributors],
        "refused": dict(assignment.refused),
        "last_included": {},  # members are fixed here: nobody falls behind what is remembered
    }


@dataclass(frozen=True, slots=True)
class Assigned:
    """Announce an assignment: its members begin to reduce."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Commit:
    """Write the commit record durably, then call `committed`."""

    assignment: Assignment
    prepared: Prepared


DeciderInstruction = Instruction | Assigned | Commit


class AllReduceRounds:
    """All rounds of one fragment on one timeline, as the decider has them.

    `rounds` admits, closes and expires; this adds what lies between a close and its commit. Methods
    named after events return the instructions that follow; the caller performs them in order.
    """

    def __init__(self, fragment_id: int, timeline: int, rules: RoundRules) -> None:
        """Start unfounded; found it through `rounds.founded`."""
        self.rounds = FragmentRounds(fragment_id, timeline, rules)
        self.assignment: Assignment | None = None
        self.prepared_by: dict[str, Prepared] = {}
        self._broken_by: dict[str, str] = {}
        #: Of the open attempt: who has called whose contribution malformed.
        self._accused: tuple[RoundKey | None, dict[str, str]] = None, {}
        self._deadline = math.inf
        self._is_committing = False

    @property
    def next_wake(self) -> float:
        """Time at which `tick` must be called, infinity when nothing is awaited."""
        return min(self._deadline, self.rounds.next_wake)

    @property
    def phase(self) -> str:
        """Where the round stands, in words."""
        if self.assignment is None:
            return str(self.rounds.phase)
        return f"closing, {len(self.prepared_by)} of {len(self.assignment.members)} prepared"

    def granted(self, island: str, incarnation: int, now: float) -> list[DeciderInstruction]:
        """Record a start of an island; one whose contribution is being reduced is lost."""
        if incarnation <= self.rounds.participants.incarnations.get(island, 0):
            return []
        instructions = self._performed(self.rounds.granted(island, incarnation, now), now)
        if self._is_open_to_abort and island in self._members:
            reason = f"island {island!r} started again while its lanes were reduced"
            instructions += self._abort((island,), reason, now)
        return instructions

    def declared(
        self, lanes: Sequence[LaneArrival], now: float
    ) -> tuple[Admission, list[DeciderInstruction]]:
        """Count a contribution whose lanes lie verified at the peer of its island."""
        instructions: list[DeciderInstruction] = []
        admission = Admission.INVALID
        for lane in lanes:
            admission, follow = self.rounds.lane_received(lane, now)
            instructions += self._performed(follow, now)
            if admission not in (Admission.ACCEPTED, Admission.REPEAT):
                break
        return admission, instructions

    def refused(
        self, key: RoundKey, island: str, incarnation: int, reason: str, now: float
    ) -> list[DeciderInstruction]:
        """Take an island out of this attempt."""
        return self._performed(self.rounds.refused(key, island, incarnation, reason, now), now)

    def prepared(
        self, island: str, incarnation: int, assignment_id: bytes, prepared: Prepared, now: float
    ) -> list[DeciderInstruction]:
        """Count a peer that has staged the result durably."""
        if not self._may_vote(island, incarnation, assignment_id):
            return []
        self._broken_by.pop(island, None)
        self.prepared_by[island] = prepared
        return self._judge(now)

    def _judge(self, now: float) -> list[DeciderInstruction]:
        """Commit what all have staged, or most, once all have voted or the deadline is over.

        So no one vote, be it broken, hostile or missing, keeps the others from a version: its
        island takes the committed state from them. Of two members neither is most.
        """
        assignment = self.assignment
        assert assignment is not None
        num_members = len(assignment.members)
        num_open = num_members - len(self.prepared_by) - len(self._broken_by)
        votes = Counter(self.prepared_by.values()).most_common(1)
        most, num_most = votes[0] if votes else (None, 0)
        if 2 * (num_most + num_open) <= num_members:
            return self._break(self._disagreement(), now)
        is_over = not num_open or now >= self._deadline
        if not is_over or most is None or 2 * num_most <= num_members:
            return []
        self._deadline, self._is_committing = math.inf, True
        return [Commit(assignment, most)]

    def _disagreement(self) -> str:
        if self._broken_by:
            return "; ".join(self._broken_by.values())
        staged = " and ".join(repr(island) for island in self.prepared_by)
        return (
            f"islands {staged} staged different results: the same diloco, torch and policy must be "
            f"in force everywhere"
        )

    def broken(
        self,
        island: str,
        incarnation: int,
        assignment_id: bytes,
        reason: str,
        now: float,
        *,
        malformed: str = "",
    ) -> list[DeciderInstruction]:
        """Count a member that finds the result not usable; where most do, the attempt expires.

        Where the others may still agree it contributes no more, for nobody else has the lanes that
        it was to reduce: the rest is assigned again. So it is without a contributor whose payload
        is said to be `malformed`. A member is believed so of one other in an attempt; one that
        names a second is refused itself.
        """
        if not self._may_vote(island, incarnation, assignment_id):
            return []
        assert self.assignment is not None
        key = self.rounds.key
        of, accused = self._accused
        accused = accused if of == key else {}
        reason = f"island {island!r}: {reason}"
        if self.assignment.contributor(malformed) is None:
            malformed = island
        elif (first := accused.setdefault(island, malformed)) != malformed:
            reason = f"island {island!r} calls {first!r} and {malformed!r} malformed"
            malformed = island
        if malformed == island:
            self.prepared_by.pop(island, None)
            self._broken_by[island] = reason
            decided = self._judge(now)
            if decided or self.assignment.contributor(island) is None:
                return decided
        self._accused = key, accused
        self._leave()
        return self._performed(self.rounds.malformed(key, {malformed: reason}, now), now)

    def tick(self, now: float) -> list[DeciderInstruction]:
        """Let time pass."""
        if self._is_open_to_abort and now >= self._deadline:
            if decided := self._judge(now):
                return decided
            missing = tuple(m for m in self._members if m not in self.prepared_by)
            reason = (
                f"deadline of {self.rounds.rules.deadline_s:g} s after the close; not prepared: "
                f"{', '.join(missing)}"
            )
            return self._abort(missing, reason, now)
        return self._performed(self.rounds.tick(now), now)

    def committed(self, key: RoundKey, now: float) -> list[DeciderInstruction]:
        """Record that the commit record of `key` is durable."""
        assert self._is_committing, f"{key} was not to be committed"
        self._leave()
        return self._performed(self.rounds.committed(key, now), now)

    def expiry_recorded(self, key: RoundKey, now: float) -> list[DeciderInstruction]:
        """Record that the expiry of `key` is durable."""
        return self._performed(self.rounds.expiry_recorded(key, now), now)

    @property
    def _members(self) -> tuple[str, ...]:
        return self.assignment.members if self.assignment is not None else ()

    @property
    def _is_open_to_abort(self) -> bool:
        return self.assignment is not None and not self._is_committing

    def _may_vote(self, island: str, incarnation: int, assignment_id: bytes) -> bool:
        return (
            self.assignment is not None
            and not self._is_committing
            and assignment_id == self.assignment.id
            and island in self.assignment.members
            and incarnation == self.rounds.participants.incarnations.get(island)
        )

    def _performed(
        self, instructions: Sequence[Instruction], now: float
    ) -> list[DeciderInstruction]:
        """Put an assignment in the place of a close."""
        return [self._assign(i, now) if isinstance(i, Close) else i for i in instructions]

    def _assign(self, close: Close, now: float) -> Assigned:
        assert self.rounds.phase is Phase.CLOSING
        members = self.rounds.current.members
        self.assignment = Assignment(
            close.key,
            members,
            close.contributors,
            close.is_flush,
            close.refused,
            sum(self.rounds.participants.incarnations[member] for member in members),
        )
        self.prepared_by, self._broken_by, self._is_committing = {}, {}, False
        self._deadline = now + self.rounds.rules.deadline_s
        return Assigned(self.assignment)

    def _break(self, reason: str, now: float) -> list[DeciderInstruction]:
        key = self.rounds.key
        self._leave()
        return self._performed(self.rounds.result_broken(key, reason, now), now)

    def _abort(self, missing: tuple[str, ...], reason: str, now: float) -> list[DeciderInstruction]:
        key = self.rounds.key
        self._leave()
        return self._performed(self.rounds.abandoned(key, missing, reason, now), now)

    def _leave(self) -> None:
        self.assignment, self.prepared_by, self._broken_by = None, {}, {}
        self._deadline, self._is_committing = math.inf, False


@dataclass(frozen=True, slots=True)
class Announced:
    """What the decider says of a fragment: its committed version, and what is under way.

    `version` -1: not founded.
    """

    version: int = -1
    state_digest: bytes = b""
    attempt: int = 0
    assignment: Assignment | None = None


@dataclass(frozen=True, slots=True)
class Staged:
    """A version that is durable at a peer, and not yet known to be committed.

    `assignment_id` is empty after a restart of the peer: it can be promoted, not reported.
    """

    version: int
    state_digest: bytes
    assignment_id: bytes


class Duty(StrEnum):
    """What a peer has to do for one fragment next."""

    WAIT = "wait"
    FOUND = "found"
    REDUCE = "reduce"
    REPORT = "report"
    PROMOTE = "promote"
    HEAL = "heal"
    STOP = "stop"


def duty(version: int, state_digest: bytes, staged: Staged | None, announced: Announced) -> Duty:
    """Return what a peer does that holds `version` (-1: none), after `announced`.

    FOUND tells the decider what there is to go on from, if anything; REDUCE takes part in the
    assignment; REPORT says PREPARED; PROMOTE makes the staged version the newest; HEAL takes the
    committed state from another member; STOP: the decider has forgotten a version that was
    committed.
    """
    if announced.version < 0:
        return Duty.FOUND
    if version > announced.version:
        return Duty.STOP
    if version < announced.version:
        is_staged = staged is not None and (staged.version, staged.state_digest) == (
            announced.version,
            announced.state_digest,
        )
        return Duty.PROMOTE if is_staged and version == announced.version - 1 else Duty.HEAL
    if state_digest != announced.state_digest:
        return Duty.HEAL
    if announced.assignment is None:
        return Duty.WAIT
    if staged is not None and staged.assignment_id == announced.assignment.id:
        return Duty.REPORT
    return Duty.REDUCE


def gathers_mean(numel: int, contribution_bytes: int, num_contributors: int) -> bool:
    """Whether an owner hands on the float32 mean of a lane, or the contributions themselves.

    Every member must come to the same theta and momentum, to the bit, so it needs the mean of the
    contributions exactly: 4 bytes a value, or the encoded ones that it lacks, if they are smaller.

    Args:
        numel: Values of the lane.
        contribution_bytes: Encoded size of one contribution to it.
        num_contributors: How many are counted.
    """
    return 4 * numel <= (num_contributors - 1) * contribution_bytes
