"""Builds the plan and the schedule of a run from `[outer]` of its run file."""

from __future__ import annotations

from collections.abc import Sequence

from diloco.compression.lanes import check_patterns
from diloco.config.outer import OuterConfig
from diloco.errors import ConfigError
from diloco.outer.fragments import Plan, TensorSpec, make_plan
from diloco.outer.patterns import check_match
from diloco.outer.schedule import Schedule
from diloco.protocol.run.admission import size_problem
from diloco.protocol.run.plan_bytes import packed, unpacked


def build_plan(outer: OuterConfig, tensors: Sequence[TensorSpec]) -> Plan:
    """Cut the model into fragments and lanes.

    Args:
        outer: Its identity fields are read, and what names parameters.
        tensors: Of the whole island, from `tensor_specs`.

    Raises:
        ConfigError: If the parameters do not allow that plan (more fragments than they can be cut
            into, a codec for a name that there is not, ...).
    """
    names = [tensor.name for tensor in tensors]
    check_patterns(outer.uplink, names)
    for key in ("plain_mean", "experts"):
        patterns: tuple[str, ...] = getattr(outer, key)
        if patterns != type(outer).model_fields[key].default:  # which suits models without them
            for pattern in patterns:
                check_match(f"outer.{key}", pattern, pattern, names)
    plan = make_plan(
        tensors,
        num_fragments=outer.num_fragments,
        pattern=outer.fragment_pattern,
        embedding_alone=outer.embedding_alone,
        explicit=outer.explicit_fragments,
        num_lanes=outer.num_lanes,
    )
    problem = size_problem(plan)
    if not problem:
        try:
            unpacked(packed(plan.to_json()))
        except ValueError as error:
            problem = f"the plan would not go into a join: {error}"
    if problem:
        raise ConfigError(
            f"outer.num_fragments = {outer.num_fragments}, outer.num_lanes = {outer.num_lanes}: "
            f"{problem}: lower them"
        )
    return plan


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
        first_round=outer.first_inner_steps_per_round,
    )
