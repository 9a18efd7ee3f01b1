"""What an accident costs: the others' time, the victim's, the control plane's, the disk's.

Three islands whose inner step is a sleep of 0.1 s, behind a link of 5 Mbit/s each, as processes
beside a real coordinator and syncer. One is killed in the middle of a send and started again at
once; one is frozen. In scheduled mode the others wait for it, and no bar is set; in decoupled mode
they do not, and are judged. Then coordinator and syncer are killed again and
again under `diloco chaos`, and bytes written and time to recover are measured by size and policy.
"""

from __future__ import annotations

import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from diloco.bench.outer_loop.recovery_site import SYNCER, Event, Site, running
from diloco.chaos.experiment import run_plan
from diloco.chaos.plan import ChaosPlan, PlanConfig
from diloco.config.load import resolved_toml
from diloco.config.schema import Config
from diloco.forecast.forecast import forecast
from diloco.launch.process.ending import StopRequest
from diloco.report.row_choice import matching
from diloco.report.rows import Column, Report, Requirement
from diloco.transport.units import parse_duration

_ISLANDS = ("east", "north", "west")
_VICTIM = "west"
_SURVIVORS = ("east", "north")
_WAIT_S = 300.0
#: Seconds after the word of a send until the kill: the link carries it for longer.
_INTO_THE_SEND_S = 0.1

