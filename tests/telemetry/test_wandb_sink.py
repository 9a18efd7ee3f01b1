"""Weights & Biases for real, offline: the files that `wandb sync` would send."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco.telemetry.events import BytesMoved, InnerStepDone
from diloco.telemetry.sinks import BackgroundSink
from diloco.telemetry.wandb import WandbRun, WandbSink
from tests.telemetry.wandb_files import offline_files, read_wandb


def wandb_run(directory: Path, *, mode: str = "offline") -> WandbRun:
    return WandbRun(
        mode=mode,
        project="lab",
        group="demo",
        name="eu-west",
        run_id="eu-west-1f",
        directory=directory,
        config={"run": {"name": "demo", "seed": 7}},
    )


def train(directory: Path, *, first: int, incarnation: int) -> None:
    sink = BackgroundSink("wandb", WandbSink(wandb_run(directory)))
    sink.open()
    sink.add_context({"timeline": 0, "incarnation": incarnation})
    for inner_step in range(first, first + 3):
        sink.write(InnerStepDone(inner_step, 2.0 / inner_step, 0.5, 1e-3, 64, 0.25))
    sink.write(BytesMoved(first + 2, 70, 80))
    sink.close()
    assert sink.losses.num_lost == 0


def test_starts_of_one_island_go_on_in_one_run_of_the_group(tmp_path: Path) -> None:
    train(tmp_path, first=1, incarnation=1)
    train(tmp_path, first=3, incarnation=2)

    files = [read_wandb(path) for path in offline_files(tmp_path)]
    assert len(files) == 2
    for told in files:
        assert told.is_ended
        assert told.run == {
            "id": "eu-west-1f",
            "group": "demo",
            "name": "eu-west",
            "project": "lab",
        }
        assert told.metrics["*"] == "inner_step"
    assert [told.settings["incarnation"] for told in files] == [1, 2]
    assert files[0].settings["run"] == {"name": "demo", "seed": 7}
    rows = [row for told in files for row in told.rows]
    assert [(row["inner_step"], row["n_tokens_seen"]) for row in rows] == [
        (1, 64), (2, 128), (3, 192), (3, 192), (3, 192), (4, 256), (5, 320), (5, 320),
    ]  # fmt: skip
    assert [row["loss_metrics/global_avg_loss"] for row in rows[:3]] == [2.0, 1.0, 2.0 / 3]
    assert rows[3]["outer/uplink_bytes"] == 70


def test_missing_package_is_an_error_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)

    with pytest.raises(ConfigError, match=r"telemetry.wandb.mode = \"offline\".*pip install") as no:
        WandbSink(wandb_run(tmp_path)).open()

    assert "wandb" in str(no.value)


def test_online_without_a_login_names_both_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)

    with pytest.raises(ConfigError, match="wandb login") as refused:
        WandbSink(wandb_run(tmp_path, mode="online")).open()

    assert 'telemetry.wandb.mode = "offline"' in str(refused.value)


def test_another_run_of_the_process_goes_on(tmp_path: Path) -> None:
    import wandb

    settings = wandb.Settings(silent=True, console="off")
    own = wandb.init(mode="offline", project="own", id="own", dir=str(tmp_path), settings=settings)

    train(tmp_path, first=1, incarnation=1)
    own.log({"loss": 1.5})
    is_active = wandb.run is own
    own.finish()
    wandb.teardown()

    assert is_active
    told = {file.run["id"]: file for file in map(read_wandb, offline_files(tmp_path))}
    assert [row["loss"] for row in told["own"].rows if "loss" in row] == [1.5]
    assert [row["inner_step"] for row in told["eu-west-1f"].rows] == [1, 2, 3, 3]
