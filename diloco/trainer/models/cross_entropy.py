"""Owns the loss of a token, also where its logits lie on several ranks, by columns.

There no rank ever holds all V logits of a position: three numbers a position travel instead.

Source: Megatron-LM (arXiv 1909.08053), section 3; z-loss: PaLM (arXiv 2204.02311), section 5.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def token_losses(
    logits_NV: Tensor,
    targets_N: Tensor,
    *,
    group: dist.ProcessGroup | None,
    z_loss: float,
) -> tuple[Tensor, Tensor | None]:
    """Compute the cross entropy of every token, and what keeps its logits from drifting.

        loss = log Z - logits[target],    penalty = z_loss (log Z)^2,    Z = sum_v exp(logits[v])

    Args:
        logits_NV: Shape [N, V], float32; with a group this rank's columns, see
            `split_log_sum_exp`.
        targets_N: Ids in [0, V), shape [N], int64.
        group: The ranks that share the columns; None: all of them are here.
        z_loss: Coefficient of the penalty; 0: there is none.

    Returns:
        Loss in nats, shape [N]; penalty, shape [N], to be minimised with it, or None.
    """
    if group is not None:
        lse_N, picked_N = split_log_sum_exp(logits_NV, targets_N, group)
        return lse_N - picked_N, z_loss * lse_N.square() if z_loss else None
    losses_N = F.cross_entropy(logits_NV, targets_N, reduction="none")
    return losses_N, z_loss * logits_NV.logsumexp(dim=1).square() if z_loss else None


def split_log_sum_exp(
    logits_NV: Tensor, targets_N: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Compute log sum_v exp(logits[n, v]) and logits[n, target[n]] over all ranks' columns.

    Their difference is the cross entropy. Both can be differentiated, without communication.

    Args:
        logits_NV: This rank's V / ranks neighbouring columns, those of rank 0 of the group first;
            shape [N, V / ranks], float32.
        targets_N: Ids in [0, V), shape [N], int64; equal on all ranks.
        group: The ranks that share the columns.

    Returns:
        Both of shape [N], float32, equal on all ranks.
    """
    lse_N, picked_N = _SplitLogSumExp.apply(  # type: ignore[no-untyped-call]
        logits_NV, targets_N, group
    )
    return lse_N, picked_N


class _SplitLogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        num_columns = logits_NV.shape[1]
        columns_N = targets_N - dist.get_rank(group) * num_columns
        is_here_N = (columns_N >= 0) & (columns_N < num_columns)
        columns_N1 = columns_N.clamp(0, num_columns - 1)[:, None]
        largest_N = logits_NV.amax(dim=1)
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
        sums_2N = torch.stack(
            [
                (logits_NV - largest_N[:, None]).exp_().sum(dim=1),
                logits_NV.gather(1, columns_N1)[:, 0].where(is_here_N, 0.0),
            ]
        )
        dist.all_reduce(sums_2N, group=group)
        lse_N = sums_2N[0].log() + largest_N
        ctx.save_for_backward(logits_NV, lse_N, columns_N1, is_here_N)
        return lse_N, sums_2N[1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad_lse_N, grad_picked_N = grads
        logits_NV, lse_N, columns_N1, is_here_N = ctx.saved_tensors
        grad_NV = (logits_NV - lse_N[:, None]).exp_().mul_(grad_lse_N[:, None])
        grad_NV.scatter_add_(1, columns_N1, (grad_picked_N * is_here_N)[:, None])
        return grad_NV, None, None
