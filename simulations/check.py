"""What papers published, held against our simulators: one row a claim, one function a target.

A function takes nothing, simulates with the published inputs and says what came out. Every input
goes through the functions that commands use; nothing is adjusted to a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from simulations.goodput import closed_form
from simulations.goodput.config import GoodputConfig, RoundsConfig
from simulations.goodput.decoupled_table import (
    CHIPS,
    SCAVENGING,
    fleet_of,
    scavenged,
    table_cells,
)
from simulations.goodput.failures import simulate_fleet
from simulations.goodput.learners import simulate_learners
from simulations.paper_tables import (
    Comparison,
    covenant_figures,
    decoupled_bandwidth_figures,
    intellect_figures,
    scaling_laws_figures,
    streaming_table1_figures,
    streaming_table4,
    table4_counts,
)
from simulations.published import (
    join_stall_steps,
    lost_to_checkpoints,
    mean_time_to_failure_h,
    outer_memory_share,
    peers_survive,
)

_DECOUPLED = "Decoupled DiLoCo (2604.21428)"


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One claim.

    Attributes:
        target: Its name, such as A5.
        what: What is compared, with its inputs.
        published: The published figure, or the condition.
        ours: What the simulators say.
        allowed: How far off ours may be.
        is_met: Whether it is not.
        source: Of the claim.
    """

    target: str
    what: str
    published: str
    ours: str
    allowed: str
    is_met: bool
    source: str

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values, hence `Any`."""
        return asdict(self)


def compared(figures: Iterable[Comparison]) -> Iterator[CheckRow]:
    """Make rows of published figures and ours."""
    for each in figures:
        unit = f" {each.unit}" if each.unit else ""
        off = f"+-{each.within:.3g}" if not each.is_relative else f"+-{each.within:.0%}"
        yield CheckRow(
            each.name,
            each.what,
            f"{each.target:g}{unit}",
            f"{each.ours:.4g}{unit}",
            off if each.within > 1e-3 else "none",
            each.is_met,
            each.source,
        )


def goodput_table() -> Iterator[CheckRow]:
    """A5: the 30 cells of Table 1, simulated, and what they say of learners and jobs."""
    cells = list(table_cells(GoodputConfig()))
    worst = max(cells, key=lambda cell: abs(cell.off))
    inside = sum(abs(cell.off) <= 3.0 for cell in cells)
    yield CheckRow(
        "A5",
        f"goodput of {len(cells)} cells, 30 days each",
        "Table 1",
        f"{inside} within, worst {worst.off:+.2f}",
        "+-3",
        inside == len(cells),
        f"{_DECOUPLED}, Table 1",
    )
    far = max(abs(cell.simulated - cell.closed_form) for cell in cells)
    yield CheckRow(
        "A5",
        "events against the closed form, all cells",
        "equal",
        f"{far:.2f} off at most",
        "+-1.5",
        far <= 1.5,
        "ours",
    )
    by = {(cell.row, cell.num_chips): cell.simulated for cell in cells}
    pairs = [
        abs(by[f"Decoupled M={m}", m * chips] - by["DP, elastic", chips])
        for m in (2, 4, 8, 16)
        for chips in CHIPS
        if m * chips in CHIPS
    ]
    yield CheckRow(
        "A5",
        f"M learners on N chips as one job on N / M ({len(pairs)} pairs)",
        "equal",
        f"{max(pairs):.2f} off at most",
        "+-1",
        max(pairs) <= 1.0,
        f"{_DECOUPLED}, Table 1",
    )


def global_downtime() -> Iterator[CheckRow]:
    """A6: whether there is ever nobody who trains."""
    base = GoodputConfig()
    for learners in (8, 16):
        for chips, hours in ((1_200_000, 720), (2_400_000, 24)):
            config = fleet_of(base, chips, learners)
            rng = np.random.default_rng(config.seed)
            nobody_s = simulate_fleet(config.fleet, hours * 3600.0, rng).nobody_s
            expected = closed_form.nobody_s(config.fleet, hours * 3600.0)
            yield CheckRow(
                "A6",
                f"nobody trains, in {hours} h: M={learners}, {chips:,} chips",
                "0 s",
                f"{nobody_s:g} s (mean {expected:.2g} s)",
                "none",
                nobody_s == 0.0,
                _DECOUPLED,
            )


def heterogeneity() -> Iterator[Comparison]:
    """A7: eight learners, the slowest 18 % behind, steps that vary by 10 %."""
    unequal = {"slow_learners": 1, "slow_by": 0.18, "noise": 0.1}
    for name, published, how in (
        ("K=8, waits for all", 84, {"merge": "scheduled", "quorum": 8}),
        ("K=1", 100, {"quorum": 1, "grace": "0s"}),
        ("K=1 + grace", 100, {"quorum": 1, "grace": "auto"}),
    ):
        config = GoodputConfig(learners=8, rounds=RoundsConfig.model_validate({**unequal, **how}))
        rounds = config.rounds
        time = simulate_learners(
            rounds.learners(8),
            rounds.rounds(8),
            np.random.default_rng(config.seed),
            duration_s=rounds.simulated_steps * rounds.step_s,
        )
        what = f"{name}: goodput; {time.contributors:.1f} of 8 counted a round"
        figure = 100 * time.goodput
        source = f"{_DECOUPLED}, heterogeneity"
        yield Comparison("A7", what, published, figure, 2.0, False, "%", source)


def scavenging() -> Iterator[Comparison]:
    """A8: more learners in the second half of the work."""
    config = GoodputConfig(
        learners=8, rounds=RoundsConfig(num_fragments=4, noise=0.1, simulated_steps=480)
    )
    base_s = scavenged(config, 0.0).duration_s
    source = f"{_DECOUPLED}, scavenging"
    for more, published in SCAVENGING.items():
        if more:
            ratio = scavenged(config, more).duration_s / base_s
            what = f"wall time, +{more:.0%} chips in half the work"
            yield Comparison("A8", what, published, ratio, 0.01, False, "", source)


def join_cost() -> Iterator[Comparison]:
    """A9: what a joining learner costs, by the steps that a copy of the model takes."""
    stalls = [join_stall_steps(float(x), 24, 24, 2) for x in range(31)]
    first = max(x for x, stall in enumerate(stalls) if stall == 0.0)
    whole = min(x for x, stall in enumerate(stalls) if x and stall == x)
    source = f"{_DECOUPLED}, Fig. 12; our reading"
    free, all_of_it = "a join is free for copies of up to", "it costs what data parallel pays from"
    yield Comparison("A9", free, 6, first, 1.0, False, "steps", source)
    yield Comparison("A9", all_of_it, 24, whole, 0.0, False, "steps", source)


def outer_memory() -> Iterator[Comparison]:
    """A14: memory of outer parameters and momentum, float32, beside AdamW's 12 bytes."""
    source = "Streaming DiLoCo (2501.18512)"
    for what, published, ours in (
        ("more memory: outer parameters, momentum", 66, outer_memory_share(4 + 4, 4 + 8)),
        ("outer parameters, 2 of 36 fragments", 2, outer_memory_share(4, 4 + 8, resident=2 / 36)),
    ):
        yield Comparison("A14", what, published, 100 * ours, 1.0, False, "%", source)


