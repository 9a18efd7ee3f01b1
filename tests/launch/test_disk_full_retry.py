"""What a process writes at its start waits for room on the disk."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.config.load import load_config
from diloco.coordinator.journal import Journal
from diloco.durable import DiskFull
from diloco.launch import coordinator_end, island
from diloco.launch.process import disk_full_retry
from diloco.launch.process.disk_full_retry import retry_disk_full_async
from diloco.launch.process.ending import StopRequest
from diloco.state_dir import StateDir
from diloco.transport.calls.loopback import run_virtual
from tests.launch.island_site import RUN


def test_it_is_written_once_there_is_room_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[float] = []

    async def tried() -> int:
        clock = asyncio.get_running_loop().time

        def work() -> int:
            tries.append(clock())
            if len(tries) < 4:
                raise DiskFull(errno.ENOSPC, "No space left on device")
            return len(tries)

        return await retry_disk_full_async("the epoch", work)

    with caplog.at_level(logging.INFO):
        assert run_virtual(tried()) == 4

    assert tries == [0.0, 1.0, 2.0, 3.0]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "the disk is full, the epoch waits: make some room" in said[0]
    assert "the epoch can be written again" in said[1]


def test_who_is_asked_to_end_waits_no_longer() -> None:
    def full() -> None:
        raise DiskFull(errno.ENOSPC, "No space left on device")

    async def scenario() -> None:
        stopping = asyncio.Event()
        asyncio.get_running_loop().call_later(2.5, stopping.set)
        with pytest.raises(DiskFull):
            await retry_disk_full_async("the epoch", full, given_up=stopping)
        assert asyncio.get_running_loop().time() == 3.0

    run_virtual(scenario())


def test_a_second_signal_stops_a_coordinator_on_a_full_disk() -> None:
    """What follows is the end of its syncers, and the last answers to islands."""

    async def full() -> None:
        raise DiskFull(errno.ENOSPC, "No space left on device")

    async def scenario() -> None:
        signals = StopRequest(num_graceful=1)
        signals.note(signal.SIGTERM)
        asyncio.get_running_loop().call_later(2.5, signals.note, signal.SIGTERM)
        full_one: Any = SimpleNamespace(request_stop=full)
        await coordinator_end.asked_to_stop(full_one, full_one, signals, print)
        assert asyncio.get_running_loop().time() == 3.0

    run_virtual(scenario())


def test_a_coordinator_that_halts_does_not_wait_to_index_the_last_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, journal = StateDir(tmp_path), Journal(tmp_path / "journal.sqlite")
    (state.store / "fragment-0").mkdir(parents=True)
    header = {"timeline": 0, "fragment_id": 0, "version": 1}
    monkeypatch.setattr(coordinator_end, "headers_in", lambda _: [header])

    def full(*_: object) -> None:
        raise DiskFull(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal, "write", full)

    async def stopping() -> None:
        halted = asyncio.Event()
        halted.set()
        await coordinator_end.stop_syncers_and_index(state, [], journal, halted)

    run_virtual(stopping())


def test_an_island_that_starts_on_a_full_disk_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    config = load_config(tmp_path / "run.toml")
    write, left = island.write_durably, [DiskFull(errno.ENOSPC, "No space left on device")] * 2

    def write_with_luck(path: Path, pieces: Any) -> None:
        if left:
            raise left.pop()
        write(path, pieces)

    monkeypatch.setattr(island, "write_durably", write_with_luck)
    monkeypatch.setattr(disk_full_retry, "_AGAIN_S", 0.01)
    monkeypatch.setattr(island._Supervisor, "_lead", lambda self, command, request: 0)

    with caplog.at_level(logging.INFO):
        assert island.run_island(config, "west", "127.0.0.1:9", tmp_path / "out") == 0

    assert (tmp_path / "out" / "resolved-west.toml").exists()
    assert [
        record.getMessage() for record in caplog.records if record.name == disk_full_retry.__name__
    ] == [
        "the disk is full, island west waits: make some room: [Errno 28] No space left on device",
        "island west can be written again",
    ]
