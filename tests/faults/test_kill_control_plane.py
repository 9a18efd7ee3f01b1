"""SIGKILL of the syncer and of the coordinator at random moments of a real run, again and again.

Islands must go on, every version must be published once, every contribution counted once.
"""

import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.launch.local import LocalRun
from diloco.launch.state_dir import holder
from diloco.sync.layout import build_schedule
from tests.run_files import FinishedRun, all_logs, journal_tape, write_run

NUM_KILLS = 9
#: Versions published between two kills, at most: moments are chosen by progress, not by time, so
#: that a fast machine does not end the run before its last kill.
MAX_GAP_VERSIONS = 12
ISLANDS = ("east", "west")
SEED = 20


class Killer:
    """Kills coordinator or syncer, waits until it is back and some way on, kills again."""

    def __init__(self, run: LocalRun, rng: random.Random) -> None:
        self.run = run
        self.rng = rng
        self.kills: Counter[str] = Counter()
        self.killed_pid: int | None = None
        self.victim = "syncer"
        self.not_before = 0

    def pid(self, victim: str) -> int | None:
        state = self.run.state
        return holder(state.store_lock if victim == "syncer" else state.coordinator_lock)

    def num_versions(self) -> int:
        """Versions on disk, of all fragments together."""
        newest: dict[Path, int] = {}
        for record in self.run.state.store.glob("fragment-*/v*.record"):
            newest[record.parent] = max(newest.get(record.parent, 0), int(record.stem[1:]))
        return sum(newest.values())

    def look(self) -> None:
        if self.kills.total() >= NUM_KILLS or not self.run.state.plan.exists():
            return
        if self.killed_pid is not None:
            pid = self.pid(self.victim)
            if pid is not None and pid != self.killed_pid:
                self.killed_pid = None
                self.victim = self.rng.choice(("syncer", "coordinator"))
                self.not_before = self.num_versions() + self.rng.randint(0, MAX_GAP_VERSIONS)
            return
        pid = self.pid(self.victim)
        if pid is not None and self.num_versions() >= self.not_before:
            os.kill(pid, signal.SIGKILL)
            self.kills[self.victim] += 1
            self.killed_pid = pid


@pytest.mark.timeout(300)
def test_random_kills_lose_no_version_and_count_nothing_twice(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, dict.fromkeys(ISLANDS, ""), inner_steps=700)
    config = load_config(run_file)

    with LocalRun(config) as run:
        killer = Killer(run, random.Random(SEED))
        run.start()
        code = run.wait(killer.look)
        run.wait_for_coordinator()
    logs = all_logs(run.state.root)

    assert code == 0, logs
    assert killer.kills.total() >= NUM_KILLS, f"the run was over after {killer.kills}"
    assert min(killer.kills.values()) >= 2
    finished = FinishedRun(run)
    records = finished.last_records()
    assert finished.ending_digests() == {tuple(record.digest.hex() for record in records)}
    schedule = build_schedule(config.outer, config.run.inner_steps)
    sends = [p for step in range(1, 701) for p in schedule.due(step)]
    for record in records:
        p = record.fragment_id
        assert record.version == sends.count(p) + 1, "one version a send, and the flush"
        for island in ISLANDS:
            merged = [
                event["version"]
                for event in finished.of_kind(island, "fragment_merged")
                if event["fragment_id"] == p
            ]
            assert merged == list(range(1, record.version + 1))
        headers = [header for header in journal_tape(run.state) if header["fragment_id"] == p]
        assert [header["version"] for header in headers] == list(range(record.version + 1))
        for island in ISLANDS:
            counted = [c for h in headers for c in h["contributors"] if c["island"] == island]
            assert len(counted) == record.version
            assert sum(c["weight_tokens"] for c in counted) == 700 * 128, "every token once"
