"""Owns causal attention of a sequence whose positions lie on several ranks (context parallelism).

A sequence of S positions is cut into 2 cp chunks, and rank r holds chunks r and 2 cp - 1 - r: every
rank then attends to equally much. Three ways to the same values:

    ring         keys and values travel from rank to rank, cp - 1 times, while the last are used
    all-gather   keys and values of all ranks are gathered at once, S of them on every rank
    ulysses      heads are dealt instead of positions, by all-to-all, and dealt back afterwards

Ring and all-gather attend block by block with a fused kernel that returns the log-sum-exp of its
scores; blocks are merged by these, and the kernel's backward takes the merged values:

    lse = log sum_i exp(lse_i),    out = sum_i exp(lse_i - lse) out_i

Shape legend: B sequences, N query heads, K key/value heads (a divisor of N), S positions of the
whole sequence, L = S / cp of this rank, E values of a head. Ranks are those of a process group.

Source: Ring Attention (arXiv 2310.01889), its order for causal masks: Striped Attention (arXiv
2311.09431) and Llama 3 (arXiv 2407.21783, 3.3.2); Ulysses: arXiv 2309.14509; log-sum-exp merging:
FlashAttention-2 (arXiv 2307.08691).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from diloco.trainer.parallel.mesh import IslandMesh

Method = Literal["ring", "all-gather", "ulysses"]


def positions_of(
    rank: int, cp: int, num_positions: int, device: torch.device | None = None
) -> Tensor:
    """Return the positions that a rank holds, in the order in which it holds them.

    Args:
        rank: Of the group.
        cp: Ranks of the group.
        num_positions: S, a multiple of 2 cp.
        device: Of the result; None: the CPU.

    Returns:
        Shape [S / cp], int64, ascending.

    Raises:
        ValueError: If S is not a multiple of 2 cp.
    """
    if num_positions % (2 * cp):
        raise ValueError(f"{num_positions} positions cannot be cut into 2 x {cp} equal chunks")
    chunks = torch.arange(num_positions, device=device).view(2 * cp, -1)
    return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]])


def positions_here(mesh: IslandMesh, num_positions: int) -> Tensor:
    """Return the positions of a sequence that this rank computes, on its device; all without cp."""
    group = mesh.cp_group
    if group is None:
        return torch.arange(num_positions, device=mesh.device)
    return positions_of(dist.get_rank(group), mesh.config.cp, num_positions, mesh.device)


@dataclass(frozen=True, slots=True)
class ContextAttention:
    """Causal attention over a group; called as the attention of one rank is.

    Attributes:
        method: How ranks come to each other's keys and values.
        group: The ranks that share a sequence.
    """

    method: Method
    group: dist.ProcessGroup

    def __call__(self, q_BLNE: Tensor, k_BLKE: Tensor, v_BLKE: Tensor) -> Tensor:
        """Attend from every position here to those of the sequence up to it; collective.

        Args:
            q_BLNE: Queries of the positions of `positions_of`.
            k_BLKE: Keys of these.
            v_BLKE: Values of these.

        Returns:
            Shape [B, L, N, E]. Gradients are those of the whole sequence's attention, each rank's
            own part of them, once all ranks have made their backward.
        """
        q_BNLE, k_BKLE, v_BKLE = (x.transpose(1, 2) for x in (q_BLNE, k_BLKE, v_BLKE))
        out_BNLE: Tensor
        if self.method == "ulysses":
            q, k, v = (_apply(_Deal, x, self.group, True) for x in (q_BNLE, k_BKLE, v_BKLE))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            out_BNLE = _apply(_Deal, out, self.group, False)
        else:
            kv_2BKLE = torch.stack((k_BKLE, v_BKLE))
            out_BNLE = _apply(_BlockAttention, q_BNLE, kv_2BKLE, self.group, self.method == "ring")
        return out_BNLE.transpose(1, 2)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Call a function that has a backward of its own; PyTorch's `apply` has no types."""
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


# -- block by block ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Block:
    """A rectangle of the scores, or the square on their diagonal."""

    queries: slice
    keys: slice
    is_causal: bool


