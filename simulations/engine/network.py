"""Links under the virtual clock: transfers that share them, and what TCP leaves of them.

A transfer crosses one or more pipes (an island's own direction of its line, the uplink of a site
that others share) and takes of each what max-min fairness gives it: all rates grow together, each
by its number of streams, until a pipe is full or a transfer is at its own ceiling; those stay, the
others go on. Rates change when a transfer begins or ends.

Bandwidth, delay, jitter and loss are those of `transport.link.Link`; the ceilings of TCP are
`diloco.baseline.time_model.tcp_bps`. As in `transport.link`, a turn of 64 KiB that is lost takes
the link twice, and the last one, if it is, arrives a round trip later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import simpy

from diloco.baseline.time_model import MSS_BYTES, PACKET_BYTES, tcp_bps
from diloco.simulations.engine.clock import Engine
from diloco.transport.shaping.link import Link
from diloco.transport.shaping.shaped import TURN_BYTES

#: Bits that are left of a transfer by rounding.
_NOTHING_BITS = 1e-3


@dataclass(frozen=True, slots=True)
class Tcp:
    """Ceilings of connections with loss-based congestion control.

    Attributes:
        loss: Share of the packets that are lost (Mathis); 0: no such ceiling.
        window_bytes: Most that one connection has on its way; infinite: no such ceiling.
    """

    loss: float = 0.0
    window_bytes: float = math.inf


class Pipe:
    """Something of a capacity that transfers share."""

    def __init__(self, name: str, bandwidth_bps: float) -> None:
        """Be idle; an infinite bandwidth is no bottleneck."""
        self.name = name
        self.bandwidth_bps = bandwidth_bps
        self.carried_bits = 0.0


@dataclass(frozen=True, slots=True)
class Path:
    """A way in one direction.

    Attributes:
        name: Decides its random stream.
        pipes: That it crosses; at least one.
        link: Delay, jitter and loss of it; its bandwidth is that of one of the pipes.
        rtt_s: Round trip, of the ceilings of TCP.
        tcp: Ceilings of a connection; None: none.
    """

    name: str
    pipes: tuple[Pipe, ...]
    link: Link
    rtt_s: float
    tcp: Tcp | None = None

    @property
    def header_factor(self) -> float:
        """What crosses the pipes over the payload: headers of TCP."""
        return 1.0 if self.tcp is None else PACKET_BYTES / MSS_BYTES

    def ceiling_bps(self, streams: int) -> float:
        """Most that a transfer of so many connections gets of an empty path, headers included."""
        if self.tcp is None:
            return math.inf
        return self.header_factor * tcp_bps(
            self.link.bandwidth_bps,
            rtt_s=self.rtt_s,
            loss=self.tcp.loss,
            streams=streams,
            window_bytes=self.tcp.window_bytes,
        )


@dataclass(slots=True, eq=False)
class _Flow:
    name: str
    pipes: tuple[Pipe, ...]
    bits: float
    weight: int
    ceiling_bps: float
    sent: simpy.Event
    rate_bps: float = field(default=0.0)


class Network:
    """All transfers under way."""

    def __init__(self, engine: Engine) -> None:
        """Have none."""
        self._engine = engine
        self._flows: list[_Flow] = []
        self._since = 0.0
        self._turn = 0
        self._is_due = False
        self._random = engine.stream("network")
        self._delivered: dict[str, float] = {}

    @property
    def rates_bps(self) -> dict[str, float]:
        """What every path has now, all its transfers together."""
        rates: dict[str, float] = {}
        for flow in self._flows:
            rates[flow.name] = rates.get(flow.name, 0.0) + flow.rate_bps
        return rates

    def send(self, path: Path, num_bytes: float, streams: int = 1) -> simpy.Event:
        """Put bytes on a path; the event is triggered when the last of them has left."""
        self._settle()
        bits = 8.0 * (num_bytes + self._lost_bytes(path, num_bytes)) * path.header_factor
        flow = _Flow(
            path.name, path.pipes, bits, streams, path.ceiling_bps(streams), self._engine.event()
        )
        self._flows.append(flow)
        self._share_soon()
        return flow.sent

    def cross(self, path: Path, num_bytes: float, streams: int = 1) -> simpy.Event:
        """Put bytes on a path; the event is triggered when the last of them has arrived."""
        arrived = self._engine.event()
        sent = self.send(path, num_bytes, streams)

        def on_sent(_: simpy.Event) -> None:
            self._engine.call_at(self._arrival(path), lambda: _trigger(arrived))

        assert sent.callbacks is not None
        sent.callbacks.append(on_sent)
        return arrived

    def drop(self, path: Path) -> None:
        """Forget what is on its way on a path: its sender or receiver is gone."""
        self._settle()
        self._flows = [flow for flow in self._flows if flow.name != path.name]
        self._share_soon()

    def _lost_bytes(self, path: Path, num_bytes: float) -> float:
        if not path.link.loss:
            return 0.0
        turns = max(1, math.ceil(num_bytes / TURN_BYTES))
        lost = sum(self._random.random() < path.link.loss for _ in range(turns))
        return num_bytes * lost / turns

    def _arrival(self, path: Path) -> float:
        """When what left now arrives, never before what left the same way earlier."""
        link = path.link
        is_last_lost = link.loss > 0 and self._random.random() < link.loss
        arrival = self._engine.now + link.delay_s * (3 if is_last_lost else 1)
        if link.jitter_s:
            arrival += self._random.uniform(0.0, link.jitter_s)
        arrival = max(arrival, self._delivered.get(path.name, 0.0))
        self._delivered[path.name] = arrival
        return arrival

    def _settle(self) -> None:
        """Take off what was sent since rates were last known."""
        now = self._engine.now
        elapsed, self._since = now - self._since, now
        if elapsed <= 0:
            return
        for flow in self._flows:
            moved = min(flow.bits, flow.rate_bps * elapsed)
            flow.bits -= moved
            for pipe in flow.pipes:
                pipe.carried_bits += moved

    def _share_soon(self) -> None:
        """Share again once all that begins at this time has begun."""
        if not self._is_due:
            self._is_due = True
            self._engine.call_at(self._engine.now, self._share)

    def _share(self) -> None:
        self._is_due = False
        self._settle()
        ended = [f for f in self._flows if f.bits <= _NOTHING_BITS]
        if ended:
            self._flows = [flow for flow in self._flows if flow.bits > _NOTHING_BITS]
            for flow in ended:
                flow.sent.succeed()
        share_fairly(self._flows)
        left_s = [flow.bits / flow.rate_bps for flow in self._flows if flow.rate_bps > 0]
        self._turn += 1
        if left_s:
            turn = self._turn
            soonest = self._engine.now + min(left_s)
            self._engine.call_at(soonest, lambda: self._finish(turn, soonest))

    def _finish(self, turn: int, when: float) -> None:
        """End the transfers that were to end now, unless rates have changed since."""
        if turn != self._turn:
            return
        self._settle()
        for flow in self._flows:
            # The clock's own rounding: what is left would end within its next step.
            if flow.bits <= flow.rate_bps * math.ulp(when) * 4:
                flow.bits = 0.0
        self._share()


def _trigger(event: simpy.Event) -> None:
    event.succeed()


def share_fairly(flows: Sequence[_Flow]) -> None:
    """Set the rates of all transfers: weighted max-min fairness by progressive filling.

    Every unfixed rate is weight times a level that rises until a pipe is full or a transfer is at
    its ceiling; what that bounds is fixed, and the level of the others goes on.

    Source: Bertsekas and Gallager, Data Networks, section 6.5.2.
    """
    room = {id(pipe): pipe.bandwidth_bps for flow in flows for pipe in flow.pipes}
    growing = list(flows)
    while growing:
        weights: dict[int, int] = {}
        for flow in growing:
            for pipe in flow.pipes:
                weights[id(pipe)] = weights.get(id(pipe), 0) + flow.weight
        levels = {pipe: max(0.0, room[pipe]) / weight for pipe, weight in weights.items()}
        level_of = {
            id(flow): min(
                min(levels[id(pipe)] for pipe in flow.pipes), flow.ceiling_bps / flow.weight
            )
            for flow in growing
        }
        lowest = min(level_of.values())
        still = []
        for flow in growing:
            if level_of[id(flow)] > lowest:
                still.append(flow)
                continue
            flow.rate_bps = min(lowest * flow.weight, 1e18)
            for pipe in flow.pipes:
                room[id(pipe)] -= flow.rate_bps
        growing = still
