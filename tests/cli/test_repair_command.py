"""`diloco repair`: a table or JSON values, an exit code, and nothing while the store is served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from diloco.checkpoint.checkpoints import MANIFEST
from diloco.checkpoint.run_checkpoints import open_journal
from diloco.cli.main import app
from diloco.config.load import load_config
from diloco.errors import ConfigError
from diloco.state_dir import StateDir, hold
from diloco.trainer.models.model import LlamaShape
from diloco.versions.record import locate, record_path
from tests.launch.stored_run import random_parameters, store_run, tiny_run


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    run_file = tiny_run(tmp_path)
    parameters = random_parameters(LlamaShape.from_config(load_config(run_file).model), 1)
    return store_run(run_file, parameters, (3, 2))


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["repair", *map(str, arguments)], env={"COLUMNS": "200"})


def test_a_whole_store_is_said_to_be(state: StateDir, tmp_path: Path) -> None:
    result = invoke(tmp_path / "run.toml")

    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["0", "version", "3", "whole"] in lines
    assert "3 parts, 1 repaired, 0 damaged" in result.stdout
    again = invoke(tmp_path / "run.toml")
    assert "2 parts, 0 repaired, 0 damaged" in again.stdout, "the journal was missing, and is there"


def test_what_remains_damaged_is_said_with_what_to_do_and_the_exit_code(state: StateDir) -> None:
    path = record_path(state.store / "fragment-0001", 2)
    data = bytearray(path.read_bytes())
    data[locate(path).sections["theta/0"].start] ^= 1
    path.write_bytes(data)
    state.incarnations.write_text("{")
    with open_journal(state.journal) as journal:
        journal.write((), [(0, 1, 2, json.dumps({"version": 2}))])

    result = invoke(state.root, "--json")

    assert result.exit_code == 1
    found = json.loads(result.stdout)["findings"]
    assert [(f["fragment_id"], f["what"], f["condition"]) for f in found] == [
        (-1, "incarnations.json", "damaged"),
        (0, "version 3", "whole"),
        (1, "version 2", "damaged"),
        (1, "version 2", "damaged"),
    ]
    assert "does not say by which rules" in found[2]["detail"]
    assert found[3]["detail"].endswith("Resume a checkpoint: diloco coordinator RUN.toml --resume")


def test_a_torn_checkpoint_of_an_island_is_said_with_the_way_on(
    state: StateDir, tmp_path: Path
) -> None:
    directory = load_config(tmp_path / "run.toml").checkpoint_dir / "east"
    for step, text in ((5, '{"for'), (10, "[" * 100_000)):
        (directory / f"step-{step:012d}").mkdir(parents=True)
        (directory / f"step-{step:012d}" / MANIFEST).write_text(text)

    result = invoke(state.root)

    assert result.exit_code == 1, result.output
    (torn,) = [line for line in result.stdout.splitlines() if f"{5:012d}: " in line]
    assert torn.startswith(f"checkpoint east/step-{5:012d}: ")
    assert f"{MANIFEST} is damaged: Unterminated string" in torn
    assert f"or move {directory / f'step-{5:012d}'} away" in torn
    assert "2 damaged" in result.stdout

    with open_journal(state.journal) as journal:
        journal.write((("checkpoint", "[15]"),))
    for step in (15, 20):  # of which 20 was never complete
        (directory / f"step-{step:012d}").mkdir()
    (directory.parent / "lost+found").mkdir()
    found = json.loads(invoke(state.root, "--json").stdout)["findings"]
    damaged = [f["what"] for f in found if f["condition"] == "damaged"]
    assert damaged == [
        f"pin syncer/pins/step-{15:012d}",
        *(f"checkpoint east/step-{step:012d}" for step in (5, 10, 15)),
    ]


def test_a_store_that_is_served_or_is_none_is_left_alone(state: StateDir, tmp_path: Path) -> None:
    with hold(state.store_lock):
        served = invoke(state.root)
    (tmp_path / "empty").mkdir()
    empty = invoke(tmp_path / "empty")

    assert isinstance(served.exception, ConfigError)
    assert "Stop the run first" in str(served.exception)
    assert isinstance(empty.exception, ConfigError)
    assert "holds no store of a syncer" in str(empty.exception)


def test_a_fragment_of_a_run_under_way_is_named_with_its_island() -> None:
    for arguments in (["--fragment", "3"], ["--from-island", "east"]):
        result = invoke("127.0.0.1:9", *arguments)
        assert isinstance(result.exception, ConfigError)
        assert "--fragment P --from-island NAME" in str(result.exception)


def test_an_island_is_asked_through_the_coordinator_and_the_end_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[str, int, str]] = []
    monkeypatch.setattr(
        "diloco.cli.operate.repair.repair_from_island",
        lambda address, fragment, island, *_: told.append((address, fragment, island)),
    )

    result = invoke("host:1", "--fragment", "3", "--from-island", "east")

    assert result.exit_code == 0, result.output
    assert told == [("host:1", 3, "east")]
