"""The syncer over a virtual network: founding, grants, lanes, kills at every point, lost quorum."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import blake3
import pytest
import torch
from torch import Tensor

from diloco.compression.base import to_bytes
from diloco.compression.registry import get_codec
from diloco.errors import (
    AggregationError,
    DilocoError,
    FingerprintMismatch,
    IslandFailed,
    QuorumLost,
)
from diloco.outer.optimizer import OuterOptimizer
from diloco.rounds.messages import key_message, outcome_of
from diloco.rounds.state import OutcomeKind, RoundKey
from diloco.rounds.store import FragmentStore, recompute
from protos import fragment_pb2 as wire
from protos.control_pb2 import Grant
from tests.virtual_run import Setting, VirtualIsland, VirtualRun, grant
from transport.contracts import PROTOCOL_VERSION, Buffer, Reply
from transport.errors import PeerReset
from transport.loopback import run_virtual

# -- tools: raw islands, a worker that takes time and can die --------------------------------------

DESCENT = {"a": 1.0, "b": 3.0, "c": 5.0}
NUMEL = 40_000  # two lanes
KEY = RoundKey(0, 0, 0, 0)


def descend(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    for parameter in parameters.values():
        parameter.sub_(DESCENT[island])


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Two islands, one fragment of two lanes; only the raw islands below take part."""
    return Setting({"w": [0.0] * NUMEL}, descend, tmp_path, inner_steps=8)


class RawIsland:
    """An island that says whatever a test wants, over the wire."""

    def __init__(self, run: VirtualRun, name: str, incarnation: int = 1) -> None:
        self.transport = run.network.connect("syncer")
        self.name = name
        self.grant = grant(name, incarnation)
        self.lanes = run.setting.plan().fragments[0].lanes
        self.codec = run.setting.uplink_codec

    async def call(self, method: str, header: Any, payload: Buffer = b"") -> Reply:
        header.protocol_version = header.protocol_version or PROTOCOL_VERSION
        header.grant.CopyFrom(self.grant)
        return await self.transport.call(
            method, header.SerializeToString(), payload, deadline_s=100.0, max_reply_bytes=1 << 22
        )

    async def poll(self, *outstanding: RoundKey, wait_s: float = 0.0, **known: Any) -> Any:
        request = wire.PollRequest(
            outstanding=[key_message(key) for key in outstanding], wait_s=wait_s, **known
        )
        reply = await self.call("fragment.poll", request)
        return wire.PollReply.FromString(reply.header)

    async def upload(self, value: float = 0.0) -> list[wire.Ack]:
        return [await self.upload_lane(lane_id, value) for lane_id in range(len(self.lanes))]

    async def upload_lane(self, lane_id: int, value: float = 0.0) -> wire.Ack:
        vector = torch.full((self.lanes[lane_id].numel,), value)
        payload = to_bytes(vector.view(torch.uint8))
        header = wire.UploadHeader(lane_id=lane_id, digest=blake3.blake3(payload).digest())
        return wire.Ack.FromString((await self.call("fragment.upload", header, payload)).header)

    async def submit(
        self,
        key: RoundKey = KEY,
        lane_id: int = 0,
        value: float = 1.0,
        payload: Buffer | None = None,
        **changes: Any,
    ) -> wire.SubmitReply:
        if payload is None:
            vector = torch.full((self.lanes[lane_id].numel,), value)
            payload = to_bytes(get_codec(self.codec).encode(vector))
        header = wire.SubmitHeader(
            key=key_message(key),
            lane_id=lane_id,
            sent_at_inner_step=4,
            weight_tokens=4,
            weight_steps=4,
            codec=self.codec,
            digest=blake3.blake3(payload).digest(),
        )
        header.MergeFrom(wire.SubmitHeader(**changes))
        reply = await self.call("fragment.submit", header, payload)
        return wire.SubmitReply.FromString(reply.header)

    async def contribute(self, key: RoundKey = KEY, value: float = 1.0, **changes: Any) -> None:
        for lane_id in range(len(self.lanes)):
            reply = await self.submit(key, lane_id, value, **changes)
            assert reply.status == wire.SUBMIT_STATUS_RECEIVED, reply

    async def decline(self, key: RoundKey = KEY) -> wire.Ack:
        header = wire.DeclineRequest(key=key_message(key), reason="not finite")
        return wire.Ack.FromString((await self.call("fragment.decline", header)).header)

    async def end(self, key: RoundKey = KEY) -> OutcomeKind | None:
        reply = await self.poll(key)
        return outcome_of(reply.outcomes[0]).kind if reply.outcomes else None

    async def published(self, version: int) -> list[float]:
        """First value of every lane, fetched dense."""
        first = []
        for lane_id in range(len(self.lanes)):
            header = wire.FetchHeader(version=version, lane_id=lane_id, kind=wire.FETCH_KIND_DENSE)
            reply = await self.call("fragment.fetch", header)
            assert wire.FetchReply.FromString(reply.header).status == wire.FETCH_STATUS_OK
            first.append(torch.frombuffer(reply.payload, dtype=torch.float32)[0].item())
        return first


