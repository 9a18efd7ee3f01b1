"""Checkpoints that are copied to another file system, and taken from there."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from diloco.checkpoint.checkpoints import MANIFEST, Checkpoint, step_directory, valid_steps
from diloco.checkpoint.island_checkpoints import IslandCheckpoints
from diloco.checkpoint.mirror import Mirror, Mirroring
from diloco.config.load import load_config
from diloco.errors import ConfigError
from diloco.telemetry.events import CheckpointMirrored, CheckpointMirrorFailed, Event
from diloco.trainer.state import optimizer_step
from tests.checkpoint.small_checkpoint import ISLAND, Trained
from tests.launch.stored_run import tiny_run
from tests.served_run import ServedRun
from tests.waiting import wait_until


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield "memory://bucket/run" if request.param == "memory" else f"file://{tmp_path}/far"
    fsspec.filesystem("memory").store.clear()


def write(directory: Path, *steps: int) -> Trained:
    trained = Trained()
    for step in steps:
        trained.write(directory, step)
    return trained


def test_what_was_copied_comes_back_to_the_bit_and_only_what_is_kept_stays(
    tmp_path: Path, url: str
) -> None:
    trained, mirror = write(tmp_path / "here", 5, 10, 15), Mirror(url, ISLAND)
    mirror.probe()
    assert mirror.steps() == []

    copied = [mirror.put(step_directory(tmp_path / "here", ISLAND, s)) for s in (5, 10, 15)]

    assert mirror.steps() == [5, 10, 15]
    assert mirror.put(step_directory(tmp_path / "here", ISLAND, 10)) == 0 < copied[1]
    mirror.keep([5], newest=10)
    assert mirror.steps() == [5, 15], "15 is of another history"
    mirror.abandon_later(5, timeline=1)
    assert mirror.steps() == [5]
    step_directory(tmp_path / "there", ISLAND, 5).mkdir(parents=True)  # torn
    mirror.fetch(5, tmp_path / "there", ISLAND)
    assert valid_steps(tmp_path / "there", ISLAND) == [5]
    assert trained.holds(Checkpoint.open(tmp_path / "there", ISLAND, 5).read("model", "0.weight"))
    with pytest.raises(ConfigError, match="checkpoint 15 of island east cannot be taken from"):
        mirror.fetch(15, tmp_path / "there", ISLAND)


def test_a_torn_manifest_there_is_said_takes_nothing_here_and_is_abandoned(
    tmp_path: Path, url: str
) -> None:
    write(tmp_path / "here", 5, 10)
    mirror = Mirror(url, ISLAND)
    mirror.put(step_directory(tmp_path / "here", ISLAND, 10))
    mirror._fs.pipe_file(f"{dict(mirror._directories())[10]}/{MANIFEST}", b'{"for')

    with pytest.raises(ConfigError, match="is damaged: Unterminated string"):
        mirror.fetch(10, tmp_path / "here", ISLAND)

    assert valid_steps(tmp_path / "here", ISLAND) == [5, 10]
    if url.startswith("file:"):
        pipe = Path(f"{dict(mirror._directories())[10]}/{MANIFEST}")
        pipe.unlink()
        os.mkfifo(pipe)
        with pytest.raises(ConfigError, match="is damaged"):
            mirror.check(10)
        pipe.unlink()
    newer = json.dumps({"format": 99, "timeline": 1}).encode()
    mirror._fs.pipe_file(f"{dict(mirror._directories())[10]}/{MANIFEST}", newer)
    mirror.abandon_later(5, timeline=1)
    assert 10 in mirror.steps(), "of this timeline, by another version of diloco"
    mirror.abandon_later(5, timeline=2)
    assert 10 not in mirror.steps()


def test_a_copy_that_ends_in_the_middle_is_none_and_the_one_before_stays(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 5, 10)
    mirror = Mirror(url, ISLAND)
    mirror.put(step_directory(tmp_path, ISLAND, 5))
    fs = mirror._fs
    real = fs.put_file

    def cut_off(source: str, target: str, *arguments: Any, **options: Any) -> None:
        if target.endswith("plan.json"):
            raise OSError("connection reset")
        real(source, target, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(fs, "put_file", cut_off)
        with pytest.raises(OSError, match="connection reset"):
            mirror.put(step_directory(tmp_path, ISLAND, 10))
        assert mirror.steps() == [5]

    mirror.put(step_directory(tmp_path, ISLAND, 10))

    assert mirror.steps() == [5, 10]


def test_the_newest_is_copied_next_and_what_was_left_out_or_failed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.checkpoint.mirror._PAUSES_S", (0.0, 0.0))
    write(tmp_path / "here", 1, 2, 3)
    mirror, told, go_on = Mirror(f"file://{tmp_path}/far", ISLAND), list[Event](), threading.Event()
    mirroring = Mirroring(mirror, tmp_path / "here", ISLAND, on_event=told.append)
    real, attempts = mirror.put, list[str]()

    def slow(path: Path) -> int:
        attempts.append(path.name[-1])
        assert go_on.wait(60)
        if attempts == ["1", "3"]:
            raise OSError("connection reset")  # once
        return real(path)

    monkeypatch.setattr(mirror, "put", slow)
    mirroring.add(1, 1, [1])
    wait_until(lambda: attempts)
    mirroring.add(2, 2, [1, 2])
    assert mirroring.in_use == (1, 2)
    mirroring.add(3, 3, [1, 3])
    go_on.set()
    mirroring.close(60)

    assert (attempts, mirror.steps()) == (["1", "3", "3"], [1, 3])
    (left_out,) = (event for event in told if isinstance(event, CheckpointMirrorFailed))
    assert left_out.checkpoint == 2 and "still being copied" in left_out.reason
    assert [e.checkpoint for e in told if isinstance(e, CheckpointMirrored)] == [1, 3]
    shutil.rmtree(step_directory(tmp_path / "here", ISLAND, 2))
    mirroring.add(2, 2, [])
    mirroring.close(60)
    assert isinstance(told[-1], CheckpointMirrorFailed) and "was not completed" in told[-1].reason


def test_an_island_takes_from_its_mirror_what_is_not_on_disk(tmp_path: Path, url: str) -> None:
    write(tmp_path / "here", 2, 4)
    mirror = Mirror(url, ISLAND)
    for step in (2, 4):
        mirror.put(step_directory(tmp_path / "here", ISLAND, step))
    trained = Trained(seed=2, num_steps=0)
    config = SimpleNamespace(
        checkpoint_dir=tmp_path / "new",
        island_id=ISLAND,
        run=SimpleNamespace(name="tiny"),
        outer=SimpleNamespace(is_on_arrival=False),
    )
    site: Any = SimpleNamespace(config=config, report_checkpoints=lambda steps: None)
    joined: Any = SimpleNamespace(plan=trained.plan(), versions=[1], resume_step=None, start_step=4)
    batches: Any = SimpleNamespace(seek=lambda step: None)
    trainer: Any = trained
    checkpoints = IslandCheckpoints(
        site, joined, trainer, batches, memory=None, mirror=mirror, on_event=lambda event: None
    )

    checkpoints.take_up(None)
    resumed = checkpoints._open_or_fetch(2)

    assert optimizer_step(trained.optimizer) == 2, "a return takes the newest"
    assert resumed.step == 2
    assert valid_steps(tmp_path / "new", ISLAND) == [2, 4]
    (manifest,) = (tmp_path / "new").glob(f"*/*4/{MANIFEST}")
    manifest.unlink()
    shutil.rmtree(step_directory(tmp_path / "here", ISLAND, 4))
    mirror.keep([2], newest=4)
    with pytest.raises(ConfigError, match=r"step 4: .* cannot be taken from checkpoint\.mirror"):
        checkpoints._open_or_fetch(4)


def test_mirrors_that_cannot_be_are_refused_before_anything_starts(tmp_path: Path) -> None:
    run_file = tiny_run(tmp_path)
    (tmp_path / "a-file").write_text("in the way")

    for value, told in [
        ("nope://x", r"fsspec knows no nope://: install .* s3:// \(pip install s3fs\)"),
        ("/mnt/x", "must be a URL: for a directory file:///PATH"),
    ]:
        with pytest.raises(ConfigError, match=told):
            load_config(run_file, [f"checkpoint.mirror={value}"])
    if importlib.util.find_spec("s3fs") is None:
        with pytest.raises(ConfigError, match=r"needs a package that is not here: Install s3fs"):
            Mirror("s3://bucket/x", ISLAND)
    with pytest.raises(ConfigError, match="nothing can be written in"):
        Mirror(f"file://{tmp_path}/a-file", ISLAND).probe()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_is_resumed_from_the_mirror_when_the_islands_disk_is_lost(tmp_path: Path) -> None:
    def train(served: ServedRun, name: str) -> list[dict[str, Any]]:
        arguments = ["--config", str(served.run_file), "--island", "east"]
        arguments += ["--coordinator", served.address, "--output", str(tmp_path / name)]
        ended = subprocess.run(
            [sys.executable, "-m", "diloco.launch.rank", *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"},
            check=False,
            timeout=250,
        )
        assert ended.returncode == 0
        text = (tmp_path / name / "events-east-0.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    with ServedRun(tmp_path, {"east": ""}, inner_steps=40) as served:
        with served.run_file.open("a") as file:
            file.write(f'\n[checkpoint]\nmirror = "file://{tmp_path}/far"\n')
        served.hold()
        first = train(served, "first")
        (stop_step,) = valid_steps(tmp_path / "state" / "checkpoints", "east")
        shutil.rmtree(tmp_path / "state" / "checkpoints")
        served.resume(stop_step)
        second = train(served, "second")

    (mirrored,) = (event for event in first if event["kind"] == "checkpoint_mirrored")
    assert mirrored["checkpoint"] == stop_step
    steps = [event["inner_step"] for event in second if event["kind"] == "inner_step"]
    assert (steps[0], steps[-1]) == (stop_step + 1, 40)
