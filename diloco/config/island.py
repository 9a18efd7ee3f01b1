"""The section of one island, and what it owes to the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from diloco.config.classes import Local, Needs, Section
from diloco.config.compute import (
    ActivationCheckpointing,
    CompileBackend,
    Compute,
    Precision,
    compute_problems,
    eight_bit_problems,
    model_dim,
    model_experts,
)
from diloco.config.fields import MOST_STEPS, Deadline, Duration, Problem, Wait
from diloco.config.hugging_face import FAMILY as HUGGING_FACE
from diloco.config.mesh import MeshConfig, mesh_problems, nearest_multiple, ranks_problem
from diloco.config.pipeline import pipeline_problems
from diloco.errors import ConfigError

#: Ranks of a host with accelerators, where nothing is said.
_USUAL_PER_HOST = 8


class IslandConfig(Section):
    """One island; its neighbours need to know only its name."""

    ranks: Local[int] = Field(ge=1, description="Processes of the island")
    mesh: MeshConfig = Field(
        default=MeshConfig(),
        description="Axes whose product is ranks; a loop with diloco.DiLoCo may leave it out",
    )
    tokens_per_inner_step: Local[int] = Field(
        ge=1,
        description="Batch of the island: a multiple of sequence_length x dp_replicate x dp_shard "
        "x micro_batches",
    )
    micro_batches: Local[int] = Field(
        default=1, ge=1, description="Parts in which a rank computes its batch of one inner step"
    )
    activation_checkpointing: Local[ActivationCheckpointing] = Field(
        default="none",
        description="What the backward of a block computes again to save memory: nothing, what is "
        "no matrix product and no attention (selective), or all but its input (full)",
    )
    compile: Local[bool] = Field(
        default=False, description="Whether every block is compiled, by torch.compile"
    )
    compile_backend: Annotated[Local[CompileBackend], Needs("compile")] = Field(
        default="inductor",
        description="Of torch.compile; aot_eager generates no code, so starts at once and gains "
        "nothing: for tests",
    )
    precision: Local[Precision] = Field(
        default="float32",
        description="Of activations and of parameters in use; parameters, their gradients between "
        "ranks and the optimizer stay float32. float8 and mxfp8: matrix products of blocks, all "
        "else bfloat16; for CUDA devices that have them, with torchao (diloco[float8]), and faster "
        "only with compile",
    )
    device: Local[Literal["auto", "cpu", "cuda"]] = Field(
        default="auto",
        description="Where the ranks compute; auto: cuda where every rank of the host has a device "
        "of its own, else cpu",
    )
    threads: Local[int] = Field(
        default=1, ge=1, description="Threads of each rank, fixed for the run"
    )
    carrier_hosts: Local[int] = Field(
        default=0,
        ge=0,
        description="Hosts whose ranks hold what the outer loop keeps of the model (diloco plan) "
        "and send and fetch payloads: the first so many; 0: all of them, evenly; 1: the first "
        "alone, where no other reaches the syncers",
    )
    max_restarts: Local[int] = Field(
        default=3,
        ge=0,
        description="Times in a row that a supervisor starts failed ranks again; training on for "
        "restart_reset gives them back; 0: never. Ranks that reached neither coordinator nor "
        "syncer (exit code 30) are not counted: they are started again for 72 h, unless this is 0",
    )
    restart_wait: Local[Wait] = Field(
        default=Duration("1s"),
        description="Wait before the first restart; it doubles with each, up to 60s",
    )
    restart_reset: Local[Deadline] = Field(
        default=Duration("10min"),
        description="Time without a failure after which all restarts are back",
    )
    collective_timeout: Local[Deadline] = Field(
        default=Duration("5min"),
        description="Time after which a rank that does not come to a collective is given up: the "
        "others name it and end, and a supervisor starts all of them again",
    )
    memory_checkpoint_steps: Local[int] = Field(
        default=0,
        ge=0,
        le=MOST_STEPS,
        description="Inner steps between copies of every rank's inner optimizer and data position "
        "in host memory, from which an island whose ranks failed returns without storage; 0: none",
    )
    memory_copies: Annotated[Local[int], Needs("memory_checkpoint_steps")] = Field(
        default=2,
        ge=1,
        description="Hosts of the island that keep each of these copies, the own one among them; "
        "an island of fewer hosts keeps one on each. Takes 16 bytes a parameter and host that "
        "keeps it",
    )
    heal_optimizer: Local[bool] = Field(
        default=False,
        description="Whether a start without a checkpoint or copy in memory of its own takes the "
        "inner optimizer of another island, as a run checkpoint has it: of the newest, and on "
        "arrival of the next cut",
    )
    heal_wait: Annotated[Local[Deadline], Needs("heal_optimizer")] = Field(
        default=Duration("45s"),
        description="Time for which such a start waits for that before it begins with a new one; "
        "shorter than outer.round_deadline with merge scheduled, where the others wait for it",
    )

    @property
    def usual_per_host(self) -> int:
        """Ranks of a host where nobody says: 8 with device cuda, or fewer that divide all; all."""
        most = min(_USUAL_PER_HOST, self.ranks) if self.device == "cuda" else self.ranks
        return next(n for n in range(most, 0, -1) if self.ranks % n == 0)

    @property
    def compute(self) -> Compute:
        """How its ranks compute a block."""
        return Compute(
            self.activation_checkpointing,
            self.compile_backend if self.compile else "",
            self.precision,
        )


def read_ranks_per_host(
    texts: Sequence[str], islands: Mapping[str, IslandConfig]
) -> dict[str, int]:
    """Read `[ISLAND=]N`, repeated: ranks of a host of each island; as usual where nothing is said.

    Raises:
        ConfigError: If one is no number from 1, of no island, or divides its ranks not evenly.
    """
    found = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        if not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"--ranks-per-host {text}: write a number from 1, or ISLAND=NUMBER")
        if name and name not in islands:
            raise ConfigError(
                f"--ranks-per-host {text}: not in the run file; islands: "
                f"{', '.join(sorted(islands))}"
            )
        found[name] = int(number)
    per_host = {n: found.get(n, found.get("", each.usual_per_host)) for n, each in islands.items()}
    for name, own in per_host.items():
        if islands[name].ranks % own:
            raise ConfigError(
                f"--ranks-per-host {name}={own}: islands.{name}.ranks = {islands[name].ranks}, "
                f"which must be a multiple of it"
            )
    return per_host


def island_problems(island: IslandConfig, data: Mapping[str, Any]) -> Iterator[Problem]:
    """Check what an island's batch and mesh owe to the sections that were valid."""
    if "outer" in data and island.heal_optimizer and not data["outer"].is_on_arrival:
        outer = data["outer"]
        if island.heal_wait.seconds >= outer.round_deadline.seconds:
            yield (
                "heal_wait",
                island.heal_wait,
                "the others wait for it, and their rounds would end without a result: it must be "
                f"shorter than outer.round_deadline = {outer.round_deadline}",
            )
    tokens, mesh = island.tokens_per_inner_step, island.mesh
    is_own = "model" in data and data["model"].family == "own"
    if not (is_own and mesh == MeshConfig()) and (problem := ranks_problem(mesh, island.ranks)):
        yield "mesh", mesh.sizes, problem  # a loop of one's own may do without a mesh
    if "data" in data:
        unit = data["data"].sequence_length * mesh.dp_size * island.micro_batches
        if tokens % unit:
            yield (
                "tokens_per_inner_step",
                tokens,
                "must be a multiple of sequence_length x dp_replicate x dp_shard x micro_batches = "
                f"{unit}; {nearest_multiple(tokens, unit)}",
            )
    yield from mesh_problems(mesh, data)
    yield from compute_problems(
        island.compute,
        mesh,
        num_experts=model_experts(data),
        is_transformers="model" in data and data["model"].family == HUGGING_FACE,
    )
    if mesh.async_tp and island.device == "cpu":
        yield (
            "mesh.async_tp",
            True,
            'needs CUDA devices, and device is cpu: set it to false, or the device to "cuda"',
        )
    yield from eight_bit_problems(
        island.precision,
        device=island.device,
        tokens=tokens // (mesh.dp_size * mesh.cp * island.micro_batches),
        dim=model_dim(data),
        tp=mesh.tp,
    )
    yield from pipeline_problems(
        mesh.schedule, mesh.pp, mesh.stages_per_rank, island.micro_batches, data
    )
