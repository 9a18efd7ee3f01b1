"""Every supported layout of an island as a row of a table, and how such a row is trained.

A row is configuration only, checked as a run file is. What several ranks train is held against
what one rank trains of it: `diloco.bench.parity_inner` does, and the tests of layouts. To add a
layout, add a row; both take it up.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diloco.bench.island_trainer import island_trainer, own_batches
from diloco.config.compute import PLAIN, Compute
from diloco.config.inner import InnerOptimizerConfig
from diloco.config.mesh import MeshConfig
from diloco.config.model import ExpertsConfig, LatentAttentionConfig, ModelConfig
from diloco.config.pipeline import Schedule
from diloco.config.schema import Config
from diloco.data.batches import Data
from diloco.data.open import open_data
from diloco.inner.mesh import IslandMesh
from diloco.inner.trainer import InnerTrainer

#: What a row needs beside torch.
Loads: TypeAlias = Literal["", "compiler", "transformers"]

INNER_STEPS = 5

#: Small, and awkward: half of ffn_dim, a rank's share under tp = 2, divides by no other 2.
MODEL = ModelConfig(dim=64, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=210)
OPTIMIZER = InnerOptimizerConfig(lr=2e-3, warmup_steps=2)

_ISLAND = "bench"
_SEED = 11
_SEQUENCE_LENGTH = 32
_BATCH_SIZE = 8
_EVALUATED = 7  # divides neither by ranks nor by the micro-batch


@dataclass(frozen=True)
class Case:
    """One layout.

    Attributes:
        name: Of the row.
        mesh: Axes and options; their product is the number of ranks.
        model: What differs from `MODEL`.
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
        """Number of ranks that train it."""
        return self.mesh.num_ranks

    @property
    def is_compiled(self) -> bool:
        """Whether blocks are compiled."""
        return self.compute.compile_backend != ""

    @property
    def loads(self) -> Loads:
        """What is loaded for it; either takes longer than many rows."""
        if self.is_compiled:
            return "compiler"
        return "transformers" if self.model.get("family") == "hf" else ""

    @property
    def what(self) -> str:
        """What is trained, whatever the layout: rows of one such text are held against one run."""
        return repr((sorted(self.model.items()), sorted(self.optimizer.items()), self.z_loss))

    @property
    def alone(self) -> Case:
        """What it is held against: the same on one rank, in float32, with everything kept."""
        return replace(self, mesh=MeshConfig(), micro_batches=1, collectives=None, compute=PLAIN)

    def config(self) -> Config:
        """Write the run that trains it; its only island is selected.

        Raises:
            ValueError: If a run file with these values would be refused.
        """
        compiled = {"compile": True, "compile_backend": self.compute.compile_backend}
        return Config.model_validate(
            {
                "run": {"name": "layouts", "seed": _SEED, "inner_steps": INNER_STEPS + 3},
                "model": {**MODEL.model_dump(exclude_unset=True), **self.model},
                "data": {"sequence_length": _SEQUENCE_LENGTH},
                "inner": {
                    "optimizer": {**OPTIMIZER.model_dump(exclude_unset=True), **self.optimizer},
                    "clip_norm": 0.5,
                    "z_loss": self.z_loss,
                },
                "outer": {"preset": "classic", "inner_steps_per_round": 1},
                "coordinator": {"state_dir": "unused"},
                "evaluation": {"num_sequences": _EVALUATED},
                "islands": {
                    _ISLAND: {
                        "ranks": self.num_ranks,
                        "tokens_per_inner_step": _BATCH_SIZE * _SEQUENCE_LENGTH,
                        "mesh": self.mesh,
                        "micro_batches": self.micro_batches,
                        "activation_checkpointing": self.compute.activation_checkpointing,
                        **(compiled if self.is_compiled else {}),
                        "precision": self.compute.precision,
                    }
                },
                "island_id": _ISLAND,
            }
        )

    def make_trainer(self, mesh: IslandMesh) -> InnerTrainer:
        """Build model, optimizer and loop; collective.

        Args:
            mesh: From `make_mesh` of this row's.
        """
        if self.is_compiled:
            torch.compiler.reset()  # compiled as in a process of its own
        config, data = self.config(), _text()
        return island_trainer(config, data, own_batches(config, data, 0, mesh), mesh)


