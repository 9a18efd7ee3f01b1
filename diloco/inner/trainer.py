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

from diloco.config.schema import InnerConfig
from diloco.errors import ConfigError
from diloco.inner.data import TextData
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
        data: TextData,
        config: InnerConfig,
        island_slot: int,
        batch_size: int,
        inner_steps: int,
        clock: Callable[[], float],
    ) -> None:
        """Build the optimizer and keep the rest.

        Args:
            model: Parallelised over `mesh` and filled with values.
            mesh: The island's ranks.
            data: Text.
            config: Optimizer, clipping and micro-batches.
            island_slot: Index of the island, which chooses its samples.
            batch_size: Sequences of the whole island and inner step.
            inner_steps: Inner steps of the run, for the learning rate.
            clock: Monotonic seconds.

        Raises:
            ConfigError: If the batch cannot be divided into equal micro-batches, or the model has
                fewer token ids than the text.
        """
        parts = mesh.dp_size * config.micro_batches
        if batch_size % parts:
            raise ConfigError(
                f"a batch of {batch_size} sequences cannot be divided into dp_shard x "
                f"inner.micro_batches = {parts} equal parts; use a multiple as "
                "tokens_per_inner_step / sequence_length"
            )
        if model.shape.vocab_size < data.vocab_size:
            raise ConfigError(
                f"model.vocab_size = {model.shape.vocab_size} is less than the text's "
                f"{data.vocab_size} token ids; raise it"
            )
        self.model = model
        self.optimizer = build_optimizer(model, config.optimizer)
        self._mesh = mesh
        self._data = data
        self._config = config
        self._island_slot = island_slot
        self._batch_size = batch_size
        self._micro_batch_size = batch_size // parts
        self._inner_steps = inner_steps
        self._clock = clock

    def inner_step(self, step: int) -> InnerMetrics:
        """Make the inner step that follows `step` completed ones; collective.

        The gradient is that of the mean loss over the island's batch, whatever the number of
        ranks and micro-batches. Gradients are freed before returning.

        Args:
            step: Completed inner steps, from 0; it chooses batch and learning rate.
        """
        started = self._clock()
        rate = learning_rate(self._config.optimizer, step, self._inner_steps)
        set_learning_rate_(self.optimizer, rate)
        tokens = self._data.batch(
            self._island_slot,
            step,
            self._batch_size,
            dp_coordinate=self._mesh.dp_coordinate,
            dp_size=self._mesh.dp_size,
        )
        loss = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for micro_batch in torch.split(tokens, self._micro_batch_size):
            micro_loss = self._token_losses(micro_batch).mean() / self._config.micro_batches
            torch.autograd.backward(micro_loss)
            loss += micro_loss.detach()
        settle_gradients_(self.model.parameters())
        grad_norm = clip_gradients_(self.model.parameters(), self._config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return InnerMetrics(
            inner_step=step + 1,
            loss=self._sum_over_dp(loss / self._mesh.dp_size),
            grad_norm=grad_norm,
            learning_rate=rate,
            num_tokens=self._batch_size * self._data.sequence_length,
            duration_s=self._clock() - started,
        )

    @torch.no_grad()
    def evaluate(self, num_sequences: int) -> float:
        """Measure the mean loss on fixed held-out sequences, as parameters are now; collective.

        Args:
            num_sequences: Sequences, at least 1; need not divide among ranks.

        Returns:
            Nats a byte, equal on all ranks of the island.
        """
        tokens = self._data.evaluation(num_sequences)
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
        return self._sum_over_dp(total) / (num_sequences * self._data.sequence_length)

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
