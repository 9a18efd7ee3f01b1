"""The measurements of one emulated link, made inside it: limit and product in turn.

It runs where the coordinator is, so there the receivers are; senders enter the islands. The limit
is iperf3 with 8 streams; of bursts, whose duration iperf3 does not tell, plain TCP with as many.
Where iperf3 is not installed, only the product is measured: nothing stands in for the limit.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from diloco.errors import IslandFailed
from diloco.launch.process.emulated import Emulated

STREAMS = 8
#: Of a fragment, as the configuration has them.
LANES = 16
IPERF3, PLAIN = f"iperf3 -P {STREAMS}", f"plain TCP x {STREAMS}"
_FIRST_PORT = 5201
_OMIT_S = 3
_PATIENCE_S = 400.0
_END_S = 10.0
_END = (sys.executable, "-m", "diloco.bench.network.wan_end")

Message = dict[str, Any]  # JSON values


@contextlib.contextmanager
def receiving(
    kind: str,
    host: str,
    directory: Path,
    *,
    certs: str = "",
) -> Iterator[str]:
    """A receiver in this namespace; gives its address.

    Args:
        kind: Of `wan_end`.
        host: Its own address.
        directory: For its key.
        certs: Directory of certificates; empty: plaintext.

    Raises:
        IslandFailed: If it does not start; its last words are above.
    """
    order: Message = {"do": "receive", "kind": kind, "host": host, "certs": certs}
    order |= {"key": str(directory / "receiver.p2p-key")}
    process = subprocess.Popen(
        [*_END, json.dumps(order)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise IslandFailed(f"the receiver of kind {kind} did not start; its words are above")
        yield json.loads(line)["address"]
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def sent(prefix: Sequence[str], order: Message) -> Message:
    """Send bursts from a node, and say what was measured.

    Raises:
        IslandFailed: If that failed.
    """
    command = [*prefix, *_END, json.dumps({"do": "send", **order})]
    return dict(json.loads(_output(command)))


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    if done.returncode:
        raise IslandFailed(
            f"{' '.join(command)} failed: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.stdout


def measure_link(order: Message, emulated: Emulated, directory: Path) -> Message:
    """Measure one link's row.

    Args:
        order: `kind` of the transport, `islands` that send at once, `burst_bytes` and `lanes` of a
            contribution, `bursts`, how many of them only warm up, `every_s` from one to the next
            (0: without a pause), `repetitions`, `limit_s` of the limit.
        emulated: The network that this process is in.
        directory: For keys.

    Returns:
        `limit_bps` and `own_bps` by island, a list each; without a limit `limit_bps` is empty.
    """
    islands = sorted(emulated.description["islands"])[: order["islands"]]
    host = str(emulated.description["coordinator"])
    is_paused = order["every_s"] > 0
    found: Message = {"limit_bps": {}, "own_bps": {}}
    with (
        receiving(order["kind"], host, directory) as own,
        receiving("tcp", host, directory) as plain,
        ThreadPoolExecutor(len(islands)) as pool,
    ):

        def limit(island: str) -> float:
            if not is_paused:
                port = _FIRST_PORT + islands.index(island)
                return _iperf3_bps(emulated.prefix(island), host, port, order["limit_s"])
            return _bursts_bps(emulated, island, order, "tcp", plain, STREAMS)

        def ours(island: str) -> float:
            return _bursts_bps(emulated, island, order, order["kind"], own, order["lanes"])

        turns = {"limit_bps": limit, "own_bps": ours}
        if not is_paused and shutil.which("iperf3") is None:
            del turns["limit_bps"]
        for _ in range(order["repetitions"]):
            for name, work in turns.items():
                for island, bps in zip(islands, pool.map(work, islands), strict=True):
                    found[name].setdefault(island, []).append(bps)
    return found


def _bursts_bps(
    emulated: Emulated, island: str, order: Message, kind: str, address: str, parts: int
) -> float:
    """Payload bits per second of bursts after those that warm up: of the median one."""
    bursts = {
        "kind": kind,
        "host": emulated.description["islands"][island]["address"],
        "address": address,
        "burst_bytes": order["burst_bytes"],
        "parts": parts,
        "part_bytes": order["burst_bytes"] // parts,
        "bursts": order["warm_up"] + order["bursts"],
        "every_s": order["every_s"],
    }
    seconds = sent(emulated.prefix(island), bursts)["seconds"][order["warm_up"] :]
    return float(8 * order["burst_bytes"] / median(seconds))


def _iperf3_bps(prefix: Sequence[str], host: str, port: int, seconds: float) -> float:
    """What iperf3 received, its first seconds left out."""
    with subprocess.Popen(
        ["iperf3", "--server", "--one-off", "--forceflush", "--bind", host, "--port", str(port)],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        while "listening" not in (line := server.stdout.readline()):
            if not line:
                raise IslandFailed(f"iperf3 does not listen on {host}:{port}")
        try:
            command = ["iperf3", "--client", host, "--port", str(port), "--json"]
            command += ["--parallel", str(STREAMS), "--omit", str(_OMIT_S)]
            text = _output([*prefix, *command, "--time", f"{seconds:.0f}"])
        finally:
            server.terminate()
            server.stdout.read()
    return float(json.loads(text)["end"]["sum_received"]["bits_per_second"])


def inside(orders: Message, emulated: Emulated, place: Path) -> Message:
    """Measure every row of a link; gives what was found by the row's name."""
    return {name: measure_link(order, emulated, place) for name, order in orders.items()}
