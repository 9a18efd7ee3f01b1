"""A syncer's store before it serves: here as the object store has it, at the timeline of the run.

Source: PROTOCOL.md, "State in an object store" and "Resume".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TypeVar

from diloco.bounded_text import bounded_text
from diloco.checkpoint.stores import part_of
from diloco.config.schema import Config
from diloco.durable import DiskFull, read_json, replicate, sync_directory, unlink
from diloco.errors import ConfigError, Fenced
from diloco.launch.process.ending import exit_at_once, first_of
from diloco.loop_clock import loop_now
from diloco.objects.lease import (
    MEND_S,
    follows_path,
    is_moving,
    lease_path,
    own_name,
    repeating,
    store_replica,
)
from diloco.objects.placed_syncer import PlacedSyncer
from diloco.objects.replica import Replica
from diloco.objects.store import ObjectLost, ObjectStore
from diloco.outer.fragments import Plan
from diloco.protocol.run.alarms import Alarm, AlarmKind
from diloco.state_dir import StateDir, Timeline, read_endpoint, read_timeline
from diloco.syncer.reporter import Reporter
from diloco.versions.frames import headers_in
from diloco.versions.pins import restore, valid_pins
from diloco.versions.record import RecordInvalid

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Exit code of a syncer with a machine of its own that a signal has stopped.
STOPPED = 143
_AGAIN_S = 1.0


async def take_store(
    config: Config, state: StateDir, held: contextlib.AsyncExitStack, stopping: asyncio.Event
) -> Replica:
    """Make the store what the object store of the run has, and keep it there from here on.

    Until `held` ends a syncer on a machine of its own says that it lives, and looks whether another
    machine has taken its place.

    Raises:
        Fenced: If another machine has taken the run, or the syncer's place, over.
        DiskFull: If there is no room here, or the object store does not answer.
    """
    store = ObjectStore(config.run.state)
    lease = int(read_json(lease_path(state)) or 0)
    follows = read_json(follows_path(state)) if config.syncers else None
    replica = await _until_done(
        lambda: store_replica(store, state, lease, config.run.name, _end_fenced, follows=follows),
        stopping,
    )
    if config.syncers:
        place, own = PlacedSyncer(store, state), own_name(state)

        def beat() -> None:
            there = read_endpoint(state.syncer)
            with contextlib.suppress(DiskFull):  # who writes a version says it
                place.beat(own, there.address if there else "")

        def look() -> None:  # others say it; `_end_fenced` ends this process
            with contextlib.suppress(DiskFull, Fenced, ObjectLost):
                replica.check()

        await held.enter_async_context(repeating(beat, look))
    logger.info("%s: fetching what is not here", state.syncer_name)

    def fetch() -> int:
        return replica.restore(only=lambda name: not is_moving(name))

    def forget_copies() -> None:
        for name, file in replica.files(only=is_moving).items():
            if not file.is_at(path := state.store / name):
                unlink(path)

    logger.info("fetched, bytes=%d", await _until_done(fetch, stopping))
    replicate(replica)
    # What moves here is copied again, where this machine has it not, rather than waited for.
    await asyncio.to_thread(forget_copies)
    return replica


async def _until_done(work: Callable[[], _T], stopping: asyncio.Event) -> _T:
    """Do work of hours in a thread, again while there is no room, until it is to stop at once."""
    while True:
        doing = asyncio.ensure_future(asyncio.to_thread(work))
        await first_of(asyncio.wait([doing]), stopping.wait())
        if not doing.done():
            exit_at_once(STOPPED)
        try:
            return doing.result()
        except DiskFull as error:
            logger.error("%s, the store waits: %s: %s", error.lack, error.remedy, error)
            await first_of(asyncio.sleep(_AGAIN_S), stopping.wait())
            if stopping.is_set():
                raise


async def mend(replica: Replica | None, reporter: Reporter) -> None:
    """Write again what was removed from the object store, for ever; the run's status says so."""
    while replica is not None:
        try:
            text = await asyncio.to_thread(replica.mend)
        except ObjectLost as error:
            text = f"no other machine could take this syncer's place: {error}"
        except DiskFull as error:
            text = f"{error.lack}: rounds of this syncer wait; {error.remedy}: {error}"
        if text:
            reporter.alarms.raise_(Alarm(AlarmKind.STATE_AWAY, bounded_text(text)), loop_now())
        else:
            reporter.alarms.clear(AlarmKind.STATE_AWAY)
        await asyncio.sleep(MEND_S)


def _end_fenced(error: Fenced) -> None:
    logger.error("another machine has taken this syncer's place, and it ends: %s", error)
    exit_at_once(error.exit_code)


def take_to_timeline(state: StateDir, plan: Plan, timeline: Timeline) -> None:
    """Take a store of an earlier timeline back to the checkpoint that this one begins from.

    Killed at any instruction, it is done again by the next start: the store's file of its
    timeline is the last thing written.

    Raises:
        ConfigError: If the checkpoint's pin is not whole; names an older one that is. Or if the
            store is ahead of the run.
    """
    problem = ""
    try:
        stored = read_timeline(state.store_timeline)
    except ConfigError as error:
        stored, problem = Timeline(), str(error)
    if stored == timeline and not problem:
        return
    if (problem or stored.number < timeline.number) and _has_records_of(state, timeline):
        logger.error("%s is lost or damaged: records say that it was timeline %d",
                     state.store_timeline, timeline.number)  # fmt: skip
        timeline.write(state.store_timeline)
        return
    if problem:
        raise ConfigError(problem)
    if stored.number >= timeline.number:
        raise ConfigError(
            f"{state.store_timeline} says timeline {stored.number}, {state.timeline} says "
            f"{timeline.number}: one of them is a copy from another day; bring back the other"
        )
    step, part = timeline.resume_step, part_of(state, plan)
    try:
        restore(state.store, part, step=step, abandoned_timeline=stored.number)
    except RecordInvalid as error:
        older = [pinned for pinned in valid_pins(state.store, part) if pinned < step]
        raise ConfigError(
            f"the checkpoint of inner step {step} cannot be restored: {error}. "
            + (
                f"Resume an older one: diloco coordinator RUN.toml --resume --at {older[-1]}"
                if older
                else "There is no older one; start the run again in an empty coordinator.state_dir"
            )
        ) from error
    for of_earlier_starts in (state.incarnations, state.orders):
        unlink(of_earlier_starts)
    sync_directory(state.store)
    timeline.write(state.store_timeline)
    logger.info("store restored, timeline=%d step=%d", timeline.number, step)


def _has_records_of(state: StateDir, timeline: Timeline) -> bool:
    """Whether a store has been served in a timeline."""
    return any(
        header["timeline"] == timeline.number
        for directory in state.store.glob("fragment-*")
        for header in headers_in(directory)
    )
