"""How much of a long or lossy link the transport fills: emulated links, iperf3 as the limit.

Each link is made by `diloco emulate`, checked against its specification, and carries nothing else;
limit and product take turns on it. A contribution is sent as a run sends it: its lanes at once,
through the transport that the configuration would make, and it is over when the syncer's end has
acknowledged every lane. On the link itself a packet of 1500 bytes holds at most 1448 of payload.

Rows of hivemind have a table of their own and no bar: the same contributions through the product's
libp2p transport. It does not fill a fat long link: one stream has about 4 MB on its way, which is
320 Mbit/s at 100 ms (the cause was not traced).

Besides the links: the in-process shaper against its specification, and what mTLS costs.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import importlib.util
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diloco.bench.network.emulating import LinkSpec, check_text, measure_inside
from diloco.bench.network.heartbeat import (
    HEARTBEAT_COLUMNS,
    HeartbeatSetting,
    measure_heartbeats,
)
from diloco.bench.network.wan_link import IPERF3, LANES, PLAIN, receiving, sent
from diloco.report.rows import Column, Report, Requirement, Watch, matching
from diloco.security.run_ca import RunCa
from diloco.transport.contracts import Reply
from diloco.transport.shaping.link import Link, LinkQueue
from diloco.transport.shaping.shaped import ShapedTransport

_MIB = 1 << 20
_LINKS, _HIVEMIND, _BESIDES = "links", "hivemind, for comparison", "besides the links"

_COLUMNS = (
    Column("row", "row"),
    Column("link", "link"),
    Column("check", "check"),
    Column("by", "limit by"),
    Column("limit_mbps", "limit, Mbit/s", ",.1f"),
    Column("own_mbps", "ours, Mbit/s", ",.1f"),
    Column("figure", "figure", ".3f"),
    Column("note", ""),
)


@dataclass(frozen=True, slots=True)
class WanRow:
    """A measurement of a link.

    Attributes:
        name: What --rows chooses by.
        spec: The link.
        kind: Transport of the product.
        at_least: Share of the limit that is required; 0: none is.
        burst_bytes: Payload of a contribution.
        bursts: How many are timed; the median counts.
        every_s: From the begin of one to that of the next; 0: without a pause.
        warm_up: Contributions before those.
        note: What to know of the figure.
    """

    name: str
    spec: LinkSpec
    kind: str = "grpc"
    at_least: float = 0.0
    burst_bytes: int = 64 * _MIB
    bursts: int = 2
    every_s: float = 0.0
    warm_up: int = 1
    note: str = ""

    @property
    def limit_by(self) -> str:
        """Say what the limit is measured with: iperf3 does not time bursts."""
        return PLAIN if self.every_s else IPERF3

    @property
    def table(self) -> str:
        """Name the table that it belongs to."""
        return _LINKS if self.kind == "grpc" else _HIVEMIND

    @property
    def order(self) -> dict[str, Any]:
        """Give what `wan_link` is to do, as JSON values."""
        return {
            "kind": self.kind,
            "islands": self.spec.islands,
            "burst_bytes": self.burst_bytes,
            "lanes": LANES,
            "bursts": self.bursts,
            "warm_up": self.warm_up,
            "every_s": self.every_s,
        }


@dataclass(frozen=True, slots=True)
class WanSetting:
    """All measurements.

    Attributes:
        rows: Of links.
        repetitions: How often limit and product take turns; the mean counts.
        limit_s: Seconds of the limit, each time.
        shaper_off: Largest relative error of the shaper.
        shaper_bps: Its rates.
        shaper_bytes: Its chunks.
        shaper_s: Shortest ideal time of a transfer through it.
        tls_cost: Most CPU of mTLS, over that of plaintext.
        tls_bytes: What is sent for that.
        heartbeats: Of rows of heartbeats.
    """

    rows: tuple[WanRow, ...]
    repetitions: int = 2
    limit_s: float = 10.0
    shaper_off: float = 0.01
    shaper_bps: tuple[float, ...] = (10e6, 100e6, 1e9)
    shaper_bytes: tuple[int, ...] = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
    shaper_s: float = 1.0
    tls_cost: float = 1.7
    tls_bytes: int = 2048 * _MIB
    heartbeats: HeartbeatSetting = field(default_factory=HeartbeatSetting)


_THIN = LinkSpec("100Mbit/s", 60)
_FAT = LinkSpec("1Gbit/s", 100)
_LOSSY = LinkSpec("100Mbit/s", 100, loss=0.001)

#: Links and what must be reached on them.
SETTING = WanSetting(
    (
        WanRow("100M-60ms", _THIN, at_least=0.93, burst_bytes=128 * _MIB),
        WanRow("1G-100ms-warm", _FAT, at_least=0.90, burst_bytes=512 * _MIB),
        WanRow(
            "1G-100ms-bursts", _FAT, at_least=0.85,
            burst_bytes=8_000_000, bursts=6, every_s=4.0, warm_up=3,
        ),
        WanRow("100M-100ms-0.1%-bbr", replace(_LOSSY, congestion_control="bbr"), at_least=0.90,
            burst_bytes=128 * _MIB),
        # In the first burst, on one connection, the loss is counted that asks for more.
        WanRow("100M-100ms-0.1%-cubic", _LOSSY, at_least=0.60, burst_bytes=32 * _MIB, bursts=4,
            warm_up=1),
        WanRow("100M-100ms-1%-bbr", LinkSpec("100Mbit/s", 100, 0.01, "bbr"), at_least=0.80,
            burst_bytes=64 * _MIB),
        WanRow("star-4x100M-60ms", replace(_THIN, islands=4), at_least=0.90, burst_bytes=64 * _MIB),
        WanRow("hivemind-100M-60ms", _THIN, kind="hivemind"),
        WanRow("hivemind-1G-100ms", _FAT, kind="hivemind", burst_bytes=128 * _MIB,
            note="capped: about 4 MB in flight a stream"),
    )
)  # fmt: skip
SHAPER, MTLS = "shaper", "mtls-cpu"


def row_names(setting: WanSetting) -> list[str]:
    """Give every row that there is."""
    return [*(row.name for row in setting.rows), *setting.heartbeats.rows, SHAPER, MTLS]


def run(watch: Watch, rows: Sequence[str] = (), *, setting: WanSetting = SETTING) -> Report:
    """Measure all rows whose names match.

    Raises:
        ConfigError: If a pattern matches no row, or networks cannot be emulated here.
        IslandFailed: If a measurement failed.
    """
    wanted = matching(row_names(setting), rows)
    results: list[dict[str, Any]] = []
    requirements: list[Requirement] = []
    by_link: dict[LinkSpec, list[WanRow]] = {}
    for row in setting.rows:
        if row.name in wanted:
            by_link.setdefault(row.spec, []).append(row)
    for spec, of_link in by_link.items():
        look = functools.partial(watch, spec.text, len(results), len(wanted))
        for row, measured in zip(of_link, _measure(spec, of_link, setting, look), strict=True):
            results.append(measured)
            if row.at_least:
                requirements.append(_requirement(row, measured))
    for name in setting.heartbeats.rows:
        if name in wanted:
            look = functools.partial(watch, name, len(results), len(wanted))
            measured, bars = measure_heartbeats(setting.heartbeats, name, look)
            results.append(measured)
            requirements += bars
    tries = setting.repetitions + 1
    besides: dict[str, tuple[Callable[[], dict[str, Any]], str, float]] = {
        SHAPER: (
            lambda: measure_shaper(
                setting.shaper_bps, setting.shaper_bytes, shortest_s=setting.shaper_s, tries=tries
            ),
            "off its ideal time",
            setting.shaper_off,
        ),
        MTLS: (
            lambda: measure_mtls(setting.tls_bytes, tries=tries),
            "CPU over that of plaintext",
            setting.tls_cost,
        ),
    }
    for name, (measure, what, limit) in besides.items():
        if name in wanted:
            watch(name, len(results), len(wanted))
            results.append({"table": _BESIDES, "row": name, **measure()})
            requirements.append(Requirement(f"{name}: {what}", results[-1]["figure"], limit, "x"))
    described = {"lanes": LANES, "repetitions": setting.repetitions, "limit_s": setting.limit_s}
    return Report("wan", described, (*_COLUMNS, *HEARTBEAT_COLUMNS), results, requirements)


def _requirement(row: WanRow, measured: Mapping[str, Any]) -> Requirement:
    """Judge a link's row; one without a figure, which says why, misses its bar."""
    what, figure = f"{row.name}: payload over {row.limit_by}", measured["figure"]
    if figure is None:
        what, figure = f"{what} ({measured['note']})", float("nan")
    return Requirement(what, figure, row.at_least, "x", is_at_least=True)


