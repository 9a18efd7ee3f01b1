"""The ranks of `diloco bench scaling`, on this machine or each in a namespace of its own.

diloco emulate LINKS.toml --check -- python -m diloco.bench.training.scaling_link ORDER DESCRIPTION
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diloco.baseline.group import BaselineMember
from diloco.baseline.members import Members
from diloco.bench.training.scaling_rank import ISLAND
from diloco.launch.process.emulated import Emulated

#: The namespace of a rank.
NODE = "rank-{}"

Message = dict[str, Any]  # JSON values


def measure_ranks(
    order: Mapping[str, Any],
    emulated: Emulated | None,
    directory: Path,
    *,
    on_ranks: Callable[[int, int], None] = lambda num_ranks, done: None,
    on_look: Callable[[], None] = lambda: None,
) -> Message:
    """Train every row, those of one number of ranks in one process group.

    Args:
        order: `warmup_steps`, `timed_steps`, and `rows`: by number of ranks, as text, the run file
            of each row by its name.
        emulated: The network that this process is in; None: ranks are joined by the loopback.
        directory: For run files and logs.
        on_ranks: Hears which number of ranks begins, and how many rows are done.
        on_look: Called often; what it raises ends every process.

    Returns:
        By row, what `scaling_rank.measure` gave each rank.

    Raises:
        IslandFailed: If a rank failed; says what its log does.
    """
    found: Message = {}
    for ranks, rows in order["rows"].items():
        on_ranks(int(ranks), len(found))
        run_files = {}
        for name, toml in rows.items():
            run_files[name] = str(directory / f"{name}.toml")
            Path(run_files[name]).write_text(toml)
        steps = {key: order[key] for key in ("warmup_steps", "timed_steps")}
        with Members("diloco.bench.training.scaling_rank", directory, on_look) as members:
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


def main(order_path: Path, description_path: Path) -> None:
    """Measure in this process's network, and write found.json beside the order."""
    emulated = Emulated(json.loads(description_path.read_text()))
    found = measure_ranks(json.loads(order_path.read_text()), emulated, order_path.parent)
    (order_path.parent / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
