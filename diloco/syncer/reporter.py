"""Reports to the coordinator: the address, the state of fragments, and what became durable.

The coordinator's index of rounds is fed from here and never consulted to decide one, so nothing in
this module may hold a round up: events only leave a mark, one task does the telling, and a
coordinator that is away is tried again for ever. Every record header is told in order until it is
acknowledged, one that is too large for a message without what makes it so; states are told as they
are when their turn comes, however often they changed. The answers bring the coordinator's orders.

Source: PROTOCOL.md, "Audit log" and "Coordinator away".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from google.protobuf.message import Message

from diloco.bounded_text import MOST_NAMES, bounded_text
from diloco.errors import RunReturned
from diloco.loop_clock import loop_now
from diloco.protocol.rounds.orders import Orders
from diloco.protocol.run.alarms import Alarms, alarm_message
from diloco.protos.control_pb2 import (
    Expiry,
    FragmentMove,
    FragmentStatus,
    Grant,
    RefusalCount,
    RoundReport,
    RoundReportReply,
    StateTransfer,
    SyncerHelloReply,
    SyncerHelloRequest,
)
from diloco.protos.fragment_pb2 import FragmentState
from diloco.telemetry.round_events import RoundExpired
from diloco.transport.contracts import PROTOCOL_VERSION, Reply, Transport
from diloco.transport.errors import ConnectError, Overloaded, TransportError
from diloco.transport.framing import MAX_HEADER_BYTES

logger = logging.getLogger(__name__)

HELLO_INTERVAL_S = 2.0

#: Told to a coordinator that was away; the attempt in a record's header counts the others too.
_MOST_EXPIRIES = 1000
_SPACING_S = 0.1
_RETRY_WAIT_S = 0.25
#: The same, where the coordinator has answered that it can take none now.
_HELD_WAIT_S = 1.0
_DEADLINE_S = 5.0
#: Of a report: lengths of what is around a record's header may grow.
_MOST_REPORT_BYTES = MAX_HEADER_BYTES - (1 << 10)
#: Of a record's header in it: an answer that hands it on says other things, too.
_MOST_RECORD_BYTES = MAX_HEADER_BYTES * 3 // 4


class ReportedRounds(Protocol):
    """What is told of a syncer."""

    @property
    def states(self) -> Sequence[FragmentState]:
        """Public state of every fragment."""

    @property
    def refusals(self) -> Sequence[RefusalCount]:
        """What was refused since the start, by island and cause."""

    @property
    def pinned_cut(self) -> int:
        """Cut for which a version of every fragment is kept; 0: none since the start."""

    def phase(self, fragment_id: int) -> str:
        """Phase of a fragment's current round, in words."""

    def rounds_of(self, fragment_id: int) -> tuple[int, int]:
        """Rounds of a fragment published since the start, and those that count one island."""

    def damage(self, fragment_id: int) -> str:
        """Why a fragment is not served, and what to type; empty: it is served."""

    def awaits(self, fragment_id: int) -> FragmentStatus:
        """Say for whom a round or a lost version waits; nothing else of the fragment is set."""

    def indexed(self, num_versions: Mapping[int, int], digests: Mapping[int, str]) -> None:
        """Called with how many versions of each fragment the coordinator knows; must not block.

        `digests` are those of the newest of them, in hex.
        """

    def repair(self, fragment_id: int, island: str, record_json: str) -> None:
        """Take what a damaged fragment has lost from islands; must not block.

        First from the one that is named, if any is. Repeated with every report until it is not
        damaged any more.
        """

    def keep_cut(self, number: int, versions: Sequence[int]) -> None:
        """Keep the newest version of every fragment for a cut; must not block.

        Repeated with every report until `pinned_cut` says that it is done; `versions` are those
        that an island's part of it has, at most.
        """

    def keep_checkpoints(self, steps: Sequence[int]) -> None:
        """Record the run checkpoints that are complete, ascending; must not block.

        Repeated with every report, and while the coordinator is away: what is kept is bounded.
        """

    def set_orders(self, orders: Orders) -> None:
        """Take the coordinator's orders, as they are with every report; must not block."""

    def set_transfers(self, named: Sequence[StateTransfer]) -> None:
        """Set which state transfers are under way, as with every report; must not block."""


