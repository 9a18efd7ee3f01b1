"""How an island's speed grows with its ranks, by strategy: the same batch on more of them.

Ranks are processes of one thread on this machine, joined by gloo. Where there are more ranks than
CPUs they share them, so the ideal is N ranks, or as many CPUs as there are, times one rank's speed;
CPU time a token says what a strategy costs without that bound, whatever else the machine does.

Source: strong scaling; the strategies are those of `diloco.config.mesh`.
"""

from __future__ import annotations

import fnmatch
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from diloco.baseline.place import Member
from diloco.bench.report import Column, Report, usable_cpus
from diloco.bench.scaling_rank import ISLAND, run_delay_s
from diloco.config.load import config_of, resolved_toml
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.launch.members import Members

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
    Column("ideal_per_s", "ideal", ",.0f"),
    Column("efficiency", "efficiency", ".3f"),
    Column("cpu_us_per_token", "CPU, us", ",.1f"),
    Column("cpu_ratio", "over one", ".3f"),
    Column("exposed", "exposed", ".3f"),
    Column("loss", "loss", ".4f"),
)


@dataclass(frozen=True, slots=True)
class Row:
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
class Setting:
    """What is trained: a Llama of 3.3M parameters on bytes."""

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


SETTING = Setting()


def chosen_rows(setting: Setting, ranks: Sequence[int], patterns: Sequence[str]) -> tuple[Row, ...]:
    """Give the rows of some numbers of ranks that match any of `patterns`, and one rank.

    Args:
        setting: Of the bench.
        ranks: Numbers of ranks.
        patterns: Names with `*` and `?`; none of them: all rows.

    Raises:
        ConfigError: If a pattern matches no row, or a mesh does not fit the model.
    """
    rows = [
        Row(strategy, num_ranks)
        for num_ranks in sorted(set(ranks) - {1})
        for strategy in STRATEGIES
    ]
    names = [row.name for row in rows]
    for pattern in patterns:
        if not fnmatch.filter([_ONE, *names], pattern):
            listed = ", ".join([_ONE, *names])
            raise ConfigError(f"--rows {pattern} matches no row; rows are {listed}")
    wanted = {name for pattern in patterns or ["*"] for name in fnmatch.filter(names, pattern)}
    chosen = (Row("", 1), *(row for row in rows if row.name in wanted))
    for row in chosen:
        row_config(setting, row)
    return chosen


def run_scaling(
    setting: Setting,
    rows: Sequence[Row],
    *,
    on_progress: Callable[[str, int, int], None],
    on_look: Callable[[], None] = lambda: None,
) -> Report:
    """Train every row and hold it against one rank.

    Args:
        setting: What is trained.
        rows: Of `chosen_rows`.
        on_progress: Hears which ranks begin, and of rows done and in all.
        on_look: Called often; what it raises ends every process.

    Raises:
        ConfigError: If the kernel does not tell how long threads wait for a CPU.
        IslandFailed: If a rank failed; says what its log does.
    """
    began = time.monotonic()
    run_delay_s()
    found: dict[Row, list[dict[str, float]]] = {}
    for num_ranks in sorted({row.num_ranks for row in rows}):
        of_ranks = [row for row in rows if row.num_ranks == num_ranks]
        on_progress(f"{num_ranks} ranks", len(found), len(rows))
        found |= _measure(setting, of_ranks, on_look)
    alone = found[rows[0]]
    cpus = usable_cpus()
    tokens = setting.timed_steps * setting.sequences * setting.sequence_length
    return Report(
        "scaling",
        {**asdict(setting), "usable_cpus": cpus},
        _COLUMNS,
        [row_figures(row, found[row], alone, tokens=tokens, cpus=cpus) for row in rows],
        [],
        time.monotonic() - began,
    )


def row_figures(
    row: Row,
    ranks: Sequence[Mapping[str, float]],
    alone: Sequence[Mapping[str, float]],
    *,
    tokens: int,
    cpus: int,
) -> dict[str, Any]:
    """Compute a row of the table.

    ideal = tokens/s of one rank x min(ranks, CPUs); efficiency = tokens/s over it; exposed = mean
    over the ranks of their exposed seconds over the wall time.

    Args:
        row: Which.
        ranks: Seconds of each rank, as `scaling_rank.measure` gives them.
        alone: Those of one rank by itself.
        tokens: That all ranks together trained on.
        cpus: That ranks may run on.
    """
    wall_s = max(rank["wall_s"] for rank in ranks)
    cpu_s = sum(rank["cpu_s"] for rank in ranks)
    ideal = tokens / alone[0]["wall_s"] * min(row.num_ranks, cpus)
    return {
        "row": row.name,
        "num_ranks": row.num_ranks,
        "strategy": row.strategy,
        "wall_s": wall_s,
        "tokens_per_s": tokens / wall_s,
        "ideal_per_s": ideal,
        "efficiency": tokens / wall_s / ideal,
        "cpu_us_per_token": 1e6 * cpu_s / tokens,
        "cpu_ratio": cpu_s / alone[0]["cpu_s"],
        "exposed": fmean(rank["exposed_s"] for rank in ranks) / wall_s,
        "loss": ranks[0]["loss"],
    }


def _measure(
    setting: Setting, rows: Sequence[Row], on_look: Callable[[], None]
) -> dict[Row, list[dict[str, float]]]:
    """Train rows of one number of ranks in one process group."""
    num_ranks = rows[0].num_ranks
    with tempfile.TemporaryDirectory(prefix="diloco-bench-scaling-") as directory:
        place = Path(directory)
        run_files = {}
        for row in rows:
            path = place / f"{row.name}.toml"
            path.write_text(resolved_toml(row_config(setting, row)))
            run_files[row.name] = str(path)
        order = {
            "num_ranks": num_ranks,
            "run_files": run_files,
            "warmup_steps": setting.warmup_steps,
            "timed_steps": setting.timed_steps,
        }
        with Members("diloco.bench.scaling_rank", place, on_look) as members:
            for island_rank in range(num_ranks):
                each = {**order, "island_rank": island_rank}
                members.start(Member(ISLAND, island_rank), each, threads=1)
            results = members.results()
    said = [result for _, result in sorted(results.items())]
    return {row: [result[row.name] for result in said] for row in rows}


def row_config(setting: Setting, row: Row) -> Config:
    """Give the run of a row: one island, and no outer loop is started.

    Raises:
        ConfigError: If the mesh does not fit the model; says the nearest that does.
    """
    mesh = {STRATEGIES[row.strategy]: row.num_ranks} if row.num_ranks > 1 else {}
    values = {
        "run": {"name": "scaling", "seed": 1, "inner_steps": 1000},
        "model": dict(setting.model),
        "data": {"sequence_length": setting.sequence_length},
        "inner": {"optimizer": {"lr": 1e-3, "schedule": "constant"}},
        "outer": {"preset": "classic", "inner_steps_per_round": 1},
        "coordinator": {"state_dir": "unused"},
        "evaluation": {"num_sequences": 1},
        "islands": {
            ISLAND: {
                "ranks": row.num_ranks,
                "mesh": mesh,
                "micro_batches": row.micro_batches,
                "tokens_per_inner_step": setting.sequences * setting.sequence_length,
            }
        },
    }
    return config_of(values, f"row {row.name} does not fit this bench's model")
