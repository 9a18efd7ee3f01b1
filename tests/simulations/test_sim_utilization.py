"""Utilisation and bandwidth: events against closed form, papers' figures, refused scenarios."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from diloco.errors import ConfigError
from diloco.simulations.published import paper_tables
from diloco.simulations.scenarios import wallclock
from diloco.simulations.scenarios.bandwidth import GRID, bandwidth_curve, needed_bps, on_grid
from diloco.simulations.scenarios.scenario import METHODS, Scenario, make_scenarios
from diloco.simulations.scenarios.utilization import simulate


def scenario(**values: Any) -> Scenario:
    return Scenario.model_validate(values)


def rate(bandwidth: float) -> str:
    """Say a rate, within what a scenario takes."""
    return f"{min(max(bandwidth, 1.0), 1e17):.0f}bit/s"


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Draw settings of methods that wait; lines from far too thin to far too fat for the model."""
    method = draw(st.sampled_from(["data-parallel", "hierarchical", "diloco", "streaming"]))
    is_every_step = method in ("data-parallel", "hierarchical")
    layers = draw(st.integers(1, 12))
    step_s = draw(st.floats(0.01, 10.0))
    params = draw(st.floats(1e6, 1e11))
    period = 1 if is_every_step else draw(st.integers(1, 24))
    fragments = draw(st.integers(1, min(layers, period))) if method == "streaming" else 1
    bits = draw(st.floats(1.0, 32.0))
    # The time of a round's payload over that of its steps.
    load = draw(st.floats(0.01, 3.0))
    bandwidth = params * bits / (load * period * step_s)
    values: dict[str, Any] = {
        "method": method,
        "params": params,
        "layers": layers,
        "step_time": f"{step_s:.6f}s",
        "islands": draw(st.integers(2, 5)),
        "num_fragments": fragments if method == "streaming" else 0,
        "bits_up": bits,
        "bandwidth": rate(bandwidth),
        "bandwidth_down": rate(bandwidth * draw(st.floats(0.5, 4.0))),
        "rtt": f"{draw(st.floats(0.0, 0.5)) * step_s:.6f}s",
        "buckets": draw(st.sampled_from([0, 0, 1, 7])),
        "release": draw(st.sampled_from(["backward", "step"])),
    }
    if is_every_step:
        values["ranks"] = draw(st.integers(1, 8))
        values["inside_bandwidth"] = rate(bandwidth * draw(st.floats(0.5, 20.0)))
    else:
        values["inner_steps_per_round"] = period
        values["fragment_pattern"] = draw(st.sampled_from(["strided", "sequential"]))
        values["topology"] = draw(st.sampled_from(["allreduce", "star"]))
        values["bits_down"] = draw(st.floats(1.0, 32.0))
        if method == "streaming":
            values["overlap_steps"] = draw(st.integers(0, period - 1))
        if values["topology"] == "star" and draw(st.booleans()):
            values["syncer_bandwidth"] = rate(bandwidth * draw(st.floats(0.3, 8.0)))
    if values["rtt"] != "0.000000s" and draw(st.booleans()):
        values["tcp_window"] = f"{draw(st.integers(10_000, 10**9))}B"
        values["streams"] = draw(st.integers(1, 4))
    return scenario(**values)


@settings(deadline=None, max_examples=100)
@given(scenarios())
@example(  # headers of the line are none of the ranks inside, which are slower here
    scenario(
        method="data-parallel",
        params=1e6,
        layers=1,
        step_time="1s",
        islands=2,
        bits_up=1.0,
        bandwidth="1Mbit/s",
        inside_bandwidth="500kbit/s",
        rtt="1us",
        tcp_window="10000B",
    )
)
def test_events_and_closed_form_agree_where_both_apply(drawn: Scenario) -> None:
    assume(not wallclock.applies(drawn))

    by_events, by_formula = simulate(drawn).utilisation, wallclock.utilisation(drawn)

    assert by_events == pytest.approx(by_formula, rel=0.01)


