"""A carrier's side of the rounds: poll (`syncer_link`), contribute, stage, settle.

Runs in one event loop (the IO thread of a rank, or a virtual clock); never issues a collective,
never touches a parameter or an anchor. The training thread posts `send`, `decline`, `settle` and
the like, and reads `view`, which is replaced as a whole; nothing else crosses between the two.

Source: PROTOCOL.md, "Agreement of ranks", "Contributions" and "Staging".
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from diloco.errors import DilocoError
from diloco.island.exchange.calls import ExchangeRules, LinkParts, SyncerCalls
from diloco.island.exchange.checkpoint_state import FragmentCheckpoint, LaneCheckpoint, StateLayout
from diloco.island.exchange.entry import check_restored
from diloco.island.exchange.fragment_state import IslandFragment
from diloco.island.exchange.retried_calls import SyncerReach
from diloco.island.exchange.syncer_link import SyncerLink
from diloco.outer.fragments import Plan
from diloco.protocol.island.ledger import Outstanding
from diloco.protocol.island.votes import FragmentView
from diloco.protos.control_pb2 import Grant
from diloco.tasks import Tasks, wait_for
from diloco.telemetry.events import AnchorMended, Event
from diloco.transport.contracts import Transport

#: Limits of what is sent where nothing is known of the steps that made it.
ANYWHERE = (math.inf, 0.0)


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
    ) -> None:
        """Assign only. `lanes` maps every fragment to the lanes that this rank carries.

        Each fragment is that of one of the `connections`. `is_leader`: of the island's ranks.
        """
        self.rules = rules
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
        self._links = [self._link(each, rng) for each in connections]
        self._link_of = {
            p: link
            for each, link in zip(connections, self._links, strict=True)
            for p in each.fragment_ids
        }
        self.step_s = 0.0
        self.num_heard = 0

    def _link(self, connection: SyncerConnection, rng: random.Random) -> SyncerLink:
        rules, grant = self.rules, self._grant
        calls = SyncerCalls(
            connection.control,
            connection.data,
            grant,
            rpc_deadline_s=rules.rpc_deadline_s,
            policy=rules.policy,
            rng=rng,
            reach=self._reach,
            on_event=self._on_event,
        )
        parts = LinkParts(self._plan, grant, rules, calls, self._tasks, self._on_event)
        own = {p: self._fragments[p] for p in sorted(connection.fragment_ids)}
        followed = {p: fragment for p, fragment in own.items() if fragment.is_followed}
        return SyncerLink(parts, followed, lambda: self.step_s)

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

    def change_of_sent(self, fragment_id: int) -> dict[int, Tensor]:
        """Return by lane how what is staged differs from what was sent, as it is decoded."""
        return self._fragments[fragment_id].change_of_sent(
            self._plan.fragments[fragment_id],
            self.rules.uplink_codec,
            self.rules.error_feedback_decay,
        )

    def calls_of(self, fragment_id: int) -> SyncerCalls:
        """Return the connection to the syncer of a fragment."""
        return self._link_of[fragment_id].calls

    @property
    def unsound(self) -> tuple[int, str]:
        """Inner step of the last send whose values could not be right, and why; -1: of none."""
        found = (link.contributions for link in self._links)
        return max((each.unsound_at, each.unsound) for each in found)

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
    def bytes_up(self) -> int:
        """Bytes sent so far."""
        return sum(link.calls.bytes_up for link in self._links)

    @property
    def bytes_down(self) -> int:
        """Bytes received so far."""
        return sum(link.calls.bytes_down for link in self._links)

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
        p = sent.key.fragment_id
        contributions = self._link_of[p].contributions
        contributions.resume(self._fragments[p], sent, lanes, is_asking=is_asking)
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

    def send(
        self,
        sent: Outstanding,
        local: Mapping[int, Tensor],
        limits: tuple[float, float] = ANYWHERE,
        is_tried: bool = False,
    ) -> None:
        """Submit the pseudo-gradient of this rank's lanes until its outcome is known.

        Here and not in the training thread, which goes on with the next inner step meanwhile. One
        that is not finite is declined, three in a row are a failure; so is one that lies beyond
        its limits, and `unsound` says so.

        Args:
            sent: What is sent.
            local: Lane id -> local values at the send; overwritten, and free when this returns.
            limits: How far from their anchor values may lie (`farthest`).
            is_tried: Whether it is held back until `release`.
        """
        p = sent.key.fragment_id
        contributions = self._link_of[p].contributions
        contributions.send(self._fragments[p], sent, local, limits, is_tried=is_tried)

    async def tried(self, fragment_id: int, into: dict[int, Tensor]) -> None:
        """Put the lanes with half of what is held back into `into`, after what was posted."""
        link = self._link_of[fragment_id]
        into.update(link.contributions.tried(self._fragments[fragment_id]))

    def release(self, fragment_id: int, reason: str) -> None:
        """Submit what `send` has held back; where there is a reason not to, decline it."""
        self._link_of[fragment_id].contributions.release(self._fragments[fragment_id], reason)

    def decline(self, sent: Outstanding, reason: str) -> None:
        """Tell the syncer that the island has nothing valid to contribute to this attempt."""
        p = sent.key.fragment_id
        self._link_of[p].contributions.decline(self._fragments[p], sent, reason)

    def settle(self, fragment_id: int, *, is_merged: bool, is_included: bool) -> None:
        """Forget what was outstanding, after the island agreed on its end."""
        fragment, link = self._fragments[fragment_id], self._link_of[fragment_id]
        link.contributions.settle(fragment_id)
        fragment.settle(is_merged=is_merged, is_included=is_included)
        link.stager.look(fragment)
        self._tasks.notify()

    def aim(self, fragment_id: int, version: int) -> None:
        """Stage the version that the ranks agreed on, whatever this one has begun."""
        self._link_of[fragment_id].stager.aim(self._fragments[fragment_id], version)
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
        """Put the state of every fragment's lanes into `into`, after what was posted before."""
        for p, fragment in self._fragments.items():
            for lane_id in fragment.lanes:  # a start that goes on from this could not tell
                self._link_of[p].contributions.forget_flipped(fragment, lane_id)
            into[p] = fragment.captured(
                self._plan.fragments[p],
                self.rules.uplink_codec,
                error_feedback=self.rules.error_feedback,
            )

    async def verify_anchors(self) -> None:
        """Hold all anchors against their digests; what memory has changed is fetched again."""
        try:
            for p, fragment in self._fragments.items():
                for lane_id in await self._link_of[p].entry.verify(fragment):
                    self._on_event(AnchorMended(p, fragment.anchor_version, lane_id))
        except DilocoError as error:
            self._tasks.fail(error)

    def pin(self, inner_step: int, versions: Sequence[int]) -> None:
        """Have the syncers keep these versions, durably, for the run checkpoint of a step.

        Done when `pinned_step` is that step.
        """
        for link in self._links:
            link.pinned_step = -1
            self._tasks.spawn(link.pin(inner_step, versions))

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
        entries = [link.entry for link in self._links]
        # A version that one syncer has lost does not hold up the other fragments.
        await asyncio.gather(*(e.until_steady(own, but_damaged=True) for e in entries))
        while True:
            for entry in entries:
                await entry.take(own)
            if not any(entry.waits_for_repair for entry in entries):
                break
            self._tasks.notify()
            await asyncio.gather(*(entry.until_steady(own) for entry in entries))
        self._entered()

    async def _follow(self, fragment: IslandFragment, version: int) -> None:
        await self._link_of[fragment.fragment_id].entry.follow(fragment, version)
        self._entered()

    async def _restore(self, fragments: Sequence[FragmentCheckpoint]) -> None:
        await asyncio.gather(*(link.entry.until_whole() for link in self._links))
        for fragment, restored in zip(self._fragments.values(), fragments, strict=True):
            if fragment.is_followed:
                check_restored(fragment, restored)
            fragment.restore(restored.ledger.version, restored.lanes)
        self._entered()

    def _start(self, sent_by: int = 0) -> None:
        for link in self._links:
            link.start(sent_by)

    def _entered(self) -> None:
        for link in self._links:
            link.look()
        self._tasks.notify()

    # -- plumbing --------------------------------------------------------------------------------

    def _show(self) -> None:
        """Show the training thread how things stand."""
        for p, fragment in self._fragments.items():
            self._views[p] = fragment.view()
