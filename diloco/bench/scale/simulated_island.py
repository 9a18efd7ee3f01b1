"""An island of many ranks that trains nothing: each rank calls as one of a run does.

The leader joins and reports once a second; every rank that carries lanes polls about their
fragments, fetches what is published and submits its lanes as soon as their round is open.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import blake3
from google.protobuf.message import Message

from diloco.bench.syncer.sending_island import lane_values
from diloco.compression.base import to_bytes
from diloco.compression.registry import get_codec
from diloco.config.classes import identity_json
from diloco.config.schema import Config
from diloco.errors import DilocoError
from diloco.island.lanes.carriers import carriers_of
from diloco.outer.fragments import Fragment, Plan
from diloco.protocol.rounds.messages import MOST_UPLOADS, key_message
from diloco.protocol.rounds.terms import RoundKey
from diloco.protocol.run.plan_bytes import packed
from diloco.protos import fragment_pb2 as wire
from diloco.protos.control_pb2 import (
    JOIN_STATUS_ACCEPTED,
    Grant,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    ReportReply,
    ReportRequest,
)
from diloco.transport.contracts import PROTOCOL_VERSION, Buffer, Reply, Transport
from diloco.transport.errors import Overloaded
from diloco.transport.transfer import Transfer

_DEADLINE_S = 600.0
_POLL_S = 20.0
_REPORT_S = 1.0
_AGAIN_S = 0.2
_SLACK_BYTES = 1 << 20


def _nothing() -> None:
    """Do nothing."""


@dataclass(slots=True)
class Counts:
    """What became of all calls of some islands.

    Attributes:
        overloaded: Calls that were put off or refused, and made again.
        outcomes: Contributions by island, fragment and version: what their ranks were told.
    """

    overloaded: int = 0
    outcomes: dict[tuple[str, int, int], int] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Simulation:
    """What all islands share.

    Attributes:
        config: Of the run.
        plan: Of the run.
        num_rounds: After which an island has done its part.
        step_s: Of an inner step, as ranks say.
        counts: Of all islands.
        on_joined: Called when one has joined.
        on_done: Called when one has taken part in all rounds.
    """

    config: Config
    plan: Plan
    num_rounds: int
    step_s: float
    counts: Counts
    on_joined: Callable[[], None] = _nothing
    on_done: Callable[[], None] = _nothing

    @functools.cached_property
    def identity_json(self) -> str:
        """What all islands have in common."""
        return identity_json(self.config)

    @functools.cached_property
    def plan_bytes(self) -> bytes:
        """The plan as it travels."""
        return packed(self.plan.to_json())


@functools.lru_cache
def _lane_payload(codec: str, numel: int) -> tuple[bytes, bytes]:
    """Give a lane's payload, and its digest."""
    payload = bytes(to_bytes(get_codec(codec).encode(lane_values(numel, 1))))
    return payload, blake3.blake3(payload).digest()


class SimulatedIsland:
    """All ranks of an island, over one connection each to coordinator and syncer."""

    def __init__(
        self,
        name: str,
        simulation: Simulation,
        connect: Callable[[str], Transport],
        coordinator: str,
    ) -> None:
        """Assign only; `connect` opens a connection to an address."""
        self._name, self._run = name, simulation
        self._connect = connect
        self._to_coordinator = connect(coordinator)
        self._to_syncer: Transport | None = None
        self._grant = Grant()
        self._revision = 0
        self._inner_step = 0

    async def run(self) -> None:
        """Join, take part in all rounds, and leave.

        Raises:
            DilocoError: If a call is refused for good.
        """
        joined = await self._join()
        self._to_syncer = self._connect(joined.syncers[0].address)
        self._run.on_joined()
        config, plan = self._run.config, self._run.plan
        dealt = carriers_of(plan.fragments, range(config.islands[self._name].ranks))
        lanes: dict[int, dict[int, list[int]]] = {0: {f.fragment_id: [] for f in plan.fragments}}
        for (p, lane_id), rank in dealt.items():
            lanes.setdefault(rank, {}).setdefault(p, []).append(lane_id)
        working = asyncio.create_task(self._work(lanes))
        reporting = asyncio.create_task(self._report_forever(joined.claims_json))
        try:
            await asyncio.wait((working, reporting), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, reporting):
                if task.done():
                    task.result()
                task.cancel()
        self._run.on_done()
        await self._leave()

    async def _work(self, lanes: Mapping[int, dict[int, list[int]]]) -> None:
        assert self._to_syncer is not None
        async with asyncio.TaskGroup() as group:
            for own in lanes.values():
                rank = _Rank(
                    self._run, self._name, self._grant, self._to_syncer, own, self._stepped
                )
                group.create_task(rank.run())

    def _stepped(self, inner_step: int) -> None:
        self._inner_step = max(self._inner_step, inner_step)

    async def _join(self) -> JoinReply:
        config = self._run.config
        request = JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            run=config.run.name,
            island=self._name,
            identity_json=self._run.identity_json,
            plan=self._run.plan_bytes,
            num_ranks=config.islands[self._name].ranks,
            start_id="start",
            tokens_per_inner_step=config.islands[self._name].tokens_per_inner_step,
        )
        while True:
            answer = await call(self._to_coordinator, "control.join", request, self._run.counts)
            reply = JoinReply.FromString(answer.header)
            if reply.status != JOIN_STATUS_ACCEPTED:
                raise DilocoError(f"the bench's coordinator refuses {self._name}: {reply.message}")
            self._grant = reply.grant
            if reply.syncers:
                return reply
            await asyncio.sleep(_AGAIN_S)

    async def _report_forever(self, claims_json: str) -> None:
        number = 0
        while True:
            claims_json = await self._report(claims_json, number)
            number += 1
            await asyncio.sleep(_REPORT_S)

    async def _report(self, claims_json: str, number: int) -> str:
        """Report once; an island draws a sequence of the text from each slot between two."""
        claims = json.loads(claims_json) if claims_json else None
        request = ReportRequest(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            state="training",
            inner_step=self._inner_step,
        )
        if claims is not None:
            position = {"drawn": {"web": number}, "cursor": {"at": number}}
            said = {
                slot: {"grant": claim["grant"], "is_final": kind == "owed", "position": position}
                for kind in ("slots", "owed")
                for slot, claim in claims[kind].items()
            }
            request.position_json = json.dumps({"revision": claims["revision"], "slots": said})
        answer = await call(self._to_coordinator, "control.report", request, self._run.counts)
        reply = ReportReply.FromString(answer.header)
        if reply.stop:
            raise DilocoError(f"the bench's coordinator ended {self._name}: {reply.reason}")
        return reply.claims_json or claims_json

    async def _leave(self) -> None:
        request = LeaveRequest(
            protocol_version=PROTOCOL_VERSION, grant=self._grant, reason="the bench is over"
        )
        await call(self._to_coordinator, "control.leave", request, self._run.counts)
        await self._to_coordinator.close()
        if self._to_syncer is not None:
            await self._to_syncer.close()