_COLUMNS = (
    Column("row", "row"),
    Column("what", "figure"),
    Column("value", "value", ".4g"),
    Column("unit", "unit"),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """All rows.

    Attributes:
        model: Section [model] of rows with three islands.
        step_s: Seconds of an inner step.
        freeze_s: How long an island is frozen where nobody waits for it.
        scheduled_freeze_s: The same where everybody does.
        link: Profile of each island's link; empty: none.
        inner_steps_per_round: H of those rows.
        num_kills: Of coordinator and syncer together, under chaos.
        control_steps: Inner steps of that run: enough for all of them.
        control_step_s: Least time of each, so that training leaves cores to who comes back.
        control_model: Section [model] of that row.
        sizes: Name -> section [model] of rows of durable bytes.
        num_rounds: Over which bytes are counted.
    """

    model: Mapping[str, Any]
    step_s: float
    freeze_s: float
    scheduled_freeze_s: float
    link: str
    inner_steps_per_round: int
    num_kills: int
    control_steps: int
    control_step_s: float
    control_model: Mapping[str, Any]
    sizes: Mapping[str, Mapping[str, Any]]
    num_rounds: int


#: 9,933,696 and 49,957,632 parameters.
_MODEL_10M = {"dim": 384, "num_layers": 6, "num_heads": 6, "num_kv_heads": 3, "ffn_dim": 1024}
_MODEL_50M = {"dim": 768, "num_layers": 8, "num_heads": 12, "num_kv_heads": 6, "ffn_dim": 1920}

SETTING = Setting(
    model={"preset": "debug"},
    step_s=0.1,
    freeze_s=60.0,
    scheduled_freeze_s=5.0,
    link="thin-5M-60ms",
    inner_steps_per_round=24,
    num_kills=10,
    control_steps=300,
    control_step_s=0.5,
    control_model=_MODEL_10M,
    sizes={"1M": {"preset": "debug"}, "10M": _MODEL_10M, "50M": _MODEL_50M},
    num_rounds=4,
)


def run_recovery(
    setting: Setting,
    patterns: Sequence[str],
    *,
    on_progress: Callable[[str, int, int], None],
) -> Report:
    """Measure rows.

    Args:
        setting: The rows.
        patterns: Names of rows with `*` and `?`; none: all rows.
        on_progress: Hears what is measured next, and of measurements done and in all.

    Raises:
        ConfigError: If a pattern matches no row.
        DilocoError: If a process of a run fails; says what its log does.
    """
    began = time.monotonic()
    measures = _measures(setting)
    wanted = matching(measures, patterns)
    rows: list[dict[str, Any]] = []
    requirements: list[Requirement] = []
    for number, row in enumerate(wanted):
        on_progress(row, number, len(wanted))
        with tempfile.TemporaryDirectory(prefix="diloco-recovery-") as directory:
            for figure in measures[row](Path(directory)):
                rows.append(
                    {"row": row, "what": figure.what, "value": figure.value, "unit": figure.unit}
                )
                if figure.limit is not None:
                    what = f"{row}: {figure.what}"
                    requirements.append(Requirement(what, figure.value, figure.limit, figure.unit))
    described = {
        "step_s": setting.step_s,
        "link": setting.link,
        "inner_steps_per_round": setting.inner_steps_per_round,
    }
    return Report("recovery", described, _COLUMNS, rows, requirements, time.monotonic() - began)


def _measures(setting: Setting) -> dict[str, Callable[[Path], list[Figure]]]:
    """Name every row, and what measures it in a directory."""
    measures: dict[str, Callable[[Path], list[Figure]]] = {}
    for preset in ("streaming", "decoupled"):
        measures[f"kill-{preset}"] = partial(_kill, setting, preset)
        measures[f"freeze-{preset}"] = partial(_freeze, setting, preset)
    measures["control-plane"] = partial(_control_plane, setting)
    for size, model in setting.sizes.items():
        for policy in ("snapshot", "log"):
            measures[f"durable-{policy}-{size}"] = partial(_durable, setting, model, policy)
    return measures


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a row; `limit`: largest value that is required; None: none is."""

    what: str
    value: float
    unit: str
    limit: float | None = None


def _config(
    setting: Setting,
    place: Path,
    model: Mapping[str, Any],
    outer: Mapping[str, Any],
    *,
    islands: Sequence[str] = _ISLANDS,
    link: str = "",
    inner_steps: int = 1_000_000,
) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "recovery", "seed": 1, "inner_steps": inner_steps},
            "model": dict(model),
            "data": {"sequence_length": 32},
            "inner": {"optimizer": {"lr": 1e-3, "schedule": "constant"}},
            "outer": {
                "inner_steps_per_round": setting.inner_steps_per_round,
                "num_fragments": 2,
                "overlap_steps": 2,
                "round_deadline": "120s",
                **outer,
            },
            "coordinator": {"state_dir": str(place / "run")},
            "transport": {"link": link, "rpc_timeout": "10s"},
            "evaluation": {"num_sequences": 8},
            "islands": {name: {"ranks": 1, "tokens_per_inner_step": 128} for name in islands},
        }
    )


# -- islands -------------------------------------------------------------------------------------


def _ways(preset: str) -> dict[str, Any]:
    """Section [outer] of a preset; a send takes longer than tau steps, which leave no grace."""
    return {"preset": preset, "num_fragments": 4} | (
        {"grace": "1s"} if preset == "decoupled" else {}
    )


def _kill(setting: Setting, preset: str, place: Path) -> list[Figure]:
    """Kill one of three islands in the middle of a send, and start it again at once."""
    config = _config(setting, place, setting.model, _ways(preset), link=setting.link)
    is_judged = preset == "decoupled"
    with running(config, place, setting.step_s) as site:
        _warm_up(site)
        num_sent = len(site.events(_VICTIM, "fragment_sent"))
        site.wait_for(
            lambda: len(site.events(_VICTIM, "fragment_sent")) > num_sent, "a send", _WAIT_S
        )
        time.sleep(_INTO_THE_SEND_S)
        killed = site.kill(_VICTIM)
        started = site.start(_VICTIM)
        until = _included_again(site, killed)
        steps = {island: site.events(island, "timed_step") for island in _SURVIVORS}
        usual_s = statistics.median(
            e["duration_s"] for told in steps.values() for e in told if e["unix_s"] < killed
        )
        longest_s = max(
            e["duration_s"]
            for told in steps.values()
            for e in told
            if killed < e["unix_s"] and e["unix_s"] - e["duration_s"] <= until
        )
        own = [event["unix_s"] for event in _later(site, killed, _VICTIM, "timed_step")]
        own_steps = sum(unix_s <= until for unix_s in own)
        next_merge_s = max(
            _later(site, killed, island, "fragment_merged")[0]["unix_s"] - killed
            for island in _SURVIVORS
        )
        expired = sum(len(_later(site, killed, island, "round_expired")) for island in _SURVIVORS)
    outer = config.outer
    grace_s = parse_duration(outer.grace)
    bars = (1.0 + grace_s, 1.0, float(outer.inner_steps_per_round + outer.overlap_steps), 0.0)
    limits = bars if is_judged else (None,) * len(bars)
    return [
        Figure("the others' next merge after the kill", next_merge_s, "s", limits[0]),
        Figure("their longest step, over 1.05 x the usual one + 20 ms",
               longest_s / (1.05 * usual_s + 0.020), "x", limits[1]),
        Figure("start to the victim's first step", own[0] - started, "s"),
        Figure("its own steps until it is included again", own_steps, "steps", limits[2]),
        Figure("rounds of the others that expired", expired, "rounds", limits[3]),
    ]  # fmt: skip


def _later(site: Site, killed: float, who: str, kind: str) -> list[Event]:
    return [event for event in site.events(who, kind) if event["unix_s"] > killed]


def _included_again(site: Site, killed: float) -> float:
    """Wait until a contribution of the victim's next start counts; returns when, in unix time.

    Waits for what the others tell of that time, too: a merge, and the step that lasted until then.
    """

    def included() -> list[Event]:
        begun = [event["unix_s"] for event in _later(site, killed, _VICTIM, "timed_step")[:1]]
        return [
            event
            for event in _later(site, killed, SYNCER, "round_closed")
            if begun and event["unix_s"] > begun[0] and _VICTIM in event["contributors"]
        ]

    site.wait_for(lambda: bool(included()), "a contribution of the next start", _WAIT_S)
    site.wait_for(
        lambda: all(_later(site, killed, i, "fragment_merged") for i in _SURVIVORS),
        "a merge of the others",
        _WAIT_S,
    )
    until: float = included()[0]["unix_s"]
    site.wait_for(
        lambda: all(site.events(i, "timed_step")[-1]["unix_s"] > until for i in _SURVIVORS),
        "a step of the others after it",
        _WAIT_S,
    )
    return until


def _freeze(setting: Setting, preset: str, place: Path) -> list[Figure]:
    """Freeze one of three islands for a while."""
    config = _config(setting, place, setting.model, _ways(preset), link=setting.link)
    is_judged = preset == "decoupled"
    freeze_s = setting.freeze_s if is_judged else setting.scheduled_freeze_s
    with running(config, place, setting.step_s) as site:
        _warm_up(site)
        warm = time.time()
        time.sleep(2 * setting.inner_steps_per_round * setting.step_s)
        frozen = site.send(_VICTIM, signal.SIGSTOP)
        time.sleep(freeze_s)
        thawed = site.send(_VICTIM, signal.SIGCONT)
        site.wait_for(
            lambda: site.events(_VICTIM, "fragment_merged")[-1]["unix_s"] > thawed,
            "a merge of the thawed island",
            _WAIT_S,
        )
        back_s = site.events(_VICTIM, "fragment_merged")[-1]["unix_s"] - thawed
        rises = []
        for island in _SURVIVORS:
            ends = [event["unix_s"] for event in site.events(island, "timed_step")]
            before = _steps_a_second(ends, warm, frozen)
            rises.append(before / _steps_a_second(ends, frozen, thawed) - 1)
    return [
        Figure("seconds frozen", freeze_s, "s"),
        Figure("the others' time a step rises by", max(rises), "x", 0.03 if is_judged else None),
        Figure("thaw to the victim's next merge", back_s, "s"),
    ]


def _steps_a_second(ends: Sequence[float], begin: float, end: float) -> float:
    """Rate of steps in a span; one that took all of it, and ended later, is a part of one."""
    return max(sum(begin < at <= end for at in ends), 0.5) / (end - begin)


def _warm_up(site: Site) -> None:
    """Wait until every island has merged a second version."""

    def is_warm() -> bool:
        merged = (site.events(island, "fragment_merged") for island in _ISLANDS)
        return all(any(event["version"] >= 2 for event in events) for events in merged)

    site.wait_for(is_warm, "the first merges", _WAIT_S)


# -- control plane and disk ----------------------------------------------------------------------


def _control_plane(setting: Setting, place: Path) -> list[Figure]:
    """Kill coordinator and syncer at random moments of a run that trains."""
    config = _config(
        setting,
        place,
        setting.control_model,
        {"preset": "streaming", "num_fragments": 4},
        islands=("east", "west"),
        inner_steps=setting.control_steps,
    )
    run_file = place / "run.toml"
    run_file.write_text(resolved_toml(config), encoding="utf-8")
    plan = PlanConfig.model_validate(
        {
            "run": run_file.name,
            "seed": 1,
            "duration": "30min",
            "limit": "30min",
            "inner_step": f"{setting.control_step_s}s",
            "mix": {
                "kinds": {"kill": 1.0},
                "targets": ["coordinator", "syncer"],
                "mean_gap": "5s",
                "lasts": ["0s", "0s"],
                "count": setting.num_kills,
            },
            "judge": {"coordinator_back": "2s", "syncer_back": "2s"},
        }
    )
    report = run_plan(ChaosPlan(place / "plan.toml", plan), place / "chaos", StopRequest())
    fired = sum(history.fired for history in report.faults)
    return [
        Figure("kills that took effect", fired, "kills"),
        Figure("invariants that broke", len(report.broken), "invariants", 0.0),
        *(Figure(each.what, each.figure, each.unit, each.limit) for each in report.requirements),
    ]


def _durable(setting: Setting, model: Mapping[str, Any], policy: str, place: Path) -> list[Figure]:
    """Count what a syncer writes, and time how long another one takes to serve it."""
    outer = {
        "preset": "streaming", "num_fragments": 4, "inner_steps_per_round": 8, "store": policy,
    }  # fmt: skip
    islands = ("east", "west")
    config = _config(setting, place, model, outer, islands=islands)
    with running(config, place, setting.step_s) as site:

        def merged() -> list[Event]:
            return site.events(islands[0], "fragment_merged")

        num_fragments = config.outer.num_fragments
        site.wait_for(lambda: len(merged()) >= num_fragments, "a first round", _WAIT_S)
        before, written = len(merged()), site.syncer_written_bytes()
        wanted = before + setting.num_rounds * num_fragments
        site.wait_for(lambda: len(merged()) >= wanted, "rounds", _WAIT_S)
        written = site.syncer_written_bytes() - written
        num_rounds = (len(merged()) - before) / num_fragments
        back_s = site.kill_syncer()
    num_parameters = forecast(config).parameters
    return [
        Figure("parameters", num_parameters, ""),
        Figure("written a parameter and round", written / num_parameters / num_rounds, "B"),
        Figure("syncer back after a kill, imports included", back_s, "s"),
    ]
