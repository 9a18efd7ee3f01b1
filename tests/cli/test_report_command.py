"""`diloco report`: what it refuses, and what to type then; test_readme.py reads its summary."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.config.load import load_config
from diloco.errors import ConfigError
from diloco.state_dir import StateDir, hold
from tests.run_files import write_run


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run(tmp_path, {"east": "", "west": ""})


def state_of(run_file: Path) -> StateDir:
    """What a coordinator leaves at the least."""
    state = StateDir(Path(load_config(run_file).coordinator.state_dir))
    state.create()
    state.journal.touch()
    return state


def refusal(run_file: Path) -> str:
    result = CliRunner().invoke(app, ["report", str(run_file)])
    assert isinstance(result.exception, ConfigError), result.output
    return str(result.exception)


def test_where_there_is_no_run_the_coordinators_machine_is_named(run_file: Path) -> None:
    said = refusal(run_file)
    assert "there is no run in" in said and "--set coordinator.state_dir" in said


def test_a_run_that_is_under_way_is_to_be_watched_instead(run_file: Path) -> None:
    with hold(state_of(run_file).coordinator_lock):
        said = refusal(run_file)
    assert "is under way" in said and "diloco status" in said


def test_events_that_are_elsewhere_are_to_be_copied_first(run_file: Path) -> None:
    state_of(run_file)
    events = load_config(run_file).telemetry_dir
    events.mkdir(parents=True, exist_ok=True)
    (events / "events-east-0.jsonl").touch()
    said = refusal(run_file)
    assert "has no events of west" in said and "copy events-west-*.jsonl there" in said
    assert f"diloco report {run_file}" in said
