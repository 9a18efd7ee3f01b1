"""Makes the rules of a syncer and of its fragments from the configuration.

Source: PROTOCOL.md, "Rounds" and "Operators and live policy".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from diloco.outer.fragments import Fragment
from diloco.protocol.rounds.terms import RoundRules, Weights
from diloco.protocol.rounds.timing import TimingRules
from diloco.versions.publication import PublicationRules

#: Attempts in a row without a result after which a scheduled run stops waiting for its members.
_MOST_EXPIRED = 3


@dataclass(frozen=True, slots=True)
class FragmentRules:
    """The rules of a fragment's rounds; changed ones count from the next opening on.

    Args:
        rounds: For the machine.
        timing: Bounds of its times where they are measured.
        publication: How contributions become a version.
        total_tokens: Merged tokens after which the fragment ends; 0: it ends with its islands.
        has_flush: Whether a flush is its end.
        revision: Of the policy, for the record.
    """

    rounds: RoundRules
    timing: TimingRules | None
    publication: PublicationRules
    total_tokens: int
    has_flush: bool
    revision: int

    def told(self) -> dict[str, Any]:
        """Say for a record what, besides the publication's rules, decided its round."""
        quorum = self.rounds.min_contributions
        return {
            "min_contributions": "all" if quorum is None else quorum,
            "policy_revision": self.revision,
        }


@dataclass(frozen=True, slots=True)
class SyncerRules:
    """The rules of a syncer for all its fragments.

    Args:
        timeline: Of the run.
        islands: All of them, sorted.
        publication: How contributions become a version.
        round_deadline_s: Seconds from the first complete contribution to expiry.
        num_unsure_pins: Newest pins that are kept though their checkpoints are not complete.
        spool_bytes: Coded contributions in memory; beyond that they wait on disk.
        merges_at_once: Fragments merged at once; each takes memory of its own.
        on_member_lost: What a scheduled run does without an island that stays away: stop after
            some attempts without a result, or have them expire until it is back or taken out.
        min_members: Islands without which nothing opens, where they come and go and nobody waits
            for any other; None: a scheduled run, whose members are fixed.
        quorum: Contributions that close a round; None: those of all members.
        timing: Bounds of measured times; None: a scheduled run has none.
        lease_s: Seconds without a call after which an island is not opened for.
        total_tokens: Merged tokens that end a fragment; 0: it ends with its islands.
        has_flush: Whether a flush is its end.
        policy_revision: Of the policy that these come from.
        weights: What a contribution may count.
        has_others: Whether the run has other syncers, to which fragments move.
    """

    timeline: int
    islands: tuple[str, ...]
    publication: PublicationRules
    round_deadline_s: float
    num_unsure_pins: int
    spool_bytes: int = 1 << 30
    merges_at_once: int = 1
    on_member_lost: Literal["stop", "wait", "shrink"] = "stop"
    min_members: int | None = None
    quorum: int | None = None
    timing: TimingRules | None = None
    lease_s: float = math.inf
    total_tokens: int = 0
    has_flush: bool = True
    policy_revision: int = 0
    weights: Weights = field(default_factory=Weights)
    has_others: bool = False

    def of_fragment(self, fragment: Fragment, num_fragments: int) -> FragmentRules:
        """Give those of one fragment; where times are measured, fragments take turns."""
        is_ended = self.min_members is None and self.on_member_lost == "stop"
        rounds = RoundRules(
            members=self.islands,
            num_lanes=len(fragment.lanes),
            deadline_s=self.round_deadline_s,
            min_contributions=self.quorum,
            max_expired_in_a_row=_MOST_EXPIRED if is_ended else None,
            min_members=self.min_members,
            weights=self.weights,
        )
        phase = (fragment.fragment_id + 1) / num_fragments
        return FragmentRules(
            rounds,
            self.timing and replace(self.timing, phase=phase),
            self.publication,
            self.total_tokens,
            self.has_flush,
            self.policy_revision,
        )
