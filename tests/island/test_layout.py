"""The plan and the schedule that follow from `[outer]`."""

from __future__ import annotations

import pytest

from diloco.config.outer import OuterConfig
from diloco.errors import ConfigError
from diloco.island.layout import build_plan
from diloco.outer.fragments import TensorSpec


def test_a_plan_that_no_join_carries_is_refused_before_the_run() -> None:
    tensors = [TensorSpec(f"layers.{i}.weight", (1 << 16, 1 << 10)) for i in range(64)]

    def outer(num_lanes: int) -> OuterConfig:
        return OuterConfig(
            preset="streaming", inner_steps_per_round=64, num_fragments=64, num_lanes=num_lanes
        )

    assert len(build_plan(outer(16), tensors).fragments) == 64
    too_many = (
        r"num_lanes = 1024: the plan has 64 fragments with 65536 lanes in all: .*: lower them"
    )
    with pytest.raises(ConfigError, match=too_many):
        build_plan(outer(1024), tensors)
    many = [TensorSpec(f"layers.{i}.{'a' * 100}.weight", (1 << 10,)) for i in range(1 << 16)]
    too_long = r"num_lanes = 16: the plan would not go into a join: it unpacks to .*: lower them"
    with pytest.raises(ConfigError, match=too_long):
        build_plan(outer(16), many)
