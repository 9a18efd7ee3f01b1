"""One rank's connection to a run: IO thread, word with the coordinator, transports to the syncers.

Everything of an island that needs the network begins and ends here; what is said over it belongs
to `Registration` and `Exchange`, and what it is for to `DiLoCo`.

    with diloco.connect(config) as connection:
        outer = diloco.DiLoCo(model, config.outer, transport=connection)
        ...

Leaving the context ends this start of the island: its leader tells the coordinator whether it
finished, stopped for a resume, or failed and why.

Source: PROTOCOL.md, "Join" and "Coordinator away".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from types import TracebackType
from typing import Protocol

from diloco.config.classes import identity_json
from diloco.config.load import with_policy
from diloco.config.schema import Config
from diloco.errors import ConfigError, DilocoError, Fenced, RunReturned
from diloco.io_thread import IoThread
from diloco.island.exchange.calls import ExchangeRules
from diloco.island.exchange.exchange import Exchange, SyncerConnection
from diloco.island.exchange.retried_calls import retry_policy
from diloco.island.exchange.state_transfer import SyncerRoutes
from diloco.island.graceful_stop import GracefulStop
from diloco.island.lanes.shards import LaneShards
from diloco.island.link_report import LinkReport, LinkSettings
from diloco.island.record import Record
from diloco.island.registration import IslandState, Registration, Reports
from diloco.outer.fragments import Plan
from diloco.protocol.run.plan_bytes import packed
from diloco.protos.control_pb2 import (
    CutPart,
    HeldOut,
    JoinReply,
    JoinRequest,
    ReportRequest,
)
from diloco.telemetry.events import AlarmCleared, AlarmRaised, Event
from diloco.transport.contracts import PROTOCOL_VERSION, Transport

logger = logging.getLogger(__name__)

#: Seconds that a failed island spends on telling the coordinator.
_LAST_WORD_S = 5.0
#: Checkpoints that a report names, at most: the newest; islands differ by less than a round.
_REPORTED_CHECKPOINTS = 16
#: Held-out losses that a report names, at most.
_REPORTED_LOSSES = 4
_UNFINISHED = (
    "the loop left `with diloco.connect(...)` after inner step {} of {} without outer.finish(): "
    "call it after the last step, and after outer.is_stopping"
)


class Wires(Protocol):
    """Where transports come from; `island_rank` and `carriers` choose a part of a shaped link.

    `on_found` is called with the syncer of each fragment, by number, whenever that was asked.
    `link` is what the run file says of the island's link.
    """

    on_found: Callable[[Sequence[int]], None]
    link: LinkSettings

    def coordinator(self) -> Transport:
        """Open the channel to the coordinator."""

    def syncers(
        self, addresses: Sequence[str], *, island_rank: int, carriers: Collection[int]
    ) -> list[tuple[Transport, Transport]]:
        """Open the channels to the run's syncers: to each for control, and for data."""

    async def look(self) -> None:
        """Ask where the syncers are, and which fragments each has."""


