"""The terms of a round: its key, its rules, contributions, outcomes and instructions.

Plain values, shared by the machine (`state`), the stores and the wire's messages.

Source: PROTOCOL.md, "Rounds", "Contributions" and "Members".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from diloco.refusals import Cause

#: Of any number: what a double, a JSON text and a 64-bit integer of any sign hold without loss.
MOST_NUMBER = 2**53
#: Tokens of one inner step of one island: ten times the largest batch that anybody trains with.
MOST_STEP_TOKENS = 2**30
#: Mean tokens of an inner step may be so many times what the island declared: sequences differ.
MOST_STEP_RATIO = 2
#: A contribution weighs at most what so many rounds make; an island that has made more sends the
#: rest with the next ones.
MOST_ROUNDS = 16


@dataclass(frozen=True, slots=True, order=True)
class RoundKey:
    """Names one attempt at publishing `version` + 1 of a fragment."""

    timeline: int
    fragment_id: int
    version: int
    attempt: int

    def __str__(self) -> str:
        """Short form for messages: timeline/fragment/version/attempt."""
        return f"t{self.timeline}/f{self.fragment_id}/v{self.version}/a{self.attempt}"


class Phase(StrEnum):
    """Where a fragment's current round stands."""

    UNFOUNDED = "unfounded"
    WAITING = "waiting"
    OPEN = "open"
    GRACE = "grace"
    CLOSING = "closing"
    EXPIRING = "expiring"
    LOST = "lost"


class OutcomeKind(StrEnum):
    """How a contribution ended (PROTOCOL.md, "Outcomes")."""

    INCLUDED = "included"
    NOT_INCLUDED = "not_included"
    EXPIRED = "expired"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The one end of a contribution."""

    key: RoundKey
    kind: OutcomeKind
    reason: str = ""


class Admission(StrEnum):
    """Answer to one lane of a contribution."""

    ACCEPTED = "accepted"
    REPEAT = "repeat"
    OVER = "over"
    CONFLICT = "conflict"
    FENCED = "fenced"
    NOT_OPEN = "not_open"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Objection:
    """What is wrong with a lane, whenever it comes: as it is answered, counted and said."""

    admission: Admission
    cause: Cause
    words: str


@dataclass(frozen=True, slots=True)
class Weights:
    """What one contribution may count, by the run's own plan; the default is any number.

    Args:
        round_steps: H; 0: not known, then only `MOST_NUMBER` bounds.
        inner_steps: Of the run, at most.
        most_step_tokens: Of an inner step, that an island may declare; holds for one that does not.
    """

    round_steps: int = 0
    inner_steps: int = MOST_NUMBER
    most_step_tokens: int = MOST_STEP_TOKENS

    @property
    def most_steps(self) -> int:
        """Inner steps that one contribution may count; 0: any number."""
        return MOST_ROUNDS * self.round_steps

    def problem(self, *, tokens: int, steps: int, sent_at: int, step_tokens: int) -> str:
        """Say why a contribution cannot count what it says; empty if it can.

        Args:
            tokens: That it counts.
            steps: Inner steps that they are of.
            sent_at: Inner step after which it was sent.
            step_tokens: That the island declared at its join, of an inner step; 0: it did not.
        """
        if tokens > MOST_NUMBER:
            return f"weight_tokens = {tokens}: at most {MOST_NUMBER} are counted"
        if not self.round_steps:
            return ""
        if sent_at > self.inner_steps:
            return f"sent_at_inner_step = {sent_at}: the run has {self.inner_steps} inner steps"
        most = min(sent_at, self.most_steps)
        if steps > most:
            return (
                f"weight_steps = {steps}: a contribution counts at most {most} inner steps, all "
                f"that were made by inner step {sent_at} and no more than {MOST_ROUNDS} rounds of "
                f"{self.round_steps}"
            )
        each = MOST_STEP_RATIO * step_tokens or self.most_step_tokens
        if tokens > steps * each:
            said = (
                f"{MOST_STEP_RATIO} times what the island said at its join"
                if step_tokens
                else "the most of an island that said nothing at its join"
            )
            return (
                f"weight_tokens = {tokens} in {steps} inner steps: at most {each} tokens a step "
                f"are counted, {said}: set its "
                f"tokens_per_inner_step to the largest batch that it trains"
            )
        return ""


@dataclass(frozen=True, slots=True)
class RoundRules:
    """The rules of a fragment's rounds.

    Args:
        members: Islands of every round, sorted; where `min_members` is given, those of the first.
        num_lanes: Lanes of the fragment; a contribution is complete when all have arrived.
        deadline_s: Seconds from the first complete contribution, or decline, to expiry; like
            `grace_s` and `opening_floor_s` unless the machine is given a timing of its own.
        min_contributions: Quorum; None means all members that have not left the attempt.
        grace_s: Extra seconds after a quorum that is not everybody.
        opening_floor_s: Seconds after a close before the next attempt opens.
        max_expired_in_a_row: Expiries in a row after which the quorum is lost; None: never, then
            rounds wait for islands to come back.
        min_members: Live islands without which nothing opens: members of an attempt are those
            that live when it opens. None: members are fixed, and nothing opens before each of
            them holds a grant.
        weights: What a contribution may count.
    """

    members: tuple[str, ...]
    num_lanes: int
    deadline_s: float
    min_contributions: int | None = None
    grace_s: float = 0.0
    opening_floor_s: float = 0.0
    max_expired_in_a_row: int | None = 3
    min_members: int | None = None
    weights: Weights = field(default_factory=Weights)


@dataclass(frozen=True, slots=True)
class Roster:
    """Who may take part in the next openings, as the coordinator knows it.

    Args:
        live: Islands that hold a lease, sorted; where members are fixed, all that were not taken
            out, be they there or not.
        fenced: Island -> least incarnation that counts, of those that were kicked.
        is_paused: Nothing opens.
        min_islands: Live islands without which nothing opens; 0: as the rules say.
        generation: Of the membership, for people.
        is_gathering: Nothing opens: the syncer has just started, and islands that live have not
            called it yet.
    """

    live: tuple[str, ...]
    fenced: Mapping[str, int] = field(default_factory=dict)
    is_paused: bool = False
    min_islands: int = 0
    generation: int = 0
    is_gathering: bool = False


@dataclass(frozen=True, slots=True)
class LaneArrival:
    """One lane of one contribution, as its header declares it.

    `step_tokens` are those of an inner step that the island declared when it joined; 0: it did not.
    """

    key: RoundKey
    island: str
    incarnation: int
    lane_id: int
    digest: bytes
    weight_tokens: int
    weight_steps: int
    sent_at_inner_step: int
    is_flush: bool
    step_tokens: int = 0


@dataclass(slots=True)
class Contribution:
    """What has arrived of one island in the current attempt."""

    island: str
    incarnation: int
    weight_tokens: int
    weight_steps: int
    sent_at_inner_step: int
    is_flush: bool
    lanes: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Contributor:
    """An island that a closing round counts, with its weight in tokens."""

    island: str
    incarnation: int
    weight_tokens: int
    weight_steps: int
    sent_at_inner_step: int
    lane_digests: tuple[bytes, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, in the order of the fields."""
        return {
            "island": self.island,
            "incarnation": self.incarnation,
            "weight_tokens": self.weight_tokens,
            "weight_steps": self.weight_steps,
            "sent_at_inner_step": self.sent_at_inner_step,
            "lane_digests": [digest.hex() for digest in self.lane_digests],
        }


