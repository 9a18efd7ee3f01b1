"""`diloco local` as a user types it: a whole run, its summary, and what is refused."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from diloco.checkpoint.run_checkpoints import membership_of, open_journal
from diloco.cli.main import app, main
from diloco.cli.run import local as local_command
from diloco.config.load import load_config, resolved_toml
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.forecast.build import build_publication_rules
from diloco.forecast.traffic import data_parallel_traffic
from diloco.launch.local import (
    check_no_events,
    check_place,
    find_resume_step,
    make_room,
    without_links,
)
from diloco.launch.process.ending import Interrupted, StopRequest
from diloco.outer.fragments import Plan
from diloco.state_dir import StateDir, hold, holder
from diloco.versions.store import FragmentStore
from tests.remaking import recompute
from tests.run_files import write_run
from tests.waiting import said_by, wait_until

pytestmark = pytest.mark.timeout(180)


def local(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diloco", "local", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def refused_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Type what is refused before any process starts, in this one: importing takes seconds."""
    command = ["diloco", "local", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", command),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        main()
    assert isinstance(end.value.code, int)
    return subprocess.CompletedProcess(command, end.value.code, out.getvalue(), err.getvalue())


@dataclass
class Story:
    """One run file's runs, in the order of their commands: what each said, and what they left."""

    run_file: Path
    stopped: subprocess.CompletedProcess[str]
    at_elsewhere: subprocess.CompletedProcess[str]
    resumed: subprocess.CompletedProcess[str]
    resumed_again: subprocess.CompletedProcess[str]
    summary: dict[str, Any]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    directory = tmp_path_factory.mktemp("story")
    run_file = write_run(directory, {"east": "", "west": ""}, inner_steps=200)
    config = load_config(run_file)

    process = started(run_file)
    try:
        wait_until(lambda: "fragment_merged" in read(config.telemetry_dir / "events-west-0.jsonl"))
        process.send_signal(signal.SIGINT)
        said = said_by(process, 90)[1]
    finally:
        process.kill()
    stopped = subprocess.CompletedProcess(process.args, process.returncode, "", said)
    wait_for_no_process(directory)
    at_elsewhere = refused_here(str(run_file), "--resume", "--at", "199")
    resumed = local(str(run_file), "--resume")
    assert resumed.returncode == 0, said + resumed.stdout + resumed.stderr
    resumed_again = refused_here(str(run_file), "--resume")
    summary = json.loads((directory / "state" / "summary.json").read_text())
    return Story(run_file, stopped, at_elsewhere, resumed, resumed_again, summary)


def test_a_stopped_run_says_how_to_go_on_and_does(story: Story) -> None:
    said = story.stopped.stderr
    assert story.stopped.returncode == 128 + signal.SIGINT, said
    found = re.search(r"stopped after inner step (\d+) of 200, every island with a check", said)
    assert found is not None, said
    step = int(found[1])
    assert f"Go on: diloco local {story.run_file} --resume" in said
    assert story.at_elsewhere.returncode == 2
    assert "--at 199" in story.at_elsewhere.stderr
    go_on = f"diloco local {story.run_file} --resume --at {step}"
    assert go_on in story.at_elsewhere.stderr
    assert f"complete checkpoints of inner steps {step}" in story.resumed.stdout
    assert f"Resumed after inner step {step};" in story.resumed.stdout
    assert "diloco coordinator" not in story.resumed.stdout
    assert story.summary["are_digests_equal"] and story.summary["are_versions_recomputed"]
    assert [i["tokens"] for i in story.summary["islands"]] == [200 * 128] * 2
    assert story.resumed_again.returncode == 2
    assert "has finished, there is nothing to resume" in story.resumed_again.stderr


def test_the_summary_of_a_run_can_be_checked(story: Story) -> None:
    summary, config = story.summary, load_config(story.run_file)
    state = StateDir(story.run_file.parent / "state")
    assert [i["island"] for i in summary["islands"]] == ["east", "west"]
    assert [f["version"] for f in summary["fragments"]] == [51, 50]
    plan = Plan.from_json(state.plan.read_text())
    traffic = data_parallel_traffic(plan, 200)
    named = {a["name"]: a["bytes_up"] for a in summary["alternatives"]}
    assert named["data parallel at every inner step"] == traffic.bytes_up
    assert traffic.bytes_up == 200 * 4 * sum(f.numel for f in plan.fragments)
    # The check is a check: with another outer learning rate the bytes are not the same.
    store = FragmentStore(state.store, plan.fragments[0], 4)
    rules = build_publication_rules(config)
    other = replace(rules, optimizer=replace(rules.optimizer, lr=0.6))
    before, record = store.load(49), store.load(50)
    assert recompute(before, record, rules, store.fragment) == record.lane_digests
    assert recompute(before, record, other, store.fragment) != record.lane_digests


@pytest.mark.slow  # after what reads the earlier run where it was
def test_a_fresh_run_moves_the_earlier_one_aside_and_ends_with_a_summary(story: Story) -> None:
    started_again = refused_here(str(story.run_file))
    fresh = local(
        str(story.run_file), "--fresh", "--islands", "1", "--set", "run.inner_steps=4", "--json"
    )

    assert started_again.returncode == 2
    refusal = started_again.stderr
    assert "--resume" in refusal and "--fresh" in refusal
    assert fresh.returncode == 0, fresh.stdout + fresh.stderr
    summary = json.loads(fresh.stdout)
    assert summary["are_digests_equal"] and summary["are_versions_recomputed"]
    assert [(i["island"], i["tokens"]) for i in summary["islands"]] == [("east", 4 * 128)]
    assert [f["version"] for f in summary["fragments"]] == [2, 1]
    state = story.run_file.parent / "state"
    assert json.loads((state / "summary.json").read_text()) == summary
    moved = state.with_name("state.1")
    assert json.loads((moved / "summary.json").read_text()) == story.summary


def test_dry_run_keeps_the_first_islands_and_takes_the_link_away(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path, {"b": "", "a": ""}), ['transport.link="thin-5M-60ms"'])

    kept = without_links(config, 1)

    assert list(kept.islands) == ["a"]
    assert kept.transport.link == ""
    with pytest.raises(ConfigError, match="--islands 3: the run file has 2 islands"):
        without_links(config, 3)


