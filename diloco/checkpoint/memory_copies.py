"""Copies every rank's inner state to host memory, from which an island returns whose ranks died.

    copy     after every k-th inner step: moments, their age and the data cursor, to the memory of
             this host and, while training goes on, to that of the other hosts that keep them
    take     a new start finds the newest copy that is whole for every rank, wherever it lies

Parameters are not in it: an island that returns takes what is published (PROTOCOL.md, "Return of an
island"), so that nothing it did before can be counted a second time. A copy counts only when every
rank's state of that inner step lies whole somewhere; until all ranks have said so of one copy, the
next is not begun, so there is always a whole one once there was one.

The training thread launches the copy into this host's memory, where it lies at once (`state_copy`),
and agrees with the other ranks. The rest is done by a thread of its own, on a process group that
nobody else uses: point to point, no collective.

Source: GEMINI (SOSP 2023).
"""

from __future__ import annotations

import json
import logging
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from diloco.checkpoint.host_memory import (
    NUM_SLOTS,
    CopySlots,
    Header,
    check_memory,
    next_sequence,
)
from diloco.checkpoint.placement import ranks_of_copies, recovery_probability
from diloco.checkpoint.state_copy import StateCopier, StateCopy
from diloco.errors import ConfigError, IslandFailed
from diloco.island.groups import COLLECTIVE_S
from diloco.island.lanes.boxes import stored
from diloco.telemetry.events import Event, MemoryCopied, MemoryCopyFailed
from diloco.trainer.state import (
    INNER_OPTIMIZER,
    kept_moments,
    kept_parameters,
    new_moments_,
    optimizer_name,
)
from diloco.transport.units import format_bytes

logger = logging.getLogger(__name__)

#: Of a body, before the moments: their age, length of a JSON text, the text.
_ABOUT_BYTES = 1 << 18
_AGE_AND_LENGTH = struct.Struct("<qq")
_FLOAT32_BYTES = 4
_HEADER_BYTES = len(Header(0, 0, bytes(32)).to_bytes())


@dataclass(frozen=True, slots=True)
class _Found:
    """A copy that is whole for every rank, and for each of them the rank that reads it out."""

    sequence: int
    step: int
    holders: tuple[int, ...]


