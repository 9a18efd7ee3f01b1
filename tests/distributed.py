"""Run a function on several real ranks: processes of their own joined by gloo, one default group.

    def add_ranks(island_rank: int, offset: int) -> float:
        total = torch.tensor(float(island_rank + offset))
        dist.all_reduce(total)
        return total.item()

    def test_sum() -> None:
        assert run_ranks(add_ranks, 2, 10, timeout_s=50) == [21.0, 21.0]

The function is sent by name, so it must stand at the top level of an importable module (a test file
is one). Ranks are forked from a server that has imported torch and done nothing else, no thread
and no grpc started, so that a rank costs a tenth of a second and not several of importing. What
forking cannot show (each process with hash values of its own) whole runs do: theirs are spawned.
"""

import contextlib
import faulthandler
import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.forkserver
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.waiting import Patience

# How long a failure of another rank may trail the first one and still be shown below it.
_DRAIN_S = 0.3
# How long ranks that are given up have to print where they stand.
_STACKS_S = 0.3
# Ranks leave it to the caller to give up: it knows how much of a loaded machine they were granted.
_COLLECTIVE_TIMEOUT = timedelta(hours=1)
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
#: Imported once, by the server; what is missing here a rank imports for itself.
_IMPORTED = [
    "pytest",
    "hypothesis",
    "torch._dynamo",  # by the first optimizer
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "diloco.launch.rank.main",
    "diloco.syncer.syncer",
]


class RankFailed(AssertionError):
    """A rank raised, died or did not finish in time; the message has its traceback."""


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 50.0
) -> list[Any]:
    """Call ``fn(island_rank, *args)`` on ``world_size`` fresh ranks and wait for all of them.

    Every rank is a new process with one thread and a default gloo process group over a store
    and port of this call alone. No process outlives the call, whatever happens.

    Args:
        fn: Top-level function of an importable module; arguments and result must be picklable.
        world_size: Number of ranks, 1 or more.
        args: Further arguments, equal on all ranks.
        timeout_s: Seconds for everything on an idle machine, starting the processes included; stay
            below the timeout of the test, so that this message is the one seen. Ranks that are
            given up print their stacks.

    Returns:
        The results, by rank.

    Raises:
        RankFailed: If a rank raised (the earliest one, with its traceback), died or hung.
    """
    patience = Patience(timeout_s)
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_COLLECTIVE_TIMEOUT
    )
    context = _context()
    processes, pipes = [], []
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank,
                args=(sender, store.port, rank, world_size, fn, args),
                daemon=True,
            )
            process.start()
            sender.close()  # so that the death of the rank ends the pipe
            processes.append(process)
            pipes.append(receiver)
        return _gather(processes, pipes, patience)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for pipe in pipes:
            pipe.close()


@functools.cache
def _context() -> multiprocessing.context.ForkServerContext:
    """Start the server from which ranks are forked; it ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    with mock.patch.dict(os.environ, _ENVIRONMENT):
        multiprocessing.forkserver.ensure_running()
    return context


def _gather(processes: list[Any], pipes: list[Any], patience: Patience) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[float, str]] = []
    pending = dict(enumerate(pipes))
    while pending:
        wait_s = _DRAIN_S if failures else max(0.0, patience.left_s())
        ready = multiprocessing.connection.wait(list(pending.values()), wait_s)
        if not ready and failures:
            break
        if not ready and patience.left_s() <= 0:
            for rank in pending:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(processes[rank].pid, signal.SIGUSR1)
            time.sleep(_STACKS_S)
            raise RankFailed(
                f"ranks {sorted(pending)} of {len(pipes)} did not finish in {patience.within_s:g} s"
            )
        for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
            try:
                is_ok, when, value = pickle.loads(pending.pop(rank).recv_bytes())
            except EOFError:
                processes[rank].join()
                is_ok, when = False, time.monotonic()
                value = f"died without a word, exit code {processes[rank].exitcode}"
            if is_ok:
                results[rank] = value
                continue
            failures.append((when, f"rank {rank} of {len(pipes)}: {value}"))
    if failures:
        raise RankFailed("\n".join(text for _, text in sorted(failures)))
    return [results[rank] for rank in range(len(pipes))]


def _run_rank(
    sender: Any,
    port: int,
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_COLLECTIVE_TIMEOUT)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=_COLLECTIVE_TIMEOUT
        )
        value = fn(rank, *args)
        dist.barrier()  # nobody tears its connections down while another still needs them
        message = (True, time.monotonic(), value)
    except BaseException:
        message = (False, time.monotonic(), traceback.format_exc())
    # Whole: `send` would pass on tensors as handles, which are worth nothing once the rank is gone.
    sender.send_bytes(pickle.dumps(message))
    sender.close()
    if message[0]:
        dist.destroy_process_group()
