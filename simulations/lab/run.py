"""One point of a laboratory: train it in this process, and say what became of it.

Model, data, gradients, codecs, outer steps and the machines of the rounds are the product's own
(`diloco.launch.loopback_run`); time is virtual, and what surrounds the islands is `environment`'s.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.config.schema import Config
from diloco.data.batches import Batches, Data
from diloco.errors import DilocoError
from diloco.island.lanes.parameters import canonical_parameters
from diloco.island.outer_loop import OuterLoop
from diloco.launch.loopback_run import World, run_islands
from diloco.simulations.lab.batches import batches_of, union_of
from diloco.simulations.lab.environment import LabEnvironment
from diloco.simulations.lab.losses import LossCurve
from diloco.simulations.lab.point import LabPoint, open_text, union_config
from diloco.simulations.lab.prune import prune_
from diloco.simulations.lab.timeline import LabTimeline
from diloco.telemetry.events import Event, FragmentMerged, FragmentSent, IslandRejoined
from diloco.trainer.island_trainer import island_trainer, load_training, save_training
from diloco.trainer.launched_step import InnerMetrics
from diloco.trainer.optimizers.optimizer import build_optimizer
from diloco.trainer.parallel.mesh import make_mesh
from diloco.trainer.state import load_moments_, moments, optimizer_step

#: Result of a point: JSON values by name, hence `Any`.
Result = dict[str, Any]
OnStep = Callable[[], None]


def run_point(
    point: LabPoint,
    start: Path | None,
    on_step: OnStep = lambda: None,
    timeline: LabTimeline | None = None,
) -> Result:
    """Train one point to its end.

    Args:
        point: What is trained.
        start: What `write_start` wrote, if the point has warm steps.
        on_step: Hears of every inner step of an island.
        timeline: Records who does what when.

    Returns:
        Figures and readings. A run that the product ends for a reason of its own (rounds that
        expire again and again) says so as "ended", and has the readings until then.
    """
    began = time.perf_counter()
    with _threads(point.lab.threads):
        run = _run_data_parallel if point.lab.method == "data_parallel" else _run_diloco
        result = run(point, start, on_step, timeline)
    return {
        "fingerprint": point.fingerprint(),
        "seed": point.seed,
        "swept": dict(point.swept),
        "planned_tokens": point.config.run.inner_steps * point.tokens_per_inner_step,
        **result,
        "wall_s": time.perf_counter() - began,
    }


def write_start(point: LabPoint, path: Path, on_step: OnStep = lambda: None) -> None:
    """Train the warm steps of a point, data parallel, and write weights and moments."""
    with _threads(point.lab.threads):
        training = _union_training(point, None, lambda loss: None)
        for inner_step in range(point.lab.warm_steps):
            training.inner_step(inner_step, inner_step)
            on_step()
        training.save(path)


class LabTraining:
    """One island's model, inner optimizer and text."""

    def __init__(
        self,
        config: Config,
        data: Data,
        batches: Batches,
        device: torch.device,
        on_loss: Callable[[float], None],
    ) -> None:
        """Build them, with the values that the seed gives; an island is selected in `config`."""
        mesh = make_mesh(device, config.island.mesh)
        self._trainer = island_trainer(config, data, batches, mesh)
        self._inner = config.inner
        self._on_loss = on_loss
        self.parameters: Mapping[str, Tensor] = canonical_parameters(self._trainer.model)
        self._initial = self._copied()
        self._most_kept = 2 * config.outer.num_fragments
        self._kept: dict[int, tuple[int, Mapping[str, Mapping[str, Tensor]]]] = {}
        self.keep_moments(0)

    def inner_step(self, inner_step: int, schedule_step: float) -> InnerMetrics:
        """See `loopback_run.Training`."""
        metrics = self._trainer.inner_step(inner_step, schedule_step).read()
        self._on_loss(metrics.loss)
        return metrics

    def mend(self, *, is_new: bool) -> int:
        """See `loopback_run.Training`."""
        return self._trainer.mend(is_new=is_new)

    def evaluate(self) -> float:
        """See `loopback_run.Training`."""
        return self._trainer.evaluate()

    @torch.no_grad()
    def restart(self, *, keeps_optimizer: bool) -> None:
        """Hold what a new process of the island has: the first values, and nothing learnt.

        With `keeps_optimizer` the optimizer waits for `recall_moments`.
        """
        for name, parameter in self.parameters.items():
            parameter.copy_(self._initial[name])
        if not keeps_optimizer:
            trainer = self._trainer
            trainer.optimizer = build_optimizer(trainer.model, self._inner.optimizer)

    def keep_moments(self, inner_step: int) -> None:
        """Copy the moments as they are, of the last sends only: no start goes back further."""
        held = moments(self._trainer.model, self._trainer.optimizer)
        copies = {of: {name: m.clone() for name, m in named.items()} for of, named in held.items()}
        self._kept.pop(inner_step, None)  # sent again: the newest
        self._kept[inner_step] = optimizer_step(self._trainer.optimizer), copies
        while len(self._kept) > self._most_kept:
            del self._kept[next(iter(self._kept))]

    def recall_moments(self, inner_step: int) -> None:
        """Go on with the moments of `inner_step`, or of the last send before it."""
        at = max((s for s in self._kept if s <= inner_step), default=min(self._kept))
        age, kept = self._kept[at]
        trainer = self._trainer
        load_moments_(trainer.model, trainer.optimizer, lambda of, name: kept[of][name], step=age)

    def save(self, path: Path) -> None:
        """Write weights and moments."""
        save_training(self._trainer, path)

    def load(self, path: Path, inner_step: int) -> None:
        """Read what `save` wrote after so many inner steps."""
        load_training(self._trainer, path, inner_step)
        self._initial = self._copied()
        self.keep_moments(inner_step)

    def _copied(self) -> dict[str, Tensor]:
        return {name: values.detach().clone() for name, values in self.parameters.items()}

    def flat(self) -> Tensor:
        """Copy all parameters into one vector."""
        return torch.cat([p.detach().flatten().cpu() for p in self.parameters.values()])

    @property
    def num_parameters(self) -> int:
        """Size of the model."""
        return sum(parameter.numel() for parameter in self.parameters.values())


