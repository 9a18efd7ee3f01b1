"""TensorBoard's event files, read back as TensorBoard reads them."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco.telemetry.events import FragmentMerged, InnerStepDone, SyncerRestarted
from diloco.telemetry.tensorboard import TensorBoardSink

LOSS = "loss_metrics/global_avg_loss"


def train(directory: Path, steps: range, *, loss: float) -> None:
    sink = TensorBoardSink(directory)
    sink.open()
    sink.add_context({"timeline": 0, "incarnation": 1})
    sink.write(SyncerRestarted(2, 0))
    for inner_step in steps:
        sink.write(InnerStepDone(inner_step, loss, 0.5, 1e-3, 64, 0.25, 40.0, 0.5))
    sink.write(FragmentMerged(steps[-1], 2, 1, "included", 1, 0.5, "d", ("a", "b"), False))
    sink.close()


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        files = EventAccumulator(str(directory))
        files.Reload()
    return [(scalar.step, scalar.value) for scalar in files.Scalars(tag)]


def test_scalars_stand_at_their_inner_step(tmp_path: Path) -> None:
    train(tmp_path, range(1, 4), loss=2.0)

    assert scalars(tmp_path, LOSS) == [(1, 2.0), (2, 2.0), (3, 2.0)]
    assert scalars(tmp_path, "throughput(tps)")[0] == (1, 256.0)
    assert scalars(tmp_path, "tflops")[0] == (1, 40.0)
    assert scalars(tmp_path, "mfu(%)")[0] == (1, 50.0)
    assert scalars(tmp_path, "lr")[0] == (1, pytest.approx(1e-3))  # stored in float32
    assert scalars(tmp_path, "outer_step/fragment-2") == [(3, 1.0)]
    assert scalars(tmp_path, "n_tokens_seen")[2] == (3, 192.0)


def test_a_start_that_goes_on_earlier_hides_what_it_makes_again(tmp_path: Path) -> None:
    train(tmp_path, range(1, 7), loss=2.0)
    train(tmp_path, range(4, 9), loss=1.0)

    expected = [(step, 2.0) for step in range(1, 4)] + [(step, 1.0) for step in range(4, 9)]
    assert scalars(tmp_path, LOSS) == expected


def test_missing_package_is_an_error_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)

    with pytest.raises(ConfigError, match=r"pip install 'diloco\[tensorboard\]'") as missing:
        TensorBoardSink(tmp_path).open()

    assert "telemetry.tensorboard = true needs the package tensorboard" in str(missing.value)
