"""Golden traces: runs of one parameter whose histories are computed by hand.

`golden.toml` says what each run is and what comes out. Here they run in one process, under a
virtual clock: real syncer, exchanges and outer loops, no sockets.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from diloco.bench.run_values import run_values
from diloco.config.load import config_of
from diloco.config.schema import Config
from diloco.launch.loopback_run import World, run_islands
from diloco.trainer.launched_step import InnerMetrics

#: What each island subtracts from the parameter in an inner step, and where that starts.
DESCENT = {"a": 1.0, "b": 3.0}
START = 16.0
_OUTER = {
    "preset": "classic",
    "inner_steps_per_round": 4,
    "optimizer": {"name": "sgd", "lr": 1.0},
    "flush": False,
}
#: Loss of every inner step; it says nothing.
_LOSS = 1.0


@dataclass(frozen=True, slots=True)
class Trace:
    """A run, and what comes out.

    Attributes:
        name: What it shows.
        inner_steps: Of the run.
        outer: Keys of [outer] besides those that all have; JSON values, hence `Any`.
        islands: Their names, keys of `DESCENT`.
        tokens: Of an inner step of each island, where that is not 1.
        a: The parameter on island a after every inner step; None: not computed.
        b: The same on island b.
        published: The parameter as published then, the same on all islands.
        end: The parameter on every island after the flush.
    """

    name: str
    inner_steps: int
    outer: Mapping[str, Any] = field(default_factory=dict)
    islands: tuple[str, ...] = tuple(DESCENT)
    tokens: Mapping[str, int] = field(default_factory=dict)
    a: list[float] | None = None
    b: list[float] | None = None
    published: list[float] | None = None
    end: float | None = None

    def config(self, state_dir: Path, **sections: Any) -> Config:
        """Write its run file.

        Args:
            state_dir: Of the coordinator.
            sections: Besides those that it needs; any values, hence `Any`.
        """
        islands = {
            name: {"ranks": 1, "tokens_per_inner_step": self.tokens.get(name, 1)}
            for name in self.islands
        }
        values = run_values(
            "golden",
            {"family": "own"},
            {**_OUTER, **self.outer},
            inner_steps=self.inner_steps,
            sequence_length=1,
            state_dir=state_dir,
            **{"islands": islands, **sections},
        )
        return config_of(values, f"golden trace {self.name!r}")

    def difference(self, histories: Mapping[str, History]) -> str:
        """Say where histories, by island, are not as computed; empty: nowhere."""
        for island, history in histories.items():
            own = self.a if island == "a" else self.b
            end = None if self.end is None else [self.end]
            for what, expected, found in (
                ("local values", own, history.local),
                ("published values", self.published, history.published),
                ("the last value", end, [history.end]),
            ):
                if expected is not None and expected != found:
                    return f"{self.name}: {what} of island {island} are {found}, not {expected}"
        return ""


@dataclass(slots=True)
class History:
    """The parameter on one island: after every inner step, as published then, and at the end."""

    local: list[float] = field(default_factory=list)
    published: list[float] = field(default_factory=list)
    end: float = START


@cache
def golden_traces() -> tuple[Trace, ...]:
    """Read all traces."""
    text = Path(__file__).with_name("golden.toml").read_text(encoding="utf-8")
    read = tomllib.loads(text)["traces"]
    return tuple(Trace(**{**each, "islands": tuple(each.get("islands", DESCENT))}) for each in read)


class Publishing(Protocol):
    """An outer loop, as far as a history needs it."""

    def global_parameters(self) -> AbstractContextManager[None]:
        """Put the published values into the parameters for a while."""


class Descent:
    """The training of one island: every inner step takes the same from the parameter."""

    def __init__(self, island: str, num_tokens: int = 1, device: str = "cpu") -> None:
        """Put the parameter on a device."""
        self.w = torch.full((1,), START, device=device, requires_grad=True)
        self.parameters: Mapping[str, Tensor] = {"w": self.w}
        self.history = History()
        self._by = DESCENT[island]
        self._num_tokens = num_tokens

    def inner_step(self, inner_step: int, schedule_step: float = 0.0) -> InnerMetrics:
        """Subtract; the figures are those of no training."""
        with torch.no_grad():
            self.w.sub_(self._by)
        return InnerMetrics(inner_step + 1, _LOSS, 0.0, 0.0, self._num_tokens, 0.0)

    def mend(self, *, is_new: bool) -> int:
        """Repair nothing: there is no inner optimizer."""
        return 0

    def evaluate(self) -> float:
        """Give a loss that says nothing."""
        return _LOSS

    def record(self, outer: Publishing) -> None:
        """Note the parameter after an inner step."""
        self.history.local.append(self.w.item())
        with outer.global_parameters():
            self.history.published.append(self.w.item())


def run_in_one_process(trace: Trace, directory: Path) -> dict[str, History]:
    """Run a trace; its syncer writes into an empty directory.

    Returns:
        What every island had, by name.
    """
    trainings = {name: Descent(name, trace.tokens.get(name, 1)) for name in trace.islands}
    world = World(on_step=lambda island, outer, _: trainings[island].record(outer))
    config = trace.config(directory / "unused")
    run_islands(config, trainings, directory=directory, start_step=0, world=world)
    for training in trainings.values():
        training.history.end = training.w.item()
    return {name: training.history for name, training in trainings.items()}
