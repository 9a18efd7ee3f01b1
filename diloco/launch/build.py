"""What planning, running and checking build alike from a configuration: rules and links."""

from __future__ import annotations

from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.outer.combination import MergeRule
from diloco.outer.optimizer import OuterOptimizer
from diloco.rounds.publication import PublicationRules
from transport.link import LinkProfile, find_profile


def build_publication_rules(config: Config) -> PublicationRules:
    """Give codecs, merge rule and outer optimizer: how contributions become a version."""
    outer = config.outer
    optimizer = OuterOptimizer(
        outer.optimizer.name,
        outer.optimizer.lr,
        outer.optimizer.momentum,
        outer.optimizer.momentum_ramp_rounds,
        outer.optimizer.betas,
        outer.optimizer.eps,
    )
    merge = MergeRule(
        outer.merge_rule,
        outer.weighting,
        outer.clip_norm_ratio,
        outer.reject_norm_ratio,
        outer.plain_mean,
        outer.experts,
    )
    return PublicationRules(outer.uplink, outer.downlink, optimizer, config.run.seed, merge)


def link_profile(config: Config) -> LinkProfile | None:
    """Find the profile that shapes the traffic; None when it is not shaped.

    Raises:
        ConfigError: If there is none of that name, or it cannot be read.
    """
    name = config.transport.link
    try:
        return find_profile(name) if name else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"transport.link = {name!r}: {error}") from error
