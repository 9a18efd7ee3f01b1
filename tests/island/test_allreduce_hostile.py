"""One island with a valid grant says what is too large; the others' all-reduce goes on."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from diloco.bounded_text import MOST_REASON, MOST_TEXT
from diloco.coordinator.round_journal import check_initial
from diloco.outer.optimizer import OuterOptimizer
from diloco.protocol.rounds.messages import key_message
from diloco.protocol.rounds.state import FragmentRounds
from diloco.protos import allreduce_pb2, fragment_pb2
from diloco.transport.calls.loopback import run_virtual
from diloco.transport.contracts import PROTOCOL_VERSION
from diloco.transport.errors import FrameError, HandlerFailed
from diloco.transport.framing import MAX_HEADER_BYTES
from tests.coordinator.test_round_journal import initial
from tests.island.test_allreduce_deaths import Living, descend, living
from tests.virtual_allreduce import AllReduceRun
from tests.virtual_run import Setting

MUCH = MAX_HEADER_BYTES - 300


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AllReduceRun:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return AllReduceRun(
        Setting(
            {name: [16.0] * 5 for name in "tuvw"}, descend, tmp_path, inner_steps=12,
            islands=("a", "b", "c"), num_fragments=2, overlap_steps=1, flush=True,
            optimizer=OuterOptimizer("nesterov", 0.7, 0.9, 2), uplink_codec="int4",
            downlink_codec="int4", round_deadline_s=20.0,
        )
    )  # fmt: skip


async def opened(run: AllReduceRun) -> tuple[Living, FragmentRounds]:
    """Islands at work, and the first rounds that are open."""
    islands = await living(run)
    while True:
        for fragment in run.decider._rounds.fragments.values():
            if fragment.rounds.rounds.is_open:
                return islands, fragment.rounds.rounds
        await asyncio.sleep(0.1)


async def say(run: AllReduceRun, islands: Living, method: str, request, island: str = "c") -> bytes:
    request.protocol_version = PROTOCOL_VERSION
    request.grant.CopyFrom(islands.starts[island].peer._grant)
    way = run.network.connect("decider")
    return (await way.call(method, request.SerializeToString(), deadline_s=10)).header


def test_a_reason_of_a_megabyte_ends_nobody_elses_run(run: AllReduceRun) -> None:
    async def scenario() -> None:
        islands, rounds = await opened(run)
        await say(
            run, islands, "allreduce.decline",
            fragment_pb2.DeclineRequest(key=key_message(rounds.key), reason="x" * MUCH),
        )  # fmt: skip
        assert len(rounds.current.left["c"]) == MOST_REASON
        await islands.end()

    run_virtual(scenario())

    assert not run.lost


@pytest.mark.parametrize(
    "digests",
    [[bytes(MUCH // 2)] * 2, [bytes(MUCH)], [b""], [bytes(31)], [], [bytes(32)] * 30_000],
    ids=["two large", "one large", "empty", "short", "none", "many"],
)
def test_what_is_no_digest_of_a_lane_is_refused_by_name(
    run: AllReduceRun, digests: list[bytes]
) -> None:
    async def scenario() -> None:
        islands, rounds = await opened(run)
        declaration = allreduce_pb2.DeclareRequest(
            key=key_message(rounds.key), sent_at_inner_step=1, weight_tokens=1, weight_steps=1,
            lane_digests=digests,
        )  # fmt: skip
        header = await say(run, islands, "allreduce.declare", declaration)
        reply = fragment_pb2.SubmitReply.FromString(header)
        assert reply.status == fragment_pb2.SUBMIT_STATUS_INVALID
        assert "a digest has 32" in reply.message or "the fragment has 1 lanes" in reply.message
        prepared = allreduce_pb2.PreparedRequest(lane_digests=digests, state_digest=bytes(32))
        header = await say(run, islands, "allreduce.prepared", prepared)
        assert "digest" in fragment_pb2.Ack.FromString(header).message
        await islands.end()

    run_virtual(scenario())

    assert not run.lost
    assert run.refused == [("c", "digest")] * 2


def test_a_state_digest_has_32_bytes(run: AllReduceRun) -> None:
    async def scenario() -> None:
        islands, _ = await opened(run)
        prepared = allreduce_pb2.PreparedRequest(lane_digests=[bytes(32)], state_digest=bytes(MUCH))
        header = await say(run, islands, "allreduce.prepared", prepared)
        assert f"has {MUCH} bytes" in fragment_pb2.Ack.FromString(header).message
        await islands.end()

    run_virtual(scenario())


def test_names_keys_and_addresses_of_a_poll_are_bounded(run: AllReduceRun) -> None:
    async def scenario() -> None:
        islands, rounds = await opened(run)
        crowd = ["b", "b", "nobody"] * 1000
        poll = allreduce_pb2.PollRequest(unreached=crowd)
        await say(run, islands, "allreduce.poll", poll)
        assert run.decider._unreached["c"] == ["b"]
        for wrong in (
            allreduce_pb2.PollRequest(address="x" * (MOST_TEXT + 1)),
            allreduce_pb2.PollRequest(outstanding=[key_message(rounds.key)] * 100_000),
        ):
            with pytest.raises(FrameError, match="are allowed"):
                await say(run, islands, "allreduce.poll", wrong)
        await islands.end()

    run_virtual(scenario())


def test_a_peer_answers_questions_about_fragments_that_are_not_there(run: AllReduceRun) -> None:
    """They were an error of ours, which ends an island."""

    async def scenario() -> None:
        islands, _ = await opened(run)
        peer = islands.starts["c"].peer
        poll = fragment_pb2.PollRequest(
            protocol_version=PROTOCOL_VERSION, grant=peer._grant,
            outstanding=[fragment_pb2.RoundKey(fragment_id=9)],
        )  # fmt: skip
        pin = fragment_pb2.PinRequest(protocol_version=PROTOCOL_VERSION, grant=peer._grant)
        way = run.network.connect("peer c 1")
        try:
            await way.call("fragment.poll", poll.SerializeToString(), deadline_s=10)
            reply = await way.call("fragment.pin", pin.SerializeToString(), deadline_s=10)
        except HandlerFailed as error:
            pytest.fail(str(error))
        assert (
            "each of the 2 fragments, 0 were named"
            in fragment_pb2.Ack.FromString(reply.header).message
        )
        await islands.end()

    run_virtual(scenario())


def test_digests_of_a_founding_record_hold_digits_only() -> None:
    record = initial()
    record["lane_digests"] = [f"{d[:2]}{' ' * 1000}{d[2:]}" for d in record["lane_digests"]]

    with pytest.raises(FrameError, match="not of initial parameters"):
        check_initial(record, num_lanes=2)
