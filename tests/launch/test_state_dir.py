"""Locks, endpoints and the end of a syncer that its coordinator left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diloco.cli.main import main
from diloco.errors import ConfigError
from diloco.state_dir import (
    Endpoint,
    Held,
    StateDir,
    acquire,
    hold,
    holder,
    read_bound,
    read_endpoint,
    stop_syncer,
    write_pid,
)
from tests.run_files import write_run

HOLDER = """
import signal, sys, time
from pathlib import Path
from diloco.state_dir import hold
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == "stubborn" else signal.SIG_DFL)
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def other_process(path: Path, manner: str = "meek") -> Iterator[subprocess.Popen[str]]:
    """A process that holds a lock."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), manner], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_lock_is_free_again_when_its_context_or_its_process_ends(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert holder(path) is None

    with other_process(path) as process:
        assert holder(path) == process.pid
        with pytest.raises(Held, match=f"held by process {process.pid}"), hold(path):
            pass
        process.kill()
        process.wait()
        assert holder(path) is None

    with hold(path):
        assert holder(path) is not None
    assert holder(path) is None


def test_lock_passes_to_a_process_that_inherits_its_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    descriptor = acquire(path)
    program = "import sys; print('up', flush=True); sys.stdin.read()"

    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(descriptor,),
    ) as process:
        write_pid(descriptor, process.pid)
        os.close(descriptor)

        assert holder(path) == process.pid
        process.kill()
        process.wait()
        assert holder(path) is None


@pytest.mark.parametrize("manner", ["meek", "stubborn"])
def test_syncer_is_stopped_whatever_it_does(
    tmp_path: Path, manner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.state_dir._STOP_S", 0.5)
    state = StateDir(tmp_path / "state")
    state.create()
    stop_syncer(state)  # nobody there: nothing to do

    with other_process(state.store_lock, manner) as process:
        before = time.monotonic()
        stop_syncer(state)

        assert holder(state.store_lock) is None
        assert process.wait() == (-15 if manner == "meek" else -9)
        assert time.monotonic() - before < 20


def test_endpoint_is_read_back_and_absent_before_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "syncer.json"

    assert read_endpoint(path) is None
    Endpoint("127.0.0.1:4711", 42).write(path)
    Endpoint("127.0.0.1:4712", 43).write(path)

    assert read_endpoint(path) == Endpoint("127.0.0.1:4712", 43)
    path.write_text("{")
    with pytest.raises(ConfigError, match=str(path)):
        read_endpoint(path)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": 1}', '"nowhere"', '"a:b:c"', "17"])
def test_an_address_that_is_none_gives_way_to_a_free_port(tmp_path: Path, content: str) -> None:
    path = tmp_path / "address.json"
    path.write_text(content)

    assert read_bound(path) == ""

    path.write_text('"127.0.0.1:4711"')
    assert read_bound(path) == "127.0.0.1:4711"


@pytest.mark.parametrize("name", ["coordinator.lock", "coordinator.json", "timeline.json"])
def test_a_directory_in_the_place_of_a_file_is_named_with_what_to_type(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = write_run(tmp_path, dict.fromkeys(("east", "west"), ""))
    path = tmp_path / "state" / name
    path.mkdir(parents=True)
    monkeypatch.setattr("sys.argv", ["diloco", "coordinator", str(run_file)])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == ConfigError.exit_code
    assert f"mv {path} {path}.aside" in capsys.readouterr().err


def test_directory_is_its_owners_alone_and_may_be_there_already(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "runs" / "demo")

    state.create()
    state.create()

    assert state.root.stat().st_mode & 0o777 == 0o700
    assert state.store.is_dir()


def test_one_syncer_has_the_plain_names_and_several_have_numbers(tmp_path: Path) -> None:
    one, two = StateDir(tmp_path / "one"), StateDir(tmp_path / "two")
    one.create()
    two.create(("syncer-0", "syncer-1"))
    two.resolved.write_text("[coordinator]\nnum_syncers = 2\n")
    two.of_syncers(("syncer-0", "syncer-1"))[0].store.rmdir()  # gone, and still one of them

    assert [each.store.name for each in one.syncers] == ["syncer"]
    assert one.syncers == one.of_syncers(["syncer"]) == (one,)
    assert [(each.store.name, each.syncer_id) for each in two.syncers] == [
        ("syncer-0", 0),
        ("syncer-1", 1),
    ]
    names = [(each.syncer.name, each.syncer_log.name) for each in two.syncers]
    assert names == [("syncer-0.json", "syncer-0.log"), ("syncer-1.json", "syncer-1.log")]
    assert not two.store.exists()
