"""A carrier's side of the rounds: poll (`syncer_link`), contribute, stage, settle.

Runs in one event loop (the IO thread of a rank, or a virtual clock); never issues a collective,
never touches a parameter or an anchor. What it has computed (`LanePlace.run`) is done by another
thread, and it shows nothing that the device has not done yet. The training thread posts `send`,
`decline`, `settle` and the like, and reads `view`, which is replaced as a whole; nothing else
crosses between the two.

Source: PROTOCOL.md, "Agreement of ranks", "Contributions" and "Staging".
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from diloco.errors import DilocoError
from diloco.island.exchange.calls import ExchangeRules, FragmentCalls, LinkParts, SyncerCalls
from diloco.island.exchange.checkpoint_state import FragmentCheckpoint, LaneCheckpoint, StateLayout
from diloco.island.exchange.contributions import Contributions, Send
from diloco.island.exchange.entry import FragmentEntry
from diloco.island.exchange.fragment_state import IslandFragment, bit_sums
from diloco.island.exchange.retried_calls import SyncerReach
from diloco.island.exchange.staging import Stager
from diloco.island.exchange.syncer_link import SyncerLink
from diloco.island.lanes.place import LanePlace
from diloco.outer.fragments import Plan
from diloco.protocol.island.ledger import Outstanding
from diloco.protocol.island.votes import FragmentView
from diloco.protos.control_pb2 import Grant
from diloco.tasks import Tasks, wait_for
from diloco.telemetry.events import AnchorMended, Event
from diloco.transport.contracts import Transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SyncerConnection:
    """The transports to one syncer, and the fragments that it has."""

    fragment_ids: Sequence[int]
    control: Transport
    data: Transport


class Exchange:
    """One rank's exchange with the syncers; it polls from `enter` or `restore` until `stop`.

    It follows the fragments of which it carries lanes, as the leader all: asks their syncers about
    them, and stages them. What the island needs of others its other ranks know (`Agreement`).
    `failure` is set once, when the rank cannot go on; everything after it is void. `step_s` is what
    the training thread says of its recent inner steps, in seconds; 0: not known yet. `num_heard`
    counts the words of `coordinator_answered`. `layout` names the tensors of a checkpoint.
    """

    def __init__(
        self,
        plan: Plan,
        lanes: Mapping[int, tuple[int, ...]],
        *,
        connections: Sequence[SyncerConnection],
        grant: Grant,
        rules: ExchangeRules,
        rng: random.Random,
        on_event: Callable[[Event], None],
        is_leader: bool = True,
        find_syncers: Callable[[], Awaitable[None]] | None = None,
        place: LanePlace | None = None,
    ) -> None:
        """Assign only. `lanes` maps every fragment to the lanes that this rank carries.

        Each fragment is that of one of the `connections`. `is_leader`: of the island's ranks.
        `find_syncers` asks which of them each fragment is that of now, and has `reassign` called.
        `place` is that of the lanes; None: the CPU, in this loop.
        """
        self.rules = rules
        self._place = place or LanePlace()
        self.layout = StateLayout(plan, lanes, rules.uplink_codec, rules.error_feedback)
        self._plan = plan
        self._grant = grant
        self._on_event = on_event
        self._fragments = {
            p: IslandFragment(p, tuple(lanes[p]), is_followed=is_leader or bool(lanes[p]))
            for p in sorted(lanes)
        }
        self._views = {p: fragment.view() for p, fragment in self._fragments.items()}
        self._tasks = Tasks(self._show)
        self._reach = SyncerReach()
        self._find_syncers, self._rng = find_syncers, rng
        to = [self._calls_to(each, rng) for each in connections]
        syncers = dict(
            sorted(
                (p, calls)
                for each, calls in zip(connections, to, strict=True)
                for p in each.fragment_ids
            )
        )
        self._calls = FragmentCalls(grant, syncers)
        parts = LinkParts(plan, grant, rules, self._calls, self._tasks, on_event, self._place)
        self._contributions, self._stager = Contributions(parts), Stager(parts)
        followed = {p: each for p, each in self._fragments.items() if each.is_followed}
        self._entry = FragmentEntry(parts, followed)
        self._links = [
            SyncerLink(
                calls,
                parts,
                {p: each for p, each in followed.items() if syncers[p] is calls},
                lambda: self.step_s,
                contributions=self._contributions,
                stager=self._stager,
                entry=self._entry,
                on_lacking=self._look_for_syncers,
            )
            for calls in to
        ]
        self._pin: tuple[int, Sequence[int]] = (-1, ())
        self.step_s = 0.0
        self.num_heard = 0

    def _calls_to(self, connection: SyncerConnection, rng: random.Random) -> SyncerCalls:
        return SyncerCalls(
            connection.control,
            connection.data,
            self._grant,
            rpc_deadline_s=self.rules.rpc_deadline_s,
            policy=self.rules.policy,
            rng=rng,
            reach=self._reach,
            on_event=self._on_event,
        )

    # -- read by the training thread -----------------------------------------------------------

    @property
    def failure(self) -> DilocoError | None:
        """Why this rank cannot go on, once it cannot."""
        return self._tasks.failure

    def view(self, fragment_id: int) -> FragmentView:
        """Return what this rank knows of a fragment now."""
        return self._views[fragment_id]

    def anchor(self, fragment_id: int) -> Mapping[int, Tensor]:
        """Return the lanes of `view().anchor_version`."""
        return dict(self._fragments[fragment_id].anchor)

    def staged(self, fragment_id: int) -> Mapping[int, Tensor]:
        """Return the verified lanes of `view().staged_version`."""
        return self._fragments[fragment_id].staged

    def staged_change(self, fragment_id: int) -> float:
        """Return the largest change that what is staged makes to a value of the anchor."""
        return self._fragments[fragment_id].staged_change

    def change_of_sent(self, fragment_id: int) -> dict[int, Tensor]:
        """Return by lane how what is staged differs from what was sent, as it is decoded.

        Launched in the stream of this thread, and neither waited for.
        """
        return self._fragments[fragment_id].change_of_sent(
            self._plan.fragments[fragment_id],
            self.rules.uplink_codec,
            self.rules.error_feedback_decay,
            self._place,
        )

    def calls_of(self, fragment_id: int) -> SyncerCalls:
        """Return the connection to the syncer of a fragment."""
        return self._calls.of(fragment_id)

    @property
    def unsound(self) -> tuple[int, str]:
        """Inner step of the last send whose values could not be right, and why; -1: of none."""
        return self._contributions.unsound_at, self._contributions.unsound

    @property
    def island(self) -> str:
        """Whose exchange it is."""
        return self._grant.island

    @property
    def incarnation(self) -> int:
        """Of this start of the island."""
        return self._grant.incarnation

    @property
    def pinned_step(self) -> int:
        """Inner step of the last `pin`, once all syncers have done it; -1 before."""
        return min(link.pinned_step for link in self._links)

    @property
    def moved(self) -> list[tuple[int, int]]:
        """Bytes sent to each syncer so far, and received from it."""
        return [link.calls.moved for link in self._links]

    @property
    def bytes_up(self) -> int:
        """Bytes sent so far."""
        return sum(up for up, _ in self.moved)

    @property
    def bytes_down(self) -> int:
        """Bytes received so far."""
        return sum(down for _, down in self.moved)

    @property
    def peers(self) -> list[str]:
        """Where each syncer is."""
        return [link.calls.peer for link in self._links]

    @property
    def failed_calls(self) -> list[int]:
        """Attempts of calls to each syncer that broke so far."""
        return [link.calls.num_failed for link in self._links]

    # -- called in the loop ----------------------------------------------------------------------

    def enter(self, own: Mapping[int, Mapping[int, Tensor]]) -> None:
        """Begin to poll and enter the run: found version 0 of it, or return to what is published.

        Done when every view has an anchor version. A failure becomes `failure`.
        """
        self._start()
        self._tasks.spawn(self._enter(own))

    def restore(self, fragments: Sequence[FragmentCheckpoint], sent_by: int) -> None:
        """Begin to poll and enter the run with the state of its checkpoint.

        Done when every view has an anchor version; what was in flight waits for `resume`.

        Args:
            fragments: In plan order.
            sent_by: Incarnation that sent what was in flight.
        """
        self._start(sent_by)
        self._tasks.spawn(self._restore(fragments))

    def begin_again(self, fragment_id: int) -> None:
        """Forget the work of a checkpoint that counts already."""
        self._fragments[fragment_id].begin_again()

    def resume(self, sent: Outstanding, lanes: LaneCheckpoint) -> None:
        """Submit again what a checkpoint had in flight; ask of what is of an earlier timeline."""
        is_asking = sent.key.timeline != self._grant.timeline
        fragment = self._fragments[sent.key.fragment_id]
        self._contributions.resume(fragment, sent, lanes, is_asking=is_asking)
        self._tasks.notify()

    def follow(self, fragment_id: int, version: int) -> None:
        """Bring an entered fragment to a version that other ranks of the island entered with.

        Done when the view has an anchor version again.
        """
        fragment = self._fragments[fragment_id]
        if fragment.anchor_version >= version or not fragment.is_followed:
            return
        fragment.anchor_version = -1
        self._tasks.spawn(self._follow(fragment, version))

    async def stop(self) -> None:
        """Cancel all tasks and close all transports."""
        await self._tasks.stop()
        for link in self._links:
            await link.calls.close()

    async def wait_until_entered(self, at_most_s: float) -> None:
        """Wait until `enter` or `restore` is done (or failed)."""
        await self._tasks.wait_until(
            lambda: all(view.anchor_version >= 0 for view in self._views.values()), at_most_s
        )

    def send(self, send: Send) -> None:
        """Submit the pseudo-gradient of this rank's lanes until its outcome is known.

        The training thread goes on with the next inner step meanwhile. One that is not finite is
        declined, three in a row are a failure; so is one that lies beyond its limits, and `unsound`
        says so.
        """
        self._contributions.send(self._fragments[send.sent.key.fragment_id], send)

    async def wait_until_made(self) -> None:
        """Wait until contributions that were posted are made, and their lanes' memory is free."""
        await self._contributions.made()

    async def tried(self, fragment_id: int, into: dict[int, Tensor]) -> None:
        """Put the lanes with half of what is held back into `into`, after what was posted."""
        await self._tasks.finish(self._tried(fragment_id, into), "decode a send that is held back")

    async def _tried(self, fragment_id: int, into: dict[int, Tensor]) -> None:
        into.update(await self._contributions.tried(self._fragments[fragment_id]))

    def release(self, fragment_id: int, reason: str) -> None:
        """Submit what `send` has held back; where there is a reason not to, decline it."""
        self._contributions.release(self._fragments[fragment_id], reason)

    def decline(self, sent: Outstanding, reason: str) -> None:
        """Tell the syncer that the island has nothing valid to contribute to this attempt."""
        self._contributions.decline(self._fragments[sent.key.fragment_id], sent, reason)

    def settle(self, fragment_id: int, *, is_merged: bool, is_included: bool) -> None:
        """Forget what was outstanding, after the island agreed on its end."""
        fragment = self._fragments[fragment_id]
        self._contributions.settle(fragment_id)
        fragment.settle(is_merged=is_merged, is_included=is_included)
        self._stager.look(fragment)
        self._tasks.notify()

    def aim(self, fragment_id: int, version: int) -> None:
        """Stage the version that the ranks agreed on, whatever this one has begun."""
        self._stager.aim(self._fragments[fragment_id], version)
        self._tasks.notify()

    @property
    def news(self) -> asyncio.Event:
        """The event that the next change of a view sets; take it before looking at views."""
        return self._tasks.news

    async def wait_for_news(self, news: asyncio.Event, at_most_s: float) -> None:
        """Wait for news of any kind (announced, staged, ended, failed), or for time to pass."""
        await wait_for(news, at_most_s)

    async def wait_for_end(self, fragment_id: int, at_most_s: float) -> None:
        """Wait until what is outstanding has ended for this rank (staged, expired, failed)."""
        await self._tasks.wait_until(lambda: self.view(fragment_id).has_ended, at_most_s)

    async def capture(self, into: dict[int, LaneCheckpoint]) -> None:
        """Put the state of every fragment's lanes into `into`, after what was posted before.

        An error becomes `failure`, of which the other ranks learn.
        """
        await self._tasks.finish(self._capture(into), "take the state of lanes for a checkpoint")

    async def _capture(self, into: dict[int, LaneCheckpoint]) -> None:
        await self._contributions.made()
        for p, fragment in self._fragments.items():
            for lane_id in await self._place.run(fragment.flipped):
                # A start that goes on from this could not tell.
                self._contributions.forget(fragment, lane_id)
            captured = functools.partial(
                fragment.captured,
                self._plan.fragments[p],
                self.rules.uplink_codec,
                error_feedback=self.rules.error_feedback,
            )
            into[p] = await self._place.run(captured)

    async def verify_anchors(self) -> None:
        """Hold all anchors against their digests; what memory has changed is fetched again."""
        await self._tasks.finish(self._verify_anchors(), "verify anchors")

    async def _verify_anchors(self) -> None:
        for p, fragment in self._fragments.items():
            for lane_id in await self._entry.verify(fragment):
                self._on_event(AnchorMended(p, fragment.anchor_version, lane_id))

    def pin(self, inner_step: int, versions: Sequence[int]) -> None:
        """Have the syncers keep these versions, durably, for the run checkpoint of a step.

        Done when `pinned_step` is that step.
        """
        self._pin = inner_step, versions
        for link in self._links:
            link.begin_pin(inner_step, versions)

    async def wait_until_pinned(self, inner_step: int, at_most_s: float) -> None:
        """Wait until `pin` is done (or failed)."""
        await self._tasks.wait_until(lambda: self.pinned_step == inner_step, at_most_s)

    def fail(self, error: DilocoError) -> None:
        """Stop being able to go on; the first error stays."""
        self._tasks.fail(error)

    def coordinator_answered(self) -> None:
        """Record that this island reaches the coordinator: who is away is waited for longer."""
        self.num_heard += 1
        self._reach.answered("coordinator")

    # -- entering the run ------------------------------------------------------------------------

    async def _enter(self, own: Mapping[int, Mapping[int, Tensor]]) -> None:
        entry = self._entry
        # A version that one syncer has lost does not hold up the other fragments.
        await entry.until_steady(own, but_damaged=True)
        while True:
            await entry.take(own)
            if not entry.waits_for_repair:
                break
            self._tasks.notify()
            await entry.until_steady(own)
        self._entered()

    async def _follow(self, fragment: IslandFragment, version: int) -> None:
        await self._entry.follow(fragment, version)
        self._entered()

    async def _restore(self, fragments: Sequence[FragmentCheckpoint]) -> None:
        await self._entry.until_whole()
        for fragment, restored in zip(self._fragments.values(), fragments, strict=True):
            if fragment.is_followed:
                await self._entry.check_restored(fragment, restored)
            version, lanes = restored.ledger.version, restored.lanes
            # In this loop at once: others see an anchor's version, and go on.
            sums = await self._place.run(functools.partial(bit_sums, lanes.residual))
            fragment.restore(version, lanes, sums)
        self._entered()

    def _start(self, sent_by: int = 0) -> None:
        for link in self._links:
            link.start(sent_by)

    def _entered(self) -> None:
        for fragment in self._fragments.values():
            if fragment.is_followed:
                self._stager.look(fragment)
        self._tasks.notify()

    # -- moves of fragments ----------------------------------------------------------------------

    def reassign(self, syncers: Sequence[int]) -> None:
        """Go on with each fragment at the syncer that has it now, by its place in `connections`.

        What is outstanding is sent again, with the same bytes.
        """
        changed = set[int]()
        for (p, fragment), n in zip(self._fragments.items(), syncers, strict=False):
            before, calls = self._calls.of(p), self._links[n].calls
            if before is calls:
                continue
            logger.info("fragment %d has moved to syncer %d", p, n)
            for number, link in enumerate(self._links):
                if link.fragments.pop(p, None) is not None or number == n:
                    changed.add(number)
            if fragment.is_followed:
                self._links[n].fragments[p] = fragment
            fragment.has_moved()
            self._calls.move(p, calls)
        for number in changed:
            self._links[number].poll_again()
            if self._pin[0] != self.pinned_step:
                self._links[number].begin_pin(*self._pin)
        if changed:
            self._tasks.notify()

    async def _look_for_syncers(self, wait_s: float) -> None:
        """Find out where fragments are, in about so many seconds: ranks of all islands ask."""
        await asyncio.sleep(wait_s * self._rng.uniform(0.5, 1.0))
        if self._find_syncers is not None:
            try:
                await self._find_syncers()
            except DilocoError as error:  # the coordinator is away
                logger.warning("where fragments are is not known: %s", error)

    # -- plumbing --------------------------------------------------------------------------------

    def _show(self) -> None:
        """Show the training thread how things stand."""
        for p, fragment in self._fragments.items():
            self._views[p] = fragment.view()
