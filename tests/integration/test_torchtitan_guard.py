"""What of the torchtitan adapter needs no GPU: what it refuses, what it gives the outer loop."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import diloco.integrations
import diloco.island.session  # what the adapter imports of ours is there already
from diloco.errors import ConfigError
from diloco.protocol.island.soundness import Mend
from diloco.trainer.optimizers.optimizer import largest_ratio

MODULE = "diloco.integrations.torchtitan"
PAGE = Path(diloco.integrations.__file__).with_name("README.md")


def install(directory: Path, version: str) -> None:
    """Lay down what says that a version is installed."""
    info = directory / f"torchtitan-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torchtitan\nVersion: {version}\n")


def lay_down_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay down what the adapter imports of torchtitan."""
    for name in ("", ".distributed", ".tools", ".trainer"):
        monkeypatch.setitem(sys.modules, f"torchtitan{name}", ModuleType(f"torchtitan{name}"))
    sys.modules["torchtitan.trainer"].Trainer = Trainer
    sys.modules["torchtitan.distributed"].utils = None
    sys.modules["torchtitan.tools"].utils = SimpleNamespace(device_type="cuda")


def refused(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(ConfigError, match=said):
        importlib.import_module(MODULE)


def test_without_torchtitan_the_command_that_gets_it_is_named(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(PAGE.parents[2])])

    refused(monkeypatch, "which is not installed: pip install torchtitan==0.3.0")


def test_another_version_is_refused_by_number(monkeypatch, tmp_path):
    install(tmp_path, "0.2.2")
    monkeypatch.syspath_prepend(tmp_path)

    refused(monkeypatch, r"is for torchtitan 0\.3\.0, and 0\.2\.2 is installed")


def test_a_machine_without_gpu_is_refused(monkeypatch, tmp_path):
    install(tmp_path, "0.3.0")
    monkeypatch.syspath_prepend(tmp_path)
    lay_down_modules(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    refused(monkeypatch, "needs a GPU, and torch finds none: on CPUs use diloco island")


class Trainer:
    """What torchtitan's `train_step` makes of two micro-batches, in as many lines."""

    Config: Any = None

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 1)
        adamw = torch.optim.AdamW(self.model.parameters(), lr=0.1, weight_decay=0.0)
        self.optimizers = SimpleNamespace(optimizers=[adamw])
        self.parallel_dims = SimpleNamespace(pp_enabled=False, get_optional_mesh=lambda name: None)

    def train_step(self, data_iterator: Any) -> None:
        for _ in range(2):
            self.forward_backward_step(input_dict={}, labels=next(data_iterator))
        for optimizer in self.optimizers.optimizers:
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.05

    def forward_backward_step(self, *, input_dict: Any, labels: torch.Tensor) -> torch.Tensor:
        loss = self.model(labels).square().sum()
        loss.backward()
        return loss


def test_the_outer_step_is_given_the_whole_loss_and_the_bound_of_the_step(monkeypatch, tmp_path):
    """By a stand-in for torchtitan, which needs a GPU."""
    install(tmp_path, "0.3.0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    lay_down_modules(monkeypatch)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    adapter = importlib.import_module(MODULE)
    trainer = object.__new__(adapter.DiLoCoTrainer)
    Trainer.__init__(trainer)
    said = {}
    trainer.outer = SimpleNamespace(
        log=lambda **logged: said.update(logged),
        step=lambda **told: said.update(told),
        mend=Mend.MOMENTS,
        schedule_step=1.0,
    )
    trainer._num_tokens, trainer._followed = 8, []
    (adamw,) = trainer.optimizers.optimizers
    weight = trainer.model.weight
    batches = [torch.ones(2), torch.zeros(2)]
    losses = [trainer.model(batch).square().item() for batch in batches]
    step = adamw.step
    # A flipped bit of a moment.
    adamw.step = lambda: (step(), adamw.state[weight]["exp_avg"].view(-1)[:1].fill_(1e30))

    trainer.train_step(iter(batches))

    assert said["num_tokens"] == 8
    assert said["loss"] == pytest.approx(sum(losses))
    assert said["bound"].update == pytest.approx(0.1 * largest_ratio(0.9, 0.999))
    assert adamw.state[weight]["exp_avg"].view(-1)[0] == 0
    sys.modules.pop(MODULE)
