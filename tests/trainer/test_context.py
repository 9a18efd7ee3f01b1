"""Attention of positions on several ranks against that of the whole sequence on one."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from diloco.trainer.parallel.context import ContextAttention, positions_of
from tests.distributed import run_ranks

#: B, N, K, chunk, E: grouped heads, several sequences, chunks that are no power of two.
SHAPES = {"grouped": (2, 8, 4, 3, 8), "equal": (1, 4, 4, 5, 16)}
METHODS = ("ring", "all-gather", "ulysses")


def inputs(name, cp):
    batch, heads, kv_heads, chunk, width = SHAPES[name]
    generator = torch.Generator().manual_seed(5)
    length = 2 * cp * chunk
    shapes = [(batch, n, length, width) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def whole(name, cp):
    q, k, v, grad = inputs(name, cp)
    for x in (q, k, v):
        x.requires_grad_()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad]


def attend(island_rank, cp):
    own = {}
    for name in SHAPES:
        expected = whole(name, cp)
        for method in METHODS:
            here = positions_of(island_rank, cp, expected[0].shape[2])
            q, k, v, grad = (x[:, :, here].transpose(1, 2).clone() for x in inputs(name, cp))
            for x in (q, k, v):
                x.requires_grad_()
            out = ContextAttention(method, dist.group.WORLD)(q, k, v)
            out.backward(grad)
            own[name, method] = [
                (ours.transpose(1, 2) - theirs[:, :, here]).abs().max().item()
                for ours, theirs in zip([out, q.grad, k.grad, v.grad], expected, strict=True)
            ]
    return own


@pytest.mark.parametrize("cp", [2, 4])
def test_outputs_and_gradients_are_those_of_full_attention(cp):
    for differences in run_ranks(attend, cp, cp):
        for case, found in differences.items():
            # Sums of up to 40 float32 terms of about 1 in another order: 40 x 2^-24 = 2.4e-6, and
            # the gradients of keys add those of several blocks and heads.
            assert max(found) < 1e-5, (case, found)


def test_ranks_hold_all_positions_and_equally_much_of_the_causal_half():
    cp, num_positions = 4, 48

    held = [positions_of(rank, cp, num_positions) for rank in range(cp)]

    assert sorted(torch.cat(held).tolist()) == list(range(num_positions))
    assert len({int((positions + 1).sum()) for positions in held}) == 1
    with pytest.raises(ValueError, match="44 positions cannot be cut into 2 x 4 equal chunks"):
        positions_of(0, cp, 44)
