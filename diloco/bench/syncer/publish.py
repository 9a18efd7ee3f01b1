"""From submit to published: how long a round takes at the syncer beside the arithmetic it needs.

Two islands and a syncer, a process each, over loopback without shaping. The clock starts when the
islands begin to encode, lane by lane, and stops when the last of them hears that the next version
is published. Beside it, alone on one thread: 2 encodes, 3 decodes (both contributions, and what
is published), the outer step, and the downlink's encode, of the same lanes by the same codec.
Rounds and codecs take turns, so that other load on the machine meets both.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from diloco.bench.syncer.publish_process import Sent, Work, island, lane_values, syncer
from diloco.compression.registry import get_codec
from diloco.errors import DilocoError
from diloco.report.rows import Column, Report, Requirement, usable_cpus

_ALONE = "codecs and outer step alone"
_OFF = "submit to published, store off the clock"
_STORED = "submit to published, snapshot store"
_START_S = 0.05
_PATIENCE_S = 300.0
_MILLI = 1e3


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured.

    Attributes:
        numel: Parameters of the fragment.
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


SETTING = Setting()

_COLUMNS = (
    Column("row", ""),
    Column("encode_ms", "encode", ".1f"),
    Column("arrive_ms", "arrive", ".1f"),
    Column("merge_ms", "merge", ".1f"),
    Column("commit_ms", "commit", ".1f"),
    Column("announce_ms", "announce", ".1f"),
    Column("total_ms", "fastest, ms", ".1f"),
    Column("median_ms", "median, ms", ".1f"),
    Column("of_codecs", "/alone", ".2f"),
    Column("cpu_ms", "CPU, ms", ".0f"),
)


def run_publish(setting: Setting, on_progress: Callable[[int, int], None]) -> Report:
    """Measure both rows; `on_progress` hears of rounds done and of rounds in all.

    Raises:
        DilocoError: If a process fails.
    """
    began = time.monotonic()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    total = 2 * setting.num_rounds
    alone: list[dict[str, float]] = []
    rounds: dict[str, list[dict[str, float]]] = {_OFF: [], _STORED: []}
    work = Work(
        setting.numel,
        setting.codec,
        tuple(f"island-{i}" for i in range(setting.num_islands)),
        usable_cpus(),
        is_stored=False,
    )
    codecs = _Codecs(work)
    try:
        for row, is_stored in ((_OFF, False), (_STORED, True)):
            with _running(
                Work(work.numel, work.codec, work.islands, work.num_threads, is_stored)
            ) as run:
                run.round()  # warms up
                for _ in range(setting.num_rounds):
                    on_progress(sum(map(len, rounds.values())), total)
                    alone.append(codecs.measure())
                    rounds[row].append(run.round())
        on_progress(total, total)
    finally:
        torch.set_num_threads(num_threads)
    codecs_ms = min(figures["total_ms"] for figures in alone)
    rows = [_row(_ALONE, alone, codecs_ms), *(_row(n, r, codecs_ms) for n, r in rounds.items())]
    return Report(
        "publish",
        {**asdict(setting), "lanes": len(work.fragment.lanes), "threads": work.num_threads},
        _COLUMNS,
        rows,
        [Requirement(_OFF, rows[1]["of_codecs"], setting.bar, "of codecs alone")],
        time.monotonic() - began,
    )


def _row(name: str, measured: Sequence[dict[str, float]], codecs_ms: float) -> dict[str, Any]:
    """Give the fastest with its parts, and the median: JSON values, hence `Any`."""
    fastest = min(measured, key=lambda figures: figures["total_ms"])
    median = statistics.median(figures["total_ms"] for figures in measured)
    parts = dict.fromkeys((column.key for column in _COLUMNS[1:6]), None)
    return {
        "row": name,
        **parts,
        **fastest,
        "median_ms": median,
        "of_codecs": fastest["total_ms"] / codecs_ms if codecs_ms else math.nan,
    }


class _Codecs:
    """The arithmetic of a round alone, on one thread, lane by lane."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._lanes = [lane_values(lane.numel, lane.lane_id) for lane in work.fragment.lanes]
        self.measure()  # compiles

    def measure(self) -> dict[str, float]:
        """Milliseconds of each part."""
        codec, optimizer = get_codec(self._work.codec), self._work.rules.optimizer
        num_islands = len(self._work.islands)
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
    spent[part] += _MILLI * (time.perf_counter() - began)


class _Run:
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
        sent: list[Sent] = [_hear(pipe) for pipe in self._islands]
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
        return {part: _MILLI * seconds for part, seconds in parts.items()}

    def _ask(self) -> tuple[float, float, float]:
        self._syncing.send(True)
        spent: tuple[float, float, float] = _hear(self._syncing)
        return spent


@contextlib.contextmanager
def _running(work: Work) -> Iterator[_Run]:
    """Start all processes and found version 0; none of them outlives the context."""
    context = multiprocessing.get_context("spawn")
    processes = []
    pipes = []

    def start(target: Callable[..., None], *arguments: object) -> Connection:
        here, there = context.Pipe()
        process = context.Process(target=target, args=(there, *arguments), daemon=True)
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
        return here

    try:
        syncing = start(syncer, work)
        address = _hear(syncing)
        islands = [start(island, work, name, address) for name in work.islands]
        for pipe in islands:
            _hear(pipe)
        for number, pipe in enumerate(islands):
            pipe.send("" if number else "found")
        for pipe in islands:
            _hear(pipe)
        yield _Run(syncing, islands)
        for pipe in islands:
            pipe.send(None)
        syncing.send(False)
        for process in processes:
            process.join(_PATIENCE_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _hear(pipe: Connection) -> Any:
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
