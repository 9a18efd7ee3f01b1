"""The settings with which a run ends earliest, at no more than so much loss; and why these.

Allowed are those of `Grid` whose penalty is known (`Penalties`) and within the bound, of at least
`LEAST_ROUNDS` rounds, since what others measured had many. Each is loaded as a run file with --set
would be, and simulated, in the order of the lower bound

    inner steps * max(step, bits of a round / (H bandwidth)) + bits of the flush / bandwidth

until no other can be earlier. Times within 0.1 % are equal: then the smaller penalty wins, then the
larger H, which sends less. Besides the earliest, the most promising of every codec and tau that
cost less loss are simulated, for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.outer.fragments import Plan
from diloco.simulations.planner.assumptions import Assumptions
from diloco.simulations.planner.penalties import Penalties
from diloco.simulations.planner.prediction import simulate_whole
from diloco.simulations.planner.setting import Grid, OuterSetting
from diloco.simulations.runs.run_model import fragment_sizes, run_plan

LEAST_ROUNDS = 20
#: By which inputs are wrong, to see what depends on them.
WRONG = 0.2
_EQUAL = 1e-3

#: Loads the run with some values of --set.
Load = Callable[[Sequence[str]], Config]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting, and what it takes: seconds of the run, share of them, relative loss."""

    setting: OuterSetting
    wall_s: float
    utilisation: float
    penalty: float


