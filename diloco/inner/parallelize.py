"""Owns how an island's ranks share the model: one rank, FSDP2 over `dp_shard`, or TP over `tp`.

Rewires a model built on the meta device, materialises it on this rank's device and ties it again.
Knows the model, no data and no outer loop; `gradients` handles what comes out of its backward.

Source: ZeRO (arXiv 1910.02054), Megatron-LM (arXiv 1909.08053), sequence parallelism
(arXiv 2205.05198).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from diloco.errors import ConfigError
from diloco.inner.model import Block, Llama

#: Blocks of fewer elements are gathered together with the root: one collective for all of them
#: instead of two a block. A block of 2^22 float32 values, 16 MiB, fills a fast link by itself.
MIN_UNIT_NUMEL = 1 << 22


@dataclass(frozen=True, slots=True)
class IslandMesh:
    """The ranks of one island, as the inner trainer sees them.

    Attributes:
        device: Device of this rank.
        device_mesh: One-dimensional mesh named ``dp_shard`` or ``tp``; None for one rank.
    """

    device: torch.device
    device_mesh: DeviceMesh | None

    @property
    def tp_size(self) -> int:
        """Number of ranks that share one sequence; 1 without tensor parallelism."""
        return self._size("tp")

    @property
    def dp_size(self) -> int:
        """Number of ranks that take different sequences; 1 without data parallelism."""
        return self._size("dp_shard")

    @property
    def dp_coordinate(self) -> int:
        """Position of this rank among the ranks that take different sequences, from 0."""
        return 0 if self.dp_group is None else dist.get_rank(self.dp_group)

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """Group of the ranks that take different sequences; None if this rank takes them all."""
        mesh = self.device_mesh
        return mesh.get_group() if mesh is not None and self.dp_size > 1 else None

    def _size(self, axis: str) -> int:
        if self.device_mesh is None or self.device_mesh.mesh_dim_names != (axis,):
            return 1
        return self.device_mesh.size()


def make_mesh(device: torch.device, *, dp_shard: int = 1, tp: int = 1) -> IslandMesh:
    """Arrange the ranks of the default process group; collective unless the island is one rank.

    Args:
        device: Device of this rank.
        dp_shard: Ranks over which FSDP2 spreads parameters and sequences.
        tp: Ranks over which matrices and positions are spread.

    Raises:
        ConfigError: If both are above 1, or their product is not the number of ranks.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if dp_shard * tp != num_ranks:
        raise ConfigError(
            f"mesh dp_shard = {dp_shard}, tp = {tp} needs {dp_shard * tp} ranks, the island has "
            f"{num_ranks}; change the mesh or the number of ranks"
        )
    if dp_shard > 1 and tp > 1:
        raise ConfigError(
            f"mesh dp_shard = {dp_shard}, tp = {tp}: both at once are not supported; set one to 1"
        )
    if num_ranks == 1:
        return IslandMesh(device, None)
    axis = "tp" if tp > 1 else "dp_shard"
    return IslandMesh(device, init_device_mesh(device.type, (num_ranks,), mesh_dim_names=(axis,)))


def parallelize(model: Llama, mesh: IslandMesh, *, sequence_length: int) -> None:
    """Spread a model built on the meta device over the mesh and give it memory, in place.

    Values are undefined afterwards; `initialise_` or a checkpoint provides them.

    Args:
        model: From `build_model`.
        mesh: From `make_mesh`.
        sequence_length: Positions of a training sequence.

    Raises:
        ConfigError: If `tp` does not divide heads, widths, vocabulary or sequence length.
    """
    if mesh.tp_size > 1:
        _check_divisible_by_tp(model, mesh.tp_size, sequence_length)
        _apply_tensor_parallel(model, mesh)
    elif mesh.dp_size > 1:
        _apply_fsdp(model, mesh)
    model.to_empty(device=mesh.device)
    model.tie_()
    model.assert_tied()


def _check_divisible_by_tp(model: Llama, tp: int, sequence_length: int) -> None:
    shape = model.shape
    for path, value in (
        ("data.sequence_length", sequence_length),
        ("model.num_kv_heads", shape.num_kv_heads),
        ("model.ffn_dim", shape.ffn_dim),
        ("model.vocab_size", shape.vocab_size),
    ):
        if value % tp:
            raise ConfigError(
                f"{path} = {value} is not a multiple of the mesh's tp = {tp}; change one of them"
            )


def _apply_tensor_parallel(model: Llama, mesh: IslandMesh) -> None:
    """Split matrices over the ranks, and positions between them (sequence parallelism).

    The residual stream holds S / tp positions a rank. Attention and feed-forward gather them first,
    so RoPE sees every position.
    """
    root: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    block: dict[str, ParallelStyle] = {
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    assert mesh.device_mesh is not None
    parallelize_module(model, mesh.device_mesh, root)
    assert model.norm is not None
    model.norm = _PositionwiseNorm(model.norm, mesh.device_mesh)
    for layer in model.blocks:
        assert isinstance(layer, Block)
        parallelize_module(layer, mesh.device_mesh, block)
        layer.attention_norm = _PositionwiseNorm(layer.attention_norm, mesh.device_mesh)
        layer.ffn_norm = _PositionwiseNorm(layer.ffn_norm, mesh.device_mesh)


class _PositionwiseNorm(nn.RMSNorm):
    """RMSNorm of this rank's own positions; weight replicated, gradient left partial.

    PyTorch's `SequenceParallel` computes the same with a dozen DTensor operations a norm, which
    cost more than the additions that they carry, on small models.
    """

    def __init__(self, norm: nn.RMSNorm, mesh: DeviceMesh) -> None:
        super().__init__(norm.normalized_shape, eps=norm.eps, device=norm.weight.device)
        weight = distribute_tensor(norm.weight.detach(), mesh, [Replicate()], src_data_rank=None)
        self.weight = nn.Parameter(weight)

    def forward(self, x_BSD: Tensor) -> Tensor:
        weight = self.weight
        assert isinstance(weight, DTensor)
        weight_D = weight.to_local(grad_placements=(Partial(),))
        return F.rms_norm(x_BSD, self.normalized_shape, weight_D, self.eps)


def _apply_fsdp(model: Llama, mesh: IslandMesh) -> None:
    """Shard parameters, gradients and optimizer state; a large block is a unit of its own.

    Such a block gives its gathered parameters back after its forward and gathers again for its
    backward; the root's unit keeps them from forward to backward.
    """
    for layer in model.blocks:
        if sum(parameter.numel() for parameter in layer.parameters()) >= MIN_UNIT_NUMEL:
            fully_shard(layer, mesh=mesh.device_mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh.device_mesh, reshard_after_forward=False)