def _measure(
    spec: LinkSpec, rows: Sequence[WanRow], setting: WanSetting, on_look: Callable[[], None]
) -> list[dict[str, Any]]:
    """Make a link, check it, measure its rows on it."""
    able = [row for row in rows if row.kind == "grpc" or _has_hivemind()]
    with tempfile.TemporaryDirectory(prefix="diloco-bench-wan-") as directory:
        place = Path(directory)
        found: dict[str, Any] = {}
        record: dict[str, Any] = {"check": None}
        if able:
            found, record = _emulate(spec, able, setting, place, on_look)
    measured = []
    for row in rows:
        shown = {
            "table": row.table,
            "row": row.name,
            "link": spec.text,
            "check": check_text(record["check"]),
            "by": None,
            "limit_mbps": None,
            "own_mbps": None,
            "figure": None,
            "note": "the link is not as specified"
            if row in able
            else "hivemind is not installed: pip install diloco[hivemind]",
        }
        if row.name in found:
            shown |= _judged(row, found[row.name])
        extra = {"payload_bytes": row.burst_bytes, "every_s": row.every_s, "kind": row.kind}
        measured.append({**shown, **extra, "emulation": record, "measured": found.get(row.name)})
    return measured


def _judged(row: WanRow, found: dict[str, Any]) -> dict[str, Any]:
    """Compare by island, each with its own limit; the worst one is shown.

    Without a limit nothing is judged, and the slowest island is shown.
    """
    own = {island: sum(each) / len(each) for island, each in found["own_bps"].items()}
    if not found["limit_bps"]:
        slowest = min(own.values()) / 1e6
        return {"own_mbps": slowest, "note": f"{IPERF3}: not installed (apt install iperf3)"}
    limits = {island: sum(each) / len(each) for island, each in found["limit_bps"].items()}
    worst = min(own, key=lambda island: own[island] / limits[island])
    note = f"{row.burst_bytes / 1e6:g} MB every {row.every_s:g} s" if row.every_s else row.note
    return {
        "by": row.limit_by,
        "limit_mbps": limits[worst] / 1e6,
        "own_mbps": own[worst] / 1e6,
        "figure": own[worst] / limits[worst],
        "note": "the worst of its islands" if len(own) > 1 else note,
    }


