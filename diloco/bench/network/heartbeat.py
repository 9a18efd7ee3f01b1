"""Rows "heartbeat" of `diloco bench wan`: heartbeats on a thin link that data fills both ways.

A beat is an island's report to a real coordinator, which has its own journal; the longest silence
there is measured, too. Control has its own connection, lanes of contributions and versions fill the
rest, at `transport.rate` or with whatever TCP takes: the queue before the link is as long as one
round trip, an unpaced sender fills it, and what then overflows may be a heartbeat. A machine with
other work lets beats wait for a processor: see what they take on the idle link.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from diloco.bench.network.emulating import LinkSpec, check_text, measure_inside
from diloco.coordinator.daemon import Coordinator
from diloco.coordinator.journal import Journal
from diloco.launch.process.emulated import Emulated
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.protocol.run.membership import Membership
from diloco.protocol.run.plan_bytes import packed
from diloco.protocol.run.terms import Terms
from diloco.protos.control_pb2 import JoinReply, JoinRequest, ReportReply, ReportRequest
from diloco.report.rows import Column, Requirement
from diloco.transport.contracts import PROTOCOL_VERSION, IncomingCall, Reply
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.shaping.pacing import Pacer
from diloco.transport.transfer import Transfer

_DEADLINE_S = 600.0
_BEAT_S = 60.0
_RUN, _IDENTITY, _BEAT = "bench-heartbeat", "{}", "control.report"

Message = dict[str, Any]  # JSON values

HEARTBEAT_COLUMNS = (
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


@dataclass(frozen=True, slots=True)
class HeartbeatSetting:
    """What is measured.

    Attributes:
        seconds: Of beats under load, after `settle_s` of load alone.
        settle_s: Time for TCP to fill the link.
        idle_s: Of beats before any load.
        beat_s: Between two beats.
        lanes: That move at once, each way.
        lane_bytes: Of one.
        bandwidth_mbps: Of the link, each way.
        rtt_ms: Of the link, empty.
        rows: Name -> congestion control, and `transport.rate` at both ends; 0: unpaced.
        p99_rtts: Bar of the 99th percentile of paced rows, in round trips.
        silence_s: Bar of their longest time without a beat at the coordinator.
    """

    seconds: float = 30.0
    settle_s: float = 8.0
    idle_s: float = 5.0
    beat_s: float = 0.05
    lanes: int = 8
    lane_bytes: int = 256 << 10
    bandwidth_mbps: float = 10.0
    rtt_ms: float = 60.0
    rows: dict[str, tuple[str, float]] = field(
        default_factory=lambda: {
            "heartbeat-cubic-unpaced": ("cubic", 0.0),
            "heartbeat-cubic-paced": ("cubic", 9.5e6),
            "heartbeat-bbr-unpaced": ("bbr", 0.0),
            "heartbeat-bbr-paced": ("bbr", 9.5e6),
        }
    )
    p99_rtts: float = 3.0
    silence_s: float = 5.0


def measure_heartbeats(
    setting: HeartbeatSetting, row: str, on_look: Callable[[], None]
) -> tuple[dict[str, Any], list[Requirement]]:
    """Measure a row in an emulated network, and judge it if it is paced.

    Raises:
        ConfigError: If networks cannot be emulated here.
        IslandFailed: If the measurement failed; says why.
    """
    congestion_control, rate_bps = setting.rows[row]
    spec = LinkSpec(
        f"{setting.bandwidth_mbps:g}Mbit/s", setting.rtt_ms, congestion_control=congestion_control
    )
    order = {key: getattr(setting, key) for key in setting.__slots__[:6]} | {"rate_bps": rate_bps}
    with tempfile.TemporaryDirectory(prefix="diloco-bench-heartbeat-") as directory:
        said, record = measure_inside(
            spec.text, spec.toml, __name__, order, Path(directory), on_look
        )
    shown: dict[str, Any] = {"table": "heartbeats on a full link", "row": row}
    shown |= {"link": spec.text, "check": check_text(record["check"])}
    figures: dict[str, Any] = {column.key: None for column in HEARTBEAT_COLUMNS}
    figures |= _figures(setting, said) if said else {}
    requirements = []
    if rate_bps:  # without, how long the queue gets is TCP's business
        for what, key, limit, unit in (
            ("heartbeat p99", "p99_rtts", setting.p99_rtts, "RTTs"),
            ("longest silence", "silence_s", setting.silence_s, "s"),
        ):
            figure = figures[key] if said else float("nan")
            requirements.append(Requirement(f"{row}: {what}", figure, limit, unit))
    return {**shown, **figures}, requirements


def _figures(setting: HeartbeatSetting, said: Message) -> dict[str, float]:
    idle_s, loaded_s = said["idle_s"], said["latencies_s"]
    idle_p99_s, p99_s = (quantiles(times, n=100)[98] for times in (idle_s, loaded_s))
    return {
        "idle_ms": 1e3 * median(idle_s),
        "idle_p99_ms": 1e3 * idle_p99_s,
        "p50_ms": 1e3 * median(loaded_s),
        "p99_ms": 1e3 * p99_s,
        "longest_ms": 1e3 * max(loaded_s),
        "p99_rtts": 1e3 * p99_s / setting.rtt_ms,
        "silence_s": said["longest_silence_s"],
        "up_mbps": said["up_bps"] / 1e6,
        "down_mbps": said["down_bps"] / 1e6,
    }


# -- inside the network ----------------------------------------------------------------------------


def inside(order: Message, emulated: Emulated, place: Path) -> Message:
    """Serve where the coordinator is, and have an island beat while its data fills the link."""
    return asyncio.run(_serve(order, emulated, place))


class _Service:
    """What coordinator and syncer are to an island here: the one is real, the other moves bytes."""

    def __init__(self, coordinator: Coordinator, lane_bytes: int) -> None:
        self._report = coordinator.handlers[_BEAT]
        self.handlers = {
            **coordinator.handlers,
            _BEAT: self._beat,
            "take": self._take,
            "give": self._give,
            "seen": self._seen,
        }
        self._lane = bytes(lane_bytes)
        self._last_beat: float | None = None
        self.longest_silence_s = 0.0
        self.taken_bytes = 0

    async def _beat(self, call: IncomingCall) -> Reply:
        now = asyncio.get_running_loop().time()
        if self._last_beat is not None:
            self.longest_silence_s = max(self.longest_silence_s, now - self._last_beat)
        self._last_beat = now
        return await self._report(call)

    async def _take(self, call: IncomingCall) -> Reply:
        payload = await call.read_payload()
        self.taken_bytes += len(payload)
        return Reply(b"")

    async def _give(self, call: IncomingCall) -> Reply:
        return Reply(b"", self._lane)

    async def _seen(self, call: IncomingCall) -> Reply:
        seen = {"longest_silence_s": self.longest_silence_s, "taken_bytes": self.taken_bytes}
        self.longest_silence_s, self._last_beat = 0.0, None
        return Reply(json.dumps(seen).encode())


async def _serve(order: Message, emulated: Emulated, place: Path) -> Message:
    (island,) = emulated.description["islands"]
    journal = Journal(place / "journal.sqlite")
    journal.open()
    with contextlib.closing(journal):
        coordinator = Coordinator(
            membership=Membership(
                _RUN, (island,), _IDENTITY, lambda a, b: [], 1, num_checkpoints=1
            ),
            journal=journal,
            secret=secrets.token_bytes(32),
            terms=Terms(policy_json="{}", unreachable_s=_DEADLINE_S),
            unix_clock=time.time,
        )
        server = GrpcServer(
            f"{emulated.description['coordinator']}:0",
            _Service(coordinator, order["lane_bytes"]).handlers,
            insecure=True,
            pacer=Pacer(order["rate_bps"]),
        )
        await server.start()
        try:
            own = json.dumps({**order, "address": server.address, "island": island})
            process = await asyncio.create_subprocess_exec(
                *emulated.prefix(island), sys.executable, "-m", __name__, own,
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            said, _ = await process.communicate()
            if process.returncode:
                raise RuntimeError(f"the island's end failed, exit code {process.returncode}")
            return dict(json.loads(said))
        finally:
            await server.stop(0.0)


async def _beat(order: Message) -> Message:
    control = GrpcTransport(order["address"])
    data = GrpcTransport(order["address"], channels=0, pacer=Pacer(order["rate_bps"]))
    transfers: list[Transfer] = []
    report = await _join(control, order["island"])
    idle_s = await _beats(control, report, order["beat_s"], order["idle_s"])
    lanes = [
        asyncio.create_task(_move(data, way, order["lane_bytes"], transfers))
        for way in ("up", "down")
        for _ in range(order["lanes"])
    ]
    await asyncio.sleep(order["settle_s"])
    before, received = await _seen(control), sum(t.received_bytes for t in transfers)
    latencies_s = await _beats(control, report, order["beat_s"], order["seconds"])
    after = await _seen(control)
    down_bytes = sum(transfer.received_bytes for transfer in transfers) - received
    for lane in lanes:
        lane.cancel()
    await asyncio.gather(*lanes, return_exceptions=True)
    await data.close()
    await control.close()
    return {
        "idle_s": idle_s,
        "latencies_s": latencies_s,
        "longest_silence_s": after["longest_silence_s"],
        "up_bps": 8 * (after["taken_bytes"] - before["taken_bytes"]) / order["seconds"],
        "down_bps": 8 * down_bytes / order["seconds"],
    }


async def _join(control: GrpcTransport, island: str) -> bytes:
    """Join the run; returns the report that is the beat."""
    request = JoinRequest(
        protocol_version=PROTOCOL_VERSION,
        run=_RUN,
        island=island,
        identity_json=_IDENTITY,
        plan=packed(make_plan([TensorSpec("w", (1,))], num_fragments=1).to_json()),
        start_id="1",
    )
    reply = await control.call("control.join", request.SerializeToString(), deadline_s=_BEAT_S)
    joined = JoinReply.FromString(reply.header)
    if not joined.HasField("grant"):
        raise RuntimeError(f"the coordinator refused the island: {joined.message}")
    report = ReportRequest(protocol_version=PROTOCOL_VERSION, grant=joined.grant, state="training")
    return report.SerializeToString()


async def _beats(
    control: GrpcTransport, report: bytes, beat_s: float, seconds: float
) -> list[float]:
    """Beat at fixed times, whether the last one has been answered or not."""
    loop = asyncio.get_running_loop()

    async def beat() -> float:
        began = loop.time()
        reply = await control.call(_BEAT, report, deadline_s=_BEAT_S)
        took_s = loop.time() - began
        if (answer := ReportReply.FromString(reply.header)).stop:
            raise RuntimeError(f"the coordinator ends the island: {answer.reason}")
        return took_s

    began, beats = loop.time(), []
    for number in range(int(seconds / beat_s)):
        await asyncio.sleep(max(began + number * beat_s - loop.time(), 0.0))
        beats.append(asyncio.create_task(beat()))
    return list(await asyncio.gather(*beats))


async def _move(data: GrpcTransport, way: str, lane_bytes: int, transfers: list[Transfer]) -> None:
    """Move lanes one way, one after another, until cancelled."""
    lane = bytes(lane_bytes) if way == "up" else b""
    while True:
        transfers.append(transfer := Transfer())
        await data.call(
            "take" if lane else "give",
            b"",
            lane,
            deadline_s=_DEADLINE_S,
            max_reply_bytes=0 if lane else lane_bytes,
            transfer=transfer,
        )


async def _seen(control: GrpcTransport) -> Message:
    reply = await control.call("seen", b"", deadline_s=_BEAT_S)
    return dict(json.loads(reply.header))


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_beat(json.loads(sys.argv[1])))))  # noqa: T201 - read there