def test_an_earlier_run_is_moved_to_the_first_free_name(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (tmp_path / "state.1").mkdir()
    state.mkdir()
    (state / "secret").touch()

    check_place(state, fresh=True)
    assert make_room(state) == tmp_path / "state.2"
    check_place(state, fresh=False)
    assert make_room(state) is None


def test_a_start_that_never_trained_makes_room_by_itself(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.create()
    state.local.write_text("")  # interrupted before the coordinator had a journal
    check_place(state.root, fresh=False)
    assert make_room(state.root) == tmp_path / "state.1"
    state.create()
    state.resolved.write_text("")
    check_place(state.root, fresh=False)
    assert make_room(state.root) == tmp_path / "state.2"

    record = state.store / "fragment-0000" / "v000000000000.record"
    record.parent.mkdir(parents=True)
    record.write_bytes(b"")
    state.resolved.write_text("")
    with pytest.raises(ConfigError, match="already holds a run"):
        check_place(state.root, fresh=False)


def test_a_run_under_way_is_not_moved_aside(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.create()

    with (
        hold(state.coordinator_lock),
        pytest.raises(ConfigError, match=f"under way in .* process {os.getpid()}"),
    ):
        check_place(state.root, fresh=True)

    assert state.root.exists()


def test_events_of_another_run_are_not_mixed_in(tmp_path: Path) -> None:
    run_file = str(write_run(tmp_path, {"east": "", "west": ""}))
    below = load_config(run_file)
    events = [below.telemetry_dir / "events-east-0.jsonl", tmp_path / "out" / "events-east-0.jsonl"]
    for path in events:
        path.parent.mkdir(parents=True)
        path.touch()
    check_no_events(below)  # they go with the earlier run

    refused = CliRunner().invoke(
        app, ["local", run_file, "--fresh", "--set", f"telemetry.dir={tmp_path / 'out'}"]
    )

    assert isinstance(refused.exception, ConfigError)
    assert f"telemetry.dir = {tmp_path / 'out'} already holds the events" in str(refused.exception)
    assert all(path.exists() for path in events), "nothing was touched"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("outer.num_fragments=99999", "outer.num_fragments"),
        ("transport.link=nope", "transport.link"),
        ("coordinator.state_dir=/proc/nope", "coordinator.state_dir"),
        ("run.warm_start=./nope", "run.warm_start"),
        ("evaluation.num_sequences=1000000000", "evaluation.num_sequences"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_touched(
    tmp_path: Path, override: str, words: str
) -> None:
    run_file = write_run(tmp_path, {"east": "", "west": ""})

    refused = refused_here(str(run_file), "--json", "--set", override)

    assert refused.returncode == 2, refused.stderr
    assert words in refused.stderr
    assert refused.stdout == ""
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--resume"], "there is no run in coordinator.state_dir"),
        (["--at", "3"], "--at 3 says where to resume: add --resume"),
        (["--resume", "--fresh"], "--fresh begins a new run, --resume goes on with one"),
    ],
    ids=["nothing-there", "at-alone", "fresh-too"],
)
def test_a_resume_of_nothing_is_refused(tmp_path: Path, arguments: list[str], words: str) -> None:
    run_file = str(write_run(tmp_path, {"east": "", "west": ""}))

    with pytest.raises(ConfigError, match=re.escape(words)):
        CliRunner().invoke(app, ["local", run_file, *arguments], catch_exceptions=False)

    assert not (tmp_path / "state").exists()


def test_a_run_under_way_is_not_resumed(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path, {"east": ""}))
    state = StateDir(Path(config.coordinator.state_dir))
    state.create()

    with (
        hold(state.coordinator_lock),
        pytest.raises(ConfigError, match=rf"under way .* kill -TERM {os.getpid()}"),
    ):
        find_resume_step(config, None, lambda _: None, start="diloco local")


def test_a_resume_of_another_run_says_which_is_there_and_how_to_go_on(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, {"east": "", "west": ""})
    state = StateDir(tmp_path / "state")
    state.create()
    state.journal.touch()
    there = load_config(run_file, ["run.name=earlier", "run.seed=8"])
    state.resolved.write_text(resolved_toml(there))

    def resume(config: Config) -> None:
        find_resume_step(config, None, lambda _: None, start=f"diloco local {run_file}")

    with pytest.raises(ConfigError) as refused:
        resume(load_config(run_file))
    with pytest.raises(ConfigError, match=r"run.seed: 7 here, 8 there"):
        resume(load_config(run_file, ["run.name=earlier"]))
    with pytest.raises(ConfigError, match="has no complete checkpoint to resume"):
        find_resume_step(there, 4, lambda _: None, start=f"diloco local {run_file}")
    said_so: list[str] = []
    assert find_resume_step(there, None, said_so.append, start="diloco local") is None
    assert "goes on from what it has published" in said_so[0]
    with open_journal(state.journal) as journal:
        journal.write((("fatal", json.dumps(["diverged", 20])),))
    with pytest.raises(ConfigError, match="has no complete checkpoint to resume"):
        resume(there)

    said = str(refused.value)
    assert "holds the run 'earlier' (there)" in said
    assert 'run.name: "test" here, "earlier" there' in said
    assert f"diloco local {state.resolved} --resume" in said
    assert f"diloco local {run_file} --set coordinator.state_dir=runs/NAME" in said
    result = CliRunner().invoke(app, ["local", str(run_file), "--resume"])
    assert "holds the run 'earlier'" in str(result.exception)


@pytest.mark.parametrize("is_forced", [False, True], ids=["one-signal", "two-signals"])
def test_a_signal_at_the_very_end_does_not_claim_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_forced: bool
) -> None:
    run_file = write_run(tmp_path, {"east": "", "west": ""})
    finished = SimpleNamespace(is_finished=True, is_stopped=False, checkpoints=(4,))

    def run(
        _: object, __: object, request: StopRequest, *___: object
    ) -> tuple[dict[str, int], int, bool]:
        request.note(signal.SIGINT)
        if is_forced:
            raise Interrupted(signal.SIGINT)
        return {}, 0, False

    monkeypatch.setattr("diloco.checkpoint.run_checkpoints.membership_of", lambda _: finished)
    monkeypatch.setattr(local_command, "_prepare", lambda *_, **__: None)
    monkeypatch.setattr(local_command, "_run", run)
    monkeypatch.setattr("diloco.cli.run.report.show_report", lambda *_, **__: None)

    result = CliRunner().invoke(app, ["local", str(run_file)])

    assert result.exit_code == (128 + signal.SIGINT if is_forced else 0)
    assert "The run finished before the step at which it would have stopped." in result.output
    assert "--resume" not in result.output


