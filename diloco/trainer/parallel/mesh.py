"""Owns how the ranks of an island are arranged: one device mesh, and the groups along its axes.

    (pp, dp_replicate, fsdp, tp)      fsdp = dp_shard x cp: ranks that share shards
    (efsdp, ep) in place of fsdp      the same ranks, as experts are dealt: efsdp = fsdp / ep

Ranks are dealt row-major, so those along tp are next to each other. Axes of 1 are left out, but
for a dp_replicate of 1 where there are no others to gather parameters over and they are cast: that
is done where they are gathered. Knows no model; what the ranks along an axis do is for
`parallelize` and its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from diloco.config.mesh import MeshConfig
from diloco.errors import ConfigError

Axis = Literal["pp", "dp_replicate", "fsdp", "tp"]
ExpertAxis = Literal["dp_replicate", "efsdp", "ep"]


@dataclass(frozen=True, slots=True)
class IslandMesh:
    """The ranks of one island, as this one of them sees them.

    Attributes:
        device: Device of this rank.
        config: Sizes of the axes, and the options of parallelism.
        device_mesh: The axes, named as in `Axis`; None for one rank whose parameters are not cast.
        loss_group: The ranks whose losses are of different tokens; None if this rank has them all.
        cp_group: The ranks that share this one's sequences; None without context parallelism.
        expert_mesh: The axes with efsdp and ep in place of fsdp; None without expert parallelism.
    """

    device: torch.device
    config: MeshConfig
    device_mesh: DeviceMesh | None = None
    loss_group: dist.ProcessGroup | None = None
    cp_group: dist.ProcessGroup | None = None
    expert_mesh: DeviceMesh | None = None

    def size(self, axis: Axis) -> int:
        """Return the number of ranks along an axis."""
        return _sizes(self.config)[axis]

    def coordinate(self, axis: Axis) -> int:
        """Return the position of this rank along an axis, from 0."""
        submesh = self.submesh(axis)
        return 0 if submesh is None else submesh.get_local_rank()

    def submesh(self, *axes: Axis) -> DeviceMesh | None:
        """Return the mesh of this rank's neighbours along some axes; None if there is none of them.

        Args:
            axes: In the order of `Axis`; those that were left out are left out here.
        """
        there = () if self.device_mesh is None else self.device_mesh.mesh_dim_names or ()
        present = tuple(axis for axis in axes if axis in there)
        return self.device_mesh[present] if self.device_mesh is not None and present else None

    def expert_submesh(self, *axes: ExpertAxis) -> DeviceMesh | None:
        """Return the mesh of this rank's neighbours along some axes, as experts are dealt.

        Args:
            axes: In the order of `ExpertAxis`; those of 1 are left out.

        Returns:
            None if all axes are 1, and without expert parallelism.
        """
        config = self.config
        sizes: dict[ExpertAxis, int] = {
            "dp_replicate": config.dp_replicate,
            "efsdp": config.dp_shard * config.cp // config.ep,
            "ep": config.ep,
        }
        present = tuple(axis for axis in axes if sizes[axis] > 1)
        return self.expert_mesh[present] if self.expert_mesh is not None and present else None

    @property
    def tp_size(self) -> int:
        """Number of ranks that share the matrices; 1 without tensor parallelism."""
        return self.config.tp

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """Group of the ranks that share the matrices; None without tensor parallelism."""
        submesh = self.submesh("tp")
        return None if submesh is None else submesh.get_group()

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        """Group of the ranks that have other layers; None without pipeline parallelism."""
        submesh = self.submesh("pp")
        return None if submesh is None else submesh.get_group()

    @property
    def dp_size(self) -> int:
        """Number of ranks that take different sequences; 1 without data parallelism."""
        return self.config.dp_size

    @property
    def dp_coordinate(self) -> int:
        """Position of this rank among those that take different sequences, from 0.

        Ranks along pp, cp and tp share sequences, and this number.
        """
        config = self.config
        return self.coordinate("dp_replicate") * config.dp_shard + (
            self.coordinate("fsdp") // config.cp
        )


def make_mesh(device: torch.device, config: MeshConfig, *, is_cast: bool = False) -> IslandMesh:
    """Arrange the ranks of the default process group; collective unless the island is one rank.

    Args:
        device: Device of this rank.
        config: Axes and options.
        is_cast: Whether parameters are used in another type than they are kept in. Of one rank,
            too, there is a default process group then.

    Raises:
        ConfigError: If the product of the axes is not the number of ranks.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if config.num_ranks != num_ranks:
        raise ConfigError(
            f"mesh {config.shape_text or 'without an axis above 1'} needs {config.num_ranks} "
            f"ranks, the island has {num_ranks}; change the mesh or the number of ranks"
        )
    has_copies = is_cast and config.dp_size * config.cp == 1
    if num_ranks == 1 and not has_copies:
        return IslandMesh(device, config)
    sizes = {
        axis: size
        for axis, size in _sizes(config).items()
        if size > 1 or (axis == "dp_replicate" and has_copies)
    }
    device_mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    cp_group = _cp_group(device_mesh, config)
    loss_group, expert_mesh = _loss_group(device_mesh), _expert_mesh(device_mesh, config)
    return IslandMesh(device, config, device_mesh, loss_group, cp_group, expert_mesh)


def _sizes(config: MeshConfig) -> dict[Axis, int]:
    return {
        "pp": config.pp,
        "dp_replicate": config.dp_replicate,
        "fsdp": config.dp_shard * config.cp,
        "tp": config.tp,
    }


def _loss_group(device_mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Join the ranks along dp_replicate and fsdp: a batch's sequences, and their positions."""
    names = device_mesh.mesh_dim_names or ()
    present = (axis for axis in ("dp_replicate", "fsdp") if axis in names)
    axes = tuple(axis for axis in present if device_mesh[axis].size() > 1)
    if not axes:
        return None
    submesh = device_mesh[axes]
    return submesh.get_group() if len(axes) == 1 else submesh._flatten("loss").get_group()


def _cp_group(device_mesh: DeviceMesh, config: MeshConfig) -> dist.ProcessGroup | None:
    """Join the ranks along cp: neighbours along fsdp."""
    if config.cp == 1:
        return None
    fsdp = device_mesh["fsdp"]
    if config.dp_shard == 1:
        return fsdp.get_group()
    first = fsdp.get_local_rank() // config.cp * config.cp
    ranks = fsdp.mesh.flatten().tolist()[first : first + config.cp]
    group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return group


def _expert_mesh(device_mesh: DeviceMesh, config: MeshConfig) -> DeviceMesh | None:
    """Regroup the ranks along fsdp; those along ep are neighbours, so on one host if may be."""
    if config.ep == 1:
        return None
    sizes = (config.dp_shard * config.cp // config.ep, config.ep)
    return device_mesh._unflatten("fsdp", sizes, ("efsdp", "ep"))
