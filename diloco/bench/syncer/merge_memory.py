"""What a merge, its repair and its replay take of memory, by merge rule and contributions.

Each figure is of a process of its own, without the network: the contributions lie in the spool's
files, so that the figure is the state and what the work adds to it. The peak of the resident set
counts, beyond that of a process that has done the same with a small model.
"""

from __future__ import annotations

import functools
import gc
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3

from diloco.allocator import give_back_at_once, give_back_holes
from diloco.bench.processes import run_jobs
from diloco.bench.syncer.control_plane import SyncerProcess
from diloco.bench.syncer.sending_island import lane_values, write_founding
from diloco.compression.base import to_bytes
from diloco.compression.registry import get_codec
from diloco.errors import DilocoError
from diloco.outer.combination import MergeRule
from diloco.outer.fragments import Plan, TensorSpec, make_plan
from diloco.outer.optimizer import OuterOptimizer
from diloco.outer.units import merge_units
from diloco.protocol.rounds.terms import Close, Contributor, RoundKey
from diloco.report.rows import Column, Requirement
from diloco.syncer.merge import Merger
from diloco.syncer.spool import Spool
from diloco.telemetry.syncer_meter import SyncerMeter
from diloco.versions.publication import PublicationRules
from diloco.versions.replay import FragmentReplay
from diloco.versions.store import FragmentStore

_RULES = {
    "mean": MergeRule(),
    "clipped mean": MergeRule(clip_norm_ratio=10.0),
    "radial-directional": MergeRule("radial_directional"),
}
_WORK = ("merge", "repair", "replay")
_TABLE = "memory by merge rule, bytes a parameter"
_NUM_TENSORS = 8
_SMALL_NUMEL = 1 << 17

MERGE_MEMORY_COLUMNS = (
    Column("rule", "rule"),
    Column("contributions", "contributions"),
    *(Column(f"{work}_bytes", work, ".1f") for work in _WORK),
)


@dataclass(frozen=True, slots=True)
class MergeMemorySetting:
    """What is measured.

    Attributes:
        numel: Parameters of the one fragment.
        codec: Up and down.
        contributions: To a round, of each row.
        num_threads: Lanes at once.
        bar: Bytes a parameter with the most contributions, over those with the fewest.
    """

    numel: int = 16 << 20
    codec: str = "int4"
    contributions: tuple[int, ...] = (2, 8, 32, 64)
    num_threads: int = 2
    bar: float = 1.2


def measure_merge_memory(
    setting: MergeMemorySetting, on_row: Callable[[int, int], None]
) -> tuple[list[dict[str, Any]], list[Requirement]]:
    """Measure every rule (rows are JSON values); `on_row` gets rows done, and in all.

    Raises:
        DilocoError: If what was merged is not made again to the bit.
    """
    cells = [(rule, num) for rule in _RULES for num in setting.contributions]
    rows: list[dict[str, Any]] = []
    for done, (rule, num) in enumerate(cells):
        job = functools.partial(_measure, setting, rule, num)
        took = run_jobs({"": job}, functools.partial(_tell, on_row, done, len(cells)), 1)[""]
        row = {f"{work}_bytes": num_bytes / setting.numel for work, num_bytes in took.items()}
        rows.append({"table": _TABLE, "rule": rule, "contributions": num, **row})
    few, many = min(setting.contributions), max(setting.contributions)
    requirements = []
    for rule in _RULES:
        of_rule = {row["contributions"]: row for row in rows if row["rule"] == rule}
        growth = max(of_rule[many][f"{w}_bytes"] / of_rule[few][f"{w}_bytes"] for w in _WORK)
        what = f"memory of {many} contributions over {few}, {rule}"
        requirements.append(Requirement(what, growth, setting.bar, "x"))
    return rows, requirements


def _tell(on_row: Callable[[int, int], None], done: int, total: int, _: int) -> None:
    on_row(done, total)


def _measure(setting: MergeMemorySetting, rule: str, num: int) -> dict[str, int]:
    """Give the bytes of each work of a round, in a process of its own."""
    give_back_at_once()
    with ThreadPoolExecutor(setting.num_threads, "lanes") as lanes:
        _works(setting, _SMALL_NUMEL, rule, num, lanes)  # loads what is loaded once
        return _works(setting, setting.numel, rule, num, lanes)


def _works(
    setting: MergeMemorySetting, numel: int, rule: str, num: int, lanes: ThreadPoolExecutor
) -> dict[str, int]:
    tensors = [TensorSpec(f"w{i}", (numel // _NUM_TENSORS,)) for i in range(_NUM_TENSORS)]
    plan = make_plan(tensors, num_fragments=1)
    with tempfile.TemporaryDirectory(prefix="diloco-merge-") as place:
        works = _Works(setting, plan, _RULES[rule], num, Path(place), lanes)
        return {name: _peak_bytes(getattr(works, name)) for name in _WORK}


def _peak_bytes(work: Callable[[], None]) -> int:
    gc.collect()
    give_back_holes()
    here = SyncerProcess(os.getpid())
    before = here.resident_bytes()
    here.forget_peak()
    work()
    return here.peak_bytes() - before


class _Works:
    """One round in a store, its merge in this process as a syncer's, and what follows from it."""

    def __init__(
        self,
        setting: MergeMemorySetting,
        plan: Plan,
        rule: MergeRule,
        num: int,
        directory: Path,
        lanes: ThreadPoolExecutor,
    ) -> None:
        optimizer = OuterOptimizer("nesterov", 0.7, 0.9, 0)
        self._rules = PublicationRules(setting.codec, setting.codec, optimizer, 1, rule)
        self._plan, self._fragment, self._lanes = plan, plan.fragments[0], lanes
        self._directory, self._num_threads = directory, setting.num_threads
        write_founding(directory, self._fragment)
        spool = Spool(directory / "spool", 0)
        spool.start()
        codec = get_codec(setting.codec)
        self._spooled: dict[str, dict[int, Any]] = {f"island-{m:03d}": {} for m in range(num)}
        for lane in self._fragment.lanes:
            payload = to_bytes(codec.encode(lane_values(lane.numel, lane.lane_id)))
            digest = blake3.blake3(payload).digest()
            for of_lanes in self._spooled.values():
                of_lanes[lane.lane_id] = spool.put(payload, digest)

    @property
    def _store(self) -> FragmentStore:
        return FragmentStore(self._directory, self._fragment, 2, num_threads=self._num_threads)

    def merge(self) -> None:
        """Read version 0, and publish the next."""
        store = self._store
        recovered = store.recover()
        assert recovered is not None
        digests = [
            tuple(of_lanes[lane].digest for lane in sorted(of_lanes))
            for of_lanes in self._spooled.values()
        ]
        close = Close(
            RoundKey(0, 0, 0, 0),
            tuple(
                Contributor(island, 1, 1, 1, 1, digest)
                for island, digest in zip(self._spooled, digests, strict=True)
            ),
            is_flush=False,
        )
        units = merge_units(self._plan, 0)
        meter = SyncerMeter(time.perf_counter)
        merger = Merger(self._fragment, units, store, self._rules, meter, self._lanes)
        merger.publish(recovered.record, close, self._spooled)

    def repair(self) -> None:
        """Make the version again."""
        self._store.make_again(1)

    def replay(self) -> None:
        """Compute it again, coefficients too, and compare."""
        replay = FragmentReplay(self._directory, self._plan, 0)
        for replayed in replay.run(num_threads=self._num_threads):
            if replayed.is_wrong or replayed.is_unknown:
                raise DilocoError(f"version {replayed.version}: {replayed.detail}")