def test_a_stop_that_an_operator_asked_for_is_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file = write_run(tmp_path, {"east": "", "west": ""})
    stopped = SimpleNamespace(is_finished=False, is_stopped=True, stop_name="after inner step 12")
    monkeypatch.setattr("diloco.checkpoint.run_checkpoints.membership_of", lambda _: stopped)
    monkeypatch.setattr(local_command, "_prepare", lambda *_, **__: None)
    monkeypatch.setattr(local_command, "_run", lambda *_: ({"east": 0, "west": 0}, 0, True))

    result = CliRunner().invoke(app, ["local", str(run_file)])

    assert result.exit_code == 0
    assert "stopped after inner step 12 of" in result.output
    assert f"diloco local {run_file} --resume" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("reason", "way"),
    [("quorum lost", "diloco export"), ("", "go on where it was: TYPED --resume")],
    ids=["run-failed", "islands-ended"],
)
def test_a_failure_names_the_island_that_ended_first_and_the_way_on(
    tmp_path: Path, reason: str, way: str
) -> None:
    config = load_config(write_run(tmp_path, {"east": "", "west": ""}))
    state = StateDir(Path(config.coordinator.state_dir))
    state.create()
    with open_journal(state.journal) as journal:
        journal.write((("fatal", json.dumps([reason, 50])),))

    text = local_command._failure_text(config, "TYPED", {"west": 40, "east": 50})

    assert "Island west failed first, with exit code 40." in text
    assert text.index("island-west.log") < text.index("island-east.log")
    assert reason in text and way in text