@cache
def _text() -> Data:
    """Open the text, which is that of every row, once a process."""
    return open_data(Case("", MeshConfig()).config())


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
_HF_SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 210,
}
HF_LLAMA = {"family": "hf", "hf_config": {**_HF_SIZES, "model_type": "llama"}}
HF_TIED = {
    "family": "hf",
    "hf_config": {**_HF_SIZES, "model_type": "llama", "tie_word_embeddings": True},
}
HF_QWEN3 = {"family": "hf", "hf_config": {**_HF_SIZES, "model_type": "qwen3", "head_dim": 24}}
#: Learned positions, matrices stored the other way round, biases, a tied head; no plan for tp.
HF_GPT2 = {
    "family": "hf",
    "num_kv_heads": 4,
    "hf_config": {
        "model_type": "gpt2",
        "vocab_size": 256,
        "n_positions": 32,
        "n_embd": 64,
        "n_layer": 4,
        "n_head": 4,
        "n_inner": 210,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    },
}
MUON = {"name": "muon", "lr": 5e-3}
FULL, SELECTIVE = Compute("full"), Compute("selective")
BFLOAT16 = Compute(precision="bfloat16")
#: Large, so that it is felt within few steps.
Z_LOSS = 0.01


def counted(gathers: int, scatters: int, sums: int) -> dict[str, int]:
    """Name the collectives that there are."""
    named = {"all-gather": gathers, "reduce-scatter": scatters, "all-reduce": sums}
    return {name: count for name, count in named.items() if count}


def looped(schedule: Schedule, **options: Any) -> MeshConfig:
    """Lay out two stages on each of two ranks of a pipeline."""
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
    Case("1f1b-experts", MeshConfig(pp=2), model=EXPERTS, micro_batches=2),
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
    Case("ep", MeshConfig(dp_shard=2, ep=2), model=EXPERTS, micro_batches=2),
    Case("ep-muon", MeshConfig(dp_shard=2, ep=2), model=EXPERTS, optimizer=MUON, z_loss=Z_LOSS),
    Case(
        "ep-over-cp-latent-by-block",
        MeshConfig(cp=2, ep=2, context="ulysses", fsdp_unit="block", reshard="always"),
        model={**EXPERTS, **LATENT},
    ),
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
    Case("full-1f1b-tied", MeshConfig(pp=2), model=TIED, micro_batches=2, compute=FULL),
    Case("selective-ep", MeshConfig(dp_shard=2, ep=2), model=EXPERTS, compute=SELECTIVE),
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
    Case("compiled-tp-tied", MeshConfig(tp=2), model=TIED, compute=Compute("none", "aot_eager")),
    Case("bfloat16-fsdp", MeshConfig(dp_shard=2), model=TIED, compute=BFLOAT16),
    Case("bfloat16-replicated", MeshConfig(dp_replicate=2), compute=BFLOAT16),
    Case("bfloat16-ring", MeshConfig(cp=2), compute=BFLOAT16),
    Case("bfloat16-tp", MeshConfig(tp=2), model=TIED, compute=BFLOAT16),
    Case("bfloat16-1f1b", MeshConfig(pp=2), micro_batches=2, compute=BFLOAT16),
    Case("bfloat16-experts", MeshConfig(dp_shard=2), model=EXPERTS, compute=BFLOAT16),
    Case("bfloat16-ep", MeshConfig(dp_shard=2, ep=2), model=EXPERTS, compute=BFLOAT16),
    # -- 4 ranks
    Case("ring-experts", MeshConfig(dp_shard=2, cp=2), model=EXPERTS, optimizer=MUON),
    Case("ring-fsdp", MeshConfig(dp_shard=2, cp=2), model=TIED, micro_batches=2),
    Case("ring-of-4-muon", MeshConfig(cp=4), optimizer=MUON),
    Case("ring-tp", MeshConfig(cp=2, tp=2, loss_parallel=True), z_loss=Z_LOSS),
    Case("gathered-replicated", MeshConfig(dp_replicate=2, cp=2, context="all-gather")),
    Case("experts-hsdp", MeshConfig(dp_replicate=2, dp_shard=2), model=EXPERTS),
    Case("ep-fsdp", MeshConfig(dp_shard=4, ep=2), model=EXPERTS, micro_batches=2),
    Case(
        "ep-fsdp-cp-muon",
        MeshConfig(dp_shard=2, cp=2, ep=2, fsdp_unit="block", reshard="never"),
        model=EXPERTS,
        optimizer=MUON,
        micro_batches=2,
    ),
    Case("ep-replicated", MeshConfig(dp_replicate=2, dp_shard=2, ep=2), EXPERTS, {}, 0.0, 2),
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
    Case("zbv-ep", looped("zbv", dp_shard=2, ep=2), model=EXPERTS, micro_batches=2),
    Case(
        "dualpipev-ep-latent-muon",
        looped("dualpipev", dp_shard=2, ep=2),
        model={**EXPERTS, **LATENT},
        optimizer=MUON,
        micro_batches=4,
    ),
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
    Case(
        "full-bfloat16-ep-fsdp",
        MeshConfig(dp_shard=4, ep=2, fsdp_unit="block"),
        model=EXPERTS,
        micro_batches=2,
        compute=Compute("full", precision="bfloat16"),
    ),
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
    Case(
        "ep-hsdp-ring",
        MeshConfig(dp_replicate=2, dp_shard=2, cp=2, ep=2),
        model=EXPERTS,
        optimizer=MUON,
        micro_batches=2,
    ),
    Case("pp-fsdp-tp", MeshConfig(pp=2, dp_shard=2, tp=2), model=TIED, micro_batches=2),
    Case("zbv-fsdp-tp", looped("zbv", dp_shard=2, tp=2, fsdp_unit="block"), micro_batches=4),
    Case(
        "interleaved-hsdp",
        looped("interleaved-1f1b", dp_replicate=2, dp_shard=2),
        model=TIED,
        micro_batches=2,
    ),
]

