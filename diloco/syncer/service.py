"""Answers islands for one fragment: takes what they send, gives what they fetch.

The event loop receives lanes; workers of their own verify and spool them, whatever is merged
meanwhile.

Source: PROTOCOL.md, "Contributions" and "Staging".
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from diloco.compression.lanes import lane_codec
from diloco.durable import DiskFull
from diloco.errors import PayloadRefused
from diloco.loop_clock import loop_now
from diloco.outer.guard import asks_trial
from diloco.protocol.rounds.terms import Admission, LaneArrival
from diloco.protos import fragment_pb2 as wire
from diloco.refusals import Cause
from diloco.syncer.admission import CallAdmission
from diloco.syncer.arrivals import InitialLanes, LaneReader
from diloco.syncer.disk_full import WAITING_FOR_DISK
from diloco.syncer.hooks import Hooks
from diloco.syncer.payloads import check_codec, fetch_lanes
from diloco.syncer.round_runner import RoundRunner
from diloco.syncer.spool import SpooledLane
from diloco.transport.contracts import Buffer, IncomingCall
from diloco.transport.errors import NotYet
from diloco.versions.store import FragmentStore
from diloco.versions.version import VersionRecord

logger = logging.getLogger(__name__)


class FragmentService:
    """Answers what islands ask of one fragment, whose rounds the `runner` runs."""

    def __init__(self, runner: RoundRunner, store: FragmentStore, hooks: Hooks) -> None:
        """Assign only; `store` and `hooks` are the runner's."""
        self.runner = runner
        self._fragment, self._store, self._hooks = store.fragment, store, hooks
        self._reader = LaneReader(store.fragment, hooks.spool, hooks.workers.checks)
        self._initial = InitialLanes(store.fragment)
        self._coded_bytes: dict[str, int] = {}  # of a contribution, by the uplink's codec

    # -- contributions -----------------------------------------------------------------------------

    async def receive(self, lane: LaneArrival, codec_name: str, call: IncomingCall) -> Admission:
        """Judge a lane by its header, read and verify it, count it; refuse a malformed one.

        Raises:
            NotYet: If it has to wait, for its turn or for room; the round waits for it.
        """
        admission = self.runner.rounds.admit(lane)
        if admission not in (Admission.ACCEPTED, Admission.CONFLICT):
            self.runner.telemetry.refused(self.runner.rounds, lane, admission)
            return admission
        spooled: SpooledLane | None = None
        if admission is Admission.ACCEPTED:
            try:
                if problem := self.runner.rounds.weight_problem(lane):
                    raise PayloadRefused(Cause.WEIGHT, problem)
                spooled = await self._read(lane, codec_name, call)
            except PayloadRefused as error:
                logger.warning("lane refused, key=%s island=%s: %s", lane.key, lane.island, error)
                self._hooks.meter.refusal(lane.island, error.cause)
                self.runner.refuse(lane.key, lane.island, lane.incarnation, str(error))
                return self.runner.rounds.admit(lane)
            except DiskFull as error:
                self._hooks.disk_full.refuse_lane(lane.key, error)
                self._hooks.spool.found_full()
                self.runner.await_room_for(lane)
                self.runner.give_up(lane)
                # Not `NOT_OPEN`, which would have the caller send all of it again at once.
                raise NotYet(f"no room for {lane.key}, lane {lane.lane_id}: {error}") from error
            except NotYet:
                self.runner.await_room_for(lane)
                self.runner.give_up(lane)
                raise
            except BaseException:
                self.runner.give_up(lane)
                raise
            if self.runner.damage.text:
                spooled.drop()
                return Admission.NOT_OPEN
        return self.runner.count(lane, spooled)

    async def _read(self, lane: LaneArrival, codec_name: str, call: IncomingCall) -> SpooledLane:
        """Receive, verify and spool a lane.

        Raises:
            PayloadRefused: If it cannot be counted; says why.
        """
        check_codec(codec_name, self.runner.rules.publication.uplink_codec)
        spool = self._hooks.spool
        spool.check_room(call.payload_bytes)
        name = lane.key, lane.island, lane.incarnation, lane.lane_id
        return await self._reader.read(
            name,
            codec_name,
            lane.lane_id,
            lane.digest,
            call,
            lambda p: spool.put(p, lane.digest),
            lambda: self.runner.arrived(lane),
        )

    @property
    def due_bytes(self) -> int:
        """What may be sent at once: a contribution of each member while the round is open."""
        if not self.runner.rounds.is_open:
            return 0
        codec = self.runner.rules.publication.uplink_codec
        if codec not in self._coded_bytes:
            self._coded_bytes[codec] = sum(
                lane_codec(codec, self._fragment, lane.lane_id).wire_bytes(lane.numel)
                for lane in self._fragment.lanes
            )
        return len(self.runner.rounds.current.members) * self._coded_bytes[codec]

    # -- initial parameters ------------------------------------------------------------------------

    async def take_initial(self, header: wire.UploadHeader, call: IncomingCall) -> str:
        """Keep a lane of the initial parameters; the last one founds version 0.

        Returns:
            What is wrong with it; empty when it was taken, or version 0 is durable already.

        Raises:
            NotYet: If a later version was found to be lost meanwhile.
        """
        grant, island = header.grant, header.grant.island
        try:
            self._initial.check(header.lane_id)
            name = self._fragment.fragment_id, island, grant.incarnation, header.lane_id
            payload = await self._reader.read(
                name, "float32", header.lane_id, header.digest, call, lambda payload: payload
            )
        except PayloadRefused as error:
            self._hooks.meter.refusal(island, error.cause)
            return f"initial parameters refused: {error}"
        async with self.runner.founding:
            self.check_whole()
            if self.runner.record is not None:
                return ""
            if self.runner.rounds.participants.is_fenced(island, grant.incarnation):
                return f"a newer start of island {island!r} has joined"
            self._initial.take((island, grant.incarnation), header.lane_id, payload)
            if self._initial.is_whole:
                await self.runner.found(self._initial.lanes)
                self.check_whole()
        return ""

    @property
    def is_new(self) -> bool:
        """Whether there is no version 0 yet, nor was there one."""
        return self.runner.record is None and not self.runner.damage.text

    @property
    def initial_bytes(self) -> list[int]:
        """Bytes of each lane of the initial parameters; empty once version 0 is durable."""
        return self._initial.bytes_of_lanes if self.is_new else []

    # -- a version that was lost -------------------------------------------------------------------

    async def take_published(
        self, header: wire.UploadHeader, call: IncomingCall, admission: CallAdmission
    ) -> str:
        """Take a lane of the version that was lost; returns what is wrong with it.

        The last one has it written, whether or not its caller is still there.
        """
        island = header.grant.island
        try:
            self.runner.damage.check(header)
            name = self._fragment.fragment_id, island, header.grant.incarnation, header.lane_id
            payload = await self._reader.read(
                name, "float32", header.lane_id, header.digest, call, lambda payload: payload
            )
            self.runner.damage.take(header, payload, loop_now())
        except PayloadRefused as error:
            if self._serves(header):
                return ""  # it has come before, and the answer was lost
            self._hooks.meter.refusal(island, error.cause)
            self._hooks.on_change(header.fragment_id)  # another may have to be asked
            return f"published parameters refused: {error}"
        if self.runner.damage.recovered is not None:
            self._hooks.spawn(self.runner.finish_repair(admission))
        return ""

    def _serves(self, header: wire.UploadHeader) -> bool:
        """Whether a lane is one of the version that is served now."""
        record, lane_id = self.runner.record, header.lane_id
        if self.runner.damage.text or record is None or lane_id >= len(record.lane_blake3):
            return False
        own = record.version, record.lane_blake3[lane_id]
        return own == (header.version, header.digest)

    # -- what is published -------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """Phase of the current round, in words."""
        if self.runner.damage.text:
            return "damaged"
        if self._fragment.fragment_id in self._hooks.disk_full.waiting:
            return WAITING_FOR_DISK
        return "ended" if self.runner.rounds.is_over else str(self.runner.rounds.phase)

    def state(self, *, wants_initial: bool) -> wire.FragmentState:
        """Return what there is of this fragment, but for its lists."""
        runner = self.runner
        state = wire.FragmentState(
            fragment_id=self._fragment.fragment_id,
            version=runner.rounds.version,
            attempt=runner.rounds.attempt,
            is_open=runner.rounds.is_open,
            wants_initial=wants_initial,
            is_damaged=bool(runner.damage.text),
        )
        if runner.rounds.is_open:
            state.takes_flush = runner.rounds.current.takes_flush
        if (record := self._readable) is not None:
            state.version, state.is_founded = record.version, True
            state.digest = record.digest
            state.payload_codec = record.payload_codec
            state.sent_at_inner_step = record.sent_at_inner_step
            state.is_flush = record.is_flush
            state.merged_tokens = record.merged_tokens
            state.asks_trial = asks_trial(record.guard)
        return state

    @property
    def full_state(self) -> wire.FragmentState:
        """What the coordinator is told of this fragment."""
        state = self.state(wants_initial=False)
        if state.is_open:
            state.members.extend(self.runner.rounds.current.members)
        if (record := self._readable) is not None:
            state.contributors.extend(c.island for c in record.contributors)
        return state

    def complete(
        self, state: wire.FragmentState, island: str, known: wire.FragmentState | None
    ) -> Sequence[str]:
        """Add to a `state` what else a poll of an island is told: of a version that is new to it.

        Args:
            state: From `state`, now.
            island: Whose poll it is.
            known: What it knows of this fragment; None: nothing.

        Returns:
            Contributors of such a version, which are not added.
        """
        state.is_member = state.is_open and island in self.runner.rounds.current.members
        if (record := self._readable) is None:
            return ()
        if state.asks_trial and len(record.contributors) == 1:
            # Of one that it made alone nothing is tried: there is no other to choose from.
            state.asks_trial = record.contributors[0].island != island
        if known is not None and known.is_founded:
            if (known.version, known.digest) == (record.version, record.digest):
                return ()
            if state.is_damaged and known.num_held:
                return ()  # it keeps what it holds
        state.lane_digests.extend(record.lane_digests)
        return [c.island for c in record.contributors]

    @property
    def _readable(self) -> VersionRecord | None:
        """The record of now, if its version can be fetched."""
        record = self.runner.record
        return record if record is not None and self._is_readable(record.version) else None

    async def fetch(self, header: wire.FetchHeader) -> tuple[wire.FetchReply, Buffer]:
        """Return lanes of a published version, and the reply that goes before them."""
        return await fetch_lanes(header, self.runner.record, self._store, self._hooks.workers.reads)

    def fetched(self, header: wire.FetchHeader, num_bytes: int) -> None:
        """Record that lanes were sent, to the last byte: what xi_sync is measured by."""
        self._hooks.meter.sent(header.fragment_id, header.grant.island, num_bytes)
        self.runner.sent(header.version, header.grant.island, header.lane_ids)

    def check_whole(self) -> None:
        """Have anyone who calls call again until the fragment is served.

        Raises:
            NotYet: If it is damaged.
        """
        if self.runner.damage.text:
            raise NotYet(self.runner.damage.text)

    def check_readable(self, version: int) -> None:
        """Have anyone who calls for a version call again until it can be read.

        Raises:
            NotYet: If the fragment is damaged, and this version may be what it has lost.
        """
        if not self._is_readable(version):
            raise NotYet(self.runner.damage.text)

    def _is_readable(self, version: int) -> bool:
        return not self.runner.damage.text or version <= self.runner.damage.readable
