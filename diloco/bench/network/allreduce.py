"""Flat ring against hierarchical all-reduce on the same links, and the time that they must take.

Two islands of two ranks, a process each, sum 64 MiB of float32 again and again: through one ring of
all four, or inside the islands first, in chunks of several sizes; one chunk for the whole vector is
what nothing overlaps in. The ideal is `diloco.baseline.time_model`: of the link as it is specified,
and of the inside phases as they are measured by themselves on this machine.

Links are shaped in the process, or emulated (network namespaces); there TCP's payload is at most
1448 of 1500 bytes, and the ideal is of that.

As the hierarchical all-reduce of NeMo 25.02 / Megatron-Core 0.11 (NVIDIA, long-haul training).
"""

from __future__ import annotations

import functools
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.baseline.group import BaselineMember
from diloco.baseline.members import BaselineProcesses
from diloco.baseline.time_model import ReductionTime, tcp_bps
from diloco.bench.network.emulating import ISLANDS, LinkRow, check_text, measure_inside
from diloco.launch.process.emulated import Emulated
from diloco.report.rows import Column, Report, Requirement, Watch, matching
from diloco.transport.units import parse_bandwidth

_MIB = 1 << 20
_FLAT, _HIERARCHICAL = "flat", "hierarchical"
RANKS = 2
_PATIENCE_S = 60.0

_COLUMNS = (
    Column("link", "link"),
    Column("check", "check"),
    Column("kind", "all-reduce"),
    Column("chunk_mib", "chunk, MiB", ",g"),
    Column("inside_s", "inside alone, s", ".3f"),
    Column("ideal_s", "ideal, s", ".3f"),
    Column("took_s", "took, s", ".3f"),
    Column("ratio", "ideal / took", ".3f"),
    Column("note", ""),
)


@dataclass(frozen=True, slots=True)
class AllReduceSetting:
    """All measurements.

    Attributes:
        links: On which; the share of the ideal has a bar on judged ones, that hierarchical is not
            slower than flat is asked everywhere.
        num_bytes: Of the vector of each rank, float32.
        chunks_bytes: Sizes of chunks of the hierarchical all-reduce; the first one is judged, and
            is that of the flat ring, too.
        streams: Parts under way to one member at once.
        repetitions: Timed ones, after one that warms up; the fastest counts, as other load only
            adds to it.
        at_least: Smallest share of the ideal.
    """

    links: tuple[LinkRow, ...]
    num_bytes: int = 64 * _MIB
    chunks_bytes: tuple[int, ...] = (4 * _MIB, 1 * _MIB, 16 * _MIB, 64 * _MIB)
    streams: int = 8
    repetitions: int = 3
    at_least: float = 0.9


SETTING = AllReduceSetting(
    (
        LinkRow("100M-60ms", "100Mbit/s", 60, is_judged=True),
        LinkRow("1G-20ms", "1Gbit/s", 20),
        LinkRow("1G-1ms", "1Gbit/s", 1),
    )
)


def run(
    watch: Watch,
    rows: Sequence[str] = (),
    *,
    emulate: bool = False,
    setting: AllReduceSetting = SETTING,
) -> Report:
    """Measure on every link whose name matches.

    Args:
        watch: See `Watch`.
        rows: Patterns of names of links; none: all.
        emulate: Whether links are made of network namespaces, which needs root.
        setting: What.

    Raises:
        ConfigError: If a pattern matches no link, or networks cannot be emulated here.
        IslandFailed: If a measurement failed.
    """
    wanted = matching([link.name for link in setting.links], rows, what="link")
    links = [link for link in setting.links if link.name in wanted]
    results: list[dict[str, Any]] = []
    requirements: list[Requirement] = []
    for number, link in enumerate(links):
        look = functools.partial(watch, link.name, number, len(links))
        found, check = _measure(setting, link, emulate, look)
        of_link = _rows(setting, link, found, is_emulated=emulate)
        results += [{**row, "check": check} for row in of_link]
        requirements += _requirements(setting, link, of_link)
    described = {
        "num_bytes": setting.num_bytes,
        "islands": len(ISLANDS),
        "ranks": RANKS,
        "streams": setting.streams,
        "repetitions": setting.repetitions,
        "links": "emulated" if emulate else "shaped in the process",
    }
    return Report("allreduce", described, _COLUMNS, results, requirements)


