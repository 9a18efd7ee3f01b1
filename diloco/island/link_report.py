"""What the leader's reports say of its island's way to the syncers, without traffic of its own.

Bytes are counted where calls are made, rates follow from them; the round trip is what the kernel
measures on the connections that there are, to which a simulated link adds its delay. One that goes
through another process (libp2p) has none that is known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from diloco.protocol.run.alarms import AlarmKind
from diloco.protocol.run.peer_bounds import MOST_LINK_BPS
from diloco.protos.control_pb2 import LinkUse, SyncerLinkUse
from diloco.telemetry.events import AlarmCleared, AlarmRaised
from diloco.telemetry.link_figures import Growth
from diloco.transport.addresses import split_address
from diloco.transport.tcp_counters import can_count, round_trips_s
from diloco.transport.units import format_bandwidth

#: Share of a link that its use comes to over so many seconds before that is an alarm, which is
#: raised again so often.
_MOST_USED, _USED_S, _AGAIN_S = 0.8, 600.0, 60.0


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """What the run file says of an island's link.

    Args:
        up_bps: Bandwidth in bits a second; 0: not known. So is `down_bps`.
        added_s: Round trip of a simulated link, which the kernel does not see.
        has_bucket: Whether payloads travel as objects of an object store.
    """

    up_bps: float = 0.0
    down_bps: float = 0.0
    added_s: float = 0.0
    has_bucket: bool = False


class SyncerCounters(Protocol):
    """What a rank has counted of each syncer so far, in the order of the syncers."""

    @property
    def peers(self) -> Sequence[str]:
        """Where each is."""

    @property
    def moved(self) -> Sequence[tuple[int, int]]:
        """Bytes sent to each, and received from it."""

    @property
    def failed_calls(self) -> Sequence[int]:
        """Attempts of calls to each that broke."""


class LinkReport:
    """Reads what an island's link does; everything in the loop of the network."""

    def __init__(self, exchange: SyncerCounters, settings: LinkSettings) -> None:
        """Assign only; `exchange` is the leader's."""
        self._exchange, self._settings = exchange, settings
        self._moved, self._failed, self._long = Growth(), Growth(), Growth(_USED_S)
        self._sums: Sequence[tuple[int, int]] = ()
        self._alarmed_at: float | None = None

    def use(self, now: float, island_moved: Sequence[tuple[int, int]] | None) -> LinkUse:
        """Say what the link does.

        Args:
            now: Seconds of a clock that never goes back.
            island_moved: Bytes that all ranks have sent to each syncer, and received from it, when
                they were last summed, another object each time; None: the leader is the only rank.
        """
        exchange = self._exchange
        if island_moved is None:
            self._add(now, exchange.moved)
        elif island_moved and island_moved is not self._sums:
            self._sums = island_moved
            self._add(now, island_moved)
        self._failed.add(now, exchange.failed_calls)
        settings, span_s = self._settings, self._moved.span_s
        bps = [min(8 * n / span_s, MOST_LINK_BPS) if span_s else 0.0 for n in self._moved.growth]
        bps = bps or [0.0, 0.0] * len(exchange.peers)  # all ranks have not summed up yet
        trips_s = self._round_trips_s()
        return LinkUse(
            interval_s=span_s,
            syncers=[
                SyncerLinkUse(
                    up_bps=up_bps,
                    down_bps=down_bps,
                    round_trip_s=trip_s,
                    failed_calls=failed,
                    recent_failed_calls=recent,
                )
                for trip_s, up_bps, down_bps, failed, recent in zip(
                    trips_s,
                    bps[::2],
                    bps[1::2],
                    exchange.failed_calls,
                    self._failed.growth,
                    strict=True,
                )
            ],
            up_capacity_bps=min(settings.up_bps, MOST_LINK_BPS),
            down_capacity_bps=min(settings.down_bps, MOST_LINK_BPS),
            has_bucket=settings.has_bucket,
        )

    def _add(self, now: float, moved: Sequence[tuple[int, int]]) -> None:
        self._moved.add(now, [n for pair in moved for n in pair])
        self._long.add(now, [sum(pair[way] for pair in moved) for way in (0, 1)])

    def alarm(self, island: str) -> AlarmRaised | AlarmCleared | None:
        """Say that the link had little room for ten minutes, or has again; None: nothing new.

        Of ranks that sum up nothing, since they wait, it is not known.
        """
        now, span_s, settings = self._long.read_at, self._long.span_s, self._settings
        share, bps, way = 0.0, 0.0, ""
        if span_s >= _USED_S:
            up, down = self._long.growth
            ways = (up, settings.up_bps, "up"), (down, settings.down_bps, "down")
            shares = ((8 * n / span_s / bps, bps, way) for n, bps, way in ways if bps)
            share, bps, way = max(shares, default=(0.0, 0.0, ""))
        last = self._alarmed_at
        if share < _MOST_USED:
            self._alarmed_at = None
            return None if last is None else AlarmCleared(AlarmKind.LINK_FULL, island)
        if last is not None and now - last < _AGAIN_S:
            return None
        self._alarmed_at = now
        text = (
            f"of its link, {format_bandwidth(bps)} {way}, {share:.0%} were used over the last "
            f"{_USED_S / 60:g} min: it is late, or others wait for it. Raise transport.rate in its "
            f"file if the line has more, or let it send less: diloco stop HOST:PORT, a smaller "
            f"outer.uplink_codec, diloco coordinator RUN.toml --resume"
        )
        return AlarmRaised(AlarmKind.LINK_FULL, text, island)

    def _round_trips_s(self) -> list[float]:
        """Give the round trip to each syncer; 0: not known."""
        places: list[tuple[str, int] | None] = []
        for peer in self._exchange.peers:
            places.append(None)
            with contextlib.suppress(ValueError):  # of an address that is no HOST:PORT
                places[-1] = split_address(peer)
        measured = round_trips_s({place for place in places if place}) if can_count() else {}
        added_s = self._settings.added_s
        return [measured[each] + added_s if each in measured else 0.0 for each in places]
