"""Whether a claim of an experiment reproduced: computed from its figures, by seed."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diloco.report.statistics import Spread
from diloco.simulations.lab.experiment import CheckConfig, ExperimentConfig
from diloco.simulations.lab.run import Result

#: Of the planned tokens, at which rows are compared by `at_tokens`: before the flush of any.
_SHARE = 0.9
#: Row -> its results, a seed each.
Rows = Mapping[str, Sequence[Result]]


@dataclass(frozen=True, slots=True)
class ClaimVerdict:
    """What became of a check.

    Attributes:
        check: The claim.
        found: Figures in words.
        has_held: Whether it reproduced; None: its rows are not all here.
    """

    check: CheckConfig
    found: str
    has_held: bool | None

    @property
    def word(self) -> str:
        """The verdict in a word or two."""
        return {True: "reproduced", False: "not reproduced", None: "not run"}[self.has_held]


def judge(config: ExperimentConfig, rows: Rows) -> list[ClaimVerdict]:
    """Judge every check of an experiment."""
    return [_judged(config, check, rows) for check in config.checks]


def _judged(config: ExperimentConfig, check: CheckConfig, rows: Rows) -> ClaimVerdict:
    figure = check.figure or config.figure
    base = check.base or config.base
    named = [check.row, base] if check.kind == "excess" else [check.row, *check.rows]
    if missing := [name for name in named if name and name not in rows]:
        return ClaimVerdict(check, f"{', '.join(missing)}: left out here", None)
    if check.kind == "excess":
        spread = excess(rows[check.row], rows[base], figure)
        found = f"{check.row} over {base}: {percent(spread)}"
        return ClaimVerdict(check, found, _is_within(check, spread.mean))
    if check.kind == "figure":
        mean = mean_of(rows[check.row], figure)
        return ClaimVerdict(check, f"{check.row}: {mean:.3f}", _is_within(check, mean))
    if check.kind == "equal":
        return _equal(check, rows)
    judge_all = _best if check.kind == "best" else _rising
    return judge_all(config, check, rows, figure)


def excess(mine: Sequence[Result], base: Sequence[Result], figure: str = "loss") -> Spread:
    """Give a figure over that of the base in percent, paired by seed; infinite if one diverged."""
    of_base = {result["seed"]: figure_of(result, figure) for result in base}
    values = [
        100 * (figure_of(result, figure) / of_base[result["seed"]] - 1)
        for result in mine
        if result["seed"] in of_base
    ]
    return Spread.of(values) if all(map(math.isfinite, values)) else Spread(math.inf, None)


def figure_of(result: Result, figure: str) -> float:
    """Give a figure of a result; infinite where the run ended early or its loss is no number."""
    if result["ended"]:
        return math.inf
    if figure == "busy_percent":
        return 100 * float(min(result["busy"].values()))
    if figure == "at_tokens":
        return _loss_at(result, _SHARE * result["planned_tokens"])
    value = result[figure]
    return math.inf if value is None or math.isnan(value) else float(value)


def _loss_at(result: Result, tokens: float) -> float:
    """Give the loss after so many tokens, between the readings before and after linearly."""
    readings = [(float(r["tokens"]), float(r["loss"])) for r in result["readings"]]
    for (earlier, before), (later, after) in itertools.pairwise(readings):
        if earlier <= tokens <= later and earlier < later:
            return before + (after - before) * (tokens - earlier) / (later - earlier)
    return math.inf


def percent(spread: Spread) -> str:
    """Write an excess and its deviation."""
    if not math.isfinite(spread.mean):
        return "diverged"
    if spread.deviation is None:
        return f"{spread.mean:+.2f} %"
    return f"{spread.mean:+.2f} +- {spread.deviation:.2f} %"


def mean_of(results: Sequence[Result], figure: str) -> float:
    """Give the mean of a figure over the seeds."""
    return statistics.fmean(figure_of(result, figure) for result in results)


def _is_within(check: CheckConfig, value: float) -> bool:
    is_low = check.at_most is None or value <= check.at_most
    return is_low and (check.at_least is None or value >= check.at_least)


def _rising(config: ExperimentConfig, check: CheckConfig, rows: Rows, figure: str) -> ClaimVerdict:
    means = [mean_of(rows[name], figure) for name in check.rows]
    has_held = all(
        later >= earlier * (1 - check.slack / 100) for earlier, later in itertools.pairwise(means)
    )
    found = ", ".join(f"{name} {mean:.4f}" for name, mean in zip(check.rows, means, strict=True))
    return ClaimVerdict(check, found, has_held)


def _equal(check: CheckConfig, rows: Rows) -> ClaimVerdict:
    ends = [{result["seed"]: result["digests"] for result in rows[name]} for name in check.rows]
    alike = [seed for seed, bits in ends[0].items() if bits and all(e[seed] == bits for e in ends)]
    found = f"the same bits with {len(alike)} of {len(ends[0])} seeds"
    return ClaimVerdict(check, found, len(alike) == len(ends[0]))


def _best(config: ExperimentConfig, check: CheckConfig, rows: Rows, figure: str) -> ClaimVerdict:
    best: dict[str, float] = {}
    for series in check.series:
        members = [
            (mean_of(rows[row.name], figure), row.x)
            for row in config.rows
            if row.series == series and row.name in rows and row.x is not None
        ]
        if members:
            best[series] = min(members)[1]
    xs = list(best.values())
    if len(xs) < 2:
        return ClaimVerdict(check, "its series were left out here", None)
    is_sorted = all(later >= earlier for earlier, later in itertools.pairwise(xs))
    found = ", ".join(f"{name}: {x:g}" for name, x in best.items())
    return ClaimVerdict(check, found, is_sorted and xs[-1] > xs[0])