def _emulate(
    spec: LinkSpec,
    rows: Sequence[WanRow],
    setting: WanSetting,
    place: Path,
    on_look: Callable[[], None],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run `wan_link` in an emulated network; returns what it found, and the emulation's record.

    A link that is not as specified carries no measurement: what was found is empty then.
    """
    common = {"repetitions": setting.repetitions, "limit_s": setting.limit_s}
    orders = {row.name: {**row.order, **common} for row in rows}
    module = "diloco.bench.network.wan_link"
    return measure_inside(spec.text, spec.toml, module, orders, place, on_look)


def _has_hivemind() -> bool:
    return importlib.util.find_spec("hivemind") is not None


# -- besides the links ---------------------------------------------------------------------------

#: In which the bytes of a measurement of CPU time are sent.
_BURSTS = 8


def measure_shaper(
    rates_bps: Sequence[float], chunks_bytes: Sequence[int], *, shortest_s: float, tries: int
) -> dict[str, Any]:
    """Time transfers through the shaper, as many calls in progress as lanes.

    Args:
        rates_bps: Of the shaper.
        chunks_bytes: Of a call.
        shortest_s: Ideal time of a transfer, at least.
        tries: Transfers of each kind, of which the best counts.

    Returns:
        `figure`: the worst relative error of a transfer's time, which `note` names; `measured`:
        all.
    """
    found = {
        f"{size >> 10:,d} KiB at {rate / 1e6:,.0f} Mbit/s": _shaper_off(
            rate, size, shortest_s, tries
        )
        for rate in rates_bps
        for size in chunks_bytes
    }
    worst = max(found, key=lambda name: found[name])
    return {"figure": found[worst], "note": f"worst: {worst}", "measured": found}


def _shaper_off(rate_bps: float, chunk_bytes: int, shortest_s: float, tries: int) -> float:
    """Relative error of a transfer's time; the least counts, as other load only adds to it."""
    count = max(1, round(rate_bps * shortest_s / 8 / chunk_bytes))
    ideal_s = 8 * count * chunk_bytes / rate_bps
    link = Link(rate_bps, 0.0)
    took_s = (asyncio.run(_shaped_s(link, chunk_bytes, count)) for _ in range(tries))
    return abs(min(took_s) / ideal_s - 1)


class _Sink:
    """The far end of a shaped transport: takes everything, at once."""

    peer = "sink"

    async def call(self, method: str, header: bytes, payload: Any = b"", **_: Any) -> Reply:
        return Reply(b"")

    async def close(self) -> None:
        pass


async def _shaped_s(link: Link, chunk_bytes: int, count: int) -> float:
    shaped = ShapedTransport(_Sink(), LinkQueue(link, seed=1), LinkQueue(Link(1e15, 0.0), seed=2))
    chunk, left = bytes(chunk_bytes), iter(range(count))

    async def send() -> None:
        for _ in left:
            await shaped.call("bench.submit", b"", chunk, deadline_s=600.0)

    began = time.monotonic()
    await asyncio.gather(*(send() for _ in range(LANES)))
    took_s = time.monotonic() - began
    await shaped.close()
    return took_s


def measure_mtls(num_bytes: int, *, tries: int) -> dict[str, Any]:
    """Compare the CPU time of two processes, on loopback, with mTLS and without.

    Args:
        num_bytes: Sent in one try, in as many lanes at once as a fragment has.
        tries: Of each, taking turns; the least CPU time counts.

    Returns:
        `figure`: that of mTLS over that of plaintext, which `note` says a GB; `measured`: all.
    """
    with tempfile.TemporaryDirectory(prefix="diloco-bench-wan-") as directory:
        certs = Path(directory) / "certs"
        ca = RunCa(certs, lambda: datetime.datetime.now(datetime.UTC))
        ca.create("bench", 400)
        for short in ("coordinator", "island/bench"):
            ca.issue(short, 365, again=False)
        found: dict[str, list[tuple[float, float]]] = {"plaintext": [], "mtls": []}
        for _ in range(tries):
            for name, chosen in (("plaintext", ""), ("mtls", str(certs))):
                found[name].append(_cpu_s(num_bytes, Path(directory), chosen))
    # Of each of the two runs the least, and then the difference: load adds to either.
    least = {
        name: min(long for _, long in used) - min(short for short, _ in used)
        for name, used in found.items()
    }
    gb = num_bytes / 1e9
    note = f"CPU s/GB: {least['plaintext'] / gb:.2f} plaintext, {least['mtls'] / gb:.2f} mTLS"
    return {"figure": least["mtls"] / least["plaintext"], "note": note, "measured": found}


def _cpu_s(num_bytes: int, directory: Path, certs: str) -> tuple[float, float]:
    """CPU seconds of both ends for one burst, and for that and the bytes in `_BURSTS` more.

    Starting and connecting is in both.
    """
    used = []
    for bursts in (1, 1 + _BURSTS):
        with receiving("grpc", "127.0.0.1", directory, certs=certs) as address:
            order = {"kind": "grpc", "address": address, "certs": certs, "parts": LANES}
            order |= {"part_bytes": num_bytes // LANES // _BURSTS, "bursts": bursts, "every_s": 0}
            found = sent((), order)
        used.append(found["cpu_s"] + found["receiver_cpu_s"])
    return used[0], used[1]
