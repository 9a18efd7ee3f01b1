"""Writes an island's checkpoint: every rank its lanes, then the leader the manifest.

`write` streams tensors: besides what the training holds, a rank needs the memory of one fragment's
lanes. `take` launches a copy of what this rank stores to host memory (`state_copy`), and `save`
collects lanes from the copy and writes them, in a thread of its own: only the first `take` makes
the training threads wait for each other. The room is kept for the next checkpoint.

A disk that is full ends the checkpoint, not the training: the failing rank goes on taking part in
the collectives, so that nobody waits, and then all ranks know. A step that has a checkpoint keeps
it until the new one is whole (`checkpoints`).

`torch.distributed.checkpoint` is not what an island writes: its metadata is a pickle, its files
have no digests, and it has no word for lanes, by which any other layout reads these.

Source: PROTOCOL.md, "Run checkpoints and pins"; the format of safetensors,
https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor

from diloco.checkpoint.checkpoints import (
    FORMAT,
    MANIFEST,
    OUTER,
    PLAN,
    lane_key,
    rank_file,
    step_directory,
)
from diloco.checkpoint.state_copy import StateCopier, StateCopy
from diloco.compression.base import to_bytes
from diloco.device_thread import take_stream
from diloco.durable import make_directory_durably, read_json, write_durably, write_json
from diloco.errors import DilocoError
from diloco.island.lanes.boxes import declare_part, stored, stored_box, whole_shape
from diloco.island.lanes.shards import LaneShards
from diloco.outer.fragments import Plan
from diloco.transport.contracts import Buffer

_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.uint8: "U8"}
_FLOAT32_BYTES = 4
#: Bytes that are copied from a device at once; on the host nothing is copied.
_PIECE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Place of a tensor in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RankPart:
    """One rank's part of a checkpoint: the header of its file, and the bytes, to be walked once.

    Walking is collective on `group`, in which the ranks agree while it is saved.
    """

    header: list[_Tensor]
    pieces: Iterator[Buffer]
    group: dist.ProcessGroup | None
    copied: StateCopy | None = None


class _HostState:
    """What this rank has of the training state, in host memory, as `LaneShards` read it.

    What ranks store alike the first of them has. Moments that the optimizer does not keep are
    zeros, which take no room. Making one is collective on `group`; lanes are collected on
    `lane_group`.
    """

    def __init__(
        self,
        plan: Plan,
        training: Mapping[str, Mapping[str, Tensor]],
        *,
        group: dist.ProcessGroup | None,
        lane_group: dist.ProcessGroup | None,
    ) -> None:
        zeros = {name: _zeros_like(values) for name, values in training["model"].items()}
        shards = LaneShards(plan, zeros, group=group)
        owned = sorted(shards.owned())
        taken = [(s, name) for s, tensors in training.items() for name in owned if name in tensors]
        numels = [zeros[name].numel() for _, name in taken]
        self.room = torch.empty(sum(numels))
        places = zip(taken, torch.split(self.room, numels), strict=True)
        self._places = {
            (section, name): _placed_like(training["model"][name], place.view(zeros[name].shape))
            for (section, name), place in places
        }
        here = {s: {n: self._places.get((s, n), zeros[n]) for n in zeros} for s in training}
        self.shards = {s: shards.over(each, group=lane_group) for s, each in here.items()}

    def pairs(self, training: Mapping[str, Mapping[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Return what this rank stores now, each with its place here."""
        return [(stored(training[s][n]), place) for (s, n), place in self._places.items()]


def _zeros_like(values: Tensor) -> Tensor:
    return _placed_like(values, torch.zeros(()).expand(stored_box(values).sizes))


def _placed_like(values: Tensor, here: Tensor) -> Tensor:
    """Declare a tensor to be the part of the whole that this rank stores of `values`."""
    return declare_part(here, whole_shape(values), stored_box(values).offsets)


