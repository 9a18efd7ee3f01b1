"""What a page shows of one run: plain values, made of a status or of events. Pure.

Texts are what peers said, not yet escaped: `rendering` does that.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from diloco.protos.control_pb2 import IslandStatus
from diloco.telemetry.link_figures import FULL, link_figures
from diloco.transport.units import format_bandwidth, format_bytes, format_duration

#: How a state is coloured; the words say it, too.
Tone: TypeAlias = Literal["plain", "good", "warning", "bad"]

#: Events that a run keeps for its page: the newest.
MOST_EVENTS = 10_000
#: Rounds and phases that it keeps for the timeline.
MOST_BARS = 20_000
#: Seconds that the timeline shows.
HOUR_S = 3600.0
#: Seconds after which a report is no longer what an island does now.
STALE_S = 10.0
_LINK_TONES: dict[str, Tone] = {"in order": "good", "full": "warning", "calls break": "bad"}
#: Points of a curve that are kept; of more, neighbours become one.
_MOST_POINTS = 1024
_BEYOND = 1e18
#: Commands that an alarm may name, with the number of their arguments before options. A peer's
#: text can put nothing else into an operator's terminal.
_COMMANDS = {
    "coordinator": 1, "drain": 2, "kick": 2, "move": 1, "pause": 1, "repair": 1, "replay": 1,
    "set": 2, "stop": 1, "unpause": 1,
}  # fmt: skip
_WITH_VALUE = frozenset({"--fragment", "--fragments", "--from", "--from-island", "--to"})
_WORD = re.compile(r"[A-Za-z0-9_=:/@-][A-Za-z0-9_.=:/@-]*")


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a run, with its unit, and what it is of."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class AlarmRow:
    """An alarm; `command` is what it says to type, with the run's address, empty: nothing."""

    kind: str
    about: str
    text: str
    command: str
    when: str
    holds: bool


@dataclass(frozen=True, slots=True)
class IslandRow:
    """One island, in words; "-" is what nobody has reported."""

    island: str
    state: str
    tone: Tone
    lease: str = "-"
    incarnation: str = "-"
    inner_step: str = "-"
    step_time: str = "-"
    loss: str = "-"
    tokens_per_s: str = "-"
    waits_for: str = "-"
    in_flight: str = "-"
    up: str = "-"
    down: str = "-"
    blocked: str = "-"
    utilisation: str = "-"
    share: str = "-"
    left: str = "-"
    report: str = "-"
    last_error: str = "-"


@dataclass(frozen=True, slots=True)
class LinkPart:
    """The part of a syncer in an island's traffic, in bits a second."""

    syncer: str
    up_bps: float
    down_bps: float
    round_trip_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkRow:
    """What an island's link does, in words; `fullness` in [0, 1], None: it is not known."""

    island: str
    state: str = "-"
    tone: Tone = "plain"
    up: str = "-"
    down: str = "-"
    round_trip: str = "-"
    full: str = "-"
    failed: str = "-"
    memory: str = "-"
    mfu: str = "-"
    fullness: float | None = None
    parts: tuple[LinkPart, ...] = ()
    has_bucket: bool = False

    @property
    def by_syncer(self) -> str:
        """Both directions and round trip of each syncer, where there are several; else "-"."""
        return (
            "; ".join(
                f"{p.syncer}: {rate_text(p.up_bps)} up, {rate_text(p.down_bps)} down, "
                f"{trip_text(p.round_trip_s)}"
                for p in self.parts
            )
            if len(self.parts) > 1
            else "-"
        )

    @property
    def bps(self) -> float:
        """Bits a second of both directions."""
        return sum(part.up_bps + part.down_bps for part in self.parts)


@dataclass(frozen=True, slots=True)
class FragmentRow:
    """One fragment: its newest version, and where its round stands."""

    fragment_id: int
    version: str
    attempt: str
    phase: str
    tone: Tone
    published: str
    digest: str
    contributors: str
    syncer: str = "-"


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One published version, or an attempt that expired."""

    at: float
    fragment_id: int
    version: int
    how: str
    contributors: str
    left_out: str
    waited: str
    digest: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A part of a round of a fragment, from `start_s` to `end_s` (Unix time)."""

    fragment_id: int
    start_s: float
    end_s: float
    phase: str
    text: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of a fragment: published, expired, or merged by an island."""

    fragment_id: int
    at: float
    kind: Literal["published", "expired", "merged"]
    text: str


@dataclass(frozen=True, slots=True)
class CurveView:
    """Losses of one island by its tokens."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class EventRow:
    """Something that happened; `island` is empty where it is the whole run's."""

    at: float
    kind: str
    island: str
    text: str


