"""The end of a coordinator: the stop that is asked for, who is answered and stopped after it.

Also what it says last, with what to type next.

Source: PROTOCOL.md, "Graceful stop".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence

from diloco.checkpoint.run_checkpoints import RESUME, commands_of_islands, take_published
from diloco.config.schema import Config
from diloco.coordinator.daemon import Coordinator
from diloco.coordinator.journal import Journal
from diloco.coordinator.run_status import RunStatus
from diloco.durable import DiskFull
from diloco.errors import ConfigError
from diloco.launch.process.disk_full_retry import retry_disk_full_async
from diloco.launch.process.ending import StopRequest
from diloco.launch.syncer_supervisor import SyncerSupervisor
from diloco.protocol.run.membership import Membership
from diloco.state_dir import StateDir, holder
from diloco.versions.frames import headers_in
from diloco.versions.pins import pin_directory

_LOOK_S = 0.05
#: For which syncers on machines of their own have time to be heard of at the end.
_PLACED_WORD_S = 5.0
#: Seconds within which `diloco status --watch` looks again, on a machine that is busy, too.
_WATCHED_S = 3.0


async def asked_to_stop(
    coordinator: Coordinator,
    membership: Membership,
    signals: StopRequest,
    announce: Callable[[str], None],
) -> None:
    """Return when everything is to stop at once; before that, pass a graceful stop on.

    It waits for the repair of a damaged fragment: no other signal could ask for it.
    """
    loop = asyncio.get_running_loop()

    def request() -> bool:
        return asyncio.run_coroutine_threadsafe(coordinator.request_stop(), loop).result()

    await signals.asked.wait()
    while True:
        try:
            is_stopping = await retry_disk_full_async("the stop", request, given_up=signals.forced)
        except DiskFull:  # that has been said, and everything is to stop at once
            return
        if is_stopping or not (refusal := membership.repairs.against_stop):
            break
        if not coordinator.run_status.is_stop_waiting:
            coordinator.run_status.is_stop_waiting = True
            announce(
                f"the stop waits: {refusal}; a second signal stops coordinator and syncer at once"
            )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(signals.forced.wait(), _LOOK_S)
            return
    coordinator.run_status.is_stop_waiting = False
    if not is_stopping:
        announce("stopping: every island ends; nothing published is lost")
        coordinator.halt()
        return
    how = "" if membership.rules.is_elastic else " goes on to one inner step,"
    announce(
        f"stopping: every island{how} writes its checkpoint and leaves; a second signal stops "
        f"coordinator and syncer at once"
    )
    await signals.forced.wait()


async def stop_syncers_and_index(
    state: StateDir,
    supervisors: Sequence[SyncerSupervisor],
    journal: Journal,
    given_up: asyncio.Event,
) -> None:
    """Stop the syncers that live, if any, and index what they could not report.

    A coordinator that was away when the run ended has no index of the last versions. Once
    `given_up` is set this waits for no room: the next start of the syncer reports what is missing.

    Raises:
        ConfigError: If one cannot be stopped.
    """
    await asyncio.gather(*(supervisor.stop() for supervisor in supervisors))
    for each in state.own_syncers:
        if (pid := holder(each.store_lock)) is not None:
            raise ConfigError(
                f"the syncer of {each.store} (process {pid}) does not end: end it, then start again"
            )

    def index() -> None:
        stores = sorted(d for each in state.own_syncers for d in each.store.glob("fragment-*"))
        headers = [header for directory in stores for header in headers_in(directory)]
        keys = ((h["timeline"], h["fragment_id"], h["version"]) for h in headers)
        rows = [(*k, json.dumps(h, sort_keys=True)) for k, h in zip(keys, headers, strict=True)]
        journal.write((), rows)

    with contextlib.suppress(DiskFull):  # the journal has said so
        await retry_disk_full_async("the index of the last versions", index, given_up=given_up)


async def end_placed(run_status: RunStatus, given_up: asyncio.Event, longest_s: float) -> None:
    """Have syncers on machines of their own end, once they have told everything.

    One that is heard of meanwhile may have a large version to write. One that is not goes on, and
    finds at its next word how the run stands.
    """
    run_status.ends_syncers = True
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not run_status.have_syncers_ended and not given_up.is_set():
        await asyncio.sleep(_LOOK_S)
        waited_s = loop.time() - began
        if waited_s > (longest_s if run_status.are_syncers_heard else _PLACED_WORD_S):
            return


async def linger(membership: Membership, linger_s: float) -> None:
    """Answer on until every island that joined has left, at most `linger_s`."""
    loop = asyncio.get_running_loop()
    until = loop.time() + linger_s
    while not membership.is_deserted and loop.time() < until:
        await asyncio.sleep(_LOOK_S)


async def let_watchers_see(run_status: RunStatus, signals: StopRequest) -> None:
    """Answer on while somebody watches, until the end was seen."""
    run_status.has_halted = run_status.is_halting
    now = asyncio.get_running_loop().time()
    if now - run_status.watched_at < _WATCHED_S:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(signals.forced.wait(), _WATCHED_S)


def stopped_text(config: Config, state: StateDir, membership: Membership) -> str:
    """Say where a run is stopped, where its checkpoints are, and what to type next."""
    step = membership.stop_step or 0
    pins = ", ".join(str(pin_directory(each.store, step)) for each in state.own_syncers)
    return (
        f"the run {membership.run!r} is stopped {membership.stop_name}. Its "
        f"checkpoints: {config.checkpoint_dir} here, checkpoint.dir at other sites, "
        f"{pins or config.run.state} of the syncer\n" + next_text(config, state, membership)
    )


def next_text(config: Config, state: StateDir, membership: Membership) -> str:
    """Say what to type to go on with a run that has ended."""
    if not membership.checkpoints:
        return f"no checkpoint is complete. {take_published(state)}"
    return (
        f"resume it from {membership.checkpoint_name(membership.to_resume)}: {RESUME}; then "
        f"every island: "
        f"{commands_of_islands(config)}"
    )
