"""Every supported layout of an island as a row of a table, and what it is held against.

A row is configuration only; `run_rows` trains those of one number of ranks in one process group,
one after the other, and `alone` trains what they have in common on one rank. To add a layout, add
a row; `test_layouts.py` does the rest.
"""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from diloco.config.compute import PLAIN, Compute
from diloco.config.inner import InnerOptimizerConfig
from diloco.config.mesh import MeshConfig
from diloco.config.model import ExpertsConfig, LatentAttentionConfig
from diloco.config.pipeline import Schedule
from diloco.inner.mesh import IslandMesh, make_mesh
from diloco.inner.model import LlamaShape
from diloco.inner.trainer import InnerTrainer
from diloco.outer.fragments import make_plan
from diloco.sync.shards import LaneShards, canonical_parameters, tensor_specs
from tests.distributed import run_ranks
from tests.inner.small_island import CPU, Array, make_trainer, one_rank, whole_parameters

INNER_STEPS = 5
EVALUATED = 7  # divides neither by ranks nor by the micro-batch

#: Small, and awkward: half of ffn_dim, a rank's share under tp = 2, divides by no other 2.
SHAPE = LlamaShape(vocab_size=256, dim=64, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=210)
OPTIMIZER = InnerOptimizerConfig(lr=2e-3, warmup_steps=2)


@dataclass(frozen=True)
class Case:
    """One layout.

    Attributes:
        name: Of the row.
        mesh: Axes and options; their product is the number of ranks.
        model: What differs from `SHAPE`.
        optimizer: What differs from `OPTIMIZER`.
        z_loss: Coefficient of the penalty of log Z.
        micro_batches: Parts of a rank's batch; one rank trains in one part.
        collectives: Collectives of a rank and inner step, where they are counted.
        compute: How blocks are computed; one rank computes them plainly.
    """

    name: str
    mesh: MeshConfig
    model: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    z_loss: float = 0.0
    micro_batches: int = 1
    collectives: Mapping[str, int] | None = None
    compute: Compute = PLAIN

    @property
    def num_ranks(self) -> int:
        return self.mesh.num_ranks

    @property
    def is_compiled(self) -> bool:
        """Slow: loading the compiler takes longer than all rows of two ranks."""
        return self.compute.compile_backend != ""

    def make_trainer(self, mesh: IslandMesh, micro_batches: int) -> InnerTrainer:
        return make_trainer(
            mesh,
            shape=replace(SHAPE, **self.model),
            optimizer=InnerOptimizerConfig(**{**OPTIMIZER.model_dump(), **self.optimizer}),
            z_loss=self.z_loss,
            micro_batches=micro_batches,
            num_evaluated=EVALUATED,
            compute=self.compute,
        )


TIED = {"tie_embeddings": True}
EXPERTS = {
    "experts": ExpertsConfig(
        num_experts=6, experts_per_token=2, expert_dim=40, num_shared=1, first_dense_layers=1
    )
}
LATENT = {
    "num_kv_heads": 4,
    "latent_attention": LatentAttentionConfig(
        kv_rank=24, q_rank=40, rope_dim=8, nope_dim=16, value_dim=20
    ),
}
MUON = {"name": "muon", "lr": 5e-3}
FULL, SELECTIVE = Compute("full"), Compute("selective")
BFLOAT16 = Compute(precision="bfloat16")
#: Large, so that it is felt within few steps.
Z_LOSS = 0.01


def counted(gathers: int, scatters: int, sums: int) -> dict[str, int]:
    named = {"all-gather": gathers, "reduce-scatter": scatters, "all-reduce": sums}
    return {name: count for name, count in named.items() if count}


def looped(schedule: Schedule, **options: Any) -> MeshConfig:
    return MeshConfig(pp=2, schedule=schedule, stages_per_rank=2, **options)


