"""SIGKILL of one of two syncers of a real run: the other's fragments are published on.

The run comes to its end, can be exported, and be stopped and resumed.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT

import pytest

from diloco.checkpoint.published import read_published
from diloco.checkpoint.run_checkpoints import membership_of
from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.island.layout import build_schedule
from diloco.launch.local import LocalRun, find_resume_step
from diloco.report.repair import repair_run
from diloco.report.replay import replay_run
from diloco.state_dir import StateDir, holder, read_endpoint
from diloco.versions.pins import pinned_steps
from diloco.versions.record import versions_in
from diloco.versions.repair import Condition
from diloco.versions.replay import ReplayVerdict
from tests.faults.killer import Killer
from tests.run_files import FinishedRun, all_logs, indexed_headers, write_run

pytestmark = pytest.mark.timeout(300)

ISLANDS = dict.fromkeys(("east", "west"), "")
TWO = "coordinator.num_syncers=2"
LOOK_S = 0.02
#: Nothing of the other syncer waits for an island, so that all it lacks would be because of us.
ON_ARRIVAL = [
    TWO,
    "outer.preset=decoupled",
    "outer.grace=50ms",
    "outer.round_deadline=20s",
]


@dataclass
class Absence:
    """A time in which a syncer was dead, and what the other one had published, and did then."""

    seconds: float
    before: int
    published: int


class KillerOfSecond(Killer):
    """Kills the second syncer as often as asked, each time after it has published once more."""

    def __init__(self, run: LocalRun, num_kills: int) -> None:
        super().__init__(run, num_kills)
        self.absences: list[Absence] = []

    def run(self) -> None:
        kept, victim = self.run_.state.of_syncers(("syncer-0", "syncer-1"))
        while len(self.absences) < self.num_kills:
            pid = self.until(victim, other_than=0, after=num_versions(victim))
            if pid is None:
                return
            published, killed_at = num_versions(kept), time.monotonic()
            os.kill(pid, signal.SIGKILL)
            if self.until(victim, other_than=pid, after=-1) is None:
                return
            seconds = time.monotonic() - killed_at
            self.absences.append(Absence(seconds, published, num_versions(kept) - published))

    def until(self, victim: StateDir, *, other_than: int, after: int) -> int | None:
        """Wait for another process that serves, and for more versions; None: the run is over."""
        while not self.is_over.wait(LOOK_S):
            pid = serving(victim)
            if pid not in (None, other_than) and num_versions(victim) > after:
                return pid
        return None


def serving(state: StateDir) -> int | None:
    """Process of a syncer that serves."""
    endpoint, pid = read_endpoint(state.syncer), holder(state.store_lock)
    is_its_own = endpoint is not None and endpoint.pid == pid and endpoint.address
    return pid if is_its_own else None


def num_versions(state: StateDir) -> int:
    """Versions of a syncer's fragments after the first, together."""
    return sum(max(versions_in(d), default=0) for d in state.store.glob("fragment-[0-9]*"))


def run_and_kill(config: Config, num_kills: int) -> tuple[FinishedRun, KillerOfSecond]:
    with LocalRun(config) as run:
        killer = KillerOfSecond(run, num_kills)
        code = killer.let_run()
    assert code == 0, f"exit code {code}\n{all_logs(run.state.root)}"
    assert len(killer.absences) == num_kills, f"the run was over too soon: {killer.absences}"
    return FinishedRun(run), killer


def check_whole(finished: FinishedRun) -> None:
    """Check that both syncers have what they were given, and all ranks what they published."""
    state, plan = finished.state, finished.plan
    own = [json.loads(each.fragments.read_text()) for each in state.syncers]
    assert len(own) == 2 and all(own)
    assert sorted(own[0] + own[1]) == [fragment.fragment_id for fragment in plan.fragments]
    for each, fragment_ids in zip(state.syncers, own, strict=True):
        stored = {int(path.name[-4:]) for path in each.store.glob("fragment-[0-9]*")}
        assert stored == set(fragment_ids), "nobody has another's"
    records = finished.last_records()
    assert finished.ending_digests() == {tuple(record.digest.hex() for record in records)}
    versions = Counter((h["fragment_id"], h["version"]) for h in indexed_headers(state))
    assert set(versions.values()) == {1}
    assert versions.keys() == {
        (record.fragment_id, v) for record in records for v in range(record.version + 1)
    }
    published = read_published(state)
    assert published.is_final
    assert [f.digest for f in published.fragments] == [r.digest.hex() for r in records]


@pytest.mark.slow
def test_a_scheduled_run_comes_to_its_end_though_one_syncer_is_killed(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path, ISLANDS, inner_steps=20), [TWO])

    finished, _ = run_and_kill(config, num_kills=1)

    check_whole(finished)
    schedule = build_schedule(config.outer, config.run.inner_steps)
    for record in finished.last_records():
        assert record.version == schedule.num_sends(record.fragment_id) + 1, "and the flush"


