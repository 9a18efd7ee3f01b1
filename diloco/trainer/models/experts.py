"""Routed experts in place of a feed-forward layer, and their balance without an auxiliary loss.

Every token goes through the `experts_per_token` experts that the router scores highest, and through
all shared ones. No token is dropped: tokens are sorted by expert, and each expert computes as many
as come, all experts in one grouped product. A bias an expert is added to the scores for choosing
only, and is moved against the expert's load after every inner step (`balance_`). The bias is a
buffer that islands synchronise as a plain mean (`synchronised_buffers`): it is what keeps the next
batch balanced, and is no parameter of any optimizer.

Weights are stacked: [X, F, D] and [X, D, F] hold the matrix of `nn.Linear` of expert x at index x.

Shape legend: B sequences, S positions, T = B S tokens, D width, X experts, K experts a token, F
hidden width of an expert, R = T K rows, one for each token and chosen expert.

Source: DeepSeekMoE (arXiv 2401.06066), auxiliary-loss-free balancing (arXiv 2408.15664),
DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from diloco.config.model import ExpertsConfig

#: Added to the sum of a token's scores before it divides them, as DeepSeek-V3 does.
_LEAST_SUM = 1e-20


class Router(nn.Module):
    """Chooses the experts of every token, and says with which weight each of them counts.

    Attributes:
        synchronised_buffers: Names of the buffers that islands average.
        is_counting: Whether a forward adds to the load: not when it is computed again.
    """

    synchronised_buffers = ("expert_bias",)
    is_counting = True

    expert_bias: Tensor
    load: Tensor

    def __init__(self, dim: int, experts: ExpertsConfig) -> None:
        """Create the weight [X, D], the bias of every expert and the counter of its tokens."""
        super().__init__()
        self._experts = experts
        self.weight = nn.Parameter(torch.empty(experts.num_experts, dim))
        self.register_buffer("expert_bias", torch.zeros(experts.num_experts))
        # Tokens since `balance_`; float32 is exact to 2^24 of an expert, step and rank.
        self.register_buffer("load", torch.zeros(experts.num_experts), persistent=False)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Choose, in float32.

        s = sigmoid(x W^T) or softmax(x W^T). The groups with the largest sums of their two highest
        s + bias are kept, and of their experts the K with the highest s + bias. The weight of
        expert i is route_scale s_i, with `normalise` divided by the sum of the chosen s.

        Args:
            x_TD: Tokens, shape [T, D].

        Returns:
            Weights, float32, and indices of experts, int64, each of shape [T, K].
        """
        experts = self._experts
        logits_TX = F.linear(x_TD.float(), self.weight.float())
        scores_TX = logits_TX.sigmoid() if experts.route == "sigmoid" else logits_TX.softmax(-1)
        with torch.no_grad():
            ranked_TX = scores_TX + self.expert_bias
            if experts.groups_per_token < experts.num_groups:
                ranked_TX = _only_best_groups(ranked_TX, experts)
            chosen_TK = ranked_TX.topk(experts.experts_per_token, dim=-1).indices
        weights_TK = scores_TX.gather(1, chosen_TK)
        if experts.normalise:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + _LEAST_SUM)
        return weights_TK * experts.route_scale, chosen_TK


def _only_best_groups(ranked_TX: Tensor, experts: ExpertsConfig) -> Tensor:
    """Put the experts of all but the best groups out of the question."""
    grouped = ranked_TX.view(len(ranked_TX), experts.num_groups, -1)
    best_of_each = min(2, grouped.shape[-1])
    of_groups = grouped.topk(best_of_each, dim=-1).values.sum(dim=-1)
    kept = of_groups.topk(experts.groups_per_token, dim=-1).indices
    is_kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, kept, True)
    left: Tensor = grouped.masked_fill(~is_kept[..., None], float("-inf")).flatten(1)
    return left


class Experts(nn.Module):
    """The routed experts of a layer, each a SwiGLU; what expert parallelism spreads over ranks.

    Attributes:
        compute: What applies the stacks to rows, as `apply_experts` does.
    """

    compute: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

    def __init__(self, dim: int, experts: ExpertsConfig) -> None:
        """Create the three stacks of matrices."""
        super().__init__()
        num_experts, hidden = experts.num_experts, experts.expert_dim
        self.gate = nn.Parameter(torch.empty(num_experts, hidden, dim))
        self.up = nn.Parameter(torch.empty(num_experts, hidden, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, hidden))
        self.compute = apply_experts

    def forward(self, x_RD: Tensor, num_rows_X: Tensor) -> Tensor:
        """Apply every expert to its rows; see `apply_experts`."""
        return self.compute(x_RD, num_rows_X, self.gate, self.up, self.down)


