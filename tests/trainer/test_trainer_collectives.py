"""Collectives and named phases of one inner step, counted by PyTorch: none too many, none too few.

A collective more is a wait more in every step of every run, and no loss tells of it.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

from diloco.config.mesh import MeshConfig
from diloco.trainer.parallel.mesh import make_mesh
from tests.distributed import run_ranks
from tests.trainer.small_island import CPU, make_trainer

NUM_LAYERS = 4


def counts(**mesh: Any) -> dict[str, int]:
    trainer = make_trainer(make_mesh(CPU, MeshConfig(**mesh)))
    trainer.inner_step(0)  # the first one may set things up
    with CommDebugMode() as counted:
        trainer.inner_step(1)
    return {str(operation).rsplit(".", 1)[-1]: n for operation, n in counted.comm_counts.items()}


def phases(**mesh: Any) -> dict[str, int]:
    """Ranges of an inner step of two micro-batches, each with how often it is there."""
    trainer = make_trainer(make_mesh(CPU, MeshConfig(**mesh)), micro_batches=2)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        trainer.inner_step(0)
    found = {event.key: event.count for event in profiled.key_averages()}
    return {key: n for key, n in found.items() if key.startswith("diloco/")}


def measure_on_two_ranks(island_rank: int) -> dict[str, dict[str, int]]:
    return {
        "fsdp-whole": counts(dp_shard=2),
        "fsdp-by-block": counts(dp_shard=2, fsdp_unit="block"),
        "tp": counts(tp=2),
        "cp": counts(cp=2),
        "phases-fsdp": phases(dp_shard=2),
        "phases-pp": phases(pp=2),
    }


@pytest.mark.slow
def test_an_inner_step_has_the_collectives_and_phases_of_its_layout_and_no_other() -> None:
    first, second = run_ranks(measure_on_two_ranks, 2, timeout_s=55)

    assert first == second
    # Of the gradient's norm, and of the loss (FSDP) or of norms' gradients.
    sums = {"allreduce_": 2}
    step = {f"diloco/inner/{name}": 1 for name in ("batch", "clip", "optimizer", "balance")}
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
        # As FSDP; what goes round the ring goes from point to point.
        "cp": {"_allgather_base_": 1, "_reduce_scatter_base_": 1, **sums},
        "phases-fsdp": {**step, "diloco/inner/forward": 2, "diloco/inner/backward": 2},
        "phases-pp": {**step, "diloco/inner/pipeline": 1},
    }
