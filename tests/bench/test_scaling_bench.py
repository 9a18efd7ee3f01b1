"""The bench of scaling: its rows, the arithmetic of its figures, and real ranks."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from diloco.bench.scaling import SETTING, Row, chosen_rows, row_figures, run_scaling
from diloco.bench.scaling_rank import run_delay_s
from diloco.cli.main import app
from diloco.errors import ConfigError

TINY = replace(SETTING, sequence_length=32, warmup_steps=1, timed_steps=2, model={"preset": "tiny"})


def names(*patterns, ranks=(2, 4)):
    return [row.name for row in chosen_rows(SETTING, ranks, patterns)]


def test_every_strategy_takes_all_ranks_and_one_rank_is_always_there():
    assert names(ranks=(2,)) == ["one", "fsdp-2", "replicate-2", "tp-2", "pp-2", "cp-2"]
    assert names("tp-*") == ["one", "tp-2", "tp-4"]
    assert names("one") == ["one"]


@pytest.mark.parametrize(
    ("patterns", "ranks", "said"),
    [
        (("ep-2",), (2,), "--rows ep-2 matches no row; rows are one, fsdp-2"),
        (("tp-3",), (3,), "row tp-3 does not fit this bench's model: (?s:.*)num_kv_heads"),
    ],
)
def test_rows_that_are_not_or_do_not_fit_are_refused_before_anything_starts(patterns, ranks, said):
    with pytest.raises(ConfigError, match=said):
        names(*patterns, ranks=ranks)


def test_the_ideal_is_bound_by_the_cpus_and_exposed_is_a_share_of_the_wall_time():
    alone = [{"wall_s": 8.0, "cpu_s": 8.0, "exposed_s": 0.0, "loss": 2.0}]
    ranks = [
        {"wall_s": 5.0, "cpu_s": 2.5, "exposed_s": exposed_s, "loss": 2.0}
        for exposed_s in (0.5, 1.5, 0.5, 1.5)
    ]

    figures = row_figures(Row("fsdp", 4), ranks, alone, tokens=1000, cpus=2)

    assert figures["ideal_per_s"] == pytest.approx(2 * 1000 / 8)
    assert figures["efficiency"] == pytest.approx(200 / 250)
    assert figures["cpu_us_per_token"] == pytest.approx(10_000)
    assert figures["cpu_ratio"] == pytest.approx(10 / 8)
    assert figures["exposed"] == pytest.approx(0.2)


def test_waiting_for_a_cpu_is_told_by_the_kernel():
    before = run_delay_s()

    assert 0 <= before <= run_delay_s()


def test_ranks_are_no_words():
    refused = CliRunner().invoke(app, ["bench", "scaling", "--ranks", "2,many"])

    assert "--ranks 2,many: give numbers of ranks" in str(refused.exception)


@pytest.mark.timeout(300)
def test_real_ranks_of_each_strategy_train_the_same():
    rows = chosen_rows(TINY, (2,), ())

    report = run_scaling(TINY, rows, on_progress=lambda what, done, total: None)

    alone, *others = report.rows
    assert alone["efficiency"] == alone["cpu_ratio"] == 1
    assert [row["row"] for row in others] == ["fsdp-2", "replicate-2", "tp-2", "pp-2", "cp-2"]
    for row in others:
        # float32 sums in another order, over three inner steps of a tiny model
        assert row["loss"] == pytest.approx(alone["loss"], abs=5e-6)
        assert 0 <= row["exposed"] <= 1
        assert row["cpu_us_per_token"] > 0
