"""Room on disk: what a run writes, and the refusal of one that cannot fit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from diloco.compression.registry import get_codec
from diloco.config.load import load_config
from diloco.config.outer import OWN_CODECS
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.forecast.disk import (
    PAYLOAD_BYTES,
    check_room,
    forecast_disk,
)
from diloco.state_dir import StateDir
from tests.run_files import write_run

MILLION = 1_000_000


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(write_run(tmp_path, {"east": "", "west": ""}), ["checkpoint.keep=2"])


def leave_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, num_bytes))


def test_checkpoints_and_records_are_counted(config: Config) -> None:
    disk = forecast_disk(config, MILLION)

    # int4 on the wire is 0.515625 B a value. A checkpoint: 16 B and what is in flight.
    assert disk.checkpoint_bytes == 16_515_625
    assert disk.island_bytes == 4 * 16_515_625
    # A record: 12 B, two contributions, one publication. 4 + 1 retained, 2 + 2 pinned.
    assert disk.record_bytes == 12 * MILLION + 3 * 515_625
    assert disk.num_records == 9
    assert disk.store_bytes == 9 * disk.record_bytes


def test_error_feedback_doubles_the_residual(config: Config) -> None:
    outer = config.outer.model_copy(update={"error_feedback": True})

    disk = forecast_disk(config.model_copy(update={"outer": outer}), MILLION)

    assert disk.checkpoint_bytes == 24_515_625


def test_records_of_outer_adam_hold_one_more_vector(config: Config) -> None:
    adam = config.outer.optimizer.model_copy(update={"name": "adam"})
    outer = config.outer.model_copy(update={"optimizer": adam})

    disk = forecast_disk(config.model_copy(update={"outer": outer}), MILLION)

    assert disk.record_bytes == 16 * MILLION + 3 * 515_625


def test_a_log_keeps_two_whole_records_and_what_the_others_were_made_from(config: Config) -> None:
    outer = config.outer.model_copy(update={"snapshot_rounds": 8, "keep_contributions": "all"})

    disk = forecast_disk(config.model_copy(update={"outer": outer}), MILLION)

    assert disk.num_records == 2 + 4
    assert disk.frame_bytes == 3 * 515_625
    num_rounds = -(-config.run.inner_steps // outer.inner_steps_per_round)
    assert disk.num_frames == 4 + 2 * 8 + num_rounds + 1
    frames = disk.num_frames * disk.frame_bytes
    assert disk.store_bytes == disk.num_records * disk.record_bytes + frames


@pytest.mark.parametrize(
    ("every", "num_unsure", "num_pinned"),
    [
        (0, 1, 4),  # stops are as far apart as they like
        (1, 2 + 10, 3),  # 15 checkpoints within 15 inner steps, H = 8
        (3, 2 + 4, 5),
        (5, 2 + 2, 6),
        (100, 2 + 1, 6),
    ],
)
def test_checkpoints_that_may_become_complete_are_counted_as_islands_and_syncer_keep_them(
    config: Config, every: int, num_unsure: int, num_pinned: int
) -> None:
    outer = config.outer.model_copy(update={"inner_steps_per_round": 8, "overlap_steps": 2})
    checkpoint = config.checkpoint.model_copy(update={"every_inner_steps": every})
    config = config.model_copy(update={"outer": outer, "checkpoint": checkpoint})

    assert config.num_unsure_checkpoints == num_unsure
    disk = forecast_disk(config, MILLION)
    assert disk.num_checkpoints == 2 + num_unsure + 1
    assert disk.num_records == 4 + 1 + num_pinned


@pytest.mark.parametrize("key", ["coordinator.state_dir", "checkpoint.dir"])
@pytest.mark.parametrize("place", ["/proc/x", "FILE/x"])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, key: str, place: str) -> None:
    (tmp_path / "in-the-way").touch()
    path = place.replace("FILE", str(tmp_path / "in-the-way"))
    config = load_config(write_run(tmp_path, {"east": ""}), [f"{key}={path}"])

    with pytest.raises(ConfigError) as refusal:
        check_room(config, MILLION, islands=config.islands, is_new=True)

    text = str(refusal.value)
    assert text.startswith(f"{key} = {path}: nothing can be written in {Path(path).parent}: ")
    assert text.endswith(f"--set {key}=DIRECTORY")


@pytest.mark.parametrize("codec", OWN_CODECS)
def test_payload_of_a_codec_is_what_it_writes(codec: str) -> None:
    assert get_codec(codec).wire_bytes(128 * 1024) == PAYLOAD_BYTES[codec] * 128 * 1024


def test_a_run_that_fits_to_the_byte_begins(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = forecast_disk(config, MILLION)
    needed = disk.store_bytes + 2 * disk.island_bytes
    leave_free(monkeypatch, needed)

    check_room(config, MILLION, islands=config.islands, is_new=True)

    leave_free(monkeypatch, needed - 1)
    with pytest.raises(ConfigError) as refusal:
        check_room(config, MILLION, islands=config.islands, is_new=True)
    text = str(refusal.value)
    assert "writes up to 242.3 MiB more (1,000,000 parameters), and 242.3 MiB are free" in text
    assert "checkpoints of island west: 63 MiB in" in text
    assert "the syncer's store: 116.3 MiB in" in text
    assert "lower checkpoint.keep or outer.retained_versions" in text
    check_room(config, MILLION, islands=(), is_new=True)


@pytest.mark.parametrize("num_syncers", [1, 2])
def test_what_a_resumed_run_has_written_needs_no_more_room(
    config: Config, monkeypatch: pytest.MonkeyPatch, num_syncers: int
) -> None:
    coordinator = config.coordinator.model_copy(update={"num_syncers": num_syncers})
    config = config.model_copy(update={"coordinator": coordinator})
    for state in StateDir(Path(coordinator.state_dir)).of_syncers(config.own_syncers):
        state.store.mkdir(parents=True)
        (state.store / "record").write_bytes(bytes(1000 // num_syncers))
        (state.store / "pinned").hardlink_to(state.store / "record")
    leave_free(monkeypatch, forecast_disk(config, MILLION).store_bytes - 1000)

    check_room(config, MILLION, islands=(), is_new=False)

    with pytest.raises(ConfigError, match="Make room"):
        check_room(config, MILLION, islands=(), is_new=True)


def test_one_of_several_syncers_needs_room_for_its_own_part_on_its_own_disk(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = config.coordinator.model_copy(update={"num_syncers": 2})
    config = config.model_copy(update={"coordinator": coordinator})
    own, other = (
        s.store for s in StateDir(Path(coordinator.state_dir)).of_syncers(config.own_syncers)[::-1]
    )
    needed = forecast_disk(config, MILLION // 4).store_bytes
    asked: list[Path] = []

    def usage(path: Path) -> Usage:
        asked.append(path)
        return Usage(0, 0, free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    for each in (own, other):
        each.mkdir(parents=True)

    free = needed
    check_room(config, MILLION // 4, islands=(), is_new=True, own_store=own)
    free = needed - 1
    with pytest.raises(ConfigError, match=f"the syncer's store: .* in {own}"):
        check_room(config, MILLION // 4, islands=(), is_new=True, own_store=own)

    assert set(asked) == {own}
