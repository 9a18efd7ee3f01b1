"""Where islands, syncers and the traffic between them stand in a picture, in units of its view box.

Pure. However many islands there are, the busiest have a place each and the others one together; so
have syncers. Where payloads travel as objects, the object store is between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from diloco.page.run_view import LinkPart, LinkRow, Tone, counted, rate_text, trip_text

WIDTH = 640.0
#: Between the tops of two places; height of one, width of an island's and of another.
_ROW, BOX, _ISLAND, _OTHER = 84.0, 74.0, 240.0, 130.0
#: Places of islands, and of syncers, at most.
_MOST_ISLANDS, _MOST_SYNCERS = 9, 6
#: Width of the busiest line, where there is one syncer, and of one without traffic; how far the
#: two directions are apart.
_WIDEST, _IDLE, _APART = 7.0, 1.0, 10.0
#: Characters that fit into an island's place, and into another.
_ISLAND_TEXT, _OTHER_TEXT = 20, 11
_BUCKET, _OTHERS = "object store", "summed up"


@dataclass(frozen=True, slots=True)
class Place:
    """An island, a syncer, an object store, or several of a kind: a box with lines of text."""

    x: float
    y: float
    width: float
    tone: Tone
    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """One direction of the traffic between two places."""

    path: str
    style: str
    width: float
    text: str


@dataclass(frozen=True, slots=True)
class NetworkChart:
    """The picture: places, and the edges between them."""

    places: tuple[Place, ...]
    edges: tuple[Edge, ...]
    height: float


@dataclass(frozen=True, slots=True)
class _Flow:
    """Traffic from the first of two places (up), and to it (down); `is_one`: of one island."""

    names: tuple[str, str]
    at: tuple[tuple[float, float], tuple[float, float]]
    part: LinkPart
    is_one: bool = False


def network_chart(links: Sequence[LinkRow]) -> NetworkChart | None:
    """Place what islands report of their links; None: no island does."""
    known = [link for link in links if link.parts]
    if not known:
        return None
    names = list(dict.fromkeys(part.syncer for link in known for part in link.parts))
    kept = names if len(names) <= _MOST_SYNCERS else names[: _MOST_SYNCERS - 1]
    others = [] if kept is names else [f"{len(names) - len(kept)} other syncers"]
    shown = [replace(link, parts=_parts(link.parts, kept, others)) for link in _busiest(known)]
    height = _ROW * max(len(shown), len(kept) + len(others))
    ends = dict(zip([*kept, *others], _spread(len(kept) + len(others), height), strict=True))
    places = [_syncer_place(name, y) for name, y in ends.items()]
    x, store_y = (WIDTH + _ISLAND - 2 * _OTHER) / 2, (height - BOX) / 2
    flows = []
    for link, y in zip(shown, _spread(len(shown), height), strict=True):
        places.append(_island_place(link, y))
        start = _ISLAND, y + BOX / 2
        for part in link.parts:
            to, end = part.syncer, (WIDTH - _OTHER, ends[part.syncer] + BOX / 2)
            if link.has_bucket:
                to, end = _BUCKET, (x, store_y + BOX / 2)
            flows.append(_Flow((link.island, to), (start, end), part, link.state != _OTHERS))
    if stored := [link for link in shown if link.has_bucket]:
        places.append(Place(x, store_y, _OTHER, "plain", _BUCKET, (_BUCKET,)))
        for part in _parts([part for link in stored for part in link.parts], kept, others):
            at = (x + _OTHER, store_y + BOX / 2), (WIDTH - _OTHER, ends[part.syncer] + BOX / 2)
            flows.append(_Flow((_BUCKET, part.syncer), at, part))
    widest = _WIDEST / math.sqrt(len(ends))
    return NetworkChart(tuple(places), tuple(_edges(flows, widest)), height)


def fullest(links: Iterable[LinkRow], most: int) -> list[LinkRow]:
    """Give the links that are fullest, then those that carry most."""
    return sorted(links, key=lambda link: (link.fullness or 0.0, link.bps), reverse=True)[:most]


def _busiest(links: Sequence[LinkRow]) -> list[LinkRow]:
    """Give the links to show, in their order; those that carry least as one."""
    if len(links) <= _MOST_ISLANDS:
        return list(links)
    names = {link.island for link in fullest(links, _MOST_ISLANDS - 1)}
    parts = [part for link in links if link.island not in names for part in link.parts]
    others = LinkRow(
        counted(len(links) - len(names), "other island"),
        _OTHERS,
        up=rate_text(sum(part.up_bps for part in parts)),
        down=rate_text(sum(part.down_bps for part in parts)),
        parts=tuple(parts),
    )
    return [*(link for link in links if link.island in names), others]


def _parts(
    parts: Iterable[LinkPart], kept: Sequence[str], others: Sequence[str]
) -> tuple[LinkPart, ...]:
    """Sum up parts by the places of their syncers; the round trip is the shortest that is known."""
    sums: dict[str, LinkPart] = {}
    for part in parts:
        name = part.syncer if part.syncer in kept else others[0]
        before = sums.get(name, LinkPart(name, 0.0, 0.0))
        trips = [trip for trip in (before.round_trip_s, part.round_trip_s) if trip]
        sums[name] = LinkPart(
            name,
            before.up_bps + part.up_bps,
            before.down_bps + part.down_bps,
            min(trips, default=0.0),
        )
    return tuple(sums.values())


def _spread(number: int, height: float) -> list[float]:
    """Give the tops of so many places, evenly over a height."""
    return [round((n + 0.5) * height / number - BOX / 2, 1) for n in range(number)]


def _island_place(link: LinkRow, y: float) -> Place:
    trip, full = link.round_trip, "" if link.full == "-" else link.full
    last = ", ".join(text for text in (trip if trip != "-" else "", full) if text)
    if full.endswith("%"):
        last += " full"
    lines = (_cut(link.island, _ISLAND_TEXT), f"up {link.up}", f"down {link.down}", last)
    title = link.island if link.state == "-" else f"{link.island}: {link.state}"
    return Place(0.0, y, _ISLAND, link.tone, title, lines)


def _syncer_place(name: str, y: float) -> Place:
    return Place(WIDTH - _OTHER, y, _OTHER, "plain", name, (_cut(name, _OTHER_TEXT),))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _edges(flows: Sequence[_Flow], widest: float) -> Iterable[Edge]:
    """Draw both directions of each flow, wider with its rate, up to that of the busiest island."""
    busiest = max((max(f.part.up_bps, f.part.down_bps) for f in flows if f.is_one), default=0.0)
    for flow in flows:
        (x0, y0), (x1, y1) = flow.at
        trip = trip_text(flow.part.round_trip_s)
        said = "" if trip == "-" else f", round trip {trip}"
        middle, (a, b) = (x0 + x1) / 2, flow.names
        for style, bps, off, names in (
            ("up", flow.part.up_bps, -_APART / 2, (a, b)),
            ("down", flow.part.down_bps, _APART / 2, (b, a)),
        ):
            share = math.sqrt(min(1.0, bps / busiest)) if busiest else 0.0
            yield Edge(
                f"M{x0:g} {y0 + off:g}C{middle:g} {y0 + off:g} {middle:g} {y1 + off:g} "
                f"{x1:g} {y1 + off:g}",
                style if bps else f"{style} idle",
                round(max(_IDLE, widest * share), 1),
                f"{names[0]} to {names[1]}: {rate_text(bps)}{said}",
            )
