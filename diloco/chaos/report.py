"""Makes the run of a plan and reports on it: what was done, what held, and what it cost."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco.chaos.evidence import Evidence, island_back_s
from diloco.chaos.fault_log import FaultHistory
from diloco.chaos.figures import (
    AccidentFigures,
    FaultFigures,
    accident_figures,
    island_figures,
    next_publication_s,
)
from diloco.chaos.gather import gather
from diloco.chaos.judge import CheckResult, judge
from diloco.chaos.plan import COORDINATOR, SYNCER, ChaosPlan, JudgeConfig, Kind
from diloco.chaos.runner import configured, drive, faults_of
from diloco.launch.process.ending import StopRequest
from diloco.report.rows import Column, Requirement, machine
from diloco.system import require_linux

FAULT_COLUMNS = (
    Column("kind", "fault"),
    Column("target", "target"),
    Column("planned", "planned", "d"),
    Column("fired", "fired", "d"),
    Column("back_median_s", "back, s", ".2f"),
    Column("back_max_s", "at most", ".2f"),
    Column("next_median_s", "next version, s", ".2f"),
    Column("next_max_s", "at most", ".2f"),
)
ISLAND_COLUMNS = (
    Column("island", "island"),
    Column("num_starts", "starts", "d"),
    Column("goodput", "goodput", ".1%"),
    Column("predicted", "predicted", ".1%"),
    Column("tokens", "tokens", ",d"),
    Column("dropped_tokens", "dropped", ",d"),
    Column("lost_tokens", "lost", ",d"),
    Column("nats_per_byte", "loss, nats/byte", ".4f"),
)

ACCIDENT_COLUMNS = (
    Column("kind", "to an island"),
    Column("target", "target"),
    Column("longest_step", "others' longest step", ".2f"),
    Column("slower", "slower", "+.1%"),
    Column("next_merge_s", "their next merge, s", ".2f"),
    Column("num_expired", "expired", "d"),
    Column("back_s", "first step, s", ".2f"),
    Column("own_steps", "steps until included", "d"),
)


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """A judged run.

    Args:
        findings: Every invariant.
        faults: What became of each fault.
        islands: How each island fared.
        accidents: What faults of islands cost the others, and them.
        requirements: What `--require` asks for beyond the invariants.
        rows: Of the table of faults.
        import_s: What importing a syncer's modules takes here; 0: not measured.
        wall_s: Of the run.
    """

    findings: Sequence[CheckResult]
    faults: Sequence[FaultHistory]
    islands: Sequence[FaultFigures]
    accidents: Sequence[AccidentFigures]
    requirements: Sequence[Requirement]
    rows: Sequence[Mapping[str, Any]]
    import_s: float
    wall_s: float

    @property
    def broken(self) -> list[CheckResult]:
        """Invariants that did not hold."""
        return [finding for finding in self.findings if not finding.holds]

    @property
    def missed(self) -> list[Requirement]:
        """Figures beyond their bars."""
        return [each for each in self.requirements if not each.is_met]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "machine": machine(),
            "findings": [asdict(finding) for finding in self.findings],
            "required": [requirement.as_dict() for requirement in self.requirements],
            "faults": [_fault_dict(history) for history in self.faults],
            "islands": [asdict(island) for island in self.islands],
            "accidents": [asdict(accident) for accident in self.accidents],
            "import_s": self.import_s,
            "wall_s": self.wall_s,
        }


def report_on(
    evidence: Evidence,
    bars: JudgeConfig,
    *,
    import_s: float,
    undisturbed: Evidence | None,
) -> ChaosReport:
    """Judge a run, and the figures that its plan asks for.

    Args:
        evidence: Of the run.
        bars: Of the plan.
        import_s: What importing a syncer's modules takes here.
        undisturbed: The same run without faults, where losses are compared.
    """
    without = island_figures(undisturbed) if undisturbed is not None else ()
    islands = island_figures(evidence, {island.island: island.goodput for island in without})
    accidents = accident_figures(evidence)
    requirements = [
        *_requirements(evidence, bars, import_s),
        *_accident_requirements(accidents, bars),
    ]
    if without:
        requirements.append(_loss_requirement(islands, without, bars))
    return ChaosReport(
        findings=judge(evidence),
        faults=evidence.history.faults,
        islands=islands,
        accidents=accidents,
        requirements=requirements,
        rows=[*_rows(evidence)],
        import_s=import_s,
        wall_s=evidence.history.over_s or 0.0,
    )


def _requirements(evidence: Evidence, bars: JudgeConfig, import_s: float) -> Iterator[Requirement]:
    faults = evidence.history.faults
    # What waited for its target until the run was over says nothing of the run.
    num_unfired = sum(history.had_chance and not history.fired for history in faults)
    yield Requirement("faults that did not take effect", num_unfired, 0, "faults")
    limits = {
        COORDINATOR: bars.coordinator_back.seconds,
        SYNCER: bars.syncer_back.seconds,
    }
    for role, limit_s in limits.items():
        if not limit_s:
            continue
        allowed = limit_s + (import_s if role == SYNCER else 0.0)
        kills = [
            s
            for s in faults
            if s.fault.role == role
            and s.fault.kind is Kind.KILL
            and s.began_s is not None
            and has_had_time(s, allowed, evidence.history.over_s)
        ]
        alone = [history for history in kills if is_alone(history, faults)]
        backs = [_own_back_s(history) for history in alone]
        worst = max(backs, key=lambda back: (math.isnan(back), back), default=math.nan)
        beyond = f", of which {import_s:.2f} s are its imports" if role == SYNCER else ""
        what = f"{role} back after {len(alone)} kills that met no other fault, of {len(kills)}"
        yield Requirement(f"{what}{beyond}", worst, allowed, "s")
    if limit_s := bars.published_again.seconds:
        waits = [next_publication_s(history, evidence.history) for history in faults]
        worst = max((wait for wait in waits if wait is not None), default=float("nan"))
        yield Requirement("next version of every fragment after a fault", worst, limit_s, "s")


def _accident_requirements(
    accidents: Sequence[AccidentFigures], bars: JudgeConfig
) -> Iterator[Requirement]:
    """Judge the worst of all faults of islands; one that is not known misses its bar."""
    after = "after a fault of an island"
    for what, key, limit, unit in (
        ("others' longest step over 1.05 x the usual one + 20 ms", "longest_step", 1.0, "x"),
        ("others' time a step rises by", "slower", bars.others_slower, "x"),
        ("others' next merge", "next_merge_s", bars.others_merge.seconds, "s"),
        ("rounds of the others that expired", "num_expired", 0.0, "rounds"),
        ("own steps until it is included again", "own_steps", bars.included_steps, "steps"),
    ):
        if not bars.others_slower:
            continue
        figures = [getattr(each, key) for each in accidents]
        worst = math.nan if None in figures else max(figures, default=math.nan)
        yield Requirement(f"{what}, {after}", worst, limit, unit)


def is_alone(history: FaultHistory, faults: Sequence[FaultHistory]) -> bool:
    """Whether nothing else happened between a kill and the next process serving.

    A kill on the way back starts the time again, and a coordinator that is away starts no syncer.
    """
    if history.back_s is None:
        return not any(
            other.fault.target == history.fault.target
            and (other.began_s or 0.0) > history.span_s[0]
            for other in faults
        )
    return not any(history.meets(other) for other in faults)


def has_had_time(history: FaultHistory, allowed_s: float, over_s: float | None) -> bool:
    """Whether what was killed is back, or the run went on for as long as that may take."""
    end_s = math.inf if over_s is None else over_s
    return history.back_s is not None or history.span_s[1] + allowed_s <= end_s


def _own_back_s(history: FaultHistory) -> float:
    """Time to be back, what it was kept away for left out; NaN: never."""
    return float("nan") if history.back_s is None else history.back_s - history.fault.lasts_s


def _loss_requirement(
    islands: Sequence[FaultFigures], undisturbed: Sequence[FaultFigures], bars: JudgeConfig
) -> Requirement:
    here, there = _mean_loss(islands), _mean_loss(undisturbed)
    what = f"held-out loss {here:.4f} nats a byte, undisturbed {there:.4f}: relative rise"
    return Requirement(what, (here - there) / there, bars.loss_rise, "x")


def _mean_loss(islands: Sequence[FaultFigures]) -> float:
    told = [each.nats_per_byte for each in islands if each.nats_per_byte is not None]
    return sum(told) / len(told) if told else float("nan")


def _rows(evidence: Evidence) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind and target."""
    groups: dict[tuple[str, str], list[FaultHistory]] = {}
    for history in evidence.history.faults:
        groups.setdefault((history.fault.kind, history.fault.target), []).append(history)
    for (kind, target), histories in sorted(groups.items()):
        backs = [back for history in histories if (back := _back_s(history, evidence)) is not None]
        waits = [next_publication_s(history, evidence.history) for history in histories]
        known = [wait for wait in waits if wait is not None]
        yield {
            "kind": kind,
            "target": target,
            "planned": len(histories),
            "fired": sum(history.fired for history in histories),
            "back_median_s": _median(backs),
            "back_max_s": max(backs, default=None),
            "next_median_s": _median(known),
            "next_max_s": max(known, default=None),
        }


