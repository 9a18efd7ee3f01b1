"""The measurements of one link of `diloco bench allreduce`, also made inside an emulated network.

diloco emulate LINK.toml --check -- python -m diloco.bench.network.allreduce_link ORDER DESCRIPTION
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diloco.baseline.group import BaselineMember
from diloco.baseline.members import Members
from diloco.bench.network.link_row import ISLANDS
from diloco.launch.process.emulated import Emulated

RANKS = 2
_PATIENCE_S = 60.0

Message = dict[str, Any]  # JSON values


def measure_link(
    order: Mapping[str, Any],
    emulated: Emulated | None,
    directory: Path,
    on_look: Callable[[], None],
) -> Message:
    """Time all-reduces of both kinds on one link.

    Args:
        order: `num_bytes`, `chunks_bytes`, `streams`, `repetitions`, and `link` (`bandwidth_bps`,
            `delay_s`) where the process shapes.
        emulated: The network that this process is in; None: the machine's own.
        directory: For logs.
        on_look: Called often; what it raises ends every process.

    Returns:
        By kind, `took_s` and `inside_s` by chunk size: seconds of every repetition.
    """
    found: Message = {}
    for kind in ("flat", "hierarchical"):
        chunks = order["chunks_bytes"][:1] if kind == "flat" else order["chunks_bytes"]
        with Members("diloco.bench.network.allreduce_rank", directory, on_look) as members:
            start = secrets.token_hex(8)
            for island in ISLANDS:
                host = emulated.description["islands"][island]["address"] if emulated else ""
                for island_rank in range(RANKS):
                    site = {
                        "start": start,
                        "island": island,
                        "island_rank": island_rank,
                        "islands": dict.fromkeys(ISLANDS, RANKS),
                        "is_flat": kind == "flat",
                        "codec": "float32",
                        "chunks_bytes": chunks,
                        "streams": order["streams"],
                        "bind": f"{host or '127.0.0.1'}:0",
                        "patience_s": _PATIENCE_S,
                        "most_bytes": order["num_bytes"],
                    }
                    each = {"site": site, "repetitions": order["repetitions"]}
                    each |= {"link": order.get("link")}
                    prefix = emulated.prefix(island) if emulated else ()
                    members.start(
                        BaselineMember(island, island_rank), each, threads=1, prefix=prefix
                    )
            results = list(members.results().values())
        found[kind] = {
            key: {size: _spans([result[key][size] for result in results]) for size in sizes}
            for key, sizes in results[0].items()
        }
    return found


def _spans(of_members: list[list[tuple[float, float]]]) -> list[float]:
    """From when the first member began a repetition until the last one had its sum."""
    return [
        max(end for _, end in spans) - min(begin for begin, _ in spans)
        for spans in zip(*of_members, strict=True)
    ]


def main(order_path: Path, description_path: Path) -> None:
    """Measure, and write found.json beside the order."""
    emulated = Emulated(json.loads(description_path.read_text()))
    order = json.loads(order_path.read_text())
    found = measure_link(order, emulated, order_path.parent, lambda: None)
    (order_path.parent / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