class Incoming:
    """Lane 0 of a contribution as its handler sees it, the payload `read_s` away."""

    method, peer = "fragment.submit", "test"

    def __init__(self, island: RawIsland, read_s: float = 0.0, **changes: Any) -> None:
        self._payload = bytes(4 * island.lanes[0].numel)
        header = wire.SubmitHeader(
            protocol_version=PROTOCOL_VERSION,
            grant=island.grant,
            key=key_message(KEY),
            weight_tokens=4,
            codec="float32",
            digest=blake3.blake3(self._payload).digest(),
        )
        header.MergeFrom(wire.SubmitHeader(**changes))
        self.header = header.SerializeToString()
        self.payload_bytes = len(self._payload)
        self.is_read = False
        self._read_s = read_s

    async def read_payload(self) -> Buffer:
        self.is_read = True
        await asyncio.sleep(self._read_s)
        return self._payload


class Dead(Exception):
    """What a test raises where a process is to die."""


class SlowWorker:
    """One piece of work at a time, each taking virtual time; `Dead` ends it in the middle."""

    def __init__(self, before_s: float = 0.0, after_s: float = 0.0) -> None:
        self.before_s, self.after_s = before_s, after_s
        self.died = asyncio.Event()
        self._busy = asyncio.Lock()

    async def run(self, work: Callable[[], Any]) -> Any:
        async with self._busy:
            await asyncio.sleep(self.before_s)
            try:
                result = work()
            except Dead:
                self.died.set()
                await asyncio.Event().wait()
            await asyncio.sleep(self.after_s)
            return result


async def founded(setting: Setting, names: str = "ab") -> tuple[VirtualRun, list[RawIsland]]:
    """A run whose version 0 is durable and whose first round is open."""
    run = VirtualRun(setting)
    await run.start_syncer()
    islands = [RawIsland(run, name) for name in names]
    for island in islands:
        await island.poll()
    assert all(ack.is_accepted for ack in await islands[0].upload())
    return run, islands


async def restart(run: VirtualRun) -> None:
    await run.kill_syncer()
    await run.start_syncer()


def records_of(setting: Setting) -> FragmentStore:
    return FragmentStore(setting.directory, setting.plan().fragments[0], 4)


def version_of(run: VirtualRun) -> tuple[int, int, bool]:
    (state,) = run.syncer.states
    return state.version, state.attempt, state.is_open


# -- version 0 -----------------------------------------------------------------------------------