@pytest.mark.slow
def test_on_arrival_the_other_syncer_publishes_on_while_one_is_killed_again_and_again(
    tmp_path: Path,
) -> None:
    run_file = write_run(tmp_path, ISLANDS, inner_steps=900, num_fragments=4, overlap_steps=2)

    finished, killer = run_and_kill(load_config(run_file, ON_ARRIVAL), num_kills=4)

    check_whole(finished)
    kept = finished.state.syncers[0]
    num_flushed = len(json.loads(kept.fragments.read_text()))
    unfinished = [a for a in killer.absences if a.before < num_versions(kept) - num_flushed]
    assert len(unfinished) > 1, f"it was through too soon: {killer.absences}"
    assert all(absence.published > 0 for absence in unfinished), killer.absences
    for island in ISLANDS:
        assert not any(e["blocked_s"] > 1.0 for e in finished.of_kind(island, "fragment_merged"))


@pytest.mark.slow
def test_a_run_with_two_syncers_is_stopped_and_resumed(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, ISLANDS, inner_steps=120, num_fragments=3)
    config = load_config(run_file, [TWO, "checkpoint.every_inner_steps=0"])

    with LocalRun(config) as run:

        def look() -> None:
            if not run.request.number and num_versions(run.state.syncers[0]) > 2:
                run.request.note(SIGINT)

        run.start()
        code = run.wait(look)
        run.wait_for_coordinator()
        assert code == 0 and run.is_stopped, all_logs(run.state.root)
    places = [each.fragments.read_text() for each in run.state.syncers]
    run.state.syncers[1].fragments.write_text("[7]")  # rotten; that syncer is told again
    step = find_resume_step(config, None, print, start="diloco local")
    with LocalRun(config, resume_step=step) as resumed:
        resumed.start()
        assert resumed.wait(lambda: None) == 0, all_logs(run.state.root)
        resumed.wait_for_coordinator()

    assert [each.fragments.read_text() for each in run.state.syncers] == places
    finished = FinishedRun(resumed)
    records = finished.last_records()
    assert {record.timeline for record in records} == {1}
    assert finished.ending_digests() == {tuple(record.digest.hex() for record in records)}
    at_stop = read_published(resumed.state, at_step=step)
    assert all(fragment.timeline == 0 for fragment in at_stop.fragments)


@pytest.mark.slow
def test_a_run_in_which_nobody_waits_is_cut_resumed_and_made_again(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, ISLANDS, inner_steps=400, num_fragments=4, overlap_steps=2)
    options = [*ON_ARRIVAL, "outer.keep_contributions=all"]
    often = load_config(run_file, options).total_tokens // 10
    config = load_config(run_file, [*options, f"checkpoint.every_tokens={often}"])

    killed: list[int] = []
    with LocalRun(config) as run:
        kept, victim = run.state.of_syncers(("syncer-0", "syncer-1"))

        def look() -> None:
            pins = set(pinned_steps(kept.store)).intersection(pinned_steps(victim.store))
            pid = serving(victim)
            if run.request.number:
                return
            if pins and pid is not None and not killed:
                os.kill(pid, signal.SIGKILL)
                killed.extend([pid, max(pins)])
            elif killed and pid not in (None, killed[0]) and max(pins) > killed[1]:
                run.request.note(SIGINT)

        run.start()
        code = run.wait(look)
        run.wait_for_coordinator()
        assert code == 0 and run.is_stopped, f"exit code {code}\n{all_logs(run.state.root)}"
    number = find_resume_step(config, None, print, start="diloco local")
    membership = membership_of(config)
    assert membership is not None and membership.checkpoints[-1] == number
    assert all(number in pinned_steps(each.store) for each in run.state.syncers)
    stopped = replay_run(run.state)
    with LocalRun(config, resume_step=number) as resumed:
        resumed.start()
        assert resumed.wait(lambda: None) == 0, all_logs(run.state.root)
        resumed.wait_for_coordinator()

    finished = FinishedRun(resumed)
    records = finished.last_records()
    assert {record.timeline for record in records} == {1}
    assert all(record.merged_tokens >= config.total_tokens for record in records)
    assert finished.ending_digests() == {tuple(record.digest.hex() for record in records)}
    assert {each.verdict for each in stopped.versions} == {ReplayVerdict.RECOMPUTED}
    made = {v.fragment_id: [] for v in stopped.versions}
    for each in replay_run(run.state).versions:
        assert each.verdict in (ReplayVerdict.RECOMPUTED, ReplayVerdict.ABANDONED), each
        if each.verdict is ReplayVerdict.RECOMPUTED:
            made[each.fragment_id].append(each.version)
    assert made == {r.fragment_id: [*range(1, r.version + 1)] for r in records}
    assert {finding.condition for finding in repair_run(run.state)} == {Condition.WHOLE}
