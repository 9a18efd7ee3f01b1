"""An all-reduce under the virtual clock: as long as the real one, and through the same failures."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.forecast.traffic import allreduce_bytes, allreduce_traffic
from diloco.island.layout import build_schedule
from diloco.simulations.engine.lives import Absence
from diloco.simulations.runs.costs import FREE
from diloco.simulations.runs.run_model import SimulatedRun, run_plan, simulate_run
from diloco.transport.calls.loopback import run_virtual
from diloco.transport.contracts import Transport
from diloco.transport.shaping.link import Link, LinkProfile
from diloco.transport.shaping.shaped import ShapedTransport
from tests.virtual_allreduce import AllReduceRun
from tests.virtual_run import Setting

RUNS = Path(__file__).resolve().parents[2] / "configs" / "runs"
#: Alike both ways, as the in-process shaping takes the puller's link alone.
LINE = Link(5e6, 0.03)
PROFILE = LinkProfile("line", LINE, LINE, "this test")


def config(*overrides: str) -> Config:
    return load_config(RUNS / "demo.toml", ['outer.exchange="allreduce"', *overrides])


def run(chosen: Config, links: LinkProfile = PROFILE, **options: object) -> SimulatedRun:
    step_s = dict.fromkeys(chosen.islands, 0.1)
    return simulate_run(chosen, step_s=step_s, links=links, **options)  # type: ignore[arg-type]


async def real_blocked_s(setting: Setting) -> dict[str, list[float]]:
    """Run real peers over links of `LINE`; returns what each merge blocked for, by island."""
    links = {name: PROFILE.states(1) for name in setting.islands}

    def shape(name: str, way: Transport) -> Transport:
        return ShapedTransport(way, *links[name])

    islands = await AllReduceRun(setting, shape=shape).run()
    return {
        name: [event["blocked_s"] for event in island.kinds("fragment_merged")]
        for name, island in islands.items()
    }


@pytest.mark.parametrize(
    ("codec", "numel", "num_fragments", "overlap_steps", "islands"),
    [
        pytest.param("float32", 32768, 1, 0, 2, id="float32-two-lanes"),
        pytest.param("int4", 262144, 1, 0, 2, id="int4-sixteen-lanes"),
        pytest.param(
            "int4", 524288, 2, 2, 4, id="int4-two-fragments-four-islands", marks=pytest.mark.slow
        ),
    ],
)
def test_real_peers_on_links_block_for_as_long(
    tmp_path: Path, codec: str, numel: int, num_fragments: int, overlap_steps: int, islands: int
) -> None:
    names = ("a", "b", "c", "d")[:islands]
    setting = Setting(
        {f"w{i}": [1.0] * (numel // num_fragments) for i in range(num_fragments)},
        lambda *_: None,
        tmp_path,
        inner_steps=8 + overlap_steps,
        islands=names,
        num_fragments=num_fragments,
        overlap_steps=overlap_steps,
        uplink_codec=codec,
        downlink_codec=codec,
        step_s=0.1,
    )
    chosen = config(
        f"outer.num_fragments={num_fragments}",
        f"outer.overlap_steps={overlap_steps}",
        "outer.inner_steps_per_round=4",
        f"outer.uplink_codec={codec}",
        f"outer.downlink_codec={codec}",
    )
    chosen = chosen.model_copy(update={"islands": dict.fromkeys(names, chosen.islands["eu-west"])})

    real = run_virtual(real_blocked_s(setting))
    simulated = run(chosen, costs=FREE, plan=setting.plan(), rounds=2, is_shaped=True)

    for name in names:
        # Headers of calls, which simulations do not count, take 0.3 % of such thin lines.
        assert simulated.whole[name].blocked_s == pytest.approx(sum(real[name]), rel=0.01)


@pytest.mark.parametrize(
    ("is_shaped", "round_trips"),
    [
        pytest.param(True, 1.5, id="shaped-in-the-process"),
        # Declaring and reporting each go to the coordinator, whose word comes back.
        pytest.param(False, 3.5, id="with-the-calls-to-the-coordinator"),
    ],
)
def test_what_blocks_two_islands_is_the_payload_and_the_round_trips_of_the_protocol(
    tmp_path: Path, is_shaped: bool, round_trips: float
) -> None:
    """Of two lanes each island reduces one: all lines are full from the first byte to the last.

    The contribution is asked for and comes, the result, asked for before, comes.
    """
    plan = Setting({"w": [1.0] * 32768}, lambda *_: None, tmp_path, 8).plan()
    chosen = config("outer.num_fragments=1", "outer.overlap_steps=0")
    num_bytes = allreduce_bytes(plan, 0, "int4", "int4", 2)

    simulated = run(chosen, costs=FREE, plan=plan, rounds=3, is_shaped=is_shaped)

    waited_s = 8 * num_bytes / LINE.bandwidth_bps + round_trips * 2 * LINE.delay_s
    for figures in simulated.steady.values():
        assert figures.blocked_s_per_round == pytest.approx(waited_s, rel=1e-6)


def test_a_whole_run_moves_what_its_plan_says() -> None:
    demo = config()
    plan, schedule = run_plan(demo), build_schedule(demo.outer, demo.run.inner_steps)
    codecs = {"uplink_codec": demo.outer.uplink, "downlink_codec": demo.outer.downlink}
    expected = allreduce_traffic(plan, schedule, num_islands=2, **codecs)

    simulated = run(demo)

    islands = simulated.whole.values()
    num_sends = sum(schedule.num_sends(p) for p in range(4))
    assert len(simulated.publications) == num_sends + 4  # the flush
    for way in ("bytes_up", "bytes_down"):
        assert sum(getattr(each, way) for each in islands) == pytest.approx(
            2 * getattr(expected, way),
            abs=2 * (num_sends + 4),  # of each send half a byte is cut
        )


def test_a_shared_holders_line_is_no_free_one() -> None:
    """What three others pull at once from an island goes through its line up."""
    demo = config("outer.num_lanes=1", "outer.num_fragments=1", "outer.overlap_steps=0")
    demo = demo.model_copy(update={"islands": dict.fromkeys("abcd", demo.islands["eu-west"])})

    shaped, shared = (run(demo, rounds=2, costs=FREE, is_shaped=each) for each in (True, False))

    assert shared.seconds_per_round > shaped.seconds_per_round + 1


def test_an_island_that_fails_comes_back_with_the_state_of_another() -> None:
    demo = config()
    # It goes while no round is open, which would expire and leave a version fewer.
    calm, simulated = run(demo), run(demo, absences={"us-east": [Absence(20.3, 32.3)]})

    others, back = simulated.whole["eu-west"], simulated.whole["us-east"]
    assert not simulated.lost
    assert back.inner_steps == others.inner_steps + back.lost_steps
    assert others.blocked_s > calm.whole["eu-west"].blocked_s + 10
    versions = [(each.fragment_id, each.version) for each in simulated.publications]
    assert sorted(versions) == sorted((e.fragment_id, e.version) for e in calm.publications)


def test_a_run_whose_island_stays_away_ends_as_its_rounds_say() -> None:
    simulated = run(config(), absences={"us-east": [Absence(20.0)]})

    assert "3 attempts in a row expired" in simulated.lost


def test_a_seed_decides_everything() -> None:
    demo = config()
    line = Link(5e6, 0.03, jitter_s=0.01)
    jittery = LinkProfile("jittery", line, line, "this test")
    first, again, other = (run(demo, seed=s, links=jittery, rounds=3) for s in (1, 1, 2))

    assert first == again
    assert first.wall_s != other.wall_s


def test_a_line_of_syncers_that_are_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no syncers, whose line"):
        run(config(), syncer_link=PROFILE)
