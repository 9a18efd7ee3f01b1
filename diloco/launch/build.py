"""What planning, running and checking build alike from a configuration."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.outer.fragments import Plan, make_plan
from diloco.outer.optimizer import OuterOptimizer
from diloco.outer.schedule import Schedule
from diloco.rounds.publication import PublicationRules
from diloco.sync.shards import tensor_specs
from transport.link import LinkProfile, find_profile


def build_plan(config: Config, parameters: Mapping[str, Tensor]) -> Plan:
    """Cut the model into fragments and lanes as `config.outer` says.

    Args:
        config: Identity fields of `outer` are read.
        parameters: Canonical name -> parameter (any device, meta too), from
            `canonical_parameters`.

    Raises:
        ConfigError: If the parameters do not allow that plan (more fragments than tensors, ...).
    """
    outer = config.outer
    return make_plan(
        tensor_specs(parameters),
        num_fragments=outer.num_fragments,
        pattern=outer.fragment_pattern,
        embedding_alone=outer.embedding_alone,
        explicit=outer.explicit_fragments,
        num_lanes=outer.num_lanes,
    )


def build_schedule(config: Config) -> Schedule:
    """Give the due and merge steps of the run.

    Raises:
        ConfigError: If periods, phases and overlap do not fit together.
    """
    outer = config.outer
    return Schedule.make(
        inner_steps_per_round=outer.inner_steps_per_round,
        num_fragments=outer.num_fragments,
        overlap_steps=outer.overlap_steps,
        inner_steps=config.run.inner_steps,
        flush=outer.flush,
        phases=outer.phases,
    )


def build_publication_rules(config: Config) -> PublicationRules:
    """Give codecs and outer optimizer: how contributions become a version."""
    outer = config.outer
    optimizer = OuterOptimizer(
        outer.optimizer.name,
        outer.optimizer.lr,
        outer.optimizer.momentum,
        outer.optimizer.momentum_ramp_rounds,
    )
    return PublicationRules(outer.uplink_codec, outer.downlink_codec, optimizer)


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
