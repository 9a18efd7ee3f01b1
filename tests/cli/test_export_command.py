"""`diloco export`: what it tells, where it writes by default, and its refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from diloco.cli.main import app
from diloco.config.load import load_config
from diloco.errors import ConfigError
from diloco.state_dir import StateDir
from diloco.trainer.models.model import LlamaShape
from diloco.versions.pins import pin_directory
from tests.launch.stored_run import random_parameters, store_run, tiny_run


def stored(
    directory: Path, versions: tuple[int, int] = (3, 2), *, is_flush: bool = False, pin: int = 0
) -> StateDir:
    run_file = tiny_run(directory)
    config = load_config(run_file)
    parameters = random_parameters(LlamaShape.from_config(config.model), 1)
    state = store_run(run_file, parameters, versions, is_flush=is_flush)
    if pin:
        store_run(run_file, parameters, versions, store=pin_directory(state.store, pin))
    return state


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.mark.parametrize("by_file", [True, False], ids=["run-file", "state-dir"])
def test_run_is_exported_besides_its_records_and_the_versions_are_told(
    tmp_path: Path, by_file: bool
) -> None:
    state = stored(tmp_path, (3, 2))

    result = invoke(tmp_path / "run.toml" if by_file else state.root)

    assert result.exit_code == 0, result.output
    out = state.root / "export"
    assert (out / "model.safetensors").is_file()
    lines = result.stdout.splitlines()
    assert [line.split()[:4] for line in lines[1:3]] == [
        ["0", "3", "30", "no"],
        ["1", "2", "21", "no"],
    ]
    assert "41,120 parameters of run test" in result.stdout
    assert f'AutoModelForCausalLM.from_pretrained("{out}")' in result.stdout


@pytest.mark.parametrize(
    ("versions", "is_flush", "words", "absent"),
    [
        ((3, 2), True, ["final parameters"], ["not in", "mixed"]),
        ((3, 2), False, ["flush is not in", "mixed", "inner steps 21 to 30"], []),
        ((0, 0), False, ["flush is not in"], ["mixed"]),
    ],
    ids=["final", "mixed", "founded"],
)
def test_it_says_where_the_parameters_stand(
    tmp_path: Path,
    versions: tuple[int, int],
    is_flush: bool,
    words: list[str],
    absent: list[str],
) -> None:
    result = invoke(stored(tmp_path, versions, is_flush=is_flush).root)

    assert all(word in result.stdout for word in words), result.stdout
    assert not any(word in result.stdout for word in absent), result.stdout


def test_a_checkpoint_has_a_directory_of_its_own(tmp_path: Path) -> None:
    state = stored(tmp_path, pin=20)

    result = invoke(state.root, "--at", "20")

    assert result.exit_code == 0, result.output
    assert (state.root / "export-step-000000000020" / "model.safetensors").is_file()


def test_earlier_export_is_replaced_with_force_only(tmp_path: Path) -> None:
    state = stored(tmp_path / "run")
    arguments = (state.root, "--out", tmp_path / "out")
    assert invoke(*arguments).exit_code == 0

    refused, forced = invoke(*arguments), invoke(*arguments, "--force")

    assert isinstance(refused.exception, ConfigError)
    assert "--force" in str(refused.exception)
    assert forced.exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.toml"], "missing.toml does not exist"),
        (["."], "holds no run"),
        (["state", "--at", "7"], "no checkpoint of inner step 7"),
    ],
    ids=["no-file", "no-run", "no-checkpoint"],
)
def test_what_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    stored(tmp_path)
    monkeypatch.chdir(tmp_path)

    result = invoke(*arguments)

    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


def test_size_of_files_and_format_are_chosen_and_what_makes_no_sense_is_refused(
    tmp_path: Path,
) -> None:
    state = stored(tmp_path)

    cut = invoke(state.root, "--shard-bytes", "40kB", "--out", tmp_path / "cut")
    dcp = invoke(state.root, "--format", "dcp", "--out", tmp_path / "dcp")

    assert (tmp_path / "cut" / "model.safetensors.index.json").is_file(), cut.output
    assert all(path.stat().st_size < 41_000 for path in (tmp_path / "cut").glob("*.safetensors"))
    assert (tmp_path / "dcp" / ".metadata").is_file(), dcp.output
    assert f'checkpoint.initial_load_path = "{tmp_path / "dcp"}"' in dcp.stdout
    for arguments, told in [
        (["--shard-bytes", "5 apples"], "--shard-bytes: '5 apples'"),
        (["--shard-bytes", "1GB", "--format", "dcp"], "with dcp every tensor is a file"),
    ]:
        refused = invoke(state.root, *arguments, "--out", tmp_path / "no")
        assert isinstance(refused.exception, ConfigError)
        assert told in str(refused.exception)