class MemoryCopies:
    """One rank's part in the memory copies of its island; every rank makes the same calls.

    Args:
        descriptor: This rank's memory, from its supervisor.
        model: Parallelised; its parameters are not touched.
        optimizer: AdamW or Muon over its parameters.
        about: What a copy must be of to be taken, such as run and timeline: JSON values.
        num_hosts: Hosts of the island; they hold equally many consecutive ranks.
        copies: Hosts that keep each state, at most `num_hosts`.
        every: Inner steps between copies, at least 1.
        island: Name of the island, for messages.
        on_event: Called with the events of copies, on the leader alone.
        collective_s: Seconds after which a rank that hangs is noticed by the others.

    Attributes:
        search_s: Seconds that `open` took to find the newest copy, and to prove it whole.
    """

    search_s = 0.0

    def __init__(
        self,
        descriptor: int,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        about: Mapping[str, Any],
        num_hosts: int,
        copies: int,
        every: int,
        island: str,
        on_event: Callable[[Event], None],
        collective_s: float = COLLECTIVE_S,
    ) -> None:
        """Assign only."""
        self._descriptor = descriptor
        self._model = model
        self._optimizer = optimizer
        self._about = {**about, INNER_OPTIMIZER: optimizer_name(optimizer)}
        self._num_hosts = num_hosts
        self._copies = copies
        self._every = every
        self._island = island
        self._collective_s = collective_s
        self._on_event = on_event
        is_alone = not dist.is_initialized()
        self._rank = 0 if is_alone else dist.get_rank()
        self._num_ranks = 1 if is_alone else dist.get_world_size()
        self._holders = ranks_of_copies(self._num_ranks, num_hosts, copies)
        #: Ranks whose states this one keeps, itself first.
        self._kept = self._kept_by(self._rank)
        #: What this rank stores of each moment.
        self._shapes = [stored(parameter).shape for parameter in kept_parameters(model, optimizer)]
        self._copier = StateCopier(optimizer)
        self._group: dist.ProcessGroup | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory-copies")
        self._under_way: tuple[int, int, float, Future[str]] | None = None
        self._last = 0  # sequence of the last copy that any rank began
        self._whole: int | None = None  # that of the newest copy that is whole
        self._found: _Found | None = None

    def open(self) -> None:
        """Take the memory, and look for copies that earlier starts have left; collective.

        Raises:
            ConfigError: On the ranks of a host that has not enough of it.
        """
        if self._num_ranks > 1:
            self._group = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=self._collective_s)
            )
        own = _ABOUT_BYTES + _FLOAT32_BYTES * sum(shape.numel() for shape in self._shapes)
        sizes = [row[0] for row in self._gather([own])]
        self._slots = CopySlots(self._descriptor, num_states=len(self._kept), body_bytes=max(sizes))
        self._copied_bytes = self._copies * sum(sizes)
        here = self._num_ranks // self._num_hosts
        first = self._rank - self._rank % here
        missing = [row[0] for row in self._gather([self._slots.missing_bytes])]
        check_memory(
            f"islands.{self._island}.memory_checkpoint_steps = {self._every}",
            "copies of the inner state",
            sum(missing[first : first + here]),
            "spread the island over more hosts, lower memory_copies, or set "
            "memory_checkpoint_steps to 0",
        )
        self._agree(True)  # all hosts have looked before any rank takes
        try:
            self._slots.open()
        except OSError as error:
            raise ConfigError(
                f"islands.{self._island}.memory_checkpoint_steps = {self._every}: this host does "
                f"not give {format_bytes(self._slots.num_bytes)} of memory for copies of rank "
                f"{self._rank}: {error.strerror or error}; set it to 0, or give it more memory"
            ) from error
        self._own = torch.frombuffer(self._slots.of_state(0), dtype=torch.uint8)
        self._copier.pin(self._own, "copies of the inner state in memory")
        #: Of each slot, where the moments lie in it.
        self._places = [list(self._stored(self._slots.body(0, slot))) for slot in range(NUM_SLOTS)]
        began = time.monotonic()
        self._found = self._find()
        self.search_s = time.monotonic() - began
        self._emit_state()

    # -- copying -------------------------------------------------------------------------------

    def is_due(self, inner_step: int) -> bool:
        """Whether a copy belongs after this inner step."""
        return inner_step % self._every == 0

    def copy(self, inner_step: int, *, data: Mapping[str, Any]) -> None:
        """Begin the copy of the present inner step, once the last one has ended; collective.

        Args:
            inner_step: Completed inner steps.
            data: Cursor of the text, JSON values.

        Raises:
            ConfigError: If the cursor is too long.
        """
        began = time.monotonic()
        self.settle(inner_step)
        sequence = next_sequence(self._last, self._whole)
        for state in range(len(self._kept)):
            self._slots.empty(state, sequence)
        text = json.dumps({**self._about, "data": data}).encode()
        if len(text) > _ABOUT_BYTES - _AGE_AND_LENGTH.size:
            raise ConfigError(
                f"islands.{self._island}.memory_checkpoint_steps = {self._every}: the position in "
                f"the text takes {len(text)} bytes, {_ABOUT_BYTES} are kept; set it to 0"
            )
        parts = _local_parts(kept_moments(self._model, self._optimizer))
        copied = self._copier.copy(zip(parts, self._places[sequence % NUM_SLOTS], strict=True))
        self._last = sequence
        waited_s = time.monotonic() - began
        exchange = self._thread.submit(self._exchange, sequence, inner_step, copied, text)
        self._under_way = (sequence, inner_step, waited_s, exchange)

    def precede(self) -> None:
        """Let what is submitted from now on begin when the moments are copied; no thread waits."""
        self._copier.precede()

    def settle(self, inner_step: int) -> None:
        """Wait for the copy that is under way, and agree whether it is whole; collective.

        Args:
            inner_step: Completed inner steps, for the event.

        Raises:
            DilocoError: If the device of this rank could not copy.
        """
        if self._under_way is None:
            return
        began = time.monotonic()
        (sequence, step, waited_s, exchange), self._under_way = self._under_way, None
        problem = exchange.result()
        if problem:
            logger.error("%s", problem)
        if self._agree(not problem):
            self._whole = sequence
            waited_s += time.monotonic() - began
            self._emit_event(MemoryCopied(inner_step, step, self._copied_bytes, waited_s))
        else:
            reason = problem or "another rank's was not whole; its log says why"
            self._emit_event(MemoryCopyFailed(inner_step, step, reason))

    def close(self, inner_step: int) -> None:
        """End the thread, once the copy that is under way has ended; collective."""
        self.settle(inner_step)
        self._thread.shutdown()

    def _exchange(self, sequence: int, step: int, copied: StateCopy, text: bytes) -> str:
        """Seal this rank's copy once it is there, give and take others'; returns what is wrong.

        Runs in the thread of this object.
        """
        receiving = [
            self._receive(state, owner, sequence)
            for state, owner in enumerate(self._kept)
            if owner != self._rank
        ]
        others = [rank for rank in self._holders[self._rank] if rank != self._rank]
        body = self._slots.body(0, sequence)
        age = copied.wait(f"copy of inner step {step} of rank {self._rank} in memory")
        about = _AGE_AND_LENGTH.pack(age, len(text)) + text
        body[: len(about)] = about
        sending = [self._isend(body, rank, 0) for rank in others]
        header = Header.of(sequence, step, body)
        self._slots.seal(0, header)
        sending += [self._isend(memoryview(bytearray(header.to_bytes())), r, 1) for r in others]
        problems = [problem for receive in receiving if (problem := receive())]
        for work, _ in sending:
            work.wait()
        return "; ".join(problems)

    # -- taking --------------------------------------------------------------------------------

    @property
    def newest(self) -> int | None:
        """Inner step of the newest copy that was whole for every rank at `open`; None: no copy."""
        return None if self._found is None else self._found.step

    def _find(self) -> _Found | None:
        """Find the newest copy that is whole for every rank, reading as little as it takes."""
        table = self._gather(
            [
                number
                for state in range(len(self._kept))
                for header in _two(self._slots.headers(state))
                for number in header
            ]
        )
        words = [number for row in table for number in row]
        self._last = max(words[::2])
        known = sorted({*zip(words[::2], words[1::2], strict=True)} - {(0, 0)}, reverse=True)
        for sequence, step in known:
            whole = self._gather(
                [int(self._is_ours(state, sequence, step)) for state in range(len(self._kept))]
            )
            holders = self._readers(whole)
            if missing := [str(owner) for owner, holder in enumerate(holders) if holder is None]:
                logger.warning(
                    "copy of inner step %d in memory is not whole: none of rank %s",
                    step, ", ".join(missing),
                )  # fmt: skip
                continue
            self._whole = sequence
            return _Found(sequence, step, tuple(h for h in holders if h is not None))
        return None

    def load_(self) -> tuple[dict[str, Any], int]:
        """Give the optimizer the `newest` copy; collective, before the first `copy`.

        Returns:
            The cursor of the text; bytes that came from other hosts, of all ranks.

        Raises:
            IslandFailed: If what came from another host is not what was sent.
        """
        found = self._found
        assert found is not None, "there is no copy"
        sending: list[tuple[Any, Tensor]] = []
        problem = ""
        for owner, holder in enumerate(found.holders):
            if holder == owner:
                continue
            if self._rank == holder:
                state = self._kept.index(owner)
                header = self._slots.header(state, found.sequence)
                assert header is not None
                words = memoryview(bytearray(header.to_bytes()))
                sending += [
                    self._isend(self._slots.body(state, found.sequence), owner, 0),
                    self._isend(words, owner, 1),
                ]
            elif self._rank == owner:
                self._slots.empty(0, found.sequence)
                problem = self._receive(0, holder, found.sequence)()
        for work, _ in sending:
            work.wait()
        if not self._agree(not problem):
            raise IslandFailed(
                f"the copy of inner step {found.step} in another host's memory did not arrive "
                f"whole: {problem or 'see the logs of the other ranks'}; start the island again"
            )
        body = self._slots.body(0, found.sequence)
        age, about = _read_about(body)
        new_moments_(self._model, self._optimizer, step=age)
        tensors = kept_moments(self._model, self._optimizer)
        for part, kept in zip(_local_parts(tensors), self._stored(body), strict=True):
            part.copy_(kept)
        moved = sum(holder != owner for owner, holder in enumerate(found.holders))
        data: dict[str, Any] = about["data"]
        return data, moved * len(body)

    def _is_ours(self, state: int, sequence: int, step: int) -> bool:
        """Whether a kept copy is whole, and of this run and timeline."""
        header = self._slots.header(state, sequence)
        if header is None or (header.sequence, header.step) != (sequence, step):
            return False
        if not self._slots.is_whole(state, header):
            logger.warning(
                "copy of inner step %d of rank %d in memory is damaged", step, self._kept[state]
            )
            return False
        _, about = _read_about(self._slots.body(state, sequence))
        if others := [key for key in self._about if about.get(key) != self._about[key]]:
            logger.warning(
                "copy of inner step %d of rank %d in memory is not of this %s",
                step, self._kept[state], ", ".join(others),
            )  # fmt: skip
        return not others

    def _readers(self, whole: list[list[int]]) -> list[int | None]:
        """Choose for each rank who reads its copy out: itself, else the next that has it."""
        found: list[int | None] = []
        for owner, holders in enumerate(self._holders):
            has_it = (h for h in holders if whole[h][self._kept_by(h).index(owner)])
            found.append(next(has_it, None))
        return found

    def _kept_by(self, rank: int) -> list[int]:
        kept = (owner for owner, ranks in enumerate(self._holders) if rank in ranks)
        return sorted(kept, key=lambda owner: (owner != rank, owner))

    # -- both ----------------------------------------------------------------------------------

    def _stored(self, body: memoryview) -> Iterator[Tensor]:
        """Yield the places of the moments in a body, in the order of `_shapes`."""
        values = torch.frombuffer(body, dtype=torch.float32, offset=_ABOUT_BYTES)
        at = 0
        for shape in self._shapes:
            yield values[at : at + shape.numel()].view(shape)
            at += shape.numel()

    def _isend(self, data: memoryview, rank: int, tag: int) -> tuple[Any, Tensor]:
        """Begin to send; the tensor must live until the work is done."""
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        return dist.isend(tensor, rank, group=self._group, tag=tag), tensor

    def _receive(self, state: int, rank: int, sequence: int) -> Callable[[], str]:
        """Begin to receive a copy; the function that is returned ends it and says what is wrong."""
        body = self._slots.body(state, sequence)
        words = memoryview(bytearray(_HEADER_BYTES))
        tensors = [torch.frombuffer(data, dtype=torch.uint8) for data in (body, words)]
        works: list[Any] = [  # torch's Work, or None for those outside the group: nobody here is
            dist.irecv(tensor, rank, group=self._group, tag=tag)
            for tag, tensor in enumerate(tensors)
        ]

        def finish() -> str:
            for work in works:
                work.wait()
            header = Header.from_bytes(words)
            if header is None or Header.of(sequence, header.step, body) != header:
                return f"what rank {rank} sent to the memory of rank {self._rank} is damaged"
            self._slots.seal(state, header)
            return ""

        return finish

    def _gather(self, row: list[int]) -> list[list[int]]:
        """Return the integers of every rank; collective."""
        mine = torch.tensor(row)
        if self._num_ranks == 1:
            return [row]
        rows = [torch.empty_like(mine) for _ in range(self._num_ranks)]
        dist.all_gather(rows, mine)
        return [row.tolist() for row in rows]

    def _agree(self, is_well: bool) -> bool:
        return all(row[0] for row in self._gather([int(is_well)]))

    def _emit_state(self) -> None:
        if self._rank != 0:
            return
        lost = min(self._copies, self._num_hosts)
        logger.info(
            "inner state is copied to host memory, every=%d hosts=%d copies=%d bytes_a_rank=%d: "
            "killed ranks lose nothing, %d lost hosts at once lose nothing with probability %.4f",
            self._every, self._num_hosts, self._copies, self._slots.num_bytes, lost,
            recovery_probability(self._num_hosts, self._copies, lost),
        )  # fmt: skip

    def _emit_event(self, event: Event) -> None:
        if self._rank == 0:
            self._on_event(event)


def _two(headers: list[Header]) -> list[tuple[int, int]]:
    """Return (sequence, step) of two slots; zeros for an empty one."""
    found = [(header.sequence, header.step) for header in headers]
    return found + [(0, 0)] * (2 - len(found))


def _local_parts(tensors: Mapping[str, Mapping[str, Tensor]]) -> list[Tensor]:
    return [stored(tensor) for named in tensors.values() for tensor in named.values()]


def _read_about(body: memoryview) -> tuple[int, dict[str, Any]]:
    """Return the age of the moments, and what the JSON text says."""
    age, length = _AGE_AND_LENGTH.unpack_from(body)
    text = body[_AGE_AND_LENGTH.size : _AGE_AND_LENGTH.size + length]
    return age, json.loads(bytes(text))
