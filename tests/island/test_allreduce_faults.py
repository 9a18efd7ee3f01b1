"""Faults of an all-reduce that are nobody's death: what is told late, wrongly, or not written."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import struct
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import blake3
import pytest
import torch

from diloco.coordinator.round_journal import JournalUnwritable
from diloco.errors import AggregationError, QuorumLost
from diloco.island.peer.fragment import FragmentPeer, Own
from diloco.island.peer.reduction import Reduction
from diloco.outer.optimizer import OuterOptimizer
from diloco.protocol.rounds.allreduce import Assignment
from diloco.protocol.rounds.terms import RoundKey
from diloco.protos import allreduce_pb2 as wire
from diloco.protos import fragment_pb2
from diloco.transport.calls.loopback import run_virtual
from diloco.transport.contracts import Buffer, Handlers, IncomingCall, Reply, Transport
from diloco.versions.store import FragmentStore
from tests.island.test_allreduce_deaths import (
    Living,
    check_same_bytes,
    descend,
    headers_of_run,
    living,
    num_expired,
)
from tests.virtual_allreduce import AllReduceRun
from tests.virtual_run import Setting


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(
        {name: [16.0] * 5 for name in "tuvw"},
        descend,
        tmp_path,
        inner_steps=12,
        islands=("a", "b", "c"),
        num_fragments=2,
        overlap_steps=1,
        flush=True,
        optimizer=OuterOptimizer("nesterov", 0.7, 0.9, 2),
        uplink_codec="int4",
        downlink_codec="int4",
        round_deadline_s=20.0,
    )


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power loss, and waiting for the disk is most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# -- the journal -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_expiry", [False, True], ids=["commit", "expiry"])
def test_a_coordinator_that_cannot_write_ends_and_its_next_start_goes_on(
    setting: Setting, is_expiry: bool
) -> None:
    run = AllReduceRun(setting)

    async def scenario() -> Living:
        islands = await living(run)
        write = run.journal.write

        def full(
            entries: Iterable[tuple[str, str]],
            rounds: Iterable[tuple[int, int, int, str]] = (),
            told: Iterable[tuple[str, str]] = (),
        ) -> None:
            entries = list(entries)
            value = json.loads(dict(entries).get("round/0", "{}"))
            if value.get("attempt") if is_expiry else value and value["record"]["version"] == 2:
                raise sqlite3.OperationalError("database or disk is full")
            write(entries, rounds, told)

        run.journal.write = full  # type: ignore[method-assign]
        if is_expiry:
            await asyncio.sleep(2.0)
            await islands.kill("b")
        with pytest.raises(JournalUnwritable, match=r"disk is full.*diloco coordinator RUN\.toml"):
            await run.decider.watch()
        await run.kill_decider()
        await run.start_decider()
        if is_expiry:
            await islands.begin("b")
        await islands.end()
        return islands

    islands = run_virtual(scenario())

    check_same_bytes(run, islands)


def test_an_island_ahead_of_an_empty_journal_says_what_to_remove(setting: Setting) -> None:
    """The coordinator's directory was emptied, as its last word had advised; the peers are left."""
    setting = replace(setting, inner_steps=6)
    run_virtual(AllReduceRun(setting).run())
    for file in setting.directory.glob("journal.sqlite*"):
        file.unlink()
    run = AllReduceRun(setting)

    async def scenario() -> list[BaseException | None]:
        islands = await living(run)
        ends = await asyncio.gather(*islands.tasks.values(), return_exceptions=True)
        await run.end(list(islands.starts.values()))
        return list(ends)

    ends = run_virtual(scenario())

    for name, end in zip("abc", ends, strict=True):
        assert isinstance(end, QuorumLost)
        assert f"begun again, remove {setting.directory}/peers/{name}" in str(end)
    assert run.lost == []


