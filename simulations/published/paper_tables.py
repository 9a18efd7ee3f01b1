"""Figures of papers that the simulators are held against: inputs, cells, and ours next to them.

Everything here is data and comparison; what computes is general (`utilization`, `bandwidth`), and
goes by events: a defect of the schedule, of the plan or of the links moves these figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from diloco.compression.registry import get_codec
from diloco.compression.sparse import CHUNK_NUMEL
from diloco.config.fields import Duration
from diloco.simulations.published.check_row import CheckRow, Comparison, Miss
from diloco.simulations.scenarios import wallclock
from diloco.simulations.scenarios.bandwidth import (
    GRID,
    TARGETS,
    bandwidth_curve,
    needed_bps,
    on_grid,
)
from diloco.simulations.scenarios.scenario import Scenario, at_bandwidth
from diloco.simulations.scenarios.utilization import simulate
from diloco.transport.shaping.link import LinkProfile

#: Gbit/s for a utilisation of 50, 80, 90, 95 and 99 %: model, parameters, layers, step, method.
_STREAMING_TABLE_4 = """
    1B    1e9   24  0.1s  data-parallel   86.8  152.6  184.2  222.3  569.0
    1B    1e9   24  0.1s  diloco           1.4    6.2   13.3   23.3   86.8
    1B    1e9   24  0.1s  streaming        1.4    5.2    9.1   16.0   28.1
    1B    1e9   24  0.1s  overlap          1.4    4.3    6.2    9.1   11.0
    1B    1e9   24  0.1s  4-bit            0.4    0.9    1.7    2.0    3.0
    10B   1e10  48  0.8s  data-parallel  104.8  222.3  222.3  268.3  471.5
    10B   1e10  48  0.8s  diloco           1.7    7.5   16.0   33.9  104.8
    10B   1e10  48  0.8s  streaming        1.7    5.2    9.1   13.3   19.3
    10B   1e10  48  0.8s  overlap          1.7    3.6    5.2    6.2    7.5
    10B   1e10  48  0.8s  4-bit            0.4    0.9    1.4    1.4    1.7
    100B  1e11 108  4.9s  data-parallel  184.2  323.8  390.7  390.7  471.5
    100B  1e11 108  4.9s  diloco           3.0   11.0   23.3   49.4  184.2
    100B  1e11 108  4.9s  streaming        2.4    6.2    9.1   11.0   19.3
    100B  1e11 108  4.9s  overlap          1.7    3.6    4.3    5.2    5.2
    100B  1e11 108  4.9s  4-bit            0.5    0.9    1.1    1.1    1.4
"""
#: Rounds simulated for a cell: one warms up, one counts; nothing varies.
_TABLE_ROUNDS = 2
#: The same where a line is too thin, so that what is queued on it must come to a balance.
_QUEUED_ROUNDS = 8
#: A line that nothing waits for, bits a second.
_FAT_BPS = 1e17


@dataclass(frozen=True, slots=True)
class BandwidthCell:
    """One figure of a table, Gbit/s, and ours; both lie on `GRID`."""

    model: str
    method: str
    target: float
    paper: float
    ours: float

    @property
    def ratio(self) -> float:
        """Ours over the paper's."""
        return self.ours / self.paper

    @property
    def grid_steps(self) -> int:
        """How many rates of the grid lie between them; 0: the same."""
        return abs(_nearest(self.ours) - _nearest(self.paper))


def _nearest(gbps: float) -> int:
    return min(range(len(GRID)), key=lambda i: abs(math.log(GRID[i] / 1e9 / gbps)))


