"""Who a peer listens to: its own ranks, and the starts of islands that the decider has named."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from diloco.protos import allreduce_pb2 as wire
from diloco.protos import fragment_pb2
from diloco.protos.control_pb2 import Grant
from diloco.transport.calls.loopback import run_virtual
from tests.island.test_allreduce_equality import setting_of
from tests.virtual_allreduce import AllReduceIsland, AllReduceRun


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power loss, and waiting for the disk is most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


async def ask_for_state(run: AllReduceRun, of: AllReduceIsland, grant: Grant) -> int:
    """Ask a peer for its state; returns the status of its answer."""
    header = wire.StateHeader(
        protocol_version=1,
        grant=grant,
        state_digest=of.peer._fragments[0].replica.state_digest,
        section="theta",
    )
    way = run.network.connect(of.server.address)
    reply = await way.call(
        "allreduce.state", header.SerializeToString(), deadline_s=5.0, max_reply_bytes=1 << 20
    )
    return wire.LaneReply.FromString(reply.header).status


def test_only_named_starts_are_answered(tmp_path: Path) -> None:
    run = AllReduceRun(setting_of(tmp_path, 2, "int4"))

    async def scenario() -> list[int]:
        await run.start_decider()
        a, b = [await run.start(name) for name in ("a", "b")]
        await asyncio.gather(a.island.start(), b.island.start())
        await asyncio.sleep(1.0)
        named = b.peer._calls.peer_grant
        earlier, other, own = Grant(), Grant(), Grant()
        for forged in (earlier, other):
            forged.CopyFrom(named)
        earlier.incarnation, other.island = 0, "a"
        own.CopyFrom(b.peer._grant)  # which the decider alone may see
        answers = [await ask_for_state(run, a, g) for g in (named, earlier, other, own)]
        await run.end([a, b])
        return answers

    answers = run_virtual(scenario())

    refused = wire.LANE_STATUS_UNKNOWN
    assert answers == [wire.LANE_STATUS_OK, refused, refused, refused]


def test_a_start_that_is_fenced_is_answered_by_nobody_from_then_on(tmp_path: Path) -> None:
    run = AllReduceRun(setting_of(tmp_path, 2, "int4"))

    async def scenario() -> None:
        await run.start_decider()
        a, b = [await run.start(name) for name in ("a", "b")]
        await asyncio.gather(a.island.start(), b.island.start())
        await asyncio.sleep(1.0)
        named = b.peer._calls.peer_grant
        assert await ask_for_state(run, a, named) == wire.LANE_STATUS_OK

        run.membership.apply(run.membership.members.fenced("b"))
        run.decider.name_again()
        await asyncio.sleep(0.1)

        assert await ask_for_state(run, a, named) == wire.LANE_STATUS_UNKNOWN
        vote = wire.PreparedRequest(protocol_version=1, grant=b.peer._grant)
        way = run.network.connect("decider")
        said = await way.call("allreduce.prepared", vote.SerializeToString(), deadline_s=5.0)
        assert fragment_pb2.Ack.FromString(said.header).is_fenced
        await b.kill()
        again = await run.start("b")
        await asyncio.sleep(1.0)
        new = again.peer._calls.peer_grant
        assert await ask_for_state(run, a, new) == wire.LANE_STATUS_OK
        await run.end([a, again])

    run_virtual(scenario())


def test_a_rank_of_another_island_is_fenced(tmp_path: Path) -> None:
    run = AllReduceRun(setting_of(tmp_path, 2, "int4"))

    async def scenario() -> tuple[bool, int]:
        await run.start_decider()
        a, b = [await run.start(name) for name in ("a", "b")]
        way = run.network.connect(a.server.address)
        poll = fragment_pb2.PollRequest(protocol_version=1, grant=b.peer._grant)
        polled = await way.call("fragment.poll", poll.SerializeToString(), deadline_s=5.0)
        submit = fragment_pb2.SubmitHeader(protocol_version=1, grant=b.peer._grant)
        sent = await way.call("fragment.submit", submit.SerializeToString(), deadline_s=5.0)
        await run.end([a, b])
        return (
            fragment_pb2.PollReply.FromString(polled.header).is_fenced,
            fragment_pb2.SubmitReply.FromString(sent.header).status,
        )

    assert run_virtual(scenario()) == (True, fragment_pb2.SUBMIT_STATUS_FENCED)