@dataclass(frozen=True, slots=True)
class Opened:
    """Announce that contributions to `key` are accepted from `members`; flushes only, if so."""

    key: RoundKey
    members: tuple[str, ...]
    is_flush: bool = False


@dataclass(frozen=True, slots=True)
class Close:
    """Merge exactly these contributors, in this order, and commit; then call `committed`.

    `refused` says why other islands left the attempt; it is committed too, so that a restart does
    not change an outcome. `rejected_in_a_row` are the attempts since the last publication that
    expired because the guard of the merge refused all their members; 0 while there is a member that
    was not refused yet.
    """

    key: RoundKey
    contributors: tuple[Contributor, ...]
    is_flush: bool
    refused: Mapping[str, str] = field(default_factory=dict)
    rejected_in_a_row: int = 0


@dataclass(frozen=True, slots=True)
class RecordExpiry:
    """Write the expiry of `key` durably, then call `expiry_recorded`.

    `missing` are the members that it waited for in vain. Of the attempts since the last
    publication, this one included, `broken_in_a_row` had results that could not be used, and
    `rejected_in_a_row` expired because the guard of the merge refused all their members: these are
    no expiries in a row. `refused_at` says of islands which attempt they left last, and why.
    """

    key: RoundKey
    reason: str
    missing: tuple[str, ...]
    broken_in_a_row: int = 0
    rejected_in_a_row: int = 0
    refused_at: Mapping[str, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Published:
    """Announce version `key.version` + 1."""

    key: RoundKey


@dataclass(frozen=True, slots=True)
class DropLanes:
    """Forget the spooled lanes of one island's start in this attempt."""

    key: RoundKey
    island: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Lost:
    """End the run: the quorum is lost (`missing` says who) or the numerics broke."""

    key: RoundKey
    missing: tuple[str, ...]
    reason: str
    is_numeric: bool

    @property
    def advice(self) -> str:
        """Why islands may have been missing, and what to do."""
        if not self.missing:
            return (
                "The run stops. Resume it from its newest checkpoint (diloco coordinator RUN.toml "
                "--resume), or start it again in an empty coordinator.state_dir, with every island"
            )
        commands = "; ".join(f"diloco island RUN.toml --island {m}" for m in self.missing)
        return (
            f"The run stops (on_member_lost = stop). The logs of {', '.join(self.missing)} say "
            f"why nothing of theirs came: after exit code 30 their way to the coordinator or a "
            f"syncer was down for longer than transport.unreachable, and nothing else is wrong; "
            f"restore it first. Then go on from the newest checkpoint (diloco coordinator RUN.toml "
            f"--resume) with every island, among them: {commands}. Only without any checkpoint "
            f"does the run begin again, in an empty coordinator.state_dir. outer.on_member_lost = "
            f"wait waits for islands instead"
        )


Instruction = Opened | Close | RecordExpiry | Published | DropLanes | Lost


@dataclass(frozen=True, slots=True)
class Inclusion:
    """The newest contribution of an island that a version counts.

    An island has one contribution a fragment outstanding, so this answers for whatever it may
    still ask about, however long ago the round was.
    """

    incarnation: int
    version: int
    attempt: int


@dataclass(frozen=True, slots=True)
class PastRound:
    """What is remembered of a published round, to answer late questions."""

    attempt: int
    contributors: frozenset[tuple[str, int]]
    refused: Mapping[str, str]
    rejected: Mapping[str, str] = field(default_factory=dict)
