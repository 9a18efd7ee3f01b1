"""Lanes in the timeline of a simulated run, whose islands exchange whole fragments.

Ranks of an island carry its lanes at the same time (`diloco.island.lanes.carriers`). Each
encodes its own one after another, then all of them cross the link in turns, so that each takes the
whole time of the fragment; what is published is fetched, and decoded, by calls of one lane or
several (`diloco.island.exchange.staging.grouped`), whose spans bear a lane only where it is one, as
in a real run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from diloco.config.schema import Config
from diloco.island.exchange.staging import grouped
from diloco.island.lanes.carriers import carriers_of
from diloco.outer.fragments import Fragment, Plan
from diloco.simulations.engine.timeline import Span, SpanKind
from diloco.simulations.runs.run_model import SimulatedRun, run_plan

_BY_LANE: tuple[SpanKind, ...] = ("encode", "send")
_BY_CALL: tuple[SpanKind, ...] = ("fetch", "decode")
#: The others cross a link together.
_IN_TURN: tuple[SpanKind, ...] = ("encode", "decode")


@dataclass(frozen=True, slots=True)
class _Part:
    """Of what a rank carries of a fragment; lane None: several."""

    lane: int | None
    numel: int


def spans_by_lane(run: SimulatedRun, config: Config) -> list[Span]:
    """Give the timeline of a run of `config` that was simulated, lane by lane."""
    ranks = {name: island.ranks for name, island in config.islands.items()}
    return by_lane(run.spans, run_plan(config), ranks)


def by_lane(spans: Sequence[Span], plan: Plan, ranks: Mapping[str, int]) -> list[Span]:
    """Give the spans of a simulated run lane by lane; those of no lane stay as they are.

    Args:
        spans: Of whole fragments.
        plan: Fragments and their lanes.
        ranks: Number of them, of every island; syncers have no lanes in a timeline.
    """
    dealt = {num: carriers_of(plan.fragments, range(num)) for num in set(ranks.values())}
    carriers = {island: dealt[num] for island, num in ranks.items()}
    return [part for span in spans for part in _parts_of(span, plan, carriers)]


def _parts_of(
    span: Span, plan: Plan, carriers: Mapping[str, Mapping[tuple[int, int], int]]
) -> Iterator[Span]:
    has_lanes = span.kind in _BY_LANE or span.kind in _BY_CALL
    if not has_lanes or span.fragment is None or span.island not in carriers:
        yield span
        return
    fragment, own = plan.fragments[span.fragment], carriers[span.island]
    for parts in _carried(fragment, own, is_by_call=span.kind in _BY_CALL):
        if span.kind in _IN_TURN:
            yield from _in_turn(span, parts)
        else:
            yield from (replace(span, lane=part.lane) for part in parts)


def _carried(
    fragment: Fragment, carriers: Mapping[tuple[int, int], int], *, is_by_call: bool
) -> list[list[_Part]]:
    """List what each rank carries that carries anything."""
    carried: dict[int, list[int]] = {}
    for lane in fragment.lanes:
        rank = carriers[fragment.fragment_id, lane.lane_id]
        carried.setdefault(rank, []).append(lane.lane_id)
    return [
        [
            _Part(
                several[0] if len(several) == 1 else None,
                sum(fragment.lanes[lane_id].numel for lane_id in several),
            )
            for several in (grouped(fragment, own) if is_by_call else [[each] for each in own])
        ]
        for own in carried.values()
    ]


def _in_turn(span: Span, parts: Sequence[_Part]) -> Iterator[Span]:
    """Cut a span by the values of its parts."""
    total, done = sum(part.numel for part in parts), 0
    length_s, begin_s = span.end_s - span.begin_s, span.begin_s
    for part in parts:
        done += part.numel
        end_s = span.begin_s + length_s * done / total
        yield replace(span, lane=part.lane, begin_s=begin_s, end_s=end_s)
        begin_s = end_s