@pytest.mark.slow
def test_a_signal_before_the_islands_have_joined_ends_every_process(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, {"east": "", "west": ""}, inner_steps=100_000)
    state = StateDir(tmp_path / "state")
    process = started(run_file)
    wait_until(lambda: holder(state.store_lock) is not None)

    process.send_signal(signal.SIGHUP)
    _, said = said_by(process, 60)

    assert process.returncode == 128 + signal.SIGHUP, said
    assert f"there is no checkpoint yet. Go on where it was: diloco local {run_file} --res" in said
    assert holder(state.coordinator_lock) is None
    assert holder(state.store_lock) is None
    wait_for_no_process(tmp_path)


@pytest.mark.slow
def test_a_second_signal_ends_every_process_at_once(tmp_path: Path) -> None:
    run_file = write_run(
        tmp_path, {"east": "", "west": ""}, inner_steps=100_000, inner_steps_per_round=50_000
    )
    config = load_config(run_file)
    process = started(run_file)
    wait_until(lambda: "inner_step" in read(config.telemetry_dir / "events-west-0.jsonl"))

    # The next step at which all can hold is far away.
    process.send_signal(signal.SIGINT)
    wait_until(lambda: "stopping:" in read(tmp_path / "state" / "coordinator.log"))
    process.send_signal(signal.SIGTERM)
    _, said = said_by(process, 60)

    assert process.returncode == 128 + signal.SIGINT, said
    assert "stopped: every process has ended" in said
    wait_for_no_process(tmp_path)


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_checkpoint_goes_on(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, {"east": "", "west": ""}, inner_steps=200)
    config = load_config(run_file)
    events = config.telemetry_dir / "events-west-0.jsonl"
    process = started(run_file)
    wait_until(lambda: read(events).count("fragment_merged") > 3)
    for number in (signal.SIGINT, signal.SIGTERM):  # two of one kind may come as one
        process.send_signal(number)
    said_by(process, 60)
    wait_for_no_process(tmp_path)
    assert membership_of(config).checkpoints == ()
    merged = read(events).count("fragment_merged")

    resumed = local(str(run_file), "--resume")

    assert resumed.returncode == 0, resumed.stderr
    assert "no checkpoint is complete yet" in resumed.stdout
    assert 0 < merged < read(events).count("fragment_merged")
    assert membership_of(config).is_finished


def started(run_file: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "diloco", "local", str(run_file)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def wait_for_no_process(directory: Path) -> None:
    """The syncer has let go of its store before; its interpreter may still be tidying up."""
    wait_until(lambda: _processes_with(str(directory)) == [])


def _processes_with(text: str) -> list[str]:
    """Command lines of living processes that name `text`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if text in command and int(entry.name) != os.getpid():
                found.append(command)
    return found
