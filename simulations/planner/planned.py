"""A run before it starts, with its time: what is assumed, predicted, set next to it and suggested.

The composition of this folder's parts for `diloco plan`; what needs no time (fragments, bytes,
schedule, memory, disk) is `diloco.forecast.forecast`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from diloco.compression.compiled import COMPILE_NUMEL
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.forecast.forecast import Forecast
from diloco.simulations.planner.alternatives import Alternative, alternatives
from diloco.simulations.planner.assumptions import (
    Assumptions,
    PlanOptions,
    estimated_step,
    find_links,
    told_steps,
)
from diloco.simulations.planner.measure import MeasuredStep
from diloco.simulations.planner.prediction import Prediction, predict
from diloco.simulations.planner.suggestion import Suggestion
from diloco.simulations.planner.unused import NO_LINK
from diloco.simulations.runs.run_model import run_plan
from diloco.transport.shaping.link import Link, LinkProfile
from diloco.transport.units import format_bandwidth, format_duration

_COSTS = (
    f"work of hosts: as diloco bench measured it on one core of a server, with codecs compiled (by "
    f"a C++ compiler) for lanes of {COMPILE_NUMEL:,} values and more"
)


@dataclass(frozen=True, slots=True)
class MeasuredPath:
    """What was measured of the way to the coordinator; `rate_bps` 0: only its round trip."""

    rtt_s: float
    rate_bps: float = 0.0


@dataclass(frozen=True, slots=True)
class Planned:
    """What `diloco plan` predicts.

    Attributes:
        assumed: Inputs.
        prediction: Of the run; None: nothing is predicted.
        why_not: Why; empty: it is.
        alternatives: All-reduces of gradients on the same links.
        suggestion: If it was asked for.
    """

    assumed: Assumptions
    prediction: Prediction | None
    why_not: str
    alternatives: tuple[Alternative, ...]
    suggestion: Suggestion | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        prediction = None
        if self.prediction is not None:
            names = [name for name in Prediction.__dataclass_fields__ if name != "run"]
            shown = {name: getattr(self.prediction, name) for name in names}
            prediction = {
                **shown,
                "islands": {name: asdict(each) for name, each in shown["islands"].items()},
                "syncers": [asdict(each) for each in shown["syncers"]],
            }
        return {
            "assumptions": {
                "step_s": dict(self.assumed.step_s),
                "links": {name: asdict(each) for name, each in (self.assumed.links or {}).items()},
                "origins": list(self.assumed.origins),
            },
            "prediction": prediction,
            "not_predicted": self.why_not,
            "alternatives": [asdict(each) for each in self.alternatives],
            "suggestion": asdict(self.suggestion) if self.suggestion else None,
        }


def assume(
    config: Config,
    forecast: Forecast,
    told: PlanOptions,
    *,
    steps: Mapping[str, MeasuredStep],
    path: MeasuredPath | None,
) -> Assumptions:
    """Gather the inputs of a prediction, and where each comes from.

    Args:
        config: The run.
        forecast: Of it.
        told: What options say.
        steps: Measured inner steps, by island; what was told goes before.
        path: The measured way, in place of what links are said to be.

    Raises:
        ConfigError: If something told is impossible.
    """
    step_s, origins = told_steps(config, told), dict[str, list[str]]()
    for island in sorted(config.islands):
        if island in step_s:
            how = "told"
        elif island in steps:
            step_s[island] = steps[island].step_s
            how = f"measured on this machine ({steps[island].device})"
        else:
            step_s[island], how = estimated_step(config, island, forecast.ranks[island], told)
            how = f"estimated: {how} (--step-time or --measure know better)"
        said = f"inner step, {{}}: {format_duration(step_s[island])}, {how}"
        origins.setdefault(said, []).append(island)
    links = _measured(find_links(config, told), config, path)
    for island, profile in (links or {}).items():
        origins.setdefault(f"link, {{}}: {_shown(profile)}", []).append(island)
    lines = [text.format(", ".join(islands)) for text, islands in origins.items()]
    return Assumptions(
        step_s=step_s,
        links=links,
        tcp=told.tcp,
        syncer_link=told.syncer_line,
        inside_bps=told.inside_bps,
        origins=(*lines, _COSTS),
    )


def plan_run(config: Config, forecast: Forecast, assumed: Assumptions) -> Planned:
    """Predict a run and what else could be done on its links.

    Raises:
        ConfigError: If it would lose its rounds.
    """
    if assumed.links is None:
        return Planned(assumed, None, NO_LINK, ())
    besides = tuple(alternatives(config, forecast.parameters, assumed))
    return Planned(assumed, predict(config, run_plan(config), assumed), "", besides)


def _measured(
    links: dict[str, LinkProfile] | None, config: Config, path: MeasuredPath | None
) -> dict[str, LinkProfile] | None:
    """Put what was measured in the place of what is said."""
    if path is None:
        return links
    if links is None:
        if not path.rate_bps:
            raise ConfigError(
                f"--measure: the round trip is {format_duration(path.rtt_s)}, and a bandwidth was "
                f"not measured: give --probe HOST:PORT of a receiver at the other end, or "
                f"--bandwidth"
            )
        line = Link(path.rate_bps, path.rtt_s / 2)
        links = dict.fromkeys(config.islands, LinkProfile("", line, line, ""))
    return {island: _over_path(profile, path) for island, profile in links.items()}


def _over_path(profile: LinkProfile, path: MeasuredPath) -> LinkProfile:
    up, down = (
        replace(
            link,
            bandwidth_bps=path.rate_bps or link.bandwidth_bps,
            delay_s=path.rtt_s / 2,
        )
        for link in (profile.up, profile.down)
    )
    what = "round trip and rate upwards, taken for both ways," if path.rate_bps else "round trip"
    return LinkProfile("measured", up, down, f"{what} measured from this machine")


def _shown(profile: LinkProfile) -> str:
    up, down = profile.up, profile.down
    text = f"{profile.name or 'told'}: {format_bandwidth(up.bandwidth_bps)} up, "
    text += f"{format_bandwidth(down.bandwidth_bps)} down, round trip "
    text += format_duration(up.delay_s + down.delay_s)
    if up.loss or down.loss:
        text += f", loss {max(up.loss, down.loss):g}"
    return f"{text} ({profile.source})"