CASES = [
    # -- 2 ranks
    Case("fsdp", MeshConfig(dp_shard=2), collectives=counted(1, 1, 2)),
    Case("fsdp-tied", MeshConfig(dp_shard=2), model=TIED),
    Case("fsdp-by-block-accumulated", MeshConfig(dp_shard=2, fsdp_unit="block"), micro_batches=2),
    Case(
        "zero-3",
        MeshConfig(dp_shard=2, fsdp_unit="block", reshard="always"),
        model=TIED,
        collectives=counted(10, 5, 2),
    ),
    Case(
        "zero-2-accumulated",
        MeshConfig(dp_shard=2, fsdp_unit="block", reshard="never"),
        micro_batches=2,
        collectives=counted(5, 10, 2),
    ),
    Case(
        "replicated-accumulated",
        MeshConfig(dp_replicate=2),
        model=TIED,
        micro_batches=2,
        collectives=counted(0, 0, 3),
    ),
    Case("replicated-by-block", MeshConfig(dp_replicate=2, fsdp_unit="block")),
    Case("tp", MeshConfig(tp=2)),
    Case("tp-tied-accumulated", MeshConfig(tp=2), model=TIED, micro_batches=2),
    Case(
        "tp-loss-parallel",
        MeshConfig(tp=2, loss_parallel=True),
        model=TIED,
        collectives=counted(18, 18, 4),
    ),
    Case(
        "fsdp-muon-accumulated",
        MeshConfig(dp_shard=2, fsdp_unit="block"),
        optimizer=MUON,
        z_loss=Z_LOSS,
        micro_batches=2,
    ),
    Case("replicated-muon", MeshConfig(dp_replicate=2), model=TIED, optimizer=MUON),
    Case("tp-muon", MeshConfig(tp=2, loss_parallel=True), optimizer=MUON, z_loss=Z_LOSS),
    Case("gpipe-tied", MeshConfig(pp=2, schedule="gpipe"), model=TIED, micro_batches=2),
    Case("1f1b", MeshConfig(pp=2), micro_batches=4),
    Case("bfs-tied", looped("bfs"), model=TIED, micro_batches=2),
    Case("interleaved-1f1b", looped("interleaved-1f1b"), micro_batches=4),
    Case("interleaved-zb-tied", looped("interleaved-zb"), model=TIED, micro_batches=2),
    Case("zbv", looped("zbv"), micro_batches=2),
    Case("dualpipev", looped("dualpipev"), micro_batches=4),
    Case("ring", MeshConfig(cp=2), model=TIED),
    Case("gathered-accumulated", MeshConfig(cp=2, context="all-gather"), micro_batches=2),
    Case("ulysses", MeshConfig(cp=2, context="ulysses", fsdp_unit="block"), z_loss=Z_LOSS),
    Case(
        "ulysses-experts-latent",
        MeshConfig(cp=2, context="ulysses"),
        model={**EXPERTS, **LATENT},
        micro_batches=2,
    ),
    Case("experts-fsdp", MeshConfig(dp_shard=2), model=EXPERTS),
    Case(
        "experts-latent-by-block-accumulated",
        MeshConfig(dp_shard=2, fsdp_unit="block"),
        model={**EXPERTS, **LATENT},
        micro_batches=2,
    ),
    Case("experts-1f1b", MeshConfig(pp=2), model=EXPERTS, micro_batches=2),
    Case("qk-norm-tp", MeshConfig(tp=2), model={"qk_norm": True, "head_dim": 24}),
    Case(
        "full-zero-3-accumulated",
        MeshConfig(dp_shard=2, fsdp_unit="block", reshard="always"),
        micro_batches=2,
        compute=FULL,
    ),
    Case("full-tp", MeshConfig(tp=2), model=TIED, compute=FULL),
    Case("full-ring", MeshConfig(cp=2), compute=FULL),
    Case("selective-tp", MeshConfig(tp=2, loss_parallel=True), compute=SELECTIVE),
    Case(
        "selective-experts-latent",
        MeshConfig(dp_shard=2, fsdp_unit="block"),
        model={**EXPERTS, **LATENT},
        compute=SELECTIVE,
    ),
    Case("full-experts-1f1b", MeshConfig(pp=2), EXPERTS, micro_batches=2, compute=FULL),
    Case(
        "compiled-selective-fsdp",
        MeshConfig(dp_shard=2, fsdp_unit="block"),
        compute=Compute("selective", "aot_eager"),
    ),
    Case(
        "compiled-bfloat16-zero-3-accumulated",
        MeshConfig(dp_shard=2, fsdp_unit="block", reshard="always"),
        micro_batches=2,
        compute=Compute("none", "aot_eager", "bfloat16"),
    ),
    Case("bfloat16-fsdp", MeshConfig(dp_shard=2), model=TIED, compute=BFLOAT16),
    Case("bfloat16-replicated", MeshConfig(dp_replicate=2), compute=BFLOAT16),
    Case("bfloat16-ring", MeshConfig(cp=2), compute=BFLOAT16),
    Case("bfloat16-experts", MeshConfig(dp_shard=2), model=EXPERTS, compute=BFLOAT16),
    # -- 4 ranks
    Case("ring-experts", MeshConfig(dp_shard=2, cp=2), model=EXPERTS, optimizer=MUON),
    Case("ring-fsdp", MeshConfig(dp_shard=2, cp=2), model=TIED, micro_batches=2),
    Case("ring-of-4-muon", MeshConfig(cp=4), optimizer=MUON),
    Case("ring-tp", MeshConfig(cp=2, tp=2, loss_parallel=True), z_loss=Z_LOSS),
    Case("gathered-replicated", MeshConfig(dp_replicate=2, cp=2, context="all-gather")),
    Case("experts-hsdp", MeshConfig(dp_replicate=2, dp_shard=2), model=EXPERTS),
    Case("pp-of-4-tied", MeshConfig(pp=4), model=TIED, micro_batches=4),
    Case(
        "pp-fsdp-tied-muon",
        MeshConfig(pp=2, dp_shard=2),
        model=TIED,
        optimizer=MUON,
        z_loss=Z_LOSS,
        micro_batches=2,
    ),
    Case("zbv-fsdp-by-block", looped("zbv", dp_shard=2, fsdp_unit="block"), micro_batches=4),
    Case("pp-replicated", MeshConfig(pp=2, dp_replicate=2), micro_batches=2),
    Case(
        "interleaved-zb-tp",
        looped("interleaved-zb", tp=2, loss_parallel=True),
        model=TIED,
        micro_batches=2,
    ),
    Case("dualpipev-tp", looped("dualpipev", tp=2), micro_batches=4),
    Case("fsdp-tp", MeshConfig(dp_shard=2, tp=2), model=TIED, collectives=counted(20, 19, 4)),
    Case(
        "zero-3-tp-accumulated",
        MeshConfig(dp_shard=2, tp=2, fsdp_unit="block", reshard="always", loss_parallel=True),
        micro_batches=2,
    ),
    Case(
        "hsdp-accumulated",
        MeshConfig(dp_replicate=2, dp_shard=2, fsdp_unit="block"),
        model=TIED,
        micro_batches=2,
        collectives=counted(18, 10, 8),
    ),
    Case("replicated-tp", MeshConfig(dp_replicate=2, tp=2), micro_batches=2),
    Case("fsdp-tp-muon", MeshConfig(dp_shard=2, tp=2), model=TIED, optimizer=MUON),
    Case("full-fsdp-tp", MeshConfig(dp_shard=2, tp=2), model=TIED, compute=FULL),
    Case("bfloat16-fsdp-tp", MeshConfig(dp_shard=2, tp=2), compute=BFLOAT16),
    Case("bfloat16-pp-fsdp", MeshConfig(pp=2, dp_shard=2), micro_batches=2, compute=BFLOAT16),
    Case("hsdp-muon", MeshConfig(dp_replicate=2, dp_shard=2), optimizer=MUON, z_loss=Z_LOSS),
    # -- 8 ranks
    Case("hsdp-tp", MeshConfig(dp_replicate=2, dp_shard=2, tp=2), model=TIED),
    Case(
        "hsdp-tp-zero-2-accumulated",
        MeshConfig(
            dp_replicate=2,
            dp_shard=2,
            tp=2,
            fsdp_unit="block",
            reshard="never",
            loss_parallel=True,
        ),
        micro_batches=2,
    ),
    Case("fsdp-of-4-tp", MeshConfig(dp_shard=4, tp=2)),
    Case("pp-fsdp-tp", MeshConfig(pp=2, dp_shard=2, tp=2), model=TIED, micro_batches=2),
    Case("zbv-fsdp-tp", looped("zbv", dp_shard=2, tp=2, fsdp_unit="block"), micro_batches=4),
    Case("interleaved-hsdp", looped("interleaved-1f1b", dp_replicate=2, dp_shard=2), TIED, {}, 2),
]


