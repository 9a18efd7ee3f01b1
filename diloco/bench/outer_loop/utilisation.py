"""How busy an island stays: real processes behind shaped links, a step of known duration.

Two islands, coordinator and syncer are processes; each island's link carries 100 Mbit/s each way
with 60 ms round trip. An inner step is a sleep of 0.2 s, so whatever the wall clock shows beyond
that was lost to the outer loop; one row trains for real. Figures cover whole rounds after the
first, of the island that was kept from training the most.

For scale: an open peer of this kind, float32, 3 fragments, delay 5, is blocked for 28 of 58 s at
50M parameters.

Source: PROTOCOL.md, "Words for figures".
"""

from __future__ import annotations

import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import diloco
from diloco.bench.processes import run_jobs
from diloco.bench.run_values import MODEL_10M, MODEL_50M, run_values
from diloco.bench.syncer.control_plane import control_plane
from diloco.compression.registry import get_codec
from diloco.config.links import find_profile
from diloco.config.schema import Config
from diloco.data.open import open_data
from diloco.report.rows import Column, Report, Requirement, Watch, matching
from diloco.trainer.island_trainer import island_trainer, own_batches
from diloco.trainer.models.families import initialise_
from diloco.trainer.models.model import LlamaShape, build_model
from diloco.trainer.parallel.pipeline import parts_of

_UNDISTURBED_STEPS = 10
_ISLANDS = ("east", "west")

_COLUMNS = (
    Column("row", "row"),
    Column("utilisation", "utilisation", ".3f"),
    Column("not_blocked", "not blocked", ".3f"),
    Column("blocked_s_per_round", "blocked, s a round", ".2f"),
    Column("floor_s_per_round", "floor, s a round", ".2f"),
    Column("step_s", "step, s", ".3f"),
    Column("wall_s", "wall, s", ".1f"),
)


@dataclass(frozen=True, slots=True)
class UtilisationRow:
    """One run.

    Attributes:
        name: What the table calls it.
        model: Section [model] of a run file.
        outer: Section [outer], without H.
        step_s: Seconds of an inner step; None trains for real.
        at_least: Utilisation that is required; None: none is.
    """

    name: str
    model: Mapping[str, Any]
    outer: Mapping[str, Any]
    step_s: float | None
    at_least: float | None = None


@dataclass(frozen=True, slots=True)
class UtilisationSetting:
    """All rows, and what they share."""

    rows: tuple[UtilisationRow, ...]
    inner_steps_per_round: int = 30
    num_rounds: int = 4  # the first one warms up
    sequence_length: int = 128
    link: str = "bench-100M-60ms"


def _full_setting() -> UtilisationSetting:
    rows = []
    for size, model in (("10M", MODEL_10M), ("50M", MODEL_50M)):
        for codec, num_fragments, overlap_steps in (("float32", 1, 0), ("float32", 3, 5)):
            name = f"{size}-{codec}-P{num_fragments}-tau{overlap_steps}"
            rows.append(
                UtilisationRow(name, model, _outer(codec, num_fragments, overlap_steps), 0.2)
            )
        rows.append(
            UtilisationRow(f"{size}-int4-P10-tau5", model, _outer("int4", 10, 5), 0.2, 0.97)
        )
    rows.append(UtilisationRow("10M-int4-P10-tau5-real", MODEL_10M, _outer("int4", 10, 5), None))
    return UtilisationSetting(tuple(rows))


def _outer(codec: str, num_fragments: int, overlap_steps: int) -> dict[str, Any]:
    return {
        "preset": "streaming" if num_fragments > 1 else "classic",
        "num_fragments": num_fragments,
        "overlap_steps": overlap_steps,
        "uplink_codec": codec,
        "downlink_codec": codec,
    }


SETTING = _full_setting()


def run(watch: Watch, rows: Sequence[str] = (), *, setting: UtilisationSetting = SETTING) -> Report:
    """Run every row whose name matches and judge.

    Raises:
        ConfigError: If a pattern matches no row.
        DilocoError: If a process of a run fails.
    """
    wanted = matching([row.name for row in setting.rows], rows)
    chosen = [row for row in setting.rows if row.name in wanted]
    results, requirements = [], []
    for index, row in enumerate(chosen):
        look = functools.partial(watch, row.name, index, len(chosen))
        with tempfile.TemporaryDirectory(prefix="diloco-utilisation-") as directory:
            results.append(row_figures(setting, row, _train(setting, row, Path(directory), look)))
        if row.at_least is not None:
            figure = results[-1]["utilisation"]
            what = f"utilisation of {row.name}"
            requirements.append(Requirement(what, figure, row.at_least, "x", is_at_least=True))
    described = {
        "inner_steps_per_round": setting.inner_steps_per_round,
        "num_rounds": setting.num_rounds - 1,
        "link": setting.link,
        "num_islands": len(_ISLANDS),
    }
    return Report("utilisation", described, _COLUMNS, results, requirements)


