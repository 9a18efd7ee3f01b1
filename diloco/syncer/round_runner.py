"""Runs the rounds of one fragment: performs what the machine decides, in order.

The event loop runs the machine (`state`); tensors and files (`publication`, `store`) are the work
of the fragment's worker, and what takes long of it waits for its turn among the fragments. Every
version is durable before it is announced, every expiry before the next attempt opens.

Source: PROTOCOL.md, "Rounds" and "Durable before answered".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import TypeAlias, TypeVar

from diloco.bounded_text import MOST_NAMES
from diloco.errors import AggregationError, ConfigError
from diloco.loop_clock import loop_now
from diloco.outer.guard import History
from diloco.outer.optimizer import OuterOptimizer
from diloco.outer.units import Unit
from diloco.protocol.rounds.state import FragmentRounds
from diloco.protocol.rounds.terms import (
    MOST_NUMBER,
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
from diloco.protocol.rounds.timing import MeasuredTiming, StepTimes
from diloco.protocol.run.alarms import AlarmKind
from diloco.protos import fragment_pb2 as wire
from diloco.refusals import Cause
from diloco.syncer.admission import CallAdmission
from diloco.syncer.damaged import Damage
from diloco.syncer.hooks import Hooks
from diloco.syncer.merge import Merger, NothingToMerge, Spooled, drop
from diloco.syncer.round_telemetry import RoundTelemetry
from diloco.syncer.rules import FragmentRules
from diloco.syncer.spool import SpooledLane
from diloco.syncer.worker import Bounded, Worker
from diloco.telemetry.events import AlarmRaised
from diloco.transport.contracts import Buffer
from diloco.versions.record import RecordInvalid, StoredRecord
from diloco.versions.store import FragmentStore, Recovered
from diloco.versions.version import VersionRecord, founding_record

logger = logging.getLogger(__name__)

#: A record that is stored, and a section of it that is damaged.
Rot: TypeAlias = tuple[StoredRecord, str]

_T = TypeVar("_T")

#: Seconds from one try to the next, at last, of what reads a whole fragment again each time.
_RECOVERS_S = 60.0


class RoundRunner:
    """Performs what the machine of a fragment's rounds decides.

    It has the machine (`rounds`), the newest version (`record`), the store, and the spool of the
    current attempt. While there is `damage` the fragment is not served. `rules` are those of the
    current attempt; `founding` is held while the first version, or a lost one, is written.
    """

    def __init__(
        self,
        timeline: int,
        rules: FragmentRules,
        steps: StepTimes,
        store: FragmentStore,
        units: tuple[Unit, ...],
        hooks: Hooks,
    ) -> None:
        """Assign only; `start` reads the store. `steps` are the step times of the islands."""
        self._timeline, self._steps, self._hooks = timeline, steps, hooks
        self._worker = hooks.workers.of_fragment()
        self._long_worker = Bounded(self._worker, hooks.merging)
        self.record: VersionRecord | None = None
        self._fragment = fragment = store.fragment
        self.damage = Damage(fragment, hooks.on_event)
        self._store = store
        self._units = units
        self.rules = self._next_rules = rules
        self.rounds, self._timing = self._machine()
        self._fetches = _Fetches()
        self._spool: dict[str, dict[int, SpooledLane]] = {}
        self.telemetry = RoundTelemetry(fragment.fragment_id, hooks.meter, hooks.on_event)
        self.founding = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._is_in_doubt = self._is_indexed = False
        self._disbelieved: set[str] = set()
        self._live: Collection[str] = ()
        self._claims: dict[str, tuple[int, str]] = {}  # newest version and digest of each island

    def _machine(self) -> tuple[FragmentRounds, MeasuredTiming | None]:
        rules, timing = self.rules, None
        if rules.timing is not None:
            timing = MeasuredTiming(rules.timing, self._steps, loop_now(), self._hooks.downtime)
        p = self._fragment.fragment_id
        return FragmentRounds(p, self._timeline, rules.rounds, timing), timing

    async def start(self, admission: CallAdmission) -> None:
        """Go on from the durable state.

        Raises:
            ConfigError: If that state is of another outer optimizer.
        """
        recovered = await self._with_room(self._store.recover, at_most_s=_RECOVERS_S)
        self._go_on(recovered, self._store.lost, admission)

    def _go_on(
        self, recovered: Recovered | None, lost: int, admission: CallAdmission, said_by: str = ""
    ) -> None:
        """Serve what was recovered, unless a version is `lost`, to who holds a grant by now."""
        self._is_in_doubt = False  # what was claimed before was held against another store
        self._live = admission.roster.live
        self.hold_openings(bool(self._hooks.disk_full.waiting))
        for island, incarnation in admission.incarnations.items():
            self.granted(island, incarnation)
        if recovered is not None:
            _check_moments(recovered.record, self.rules.publication.optimizer)
            _check_counts(recovered.record)
            self.record = replace(recovered.record, contributions={})
            for header in recovered.headers:
                self._hooks.on_record(header)
        if lost >= 0:
            self.lose(lost, said_by)
        elif recovered is not None:
            self._check_tokens()
            is_resumed = recovered.record.timeline != self.rounds.timeline  # a run begins again
            instructions = self.rounds.founded(
                recovered.record.version,
                recovered.attempt,
                recovered.past,
                loop_now(),
                last_included=recovered.record.last_included,
                expired_in_a_row=recovered.expired_in_a_row,
                broken_in_a_row=recovered.broken_in_a_row,
                rejected_in_a_row=recovered.rejected_in_a_row,
                refused_at=recovered.refused_at,
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
        return self._hooks.unix_clock() if self.rules.timing is not None else None

    def _loop_time_of(self, unix_s: float | None) -> float | None:
        """Give the loop's time of an earlier moment; now where the wall clock was set back."""
        return None if unix_s is None else loop_now() - max(0.0, self._hooks.unix_clock() - unix_s)

    def stop(self) -> None:
        """Let no more time pass."""
        if self._timer is not None:
            self._timer.cancel()

    def granted(self, island: str, incarnation: int) -> None:
        """Record a start of an island; fences its earlier ones."""
        self._emit_fetched(self._fetches.gone([island]))
        self.damage.forget(island)
        self._claims.pop(island, None)
        self._perform(self.rounds.granted(island, incarnation, loop_now()))

    def set_roster(self, roster: Roster) -> None:
        """Take who may take part in the next openings."""
        self._live = roster.live
        self._emit_fetched(self._fetches.gone_but(roster.live))
        self.damage.keep(roster.live)
        self._perform(self.rounds.set_roster(roster, loop_now()))

    def set_rules(self, rules: FragmentRules) -> None:
        """Take rules that count from the next opening on."""
        self._next_rules = rules
        if self.rounds.is_between:
            self.rules = rules
            self._check_tokens()
        self._perform(self.rounds.set_rules(rules.rounds, rules.timing, loop_now()))

    def hold_openings(self, is_held: bool) -> None:
        """Let nothing open while the syncer's disk is full, or a version may have been lost."""
        self._perform(self.rounds.held(is_held or self._is_in_doubt, loop_now()))

    def stepped(self) -> None:
        """Record that step times are not what they were: an opening may be due.

        While an attempt is under way none is, and every poll of every island says how long steps
        take.
        """
        if self.rounds.is_between:
            self._tick()

    # -- what islands send -------------------------------------------------------------------------

    def arrived(self, lane: LaneArrival) -> None:
        """Let the round wait for the verification of a lane that came in time."""
        self.rounds.lane_arrived(lane, loop_now())
        self._perform([])

    def await_room_for(self, lane: LaneArrival) -> None:
        """Let the deadline begin again: a lane that came finds no room here."""
        key, island = lane.key, lane.island
        self._perform(self.rounds.has_no_room(key, island, lane.incarnation, loop_now()))

    def give_up(self, lane: LaneArrival) -> None:
        """Let the round go on without a lane: its deadline, if it has passed, ends it now."""
        self._perform(self.rounds.lane_given_up(lane, loop_now()))

    def refuse(self, key: RoundKey, island: str, incarnation: int, reason: str) -> None:
        """Take an island out of the attempt: it declined, or sent what cannot be counted."""
        self._perform(self.rounds.refused(key, island, incarnation, reason, loop_now()))

    def count(self, lane: LaneArrival, spooled: SpooledLane | None) -> Admission:
        """Count a lane that was verified and spooled; without `spooled`, judge it by its header."""
        admission, instructions = self.rounds.lane_received(lane, loop_now())
        self.telemetry.refused(self.rounds, lane, admission)
        if spooled is not None and admission is Admission.ACCEPTED:
            self._spool.setdefault(lane.island, {})[lane.lane_id] = spooled
            self._hooks.meter.received(lane.key.fragment_id, lane.island, spooled.num_bytes)
        elif spooled is not None:
            spooled.drop()
        self._perform(instructions)
        return admission

    async def found(self, initial: dict[int, Buffer]) -> None:
        """Commit version 0: theta = published = the uploaded parameters, moments = 0.

        `initial` is emptied once that is durable. Nothing is founded where a later version was
        found to be lost meanwhile.
        """
        record = founding_record(
            self._fragment,
            initial,
            self.rounds.timeline,
            has_second_moment=self.rules.publication.optimizer.has_second_moment,
            closed_unix_s=self._unix_s,
        )
        await self._long_worker.run(lambda: self._store.commit(record))
        initial.clear()
        if self.damage.text:  # it was durable by then, and not announced
            await self._worker.run(lambda: self._store.take_back(0))
            return
        self._hold(record)
        self._perform(self.rounds.founded(0, 0, {}, loop_now()))

    def sent(self, version: int, island: str, lane_ids: Iterable[int]) -> None:
        """Note that lanes of a version were sent to the last byte."""
        if version == self.rounds.version:
            self._emit_fetched(self._fetches.sent(island, lane_ids, loop_now()))

    # -- what was lost, and is repaired ------------------------------------------------------------

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
        self._hooks.on_change(self._fragment.fragment_id)

    def indexed(self, num_versions: int, digest: str) -> None:
        """Set how many versions, 0 among them, the coordinator knows of this timeline.

        `digest` is that of the newest, in hex; empty: not known.
        """
        self._is_indexed = True
        if self._contradicts(num_versions - 1, digest):
            self.lose(num_versions - 1)
        if self._is_in_doubt:
            self._is_in_doubt = False
            self.hold_openings(bool(self._hooks.disk_full.waiting))

    def island_knows(self, island: str, known: wire.FragmentState) -> None:
        """Take what an island says that it knows.

        What contradicts the store is believed once most of the live islands say it: no island ends
        a fragment alone. Nor is it believed of more versions than are kept, which no damage takes
        from a store. Else the coordinator decides, and nothing opens before.
        """
        self.damage.holds(island, known.num_held - 1)
        if not known.is_founded or known.is_damaged:
            return
        newest, version = -1 if self.record is None else self.record.version, known.version
        claim = self._claims[island] = version, known.digest.hex()
        if version <= self.damage.lost or not self._contradicts(*claim):
            return
        agreed = [i for i in self._live if self._claims.get(i) == claim]
        is_near = newest < 0 or version <= newest + self._store.retained_versions
        if is_near and 2 * len(agreed) > len(self._live):
            self.lose(version, ", ".join(sorted(agreed)[:MOST_NAMES]))
        else:
            self._disbelieve(island, version)

    def _disbelieve(self, island: str, version: int) -> None:
        self._hooks.meter.refusal(island, Cause.KEY)
        if island not in self._disbelieved:
            self._disbelieved.add(island)
            logger.error(
                "island %s says that version %d of fragment %d was published, or as something "
                "else, which is not believed of it alone: the coordinator's index says what was",
                island,
                version,
                self._fragment.fragment_id,
            )
        if not self._is_indexed:
            self._is_in_doubt = True
            self.hold_openings(True)

    def _contradicts(self, version: int, digest: str) -> bool:
        """Whether a version, if it was published, is later than the record, or another."""
        newest, own = (-1, "") if (r := self.record) is None else (r.version, r.digest.hex())
        return version > newest or (version == newest and digest not in ("", own))

    async def finish_repair(self, admission: CallAdmission) -> None:
        """Write the version of which every lane is here, and serve the fragment again.

        It stays damaged until that is durable and was read back: no half of it is served.
        """
        async with self.founding:
            if (found := self.damage.recovered) is None:
                return
            newest, optimizer = self.record, self.rules.publication.optimizer
            recovered = await self._with_room(
                lambda: found.write(
                    self._store, newest, has_second_moment=optimizer.has_second_moment
                ),
                at_most_s=_RECOVERS_S,
            )
            said_by = self.damage.said_by
            lost = self.damage.lost  # a later one may have been heard of meanwhile
            lost = max(self._store.lost, lost if lost > found.header["version"] else -1)
            self.damage.repaired(found)
            self._fetches.given_up()
            self.rules = self._next_rules
            self.rounds, self._timing = self._machine()
            self.set_roster(admission.roster)
            self._go_on(recovered, lost, admission, said_by)
            self._hooks.on_change(self._fragment.fragment_id)

    async def verify_store(self, worker: Worker) -> list[Rot]:
        """Read once, a section at a time, all that is stored; what rots is an alarm."""
        rots = []
        for stored in await worker.run(self._store.unverified):
            if stored.header["version"] == self.damage.lost:
                continue  # that has been said
            for name in stored.sections:
                if await self.look_at((stored, name), worker):
                    rots.append((stored, name))
                    break
        return rots

    async def look_at(self, rot: Rot, worker: Worker) -> bool:
        """Whether a section of what is stored is damaged; that is an alarm, each time."""
        stored, name = rot
        if not (why := await worker.run(partial(_rot_in, stored, name))):
            return False
        p, version = self._fragment.fragment_id, stored.header["version"]
        text = (
            f"version {version} of fragment {p} is damaged in the store, and was not "
            f"needed so far: {why}. Stopped, the run mends what can be made again: "
            f"diloco repair RUN.toml"
        )
        logger.error("%s", text)
        self._hooks.on_event(AlarmRaised(AlarmKind.STORE_ROTS, text, fragment_id=p))
        return True

    # -- what the machine decides ------------------------------------------------------------------

    def _perform(self, instructions: Iterable[Instruction]) -> None:
        """Carry out what the machine decided, in order, then set its alarm."""
        if self.damage.text:
            return
        has_changed = False
        for instruction in instructions:
            has_changed = True
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
        if has_changed:
            self._hooks.on_change(self._fragment.fragment_id)
        self.stop()
        wake = self.rounds.next_wake
        if wake < float("inf"):
            self._timer = asyncio.get_running_loop().call_at(wake, self._tick)

    def _tick(self) -> None:
        self._perform(self.rounds.tick(loop_now()))

    def _begin(self, opened: Opened) -> None:
        """Begin an attempt: under the rules of now, and nobody's fetch is waited for any more.

        A wait that is given up measures nothing either: who has not asked by then may be dead.
        """
        self.rules = self._next_rules
        self.telemetry.opened(opened)
        self._fetches.given_up()

    def _emit_fetched(self, fetched_at: float | None) -> None:
        if fetched_at is not None:
            self.rounds.fetched(fetched_at)

    def _check_tokens(self) -> None:
        """Have the fragment end when it has merged the tokens of the run."""
        record, rules = self.record, self.rules
        total = rules.total_tokens
        if record is None or not total or record.merged_tokens < total:
            return
        if record.is_flush or not rules.has_flush:
            self.rounds.end()
        else:
            self.rounds.finishing()

    def _merger(self) -> Merger:
        rules, hooks = self.rules, self._hooks
        return Merger(
            self._fragment,
            self._units,
            self._store,
            rules.publication,
            hooks.meter,
            hooks.workers.lanes,
            rules.told(),
            self._unix_s,
            partial(self._check, self.rounds),
        )

    def _is_overtaken(self, rounds: FragmentRounds) -> bool:
        """Whether the fragment was damaged since, whether or not it is repaired; in any thread."""
        return bool(self.damage.text) or rounds is not self.rounds

    def _check(self, rounds: FragmentRounds) -> None:
        if self._is_overtaken(rounds):
            raise AggregationError("the fragment has lost a version meanwhile")

    async def _publish(self, close: Close) -> None:
        """Merge, commit, then announce; a result that is not finite expires the attempt.

        Where the guard refuses all that came, the attempt goes on and waits for others.
        """
        spool, self._spool = self._spool, {}
        assert self.record is not None, "a round closed before version 0"
        # Let go by the worker at last: the kernel takes 0.05 s to take a GiB back.
        base = [self.record]
        rounds, merger = self.rounds, self._merger()
        try:
            record = await self._with_room(lambda: merger.publish(base[0], close, spool))
            if self.damage.text:  # it was durable by then, and not announced
                await self._worker.run(lambda: self._take_back(record.version, merger, base[0]))
            self._check(rounds)
        except AggregationError as error:
            if self._is_overtaken(rounds):
                logger.warning("round is aborted, key=%s: %s", close.key, error)
                return
            if isinstance(error, NothingToMerge):
                self.telemetry.rejected(close.key, error.rejected)
                self._perform(self.rounds.rejected(close.key, error.rejected, loop_now()))
                return
            logger.error("result refused, key=%s: %s", close.key, error)
            self._perform(self.rounds.result_broken(close.key, str(error), loop_now()))
            return
        self._hold(record)
        self._check_tokens()
        quorum = self.rules.rounds.min_contributions or len(rounds.current.members)
        self.telemetry.closed(close, record, rounds, quorum, loop_now())
        self.telemetry.compared(record, History.from_bytes(record.guard, len(self._units)))
        if quorum < len(rounds.current.members) and self._timing is not None:
            self.telemetry.lacking_grace(self._timing.lacks_grace(rounds.current.members))
        self._fetches.begun([c.island for c in record.contributors], len(self._fragment.lanes))
        instructions = self.rounds.committed(close.key, loop_now(), record.rejected)
        self.rounds.past.forget_before(record.version - self._store.retained_versions)
        self._perform(instructions)
        await self._worker.run(base.clear)

    def _take_back(self, version: int, merger: Merger, base: VersionRecord) -> None:
        self._store.take_back(version)
        merger.restore(base)

    async def _expire(self, expiry: RecordExpiry, spool: Spooled) -> None:
        at_unix_s, rounds, key = self._unix_s, self.rounds, expiry.key

        def expire() -> None:
            drop(spool)
            self._check(rounds)
            self._store.record_expiry(expiry, at_unix_s)

        members = rounds.current.members
        try:
            await self._hooks.disk_full.run(key.fragment_id, self._worker, expire)
            self._check(rounds)
        except AggregationError as error:
            logger.warning("expiry is aborted, key=%s: %s", key, error)
            return
        self.telemetry.expired(expiry, members)
        self._perform(rounds.expiry_recorded(key, loop_now()))

    async def _with_room(self, work: Callable[[], _T], *, at_most_s: float = 0.0) -> _T:
        """Do what takes long, again while the disk is full."""
        p, worker = self._fragment.fragment_id, self._long_worker
        return await self._hooks.disk_full.run(p, worker, work, at_most_s=at_most_s)

    def _hold(self, record: VersionRecord) -> None:
        """Serve a durable version from memory; contributions are left to the disk."""
        self.record = replace(record, contributions={})
        self._hooks.on_record(record.header())


