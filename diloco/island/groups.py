"""Makes the process groups that the outer loop needs besides those of the model.

    start       the join, the first published version, checkpoints: may be long in coming
    shards      collect and distribute, and sums for reports
    agreement   what the ranks agree on between steps, nothing else

All are gloo groups, and `shards` has nccl for what lies on CUDA, where the island's ranks have it;
an island of one rank has none. Collectives are for the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from diloco.errors import ConfigError, DilocoError, IslandFailed, RunStopped

_T = TypeVar("_T")

#: Seconds after which a rank that hangs is noticed by the others, where no island says otherwise.
COLLECTIVE_S = 300.0
#: Seconds by which NCCL's own timeout, which ends the process at once, exceeds that of an island.
NCCL_LATER_S = 60.0
#: How the descriptions of the groups made here begin.
GROUPS_OF_THE_LOOP = "diloco/"
#: Modulus at which tokens are compared between ranks: squares must fit 64 bits.
_COMPARED_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Groups:
    """Process groups of the island; None on an island of one rank."""

    start: dist.ProcessGroup | None = None
    shards: dist.ProcessGroup | None = None
    agreement: dist.ProcessGroup | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the one that speaks with the coordinator."""
        return self.start is None or dist.get_rank(self.start) == 0

    @property
    def island_rank(self) -> int:
        """Rank of this process in its island."""
        return 0 if self.start is None else dist.get_rank(self.start)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the island."""
        return 1 if self.start is None else dist.get_world_size(self.start)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.start is not None:
            dist.barrier(self.start)

    def leader_says(self, what: str, find: Callable[[], _T]) -> _T:
        """Let the leader find out something, and everybody have it; may be long in coming.

        Args:
            what: What the leader does, for the others' error: "could not join".
            find: Called on the leader alone; gives a value that can be pickled.

        Raises:
            Exception: What `find` raised; on the other ranks IslandFailed, with the exit code of
                a DilocoError; RunStopped stays what it is.
        """
        word: list[Any] = [None]
        failure: Exception | None = None
        if self.is_leader:
            try:
                word = [(find(), None, "")]
            except DilocoError as error:
                failure, word = error, [(None, error.exit_code, str(error))]
            except Exception as error:  # raised below, when the others know
                failure, word = error, [(None, DilocoError.exit_code, repr(error))]
        if self.start is not None:
            dist.broadcast_object_list(word, group_src=0, group=self.start)
        if failure is not None:
            raise failure
        value, exit_code, reason = word[0]
        if exit_code is not None:
            kind = RunStopped if exit_code == RunStopped.exit_code else IslandFailed
            told = kind(f"the leader of this island {what}: {reason}")
            told.exit_code = exit_code
            raise told
        found: _T = value
        return found

    def all_say(self, is_said: bool) -> bool:
        """Whether all ranks say yes; may be long in coming."""
        said = torch.tensor([int(is_said)])
        if self.start is not None:
            dist.all_reduce(said, dist.ReduceOp.MIN, group=self.start)
        return bool(said.item())

    def sum(self, values: Sequence[int]) -> list[int]:
        """Add integers of all ranks, one by one."""
        total = torch.tensor(values)
        if self.shards is not None:
            dist.all_reduce(total, group=self.shards)
        return [int(value) for value in total.tolist()]


def make_groups(
    group: dist.ProcessGroup | None, *, patience_s: float, collective_s: float = COLLECTIVE_S
) -> Groups:
    """Make the groups of an island; collective over its ranks.

    Args:
        group: The island's ranks; None: all ranks of the default process group, or this process
            alone where there is none.
        patience_s: Seconds by which waits of the start group may exceed other collectives.
        collective_s: Seconds after which a rank that hangs is noticed by the others.

    Raises:
        ConfigError: If the ranks of `group` are members of unequally many groups.
    """
    if group is None and not dist.is_initialized():
        return Groups()
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    if len(ranks) == 1:
        return Groups()
    if group is not None:
        _check_equal_names(group)
    has_nccl = "cuda:nccl" in dist.get_backend_config(group)
    start, shards, agreement = (
        dist.new_group(
            ranks,
            backend=backend,
            timeout=timedelta(seconds=timeout_s),
            use_local_synchronization=group is not None,
            group_desc=f"{GROUPS_OF_THE_LOOP}{name}",
        )
        for name, backend, timeout_s in (
            ("start", "gloo", collective_s + patience_s),
            ("shards", "cpu:gloo,cuda:nccl" if has_nccl else "gloo", collective_s),
            ("agreement", "gloo", collective_s),
        )
    )
    if has_nccl:
        later = timedelta(seconds=collective_s + NCCL_LATER_S)
        shards._get_backend(torch.device("cuda"))._set_default_timeout(later)
    return Groups(start, shards, agreement)


def _check_equal_names(group: dist.ProcessGroup) -> None:
    """Refuse what PyTorch would answer by waiting for ever.

    Without the ranks outside the group, it names a new one after the number of groups that each
    rank is a member of.
    """
    num_groups = len(dist.distributed_c10d._world.pg_names)
    counts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(counts, num_groups, group=group)
    if len(set(counts)) > 1:
        raise ConfigError(
            f"group=: its ranks are members of {counts} process groups, and can make another one "
            f"only when these are equally many: make the same groups for every rank of the island"
        )


def island_sums(
    groups: Groups, values: Sequence[int], *, tokens: int, inner_step: int
) -> list[int]:
    """Sum integers over the ranks, which must have been told the same tokens; collective.

    Args:
        groups: Of the island.
        values: Of this rank.
        tokens: That this rank was told of, in all inner steps together.
        inner_step: Completed inner steps, for the error.

    Raises:
        ValueError: On every rank, if they were not told the same numbers of tokens.
    """
    compared = tokens % _COMPARED_TOKENS
    *sums, total, squares = groups.sum([*values, compared, compared * compared])
    if squares * groups.num_ranks != total * total:  # equal only if all are
        raise ValueError(
            f"the ranks of this island gave outer.step different num_tokens; this rank's sum "
            f"up to inner step {inner_step} is {tokens}. Give every rank the tokens "
            f"of the whole island: sum them over its ranks"
        )
    return sums
