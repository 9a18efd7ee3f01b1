"""The file of a goodput scenario: chips, how they fail, learners, how they synchronise.

Every key has a default; those of failures are fitted to Decoupled DiLoCo's Table 1, whose own are
not published.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, model_validator

from diloco.config.classes import Range, Section
from diloco.config.fields import (
    MOST_STEPS,
    AutoPause,
    Deadline,
    Duration,
    Problem,
    Step,
    several_problems,
)
from diloco.config.load import section_with, values_of
from diloco.errors import ConfigError
from diloco.protocol.rounds.timing import TimingRules
from diloco.simulations.goodput.failures import MOST_FAILURES, Fleet
from diloco.simulations.goodput.learners import Learner
from diloco.simulations.goodput.lifetimes import Lifetimes
from diloco.simulations.goodput.rounds import LearnerRounds

#: As long as a run or a chip lives.
Era: TypeAlias = Annotated[Duration, Range("1min", "10000000h")]
#: What a reconfiguration or an exchange takes.
Pause: TypeAlias = Annotated[Duration, Range("0s", "168h")]
Shape: TypeAlias = Annotated[float, Field(gt=0.05, le=100)]


class ChipFailuresConfig(Section):
    """How chips fail, and what a learner does then."""

    mtbi: Era = Field(default=Duration("8760h"), description="Mean time until a chip fails")
    shape: Shape = Field(
        default=1.0, description="Of that time, Weibull: below 1 the young fail more, above the old"
    )
    exponent: Shape = Field(
        default=1.0, description="Of that time, exponentiated Weibull: above 1 few short times"
    )
    elastic: bool = Field(
        default=True, description="Whether a learner trains on with fewer chips; else a spare"
    )
    shrink: Pause = Field(
        default=Duration("20s"),
        description="Elastic: time from a failure until the learner trains again",
    )
    restart: Pause = Field(
        default=Duration("73s"),
        description="Not elastic: time from a failure until the learner trains again",
    )
    chips_lost: int = Field(
        default=1, ge=1, description="Chips that leave with a failed one: its host or slice"
    )


class ReturnsConfig(Section):
    """When failed chips come back, and how they are taken in."""

    mean: Era = Field(
        default=Duration("2min"), description="Mean time from a failure until a chip is back"
    )
    shape: Shape = Field(
        default=2.0, description="Of that time, Weibull (1: exponential): below 1 a few long times"
    )
    exponent: Shape = Field(
        default=3.0, description="Of that time, exponentiated Weibull: above 1 few short times"
    )
    growth: Pause = Field(
        default=Duration("15s"), description="Time for which taking chips in stops their learner"
    )
    merge_growth: bool = Field(
        default=True,
        description="Whether returned chips wait until no other of the learner is away, or join "
        "the next failure's reconfiguration",
    )


class RoundsConfig(Section):
    """How learners synchronise; keys and defaults as in a run's [outer], preset decoupled."""

    merge: Literal["on_arrival", "scheduled"] = Field(
        default="on_arrival",
        description="on_arrival: a quorum closes rounds and nobody waits; scheduled: everybody "
        "waits for everybody",
    )
    quorum: int = Field(
        default=1, ge=0, description="K, learners that close a round; 0: all; on_arrival only"
    )
    inner_steps_per_round: int = Field(default=24, ge=1, le=MOST_STEPS, description="H")
    num_fragments: int = Field(default=24, ge=1, le=1024, description="P")
    overlap_steps: int = Field(default=2, ge=0, description="tau, inner steps; less than H")
    grace: AutoPause = Field(
        default=Duration("auto"),
        description="Time from a quorum to the close; auto: grace_share of what tau steps leave",
    )
    grace_share: float = Field(default=0.5, ge=0, le=1, description="gamma of grace = auto")
    grace_cap: Deadline = Field(default=Duration("10s"), description="Longest grace of auto")
    step_time: Step = Field(default=Duration("1s"), description="Mean inner step of a learner")
    slow_learners: int = Field(default=0, ge=0, description="Learners that are slower")
    slow_by: float = Field(
        default=0.0, ge=0, le=0.95, description="Share of the speed that these lack"
    )
    noise: float = Field(
        default=0.0, ge=0, lt=1, description="A step takes up to this share more or less"
    )
    up_time: Pause = Field(default=Duration("100ms"), description="Time a contribution travels")
    down_time: Pause = Field(
        default=Duration("100ms"), description="Time a published version travels"
    )
    simulated_steps: int = Field(
        default=480, ge=1, le=100_000, description="Inner steps of a full-speed learner simulated"
    )

    @model_validator(mode="before")
    @classmethod
    def _wait_for_all(cls, data: Any) -> Any:
        """Let a scheduled run count all, where nothing else is said; `data` is of any type."""
        is_scheduled = isinstance(data, Mapping) and data.get("merge") == "scheduled"
        return {"quorum": 0, **data} if is_scheduled else data

    @model_validator(mode="after")
    def _check_used(self) -> RoundsConfig:
        """Refuse what would change nothing, and an overlap that no schedule has."""
        problems: list[Problem] = []
        if self.overlap_steps >= self.inner_steps_per_round:
            message = f"must be less than inner_steps_per_round = {self.inner_steps_per_round}"
            problems.append(("overlap_steps", self.overlap_steps, message))
        if self.slow_by and not self.slow_learners:
            problems.append(("slow_by", self.slow_by, "is of nobody: give slow_learners, too"))
        is_scheduled = self.merge == "scheduled"
        if self.simulated_steps <= (before := self.inner_steps_per_round + self.overlap_steps):
            message = f"must be over {before}, H + tau, for every fragment to be merged once"
            problems.append(("simulated_steps", self.simulated_steps, message))
        unused = {"grace": is_scheduled, "grace_share": is_scheduled or self.grace != "auto"}
        for name, is_unused in {**unused, "grace_cap": unused["grace_share"]}.items():
            if is_unused and getattr(self, name) != type(self).model_fields[name].default:
                message = 'changes nothing here: it is of merge = "on_arrival" and grace = "auto"'
                problems.append((name, getattr(self, name), message))
        if problems:
            raise several_problems(problems)
        return self

    @property
    def step_s(self) -> float:
        """Mean seconds of an inner step of a full-speed learner."""
        return self.step_time.seconds

    def rounds(self, learners: int) -> LearnerRounds:
        """Give how so many learners synchronise."""
        timing = TimingRules(
            inner_steps_per_round=self.inner_steps_per_round,
            overlap_steps=self.overlap_steps,
            grace_share=self.grace_share,
            grace_cap_s=self.grace_cap.seconds,
            deadline_cap_s=60.0,
            grace_s=None if self.grace == "auto" else self.grace.seconds,
        )
        return LearnerRounds(
            self.num_fragments,
            None if self.merge == "scheduled" else self.quorum or learners,
            timing,
            up_s=self.up_time.seconds,
            down_s=self.down_time.seconds,
        )

    def learners(self, learners: int) -> list[Learner]:
        """Give the learners, the slow ones last."""
        slow = Learner(self.step_s / (1.0 - self.slow_by), self.noise)
        fast = learners - self.slow_learners
        return [Learner(self.step_s, self.noise)] * fast + [slow] * self.slow_learners


