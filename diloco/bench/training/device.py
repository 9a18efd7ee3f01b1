"""Counts what a training thread waits for its accelerator in inner steps, sends and merges.

Real trainers, sessions, coordinator and syncer, on ranks joined by gloo, under `DeviceCounter`,
whose docstring says what counts and what it cannot see. A figure is the largest of a row's sections
and ranks; bytes are the sum over the ranks. Sections of the first round are left out, because
memory may be taken then; rooms for two sends at once are taken beforehand. What other threads copy,
the IO thread's and the one that computes, is a row for the whole run up to its flush, which is
published in float32: nobody waits for it.

A counted device has no memory of its own that could be full, so that a mode says where lanes are
kept. On the device nothing but coded bytes crosses the bus. On the host ("on host") float32 values
do, too, without anybody waiting, counted apart ("uncoded"): anchors up for a send, and down and up
for a merge; with error feedback residuals up and down.

A checkpoint, and a copy of the inner state in memory, is what a rank's loop calls for it. The first
of each takes the room that all use: new storage is that of later ones.
"""

from __future__ import annotations

import functools
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import diloco
from diloco.bench.processes import run_jobs
from diloco.bench.run_values import ISLAND, NO_OUTER, run_values
from diloco.bench.syncer.control_plane import control_plane
from diloco.bench.training.device_counter import DeviceCounter, DeviceCounts
from diloco.checkpoint.host_memory import HostMemory
from diloco.checkpoint.island_checkpoints import IslandCheckpoints
from diloco.checkpoint.memory_copies import MemoryCopies
from diloco.config.load import resolved_toml
from diloco.config.schema import Config
from diloco.data.open import open_data
from diloco.device_thread import DeviceThread
from diloco.island.connection import Connection
from diloco.island.lanes.boxes import stored, whole_shape
from diloco.island.lanes.place import LanePlace
from diloco.island.lanes.shards import LaneShards
from diloco.report.rows import Column, Report, Requirement, Watch, matching
from diloco.telemetry.events import (
    CheckpointFailed,
    Event,
    FragmentMerged,
    FragmentSent,
    MemoryCopyFailed,
    PhaseDone,
)
from diloco.trainer.island_trainer import island_trainer, own_batches
from diloco.trainer.launched_step import LaunchedStep
from diloco.trainer.parallel.mesh import make_mesh
from diloco.trainer.state import MOMENTS, kept_tensors

_DEVICE = torch.device("cpu")
#: "both": a merge and then a send after one inner step, as they happen where no island waits.
OPERATIONS = ("step", "idle", "send", "merge", "both", "exchange", "checkpoint", "copy")
#: Steps of the trainer that are not counted: state and groups are made then.
_WARM_STEPS = 2
_MOST_BYTES = 0.6
#: Of the state that is copied: besides it, the age of the moments; and of a lane.
_MOST_DOWN, _MOST_NEW = 1.001, 0.01
#: Seconds a step until the coordinator asks for a cut, or the run would be over before that.
_CUT_S = 0.2
_ON_HOST = " on host"
_OUTER: Mapping[str, Mapping[str, Any]] = {
    "scheduled": {"preset": "streaming"},
    "decoupled": {"preset": "decoupled"},
    "since send": {"preset": "streaming", "local_mix": "since_send", "error_feedback": True},
}

_COLUMNS = (
    Column("operation", "operation"),
    Column("layout", "layout"),
    Column("mode", "mode"),
    Column("syncs", "syncs"),
    Column("sync_copies", "sync copies"),
    Column("late_waits", "late waits"),
    Column("down", "bytes down", ",.0f"),
    Column("up", "bytes up", ",.0f"),
    Column("down_per_state", "down/state", ".3f"),
    Column("down_per_value", "down/value", ".2f"),
    Column("up_per_value", "up/value", ".2f"),
    Column("uncoded_down", "uncoded down", ".2f"),
    Column("uncoded_up", "uncoded up", ".2f"),
    Column("new_per_lane", "new/lane", ".2f"),
    Column("launches", "launches"),
)


