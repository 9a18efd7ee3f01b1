"""A carrier against a real syncer: what it sends again, what it stages, what ends it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.compression.base import from_bytes
from diloco.compression.registry import get_codec
from diloco.errors import (
    CodecError,
    CoordinatorUnavailable,
    DilocoError,
    Fenced,
    IslandFailed,
    QuorumLost,
)
from diloco.island.exchange.calls import ExchangeRules
from diloco.island.exchange.checkpoint_state import FragmentCheckpoint, LaneCheckpoint
from diloco.island.exchange.contributions import Send
from diloco.island.exchange.exchange import Exchange, SyncerConnection
from diloco.island.exchange.staging import grouped
from diloco.outer.fragments import Lane
from diloco.outer.pseudo_gradient import bit_sum
from diloco.protocol.island.ledger import FragmentLedger, Outstanding, Verdict
from diloco.protocol.island.soundness import Reach
from diloco.protocol.island.votes import NOT_FOLLOWED
from diloco.protocol.rounds.terms import RoundKey
from diloco.protos import fragment_pb2 as wire
from diloco.syncer.polls import Polls
from diloco.transport.calls.loopback import LoopbackNetwork, run_virtual
from diloco.transport.contracts import Buffer, IncomingCall, Reply, Transport
from diloco.transport.errors import ConnectError, PeerReset
from diloco.transport.retry import RetryPolicy
from diloco.transport.shaping.link import Link, LinkQueue
from diloco.transport.shaping.shaped import ShapedTransport
from diloco.transport.transfer import Transfer
from diloco.versions.store import FragmentStore
from tests.raw_island import KEY, NUMEL, RawIsland, SlowWorker, founded, restart
from tests.virtual_run import Setting, VirtualIsland, VirtualRun, grant

DESCENT = {"a": 1.0, "b": 3.0}


def descend(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    """Uneven moves, so that int4 loses something."""
    for parameter in parameters.values():
        parameter.sub_(torch.linspace(0.1, DESCENT[island], parameter.numel()))


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting({"w": [16.0] * 5}, descend, tmp_path, inner_steps=16, overlap_steps=1)


class Wire:
    """A transport that writes calls down, can be cut, and lets a test change what passes."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.calls: list[tuple[str, bytes, bytes]] = []
        self.is_cut = False
        self.let_through: asyncio.Event | None = None
        self.on_request: Callable[[str, bytes, Buffer], Buffer] = lambda method, header, p: p
        self.on_reply: Callable[[str, bytes, Reply], Reply] = lambda method, header, reply: reply

    @property
    def peer(self) -> str:
        return self.inner.peer

    @property
    def counts(self) -> Counter[str]:
        return Counter(method.removeprefix("fragment.") for method, _, _ in self.calls)

    def of(self, method: str) -> list[tuple[str, bytes, bytes]]:
        return [call for call in self.calls if call[0] == f"fragment.{method}"]

    async def call(
        self,
        method: str,
        header: bytes,
        payload: Buffer = b"",
        *,
        deadline_s: float,
        max_reply_bytes: int = 0,
        transfer: Transfer | None = None,
    ) -> Reply:
        if self.is_cut:
            raise ConnectError("cut", peer=self.peer, method=method)
        self.calls.append((method, bytes(header), bytes(payload)))
        payload = self.on_request(method, header, payload)
        reply = await self.inner.call(
            method,
            header,
            payload,
            deadline_s=deadline_s,
            max_reply_bytes=max_reply_bytes,
            transfer=transfer,
        )
        if self.is_cut:
            raise PeerReset("cut", peer=self.peer, method=method)
        if self.let_through is not None:
            await self.let_through.wait()
        return self.on_reply(method, header, reply)

    async def close(self) -> None:
        await self.inner.close()


class WiredIsland(VirtualIsland):
    """A whole island whose wires a test can touch."""

    def __init__(self, run: VirtualRun, name: str) -> None:
        self.control = Wire(run.network.connect("syncer"))
        self.data = Wire(run.network.connect("syncer"))
        super().__init__(name, run.setting, self.control, self.data)


async def started(setting: Setting) -> tuple[VirtualRun, WiredIsland, WiredIsland]:
    run = VirtualRun(setting)
    await run.start_syncer()
    a, b = WiredIsland(run, "a"), WiredIsland(run, "b")
    await asyncio.gather(a.start(), b.start())
    return run, a, b


def make_exchange(
    setting: Setting,
    name: str,
    lanes: Mapping[int, tuple[int, ...]],
    control: Transport,
    data: Transport | None = None,
    is_leader: bool = True,
    **rules: Any,
) -> Exchange:
    """One rank's exchange, without the session around it."""
    values = {
        "uplink_codec": setting.uplink_codec,
        "error_feedback": setting.error_feedback,
        "error_feedback_decay": setting.error_feedback_decay,
        "rpc_deadline_s": 60.0,
        "policy": RetryPolicy(max_wait_s=1.0, budget_s=600.0),
        "seed": 0,
    }
    return Exchange(
        setting.plan(),
        lanes,
        connections=[SyncerConnection(range(setting.num_fragments), control, data or control)],
        grant=grant(name),
        rules=ExchangeRules(**(values | rules)),
        rng=random.Random(0),
        on_event=lambda event: None,
        is_leader=is_leader,
    )


