"""What it costs to take an island into a run that goes on: nobody waits, the new one copies first.

By events, of the project's own rounds and entry (`scenarios.utilization`): the island that comes
late is granted, fetches what is published of every fragment over its own line, and trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from diloco.simulations.engine.lives import Absence
from diloco.simulations.engine.timeline import Span
from diloco.simulations.published.check_row import Comparison
from diloco.simulations.runs.actors import Publication
from diloco.simulations.scenarios.scenario import Scenario, at_bandwidth
from diloco.simulations.scenarios.utilization import (
    island_names,
    layered_plan,
    simulate_scenario,
)

_COPY_BITS = 32  # of a parameter that enters
#: Rounds until the island joins, of which the last is what its coming is held against.
_ROUNDS_BEFORE = 2
_SOURCE = "Decoupled DiLoCo (2604.21428), Fig. 12"


@dataclass(frozen=True, slots=True)
class Joining:
    """What became of a run in the round in which an island came, or longer if it copied longer.

    Attributes:
        waited_steps: Inner steps for which it had nothing to train on.
        lost_steps: For which one of the others did not train, at most.
        pace: Versions that were published, over those of as much time before.
        counted: Of the others, a version, until the new one had made its first step.
        counted_before: The same before it came.
    """

    waited_steps: float
    lost_steps: float
    pace: float
    counted: float
    counted_before: float

    @property
    def goes_on(self) -> bool:
        """Whether the others' rounds are as before, but for a few."""
        return self.pace >= 0.85 and self.counted >= 0.85 * self.counted_before


def simulate_join(scenario: Scenario, copy_steps: float) -> Joining:
    """Have the last island of a scenario come when the others have made some rounds.

    Args:
        scenario: Decoupled. The middle has as much bandwidth as all its islands.
        copy_steps: Inner steps for which a copy of the model in float32 takes an island's line.
    """
    step_s = scenario.step_s
    bandwidth_bps = _COPY_BITS * scenario.params / (copy_steps * step_s)
    period_s = scenario.inner_steps_per_round * step_s
    joins_at = _ROUNDS_BEFORE * period_s
    *others, new = island_names(scenario)
    run = simulate_scenario(
        scenario,
        at_bandwidth(scenario.profile, bandwidth_bps),
        layered_plan(scenario),
        1,  # a seed
        syncer_bps=scenario.islands * bandwidth_bps,
        end_s=joins_at + max(period_s, (copy_steps + 3) * step_s),
        absences={new: [Absence(0.0, joins_at)]},
    )
    begun_s = min(s.begin_s for s in run.spans if (s.island, s.kind) == (new, "compute"))
    first_s = begun_s + step_s
    until_s = max(first_s, joins_at + period_s)
    versions = run.publications
    num_before = len(_between(versions, joins_at - period_s, joins_at))
    num_after = len(_between(versions, joins_at, until_s))
    return Joining(
        waited_steps=(begun_s - joins_at) / step_s,
        lost_steps=max(_idle_s(run.spans, name, joins_at) for name in others) / step_s,
        pace=num_after / (until_s - joins_at) / (num_before / period_s),
        counted=_counted(_between(versions, joins_at, first_s), new),
        counted_before=_counted(_between(versions, joins_at - period_s, joins_at), new),
    )


def _idle_s(spans: Sequence[Span], island: str, since_s: float) -> float:
    """Sum up the time between an island's inner steps."""
    steps = [each for each in spans if each.island == island and each.kind == "compute"]
    return sum(b.begin_s - a.end_s for a, b in pairwise(steps) if b.begin_s > since_s)


def _between(versions: Sequence[Publication], begin_s: float, end_s: float) -> list[Publication]:
    return [each for each in versions if begin_s < each.published_s <= end_s]


def _counted(versions: Sequence[Publication], new: str) -> float:
    return sum(len({*each.contributors} - {new}) for each in versions) / max(len(versions), 1)


def join_cost() -> Iterator[Comparison]:
    """A9: what a join costs, with others in rounds that go on as before.

    Published: nothing for copies of up to 6 steps, and from H = 24 on what data parallel pays,
    which stops for the copy. Ours stops nobody who trains; the one that joins has nothing to train
    on before its copy is whole, also below 6 steps, which we read as no part of the published 0.
    """
    scenario = Scenario.model_validate(
        {"method": "decoupled", "islands": 8, "bits_up": 16.0, "step_noise": 0.05}
    )
    short, long = (simulate_join(scenario, copy_steps) for copy_steps in (6, 24))
    for join, of_whom, published, ours, within in (
        (short, "6 steps: lost by those who train", 0, short.lost_steps, 0.1),
        (long, "24 steps: until the new one trains", 24, long.waited_steps, 1.0),
    ):
        rounds = f"{join.counted:.1f} others counted ({join.counted_before:.1f} before)"
        what = f"a copy of {of_whom}; {rounds}"
        holds = join.goes_on and not join.lost_steps
        yield Comparison("A9", what, published, ours, within, False, "steps", _SOURCE, holds)
