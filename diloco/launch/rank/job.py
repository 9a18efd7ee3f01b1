"""Brings the ranks of an island together: a launcher's environment, the default group."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from diloco.errors import ConfigError
from diloco.island.groups import COLLECTIVE_S, GROUPS_OF_THE_LOOP, NCCL_LATER_S

#: Seconds without life of NCCL's own threads after which PyTorch ends the process, at least.
_LEAST_HEARTBEAT_S = 480.0


@dataclass(frozen=True, slots=True)
class Job:
    """This process's place in its island, and where the ranks meet.

    `rendezvous` is ``env://`` (MASTER_ADDR and MASTER_PORT of a job that somebody else launched) or
    ``tcp://HOST:PORT`` of a store that rank 0 serves, new at every start, so that no rank meets the
    addresses of an earlier one; with ``?descriptor=N``, for rank 0, on a socket that its supervisor
    listens with, so that no port has to be guessed.

    Of a supervisor of ours also: on how many hosts the island is, and the file in memory that this
    rank's copies lie in (`diloco.checkpoint.host_memory`); None where none are kept.

    `local_rank` is this rank's number on its host, of `num_local_ranks`.
    """

    island_rank: int
    num_ranks: int
    rendezvous: str
    num_hosts: int = 1
    memory: int | None = None
    local_rank: int = 0
    num_local_ranks: int = 1

    @classmethod
    def from_environment(
        cls,
        environ: Mapping[str, str],
        *,
        rendezvous: str = "env://",
        num_hosts: int = 1,
        memory: int | None = None,
    ) -> Job:
        """Read RANK and WORLD_SIZE, and check MASTER_ADDR and MASTER_PORT where they are used.

        Of a job that somebody else launched also LOCAL_RANK and LOCAL_WORLD_SIZE, if set. Otherwise
        consecutive ranks share a host, as many on each.

        Raises:
            ConfigError: Naming a variable that is missing or out of range.
        """
        num_ranks = _integer(environ, "WORLD_SIZE", 1, 2**31)
        island_rank = _integer(environ, "RANK", 0, num_ranks - 1)
        if rendezvous == "env://" and num_ranks > 1:
            _integer(environ, "MASTER_PORT", 1, 65535)
            if not environ.get("MASTER_ADDR"):
                raise ConfigError("the environment has no MASTER_ADDR: the launcher must set it")
        here = max(1, num_ranks // num_hosts)
        local_rank = island_rank % here
        if rendezvous == "env://" and {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= environ.keys():
            here = _integer(environ, "LOCAL_WORLD_SIZE", 1, num_ranks)
            local_rank = _integer(environ, "LOCAL_RANK", 0, here - 1)
        return cls(island_rank, num_ranks, rendezvous, num_hosts, memory, local_rank, here)


def meet(
    job: Job, backend: str = "gloo", *, is_cast: bool = False, collective_s: float = COLLECTIVE_S
) -> None:
    """Make the default process group, for the model; an island of one rank mostly has none.

    Args:
        job: Of this rank.
        backend: Backends by device, as `diloco.launch.rank.device.backend_of` names them.
        is_cast: Whether the model's parameters are cast, for which one rank, too, has a group.
        collective_s: Seconds after which a rank that hangs is named by the others.
    """
    if job.num_ranks == 1 and not is_cast:
        return
    # NCCL's monitor ends a process at once: later than this rank has named another one.
    heartbeat_s = max(_LEAST_HEARTBEAT_S, 2 * NCCL_LATER_S + collective_s)
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", f"{heartbeat_s:.0f}")
    dist.init_process_group(
        backend,
        store=_store(job),
        rank=job.island_rank,
        world_size=job.num_ranks,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )


def limit_collectives(collective_s: float) -> None:
    """Give up a rank that does not come to a collective of any present group for so long.

    Later than `meet`, since ranks may take longer than that to start; and again once model and
    optimizer have made groups of their own. Those of the outer loop keep what they were made with.
    NCCL, which ends the process at its timeout, has more, so that the rank is named before
    (`diloco.launch.rank.watch`). Its other errors end the process as before: with
    TORCH_NCCL_ASYNC_ERROR_HANDLING = 0 a device would compute with what never arrived.
    """
    if not dist.is_initialized():
        return
    for group in dist.distributed_c10d._world.pg_map:
        if group.group_desc.startswith(GROUPS_OF_THE_LOOP):
            continue
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=collective_s), group)
        if (device := torch.device("cuda")) in group._device_types:
            backend = group._get_backend(device)
            if backend.name() == "nccl":
                later = timedelta(seconds=collective_s + NCCL_LATER_S)
                backend._set_default_timeout(later)


def _store(job: Job) -> Store | None:
    """Serve the store of this start, or reach it; None: the environment says where it is."""
    if job.num_ranks == 1:
        return HashStore()  # nobody else comes
    if job.rendezvous == "env://":
        return None
    url = urlsplit(job.rendezvous)
    assert url.hostname is not None and url.port is not None, job.rendezvous
    descriptor = parse_qs(url.query).get("descriptor")
    return TCPStore(
        url.hostname,
        url.port,
        job.num_ranks,
        is_master=job.island_rank == 0,
        timeout=timedelta(seconds=COLLECTIVE_S),
        wait_for_workers=False,
        master_listen_fd=int(descriptor[0]) if descriptor else None,
    )


def _integer(environ: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = environ.get(name, "")
    if not text.isdecimal() or not low <= int(text) <= high:
        raise ConfigError(
            f"the environment has {name} = {text!r}: the launcher must set it to an integer in "
            f"[{low}, {high}]"
        )
    return int(text)