@dataclass(frozen=True, slots=True)
class RunView:
    """All that a page shows of a run at one moment.

    Attributes:
        name: Of the run.
        origin: Where it was read: an address, or a directory.
        is_live: Whether it is a coordinator's answer; else it is read from events.
        state: In a word or two.
        sentence: What is going on.
        problem: Why nothing newer is known; empty: all is well.
        curves: Training losses, nats a token.
        held_out: Of published parameters, nats a byte.
        now: Unix time at which it was looked at; of a run that is over, that of its last event.
    """

    name: str
    origin: str
    is_live: bool
    state: str
    tone: Tone
    sentence: str
    now: float
    problem: str = ""
    figures: tuple[Figure, ...] = ()
    notices: tuple[str, ...] = ()
    alarms: tuple[AlarmRow, ...] = ()
    islands: tuple[IslandRow, ...] = ()
    links: tuple[LinkRow, ...] = ()
    fragments: tuple[FragmentRow, ...] = ()
    versions: tuple[VersionRow, ...] = ()
    bars: tuple[Bar, ...] = ()
    marks: tuple[Mark, ...] = ()
    curves: tuple[CurveView, ...] = ()
    held_out: tuple[CurveView, ...] = ()
    events: tuple[EventRow, ...] = ()
    facts: tuple[Figure, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)


