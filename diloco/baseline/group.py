"""The members of a baseline: the ranks of all islands, in one order that all of them know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from diloco.errors import ConfigError

#: What values cross between islands over: our transport, or a process group of all members, on CPUs
#: or on a CUDA device each.
TRANSPORT, GLOO, NCCL = "transport", "gloo", "nccl"
HOPS = (TRANSPORT, GLOO, NCCL)


@dataclass(frozen=True, slots=True, order=True)
class BaselineMember:
    """One rank of one island; ordered by island, then by rank, which is the order of all sums."""

    island: str
    island_rank: int

    def __str__(self) -> str:
        """Name it as messages do."""
        return f"rank {self.island_rank} of island {self.island}"


@dataclass(frozen=True, slots=True)
class BaselineGroup:
    """One member among all.

    Attributes:
        own: This one.
        islands: Number of ranks by island, at least one each.
    """

    own: BaselineMember
    islands: Mapping[str, int]

    @property
    def members(self) -> tuple[BaselineMember, ...]:
        """All members, in order."""
        return tuple(
            BaselineMember(island, rank)
            for island in sorted(self.islands)
            for rank in range(self.islands[island])
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of this member's island."""
        return self.islands[self.own.island]

    @property
    def column(self) -> tuple[BaselineMember, ...]:
        """The ranks of all islands that hold the same shard as this one, by island.

        Raises:
            ConfigError: If islands have unequally many ranks, whose shards are not the same.
        """
        check_equal_ranks(self.islands)
        return tuple(
            BaselineMember(island, self.own.island_rank) for island in sorted(self.islands)
        )


def check_equal_ranks(islands: Mapping[str, int]) -> None:
    """Refuse islands whose ranks cannot hold the same shards.

    Raises:
        ConfigError: Naming the islands and their ranks.
    """
    if len(set(islands.values())) > 1:
        said = ", ".join(f"{name}: {ranks}" for name, ranks in sorted(islands.items()))
        raise ConfigError(
            f"islands have unequally many ranks ({said}), and between islands the same ranks "
            f"reduce the same shards: give each {min(islands.values())} ranks (--set "
            f"islands.NAME.ranks), or take flat, whose ring goes through all of them"
        )
