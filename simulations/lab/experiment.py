"""An experiment of the suite: rows of one laboratory, what a paper claims of them, and its checks.

    title = "Loss by H"
    targets = ["B2"]
    claim = "Longer rounds cost little."
    source = "DiLoCo (arXiv 2311.08105), figure 4"
    base = "H = 10"                      # the row that others are compared with
    [[rows]]
    name = "H = 10"
    set = ["outer.inner_steps_per_round=10"]
    [[checks]]
    kind = "excess"
    row = "H = 100"
    at_most = 3.0
    why = "what we think, should it not hold"

Verdicts are computed from the figures; reasons are words, and stand next to what they are about.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from diloco.config.classes import Section
from diloco.config.fields import Problem, several_problems, tuples
from diloco.config.load import load_section
from diloco.errors import ConfigError
from diloco.simulations.lab.config import LAB, Flags
from diloco.simulations.lab.point import LabPoint, points_of

#: What rows are compared by; at_tokens: the loss of the published parameters when 90 % of the run's
#: planned tokens were trained on, merged or not. Runs that merge on arrival end by merged tokens,
#: so that those that lose work train on more.
FigureName: TypeAlias = Literal["loss", "at_tokens", "norm_ratio", "virtual_s", "busy_percent"]
Names: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(tuples)]

#: Where the experiments of the suite are, and the laboratory that they change.
DIRECTORY = Path(__file__).resolve().parents[2] / "configs" / "simulations"
LABORATORY = DIRECTORY / "lab.toml"
#: Below the suite: experiments of hours, which run only where they are named.
LONG = "long"


@dataclass(frozen=True, slots=True)
class Size:
    """How long the experiments are.

    Attributes:
        inner_steps: Of a warm row, of which the first `warm_steps` are data parallel; a row from
            scratch makes as many as a warm one makes after them.
        warm_steps: See there.
        tokens_per_inner_step: Of all islands together.
        seeds: Of every row.
    """

    inner_steps: int
    warm_steps: int
    tokens_per_inner_step: int
    seeds: tuple[int, ...]


FULL = Size(inner_steps=800, warm_steps=400, tokens_per_inner_step=2048, seeds=(1, 2, 3))
QUICK = Size(inner_steps=240, warm_steps=120, tokens_per_inner_step=1024, seeds=(1, 2))


class RowConfig(Section):
    """One way to train."""

    name: str = Field(min_length=1, description="What table, picture and checks call it")
    set: Names = Field(
        default=(), description="Overrides of the run, or by lab.KEY=VALUE of the laboratory"
    )
    x: float | None = Field(default=None, description="Place on the picture's axis; none: a bar")
    series: str = Field(default="", description="Rows of one name are joined by a line")
    start: Literal["warm", "scratch"] = Field(
        default="warm", description="Whether islands part after warm steps or begin at the seed"
    )
    tokens_share: float = Field(
        default=1.0, gt=0, le=1, description="Of the tokens an inner step that other rows have"
    )
    quick: bool = Field(default=True, description="Whether it is a part of the quick suite")


class CheckConfig(Section):
    """A claim in numbers.

    excess: the figure of `row` over that of `base`, in percent, paired by seed.
    figure: the figure of `row` itself, mean over seeds.
    rising: the figures of `rows` do not fall from one to the next, by more than `slack` percent.
    best: of each of `series`, the x of the lowest figure; they do not fall, and rise once.
    equal: all `rows` end with the same published bits, seed by seed.
    """

    kind: Literal["excess", "figure", "rising", "best", "equal"] = Field(description="See above")
    says: str = Field(min_length=1, description="The claim in words")
    row: str = Field(default="", description="excess, figure: the row")
    base: str = Field(default="", description="excess: against this row; empty: the experiment's")
    rows: Names = Field(default=(), description="rising, equal: these rows, in order")
    series: Names = Field(default=(), description="best: these series, in order")
    figure: FigureName | Literal[""] = Field(
        default="", description="Which figure; empty: the experiment's"
    )
    at_most: float | None = Field(default=None, description="Largest that reproduces")
    at_least: float | None = Field(default=None, description="Smallest that reproduces")
    slack: float = Field(default=0.0, ge=0, description="rising: percent that counts as nothing")
    why: str = Field(default="", description="What we think, should it not hold")


class NotRunConfig(Section):
    """A part of a target that is not here."""

    what: str = Field(min_length=1, description="What")
    why: str = Field(min_length=1, description="Why not")


class ExperimentConfig(Section):
    """One experiment."""

    title: str = Field(min_length=1, description="Heading")
    targets: Names = Field(min_length=1, description="Names of the claims")
    claim: str = Field(min_length=1, description="What is claimed, in words")
    source: str = Field(min_length=1, description="By whom")
    base: str = Field(default="", description="Row that others are compared with; empty: none")
    axis: str = Field(default="", description="What x is; empty: bars")
    is_log: bool = Field(default=False, description="Whether the picture's axis is logarithmic")
    figure: FigureName = Field(default="loss", description="What rows are compared by")
    set: Names = Field(default=(), description="Overrides of all rows, before their own")
    rows: Annotated[tuple[RowConfig, ...], BeforeValidator(tuples)] = Field(
        default=(), description="Ways to train"
    )
    checks: Annotated[tuple[CheckConfig, ...], BeforeValidator(tuples)] = Field(
        default=(), description="The claim in numbers"
    )
    not_run: Annotated[tuple[NotRunConfig, ...], BeforeValidator(tuples)] = Field(
        default=(), description="What of it is not here"
    )

    @model_validator(mode="after")
    def _check_names(self) -> ExperimentConfig:
        """Refuse names of rows that are not there."""
        names = [row.name for row in self.rows]
        known = ", ".join(names)
        problems: list[Problem] = []
        if len(set(names)) != len(names):
            problems.append(("rows", names, "each must have a name of its own"))
        for number, check in enumerate(self.checks):
            for name in (check.row, check.base, *check.rows):
                if name and name not in names:
                    problems.append((f"checks.{number}", name, f"not a row; rows: {known}"))
            for name in check.series:
                if name not in {row.series for row in self.rows}:
                    problems.append((f"checks.{number}", name, "not a series of the rows"))
        if self.base and self.base not in names:
            problems.append(("base", self.base, f"not a row; rows: {known}"))
        if problems:
            raise several_problems(problems)
        return self


@dataclass(frozen=True, slots=True)
class Experiment:
    """A loaded experiment: its file's name, what it says, and the points of every row."""

    name: str
    config: ExperimentConfig
    points: dict[str, list[LabPoint]]


