"""What H, M, tau and codecs cost in loss: a model fitted to measured losses. Pure arithmetic.

    log loss = study + h ln(max(H, H0) / H0) + m ln M + t tau + sum of the codec's cost, once a way

by least squares over all points, every study with a level of its own, so that only differences
within a study count; H0 is the smallest H of a study that varies it (below it nothing is gained:
averaging more often does not help, arXiv 2503.09799). An effect that comes out below zero counts
as none: a gain is not promised. What no study varies is not known, and is not made up.

Studies are those of `penalties.toml` next to this file (other people's runs), and results of the
laboratory, whose effects go before others' where it has measured them.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from diloco.config.outer import OWN_CODECS, CodecName
from diloco.errors import ConfigError
from diloco.simulations.planner.setting import OuterSetting

#: Of other people's runs.
PUBLISHED = Path(__file__).with_name("penalties.toml")

_EXACT = "float32"


class TrainedPoint(BaseModel):
    """One trained run; what else a laboratory notes of it is left aside.

    Attributes:
        h: Inner steps per round.
        m: Islands.
        codec: Of pseudo-gradients.
        tau: Overlap steps.
        loss: In nats, or relative to another point of the same study.
        downlink: Codec of published versions.
        seed: Points of one seed are a study of their own; 0: none was noted.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    h: int = Field(ge=1)
    m: int = Field(ge=1)
    codec: CodecName
    tau: int = Field(ge=0)
    loss: float = Field(gt=0, allow_inf_nan=False)
    downlink: CodecName = "float32"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Study:
    """Runs that differ in nothing but what a point says; `source` is who made them."""

    source: str
    points: tuple[TrainedPoint, ...]


@dataclass(frozen=True, slots=True)
class Effect:
    """Relative loss of one unit of a setting, at least 0, and whose runs say so."""

    cost: float
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Penalties:
    """A fitted model.

    Attributes:
        effects: "h" (for every e-fold of H beyond `least_h`), "m" (of M), "tau" (a step), and
            codecs by name (a way); those that are known.
        least_h: Smallest H of the runs that varied it, below which nothing is gained.
        most_h: Largest; beyond it nothing is known.
        most_tau: Largest tau of the runs that varied it.
    """

    effects: Mapping[str, Effect]
    least_h: int
    most_h: int
    most_tau: int

    def knows(self, setting: OuterSetting) -> bool:
        """Whether all that a setting costs was measured, H and tau within what was tried."""
        return (
            setting.inner_steps_per_round <= self.most_h
            and setting.overlap_steps <= self.most_tau
            and {setting.uplink_codec, setting.downlink_codec} <= {*self.effects, _EXACT}
        )

    def penalty(self, setting: OuterSetting) -> float:
        """Return the relative increase of the loss over H0, tau = 0 and float32.

        That of a number of islands is not in it: it is the same for all settings of a run.
        """
        beyond = math.log(max(setting.inner_steps_per_round, self.least_h) / self.least_h)
        codecs = [setting.uplink_codec, setting.downlink_codec]
        total = self._cost("h") * beyond + self._cost("tau") * setting.overlap_steps
        return math.expm1(total + sum(self._cost(name) for name in codecs))

    def scaled(self, name: str, factor: float) -> Penalties:
        """Return the model with one effect multiplied, to ask what depends on it."""
        effect = replace(self.effects[name], cost=factor * self.effects[name].cost)
        return replace(self, effects={**self.effects, name: effect})

    def preferring(self, own: Penalties) -> Penalties:
        """Return this model with the effects that `own` has measured in place of these."""
        has_h, has_tau = "h" in own.effects, "tau" in own.effects
        return Penalties(
            effects={**self.effects, **own.effects},
            least_h=own.least_h if has_h else self.least_h,
            most_h=own.most_h if has_h else self.most_h,
            most_tau=own.most_tau if has_tau else self.most_tau,
        )

    def _cost(self, name: str) -> float:
        return self.effects[name].cost if name in self.effects else 0.0


def load_penalties(laboratory: Sequence[Path] = ()) -> Penalties:
    """Fit the published studies, and results of the laboratory over them.

    Args:
        laboratory: JSON files with a list "points", each with h, m, codec, tau and loss.

    Raises:
        ConfigError: If a file cannot be read, or cannot tell two effects apart.
    """
    penalties = fit(read_published(PUBLISHED), "the published studies")
    if laboratory:
        studies = [study for path in laboratory for study in read_laboratory(path)]
        penalties = penalties.preferring(fit(studies, ", ".join(map(str, laboratory))))
    return penalties