@dataclass(frozen=True, slots=True)
class DeviceSetting:
    """What is trained and how it is synchronised.

    Attributes:
        layouts: Name -> mesh of the island.
        synchronised: Mode -> those of the layouts whose sends and merges are counted; one that ends
            in "on host" has its lanes there.
        checkpoint_steps: Inner steps between checkpoints; decoupled, tokens of so many.
        copy_steps: Inner steps between copies of the inner state in memory.
    """

    layouts: Mapping[str, Mapping[str, int]] = field(
        default_factory=lambda: {
            "one": {},
            "fsdp-2": {"dp_shard": 2},
            "tp-2": {"tp": 2},
            "fsdp-tp-4": {"dp_shard": 2, "tp": 2},
        }
    )
    synchronised: Mapping[str, Sequence[str]] = field(
        default_factory=lambda: {
            "scheduled": ("one", "fsdp-2", "tp-2", "fsdp-tp-4"),
            "decoupled": ("one", "fsdp-2", "tp-2", "fsdp-tp-4"),
            "since send": ("fsdp-2",),
            "scheduled on host": ("one", "fsdp-2"),
            "decoupled on host": ("fsdp-2",),
            "since send on host": ("fsdp-2",),
        }
    )
    inner_steps: int = 40
    inner_steps_per_round: int = 8
    checkpoint_steps: int = 10
    copy_steps: int = 9
    sequences: int = 4
    model: Mapping[str, int] = field(
        default_factory=lambda: {
            "dim": 64,
            "num_layers": 2,
            "num_heads": 2,
            "num_kv_heads": 2,
            "ffn_dim": 192,
        }
    )


SETTING = DeviceSetting()


@dataclass(frozen=True, slots=True)
class Section:
    """What one rank did between two points of its loop.

    Attributes:
        operation: Of `OPERATIONS`.
        counts: What was counted.
        num_sent: Values of the fragments that were sent.
        num_merged: Of those that were merged; of other threads, staged.
        lane_bytes: Of the largest lane of the run in float32; 0: there is no outer loop, it is
            other threads', or memory may be taken.
        state_bytes: That have to be copied to the host; summed over the ranks.
    """

    operation: str
    counts: DeviceCounts
    num_sent: int = 0
    num_merged: int = 0
    lane_bytes: int = 0
    state_bytes: int = 0


def run(watch: Watch, rows: Sequence[str] = (), *, setting: DeviceSetting = SETTING) -> Report:
    """Train, count and judge.

    Args:
        watch: See `Watch`.
        rows: Operations, with `*` and `?`; none of them: all.
        setting: What is trained.

    Raises:
        ConfigError: If a pattern matches no operation.
        DilocoError: If coordinator, syncer or island fail.
    """
    wanted = matching(OPERATIONS, rows, what="operation")
    runs = [("", name) for name in setting.layouts if "step" in wanted]
    if set(wanted) != {"step"}:
        runs += [(mode, name) for mode, names in setting.synchronised.items() for name in names]
    found: list[dict[str, Any]] = []
    for (mode, layout), ranks in zip(runs, _measure(setting, runs, watch), strict=True):
        found += [row for row in figures(mode, layout, ranks) if row["operation"] in wanted]
    found.sort(key=lambda row: OPERATIONS.index(row["operation"]))
    return Report("device", asdict(setting), _COLUMNS, found, requirements(found))


