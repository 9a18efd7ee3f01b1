"""`diloco baseline` as a whole: what it refuses, how it ends, and what it leaves behind."""

import json
import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.baseline.local import BaselineOptions, check_baseline, run_baseline
from diloco.cli.main import app
from diloco.config.load import load_config
from diloco.errors import ConfigError, IslandFailed
from tests.run_files import write_run

ISLANDS = {"east": "", "west": ""}


@pytest.mark.parametrize(
    ("islands", "options", "said"),
    [
        (ISLANDS, BaselineOptions("ring"), "'ring' is unknown: choose flat, hierarchical, local-"),
        (ISLANDS, BaselineOptions("flat", average_every=4), "--every 4: flat sums gradients in ev"),
        (ISLANDS, BaselineOptions("post-local-sgd"), "--first 0 with post-local-sgd"),
        (ISLANDS, BaselineOptions("local-sgd", parallel_steps=2), "--first 2 with local-sgd"),
        (ISLANDS, BaselineOptions("post-local-sgd", parallel_steps=8), "give at most 7"),
        (ISLANDS, BaselineOptions("flat", hop="mpi"), "--hop mpi is unknown: choose transport, gl"),
        (ISLANDS, BaselineOptions("flat", hop="nccl"), "--hop nccl: the ring of flat goes through"),
        (ISLANDS, BaselineOptions("flat", hop="gloo"), "--hop gloo: the ring of flat goes through"),
        (ISLANDS, BaselineOptions("hierarchical", streams=4, hop="gloo"), "--streams 4: a process"),
        (
            {"east": "dp_shard = 2", "west": ""},
            BaselineOptions("hierarchical"),
            r"unequally many ranks \(east: 2, west: 1\).*give each 1 ranks.*or take flat",
        ),
        (
            {"east": "tp = 2", "west": ""},
            BaselineOptions("flat"),
            r"islands.east.mesh.tp = 2: .*give mesh = \{ dp_shard = 2 \}",
        ),
    ],
)
def test_what_a_baseline_cannot_be_is_refused_with_a_remedy(tmp_path, islands, options, said):
    config = load_config(write_run(tmp_path, islands), [])

    with pytest.raises(ConfigError, match=said):
        check_baseline(config, options)


@pytest.mark.parametrize("key", ["link", "certs"])
def test_what_a_process_group_would_silently_do_without_is_refused(tmp_path, key):
    config = load_config(write_run(tmp_path, ISLANDS), [])
    transport = config.transport.model_copy(update={key: "given"})

    with pytest.raises(ConfigError, match=f'--hop gloo: transport.{key} = "given"'):
        check_baseline(
            config.model_copy(update={"transport": transport}),
            BaselineOptions("hierarchical", hop="gloo"),
        )


def test_nccl_is_refused_where_not_every_rank_has_a_device(tmp_path):
    many = write_run(tmp_path / "many", {f"island-{n}": "" for n in range(64)})

    with pytest.raises(ConfigError, match=r"each of the 64 ranks, and this machine has .*gloo"):
        check_baseline(load_config(many), BaselineOptions("hierarchical", hop="nccl"))


@pytest.mark.parametrize(("hop", "device"), [("nccl", "cpu"), ("gloo", "cuda")])
def test_a_device_that_the_hop_is_not_for_is_refused(tmp_path, hop, device):
    run_file = write_run(tmp_path, ISLANDS)
    config = load_config(run_file, [f"islands.east.device={device}"])

    with pytest.raises(ConfigError, match=rf'--hop {hop}: islands\.east\.device = "{device}"'):
        check_baseline(config, BaselineOptions("hierarchical", hop=hop))


def test_another_transformers_than_the_run_file_names_is_refused(tmp_path):
    config = load_config(write_run(tmp_path, ISLANDS))
    model = config.model.model_copy(update={"transformers": "4.40.0"})

    with pytest.raises(ConfigError, match=r"pip install transformers==4\.40\.0"):
        check_baseline(config.model_copy(update={"model": model}), BaselineOptions("hierarchical"))


def test_a_batch_that_ranks_cannot_divide_is_refused_with_the_nearest(tmp_path):
    run_file = write_run(tmp_path, {"east": "dp_shard = 2", "west": "dp_shard = 2"})
    config = load_config(run_file, ["islands.east.micro_batches=2"])
    island = config.islands["east"].model_copy(update={"tokens_per_inner_step": 160})
    config = config.model_copy(update={"islands": {**config.islands, "east": island}})

    with pytest.raises(ConfigError, match=r"= 160: must be a multiple of .* = 128, such as 128"):
        check_baseline(config, BaselineOptions("flat"))


def test_a_directory_that_is_used_is_left_alone(tmp_path):
    run_file = write_run(tmp_path, ISLANDS)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "summary.json").write_text("{}")

    result = CliRunner().invoke(
        app, ["baseline", str(run_file), "--out", str(tmp_path / "used")], catch_exceptions=True
    )

    assert isinstance(result.exception, ConfigError)
    assert "is not empty: remove it, or give another --out" in str(result.exception)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_killed_member_ends_the_baseline_by_name(tmp_path):
    config = load_config(write_run(tmp_path, ISLANDS, inner_steps=100_000), [])
    directory = tmp_path / "baseline"
    pids = {}

    def kill_one_at_work():
        logs = [directory / f"{island}-0.log" for island in ISLANDS]
        if pids and all(log.exists() and "training begins" in log.read_text() for log in logs):
            (west,) = [pid for member, pid in pids.items() if member.island == "west"]
            os.kill(west, signal.SIGKILL)
            pids.clear()

    with pytest.raises(IslandFailed, match=r"rank 0 of island west \(pid \d+\) was ended by SIGK"):
        run_baseline(
            config,
            BaselineOptions("hierarchical", chunk_bytes=1 << 20),
            directory,
            on_look=kill_one_at_work,
            on_started=pids.update,
        )

    assert not (directory / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whole_baselines_agree_and_say_what_they_were(tmp_path):
    run_file = write_run(tmp_path, {"east": "dp_shard = 2", "west": "dp_shard = 2"})
    summaries = {}
    for name, options in {
        "flat": [],
        "hierarchical": [],
        "in-groups": ["--name", "hierarchical", "--hop", "gloo"],
        "local-sgd": ["--every", "3"],
        "post-local-sgd": ["--first", "7", "--every", "4"],
    }.items():
        out = tmp_path / name
        arguments = ["baseline", str(run_file), "--name", name, "--out", str(out), *options]
        result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
        assert result.exit_code == 0
        summaries[name] = json.loads(Path(out / "summary.json").read_text())
        assert json.loads(result.stdout) == summaries[name]

    flat, hierarchical = summaries["flat"], summaries["hierarchical"]
    in_groups = summaries["in-groups"]
    assert in_groups["digest"] == hierarchical["digest"]
    assert in_groups["islands"] == hierarchical["islands"]
    assert hierarchical["losses"] == pytest.approx(flat["losses"], abs=5e-6)
    assert flat["losses"][-1] < flat["losses"][0]
    # Data parallel until the last step, and then one local step of each, averaged.
    post = summaries["post-local-sgd"]
    assert post["losses"] == pytest.approx(flat["losses"], abs=5e-6)
    assert post["digest"] != flat["digest"]
    up = {name: summary["islands"]["east"]["bytes_up"] for name, summary in summaries.items()}
    assert flat["islands"]["east"]["bytes_up"] == pytest.approx(1.5 * up["hierarchical"], rel=0.01)
    assert up["local-sgd"] == pytest.approx(3 / 8 * up["hierarchical"])  # after 3, 6 and 8
