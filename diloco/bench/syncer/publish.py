"""Rows "publish" of `diloco bench syncer`: a round from submit to published, and its arithmetic.

Two islands and a syncer, a process each, over loopback without shaping. The clock starts when the
islands begin to encode, lane by lane, and stops when the last of them learns that the next version
is published. Besides it, alone on one thread: 2 encodes, 3 decodes (both contributions, and what
is published), the outer step, and the downlink's encode, of the same lanes by the same codec.
Rounds and codecs take turns, so that other load on the machine meets both. Processes learn what
to do over pipes; `time.monotonic`, which they share, says when what happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import blake3
import torch

from diloco.allocator import keep_freed_memory
from diloco.bench.syncer.sending_island import SendingIsland, lane_values, write_founding
from diloco.compression.base import to_bytes
from diloco.compression.registry import get_codec
from diloco.compression.warm_up import warm_up
from diloco.errors import DilocoError
from diloco.launch.process.tensor_thread import syncer_workers
from diloco.outer.fragments import Fragment, Plan, TensorSpec, make_plan
from diloco.outer.optimizer import OuterOptimizer
from diloco.protos.control_pb2 import ROLE_ISLAND, Grant
from diloco.report.rows import Column, Requirement
from diloco.syncer.rules import SyncerRules
from diloco.syncer.syncer import Syncer
from diloco.system import usable_cpus
from diloco.transport.contracts import Buffer
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.versions.publication import PublicationRules
from diloco.versions.record import RecordDraft
from diloco.versions.store import FragmentStore
from diloco.versions.version import VersionRecord

_ALONE = "publish: codecs and outer step alone"
_OFF = "publish: store off the clock"
_STORED = "publish: snapshot store"
_RUN = "publish"
_START_S = 0.05
_PATIENCE_S = 300.0
_SYNCER_S = 3600.0
_PARTS = ("encode_ms", "arrive_ms", "merge_ms", "commit_ms", "announce_ms")

PUBLISH_COLUMNS = (
    Column("row", ""),
    *(Column(part, f"{part.removesuffix('_ms')}, ms", ".1f") for part in _PARTS),
    Column("total_ms", "fastest, ms", ".1f"),
    Column("median_ms", "median, ms", ".1f"),
    Column("of_codecs", "/alone", ".2f"),
    Column("cpu_ms", "CPU, ms", ".0f"),
)


@dataclass(frozen=True, slots=True)
class PublishSetting:
    """What is measured, which all processes agree on.

    Attributes:
        numel: Parameters of the one fragment.
        codec: Up and down.
        num_islands: That contribute.
        num_rounds: Of each kind, of which the fastest counts.
        bar: Submit to published, store off the clock, over codecs and outer step alone.
    """

    numel: int = 25_000_000
    codec: str = "int4"
    num_islands: int = 2
    num_rounds: int = 15
    bar: float = 1.5

    @property
    def islands(self) -> tuple[str, ...]:
        """Their names, sorted."""
        return tuple(f"island-{number}" for number in range(self.num_islands))

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
        optimizer = OuterOptimizer("nesterov", 0.7, 0.9, 0)
        return PublicationRules(self.codec, self.codec, optimizer, seed=1)


@dataclass(frozen=True, slots=True)
class SentTimes:
    """When an island did what in one round, seconds of the shared clock, and its CPU seconds."""

    began: float
    encoded: float
    acknowledged: float
    published: float
    cpu_s: float


def measure_publish(
    setting: PublishSetting, on_round: Callable[[int, int], None]
) -> tuple[list[dict[str, Any]], list[Requirement]]:
    """Measure rounds with the store and without; `on_round` gets rounds done, and in all.

    Raises:
        DilocoError: If a process fails.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone: list[dict[str, float]] = []
    rounds: dict[str, list[dict[str, float]]] = {_OFF: [], _STORED: []}
    codecs = _Codecs(setting)
    try:
        for row, measured in rounds.items():
            with _running(setting, is_stored=row == _STORED) as under_way:
                under_way.round()  # warms up
                for _ in range(setting.num_rounds):
                    on_round(sum(map(len, rounds.values())), 2 * setting.num_rounds)
                    alone.append(codecs.measure())
                    measured.append(under_way.round())
    finally:
        torch.set_num_threads(num_threads)
    codecs_ms = min(figures["total_ms"] for figures in alone)
    rows = [_row(name, each, codecs_ms) for name, each in ((_ALONE, alone), *rounds.items())]
    what = "submit to published, store off the clock"
    return rows, [Requirement(what, rows[1]["of_codecs"], setting.bar, "of codecs alone")]


