"""What an operator sees of a run: pure functions from a `StatusReply` to rich renderables."""

from __future__ import annotations

import math
from collections.abc import Callable

from rich.console import Group
from rich.text import Text

from diloco.cli.terminal.fitted_table import FittedTable
from diloco.page.run_view import LinkRow, first_of, link_row
from diloco.protos.control_pb2 import FragmentStatus, IslandStatus, StatusReply, SyncerStatus
from diloco.transport.units import format_bytes, format_duration

_STATE_STYLE = {"running": "green", "finished": "bold green", "failed": "bold red"}
_DIGEST_CHARACTERS = 12
_UNKNOWN = "-"
#: State of an island that has joined and does not train yet (`IslandState`).
_WAITING = "waiting"
#: Leases that end without reports.
_RUNNING = frozenset({"active", "draining"})


def status_view(reply: StatusReply) -> Group:
    """Show all: run, islands, links, fragments, several syncers, refusals, moves, away, alarms."""
    texts = [refusals_line(reply)] if reply.refusals else []
    texts += [Text(line, style="yellow") for line in reply.moves]
    texts += [Text(line, style="red") for line in reply.away]
    texts += [Text(line, style="bold red") for line in alarm_lines(reply)]
    tables = [islands_table(reply), fragments_table(reply)]
    if any(island.last_report.HasField("link") for island in reply.islands):
        tables.insert(1, links_table(reply))
    if len(reply.syncers) > 1:
        tables.append(syncers_table(reply))
    texts.insert(0, run_line(reply))
    for text in texts:  # whatever the console does with others
        text.no_wrap, text.overflow = False, "fold"
    return Group(texts[0], *tables, *texts[1:])


def run_line(reply: StatusReply) -> Text:
    """Show the run's name, state, syncer, generation, timeline, checkpoints and merged tokens.

    A run that was never resumed has no word on its timeline, one that inner steps end none on its
    tokens (`_tokens_text`). Below stands why it failed.
    """
    line = Text.assemble(
        ("run ", "dim"),
        (reply.run, "bold"),
        "  ",
        (reply.state, _STATE_STYLE.get(reply.state, "yellow")),
        ("  syncer ", "dim"),
        reply.syncer_address or "not there yet",
        ("  epoch ", "dim"),
        str(reply.syncer_epoch),
    )
    line.append("  generation ", "dim").append(str(reply.generation))
    if reply.is_paused:
        line.append("  no round opens", "yellow")
    if reply.total_tokens:
        line.append("  tokens merged ", "dim").append(_tokens_text(reply))
    if reply.timeline:
        line.append("  timeline ", "dim").append(str(reply.timeline))
    if reply.checkpoint_steps:
        line.append("  checkpoints ", "dim").append(", ".join(map(str, reply.checkpoint_steps)))
    if reply.message:
        line.append(f"\n{reply.message}", "red")
    return line


def islands_table(reply: StatusReply) -> FittedTable:
    """Show one row an island, in the order of island slots."""
    headings = [
        "island", "incarnation", "lease", "state", "inner step", "loss", "tokens/s", "in flight",
        "up", "down", "blocked", "utilisation", "left", "report",
    ]  # fmt: skip
    islands = sorted(reply.islands, key=lambda island: island.island_slot)
    rows = [_island_cells(island, reply.inner_steps) for island in islands]
    return FittedTable.with_rows(headings, rows, {1, *range(4, len(headings))})


def links_table(reply: StatusReply) -> FittedTable:
    """Show one row an island that reports on its link: what that does now, and memory."""
    islands = [island for island in reply.islands if island.last_report.HasField("link")]
    columns: dict[str, Callable[[LinkRow], object]] = {
        "link": lambda row: row.island,
        "sends": lambda row: row.up,
        "receives": lambda row: row.down,
        "round trip": lambda row: row.round_trip,
        "full": lambda row: row.full,
        "failed": lambda row: row.failed,
        "memory": lambda row: row.memory,
        "MFU": lambda row: row.mfu,
    }
    rows = list(map(link_row, islands))
    if all(row.mfu == _UNKNOWN for row in rows):
        del columns["MFU"]
    return FittedTable.of(rows, columns)


