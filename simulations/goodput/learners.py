"""Learners of unequal speed and the rounds that they make: who waits, and whose work is counted.

The project's own machines decide: `FragmentRounds` (quorum, grace, who is counted), its
`MeasuredTiming` (openings, grace, deadlines) and `Schedule` (what a scheduled run sends and merges,
and when). A learner here is its step boundaries alone:

    scheduled     after a step it sends what is due, and waits for what is to be merged
    on arrival    it merges what has arrived, sends to what is open, and waits for nothing

A learner that an outage stops loses the step that it is in. No bandwidth is modelled: contributions
and versions travel for a fixed time.

Source: PROTOCOL.md, "Rounds" and "When islands send and merge"; Decoupled DiLoCo (arXiv
2604.21428), heterogeneous learners.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import simpy

from diloco.outer.schedule import Schedule
from diloco.protocol.rounds.terms import RoundKey
from diloco.protocol.rounds.timing import StepTimes
from diloco.simulations.goodput.rounds import FragmentSyncer, LearnerRounds

_DRAWN = 256
_ENDLESS = 10**9


@dataclass(frozen=True, slots=True)
class Learner:
    """One learner.

    Attributes:
        step_s: Mean seconds of its inner step, > 0.
        noise: A step takes up to this share more or less, evenly spread.
        outages: When it is stopped, as (from, to) in seconds, in order.
        joins_at: Share of the run's steps after which it joins; 0: it is there from the start.
    """

    step_s: float
    noise: float = 0.0
    outages: Sequence[tuple[float, float]] = ()
    joins_at: float = 0.0


@dataclass(frozen=True, slots=True)
class LearnersTime:
    """What learners did.

    Attributes:
        duration_s: Virtual seconds.
        goodput: Share of the time of all learners in inner steps that were not lost.
        steps: Inner steps of each.
        present: Learners that were there, on average over the time.
        num_rounds: That were published.
        contributors: Of a round, on average.
        solo: Share of the rounds that counted one learner only.
        counted: Share of the contributions that were counted.
    """

    duration_s: float
    goodput: float
    steps: tuple[int, ...]
    present: float
    num_rounds: int
    contributors: float
    solo: float
    counted: float


def simulate_learners(
    learners: Sequence[Learner],
    rounds: LearnerRounds,
    rng: np.random.Generator,
    *,
    duration_s: float = math.inf,
    total_steps: float = math.inf,
    on_progress: Callable[[float], None] | None = None,
) -> LearnersTime:
    """Run until a time, or until all learners together have made so many inner steps.

    Args:
        learners: At least one is there from the start; in a scheduled run all are.
        rounds: How they synchronise.
        rng: Source of randomness; each learner has a stream of its own.
        duration_s: Virtual seconds.
        total_steps: Inner steps of all; `joins_at` is a share of them.
        on_progress: Told the virtual time, every now and then.

    Raises:
        ValueError: If nobody is there from the start, or somebody joins a scheduled run.
    """
    late = sum(each.joins_at > 0 for each in learners)
    if late == len(learners) or (late and rounds.quorum is None):
        raise ValueError(f"{late} of {len(learners)} join late: at most all but one, on arrival")
    run = _Run(learners, rounds, rng, total_steps)
    if math.isfinite(duration_s):
        run.end_at(duration_s)
    return run.until_over(on_progress)


class _Run:
    """One run of `simulate_learners`."""

    def __init__(
        self,
        learners: Sequence[Learner],
        rounds: LearnerRounds,
        rng: np.random.Generator,
        total_steps: float,
    ) -> None:
        self._env = simpy.Environment()
        self._over = self._env.event()
        self._total_steps, self.rounds = total_steps, rounds
        names = [f"learner-{slot:04}" for slot in range(len(learners))]
        streams = rng.spawn(len(learners))
        self._live = [n for n, each in zip(names, learners, strict=True) if not each.joins_at]
        self._steps_s = StepTimes()
        self.fragments = [
            FragmentSyncer(self._env, p, rounds, self._live, self._steps_s)
            for p in range(rounds.num_fragments)
        ]
        self.schedule = Schedule.make(
            inner_steps_per_round=rounds.timing.inner_steps_per_round,
            num_fragments=rounds.num_fragments,
            overlap_steps=rounds.timing.overlap_steps,
            inner_steps=_ENDLESS,
            flush=False,
        )
        place = _Scheduled if rounds.quorum is None else _OnArrival
        self._places = [
            place(self._env, name, learner, stream, self)
            for name, learner, stream in zip(names, learners, streams, strict=True)
        ]
        self._waiting = [each for each in self._places if each.learner.joins_at]
        for each in self._places:
            if not each.learner.joins_at:
                self._env.process(each.train())

    def end_at(self, duration_s: float) -> None:
        """End after so many virtual seconds."""
        self._env.timeout(duration_s).callbacks.append(lambda _: self._end())

    def until_over(self, on_progress: Callable[[float], None] | None) -> LearnersTime:
        """Run to the end."""
        if on_progress is not None:
            self._env.process(self._report(on_progress))
        self._env.run(until=self._over)
        now, began = self._env.now, [p for p in self._places if p.began_at is not None]
        present_s = sum(now - (each.began_at or 0.0) for each in began)
        contributors = [count for f in self.fragments for count in f.contributors]
        num_rounds = max(len(contributors), 1)
        return LearnersTime(
            duration_s=now,
            goodput=sum(each.trained_s for each in began) / present_s,
            steps=tuple(each.step for each in self._places),
            present=present_s / now,
            num_rounds=len(contributors),
            contributors=sum(contributors) / num_rounds,
            solo=contributors.count(1) / num_rounds,
            counted=sum(contributors) / max(sum(each.num_sent for each in began), 1),
        )

    def stepped(self, name: str, step_s: float) -> None:
        """Record an inner step: how long it took, who joins now, whether the run ends."""
        is_first = not self._steps_s.of([name])
        self._steps_s.stepped(name, step_s)
        if is_first:
            for fragment in self.fragments:
                fragment.wake()
        if math.isinf(self._total_steps):
            return
        made = sum(each.step for each in self._places)
        while self._waiting and made >= self._waiting[0].learner.joins_at * self._total_steps:
            self._join(self._waiting.pop(0))
        if made >= self._total_steps:
            self._end()

    def _join(self, place: _LearnerPlace) -> None:
        self._live = sorted([*self._live, place.name])
        for fragment in self.fragments:
            fragment.join(place.name, self._live)
        self._env.process(place.train())

    def _end(self) -> None:
        if not self._over.triggered:
            self._over.succeed()

    def _report(self, on_progress: Callable[[float], None]) -> simpy.events.ProcessGenerator:
        while True:
            on_progress(self._env.now)
            yield self._env.timeout(10 * self._places[0].learner.step_s)


@dataclass(slots=True)
class _Held:
    """A fragment at a learner: its version, since which step, and the attempt answered last."""

    version: int = 0
    since: int = 0
    answered: RoundKey | None = None


class _LearnerPlace:
    """A learner's steps; what happens between two of them is its subclass's."""

    def __init__(
        self,
        env: simpy.Environment,
        name: str,
        learner: Learner,
        rng: np.random.Generator,
        run: _Run,
    ) -> None:
        self.name, self.learner = name, learner
        self.step = self.num_sent = 0
        self.trained_s = 0.0
        self.began_at: float | None = None
        self._env, self._rng, self._run = env, rng, run
        self._held = [_Held() for _ in run.fragments]

    def train(self) -> simpy.events.ProcessGenerator:
        """Make steps until the simulation ends."""
        self.began_at = self._env.now
        outages = [*self.learner.outages]
        for step_s in self._drawn():
            while outages and outages[0][0] < self._env.now + step_s:
                _, until = outages.pop(0)  # the step that was begun is lost
                yield self._env.timeout(max(0.0, until - self._env.now))
            yield self._env.timeout(step_s)
            self.step += 1
            self.trained_s += step_s
            self._run.stepped(self.name, step_s)
            yield from self.boundary()

    def boundary(self) -> simpy.events.ProcessGenerator:
        """Send and merge after an inner step."""
        raise NotImplementedError

    def _drawn(self) -> Iterator[float]:
        mean_s, noise = self.learner.step_s, self.learner.noise
        while True:
            yield from (mean_s * (1.0 + self._rng.uniform(-noise, noise, _DRAWN))).tolist()

    def _send(self, fragment: FragmentSyncer, key: RoundKey, steps: int) -> None:
        self.num_sent += 1
        fragment.send(self.name, key, steps)


class _Scheduled(_LearnerPlace):
    """Sends and merges at known steps, and waits for what is to be merged."""

    def boundary(self) -> simpy.events.ProcessGenerator:
        """See `_LearnerPlace`."""
        schedule, fragments = self._run.schedule, self._run.fragments
        for p in schedule.due(self.step):
            key = RoundKey(0, p, self._held[p].version, 0)
            self._send(fragments[p], key, schedule.inner_steps_per_round)
        for p in schedule.due(self.step - schedule.overlap_steps):
            self._held[p].version += 1
            yield from fragments[p].until(self._held[p].version)


class _OnArrival(_LearnerPlace):
    """Merges what has arrived and sends to what is open; work that was not counted is dropped."""

    def boundary(self) -> simpy.events.ProcessGenerator:
        """See `_LearnerPlace`."""
        for fragment, held in zip(self._run.fragments, self._held, strict=True):
            if fragment.arrived > held.version:
                held.version, held.since = fragment.arrived, self.step
            key = fragment.rounds.key
            is_asked = fragment.rounds.is_open and key.version == held.version
            if not is_asked or held.answered == key:
                continue
            held.answered = key
            if steps := self.step - held.since:
                self._send(fragment, key, steps)
            else:
                fragment.decline(self.name, key)
        yield from ()
