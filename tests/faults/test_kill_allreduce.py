"""SIGKILL in an all-reduce of real processes over gRPC: an island in each phase, the coordinator.

Phases are seen from outside, by what is durable: contributed (nothing of the round yet), staged (a
version that is in doubt), committed (the journal's word, before the victim has heard it).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.errors import CoordinatorUnavailable
from diloco.faults.process import STEP_VARIABLE
from diloco.launch.local import LocalRun
from diloco.outer.fragments import Plan
from diloco.report.repair import repair_run
from diloco.state_dir import StateDir, holder
from diloco.versions.repair import Condition
from diloco.versions.store import FragmentStore
from tests.run_files import all_logs, indexed_headers, write_run
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

OVERRIDES = ("outer.exchange=allreduce",)
#: A version is in doubt for some milliseconds only.
_LOOK_S = 0.003


@dataclass
class Killer:
    """Kills the process that holds a lock, each time a condition comes true, `num_kills` times."""

    lock: Callable[[StateDir], Path]
    is_time: Callable[[StateDir], bool]
    num_kills: int = 1
    num_done: int = 0
    killed_pid: int = 0

    @contextlib.contextmanager
    def at_work(self, state: StateDir) -> Iterator[None]:
        """Watch, in a thread of its own, from here on."""
        is_over = threading.Event()

        def watch() -> None:
            while self.num_done < self.num_kills and not is_over.wait(_LOOK_S):
                self.look(state)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def look(self, state: StateDir) -> None:
        if not self.is_time(state):
            return
        pid = holder(self.lock(state))
        if pid is not None and pid != self.killed_pid:
            os.kill(pid, signal.SIGKILL)
            self.killed_pid = pid
            self.num_done += 1


def of_island(name: str) -> Callable[[StateDir], Path]:
    return lambda state: state.peer(name).store_lock


def of_coordinator(state: StateDir) -> Path:
    return state.coordinator_lock


def newest(state: StateDir, island: str, below: str = "") -> int:
    """Sum over fragments of the newest version of an island, committed or staged."""
    found = list((state.peer(island).store / below).glob("fragment-*/v*.record"))
    versions: dict[Path, int] = {}
    for path in found:
        versions[path.parent] = max(versions.get(path.parent, 0), int(path.stem[1:]))
    return sum(versions.values())


def has_contributed(island: str) -> Callable[[StateDir], bool]:
    return lambda state: newest(state, island) >= 2


def has_staged(island: str) -> Callable[[StateDir], bool]:
    def is_so(state: StateDir) -> bool:
        staged = list((state.peer(island).store / "staged").glob("fragment-*/v*.record"))
        return newest(state, island) >= 2 and bool(staged)

    return is_so


def run_with(directory: Path, islands: Sequence[str], killer: Killer, steps: int = 40) -> LocalRun:
    run_file = write_run(directory, dict.fromkeys(islands, ""), inner_steps=steps)
    run_file.write_text(run_file.read_text() + "[checkpoint]\nevery_inner_steps = 4\n")
    with LocalRun(load_config(run_file, OVERRIDES)) as run:
        with killer.at_work(run.state):
            run.start()
            code = run.wait(lambda: None)
        run.wait_for_coordinator()
    assert code == 0, f"exit code {code}\n{all_logs(run.state.root)}"
    assert killer.num_done, "the run was over before anybody was killed"
    return run


def check_same_bytes(state: StateDir, islands: Sequence[str]) -> None:
    """Check that every island holds what the journal committed last, to the bit."""
    headers = indexed_headers(state)
    for name in islands:
        own = state.peer(name)
        for fragment in Plan.from_json(own.plan.read_text()).fragments:
            committed = [h for h in headers if h["fragment_id"] == fragment.fragment_id]
            assert [h["version"] for h in committed] == list(range(len(committed)))
            record = FragmentStore(own.store, fragment, 4).newest()
            assert record is not None
            assert record.header() == committed[-1]
            counted = [(h["version"], c["island"]) for h in committed for c in h["contributors"]]
            assert len(counted) == len(set(counted)), "nothing is counted twice"
    first, *others = (vectors(state.peer(name)) for name in islands)
    assert all(other == first for other in others)


def vectors(state: StateDir) -> list[bytes]:
    """Theta, published and momentum of every fragment of an island."""
    found = []
    for fragment in Plan.from_json(state.plan.read_text()).fragments:
        record = FragmentStore(state.store, fragment, 4).newest()
        assert record is not None
        for lane in record.lanes:
            found += [v.numpy().tobytes() for v in (lane.theta, lane.published, lane.momentum)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "lock",
    [
        pytest.param(of_coordinator, id="the-coordinator"),
        pytest.param(of_island("west"), id="the-island"),
    ],
)
def test_two_islands_and_one_is_in_doubt(tmp_path: Path, lock: Callable[[StateDir], Path]) -> None:
    killer = Killer(lock, has_staged("west"))

    run = run_with(tmp_path, ("east", "west"), killer, steps=8)

    check_same_bytes(run.state, ("east", "west"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lock", "is_time"),
    [
        pytest.param(of_island("b"), has_contributed("b"), id="an-island-that-has-contributed"),
        pytest.param(of_island("b"), has_staged("b"), id="an-island-in-doubt"),
        pytest.param(of_island("a"), has_staged("c"), id="an-owner-while-another-has-staged"),
        pytest.param(of_coordinator, has_contributed("a"), id="the-coordinator"),
        pytest.param(of_coordinator, has_staged("a"), id="the-coordinator-in-doubt"),
    ],
)
def test_three_islands(
    tmp_path: Path, lock: Callable[[StateDir], Path], is_time: Callable[[StateDir], bool]
) -> None:
    killer = Killer(lock, is_time, num_kills=2)

    run = run_with(tmp_path, ("a", "b", "c"), killer, steps=60)

    check_same_bytes(run.state, ("a", "b", "c"))


@pytest.mark.slow
@pytest.mark.parametrize("num_peers", [1, 3], ids=["one-peer-is-left", "all-peers"])
def test_a_lost_journal_is_made_again_from_peers_and_the_run_goes_on(
    tmp_path: Path, num_peers: int
) -> None:
    islands = ("a", "b", "c")
    run_file = write_run(tmp_path, dict.fromkeys(islands, ""), inner_steps=200)
    run_file.write_text(run_file.read_text() + "[checkpoint]\nevery_inner_steps = 4\n")
    config = load_config(run_file, OVERRIDES)
    with LocalRun(config, environment={STEP_VARIABLE: "0.02"}) as run:
        run.start()
        wait_until(lambda: newest(run.state, "a") >= 12, what=lambda: all_logs(run.state.root))
        for process in (run.coordinator, *run.islands.values()):
            assert process is not None
            process.kill()
    state, held = run.state, [newest(run.state, name) for name in islands]
    for path in state.root.glob("journal.sqlite*"):
        path.unlink()
    with LocalRun(config) as run, pytest.raises(CoordinatorUnavailable):
        run.start()
    assert f"diloco repair {state.root} makes it again" in all_logs(state.root)
    newest_one = islands[held.index(max(held))]
    away = [name for name in islands if name != newest_one][num_peers - 1 :]
    for name in away:
        state.peer(name).root.rename(tmp_path / name)

    (made, *_) = repair_run(state)

    assert made.condition is Condition.REPAIRED
    for name in away:
        (tmp_path / name).rename(state.peer(name).root)
    with LocalRun(config) as run:
        run.start()
        code = run.wait(lambda: None)
        run.wait_for_coordinator()
    assert code == 0, f"exit code {code}\n{all_logs(state.root)}"
    first, *others = (vectors(state.peer(name)) for name in islands)
    assert all(other == first for other in others)
    assert max(h["version"] for h in indexed_headers(state)) >= max(held) // 2
