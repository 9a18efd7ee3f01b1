"""Decides which calls a syncer answers, and which islands take part in its next rounds.

Every incarnation is durable before anything of it is accepted, and the coordinator's orders are
durable before they count, so that a fenced start stays fenced over a restart. Only the first call
of a start waits for the disk; later calls renew the lease in memory. While the coordinator is away
its last orders count, and no round is opened for an island that has not called for the length of a
lease. Leases are measured by the clock of this process; time in which the process slept counts for
no island. After a restart no round opens before all live islands have called, for at most a lease:
an island that is reconnecting would miss what opens without it.

Source: PROTOCOL.md, "Durable before answered", "Leases and clocks", "Coordinator away" and
"Restart of a syncer".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol

from diloco.durable import DiskFull
from diloco.errors import ConfigError
from diloco.loop_clock import loop_now
from diloco.protocol.rounds.orders import Orders
from diloco.protocol.rounds.terms import Roster
from diloco.protocol.run.leases import COUNTED_SHARE, Leases
from diloco.protos.control_pb2 import Grant
from diloco.refusals import Cause
from diloco.syncer.rules import SyncerRules
from diloco.syncer.worker import Worker
from diloco.telemetry.syncer_meter import SyncerMeter
from diloco.transport.contracts import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

#: What is said to a start whose grant does not count.
NOT_CURRENT = "the grant is not valid for this run, or a newer start has joined"
#: Seconds from one look to the next, at least: what rounding leaves of a lease may be no time.
_LEAST_WAIT_S = 0.01


class IncarnationStore(Protocol):
    """Durable highest incarnation of each island."""

    def load(self) -> dict[str, int]:
        """Return what was stored."""

    def store(self, incarnations: dict[str, int]) -> None:
        """Write durably."""


class OrderStore(Protocol):
    """The coordinator's last orders, durably, and what they make of the rules."""

    def load(self) -> Orders:
        """Return what was stored."""

    def store(self, orders: Orders) -> None:
        """Write durably."""

    def rules(self, orders: Orders) -> SyncerRules:
        """Give the rules of the run with what an operator has set since its start.

        Raises:
            ConfigError: If that does not fit the configuration.
        """


@dataclass(frozen=True, slots=True)
class Listeners:
    """Callbacks for what changes; none may block.

    Args:
        on_grant: A new start of an island, by name and incarnation.
        on_roster: Who may take part in the next openings.
        on_rules: Rules that count from the next openings on.
        spawn: Runs a piece of work next to the handlers; its failure ends the process.
        on_full: Orders found no room on the disk.
    """

    on_grant: Callable[[str, int], None]
    on_roster: Callable[[Roster], None]
    on_rules: Callable[[SyncerRules], None]
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    on_full: Callable[[], None]