def outstanding(key: RoundKey = KEY, tokens: int = 4) -> Outstanding:
    return Outstanding(key, 4, tokens, 4, is_flush=False)


# -- sent again ----------------------------------------------------------------------------------


def test_after_a_restart_the_same_bytes_are_sent_again_unasked(setting: Setting) -> None:
    async def scenario() -> None:
        run, a, b = await started(replace(setting, uplink_codec="int4"))
        training = asyncio.create_task(a.train(5))
        await asyncio.sleep(4.5)
        assert len(a.data.of("submit")) == 1

        await restart(run)
        await b.train(5)
        await training

        first, second = a.data.of("submit")
        assert first == second, "header, grant, digest, payload"
        (event,) = a.kinds("syncer_restarted")
        assert (event["syncer_epoch"], event["resent_lanes"]) == (2, 1)
        assert a.kinds("fragment_merged")[0]["outcome"] == "included"
        assert a.values() == b.values()

    run_virtual(scenario())


def test_a_restart_between_the_answer_and_the_next_poll_is_noticed(setting: Setting) -> None:
    async def scenario() -> None:
        run, a, b = await started(setting)
        a.control.is_cut = True
        training = asyncio.create_task(a.train(5))
        await asyncio.sleep(4.5)
        await restart(run)
        await asyncio.sleep(20.0)
        a.control.is_cut = False

        await b.train(5)
        await training

        assert len(a.data.of("submit")) == 2
        assert a.kinds("fragment_merged")[0]["outcome"] == "included"

    run_virtual(scenario())


def test_a_lane_that_was_received_by_the_new_syncer_is_not_sent_again(setting: Setting) -> None:
    async def scenario() -> None:
        run, a, b = await started(setting)
        await run.kill_syncer()
        training = asyncio.create_task(a.train(5))
        await asyncio.sleep(4.5)
        a.control.is_cut = True
        await run.start_syncer()
        await asyncio.sleep(5.0)
        a.control.is_cut = False
        await b.train(5)
        await training

        replies = [header for _, header, _ in a.data.of("submit")]
        assert len(set(replies)) == 1
        assert a.kinds("syncer_restarted")[0]["resent_lanes"] == 0

    run_virtual(scenario())


def test_a_decline_that_a_restart_forgot_is_repeated(setting: Setting) -> None:
    def diverge(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
        descend(island, inner_step, parameters)
        if island == "b":
            parameters["w"].fill_(float("nan"))

    async def scenario() -> float:
        run, a, b = await started(replace(setting, inner_step=diverge))
        training = asyncio.create_task(b.train(5))
        await asyncio.sleep(5.5)
        assert run.syncer._services[0].runner.rounds.current.left

        await restart(run)
        await asyncio.sleep(2.0)
        await a.train(5)
        await training

        assert b.kinds("fragment_merged")[0]["outcome"] == "declined"
        assert a.kinds("fragment_merged")[0]["contributors"] == ("a",)
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) < 20.0, "no deadline was needed"


def test_a_refusal_that_a_restart_forgot_is_judged_again(setting: Setting) -> None:
    async def scenario() -> None:
        run, a, b = await started(setting)
        damaged = iter([True])
        a.data.on_request = lambda method, header, payload: (
            bytes(len(payload)) if method == "fragment.submit" and next(damaged, False) else payload
        )
        training = asyncio.create_task(a.train(5))
        await asyncio.sleep(4.5)
        assert "a" in run.syncer._services[0].runner.rounds.current.left

        await restart(run)
        await b.train(5)
        await training

        assert a.kinds("fragment_merged")[0]["outcome"] == "included"

    run_virtual(scenario())


def test_a_word_of_the_syncer_before_does_not_count(setting: Setting) -> None:
    async def scenario() -> None:
        run, a, b = await started(setting)
        damaged = iter([True])
        a.data.on_request = lambda method, header, payload: (
            bytes(len(payload)) if method == "fragment.submit" and next(damaged, False) else payload
        )
        a.data.let_through = asyncio.Event()
        training = asyncio.create_task(a.train(5))
        await asyncio.sleep(4.5)
        assert "a" in run.syncer._services[0].runner.rounds.current.left, (
            "but a has not heard of it yet"
        )

        await restart(run)
        await asyncio.sleep(2.0)
        a.data.let_through.set()
        await b.train(5)
        await training

        assert a.kinds("fragment_merged")[0]["outcome"] == "included"

    run_virtual(scenario())


