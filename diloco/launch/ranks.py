"""The ranks of an island on this host, as processes of their own.

    supervisor ── standard input of each rank (held open) ──> rank 0, rank 1, ...

A supervisor that dies, however it dies, closes the ranks' standard input, and they end.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.checkpoint.host_memory import HostMemory
from diloco.errors import IslandFailed
from diloco.launch.process.children import end_all, how_ended, last_words, spawn, wait_for_all
from diloco.launch.process.logs import bound_log

logger = logging.getLogger(__name__)

_OWN_EXIT_CODES = frozenset({2, 10, 20, 30, 31, 40, 41, 42, 50})
#: Exit codes of an island (diloco/errors.py) after which another start may well succeed.
_WORTH_A_RESTART = frozenset({20, 30, 40})
#: Seconds in which ranks that agreed on an error end by themselves, the leader's last word told.
_AGREED_S = 6.0
#: Seconds between asking a rank to end and insisting.
_END_S = 5.0


@dataclass(frozen=True, slots=True)
class RanksEnd:
    """The end of one start of an island's ranks.

    Args:
        code: Exit code of the rank that tells most, negative: the signal that ended it; 0: all
            ranks ended well, or as they were asked to.
        reason: One sentence about it; empty at 0.
        is_final: Whether somebody asked for this end, so that nothing is to be started again.
    """

    code: int
    reason: str = ""
    is_final: bool = False

    @property
    def exit_code(self) -> int:
        """Exit code of the island: one of ours, else 40; what `code` says when `is_final`."""
        if self.code == 0 or self.is_final or self.code in _OWN_EXIT_CODES:
            return self.code
        return IslandFailed.exit_code

    @property
    def is_worth_a_restart(self) -> bool:
        """Whether the same command may succeed when it is typed again."""
        return not self.is_final and self.exit_code in _WORTH_A_RESTART

    @property
    def telling(self) -> int:
        """Order of ends seen at once: a rank that lost another one only ends because of it."""
        if self.code == 0:
            return 3
        return 0 if self.exit_code == self.code else 1 if self.code < 0 else 2


@dataclass(frozen=True, slots=True)
class _RankProcess:
    island_rank: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def code(self) -> int | None:
        """None while it lives; negative: the signal that ended it."""
        return self.process.poll()


@dataclass(frozen=True, slots=True)
class RankCommand:
    """The command and environment that every rank of an island is started with.

    Args:
        island: Name of the island.
        num_ranks: Ranks of the island, on all hosts.
        threads: Threads of each rank.
        output_dir: Where logs go.
        arguments: Of ``python -m diloco.launch.rank``, but for the rendezvous.
        interface: Network interface over which ranks talk; empty: gloo's own choice.
        memory: Where copies of the ranks' states outlive them.
    """

    island: str
    num_ranks: int
    threads: int
    output_dir: Path
    arguments: Sequence[str]
    interface: str
    memory: HostMemory

    def environment(self, island_rank: int) -> Mapping[str, str]:
        """Environment of one rank; what the user set for gloo and the allocator wins."""
        environment = {
            **os.environ,
            "RANK": str(island_rank),
            "WORLD_SIZE": str(self.num_ranks),
            "OMP_NUM_THREADS": str(self.threads),
        }
        if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
            # Fragments come and go between blocks of other sizes: fixed segments would be torn.
            environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        if self.interface:
            environment.setdefault("GLOO_SOCKET_IFNAME", self.interface)
        return environment


class Ranks:
    """The ranks of one start on this host; a context manager, so that none outlives it."""

    def __init__(self, command: RankCommand) -> None:
        """Assign only."""
        self._command = command
        self._ranks: list[_RankProcess] = []

    def __enter__(self) -> Ranks:
        """Start nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the ranks that still run."""
        end_all(self._processes, _END_S)
        for rank in self._ranks:
            assert rank.process.stdin is not None
            rank.process.stdin.close()

    def start(self, island_ranks: range, rendezvous: str, listener: socket.socket | None) -> None:
        """Start these ranks.

        Args:
            island_ranks: Those of this host.
            rendezvous: ``tcp://HOST:PORT`` where all ranks of the island meet.
            listener: The socket that listens there, handed to rank 0; None on other hosts.
        """
        for island_rank in island_ranks:
            inherited = [listener.fileno()] if listener is not None and island_rank == 0 else []
            served = "".join(f"?descriptor={number}" for number in inherited)
            log = self._command.output_dir / f"{self._command.island}-{island_rank}.log"
            arguments = [*self._command.arguments, "--rendezvous", rendezvous + served]
            if (memory := self._command.memory.descriptor(island_rank)) is not None:
                inherited.append(memory)
                arguments += ["--memory", str(memory)]
            process = spawn(
                [sys.executable, "-m", "diloco.launch.rank", *arguments],
                log,
                environment=self._command.environment(island_rank),
                stdin=subprocess.PIPE,
                inherited=inherited,
            )
            self._ranks.append(_RankProcess(island_rank, process, log))

    def look(self) -> RanksEnd | None:
        """Say how the ranks ended as soon as one has failed or all are done; None before that."""
        for rank in self._ranks:
            bound_log(rank.log)
        if failed := [rank for rank in self._ranks if rank.code]:
            return min(map(self._end_of, failed), key=lambda end: end.telling)
        return RanksEnd(0) if all(rank.code == 0 for rank in self._ranks) else None

    def settle(self, end: RanksEnd) -> None:
        """Give ranks that agreed on `end` time to end by themselves."""
        if end.code in _OWN_EXIT_CODES:
            wait_for_all(self._processes, _AGREED_S)

    def _end_of(self, rank: _RankProcess) -> RanksEnd:
        return RanksEnd(
            rank.process.returncode,
            f"rank {rank.island_rank} of island {self._command.island} {how_ended(rank.process)}; "
            f"{last_words(rank.log)}",
        )

    @property
    def _processes(self) -> list[subprocess.Popen[bytes]]:
        return [rank.process for rank in self._ranks]
