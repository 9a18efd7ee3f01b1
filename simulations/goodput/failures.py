"""Chips that fail and come back, and the learners that reconfigure for it. Vectorised, pure.

Every chip is drawn: it lives, fails, is away, lives again, whatever its learner does meanwhile. A
learner is stopped by a reconfiguration when

    a chip fails        elastic: `shrink_s`, it goes on without the chip; not elastic: `restart_s`,
                        a spare stands in for it
    chips have come back    `growth_s`, they are taken in again

A reconfiguration makes a learner of all chips that are there at its end: what fails or returns
before that joins it and stops nobody again. With `merges_growth` returned chips wait until no other
chip of the learner is away, and join the next failure's reconfiguration if that comes first; else
every return stops the learner.

Learners fail independently. Where they wait for each other, all of them stop with each.

Source: Decoupled DiLoCo (arXiv 2604.21428), simulation of failures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diloco.errors import ConfigError
from diloco.simulations.goodput.lifetimes import Floats, Lifetimes

Ints = NDArray[np.int64]

#: Failures that are simulated at most: some 150 bytes each.
MOST_FAILURES = 2_000_000


@dataclass(frozen=True, slots=True)
class Fleet:
    """Chips, learners and what their reconfigurations take.

    Attributes:
        num_chips: Of all learners; each has num_chips // num_learners, the first ones one more.
        num_learners: M.
        lives: Until a chip that is there fails; all are new at the beginning.
        absences: From a failure until the chip is back.
        is_elastic: Whether a learner trains on with fewer chips.
        shrink_s: Seconds from a failure until an elastic learner trains again.
        restart_s: The same where a spare stands in.
        growth_s: Seconds for which taking chips in stops a learner.
        merges_growth: Whether returned chips wait for the others that are away.
        chips_lost: Chips that an elastic learner goes on without for one that failed: its slice.
    """

    num_chips: int
    num_learners: int
    lives: Lifetimes
    absences: Lifetimes
    is_elastic: bool = True
    shrink_s: float = 20.0
    restart_s: float = 73.0
    growth_s: float = 15.0
    merges_growth: bool = True
    chips_lost: int = 1

    @property
    def learner_chips(self) -> list[int]:
        """Chips of every learner."""
        each, more = divmod(self.num_chips, self.num_learners)
        return [each + (slot < more) for slot in range(self.num_learners)]

    @property
    def stop_s(self) -> float:
        """Seconds for which a failure stops a learner."""
        return self.shrink_s if self.is_elastic else self.restart_s


@dataclass(frozen=True, slots=True)
class LearnerTime:
    """What one learner did: it trains from `begins` to `ends` with so many `chips`, float64."""

    begins: Floats
    ends: Floats
    chips: Floats
    num_failures: int
    num_reconfigurations: int


@dataclass(frozen=True, slots=True)
class FleetTime:
    """What all learners did.

    Attributes:
        duration_s: Seconds that were simulated.
        goodput: Share of the chips' time in which they trained.
        uptime: Share of the time in which at least one learner trained.
        nobody_s: Seconds in which none did.
        below_quorum_s: Seconds in which fewer than the quorum did: no round closes.
        num_failures: Of chips.
        num_reconfigurations: Of learners.
    """

    duration_s: float
    goodput: float
    uptime: float
    nobody_s: float
    below_quorum_s: float
    num_failures: int
    num_reconfigurations: int


def simulate_fleet(
    fleet: Fleet,
    duration_s: float,
    rng: np.random.Generator,
    *,
    quorum: int = 1,
    waits_for_all: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> FleetTime:
    """Simulate failures of all chips.

    Args:
        fleet: Chips and learners.
        duration_s: Seconds.
        rng: Source of randomness; each learner has a stream of its own.
        quorum: Learners without which no round closes.
        waits_for_all: Whether learners stop as long as one of them is stopped.
        on_progress: Told how many learners are done.

    Raises:
        ConfigError: If more than `MOST_FAILURES` chips fail.
    """
    learners, left = list[LearnerTime](), MOST_FAILURES
    for chips, stream in zip(fleet.learner_chips, rng.spawn(fleet.num_learners), strict=True):
        learners.append(simulate_learner(fleet, chips, duration_s, stream, most_failures=left))
        left -= learners[-1].num_failures
        if on_progress is not None:
            on_progress(len(learners))
    return _together(
        fleet, learners, duration_s, quorum, fleet.num_learners if waits_for_all else 1
    )


def simulate_learner(
    fleet: Fleet,
    num_chips: int,
    duration_s: float,
    rng: np.random.Generator,
    *,
    most_failures: int = MOST_FAILURES,
) -> LearnerTime:
    """Simulate the chips of one learner; see `LearnerTime`.

    Raises:
        ConfigError: If more than `most_failures` of them fail.
    """
    fails, returns = _failures(fleet, num_chips, duration_s, rng, most_failures)
    stops, stop_s = _stops(fleet, fails, returns, duration_s)
    taken = _taken(stops, stops + stop_s)
    begins = np.concatenate(([0.0], stops[taken] + stop_s[taken]))
    ends = np.concatenate((stops[taken], [duration_s]))
    is_trained = begins < duration_s  # the last reconfiguration may go on after the end
    begins, ends = begins[is_trained], ends[is_trained]
    chips = np.full(len(begins), float(num_chips))
    if fleet.is_elastic:
        away = np.searchsorted(fails, begins, "right") - np.searchsorted(returns, begins, "right")
        chips = np.maximum(chips - fleet.chips_lost * away, 0.0)
    return LearnerTime(begins, ends, chips, len(fails), len(taken))


def _failures(
    fleet: Fleet, num_chips: int, duration_s: float, rng: np.random.Generator, most: int
) -> tuple[Floats, Floats]:
    """Draw when chips fail, and when they return; each sorted, failures before the end."""
    fails, returns = [], []
    at = fleet.lives.draw(num_chips, rng)
    at = at[at < duration_s]
    while len(at):
        most -= len(at)
        if most < 0:
            # Not foreseen by the mean: with a small shape or exponent the young fail many times.
            raise ConfigError(
                f"duration: over {MOST_FAILURES:,} chips fail in it with failures.mtbi, "
                f"failures.shape = {fleet.lives.shape:g} and failures.exponent = "
                f"{fleet.lives.exponent:g}, too many to simulate: shorten it, or raise these"
            )
        back = at + fleet.absences.draw(len(at), rng)
        fails.append(at)
        returns.append(back)
        at = back + fleet.lives.draw(len(back), rng)
        at = at[at < duration_s]
    none = np.empty(0)
    return np.sort(np.concatenate([none, *fails])), np.sort(np.concatenate([none, *returns]))


def _stops(
    fleet: Fleet, fails: Floats, returns: Floats, duration_s: float
) -> tuple[Floats, Floats]:
    """List what would stop a learner, by time, and for how long."""
    grows = returns
    if fleet.merges_growth:
        # Of sorted times: as many have failed as have returned, so nobody is away any more.
        has_failed = np.searchsorted(fails, returns, "right")
        grows = returns[has_failed == np.arange(1, len(returns) + 1)]
    grows = grows[grows < duration_s]
    times = np.concatenate((fails, grows))
    lasts = np.concatenate((np.full(len(fails), fleet.stop_s), np.full(len(grows), fleet.growth_s)))
    order = np.argsort(times, kind="stable")
    return times[order], lasts[order]


def _taken(stops: Floats, ends: Floats) -> Ints:
    """Return which stops begin a reconfiguration: none that falls into one that goes on."""
    following = np.searchsorted(stops, ends, "left").tolist()
    taken, index = [], 0
    while index < len(following):
        taken.append(index)
        index = max(following[index], index + 1)
    return np.array(taken, dtype=np.int64)


def _together(
    fleet: Fleet, learners: list[LearnerTime], duration_s: float, quorum: int, needed: int
) -> FleetTime:
    """Lay learners over each other: between two changes all is constant."""
    times = np.concatenate([time for each in learners for time in (each.begins, each.ends)])
    ups = np.concatenate(
        [
            step
            for each in learners
            for step in (np.ones(len(each.begins)), -np.ones(len(each.ends)))
        ]
    )
    chips = np.concatenate([step for each in learners for step in (each.chips, -each.chips)])
    order = np.argsort(times, kind="stable")
    lasts = np.diff(times[order], append=duration_s, prepend=0.0)
    num_up = np.concatenate(([0.0], np.cumsum(ups[order])))
    chips_up = np.concatenate(([0.0], np.cumsum(chips[order])))
    trained = float((lasts * chips_up)[num_up >= needed].sum())
    nobody_s = float(lasts[num_up < 1].sum())
    return FleetTime(
        duration_s=duration_s,
        goodput=trained / (fleet.num_chips * duration_s),
        uptime=1.0 - nobody_s / duration_s,
        nobody_s=nobody_s,
        below_quorum_s=float(lasts[num_up < quorum].sum()),
        num_failures=sum(each.num_failures for each in learners),
        num_reconfigurations=sum(each.num_reconfigurations for each in learners),
    )


def stopped(learner: LearnerTime, duration_s: float) -> list[tuple[float, float]]:
    """Give the times in which a learner did not train, as (from, to) in seconds."""
    begins, ends = learner.begins.tolist(), learner.ends.tolist()
    gaps = zip([0.0, *ends], [*begins, duration_s], strict=True)
    return [(start, end) for start, end in gaps if end > start]