def figures(mode: str, layout: str, ranks: Sequence[Sequence[Section]]) -> list[dict[str, Any]]:
    """Compute the rows of one run: JSON values by name.

    Args:
        mode: Of the setting; empty: without an outer loop.
        layout: Of the island.
        ranks: Sections of each rank, in the same order on all.
    """
    by_operation: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for sections in zip(*ranks, strict=True):
        first, counts = sections[0], [section.counts for section in sections]
        # Only what other threads have staged may differ between ranks, by a version.
        num_merged = sum(section.num_merged for section in sections) / len(sections)
        down, up = (sum(getattr(c, f"bytes_{way}") for c in counts) for way in ("down", "up"))
        values = {way: sum(getattr(c, f"values_{way}") for c in counts) for way in ("down", "up")}
        num_moved = first.num_sent or num_merged
        state_bytes = sum(section.state_bytes for section in sections)
        by_operation[first.operation].append(
            {
                **{
                    key: max(getattr(each, key) for each in counts)
                    if first.operation != "exchange"
                    else None
                    for key in ("syncs", "sync_copies", "late_waits", "launches")
                },
                "down": down,
                "up": up,
                "down_per_state": down / state_bytes if state_bytes else None,
                "down_per_value": (down - values["down"]) / first.num_sent
                if first.num_sent
                else None,
                "up_per_value": (up - values["up"]) / num_merged if num_merged else None,
                **{
                    f"uncoded_{way}": num_bytes / num_moved if num_moved else None
                    for way, num_bytes in values.items()
                },
                "new_per_lane": max(each.largest_bytes for each in counts) / first.lane_bytes
                if first.lane_bytes
                else None,
            }
        )
    return [
        {
            "operation": operation,
            "layout": layout,
            "mode": mode or "any",
            "num_sections": len(each),
            **{key: max((one[key] for one in each if one[key] is not None), default=None)
               for key in each[0]},
        }
        for operation, each in by_operation.items()
    ]  # fmt: skip


def requirements(rows: Sequence[Mapping[str, Any]]) -> list[Requirement]:
    """Judge the worst row of each operation that has happened."""
    bars = {"syncs": (0.0, "synchronisations"), "sync_copies": (0.0, "synchronous copies")}
    of_states = {"down_per_state": (_MOST_DOWN, "of the state, to the host")}
    of_fragments = {
        "down_per_value": (_MOST_BYTES, "bytes a value, to the host"),
        "up_per_value": (_MOST_BYTES, "bytes a value, to the device"),
        "uncoded_down": (0.0, "bytes of float32 a value, to the host"),
        "uncoded_up": (0.0, "bytes of float32 a value, to the device"),
        "new_per_lane": (1.0, "largest new storage, in lanes"),
    }
    found = []
    for operation in OPERATIONS:
        own = [row for row in rows if row["operation"] == operation]
        if not own:
            continue
        limits = {**bars, **of_states, **of_fragments}
        if operation == "step":
            limits["late_waits"] = 1.0, "waits for the step before"
        if own[0]["down_per_state"] is not None:
            limits["new_per_lane"] = _MOST_NEW, "largest new storage, in lanes"
        for key, (limit, unit) in limits.items():
            is_coded = key.startswith("uncoded")
            counted = [
                row
                for row in own
                if row[key] is not None and not (is_coded and row["mode"].endswith(_ON_HOST))
            ]
            if not counted:
                continue
            worst = max(counted, key=lambda row: row[key])
            at = f"{operation}, {worst['layout']}, {worst['mode']}"
            found.append(Requirement(at, worst[key], limit, unit))
    return found


def _measure(
    setting: DeviceSetting, runs: Sequence[tuple[str, str]], watch: Watch
) -> list[list[list[Section]]]:
    """Make all runs, one after the other in the same processes; gives sections by run and rank."""
    with tempfile.TemporaryDirectory(prefix="diloco-device-") as directory, ExitStack() as serving:
        prepared, most_ranks = [], 0
        for number, (mode, layout) in enumerate(runs):
            watch("starts", number, len(runs))
            config = config_of(setting, mode, layout, f"{directory}/{number}-state")
            run_file = Path(directory, f"{number}.toml")
            run_file.write_text(resolved_toml(config), encoding="utf-8")
            if mode:
                serving.enter_context(control_plane(config))
            prepared.append(run_file)
            most_ranks = max(most_ranks, config.islands[ISLAND].ranks)
        work = functools.partial(measure, prepared, [mode for mode, _ in runs], setting)
        jobs = {rank: functools.partial(work, rank) for rank in range(most_ranks)}
        look = functools.partial(watch, "runs", 0, len(runs))
        by_rank = run_jobs(jobs, lambda _: look(), most_ranks).values()
        return [[sections for sections in run if sections] for run in zip(*by_rank, strict=True)]


