"""How much of a long or lossy link the transport fills: emulated links, iperf3 as the limit.

Each link is made by `diloco emulate`, checked against its specification, and carries nothing else;
limit and product take turns on it. A contribution is sent as a run sends it: its lanes at once,
through the transport that the configuration would make, and it is over when the syncer's end has
acknowledged every lane. On the link itself a packet of 1500 bytes holds at most 1448 of payload.

Beside the links: the in-process shaper against its specification, and what mTLS costs.

Source: measured.md B4.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import fnmatch
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diloco.bench.report import Column, Report, Requirement
from diloco.bench.wan_link import receiving, sent
from diloco.errors import ConfigError, IslandFailed
from diloco.launch.run_ca import RunCa
from transport.contracts import Reply
from transport.link import Link, LinkState
from transport.shaped import ShapedTransport

_MIB = 1 << 20
#: Lanes of a fragment as the configuration has them.
_LANES = 16
_MISSED_CHECK = 1
_LAST_WORDS = 2000
_LOOK_S = 0.1

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
class LinkSpec:
    """A link of every island of a star, the same both ways.

    Attributes:
        bandwidth: As a file of an emulated network has it.
        rtt_ms: Round trip.
        loss: Share of the packets that are lost, each way.
        congestion_control: Of every route.
        islands: How many send at once.
    """

    bandwidth: str
    rtt_ms: float
    loss: float = 0.0
    congestion_control: str = "cubic"
    islands: int = 1

    @property
    def text(self) -> str:
        """Say it in some words."""
        parts = [self.bandwidth, f"{self.rtt_ms:g} ms"]
        parts += [f"{self.loss:.1%} loss"] if self.loss else []
        parts += [self.congestion_control]
        parts += [f"{self.islands} islands"] if self.islands > 1 else []
        return ", ".join(parts)

    @property
    def toml(self) -> str:
        """Write the file of the emulated network: long fat paths need buffers and no idle start."""
        way = f'{{ bandwidth = "{self.bandwidth}", delay = "{self.rtt_ms / 2:g}ms", '
        way += f"loss = {self.loss} }}"
        sites = "".join(f'[islands.site-{n}]\nlink = "measured"\n' for n in range(self.islands))
        return (
            f'topology = "star"\n[tcp]\ncongestion_control = "{self.congestion_control}"\n'
            f'max_buffer = "64MiB"\nslow_start_after_idle = false\n'
            f'[links.measured]\nsource = "diloco bench wan"\nup = {way}\ndown = {way}\n{sites}'
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement of a link.

    Attributes:
        name: What --rows chooses by.
        spec: The link.
        kind: Transport of the product, or averager: hivemind's own, for comparison.
        at_least: Share of the limit that is required; 0: none is.
        burst_bytes: Payload of a contribution.
        bursts: How many are timed; the median counts.
        every_s: From the begin of one to that of the next; 0: without a pause.
        warm_up: Contributions before those.
    """

    name: str
    spec: LinkSpec
    kind: str = "grpc"
    at_least: float = 0.0
    burst_bytes: int = 64 * _MIB
    bursts: int = 2
    every_s: float = 0.0
    warm_up: int = 1

    @property
    def order(self) -> dict[str, Any]:
        """Give what `wan_link` is to do, as JSON values."""
        return {
            "kind": self.kind,
            "islands": self.spec.islands,
            "burst_bytes": self.burst_bytes,
            "lanes": _LANES,
            "bursts": self.bursts,
            "warm_up": self.warm_up,
            "every_s": self.every_s,
        }


