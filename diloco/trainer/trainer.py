"""Owns one inner step and one evaluation of an island: batch, gradients, clipping, update.

Composes the other modules of this folder and holds the model whose parameters the outer loop reads
and writes between two steps. Knows nothing of that loop, of links or of other islands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from diloco.config.inner import InnerConfig
from diloco.data.batches import Evaluation
from diloco.errors import ConfigError
from diloco.island.lanes.parameters import reshard_
from diloco.trainer.gradients import clip_gradients_, settle_gradients_
from diloco.trainer.launched_step import (
    HostCopy,
    InnerMetrics,
    LaunchedStep,
    begin_measuring,
)
from diloco.trainer.models.cross_entropy import token_losses
from diloco.trainer.models.experts import balance_
from diloco.trainer.models.families import Model
from diloco.trainer.optimizers.optimizer import (
    apply_if_finite_,
    build_optimizer,
    learning_rate,
    set_learning_rate_,
    step_bound,
)
from diloco.trainer.parallel.context import positions_here
from diloco.trainer.parallel.mesh import IslandMesh
from diloco.trainer.parallel.parallelize import set_is_last_micro_batch_
from diloco.trainer.parallel.pipeline import Pipeline, PipelineRunner, parts_of, sum_tied_gradients_
from diloco.trainer.parallel.tensor_parallel import partial_parameters
from diloco.trainer.state import mend_moments_, new_moments_


class Text(Protocol):
    """The source of the tokens of an inner step."""

    def batch(self, inner_step: int) -> Tensor:
        """Return the tokens of the step that follows so many completed ones, shape [B, S + 1]."""


class GradientHook(Protocol):
    """Makes the gradients of an inner step those of more ranks than the trainer knows."""

    def begin(self) -> None:
        """Hear that the last backward of an inner step begins."""

    def finish(self) -> None:
        """Return when the gradients are in place, before they are clipped."""


class InnerTrainer:
    """Trains the model of one island, one inner step a call; every rank calls in step.

    Attributes:
        model: The parallelised model. Its parameters may be changed in place between calls.
        optimizer: Over the model's parameters.
    """

    def __init__(
        self,
        model: Model | Pipeline,
        *,
        mesh: IslandMesh,
        batches: Text,
        evaluation: Evaluation,
        config: InnerConfig,
        batch_size: int,
        micro_batches: int = 1,
        inner_steps: int,
        clock: Callable[[], float],
        gradient_hook: GradientHook | None = None,
    ) -> None:
        """Build the optimizer and keep the rest.

        Args:
            model: Parallelised over `mesh` and filled with values.
            mesh: The island's ranks.
            batches: The island's text, of which this rank takes its slice.
            evaluation: Held-out text.
            config: Optimizer and clipping.
            batch_size: Sequences of the whole island and inner step.
            micro_batches: Parts in which every rank computes its share of them.
            inner_steps: Inner steps of the run, for the learning rate.
            clock: Monotonic seconds.
            gradient_hook: Stands between backward and clipping; None: nothing does.

        Raises:
            ConfigError: If the batch cannot be divided into equal micro-batches.
        """
        parts = mesh.dp_size * micro_batches
        if batch_size % parts:
            raise ConfigError(
                f"a batch of {batch_size} sequences cannot be divided into dp_replicate x dp_shard "
                f"x micro_batches = {parts} equal parts; use a multiple as tokens_per_inner_step / "
                "sequence_length"
            )
        self.model = model
        self.optimizer = build_optimizer(model, config.optimizer)
        self._mesh = mesh
        self._batches = batches
        self._evaluation = evaluation
        self._config = config
        self._batch_size = batch_size
        self._micro_batches = micro_batches
        self._micro_batch_size = batch_size // parts
        self._inner_steps = inner_steps
        self._clock = clock
        self._gradient_hook = gradient_hook
        self._pipeline = (
            PipelineRunner(
                model,
                mesh,
                self._micro_loss,
                micro_batches=micro_batches,
                micro_batch_size=self._micro_batch_size,
            )
            if isinstance(model, Pipeline)
            else None
        )

    def inner_step(self, step: int, schedule_step: float | None = None) -> LaunchedStep:
        """Launch the inner step that follows `step` completed ones; collective.

        On an accelerator the host waits for nothing: clipping, and whether a gradient that is not
        finite forbids the update, are the device's work; read the figures when the next step is
        launched.

        The gradient is that of the mean loss over the island's batch, whatever the number of
        ranks and micro-batches. Gradients are freed before returning.

        Args:
            step: Completed inner steps, from 0; it chooses the batch.
            schedule_step: Completed inner steps of the run, which choose the learning rate; None:
                `step`.
        """
        began = begin_measuring(self._mesh.device, self._clock)
        at = step if schedule_step is None else schedule_step
        rate = learning_rate(self._config.optimizer, at, self._inner_steps)
        set_learning_rate_(self.optimizer, rate)
        with record_function("diloco/inner/batch"):
            tokens = self._batches.batch(step)
        loss = self._backward(tokens)
        with record_function("diloco/inner/clip"):
            grad_norm = self._clip()
        bound = step_bound(self.optimizer)
        with record_function("diloco/inner/optimizer"):
            # One value that is not finite would make all parameters and moments so.
            apply_if_finite_(self.optimizer, grad_norm)
            self.optimizer.zero_grad(set_to_none=True)
        with record_function("diloco/inner/balance"):
            expert_loads = self._balance()
        if expert_loads:
            bound = replace(bound, update=max(bound.update, self._config.expert_bias_speed))
        num_tokens = self._batch_size * (tokens.shape[1] - 1)
        loss = self._sum_over_island(loss / self._mesh.config.loss_size)
        sizes = {name: len(load_X) for name, load_X in expert_loads.items()}
        copy = HostCopy(torch.cat([loss[None], grad_norm[None], *expert_loads.values()]), began)

        def read() -> InnerMetrics:
            (loss, grad_norm, *counts), duration_s = copy.read()
            rest = iter(counts)
            loads = {
                name: tuple(int(count) for count in islice(rest, size))
                for name, size in sizes.items()
            }
            return InnerMetrics(
                step + 1, loss, grad_norm, rate, num_tokens, duration_s, loads, bound
            )

        return LaunchedStep(num_tokens, bound, copy.is_known, read)

    def mend(self, *, is_new: bool) -> int:
        """Repair the optimizer's state; returns how many values of it were not right.

        Args:
            is_new: Whether it begins again, with moments of zero.
        """
        if is_new:
            new_moments_(self.model, self.optimizer, step=0)
            return 0
        return mend_moments_(self.optimizer, clip_norm=self._config.clip_norm)

    def _backward(self, tokens_BS1: Tensor) -> Tensor:
        """Make the gradient of this rank's part of the batch; returns its mean loss, float64."""
        tokens_BS1 = tokens_BS1.to(self._mesh.device, non_blocking=True)
        if self._pipeline is not None:
            with record_function("diloco/inner/pipeline"):
                return self._pipeline.backward(tokens_BS1)
        loss = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for index, micro_batch in enumerate(torch.split(tokens_BS1, self._micro_batch_size)):
            is_last = index == self._micro_batches - 1
            set_is_last_micro_batch_(self.model, self._mesh, is_last)
            if self._gradient_hook is not None and is_last:
                self._gradient_hook.begin()
            with record_function("diloco/inner/forward"):
                logits_BSV, targets_BS = self._forward(micro_batch)
                assert logits_BSV is not None, "only of a pipeline ranks have no logits"
                minimised, micro_loss = self._micro_loss(logits_BSV, targets_BS)
            with record_function("diloco/inner/backward"):
                torch.autograd.backward(minimised)
            loss += micro_loss
        if self._gradient_hook is not None:
            with record_function("diloco/inner/gradient_hook"):
                self._gradient_hook.finish()
        return loss

    def _clip(self) -> Tensor:
        """Give every gradient its whole value, and clip them; returns their norm before."""
        settle_gradients_(
            self.model.parameters(),
            partial=partial_parameters(self.model),
            group=self._mesh.tp_group,
        )
        copies: list[Tensor] = []
        if isinstance(self.model, Pipeline):
            sum_tied_gradients_(self.model)
            copies = self.model.tied_copies
        return clip_gradients_(
            self.model.parameters(),
            self._config.clip_norm,
            copies=copies,
            group=self._mesh.pp_group,
        )

    def _balance(self) -> dict[str, Tensor]:
        """Balance the experts of every layer; returns the loads of all layers."""
        loads: dict[str, Tensor] = {}
        for part in parts_of(self.model):
            loads |= balance_(part, self._config.expert_bias_speed, self._mesh.loss_group)
        return loads if self._pipeline is None else self._pipeline.gather_loads(loads)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Measure the loss on the held-out sequences, as parameters are now; collective.

        Sequences need not divide among ranks.

        Returns:
            Nats a byte of text, equal on all ranks of the island.
        """
        tokens, num_sequences = self._evaluation.tokens, len(self._evaluation.tokens)
        # All ranks make the same number of forwards; a repeated last sequence counts for nothing.
        size, dp_size = self._micro_batch_size, self._mesh.dp_size
        num_rounds = -(-num_sequences // (size * dp_size))
        first = self._mesh.dp_coordinate * num_rounds * size
        rows = torch.arange(first, first + num_rounds * size)
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for part in torch.split(rows, size):
            sequences = tokens[part.clamp(max=num_sequences - 1)].to(self._mesh.device)
            logits_BSV, targets_BS = self._forward(sequences)
            if logits_BSV is None:
                continue  # another rank has the end of the pipeline
            losses, _ = self._losses(logits_BSV, targets_BS, z_loss=0.0)
            total += losses[: int((part < num_sequences).sum())].sum(dtype=torch.float64)
        reshard_(self.model.modules())  # else the next forward would use today's gathered values
        return self._sum_over_island(total).item() / self._evaluation.num_bytes

    def _forward(self, tokens_BS1: Tensor) -> tuple[Tensor | None, Tensor]:
        """Compute logits and targets of this rank's S / cp positions, the last column aside.

        Where another rank of a pipeline has the logits, they are None.
        """
        if self._pipeline is not None:
            return self._pipeline.logits(tokens_BS1)
        here_S = positions_here(self._mesh, tokens_BS1.shape[1] - 1)
        return self.model(tokens_BS1[:, here_S], here_S), tokens_BS1[:, here_S + 1]

    def _micro_loss(self, logits_BSV: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Compute what a micro-batch adds to what is minimised, and of it to the loss told."""
        losses_BS, penalties_BS = self._losses(logits_BSV, targets_BS, z_loss=self._config.z_loss)
        loss = losses_BS.mean() / self._micro_batches
        if penalties_BS is None:
            return loss, loss.detach()
        return loss + penalties_BS.mean() / self._micro_batches, loss.detach()

    def _losses(
        self, logits_BSV: Tensor, targets_BS: Tensor, *, z_loss: float
    ) -> tuple[Tensor, Tensor | None]:
        """Compute loss and penalty of every predicted token, shape [B, S]; see `token_losses`."""
        losses_N, penalties_N = token_losses(
            logits_BSV.flatten(0, 1).float(),
            targets_BS.flatten(),
            group=self._mesh.tp_group if self._mesh.config.loss_parallel else None,
            z_loss=z_loss,
        )
        penalties_BS = None if penalties_N is None else penalties_N.view_as(targets_BS)
        return losses_N.view_as(targets_BS), penalties_BS

    def _sum_over_island(self, value: Tensor) -> Tensor:
        """Add a scalar over the ranks that took different tokens, and tell other stages."""
        for group in (self._mesh.loss_group, self._mesh.pp_group):
            if group is not None:
                dist.all_reduce(value, group=group)  # of a pipeline, ranks of its end have it
        return value
