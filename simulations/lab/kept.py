"""Figures of a suite that were found once and are kept with the sources: NAME.points.json.

Hours of training need not be done again to judge them: a row takes what was found, by whatever
version of the code, for all the settings that it has now, but for those that there were not then.
It takes its own, or that of a row that was renamed: never that of another one, from which it may
differ in nothing but a setting that there was not then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.durable import read_json, write_json
from diloco.errors import ConfigError
from diloco.simulations.lab.experiment import Experiment
from diloco.simulations.lab.results import Found
from diloco.simulations.lab.run import Result


def keep_found(found: Found, directory: Path) -> Path:
    """Write the figures of an experiment; returns the file's path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = _path(directory, found.experiment)
    points = found.experiment.points
    write_json(
        path,
        {
            name: [
                {**result, "settings": point.settings()}
                for point, result in zip(points[name], results, strict=True)
            ]
            for name, results in found.rows.items()
        },
    )
    return path


def read_found(experiments: Sequence[Experiment], directory: Path) -> list[Found]:
    """Give what was kept of experiments; rows that have changed since, or are new, are left out.

    Raises:
        ConfigError: If nothing was kept of one, or it is damaged.
    """
    return [_read(experiment, directory) for experiment in experiments]


def _read(experiment: Experiment, directory: Path) -> Found:
    path = _path(directory, experiment)
    try:
        kept = read_json(path)
        if kept is None:
            raise ConfigError(
                f"there is no {path}: train it (diloco lab suite {experiment.name} --out "
                f"{directory}), or give the directory that has it"
            )
        return Found(experiment, dict(_rows(experiment, kept)))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"{path} is damaged: {error!r}") from error


def _rows(
    experiment: Experiment, kept: Mapping[str, Sequence[Result]]
) -> Iterator[tuple[str, Sequence[Result]]]:
    """Give the rows of which every point was kept."""
    renamed = [r for name, rows in kept.items() if name not in experiment.points for r in rows]
    for name, points in experiment.points.items():
        results = [*kept.get(name, ()), *renamed]
        found = []
        for point in points:
            now = json.loads(json.dumps(point.settings()))
            found += [result for result in results if _is_within(result["settings"], now)][:1]
        if len(found) == len(points):
            yield name, found


def _is_within(settings: Any, others: Any) -> bool:
    """Whether all that `settings` say is so in `others`; JSON values."""
    if not isinstance(settings, dict) or not isinstance(others, dict):
        return bool(settings == others)
    return all(key in others and _is_within(settings[key], others[key]) for key in settings)


def _path(directory: Path, experiment: Experiment) -> Path:
    return directory / f"{experiment.name}.points.json"
