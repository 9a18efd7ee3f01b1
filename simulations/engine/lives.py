"""When islands are there: failures and repairs drawn from distributions, joins and leaves given.

An island that is away has lost what was in its memory and on its way; it comes back as a new start
(incarnation), as `diloco.protocol.island.resume_point` and PROTOCOL.md, "Return of an island" say.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from diloco.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Weibull:
    """A distribution of durations.

    Attributes:
        mean_s: Mean in seconds; over 0.
        shape: 1 is the exponential distribution; under 1 some are very long, over 1 they are alike.
    """

    mean_s: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what is no distribution.

        Raises:
            ConfigError: Naming the value and its range.
        """
        for name, value in (("mean_s", self.mean_s), ("shape", self.shape)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} = {value} must be over 0 and finite")

    def draw(self, stream: random.Random) -> float:
        """Draw a duration in seconds."""
        return stream.weibullvariate(self.mean_s / math.gamma(1 + 1 / self.shape), self.shape)


@dataclass(frozen=True, slots=True)
class Absence:
    """An island is away: from 0, it joins late; without an end, it leaves."""

    begin_s: float
    end_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Failures:
    """How islands fail: `lives` from a start to the failure, `repairs` from there to the next."""

    lives: Weibull
    repairs: Weibull

    def draw(self, stream: random.Random) -> Iterator[Absence]:
        """Draw when an island is away, again and again, without an end."""
        now = 0.0
        while True:
            begin_s = now + self.lives.draw(stream)
            now = begin_s + self.repairs.draw(stream)
            yield Absence(begin_s, now)


def check_absences(
    absences: Mapping[str, Sequence[Absence]], islands: Sequence[str], *, on_arrival: bool
) -> None:
    """Refuse absences that cannot be.

    Raises:
        ConfigError: If one is of no island, is not after the one before, or is a late join in a
            run that begins with all its islands.
    """
    for name, several in absences.items():
        if name not in islands:
            raise ConfigError(f"absences.{name}: no such island; there are {', '.join(islands)}")
        end_s = -1.0
        for index, each in enumerate(several):
            if not max(end_s, 0.0) <= each.begin_s < each.end_s:
                raise ConfigError(
                    f"absences.{name}.{index}: [{each.begin_s}, {each.end_s}) s must have a "
                    f"length, and begin at {max(end_s, 0.0)} s or later"
                )
            end_s = each.end_s
        if several and several[0].begin_s == 0 and not on_arrival:
            raise ConfigError(
                f"absences.{name}.0 begins at 0 s: a scheduled run begins when all its islands "
                'have joined; only outer.merge = "on_arrival" lets them come later'
            )
