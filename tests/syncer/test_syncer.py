"""The syncer over a virtual network: founding, grants, contributions, lost quorum."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import blake3
import pytest
import torch
from torch import Tensor

from diloco.compression.base import to_bytes
from diloco.errors import (
    DilocoError,
    FingerprintMismatch,
    QuorumLost,
)
from diloco.outer.optimizer import OuterOptimizer
from diloco.protocol.rounds.messages import key_message
from diloco.protocol.rounds.terms import Lost, OutcomeKind, RoundKey
from diloco.protos import fragment_pb2 as wire
from diloco.protos.control_pb2 import Grant
from diloco.syncer import polls
from diloco.transport.calls.loopback import run_virtual
from diloco.transport.contracts import PROTOCOL_VERSION
from diloco.transport.errors import NotYet
from diloco.versions.store import FragmentStore
from tests.raw_island import KEY, NUMEL, Dead, Incoming, RawIsland, SlowWorker, founded, restart
from tests.virtual_run import Setting, VirtualIsland, VirtualRun, descend, grant


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Two islands, one fragment of two lanes; only the raw islands below take part."""
    return Setting({"w": [0.0] * NUMEL}, descend, tmp_path, inner_steps=8)


def records_of(setting: Setting) -> FragmentStore:
    return FragmentStore(setting.directory, setting.plan().fragments[0], 4)


def version_of(run: VirtualRun) -> tuple[int, int, bool]:
    (state,) = run.syncer.states
    return state.version, state.attempt, state.is_open


