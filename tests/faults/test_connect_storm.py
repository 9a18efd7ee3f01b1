"""Strangers by the thousand at a real coordinator and syncer, while certificates are renewed."""

from __future__ import annotations

import asyncio
import datetime
from pathlib import Path

import pytest

from diloco.chaos.storm import Storm
from diloco.config.load import load_config
from diloco.coordinator.status import ask_status
from diloco.launch.local import LocalRun
from diloco.security.run_ca import RunCa
from diloco.security.security import Security
from diloco.state_dir import StateDir, read_endpoint
from diloco.transport.identity import Role
from tests.run_files import write_run
from tests.waiting import Patience, wait_until, written


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", ["coordinator", "syncer"])
def test_20000_connections_end_neither_while_certificates_are_renewed(
    tmp_path: Path, target: str
) -> None:
    run_file = write_run(tmp_path, {"east": "", "west": ""})
    ca = RunCa(tmp_path / "certs", lambda: datetime.datetime.now(datetime.UTC))
    ca.create("test", 100)
    for short in ("coordinator", "operator", "island/east", "island/west"):
        ca.issue(short, 30, again=False)
    settings = ("run.inner_steps=100000", "transport.certificate_lifetime=20s")
    config = load_config(run_file, [f"transport.certs={ca.directory}", *settings])
    state = StateDir(Path(config.coordinator.state_dir).absolute())

    async def ask(address: str) -> int:
        way = Security.of(config, Role.OPERATOR).transport(address, Role.COORDINATOR)
        try:
            reply = await ask_status(way, patience_s=60.0)
        finally:
            await way.close()
        return min((fragment.version for fragment in reply.fragments), default=0)

    def versions() -> int:
        return asyncio.run(ask(run.address))

    with LocalRun(config) as run:
        run.start()
        going_on = written(config.telemetry_dir)
        wait_until(lambda: versions() >= 2, progress=going_on)
        where = state.coordinator if target == "coordinator" else state.syncer
        before, version = read_endpoint(where), versions()
        assert before is not None
        certificate = ca.directory / "island-east.pem"
        storm = Storm(before.address, certificate=certificate, most=20_000)
        storm.begin()
        try:
            patience = Patience(900.0)
            while storm.is_blowing:
                assert read_endpoint(where) == before
                assert patience.left_s() > 0
                versions()
        finally:
            storm.end()
        assert storm.num_connected > 10_000
        assert storm.num_handshakes > 100
        wait_until(lambda: versions() > version + 2, progress=going_on)
        assert read_endpoint(where) == before
        assert all(process.poll() is None for process in run.islands.values())