def test_a_refused_contribution_expires_with_its_attempt(setting: Setting) -> None:
    async def scenario() -> None:
        _, a, _ = await started(setting)
        a.data.on_request = lambda method, header, payload: (
            bytes(len(payload)) if method == "fragment.submit" else payload
        )
        await a.train(5)

        assert [event["attempt"] for event in a.kinds("round_expired")] == [0]
        assert a.kinds("round_expired")[0]["blocked_s"] == pytest.approx(59.0)

    run_virtual(scenario())


def test_a_refused_contribution_still_merges_what_the_others_made(setting: Setting) -> None:
    async def scenario() -> None:
        _, a, b = await started(setting)
        a.data.on_request = lambda method, header, payload: (
            bytes(len(payload)) if method == "fragment.submit" else payload
        )
        await asyncio.gather(a.train(5), b.train(5))

        assert a.kinds("fragment_merged")[0]["outcome"] == "refused"
        assert a.kinds("fragment_merged")[0]["contributors"] == ("b",)
        assert a.values() == b.values()
        # Its work was replaced, and counts nowhere: the next one is of the steps since the merge.
        await asyncio.gather(a.train(3), b.train(3))
        assert [event["weight_steps"] for event in a.kinds("fragment_sent")] == [4, 3]

    run_virtual(scenario())


# -- quiet ---------------------------------------------------------------------------------------


def test_waiting_costs_a_poll_now_and_then_and_nothing_else(setting: Setting) -> None:
    async def scenario() -> None:
        _, a, _ = await started(setting)
        training = asyncio.create_task(a.train(5))
        await asyncio.sleep(4.5)
        before = a.control.counts + a.data.counts

        await asyncio.sleep(50.0)

        after = a.control.counts + a.data.counts - before
        assert set(after) == {"poll"}
        assert after["poll"] <= 4
        training.cancel()

    run_virtual(scenario())


def test_an_island_that_comes_while_the_attempt_expires_asks_four_times_a_second(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run, a, b = await started(replace(setting, round_deadline_s=10.0))
        run.worker = SlowWorker(before_s=9.0)
        await restart(run)
        b.setting = replace(b.setting, step_s=7.5)
        training = asyncio.gather(a.train(5), b.train(5))
        # From here: a sends after 4 s and is verified after 13 s; the expiry is written from 23 s
        # to 32 s; b sends after 30 s.
        await asyncio.sleep(31.9)
        assert run.syncer.phase(0) == "expiring"

        assert 2 <= len(b.data.of("submit")) <= 4 * 2
        await training
        assert [len(island.kinds("round_expired")) for island in (a, b)] == [1, 1]

    run_virtual(scenario())


def lanes_of(setting: Setting, value: float = 1.0) -> dict[int, Tensor]:
    lanes = setting.plan().fragments[0].lanes
    return {lane.lane_id: torch.full((lane.numel,), value) for lane in lanes}


def test_declining_is_repeated_once_a_second_at_most(setting: Setting) -> None:
    async def scenario() -> None:
        _, a, _ = await started(setting)
        a.exchange.decline(outstanding(), "nothing")
        # Its poll was on its way before and comes back after 20 s; the next one brings the end.
        await asyncio.sleep(21.0)
        repeated = a.control.counts["decline"]
        await asyncio.sleep(21.0)

        assert 1 <= repeated <= 22
        assert a.control.counts["decline"] == repeated

    run_virtual(scenario())


# -- residuals -----------------------------------------------------------------------------------


def feedback(setting: Setting, decay: float = 1.0) -> Setting:
    return replace(setting, uplink_codec="int4", error_feedback=True, error_feedback_decay=decay)


def lost(x: Tensor) -> Tensor:
    codec = get_codec("int4")
    return x - codec.decode(codec.encode(x), x.numel())


def padded(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, 128 - values.numel()))


@pytest.mark.parametrize("decay", [1.0, 0.75])
def test_included_keeps_what_quantisation_lost_for_the_next_send(
    setting: Setting, decay: float
) -> None:
    async def scenario() -> None:
        _, a, b = await started(feedback(setting, decay))
        await asyncio.gather(a.train(5), b.train(5))

        delta = padded(4 * torch.linspace(0.1, 1.0, 5))
        residual = a.exchange._fragments[0].residual[0]
        assert residual.abs().max() > 0
        # Four subtractions from 16 round delta by at most 4 * 2^-20; so does the decode of it.
        torch.testing.assert_close(residual, lost(delta), rtol=0, atol=1e-5)
        anchor = a.exchange._fragments[0].anchor[0].clone()
        await asyncio.gather(a.train(3), b.train(3))
        await asyncio.sleep(0.1)
        x = anchor - padded(torch.tensor(a.local[7]["w"])) + residual * decay
        payload = a.data.of("submit")[1][2]
        codec = get_codec("int4")
        assert torch.equal(
            codec.decode(from_bytes(payload), 128), codec.decode(codec.encode(x), 128)
        )

    run_virtual(scenario())