# -- DiLoCo ----------------------------------------------------------------------------------------


def _run_diloco(
    point: LabPoint, start: Path | None, on_step: OnStep, timeline: LabTimeline | None
) -> Result:
    config, lab = point.config, point.lab
    data, environment = open_text(config), LabEnvironment(point)
    losses = _losses(point, _virtual_now, on_step)
    trainings = {}
    for name, batches in batches_of(config, data, lab.data.split).items():
        own = config.model_copy(update={"island_id": name})
        hear = _heard_by(losses, name)
        trainings[name] = LabTraining(own, data, batches, point.device, hear)
        if start is not None:
            trainings[name].load(start, lab.warm_steps)
    norms = _Norms(config, trainings)
    num_failures = 0

    def failed(island: str, outer: OuterLoop) -> None:
        nonlocal num_failures
        num_failures += 1
        losses.ended(island, outer)
        trainings[island].restart(keeps_optimizer=lab.failures.keeps_optimizer)

    def stepped(island: str, outer: OuterLoop, num_tokens: int) -> None:
        losses.stepped(island, outer, num_tokens, trainings[island].evaluate)

    def heard(island: str, event: Event) -> None:
        norms.heard(island, event)
        if lab.failures.keeps_optimizer and isinstance(event, FragmentSent):
            trainings[island].keep_moments(event.inner_step)
        elif lab.failures.keeps_optimizer and isinstance(event, IslandRejoined):
            trainings[island].recall_moments(event.inner_step)

    world = World(
        step_s=environment.step_s,
        way=environment.way,
        lives=environment.lives,
        syncer_lives=environment.syncer_lives(),
        on_failure=failed,
        on_step=stepped,
        on_event=heard,
    )
    if lab.prune.share:
        shapes = {n: p.shape for n, p in trainings[min(trainings)].parameters.items()}
        world = replace(world, before_send=lambda island, *sent: prune_(lab.prune, shapes, *sent))
    if timeline is not None:
        world = timeline.watched(world)
    figures: Result = {"ended": ""}
    try:
        with _records() as directory:
            done = run_islands(
                config, trainings, directory=directory, start_step=lab.warm_steps, world=world
            )
    except DilocoError as error:
        figures["ended"] = f"{type(error).__name__}: {error}"
    else:
        losses.read(done.figure, at_s=done.virtual_s)
        trained = sum(done.steps.values())
        figures |= {
            "steps": dict(done.steps),
            "busy": dict(done.busy),
            "rounds": done.num_rounds,
            "syncer_failures": done.num_syncer_starts - 1,
            "solo_rounds": done.num_solo,
            "dropped_tokens": sum(done.dropped_tokens.values()),
            "digests": list(done.digests),
            "inner_steps": trained,
        }
    return _result(losses, trainings[min(trainings)].num_parameters) | {
        **figures,
        "failures": num_failures,
        "norm_ratio": norms.ratio,
    }


