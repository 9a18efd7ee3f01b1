"""Writing an island's checkpoint: every rank its lanes, then the leader what makes them whole.

Tensors are streamed: besides what the training holds, a rank needs the memory of one lane. A disk
that is full ends the checkpoint, not the training: the failing rank goes on taking part in the
collectives, so that nobody waits, and then all ranks know.

Source: protocol.md section 9; the format of safetensors, https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import platform
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor

from diloco.compression.base import to_bytes
from diloco.durable import make_directory_durably, write_durably, write_json
from diloco.launch.checkpoints import (
    FORMAT,
    MANIFEST,
    OUTER,
    PLAN,
    lane_key,
    rank_file,
    step_directory,
)
from diloco.outer.fragments import Plan
from diloco.sync.shards import LaneShards
from transport.contracts import Buffer

_DTYPES = {torch.float32: "F32", torch.int64: "I64", torch.uint8: "U8"}
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Place of a tensor in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


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
    ) -> int:
        """Write the checkpoint of an inner step; collective.

        Args:
            step: Completed inner steps.
            training: Section -> canonical name -> tensor, from `training_tensors`.
            outer: This rank's `DiLoCo.state_dict()`.
            about: What the manifest says beside the files, JSON values.

        Returns:
            Bytes of the whole checkpoint. The same step of an earlier time has been replaced.

        Raises:
            OSError: On all ranks, if one of them could not write; what is there is not whole.
        """
        path = step_directory(self._directory, self._island, step)
        failure, mine = "", {}
        if self._island_rank == 0:
            try:
                make_directory_durably(path)
                (path / MANIFEST).unlink(missing_ok=True)
            except OSError as error:
                failure = f"{path}: {error.strerror or error}"
        self._insist(failure)  # nobody writes before an older manifest is gone
        pieces, header = self._pieces(training, outer)
        name = rank_file(self._island_rank, self._num_ranks)
        try:
            mine = {name: _write(path / name, header, pieces)}
        except OSError as error:
            failure = f"{path / name}: {error.strerror or error}"
            for _ in pieces:  # the others still collect
                pass
        files: dict[str, dict[str, Any]] = {}
        for part in self._insist(failure, mine):
            files |= part
        if self._island_rank == 0:
            try:
                text = self._plan.to_json().encode()
                write_durably(path / PLAN, [text])
                files[PLAN] = {"bytes": len(text), "blake3": blake3(text).hexdigest()}
                write_json(path / MANIFEST, self._manifest(step, files, about))
            except OSError as error:
                failure = f"{path}: {error.strerror or error}"
        self._insist(failure)
        return sum(file["bytes"] for file in files.values())

    def _pieces(
        self, training: Mapping[str, Mapping[str, Tensor]], outer: Mapping[str, Tensor]
    ) -> tuple[Iterator[Buffer], list[_Tensor]]:
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

        return walk(), header

    def _manifest(
        self, step: int, files: Mapping[str, Any], about: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "step": step,
            "island": self._island,
            "plan_fingerprint": self._plan.fingerprint(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            **about,
            "files": dict(files),
        }

    def _insist(self, failure: str, mine: Mapping[str, Any] | None = None) -> list[Any]:
        """Gather what every rank has done, or raise on all of them what one met."""
        words: list[Any] = [(failure, mine)]
        if self._group is not None:
            words = [None] * self._num_ranks
            dist.all_gather_object(words, (failure, mine), group=self._group)
        failures = [f"rank {rank}: {word[0]}" for rank, word in enumerate(words) if word[0]]
        if failures:
            raise OSError("; ".join(failures))
        return [word[1] for word in words]


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
