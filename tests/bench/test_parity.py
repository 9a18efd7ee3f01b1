"""The parity bench on a model of two layers and a dozen steps: what it compares."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.bench.training.parity import (
    DATA_PARALLEL,
    SETTING,
    Comparison,
    Setting,
    chosen_rows,
    num_steps,
    run_parity,
)
from diloco.bench.training.parity_row import Row, Task, train_row, write_start
from diloco.errors import ConfigError

TASK = Task(
    inner_steps=12,
    warm_start_step=6,
    sequences=4,
    sequence_length=16,
    evaluation_sequences=8,
    warmup_steps=2,
    model={"dim": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 64},
)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def outer(codec: str = "float32", **changes: Any) -> Mapping[str, Any]:
    codecs = {"uplink_codec": codec, "downlink_codec": codec}
    return {"preset": "classic", "inner_steps_per_round": 3, **codecs, **changes}


@pytest.mark.parametrize(
    ("row", "base", "percent"),
    [
        ("m2-h30-float32", DATA_PARALLEL, 1.0),
        ("m2-h30-int4", DATA_PARALLEL, 1.0),
        ("m4-h10-float32", DATA_PARALLEL, 2.0),
        ("m4-h10-int4", DATA_PARALLEL, 2.0),
        ("m4-h30-float32", DATA_PARALLEL, 2.5),
        ("m4-h30-int4", DATA_PARALLEL, 2.5),
        ("m4-h100-float32", DATA_PARALLEL, 7.0),
        ("m4-h100-int4", DATA_PARALLEL, 7.0),
        ("m4-h30-streaming-float32", DATA_PARALLEL, 2.5),
        ("m4-h30-streaming-int4", DATA_PARALLEL, 2.5),
        *(
            (f"{name}-int4", f"{name}-float32", 0.2)
            for name in ("m2-h30", "m4-h10", "m4-h30", "m4-h100", "m4-h30-streaming")
        ),
        ("scratch-m4-h30-ramp", "scratch-m4-h30", -4.0),
    ],
)
def test_every_bar_of_the_bench_is_judged(row: str, base: str, percent: float) -> None:
    assert Comparison(row, base, percent) in SETTING.comparisons
    assert {row, base} <= {row.name for row in SETTING.rows}


def test_rows_are_chosen_by_pattern_and_always_held_against_data_parallel() -> None:
    names = [row.name for row in chosen_rows(SETTING, ["m4-h30-*", "scratch-m4-h30"])]

    assert names == [
        DATA_PARALLEL,
        "m4-h30-float32",
        "m4-h30-int4",
        "m4-h30-streaming-float32",
        "m4-h30-streaming-int4",
        "scratch-m4-h30",
    ]
    assert chosen_rows(SETTING, []) == SETTING.rows
    with pytest.raises(ConfigError, match="--rows m8-\\* matches no row; rows are data-parallel, "):
        chosen_rows(SETTING, ["m8-*"])


def test_data_parallel_goes_on_from_the_written_start_bit_for_bit(tmp_path: Path) -> None:
    start = tmp_path / "start.safetensors"
    write_start(TASK, 1, start)

    resumed = train_row(TASK, Row("warm", 1, None, is_warm=True), 1, start)
    whole = train_row(TASK, Row("whole", 1, None, is_warm=False), 1, tmp_path / "unused")

    assert resumed.loss == whole.loss


def test_one_island_with_a_plain_outer_step_is_data_parallel(tmp_path: Path) -> None:
    plain = outer(optimizer={"name": "sgd", "lr": 1.0, "momentum": 0.0})

    alone = train_row(TASK, Row("alone", 1, plain, is_warm=False), 1, tmp_path)
    whole = train_row(TASK, Row("whole", 1, None, is_warm=False), 1, tmp_path)

    # Each of four merges gives anchor - (anchor - local), rounded twice: a few 2^-24 of 5.5 nats.
    assert alone.loss == pytest.approx(whole.loss, abs=1e-5)


@pytest.mark.slow
def test_the_bench_trains_its_rows_in_processes_and_pairs_seeds(tmp_path: Path) -> None:
    rows = (
        Row(DATA_PARALLEL, 1, None, is_warm=True),
        Row("m2-float32", 2, outer(), is_warm=True),
        Row("m2-int4", 2, outer("int4", num_fragments=2, preset="streaming"), is_warm=True),
        Row("scratch", 4, outer(), is_warm=False),
    )
    setting = Setting(
        TASK,
        rows,
        (
            Comparison("m2-int4", "m2-float32", 1000.0),
            Comparison("scratch", DATA_PARALLEL, -1000.0),
            Comparison("scratch", "not-trained", 0.0),
        ),
    )
    progress: list[int] = []

    report = run_parity(setting, rows, seeds=(1, 2), num_processes=2, on_progress=progress.append)

    told = json.loads(json.dumps(report.as_dict()))
    by_name = {row["row"]: row for row in told["rows"]}
    assert list(by_name) == [row.name for row in rows]
    assert by_name[DATA_PARALLEL]["over_data_parallel_percent"] == 0.0
    assert by_name["m2-float32"]["over_float32_percent"] is None
    losses = {name: row["losses"] for name, row in by_name.items()}
    assert all(list(seeds) == ["1", "2"] for seeds in losses.values())
    pairs = [100 * (losses["m2-int4"][s] / losses["m2-float32"][s] - 1) for s in ("1", "2")]
    assert by_name["m2-int4"]["over_float32_percent"] == pytest.approx(sum(pairs) / 2)
    assert [bar["is_met"] for bar in told["required"]] == [True, False]
    assert told["setting"]["seeds"] == [1, 2]
    # 2 seeds x (6 steps to the start, 3 warm rows of 6, 1 row of 12)
    assert num_steps(setting, rows, 2) == 72 == progress[-1]
    # Figures do not depend on the processes that trained them.
    start = tmp_path / "start.safetensors"
    write_start(TASK, 2, start)
    assert train_row(TASK, rows[2], 2, start).loss == losses["m2-int4"]["2"]
