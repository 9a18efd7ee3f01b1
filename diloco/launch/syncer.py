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
import functools
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from diloco.allocator import keep_freed_memory
from diloco.bounded_text import MOST_ENDING, bounded_text
from diloco.checkpoint.host_memory import available_bytes
from diloco.checkpoint.stores import part_of, stored_plan
from diloco.config.load import load_config, with_settings
from diloco.coordinator.grants import is_valid, load_secret, sign
from diloco.durable import (
    DiskFull,
    digest_of,
    read_json,
    rename,
    write_durably,
    write_json,
)
from diloco.errors import (
    ConfigError,
    CoordinatorUnavailable,
    DilocoError,
    PlanMismatch,
)
from diloco.faults.process import wall_clock
from diloco.forecast.disk import check_room
from diloco.forecast.syncer_memory import check_syncer_memory, syncer_memory
from diloco.launch.process.disk_full_retry import retry_disk_full_async
from diloco.launch.process.ending import exit_at_once, first_of, note_signals_async
from diloco.launch.process.imports import import_for_good
from diloco.launch.process.logs import log_to
from diloco.launch.process.tensor_thread import syncer_workers
from diloco.launch.syncer_moves import SyncerMoves
from diloco.launch.syncer_store import STOPPED, mend, take_store, take_to_timeline
from diloco.loop_clock import loop_now
from diloco.objects.lease import lease_path
from diloco.objects.moved_fragment import was_let_go
from diloco.objects.payload_shelf import payloads_by
from diloco.objects.replica import Replica
from diloco.outer.fragments import Plan
from diloco.protocol.rounds.orders import Orders
from diloco.protocol.rounds.terms import Roster
from diloco.protocol.run.peer_bounds import limits_of
from diloco.protocol.run.plan_bytes import unpacked
from diloco.protos.control_pb2 import ROLE_ISLAND, ROLE_SYNCER, Grant
from diloco.security.address import listen, of_syncer, placed_address, syncer_address
from diloco.security.security import Security, metrics_protection
from diloco.state_dir import (
    ONLY_SYNCER,
    Endpoint,
    Held,
    StateDir,
    Timeline,
    directory_in_place,
    hold,
    read_bound,
    read_endpoint,
    read_timeline,
)
from diloco.syncer.reporter import HELLO_INTERVAL_S, Reporter, indexed_of
from diloco.system import usable_cpus
from diloco.telemetry.events import Event
from diloco.telemetry.round_events import RoundExpired
from diloco.telemetry.sinks import BackgroundSink, FanOut, JsonlSink, Sink
from diloco.telemetry.traces import traces_to
from diloco.transport.contracts import Handlers, Transport
from diloco.transport.errors import ConnectError
from diloco.transport.identity import Role

if TYPE_CHECKING:  # torch is imported once the store is ours
    from diloco.config.schema import Config
    from diloco.syncer.rules import SyncerRules
    from diloco.syncer.syncer import Syncer
    from diloco.syncer.worker import Workers

logger = logging.getLogger(__name__)

#: Reports that a syncer which reaches nobody waits for at least; looks meanwhile, and the longest
#: time between two.
_LEAST_REPORTS = 3
_LOOKS = 20
_MOST_LOOK_S = 5.0

_T = TypeVar("_T")

#: Exit code of a start that found the store held by another syncer.
EXIT_STORE_HELD = 75

_DRAIN_S = 0.5
_LAST_REPORT_S = 2.0
_FATAL_LINGER_S = 30.0


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
        lambda: _next_epoch(state.syncer_epoch, time.time()),
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
    way = _Way(state, security)
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
            await reporter.say_ended(_LAST_REPORT_S)
            return _good_end(config, reporter)
        process = _Process(
            config, state, security, secret, epoch, timeline, reporter, stopping, replica
        )
        return await process.serve()
    except (ConfigError, PlanMismatch) as error:  # no other start would help
        await reporter.say_ended(_LAST_REPORT_S, bounded_text(str(error), MOST_ENDING))
        raise
    finally:
        await reporter.close()


