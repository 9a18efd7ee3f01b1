"""How the ranks of an island compute a block: what is kept, what is compiled, in which precision.

Owns the values of these keys and what they exclude; imports no torch, so that all of it is refused
before a process starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from diloco.config.fields import Problem
from diloco.config.mesh import MeshConfig

ActivationCheckpointing: TypeAlias = Literal["none", "selective", "full"]
CompileBackend: TypeAlias = Literal["inductor", "aot_eager"]
Precision: TypeAlias = Literal[
    "float32", "bfloat16", "float8-tensorwise", "float8-rowwise", "mxfp8"
]

#: Their backward is split in two: each half would want the forward again, and the graph of both.
_SPLIT_BACKWARD = ("interleaved-zb", "zbv", "dualpipev")


@dataclass(frozen=True, slots=True)
class Float8:
    """What matrix products in 8 bits ask for.

    Attributes:
        capability: Least compute capability of a CUDA device.
        generation: Whose it is.
        unit: Of what both widths of a matrix, and a rank's tokens, are multiples.
        nearest: Precision for devices that have not as much.
    """

    capability: tuple[int, int]
    generation: str
    unit: int
    nearest: Precision


#: By precision; the scales of MXFP8 are those of 32 values.
FLOAT8: Mapping[str, Float8] = {
    "float8-tensorwise": Float8((8, 9), "Ada and Hopper", 16, "bfloat16"),
    "float8-rowwise": Float8((8, 9), "Ada and Hopper", 16, "bfloat16"),
    "mxfp8": Float8((10, 0), "Blackwell", 32, "float8-rowwise"),
}


@dataclass(frozen=True, slots=True)
class Compute:
    """What `islands.NAME` says of computing a block; the default does nothing.

    Attributes:
        activation_checkpointing: What the backward computes again: nothing; what is no matrix
            product and no attention; or all of a block but its input.
        compile_backend: Of `torch.compile`, for every block; empty: blocks run as they are written.
        precision: Of activations, and of parameters where they are used; parameters themselves,
            gradients between ranks and optimizer are float32. In 8 bits (`FLOAT8`) the matrix
            products of blocks are computed, and all else in bfloat16.
    """

    activation_checkpointing: ActivationCheckpointing = "none"
    compile_backend: CompileBackend | Literal[""] = ""
    precision: Precision = "float32"

    @property
    def is_cast(self) -> bool:
        """Whether parameters are used in another type than they are kept in."""
        return self.precision != "float32"


#: Float32, eager, everything kept.
PLAIN = Compute()


def compute_problems(
    compute: Compute, mesh: MeshConfig, *, num_experts: int = 0, is_transformers: bool = False
) -> Iterator[Problem]:
    """Check what the ways of computing exclude of an island's mesh and model.

    Args:
        compute: Of the island.
        mesh: Of the island.
        num_experts: Of a layer of the model; 0: it is dense.
        is_transformers: Whether the model is one of transformers.
    """
    kind = compute.activation_checkpointing
    if is_transformers and compute.compile_backend and mesh.tp > 1:
        yield (
            "compile",
            True,
            'with mesh.tp above 1 is not for model.family = "hf"; set it to false',
        )
    if is_transformers and compute.precision in FLOAT8:
        problem = 'is not for model.family = "hf"; set it to "bfloat16"'
        yield "precision", compute.precision, problem
    if mesh.pp > 1 and mesh.schedule in _SPLIT_BACKWARD:
        for key, value, without in (
            ("activation_checkpointing", kind, '"none"'),
            ("compile", bool(compute.compile_backend), "false"),
        ):
            if value not in ("none", False):
                problem = (
                    f'does not go with mesh.schedule = "{mesh.schedule}", which splits the '
                    f'backward: set it to {without}, or the schedule to "1f1b", "gpipe", "bfs" or '
                    '"interleaved-1f1b"'
                )
                yield key, value, problem
    if compute.compile_backend:
        yield from _compile_problems(compute, mesh, num_experts)
    if mesh.async_tp:
        for key, is_there in (
            ("mesh.tp above 1", mesh.tp > 1),
            (
                'compile = true and compile_backend = "inductor"',
                compute.compile_backend == "inductor",
            ),
        ):
            if not is_there:
                yield "mesh.async_tp", True, f"goes with {key} only: set that, or this to false"


def _compile_problems(compute: Compute, mesh: MeshConfig, num_experts: int) -> Iterator[Problem]:
    """Check what the compiler of PyTorch 2.13 does not take."""
    if mesh.cp > 1 and mesh.context == "ring":
        problem = (
            "does not go with a ring of sends, which PyTorch 2.13 does not compile: set "
            'mesh.context = "ulysses" or "all-gather", or this to false'
        )
        yield "compile", True, problem
    if not num_experts:
        return
    if not compute.is_cast:
        problem = (
            "takes model.experts in 16 bits alone (PyTorch 2.13 does not compile their products in "
            'float32): set precision = "bfloat16", or this to false'
        )
        yield "compile", True, problem
    if compute.activation_checkpointing != "none":
        problem = (
            "does not go with activation_checkpointing of model.experts, whose routers count what "
            'is computed again: set that to "none", or this to false'
        )
        yield "compile", True, problem


def eight_bit_problems(
    precision: Precision, *, device: str, tokens: int, dim: int, tp: int = 1
) -> Iterator[Problem]:
    """Check what matrix products in 8 bits ask of an island, as far as its file tells.

    Args:
        precision: Of the island; others than those in 8 bits ask for nothing.
        device: `islands.NAME.device`.
        tokens: Of a micro-batch on one rank.
        dim: Width of the model's residual stream; 0: unknown.
        tp: Ranks that share matrices.
    """
    if (needed := FLOAT8.get(precision)) is None:
        return
    if device == "cpu":
        yield (
            "precision",
            precision,
            f"needs CUDA devices ({needed.generation}), and device is cpu: set it to "
            '"bfloat16", or the device to "cuda"',
        )
    if dim % (unit := needed.unit * tp):
        yield (
            "precision",
            precision,
            f"wants model.dim to be a multiple of {unit}, {needed.unit} on each rank of mesh.tp, "
            f'not {dim}: set it to "bfloat16", or change the width',
        )
    if tokens % needed.unit:
        yield (
            "precision",
            precision,
            f"wants the tokens of a rank's micro-batch to be a multiple of {needed.unit}, not "
            f'{tokens}: set it to "bfloat16", or change tokens_per_inner_step or micro_batches',
        )


def model_experts(data: Mapping[str, Any]) -> int:
    """Return how many experts a layer of the model has, of sections that were valid."""
    model = data.get("model")
    return 0 if model is None or model.family != "llama" else model.experts.num_experts


def model_dim(data: Mapping[str, Any]) -> int:
    """Return the width of the model's residual stream, of sections that were valid; 0: unknown."""
    model = data.get("model")
    return 0 if model is None or model.family != "llama" else model.dim
