"""The suite of the laboratory: its files, its verdicts, and the document that it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from diloco.config.load import section_with
from diloco.errors import ConfigError
from diloco.simulations.lab.cache import Cache
from diloco.simulations.lab.cost import cost_of
from diloco.simulations.lab.experiment import (
    DIRECTORY,
    FULL,
    QUICK,
    Experiment,
    ExperimentConfig,
    Size,
    load_experiments,
)
from diloco.simulations.lab.kept import keep_found, read_found
from diloco.simulations.lab.point import points_of
from diloco.simulations.lab.results import Found, write_results
from diloco.simulations.lab.run import Result
from diloco.simulations.lab.verdicts import judge

ROOT = DIRECTORY.parents[1]
#: Targets that small runs can check.
TARGETS = {"B1", "B2", "B3", "B4", "B5", "B6", "B8", "B9", "B10", "B11", "B12"}


def result(seed: int, loss: float | None, **more: Any) -> Result:
    return {
        "seed": seed, "loss": loss, "ended": "", "digests": ["d"], "norm_ratio": None,
        "virtual_s": 10.0, "bytes_up": 10**6, "bytes_down": 10**6, "busy": {"a": 1.0, "b": 0.5},
        "failures": 0, "syncer_failures": 0, "dropped_tokens": 0.0, "tokens": 100,
        "parameters": 1000, "planned_tokens": 100, "fingerprint": f"{seed}/{loss}", "wall_s": 1.0,
        "readings": [{"tokens": 80, "loss": 5.0}, {"tokens": 100, "loss": loss}], **more,
    }  # fmt: skip


def experiment(**check: Any) -> ExperimentConfig:
    rows = [
        {"name": "one", "x": 1.0, "series": "s"},
        {"name": "two", "x": 2.0, "series": "s"},
        {"name": "low", "x": 1.0, "series": "t"},
        {"name": "high", "x": 2.0, "series": "t"},
    ]
    values = {
        "title": "Loss by x", "targets": ["B1"], "claim": "c", "source": "s", "base": "one",
        "axis": "x", "rows": rows, "checks": [{"says": "it holds", "why": "for reasons", **check}],
    }  # fmt: skip
    return section_with(values, ExperimentConfig, "cannot make it")


ROWS = {
    "one": [result(1, 2.0), result(2, 4.0)],
    "two": [result(1, 2.2), result(2, 4.2, digests=["e"])],
    "low": [result(1, 3.0), result(2, 3.0)],
    "high": [result(1, None, ended="QuorumLost: gone"), result(2, 2.0)],
}

VERDICTS: dict[str, tuple[dict[str, Any], bool | None, str]] = {
    "excess is paired by seed": (
        {"kind": "excess", "row": "two", "at_most": 7.6}, True, r"\+7.50 \+- 3.54 %",
    ),
    "excess over another row": ({"kind": "excess", "row": "low", "base": "two", "at_most": 0.0},
        False, r"low over two: \+3.9"),
    "a run that ended early has diverged": (
        {"kind": "excess", "row": "high", "at_most": 50.0}, False, "diverged",
    ),
    "at least": ({"kind": "excess", "row": "high", "at_least": 3.0}, True, "diverged"),
    "at equal tokens, between readings": (
        {"kind": "figure", "row": "low", "figure": "at_tokens", "at_most": 4.0}, True, "4.000",
    ),
    "a figure": ({"kind": "figure", "row": "one", "figure": "busy_percent", "at_least": 51.0},
        False, "50.000"),
    "rising": ({"kind": "rising", "rows": ["one", "two"]}, True, "one 3.0000, two 3.2000"),
    "not rising": ({"kind": "rising", "rows": ["two", "one"]}, False, ""),
    "not rising within slack": ({"kind": "rising", "rows": ["two", "one"], "slack": 7.0}, True, ""),
    "other bits": ({"kind": "equal", "rows": ["one", "two"]}, False, "1 of 2 seeds"),
    "the same bits": ({"kind": "equal", "rows": ["one", "low"]}, True, "2 of 2 seeds"),
    "the best does not rise": ({"kind": "best", "series": ["s", "t"]}, False, "s: 1, t: 1"),
}  # fmt: skip


@pytest.mark.parametrize(("check", "has_held", "found"), VERDICTS.values(), ids=VERDICTS)
def test_verdicts_are_computed_from_figures(
    check: dict[str, Any], has_held: bool | None, found: str
) -> None:
    (verdict,) = judge(experiment(**check), ROWS)

    assert verdict.has_held is has_held, verdict
    assert re.search(found, verdict.found)


def test_a_claim_whose_rows_were_left_out_is_not_judged() -> None:
    (verdict,) = judge(experiment(kind="excess", row="two", at_most=1.0), {"one": ROWS["one"]})

    assert (verdict.has_held, verdict.word) == (None, "not run")


def test_the_document_has_figures_verdicts_and_reasons(tmp_path: Path) -> None:
    config = experiment(kind="excess", row="two", at_most=1.0)
    found = Found(Experiment("by-x", config, {}), ROWS)

    path = write_results([found], Size(8, 4, 64, (1, 2)), tmp_path, "diloco lab suite")

    text = path.read_text()
    assert "| two | 2 | 3.2000 +- 1.4142 | +7.50 +- 3.54 % | 2.0 | 10 | 50.0 |" in text
    assert "**not reproduced**: it holds. two over one: +7.50 +- 3.54 %." in text
    assert "Why we think so: for reasons" in text
    assert "ended by QuorumLost" in text
    assert (tmp_path / "plots" / "by-x.png").read_bytes().startswith(b"\x89PNG")


def test_a_name_that_is_no_row_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checks\.0: .*moon.*rows: one, two"):
        experiment(kind="excess", row="moon")


def test_shipped_experiments_cover_every_target_and_can_be_planned() -> None:
    experiments = load_experiments([], QUICK, is_quick=True)

    assert {target for each in experiments for target in each.config.targets} == TARGETS
    for each in experiments:
        assert each.config.checks or each.config.not_run
        assert len({point.fingerprint() for row in each.points.values() for point in row}) > 0 or (
            not any(row.quick for row in each.config.rows)
        )
    assert len(FULL.seeds) >= 3
    with pytest.raises(ConfigError, match="moon: no such experiment; there are codecs"):
        load_experiments(["moon"], QUICK, is_quick=True)


def test_shipped_laboratories_can_be_planned() -> None:
    for path in DIRECTORY.glob("*.toml"):
        if path.name != "run.toml":
            assert points_of(path)


SHIPPED = sorted(DIRECTORY.glob("suite/**/*.toml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_rows_that_are_not_quick_are_whole_too(path: Path) -> None:
    one_seed = Size(FULL.inner_steps, FULL.warm_steps, FULL.tokens_per_inner_step, (1,))

    (loaded,) = load_experiments([path.stem], one_seed, is_quick=False)

    assert list(loaded.points) == [row.name for row in loaded.config.rows]


def test_what_was_found_is_kept_and_judged_again_as_long_as_its_settings_hold(
    tmp_path: Path,
) -> None:
    (loaded,) = load_experiments(["islands"], QUICK, is_quick=True)
    rows = {
        name: [result(p.config.run.seed, 2.0) for p in of] for name, of in loaded.points.items()
    }
    path = keep_found(Found(loaded, rows), tmp_path)

    (found,) = read_found([loaded], tmp_path)
    assert {name: [r["loss"] for r in of] for name, of in found.rows.items()} == {
        name: [2.0, 2.0] for name in rows
    }
    kept = json.loads(path.read_text())
    for each in kept["M = 2"]:
        each["settings"]["outer"]["inner_steps_per_round"] += 1
    for each in kept["M = 4"]:
        del each["settings"]["outer"]["error_feedback"]  # there was no such setting then
    path.write_text(json.dumps(kept))
    (found,) = read_found([loaded], tmp_path)
    assert rows.keys() - found.rows.keys() == {"M = 2"}

    for each in kept["M = 4"]:
        each["settings"] = {}
    path.write_text(json.dumps(kept))
    (found,) = read_found([loaded], tmp_path)
    assert "M = 2" not in found.rows, "what another row has may be of an older setting"
    kept["a name of before"] = kept.pop("M = 4")
    path.write_text(json.dumps(kept))
    (found,) = read_found([loaded], tmp_path)
    assert "M = 4" in found.rows

    path.write_text('{"M = 2": [1]}')
    with pytest.raises(ConfigError, match=r"points\.json is damaged"):
        read_found([loaded], tmp_path)
    with pytest.raises(ConfigError, match=r"there is no .*codecs.points.json: train it"):
        read_found(load_experiments(["codecs"], QUICK, is_quick=True), tmp_path)


def test_what_it_will_cost_is_told_by_what_others_took(tmp_path: Path) -> None:
    cache, experiments = Cache(tmp_path), load_experiments(["from-scratch"], FULL, is_quick=False)
    cache.prepare()

    before = cost_of(experiments, cache)
    points = [point for row in experiments[0].points.values() for point in row]
    tokens = points[0].config.run.inner_steps * points[0].tokens_per_inner_step
    cache.keep(points[0], {"wall_s": tokens * 1e-3, "parameters": 1_000})

    assert before.num_missing == before.num_points == len(points)
    after = cost_of(experiments, cache)
    assert after.num_missing == len(points) - 1
    assert after.tokens == before.tokens - tokens
    large = tokens * sum(point.config.model.dim == 192 for point in points)
    work = (after.tokens - large) * 131_392 + large * 984_000
    assert after.cpu_s == pytest.approx(work * 1e-6)
    assert f"{len(points)} points, 1 of them there already" in str(after)


def test_an_experiment_of_hours_runs_only_where_it_is_named() -> None:
    assert "from-scratch" not in {each.name for each in load_experiments([], FULL, is_quick=False)}
    (named,) = load_experiments(["from-scratch"], FULL, is_quick=False)
    assert named.points


def test_what_was_learned_from_scratch_is_kept_for_every_row() -> None:
    experiments = load_experiments(["from-scratch"], FULL, is_quick=False)

    (found,) = read_found(experiments, ROOT / "simulations" / "from-scratch")

    assert found.rows.keys() == experiments[0].points.keys(), "train them, or say why they are gone"
