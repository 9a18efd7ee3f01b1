"""Does every link do what was asked of it? Measured before a run, judged, and kept with its result.

    rate        within 5 %
    round trip  within 2 ms + 2 %
    loss        within 20 % of itself; none where none was asked for

A loss so small that it cannot be told that exactly in a minute is judged as exactly as a minute
allows: 3.5 standard errors, sqrt(1 / expected losses) each. Its row says so.

A machine that pauses the sender for a moment makes a link look slow, never fast: what looks slow
is measured again, and its row says how often. A loss is drawn by lot: one try.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

from diloco.simulations.emulate import kernel
from diloco.simulations.emulate.emulation import WAYS, Emulation, Message
from diloco.simulations.emulate.measure import (
    End,
    measure_loss,
    measure_rate_bps,
    measure_rtt_s,
    packets_in,
)
from diloco.simulations.emulate.network import EmulatedNetwork, Wire
from diloco.transport.shaping.link import Link
from diloco.transport.units import format_bandwidth, format_duration

_RATE_SHARE = 0.05
_RTT_S, _RTT_SHARE = 0.002, 0.02
_LOSS_SHARE = 0.20
_SIGMAS = 3.5
#: Losses to expect, so that 20 % is `_SIGMAS` standard errors.
_EXPECTED_LOSSES = math.ceil((_SIGMAS / _LOSS_SHARE) ** 2)
_MAX_LOSS_S = 60.0
_LOSSLESS_PACKETS, _MAX_LOSSLESS_S = 20_000, 1.0
_RATE_S, _MIN_RATE_PACKETS = 1.5, 150
_SETTLE_S = 0.3
_MIN_PINGS, _MAX_PINGS, _PING_SPACING_S = 20, 400, 0.02
_LAST_WAIT_S = 0.5
_MAX_TRIES = 3
#: What the sender of the rate may have waiting, in time on the link.
_BUFFER_S, _MIN_BUFFER_BYTES = 0.020, 8192


@dataclass(frozen=True, slots=True)
class LinkFinding:
    """One figure of one link.

    Attributes:
        link: Name of the link.
        way: "up", "down", or "both" for the round trip.
        figure: "rate", "round trip" or "loss".
        wanted: In bits per second, seconds, or as a share.
        measured: The same; infinite for a round trip that was never answered.
        tolerance: How far `measured` may be from `wanted`, in its unit.
        tries: Measurements made; `measured` is the last.
    """

    link: str
    way: str
    figure: str
    wanted: float
    measured: float
    tolerance: float
    tries: int = 1

    @property
    def is_met(self) -> bool:
        """Whether the link does what was asked of it."""
        return abs(self.measured - self.wanted) <= self.tolerance

    def cells(self) -> list[str]:
        """Write it for a table: link, way, figure, wanted, measured, off, allowed, tries."""
        write = _WRITERS[self.figure]
        off = self.measured - self.wanted
        if self.figure == "round trip":
            shown = f"{off * 1e3:+.2f} ms", f"{self.tolerance * 1e3:.2f} ms"
        elif self.wanted:
            shown = f"{off / self.wanted:+.1%}", f"{self.tolerance / self.wanted:.0%}"
        else:
            shown = f"{off:+.2g}", "0"
        return [
            self.link,
            self.way,
            self.figure,
            write(self.wanted),
            write(self.measured),
            *shown,
            str(self.tries),
        ]

    def as_dict(self) -> Message:
        """Give it as JSON values; a round trip that was never answered is null."""
        measured = self.measured if math.isfinite(self.measured) else None
        return {**asdict(self), "measured": measured, "is_met": self.is_met}


_WRITERS: dict[str, Callable[[float], str]] = {
    "rate": format_bandwidth,
    "round trip": lambda value: format_duration(value) if math.isfinite(value) else "no answer",
    "loss": lambda value: f"{value:.4%}" if value else "0",
}


def check(
    emulation: Emulation,
    *,
    on_measure: Callable[[str], None] = lambda text: None,
    on_look: Callable[[], None] = lambda: None,
) -> list[LinkFinding]:
    """Measure every link of an emulated network, one after the other; it should carry nothing else.

    Args:
        emulation: In use.
        on_measure: Called with what is measured next.
        on_look: Called often meanwhile; what it raises ends the measuring.

    Returns:
        Every figure of every link, in the order of the file.
    """
    return [
        finding
        for wire in emulation.network.wires
        for finding in _wire_findings(emulation, wire, on_measure, on_look)
    ]


def _wire_findings(
    emulation: Emulation,
    wire: Wire,
    on_measure: Callable[[str], None],
    on_look: Callable[[], None],
) -> Iterator[LinkFinding]:
    network = emulation.network
    ends = {
        node: End(emulation.namespaces.path(node), network.address(node))
        for node in (wire.near, wire.far)
    }
    on_measure(f"{wire.name}: round trip")
    wait_s = _LAST_WAIT_S + 3 * wire.rtt_s
    tolerance_s = _RTT_S + _RTT_SHARE * wire.rtt_s
    jitter_s = max(wire.profile.up.jitter_s, wire.profile.down.jitter_s)
    # The median of n sums of two uniform jitters is off by 0.51 jitter / sqrt(n), one sigma.
    pings = math.ceil((_SIGMAS * 0.51 * jitter_s / tolerance_s) ** 2)

    def measure() -> float:
        return measure_rtt_s(
            ends[wire.near],
            ends[wire.far],
            count=min(max(pings, _MIN_PINGS), _MAX_PINGS),
            spacing_s=max(_PING_SPACING_S, jitter_s),  # else each would wait for the one before it
            wait_s=wait_s,
            on_look=on_look,
        )

    yield _tried(
        LinkFinding(wire.name, "both", "round trip", wire.rtt_s, math.inf, tolerance_s), measure
    )
    for way in WAYS:
        source, target, link = wire.direction(way)
        on_measure(f"{wire.name} {way}: rate")
        wanted = link.bandwidth_bps
        yield _tried(
            LinkFinding(wire.name, way, "rate", wanted, 0.0, _RATE_SHARE * wanted),
            partial(_rate, network, ends[source], ends[target], link, on_look),
        )
        on_measure(f"{wire.name} {way}: loss")
        yield _loss(wire.name, way, ends[source], ends[target], link, wait_s, on_look)


def _tried(finding: LinkFinding, measure: Callable[[], float]) -> LinkFinding:
    """Measure until the link does not look slow, `_MAX_TRIES` times at most."""
    for tries in range(1, _MAX_TRIES + 1):
        finding = replace(finding, measured=measure(), tries=tries)
        off = finding.measured - finding.wanted
        if finding.is_met or (off > 0) == (finding.figure == "rate"):
            break
    return finding


def _rate(
    network: EmulatedNetwork, source: End, target: End, link: Link, on_look: Callable[[], None]
) -> float:
    """Measure a direction's rate, what it loses by itself added back."""
    queue_bytes = link.bandwidth_bps * network.queue_s / 8
    buffer_bytes = min(link.bandwidth_bps * _BUFFER_S / 8, queue_bytes / 4)
    arrived = measure_rate_bps(
        source,
        target,
        super_bytes=kernel.super_packet_bytes(link),
        buffer_bytes=max(int(buffer_bytes), _MIN_BUFFER_BYTES),
        settle_s=_SETTLE_S,
        seconds=max(_RATE_S, _MIN_RATE_PACKETS * 8 * kernel.MTU_BYTES / link.bandwidth_bps),
        on_look=on_look,
    )
    return arrived / (1.0 - link.loss)


def _loss(
    name: str,
    way: str,
    source: End,
    target: End,
    link: Link,
    wait_s: float,
    on_look: Callable[[], None],
) -> LinkFinding:
    rate_bps = link.bandwidth_bps / 2
    if link.loss:
        packets, at_most_s = _EXPECTED_LOSSES / link.loss, _MAX_LOSS_S
    else:
        packets, at_most_s = float(_LOSSLESS_PACKETS), _MAX_LOSSLESS_S
    count = max(1, int(min(packets, packets_in(at_most_s, rate_bps))))
    loss = measure_loss(
        source,
        target,
        packets=count,
        rate_bps=rate_bps,
        super_bytes=kernel.super_packet_bytes(link),
        wait_s=wait_s,
        on_look=on_look,
    )
    share = max(_LOSS_SHARE, _SIGMAS / math.sqrt(count * link.loss)) if link.loss else 0.0
    return LinkFinding(name, way, "loss", link.loss, loss, share * link.loss)