async def _keep_what_is_asked(state: StateDir, reporter: Reporter, stopping: asyncio.Event) -> None:
    await _keep_plan(state, reporter, stopping)
    try:
        _SeenIncarnations(state.incarnations).load()
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


@dataclass(frozen=True, slots=True)
class _Process:
    """What a syncer serves with, once it has its plan."""

    config: Config
    state: StateDir
    security: Security
    secret: bytes
    epoch: int
    timeline: Timeline
    reporter: Reporter
    stopping: asyncio.Event
    replica: Replica | None

    async def serve(self) -> int:
        """Serve until the end, or until the next start is to serve other fragments.

        Returns:
            The exit code.
        """
        plan = stored_plan(self.state)
        moves = SyncerMoves(self.config, self.state, plan, self.timeline, self.reporter)
        with syncer_workers(usable_cpus()) as workers:
            state, timeline = self.state, self.timeline
            await workers.notes.run(lambda: take_to_timeline(state, plan, timeline))
            if part_of(state, plan).fragments:
                code = await self._serve_all(plan, workers, moves)
            else:
                code = await self._wait_for_fragments(moves)
        # Silent for long, while the object store is away, it would be taken for lost.
        await first_of(moves.settle(self.stopping), self._stay_heard())
        return code

    async def _stay_heard(self) -> None:
        """Say that this start lives, and hear how the run stands, for ever."""
        while True:
            await self.reporter.learn_plan()
            await asyncio.sleep(HELLO_INTERVAL_S)

    async def _wait_for_fragments(self, moves: SyncerMoves) -> int:
        """Have nothing to serve until a fragment has moved here, or until the end."""
        logger.info("this syncer has no fragment: it waits until one moves to it")
        unreachable_s = self.config.transport.unreachable.seconds
        await first_of(
            moves.due(),
            self._stay_heard(),
            self.stopping.wait(),
            self.reporter.ends.wait(),
            end_when_unreachable(lambda: self.reporter.num_answers, unreachable_s),
        )
        await self.reporter.say_ended(_LAST_REPORT_S)
        return _good_end(self.config, self.reporter)

    async def _serve_all(self, plan: Plan, workers: Workers, moves: SyncerMoves) -> int:
        """Serve the fragments that are this syncer's; returns the exit code."""
        config, state, stopping = self.config, self.state, self.stopping
        if not any(state.store.glob("fragment-*")):  # a restart goes on, however full it is
            num_parameters = sum(fragment.numel for fragment in part_of(state, plan).fragments)
            check_room(config, num_parameters, islands=(), is_new=True, own_store=state.store)
            if not any(path for s in state.syncers for path in s.store.glob("fragment-*")):
                # Later, others may have taken theirs.
                check_syncer_memory(config, plan, state.syncer_id)
        clock = wall_clock(os.environ, state.syncer_name)
        events = self._open_events(clock)
        syncer = self._build_syncer(plan, workers, events, clock)
        # It waits for room on its disk, and for the coordinator if its store lacks a fragment.
        await first_of(
            _start(syncer, self.reporter, config.transport.unreachable.seconds),
            stopping.wait(),
            self.reporter.ends.wait(),
        )
        if stopping.is_set() or self.reporter.ends.is_set():
            await self.reporter.say_ended(_LAST_REPORT_S)
            await syncer.stop()
            events.close()
            return _good_end(config, self.reporter)
        payloads = None
        if self.replica is not None and config.run.has_bucket:
            payloads = payloads_by(config.run.state, self.replica, self.epoch)
        with payloads or contextlib.nullcontext() as around:
            return await self._serve(plan, workers, syncer, events, around, moves)

    async def _serve(
        self,
        plan: Plan,
        workers: Workers,
        syncer: Syncer,
        events: Sink,
        around: Callable[[Handlers], Handlers] | None,
        moves: SyncerMoves,
    ) -> int:
        """Answer islands and report to the coordinator, until either says that this ends."""
        config, state, reporter, stopping = self.config, self.state, self.reporter, self.stopping
        bound = read_bound(state.bound)
        coordinator = read_endpoint(state.coordinator)
        own = config.syncers.get(state.syncer_name.removeprefix(f"{ONLY_SYNCER}-"))
        server = await listen(
            own.listen if own else of_syncer(config.coordinator.syncer_listen, state.syncer_id),
            bound,
            syncer.handlers,
            security=self.security.knowing(coordinator.address if coordinator else ""),
            limits=limits_of(config),
            on_refused=syncer.meter.refusal,
            around=around,
        )
        address = (
            placed_address(server.address, own)
            if own
            else syncer_address(server.address, config.coordinator, state.syncer_id)
        )

        def show_address() -> None:
            write_json(state.bound, server.address)
            Endpoint(address, os.getpid()).write(state.syncer)

        await retry_disk_full_async("the syncer's address", show_address, given_up=stopping)
        logger.info("syncer serves, address=%s epoch=%d", address, self.epoch)
        # An island that returns waits for nobody: codecs that are not compiled yet give the same.
        warming = asyncio.create_task(workers.transfers.run(lambda: _warm_up(config, plan)))
        reporting = asyncio.create_task(reporter.run(syncer, address))
        verifying = asyncio.create_task(syncer.verify_stores())
        mending = asyncio.create_task(mend(self.replica, reporter))
        try:
            async with self._serving_metrics(syncer, is_restart=bound != ""):
                await first_of(
                    syncer.ended.wait(),
                    stopping.wait(),
                    reporter.ends.wait(),
                    asyncio.shield(reporting),
                    moves.due(),
                    end_when_unreachable(
                        lambda: reporter.num_answers + syncer.num_calls,
                        config.transport.unreachable.seconds,
                    ),
                )
                return await self._end(syncer)
        finally:
            await server.stop(_DRAIN_S)
            await syncer.stop()
            await reporter.drain(_LAST_REPORT_S)
            for task in (reporting, verifying, mending):
                task.cancel()
            await asyncio.gather(reporting, verifying, mending, return_exceptions=True)
            if self.replica is not None:  # what was removed just now, nobody would see again
                with contextlib.suppress(DilocoError, DiskFull):
                    await asyncio.to_thread(self.replica.mend)
            await reporter.say_ended(_LAST_REPORT_S)
            events.close()
            await warming

    @contextlib.asynccontextmanager
    async def _serving_metrics(self, syncer: Syncer, *, is_restart: bool) -> AsyncIterator[None]:
        """Serve metrics where the run asks for them."""
        address = of_syncer(self.config.telemetry.syncer_metrics, self.state.syncer_id)
        if not address:
            yield
            return
        from diloco.telemetry.prometheus import MetricsServer, syncer_metrics

        metrics = MetricsServer(
            address,
            lambda: list(syncer_metrics(syncer.states, syncer.meter, syncer_epoch=self.epoch)),
            setting="telemetry.syncer_metrics",
            protection=metrics_protection(self.config, self.security),
        )
        try:
            await metrics.start(is_restart=is_restart)
            yield
        finally:
            await metrics.stop()

    def _open_events(self, clock: Callable[[], float]) -> Sink:
        """Open the file of what happens to rounds; a run that is under way goes on without.

        Raises:
            ConfigError: If it cannot be written to, at the first start.
        """
        config, state = self.config, self.state
        directory = Path(config.telemetry.dir) if config.telemetry.dir else state.root / "telemetry"
        context = {"run": config.run.name, "syncer_epoch": self.epoch}
        context["timeline"] = self.timeline.number
        path = directory / f"events-{state.syncer_name}.jsonl"
        rounds = BackgroundSink("rounds", JsonlSink(path, context, clock))
        traces = traces_to("diloco-syncer", state.syncer_name, context, clock)
        sink = FanOut([rounds, *traces])
        try:
            sink.open()
        except OSError as error:
            problem = f"telemetry.dir = {directory}: events of rounds cannot be written there"
            if not state.bound.exists():
                raise ConfigError(f"{problem}: {error}; give another directory") from error
            logger.warning("the run goes on without them: %s: %s", problem, error)
            return FanOut(())
        return sink

    async def _end(self, syncer: Syncer) -> int:
        """Give the exit code; a run that is lost is still served, so that its islands learn why."""
        if syncer.failure is not None:
            return 1
        if syncer.fatal is None:
            logger.info("syncer stops")
            return _good_end(self.config, self.reporter)
        self.reporter.fail(syncer.fatal.reason, syncer.fatal.exit_code)
        ends = first_of(self.stopping.wait(), self.reporter.ends.wait())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ends, _FATAL_LINGER_S)
        return syncer.fatal.exit_code

    def _build_syncer(
        self, plan: Plan, workers: Workers, events: Sink, clock: Callable[[], float]
    ) -> Syncer:
        import torch

        from diloco.forecast.build import build_syncer_rules
        from diloco.syncer.syncer import Syncer
        from diloco.versions.store import FragmentStore

        torch.set_num_threads(1)  # of one operation; lanes are merged side by side
        config, state, reporter, outer = self.config, self.state, self.reporter, self.config.outer
        stores = [
            FragmentStore(
                state.store,
                fragment,
                outer.retained_versions,
                is_indexed=functools.partial(reporter.is_indexed, fragment.fragment_id),
                snapshot_rounds=outer.snapshot_rounds,
                keeps_all=outer.keep_contributions == "all",
                num_threads=usable_cpus(),
            )
            for fragment in part_of(state, plan).fragments
        ]
        memory = syncer_memory(config, [store.fragment for store in stores])
        at_once = memory.merges_at_once(usable_cpus(), available_bytes())
        logger.info("merges of as many as %d fragments at once", at_once)
        timeline = self.timeline.number
        rules = build_syncer_rules(config, timeline=timeline, merges_at_once=at_once)
        return Syncer(
            plan,
            rules,
            stores,
            syncer_epoch=self.epoch,
            incarnations=_SeenIncarnations(state.incarnations),
            is_granted=lambda grant: is_valid(
                grant, self.secret, run=config.run.name, role=ROLE_ISLAND, now_unix_s=clock()
            ),
            workers=workers,
            on_record=reporter.add_record,
            on_change=reporter.changed,
            orders=_Orders(state.orders, config, rules),
            on_event=functools.partial(_on_event, events, reporter),
            unix_clock=clock,
        )