class Curve:
    """Points in the order of their steps, at most `_MOST_POINTS`; neighbours are averaged."""

    def __init__(self) -> None:
        """Begin with none."""
        self._points: list[tuple[int, float, float, int]] = []  # step, x, mean y, how many
        self._width = 1
        self._shown: tuple[tuple[float, float], ...] | None = None

    def add(self, step: int, x: float, y: float) -> None:
        """Take the value of a step; steps beyond it are gone: a later start makes them.

        What no picture can show, as it is not finite or far beyond a loss, is left out; so is a
        step that was averaged with others before, and comes again.
        """
        if not (abs(x) < _BEYOND and abs(y) < _BEYOND):
            return
        while self._points and self._points[-1][0] > step:
            self._points.pop()
            self._shown = None
        last = self._points[-1] if self._points else None
        if last is not None and last[0] == step and (last[3] > 1 or last[1:3] == (x, y)):
            return
        self._shown = None
        if last is not None and last[0] == step:
            self._points[-1] = (step, x, y, 1)
            return
        if last is not None and last[3] < self._width:
            _, _, mean, count = last
            self._points[-1] = (step, x, mean + (y - mean) / (count + 1), count + 1)
            return
        self._points.append((step, x, y, 1))
        if len(self._points) > _MOST_POINTS:
            self._width *= 2
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            odd = self._points[len(self._points) // 2 * 2 :]
            self._points = [_joined(a, b) for a, b in pairs] + odd

    def back_to(self, step: int) -> float | None:
        """Give the x of the last point up to a step; None: there is none.

        Where neighbours were averaged it is that of the nearest before.
        """
        return next((x for at, x, _, _ in reversed(self._points) if at <= step), None)

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """All points, x and y; the same tuple until there is another point."""
        if self._shown is None:
            self._shown = tuple((x, y) for _, x, y, _ in self._points)
        return self._shown

    @property
    def last(self) -> float | None:
        """The newest value; None: there is none."""
        return self._points[-1][2] if self._points else None


def _joined(
    a: tuple[int, float, float, int], b: tuple[int, float, float, int]
) -> tuple[int, float, float, int]:
    count = a[3] + b[3]
    return b[0], b[1], (a[2] * a[3] + b[2] * b[3]) / count, count


def about(island: str, fragment_id: int) -> str:
    """Say what an alarm is about; without an island, and a fragment under 0: the whole run."""
    whom = [f"island {island}"] if island else []
    whom += [f"fragment {fragment_id}"] if fragment_id >= 0 else []
    return ", ".join(whom) or "the run"


def curve_views(curves: Mapping[str, Curve]) -> tuple[CurveView, ...]:
    """Show curves by their names, in the order of these."""
    return tuple(CurveView(name, curve.points) for name, curve in sorted(curves.items()))


def waiting_figure(blocked_s: Iterable[float]) -> Figure:
    """Show what islands have lost to waiting for the outer loop."""
    return Figure("waited", seconds(sum(blocked_s)), "of training, all islands together")


def loss_figures(losses: Iterable[float], held_out: float | None, note: str) -> tuple[Figure, ...]:
    """Show losses of islands, and that of published parameters; None: it is not known."""
    median = median_text(losses, ".4f")
    figures = [Figure("loss", median, "nats a token, median of islands")]
    if held_out is not None:
        figures.append(Figure("held-out loss", f"{held_out:.4f}", f"nats a byte, {note}"))
    return tuple(figures)


def ago(duration_s: float) -> str:
    """Write how long ago something was; below 0 is now, by another machine's clock."""
    return f"{seconds(max(0.0, duration_s))} ago"


def is_silent(island: IslandStatus) -> bool:
    """Whether an island's last report is not what it does now."""
    return island.lease in ("lapsed", "kicked") or island.report_age_s >= STALE_S


def link_row(island: IslandStatus, syncers: Sequence[str] = ()) -> LinkRow:
    """Say what an island's link does.

    Args:
        island: The island.
        syncers: Names of the run's syncers, in order.
    """
    report = island.last_report
    if not report.HasField("link") or is_silent(island):
        return LinkRow(island.island)
    link, figures = report.link, link_figures(report.link)
    state = "in order"
    if figures.recent_failed_calls:
        state = "calls break"
    elif figures.fullness is not None and figures.fullness >= FULL:
        state = "full"
    memory = format_bytes(report.resident_bytes) if report.resident_bytes else "-"
    if report.device_bytes:
        memory += f", device {format_bytes(report.device_bytes)}"
    names = [*syncers, *(f"syncer {n}" for n in range(len(syncers), len(link.syncers)))]
    return LinkRow(
        island.island,
        state=state,
        tone=_LINK_TONES[state],
        up=rate_text(figures.up_bps),
        down=rate_text(figures.down_bps),
        round_trip=trip_text(figures.round_trip_s),
        full="-" if figures.fullness is None else f"{figures.fullness:.0%}",
        failed=f"{figures.recent_failed_calls:,} of {figures.failed_calls:,}",
        memory=memory,
        mfu=f"{report.mfu:.1%}" if report.mfu else "-",
        fullness=figures.fullness,
        parts=tuple(
            LinkPart(name, use.up_bps, use.down_bps, use.round_trip_s)
            for name, use in zip(names, link.syncers, strict=False)
        ),
        has_bucket=link.has_bucket,
    )


def rate_text(bps: float) -> str:
    """Write a rate with three digits, so that a live page does not jump."""
    return format_bandwidth(float(f"{bps:.3g}"))


def trip_text(round_trip_s: float) -> str:
    """Write a round trip; "-": it is not known."""
    return format_duration(float(f"{round_trip_s:.3g}")) if round_trip_s else "-"


def command_in(text: str, address: str) -> str:
    """Find the command that a text says to type; empty: none.

    Args:
        text: Of an alarm; a peer's.
        address: Of the coordinator, which takes the place of HOST:PORT; empty: it is not known.
    """
    words = text.partition("diloco ")[2].split(" ")
    least = _COMMANDS.get(words[0], 0)
    if not least:
        return ""
    taken = ["diloco", words[0]]
    has_value = False
    for word in words[1:]:
        found = _WORD.match(word)
        is_argument = has_value or len(taken) < 2 + least
        if found is None or not (is_argument or word.startswith("--")):
            break
        bare = found[0].rstrip(".:")
        taken.append(bare)
        if bare != word:  # a sentence goes on
            break
        has_value = bare in _WITH_VALUE
    command = " ".join(taken).replace("HOST:PORT", address or "HOST:PORT")
    return command if len(taken) >= 2 + least else ""


def named(names: Sequence[str], most: int = 4) -> str:
    """Name the first of several, and say how many more there are."""
    return first_of(names[:most], len(names))


def first_of(names: Sequence[str], number: int) -> str:
    """Name those that are given of a number, and say how many more there are."""
    more = number - len(names)
    return ", ".join([*names, *([f"{more} more"] if more > 0 else [])])


def counted(number: int, what: str) -> str:
    """Write a number of things: "1 island", "4 islands"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def median_text(values: Iterable[float], form: str) -> str:
    """Write the median of what is known; "-": nothing is."""
    known = list(values)
    return format(statistics.median(known), form) if known else "-"


def seconds(duration_s: float) -> str:
    """Write seconds so that a live page does not jump: 0.42 s, 8.1 s, 3 min 20 s, 2 h 5 min."""
    if not math.isfinite(duration_s):
        return "-"
    if duration_s < 1:
        return f"{duration_s:.2f} s"
    if duration_s < 120:
        return f"{duration_s:.1f} s"
    minutes, rest = divmod(round(duration_s), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def filtered(events: Iterable[EventRow], kind: str, island: str) -> list[EventRow]:
    """Give the events of a kind and of an island, the newest first; empty: of any."""
    chosen = [
        event
        for event in events
        if (not kind or event.kind == kind) and (not island or event.island == island)
    ]
    return chosen[::-1]


def differing(settings: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Give the keys in which runs differ, with the value of each run; "-": it has none."""
    keys = sorted(set[str]().union(*settings)) if settings else []
    rows = [(key, [each.get(key, "-") for each in settings]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]