def names(num_ranks: int, *, is_compiled: bool = False) -> list[str]:
    return [case.name for case in _rows(num_ranks, is_compiled)]


def _rows(num_ranks: int, is_compiled: bool) -> list[Case]:
    rows = [case for case in CASES if case.num_ranks == num_ranks]
    return [case for case in rows if case.is_compiled == is_compiled]


def case_of(name: str) -> Case:
    (case,) = (case for case in CASES if case.name == name)
    return case


@cache
def run_rows(num_ranks: int, is_compiled: bool) -> list[dict[str, Any]]:
    """Train all rows of a number of ranks; returns, by rank, the results by name."""
    trained = _train_compiled_rows if is_compiled else _train_rows
    return run_ranks(trained, num_ranks, timeout_s=60 * num_ranks)


def _train_compiled_rows(island_rank: int) -> dict[str, Any]:
    return _train_rows(island_rank, is_compiled=True)


def _train_rows(island_rank: int, *, is_compiled: bool = False) -> dict[str, Any]:
    rows = _rows(dist.get_world_size(), is_compiled)
    return {case.name: train(case, make_mesh(CPU, case.mesh), case.micro_batches) for case in rows}


def alone(case: Case) -> dict[str, Any]:
    """Train on one rank what a row trains on several."""
    key = repr((sorted(case.model.items()), sorted(case.optimizer.items()), case.z_loss))
    if key not in _ALONE:
        _ALONE[key] = train(replace(case, compute=PLAIN), one_rank(), 1)
    return _ALONE[key]


