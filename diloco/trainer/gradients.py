"""Owns what distributed gradients need between backward and the optimizer: settling and clipping.

Knows DTensors and meshes, neither model nor optimizer. `torch.nn.utils.clip_grad_norm_` refuses
plain tensors together with DTensors, and DTensors of several meshes; this does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def settle_gradients_(
    parameters: Iterable[Tensor],
    *,
    partial: Sequence[Tensor] = (),
    group: dist.ProcessGroup | None = None,
) -> None:
    """Give every gradient the placements and the whole value of its parameter; collective.

    Under sequence parallelism a norm's gradient covers one rank's positions only. All of these are
    summed in one all-reduce here, of shards where FSDP2 has made shards of them.

    Args:
        parameters: After backward; those without a gradient and plain tensors are left alone.
        partial: Those of them whose gradients are parts of a sum over `group`.
        group: Ranks that hold the parts; not needed without any.
    """
    for parameter in parameters:
        grad = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(grad, DTensor):
            continue
        if grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)
    parts = [_local(p.grad) for p in partial if p.grad is not None]
    if not parts:
        return
    assert group is not None, "partial gradients are parts of a sum over a group"
    total = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(total, group=group)
    for part, whole in zip(parts, torch.split(total, [p.numel() for p in parts]), strict=True):
        part.copy_(whole.view_as(part))


def clip_gradients_(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    copies: Sequence[Tensor] = (),
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; collective.

    Nothing is read on the host: on an accelerator the caller goes on while the norm is computed.

    norm = sqrt(sum of squares of every element of the unsharded gradients), each element counted
    once: of the copies along a Replicate axis, the first coordinate's. Squares are added in float64
    over parameters and ranks. factor = min(1, max_norm / (norm + 1e-6)), as PyTorch's.

    Args:
        parameters: After `settle_gradients_`; plain tensors are this rank's whole parameters.
        max_norm: Above 0; infinity measures and does not scale.
        copies: Those of them that ranks elsewhere in `group` have, too, and count.
        group: Ranks that have other parameters: the stages of a pipeline.

    Returns:
        The norm before scaling, float64, without dimensions, on the device of the parameters, equal
        to the bit on all ranks; NaN or infinite if a gradient is.
    """
    parameters = list(parameters)
    local: list[Tensor] = []
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    elsewhere = {id(parameter) for parameter in copies}
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        local.append(_local(grad))
        mesh = grad.device_mesh if isinstance(grad, DTensor) else None
        owned = groups.setdefault(mesh, [])
        if id(parameter) in elsewhere:
            continue
        if not isinstance(grad, DTensor) or _is_first_copy(grad):
            owned.append(local[-1])
    device = _local(parameters[0]).device
    square = torch.zeros((), dtype=torch.float64, device=device)
    for mesh, owned in groups.items():
        square += _sum_of_squares(mesh, owned, device)
    if group is not None:
        dist.all_reduce(square, group=group)
    norm = square.sqrt()
    if local:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # a product with 1 changes no bit
        torch._foreach_mul_(local, factor.to(local[0].dtype))
    return norm


def _sum_of_squares(mesh: DeviceMesh | None, owned: list[Tensor], device: torch.device) -> Tensor:
    """Add the squares of this rank's owned parts, then over all axes of the mesh."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    if owned:
        total = torch.stack(torch._foreach_norm(owned)).double().square().sum()
    if mesh is not None:
        for axis in range(mesh.ndim):
            dist.all_reduce(total, group=mesh.get_group(axis))
    return total


def _is_first_copy(grad: DTensor) -> bool:
    """Whether this rank has coordinate 0 on every axis along which the gradient is replicated."""
    coordinate = grad.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh holds no gradient"
    assert not any(placement.is_partial() for placement in grad.placements), "settle first"
    return all(
        index == 0
        for index, placement in zip(coordinate, grad.placements, strict=True)
        if placement.is_replicate()
    )


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
