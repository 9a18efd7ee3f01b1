"""Traces of simulated and real runs: the same spans, as Chrome's trace events.

A real run's spans come from the events that it keeps: each says how long something took, and was
written when that had ended. So they are as good as the wall clocks of its machines: of one run on
one machine exact, across sites shifted by what the clocks differ.

See Trace Event Format (Chrome), which ui.perfetto.dev and chrome://tracing open.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError
from diloco.report.summary import event_lines
from diloco.simulations.engine.timeline import Span, SpanKind

#: A line of a file of events, hence any JSON values.
EventLine = Mapping[str, Any]

#: What the training thread of an island does: one track of the trace.
TRAINING: frozenset[SpanKind] = frozenset({"compute", "gather", "wait", "merge"})
#: Wall clocks do not tell less apart: doubles of seconds since 1970.
_CLOCK_S = 1e-6


def run_spans(telemetry_dir: Path) -> list[Span]:
    """Read the spans of a real run, by begin; 0 is the first of them.

    Of what an island's ranks do together the leader's are taken, lanes of all. Phases that took no
    time that a clock shows are left out.

    Args:
        telemetry_dir: Where the run's events are, islands' and syncers'.

    Raises:
        ConfigError: If there are no events of which a span could be made.
    """
    paths = sorted(telemetry_dir.glob("events-*.jsonl"))
    spans = from_the_first(
        span
        for path in paths
        for line in event_lines(path)
        for span in event_spans(line, path.stem.removeprefix("events-"))
    )
    if not spans:
        raise ConfigError(
            f"no inner step and no round in the events of {telemetry_dir}: give the "
            f"coordinator.state_dir of a run that has trained (diloco local RUN.toml)"
        )
    return spans


def from_the_first(spans: Iterable[Span]) -> list[Span]:
    """Sort spans by begin, the first at 0; without those that took no time."""
    long = sorted(
        (span for span in spans if span.end_s > span.begin_s), key=lambda each: each.begin_s
    )
    return [
        replace(each, begin_s=each.begin_s - long[0].begin_s, end_s=each.end_s - long[0].begin_s)
        for each in long
    ]


def event_spans(line: EventLine, writer: str) -> Iterator[Span]:
    """Give the spans that an event tells of, by the clock that stamped it.

    Args:
        line: The event.
        writer: Of a syncer's events, its name.
    """
    ended_s, is_leader = line.get("unix_s", 0.0), line.get("island_rank", 0) == 0
    match line.get("kind"):
        case "inner_step":
            began_s = ended_s - line["duration_s"]
            yield Span(line["island"], None, None, "compute", began_s, ended_s)
        case "phase":
            kind, lane_id = line["phase"], line["lane_id"]
            if is_leader or kind not in TRAINING:
                yield Span(
                    line["island"],
                    None if lane_id < 0 else lane_id,
                    line["fragment_id"],
                    kind,
                    ended_s - line["duration_s"],
                    ended_s,
                )
        case "round_closed":
            began_s = ended_s - line["commit_s"]
            yield Span(writer, None, line["fragment_id"], "merge", began_s, ended_s)


def shown(spans: Sequence[Span], from_s: float, to_s: float | None) -> list[Span]:
    """Leave out what ended before `from_s` or began after `to_s`; None: to the end.

    Raises:
        ConfigError: If nothing is left.
    """
    last_s = math.inf if to_s is None else to_s
    kept = [span for span in spans if span.end_s >= from_s and span.begin_s <= last_s]
    if not kept:
        raise ConfigError(
            f"nothing happened from {from_s:g} to {last_s:g} s: the run is from "
            f"{min(s.begin_s for s in spans):g} to {max(s.end_s for s in spans):g} s; change "
            f"--from or --to"
        )
    return kept


def sums_of(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Add up the spans by who and what.

    Returns:
        JSON values, one row each: `island`, `kind`, `times`, `seconds`, and `share` of the time
        from the first begin to the last end of all.
    """
    wall_s = max(s.end_s for s in spans) - min(s.begin_s for s in spans)
    rows: dict[tuple[str, str], list[float]] = {}
    for place, tracks in tracks_of(spans).items():
        for span in (span for its in tracks.values() for span in its):
            rows.setdefault((place, span.kind), []).append(span.end_s - span.begin_s)
    return [
        {
            "island": place,
            "kind": kind,
            "times": len(durations),
            "seconds": sum(durations),
            "share": sum(durations) / wall_s,
        }
        for (place, kind), durations in rows.items()
    ]


