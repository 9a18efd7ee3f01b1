"""Collectives of one inner step, counted by PyTorch: none that should not be there.

A collective more is a wait more in every step of every run, and no loss tells of it.
"""

from __future__ import annotations

from unittest import mock

from torch.distributed.tensor.debug import CommDebugMode

from diloco.inner import parallelize
from diloco.inner.parallelize import make_mesh
from tests.distributed import run_ranks
from tests.inner.small_island import CPU, make_trainer

NUM_LAYERS = 4


def counts(axis: str, min_unit_numel: int) -> dict[str, int]:
    with mock.patch.object(parallelize, "MIN_UNIT_NUMEL", min_unit_numel):
        trainer = make_trainer(make_mesh(CPU, **{axis: 2}))
    trainer.inner_step(0)  # the first one may set things up
    with CommDebugMode() as counted:
        trainer.inner_step(1)
    return {str(operation).rsplit(".", 1)[-1]: n for operation, n in counted.comm_counts.items()}


def count_on_two_ranks(island_rank: int) -> dict[str, dict[str, int]]:
    return {
        "fsdp-whole": counts("dp_shard", 1 << 30),
        "fsdp-by-block": counts("dp_shard", 1),
        "tp": counts("tp", 1),
    }


def test_an_inner_step_has_the_collectives_of_its_layout_and_no_other() -> None:
    first, second = run_ranks(count_on_two_ranks, 2, timeout_s=55)

    assert first == second
    sums = {
        "allreduce_": 2
    }  # of the gradient's norm, and of the loss (FSDP) or of norms' gradients
    assert first == {
        # One unit: gathered once, for the root keeps it; gradients are scattered once.
        "fsdp-whole": {"_allgather_base_": 1, "_reduce_scatter_base_": 1, **sums},
        # Blocks are gathered again in the backward, the root is not.
        "fsdp-by-block": {
            "_allgather_base_": 2 * NUM_LAYERS + 1,
            "_reduce_scatter_base_": NUM_LAYERS + 1,
            **sums,
        },
        # Attention and feed-forward each gather positions and scatter sums, and the other way round
        # in the backward; so do embedding and head, whose logits are gathered, too.
        "tp": {
            "all_gather_into_tensor": 4 * NUM_LAYERS + 3,
            "reduce_scatter_tensor": 4 * NUM_LAYERS + 2,
            **sums,
        },
    }
