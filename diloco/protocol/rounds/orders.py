"""The orders of a coordinator to a syncer: members of its next rounds, and the policy in force.

Heard with every report, and kept durably, since a syncer goes on by the last orders while its
coordinator is away, over its own restarts too.

Source: PROTOCOL.md, "Coordinator away" and "Operators and live policy".
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from diloco.protocol.rounds.terms import Roster
from diloco.protos.control_pb2 import RoundReportReply


@dataclass(frozen=True, slots=True)
class Orders:
    """The last orders of a coordinator.

    Args:
        roster: Islands that may take part; None: the islands that the configuration lists.
        policy_json: What an operator has set since the start, by dotted key; empty: nothing.
        policy_revision: Counter of these settings.
    """

    roster: Roster | None = None
    policy_json: str = ""
    policy_revision: int = 0

    @classmethod
    def of(cls, reply: RoundReportReply) -> Orders:
        """Read them from the answer to a report."""
        roster = None
        if reply.HasField("roster"):
            roster = Roster(
                live=tuple(sorted(reply.roster.live)),
                fenced=dict(reply.roster.fenced),
                is_paused=reply.roster.is_paused,
                min_islands=reply.roster.min_islands,
                generation=reply.roster.generation,
            )
        return cls(roster, reply.policy_json, reply.policy_revision)

    def to_json(self) -> dict[str, Any]:
        """Write them for a file."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Orders:
        """Read what `to_json` wrote."""
        roster = content["roster"]
        if roster is not None:
            roster = Roster(**{**roster, "live": tuple(roster["live"])})
        return cls(roster, content["policy_json"], content["policy_revision"])
