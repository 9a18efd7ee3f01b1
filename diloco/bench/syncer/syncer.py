"""How many islands one core serves: a real syncer's CPU time and memory with simulated islands.

The syncer is `python -m diloco.launch.syncer` on one CPU, with a state directory on disk; its
islands, all in this process, send contributions that were encoded beforehand, some islands at a
time, all lanes of one at once, over a connection each. What the syncer spends on a round is all it
does: receive, verify, spool, decode, sum, outer step, encode, write the record, publish. Its CPU
seconds count, so other load on the machine does less harm; memory is the high-water mark of its
resident set. Measured are the rounds after the first, once the syncer has come to rest: it compiles
its codec meanwhile.

In the row of a small spool all islands send at once, and only the syncer bounds what is in memory:
as many bytes as its spool holds may arrive, and a lane that waits for its turn waits at its island,
which has to ask first. In the row of mTLS gRPC's threads encrypt, too: what they take beyond
the same row without it is the cost of TLS.

    extra = peak - idle - state - held - in flight

`idle` is a syncer that all islands have joined; `held` are the coded contributions that the spool
has in memory; `in flight` the lanes that arrive, once each; nothing else may wait in streams. What
a merge makes besides the state is its next published values (a third of the state), one decoded
lane a thread and its sums. The rest is what gRPC reads ahead and, most of all, memory that was
freed and not given back: pages of coded lanes that the merge has let go, too small for vectors.

In the row of a small spool the allocator says of 919 MiB at a peak, 420 above idle, as lanes came:
64 arrived, 64 more were the same lanes as messages that gRPC had put together (a lane is one), 80
had stayed in use since the first round, and 210 were free in pages that were still resident. Giving
these back after each merge left peaks of 877 and 898 MiB, the first of them in a merge; coded lanes
that wait have had pages of their own since, with which peaks were 863 to 887 MiB.

`others` is what a merge costs those that it does not concern: after the measured rounds one more,
and from its close until it is published one island polls and another starts again and again, each
time with a first call that waits for a small durable write of its own. The longest of these calls
counts; no CPU time of theirs does.
The bar, with mTLS and without, is one fragment's state and a quarter.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import itertools
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import blake3

from diloco.bench.run_values import run_values
from diloco.bench.syncer.control_plane import Spent, SyncerProcess, serving
from diloco.bench.syncer.merge_memory import (
    MERGE_MEMORY_COLUMNS,
    MergeMemorySetting,
    measure_merge_memory,
)
from diloco.bench.syncer.publish import PUBLISH_COLUMNS, PublishSetting, measure_publish
from diloco.bench.syncer.sending_island import SendingIsland, lane_values, write_founding
from diloco.compression.base import to_bytes
from diloco.compression.registry import get_codec
from diloco.config.load import resolved_toml
from diloco.config.schema import Config
from diloco.coordinator.grants import load_or_create_secret, sign
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.protos.control_pb2 import ROLE_ISLAND, Grant
from diloco.report.rows import Column, Report, Requirement, Watch, matching
from diloco.security.run_ca import RunCa
from diloco.security.security import Security
from diloco.state_dir import StateDir
from diloco.syncer.spool import LEAST_ARRIVING_BYTES
from diloco.system import require_linux
from diloco.transport.identity import Identity, Role

_RUN = "bench-syncer"
_MIB = 1 << 20
_STATE_BYTES = 12
_LIMITS = {"tensors": "memory", "loop": "Python", "wire": "gRPC", "tls": "TLS"}
_PLAIN, _MTLS, _PUBLISH, _MERGE_MEMORY = "plain", "mTLS", "publish", "merge-memory"
_CERTIFICATE_DAYS = 30  # less than 21 are warned of


@dataclass(frozen=True, slots=True)
class SyncerRow:
    """One size of a run.

    Attributes:
        num_islands: Of the run.
        spool_memory: `coordinator.spool_memory`.
        num_sending: Islands that send at once; 0: all.
        has_tls: Whether islands and syncer show certificates, and everything is encrypted.
    """

    num_islands: int
    spool_memory: str
    num_sending: int
    has_tls: bool = False

    @property
    def name(self) -> str:
        """What --rows chooses by."""
        kind = "" if self.num_sending else "-small-spool"
        return f"{self.num_islands}{kind}{'-tls' if self.has_tls else ''}"


@dataclass(frozen=True, slots=True)
class SyncerSetting:
    """What is measured.

    Attributes:
        numel: Parameters of the one fragment.
        codec: Up and down.
        num_islands: One row for each, and one with mTLS, with the most islands.
        spool_memory: `coordinator.spool_memory` of those rows: all contributions fit.
        small_spool_memory: Of one more row, with the most islands: most of them go to disk, and
            all are sent at once.
        num_sending: Islands that send at once in the others.
        num_rounds: Measured in a row, after one that warms up.
        flatness: CPU time a parameter and island with the most islands, over that with the fewest.
        memory: Peak memory beyond state, contributions and lanes in flight, over one fragment's
            state.
        publish: Of the rows of a round from submit to published.
        merge_memory: Of the rows of memory by merge rule.
    """

    numel: int = 16 << 20
    codec: str = "int4"
    num_islands: tuple[int, ...] = (4, 8, 16, 32, 64)
    spool_memory: str = "1GiB"
    small_spool_memory: str = "64MiB"
    num_sending: int = 8
    num_rounds: int = 3
    flatness: float = 1.2
    memory: float = 1.25
    publish: PublishSetting = field(default_factory=PublishSetting)
    merge_memory: MergeMemorySetting = field(default_factory=MergeMemorySetting)

    @property
    def rows(self) -> list[SyncerRow]:
        """List what is measured; mTLS comes right after the same without it."""
        rows = [SyncerRow(n, self.spool_memory, self.num_sending) for n in self.num_islands]
        most = max(self.num_islands)
        rows.append(SyncerRow(most, self.spool_memory, self.num_sending, has_tls=True))
        return [*rows, SyncerRow(most, self.small_spool_memory, 0)]


SETTING = SyncerSetting()

_COLUMNS = (
    Column("num_islands", "islands"),
    Column("spool_memory", "spool"),
    Column("security", ""),
    Column("at_once", "at once"),
    Column("nanoseconds", "CPU ns", ".2f"),
    Column("millions_per_s", "M/s a core", ".0f"),
    Column("round_s", "round, s", ".2f"),
    Column("others_ms", "others, ms", ".0f"),
    Column("tensors", "tensors", ".0%"),
    Column("loop", "Python", ".0%"),
    Column("wire", "gRPC", ".0%"),
    Column("tls", "TLS", ".0%"),
    Column("kernel", "of it kernel", ".0%"),
    Column("limit", "limit"),
    Column("peak_mib", "peak MiB", ".0f"),
    Column("held_mib", "coded MiB", ".0f"),
    Column("in_flight_mib", "in flight MiB", ".0f"),
    Column("extra_mib", "extra MiB", ".0f"),
    Column("extra_of_state", "/fragment", ".2f"),
)


def run(watch: Watch, rows: Sequence[str] = (), *, setting: SyncerSetting = SETTING) -> Report:
    """Measure all rows whose names match; "publish" and "merge-memory" are tables of their own.

    Raises:
        ConfigError: If this is not Linux, or a pattern matches no row.
        DilocoError: If the syncer does not start, or refuses what it is sent.
    """
    require_linux("diloco bench syncer, which reads /proc of processes,", "measure there")
    wanted = matching([*(row.name for row in setting.rows), _PUBLISH, _MERGE_MEMORY], rows)
    chosen, rounds = [row for row in setting.rows if row.name in wanted], setting.num_rounds + 1
    results: dict[str, dict[str, Any]] = {}
    requirements: list[Requirement] = []
    for number, row in enumerate(chosen):

        def on_round(done: int, before: int = number * rounds) -> None:
            watch("rounds", before + done, len(chosen) * rounds)

        with tempfile.TemporaryDirectory(prefix="diloco-syncer-") as directory:
            plain = results.get(replace(row, has_tls=False).name) if row.has_tls else None
            results[row.name] = _measure(setting, row, plain, Path(directory), on_round)
    fewest, most = (results.get(str(of(setting.num_islands))) for of in (min, max))
    if fewest and most:
        what = f"{most['num_islands']} islands over {fewest['num_islands']}"
        figure = most["nanoseconds"] / fewest["nanoseconds"]
        what = f"CPU time a parameter and island, {what}"
        requirements.append(Requirement(what, figure, setting.flatness, "x"))
    for security in (_PLAIN, _MTLS):
        if extra := [r["extra_of_state"] for r in results.values() if r["security"] == security]:
            what = f"peak memory beyond state, contributions and lanes in flight, {security}"
            unit = "of one fragment's state"
            requirements.append(Requirement(what, max(extra), setting.memory, unit))
    shown = list(results.values())
    if _PUBLISH in wanted:
        published, bars = measure_publish(
            setting.publish, lambda done, total: watch("rounds to publish", done, total)
        )
        shown += published
        requirements += bars
    if _MERGE_MEMORY in wanted:
        by_rule, bars = measure_merge_memory(
            setting.merge_memory, lambda done, total: watch("merges", done, total)
        )
        shown += by_rule
        requirements += bars
    columns = (*_COLUMNS, *PUBLISH_COLUMNS, *MERGE_MEMORY_COLUMNS)
    return Report("syncer", asdict(setting), columns, shown, requirements)


def _measure(
    setting: SyncerSetting,
    row: SyncerRow,
    plain: dict[str, Any] | None,
    directory: Path,
    on_round: Callable[[int], None],
) -> dict[str, Any]:
    """Give one row, of mTLS with what the same took without: JSON values, hence `Any`."""
    names = tuple(f"island-{i:03d}" for i in range(row.num_islands))
    certs = _issue(directory / "certs", names) if row.has_tls else ""
    state = StateDir(directory / "run")
    plan = make_plan([TensorSpec("w", (setting.numel,))], num_fragments=1)
    state.create()
    config = _config(setting, names, str(state.root), row.spool_memory, certs)
    state.resolved.write_text(resolved_toml(config), encoding="utf-8")
    state.plan.write_text(plan.to_json(), encoding="utf-8")
    secret = load_or_create_secret(state.secret)
    fragment = plan.fragments[0]
    codec = get_codec(setting.codec)
    payloads = [
        bytes(to_bytes(codec.encode(lane_values(lane.numel, lane.lane_id))))
        for lane in fragment.lanes
    ]
    write_founding(state.store, fragment)
    with serving(state) as (address, process):

        def start(name: str, incarnation: int = 1) -> SendingIsland:
            grant = Grant(run=_RUN, island=name, incarnation=incarnation, roles=[ROLE_ISLAND])
            transport = _security(certs, name).transport(address, Role.SYNCER)
            return SendingIsland(transport, sign(grant, secret), fragment, setting.codec)

        again = functools.partial(start, names[-1])
        islands = [start(name) for name in names]
        took = asyncio.run(
            _rounds(islands, again, payloads, process, row, setting.num_rounds, on_round)
        )
    coded = sum(map(len, payloads))
    return _figures(setting, row, took, plain, coded, config.coordinator.spool_memory.num_bytes)


@dataclass(frozen=True, slots=True)
class _Took:
    """What all measured rounds of a row took, and the bytes that the syncer had in memory.

    `idle_bytes` are with the state of version 0; `longest_call_s` is that of a call during a
    merge.
    """

    spent: Spent
    wall_s: float
    idle_bytes: int
    peak_bytes: int
    longest_call_s: float


def _figures(
    setting: SyncerSetting,
    row: SyncerRow,
    took: _Took,
    plain: dict[str, Any] | None,
    coded: int,
    spool_bytes: int,
) -> dict[str, Any]:
    """Compute a row's figures: JSON values, hence `Any`.

    Args:
        setting: Of the bench.
        row: What was measured.
        took: By measurement.
        plain: The row of the same without mTLS; None: this one is without.
        coded: Bytes of a contribution.
        spool_bytes: Of coded contributions that stay in memory.
    """
    spent = took.spent
    held = min(row.num_islands * coded, spool_bytes)
    at_once = min(row.num_sending or row.num_islands, row.num_islands)
    in_flight = min(at_once * coded, max(spool_bytes, LEAST_ARRIVING_BYTES))
    fragment_bytes = _STATE_BYTES * setting.numel
    extra = took.peak_bytes - took.idle_bytes - held - in_flight
    tls_s = max(0.0, spent.wire_s - plain["wire_s"]) if plain else 0.0
    parts = {
        "tensors": spent.tensors_s,
        "loop": spent.loop_s,
        "wire": spent.wire_s - tls_s,
        "tls": tls_s,
    }
    shares = {part: seconds / spent.cpu_s for part, seconds in parts.items()}
    served = row.num_islands * setting.numel * setting.num_rounds
    return {
        "table": "a syncer on one core",
        "num_islands": row.num_islands,
        "spool_memory": row.spool_memory,
        "security": _MTLS if row.has_tls else _PLAIN,
        "at_once": at_once,
        "nanoseconds": 1e9 * spent.cpu_s / served,
        "millions_per_s": 1e-6 * served / spent.cpu_s,
        "round_s": took.wall_s / setting.num_rounds,
        "others_ms": 1e3 * took.longest_call_s,
        **shares,
        "wire_s": spent.wire_s,
        "limit": _LIMITS[max(shares, key=lambda part: shares[part])],
        "kernel": spent.kernel_s / spent.cpu_s,
        "baseline_mib": (took.idle_bytes - fragment_bytes) / _MIB,
        "peak_mib": took.peak_bytes / _MIB,
        "held_mib": held / _MIB,
        "in_flight_mib": in_flight / _MIB,
        "extra_mib": extra / _MIB,
        "extra_of_state": extra / fragment_bytes,
    }


async def _rounds(
    islands: Sequence[SendingIsland],
    again: Callable[[int], SendingIsland],
    payloads: Sequence[bytes],
    process: SyncerProcess,
    row: SyncerRow,
    num_rounds: int,
    on_round: Callable[[int], None],
) -> _Took:
    """Warm up, then measure."""
    digests = [blake3.blake3(payload).digest() for payload in payloads]
    sending = asyncio.Semaphore(row.num_sending or row.num_islands)

    async def contribute(island: SendingIsland, version: int) -> None:
        async with sending:
            await island.contribute(version, payloads, digests)

    async def one(version: int) -> None:
        await asyncio.gather(*(contribute(island, version) for island in islands))
        await published(version)

    async def published(version: int) -> None:
        await asyncio.gather(*(island.published(version + 1) for island in islands))
        on_round(version + 1)

    await asyncio.gather(*(island.join() for island in islands))
    idle_bytes = process.resident_bytes()
    await one(0)
    await process.settle()
    process.forget_peak()
    before, began = process.spent(), time.monotonic()
    for version in range(1, num_rounds + 1):
        await one(version)
    spent, wall_s = process.spent() - before, time.monotonic() - began
    peak_bytes = process.peak_bytes()
    last = num_rounds + 1
    await asyncio.gather(*(contribute(island, last) for island in islands))
    longest_s = await _longest_call_s(islands[0], again, islands[0].published(last + 1))
    for island in islands:
        await island.close()
    return _Took(spent, wall_s, idle_bytes, peak_bytes, longest_s)


async def _longest_call_s(
    caller: SendingIsland, again: Callable[[int], SendingIsland], merge: Awaitable[None]
) -> float:
    """Give the longest call, a poll or the first of a start, until a merge is over."""
    merging, longest_s, starts = asyncio.ensure_future(merge), 0.0, itertools.count(2)
    while not merging.done():
        for island in (caller, again(next(starts))):
            began = time.monotonic()
            await island.join()
            longest_s = max(longest_s, time.monotonic() - began)
            if island is not caller:
                await island.close()
    await merging
    return longest_s


def _issue(certs: Path, names: Sequence[str]) -> str:
    """Make an authority, an issuer and certificates of islands; returns their directory."""
    ca = RunCa(certs, lambda: datetime.datetime.now(datetime.UTC))
    ca.create(_RUN, _CERTIFICATE_DAYS)
    for short in ("coordinator", *(f"island/{name}" for name in names)):
        ca.issue(short, _CERTIFICATE_DAYS, again=False)
    return str(certs)


def _security(certs: str, name: str) -> Security:
    """What an island shows, if anything."""
    return Security.open(Identity(_RUN, Role.ISLAND, name), certs=certs) if certs else Security()


def _config(
    setting: SyncerSetting, names: Sequence[str], state_dir: str, spool_memory: str, certs: str
) -> Config:
    outer = {
        "preset": "classic",
        "inner_steps_per_round": 10,
        "uplink_codec": setting.codec,
        "downlink_codec": setting.codec,
        "retained_versions": 1,
        "round_deadline": "600s",
    }
    values = run_values(
        _RUN,
        {"preset": "debug"},
        outer,
        islands=names,
        coordinator={"state_dir": state_dir, "spool_memory": spool_memory},
        transport={"certs": certs},
    )
    return Config.model_validate(values)
