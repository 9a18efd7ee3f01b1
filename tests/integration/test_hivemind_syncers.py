"""Several syncers over libp2p: each a peer of its own, the results those of one over gRPC."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from diloco.bench.network.s3_server import s3_server
from diloco.checkpoint.published import read_published
from diloco.config.load import load_config
from diloco.launch.local import LocalRun
from diloco.security.run_ca import RunCa
from diloco.state_dir import StateDir, read_endpoint
from diloco.transport.libp2p.address import parse_peer_address
from tests.placed_run import ISLANDS, SYNCERS, PlacedRun
from tests.run_files import all_logs, write_run

pytestmark = pytest.mark.timeout(300)

HIVEMIND = "transport.kind=hivemind"
STEPS = 24


def published(state: StateDir) -> list[tuple[int, str]]:
    return [(each.version, each.digest) for each in read_published(state).fragments]


def run_here(directory: Path, *overrides: str) -> tuple[list[tuple[int, str]], set[str]]:
    """Run it with all processes on this machine; what it published, and its syncers' addresses."""
    run_file = write_run(directory, dict.fromkeys(ISLANDS, ""), inner_steps=STEPS)
    addresses = set()
    with LocalRun(load_config(run_file, overrides)) as run:

        def note_syncers() -> None:
            found = [read_endpoint(each.syncer) for each in run.state.syncers]
            addresses.update(each.address for each in found if each is not None and each.address)

        run.start()
        assert run.wait(note_syncers) == 0, all_logs(run.state.root)
        run.wait_for_coordinator()
        return published(run.state), addresses


@pytest.fixture(scope="module")
def with_one_syncer(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """What the run publishes with one syncer over gRPC."""
    return run_here(tmp_path_factory.mktemp("one"))[0]


@pytest.mark.slow
def test_two_syncers_of_one_machine_are_two_peers(
    tmp_path: Path, with_one_syncer: list[tuple[int, str]]
) -> None:
    results, addresses = run_here(tmp_path, HIVEMIND, "coordinator.num_syncers=2")

    assert results == with_one_syncer
    assert len({parse_peer_address(address).peer_id for address in addresses}) == 2


def test_islands_and_syncers_of_other_machines_find_the_run_by_its_name(
    tmp_path: Path, with_one_syncer: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = RunCa(tmp_path / "tokens", lambda: datetime.now(UTC))
    ca.create("test", 100)
    for short in ("coordinator", "syncer", *(f"island/{name}" for name in ISLANDS)):
        ca.make_token(short)
    meeting = [sys.executable, "-m", "tests.transport.hivemind_peer", f"{tmp_path}/key", "0"]
    with (
        s3_server(tmp_path / "log") as server,
        subprocess.Popen(meeting, stdout=subprocess.PIPE, text=True) as peer,
    ):
        for key, value in server.environment.items():
            monkeypatch.setenv(key, value)
        run = PlacedRun(tmp_path, server, STEPS)
        assert peer.stdout is not None
        known = f"transport.hivemind.initial_peers=['{peer.stdout.readline().strip()}']"
        settings = (HIVEMIND, known, f"transport.tokens={tmp_path}/tokens", "coordinator.address=")
        options = [word for setting in settings for word in ("--set", setting)]
        try:
            started = [*run.start_all(*options).values()]
            for process in reversed(started):
                assert process.wait(200) == 0, run.said()
            assert run.published() == with_one_syncer
            keys = {(run.syncer(n, n).root / f"syncer-{n}.p2p-key").read_bytes() for n in SYNCERS}
            assert len(keys) == 2
            said = (tmp_path / f"{ISLANDS[0]}.log").read_text()
            assert "goes to the coordinator at /p2p/" in said
        finally:
            peer.kill()
            run.end()