def gemini() -> Iterator[Comparison]:
    """A15: GEMINI's chance of survival, and what storage loses."""
    source = "GEMINI (SOSP 2023)"
    survive = 100 * peers_survive(machines=16, copies=2, lost=2)
    what = "checkpoints survive: N=16, 2 copies, 2 lost"
    yield Comparison("A15", what, 93.3, survive, 0.05, False, "%", source)
    lost = lost_to_checkpoints(write=42, interval=42, read=42)
    what = "lost to storage: write 42, interval 42, read 42"
    yield Comparison("A15", what, 105, lost, 0.0, False, "min", source)


def failure_rates() -> Iterator[Comparison]:
    """A16: mean times to failure."""
    rsc = "Revisiting Reliability (2410.21680)"
    for gpus, published in ((16_384, 1.8), (131_072, 0.23)):
        hours = mean_time_to_failure_h(gpus / 8, 6.5 / 1000)
        what = f"{gpus:,} GPUs, 8 a node, 6.5 failures in 1,000 days"
        yield Comparison("A16", what, published, hours, 0.05, True, "h", rsc)
    hours = mean_time_to_failure_h(1, 419 / 54)
    what, source = "Llama 3: 419 failures in 54 days", "Llama 3 (2407.21783)"
    yield Comparison("A16", what, 3.1, hours, 0.05, True, "h", source)


def table_4() -> Iterator[CheckRow]:
    """A1: the 75 cells of Streaming DiLoCo's Table 4."""
    cells = streaming_table4()
    exact, near = table4_counts(cells)
    yield CheckRow(
        "A1",
        f"bandwidth needed: {len(cells)} cells, exact and within 1.207x",
        "Table 4",
        f"{exact} and {near}",
        ">= 60, 73",
        exact >= 60 and near >= 73,
        "Streaming DiLoCo (2501.18512), Table 4",
    )


#: Target -> its rows.
CHECKS: dict[str, Callable[[], Iterator[CheckRow]]] = {
    "A1": table_4,
    "A4": lambda: compared(scaling_laws_figures()),
    "A5": goodput_table,
    "A6": global_downtime,
    "A7": lambda: compared(heterogeneity()),
    "A8": lambda: compared(scavenging()),
    "A9": lambda: compared(join_cost()),
    "A10": lambda: compared(decoupled_bandwidth_figures()),
    "A11": lambda: compared(intellect_figures()),
    "A12": lambda: compared(covenant_figures()),
    "A13": lambda: compared(streaming_table1_figures()),
    "A14": lambda: compared(outer_memory()),
    "A15": lambda: compared(gemini()),
    "A16": lambda: compared(failure_rates()),
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
