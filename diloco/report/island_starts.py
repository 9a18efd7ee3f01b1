"""Sums up the starts of an island, from its events.

A start begins at an inner step: 0, that of a resumed checkpoint, or where the run stood when the
island returned. What earlier starts made beyond it was made in vain: their events of later inner
steps are no longer effective. Whatever reads events reads effective ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from diloco.errors import ConfigError

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


@dataclass(frozen=True, slots=True)
class IslandStarts:
    """Sums over the starts of an island, of what stands.

    Only the last start of a finished run has told its own sums; those of the others are those of
    their inner steps, with the seconds between the first and the last of them.

    Args:
        inner_steps: Completed inner steps at the end; a warm start's own ones are among them.
        num_steps: Inner steps that these starts have made.
        undisturbed_step_s: As the last start measured it, like `overwritten_steps`; of one that
            made no step, as it came after the end, the median of all steps.
        nats_per_byte: Last held-out loss, by whose parameters.
        digests: Of what the model held of each fragment at the end.
        resumed_after: Inner steps of the checkpoints that it was resumed from.
        dropped_tokens: That no version has, as the last start told it, by share of the parameters.
        left_tokens: That no version had yet when it ended.
        tflops_per_s: 10^12 operations a second and rank in inner steps, of the last start.
        mfu: Share of the devices' peak that this is; 0 where that is not known.
        memory_bytes: Largest resident size of a rank; 0 where none was told.
    """

    inner_steps: int
    num_steps: int
    tokens: int
    wall_s: float
    inner_s: float
    blocked_s: float
    undisturbed_step_s: float
    overwritten_steps: float
    bytes_up: int
    bytes_down: int
    nats_per_byte: Mapping[str, float]
    digests: tuple[str, ...]
    num_starts: int
    num_returns: int
    lost_steps: int
    resumed_after: tuple[int, ...]
    dropped_tokens: float = 0.0
    left_tokens: float = 0.0
    tflops_per_s: float = 0.0
    mfu: float = 0.0
    memory_bytes: int = 0

    @classmethod
    def of(cls, island: str, num_ranks: int, events: Sequence[Event]) -> IslandStarts:
        """Sum up the effective events of all ranks of an island.

        Raises:
            ConfigError: If they are not those of one run from beginning to end.
        """
        working = [event for event in events if event["kind"] in ("inner_step", "island_ended")]
        starts = sorted({_start(event) for event in working})
        _check_one_run(island, num_ranks, events, starts)
        parts = [_StartSums.of([e for e in events if _start(e) == start]) for start in starts]
        leader = [event for event in events if event["island_rank"] == 0]
        ended = next(event for event in reversed(leader) if event["kind"] == "island_ended")
        returns = [event for event in leader if event["kind"] == "island_rejoined"]
        return cls(
            inner_steps=ended["inner_step"],
            **{
                each.name: sum(getattr(part, each.name) for part in parts)
                for each in fields(_StartSums)
            },
            undisturbed_step_s=ended["undisturbed_step_s"]
            or statistics.median(e["duration_s"] for e in events if e["kind"] == "inner_step"),
            overwritten_steps=ended["overwritten_steps"],
            nats_per_byte={
                e["parameters"]: e["nats_per_byte"] for e in events if e["kind"] == "evaluated"
            },
            digests=tuple(ended["digests"]),
            num_starts=len(starts),
            num_returns=len(returns),
            lost_steps=sum(event["lost_steps"] for event in returns),
            resumed_after=tuple(e["inner_step"] for e in leader if e["kind"] == "island_resumed"),
            dropped_tokens=ended.get("dropped_tokens", 0.0),
            left_tokens=ended.get("left_tokens", 0.0),
            tflops_per_s=ended.get("tflops_per_s", 0.0),
            mfu=ended.get("mfu", 0.0),
            memory_bytes=max(
                (e["resident_peak_bytes"] for e in events if e["kind"] == "memory_used"), default=0
            ),
        )


@dataclass(frozen=True, slots=True)
class _StartSums:
    """Sums over one start."""

    num_steps: int
    tokens: int
    wall_s: float
    inner_s: float
    blocked_s: float
    bytes_up: int
    bytes_down: int

    @classmethod
    def of(cls, events: Sequence[Event]) -> _StartSums:
        """Take what the ranks told at their end, or else what their steps and merges tell."""
        steps = [event for event in events if event["kind"] == "inner_step"]
        tokens = sum(step["num_tokens"] for step in steps)
        ended = [event for event in events if event["kind"] == "island_ended"]
        leader = next((event for event in ended if event["island_rank"] == 0), None)
        if leader is not None:
            return cls(
                num_steps=len(steps),
                tokens=tokens,
                wall_s=leader["wall_s"],
                inner_s=leader["inner_s"],
                blocked_s=leader["blocked_s"],
                bytes_up=sum(event["bytes_up"] for event in ended),
                bytes_down=sum(event["bytes_down"] for event in ended),
            )
        first, last = steps[0], steps[-1]
        of_leader = [event for event in events if event["island_rank"] == 0]
        moved = [event for event in of_leader if event["kind"] == "bytes_moved"]
        return cls(
            num_steps=len(steps),
            tokens=tokens,
            wall_s=last["unix_s"] - first["unix_s"] + first["duration_s"],
            inner_s=sum(step["duration_s"] for step in steps),
            blocked_s=sum(event.get("blocked_s", 0.0) for event in of_leader),
            bytes_up=moved[-1]["bytes_up"] if moved else 0,
            bytes_down=moved[-1]["bytes_down"] if moved else 0,
        )


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
