"""A carrier's connection to one syncer: its epoch, and its polls about the fragments it has now.

Belongs to the exchange and its loop. A syncer that is away holds up nothing but its own fragments,
as long as anybody else answers (`retried_calls.SyncerReach`); what it says that ends this rank,
such as a fence, ends the exchange with all syncers. A fragment that it does not mention when it is
asked about it has moved, or moves: nothing is said of it until the coordinator was asked.

Source: PROTOCOL.md, "Syncer epoch", "One fragment, one round" and "Moves of fragments".
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from diloco.errors import IslandFailed, error_of_exit_code
from diloco.island.exchange.calls import LinkParts, SyncerCalls
from diloco.island.exchange.contributions import Contributions
from diloco.island.exchange.entry import FragmentEntry
from diloco.island.exchange.fragment_state import NOT_DURABLE, IslandFragment
from diloco.island.exchange.staging import Stager
from diloco.protocol.rounds.messages import outcome_of
from diloco.protos import fragment_pb2 as wire
from diloco.telemetry.events import SyncerRestarted

#: Seconds until it is asked where a fragment is, at first and at most: a move may take hours, and
#: carriers of all islands ask.
_LEAST_LOOK_S, _MOST_LOOK_S = 1.0, 60.0


class SyncerLink:
    """One rank's link to one syncer; it polls from `start` until its tasks are stopped.

    Where there is nothing to ask about it does not poll: what the syncer says the island's other
    ranks know. `fragments` are the syncer's, those that this rank follows.
    `pinned_step` is the inner step of the last `pin`, once the syncer has done it; -1 before.
    """

    def __init__(
        self,
        calls: SyncerCalls,
        parts: LinkParts,
        fragments: Mapping[int, IslandFragment],
        step_s: Callable[[], float],
        *,
        contributions: Contributions,
        stager: Stager,
        entry: FragmentEntry,
        on_lacking: Callable[[float], Awaitable[None]],
    ) -> None:
        """Assign only.

        Args:
            calls: To the syncer.
            parts: Shared by all that this rank exchanges.
            fragments: The syncer's, those that this rank follows.
            step_s: Gives the duration of recent inner steps, in seconds; 0: not known yet.
            contributions: Of the rank.
            stager: Of the rank.
            entry: Of the rank.
            on_lacking: Finds out where fragments are that the syncer does not mention, in so many
                seconds.
        """
        self.fragments = dict(fragments)
        self.calls, self._calls_about = calls, parts.calls
        self.pinned_step = -1
        self._grant = parts.grant
        self._tasks = parts.tasks
        self._step_s = step_s
        self._on_event = parts.on_event
        self._sent_by = 0
        self.contributions, self.stager, self.entry = contributions, stager, entry
        self._on_lacking = on_lacking
        self._lacking: set[int] = set()
        self._look_s = _LEAST_LOOK_S
        self._looking: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._pinning: asyncio.Task[None] | None = None

    def start(self, sent_by: int) -> None:
        """Begin to poll; `sent_by` is the incarnation that sent what a checkpoint has in flight."""
        self._sent_by = sent_by
        self.poll_again()

    def poll_again(self) -> None:
        """Ask about the fragments that there are now, whatever is being asked."""
        for p in self._lacking:
            self._calls_about.go_on(p)
        self._lacking.clear()
        if self._polling is not None:
            self._polling.cancel()
        self._polling = self._tasks.spawn(self._poll_forever()) if self.fragments else None

    def begin_pin(self, inner_step: int, versions: Sequence[int]) -> None:
        """Have the syncer keep a version of each of its fragments; done when `pinned_step` says so.

        Whatever pin is under way is not waited for; `versions` are those of all fragments.
        """
        if self._pinning is not None:
            self._pinning.cancel()
        self.pinned_step = -1
        self._pinning = self._tasks.spawn(self._pin(inner_step, versions))

    async def _pin(self, inner_step: int, versions: Sequence[int]) -> None:
        """Pin; where no fragment is the syncer's that is done.

        Raises:
            IslandFailed: If it has no such version, or keeps another.
            Fenced: If this start of the island is not the newest.
        """
        own = {p: versions[p] for p in self.fragments}
        ack = await self.calls.pin(inner_step, own) if own else wire.Ack(is_accepted=True)
        if ack.is_fenced:
            raise self.calls.fenced(ack.message)
        if not ack.is_accepted:
            raise IslandFailed(
                f"versions {list(own.values())} cannot be kept for the checkpoint of inner step "
                f"{inner_step}: {ack.message}. This island took another way than the others: start "
                f"it again, so that it returns to what is published: diloco island RUN.toml "
                f"--island {self._grant.island}. If another island did, kick that one first: "
                f"diloco kick HOST:PORT ISLAND. If that does not help, stop the coordinator "
                f"and resume the newest checkpoint: diloco coordinator RUN.toml --resume"
            )
        self.pinned_step = inner_step
        self._tasks.notify()

    async def _poll_forever(self) -> None:
        while self._tasks.failure is None:
            here = [each for p, each in self.fragments.items() if p not in self._lacking]
            if not here:
                return  # until `_look`
            undecided = [
                fragment.outstanding.key
                for fragment in here
                if fragment.outstanding is not None and fragment.outcome is None
            ]
            known = [fragment.known() for fragment in here]
            reply = await self.calls.poll(
                known, undecided, step_s=self._step_s(), sent_by=self._sent_by
            )
            self._take(reply)
            self._note_lacking({each.fragment_id for each in here}, reply)

    def _note_lacking(self, asked: set[int], reply: wire.PollReply) -> None:
        """Neither ask nor call about fragments that are not here, until it was asked where."""
        if lacking := asked.difference(each.fragment_id for each in reply.fragments):
            self._lacking |= lacking
            for p in lacking:
                self._calls_about.hold(p)
            if self._looking is None:
                self._looking = self._tasks.spawn(self._look())
        elif not self._lacking:
            self._look_s = _LEAST_LOOK_S

    async def _look(self) -> None:
        """Ask where fragments are, after longer and longer waits, then this syncer about them."""
        await self._on_lacking(self._look_s)
        self._look_s, self._looking = min(2 * self._look_s, _MOST_LOOK_S), None
        self.poll_again()

    def _take(self, reply: wire.PollReply) -> None:
        if reply.is_fenced:
            self._tasks.fail(self.calls.fenced(reply.message))
            return
        if reply.HasField("fatal"):
            error = error_of_exit_code(reply.fatal.exit_code)
            self._tasks.fail(error(reply.fatal.reason, island_id=self._grant.island))
            return
        if reply.syncer_epoch > self.calls.epoch:
            self._take_epoch(reply.syncer_epoch)
        for state in reply.fragments:
            self.fragments[state.fragment_id].on_announcement(state)
        for outcome in map(outcome_of, reply.outcomes):
            self.contributions.take(self.fragments[outcome.key.fragment_id], outcome)
        for fragment in self.fragments.values():
            self.entry.give(fragment)
            self.stager.look(fragment)
        self._tasks.notify()

    def _take_epoch(self, epoch: int) -> None:
        """Forget what the syncer before had only in memory: lanes received, refusals."""
        previous, self.calls.epoch = self.calls.epoch, epoch
        num_resent = 0
        for fragment in self.fragments.values():
            if fragment.outcome in NOT_DURABLE:
                fragment.outcome = None
            if fragment.outcome is None:
                received = [lane.received_epoch for lane in fragment.sending.values()]
                num_resent += sum(0 <= by < epoch for by in received)
        if previous:
            self._on_event(SyncerRestarted(epoch, num_resent))
