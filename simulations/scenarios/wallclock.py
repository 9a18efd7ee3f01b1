"""How long training takes, in closed form: the formulas of the papers, next to the simulation.

    T_comp = 6 N D / (R Q)
    compute utilisation = compute / (compute + stalls)

Written from the papers, not from the schedule that is simulated: `tests/simulations` holds the two
against each other. Pure arithmetic.

Source: Streaming DiLoCo (arXiv 2501.18512), its model of compute utilisation; Scaling laws for
DiLoCo (arXiv 2503.09799), wall-clock model; rings and hierarchy: `diloco.baseline.time_model`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from diloco.baseline.time_model import MSS_BYTES, PACKET_BYTES, ReductionTime, tcp_bps
from diloco.simulations.scenarios.scenario import Scenario
from diloco.transport.shaping.link import Link

#: Of an inner step, what its forward pass takes; the backward pass is twice as much work.
FORWARD_SHARE = 1 / 3


def compute_utilisation(compute_s: float, exposed_s: float) -> float:
    """Share of the time in which a site computes: t / (t + s).

    Args:
        compute_s: Seconds of computing, such as of a round.
        exposed_s: Seconds of communication that computing waits for.

    Source: INTELLECT-1 (arXiv 2412.01152), Covenant-72B (arXiv 2603.08163).
    """
    return compute_s / (compute_s + exposed_s)


@dataclass(frozen=True, slots=True)
class LinkClass:
    """A network of the scaling laws' model: bits a second, and latency of one reduction."""

    bandwidth_bps: float
    latency_s: float