class _Rank:
    """One rank: polls about its fragments, and moves its lanes of them."""

    def __init__(
        self,
        simulation: Simulation,
        island: str,
        grant: Grant,
        transport: Transport,
        lanes: dict[int, list[int]],
        on_step: Callable[[int], None],
    ) -> None:
        self._run, self._island, self._grant = simulation, island, grant
        self._transport, self._lanes = transport, lanes
        self._on_step = on_step
        self._known: dict[int, wire.FragmentState] = {}
        self._have = dict.fromkeys(lanes, 0)
        self._sent: dict[int, RoundKey] = {}
        self._outstanding: dict[int, RoundKey] = {}
        self._is_founding = False
        self._moving: dict[int, asyncio.Future[None]] = {}
        self._done = asyncio.Event()

    @property
    def _is_done(self) -> bool:
        # What becomes of all that was sent is counted.
        return not self._outstanding and all(
            version >= self._run.num_rounds for version in self._have.values()
        )

    async def run(self) -> None:
        """Poll until all rounds are published, and what they published is here."""
        polling = asyncio.create_task(self._poll_forever())
        done = asyncio.create_task(self._done.wait())
        await asyncio.wait((polling, done), return_when=asyncio.FIRST_COMPLETED)
        for task in (polling, done):
            if task.done():
                task.result()
            task.cancel()

    async def _poll_forever(self) -> None:
        epoch = 0
        while True:
            known = [
                self._known.get(p, wire.FragmentState(fragment_id=p)) for p in sorted(self._lanes)
            ]
            request = wire.PollRequest(
                protocol_version=PROTOCOL_VERSION,
                grant=self._grant,
                known_epoch=epoch,
                known=known,
                outstanding=[key_message(key) for key in self._outstanding.values()],
                wait_s=_POLL_S,
                step_s=self._run.step_s,
            )
            answer = await self._call("fragment.poll", request)
            reply = wire.PollReply.FromString(answer.header)
            if reply.is_fenced or reply.HasField("fatal"):
                raise DilocoError(f"the bench's syncer gave up: {reply}")
            epoch = reply.syncer_epoch
            for outcome in reply.outcomes:
                self._take_outcome(outcome)
            for state in reply.fragments:
                self._take(state)
            for task in self._moving.values():
                if task.done():
                    task.result()

    def _take_outcome(self, outcome: wire.Outcome) -> None:
        key = outcome.key
        self._outstanding.pop(key.fragment_id, None)
        self._run.counts.outcomes[self._island, key.fragment_id, key.version] = outcome.kind
        self._note_done()

    def _take(self, state: wire.FragmentState) -> None:
        p = state.fragment_id
        if state.wants_initial and not self._is_founding:
            self._is_founding = True
            self._move(-1, self._found())
        self._known[p] = wire.FragmentState(
            fragment_id=p,
            is_founded=state.is_founded,
            version=state.version,
            digest=state.digest,
            attempt=state.attempt,
            is_open=state.is_open,
            wants_initial=state.wants_initial,
            num_held=1 + state.version if state.is_founded else 0,
        )
        if state.is_founded and (p not in self._moving or self._moving[p].done()):
            self._move(p, self._follow(p))

    def _move(self, p: int, work: Coroutine[Any, Any, None]) -> None:
        self._moving[p] = asyncio.create_task(work)

    def _note_done(self) -> None:
        if self._is_done:
            self._done.set()

    async def _follow(self, p: int) -> None:
        """Fetch what is published, then contribute to what is open, until neither is new."""
        while True:
            state = self._known[p]
            if state.version > self._have[p]:
                if self._lanes[p]:
                    await self._fetch(p, state.version)
                self._have[p] = state.version
                self._note_done()
                continue
            key = RoundKey(0, p, state.version, state.attempt)
            is_new = state.is_open and self._sent.get(p) != key
            if not is_new or state.version >= self._run.num_rounds or not self._lanes[p]:
                return
            self._sent[p] = self._outstanding[p] = key
            await asyncio.gather(*(self._submit(key, lane_id) for lane_id in self._lanes[p]))

    async def _found(self) -> None:
        uploading = asyncio.Semaphore(MOST_UPLOADS)

        async def upload(fragment: Fragment, lane_id: int) -> None:
            payload = bytes(4 * fragment.lanes[lane_id].numel)
            header = wire.UploadHeader(
                protocol_version=PROTOCOL_VERSION,
                grant=self._grant,
                fragment_id=fragment.fragment_id,
                lane_id=lane_id,
                digest=blake3.blake3(payload).digest(),
            )
            async with uploading:
                answer = await self._call("fragment.upload", header, payload)
            ack = wire.Ack.FromString(answer.header)
            if not ack.is_accepted:
                raise DilocoError(f"the bench's syncer does not take a first lane: {ack.message}")

        fragments = self._run.plan.fragments
        await asyncio.gather(
            *(upload(fragments[p], i) for p, own in self._lanes.items() for i in own)
        )

    async def _submit(self, key: RoundKey, lane_id: int) -> None:
        config = self._run.config
        steps = config.outer.inner_steps_per_round
        codec = config.outer.uplink_codec
        lane = self._run.plan.fragments[key.fragment_id].lanes[lane_id]
        payload, digest = _lane_payload(codec, lane.numel)
        header = wire.SubmitHeader(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            key=key_message(key),
            lane_id=lane_id,
            sent_at_inner_step=steps * (key.version + 1),
            weight_tokens=steps * config.islands[self._island].tokens_per_inner_step,
            weight_steps=steps,
            codec=codec,
            digest=digest,
        )
        self._on_step(header.sent_at_inner_step)
        while True:
            answer = await self._call("fragment.submit", header, payload)
            reply = wire.SubmitReply.FromString(answer.header)
            if reply.status == wire.SUBMIT_STATUS_NOT_OPEN:
                await asyncio.sleep(_AGAIN_S)
                continue
            if reply.status not in (wire.SUBMIT_STATUS_RECEIVED, wire.SUBMIT_STATUS_OUTCOME):
                raise DilocoError(f"the bench's syncer did not take a lane: {reply}")
            return

    async def _fetch(self, p: int, version: int) -> None:
        lanes = self._lanes[p]
        header = wire.FetchHeader(
            protocol_version=PROTOCOL_VERSION,
            grant=self._grant,
            fragment_id=p,
            version=version,
            lane_ids=lanes,
            kind=wire.FETCH_KIND_PAYLOAD,
        )
        answer = await self._call("fragment.fetch", header)
        reply = wire.FetchReply.FromString(answer.header)
        if reply.status != wire.FETCH_STATUS_OK:
            raise DilocoError(f"the bench's syncer does not give version {version}: {reply}")

    async def _call(self, method: str, header: Message, payload: Buffer = b"") -> Reply:
        return await call(self._transport, method, header, self._run.counts, payload)


async def call(
    transport: Transport, method: str, header: Message, counts: Counts, payload: Buffer = b""
) -> Reply:
    """Call until there is an answer; what is put off is counted."""
    transfer = Transfer() if payload else None
    counts.calls[method] += 1
    while True:
        try:
            return await transport.call(
                method,
                header.SerializeToString(),
                payload,
                deadline_s=_DEADLINE_S,
                max_reply_bytes=_SLACK_BYTES,
                transfer=transfer,
            )
        except Overloaded:
            counts.overloaded += 1
            if transfer is not None:
                transfer.asks_first = True
            await asyncio.sleep(_AGAIN_S)


async def simulate(
    names: Sequence[str],
    simulation: Simulation,
    connect: Callable[[str], Transport],
    coordinator: str,
) -> None:
    """Run islands until all have taken part in all rounds.

    Raises:
        DilocoError: If one of them cannot go on.
    """
    async with asyncio.TaskGroup() as group:
        for name in names:
            island = SimulatedIsland(name, simulation, connect, coordinator)
            group.create_task(island.run())
