"""Runs that are to be started from elsewhere: what they find, or why they refuse it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco.checkpoint.warm_start import WarmStart, find_warm_start
from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.trainer.models.model import LlamaShape
from tests.launch.stored_run import random_parameters, tiny_run


class WarmRun:
    """A run that is to be started from elsewhere, and parameters of its model."""

    def __init__(self, directory: Path, *, tied: bool = False) -> None:
        self.run_file = tiny_run(directory / "new", tied=tied)
        self.shape = LlamaShape.from_config(load_config(self.run_file).model)
        self.parameters = random_parameters(self.shape, 1)

    def config(self, source: Path | str, *overrides: str, island: str = "east") -> Config:
        return load_config(self.run_file, [f"run.warm_start={source}", *overrides], island)

    def find(self, source: Path | str, *overrides: str, island: str = "east") -> WarmStart:
        found = find_warm_start(self.config(source, *overrides, island=island))
        assert found is not None
        return found

    def refusal(self, source: Path | str, *overrides: str) -> str:
        with pytest.raises(ConfigError) as refusal:
            self.find(source, *overrides)
        return str(refusal.value)

    def assert_holds(self, found: WarmStart, expected: Mapping[str, Tensor] | None = None) -> None:
        for name, value in (expected or self.parameters).items():
            read = found.read("model", name)
            assert read.dtype == torch.float32
            assert torch.equal(read, value), name
