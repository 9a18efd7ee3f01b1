"""Copies of a state directory whose syncer goes on meanwhile."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from diloco.checkpoint import backup
from diloco.checkpoint.backup import Backups
from diloco.checkpoint.run_checkpoints import open_journal
from diloco.coordinator.grants import load_or_create_secret
from diloco.coordinator.journal import Journal
from diloco.errors import ConfigError
from diloco.state_dir import StateDir, Timeline
from diloco.versions.pins import forget_pins, pin_directory, pinned_steps


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path / "state")
    state.create()
    state.resolved.write_text("[run]\n")
    state.fingerprint.write_text("5a")
    Timeline(2, 40).write(state.timeline)
    load_or_create_secret(state.secret)
    (state.store / "lock").write_text("123")
    (state.store / "address.json").write_text('"127.0.0.1:1"')
    (state.store / "spool").mkdir()
    (state.store / "spool" / "lane").write_bytes(bytes(100))
    state.plan.write_text("{}")
    for fragment in (0, 1):
        directory = state.store / f"fragment-{fragment:04d}"
        directory.mkdir()
        publish(directory, 0)
    pin = state.store / "pins" / "step-40" / "fragment-0000"
    pin.mkdir(parents=True)
    os.link(state.store / "fragment-0000" / name_of(0), pin / name_of(0))
    return state


def name_of(version: int) -> str:
    return f"v{version:012d}.record"


def publish(directory: Path, version: int) -> None:
    """Publish as a store does: under another name first; older versions go."""
    temporary = directory / (name_of(version) + ".tmp")
    temporary.write_bytes(version.to_bytes(8, "big") * 1000)
    temporary.rename(directory / name_of(version))
    (directory / name_of(version - 2)).unlink(missing_ok=True)


@pytest.fixture
def journal(state: StateDir):
    with open_journal(state.journal) as journal:
        yield journal


def make(state: StateDir, directory: Path, **arguments: str) -> str:
    return asyncio.run(Backups(state).make({"directory": str(directory), **arguments}))


def test_a_copy_is_a_state_directory_with_what_is_durable(
    state: StateDir, journal: Journal, tmp_path: Path
) -> None:
    journal.write([("plan", "{}")], [(0, 0, 1, "{}")])  # in the write-ahead log still

    told = make(state, tmp_path / "copy")

    copy = StateDir(tmp_path / "copy")
    names = sorted(str(p.relative_to(copy.root)) for p in copy.root.rglob("*") if p.is_file())
    assert names == [
        "fingerprint",
        "journal.sqlite",
        "resolved.toml",
        f"syncer/fragment-0000/{name_of(0)}",
        f"syncer/fragment-0001/{name_of(0)}",
        f"syncer/pins/step-40/fragment-0000/{name_of(0)}",
        "syncer/plan.json",
        "timeline.json",
    ]
    with open_journal(copy.journal) as copied:
        assert (copied.entries(), copied.headers()) == ({"plan": "{}"}, ["{}"])
    assert copy.root.stat().st_mode & 0o777 == 0o700
    assert "the run secret is not in it (--with-secret)" in told
    assert "Not in it: the islands' checkpoints" in told
    assert f"--set coordinator.state_dir={copy.root}" in told
    assert not (state.root / "backup").exists()


def test_a_checkpoint_that_completes_meanwhile_is_in_the_copies_of_all_stores_or_of_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StateDir(tmp_path / "state")
    state.create(["syncer-0", "syncer-1"])
    state.resolved.write_text("[coordinator]\nnum_syncers = 2\n")
    state.fingerprint.write_text("5a")
    Timeline().write(state.timeline)
    journal = Journal(state.journal)
    journal.open()
    pending: list[tuple[str, int]] = []

    def complete(step: int) -> None:
        """Pin it everywhere, and let the one before it go, as the syncers of a run do."""
        for each in state.syncers:
            pin = pin_directory(each.store, step) / "fragment-0000"
            pin.mkdir(parents=True)
            (pin / name_of(0)).write_text("record")
        with open_journal(state.journal) as of_coordinator:
            of_coordinator.write([("checkpoint", f"[{step}]")])
        for each in state.syncers:
            forget_pins(each.store, complete=[step], num_unsure=0)

    def completing(module: ModuleType, name: str) -> None:
        """Have checkpoints complete after calls of a function."""
        function = getattr(module, name)

        def called(*arguments: Any, **options: Any) -> object:
            result = function(*arguments, **options)
            if pending and pending[0][0] == name:
                complete(pending.pop(0)[1])
            return result

        monkeypatch.setattr(module, name, called)

    complete(100)
    completing(backup, "_link")
    completing(shutil, "copytree")
    pending += [("_link", 200), ("_link", 300), ("copytree", 400)]

    make(state, tmp_path / "copy")

    assert not pending
    copy = StateDir(tmp_path / "copy")
    with open_journal(copy.journal) as copied:
        assert copied.entries() == {"checkpoint": "[300]"}
    assert [list(pinned_steps(each.store)) for each in copy.syncers] == [[300], [300]]
    journal.close()


def test_the_secret_is_copied_when_it_is_asked_for(
    state: StateDir, journal: Journal, tmp_path: Path
) -> None:
    told = make(state, tmp_path / "copy", with_secret="true")

    assert (tmp_path / "copy" / "secret").read_bytes() == state.secret.read_bytes()
    assert (tmp_path / "copy" / "secret").stat().st_mode & 0o777 == 0o600
    assert "the run secret is in it" in told


def test_a_syncer_that_publishes_meanwhile_leaves_whole_versions(
    state: StateDir, journal: Journal, tmp_path: Path
) -> None:
    directory, is_over = state.store / "fragment-0000", threading.Event()

    def publish_on() -> None:
        version = 1
        while not is_over.wait(0.01):
            publish(directory, version)
            version += 1

    publishing = threading.Thread(target=publish_on)
    publishing.start()
    try:
        for n in range(5):
            make(state, tmp_path / f"copy{n}")
            records = list((tmp_path / f"copy{n}" / "syncer" / "fragment-0000").iterdir())
            assert records
            for record in records:
                version = int(record.stem[1:])
                assert record.read_bytes() == version.to_bytes(8, "big") * 1000
    finally:
        is_over.set()
        publishing.join()


def test_a_copy_of_a_killed_coordinator_is_in_nobodys_way(
    state: StateDir, journal: Journal, tmp_path: Path
) -> None:
    (state.root / "backup" / "fragment-0000").mkdir(parents=True)

    make(state, tmp_path / "copy")

    assert not (state.root / "backup").exists()


@pytest.mark.parametrize(
    ("directory", "words"),
    [
        (lambda root: Path("here"), "give an absolute path"),
        (lambda root: root / "state", "that is not there yet"),
        (lambda root: Path("/proc/none/copy"), "on the coordinator's machine"),
    ],
    ids=["relative", "exists", "unwritable"],
)
def test_a_directory_that_cannot_be_filled_is_refused(
    directory: Callable[[Path], Path],
    words: str,
    state: StateDir,
    journal: Journal,
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=words):
        make(state, directory(tmp_path))
