"""Records what a rank does: events to its sinks, progress for the leader's reports.

Belongs to the training thread; `write` and reading `progress` may happen in others.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from diloco.config.schema import Config
from diloco.durable import read_json, write_json
from diloco.island.registration import IslandState, Progress
from diloco.island.session import DiLoCo
from diloco.telemetry.events import BytesMoved, Evaluated, Event, InnerStepDone, IslandEnded
from diloco.telemetry.meter import ComputeWork, StepMeter
from diloco.telemetry.sinks import BackgroundSink, FanOut, JsonlSink, Sink
from diloco.telemetry.tensorboard import TensorBoardSink
from diloco.telemetry.wandb import WandbRun, WandbSink
from diloco.trainer.models.experts import imbalances
from diloco.trainer.trainer import InnerMetrics

_UNKNOWN = ComputeWork()


class RankRecord:
    """Record of one rank's life; `open` and `close` bracket it.

    Attributes:
        progress: What the next report says; replaced whole, so any thread may read it.
    """

    def __init__(self, sink: Sink, *, is_leader: bool, clock: Callable[[], float]) -> None:
        """Assign only. Inner steps are recorded by the leader alone: they are everybody's."""
        self._sink = sink
        self._is_leader = is_leader
        self._clock = clock
        self._meter = StepMeter()
        self._compute = ComputeWork()
        self._began = 0.0
        self._evaluation_s = 0.0
        self._told_bytes = (0, 0)
        self.progress = Progress()

    def open(self) -> None:
        """Open the sinks.

        Raises:
            ConfigError: If one cannot be had; says what to do.
        """
        self._sink.open()

    def close(self) -> None:
        """Close the sinks, once everything has arrived."""
        self._sink.close()

    def identify(self, *, timeline: int, incarnation: int) -> None:
        """Say in all later events which start of the island writes, in which timeline."""
        self._sink.add_context({"timeline": timeline, "incarnation": incarnation})

    def write(self, event: Event) -> None:
        """Record an event."""
        self._sink.write(event)

    def begin(self, compute: ComputeWork = _UNKNOWN) -> None:
        """Let wall time run from now; `compute` says what a token costs, where that is known."""
        self._compute = compute
        self._began = self._clock()

    @property
    def wall_s(self) -> float:
        """Seconds since `begin`, evaluations not counted."""
        return self._clock() - self._began - self._evaluation_s

    def step(self, metrics: InnerMetrics, *, is_quiet: bool) -> None:
        """Record an inner step; `is_quiet` when nothing was outstanding during it."""
        self._meter.add(
            metrics.duration_s, metrics.num_tokens, wall_s=self.wall_s, is_quiet=is_quiet
        )
        self.progress = replace(self.progress, loss_nats=metrics.loss)
        if self._is_leader:
            self.write(
                InnerStepDone(
                    metrics.inner_step,
                    metrics.loss,
                    metrics.grad_norm,
                    metrics.learning_rate,
                    metrics.num_tokens,
                    metrics.duration_s,
                    self._compute.tflops_per_s(metrics.num_tokens, metrics.duration_s),
                    self._compute.mfu(metrics.num_tokens, metrics.duration_s),
                    imbalances(metrics.expert_loads),
                )
            )

    def moved(self, bytes_up: int, bytes_down: int) -> None:
        """Note what all ranks of the island have sent and received so far."""
        self.progress = replace(self.progress, bytes_up=bytes_up, bytes_down=bytes_down)

    def renew(self, state: IslandState, outer: DiLoCo) -> None:
        """Renew what the next report says; record the island's bytes when they are news."""
        moved = BytesMoved(outer.inner_step, self.progress.bytes_up, self.progress.bytes_down)
        if self._is_leader and (moved.bytes_up, moved.bytes_down) != self._told_bytes:
            self._told_bytes = (moved.bytes_up, moved.bytes_down)
            self.write(moved)
        self.progress = replace(
            self.progress,
            state=state,
            inner_step=outer.inner_step,
            tokens_per_s=self._meter.tokens_per_s,
            tokens=self._meter.tokens,
            fragments_in_flight=outer.num_in_flight,
            blocked_s=outer.blocked_s,
            utilisation=self._meter.utilisation(self.wall_s),
        )

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Stop wall time while the island evaluates."""
        began = self._clock()
        try:
            yield
        finally:
            self._evaluation_s += self._clock() - began

    def evaluated(self, inner_step: int, parameters: str, nats_per_byte: float) -> None:
        """Record a held-out loss."""
        self.write(Evaluated(inner_step, parameters, nats_per_byte))

    def ended(self, outer: DiLoCo, *, wall_s: float) -> None:
        """Record the sums of the rank's life; bytes are its own."""
        self.write(
            IslandEnded(
                inner_step=outer.inner_step,
                tokens=self._meter.tokens,
                wall_s=wall_s,
                inner_s=self._meter.inner_s,
                blocked_s=outer.blocked_s,
                undisturbed_step_s=self._meter.undisturbed_step_s,
                utilisation=self._meter.utilisation(wall_s),
                goodput=self._meter.goodput(wall_s),
                overwritten_steps=outer.overwritten_steps,
                bytes_up=outer.bytes_up,
                bytes_down=outer.bytes_down,
                digests=outer.digests,
                dropped_tokens=outer.dropped_tokens,
                left_tokens=outer.left_tokens,
                tflops_per_s=self._compute.tflops_per_s(self._meter.tokens, self._meter.inner_s),
                mfu=self._compute.mfu(self._meter.tokens, self._meter.inner_s),
            )
        )

    def failed(self) -> None:
        """Let the last report say that the island failed."""
        self.progress = replace(self.progress, state=IslandState.FAILED)


def build_sinks(config: Config, island_rank: int, output_dir: Path) -> Sink:
    """Build the sinks of one rank of the selected island; nothing is opened yet.

    Args:
        config: `telemetry` is read, with an island selected.
        island_rank: Position of the rank in its island; metrics are written by rank 0 alone.
        output_dir: Directory of events and logs; must be there.
    """
    run, island = config.run.name, config.island_id
    context = {"run": run, "island": island, "island_rank": island_rank}
    path = output_dir / f"events-{island}-{island_rank}.jsonl"
    sinks: list[Sink] = [JsonlSink(path, context, time.time)]
    if island_rank == 0 and config.telemetry.tensorboard:
        sink = TensorBoardSink(output_dir / "tensorboard" / island)
        sinks.append(BackgroundSink("tensorboard", sink))
    if island_rank == 0 and config.telemetry.wandb.mode != "disabled":
        sinks.append(BackgroundSink("wandb", WandbSink(_wandb_run(config, output_dir))))
    return FanOut(sinks)


def _wandb_run(config: Config, output_dir: Path) -> WandbRun:
    """Give the same wandb run to every start of the island in one directory, and to no other.

    A run of the same name in another directory is another run, so names alone do not choose.
    """
    wandb = config.telemetry.wandb
    path = output_dir / f"wandb-{config.island_id}.json"
    run_id = read_json(path)
    if run_id is None:
        run_id = f"{config.island_id}-{secrets.token_hex(6)}"
        write_json(path, run_id)
    return WandbRun(
        mode=wandb.mode,
        project=wandb.project,
        group=config.run.name,
        name=config.island_id,
        run_id=run_id,
        directory=output_dir,
        config=config.model_dump(mode="json"),
    )