def test_a_decider_that_starts_while_a_result_is_refused_is_told_too(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The refusal reaches the next start before that has assigned anything, and does nothing."""
    stage = Reduction.stage
    asked, ignored = asyncio.Event(), asyncio.Event()

    async def spoil(reduction: Reduction, assignment: Assignment) -> None:
        if reduction._island in "bc" and assignment.key == RoundKey(0, 0, 1, 0):
            raise AggregationError(f"the memory of {reduction._island} is broken")
        await stage(reduction, assignment)

    def late(name: str, handlers: Handlers) -> Handlers:
        if name != "decider":
            return handlers
        is_first = run.num_deciders == 1

        async def prepared(call: IncomingCall) -> Reply:
            is_refusal = bool(wire.PreparedRequest.FromString(call.header).broken)
            if is_refusal and is_first:
                asked.set()
                await asyncio.Event().wait()
            reply = await handlers["allreduce.prepared"](call)
            if is_refusal and not ignored.is_set():
                ignored.set()
                await asyncio.sleep(1.0)  # polls are answered before this is
            return reply

        async def poll(call: IncomingCall) -> Reply:
            if not is_first:
                await ignored.wait()
            return await handlers["allreduce.poll"](call)

        return {**handlers, "allreduce.prepared": prepared, "allreduce.poll": poll}

    monkeypatch.setattr(Reduction, "stage", spoil)
    run = AllReduceRun(setting, intercept=late)

    async def scenario() -> Living:
        islands = await living(run)
        await asked.wait()
        await run.kill_decider()
        await run.start_decider()
        await islands.end()
        return islands

    islands = run_virtual(scenario())

    check_same_bytes(run, islands)
    (expiry,) = [text for text in caplog.messages if text.startswith("round expired")]
    assert "the memory of b is broken" in expiry, "no deadline was waited for"


@pytest.mark.parametrize("is_broken", [True, False], ids=["none", "another-result"])
def test_an_island_whose_results_are_never_those_of_the_others_takes_theirs(
    setting: Setting,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_broken: bool,
) -> None:
    stage = Reduction.stage

    async def spoil(reduction: Reduction, assignment: Assignment) -> None:
        if is_broken and reduction._island == "b":
            raise AggregationError("the memory of b is broken")
        await stage(reduction, assignment)

    def lying(name: str, handlers: Handlers) -> Handlers:
        if name != "decider":
            return handlers

        async def prepared(call: IncomingCall) -> Reply:
            vote = wire.PreparedRequest.FromString(call.header)
            if vote.grant.island == "b" and not is_broken:
                vote.state_digest = blake3.blake3(vote.assignment_id).digest()
                call.header = vote.SerializeToString()  # type: ignore[misc]
            return await handlers["allreduce.prepared"](call)

        return {**handlers, "allreduce.prepared": prepared}

    monkeypatch.setattr(Reduction, "stage", spoil)
    run = AllReduceRun(setting, intercept=lying)

    async def scenario() -> Living:
        islands = await living(run)
        await islands.end()
        return islands

    islands = run_virtual(scenario())

    check_same_bytes(run, islands)
    assert run.lost == []
    assert not [text for text in caplog.messages if text.startswith("round expired")]


# -- words of an earlier round ---------------------------------------------------------------------


class Again:
    """A call whose payload was read, to be served a second time."""

    peer = "loopback"
    caller = None

    def __init__(self, call: IncomingCall, payload: Buffer) -> None:
        self.method, self.header, self.payload_bytes = call.method, call.header, len(payload)
        self._payload = payload

    async def read_payload(self) -> Buffer:
        return self._payload


def decline_of(submit: bytes) -> bytes:
    header = fragment_pb2.SubmitHeader.FromString(submit)
    decline = fragment_pb2.DeclineRequest(
        protocol_version=1, grant=header.grant, key=header.key, reason="not finite"
    )
    return decline.SerializeToString()


@pytest.mark.parametrize("method", ["fragment.submit", "fragment.decline"])
def test_a_word_of_an_earlier_round_does_not_replace_a_contribution(
    setting: Setting, method: str
) -> None:
    late: list[Again] = []
    told: list[asyncio.Future[Reply]] = []
    own: Handlers = {}

    def intercept(name: str, handlers: Handlers) -> Handlers:
        nonlocal own
        if name == "b":
            own = handlers

            async def submit(call: IncomingCall) -> Reply:
                again = Again(call, await call.read_payload())
                late.append(again)  # its copy is still on its way
                return await handlers["fragment.submit"](again)

            return {**handlers, "fragment.submit": submit}
        if name == "decider":

            async def declare(call: IncomingCall) -> Reply:
                reply = await handlers["allreduce.declare"](call)
                request = wire.DeclareRequest.FromString(call.header)
                if request.grant.island == "b" and request.key.version == 1 and late:
                    first, *_ = late
                    if method == "fragment.decline":
                        first.header = decline_of(first.header)
                    told.append(asyncio.ensure_future(own[method](first)))
                    late.clear()
                return reply

            return {**handlers, "allreduce.declare": declare}
        return handlers

    run = AllReduceRun(setting, intercept=intercept)

    async def scenario() -> Living:
        islands = await living(run)
        await islands.end()
        return islands

    islands = run_virtual(scenario())

    check_same_bytes(run, islands)
    assert num_expired(islands.starts) == 0
    assert told[0].done()


def two_lanes(setting: Setting) -> Setting:
    return replace(setting, initial={"w": [1.0] * 33_000}, num_fragments=1, inner_steps=8)


def test_a_lane_that_stalls_beyond_its_round_is_given_up(setting: Setting) -> None:
    setting = two_lanes(setting)
    num_cancelled = 0

    def intercept(name: str, handlers: Handlers) -> Handlers:
        async def submit(call: IncomingCall) -> Reply:
            nonlocal num_cancelled
            header = fragment_pb2.SubmitHeader.FromString(call.header)
            if (header.key.version, header.key.attempt, header.lane_id) == (0, 0, 1):
                try:
                    await asyncio.sleep(50.0)
                except asyncio.CancelledError:
                    num_cancelled += 1
                    raise
            return await handlers["fragment.submit"](call)

        return {**handlers, "fragment.submit": submit} if name == "b" else handlers

    run = AllReduceRun(setting, intercept=intercept)

    async def scenario() -> Living:
        islands = await living(run)
        await islands.end()
        return islands

    islands = run_virtual(scenario())

    check_same_bytes(run, islands)
    assert num_cancelled == 1


def test_a_rank_that_declines_after_another_has_sent_its_lanes_is_heard(setting: Setting) -> None:
    setting = two_lanes(setting)

    def intercept(name: str, handlers: Handlers) -> Handlers:
        async def submit(call: IncomingCall) -> Reply:
            header = fragment_pb2.SubmitHeader.FromString(call.header)
            if (header.key.version, header.lane_id) != (1, 1):
                return await handlers["fragment.submit"](call)
            decline = Again(call, b"")
            decline.header = decline_of(call.header)
            await asyncio.sleep(0.1)  # the other lane is there
            await handlers["fragment.decline"](decline)
            reply = fragment_pb2.SubmitReply(
                status=fragment_pb2.SUBMIT_STATUS_RECEIVED,
                syncer_epoch=header.grant.incarnation,
            )
            return Reply(reply.SerializeToString())

        return {**handlers, "fragment.submit": submit} if name == "b" else handlers

    run = AllReduceRun(setting, intercept=intercept)

    async def scenario() -> Living:
        islands = await living(run)
        await islands.end()
        return islands

    islands = run_virtual(scenario())

    check_same_bytes(run, islands)
    assert num_expired(islands.starts) == 0
    run.journal.open()
    (second,) = [h for h in headers_of_run(run) if h["version"] == 2]
    run.journal.close()
    assert [c["island"] for c in second["contributors"]] == ["a", "c"]
    assert second["refused"] == {"b": "declined: not finite"}


# -- peers that cannot be understood, or reached ---------------------------------------------------


async def ends_after(islands: Living, seconds: float) -> dict[str, bool]:
    """Let time pass, and end everything; returns whose training had ended by then."""
    await asyncio.sleep(seconds)
    has_ended = {name: task.done() for name, task in islands.tasks.items()}
    for task in islands.tasks.values():
        task.cancel()
    await asyncio.gather(*islands.tasks.values(), return_exceptions=True)
    await islands.run.end(list(islands.starts.values()))
    return has_ended


def test_a_peer_that_answers_rubbish_ends_nobody_else(setting: Setting) -> None:
    num_answers = 0

    def intercept(name: str, handlers: Handlers) -> Handlers:
        async def rubbish(call: IncomingCall) -> Reply:
            nonlocal num_answers
            num_answers += 1
            return Reply(b"\xff\xff\xff")

        return {**handlers, "allreduce.contribution": rubbish} if name == "b" else handlers

    run = AllReduceRun(setting, intercept=intercept)

    async def scenario() -> dict[str, bool]:
        return await ends_after(await living(run), 30.0)

    assert run_virtual(scenario()) == dict.fromkeys("abc", False)
    assert num_answers > 2


def test_a_peer_whose_address_is_none_ends_nobody_else(setting: Setting) -> None:
    run = AllReduceRun(setting)
    connect = run.network.connect

    def refuse(address: str) -> Transport:
        if address.startswith("peer b"):
            raise ValueError(f"{address!r} must be HOST:PORT")
        return connect(address)

    async def scenario() -> dict[str, bool]:
        islands = await living(run)
        for name in "ac":
            islands.starts[name].peer._calls._connect = refuse
        return await ends_after(islands, 30.0)

    assert run_virtual(scenario()) == dict.fromkeys("abc", False)


def test_a_contribution_that_is_not_finite_is_refused_and_the_run_goes_on(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer of another make, or memory that broke after the peer had looked."""
    setting = replace(setting, uplink_codec="float32", downlink_codec="float32")
    declare = FragmentPeer._is_declared

    async def spoil(peer: FragmentPeer, own: Own) -> bool:
        if peer._grant.island == "b" and own.key.version == 1:
            for lane_id, (payload, _) in own.lanes.items():
                spoilt = struct.pack("<f", float("nan")) + bytes(payload)[4:]
                own.lanes[lane_id] = spoilt, blake3.blake3(spoilt).digest()
        return await declare(peer, own)

    monkeypatch.setattr(FragmentPeer, "_is_declared", spoil)
    run = AllReduceRun(setting)

    async def scenario() -> Living:
        islands = await living(run)
        await islands.end()
        return islands

    islands = run_virtual(scenario())

    check_same_bytes(run, islands)
    assert num_expired(islands.starts) == 0
    run.journal.open()
    refusals = {
        h["version"]: h["refused"].get("b", "")
        for h in headers_of_run(run)
        if h["version"] < 4 and h["fragment_id"] == 0
    }
    run.journal.close()
    assert "the contribution of island 'b' is malformed" in refusals.pop(2)
    assert refusals == {0: "", 1: "", 3: ""}


def test_a_peer_that_the_others_cannot_reach_is_named(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    run = AllReduceRun(setting)
    connect = run.network.connect

    async def scenario() -> list[BaseException | None]:
        islands = await living(run)
        for name in "ac":
            islands.starts[name].peer._calls._connect = lambda address: connect(
                "nowhere" if address.startswith("peer b") else address
            )
        ends = await asyncio.gather(*islands.tasks.values(), return_exceptions=True)
        await run.end(list(islands.starts.values()))
        return list(ends)

    ends = run_virtual(scenario())

    assert [type(end) for end in ends] == [QuorumLost] * 3
    for name in "ac":
        assert f"Island '{name}' has no answer from the peer of island 'b' at peer b 1" in str(
            ends[0]
        )
    assert "island=b address=peer b 1" in caplog.text


def test_the_way_to_an_address_that_nobody_has_any_more_is_closed(setting: Setting) -> None:
    run = AllReduceRun(setting)

    async def scenario() -> set[str]:
        islands = await living(run)
        await asyncio.sleep(8.0)
        ways = islands.starts["a"].peer._calls._transports
        assert "peer b 1" in ways
        await islands.kill("b")
        await islands.begin("b")
        await islands.end()
        return set(ways)

    ways = run_virtual(scenario())

    assert {address for address in ways if address.startswith("peer b")} == {"peer b 2"}


# -- what is kept ----------------------------------------------------------------------------------


def test_initial_parameters_that_are_overwritten_are_not_kept(setting: Setting) -> None:
    run = AllReduceRun(setting)

    async def scenario() -> list[int]:
        await run.start_decider()
        started = [await run.start(name) for name in setting.islands]
        with torch.no_grad():
            for parameter in started[1].island.parameters.values():
                parameter.add_(1.0)
        await asyncio.gather(*(each.island.start(overwrite_initial=True) for each in started))
        kept = [len(f.initial) for each in started for f in each.peer._fragments.values()]
        await run.end(started)
        return kept

    assert run_virtual(scenario()) == [0] * 6


def test_a_payload_that_was_not_committed_heals_nobody(setting: Setting) -> None:
    """Its ranks take what is published by the payload: a wrong one would stay unseen until then."""

    def intercept(name: str, handlers: Handlers) -> Handlers:
        async def forge(call: IncomingCall) -> Reply:
            reply = await handlers["allreduce.state"](call)
            answer = wire.LaneReply.FromString(reply.header)
            section = wire.StateHeader.FromString(call.header).section
            if section != "payload" or answer.status != wire.LANE_STATUS_OK:
                return reply
            payload = bytes(len(reply.payload))
            answer.digest = blake3.blake3(payload).digest()
            return Reply(answer.SerializeToString(), payload)

        return {**handlers, "allreduce.state": forge} if name == "a" else handlers

    run = AllReduceRun(setting, intercept=intercept)

    async def scenario() -> tuple[Living, list[bool]]:
        islands = await living(run)
        await asyncio.sleep(6.5)
        await islands.kill("c")
        shutil.rmtree(setting.directory / "peers" / "c")
        await islands.begin("c")
        await asyncio.sleep(2.0)
        are_equal = []
        for fragment in setting.plan().fragments:
            b, c = (
                FragmentStore(setting.directory / "peers" / name, fragment, 4).newest()
                for name in "bc"
            )
            assert b is not None
            assert c is not None
            assert b.version > 0
            are_equal.append((b.version, b.payloads) == (c.version, c.payloads))
        await islands.end()
        return islands, are_equal

    islands, are_equal = run_virtual(scenario())

    assert are_equal == [True, True]
    check_same_bytes(run, islands)
