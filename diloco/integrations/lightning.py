"""`DiLoCoCallback` runs the outer loop in a `lightning.Trainer`.

    with diloco.connect(config) as connection:
        callback = DiLoCoCallback(connection, "eu-west")
        trainer = lightning.Trainer(max_steps=config.run.inner_steps, callbacks=[callback])
        trainer.fit(module, loader)  # the module ends with the published parameters

An optimizer step, its gradient accumulation included, is an inner step; the run and not the Trainer
says when training ends. Validation sees the published parameters. Where a checkpoint of the run is
due, the Trainer saves its own, and the outer state next to it. The outer loop is given the loss
that `training_step` returns, and the bound of an Adam or AdamW step.

See `_TrainingEpochLoop`, `_FitLoop` and the hooks of `Callback` of lightning 2.6.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from diloco.errors import ConfigError
from diloco.extras import missing
from diloco.integrations.other_trainers import (
    common_bound,
    finish,
    follow_,
    followed,
    joined,
    load_outer,
    repair_state_,
    save_outer,
    skip_to,
)
from diloco.island.connection import Connection
from diloco.island.session import DiLoCo
from diloco.protocol.island.soundness import StepBound
from diloco.telemetry.events import Event

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import (
        DDPStrategy,
        ModelParallelStrategy,
        SingleDeviceStrategy,
    )
except ModuleNotFoundError as absent:
    raise missing("diloco.integrations.lightning", str(absent.name)) from absent

#: Strategies whose parameters the outer loop reads where the model has them.
_STRATEGIES = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)


class DiLoCoCallback(Callback):
    """Steps, saves, resumes and stops one island's outer loop from the Trainer's hooks.

    Give it to one Trainer, which calls `fit` once.

    Attributes:
        outer: The island's `DiLoCo`, from the beginning of the training on.
    """

    outer: DiLoCo

    def __init__(
        self,
        connection: Connection,
        directory: str | Path,
        *,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """Assign only; the run is joined when the training begins.

        Args:
            connection: Open: `with diloco.connect(config) as connection:`.
            directory: Where checkpoints of the run are saved: `checkpoint-N` for each, N being its
                number.
            on_event: Called with every event of the outer loop, in any thread.
        """
        self._connection = connection
        self._directory = Path(directory)
        self._on_event = on_event
        self._on_arrival = connection.config.outer.is_on_arrival
        self._validation = contextlib.ExitStack()
        self._losses: list[Tensor] = []  # of the micro-batches of this inner step
        self._schedulers: list[LambdaLR] = []  # that follow the tokens of a decoupled run
        self._bound = StepBound()
        self._stepped = 0

    # -- begin -----------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the run, and agree with the Trainer on where it stands.

        Raises:
            ConfigError: If the Trainer, the module or a checkpoint does not fit the run.
            DilocoError: As the join may fail.
        """
        _check_fit(trainer, pl_module)
        self.outer = outer = joined(
            pl_module,
            self._connection,
            self._on_event,
            steps=trainer.max_steps,
            setting="max_steps",
        )
        if self._on_arrival:
            self._schedulers = followed(each.scheduler for each in trainer.lr_scheduler_configs)
        if outer.resume_step is not None:
            self._resume(trainer, outer.resume_step)
        elif trainer.global_step > outer.start_step:
            raise ConfigError(
                f"the Trainer was resumed at step {trainer.global_step}, and the run stands at "
                f"inner step {outer.start_step}: call trainer.fit without ckpt_path, or resume the "
                f"run, too (diloco coordinator RUN.toml --resume)"
            )
        elif not self._on_arrival and trainer.global_step < outer.start_step:
            for config in trainer.lr_scheduler_configs:
                if config.interval == "step" and isinstance(config.scheduler, LambdaLR):
                    skip_to(outer.start_step, trainer.global_step, config.scheduler.step)
        follow_(self._schedulers, outer.schedule_step)
        self._stepped = trainer.global_step
        # The run says when training ends: its islands may make other numbers of steps.
        trainer.fit_loop.epoch_loop.max_steps = trainer.fit_loop.max_epochs = -1

    def _resume(self, trainer: Trainer, resume_step: int) -> None:
        """Load the outer state next to the checkpoint that the Trainer has loaded."""
        folder = self._folder(resume_step)
        loaded = Path(trainer.ckpt_path or "")
        if loaded.resolve() != (folder / "trainer.ckpt").resolve():
            raise ConfigError(
                f"the run is resumed at its checkpoint {resume_step}, the Trainer from "
                f'{trainer.ckpt_path}: call trainer.fit(..., ckpt_path="{folder}/trainer.ckpt")'
            )
        load_outer(self.outer, folder)

    def _folder(self, number: int) -> Path:
        return self._directory / f"checkpoint-{number}"

    # -- train -----------------------------------------------------------------------------------

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Take the bound of the optimizer step, whose learning rates are set now."""
        self._bound = common_bound([optimizer])

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping[str, Any] | None,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Account for an optimizer step, if this batch ended one; save where that is due."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:  # a part of the mean over the batches of a step
            self._losses.append(loss.detach().float())
        if trainer.global_step == self._stepped:
            return
        self._stepped, outer = trainer.global_step, self.outer
        num_tokens = self._connection.config.island.tokens_per_inner_step
        outer.log(loss=self._loss(trainer))
        outer.step(num_tokens=num_tokens, bound=self._bound)
        repair_state_(trainer.optimizers, outer.mend)
        follow_(self._schedulers, outer.schedule_step)
        if outer.checkpoint_due:
            self._save(trainer)
        if outer.is_over or outer.is_stopping:
            trainer.should_stop = True

    def _loss(self, trainer: Trainer) -> float | None:
        """Mean loss of the island in this inner step, the same on all ranks; None: not known."""
        losses, self._losses = self._losses, []
        if not losses:
            return None
        loss: Tensor = trainer.strategy.reduce(torch.stack(losses).sum(), reduce_op="mean")
        return loss.item()

    def _save(self, trainer: Trainer) -> None:
        """Save the island's part of the run checkpoint that is due: collective."""
        outer = self.outer
        folder = self._folder(outer.checkpoint_number)
        with outer.checkpointing():
            trainer.save_checkpoint(folder / "trainer.ckpt")
            save_outer(outer, folder, trainer.global_rank)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the published parameters in place; the sanity check is before the join."""
        if not trainer.sanity_checking:
            self._validation.enter_context(self.outer.global_parameters())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the island's own parameters back."""
        self._validation.close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Merge what is outstanding; see `finish`."""
        finish(self.outer, "the Trainer", "leave out callbacks and limits that stop the Trainer")


def _check_fit(trainer: Trainer, module: LightningModule) -> None:
    """Refuse what would train something else than the run.

    Raises:
        ConfigError: Naming every problem, and what to set.
    """
    problems = []
    if not module.automatic_optimization:
        problems.append(
            "automatic_optimization = False: what an inner step is, only the module knows: write "
            "the loop of diloco.DiLoCo"
        )
    if not isinstance(trainer.strategy, _STRATEGIES):
        problems.append(
            f"strategy={type(trainer.strategy).__name__}: its parameters lie flat in memory of its "
            f"own: use one device, DDPStrategy or ModelParallelStrategy"
        )
    if problems:
        raise ConfigError("lightning.Trainer: " + "; ".join(problems))
