"""Composition root of the coordinator's process: state directory, journal, server, its syncer.

One coordinator at a time holds the state directory; a restarted one binds the same address, takes
back what was durable and adopts the syncer that outlived it. No tensor is ever loaded here.

Source: design.md section 2; protocol.md section 8.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from diloco.config.classes import fingerprint, identity_difference, identity_json, policy_json
from diloco.config.load import load_config, resolved_toml
from diloco.config.schema import Config
from diloco.coordinator.daemon import Coordinator
from diloco.coordinator.grants import load_or_create_secret
from diloco.coordinator.journal import Journal
from diloco.coordinator.membership import Membership
from diloco.durable import write_durably
from diloco.errors import ConfigError
from diloco.launch.address import advertised, listen
from diloco.launch.ending import first_of, stop_on_signals
from diloco.launch.state_dir import (
    TIMELINE,
    Endpoint,
    Held,
    StateDir,
    hold,
    holder,
    read_endpoint,
)
from diloco.launch.syncer_supervisor import SyncerSupervisor

logger = logging.getLogger(__name__)

_DRAIN_S = 1.0
_LOOK_S = 0.05


async def run_coordinator(
    config: Config, *, tell: Callable[[str], None], linger_s: float = 5.0
) -> int:
    """Coordinate a run until it is over or a signal asks to stop.

    Args:
        config: The run; `coordinator.state_dir` is made if missing, and resumed if it holds the
            same run.
        tell: Hears, in words for people, where the coordinator listens and how it ended.
        linger_s: Seconds for which a failed run is still answered, so that its islands hear why;
            shorter when all have left.

    Returns:
        Exit code: 0 when every island finished or a signal stopped the coordinator (and its
        syncer), else that of the failure.

    Raises:
        ConfigError: If the state directory belongs to another run or another coordinator, or the
            address cannot be used.
    """
    state = StateDir(Path(config.coordinator.state_dir).absolute())
    advertised(config.coordinator.listen, config.coordinator.address)
    advertised(config.coordinator.syncer_listen, config.coordinator.address)
    state.create()
    try:
        with hold(state.coordinator_lock):
            _claim(config, state)
            with _journal(state) as journal:
                return await _coordinate(config, state, journal, tell, linger_s)
    except Held as error:
        raise ConfigError(
            f"another coordinator runs in {config.coordinator.state_dir} ({error}): watch it with "
            f"diloco status, or give this run another coordinator.state_dir"
        ) from error


def _claim(config: Config, state: StateDir) -> None:
    """Insist that the state directory holds this run or none, and record the configuration."""
    if state.resolved.exists():
        _insist_on_same_run(config, load_config(state.resolved), state)
    write_durably(state.resolved, [resolved_toml(config).encode()])
    write_durably(state.fingerprint, [fingerprint(config).encode()])


def _insist_on_same_run(config: Config, before: Config, state: StateDir) -> None:
    differing = identity_difference(identity_json(config), identity_json(before))
    if differing:
        raise ConfigError(
            f"coordinator.state_dir = {config.coordinator.state_dir} holds the run "
            f"{before.run.name!r}, which this file (here) does not describe:\n  "
            + "\n  ".join(differing)
            + "\nGive this run another coordinator.state_dir, or undo the change"
        )
    differing = identity_difference(policy_json(config), policy_json(before))
    if differing and (pid := holder(state.store_lock)) is not None:
        raise ConfigError(
            f"the run {before.run.name!r} is under way (syncer: process {pid}) under another "
            f"policy than this file's (here):\n  "
            + "\n  ".join(differing)
            + "\nUndo the change, or end that process before you start again"
        )


@contextmanager
def _journal(state: StateDir) -> Iterator[Journal]:
    journal = Journal(state.journal)
    try:
        journal.open()
    except sqlite3.DatabaseError as error:
        raise ConfigError(
            f"cannot read the journal {state.journal}: {error}. Restore it from a copy, or start "
            f"anew in another coordinator.state_dir"
        ) from error
    try:
        yield journal
    finally:
        journal.close()


async def _coordinate(
    config: Config,
    state: StateDir,
    journal: Journal,
    tell: Callable[[str], None],
    linger_s: float,
) -> int:
    stopping = stop_on_signals()
    membership = Membership(
        run=config.run.name,
        islands=tuple(sorted(config.islands)),
        identity_json=identity_json(config),
        identity_difference=identity_difference,
    )
    membership.apply(journal.entries().items())
    coordinator = Coordinator(
        membership=membership,
        journal=journal,
        secret=load_or_create_secret(state.secret),
        timeline=TIMELINE,
        policy_json=policy_json(config),
        unix_clock=time.time,
    )
    supervisor = SyncerSupervisor(state, on_hopeless=coordinator.fail)
    if membership.is_finished:
        await supervisor.stop()
        tell(f"the run {config.run.name!r} has finished")
        return 0
    earlier = read_endpoint(state.coordinator)
    server = await listen(
        config.coordinator.listen,
        earlier.address if earlier else "",
        coordinator.handlers,
        insecure=config.coordinator.insecure,
        chunk_bytes=config.transport.chunk_bytes,
    )
    try:
        address = advertised(server.address, config.coordinator.address)
        Endpoint(address, os.getpid()).write(state.coordinator)
        tell(f"coordinator of run {config.run.name!r} listens on {address}")
        await first_of(coordinator.ended.wait(), stopping.wait(), supervisor.run())
        if membership.fatal_reason:
            await _linger(membership, linger_s)
        await supervisor.stop()  # served meanwhile: the syncer reports its last records
    finally:
        await server.stop(_DRAIN_S)
    return _tell_end(membership, tell)


async def _linger(membership: Membership, linger_s: float) -> None:
    """Answer on until every island that joined has left, at most `linger_s`."""
    loop = asyncio.get_running_loop()
    until = loop.time() + linger_s
    while not membership.is_deserted and loop.time() < until:
        await asyncio.sleep(_LOOK_S)


def _tell_end(membership: Membership, tell: Callable[[str], None]) -> int:
    if membership.fatal_reason:
        tell(f"the run {membership.run!r} failed: {membership.fatal_reason}")
        return membership.fatal_exit_code
    if membership.is_finished:
        tell(f"the run {membership.run!r} has finished")
        return 0
    tell(
        f"coordinator and syncer of run {membership.run!r} stopped; nothing is lost: start it "
        f"again with the same command"
    )
    return 0
