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

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.bench.outer_loop.timed_island import Timed
from diloco.bench.syncer.control_plane import control_plane
from diloco.compression.registry import get_codec
from diloco.config.schema import Config
from diloco.errors import IslandFailed
from diloco.launch.process.logs import tail
from diloco.report.rows import Column, Report, Requirement
from diloco.transport.shaping.link import find_profile

_ISLANDS = ("east", "west")
_LOOK_S = 0.5

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
class Row:
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
class Setting:
    """All rows, and what they share."""

    rows: tuple[Row, ...]
    inner_steps_per_round: int = 30
    num_rounds: int = 4  # the first one warms up
    sequence_length: int = 128
    link: str = "bench-100M-60ms"


def _full_setting() -> Setting:
    rows = []
    for size, model in (("10M", _MODEL_10M), ("50M", _MODEL_50M)):
        for codec, num_fragments, overlap_steps in (("float32", 1, 0), ("float32", 3, 5)):
            name = f"{size}-{codec}-P{num_fragments}-tau{overlap_steps}"
            rows.append(Row(name, model, _outer(codec, num_fragments, overlap_steps), 0.2))
        rows.append(Row(f"{size}-int4-P10-tau5", model, _outer("int4", 10, 5), 0.2, 0.97))
    rows.append(Row("10M-int4-P10-tau5-real", _MODEL_10M, _outer("int4", 10, 5), None))
    return Setting(tuple(rows))


def _outer(codec: str, num_fragments: int, overlap_steps: int) -> dict[str, Any]:
    return {
        "preset": "streaming" if num_fragments > 1 else "classic",
        "num_fragments": num_fragments,
        "overlap_steps": overlap_steps,
        "uplink_codec": codec,
        "downlink_codec": codec,
    }


#: 9,933,696 and 49,957,632 parameters.
_MODEL_10M = {"dim": 384, "num_layers": 6, "num_heads": 6, "num_kv_heads": 3, "ffn_dim": 1024}
_MODEL_50M = {"dim": 768, "num_layers": 8, "num_heads": 12, "num_kv_heads": 6, "ffn_dim": 1920}

SETTING = _full_setting()


def run_utilisation(setting: Setting, *, on_progress: Callable[[int, str], None]) -> Report:
    """Run every row and judge.

    Args:
        setting: The rows.
        on_progress: Hears how many rows are done, and which one begins.

    Raises:
        DilocoError: If a process of a run fails; says what its log does.
    """
    began = time.monotonic()
    rows, requirements = [], []
    for index, row in enumerate(setting.rows):
        on_progress(index, row.name)
        with tempfile.TemporaryDirectory(prefix="diloco-utilisation-") as directory:
            figures = row_figures(setting, row, _run(setting, row, Path(directory)))
        rows.append(figures)
        if row.at_least is not None:
            figure = figures["utilisation"]
            what = f"utilisation of {row.name}"
            requirements.append(Requirement(what, figure, row.at_least, "x", is_at_least=True))
    return Report(
        bench="utilisation",
        setting={
            "inner_steps_per_round": setting.inner_steps_per_round,
            "num_rounds": setting.num_rounds - 1,
            "link": setting.link,
            "num_islands": len(_ISLANDS),
        },
        columns=_COLUMNS,
        rows=rows,
        requirements=requirements,
        wall_s=time.monotonic() - began,
    )


def _config(setting: Setting, row: Row, state_dir: Path) -> Config:
    steps = setting.inner_steps_per_round
    return Config.model_validate(
        {
            # Long enough that all sends of the last whole round are made and merged.
            "run": {
                "name": "utilisation",
                "seed": 1,
                "inner_steps": steps * setting.num_rounds + row.outer["overlap_steps"],
            },
            "model": row.model,
            "data": {"sequence_length": setting.sequence_length},
            "inner": {"optimizer": {"lr": 1e-3, "schedule": "constant"}},
            "outer": {
                **row.outer,
                "inner_steps_per_round": steps,
                "round_deadline": "600s",
                "flush": False,
            },
            "coordinator": {"state_dir": str(state_dir)},
            "transport": {"link": setting.link, "rpc_timeout": "600s"},
            "evaluation": {"num_sequences": 1},
            "islands": {
                name: {"ranks": 1, "tokens_per_inner_step": setting.sequence_length}
                for name in _ISLANDS
            },
        }
    )


def _run(setting: Setting, row: Row, directory: Path) -> list[Timed]:
    """Run all processes of a row to their end; returns what each island measured."""
    with contextlib.ExitStack() as stack:
        run_file = stack.enter_context(control_plane(_config(setting, row, directory / "run")))
        islands = {
            name: stack.enter_context(_island(run_file, row, name, directory)) for name in _ISLANDS
        }
        while running := [name for name, process in islands.items() if process.poll() is None]:
            _check_health(islands, directory)
            with contextlib.suppress(subprocess.TimeoutExpired):
                islands[running[0]].wait(_LOOK_S)
        _check_health(islands, directory)
    return [Timed(**json.loads(_output(directory, name).read_text())) for name in _ISLANDS]


@contextlib.contextmanager
def _island(
    run_file: Path, row: Row, name: str, directory: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run one island while the context lasts."""
    command = [sys.executable, "-m", "diloco.bench.outer_loop.timed_island", str(run_file)]
    command += ["--island", name, "--output", str(_output(directory, name))]
    if row.step_s is not None:
        command += ["--step-s", str(row.step_s)]
    with open(_log(directory, name), "wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _check_health(islands: Mapping[str, subprocess.Popen[bytes]], directory: Path) -> None:
    for name, process in islands.items():
        if process.poll():
            raise IslandFailed(
                f"island {name} of the bench ended with exit code {process.returncode}; its log "
                f"says:\n{tail(_log(directory, name))}"
            )


def _output(directory: Path, island: str) -> Path:
    return directory / f"{island}.json"


def _log(directory: Path, island: str) -> Path:
    return directory / f"{island}.log"


def row_figures(setting: Setting, row: Row, islands: Sequence[Timed]) -> dict[str, Any]:
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
