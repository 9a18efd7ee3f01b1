"""Jobs of a bench, each in a process of one thread."""

from __future__ import annotations

import multiprocessing
import multiprocessing.sharedctypes
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from typing import TypeVar

import torch

from diloco.system import usable_cpus

_K = TypeVar("_K")
_T = TypeVar("_T")
_LOOK_S = 0.5
_done: multiprocessing.sharedctypes.Synchronized[int] | None = None


def run_jobs(
    jobs: Mapping[_K, Callable[[], _T]], on_look: Callable[[int], None], num_processes: int = 0
) -> dict[_K, _T]:
    """Run every job in a spawned process of one thread; none of them outlives the call.

    Args:
        jobs: Functions that can be pickled, with what they return.
        on_look: Called twice a second with what jobs have counted by `count_one`; what it raises
            ends them.
        num_processes: At once; 0: as many as there are CPUs.

    Returns:
        What each job returned, in their order.
    """
    before = multiprocessing.active_children()
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    with ProcessPoolExecutor(num_processes or usable_cpus(), context, _prepare, (done,)) as pool:
        running = {key: pool.submit(job) for key, job in jobs.items()}
        try:
            while (left := wait(running.values(), _LOOK_S, FIRST_EXCEPTION)).not_done:
                on_look(done.value)
                for future in left.done:
                    future.result()
            return {key: future.result() for key, future in running.items()}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()).difference(before):
                process.kill()
            raise


def count_one() -> None:
    """Count one more of whatever the bench counts; in a process that is no job's, nothing."""
    if _done is not None:
        with _done.get_lock():
            _done.value += 1


def _prepare(done: multiprocessing.sharedctypes.Synchronized[int]) -> None:
    global _done
    _done = done
    torch.set_num_threads(1)
