"""One fragment at its syncer: performs what the rounds decide, in order, and keeps the bytes.

The event loop receives lanes and runs the machine (`state`); tensors and files (`publication`,
`store`) are the worker's. Every version is durable before anybody hears of it, every expiry before
the next attempt opens.

Source: protocol.md sections 1, 4 and 5.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from diloco.compression.lanes import lane_codec
from diloco.durable import DiskFull
from diloco.errors import AggregationError, ConfigError, PayloadRefused
from diloco.outer.fragments import Fragment
from diloco.outer.optimizer import OuterOptimizer
from diloco.outer.units import Unit
from diloco.refusals import Cause
from diloco.rounds.arrivals import InitialLanes, LaneReader
from diloco.rounds.attendance import Attendance
from diloco.rounds.damaged import Damage
from diloco.rounds.fetches import Fetches
from diloco.rounds.hooks import Hooks
from diloco.rounds.merge import Merger, Spooled, drop
from diloco.rounds.payloads import (
    fetch_lanes,
    insist_on_codec,
)
from diloco.rounds.room import WAITING_FOR_DISK
from diloco.rounds.round_telemetry import RoundTelemetry
from diloco.rounds.rules import FragmentRules
from diloco.rounds.spool import SpooledLane
from diloco.rounds.state import FragmentRounds
from diloco.rounds.store import FragmentStore, Recovered
from diloco.rounds.terms import (
    Admission,
    Close,
    DropLanes,
    Instruction,
    LaneArrival,
    Lost,
    Opened,
    Published,
    RecordExpiry,
    Roster,
    RoundKey,
)
from diloco.rounds.timing import MeasuredTiming, StepTimes
from diloco.rounds.version import VersionRecord, founding_record
from protos import fragment_pb2 as wire
from transport.contracts import Buffer, IncomingCall
from transport.errors import NotYet

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Seconds from one try to the next, at last, of what reads a whole fragment anew each time.
_RECOVERS_S = 60.0


class FragmentService:
    """A fragment's machine, store and newest version, and the spool of its current attempt.

    While there is `damage` the fragment is not served.
    """

    def __init__(
        self,
        fragment: Fragment,
        timeline: int,
        rules: FragmentRules,
        steps: StepTimes,
        store: FragmentStore,
        units: tuple[Unit, ...],
        hooks: Hooks,
    ) -> None:
        """Assign only; `start` reads the store. `steps` are the step times of the islands."""
        self._timeline, self._steps, self._hooks = timeline, steps, hooks
        self.record: VersionRecord | None = None
        self.damage = Damage(fragment, hooks.on_event)
        self._fragment = fragment
        self._store = store
        self._units = units
        self._rules = self._next_rules = rules
        self.rounds, self._timing = self._machine()
        self._fetches = Fetches()
        self._spool: dict[str, dict[int, SpooledLane]] = {}
        self._telemetry = RoundTelemetry(fragment.fragment_id, hooks.meter, hooks.on_event)
        self._reader = LaneReader(fragment, hooks.spool, hooks.worker)
        self._initial = InitialLanes(fragment)
        self._founding = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._coded_bytes: dict[str, int] = {}  # of a contribution, by the uplink's codec
        self._is_in_doubt = self._is_indexed = False
        self._disbelieved: set[str] = set()

    def _machine(self) -> tuple[FragmentRounds, MeasuredTiming | None]:
        rules, timing = self._rules, None
        if rules.timing is not None:
            timing = MeasuredTiming(rules.timing, self._steps, _now(), self._hooks.downtime)
        p = self._fragment.fragment_id
        return FragmentRounds(p, self._timeline, rules.rounds, timing), timing

    async def start(self, attendance: Attendance) -> None:
        """Go on from the durable state.

        Raises:
            ConfigError: If that state is of another outer optimizer.
        """
        recovered = await self._with_room(self._store.recover, at_most_s=_RECOVERS_S)
        self._go_on(recovered, self._store.lost, attendance)

    def _go_on(
        self, recovered: Recovered | None, lost: int, attendance: Attendance, said_by: str = ""
    ) -> None:
        """Serve what was recovered, unless a version is `lost`, to who holds a grant by now."""
        self._is_in_doubt = self._store.is_in_doubt
        self.hold_openings(bool(self._hooks.room.waiting))
        for island, incarnation in attendance.incarnations.items():
            self.granted(island, incarnation)
        if recovered is not None:
            _insist_on_moments(recovered.record, self._rules.publication.optimizer)
            self.record = replace(recovered.record, contributions={})
            for header in recovered.headers:
                self._hooks.on_record(header)
        if lost >= 0:
            self.lose(lost, said_by)
        elif recovered is not None:
            if self._is_in_doubt:
                logger.warning(
                    "fragment %d: nothing opens before the coordinator has said whether version %d "
                    "was published",
                    self._fragment.fragment_id,
                    recovered.record.version + 1,
                )
            self._heed_tokens()
            is_resumed = recovered.record.timeline != self.rounds.timeline  # a run begins anew
            instructions = self.rounds.founded(
                recovered.record.version,
                recovered.attempt,
                recovered.past,
                _now(),
                last_included=recovered.record.last_included,
                expired_in_a_row=recovered.expired_in_a_row,
                broken_in_a_row=recovered.broken_in_a_row,
                missing=recovered.missing,
                closed_at=self._loop_time_of(
                    None if is_resumed else recovered.record.closed_unix_s
                ),
                expired_at=self._loop_time_of(recovered.expired_unix_s),
            )
            self._perform(instructions)

    @property
    def _unix_s(self) -> float | None:
        """The time now, for a record; None where a restart has no use for it."""
        return self._hooks.unix_clock() if self._rules.timing is not None else None

    def _loop_time_of(self, unix_s: float | None) -> float | None:
        """Give the loop's time of an earlier moment; now where the wall clock was set back."""
        return None if unix_s is None else _now() - max(0.0, self._hooks.unix_clock() - unix_s)

    def stop(self) -> None:
        """Let no more time pass."""
        if self._timer is not None:
            self._timer.cancel()

    def lose(self, version: int, said_by: str = "") -> None:
        """Serve the fragment no more: this version was published, and cannot be read here.

        Only an island says so where it is named.
        """
        if version == self.damage.lost and not said_by:
            self.damage.confirmed()
        if version <= self.damage.lost:
            return
        self.damage.found(version, self.record, said_by)
        self.stop()
        spool, self._spool = self._spool, {}
        drop(spool)
        self._hooks.on_change()

    def indexed(self, num_versions: int, digest: str) -> None:
        """Hear how many versions, 0 among them, the coordinator knows of this timeline.

        `digest` is that of the newest, in hex; empty: not known.
        """
        self._is_indexed = True
        self._was_published(num_versions - 1, digest)
        if self._is_in_doubt:
            self._is_in_doubt = False
            self.hold_openings(bool(self._hooks.room.waiting))

    def island_knows(self, island: str, known: wire.FragmentState) -> None:
        """Hear what an island knows: its grant says that it is ours, so what it knows was true.

        Unless it is of more versions than are kept: of that many, which no damage takes from a
        store, the coordinator's word is asked, and nothing opens before.
        """
        if not known.is_founded or known.is_damaged:
            return
        record = self.record
        if record is None or known.version <= record.version + self._store.retained_versions:
            self._was_published(known.version, known.digest.hex(), island)
        elif known.version > self.damage.lost:
            self._disbelieve(island, known.version)

    def _disbelieve(self, island: str, version: int) -> None:
        self._hooks.meter.refusal(island, Cause.KEY)
        if island not in self._disbelieved:
            self._disbelieved.add(island)
            logger.error(
                "island %s says that version %d of fragment %d was published, which is too far "
                "ahead to be believed of it: the coordinator's index says what was",
                island,
                version,
                self._fragment.fragment_id,
            )
        if not self._is_indexed:
            self._is_in_doubt = True
            self.hold_openings(True)

    def _was_published(self, version: int, digest: str, said_by: str = "") -> None:
        """Serve the fragment no more if what was published is later than its record, or another."""
        newest, own = (-1, "") if (r := self.record) is None else (r.version, r.digest.hex())
        if version > newest or (version == newest and digest not in ("", own)):
            self.lose(version, said_by)

    async def take_published(
        self, header: wire.UploadHeader, call: IncomingCall, attendance: Attendance
    ) -> str:
        """Take a lane of the version that was lost; returns what is wrong with it.

        The last one has it written, whether or not its caller is still there.
        """
        island = header.grant.island
        try:
            self.damage.insist_on(header)
            name = self._fragment.fragment_id, island, header.grant.incarnation, header.lane_id
            payload = await self._reader.read(
                name, "float32", header.lane_id, header.digest, call, lambda payload: payload
            )
            self.damage.take(header, payload)
        except PayloadRefused as error:
            if self._serves(header):
                return ""  # it has come before, and the answer was lost
            self._hooks.meter.refusal(island, error.cause)
            return f"published parameters refused: {error}"
        if self.damage.gift is not None:
            self._hooks.spawn(self._finish_repair(attendance))
        return ""

    def _serves(self, header: wire.UploadHeader) -> bool:
        """Whether a lane is one of the version that is served now."""
        record, lane_id = self.record, header.lane_id
        if self.damage.text or record is None or lane_id >= len(record.lane_digests):
            return False
        own = record.version, record.lane_digests[lane_id]
        return own == (header.version, header.digest)

    async def _finish_repair(self, attendance: Attendance) -> None:
        """Write the version of which every lane is here, and serve the fragment again.

        It stays damaged until that is durable and was read back: nobody hears of one half of it.
        """
        async with self._founding:
            if (gift := self.damage.gift) is None:
                return
            newest, optimizer = self.record, self._rules.publication.optimizer
            recovered = await self._with_room(
                lambda: gift.write(
                    self._store, newest, has_second_moment=optimizer.has_second_moment
                ),
                at_most_s=_RECOVERS_S,
            )
            said_by = self.damage.said_by
            lost = self.damage.lost  # a later one may have been heard of meanwhile
            lost = max(self._store.lost, lost if lost > gift.header["version"] else -1)
            self.damage.mended(gift)
            self._fetches.given_up()
            self._rules = self._next_rules
            self.rounds, self._timing = self._machine()
            self.heard_of(attendance.roster)
            self._go_on(recovered, lost, attendance, said_by)
            self._hooks.on_change()

    def granted(self, island: str, incarnation: int) -> None:
        """Take note of a start of an island; fences its earlier ones."""
        self._tell_fetched(self._fetches.gone([island]))
        self._perform(self.rounds.granted(island, incarnation, _now()))

    def heard_of(self, roster: Roster) -> None:
        """Take who may take part in the next openings."""
        self._tell_fetched(self._fetches.gone_but(roster.live))
        self._perform(self.rounds.heard_of(roster, _now()))

    def obey(self, rules: FragmentRules) -> None:
        """Take rules that count from the next opening on."""
        self._next_rules = rules
        if self.rounds.is_between:
            self._rules = rules
            self._heed_tokens()
        self._perform(self.rounds.obey(rules.rounds, rules.timing, _now()))

    def hold_openings(self, is_held: bool) -> None:
        """Let nothing open while the syncer's disk is full, or a version may have been lost."""
        self._perform(self.rounds.held(is_held or self._is_in_doubt, _now()))

    @property
    def phase(self) -> str:
        """Phase of the current round, in words."""
        if self.damage.text:
            return "damaged"
        if self._fragment.fragment_id in self._hooks.room.waiting:
            return WAITING_FOR_DISK
        return "ended" if self.rounds.is_over else str(self.rounds.phase)

    def stepped(self) -> None:
        """Take note that step times are not what they were: an opening may be due."""
        self._tick()

    # -- contributions ---------------------------------------------------------------------------

    async def receive(self, lane: LaneArrival, codec_name: str, call: IncomingCall) -> Admission:
        """Judge a lane by its header, read and verify it, count it; refuse a malformed one.

        Raises:
            NotYet: If it has to wait for its turn; the round waits for it.
        """
        admission = self.rounds.admit(lane)
        if admission not in (Admission.ACCEPTED, Admission.CONFLICT):
            self._telemetry.refused(self.rounds, lane, admission)
            return admission
        spooled: SpooledLane | None = None
        if admission is Admission.ACCEPTED:
            try:
                spooled = await self._read(lane, codec_name, call)
            except PayloadRefused as error:
                logger.warning("lane refused, key=%s island=%s: %s", lane.key, lane.island, error)
                self._hooks.meter.refusal(lane.island, error.cause)
                self.refuse(lane.key, lane.island, lane.incarnation, str(error))
                return self.rounds.admit(lane)
            except DiskFull as error:
                self._hooks.room.refuse_lane(lane.key, error)
                self._await_room_for(lane)
                return Admission.NOT_OPEN
            except NotYet:
                self._await_room_for(lane)
                raise
            if self.damage.text:
                spooled.drop()
                return Admission.NOT_OPEN
        admission, instructions = self.rounds.lane_received(lane, _now())
        self._telemetry.refused(self.rounds, lane, admission)
        if spooled is not None and admission is Admission.ACCEPTED:
            self._spool.setdefault(lane.island, {})[lane.lane_id] = spooled
            self._hooks.meter.received(lane.key.fragment_id, lane.island, spooled.num_bytes)
        elif spooled is not None:
            spooled.drop()
        self._perform(instructions)
        return admission

    def _await_room_for(self, lane: LaneArrival) -> None:
        key, island = lane.key, lane.island
        self._perform(self.rounds.has_no_room(key, island, lane.incarnation, _now()))

    @property
    def due_bytes(self) -> int:
        """What may be sent at once: a contribution of each member while the round is open."""
        if not self.rounds.is_open:
            return 0
        codec = self._rules.publication.uplink_codec
        if codec not in self._coded_bytes:
            self._coded_bytes[codec] = sum(
                lane_codec(codec, self._fragment, lane.lane_id).wire_bytes(lane.numel)
                for lane in self._fragment.lanes
            )
        return len(self.rounds.members) * self._coded_bytes[codec]

    @property
    def initial_bytes(self) -> list[int]:
        """Bytes of each lane of the initial parameters; empty once version 0 is durable."""
        is_founded = self.record is not None or self.damage.text
        return [] if is_founded else self._initial.bytes_of_lanes

    def refuse(self, key: RoundKey, island: str, incarnation: int, reason: str) -> None:
        """Take an island out of the attempt: it declined, or sent what cannot be counted."""
        self._perform(self.rounds.refused(key, island, incarnation, reason, _now()))

    async def _read(self, lane: LaneArrival, codec_name: str, call: IncomingCall) -> SpooledLane:
        """Receive, verify and spool a lane.

        Raises:
            PayloadRefused: If it cannot be counted; says why.
        """
        insist_on_codec(codec_name, self._rules.publication.uplink_codec)
        spool = self._hooks.spool
        name = lane.key, lane.island, lane.incarnation, lane.lane_id
        return await self._reader.read(
            name, codec_name, lane.lane_id, lane.digest, call, lambda p: spool.put(p, lane.digest)
        )

    async def take_initial(self, header: wire.UploadHeader, call: IncomingCall) -> str:
        """Keep a lane of the initial parameters; the last one founds version 0.

        Returns:
            What is wrong with it; empty when it was taken, or version 0 is durable already.

        Raises:
            NotYet: If a later version was found to be lost meanwhile.
        """
        grant, island = header.grant, header.grant.island
        try:
            self._initial.insist_on(header.lane_id)
            name = self._fragment.fragment_id, island, grant.incarnation, header.lane_id
            payload = await self._reader.read(
                name, "float32", header.lane_id, header.digest, call, lambda payload: payload
            )
        except PayloadRefused as error:
            self._hooks.meter.refusal(island, error.cause)
            return f"initial parameters refused: {error}"
        async with self._founding:
            self.insist_on_whole()
            if self.record is not None:
                return ""
            if self.rounds.is_fenced(island, grant.incarnation):
                return f"a newer start of island {island!r} has joined"
            self._initial.take((island, grant.incarnation), header.lane_id, payload)
            if self._initial.is_whole:
                await self._found()
        return ""

    def insist_on_whole(self) -> None:
        """Have whoever calls call again until the fragment is served.

        Raises:
            NotYet: If it is damaged.
        """
        if self.damage.text:
            raise NotYet(self.damage.text)

    async def _found(self) -> None:
        """Commit version 0: theta = published = the uploaded parameters, moments = 0."""
        record = founding_record(
            self._fragment,
            self._initial.lanes,
            self.rounds.timeline,
            has_second_moment=self._rules.publication.optimizer.has_second_moment,
            closed_unix_s=self._unix_s,
        )
        await self._hooks.worker.run(lambda: self._store.commit(record))
        self._initial.lanes.clear()
        if self.damage.text:  # it was durable by then, and nobody has heard of it
            await self._hooks.worker.run(lambda: self._store.take_back(0))
        self.insist_on_whole()
        self._hold(record)
        self._perform(self.rounds.founded(0, 0, {}, _now()))

    # -- what is published -----------------------------------------------------------------------

    def state(self, *, wants_initial: bool) -> wire.FragmentState:
        """Return what islands and the coordinator see of this fragment."""
        state = wire.FragmentState(
            fragment_id=self._fragment.fragment_id,
            version=self.rounds.version,
            attempt=self.rounds.attempt,
            is_open=self.rounds.is_open,
            wants_initial=wants_initial,
            is_damaged=bool(self.damage.text),
        )
        if self.rounds.is_open:
            state.members.extend(self.rounds.members)
            state.takes_flush = self.rounds.takes_flush
        if self.record is not None:
            state.version, state.is_founded = self.record.version, True
            state.digest = self.record.digest
            state.lane_digests.extend(self.record.lane_digests)
            state.contributors.extend(c.island for c in self.record.contributors)
            state.payload_codec = self.record.payload_codec
            state.sent_at_inner_step = self.record.sent_at_inner_step
            state.is_flush = self.record.is_flush
            state.merged_tokens = self.record.merged_tokens
        return state

    async def fetch(self, header: wire.FetchHeader) -> tuple[wire.FetchReply, Buffer]:
        """Return lanes of a published version, and the reply that goes before them."""
        reply, payload = await fetch_lanes(header, self.record, self._store, self._hooks.worker)
        self._hooks.meter.sent(header.fragment_id, header.grant.island, len(payload))
        return reply, payload

    def fetched(self, header: wire.FetchHeader) -> None:
        """Take note that lanes were sent, to the last byte: what xi_sync is measured by."""
        if header.version == self.rounds.version:
            self._tell_fetched(self._fetches.sent(header.grant.island, header.lane_ids, _now()))

    def _tell_fetched(self, fetched_at: float | None) -> None:
        if fetched_at is not None:
            self.rounds.fetched(fetched_at)

    # -- what the machine decides ----------------------------------------------------------------

    def _perform(self, instructions: Iterable[Instruction]) -> None:
        """Carry out what the machine decided, in order, then set its alarm."""
        if self.damage.text:
            return
        for instruction in instructions:
            match instruction:
                case Published():
                    logger.debug("%s", instruction)
                case Opened():
                    logger.debug("%s", instruction)
                    self._begin(instruction)
                case Close():
                    self._hooks.spawn(self._publish(instruction))
                case RecordExpiry(key, reason):
                    logger.warning("round expired, key=%s: %s", key, reason)
                    spool, self._spool = self._spool, {}
                    self._hooks.spawn(self._expire(instruction, spool))
                case DropLanes(_, island, _):
                    for spooled in self._spool.pop(island, {}).values():
                        spooled.drop()
                case Lost():
                    self._hooks.on_lost(instruction)
            self._hooks.on_change()
        self.stop()
        wake = self.rounds.next_wake
        if wake < float("inf"):
            self._timer = asyncio.get_running_loop().call_at(wake, self._tick)

    def _tick(self) -> None:
        self._perform(self.rounds.tick(_now()))

    def _begin(self, opened: Opened) -> None:
        """Begin an attempt: under the rules of now, and nobody's fetch is waited for any more.

        A wait that is given up measures nothing either: who has not asked by then may be dead.
        """
        self._rules = self._next_rules
        self._telemetry.opened(opened)
        self._fetches.given_up()

    def _heed_tokens(self) -> None:
        """Have the fragment end when it has merged the tokens of the run."""
        record, rules = self.record, self._rules
        total = rules.total_tokens
        if record is None or not total or record.merged_tokens < total:
            return
        if record.is_flush or not rules.has_flush:
            self.rounds.end()
        else:
            self.rounds.finishing()

    def _merger(self) -> Merger:
        rules, hooks = self._rules, self._hooks
        return Merger(
            self._fragment,
            self._units,
            self._store,
            rules.publication,
            hooks.meter,
            hooks.num_threads,
            rules.told(),
            self._unix_s,
            partial(self._insist_on, self.rounds),
        )

    def _is_overtaken(self, rounds: FragmentRounds) -> bool:
        """Whether the fragment was damaged since, be it mended or not; in any thread."""
        return bool(self.damage.text) or rounds is not self.rounds

    def _insist_on(self, rounds: FragmentRounds) -> None:
        if self._is_overtaken(rounds):
            raise AggregationError("the fragment has lost a version meanwhile")

    async def _publish(self, close: Close) -> None:
        """Merge, commit, then announce; a result that is not finite expires the attempt."""
        spool, self._spool = self._spool, {}
        base = self.record
        assert base is not None, "a round closed before version 0"
        rounds, merger = self.rounds, self._merger()
        try:
            record = await self._with_room(lambda: merger.publish(base, close, spool))
            if self.damage.text:  # it was durable by then, and nobody has heard of it
                await self._hooks.worker.run(lambda: self._take_back(record.version, merger, base))
            self._insist_on(rounds)
        except AggregationError as error:
            if self._is_overtaken(rounds):
                logger.warning("round comes to nothing, key=%s: %s", close.key, error)
                return
            logger.error("result refused, key=%s: %s", close.key, error)
            self._perform(self.rounds.result_broken(close.key, str(error), _now()))
            return
        self._hold(record)
        self._heed_tokens()
        quorum = self._rules.rounds.min_contributions or len(rounds.members)
        self._telemetry.closed(close, record, rounds, quorum, _now())
        if quorum < len(rounds.members) and self._timing is not None:
            self._telemetry.lacking_grace(self._timing.lacks_grace(rounds.members))
        self._fetches.begun([c.island for c in record.contributors], len(self._fragment.lanes))
        instructions = self.rounds.committed(close.key, _now(), record.rejected)
        self.rounds.forget_before(record.version - self._store.retained_versions)
        self._perform(instructions)

    def _take_back(self, version: int, merger: Merger, base: VersionRecord) -> None:
        self._store.take_back(version)
        merger.restore(base)

    async def _expire(self, expiry: RecordExpiry, spool: Spooled) -> None:
        at_unix_s, rounds, key = self._unix_s, self.rounds, expiry.key

        def expire() -> None:
            drop(spool)
            self._insist_on(rounds)
            self._store.record_expiry(key, expiry.missing, expiry.broken_in_a_row, at_unix_s)

        members = rounds.members
        try:
            await self._with_room(expire)
            self._insist_on(rounds)
        except AggregationError as error:
            logger.warning("expiry comes to nothing, key=%s: %s", key, error)
            return
        self._telemetry.expired(expiry, members)
        self._perform(rounds.expiry_recorded(key, _now()))

    async def _with_room(self, work: Callable[[], _T], *, at_most_s: float = 0.0) -> _T:
        room = self._hooks.room
        return await room.having(self._fragment.fragment_id, work, at_most_s=at_most_s)

    def _hold(self, record: VersionRecord) -> None:
        """Serve a durable version from memory; contributions are left to the disk."""
        self.record = replace(record, contributions={})
        self._hooks.on_record(record.header())


def _insist_on_moments(record: VersionRecord, optimizer: OuterOptimizer) -> None:
    has_second_moment = record.lanes[0].second_moment is not None
    if has_second_moment == optimizer.has_second_moment:
        return
    before = "adam" if has_second_moment else "nesterov, momentum or sgd"
    raise ConfigError(
        f"outer.optimizer.name = {optimizer.name!r}, but version {record.version} of fragment "
        f"{record.fragment_id} has the moments of {before}: go on with that, or export what is "
        "published and start another run from it (diloco export, run.warm_start)"
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
