"""Watches over the ranks of an island from threads of their own, and ends a rank that lost another.

    beat thread    gives a sign of life, about once a second, in the store at which the island met
    watch thread   looks whether a collective of this rank ends

Neither takes part in a collective or uses a device, so they go on while the training thread waits
for ever, as it does under NCCL. What is pending for `islands.NAME.collective_timeout`, or an error
of a collective, makes a rank read the others' signs (`diloco.launch.rank.lost_rank`): it names the
culprits in its log and events, and ends. One that is named writes its stacks to its log, and ends.

Costs nothing while all is well but for the flight recorder's 15 us a collective. Measured on gloo:
`monitored_barrier` needs connections that a timeout has closed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

import diloco
from diloco.config.schema import Config
from diloco.errors import IslandFailed
from diloco.launch.process.ending import exit_at_once
from diloco.launch.rank.flight_recorder import FlightRecorders, PendingCollectives
from diloco.launch.rank.job import Job
from diloco.launch.rank.lost_rank import Seen, Sign, describe, find_culprits
from diloco.telemetry.events import Event, RankLost

logger = logging.getLogger(__name__)

#: Seconds between two signs of life.
_BEAT_S = 1.0
#: Seconds without one after which a rank counts as frozen or gone.
SILENT_S = 5.0
#: Seconds for which the rank that serves the store still does, for the others to read.
_LINGER_S = 2.0
#: Seconds in which communicators are aborted, else the process ends without.
_ABORT_S = 10.0
#: Seconds that the training thread has to end this process once it knows of a lost rank.
_END_S = 15.0
_SIGN = "diloco/sign/"
_NAMED = "diloco/named/"
_PACKAGE = Path(diloco.__file__).parent


class RankWatch:
    """The watch of one rank; made and started by its training thread."""

    def __init__(
        self,
        config: Config,
        job: Job,
        output_dir: Path,
        *,
        recorders: FlightRecorders,
        inner_step: Callable[[], int],
        on_event: Callable[[Event], None],
    ) -> None:
        """Assign only.

        Args:
            config: With an island selected.
            job: This rank's place, among several.
            output_dir: Where collectives-ISLAND-RANK.json goes.
            recorders: Of this process.
            inner_step: Says how many inner steps are completed; called in the watch's threads.
            on_event: Called with `RankLost`.
        """
        self._config, self._job = config, job
        self._path = output_dir / f"collectives-{config.island_id}-{job.island_rank}.json"
        self._recorders = recorders
        self._inner_step = inner_step
        self._on_event = on_event
        self._limit_s = config.island.collective_timeout.seconds
        self._pending = PendingCollectives(self._limit_s)
        self._others = [rank for rank in range(job.num_ranks) if rank != job.island_rank]
        self._training = threading.get_ident()
        self._ended = threading.Event()
        self._deciding = threading.Lock()
        self._changing = threading.Lock()
        self._is_decided = False
        self._sign = Sign(0, f"{socket.gethostname()} (pid {os.getpid()})", 0, "", 0.0)
        #: Of rank 0, which serves the store: where that does not answer, nothing newer is known.
        self._server: Sign | None = None
        self._moved_at = self._answered_at = time.monotonic()

    def start(self) -> None:
        """Start the threads; the default process group is there."""
        store: Any = dist.distributed_c10d._get_default_store()  # PyTorch has no type of `clone`
        # Connections of their own: a call that waits holds up the others of its connection.
        self._beating, self._asking = store.clone(), store.clone()
        for run in (self._beat, self._watch):
            threading.Thread(target=run, name=f"rank watch {run.__name__}", daemon=True).start()

    def stop(self) -> None:
        """Watch no more: training is over."""
        self._ended.set()

    def failed(self, error: Exception) -> int:
        """Find out who is to blame for what ended this rank's training; returns its exit code."""
        with self._deciding:
            if is_of_collective(error):
                self._decide(str(error))
                return IslandFailed.exit_code
            _within(SILENT_S, lambda: self._give_sign(self._asking, error=repr(error)))
            self.stop()
            return 1

    # -- threads ---------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Give signs of life until the store is gone; what that means, `_decide` finds out."""
        named = f"{_NAMED}{self._job.island_rank}"
        with contextlib.suppress(RuntimeError):
            while not self._ended.wait(_BEAT_S):
                self._give_sign(self._beating)
                if self._beating.check([f"{_SIGN}0"]):
                    self._server = Sign.from_json(self._beating.get(f"{_SIGN}0"))
                self._answered_at = time.monotonic()
                if self._beating.check([named]):
                    self._on_named(self._beating.get(named).decode())

    def _watch(self) -> None:
        while not self._ended.wait(min(_BEAT_S, self._limit_s / 4)):
            now = time.monotonic()
            self._pending.look(now, self._recorders.completed(), self._recorders.pending)
            self._note_position(now)
            if self._is_decided and not self._ended.wait(_END_S):  # by the training thread
                exit_at_once(IslandFailed.exit_code)
            if self._pending.is_due(now):
                with self._deciding:
                    if not self._is_decided:
                        self._decide(f"no progress for {self._limit_s:g} s")
                        self._end()

    def _note_position(self, now: float) -> None:
        """Record where the training thread is, and since when."""
        inner_step, where = self._inner_step(), _where(self._training)
        if (inner_step, where) != (self._sign.inner_step, self._sign.where):
            self._moved_at = now
        waits_in = next(map(str, self._pending.since), "")
        still_s = now - self._moved_at
        self._change(inner_step=inner_step, where=where, still_s=still_s, waits_in=waits_in)

    def _on_named(self, text: str) -> None:
        """Write down where this rank hangs, as the others have given it up."""
        with self._deciding:
            if self._is_decided:
                return
            faulthandler.dump_traceback(sys.stderr)
            logger.error("the other ranks name this one, its stacks are above: %s", text)
            self._end()

    # -- a rank is lost --------------------------------------------------------------------------

    def _decide(self, error: str) -> None:
        """Name the culprits: in the log, as an event, and to themselves."""
        island, sign = self._config.island_id, self._sign
        others: dict[int, Seen] = {}
        is_answered = _within(2 * SILENT_S, lambda: others.update(self._read_signs()))
        if not is_answered:
            time.sleep(max(0.0, self._answered_at + SILENT_S - time.monotonic()))
            others = {0: Seen(self._server, time.monotonic() - self._answered_at)}
        culprits = {
            rank: describe(others[rank], SILENT_S)
            for rank in find_culprits(others, silent_s=SILENT_S, is_overdue=bool(sign.waits_in))
        }
        is_written = _within(SILENT_S, lambda: self._recorders.write(self._path))
        dump = str(self._path) if is_written else ""  # else the device does not answer
        who = "; ".join(f"rank {rank}: {what}" for rank, what in culprits.items())
        where = f" The collectives before it are in {dump}." if dump else ""
        text = (
            f"island {island} lost {who or 'a rank, and none says which'}. Rank "
            f"{self._job.island_rank} is {sign}: {error}.{where} A rank that does not come "
            f"within islands.{island}.collective_timeout = "
            f"{self._config.island.collective_timeout} hangs or is slow: look at its log, which "
            f"has its stacks if it lives, and at its host, or set a longer one"
        )
        self._on_event(RankLost(sign.inner_step, tuple(culprits), sign.waits_in, dump, text))
        logger.error("%s", text)
        if is_answered:
            _within(SILENT_S, lambda: self._name(tuple(culprits), text))
        if self._job.island_rank == 0:
            time.sleep(_LINGER_S)
        self._is_decided = True

    def _read_signs(self) -> dict[int, Seen]:
        """Read the others' signs until each has given a new one, one has failed, or is silent."""
        store, began = self._asking, time.monotonic()
        self._give_sign(store, has_left=True)
        seen: dict[int, Seen] = {}
        fresh: set[int] = set()
        while True:
            waited_s = time.monotonic() - began
            there = signed(store, self._others)
            texts = store.multi_get([f"{_SIGN}{rank}" for rank in there]) if there else []
            for rank, sign in zip(there, map(Sign.from_json, texts), strict=True):
                before = seen.get(rank)
                if before is not None and before.sign != sign:
                    fresh.add(rank)
                seen[rank] = Seen(sign, 0.0 if rank in fresh else waited_s)
            is_failed = any(each.sign is not None and each.sign.error for each in seen.values())
            if is_failed or len(fresh) == len(self._others) or waited_s >= SILENT_S:
                return {rank: seen.get(rank, Seen(None, waited_s)) for rank in self._others}
            time.sleep(_BEAT_S / 4)

    def _name(self, culprits: tuple[int, ...], text: str) -> None:
        for rank in culprits:
            self._asking.set(f"{_NAMED}{rank}", text)

    def _give_sign(self, store: Store, **changes: Any) -> None:
        sign = self._change(beat=self._sign.beat + 1, **changes)
        store.set(f"{_SIGN}{self._job.island_rank}", sign.to_json())

    def _change(self, **changes: Any) -> Sign:
        with self._changing:
            self._sign = replace(self._sign, **changes)
            return self._sign

    def _end(self) -> None:
        """End this process, though its training thread waits."""
        _within(_ABORT_S, dist.distributed_c10d._abort_process_group)
        exit_at_once(IslandFailed.exit_code)


