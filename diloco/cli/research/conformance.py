"""`diloco conformance`: whether diloco does on this machine what it does everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.text import Text

from diloco.cli.research.bench import report_of
from diloco.cli.terminal.fitted_table import FittedTable
from diloco.cli.terminal.options import JsonTarget, write_json
from diloco.cli.terminal.progress import output
from diloco.extras import is_installed

if TYPE_CHECKING:  # the command imports what it needs when it runs
    from diloco.report.rows import Report, Watch

#: Published cases that take seconds; `diloco sim check` has all.
_TARGETS = ("A1", "A4", "A11", "A12", "A13", "A14", "A15", "A16")

_STYLES = {"pass": "", "fail": "red", "not here": "dim"}


def conformance(json_target: JsonTarget = "") -> None:
    """Check that diloco does on this machine what it does everywhere: same numbers, same bytes.

    Runs for two minutes on two idle cores, in processes and a directory of its own, all of which
    are gone at the end. Type it after an installation, after an upgrade of torch, gRPC or a driver,
    and before you ask a question; --json FILE writes what to attach: versions, platform and
    results, no name of a host and no secret.

    "golden traces": runs of one parameter that are computed by hand, bit for bit; in one process,
    and one of them through a coordinator, a syncer and two islands. "published numbers": figures of
    papers, as `diloco sim check` compares them. "codecs' bytes": what every codec makes of the same
    values, sent from one process to another and back. "two islands": a small model is trained, and
    both hold the same published bytes. "SIGKILL, stop, resume": the same run, one island killed and
    started again, then all stopped and resumed; both hold the same published bytes again.

    Each over gRPC, gRPC with certificates, and libp2p, on the CPU and on CUDA. A row ends with
    pass, fail (with what differs) or not here (with what is missing). Ends with 1 if a row fails,
    else 0.

    Example: diloco conformance --json conformance.json
    """

    def check(watch: Watch) -> Report:
        from diloco.conformance.check import run

        can_simulate = is_installed("simpy")
        return run(watch, _numbers if can_simulate else "type pip install 'diloco[sim]'")

    report = report_of(check, json_target)
    _show(report, json_target)
    write_json(report.as_dict(), json_target)
    if report.missed:
        raise typer.Exit(1)


def _show(report: Report, json_target: str) -> None:
    """Print a row a check, and below the table what differs, in full."""
    console = output(json_target)
    failed = [row for row in report.rows if row["result"] == "fail"]
    shown = [{**row, "said": "see below"} if row in failed else row for row in report.rows]
    rows = [[Text(c.cell(row), _STYLES[row["result"]]) for c in report.columns] for row in shown]
    console.print(FittedTable.with_rows([c.heading for c in report.columns], rows, ()))
    for row in failed:
        where = f"{row['check']}, {row['transport']}, {row['device']}: "
        console.print(Text.assemble((where, "bold red"), row["said"]))
    counts = [f"{sum(r['result'] == each for r in report.rows)} {each}" for each in _STYLES]
    console.print(f"{', '.join(counts)}; {report.wall_s:.0f} s")


def _numbers() -> str:
    """Compute the published cases; says how many there are."""
    from diloco.conformance.processes import NotConforming
    from diloco.simulations.published.check import check

    rows = check(_TARGETS)
    if missed := [row for row in rows if row.verdict == "FAIL"]:
        raise NotConforming(
            "; ".join(
                f"{row.target}, {row.what}: {row.ours}, published {row.published}, allowed "
                f"{row.allowed}"
                for row in missed
            )
        )
    return f"{len(rows)} of papers ({_TARGETS[0]} to {_TARGETS[-1]})"