def test_version_0_comes_from_the_first_island_only_and_once(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        a, b = RawIsland(run, "a"), RawIsland(run, "b")

        early = await a.poll()
        assert not early.fragments[0].wants_initial, "not before all islands have joined"
        assert (await a.upload_lane(0)).message == "version 0 is founded by 'a'"
        assert not (await b.poll()).fragments[0].wants_initial
        assert (await a.poll()).fragments[0].wants_initial
        assert not (await b.upload_lane(0)).is_accepted

        assert [ack.is_accepted for ack in await a.upload(7.0)] == [True, True]
        assert [ack.is_accepted for ack in await a.upload(8.0)] == [True, True]

        (state,) = (await b.poll()).fragments
        assert (state.is_founded, state.version, state.is_open) == (True, 0, True)
        assert await b.published(0) == [7.0, 7.0]
        assert torch.equal(records_of(setting).load(0).lanes[0].momentum[:2], torch.zeros(2))

    run_virtual(scenario())


def test_the_founder_is_asked_the_moment_the_last_island_has_joined(setting: Setting) -> None:
    async def scenario() -> float:
        run = VirtualRun(setting)
        await run.start_syncer()
        a, b = RawIsland(run, "a"), RawIsland(run, "b")
        known = await a.poll()
        waiting = asyncio.create_task(
            a.poll(wait_s=20.0, known=known.fragments, known_epoch=known.syncer_epoch)
        )
        await asyncio.sleep(3.0)
        await b.poll()

        assert (await waiting).fragments[0].wants_initial
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == 3.0


def test_no_round_opens_before_version_0_is_durable(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        run.worker = SlowWorker(before_s=5.0)
        await run.start_syncer()
        a, b = RawIsland(run, "a"), RawIsland(run, "b")
        await asyncio.gather(a.poll(), b.poll())
        founding = asyncio.create_task(a.upload())
        await asyncio.sleep(14.0)

        assert (await b.submit()).status == wire.SUBMIT_STATUS_NOT_OPEN
        assert not list(setting.directory.rglob("*.record"))
        await founding
        assert version_of(run) == (0, 0, True)

    run_virtual(scenario())


def test_initial_parameters_that_are_not_finite_are_refused(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        a, b = RawIsland(run, "a"), RawIsland(run, "b")
        await a.poll()
        await b.poll()

        ack = await a.upload_lane(0, float("nan"))

        assert not ack.is_accepted
        assert "initial parameters refused" in ack.message

    run_virtual(scenario())


@pytest.mark.parametrize("lanes_before", [0, 1], ids=["no-lane", "some-lanes"])
def test_a_new_start_of_the_founder_founds_with_its_own_lanes_only(
    setting: Setting, lanes_before: int
) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        a, b, again = RawIsland(run, "a"), RawIsland(run, "b"), RawIsland(run, "a", 2)
        await a.poll()
        await b.poll()
        for lane_id in range(lanes_before):
            await a.upload_lane(lane_id, 7.0)
        await again.poll()

        assert not (await a.upload_lane(1, 7.0)).is_accepted
        await again.upload(8.0)

        assert await b.published(0) == [8.0, 8.0]

    run_virtual(scenario())


def test_lanes_uploaded_side_by_side_commit_version_0_once(setting: Setting) -> None:
    async def scenario() -> int:
        run = VirtualRun(setting)
        run.worker = SlowWorker(1.0, 1.0)
        await run.start_syncer()
        a, b = RawIsland(run, "a"), RawIsland(run, "b")
        await asyncio.gather(a.poll(), b.poll())

        await asyncio.gather(*(a.upload() for _ in range(3)))

        assert version_of(run) == (0, 0, True)
        return len(run.records)

    assert run_virtual(scenario()) == 1


def test_two_ranks_of_the_founder_upload_disjoint_lanes_across_a_restart(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        rank_0, rank_1, b = RawIsland(run, "a"), RawIsland(run, "a"), RawIsland(run, "b")
        await rank_0.poll()
        await b.poll()
        await rank_0.upload_lane(0, 7.0)

        await restart(run)
        await rank_1.upload_lane(1, 7.0)
        assert not (await b.poll()).fragments[0].is_founded, "lane 0 was not durable"
        assert (await rank_0.poll()).fragments[0].wants_initial
        await rank_0.upload_lane(0, 7.0)

        assert await b.published(0) == [7.0, 7.0]

    run_virtual(scenario())


def test_an_island_whose_initial_parameters_differ_is_refused_by_name(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(replace(setting, initial={"w": [1.0], "x": [2.0]}))
        await run.start_syncer()
        a = run.island("a")
        b = VirtualIsland(
            "b",
            replace(run.setting, initial={"w": [1.0], "x": [2.5]}),
            run.network.connect("syncer"),
            run.network.connect("syncer"),
        )

        started = await asyncio.gather(a.start(), b.start(), return_exceptions=True)

        assert started[0] is None
        assert isinstance(started[1], FingerprintMismatch)
        assert started[1].exit_code == 10
        assert "'b' differ" in str(started[1])
        assert "(w, x, ...)" in str(started[1])

    run_virtual(scenario())


# -- grants --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "another"},
        {"timeline": 1},
        {"island": "c"},
    ],
    ids=["run", "timeline", "island"],
)
def test_a_grant_of_something_else_is_refused_everywhere(
    setting: Setting, changes: dict[str, Any]
) -> None:
    async def scenario() -> None:
        run, _ = await founded(setting)
        other = RawIsland(run, "a")
        other.grant.MergeFrom(Grant(**changes))

        assert (await other.poll()).is_fenced
        assert (await other.submit()).status == wire.SUBMIT_STATUS_FENCED
        assert not (await other.decline()).is_accepted
        assert not (await other.upload_lane(0)).is_accepted
        fetched = await other.call("fragment.fetch", wire.FetchHeader())
        assert wire.FetchReply.FromString(fetched.header).status == wire.FETCH_STATUS_FENCED
        assert run.incarnations.saved == {"a": 1, "b": 1}

    run_virtual(scenario())


def test_another_protocol_version_is_refused(setting: Setting) -> None:
    async def scenario() -> None:
        _, (a, _) = await founded(setting)

        assert (await a.submit(protocol_version=PROTOCOL_VERSION + 1)).status == (
            wire.SUBMIT_STATUS_FENCED
        )

    run_virtual(scenario())


def test_an_incarnation_is_durable_before_anything_of_it_is_accepted(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, _) = await founded(setting)
        run.worker = SlowWorker()
        await restart(run)
        run.incarnations.store = _die  # type: ignore[method-assign]
        newer = RawIsland(run, "b", 2)

        submission = asyncio.create_task(newer.submit())
        await run.worker.died.wait()

        assert run.syncer._services[0].rounds.contributions == {}
        submission.cancel()
        assert (await a.poll()).syncer_epoch == 2

    run_virtual(scenario())


def _die(*_: object) -> None:
    raise Dead


def test_an_older_start_is_fenced_with_all_its_lanes_also_by_a_restarted_syncer(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        await b.contribute(value=100.0)
        newer = RawIsland(run, "b", 2)
        waiting = asyncio.create_task(b.poll(wait_s=60.0, known=(await b.poll()).fragments,
                                             known_epoch=1))  # fmt: skip
        await asyncio.sleep(1.0)

        assert not (await newer.poll()).is_fenced
        assert (await waiting).is_fenced, "told at once"
        assert run.syncer._services[0]._spool == {}
        assert (await b.submit()).status == wire.SUBMIT_STATUS_FENCED
        await a.contribute(value=2.0)
        assert version_of(run) == (0, 0, True)
        await restart(run)
        assert (await b.submit()).status == wire.SUBMIT_STATUS_FENCED
        assert (await b.poll()).is_fenced

        await a.contribute(value=2.0)
        await newer.contribute(value=4.0)
        await asyncio.sleep(1.0)
        assert await a.published(1) == [-3.0, -3.0]

    run_virtual(scenario())


def test_a_lane_on_its_way_when_its_start_is_fenced_is_not_counted(setting: Setting) -> None:
    async def scenario() -> None:
        run, (_, b) = await founded(setting)
        submission = asyncio.create_task(run.syncer.handlers["fragment.submit"](Incoming(b, 5.0)))
        await asyncio.sleep(1.0)

        await RawIsland(run, "b", 2).poll()

        reply = wire.SubmitReply.FromString((await submission).header)
        assert reply.status == wire.SUBMIT_STATUS_FENCED
        service = run.syncer._services[0]
        assert (service.rounds.contributions, service._spool) == ({}, {})

    run_virtual(scenario())


# -- contributions -------------------------------------------------------------------------------


def test_a_round_publishes_the_weighted_mean_and_names_its_contributors(setting: Setting) -> None:
    async def scenario() -> None:
        _, (a, b) = await founded(setting)
        await b.contribute(value=8.0, weight_tokens=1)
        assert await b.end() is None
        await a.contribute(value=4.0, weight_tokens=3)
        await asyncio.sleep(1.0)

        (state,) = (await a.poll()).fragments
        assert (state.version, list(state.contributors)) == (1, ["a", "b"])
        assert await a.published(1) == [-5.0, -5.0]
        assert await a.end() is await b.end() is OutcomeKind.INCLUDED

    run_virtual(scenario())


def test_arrival_order_does_not_show_in_the_bits(setting: Setting) -> None:
    # 1e8 + 1 - 1e8 is 0 or 1 in float32, depending on the order of the sum.
    amounts = {"a": 3e8, "b": 3.0, "c": -3e8}

    async def scenario(order: str) -> bytes:
        directory = setting.directory / order
        run, islands = await founded(
            replace(setting, islands=("a", "b", "c"), directory=directory), "abc"
        )
        by_name = {island.name: island for island in islands}
        for name in order:
            await by_name[name].contribute(value=amounts[name])
        await asyncio.sleep(1.0)
        return run.syncer.states[0].digest

    assert len({run_virtual(scenario(order)) for order in ("abc", "cba", "acb", "bca")}) == 1


def test_a_repeat_is_acknowledged_and_counted_once(setting: Setting) -> None:
    async def scenario() -> None:
        _, (a, b) = await founded(setting)
        await a.contribute(value=2.0)
        for lane_id in (0, 1, 0):
            again = await a.submit(lane_id=lane_id, value=2.0)
            assert again.status == wire.SUBMIT_STATUS_REPEAT
        await b.contribute(value=4.0)
        await asyncio.sleep(1.0)

        assert await a.published(1) == [-3.0, -3.0]
        late = await a.submit(value=2.0)
        assert late.status == wire.SUBMIT_STATUS_OUTCOME
        assert late.outcome.kind == wire.OUTCOME_KIND_INCLUDED

    run_virtual(scenario())


def test_the_same_lane_arriving_twice_at_once_is_kept_once(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, _) = await founded(setting)
        run.worker = SlowWorker(1.0, 1.0)
        await restart(run)

        replies = await asyncio.gather(*(a.submit(value=2.0) for _ in range(3)))

        assert sorted(reply.status for reply in replies) == [
            wire.SUBMIT_STATUS_RECEIVED,
            wire.SUBMIT_STATUS_REPEAT,
            wire.SUBMIT_STATUS_REPEAT,
        ]

    run_virtual(scenario())


def test_other_bytes_under_the_same_name_refuse_the_whole_contribution(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        await a.contribute(value=2.0)

        reply = await a.submit(lane_id=1, value=3.0)

        assert reply.status == wire.SUBMIT_STATUS_CONFLICT
        assert reply.outcome.kind == wire.OUTCOME_KIND_REFUSED
        assert run.syncer._services[0]._spool == {}
        await b.contribute(value=4.0)
        await asyncio.sleep(1.0)
        assert await b.published(1) == [-4.0, -4.0]
        assert await a.end() is OutcomeKind.REFUSED

    run_virtual(scenario())


def not_a_number(numel: int) -> memoryview:
    values = torch.zeros(numel)
    values[3] = float("nan")
    return to_bytes(values.view(torch.uint8))


MALFORMED = [
    pytest.param("float32", {"payload": bytes(8)}, "8 bytes, the plan asks 79872", id="size"),
    pytest.param("float32", {"codec": "int4"}, "codec 'int4'", id="codec"),
    pytest.param("float32", {"codec": "zip"}, "codec 'zip'", id="unknown-codec"),
    pytest.param("float32", {"digest": b"\x07" * 32}, "does not match the digest", id="digest"),
    pytest.param("float32", {"payload": not_a_number(19968)}, "nan", id="nan"),
    pytest.param("int4", {"payload": bytes(10296)}, "int4", id="int4-zero-scales"),
    pytest.param("int4", {"payload": b"\xff" * 10296}, "int4", id="int4-nan-scales"),
]


@pytest.mark.parametrize(("codec", "changes", "reason"), MALFORMED)
def test_a_malformed_contribution_is_refused_and_the_others_go_on(
    setting: Setting, codec: str, changes: dict[str, Any], reason: str
) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(replace(setting, uplink_codec=codec))
        await a.submit(lane_id=1)

        reply = await a.submit(**changes)

        assert reply.status == wire.SUBMIT_STATUS_OUTCOME
        assert reply.outcome.kind == wire.OUTCOME_KIND_REFUSED
        assert reason in reply.outcome.reason
        assert run.syncer._services[0]._spool == {}, "with all its lanes"
        assert version_of(run) == (0, 0, True)
        await b.contribute(value=7.0)
        await asyncio.sleep(1.0)
        assert version_of(run) == (1, 0, True)
        assert list(run.syncer.states[0].contributors) == ["b"]

    run_virtual(scenario())


@pytest.mark.parametrize(
    "changes",
    [
        {"lane_id": 9},
        {"weight_tokens": 0},
        {"key": RoundKey(0, 5, 0, 0)},
        {"key": RoundKey(0, 0, 0, 1)},
    ],
    ids=["lane", "tokens", "fragment", "attempt"],
)
def test_what_no_round_can_take_is_invalid(setting: Setting, changes: dict[str, Any]) -> None:
    async def scenario() -> None:
        run, (a, _) = await founded(setting)
        key = key_message(changes.pop("key", KEY))
        header = wire.SubmitHeader(
            key=key, lane_id=changes.get("lane_id", 0), codec="float32",
            weight_tokens=changes.get("weight_tokens", 4), weight_steps=4,
        )  # fmt: skip

        reply = await a.call("fragment.submit", header, b"")

        assert wire.SubmitReply.FromString(reply.header).status == wire.SUBMIT_STATUS_INVALID
        assert version_of(run) == (0, 0, True)

    run_virtual(scenario())


@pytest.mark.parametrize(
    "changes",
    [
        {"codec": "int4"},
        {"grant": grant("a", timeline=1)},
        {"grant": grant("b")},
        {"lane_id": 9},
        {"key": key_message(RoundKey(0, 0, 1, 0))},
        {"key": key_message(RoundKey(0, 7, 0, 0))},
    ],
    ids=["codec", "fenced", "conflict", "lane", "not-open", "fragment"],
)
def test_a_refused_payload_is_not_read(setting: Setting, changes: dict[str, Any]) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        await b.submit()
        call = Incoming(a, **changes)

        await run.syncer.handlers["fragment.submit"](call)

        assert not call.is_read

    run_virtual(scenario())


def test_a_payload_of_another_size_is_not_read(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, _) = await founded(setting)
        call = Incoming(a)
        call.payload_bytes = 1 << 40

        await run.syncer.handlers["fragment.submit"](call)

        assert not call.is_read

    run_virtual(scenario())


def test_a_decline_leaves_the_attempt_to_the_others(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        await b.submit()

        assert (await b.decline()).is_accepted
        assert (await b.decline()).is_accepted, "as often as one likes"
        assert run.syncer._services[0]._spool == {}
        await a.contribute(value=6.0)
        await asyncio.sleep(1.0)

        assert await a.published(1) == [-6.0, -6.0]
        assert await b.end() is OutcomeKind.REFUSED
        assert records_of(setting).load(1).refused == {"b": "declined: not finite"}
        await restart(run)
        assert await b.end() is OutcomeKind.REFUSED, "for ever"

    run_virtual(scenario())


def test_when_everybody_declines_the_attempt_expires_at_once(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        await a.decline()
        await b.decline()
        await asyncio.sleep(1.0)

        assert version_of(run) == (0, 1, True)
        assert await a.end() is OutcomeKind.EXPIRED

    run_virtual(scenario())


def test_a_late_lane_is_answered_with_its_outcome(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        await a.contribute()
        await asyncio.sleep(setting.round_deadline_s + 1)

        late = await b.submit()

        assert late.status == wire.SUBMIT_STATUS_OUTCOME
        assert late.outcome.kind == wire.OUTCOME_KIND_EXPIRED
        assert version_of(run) == (0, 1, True)
        await a.contribute(replace(KEY, attempt=1))
        await b.contribute(replace(KEY, attempt=1))
        await asyncio.sleep(1)
        assert await a.end(replace(KEY, attempt=1)) is OutcomeKind.INCLUDED
        assert await a.end(KEY) is OutcomeKind.EXPIRED

    run_virtual(scenario())


# -- what is published ---------------------------------------------------------------------------


def test_retained_versions_are_served_and_older_ones_are_gone(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        for version in range(6):
            for island in (a, b):
                await island.contribute(RoundKey(0, 0, version, 0), value=1.0)
            await asyncio.sleep(1.0)

        async def status(version: int, kind: int, lane_id: int = 0) -> int:
            header = wire.FetchHeader(version=version, lane_id=lane_id, kind=kind)
            reply = await a.call("fragment.fetch", header)
            return wire.FetchReply.FromString(reply.header).status

        assert await status(6, wire.FETCH_KIND_PAYLOAD) == wire.FETCH_STATUS_OK
        assert await status(2, wire.FETCH_KIND_PAYLOAD) == wire.FETCH_STATUS_OK
        assert await a.published(2) == [-2.0, -2.0]
        assert await status(1, wire.FETCH_KIND_DENSE) == wire.FETCH_STATUS_GONE
        assert await status(7, wire.FETCH_KIND_DENSE) == wire.FETCH_STATUS_UNKNOWN
        assert await status(6, wire.FETCH_KIND_DENSE, 2) == wire.FETCH_STATUS_UNKNOWN
        service = run.syncer._services[0]
        assert sorted(service.rounds.past) == [2, 3, 4, 5], "forgotten with their records"
        assert service.record is not None
        assert service.record.contributions == {}, "kept on the disk only"

    run_virtual(scenario())


def test_version_0_has_no_payload_but_is_served_dense(setting: Setting) -> None:
    async def scenario() -> None:
        _, (a, _) = await founded(setting)

        reply = await a.call("fragment.fetch", wire.FetchHeader(kind=wire.FETCH_KIND_PAYLOAD))

        assert wire.FetchReply.FromString(reply.header).status == wire.FETCH_STATUS_GONE
        assert await a.published(0) == [0.0, 0.0]

    run_virtual(scenario())


# -- kills at chosen points ----------------------------------------------------------------------


def test_a_syncer_killed_after_the_ack_loses_nothing_once_the_islands_resubmit(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        await a.contribute(value=2.0)
        first = await a.poll(KEY)

        await restart(run)
        second = await a.poll(KEY)

        assert (first.syncer_epoch, second.syncer_epoch) == (1, 2)
        assert not second.outcomes
        assert version_of(run) == (0, 0, True), "open at once: every island had its grant"
        await a.contribute(value=2.0)
        await b.contribute(value=4.0)
        await asyncio.sleep(1.0)
        assert await a.published(1) == [-3.0, -3.0]

    run_virtual(scenario())


def test_the_deadline_runs_in_a_restarted_syncer_though_one_island_never_comes_back(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run, (a, _) = await founded(setting)
        await a.contribute()
        await restart(run)

        await a.contribute()
        await asyncio.sleep(setting.round_deadline_s + 1)

        assert await a.end() is OutcomeKind.EXPIRED

    run_virtual(scenario())


def dying(method: Callable[..., Any], when: str, *, on_call: int) -> Callable[..., Any]:
    """`method`, whose n-th call ends in death before or after its work."""
    calls = 0

    def call(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == on_call and when == "before":
            raise Dead
        result = method(*arguments)
        if calls == on_call:
            raise Dead
        return result

    return call


@pytest.mark.parametrize(
    ("when", "version", "end"),
    [("before", 0, None), ("after", 1, OutcomeKind.INCLUDED)],
    ids=["before-the-commit", "after-the-commit"],
)
def test_a_syncer_killed_while_closing(
    setting: Setting,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    version: int,
    end: OutcomeKind | None,
) -> None:
    # The first commit is version 0.
    monkeypatch.setattr(FragmentStore, "commit", dying(FragmentStore.commit, when, on_call=2))

    async def scenario() -> None:
        run = VirtualRun(setting)
        run.worker = SlowWorker()
        await run.start_syncer()
        a, b = RawIsland(run, "a"), RawIsland(run, "b")
        await a.poll()
        await b.poll()
        await a.upload()
        await a.contribute(value=2.0)
        await b.contribute(value=4.0)
        await run.worker.died.wait()
        assert await a.end() is None, "nobody hears of what may not be durable"
        assert version_of(run)[0] == 0

        run.worker = SlowWorker()
        await restart(run)

        assert version_of(run) == (version, 0, True)
        assert await a.end() is end
        late = await b.submit(value=4.0)
        if version == 0:
            assert late.status == wire.SUBMIT_STATUS_RECEIVED
            await b.submit(lane_id=1, value=4.0)
            await a.contribute(value=2.0)
            await asyncio.sleep(1.0)
        else:
            assert late.outcome.kind == wire.OUTCOME_KIND_INCLUDED
        assert await a.published(1) == [-3.0, -3.0]
        assert await b.end() is OutcomeKind.INCLUDED

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("when", "attempt"), [("before", 0), ("after", 1)], ids=["before", "after"]
)
def test_an_expiry_is_durable_before_it_is_announced(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, when: str, attempt: int
) -> None:
    monkeypatch.setattr(
        FragmentStore, "record_expiry", dying(FragmentStore.record_expiry, when, on_call=1)
    )

    async def scenario() -> None:
        run, (a, _) = await founded(setting)
        run.worker = SlowWorker()
        await restart(run)
        await a.contribute()
        await run.worker.died.wait()
        assert await a.end() is None
        assert version_of(run)[1] == 0

        await restart(run)

        assert version_of(run) == (0, attempt, True)
        assert await a.end() is (OutcomeKind.EXPIRED if attempt else None)

    run_virtual(scenario())


def test_a_syncer_whose_worker_fails_ends_and_says_why(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(FragmentStore, "commit", full)
        await a.contribute()
        await b.contribute()
        await run.syncer.ended.wait()

        assert isinstance(run.syncer.failure, OSError)
        assert run.syncer.fatal is None
        assert version_of(run)[0] == 0

    run_virtual(scenario())


@pytest.mark.parametrize("lost", ["newest", "all"])
def test_an_island_ahead_of_its_syncer_is_told_that_the_store_lost_a_version(
    setting: Setting, lost: str
) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        await a.contribute()
        await b.contribute()
        await asyncio.sleep(1.0)
        known = (await a.poll()).fragments
        await run.kill_syncer()
        for path in sorted(setting.directory.rglob("*.record"))[-1 if lost == "newest" else 0 :]:
            path.write_bytes(b"rotten")
        await run.start_syncer()

        reply = await a.poll(known=known)
        submitted = await a.submit(RoundKey(0, 0, 1, 0))

        assert reply.fatal.exit_code == 30
        assert "holds version 1" in reply.fatal.reason
        assert submitted.status == wire.SUBMIT_STATUS_NOT_OPEN

    run_virtual(scenario())


# -- numerics and lost quorum ----------------------------------------------------------------------


def test_a_result_that_is_not_finite_expires_three_times_and_ends_the_syncer(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(replace(setting, optimizer=OuterOptimizer("sgd", 8.0, 0.0, 0)))
        for attempt in range(3):
            assert run.syncer.fatal is None
            for island in (a, b):
                await island.contribute(RoundKey(0, 0, 0, attempt), value=2e38)
            await asyncio.sleep(1.0)
            assert await a.end(RoundKey(0, 0, 0, attempt)) is OutcomeKind.EXPIRED

        assert run.syncer.ended.is_set()
        assert run.syncer.fatal is not None
        assert run.syncer.fatal.exit_code == 20
        assert torch.equal(records_of(setting).load(0).lanes[0].theta[:2], torch.zeros(2))
        assert (await a.poll()).fatal.exit_code == 20

    run_virtual(scenario())


def test_three_expiries_reach_the_islands_as_quorum_lost_with_the_command(tmp_path: Path) -> None:
    setting = Setting({"w": [16.0]}, descend, tmp_path, inner_steps=40, overlap_steps=1)

    async def scenario() -> tuple[list[Any], list[dict[str, Any]], float]:
        run = VirtualRun(setting)
        await run.start_syncer()
        a, b = run.island("a"), run.island("b")
        await asyncio.gather(a.start(), b.start())
        halves = (a.train(40), b.train(6))
        ends = await asyncio.gather(*halves, return_exceptions=True)
        return ends, a.kinds("round_expired"), asyncio.get_running_loop().time()

    (lost, fine), expired, now = run_virtual(scenario())

    assert fine is None
    assert isinstance(lost, QuorumLost)
    assert lost.exit_code == 50
    assert lost.island_id == "a"
    assert "missing: b" in str(lost)
    assert "diloco island RUN.toml --island b" in str(lost)
    # b is gone after its first round: a's sends at 8, 12 and 16 expire, each a deadline later.
    assert [event["inner_step"] for event in expired] == [9, 13]
    assert 16 + 3 * 59 <= now <= 16 + 3 * 61


# -- kills at any moment ---------------------------------------------------------------------------


def whole(directory: Path) -> Setting:
    return Setting(
        {name: [0.5] * 200 for name in ("u", "v", "w")},
        wander,
        directory,
        inner_steps=22,
        inner_steps_per_round=4,
        num_fragments=2,
        overlap_steps=1,
        flush=True,
        uplink_codec="int4",
        downlink_codec="int4",
        optimizer=OuterOptimizer("nesterov", 0.7, 0.9, 2),
        tokens={"a": 3, "b": 5},
    )


def wander(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    """Move as far as the seed of island and step says."""
    generator = torch.Generator().manual_seed(ord(island) * 1000 + inner_step)
    for parameter in parameters.values():
        parameter.sub_(torch.randn(parameter.shape, generator=generator) * 0.1)


def truth(records: list[Mapping[str, Any]]) -> dict[tuple[int, int], Any]:
    """What became durable, by fragment and version; every version must have been one thing."""
    made: dict[tuple[int, int], Any] = {}
    for header in records:
        assert made.setdefault((header["fragment_id"], header["version"]), header) == header
    return made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    run = VirtualRun(whole(tmp_path_factory.mktemp("undisturbed")))
    islands = run_virtual(run.run())
    assert islands["a"].values() == islands["b"].values()
    return truth(run.records), {name: island.published for name, island in islands.items()}


async def kill_again_and_again(run: VirtualRun, rng: random.Random, up_s: float) -> None:
    while True:
        await asyncio.sleep(rng.choice([rng.uniform(0.0, 1.0), rng.uniform(0.0, up_s)]))
        await run.kill_syncer()
        await asyncio.sleep(rng.choice([0.0, rng.uniform(0.0, 3.0)]))
        run.worker = SlowWorker(rng.uniform(0.0, 0.2), rng.uniform(0.0, 0.2))
        await run.start_syncer()


async def disturbed(
    run: VirtualRun, *disturbances: Coroutine[Any, Any, None]
) -> tuple[dict[str, VirtualIsland], list[BaseException | None]]:
    """Run all islands while something else goes on; returns them and how they ended."""
    run.worker = SlowWorker(0.1, 0.1)
    await run.start_syncer()
    islands = {name: run.island(name) for name in run.setting.islands}
    others = [asyncio.create_task(disturbance) for disturbance in disturbances]
    ends = await asyncio.gather(
        *(island.run() for island in islands.values()), return_exceptions=True
    )
    for other in others:
        other.cancel()
    for end in await asyncio.gather(*others, return_exceptions=True):
        assert isinstance(end, asyncio.CancelledError), end
    return islands, ends


@pytest.mark.parametrize("seed", range(8))
def test_a_run_whose_syncer_is_killed_at_any_moment_publishes_the_same_bytes(
    tmp_path: Path, undisturbed: tuple[Any, Any], seed: int
) -> None:
    setting = whole(tmp_path)

    async def scenario() -> tuple[VirtualRun, dict[str, VirtualIsland]]:
        run = VirtualRun(setting)
        islands, ends = await disturbed(run, kill_again_and_again(run, random.Random(seed), 4.0))
        assert ends == [None, None]
        return run, islands

    run, islands = run_virtual(scenario())

    records, published = undisturbed
    assert run.epoch > 5
    assert truth(run.records) == records
    assert {name: island.published for name, island in islands.items()} == published
    assert islands["a"].values() == islands["b"].values()
    for island in islands.values():
        assert {event["outcome"] for event in island.kinds("fragment_merged")} == {"included"}
        assert not island.kinds("round_expired")
        assert not island.kinds("digest_mismatch")
        assert island.kinds("syncer_restarted")
    assert_recomputed(setting)


def assert_recomputed(setting: Setting) -> None:
    """Every retained version follows from the one before, bit by bit."""
    for fragment in setting.plan().fragments:
        store = FragmentStore(setting.directory, fragment, 4)
        last = store.recover()
        assert last is not None
        for version in range(max(1, last.record.version - 3), last.record.version + 1):
            after = store.load(version)
            assert after.lane_digests == recompute(
                store.load(version - 1), after, setting.publication()
            )


@pytest.mark.parametrize("seed", range(8))
def test_with_kills_stalls_and_divergence_islands_never_disagree(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    setting = replace(whole(tmp_path), round_deadline_s=6.0, islands=("a", "b", "c"))

    def stray(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
        wander(island, inner_step, parameters)
        if rng.random() < 0.03:
            parameters["u"].fill_(float("nan"))

    async def stall(islands: list[VirtualIsland]) -> None:
        while True:
            await asyncio.sleep(rng.uniform(0.0, 10.0))
            for island in islands:
                step_s = rng.choice([1.0, 1.0, 1.0, 0.1, 1.5 * setting.round_deadline_s])
                island.setting = replace(island.setting, step_s=step_s)

    async def scenario() -> tuple[VirtualRun, dict[str, VirtualIsland], list[Any]]:
        run = VirtualRun(replace(setting, inner_step=stray))
        made: list[VirtualIsland] = []
        make = run.island
        run.island = lambda name: made.append(make(name)) or made[-1]  # type: ignore[method-assign]
        kills = kill_again_and_again(run, rng, up_s=4 * setting.round_deadline_s)
        islands, ends = await disturbed(run, kills, stall(made))
        return run, islands, ends

    run, islands, ends = run_virtual(scenario())

    made = truth(run.records)
    for (_, version), header in made.items():
        assert len({c["island"] for c in header["contributors"]}) == len(header["contributors"])
        assert bool(header["contributors"]) == bool(version)
    for island in islands.values():
        for event in island.kinds("fragment_merged"):
            header = made[event["fragment_id"], event["version"]]
            assert event["digest"] == header["digest"]
            is_counted = island.name in {c["island"] for c in header["contributors"]}
            assert (event["outcome"] == "included") == is_counted
        assert not island.kinds("digest_mismatch")
    if any(ends):
        # One that diverged for good, or stalled for three deadlines, costs the others the quorum.
        assert all(isinstance(end, QuorumLost | AggregationError) for end in ends), ends
    else:
        assert len({str(island.values()) for island in islands.values()}) == 1
    assert_recomputed(setting)


def test_nothing_is_left_behind_at_the_end_of_a_run(tmp_path: Path) -> None:
    setting = whole(tmp_path)

    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        islands = [run.island(name) for name in setting.islands]
        await asyncio.gather(*(island.run() for island in islands))
        await asyncio.sleep(0.1)

        for service in run.syncer._services.values():
            assert service._spool == service._initial == service.rounds.contributions == {}
        assert run.syncer._tasks == set()
        for island in islands:
            assert len(island.exchange._tasks) == 1, "the poll"
            assert all(not c.sending and not c.staged for c in island.exchange._carried.values())

    run_virtual(scenario())


# -- whole islands -------------------------------------------------------------------------------


def test_a_declined_island_merges_without_contributing(tmp_path: Path) -> None:
    def diverge(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
        descend(island, inner_step, parameters)
        if island == "b" and inner_step == 3:
            parameters["w"].fill_(float("nan"))

    setting = Setting({"w": [16.0]}, diverge, tmp_path, inner_steps=8, overlap_steps=1)

    islands = run_virtual(VirtualRun(setting).run())

    a, b = islands["a"], islands["b"]
    # Version 1 is a's alone: 16 - 4. b took it after inner step 5, NaN and all forgotten.
    assert [v["w"][0] for v in b.published[4:]] == [12.0] * 4
    assert b.local[4]["w"] == [12.0]
    outcomes = [event["outcome"] for event in b.kinds("fragment_merged")]
    assert outcomes == ["declined"]
    assert "not finite" in b.kinds("fragment_sent")[0]["declined"]
    assert [event["contributors"] for event in a.kinds("fragment_merged")] == [("a",)]


@pytest.mark.parametrize("islands", [("a",), ("a", "b")], ids=["alone", "all"])
@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_three_pseudo_gradients_in_a_row_that_are_not_finite_end_the_island(
    tmp_path: Path, islands: tuple[str, ...], overlap_steps: int
) -> None:
    def explode(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
        parameters["w"].fill_(float("inf"))

    setting = Setting(
        {"w": [16.0]}, explode, tmp_path, 60, islands=islands, overlap_steps=overlap_steps
    )

    async def scenario() -> list[Any]:
        run = VirtualRun(setting)
        await run.start_syncer()
        made = [run.island(name) for name in islands]
        return await asyncio.gather(*(island.run() for island in made), return_exceptions=True)

    for end in run_virtual(scenario()):
        assert isinstance(end, DilocoError)
        assert end.exit_code == 20
        assert "3 pseudo-gradients in a row were not finite" in str(end)


def test_an_island_that_comes_to_a_run_under_way_is_told_so(tmp_path: Path) -> None:
    setting = Setting({"w": [16.0]}, descend, tmp_path, inner_steps=8)

    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        a, b = run.island("a"), run.island("b")
        await asyncio.gather(a.start(), b.start())
        await asyncio.gather(a.train(4), b.train(4))

        with pytest.raises(IslandFailed, match="is at version 1"):
            await run.island("b").start()

    run_virtual(scenario())


def test_calls_of_a_killed_syncer_are_reset_not_answered(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, _) = await founded(setting)
        known = await a.poll()
        waiting = asyncio.create_task(
            a.poll(wait_s=60.0, known=known.fragments, known_epoch=known.syncer_epoch)
        )
        await asyncio.sleep(1.0)

        await run.kill_syncer()

        with pytest.raises(PeerReset):
            await waiting

    run_virtual(scenario())
