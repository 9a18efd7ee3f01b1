"""Flat ring against hierarchical all-reduce on the same links, beside the time that they must take.

Two islands of two ranks, a process each, sum 64 MiB of float32 again and again: through one ring of
all four, or inside the islands first, in chunks of several sizes; one chunk for the whole vector is
what nothing overlaps in. The ideal is `diloco.baseline.time_model`: of the link as it is told, and
of the inside phases as they are measured by themselves on this machine.

Links are shaped in the process, or emulated (network namespaces); there TCP's payload is at most
1448 of 1500 bytes, and the ideal is of that.

As the hierarchical all-reduce of NeMo 25.02 / Megatron-Core 0.11 (NVIDIA, long-haul training).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.baseline.time_model import Reduction, tcp_bps
from diloco.bench.network.allreduce_link import RANKS, measure_link
from diloco.bench.network.emulating import check_text, measure_inside
from diloco.bench.network.link_row import ISLANDS, LinkRow
from diloco.errors import ConfigError
from diloco.report.rows import Column, Report, Requirement
from diloco.transport.units import parse_bandwidth

_MIB = 1 << 20
_FLAT, _HIERARCHICAL = "flat", "hierarchical"

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
class Setting:
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


SETTING = Setting(
    (
        LinkRow("100M-60ms", "100Mbit/s", 60, is_judged=True),
        LinkRow("1G-20ms", "1Gbit/s", 20),
        LinkRow("1G-1ms", "1Gbit/s", 1),
    )
)


def run_allreduce(
    setting: Setting,
    names: Sequence[str],
    *,
    is_emulated: bool,
    on_progress: Callable[[str, int, int], None],
    on_look: Callable[[], None] = lambda: None,
) -> Report:
    """Measure.

    Args:
        setting: What.
        names: Links; none: all.
        is_emulated: Whether links are made of network namespaces, which needs root.
        on_progress: Hears what is measured next, and of links done and in all.
        on_look: Called often; what it raises ends every process.

    Raises:
        ConfigError: If a name is of no link, or networks cannot be emulated here.
        IslandFailed: If a measurement failed.
    """
    began = time.monotonic()
    known = {link.name: link for link in setting.links}
    if unknown := sorted(set(names) - known.keys()):
        raise ConfigError(f"--rows {unknown[0]} is no link; links are {', '.join(known)}")
    links = [known[name] for name in known if not names or name in names]
    rows: list[dict[str, Any]] = []
    requirements: list[Requirement] = []
    for number, link in enumerate(links):
        on_progress(link.name, number, len(links))
        found, check = _measure(setting, link, is_emulated, on_look)
        of_link = _rows(setting, link, found, is_emulated=is_emulated)
        rows += [{**row, "check": check} for row in of_link]
        requirements += _requirements(setting, link, of_link)
    described = {
        "num_bytes": setting.num_bytes,
        "islands": len(ISLANDS),
        "ranks": RANKS,
        "streams": setting.streams,
        "repetitions": setting.repetitions,
        "links": "emulated" if is_emulated else "shaped in the process",
    }
    seconds = time.monotonic() - began
    return Report("allreduce", described, _COLUMNS, rows, requirements, seconds)


def _measure(
    setting: Setting, link: LinkRow, is_emulated: bool, on_look: Callable[[], None]
) -> tuple[dict[str, Any], str]:
    """Measure all kinds on one link; empty where the link is not as told, which is the text."""
    order = {
        "num_bytes": setting.num_bytes,
        "chunks_bytes": list(setting.chunks_bytes),
        "streams": setting.streams,
        "repetitions": setting.repetitions,
    }
    with tempfile.TemporaryDirectory(prefix="diloco-bench-allreduce-") as directory:
        place = Path(directory)
        if is_emulated:
            module = "diloco.bench.network.allreduce_link"
            found, record = measure_inside(link.name, link.toml, module, order, place, on_look)
            return found, check_text(record["check"])
        order["link"] = {
            "bandwidth_bps": parse_bandwidth(link.bandwidth),
            "delay_s": link.rtt_ms / 2e3,
        }
        return measure_link(order, None, place, on_look), "-"


def _rows(
    setting: Setting, link: LinkRow, found: Mapping[str, Any], *, is_emulated: bool
) -> list[dict[str, Any]]:
    """Hold what was found against the ideal; nothing was found on a link that is not as told."""
    bandwidth_bps, rtt_s = parse_bandwidth(link.bandwidth), link.rtt_ms / 1e3
    wan_bps = tcp_bps(bandwidth_bps, rtt_s=rtt_s) if is_emulated else bandwidth_bps
    rows = []
    for kind, chunk_bytes in [(_FLAT, setting.chunks_bytes[0])] + [
        (_HIERARCHICAL, size) for size in setting.chunks_bytes
    ]:
        row: dict[str, Any] = {"link": link.name, "kind": kind, "chunk_mib": chunk_bytes / _MIB}
        row |= dict.fromkeys(("inside_s", "ideal_s", "took_s", "ratio"))
        if not found:
            rows.append({**row, "note": "the link is not as told"})
            continue
        inside_s = min(found[_HIERARCHICAL]["inside_s"][str(chunk_bytes)])
        ideal = Reduction(
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
    setting: Setting, link: LinkRow, rows: Sequence[Mapping[str, Any]]
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
