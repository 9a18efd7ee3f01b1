"""A live run as its page shows it, from what the coordinator answers again and again. Pure.

What the answers do not have is not shown. The timeline, the curves and the events of a live run
are what was seen from one answer to the next: they have gaps while nobody looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from diloco.page.run_view import (
    HOUR_S,
    MOST_BARS,
    MOST_EVENTS,
    AlarmRow,
    Bar,
    Curve,
    EventRow,
    Figure,
    FragmentRow,
    IslandRow,
    Mark,
    RunView,
    Tone,
    VersionRow,
    about,
    ago,
    command_in,
    counted,
    curve_views,
    first_of,
    is_silent,
    link_row,
    loss_figures,
    median_text,
    named,
    seconds,
    waiting_figure,
)
from diloco.protos.control_pb2 import (
    AlarmStatus,
    FragmentStatus,
    IslandStatus,
    ReportRequest,
    StatusReply,
)
from diloco.transport.units import format_bytes, format_duration

#: Seconds between two answers above which what was in between is not known.
_GAP_S = 5.0
#: States of an island that makes inner steps, or sends the last of them.
_WORKING = ("training", "flushing")
_TONES: dict[str, Tone] = {
    "running": "good", "finished": "good", "failed": "bad", "paused": "warning",
    "stopping": "warning", "waiting for islands": "warning",
}  # fmt: skip
#: Phases of a round that the timeline shows, as it names them.
_SHOWN_PHASES = {"open": "open", "grace": "grace", "closing": "merge", "expiring": "expired"}
_PHASE_TONES: dict[str, Tone] = {"damaged": "bad", "lost": "bad", "grace": "warning"}


class LiveRun:
    """What was seen of a live run.

    Args:
        address: Of its coordinator.
    """

    def __init__(self, address: str) -> None:
        """Begin with nothing seen."""
        self._address = address
        self._reply: StatusReply | None = None
        self._seen_at = 0.0
        self._events: deque[EventRow] = deque(maxlen=MOST_EVENTS)
        self._versions: deque[VersionRow] = deque(maxlen=MOST_BARS)
        self._bars: deque[Bar] = deque(maxlen=MOST_BARS)
        self._newest_bars: dict[int, Bar] = {}
        self._marks: deque[Mark] = deque(maxlen=MOST_BARS)
        self._curves: dict[str, Curve] = {}

    def observe(self, reply: StatusReply, unix_s: float) -> None:
        """Take an answer of the coordinator."""
        last, since_s = self._reply, unix_s - self._seen_at
        for island in reply.islands:
            report = island.last_report
            if report.loss_nats and report.tokens:
                curve = self._curves.setdefault(island.island, Curve())
                curve.add(report.inner_step, float(report.tokens), report.loss_nats)
        if last is not None:
            self._events.extend(_changes(last, reply, unix_s))
            self._see_rounds(last, reply, unix_s, since_s)
        self._reply, self._seen_at = reply, unix_s

    def view(self, problem: str = "") -> RunView:
        """Show the run as it was last seen; `problem`: why the coordinator does not answer now."""
        assert self._reply is not None, "nothing was seen yet"
        reply = self._reply
        return RunView(
            name=reply.run,
            origin=self._address,
            is_live=True,
            state=reply.state,
            tone=_TONES.get(reply.state, "plain"),
            sentence=sentence(reply),
            now=self._seen_at,
            problem=problem,
            figures=_figures(reply),
            notices=(*reply.away, *reply.moves, *_refusals(reply)),
            alarms=tuple(_alarm(each, self._address) for each in reply.alarms),
            islands=_islands(reply),
            links=tuple(link_row(i, [s.name for s in reply.syncers]) for i in reply.islands),
            fragments=_fragments(reply),
            versions=tuple(self._versions),
            bars=(*self._bars, *self._newest_bars.values()),
            marks=tuple(self._marks),
            curves=curve_views(self._curves),
            events=tuple(self._events),
            facts=_facts(reply),
        )

    def _see_rounds(
        self, last: StatusReply, reply: StatusReply, unix_s: float, since_s: float
    ) -> None:
        before = {fragment.fragment_id: fragment for fragment in last.fragments}
        for fragment in reply.fragments:
            p = fragment.fragment_id
            was = before.get(p)
            if was is None:
                continue
            phase = _SHOWN_PHASES.get(was.phase)
            if phase is not None and since_s < _GAP_S:
                text = f"fragment {p}, version {was.version}, {phase}"
                self._add_bar(Bar(p, unix_s - since_s, unix_s, phase, text))
            if fragment.version > was.version:
                at = unix_s - fragment.age_s
                mark = f"version {fragment.version} of fragment {p} published"
                self._marks.append(Mark(p, at, "published", mark))
                self._versions.append(_version(fragment, at))
            elif fragment.version == was.version and fragment.attempt > was.attempt:
                text = f"attempt {was.attempt} at version {was.version + 1} of fragment {p} expired"
                self._marks.append(Mark(p, unix_s, "expired", text))

    def _add_bar(self, bar: Bar) -> None:
        """Add a bar, as a part of the one that it goes on with."""
        last = self._newest_bars.get(bar.fragment_id)
        if last is not None and last.text == bar.text and last.end_s >= bar.start_s - 1e-3:
            bar = Bar(bar.fragment_id, last.start_s, bar.end_s, bar.phase, bar.text)
        elif last is not None:
            self._bars.append(last)
        self._newest_bars[bar.fragment_id] = bar


def sentence(reply: StatusReply) -> str:
    """Say what is going on in one sentence."""
    training = [i.island for i in reply.islands if _is_at_work(i)]
    num = len(reply.islands)
    if reply.state == "failed":
        return f"The run has failed: {reply.message or f'exit code {reply.exit_code}'}"
    if reply.state == "finished":
        return f"The run has finished: {counted(num, 'island')}, {_versions_text(reply)}."
    if reply.state == "stopped":
        return f"The run is stopped; {_checkpoint_text(reply)}."
    if reply.state == "waiting for islands":
        absent = [i.island for i in reply.islands if not i.incarnation]
        has = "has" if len(absent) == 1 else "have"
        return f"{num - len(absent)} of {num} islands have joined; {named(absent)} {has} not."
    parts = [f"{len(training)} of {num} islands train"]
    if idle := [i.island for i in reply.islands if not _is_at_work(i)]:
        parts.append(f"{named(idle)} {'does' if len(idle) == 1 else 'do'} not")
    if reply.state == "stopping":
        parts.insert(0, "the run is being stopped")
    if reply.is_paused:
        parts.append("no round opens until diloco unpause")
    if damaged := [str(f.fragment_id) for f in reply.fragments if f.damage]:
        parts.append(f"damaged and not served: fragment {named(damaged)}")
    parts += _rounds_text(reply)
    if reply.message:
        parts.append(reply.message)
    return "; ".join(parts)[:1].upper() + "; ".join(parts)[1:] + "."


def _rounds_text(reply: StatusReply) -> Iterator[str]:
    """Say where rounds stand: of those in grace, whom they wait for, and how long."""
    of_phase: dict[str, list[FragmentStatus]] = {}
    for fragment in reply.fragments:
        of_phase.setdefault(fragment.phase, []).append(fragment)
    grace: dict[str, list[FragmentStatus]] = {}
    for fragment in of_phase.get("grace", ()):
        grace.setdefault(named(fragment.waits_for) or "the others", []).append(fragment)
    for islands, waiting in grace.items():
        numbers = named([str(fragment.fragment_id) for fragment in waiting])
        left = seconds(max(fragment.left_s for fragment in waiting))
        yield f"fragment {numbers} waits for {islands}, {left} of grace left"
    if opened := of_phase.get("open"):
        yield f"{counted(len(opened), 'round')} open"
    if merging := of_phase.get("closing"):
        yield f"{counted(len(merging), 'fragment')} being merged"


def _versions_text(reply: StatusReply) -> str:
    versions = [fragment.version for fragment in reply.fragments]
    if not versions:
        return "no version reported"
    low, high = min(versions), max(versions)
    return f"published versions {low}" if low == high else f"published versions {low} to {high}"


def _checkpoint_text(reply: StatusReply) -> str:
    steps = reply.checkpoint_steps
    return f"its newest checkpoint is {steps[-1]}" if steps else "it has no complete checkpoint"


def _is_at_work(island: IslandStatus) -> bool:
    report = island.last_report
    return report.state in _WORKING and not is_silent(island)


def _figures(reply: StatusReply) -> tuple[Figure, ...]:
    at_work = [island.last_report for island in reply.islands if _is_at_work(island)]
    held_out = {
        h.checkpoint: h.nats_per_byte for i in reply.islands for h in i.last_report.held_out
    }
    newest = max(held_out, default=-1)
    figures = [
        Figure("tokens/s", f"{sum(r.tokens_per_s for r in at_work):,.0f}", "of islands at work"),
        Figure(
            "utilisation",
            median_text((r.utilisation for r in at_work), ".1%"),
            "median of islands at work",
        ),
        waiting_figure(island.last_report.blocked_s for island in reply.islands),
        *loss_figures(
            (r.loss_nats for r in at_work if r.loss_nats),
            held_out.get(newest),
            f"at checkpoint {newest}",
        ),
        Figure(
            "time left",
            format_duration(max((r.left_s for r in at_work), default=0.0))
            if any(r.left_s for r in at_work)
            else "-",
            "of the slowest island",
        ),
    ]
    if reply.total_tokens:
        merged = min((f.merged_tokens for f in reply.fragments), default=0)
        note = f"of {reply.total_tokens:,}, the least of all fragments"
        figures.append(Figure("tokens merged", f"{merged:,}", note))
    if rounds := sum(fragment.rounds for fragment in reply.fragments):
        solo = sum(fragment.solo_rounds for fragment in reply.fragments)
        figures.append(Figure("rounds", f"{rounds:,}", f"since the syncer's start, {solo} solo"))
    return tuple(figures)


def _refusals(reply: StatusReply) -> Iterator[str]:
    for each in reply.refusals:
        who = each.island or "an unknown caller"
        times = counted(each.count, "time")
        yield f"the {each.service} has refused {who} {times}: {each.cause}"


def _alarm(status: AlarmStatus, address: str) -> AlarmRow:
    alarm = status.alarm
    last = "it holds" if status.holds else f"last {ago(status.last_age_s)}"
    return AlarmRow(
        alarm.kind,
        about(alarm.island, alarm.fragment_id),
        alarm.text,
        command_in(alarm.text, address),
        f"by {status.reporter}, first {ago(status.first_age_s)}, {last}",
        status.holds,
    )


def _islands(reply: StatusReply) -> tuple[IslandRow, ...]:
    newest = [
        set(f.contributors)
        for f in reply.fragments
        if f.contributors and f.num_contributors <= len(f.contributors)
    ]
    errors = {
        island.island: next((t for t in reply.away if f"island {island.island} " in t), "-")
        for island in reply.islands
    }
    return tuple(
        _island(island, reply.inner_steps, newest, errors[island.island])
        for island in sorted(reply.islands, key=lambda island: island.island_slot)
    )


def _island(
    island: IslandStatus, inner_steps: int, newest: list[set[str]], error: str
) -> IslandRow:
    name, incarnation = island.island, str(island.incarnation or "-")
    lease = island.lease or "-"
    if lease in ("active", "draining"):
        lease = f"{lease}, {seconds(island.lease_left_s)} left"
    if not island.HasField("last_report"):
        state = "joined" if island.incarnation else "not joined"
        return IslandRow(name, state, "plain", lease, incarnation, last_error=error)
    report = island.last_report
    counted_in = sum(name in contributors for contributors in newest)
    is_bad = report.state == "failed" or island.lease in ("lapsed", "kicked")
    tone: Tone = "bad" if is_bad else "good" if _is_at_work(island) else "warning"
    is_silent = report.state in _WORKING and not _is_at_work(island)
    return IslandRow(
        name,
        f"silent, was {report.state}" if is_silent else report.state,
        tone,
        lease,
        incarnation,
        inner_step=f"{report.inner_step:,}" + (f" of {inner_steps:,}" if inner_steps else ""),
        step_time=f"{report.step_s:.3g} s" if report.step_s else "-",
        loss=f"{report.loss_nats:.4f}" if report.loss_nats else "-",
        tokens_per_s=f"{report.tokens_per_s:,.0f}",
        waits_for=_waits_for(report),
        in_flight=str(report.fragments_in_flight),
        up=format_bytes(report.bytes_up),
        down=format_bytes(report.bytes_down),
        blocked=seconds(report.blocked_s),
        utilisation=f"{report.utilisation:.1%}",
        share=f"{counted_in} of {counted(len(newest), 'newest version')}" if newest else "-",
        left=format_duration(report.left_s) if report.left_s else "-",
        report=ago(island.report_age_s),
        last_error=report.message or error,
    )


def _waits_for(report: ReportRequest) -> str:
    if report.transfer.is_requested:
        return "an inner optimizer of another island"
    if report.cut.is_being_written:
        return "its part of a checkpoint to be written"
    if report.has_hold:
        return f"the stop after inner step {report.hold_step}"
    return "the run to begin" if report.state == "waiting" else "-"


def _fragments(reply: StatusReply) -> tuple[FragmentRow, ...]:
    owner = {p: syncer.name for syncer in reply.syncers for p in syncer.fragment_ids}
    known = {fragment.fragment_id: fragment for fragment in reply.fragments}
    rows = []
    for p in sorted(owner.keys() | known.keys()):
        fragment = known.get(p)
        if fragment is None:
            row = FragmentRow(p, "-", "-", "no report yet", "warning", "-", "-", "-")
        else:
            row = FragmentRow(
                p,
                str(fragment.version),
                str(fragment.attempt),
                fragment.damage or fragment.phase,
                "bad" if fragment.damage else _PHASE_TONES.get(fragment.phase, "plain"),
                "-" if fragment.phase == "unfounded" else ago(fragment.age_s),
                fragment.digest or "-",
                _contributors(fragment) or "-",
                owner.get(p, "-"),
            )
        rows.append(row)
    return tuple(rows)


def _contributors(fragment: FragmentStatus) -> str:
    return first_of(fragment.contributors, fragment.num_contributors)


def _version(fragment: FragmentStatus, at: float) -> VersionRow:
    return VersionRow(
        at,
        fragment.fragment_id,
        fragment.version,
        "published",
        _contributors(fragment) or "-",
        "-",
        "-",
        fragment.digest,
    )


def _changes(last: StatusReply, reply: StatusReply, at: float) -> Iterator[EventRow]:
    """Say what is different between two answers."""
    if last.state != reply.state:
        yield EventRow(at, "state", "", f"{last.state}, then {reply.state}. {reply.message}")
    if last.timeline != reply.timeline:
        yield EventRow(at, "timeline", "", f"the run went back: timeline {reply.timeline}")
    before = {island.island: island for island in last.islands}
    for island in reply.islands:
        was = before.get(island.island, IslandStatus())
        name, report = island.island, island.last_report
        if was.lease != island.lease:
            yield EventRow(at, "lease", name, f"{was.lease or 'none'}, then {island.lease}")
        if was.incarnation != island.incarnation:
            yield EventRow(at, "start", name, f"start {island.incarnation} has joined")
        if was.last_report.state != report.state:
            yield EventRow(at, "island state", name, f"{report.state} {report.message}".strip())
    for steps in sorted(set(reply.checkpoint_steps) - set(last.checkpoint_steps)):
        yield EventRow(at, "checkpoint", "", f"checkpoint {steps} is complete")
    held = {_about(each) for each in last.alarms if each.holds}
    for each in reply.alarms:
        if each.holds and _about(each) not in held:
            text = f"{each.alarm.kind}: {each.alarm.text}"
            yield EventRow(at, "alarm", each.alarm.island, text)
    for text in reply.away:
        if text not in last.away:
            yield EventRow(at, "away", "", text)
    versions = {f.fragment_id: f.version for f in last.fragments}
    for f in reply.fragments:
        if f.version > versions.get(f.fragment_id, f.version):
            text = f"version {f.version} of fragment {f.fragment_id}, by {_contributors(f)}"
            yield EventRow(at, "version", "", text)


def _about(status: AlarmStatus) -> tuple[str, str, int]:
    return status.alarm.kind, status.alarm.island, status.alarm.fragment_id


def _facts(reply: StatusReply) -> tuple[Figure, ...]:
    facts = [
        Figure("run", reply.run),
        Figure("timeline", str(reply.timeline), "how often it went back to a checkpoint"),
        Figure("generation", str(reply.generation), "counter of changes of who is live"),
        Figure("begins at inner step", str(reply.start_step)),
        Figure("ends after inner step", f"{reply.inner_steps:,}" if reply.inner_steps else "-"),
        Figure("ends after tokens", f"{reply.total_tokens:,}" if reply.total_tokens else "-"),
        Figure("checkpoints", ", ".join(map(str, reply.checkpoint_steps)) or "none complete"),
    ]
    for syncer in reply.syncers:
        heard = f"reported {ago(syncer.age_s)}" if syncer.age_s < HOUR_S * 24 else "silent"
        owns = ", ".join(map(str, syncer.fragment_ids)) or "none"
        note = f"epoch {syncer.syncer_epoch or '-'}, {heard}, fragments {owns}"
        facts.append(Figure(f"syncer {syncer.name}", syncer.address or "-", note))
    return tuple(facts)
