"""Papers' figures of memory, checkpoints and failures, and ours by counting (A14 to A16). Pure.

Nothing is a formula of the paper evaluated: bytes are those of the product's outer optimizer and
plan, losses are counted over all cases, failures are drawn as those of a goodput scenario are.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from diloco.outer.fragments import TensorSpec, make_plan
from diloco.outer.optimizer import OuterOptimizer
from diloco.simulations.goodput.failures import Fleet, simulate_fleet
from diloco.simulations.goodput.lifetimes import Lifetimes
from diloco.simulations.published.check_row import Comparison

_DAY_S = 86400.0
_FLOAT32_BYTES = 4
#: A parameter in training: float32, and AdamW's two moments.
_INNER_BYTES = 12
#: Failures drawn for a mean; its standard error is 1 % of it.
_FAILURES = 10_000
#: Of an interval between checkpoints, at which a failure may come.
_MOMENTS = 1_000


def outer_memory() -> Iterator[Comparison]:
    """A14: memory of outer parameters and momentum, float32, against that of training."""
    source = "Streaming DiLoCo (2501.18512)"
    nesterov = OuterOptimizer("nesterov", lr=0.7, momentum=0.9, momentum_ramp_rounds=0)
    state = _FLOAT32_BYTES * (2 + nesterov.has_second_moment)
    what = "more memory: outer parameters, momentum"
    yield Comparison("A14", what, 66, 100 * state / _INNER_BYTES, 1.0, False, "%", source)
    layers = [TensorSpec(f"layers.{layer}.weight", (1_000, 1_000)) for layer in range(108)]
    numels = sorted(each.numel for each in make_plan(layers, num_fragments=36).fragments)
    share = 100 * _FLOAT32_BYTES * sum(numels[-2:]) / (_INNER_BYTES * sum(numels))
    what = "outer parameters, 2 of 36 fragments"
    yield Comparison("A14", what, 2, share, 1.0, False, "%", source)


def checkpoints() -> Iterator[Comparison]:
    """A15: GEMINI's chance of survival, and what storage loses."""
    source = "GEMINI (SOSP 2023)"
    survive = 100 * peers_survive(machines=16, copies=2, lost=2)
    what = "checkpoints survive: N=16, 2 copies, 2 lost"
    yield Comparison("A15", what, 93.3, survive, 0.05, False, "%", source)
    lost = lost_to_checkpoints(write=42, interval=42, read=42)
    what = "lost to storage: write 42, interval 42, read 42"
    yield Comparison("A15", what, 105, lost, 0.01, False, "min", source)


def failure_rates() -> Iterator[Comparison]:
    """A16: mean times to failure."""
    rsc = "Revisiting Reliability (2410.21680)"
    for gpus, published in ((16_384, 1.8), (131_072, 0.23)):
        hours = failure_interval_h(gpus // 8, 1000 / 6.5)
        what = f"{gpus:,} GPUs, 8 a node, 6.5 failures in 1,000 days"
        yield Comparison("A16", what, published, hours, 0.05, True, "h", rsc)
    hours = failure_interval_h(16_384, 16_384 * 54 / 419)
    what, source = "Llama 3: 419 failures of 16,384 GPUs in 54 days", "Llama 3 (2407.21783)"
    yield Comparison("A16", what, 3.1, hours, 0.05, True, "h", source)


def peers_survive(machines: int, copies: int, lost: int) -> float:
    """Count the share of all ways to lose machines at once after which every checkpoint is there.

    Groups of `copies` machines hold each other's; one that is lost whole has lost its own.
    """
    groups = [set(range(at, at + copies)) for at in range(0, machines, copies)]
    ways = [set(each) for each in combinations(range(machines), lost)]
    return sum(not any(group <= way for group in groups) for way in ways) / len(ways)


def lost_to_checkpoints(write: float, interval: float, read: float) -> float:
    """Give what a failure loses on average over all moments of an interval, reading included.

    A checkpoint is of the moment at which its writing begins, and there when it ends.
    """
    begins = interval * np.arange(-np.ceil(write / interval) - 1, 1)
    moments = interval * (np.arange(_MOMENTS) + 0.5) / _MOMENTS
    newest = [begins[begins + write <= moment].max() for moment in moments]
    return float(np.mean(moments - newest)) + read


def failure_interval_h(machines: int, machine_days: float) -> float:
    """Draw failures of machines that fail once in so many days: mean hours between two."""
    duration_s = _FAILURES * machine_days / machines * _DAY_S
    fleet = Fleet(machines, 1, Lifetimes(machine_days * _DAY_S), absences=Lifetimes(1.0))
    time = simulate_fleet(fleet, duration_s, np.random.default_rng(1))
    return duration_s / 3600 / time.num_failures
