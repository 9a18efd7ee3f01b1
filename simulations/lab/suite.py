"""Runs the experiments of the suite: all their points at once, each trained once."""

from __future__ import annotations

from collections.abc import Sequence

from diloco.simulations.lab.cache import Cache
from diloco.simulations.lab.experiment import Experiment
from diloco.simulations.lab.results import Found
from diloco.simulations.lab.sweep import Show, run_points


def run_suite(
    experiments: Sequence[Experiment], cache: Cache, *, num_processes: int, show: Show
) -> tuple[list[Found], int]:
    """Train what is missing of all rows.

    Args:
        experiments: Rows that several have are trained once.
        cache: Where finished points are.
        num_processes: Spawned at once.
        show: Hears how many points and planned inner steps are done.

    Returns:
        What was found, by experiment, and how many points were there before.
    """
    points = [point for each in experiments for row in each.points.values() for point in row]
    finished = run_points(points, cache, num_processes=num_processes, show=show)
    results = iter(finished.results)
    found = [
        Found(each, {name: [next(results) for _ in row] for name, row in each.points.items()})
        for each in experiments
    ]
    return found, finished.num_cached
