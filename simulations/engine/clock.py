"""The virtual clock: SimPy's, with random streams that belong to names.

Events of equal times happen in the order in which they were scheduled, so a run is a function of
its inputs and its seed. Knows nothing of links or islands.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

import blake3
import simpy

#: A process of the engine: yields events, receives their values (hence `Any`: SimPy's own type).
Steps: TypeAlias = Generator[simpy.Event, Any, None]


class Engine(simpy.Environment):
    """Virtual time in seconds from 0, and the randomness of one simulation.

    `has_stopped` is set by a part of it that cannot go on; who steps it looks there.
    """

    def __init__(self, seed: int) -> None:
        """Begin at 0; `seed` decides every stream."""
        super().__init__(0.0)
        self._seed = seed
        self.has_stopped = False

    def stream(self, *names: str) -> random.Random:
        """Give a generator that only the seed and `names` decide, whatever else is drawn."""
        digest = blake3.blake3("\0".join((str(self._seed), *names)).encode()).digest(8)
        return random.Random(int.from_bytes(digest, "little"))

    def call_at(self, when: float, action: Callable[[], None]) -> None:
        """Call `action` at a time that is not over, after what was scheduled for it before."""
        event = self.timeout(max(0.0, when - self.now))
        assert event.callbacks is not None
        event.callbacks.append(lambda _: action())


class WakeUps:
    """Wakes each of several things at the last time that it asked for."""

    def __init__(self, engine: Engine) -> None:
        """Have none."""
        self._engine = engine
        self._due: dict[int, float] = {}

    def set(self, number: int, when: float, wake: Callable[[float], object]) -> None:
        """Have `wake` called with the time that it is by then; infinite: not at all."""
        if when == math.inf or self._due.get(number) == when:
            return
        self._due[number] = when

        def ring() -> None:
            if self._due.get(number) == when:
                del self._due[number]
                wake(max(self._engine.now, when))

        self._engine.call_at(when, ring)


class Crew:
    """Processes that are ended together, without a word."""

    def __init__(self, engine: Engine) -> None:
        """Have none."""
        self._engine = engine
        self._processes: list[simpy.Process] = []

    def spawn(self, steps: Steps) -> simpy.Process:
        """Run something until it has ended, or all are ended."""

        def run() -> Steps:
            with contextlib.suppress(simpy.Interrupt):
                yield from steps

        self._processes = [each for each in self._processes if each.is_alive]
        process = self._engine.process(run())
        self._processes.append(process)
        return process

    def stop(self) -> None:
        """End all; not to be called by one of them."""
        for process in self._processes:
            if process.is_alive:
                process.interrupt()
        self._processes = []


class Signal:
    """Tells everybody who waits that something has changed; then waits can begin again."""

    def __init__(self, engine: Engine) -> None:
        """Nothing has changed yet."""
        self._engine = engine
        self._event = engine.event()

    @property
    def next(self) -> simpy.Event:
        """What the next change triggers; to be asked for before looking."""
        return self._event

    def set(self) -> None:
        """Wake all who wait."""
        event, self._event = self._event, self._engine.event()
        event.succeed()