def _good_end(config: Config, reporter: Reporter) -> int:
    """Give the exit code of an end in good order.

    One with a machine of its own is started again unless the coordinator has said that all end.
    """
    return 0 if reporter.ends.is_set() or not config.syncers else STOPPED


async def _start(syncer: Syncer, reporter: Reporter, unreachable_s: float) -> None:
    """Read the store; where that lacks a fragment, ask first whether the run ever had it.

    A damaged one keeps nobody waiting: that the run had it is known.

    Raises:
        CoordinatorUnavailable: If the coordinator does not answer for `unreachable_s` seconds.
    """
    await syncer.start()
    if all(state.is_founded or state.is_damaged for state in syncer.states):
        return

    async def ask() -> None:
        syncer.indexed(*indexed_of(await reporter.learn_plan()))

    await first_of(ask(), end_when_unreachable(lambda: reporter.num_answers, unreachable_s))


def _on_event(events: Sink, reporter: Reporter, event: Event) -> None:
    """Write what happens to rounds; the coordinator gets what it shows of it."""
    events.write(event)
    if reporter.alarms.on_event(event, loop_now()):
        reporter.changed()
    if isinstance(event, RoundExpired):
        reporter.add_expiry(event)


def _warm_up(config: Config, plan: Plan) -> None:
    from diloco.compression.warm_up import warm_up

    warm_up(plan, (config.outer.uplink, config.outer.downlink))


