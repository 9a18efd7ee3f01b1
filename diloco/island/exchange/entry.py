"""How a carrier enters a run: it founds version 0, takes what is published, or is checked.

An island of a scheduled run enters when no version can be published without it: every round is
open, or the fragment is flushed. On arrival rounds go on without it: it enters with the newest
version that it knows of, and follows from there. Decides no round, touches no parameter.

Source: PROTOCOL.md, "Version 0" and "Return of an island".
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping, Sequence

from torch import Tensor

from diloco.compression.base import to_bytes
from diloco.errors import CodecError, FingerprintMismatch
from diloco.island.exchange.calls import LinkParts
from diloco.island.exchange.checkpoint_state import FragmentCheckpoint
from diloco.island.exchange.fragment_state import IslandFragment
from diloco.island.exchange.staging import (
    VersionGone,
    digests_of,
    fetch_lane,
    largest_change_of,
)
from diloco.protos import fragment_pb2 as wire
from diloco.tasks import wait_for
from diloco.transport.contracts import Buffer

logger = logging.getLogger(__name__)

_TELL_WAITING_S = 30.0


class FragmentEntry:
    """One rank's join, for the fragments that its exchange carries."""

    def __init__(self, parts: LinkParts, fragments: Mapping[int, IslandFragment]) -> None:
        """Assign only."""
        self._calls = parts.calls
        self._place = parts.place
        self._fragments = fragments
        self._tasks = parts.tasks
        self._on_arrival = parts.rules.on_arrival
        # Fragment -> what the syncer asked for last and was given, or was not held here then.
        self._given: dict[int, tuple[int, int]] = {}
        self._lacked: dict[int, tuple[int, int]] = {}

    def give(self, fragment: IslandFragment) -> None:
        """Upload what this rank holds of a version that the syncer has lost, where it asks for it.

        Once each time that it asks, which it does again after a restart; what it refuses is an
        operator's matter.
        """
        state, p = fragment.state, fragment.fragment_id
        asked = self._calls.of(p).epoch, state.asked
        if not (state.is_damaged and state.asked) or self._given.get(p) == asked:
            return
        lanes = fragment.lanes_of(state.wanted_version)
        if not lanes and fragment.lanes:  # it may be staged yet
            if self._lacked.get(p) != asked:
                self._lacked[p] = asked
                logger.error(
                    "fragment %d cannot be repaired from here: version %d is asked for, %d is held",
                    p, state.wanted_version, max(fragment.anchor_version, fragment.staged_version),
                )  # fmt: skip
            return
        self._given[p] = asked
        for lane_id, values in lanes.items():
            self._tasks.spawn(self._give(p, state.wanted_version, lane_id, values))

    async def _give(self, fragment_id: int, version: int, lane_id: int, values: Tensor) -> None:
        payload = await self._payload(values)
        ack = await self._calls.upload(fragment_id, lane_id, payload, published=version)
        if ack.is_fenced:
            raise self._calls.fenced(ack.message)
        if not ack.is_accepted:
            logger.error("fragment %d not repaired from here: %s", fragment_id, ack.message)

    async def take(self, own: Mapping[int, Mapping[int, Tensor]]) -> None:
        """Take this rank's anchors: `own` lanes where they are as published, else the published.

        After `until_steady`, of all fragments that are ready and were not taken yet.

        Args:
            own: Fragment -> lane -> the island's own values.

        Raises:
            DilocoError: If a version cannot be had.
        """
        for p, fragment in self._fragments.items():
            if fragment.anchor_version >= 0 or not self._is_ready(fragment):
                continue
            await self._take_published(fragment, own[p])
            fragment.is_overwritten = any(fragment.anchor[i] is not own[p][i] for i in own[p])

    async def follow(self, fragment: IslandFragment, version: int) -> None:
        """Bring an entered fragment to a version that another rank of the island entered with.

        Or to a newer one, where that is gone: the ranks compare once more.

        Raises:
            DilocoError: If it cannot be had.
        """
        while fragment.state.version < version:
            await wait_for(self._tasks.news, _TELL_WAITING_S)
        await self._take_published(fragment, dict(fragment.anchor))
        fragment.is_overwritten = True

    async def verify(self, fragment: IslandFragment) -> list[int]:
        """Hold the lanes of the anchor against their digests; returns those fetched again.

        One that the syncer has no more stays as it is: what is staged next comes as a whole.

        Raises:
            DilocoError: If this rank cannot go on.
        """
        mended = []
        for lane_id, values in fragment.anchor.items():
            digests = fragment.anchor_digests
            if not digests or not await self._differing(digests, {lane_id: values}):
                continue
            p, version = fragment.fragment_id, fragment.anchor_version
            try:
                fetched = await fetch_lane(
                    self._calls,
                    p,
                    version,
                    lane_id,
                    numel=values.numel(),
                    digest=digests[lane_id],
                    place=self._place,
                )
            except VersionGone as gone:
                logger.error("the anchor of fragment %d, lane %d, is damaged: %s", p, lane_id, gone)
                continue
            fragment.anchor = {**fragment.anchor, lane_id: fetched}
            await self._measure_staged(fragment)
            mended.append(lane_id)
        return mended

    async def _measure_staged(self, fragment: IslandFragment) -> None:
        """Find the largest change that what is staged makes to a value of the anchor."""
        staged: Mapping[int, Tensor] | None = None
        while fragment.staged is not staged:  # another is staged meanwhile
            staged = fragment.staged
            largest = functools.partial(largest_change_of, fragment.anchor, staged, self._place)
            change = await self._place.run(largest)
        fragment.staged_change = change

    async def until_steady(
        self, initial: Mapping[int, Mapping[int, Tensor]], *, but_damaged: bool = False
    ) -> None:
        """Wait until no version can be published without this island; upload what is asked for.

        Args:
            initial: Fragment -> lane -> this rank's values, to found version 0 with.
            but_damaged: Whether fragments that their syncer does not serve are not waited for.
        """
        uploads: dict[tuple[int, int], int] = {}
        while self._awaited(but_damaged=but_damaged):
            news = self._tasks.news
            for p in self._fragments.keys() & initial.keys():
                state = self._fragments[p].state
                for lane_id, values in initial[p].items():
                    wanted = state.wants_initial and not state.is_founded
                    epoch = self._calls.of(p).epoch
                    if wanted and uploads.get((p, lane_id)) != epoch:
                        uploads[p, lane_id] = epoch
                        self._tasks.spawn(self._upload(p, lane_id, values))
            await wait_for(news, _TELL_WAITING_S)
            if not news.is_set():
                logger.info("waiting until every island has joined and all rounds are open")

    async def until_whole(self) -> None:
        """Wait as `until_steady`, and until no fragment is damaged."""
        while any(c.state.is_damaged or not self._is_ready(c) for c in self._fragments.values()):
            await wait_for(self._tasks.news, _TELL_WAITING_S)

    def _awaited(self, *, but_damaged: bool) -> list[IslandFragment]:
        """Fragments that are still to come; where damaged ones are left out, of those too."""
        return [
            fragment
            for fragment in self._fragments.values()
            if fragment.anchor_version < 0
            and not self._is_ready(fragment)
            and not (but_damaged and fragment.state.is_damaged)
        ]

    @property
    def waits_for_repair(self) -> bool:
        """Whether a fragment cannot be entered before it is repaired."""
        return bool(self._awaited(but_damaged=False))

    def _is_ready(self, fragment: IslandFragment) -> bool:
        return fragment.state.is_founded if self._on_arrival else fragment.is_steady

    async def _upload(self, fragment_id: int, lane_id: int, values: Tensor) -> None:
        payload = await self._payload(values)
        ack = await self._calls.upload(fragment_id, lane_id, payload)
        if ack.is_fenced:
            raise self._calls.fenced(ack.message)
        if not ack.is_accepted:
            raise CodecError(f"initial parameters of fragment {fragment_id}: {ack.message}")

    async def _payload(self, values: Tensor) -> Buffer:
        # All lanes at once: not to memory that stays pinned.
        return await self._place.run(lambda: to_bytes(values.cpu()))

    async def _take_published(self, fragment: IslandFragment, own: Mapping[int, Tensor]) -> None:
        """Make the newest version the anchor; where it is gone meanwhile, the one after it."""
        while True:
            state = fragment.state
            try:
                anchor = await self._published(fragment, state, own)
            except VersionGone:
                if not self._on_arrival:
                    raise
                while fragment.state.version == state.version:
                    await wait_for(self._tasks.news, _TELL_WAITING_S)
            else:
                fragment.anchor, fragment.anchor_version = anchor, state.version
                fragment.anchor_digests = tuple(state.lane_digests)
                fragment.anchor_tokens = state.merged_tokens
                return

    async def _published(
        self, fragment: IslandFragment, state: wire.FragmentState, own: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Return a version's lanes: own ones where they are equal, the others fetched whole."""
        lanes = dict(own)
        differing = await self._differing(state.lane_digests, own)
        fetched = await asyncio.gather(
            *(
                fetch_lane(
                    self._calls,
                    fragment.fragment_id,
                    state.version,
                    lane_id,
                    numel=own[lane_id].numel(),
                    digest=state.lane_digests[lane_id],
                    place=self._place,
                )
                for lane_id in differing
            )
        )
        lanes.update(zip(differing, fetched, strict=True))
        return lanes

    async def check_restored(self, fragment: IslandFragment, restored: FragmentCheckpoint) -> None:
        """Hold a checkpoint's anchors against the version that the syncer restored.

        Raises:
            FingerprintMismatch: If they are not that version.
        """
        p, version, state = fragment.fragment_id, restored.ledger.version, fragment.state
        if state.version > version:
            return  # the others went on: what was in flight gets its outcome, the anchor follows
        differing = await self._differing(state.lane_digests, restored.lanes.anchor)
        if state.version < version or differing:
            lanes = f", and lanes {differing} of it differ" if differing else ""
            raise FingerprintMismatch(
                f"this checkpoint has version {version} of fragment {p}, the syncer has version "
                f"{state.version}{lanes}: they are not of one run checkpoint. Resume one that "
                f"all sites have: `diloco coordinator RUN.toml --resume --at STEP`"
            )

    async def _differing(self, digests: Sequence[bytes], lanes: Mapping[int, Tensor]) -> list[int]:
        """Find the lanes that are not as published."""
        own = await self._place.run(functools.partial(digests_of, lanes, self._place))
        pairs = zip(sorted(lanes), own, strict=True)
        return [lane_id for lane_id, digest in pairs if digest != digests[lane_id]]
