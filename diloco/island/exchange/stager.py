"""Which published version a carrier stages: the next one, or the newest, or what was agreed.

Belongs to the exchange and its loop. In a scheduled run every version is merged, one after the
other; on arrival a rank begins with the newest that it hears of, and turns to the one that its
leader names (`pace`). One version of a fragment is staged at a time.

Source: PROTOCOL.md, "Runs on arrival" and "Staging".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from diloco.island.exchange.calls import SyncerCalls
from diloco.island.exchange.fragment_state import IslandFragment
from diloco.island.exchange.staging import VersionGone, stage_lanes
from diloco.outer.fragments import Plan
from diloco.tasks import Tasks
from diloco.telemetry.events import Event

logger = logging.getLogger(__name__)


class Stager:
    """Stages the versions of one rank's lanes; `may_leap`: whether versions may be left out."""

    def __init__(
        self,
        plan: Plan,
        calls: SyncerCalls,
        tasks: Tasks,
        *,
        may_leap: bool,
        on_event: Callable[[Event], None],
    ) -> None:
        """Assign only."""
        self._plan = plan
        self._calls = calls
        self._tasks = tasks
        self._may_leap = may_leap
        self._on_event = on_event
        self._under_way: dict[int, asyncio.Task[None]] = {}

    def look(self, carried: IslandFragment) -> None:
        """Begin with what is to be staged next, if it is published and nothing is staged."""
        anchored = carried.anchor_version
        if anchored < 0 or carried.staging_version > anchored:
            return
        version = self._next(carried)
        if version <= max(anchored, carried.gone_version) or version > carried.state.version:
            return
        carried.staging_version = version
        self._under_way[carried.fragment_id] = self._tasks.spawn(self._stage(carried, version))

    def aim(self, carried: IslandFragment, version: int) -> None:
        """Stage this version, whatever was begun; a rank that has not heard of it waits for it."""
        carried.aimed_version = version
        if carried.staging_version == version:
            return
        if (other := self._under_way.pop(carried.fragment_id, None)) is not None:
            other.cancel()
        carried.staged, carried.staged_version, carried.staging_version = {}, -1, -1
        self.look(carried)

    def _next(self, carried: IslandFragment) -> int:
        if not self._may_leap:
            return carried.anchor_version + 1
        is_aimed = carried.aimed_version > carried.anchor_version
        return carried.aimed_version if is_aimed else carried.state.version

    async def _stage(self, carried: IslandFragment, version: int) -> None:
        heard = carried.heard.get(version)
        try:
            staged = await stage_lanes(
                self._calls,
                carried.anchor,
                fragment=self._plan.fragments[carried.fragment_id],
                base=carried.anchor_version,
                version=version,
                digests=() if heard is None else tuple(heard.lane_digests),
                codec="" if heard is None else heard.payload_codec,
                on_event=self._on_event,
            )
        except VersionGone as gone:
            if not self._may_leap:
                raise
            logger.info("a newer version is staged instead: %s", gone)
            carried.gone_version, carried.staging_version = version, -1
            self.look(carried)
        else:
            carried.staged, carried.staged_version = staged, version
        self._tasks.notify()
