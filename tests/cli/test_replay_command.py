"""`diloco replay`: a table or JSON values, an exit code, and nothing while the store is served."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from diloco.checkpoint.run_checkpoints import open_journal
from diloco.cli.main import app
from diloco.config.load import load_config, resolved_toml
from diloco.coordinator.audit_log import audit_entries_of, expiry_entry
from diloco.coordinator.journal import AuditEntry
from diloco.errors import ConfigError
from diloco.protocol.rounds.terms import RoundKey
from diloco.state_dir import StateDir, hold
from diloco.transport.calls.loopback import run_virtual
from diloco.versions.frames import KEPT, frames_in
from tests.run_files import index, write_run
from tests.virtual_run import Setting, VirtualRun, descend_unevenly


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateDir:
    """What two islands left behind: nine versions of a fragment, all kept, and an audit log."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    state = StateDir(tmp_path / "state")
    state.create()
    config = load_config(write_run(tmp_path, {"east": "", "west": ""}))
    state.resolved.write_text(resolved_toml(config))
    setting = Setting(
        {"v": [8.0] * 40}, descend_unevenly, state.store, 32, islands=("east", "west"), flush=True
    )
    state.plan.write_text(setting.plan().to_json())
    run = VirtualRun(setting)
    run.keeps_all = True
    run_virtual(run.run())
    told = audit_entries_of(
        (("policy/1", json.dumps({"key": "outer.optimizer.lr", "value": 0.5})),)
    )
    with open_journal(state.journal) as journal:
        journal.write((), told=[*told, expiry_entry(RoundKey(0, 0, 3, 0), ["west"], "deadline")])
        index(journal, run.records)
        journal.write((), told=[AuditEntry("repair", "f0/version 2: torn", "{}")])
    return state


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["replay", *map(str, arguments)], env={"COLUMNS": "200"})


def test_every_version_is_made_again_and_the_audit_log_is_shown(state: StateDir) -> None:
    result = invoke(state.root.parent / "run.toml")

    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[1].startswith("0 0 1 to ")
    assert lines[1].endswith(" recomputed")
    assert "after 0 records: policy 1: outer.optimizer.lr = 0.5" in lines
    assert "after 0 records: expiry t0/f0/v3/a0: missing west: deadline" in lines
    newest = int(lines[1].split()[4])
    assert f"after {newest + 1} records: repair f0/version 2: torn" in lines
    assert lines[-1] == f"{newest} versions: {newest} recomputed"
    found = json.loads(invoke(state.root, "--json", "--from", "4", "--fragment", "0").stdout)
    assert [v["version"] for v in found["versions"]] == list(range(4, newest + 1))
    assert [entry["kind"] for entry in found["audit_log"]] == ["policy", "expiry", "repair"]


def test_a_flipped_bit_is_named_with_what_to_do_and_the_exit_code(state: StateDir) -> None:
    kept = frames_in(state.store / "fragment-0000" / KEPT)[2]
    data = bytearray(kept.path.read_bytes())
    data[kept.sections["contribution/west/0"].start] ^= 1
    kept.path.write_bytes(data)

    result = invoke(state.root)
    found = json.loads(invoke(state.root, "--json").stdout)["versions"]

    assert result.exit_code == 1
    assert "1 damaged" in result.stdout
    damaged = f"{kept.path} is torn or damaged in section contribution/west/0"
    assert (found[1]["version"], found[1]["detail"]) == (2, damaged)
    assert "1 versions are not what was published" in result.stderr
    assert f"diloco repair {state.root}" in result.stderr


def test_where_all_is_to_be_kept_what_is_missing_is_an_error(state: StateDir) -> None:
    frames_in(state.store / "fragment-0000" / KEPT)[2].path.unlink()

    retained = invoke(state.root)
    state.resolved.write_text(
        state.resolved.read_text().replace(
            'keep_contributions = "retained"', 'keep_contributions = "all"'
        )
    )
    kept = invoke(state.root)
    later = invoke(state.root, "--from", "7")

    assert retained.exit_code == 0 and "not recomputable" in retained.stdout
    assert kept.exit_code == 1
    assert 'cannot be made again, though outer.keep_contributions is "all"' in kept.stderr
    assert f"diloco replay {state.root} --from V" in kept.stderr
    assert later.exit_code == 0, later.output


def test_what_cannot_be_replayed_is_refused_with_what_to_type(
    state: StateDir, tmp_path: Path
) -> None:
    with hold(state.store_lock):
        served = invoke(state.root)
    (tmp_path / "empty").mkdir()
    empty = invoke(tmp_path / "empty")
    other = invoke(state.root, "--fragment", "7")

    errors = [served.exception, empty.exception, other.exception]
    assert all(isinstance(error, ConfigError) for error in errors), errors
    assert "diloco backup HOST:PORT" in str(errors[0])
    assert "holds no records" in str(errors[1])
    assert f"diloco replay {state.root} --fragment 0" in str(errors[2])