def _measure(
    setting: AllReduceSetting, link: LinkRow, is_emulated: bool, on_look: Callable[[], None]
) -> tuple[dict[str, Any], str]:
    """Measure all kinds on one link; empty where the link is not as specified: the text says so."""
    order = {
        "num_bytes": setting.num_bytes,
        "chunks_bytes": list(setting.chunks_bytes),
        "streams": setting.streams,
        "repetitions": setting.repetitions,
    }
    with tempfile.TemporaryDirectory(prefix="diloco-bench-allreduce-") as directory:
        place = Path(directory)
        if is_emulated:
            found, record = measure_inside(link.name, link.toml, __name__, order, place, on_look)
            return found, check_text(record["check"])
        order["link"] = {
            "bandwidth_bps": parse_bandwidth(link.bandwidth),
            "delay_s": link.rtt_ms / 2e3,
        }
        return inside(order, None, place, on_look), "-"


def _rows(
    setting: AllReduceSetting, link: LinkRow, found: Mapping[str, Any], *, is_emulated: bool
) -> list[dict[str, Any]]:
    """Hold what was found against the ideal; on a link that is not as specified, nothing."""
    bandwidth_bps, rtt_s = parse_bandwidth(link.bandwidth), link.rtt_ms / 1e3
    wan_bps = tcp_bps(bandwidth_bps, rtt_s=rtt_s) if is_emulated else bandwidth_bps
    rows = []
    for kind, chunk_bytes in [(_FLAT, setting.chunks_bytes[0])] + [
        (_HIERARCHICAL, size) for size in setting.chunks_bytes
    ]:
        row: dict[str, Any] = {"link": link.name, "kind": kind, "chunk_mib": chunk_bytes / _MIB}
        row |= dict.fromkeys(("inside_s", "ideal_s", "took_s", "ratio"))
        if not found:
            rows.append({**row, "note": "the link is not as specified"})
            continue
        inside_s = min(found[_HIERARCHICAL]["inside_s"][str(chunk_bytes)])
        ideal = ReductionTime(
            num_islands=len(ISLANDS),
            num_ranks=RANKS,
            num_bytes=setting.num_bytes,
            wan_bps=wan_bps,
            rtt_s=rtt_s,
            inside_bps=2 * (RANKS - 1) / RANKS * 8 * setting.num_bytes / inside_s,
            num_chunks=-(-setting.num_bytes // chunk_bytes),
        )
        took_s = min(found[kind]["took_s"][str(chunk_bytes)])
        ideal_s = ideal.flat_s if kind == _FLAT else ideal.hierarchical_s
        note = "" if kind == _FLAT or ideal.num_chunks > 1 else "nothing overlaps"
        row |= {"inside_s": inside_s, "ideal_s": ideal_s, "took_s": took_s, "note": note}
        rows.append(
            {**row, "ratio": ideal_s / took_s, "all_s": found[kind]["took_s"][str(chunk_bytes)]}
        )
    return rows


def _requirements(
    setting: AllReduceSetting, link: LinkRow, rows: Sequence[Mapping[str, Any]]
) -> list[Requirement]:
    flat, own = rows[0], rows[1]
    share = float("nan") if own["ratio"] is None else own["ratio"]
    gain = float("nan") if own["took_s"] is None else flat["took_s"] / own["took_s"]
    return [
        Requirement(
            f"{link.name}: ideal over hierarchical",
            share,
            setting.at_least,
            "x",
            is_at_least=True,
            is_stretch=not link.is_judged,
        ),
        Requirement(f"{link.name}: flat over hierarchical", gain, 1.0, "x", is_at_least=True),
    ]


def inside(
    order: Mapping[str, Any],
    emulated: Emulated | None,
    directory: Path,
    on_look: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
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
    found: dict[str, Any] = {}
    for kind in ("flat", "hierarchical"):
        chunks = order["chunks_bytes"][:1] if kind == "flat" else order["chunks_bytes"]
        with BaselineProcesses(
            "diloco.bench.network.allreduce_rank", directory, on_look
        ) as members:
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
