"""Owns how routed experts are spread over ranks: rows travel to their experts' rank, and back.

Of X experts each of the ep ranks of a group holds X / ep neighbouring ones. What tokens chose is
told first, then rows travel, as many as there are, by all-to-alls with uneven parts; no row is
padded or dropped. The backward sends gradients by the same ways in the other direction.

Shape legend: X experts, L = X / ep of them on this rank, D width, R rows of this rank's tokens, P
rows that came for this rank's experts. Ranks are those of a process group.

Source: GShard (arXiv 2006.16668); without a capacity as in MegaBlocks (arXiv 2211.15841).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from diloco.errors import ConfigError
from diloco.trainer.models.experts import Experts, apply_experts

#: Rows of one rank -> rows that came for it.
_Direction: TypeAlias = Callable[[Tensor], Tensor]


def spread_experts(experts: Experts, mesh: DeviceMesh) -> None:
    """Deal the experts of a layer on the meta device to the ranks of a mesh, in place.

    Args:
        experts: Whose stacks become DTensors, each rank with its L experts.
        mesh: Of one axis.

    Raises:
        ConfigError: If the ranks do not divide the experts.
    """
    num_experts = experts.gate.shape[0]
    if num_experts % mesh.size():
        raise ConfigError(
            f"mesh ep = {mesh.size()} must divide the {num_experts} experts of a layer; set ep to "
            "a divisor"
        )
    for name, stack in list(experts.named_parameters()):
        dealt = distribute_tensor(stack.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(dealt))
    experts.compute = SpreadCompute(mesh.get_group())


@dataclass(frozen=True, slots=True)
class SpreadCompute:
    """Applies the experts of all ranks to the rows of all ranks; called as `apply_experts` is.

    Attributes:
        group: The ranks that share the experts.
    """

    group: dist.ProcessGroup

    def __call__(
        self, x_RD: Tensor, num_rows_X: Tensor, gate: Tensor, up: Tensor, down: Tensor
    ) -> Tensor:
        """Send rows, apply the experts here, and send the results back; collective.

        Args:
            x_RD: Rows of this rank's tokens, sorted by expert.
            num_rows_X: How many of them are for each expert, int64.
            gate: DTensor over the group by experts, like the other two.
            up: See `gate`.
            down: See `gate`.

        Returns:
            Shape [R, D], in the order of the rows. Gradients of the stacks are those of the mean
            over the ranks of the group of what each minimises, as FSDP2's are over its own ranks.
        """
        num_ranks = dist.get_world_size(self.group)
        local = []
        for stack in (gate, up, down):
            assert isinstance(stack, DTensor), "stacks are spread by spread_experts"
            # Whom FSDP2 does not handle is of the type of its master, whatever is computed in.
            mine = stack.to_local().to(x_RD.dtype)
            local.append(_apply(_ScaledGradient, mine, 1 / num_ranks))
        way, num_rows_L = _token_route(num_rows_X, self.group)
        came_PD = _apply(_Travel, x_RD, way.send, way.send_back)
        out_PD = apply_experts(came_PD, num_rows_L, *local)
        return _apply(_Travel, out_PD, way.send_back, way.send)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Call a function that has a backward of its own; PyTorch's `apply` has no types."""
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True, slots=True)
class _TokenRoute:
    """Between rows at their tokens' ranks and rows at their experts' ranks, sorted by expert.

    Attributes:
        group: The ranks.
        sent: Rows of this rank for each.
        came: Rows of each for this one.
        order_P: Where each row here, in the order of experts, is in the order in which they come.
    """

    group: dist.ProcessGroup
    sent: list[int]
    came: list[int]
    order_P: Tensor

    def send(self, x_RD: Tensor) -> Tensor:
        """Return shape [P, D]; collective."""
        came = x_RD.new_empty((sum(self.came), *x_RD.shape[1:]))
        dist.all_to_all_single(came, x_RD.contiguous(), self.came, self.sent, group=self.group)
        return came[self.order_P]

    def send_back(self, x_PD: Tensor) -> Tensor:
        """Return shape [R, D]; collective. The inverse of `send`, which is its adjoint, too."""
        as_came = torch.empty_like(x_PD, memory_format=torch.contiguous_format)
        as_came[self.order_P] = x_PD
        back = x_PD.new_empty((sum(self.sent), *x_PD.shape[1:]))
        dist.all_to_all_single(back, as_came, self.sent, self.came, group=self.group)
        return back


def _token_route(num_rows_X: Tensor, group: dist.ProcessGroup) -> tuple[_TokenRoute, Tensor]:
    """Tell each rank how many rows come for each of its experts; collective.

    Returns:
        The way of the rows, and how many there are for each expert here, shape [L].
    """
    num_ranks = dist.get_world_size(group)
    coming_X = torch.empty_like(num_rows_X)
    dist.all_to_all_single(coming_X, num_rows_X.contiguous(), group=group)
    coming_rL = coming_X.view(num_ranks, -1)
    counts = torch.stack((num_rows_X.view(num_ranks, -1).sum(1), coming_rL.sum(1)))
    sent, came = counts.tolist()  # what the host must know of what a device counted
    expert_X = torch.arange(coming_rL.shape[1], device=coming_X.device).repeat(num_ranks)
    expert_P = expert_X.repeat_interleave(coming_X, output_size=sum(came))
    return _TokenRoute(group, sent, came, expert_P.argsort(stable=True)), coming_rL.sum(0)


class _Travel(torch.autograd.Function):
    """To other ranks by one of a way's directions; gradients come back by the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: _Direction, back: _Direction) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


class _ScaledGradient(torch.autograd.Function):
    """The same values; their gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None