def config_of(setting: DeviceSetting, mode: str, layout: str, state_dir: str) -> Config:
    """Write the run of an island."""
    mesh = setting.layouts[layout]
    ranks = 1
    for size in mesh.values():
        ranks *= size
    rounds = {
        "num_fragments": 2,
        "inner_steps_per_round": setting.inner_steps_per_round,
        "overlap_steps": 2,  # no step both sends and merges
    }
    tokens, steps = 32 * setting.sequences, setting.checkpoint_steps
    checkpoints = {
        "scheduled": {"every_inner_steps": steps},
        "decoupled": {"every_tokens": steps * tokens},
    }
    plain_mode = mode.removesuffix(_ON_HOST)
    values = run_values(
        "device",
        setting.model,
        {**_OUTER[plain_mode], **rounds} if mode else NO_OUTER,
        inner_steps=setting.inner_steps,
        tokens=tokens,
        island={"ranks": ranks, "mesh": dict(mesh)},
        state_dir=state_dir,
        checkpoint=checkpoints.get(plain_mode, {}),
    )
    return Config.model_validate(values)


# -- a rank, in a process of its own ---------------------------------------------------------------


def measure(
    run_files: Sequence[Path], modes: Sequence[str], setting: DeviceSetting, rank: int
) -> list[list[Section]]:
    """Train as one rank of the only island of several runs, and count.

    Args:
        run_files: The runs; their island is `ISLAND`.
        modes: Of each; empty: it has no outer loop.
        setting: What they were written of.
        rank: Of the island.

    Returns:
        Sections of each run; none where the island has no such rank.
    """
    found: list[list[Section]] = []
    for run_file, mode in zip(run_files, modes, strict=True):
        config = diloco.load_config(run_file, island=ISLAND)
        num_ranks = config.island.ranks
        if rank >= num_ranks:
            found.append([])
            continue
        if num_ranks > 1:
            at = f"file://{run_file.with_suffix('.store')}"
            dist.init_process_group("gloo", at, rank=rank, world_size=num_ranks)
        found.append(_synchronise(config, rank, setting, mode) if mode else _train(config))
        if num_ranks > 1:
            dist.barrier()  # nobody ends while another still needs its connections
            dist.destroy_process_group()
    return found


class _CountedTrainer:
    """A trainer whose inner steps are counted."""

    def __init__(self, config: Config) -> None:
        mesh = make_mesh(torch.device("cpu"), config.island.mesh)
        data = open_data(config)
        self.batches = own_batches(config, data, 0, mesh)
        self.trainer = island_trainer(config, data, self.batches, mesh)
        self.model = self.trainer.model
        self.counter = DeviceCounter()
        self.counter.place([*self.model.parameters(), *self.model.buffers()])
        self._before: LaunchedStep | None = None

    def step(self, inner_step: int, schedule_step: float) -> tuple[LaunchedStep, DeviceCounts]:
        """Launch a step, then read the one before, as a session does on an accelerator."""
        with self.counter.counting() as counts:
            launched = self.trainer.inner_step(inner_step, schedule_step)
            if self._before is not None:
                self._before.read()
        self._before = launched
        return launched, counts


def _train(config: Config) -> list[Section]:
    trainer = _CountedTrainer(config)
    counts = [trainer.step(number, number)[1] for number in range(_WARM_STEPS + 2)]
    return [Section("step", each) for each in counts[_WARM_STEPS:]]


