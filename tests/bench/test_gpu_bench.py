"""The bench of a device, on a CPU: every row but the device itself."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from diloco.bench.outer_loop import overhead
from diloco.bench.outer_loop.overhead import OverheadSetting
from diloco.bench.training import gpu
from diloco.bench.training.gpu import (
    ROWS,
    SETTING,
    BlockedSetting,
    Figure,
    GpuSetting,
    IslandsSetting,
    fitting_layers,
    islands_config,
    run,
)
from diloco.bench.training.gpu_island import measure_steps
from diloco.bench.training.plain import PlainRow, config_of, figures
from diloco.errors import ConfigError

_TINY = {"preset": "tiny"}
_SMALL = {"dim": 32, "num_layers": 3, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 96}
SMALL = GpuSetting(
    device="cpu",
    backend="",
    step=PlainRow("tiny", 128, 32, 2),
    step_cycles=3,
    blocks=OverheadSetting(num_cycles=2, block_steps=7, model=_TINY),
    blocked=BlockedSetting(_TINY, rounds=4, step_s=0.01),
    codec_numel=1 << 16,
    saved_model=_SMALL,
    repetitions=2,
    islands=IslandsSetting(_TINY, 20, 5, 2, 2, 0.6, 32, 4, 4),
)


def ignore(what: str, done: int, total: int) -> None:
    """Watch nothing."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_bench_says_what_to_type() -> None:
    with pytest.raises(ConfigError, match=r"needs a CUDA device.*nvidia-smi.*diloco bench device"):
        run(ignore)


def test_a_row_that_fails_is_missed_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measured(setting: GpuSetting, look: object) -> list[Figure]:
        return [Figure("idle", "x", [1.0, 1.2, 1.1], "x", 1.2), Figure("flight", "y", [3.0], "x")]

    def failing(setting: GpuSetting, look: object) -> list[Figure]:
        raise RuntimeError("out of\nmemory")

    rows = {("step",): failing, ("idle", "flight"): measured}
    monkeypatch.setattr(gpu, "_MEASURED", rows)

    report = run(ignore, ["step", "idle"], setting=SMALL)

    assert [(row["row"], row["median"]) for row in report.rows] == [
        ("step", 1.0),
        ("idle", 1.1),
    ]
    (missed,) = report.missed
    assert missed.what == "step: failed, RuntimeError: out of memory"


def test_a_checkpoint_has_as_many_layers_as_find_room() -> None:
    layer, rest = 4 * 32 * 32 + 3 * 32 * 96 + 2 * 32, 2 * 256 * 32 + 32
    two_layers = 12 * (2 * layer + rest)

    assert fitting_layers(_SMALL, {"device": math.inf, "disk": 1e9}) == (3, "")
    assert fitting_layers(_SMALL, {"device": math.inf, "disk": two_layers}) == (2, "disk")
    assert fitting_layers(_SMALL, {"device": 0.0, "disk": 1e9}) == (1, "device")


def test_runs_of_the_setting_are_valid_and_of_the_sizes_that_are_told() -> None:
    island = {"device": "cuda", "precision": "bfloat16", "compile": True}

    assert config_of(SETTING.step, SETTING.step_cycles, island).island.device == "cuda"
    assert overhead.config_of(SETTING.blocks, "unused", island).run.inner_steps == 540
    for name, num_islands in (("two-islands", 2), ("data-parallel", 1)):
        config = islands_config(SETTING, name, Path("unused"))
        tokens = sum(each.tokens_per_inner_step for each in config.islands.values())
        assert (len(config.islands), tokens) == (num_islands, 2 * 32 * 512)
    assert fitting_layers(SETTING.saved_model, {"device": 8.03e9}) == (13, "")
    assert fitting_layers(SETTING.saved_model, {"device": 8.02e9}) == (12, "device")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of the compiler
def test_both_loops_train_the_same_model_alike_in_bfloat16_with_compiled_blocks() -> None:
    compiled = {"precision": "bfloat16", "compile": True, "compile_backend": "aot_eager"}
    config = config_of(SMALL.step, 2, {"device": "cpu", **compiled})

    measured = measure_steps(config, "cpu", block_steps=SMALL.step.block_steps, num_cycles=2)

    # 8 bits of mantissa, of mean losses of ln 256 = 5.5 nats that are computed in float32.
    assert figures(SMALL.step, measured)["difference"] <= 0.002
    assert measured.cycles[0].native.losses[0] != measured.cycles[0].native.losses[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_row_is_measured_where_there_is_no_device() -> None:
    report = run(ignore, setting=SMALL)

    told = json.loads(json.dumps(report.as_dict()))
    assert list(dict.fromkeys(row["row"] for row in told["rows"])) == list(ROWS)
    assert all("failed" not in row["figure"] for row in told["rows"]), told["rows"]
    by_row = {bar["what"].partition(":")[0]: bar for bar in told["required"]}
    assert set(by_row) == set(ROWS)
    assert all(math.isfinite(bar["figure"]) for bar in told["required"])
    assert by_row["islands"]["is_met"]
