"""What papers published, held against our simulators: one row a claim, one function a target.

A function takes nothing, simulates with the published inputs and says what came out. Every input
goes through the functions that commands use; nothing is adjusted to a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from simulations.published import (
    bits_ratio,
    blocking_s,
    compute_share,
    join_stall_steps,
    lost_to_checkpoints,
    mean_time_to_failure_h,
    outer_memory_share,
    peers_survive,
    sparse_ratio,
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


@dataclass(frozen=True, slots=True)
class _Near:
    """Makes rows of figures that lie within a distance of the published ones."""

    target: str
    source: str
    allowed: float
    unit: str = ""
    is_relative: bool = False

    def row(self, what: str, published: float, ours: float) -> CheckRow:
        distance = self.allowed * abs(published) if self.is_relative else self.allowed
        off = f"{self.allowed:.0%}" if self.is_relative else f"{self.allowed:g}{self.unit}"
        return CheckRow(
            self.target,
            what,
            f"{published:g}{self.unit}",
            f"{ours:.4g}{self.unit}",
            f"+-{off}" if self.allowed else "as printed",
            abs(ours - published) <= distance + 1e-9,
            self.source,
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


def heterogeneity() -> Iterator[CheckRow]:
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
        row = _Near("A7", f"{_DECOUPLED}, heterogeneity", 2.0, " %")
        counted = f"{name}: goodput; {time.contributors:.1f} of 8 counted a round"
        yield row.row(counted, published, 100 * time.goodput)


def scavenging() -> Iterator[CheckRow]:
    """A8: more learners in the second half of the work."""
    config = GoodputConfig(
        learners=8, rounds=RoundsConfig(num_fragments=4, noise=0.1, simulated_steps=480)
    )
    base_s = scavenged(config, 0.0).duration_s
    near = _Near("A8", f"{_DECOUPLED}, scavenging", 0.01)
    for more, published in SCAVENGING.items():
        if more:
            ratio = scavenged(config, more).duration_s / base_s
            yield near.row(f"wall time, +{more:.0%} chips in half the work", published, ratio)


def join_cost() -> Iterator[CheckRow]:
    """A9: what a joining learner costs, by the steps that a copy of the model takes."""
    stalls = [join_stall_steps(float(x), 24, 24, 2) for x in range(31)]
    first = max(x for x, stall in enumerate(stalls) if stall == 0.0)
    whole = min(x for x, stall in enumerate(stalls) if x and stall == x)
    yield _Near("A9", f"{_DECOUPLED}, Fig. 12", 1.0, " steps").row(
        "our reading: a join is free for copies of up to", 6, first
    )
    yield _Near("A9", f"{_DECOUPLED}, Fig. 12", 0.0, " steps").row(
        "our reading: it costs what data parallel pays from", 24, whole
    )


def intellect() -> Iterator[CheckRow]:
    """A11: compute utilisation of INTELLECT-1."""
    near = _Near("A11", "INTELLECT-1 (2412.01152)", 0.3, " %")
    for where, exchange_s, published in (
        ("USA", 103, 95.7),
        ("USA + EU", 382, 85.6),
        ("global", 469, 83.0),
    ):
        share = compute_share(38 * 60.0, exchange_s)
        yield near.row(f"utilisation, {where}: 38 min, {exchange_s} s", published, 100 * share)


def covenant() -> Iterator[CheckRow]:
    """A12: compute utilisation and payload of Covenant-72B."""
    near = _Near("A12", "Covenant-72B (2603.08163)", 0.2, " %")
    for what, compute_s, exchange_s, published in (
        ("Covenant-72B: 20 min, 70 s", 1200, 70, 94.5),
        ("SparseLoCo 8B: 4.5 min, 12 s", 270, 12, 95.7),
        ("INTELLECT-1: 38 min, 8.3 min", 2280, 498, 82.1),
    ):
        share = compute_share(compute_s, exchange_s)
        yield near.row(f"utilisation, {what}", published, 100 * share)
    ratio = sparse_ratio(64 / 4096, 2 + 12)
    yield _Near("A12", "Covenant-72B (2603.08163)", 1.0, "x").row(
        "smaller than float32: 64 of 4,096 values of 14 bits", 146, ratio
    )


def streaming_bits() -> Iterator[CheckRow]:
    """A13: bits and hours of Streaming DiLoCo's Table 1."""
    source = "Streaming DiLoCo (2501.18512), Table 1"
    yield _Near("A13", source, 0.1, "x", is_relative=True).row(
        "fewer bits than data parallel: H=100, 16 to 4 bits", 400, bits_ratio(100, 16, 4)
    )
    compute_s = 0.67 * 3600
    hours = blocking_s(compute_s, compute_s / 0.1, 1e9 * 16, 1e9) / 3600
    yield _Near("A13", source, 0.1, " h", is_relative=True).row(
        "data parallel, 1B parameters, 0.1 s a step, 1 Gbit/s", 109, hours
    )


def outer_memory() -> Iterator[CheckRow]:
    """A14: memory of outer parameters and momentum, float32, beside AdamW's 12 bytes."""
    near = _Near("A14", "Streaming DiLoCo (2501.18512)", 1.0, " %")
    everything = outer_memory_share(4 + 4, 4 + 8)
    yield near.row("outer parameters and momentum on the accelerator", 66, 100 * everything)
    offloaded = outer_memory_share(4, 4 + 8, resident=2 / 36)
    yield near.row("outer parameters of 2 of 36 fragments resident", 2, 100 * offloaded)


def gemini() -> Iterator[CheckRow]:
    """A15: GEMINI's chance of survival, and what storage loses."""
    source = "GEMINI (SOSP 2023)"
    yield _Near("A15", source, 0.05, " %").row(
        "checkpoints survive: N=16, 2 copies, 2 machines lost",
        93.3,
        100 * peers_survive(16, 2, 2),
    )
    yield _Near("A15", source, 0.0, " min").row(
        "lost to storage: 42 min to write, interval 42, 42 to read",
        105,
        lost_to_checkpoints(42, 42, 42),
    )


def failure_rates() -> Iterator[CheckRow]:
    """A16: mean times to failure."""
    rsc = _Near("A16", "Revisiting Reliability (2410.21680)", 0.05, " h", is_relative=True)
    for gpus, published in ((16_384, 1.8), (131_072, 0.23)):
        hours = mean_time_to_failure_h(gpus / 8, 6.5 / 1000)
        yield rsc.row(f"{gpus:,} GPUs, 8 a node, 6.5 failures in 1,000 days", published, hours)
    llama = _Near("A16", "Llama 3 (2407.21783)", 0.05, " h", is_relative=True)
    yield llama.row("Llama 3: 419 failures in 54 days", 3.1, mean_time_to_failure_h(1, 419 / 54))


#: Target -> its rows.
CHECKS: Mapping[str, Callable[[], Iterator[CheckRow]]] = {
    "A5": goodput_table,
    "A6": global_downtime,
    "A7": heterogeneity,
    "A8": scavenging,
    "A9": join_cost,
    "A11": intellect,
    "A12": covenant,
    "A13": streaming_bits,
    "A14": outer_memory,
    "A15": gemini,
    "A16": failure_rates,
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
