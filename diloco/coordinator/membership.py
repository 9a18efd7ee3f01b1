"""Who takes part in a run: a pure machine over joins, departures, stops and checkpoints.

It accepts or refuses joins, grants incarnations, fixes plan, text and first inner step with the
first join, knows who has left, finds the inner step after which all can stop, and which run
checkpoints are complete. Whatever it must never forget comes back as `entries`: key-value pairs
that the caller writes durably, then applies, then answers; a write that fails has changed nothing.

A stop: `request_stop`; every island promises an inner step that it will not pass unasked; when all
have, the largest promise is the `stop_step` to which everybody goes on and checkpoints. Nobody
leaves before that checkpoint is complete: an island that starts again before promises anew, and
when it can stop only later, so do all.

Source: protocol.md sections 4 (version 0), 8, 9 and 10.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum

from diloco.errors import PlanMismatch
from diloco.outer.fragments import Plan, plan_difference
from diloco.refusals import Cause

Entries = tuple[tuple[str, str], ...]

#: Bytes of the largest plan manifest: it goes on to the syncer in one header, with names beside it.
MOST_PLAN_BYTES = 7 << 17
_MOST_DIGEST = 256

#: Starts of one island that are remembered, the newest: an island that starts again and again does
#: not fill the journal. One that joins again after so many later ones counts as another start.
REMEMBERED_STARTS = 256


class JoinVerdict(StrEnum):
    """Answer to a join."""

    ACCEPTED = "accepted"
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"
    PLAN_MISMATCH = "plan_mismatch"
    RUN_STOPPED = "run_stopped"
    UNKNOWN_ISLAND = "unknown_island"
    WRONG_RUN = "wrong_run"


@dataclass(frozen=True, slots=True)
class Joined:
    """Outcome of a join: verdict, granted incarnation, and what to write and apply in any case.

    A refusal has a message, which names the field and both values, and a cause.
    """

    verdict: JoinVerdict
    message: str = ""
    incarnation: int = 0
    cause: Cause | None = None
    entries: Entries = ()


@dataclass(frozen=True, slots=True)
class Member:
    """What is known of one configured island.

    Args:
        slot: Its island slot.
        incarnations: Incarnation of each of the newest starts, by start id; numbered from 1 as they
            joined.
        timeline: In which the newest start joined.
        exit_code: How the newest start ended; None while it is at work.
        is_stopped: Whether it ended in a graceful stop.
    """

    slot: int
    incarnations: Mapping[str, int] = field(default_factory=dict)
    timeline: int = 0
    exit_code: int | None = None
    is_stopped: bool = False

    @property
    def incarnation(self) -> int:
        """Incarnation of the newest start; 0 before the first."""
        return max(self.incarnations.values(), default=0)


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

    Attributes:
        timeline: Counter of resumes.
        resume_step: Inner step of the checkpoint that this timeline began from.
        checkpoints: Inner steps of the complete run checkpoints, ascending.
        promises: Island -> inner step that it will not pass unasked; None while nobody asked for a
            stop.
    """

    run: str
    islands: tuple[str, ...]
    identity_json: str
    identity_difference: Callable[[str, str], list[str]]
    inner_steps: int
    num_checkpoints: int
    plan_json: str = ""
    corpus_sha256: str = ""
    tokenizer_digest: str = ""
    start_step: int = 0
    timeline: int = 0
    resume_step: int = 0
    checkpoints: tuple[int, ...] = ()
    promises: Mapping[str, int] | None = None
    members: dict[str, Member] = field(init=False)
    fatal_reason: str = ""
    fatal_exit_code: int = 0
    _kept: dict[str, set[int]] = field(init=False)

    def __post_init__(self) -> None:
        """Give every configured island its slot."""
        self.members = {island: Member(slot) for slot, island in enumerate(self.islands)}
        self._kept = {island: set() for island in self.islands}

    def apply(self, entries: Iterable[tuple[str, str]]) -> None:
        """Take over what is durable: after a write, and after a restart all of it."""
        for key, value in entries:
            kind, _, island = key.partition("/")
            match kind:
                case "plan":
                    self.plan_json = value
                case "corpus":
                    self.corpus_sha256 = value
                case "tokenizer":
                    self.tokenizer_digest = value
                case "start":
                    self.start_step = int(value)
                case "timeline":
                    saved = json.loads(value)
                    self.timeline, self.resume_step = saved["timeline"], saved["resume_step"]
                case "checkpoint":
                    self.checkpoints = tuple(json.loads(value))
                case "stop":
                    self.promises = json.loads(value)
                case "fatal":
                    self.fatal_reason, self.fatal_exit_code = json.loads(value)
                case "island" if island in self.members:
                    before = self.members[island]
                    self.members[island] = Member(before.slot, **json.loads(value))
                    if self.members[island].incarnation > before.incarnation:
                        self._kept[island] = set()  # it may write some of them anew

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
    ) -> Joined:
        """Accept or refuse one start of an island; the first one fixes what all must share.

        A repeated join of one start gets the same incarnation, even when a later start has fenced
        it; another start of the island gets the next one, which fences the earlier. After a stop
        whose checkpoint is complete there is nothing to start for: the island has left.
        """
        if run != self.run:
            message = f"run: {self.run!r} here, {run!r} there: you asked for another run"
            return Joined(JoinVerdict.WRONG_RUN, message, cause=Cause.RUN)
        member = self.members.get(island)
        if member is None:
            names = ", ".join(self.islands)
            return Joined(
                JoinVerdict.UNKNOWN_ISLAND,
                f"island {island!r} is not in the coordinator's configuration, which has {names}",
                cause=Cause.ISLAND,
            )
        if differing := self.identity_difference(self.identity_json, identity_json):
            return Joined(
                JoinVerdict.FINGERPRINT_MISMATCH,
                f"the configuration of island {island!r} (there) differs from the run's (here):\n  "
                + "\n  ".join(differing),
                cause=Cause.IDENTITY,
            )
        try:
            if len(plan_json) > MOST_PLAN_BYTES:
                raise PlanMismatch(
                    f"its manifest has {len(plan_json)} bytes; {MOST_PLAN_BYTES} are allowed"
                )
            Plan.from_json(plan_json)
        except PlanMismatch as error:
            message = f"island {island!r} sent no usable plan: {error}"
            return Joined(JoinVerdict.PLAN_MISMATCH, message, cause=Cause.PLAN)
        if self.plan_json and plan_json != self.plan_json:
            return Joined(
                JoinVerdict.PLAN_MISMATCH,
                f"the plan of island {island!r} (there) differs from the run's (here):\n  "
                + "\n  ".join(plan_difference(self.plan_json, plan_json)),
                cause=Cause.PLAN,
            )
        for name, digest in (("text", corpus_sha256), ("tokenizer", tokenizer_digest)):
            if len(digest) > _MOST_DIGEST:
                return Joined(
                    JoinVerdict.FINGERPRINT_MISMATCH,
                    f"the {name} of island {island!r} has a digest of {len(digest)} characters; "
                    f"{_MOST_DIGEST} are allowed",
                    cause=Cause(name),
                )
        # Before the text, whose digest covers it. None was said: a training loop of somebody's own.
        if self.tokenizer_digest and tokenizer_digest != self.tokenizer_digest:
            return Joined(
                JoinVerdict.FINGERPRINT_MISMATCH,
                f"data.tokenizer of island {island!r} has digest {tokenizer_digest!r} (there), the "
                f"run's has {self.tokenizer_digest!r} (here): the same tokenizer.json and "
                "data.separator are needed everywhere",
                cause=Cause.TOKENIZER,
            )
        if self.plan_json and corpus_sha256 != self.corpus_sha256:
            return Joined(
                JoinVerdict.FINGERPRINT_MISMATCH,
                f"the text of island {island!r} has digest {corpus_sha256} (there), the run's has "
                f'{self.corpus_sha256} (here): data.source = "stdlib" needs the same release of '
                "Python on every island, [data.sources] the same files under the same names (or "
                "one commit, set as revision)",
                cause=Cause.TEXT,
            )
        if self.plan_json and start_step != self.start_step:
            return Joined(
                JoinVerdict.FINGERPRINT_MISMATCH,
                f"island {island!r} starts at inner step {start_step} (there), the run started at "
                f"{self.start_step} (here): run.warm_start must name the same source everywhere",
                cause=Cause.START_STEP,
            )
        incarnation = member.incarnations.get(start_id, member.incarnation + 1)
        is_newest = incarnation >= member.incarnation
        if start_id in member.incarnations and (self._has_joined(member) or not is_newest):
            return Joined(JoinVerdict.ACCEPTED, incarnation=incarnation)
        if self.is_stop_complete:
            return Joined(
                JoinVerdict.RUN_STOPPED,
                f"the run is stopped after inner step {self.stop_step}, and this island has its "
                f"checkpoint: once the coordinator has ended, diloco coordinator RUN.toml --resume",
                entries=self.left(island, 0, is_stopped=True),
                cause=Cause.STOPPED,
            )
        oldest = incarnation - REMEMBERED_STARTS
        starts = {s: n for s, n in member.incarnations.items() if n > oldest}
        joined = Member(member.slot, {**starts, start_id: incarnation}, self.timeline)
        entries = (
            ("plan", plan_json),
            ("corpus", corpus_sha256),
            ("tokenizer", tokenizer_digest),
            ("start", str(start_step)),
            _island_entry(island, joined),
        )
        # The first join writes all of them, a later one its own.
        return Joined(
            JoinVerdict.ACCEPTED,
            incarnation=incarnation,
            entries=entries[4 if self.plan_json else 0 :] + self._reopened(island),
        )

    def is_current(self, island: str, incarnation: int, timeline: int) -> bool:
        """Whether this is the newest start of a known island, in the present timeline."""
        member = self.members.get(island)
        return (
            member is not None
            and member.incarnation == incarnation
            and timeline == member.timeline == self.timeline
        )

    def cause_against(self, island: str, incarnation: int, timeline: int) -> Cause:
        """Say what is wrong with a grant that was refused; it need not be signed."""
        member = self.members.get(island)
        if member is None:
            return Cause.GRANT
        if timeline != self.timeline:
            return Cause.TIMELINE
        return Cause.INCARNATION if incarnation < member.incarnation else Cause.GRANT

    def left(self, island: str, exit_code: int, *, is_stopped: bool) -> Entries:
        """Note how the current start of an island ended.

        One that stopped did so after the checkpoint of the stop step was complete.
        """
        member = replace(self.members[island], exit_code=exit_code, is_stopped=is_stopped)
        return (_island_entry(island, member),)

    def failed(self, reason: str, exit_code: int) -> Entries:
        """Note that the run must stop; none if it must already: the first reason stays."""
        return () if self.fatal_reason else (("fatal", json.dumps([reason, exit_code])),)

    @property
    def have_all_joined(self) -> bool:
        """Whether every configured island has joined in this timeline."""
        return all(map(self._has_joined, self.members.values()))

    @property
    def has_been_joined(self) -> bool:
        """Whether any island has joined this timeline."""
        return any(map(self._has_joined, self.members.values()))

    @property
    def is_finished(self) -> bool:
        """Whether every island has left without an error, at the end of the run."""
        return self._have_left_well and not any(m.is_stopped for m in self.members.values())

    @property
    def is_stopped(self) -> bool:
        """Whether every island has left without an error, in a graceful stop."""
        return self._have_left_well and any(m.is_stopped for m in self.members.values())

    @property
    def is_deserted(self) -> bool:
        """Whether no island is left that joined."""
        return all(
            member.exit_code is not None
            for member in self.members.values()
            if self._has_joined(member)
        )

    # -- stop --------------------------------------------------------------------------------------

    def request_stop(self) -> Entries:
        """Ask every island for a promise; none if that was asked, or there is nobody to ask."""
        if self.is_stopping or not self.have_all_joined or self.is_deserted:
            return ()
        return (("stop", "{}"),)

    def promise(self, island: str, hold_step: int) -> Entries:
        """Take note, once a start, that an island will not pass an inner step unasked.

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
        """Let a new start of an island promise anew, for it may stand beyond the stop step.

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
        at_work = [name for name in silent if self.members[name].exit_code != 0]
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

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was asked for."""
        return self.promises is not None

    @property
    def stop_step(self) -> int | None:
        """Inner step after which all stop; None until all that are at work have promised."""
        return None if self.promises is None else self._named_by(self.promises)

    def _named_by(self, promises: Mapping[str, int]) -> int | None:
        """Return the stop step; who has finished has promised the last inner step."""
        finished = {name: self.inner_steps for name, m in self.members.items() if m.exit_code == 0}
        promises = {**finished, **promises}
        return max(promises.values()) if promises.keys() == self.members.keys() else None

    @property
    def is_stop_complete(self) -> bool:
        """Whether every island has the checkpoint of the stop step, so that all may leave."""
        return self.stop_step is not None and self.stop_step in self.checkpoints

    # -- checkpoints -------------------------------------------------------------------------------

    def keeps(self, island: str, steps: Iterable[int], *, inner_step: int) -> Entries:
        """Take note of the checkpoints that an island keeps; entries when one became complete.

        A start names what it wrote, and of earlier starts what is not later than where it began.
        What is later than both its inner step and the resumed one was written in an abandoned
        timeline, and does not count.
        """
        reached = max(inner_step, self.resume_step)
        self._kept[island] = {step for step in steps if step <= reached}
        # Complete once is complete for good: an island that has not reported yet keeps its own.
        complete = set.intersection(*self._kept.values()) | set(self.checkpoints)
        newest = tuple(sorted(complete)[-self.num_checkpoints :])
        return () if newest == self.checkpoints else (("checkpoint", json.dumps(newest)),)

    def resumed(self, step: int) -> Entries:
        """Begin a new timeline from a complete checkpoint: all must join again."""
        beginning = {"timeline": self.timeline + 1, "resume_step": step}
        kept = [checkpoint for checkpoint in self.checkpoints if checkpoint <= step]
        return (
            ("timeline", json.dumps(beginning)),
            ("checkpoint", json.dumps(kept)),
            ("stop", "null"),
            ("fatal", json.dumps(["", 0])),
        )

    def _has_joined(self, member: Member) -> bool:
        return member.incarnation > 0 and member.timeline == self.timeline

    @property
    def _have_left_well(self) -> bool:
        return all(self._has_joined(m) and m.exit_code == 0 for m in self.members.values())


def _island_entry(island: str, member: Member) -> tuple[str, str]:
    saved = asdict(member)
    del saved["slot"]  # follows from the configuration
    return f"island/{island}", json.dumps(saved)
