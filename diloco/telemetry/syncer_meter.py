"""Counts what a syncer has done since it started, for its metrics only.

Decides nothing and is not durable: the records are the truth about rounds.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from diloco.refusals import Cause
from diloco.telemetry.round_events import RoundClosed

#: Classes in which durations are counted: seconds, at most.
BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


@dataclass(slots=True)
class Durations:
    """How long something took: the sum, and how often by class; the last has what is longer."""

    sum_s: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))

    def add(self, seconds: float) -> None:
        """Count one."""
        self.sum_s += seconds
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1


def _durations() -> defaultdict[int, Durations]:
    return defaultdict(Durations)


@dataclass(slots=True)
class SyncerCounts:
    """Sums since the start, by fragment, or by fragment and island.

    Durations are the worker's, but for those that rounds `waited` and spent on `grace`.
    `refused` are contributions to published versions, `refusals` whatever was refused, by island
    (empty: of none that had proved it) and cause. `disk_full` counts versions and expiries that
    found no room at first, `waiting_for_disk` are the fragments that wait for it now.
    """

    published: Counter[int] = field(default_factory=Counter)
    solo: Counter[int] = field(default_factory=Counter)
    expired: Counter[int] = field(default_factory=Counter)
    disk_full: Counter[int] = field(default_factory=Counter)
    waiting_for_disk: set[int] = field(default_factory=set)
    included: Counter[tuple[int, str]] = field(default_factory=Counter)
    refused: Counter[tuple[int, str]] = field(default_factory=Counter)
    refusals: Counter[tuple[str, Cause]] = field(default_factory=Counter)
    rejected: Counter[tuple[int, str]] = field(default_factory=Counter)
    received_bytes: Counter[tuple[int, str]] = field(default_factory=Counter)
    sent_bytes: Counter[tuple[int, str]] = field(default_factory=Counter)
    merges: defaultdict[int, Durations] = field(default_factory=_durations)
    commits: defaultdict[int, Durations] = field(default_factory=_durations)
    waited: defaultdict[int, Durations] = field(default_factory=_durations)
    grace: defaultdict[int, Durations] = field(default_factory=_durations)


class SyncerMeter:
    """Counts for one start of a syncer; its loop and its worker may both call."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin with nothing; `clock` gives monotonic seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._counts = SyncerCounts()

    @property
    def counts(self) -> SyncerCounts:
        """A copy of all sums."""
        with self._lock:
            return copy.deepcopy(self._counts)

    @property
    def refusals(self) -> Counter[tuple[str, Cause]]:
        """A copy of what was refused: a report says no more, and of a thousand islands is often."""
        with self._lock:
            return self._counts.refusals.copy()

    def published(self, closed: RoundClosed) -> None:
        """Count a version that became durable, and who is in it, was refused or was rejected."""
        p, counts = closed.fragment_id, self._counts
        with self._lock:
            counts.published[p] += 1
            counts.solo[p] += closed.is_solo
            counts.waited[p].add(closed.waited_s)
            counts.grace[p].add(closed.grace_s)
            counts.included.update((p, island) for island in closed.contributors)
            counts.refused.update((p, island) for island in closed.refused)
            counts.rejected.update((p, island) for island in closed.rejected)

    def rounds_of(self, fragment_id: int) -> tuple[int, int]:
        """Give how many rounds of a fragment were published, and how many of them solo."""
        with self._lock:
            return self._counts.published[fragment_id], self._counts.solo[fragment_id]

    def expired(self, fragment_id: int) -> None:
        """Count an attempt without a result."""
        with self._lock:
            self._counts.expired[fragment_id] += 1

    def disk_full(self, fragment_id: int) -> None:
        """Count that a version or an expiry found no room on the disk; it waits."""
        with self._lock:
            self._counts.disk_full[fragment_id] += 1
            self._counts.waiting_for_disk.add(fragment_id)

    def disk_free(self, fragment_id: int) -> None:
        """Record that a fragment waits no more."""
        with self._lock:
            self._counts.waiting_for_disk.discard(fragment_id)

    def refusal(self, island: str, cause: Cause) -> None:
        """Count a call, or what it carried, that was refused."""
        with self._lock:
            self._counts.refusals[island, cause] += 1

    def received(self, fragment_id: int, island: str, num_bytes: int) -> None:
        """Count the payload of a lane that was accepted."""
        with self._lock:
            self._counts.received_bytes[fragment_id, island] += num_bytes

    def sent(self, fragment_id: int, island: str, num_bytes: int) -> None:
        """Count the payload of a lane that an island fetched."""
        with self._lock:
            self._counts.sent_bytes[fragment_id, island] += num_bytes

    @contextlib.contextmanager
    def merging(self, fragment_id: int) -> Iterator[None]:
        """Count how long a merge and its outer step take."""
        with self._timing(self._counts.merges, fragment_id):
            yield

    @contextlib.contextmanager
    def committing(self, fragment_id: int) -> Iterator[None]:
        """Count how long a version takes to be durable."""
        with self._timing(self._counts.commits, fragment_id):
            yield

    @contextlib.contextmanager
    def _timing(self, durations: defaultdict[int, Durations], fragment_id: int) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            with self._lock:
                durations[fragment_id].add(self._clock() - began)
