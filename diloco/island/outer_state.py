"""Enters the run, takes the outer state for a run checkpoint, and resumes from it.

Belongs to the training thread, as the outer loop does, and like it every rank makes the same calls:
what one rank finds wrong ends the call on all of them.

Source: PROTOCOL.md, "Run checkpoints and pins" and "Resume".
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Protocol

from torch import Tensor

from diloco.device_thread import launched, wait_until_done
from diloco.errors import ConfigError, DilocoError, FingerprintMismatch
from diloco.io_thread import Waits
from diloco.island.agreement import Agreement
from diloco.island.exchange.checkpoint_state import (
    FragmentCheckpoint,
    LaneCheckpoint,
    Moment,
)
from diloco.island.exchange.exchange import Exchange
from diloco.island.lanes.shards import LaneShards
from diloco.outer.fragments import Plan
from diloco.outer.schedule import Schedule
from diloco.protocol.island.ledger import FragmentLedger, LocalMix
from diloco.protocol.island.resume_point import (
    Entered,
    RanksApart,
    entered_of,
    entry_words,
    resume_point_after,
    resume_point_of,
)
from diloco.protocol.island.soundness import Reach
from diloco.protocol.island.votes import NOT_FOLLOWED, NOT_MINE, FragmentView
from diloco.telemetry.events import Event, InitialOverwritten, IslandRejoined, IslandResumed

logger = logging.getLogger(__name__)

#: Seconds after which a blocked rank looks at the others again.
LOOK_S = 1.0
_TELL_LOOKS = 10
_MOST_ATTEMPT = (1 << 20) - 1


def _missing(views: Sequence[FragmentView]) -> str:
    """Say how many fragments have come, and what the others wait for."""
    missing = [p for p, view in enumerate(views) if view.anchor_version < 0]
    damaged = [str(p) for p in missing if views[p].is_damaged]
    have_come = f"{len(views) - len(missing)} of {len(views)} fragments have come"
    if damaged:
        return (
            f"{have_come}. Their syncer has lost the newest version of fragment "
            f"{', '.join(damaged)} and does not serve it: it is waited for until it is repaired, "
            f"see by whom with `diloco status` and the coordinator's address"
        )
    return (
        f"{have_come}. Until every island has joined there is nothing to enter: see who is missing "
        f"by `diloco status` with the coordinator's address"
    )


class Runner(Protocol):
    """Where the exchange runs: the IO thread of a rank, or the current loop."""

    def post(self, action: Callable[..., object], *arguments: object) -> None:
        """Run `action(*arguments)` there, after what was posted before."""


@dataclass(frozen=True, slots=True)
class LoopParts:
    """The things that all parts of one rank's outer loop share.

    Args:
        plan: Of the run.
        schedule: Of the run; on arrival only its periods and its flush count.
        shards: The parameters.
        exchange: With the syncers.
        runner: Where the exchange runs.
        agreement: Of the island's ranks.
        timeline: Of the run.
        local_mix: What merges keep of the local values.
        clock: Monotonic seconds.
        on_event: Called with each event.
        start_step: Where the run began: 0, or a warm start's position.
    """

    plan: Plan
    schedule: Schedule
    shards: LaneShards
    exchange: Exchange
    runner: Runner
    agreement: Agreement
    timeline: int
    local_mix: LocalMix
    clock: Callable[[], float]
    on_event: Callable[[Event], None]
    start_step: int = 0

    def views(self) -> list[FragmentView]:
        """Return what this rank knows of every fragment."""
        return [self.exchange.view(fragment.fragment_id) for fragment in self.plan.fragments]

    def smallest(self, values: Sequence[int], problem: DilocoError | None = None) -> list[int]:
        """Take the smallest of all ranks' values; raise on all of them where one has failed."""
        return self.agreement.smallest(values, problem or self.exchange.failure)

    def largest(self, values: Sequence[int]) -> list[int]:
        """Take the largest of all ranks' values; raises as `smallest`."""
        return self.agreement.largest(values, self.exchange.failure)


@dataclass(slots=True)
class OuterState:
    """The outer state of one rank: by fragment its ledger, anchor and reach.

    Attributes:
        inner_step: Completed inner steps.
        first_checkpoint_step: Before this step no checkpoint of the run can be taken
            (`ResumePoint`).
        ledgers: Counters, by fragment.
        anchors: Published lanes that were merged last, by fragment.
        reaches: How far from their anchor local values may lie, by fragment.
        newest: Versions that were published when a checkpoint was resumed.
    """

    inner_step: int
    first_checkpoint_step: int
    ledgers: list[FragmentLedger]
    anchors: list[Mapping[int, Tensor]]
    reaches: list[Reach]
    newest: tuple[int, ...] = ()