class CheckpointWriter:
    """Writes the checkpoints of one start of an island; every rank has one and calls alike.

    Args:
        directory: Of this site's checkpoints; seen by all ranks of the island.
        island: Name of the island.
        plan: Fragments and lanes of the run.
        group: CPU (gloo) group of the island's ranks; None for one rank.
    """

    def __init__(
        self, directory: Path, island: str, plan: Plan, *, group: dist.ProcessGroup | None
    ) -> None:
        """Assign only."""
        self._directory = directory
        self._island = island
        self._plan = plan
        self._group = group
        self._island_rank = 0 if group is None else dist.get_rank(group)
        self._num_ranks = 1 if group is None else dist.get_world_size(group)
        self._host_state: _HostState | None = None

    def write(
        self,
        step: int,
        *,
        training: Mapping[str, Mapping[str, Tensor]],
        outer: Mapping[str, Tensor],
        about: Mapping[str, Any],
        cut: int = 0,
    ) -> int:
        """Write the checkpoint of an inner step; collective.

        Args:
            step: Completed inner steps.
            training: Section -> canonical name -> tensor, from `training_tensors`.
            outer: This rank's `DiLoCo.state_dict()`.
            about: What the manifest says besides the files, JSON values.
            cut: Number of the cut that it is of, which then names it; 0: of none.

        Returns:
            As `save`.

        Raises:
            OSError: As `save`.
        """
        first = LaneShards(self._plan, training["model"], group=self._group)
        shards = {s: first.over(each, group=self._group) for s, each in training.items()}
        return self.save(step, self._part(shards, outer, self._group), about=about, cut=cut)

    def take(
        self,
        training: Mapping[str, Mapping[str, Tensor]],
        outer: Mapping[str, Tensor],
        *,
        copier: StateCopier,
        group: dist.ProcessGroup | None,
    ) -> RankPart:
        """Launch the copy of what this rank writes, for `save`; collective the first time.

        The outer state is not copied: its tensors are replaced and never written to.

        Args:
            training: As for `write`; moments that are not there are zero.
            outer: As for `write`.
            copier: Of the optimizer; one and the same in all calls.
            group: CPU (gloo) group of the thread that saves, with nothing under way in it; one and
                the same in all calls; None for one rank.
        """
        if self._host_state is None:
            self._host_state = _HostState(self._plan, training, group=self._group, lane_group=group)
            copier.pin(self._host_state.room, "copies of its state for checkpoints")
        copied = copier.copy(self._host_state.pairs(training))
        return replace(self._part(self._host_state.shards, outer, group), copied=copied)

    def save(self, step: int, part: RankPart, *, about: Mapping[str, Any], cut: int) -> int:
        """Write a part, once its copy is there; collective on its group.

        Args:
            step: As for `write`.
            part: Of this rank.
            about: As for `write`; of what was copied `optimizer_step` is added.
            cut: As for `write`.

        Returns:
            Bytes of the whole checkpoint. The same step of an earlier time has been replaced.

        Raises:
            OSError: On all ranks, if one of them could not write; what was there before stays.
            DilocoError: On all ranks, if the device of one could not copy; likewise.
        """
        path = step_directory(self._directory, self._island, cut or step, is_cut=cut > 0)
        name = rank_file(self._island_rank, self._num_ranks)
        failure, mine, parts, group = "", {}, "", part.group
        if part.copied is not None:
            try:
                about = {**about, "optimizer_step": part.copied.wait(f"{path}: {name}")}
            except DilocoError as error:
                failure = str(error)
            check_all_ranks(group, failure, error=DilocoError)
        if self._island_rank == 0:
            try:
                make_directory_durably(path)
                parts = _next_parts(path)
            except OSError as error:
                failure = f"{path}: {error.strerror or error}"
        parts = check_all_ranks(group, failure, parts)[0]
        try:
            mine = {name: _write(path / parts / name, part.header, part.pieces)}
        except OSError as error:
            failure = f"{path / parts / name}: {error.strerror or error}"
            for _ in part.pieces:  # the others still collect
                pass
        files: dict[str, dict[str, Any]] = {}
        try:
            for written in check_all_ranks(group, failure, mine):
                files |= written
            if self._island_rank == 0:
                failure = self._complete(path, parts, files, self._manifest(step, cut, about))
            check_all_ranks(group, failure)
        finally:
            if self._island_rank == 0:  # what was replaced, or has failed; else the next write does
                with contextlib.suppress(OSError):
                    _clear(path)
        return sum(file["bytes"] for file in files.values())

    def _complete(
        self, path: Path, parts: str, files: dict[str, Any], manifest: Mapping[str, Any]
    ) -> str:
        """Write the plan, then the manifest, which makes it whole; returns what went wrong."""
        try:
            text = self._plan.to_json().encode()
            write_durably(path / parts / PLAN, [text])
            files[PLAN] = {"bytes": len(text), "blake3": blake3(text).hexdigest()}
            write_json(path / MANIFEST, {**manifest, "parts": parts, "files": files})
        except OSError as error:
            return f"{path}: {error.strerror or error}"
        return ""

    def _part(
        self,
        shards: Mapping[str, LaneShards],
        outer: Mapping[str, Tensor],
        group: dist.ProcessGroup | None,
    ) -> RankPart:
        """Return what the file holds, in order, and the values, which only a full walk collects."""
        header = [
            _Tensor(
                lane_key(section, fragment.fragment_id, lane_id),
                _DTYPES[torch.float32],
                (fragment.lanes[lane_id].numel,),
                _FLOAT32_BYTES * fragment.lanes[lane_id].numel,
            )
            for section, lanes in shards.items()
            for fragment in self._plan.fragments
            for lane_id in lanes.lanes_of(fragment.fragment_id)
        ]
        header += [
            _Tensor(OUTER + name, _DTYPES[value.dtype], tuple(value.shape), value.nbytes)
            for name, value in outer.items()
        ]

        def walk() -> Iterator[Buffer]:
            for lanes in shards.values():
                for fragment in self._plan.fragments:
                    collected = lanes.collect(fragment.fragment_id)
                    for values in collected.values():
                        yield from _pieces(values)
                    lanes.reuse(collected)
                lanes.release()
            for value in outer.values():
                yield from _pieces(value)

        return RankPart(header, walk(), group)

    def _manifest(self, step: int, cut: int, about: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "inner_step": step,
            "cut": cut,
            "island": self._island,
            "plan_fingerprint": self._plan.fingerprint(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            **about,
        }


def check_all_ranks(
    group: dist.ProcessGroup | None,
    failure: str,
    mine: Any = None,
    *,
    error: type[Exception] = OSError,
) -> list[Any]:
    """Gather what every rank has done, or raise on all of them what one met; collective.

    Args:
        group: CPU (gloo) group of the island's ranks; None for one rank.
        failure: What this rank met; empty if all is well.
        mine: What this rank brings, to be pickled.
        error: What is raised.

    Returns:
        What each rank brought.

    Raises:
        error: On all ranks; of ranks that met the same, the first is named.
    """
    words: list[Any] = [(failure, mine)]
    if group is not None:
        words = [None] * dist.get_world_size(group)
        dist.all_gather_object(words, (failure, mine), group=group)
    met: dict[str, int] = {}
    for rank, (text, _) in enumerate(words):
        met.setdefault(text, rank)
    if failures := [f"rank {rank}: {text}" for text, rank in met.items() if text]:
        raise error("; ".join(failures))
    return [word[1] for word in words]


def _next_parts(path: Path) -> str:
    """Make the directory that the files of the next write go into; returns its name."""
    _clear(path)
    numbers = [int(other.name.removeprefix("parts-")) for other in path.glob("parts-*")]
    parts = f"parts-{max(numbers, default=0) + 1:04d}"
    make_directory_durably(path / parts)
    return parts


def _clear(path: Path) -> None:
    """Remove what no manifest names: files of a writer that was killed, and what was replaced.

    Raises:
        OSError: If it cannot be read what the manifest names: then nothing was removed.
    """
    named = ""
    with contextlib.suppress(ValueError, KeyError, TypeError):  # there is none, or it is damaged
        named = (read_json(path / MANIFEST) or {})["parts"]
    for parts in path.glob("parts-*"):
        if parts.name != named:
            shutil.rmtree(parts)


def _write(path: Path, header: list[_Tensor], pieces: Iterator[Buffer]) -> dict[str, Any]:
    """Write a file of safetensors durably; return its size and digest."""
    listed: dict[str, Any] = {}
    offset = 0
    for tensor in header:
        listed[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (offset, offset + tensor.num_bytes),
        }
        offset += tensor.num_bytes
    text = json.dumps(listed, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    hasher = blake3()

    def hashed() -> Iterator[Buffer]:
        head = struct.pack("<Q", len(text)) + text
        hasher.update(head)
        yield head
        for piece in pieces:
            hasher.update(piece)
            yield piece

    write_durably(path, hashed())
    return {"bytes": 8 + len(text) + offset, "blake3": hasher.hexdigest()}


def _pieces(values: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of values, piece by piece: what a device copies stays pinned for good."""
    flat = values.detach().contiguous().view(-1).view(torch.uint8)
    yield from map(to_bytes, torch.split(flat, _PIECE_BYTES))


_T = TypeVar("_T")

#: Seconds that a rank waits for the others' disks; one that died is noticed at once.
_SLOWEST_DISK_S = 7200.0


class SaveThread:
    """Runs what it is given behind the training thread, to which everything here belongs.

    Args:
        device: Of the training; jobs use a stream of their own there.
    """

    def __init__(self, device: torch.device) -> None:
        """Assign only."""
        self._device = device
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of the jobs, None on an island of one rank; collective the first time."""
        if self._group is None and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_SLOWEST_DISK_S))
        return self._group

    def start(self, job: Callable[[], object]) -> None:
        """Begin a job, once the one before has ended.

        Raises:
            BaseException: What the job before has raised.
        """
        self.settle()

        def run() -> None:
            try:
                take_stream(self._device)
                job()
            except BaseException as error:  # raised in the training thread
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], _T]) -> _T:
        """Do a job and wait for it, however long the disk of any rank takes.

        Raises:
            BaseException: What it has raised.
        """
        done: list[_T] = []
        self.start(lambda: done.append(job()))
        self.settle()
        return done[0]

    @property
    def is_busy(self) -> bool:
        """Whether a job is under way."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise what the last job has raised, if it has ended; waits for nothing."""
        if not self.is_busy:
            self.settle()

    def settle(self) -> None:
        """Wait for the job that is under way.

        Raises:
            BaseException: What it has raised.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
