"""Islands whose payloads travel by the run's object store, next to others that send them directly.

Real processes, a real S3 server. What is published is, bit for bit, what direct payloads come to.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.bench.network.s3_server import BUCKET, S3Server, s3_server
from diloco.checkpoint.published import read_published
from diloco.config.load import load_config
from diloco.objects.store import ObjectStore
from diloco.state_dir import StateDir
from tests.placed_run import ISLANDS, PlacedRun
from tests.run_files import write_run
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

STEPS = 60
#: Of two fragments, each in a lane of 1.2 MB.
LARGE = {"ffn_dim": 1024, "codec": "float32"}
BY_BUCKET = ("--set", "transport.payloads=bucket")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as server:
        yield server


def in_one_lane(run_file: Path) -> Path:
    run_file.write_text(run_file.read_text().replace("[outer]", "[outer]\nnum_lanes = 1"))
    return run_file


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """What the same run publishes without an object store."""
    directory = tmp_path_factory.mktemp("direct")
    run_file = in_one_lane(
        write_run(directory, dict.fromkeys(ISLANDS, ""), inner_steps=STEPS, **LARGE)
    )
    command = [sys.executable, "-m", "diloco", "local", str(run_file)]
    subprocess.run(command, check=True, capture_output=True)
    state = StateDir(Path(load_config(run_file).coordinator.state_dir))
    return [(each.version, each.digest) for each in read_published(state).fragments]


@pytest.fixture
def run(tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlacedRun]:
    for key, value in server.environment.items():
        monkeypatch.setenv(key, value)
    run = PlacedRun(tmp_path, server, STEPS, **LARGE)
    in_one_lane(run.run_file)
    with contextlib.ExitStack() as ending:
        ending.callback(run.end)
        yield run


@pytest.mark.slow  # with its two runs most of a minute
def test_a_lost_syncer_is_made_again_of_what_islands_wrote(
    run: PlacedRun, direct: list[tuple[int, str]]
) -> None:
    started = {"coordinator": run.start("control", "coordinator")}
    started |= {n: run.start(n, "syncer", "--name", n) for n in ("eu", "us")}
    started["east"] = run.start("east", "island", "--island", "east", *BY_BUCKET)
    started["west"] = run.start("west", "island", "--island", "west")
    wait_until(lambda: run.num_versions("us", "us") >= 4, what=run.said)
    run.signal("us", "us", signal.SIGKILL)
    shutil.rmtree(run.directory / "us")
    started["us"] = run.start("other", "syncer", "--name", "us")

    for name, process in started.items():
        assert process.wait(200) == 0, f"{name}\n{run.said()}"
    assert run.published() == direct
    store = ObjectStore(f"s3://{BUCKET}/{run.directory.name}")
    assert not store.names("payloads")
    # Records were made of what east wrote: those objects have a digest and a number in their names.
    data = [name.rpartition("/")[2] for name in store.names("syncer-us/data")]
    assert any(len(name.split("-")) == 4 for name in data)
    assert "X-Amz-Signature" not in run.said()


def test_a_run_without_a_bucket_refuses_an_island_that_needs_one(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, {"east": ""}, inner_steps=8)
    command = [sys.executable, "-m", "diloco", "local", str(run_file), *BY_BUCKET]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert ended.returncode != 0
    assert "the run has no object store that gives addresses. Leave it out" in (
        ended.stdout + ended.stderr
    ).replace("\n", " ")
