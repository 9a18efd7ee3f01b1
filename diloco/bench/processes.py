"""Processes of a bench, of one thread each: jobs, and ranks of a process group."""

from __future__ import annotations

import json
import logging
import multiprocessing
import multiprocessing.sharedctypes
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from typing import Any, NoReturn, TypeVar

import torch

from diloco.baseline.site import Channel
from diloco.errors import DilocoError
from diloco.launch.process.ending import exit_at_once
from diloco.launch.process.logs import log_to
from diloco.system import usable_cpus

logger = logging.getLogger(__name__)

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


def run_member(work: Callable[[dict[str, Any], Channel], Mapping[str, Any]]) -> NoReturn:
    """Be a rank that `BaselineProcesses` started: do `work`, say what it returns, and end.

    Args:
        work: Gets the order, and the channel to the process that gave it.
    """
    log_to(None, logging.WARNING)
    torch.set_num_threads(1)
    channel, code = Channel(), 0
    try:
        channel.say(work(json.loads(sys.argv[1]), channel))
    except DilocoError as error:
        code = error.exit_code
        logger.error("rank stops, exit_code=%d: %s", code, error)
    except Exception:
        code = 1
        logger.exception("rank failed")
    exit_at_once(code)
