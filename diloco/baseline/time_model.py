"""How long an all-reduce over islands, or an inner step, must take: the ideal of benches.

D islands of g ranks, S bytes a rank, B_in bits a second of a rank inside its island, B_wan of an
island towards the others, both ways at once, C chunks. Pure arithmetic.

Source: the hierarchical all-reduce of NeMo 25.02 / Megatron-Core 0.11 (NVIDIA, long-haul training);
Mathis et al., "The macroscopic behavior of the TCP congestion avoidance algorithm" (1997).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: An IP packet, and the TCP payload of it.
PACKET_BYTES, MSS_BYTES = 1500, 1448
#: Of Mathis: delayed acknowledgements are not in it.
_MATHIS = 1.22


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionTime:
    """An all-reduce of float32 or coded values over islands.

    Attributes:
        num_islands: D >= 1.
        num_ranks: g >= 1 of each island.
        num_bytes: S, of what one rank holds, as it is sent inside an island.
        wire_share: Size of what is sent between islands over that: 1 of float32, 0.5 of 16 bits.
        inside_bps: B_in; infinite: nothing is waited for inside.
        wan_bps: B_wan.
        rtt_s: Round trip between islands.
        num_chunks: C >= 1.
    """

    num_islands: int
    num_ranks: int
    num_bytes: int
    wan_bps: float
    rtt_s: float
    inside_bps: float = math.inf
    wire_share: float = 1.0
    num_chunks: int = 1

    @property
    def inside_s(self) -> float:
        """Reduce-scatter and all-gather inside: 2 (g - 1) / g * S / B_in."""
        g = self.num_ranks
        return 2 * (g - 1) / g * 8 * self.num_bytes / self.inside_bps

    @property
    def between_s(self) -> float:
        """All-reduce of shards between islands: 2 (D - 1) / D * S / B_wan, of all ranks at once."""
        d = self.num_islands
        return 2 * (d - 1) / d * 8 * self.wire_share * self.num_bytes / self.wan_bps

    @property
    def latency_s(self) -> float:
        """Delay of the hops between islands, paid once: 2 (D - 1) * RTT / 2."""
        return (self.num_islands - 1) * self.rtt_s

    @property
    def hierarchical_s(self) -> float:
        """Hierarchical, C chunks: max(in, between) + min(in, between) / C + latency."""
        longer, shorter = max(self.inside_s, self.between_s), min(self.inside_s, self.between_s)
        return longer + shorter / self.num_chunks + self.latency_s

    @property
    def flat_s(self) -> float:
        """A ring through all N = D g ranks, which enters and leaves each island once.

        Every edge carries 2 (N - 1) / N * S; with C chunks on their way at once the latency is paid
        once: of the 2 (N - 1) hops of a value, D in N are between islands. One island has none.
        """
        n = self.num_islands * self.num_ranks
        if n == 1:
            return 0.0
        share = 2 * (n - 1) / n * 8 * self.wire_share * self.num_bytes
        if self.num_islands == 1:
            return share / self.inside_bps
        hops = math.ceil(2 * (n - 1) * self.num_islands / n)
        return share / min(self.wan_bps, self.inside_bps) + hops * self.rtt_s / 2


def step_s(compute_s: float, num_bytes: float, link_bps: float) -> float:
    """Bound an inner step from below: its transfers run under its arithmetic, all of them.

    max(compute, 8 bytes / B_in)

    Args:
        compute_s: Arithmetic of a rank.
        num_bytes: That the busiest rank sends, or receives if that is more.
        link_bps: B_in of payload, each way; infinite: transfers take no time.
    """
    return max(compute_s, 8 * num_bytes / link_bps)


def tcp_bps(
    link_bps: float,
    *,
    rtt_s: float,
    loss: float = 0.0,
    streams: int = 1,
    window_bytes: float = math.inf,
) -> float:
    """Bound the payload that TCP with loss-based congestion control gets through a link.

    min(link * 1448 / 1500, streams * 8 window / RTT, streams * 8 MSS / RTT * 1.22 / sqrt(loss));
    without delay the first term alone, without loss the first two.

    Args:
        link_bps: Rate of IP packets, bits a second.
        rtt_s: Round trip.
        loss: Share of the packets that are lost, in [0, 1).
        streams: Connections at once, at least 1.
        window_bytes: Most that one connection has on its way.
    """
    bound = link_bps * MSS_BYTES / PACKET_BYTES
    if rtt_s > 0:
        bound = min(bound, streams * 8 * window_bytes / rtt_s)
    if loss > 0 and rtt_s > 0:
        bound = min(bound, streams * 8 * MSS_BYTES / rtt_s * _MATHIS / math.sqrt(loss))
    return bound
