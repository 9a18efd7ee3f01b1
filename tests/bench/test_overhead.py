"""The overhead bench end to end on a tiny model, and the arithmetic of its figures."""

from __future__ import annotations

import json
import os

import pytest

from diloco.bench.outer_loop.overhead import (
    CRITICAL_PHASES,
    IO_PHASES,
    MeasuredOverhead,
    OverheadSetting,
    TimedBlock,
    TimedCycle,
    figures,
    run,
)
from diloco.errors import ConfigError

TINY = OverheadSetting(num_cycles=3, block_steps=7, model={"preset": "tiny"})


def cycle(plain_s: float, idle_s: float, flying_s: float) -> TimedCycle:
    """A cycle of two-step blocks; in a flying step the outer loop takes 8 ms of CPU time.

    One of them is what the inner step itself takes longer.
    """
    phases = dict.fromkeys([*CRITICAL_PHASES, *IO_PHASES], 0.001)
    none = dict.fromkeys(phases, 0.0)
    return TimedCycle(
        plain=TimedBlock((plain_s, plain_s), 2 * plain_s, 2 * plain_s, 0.0, 0.0, none),
        idle=TimedBlock((idle_s, idle_s), 2 * idle_s, 2 * idle_s, 0.0, 0.0, none),
        plain_again=TimedBlock((plain_s, plain_s), 2 * plain_s, 2 * plain_s, 0.0, 0.0, none),
        flying=TimedBlock(
            (flying_s, flying_s), 2 * plain_s + 0.016, 2 * plain_s + 0.002, 0.006, 0.005, phases
        ),
    )


def test_figures_compare_neighbouring_blocks_and_divide_by_parameters() -> None:
    # The machine is twice as slow in the second cycle: ratios do not see it.
    measured = MeasuredOverhead(1_000_000, (cycle(0.1, 0.101, 0.11), cycle(0.2, 0.202, 0.22)))

    medians = {name: (interval.median, unit) for name, unit, interval in figures(measured)}

    per_round = "ns a parameter and round"
    assert medians["step, plain loop"] == (pytest.approx(150.0), "ms")
    assert medians["session idle over plain"] == (pytest.approx(1.01), "x")
    assert medians["in flight over plain"] == (pytest.approx(1.1), "x")
    assert medians["critical path (DiLoCo.step)"] == (pytest.approx(6.0), per_round)
    assert medians["critical path (DiLoCo.step), CPU"] == (pytest.approx(5.0), per_round)
    assert medians["  collect"] == (pytest.approx(1.0), per_round)
    assert medians["  rest"] == (pytest.approx(3.0), per_round)
    assert medians["all CPU beyond training"] == (pytest.approx(16.0), per_round)
    assert medians["  inner steps, slowed"] == (pytest.approx(2.0), per_round)
    # 16 - 2 - 5 of the critical path - 5 phases of the IO thread
    assert medians["  rest of the other threads"] == (pytest.approx(4.0), per_round)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_the_bench_times_a_real_island_against_a_real_syncer() -> None:
    progress: list[int] = []

    report = run(lambda what, done, total: progress.append(done), setting=TINY)

    told = json.loads(json.dumps(report.as_dict()))
    assert told["bench"] == "overhead"
    by_name = {row["figure"]: row for row in told["rows"]}
    assert {"  collect", "  encode", "session idle over plain"} <= by_name.keys()
    assert all(row["low"] <= row["median"] <= row["high"] for row in told["rows"])
    assert all(row["count"] == TINY.num_cycles - 1 for row in told["rows"])
    for phase in (*CRITICAL_PHASES, *IO_PHASES):  # each was met where it runs
        assert by_name[f"  {phase}"]["low"] > 0, phase
    assert [bar["what"] for bar in told["required"]] == [
        "step, plain loop",
        "session idle over plain, lower bound",
        "critical path (DiLoCo.step)",
        "all CPU beyond training",
    ]
    assert sorted(progress) == progress


def test_one_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})

    with pytest.raises(ConfigError, match=r"needs two CPUs, .* only CPU 3"):
        run(lambda *_: None, setting=TINY)