def _blocks(rank: int, source: int, num_local: int) -> _Block:
    """Say what the queries of a rank see of the keys of another: one block, half of all scores.

    Of the rank's chunks (r, 2 cp - 1 - r) the first sees chunks up to r, and the second all but the
    `r` last; so of the source's chunks (s, 2 cp - 1 - s) both see the first one if s < r, and the
    second sees both if s > r.
    """
    half, everything = num_local // 2, slice(0, num_local)
    if source == rank:
        return _Block(everything, everything, is_causal=True)
    if source < rank:
        return _Block(everything, slice(0, half), is_causal=False)
    return _Block(slice(half, num_local), everything, is_causal=False)


class _BlockAttention(torch.autograd.Function):
    """Attention to keys and values that come from the ranks of the group, one after the other."""

    @staticmethod
    def forward(
        ctx: Any, q_BNLE: Tensor, kv_2BKLE: Tensor, group: dist.ProcessGroup, is_ring: bool
    ) -> Tensor:
        rank, num_local = dist.get_rank(group), q_BNLE.shape[2]
        # Blocks are merged in float32, whatever they are computed in.
        out = torch.zeros_like(q_BNLE, dtype=torch.float32)
        lse = q_BNLE.new_full(q_BNLE.shape[:3], -torch.inf, dtype=torch.float32)
        for source, kv in _sources(kv_2BKLE, group, is_ring=is_ring):
            block = _blocks(rank, source, num_local)
            q = q_BNLE[:, :, block.queries]
            k, v = _for_heads(kv[:, :, :, block.keys], q.shape[1])
            _merge_(out[:, :, block.queries], lse[:, :, block.queries], *_attend(q, k, v, block))
        result = out.to(q_BNLE.dtype)
        ctx.save_for_backward(q_BNLE, kv_2BKLE, result, lse)
        ctx.group, ctx.is_ring = group, is_ring
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q_BNLE, kv_2BKLE, out, lse = ctx.saved_tensors
        (grad,) = grads
        group, rank, num_local = ctx.group, dist.get_rank(ctx.group), q_BNLE.shape[2]
        grad_q = torch.zeros_like(q_BNLE, dtype=torch.float32)

        def grad_of(source: int, kv: Tensor, grad_kv: Tensor) -> None:
            block = _blocks(rank, source, num_local)
            d_out, q, o, log = (x[:, :, block.queries] for x in (grad, q_BNLE, out, lse))
            k, v = _for_heads(kv[:, :, :, block.keys], q_BNLE.shape[1])
            d_q, d_k, d_v = _attend_backward(d_out, q, o, log, k, v, block)
            grad_q[:, :, block.queries] += d_q
            batch, num_kv_heads = kv.shape[1:3]
            for target, d in zip(grad_kv, (d_k, d_v), strict=True):
                # The query heads of a key head are next to each other.
                by_head = d.reshape(batch, num_kv_heads, -1, *d.shape[2:])
                target[:, :, block.keys] += by_head.sum(dim=2, dtype=torch.float32)

        walk = _walk_ring if ctx.is_ring else _walk_gathered
        grad_kv = walk(kv_2BKLE, group, grad_of)
        return grad_q.to(q_BNLE.dtype), grad_kv.to(kv_2BKLE.dtype), None, None


def _for_heads(kv: Tensor, num_heads: int) -> Tensor:
    """Repeat every key and value head for the query heads that use it."""
    return kv.repeat_interleave(num_heads // kv.shape[2], dim=2)


def _attend(q: Tensor, k: Tensor, v: Tensor, block: _Block) -> tuple[Tensor, Tensor]:
    """Compute one block and the log-sum-exp of its scores."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, block.is_causal
    )
    return out, lse


def _attend_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, block: _Block
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients through one block; `out` and `lse` are those of all blocks."""
    d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, block.is_causal
    )
    return d_q, d_k, d_v


def _merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Take one more block into what the blocks so far came to; lse = -inf: there were none."""
    merged = torch.logaddexp(lse, block_lse)
    out.mul_((lse - merged).exp_()[..., None])
    out.add_(block_out * (block_lse - merged).exp_()[..., None])
    lse.copy_(merged)


def _sources(
    kv: Tensor, group: dist.ProcessGroup, *, is_ring: bool
) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, its keys and values), this rank's own first; collective."""
    rank, cp = dist.get_rank(group), dist.get_world_size(group)
    if not is_ring:
        gathered = _gathered(kv, group)
        yield from ((source, gathered[source]) for source in _order(rank, cp))
        return
    for number, source in enumerate(_order(rank, cp)):
        coming = _Passing(kv, group) if number + 1 < cp else None
        yield source, kv  # used while the next ones travel
        if coming is not None:
            kv = coming.wait()


