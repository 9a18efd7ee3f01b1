"""Sums up the starts of an island, from its events.

A start begins at an inner step: 0, that of a resumed checkpoint, or where the run stood when the
island returned. What earlier starts made beyond it was made in vain: their events of later inner
steps are no longer effective. Whatever reads events reads effective ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from diloco.config.island import IslandConfig
from diloco.errors import ConfigError
from diloco.report.summary_text import IslandSummary, shape_text
from diloco.telemetry.meter import utilisation

Event = Mapping[str, Any]  # JSON values, as a sink wrote them


def effective(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out what an island's later starts have made again or given up.

    Text that was drawn for it was drawn.
    """
    begins = _begins(events)
    stands_until = {
        start: min((step for later, step in begins.items() if later > start), default=None)
        for start in {_start(event) for event in events}
    }
    return [
        event
        for event in events
        if (until := stands_until[_start(event)]) is None
        or event.get("inner_step", 0) <= until
        or event["kind"] in ("slot_drawn", "text_untold")
    ]


def has_ended(events: Sequence[Event]) -> bool:
    """Whether the newest start that an island's events tell of came to its end."""
    newest = max(map(_start, events), default=0)
    return any(e["kind"] == "island_ended" and _start(e) == newest for e in events)


def resumed_after(events: Sequence[Event]) -> set[int]:
    """Give the inner steps of the checkpoints that an island was resumed from."""
    return {
        event["inner_step"]
        for event in events
        if event["kind"] == "island_resumed" and event["island_rank"] == 0
    }


def island_summary(island: str, config: IslandConfig, events: Sequence[Event]) -> IslandSummary:
    """Sum up the effective events of all ranks of an island.

    Only the last start of a finished run has told its own sums; those of the others are those of
    their inner steps, with the seconds between the first and the last of them. The undisturbed step
    of a last start that made none, as it came after the end, is the median of all steps.

    Raises:
        ConfigError: If they are not those of one run from beginning to end.
    """
    working = [event for event in events if event["kind"] in ("inner_step", "island_ended")]
    starts = sorted({_start(event) for event in working})
    _check_one_run(island, config.ranks, events, starts)
    parts = [_sums_of([e for e in events if _start(e) == start]) for start in starts]
    sums = {name: sum(part[name] for part in parts) for name in parts[0]}
    inner_s = sums.pop("inner_s")
    leader = [event for event in events if event["island_rank"] == 0]
    ended = next(event for event in reversed(leader) if event["kind"] == "island_ended")
    returns = [event for event in leader if event["kind"] == "island_rejoined"]
    losses = {e["parameters"]: e["nats_per_byte"] for e in events if e["kind"] == "evaluated"}
    memory = [e["resident_peak_bytes"] for e in events if e["kind"] == "memory_used"]
    undisturbed_step_s = ended["undisturbed_step_s"] or statistics.median(
        event["duration_s"] for event in events if event["kind"] == "inner_step"
    )
    told = ("dropped_tokens", "left_tokens", "tflops_per_s", "mfu")
    return IslandSummary(
        island=island,
        shape=shape_text(config),
        inner_steps=ended["inner_step"],
        local_nats_per_byte=losses.get("local"),
        published_nats_per_byte=losses.get("published") if ended["digests"] else None,
        utilisation=utilisation(
            num_steps=sums["num_steps"],
            undisturbed_step_s=undisturbed_step_s,
            inner_s=inner_s,
            wall_s=sums["wall_s"],
        ),
        goodput=inner_s / sums["wall_s"],
        overwritten_steps=ended["overwritten_steps"],
        undisturbed_step_s=undisturbed_step_s,
        digests=tuple(ended["digests"]),
        num_starts=len(starts),
        num_returns=len(returns),
        lost_steps=sum(event["lost_steps"] for event in returns),
        memory_bytes=max(memory, default=0),
        **{name: ended.get(name, 0.0) for name in told},
        **sums,
    )


def _sums_of(events: Sequence[Event]) -> dict[str, Any]:
    """Take what the ranks of one start told at its end, or else what its steps and merges tell."""
    steps = [event for event in events if event["kind"] == "inner_step"]
    ended = [event for event in events if event["kind"] == "island_ended"]
    of_leader = [event for event in events if event["island_rank"] == 0]
    leader = next((event for event in of_leader if event["kind"] == "island_ended"), None)
    sums = {"num_steps": len(steps), "tokens": sum(step["num_tokens"] for step in steps)}
    if leader is not None:
        times = {name: leader[name] for name in ("wall_s", "inner_s", "blocked_s")}
        moved = {n: sum(event[n] for event in ended) for n in ("bytes_up", "bytes_down")}
        return {**sums, **times, **moved}
    first, last = steps[0], steps[-1]
    last_moved = next((e for e in reversed(of_leader) if e["kind"] == "bytes_moved"), {})
    return {
        **sums,
        "wall_s": last["unix_s"] - first["unix_s"] + first["duration_s"],
        "inner_s": sum(step["duration_s"] for step in steps),
        "blocked_s": sum(event.get("blocked_s", 0.0) for event in of_leader),
        "bytes_up": last_moved.get("bytes_up", 0),
        "bytes_down": last_moved.get("bytes_down", 0),
    }


def _check_one_run(
    island: str, num_ranks: int, events: Sequence[Event], starts: Sequence[int]
) -> None:
    """Refuse the events of several runs, whose figures would be mixed.

    The last start ends once on every rank, an earlier one at most once, and every inner step that
    stands was made once.
    """
    ended = sorted(
        (_start(event), event["island_rank"]) for event in events if event["kind"] == "island_ended"
    )
    steps = [event["inner_step"] for event in events if event["kind"] == "inner_step"]
    of_last = [rank for start, rank in ended if starts and start == starts[-1]]
    is_once = len(ended) == len(set(ended)) and len(steps) == len(set(steps))
    if is_once and of_last == list(range(num_ranks)):
        return
    raise ConfigError(
        f"the events of island {island} are not those of one run to its end: island_ended was "
        f"written by ranks {of_last} of {num_ranks} of its last start, inner steps {len(steps)} "
        f"times of which {len(set(steps))} differ. Give every run a telemetry.dir of its own"
    )


def _begins(events: Sequence[Event]) -> dict[int, int]:
    """Inner step at which each start that made steps began."""
    begins: dict[int, int] = {}
    for event in events:
        if event["kind"] in ("island_resumed", "island_rejoined"):
            begins[_start(event)] = event["inner_step"]
        elif event["kind"] == "inner_step":
            begins.setdefault(_start(event), 0)
    return begins


def _start(event: Event) -> int:
    """Which start of the island wrote it: its incarnation; 0 before it was known."""
    return int(event.get("incarnation", 0))
