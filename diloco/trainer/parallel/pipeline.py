"""Owns pipeline parallelism: which layers are on which rank, and micro-batches on their way.

    loop   stage s is on rank s mod pp          gpipe, 1f1b, bfs, interleaved-1f1b, interleaved-zb
    V      s and 2 pp - 1 - s are on one rank   zbv, dualpipev

The embedding is with the first stage, norm and head with the last; `stage_layers` deals the layers.
What travels between stages is the residual stream of a micro-batch, and its gradient back.
Schedules are PyTorch's; an evaluation, which has no backward, goes its own straight way.

Source: GPipe (arXiv 1811.06965), 1F1B and interleaved stages (arXiv 2104.04473), breadth-first
(arXiv 2211.05953), zero bubble (arXiv 2401.10241), DualPipe (arXiv 2412.19437).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from diloco.config.pipeline import V_SCHEDULES, Schedule, stage_layers
from diloco.errors import ConfigError
from diloco.island.lanes.boxes import stored
from diloco.trainer.models.families import Model, Shape, build_model
from diloco.trainer.models.model import Llama, LlamaShape
from diloco.trainer.models.model import build_model as build_stage
from diloco.trainer.parallel.context import positions_here
from diloco.trainer.parallel.mesh import IslandMesh

#: Logits and targets of a micro-batch -> what it adds to what is minimised, and to the loss told.
MicroLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

_SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI = {
    "bfs": ScheduleLoopedBFS,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class Pipeline(nn.Module):
    """The stages of one rank, first ones first; parameters are named as in the whole model.

    Attributes:
        shape: Of the whole model.
        ranks: Coordinate along pp of every stage of the pipeline.
        stages: Stages of this rank by their index in the pipeline, as text.
        unnamed_modules: Paths whose last part is no part of canonical names.
        tied_group: The ranks of the first and the last stage, where these are tied and this rank
            has one of them; else None.
    """

    def __init__(self, shape: LlamaShape, mesh: IslandMesh) -> None:
        """Create the modules of this rank on the meta device; collective if embeddings are tied.

        Args:
            shape: Of the whole model.
            mesh: With pp above 1.

        Raises:
            ConfigError: If there are more stages than layers, or tied embeddings are on one rank.
        """
        super().__init__()
        config = mesh.config
        self.shape = shape
        self.ranks = stage_ranks(config.schedule, config.pp, config.stages_per_rank)
        num_stages = len(self.ranks)
        if num_stages > shape.num_layers:
            raise ConfigError(
                f"pp x stages_per_rank = {num_stages} stages must be at most model.num_layers = "
                f"{shape.num_layers}"
            )
        if shape.tie_embeddings and self.ranks[0] == self.ranks[-1]:
            raise ConfigError(
                f'schedule = "{config.schedule}" has first and last stage on one rank, which '
                "cannot tie them yet: set model.tie_embeddings = false, or another schedule"
            )
        here = [s for s, rank in enumerate(self.ranks) if rank == mesh.coordinate("pp")]
        layers = stage_layers(shape.num_layers, num_stages)
        self.stages = nn.ModuleDict({str(s): build_stage(shape, layers[s]) for s in here})
        self.unnamed_modules = ("stages", *(f"stages.{s}" for s in here))
        self.tied_group = _tied_group(mesh) if shape.tie_embeddings else None

    @property
    def parts(self) -> list[Llama]:
        """The stages of this rank, in order."""
        return [stage for stage in self.stages.values() if isinstance(stage, Llama)]

    @property
    def tied_parameter(self) -> Tensor | None:
        """This rank's copy of what first and last stage share; None: it has none."""
        if self.tied_group is None:
            return None
        first, last = self.parts[0], self.parts[-1]
        module = first.embed if first.embed is not None else last.head
        assert module is not None, "the group has the ranks of first and last stage"
        return module.weight

    @property
    def tied_copies(self) -> list[Tensor]:
        """What of this rank's parameters the first stage has, too: the last stage's head, tied."""
        tied = self.tied_parameter
        return [] if tied is None or self.parts[0].embed is not None else [tied]


