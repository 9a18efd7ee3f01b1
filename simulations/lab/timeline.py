"""The timeline of a laboratory's run: who did what when, in virtual time, as a real run tells it.

What takes no virtual time (gather, encode, decode, merge) is not in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from diloco.island.outer_loop import OuterLoop
from diloco.launch.loopback_run import World
from diloco.simulations.engine.timeline import Span
from diloco.simulations.engine.trace import event_spans, from_the_first
from diloco.telemetry.events import Event


class LabTimeline:
    """Spans of the islands of one point."""

    def __init__(self) -> None:
        """Have none."""
        self._spans: list[Span] = []
        self._computing: dict[str, int] = {}

    @property
    def spans(self) -> list[Span]:
        """What happened, by begin; 0 is the first of it."""
        return from_the_first(self._spans)

    def watched(self, world: World) -> World:
        """Give the same world, seen."""

        def step_s(island: str, inner_step: int) -> float:
            seconds, now = world.step_s(island, inner_step), _now()
            self._computing[island] = len(self._spans)
            self._spans.append(Span(island, None, None, "compute", now, now + seconds))
            return seconds

        def failed(island: str, outer: OuterLoop) -> None:
            if (index := self._computing.pop(island, None)) is not None:
                span = self._spans[index]
                self._spans[index] = replace(span, end_s=min(span.end_s, _now()))
            world.on_failure(island, outer)

        def heard(island: str, event: Event) -> None:
            line = {**event.as_dict(), "unix_s": _now(), "island": island}
            self._spans += event_spans(line, island)
            world.on_event(island, event)

        return replace(world, step_s=step_s, on_failure=failed, on_event=heard)

    def stepped_together(self, began_s: float, step_s: Mapping[str, float], end_s: float) -> None:
        """Record an inner step whose gradients all islands have averaged by `end_s`."""
        for island, seconds in step_s.items():
            ready_s = began_s + seconds
            self._spans.append(Span(island, None, None, "compute", began_s, ready_s))
            self._spans.append(Span(island, None, None, "wait", ready_s, end_s))


def _now() -> float:
    return asyncio.get_running_loop().time()