def apply_experts(
    x_RD: Tensor, num_rows_X: Tensor, gate_XFD: Tensor, up_XFD: Tensor, down_XDF: Tensor
) -> Tensor:
    """Apply every expert to its rows: down_x(silu(gate_x(row)) * up_x(row)).

    Args:
        x_RD: Rows sorted by expert, shape [R, D].
        num_rows_X: Rows of each expert, shape [X], integer; may be zero.
        gate_XFD: First of the stacks of matrices.
        up_XFD: Second.
        down_XDF: Third.

    Returns:
        Shape [R, D], in the order of the rows.
    """
    ends = num_rows_X.cumsum(0, dtype=torch.int32)
    gate_RF = F.grouped_mm(x_RD, gate_XFD.transpose(1, 2), offs=ends)
    up_RF = F.grouped_mm(x_RD, up_XFD.transpose(1, 2), offs=ends)
    out_RD: Tensor = F.grouped_mm(F.silu(gate_RF) * up_RF, down_XDF.transpose(1, 2), offs=ends)
    return out_RD


class ExpertLayer(nn.Module):
    """Routed and shared experts, in place of a feed-forward layer."""

    def __init__(self, dim: int, experts: ExpertsConfig, shared: nn.Module | None) -> None:
        """Create the router and its experts.

        Args:
            dim: Width of the residual stream.
            experts: Sizes and rules.
            shared: What every token goes through as well; None: nothing.
        """
        super().__init__()
        self.router = Router(dim, experts)
        self.experts = Experts(dim, experts)
        self.shared_experts = shared

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Apply the layer position by position."""
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, chosen_TK = self.router(x_TD)
        chosen_R, order_R = chosen_TK.flatten().sort(stable=True)
        # Counted without `bincount`, for which the host waits until it knows the largest index.
        num_rows_X = chosen_R.new_zeros(self.router.load.numel())
        num_rows_X.scatter_add_(0, chosen_R, torch.ones_like(chosen_R))
        if self.training and torch.is_grad_enabled() and self.router.is_counting:
            self.router.load += num_rows_X
        token_R = order_R // chosen_TK.shape[1]
        out_RD = self.experts(x_TD[token_R], num_rows_X)
        out_RD = out_RD * weights_TK.flatten()[order_R, None].type_as(out_RD)
        out_TD = torch.zeros_like(x_TD).index_add(0, token_R, out_RD)
        if self.shared_experts is not None:
            out_TD = out_TD + self.shared_experts(x_TD)
        return out_TD.view_as(x_BSD)


def imbalances(loads: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Give the largest load of an expert over the mean load, by router; 1 is perfect balance."""
    return {name: max(load) * len(load) / max(1, sum(load)) for name, load in loads.items()}


def forget_load_(model: nn.Module) -> None:
    """Begin the counts of all routers again, after a forward that is no part of the training."""
    for module in model.modules():
        if isinstance(module, Router):
            module.load.zero_()


@torch.no_grad()
def balance_(model: nn.Module, speed: float, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Move the bias of every expert against its load since the last call; the counts begin again.

    bias_x <- bias_x + speed * sign(mean(load) - load_x), load_x the tokens that chose expert x in
    training, on all ranks of the group. Collective where there are routers: one all-reduce.

    Args:
        model: Whose routers are balanced; of a dense one nothing is done.
        speed: Change of a bias, in units of scores; 0 only counts.
        group: The ranks that took different tokens through the same layers; None: this one alone.

    Returns:
        Load of every expert by the name of its router, shape [X], float64, equal on all ranks of
        the group.

    Source: arXiv 2408.15664, Algorithm 1.
    """
    routers = {name: m for name, m in model.named_modules() if isinstance(m, Router)}
    if not routers:
        return {}
    loads = torch.stack([router.load for router in routers.values()]).double()
    if group is not None:
        dist.all_reduce(loads, group=group)
    for router, load_X in zip(routers.values(), loads, strict=True):
        router.expert_bias += speed * (load_X.mean() - load_X).sign().float()
        router.load.zero_()
    return dict(zip(routers, loads, strict=True))
