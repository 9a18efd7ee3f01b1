"""What crosses the line of a lane that the syncer's disk has no room for, over gRPC."""

from __future__ import annotations

import asyncio
import errno
import random
from pathlib import Path

import blake3
import pytest
import torch

from diloco.compression.base import to_bytes
from diloco.island.exchange.calls import SyncerCalls
from diloco.island.exchange.contributions import NOT_OPEN_WAIT_S
from diloco.protocol.island.ledger import Outstanding
from diloco.protos import fragment_pb2 as wire
from diloco.syncer.spool import Spool
from diloco.transport.calls.loopback import run_virtual
from diloco.transport.errors import NotYet
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.retry import RetryPolicy
from tests.raw_island import KEY, founded
from tests.virtual_run import Setting, descend, grant

NUMEL = 400_000
FULL_S = 2.0


def test_a_lane_that_finds_no_room_is_sent_twice_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_full = True
    write_bytes = Path.write_bytes

    def write(path: Path, data: bytes) -> int:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_bytes(path, data)

    async def run() -> None:
        nonlocal is_full
        setting = Setting({"w": [0.0] * NUMEL}, descend, tmp_path, inner_steps=8, spool_bytes=0)
        served, (island, _) = await founded(setting)
        lane = to_bytes(torch.ones(island.lanes[0].numel).view(torch.uint8))
        monkeypatch.setattr(Path, "write_bytes", write)
        server = GrpcServer("127.0.0.1:0", served.syncer.handlers, insecure=True)
        await server.start()
        ways = [GrpcTransport(server.address) for _ in range(2)]
        policy = RetryPolicy(budget_s=60.0, max_wait_s=0.5)
        calls = SyncerCalls(
            *ways, grant("a"), rpc_deadline_s=30.0, policy=policy, rng=random.Random(0)
        )

        async def submit() -> None:  # as `Contributions` does
            sent = Outstanding(KEY, 4, 4, 4, is_flush=False)
            while True:
                digest = blake3.blake3(lane).digest()
                reply = await calls.submit(sent, 0, codec="float32", digest=digest, payload=lane)
                if reply.status != wire.SUBMIT_STATUS_NOT_OPEN:
                    assert reply.status == wire.SUBMIT_STATUS_RECEIVED
                    return
                await asyncio.sleep(NOT_OPEN_WAIT_S)

        try:
            submitting = asyncio.create_task(submit())
            await asyncio.sleep(FULL_S)
            assert not submitting.done()
            reply = await calls.poll([], [])
            is_full = False
            async with asyncio.timeout(30.0):
                await submitting
            assert reply.asks_first, "other lanes do not begin before they are told"
            # Twice, as it is one that travels in one message; of a larger one nothing is repeated.
            assert calls.moved[0] < 2.2 * len(lane)
        finally:
            await calls.close()
            await server.stop(0.0)

    asyncio.run(run())


def test_while_the_disk_is_full_one_payload_at_a_time_tries(tmp_path: Path) -> None:
    async def scenario() -> None:
        spool = Spool(tmp_path / "spool", 10)
        spool.start()
        spool.found_full()
        spool.check_room(10)  # in memory
        for _ in range(3):
            with pytest.raises(NotYet, match="the syncer's disk is full"):
                spool.check_room(11)
            await asyncio.sleep(5.0)
            spool.check_room(11)
        spool.put(bytes(11), b"")
        for _ in range(3):
            spool.check_room(11)

    run_virtual(scenario())
