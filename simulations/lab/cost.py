"""What the points of laboratories take to train, told before anybody waits for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from diloco.simulations.lab.cache import Cache
from diloco.simulations.lab.experiment import Experiment
from diloco.simulations.lab.point import LabPoint
from diloco.trainer.models.families import parameter_shapes, shape_of

#: CPU seconds of a token and parameter where no point tells: 6 operations at 20 GFLOP/s.
_USUAL_S = 6 / 20e9


@dataclass(frozen=True, slots=True)
class Cost:
    """Points of several experiments, each counted once.

    Attributes:
        num_points: All of them.
        num_missing: Those that are to be trained.
        tokens: That these train.
        cpu_s: CPU seconds of these, from what other points took, or the usual for their size.
    """

    num_points: int
    num_missing: int
    tokens: int
    cpu_s: float

    def __str__(self) -> str:
        """Say it in a line."""
        there = self.num_points - self.num_missing
        return (
            f"{self.num_points} points, {there} of them there already; {self.num_missing} to "
            f"train, {self.tokens / 1e6:.0f}M tokens: about {self.cpu_s / 60:.0f} CPU minutes"
        )


def cost_of(experiments: Sequence[Experiment], cache: Cache) -> Cost:
    """Foresee what is missing, by CPU seconds a token and parameter of what is there."""
    points = {
        point.fingerprint(): point
        for each in experiments
        for row in each.points.values()
        for point in row
    }
    found = {name: cache.result(point) for name, point in points.items()}
    known = [
        result["wall_s"] * points[name].lab.threads / (_tokens(points[name]) * result["parameters"])
        for name, result in found.items()
        if result is not None
    ]
    rate = median(known) if known else _USUAL_S
    missing = [point for name, point in points.items() if found[name] is None]
    work = sum(_tokens(point) * _num_parameters(point) for point in missing)
    return Cost(len(points), len(missing), sum(map(_tokens, missing)), rate * work)


def _tokens(point: LabPoint) -> int:
    steps = point.config.run.inner_steps - point.lab.warm_steps
    return steps * point.tokens_per_inner_step


def _num_parameters(point: LabPoint) -> int:
    shapes = parameter_shapes(shape_of(point.config.model))
    return sum(math.prod(shape) for shape in shapes.values())
