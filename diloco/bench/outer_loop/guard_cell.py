"""One cell of `diloco bench guard`: a run in which one island is faulty. Runs in a process.

Model, text, codecs, rounds and islands are the product's own (`loopback_run`); the fault strikes
where a real one would: an island's memory, its labels, or what it sends.
"""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.bench.outer_loop.byte_model import (
    SLOT,
    ByteTask,
    ByteTraining,
    byte_config,
    open_bytes,
    write_start,
)
from diloco.bench.processes import count_one
from diloco.errors import AggregationError, DilocoError
from diloco.island.outer_loop import OuterLoop
from diloco.launch.loopback_run import Lanes, World, run_islands
from diloco.loop_clock import loop_now
from diloco.outer.fragments import Fragment
from diloco.protocol.run.alarms import Alarm, AlarmKind, Alarms, suspect
from diloco.protocol.run.loss_history import LossWatch
from diloco.telemetry.events import AlarmRaised, Event, FragmentSent
from diloco.trainer.launched_step import InnerMetrics

#: Section [outer] of each mode; H and P are the setting's.
MODES: Mapping[str, Mapping[str, Any]] = {
    "scheduled": {"preset": "streaming", "overlap_steps": 2},
    "decoupled": {"preset": "decoupled", "grace": "2s"},
}
#: What a faulty island does from `GuardSetting.fault_step` on, to the end: it learns targets in
#: another order, or what it sends has the other sign, is a hundredfold, or noise of its norm.
LASTING = ("labels", "signs", "x100", "noise")
#: Where one bit flips, once.
PLACES = ("parameter", "moment", "anchor")
#: What a run without a fault may do: train only; begin with trained parameters; begin its learning
#: rate again in the middle; have an island that joins late; lose the last one at the fault's step.
CLEAN = ("none", "warm-start", "lr-restart", "join", "leave")
_MATRIX, _INDEX = "layers.0.attention.o.weight", 123


