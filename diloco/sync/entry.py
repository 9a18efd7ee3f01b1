"""How a carrier enters a run: it founds version 0, takes what is published, or is checked.

An island of a scheduled run enters when no version can be published without it: every round is
open, or the fragment is flushed. On arrival rounds go on without it: it enters with the newest
version that it hears of, and follows from there. Decides no round, touches no parameter.

Source: protocol.md sections 4 (version 0) and 9.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from diloco.compression.base import to_bytes
from diloco.errors import CodecError, FingerprintMismatch
from diloco.outer.fragments import Plan
from diloco.rounds.publication import lane_digest
from diloco.sync.calls import SyncerCalls
from diloco.sync.captured import CapturedFragment
from diloco.sync.carried import CarriedFragment
from diloco.sync.staging import VersionGone, fetch_lane
from diloco.sync.tasks import Tasks, wait_for
from protos import fragment_pb2 as wire
from protos.control_pb2 import Grant

logger = logging.getLogger(__name__)

_TELL_WAITING_S = 30.0


class Entry:
    """One rank's way into the run, for the fragments that its exchange carries."""

    def __init__(
        self,
        plan: Plan,
        grant: Grant,
        calls: SyncerCalls,
        carried: Mapping[int, CarriedFragment],
        tasks: Tasks,
        epoch: Callable[[], int],
        *,
        on_arrival: bool = False,
    ) -> None:
        """Assign only; `epoch` gives the syncer's, by which uploads are repeated."""
        self._plan = plan
        self._grant = grant
        self._calls = calls
        self._carried = carried
        self._tasks = tasks
        self._epoch = epoch
        self._on_arrival = on_arrival
        # Fragment -> what the syncer asked for last and was given, or was not held here then.
        self._given: dict[int, tuple[int, int]] = {}
        self._lacked: dict[int, tuple[int, int]] = {}

    def give(self, carried: CarriedFragment) -> None:
        """Upload what this rank holds of a version that the syncer has lost, where it asks for it.

        Once each time that it asks, which it does again after a restart; what it refuses is an
        operator's matter.
        """
        state, p = carried.state, carried.fragment_id
        asked = self._epoch(), state.asked
        if not (state.is_damaged and state.asked) or self._given.get(p) == asked:
            return
        if carried.anchor_version != state.wanted_version:  # it may be merged yet
            if self._lacked.get(p) != asked:
                self._lacked[p] = asked
                logger.error(
                    "fragment %d cannot be repaired from here: version %d is asked for, %d is held",
                    p, state.wanted_version, carried.anchor_version,
                )  # fmt: skip
            return
        self._given[p] = asked
        for lane_id, values in carried.anchor.items():
            self._tasks.spawn(self._give(p, state.wanted_version, lane_id, values))

    async def _give(self, fragment_id: int, version: int, lane_id: int, values: Tensor) -> None:
        payload = to_bytes(values.view(torch.uint8))
        ack = await self._calls.upload(fragment_id, lane_id, payload, published=version)
        if ack.is_fenced:
            raise self._calls.fenced(ack.message)
        if not ack.is_accepted:
            logger.error("fragment %d not repaired from here: %s", fragment_id, ack.message)

    @property
    def is_return(self) -> bool:
        """Whether the run has gone on from version 0, as far as this syncer's fragments tell."""
        return any(carried.state.version > 0 for carried in self._carried.values())

    async def take(self, own: Mapping[int, Mapping[int, Tensor]], *, overwrite: bool) -> None:
        """Take this rank's anchors: `own` lanes where they are as published, else the published.

        After `until_steady`.

        Args:
            own: Fragment -> lane -> the island's own values.
            overwrite: Whether what is published replaces values that differ from it: any does
                once the run has gone on from version 0.

        Raises:
            FingerprintMismatch: If initial values differ and must not be overwritten.
            DilocoError: If a version cannot be had.
        """
        for p, carried in self._carried.items():
            if not overwrite:
                self._check_initial(carried, own[p])
            await self._take_published(carried, own[p])
            carried.is_overwritten = any(carried.anchor[i] is not own[p][i] for i in own[p])

    async def follow(self, carried: CarriedFragment, version: int) -> None:
        """Bring an entered fragment to a version that another rank of the island entered with.

        Or to a newer one, where that is gone: the ranks compare once more.

        Raises:
            DilocoError: If it cannot be had.
        """
        while carried.state.version < version:
            await wait_for(self._tasks.news, _TELL_WAITING_S)
        await self._take_published(carried, dict(carried.anchor))
        carried.is_overwritten = True

    async def until_steady(self, initial: Mapping[int, Mapping[int, Tensor]]) -> None:
        """Wait until no version can be published without this island; upload what is asked for."""
        uploads: dict[tuple[int, int], int] = {}
        while not all(map(self._is_ready, self._carried.values())):
            news = self._tasks.news
            for p in self._carried.keys() & initial.keys():
                state = self._carried[p].state
                for lane_id, values in initial[p].items():
                    wanted = state.wants_initial and not state.is_founded
                    if wanted and uploads.get((p, lane_id)) != self._epoch():
                        uploads[p, lane_id] = self._epoch()
                        self._tasks.spawn(self._upload(p, lane_id, values))
            await wait_for(news, _TELL_WAITING_S)
            if not news.is_set():
                logger.info("waiting until every island has joined and all rounds are open")

    def _is_ready(self, carried: CarriedFragment) -> bool:
        return carried.state.is_founded if self._on_arrival else carried.is_steady

    async def _upload(self, fragment_id: int, lane_id: int, values: Tensor) -> None:
        payload = to_bytes(values.view(torch.uint8))
        ack = await self._calls.upload(fragment_id, lane_id, payload)
        if ack.is_fenced:
            raise self._calls.fenced(ack.message)
        if not ack.is_accepted:
            raise CodecError(f"initial parameters of fragment {fragment_id}: {ack.message}")

    def _check_initial(self, carried: CarriedFragment, own: Mapping[int, Tensor]) -> None:
        p = carried.fragment_id
        for lane_id in _differing(carried, own):
            names = ", ".join(entry.name for entry in self._plan.fragments[p].entries[:3])
            raise FingerprintMismatch(
                f"the initial parameters of island {self._grant.island!r} differ from the run's in "
                f"fragment {p}, lane {lane_id} ({names}, ...): the same seed, model and version of "
                f"torch must be used everywhere"
            )

    async def _take_published(self, carried: CarriedFragment, own: Mapping[int, Tensor]) -> None:
        """Make the newest version the anchor; where it is gone meanwhile, the one after it."""
        while True:
            state = carried.state
            try:
                anchor = await self._published(carried, state, own)
            except VersionGone:
                if not self._on_arrival:
                    raise
                while carried.state.version == state.version:
                    await wait_for(self._tasks.news, _TELL_WAITING_S)
            else:
                carried.anchor, carried.anchor_version = anchor, state.version
                carried.anchor_tokens = state.merged_tokens
                return

    async def _published(
        self, carried: CarriedFragment, state: wire.FragmentState, own: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Return a version's lanes: own ones where they are equal, the others fetched whole."""
        lanes = dict(own)
        differing = _differing(carried, own, state)
        fetched = await asyncio.gather(
            *(
                fetch_lane(
                    self._calls,
                    carried.fragment_id,
                    state.version,
                    lane_id,
                    numel=own[lane_id].numel(),
                    digest=state.lane_digests[lane_id],
                )
                for lane_id in differing
            )
        )
        lanes.update(zip(differing, fetched, strict=True))
        return lanes


def check_restored(carried: CarriedFragment, restored: CapturedFragment) -> None:
    """Hold a checkpoint's anchors against the version that the syncer restored.

    Raises:
        FingerprintMismatch: If they are not that version.
    """
    p, version = carried.fragment_id, restored.ledger.version
    if carried.state.version > version:
        return  # the others went on: what was in flight gets its outcome, the anchor follows
    differing = _differing(carried, restored.lanes.anchor)
    if carried.state.version < version or differing:
        lanes = f", and lanes {differing} of it differ" if differing else ""
        raise FingerprintMismatch(
            f"this checkpoint has version {version} of fragment {p}, the syncer has version "
            f"{carried.state.version}{lanes}: they are not of one run checkpoint. Resume one that "
            f"all sites have: `diloco coordinator RUN.toml --resume --at STEP`"
        )


def _differing(
    carried: CarriedFragment, own: Mapping[int, Tensor], state: wire.FragmentState | None = None
) -> list[int]:
    digests = (state or carried.state).lane_digests
    return [lane_id for lane_id in carried.lanes if lane_digest(own[lane_id]) != digests[lane_id]]