@pytest.mark.parametrize("bit", [0, 22, 30])
@pytest.mark.parametrize("is_kept", [False, True], ids=["sent", "captured"])
def test_a_residual_in_which_a_bit_has_flipped_is_forgotten(
    setting: Setting, is_kept: bool, bit: int
) -> None:
    async def scenario() -> None:
        _, a, b = await started(feedback(setting))
        await asyncio.gather(a.train(5), b.train(5))
        carried = a.exchange._fragments[0]
        carried.residual[0].view(torch.int32)[3] ^= 1 << bit
        if is_kept:
            lanes: dict[int, LaneCheckpoint] = {}
            await a.exchange.capture(lanes)
            assert not lanes[0].residual[0].any()
            assert len(a.kinds("alarm")) == 1
            return
        anchor = carried.anchor[0].clone()
        await asyncio.gather(a.train(3), b.train(3))
        await asyncio.sleep(0.1)

        x, codec = anchor - padded(torch.tensor(a.local[7]["w"])), get_codec("int4")
        payload = from_bytes(a.data.of("submit")[1][2])
        assert torch.equal(codec.decode(payload, 128), codec.decode(codec.encode(x), 128))
        (alarm,) = a.kinds("alarm")
        assert alarm["alarm"] == "bit_flipped"
        assert "lane 0 of fragment 0 had left over from its last contribution" in alarm["text"]

    run_virtual(scenario())


def test_expired_keeps_the_residual_from_before(setting: Setting) -> None:
    async def scenario() -> None:
        _, a, b = await started(feedback(setting, 0.9))
        await asyncio.gather(a.train(5), b.train(5))
        before = a.exchange._fragments[0].residual[0].clone()
        await a.train(4)

        assert [event["attempt"] for event in a.kinds("round_expired")] == [0]
        assert torch.equal(a.exchange._fragments[0].residual[0], before)

    run_virtual(scenario())


