"""How an island computes its blocks: what does not go together is refused at load, by name."""

from pathlib import Path

import pytest

from diloco.config.compute import PLAIN, Compute
from diloco.config.load import load_config
from diloco.errors import ConfigError

TWO_ISLANDS = Path(__file__).resolve().parents[2] / "configs" / "runs" / "two-islands.toml"
TWO = ("islands.east.ranks=2", "islands.east.mesh={dp_shard=2}")


def load(*overrides: str):
    return load_config(TWO_ISLANDS, overrides, island="east")


def test_the_keys_of_an_island_say_how_its_blocks_are_computed():
    config = load(
        *TWO,
        "islands.east.activation_checkpointing=selective",
        "islands.east.compile=true",
        "islands.east.precision=bfloat16",
    )

    assert config.islands["east"].compute == Compute("selective", "inductor", "bfloat16")
    assert config.islands["west"].compute == PLAIN


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["precision=float8"], "float8-tensorwise.*float8-rowwise.*mxfp8"),
        (["precision=float8-rowwise", "device=cpu"], "needs CUDA devices .*and device is cpu: set"),
        (
            ["precision=mxfp8", "ranks=2", "mesh={cp=2}", "tokens_per_inner_step=96"],
            "micro-batch to be a multiple of 32, not 48: set it to .bfloat16",
        ),
        (
            ["ranks=2", "mesh={tp=2}", "precision=mxfp8"],
            "model.dim to be a multiple of 64, 32 on each rank of mesh.tp, not 32",
        ),
        (["compile_backend=aot_eager"], "compile_backend: .*needs compile, and it is false"),
        (
            ["ranks=2", "mesh={cp=2}", "compile=true"],
            'ring of sends, which PyTorch 2.13 does not compile: set mesh.context = "ulysses"',
        ),
        (
            ["ranks=2", "mesh={tp=2,async_tp=true}"],
            "async_tp.*goes with compile = true and .*induct",
        ),
        (
            ["ranks=2", "mesh={tp=2,async_tp=true}", "compile=true", "device=cpu"],
            "async_tp.*needs CUDA devices, and device is cpu: set it to false",
        ),
        (
            [
                "ranks=2",
                'mesh={pp=2,schedule="zbv",stages_per_rank=2}',
                "micro_batches=4",
                "activation_checkpointing=full",
            ],
            'schedule = "zbv", which splits the backward: set it to "none"',
        ),
        (
            [
                "ranks=2",
                'mesh={pp=2,schedule="interleaved-zb",stages_per_rank=2}',
                "micro_batches=4",
                "compile=true",
            ],
            'compile: .*"interleaved-zb", which splits the backward: set it to false, or the sched',
        ),
    ],
    ids=[
        "which-float8",
        "8-bits-on-cpu",
        "8-bits-tokens",
        "8-bits-tp",
        "backend",
        "compile-cp",
        "async-tp-eager",
        "async-tp-cpu",
        "zero-bubble",
        "zero-bubble-compile",
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], words: str):
    with pytest.raises(ConfigError, match=words):
        load(*(f"islands.east.{override}" for override in overrides))
