"""The bench of all-reduces: what it judges, its networks, and one small link for real."""

import pytest

from diloco.bench.network import allreduce as bench
from diloco.bench.network.allreduce import SETTING, AllReduceSetting
from diloco.bench.network.emulating import LinkRow
from diloco.errors import ConfigError
from diloco.simulations.emulate.config import load_wan

MIB = 1 << 20
SMALL = AllReduceSetting(
    (LinkRow("small", "200Mbit/s", 10, is_judged=True),),
    num_bytes=MIB,
    chunks_bytes=(MIB // 4, MIB),
    repetitions=1,
)


def run(setting, *names, is_emulated=False):
    return bench.run(lambda *_: None, names, emulate=is_emulated, setting=setting)


def test_an_unknown_link_is_refused():
    with pytest.raises(ConfigError, match="--rows 9G matches no link; links are 100M-60ms"):
        run(SETTING, "9G")


@pytest.mark.parametrize("link", SETTING.links, ids=lambda link: link.name)
def test_each_link_is_a_network_that_can_be_emulated(link, tmp_path):
    path = tmp_path / "link.toml"
    path.write_text(link.toml)

    wan = load_wan(path)

    assert wan.profiles["measured"].up.delay_s == pytest.approx(link.rtt_ms / 2e3)
    assert set(wan.config.islands) == {"east", "west"}


def test_the_ideal_is_of_the_link_and_of_what_inside_takes_alone(monkeypatch):
    # 1 MiB at 200 Mbit/s: 41.9 ms between, 10 ms of delay; inside 8 ms, in 4 chunks 2 ms show.
    hierarchical = {"took_s": {}, "inside_s": {}}
    for size, took_s in ((MIB // 4, 0.060), (MIB, 0.070)):
        hierarchical["took_s"][str(size)] = [took_s, 2 * took_s]
        hierarchical["inside_s"][str(size)] = [0.008]
    found = {"flat": {"took_s": {str(MIB // 4): [0.080]}}, "hierarchical": hierarchical}
    monkeypatch.setattr(bench, "_measure", lambda *_: (found, "-"))

    report = run(SMALL)

    between_s = 8 * MIB / 200e6
    flat, chunks, whole = report.rows
    assert chunks["ideal_s"] == pytest.approx(between_s + 0.010 + 0.008 / 4)
    assert whole["ideal_s"] == pytest.approx(between_s + 0.010 + 0.008)
    assert flat["ideal_s"] == pytest.approx(1.5 * between_s + 0.015)
    assert chunks["ratio"] == chunks["ideal_s"] / 0.060
    share, gain = report.requirements
    assert (share.figure, share.limit) == (chunks["ratio"], 0.9)
    assert gain.figure == pytest.approx(80 / 60) and gain.is_met


def test_a_link_that_is_not_as_told_misses_its_bars(monkeypatch):
    monkeypatch.setattr(bench, "_measure", lambda *_: ({}, "MISSED: rate"))

    report = run(SMALL, is_emulated=True)

    assert len(report.missed) == 2
    assert all(row["note"] == "the link is not as specified" for row in report.rows)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_link_is_measured_for_real():
    report = run(SMALL)

    for row in report.rows:
        # Nothing is faster than its link; inside phases are measured apart, and may differ.
        assert 0 < row["ratio"] < 1.1