@dataclass(frozen=True, slots=True)
class Setting:
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
    """

    rows: tuple[Row, ...]
    repetitions: int = 2
    limit_s: float = 10.0
    shaper_off: float = 0.01
    shaper_bps: tuple[float, ...] = (10e6, 100e6, 1e9)
    shaper_bytes: tuple[int, ...] = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
    shaper_s: float = 1.0
    tls_cost: float = 1.7
    tls_bytes: int = 512 * _MIB


_THIN = LinkSpec("100Mbit/s", 60)
_FAT = LinkSpec("1Gbit/s", 100)
_LOSSY = LinkSpec("100Mbit/s", 100, loss=0.001)

#: Links and what must be reached on them.
SETTING = Setting(
    (
        Row("100M-60ms", _THIN, at_least=0.93, burst_bytes=128 * _MIB),
        Row("1G-100ms-warm", _FAT, at_least=0.90, burst_bytes=512 * _MIB),
        Row(
            "1G-100ms-bursts", _FAT, at_least=0.85,
            burst_bytes=8_000_000, bursts=6, every_s=4.0, warm_up=3,
        ),
        Row("100M-100ms-0.1%-bbr", replace(_LOSSY, congestion_control="bbr"), at_least=0.90,
            burst_bytes=128 * _MIB),
        # In the first burst, on one connection, the loss is counted that asks for more.
        Row("100M-100ms-0.1%-cubic", _LOSSY, at_least=0.60, burst_bytes=32 * _MIB, bursts=4,
            warm_up=1),
        Row("100M-100ms-1%-bbr", LinkSpec("100Mbit/s", 100, 0.01, "bbr"), at_least=0.80,
            burst_bytes=64 * _MIB),
        Row("star-4x100M-60ms", replace(_THIN, islands=4), at_least=0.90, burst_bytes=64 * _MIB),
        Row("hivemind-100M-60ms", _THIN, kind="hivemind"),
        Row("hivemind-1G-100ms", _FAT, kind="hivemind", burst_bytes=128 * _MIB),
        Row("hivemind-averager-100M-60ms", _THIN, kind="averager", burst_bytes=32 * _MIB),
    )
)  # fmt: skip
SHAPER, MTLS = "shaper", "mtls-cpu"


def row_names(setting: Setting) -> list[str]:
    """Give every row that there is."""
    return [*(row.name for row in setting.rows), SHAPER, MTLS]


def run_wan(
    setting: Setting,
    patterns: Sequence[str],
    on_progress: Callable[[str, int, int], None],
    on_look: Callable[[], None] = lambda: None,
) -> Report:
    """Measure.

    Args:
        setting: What.
        patterns: Names of rows with `*` and `?`; none: all rows.
        on_progress: Hears what is measured next, and of rows done and in all.
        on_look: Called often while a network is up; what it raises takes it down.

    Raises:
        ConfigError: If a pattern matches no row, or networks cannot be emulated here.
        IslandFailed: If a measurement failed.
    """
    began = time.monotonic()
    names = row_names(setting)
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"--rows {pattern} matches no row; rows are {', '.join(names)}")
    wanted = {name for pattern in patterns or ["*"] for name in fnmatch.filter(names, pattern)}
    rows: list[dict[str, Any]] = []
    requirements: list[Requirement] = []
    by_link: dict[LinkSpec, list[Row]] = {}
    for row in setting.rows:
        if row.name in wanted:
            by_link.setdefault(row.spec, []).append(row)
    for spec, of_link in by_link.items():
        on_progress(spec.text, len(rows), len(wanted))
        for row, measured in zip(of_link, _measure(spec, of_link, setting, on_look), strict=True):
            rows.append(measured)
            if row.at_least:
                what = f"{row.name}: payload over {measured['by']}"
                figure = float("nan") if measured["figure"] is None else measured["figure"]
                requirements.append(Requirement(what, figure, row.at_least, "x", True))
    for name, measure, what, bar in (
        (SHAPER, _shaper, "shaper: off its ideal time", setting.shaper_off),
        (MTLS, _mtls, "mtls-cpu: CPU over that of plaintext", setting.tls_cost),
    ):
        if name in wanted:
            on_progress(name, len(rows), len(wanted))
            rows.append(measure(setting))
            requirements.append(Requirement(what, rows[-1]["figure"], bar, "x"))
    described = {"lanes": _LANES, "repetitions": setting.repetitions, "limit_s": setting.limit_s}
    return Report("wan", described, _COLUMNS, rows, requirements, time.monotonic() - began)


# -- links ---------------------------------------------------------------------------------------


def _measure(
    spec: LinkSpec, rows: Sequence[Row], setting: Setting, on_look: Callable[[], None]
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
            "row": row.name,
            "link": spec.text,
            "check": _check_text(record["check"]),
            "by": None,
            "limit_mbps": None,
            "own_mbps": None,
            "figure": None,
            "note": ""
            if row in able
            else "hivemind is not installed: pip install diloco[hivemind]",
        }
        if row.name in found:
            shown |= _judged(row, found[row.name])
        extra = {"payload_bytes": row.burst_bytes, "every_s": row.every_s, "kind": row.kind}
        measured.append({**shown, **extra, "emulation": record, "measured": found.get(row.name)})
    return measured


def _judged(row: Row, found: dict[str, Any]) -> dict[str, Any]:
    """Compare by island, each with its own limit; the worst one is shown."""
    means = {
        island: (sum(found["own_bps"][island]) / len(found["own_bps"][island]),
                 sum(limits) / len(limits))
        for island, limits in found["limit_bps"].items()
    }  # fmt: skip
    own, limit = min(means.values(), key=lambda pair: pair[0] / pair[1])
    note = f"{row.burst_bytes / 1e6:g} MB every {row.every_s:g} s" if row.every_s else ""
    return {
        "by": found["by"],
        "limit_mbps": limit / 1e6,
        "own_mbps": own / 1e6,
        "figure": own / limit,
        "note": "the worst of its islands" if len(means) > 1 else note,
    }


def _emulate(
    spec: LinkSpec,
    rows: Sequence[Row],
    setting: Setting,
    place: Path,
    on_look: Callable[[], None],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run `wan_link` in an emulated network; returns what it found, and the emulation's record.

    A link that is not as told carries no measurement: what was found is empty then.
    """
    wan_file, orders = place / "link.toml", place / "orders.json"
    wan_file.write_text(spec.toml)
    common = {"repetitions": setting.repetitions, "limit_s": setting.limit_s}
    orders.write_text(json.dumps({row.name: {**row.order, **common} for row in rows}))
    inside = f'exec {sys.executable} -m diloco.bench.wan_link {orders} "$DILOCO_EMULATION"'
    command = [sys.executable, "-m", "diloco", "emulate", str(wan_file), "--check"]
    command += ["--json", str(place / "record.json"), "--", "sh", "-c", inside]
    code, words = _run(command, place / "words.log", on_look)
    if not (place / "record.json").exists():
        raise ConfigError(f"diloco emulate failed, exit code {code}: {words}")
    record = json.loads((place / "record.json").read_text())
    if code == _MISSED_CHECK and "command" not in record:
        return {}, record
    if code:
        raise IslandFailed(f"measuring {spec.text} failed, exit code {code}: {words}")
    return json.loads((place / "found.json").read_text()), record