class CallAdmission:
    """Grants, orders and silence of one start of a syncer.

    `rules` are those of now, `roster` says who may take part in the next openings, and `num_calls`
    counts the calls that were accepted.
    """

    def __init__(
        self,
        rules: SyncerRules,
        incarnations: IncarnationStore,
        orders: OrderStore | None,
        *,
        is_granted: Callable[[Grant], bool],
        worker: Worker,
        meter: SyncerMeter,
        listeners: Listeners,
    ) -> None:
        """Assign only; `start` reads what is durable.

        Without a store of `orders` those that are heard are kept in memory, and their policy is
        not applied.
        """
        self.rules = rules
        self.roster = Roster(rules.islands)
        self.incarnations: dict[str, int] = {}
        self.num_calls = 0
        self._incarnation_store = incarnations
        self._order_store = orders
        self._is_granted = is_granted
        self._worker = worker
        self._meter = meter
        self._listeners = listeners
        self._granting, self._ordering = asyncio.Lock(), asyncio.Lock()
        self._orders = Orders()
        self._newest_orders: Orders | None = None  # what is heard first counts, whatever was kept
        self._has_warned = False
        self._leases = Leases(rules.lease_s)
        self._unheard: set[str] = set()  # that were here before this start, and have not called yet
        self._alarm: asyncio.TimerHandle | None = None
        self._founder = rules.islands[0]

    async def start(self) -> None:
        """Read what is durable; islands that were here have a lease to be heard of again."""
        self.incarnations = await self._worker.run(self._incarnation_store.load)
        self._leases.restarted(self.incarnations, loop_now())
        self._unheard = set(self.incarnations)
        if self._order_store is not None:
            self._orders = await self._worker.run(self._order_store.load)
            self._take_policy()
        self._take_roster()

    def stop(self) -> None:
        """Let no more time pass."""
        if self._alarm is not None:
            self._alarm.cancel()

    # -- whose calls count -----------------------------------------------------------------------

    async def accept(self, grant: Grant, protocol_version: int) -> bool:
        """Check a grant; make its incarnation durable before anything of it is accepted."""
        if protocol_version != PROTOCOL_VERSION:
            self._meter.refusal("", Cause.PROTOCOL_VERSION)
            return False
        # Where islands come and go, anyone who holds a grant may ask; the roster says who counts.
        is_stranger = self._has_fixed_members and grant.island not in self.rules.islands
        if not self._is_granted(grant) or is_stranger:
            self._meter.refusal("", Cause.GRANT)
            return False
        if grant.timeline != self.rules.timeline:
            self._meter.refusal(grant.island, Cause.TIMELINE)
            return False
        island = grant.island
        if grant.incarnation > self.incarnations.get(island, 0):
            await self._keep_incarnation(island, grant.incarnation)
        if not self.is_current(grant):
            self._meter.refusal(island, Cause.INCARNATION)
            return False
        self.num_calls += 1
        self._leases.looked(loop_now())
        self._leases.renewed(island, loop_now())
        if island in self._unheard or island not in self.roster.live:
            self._unheard.discard(island)
            self._take_roster()
        return True

    async def _keep_incarnation(self, island: str, incarnation: int) -> None:
        async with self._granting:
            if incarnation > self.incarnations.get(island, 0):  # or another call was quicker
                updated = {**self.incarnations, island: incarnation}
                await self._worker.run(lambda: self._incarnation_store.store(updated))
                self.incarnations = updated
                self._listeners.on_grant(island, incarnation)

    def is_current(self, grant: Grant) -> bool:
        """Whether this start, of an accepted grant, is the newest of its island and not fenced."""
        is_newest = grant.incarnation == self.incarnations.get(grant.island)
        return is_newest and grant.incarnation >= self.roster.fenced.get(grant.island, 0)

    def founder(self) -> str:
        """Name the island that founds version 0; empty while too few are here.

        The first of those that a round would have, for as long as it lives.
        """
        here = [name for name in self.roster.live if name in self.incarnations]
        least = self.rules.min_members
        if len(here) < max(len(self.roster.live) if least is None else least, 1):
            return ""
        if self._founder not in here:
            self._founder = here[0]
        return self._founder

    # -- what the coordinator orders -------------------------------------------------------------

    def set_orders(self, orders: Orders) -> None:
        """Take the coordinator's orders: they count once they are durable."""
        if orders != self._newest_orders:  # most reports bring nothing new
            self._newest_orders = orders
            self._listeners.spawn(self._set_policy(orders))

    async def _set_policy(self, orders: Orders) -> None:
        async with self._ordering:
            store = self._order_store
            try:
                if store is not None:
                    await self._worker.run(lambda: store.store(orders))
            except OSError as error:
                if isinstance(error, DiskFull):
                    self._listeners.on_full()
                if not self._has_warned:
                    self._has_warned = True
                    logger.error("orders cannot be kept, those before them stay: %s", error)
                self._newest_orders = self._orders  # the next report brings them again
                return
            if self._has_warned:
                self._has_warned = False
                logger.info("the newest orders are kept")
            before, self._orders = self._orders, orders
            if orders.policy_json != before.policy_json:
                self._take_policy()
            self._take_roster()

    def _take_policy(self) -> None:
        """Apply what an operator has set from the next openings on."""
        orders = self._orders
        if self._order_store is None or not orders.policy_json:
            return
        try:
            rules = self._order_store.rules(orders)
            self.rules.publication.check_successor(rules.publication)
        except ConfigError as error:
            logger.error("policy is not applied, revision=%d: %s", orders.policy_revision, error)
            return
        self.rules = rules
        logger.info("policy counts from the next openings, revision=%d", orders.policy_revision)
        self._listeners.on_rules(self.rules)

    @property
    def _has_fixed_members(self) -> bool:
        return self.rules.min_members is None

    def _take_roster(self) -> None:
        """Find who may take part, tell it when that has changed, and set the next alarm.

        That is who the coordinator says lives, less those from whom nothing was heard for a
        lease: it may be away, and who is frozen does not say so.
        """
        rules, leases, now = self.rules, self._leases, loop_now()
        roster = self._orders.roster or Roster(rules.islands)
        if not self._has_fixed_members:
            leases.term_s = rules.lease_s
            leases.looked(now)
            silent = leases.expired(roster.live, now)
            live = tuple(i for i in roster.live if i not in silent)
            roster = replace(roster, live=live, is_gathering=not self._unheard.isdisjoint(live))
        if roster != self.roster:
            self._say(roster)
            self.roster = roster
            self._listeners.on_roster(roster)
        self.stop()
        if not self._has_fixed_members:
            left_s = [leases.left_s(island, now) for island in roster.live]
            wake_s = max(_LEAST_WAIT_S, min([COUNTED_SHARE * rules.lease_s, *left_s]))
            self._alarm = asyncio.get_running_loop().call_at(now + wake_s, self._take_roster)

    def _say(self, roster: Roster) -> None:
        before, after = set(self.roster.live), set(roster.live)
        if before != after or roster.is_paused != self.roster.is_paused:
            logger.info(
                "the next rounds are for %s; new: %s; gone: %s%s",
                ", ".join(roster.live) or "nobody",
                ", ".join(sorted(after - before)) or "nobody",
                ", ".join(sorted(before - after)) or "nobody",
                "; none opens, an operator has paused the run" if roster.is_paused else "",
            )
        if roster.is_gathering and not self.roster.is_gathering:
            awaited = ", ".join(sorted(self._unheard.intersection(roster.live)))
            logger.info(
                "after a restart no round opens before these have called, at most %g s: %s",
                self.rules.lease_s,
                awaited,
            )
