"""Keeps the last reports of a run, for operators, islands and metrics.

Memory only. Of it the run's end is decided alone: by the tokens that syncers say are merged.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from diloco.bounded_text import MOST_NAMES, bounded_text
from diloco.coordinator.journal import Journal
from diloco.coordinator.reported_alarms import MOST_OF_ISLAND, SYNCER, ReportedAlarms
from diloco.errors import Fenced, QuorumLost, RunHalted, RunReturned
from diloco.loop_clock import loop_now
from diloco.protocol.run.absences import away_texts
from diloco.protocol.run.alarms import MOST_ALARMS
from diloco.protocol.run.assignment import Move
from diloco.protocol.run.leases import Lease, Leases
from diloco.protocol.run.membership import Membership
from diloco.protocol.run.terms import Terms
from diloco.protos.control_pb2 import (
    MOVE_STAGE_READY,
    MOVE_STAGE_SERVED,
    MOVE_STAGE_TAKEN,
    MOVE_STAGE_WITHDRAWN,
    Alarm,
    FragmentMove,
    FragmentStatus,
    IslandStatus,
    RefusalCount,
    ReportRequest,
    RunStateReply,
    StatusReply,
    SyncerAssignment,
)
from diloco.refusals import Cause
from diloco.transport.units import format_bytes

#: Seconds after which a syncer, which says something every two, is said to be silent.
SILENT_S = 15.0
#: Seconds between looks for who is away, as long as nobody comes or goes.
_AWAY_LOOK_S = 0.5
#: What an island ends with that was told to.
_TOLD_TO_END = {e.exit_code for e in (Fenced, QuorumLost, RunHalted, RunReturned)}
#: When that was, of which members, and what was found.
_NEVER_LOOKED: tuple[float, tuple[int, bool], list[str]] = (-math.inf, (-1, False), [])


@dataclass(slots=True)
class SyncerWord:
    """Last word of a syncer: where islands reach it, which start it is, what that has refused.

    `has_ended`: it has told all that it had to; `reason`: of an end that no other start helps;
    `moves`: how moves of fragments stand there.
    """

    address: str = ""
    epoch: int = 0
    at: float = -math.inf
    refusals: list[RefusalCount] = field(default_factory=list)
    has_ended: bool = False
    reason: str = ""
    moves: dict[int, FragmentMove] = field(default_factory=dict)


@dataclass(slots=True)
class _Seen:
    """Last word of an island or of a fragment, and when it came (loop time)."""

    at: float
    report: ReportRequest = field(default_factory=ReportRequest)
    fragment: FragmentStatus = field(default_factory=FragmentStatus)


class RunStatus:
    """What was last told of one run.

    Attributes:
        terms: In force.
        is_halting: Whether everybody is told to end, with nothing lost.
        has_halted: Whether everybody has, and the coordinator goes now.
        ends_syncers: Whether syncers are told to end, too.
        is_stop_waiting: Whether a stop was asked for, and waits for a repair.
        watched_at: Loop time at which somebody last looked who goes on looking.
        syncers: Those that have said something, by their numbers.
        alarms: That were reported.
        last_words: Of islands whose newest start has left with some.
    """

    def __init__(
        self,
        membership: Membership,
        journal: Journal,
        leases: Leases,
        terms: Terms,
        alarms: ReportedAlarms,
    ) -> None:
        """Assign only."""
        self._membership = membership
        self._journal = journal
        self._leases = leases
        self.terms = terms
        self.is_halting = self.has_halted = self.ends_syncers = False
        self.is_stop_waiting = False
        self.watched_at = -math.inf
        self.syncers: dict[int, SyncerWord] = {}
        self._began = loop_now()
        self.last_words: dict[str, str] = {}
        self._islands: dict[str, _Seen] = {}
        self._fragments: dict[int, _Seen] = {}
        #: By fragment, the most that was indexed before this start, or reported since.
        self._merged_tokens = {
            p: int(json.loads(header).get("merged_tokens", 0))
            for p in membership.assignment.of_all(membership.plan_json)
            if (header := self.newest(p))
        }
        #: By timeline and fragment, what `indexed` has found: of a thousand islands headers take
        #: long to read, and a syncer asks of all its fragments with every report.
        self._indexed: dict[tuple[int, int], tuple[int, str]] = {}
        self._refusals: Counter[tuple[str, Cause]] = Counter()
        self._away = _NEVER_LOOKED
        self.alarms = alarms

    def failures_beyond(self, reason: str) -> str:
        """Which islands have failed by themselves, and what they said: a run may end by that.

        Those that say the `reason` for which it ends have been told it.
        """
        members, timeline = self._membership.members, self._membership.timeline
        failed = [
            (island, member.exit_code)
            for island, member in sorted(members.items())
            if member.timeline == timeline
            and 0 < (member.exit_code or 0) < 128  # by no signal
            and member.exit_code not in _TOLD_TO_END
        ]
        return "".join(
            f". Island {island} had failed with exit code {code}" + (words and f": {words}")
            for island, code in failed[:MOST_NAMES]
            if not (words := self.last_words.get(island, "")) or words not in reason
        )

    def syncer_is_at(
        self, syncer_id: int, address: str, epoch: int, *, has_ended: bool = False, reason: str = ""
    ) -> None:
        """Record where islands reach a syncer, or that it has ended; not of an earlier start."""
        word = self.syncers.setdefault(syncer_id, SyncerWord())
        if epoch < word.epoch:
            return
        word.address, word.epoch, word.at = address or word.address, epoch, loop_now()
        word.has_ended, word.reason = has_ended, reason

    @property
    def have_syncers_ended(self) -> bool:
        """Whether the last word of each was that it has; one given up for lost says none."""
        return all(
            word.has_ended
            for number, word in self._words
            if not self._is_idle(number) or self.silent_s(number) < SILENT_S
        )

    @property
    def are_syncers_heard(self) -> bool:
        """Whether there are syncers at work that were heard of a moment ago."""
        return any(not self.syncers[number].has_ended for number in self.heard_syncers)

    @property
    def heard_syncers(self) -> set[int]:
        """Syncers that were heard of a moment ago."""
        now = loop_now()
        return {number for number, word in self.syncers.items() if now - word.at < SILENT_S}

    def silent_s(self, syncer_id: int) -> float:
        """Seconds since a syncer's last word, or since this start where there was none."""
        word = self.syncers.get(syncer_id, SyncerWord())
        return loop_now() - max(word.at, self._began)

    def _is_idle(self, syncer_id: int) -> bool:
        """Whether all fragments of a syncer have moved to others."""
        return bool(self._membership.assignment.fragments) and not self._fragments_of(syncer_id)

    def syncer_moves(self, syncer_id: int, moves: Iterable[FragmentMove]) -> None:
        """Record what a syncer says of the moves of which it was told; of no others."""
        assignment = self._membership.assignment
        known = assignment.taken_by(syncer_id) | assignment.withdrawn_by(syncer_id)
        self.syncers.setdefault(syncer_id, SyncerWord()).moves = {
            each.fragment_id: each
            for each in moves
            if (move := known.get(each.fragment_id)) is not None and move.number == each.number
        }

    @property
    def ready_fragments(self) -> set[int]:
        """Fragments of which little is lacking where they move to, by word of a moment ago."""
        heard, ready = self.heard_syncers, (MOVE_STAGE_READY, MOVE_STAGE_TAKEN)
        return {
            p
            for p, move in self._membership.assignment.moves.items()
            if move.target in heard and self._word_of(p, move.target, move).stage in ready
        }

    @property
    def is_a_move_done(self) -> bool:
        """Whether a syncer says that it serves what moves to it, or does not take it any more."""
        done = (MOVE_STAGE_SERVED, MOVE_STAGE_WITHDRAWN)
        return any(
            self._word_of(p, number, move).stage in done
            for p, move in self._membership.assignment.moves.items()
            for number in (move.target, *move.former)
        )

    def _word_of(self, fragment_id: int, syncer_id: int, move: Move) -> FragmentMove:
        """Give the last word of a syncer on a move; nothing is set where there is none."""
        word = self.syncers.get(syncer_id, SyncerWord()).moves.get(fragment_id)
        return word if word is not None and word.number == move.number else FragmentMove()

    @property
    def moves(self) -> list[str]:
        """Say which fragments are moving, how far that is, and what each waits for."""
        return [
            f"fragment {p} moves from {self._name(move.source)} to {self._name(move.target)}: "
            f"{self._move_text(p, move)}; last words: "
            + ", ".join(
                f"{self._name(number)} {self.silent_s(number):.0f} s ago"
                for number in dict.fromkeys((move.source, move.target, *move.former))
            )
            for p, move in sorted(self._membership.assignment.moves.items())
        ]

    def _move_text(self, fragment_id: int, move: Move) -> str:
        word, source = self._word_of(fragment_id, move.target, move), self._name(move.source)
        copied = f"{format_bytes(word.copied_bytes)} of {format_bytes(word.total_bytes)} copied"
        if word.waits:
            copied += f", it waits: {bounded_text(word.waits)}"
        if move.former:
            former = ", ".join(map(self._name, move.former))
            return f"{copied}; {former}, to which it moved before, is to say that it has not got it"
        if word.stage in (MOVE_STAGE_TAKEN, MOVE_STAGE_SERVED):
            return f"taken, {self._name(move.target)} starts again with it"
        if word.stage == MOVE_STAGE_READY:
            return f"{copied}, it waits until {source} has let go of it"
        return copied if word.stage else f"{self._name(move.target)} has said nothing of it yet"

    def syncer_says(
        self,
        syncer_id: int,
        epoch: int,
        refusals: list[RefusalCount],
        alarms: Iterable[Alarm] = (),
    ) -> None:
        """Record a syncer's report: what it has refused since its start, and its alarms."""
        self._alarms_of(f"{SYNCER}{syncer_id}", alarms, MOST_ALARMS)
        word = self.syncers.setdefault(syncer_id, SyncerWord())
        word.epoch, word.at, word.refusals = epoch, loop_now(), refusals

    def _alarms_of(self, reporter: str, alarms: Iterable[Alarm], most: int) -> None:
        members = self._membership.members
        self.alarms.reported(reporter, alarms, islands=members, now=loop_now(), most=most)

    def assignments(self) -> list[SyncerAssignment]:
        """Give all syncers; none while one that has fragments has not said where it is.

        None, too, while the run goes back to a checkpoint: anyone who joins waits for that.
        """
        assignments = [
            SyncerAssignment(address=word.address, fragment_ids=self._fragments_of(number))
            for number, word in self._words
        ]
        if self._membership.is_returning:
            return []
        is_missing = any(not w.address and not self._is_idle(n) for n, w in self._words)
        return [] if is_missing else assignments

    def island_says(self, island: str, report: ReportRequest) -> None:
        """Record a report."""
        self._islands[island] = _Seen(loop_now(), report=report)
        if any(text.startswith(f"island {island} ") for text in self._away[2]):
            self._away = _NEVER_LOOKED
        self._alarms_of(island, report.alarms, MOST_OF_ISLAND)
        report.ClearField("alarms")  # the status shows them for itself

    def fragment_stands(self, status: FragmentStatus) -> None:
        """Record how a fragment stands."""
        p, merged = status.fragment_id, status.merged_tokens
        self._fragments[p] = _Seen(loop_now(), fragment=status)
        self._merged_tokens[p] = max(merged, self._merged_tokens.get(p, 0))

    def refused(self, island: str, cause: Cause) -> None:
        """Count a refusal; `island` is empty where nobody has proved whose call it was."""
        self._refusals[island, cause] += 1

    @property
    def merged_tokens(self) -> int:
        """Tokens that all fragments have merged; 0 until all of them have been heard of."""
        fragments = self._membership.assignment.of_all(self._membership.plan_json)
        return min((self._merged_tokens.get(p, 0) for p in fragments), default=0)

    def indexed(self, fragment_id: int) -> tuple[int, str]:
        """Count the versions of a fragment that are indexed in this timeline, from 0 on.

        Returns:
            So many, and the digest of the newest; empty: there is none.
        """
        key = self._membership.timeline, fragment_id
        if key not in self._indexed:
            header = json.loads(self.newest(fragment_id) or "{}")
            found = 1 + int(header.get("version", -1)), str(header.get("digest", ""))
            self._indexed[key] = found
        return self._indexed[key]

    def has_indexed(self, fragment_id: int) -> None:
        """Record that a version of a fragment was indexed."""
        self._indexed.pop((self._membership.timeline, fragment_id), None)

    def newest(self, fragment_id: int) -> str:
        """Return the header of the newest version that is indexed in this timeline; empty: none."""
        headers = self._journal.newest_rounds(self._membership.timeline, fragment_id, 1)
        return headers[0] if headers else ""

    @property
    def has_published(self) -> bool:
        """Whether a version of this timeline is indexed."""
        return self._journal.has_rounds(self._membership.timeline)

    @property
    def damage(self) -> str:
        """Which fragments are not served, and what to type; empty: none."""
        damage = "; ".join(s.fragment.damage for s in self._fragments.values() if s.fragment.damage)
        waits = "a stop was asked for, and waits for the repair: " if self.is_stop_waiting else ""
        return damage and waits + damage

    @property
    def cut_text(self) -> str:
        """Say who a cut waits for; empty: for nobody."""
        membership = self._membership
        cut, awaited = membership.cuts.newest(membership.timeline), membership.awaited_in_cut
        if cut is None or not awaited:
            return ""
        what = "the stop with a checkpoint" if cut.is_last else "a run checkpoint"
        writing = {i for i, s in self._islands.items() if s.report.cut.is_being_written}
        names = (f"{i} (writes its part)" if i in writing else i for i in awaited)
        return f"{what} waits for {', '.join(names)}"

    @property
    def away(self) -> list[str]:
        """Say which islands are away, and what comes of it; nothing once the run is over.

        Looked for once in `_AWAY_LOOK_S`, and when an island comes or goes: every report of every
        island is answered with it.
        """
        membership, now = self._membership, loop_now()
        if self.is_halting or membership.fatal_reason:
            return []
        looked_at, members, texts = self._away
        present = membership.members.num_changes, membership.is_stopping
        if members != present or now - looked_at >= _AWAY_LOOK_S:
            texts = []
            if self.state not in ("finished", "stopped"):
                texts = away_texts(
                    membership,
                    lambda island: self._leases.silent_s(island, now),
                    self.terms.lease_s,
                )
            self._away = now, present, texts
        return texts

    @property
    def silent_syncers(self) -> list[str]:
        """Say which syncers have said nothing for a while; of one that hangs, nothing else does."""
        if (state := self.state) in ("failed", "finished", "stopped"):
            return []
        unheard = math.inf if state == "waiting for islands" else self._began
        return [
            f"{self._name(number)} ({word.address or 'address not known'}) "
            + (
                f"has ended{word.reason and f' ({word.reason})'}"
                if word.has_ended
                else "is not heard of: its process hangs or still "
                "reads its store, or the way to it is gone"
            )
            + ". Rounds of its fragments wait for it; its log says what it did last"
            for number, word in self._words
            if not self._is_idle(number)
            if word.has_ended
            or loop_now() - (word.at if word.at > -math.inf else unheard) > SILENT_S
        ]

    @property
    def inner_steps(self) -> int:
        """Where inner steps end the run; 0: tokens do."""
        if self.terms.total_tokens:
            return 0
        return int(json.loads(self.terms.policy_json)["run.inner_steps"])

    @property
    def state(self) -> str:
        """The run's state, in words."""
        membership = self._membership
        if membership.fatal_reason:
            return "failed"
        if membership.is_finished:
            return "finished"
        if membership.is_stopped or self.has_halted:
            return "stopped"
        if membership.is_stopping or self.is_halting:
            return "stopping"
        if not membership.have_all_joined:
            return "waiting for islands"
        return "paused" if membership.members.is_paused else "running"

    def status(self) -> StatusReply:
        """Everything an operator sees: islands, fragments, the syncer, the run's state."""
        membership, now, words = self._membership, loop_now(), self._words
        reply = StatusReply(
            run=membership.run,
            timeline=membership.timeline,
            syncer_address=", ".join(w.address for _, w in words if w.address),
            syncer_epoch=max((word.epoch for _, word in words), default=0),
            state=self.state,
            message=membership.fatal_reason or self.damage or self.cut_text,
            inner_steps=self.inner_steps,
            checkpoint_steps=membership.checkpoints,
            start_step=membership.start_step,
            has_published=self.has_published,
            generation=membership.members.generation,
            is_paused=membership.members.is_paused,
            total_tokens=self.terms.total_tokens,
            exit_code=membership.fatal_exit_code,
            away=[*self.away, *self.silent_syncers],
            moves=self.moves,
        )
        for island in membership.members:  # in place: a thousand would be copied twice
            self._describe(island, reply.islands.add())
        for _, seen in sorted(self._fragments.items()):
            fragment = FragmentStatus()
            fragment.CopyFrom(seen.fragment)
            fragment.age_s += now - seen.at
            fragment.left_s = max(0.0, fragment.left_s - (now - seen.at))
            reply.fragments.append(fragment)
        for (island, cause), count in sorted(self._refusals.items()):
            reply.refusals.add(service="coordinator", island=island, cause=cause, count=count)
        refused = Counter[tuple[str, str]]()
        for syncer_id, word in words:
            reply.syncers.add(
                syncer_id=syncer_id,
                name=self._name(syncer_id),
                address=word.address,
                syncer_epoch=word.epoch,
                fragment_ids=self._fragments_of(syncer_id),
                age_s=now - word.at,
            )
            for each in word.refusals:
                refused[each.island, each.cause] += each.count
        for (island, said), count in sorted(refused.items()):
            reply.refusals.add(service="syncer", island=island, cause=said, count=count)
        reply.alarms.extend(self.alarms.status(now))
        return reply

    @property
    def _words(self) -> list[tuple[int, SyncerWord]]:
        """Of all syncers there are: one that is lost was perhaps never heard of."""
        number = self._membership.assignment.num_syncers
        return [(n, self.syncers.get(n, SyncerWord())) for n in range(number)]

    def _name(self, syncer_id: int) -> str:
        return list(self._membership.assignment.shares)[syncer_id]

    def _fragments_of(self, syncer_id: int) -> list[int]:
        return self._membership.assignment.of(syncer_id, self._membership.plan_json)

    def for_islands(self) -> RunStateReply:
        """What any island may know of the run; nothing of the islands."""
        membership = self._membership
        return RunStateReply(
            run=membership.run,
            timeline=membership.timeline,
            state=self.state,
            start_step=membership.start_step,
            has_published=self.has_published,
            inner_steps=self.inner_steps,
            syncer_addresses=[word.address for _, word in self._words],
            fragment_syncers=membership.assignment.owners,
        )

    def island_status(self, island: str) -> IslandStatus:
        """How one island stands, without its grant."""
        self._describe(island, status := IslandStatus())
        return status

    def _describe(self, island: str, status: IslandStatus) -> None:
        membership, seen = self._membership, self._islands.get(island)
        member, now = membership.members[island], loop_now()
        lease = membership.members.lease_of(island)
        status.island, status.incarnation = island, member.incarnation
        status.island_slot, status.lease = member.slot, lease
        if lease in (Lease.ACTIVE, Lease.DRAINING):
            status.lease_left_s = self._leases.left_s(island, now)
        if seen is not None:
            status.last_report.CopyFrom(seen.report)
            status.last_report.ClearField("grant")
            # Of all islands and all fragments no message holds them.
            status.last_report.ClearField("position_json")
            if status.last_report.HasField("cut"):
                status.last_report.cut.ClearField("versions")
                status.last_report.cut.ClearField("text_json")
            status.report_age_s = now - seen.at
