"""Composition root of a syncer's process: `python -m diloco.launch.syncer STATE_DIR`.

Started by its coordinator, or by `diloco syncer` on a machine of its own, it holds the lock on its
store from the first instant; started by hand it takes it before anything heavy is imported, so that
of two starts one ends at once. It raises its epoch durably before its first reply; it survives its
coordinator, whose address, configuration and timeline it finds in the state directory, and ends by
itself once neither that nor any island has spoken to it for `transport.unreachable`, or once the
coordinator says that all end. A store of an earlier timeline is first taken back to the checkpoint
that the run was resumed from. One of several serves the fragments that the coordinator gave it with
the plan; where that moves some it ends, and its next start serves the others.

Source: PROTOCOL.md, "Syncer epoch", "Restart of a syncer", "Resume" and "Moves of fragments".
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from diloco.allocator import keep_freed_memory
from diloco.bounded_text import MOST_ENDING, bounded_text
from diloco.checkpoint.stores import part_of, stored_plan
from diloco.config.load import load_config
from diloco.coordinator.grants import load_secret, sign
from diloco.durable import digest_of, read_json, write_durably, write_json
from diloco.errors import ConfigError, DilocoError, PlanMismatch
from diloco.launch.coordinator_contact import WayToCoordinator, end_when_unreachable
from diloco.launch.process.disk_full_retry import retry_disk_full_async
from diloco.launch.process.ending import exit_at_once, first_of, note_signals_async
from diloco.launch.process.imports import import_for_good
from diloco.launch.process.logs import log_to
from diloco.launch.syncer_files import SeenIncarnations, next_epoch
from diloco.launch.syncer_process import LAST_REPORT_S, SyncerProcess, good_end
from diloco.launch.syncer_store import take_store
from diloco.objects.lease import lease_path
from diloco.objects.moved_fragment import was_let_go
from diloco.outer.fragments import Plan
from diloco.protocol.run.plan_bytes import unpacked
from diloco.protos.control_pb2 import ROLE_SYNCER, Grant
from diloco.security.security import Security
from diloco.state_dir import (
    ONLY_SYNCER,
    Endpoint,
    Held,
    StateDir,
    directory_in_place,
    hold,
    read_timeline,
)
from diloco.syncer.reporter import Reporter
from diloco.transport.identity import Role

logger = logging.getLogger(__name__)

#: Exit code of a start that found the store held by another syncer.
EXIT_STORE_HELD = 75


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the store in a state directory until a signal or a failure; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m diloco.launch.syncer")
    parser.add_argument("state_dir", type=Path, help="the run's state directory")
    parser.add_argument(
        "--name", default=ONLY_SYNCER, help="of this syncer's store; syncer-N: of several"
    )
    parser.add_argument("--lock-descriptor", type=int, help="the store's lock, held already")
    parsed = parser.parse_args(arguments)
    state = StateDir(parsed.state_dir.absolute(), parsed.name)
    log_to(None, logging.INFO)
    keep_freed_memory()  # before there is a second thread
    try:
        with hold(state.store_lock, inherited=parsed.lock_descriptor):
            try:
                return asyncio.run(_run_syncer(state))
            finally:
                state.syncer.unlink(missing_ok=True)
    except Held as error:
        logger.error("another syncer serves this store, exiting: %s", error)
        return EXIT_STORE_HELD
    except (DilocoError, IsADirectoryError) as problem:
        said = directory_in_place(problem) if isinstance(problem, OSError) else problem
        logger.error("syncer cannot serve: %s", said)
        return said.exit_code
    except Exception:
        logger.exception("syncer failed")
        return 1


async def _run_syncer(state: StateDir) -> int:
    async with contextlib.AsyncExitStack() as held:
        return await _run_held(state, held)


async def _run_held(state: StateDir, held: contextlib.AsyncExitStack) -> int:
    stopping = note_signals_async().forced
    config = load_config(state.resolved)
    state = replace(state, syncer_id=list(config.syncer_shares).index(state.syncer_name))
    secret = load_secret(state.secret)
    replica = await take_store(config, state, held, stopping) if config.run.state else None
    epoch = await retry_disk_full_async(
        "the syncer's epoch",
        lambda: next_epoch(state.syncer_epoch, time.time()),
        given_up=stopping,
    )
    starting = Endpoint("", os.getpid())
    await retry_disk_full_async(
        "the syncer's word", lambda: starting.write(state.syncer), given_up=stopping
    )
    logger.info(
        "%s starting, run=%s epoch=%d pid=%d",
        state.syncer_name, config.run.name, epoch, os.getpid(),
    )  # fmt: skip
    timeline = read_timeline(state.timeline)
    security = Security.of(config, Role.SYNCER, syncer=state.syncer_name)
    grant = Grant(run=config.run.name, timeline=timeline.number, roles=[ROLE_SYNCER])
    way = WayToCoordinator(state, security)
    reporter = Reporter(
        connect=way.connect,
        grant=sign(grant, secret),
        syncer_epoch=epoch,
        pid=os.getpid(),
        syncer_id=state.syncer_id,
        lease=int(read_json(lease_path(state)) or 0) if config.syncers else 0,
        policy_digest=digest_of(state.policy) if config.syncers else "",
        on_stale=way.turn,
    )
    import_for_good("diloco.syncer.syncer")  # seconds of torch, while islands start too
    try:
        await first_of(
            _keep_what_is_asked(state, reporter, stopping),
            stopping.wait(),
            reporter.ends.wait(),
            end_when_unreachable(
                lambda: reporter.num_answers, config.transport.unreachable.seconds
            ),
        )
        if stopping.is_set() or reporter.ends.is_set():
            await reporter.say_ended(LAST_REPORT_S)
            return good_end(config, reporter)
        process = SyncerProcess(
            config, state, security, secret, epoch, timeline, reporter, stopping, replica
        )
        return await process.serve()
    except (ConfigError, PlanMismatch) as error:  # no other start would help
        await reporter.say_ended(LAST_REPORT_S, bounded_text(str(error), MOST_ENDING))
        raise
    finally:
        await reporter.close()


async def _keep_what_is_asked(state: StateDir, reporter: Reporter, stopping: asyncio.Event) -> None:
    await _keep_plan(state, reporter, stopping)
    try:
        SeenIncarnations(state.incarnations).load()
    except ValueError as error:
        logger.error("asking the coordinator which starts of islands count: %s", error)
        reply = await reporter.learn_plan()
        granted = dict(zip(reply.islands, reply.incarnations, strict=True))
        await retry_disk_full_async(
            "which starts of islands count",
            lambda: write_json(state.incarnations, {i: n for i, n in granted.items() if n}),
            given_up=stopping,
        )


async def _keep_plan(state: StateDir, reporter: Reporter, stopping: asyncio.Event) -> None:
    """Have the plan in the store, and what of it is ours: a restart needs no coordinator."""
    if state.plan.exists():
        try:
            part_of(state, stored_plan(state))
            return
        except DilocoError as error:
            logger.warning("asking the coordinator: %s", error)
    reply = await reporter.learn_plan()

    def keep() -> None:
        plan_json = unpacked(reply.plan)
        if state.syncer_name != ONLY_SYNCER:
            moving = [*reply.takes, *reply.withdrawn]
            others = {*reply.elsewhere, *(each.fragment_id for each in moving)}
            there = (fragment.fragment_id for fragment in Plan.from_json(plan_json).fragments)
            # One that moves away is among them until it was let go of.
            own = [p for p in there if p not in others and not was_let_go(state, p)]
            write_json(state.fragments, own)
        write_durably(state.plan, [plan_json.encode()])

    await retry_disk_full_async("the plan", keep, given_up=stopping)


if __name__ == "__main__":
    exit_at_once(main())
