"""Moves an inner optimizer from one island to another, over the syncers.

    leader of the joiner    asks in its reports; the answers name the source and its checkpoint
    leader of the source    is asked in the answers to its reports, and puts it at the syncers
    ranks of the joiner     fetch the lanes that they carry, as they come

All of it runs in the loop of the network, below the payloads of rounds. The joiner's training waits
for it, as long as it is told to; in a scheduled run the others then wait for the joiner, at their
merges, as for any island that returns.

Source: PROTOCOL.md, "State transfer"; Decoupled DiLoCo (arXiv 2604.21428, App. E.3).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

import blake3

from diloco.errors import DilocoError, PayloadRefused
from diloco.island.exchange.calls import SyncerCalls
from diloco.outer.fragments import Plan
from diloco.protocol.rounds.transfer_manifest import (
    TransferManifest,
    lane_name,
    most_manifest_bytes,
    read_manifest,
)
from diloco.protos import fragment_pb2 as wire
from diloco.protos.control_pb2 import Grant, ReportReply, TransferAnswer, TransferPart
from diloco.tasks import all_of
from diloco.transport.contracts import Buffer

logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.25
#: Lanes that one rank puts or fetches at once.
_AT_ONCE = 4

#: Fragment id and lane id.
LaneKey = tuple[int, int]


class NotTransferred(Exception):
    """An inner optimizer was not given, or not taken; says why."""


class SyncerRoutes(Protocol):
    """Where the syncers are: `Exchange`."""

    @property
    def failure(self) -> DilocoError | None:
        """Why this rank cannot go on, once it cannot."""

    def calls_of(self, fragment_id: int) -> SyncerCalls:
        """Return the route to the syncer of a fragment."""


class TransferReports:
    """The part of a leader's reports, and of the answers, that is about state transfers."""

    def __init__(self, give: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Assign only; `give` puts the inner optimizer of a checkpoint at the syncers."""
        self._give = give
        self._is_requested = False
        self._declined, self._reason = 0, ""
        self._asked = 0
        self._giving: asyncio.Task[None] | None = None
        self.answer = TransferAnswer()

    def request(self, *, is_requested: bool) -> None:
        """Ask from the next report on, or no longer."""
        self._is_requested, self.answer = is_requested, TransferAnswer()

    def report(self) -> TransferPart:
        """Give ReportRequest.transfer."""
        return TransferPart(
            is_requested=self._is_requested, declined=self._declined, reason=self._reason
        )

    def set_answer(self, reply: ReportReply) -> None:
        """Take the answer to a report: that to a request, and what to send, if anything."""
        if self._is_requested:
            self.answer = reply.transfer
        if reply.provide != self._asked:
            if self._giving is not None:
                self._giving.cancel()
            # What could not be given before may be now: only what is asked for is declined.
            self._asked, self._declined, self._reason = reply.provide, 0, ""
            if self._asked:
                self._giving = asyncio.get_running_loop().create_task(self._provide(self._asked))

    async def _provide(self, checkpoint: int) -> None:
        try:
            await self._give(checkpoint)
        except (NotTransferred, DilocoError, OSError) as error:
            logger.warning("inner optimizer of checkpoint %d not given: %s", checkpoint, error)
            self._declined, self._reason = checkpoint, str(error)


async def give(
    routes: SyncerRoutes,
    plan: Plan,
    manifest: TransferManifest,
    lane_bytes: Callable[[LaneKey], Buffer],
) -> None:
    """Put a transfer at the syncers; what is there already does not travel again.

    Args:
        routes: To the syncers.
        plan: Of the run.
        manifest: Of the transfer.
        lane_bytes: Gives the safetensors of a lane; called in a thread.

    Raises:
        NotTransferred: If a syncer refuses it.
        DilocoError: If one cannot be reached.
    """
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def put(calls: SyncerCalls, lane: LaneKey | None, payload: Buffer) -> None:
        ack = await calls.put(manifest.checkpoint, lane, payload)
        if not ack.is_accepted:
            what = "its manifest" if lane is None else f"lane {lane_name(*lane)}"
            raise NotTransferred(f"{what} was refused: {ack.message}")

    async def put_lane(lane: LaneKey) -> None:
        async with at_once:
            await put(routes.calls_of(lane[0]), lane, await asyncio.to_thread(lane_bytes, lane))

    syncers = dict.fromkeys(routes.calls_of(fragment.fragment_id) for fragment in plan.fragments)
    for calls in syncers:
        await put(calls, None, manifest.to_json())
    await all_of(put_lane(lane) for lane in lanes_of(plan))


def lanes_of(plan: Plan) -> list[LaneKey]:
    """List all lanes of a plan."""
    return [(f.fragment_id, lane.lane_id) for f in plan.fragments for lane in f.lanes]


async def find_manifest(
    routes: SyncerRoutes, plan: Plan, grant: Grant, reports: TransferReports, at_most_s: float
) -> TransferManifest:
    """Wait until a source has begun to give; as the joiner's leader, while `reports` asks.

    Raises:
        NotTransferred: If nobody can, nothing came in time, or what came cannot be taken.
        DilocoError: If this rank cannot go on.
    """
    calls = routes.calls_of(plan.fragments[0].fragment_id)
    try:
        async with asyncio.timeout(max(at_most_s, 0.0)):
            while True:
                if routes.failure is not None:
                    raise routes.failure
                if (answer := reports.answer).refusal:
                    raise NotTransferred(answer.refusal)
                if answer.source:
                    reply, text = await calls.get(
                        answer.source,
                        answer.checkpoint,
                        None,
                        max_reply_bytes=most_manifest_bytes(plan),
                    )
                    if reply.status == wire.FETCH_STATUS_OK:
                        return _taken(text, plan, grant, answer)
                await asyncio.sleep(_ASK_AGAIN_S)
    except TimeoutError:
        answer = reports.answer
        who = (
            f"{answer.source} has not begun to give it" if answer.source else "no source was named"
        )
        raise NotTransferred(who) from None


def _taken(text: Buffer, plan: Plan, grant: Grant, answer: TransferAnswer) -> TransferManifest:
    try:
        manifest = read_manifest(text, plan)
    except PayloadRefused as error:
        raise NotTransferred(f"the manifest of {answer.source} is refused: {error}") from error
    said = manifest.run, manifest.timeline, manifest.source, manifest.checkpoint
    if said != (grant.run, grant.timeline, answer.source, answer.checkpoint):
        raise NotTransferred(f"the manifest of {answer.source} is of another transfer")
    return manifest


async def fetch_lanes(
    routes: SyncerRoutes,
    manifest: TransferManifest,
    lanes: Iterable[LaneKey],
    *,
    at_most_s: float,
    is_given: Callable[[], bool],
) -> dict[LaneKey, Buffer]:
    """Fetch lanes of a transfer as they come, each with the digest that the manifest has.

    Args:
        routes: To the syncers.
        manifest: Of the transfer.
        lanes: That this rank carries.
        at_most_s: Seconds for all of them.
        is_given: Whether the source is still at work, as far as this rank knows.

    Raises:
        NotTransferred: If one does not come in time, or is not what the manifest says.
        DilocoError: If this rank cannot go on.
    """
    found: dict[LaneKey, Buffer] = {}
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def fetch(lane: LaneKey) -> None:
        given = manifest.lanes[name := lane_name(*lane)]
        async with at_once:
            while True:
                if routes.failure is not None:
                    raise routes.failure
                reply, payload = await routes.calls_of(lane[0]).get(
                    manifest.source, manifest.checkpoint, lane, max_reply_bytes=given.num_bytes
                )
                if reply.status == wire.FETCH_STATUS_OK:
                    break
                if not is_given():
                    raise NotTransferred(f"{manifest.source} has ended before all of it was given")
                await asyncio.sleep(_ASK_AGAIN_S)
        if blake3.blake3(payload).hexdigest() != given.blake3:
            raise NotTransferred(
                f"lane {name} of {manifest.source} has another digest than its manifest"
            )
        found[lane] = payload

    wanted = list(lanes)
    try:
        async with asyncio.timeout(max(at_most_s, 0.0)):
            await all_of(fetch(lane) for lane in wanted)
    except TimeoutError:
        raise NotTransferred(
            f"{len(wanted) - len(found)} of {len(wanted)} lanes of {manifest.source} did not come"
        ) from None
    return found
