"""How long heartbeats take on a link that data saturates both ways.

Each row is an emulated link (`diloco emulate`) of one island, whose beat is the report of an island
to a real coordinator: control has its own connection, lanes
of contributions and versions fill the rest, at a configured rate or with whatever TCP takes, which
has no bar. The queue before the link is as long as one round trip; an unpaced sender fills it, and
what then overflows may be a heartbeat, too. A machine with other work to do lets beats wait for a
processor: see what they take on the idle link.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from diloco.errors import IslandFailed
from diloco.report.rows import Column, Report, Requirement

_LAST_WORDS = 2000
_PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Row:
    """A link in use.

    Attributes:
        congestion_control: Of every route.
        rate_bps: `transport.rate` at both ends; 0: unpaced.
    """

    congestion_control: str
    rate_bps: float

    @property
    def name(self) -> str:
        """Say it in two words."""
        return f"{self.congestion_control} {'paced' if self.rate_bps else 'unpaced'}"


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured.

    Attributes:
        bandwidth_mbps: Of the link, each way.
        rtt_s: Of the link, empty.
        seconds: Of beats under load, after `settle_s` of load alone.
        settle_s: Time for TCP to fill the link.
        idle_s: Of beats before any load.
        beat_s: Between two beats.
        lanes: That move at once, each way.
        lane_bytes: Of one.
        rows: Links.
        p99_rtts: Bar of the 99th percentile, in round trips.
        silence_s: Bar of the longest time without a beat at the coordinator: silence stands in for
            a lease until there are leases.
    """

    bandwidth_mbps: float = 10.0
    rtt_s: float = 0.06
    seconds: float = 30.0
    settle_s: float = 8.0
    idle_s: float = 5.0
    beat_s: float = 0.05
    lanes: int = 8
    lane_bytes: int = 256 << 10
    rows: tuple[Row, ...] = (
        Row("cubic", 0.0),
        Row("cubic", 9.5e6),
        Row("bbr", 0.0),
        Row("bbr", 9.5e6),
    )
    p99_rtts: float = 3.0
    silence_s: float = 5.0


SETTING = Setting()

_COLUMNS = (
    Column("row", "row"),
    Column("idle_ms", "idle p50, ms", ".1f"),
    Column("idle_p99_ms", "p99", ".1f"),
    Column("p50_ms", "loaded p50", ".1f"),
    Column("p99_ms", "p99", ".1f"),
    Column("longest_ms", "longest", ".1f"),
    Column("p99_rtts", "p99, RTTs", ".2f"),
    Column("silence_s", "silence, s", ".2f"),
    Column("up_mbps", "data up, Mbit/s", ".2f"),
    Column("down_mbps", "down", ".2f"),
)


def run_heartbeat(setting: Setting, on_progress: Callable[[str, int, int], None]) -> Report:
    """Measure every row; `on_progress` hears of a row, of rows done and of rows in all.

    Raises:
        IslandFailed: If an emulated link cannot be made or used; says why.
    """
    began = time.monotonic()
    rows = []
    for number, row in enumerate(setting.rows):
        on_progress(row.name, number, len(setting.rows))
        rows.append(_measure(setting, row))
    requirements = []
    for row, found in zip(setting.rows, rows, strict=True):
        if not row.rate_bps:
            continue  # for comparison: how long its queue gets is TCP's business
        for what, key, limit, unit in (
            ("heartbeat p99", "p99_rtts", setting.p99_rtts, "RTTs"),
            ("longest silence", "silence_s", setting.silence_s, "s"),
        ):
            requirements.append(Requirement(f"{found['row']}: {what}", found[key], limit, unit))
    described = {**asdict(setting), "rows": [asdict(row) for row in setting.rows]}
    return Report("heartbeat", described, _COLUMNS, rows, requirements, time.monotonic() - began)


def _measure(setting: Setting, row: Row) -> dict[str, Any]:
    """Give one row: JSON values, hence `Any`."""
    order = {
        key: getattr(setting, key)
        for key in ("seconds", "settle_s", "idle_s", "beat_s", "lanes", "lane_bytes")
    }
    with tempfile.TemporaryDirectory(prefix="diloco-bench-heartbeat-") as directory:
        link = Path(directory, "link.toml")
        link.write_text(_wan(setting, row))
        said = _inside(link, {**order, "rate_bps": row.rate_bps})
    latencies = said["latencies_s"]
    idle_p99_s, p99_s = (quantiles(times, n=100)[98] for times in (said["idle_s"], latencies))
    return {
        "row": row.name,
        "idle_ms": 1e3 * median(said["idle_s"]),
        "idle_p99_ms": 1e3 * idle_p99_s,
        "p50_ms": 1e3 * median(latencies),
        "p99_ms": 1e3 * p99_s,
        "longest_ms": 1e3 * max(latencies),
        "p99_rtts": p99_s / setting.rtt_s,
        "silence_s": said["longest_silence_s"],
        "up_mbps": said["up_bps"] / 1e6,
        "down_mbps": said["down_bps"] / 1e6,
    }


def _wan(setting: Setting, row: Row) -> str:
    way = f'bandwidth = "{setting.bandwidth_mbps}Mbit/s", delay = "{500 * setting.rtt_s}ms"'
    return f"""
topology = "star"
[tcp]
congestion_control = "{row.congestion_control}"
[links.thin]
source = "10 Mbit/s, saturated by the bench"
up = {{ {way} }}
down = {{ {way} }}
[islands.island]
link = "thin"
"""


def _inside(link: Path, order: dict[str, Any]) -> dict[str, Any]:
    """Run the measurement inside an emulated link; JSON values, hence `Any`."""
    # The emulation says where it describes itself to the command's environment alone.
    described = 'exec "$@" "$DILOCO_EMULATION"'
    measuring = [sys.executable, "-m", "diloco.bench.network.heartbeat_link", json.dumps(order)]
    command = [sys.executable, "-m", "diloco", "emulate", str(link), "--"]
    done = subprocess.run(
        [*command, "sh", "-c", described, "sh", *measuring],
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise IslandFailed(
            f"measuring inside the emulated link failed, exit code {done.returncode}: "
            f"{(done.stderr + done.stdout)[-_LAST_WORDS:]}\nWhat the machine lacks: diloco emulate "
            f"--check configs/wan/star-100M-60ms.toml"
        )
    return dict(json.loads(lines[-1]))
