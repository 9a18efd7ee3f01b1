"""Why rounds have an opening floor: without it, where nobody waits, islands publish alone.

Islands here are their step boundaries alone: at one they merge what has been published, by then
fetched, and send to what is open, with the steps made since their last counted send; who was not
counted has lost its steps, and who has none declines.

Source: PROTOCOL.md, "Opening".
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

import pytest

from diloco.protocol.rounds.state import FragmentRounds
from diloco.protocol.rounds.terms import (
    Close,
    Instruction,
    LaneArrival,
    Opened,
    OutcomeKind,
    RecordExpiry,
    RoundKey,
    RoundRules,
)
from diloco.protocol.rounds.timing import MeasuredTiming, StepTimes, TimingRules

ISLANDS = ("a", "b", "c", "d")
STEP_S, JITTER = 1.0, 0.02
#: Seconds until an island hears, until its contribution is there, and until it holds a version.
HEARS_S, SENDS_S, FETCHES_S = 0.02, 0.1, 0.1
TIMING = TimingRules(
    inner_steps_per_round=8,
    overlap_steps=2,
    grace_share=0.5,
    grace_cap_s=10.0,
    deadline_floor_s=1.0,
    deadline_cap_s=60.0,
)


class WithoutFloor(MeasuredTiming):
    def opens_at(self, live: Collection[str]) -> float:
        return -math.inf


@dataclass
class Island:
    steps: int = 0
    base: int = 0
    sent: RoundKey | None = None
    answered: RoundKey | None = None


class Simulation:
    """One fragment, quorum 1, four equal islands; runs until so many versions are published."""

    def __init__(self, timing: type[MeasuredTiming], seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.order = itertools.count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.islands = {name: Island() for name in ISLANDS}
        steps = StepTimes()
        for name in ISLANDS:
            steps.stepped(name, STEP_S)
            self.after(self.random.uniform(0.0, STEP_S), self.boundary, name)
        rules = RoundRules(
            ISLANDS, 1, 60.0, min_contributions=1, max_expired_in_a_row=None, min_members=1
        )
        self.rounds = FragmentRounds(0, 0, rules, timing(TIMING, steps, begins_at=0.0))
        self.contributors: list[int] = []
        self.opened_at = self.published_at = -math.inf
        for name in ISLANDS:
            self.perform(self.rounds.granted(name, 1, 0.0))
        self.perform(self.rounds.founded(0, 0, {}, 0.0))

    def run(self, num_versions: int) -> list[int]:
        """Return how many islands made each version."""
        while len(self.contributors) < num_versions:
            self.now, _, act = heapq.heappop(self.events)
            act()
        return self.contributors

    def after(self, seconds: float, act: Callable[[str], None], name: str) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), lambda: act(name)))

    def perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Opened():
                    self.opened_at = self.now
                case Close(key, contributors):
                    self.contributors.append(len(contributors))
                    self.published_at = self.now
                    self.after(FETCHES_S, lambda _: self.rounds.fetched(self.now), "")
                    self.perform(self.rounds.committed(key, self.now))
                case RecordExpiry(key):
                    self.perform(self.rounds.expiry_recorded(key, self.now))
        wake = self.rounds.next_wake
        if wake < math.inf:
            self.after(max(0.0, wake - self.now), lambda _: self.tick(), "")

    def tick(self) -> None:
        if self.now >= self.rounds.next_wake:
            self.perform(self.rounds.tick(self.now))

    def boundary(self, name: str) -> None:
        """An island has made a step."""
        island, rounds = self.islands[name], self.rounds
        island.steps += 1
        self.after(STEP_S * self.random.uniform(1 - JITTER, 1 + JITTER), self.boundary, name)
        if rounds.version > island.base and self.now >= self.published_at + FETCHES_S:
            was_counted = island.sent is not None and (
                (end := rounds.outcome(island.sent, name, 1)) is not None
                and end.kind is OutcomeKind.INCLUDED
            )
            if not was_counted:
                island.steps = 0
            island.base, island.sent = rounds.version, None
        key = rounds.key
        is_heard = rounds.is_open and self.now >= self.opened_at + HEARS_S
        if is_heard and key.version == island.base and island.answered != key:
            island.answered = key
            if island.steps:
                island.sent, sent = key, island.steps
                island.steps = 0
                self.after(SENDS_S, lambda n: self.arrive(n, key, sent), name)
            else:
                self.after(HEARS_S, lambda n: self.decline(n, key), name)

    def arrive(self, name: str, key: RoundKey, steps: int) -> None:
        lane = LaneArrival(key, name, 1, 0, name.encode(), steps, steps, steps, False)
        _, instructions = self.rounds.lane_received(lane, self.now)
        self.perform(instructions)

    def decline(self, name: str, key: RoundKey) -> None:
        self.perform(self.rounds.refused(key, name, 1, "declined", self.now))


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_with_the_floor_hardly_a_round_is_solo_and_without_it_nearly_all_are(seed: int) -> None:
    with_floor = Simulation(MeasuredTiming, seed).run(1000)
    without = Simulation(WithoutFloor, seed).run(1000)

    assert with_floor.count(1) <= 5
    assert without.count(1) > 900
