"""The sites of a simulated run: an island's starts one after the other, and the lines that join."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence

import simpy

from diloco.simulations.engine.clock import Engine, Steps
from diloco.simulations.engine.lives import Absence
from diloco.simulations.engine.network import Path, Pipe, Tcp
from diloco.simulations.runs.actors import SimulatedSyncer
from diloco.simulations.runs.islands import SimulatedIsland
from diloco.transport.shaping.link import Link, LinkProfile


class Site:
    """An island's starts, one after the other."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        build: Callable[..., SimulatedIsland],
        syncers: Sequence[SimulatedSyncer],
        absences: Iterable[Absence],
        lease_s: float,
        is_over: Callable[[SimulatedIsland], bool] | None = None,
    ) -> None:
        """Assign only; `was_away` are the absences that have begun, of all given or drawn.

        Args:
            engine: Of the run.
            name: Of the island.
            build: Makes a start, of the one `before` it if there was one.
            syncers: That it exchanges with.
            absences: When it is away, ascending.
            lease_s: Seconds without a call after which it is not opened for.
            is_over: Whether it has trained enough; None: as soon as all syncers are over.
        """
        self._engine, self.name, self._build = engine, name, build
        self._syncers, self._absences, self._lease_s = syncers, iter(absences), lease_s
        self._is_enough = is_over
        self._next = next(self._absences, None)
        self.is_here = self._next is None or self._next.begin_s > 0
        self.was_away: list[Absence] = []
        self.ended_s = 0.0
        self.island = build()

    def live(self) -> Steps:
        """Train, with what interrupts it, to the end of the run."""
        engine = self._engine
        is_first = True
        while not (self.was_away and self._is_over):
            absence, self._next = self._next, next(self._absences, None)
            if absence is None or absence.begin_s > 0:
                training = engine.process(self._train(is_returning=not is_first))
                away = [] if absence is None else [engine.timeout(absence.begin_s - engine.now)]
                yield engine.any_of([training, *away])
                self.ended_s = engine.now
                if absence is None or training.processed:
                    return
                training.interrupt()
                self.island.stop()
                engine.process(self._lapse())
            self.was_away.append(absence)
            is_first, self.is_here = False, False
            if math.isinf(absence.end_s):
                return
            yield engine.timeout(absence.end_s - engine.now)
            self.island = self._build(before=self.island)
            self.is_here = True

    @property
    def _is_over(self) -> bool:
        """Whether this island has trained enough, or the run has ended without waiting for it."""
        if self._is_enough is not None:
            return self._is_enough(self.island)
        return all(syncer.is_over for syncer in self._syncers)

    def _train(self, *, is_returning: bool) -> Steps:
        with contextlib.suppress(simpy.Interrupt):
            if is_returning:
                for syncer in self._syncers:
                    syncer.live(self.name, is_live=True)
                yield from self.island.enter()
            self.island.start()
            yield from self.island.train(lambda: self._is_over)

    def _lapse(self) -> Steps:
        """Have the lease end of an island that is not back by then."""
        gone = self.island
        yield self._engine.timeout(self._lease_s)
        if self.island is gone:
            for syncer in self._syncers:
                syncer.live(self.name, is_live=False)


class SharedLine:
    """The line of the syncers' site, if it is one that islands share."""

    def __init__(self, link: LinkProfile | None) -> None:
        """Take the line; None where it is no bottleneck."""
        self._link = link
        if link is not None:
            self._in = Pipe("syncer-in", link.down.bandwidth_bps)
            self._out = Pipe("syncer-out", link.up.bandwidth_bps)

    def paths(self, island: str, profile: LinkProfile, tcp: Tcp | None) -> tuple[Path, Path]:
        """Give the two directions of an island's way to the syncers."""
        up, down = profile.up, profile.down
        ups = [Pipe(f"{island}-up", up.bandwidth_bps)]
        downs = [Pipe(f"{island}-down", down.bandwidth_bps)]
        if self._link is not None:
            up, down = _through(up, self._link.down), _through(down, self._link.up)
            ups.append(self._in)
            downs.append(self._out)
        rtt_s = up.delay_s + down.delay_s
        return (
            Path(f"{island}-up", tuple(ups), up, rtt_s, tcp),
            Path(f"{island}-down", tuple(downs), down, rtt_s, tcp),
        )


def _through(own: Link, other: Link) -> Link:
    """Give a link that is two, one after the other."""
    return Link(
        min(own.bandwidth_bps, other.bandwidth_bps),
        own.delay_s + other.delay_s,
        own.jitter_s + other.jitter_s,
        1 - (1 - own.loss) * (1 - other.loss),
    )