def _config(setting: UtilisationSetting, row: UtilisationRow, state_dir: Path) -> Config:
    steps = setting.inner_steps_per_round
    outer = {"inner_steps_per_round": steps, "round_deadline": "600s", "flush": False}
    values = run_values(
        "utilisation",
        row.model,
        {**row.outer, **outer},
        # Long enough that all sends of the last whole round are made and merged.
        inner_steps=steps * setting.num_rounds + row.outer["overlap_steps"],
        sequence_length=setting.sequence_length,
        tokens=setting.sequence_length,
        islands=_ISLANDS,
        state_dir=state_dir,
        transport={"link": setting.link, "rpc_timeout": "600s"},
    )
    return Config.model_validate(values)


def _train(
    setting: UtilisationSetting, row: UtilisationRow, directory: Path, look: Callable[[], None]
) -> list[Timed]:
    """Run all processes of a row to their end; returns what each island measured."""
    with control_plane(_config(setting, row, directory / "run")) as run_file:
        jobs = {name: functools.partial(measure, run_file, name, row.step_s) for name in _ISLANDS}
        return list(run_jobs(jobs, lambda _: look(), len(_ISLANDS)).values())


def row_figures(
    setting: UtilisationSetting, row: UtilisationRow, islands: Sequence[Timed]
) -> dict[str, Any]:
    """Compute a row's figures: JSON values, hence `Any`."""
    worst = min(islands, key=_utilisation)
    num_rounds = worst.inner_steps / setting.inner_steps_per_round
    profile = find_profile(setting.link)
    floor_s = sum(
        8 * get_codec(row.outer[codec]).wire_bytes(worst.num_parameters) / link.bandwidth_bps
        for codec, link in (("uplink_codec", profile.up), ("downlink_codec", profile.down))
    )
    return {
        "row": row.name,
        "parameters": worst.num_parameters,
        "outer": dict(row.outer),
        "is_simulated": row.step_s is not None,
        "utilisation": _utilisation(worst),
        "not_blocked": 1 - worst.blocked_s / worst.wall_s,
        "blocked_s_per_round": worst.blocked_s / num_rounds,
        "floor_s_per_round": floor_s,
        "step_s": worst.undisturbed_step_s,
        "wall_s": worst.wall_s,
        "inner_steps": worst.inner_steps,
        "utilisation_of_islands": [_utilisation(island) for island in islands],
    }


def _utilisation(island: Timed) -> float:
    return island.inner_steps * island.undisturbed_step_s / island.wall_s


# -- an island, in a process of its own ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timed:
    """What one island measured over whole rounds.

    Attributes:
        inner_steps: Inner steps made.
        wall_s: Seconds from the first one's begin to the last one's `DiLoCo.step` done.
        blocked_s: Of these, seconds for which `DiLoCo.step` waited for outcomes.
        undisturbed_step_s: Duration of an inner step with nothing to do besides it.
        num_parameters: Size of the model.
    """

    inner_steps: int
    wall_s: float
    blocked_s: float
    undisturbed_step_s: float
    num_parameters: int


class _SleepingStep:
    """Sleeps, and changes one tensor a step, so that there is something to send."""

    def __init__(self, config: Config, step_s: float) -> None:
        self.model = build_model(LlamaShape.from_config(config.model)).to_empty(device="cpu")
        for part in parts_of(self.model):
            initialise_(part, config.run.seed)
        self.undisturbed_s = step_s
        self._parameters = itertools.cycle(self.model.parameters())

    @torch.no_grad()
    def __call__(self) -> None:
        ends = time.monotonic() + self.undisturbed_s
        next(self._parameters).mul_(1.001)
        time.sleep(max(0.0, ends - time.monotonic()))


class _RealStep:
    """Trains; the undisturbed duration is measured before the island joins."""

    def __init__(self, config: Config) -> None:
        data = open_data(config)
        slot = sorted(config.islands).index(config.island_id)
        self._trainer = island_trainer(config, data, own_batches(config, data, slot))
        self.model = self._trainer.model
        self._batches = itertools.count()
        self.undisturbed_s = statistics.median(self() for _ in range(_UNDISTURBED_STEPS))
        for part in parts_of(self.model):
            initialise_(part, config.run.seed)

    def __call__(self) -> float:
        return self._trainer.inner_step(next(self._batches)).read().duration_s


def train(config: Config, step: _SleepingStep | _RealStep) -> Timed:
    """Train one island to the end of its run."""
    tokens = config.island.tokens_per_inner_step
    with diloco.connect(config) as connection:
        outer = diloco.DiLoCo(step.model, config.outer, transport=connection)

        def train_until(inner_step: int) -> None:
            while outer.inner_step < inner_step:
                step()
                outer.step(num_tokens=tokens)

        period = config.outer.inner_steps_per_round
        train_until(period)
        began, blocked_s = time.monotonic(), outer.blocked_s
        train_until(outer.inner_steps // period * period)
        timed = Timed(
            inner_steps=outer.inner_step - period,
            wall_s=time.monotonic() - began,
            blocked_s=outer.blocked_s - blocked_s,
            undisturbed_step_s=step.undisturbed_s,
            num_parameters=sum(p.numel() for p in step.model.parameters()),
        )
        train_until(outer.inner_steps)
        outer.finish()
    return timed


def measure(run_file: Path, island: str, step_s: float | None) -> Timed:
    """Train an island of a run whose inner steps take `step_s`, or are real ones."""
    config = diloco.load_config(run_file, island=island)
    return train(config, _RealStep(config) if step_s is None else _SleepingStep(config, step_s))