class Connection:
    """One rank's connection with a run; a context manager, made by `diloco.connect`.

    Attributes:
        config: This site's configuration; from the join on with the coordinator's policy.
        io: Where everything of the network runs.
        reports: What the leader's reports say besides; other ranks have one that is not sent.
        record: Where everything that this rank does is recorded.
        progress: What the leader's reports say, asked once a second in another thread; `DiLoCo`
            sets it.
        island_moved: Of `LinkReport.use`; `DiLoCo` sets it where the island has several ranks.
        on_join: Called with the coordinator's answer before anything is done with it.
    """

    def __init__(self, config: Config, wires: Wires, record: Record | None = None) -> None:
        """Assign only; `config` has an island selected.

        A record that is given is its owner's to open and to close; else there is one of the run
        file's sinks, from the join to the end of the context.
        """
        self.config = config
        self.record = record or Record(config)
        self._owns_record = record is None
        self.io = IoThread()
        self.progress: Callable[[], ReportRequest] = lambda: ReportRequest(
            state=IslandState.WAITING
        )
        self.on_join: Callable[[JoinReply], None] = lambda reply: None
        self.reports = Reports()
        self._wires = wires
        self._rng = random.Random(secrets.randbits(64))
        self._is_open = False
        self._registration: Registration | None = None
        self._exchange: Exchange | None = None
        self.island_moved: tuple[tuple[int, int], ...] | None = None
        self._farewell = ""
        self._is_stopped = self._is_early = False

    def __enter__(self) -> Connection:
        """Start the IO thread; nothing is said to anybody yet."""
        self.io.start()
        self._is_open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the run, saying how this start of the island ended, and release everything.

        Raises:
            ValueError: If the loop ended in peace, but without `DiLoCo.finish()`.
            RunReturned: In place of `Fenced`, where a syncer was the first to refuse this start,
                and the coordinator says that the run went back to a checkpoint.
        """
        told: DilocoError | None = None
        unfinished: ValueError | None = None
        if error is None and self._exchange is not None and not self._farewell:
            progress = self.progress()
            text = _UNFINISHED.format(progress.inner_step, self.config.run.inner_steps)
            error = unfinished = ValueError(text)
        try:
            told = self._leave(error)
        except Exception:
            if error is None:
                raise
            logger.exception("the last word failed")  # and must not hide what went wrong before
        finally:
            self._is_open = False
            self.io.stop()
            if self._owns_record:
                self.record.close()
        if unfinished is not None:
            raise unfinished
        if isinstance(error, Fenced) and isinstance(told, RunReturned):
            raise told from error

    def check_open(self) -> None:
        """Refuse use outside the context.

        Raises:
            ConfigError: If the context was not entered, or has been left.
        """
        if not self._is_open:
            raise ConfigError(
                "the connection is not open: use diloco.DiLoCo inside "
                "`with diloco.connect(config) as connection:`, a new one for every start"
            )

    def check_new(self) -> None:
        """Refuse a second use.

        Raises:
            ConfigError: If it is not open, or a `DiLoCo` has joined with it already.
        """
        self.check_open()
        if self._exchange is not None:
            raise ConfigError(
                "this connection has joined already: one diloco.DiLoCo each; open another with "
                "diloco.connect(config) to start the island again"
            )

    def open_record(self, island_rank: int) -> None:
        """Open the record, unless its owner has.

        Raises:
            ConfigError: If a sink cannot be had.
        """
        if self._owns_record and not self.record.is_open:
            self.record.open(island_rank)
        self.record.on_alarm = self.on_event

    # -- the run ---------------------------------------------------------------------------------

    def join(
        self,
        plan: Plan,
        *,
        num_ranks: int,
        start_step: int,
        data_digest: str,
        tokenizer_digest: str,
    ) -> JoinReply:
        """Join the run, as the island's leader.

        Raises:
            DilocoError: As `Registration.join` does.
        """
        config = self.config
        self._registration = Registration(
            self._wires.coordinator(),
            JoinRequest(
                protocol_version=PROTOCOL_VERSION,
                run=config.run.name,
                island=config.island_id,
                identity_json=identity_json(config),
                plan=packed(plan.to_json()),
                corpus_sha256=data_digest,
                num_ranks=num_ranks,
                start_id=secrets.token_hex(16),
                start_step=start_step,
                tokenizer_digest=tokenizer_digest,
                tokens_per_inner_step=config.island.tokens_per_inner_step,
            ),
            rpc_deadline_s=config.transport.rpc_timeout.seconds,
            policy=retry_policy(config.transport),
            rng=self._rng,
            reports=self.reports,
        )
        return self.io.run(self._registration.join())

    def joined(self, reply: JoinReply) -> Config:
        """Take the coordinator's answer, on every rank; returns the configuration in force."""
        grant = reply.grant
        self.record.identify(timeline=grant.timeline, incarnation=grant.incarnation)
        self.on_join(reply)
        self.config = with_policy(self.config, reply.policy_json)
        return self.config

    def exchange(
        self,
        reply: JoinReply,
        plan: Plan,
        shards: LaneShards,
        *,
        island_rank: int,
        on_event: Callable[[Event], None],
    ) -> Exchange:
        """Open the connections to the syncers.

        Raises:
            ConfigError: If payloads are to travel by an object store, and the run has none for it.
        """
        config = self.config
        if config.transport.payloads == "bucket" and not reply.has_bucket:
            raise ConfigError(
                'transport.payloads = "bucket": the run has no object store that gives addresses. '
                'Leave it out here; or give the coordinator\'s file run.state = "s3://..." (or '
                "gs://, az://; of a directory there are none), and start the coordinator again"
            )
        lanes = {f.fragment_id: shards.lanes_of(f.fragment_id) for f in plan.fragments}
        carriers = {
            shards.carrier(fragment.fragment_id, lane.lane_id)
            for fragment in plan.fragments
            for lane in fragment.lanes
        }
        addresses = [each.address for each in reply.syncers]
        wires = self._wires.syncers(addresses, island_rank=island_rank, carriers=carriers)
        self._exchange = Exchange(
            plan,
            lanes,
            connections=[
                SyncerConnection(each.fragment_ids, control, data)
                for each, (control, data) in zip(reply.syncers, wires, strict=True)
            ],
            grant=reply.grant,
            rules=ExchangeRules(
                uplink_codec=config.outer.uplink,
                error_feedback=config.outer.error_feedback,
                error_feedback_decay=config.outer.error_feedback_decay,
                since_send=config.outer.local_mix == "since_send",
                rpc_deadline_s=config.transport.rpc_timeout.seconds,
                policy=retry_policy(config.transport),
                seed=config.run.seed,
                on_arrival=config.outer.is_on_arrival,
            ),
            rng=self._rng,
            on_event=on_event,
            is_leader=island_rank == 0,
            find_syncers=self._wires.look,
            place=shards.place,
        )
        self._wires.on_found = self._exchange.reassign
        return self._exchange

    def start_reporting(self, graceful_stop: GracefulStop) -> None:
        """Report to the coordinator once a second; the leader alone does."""
        if self._registration is not None:
            assert self._exchange is not None
            self._registration.on_answer = self._exchange.coordinator_answered
            registration = self._registration
            link = LinkReport(self._exchange, self._wires.link)

            def progress() -> ReportRequest:
                said = self.progress()
                said.link.CopyFrom(link.use(time.monotonic(), self.island_moved))
                if (alarm := link.alarm(self.config.island_id)) is not None:
                    registration.on_event(alarm)
                return said

            self.io.post(registration.start_reporting, progress, self._exchange.fail, graceful_stop)

    def check_going_on(self) -> None:
        """Raise what ended this start in the thread of the network.

        Raises:
            DilocoError: If the rank cannot go on, or the coordinator has said that the run is over.
        """
        if self._exchange is not None and self._exchange.failure is not None:
            raise self._exchange.failure

    def on_event(self, event: Event) -> None:
        """Report an alarm that an event raises or clears; the leader's reports do. Any thread."""
        if self._registration is not None and isinstance(event, AlarmRaised | AlarmCleared):
            self.io.post(self._registration.on_event, event)

    def report_soon(self) -> None:
        """Let the next report leave at once; the leader's does."""
        if self._registration is not None:
            self.io.post(self._registration.report_soon)

    @property
    def routes(self) -> SyncerRoutes:
        """To the syncers, once the run has been joined."""
        assert self._exchange is not None
        return self._exchange

    def report_checkpoints(self, steps: Iterable[int]) -> None:
        """Let reports name the checkpoints that this island keeps; the leader's do."""
        self.reports.checkpoint_steps = tuple(sorted(set(steps)))[-_REPORTED_CHECKPOINTS:]

    def kept(self, step: int) -> None:
        """Note that all ranks have saved the checkpoint of an inner step, or of a cut."""
        self.report_checkpoints(
            {step, *(other for other in self.reports.checkpoint_steps if other < step)}
        )

    def report_held_out(self, number: int, nats_per_byte: float) -> None:
        """Let reports tell the held-out loss of what a checkpoint holds; the leader's do."""
        told = [each for each in self.reports.held_out if each.checkpoint < number]
        told.append(HeldOut(checkpoint=number, nats_per_byte=nats_per_byte))
        self.reports.held_out = tuple(told[-_REPORTED_LOSSES:])

    def cutting(self, number: int) -> None:
        """Note that this island's part of a cut is being written, however long that takes."""
        self.reports.cut = CutPart(number=number, is_being_written=True)

    def cut(self, number: int, inner_step: int, versions: Sequence[int], text_json: str) -> None:
        """Note that all ranks have saved this island's part of a cut; no `versions`: they cannot.

        Its end waits until the coordinator has heard of it.
        """
        if versions:
            self.kept(number)
        self.reports.cut = CutPart(
            number=number, versions=versions, inner_step=inner_step, text_json=text_json
        )

    def has_kept(self, step: int) -> bool:
        """Whether all ranks have saved the checkpoint of an inner step."""
        return step in self.reports.checkpoint_steps

    def finished(self, farewell: str, *, is_stopped: bool, is_early: bool) -> None:
        """Stop the exchange: all that this start owed is done; leaving the context says so.

        Args:
            farewell: How it ended, in words.
            is_stopped: Whether the run is not over: it was asked to stop, after a checkpoint.
            is_early: Whether the run is not over, and goes on without this island.
        """
        assert self._exchange is not None
        self.io.run(self._exchange.stop())
        self._farewell, self._is_stopped, self._is_early = farewell, is_stopped, is_early

    def _leave(self, error: BaseException | None) -> DilocoError | None:
        """Leave the run, and release everything; returns why the coordinator says to end."""
        told: DilocoError | None = None
        if self._registration is not None:
            code, reason, at_most_s = 0, self._farewell, self.config.transport.unreachable.seconds
            last = self.progress()
            if error is not None:
                is_ours = isinstance(error, DilocoError)
                code = error.exit_code if isinstance(error, DilocoError) else 1
                reason = str(error) if is_ours else repr(error)
                at_most_s, last.state = _LAST_WORD_S, IslandState.FAILED
            told = self.io.run(
                self._registration.leave(
                    code,
                    reason,
                    last=last,
                    at_most_s=at_most_s,
                    is_stopped=error is None and self._is_stopped,
                    is_early=error is None and self._is_early,
                )
            )
        if self._exchange is not None and not self._farewell:
            with contextlib.suppress(TimeoutError):
                self.io.run(asyncio.wait_for(self._exchange.stop(), _LAST_WORD_S))
        return told
