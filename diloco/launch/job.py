"""Where the ranks of an island meet: the environment that a launcher sets, and process groups.

    default     model (FSDP2, TP), by way of its mesh
    start       the join and the first published version, which may be long in coming
    shards      collect and distribute, and sums for reports
    agreement   what the ranks agree on between steps, nothing else

All are gloo groups; an island of one rank has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from diloco.errors import ConfigError

#: Seconds after which a rank that hangs is noticed by the others.
_COLLECTIVE_S = 300.0


@dataclass(frozen=True, slots=True)
class Job:
    """This process's place in its island, and where the ranks meet.

    `rendezvous` is an init method of `torch.distributed`: ``env://`` (MASTER_ADDR and MASTER_PORT
    of a job that somebody else launched) or ``file://PATH`` of a file that is new at every start,
    so that no port has to be guessed and no rank meets the addresses of an earlier start.
    """

    island_rank: int
    num_ranks: int
    rendezvous: str

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], *, rendezvous: str = "env://") -> Job:
        """Read RANK and WORLD_SIZE, and check MASTER_ADDR and MASTER_PORT where they are used.

        Raises:
            ConfigError: Naming a variable that is missing or out of range.
        """
        num_ranks = _integer(environ, "WORLD_SIZE", 1, 2**31)
        island_rank = _integer(environ, "RANK", 0, num_ranks - 1)
        if rendezvous == "env://" and num_ranks > 1:
            _integer(environ, "MASTER_PORT", 1, 65535)
            if not environ.get("MASTER_ADDR"):
                raise ConfigError("the environment has no MASTER_ADDR: the launcher must set it")
        return cls(island_rank, num_ranks, rendezvous)


@dataclass(frozen=True, slots=True)
class Groups:
    """Process groups of the island, beside the default one; None on an island of one rank."""

    start: dist.ProcessGroup | None = None
    shards: dist.ProcessGroup | None = None
    agreement: dist.ProcessGroup | None = None


def meet(job: Job, *, patience_s: float) -> Groups:
    """Make the process groups; collective. `patience_s` bounds waits of the start group."""
    if job.num_ranks == 1:
        return Groups()
    dist.init_process_group(
        "gloo",
        init_method=job.rendezvous,
        rank=job.island_rank,
        world_size=job.num_ranks,
        timeout=timedelta(seconds=_COLLECTIVE_S),
    )
    start, shards, agreement = (
        dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        for timeout_s in (_COLLECTIVE_S + patience_s, _COLLECTIVE_S, _COLLECTIVE_S)
    )
    return Groups(start, shards, agreement)


def _integer(environ: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = environ.get(name, "")
    if not text.isdecimal() or not low <= int(text) <= high:
        raise ConfigError(
            f"the environment has {name} = {text!r}: the launcher must set it to an integer in "
            f"[{low}, {high}]"
        )
    return int(text)
