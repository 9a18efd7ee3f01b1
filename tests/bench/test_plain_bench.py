"""The bench against plain PyTorch: its figures, its bars, and a tiny model trained in both ways."""

import pytest

from diloco.bench.training import plain as bench
from diloco.bench.training.plain import (
    SETTING,
    LoopBlock,
    LoopCycle,
    MeasuredLoops,
    PlainRow,
    PlainSetting,
    config_of,
    figures,
    measure,
    run,
)
from diloco.errors import ConfigError

TINY = PlainRow("tiny", 128, 32, 2)


def measured(native_s, plain_s, loss=5.0):
    warming = LoopCycle(LoopBlock(9.0, 9.0, (5.0, 4.0)), LoopBlock(1.0, 1.0, (loss, 4.0)))
    timed = [
        LoopCycle(LoopBlock(ours, 2 * ours, (1.0,)), LoopBlock(theirs, ours, (2.0,)))
        for ours, theirs in zip(native_s, plain_s, strict=True)
    ]
    return MeasuredLoops(1000, (warming, *timed))


def test_a_ratio_is_of_the_two_blocks_of_a_cycle_and_the_first_one_only_warms_up():
    # The machine slows down by half on the way; the ratio does not feel it.
    told = figures(TINY, measured([1.0, 1.0, 2.0], [0.99, 1.0, 1.96], loss=5.25))

    assert told["ratio"] == pytest.approx(0.99)
    assert (told["low"], told["high"]) == (pytest.approx(0.98), pytest.approx(1.0))
    assert told["native"] == pytest.approx(256.0)
    assert told["cpu_ratio"] == pytest.approx(0.5)
    assert told["difference"] == pytest.approx(0.25), "losses are of the first block"


@pytest.mark.parametrize(
    ("native_s", "loss", "missed"),
    [(1.0, 5.0, 0), (1.03, 5.0, 1), (1.0, 5.001, 1)],
    ids=["as-fast", "slower", "another-loss"],
)
def test_speed_and_losses_have_bars(monkeypatch, native_s, loss, missed):
    answer = measured([native_s] * 3, [1.0] * 3, loss)
    monkeypatch.setattr(bench, "_measure", lambda *_: answer)

    report = run(lambda *_: None, setting=PlainSetting((TINY,)))

    assert len(report.requirements) == 2
    assert len(report.missed) == missed


def test_an_unknown_model_is_refused():
    with pytest.raises(ConfigError, match="--rows 9T matches no row; rows are debug, 10M"):
        run(lambda *_: None, ["9T"], setting=SETTING)


def check_agreement(row):
    assert row["cycles"] == 2 and 0 < row["low"] <= row["ratio"] <= row["high"]
    # Float32 sums in another order, twice: far below what another model would give.
    assert row["difference"] <= 1e-5


def test_both_loops_train_the_same_model_alike():
    measured = measure(config_of(TINY, 3), block_steps=TINY.block_steps, num_cycles=3)

    check_agreement(figures(TINY, measured))


@pytest.mark.slow
@pytest.mark.timeout(120)  # a process that imports torch
def test_a_process_of_its_own_measures():
    setting = PlainSetting((TINY,), num_cycles=3)

    report = run(lambda *_: None, setting=setting)

    check_agreement(report.rows[0])
