"""How an island's speed grows with its ranks, by strategy: the same batch on more of them.

Ranks are processes of one thread on this machine, joined by gloo: through the loopback, or, where
links are emulated, each from a namespace of its own through a link to a switch. Where there are
more ranks than CPUs they share them, so the ideal is N ranks, or as many CPUs as there are, times
one rank's speed; and what a strategy was seen to move must pass the link. CPU time a token says
what a strategy costs without the bound of the CPUs, whatever else the machine does.

This is strong scaling; the strategies are those of `diloco.config.mesh`.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from diloco.baseline.group import BaselineMember
from diloco.baseline.members import BaselineProcesses
from diloco.baseline.time_model import step_s, tcp_bps
from diloco.bench.network.emulating import check_text, measure_inside, network_toml
from diloco.bench.run_values import ISLAND, NO_OUTER, run_values
from diloco.bench.training.scaling_rank import run_delay_s
from diloco.config.load import config_of, resolved_toml
from diloco.config.schema import Config
from diloco.errors import ConfigError, IslandFailed
from diloco.launch.process.emulated import Emulated
from diloco.report.rows import Column, Report, Watch, matching
from diloco.system import usable_cpus
from diloco.transport.units import parse_bandwidth

#: The namespace of a rank.
NODE = "rank-{}"
_ONE = "one"
#: Strategy -> axis of the mesh that has all ranks.
STRATEGIES: Mapping[str, str] = {
    "fsdp": "dp_shard",
    "replicate": "dp_replicate",
    "tp": "tp",
    "pp": "pp",
    "cp": "cp",
}

_COLUMNS = (
    Column("row", "row"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("linear_per_s", "x N", ",.0f"),
    Column("ideal_per_s", "ideal", ",.0f"),
    Column("efficiency", "efficiency", ".3f"),
    Column("exposed", "exposed", ".3f"),
    Column("cpu_ratio", "CPU", ".3f"),
    Column("moved_mb", "MB/step", ",.1f"),
    Column("loss", "loss", ".4f"),
)


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """A strategy on some ranks."""

    strategy: str
    num_ranks: int

    @property
    def name(self) -> str:
        """What --rows chooses by, such as fsdp-2; of one rank: one."""
        return _ONE if self.num_ranks == 1 else f"{self.strategy}-{self.num_ranks}"

    @property
    def micro_batches(self) -> int:
        """A pipeline is kept busy by two for every stage; others take the batch at once."""
        return 2 * self.num_ranks if self.strategy == "pp" and self.num_ranks > 1 else 1


@dataclass(frozen=True, slots=True)
class ScalingSetting:
    """What is trained, a Llama of 3.3M parameters on bytes, and links inside where emulated.

    Attributes:
        bandwidth: Of a rank's link to the switch, each way.
        rtt_ms: Between two ranks, through both of their links.
    """

    bandwidth: str = "1Gbit/s"
    rtt_ms: float = 0.4
    sequences: int = 8
    sequence_length: int = 256
    warmup_steps: int = 2
    timed_steps: int = 6
    model: Mapping[str, Any] = field(
        default_factory=lambda: {
            "dim": 192,
            "num_layers": 8,
            "num_heads": 8,
            "num_kv_heads": 4,
            "ffn_dim": 512,
        }
    )


SETTING = ScalingSetting()


def chosen_rows(
    setting: ScalingSetting, ranks: str, patterns: Sequence[str]
) -> tuple[ScalingRow, ...]:
    """Give the rows of some numbers of ranks that match any of `patterns`, and one rank.

    Args:
        setting: Of the bench.
        ranks: Numbers of ranks, with commas.
        patterns: Names with `*` and `?`; none of them: all rows.

    Raises:
        ConfigError: If `ranks` is no such text, a pattern matches no row, or a mesh does not fit
            the model.
    """
    words = ranks.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--ranks {ranks}: give numbers of ranks with commas, such as 2,4")
    rows = [
        ScalingRow(strategy, num_ranks)
        for num_ranks in sorted({int(word) for word in words} - {1})
        for strategy in STRATEGIES
    ]
    wanted = matching([_ONE, *(row.name for row in rows)], patterns)
    chosen = (ScalingRow("", 1), *(row for row in rows if row.name in wanted))
    for row in chosen:
        row_config(setting, row)
    return chosen


def run(
    watch: Watch,
    rows: Sequence[str] = (),
    *,
    ranks: str = "2,4",
    emulate: bool = False,
    setting: ScalingSetting = SETTING,
) -> Report:
    """Train every row and hold it against one rank.

    Args:
        watch: See `Watch`.
        rows: See `chosen_rows`.
        ranks: See `chosen_rows`.
        emulate: Whether ranks have namespaces and links of their own, which needs root.
        setting: What is trained.

    Raises:
        ConfigError: If the kernel does not tell how long threads wait for a CPU, or networks cannot
            be emulated here.
        IslandFailed: If a rank failed, or a link is not as specified; says what its log does.
    """
    chosen = chosen_rows(setting, ranks, rows)
    run_delay_s()
    order = _order(setting, chosen)
    with tempfile.TemporaryDirectory(prefix="diloco-bench-scaling-") as directory:
        if emulate:
            look = functools.partial(watch, "all ranks on emulated links", 0, len(chosen))
            found = _measure_emulated(setting, chosen, order, Path(directory), look)
        else:
            found = inside(
                order,
                None,
                Path(directory),
                lambda num_ranks, done: watch(f"{num_ranks} ranks", done, len(chosen)),
            )
    bps = parse_bandwidth(setting.bandwidth)
    link_bps = tcp_bps(bps, rtt_s=setting.rtt_ms / 1e3) if emulate else math.inf
    cpus, tokens = usable_cpus(), setting.sequences * setting.sequence_length
    links = "emulated" if emulate else "the loopback"
    results = [
        row_figures(
            row,
            found[row.name],
            found[chosen[0].name],
            tokens=tokens,
            timed_steps=setting.timed_steps,
            cpus=cpus,
            link_bps=link_bps,
        )
        for row in chosen
    ]
    described = {**asdict(setting), "usable_cpus": cpus, "links": links}
    return Report("scaling", described, _COLUMNS, results, [])


def row_figures(
    row: ScalingRow,
    ranks: Sequence[Mapping[str, float]],
    alone: Sequence[Mapping[str, float]],
    *,
    tokens: int,
    timed_steps: int,
    cpus: int,
    link_bps: float,
) -> dict[str, Any]:
    """Compute a row of the table.

    x N = tokens/s of one rank x ranks; ideal = tokens an inner step over `time_model.step_s` of one
    rank's time / min(ranks, CPUs) and of what the busiest rank moved; efficiency = tokens/s over
    the ideal; exposed = mean over the ranks of their exposed seconds over the wall time.

    Args:
        row: Which.
        ranks: Figures of each rank, as `scaling_rank.measure` gives them.
        alone: Those of one rank by itself.
        tokens: That all ranks together train on in an inner step.
        timed_steps: Inner steps.
        cpus: That ranks may run on.
        link_bps: Payload that a rank's link carries each way; infinite: nothing is waited for.
    """
    wall_s = max(rank["wall_s"] for rank in ranks)
    cpu_s = sum(rank["cpu_s"] for rank in ranks)
    moved_bytes = max(rank["moved_bytes"] for rank in ranks) / timed_steps
    alone_s = alone[0]["wall_s"] / timed_steps
    ideal_s = step_s(alone_s / min(row.num_ranks, cpus), moved_bytes, link_bps)
    speed = timed_steps * tokens / wall_s
    return {
        "row": row.name,
        "num_ranks": row.num_ranks,
        "strategy": row.strategy,
        "wall_s": wall_s,
        "tokens_per_s": speed,
        "linear_per_s": tokens / alone_s * row.num_ranks,
        "ideal_per_s": tokens / ideal_s,
        "efficiency": speed * ideal_s / tokens,
        "cpu_us_per_token": 1e6 * cpu_s / timed_steps / tokens,
        "cpu_ratio": cpu_s / alone[0]["cpu_s"],
        "exposed": fmean(rank["exposed_s"] for rank in ranks) / wall_s,
        "moved_mb": moved_bytes / 1e6 if math.isfinite(link_bps) else None,
        "loss": ranks[0]["loss"],
    }


def _order(setting: ScalingSetting, rows: Sequence[ScalingRow]) -> dict[str, Any]:
    """Say what `measure_ranks` is to train."""
    by_ranks: dict[str, dict[str, str]] = {}
    for row in sorted(rows, key=lambda row: row.num_ranks):
        of_ranks = by_ranks.setdefault(str(row.num_ranks), {})
        of_ranks[row.name] = resolved_toml(row_config(setting, row))
    return {
        "rows": by_ranks,
        "warmup_steps": setting.warmup_steps,
        "timed_steps": setting.timed_steps,
    }


def _measure_emulated(
    setting: ScalingSetting,
    rows: Sequence[ScalingRow],
    order: Mapping[str, Any],
    place: Path,
    on_look: Callable[[], None],
) -> dict[str, Any]:
    """Train all rows in one emulated network, checked first."""
    nodes = [NODE.format(rank) for rank in range(max(row.num_ranks for row in rows))]
    toml = network_toml(setting.bandwidth, setting.rtt_ms / 4, nodes)  # two links between two ranks
    found, record = measure_inside("ranks", toml, __name__, order, place, on_look)
    if not found:
        raise IslandFailed(
            f"emulated links of {setting.bandwidth} are not as specified on this machine "
            f"({check_text(record['check'])}), and carry no measurement: end other work, or "
            f"leave --emulate out"
        )
    return found


def row_config(setting: ScalingSetting, row: ScalingRow) -> Config:
    """Give the run of a row: one island, and no outer loop is started.

    Raises:
        ConfigError: If the mesh does not fit the model; says the nearest that does.
    """
    mesh = {STRATEGIES[row.strategy]: row.num_ranks} if row.num_ranks > 1 else {}
    values = run_values(
        "scaling",
        setting.model,
        NO_OUTER,
        sequence_length=setting.sequence_length,
        tokens=setting.sequences * setting.sequence_length,
        island={"ranks": row.num_ranks, "mesh": mesh, "micro_batches": row.micro_batches},
    )
    return config_of(values, f"row {row.name} does not fit this bench's model")


def inside(
    order: Mapping[str, Any],
    emulated: Emulated | None,
    directory: Path,
    on_look: Callable[[int, int], None] = lambda num_ranks, done: None,
) -> dict[str, Any]:
    """Train every row, those of one number of ranks in one process group.

    Args:
        order: `warmup_steps`, `timed_steps`, and `rows`: by number of ranks, as text, the run file
            of each row by its name.
        emulated: The network that this process is in; None: ranks are joined by the loopback.
        directory: For run files and logs.
        on_look: Called often with the number of ranks that train, and how many rows are done; what
            it raises ends every process.

    Returns:
        By row, what `scaling_rank.measure` gave each rank.

    Raises:
        IslandFailed: If a rank failed; says what its log does.
    """
    found: dict[str, Any] = {}
    for ranks, rows in order["rows"].items():
        look = functools.partial(on_look, int(ranks), len(found))
        run_files = {}
        for name, toml in rows.items():
            run_files[name] = str(directory / f"{name}.toml")
            Path(run_files[name]).write_text(toml)
        steps = {key: order[key] for key in ("warmup_steps", "timed_steps")}
        with BaselineProcesses("diloco.bench.training.scaling_rank", directory, look) as members:
            for island_rank in range(int(ranks)):
                each = {
                    "island_rank": island_rank,
                    "num_ranks": int(ranks),
                    "host": "127.0.0.1",
                    "interface": "",
                    "run_files": run_files,
                    **steps,
                }
                prefix: list[str] = []
                if emulated is not None:
                    islands, node = emulated.description["islands"], NODE.format(island_rank)
                    each["host"] = islands[NODE.format(0)]["address"]
                    each["interface"] = islands[node]["interface"]
                    prefix = emulated.prefix(node) + emulated.interface(node)
                members.start(BaselineMember(ISLAND, island_rank), each, threads=1, prefix=prefix)
            said = [result for _, result in sorted(members.results().items())]
        found |= {name: [result[name] for result in said] for name in rows}
    return found
