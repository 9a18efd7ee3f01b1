"""Runs the suite, and writes RESULTS.md with tables and verdicts, and a picture an experiment."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.report.figures import COLOURS, SMALL, dress, new_figure
from diloco.report.rows import machine
from diloco.report.statistics import Spread
from diloco.simulations.lab.cache import Cache
from diloco.simulations.lab.experiment import Experiment, RowConfig, Size
from diloco.simulations.lab.report import summary
from diloco.simulations.lab.run import Result
from diloco.simulations.lab.sweep import Show, run_points
from diloco.simulations.lab.verdicts import ClaimVerdict, excess, figure_of, judge, percent

if TYPE_CHECKING:  # a second of imports, only for those who draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NOT_A_NUMBER = "-"
#: Headings of what experiments compare by.
_FIGURES = {
    "loss": "held-out loss [nats a byte]",
    "at_tokens": "nats a byte at equal tokens",
    "norm_ratio": "norm ratio",
    "virtual_s": "virtual s",
    "busy_percent": "busy, %",
}


@dataclass(frozen=True, slots=True)
class Found:
    """An experiment and what its rows came to."""

    experiment: Experiment
    rows: Mapping[str, Sequence[Result]]

    @property
    def verdicts(self) -> list[ClaimVerdict]:
        """Of its checks."""
        return judge(self.experiment.config, self.rows)

    @property
    def present(self) -> list[RowConfig]:
        """Rows that were run, in order."""
        return [row for row in self.experiment.config.rows if row.name in self.rows]


def write_results(found: Sequence[Found], size: Size, directory: Path, command: str) -> Path:
    """Write RESULTS.md and plots/NAME.png; returns the former's path.

    Args:
        found: Experiments, in order.
        size: Theirs.
        directory: Made when it is missing.
        command: What was typed.
    """
    (directory / "plots").mkdir(parents=True, exist_ok=True)
    for each in found:
        if each.rows:
            figure_of_experiment(each).savefig(directory / "plots" / f"{each.experiment.name}.png")
    path = directory / "RESULTS.md"
    path.write_text("\n".join(_document(found, size, command)) + "\n", encoding="utf-8")
    return path


def table_of(found: Found) -> list[dict[str, Any]]:
    """Give a row a way to train: means over seeds, and the excess over the experiment's base.

    "figure" and "figure_deviation" are of what the experiment compares by.
    """
    config = found.experiment.config
    rows = []
    for row in found.present:
        results = found.rows[row.name]
        base = found.rows.get(config.base)
        over = None
        if base and row.name != config.base:
            over = percent(excess(results, base, config.figure))
        values = [figure_of(result, config.figure) for result in results]
        figure = Spread.of(values) if all(map(math.isfinite, values)) else None
        rows.append(
            {
                "row": row.name,
                **summary(results),
                "over": over,
                "figure": figure and figure.mean,
                "figure_deviation": figure and figure.deviation,
            }
        )
    return rows


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


# -- words -----------------------------------------------------------------------------------------


def _document(found: Sequence[Found], size: Size, command: str) -> Iterator[str]:
    results = [result for each in found for rows in each.rows.values() for result in rows]
    parameters = sorted({result["parameters"] for result in results})
    trained = {result["fingerprint"]: result for result in results}.values()
    seeds, here = sorted({result["seed"] for result in results}), machine()
    yield "# What the laboratory found"
    yield ""
    yield from _paragraph(
        f"Written by `{command}`; nothing in it is written by hand. Experiments, claims and "
        "reasons are in configs/simulations/suite."
    )
    yield from _paragraph(
        f"A model of {' or '.join(f'{count:,}' for count in parameters)} parameters learns the "
        "sources of Python's standard library, bytes as tokens. A row makes "
        f"{size.inner_steps} inner steps of {size.tokens_per_inner_step:,} tokens, all islands "
        f"together, the first {size.warm_steps} of them data parallel; from scratch "
        f"{size.inner_steps - size.warm_steps}. H is 30, M is 4 and outer steps are Nesterov's "
        f"with lr 0.7 and momentum 0.9 unless an experiment or a row says otherwise. Seeds: "
        f"{', '.join(map(str, seeds))}. A loss is that of the published parameters after the "
        "last round, in nats a byte, mean +- sample deviation over seeds; an excess is paired by "
        "seed. An inner step takes 1 s of virtual time, and links none. At this size effects are "
        "ranked, not predicted: below 0.5 % they are nothing where more than rounding differs."
    )
    yield from _paragraph(
        f"{len(trained)} runs, {sum(r['wall_s'] for r in trained) / 60:.0f} minutes of one CPU, "
        f"torch {here['torch']}, Python {here['python']}, {here['cpu_capability']}."
    )
    yield "| target | claim | found | verdict |"
    yield "| --- | --- | --- | --- |"
    for each in found:
        targets = ", ".join(each.experiment.config.targets)
        for verdict in each.verdicts:
            yield f"| {targets} | {verdict.check.says} | {verdict.found} | {verdict.word} |"
        for part in each.experiment.config.not_run:
            yield f"| {targets} | {part.what} | {_NOT_A_NUMBER} | not run |"
    for each in found:
        yield from _section(each)


def _paragraph(text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, width=100, break_long_words=False, break_on_hyphens=False)
    yield ""


def _section(found: Found) -> Iterator[str]:
    config = found.experiment.config
    yield ""
    yield f"## {config.title}"
    yield ""
    yield from _paragraph(f"{', '.join(config.targets)}: {config.claim} ({config.source})")
    if found.rows:
        yield from _table(found)
        yield ""
        yield f"![{config.title}](plots/{found.experiment.name}.png)"
        yield ""
    for verdict in found.verdicts:
        yield f"- **{verdict.word}**: {verdict.check.says}. {verdict.found}."
        if verdict.has_held is False and verdict.check.why:
            yield f"  Why we think so: {verdict.check.why}"
    for part in config.not_run:
        yield f"- **not run**: {part.what}. {part.why}"


def _table(found: Found) -> Iterator[str]:
    config, rows = found.experiment.config, table_of(found)
    has_own = config.figure != "loss"
    more = [
        (heading, key)
        for heading, key in (("failures", "failures"), ("dropped, %", "dropped_percent"))
        if any(row[key] for row in rows)
    ]
    headings = ["row", "seeds", "nats a byte"]
    headings += [_FIGURES[config.figure]] if has_own else []
    headings += [f"over {config.base}"] if config.base else []
    headings += ["MB moved", "virtual s", "busy, %", *(heading for heading, _ in more)]
    yield f"| {' | '.join(headings)} |"
    yield f"| {' | '.join('---' for _ in headings)} |"
    for row in rows:
        loss = _with_deviation(row["loss"], row["deviation"])
        if row["ended"]:
            loss = f"{loss}; ended by {row['ended']}"
        cells = [row["row"], str(row["seeds"]), loss]
        cells += [_with_deviation(row["figure"], row["figure_deviation"])] if has_own else []
        cells += [row["over"] or ""] if config.base else []
        cells += [_number(row["megabytes"], ".1f"), _number(row["virtual_s"], ".0f")]
        cells += [_number(row["busy_percent"], ".1f"), *(_number(row[k], ".1f") for _, k in more)]
        yield f"| {' | '.join(cells)} |"


def _with_deviation(mean: float | None, deviation: float | None) -> str:
    text = _number(mean, ".4f")
    return text if deviation is None else f"{text} +- {deviation:.4f}"


def _number(value: float | None, form: str) -> str:
    return _NOT_A_NUMBER if value is None else format(value, form)


# -- pictures --------------------------------------------------------------------------------------


def figure_of_experiment(found: Found) -> Figure:
    """Draw the rows: lines over x by series, or bars; whiskers are deviations over seeds."""
    config = found.experiment.config
    values = {row["row"]: row for row in table_of(found)}
    width, height = 7.0, 4.0
    if not config.axis:  # every bar has its name next to it
        longest = max((len(name) for name in values), default=0)
        width, height = max(width, 4.0 + 0.07 * longest), max(height, 1.0 + 0.16 * len(values))
    figure = new_figure(width, height)
    axes = figure.subplots()
    label = _FIGURES[config.figure]
    if config.axis:
        _draw_lines(axes, found, values)
        dress(axes, config.axis, label, config.title)
    else:
        _draw_bars(axes, found, values)
        dress(axes, label, "", config.title)
    return figure


def _draw_lines(axes: Axes, found: Found, values: Mapping[str, Mapping[str, Any]]) -> None:
    config = found.experiment.config
    series = dict.fromkeys(row.series for row in found.present)
    for number, name in enumerate(series):
        drawn = [
            (row.x, values[row.name])
            for row in found.present
            if row.series == name and row.x is not None and values[row.name]["figure"] is not None
        ]
        drawn.sort(key=lambda pair: pair[0])
        axes.errorbar(
            [x for x, _ in drawn],
            [value["figure"] for _, value in drawn],
            yerr=[value["figure_deviation"] or 0.0 for _, value in drawn],
            marker="o",
            markersize=3.5,
            linewidth=1.2,
            capsize=2,
            color=COLOURS[number % len(COLOURS)],
            label=name,
        )
    for row in found.present:
        if row.x is None and values[row.name]["figure"] is not None:
            level = values[row.name]["figure"]
            axes.axhline(level, color="#999999", linewidth=0.9, linestyle="--", label=row.name)
    if config.is_log:
        axes.set_xscale("log")
    axes.legend(fontsize=SMALL, frameon=False)


def _draw_bars(axes: Axes, found: Found, values: Mapping[str, Mapping[str, Any]]) -> None:
    names = [row.name for row in found.present if values[row.name]["figure"] is not None]
    losses = [values[name]["figure"] for name in names]
    axes.barh(
        names[::-1],
        losses[::-1],
        xerr=[values[name]["figure_deviation"] or 0.0 for name in names[::-1]],
        color=COLOURS[0],
        height=0.6,
        capsize=2,
    )
    if losses:  # losses differ by per cent
        low, high = min(losses), max(losses)
        axes.set_xlim(low - max(0.25 * (high - low), 0.005 * low), high + 0.1 * (high - low) + 1e-3)
