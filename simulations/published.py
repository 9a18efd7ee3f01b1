"""Small closed forms of memory, joins, checkpoints and failures: what `diloco sim check` computes.

General functions of the papers' inputs; the published figures stand in `check`. Pure.
"""

from __future__ import annotations

import math


def outer_memory_share(outer_bytes: float, inner_bytes: float, resident: float = 1.0) -> float:
    """Give the accelerator memory of outer state over that of training.

    Args:
        outer_bytes: A parameter, of what is resident.
        inner_bytes: A parameter: values and the inner optimizer's moments.
        resident: Share of the fragments that is on the accelerator at once.
    """
    return resident * outer_bytes / inner_bytes


def join_stall_steps(
    copy_steps: float, inner_steps_per_round: int, num_fragments: int, overlap_steps: int
) -> float:
    """Give the inner steps for which a joining learner's copy of the model stalls its learner.

    A copy is fresh enough for H steps. Of that time the exchange itself takes `copy_steps`, as it
    moves one copy a round; the rest is shared evenly by the fragments in flight, tau P / H, and the
    copy. What does not fit stalls:

        max(0, x - max(0, H - x) / (1 + tau P / H)),    at most x

    Our reading of a figure: nothing up to H / (2 + tau P / H) steps, all of it from H on. An
    elastic data-parallel job always stalls for x.

    Source: Decoupled DiLoCo (arXiv 2604.21428), Fig. 12.
    """
    period = inner_steps_per_round
    in_flight = overlap_steps * num_fragments / period
    hidden = max(0.0, period - copy_steps) / (1.0 + in_flight)
    return max(0.0, copy_steps - hidden)


def peers_survive(machines: int, copies: int, lost: int) -> float:
    """Bound from below the chance that no checkpoint is lost with `lost` machines at once.

    1 - (N / m) C(N - m, k - m) / C(N, k), with groups of m machines that hold each other's; 1 for
    fewer than m.

    Source: GEMINI (SOSP 2023).
    """
    if lost < copies:
        return 1.0
    groups = machines / copies
    among = math.comb(machines - copies, lost - copies) / math.comb(machines, lost)
    return max(0.0, 1.0 - groups * among)


def lost_to_checkpoints(write: float, interval: float, read: float) -> float:
    """Give what a failure loses: the write under way, half an interval, the read back."""
    return write + interval / 2 + read


def mean_time_to_failure_h(machines: float, failures_per_machine_day: float) -> float:
    """Give the hours until one of the machines fails: 24 / (n r)."""
    return 24.0 / (machines * failures_per_machine_day)
