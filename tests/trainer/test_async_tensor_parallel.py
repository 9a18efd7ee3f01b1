"""Collectives of tensor parallelism under matrix products, on fallbacks without shared memory."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed import _symmetric_memory as symmetric

from diloco.config.compute import Compute
from diloco.config.mesh import MeshConfig
from diloco.trainer.parallel.mesh import make_mesh
from tests.distributed import run_ranks
from tests.trainer.small_island import CPU, make_trainer

INNER_STEPS = 3


class FusedCounter(CustomGraphPass):
    """Counts, after all passes, the collectives that were joined with products, and those alone."""

    def __init__(self) -> None:
        self.fused: set[str] = set()
        self.num_alone = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            name = str(node.target)
            if "fused" in name:
                self.fused.add(name)
            self.num_alone += "all_gather_into" in name or "reduce_scatter_tensor" in name

    def uuid(self) -> None:
        return None


def _train(rank, is_async):
    counter = FusedCounter()
    fused = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        fused.impl(name, getattr(symmetric, f"_{name}"), "CPU")
    mesh = make_mesh(CPU, MeshConfig(tp=2, async_tp=is_async))
    compute = Compute("none", "inductor") if is_async else Compute()
    with (
        symmetric._test_mode(),  # fallbacks for what needs devices
        mock.patch.object(dist, "is_nccl_available", lambda: True),  # the compiler asks no more
        config.patch(post_grad_custom_post_pass=counter),
    ):
        trainer = make_trainer(mesh, compute=compute)
        losses = [trainer.inner_step(step).read().loss for step in range(INNER_STEPS)]
    return losses, sorted(counter.fused), counter.num_alone


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_compiled_blocks_fuse_collectives_and_compute_the_same():
    (losses, fused, num_alone), _ = run_ranks(_train, 2, True, timeout_s=380)
    (expected, *_), _ = run_ranks(_train, 2, False)

    assert [name.split(".")[1] for name in fused] == [
        "fused_all_gather_matmul",
        "fused_matmul_reduce_scatter",
    ]
    # Where several matrices multiply one input, the gradients that they give it are added first.
    assert num_alone == 2, "one of attention's, one of the feed-forward layer's"
    assert losses == pytest.approx(expected, abs=5e-6)