def _row(name: str, measured: Sequence[dict[str, float]], codecs_ms: float) -> dict[str, Any]:
    """Give the fastest with its parts, and the median: JSON values, hence `Any`."""
    fastest = min(measured, key=lambda figures: figures["total_ms"])
    return {
        "table": "a round from submit to published, ms",
        "row": name,
        **dict.fromkeys(_PARTS),
        **fastest,
        "median_ms": statistics.median(figures["total_ms"] for figures in measured),
        "of_codecs": fastest["total_ms"] / codecs_ms if codecs_ms else math.nan,
    }


class _Codecs:
    """The arithmetic of a round alone, on one thread, lane by lane."""

    def __init__(self, setting: PublishSetting) -> None:
        self._setting = setting
        self._lanes = [lane_values(lane.numel, lane.lane_id) for lane in setting.fragment.lanes]
        self.measure()  # compiles

    def measure(self) -> dict[str, float]:
        """Milliseconds of each part."""
        codec, optimizer = get_codec(self._setting.codec), self._setting.rules.optimizer
        num_islands = self._setting.num_islands
        spent = dict.fromkeys(("encode_ms", "decode_ms", "outer_step_ms", "downlink_ms"), 0.0)
        for lane in self._lanes:
            theta, momentum = torch.zeros_like(lane), torch.zeros_like(lane)
            with _timing(spent, "encode_ms"):
                for _ in range(num_islands):
                    payload = codec.encode(lane)
            with _timing(spent, "decode_ms"):
                for _ in range(num_islands + 1):
                    codec.decode(payload, len(lane))
            with _timing(spent, "outer_step_ms"):
                optimizer.step_(theta, momentum, lane, version=1)
            with _timing(spent, "downlink_ms"):
                codec.encode(theta)
        total_ms = sum(spent.values())
        merge_ms = total_ms - spent["encode_ms"]
        return {**spent, "merge_ms": merge_ms, "total_ms": total_ms, "cpu_ms": total_ms}