_OF_TRANSFORMERS = [
    Case("hf-fsdp-tied-accumulated", MeshConfig(dp_shard=2), model=HF_TIED, micro_batches=2),
    Case(
        "hf-full-zero-3",
        MeshConfig(dp_shard=2, fsdp_unit="block", reshard="always"),
        model=HF_LLAMA,
        compute=FULL,
        collectives=counted(10, 5, 2),
    ),
    Case("hf-replicated-learned-positions", MeshConfig(dp_replicate=2), model=HF_GPT2),
    Case("hf-tp-tied", MeshConfig(tp=2), model=HF_TIED),
    Case("hf-selective-qk-norm-tp", MeshConfig(tp=2), model=HF_QWEN3, compute=SELECTIVE),
    Case(
        "hf-loss-parallel-muon",
        MeshConfig(tp=2, loss_parallel=True),
        model=HF_TIED,
        optimizer=MUON,
        z_loss=Z_LOSS,
    ),
    Case(
        "hf-compiled-fsdp",
        MeshConfig(dp_shard=2, fsdp_unit="block"),
        model=HF_LLAMA,
        compute=Compute("none", "aot_eager"),
    ),
    Case("hf-bfloat16-fsdp", MeshConfig(dp_shard=2), model=HF_TIED, compute=BFLOAT16),
    Case(
        "hf-fsdp-tp",
        MeshConfig(dp_shard=2, tp=2, fsdp_unit="block"),
        model=HF_QWEN3,
        micro_batches=2,
    ),
]
if importlib.util.find_spec("transformers") is not None:
    CASES += _OF_TRANSFORMERS


def names(num_ranks: int, loads: Loads = "") -> list[str]:
    """Names of the rows of so many ranks, by what they load, in the order of the table."""
    rows = [case for case in CASES if case.num_ranks == num_ranks]
    return [case.name for case in rows if case.loads == loads]


def case_of(name: str) -> Case:
    """Find a row by its name."""
    (case,) = (case for case in CASES if case.name == name)
    return case


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what this rank's collectives are called, while it is entered.

    PyTorch's `CommDebugMode` also follows modules by hooks, and fails where a module is called
    without inputs that need gradients, as tensor-parallel blocks after an evaluation are.

    Attributes:
        counts: Calls by name, such as "all-gather".
    """

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a collective, and call whatever it is."""
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
