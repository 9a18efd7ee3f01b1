"""Mixes a slot's sources by weight and shuffles their sequences in windows, without a generator.

Sequence i of the mixture belongs to window i // W. A window's order is that of the hashes of (seed,
slot, window, index), so it depends on nothing that was drawn before. While one window is
given out the next is read, a sequence for a sequence, so no step waits for a whole window but the
first. The cursor is that of the sources at the window's start, and the place in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from diloco.data.packing import PackedSequence, PackedSource, SourceEndedError, check_counts

#: A sequence and its source.
_Drawn: TypeAlias = tuple[str, PackedSequence]


class Mixture:
    """Sequences of several sources, each as near to its share of all as integers allow.

    Attributes:
        newest: Source of the sequence that was taken last; empty before the first.
    """

    def __init__(self, sources: Mapping[str, PackedSource], weights: Mapping[str, float]) -> None:
        """Keep the sources.

        Args:
            sources: By name.
            weights: By the same names; more than zero, need not add up to 1.
        """
        self._sources = dict(sorted(sources.items()))
        total = sum(weights[name] for name in self._sources)
        self._shares = {name: weights[name] / total for name in self._sources}
        self.newest = ""

    def next_sequence(self) -> PackedSequence:
        """Take a sequence of the source that is furthest behind its share, the first by name.

        Raises:
            SourceEndedError: If that source has none.
        """
        num_taken = 1 + sum(source.num_sequences for source in self._sources.values())
        chosen = max(
            self._sources,
            key=lambda name: self._shares[name] * num_taken - self._sources[name].num_sequences,
        )
        sequence = self._sources[chosen].next_sequence()
        self.newest = chosen
        return sequence

    def cursor(self) -> dict[str, Any]:
        """Give the cursors of all sources."""
        return {name: source.cursor() for name, source in self._sources.items()}

    def go_to(self, cursor: Mapping[str, Any] | None) -> None:
        """Send all sources to a cursor, or to the start."""
        for name, source in self._sources.items():
            source.go_to(cursor[name] if cursor else None)


class WindowShuffle:
    """Sequences of a mixture, in the order of their windows: the text of one slot.

    Attributes:
        drawn: Sequences taken since the start, by source.
    """

    def __init__(self, mixture: Mixture, *, window: int, seed: int, slot: int) -> None:
        """Stand at the mixture's start.

        Args:
            mixture: At its start.
            window: Sequences that are shuffled together; 1 keeps their order.
            seed: Seed of the run.
            slot: Index of the slot.
        """
        self._mixture = mixture
        self._size = window
        self._seed = seed
        self._slot = slot
        self._begin(-1, mixture.cursor())
        self._position = self._size  # of a window before the first

    def _begin(self, window: int, next_cursor: dict[str, Any]) -> None:
        """Stand in a window that has no sequences yet."""
        self._window = window
        self._sequences: list[_Drawn] = []
        self._cursor: dict[str, Any] = {}
        self._next: list[_Drawn] = []
        self._next_cursor = next_cursor
        self.drawn = {name: source["sequences"] for name, source in next_cursor.items()}
        self._end: SourceEndedError | None = None

    def take(self) -> PackedSequence:
        """Take the next sequence.

        Raises:
            SourceEndedError: If a source has ended and all that was read before is taken.
        """
        if self._position >= len(self._sequences):
            self._turn()
        source, sequence = self._sequences[self._position]
        self._position += 1
        self.drawn[source] += 1
        self._read_ahead(1)
        return sequence

    @property
    def num_drawn(self) -> int:
        """Sequences taken since the start, of all sources."""
        return sum(self.drawn.values())

    def cursor(self) -> dict[str, Any]:
        """Give the position before the next sequence: JSON values."""
        if self._position == self._size:
            return {"window": self._window + 1, "position": 0, "sources": self._next_cursor}
        return {"window": self._window, "position": self._position, "sources": self._cursor}

    def go_to(self, cursor: Mapping[str, Any] | None) -> None:
        """Go to a cursor, or to the start.

        Raises:
            ValueError: If its window and position are not those of its sources.
        """
        window, position = check_counts(cursor["window"], cursor["position"]) if cursor else (0, 0)
        self._mixture.go_to(cursor["sources"] if cursor else None)
        self._begin(window - 1, self._mixture.cursor())
        if position > self._size or window * self._size != self.num_drawn:
            raise ValueError(
                f"a cursor at {position} of window {window}, of {self._size} each, does not begin "
                f"behind {self.num_drawn} sequences"
            )
        self._position = self._size
        if position:
            self._turn()
            self._position = position
            for source, _ in self._sequences[: self._position]:
                self.drawn[source] += 1

    def _turn(self) -> None:
        """Go to the next window, whose last sequences are read now."""
        self._read_ahead(self._size)
        if not self._next:
            assert self._end is not None
            raise self._end
        self._window += 1
        indices = np.arange(len(self._next), dtype=np.uint64)
        order = np.argsort(
            counter_hash(self._seed, self._slot, self._window, indices), kind="stable"
        )
        self._sequences = [self._next[index] for index in order]
        self._cursor, self._position = self._next_cursor, 0
        self._next, self._next_cursor = [], self._mixture.cursor()

    def _read_ahead(self, num_sequences: int) -> None:
        """Read at most so many sequences of the next window, no more than it holds."""
        room = self._size - len(self._next)
        for _ in range(0 if self._end else min(num_sequences, room)):
            try:
                sequence = self._mixture.next_sequence()
            except SourceEndedError as end:
                self._end = end
                return
            self._next.append((self._mixture.newest, sequence))


Counters: TypeAlias = npt.NDArray[np.uint64]


def counter_hash(first: int, second: int, third: int, fourth: Counters) -> Counters:
    """Hash four counters to 64 bits, by one round of splitmix64 for each.

    Args:
        first: 0 to 2^64 - 1, such as the seed of the run.
        second: 0 to 2^64 - 1.
        third: 0 to 2^64 - 1.
        fourth: Any shape; the result has it, too.
    """
    state = np.zeros_like(fourth)
    for word in (np.uint64(first), np.uint64(second), np.uint64(third), fourth):
        state = (state ^ word) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state
