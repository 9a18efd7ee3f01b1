"""What `diloco chaos` does to a rank's training: only where it is said, once, and it is told."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diloco.chaos.plan import Kind
from diloco.durable import write_json
from diloco.faults import training as module
from diloco.faults.process import (
    STEP_VARIABLE,
    VARIABLE,
    fired,
    is_read,
    training_name,
    training_path,
)
from diloco.faults.training import RankFaults, rank_faults
from diloco.protocol.island.soundness import StepBound
from diloco.trainer.launched_step import InnerMetrics, LaunchedStep

WHO = training_name("east")


class Trainer(SimpleNamespace):
    """A model of one matrix and its optimizer; a step subtracts a hundredth."""

    def __init__(self) -> None:
        model = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        model.weight.grad = torch.ones(4, 4)
        optimizer.step()
        super().__init__(model=model, optimizer=optimizer)

    @property
    def values(self) -> torch.Tensor:
        return self.model.weight.detach()

    def inner_step(self, inner_step: int, schedule_step: int) -> Any:
        with torch.no_grad():
            self.model.weight -= 0.01

    def step(self, faults: RankFaults) -> None:
        made: Any = self
        faults.step(made, 0, 0)


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankFaults:
    monkeypatch.setattr(module, "_READ_S", 0.0)
    return rank_faults({VARIABLE: str(tmp_path)}, "east", island_rank=0, num_ranks=1)


def test_without_chaos_nothing_is_done() -> None:
    faults = rank_faults({}, "east", island_rank=0, num_ranks=1)
    text: Any = object()

    assert type(faults) is RankFaults
    assert faults.around(text) is text


@pytest.mark.parametrize("what", ["model", "exp_avg", "exp_avg_sq"])
def test_one_bit_flips_once(tmp_path: Path, faults: RankFaults, what: str) -> None:
    trainer = Trainer()
    assert is_read(tmp_path, WHO)
    entry = {"number": 5, "what": what, "bit": 30, "seed": 7}
    write_json(training_path(tmp_path), {WHO: entry})
    state = trainer.optimizer.state[trainer.model.weight]
    of = {"model": trainer.values} | {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
    before = of[what].clone()

    for _ in range(3):
        trainer.step(faults)

    moved = 0.03 if what == "model" else 0.0
    (odd,) = (~torch.isclose(of[what].flatten(), before.flatten() - moved)).nonzero()
    assert odd == 7
    assert fired(tmp_path, WHO) == {Kind.FLIP_BIT.value: 1}


@pytest.mark.parametrize(("how", "expected"), [("scale", 0.0), ("signs", 1.01)])
def test_updates_are_poisoned_as_long_as_it_is_said(
    tmp_path: Path, faults: RankFaults, how: str, expected: float
) -> None:
    trainer = Trainer()
    write_json(training_path(tmp_path), {WHO: {"how": how, "seed": 1}})

    trainer.step(faults)
    write_json(training_path(tmp_path), {})
    trainer.step(faults)

    assert torch.allclose(trainer.values, torch.tensor(expected - 0.01), atol=1e-5)
    assert fired(tmp_path, WHO) == {Kind.POISON.value: 1}


def test_tokens_come_in_another_order(tmp_path: Path, faults: RankFaults) -> None:
    tokens = torch.arange(200).view(2, 100)
    text = faults.around(SimpleNamespace(batch=lambda inner_step: tokens))
    assert text.batch(0) is tokens

    write_json(training_path(tmp_path), {WHO: {"how": "labels", "seed": 1}})
    Trainer().step(faults)

    assert not torch.equal(text.batch(1), tokens)
    assert torch.equal(text.batch(1).flatten().sort().values, tokens.flatten())


def test_inner_steps_take_as_long_as_a_plan_asks_for() -> None:
    made = (InnerMetrics(1, 0.0, 0.0, 0.0, 8, duration_s=s) for s in (0.01, 0.5))
    short, long = (LaunchedStep(8, StepBound(), False, functools.partial(replace, m)) for m in made)
    faults = rank_faults({STEP_VARIABLE: "0.1"}, "east", island_rank=0, num_ranks=1)

    def step(made: LaunchedStep) -> LaunchedStep:
        trainer: Any = SimpleNamespace(inner_step=lambda inner_step, schedule_step: made)
        return faults.step(trainer, 0, 0)

    began = time.monotonic()

    assert step(short).read().duration_s == 0.1
    assert step(long).read().duration_s == 0.5
    assert step(short).is_known and step(long).is_known, "on all ranks, whatever each of them took"
    assert time.monotonic() - began >= 0.18