def test_fragments_in_flight_at_once_share_the_line() -> None:
    """P = H = 4, tau = 2, a fragment of 3 s a step of 1 s: the line alone decides, 3 s a step."""
    drawn = scenario(
        method="streaming", params=4e9, layers=4, num_fragments=4, inner_steps_per_round=4,
        overlap_steps=2, step_time="1s", bits_up=6.0, bandwidth="2Gbit/s", release="step",
    )  # fmt: skip

    assert "at once" in wallclock.applies(drawn)
    assert simulate(drawn, rounds=20).utilisation == pytest.approx(1 / 3, rel=0.02)


@pytest.mark.parametrize("load", [1.05, 1.3])
def test_a_line_a_little_too_thin_is_full_in_the_end_though_the_overlap_hides_it_at_first(
    load: float,
) -> None:
    """H = 10, P = 8, tau = 5: 5 s are hidden, 0.5 s more a round; of 3 rounds it was 100 %."""
    drawn = scenario(
        method="streaming", params=1e10, layers=8, num_fragments=8, inner_steps_per_round=10,
        overlap_steps=5, bandwidth=f"{16 / load:.6f}Gbit/s",
    )  # fmt: skip

    assert simulate(drawn).utilisation == pytest.approx(1 / load, rel=0.005)


def test_slow_islands_hold_up_those_that_wait_and_not_those_that_do_not() -> None:
    waiting = simulate(scenario(method="diloco", step_skew=1.0, bandwidth="1Tbit/s"))
    free = simulate(
        scenario(
            method="decoupled",
            inner_steps_per_round=8,
            num_fragments=4,
            step_skew=1.0,
            bandwidth="1Tbit/s",
        )
    )

    assert waiting.utilisation == pytest.approx(0.75, abs=0.01)  # one of the two idles half
    assert free.utilisation > 0.999


@pytest.mark.parametrize("skew", [0.7, 5.0])
def test_islands_that_do_not_wait_are_counted_until_each_has_ended(skew: float) -> None:
    """The slow one ends up to a step after the other, and makes two rounds however slow it is."""
    free = simulate(
        scenario(
            method="decoupled",
            inner_steps_per_round=8,
            num_fragments=4,
            step_skew=skew,
            bandwidth="1Tbit/s",
        )
    )

    assert free.utilisation > 0.999
    assert free.round_s == pytest.approx(8 * (1 + skew))


def test_a_syncer_a_site_moves_what_reduce_scatter_and_all_gather_do() -> None:
    """M = P = 4: three quarters of the fragments go up from each site, as many versions out."""
    common: dict[str, Any] = {"layers": 12, "num_fragments": 4, "islands": 4, "step_time": "1s"}

    sites = simulate(scenario(topology="sites", **common))
    ring = simulate(scenario(topology="allreduce", **common))

    assert sites.bits_up == sites.bits_down == pytest.approx(1.5 * 16e9)
    assert ring.bits_up == ring.bits_down == pytest.approx(1.5 * 16e9)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_figures(method: str) -> None:
    small = {"inner_steps_per_round": 8, "num_fragments": 4} if method == "decoupled" else {}
    varied = {"step_noise": 0.2, "jitter": "20ms", "loss": 0.01, "rtt": "50ms"}
    drawn = scenario(method=method, layers=24, islands=3, **varied, **small)

    first, again, other = (simulate(drawn, seed=seed) for seed in (1, 1, 2))

    assert first == again
    assert first != other


@pytest.mark.slow
def test_streaming_table4_is_reproduced_by_general_code() -> None:
    exact, near = paper_tables.table4_counts(paper_tables.streaming_table4())

    assert (exact, near) == (63, 75)


