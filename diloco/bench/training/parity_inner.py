"""Does an island of several ranks train as one rank does? Every layout of the table, for real.

The ranks of a number of ranks are processes of one thread in one process group, which train the
rows of that number one after the other. What rows have in common is trained once by a single
process. Both see the same model, text and batch. What a layout changes in float32 is the order of
sums; rows in bfloat16 are held against float32, too, to what its roundings allow.
"""

from __future__ import annotations

import fnmatch
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.baseline.members import Members
from diloco.baseline.place import Member
from diloco.bench.training.layout_case import INNER_STEPS, Case
from diloco.bench.training.layouts import CASES
from diloco.config.compute import Precision
from diloco.errors import ConfigError
from diloco.report.rows import Column, Report, Requirement

#: By precision, in nats. Float32: sums in another order; at most 1.4e-6 was seen, and a lost
#: gradient costs 1e-3 and more. Bfloat16 has 8 bits, a relative error of 2^-9 a rounding; at most
#: 1.4e-3 was seen of a loss near 5.
LARGEST_DIFFERENCES: Mapping[Precision, float] = {"float32": 5e-6, "bfloat16": 1e-2}

_ISLAND = "layouts"

_COLUMNS = (
    Column("layout", "layout"),
    Column("loss", "last loss", ".4f"),
    Column("difference", "differs by", ".1e"),
    Column("collectives_text", "collectives a step"),
)

Trained = Mapping[str, Any]  # JSON values of `layout_rank.losses_of`


def numbers_of_ranks() -> list[int]:
    """Give the numbers of ranks that the table has rows for, ascending."""
    return sorted({case.num_ranks for case in CASES})


def chosen_cases(ranks: Sequence[int], patterns: Sequence[str]) -> list[Case]:
    """Give the rows of some numbers of ranks whose names match any of some patterns.

    Args:
        ranks: Numbers of ranks, at least one.
        patterns: Names with `*` and `?`; none of them: all rows.

    Raises:
        ConfigError: If there is no row of such a number, or none of them matches a pattern.
    """
    known = numbers_of_ranks()
    if unknown := sorted(set(ranks) - set(known)):
        raise ConfigError(
            f"--ranks {unknown[0]}: no layout has so many ranks; choose of "
            f"{','.join(map(str, known))}"
        )
    cases = sorted((c for c in CASES if c.num_ranks in ranks), key=lambda case: case.num_ranks)
    for pattern in patterns:
        if not fnmatch.filter([case.name for case in cases], pattern):
            raise ConfigError(
                f"--rows {pattern} matches no layout of --ranks {','.join(map(str, ranks))}; "
                f"these are {', '.join(case.name for case in cases)}"
            )
    return [case for case in cases if any(fnmatch.fnmatch(case.name, p) for p in patterns or "*")]


def run_parity_inner(
    cases: Sequence[Case],
    *,
    on_progress: Callable[[str, int, int], None],
    on_look: Callable[[], None] = lambda: None,
) -> Report:
    """Train every row on its ranks, and what it is held against on one.

    Args:
        cases: Of `chosen_cases`, at least one.
        on_progress: Hears what is trained, and of rows done and in all.
        on_look: Called often; what it raises ends every process.

    Raises:
        DilocoError: If a rank failed, with the end of what it said.
    """
    began = time.monotonic()
    references = list({case.what: case for case in cases}.values())
    groups = [(1, references)] + [
        (num_ranks, [case for case in cases if case.num_ranks == num_ranks])
        for num_ranks in sorted({case.num_ranks for case in cases})
    ]
    total = len(references) + len(cases)
    done = 0
    found: list[list[Mapping[str, Trained]]] = []
    for num_ranks, rows in groups:
        what = f"{num_ranks} ranks" if num_ranks > 1 else "one process"

        def look(what: str = what, done: int = done) -> None:
            on_look()
            on_progress(what, done, total)

        found.append(_train(num_ranks, rows, look))
        done += len(rows)
    alone = {case.what: found[0][0][case.name] for case in references}
    trained = {
        case.name: [rank[case.name] for rank in ranks]
        for (_, rows), ranks in zip(groups[1:], found[1:], strict=True)
        for case in rows
    }
    rows_told = [_as_row(case, alone[case.what], trained[case.name]) for case in cases]
    return Report(
        bench="parity-inner",
        setting={"inner_steps": INNER_STEPS + 1, "rows": len(cases)},
        columns=_COLUMNS,
        rows=rows_told,
        requirements=_requirements(cases, rows_told),
        wall_s=time.monotonic() - began,
    )


def _train(
    num_ranks: int, cases: Sequence[Case], on_look: Callable[[], None]
) -> list[Mapping[str, Trained]]:
    """Train rows in one process group; returns, by rank, what each row gave."""
    with (
        tempfile.TemporaryDirectory(prefix="diloco-parity-inner-") as directory,
        Members("diloco.bench.training.layout_rank", Path(directory), on_look) as members,
    ):
        order = {"num_ranks": num_ranks, "rows": [case.name for case in cases]}
        for rank in range(num_ranks):
            members.start(Member(_ISLAND, rank), {**order, "rank": rank}, threads=1)
        results = members.results()
    return [results[Member(_ISLAND, rank)] for rank in range(num_ranks)]


def _as_row(case: Case, alone: Trained, ranks: Sequence[Trained]) -> dict[str, Any]:
    counts = [rank["collectives"] for rank in ranks]
    parts = f", {case.micro_batches} micro-batches" if case.micro_batches > 1 else ""
    return {
        "table": f"{case.num_ranks} ranks",
        "layout": f"{case.name}: {case.mesh.shape_text}{parts}",
        "num_ranks": case.num_ranks,
        "row": case.name,
        "mesh": case.mesh.shape_text,
        "micro_batches": case.micro_batches,
        "precision": case.compute.precision,
        "loss": ranks[0]["losses"][-1],
        "difference": largest_difference(alone, ranks),
        "collectives": counts[0],
        "collectives_text": "not counted"
        if case.is_compiled
        else ", ".join(f"{n} {name}" for name, n in sorted(counts[0].items())),
        "is_counted_right": case.collectives is None or counts == [case.collectives] * len(counts),
    }


def largest_difference(alone: Trained, ranks: Sequence[Trained]) -> float:
    """Find the largest |difference| of a loss or an evaluation of any rank; NaN if one is NaN."""
    differences = [
        abs(ours - theirs)
        for rank in ranks
        for key in ("losses", "evaluations")
        for ours, theirs in zip(rank[key], alone[key], strict=True)
    ]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def _requirements(cases: Sequence[Case], rows: Sequence[Mapping[str, Any]]) -> list[Requirement]:
    requirements = []
    for precision, most in LARGEST_DIFFERENCES.items():
        if not (of_it := [row for row in rows if row["precision"] == precision]):
            continue
        worst = max(of_it, key=lambda row: (math.isnan(row["difference"]), row["difference"]))
        what = f"largest loss difference of {len(of_it)} {precision} layouts ({worst['row']})"
        requirements.append(Requirement(what, worst["difference"], most, "nats"))
    if any(case.collectives is not None for case in cases):
        wrong = [row["row"] for row in rows if not row["is_counted_right"]]
        what = (
            f"layouts with other collectives than they should have ({', '.join(wrong) or 'none'})"
        )
        requirements.append(Requirement(what, len(wrong), 0, "layouts"))
    return requirements
