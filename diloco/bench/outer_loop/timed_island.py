"""An island of `diloco bench utilisation`: a training loop beside the public API.

    python -m diloco.bench.outer_loop.timed_island RUN.toml --island NAME --output FILE
        [--step-s SECONDS]

With `--step-s` an inner step is a sleep that ends that many seconds after it began; without, it is
a real one. Figures are those of whole rounds after the first, which warms up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import diloco
from diloco.config.schema import Config
from diloco.data.open import open_data
from diloco.trainer.island_trainer import island_trainer, own_batches
from diloco.trainer.models.families import initialise_
from diloco.trainer.models.model import LlamaShape, build_model
from diloco.trainer.parallel.pipeline import parts_of

_UNDISTURBED_STEPS = 10


@dataclass(frozen=True, slots=True)
class Timed:
    """What one island measured over whole rounds.

    Attributes:
        inner_steps: Inner steps made.
        wall_s: Seconds from the first one's begin to the last one's `DiLoCo.step` done.
        blocked_s: Of these, seconds for which `DiLoCo.step` waited for outcomes.
        undisturbed_step_s: Duration of an inner step with nothing to do beside it.
        num_parameters: Size of the model.
    """

    inner_steps: int
    wall_s: float
    blocked_s: float
    undisturbed_step_s: float
    num_parameters: int


class _SleepingStep:
    """Sleeps, and changes one tensor a step, so that there is something to send."""

    def __init__(self, config: Config, step_s: float) -> None:
        self.model = build_model(LlamaShape.from_config(config.model)).to_empty(device="cpu")
        for part in parts_of(self.model):
            initialise_(part, config.run.seed)
        self.undisturbed_s = step_s
        self._parameters = itertools.cycle(self.model.parameters())

    @torch.no_grad()
    def __call__(self) -> None:
        ends = time.monotonic() + self.undisturbed_s
        next(self._parameters).mul_(1.001)
        time.sleep(max(0.0, ends - time.monotonic()))


class _RealStep:
    """Trains; the undisturbed duration is measured before the island joins."""

    def __init__(self, config: Config) -> None:
        data = open_data(config)
        slot = sorted(config.islands).index(config.island_id)
        self._trainer = island_trainer(config, data, own_batches(config, data, slot))
        self.model = self._trainer.model
        self._batches = itertools.count()
        self.undisturbed_s = statistics.median(self() for _ in range(_UNDISTURBED_STEPS))
        for part in parts_of(self.model):
            initialise_(part, config.run.seed)

    def __call__(self) -> float:
        return self._trainer.inner_step(next(self._batches)).duration_s


def train(config: Config, step: _SleepingStep | _RealStep) -> Timed:
    """Train one island to the end of its run."""
    tokens = config.island.tokens_per_inner_step
    with diloco.connect(config) as connection:
        outer = diloco.DiLoCo(step.model, config.outer, transport=connection)

        def train_until(inner_step: int) -> None:
            while outer.inner_step < inner_step:
                step()
                outer.step(num_tokens=tokens)

        period = config.outer.inner_steps_per_round
        train_until(period)
        began, blocked_s = time.monotonic(), outer.blocked_s
        train_until(outer.inner_steps // period * period)
        timed = Timed(
            inner_steps=outer.inner_step - period,
            wall_s=time.monotonic() - began,
            blocked_s=outer.blocked_s - blocked_s,
            undisturbed_step_s=step.undisturbed_s,
            num_parameters=sum(p.numel() for p in step.model.parameters()),
        )
        train_until(outer.inner_steps)
        outer.finish()
    return timed


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; writes what was measured to `--output`, as JSON."""
    parser = argparse.ArgumentParser(prog="python -m diloco.bench.outer_loop.timed_island")
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--island", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--step-s", type=float, help="sleep that long; without it, train")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    config = diloco.load_config(options.run_file, island=options.island)
    step = _RealStep(config) if options.step_s is None else _SleepingStep(config, options.step_s)
    options.output.write_text(json.dumps(asdict(train(config, step))), encoding="utf-8")


if __name__ == "__main__":
    main()
