"""What islands agree on before they train, from `[outer]` of the run file: plan and schedule."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from diloco.compression.lanes import check_patterns
from diloco.config.outer import OuterConfig
from diloco.outer.fragments import Plan, make_plan
from diloco.outer.patterns import insist_on_match
from diloco.outer.schedule import Schedule
from diloco.sync.shards import tensor_specs


def build_plan(outer: OuterConfig, parameters: Mapping[str, Tensor]) -> Plan:
    """Cut the model into fragments and lanes.

    Args:
        outer: Its identity fields are read, and what names parameters.
        parameters: Canonical name -> parameter (any device, meta too), from
            `canonical_parameters`.

    Raises:
        ConfigError: If the parameters do not allow that plan (more fragments than they can be cut
            into, a codec for a name that there is not, ...).
    """
    check_patterns(outer.uplink, parameters)
    for key in ("plain_mean", "experts"):
        patterns: tuple[str, ...] = getattr(outer, key)
        if patterns != type(outer).model_fields[key].default:  # which suits models without them
            for pattern in patterns:
                insist_on_match(f"outer.{key}", pattern, pattern, parameters)
    return make_plan(
        tensor_specs(parameters),
        num_fragments=outer.num_fragments,
        pattern=outer.fragment_pattern,
        embedding_alone=outer.embedding_alone,
        explicit=outer.explicit_fragments,
        num_lanes=outer.num_lanes,
    )


def build_schedule(outer: OuterConfig, inner_steps: int) -> Schedule:
    """Give the due and merge steps of a run of `inner_steps` inner steps.

    Raises:
        ConfigError: If periods, phases and overlap do not fit together.
    """
    return Schedule.make(
        inner_steps_per_round=outer.inner_steps_per_round,
        num_fragments=outer.num_fragments,
        overlap_steps=outer.overlap_steps,
        inner_steps=inner_steps,
        flush=outer.flush,
        phases=outer.phases,
    )