def _last_known(fragment: FragmentCheckpoint) -> int:
    """Return what a checkpoint may know of: the version that counts it, at most, and attempt."""
    version, sent_as = fragment.ledger.version, fragment.sent_as
    return _as_word((version, _MOST_ATTEMPT) if sent_as is None else (version + 1, sent_as.attempt))


def _as_word(counted: tuple[int, int]) -> int:
    """Return a version and an attempt as one integer, in their order."""
    version, attempt = counted
    return version * (_MOST_ATTEMPT + 1) + min(attempt, _MOST_ATTEMPT)


def _bits(value: float) -> int:
    """Return the bits of a float from 0 on, as an integer: they are ordered as floats are."""
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return int(bits)


def _float(bits: int) -> float:
    (value,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(value)


def entering_run(
    parts: LoopParts, *, overwrite_initial: bool, last_inner_step: int
) -> Waits[OuterState]:
    """Found version 0 or return; parameters that differ take the published values.

    Any do once the run has gone on from version 0, which only all fragments together say.
    """
    own: dict[int, dict[int, Tensor]] = {}
    for each in parts.plan.fragments:
        lanes = parts.shards.collect(each.fragment_id)
        copied = parts.shards.place.copied
        own[each.fragment_id] = {lane_id: copied(lane) for lane_id, lane in lanes.items()}
        parts.shards.reuse(lanes)
    wait_until_done(parts.shards.device)  # the exchange may read them on the host
    parts.runner.post(launched(parts.shards.device))
    parts.runner.post(parts.exchange.enter, own)
    entered = yield from _entering(parts)
    overwritten = tuple(p for p, fragment in enumerate(entered) if fragment.is_overwritten)
    if overwritten and not (overwrite_initial or any(each.version for each in entered)):
        p = overwritten[0]
        names = ", ".join(entry.name for entry in parts.plan.fragments[p].entries[:3])
        raise FingerprintMismatch(
            f"the initial parameters of island {parts.exchange.island!r} differ from the run's in "
            f"fragment {p} ({names}, ...): the same seed, model and version of torch must be used "
            f"everywhere"
        )
    resume_point = (
        resume_point_after(max(parts.start_step, last_inner_step), len(entered))
        if parts.exchange.rules.on_arrival
        else resume_point_of(entered, parts.schedule, parts.start_step)
    )
    ledgers = [
        FragmentLedger(
            parts.timeline,
            p,
            version=fragment.version,
            attempt=fragment.attempt,
            sent_until=resume_point.sent_until[p],
            is_flushed=fragment.is_flush,
            merged_tokens=fragment.merged_tokens,
            asks_trial=fragment.asks_trial,
        )
        for p, fragment in enumerate(entered)
    ]
    anchors = [parts.exchange.anchor(p) for p in range(len(entered))]
    for p in overwritten:
        parts.shards.distribute(p, anchors[p], 0.0)
    if any(e.version or e.attempt for e in entered) or last_inner_step > parts.start_step:
        lost_steps = max(0, last_inner_step - resume_point.inner_step)
        parts.on_event(IslandRejoined(resume_point.inner_step, lost_steps))
    elif overwritten:
        parts.on_event(InitialOverwritten(resume_point.inner_step, overwritten))
    reaches = [Reach() for _ in entered]
    return OuterState(
        resume_point.inner_step, resume_point.first_checkpoint_step, ledgers, anchors, reaches
    )


def resuming_run(parts: LoopParts, state: Mapping[str, Tensor]) -> Waits[OuterState]:
    """Restore what `capturing` returned, and submit again what was in flight.

    Where its round is over, as the run was taken back to a later version than this island's
    checkpoint has, only the outcome is asked for. Where that version counts even what the
    island sent after its checkpoint, the work in the checkpoint is done: as when an island
    returns, the counters begin at 0, and nothing is outstanding, carried or left over.
    """
    problem: ConfigError | None = None
    moment, fragments = Moment(0, -1, 0, 0), list[FragmentCheckpoint]()
    try:
        layout, copied = parts.exchange.layout, parts.shards.place.copied
        moment, fragments = layout.from_tensors(state, parts.timeline, copied)
    except ConfigError as error:
        problem = error
    inner_step = moment.inner_step
    least, minus_most = parts.smallest([inner_step, -inner_step], problem)
    if least != -minus_most:
        raise ConfigError(
            f"the ranks of this island were given outer states of inner steps {least} to "
            f"{-minus_most}: resume all of them from one checkpoint"
        )
    wait_until_done(parts.shards.device)
    parts.runner.post(launched(parts.shards.device))
    parts.runner.post(parts.exchange.restore, fragments, moment.incarnation)
    yield from _entering(parts)
    # Ranks learn of versions at different times; all must say the same of one contribution.
    views = parts.views()
    heard = [NOT_MINE if view is NOT_FOLLOWED else view.version for view in views]
    counted = parts.largest([_as_word(view.counted) for view in views])
    for p, (fragment, version) in enumerate(zip(fragments, parts.smallest(heard), strict=True)):
        if parts.exchange.rules.on_arrival and version > fragment.ledger.version:
            if counted[p] > _last_known(fragment):
                fragment.ledger.begin_again()
                parts.runner.post(parts.exchange.begin_again, p)
            elif (sent := fragment.ledger.outstanding) is not None:
                assert fragment.sent_as is not None
                fragment.ledger.outstanding = replace(sent, key=fragment.sent_as)
        if (sent := fragment.ledger.outstanding) is not None:
            parts.runner.post(parts.exchange.resume, sent, fragment.lanes)
    yield parts.exchange.wait_until_made()  # else the other ranks might settle it before this one
    parts.on_event(IslandResumed(inner_step, parts.timeline))
    return OuterState(
        inner_step,
        inner_step,
        [fragment.ledger for fragment in fragments],
        [fragment.lanes.anchor for fragment in fragments],
        [fragment.reach for fragment in fragments],
        tuple(parts.largest([view.version for view in views])),
    )


def pinning_versions(parts: LoopParts, inner_step: int, versions: Sequence[int]) -> Waits[None]:
    """Have the syncer keep the island's versions; durable when it ends, on every rank."""
    exchange, is_leader = parts.exchange, parts.agreement.is_leader
    if is_leader:
        parts.runner.post(exchange.pin, inner_step, versions)
    # The leader may try for long: the others wait for its next look, not for the syncer.
    pinned_step = -1
    while pinned_step != inner_step:
        if is_leader:
            yield exchange.wait_until_pinned(inner_step, LOOK_S)
        (pinned_step,) = parts.smallest([exchange.pinned_step if is_leader else inner_step])


def capturing_state(parts: LoopParts, state: OuterState, cut: int) -> Waits[dict[str, Tensor]]:
    """Return the state of this rank's lanes, after what was posted to the exchange.

    `cut` is the number of the cut that it is for; 0: of none.
    """
    lanes: dict[int, LaneCheckpoint] = {}
    yield parts.exchange.capture(lanes)
    parts.smallest([])  # a rank that could not capture ends all
    # Only ranks whose lanes are broken know it; the next carrier of these lanes must know it too.
    known = [lanes[p] for p in range(len(state.ledgers))]
    broken = parts.largest([of.broken_in_a_row for of in known])
    declined = parts.largest([int(of.is_declined) for of in known])
    # Ranks know of different parameters how far a step moves them.
    farthest = iter(parts.largest([_bits(x) for each in state.reaches for x in astuple(each)]))
    reaches = [Reach(_float(next(farthest)), _float(next(farthest))) for _ in state.reaches]
    fragments = [
        FragmentCheckpoint(
            ledger,
            replace(known[p], is_declined=bool(declined[p]), broken_in_a_row=broken[p]),
            reaches[p],
        )
        for p, ledger in enumerate(state.ledgers)
    ]
    moment = Moment(parts.timeline, state.inner_step, cut, parts.exchange.incarnation)
    return parts.exchange.layout.to_tensors(moment, fragments)


def _entering(parts: LoopParts) -> Waits[list[Entered]]:
    """Wait until every rank holds its anchors; they must be of the same versions."""
    num_looks = 0
    while True:
        yield parts.exchange.wait_until_entered(LOOK_S)
        views = parts.views()
        words = parts.smallest(entry_words(views))
        try:
            entered = entered_of(words)
        except RanksApart as apart:
            if not parts.exchange.rules.on_arrival:
                raise
            parts.runner.post(parts.exchange.follow, apart.fragment_id, apart.newest)
            continue
        if entered is not None:
            return entered
        num_looks += 1
        if num_looks % _TELL_LOOKS == 0 and parts.agreement.is_leader:
            # A warning: also a loop that set up no logging sees why nothing happens.
            logger.warning("still waiting to enter the run: %s", _missing(views))
