"""One fragment's reduction at a peer: lanes owned here are reduced, those of others are pulled.

The owner of a lane pulls it of every contributor and reduces it; all others pull the result.
Which island owns which lane, the decider's assignment says.

Source: PROTOCOL.md, "Reduction".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

from diloco.errors import AggregationError
from diloco.island.peer.calls import PeerCalls
from diloco.island.peer.replica import Reduced, Replica
from diloco.protocol.rounds.allreduce import Assignment
from diloco.protocol.rounds.messages import key_message
from diloco.protos import allreduce_pb2 as wire
from diloco.syncer.worker import Worker
from diloco.tasks import Tasks, all_of
from diloco.transport.contracts import Buffer

_T = TypeVar("_T")

#: Lanes of a fragment that are pulled at once, of those owned here and of the others.
LANES_IN_FLIGHT = 4


class Reduction:
    """Comes to the result of one assignment after another; in the loop of the peer."""

    def __init__(
        self,
        replica: Replica,
        calls: PeerCalls,
        island: str,
        worker: Worker,
        tasks: Tasks,
        held: Callable[[], Mapping[int, tuple[Buffer, bytes]]],
    ) -> None:
        """Assign only; `held` gives lane id -> payload and digest of what `island` contributes."""
        self._replica = replica
        self._calls = calls
        self._island = island
        self._worker = worker
        self._tasks = tasks
        self._held = held
        self._own_lanes = asyncio.Semaphore(LANES_IN_FLIGHT)
        self._other_lanes = asyncio.Semaphore(LANES_IN_FLIGHT)

    async def stage(self, assignment: Assignment) -> None:
        """Have the replica stage the result; cancel it when it is no longer wanted.

        Raises:
            AggregationError: If the result cannot be used.
            CodecError: If a payload cannot be decoded.
        """
        replica = self._replica
        replica.begin(assignment)
        self._tasks.notify()  # others may be waiting for lanes that are owned here
        lanes = await all_of(
            self._lane(assignment, lane.lane_id) for lane in replica.fragment.lanes
        )
        await self._worker.run(lambda: replica.stage(assignment, lanes))

    async def _lane(self, assignment: Assignment, lane_id: int) -> Reduced:
        owner = assignment.owner(lane_id)
        if owner == self._island:
            async with self._own_lanes:
                return await self._reduced(assignment, lane_id)
        async with self._other_lanes:
            return await self._followed(assignment, lane_id, owner)

    async def _reduced(self, assignment: Assignment, lane_id: int) -> Reduced:
        """Reduce a lane that is owned here, and let others have the result."""
        replica = self._replica
        payloads = await all_of(
            self._contribution(assignment, c.island, c.lane_digests[lane_id], lane_id)
            for c in assignment.contributors
        )
        names = [c.island for c in assignment.contributors]
        contributions = dict(zip(names, payloads, strict=True))
        reduced = await self._worker.run(lambda: replica.reduce(assignment, lane_id, contributions))
        replica.reduced[lane_id] = reduced
        self._tasks.notify()
        return reduced

    async def _followed(self, assignment: Assignment, lane_id: int, owner: str) -> Reduced:
        """Take the result of a lane that another island owns."""
        replica, island = self._replica, self._island
        result = await self._calls.pull(
            owner,
            "allreduce.result",
            wire.ResultHeader(
                fragment_id=replica.fragment.fragment_id,
                lane_id=lane_id,
                assignment_id=assignment.id,
            ),
            num_bytes=replica.result_bytes(assignment, lane_id, island),
        )
        own: Buffer = b""
        if (mine := assignment.contributor(island)) is not None:
            own = self._own_lane(assignment, mine.lane_digests[lane_id], lane_id)
        return await self._worker.run(
            lambda: replica.follow(assignment, lane_id, island, result, own)
        )

    async def _contribution(
        self, assignment: Assignment, island: str, digest: bytes, lane_id: int
    ) -> Buffer:
        if island == self._island:
            return self._own_lane(assignment, digest, lane_id)
        return await self._calls.pull(
            island,
            "allreduce.contribution",
            wire.ContributionHeader(key=key_message(assignment.key), lane_id=lane_id),
            num_bytes=self._replica.contribution_bytes(lane_id),
            digest=digest,
        )

    def _own_lane(self, assignment: Assignment, digest: bytes, lane_id: int) -> Buffer:
        payload, own_digest = self._held().get(lane_id, (b"", b""))
        if own_digest != digest:
            raise AggregationError(f"{assignment.key} counts what is not held here any more")
        return payload