@dataclass(frozen=True, slots=True)
class GuardSetting:
    """What every cell trains: a small Llama on bytes, in two fragments."""

    task: ByteTask = field(
        default_factory=lambda: ByteTask(
            inner_steps=200,
            warm_start_step=0,
            sequences=12,
            sequence_length=32,
            evaluation_sequences=128,
            lr=5e-3,
            warmup_steps=20,
            model={"dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 64},
        )
    )
    inner_steps_per_round: int = 10
    fault_step: int = 103


@dataclass(frozen=True, slots=True)
class GuardCell:
    """A run of M islands, the last of which is faulty.

    Attributes:
        mode: Of `MODES`.
        num_islands: M.
        fault: Of `LASTING` or `CLEAN`, or a place and the bit that flips there, as in moment-30.
    """

    mode: str
    num_islands: int
    fault: str


@dataclass(frozen=True, slots=True)
class CellResult:
    """What became of it: held-out loss of what is published at the end, and who was blamed.

    Attributes:
        loss: In nats a byte; NaN where the run was ended.
        ended: Why the run was ended; empty: it was not.
        refused: Island -> contributions that the guard refused.
        declined: Island -> contributions that it did not send, since it found them unsound.
        named: Islands that an alarm blames.
        is_opposed: Whether an alarm was about two islands together.
        left: Islands that ended themselves.
    """

    loss: float
    ended: str
    refused: Mapping[str, int]
    declined: Mapping[str, int]
    named: tuple[str, ...]
    is_opposed: bool
    left: tuple[str, ...]


def run_cell(setting: GuardSetting, cell: GuardCell, seed: int) -> CellResult:
    """Train one cell to its end and evaluate it; in a process of its own."""
    task, num = setting.task, cell.num_islands
    data = open_bytes(task, seed)
    trainings = {
        SLOT.format(slot): ByteTraining(task, seed, data, num_islands=num, island_slot=slot)
        for slot in range(num)
    }
    faulty = SLOT.format(num - 1)
    start_step = 0
    with tempfile.TemporaryDirectory(prefix="diloco-guard-") as directory:
        if cell.fault == "warm-start":
            start_step = task.inner_steps // 2
            path = Path(directory) / "start"
            write_start(replace(task, warm_start_step=start_step), seed, path)
            for training in trainings.values():
                training.load(path, start_step)
        fault = _Fault(setting, cell, faulty, trainings[faulty])
        seen = _GuardEvents(setting.inner_steps_per_round, num)
        outer = {
            **MODES[cell.mode],
            "inner_steps_per_round": setting.inner_steps_per_round,
            "num_fragments": 2,
        }
        is_late = cell.fault == "join"
        world = World(
            lives=lambda island: [(0.5, setting.fault_step)] * (is_late and island == faulty),
            before_send=fault.before_send,
            on_step=fault.on_step,
            on_event=seen.on_event,
            on_syncer_event=seen.on_syncer_event,
            on_end=lambda island, error: seen.left.append(island),
        )
        of_islands = {
            name: _Watched(training, task if cell.fault == "lr-restart" else None, seen, name)
            for name, training in trainings.items()
        }
        loss, ended = float("nan"), ""
        try:
            loss = run_islands(
                byte_config(task, seed, num, outer),
                of_islands,
                directory=Path(directory) / "store",
                start_step=start_step,
                world=world,
            ).figure
        except DilocoError as error:
            ended = f"{type(error).__name__}: {error}"
    count_one()
    return CellResult(
        loss,
        ended,
        +seen.refused,
        +seen.declined,
        tuple(sorted(seen.named - {""})),
        seen.is_opposed,
        tuple(seen.left),
    )


class _GuardEvents:
    """What the events of a run say: who was refused, who declined, whom alarms name."""

    def __init__(self, period: int, num_islands: int) -> None:
        self.refused, self.declined = Counter[str](), Counter[str]()
        self.named, self.is_opposed = set[str](), False
        self.left = list[str]()
        self._num_islands = num_islands
        self._alarms = Alarms()
        self._losses = defaultdict[str, LossWatch](lambda: LossWatch(period))

    def on_event(self, island: str, event: Event) -> None:
        if isinstance(event, FragmentSent):
            self.declined[island] += bool(event.declined and event.weight_tokens)
        self.on_syncer_event(event)

    def on_syncer_event(self, event: Event) -> None:
        if isinstance(event, AlarmRaised):
            self.named.add(event.about)
            self.is_opposed |= event.alarm == AlarmKind.ISLANDS_OPPOSED
            self.refused[event.about] += event.alarm == AlarmKind.CONTRIBUTION_REFUSED
        self._alarms.on_event(event, loop_now())

    def on_loss(self, island: str, loss: float) -> None:
        """Take a training loss; where two live, look for a suspect as the coordinator does."""
        watch, kind = self._losses[island], AlarmKind.LOSS_RISES
        if watch.add(loss) is not None:
            if watch.is_rising:
                self._alarms.raise_(Alarm(kind, "training loss rises", island), loop_now())
            else:
                self._alarms.clear(kind, island)
        if self._num_islands - len(self.left) != 2:
            return
        if (suspected := suspect(self._alarms.holding(loop_now()))) is not None:
            self.named.add(suspected.island)


class _Watched:
    """A training whose loss is watched, as a rank does.

    Its learning rate may fall to its end by the middle of `restarting`, and begin again there.
    """

    def __init__(
        self, training: ByteTraining, restarting: ByteTask | None, seen: _GuardEvents, island: str
    ) -> None:
        self._training, self._restarting, self._seen = training, restarting, seen
        self._island = island
        self.parameters, self.mend = training.parameters, training.mend
        self.evaluate = training.evaluate

    def inner_step(self, inner_step: int, schedule_step: float) -> InnerMetrics:
        if self._restarting is not None:
            half = self._restarting.inner_steps / 2
            again = self._restarting.warmup_steps + schedule_step - half
            schedule_step = 2 * schedule_step if schedule_step < half else again
        made = self._training.inner_step(inner_step, schedule_step)
        self._seen.on_loss(self._island, made.loss)
        return made


class _Fault:
    """What is wrong with one island, from its `fault_step` on."""

    def __init__(
        self, setting: GuardSetting, cell: GuardCell, island: str, training: ByteTraining
    ) -> None:
        self._at, self._island, self._training = setting.fault_step, island, training
        self._what, _, bit = cell.fault.partition("-")
        self._mask = 1 << int(bit) if self._what in PLACES else 0
        self._generator = torch.Generator().manual_seed(0)
        self._inner_step = 0

    def on_step(self, island: str, outer: OuterLoop, num_tokens: int) -> None:
        """Strike where the inner step has just ended."""
        if island != self._island:
            return
        self._inner_step = outer.inner_step
        if self._inner_step != self._at:
            return
        parameter = self._training.parameters[_MATRIX]
        if self._what == "leave":
            raise AggregationError("this island leaves")
        if self._what == "labels":
            self._shuffle_labels()
        elif self._what == "parameter":
            self._flip(parameter.detach())
        elif self._what == "moment":
            self._flip(self._training._trainer.optimizer.state[parameter]["exp_avg"])
        elif self._what == "anchor":
            # The first fragment's; the island looks at what it sends against it.
            self._flip(outer.exchange.anchor(0)[0])

    def before_send(self, island: str, fragment: Fragment, anchor: Lanes, local: Lanes) -> None:
        """Strike what is about to be sent."""
        if island != self._island or self._inner_step < self._at:
            return
        for lane_id, values in local.items():
            delta = anchor[lane_id] - values
            if self._what == "signs":
                delta.neg_()
            elif self._what == "x100":
                delta.mul_(100.0)
            elif self._what == "noise":
                noise = torch.randn(delta.shape, generator=self._generator) * (delta != 0)
                delta = noise * (delta.norm() / noise.norm())
            else:
                return
            values.copy_(anchor[lane_id] - delta)

    def _flip(self, values: Tensor) -> None:
        values.view(-1).view(torch.int32)[_INDEX] ^= self._mask

    def _shuffle_labels(self) -> None:
        trainer = self._training._trainer
        plain, generator = trainer._micro_loss, self._generator

        def shuffled(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            order = torch.randperm(targets.numel(), generator=generator)
            return plain(logits, targets.flatten()[order].view_as(targets))

        trainer._micro_loss = shuffled  # type: ignore[method-assign, assignment]
