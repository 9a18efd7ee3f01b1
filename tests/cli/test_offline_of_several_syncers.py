"""`diloco replay` and `diloco repair` of a run whose fragments are in the stores of two syncers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from diloco.checkpoint.backup import Backups
from diloco.checkpoint.published import read_published
from diloco.checkpoint.run_checkpoints import open_journal
from diloco.checkpoint.stores import known_plan, part_of, state_by_fragment
from diloco.cli.main import app
from diloco.config.load import load_config, resolved_toml
from diloco.errors import ConfigError
from diloco.state_dir import StateDir, hold
from diloco.transport.calls.loopback import run_virtual
from diloco.versions.frames import KEPT, frames_in
from diloco.versions.record import locate, record_path, versions_in
from diloco.versions.store import FragmentStore
from tests.run_files import index, write_run
from tests.several_syncers import Several, killing
from tests.virtual_run import Setting, descend_unevenly

ISLANDS = ("east", "west")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateDir:
    """What a run has left of which one syncer was killed again and again; all is kept."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    state = StateDir(tmp_path / "state")
    state.create(["syncer-0", "syncer-1"])
    config = load_config(
        write_run(tmp_path, dict.fromkeys(ISLANDS, ""), num_fragments=4),
        ["coordinator.num_syncers=2"],
    )
    state.resolved.write_text(resolved_toml(config))
    setting = Setting(
        {name: [8.0] * 40 for name in "uvwx"}, descend_unevenly, state.root, 64, islands=ISLANDS,
        num_fragments=4, inner_steps_per_round=8, flush=True,
    )  # fmt: skip
    run = Several(setting)
    for part, syncer in zip(run.parts, state.syncers, strict=True):
        part.keeps_all = True
        syncer.plan.write_text(setting.plan().to_json())
        syncer.fragments.write_text(json.dumps(list(part.own)))
    run_virtual(run.run(killing(every_s=6.0)))
    assert run.parts[1].epoch > 2
    with open_journal(state.journal) as journal:
        journal.write([("syncers", json.dumps([part.own for part in run.parts]))])
        index(journal, run.records)
    return state


def invoke(*arguments: str | Path) -> Result:
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
def test_nothing_is_done_while_one_of_them_is_served(state: StateDir, command: str) -> None:
    second, _ = of_second(state)
    with hold(second.store_lock):
        served = invoke(command, state.root)

    assert isinstance(served.exception, ConfigError) and "in use" in str(served.exception)


def test_which_fragments_each_has_is_known_from_the_journal(state: StateDir) -> None:
    whole = invoke("repair", state.root, "--json").stdout
    (_, second), plan = state.syncers, known_plan(state)
    for rotten in ("[0,", "[7]", '["x"]', "{}"):
        second.fragments.write_text(rotten)

        with pytest.raises(ConfigError, match=r"is missing or damaged\. Start the coordinator"):
            part_of(second, plan)  # as that syncer does, which then asks the coordinator
        stored = state_by_fragment(state, plan)
        for fragment in plan.fragments:
            newest = FragmentStore(stored[fragment.fragment_id].store, fragment, 4).newest()
            assert newest is not None and newest.version > 3
    assert invoke("repair", state.root, "--json").stdout == whole


@pytest.mark.parametrize("number", [0, 1])
def test_a_store_that_is_gone_is_missed(state: StateDir, tmp_path: Path, number: int) -> None:
    gone = state.syncers[number]
    own = set(json.loads(gone.fragments.read_text()))
    shutil.rmtree(gone.store)

    repaired, replayed = invoke("repair", state.root, "--json"), invoke("replay", state.root)

    found = [f for f in json.loads(repaired.stdout)["findings"] if f["condition"] == "damaged"]
    assert repaired.exit_code == 1
    assert {(f["fragment_id"], f["what"]) for f in found} == {(p, gone.store.name) for p in own}
    missed = f"has 2 syncers, and there is no {gone.store}"
    assert isinstance(replayed.exception, ConfigError) and missed in str(replayed.exception)
    for reader in (
        lambda: read_published(state),
        lambda: asyncio.run(Backups(state).make({"directory": str(tmp_path / "copy")})),
    ):
        with pytest.raises(ConfigError, match=re.escape(missed)):
            reader()
    assert not (tmp_path / "copy").exists()
