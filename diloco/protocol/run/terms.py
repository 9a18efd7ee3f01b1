"""The part of a run's configuration that its coordinator applies and passes on."""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco.config.classes import policy_json
from diloco.config.schema import Config
from diloco.protocol.run.candidates import JudgeRules
from diloco.protocol.run.members import MembershipRules
from diloco.protocol.run.peer_bounds import most_step_tokens_of

#: Rounds that an island can be ahead of all others, where it waits for them: with room for what
#: has not been reported yet.
_LEAD_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a run; an operator may change it while the run is under way.

    Args:
        policy_json: Policy class of the configuration, which islands take over.
        unreachable_s: Seconds without a report after which a stop does not wait for an island.
        lease_s: Seconds without a word after which an island counts as lost.
        total_tokens: That end the run; 0 where inner steps do.
        cut_tokens: Tokens from one run checkpoint to the next, where tokens end the run; 0: none
            but a stop's.
        rules: Who may take part.
        has_bucket: Whether syncers sign addresses of an object store for payloads.
        judging: How run checkpoints are judged by their held-out loss.
    """

    policy_json: str
    unreachable_s: float
    lease_s: float = 300.0
    total_tokens: int = 0
    cut_tokens: int = 0
    has_bucket: bool = False
    rules: MembershipRules = field(default_factory=MembershipRules)
    judging: JudgeRules = field(default_factory=JudgeRules)


def terms_of(config: Config) -> Terms:
    """Read the terms of a configuration."""
    outer, run = config.outer, config.run
    total_tokens = config.total_tokens if outer.is_on_arrival else 0
    return Terms(
        policy_json=policy_json(config),
        unreachable_s=config.transport.unreachable.seconds,
        lease_s=config.lease_s,
        total_tokens=total_tokens,
        cut_tokens=config.checkpoint.every_tokens,
        has_bucket=run.has_bucket,
        rules=MembershipRules(
            is_elastic=outer.is_on_arrival,
            is_open=run.open,
            # Else the text is divided by the number of islands that a site's file has.
            are_names_shared=not (outer.is_on_arrival and run.max_islands),
            min_islands=run.min_islands,
            max_islands=config.max_islands,
            on_member_lost=outer.on_member_lost,
            most_step_tokens=most_step_tokens_of(config),
            total_tokens=total_tokens,
            # It waits at every merge; of attempts that expire the third in a row ends the run.
            most_lead_steps=_LEAD_ROUNDS * outer.inner_steps_per_round
            if not outer.is_on_arrival and outer.on_member_lost == "stop"
            else 0,
        ),
        judging=JudgeRules(
            config.evaluation.max_rise,
            config.evaluation.max_returns,
            config.checkpoint.every_inner_steps,
        ),
    )
