"""Records what a rank does: events to the sinks of its run file, figures for its reports.

One recorder serves the built-in loop and any other: `DiLoCo` calls it. It belongs to the training
thread; `write` and reading the figures may happen in others.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from diloco.config.schema import Config
from diloco.durable import read_json, write_json
from diloco.island.outer_loop import OuterLoop
from diloco.island.profile import StepProfile, memory_used
from diloco.protocol.run.alarms import AlarmKind
from diloco.protocol.run.loss_history import LossWatch
from diloco.telemetry.events import (
    AlarmCleared,
    AlarmRaised,
    BytesMoved,
    Evaluated,
    Event,
    InnerStepDone,
    IslandEnded,
)
from diloco.telemetry.meter import ComputeWork, StepMeter
from diloco.telemetry.sinks import BackgroundSink, FanOut, JsonlSink, Sink
from diloco.telemetry.tensorboard import TensorBoardSink
from diloco.telemetry.traces import traces_to
from diloco.telemetry.wandb import WandbRun, WandbSink

#: Inner steps over which the training loss is averaged, at least, before it is compared.
_LEAST_WATCHED = 10
#: Inner steps between events of what each rank takes of memory.
_MEMORY_STEPS = 100


@dataclass(frozen=True, slots=True)
class _StepMade:
    """An inner step: its arguments to `Record.step`, the clock after it, what was logged of it."""

    inner_step: int
    num_tokens: int
    is_quiet: bool
    measured_s: float
    wall_s: float
    logged: dict[str, float]
    later: Callable[[], Mapping[str, float]]


class Record:
    """Record of one rank's life; `open` and `close` bracket it.

    Attributes:
        meter: What time was spent on, so far.
        loss_nats: Of the last inner step that told one; 0 before.
        compute: What a token costs, where that is known.
        device: Of the model, once `begin` was called.
        on_alarm: Called with the alarms that the training loss raises and clears.
        is_open: Whether the sinks take events.
    """

    def __init__(
        self,
        config: Config,
        output_dir: Path | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Assign only.

        Args:
            config: With an island selected; `telemetry` is read.
            output_dir: Of events; None: the run file's. Made when missing.
            clock: Monotonic, in seconds.
        """
        self._config = config
        self._output_dir = output_dir or config.telemetry_dir
        self._clock = clock
        self._sink: Sink = FanOut(())
        self._is_leader = False
        self._profile: StepProfile | None = None
        self.device = torch.device("cpu")
        self._began = self._stepped_at = clock()
        self._evaluation_s = self._aside_s = 0.0
        self._moved = (0, 0)
        self._logged: dict[str, float] = {}
        self._later: Callable[[], Mapping[str, float]] | None = None
        self._unread: _StepMade | None = None
        self._schedule_step = 0.0
        self._loss_watch = LossWatch(_LEAST_WATCHED)
        self.meter = StepMeter()
        self.loss_nats = 0.0
        self.compute = ComputeWork()
        self.on_alarm: Callable[[Event], None] = lambda event: None
        self.is_open = False

    # -- life ------------------------------------------------------------------------------------

    def open(self, island_rank: int) -> None:
        """Open the sinks.

        Raises:
            ConfigError: If one cannot be had; says what to do.
        """
        self._output_dir.mkdir(parents=True, exist_ok=True)
        self._is_leader = island_rank == 0
        self._island_rank = island_rank
        self._sink = build_sinks(self._config, island_rank, self._output_dir)
        self._sink.open()
        self.is_open = True

    def close(self) -> None:
        """Close the sinks, once everything has arrived; a trace that was begun is written."""
        if self._profile is not None:
            self._profile.close()
        self._sink.close()
        self.is_open = False

    def identify(self, *, timeline: int, incarnation: int) -> None:
        """Say in all later events which start of the island writes, in which timeline."""
        self._sink.add_context({"timeline": timeline, "incarnation": incarnation})

    def write(self, event: Event) -> None:
        """Record an event."""
        self._sink.write(event)

    def begin(self, outer: OuterLoop, config: Config, device: torch.device) -> None:
        """Let wall time run from now: the first inner step follows.

        Args:
            outer: Where it stands.
            config: In force.
            device: Of the model.
        """
        self._config, self.device = config, device
        self._loss_watch = LossWatch(max(config.outer.inner_steps_per_round, _LEAST_WATCHED))
        stem = config.profile_dir / f"{config.island_id}-{self._island_rank}"
        self._profile = StepProfile(config.telemetry.profile, stem, device, self.write)
        self._profile.before(outer.inner_step)
        self._schedule_step = outer.schedule_step
        self._began = self._stepped_at = self._clock()
        self._evaluation_s = self._aside_s = 0.0

    # -- inner steps -----------------------------------------------------------------------------

    def log(self, values: Mapping[str, float]) -> None:
        """Take figures of the inner step that is under way; `step` records them."""
        self._logged.update(values)

    def log_later(self, figures: Callable[[], Mapping[str, float]]) -> None:
        """Take figures of the inner step that is under way, which `settle` asks for."""
        self._later = figures

    def step(self, inner_step: int, num_tokens: int, *, is_quiet: bool) -> float | None:
        """Record an inner step, just made, or with `log_later` launched: then `settle` records it.

        Args:
            inner_step: Completed ones, this one included.
            num_tokens: Of the whole island.
            is_quiet: Whether nothing was outstanding during it.

        Returns:
            The loss that was logged of it; None: none was, or it is not known yet.
        """
        logged, self._logged = self._logged, {}
        later, self._later = self._later, None
        measured_s = self._clock() - self._stepped_at - self._aside_s
        self._unread = _StepMade(
            inner_step, num_tokens, is_quiet, measured_s, self.wall_s, logged, later or dict
        )
        return None if later else self.settle()

    def settle(self) -> float | None:
        """Record the inner step that is only launched, once its figures are there.

        Returns:
            Its loss; None where it has none, or no step is to be recorded.
        """
        made, self._unread = self._unread, None
        if made is None:
            return None
        inner_step, num_tokens = made.inner_step, made.num_tokens
        logged = {**made.logged, **made.later()}
        loss = logged.pop("loss", None)
        duration_s = logged.pop("duration_s", made.measured_s)
        self.meter.add(duration_s, num_tokens, wall_s=made.wall_s, is_quiet=made.is_quiet)
        if self._is_leader:
            self.write(
                InnerStepDone(
                    inner_step,
                    loss,
                    logged.pop("grad_norm", None),
                    logged.pop("learning_rate", None),
                    num_tokens,
                    duration_s,
                    self.compute.tflops_per_s(num_tokens, duration_s),
                    self.compute.mfu(num_tokens, duration_s),
                    logged,
                )
            )
        if loss is not None:
            self.loss_nats = loss
            self._watch_loss(inner_step, loss)
        return loss

    def stepped(self, outer: OuterLoop, moved: tuple[int, int]) -> None:
        """Record what followed an inner step; the next one begins now.

        Args:
            outer: Where it stands.
            moved: Bytes that all ranks of the island have sent and received so far.
        """
        inner_step = outer.inner_step
        self._tell_moved(inner_step, moved)
        self.meter.progressed(outer.schedule_step - self._schedule_step)
        self._schedule_step = outer.schedule_step
        if inner_step % _MEMORY_STEPS == 0:
            self.write(memory_used(inner_step, self.device))
        assert self._profile is not None, "begin was not called"
        self._profile.after(inner_step)
        self._profile.before(inner_step)
        self._stepped_at, self._aside_s = self._clock(), 0.0

    def _tell_moved(self, inner_step: int, moved: tuple[int, int]) -> None:
        if self._is_leader and moved != self._moved:
            self._moved = moved
            self.write(BytesMoved(inner_step, *moved))

    def _watch_loss(self, inner_step: int, loss: float) -> None:
        """Raise an alarm while the training loss rises for rounds, whatever the cause."""
        watch, was_rising = self._loss_watch, self._loss_watch.is_rising
        if not self._is_leader or (mean := watch.add(loss)) is None:
            return
        island = self._config.island_id
        event: Event | None = None
        if watch.is_rising:
            event = AlarmRaised(
                AlarmKind.LOSS_RISES,
                f"training loss {mean:.3f} nats a token after inner step {inner_step}, "
                f"mean of {watch.period} steps; the lowest were {watch.reference:.3f}",
                island,
            )
        elif was_rising:
            event = AlarmCleared(AlarmKind.LOSS_RISES, island)
        if event is not None:
            self.write(event)
            self.on_alarm(event)

    # -- besides inner steps ---------------------------------------------------------------------

    @property
    def wall_s(self) -> float:
        """Seconds since `begin`, evaluations not counted."""
        return self._clock() - self._began - self._evaluation_s

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Stop wall time while the island evaluates; no inner step is under way."""
        began = self._clock()
        try:
            with self.aside():
                yield
        finally:
            self._evaluation_s += self._clock() - began

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Do something that is no part of an inner step, such as a checkpoint."""
        began, aside_s = self._clock(), self._aside_s
        try:
            yield
        finally:  # what was aside within it is counted once
            self._aside_s = aside_s + self._clock() - began

    def evaluated(self, inner_step: int, parameters: str, nats_per_byte: float) -> None:
        """Record a held-out loss."""
        self.write(Evaluated(inner_step, parameters, nats_per_byte))

    def ended(self, outer: OuterLoop, moved: tuple[int, int], *, wall_s: float) -> None:
        """Record the sums of the rank's life; `outer`'s bytes are its own."""
        self._tell_moved(outer.inner_step, moved)
        self.write(memory_used(outer.inner_step, self.device))
        self.write(
            IslandEnded(
                inner_step=outer.inner_step,
                tokens=self.meter.tokens,
                wall_s=wall_s,
                inner_s=self.meter.inner_s,
                blocked_s=outer.blocked_s,
                undisturbed_step_s=self.meter.undisturbed_step_s,
                utilisation=self.meter.utilisation(wall_s),
                goodput=self.meter.goodput(wall_s),
                overwritten_steps=outer.merging.overwritten_steps,
                bytes_up=outer.exchange.bytes_up,
                bytes_down=outer.exchange.bytes_down,
                digests=outer.digests,
                dropped_tokens=outer.merging.dropped_tokens,
                left_tokens=outer.left_tokens,
                tflops_per_s=self.compute.tflops_per_s(self.meter.tokens, self.meter.inner_s),
                mfu=self.compute.mfu(self.meter.tokens, self.meter.inner_s),
            )
        )


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
    if island_rank == 0:
        sinks += traces_to("diloco-island", island, context, time.time)
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
