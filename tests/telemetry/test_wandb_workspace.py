"""The workspace of W&B shows scalars that there are, of the islands of one run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from diloco.telemetry.events import (
    BytesMoved,
    CheckpointWritten,
    Evaluated,
    Event,
    FragmentMerged,
    FragmentSent,
    InnerStepDone,
    MemoryUsed,
)
from diloco.telemetry.metrics import INNER_STEP_AXIS, TOKENS_AXIS, Metrics

SCRIPT = Path(__file__).parents[2] / "configs/monitoring/wandb_workspace.py"
EVENTS: list[Event] = [
    InnerStepDone(1, 2.0, 0.25, 1e-3, 64, 0.5, 1.0, 0.4),
    FragmentSent(1, 0, 0, 0, 64, 1, False, 0.75, "too high"),
    FragmentMerged(1, 0, 1, "not_included", 1, 0.5, "d", ("east",), False),
    BytesMoved(1, 2, 3),
    Evaluated(1, "published", 1.5),
    MemoryUsed(1, 2, 3),
    CheckpointWritten(1, 2, 0.5, 0.1, 0.0),
]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wandb_workspace", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:Pydantic V1 style")  # the package's own
def test_every_panel_has_scalars_that_islands_write_and_only_the_run_is_shown() -> None:
    metrics = Metrics()
    rows = [row for event in EVENTS if (row := metrics.row(event)) is not None]
    written = {name for row in rows for name in row.scalars}

    made = script()
    shown = made.workspace("team", "project", "two-islands")

    panels = [panel for section in shown.sections for panel in section.panels]
    assert len(panels) == sum(map(len, made.SECTIONS.values()))
    assert {str(name) for panel in panels for name in panel.y} <= written
    assert {str(panel.x) for panel in panels} == {INNER_STEP_AXIS, TOKENS_AXIS}
    (only,) = shown._to_model().spec.section.run_sets[0].filters["filters"]
    assert (only["key"]["name"], only["value"]) == ("group", "two-islands")