class _Norms:
    """How long a round's step is against its contributions: |change of published| / mean |Delta_m|.

    With outer SGD of lr 1 that is |merged| / mean |Delta_m|: 1 / sqrt(M) where contributions are
    orthogonal and their plain mean is taken. Known of one fragment that is merged as it is
    published; otherwise there is no ratio.

    Source: Decoupled DiLoCo (arXiv 2604.21428), radial-directional averaging; DiLoCo (arXiv
    2311.08105), cosine similarity.
    """

    def __init__(self, config: Config, trainings: Mapping[str, LabTraining]) -> None:
        outer = config.outer
        self._is_known = outer.num_fragments == 1 and outer.local_mix == 0.0
        self._island = min(trainings)
        self._training = trainings[self._island]
        self._published = self._training.flat() if self._is_known else None
        self._sent: dict[int, list[float]] = defaultdict(list)
        self._ratios: list[float] = []

    def heard(self, island: str, event: Event) -> None:
        """Record sends of all islands, and of merges of one."""
        if self._published is None:
            return
        if isinstance(event, FragmentSent) and not (event.is_flush or event.declined):
            self._sent[event.version].append(event.lanes_norm)
        elif isinstance(event, FragmentMerged) and island == self._island:
            before, self._published = self._published, self._training.flat()
            sent = self._sent.pop(event.version - 1, [])
            if sent and sum(sent) > 0:
                step = float(torch.linalg.vector_norm(self._published - before))
                self._ratios.append(step / (sum(sent) / len(sent)))

    @property
    def ratio(self) -> float | None:
        """Mean over the rounds."""
        return sum(self._ratios) / len(self._ratios) if self._ratios else None


# -- data parallel ---------------------------------------------------------------------------------


def _run_data_parallel(
    point: LabPoint, start: Path | None, on_step: OnStep, timeline: LabTimeline | None
) -> Result:
    config, lab = point.config, point.lab
    environment, names = LabEnvironment(point), sorted(config.islands)
    now, num_bytes, busy_s = 0.0, 0, 0.0
    losses = _losses(point, lambda: now, on_step)
    training = _union_training(point, start, _heard_by(losses, "all"))
    crossed_s, crossed = environment.all_reduce(4 * training.num_parameters)
    for inner_step in range(lab.warm_steps, config.run.inner_steps):
        step_s = {name: environment.step_s(name, inner_step) for name in names}
        computed_s = max(step_s.values())
        num_tokens = training.inner_step(inner_step, inner_step).num_tokens
        if timeline is not None:
            timeline.stepped_together(now, step_s, now + computed_s + crossed_s)
        now += computed_s + crossed_s
        busy_s += computed_s
        num_bytes += crossed * len(names)
        if losses.counted(num_tokens):
            losses.read(training.evaluate(), up=num_bytes, down=num_bytes)
    losses.read(training.evaluate(), up=num_bytes, down=num_bytes)
    steps = config.run.inner_steps - lab.warm_steps
    return _result(losses, training.num_parameters) | {
        "ended": "",
        "steps": dict.fromkeys(names, steps),
        "busy": dict.fromkeys(names, busy_s / now),
        "rounds": 0,
        "syncer_failures": 0,
        "solo_rounds": 0,
        "dropped_tokens": 0.0,
        "digests": [],
        "inner_steps": steps,
        "failures": 0,
        "norm_ratio": None,
    }


def _union_training(
    point: LabPoint, start: Path | None, on_loss: Callable[[float], None]
) -> LabTraining:
    data = open_text(point.config)
    batches = union_of(point.config, data, point.lab.data.split)
    training = LabTraining(union_config(point.config), data, batches, point.device, on_loss)
    if start is not None:
        training.load(start, point.lab.warm_steps)
    return training


# -- of both ---------------------------------------------------------------------------------------


def _losses(point: LabPoint, clock: Callable[[], float], on_step: OnStep) -> LossCurve:
    return LossCurve(
        clock,
        start_tokens=point.lab.warm_steps * point.tokens_per_inner_step,
        total_tokens=point.config.run.inner_steps * point.tokens_per_inner_step,
        points=point.lab.points,
        on_progress=on_step,
    )


def _heard_by(losses: LossCurve, name: str) -> Callable[[float], None]:
    return lambda loss: losses.trained(name, loss)


def _result(losses: LossCurve, num_parameters: int) -> Result:
    last = losses.readings[-1] if losses.readings else None
    return {
        "loss": None if last is None else last.loss,
        "tokens": losses.tokens,
        "virtual_s": 0.0 if last is None else last.virtual_s,
        "bytes_up": 0 if last is None else last.bytes_up,
        "bytes_down": 0 if last is None else last.bytes_down,
        "parameters": num_parameters,
        "readings": [reading.as_dict() for reading in losses.readings],
    }


def _virtual_now() -> float:
    return asyncio.get_running_loop().time()


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    """Fix the threads of an operation: sums depend on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _records() -> Iterator[Path]:
    """Give the syncer a directory: in memory where there is one, for nothing of it is kept."""
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="diloco-lab-", dir=place) as directory:
        yield Path(directory)