def test_scaling_laws_wall_clock_by_hand() -> None:
    """N = 1e9, D = 2e10 in 1e4 steps on 64 chips, M = 2, 400 and 10 Gbit/s, H = 30."""
    training = wallclock.TrainingTime(
        params=1e9,
        tokens=2e10,
        batch_tokens=2e6,
        chips=64,
        islands=2,
        inside=wallclock.HIGH,
        between=wallclock.LOW,
        inner_steps_per_round=30,
    )

    assert training.compute_s == pytest.approx(6 * 1e9 * 2e10 / (64 * 300e12))
    assert training.inner_s == pytest.approx(1e4 * (0.08 * 62 / 64 + 1e-4))
    assert training.data_parallel_s == pytest.approx(1e4 * (3.2 * 63 / 64 + 1e-2))
    assert training.outer_s == pytest.approx(training.data_parallel_s / 30)


def test_bisection_finds_what_the_grid_encloses() -> None:
    curve = bandwidth_curve(scenario(layers=24, step_time="0.1s", rtt="20ms"))

    for target in (0.5, 0.8, 0.95):
        below, reaching = on_grid(curve, target, "below"), on_grid(curve, target, "reaching")
        needed = needed_bps(curve, target)
        assert below is not None and reaching is not None and needed is not None
        assert below < needed <= reaching * 1.005
        assert GRID.index(reaching) == GRID.index(below) + 1


def test_no_bandwidth_makes_up_for_delay() -> None:
    """A round trip of 1 s at every step of 1 s: half of the time at most."""
    curve = bandwidth_curve(scenario(method="data-parallel", rtt="1s", step_time="1s"))

    assert needed_bps(curve, 0.9) is None
    assert on_grid(curve, 0.9) is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        pytest.param({"overlap_steps": 100}, "scenario.overlap_steps: 100: must be in", id="tau"),
        pytest.param({"bandwidth": "0bit/s"}, "scenario.bandwidth: ", id="no-bandwidth"),
        pytest.param(
            {"method": "decoupled", "quorum": 3}, "scenario.quorum: 3: must be in [0, 2]", id="K"
        ),
        pytest.param({"bits_up": -1.0}, "scenario.bits_up: -1.0: is out of range", id="negative"),
        pytest.param({"link": "nowhere"}, "scenario.link: ", id="profile"),
        pytest.param({"num_fragments": 25}, "lower num_fragments, or choose", id="fragments"),
        pytest.param({"method": "diloco", "num_fragments": 2}, "scenario.num_frag", id="whole"),
        pytest.param({"tcp_window": "0B", "rtt": "1s"}, "scenario.tcp_window: ", id="window"),
        pytest.param({"bandwidth": "1e-300bit/s"}, "1bit/s to 100000Tbit/s", id="thin"),
        pytest.param({"step_time": "1e300h"}, "1us to 1000h", id="long"),
        pytest.param({"rtt": "1e9h"}, "0s to 1000h", id="far"),
        pytest.param({"step_time": "0s"}, "scenario.step_time: ", id="no-time"),
        pytest.param({"link": "metro-1G-5ms", "rtt": "1s"}, "scenario.rtt: ", id="link-and-rtt"),
        pytest.param({"ranks": 8}, "scenario.ranks: 8: is of gradients", id="useless"),
        pytest.param({"step": "1s"}, "scenario.step: ", id="unknown"),
    ],
)
def test_impossible_scenarios_are_refused_by_dotted_path(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_scenarios(None, {"method": "streaming", **values})

    assert said in str(refused.value)


def test_without_a_method_there_is_one_scenario_of_each() -> None:
    made = make_scenarios(None, {"overlap_steps": 3, "inner_steps_per_round": 50, "bits_up": 8.0})

    assert [each.method for each in made] == list(METHODS)
    assert [each.overlap_steps for each in made] == [0, 0, 0, 0, 3, 3, 3]
    assert math.isclose(sum(each.bits_up for each in made), 8 * 5 + 4 + 8)
