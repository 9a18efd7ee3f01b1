"""Holds a run's state for a coordinator: on its own disk, or in an object store under a lease.

Who loses the lease has nothing left to say: it stops its syncers and ends at once.

Source: PROTOCOL.md, "State in an object store".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from diloco.config.schema import Config
from diloco.durable import DiskFull, replicate
from diloco.errors import ConfigError, Fenced
from diloco.launch.process.ending import exit_at_once
from diloco.objects.lease import BEAT_S, RunState
from diloco.objects.replica import Replica
from diloco.state_dir import StateDir, read_endpoint, stop_syncers

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class HeldState:
    """A state directory that this process holds.

    Args:
        replica: Where what is durable is, too; None: nowhere else.
        problem: Why nothing can be made durable there now, and what to do; empty: it can.
    """

    replica: Replica | None = None
    problem: str = ""


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
        yield held
        return
    run = RunState(config.run.state, config.run.name, state, lambda error: _end(state, error))
    try:
        await run.take(
            is_standby=is_standby, num_syncers=config.coordinator.num_syncers, announce=announce
        )
    except DiskFull as error:
        raise ConfigError(
            f"run.state = {config.run.state}: the state of the run cannot be taken from there: "
            f"{error}. {error.remedy.capitalize()}, then start again"
        ) from error
    held.replica = run.replica
    replicate(run.replica)
    beating = asyncio.create_task(_beat(run, config, state, held))
    try:
        yield held
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        replicate(None)
    with contextlib.suppress(DiskFull):  # the next one waits a little
        await asyncio.to_thread(run.beat, "", is_over=True)


async def _beat(run: RunState, config: Config, state: StateDir, held: HeldState) -> None:
    """Say again and again that this process lives, and where it listens."""
    while True:
        endpoint = read_endpoint(state.coordinator)
        address = config.coordinator.address or (endpoint.address if endpoint else "")
        try:
            await asyncio.to_thread(run.beat, address)
        except DiskFull as error:
            if not held.problem:
                logger.error("%s, what is to be durable waits: %s", error.lack, error)
            held.problem = (
                f"{error.lack}: rounds, joins and commands wait until it does; {error.remedy}: "
                f"{error}"
            )
        else:
            if held.problem:
                logger.info("the object store answers again")
            held.problem = ""
        await asyncio.sleep(BEAT_S)


def _end(state: StateDir, error: Fenced) -> None:
    logger.error(
        "another machine has taken this run over; this one ends, and nothing that it says counts: "
        "%s",
        error,
    )
    stop_syncers(state)
    exit_at_once(error.exit_code)
