"""Composition root of the coordinator's process: state directory, journal, server, its syncers.

One coordinator at a time holds the state directory; a restarted one binds the same address, takes
back what was durable and adopts the syncers that outlived it. A resume begins a new timeline: the
journal knows it first, then the syncers that live are stopped, and the next ones take their stores
back to the checkpoint. No tensor is ever loaded here.

Most of the time until a killed coordinator serves again goes by in imports: what only some runs
need is imported by these.

Source: PROTOCOL.md, "Coordinator away" and "Resume".
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from diloco.bounded_text import bounded_text
from diloco.checkpoint.backup import Backups
from diloco.checkpoint.lost_journal import check_journal
from diloco.checkpoint.run_checkpoints import (
    RESUME,
    check_run,
    check_same_run,
    choose_checkpoint,
    choose_good,
    commands_of_islands,
    open_journal,
    read_membership,
)
from diloco.config.classes import policy_json
from diloco.config.load import resolved_toml
from diloco.config.schema import Config
from diloco.coordinator.audit_log import audit_entries_of
from diloco.coordinator.daemon import RETURN_S, Coordinator
from diloco.coordinator.grants import load_or_create_secret
from diloco.coordinator.journal import Journal, repeated_when_full
from diloco.coordinator.operator_service import Operations
from diloco.coordinator.run_status import RunStatus
from diloco.durable import digest_of, write_durably
from diloco.errors import AggregationError, ConfigError
from diloco.extras import require
from diloco.faults.process import wall_clock
from diloco.launch.coordinator_end import (
    asked_to_stop,
    end_placed,
    let_watchers_see,
    linger,
    next_text,
    stop_syncers_and_index,
    stopped_text,
)
from diloco.launch.held_state import HeldState, holding_state
from diloco.launch.page_process import PageProcess
from diloco.launch.process.disk_full_retry import retry_disk_full_async
from diloco.launch.process.ending import StopRequest, first_of, note_signals_async
from diloco.launch.process.logs import bound_output
from diloco.launch.run_claim import claim, is_served, timeline_of, with_operator_settings
from diloco.launch.syncer_supervisor import SyncerSupervisor
from diloco.loop_clock import loop_now
from diloco.objects.moved_fragment import SyncerFiles, let_go_for_lost, withdraw_for_lost
from diloco.objects.store import ObjectStore
from diloco.protocol.run.alarms import Alarm, AlarmKind
from diloco.protocol.run.membership import Membership
from diloco.protocol.run.peer_bounds import limits_of
from diloco.protocol.run.terms import terms_of
from diloco.security.address import coordinator_address, listen, local_address, syncer_address
from diloco.security.security import INSECURE_WARNING, Security, metrics_protection
from diloco.state_dir import Endpoint, Held, StateDir, hold, make_directory, read_endpoint
from diloco.transport.identity import Role

if TYPE_CHECKING:
    from diloco.telemetry.protection import Protection
    from diloco.transport.security.tls import Tls

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_DRAIN_S = 1.0
_PAGE_LOOK_S = 0.25
#: What the audit log has of a resume before there is a checkpoint.
_GOES_ON: Mapping[str, Any] = {
    "by": "the coordinator's command line",
    "command": "resume",
    "arguments": {},
    "message": "no checkpoint is complete: the run goes on, and a stop is taken back",
}


async def run_coordinator(
    config: Config,
    *,
    announce: Callable[[str], None],
    resume: bool = False,
    resume_stopped: bool = False,
    at_step: int | None = None,
    is_standby: bool = False,
    page: PageProcess | None = None,
    linger_s: float = 5.0,
) -> int:
    """Coordinate a run until it is over, or stopped by signals.

    The first signal asks every island to checkpoint after one inner step, or where islands come and
    go after its next, and to leave; a second one, or the first while not every island has joined,
    stops coordinator and syncer at once.

    Args:
        config: The run; `coordinator.state_dir` is made if missing, and gone on with if it holds
            the same run.
        announce: Called with, in words for people, what was found, where the coordinator listens
            and how it ended.
        resume: Whether to begin a new timeline from a run checkpoint; where none is complete yet,
            to go on without a stop that was asked for.
        resume_stopped: Whether to do so only where a graceful stop is complete, and else to go on.
        at_step: Inner step of that checkpoint; None takes the newest that is whole.
        is_standby: Whether to wait for the end of a machine that holds the run's state in an object
            store, and to take it over then.
        page: That is to be served while this serves.
        linger_s: Seconds for which a failed run is still answered, so that its islands learn why;
            shorter when all have left.

    Returns:
        Exit code: 0 when every island finished, 128 + the signal's number when one stopped this
        process, else that of the failure.

    Raises:
        ConfigError: If the state directory belongs to another run or another coordinator, if it
            holds a stopped run and neither `resume` nor `resume_stopped` is true, or one that has
            ended and cannot be resumed, or none, and one is, or if the address cannot be used.
    """
    state = StateDir(Path(config.coordinator.state_dir).absolute())
    if is_standby and not config.run.state:
        raise ConfigError(
            "--standby takes over a run whose state is in an object store: set run.state, here and "
            "at the machine that coordinates it"
        )
    if config.transport.kind != "hivemind":  # a libp2p peer finds its addresses out
        coordinator_address(config.coordinator.listen, config.coordinator)
        syncer_address(config.coordinator.syncer_listen, config.coordinator)
    if resume and not config.run.state:
        check_run(state)
    make_directory(state.root, "coordinator.state_dir")
    try:
        with hold(state.coordinator_lock):
            async with holding_state(config, state, announce, is_standby=is_standby) as held:
                check_same_run(
                    config, state, "Give this run another coordinator.state_dir, or undo the change"
                )
                if resume:
                    check_run(state)
                state.create(config.own_syncers)
                with open_journal(
                    state.journal, waits_for_room=True, replica=held.replica
                ) as journal:
                    start = _Start(config, state, held, journal, announce)
                    run = await start.run(resume, resume_stopped, at_step, linger_s, page)
                    return await run.coordinate()
    except Held as error:
        raise ConfigError(
            f"another coordinator runs in {config.coordinator.state_dir} ({error}): watch it with "
            f"diloco status, or "
            + (
                "stop it (Ctrl-C, or kill that process), then resume: " + RESUME
                if resume
                else "give this run another coordinator.state_dir"
            )
        ) from error
    finally:
        if page is not None:
            page.close()


@dataclass(frozen=True, slots=True)
class _Start:
    """What a coordinator finds when it holds its state directory."""

    config: Config
    state: StateDir
    held: HeldState
    journal: Journal
    announce: Callable[[str], None]

    async def run(
        self,
        resume: bool,
        resume_stopped: bool,
        at_step: int | None,
        linger_s: float,
        page: PageProcess | None,
    ) -> _Run:
        """Go on with the run that is there, or from a checkpoint of it; see `run_coordinator`."""
        config, state, journal, announce = self.config, self.state, self.journal, self.announce
        check_journal(state, journal)
        membership = read_membership(config, journal)
        goes_on = False
        if resume or (resume_stopped and membership.is_stopped):
            step = await retry_disk_full_async(
                "the choice of a checkpoint",
                lambda: choose_checkpoint(config, state, membership, at_step, announce),
            )
            goes_on = step is None
            if step is not None:
                entries = membership.resumed(step)
                await journal.commit(entries, told=audit_entries_of(entries))
                membership.apply(entries)
                announce(f"start every island: {commands_of_islands(config)}")
        elif membership.is_stopped:
            raise ConfigError(stopped_text(config, state, membership))
        policy = policy_json(config)
        config = with_operator_settings(config, membership, announce)
        await retry_disk_full_async(
            "the configuration", functools.partial(claim, config, policy, state, membership)
        )
        if goes_on:  # under the policy that has just been checked
            unix_clock = wall_clock(os.environ, "coordinator")
            entries = membership.stop_taken_back()
            entries += membership.settings.operated({**_GOES_ON, "unix_s": unix_clock()})
            await retry_disk_full_async(
                "that the run goes on",
                functools.partial(journal.write, entries, told=audit_entries_of(entries)),
            )
            membership.apply(entries)
            announce(f"start every island that has ended: {commands_of_islands(config)}")
        signals = note_signals_async(num_graceful=1)
        return _Run(config, state, self.held, journal, announce, linger_s, signals, page)


@dataclass(slots=True)
class _Run:
    """A run whose state directory this process holds, through all its timelines."""

    config: Config
    state: StateDir
    held: HeldState
    journal: Journal
    announce: Callable[[str], None]
    linger_s: float
    signals: StopRequest
    page: PageProcess | None
    membership: Membership = field(init=False)

    async def coordinate(self) -> int:
        """Serve until the end, and through returns of the run by itself; returns the exit code.

        A return that was decided is made first, so that a coordinator that was killed at any moment
        of it goes on with it. Each timeline begins as after a restart, with what the journal has.
        """
        while True:
            self.membership = read_membership(self.config, self.journal)
            if self.membership.is_returning:
                await self._return()
                self.membership = read_membership(self.config, self.journal)
            self.config = with_operator_settings(self.config, self.membership, lambda line: None)
            code = await self._coordinate()
            if not self.membership.is_returning or self.signals.asked.is_set():
                return code

    async def _return(self) -> None:
        """Begin a new timeline from the last good checkpoint.

        Or end the run: where none is whole, or where so many returns did not help.
        """
        membership = self.membership
        decided = membership.candidates.pending
        assert decided is not None
        if entries := membership.lost_by_returns(terms_of(self.config).judging):
            pass  # a coordinator that was killed had not looked at it yet
        elif (step := await self._retry("the choice of a checkpoint", self._good)) is not None:
            entries = membership.resumed(step, is_return=True)
        else:
            entries = membership.candidates.given_up() + membership.failed(
                f"{decided.why}; no checkpoint that was judged good is whole (the coordinator's "
                f"log says what is torn)",
                AggregationError.exit_code,
            )
        await self._retry(
            "the return to a good checkpoint",
            lambda: self.journal.write(entries, told=audit_entries_of(entries)),
        )

    async def _coordinate(self) -> int:
        """Stop the syncers of an earlier timeline, serve until the end; returns the exit code."""
        config, state, membership = self.config, self.state, self.membership
        read_by_syncers: dict[Path, bytes] = {}
        security = Security.of(config, Role.COORDINATOR)
        coordinator = self._build_coordinator(read_by_syncers, security.tls)
        if security.insecure:
            self.announce(f"warning: {INSECURE_WARNING}")
        if problem := config.outer.sparse_problem:
            self.announce(f"warning: {problem}")
        supervisors = [
            SyncerSupervisor(
                each,
                on_hopeless=coordinator.fail,
                on_ended=lambda reason: coordinator.alarms.raise_(
                    Alarm(AlarmKind.SYNCER_ENDS, bounded_text(reason)), loop_now()
                ),
                before_start=functools.partial(asyncio.to_thread, _write_again, read_by_syncers),
            )
            for each in state.of_syncers(config.own_syncers)
        ]
        if _is_over(membership) and not config.syncers:  # those have to be told
            await stop_syncers_and_index(state, supervisors, self.journal, self.signals.forced)
            return self._show_end(coordinator.run_status)
        if not is_served(state, membership):
            await stop_syncers_and_index(state, supervisors, self.journal, self.signals.forced)
        await self._retry("the timeline", lambda: timeline_of(membership).write(state.timeline))
        for path in (state.resolved, state.secret, state.timeline):
            read_by_syncers[path] = path.read_bytes()
        async with self._serving(security, coordinator) as address:
            self.announce(f"coordinator of run {config.run.name!r} listens on {address}")
            if security.added is not None:
                self.announce(f"for its commands: {config.transport.kind}://{address}")
            self.announce(f"to see it: diloco page {address} or diloco watch {address}")
            if membership.is_finished:
                self.announce(
                    f"the run has finished, but for {', '.join(membership.members.away)}: "
                    f"waiting for up to {RETURN_S:g} s, so that it can fetch the end"
                )
            await first_of(
                coordinator.ended.wait(),
                coordinator.watch(),
                bound_output(),
                asked_to_stop(coordinator, membership, self.signals, self.announce),
                *(s.run() for s in supervisors),
                *([coordinator.move_fragments(self._syncer_stores)] if config.syncers else []),
                *([self._keep_page(self.page)] if self.page is not None else []),
            )
            if membership.fatal_reason or coordinator.is_halting or membership.is_returning:
                await linger(membership, self.linger_s)
            # They are served meanwhile: they have last reports.
            given_up = coordinator.ended if coordinator.is_halting else self.signals.forced
            if config.syncers and not membership.is_returning:
                longest_s = config.transport.unreachable.seconds
                await end_placed(coordinator.run_status, self.signals.forced, longest_s)
            await stop_syncers_and_index(state, supervisors, self.journal, given_up)
            await let_watchers_see(coordinator.run_status, self.signals)
        await coordinator.settled()
        if membership.is_returning and not self.signals.asked.is_set():
            return 0  # it goes on
        return self._show_end(coordinator.run_status)

    async def _keep_page(self, page: PageProcess) -> None:
        endpoint = read_endpoint(self.state.coordinator)
        assert endpoint is not None, "this process has written it"
        while True:
            page.look(endpoint.address)
            await asyncio.sleep(_PAGE_LOOK_S)

    @property
    def _syncer_stores(self) -> _SyncerStores:
        run = self.config.run
        return _SyncerStores(ObjectStore(run.state), self.state.syncers, self.held.lease, run.name)

    def _good(self) -> int | None:
        return choose_good(self.config, self.state, self.membership, self.announce)

    async def _retry(self, what: str, work: Callable[[], _T]) -> _T:
        """Do something, and again while the disk is full, until a stop is forced."""
        return await retry_disk_full_async(what, work, given_up=self.signals.forced)

    def _build_coordinator(
        self, read_by_syncers: dict[Path, bytes], tls: Tls | None
    ) -> Coordinator:
        state = self.state
        if tls is not None:
            of_files, of_run = tls.is_revoked, self.membership.settings.is_revoked
            tls.is_revoked = lambda serial: of_files(serial) or of_run(serial)

        def keep(config: Config) -> None:
            content = resolved_toml(config).encode()
            write_durably(state.resolved, [content])
            read_by_syncers[state.resolved] = content

        def problems() -> dict[AlarmKind, str]:
            said = {
                AlarmKind.CERTIFICATE: "" if tls is None else tls.problem,
                AlarmKind.STATE_AWAY: bounded_text(self.held.away or self.held.lost),
            }
            return {kind: text for kind, text in said.items() if text}

        return Coordinator(
            membership=self.membership,
            journal=self.journal,
            secret=load_or_create_secret(state.secret),
            terms=terms_of(self.config),
            unix_clock=wall_clock(os.environ, "coordinator"),
            operations=Operations(self.config, on_config=keep, backup=Backups(state).make),
            problems=problems,
            lease=self.held.lease,
            policy_digest=digest_of(self.state.policy) if self.config.syncers else "",
        )

    @contextlib.asynccontextmanager
    async def _serving(self, security: Security, coordinator: Coordinator) -> AsyncIterator[str]:
        """Serve islands, operators and metrics where an earlier start did; gives the address."""
        config = self.config
        earlier = read_endpoint(self.state.coordinator)
        server = await listen(
            config.coordinator.listen,
            earlier.address if earlier else "",
            repeated_when_full(coordinator.handlers),
            security=security,
            limits=limits_of(config),
            on_refused=coordinator.refused,
        )
        try:
            protection = metrics_protection(config, security)
            is_restart = earlier is not None
            async with _serving_metrics(config, coordinator, protection, is_restart=is_restart):
                endpoint = Endpoint(local_address(server.address), os.getpid())
                await self._retry(
                    "the coordinator's address", lambda: endpoint.write(self.state.coordinator)
                )
                yield coordinator_address(server.address, config.coordinator)
        finally:
            await server.stop(_DRAIN_S)

    def _show_end(self, run_status: RunStatus) -> int:
        """Say how it ended and what to type next; returns the exit code."""
        config, membership, announce = self.config, self.membership, self.announce
        if membership.fatal_reason:
            announce(f"the run {membership.run!r} failed: {membership.fatal_reason}")
            if read_membership(config, self.journal).fatal_reason:
                announce(next_text(config, self.state, membership))
            else:  # of this coordinator alone; it has said itself that the run goes on
                announce(f"the islands: {commands_of_islands(config)}")
            return membership.fatal_exit_code
        if membership.is_finished:
            said = f"the run {membership.run!r} has finished"
            merged = run_status.merged_tokens
            if config.outer.is_on_arrival and merged:
                said += f": every fragment has merged {merged:,} tokens, planned were "
                said += f"{config.total_tokens:,}"
            announce(said)
            return 0
        if membership.is_stopped:
            announce(stopped_text(config, self.state, membership))
        else:
            announce(
                f"coordinator and syncer of run {membership.run!r} stopped; nothing is lost: start "
                f"it again with the same command"
                + (", it goes on stopping" if membership.is_stopping else "")
            )
        return self.signals.exit_code


class _SyncerStores:
    """The stores of syncers on machines of their own; see `fragment_moves.SyncerStores`."""

    def __init__(
        self, store: ObjectStore, syncers: Sequence[StateDir], lease: int, run: str
    ) -> None:
        self._store, self._syncers = store, syncers
        self._lease, self._run = lease, run
        self._files = [SyncerFiles(store, state) for state in syncers]

    def read(self, syncer_id: int) -> tuple[list[int] | None, dict[int, int]]:
        return self._files[syncer_id].read()

    def let_go_for_lost(self, syncer_id: int, fragment_ids: Collection[int]) -> None:
        state = self._syncers[syncer_id]
        let_go_for_lost(self._store, state, self._lease, self._run, fragment_ids)

    def withdraw_for_lost(self, syncer_id: int, moves: Mapping[int, int]) -> None:
        state = self._syncers[syncer_id]
        withdraw_for_lost(self._store, state, self._lease, self._run, moves)


def _write_again(contents: Mapping[Path, bytes]) -> None:
    """Write again what a starting syncer reads, where a disk does not give it back as it was."""
    for path, content in contents.items():
        with contextlib.suppress(OSError):
            if path.read_bytes() == content:
                continue
        logger.error("%s is not what was written there: it is written again", path)
        with contextlib.suppress(OSError):  # the syncer says what is wrong with it
            write_durably(path, [content], mode=0o600)


@contextlib.asynccontextmanager
async def _serving_metrics(
    config: Config, coordinator: Coordinator, protection: Protection, *, is_restart: bool
) -> AsyncIterator[None]:
    """Serve metrics where the run asks for them.

    Raises:
        ConfigError: If they cannot be served at the start of a run, here or by the syncers.
    """
    for name in ("coordinator_metrics", "syncer_metrics"):
        if address := getattr(config.telemetry, name):
            require(f"telemetry.{name} = {address}", "prometheus_client", "leave it out")
    if not config.telemetry.coordinator_metrics:
        yield
        return
    from diloco.telemetry.prometheus import MetricsServer, coordinator_metrics

    metrics = MetricsServer(
        config.telemetry.coordinator_metrics,
        lambda: coordinator_metrics(coordinator.status()),
        setting="telemetry.coordinator_metrics",
        protection=protection,
    )
    try:
        await metrics.start(is_restart=is_restart)
        yield
    finally:
        await metrics.stop()


def _is_over(membership: Membership) -> bool:
    """Whether nobody is to be answered any more; who is away may still come for the end."""
    has_all = membership.is_finished and not membership.members.away
    return has_all or bool(membership.fatal_reason)
