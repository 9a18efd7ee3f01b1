"""`diloco baseline`: the model, text and links of a run, trained another way, on this machine.

There is no coordinator, no checkpoint and no return: one rank that ends early ends the baseline.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from diloco.baseline.group import GLOO, HOPS, NCCL, TRANSPORT, BaselineMember, check_equal_ranks
from diloco.baseline.members import BaselineProcesses
from diloco.config.hugging_face import check_version
from diloco.config.load import resolved_toml
from diloco.config.schema import Config
from diloco.errors import ConfigError, DilocoError
from diloco.launch.process.emulated import Emulated
from diloco.state_dir import make_directory

FLAT, HIERARCHICAL = "flat", "hierarchical"
LOCAL_SGD, POST_LOCAL_SGD = "local-sgd", "post-local-sgd"
NAMES = (FLAT, HIERARCHICAL, LOCAL_SGD, POST_LOCAL_SGD)


@dataclass(frozen=True, slots=True)
class BaselineOptions:
    """Options of a baseline, besides the run.

    Attributes:
        name: One of `NAMES`.
        codec: Of what crosses between islands.
        chunk_bytes: Float32 values that are reduced at once.
        streams: Vectors under way to another rank at once.
        average_every: Inner steps between averages of parameters; 0: H of the run.
        parallel_steps: Inner steps of data parallel before them.
        hop: One of `HOPS`.
    """

    name: str
    codec: str = "float32"
    chunk_bytes: int = 4 << 20
    streams: int = 8
    average_every: int = 0
    parallel_steps: int = 0
    hop: str = TRANSPORT

    @property
    def averages(self) -> bool:
        """Whether parameters are averaged now and then, and not gradients in every inner step."""
        return self.name in (LOCAL_SGD, POST_LOCAL_SGD)

    def method(self, config: Config) -> dict[str, int]:
        """Say what members are to do; see `diloco.baseline.member.Method`."""
        if not self.averages:
            return {}
        every = self.average_every or config.outer.inner_steps_per_round
        return {"average_every": every, "parallel_steps": self.parallel_steps}


def check_baseline(config: Config, options: BaselineOptions) -> None:
    """Refuse what a baseline cannot be, before anything is started.

    Raises:
        ConfigError: Saying what to change.
    """
    if options.name not in NAMES:
        raise ConfigError(f"baseline {options.name!r} is unknown: choose {', '.join(NAMES)}")
    if options.average_every and not options.averages:
        raise ConfigError(
            f"--every {options.average_every}: {options.name} sums gradients in every inner step; "
            f"leave it out, or take {LOCAL_SGD}"
        )
    if (options.name == POST_LOCAL_SGD) != bool(options.parallel_steps):
        raise ConfigError(
            f"--first {options.parallel_steps} with {options.name}: {POST_LOCAL_SGD} begins with "
            f"that many inner steps of data parallel, 1 or more, and no other baseline does"
        )
    if options.parallel_steps >= config.run.inner_steps:
        raise ConfigError(
            f"--first {options.parallel_steps}: run.inner_steps = {config.run.inner_steps}, so "
            f"nothing would be local; give at most {config.run.inner_steps - 1}"
        )
    _check_hop(config, options)
    if config.run.warm_start:
        raise ConfigError(
            f"run.warm_start = {config.run.warm_start!r}: baselines start from the seed only; "
            f"leave it out (--set run.warm_start=)"
        )
    check_version(config.model.transformers)
    if config.model.experts.num_experts:
        raise ConfigError(
            f"model.experts.num_experts = {config.model.experts.num_experts}: experts are balanced "
            f"by counts of one island, and a baseline trains across them; take a dense model"
        )
    if options.name != FLAT:
        check_equal_ranks({name: island.ranks for name, island in config.islands.items()})
    length = config.data.sequence_length
    for name, island in sorted(config.islands.items()):
        for axis, size in island.mesh.model_dump().items():
            if not axis.startswith("dp_") and type(size) is int and size > 1:
                raise ConfigError(
                    f"islands.{name}.mesh.{axis} = {size}: every rank of a baseline holds the "
                    f"whole model; give mesh = {{ dp_shard = {island.ranks} }}, which is data "
                    f"parallel here"
                )
        if island.precision != "float32":
            raise ConfigError(
                f'islands.{name}.precision = "{island.precision}": baselines compute in float32; '
                f'set it to "float32"'
            )
        unit = length * island.ranks * island.micro_batches
        if island.tokens_per_inner_step % unit:
            nearest = max(1, round(island.tokens_per_inner_step / unit)) * unit
            raise ConfigError(
                f"islands.{name}.tokens_per_inner_step = {island.tokens_per_inner_step}: must be a "
                f"multiple of sequence_length x ranks x micro_batches = {unit}, such as {nearest}"
            )


def _check_hop(config: Config, options: BaselineOptions) -> None:
    if options.hop not in HOPS:
        raise ConfigError(f"--hop {options.hop} is unknown: choose {', '.join(HOPS)}")
    for name, island in sorted(config.islands.items()):
        if island.device == ("cpu" if options.hop == NCCL else "cuda"):
            raise ConfigError(
                f'--hop {options.hop}: islands.{name}.device = "{island.device}": ranks of a '
                f"baseline are on CUDA devices with --hop {NCCL} and on CPUs with any other; leave "
                f'it at "auto"'
            )
    if options.hop == TRANSPORT:
        return
    if options.name == FLAT:
        raise ConfigError(
            f"--hop {options.hop}: the ring of {FLAT} goes through all ranks over the transport; "
            f"leave it out, or take {HIERARCHICAL}"
        )
    if config.transport.certs:
        raise ConfigError(
            f'--hop {options.hop}: transport.certs = "{config.transport.certs}" encrypts what goes '
            f"over the transport, and nothing of a process group: leave it out (--set "
            f"transport.certs=) inside one cluster, and --hop between clusters"
        )
    if options.streams != BaselineOptions(options.name).streams:
        raise ConfigError(
            f"--streams {options.streams}: a process group sums one chunk after the other: leave "
            f"it out, or --hop {options.hop}"
        )
    if config.transport.link:
        raise ConfigError(
            f'--hop {options.hop}: transport.link = "{config.transport.link}" shapes what goes '
            f"over the transport, and nothing of a process group: leave it out (--set "
            f"transport.link=), and run it under diloco emulate where links should be slow"
        )
    if options.hop == NCCL:
        _check_devices(sum(island.ranks for island in config.islands.values()))


def _check_devices(num_ranks: int) -> None:
    """Refuse NCCL where not every rank has a CUDA device of its own."""
    from torch.cuda import device_count  # torch takes seconds to load

    if (num_devices := device_count()) < num_ranks:
        raise ConfigError(
            f"--hop {NCCL}: NCCL needs a CUDA device for each of the {num_ranks} ranks, and this "
            f"machine has {num_devices}; take --hop {GLOO}"
        )


def run_baseline(
    config: Config,
    options: BaselineOptions,
    directory: Path,
    *,
    emulated: Emulated | None = None,
    on_look: Callable[[], None] = lambda: None,
    on_started: Callable[[Mapping[BaselineMember, int]], None] = lambda _: None,
) -> dict[str, Any]:
    """Train to the end and write summary.json.

    Args:
        config: The run; `check_baseline` has accepted it.
        options: Which baseline.
        directory: For logs and the summary; made when missing.
        emulated: The network that this process is in, if it is not the machine's own.
        on_look: Called many times a second; what it raises ends every process.
        on_started: Told the process of each member.

    Returns:
        The summary, JSON values.

    Raises:
        IslandFailed: If a member ended early.
        DilocoError: If members do not hold the same parameters at the end.
    """
    if emulated and options.hop == NCCL:
        raise ConfigError(
            f"--hop {NCCL} under diloco emulate: devices of one machine reach each other past its "
            f"emulated links; take --hop {GLOO}"
        )
    make_directory(directory, "--out")
    run_file = directory / "baseline.toml"
    run_file.write_text(resolved_toml(config))
    start, most_bytes = secrets.token_hex(8), 4 * _num_parameters(config)
    with BaselineProcesses("diloco.baseline.member", directory, on_look) as members:
        for name, island in sorted(config.islands.items()):
            host = emulated.description["islands"][name]["address"] if emulated else "127.0.0.1"
            for island_rank in range(island.ranks):
                site = {
                    "start": start,
                    "island": name,
                    "island_rank": island_rank,
                    "islands": {each: config.islands[each].ranks for each in config.islands},
                    "is_flat": options.name == FLAT,
                    "codec": options.codec,
                    "chunks_bytes": [options.chunk_bytes],
                    "streams": options.streams,
                    "bind": f"{host}:0",
                    "patience_s": config.transport.rpc_timeout.seconds,
                    "most_bytes": most_bytes,
                }
                order = {
                    "config": str(run_file),
                    "site": site,
                    "method": options.method(config),
                    "hop": options.hop,
                }
                prefix = emulated.prefix(name) if emulated else []
                if emulated and options.hop == GLOO:
                    prefix += emulated.interface(name)
                members.start(
                    BaselineMember(name, island_rank), order, threads=island.threads, prefix=prefix
                )
        on_started(members.pids)
        results = members.results()
    summary = _summary(config, options, results)
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if len(digests := {result["digest"] for result in results.values()}) > 1:
        raise DilocoError(
            f"the members of the baseline end with {len(digests)} different sets of parameters, "
            f"and all should hold one: {directory / 'summary.json'}"
        )
    return summary


def _num_parameters(config: Config) -> int:
    from diloco.trainer.models.families import build_model, shape_of  # torch takes seconds to load

    model = build_model(shape_of(config.model))
    return sum(parameter.numel() for parameter in model.parameters())


def _summary(
    config: Config, options: BaselineOptions, results: Mapping[BaselineMember, dict[str, Any]]
) -> dict[str, Any]:
    """Put together what members said; losses are means over all tokens of an inner step."""
    tokens = {name: island.tokens_per_inner_step for name, island in config.islands.items()}
    shares = {
        member: tokens[member.island] / config.islands[member.island].ranks / sum(tokens.values())
        for member in results
    }
    losses = [
        sum(shares[member] * result["losses"][step] for member, result in results.items())
        for step in range(config.run.inner_steps)
    ]
    first = results[min(results)]
    wall_s = max(result["wall_s"] for result in results.values())
    islands = {
        name: {
            key: sum(result[key] for member, result in results.items() if member.island == name)
            for key in ("bytes_up", "bytes_down")
        }
        for name in sorted(config.islands)
    }
    return {
        "baseline": asdict(options) | options.method(config),
        "run": config.run.name,
        "link": config.transport.link,
        "inner_steps": config.run.inner_steps,
        "total_tokens": config.total_tokens,
        "losses": losses,
        "grad_norms": first["grad_norms"],
        "nats_per_byte": first["nats_per_byte"],
        "wall_s": wall_s,
        "step_s": median(first["step_s"]),
        "waited_s": max(result["waited_s"] for result in results.values()),
        "utilisation": 1 - max(result["waited_s"] for result in results.values()) / wall_s,
        "islands": islands,
        "digest": first["digest"],
    }
