"""Writes an island's checkpoint: every rank its lanes, then the leader the manifest.

`write` streams tensors: besides what the training holds, a rank needs the memory of one lane.
`take` copies them to host memory, and `save` writes the copy, in another thread if one likes. A
disk that is full ends the checkpoint, not the training: the failing rank goes on taking part in the
collectives, so that nobody waits, and then all ranks know. A step that has a checkpoint keeps it
until the new one is whole (`checkpoints`).

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
from dataclasses import dataclass
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
from diloco.compression.base import to_bytes
from diloco.durable import make_directory_durably, read_json, write_durably, write_json
from diloco.island.lanes.shards import LaneShards
from diloco.outer.fragments import Plan
from diloco.transport.contracts import Buffer

_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.uint8: "U8"}
_FLOAT32_BYTES = 4


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

    Walking is collective unless they were copied.
    """

    header: list[_Tensor]
    pieces: Iterator[Buffer]


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
        part = self._part(training, outer)
        return self.save(step, part, about=about, cut=cut, group=self._group)

    def take(
        self, training: Mapping[str, Mapping[str, Tensor]], outer: Mapping[str, Tensor]
    ) -> RankPart:
        """Copy to host memory what this rank writes, for `save`; collective.

        The outer state is not copied: its tensors are replaced and never written to.

        Args:
            training: As for `write`.
            outer: As for `write`.
        """
        part = self._part(training, outer)
        return RankPart(part.header, iter(list(part.pieces)))

    def save(
        self,
        step: int,
        part: RankPart,
        *,
        about: Mapping[str, Any],
        cut: int,
        group: dist.ProcessGroup | None,
    ) -> int:
        """Write what was taken; collective on `group`.

        Args:
            step: As for `write`.
            part: Of this rank.
            about: As for `write`.
            cut: As for `write`.
            group: CPU (gloo) group in which the ranks agree, used by nobody else meanwhile.

        Returns:
            Bytes of the whole checkpoint. The same step of an earlier time has been replaced.

        Raises:
            OSError: On all ranks, if one of them could not write; what was there before stays.
        """
        path = step_directory(self._directory, self._island, cut or step, is_cut=cut > 0)
        failure, mine, parts = "", {}, ""
        if self._island_rank == 0:
            try:
                make_directory_durably(path)
                parts = _next_parts(path)
            except OSError as error:
                failure = f"{path}: {error.strerror or error}"
        parts = check_all_ranks(group, failure, parts)[0]
        name = rank_file(self._island_rank, self._num_ranks)
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
        self, training: Mapping[str, Mapping[str, Tensor]], outer: Mapping[str, Tensor]
    ) -> RankPart:
        """Return what the file holds, in order, and the values, which only a full walk collects."""
        shards = {
            section: LaneShards(self._plan, tensors, group=self._group)
            for section, tensors in training.items()
        }
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
                    for values in lanes.collect(fragment.fragment_id).values():
                        yield _bytes(values)
            for value in outer.values():
                yield _bytes(value)

        return RankPart(header, walk())

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


def _bytes(values: Tensor) -> memoryview:
    return to_bytes(values.detach().contiguous().view(-1).view(torch.uint8))


_T = TypeVar("_T")

#: Seconds that a rank waits for the others' disks; one that died is noticed at once.
_SLOWEST_DISK_S = 7200.0


class SaveThread:
    """Runs what it is given behind the training thread, to which everything here belongs."""

    def __init__(self) -> None:
        """Assign only."""
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[dist.ProcessGroup | None], None]) -> None:
        """Begin a job, once the one before has ended; collective.

        Args:
            job: Given the group of this thread, which is None on an island of one rank.

        Raises:
            BaseException: What the job before has raised.
        """
        self.settle()
        if self._group is None and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_SLOWEST_DISK_S))
        group = self._group

        def run() -> None:
            try:
                job(group)
            except BaseException as error:  # raised in the training thread
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def run(self, job: Callable[[dist.ProcessGroup | None], _T]) -> _T:
        """Do a job and wait for it, however long the disk of any rank takes; collective.

        Raises:
            BaseException: What it has raised.
        """
        done: list[_T] = []
        self.start(lambda group: done.append(job(group)))
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
