"""An island: its ranks all alive or all ended, started again as long as its budget lasts.

A rank that fails ends the others. Where that may help (exit codes 20, 30 and 40, a signal, a crash)
all of them are started again, as a new start of the island, which then returns to the run; the
budget is `islands.NAME.max_restarts`. Who reached nobody (30) is started again whatever the budget,
for 72 h in a row, unless the budget is 0. When the run has returned to an earlier checkpoint by
itself (exit code 42), they are started again whatever the budget. An island of several hosts has
one supervisor a host; the first host's decides for all (`diloco.launch.hosts`). What the ranks
copied to memory outlives them here (`diloco.checkpoint.host_memory`). Imports no torch, so that a
supervisor is light; where RANK, WORLD_SIZE and MASTER_ADDR are set, this process is itself a rank
of somebody else's job and supervises nothing.

Source: PROTOCOL.md, "Return of an island".
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from diloco.checkpoint.host_memory import HostMemory
from diloco.config.classes import fingerprint
from diloco.config.load import resolved_toml
from diloco.config.schema import Config
from diloco.durable import raising_disk_full, write_durably
from diloco.errors import ConfigError, CoordinatorUnavailable, IslandFailed, RunReturned
from diloco.launch.host_position import HostPosition
from diloco.launch.hosts import FirstHost, HostLost, Message, OtherHost
from diloco.launch.process.disk_full_retry import retry_disk_full
from diloco.launch.process.ending import Interrupted, StopRequest, exit_at_once, note_signals
from diloco.launch.process.restarts import OutageBudget, RestartBudget
from diloco.launch.ranks import RankCommand, Ranks, RanksEnd
from diloco.transport.addresses import split_address

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
#: Seconds between attempts to reach a first host that hangs up.
_AGAIN_S = 1.0


def run_island(
    config: Config,
    island: str,
    coordinator_address: str,
    output_dir: Path,
    position: HostPosition | None = None,
) -> int:
    """Run an island, or this host's part of it, until it ends; call it from the main thread.

    Args:
        config: The run's configuration.
        island: Name of the island.
        coordinator_address: HOST:PORT.
        output_dir: Where events, logs and resolved-ISLAND.toml go; made when missing.
        position: This host among several; None: the only one.

    Returns:
        0; the exit code of the last failure that no restart followed: one of ours, 40 if a rank
        failed otherwise; 128 + N when signal N ended the island.

    Raises:
        ConfigError: If there is no such island, the surrounding job's variables are wrong, or the
            hosts cannot meet as told.
        IslandFailed: If another host of the island stays away.
    """
    if island not in config.islands:
        names = ", ".join(sorted(config.islands))
        raise ConfigError(f"--island {island}: not in the run file; islands: {names}")
    config = config.model_copy(update={"island_id": island})
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        if position is not None and position.num_hosts > 1:
            raise ConfigError(
                f"--nnodes {position.num_hosts}: RANK, WORLD_SIZE and MASTER_ADDR are set, so a "
                f"launcher has spread this island already; leave it out, or unset them"
            )
        return _join_job(config, coordinator_address, output_dir)
    supervisor = _Supervisor(config, coordinator_address, output_dir, position or HostPosition())
    return supervisor.run()


def _join_job(config: Config, coordinator_address: str, output_dir: Path) -> int:
    """Be one rank of the job that a launcher started."""
    from diloco.launch.rank.job import Job
    from diloco.launch.rank.main import run_rank

    code = run_rank(
        config,
        Job.from_environment(os.environ),
        coordinator_address=coordinator_address,
        output_dir=output_dir,
    )
    return code if code == 0 else exit_at_once(code)


@dataclass(slots=True)
class _Supervisor:
    """Starts this host's ranks, as often as it takes."""

    config: Config
    coordinator_address: str
    output_dir: Path
    position: HostPosition

    def run(self) -> int:
        """Supervise until the island ends; returns its exit code."""
        has_copies = self.config.island.memory_checkpoint_steps > 0
        kept = self._island_ranks if has_copies else ()
        with HostMemory(self.config.island_id, kept) as memory, note_signals() as request:
            try:
                command = retry_disk_full(
                    f"island {self.config.island_id}",
                    lambda: self._command(memory),
                    lambda seconds: _pause(seconds, request),
                )
                if self.position.host_index == 0:
                    return self._lead(command, request)
                return self._follow(command, request)
            except Interrupted as interrupted:
                name = signal.Signals(interrupted.number).name
                logger.warning("stopping island %s, signal=%s", self.config.island_id, name)
                return interrupted.exit_code

    # -- the first host ------------------------------------------------------------------------

    def _lead(self, command: RankCommand, request: StopRequest) -> int:
        with FirstHost(self.position, self._hello()) as others:
            try:
                end = self._lead_starts(command, request, others)
            except Interrupted as interrupted:
                others.over(self._stopped(interrupted))
                raise
            except IslandFailed as error:
                others.over(RanksEnd(error.exit_code, str(error)))
                raise
            others.over(end)
        return end.exit_code

    def _lead_starts(
        self, command: RankCommand, request: StopRequest, others: FirstHost
    ) -> RanksEnd:
        """Start the island until it ends for good."""
        island, name = self.config.island, self.config.island_id
        budget = RestartBudget(
            island.max_restarts, island.restart_wait.seconds, island.restart_reset.seconds
        )
        outage = OutageBudget(island.restart_wait.seconds, island.restart_reset.seconds)
        while True:
            patience_s = self.config.transport.unreachable.seconds
            lived_s = 0.0
            end = others.gather(request.check, patience_s)
            if end is None:
                end, lived_s = self._lead_one(command, request, others)
            if end.code == 0:
                return end
            if end.exit_code == RunReturned.exit_code and not end.is_final:
                logger.warning("island %s starts again: %s", name, end.reason)
                _pause(_AGAIN_S, request)
                continue
            if not end.is_worth_a_restart:
                logger.error("island %s ends, exit_code=%d: %s", name, end.exit_code, end.reason)
                return end
            is_outage = end.exit_code == CoordinatorUnavailable.exit_code and island.max_restarts
            if is_outage:
                called_s = min(lived_s, patience_s)  # and nobody answered
                wait_s = outage.failed(lived_s - called_s, called_s)
                left = f"for {outage.most_s / 3600:g} h of an outage, {outage.lasted_s:.0f} s gone"
            else:
                wait_s = budget.failed(lived_s)
                left = f"restarts_left={budget.left} of {budget.max_restarts}"
            if wait_s is None:
                logger.error(
                    "%s\n%s", end.reason, self._used_up(end, outage if is_outage else None)
                )
                return end
            logger.warning(
                "island %s starts again, wait_s=%g, %s: %s", name, wait_s, left, end.reason
            )
            _pause(wait_s, request)

    def _lead_one(
        self, command: RankCommand, request: StopRequest, others: FirstHost
    ) -> tuple[RanksEnd, float]:
        """Make one start on all hosts; says how it ended and how many seconds it lived."""
        began = time.monotonic()
        with Ranks(command) as ranks:
            with self.position.listen(0) as listener:
                rendezvous = self._rendezvous(listener.getsockname()[1])
                ranks.start(self._island_ranks, rendezvous, listener)
            others.start(rendezvous)
            while (seen := _seen(ranks, others)) is None:
                request.check()
                time.sleep(_LOOK_S)
            lived_s = time.monotonic() - began
            ranks.settle(seen)
            here = ranks.look() or RanksEnd(0)  # its log has its last words by now
        elsewhere = others.end() if seen.code else RanksEnd(0)
        return min((here, elsewhere, seen), key=lambda end: end.telling), lived_s

    def _used_up(self, end: RanksEnd, outage: OutageBudget | None) -> str:
        island = self.config.island_id
        why = (
            f"its restarts (islands.{island}.max_restarts = {self.config.island.max_restarts}) are "
            f"used up"
            if outage is None
            else f"for {outage.most_s / 3600:g} h it has reached nobody"
        )
        return (
            f"island {island} ends, exit_code={end.exit_code}: {why}. "
            f"When the cause is removed, start it again; it returns to the run as long as the "
            f"others wait for it: diloco island RUN.toml --island {island}"
            f"{self.position.options()} --coordinator {self.coordinator_address}"
        )

    # -- another host --------------------------------------------------------------------------

    def _follow(self, command: RankCommand, request: StopRequest) -> int:
        """Do what the first host says, and reach for it again when its connection breaks."""
        patience_s = self.config.transport.unreachable.seconds
        until = time.monotonic() + patience_s
        while True:
            with OtherHost(self.position, self._hello()) as first:
                try:
                    first.connect(request.check, until)
                    return self._follow_starts(command, request, first)
                except HostLost as error:
                    lost = error
            if first.has_heard:
                until = time.monotonic() + patience_s
                logger.warning(
                    "the first host of island %s at %s is gone, the ranks here have ended; waiting "
                    "for it: %s",
                    self.config.island_id, self.position.meeting, lost,
                )  # fmt: skip
            elif time.monotonic() > until:
                raise IslandFailed(
                    f"no first host of this island is at --rdzv {self.position.meeting}: {lost}"
                ) from lost
            _pause(_AGAIN_S, request)

    def _follow_starts(self, command: RankCommand, request: StopRequest, first: OtherHost) -> int:
        try:
            while (told := self._await(request, first))["kind"] != "over":
                if told["kind"] == "start":
                    self._follow_one(command, request, first, str(told["rendezvous"]))
        except Interrupted as interrupted:
            with contextlib.suppress(HostLost):
                first.ended(self._stopped(interrupted))
            raise
        if told["code"]:
            logger.error("the first host says: %s", told["reason"])
        return int(told["code"])

    def _await(self, request: StopRequest, first: OtherHost) -> Message:
        while (told := first.next()) is None:
            request.check()
            time.sleep(_LOOK_S)
        return told

    def _follow_one(
        self, command: RankCommand, request: StopRequest, first: OtherHost, rendezvous: str
    ) -> None:
        """Run this host's ranks of one start, and report how they ended."""
        with Ranks(command) as ranks:
            ranks.start(self._island_ranks, rendezvous, None)
            while (end := ranks.look()) is None:
                if first.peek() is not None:
                    end = RanksEnd(0)
                    break
                request.check()
                time.sleep(_LOOK_S)
            ranks.settle(end)
            end = ranks.look() or end
        if end.code:
            logger.warning("%s", end.reason)
        first.ended(end)

    # -- both ----------------------------------------------------------------------------------

    def _command(self, memory: HostMemory) -> RankCommand:
        island, config = self.config.island_id, self.config
        index = self.position.host_index
        name = f"resolved-{island}.toml" if index == 0 else f"resolved-{island}-host-{index}.toml"
        with raising_disk_full():
            self.output_dir.mkdir(parents=True, exist_ok=True)
        resolved = self.output_dir / name
        write_durably(resolved, [resolved_toml(config).encode()])
        interface = self.position.interface()
        if not interface and self.position.num_hosts > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
            logger.warning(
                "cannot tell which network interface faces %s, gloo chooses by this host's name; "
                "if the ranks do not meet, set GLOO_SOCKET_IFNAME",
                self.position.meeting,
            )
        arguments = ["--config", str(resolved), "--island", island, "--supervised"]
        arguments += ["--coordinator", self.coordinator_address, "--output", str(self.output_dir)]
        arguments += ["--hosts", str(self.position.num_hosts)]
        return RankCommand(
            island=island,
            num_ranks=config.island.ranks,
            threads=config.island.threads,
            output_dir=self.output_dir,
            arguments=arguments,
            interface=interface,
            memory=memory,
        )

    @property
    def _island_ranks(self) -> range:
        return self.position.island_ranks(self.config.island.ranks)

    def _rendezvous(self, port: int) -> str:
        host = (
            split_address(self.position.meeting)[0] if self.position.meeting else self.position.host
        )
        return f"tcp://{host}:{port}"

    def _hello(self) -> Message:
        """What the hosts of an island must agree on, as JSON values."""
        return {
            "run": self.config.run.name,
            "island": self.config.island_id,
            "--nnodes": self.position.num_hosts,
            "configuration": fingerprint(self.config),
            "ranks": self.config.island.ranks,
            "mesh": self.config.island.mesh.model_dump(),
            "micro_batches": self.config.island.micro_batches,
            "device": self.config.island.device,
            "tokens_per_inner_step": self.config.island.tokens_per_inner_step,
            "memory_checkpoint_steps": self.config.island.memory_checkpoint_steps,
            "memory_copies": self.config.island.memory_copies,
        }

    def _stopped(self, interrupted: Interrupted) -> RanksEnd:
        name = signal.Signals(interrupted.number).name
        host = f" on host {self.position.host_index}" if self.position.num_hosts > 1 else ""
        reason = f"{name} asked the supervisor of island {self.config.island_id}{host} to end"
        return RanksEnd(interrupted.exit_code, reason, is_final=True)


def _seen(ranks: Ranks, others: FirstHost) -> RanksEnd | None:
    """Say how a start ended on all hosts; None while one is at work and none has failed."""
    here, elsewhere = ranks.look(), others.look()
    failed = [end for end in (here, elsewhere) if end is not None and end.code]
    if failed:
        return min(failed, key=lambda end: end.telling)
    return RanksEnd(0) if here is not None and elsewhere is not None else None


def _pause(seconds: float, request: StopRequest) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        request.check()
        time.sleep(_LOOK_S)