class Reporter:
    """Tells one coordinator about one start of a syncer.

    `add_record`, `changed` and `fail` return at once; `run` does the telling. `alarms` that hold
    are told with every report; `num_answers` counts what the coordinator has answered.
    """

    def __init__(
        self,
        *,
        connect: Callable[[], Transport],
        grant: Grant,
        syncer_epoch: int,
        pid: int,
        syncer_id: int = 0,
        lease: int = 0,
        policy_digest: str = "",
        on_stale: Callable[[], None] = lambda: None,
    ) -> None:
        """Assign only.

        Args:
            connect: Opens a way to the coordinator of now; called again after every failure. It
                may raise a TransportError when none is known.
            grant: The syncer's own.
            syncer_epoch: Of this start.
            pid: Of this process.
            syncer_id: Which of the run's syncers.
            lease: Of the coordinator that is known; one of an earlier lease orders nothing.
            policy_digest: Of the coordinator's policy that this start serves by; empty: any.
            on_stale: Called when a coordinator has answered whose place another has taken, so that
                `connect` tries another address.
        """
        self._connect = connect
        self._grant = grant
        self._epoch = syncer_epoch
        self._pid = pid
        self._syncer_id = syncer_id
        self._transport: Transport | None = None
        self._is_away = self._is_held = False
        self.num_answers = 0
        self._records: deque[Mapping[str, Any]] = deque()
        self._expiries: deque[RoundExpired] = deque(maxlen=_MOST_EXPIRIES)
        self._shortened: Mapping[str, Any] | None = None  # the last that was told in part
        self._indexed: dict[int, int] = {}
        self._published_at: dict[int, float] = {}
        self._complete: Sequence[int] | None = None
        self._fatal: tuple[str, int] = ("", 0)
        self._lease, self._policy_digest, self._on_stale = lease, policy_digest, on_stale
        #: Set when the coordinator says that all end.
        self.ends = asyncio.Event()
        #: The newest answer that names this syncer's fragments; None: there was none.
        self.assigned: SyncerHelloReply | None = None
        #: Says how the moves of fragments to this syncer stand.
        self.moves: Callable[[], Iterable[FragmentMove]] = tuple
        self.alarms = Alarms()
        self._news = asyncio.Event()
        self._told = asyncio.Event()

    def add_record(self, header: Mapping[str, Any]) -> None:
        """Report a durable record soon, by its header (JSON values; `fragment_id` is read)."""
        self._published_at[header["fragment_id"]] = loop_now()
        self._records.append(header)
        self.changed()

    def add_expiry(self, expired: RoundExpired) -> None:
        """Record that an attempt expired, durably."""
        self._expiries.append(expired)
        self.changed()

    def is_indexed(self, fragment_id: int, version: int) -> bool:
        """Whether the coordinator has acknowledged this version, or a later one; any thread."""
        return version <= self._indexed.get(fragment_id, -1)

    def changed(self) -> None:
        """Record that a fragment's state is not what was last told."""
        self._told.clear()
        self._news.set()

    def fail(self, reason: str, exit_code: int) -> None:
        """Record that the run cannot go on; told with every report from now on."""
        self._fatal = (reason, exit_code)
        self.changed()

    async def learn_plan(self) -> SyncerHelloReply:
        """Ask for the run's plan, and this syncer's part of it, until an island has joined.

        Raises:
            RunReturned: If the run has begun a new timeline.
        """
        while True:
            try:
                reply = await self._hello("")
            except TransportError as error:
                await self._lose(error)
            else:
                if reply.plan:
                    return reply
            await asyncio.sleep(_RETRY_WAIT_S)

    async def run(self, rounds: ReportedRounds, address: str) -> None:
        """Tell what is new at once, and everything every 2 s, until cancelled.

        Raises RunReturned once the run has begun a new timeline.

        Args:
            rounds: Asked for its states whenever they are told.
            address: ``host:port`` at which islands reach the syncer.
        """
        while True:
            self._news.clear()  # what changes from here on is told next time
            try:
                await self._send_report(rounds, address)
            except TransportError as error:
                await self._lose(error)
                if self._complete is not None:  # nothing becomes complete while nobody hears of it
                    rounds.keep_checkpoints(self._complete)
                await asyncio.sleep(_HELD_WAIT_S if self._is_held else _RETRY_WAIT_S)
                continue
            if self._is_held:
                logger.info("the coordinator takes reports again")
                self._is_held = False
            if not self._news.is_set():
                self._told.set()
            try:
                await asyncio.wait_for(self._news.wait(), HELLO_INTERVAL_S)
            except TimeoutError:
                continue
            await asyncio.sleep(_SPACING_S)  # a burst becomes one report

    async def drain(self, within_s: float) -> bool:
        """Wait until everything was told while `run` goes on; false if that took too long."""
        try:
            await asyncio.wait_for(self._told.wait(), within_s)
        except TimeoutError:
            return False
        return True

    async def say_ended(self, within_s: float, reason: str = "") -> None:
        """Say as the last word that this syncer has ended; call it when `run` was cancelled.

        `reason` is that of an end that no other start helps.
        """
        with contextlib.suppress(TransportError, RunReturned, TimeoutError):
            await asyncio.wait_for(self._hello("", has_ended=True, reason=reason), within_s)

    async def close(self) -> None:
        """Release the connection; call it when `run` was cancelled."""
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    async def _hello(
        self, address: str, *, has_ended: bool = False, reason: str = ""
    ) -> SyncerHelloReply:
        """Say where islands find this syncer, and hear how the run stands.

        Raises:
            RunReturned: If the run has begun a new timeline, or goes on under another policy.
            TransportError: If there is no answer, or one of a coordinator whose place another has
                taken.
        """
        request = SyncerHelloRequest(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            syncer_id=self._syncer_id,
            address=address,
            syncer_epoch=self._epoch,
            pid=self._pid,
            has_ended=has_ended,
            reason=reason,
            moves=self.moves(),
        )
        answer = await self._call("control.syncer_hello", request)
        reply = SyncerHelloReply.FromString(answer.header)
        if reply.lease < self._lease:
            self._on_stale()
            raise ConnectError(
                f"the coordinator of lease {reply.lease} answered, and that of lease "
                f"{self._lease} has taken its place"
            )
        self._lease = reply.lease
        if reply.timeline > self._grant.timeline:
            raise RunReturned(
                f"the run was resumed, or went back by itself, to timeline {reply.timeline}; this "
                f"start serves {self._grant.timeline}: the next one takes the store there"
            )
        if self._policy_digest and reply.policy_digest != self._policy_digest:
            raise RunReturned(
                "the coordinator goes on under another policy than that of this start: the next "
                "one reads it"
            )
        if reply.ends:
            self.ends.set()
        if reply.plan:
            self.assigned = reply
        return reply

    async def _send_report(self, rounds: ReportedRounds, address: str) -> None:
        hello = await self._hello(address)
        rounds.indexed(*indexed_of(hello))
        while self._expiries:
            expired = self._expiries[0]
            await self._report(rounds, expiry=_expiry(expired))
            if self._expiries and self._expiries[0] is expired:  # or it went, for want of room
                self._expiries.popleft()
        while self._records:
            header = self._records[0]
            await self._report(rounds, header)
            self._records.popleft()
            self._indexed[header["fragment_id"]] = header["version"]
        reply = await self._report(rounds)
        self._complete = reply.checkpoint_steps
        rounds.keep_checkpoints(self._complete)
        rounds.set_orders(Orders.of(reply))
        rounds.set_transfers(reply.transfers)
        for each in reply.repairs:
            rounds.repair(each.fragment_id, each.island, each.record_json)
        if reply.cut:
            rounds.keep_cut(reply.cut, reply.cut_versions)

    async def _report(
        self,
        rounds: ReportedRounds,
        header: Mapping[str, Any] | None = None,
        expiry: Expiry | None = None,
    ) -> RoundReportReply:
        """Report once; returns what the coordinator says."""
        reason, exit_code = self._fatal
        report = RoundReport(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            syncer_id=self._syncer_id,
            syncer_epoch=self._epoch,
            fragments=[self._status(rounds, state) for state in rounds.states],
            expiry=expiry,
            fatal_reason=reason,
            fatal_exit_code=exit_code,
            refusals=rounds.refusals,
            alarms=map(alarm_message, self.alarms.holding(loop_now())),
            pinned_cut=rounds.pinned_cut,
        )
        if header is not None:
            room = min(_MOST_RECORD_BYTES, _MOST_REPORT_BYTES - report.ByteSize())
            report.record_json = self._told_of(header, room)
        reply = await self._call("control.round_report", report)
        return RoundReportReply.FromString(reply.header)

    def _told_of(self, header: Mapping[str, Any], most_bytes: int) -> str:
        """Return what is told of a record: its header, or what of it has room in a message.

        The record itself stays whole. Coefficients go first, they are for who recomputes a version;
        then reasons, then the digests of contributions, most of it: with the others a version that
        is lost can be taken from an island. Then whatever has an entry for each island: an index
        needs none of it.
        """
        text, told, dropped = json.dumps(header, sort_keys=True), dict(header), ""
        num_bytes = len(text)
        contributors = [{**each, "lane_digests": []} for each in header.get("contributors", ())]
        for less in (
            {"merge": None},
            {"refused": None},
            {"contributors": contributors},
            dict.fromkeys(("lane_digests", "lane_blake3", "contributors", "last_included")),
        ):
            if len(text) <= most_bytes:
                break
            told, dropped = {**told, **less}, f"{dropped} {' '.join(less)}"
            text = json.dumps({k: v for k, v in told.items() if v is not None}, sort_keys=True)
        if dropped and header is not self._shortened:
            self._shortened = header
            logger.warning(
                "a record's header is too large to be reported, fragment=%s version=%s bytes=%d: "
                "told without all of%s",
                header["fragment_id"], header["version"], num_bytes, dropped,
            )  # fmt: skip
        return text

    def _status(self, rounds: ReportedRounds, state: FragmentState) -> FragmentStatus:
        now = loop_now()
        num_rounds, num_solo = rounds.rounds_of(state.fragment_id)
        status = FragmentStatus(
            fragment_id=state.fragment_id,
            version=state.version,
            attempt=state.attempt,
            digest=state.digest.hex(),
            contributors=state.contributors[:MOST_NAMES],
            num_contributors=len(state.contributors),
            age_s=now - self._published_at.get(state.fragment_id, now),
            phase=rounds.phase(state.fragment_id),
            merged_tokens=state.merged_tokens,
            rounds=num_rounds,
            solo_rounds=num_solo,
            damage=bounded_text(rounds.damage(state.fragment_id)),
        )
        status.MergeFrom(rounds.awaits(state.fragment_id))
        return status

    async def _call(self, method: str, request: Message) -> Reply:
        if self._transport is None:
            self._transport = self._connect()
        reply = await self._transport.call(
            method, request.SerializeToString(), deadline_s=_DEADLINE_S
        )
        self.num_answers += 1
        if self._is_away:
            logger.info("coordinator answers again, peer=%s", self._transport.peer)
            self._is_away = False
        return reply

    async def _lose(self, error: TransportError) -> None:
        """Drop a connection that failed; the first failure in a row is worth a word.

        A coordinator that has no room for what it is to write has answered, and is asked again.
        """
        if isinstance(error, Overloaded):
            if not self._is_held:
                logger.warning("the coordinator takes no reports now, trying on: %s", error)
                self._is_held = True
            return
        if not self._is_away:
            logger.warning("coordinator does not answer, trying on: %s", error)
            self._is_away = True
        await self.close()


def indexed_of(hello: SyncerHelloReply) -> tuple[dict[int, int], dict[int, str]]:
    """Read by fragment how many versions are indexed, and the digest of the newest of them."""
    return (
        dict(zip(hello.fragment_ids, hello.num_indexed, strict=False)),
        dict(zip(hello.fragment_ids, hello.indexed_digests, strict=False)),
    )


def _expiry(expired: RoundExpired) -> Expiry:
    return Expiry(
        fragment_id=expired.fragment_id,
        version=expired.version,
        attempt=expired.attempt,
        missing=expired.missing,
        reason=expired.reason,
    )
