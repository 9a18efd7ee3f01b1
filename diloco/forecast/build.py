"""Builds rules and links from a configuration, for planning, running and checking alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from diloco.config.links import find_profile
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.outer.combination import MergeRule
from diloco.outer.optimizer import OuterOptimizer
from diloco.outer.schedule import num_rounds
from diloco.protocol.rounds.timing import TimingRules
from diloco.protocol.run.peer_bounds import weights_of
from diloco.syncer.rules import SyncerRules
from diloco.transport.shaping.link import LinkProfile
from diloco.versions.publication import PublicationRules


def build_publication_rules(config: Config) -> PublicationRules:
    """Give codecs, merge rule and outer optimizer: how contributions become a version."""
    outer = config.outer
    full, first = outer.inner_steps_per_round, outer.first_inner_steps_per_round
    momentum, last_momentum = outer.optimizer.momenta
    optimizer = OuterOptimizer(
        outer.optimizer.name,
        outer.optimizer.lr,
        momentum,
        num_rounds(outer.optimizer.momentum_ramp_rounds * full, full, first),
        outer.optimizer.betas,
        outer.optimizer.eps,
        last_momentum,
        num_rounds(config.run.inner_steps, full, first),
    )
    merge = MergeRule(
        outer.merge_rule,
        outer.weighting,
        outer.clip_norm_ratio,
        outer.plain_mean,
        outer.experts,
        outer.guard,
    )
    return PublicationRules(outer.uplink, outer.downlink, optimizer, config.run.seed, merge)


def build_syncer_rules(
    config: Config, *, timeline: int, merges_at_once: int = 1, policy_revision: int = 0
) -> SyncerRules:
    """Give all rules of a syncer; where nobody waits, tokens end the run and times are measured.

    Args:
        config: The coordinator's, with what an operator has set since.
        timeline: Of the run.
        merges_at_once: Fragments merged at once.
        policy_revision: Of what was set.
    """
    outer, is_on_arrival = config.outer, config.outer.is_on_arrival
    timing = TimingRules(
        inner_steps_per_round=outer.inner_steps_per_round,
        overlap_steps=outer.overlap_steps,
        grace_share=outer.grace_share,
        grace_cap_s=outer.grace_cap.seconds,
        deadline_cap_s=outer.round_deadline.seconds,
        grace_s=None if outer.grace == "auto" else outer.grace.seconds,
        first_round=outer.first_inner_steps_per_round,
    )
    return SyncerRules(
        timeline=timeline,
        islands=tuple(sorted(config.islands)),
        publication=build_publication_rules(config),
        round_deadline_s=outer.round_deadline.seconds,
        num_unsure_pins=config.num_unsure_checkpoints,
        spool_bytes=config.coordinator.spool_memory.num_bytes,
        merges_at_once=merges_at_once,
        on_member_lost=outer.on_member_lost,
        min_members=config.run.min_islands if is_on_arrival else None,
        quorum=outer.quorum,
        timing=timing if is_on_arrival else None,
        lease_s=config.lease_s,
        total_tokens=config.total_tokens if is_on_arrival else 0,
        has_flush=outer.flush,
        policy_revision=policy_revision,
        weights=weights_of(config),
        has_others=len(config.syncer_shares) > 1,
    )


def link_profile(config: Config) -> LinkProfile | None:
    """Find the profile that shapes the traffic; None when it is not shaped.

    Raises:
        ConfigError: If there is none of that name, or it cannot be read.
    """
    name = config.transport.link
    try:
        return find_profile(name) if name else None
    except ConfigError as error:
        raise ConfigError(f"transport.link = {name!r}: {error}") from error


def carrier_link(profile: LinkProfile, carriers: Iterable[int]) -> LinkProfile:
    """Give each carrier an equal, fixed part of the island's bandwidth; the delay is everybody's.

    A carrier whose siblings are silent does not get their part: somewhat slower than the real link,
    never faster.

    Args:
        profile: The island's link.
        carriers: Carrier of each lane of the plan, at least one.
    """
    num_carriers = len(set(carriers))
    up, down = (
        replace(link, bandwidth_bps=link.bandwidth_bps / num_carriers)
        for link in (profile.up, profile.down)
    )
    return replace(profile, up=up, down=down)
