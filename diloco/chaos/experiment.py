"""A plan from beginning to end: the run with its faults, the same without, the judgement."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from diloco.chaos.evidence import gather
from diloco.chaos.plan import SYNCER, ChaosPlan, Kind
from diloco.chaos.report import ChaosReport, report_on
from diloco.chaos.runner import configured, drive, faults_of
from diloco.launch.process.ending import StopRequest

#: Told what is done, how much of it, of how much.
Progress = Callable[[str, int, int], None]
_SYNCER_MODULES = "import diloco.launch.syncer, diloco.syncer.syncer"


def run_plan(
    plan: ChaosPlan, directory: Path, request: StopRequest, on_progress: Progress = lambda *_: None
) -> ChaosReport:
    """Make and judge a plan's run below `directory`, which is left as it then is.

    Raises:
        ConfigError: If the plan or its run cannot be used.
        Interrupted: If a signal asked for the end.
    """
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