@pytest.mark.parametrize("kind", ["refused", "declined"])
def test_refused_and_declined_keep_the_residual_from_before(setting: Setting, kind: str) -> None:
    def diverge(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
        descend(island, inner_step, parameters)
        if kind == "declined" and island == "a" and inner_step == 8:
            parameters["w"].fill_(float("inf"))

    async def scenario() -> None:
        _, a, b = await started(replace(feedback(setting, 0.9), inner_step=diverge))
        await asyncio.gather(a.train(5), b.train(5))
        before = a.exchange._fragments[0].residual[0].clone()
        if kind == "refused":
            a.data.on_request = lambda method, header, payload: (
                bytes(len(payload)) if method == "fragment.submit" else payload
            )
        await asyncio.gather(a.train(4), b.train(4))

        assert a.kinds("fragment_merged")[1]["outcome"] == kind
        assert torch.equal(a.exchange._fragments[0].residual[0], before)

    run_virtual(scenario())


def test_without_error_feedback_there_is_no_residual(setting: Setting) -> None:
    async def scenario() -> None:
        _, a, b = await started(replace(setting, uplink_codec="int4"))
        await asyncio.gather(a.train(5), b.train(5))

        assert a.exchange._fragments[0].residual == {}

    run_virtual(scenario())


# -- staging -------------------------------------------------------------------------------------


def test_staging_changes_neither_anchor_nor_model(setting: Setting) -> None:
    async def scenario() -> None:
        _, a, b = await started(replace(setting, overlap_steps=3))
        await asyncio.gather(a.train(6), b.train(6))

        assert a.exchange.view(0).staged_version == 1
        assert a.exchange._fragments[0].anchor_version == 0
        assert a.session.state.ledgers[0].version == 0
        assert a.published[-1] == {"w": [16.0] * 5}

    run_virtual(scenario())


def spoil_anchor(island: WiredIsland) -> None:
    anchor = island.exchange._fragments[0].anchor
    anchor[0] = anchor[0] + 1.0


def spoil_payload(island: WiredIsland) -> None:
    def spoil(method: str, header: bytes, reply: Reply) -> Reply:
        is_payload = (
            method == "fragment.fetch"
            and wire.FetchHeader.FromString(header).kind == wire.FETCH_KIND_PAYLOAD
        )
        return Reply(reply.header, bytes(len(reply.payload))) if is_payload else reply

    island.data.on_reply = spoil


@pytest.mark.parametrize("spoil", [spoil_anchor, spoil_payload])
@pytest.mark.parametrize("codec", ["int4", "float32"])
def test_a_lane_that_is_not_as_published_is_fetched_whole_and_reported(
    setting: Setting, codec: str, spoil: Callable[[WiredIsland], None]
) -> None:
    async def scenario() -> None:
        _, a, b = await started(replace(setting, downlink_codec=codec))
        spoil(a)
        await asyncio.gather(a.train(5), b.train(5))

        # A codec that publishes values does not read the anchor.
        is_seen = spoil is spoil_payload or codec == "int4"
        expected = [{"kind": "digest_mismatch", "fragment_id": 0, "version": 1, "lane_id": 0}]
        assert a.kinds("digest_mismatch") == (expected if is_seen else [])
        assert a.published == b.published
        assert a.values() == b.values()

    run_virtual(scenario())


def test_a_damaged_lane_costs_those_fetched_with_it_nothing(setting: Setting) -> None:
    async def scenario() -> None:
        _, a, b = await started(replace(setting, initial={"w": [16.0] * NUMEL}))

        def spoil(method: str, header: bytes, reply: Reply) -> Reply:
            if method != "fragment.fetch":
                return reply
            asked = wire.FetchHeader.FromString(header)
            fetched.append((asked.kind, tuple(asked.lane_ids)))
            if asked.kind != wire.FETCH_KIND_PAYLOAD:
                return reply
            payload = bytes(reply.payload)
            return Reply(reply.header, payload[:-1] + bytes([payload[-1] ^ 1]))

        fetched: list[tuple[int, tuple[int, ...]]] = []
        a.data.on_reply = spoil
        await asyncio.gather(a.train(5), b.train(5))

        assert fetched == [(wire.FETCH_KIND_PAYLOAD, (0, 1)), (wire.FETCH_KIND_DENSE, (1,))]
        assert [event["lane_id"] for event in a.kinds("digest_mismatch")] == [1]
        assert a.values() == b.values()

    run_virtual(scenario())


def test_lanes_are_fetched_together_up_to_a_number_of_values(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = tuple(Lane(n, 128 * n, 128 * (n + 1)) for n in range(7))
    fragment = replace(setting.plan().fragments[0], lanes=lanes)
    monkeypatch.setattr("diloco.island.exchange.staging.MOST_TOGETHER", 256)

    assert grouped(fragment, [0, 2, 3, 5, 6]) == [[0, 2], [3, 5], [6]]
    assert grouped(fragment, []) == []
    monkeypatch.setattr("diloco.island.exchange.staging.MOST_TOGETHER", 100)
    assert grouped(fragment, [1, 2]) == [[1], [2]]


def test_a_lane_that_differs_even_whole_ends_the_island(setting: Setting) -> None:
    async def scenario() -> None:
        _, a, b = await started(setting)
        a.data.on_reply = lambda method, header, reply: (
            Reply(reply.header, bytes(len(reply.payload))) if method == "fragment.fetch" else reply
        )

        ends = await asyncio.gather(a.train(5), b.train(5), return_exceptions=True)

        assert isinstance(ends[0], CodecError)
        assert ends[0].exit_code == 20
        assert "does not match the syncer's digest" in str(ends[0])
        assert ends[1] is None

    run_virtual(scenario())


def test_a_version_that_is_no_longer_the_newest_is_staged_whole_and_verified(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(replace(setting, initial={"w": [0.0] * NUMEL}))
        for version in (0, 1):
            for island in (a, b):
                await island.contribute(RoundKey(0, 0, version, 0), value=1.0 + version)
            await asyncio.sleep(1.0)
        exchange = make_exchange(run.setting, "a", {0: (0, 1)}, run.network.connect("syncer"))
        lanes = LaneCheckpoint(
            lanes_of(run.setting, 0.0), {}, {}, {}, is_declined=False, broken_in_a_row=0
        )
        exchange.restore([FragmentCheckpoint(FragmentLedger(0, 0), lanes, Reach())], sent_by=1)
        await asyncio.sleep(1.0)

        assert exchange.view(0).staged_version == 1
        assert {float(lane[0]) for lane in exchange.staged(0).values()} == {-1.0}
        exchange.settle(0, is_merged=True, is_included=False)
        await asyncio.sleep(0.1)
        assert exchange.view(0).staged_version == 2
        assert {float(lane[0]) for lane in exchange.staged(0).values()} == {-3.0}
        await exchange.stop()

    run_virtual(scenario())


def test_who_waits_for_the_others_says_so_every_ten_seconds(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        a, b = WiredIsland(run, "a"), WiredIsland(run, "b")
        waiting = asyncio.ensure_future(a.start())
        await asyncio.sleep(25.0)
        await asyncio.gather(waiting, b.start())

    run_virtual(scenario())

    told = [text for text in caplog.messages if "still waiting to enter the run: 0 of" in text]
    assert len(told) == 2
    assert "diloco status" in told[0]


# -- ranks ---------------------------------------------------------------------------------------


def test_two_ranks_found_and_send_disjoint_lanes_and_one_carries_nothing(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(replace(setting, initial={"w": [0.0] * NUMEL}, islands=("a",)))
        await run.start_syncer()
        initial = lanes_of(run.setting, 0.0)
        ranks = []
        for lanes in ((0,), (1,), ()):
            rank = make_exchange(run.setting, "a", {0: lanes}, run.network.connect("syncer"))
            rank.enter({0: {i: initial[i] for i in lanes}})
            ranks.append((rank, lanes))

        await asyncio.gather(*(rank.wait_until_entered(30.0) for rank, _ in ranks))
        for rank, lanes in ranks:
            rank.send(Send(outstanding(), {i: lanes_of(run.setting, -1.0 - i)[i] for i in lanes}))
        await asyncio.gather(*(rank.wait_for_end(0, 30.0) for rank, _ in ranks))

        for rank, lanes in ranks:
            view = rank.view(0)
            assert (view.verdict, view.staged_version) == (Verdict.INCLUDED, 1)
            assert [float(rank.staged(0)[i][0]) for i in lanes] == [-1.0 - i for i in lanes]
            rank.settle(0, is_merged=True, is_included=True)
            assert rank.view(0).key is None
            await rank.stop()
        assert asyncio.get_running_loop().time() < 5.0

    run_virtual(scenario())


def test_ranks_without_lanes_make_no_calls(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(replace(setting, initial={"w": [0.0] * NUMEL}, islands=("a",)))
        await run.start_syncer()
        lines = [Wire(run.network.connect("syncer")) for _ in range(16)]
        leader, *others = (
            make_exchange(run.setting, "a", {0: () if i else (0, 1)}, line, is_leader=i == 0)
            for i, line in enumerate(lines)
        )
        leader.enter({0: lanes_of(run.setting, 0.0)})
        for rank in others:
            rank.enter({0: {}})
        await asyncio.gather(*(rank.wait_until_entered(30.0) for rank in (leader, *others)))

        leader.send(Send(outstanding(), lanes_of(run.setting, -1.0)))
        for rank in others[:-1]:
            rank.send(Send(outstanding(), {}))
        others[-1].decline(outstanding(), "its leader says so, too")
        await asyncio.gather(*(rank.wait_for_end(0, 30.0) for rank in (leader, *others)))
        assert leader.view(0).staged_version == 1
        for rank in others:
            rank.aim(0, 1)
            rank.settle(0, is_merged=True, is_included=True)
            rank.follow(0, 1)
        await asyncio.sleep(60.0)

        assert lines[0].counts["poll"] > 3
        assert not any(line.calls for line in lines[1:])
        for rank in others:
            assert rank.view(0) is NOT_FOLLOWED and not rank.staged(0) and rank.failure is None
        for rank in (leader, *others):
            await rank.stop()

    run_virtual(scenario())


def test_a_carrier_asks_about_the_fragments_of_its_lanes_and_the_leader_about_all(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run = VirtualRun(
            replace(setting, num_fragments=2, initial={n: [0.0] for n in "wx"}, islands=("a",))
        )
        await run.start_syncer()
        lines = [Wire(run.network.connect("syncer")) for _ in range(2)]
        ranks = [
            make_exchange(run.setting, "a", {i: (0,), 1 - i: ()}, line, is_leader=i == 0)
            for i, line in enumerate(lines)
        ]
        for i, rank in enumerate(ranks):
            numel = run.setting.plan().fragments[i].lanes[0].numel
            rank.enter({i: {0: torch.zeros(numel)}, 1 - i: {}})

        await asyncio.gather(*(rank.wait_until_entered(30.0) for rank in ranks))
        polls = [
            [wire.PollRequest.FromString(header) for _, header, _ in line.of("poll")]
            for line in lines
        ]

        asked = [{s.fragment_id for poll in of for s in poll.known} for of in polls]
        assert asked == [{0, 1}, {1}]
        assert ranks[0].view(1).anchor_version == ranks[1].view(1).anchor_version == 0
        assert ranks[1].view(0) is NOT_FOLLOWED
        for rank in ranks:
            await rank.stop()

    run_virtual(scenario())


def test_founding_goes_on_after_the_syncer_lost_half_of_the_lanes(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(replace(setting, initial={"w": [0.0] * NUMEL}, islands=("a",)))
        await run.start_syncer()
        lines = [Wire(run.network.connect("syncer")) for _ in range(2)]
        lines[1].is_cut = True
        initial = lanes_of(run.setting, 3.0)
        ranks = [
            make_exchange(run.setting, "a", {0: (i,)}, run.network.connect("syncer"), lines[i])
            for i in range(2)
        ]
        for i, rank in enumerate(ranks):
            rank.enter({0: {i: initial[i]}})
        founding = asyncio.gather(*(rank.wait_until_entered(60.0) for rank in ranks))
        await asyncio.sleep(5.0)
        assert len(lines[0].of("upload")) == 1

        await restart(run)
        lines[1].is_cut = False
        await founding

        assert len(lines[0].of("upload")) == 2
        for rank in ranks:
            await rank.stop()

    run_virtual(scenario())


# -- what ends it --------------------------------------------------------------------------------


def test_a_defect_of_the_syncer_is_not_called_unreachable(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*_: object, **__: object) -> None:
        raise KeyError("lanes")

    async def scenario() -> list[Any]:
        _, a, b = await started(setting)
        monkeypatch.setattr(Polls, "_answer", defect)
        return await asyncio.gather(a.train(9), b.train(9), return_exceptions=True)

    ends = run_virtual(scenario())

    for end in ends:
        assert type(end) is DilocoError and end.exit_code == 1
        assert "was reached, and its program failed at fragment.poll: KeyError: 'lanes'" in str(end)
        assert "report it with syncer*.log of coordinator.state_dir" in str(end)


@pytest.mark.parametrize("away_s", [590.0, 700.0])
def test_a_syncer_that_is_away_for_unreachable_s_ends_the_island(
    setting: Setting, away_s: float
) -> None:
    async def scenario() -> tuple[list[Any], float]:
        run, a, b = await started(setting)
        training = asyncio.gather(a.train(9), b.train(9), return_exceptions=True)
        await asyncio.sleep(4.5)
        await run.kill_syncer()
        killed = asyncio.get_running_loop().time()
        asyncio.get_running_loop().call_later(
            away_s, lambda: asyncio.ensure_future(run.start_syncer())
        )
        return await training, asyncio.get_running_loop().time() - killed

    ends, waited_s = run_virtual(scenario())

    if away_s < 600.0:
        assert ends == [None, None]
    else:
        assert all(isinstance(end, CoordinatorUnavailable) for end in ends)
        assert all(end.exit_code == 30 for end in ends)
        assert "gave no answer to fragment.poll for 600 s" in str(ends[0])
        assert str(ends[0]).endswith("diloco island RUN.toml --island a")
        assert 595.0 < waited_s <= 601.0


def test_a_cut_data_stream_ends_the_island_though_control_goes_on(setting: Setting) -> None:
    async def scenario() -> tuple[Any, Any]:
        _, a, b = await started(replace(setting, round_deadline_s=5000.0))
        a.data.is_cut = True
        return tuple(await asyncio.gather(a.train(5), wait_for(b, 700.0), return_exceptions=True))

    async def wait_for(island: VirtualIsland, seconds: float) -> None:
        training = asyncio.create_task(island.train(5))
        await asyncio.sleep(seconds)
        training.cancel()

    cut, _ = run_virtual(scenario())

    assert isinstance(cut, CoordinatorUnavailable)
    assert "gave no answer to fragment.submit for 600 s" in str(cut)


@pytest.mark.parametrize(
    ("exit_code", "kind"),
    [
        (20, CodecError),
        (30, CoordinatorUnavailable),
        (40, IslandFailed),
        (50, QuorumLost),
        (99, DilocoError),
    ],
)
def test_a_fatal_word_becomes_the_error_with_its_exit_code(
    setting: Setting, exit_code: int, kind: type[DilocoError]
) -> None:
    async def scenario() -> None:
        run, a, _ = await started(setting)
        run.syncer.fatal = wire.Fatal(exit_code=exit_code, reason="it is over")
        run.syncer._notify()
        await asyncio.sleep(1.0)

        assert type(a.exchange.failure) is kind
        assert str(a.exchange.failure) == "it is over"
        assert a.exchange.failure.island_id == "a"

    run_virtual(scenario())


def test_a_newer_start_ends_the_older_at_once(setting: Setting) -> None:
    async def scenario() -> None:
        run, a, _ = await started(setting)
        training = asyncio.create_task(a.train(5))
        await asyncio.sleep(4.5)
        await RawIsland(run, "a", 2).poll()
        with pytest.raises(Fenced, match=r"a newer start of island .a. has joined.*runs twice"):
            await training
        assert asyncio.get_running_loop().time() < 7.0

    run_virtual(scenario())


def test_a_pin_of_an_older_start_ends_it_although_no_poll_was_answered(setting: Setting) -> None:
    async def scenario() -> None:
        run, a, _ = await started(setting)
        a.control.on_reply = lambda method, header, reply: (
            Reply(wire.PollReply().SerializeToString()) if method == "fragment.poll" else reply
        )
        await RawIsland(run, "a", 2).poll()

        a.exchange.pin(0, a.session.versions)
        await a.exchange.wait_until_pinned(0, 5.0)

        # Anything else, its supervisor would start again: that would fence the newer one.
        assert isinstance(a.exchange.failure, Fenced)
        assert "a newer start has joined. See whether" in str(a.exchange.failure)

    run_virtual(scenario())


def test_an_upload_of_an_older_start_ends_it_although_no_poll_was_answered(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        older, other = WiredIsland(run, "a"), RawIsland(run, "b")
        older.data.is_cut = True
        starting = asyncio.create_task(older.start())
        await other.poll()
        await asyncio.sleep(5.0)  # it has been asked for its initial parameters
        older.control.let_through = asyncio.Event()
        await RawIsland(run, "a", 2).poll()

        older.data.is_cut = False

        with pytest.raises(Fenced, match=r"a newer start has joined\. See whether"):
            await starting

    run_virtual(scenario())


def test_an_answer_that_no_repetition_can_mend_ends_the_island_at_once() -> None:
    async def broken(call: IncomingCall) -> Reply:
        raise ValueError("no")

    async def scenario() -> float:
        network = LoopbackNetwork()
        await network.server("syncer", {"fragment.poll": broken}).start()
        setting = Setting({"w": [0.0]}, descend, Path(), 8)
        exchange = make_exchange(setting, "a", {0: (0,)}, network.connect("syncer"))
        exchange.enter({0: {0: torch.zeros(128)}})
        await exchange.wait_until_entered(10.0)
        assert type(exchange.failure) is DilocoError
        assert "its program failed at fragment.poll: ValueError" in str(exchange.failure)
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == 0.0


def test_a_pseudo_gradient_that_overflows_with_its_residual_ends_the_island(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        _, a, _ = await started(feedback(setting))
        a.exchange._fragments[0].residual[0] = large = torch.full((128,), 3e38)
        a.exchange._fragments[0].residual_sums[0] = bit_sum(large)

        a.exchange.send(Send(outstanding(), {0: torch.full((128,), -3e38)}))
        await asyncio.sleep(0.1)

        assert isinstance(a.exchange.failure, CodecError)
        await a.exchange.wait_for_end(0, 10.0)

    run_virtual(scenario())


def test_the_first_failure_stays(setting: Setting) -> None:
    async def scenario() -> None:
        _, a, _ = await started(setting)
        a.exchange.fail(QuorumLost("first"))
        a.exchange.fail(CodecError("second"))

        assert str(a.exchange.failure) == "first"
        assert a.exchange.failure.exit_code == 50

    run_virtual(scenario())


def test_an_unexpected_error_in_a_task_is_a_failure_not_a_silence(setting: Setting) -> None:
    async def scenario() -> None:
        _, a, _ = await started(setting)

        async def stumble() -> None:
            raise KeyError("lane")

        a.exchange._tasks.spawn(stumble())
        await asyncio.sleep(0.1)

        assert type(a.exchange.failure) is DilocoError
        assert a.exchange.failure.exit_code == 1
        assert "KeyError" in str(a.exchange.failure)

    run_virtual(scenario())


# -- time ----------------------------------------------------------------------------------------


def test_a_round_over_a_thin_link_takes_the_time_of_its_bytes(setting: Setting) -> None:
    # Up 160,256 bytes at 1 Mbit/s take 1.282 s and cross in 0.1 s. A long poll brings the news in
    # 0.1 s; asking for two lanes crosses in 0.1 s, they take 1.282 s and 0.1 s to come; the poll
    # that asks for the outcome crosses meanwhile. 2.97 s in all, and headers of some 100 bytes.
    link = Link(bandwidth_bps=1e6, delay_s=0.1)

    async def scenario() -> float:
        run = VirtualRun(replace(setting, initial={"w": [0.0] * NUMEL}, islands=("a",)))
        await run.start_syncer()
        line = ShapedTransport(
            run.network.connect("syncer"), LinkQueue(link, seed=0), LinkQueue(link, seed=1)
        )
        exchange = make_exchange(run.setting, "a", {0: (0, 1)}, line)
        exchange.enter({0: lanes_of(run.setting, 0.0)})
        await exchange.wait_until_entered(100.0)
        loop = asyncio.get_running_loop()
        await asyncio.sleep(10.0)
        began = loop.time()
        exchange.send(Send(outstanding(), lanes_of(run.setting)))
        await exchange.wait_for_end(0, 100.0)
        assert exchange.view(0).has_ended
        assert exchange.bytes_up > 2 * 160_256
        assert exchange.bytes_down > 160_256
        await exchange.stop()
        return loop.time() - began

    assert run_virtual(scenario()) == pytest.approx(2.97, abs=0.05)


def test_blocked_seconds_are_what_training_waited(setting: Setting) -> None:
    async def scenario() -> None:
        _, a, b = await started(setting)
        b.setting = replace(b.setting, step_s=3.0)
        both = asyncio.gather(a.train(5), b.train(5))
        await asyncio.sleep(8.0)
        assert a.session.blocked_s == pytest.approx(3.0), "it waits still"
        await both

        # a sends after 4 s and stands at 5 s; b sends after 12 s.
        assert a.session.blocked_s == pytest.approx(7.0)
        assert b.session.blocked_s == 0.0

    run_virtual(scenario())


def test_what_is_stored_is_what_the_islands_hold(setting: Setting) -> None:
    async def scenario() -> None:
        run, a, b = await started(replace(setting, downlink_codec="int4"))
        await asyncio.gather(a.train(5), b.train(5))

        store = FragmentStore(setting.directory, run.setting.plan().fragments[0], 4)
        held = a.exchange._fragments[0].anchor[0]
        assert torch.equal(held, store.load(1).lanes[0].published)

        await asyncio.gather(a.finish(), b.finish())
        assert a.session.digests == b.session.digests == (store.load(1).digest.hex(),)

    run_virtual(scenario())