#: High, medium and low bandwidth of the paper.
HIGH = LinkClass(400e9, 1e-4)
MEDIUM = LinkClass(100e9, 1e-3)
LOW = LinkClass(10e9, 1e-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTime:
    """Idealised wall-clock time of a training without overlap.

    Attributes:
        params: N.
        tokens: D.
        batch_tokens: Of one step of all chips.
        chips: R.
        islands: M; 1 chip or more each.
        inside: W0 and its latency, inside an island.
        between: W1 and its latency, between islands.
        inner_steps_per_round: H.
        chip_flops: Q, operations a second that a chip achieves.
        bits: Of a parameter or gradient on the wire.
    """

    params: float
    tokens: float
    batch_tokens: float
    chips: int
    islands: int
    inside: LinkClass
    between: LinkClass
    inner_steps_per_round: int
    chip_flops: float = 300e12
    bits: float = 16.0

    @property
    def steps(self) -> float:
        """T."""
        return self.tokens / self.batch_tokens

    @property
    def compute_s(self) -> float:
        """6 N D / (R Q)."""
        return 6 * self.params * self.tokens / (self.chips * self.chip_flops)

    @property
    def data_parallel_s(self) -> float:
        """Communication of data parallel over all chips: (2 N / W1 (1 - 1/R) + e1) T."""
        return self._reduction_s(self.between, 1 / self.chips) * self.steps

    @property
    def inner_s(self) -> float:
        """Communication inside islands: (2 N / W0 (1 - M/R) + e0) T."""
        return self._reduction_s(self.inside, self.islands / self.chips) * self.steps

    @property
    def outer_s(self) -> float:
        """Communication between islands: (2 N / W1 (1 - 1/R) + e1) T / H."""
        return self.data_parallel_s / self.inner_steps_per_round

    def _reduction_s(self, link: LinkClass, own_share: float) -> float:
        return 2 * self.params * self.bits / link.bandwidth_bps * (1 - own_share) + link.latency_s


def least_period(inside: LinkClass, between: LinkClass) -> float:
    """H from which on communication between islands is at most half of all: W0 / W1.

    Where parameters decide, not latencies, and islands have many chips.

    Source: Scaling laws for DiLoCo (arXiv 2503.09799), section on wall-clock time.
    """
    return inside.bandwidth_bps / between.bandwidth_bps


def line_bps(scenario: Scenario, link: Link) -> float:
    """Bits a second that a transfer gets of an otherwise idle line."""
    rtt_s = scenario.profile.up.delay_s + scenario.profile.down.delay_s
    if not scenario.has_tcp:
        return link.bandwidth_bps
    return tcp_bps(
        link.bandwidth_bps,
        rtt_s=rtt_s,
        loss=scenario.tcp_loss,
        streams=scenario.streams,
        window_bytes=scenario.window_bytes,
    )


def applies(scenario: Scenario) -> str:
    """Say why there is no closed form for a scenario; empty: there is one.

    Steps that vary, jitter and loss have none, nor have fragments that share the line: each must
    be merged before the next one's first piece is released.
    """
    if scenario.method == "decoupled":
        return "islands that do not wait have no stall"
    if scenario.topology == "sites":
        return "syncers share the islands' lines"
    if scenario.step_noise or scenario.step_skew:
        return "steps vary"
    if any(link.jitter_s or link.loss for link in (scenario.profile.up, scenario.profile.down)):
        return "transfers vary"
    if scenario.overlap_steps >= scenario.inner_steps_per_round // scenario.fragments:
        return "several fragments are on their way at once"
    if scenario.fragment_pattern == "balanced":
        return "layers are cut"
    return ""


def utilisation(scenario: Scenario) -> float:
    """Compute utilisation: H T / (H T + the sum of the stalls of a round's fragments).

    Raises:
        ValueError: Where there is no closed form (`applies`).
    """
    if why := applies(scenario):
        raise ValueError(f"{scenario.method} has no closed form here: {why}")
    compute_s = scenario.inner_steps_per_round * scenario.step_s
    stalls_s = sum(_stall_s(scenario, layers) for layers in _fragments(scenario))
    return compute_utilisation(compute_s, stalls_s)


def _fragments(scenario: Scenario) -> list[list[int]]:
    """Layers of each fragment: p, p + P, p + 2P, ... (strided), or runs of equal length."""
    layers, p = scenario.layers, scenario.fragments
    if scenario.fragment_pattern == "strided":
        return [list(range(first, layers, p)) for first in range(p)]
    return [list(range(i * layers // p, (i + 1) * layers // p)) for i in range(p)]


def _stall_s(scenario: Scenario, layers: Sequence[int]) -> float:
    """Lateness of one fragment: its arrival after the step at which it is merged."""
    released = _released(scenario, layers)
    numel = scenario.params * len(layers) / scenario.layers
    deadline_s = (scenario.overlap_steps + 1) * scenario.step_s
    return max(0.0, _arrived_s(scenario, released, numel) - deadline_s)


def _released(scenario: Scenario, layers: Sequence[int]) -> list[float]:
    """Seconds from the begin of the sending step to the release of each piece, ascending."""
    step_s = scenario.step_s
    if scenario.release == "step":
        return [step_s] * (scenario.buckets or len(layers))
    if scenario.buckets:
        shares = [(j + 1) / scenario.buckets for j in range(scenario.buckets)]
    else:  # the backward pass comes to the last layer first
        shares = sorted((scenario.layers - layer) / scenario.layers for layer in layers)
    return [step_s * (FORWARD_SHARE + share * (1 - FORWARD_SHARE)) for share in shares]


def _arrived_s(scenario: Scenario, released: Sequence[float], numel: float) -> float:
    """When the last island has everything, in seconds from the begin of the sending step.

    Pieces of equal size leave one after the other: the last one has left after
    max_j (released_j + (pieces - j) * its time).
    """
    link, islands = scenario.profile, scenario.islands
    up_bps, down_bps = line_bps(scenario, link.up), line_bps(scenario, link.down)
    up_bits, down_bits = numel * scenario.bits_up, numel * scenario.down_bits
    rtt_s = link.up.delay_s + link.down.delay_s
    if scenario.method in ("data-parallel", "hierarchical"):
        return _reduced_s(scenario, released, up_bits, min(up_bps, down_bps), rtt_s)
    if scenario.topology == "star":
        shared = scenario.syncer_bps / islands
        if scenario.has_tcp:
            shared *= MSS_BYTES / PACKET_BYTES
        left_s = _left_s(released, up_bits / min(up_bps, shared))
        return left_s + down_bits / min(down_bps, shared) + rtt_s
    # Reduce-scatter in the bits of contributions, all-gather in those of what is published.
    share = (islands - 1) / islands
    return _left_s(released, (up_bits + down_bits) * share / min(up_bps, down_bps)) + rtt_s


def _reduced_s(
    scenario: Scenario, released: Sequence[float], bits: float, wan_bps: float, rtt_s: float
) -> float:
    """When an all-reduce of gradients has ended, whose pieces are released one by one."""
    ring = ReductionTime(
        num_islands=scenario.islands,
        num_ranks=scenario.ranks,
        num_bytes=math.ceil(bits / 8),
        wan_bps=wan_bps,
        rtt_s=rtt_s,
        inside_bps=scenario.inside_bps,
        num_chunks=len(released),
    )
    if scenario.method == "data-parallel":
        latency_s = ring_latency_s(scenario.islands, scenario.ranks, rtt_s)
        return _left_s(released, ring.flat_s - latency_s) + latency_s
    # Two stages in a row: the k-th piece enters the second when it has left the first and the one
    # before has left the second.
    inside_s, between_s = (phase_s / len(released) for phase_s in (ring.inside_s, ring.between_s))
    inside = between = 0.0
    for release in released:
        inside = max(inside, release) + inside_s
        between = max(between, inside) + between_s
    return between + ring.latency_s


def ring_latency_s(islands: int, ranks: int, rtt_s: float) -> float:
    """Delays of one ring through all ranks: what `ReductionTime.flat_s` has besides its bytes."""
    ring = ReductionTime(
        num_islands=islands, num_ranks=ranks, num_bytes=0, wan_bps=1.0, rtt_s=rtt_s
    )
    return ring.flat_s


def _left_s(released: Sequence[float], all_s: float) -> float:
    """When the last of equal pieces has left, all of which take `all_s` together."""
    pieces = len(released)
    return max(
        release + (pieces - j) * all_s / pieces for j, release in enumerate(sorted(released))
    )
