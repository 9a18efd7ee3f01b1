"""Both ends of `diloco bench heartbeat`, inside an emulated link.

    diloco emulate LINK.toml -- python -m diloco.bench.network.heartbeat_link ORDER DESCRIPTION

It runs where the coordinator is, serves, and starts itself again inside the island, which beats
while its data fills the link both ways. A beat is an island's report to a real coordinator, which
has its own journal; there are no leases yet, so the longest silence stands in for one. Prints one
JSON object.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco.coordinator.daemon import Coordinator
from diloco.coordinator.journal import Journal
from diloco.launch.process.emulated import Emulated
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.protocol.run.membership import Membership
from diloco.protocol.run.terms import Terms
from diloco.protos.control_pb2 import JoinReply, JoinRequest, ReportReply, ReportRequest
from diloco.transport.contracts import PROTOCOL_VERSION, IncomingCall, Reply
from diloco.transport.errors import TransportError
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.shaping.pacing import Pacer
from diloco.transport.transfer import Transfer

_DEADLINE_S = 600.0
_BEAT_S = 60.0
_RUN, _IDENTITY, _BEAT = "bench-heartbeat", "{}", "control.report"

Message = dict[str, Any]  # JSON values


def main(arguments: Sequence[str]) -> int:
    """Measure one link as the first argument orders."""
    order = json.loads(arguments[0])
    if "address" in order:
        print(json.dumps(asyncio.run(_beat(order))))  # noqa: T201 - the other process reads it
        return 0
    emulated = Emulated(json.loads(Path(arguments[1]).read_text()))
    print(json.dumps(asyncio.run(_serve(order, emulated))))  # noqa: T201
    return 0


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


async def _serve(order: Message, emulated: Emulated) -> Message:
    (island,) = emulated.description["islands"]
    with tempfile.TemporaryDirectory(prefix="diloco-bench-heartbeat-") as directory:
        journal = Journal(Path(directory, "journal.sqlite"))
        journal.open()
        try:
            coordinator = Coordinator(
                membership=Membership(
                    _RUN, (island,), _IDENTITY, lambda a, b: [], 1, num_checkpoints=1
                ),
                journal=journal,
                secret=secrets.token_bytes(32),
                terms=Terms(policy_json="{}", unreachable_s=_DEADLINE_S),
                unix_clock=time.time,
            )
            service = _Service(coordinator, order["lane_bytes"])
            return await _beaten(order, emulated, island, service)
        finally:
            journal.close()


async def _beaten(order: Message, emulated: Emulated, island: str, service: _Service) -> Message:
    """Serve, and have the island measure."""
    server = GrpcServer(
        f"{emulated.description['coordinator']}:0",
        service.handlers,
        insecure=True,
        pacer=Pacer(order["rate_bps"]),
    )
    await server.start()
    try:
        inside = json.dumps({**order, "address": server.address, "island": island})
        process = await asyncio.create_subprocess_exec(
            *emulated.prefix(island), sys.executable, "-m", __spec__.name, inside,
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
        plan_json=make_plan([TensorSpec("w", (1,))], num_fragments=1).to_json(),
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
    try:
        sys.exit(main(sys.argv[1:]))
    except TransportError as failed:
        sys.exit(f"heartbeat: {failed}")