@contextlib.contextmanager
def _timing(spent: dict[str, float], part: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    spent[part] += 1e3 * (time.perf_counter() - began)


class _RoundsUnderWay:
    """A syncer and its islands, which wait at the other ends of pipes."""

    def __init__(self, syncing: Connection, islands: Sequence[Connection]) -> None:
        self._syncing = syncing
        self._islands = islands
        self._spent = self._ask()

    def round(self) -> dict[str, float]:
        """Have every island contribute once; milliseconds of each part, one after the other."""
        begin = time.monotonic() + _START_S
        for pipe in self._islands:
            pipe.send(begin)
        sent: list[SentTimes] = [_receive(pipe) for pipe in self._islands]
        before, self._spent = self._spent, self._ask()
        merge_s, commit_s, cpu_s = (a - b for a, b in zip(self._spent, before, strict=True))
        first = min(island.began for island in sent)
        encoded = max(island.encoded for island in sent)
        arrived = max(island.acknowledged for island in sent)
        total_s = max(island.published for island in sent) - first
        announce_s = total_s - (arrived - first) - merge_s - commit_s
        parts = {
            "encode_ms": encoded - first,
            "arrive_ms": arrived - encoded,
            "merge_ms": merge_s,
            "commit_ms": commit_s,
            "announce_ms": announce_s,
            "total_ms": total_s,
            "cpu_ms": cpu_s + sum(island.cpu_s for island in sent),
        }
        return {part: 1e3 * seconds for part, seconds in parts.items()}

    def _ask(self) -> tuple[float, float, float]:
        self._syncing.send(True)
        spent: tuple[float, float, float] = _receive(self._syncing)
        return spent


@contextlib.contextmanager
def _running(setting: PublishSetting, *, is_stored: bool) -> Iterator[_RoundsUnderWay]:
    """Start all processes; none of them outlives the context."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:

        def start(target: Callable[..., None], *arguments: object) -> Connection:
            here, there = context.Pipe()
            process = context.Process(target=target, args=(there, *arguments), daemon=True)
            process.start()
            there.close()
            stack.callback(here.close)
            stack.callback(process.join)
            stack.callback(process.kill)
            return here

        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="diloco-publish-"))
        syncing = start(syncer, setting, Path(place), is_stored)
        address = _receive(syncing)
        islands = [start(island, setting, name, address) for name in setting.islands]
        for pipe in islands:
            _receive(pipe)
        yield _RoundsUnderWay(syncing, islands)


def _receive(pipe: Connection) -> Any:
    """Return what a process says, hence `Any`.

    Raises:
        DilocoError: If it has ended or says nothing for minutes.
    """
    try:
        if pipe.poll(_PATIENCE_S):
            return pipe.recv()
    except EOFError:
        raise DilocoError("a process of the bench ended; what it said is above") from None
    raise DilocoError(f"a process of the bench said nothing for {_PATIENCE_S:g} s")


# -- the processes ---------------------------------------------------------------------------------


def syncer(pipe: Connection, setting: PublishSetting, directory: Path, is_stored: bool) -> None:
    """Serve one fragment; the pipe gets the address, then sums of seconds whenever it asks."""
    keep_freed_memory()
    torch.set_num_threads(1)
    write_founding(directory, setting.fragment)
    asyncio.run(_serve(pipe, setting, directory, is_stored))


async def _serve(
    pipe: Connection, setting: PublishSetting, directory: Path, is_stored: bool
) -> None:
    store = FragmentStore if is_stored else _UnwrittenStore
    with syncer_workers(usable_cpus()) as workers:
        serving = Syncer(
            setting.plan,
            SyncerRules(0, setting.islands, setting.rules, _SYNCER_S, 1),
            [store(directory, setting.fragment, 1)],
            syncer_epoch=1,
            incarnations=_NoIncarnations(),
            is_granted=lambda grant: grant.run == _RUN,
            workers=workers,
            on_record=lambda header: None,
            on_change=lambda: None,
        )
        await serving.start()
        await workers.notes.run(lambda: warm_up(setting.plan, (setting.codec, setting.codec)))
        server = GrpcServer("127.0.0.1:0", serving.handlers)
        await server.start()
        pipe.send(server.address)
        with ThreadPoolExecutor(1) as asking:
            loop = asyncio.get_running_loop()
            while await loop.run_in_executor(asking, pipe.recv):
                counts = serving.meter.counts
                spent = counts.merges[0].sum_s, counts.commits[0].sum_s, time.process_time()
                pipe.send(spent)


def island(pipe: Connection, setting: PublishSetting, name: str, address: str) -> None:
    """Contribute to as many rounds as the pipe has times for, each the begin of one."""
    torch.set_num_threads(1)
    asyncio.run(_contribute(pipe, setting, name, address))


async def _contribute(pipe: Connection, setting: PublishSetting, name: str, address: str) -> None:
    codec, lanes = get_codec(setting.codec), setting.fragment.lanes
    seed = setting.islands.index(name)
    values = [lane_values(lane.numel, seed * len(lanes) + lane.lane_id) for lane in lanes]
    for lane in values:
        codec.encode(lane)  # compiles
    grant = Grant(run=_RUN, island=name, incarnation=1, roles=[ROLE_ISLAND])
    here = SendingIsland(GrpcTransport(address), grant, setting.fragment, setting.codec)
    await here.join()
    await here.published(0)
    pipe.send("joined")
    version = 0
    while True:
        begin = pipe.recv()
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
        pipe.send(SentTimes(began, encoded, acknowledged, published, cpu_s))
        version += 1


class _NoIncarnations:
    """Nothing outlives this syncer."""

    def load(self) -> dict[str, int]:
        return {}

    def store(self, incarnations: dict[str, int]) -> None:
        pass


class _UnwrittenStore(FragmentStore):
    """Takes every version for durable at once: what writing costs is off the clock."""

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
