"""Which sinks a rank gets, and where they write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.island.record import build_sinks
from diloco.telemetry.events import DigestMismatch
from diloco.telemetry.sinks import BackgroundSink, FanOut, JsonlSink
from tests.run_files import write_run


def configured(tmp_path: Path, *overrides: str) -> Config:
    run_file = write_run(tmp_path, {"east": "dp_shard = 2", "west": ""})
    return load_config(run_file, overrides, island="east")


def kinds(sink: object) -> list[type]:
    assert isinstance(sink, FanOut)
    return [type(each) for each in sink.sinks]


@pytest.mark.parametrize(
    ("overrides", "island_rank", "expected"),
    [
        ((), 0, [JsonlSink]),
        (("telemetry.tensorboard=true",), 0, [JsonlSink, BackgroundSink]),
        (("telemetry.wandb.mode=offline",), 0, [JsonlSink, BackgroundSink]),
        (
            ("telemetry.tensorboard=true", "telemetry.wandb.mode=online"),
            0,
            [JsonlSink, BackgroundSink, BackgroundSink],
        ),
        (("telemetry.tensorboard=true", "telemetry.wandb.mode=offline"), 1, [JsonlSink]),
    ],
    ids=["neither", "tensorboard", "wandb", "both", "not-the-leader"],
)
def test_only_the_leader_has_what_the_site_asks_for(
    tmp_path: Path, overrides: tuple[str, ...], island_rank: int, expected: list[type]
) -> None:
    assert kinds(build_sinks(configured(tmp_path, *overrides), island_rank, tmp_path)) == expected


def test_lines_say_run_island_and_rank(tmp_path: Path) -> None:
    sink = build_sinks(configured(tmp_path), 1, tmp_path)

    sink.open()
    sink.write(DigestMismatch(0, 1, 2))
    sink.close()

    (line,) = (tmp_path / "events-east-1.jsonl").read_text().splitlines()
    written = json.loads(line)
    assert (written["run"], written["island"], written["island_rank"]) == ("test", "east", 1)


def test_wandb_run_is_the_same_for_all_starts_in_a_directory_and_for_no_other(
    tmp_path: Path,
) -> None:
    config = configured(tmp_path, "telemetry.wandb.mode=offline")
    here, there = tmp_path / "here", tmp_path / "there"

    def run_id(directory: Path) -> str:
        directory.mkdir(exist_ok=True)
        build_sinks(config, 0, directory)
        return str(json.loads((directory / "wandb-east.json").read_text()))

    first, second, elsewhere = run_id(here), run_id(here), run_id(there)
    assert first == second != elsewhere
    assert first.startswith("east-")