class GoodputConfig(Section):
    """A whole scenario."""

    chips: int = Field(default=1_200_000, ge=1, le=100_000_000, description="N, of all learners")
    learners: int = Field(default=8, ge=1, le=4096, description="M; 1: one elastic job")
    duration: Era = Field(
        default=Duration("720h"), description="Time that failures are simulated for"
    )
    seed: int = Field(default=1, ge=0, lt=2**32, description="Of everything that is drawn")
    failures: ChipFailuresConfig = Field(default=ChipFailuresConfig(), description="How chips fail")
    returns: ReturnsConfig = Field(default=ReturnsConfig(), description="How they come back")
    rounds: RoundsConfig = Field(default=RoundsConfig(), description="How learners synchronise")

    @model_validator(mode="after")
    def _check_together(self) -> GoodputConfig:
        rounds, learners, problems = self.rounds, self.learners, list[Problem]()
        if learners > self.chips:
            problems.append(("learners", learners, f"is more than chips = {self.chips}"))
        elif self.failures.chips_lost > self.chips // learners:
            message = f"is more than the {self.chips // learners} chips of a learner"
            problems.append(("failures.chips_lost", self.failures.chips_lost, message))
        if rounds.quorum > learners:
            message = f"is more than learners = {learners}"
            problems.append(("rounds.quorum", rounds.quorum, message))
        elif rounds.merge == "scheduled" and rounds.quorum not in (0, learners):
            message = f'is not all: merge = "scheduled" waits for all, 0 or {learners}'
            problems.append(("rounds.quorum", rounds.quorum, message))
        if rounds.slow_learners > learners:
            message = f"is more than learners = {learners}"
            problems.append(("rounds.slow_learners", rounds.slow_learners, message))
        expected = self.chips * self.duration_s / self.failures.mtbi.seconds
        if expected > MOST_FAILURES:
            hours = self.duration_s / 3600 * MOST_FAILURES / expected
            message = (
                f"comes to {expected:.2g} failures, too many to simulate: at most {hours:.3g}h"
            )
            problems.append(("duration", self.duration, message))
        if problems:
            raise several_problems(problems)
        return self

    @property
    def duration_s(self) -> float:
        """Seconds that failures are simulated for."""
        return self.duration.seconds

    @property
    def fleet(self) -> Fleet:
        """Chips and learners."""
        failures, returns = self.failures, self.returns
        return Fleet(
            self.chips,
            self.learners,
            Lifetimes(failures.mtbi.seconds, failures.shape, failures.exponent),
            Lifetimes(returns.mean.seconds, returns.shape, returns.exponent),
            is_elastic=failures.elastic,
            shrink_s=failures.shrink.seconds,
            restart_s=failures.restart.seconds,
            growth_s=returns.growth.seconds,
            merges_growth=returns.merge_growth,
            chips_lost=failures.chips_lost,
        )


