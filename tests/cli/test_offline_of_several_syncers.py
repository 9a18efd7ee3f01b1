"""`diloco replay` and `diloco repair` of a run whose fragments are in the stores of two syncers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner, Result

from diloco.cli import repair, replay
from diloco.config.load import load_config, resolved_toml
from diloco.coordinator.journal import Journal
from diloco.errors import ConfigError
from diloco.launch.state_dir import StateDir, hold
from diloco.rounds.log import KEPT, frames_in
from diloco.rounds.record import locate, record_path, versions_in
from tests.run_files import write_run
from tests.several_syncers import Several, killing
from tests.virtual_run import Setting
from transport.loopback import run_virtual

ISLANDS = ("east", "west")


def descend(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    for parameter in parameters.values():
        parameter.sub_(torch.linspace(0.1, 1.0 if island == "east" else 3.0, parameter.numel()))


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateDir:
    """What a run has left of which one syncer was killed again and again; all is kept."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    state = StateDir(tmp_path / "state")
    state.create(num_syncers=2)
    config = load_config(
        write_run(tmp_path, dict.fromkeys(ISLANDS, ""), num_fragments=4),
        ["coordinator.num_syncers=2"],
    )
    state.resolved.write_text(resolved_toml(config))
    setting = Setting(
        {name: [8.0] * 40 for name in "uvwx"}, descend, state.root, 64, islands=ISLANDS,
        num_fragments=4, inner_steps_per_round=8, flush=True,
    )  # fmt: skip
    run = Several(setting)
    for part, syncer in zip(run.parts, state.syncers, strict=True):
        part.keeps_all = True
        syncer.plan.write_text(setting.plan().to_json())
        syncer.fragments.write_text(json.dumps(list(part.own)))
    run_virtual(run.run(killing(every_s=6.0)))
    assert run.parts[1].epoch > 2
    journal = Journal(state.journal)
    journal.open()
    for h in run.records:
        journal.write((), [(h["timeline"], h["fragment_id"], h["version"], json.dumps(h))])
    journal.close()
    return state


def invoke(*arguments: str | Path) -> Result:
    app = typer.Typer()
    for command in (replay, repair):
        command.register(app)
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})


def of_second(state: StateDir) -> tuple[StateDir, int]:
    """Give the second syncer, and the first of its fragments."""
    second = state.syncers[1]
    return second, json.loads(second.fragments.read_text())[0]


def test_every_version_of_both_is_made_again_and_found_whole(state: StateDir) -> None:
    replayed, repaired = invoke("replay", state.root), invoke("repair", state.root, "--json")

    assert replayed.exit_code == repaired.exit_code == 0, replayed.output + repaired.output
    lines = [" ".join(line.split()) for line in replayed.stdout.splitlines()]
    newest = [int(re.fullmatch(r"\d 0 1 to (\d+) recomputed", line)[1]) for line in lines[1:5]]
    assert min(newest) > 3
    assert lines[-1] == f"{sum(newest)} versions: {sum(newest)} recomputed"
    findings = json.loads(repaired.stdout)["findings"]
    assert {f["fragment_id"] for f in findings} == {0, 1, 2, 3}
    assert {f["condition"] for f in findings} == {"whole"}


def test_what_is_damaged_at_one_of_them_is_named(state: StateDir) -> None:
    second, p = of_second(state)
    version, kept = min(frames_in(second.store / f"fragment-{p:04d}" / KEPT).items())
    data = bytearray(kept.path.read_bytes())
    data[kept.sections["contribution/west/0"].start] ^= 1
    kept.path.write_bytes(data)

    found = json.loads(invoke("replay", state.root, "--json").stdout)["versions"]

    wrong = [v for v in found if v["verdict"] == "damaged"]
    assert [(v["fragment_id"], v["version"]) for v in wrong] == [(p, version)]
    assert wrong[0]["detail"].startswith(f"{kept.path} is torn or damaged")


def test_what_one_of_them_lacks_is_made_again_from_its_own(state: StateDir) -> None:
    second, p = of_second(state)
    directory = second.store / f"fragment-{p:04d}"
    newest = max(versions_in(directory))
    path = record_path(directory, newest)
    data = bytearray(path.read_bytes())
    data[locate(path).sections["theta/0"].start] ^= 1
    path.write_bytes(data)
    second.incarnations.write_text("{")

    findings = json.loads(invoke("repair", state.root, "--json").stdout)["findings"]

    named = {(f["fragment_id"], f["what"], f["condition"]) for f in findings}
    assert {what for p, what, _ in named if p == -1} == {"syncer-1/incarnations.json"}
    assert (p, f"version {newest}", "repaired") in named
    assert json.loads(invoke("replay", state.root, "--json").stdout)["versions"]


@pytest.mark.parametrize("command", ["replay", "repair"])
def test_nothing_is_done_while_one_of_them_is_served_or_is_not_known(
    state: StateDir, command: str
) -> None:
    second, _ = of_second(state)
    with hold(second.store_lock):
        served = invoke(command, state.root)
    second.fragments.write_text("[0,")
    damaged = invoke(command, state.root)

    assert isinstance(served.exception, ConfigError) and "in use" in str(served.exception)
    assert isinstance(damaged.exception, ConfigError)
    assert str(damaged.exception).startswith(f"{second.fragments}, which says which fragments")
