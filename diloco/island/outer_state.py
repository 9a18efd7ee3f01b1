"""An island's outer state: how it begins, is kept for a run checkpoint, and is resumed.

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

from diloco.errors import ConfigError
from diloco.io_thread import Waits
from diloco.island.agreement import Agreement, exit_code_of, raise_failure
from diloco.island.exchange.checkpoint_state import (
    FragmentCheckpoint,
    LaneCheckpoint,
    Moment,
    StateLayout,
)
from diloco.island.exchange.exchange import Exchange
from diloco.island.exchange.fragment_state import FragmentView
from diloco.island.lanes.shards import LaneShards
from diloco.island.resume_point import (
    Entered,
    RanksApart,
    entered_of,
    entry_words,
    resume_point_after,
    resume_point_of,
)
from diloco.outer.fragments import Plan
from diloco.outer.schedule import Schedule
from diloco.protocol.island.ledger import FragmentLedger
from diloco.protocol.island.soundness import Reach
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


@dataclass(slots=True)
class OuterState:
    """What an outer loop goes on from: by fragment its ledger, anchor and reach.

    Before `first_checkpoint_step` no checkpoint of the run can be taken (`ResumePoint`). `newest`
    are the versions that were published when a checkpoint was resumed.
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


class StateKeeper:
    """One rank's part in entering the run and in its checkpoints."""

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        shards: LaneShards,
        exchange: Exchange,
        runner: Runner,
        agreement: Agreement,
        *,
        timeline: int,
        start_step: int,
        on_event: Callable[[Event], None],
    ) -> None:
        """Assign only."""
        self._plan = plan
        self._schedule = schedule
        self._shards = shards
        self._exchange = exchange
        self._runner = runner
        self._agreement = agreement
        self._timeline = timeline
        self._start_step = start_step
        self._on_event = on_event
        self._layout = StateLayout(
            plan,
            {f.fragment_id: shards.lanes_of(f.fragment_id) for f in plan.fragments},
            exchange.rules.uplink_codec,
            exchange.rules.error_feedback,
        )

    def starting(self, *, overwrite_initial: bool, last_inner_step: int) -> Waits[OuterState]:
        """Found version 0 or return; parameters that differ take the published values."""
        own = {f.fragment_id: self._shards.collect(f.fragment_id) for f in self._plan.fragments}
        self._runner.post(self._exchange.enter, own, overwrite_initial)
        entered = yield from self._entering()
        resume_point = (
            resume_point_after(max(self._start_step, last_inner_step), len(entered))
            if self._exchange.rules.on_arrival
            else resume_point_of(entered, self._schedule, self._start_step)
        )
        ledgers = [
            FragmentLedger(
                self._timeline,
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
        anchors = [self._exchange.anchor(p) for p in range(len(entered))]
        overwritten = tuple(p for p, fragment in enumerate(entered) if fragment.is_overwritten)
        for p in overwritten:
            self._shards.distribute(p, anchors[p], 0.0)
        if any(e.version or e.attempt for e in entered) or last_inner_step > self._start_step:
            lost_steps = max(0, last_inner_step - resume_point.inner_step)
            self._on_event(IslandRejoined(resume_point.inner_step, lost_steps))
        elif overwritten:
            self._on_event(InitialOverwritten(resume_point.inner_step, overwritten))
        reaches = [Reach() for _ in entered]
        return OuterState(
            resume_point.inner_step, resume_point.first_checkpoint_step, ledgers, anchors, reaches
        )

    def resuming(self, state: Mapping[str, Tensor]) -> Waits[OuterState]:
        """Restore what `capturing` returned, and submit again what was in flight.

        Where its round is over, as the run was taken back to a later version than this island's
        checkpoint has, only the outcome is asked for. Where that version counts even what the
        island sent after its checkpoint, the work in the checkpoint is done: as when an island
        returns, the counters begin at 0, and nothing is outstanding, carried or left over.
        """
        problem: ConfigError | None = None
        moment, fragments = Moment(0, -1, 0, 0), list[FragmentCheckpoint]()
        try:
            moment, fragments = self._layout.from_tensors(state, self._timeline)
        except ConfigError as error:
            problem = error
        inner_step = moment.inner_step
        least, minus_most = self._smallest([inner_step, -inner_step], problem)
        if least != -minus_most:
            raise ConfigError(
                f"the ranks of this island were given outer states of inner steps {least} to "
                f"{-minus_most}: resume all of them from one checkpoint"
            )
        self._runner.post(self._exchange.restore, fragments, moment.incarnation)
        yield from self._entering()
        # Ranks hear of versions at different times; all must say the same of one contribution.
        views = [self._exchange.view(f.fragment_id) for f in self._plan.fragments]
        heard = [view.version for view in views]
        counted = self._largest([_as_word(view.counted) for view in views])
        for p, (fragment, version) in enumerate(zip(fragments, self._smallest(heard), strict=True)):
            if self._exchange.rules.on_arrival and version > fragment.ledger.version:
                if counted[p] > _last_known(fragment):
                    fragment.ledger.begin_again()
                    self._runner.post(self._exchange.begin_again, p)
                elif (sent := fragment.ledger.outstanding) is not None:
                    assert fragment.sent_as is not None
                    fragment.ledger.outstanding = replace(sent, key=fragment.sent_as)
            if (sent := fragment.ledger.outstanding) is not None:
                self._runner.post(self._exchange.resume, sent, fragment.lanes)
        self._on_event(IslandResumed(inner_step, self._timeline))
        return OuterState(
            inner_step,
            inner_step,
            [fragment.ledger for fragment in fragments],
            [fragment.lanes.anchor for fragment in fragments],
            [fragment.reach for fragment in fragments],
            tuple(self._largest(heard)),
        )

    def pinning(self, inner_step: int, versions: Sequence[int]) -> Waits[None]:
        """Have the syncer keep the island's versions; durable when it ends, on every rank."""
        exchange, is_leader = self._exchange, self._agreement.is_leader
        if is_leader:
            self._runner.post(exchange.pin, inner_step, versions)
        # The leader may try for long: the others wait for its next look, not for the syncer.
        pinned_step = -1
        while pinned_step != inner_step:
            if is_leader:
                yield exchange.wait_until_pinned(inner_step, LOOK_S)
            (pinned_step,) = self._smallest([exchange.pinned_step if is_leader else inner_step])

    def capturing(self, state: OuterState, cut: int) -> Waits[dict[str, Tensor]]:
        """Return the state of this rank's lanes, after what was posted to the exchange.

        `cut` is the number of the cut that it is for; 0: of none.
        """
        lanes: dict[int, LaneCheckpoint] = {}
        yield self._exchange.capture(lanes)
        # Only ranks whose lanes are broken know of it; anyone who carries these lanes next must
        # too.
        known = [lanes[p] for p in range(len(state.ledgers))]
        broken = self._largest([of.broken_in_a_row for of in known])
        declined = self._largest([int(of.is_declined) for of in known])
        # Ranks know of different parameters how far a step moves them.
        farthest = iter(self._largest([_bits(x) for each in state.reaches for x in astuple(each)]))
        reaches = [Reach(_float(next(farthest)), _float(next(farthest))) for _ in state.reaches]
        fragments = [
            FragmentCheckpoint(
                ledger,
                replace(known[p], is_declined=bool(declined[p]), broken_in_a_row=broken[p]),
                reaches[p],
            )
            for p, ledger in enumerate(state.ledgers)
        ]
        moment = Moment(self._timeline, state.inner_step, cut, self._exchange.incarnation)
        return self._layout.to_tensors(moment, fragments)

    def _entering(self) -> Waits[list[Entered]]:
        """Wait until every rank holds its anchors; they must be of the same versions."""
        num_looks = 0
        while True:
            yield self._exchange.wait_until_entered(LOOK_S)
            views = [self._exchange.view(f.fragment_id) for f in self._plan.fragments]
            words = self._smallest(entry_words(views))
            try:
                entered = entered_of(words)
            except RanksApart as apart:
                if not self._exchange.rules.on_arrival:
                    raise
                self._runner.post(self._exchange.follow, apart.fragment_id, apart.newest)
                continue
            if entered is not None:
                return entered
            num_looks += 1
            if num_looks % _TELL_LOOKS == 0 and self._agreement.is_leader:
                # A warning: also a loop that set up no logging sees why nothing happens.
                logger.warning("still waiting to enter the run: %s", _missing(views))

    def _largest(self, values: Sequence[int]) -> list[int]:
        return [-value for value in self._smallest([-value for value in values])]

    def _smallest(self, values: Sequence[int], problem: ConfigError | None = None) -> list[int]:
        """Take the smallest of all ranks' values; raise on all of them where one has failed."""
        failure = problem or self._exchange.failure
        minus_code, *smallest = self._agreement.smallest([-exit_code_of(failure), *values])
        raise_failure(failure, -minus_code)
        return smallest