def fragments_table(reply: StatusReply) -> FittedTable:
    """Show one row a fragment: its newest published version and its current attempt."""
    headings = ["fragment", "version", "attempt", "phase", "published", "digest", "contributors"]
    rows = [(p, *_fragment_cells(fragment)) for p, fragment in _fragments(reply)]
    return FittedTable.with_rows(headings, rows, {1, 2, 4})


def _fragments(reply: StatusReply) -> list[tuple[int, FragmentStatus | None]]:
    """Give every fragment of the run, None where its syncer has not reported."""
    known = {fragment.fragment_id: fragment for fragment in reply.fragments}
    there = known.keys() | {p for syncer in reply.syncers for p in syncer.fragment_ids}
    return [(p, known.get(p)) for p in sorted(there)]


def syncers_table(reply: StatusReply) -> FittedTable:
    """Show one row a syncer: one that does not report stalls its own fragments."""
    columns: dict[str, Callable[[SyncerStatus], object]] = {
        "syncer": lambda syncer: syncer.name,
        "address": lambda syncer: syncer.address or _UNKNOWN,
        "epoch": lambda syncer: syncer.syncer_epoch or _UNKNOWN,
        "fragments": lambda syncer: ", ".join(map(str, syncer.fragment_ids)) or _UNKNOWN,
        "report": lambda s: f"{_seconds(s.age_s)} ago" if s.age_s < math.inf else "never",
    }
    return FittedTable.of(reply.syncers, columns)


def refusals_line(reply: StatusReply) -> Text:
    """Show what coordinator and syncer have refused since they started, by whom and why."""
    line = Text("refused", style="yellow")
    for refusal in reply.refusals:
        who = refusal.island or "unknown"
        line.append(f"  {who} {refusal.cause} {refusal.count}").append(
            f" ({refusal.service})", "dim"
        )
    return line


def alarm_lines(reply: StatusReply) -> list[str]:
    """Say each alarm in a line: what holds, then what held a while ago."""
    lines = []
    for status in sorted(reply.alarms, key=lambda status: not status.holds):
        alarm = status.alarm
        about = [f"island {alarm.island}"] if alarm.island else []
        about += [f"fragment {alarm.fragment_id}"] if alarm.fragment_id >= 0 else []
        times = f"{alarm.count} times" if alarm.count > 1 else "once"
        last = "it holds" if status.holds else f"last {_seconds(status.last_age_s)} ago"
        lines.append(
            f"alarm: {', '.join([alarm.kind, *about])}: {alarm.text} ({status.reporter}, {times}, "
            f"first {_seconds(status.first_age_s)} ago, {last})"
        )
    return lines


def run_text(reply: StatusReply) -> str:
    """Say in a line where the run and its islands stand; in one more who is away, each alarm."""
    islands = "; ".join(
        f"{island.island} {island_text(island, reply.inner_steps)}"
        for island in sorted(reply.islands, key=lambda island: island.island_slot)
    )
    stands = [fragment for _, fragment in _fragments(reply)]
    versions = ", ".join(str(f.version) if f else _UNKNOWN for f in stands if any(stands))
    tokens = f"; tokens merged {_tokens_text(reply)}" if reply.total_tokens else ""
    line = f"{reply.state}: {islands}; versions {versions or 'none yet'}{tokens}"
    holding = [status for status in reply.alarms if status.holds]
    return "\n".join([line, *reply.away, *alarm_lines(StatusReply(alarms=holding))])


