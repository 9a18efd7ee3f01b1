"""An island on this host: its ranks as processes of their own, all alive or all ended.

    supervisor ── standard input of each rank (held open) ──> rank 0, rank 1, ...

A rank that fails ends the others, and the island with it; a supervisor that dies, however it dies,
closes the ranks' standard input, and they end. Each start has a rendezvous file of its own: no
port is guessed, and no rank meets the addresses of ranks that are gone. Imports no torch, so that a
supervisor is light; where RANK, WORLD_SIZE and MASTER_ADDR are set, this process is itself a rank
of somebody else's job and supervises nothing.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.config.load import resolved_toml
from diloco.config.schema import Config
from diloco.errors import ConfigError, IslandFailed
from diloco.launch.ending import Interrupted, Request, heeding_signals
from diloco.launch.logs import tail

logger = logging.getLogger(__name__)

_OWN_EXIT_CODES = frozenset({2, 10, 20, 30, 40, 50})
_LOOK_S = 0.1
#: Seconds in which ranks that agreed on an error end by themselves, the leader's last word told.
_AGREED_S = 6.0
#: Seconds between asking a rank to end and insisting.
_END_S = 5.0


@dataclass(frozen=True, slots=True)
class _RankProcess:
    island_rank: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def code(self) -> int | None:
        """None while it lives; negative: the signal that ended it."""
        return self.process.poll()


def run_island(config: Config, island: str, coordinator_address: str, output_dir: Path) -> int:
    """Run an island until it ends; call it from the main thread.

    Args:
        config: The run's configuration.
        island: Name of the island.
        coordinator_address: HOST:PORT.
        output_dir: Where events, logs and resolved-ISLAND.toml go; made when missing.

    Returns:
        0; the exit code of the first rank that failed with one of ours; 40 if a rank failed
        otherwise; 128 + N when signal N ended the island.

    Raises:
        ConfigError: If there is no such island, or the surrounding job's variables are wrong.
    """
    if island not in config.islands:
        names = ", ".join(sorted(config.islands))
        raise ConfigError(f"--island {island}: not in the run file; islands: {names}")
    config = config.model_copy(update={"island_id": island})
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        return _join_job(config, coordinator_address, output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    resolved = output_dir / f"resolved-{island}.toml"
    resolved.write_text(resolved_toml(config))
    return _supervise(config, coordinator_address, output_dir, resolved)


def _join_job(config: Config, coordinator_address: str, output_dir: Path) -> int:
    """Be one rank of the job that a launcher started."""
    from diloco.launch.job import Job
    from diloco.launch.rank import exit_at_once, run_rank

    code = run_rank(
        config,
        Job.from_environment(os.environ),
        coordinator_address=coordinator_address,
        output_dir=output_dir,
    )
    return code if code == 0 else exit_at_once(code)


def _supervise(config: Config, coordinator_address: str, output_dir: Path, resolved: Path) -> int:
    ranks: list[_RankProcess] = []
    with tempfile.TemporaryDirectory(prefix="diloco-") as meeting, heeding_signals() as request:
        try:
            for island_rank in range(config.island.ranks):
                arguments = ["--config", str(resolved), "--island", config.island_id]
                arguments += ["--coordinator", coordinator_address, "--output", str(output_dir)]
                arguments += ["--rendezvous", f"file://{meeting}/rendezvous", "--supervised"]
                log = output_dir / f"{config.island_id}-{island_rank}.log"
                ranks.append(_start(config, island_rank, arguments, log))
            return _watch(config.island_id, ranks, request)
        except Interrupted as interrupted:
            name = signal.Signals(interrupted.number).name
            logger.warning("stopping island %s, signal=%s", config.island_id, name)
            return 128 + interrupted.number
        finally:
            _end(ranks)


def _start(config: Config, island_rank: int, arguments: Sequence[str], log: Path) -> _RankProcess:
    environment = {
        **os.environ,
        "RANK": str(island_rank),
        "WORLD_SIZE": str(config.island.ranks),
        "OMP_NUM_THREADS": str(config.island.threads),
    }
    if "lo" in (name for _, name in socket.if_nameindex()):
        # All ranks are on this host; what the host calls itself need not resolve.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "diloco.launch.rank", *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            # Ctrl-C in a terminal is for the supervisor alone, which then ends the ranks in order.
            start_new_session=True,
        )
    return _RankProcess(island_rank, process, log)


def _watch(island: str, ranks: Sequence[_RankProcess], request: Request) -> int:
    """Wait until all ranks are done or one has failed; say which, and how."""
    while not (failed := [rank for rank in ranks if rank.code]):
        if all(rank.code == 0 for rank in ranks):
            return 0
        request.check()
        time.sleep(_LOOK_S)
    first = min(failed, key=_telling)
    code = first.code
    assert code is not None
    if code in _OWN_EXIT_CODES:
        _wait(ranks, _AGREED_S)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    logger.error(
        "rank %d of island %s (pid %d) %s; the island stops. %s ends with:\n%s",
        first.island_rank,
        island,
        first.process.pid,
        how,
        first.log,
        tail(first.log),
    )
    return code if code in _OWN_EXIT_CODES else IslandFailed.exit_code


def _telling(rank: _RankProcess) -> int:
    """Order failures seen at once: a rank that lost another one only ends because of it."""
    assert rank.code is not None
    return 0 if rank.code in _OWN_EXIT_CODES else 1 if rank.code < 0 else 2


def _end(ranks: Sequence[_RankProcess]) -> None:
    """End whatever still lives: ask, wait, insist."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            if rank.code is None:
                rank.process.send_signal(number)
        _wait(ranks, _END_S)
    for rank in ranks:
        assert rank.process.stdin is not None
        rank.process.stdin.close()


def _wait(ranks: Sequence[_RankProcess], at_most_s: float) -> None:
    until = time.monotonic() + at_most_s
    while time.monotonic() < until and any(rank.code is None for rank in ranks):
        time.sleep(_LOOK_S)
