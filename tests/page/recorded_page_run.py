"""A recorded run for tests of the page: events of real kinds in a state directory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from diloco.telemetry.events import (
    AlarmRaised,
    BytesMoved,
    CheckpointWritten,
    Evaluated,
    Event,
    FragmentMerged,
    FragmentSent,
    InnerStepDone,
    IslandEnded,
)
from diloco.telemetry.round_events import RoundClosed, RoundExpired, RoundOpened
from diloco.telemetry.sinks import JsonlSink

#: When the first event was written.
BEGAN = 1_700_000_000.0
#: Names and texts that would do harm if they were not escaped.
HOSTILE_NAME = "<img src=x onerror=alert(1)>"
HOSTILE_TEXT = "\"'><script>alert(2)</script>&amp; diloco kick HOST:PORT east;rm"
DIGEST = "0123456789abcdef" * 4


def step(number: int, loss: float | None = 2.5) -> InnerStepDone:
    return InnerStepDone(number, loss, 0.5, 1e-3, 128, 0.5)


def opened(version: int, members: tuple[str, ...] = ("east", "west")) -> RoundOpened:
    return RoundOpened(0, version, 0, members, False)


def closed(version: int, contributors: tuple[str, ...] = ("east", "west")) -> RoundClosed:
    return RoundClosed(
        0, version, 0, ("east", "west"), contributors, 2, 2.0, 0.5, 0.25, False, False,
        {}, {}, 512, DIGEST,
    )  # fmt: skip


def sent(version: int) -> FragmentSent:
    return FragmentSent(2, 0, version, 0, 128, 2, False, 0.5)


def merged(version: int) -> FragmentMerged:
    return FragmentMerged(3, 0, version, "included", 1, 0.25, DIGEST, ("east", "west"), False)


def ended(inner_step: int, digests: tuple[str, ...] = (DIGEST,)) -> IslandEnded:
    return IslandEnded(inner_step, 512, 4.0, 2.0, 1.0, 0.5, 0.5, 0.625, 0.0, 1024, 2048, digests)


def of_island(at: int = 4) -> list[Event]:
    """Events of an island from beginning to end."""
    steps: list[Event] = [step(number, 3.0 - number / 4) for number in range(1, at + 1)]
    told: list[Event] = [
        sent(0),
        merged(1),
        BytesMoved(at, 1024, 2048),
        CheckpointWritten(at, 100, 0.5, 0.1, 0.0),
        Evaluated(at, "published", 1.5),
        ended(at),
    ]
    return steps + told


def write(path: Path, island: str, events: Iterable[Event]) -> None:
    """Write events as the processes of a run do, one a second."""
    clock = (BEGAN + second for second in itertools.count())
    context = {"run": "recorded", "timeline": 0}
    own = {"island": island, "island_rank": 0, "incarnation": 1} if island else {"syncer_epoch": 1}
    sink = JsonlSink(path, context | own, lambda: next(clock))
    sink.open()
    for event in events:
        sink.write(event)
    sink.close()


def write_state(root: Path, lr: str = "0.7") -> Path:
    """Make the state directory of a run that has ended, with hostile names and texts."""
    telemetry = root / "telemetry"
    for island in ("east", "west"):
        write(telemetry / f"events-{island}-0.jsonl", island, of_island())
    write(
        telemetry / "events-north-0.jsonl",
        HOSTILE_NAME,
        [step(1), AlarmRaised("loss_rises", HOSTILE_TEXT, HOSTILE_NAME), ended(1)],
    )
    rounds = [opened(0), closed(0), opened(1), RoundExpired(0, 1, 0, ("east",), ("east",), "late")]
    write(telemetry / "events-syncer.jsonl", "", rounds)
    (root / "resolved.toml").write_text(
        f'[run]\nname = "recorded"\ninner_steps = 4\n[outer]\nlr = {lr}\nnote = "<b>bold</b>"\n'
    )
    (root / "fingerprint").write_text("f00d\n")
    return root