def parts_of(model: Model | Pipeline) -> Sequence[Model]:
    """Return what is parallelised one by one: the stages of this rank, or the whole model."""
    return model.parts if isinstance(model, Pipeline) else (model,)


def build_part(shape: Shape, mesh: IslandMesh) -> Model | Pipeline:
    """Build what of the model this rank has, without memory, on the meta device."""
    if mesh.size("pp") > 1 and isinstance(shape, LlamaShape):
        return Pipeline(shape, mesh)
    return build_model(shape)


def stage_ranks(schedule: Schedule, pp: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the coordinate along pp of every stage, in the order of the stages."""
    up = tuple(range(pp))
    if schedule in V_SCHEDULES:
        return up + up[::-1]
    return up * stages_per_rank


def _tied_group(mesh: IslandMesh) -> dist.ProcessGroup | None:
    """Join the ranks of first and last stage, of one place along all other axes each; collective.

    Every rank of the island takes part in making every group, its own or not. Those of the stages
    between get a group, too, which nobody uses: PyTorch names a group that its members alone make
    by the number of groups that each is in, and waits for ever where these differ.
    """
    assert mesh.device_mesh is not None, "a pipeline has several ranks"
    if mesh.size("pp") == 2:
        return mesh.pp_group
    mine = None
    columns = mesh.device_mesh.mesh.reshape(mesh.size("pp"), -1)  # pp is the outermost axis
    for first, *between, last in columns.T.tolist():
        group = dist.new_group([first, last])
        dist.new_group(between)
        if dist.get_rank() in (first, last):
            mine = group
    return mine


def sum_tied_gradients_(pipeline: Pipeline) -> None:
    """Give both copies of a tied parameter the sum of their gradients, in place; collective.

    Copies lie alike along all other axes, so that what ranks store of them is added as it is.
    """
    parameter = pipeline.tied_parameter
    if parameter is None:
        return
    grad = parameter.grad
    assert grad is not None, "after the backward of all micro-batches"
    dist.all_reduce(stored(grad), group=pipeline.tied_group)


class PipelineRunner:
    """Moves micro-batches through the pipeline; every rank of it makes the same calls.

    Under FSDP2 a stage's gradients stay whole until the last micro-batch has passed it, and are
    reduced once.

    Args:
        pipeline: Parallelised and filled with values.
        mesh: Of the island.
        micro_loss: Called on the ranks of the last stage; with all factors, those of a mean over
            micro-batches too.
        micro_batches: Of an inner step.
        micro_batch_size: Sequences of each.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        mesh: IslandMesh,
        micro_loss: MicroLoss,
        *,
        micro_batches: int,
        micro_batch_size: int,
    ) -> None:
        """Assign, and give every stage its positions; the schedule is made for the first batch."""
        self._pipeline = pipeline
        self._mesh = mesh
        self._micro_loss = micro_loss
        self._micro_batches = micro_batches
        self._micro_batch_size = micro_batch_size
        self._total = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self._schedule: Any = None  # PyTorch's two bases of schedules have no public name
        self._positions_S = torch.empty(0, dtype=torch.int64)  # of the sequences that pass
        self._num_positions = 0  # of all ranks along cp
        for stage in pipeline.parts:
            # Stages pass one tensor on; positions are the same for all and need not travel.
            stage.register_forward_pre_hook(self._with_positions)

    def backward(self, tokens_BS1: Tensor) -> Tensor:
        """Run the micro-batches forward and backward; collective over the pipeline.

        Args:
            tokens_BS1: All of them, shape [B, S + 1], equal on all ranks of the pipeline.

        Returns:
            Their loss, float64, where the last stage is; zero on other ranks.
        """
        inputs_BS, targets_BS = self._split(tokens_BS1)
        if self._schedule is None:
            self._schedule = self._make_schedule(inputs_BS.shape[1])
        self._total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        self._schedule.step(
            *([inputs_BS] if self._has(0) else []),
            target=targets_BS if self._has(-1) else None,
            return_outputs=False,
        )
        return self._total

    @torch.no_grad()
    def logits(self, tokens_BS1: Tensor) -> tuple[Tensor | None, Tensor]:
        """Run sequences forward alone; collective over the pipeline.

        All ranks go through stages and their edges in one order, so that none waits for another
        that waits for it, whichever stages it has.

        Args:
            tokens_BS1: Equal on all ranks of the pipeline, shape [B, S + 1].

        Returns:
            What the last stage returns, where that is, None on other ranks; and the targets.
        """
        inputs_BS, targets_BS = self._split(tokens_BS1)
        ranks, x, here = self._pipeline.ranks, inputs_BS, self._mesh.coordinate("pp")
        for index, rank in enumerate(ranks):
            before = ranks[index - 1] if index else rank
            if rank != here:
                continue
            if before != rank:
                x = self._residual(len(inputs_BS))
                dist.recv(x, group=self._mesh.pp_group, group_src=before)
            x = self._pipeline.stages[str(index)](x)
            if index + 1 < len(ranks) and ranks[index + 1] != rank:
                dist.send(x.contiguous(), group=self._mesh.pp_group, group_dst=ranks[index + 1])
        return x if self._has(-1) else None, targets_BS

    def gather_loads(self, loads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tell every rank the loads of all stages' experts; collective where there are any.

        Args:
            loads: Of the layers of this rank, by the name of the router.

        Returns:
            Of all layers, in their order.
        """
        shape = self._pipeline.shape
        layers = [layer for layer in range(shape.num_layers) if shape.has_experts(layer)]
        names = [f"layers.{layer}.feed_forward.router" for layer in layers]
        if not names:
            return {}
        size = len(names), shape.experts.num_experts
        table = torch.zeros(size, dtype=torch.float64, device=self._mesh.device)
        for row, name in zip(table, names, strict=True):
            if name in loads:
                row.copy_(loads[name])
        dist.all_reduce(table, group=self._mesh.pp_group)
        return dict(zip(names, table, strict=True))

    def _has(self, stage: int) -> bool:
        return self._pipeline.ranks[stage] == self._mesh.coordinate("pp")

    def _split(self, tokens_BS1: Tensor) -> tuple[Tensor, Tensor]:
        num_positions = tokens_BS1.shape[1] - 1
        if self._num_positions != num_positions:
            self._num_positions = num_positions
            self._positions_S = positions_here(self._mesh, num_positions)
        return tokens_BS1[:, self._positions_S], tokens_BS1[:, self._positions_S + 1]

    def _with_positions(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (*inputs, self._positions_S)

    def _residual(self, num_sequences: int, **options: Any) -> Tensor:
        """Return room for what travels: under tp and cp every rank has its own positions of it."""
        length = len(self._positions_S) // self._mesh.config.tp
        dtype = self._pipeline.parts[0].residual_dtype
        options = {"device": self._mesh.device, "dtype": dtype, **options}
        return torch.empty(num_sequences, length, self._pipeline.shape.dim, **options)

    def _make_schedule(self, sequence_length: int) -> Any:
        """Make PyTorch's schedule, of inputs and outputs that are known, so that none is tried."""
        stages = [
            PipelineStage(
                self._pipeline.stages[str(index)],
                index,
                len(self._pipeline.ranks),
                self._mesh.device,
                input_args=self._example(index, sequence_length),
                output_args=self._example(index + 1, sequence_length),
                group=self._mesh.pp_group,
            )
            for index, rank in enumerate(self._pipeline.ranks)
            if rank == self._mesh.coordinate("pp")
        ]
        name = self._mesh.config.schedule
        # The loss has all factors: no schedule scales gradients, and the mean over dp is FSDP2's.
        options: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        if name in _SINGLE:
            return _SINGLE[name](stages[0], self._micro_batches, **options)
        return _MULTI[name](stages, self._micro_batches, **options)

    def _example(self, index: int, sequence_length: int) -> Tensor:
        """Return a tensor like what enters stage `index`, on the meta device.

        What leaves the last stage travels nowhere: the example of it is not looked at.
        """
        if index == 0:
            shape = (self._micro_batch_size, sequence_length)
            return torch.empty(shape, dtype=torch.int64, device="meta")
        return self._residual(self._micro_batch_size, device="meta", requires_grad=True)

    def _loss(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        minimised, loss = self._micro_loss(logits_BSV, targets_BS)
        self._total += loss
        return minimised
