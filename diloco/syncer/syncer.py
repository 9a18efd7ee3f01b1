"""The syncer: the only authority over the rounds of its fragments.

It checks grants, answers islands and ends the run when it must; each fragment has a service
(`service`) that runs its rounds. Every incarnation is durable before anything of it is accepted.

Source: PROTOCOL.md, "Authority", "Incarnations and grants" and "Fencing".
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from diloco.bounded_text import MOST_NAMES
from diloco.durable import DiskFull
from diloco.errors import PayloadRefused
from diloco.loop_clock import loop_now
from diloco.outer.fragments import Plan
from diloco.outer.units import merge_units
from diloco.protocol.rounds.messages import (
    SUBMIT_STATUS,
    arrival_of,
    key_of,
    outcome_message,
)
from diloco.protocol.rounds.orders import Orders
from diloco.protocol.rounds.terms import Admission, Lost, Roster
from diloco.protocol.rounds.timing import Downtime, StepTimes
from diloco.protocol.run.alarms import LASTING_S
from diloco.protos import fragment_pb2 as wire
from diloco.protos.control_pb2 import FragmentStatus, Grant, RefusalCount, StateTransfer
from diloco.refusals import Cause
from diloco.syncer.admission import (
    NOT_CURRENT,
    CallAdmission,
    IncarnationStore,
    Listeners,
    OrderStore,
)
from diloco.syncer.disk_full import DiskFullRetry
from diloco.syncer.hooks import Hooks
from diloco.syncer.pinning import Pinning
from diloco.syncer.polls import Polls
from diloco.syncer.round_runner import RoundRunner
from diloco.syncer.rules import SyncerRules
from diloco.syncer.service import FragmentService
from diloco.syncer.spool import Spool
from diloco.syncer.transfer_store import TransferStore
from diloco.syncer.worker import Workers
from diloco.telemetry.events import Event
from diloco.telemetry.syncer_meter import SyncerMeter
from diloco.transport.contracts import Buffer, Handler, Handlers, IncomingCall, Reply
from diloco.transport.errors import NotYet, Overloaded
from diloco.versions.store import FragmentStore, PinRefused

logger = logging.getLogger(__name__)

_NO_FRAGMENT = "this syncer has no such fragment"


class Syncer:
    """Serves the rounds of those fragments of `plan` that it has `stores` of.

    `on_record` hears every durable record's header (also at the start), `on_change` of every
    change of state, `on_event` of what happens to rounds; none may block. `ended` is set when the
    run cannot go on: `fatal` says why, or `failure` is what broke in this process (a restart
    recovers the durable truth). `meter` counts what was done, for metrics.
    """

    def __init__(
        self,
        plan: Plan,
        rules: SyncerRules,
        stores: Sequence[FragmentStore],
        *,
        syncer_epoch: int,
        incarnations: IncarnationStore,
        is_granted: Callable[[Grant], bool],
        workers: Workers,
        on_record: Callable[[Mapping[str, Any]], None],
        on_change: Callable[[], None],
        orders: OrderStore | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """Assign only; `start` reads the stores. No `orders`: there is no coordinator.

        By `unix_clock` a restart knows how long ago rounds closed; nothing else is.
        """
        self._plan = plan
        self._epoch = syncer_epoch
        self._workers = workers
        self._on_change = on_change
        self._tasks: set[asyncio.Task[None]] = set()
        self.meter = SyncerMeter(time.perf_counter)
        self._spool = Spool(stores[0].store_dir / "spool", rules.spool_bytes)
        self._transfers = TransferStore(
            stores[0].store_dir / "transfers",
            plan,
            rules.timeline,
            worker=workers.transfers,
            spool=self._spool,
            spawn=self._spawn,
        )
        self._admission = CallAdmission(
            rules,
            incarnations,
            orders,
            is_granted=is_granted,
            worker=workers.notes,
            meter=self.meter,
            listeners=Listeners(
                on_grant=self._granted,
                on_roster=self._take_roster,
                on_rules=self._take_rules,
                spawn=self._spawn,
                on_full=self._transfers.let_go,
            ),
        )
        hooks = Hooks(
            workers=workers,
            merging=asyncio.Semaphore(rules.merges_at_once),
            spawn=self._spawn,
            on_record=on_record,
            on_change=self._notify,
            on_lost=self._lose,
            on_event=on_event,
            disk_full=DiskFullRetry(self.meter, self._hold_openings, self._transfers.let_go),
            meter=self.meter,
            spool=self._spool,
            unix_clock=unix_clock,
            downtime=Downtime(loop_now()),
        )
        self._steps = StepTimes()
        self._services = {
            store.fragment.fragment_id: self._build_service(store, rules, hooks) for store in stores
        }
        self._pinning = Pinning(
            stores,
            self._services,
            self._admission,
            workers.pins,
            spawn=self._spawn,
            on_change=on_change,
            on_full=self._transfers.let_go,
        )
        self._polls = Polls(
            self._services,
            self._admission,
            self._steps,
            self._spool,
            num_fragments=len(plan.fragments),
            syncer_epoch=syncer_epoch,
            founded_by=self._founded_by,
            fatal=lambda: self.fatal,
        )
        self.fatal: wire.Fatal | None = None
        self.failure: BaseException | None = None
        self.ended = asyncio.Event()

    def _build_service(
        self, store: FragmentStore, rules: SyncerRules, hooks: Hooks
    ) -> FragmentService:
        fragment, merge = store.fragment, rules.publication.merge
        units = merge_units(
            self._plan, fragment.fragment_id, plain_mean=merge.plain_mean, experts=merge.experts
        )
        own = rules.of_fragment(fragment, len(self._plan.fragments))
        runner = RoundRunner(rules.timeline, own, self._steps, store, units, hooks)
        return FragmentService(runner, store, hooks)

    @property
    def _rules(self) -> SyncerRules:
        return self._admission.rules

    @property
    def handlers(self) -> Handlers:
        """Method name -> handler."""
        handlers: Handlers = {
            "fragment.submit": self._submit,
            "fragment.decline": self._decline,
            "fragment.upload": self._upload,
            "fragment.poll": self._polls.poll,
            "fragment.fetch": self._fetch,
            "fragment.pin": self._pin,
            "heal.put": self._state_put,
            "heal.get": self._state_get,
        }
        return {method: self._guarded(handler) for method, handler in handlers.items()}

    @property
    def num_calls(self) -> int:
        """Calls of islands that were accepted since the start."""
        return self._admission.num_calls

    @property
    def states(self) -> list[wire.FragmentState]:
        """Public state of every fragment."""
        return [service.full_state for service in self._services.values()]

    @property
    def refusals(self) -> list[RefusalCount]:
        """What was refused since the start, by island and cause."""
        return [
            RefusalCount(service="syncer", island=island, cause=cause, count=count)
            for (island, cause), count in sorted(self.meter.refusals.items())
        ]

    def phase(self, fragment_id: int) -> str:
        """Phase of a fragment's current round, in words."""
        return self._services[fragment_id].phase

    def repair(self, fragment_id: int, island: str, record_json: str) -> None:
        """Take what a damaged fragment has lost from islands; must not block.

        First from the one that is named, if any is.
        """
        service = self._services.get(fragment_id)
        if service is not None and service.runner.damage.ask(island, record_json, loop_now()):
            self._notify(fragment_id)

    def damage(self, fragment_id: int) -> str:
        """Why a fragment is not served, and what to type; empty: it is served."""
        return self._services[fragment_id].runner.damage.text

    def awaits(self, fragment_id: int) -> FragmentStatus:
        """Say for whom a round or a lost version waits; nothing else of the fragment is set."""
        runner = self._services[fragment_id].runner
        damage, rounds = runner.damage, runner.rounds
        if damage.text:
            return FragmentStatus(
                lost_version=damage.lost, holders=damage.holders, wants_header=damage.wants_header
            )
        islands, left_s = rounds.waits_for, rounds.left_s(loop_now())
        return FragmentStatus(
            waits_for=islands[:MOST_NAMES],
            num_waits_for=len(islands),
            left_s=left_s if math.isfinite(left_s) else 0.0,
        )

    def indexed(
        self, num_versions: Mapping[int, int], digests: Mapping[int, str] | None = None
    ) -> None:
        """Set how many versions of each fragment the coordinator knows; must not block.

        `digests` are those of the newest of them, in hex; None: not known.
        """
        for fragment_id in self._services.keys() & num_versions.keys():
            digest = (digests or {}).get(fragment_id, "")
            self._services[fragment_id].runner.indexed(num_versions[fragment_id], digest)

    def rounds_of(self, fragment_id: int) -> tuple[int, int]:
        """Rounds of a fragment published since the start, and those that count one island."""
        return self.meter.rounds_of(fragment_id)

    async def start(self) -> None:
        """Read the durable state; after this the handlers may be served."""
        await self._workers.notes.run(self._spool.start)
        await self._admission.start()
        await self._transfers.start()
        await self._pinning.start()
        for service in self._services.values():
            await service.runner.start(self._admission)

    async def verify_stores(self) -> None:
        """Verify once, while rounds go on, what the start did not read of the stores.

        Then look again at what rots, as long as it does: the alarm holds so long.
        """
        worker = self._workers.transfers
        rots = []
        for p, service in self._services.items():
            try:
                rots += [(service, rot) for rot in await service.runner.verify_store(worker)]
            except Exception:
                logger.exception("the store of fragment %d is not verified any further", p)
        while rots:
            await asyncio.sleep(LASTING_S / 2)
            rots = [
                (service, rot) for service, rot in rots if await service.runner.look_at(rot, worker)
            ]

    def set_orders(self, orders: Orders) -> None:
        """Take the coordinator's orders: they count once they are durable; does not block."""
        self._admission.set_orders(orders)

    def _granted(self, island: str, incarnation: int) -> None:
        self._steps.forget(island)
        for service in self._services.values():
            service.runner.granted(island, incarnation)
        # To others it is news once a round opens with it: of a thousand islands that join, each is
        # not a reason for all to look. It may be the last that the founder waits for.
        self._polls.wake_islands({island, self._admission.founder()})
        self._on_change()

    def _hold_openings(self, is_held: bool) -> None:
        for service in self._services.values():
            service.runner.hold_openings(is_held)
        self._notify()

    def _take_roster(self, roster: Roster) -> None:
        for service in self._services.values():
            service.runner.set_roster(roster)
        self._notify()

    def _take_rules(self, rules: SyncerRules) -> None:
        num_fragments = len(self._plan.fragments)
        for fragment_id, service in self._services.items():
            fragment = self._plan.fragments[fragment_id]
            service.runner.set_rules(rules.of_fragment(fragment, num_fragments))

    @property
    def pinned_cut(self) -> int:
        """The cut for which a version of every fragment is kept; 0: none since the start."""
        return self._pinning.pinned_cut

    def keep_cut(self, number: int, versions: Sequence[int]) -> None:
        """Keep the newest version of every fragment for a cut: see `Pinning.keep_cut`."""
        self._pinning.keep_cut(number, versions)

    def set_transfers(self, named: Sequence[StateTransfer]) -> None:
        """Set which state transfers are under way: no others are taken or given."""
        self._transfers.set_named(named)

    def keep_checkpoints(self, steps: Sequence[int]) -> None:
        """Record the run checkpoints that are complete: pins that are not needed go."""
        self._pinning.keep_checkpoints(steps)

    async def stop(self) -> None:
        """Cancel what is under way; what is not durable is as if it had never happened."""
        self._admission.stop()
        self._transfers.stop()
        for service in self._services.values():
            service.runner.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- handlers --------------------------------------------------------------------------------

    async def _submit(self, call: IncomingCall) -> Reply:
        header = wire.SubmitHeader.FromString(call.header)
        service = self._services.get(header.key.fragment_id)
        reply = wire.SubmitReply(syncer_epoch=self._epoch)
        if not await self._admission.accept(header.grant, header.protocol_version):
            reply.status = SUBMIT_STATUS[Admission.FENCED]
            reply.message = NOT_CURRENT
        elif service is None:
            reply.status = SUBMIT_STATUS[Admission.INVALID]
            reply.message = self._lacks(header.grant, header.key.fragment_id)
        else:
            service.check_whole()
            lane = arrival_of(header)
            admission = await service.receive(lane, header.codec, call)
            reply.status = SUBMIT_STATUS[admission]
            reply.message = service.runner.rounds.history_of(lane)
            outcome = service.runner.rounds.outcome(lane.key, lane.island, lane.incarnation)
            if outcome is not None:
                reply.outcome.CopyFrom(outcome_message(outcome))
        return Reply.of(reply)

    async def _decline(self, call: IncomingCall) -> Reply:
        request = wire.DeclineRequest.FromString(call.header)
        service = self._services.get(request.key.fragment_id)
        grant = request.grant
        if not await self._admission.accept(grant, request.protocol_version):
            return self._ack(NOT_CURRENT, is_fenced=True)
        if service is None:
            return self._ack(self._lacks(grant, request.key.fragment_id))
        service.check_whole()
        # Before its round is open a decline does nothing: the island repeats it until the outcome.
        reason = f"declined: {request.reason}"
        service.runner.refuse(key_of(request.key), grant.island, grant.incarnation, reason)
        return self._ack("")

    async def _upload(self, call: IncomingCall) -> Reply:
        header = wire.UploadHeader.FromString(call.header)
        service = self._services.get(header.fragment_id)
        if not await self._admission.accept(header.grant, header.protocol_version):
            return self._ack(NOT_CURRENT, is_fenced=True)
        if service is None:
            return self._ack(self._lacks(header.grant, header.fragment_id))
        if header.is_published:
            return self._ack(await service.take_published(header, call, self._admission))
        service.check_whole()
        if service.runner.record is not None:
            return self._ack("")
        if header.fragment_id not in self._founded_by(header.grant.island):
            return self._ack(
                f"version 0 is founded by {self._admission.founder() or self._rules.islands[0]!r}"
            )
        problem = await service.take_initial(header, call)
        return self._ack(problem, is_fenced=not self._admission.is_current(header.grant))

    async def _fetch(self, call: IncomingCall) -> Reply:
        header = wire.FetchHeader.FromString(call.header)
        service = self._services.get(header.fragment_id)
        payload: Buffer = b""
        if not await self._admission.accept(header.grant, header.protocol_version):
            reply = wire.FetchReply(status=wire.FETCH_STATUS_FENCED, message=NOT_CURRENT)
        elif service is None:
            lacks = self._lacks(header.grant, header.fragment_id)
            reply = wire.FetchReply(status=wire.FETCH_STATUS_UNKNOWN, message=lacks)
        else:
            service.check_readable(header.version)
            reply, payload = await service.fetch(header)
        reply.syncer_epoch = self._epoch
        if service is None or reply.status != wire.FETCH_STATUS_OK:
            return Reply.of(reply)
        on_sent = functools.partial(service.fetched, header, len(payload))
        return Reply(reply.SerializeToString(), payload, on_sent, reply.digest)

    async def _pin(self, call: IncomingCall) -> Reply:
        request = wire.PinRequest.FromString(call.header)
        if not await self._admission.accept(request.grant, request.protocol_version):
            return self._ack(NOT_CURRENT, is_fenced=True)
        versions = {pinned.fragment_id: pinned.version for pinned in request.versions}
        if versions.keys() != self._services.keys() and self._rules.has_others:
            raise NotYet(f"fragments have moved, and {sorted(self._services)[:8]} are here")
        if versions.keys() != self._services.keys():
            problem = (
                f"a checkpoint holds a version of each of the {len(self._services)} fragments, "
                f"{len(versions)} were named: {sorted(versions)[:8]}"
            )
            return self._ack(self._refuse(request.grant, Cause.PIN, problem))
        for service in self._services.values():
            service.check_whole()
        island = request.grant.island
        try:
            await self._pinning.pin(island, request.checkpoint_step, versions)
        except PinRefused as error:
            logger.warning("pin refused, island=%s: %s", island, error)
            self.meter.refusal(island, Cause.PIN)
            return self._ack(str(error), is_fenced=not self._admission.is_current(request.grant))
        return self._ack("")

    async def _state_put(self, call: IncomingCall) -> Reply:
        header = wire.StatePutHeader.FromString(call.header)
        if not await self._admission.accept(header.grant, header.protocol_version):
            return self._ack(NOT_CURRENT, is_fenced=True)
        try:
            await self._transfers.put(header, call)
        except PayloadRefused as error:
            return self._ack(self._refuse(header.grant, error.cause, str(error)))
        return self._ack("")

    async def _state_get(self, call: IncomingCall) -> Reply:
        header = wire.StateGetHeader.FromString(call.header)
        payload: Buffer = b""
        if await self._admission.accept(header.grant, header.protocol_version):
            reply, payload = await self._transfers.get(header)
        else:
            reply = wire.FetchReply(status=wire.FETCH_STATUS_FENCED, message=NOT_CURRENT)
        reply.syncer_epoch = self._epoch
        return Reply(reply.SerializeToString(), payload, digest=reply.digest)

    def _refuse(self, grant: Grant, cause: Cause, words: str) -> str:
        """Count a refusal of what an island says with a good grant; returns the words."""
        self.meter.refusal(grant.island, cause)
        return words

    def _lacks(self, grant: Grant, fragment_id: int) -> str:
        """Refuse what is said of a fragment that is not here; returns the words.

        Raises:
            NotYet: If another syncer of the run has it, as far as is known here.
        """
        if fragment_id < len(self._plan.fragments):
            raise NotYet(f"fragment {fragment_id} is at another syncer, or moves to one: ask again")
        return self._refuse(grant, Cause.KEY, _NO_FRAGMENT)

    def _founded_by(self, island: str) -> frozenset[int]:
        """Fragments whose version 0 an island founds."""
        new = frozenset(p for p, service in self._services.items() if service.is_new)
        is_founder = new and self._rules.timeline == 0 and island == self._admission.founder()
        return new if is_founder else frozenset()

    # -- plumbing --------------------------------------------------------------------------------

    def _lose(self, lost: Lost) -> None:
        reason = f"fragment {lost.key.fragment_id}: {lost.reason}. {lost.advice}"
        logger.error("run lost, %s", reason)
        # The first reason stays, so that all islands hear the same.
        self.fatal = self.fatal or wire.Fatal(
            exit_code=20 if lost.is_numeric else 50, reason=reason
        )
        self.ended.set()
        self._polls.wake()

    def _notify(self, fragment_id: int | None = None) -> None:
        """Tell of a change: of one fragment, or of what all of them go by."""
        self._polls.wake(fragment_id)
        self._on_change()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        """End the process when a piece of work failed: a restart recovers the durable truth."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _guarded(self, handler: Handler) -> Handler:
        """End this process, not the island that called, when the disk fails under a handler."""

        async def handle(call: IncomingCall) -> Reply:
            try:
                return await handler(call)
            except DiskFull as error:
                self._transfers.let_go()
                raise Overloaded(f"the syncer's disk is full, call again: {error}") from error
            except OSError as error:
                self._fail(error)
                # Left without an answer until the end resets it, the call is made again.
                await asyncio.Event().wait()
                raise

        return handle

    def _fail(self, error: BaseException) -> None:
        logger.error("syncer work failed", exc_info=error)
        self.failure = error
        self.ended.set()

    def _ack(self, problem: str, *, is_fenced: bool = False) -> Reply:
        return Reply.of(
            wire.Ack(
                syncer_epoch=self._epoch,
                is_accepted=not problem,
                message=problem,
                is_fenced=is_fenced,
            )
        )
