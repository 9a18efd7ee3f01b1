"""The recovery bench end to end on a tiny model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco.bench.outer_loop.recovery import SETTING, run_recovery
from diloco.errors import ConfigError

TINY = {"preset": "tiny"}
SMALL = replace(
    SETTING, model=TINY, step_s=0.05, freeze_s=2.0, scheduled_freeze_s=2.0,
    inner_steps_per_round=10, num_kills=2, control_steps=400, control_step_s=0.1,
    control_model=TINY, sizes={"tiny": TINY}, num_rounds=2,
)  # fmt: skip


def test_a_row_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="--rows kill-all matches no row; rows are kill-str"):
        run_recovery(SMALL, ["kill-all"], on_progress=lambda *_: None)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_row_is_measured() -> None:
    begun: list[tuple[str, int, int]] = []

    report = run_recovery(SMALL, [], on_progress=lambda *told: begun.append(told))

    rows = {(row["row"], row["what"]): row["value"] for row in report.rows}
    assert [told[0] for told in begun] == list(dict.fromkeys(row["row"] for row in report.rows))
    assert rows["kill-streaming", "rounds of the others that expired"] == 0
    assert rows["kill-streaming", "the others' next merge after the kill"] > 0
    # Everybody waits for the frozen island, so its share of the time is lost to all.
    assert rows["freeze-streaming", "the others' time a step rises by"] > 0.5
    assert rows["control-plane", "kills that took effect"] == 2
    assert rows["control-plane", "invariants that broke"] == 0
    # theta, published and momentum, contributions and payload, in a record of a tiny model.
    assert 12 < rows["durable-snapshot-tiny", "written a parameter and round"] < 30