class _SeenIncarnations:
    """Highest accepted incarnation of each island, in one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[str, int]:
        """Read them.

        Raises:
            ValueError: If the file is damaged.
        """
        try:
            stored = read_json(self._path) or {}
            return {str(island): int(number) for island, number in stored.items()}
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{self._path} is damaged: {error}") from error

    def store(self, incarnations: dict[str, int]) -> None:
        write_json(self._path, incarnations)


class _Orders:
    """The coordinator's last orders, in one file, and what they make of a configuration."""

    def __init__(self, path: Path, config: Config, rules: SyncerRules) -> None:
        self._path = path
        self._config = config
        self._rules = rules

    def load(self) -> Orders:
        """Read the last orders; damaged ones are set aside, the coordinator says them again."""
        try:
            content = read_json(self._path)
            return Orders.from_json(content) if content else Orders()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            aside = self._path.with_name(self._path.name + ".damaged")
            rename(self._path, aside)
            logger.error(
                "%s is damaged and set aside as %s: nothing opens before the coordinator has said "
                "again who takes part: %r",
                self._path, aside.name, error,
            )  # fmt: skip
            return Orders(Roster((), is_paused=True))

    def store(self, orders: Orders) -> None:
        write_json(self._path, orders.to_json())

    def rules(self, orders: Orders) -> SyncerRules:
        from diloco.forecast.build import build_syncer_rules

        return build_syncer_rules(
            with_settings(self._config, orders.policy_json),
            timeline=self._rules.timeline,
            merges_at_once=self._rules.merges_at_once,
            policy_revision=orders.policy_revision,
        )