class _Fetches:
    """The contributors that were not yet sent all lanes of the newest version.

    Source: PROTOCOL.md, "Quorum, grace and close", which measures xi_sync by it.
    """

    def __init__(self) -> None:
        """Wait for nobody."""
        self._missing: dict[str, set[int]] = {}
        self._last_at: float | None = None  # when the last of the others had all lanes

    def begun(self, contributors: Iterable[str], num_lanes: int) -> None:
        """Wait for each of them to be sent every lane of a new version."""
        self._missing = {island: set(range(num_lanes)) for island in contributors}
        self._last_at = None

    def given_up(self) -> None:
        """Wait for nobody any more; that measures nothing: who has not asked yet may be dead."""
        self._missing = {}

    def sent(self, island: str, lane_ids: Iterable[int], now: float) -> float | None:
        """Record lanes that were sent to the last byte.

        Returns:
            When the last of those waited for was sent all lanes; None: it is not over, or was.
        """
        missing = self._missing.get(island)
        if missing is None:
            return None
        missing.difference_update(lane_ids)
        if missing:
            return None
        self._last_at = now
        return self.gone([island])

    def gone(self, islands: Iterable[str]) -> float | None:
        """Wait for these no more: who died or lapsed measures nothing, its silence is no transfer.

        Returns:
            As `sent` does.
        """
        was_waiting = bool(self._missing)
        for island in islands:
            self._missing.pop(island, None)
        return self._last_at if was_waiting and not self._missing else None

    def gone_but(self, live: Collection[str]) -> float | None:
        """Wait for the living alone; returns as `sent` does."""
        return self.gone(set(self._missing) - set(live))


