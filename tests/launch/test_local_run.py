"""`LocalRun` and its coordinator: restarts within a budget, a stop that is passed on.

Coordinator and islands are shell processes that do what a real one would at that moment.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.errors import CoordinatorUnavailable
from diloco.launch import local
from diloco.launch.local import LocalRun
from diloco.launch.process.ending import Interrupted, StopRequest
from diloco.launch.process.restarts import RestartBudget
from tests.run_files import write_run

SLEEPS = "exec sleep 60"
#: Binds an address, then heeds SIGTERM as a coordinator does that has stopped gracefully.
STOPS = """
trap 'exit 143' TERM
echo '{"address": "127.0.0.1:1", "pid": '$$'}' > coordinator.json.new
mv coordinator.json.new coordinator.json
while :; do sleep 0.05; done
"""
#: Binds an address, then ends as one does whose run has finished.
FINISHES = STOPS.replace("while :; do sleep 0.05; done", "sleep 0.5")
Make = Callable[..., LocalRun]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    runs: list[LocalRun] = []
    for name, seconds in (("_GONE_S", 0.2), ("_END_S", 0.5), ("_ASK_AGAIN_S", 0.1)):
        monkeypatch.setattr(local, name, seconds)

    def build(
        *coordinators: str,
        island: str = SLEEPS,
        num_graceful: int = 1,
        resume_step: int | None = None,
    ) -> LocalRun:
        """Start a run whose coordinator is each of these scripts in turn, the last one for ever."""
        scripts = list(coordinators)

        def spawn(self: LocalRun, _: list[str], name: str, *__: object) -> subprocess.Popen[bytes]:
            script = island
            if name == "coordinator":
                script = scripts.pop(0) if len(scripts) > 1 else scripts[0]
            return subprocess.Popen(["sh", "-c", script], cwd=self.state.root)

        monkeypatch.setattr(LocalRun, "_spawn", spawn)
        config = load_config(write_run(tmp_path, {"east": "", "west": ""}))
        request, budget = StopRequest(num_graceful), RestartBudget(2, 0.01, 60.0)
        run = LocalRun(config, request, resume_step, _budget=budget)
        runs.append(run)
        return run

    yield build
    for run in runs:
        run.__exit__()
        for process in (*run.islands.values(), *([run.coordinator] if run.coordinator else [])):
            process.wait()  # it was killed, and ends when the machine has a turn for it


def test_a_coordinator_that_dies_again_and_again_ends_the_run(make: Make) -> None:
    run = make(STOPS, "kill -9 $$")
    run.start()
    assert run.coordinator is not None
    run.coordinator.kill()

    with pytest.raises(CoordinatorUnavailable, match="died 3 times in a row") as error:
        run.wait(lambda: None)

    assert error.value.exit_code == 30
    assert run.coordinator_restarts == 3, "the first had served, so its end was nobody's failure"


def test_a_coordinator_that_died_once_is_replaced(make: Make) -> None:
    run = make(STOPS, "exit 1", STOPS, island="sleep 1")
    run.start()
    assert run.coordinator is not None
    run.coordinator.kill()

    assert run.wait(lambda: None) == 0

    assert run.coordinator_restarts == 2


def test_a_run_that_ended_without_an_island_that_was_away_has_not_failed(make: Make) -> None:
    run = make(FINISHES)
    run.start()
    with pytest.raises(CoordinatorUnavailable, match="ended before the islands"):
        run.wait(lambda: None)
    outer = run.config.outer.model_copy(update={"merge": "on_arrival"})
    run.config = run.config.model_copy(update={"outer": outer})

    assert run.wait(lambda: None) == 0


def test_a_coordinator_that_is_killed_again_and_again_takes_nothing_of_the_budget(
    make: Make,
) -> None:
    run = make(STOPS)
    run.start()
    kills: list[int] = []

    def kill_when_it_serves() -> None:
        assert run.coordinator is not None
        if len(kills) == 5:
            run.request.note(signal.SIGINT)
        elif run._is_bound and run.coordinator.pid not in kills:
            kills.append(run.coordinator.pid)
            run.coordinator.kill()

    run.wait(kill_when_it_serves)

    assert run.coordinator_restarts == 5
    assert run._budget.used == 0


@pytest.mark.parametrize("name", ["coordinator", "east"])
def test_what_is_taken_down_stays_away_until_it_is_brought_back(make: Make, name: str) -> None:
    run = make(STOPS)
    run.start()
    processes = lambda: {"coordinator": run.coordinator, **run.islands}  # noqa: E731
    first, looks = processes()[name], 0
    run.take_down(name, signal.SIGKILL)

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            assert processes()[name] is first, "nobody else started it again"
            assert run.bring_back(name)
        elif processes()[name] is not first and run._is_bound:
            run.request.note(signal.SIGINT)

    assert run.wait(look) == 0

    assert first is not None
    assert first.returncode == -signal.SIGKILL
    assert run._budget.used == 0


def test_the_first_signal_is_passed_on_and_islands_that_have_left_are_not_awaited(
    make: Make,
) -> None:
    run = make(STOPS)
    run.start()
    run.request.note(signal.SIGINT)

    code = run.wait(lambda: None)
    run.wait_for_coordinator()

    assert code == 0
    assert run.coordinator is not None
    assert (run.coordinator.returncode, run.is_stopped) == (143, True)


def test_a_stop_reaches_the_coordinator_that_is_started_again(make: Make) -> None:
    run = make(STOPS)
    run.start()
    assert run.coordinator is not None
    run.coordinator.kill()
    run.coordinator.wait()
    run.request.note(signal.SIGTERM)

    run.wait(lambda: None)
    run.wait_for_coordinator()

    assert (run.coordinator_restarts, run.is_stopped) == (1, True)


def test_a_second_signal_ends_the_wait(make: Make) -> None:
    run = make(STOPS.replace("exit 143", ":"))
    run.start()
    run.request.note(signal.SIGINT)
    run.request.note(signal.SIGTERM)

    with pytest.raises(Interrupted) as interrupted:
        run.wait(lambda: None)

    assert interrupted.value.exit_code == 130


def test_an_island_that_fails_on_the_way_ends_a_stop(make: Make) -> None:
    run = make(STOPS.replace("exit 143", ":"), island="exec sh -c 'sleep 1; exit 40'")
    run.start()
    run.request.note(signal.SIGINT)

    assert run.wait(lambda: None) == 40


def test_a_signal_before_the_coordinator_is_there_ends_the_start(make: Make) -> None:
    run = make(SLEEPS)
    run.request.note(signal.SIGHUP)

    with pytest.raises(Interrupted):
        run.start()

    assert run.islands == {}


def test_a_coordinator_that_verifies_what_it_resumes_is_given_its_time(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_START_S", 0.0)
    late = make(f"sleep 0.6; {STOPS}")
    with late, pytest.raises(CoordinatorUnavailable, match="did not start"):
        late.start()

    run = make(f"sleep 0.6; {STOPS}", resume_step=5)
    run.state.journal.touch()
    run.start()

    assert sorted(run.islands) == ["east", "west"]


def test_which_island_ended_first_and_how_is_told_at_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    run = make(STOPS, island="sleep 0.4; exit 50")
    run.start()
    run.islands["west"].kill()

    assert run.wait(lambda: None) == -signal.SIGKILL

    assert list(run.ended.items()) == [("west", -signal.SIGKILL), ("east", 50)]
    assert "island west has ended with exit code -9: " in caplog.text


def test_a_coordinator_that_ends_instead_of_resuming_is_not_awaited(make: Make) -> None:
    with pytest.raises(CoordinatorUnavailable, match=r"did not start \(exit code 2\)"):
        make("exit 2", resume_step=5).start()
