"""Which ends of a syncer are followed by another start at once, and which after a wait."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from pathlib import Path

import pytest

from diloco.launch import syncer_supervisor
from diloco.launch.syncer_supervisor import SyncerSupervisor
from diloco.state_dir import Endpoint, StateDir

#: Longer than the whole test: a start after a wait does not happen in it.
NEVER_S = 3600.0


class Supervised(SyncerSupervisor):
    """Its syncers are shell processes that end by themselves."""

    def __init__(self, state: StateDir, script: str, *, serves: bool) -> None:
        self.told: list[str] = []
        super().__init__(state, on_hopeless=lambda reason, code: None, on_ended=self.told.append)
        self.script = script
        self.serves = serves
        self.num_starts = 0
        self.children: list[subprocess.Popen[bytes]] = []

    def _start(self) -> subprocess.Popen[bytes]:
        self.num_starts += 1
        child = subprocess.Popen(["sh", "-c", self.script])
        self.children.append(child)
        Endpoint("127.0.0.1:1" if self.serves else "", child.pid).write(self._state.syncer)
        return child


@pytest.mark.parametrize(
    ("script", "serves", "is_at_once"),
    [
        pytest.param("sleep 0.02; kill -9 $$", True, True, id="killed-while-it-served"),
        pytest.param("sleep 0.02; kill -9 $$", False, False, id="killed-before-it-served"),
        pytest.param("sleep 0.02; exit 1", True, False, id="failed"),
    ],
)
def test_a_killed_syncer_is_started_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, serves: bool, is_at_once: bool
) -> None:
    monkeypatch.setattr(syncer_supervisor, "_FIRST_WAIT_S", NEVER_S)
    monkeypatch.setattr(syncer_supervisor, "_LOOK_S", 0.01)
    state = StateDir(tmp_path)
    supervisor = Supervised(state, script, serves=serves)

    async def supervise() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30.0 if is_at_once else 1.0):
                task = asyncio.create_task(supervisor.run())
                try:
                    while supervisor.num_starts < 5:
                        await asyncio.sleep(0.01)
                finally:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

    asyncio.run(supervise())
    for child in supervisor.children:
        child.kill()
        child.wait()

    assert supervisor.num_starts >= 5 if is_at_once else supervisor.num_starts == 1
    assert bool(supervisor.told) != is_at_once, "what ends by itself is an alarm"
