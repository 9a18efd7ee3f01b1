"""Beside the links of `diloco bench wan`: the in-process shaper's time, and what mTLS costs."""

from __future__ import annotations

import asyncio
import datetime
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco.bench.network.wan_link import LANES, receiving, sent
from diloco.security.run_ca import RunCa
from diloco.transport.contracts import Reply
from diloco.transport.shaping.link import Link, LinkQueue
from diloco.transport.shaping.shaped import ShapedTransport

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
