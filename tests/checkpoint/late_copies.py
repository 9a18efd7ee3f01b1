"""Copies of the training state that are made as late as they may be, in place of a device's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from diloco.checkpoint.state_copy import StateCopier

_PATIENCE_S = 60.0


class LastMoment:
    """A device's side stream that does its work when something must not come before it."""

    def __init__(self) -> None:
        self._work: Callable[[], object] | None = None
        self._done = threading.Event()

    def submit(self, work: Callable[[], object]) -> Callable[[], None]:
        self._work, self._done = work, threading.Event()
        done = self._done

        def finish() -> None:
            assert done.wait(_PATIENCE_S), "nothing came that has to wait for the copy"

        return finish

    def precede(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()
            self._done.set()


class BrokenDevice:
    """A side stream whose device has failed."""

    def submit(self, work: Callable[[], object]) -> Callable[[], None]:
        def finish() -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        return finish

    def precede(self) -> None:
        pass


def late_copier(optimizer: torch.optim.Optimizer, stream: Any = None) -> StateCopier:
    """Make a copier whose copies are late."""
    copier = StateCopier(optimizer)
    copier._stream = stream or LastMoment()
    return copier