def _rot_in(stored: StoredRecord, name: str) -> str:
    """Say what is wrong with a section; empty: nothing is, or it was forgotten meanwhile."""
    try:
        stored.read(name)
    except (RecordInvalid, OSError) as error:  # a disk says EIO of a bad sector
        return str(error) if stored.path.exists() else ""
    return ""


def _check_counts(record: VersionRecord) -> None:
    """Refuse a record that says what no contribution may count: nothing could be said of it.

    Records of an earlier release may: it believed what islands said.
    """
    counts = {f"weight_tokens of island {c.island!r}": c.weight_tokens for c in record.contributors}
    for what, count in (*counts.items(), ("merged_tokens", record.merged_tokens)):
        if count > MOST_NUMBER:
            raise ConfigError(
                f"version {record.version} of fragment {record.fragment_id} has {what} = {count}; "
                f"{MOST_NUMBER} can be counted. It cannot be served, and another start would meet "
                "it again: go back to a checkpoint from before it (diloco coordinator RUN.toml "
                "--resume --at CHECKPOINT), or export what is published and start another run "
                "from it (diloco export, run.warm_start)"
            )


def _check_moments(record: VersionRecord, optimizer: OuterOptimizer) -> None:
    has_second_moment = record.lanes[0].second_moment is not None
    if has_second_moment == optimizer.has_second_moment:
        return
    before = "adam" if has_second_moment else "nesterov, momentum or sgd"
    raise ConfigError(
        f"outer.optimizer.name = {optimizer.name!r}, but version {record.version} of fragment "
        f"{record.fragment_id} has the moments of {before}: go on with that, or export what is "
        "published and start another run from it (diloco export, run.warm_start)"
    )