def _synchronise(config: Config, rank: int, setting: DeviceSetting, mode: str) -> list[Section]:
    trainer = _CountedTrainer(config)
    sections, copied = [], _OtherCopies()
    with (
        diloco.connect(config) as connection,
        HostMemory(ISLAND, [rank]) as memory,
        _placed(mode.endswith(_ON_HOST), copied.computing.watch),
    ):
        connection.io.post(copied.answering.watch)
        with trainer.counter.counting():
            outer = diloco.DiLoCo(
                trainer.model, config.outer, transport=connection, on_event=copied.hear
            )
        descriptor = memory.descriptor(rank)
        assert descriptor is not None
        states = _States(trainer, connection, outer, descriptor, setting.copy_steps)
        while not outer.is_over:
            launched, _ = trainer.step(outer.inner_step, outer.schedule_step)
            with trainer.counter.counting() as counts:
                events = outer.step(num_tokens=launched.num_tokens, bound=launched.bound)
            if (section := _section(outer, counts, events)) is not None:
                sections.append(section)
            sections += states.sections()
        states.checkpoints.end_training()
        with trainer.counter.counting():  # else the rooms of its sends would be nobody's
            outer.finish()
        states.checkpoints.close()
    return [*sections, copied.section([fragment.numel for fragment in outer.plan.fragments])]


@contextmanager
def _placed(is_apart: bool, watch: Callable[[], Callable[[], None]]) -> Iterator[None]:
    """Have lanes computed on the counted device by a watched thread, and kept there or not."""
    found, thread = LaneShards.find_room, DeviceThread("lanes")
    end = thread.submit(_DEVICE, watch).result()

    def find_room(shards: LaneShards, num_vectors: int, step_bytes: int) -> None:
        shards.place = LanePlace(_DEVICE, is_apart=is_apart, thread=thread)
        for p in shards._fragments:  # on a busy machine a send begins while another is made
            for lanes in [shards.collect(p) for _ in range(2)]:
                shards.reuse(lanes)

    LaneShards.find_room = find_room  # type: ignore
    try:
        yield
    finally:
        LaneShards.find_room = found  # type: ignore
        thread.submit(_DEVICE, end).result()


class _States:
    """Checkpoints, and copies of the inner state in memory, as a rank makes them."""

    def __init__(
        self,
        trainer: _CountedTrainer,
        connection: Connection,
        outer: diloco.DiLoCo,
        descriptor: int,
        copy_steps: int,
    ) -> None:
        self._counter = trainer.counter
        self._outer = outer
        self._is_cut = connection.config.outer.is_on_arrival
        model, optimizer = trainer.model, trainer.trainer.optimizer
        self._memory = MemoryCopies(
            descriptor,
            model=model,
            optimizer=optimizer,
            about={},
            num_hosts=1,
            copies=1,
            every=copy_steps,
            island=ISLAND,
            on_event=_take_event,
        )
        self._memory.open()
        self.checkpoints = IslandCheckpoints(
            connection,
            outer,
            trainer.trainer,
            trainer.batches,
            memory=self._memory,
            on_event=_take_event,
        )
        self._kept = functools.partial(kept_tensors, model, optimizer)
        self._has_made: set[str] = set()

    def sections(self) -> Iterator[Section]:
        """Make and count what is due after the present inner step."""
        if self._is_cut and "checkpoint" not in self._has_made:
            time.sleep(_CUT_S)
        if self._outer.checkpoint_due:
            yield from self._counted("checkpoint", self.checkpoints.write)
        if self._memory.is_due(self._outer.inner_step):
            yield from self._counted("copy", self.checkpoints.copy)

    def _counted(self, operation: str, work: Callable[[], None]) -> Iterator[Section]:
        with self._counter.counting() as counts:
            work()
        yield Section(
            operation,
            counts,
            lane_bytes=_largest_lane(self._outer) if operation in self._has_made else 0,
            state_bytes=self._state_bytes(operation),
        )
        self._has_made.add(operation)

    def _state_bytes(self, operation: str) -> int:
        """Of a checkpoint the leader tells of the whole; each rank copies what it stores."""
        kept = self._kept()
        if operation == "copy":
            moments = (kept[moment].values() for moment in MOMENTS)
            return sum(stored(values).nbytes for each in moments for values in each)
        if dist.is_initialized() and dist.get_rank():
            return 0
        shapes = (whole_shape(values) for each in kept.values() for values in each.values())
        return 4 * sum(map(math.prod, shapes))


