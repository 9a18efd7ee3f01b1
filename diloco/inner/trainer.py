"""Owns one inner step and one evaluation of an island: batch, gradients, clipping, update.

Composes the other modules of this folder and holds the model whose parameters the outer loop reads
and writes between two steps. Knows nothing of that loop, of links or of other islands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function

from diloco.config.inner import InnerConfig
from diloco.data.batches import Batches, Evaluation
from diloco.errors import ConfigError
from diloco.inner.gradients import clip_gradients_, settle_gradients_
from diloco.inner.model import Llama
from diloco.inner.optimizer import build_optimizer, learning_rate, set_learning_rate_
from diloco.inner.parallelize import IslandMesh


@dataclass(frozen=True, slots=True)
class InnerMetrics:
    """What one inner step of an island was; equal on all its ranks, the duration excepted.

    Attributes:
        inner_step: Completed inner steps, this one included.
        loss: Mean over the island's whole batch, in nats a token, before the update.
        grad_norm: Global norm of the gradient before clipping.
        learning_rate: Rate used.
        num_tokens: Predicted tokens of the island's whole batch.
        duration_s: Seconds from the batch to the updated parameters, on this rank.
    """

    inner_step: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    duration_s: float


class InnerTrainer:
    """Trains the model of one island, one inner step a call; every rank calls in step.

    Attributes:
        model: The parallelised model. Its parameters may be changed in place between calls.
        optimizer: AdamW over the model's parameters.
    """

    def __init__(
        self,
        model: Llama,
        *,
        mesh: IslandMesh,
        batches: Batches,
        evaluation: Evaluation,
        config: InnerConfig,
        batch_size: int,
        inner_steps: int,
        clock: Callable[[], float],
    ) -> None:
        """Build the optimizer and keep the rest.

        Args:
            model: Parallelised over `mesh` and filled with values.
            mesh: The island's ranks.
            batches: The island's text, of which this rank takes its slice.
            evaluation: Held-out text.
            config: Optimizer, clipping and micro-batches.
            batch_size: Sequences of the whole island and inner step.
            inner_steps: Inner steps of the run, for the learning rate.
            clock: Monotonic seconds.

        Raises:
            ConfigError: If the batch cannot be divided into equal micro-batches.
        """
        parts = mesh.dp_size * config.micro_batches
        if batch_size % parts:
            raise ConfigError(
                f"a batch of {batch_size} sequences cannot be divided into dp_shard x "
                f"inner.micro_batches = {parts} equal parts; use a multiple as "
                "tokens_per_inner_step / sequence_length"
            )
        self.model = model
        self.optimizer = build_optimizer(model, config.optimizer)
        self._mesh = mesh
        self._batches = batches
        self._evaluation = evaluation
        self._config = config
        self._batch_size = batch_size
        self._micro_batch_size = batch_size // parts
        self._inner_steps = inner_steps
        self._clock = clock

    def inner_step(self, step: int, schedule_step: float | None = None) -> InnerMetrics:
        """Make the inner step that follows `step` completed ones; collective.

        The gradient is that of the mean loss over the island's batch, whatever the number of
        ranks and micro-batches. Gradients are freed before returning.

        Args:
            step: Completed inner steps, from 0; it chooses the batch.
            schedule_step: Completed inner steps of the run, which choose the learning rate; None:
                `step`.
        """
        started = self._clock()
        at = step if schedule_step is None else schedule_step
        rate = learning_rate(self._config.optimizer, at, self._inner_steps)
        set_learning_rate_(self.optimizer, rate)
        with record_function("diloco/inner/batch"):
            tokens = self._batches.batch(step)
        loss = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for micro_batch in torch.split(tokens, self._micro_batch_size):
            with record_function("diloco/inner/forward"):
                micro_loss = self._token_losses(micro_batch).mean() / self._config.micro_batches
            with record_function("diloco/inner/backward"):
                torch.autograd.backward(micro_loss)
            loss += micro_loss.detach()
        with record_function("diloco/inner/clip"):
            settle_gradients_(self.model.parameters())
            grad_norm = clip_gradients_(self.model.parameters(), self._config.clip_norm)
        with record_function("diloco/inner/optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return InnerMetrics(
            inner_step=step + 1,
            loss=self._sum_over_dp(loss / self._mesh.dp_size),
            grad_norm=grad_norm,
            learning_rate=rate,
            num_tokens=self._batch_size * (tokens.shape[1] - 1),
            duration_s=self._clock() - started,
        )

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
            losses = self._token_losses(tokens[part.clamp(max=num_sequences - 1)])
            total += losses[: int((part < num_sequences).sum())].sum(dtype=torch.float64)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # else the next forward would use today's gathered values
        return self._sum_over_dp(total) / self._evaluation.num_bytes

    def _token_losses(self, tokens_BS1: Tensor) -> Tensor:
        """Compute the loss of every predicted token, shape [B, S]."""
        tokens_BS1 = tokens_BS1.to(self._mesh.device)
        positions_S = torch.arange(tokens_BS1.shape[1] - 1, device=self._mesh.device)
        logits_BSV = self.model(tokens_BS1[:, :-1], positions_S)
        targets_BS = tokens_BS1[:, 1:]
        losses = F.cross_entropy(
            logits_BSV.flatten(0, 1).float(), targets_BS.flatten(), reduction="none"
        )
        return losses.view_as(targets_BS)

    def _sum_over_dp(self, value: Tensor) -> float:
        """Add a scalar over the ranks that took different sequences."""
        if self._mesh.dp_group is not None:
            dist.all_reduce(value, group=self._mesh.dp_group)
        return value.item()
