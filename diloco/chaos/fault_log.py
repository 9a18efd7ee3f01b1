"""The fault log of a run under chaos: what was done when, whether it took effect, what was seen.

One JSON object a line, written by the runner alone, so that its clock is everybody's. `RunHistory`
is what is read back. Times are seconds since the run's processes were started; `unix_s` with them
joins them to events.

    begun   number, kind, target, note     a fault was done
    ended   number, fired, note, kept_s    it is over; whether it took effect; by how much longer
            is_same, had_chance            than planned it lasted, since nobody had met it; of a
                                           storm, whether the same process serves after it; whether
                                           it could have taken effect
    back    number, seconds                the process that it ended serves again
    published   fragment, version          a version was seen on disk for the first time
    training, over                         every island has begun; all islands have ended
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from diloco.chaos.plan import TimedFault


class FaultLog:
    """Writes; a context manager."""

    def __init__(
        self, path: Path, clock: Callable[[], float], unix_clock: Callable[[], float]
    ) -> None:
        """Begin the log; `clock` is monotonic."""
        self._path = path
        self._clock = clock
        self._unix_clock = unix_clock
        self._began = clock()
        self._file: TextIO | None = None

    def __enter__(self) -> FaultLog:
        """Open the file."""
        self._file = self._path.open("w", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        assert self._file is not None
        self._file.close()

    @property
    def now_s(self) -> float:
        """Seconds since the log was begun."""
        return self._clock() - self._began

    def write(self, what: str, **values: object) -> float:
        """Write a line; returns its time."""
        assert self._file is not None
        now_s = self.now_s
        line = {"what": what, "t": round(now_s, 4), "unix_s": self._unix_clock(), **values}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        return now_s


@dataclass(slots=True)
class FaultHistory:
    """The history of one fault; None: it never came to that. Times in seconds.

    `back_s` is the time from its begin to the next process of its kind serving; `had_chance`: its
    target was there, and did not end before it was met.
    """

    fault: TimedFault
    began_s: float | None = None
    began_unix_s: float | None = None
    ended_s: float | None = None
    fired: bool = False
    back_s: float | None = None
    note: str = ""
    kept_s: float = 0.0
    is_same: bool = True
    is_told: bool = True
    had_chance: bool = False

    @property
    def lasted_s(self) -> float:
        """For how long it was done: as planned, or until somebody met it."""
        return self.fault.lasts_s + self.kept_s

    @property
    def span_s(self) -> tuple[float, float]:
        """Its begin, and its end or the next process serving; of one that began."""
        assert self.began_s is not None, "what never began has no span"
        return self.began_s, self.began_s + max(self.lasted_s, self.back_s or 0.0)

    def meets(self, other: FaultHistory) -> bool:
        """Whether another one happened at the same time."""
        if other is self or other.began_s is None:
            return False
        (begin, end), (their_begin, their_end) = self.span_s, other.span_s
        return begin <= their_end and their_begin <= end

    @property
    def unix_span_s(self) -> tuple[float, float]:
        """The same, as events tell time."""
        assert self.began_unix_s is not None, "what never began has no span"
        began_s, ended_s = self.span_s
        return self.began_unix_s, self.began_unix_s + ended_s - began_s


@dataclass(slots=True)
class RunHistory:
    """All that the log says.

    Attributes:
        faults: In the order of the plan.
        published: (time, fragment, version) as first seen.
        over_s: When all islands had ended; None: the run was given up.
    """

    faults: list[FaultHistory]
    published: list[tuple[float, int, int]] = field(default_factory=list)
    over_s: float | None = None


def read_fault_log(lines: Sequence[Mapping[str, Any]], faults: Sequence[TimedFault]) -> RunHistory:
    """Read the log of a plan's faults back."""
    history = RunHistory([FaultHistory(fault) for fault in faults])
    for line in lines:
        t = float(line["t"])
        match line["what"]:
            case "over":
                history.over_s = t
            case "published":
                history.published.append((t, line["fragment"], line["version"]))
            case "begun":
                of = history.faults[line["number"]]
                of.began_s, of.began_unix_s, of.note = t, line["unix_s"], line["note"]
                of.had_chance = True
            case "ended":
                of = history.faults[line["number"]]
                of.ended_s, of.fired = t, line["fired"]
                of.note = line["note"] or of.note
                of.is_same, of.had_chance = line["is_same"], line["had_chance"]
                of.is_told = line["is_told"]
                of.kept_s = line["kept_s"]
            case "back":
                history.faults[line["number"]].back_s = line["seconds"]
    return history