def signed(store: Store, ranks: list[int]) -> list[int]:
    """Find the ranks that have given a sign of life, with few questions where nearly all have.

    All ranks of an island ask at once: one question for each of 512 would take longer than a rank
    may be silent.
    """
    if not ranks or store.check([f"{_SIGN}{rank}" for rank in ranks]):
        return ranks
    if len(ranks) == 1:
        return []
    half = len(ranks) // 2
    return [*signed(store, ranks[:half]), *signed(store, ranks[half:])]


def is_of_collective(error: BaseException) -> bool:
    """Whether an error is a collective's: another rank hangs, or is gone."""
    # gloo raises RuntimeError, with the file of its source in the text.
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )


def _where(thread: int) -> str:
    """Say in which function of this package a thread is."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE):
            name = path.relative_to(_PACKAGE.parent).as_posix()
            return f"{frame.f_code.co_name} ({name}:{frame.f_lineno})"
        frame = frame.f_back
    return "no function of this package"


def _within(seconds: float, do: Callable[[], object]) -> bool:
    """Do something for so many seconds at most; says whether it has been done.

    In a thread that may wait for ever: for a store whose process is frozen, or a device.
    """
    done = threading.Event()

    def run() -> None:
        with contextlib.suppress(RuntimeError, OSError, ValueError):
            do()
            done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return done.is_set()