def _next_epoch(path: Path, now_unix_s: float) -> int:
    """Raise the number of a syncer's starts; durable when this returns.

    It is the time of the start, in seconds, or one more than the last: islands take no word of a
    lower number, so that a counter from 1 on would end the run where its file is damaged, lost or
    an older copy.
    """
    try:
        before = int(read_json(path) or 0)
    except (ValueError, TypeError) as error:
        logger.error("the number of the last start is damaged: %s", error)
        before = 0
    epoch = max(before + 1, int(now_unix_s))
    write_json(path, epoch)
    return epoch


class _Way:
    """The way to the coordinator of now, by the addresses that the state directory names."""

    def __init__(self, state: StateDir, security: Security) -> None:
        self._state, self._security = state, security
        self._num_turns = 0

    def turn(self) -> None:
        """Try the next address first."""
        self._num_turns += 1

    def connect(self) -> Transport:
        """Open it; raises ConnectError if none is known."""
        coordinator = read_endpoint(self._state.coordinator)
        if coordinator is None:
            raise ConnectError(f"{self._state.coordinator} names no coordinator")
        first, *others = coordinator.address.split(",")
        addresses = [first, *others]
        turned = self._num_turns % len(addresses)
        address = ",".join(addresses[turned:] + addresses[:turned])
        return self._security.transport(address, Role.COORDINATOR)


async def end_when_unreachable(num_words: Callable[[], int], unreachable_s: float) -> None:
    """Raise once nothing has come for `unreachable_s` seconds; else go on for ever.

    Silence is counted by looking: time in which this process was frozen does not count.

    Args:
        num_words: Counts what has come, from any process.
        unreachable_s: `transport.unreachable`; some reports are waited for in any case.

    Raises:
        CoordinatorUnavailable: Then.
    """
    unreachable_s = max(unreachable_s, _LEAST_REPORTS * HELLO_INTERVAL_S)
    look_s = min(unreachable_s / _LOOKS, _MOST_LOOK_S)
    known, silent_s, looked = num_words(), 0.0, loop_now()
    while silent_s < unreachable_s:
        await asyncio.sleep(look_s)
        now = loop_now()
        silent_s += min(now - looked, 2 * look_s)
        looked = now
        if (words := num_words()) != known:
            known, silent_s = words, 0.0
    raise CoordinatorUnavailable(
        f"for {unreachable_s:g} s (transport.unreachable) neither the coordinator has answered nor "
        "any island called: this syncer ends. All that it has published is durable, and it is "
        "started again by its coordinator (diloco coordinator RUN.toml) or by diloco syncer"
    )


if __name__ == "__main__":
    exit_at_once(main())
