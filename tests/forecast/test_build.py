"""What a configuration becomes for a syncer."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.forecast.build import build_publication_rules

DEMO = Path(__file__).resolve().parents[2] / "configs" / "runs" / "demo.toml"


@pytest.mark.parametrize(("first", "ramp"), [(0, 20), (30, 20), (3, 33), (8, 29)])
def test_where_rounds_grow_momentum_does_for_as_many_inner_steps(first: int, ramp: int) -> None:
    config = load_config(
        DEMO,
        [
            "outer.inner_steps_per_round=30",
            f"outer.first_inner_steps_per_round={first}",
            "outer.optimizer.momentum_ramp_rounds=20",
        ],
    )

    assert build_publication_rules(config).optimizer.momentum_ramp_rounds == ramp
