"""Times what a plan else estimates: the islands' real inner steps, and the real link.

Steps are made on this machine by processes of their own, a rank each, with the island's model,
text and layout. A link is timed from here: the round trip of a TCP connection to the coordinator,
and the rate at which the product's own transport fills the way to a receiver at its other end:

    python -m diloco.bench.network.wan_end '{"do": "receive", "kind": "grpc", "host": "0.0.0.0"}'
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from diloco.baseline.group import BaselineMember
from diloco.baseline.members import BaselineProcesses
from diloco.checkpoint.host_memory import available_bytes
from diloco.config.load import resolved_toml
from diloco.config.schema import Config
from diloco.doctor.machine_facts import try_path
from diloco.errors import ConfigError
from diloco.forecast.rank_memory import RankForecast
from diloco.transport.units import format_bytes

#: Inner steps before the timed ones build what is built once: optimizer state, compiled blocks.
WARMUP_STEPS, TIMED_STEPS = 2, 5
_PARTS, _BURSTS = 16, 3
_FIRST_PART_BYTES, _MOST_PART_BYTES = 16 << 10, 16 << 20
_BURST_S = 2.0
_SEND_S = 300.0


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Median duration of an island's inner step, and the device of its ranks."""

    step_s: float
    device: str


def measure_step(
    config: Config, island: str, planned: RankForecast, on_look: Callable[[], None]
) -> MeasuredStep:
    """Time inner steps of an island, all its ranks on this machine.

    Args:
        config: The run.
        island: Name of the island.
        planned: What a rank of it takes.
        on_look: Called many times a second; what it raises ends the ranks.

    Raises:
        ConfigError: If this machine has not the memory, or the devices.
        IslandFailed: If a rank ended early.
    """
    ranks = config.islands[island].ranks
    needed, there = ranks * planned.peak_bytes, available_bytes()
    on_host = config.islands[island].device != "cuda"
    if on_host and there is not None and needed > there:
        raise ConfigError(
            f"--measure: the {ranks} ranks of islands.{island} take {format_bytes(needed)} and "
            f"{format_bytes(there)} are free on this machine; measure where the island runs, or "
            f"give --step-time {island}=SECONDS"
        )
    with tempfile.TemporaryDirectory(prefix="diloco-plan-") as directory:
        run_file = Path(directory) / "run.toml"
        run_file.write_text(resolved_toml(config))
        order = {
            "run_file": str(run_file),
            "island": island,
            "warmup_steps": WARMUP_STEPS,
            "timed_steps": TIMED_STEPS,
        }
        with BaselineProcesses(
            "diloco.simulations.planner.timed_rank", Path(directory), on_look
        ) as members:
            for rank in range(ranks):
                threads = config.islands[island].threads
                members.start(
                    BaselineMember(island, rank), {**order, "island_rank": rank}, threads=threads
                )
            said = members.results().values()
    return MeasuredStep(
        max(each["step_s"] for each in said), ", ".join(sorted({e["device"] for e in said}))
    )


def measure_rtt_s(address: str) -> float:
    """Time the round trip to HOST:PORT, by the handshake of a TCP connection.

    Raises:
        ConfigError: If no connection is made.
    """
    path = try_path(address)
    if path.error:
        raise ConfigError(
            f"--measure: no connection to {address}: {path.error}; start the coordinator there, or "
            f"look at the way (diloco doctor --coordinator {address})"
        )
    return path.rtt_s


def measure_rate_bps(address: str) -> float:
    """Time bursts of 16 lanes over the product's transport to a receiver (module docstring).

    The first burst, which is small, says how large those are that are timed: about 2 s each.

    Raises:
        ConfigError: If nothing answers there.
    """
    first_s = _send(address, _FIRST_PART_BYTES)
    rate = _PARTS * _FIRST_PART_BYTES / first_s
    part_bytes = int(min(max(rate * _BURST_S / _PARTS, _FIRST_PART_BYTES), _MOST_PART_BYTES))
    return 8 * _PARTS * part_bytes / _send(address, part_bytes)


def _send(address: str, part_bytes: int) -> float:
    """Return the median seconds of a burst, the first of which is not counted."""
    order = {
        "do": "send",
        "kind": "grpc",
        "address": address,
        "parts": _PARTS,
        "part_bytes": part_bytes,
        "bursts": _BURSTS,
        "every_s": 0.0,
    }
    command = [sys.executable, "-m", "diloco.bench.network.wan_end", json.dumps(order)]
    try:
        ended = subprocess.run(command, capture_output=True, timeout=_SEND_S, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        last = (error.stderr or b"").decode(errors="replace").strip().splitlines()[-1:]
        raise ConfigError(
            f"--probe {address}: nothing could be sent there ({' '.join(last) or error}); start "
            "the receiver at that end: python -m diloco.bench.network.wan_end "
            f'\'{{"do": "receive", "kind": "grpc", "host": "0.0.0.0"}}\''
        ) from error
    seconds: list[float] = json.loads(ended.stdout)["seconds"]
    return median(seconds[1:])