def _tokens_text(reply: StatusReply) -> str:
    """Say how far a run is that tokens end: the least that a fragment has merged, and solo rounds.

    The least is not known while a fragment has not been reported. The share of solo rounds is of
    the rounds since the syncer's start; there is none before the first.
    """
    merged = [fragment.merged_tokens for _, fragment in _fragments(reply) if fragment]
    is_known = len(merged) == len(_fragments(reply))
    least = f"{min(merged, default=0):,}" if is_known else _UNKNOWN
    text = f"{least} of {reply.total_tokens:,}"
    if rounds := sum(fragment.rounds for fragment in reply.fragments):
        solo = sum(fragment.solo_rounds for fragment in reply.fragments) / rounds
        text += f" ({solo:.0%} of rounds solo)"
    return text


def island_text(island: IslandStatus, inner_steps: int) -> str:
    """Say in a few words where an island stands; before its first step, what it has moved.

    `inner_steps` is where the run ends, 0 where tokens end it.
    """
    if not island.HasField("last_report"):
        return "joined" if island.incarnation else "not joined"
    report = island.last_report
    if report.state == _WAITING:
        moved = f"{format_bytes(report.bytes_up)} up, {format_bytes(report.bytes_down)} down"
        return f"{report.state}, {moved}"
    loss = f"loss {report.loss_nats:.3f} " if report.loss_nats else ""  # 0: it was not told
    left = f", {format_duration(report.left_s)} left" if report.left_s else ""
    return (
        f"{report.state}, step {_step(report.inner_step, inner_steps)} "
        f"{loss}{report.tokens_per_s:,.0f} tokens/s{left}"
    )


def _island_cells(island: IslandStatus, inner_steps: int) -> tuple[str, ...]:
    name, incarnation = island.island, str(island.incarnation or _UNKNOWN)
    if not island.HasField("last_report"):
        state = "joined" if island.incarnation else "not joined"
        return (name, incarnation, _lease(island), state, *[_UNKNOWN] * 10)
    report = island.last_report
    return (
        name,
        incarnation,
        _lease(island),
        report.state,
        _step(report.inner_step, inner_steps),
        f"{report.loss_nats:.4f}" if report.loss_nats else _UNKNOWN,
        f"{report.tokens_per_s:,.0f}",
        str(report.fragments_in_flight),
        format_bytes(report.bytes_up),
        format_bytes(report.bytes_down),
        _seconds(report.blocked_s),
        f"{report.utilisation:.1%}",
        format_duration(report.left_s) if report.left_s else _UNKNOWN,
        f"{_seconds(island.report_age_s)} ago",
    )


def _step(inner_step: int, inner_steps: int) -> str:
    """Write an inner step, and of how many where these end the run."""
    return f"{inner_step}/{inner_steps}" if inner_steps else str(inner_step)


def _lease(island: IslandStatus) -> str:
    """Say how an island stands in the run, and for how long if it stays silent."""
    if island.lease not in _RUNNING:
        return island.lease or _UNKNOWN
    return f"{island.lease} {_seconds(island.lease_left_s)}"


def _fragment_cells(fragment: FragmentStatus | None) -> tuple[str, ...]:
    if fragment is None:
        return (_UNKNOWN, _UNKNOWN, "no report yet", _UNKNOWN, _UNKNOWN, _UNKNOWN)
    return (
        str(fragment.version),
        str(fragment.attempt),
        _phase(fragment),
        _UNKNOWN if fragment.phase == "unfounded" else f"{_seconds(fragment.age_s)} ago",
        fragment.digest[:_DIGEST_CHARACTERS] or _UNKNOWN,
        first_of(fragment.contributors, fragment.num_contributors) or _UNKNOWN,
    )


def _phase(fragment: FragmentStatus) -> str:
    """Write a phase, and for whom its round waits, at most how long."""
    if not fragment.waits_for:
        return fragment.phase
    at_most = f" {_seconds(fragment.left_s)}" if fragment.left_s else ""
    return f"{fragment.phase}{at_most} for {first_of(fragment.waits_for, fragment.num_waits_for)}"


def _seconds(duration_s: float) -> str:
    """Write seconds with one unit and one decimal, so that a live table does not jump."""
    return f"{duration_s:,.1f} s"
