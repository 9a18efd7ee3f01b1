"""The laboratory: real islands of one process under a virtual clock, and what they are held to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.errors import ConfigError
from diloco.simulations.engine.trace import tracks_of
from diloco.simulations.lab.batches import batches_of, union_of
from diloco.simulations.lab.config import Flags
from diloco.simulations.lab.point import LabPoint, open_text, points_of
from diloco.simulations.lab.run import Result, run_point, write_start
from diloco.simulations.lab.timeline import LabTimeline

BASE = Path(__file__).resolve().parents[2] / "configs" / "simulations" / "run.toml"
#: A model of 21,000 parameters on sequences of 16 bytes.
TINY = (
    "model.dim=32",
    "model.num_layers=1",
    "model.ffn_dim=32",
    "data.sequence_length=16",
    "evaluation.num_sequences=8",
    "run.inner_steps=24",
    "outer.inner_steps_per_round=6",
)
ON_ARRIVAL = ("outer.merge=on_arrival", "outer.min_contributions=1", "outer.grace=2s")


def tiny(*settings: str, **lab: Any) -> LabPoint:
    lab = {"run": str(BASE), "num_islands": 2, "threads": 1, "points": 2, **lab}
    lab.setdefault("tokens_per_inner_step", 96)
    overrides = tuple(f"{key.replace('__', '.')}={json.dumps(v)}" for key, v in lab.items())
    (point,) = points_of(None, Flags(overrides, (*TINY, *settings)))
    return point


def figures(result: Result) -> Result:
    return {key: value for key, value in result.items() if key != "wall_s"}


def test_a_seed_says_every_bit() -> None:
    point = tiny(*ON_ARRIVAL, step__noise=0.3, step__skew=0.5)

    assert figures(run_point(point, None)) == figures(run_point(point, None))


def test_an_island_alone_that_takes_what_it_sent_is_plain_training() -> None:
    """SGD of lr 1 publishes theta - (theta - local): local, up to float32's rounding."""
    sgd = 'outer.optimizer={ name = "sgd", lr = 1.0 }'

    outer = run_point(tiny(sgd, num_islands=1), None)
    plain = run_point(tiny(num_islands=1, method="data_parallel"), None)

    # A rounding moves a parameter by 6e-8 of itself a round, and the loss by no more than that.
    assert outer["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert outer["loss"] < 5.5  # of 5.55 for a byte that nothing is known of


@pytest.mark.parametrize("num_islands", [2, 3])
@pytest.mark.parametrize("split", ["iid", "topics"])
def test_data_parallel_sees_what_all_islands_see(num_islands: int, split: str) -> None:
    config = tiny(num_islands=num_islands).config
    data = open_text(config)

    union = union_of(config, data, split).batch(3)
    parts = [batches.batch(3) for batches in batches_of(config, data, split).values()]

    assert torch.equal(union, torch.cat(parts))


def test_topics_are_neighbouring_parts_of_the_text() -> None:
    config = tiny().config
    data = open_text(config)
    text = bytes(data.corpus.train)  # type: ignore[attr-defined]  # the standard library's

    for slot, batches in enumerate(batches_of(config, data, "topics").values()):
        part = text[slot * len(text) // 2 : (slot + 1) * len(text) // 2]
        assert all(bytes(row.tolist()) in part for row in batches.batch(0))


def test_a_syncer_that_is_killed_again_and_again_changes_no_bit_of_what_is_learnt() -> None:
    undisturbed = run_point(tiny(), None)

    killed = run_point(tiny(failures__syncer_mean_time_between="5s"), None)

    assert (undisturbed["syncer_failures"], killed["syncer_failures"] > 1) == (0, True)
    assert killed["digests"] == undisturbed["digests"]
    assert killed["virtual_s"] > undisturbed["virtual_s"]


def test_an_island_that_returns_with_its_moments_equals_one_that_never_left() -> None:
    """It goes back to its last merge: parameters are published there, and text is by inner step."""
    lives = {"failures__mean_time_between": "9s", "failures__mean_repair": "3s"}
    undisturbed = run_point(tiny(), None)

    kept, lost = (
        run_point(tiny(failures__keeps_optimizer=keeps, **lives), None) for keeps in (True, False)
    )

    assert kept["failures"] > 1
    assert kept["inner_steps"] == undisturbed["inner_steps"], "redone steps are no further ones"
    assert kept["tokens"] > undisturbed["tokens"]
    assert kept["digests"] == undisturbed["digests"]
    assert lost["digests"] != undisturbed["digests"]


def test_links_cost_time_and_change_no_bit_of_what_is_learnt() -> None:
    free = run_point(tiny(), None)

    thin = run_point(tiny(link__bandwidth="1Mbit/s", link__round_trip="100ms"), None)

    assert thin["digests"] == free["digests"]
    # Three rounds and a flush: up and down again, 32 bits a parameter, and two round trips.
    crossing_s = 2 * (32 * thin["parameters"] / 1e6 + 0.1)
    assert thin["virtual_s"] > free["virtual_s"] + 4 * crossing_s
    assert thin["virtual_s"] < free["virtual_s"] + 1.3 * 4 * crossing_s + 2


@pytest.mark.parametrize(
    ("method", "kinds"),
    [("diloco", {"compute", "send", "fetch", "wait"}), ("data_parallel", {"compute", "wait"})],
)
def test_a_timeline_leaves_no_gap_and_changes_no_figure(method: str, kinds: set[str]) -> None:
    links = {"link__bandwidth": "1Mbit/s", "link__round_trip": "100ms"}
    point, timeline = tiny(method=method, **links), LabTimeline()

    result = run_point(point, None, timeline=timeline)

    assert figures(result) == figures(run_point(point, None))
    assert {span.kind for span in timeline.spans} == kinds
    tracks = tracks_of(timeline.spans)
    assert list(tracks) == sorted(point.config.islands)
    for island, its_tracks in tracks.items():
        training = its_tracks["training"]
        lengths = [span.end_s - span.begin_s for span in training if span.kind == "compute"]
        assert lengths == pytest.approx([1.0] * result["steps"][island])
        assert [s.end_s for s in training[:-1]] == pytest.approx([s.begin_s for s in training[1:]])
        assert training[-1].end_s <= result["virtual_s"]


def test_an_inner_step_in_which_an_island_fails_ends_then() -> None:
    timeline = LabTimeline()

    result = run_point(tiny(*ON_ARRIVAL, failures__mean_time_between="8s"), None, timeline=timeline)

    lengths = [span.end_s - span.begin_s for span in timeline.spans if span.kind == "compute"]
    cut = [length for length in lengths if length < 1 - 1e-9]
    assert 0 < len(cut) <= result["failures"]
    assert len(lengths) == sum(result["steps"].values()) + len(cut)


def test_data_parallel_sends_its_gradients_at_every_step() -> None:
    links = {"link__bandwidth": "1Mbit/s", "link__round_trip": "100ms"}

    result = run_point(tiny(method="data_parallel", num_islands=3, **links), None)

    # A ring of three: 2 * 2 / 3 of 32 bits a parameter, and four hops of a whole way, 100 ms.
    step_s = 1 + 2 * 2 / 3 * 32 * result["parameters"] / 1e6 + 4 * 0.1
    assert result["virtual_s"] == pytest.approx(24 * step_s)
    assert result["bytes_up"] == pytest.approx(24 * 2 * 2 * 4 * result["parameters"], abs=24 * 3)


def test_islands_may_differ_in_tokens(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    of_all = BASE.read_text().partition("[islands.all]")[0]
    island = "[islands.{}]\nranks = 1\ntokens_per_inner_step = {}\n"
    run.write_text(of_all + island.format("big", 128) + island.format("small", 64))
    point = tiny(run=str(run), num_islands=0, tokens_per_inner_step=0)

    result = run_point(point, None)

    assert result["tokens"] == 24 * (128 + 64)
    assert result["steps"] == {"big": 24, "small": 24}


def test_islands_that_fail_come_back_and_the_run_ends() -> None:
    result = run_point(tiny(*ON_ARRIVAL, failures__mean_time_between="8s"), None)

    assert result["ended"] == ""
    assert result["failures"] > 0
    assert min(result["busy"].values()) < 1


def test_a_lost_contribution_is_waited_for_no_longer_than_the_grace() -> None:
    whole = run_point(tiny(*ON_ARRIVAL), None)

    lossy = run_point(tiny(*ON_ARRIVAL, failures__dropped=0.5), None)

    assert (whole["solo_rounds"], whole["dropped_tokens"]) == (0, 0)
    assert lossy["solo_rounds"] > 0
    assert lossy["dropped_tokens"] > 0


def test_a_scheduled_run_waits_for_contributions_that_are_held_up() -> None:
    whole = run_point(tiny(), None)

    lossy = run_point(tiny(failures__dropped=0.5, failures__outage="4s"), None)

    assert lossy["digests"] == whole["digests"]
    assert lossy["virtual_s"] >= whole["virtual_s"] + 4


def test_warm_points_go_on_where_data_parallel_stood(tmp_path: Path) -> None:
    start, point = tmp_path / "start.safetensors", tiny(warm_steps=12)
    write_start(point, start)

    warm = run_point(point, start)

    assert warm["steps"] == {"island-00": 12, "island-01": 12}
    assert warm["tokens"] == run_point(tiny(method="data_parallel"), None)["tokens"]
    others = [tiny(warm_steps=12, num_islands=3), tiny("outer.uplink_codec=int4", warm_steps=12)]
    assert {p.start_fingerprint() for p in others} == {point.start_fingerprint()}
    assert tiny("run.seed=2", warm_steps=12).start_fingerprint() != point.start_fingerprint()


BAD: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    "tau of H": (("outer.overlap_steps=6",), {}, "outer.overlap_steps: 6: must be smaller than"),
    "quorum of too many": (
        (*ON_ARRIVAL, "outer.min_contributions=3"), {}, "outer.min_contributions = 3",
    ),
    "no bandwidth": ((), {"link": {"bandwidth": "0Mbit/s"}}, "link.bandwidth"),
    "unknown profile": ((), {"link": {"profile": "moon"}}, "link.profile: .*moon"),
    "negative skew": ((), {"step": {"skew": -1.0}}, "step.skew: -1.0: .*allowed: >= 0"),
    "shape without failures": ((), {"failures": {"shape": 2.0}}, "failures.shape: .*needs"),
    "all dropped": ((), {"failures": {"dropped": 1.0}}, "failures.dropped: 1.0: .*allowed: .*< 1"),
    "an outage of nothing": ((), {"failures": {"outage": "9s"}}, "failures.outage: .*needs"),
    "pruned by size, none of it": ((), {"prune": {"by": "size"}}, "prune.by: .*needs"),
    "all pruned": ((), {"prune": {"share": 1.0}}, "prune.share: 1.0: .*allowed: .*< 1"),
    "pruned data parallel": (
        (), {"prune": {"share": 0.5}, "method": "data_parallel"}, "prune.share = 0.5: .*leave it",
    ),
    "tokens that cannot be shared": (
        (), {"tokens_per_inner_step": 97}, "tokens_per_inner_step = 97: .*nearest is 96",
    ),
    "parts of sequences": (
        (), {"tokens_per_inner_step": 100}, "tokens_per_inner_step: 50: must be a multiple",
    ),
    "all steps warm": ((), {"warm_steps": 24}, "warm_steps = 24: must be from 0 to below"),
    "an island that is not there": (
        (), {"islands": {"moon": {"step": "2s"}}}, "islands.moon: not an island .*island-00",
    ),
    "unknown key of a sweep": (
        (), {"sweep": {"lab.steps.skew": [1]}}, "sweep.lab.steps.skew: .*lab.step",
    ),
    "unknown key of the run": ((), {"sweep": {"outer.tau": [1]}}, "outer.tau = 1.*unknown key"),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "lab", "problem"), BAD.values(), ids=BAD)
def test_what_cannot_be_is_refused_by_its_path(
    settings: tuple[str, ...], lab: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    values = {"run": str(BASE), "num_islands": 2, "tokens_per_inner_step": 96, **lab}
    file = tmp_path / "lab.toml"
    lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
    file.write_text("\n".join(lines))

    with pytest.raises(ConfigError, match=f"(?s){problem}"):
        points_of(file, Flags(settings=(*TINY, *settings)))


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f'"{key}" = {_toml(item)}' for key, item in value.items())
        return f"{{ {', '.join(pairs)} }}"
    return json.dumps(value)