def read_published(path: Path) -> list[Study]:
    """Read studies of a TOML file.

    Raises:
        ConfigError: Naming the file and the value.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        return [Study(str(study["source"]), _points(study["points"])) for study in content["study"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"penalties in {path} cannot be read: {_shown(error)}") from error


def read_laboratory(path: Path) -> list[Study]:
    """Read a result of the laboratory, the points of each seed as a study.

    Points without a loss, of runs that ended early, are left out.

    Raises:
        ConfigError: Naming the file and the value.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["points"]
        points = _points([point for point in found if point.get("loss", math.nan) is not None])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--lab {path} cannot be read: {_shown(error)}; it must be JSON with a list "
            '"points" of objects with h, m, codec, tau and loss'
        ) from error
    seeds = sorted({point.seed for point in points})
    return [
        Study(str(path), tuple(point for point in points if point.seed == seed)) for seed in seeds
    ]


def _points(values: object) -> tuple[TrainedPoint, ...]:
    return TypeAdapter(tuple[TrainedPoint, ...]).validate_python(values)


def _shown(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return f"points.{where} = {first['input']!r}: {first['msg']}"
    return f"{type(error).__name__}: {error}"


def fit(studies: Sequence[Study], what: str) -> Penalties:
    """Fit all effects that the studies vary.

    Args:
        studies: With at least two points that differ.
        what: Them in words, for messages.

    Raises:
        ConfigError: If two effects only ever change together, so that they cannot be told apart.
    """
    varied = [study for study in studies if len({point.h for point in study.points}) > 1]
    hs = [point.h for study in varied for point in study.points]
    overlapped = [study for study in studies if len({point.tau for point in study.points}) > 1]
    taus = [point.tau for study in overlapped for point in study.points]
    least_h = min(hs, default=1)
    names = ["h", "m", "tau", *(name for name in OWN_CODECS if name != _EXACT)]
    centred, losses = _centred(studies, names, least_h)
    known = [index for index in range(len(names)) if np.any(centred[:, index] != 0)]
    if not known:
        raise ConfigError(
            f"{what} cannot tell what anything costs in loss: no two points of one study and "
            "seed differ in h, m, tau or codec; add some that do"
        )
    matrix = centred[:, known]
    if np.linalg.matrix_rank(matrix) < len(known):
        raise ConfigError(
            f"{what} cannot tell {', '.join(names[i] for i in known)} apart: some of them only "
            "ever change together; add points in which one changes alone"
        )
    costs = np.linalg.lstsq(matrix, losses, rcond=None)[0]
    effects = {
        names[index]: Effect(max(0.0, float(cost)), _sources(studies, names, index, least_h))
        for index, cost in zip(known, costs, strict=True)
    }
    return Penalties(effects, least_h, max(hs, default=1), max(taus, default=0))


def _centred(
    studies: Sequence[Study], names: Sequence[str], least_h: int
) -> tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[Any, np.dtype[np.float64]]]:
    """Return features [points, names] and log losses [points], each less its study's mean."""
    rows, losses = [], []
    for study in studies:
        features = np.array([_features(point, names, least_h) for point in study.points])
        logs = np.log([point.loss for point in study.points])
        rows.append(features - features.mean(axis=0))
        losses.append(logs - logs.mean())
    centred = np.concatenate(rows)
    # A mean of equal numbers may be off by a rounding: that is no difference.
    centred[np.abs(centred) < 1e-12] = 0.0
    return centred, np.concatenate(losses)


def _features(point: TrainedPoint, names: Sequence[str], least_h: int) -> list[float]:
    values: dict[str, float] = {
        "h": math.log(max(point.h, least_h) / least_h),
        "m": math.log(point.m),
        "tau": point.tau,
    }
    ways = (point.codec, point.downlink)
    return [values[name] if name in values else float(ways.count(name)) for name in names]


def _sources(
    studies: Sequence[Study], names: Sequence[str], index: int, least_h: int
) -> tuple[str, ...]:
    """Name the studies in which an effect's setting differs from point to point."""
    found = [
        study.source
        for study in studies
        if len({_features(point, names, least_h)[index] for point in study.points}) > 1
    ]
    return tuple(dict.fromkeys(found))
