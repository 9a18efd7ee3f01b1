"""A syncer and a coordinator whose files may not grow for a while: the run waits and goes on."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.launch.local import LocalRun
from diloco.state_dir import holder
from diloco.versions.frames import headers_in
from tests.run_files import FinishedRun, all_logs, indexed_headers, write_run

#: Files may have so many bytes while the disk is full: logs have fewer, what is durable more.
LIMIT = 40_000
FULL_S = 2.5


class Filler:
    """Limits the files of a process once there are some versions, and lets them grow again."""

    def __init__(self, run: LocalRun, victim: str) -> None:
        self.state = run.state
        self.victim = victim
        self.pid = 0
        self.until = 0.0
        self.num_versions = 0
        self.is_over = False

    def look(self) -> None:
        log = (self.state.root / f"{self.victim}.log").read_text() if self.pid else ""
        if self.is_over:
            return
        if not self.pid:
            if self.newest() < 3:
                return
            lock = self.state.store_lock
            lock = lock if self.victim == "syncer" else self.state.coordinator_lock
            self.pid = holder(lock) or 0
            self.limit(LIMIT)
        elif not self.until and "the disk is full" in log:
            self.until = time.monotonic() + FULL_S
            self.num_versions = self.newest()
        elif self.until and time.monotonic() > self.until:
            self.num_versions = self.newest() - self.num_versions
            self.limit(resource.RLIM_INFINITY)
            self.is_over = True

    def limit(self, num_bytes: int) -> None:
        _, hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (num_bytes, hard))

    def newest(self) -> int:
        fragments = self.state.store.glob("fragment-*")
        return max((h["version"] for path in fragments for h in headers_in(path)), default=-1)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("victim", "snapshot_rounds"), [("syncer", 1), ("syncer", 16), ("coordinator", 16)]
)
def test_a_run_goes_on_by_itself_when_there_is_room_again(
    tmp_path: Path, victim: str, snapshot_rounds: int
) -> None:
    inner_steps = 150
    run_file = write_run(tmp_path, {"east": "", "west": ""}, inner_steps=inner_steps)
    config = load_config(run_file, [f"outer.snapshot_rounds={snapshot_rounds}"])

    with LocalRun(config) as run:
        filler = Filler(run, victim)
        run.start()
        code = run.wait(filler.look)
        run.wait_for_coordinator()
    logs = all_logs(run.state.root)

    assert code == 0, logs
    assert filler.is_over, f"the disk was never found full\n{logs}"
    log = (run.state.root / f"{victim}.log").read_text()
    assert log.count("the disk is full") == 1, log
    assert "there is room" in log, log
    assert run.state.syncer_log.read_text().count("syncer starting") == 1
    if victim == "syncer":
        assert filler.num_versions == 0, "a version without room"
    finished = FinishedRun(run)
    for record in finished.last_records():
        headers = [h for h in indexed_headers(run.state) if h["fragment_id"] == record.fragment_id]
        assert [header["version"] for header in headers] == list(range(record.version + 1))
        for island in ("east", "west"):
            counted = [c for h in headers for c in h["contributors"] if c["island"] == island]
            assert sum(c["weight_tokens"] for c in counted) == inner_steps * 128, "every token once"
