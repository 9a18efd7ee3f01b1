"""Experts of two ranks against those of one: whatever rows come, or none; and where they lie."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from diloco.config.model import ExpertsConfig
from diloco.errors import ConfigError
from diloco.island.lanes.boxes import stored, stored_box, write_stored_
from diloco.trainer.models.experts import Experts
from diloco.trainer.parallel.expert_parallel import spread_experts
from tests.distributed import run_ranks

DIM, HIDDEN = 8, 12
CONFIG = ExpertsConfig(num_experts=4, experts_per_token=1, expert_dim=HIDDEN)
#: Rows of each rank for each of the experts, of which each rank holds two.
ROUTED = {
    "uneven": [[3, 0, 5, 1], [2, 7, 0, 4]],
    "none-for-a-rank": [[3, 2, 0, 0], [1, 4, 0, 0]],
    "all-abroad": [[0, 0, 3, 2], [4, 1, 0, 0]],
    "none-of-a-rank": [[0, 0, 0, 0], [1, 2, 3, 4]],
}


def meta_experts() -> Experts:
    with torch.device("meta"):
        return Experts(DIM, CONFIG)


def whole_values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(stack.shape, generator=generator)
        for name, stack in meta_experts().named_parameters()
    }


def rows_and_grads(routed: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs of each rank, and the gradients of its outputs."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(sum(counts), DIM) for counts in routed]
    pairs = [[torch.randn(shape, generator=generator) for _ in range(2)] for shape in shapes]
    return [(x.requires_grad_(), grad) for x, grad in pairs]


def filled(experts: Experts) -> Experts:
    experts.to_empty(device="cpu")
    for name, stack in experts.named_parameters():
        write_stored_(stack, whole_values()[name])
    return experts


def spread(island_rank: int) -> tuple[dict[str, list[float]], str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    with torch.device("meta"):
        three = Experts(DIM, CONFIG.model_copy(update={"num_experts": 3}))
    with pytest.raises(ConfigError) as caught:
        spread_experts(three, mesh)
    return differences(island_rank, mesh), str(caught.value)


def differences(island_rank: int, mesh: DeviceMesh) -> dict[str, list[float]]:
    found = {}
    for name, routed in ROUTED.items():
        spread, alone = meta_experts(), filled(meta_experts())
        spread_experts(spread, mesh)
        filled(spread)
        x, grad = rows_and_grads(routed)[island_rank]
        out = spread(x, torch.tensor(routed[island_rank]))
        out.backward(grad)
        total = {n: torch.zeros(stack.shape) for n, stack in alone.named_parameters()}
        for rank, (rows, rows_grad) in enumerate(rows_and_grads(routed)):
            alone.zero_grad()
            expected = alone(rows, torch.tensor(routed[rank]))
            expected.backward(rows_grad)
            for n, stack in alone.named_parameters():
                total[n] += stack.grad / 2  # what all minimise is the mean of the two
            if rank == island_rank:
                pairs = [(out, expected), (x.grad, rows.grad)]
        for n, stack in spread.named_parameters():
            box = stored_box(stack)
            assert (box.offsets[0], box.sizes[0]) == (2 * island_rank, 2)
            pairs.append((stored(stack.grad), total[n][box.slices]))
        found[name] = [(a - b).abs().amax().item() if a.numel() else 0.0 for a, b in pairs]
    return found


@pytest.fixture(scope="module")
def everybody() -> list[tuple[dict[str, list[float]], str]]:
    return run_ranks(spread, 2)


def test_outputs_and_gradients_are_those_of_experts_on_one_rank(everybody) -> None:
    for found, _ in everybody:
        for name, each in found.items():
            # Sums of some ten float32 terms of up to about 30 in another order: 10 x 30 x 2^-24.
            assert max(each) < 2e-5, (name, each)


def test_ranks_that_do_not_divide_the_experts_are_refused(everybody) -> None:
    for _, refusal in everybody:
        assert refusal.startswith("mesh ep = 2 must divide the 3 experts of a layer")
