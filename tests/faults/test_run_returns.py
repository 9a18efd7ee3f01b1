"""A run whose published values are ruined returns to its last good checkpoint by itself.

Ruined by its own outer learning rate, which an operator sets far too high for some rounds: no
contribution is at fault, and no guard of a merge can see it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest

from diloco.checkpoint.run_checkpoints import open_journal
from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.coordinator.status import operate
from diloco.durable import write_json
from diloco.errors import CoordinatorUnavailable
from diloco.faults.process import STEP_VARIABLE, VARIABLE, training_name, training_path
from diloco.launch.local import LocalRun
from diloco.security.security import Security
from diloco.transport.identity import Role
from tests.run_files import FinishedRun, all_logs, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_INNER_STEPS = 400
#: Inner steps of an island between two checkpoints.
_APART = 20
_SCHEDULED = (f"checkpoint.every_inner_steps={_APART}",)
_DECOUPLED = (
    "outer.preset=decoupled", "outer.grace=200ms", "data.handover_samples=64",
    f"checkpoint.every_tokens={2 * 128 * _APART}",
)  # fmt: skip
NO_PACE = MappingProxyType[str, str]({})
#: Seconds of an inner step, at least: a fast island could end the run before a slow one began.
_PACE = {STEP_VARIABLE: "0.05"}
_RUIN_FROM, _RUIN_TO = 100, 140


def operated(run: LocalRun, key: str, value: str) -> None:
    """Set a policy of the run under way."""

    async def told() -> str:
        security = Security.of(run.config, Role.OPERATOR)
        transport = security.transport(run.address, Role.COORDINATOR)
        try:
            return await operate(transport, "set", {"key": key, "value": value})
        finally:
            await transport.close()

    asyncio.run(told())


class Ruin:
    """Sets the learning rate after one checkpoint, and back after a later one, where it is to."""

    def __init__(self, run: LocalRun, *, is_over: bool) -> None:
        self._run = run
        self._left = ["30", "0.7"] if is_over else ["30"]

    def __call__(self) -> None:
        at = _RUIN_FROM if self._left[:1] == ["30"] else _RUIN_TO
        if self._left and newest_checkpoint(self._run.config) >= at:
            operated(self._run, "outer.optimizer.lr", self._left.pop(0))


class Uphill:
    """Has all islands step against their gradients, after one checkpoint and until a later one.

    What no guard can tell from training where all do it, and what needs no policy to be set:
    islands that merge among themselves take none.
    """

    def __init__(self, run: LocalRun, directory: Path) -> None:
        self._run, self._directory = run, directory
        self._left = [(_RUIN_FROM, {"how": "signs"}), (_RUIN_TO, {})]

    def __call__(self) -> None:
        if self._left and newest_checkpoint(self._run.config) >= self._left[0][0]:
            _, what = self._left.pop(0)
            islands = self._run.config.islands
            write_json(training_path(self._directory), {training_name(i): what for i in islands})


def newest_checkpoint(config: Config) -> int:
    """Inner step of the newest checkpoint; of a cut about that."""
    found = [path.parent.name for path in config.checkpoint_dir.glob("east/*-*/manifest.json")]
    steps = [int(number) * (1 if kind == "step" else _APART)
             for kind, _, number in (name.partition("-") for name in found)
             if kind in ("step", "cut")]  # fmt: skip
    return max(steps, default=0)


def run_file(directory: Path, settings: Sequence[str] = _SCHEDULED) -> Config:
    file = write_run(directory, {"east": "", "west": ""}, inner_steps=_INNER_STEPS)
    return load_config(file, [*settings, "evaluation.num_sequences=32"])


def finished(
    config: Config,
    on_look: Callable[[LocalRun], Callable[[], None]],
    environment: Mapping[str, str] = NO_PACE,
) -> FinishedRun:
    with LocalRun(config, look_s=0.1, environment=environment) as run:
        run.start()
        code = run.wait(on_look(run))
        run.wait_for_coordinator()
    assert code == 0, f"exit code {code}\n{all_logs(run.state.root)}"
    return FinishedRun(run)


def last_loss(run: FinishedRun) -> float:
    events = run.of_kind("east", "evaluated")
    return float([e["nats_per_byte"] for e in events if e["parameters"] == "published"][-1])


def alarms(run: FinishedRun) -> list[str]:
    with open_journal(run.state.journal) as journal:
        return [e.content["kind"] for e in journal.audit_rows() if e.kind == "alarm"]


def killing(run: LocalRun, lines: list[str]) -> Callable[[], None]:
    """Kill the coordinator as soon as its log has the next of some lines."""

    def look() -> None:
        log = run.state.root / "coordinator.log"
        if lines and lines[0] in log.read_text() and run.coordinator is not None:
            lines.pop(0)
            run.coordinator.send_signal(signal.SIGKILL)

    return look


def test_a_ruined_run_returns_by_itself_and_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    undisturbed = finished(run_file(tmp_path / "undisturbed"), lambda run: lambda: None)
    ruined = finished(run_file(tmp_path / "ruined"), lambda run: Ruin(run, is_over=True))

    assert alarms(undisturbed) == [], "no false alarm"
    assert "return" in alarms(ruined)
    assert {record.timeline for record in ruined.last_records()} == {1}
    assert last_loss(ruined) < 1.01 * last_loss(undisturbed)
    steps = [event["inner_step"] for event in ruined.of_kind("east", "inner_step")]
    assert steps == list(range(1, _INNER_STEPS + 1)), "every inner step stands once"


def test_a_run_in_which_nobody_waits_returns_to_a_cut(tmp_path: Path) -> None:
    config = run_file(tmp_path, _DECOUPLED)

    run = finished(config, lambda run: Ruin(run, is_over=True), _PACE)

    assert "return" in alarms(run)
    timelines = {record.timeline for record in run.last_records()}
    assert timelines in ({1}, {2}), "a second one where the first came before the ruin was over"
    assert last_loss(run) < 3.5
    assert {len(digests) for digests in run.ending_digests()} == {2}


@pytest.mark.parametrize(
    "line",
    ["the run returns by itself", "now timeline 1", "store restored", "syncer starting"],
)
def test_a_coordinator_that_is_killed_at_any_moment_of_a_return_goes_on_with_it(
    tmp_path: Path, line: str
) -> None:
    def on_look(run: LocalRun) -> Callable[[], None]:
        ruin, lines = Ruin(run, is_over=True), [line]
        kill, log = killing(run, lines), run.state.root / "coordinator.log"

        def look() -> None:
            ruin()
            until = time.monotonic() + 0.1
            while lines and "bad in a row" in log.read_text() and time.monotonic() < until:
                kill()

        return look

    run = finished(run_file(tmp_path), on_look)

    assert {record.timeline for record in run.last_records()} == {1}
    assert last_loss(run) < 4.0


def test_a_run_that_diverges_again_ends_with_the_command(tmp_path: Path) -> None:
    config = run_file(tmp_path)
    with LocalRun(config, look_s=0.1) as run:
        run.start()
        with pytest.raises(CoordinatorUnavailable) as caught:
            code = run.wait(Ruin(run, is_over=False))
            pytest.fail(f"ended with {code}\n{all_logs(run.state.root)}")
        log = (run.state.root / "coordinator.log").read_text()

    assert caught.value.exit_code == 20
    assert "2 returns to a good checkpoint did not help (evaluation.max_returns = 2)" in log
    assert "diloco coordinator RUN.toml --resume --at " in log


def test_who_is_refused_is_left_out_when_the_run_is_ruined_again(tmp_path: Path) -> None:
    file = write_run(tmp_path, dict.fromkeys(("east", "north", "west"), ""), inner_steps=300)
    config = load_config(file, [*_SCHEDULED, "evaluation.num_sequences=32"])
    (chaos := tmp_path / "chaos").mkdir()
    write_json(training_path(chaos), {})

    with LocalRun(config, look_s=0.1, environment={**_PACE, VARIABLE: str(chaos)}) as run:
        log, left = run.state.root / "coordinator.log", ["poison", "30", "0.7"]

        def look() -> None:
            newest = newest_checkpoint(config)
            match left:
                case ["poison", *_] if newest >= _RUIN_FROM // 2:
                    write_json(training_path(chaos), {training_name("west"): {"how": "labels"}})
                    left.pop(0)
                case ["30", *_] if newest >= _RUIN_FROM:
                    operated(run, "outer.optimizer.lr", left.pop(0))
                case ["0.7"] if "now timeline 2" in log.read_text():
                    with contextlib.suppress(CoordinatorUnavailable):  # as a new timeline begins
                        operated(run, "outer.optimizer.lr", left[0])
                        left.pop(0)

        run.start()
        run.wait(look)
        run.wait_for_coordinator()
        codes = {name: process.poll() for name, process in run.islands.items()}

    assert codes == {"east": 0, "north": 0, "west": 41}, all_logs(run.state.root)
    assert last_loss(FinishedRun(run)) < 4.0
