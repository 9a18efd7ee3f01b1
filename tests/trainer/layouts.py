"""Every supported layout of an island, a row each.

What several ranks train is held against what one rank trains of it, by `test_layouts`. To add a
layout, add a row.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from diloco.config.compute import Compute, Precision
from diloco.config.mesh import MeshConfig
from diloco.config.model import ExpertsConfig, LatentAttentionConfig
from diloco.config.pipeline import Schedule
from tests.trainer.layout_case import Case, Loads

#: By precision, in nats. Float32: sums in another order; at most 1.4e-6 was seen, and a lost
#: gradient costs 1e-3 and more. Bfloat16 has 8 bits, a relative error of 2^-9 a rounding; at most
#: 1.4e-3 was seen of a loss near 5.
LARGEST_DIFFERENCES: Mapping[Precision, float] = {"float32": 5e-6, "bfloat16": 1e-2}

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
COMPILED_BFLOAT16 = Compute("none", "aot_eager", "bfloat16")
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
    Case("bfs-uneven", looped("bfs"), model={"num_layers": 7}, micro_batches=2),
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
        compute=COMPILED_BFLOAT16,
    ),
    Case("compiled-tp-tied", MeshConfig(tp=2), model=TIED, compute=Compute("none", "aot_eager")),
    Case("compiled-full-tp", MeshConfig(tp=2), compute=Compute("full", "aot_eager")),
    Case("compiled-selective-tp", MeshConfig(tp=2), compute=Compute("selective", "aot_eager")),
    Case(
        "compiled-full-1f1b",
        MeshConfig(pp=2),
        micro_batches=2,
        compute=Compute("full", "inductor"),
    ),
    Case("compiled-bfs", looped("bfs"), micro_batches=2, compute=Compute("none", "aot_eager")),
    Case(
        "compiled-full-gathered",
        MeshConfig(cp=2, context="all-gather"),
        compute=Compute("full", "aot_eager"),
    ),
    Case(
        "compiled-bfloat16-experts-latent-ulysses",
        MeshConfig(cp=2, ep=2, context="ulysses"),
        model={**EXPERTS, **LATENT},
        compute=COMPILED_BFLOAT16,
    ),
    Case(
        "compiled-bfloat16-1f1b-experts",
        MeshConfig(pp=2),
        model=EXPERTS,
        micro_batches=2,
        compute=COMPILED_BFLOAT16,
    ),
    Case("bfloat16-fsdp", MeshConfig(dp_shard=2), model=TIED, compute=BFLOAT16),
    Case("bfloat16-replicated", MeshConfig(dp_replicate=2), compute=BFLOAT16),
    Case("bfloat16-ring", MeshConfig(cp=2), compute=BFLOAT16),
    Case("bfloat16-tp", MeshConfig(tp=2), model=TIED, compute=BFLOAT16),
    Case("bfloat16-1f1b", MeshConfig(pp=2), micro_batches=2, compute=BFLOAT16),
    Case("bfloat16-experts", MeshConfig(dp_shard=2), model=EXPERTS, compute=BFLOAT16),
    Case("bfloat16-ep", MeshConfig(dp_shard=2, ep=2), model=EXPERTS, compute=BFLOAT16),
    # -- 4 ranks
    Case("pp-of-4-uneven-tied", MeshConfig(pp=4), model={**TIED, "num_layers": 6}, micro_batches=4),
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
    Case("pp-ring-tied", MeshConfig(pp=2, cp=2), model=TIED, micro_batches=2),
    Case(
        "zbv-ulysses-experts-latent",
        looped("zbv", cp=2, ep=2, context="ulysses"),
        model={**EXPERTS, **LATENT},
        micro_batches=2,
    ),
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
    Case("compiled-fsdp-tp", MeshConfig(dp_shard=2, tp=2), compute=Compute("none", "aot_eager")),
    Case(
        "compiled-full-bfloat16-fsdp-tp",
        MeshConfig(dp_shard=2, tp=2, loss_parallel=True),
        micro_batches=2,
        compute=Compute("full", "inductor", "bfloat16"),
    ),
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
    Case("pp-ring-tp-compute", MeshConfig(pp=2, cp=2, tp=2), micro_batches=2, compute=SELECTIVE),
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
