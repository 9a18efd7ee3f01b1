"""What a configuration becomes for a syncer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.forecast.build import build_publication_rules
from diloco.versions.publication import PublicationRules

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


def test_a_momentum_that_falls_is_in_the_rules_that_a_record_keeps() -> None:
    config = load_config(
        DEMO,
        [
            "run.inner_steps=95",
            "outer.inner_steps_per_round=30",
            "outer.optimizer.momentum=[0.8, 0.5]",
        ],
    )

    rules = build_publication_rules(config)

    optimizer = rules.optimizer
    assert (optimizer.momentum, optimizer.last_momentum, optimizer.num_rounds) == (0.8, 0.5, 4)
    assert PublicationRules.from_json(json.loads(json.dumps(rules.to_json()))) == rules