def test_islands_are_told_to_ask_first_while_more_may_come_than_is_let_in(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All contributions are more than one model in float32, those to one fragment are half."""
    setting = replace(setting, num_fragments=2, uplink_codec="int8")
    fragments = setting.plan().fragments
    monkeypatch.setattr("diloco.syncer.spool.LEAST_ARRIVING_BYTES", 0)
    setting = replace(setting, spool_bytes=max(4 * f.padded_numel for f in fragments))

    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        a, b = RawIsland(run, "a"), RawIsland(run, "b")
        assert not (await b.poll()).is_fenced
        assert (await a.poll()).asks_first, "two fragments in float32"
        with monkeypatch.context() as thin:
            thin.setattr("diloco.syncer.polls.MOST_UPLOADS", 1)
            assert not (await a.poll()).asks_first, "one lane of them"

        run.syncer._services[1].runner.hold_openings(True)
        for fragment in fragments:
            a.lanes = fragment.lanes
            assert all(ack.is_accepted for ack in await a.upload(fragment_id=fragment.fragment_id))
        reply = await a.poll()
        assert [state.is_open for state in reply.fragments] == [True, False]
        assert not reply.asks_first

        run.syncer._services[1].runner.hold_openings(False)
        reply = await a.poll()
        assert [state.is_open for state in reply.fragments] == [True, True]
        assert reply.asks_first

    run_virtual(scenario())


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


def test_a_poll_looks_only_where_its_fragments_have_changed(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[list[int]] = []
    look = polls.is_news

    def counted(request: wire.PollRequest, *answer: Any) -> bool:
        looks.append([state.fragment_id for state in request.known])
        return look(request, *answer)

    async def scenario() -> None:
        run = VirtualRun(
            replace(setting, num_fragments=2, initial={"w": [0.0] * 200, "x": [0.0] * 200})
        )
        await run.start_syncer()
        a, b = RawIsland(run, "a"), RawIsland(run, "b")
        await a.poll()
        known = await b.poll()
        waiting = [
            asyncio.create_task(b.poll(wait_s=60.0, known=about, known_epoch=known.syncer_epoch))
            for about in (known.fragments[:1], known.fragments[1:], known.fragments)
        ]
        await asyncio.sleep(1.0)
        monkeypatch.setattr(polls, "is_news", counted)

        assert all(ack.is_accepted for ack in await a.upload(fragment_id=1))

        await asyncio.sleep(1.0)
        assert [task.done() for task in waiting] == [False, True, True]
        assert [1] in looks and [0, 1] in looks and [0] not in looks
        assert [state.fragment_id for state in waiting[1].result().fragments] == [1]
        run.syncer._lose(Lost(KEY, ("b",), "nobody came", is_numeric=False))
        assert (await waiting[0]).HasField("fatal"), "what ends the run is news for all"

    run_virtual(scenario())


def test_an_island_that_joins_has_only_its_own_polls_and_the_founders_look(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    look = polls.is_news

    def counted(request: wire.PollRequest, *answer: Any) -> bool:
        looks.append(request.grant.island)
        return look(request, *answer)

    async def scenario() -> None:
        run = VirtualRun(replace(setting, islands=("a", "b", "c", "d")))
        await run.start_syncer()
        waiting, islands = [], [RawIsland(run, name) for name in "abc"]
        for island in islands:
            known = await island.poll()
            asked = {"known": known.fragments, "known_epoch": known.syncer_epoch}
            waiting.append(asyncio.create_task(island.poll(wait_s=60.0, **asked)))
        await asyncio.sleep(1.0)
        monkeypatch.setattr(polls, "is_news", counted)

        await RawIsland(run, "d").poll()
        await asyncio.sleep(1.0)

        assert sorted(set(looks)) == ["a", "d"], "b and c have no news"
        assert [task.done() for task in waiting] == [True, False, False]
        for task in waiting[1:]:
            task.cancel()

    run_virtual(scenario())


def test_many_polls_that_have_news_leave_room_for_other_calls_between_them(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polls, "_LOOK_AT_ONCE", 2)

    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        a, b = RawIsland(run, "a"), RawIsland(run, "b")
        await a.poll()
        known = await b.poll()
        asked = {"wait_s": 60.0, "known": known.fragments, "known_epoch": known.syncer_epoch}
        waiting = [asyncio.create_task(b.poll(**asked)) for _ in range(9)]
        await asyncio.sleep(1.0)
        done: list[int] = []

        run.syncer._lose(Lost(KEY, ("b",), "nobody came", is_numeric=False))
        run.syncer._notify()  # and again before anyone has looked
        while not waiting[-1].done():
            done.append(sum(task.done() for task in waiting))
            await asyncio.sleep(0)

        assert all(reply.HasField("fatal") for reply in await asyncio.gather(*waiting))
        assert all(after - before <= 2 for before, after in itertools.pairwise(done))

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


def test_a_contributor_hears_of_the_version_and_not_of_the_close_before_it(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        run.worker = SlowWorker(before_s=5.0)
        await run.start_syncer()
        a, b = RawIsland(run, "a"), RawIsland(run, "b")
        await asyncio.gather(a.poll(), b.poll())
        await a.upload()
        known = await a.poll()
        asked = {"wait_s": 60.0, "known": known.fragments, "known_epoch": known.syncer_epoch}
        contributor = asyncio.create_task(a.poll(**asked))  # older than the contribution
        other = asyncio.create_task(b.poll(**asked))
        await asyncio.sleep(1.0)
        await a.contribute()
        await b.decline()

        (heard,) = (await other).fragments
        assert (heard.version, heard.is_open) == (0, False)
        (heard,) = (await contributor).fragments
        assert heard.version == 1

    run_virtual(scenario())


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
        await again.upload_lane(1, 8.0)
        assert not (await b.poll()).fragments[0].is_founded, "not of two starts' lanes"
        await again.upload_lane(0, 8.0)

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
        assert run.syncer._services[0]._initial.lanes == {}
        return len(run.records)

    assert run_virtual(scenario()) == 1


def test_initial_lanes_on_their_way_when_their_start_is_fenced_are_dropped(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        a, b, again = RawIsland(run, "a"), RawIsland(run, "b"), RawIsland(run, "a", 2)
        await a.poll()
        await b.poll()
        call = Incoming(a, 5.0)
        header = wire.UploadHeader.FromString(b"")
        header.protocol_version, header.digest = PROTOCOL_VERSION, call.digest
        header.grant.CopyFrom(a.grant)
        call.header = header.SerializeToString()
        upload = asyncio.create_task(run.syncer.handlers["fragment.upload"](call))
        await asyncio.sleep(1.0)

        await again.poll()

        ack = wire.Ack.FromString((await upload).header)
        assert ack.message == "a newer start of island 'a' has joined"
        assert ack.is_fenced
        assert run.syncer._services[0]._initial.lanes == {}

    run_virtual(scenario())


@pytest.mark.parametrize(
    "heard_s", [pytest.param(1.0, id="while-read"), pytest.param(3.5, id="while-committed")]
)
def test_nothing_is_founded_once_a_later_version_is_known_to_be_lost(
    setting: Setting, heard_s: float
) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        run.worker = SlowWorker(1.0, 1.0)
        await run.start_syncer()
        a, b = RawIsland(run, "a"), RawIsland(run, "b")
        await asyncio.gather(a.poll(), b.poll())
        await a.upload_lane(1)
        upload = asyncio.create_task(a.upload_lane(0))  # is read for 2 s, committed for 2 s
        await asyncio.sleep(heard_s)

        for island in (a, b):  # one of two is believed in nothing
            await island.poll(known=[wire.FragmentState(is_founded=True, version=1)])

        await asyncio.sleep(5.0)
        assert "its version 1 was published" in run.syncer.damage(0)
        assert not upload.done(), "it is told to call again"
        assert run.records == []
        assert records_of(setting).newest() is None
        upload.cancel()

    run_virtual(scenario())


def test_nobody_founds_an_empty_store_of_a_later_timeline(setting: Setting) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        admission = run.syncer._admission
        admission.rules = replace(admission.rules, timeline=1)
        a, b = RawIsland(run, "a"), RawIsland(run, "b")
        for island in (a, b):
            island.grant.timeline = 1
            assert not (await island.poll()).is_fenced

        assert not (await a.poll()).fragments[0].wants_initial
        assert not (await a.upload_lane(0)).is_accepted

    run_virtual(scenario())


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
        for ack in (await other.decline(), await other.upload_lane(0)):
            assert (ack.is_accepted, ack.is_fenced) == (False, True)
        fetched = await other.call("fragment.fetch", wire.FetchHeader())
        assert wire.FetchReply.FromString(fetched.header).status == wire.FETCH_STATUS_FENCED
        assert run.incarnations.saved == {"a": 1, "b": 1}

    run_virtual(scenario())


def test_a_fragment_that_is_not_here_fences_nobody(setting: Setting) -> None:
    async def scenario() -> None:
        _, (a, _) = await founded(setting)
        declined = await a.decline(replace(KEY, fragment_id=9))
        uploaded = await a.call("fragment.upload", wire.UploadHeader(fragment_id=9))
        fetched = await a.call("fragment.fetch", wire.FetchHeader(fragment_id=9))

        for ack in (declined, wire.Ack.FromString(uploaded.header)):
            assert (ack.is_accepted, ack.is_fenced) == (False, False)
            assert ack.message == "this syncer has no such fragment"
        reply = wire.FetchReply.FromString(fetched.header)
        assert reply.status == wire.FETCH_STATUS_UNKNOWN
        assert reply.message == "this syncer has no such fragment"

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

        assert run.syncer._services[0].runner.rounds.current.contributions == {}
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
        assert run.syncer._services[0].runner._spool == {}
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


@pytest.mark.parametrize("digest", [b"", b"wrong"], ids=["sound", "malformed"])
def test_a_lane_on_its_way_when_its_start_is_fenced_is_not_counted(
    setting: Setting, digest: bytes
) -> None:
    async def scenario() -> None:
        run, (_, b) = await founded(setting)
        call = Incoming(b, 5.0, digest=digest)
        submission = asyncio.create_task(run.syncer.handlers["fragment.submit"](call))
        await asyncio.sleep(1.0)

        await RawIsland(run, "b", 2).poll()

        reply = wire.SubmitReply.FromString((await submission).header)
        assert reply.status == wire.SUBMIT_STATUS_FENCED
        assert "a newer start has joined" in reply.message
        service = run.syncer._services[0]
        assert (service.runner.rounds.current.contributions, service.runner._spool) == ({}, {})

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


def test_a_poll_repeats_no_lists_of_a_version_that_its_caller_knows(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        _, (a, b) = await founded(setting)
        for island in (a, b):
            await island.contribute()
        await asyncio.sleep(1.0)

        (new,) = (await a.poll()).fragments
        known = wire.FragmentState(is_founded=True, version=new.version, digest=new.digest)
        (same,) = (await a.poll(known=[known])).fragments
        known.version = 0
        (older,) = (await a.poll(known=[known])).fragments
        monkeypatch.setattr("diloco.syncer.polls._MOST_REPLY_BYTES", new.ByteSize())
        (nameless,) = (await a.poll()).fragments

        assert (len(new.lane_digests), list(new.contributors)) == (2, ["a", "b"])
        assert new == older, "a version of the same digest is another"
        assert (list(nameless.lane_digests), len(nameless.contributors)) == (new.lane_digests, 0)
        assert same.digest == new.digest
        assert not (same.lane_digests or same.contributors)
        assert all(s.is_member and not s.members for s in (new, same, nameless))

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
        assert run.syncer._services[0].runner._spool == {}
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
        assert run.syncer._services[0].runner._spool == {}, "with all its lanes"
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

        async with run.syncer._spool.arrival("all the room", 1 << 40, has_asked=True):
            await run.syncer.handlers["fragment.submit"](call)

        assert not call.is_read

    run_virtual(scenario())


def test_a_payload_that_is_on_its_way_without_room_is_refused_unread(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, _) = await founded(setting)
        submit = run.syncer.handlers["fragment.submit"]
        call = Incoming(a)
        call.has_asked = False
        async with run.syncer._spool.arrival("all the room", 1 << 40, has_asked=True):
            with pytest.raises(NotYet):
                await submit(call)
            assert not call.is_read
            call.has_asked = True
            waiting = asyncio.create_task(submit(call))
            await asyncio.sleep(1.0)
            assert not call.is_read

        assert wire.SubmitReply.FromString((await waiting).header).status == (
            wire.SUBMIT_STATUS_RECEIVED
        )

    run_virtual(scenario())


def test_a_decline_leaves_the_attempt_to_the_others(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        await b.submit()

        assert (await b.decline()).is_accepted
        assert (await b.decline()).is_accepted, "as often as one likes"
        assert run.syncer._services[0].runner._spool == {}
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
        assert await a.end() is OutcomeKind.REFUSED

    run_virtual(scenario())


def test_a_late_lane_is_answered_with_its_outcome(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        await a.contribute()
        await asyncio.sleep(setting.round_deadline_s + 1)
        assert run.syncer._services[0].runner._spool == {}

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


def test_contributions_on_disk_give_the_same_version_and_leave_nothing(setting: Setting) -> None:
    async def scenario(name: str, spool_bytes: int) -> bytes:
        run, (a, b) = await founded(replace(setting, directory=setting.directory / name))
        run.syncer._spool._memory_bytes = spool_bytes
        spool = setting.directory / name / "spool"
        await a.contribute(value=2.0)
        assert len(list(spool.iterdir())) == (0 if spool_bytes else 2)
        await a.submit(lane_id=1, value=2.0)  # again
        await b.contribute(value=4.0)
        await asyncio.sleep(1.0)
        assert not list(spool.iterdir())
        await a.submit(RoundKey(0, 0, 1, 0))
        await a.decline(RoundKey(0, 0, 1, 0))
        assert not list(spool.iterdir()), "nor of one who declines"
        return run.syncer.states[0].digest

    in_memory, on_disk = (run_virtual(scenario(str(n), n)) for n in (1 << 30, 0))

    assert in_memory == on_disk


def test_a_start_sweeps_the_spool(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, _) = await founded(setting)
        run.syncer._spool._memory_bytes = 0
        await a.contribute()
        await restart(run)

        assert not list((setting.directory / "spool").iterdir())

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
            header = wire.FetchHeader(version=version, lane_ids=[lane_id], kind=kind)
            reply = await a.call("fragment.fetch", header)
            return wire.FetchReply.FromString(reply.header).status

        assert await status(6, wire.FETCH_KIND_PAYLOAD) == wire.FETCH_STATUS_OK
        assert await status(2, wire.FETCH_KIND_PAYLOAD) == wire.FETCH_STATUS_OK
        assert await a.published(2) == [-2.0, -2.0]
        assert await status(1, wire.FETCH_KIND_DENSE) == wire.FETCH_STATUS_GONE
        assert await status(7, wire.FETCH_KIND_DENSE) == wire.FETCH_STATUS_UNKNOWN
        assert await status(6, wire.FETCH_KIND_DENSE, 2) == wire.FETCH_STATUS_UNKNOWN
        service = run.syncer._services[0]
        assert sorted(service.runner.rounds.past.by_base) == [2, 3, 4, 5], (
            "forgotten with their records"
        )
        assert service.runner.record is not None
        assert service.runner.record.contributions == {}, "kept on the disk only"

    run_virtual(scenario())


def test_several_lanes_are_served_together_if_they_are_few_and_in_order(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        _, (a, _) = await founded(setting)

        async def fetch(*lane_ids: int) -> tuple[int, bytes]:
            header = wire.FetchHeader(lane_ids=lane_ids, kind=wire.FETCH_KIND_DENSE)
            reply = await a.call("fragment.fetch", header)
            answer = wire.FetchReply.FromString(reply.header)
            if answer.status == wire.FETCH_STATUS_OK:
                assert answer.digest == blake3.blake3(reply.payload).digest()
            return answer.status, bytes(reply.payload)

        (_, first), (_, second) = await fetch(0), await fetch(1)
        assert await fetch(0, 1) == (wire.FETCH_STATUS_OK, first + second)
        for lane_ids in ((), (1, 0), (0, 0), (0, 1, 2)):
            assert await fetch(*lane_ids) == (wire.FETCH_STATUS_UNKNOWN, b"")
        together = sum(lane.numel for lane in a.lanes)
        monkeypatch.setattr("diloco.syncer.payloads.MOST_TOGETHER", together - 1)
        assert await fetch(0, 1) == (wire.FETCH_STATUS_UNKNOWN, b"")
        assert await fetch(0) == (wire.FETCH_STATUS_OK, first)

    run_virtual(scenario())


def test_version_0_has_no_payload_but_is_served_dense(setting: Setting) -> None:
    async def scenario() -> None:
        _, (a, _) = await founded(setting)

        reply = await a.call(
            "fragment.fetch", wire.FetchHeader(lane_ids=[0], kind=wire.FETCH_KIND_PAYLOAD)
        )

        assert wire.FetchReply.FromString(reply.header).status == wire.FETCH_STATUS_GONE
        assert await a.published(0) == [0.0, 0.0]

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


def test_the_first_fragment_that_is_lost_says_why(tmp_path: Path) -> None:
    setting = Setting({"u": [1.0], "w": [1.0]}, descend, tmp_path, 40, num_fragments=2)

    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        a, b = RawIsland(run, "a"), RawIsland(run, "b")
        await b.poll()
        lane = to_bytes(torch.zeros(128).view(torch.uint8))
        await a.poll()
        for fragment_id in (0, 1):
            header = wire.UploadHeader(fragment_id=fragment_id, digest=blake3.blake3(lane).digest())
            await a.call("fragment.upload", header, lane)
        reasons = set()
        for attempt in range(3):
            for fragment_id in (0, 1):
                await a.submit(RoundKey(0, fragment_id, 0, attempt), payload=lane)
                await asyncio.sleep(1.0)
            await asyncio.sleep(60.0)
            if run.syncer.fatal is not None:
                reasons.add(run.syncer.fatal.reason)
        await asyncio.sleep(10.0)

        assert run.syncer.phase(0) == run.syncer.phase(1) == "lost"
        assert run.syncer.fatal is not None
        assert reasons == {run.syncer.fatal.reason}
        assert run.syncer.fatal.reason.startswith("fragment 0: ")

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


@pytest.mark.parametrize(
    ("jump", "num_refused", "is_on_arrival", "num_fragments"),
    [(0.1, 2, False, 1), (0.1, 2, True, 2), (1e30, 3, False, 1)],
    ids=["lawful", "lawful-on-arrival", "not-lawful"],
)
def test_an_island_that_is_alone_goes_on_after_a_jump(
    tmp_path: Path, jump: float, num_refused: int, is_on_arrival: bool, num_fragments: int
) -> None:
    """Steps that are a hundred times longer are merged; what no model is as large as is undone."""

    def step(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
        is_late = inner_step > 20 if jump < 1 else inner_step == 21
        for parameter in parameters.values():
            parameter.sub_(jump if is_late else 0.001)

    initial = {name: [16.0] for name in "uw"[:num_fragments]}
    setting = Setting(
        initial, step, tmp_path, 40, islands=("a",), num_fragments=num_fragments, flush=True
    )

    async def scenario() -> tuple[VirtualRun, VirtualIsland]:
        run = VirtualRun(setting.on_arrival(40) if is_on_arrival else setting)
        await run.start_syncer()
        island = run.island("a")
        await asyncio.gather(island.run(), restarts(run))
        return run, island

    async def restarts(run: VirtualRun) -> None:
        await asyncio.sleep(20.0)
        for _ in range(3):
            await asyncio.sleep(4.1)
            await restart(run)

    run, island = run_virtual(scenario())

    assert run.syncer.fatal is None
    heard = island.kinds("outcome_heard")
    refused = {(e["fragment_id"], e["attempt"]) for e in heard if e["outcome"] == "refused"}
    assert refused == {(p, n) for p in range(num_fragments) for n in range(num_refused)}
    assert len(island.kinds("published_taken")) == (jump > 1)
    for end in island.values().values():
        assert end == pytest.approx([16 - 0.02 - 2.0 if jump < 1 else 16 - 0.03], abs=0.3)
