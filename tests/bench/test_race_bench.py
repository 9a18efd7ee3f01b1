"""The race: its runs and links, what it judges, its picture, and one small race for real."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from diloco.baseline.local import BaselineOptions, check_baseline
from diloco.bench.network.emulating import LinkRow, run_watched
from diloco.bench.training import race as bench
from diloco.bench.training.race import METHODS, QUICK, SETTING, chosen_links, figures_of, run_order
from diloco.bench.training.race_plot import write_plot
from diloco.cli.main import app
from diloco.config.links import find_profile
from diloco.config.load import load_config
from diloco.errors import ConfigError
from diloco.simulations.emulate.config import load_wan
from diloco.transport.units import parse_bandwidth

FOUND = {
    "flat": {"wall_s": 150.0, "nats_per_byte": 2.0, "bytes_up": 900e6},
    "hierarchical": {"wall_s": 100.0, "nats_per_byte": 2.0, "bytes_up": 700e6},
    "diloco-float32": {"wall_s": 50.0, "nats_per_byte": 2.02, "bytes_up": 70e6},
    "streaming-int4": {"wall_s": 40.0, "nats_per_byte": 2.06, "bytes_up": 9e6},
}
FOUND = {
    method: {**figures, "bytes_down": figures["bytes_up"], "utilisation": 0.5}
    for method, figures in FOUND.items()
}


def run(setting=QUICK, *, is_emulated=False):
    def hear(what, done, total):
        assert done <= total == len(setting.links) * len(METHODS)

    return bench.run(hear, emulate=is_emulated, setting=setting)


def names(*patterns, is_emulated):
    return [link.name for link in chosen_links(SETTING, patterns, is_emulated=is_emulated)]


def test_links_that_lose_packets_are_for_emulated_networks():
    clean = ["1G-1ms", "1G-20ms", "100M-60ms"]

    assert names(is_emulated=False) == clean
    assert names(is_emulated=True) == clean + [f"{name}-0.1%" for name in clean]
    with pytest.raises(ConfigError, match=r"1G-1ms-0.1% loses packets.*add --emulate .* 1G-1ms$"):
        names("1G-1ms-0.1%", is_emulated=False)
    with pytest.raises(ConfigError, match="--rows 9G matches no link; links are 1G-1ms, 1G-20ms"):
        names("9G", is_emulated=True)


@pytest.mark.parametrize("link", SETTING.links, ids=lambda link: link.name)
def test_each_link_can_be_emulated_and_those_without_loss_be_shaped_alike(link, tmp_path):
    path = tmp_path / "link.toml"
    path.write_text(link.toml)

    emulated = load_wan(path).profiles["measured"]

    assert emulated.up == emulated.down
    assert emulated.up.bandwidth_bps == parse_bandwidth(link.bandwidth)
    assert (emulated.up.delay_s, emulated.up.loss) == (link.rtt_ms / 2e3, link.loss)
    if not link.loss:
        shaped = find_profile(f"bench-{link.name}")
        assert (shaped.up, shaped.down) == (emulated.up, emulated.down)


def test_all_methods_train_the_same_on_the_same_link(tmp_path):
    order = run_order(SETTING, SETTING.links[0], tmp_path)
    configs = {}
    for method, each in order.items():
        path = tmp_path / f"{method}.toml"
        path.write_text(each["toml"])
        configs[method] = load_config(path, [])
        assert configs[method].coordinator.state_dir == str(tmp_path / method)

    alike = [
        (c.model, c.data, c.inner, c.run.seed, c.run.inner_steps, c.islands, c.transport)
        for c in configs.values()
    ]
    assert list(configs) == list(METHODS)
    assert all(each == alike[0] for each in alike)
    for method in ("flat", "hierarchical"):
        check_baseline(configs[method], BaselineOptions(method))
    assert configs["diloco-float32"].outer.uplink_codec == "float32"
    assert configs["streaming-int4"].outer.uplink_codec == "int4"
    assert load_config(path, []).transport.link == "bench-1G-1ms"


def test_everything_is_held_against_hierarchical_all_reduce(monkeypatch):
    monkeypatch.setattr(bench, "_measure", lambda *_: (FOUND, "-"))

    report = run(replace(QUICK, is_loss_judged=True))

    by_method = {row["method"]: row for row in report.rows}
    assert by_method["flat"]["faster"] == pytest.approx(100 / 150)
    assert by_method["streaming-int4"]["megabytes_up"] == 9
    wall, loss = report.requirements
    assert (wall.figure, wall.limit, wall.is_at_least) == (2.5, 1.0, True)
    assert loss.figure == pytest.approx(1.03) and loss.is_met and not loss.is_stretch
    json.dumps(report.as_dict())


def test_few_steps_do_not_judge_the_loss(monkeypatch):
    worse = {**FOUND, "streaming-int4": {**FOUND["streaming-int4"], "nats_per_byte": 2.4}}
    monkeypatch.setattr(bench, "_measure", lambda *_: (worse, "-"))

    assert not run(QUICK).missed
    assert len(run(replace(QUICK, is_loss_judged=True)).missed) == 1


def test_a_link_that_is_not_as_told_has_no_figures_and_misses_its_bars(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "_measure", lambda *_: ({}, "MISSED: rate"))

    report = run(is_emulated=True)
    write_plot(report.rows, tmp_path / "race.png")

    assert [row["wall_s"] for row in report.rows] == [None] * len(METHODS)
    assert [bar.what.split(", ")[1] for bar in report.missed] == ["wall time"]
    assert all(math.isnan(bar.figure) for bar in report.requirements)


def test_figures_are_those_of_the_slowest_and_worst_island():
    island = {"wall_s": 1.0, "utilisation": 0.9, "published_nats_per_byte": 2.0}
    island |= {"bytes_up": 5, "bytes_down": 7}
    other = {**island, "wall_s": 2.0, "utilisation": 0.4, "bytes_up": 9}

    assert figures_of({"islands": [island, other]}) == {
        "wall_s": 2.0, "utilisation": 0.4, "nats_per_byte": 2.0, "bytes_up": 9, "bytes_down": 7
    }  # fmt: skip
    baseline = {key: FOUND["flat"][key] for key in ("wall_s", "utilisation", "nats_per_byte")}
    moved = {"east": {"bytes_up": 5, "bytes_down": 7}, "west": {"bytes_up": 7, "bytes_down": 5}}
    assert figures_of({"baseline": "flat", **baseline, "islands": moved}) == {
        **baseline, "bytes_up": 7, "bytes_down": 7
    }  # fmt: skip


def test_the_command_draws_and_refuses_what_it_cannot_draw(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "_measure", lambda *_: (FOUND, "-"))
    picture = tmp_path / "race.png"

    drawn = CliRunner().invoke(app, ["bench", "race", "--quick", "--plot", str(picture)])
    refused = CliRunner().invoke(app, ["bench", "race", "--plot", "race.jpeg"])

    assert drawn.exit_code == 0, drawn.output
    assert "streaming-int4" in drawn.stdout and "met:" in drawn.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "--plot race.jpeg: give a path that ends with .png" in str(refused.exception)


def test_a_watched_command_ends_with_who_watches(tmp_path):
    class EnoughError(Exception):
        pass

    def enough():
        if (tmp_path / "begun").exists():
            raise EnoughError

    words = f"import pathlib, time; pathlib.Path({str(tmp_path / 'begun')!r}).touch(); "
    with pytest.raises(EnoughError):
        run_watched([sys.executable, "-c", words + "time.sleep(600)"], tmp_path / "log", enough)

    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(tmp_path / "begun") not in listed.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_race_for_real():
    small = replace(
        QUICK,
        links=(LinkRow("1G-1ms", "1Gbit/s", 1, is_judged=True),),
        inner_steps=12,
        inner_steps_per_round=6,
        evaluation_sequences=4,
        model={"preset": "tiny"},
    )

    by_method = {row["method"]: row for row in run(small).rows}

    losses = {method: row["nats_per_byte"] for method, row in by_method.items()}
    # The two sum the same gradients in another order.
    assert losses["flat"] == pytest.approx(losses["hierarchical"], rel=1e-3)
    up = {method: row["megabytes_up"] for method, row in by_method.items()}
    # 2 rounds instead of 12 inner steps, and 4 bits instead of 32.
    assert up["diloco-float32"] < 0.5 * up["hierarchical"]
    assert up["streaming-int4"] < 0.5 * up["diloco-float32"]