def _order(rank: int, cp: int) -> list[int]:
    """Give the ranks in the order in which a ring brings what they hold."""
    return [(rank - step) % cp for step in range(cp)]


def _gathered(kv: Tensor, group: dist.ProcessGroup) -> Tensor:
    cp = dist.get_world_size(group)
    gathered = kv.new_empty((cp * len(kv), *kv.shape[1:]))
    dist.all_gather_single(gathered, kv.contiguous(), group=group)
    return gathered.view(cp, *kv.shape)


#: (rank, its keys and values, their gradient so far): adds to the gradient.
_GradOf = Callable[[int, Tensor, Tensor], None]


def _walk_gathered(kv: Tensor, group: dist.ProcessGroup, grad_of: _GradOf) -> Tensor:
    """Gather all keys and values again, and add up their gradients where they belong."""
    gathered = _gathered(kv, group)
    grads = torch.zeros_like(gathered, dtype=torch.float32)
    for source in _order(dist.get_rank(group), len(gathered)):
        grad_of(source, gathered[source], grads[source])
    mine = torch.empty_like(grads[0])
    dist.reduce_scatter_single(mine, grads.flatten(0, 1), group=group)
    return mine


def _walk_ring(kv: Tensor, group: dist.ProcessGroup, grad_of: _GradOf) -> Tensor:
    """Pass keys and values around once more; their gradients go with them, and all the way home."""
    cp = dist.get_world_size(group)
    grad: Tensor | None = None
    for number, source in enumerate(_order(dist.get_rank(group), cp)):
        is_last = number + 1 == cp
        coming = None if is_last else _Passing(kv, group)
        mine = torch.zeros_like(kv, dtype=torch.float32)
        grad_of(source, kv, mine)
        if grad is not None:
            mine += grad
        grad = _Passing(mine, group).wait()
        if coming is not None:
            kv = coming.wait()
    assert grad is not None, "a group has a rank"
    return grad


class _Passing:
    """A tensor on its way to the next rank, and that of the rank before on its way here."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        rank, cp = dist.get_rank(group), dist.get_world_size(group)
        self._sent = tensor.contiguous()  # lives until it is sent
        self._received = torch.empty_like(self._sent)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, group=group, group_peer=(rank + 1) % cp),
                dist.P2POp(dist.irecv, self._received, group=group, group_peer=(rank - 1) % cp),
            ]
        )

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


# -- by heads ------------------------------------------------------------------------------------


class _Deal(torch.autograd.Function):
    """Deals heads or positions among the ranks; each is the other's inverse and adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, is_by_heads: bool) -> Tensor:
        ctx.group, ctx.is_by_heads = group, is_by_heads
        return (_deal_heads if is_by_heads else _deal_positions)(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        back = _deal_positions if ctx.is_by_heads else _deal_heads
        return back(grads[0], ctx.group), None, None


def _deal_heads(x_BHLE: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return shape [B, H / cp, S, E]."""
    cp = dist.get_world_size(group)
    batch, heads, local, width = x_BHLE.shape
    sent = x_BHLE.reshape(batch, cp, heads // cp, local, width).movedim(1, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    # From rank r: chunks r and 2 cp - 1 - r.
    first, second = received.chunk(2, dim=3)  # each [cp, B, H / cp, L / 2, E]
    return torch.cat((first, second.flip(0))).movedim(0, 2).flatten(2, 3)


def _deal_positions(x_BHSE: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return shape [B, H cp, L, E]."""
    cp = dist.get_world_size(group)
    chunks = torch.stack(x_BHSE.chunk(2 * cp, dim=2))  # [2 cp, B, H, L / 2, E]
    sent = torch.cat((chunks[:cp], chunks[cp:].flip(0)), dim=3).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.movedim(0, 1).flatten(1, 2)
