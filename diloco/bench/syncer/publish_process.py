"""Processes of `diloco bench publish`: a syncer, and islands that encode and send.

Each is told what to do over a pipe and answers there; a clock that all processes of a host share
(`time.monotonic`) says when what happened.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import blake3
import torch

from diloco.allocator import keep_freed_memory
from diloco.bench.syncer.simulated_island import SimulatedIsland
from diloco.compression.base import to_bytes
from diloco.compression.registry import get_codec
from diloco.compression.warm_up import warm_up
from diloco.launch.process.tensor_thread import syncer_workers
from diloco.outer.fragments import Fragment, Plan, TensorSpec, make_plan
from diloco.outer.optimizer import OuterOptimizer
from diloco.protos.control_pb2 import ROLE_ISLAND, Grant
from diloco.syncer.rules import SyncerRules
from diloco.syncer.syncer import Syncer
from diloco.transport.contracts import Buffer
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.versions.publication import PublicationRules
from diloco.versions.record import RecordDraft
from diloco.versions.store import FragmentStore
from diloco.versions.version import VersionRecord

_RUN = "publish"
_SYNCER_S = 3600.0


@dataclass(frozen=True, slots=True)
class Work:
    """What all processes of one row must agree on.

    Attributes:
        numel: Parameters of the one fragment.
        codec: Up and down.
        islands: Names, sorted.
        num_threads: Lanes merged at once.
        is_stored: Whether the syncer writes its records.
    """

    numel: int
    codec: str
    islands: tuple[str, ...]
    num_threads: int
    is_stored: bool

    @property
    def plan(self) -> Plan:
        """One tensor in one fragment."""
        return make_plan([TensorSpec("w", (self.numel,))], num_fragments=1)

    @property
    def fragment(self) -> Fragment:
        """The one fragment."""
        return self.plan.fragments[0]

    @property
    def rules(self) -> PublicationRules:
        """The outer step of the presets."""
        return PublicationRules(
            self.codec, self.codec, OuterOptimizer("nesterov", 0.7, 0.9, 0), seed=1
        )


@dataclass(frozen=True, slots=True)
class Sent:
    """When an island did what in one round, seconds of the shared clock, and its CPU seconds."""

    began: float
    encoded: float
    acknowledged: float
    published: float
    cpu_s: float


def lane_values(numel: int, seed: int) -> torch.Tensor:
    """Draw a pseudo-gradient: seeded, normal, small."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).mul_(1e-3)


def syncer(pipe: Connection, work: Work) -> None:
    """Serve one fragment; the pipe gets the address, then sums of seconds whenever it asks."""
    keep_freed_memory()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="diloco-publish-") as directory:
        asyncio.run(_serve(pipe, work, Path(directory)))


async def _serve(pipe: Connection, work: Work, directory: Path) -> None:
    store = FragmentStore if work.is_stored else _UnwrittenStore
    with syncer_workers(work.num_threads) as workers:
        serving = Syncer(
            work.plan,
            SyncerRules(0, work.islands, work.rules, _SYNCER_S, 1),
            [store(directory, work.fragment, 1)],
            syncer_epoch=1,
            incarnations=_NoIncarnations(),
            is_granted=lambda grant: grant.run == _RUN,
            workers=workers,
            on_record=lambda header: None,
            on_change=lambda: None,
        )
        await serving.start()
        await workers.notes.run(
            lambda: warm_up(work.plan, (work.rules.uplink_codec, work.rules.downlink_codec))
        )
        server = GrpcServer("127.0.0.1:0", serving.handlers)
        await server.start()
        pipe.send(server.address)
        with ThreadPoolExecutor(1) as asking:
            loop = asyncio.get_running_loop()
            while await loop.run_in_executor(asking, pipe.recv):
                counts = serving.meter.counts
                spent = counts.merge_s.get(0, 0.0), counts.commit_s.get(0, 0.0), time.process_time()
                pipe.send(spent)
        await server.stop(0)
        await serving.stop()


def island(pipe: Connection, work: Work, name: str, address: str) -> None:
    """Contribute to as many rounds as the pipe has times for, each the begin of one."""
    torch.set_num_threads(1)
    asyncio.run(_contribute(pipe, work, name, address))


async def _contribute(pipe: Connection, work: Work, name: str, address: str) -> None:
    codec, lanes = get_codec(work.codec), work.fragment.lanes
    seed = work.islands.index(name)
    values = [lane_values(lane.numel, seed * len(lanes) + lane.lane_id) for lane in lanes]
    for lane in values:
        codec.encode(lane)  # compiles
    grant = Grant(run=_RUN, island=name, incarnation=1, roles=[ROLE_ISLAND])
    here = SimulatedIsland(GrpcTransport(address), grant, work.fragment, work.codec)
    await here.join()
    pipe.send("joined")
    if pipe.recv() == "found":
        await here.found()
    await here.published(0)
    pipe.send("founded")
    version = 0
    while (begin := pipe.recv()) is not None:
        polling = asyncio.create_task(here.published(version + 1))
        await asyncio.sleep(begin - time.monotonic())
        sending = []
        began, began_cpu_s = time.monotonic(), time.process_time()
        for lane_id, lane in enumerate(values):
            payload = to_bytes(codec.encode(lane))
            digest = blake3.blake3(payload).digest()
            sending.append(asyncio.create_task(here.submit(version, lane_id, payload, digest)))
            await asyncio.sleep(0)  # what was encoded leaves while the next lane is encoded
        encoded = time.monotonic()
        await asyncio.gather(*sending)
        acknowledged = time.monotonic()
        await polling
        published = time.monotonic()
        cpu_s = time.process_time() - began_cpu_s
        pipe.send(Sent(began, encoded, acknowledged, published, cpu_s))
        version += 1
    await here.close()


class _NoIncarnations:
    """Nothing outlives this syncer."""

    def load(self) -> dict[str, int]:
        return {}

    def store(self, incarnations: dict[str, int]) -> None:
        pass


class _UnwrittenStore(FragmentStore):
    """Takes every version for durable at once: what the snapshot policy costs is off the clock."""

    def draft(
        self,
        record: VersionRecord,
        payload_bytes: Sequence[int],
        contribution_bytes: Mapping[str, Sequence[int]],
    ) -> RecordDraft:
        return _UnwrittenDraft()

    def commit(self, record: VersionRecord, draft: RecordDraft | None = None) -> None:
        pass


class _UnwrittenDraft(RecordDraft):
    """Forgets what is written, and hashes nothing."""

    def __init__(self) -> None:
        pass

    @property
    def has_state(self) -> bool:
        return True

    def write(self, name: str, data: Buffer, digest: bytes | None = None) -> None:
        pass

    def abandon(self) -> None:
        pass