def _take_event(event: Event) -> None:
    assert not isinstance(event, (CheckpointFailed, MemoryCopyFailed)), event


def _largest_lane(outer: diloco.DiLoCo) -> int:
    """Return the bytes of the largest lane in float32."""
    return 4 * max(lane.numel for fragment in outer.plan.fragments for lane in fragment.lanes)


class _OtherCopies:
    """What other threads copy between device and host from the first send to the flush."""

    def __init__(self) -> None:
        self.answering, self.computing = DeviceCounter(), DeviceCounter()
        self._begun: DeviceCounts | None = None  # by when the run was entered: values
        self._counts: DeviceCounts | None = None
        self._sent: list[int] = []
        self._staged: list[int] = []

    def hear(self, event: Event) -> None:
        """Take an event, in whichever thread it happens."""
        if self._counts is not None:
            return
        if isinstance(event, PhaseDone) and event.phase == "gather" and self._begun is None:
            self._begun = self._now()
        elif isinstance(event, PhaseDone) and event.phase == "decode":
            self._staged.append(event.fragment_id)  # lanes so small are decoded together
        elif isinstance(event, FragmentSent):
            self._sent.append(event.fragment_id)
            if event.is_flush:
                self._counts = self._now()

    def _now(self) -> DeviceCounts:
        counters = self.answering, self.computing
        names = [each.name for each in fields(DeviceCounts)]
        return DeviceCounts(
            **{name: sum(getattr(each.counts, name) for each in counters) for name in names}
        )

    def section(self, numels: Sequence[int]) -> Section:
        """Give the counts; `numels` are of the fragments."""
        assert self._counts is not None, "no fragment was sent for a flush"
        assert self._begun is not None
        moved = {
            name: getattr(self._counts, name) - getattr(self._begun, name)
            for name in ("bytes_down", "values_down", "bytes_up", "values_up")
        }
        return Section(
            "exchange",
            DeviceCounts(**moved),
            sum(numels[p] for p in self._sent),
            sum(numels[p] for p in self._staged),
        )


def operation_of(
    events: Sequence[Event],
) -> tuple[str, list[PhaseDone], list[FragmentMerged]]:
    """Say which of `OPERATIONS` a step of the outer loop was; empty: something of the first round.

    Returns:
        The operation, and the events of its sends and of its merges.
    """
    sent = [e for e in events if isinstance(e, PhaseDone) and e.phase == "gather"]
    merged = [e for e in events if isinstance(e, FragmentMerged)]
    if any(e.version < 1 for e in sent) or any(e.version < 2 for e in merged):
        return "", sent, merged
    if sent and merged:
        return "both", sent, merged
    return "send" if sent else "merge" if merged else "idle", sent, merged


def _section(outer: diloco.DiLoCo, counts: DeviceCounts, events: Sequence[Event]) -> Section | None:
    """Say what a step of the outer loop did; None: something of the first round."""
    operation, sent, merged = operation_of(events)
    if operation in ("", "idle"):
        return Section(operation, counts) if operation else None
    fragments = outer.plan.fragments
    return Section(
        operation,
        counts,
        sum(fragments[e.fragment_id].numel for e in sent),
        sum(fragments[e.fragment_id].numel for e in merged),
        _largest_lane(outer),
    )