def streaming_table4(
    *,
    buckets: int = 0,
    release: str = "backward",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[BandwidthCell]:
    """Compute the 75 cells of Streaming DiLoCo's Table 4 by simulation (target A1).

    Args:
        buckets: Pieces of a payload; 0, the scenario's default: one a layer.
        release: When they are released, the scenario's default.
        on_progress: Told how many curves of how many are done.
    """
    cells = []
    curves = [line.split() for line in _STREAMING_TABLE_4.strip().splitlines()]
    for done, (model, params, layers, step_time, method, *row) in enumerate(curves, start=1):
        scenario = Scenario.model_validate(
            {
                "method": method,
                "params": float(params),
                "layers": int(layers),
                "step_time": step_time,
                "buckets": buckets,
                "release": release,
            }
        )
        curve = bandwidth_curve(scenario, rounds=_TABLE_ROUNDS)
        for target, paper in zip(TARGETS, row, strict=True):
            ours = on_grid(curve, target) or GRID[-1]
            cells.append(BandwidthCell(model, method, target, float(paper), ours / 1e9))
        on_progress(done, len(curves))
    return cells


def table4_counts(cells: list[BandwidthCell]) -> tuple[int, int]:
    """Count the cells that are exact, and those within one step of the grid (target A1)."""
    steps = [cell.grid_steps for cell in cells]
    return steps.count(0), sum(each <= 1 for each in steps)


# Targets of single figures, each a function that gives them with ours.
_INTELLECT_1 = "INTELLECT-1 (arXiv 2412.01152)"
_COVENANT = "Covenant-72B (arXiv 2603.08163)"
_DECOUPLED = "Decoupled DiLoCo (arXiv 2604.21428), appendix and launch"
_STREAMING = "Streaming DiLoCo (arXiv 2501.18512), Table 1"
_SCALING_LAWS = "Scaling laws for DiLoCo (arXiv 2503.09799), wall-clock model"


def scaling_laws_figures() -> Iterator[Comparison]:
    """Communication between islands is half of all at H = W0 / W1 (A4).

    Gradients at every step over W0, and one exchange a round over W1, neither hidden; in closed
    form for islands of many chips, where parameters decide and not latencies.
    """
    for name, between in (("medium", wallclock.MEDIUM), ("low", wallclock.LOW)):
        period = round(wallclock.least_period(wallclock.HIGH, between))
        given: dict[str, object] = {"params": 1e10, "layers": 48, "release": "step"}
        every_step = Scenario.model_validate({"method": "data-parallel", **given})
        every_round = Scenario.model_validate(
            {"method": "diloco", "inner_steps_per_round": period, **given}
        )
        inner_s = period * simulate(every_step, link=_line(wallclock.HIGH.bandwidth_bps)).stall_s
        outer_s = simulate(every_round, link=_line(between.bandwidth_bps)).stall_s
        training = wallclock.TrainingTime(
            params=1e10,
            tokens=2e11,
            batch_tokens=2**21,
            chips=10**9,
            islands=2,
            inside=wallclock.LinkClass(wallclock.HIGH.bandwidth_bps, 0.0),
            between=wallclock.LinkClass(between.bandwidth_bps, 0.0),
            inner_steps_per_round=period,
        )
        for how, outer, inner in (
            ("by events", outer_s, inner_s),
            ("in closed form", training.outer_s, training.inner_s),
        ):
            what = f"outer share of communication, high to {name} bandwidth, H = {period:g}; {how}"
            share = outer / (outer + inner)
            yield Comparison("A4", what, 0.5, share, 1e-6, True, "", _SCALING_LAWS)


def decoupled_bandwidth_figures() -> Iterator[Comparison]:
    """Gbit/s of a model of 5B parameters with steps of 1 s, decoupled and data parallel (A10).

    By events. Decoupled (H = P = 24): what rounds need to keep pace, 16 bits with two islands and 4
    with eight. Data parallel: for a utilisation of 90 % with two and of 95 % with eight islands.
    The settings are inferred, not published.
    """
    given: dict[str, object] = {"params": 5e9, "layers": 32, "step_time": "1s"}
    unreachable = Miss(
        10 / 3,
        "a fragment of 16 bits leaves every step, 3.33 Gbit; the published rate moves it in the "
        "two steps of tau, which a line cannot do for one a step",
    )
    for islands, bits, published, miss in ((2, 16, 1.7, unreachable), (8, 4, 0.84, None)):
        scenario = Scenario.model_validate(
            {"method": "decoupled", "islands": islands, "bits_up": float(bits), **given}
        )
        what = f"decoupled, {islands} islands, {bits} bits"
        gbps = _pacing_bps(scenario, 0.8e9 * published) / 1e9
        yield Comparison("A10", what, published, gbps, 0.1, True, "Gbit/s", _DECOUPLED, miss=miss)
    for islands, target, published in ((2, 0.9, 104.0), (8, 0.95, 198.0)):
        scenario = Scenario.model_validate({"method": "data-parallel", "islands": islands, **given})
        needed = needed_bps(bandwidth_curve(scenario), target)
        assert needed is not None, "there is no delay that bandwidth cannot make up for"
        what = f"data parallel, {islands} islands, {target:.0%}"
        yield Comparison("A10", what, published, needed / 1e9, 0.1, True, "Gbit/s", _DECOUPLED)


def _pacing_bps(scenario: Scenario, too_low_bps: float) -> float:
    """Rate at which rounds keep pace: one that is too low, over the share of versions it leaves."""
    link = _line(too_low_bps)
    return too_low_bps / simulate(scenario, link=link, rounds=_QUEUED_ROUNDS).pace


def intellect_figures() -> Iterator[Comparison]:
    """Compute utilisation of INTELLECT-1: 38 min of training, then an all-reduce (A11)."""
    for where, sync_s, published in (
        ("USA", 103, 95.7),
        ("USA and EU", 382, 85.6),
        ("global", 469, 83.0),
    ):
        what = f"utilisation, {where}: 38 min, then {sync_s} s"
        percent = 100 * _alternating(38 * 60, sync_s)
        yield Comparison("A11", what, published, percent, 0.3, False, "%", _INTELLECT_1)


def covenant_figures() -> Iterator[Comparison]:
    """Compute utilisation of Covenant-72B, SparseLoCo and INTELLECT-1; bits saved (A12)."""
    for name, compute_s, sync_s, published in (
        ("Covenant-72B", 20 * 60, 70, 94.5),
        ("SparseLoCo 8B", 4.5 * 60, 12, 95.7),
        ("INTELLECT-1", 38 * 60, 8.3 * 60, 82.1),
    ):
        what = f"utilisation, {name}: {compute_s / 60:g} min, then {sync_s:g} s"
        percent = 100 * _alternating(compute_s, sync_s)
        yield Comparison("A12", what, published, percent, 0.2, False, "%", _COVENANT)
    numel = 10**6 * CHUNK_NUMEL
    times = 4 * numel / get_codec("topk64").wire_bytes(numel)
    what = "float32 over topk64, whose scales the published figure leaves out"
    yield Comparison("A12", what, 146.0, times, 0.05, True, "x", _COVENANT)


def _alternating(compute_s: float, sync_s: float) -> float:
    """Simulate rounds of so many seconds of steps, then an exchange that takes so many: its share.

    H = 100; the rate of the lines follows from the bytes that DiLoCo moves.
    """
    scenario = Scenario(method="diloco", step_time=Duration(f"{compute_s / 100}s"), release="step")
    unhindered = simulate(scenario, link=_line(_FAT_BPS))
    return simulate(scenario, link=_line(unhindered.bits_up / sync_s)).utilisation


def _line(bandwidth_bps: float) -> LinkProfile:
    return at_bandwidth(Scenario().profile, bandwidth_bps)


def streaming_table1_figures() -> Iterator[Comparison]:
    """Hours at 1 Gbit/s and bits exchanged: 1B parameters, 25B tokens, 0.67 h of compute (A13).

    Simulated: steps of 0.1 s, as in Table 4; H = 100, tau = 1, 4 bits against gradients in 16 bits.
    """
    compute_h = 0.67
    given: dict[str, object] = {"params": 1e9, "layers": 24, "step_time": "0.1s"}
    every_step = Scenario.model_validate({"method": "data-parallel", **given})
    streaming = Scenario.model_validate({"method": "4-bit", **given})
    hours = {
        each.method: compute_h / simulate(each).utilisation for each in (every_step, streaming)
    }
    bits = streaming.inner_steps_per_round * simulate(every_step).bits_up
    times = bits / simulate(streaming).bits_up
    for what, published, ours, unit in (
        ("bits of data parallel over streaming's, H = 100", 400.0, times, "x"),
        ("data parallel at 1 Gbit/s", 109.0, hours["data-parallel"], "h"),
        ("streaming, 4 bits, at 1 Gbit/s", 0.88, hours["4-bit"], "h"),
    ):
        yield Comparison("A13", what, published, ours, 0.1, True, unit, _STREAMING)


def table4_row() -> CheckRow:
    """Count the 75 cells of Streaming DiLoCo's Table 4 that are met (A1)."""
    cells = streaming_table4()
    exact, near = table4_counts(cells)
    return CheckRow(
        "A1",
        f"bandwidth needed: {len(cells)} cells, exact and within 1.207x",
        "Table 4",
        f"{exact} and {near}",
        ">= 60, 73",
        exact >= 60 and near >= 73,
        "Streaming DiLoCo (2501.18512), Table 4",
    )
