"""An inner optimizer from one island to another: what is told, asked for, and given.

    leader of the joiner    wishes in its reports, and hears who gives it of which checkpoint
    leader of the donor     hears that in the answers to its own, and puts it at the syncers
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
from diloco.protocol.rounds.donation import Manifest, lane_name, most_manifest_bytes, read_manifest
from diloco.protos import fragment_pb2 as wire
from diloco.protos.control_pb2 import Grant, HealAnswer, HealWord, ReportReply
from diloco.transport.contracts import Buffer

logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.25
#: Lanes that one rank puts or fetches at once.
_AT_ONCE = 4

#: Fragment id and lane id.
Lane = tuple[int, int]


class NotHealed(Exception):
    """An inner optimizer was not given, or not taken; says why."""


class Ways(Protocol):
    """Where the syncers are: `Exchange`."""

    @property
    def failure(self) -> DilocoError | None:
        """Why this rank cannot go on, once it cannot."""

    def calls_of(self, fragment_id: int) -> SyncerCalls:
        """Return the way to the syncer of a fragment."""


class HealTalk:
    """What the leader's reports tell of heals, and what their answers bring; in one loop."""

    def __init__(self, give: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Assign only; `give` puts the inner optimizer of a checkpoint at the syncers."""
        self._give = give
        self._is_wished = False
        self._declined, self._reason = 0, ""
        self._asked = 0
        self._giving: asyncio.Task[None] | None = None
        self.answer = HealAnswer()

    def wish(self, *, is_wished: bool) -> None:
        """Wish from the next report on, or no longer."""
        self._is_wished, self.answer = is_wished, HealAnswer()

    def say(self) -> HealWord:
        """Give ReportRequest.heal."""
        return HealWord(is_wished=self._is_wished, declined=self._declined, reason=self._reason)

    def hear(self, reply: ReportReply) -> None:
        """Take the answer to a report: that to a wish, and what is to be given, if anything."""
        if self._is_wished:
            self.answer = reply.heal
        if reply.donate != self._asked:
            if self._giving is not None:
                self._giving.cancel()
            # What could not be given before may be now: only what is asked for is declined.
            self._asked, self._declined, self._reason = reply.donate, 0, ""
            if self._asked:
                self._giving = asyncio.get_running_loop().create_task(self._donate(self._asked))

    async def _donate(self, checkpoint: int) -> None:
        try:
            await self._give(checkpoint)
        except (NotHealed, DilocoError, OSError) as error:
            logger.warning("inner optimizer of checkpoint %d not given: %s", checkpoint, error)
            self._declined, self._reason = checkpoint, str(error)


async def give(
    ways: Ways, plan: Plan, manifest: Manifest, lane_bytes: Callable[[Lane], Buffer]
) -> None:
    """Put a donation at the syncers; what is there already does not travel again.

    Args:
        ways: To the syncers.
        plan: Of the run.
        manifest: Of the donation.
        lane_bytes: Gives the safetensors of a lane; called in a thread.

    Raises:
        NotHealed: If a syncer refuses it.
        DilocoError: If one cannot be reached.
    """
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def put(calls: SyncerCalls, lane: Lane | None, payload: Buffer) -> None:
        ack = await calls.put(manifest.checkpoint, lane, payload)
        if not ack.is_accepted:
            what = "its manifest" if lane is None else f"lane {lane_name(*lane)}"
            raise NotHealed(f"{what} was refused: {ack.message}")

    async def put_lane(lane: Lane) -> None:
        async with at_once:
            await put(ways.calls_of(lane[0]), lane, await asyncio.to_thread(lane_bytes, lane))

    syncers = dict.fromkeys(ways.calls_of(fragment.fragment_id) for fragment in plan.fragments)
    for calls in syncers:
        await put(calls, None, manifest.to_json())
    await _all(put_lane(lane) for lane in lanes_of(plan))


def lanes_of(plan: Plan) -> list[Lane]:
    """List all lanes of a plan."""
    return [(f.fragment_id, lane.lane_id) for f in plan.fragments for lane in f.lanes]


async def find_manifest(
    ways: Ways, plan: Plan, grant: Grant, talk: HealTalk, at_most_s: float
) -> Manifest:
    """Wait until a donor has begun to give; as the joiner's leader, while `talk` wishes.

    Raises:
        NotHealed: If nobody can, nothing came in time, or what came cannot be taken.
        DilocoError: If this rank cannot go on.
    """
    calls = ways.calls_of(plan.fragments[0].fragment_id)
    try:
        async with asyncio.timeout(max(at_most_s, 0.0)):
            while True:
                if ways.failure is not None:
                    raise ways.failure
                if (answer := talk.answer).refusal:
                    raise NotHealed(answer.refusal)
                if answer.donor:
                    reply, text = await calls.get(
                        answer.donor,
                        answer.checkpoint,
                        None,
                        max_reply_bytes=most_manifest_bytes(plan),
                    )
                    if reply.status == wire.FETCH_STATUS_OK:
                        return _taken(text, plan, grant, answer)
                await asyncio.sleep(_ASK_AGAIN_S)
    except TimeoutError:
        answer = talk.answer
        who = f"{answer.donor} has not begun to give it" if answer.donor else "no donor was named"
        raise NotHealed(who) from None


def _taken(text: Buffer, plan: Plan, grant: Grant, answer: HealAnswer) -> Manifest:
    try:
        manifest = read_manifest(text, plan)
    except PayloadRefused as error:
        raise NotHealed(f"the manifest of {answer.donor} is refused: {error}") from error
    said = manifest.run, manifest.timeline, manifest.donor, manifest.checkpoint
    if said != (grant.run, grant.timeline, answer.donor, answer.checkpoint):
        raise NotHealed(f"the manifest of {answer.donor} is of another donation")
    return manifest


async def fetch_lanes(
    ways: Ways,
    manifest: Manifest,
    lanes: Iterable[Lane],
    *,
    at_most_s: float,
    is_given: Callable[[], bool],
) -> dict[Lane, Buffer]:
    """Fetch lanes of a donation as they come, each with the digest that the manifest has.

    Args:
        ways: To the syncers.
        manifest: Of the donation.
        lanes: That this rank carries.
        at_most_s: Seconds for all of them.
        is_given: Whether the donor is still at work, as far as this rank knows.

    Raises:
        NotHealed: If one does not come in time, or is not what the manifest says.
        DilocoError: If this rank cannot go on.
    """
    found: dict[Lane, Buffer] = {}
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def fetch(lane: Lane) -> None:
        given = manifest.lanes[name := lane_name(*lane)]
        async with at_once:
            while True:
                if ways.failure is not None:
                    raise ways.failure
                reply, payload = await ways.calls_of(lane[0]).get(
                    manifest.donor, manifest.checkpoint, lane, max_reply_bytes=given.num_bytes
                )
                if reply.status == wire.FETCH_STATUS_OK:
                    break
                if not is_given():
                    raise NotHealed(f"{manifest.donor} has ended before all of it was given")
                await asyncio.sleep(_ASK_AGAIN_S)
        if blake3.blake3(payload).hexdigest() != given.blake3:
            raise NotHealed(f"lane {name} of {manifest.donor} has another digest than its manifest")
        found[lane] = payload

    wanted = list(lanes)
    try:
        async with asyncio.timeout(max(at_most_s, 0.0)):
            await _all(fetch(lane) for lane in wanted)
    except TimeoutError:
        raise NotHealed(
            f"{len(wanted) - len(found)} of {len(wanted)} lanes of {manifest.donor} did not come"
        ) from None
    return found


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do everything at once; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
