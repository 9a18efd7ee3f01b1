"""Accepts joins, and decides when a run stops and which run checkpoints are complete: pure.

It accepts or refuses joins, grants incarnations, fixes plan, text and first inner step with the
first join, finds the inner step after which all can stop, and which run checkpoints are complete.
Whatever it must never forget comes back as `entries`: key-value pairs that the caller writes
durably, then applies, then answers; a write that fails has changed nothing.

    plan, corpus, tokenizer, start    what the first join fixed
    position/NAME     {timeline, inner_step}: how far it has come
    stop, checkpoint, timeline, fatal
    merged                            [timeline, tokens]: every fragment has merged so many

Its parts have entries of their own: `members`, `assignment`, `candidates`, `claims`, `cuts`,
`repairs`, `settings`.

A stop: `request_stop`; every island promises an inner step that it will not pass unasked; when all
have, the largest promise is the `stop_step` to which everybody goes on and checkpoints. Nobody
leaves before that checkpoint is complete: an island that starts again before promises again, and
when it can stop only later, so do all. Where islands come and go they stand at different inner
steps: each leaves after its part of a last cut (`cuts`), and the cut's number stands in place of an
inner step wherever a checkpoint is named.

Source: PROTOCOL.md, "Membership", "Version 0", "Graceful stop" and "Run checkpoints and pins".
"""

from __future__ import annotations

import copy
import heapq
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import InitVar, dataclass, field, replace
from typing import Protocol, TypeAlias

from diloco.config.fields import ISLAND_NAME
from diloco.errors import AggregationError
from diloco.protocol.run.admission import (
    Entries,
    Joined,
    JoinVerdict,
    Shared,
    num_fragments_of,
    objection,
    plan_refusal,
)
from diloco.protocol.run.assignment import FragmentAssignment
from diloco.protocol.run.candidates import Candidates, JudgeRules, newest_first
from diloco.protocol.run.claims import Claims
from diloco.protocol.run.cuts import Cuts
from diloco.protocol.run.leases import Lease, LeaseEvent
from diloco.protocol.run.members import Member, Members, MembershipRules
from diloco.protocol.run.peer_bounds import MOST_BATCH_RATIO
from diloco.protocol.run.repairs import Repairs
from diloco.protocol.run.settings import Settings
from diloco.refusals import Cause

#: Kinds of entries from which nothing follows.
_WITHOUT_CONSEQUENCES = {"slot", "part", "position"}
#: Positions of islands that are noted at once.
_MOST_NOTED = 64