def _run(command: Sequence[str], log: Path, on_look: Callable[[], None]) -> tuple[int, str]:
    """Run a command to its end; whatever ends us before ends it, in order, too."""
    with log.open("wb") as words:
        process = subprocess.Popen(command, stdout=words, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                on_look()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    return process.returncode, log.read_text(errors="replace")[-_LAST_WORDS:]


def _check_text(check: Sequence[dict[str, Any]] | None) -> str:
    if check is None:
        return "-"
    missed = [f"{f['link']} {f['way']} {f['figure']}" for f in check if not f["is_met"]]
    return f"MISSED: {', '.join(missed)}" if missed else f"{len(check)} ok"


def _has_hivemind() -> bool:
    return importlib.util.find_spec("hivemind") is not None


# -- beside the links ------------------------------------------------------------------------------


def _shaper(setting: Setting) -> dict[str, Any]:
    """Time transfers through the shaper, as many calls in progress as lanes; the worst is shown."""
    found = {
        f"{size >> 10:,d} KiB at {rate / 1e6:,.0f} Mbit/s": _shaper_off(rate, size, setting)
        for rate in setting.shaper_bps
        for size in setting.shaper_bytes
    }
    worst = max(found, key=lambda name: found[name])
    return {**_beside(SHAPER, found[worst], f"worst: {worst}"), "measured": found}


def _shaper_off(rate_bps: float, chunk_bytes: int, setting: Setting) -> float:
    """Relative error of a transfer's time; the least counts, as other load only adds to it."""
    count = max(1, round(rate_bps * setting.shaper_s / 8 / chunk_bytes))
    ideal_s = 8 * count * chunk_bytes / rate_bps
    link = Link(rate_bps, 0.0)
    took_s = (
        asyncio.run(_shaped_s(link, chunk_bytes, count)) for _ in range(setting.repetitions + 1)
    )
    return min(abs(each_s / ideal_s - 1) for each_s in took_s)


class _Sink:
    """The far end of a shaped transport: takes everything, at once."""

    peer = "sink"

    async def call(self, method: str, header: bytes, payload: Any = b"", **_: Any) -> Reply:
        return Reply(b"")

    async def close(self) -> None:
        pass


async def _shaped_s(link: Link, chunk_bytes: int, count: int) -> float:
    shaped = ShapedTransport(_Sink(), LinkState(link, seed=1), LinkState(Link(1e15, 0.0), seed=2))
    chunk, left = bytes(chunk_bytes), iter(range(count))

    async def send() -> None:
        for _ in left:
            await shaped.call("bench.submit", b"", chunk, deadline_s=600.0)

    began = time.monotonic()
    await asyncio.gather(*(send() for _ in range(_LANES)))
    took_s = time.monotonic() - began
    await shaped.close()
    return took_s


def _mtls(setting: Setting) -> dict[str, Any]:
    """Compare the CPU time of both ends, on loopback, taking turns; the least of each counts."""
    with tempfile.TemporaryDirectory(prefix="diloco-bench-wan-") as directory:
        certs = Path(directory) / "certs"
        ca = RunCa(certs, lambda: datetime.datetime.now(datetime.UTC))
        ca.create("bench", 400)
        for short in ("syncer", "island/bench"):
            ca.issue(short, 365, again=False)
        found: dict[str, list[float]] = {"plaintext": [], "mtls": []}
        for _ in range(setting.repetitions + 1):
            for name, chosen in (("plaintext", ""), ("mtls", str(certs))):
                found[name].append(_cpu_s(setting.tls_bytes, Path(directory), chosen))
    least = {name: min(values) for name, values in found.items()}
    gb = setting.tls_bytes / 1e9
    note = f"CPU s/GB: {least['plaintext'] / gb:.2f} plaintext, {least['mtls'] / gb:.2f} mTLS"
    return {**_beside(MTLS, least["mtls"] / least["plaintext"], note), "measured": found}


def _cpu_s(num_bytes: int, directory: Path, certs: str) -> float:
    """CPU seconds of both ends for a burst, those of starting and connecting taken off."""
    used = []
    for bursts in (1, 3):
        with receiving("grpc", "127.0.0.1", directory, certs=certs) as address:
            order = {"kind": "grpc", "address": address, "certs": certs, "parts": _LANES}
            order |= {"part_bytes": num_bytes // _LANES // 2, "bursts": bursts, "every_s": 0}
            found = sent((), order)
        used.append(found["cpu_s"] + found["receiver_cpu_s"])
    return float(used[1] - used[0])


def _beside(name: str, figure: float, note: str) -> dict[str, Any]:
    shown = dict.fromkeys(("link", "check", "by", "limit_mbps", "own_mbps"))
    return {**shown, "row": name, "figure": figure, "note": note}