def load_experiments(names: Sequence[str], size: Size, *, is_quick: bool) -> list[Experiment]:
    """Load experiments with the points of a size, in the order of their names.

    Args:
        names: Of files, without suffix; none: all but the long ones.
        size: How long rows are.
        is_quick: Whether rows that are not quick are left out.

    Raises:
        ConfigError: If there is none of a name, or one cannot be used.
    """
    suite = DIRECTORY / "suite"
    usual = {path.stem: path for path in sorted(suite.glob("*.toml"))}
    paths = usual | {path.stem: path for path in sorted((suite / LONG).glob("*.toml"))}
    for name in names:
        if name not in paths:
            raise ConfigError(f"{name}: no such experiment; there are {', '.join(paths)}")
    return [
        _load(path, size, is_quick=is_quick)
        for name, path in paths.items()
        if name in (names or usual)
    ]


def _load(path: Path, size: Size, *, is_quick: bool) -> Experiment:
    config = load_section(path, ExperimentConfig)
    points = {}
    for row in config.rows:
        if row.quick or not is_quick:
            try:
                points[row.name] = points_of(LABORATORY, _flags(config, row, size))
            except ConfigError as error:
                raise ConfigError(f"{path}, row {row.name!r}: {error}") from error
    return Experiment(path.stem, config, points)


def _flags(config: ExperimentConfig, row: RowConfig, size: Size) -> Flags:
    """Lay a row's settings over the size's."""
    is_warm = row.start == "warm"
    steps = size.inner_steps if is_warm else size.inner_steps - size.warm_steps
    lab: dict[str, Any] = {
        "seeds": list(size.seeds),
        "warm_steps": size.warm_steps if is_warm else 0,
        "tokens_per_inner_step": round(row.tokens_share * size.tokens_per_inner_step),
    }
    settings = (*config.set, *row.set)
    own = [text.removeprefix(LAB) for text in settings if text.startswith(LAB)]
    return Flags(
        (*(f"{key}={json.dumps(value)}" for key, value in lab.items()), *own),
        (f"run.inner_steps={steps}", *(text for text in settings if not text.startswith(LAB))),
    )
