"""A run as its page shows it, from the events of its processes, in the order of their time. Pure.

Events come from files that other processes, and other machines, wrote: one that is not what an
event should be is counted and left out.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from diloco.bounded_text import bounded_text
from diloco.page.run_view import (
    MOST_BARS,
    MOST_EVENTS,
    AlarmRow,
    Bar,
    Curve,
    EventRow,
    Figure,
    FragmentRow,
    IslandRow,
    LinkPart,
    LinkRow,
    Mark,
    RunView,
    Tone,
    VersionRow,
    about,
    ago,
    command_in,
    counted,
    curve_views,
    loss_figures,
    median_text,
    named,
    rate_text,
    seconds,
    waiting_figure,
)
from diloco.transport.units import format_bytes, format_duration

#: An event as a line of JSON holds it, hence any JSON values.
Event: TypeAlias = Mapping[str, Any]

#: Kinds of which there are too many for a list: losses, phases and bytes are shown as figures.
_NOT_LISTED = frozenset({"bytes_moved", "inner_step", "memory_used", "phase"})
#: What a row of the list of events does not repeat.
_CONTEXT = frozenset(
    {"incarnation", "island", "island_rank", "kind", "run", "syncer_epoch", "timeline", "unix_s"}
)
#: Kinds that say what went wrong on an island -> what they say it with.
_ERRORS = {
    "checkpoint_failed": "reason",
    "checkpoint_mirror_failed": "reason",
    "damaged_on_the_way": "text",
    "loss_accepted": "reason",
    "memory_copy_failed": "reason",
    "outcome_heard": "reason",
    "published_taken": "reason",
    "rank_lost": "text",
}
#: Seconds for which an alarm holds after it was raised, and for which an island is at work after
#: its last step.
_ALARM_S, _AT_WORK_S = 300.0, 30.0
_RECENT_STEPS = 50
_MOST_SHOWN = 300
_DIGEST = 12


@dataclass(frozen=True, slots=True)
class _Ended:
    """What a start of an island has said at its end; `is_early`: before that of the run."""

    goodput: float
    utilisation: float
    blocked_s: float
    is_early: bool


@dataclass(slots=True)
class _Island:
    """What the events of an island say of its newest start, and of all of them."""

    incarnation: int = 0
    inner_step: int = 0
    loss: float | None = None
    tokens: float = 0.0
    curve: Curve = field(default_factory=Curve)
    held_out: Curve = field(default_factory=Curve)
    recent: deque[tuple[float, float, int]] = field(
        default_factory=lambda: deque(maxlen=_RECENT_STEPS)
    )
    began_at: float = 0.0
    last_at: float = 0.0
    inner_s: float = 0.0
    blocked_s: float = 0.0
    in_flight: dict[int, tuple[int, float]] = field(default_factory=dict)
    moved: tuple[int, int] | None = None
    moved_at: float = 0.0
    ended: _Ended | None = None
    last_error: str = "-"
    checkpoints: list[int] = field(default_factory=list)
    num_counted: int = 0

    @property
    def goodput(self) -> float:
        """Share of the wall time of the newest start that was spent in inner steps."""
        if self.ended is not None:
            return self.ended.goodput
        return self.inner_s / max(self.last_at - self.began_at, self.inner_s, 1e-9)

    def tokens_per_s(self) -> float:
        """Rate over the recent steps; 0 before the second."""
        if len(self.recent) < 2:
            return 0.0
        span_s = self.recent[-1][0] - self.recent[0][0]
        return sum(tokens for _, _, tokens in list(self.recent)[1:]) / max(span_s, 1e-9)


@dataclass(slots=True)
class _Attempt:
    """An open attempt at a version of a fragment, and who has sent to it."""

    version: int
    attempt: int
    members: tuple[str, ...]
    at: float
    sent: set[str] = field(default_factory=set)


class RecordedRun:
    """What the events of a run say, so far.

    Args:
        origin: Where they are.
        settings: The run's configuration by dotted key; empty: it is not there.
        fingerprint: Of its identity class; empty: it is not there.
        address: Of its coordinator; empty: not known.

    Attributes:
        num_malformed: Lines that are no events.
        unreadable: Names of files that cannot be read now -> why.
    """

    def __init__(
        self, origin: str, settings: Mapping[str, str], fingerprint: str = "", address: str = ""
    ) -> None:
        """Begin without events."""
        self._origin = origin
        self._settings = settings
        self._fingerprint = fingerprint
        self._address = address
        self._name = settings.get("run.name", "?")
        self._islands: dict[str, _Island] = {}
        self._open: dict[int, _Attempt] = {}
        self._newest: dict[int, VersionRow] = {}
        self._events: deque[EventRow] = deque(maxlen=MOST_EVENTS)
        self._versions: deque[VersionRow] = deque(maxlen=MOST_BARS)
        self._bars: deque[Bar] = deque(maxlen=MOST_BARS)
        self._marks: deque[Mark] = deque(maxlen=MOST_BARS)
        # By themselves: a thousand islands' of one round would leave no room for others.
        self._merges: deque[Mark] = deque(maxlen=MOST_BARS)
        self._alarms: dict[tuple[str, str, str, int], tuple[AlarmRow, float]] = {}
        self._num_rounds = self.num_malformed = 0
        self.unreadable: dict[str, str] = {}
        self._first_at = math.inf
        self._last_at = 0.0

    def add(self, event: Event) -> None:
        """Take an event; one of those of one process, in the order in which it wrote them."""
        try:
            at, kind = _number(event["unix_s"]), _word(event["kind"])
            island = _word(event.get("island", ""))
            self._first_at, self._last_at = min(self._first_at, at), max(self._last_at, at)
            self._name = _word(event.get("run", self._name))
            if kind not in _NOT_LISTED:
                self._events.append(EventRow(at, kind, island, _text(event)))
            if kind in ("alarm", "alarm_cleared"):
                self._on_alarm(kind, event, island or "syncer", at)
            elif island:
                self._of_island(kind, event, island, at)
            else:
                self._of_syncer(kind, event, at)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            self.num_malformed += 1

    def reading(self, read_bytes: int, of_bytes: int, now: float) -> RunView:
        """Show how far the events are read; `add` may be under way in another thread."""
        read, whole = format_bytes(read_bytes), format_bytes(of_bytes)
        return RunView(
            name=self._settings.get("run.name", "?"),
            origin=self._origin,
            is_live=False,
            state="being read",
            tone="plain",
            sentence=f"{read} of {whole} of events read.",
            now=now,
            settings=self._settings,
        )

    def view(self, now: float, *, is_under_way: bool) -> RunView:
        """Show the run.

        Args:
            now: Unix time.
            is_under_way: Whether its coordinator lives on this machine.
        """
        now = now if is_under_way else self._last_at
        state, tone = self._state(is_under_way)
        notices = [f"{name}: {why}" for name, why in sorted(self.unreadable.items())]
        if self.num_malformed:
            lost = counted(self.num_malformed, "line")
            notices.append(f"{lost} of the events could not be read and were left out")
        return RunView(
            name=self._name,
            origin=self._origin,
            is_live=False,
            state=state,
            tone=tone,
            sentence=self._sentence(state, now),
            now=now,
            figures=self._figures(is_under_way, now),
            notices=tuple(notices),
            alarms=tuple(self._alarm_rows(now)),
            islands=tuple(self._island_row(name, now) for name in sorted(self._islands)),
            links=tuple(map(self._link_row, sorted(self._islands))),
            fragments=tuple(
                self._fragment_row(p, now, is_under_way) for p in sorted(self._fragments)
            ),
            versions=tuple(self._versions),
            bars=(*self._bars, *self._open_bars(now)) if is_under_way else tuple(self._bars),
            marks=(*self._marks, *self._merges),
            curves=curve_views({name: i.curve for name, i in self._islands.items()}),
            held_out=curve_views({name: i.held_out for name, i in self._islands.items()}),
            events=tuple(self._events),
            facts=self._facts(),
            settings=self._settings,
        )

    # -- events ---------------------------------------------------------------------------------

    def _of_island(self, kind: str, event: Event, name: str, at: float) -> None:
        island = self._islands.setdefault(name, _Island())
        if kind in _ERRORS:
            island.last_error = f"{kind}: {_word(event[_ERRORS[kind]])}"
        if event.get("island_rank"):
            return
        incarnation = _count(event.get("incarnation", 0))
        if incarnation != island.incarnation:
            island.incarnation, island.ended = incarnation, None
            island.began_at = island.inner_s = island.blocked_s = 0.0
            island.in_flight.clear()
            island.recent.clear()
        match kind:
            case "inner_step":
                self._on_step(island, event, at)
            case "evaluated" if event["parameters"] == "published":
                loss = _number(event["nats_per_byte"])
                island.held_out.add(_count(event["inner_step"]), island.tokens, loss)
            case "fragment_sent":
                p, version = _count(event["fragment_id"]), _count(event["version"])
                island.in_flight[p] = version, at
                opened = self._open.get(p)
                if opened is not None and opened.version == version:
                    opened.sent.add(name)
            case "fragment_merged" | "round_expired":
                p = _count(event["fragment_id"])
                island.in_flight.pop(p, None)
                island.blocked_s += _number(event["blocked_s"])
                if kind == "fragment_merged":
                    version = _count(event["version"])
                    text = f"{name} merged version {version} of fragment {p}"
                    self._merges.append(Mark(p, at, "merged", text))
            case "bytes_moved":
                island.moved = _count(event["bytes_up"]), _count(event["bytes_down"])
                island.moved_at = at
            case "checkpoint_written":
                island.checkpoints.append(_count(event["inner_step"]))
            case "island_resumed" | "island_rejoined":
                island.tokens = island.curve.back_to(_count(event["inner_step"])) or 0.0
            case "island_ended":
                island.ended = _Ended(
                    _number(event["goodput"]),
                    _number(event["utilisation"]),
                    _number(event["blocked_s"]),
                    is_early=not event["digests"],
                )
                island.inner_step = _count(event["inner_step"])

    def _on_step(self, island: _Island, event: Event, at: float) -> None:
        step, tokens = _count(event["inner_step"]), _count(event["num_tokens"])
        duration_s = _number(event["duration_s"])
        if island.curve.last is None and not island.recent:
            island.tokens = float((step - 1) * tokens)  # those before are taken to be like it
        island.tokens += tokens
        island.inner_step, island.last_at = step, at
        island.began_at = island.began_at or at - duration_s
        island.inner_s += duration_s
        island.recent.append((at, duration_s, tokens))
        if event["loss"] is not None:
            island.loss = _number(event["loss"])
            island.curve.add(step, island.tokens, island.loss)

    def _of_syncer(self, kind: str, event: Event, at: float) -> None:
        if kind not in ("round_opened", "round_closed", "round_expired"):
            return
        p, version, attempt = (_count(event[n]) for n in ("fragment_id", "version", "attempt"))
        if kind == "round_opened":
            self._open[p] = _Attempt(version, attempt, _names(event["members"]), at)
            return
        opened = self._open.pop(p, None)
        what = f"fragment {p}, version {version + 1}"
        if kind == "round_expired":
            missing = ", ".join(_names(event["missing"]))
            reason = _word(event["reason"])
            start = at if opened is None else opened.at
            self._bars.append(Bar(p, start, at, "expired", f"{what}: attempt {attempt} expired"))
            self._marks.append(Mark(p, at, "expired", f"{what}: {reason}"))
            how = f"attempt {attempt} expired: {reason}"
            self._versions.append(
                VersionRow(at, p, version + 1, how, "-", missing or "-", seconds(at - start), "-")
            )
            return
        self._on_close(event, p, version, at, what)

    def _on_close(self, event: Event, p: int, version: int, at: float, what: str) -> None:
        members, contributors = _names(event["members"]), _names(event["contributors"])
        waited_s, grace_s, commit_s = (
            _number(event[name]) for name in ("waited_s", "grace_s", "commit_s")
        )
        closed = at - commit_s
        quorum = closed - grace_s
        self._bars.append(Bar(p, closed - waited_s, quorum, "open", f"{what}: open"))
        if grace_s > 0:
            self._bars.append(Bar(p, quorum, closed, "grace", f"{what}: in grace"))
        self._bars.append(Bar(p, closed, at, "merge", f"{what}: merged and written"))
        self._marks.append(Mark(p, at, "published", f"{what} published"))
        why, counted_in = {**dict(event["refused"]), **dict(event["rejected"])}, set(contributors)
        left_out = [
            f"{name} ({_word(why[name])})" if name in why else name
            for name in members
            if name not in counted_in
        ]
        self._num_rounds += 1
        for name in contributors:
            if name in self._islands:
                self._islands[name].num_counted += 1
        row = VersionRow(
            at,
            p,
            version + 1,
            "published" + (", flush" if event["is_flush"] else ""),
            named(contributors, 16),
            named(left_out, 16) or "-",
            seconds(waited_s) + (f", {seconds(grace_s)} of it in grace" if grace_s else ""),
            _word(event["digest"]),
        )
        self._versions.append(row)
        self._newest[p] = row

    def _on_alarm(self, kind: str, event: Event, reporter: str, at: float) -> None:
        alarm, whom, p = _word(event["alarm"]), _word(event["about"]), _count(event["fragment_id"])
        if kind == "alarm_cleared":
            row, _ = self._alarms.get((reporter, alarm, whom, p), (None, 0.0))
            if row is not None:
                self._alarms[reporter, alarm, whom, p] = row, -math.inf
            return
        text = bounded_text(str(event["text"]))
        command = command_in(text, self._address)
        row = AlarmRow(alarm, about(whom, p), text, command, f"by {reporter}", True)
        self._alarms[reporter, alarm, whom, p] = row, at

    # -- views ----------------------------------------------------------------------------------

    @property
    def _fragments(self) -> set[int]:
        return self._newest.keys() | self._open.keys()

    @property
    def _have_ended(self) -> bool:
        """Whether the newest start of every island has said its sums: those stopped, too."""
        return bool(self._islands) and all(i.ended for i in self._islands.values())

    def _state(self, is_under_way: bool) -> tuple[str, Tone]:
        if not self._islands and not self._fragments:
            return "no events yet", "plain"
        if self._have_ended:
            is_whole = any(i.ended and not i.ended.is_early for i in self._islands.values())
            return ("finished", "good") if is_whole else ("stopped", "plain")
        return ("running", "good") if is_under_way else ("not at work here", "warning")

    def _sentence(self, state: str, now: float) -> str:
        num = len(self._islands)
        versions = [row.version for row in self._newest.values()]
        published = (
            f"published versions {min(versions)} to {max(versions)}"
            if versions
            else ("no version published")
        )
        if state == "no events yet":
            return "There are no events here yet."
        if state in ("finished", "stopped"):
            steps = max(i.inner_step for i in self._islands.values())
            how = "has finished" if state == "finished" else "was stopped"
            made = f"{counted(num, 'island')}, {counted(steps, 'inner step')}"
            return f"The run {how}: {made}, {published}."
        if state == "running":
            at_work = [n for n, i in self._islands.items() if now - i.last_at < _AT_WORK_S]
            parts = [f"{len(at_work)} of {num} islands train"]
            for p, opened in sorted(self._open.items()):
                missing = [name for name in opened.members if name not in opened.sent]
                if missing and opened.sent:
                    parts.append(f"fragment {p} waits for {named(missing)}")
            return "; ".join(parts) + "."
        ended = sum(island.ended is not None for island in self._islands.values())
        came = f"{ended} of {num} islands came to the end" if num else "islands have no events here"
        return (
            f"No coordinator of this run is at work on this machine, and {came}: it was stopped, "
            f"has failed, or goes on elsewhere; {published}."
        )

    def _figures(self, is_under_way: bool, now: float) -> tuple[Figure, ...]:
        islands = list(self._islands.values())
        at_work = [i for i in islands if is_under_way and now - i.last_at < _AT_WORK_S]
        tokens = sum(island.tokens for island in islands)
        figures = [Figure("tokens", f"{tokens:,.0f}", "of all islands")]
        if at_work:
            rate = sum(island.tokens_per_s() for island in at_work)
            figures.append(Figure("tokens/s", f"{rate:,.0f}", "of the last inner steps"))
        elif self._last_at > self._first_at:
            rate = tokens / (self._last_at - self._first_at)
            figures.append(Figure("tokens/s", f"{rate:,.0f}", "from the first event to the last"))
        figures.append(
            Figure(
                "goodput",
                median_text((i.goodput for i in islands), ".1%"),
                "wall time in inner steps, median of islands",
            )
        )
        if utilisation := [i.ended.utilisation for i in islands if i.ended]:
            text = median_text(utilisation, ".1%")
            figures.append(Figure("utilisation", text, "median of islands"))
        waited = (i.ended.blocked_s if i.ended else i.blocked_s for i in islands)
        figures.append(waiting_figure(waited))
        losses = [i.loss for i in islands if i.loss is not None]
        held_out = [i.held_out.last for i in islands if i.held_out.last is not None]
        worst = max(held_out, default=None)
        figures += loss_figures(losses, worst, "of published parameters")
        if (left_s := self._left_s(at_work)) is not None:
            figures.append(Figure("time left", format_duration(left_s), "at the present rate"))
        figures.append(Figure("rounds", f"{self._num_rounds:,}", "closed, by these events"))
        return tuple(figures)

    def _left_s(self, at_work: Sequence[_Island]) -> float | None:
        """Give the seconds to the end at the rate of the last steps; None: it is not known."""
        text = self._settings.get("run.inner_steps", "")
        is_known = text.isdecimal() and len(text) < 16
        if not is_known or self._settings.get("outer.merge") == "on_arrival":
            return None
        left = [
            (int(text) - i.inner_step) * (i.recent[-1][0] - i.recent[0][0]) / (len(i.recent) - 1)
            for i in at_work
            if len(i.recent) > 1
        ]
        return max(left, default=None)

    def _alarm_rows(self, now: float) -> Iterable[AlarmRow]:
        rows = [
            AlarmRow(r.kind, r.about, r.text, r.command, r.when, now - at <= _ALARM_S)
            for r, at in self._alarms.values()
        ]
        return sorted(rows, key=lambda row: not row.holds)

    def _island_row(self, name: str, now: float) -> IslandRow:
        island = self._islands[name]
        state, tone = "at work", "good"
        if island.ended is not None:
            state = "ended"
        elif now - island.last_at >= _AT_WORK_S:
            state, tone = "silent", "warning"
        waits = [
            f"fragment {p}, version {version + 1}, for {seconds(max(0.0, now - at))}"
            for p, (version, at) in sorted(island.in_flight.items())
        ]
        moved = island.moved or (None, None)
        up, down = ("-" if num is None else format_bytes(num) for num in moved)
        steps = [duration_s for _, duration_s, _ in island.recent]
        return IslandRow(
            name,
            state,
            "good" if tone == "good" else "warning",
            incarnation=str(island.incarnation or "-"),
            inner_step=f"{island.inner_step:,}",
            step_time=f"{statistics.median(steps):.3g} s" if steps else "-",
            loss="-" if island.loss is None else f"{island.loss:.4f}",
            tokens_per_s=f"{rate:,.0f}" if (rate := island.tokens_per_s()) else "-",
            waits_for="-" if island.ended else named(waits, 2) or "-",
            in_flight="-" if island.ended else str(len(island.in_flight)),
            up=up,
            down=down,
            blocked=seconds(island.ended.blocked_s if island.ended else island.blocked_s),
            utilisation=f"{island.ended.utilisation:.1%}" if island.ended else "-",
            share=f"{island.num_counted:,} of {counted(self._num_rounds, 'round')}"
            if self._num_rounds
            else "-",
            report=ago(now - island.last_at) if island.last_at else "-",
            last_error=island.last_error,
        )

    def _link_row(self, name: str) -> LinkRow:
        """Say what a link has carried on average: events have sums alone."""
        island = self._islands[name]
        span_s = island.moved_at - island.began_at
        if island.moved is None or not island.began_at or span_s <= 0:
            return LinkRow(name)
        up_bps, down_bps = (8 * num_bytes / span_s for num_bytes in island.moved)
        part = LinkPart("syncers", up_bps, down_bps)
        return LinkRow(name, up=rate_text(up_bps), down=rate_text(down_bps), parts=(part,))

    def _fragment_row(self, p: int, now: float, is_under_way: bool) -> FragmentRow:
        newest, opened = self._newest.get(p), self._open.get(p)
        phase = "waiting" if is_under_way else "ended"
        if is_under_way and opened is not None:
            phase = f"open for {seconds(max(0.0, now - opened.at))}"
        return FragmentRow(
            p,
            "-" if newest is None else str(newest.version),
            "-" if opened is None else str(opened.attempt),
            phase,
            "plain",
            "-" if newest is None else ago(now - newest.at),
            "-" if newest is None else newest.digest,
            "-" if newest is None else newest.contributors,
        )

    def _open_bars(self, now: float) -> Iterable[Bar]:
        for p, opened in self._open.items():
            yield Bar(p, opened.at, now, "open", f"fragment {p}, version {opened.version + 1}")

    def _facts(self) -> tuple[Figure, ...]:
        written = [set(island.checkpoints) for island in self._islands.values()]
        complete = sorted(set.intersection(*written)) if written else []
        return (
            Figure("run", self._name),
            Figure("state directory", self._origin),
            Figure("coordinator", self._address or "-", "that it had last"),
            Figure("fingerprint", self._fingerprint or "-", "of the identity configuration"),
            Figure(
                "checkpoints written",
                ", ".join(map(str, complete)) or "-",
                "inner steps of which all islands here have written their part",
            ),
        )


def _number(value: Any) -> float:
    """Read a finite number of JSON.

    Raises:
        ValueError: If it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"no number: {value!r:.50}")
    return float(value)


def _count(value: Any) -> int:
    """Read a counter of JSON; -1 stands for none.

    Raises:
        ValueError: If it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 2**63:
        raise ValueError(f"no counter: {value!r:.50}")
    return value


def _names(value: Any) -> tuple[str, ...]:
    """Read a list of names of JSON."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"no list: {value!r:.50}")
    return tuple(map(_word, value))


def _word(value: Any) -> str:
    """Write a name or a short text of JSON; some JSON strings cannot be encoded as they are."""
    return bounded_text(str(value), _MOST_SHOWN)


def _text(event: Event) -> str:
    """Write what an event has besides who wrote it and when."""
    rank = [f"rank {event['island_rank']}"] if event.get("island_rank") else []
    said = [f"{name} {_shown(name, v)}" for name, v in event.items() if name not in _CONTEXT]
    return bounded_text(", ".join(rank + said))


def _shown(name: str, value: Any) -> str:
    if name == "digest":
        return str(value)[:_DIGEST]
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, Mapping):
        return " ".join(f"{key}: {each}" for key, each in value.items()) or "none"
    return str(value)
