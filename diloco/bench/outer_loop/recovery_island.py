"""An island of `diloco bench recovery`: steps of a known duration beside the public API, for ever.

    python -m diloco.bench.outer_loop.recovery_island RUN.toml --island NAME --output DIR
        --step-s SECONDS

An inner step is a sleep that changes one tensor. Every step and every event of the outer loop is a
line of DIR/events-NAME-0.jsonl; whoever started it ends it.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

import diloco
from diloco.config.schema import Config
from diloco.telemetry.events import Event
from diloco.telemetry.sinks import JsonlSink
from diloco.trainer.models.model import LlamaShape, build_model, initialise_


@dataclass(frozen=True, slots=True)
class TimedStep(Event):
    """An inner step together with what the outer loop did after it."""

    kind: ClassVar[str] = "timed_step"
    inner_step: int
    duration_s: float


def train(config: Config, sink: JsonlSink, step_s: float) -> None:
    """Train until somebody ends this process."""
    torch.set_num_threads(1)
    model = build_model(LlamaShape.from_config(config.model)).to_empty(device="cpu")
    initialise_(model, config.run.seed)
    parameters = itertools.cycle(model.parameters())
    with diloco.connect(config) as connection:
        connection.on_join = lambda reply: sink.add_context(
            {"incarnation": reply.grant.incarnation}
        )
        outer = diloco.DiLoCo(model, config.outer, transport=connection, on_event=sink.write)
        while True:
            began = time.monotonic()
            with torch.no_grad():
                next(parameters).mul_(1.001)
            time.sleep(max(0.0, began + step_s - time.monotonic()))
            outer.step(num_tokens=config.island.tokens_per_inner_step)
            sink.write(TimedStep(outer.inner_step, time.monotonic() - began))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m diloco.bench.outer_loop.recovery_island")
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--island", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    options = parser.parse_args(arguments)
    config = diloco.load_config(options.run_file, island=options.island)
    context = {"island": options.island, "island_rank": 0}
    sink = JsonlSink(options.output / f"events-{options.island}-0.jsonl", context, time.time)
    sink.open()
    train(config, sink, options.step_s)


if __name__ == "__main__":
    main()
