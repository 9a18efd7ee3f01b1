"""One start of a syncer at work: it serves until the end, or until fragments of it have moved.

Its store is held and here, and its plan is known (`launch.syncer`).

Source: PROTOCOL.md, "Restart of a syncer" and "Moves of fragments".
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.checkpoint.host_memory import available_bytes
from diloco.checkpoint.stores import part_of, stored_plan
from diloco.coordinator.grants import is_valid
from diloco.durable import DiskFull, write_json
from diloco.errors import ConfigError, DilocoError
from diloco.faults.process import wall_clock
from diloco.forecast.disk import check_room
from diloco.forecast.syncer_memory import check_syncer_memory, syncer_memory
from diloco.launch.coordinator_contact import end_when_unreachable
from diloco.launch.process.disk_full_retry import retry_disk_full_async
from diloco.launch.process.ending import first_of
from diloco.launch.process.tensor_thread import syncer_workers
from diloco.launch.syncer_files import KeptOrders, SeenIncarnations
from diloco.launch.syncer_moves import SyncerMoves
from diloco.launch.syncer_store import STOPPED, mend, take_to_timeline
from diloco.loop_clock import loop_now
from diloco.objects.payload_shelf import payloads_by
from diloco.objects.replica import Replica
from diloco.outer.fragments import Plan
from diloco.protocol.run.peer_bounds import limits_of
from diloco.protos.control_pb2 import ROLE_ISLAND
from diloco.security.address import listen, of_syncer, placed_address, syncer_address
from diloco.security.security import Security, metrics_protection
from diloco.state_dir import ONLY_SYNCER, Endpoint, StateDir, Timeline, read_bound, read_endpoint
from diloco.syncer.reporter import HELLO_INTERVAL_S, Reporter, indexed_of
from diloco.system import usable_cpus
from diloco.telemetry.events import Event
from diloco.telemetry.round_events import RoundExpired
from diloco.telemetry.sinks import BackgroundSink, FanOut, JsonlSink, Sink
from diloco.telemetry.traces import traces_to
from diloco.transport.contracts import Handlers

if TYPE_CHECKING:  # torch is imported once the store is ours
    from diloco.config.schema import Config
    from diloco.syncer.syncer import Syncer
    from diloco.syncer.worker import Workers

logger = logging.getLogger(__name__)

_DRAIN_S = 0.5
_FATAL_LINGER_S = 30.0
#: For which the coordinator is waited for with the last words.
LAST_REPORT_S = 2.0


@dataclass(frozen=True, slots=True)
class SyncerProcess:
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
        await self.reporter.say_ended(LAST_REPORT_S)
        return good_end(self.config, self.reporter)

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
            await self.reporter.say_ended(LAST_REPORT_S)
            await syncer.stop()
            events.close()
            return good_end(config, self.reporter)
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
            await reporter.drain(LAST_REPORT_S)
            for task in (reporting, verifying, mending):
                task.cancel()
            await asyncio.gather(reporting, verifying, mending, return_exceptions=True)
            if self.replica is not None:  # what was removed just now, nobody would see again
                with contextlib.suppress(DilocoError, DiskFull):
                    await asyncio.to_thread(self.replica.mend)
            await reporter.say_ended(LAST_REPORT_S)
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
            return good_end(self.config, self.reporter)
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
            incarnations=SeenIncarnations(state.incarnations),
            is_granted=lambda grant: is_valid(
                grant, self.secret, run=config.run.name, role=ROLE_ISLAND, now_unix_s=clock()
            ),
            workers=workers,
            on_record=reporter.add_record,
            on_change=reporter.changed,
            orders=KeptOrders(state.orders, config, rules),
            on_event=functools.partial(_on_event, events, reporter),
            unix_clock=clock,
        )


def good_end(config: Config, reporter: Reporter) -> int:
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
