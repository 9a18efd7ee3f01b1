"""The file of `diloco chaos`: which run, what happens to it when, and what is judged beyond.

`expand` turns a file into the faults of one run, a pure function of the file and of the run's
islands and syncers: explicit `[[fault]]` entries, and those that `[mix]` draws from `seed`.

    target                  what it is                          kinds
    coordinator, syncer     their process                       kill, freeze, clock
                                                                connect-storm
    syncer                                                      restart, truncate, flip, disk-full,
                                                                torn-newest
    NAME                    an island: supervisor and ranks     kill, restart, freeze, flip-bit,
                                                                poison, link faults
    NAME/R                  one rank of an island               kill, freeze
    bucket                  the object store of run.state, of   cut (refuses every connection),
                            every request or a share of them    delay, throttle, cut-requests,
                                                                cut-replies, corrupt, errors (500,
                                                                503, 429), read-only, clock
                                                                (RequestTimeTooSkewed), lose-object

Where a run has several syncers, they are `syncer-0`, `syncer-1` and so on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import xxhash
from pydantic import BeforeValidator, Field

from diloco.config.classes import Section
from diloco.config.fields import Bandwidth, Duration, Rate, Time, tuples
from diloco.config.load import load_section
from diloco.errors import ConfigError

COORDINATOR, SYNCER, BUCKET = "coordinator", "syncer", "bucket"
_SYNCER_NAME = re.compile(rf"{SYNCER}(-\d+)?")
#: Seconds between two link faults of one island: ranks read what happens to links once a second.
_BETWEEN_LINK_FAULTS_S = 2.0


class Kind(StrEnum):
    """Kinds of faults."""

    KILL = "kill"
    RESTART = "restart"
    FREEZE = "freeze"
    TRUNCATE = "truncate"
    FLIP = "flip"
    TORN_NEWEST = "torn-newest"
    DISK_FULL = "disk-full"
    CLOCK = "clock"
    CONNECT_STORM = "connect-storm"
    FLIP_BIT = "flip-bit"
    POISON = "poison"
    CUT = "cut"
    CUT_REQUESTS = "cut-requests"
    CUT_REPLIES = "cut-replies"
    DELAY = "delay"
    THROTTLE = "throttle"
    THIN_LINE = "thin-line"
    CORRUPT = "corrupt"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    ERRORS = "errors"
    READ_ONLY = "read-only"
    LOSE_OBJECT = "lose-object"

    @property
    def is_of_a_link(self) -> bool:
        """Whether it happens to the links of an island."""
        return self in _LINK_KINDS


_LINK_KINDS = frozenset(
    {
        Kind.CUT, Kind.CUT_REQUESTS, Kind.CUT_REPLIES, Kind.DELAY, Kind.THROTTLE, Kind.THIN_LINE,
        Kind.CORRUPT, Kind.DUPLICATE, Kind.REORDER,
    }
)  # fmt: skip
_KINDS_OF = {
    COORDINATOR: frozenset({Kind.KILL, Kind.FREEZE, Kind.CLOCK, Kind.CONNECT_STORM}),
    SYNCER: frozenset(
        {
            Kind.KILL, Kind.RESTART, Kind.FREEZE, Kind.TRUNCATE, Kind.FLIP, Kind.TORN_NEWEST,
            Kind.DISK_FULL, Kind.CLOCK, Kind.CONNECT_STORM,
        }
    ),
    BUCKET: frozenset(
        {
            Kind.CUT, Kind.DELAY, Kind.THROTTLE, Kind.CUT_REQUESTS, Kind.CUT_REPLIES, Kind.CORRUPT,
            Kind.ERRORS, Kind.READ_ONLY, Kind.CLOCK, Kind.LOSE_OBJECT,
        }
    ),
}  # fmt: skip
#: What an island trains is corrupted, without its knowing.
CORRUPTING = frozenset({Kind.FLIP_BIT, Kind.POISON})
_KINDS_OF_AN_ISLAND = frozenset({Kind.KILL, Kind.RESTART, Kind.FREEZE}) | _LINK_KINDS | CORRUPTING
_KINDS_OF_A_RANK = frozenset({Kind.KILL, Kind.FREEZE})
#: After these another coordinator or syncer serves.
ENDING = frozenset(
    {Kind.KILL, Kind.RESTART, Kind.TRUNCATE, Kind.FLIP, Kind.TORN_NEWEST, Kind.DISK_FULL}
)
#: Meet a share of a bucket's requests, and let none of their writes be known to have been done.
_OF_A_SHARE = frozenset({Kind.ERRORS, Kind.CUT_REQUESTS, Kind.CUT_REPLIES})
#: Seconds after which a bucket that takes nothing is an alarm: a sign of life comes every 2 s, each
#: of its two tries takes 3 s at most, and the coordinator looks every second.
_ALARM_S = 10.0
#: Over at once: there is nothing to end later.
_AT_ONCE = frozenset({Kind.TRUNCATE, Kind.FLIP, Kind.TORN_NEWEST, Kind.FLIP_BIT})

#: As a file names it, which has no enumerations.
NamedKind: TypeAlias = Annotated[Kind, Field(strict=False)]
Durations: TypeAlias = Annotated[tuple[Time, Time], BeforeValidator(tuples)]
Texts: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(tuples)]


class Strength(Section):
    """Strength of faults that have a degree."""

    delay: Time = Field(
        default=Duration("300ms"), description="By which calls are late; reorder: most"
    )
    bandwidth: Rate = Field(
        default=Bandwidth("5Mbit/s"), description="Of a throttled call, or a thin line"
    )
    share: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="Of the calls that corrupt, duplicate, reorder meet; of a bucket's requests "
        "also errors, cut-requests, cut-replies",
    )
    clock: Time = Field(default=Duration("1h"), description="By which a wall clock jumps ahead")
    what: Literal["model", "exp_avg", "exp_avg_sq"] = Field(
        default="model", description="Where a bit flips: in a parameter, or in a moment of it"
    )
    bit: int = Field(default=30, ge=0, le=30, description="Which of a float32 value; 30: highest")
    how: Literal["scale", "signs", "noise", "labels"] = Field(
        default="scale",
        description="Poison: updates times 100, with the other sign, noise of their size, or the "
        "tokens of every batch in another order",
    )


class FaultConfig(Strength):
    """One fault."""

    kind: NamedKind = Field(description="What happens")
    target: str = Field(
        min_length=1,
        description="To whom: coordinator, syncer (of several: syncer-0 ...), NAME, NAME/R, bucket",
    )
    at: Time = Field(
        description="Time since every island has begun to train; sooner where the run is so fast "
        "that it would end before `duration`"
    )
    lasts: Time = Field(
        default=Duration("0s"),
        description="For how long; of a kill: until a coordinator or island is started again",
    )


class MixConfig(Strength):
    """Faults drawn at random."""

    kinds: dict[NamedKind, float] = Field(
        default={}, description="Kind -> its weight; empty: nothing is drawn"
    )
    targets: Texts = Field(
        default=(), description="Who may be met; empty: coordinator, syncers and every island"
    )
    mean_gap: Time = Field(
        default=Duration("20s"),
        description="Mean of the time to the next fault, exponentially distributed",
    )
    lasts: Durations = Field(
        default=(Duration("1s"), Duration("5s")),
        description="Shortest and longest duration of what has one",
    )
    count: int = Field(default=0, ge=0, description="Faults at most; 0: as many as there is time")


class JudgeConfig(Section):
    """Bars of `--require` beyond the invariants; "0s" and 0: not judged."""

    coordinator_back: Time = Field(
        default=Duration("0s"),
        description="Longest time from a coordinator's kill to the next one serving",
    )
    syncer_back: Time = Field(
        default=Duration("0s"),
        description="The same of a syncer, beyond what importing its modules takes here",
    )
    published_again: Time = Field(
        default=Duration("0s"),
        description="Longest time from a fault's end to every fragment's next version",
    )
    others_slower: float = Field(
        default=0.0,
        ge=0,
        description="Largest rise of the time that a step of the other islands takes while one is "
        "killed or frozen, as a share; then nothing of theirs may wait or expire for it, either",
    )
    others_merge: Time = Field(
        default=Duration("2s"),
        description="With others_slower: longest time until all others' next merge",
    )
    included_steps: int = Field(
        default=26,
        ge=1,
        description="With others_slower: most inner steps of an island that starts again or goes "
        "on, until a contribution of it is included: H + tau",
    )
    loss_rise: float = Field(
        default=0.0,
        ge=0,
        description="Largest relative rise of the published parameters' held-out loss over that of "
        "the same run without faults, which is then made, too",
    )


class PlanConfig(Section):
    """A whole file."""

    run: str = Field(min_length=1, description="Run file, counted from this file's directory")
    set: Texts = Field(default=(), description="Overrides of it, as of `diloco local --set`")
    seed: int = Field(default=1, ge=0, lt=2**32, description="Of everything that is drawn")
    duration: Time = Field(description="Time in which faults happen, from the first step on")
    limit: Time = Field(description="Time after which a run that goes on is given up")
    inner_step: Time = Field(
        default=Duration("0s"),
        description="Least time of an inner step, the rest of it asleep: for plans that judge how "
        "soon a process is back, besides training that leaves it the cores",
    )
    certificates: bool = Field(
        default=False,
        description="Whether the run gets certificates of its own; those of a server change while "
        "strangers storm it (connect-storm)",
    )
    fault: Annotated[tuple[FaultConfig, ...], BeforeValidator(tuples)] = Field(
        default=(), description="Faults one by one"
    )
    mix: MixConfig = Field(default=MixConfig(), description="Faults drawn at random")
    judge: JudgeConfig = Field(default=JudgeConfig(), description="What --require asks for")


@dataclass(frozen=True, slots=True)
class TimedFault:
    """A fault of one run; durations in seconds."""

    number: int
    kind: Kind
    target: str
    at_s: float
    lasts_s: float
    seed: int
    strength: Strength = field(default_factory=Strength)

    @property
    def role(self) -> str:
        """`COORDINATOR`, `BUCKET`, or `SYNCER` of whichever of them; empty: about an island."""
        return _role_of(self.target)

    @property
    def island(self) -> str:
        """Island that it is about; empty: none."""
        return "" if self.role else self.target.partition("/")[0]

    @property
    def takes_nothing(self) -> bool:
        """Whether it keeps every write from a bucket for long enough to be an alarm."""
        if self.role != BUCKET or self.lasts_s < _ALARM_S:
            return False
        strength = self.strength
        is_of_all = self.kind in _OF_A_SHARE and strength.share == 1
        is_late = self.kind is Kind.DELAY and strength.delay.seconds >= _ALARM_S
        return is_of_all or is_late or self.kind in (Kind.CUT, Kind.READ_ONLY, Kind.CLOCK)

    @property
    def text(self) -> str:
        """Say what happens to whom."""
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.kind} {self.target}{lasts}"


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """A loaded file."""

    path: Path
    config: PlanConfig

    @property
    def run_file(self) -> Path:
        """The run."""
        return self.path.parent / self.config.run


def load_plan(path: Path) -> ChaosPlan:
    """Read a file.

    Raises:
        ConfigError: If it cannot be used.
    """
    return ChaosPlan(path, load_section(path, PlanConfig))


def expand(
    plan: PlanConfig,
    islands: Mapping[str, int],
    syncers: Sequence[str] = (SYNCER,),
    *,
    has_bucket: bool = False,
) -> tuple[TimedFault, ...]:
    """Give the faults of a run in the order of their times.

    Link faults of one island follow each other: one that would begin before another's end begins
    after it.

    Args:
        plan: The file.
        islands: Island -> its ranks.
        syncers: Their names.
        has_bucket: Whether the run's state is in an object store.

    Raises:
        ConfigError: If a target is none of this run, or the kind is none for it.
    """
    explicit = [(fault.at.seconds, fault) for fault in plan.fault]
    faults = sorted([*explicit, *_drawn(plan, islands, syncers)], key=lambda each: each[0])
    free_from: dict[str, float] = {}
    timed = []
    for at_s, fault in faults:
        _check_target(fault, islands, [*syncers, *([BUCKET] if has_bucket else [])])
        if at_s >= plan.limit.seconds:
            raise ConfigError(
                f"fault.at = {fault.at} of {fault.kind} of {fault.target}: the run is given up "
                f"after limit = {plan.limit}: give it an earlier time, or the run a longer one"
            )
        lasts_s = 0.0 if fault.kind in _AT_ONCE else fault.lasts.seconds
        if fault.kind.is_of_a_link:
            at_s = max(at_s, free_from.get(fault.target, 0.0))
            free_from[fault.target] = at_s + lasts_s + _BETWEEN_LINK_FAULTS_S
        timed.append((at_s, lasts_s, fault))
    timed.sort(key=lambda each: each[0])
    return tuple(
        TimedFault(
            number=number,
            kind=fault.kind,
            target=fault.target,
            at_s=at_s,
            lasts_s=lasts_s,
            seed=_hash(plan.seed, number, "seed") >> 32,
            strength=fault,
        )
        for number, (at_s, lasts_s, fault) in enumerate(timed)
    )


def _drawn(
    plan: PlanConfig, islands: Mapping[str, int], syncers: Sequence[str]
) -> Iterator[tuple[float, FaultConfig]]:
    mix = plan.mix
    targets = mix.targets or (COORDINATOR, *syncers, *sorted(islands))
    pairs = [
        (kind, target, weight)
        for kind, weight in sorted(mix.kinds.items())
        for target in targets
        if kind in _kinds_of(target)
    ]
    if mix.kinds and not pairs:
        raise ConfigError(f"mix: none of {[*mix.kinds]} can happen to {[*targets]}")
    # A kind's weight is shared by those that it can meet.
    shares = {kind: sum(1 for other, *_ in pairs if other == kind) for kind, *_ in pairs}
    weights = [weight / shares[kind] for kind, _, weight in pairs]
    shortest_s, longest_s = (lasts.seconds for lasts in mix.lasts)
    duration_s, at_s, number = plan.duration.seconds, 0.0, 0
    while pairs and (number < mix.count or not mix.count):
        at_s -= mix.mean_gap.seconds * math.log1p(-_draw(plan.seed, number, "gap"))
        if at_s >= duration_s:
            return
        kind, target, _ = pairs[_chosen(weights, _draw(plan.seed, number, "what"))]
        lasts_s = shortest_s + (longest_s - shortest_s) * _draw(plan.seed, number, "lasts")
        yield (
            at_s,
            FaultConfig(
                kind=kind,
                target=target,
                at=Duration(f"{at_s}s"),
                lasts=Duration(f"{lasts_s:.3f}s"),
                **{name: getattr(mix, name) for name in Strength.model_fields},
            ),
        )
        number += 1


def _chosen(weights: list[float], drawn: float) -> int:
    left = drawn * sum(weights)
    for index, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return index
    return len(weights) - 1


def _role_of(target: str) -> str:
    if _SYNCER_NAME.fullmatch(target):
        return SYNCER
    return target if target in (COORDINATOR, BUCKET) else ""


def _kinds_of(target: str) -> frozenset[Kind]:
    if "/" in target:
        return _KINDS_OF_A_RANK
    return _KINDS_OF.get(_role_of(target), _KINDS_OF_AN_ISLAND)


def _check_target(fault: FaultConfig, islands: Mapping[str, int], others: Sequence[str]) -> None:
    island, slash, rank = fault.target.partition("/")
    is_there = fault.target in (COORDINATOR, *others) or (
        island in islands and (not slash or (rank.isdecimal() and int(rank) < islands[island]))
    )
    if not is_there:
        names = ", ".join(f"{name} ({ranks} ranks)" for name, ranks in sorted(islands.items()))
        raise ConfigError(
            f"target {fault.target!r} of a fault of kind {fault.kind}: must be coordinator, "
            f"{', '.join(others)}, an island, or ISLAND/RANK; islands of the run: {names}"
            + (", and run.state is no s3:// URL" if fault.target == BUCKET else "")
        )
    if fault.kind not in _kinds_of(fault.target):
        kinds = ", ".join(sorted(_kinds_of(fault.target)))
        raise ConfigError(f"{fault.kind} cannot happen to {fault.target}: choose among {kinds}")


def _draw(seed: int, number: int, purpose: str) -> float:
    """Draw a number in [0, 1)."""
    return float(_hash(seed, number, purpose) >> 11) / float(1 << 53)


def _hash(seed: int, number: int, purpose: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed}/{number}/{purpose}".encode())
