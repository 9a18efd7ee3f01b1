"""The syncer's side of simulated rounds: the real machines of all fragments under SimPy's clock.

It performs what `FragmentRounds` instructs, wakes it when it asks for that, and tells learners what
has been published. Commits take no time.

Not the syncer of `diloco.simulations.runs`: a learner that an outage stops keeps its place in the
rounds, where an island of a run comes back as a new start; and goodput is computed without torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import simpy

from diloco.protocol.rounds.state import FragmentRounds
from diloco.protocol.rounds.terms import (
    Close,
    Instruction,
    LaneArrival,
    RecordExpiry,
    Roster,
    RoundKey,
    RoundRules,
)
from diloco.protocol.rounds.timing import MeasuredTiming, StepTimes, TimingRules


@dataclass(frozen=True, slots=True)
class LearnerRounds:
    """How learners synchronise.

    Attributes:
        num_fragments: P.
        quorum: K, contributions that close a round; None: a scheduled run, whose rounds count all
            learners, and wait for them however long it takes.
        timing: H, tau, and bounds of the times that are measured where nobody waits.
        up_s: Seconds until a contribution is at its syncer.
        down_s: Seconds until what is published is at the learners.
    """

    num_fragments: int
    quorum: int | None
    timing: TimingRules
    up_s: float = 0.0
    down_s: float = 0.0


class FragmentSyncer:
    """The rounds of one fragment.

    Attributes:
        rounds: The machine.
        arrived: Version that has reached the learners.
        contributors: How many learners each version has counted.
    """

    def __init__(
        self,
        env: simpy.Environment,
        fragment_id: int,
        rounds: LearnerRounds,
        learners: Sequence[str],
        steps: StepTimes,
    ) -> None:
        """Start with version 0 at all learners, and the first round open or due."""
        self._env, self._way = env, rounds
        is_scheduled = rounds.quorum is None
        phase = (fragment_id + 1) / rounds.num_fragments  # fragments take turns
        self.rounds = FragmentRounds(
            fragment_id,
            0,
            RoundRules(
                tuple(learners),
                num_lanes=1,
                deadline_s=math.inf if is_scheduled else rounds.timing.deadline_cap_s,
                min_contributions=rounds.quorum,
                max_expired_in_a_row=None,
                min_members=None if is_scheduled else 1,
            ),
            None
            if is_scheduled
            else MeasuredTiming(replace(rounds.timing, phase=phase), steps, begins_at=0.0),
        )
        self.arrived = 0
        self.contributors: list[int] = []
        self._arrives = env.event()
        self._wakes_at = math.inf
        for name in learners:
            self._perform(self.rounds.granted(name, 1, env.now))
        self._perform(self.rounds.founded(0, 0, {}, env.now))

    def join(self, name: str, learners: Sequence[str]) -> None:
        """Take a learner into the next openings; `learners` are all that there are now."""
        self._perform(self.rounds.granted(name, 1, self._env.now))
        self._perform(self.rounds.set_roster(Roster(tuple(learners)), self._env.now))

    def send(self, name: str, key: RoundKey, steps: int) -> None:
        """Have a contribution of so many inner steps arrive."""
        lane = LaneArrival(key, name, 1, 0, name.encode(), steps, steps, steps, False)

        def arrive() -> None:
            self._perform(self.rounds.lane_received(lane, self._env.now)[1])

        self._after(self._way.up_s, arrive)

    def decline(self, name: str, key: RoundKey) -> None:
        """Have a learner say that it has nothing to contribute."""
        self._perform(self.rounds.refused(key, name, 1, "declined", self._env.now))

    def wake(self) -> None:
        """Look at the clock again: step times have become known, on which openings hang."""
        self._perform([])

    def until(self, version: int) -> simpy.events.ProcessGenerator:
        """Wait until a version has reached the learners."""
        while self.arrived < version:
            yield self._arrives

    def _perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Close(key, contributors):
                    self.contributors.append(len(contributors))
                    self._after(self._way.down_s, self._arrive)
                    self._perform(self.rounds.committed(key, self._env.now))
                case RecordExpiry(key):
                    self._perform(self.rounds.expiry_recorded(key, self._env.now))
        if (wake := self.rounds.next_wake) < self._wakes_at:
            self._wakes_at = wake
            self._after(max(0.0, wake - self._env.now), lambda: self._tick(wake))

    def _tick(self, at: float) -> None:
        """Wake the machine, unless it has asked for an earlier time since."""
        if at == self._wakes_at:
            self._wakes_at = math.inf
            self._perform(self.rounds.tick(max(at, self._env.now)))

    def _arrive(self) -> None:
        self.arrived += 1
        self.rounds.fetched(self._env.now)
        self._arrives.succeed()
        self._arrives = self._env.event()

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._env.timeout(seconds).callbacks.append(lambda _: act())
