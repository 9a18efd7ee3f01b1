"""The bench of stragglers on a model of two layers: what it counts, and who waited."""

from __future__ import annotations

import pytest

from diloco.bench.training.parity_row import Task
from diloco.bench.training.stragglers import ROWS, Setting, chosen_rows, train_row
from diloco.errors import ConfigError

TASK = Task(
    inner_steps=90,
    warm_start_step=0,
    sequences=4,
    sequence_length=16,
    evaluation_sequences=4,
    warmup_steps=2,
    model={"dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 64},
)
SETTING = Setting(TASK)


def test_the_fast_wait_for_the_slow_in_scheduled_rounds_and_for_nobody_on_arrival() -> None:
    scheduled, grace = (train_row(SETTING, name, 1) for name in ("scheduled", "k1-grace"))

    # Three of four islands make a step a second; all make 90, or together as many tokens.
    assert set(scheduled.steps.values()) == {90}
    assert scheduled.busy["island-0"] < 0.6 < 0.99 < grace.busy["island-0"]
    assert scheduled.busy["island-3"] > 0.9
    assert grace.virtual_s < 0.8 * scheduled.virtual_s
    assert grace.steps["island-3"] < 0.6 * grace.steps["island-0"]
    assert scheduled.num_solo == 0 and not any(scheduled.dropped_tokens.values())


def test_a_row_that_there_is_not_is_named() -> None:
    assert chosen_rows(["k1"]) == ("scheduled", "k1")
    assert chosen_rows([]) == tuple(ROWS)
    with pytest.raises(ConfigError, match="--rows k2: there is none; rows are scheduled, all"):
        chosen_rows(["k2"])
