"""Holds a run's state for a coordinator: on its own disk, or in an object store under a lease.

Who loses the lease has nothing left to say: it stops its syncers and ends at once.

Source: PROTOCOL.md, "State in an object store".
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from diloco.config.classes import fingerprint
from diloco.config.schema import Config
from diloco.durable import DiskFull, replicate
from diloco.errors import ConfigError, Fenced
from diloco.launch.process.ending import exit_at_once
from diloco.objects.lease import MEND_S, RunState, lease_path, repeating
from diloco.objects.replica import Replica
from diloco.objects.store import ObjectLost, StoreAway
from diloco.state_dir import StateDir, read_endpoint, stop_syncers

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class HeldState:
    """A state directory that this process holds.

    Args:
        replica: Where what is durable is, too; None: nowhere else.
        away: Why nothing can be made durable there now, and what to do; empty: it can.
        lost: What was removed there, and what to do; empty: nothing is known to be.
        lease: Number of the lease; 0: the state is on this disk alone.
    """

    replica: Replica | None = None
    away: str = ""
    lost: str = ""
    lease: int = 0


@contextlib.asynccontextmanager
async def holding_state(
    config: Config, state: StateDir, announce: Callable[[str], None], *, is_standby: bool
) -> AsyncIterator[HeldState]:
    """Hold the state of a run while the context lasts; its lock is the caller's.

    Raises:
        ConfigError: If another machine holds it, or it is of another run.
        StoreAway: If the object store cannot be used.
    """
    held = HeldState()
    if not config.run.state:
        if lease_path(state).exists():
            raise ConfigError(
                f"coordinator.state_dir = {state.root} is the working copy of a run whose state is "
                f"in an object store, and may be behind it: set run.state as it was"
            )
        yield held
        return
    run = RunState(
        config.run.state,
        config.run.name,
        fingerprint(config),
        state,
        lambda error: _end(state, error),
    )
    try:
        await run.take(is_standby=is_standby, syncers=config.own_syncers, announce=announce)
    except StoreAway as error:
        raise ConfigError(
            f"run.state = {config.run.state}: the state of the run cannot be taken from there: "
            f"{error}; {error.remedy}, then start again"
        ) from error
    held.replica = run.replica
    run.store.fails_fast = True  # calls wait for it, and there is a sign of life
    replicate(run.replica)
    held.lease = run.lease
    beat, look = functools.partial(_beat, run, state, held), functools.partial(_look, run)
    mend = functools.partial(_mend, run, state, held)
    try:
        async with repeating(beat, look):
            async with repeating(mend, every_s=MEND_S):
                yield held
            await asyncio.to_thread(mend)  # what was removed just now, nobody would see again
    finally:
        replicate(None)
    with contextlib.suppress(DiskFull):  # the next one waits a little
        await asyncio.to_thread(run.beat, "", is_over=True)


def _beat(run: RunState, state: StateDir, held: HeldState) -> None:
    """Say that this process lives, and where it listens."""
    try:
        endpoint = read_endpoint(state.coordinator)
    except ConfigError:  # it is being written
        endpoint = None
    try:
        run.beat(endpoint.address if endpoint else "")
    except DiskFull as error:
        if not held.away:
            logger.error("%s, what is to be durable waits: %s", error.lack, error)
        held.away = (
            f"{error.lack}: rounds, joins and commands wait until it does; {error.remedy}: {error}"
        )
    else:
        if held.away:
            logger.info("the object store answers again")
        held.away = ""


def _look(run: RunState) -> None:
    """Find out, also when there is nothing to write, that another machine has taken over."""
    with contextlib.suppress(DiskFull, Fenced, ObjectLost):  # others say it; it ends this process
        run.replica.check()


def _mend(run: RunState, state: StateDir, held: HeldState) -> None:
    """Write again what was removed there, so that another machine can take over."""
    try:
        held.lost = run.replica.mend(state.journal.name)
    except ObjectLost as error:
        if not held.lost:
            logger.error("no other machine could take this run over: %s", error)
        held.lost = str(error)
    except (DiskFull, Fenced):  # said by the sign of life; ends this process
        pass


def _end(state: StateDir, error: Fenced) -> None:
    logger.error(
        "another machine has taken this run over; this one ends, and nothing that it says counts: "
        "%s",
        error,
    )
    stop_syncers(state)
    exit_at_once(error.exit_code)