def chrome_trace(spans: Sequence[Span], *, run: str) -> dict[str, Any]:
    """Write spans as trace events: a process an island or syncer, a track a lane.

    Where spans of a track overlap, as those of two ranks, it is several of one name.

    Args:
        spans: Of one run.
        run: Its name.

    Returns:
        JSON values: `traceEvents`, times in microseconds.
    """
    events: list[dict[str, Any]] = []
    for pid, (place, tracks) in enumerate(tracks_of(spans).items()):
        events.append(_metadata("process_name", pid, 0, name=place))
        rows = [(track, row) for track, its_spans in tracks.items() for row in _rows(its_spans)]
        for tid, (track, row) in enumerate(rows):
            events.append(_metadata("thread_name", pid, tid, name=track))
            events.append(_metadata("thread_sort_index", pid, tid, sort_index=tid))
            events += [_complete(span, pid, tid) for span in row]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"run": run}}


def tracks_of(spans: Sequence[Span], *, has_lanes: bool = True) -> dict[str, dict[str, list[Span]]]:
    """Sort spans by who did it, then by track: first training, then each fragment and its lanes.

    An island's training thread does one thing at a time, and so do a fragment's lanes; a syncer has
    no training, so that its merges are its fragments'.

    Args:
        spans: Of one run.
        has_lanes: Whether each lane has a track; otherwise they are in their fragment's.
    """
    trained = {span.island for span in spans if span.kind == "compute"}
    tracks: dict[str, dict[tuple[int, int], list[Span]]] = {}
    for span in spans:
        is_training = span.kind in TRAINING and span.island in trained
        fragment = -1 if is_training or span.fragment is None else span.fragment
        lane = -1 if is_training or span.lane is None or not has_lanes else span.lane
        tracks.setdefault(span.island, {}).setdefault((fragment, lane), []).append(span)
    return {
        place: {_track_name(*key): its for key, its in sorted(tracks[place].items())}
        for place in sorted(tracks, key=lambda place: (place not in trained, place))
    }


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    """Part spans into rows in which none overlaps: viewers drop one that does."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda each: each.begin_s):
        row = next((row for row in rows if row[-1].end_s <= span.begin_s + _CLOCK_S), None)
        if row is None:
            rows.append([span])
        else:
            begin_s = min(max(span.begin_s, row[-1].end_s), span.end_s)
            row.append(replace(span, begin_s=begin_s))
    return rows


def _track_name(fragment: int, lane: int) -> str:
    if fragment < 0:
        return "training"
    return f"fragment {fragment}" + (f" lane {lane}" if lane >= 0 else "")


def _complete(span: Span, pid: int, tid: int) -> dict[str, Any]:
    arguments = {"fragment": span.fragment, "lane": span.lane}
    # Whole nanoseconds, as viewers keep them: rounded apart, an end may come after the next begin.
    begin_ns, end_ns = round(span.begin_s * 1e9), round(span.end_s * 1e9)
    return {
        "ph": "X",
        "name": span.kind if span.fragment is None else f"{span.kind} {span.fragment}",
        "cat": span.kind,
        "pid": pid,
        "tid": tid,
        "ts": begin_ns / 1e3,
        "dur": (end_ns - begin_ns) / 1e3,
        "args": {name: value for name, value in arguments.items() if value is not None},
    }


def _metadata(name: str, pid: int, tid: int, /, **arguments: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": arguments}
