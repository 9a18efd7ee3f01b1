"""`DiLoCo`'s part in run checkpoints: when, what, and how a start takes up from one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diloco
from diloco.errors import ConfigError, RunStopped
from tests.served_run import ServedRun
from tests.waiting import wait_until

INNER_STEPS = 15
#: Sends after 3, 6, 9, 12, merges 2 steps later: at 4, 8 (not 12) fragments are in flight.
ROUNDS = {"inner_steps_per_round": 6, "num_fragments": 2, "overlap_steps": 2}
EVERY = ["checkpoint.every_inner_steps=4"]
TOKENS = 100


class Loop:
    """A small training loop that saves whatever it is asked to."""

    def __init__(self, seed: int = 1) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.saved: dict[int, dict[str, Any]] = {}
        self.due: list[int] = []

    def step(self, inner_step: int) -> None:
        generator = torch.Generator().manual_seed(inner_step)
        inputs = torch.randn(16, 8, generator=generator)
        (self.model(inputs) - inputs[:, :4]).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, outer: diloco.DiLoCo) -> None:
        for inner_step in range(outer.start_step, outer.inner_steps):
            self.step(inner_step)
            outer.step(num_tokens=TOKENS)
            if outer.checkpoint_due:
                self.due.append(outer.inner_step)
                with outer.checkpointing():
                    self.save(outer)
            if outer.is_stopping:
                break
        outer.finish()

    def save(self, outer: diloco.DiLoCo) -> None:
        state = {"model": self.model, "optimizer": self.optimizer, "outer": outer}
        copies = {name: _copy(part.state_dict()) for name, part in state.items()}
        self.saved[outer.inner_step] = copies

    def load(self, saved: dict[str, Any], outer: diloco.DiLoCo) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        outer.load_state_dict(saved["outer"])

    def values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def _copy(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _copy(value) for name, value in state.items()}
    return state.clone() if isinstance(state, Tensor) else state


@contextmanager
def joined(served: ServedRun, loop: Loop, island: str = "east") -> Iterator[diloco.DiLoCo]:
    config = served.island(island)
    with diloco.connect(config, served.address) as connection:
        yield diloco.DiLoCo(loop.model, config.outer, transport=connection)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedRun]:
    with ServedRun(tmp_path, {"east": ""}, EVERY, inner_steps=INNER_STEPS, **ROUNDS) as served:
        yield served


@pytest.mark.parametrize("step", [4, 8, 12])
def test_resumed_equals_uninterrupted_bit_for_bit(served: ServedRun, step: int) -> None:
    whole, resumed = Loop(), Loop(seed=2)
    with joined(served, whole) as outer:
        whole.train(outer)
        digests = outer.digests
    assert whole.due == [4, 8, 12]
    assert served.reports["east"].checkpoint_steps == [4, 8, 12]
    served.resume(step)

    with joined(served, resumed) as outer:
        assert (outer.resume_step, outer.start_step, outer.inner_step) == (step, step, step)
        resumed.load(whole.saved[step], outer)
        assert outer.num_in_flight == whole_in_flight(step)
        resumed.train(outer)
        assert outer.digests == digests

    assert all(map(torch.equal, resumed.values(), whole.values()))
    assert resumed.due == [due for due in whole.due if due > step]


def whole_in_flight(step: int) -> int:
    return {4: 1, 8: 0, 12: 1}[step]


def test_a_graceful_stop_is_a_checkpoint_and_no_flush(tmp_path: Path) -> None:
    loop = Loop()
    with ServedRun(tmp_path, {"east": ""}, inner_steps=100_000, **ROUNDS) as served:
        served.hold()
        with joined(served, loop) as outer:
            loop.train(outer)
            assert outer.is_stopping
            assert repr(outer).count("stopped") == 1
            assert outer.num_in_flight == 1, "what is in flight is in the checkpoint"

    (stop_step,) = loop.due
    assert stop_step % 3 == 0
    assert list(loop.saved) == [stop_step]
    (leave,) = served.leaves
    assert (leave.exit_code, leave.is_stopped) == (0, True)
    assert leave.reason == f"stopped after inner step {stop_step}"
    assert served.reports["east"].checkpoint_steps == [stop_step]


class Killed(BaseException):
    """Stands for a crash of the loop between its last send and its checkpoint."""


@pytest.mark.parametrize("is_taken_back", [False, True])
def test_a_stop_waits_for_an_island_that_dies_at_it_or_is_taken_back(
    tmp_path: Path, is_taken_back: bool
) -> None:
    islands = {"east": "", "west": ""}
    loops = {"east": Loop(), "west": Loop(), "west again": Loop()}
    save, died_at = loops["west"].save, list[int]()

    def die(outer: diloco.DiLoCo) -> None:
        save(outer)
        wait_until(lambda: served.reports["east"].checkpoint_steps == [outer.inner_step])
        died_at.append(outer.inner_step)
        if is_taken_back:
            served.go_on()
            wait_until(lambda: "east" in served.reports)
            wait_until(lambda: served.reports["east"].inner_step > outer.inner_step)
            served.hold()
        raise Killed

    loops["west"].save = die  # type: ignore[method-assign]

    def run(name: str) -> None:
        with joined(served, loops[name], name.split()[0]) as outer:
            loops[name].train(outer)
            assert outer.is_stopping

    def run_west() -> None:
        with pytest.raises(Killed):
            run("west")
        run("west again")

    with ServedRun(tmp_path, islands, inner_steps=100_000, **ROUNDS) as served:
        served.hold()
        with ThreadPoolExecutor() as threads:
            for future in [threads.submit(run, "east"), threads.submit(run_west)]:
                future.result()

        membership = served.membership
        assert membership.is_stopped and membership.is_stop_complete
        (step,), stop_step = died_at, membership.stop_step
        assert loops["east"].due == [step, stop_step], "its first stop was not the last"
        assert loops["west again"].due == [stop_step]
        assert stop_step is not None and step < stop_step
        with pytest.raises(RunStopped, match=f"stopped after inner step {stop_step}"):
            run("west again")


@pytest.mark.parametrize(
    ("is_ignoring", "told"), [(True, "leave the loop when outer.is_stopping"), (False, "save ins")]
)
def test_a_stop_without_a_checkpoint_or_that_is_ignored_is_refused(
    tmp_path: Path, is_ignoring: bool, told: str
) -> None:
    loop = Loop()
    with ServedRun(tmp_path, {"east": ""}, inner_steps=100_000, **ROUNDS) as served:
        served.hold()
        with pytest.raises(ConfigError, match=told), joined(served, loop) as outer:
            while is_ignoring or not outer.is_stopping:
                loop.step(outer.inner_step)
                outer.step(num_tokens=TOKENS)
            outer.finish()

    assert not served.leaves[-1].is_stopped


def test_a_checkpoint_that_could_not_be_saved_is_not_reported(served: ServedRun) -> None:
    loop = Loop()

    def fail(outer: diloco.DiLoCo) -> None:
        raise OSError(28, "No space left on device")

    loop.save = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="No space left"), joined(served, loop) as outer:
        loop.train(outer)

    assert loop.due == [4]
    assert served.reports["east"].checkpoint_steps == []
    assert "No space left" in served.leaves[0].reason


def step(outer: diloco.DiLoCo, saved: dict[str, Any]) -> None:
    outer.step(num_tokens=TOKENS)


def evaluate(outer: diloco.DiLoCo, saved: dict[str, Any]) -> None:
    with outer.global_parameters():
        pass


def load_other_step(outer: diloco.DiLoCo, saved: dict[str, Any]) -> None:
    outer.load_state_dict({**saved["outer"], "meta": torch.tensor([2, 0, 8, 0, 1])})


def load_less(outer: diloco.DiLoCo, saved: dict[str, Any]) -> None:
    outer.load_state_dict({k: v for k, v in saved["outer"].items() if k != "anchor/1/0"})


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (step, "resumed at inner step 4: load the checkpoint that was saved there"),
        (evaluate, "resumed at inner step 4: load the checkpoint that was saved there"),
        (load_other_step, "is resumed at inner step 4, this outer state is of inner step 8"),
        (load_less, "'anchor/1/0' must be torch.float32"),
    ],
)
def test_a_resumed_run_insists_on_its_checkpoint(
    served: ServedRun, act: Callable[[diloco.DiLoCo, dict[str, Any]], None], told: str
) -> None:
    loop = Loop()
    with joined(served, loop) as outer:
        loop.train(outer)
    served.resume(4)

    with pytest.raises(ConfigError, match=told), joined(served, loop) as outer:
        template = outer.state_dict()
        saved = loop.saved[4]["outer"]
        assert {n: (t.shape, t.dtype) for n, t in template.items()} == {
            n: (t.shape, t.dtype) for n, t in saved.items()
        }
        act(outer, loop.saved[4])


def test_a_start_that_resumes_nothing_refuses_a_checkpoint(served: ServedRun) -> None:
    loop = Loop()
    told = r"nothing is to be resumed at inner step 0.*RUN.toml --resume"
    with pytest.raises(ConfigError, match=told), joined(served, loop) as outer:
        outer.load_state_dict(outer.state_dict())