@dataclass(frozen=True, slots=True)
class Influence:
    """What an input decides: the run's seconds and the suggestion if it is 20 % off.

    Attributes:
        name: The input.
        is_more: Whether it is 20 % more, or less.
        chosen: What would be suggested then.
        wall_s: What the suggestion of the right input would take then; None: it loses the run.
        is_other: Whether another setting would be suggested, earlier by over 0.1 % or allowed where
            the suggestion is not.
    """

    name: str
    is_more: bool
    chosen: Candidate
    wall_s: float | None
    is_other: bool


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What is suggested.

    Attributes:
        own: The run as it is.
        chosen: The earliest.
        front: Each earlier than all that cost less loss, the earliest first.
        influences: Of every input, that which changes most first.
        num_tried: Settings that were simulated.
        is_own_known: Whether all that the run as it is costs of the loss was measured; else its
            penalty says nothing.
    """

    own: Candidate
    chosen: Candidate
    front: tuple[Candidate, ...]
    influences: tuple[Influence, ...]
    num_tried: int
    is_own_known: bool


def check_waiting(config: Config) -> None:
    """Refuse a run for which nothing can be suggested.

    Raises:
        ConfigError: If nobody in it waits for a link.
    """
    if config.outer.is_on_arrival:
        raise ConfigError(
            '--suggest: with outer.merge = "on_arrival" nobody waits for a link, so that settings '
            "cost no time but staleness, whose loss is not known: choose merge = "
            '"scheduled" (outer.preset = "streaming"), or try settings with --set'
        )


class Search:
    """Tries settings of a run, and remembers what they took under the assumptions it is given."""

    def __init__(self, load: Load, assumed: Assumptions, grid: Grid) -> None:
        """Load the run as it is.

        Raises:
            ConfigError: If it is of a kind for which nothing can be suggested.
        """
        self._load, self._assumed, self._grid = load, assumed, grid
        self._config = load(())
        check_waiting(self._config)
        self._own = OuterSetting.of(self._config.outer)
        self._loaded: dict[OuterSetting, Config | None] = {}
        self._plans: dict[tuple[int, int], Plan] = {}
        self._weights: dict[OuterSetting, tuple[float, float, float]] = {}
        self._taken: dict[OuterSetting, tuple[float, float]] = {}

    def suggest(
        self,
        penalties: Penalties,
        most_penalty: float,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Suggestion:
        """Find the earliest setting of at most so much penalty, and what decides it.

        Raises:
            ConfigError: If no setting is within the bound.
        """
        tried = self._try_all(penalties, most_penalty, on_progress)
        chosen = _best(tried)
        return Suggestion(
            own=self._candidate(self._own, penalties),
            chosen=chosen,
            front=_front(tried),
            influences=self._influences(penalties, most_penalty, chosen, tried),
            num_tried=len(self._taken),
            is_own_known=penalties.knows(self._own),
        )

    def _try_all(
        self,
        penalties: Penalties,
        most_penalty: float,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Candidate]:
        settings = [*self._grid.settings(self._own.num_lanes), self._own]
        known = [s for s in dict.fromkeys(settings) if penalties.knows(s) and self._is_long(s)]
        allowed = [s for s in known if penalties.penalty(s) <= most_penalty]
        if not allowed:
            least = min(map(penalties.penalty, known), default=math.inf)
            raise ConfigError(
                f"--suggest: no setting costs {most_penalty:.3g} of the loss or less and leaves "
                f"{LEAST_ROUNDS} rounds; the least is {least:.3g}: raise --max-loss, or tell other "
                f"values to try"
            )
        tried = self._try_earliest(allowed, penalties, on_progress)
        if not tried:
            raise ConfigError(
                "--suggest: no setting that was tried makes a run on these links: raise "
                "outer.round_deadline, or tell other values to try"
            )
        best = _best(tried)
        promising: dict[tuple[str, int], OuterSetting] = {}
        for setting in sorted(allowed, key=self._order(penalties)):
            if penalties.penalty(setting) < best.penalty:
                kind = (setting.uplink_codec, setting.overlap_steps)
                promising.setdefault(kind, setting)
        others = [*promising.values(), *self._grid.with_lanes(best.setting)]
        return [*tried, *self._candidates(others, penalties)]

    def _try_earliest(
        self,
        allowed: Sequence[OuterSetting],
        penalties: Penalties,
        on_progress: Callable[[int, int], None],
    ) -> list[Candidate]:
        """Simulate settings until no other can be earlier, or as early at less loss."""
        ordered = sorted(allowed, key=self._order(penalties))
        floor_s = self._least_s(ordered[0], self._assumed)
        tried: list[Candidate] = []
        for number, setting in enumerate(ordered):
            on_progress(number, len(ordered))
            if tried:
                best, earliest_s = _best(tried), min(each.wall_s for each in tried)
                if self._least_s(setting, self._assumed) > earliest_s * (1 + _EQUAL):
                    break  # all that follow are later, too
                is_dearer = penalties.penalty(setting) >= best.penalty
                if is_dearer and earliest_s <= floor_s * (1 + _EQUAL):
                    continue
            tried += self._candidates([setting], penalties)
        return tried

    def _order(self, penalties: Penalties) -> Callable[[OuterSetting], tuple[float, float, int]]:
        """Give the key by which settings are tried: those that may be earliest first."""

        def key(setting: OuterSetting) -> tuple[float, float, int]:
            least_s = self._least_s(setting, self._assumed)
            return least_s, penalties.penalty(setting), -setting.inner_steps_per_round

        return key

    def _is_long(self, setting: OuterSetting) -> bool:
        rounds = self._config.run.inner_steps // setting.inner_steps_per_round
        return rounds >= LEAST_ROUNDS or setting == self._own

    def _loadable(self, setting: OuterSetting) -> Config | None:
        """Load the run with a setting; None if it is refused."""
        if setting not in self._loaded:
            try:
                config = self._load(setting.overrides())
                self._plan(config)
                self._loaded[setting] = config
            except ConfigError:
                self._loaded[setting] = None
        return self._loaded[setting]

    def _plan(self, config: Config) -> Plan:
        key = (config.outer.num_fragments, config.outer.num_lanes)
        if key not in self._plans:
            self._plans[key] = run_plan(config)
        return self._plans[key]

    def _bits(self, setting: OuterSetting) -> tuple[float, float, float] | None:
        """Count the bits of a round up, down, and of a float32 model; None: it is refused."""
        key = replace(setting, inner_steps_per_round=0, overlap_steps=0)
        if key not in self._weights:
            if (config := self._loadable(setting)) is None:
                return None
            sizes = fragment_sizes(config, self._plan(config))
            self._weights[key] = (
                8.0 * sum(size.bytes_up for size in sizes),
                8.0 * sum(size.bytes_down for size in sizes),
                8.0 * sum(size.float32_bytes for size in sizes),
            )
        return self._weights[key]

    def _least_s(self, setting: OuterSetting, assumed: Assumptions) -> float:
        """Bound the seconds of a run from below (the module's formula); infinite: it is refused."""
        bits, config = self._bits(setting), self._config
        if bits is None:
            return math.inf
        assert assumed.links is not None, "only what can be simulated is asked for"
        steps, (up, down, plain) = config.run.inner_steps, bits
        rounds = steps / setting.inner_steps_per_round - 1  # one may be left to the flush
        least_s = 0.0
        for name, link in assumed.links.items():
            rates = link.up.bandwidth_bps, link.down.bandwidth_bps
            moved_s = max(rounds * up / rates[0], rounds * down / rates[1])
            flushed_s = max(up / rates[0], plain / rates[1]) * config.outer.flush
            own_s = max(steps * assumed.step_s[name], moved_s) + flushed_s
            least_s = max(least_s, own_s)
        return least_s

    def _candidates(
        self, settings: Iterable[OuterSetting], penalties: Penalties
    ) -> list[Candidate]:
        """Simulate settings; those that are refused, or lose the run, are left out."""
        found = []
        for setting in settings:
            try:
                found.append(self._candidate(setting, penalties))
            except ConfigError:
                continue
        return found

    def _candidate(self, setting: OuterSetting, penalties: Penalties) -> Candidate:
        if setting not in self._taken:
            self._taken[setting] = self._simulate(setting, self._assumed)
        return Candidate(setting, *self._taken[setting], penalties.penalty(setting))

    def _simulate(self, setting: OuterSetting, assumed: Assumptions) -> tuple[float, float]:
        config = self._config if setting == self._own else self._loadable(setting)
        if config is None:
            raise ConfigError(f"{', '.join(setting.overrides())} is refused")
        run, wall_s = simulate_whole(config, self._plan(config), assumed)
        return wall_s, run.utilisation

    # -- what decides ----------------------------------------------------------------------------

    def _influences(
        self,
        penalties: Penalties,
        most_penalty: float,
        chosen: Candidate,
        tried: Sequence[Candidate],
    ) -> tuple[Influence, ...]:
        found = [
            self._influence_of_loss(name, is_more, changed, bound, chosen)
            for name, is_more, changed, bound in _wrong_losses(penalties, most_penalty, chosen)
        ]
        near = [each.setting for each in _front(tried)]
        near += [
            setting
            for setting in self._grid.neighbours(chosen.setting)
            if penalties.knows(setting)
            and penalties.penalty(setting) <= most_penalty
            and self._is_long(setting)
        ]
        for name, is_more, assumed in _wrong_inputs(self._assumed):
            found.append(self._influence_of_input(name, is_more, assumed, chosen, penalties, near))
        return tuple(sorted(found, key=lambda each: _weight(each, chosen), reverse=True))

    def _influence_of_input(
        self,
        name: str,
        is_more: bool,
        assumed: Assumptions,
        chosen: Candidate,
        penalties: Penalties,
        near: Sequence[OuterSetting],
    ) -> Influence:
        """Simulate the suggestion with a wrong input, and what may be earlier than it then."""

        def take(setting: OuterSetting) -> Candidate | None:
            try:
                taken = self._simulate(setting, assumed)
            except ConfigError:
                return None
            return Candidate(setting, *taken, penalties.penalty(setting))

        same = take(chosen.setting)
        most_s = math.inf if same is None else same.wall_s * (1 - _EQUAL)
        others = [
            other
            for setting in dict.fromkeys(near)
            if setting != chosen.setting and self._least_s(setting, assumed) < most_s
            if (other := take(setting)) is not None and other.wall_s < most_s
        ]
        wall_s = None if same is None else same.wall_s
        if others:
            return Influence(name, is_more, _best(others), wall_s, is_other=True)
        return Influence(name, is_more, same or chosen, wall_s, is_other=same is None)

    def _influence_of_loss(
        self, name: str, is_more: bool, penalties: Penalties, bound: float, chosen: Candidate
    ) -> Influence:
        try:
            best = _best(self._try_all(penalties, bound))
        except ConfigError:
            best = chosen
        is_other = best.setting != chosen.setting and not (
            penalties.penalty(chosen.setting) <= bound
            and best.wall_s > chosen.wall_s * (1 - _EQUAL)
        )
        return Influence(name, is_more, best, best.wall_s, is_other)


def _wrong_losses(
    penalties: Penalties, most_penalty: float, chosen: Candidate
) -> Iterable[tuple[str, bool, Penalties, float]]:
    """Give what is known of losses, one thing after the other 20 % off."""
    words = {"h": "loss by H", "tau": "loss by tau"}
    names = [name for name in penalties.effects if name != "m"]
    for is_more, factor in ((False, 1 - WRONG), (True, 1 + WRONG)):
        for name in names:
            is_codec = name not in words
            if is_codec and name not in (
                chosen.setting.uplink_codec,
                chosen.setting.downlink_codec,
            ):
                continue
            said = words.get(name, f"loss by {name}")
            yield said, is_more, penalties.scaled(name, factor), most_penalty
        yield "--max-loss", is_more, penalties, factor * most_penalty


def _wrong_inputs(assumed: Assumptions) -> Iterable[tuple[str, bool, Assumptions]]:
    """Give the assumptions, one after the other 20 % off."""
    for is_more, factor in ((False, 1 - WRONG), (True, 1 + WRONG)):
        yield "inner step", is_more, assumed.with_steps(factor)
        yield "bandwidth", is_more, assumed.with_links(bandwidth=factor)
        yield "round trip", is_more, assumed.with_links(delay=factor)
        yield "work of hosts", is_more, replace(assumed, costs=assumed.costs.scaled(factor))


def _weight(influence: Influence, chosen: Candidate) -> tuple[bool, float]:
    wall_s = math.inf if influence.wall_s is None else influence.wall_s
    return influence.is_other, abs(wall_s / chosen.wall_s - 1)


def _best(candidates: Sequence[Candidate]) -> Candidate:
    """Choose, of those that are as early as the earliest, as the module's text says."""
    earliest = min(each.wall_s for each in candidates)
    return min(
        (each for each in candidates if each.wall_s <= earliest * (1 + _EQUAL)),
        key=lambda each: (each.penalty, -each.setting.inner_steps_per_round, each.wall_s),
    )


def _front(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Keep those that are earlier than all of less penalty, the earliest first."""
    front: list[Candidate] = []
    for each in sorted(candidates, key=lambda each: (each.penalty, each.wall_s)):
        if not front or each.wall_s < front[-1].wall_s * (1 - _EQUAL):
            front.append(each)
    return tuple(reversed(front))
