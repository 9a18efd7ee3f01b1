"""A run file's run under the virtual clock: what is sent, who waits how long, who comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diloco.config.links import find_profile
from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.forecast.traffic import diloco_traffic
from diloco.island.layout import build_schedule
from diloco.simulations.engine.lives import Absence, Failures, Weibull
from diloco.simulations.runs.costs import FREE
from diloco.simulations.runs.run_model import SimulatedRun, run_plan, simulate_run
from diloco.transport.shaping.link import Link, LinkProfile

RUNS = Path(__file__).resolve().parents[2] / "configs" / "runs"
STEP_S = 0.1


def config(name: str, *overrides: str) -> Config:
    return load_config(RUNS / f"{name}.toml", ["transport.link=thin-5M-60ms", *overrides])


def run(chosen: Config, **options: Any) -> SimulatedRun:
    return simulate_run(chosen, step_s=dict.fromkeys(chosen.islands, STEP_S), **options)


def test_a_whole_run_moves_what_its_plan_says() -> None:
    demo = config("demo")
    plan, schedule = run_plan(demo), build_schedule(demo.outer, demo.run.inner_steps)
    expected = diloco_traffic(plan, schedule, uplink_codec="int4", downlink_codec="int4")

    simulated = run(demo)

    for figures in simulated.whole.values():
        assert figures.inner_steps == demo.run.inner_steps
        assert (figures.bytes_up, figures.bytes_down) == (expected.bytes_up, expected.bytes_down)
    sends = sum(schedule.num_sends(p) for p in range(4))
    assert len(simulated.publications) == sends + 4  # the flush


def test_what_blocks_is_the_transfers_and_the_round_trips_of_the_protocol() -> None:
    """Everything at once, nothing overlapped, hosts that take no time.

    Up and its delay, the round closes; the poll that waits is answered with the version; the fetch
    goes up, and what was published comes down.
    """
    demo = config(
        "demo", "outer.num_fragments=1", "outer.overlap_steps=0", "outer.uplink_codec=float32"
    )
    link = find_profile("thin-5M-60ms")
    fragment = run_plan(demo).fragments[0]
    numel = sum(lane.numel for lane in fragment.lanes)
    up_s = 32 * numel / link.up.bandwidth_bps
    down_s = (4 + 16 / 128) * numel / link.down.bandwidth_bps

    simulated = run(demo, costs=FREE, rounds=3)

    delay_s = link.up.delay_s
    for figures in simulated.steady.values():
        assert figures.rounds == 2
        waited_s = up_s + down_s + (1 + 1 + 1 + 1) * delay_s
        assert figures.blocked_s_per_round == pytest.approx(waited_s, rel=1e-6)


def test_nobody_waits_on_a_fat_line_and_on_arrival_nobody_ever_does() -> None:
    assert run(config("demo", "transport.link=metro-1G-5ms"), costs=FREE).utilisation > 0.999
    decoupled = run(config("decoupled"))
    assert all(each.blocked_s == 0 for each in decoupled.whole.values())


def test_a_seed_decides_everything() -> None:
    demo, line = config("demo", "outer.overlap_steps=0"), Link(5e6, 0.03, jitter_s=0.01)
    links = LinkProfile("jittery", line, line, "this test")

    first, again, other = (run(demo, links=links, seed=s, rounds=3) for s in (1, 1, 2))

    assert first == again
    assert first.wall_s != other.wall_s


def test_a_shared_line_of_the_syncers_site_costs_what_its_bandwidth_says() -> None:
    demo = config("demo", "transport.link=metro-1G-5ms", "outer.overlap_steps=0")

    alone = run(demo, rounds=3)
    shared = run(demo, rounds=3, syncer_link=find_profile("thin-5M-60ms"))

    assert alone.utilisation > 0.9
    assert shared.utilisation < 0.6


def test_a_scheduled_island_that_returns_goes_on_where_the_others_stand() -> None:
    simulated = run(config("demo"), absences={"us-east": [Absence(20.0, 32.0)]})

    assert not simulated.lost
    others, back = simulated.whole["eu-west"], simulated.whole["us-east"]
    assert back.inner_steps == others.inner_steps + back.lost_steps
    assert others.blocked_s > run(config("demo")).whole["eu-west"].blocked_s + 10


def test_a_scheduled_run_without_an_island_ends_as_its_rounds_say() -> None:
    simulated = run(config("demo"), absences={"us-east": [Absence(20.0)]})

    assert simulated.num_expired >= 3
    assert "3 attempts in a row expired" in simulated.lost


def test_on_arrival_islands_come_late_leave_and_fail_and_nobody_waits() -> None:
    away = {
        "us-east": [Absence(0.0, 4.0)],
        "eu-west": [Absence(6.0)],
        "ap-south": [Absence(5.0, 7.0), Absence(15.0, 16.0)],
    }

    simulated = run(config("decoupled"), absences=away)

    assert not simulated.lost
    assert all(each.blocked_s == 0 for each in simulated.whole.values())
    assert simulated.whole["us-east"].merges > 0


def test_drawn_failures_cost_on_arrival_those_alone_that_fail_and_a_seed_decides_them() -> None:
    decoupled = config("decoupled", "transport.link=metro-1G-5ms")
    failures = Failures(Weibull(10.0, 1.5), Weibull(2.0))

    first, again, other = (run(decoupled, failures=failures, seed=seed) for seed in (1, 1, 2))

    assert first == again
    assert first.absences != other.absences
    failed = [name for name, its in first.absences.items() if its]
    assert failed and all(first.num_without(name) > 0 for name in failed)
    assert all(each.blocked_s == 0 for each in first.whole.values())
    # What is left is fragments that are copied out of the ranks and into them.
    assert first.stalled_s < 0.01 * first.wall_s


def test_nobody_waits_for_the_return_of_an_island_that_is_away_when_the_run_ends() -> None:
    simulated = run(config("decoupled"), absences={"us-east": [Absence(5.0, 5000.0)]})

    assert 5.0 < simulated.wall_s < 100.0
    assert simulated.whole["us-east"].inner_steps < simulated.whole["eu-west"].inner_steps


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param({"step_s": {"eu-west": 0.1}}, "step_s.us-east is missing", id="missing"),
        pytest.param({"step_s": {"eu-west": -1.0, "us-east": 1.0}}, "step_s.eu-west", id="rate"),
        pytest.param({"absences": {"us-east": [Absence(0, 1)]}}, "on_arrival", id="late-join"),
        pytest.param({"absences": {"x": [Absence(1, 2)]}}, "absences.x: no such", id="unknown"),
        pytest.param({"links": {}}, "links.eu-west is missing", id="links"),
    ],
)
def test_impossible_inputs_are_refused_by_dotted_path(options: dict[str, Any], said: str) -> None:
    demo = config("demo")
    given: dict[str, Any] = {"step_s": dict.fromkeys(demo.islands, STEP_S), **options}

    with pytest.raises(ConfigError) as refused:
        simulate_run(demo, **given)

    assert said in str(refused.value)
