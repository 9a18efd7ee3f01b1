"""What papers published, held against our simulators: one row a claim, one function a target.

A function takes nothing, simulates with the published inputs and says what came out. Every input
goes through the functions that commands use; nothing is adjusted to a row. Each row is one that a
defect of the simulators, or of the machines that they drive, makes fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from diloco.simulations.published import goodput as published
from diloco.simulations.published import goodput_targets as goodput
from diloco.simulations.published import joining, paper_tables
from diloco.simulations.published.check_row import CheckRow, Comparison


def _compared(make: Callable[[], Iterable[Comparison]]) -> Callable[[], Iterator[CheckRow]]:
    return lambda: (each.row for each in make())


#: Target -> its rows.
CHECKS: dict[str, Callable[[], Iterable[CheckRow]]] = {
    "A1": lambda: [paper_tables.table4_row()],
    "A4": _compared(paper_tables.scaling_laws_figures),
    "A5": goodput.goodput_table,
    "A6": goodput.global_downtime,
    "A7": _compared(goodput.heterogeneity),
    "A8": _compared(goodput.scavenging),
    "A9": _compared(joining.join_cost),
    "A10": _compared(paper_tables.decoupled_bandwidth_figures),
    "A11": _compared(paper_tables.intellect_figures),
    "A12": _compared(paper_tables.covenant_figures),
    "A13": _compared(paper_tables.streaming_table1_figures),
    "A14": _compared(published.outer_memory),
    "A15": _compared(published.checkpoints),
    "A16": _compared(published.failure_rates),
}


def check(
    targets: Sequence[str], on_progress: Callable[[str, int, int], None] | None = None
) -> list[CheckRow]:
    """Make the rows of these targets, in the order of `CHECKS`.

    Args:
        targets: Names; none: all.
        on_progress: Told (target, how many are done, of how many).
    """
    chosen = [name for name in CHECKS if not targets or name in targets]
    rows: list[CheckRow] = []
    for done, name in enumerate(chosen):
        if on_progress is not None:
            on_progress(name, done, len(chosen))
        rows += CHECKS[name]()
    return rows