def _back_s(history: FaultHistory, evidence: Evidence) -> float | None:
    island = history.fault.island
    if island and history.fault.kind in (Kind.KILL, Kind.RESTART):
        return island_back_s(history, evidence.events[island])
    return history.back_s


def _median(values: Sequence[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def _fault_dict(history: FaultHistory) -> dict[str, Any]:
    fault, strength = history.fault, history.fault.strength
    return {
        **{name: value for name, value in asdict(history).items() if name != "fault"},
        "fault": {
            **{name: getattr(fault, name) for name in ("number", "target", "at_s", "lasts_s")},
            "kind": fault.kind.value,
            "delay_s": strength.delay.seconds,
            "bandwidth_bps": strength.bandwidth.bps,
            "clock_s": strength.clock.seconds,
            "seed": fault.seed,
            **{name: getattr(strength, name) for name in ("share", "what", "bit", "how")},
        },
    }


#: Told what is done, how much of it, of how much.
Progress = Callable[[str, int, int], None]
_SYNCER_MODULES = "import diloco.launch.syncer, diloco.syncer.syncer"


def run_plan(
    plan: ChaosPlan, directory: Path, request: StopRequest, on_progress: Progress = lambda *_: None
) -> ChaosReport:
    """Make and judge a plan's run below `directory`, which is left as it then is.

    Raises:
        ConfigError: If the plan or its run cannot be used, or this is not Linux.
        Interrupted: If a signal asked for the end.
    """
    require_linux("diloco chaos, which looks into processes through /proc,", "run the plan there")
    config = configured(plan, directory / "run")
    faults = faults_of(plan, config)
    ended = drive(
        plan, config, faults, request, lambda done, total: on_progress("faults", done, total)
    )
    evidence = gather(ended, faults)
    undisturbed = None
    if plan.config.judge.loss_rise:
        same = configured(plan, directory / "undisturbed")
        say = "tokens of the same run without faults"
        made = drive(plan, same, (), request, lambda done, total: on_progress(say, done, total))
        undisturbed = gather(made, ())
    kills_syncer = any(f.kind is Kind.KILL and f.role == SYNCER for f in faults)
    return report_on(
        evidence,
        plan.config.judge,
        import_s=syncer_import_s() if kills_syncer else 0.0,
        undisturbed=undisturbed,
    )


def syncer_import_s() -> float:
    """Measure the seconds that an interpreter takes to import what a syncer is made of."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", _SYNCER_MODULES], check=True)
    return time.monotonic() - began
