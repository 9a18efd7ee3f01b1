"""A spawned process of a bench: one thread, and a counter that tells its parent how far it is."""

from __future__ import annotations

import multiprocessing.sharedctypes

import torch

_done: multiprocessing.sharedctypes.Synchronized[int] | None = None


def prepare_process(done: multiprocessing.sharedctypes.Synchronized[int]) -> None:
    """Take the counter; what `ProcessPoolExecutor` calls first in every process."""
    global _done
    _done = done
    torch.set_num_threads(1)


def count_one() -> None:
    """Count one more of whatever the bench tells; in a process that nobody prepared, nothing."""
    if _done is not None:
        with _done.get_lock():
            _done.value += 1
