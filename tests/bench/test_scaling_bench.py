"""The bench of scaling: its rows, the arithmetic of its figures, and real ranks."""

import math
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from diloco.bench.training.scaling import (
    SETTING,
    ScalingRow,
    chosen_rows,
    row_config,
    row_figures,
    run,
)
from diloco.bench.training.scaling_rank import run_delay_s
from diloco.cli.main import app
from diloco.errors import ConfigError
from diloco.trainer.models.model import LlamaShape, parameter_shapes
from tests.simulations.emulated_site import needs_namespaces

TINY = replace(SETTING, sequence_length=32, warmup_steps=1, timed_steps=2, model={"preset": "tiny"})


def names(*patterns, ranks="2,4"):
    return [row.name for row in chosen_rows(SETTING, ranks, patterns)]


def test_every_strategy_takes_all_ranks_and_one_rank_is_always_there():
    assert names(ranks="2") == ["one", "fsdp-2", "replicate-2", "tp-2", "pp-2", "cp-2"]
    assert names("tp-*") == ["one", "tp-2", "tp-4"]
    assert names("one") == ["one"]


@pytest.mark.parametrize(
    ("patterns", "ranks", "said"),
    [
        (("ep-2",), "2", "--rows ep-2 matches no row; rows are one, fsdp-2"),
        (("tp-3",), "3", "row tp-3 does not fit this bench's model: (?s:.*)num_kv_heads"),
    ],
)
def test_rows_that_are_not_or_do_not_fit_are_refused_before_anything_starts(patterns, ranks, said):
    with pytest.raises(ConfigError, match=said):
        names(*patterns, ranks=ranks)


def figures(*, link_bps):
    alone = [{"wall_s": 8.0, "cpu_s": 8.0, "exposed_s": 0.0, "moved_bytes": 0.0, "loss": 2.0}]
    ranks = [
        {"wall_s": 5.0, "cpu_s": 2.5, "exposed_s": exposed_s, "moved_bytes": moved, "loss": 2.0}
        for exposed_s, moved in ((0.5, 1e9), (1.5, 2e9), (0.5, 1e9), (1.5, 1e9))
    ]
    return row_figures(
        ScalingRow("fsdp", 4), ranks, alone, tokens=250, timed_steps=4, cpus=2, link_bps=link_bps
    )


def test_the_ideal_is_bound_by_the_cpus_and_exposed_is_a_share_of_the_wall_time():
    found = figures(link_bps=math.inf)

    assert found["linear_per_s"] == pytest.approx(4 * 1000 / 8)
    assert found["ideal_per_s"] == pytest.approx(2 * 1000 / 8)
    assert found["efficiency"] == pytest.approx(200 / 250)
    assert found["cpu_us_per_token"] == pytest.approx(10_000)
    assert found["cpu_ratio"] == pytest.approx(10 / 8)
    assert found["exposed"] == pytest.approx(0.2)


def test_the_ideal_lets_pass_what_the_busiest_rank_moved():
    found = figures(link_bps=3.2e9)  # 2 GB in 4 steps: 1.25 s a step, where arithmetic takes 1 s

    assert found["moved_mb"] == pytest.approx(500)
    assert found["ideal_per_s"] == pytest.approx(250 / 1.25)
    assert found["efficiency"] == pytest.approx(1)


def test_waiting_for_a_cpu_is_told_by_the_kernel():
    before = run_delay_s()

    assert 0 <= before <= run_delay_s()


def test_ranks_are_no_words():
    refused = CliRunner().invoke(app, ["bench", "scaling", "--ranks", "2,many"])

    assert "--ranks 2,many: give numbers of ranks" in str(refused.exception)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_real_ranks_of_each_strategy_train_the_same():
    report = run(lambda *_: None, ranks="2", setting=TINY)

    alone, *others = report.rows
    assert alone["efficiency"] == pytest.approx(1)
    assert alone["cpu_ratio"] == 1
    assert [row["row"] for row in others] == ["fsdp-2", "replicate-2", "tp-2", "pp-2", "cp-2"]
    for row in others:
        # float32 sums in another order, over three inner steps of a tiny model
        assert row["loss"] == pytest.approx(alone["loss"], abs=5e-6)
        assert 0 <= row["exposed"] <= 1
        assert row["cpu_us_per_token"] > 0


@needs_namespaces
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_on_emulated_links_move_what_the_strategy_must():
    setting = replace(TINY, bandwidth="100Mbit/s")

    report = run(lambda *_: None, ["replicate-2"], ranks="2", emulate=True, setting=setting)

    alone, both = report.rows
    assert alone["moved_mb"] < 0.01
    assert both["loss"] == pytest.approx(alone["loss"], abs=5e-6)
    shape = LlamaShape.from_config(row_config(setting, ScalingRow("", 1)).model)
    numel = sum(math.prod(shape) for shape in parameter_shapes(shape).values())
    # An all-reduce moves 2 (N - 1) / N of the gradients; besides it go norms, losses, headers.
    assert 4e-6 * numel < both["moved_mb"] < 1.25 * 4e-6 * numel
    assert 0 < both["efficiency"] < 1.1
