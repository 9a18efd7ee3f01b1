"""Saves in a thread while training goes on: one job at a time, and no failure of it is lost.

It is a daemon: a rank that fails does not wait for its disk, and what was half written is no
checkpoint. It has a process group of its own, so that its collectives never meet those of training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

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