def load_goodput(
    path: Path | None, flags: Mapping[str, Any], *, has_both: bool = False
) -> GoodputConfig:
    """Read a scenario and lay flags over it.

    Args:
        path: TOML file; None: what `flags` leave out has its default.
        flags: Values by dotted path, of any TOML type.
        has_both: Whether both kinds of learners are made of it, elastic and not: a paper's table.

    Raises:
        ConfigError: If the file cannot be read, is no TOML, or has problems: one a line; or says
            what only learners of the other kind have a use for.
    """
    raw = {} if path is None else values_of(path, GoodputConfig)
    for dotted, value in flags.items():
        *tables, key = dotted.split(".")
        table = raw
        for name in tables:
            below = table.get(name, {})
            # What is no table stays, for validation to name.
            table[name] = {**below} if isinstance(below, dict) else below
            table = table[name] if isinstance(below, dict) else {}
        table[key] = value
    config = section_with(raw, GoodputConfig, f"cannot load {path or 'what the flags say'}")
    if not has_both:
        _check_kind(config.failures)
    return config


def _check_kind(failures: ChipFailuresConfig) -> None:
    """Refuse what changes nothing for learners of this kind."""
    other = ("restart",) if failures.elastic else ("shrink", "chips_lost")
    for key in other:
        value = getattr(failures, key)
        if value != ChipFailuresConfig.model_fields[key].default:
            kind = f"failures.elastic = {str(not failures.elastic).lower()}"
            raise ConfigError(
                f"failures.{key}: {value} changes nothing here: it is of {kind}; leave it out"
            )
