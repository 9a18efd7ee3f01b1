"""SIGKILL of the syncer and of the coordinator at random moments of a real run, again and again.

Islands must go on, every version must be published once, every contribution counted once. In the
default suite both are killed with their machine in test_machine_lost.py, and a syncer within the
process again and again in tests/syncer/test_syncer_kills.py.
"""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.island.layout import build_schedule
from diloco.launch.local import LocalRun
from diloco.state_dir import holder
from tests.faults.killer import Killer
from tests.run_files import FinishedRun, all_logs, indexed_headers, write_run

#: Coordinator's kills, at most: one killed before it serves takes a restart of its budget.
MAX_COORDINATOR_SHARE = 0.4
#: Seconds between two kills, at most. A syncer needs some of them to begin its work.
MAX_GAP_S = 3.0
#: Versions published between two kills, at most, so that a fast machine does not end the run
#: before its last kill.
MAX_GAP_VERSIONS = 12
LOOK_S = 0.01
ISLANDS = ("east", "west")


class KillerOfEither(Killer):
    """Kills coordinator or syncer at random moments, whatever either of them is doing.

    It does not wait until a victim is back: the other one may be next, so that both are dead.
    """

    def __init__(self, run: LocalRun, rng: random.Random, num_kills: int) -> None:
        super().__init__(run, num_kills)
        self.rng = rng
        self.kills: Counter[str] = Counter()
        self.killed: set[int] = set()
        self.num_both_dead = 0

    def pid(self, victim: str) -> int | None:
        """Process of a victim that lives, None while it is dead."""
        state = self.run_.state
        pid = holder(state.store_lock if victim == "syncer" else state.coordinator_lock)
        return None if pid in self.killed else pid

    def num_versions(self) -> int:
        """Versions on disk, of all fragments together."""
        newest: dict[Path, int] = {}
        for record in self.run_.state.store.glob("fragment-*/v*.record"):
            newest[record.parent] = max(newest.get(record.parent, 0), int(record.stem[1:]))
        return sum(newest.values())

    def run(self) -> None:
        while not self.run_.state.plan.exists() and not self.is_over.wait(LOOK_S):
            pass
        while self.kills.total() < self.num_kills and not self.is_over.is_set():
            moment = time.monotonic() + self.rng.uniform(0.0, MAX_GAP_S)
            last_version = self.num_versions() + MAX_GAP_VERSIONS
            while time.monotonic() < moment and self.num_versions() < last_version:
                self.is_over.wait(LOOK_S)
            self.kill_one()

    def kill_one(self) -> None:
        is_spared = self.kills["coordinator"] >= int(MAX_COORDINATOR_SHARE * self.num_kills)
        is_owed = self.kills.total() == self.num_kills - 1 and not self.kills["coordinator"]
        victims = ["syncer"] * (not is_owed) + ["coordinator"] * (not is_spared)
        living = {victim: pid for victim in victims if (pid := self.pid(victim)) is not None}
        if not living:
            self.is_over.wait(LOOK_S)
            return
        victim = self.rng.choice(sorted(living))
        os.kill(living[victim], signal.SIGKILL)
        self.killed.add(living[victim])
        self.kills[victim] += 1
        self.num_both_dead += all(self.pid(each) is None for each in ("syncer", "coordinator"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("num_kills", "inner_steps"), [(3, 220), (10, 700)])
def test_random_kills_lose_no_version_and_count_nothing_twice(
    tmp_path: Path, num_kills: int, inner_steps: int
) -> None:
    run_file = write_run(tmp_path, dict.fromkeys(ISLANDS, ""), inner_steps=inner_steps)
    config = load_config(run_file)
    seed = random.SystemRandom().randrange(2**32)

    with LocalRun(config) as run:
        killer = KillerOfEither(run, random.Random(seed), num_kills)
        code = killer.let_run()
    story = f"seed {seed}, {killer.kills}, both dead {killer.num_both_dead} times"

    assert code == 0, f"{story}\n{all_logs(run.state.root)}"
    assert killer.kills.total() == num_kills, f"the run was over too soon: {story}"
    assert 1 <= killer.kills["coordinator"] <= int(MAX_COORDINATOR_SHARE * num_kills)
    finished = FinishedRun(run)
    records = finished.last_records()
    assert finished.ending_digests() == {tuple(record.digest.hex() for record in records)}
    schedule = build_schedule(config.outer, config.run.inner_steps)
    sends = [p for step in range(1, inner_steps + 1) for p in schedule.due(step)]
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
        headers = [header for header in indexed_headers(run.state) if header["fragment_id"] == p]
        assert [header["version"] for header in headers] == list(range(record.version + 1))
        for island in ISLANDS:
            counted = [c for h in headers for c in h["contributors"] if c["island"] == island]
            assert len(counted) == record.version
            assert sum(c["weight_tokens"] for c in counted) == inner_steps * 128, "every token once"
