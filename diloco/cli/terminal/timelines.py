"""Where the timeline of a run goes: a trace for viewers, and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.simulations.engine.timeline import Span


def write_timelines(spans: Sequence[Span], what: str, *, trace: str, picture: str) -> str:
    """Write spans of a run, named `what`, to each path that is not empty; returns these."""
    from diloco.simulations.engine.plots import timeline_figure
    from diloco.simulations.engine.trace import chrome_trace

    if trace:
        text = json.dumps(chrome_trace(spans, run=what))
        Path(trace).write_text(text + "\n", encoding="utf-8")
    if picture:
        timeline_figure(spans, what).savefig(picture)
    return ", ".join(path for path in (trace, picture) if path)