@dataclass(slots=True)
class Membership:
    """Islands of one run.

    Args:
        run: Name of the run.
        islands: Configured island ids, sorted; the index is the island slot.
        identity_json: Identity class of the coordinator's configuration.
        identity_difference: Names the dotted keys in which two identity documents differ.
        inner_steps: Last inner step of the run.
        num_checkpoints: Complete run checkpoints that are remembered, the newest; at least 1.
        claims: Who draws from which slots of the text; None: each island from its own.
        assignment: Which syncer has which fragments.

    Attributes:
        is_text_known: Whether a join has fixed text and first inner step; one has that fixed the
            plan, unless the journal was lost since.
        members: The islands, by name.
        resume_step: Inner step of the checkpoint that this timeline began from.
        checkpoints: Inner steps of the complete run checkpoints, ascending.
        promises: Island -> inner step that it will not pass unasked; None while nobody asked for a
            stop.
        merged_tokens: Gives the tokens that all fragments are known to have merged.
    """

    run: str
    islands: InitVar[tuple[str, ...]]
    identity_json: str
    identity_difference: Callable[[str, str], list[str]]
    inner_steps: int
    num_checkpoints: int
    claims: Claims | None = None
    cuts: Cuts = field(default_factory=Cuts)
    candidates: Candidates = field(default_factory=Candidates)
    assignment: FragmentAssignment = field(default_factory=FragmentAssignment)
    repairs: Repairs = field(default_factory=Repairs)
    settings: Settings = field(default_factory=Settings)
    plan_json: str = ""
    corpus_sha256: str = ""
    tokenizer_digest: str = ""
    start_step: int = 0
    is_text_known: bool = False
    resume_step: int = 0
    checkpoints: tuple[int, ...] = ()
    promises: Mapping[str, int] | None = None
    merged_tokens: Callable[[], int] = lambda: 0
    members: Members = field(init=False)
    fatal_reason: str = ""
    fatal_exit_code: int = 0
    _merged: tuple[int, int] = (-1, 0)
    _kept: dict[str, set[int]] = field(default_factory=dict)
    _positions: dict[str, Mapping[str, int]] = field(default_factory=dict)

    def __post_init__(self, islands: tuple[str, ...]) -> None:
        """Give every configured island its slot."""
        self.members = Members(islands)

    @property
    def timeline(self) -> int:
        """Counter of resumes."""
        return self.members.timeline

    @property
    def rules(self) -> MembershipRules:
        """Who may take part."""
        return self.members.rules

    def apply(self, entries: Iterable[tuple[str, str]]) -> None:
        """Take over what is durable: after a write, and after a restart all of it."""
        entries = list(entries)
        if self.claims is not None:
            self.claims.apply(entries)
        self.cuts.apply(entries)
        self.candidates.apply(entries)
        self.assignment.apply(dict(entries))
        self.repairs.apply(entries)
        self.settings.apply(entries)
        names = {key.removeprefix("island/") for key, _ in entries}
        before = {i: self.members[i].incarnation for i in names & self._kept.keys()}
        self.members.apply(entries)
        for island, incarnation in before.items():
            if self.members[island].incarnation > incarnation:
                self._kept.pop(island, None)  # a new start may write some of them again
        for key, value in entries:
            kind, _, name = key.partition("/")
            match kind:
                case "plan":
                    self.plan_json = value
                case "corpus":
                    self.corpus_sha256, self.is_text_known = value, True
                case "tokenizer":
                    self.tokenizer_digest = value
                case "start":
                    self.start_step = int(value)
                case "timeline":
                    self.resume_step = json.loads(value)["resume_step"]
                case "checkpoint":
                    self.checkpoints = tuple(json.loads(value))
                case "stop":
                    self.promises = json.loads(value)
                case "fatal":
                    self.fatal_reason, self.fatal_exit_code = json.loads(value)
                case "merged":
                    timeline, tokens = json.loads(value)
                    self._merged = int(timeline), int(tokens)
                case "position":
                    self._positions[name] = json.loads(value)

    def forked(self) -> Membership:
        """Return a copy to decide further on; what is not durable it shares with this."""
        other = copy.copy(self)
        other._positions = dict(self._positions)
        other.members, other.settings = self.members.forked(), self.settings.forked()
        other.cuts, other.repairs = self.cuts.forked(), self.repairs.forked()
        other.claims, other.candidates = copy.copy(self.claims), copy.copy(self.candidates)
        other.assignment = copy.copy(self.assignment)
        return other

    def follow_ups(self, entries: Entries | None = None) -> Entries:
        """Give the text to those who are there, go on with a cut without the others, tidy up.

        Args:
            entries: What was applied just now; None: anything may follow from how the run stands.
        """
        kinds = None if entries is None else {key.partition("/")[0] for key, _ in entries}
        if self.claims is None or (kinds is not None and kinds <= _WITHOUT_CONSEQUENCES):
            return ()
        holders = frozenset(self.members.holders)
        absent = {i for i in self.members.configured if self.members.lease_of(i) is Lease.ABSENT}
        return (
            *self.claims.shared_out(holders, absent),
            *self.cuts.without(self.timeline, holders),
            *self.cuts.forgotten({*self.checkpoints, self.resume_step}),
        )

    # -- joins and departures ----------------------------------------------------------------------

    def join(
        self,
        *,
        run: str,
        island: str,
        identity_json: str,
        plan_json: str,
        corpus_sha256: str,
        tokenizer_digest: str,
        start_step: int,
        start_id: str,
        tokens_per_inner_step: int = 0,
    ) -> Joined:
        """Accept or refuse one start of an island; the first one fixes what all must share.

        A repeated join of one start gets the same incarnation, even when a later start has fenced
        it; another start of the island gets the next one, which fences the earlier. After a stop
        whose checkpoint is complete there is nothing to start for: the island has left.
        """
        there = Shared(identity_json, plan_json, corpus_sha256, tokenizer_digest, start_step)
        if (refusal := self._objection(run, island, there)) is not None:
            return refusal
        if (refusal := self._batch_objection(island, tokens_per_inner_step)) is not None:
            return refusal
        guests = self.members.guests if island in self.members else (*self.members.guests, island)
        member = self.members.get(island) or Member(len(self.members))
        incarnation = member.incarnations.get(start_id, member.incarnation + 1)
        is_newest = incarnation >= member.incarnation
        if start_id in member.incarnations and (self._has_joined(member) or not is_newest):
            return Joined(JoinVerdict.ACCEPTED, incarnation=incarnation)
        if (refusal := self._stopped(island)) is not None:
            return refusal
        return Joined(
            JoinVerdict.ACCEPTED,
            incarnation=incarnation,
            entries=(
                *self._fixed_by(there),
                *(() if guests == self.members.guests else (("guests", json.dumps(guests)),)),
                *self.members.changed(island, member.started(start_id, incarnation, self.timeline)),
                *self._reopened(island),
                *(self.cuts.taken_back(self.timeline) if self._is_stop_void else ()),
            ),
        )

    def _stopped(self, island: str) -> Joined | None:
        """Refuse a start after a stop whose checkpoint the island has; it has left then."""
        last = self.cuts.last(self.timeline)
        if not (self.is_stop_complete or (last is not None and island not in last.owing)):
            return None
        return Joined(
            JoinVerdict.RUN_STOPPED,
            f"the run is stopped {self.stop_name}"
            f"{', and this island has its checkpoint' if last is None else ''}: once the "
            f"coordinator has ended, diloco coordinator RUN.toml --resume",
            entries=self.left(island, 0, is_stopped=True) if island in self.members else (),
            cause=Cause.STOPPED,
        )

    def _fixed_by(self, first: Shared) -> Entries:
        """Take from the first join what all must share from then on; none after it."""
        plan = (("plan", first.plan_json), *self.assignment.decided(first.plan_json))
        return (
            *(() if self.plan_json else plan),
            *(() if self.is_text_known else _text_fixed_by(first)),
        )

    def _objection(self, run: str, island: str, there: Shared) -> Joined | None:
        """Refuse who may not join at all, and who does not share what all must."""
        if run != self.run:
            message = f"run: {self.run!r} here, {run!r} there: you asked for another run"
            return Joined(JoinVerdict.WRONG_RUN, message, cause=Cause.RUN)
        member = self.members.get(island)
        if member is None and not self.rules.is_open:
            return Joined(
                JoinVerdict.UNKNOWN_ISLAND,
                f"island {island!r} is not in the coordinator's configuration, which has "
                f"{', '.join(self.members)}",
                cause=Cause.ISLAND,
            )
        if member is None and not re.fullmatch(ISLAND_NAME, island):
            return Joined(
                JoinVerdict.UNKNOWN_ISLAND,
                f"island: {island!r} there is no name of an island, which has 1 to 100 of a-z, 0-9 "
                f"and -: diloco island RUN.toml --island NAME",
                cause=Cause.ISLAND,
            )
        here = Shared(
            self.identity_json,
            self.plan_json,
            self.corpus_sha256 if self.is_text_known else there.corpus_sha256,
            self.tokenizer_digest,
            self.start_step if self.is_text_known else there.start_step,
        )
        if not self.rules.are_names_shared:
            here, there = here.without_names(), there.without_names()
        if (refusal := objection(here, there, island, self.identity_difference)) is not None:
            return refusal
        if member is None and len(self.members) >= self.rules.max_islands:
            return Joined(
                JoinVerdict.RUN_FULL,
                f"run.max_islands: {self.rules.max_islands} here, island {island!r} there would be "
                f"number {len(self.members) + 1}: the places belong to {', '.join(self.members)}; "
                f"start one of these, in place of one that has left",
                cause=Cause.FULL,
            )
        if member is not None and member.lease_in(self.timeline) is Lease.KICKED:
            return Joined(JoinVerdict.KICKED, self.members.kicked_text(island), cause=Cause.KICKED)
        return None

    def plan_refusal(self, plan_json: str) -> str:
        """Say what is wrong with an island's plan; empty: nothing. See `admission.plan_refusal`."""
        return plan_refusal(num_fragments_of(self.identity_json), self.plan_json, plan_json)

    def _batch_objection(self, island: str, tokens_per_inner_step: int) -> Joined | None:
        """Refuse a batch by which an island would count far more than any of the run's."""
        most = self.rules.most_step_tokens
        if not most or tokens_per_inner_step <= most:
            return None
        return Joined(
            JoinVerdict.BATCH_TOO_LARGE,
            f"islands.{island}.tokens_per_inner_step: {tokens_per_inner_step} there; at most "
            f"{most} here, {MOST_BATCH_RATIO} times the largest of the coordinator's file, which "
            f"bounds what a contribution can weigh: set it there, too",
            cause=Cause.WEIGHT,
        )

    def is_current(self, island: str, incarnation: int, timeline: int) -> bool:
        """Whether this is the newest start of an island, in this timeline, and not taken out."""
        member = self.members.get(island)
        return (
            member is not None
            and member.incarnation == incarnation >= member.fenced_below
            and timeline == member.timeline == self.timeline
        )

    def cause_against(self, island: str, incarnation: int, timeline: int) -> Cause:
        """Say what is wrong with a grant that was refused; it need not be signed."""
        member = self.members.get(island)
        if member is None:
            return Cause.GRANT
        if timeline != self.timeline:
            return Cause.TIMELINE
        if self.members.lease_of(island) is Lease.KICKED:
            return Cause.KICKED
        is_old = incarnation < max(member.incarnation, member.fenced_below)
        return Cause.INCARNATION if is_old else Cause.GRANT

    def left_early(self, island: str, inner_step: int) -> Entries:
        """Note that the current start of an island has left before the end of the run.

        Where islands come and go it has left for good. Else rounds go on without it, unless all
        others have come to their end, too.
        """
        member = replace(self.members[island], exit_code=0)
        if self.rules.is_elastic:
            drained = member.after(LeaseEvent.DRAINED, self.timeline)
            return self.members.changed(island, drained.after(LeaseEvent.LEFT, self.timeline))
        others = [m for name, m in self.members.counted.items() if name != island]
        if all(m.exit_code == 0 for m in others):
            return self.left(island, 0, is_stopped=False)
        reason = (
            f"its loop called outer.finish() after inner step {inner_step} of {self.inner_steps}"
        )
        return self.members.changed(island, member.kicked(reason, self.timeline))

    def left(self, island: str, exit_code: int, *, is_stopped: bool) -> Entries:
        """Note how the current start of an island ended.

        One that stopped did so after the checkpoint of the stop step was complete. One that failed
        is lost at once where nobody waits for it; else it has to the end of its lease to return.
        """
        member = replace(self.members[island], exit_code=exit_code, is_stopped=is_stopped)
        if exit_code == 0:
            member = member.after(LeaseEvent.LEFT, self.timeline)
        elif self.rules.is_elastic:
            member = member.after(LeaseEvent.FAILED, self.timeline)
        return self.members.changed(island, member)

    def reported(self, island: str) -> Entries:
        """Bring back an island whose newest start has reported; none if it was not away.

        One that comes back to a stop that goes on without it has nothing to stay for: it leaves.
        """
        member = self.members[island].after(LeaseEvent.REPORTED, self.timeline)
        last = self.cuts.last(self.timeline)
        if last is not None and island not in {*last.owing, *last.parts}:
            member = member.after(LeaseEvent.DRAINED, self.timeline)
        return self.members.changed(island, member)

    def failed(self, reason: str, exit_code: int) -> Entries:
        """Note that the run must stop; none if it must already: the first reason stays."""
        return () if self.fatal_reason else (("fatal", json.dumps([reason, exit_code])),)

    # -- how the run stands ------------------------------------------------------------------------

    @property
    def have_all_joined(self) -> bool:
        """Whether the islands are there that rounds need."""
        if self.rules.is_elastic:
            return len(self.members.live) >= self.rules.min_islands
        return all(map(self._has_joined, self.members.counted.values()))

    @property
    def has_been_joined(self) -> bool:
        """Whether any island has joined this timeline."""
        return any(map(self._has_joined, self.members.values()))

    def all_merged(self) -> Entries:
        """Note, once it is so, that every fragment has merged the tokens that end the run."""
        is_known = not self.rules.is_elastic or self._are_merged
        if is_known or self.merged_tokens() < self.rules.total_tokens:
            return ()
        return (("merged", json.dumps([self.timeline, self.rules.total_tokens])),)

    @property
    def _are_merged(self) -> bool:
        timeline, tokens = self._merged
        return timeline == self.timeline and tokens >= self.rules.total_tokens

    @property
    def is_finished(self) -> bool:
        """Whether every island has left without an error, at the end of the run.

        Where islands come and go: whether one has come to the end, none is at work, and every
        fragment is noted (`all_merged`) to have merged the run's tokens: one that says so before
        has not.
        """
        if self.rules.is_elastic:
            members = filter(self._has_joined, self.members.values())
            has_end = any(m.has_finished for m in members)
            if not has_end or self.members.holders or self.is_stopping:
                return False
            return self._are_merged
        return self._have_left_well and not any(m.is_stopped for m in self.members.counted.values())

    @property
    def is_stopped(self) -> bool:
        """Whether every island has left without an error, in a graceful stop."""
        if self.rules.is_elastic:
            return self.is_stop_complete and not self.members.holders
        return self._have_left_well and any(m.is_stopped for m in self.members.counted.values())

    @property
    def is_stopped_in_vain(self) -> bool:
        """Whether everybody has left in a stop of which no island has a part of its last cut."""
        return self._is_stop_void and not (self.members.holders or self.is_finished)

    @property
    def _is_stop_void(self) -> bool:
        cut = self.cuts.newest(self.timeline)
        return cut is not None and cut.is_last and cut.is_void

    @property
    def is_deserted(self) -> bool:
        """Whether no island is left that joined."""
        return all(
            member.exit_code is not None
            for member in self.members.counted.values()
            if self._has_joined(member)
        )

    def _has_joined(self, member: Member) -> bool:
        return member.incarnation > 0 and member.timeline == self.timeline

    @property
    def _have_left_well(self) -> bool:
        counted = self.members.counted.values()
        return bool(counted) and all(self._has_joined(m) and m.exit_code == 0 for m in counted)

    def positions(self, inner_steps: Mapping[str, int]) -> Entries:
        """Note how far islands have come; none where that is known.

        Of many, those that have come furthest since it was noted: a record of a round notes a few,
        and in turn they are all noted.
        """
        gone = {i: n - self.last_inner_step(i) for i, n in inner_steps.items()}
        furthest = heapq.nlargest(
            _MOST_NOTED, (i for i in sorted(gone) if gone[i]), gone.__getitem__
        )
        return tuple(
            (f"position/{i}", json.dumps({"timeline": self.timeline, "inner_step": inner_steps[i]}))
            for i in sorted(furthest)
        )

    def last_inner_step(self, island: str) -> int:
        """Inner step that an island was last noted to have made in this timeline; 0: none."""
        position = self._positions.get(island, {"timeline": -1})
        return position["inner_step"] if position["timeline"] == self.timeline else 0

    # -- stop --------------------------------------------------------------------------------------

    def request_stop(self) -> Entries:
        """Ask every island for a promise, or its part of a last cut.

        None if that was asked, if there is nobody to ask, or while a fragment is damaged.
        """
        if self.is_stopping or self.repairs.damaged:
            return ()
        if self.rules.is_elastic:
            has_published = any(p["timeline"] == self.timeline for p in self._positions.values())
            is_at_work = self.members.live and (self.have_all_joined or has_published)
            return self.cut(is_last=True) if is_at_work else ()
        if not self.have_all_joined or self.is_deserted:
            return ()
        return (("stop", "{}"),)

    def promise(self, island: str, hold_step: int) -> Entries:
        """Record it, once a start, that an island will not pass an inner step unasked.

        The last promise names the stop step. No start has passed it, or has written its checkpoint:
        what is complete from there on is of earlier starts, whose last steps were lost. It does not
        count, or the stop would be complete before it began, or go on from another step.
        """
        if self.promises is None or island in self.promises:
            return ()
        promises = {**self.promises, island: hold_step}
        stop_step = self._named_by(promises)
        kept = [c for c in self.checkpoints if stop_step is None or c < stop_step]
        return (("stop", json.dumps(promises)), ("checkpoint", json.dumps(kept)))

    def _reopened(self, island: str) -> Entries:
        """Let a new start of an island promise again, for it may stand beyond the stop step.

        The others may have passed their promises since they were told the stop step: that is what
        they have promised now.
        """
        if self.promises is None:
            return ()
        least = self.stop_step or 0
        others = {o: max(step, least) for o, step in self.promises.items() if o != island}
        return (("stop", json.dumps(others)),)

    def stop_lacks(self, silent: Collection[str]) -> Mapping[str, str]:
        """Say which of the silent islands a stop waits for, and in words for what of each."""
        if self.promises is None:
            return {}
        at_work = [
            n for n in silent if n in self.members.counted and self.members[n].exit_code != 0
        ]
        if self.stop_step is not None:
            return dict.fromkeys(at_work, f"the checkpoint of inner step {self.stop_step}")
        missing = [name for name in at_work if name not in self.promises]
        return dict.fromkeys(missing, "word of the inner step after which it can stop")

    def stop_without(self, islands: Iterable[str]) -> Entries:
        """End a stop without islands that it waits for in vain.

        With a complete checkpoint they have stopped, only their word is missing; without, the stop
        is taken back.
        """
        if not self.is_stop_complete:
            return (("stop", "null"),)
        return tuple(entry for i in islands for entry in self.left(i, 0, is_stopped=True))

    def stop_taken_back(self) -> Entries:
        """Let a run go on that was asked to stop, and has no checkpoint to begin a timeline from.

        But not where every island has written its part of the last cut: the syncers' is to come.
        """
        promised = () if self.promises is None else (("stop", "null"),)
        cut = self.cuts.last(self.timeline)
        is_taken = cut is not None and cut.is_taken
        return promised if is_taken else (*promised, *self.cuts.taken_back(self.timeline))

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was asked for."""
        return self.promises is not None or self.cuts.last(self.timeline) is not None

    @property
    def stop_step(self) -> int | None:
        """Inner step after which all stop; None until all that are at work have promised.

        Where islands come and go, the last cut's number.
        """
        if (last := self.cuts.last(self.timeline)) is not None:
            return last.number
        return None if self.promises is None else self._named_by(self.promises)

    def _named_by(self, promises: Mapping[str, int]) -> int | None:
        """Return the stop step; who has finished has promised the last inner step."""
        counted = self.members.counted
        finished = {name: self.inner_steps for name, m in counted.items() if m.exit_code == 0}
        promises = {**finished, **promises}
        return max(promises.values()) if promises and promises.keys() >= counted.keys() else None

    @property
    def stop_name(self) -> str:
        """Say where the run stops, for people."""
        step = self.stop_step
        return f"with cut {step}" if self.rules.is_elastic else f"after inner step {step}"

    @property
    def is_stop_complete(self) -> bool:
        """Whether every island has the checkpoint of the stop step, so that all may leave."""
        return self.stop_step is not None and self.stop_step in self.checkpoints

    # -- checkpoints -------------------------------------------------------------------------------

    def keeps(self, island: str, steps: Iterable[int], *, inner_step: int) -> Entries:
        """Record the checkpoints that an island keeps; entries when one became complete.

        A start names what it wrote, and of earlier starts what is not later than where it began.
        What is later than both its inner step and the resumed one was written in an abandoned
        timeline, and does not count.
        """
        if self.rules.is_elastic:
            return ()  # those are cuts
        reached = max(inner_step, self.resume_step)
        self._kept[island] = {step for step in steps if step <= reached}
        # Complete once is complete for good: an island that has not reported yet keeps its own.
        # What was let go of is not taken back: the syncers' part may be gone.
        last = max(self.checkpoints, default=-1)
        new = {step for step in self._kept[island] if step > last}
        if new:  # mostly there is nothing: a thousand islands say what they keep once a second
            new.intersection_update(*(self._kept.get(i, ()) for i in self.members.counted))
        newest = self.candidates.kept({*new, *self.checkpoints}, self.num_checkpoints)
        return () if newest == self.checkpoints else (("checkpoint", json.dumps(newest)),)

    def is_cut_due(self, every_tokens: int) -> bool:
        """Whether the next run checkpoint belongs here, one in so many merged tokens."""
        return self.cuts.is_due(self.timeline, self.resume_step, self.merged_tokens(), every_tokens)

    def cut(self, *, is_last: bool = False) -> Entries:
        """Ask the islands at work for their parts of a checkpoint."""
        return self.cuts.named(
            self.members.live,
            timeline=self.timeline,
            begun_at=self.resume_step,
            tokens=self.merged_tokens(),
            told={} if self.claims is None else self.claims.positions,
            is_last=is_last,
        )

    @property
    def awaited_in_cut(self) -> tuple[str, ...]:
        """Islands that a cut waits for: for their parts, after a last one until they have left."""
        cut = self.cuts.newest(self.timeline)
        if cut is None:
            return ()
        return self.members.holders if cut.is_last else cut.owing

    def cut_kept(self, number: int) -> Entries:
        """Record that the syncers keep a cut's versions: it is a complete checkpoint."""
        newest = self.candidates.kept({*self.checkpoints, number}, self.num_checkpoints)
        completed = self.cuts.completed(number, self.merged_tokens())
        return (*completed, ("checkpoint", json.dumps(newest)))

    @property
    def to_resume(self) -> int:
        """The complete checkpoint to resume, if it is whole: the newest that is not bad."""
        return newest_first(self.checkpoints, self.candidates)[0]

    def has_returned_from(self, island: str, timeline: int) -> bool:
        """Whether the run has returned by itself from the timeline of an island's start."""
        is_old = timeline < self.timeline and self.members.lease_of(island) is not Lease.KICKED
        return is_old and self.candidates.is_followed(timeline)

    def voted(self, island: str, number: int, loss: float, rules: JudgeRules) -> Entries:
        """Take an island's held-out loss of a run checkpoint; entries if that judges it.

        What is no checkpoint, and will be none, is passed over.
        """
        if not self._can_be_checkpoint(number, rules.every_inner_steps):
            return ()
        return self.candidates.voted(
            island,
            number,
            loss,
            voters=self._voters,
            complete=self.checkpoints,
            rules=rules,
        )

    def _can_be_checkpoint(self, number: int, every_inner_steps: int) -> bool:
        """Whether a number is that of a cut that was asked for, or of a step that makes one."""
        if self.rules.is_elastic:
            return self.cuts.find(number) is not None
        is_within = 0 < number <= self.inner_steps
        return every_inner_steps > 0 and is_within and number % every_inner_steps == 0

    def _voters(self, number: int) -> Collection[str]:
        """Islands that have, or are to have, a part of a checkpoint; none: not known yet."""
        if not self.rules.is_elastic:
            return self.members.counted.keys()
        cut = self.cuts.find(number)
        return () if cut is None or cut.owing else cut.parts.keys()

    @property
    def is_returning(self) -> bool:
        """Whether the run is to go back to a good checkpoint by itself, now."""
        is_decided = self.candidates.pending is not None
        return is_decided and not (self.is_stopping or self.fatal_reason)

    def lost_by_returns(self, rules: JudgeRules) -> Entries:
        """End the run where a return is due that may not be made; none: it is not, or it may."""
        candidates, pending = self.candidates, self.candidates.pending
        if not self.is_returning or pending is None or not candidates.is_lost(rules):
            return ()
        reason = (
            f"{pending.why}. {candidates.num_returns} returns to a good checkpoint did not help "
            f"(evaluation.max_returns = {rules.most_returns}): find the cause, then go on from "
            f"the last good one: diloco coordinator RUN.toml --resume --at {pending.to}, and start "
            f"every island"
        )
        return candidates.given_up() + self.failed(reason, AggregationError.exit_code)

    def checkpoint_name(self, step: int) -> str:
        """Say of what a checkpoint is, for people."""
        return f"cut {step}" if self.rules.is_elastic else f"inner step {step}"

    def is_restoring(self, island: str, incarnation: int) -> bool:
        """Whether this start restores its part of the cut that the timeline began from.

        The first one of an island does; what an earlier one has contributed since then counts.
        """
        if not (self.rules.is_elastic and self.timeline):
            return False
        is_first = self.members[island].first_incarnation == incarnation
        return is_first and island in self.cuts[self.resume_step].parts

    def _taken_back(self, step: int) -> Entries:
        """Have islands and text go on where a cut's parts have them."""
        if self.claims is None:
            return ()
        cut, timeline = self.cuts[step], self.timeline + 1
        stood = {i: self.last_inner_step(i) for i in self.members}
        stood |= {island: part.inner_step for island, part in cut.parts.items()}
        return (
            *(
                (f"position/{i}", json.dumps({"timeline": timeline, "inner_step": inner_step}))
                for i, inner_step in stood.items()
            ),
            *self.claims.restored(cut.told, [part.text for part in cut.parts.values()]),
        )

    def resumed(self, step: int, *, is_return: bool = False) -> Entries:
        """Begin a new timeline from a complete checkpoint: all must join again.

        `is_return`: the run does so by itself.
        """
        beginning = {"timeline": self.timeline + 1, "resume_step": step}
        kept = [checkpoint for checkpoint in self.checkpoints if checkpoint <= step]
        return (
            ("timeline", json.dumps(beginning)),
            ("checkpoint", json.dumps(kept)),
            ("stop", "null"),
            ("fatal", json.dumps(["", 0])),
            *self.members.paused(False),
            *self.candidates.resumed(step, self.timeline + 1, is_return=is_return),
            *self._taken_back(step),
            *(self._kicked_from(self.timeline + 1) if is_return else ()),
        )

    def _kicked_from(self, timeline: int) -> Entries:
        """Begin a timeline without the islands that a return is made without."""
        reason = (
            "the run returned to a good checkpoint and was ruined again, and this island's own "
            "checks or those of the merges speak against it"
        )
        without = self.candidates.without
        return self.members.all_changed(
            {i: self.members[i].kicked(reason, timeline) for i in without}
        )


def _text_fixed_by(first: Shared) -> Entries:
    return (
        ("corpus", first.corpus_sha256),
        ("tokenizer", first.tokenizer_digest),
        ("start", str(first.start_step)),
    )


#: Says what follows from a membership as it stands, and changes nothing of what is durable.
Decide: TypeAlias = Callable[[Membership], Entries]


class Change(Protocol):
    """Makes what is decided durable, then true."""

    async def __call__(self, *decisions: Decide) -> None:
        """Take decisions, each on top of those before; all become true, or none."""