_ALONE: dict[str, dict[str, Any]] = {}


def train(case: Case, mesh: IslandMesh, micro_batches: int) -> dict[str, Any]:
    """Train some steps; then write halves through the lanes, as the outer loop does, and go on."""
    if case.is_compiled:
        torch.compiler.reset()  # each row's blocks are compiled as in a process of their own
    trainer = case.make_trainer(mesh, micro_batches)
    lanes = _Lanes(trainer)
    initial = lanes.digest()
    evaluations = [trainer.evaluate()]
    metrics = [trainer.inner_step(step) for step in range(INNER_STEPS)]
    evaluations.append(trainer.evaluate())
    trained = whole_parameters(trainer.model)
    lanes.write(lambda values: values * 0.5)
    written = whole_parameters(trainer.model)
    evaluations.append(trainer.evaluate())
    # No dispatch mode but where it is wanted: nothing is compiled under one.
    collectives = _Collectives()
    with contextlib.nullcontext() if case.collectives is None else collectives:
        metrics.append(trainer.inner_step(INNER_STEPS))
    return {
        "initial": initial,
        "metrics": metrics,
        "evaluations": evaluations,
        "trained": _of_all_stages(trained, mesh),
        "dtypes": {str(p.dtype) for p in canonical_parameters(trainer.model).values()},
        "halved": all(_same(written[name], value * 0.5) for name, value in trained.items()),
        "collectives": dict(collectives.counts),
    }


def _of_all_stages(values: dict[str, Array], mesh: IslandMesh) -> dict[str, Array]:
    """Put together what the ranks of a pipeline have; copies must agree."""
    if mesh.pp_group is None:
        return values
    stages = [values] * mesh.size("pp")
    dist.all_gather_object(stages, values, group=mesh.pp_group)
    merged: dict[str, Array] = {}
    for stage in stages:
        assert all(_same(merged[name], stage[name]) for name in merged.keys() & stage.keys())
        merged |= stage
    return dict(sorted(merged.items()))


class _Collectives(TorchDispatchMode):
    """Counts what this rank's collectives are called.

    PyTorch's `CommDebugMode` also follows modules by hooks, and fails where a module is called
    without inputs that need gradients, as tensor-parallel blocks after an evaluation are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func.name().split("::")
        name = name.split(".")[0].strip("_")
        if "c10d" in namespace and name not in ("wait_tensor", "wrap_tensor_autograd"):
            self.counts[_NAMES.get(name, name)] += 1
        return func(*args, **(kwargs or {}))


#: Each is called by one name in place and by another as a function of tensors.
_NAMES = {
    "allgather_base": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
}


class _Lanes:
    """The lanes of a trainer's parameters, as an island of any layout exchanges them."""

    def __init__(self, trainer: InnerTrainer) -> None:
        parameters = canonical_parameters(trainer.model)
        group = dist.group.WORLD if dist.is_initialized() else None
        plan = make_plan(tensor_specs(parameters, group=group), num_fragments=2, num_lanes=4)
        self._fragments = plan.fragments
        self._shards = LaneShards(plan, parameters, group=group)

    def digest(self) -> str:
        """Hash the canonical vectors of all fragments; collective, equal on all ranks."""
        content: dict[tuple[int, int], bytes] = {}
        for fragment in self._fragments:
            mine = self._shards.collect(fragment.fragment_id)
            for lane_id, lane in mine.items():
                content[fragment.fragment_id, lane_id] = lane.numpy().tobytes()
        everybody = [content]
        if dist.is_initialized():
            everybody = [content] * dist.get_world_size()
            dist.all_gather_object(everybody, content)
        whole = sorted(item for part in everybody for item in part.items())
        return hashlib.sha256(b"".join(values for _, values in whole)).hexdigest()

    def write(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for fragment in self._fragments:
            lanes = self._shards.collect(fragment.fragment_id)
            changed = {lane_id: change(lane) for lane_id, lane in lanes.items()}
            self._shards.distribute(fragment.fragment_id, changed, 0.0)


def _same(ours: Array, theirs: Array) -> bool:
    return ours.tobytes() == theirs.tobytes()
