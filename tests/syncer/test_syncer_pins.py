"""Pins over the wire, a run taken back to one of them, and a disk that fails under a handler."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from torch import Tensor

from diloco.protocol.rounds.orders import Orders
from diloco.protocol.rounds.terms import OutcomeKind, Roster, RoundKey
from diloco.protos import fragment_pb2 as wire
from diloco.transport.calls.loopback import run_virtual
from diloco.transport.errors import PeerReset
from diloco.versions.pins import pinned_steps, valid_pins
from diloco.versions.store import FragmentStore
from tests.raw_island import NUMEL, RawIsland, founded, restart
from tests.virtual_run import Setting, VirtualRun


def stay(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    """Train nothing: only raw islands take part."""


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Two islands, one fragment of two lanes."""
    return Setting({"w": [0.0] * NUMEL}, stay, tmp_path, inner_steps=8)


async def pin(island: RawIsland, step: int, versions: dict[int, int]) -> wire.Ack:
    request = wire.PinRequest(
        checkpoint_step=step,
        versions=[wire.Pinned(fragment_id=p, version=v) for p, v in versions.items()],
    )
    return wire.Ack.FromString((await island.call("fragment.pin", request)).header)


async def publish(islands: list[RawIsland], version: int, value: float, timeline: int = 0) -> None:
    """Have every island contribute to the round on `version`, and wait for its end."""
    key = RoundKey(timeline, 0, version, 0)
    for island in islands:
        await island.contribute(key, value, sent_at_inner_step=4 * (version + 1))
    await asyncio.sleep(0.1)
    assert await islands[0].end(key) is OutcomeKind.INCLUDED


def test_a_cut_that_is_ahead_of_the_store_is_not_kept_but_with_less_it_is(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        run, islands = await founded(setting)
        await publish(islands, 0, 1.0)

        run.syncer.keep_cut(3, [2])
        await asyncio.sleep(0.1)
        assert run.syncer.pinned_cut == 0
        assert "cut 3 not kept, versions lost of fragments [0]" in caplog.text

        run.syncer.keep_cut(3, [1])  # without the part that was ahead
        await asyncio.sleep(0.1)
        assert run.syncer.pinned_cut == 3

    run_virtual(scenario())


# -- pins over the wire ----------------------------------------------------------------------------


def test_every_island_pins_the_same_versions_and_hears_when_they_are_durable(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        _, islands = await founded(setting)
        await publish(islands, 0, 1.0)

        for island in islands:
            assert (await pin(island, 4, {0: 1})).is_accepted
        assert (await pin(islands[0], 4, {0: 1})).is_accepted, "repeated"

        assert valid_pins(setting.directory, setting.plan()) == [4]

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({0: 0}, "the checkpoint of inner step 4 holds version 1, not 0"),
        ({0: 2}, "the checkpoint of inner step 4 holds version 1, not 2"),
        ({}, "each of the 1 fragments, 0 were named: []"),
        ({0: 1, 3: 1}, "each of the 1 fragments, 2 were named: [0, 3]"),
    ],
    ids=["behind", "ahead", "none", "no-such-fragment"],
)
def test_a_pin_that_cannot_be_is_refused_by_name(
    setting: Setting, versions: dict[int, int], words: str
) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        await publish([a, b], 0, 1.0)
        await pin(a, 4, {0: 1})

        ack = await pin(b, 4, versions)

        assert not ack.is_accepted
        assert words in ack.message
        assert not run.syncer.ended.is_set()

    run_virtual(scenario())


def test_a_version_that_is_not_published_cannot_be_pinned(setting: Setting) -> None:
    async def scenario() -> None:
        _, (a, _) = await founded(setting)

        ack = await pin(a, 4, {0: 1})

        assert not ack.is_accepted
        assert not ack.is_fenced
        assert "version 1 is not here to be kept" in ack.message
        assert pinned_steps(setting.directory) == []

    run_virtual(scenario())


def test_a_fenced_start_pins_nothing(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, _) = await founded(setting)
        await RawIsland(run, "a", 2).poll()

        ack = await pin(a, 4, {0: 0})
        assert (ack.is_accepted, ack.is_fenced) == (False, True)
        assert pinned_steps(setting.directory) == []

    run_virtual(scenario())


def test_pins_of_complete_checkpoints_stay_and_older_ones_go(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, _) = await founded(setting)
        for step in (4, 8, 12):
            await pin(a, step, {0: 0})

        for steps, left in [([], [4, 8, 12]), ([8], [8, 12]), ([8, 12], [8, 12]), ([12], [12])]:
            run.syncer.keep_checkpoints(steps)
            await asyncio.sleep(0.1)
            assert pinned_steps(setting.directory) == left

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("does_b_ask", "words"),
    [(False, "islands that did not ask for them: b"), (True, "one does not report")],
)
def test_pins_are_bounded_though_no_checkpoint_becomes_complete(
    setting: Setting, caplog: pytest.LogCaptureFixture, does_b_ask: bool, words: str
) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        run.syncer.keep_checkpoints([4])
        for step in range(4, 60, 4):
            for island in (a, b) if does_b_ask else (a,):
                assert (await pin(island, step, {0: 0})).is_accepted
            run.syncer.keep_checkpoints([4])
            await asyncio.sleep(0.1)
            assert len(pinned_steps(setting.directory)) <= 1 + setting.num_unsure_pins

        assert pinned_steps(setting.directory) == [4, 44, 48, 52, 56]

    run_virtual(scenario())
    (warning,) = [line for line in caplog.messages if "never complete" in line]
    assert words in warning


def test_pins_that_one_island_asks_for_far_ahead_cost_no_other_its_checkpoint(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        run.syncer.keep_checkpoints([])
        for step in (4, 8):
            await pin(a, step, {0: 0})
        for step in range(920, 900, -1):
            await pin(b, step, {0: 0})
            run.syncer.keep_checkpoints([])
        for _ in range(2):
            run.syncer.keep_checkpoints([])
            await asyncio.sleep(0.1)
        assert {4, 8} < {*pinned_steps(setting.directory)}
        assert len(pinned_steps(setting.directory)) == 2 + setting.num_unsure_pins

        for step in range(1000, 1040):
            await pin(b, step, {0: 0})
        await restart(run)
        await pin(b, 930, {0: 0})
        run.syncer.keep_checkpoints([])
        await asyncio.sleep(0.1)
        assert {4, 8} < {*pinned_steps(setting.directory)}, "of an earlier start"

    run_virtual(scenario())


@pytest.mark.parametrize("does_restart", [False, True])
def test_who_asked_first_for_another_version_is_named_and_counts_no_more_once_kicked(
    setting: Setting, does_restart: bool
) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        for step in (12, 16):
            await pin(b, step, {0: 0})
        await publish([a, b], 0, 1.0)
        refused = await pin(a, 12, {0: 1})
        assert "holds version 0, not 1: another island had" in refused.message
        assert refused.message.endswith("asked for by b")

        if does_restart:
            await restart(run)
        run.syncer.set_orders(Orders(roster=Roster(("a",), fenced={"b": 99})))
        await asyncio.sleep(0.1)
        run.syncer.keep_checkpoints([])
        await asyncio.sleep(0.1)
        assert pinned_steps(setting.directory) == []
        assert (await pin(a, 12, {0: 1})).is_accepted

    run_virtual(scenario())


def test_what_an_earlier_start_of_an_island_asked_for_does_not_crowd_out_what_it_asks_for_now(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run, (a, _) = await founded(setting)
        for step in (*range(900, 916), 8, 12):
            await pin(a, step, {0: 0})
        run.syncer.keep_checkpoints([])
        await asyncio.sleep(0.1)
        assert {8, 12} < {*pinned_steps(setting.directory)}
        assert len(pinned_steps(setting.directory)) == setting.num_unsure_pins

    run_virtual(scenario())


def test_a_cut_that_is_not_complete_yet_stays_pinned_though_checkpoints_change(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run, _ = await founded(setting)
        for number, complete in ((1, [1]), (2, [1]), (3, [2])):
            run.syncer.keep_cut(number, [0])
            run.syncer.keep_checkpoints(complete)  # while it is pinned, and of others
            await asyncio.sleep(0.1)
            assert run.syncer.pinned_cut == number
            run.syncer.keep_checkpoints([])
            await asyncio.sleep(0.1)
            assert number in pinned_steps(setting.directory)

    run_virtual(scenario())


# -- what a returning island must know -------------------------------------------------------------


def test_islands_are_told_where_a_version_was_sent_and_whether_it_is_the_last(
    setting: Setting,
) -> None:
    async def scenario() -> list[tuple[int, int, bool]]:
        run, (a, b) = await founded(setting)
        seen = []

        async def look() -> None:
            (state,) = (await a.poll()).fragments
            seen.append((state.version, state.sent_at_inner_step, state.is_flush))

        await look()
        await a.contribute(sent_at_inner_step=4)
        await b.contribute(sent_at_inner_step=6)
        await asyncio.sleep(0.1)
        await look()
        for island in (a, b):
            await island.contribute(RoundKey(0, 0, 1, 0), sent_at_inner_step=8, is_flush=True)
        await asyncio.sleep(0.1)
        await look()
        await restart(run)
        await look()
        return seen

    assert run_virtual(scenario()) == [(0, 0, False), (1, 6, False), (2, 8, True), (2, 8, True)]


# -- a resumed run ---------------------------------------------------------------------------------


def test_a_resumed_run_publishes_from_the_pinned_version_on_in_its_own_timeline(
    setting: Setting,
) -> None:
    async def scenario() -> None:
        run, islands = await founded(setting)
        await publish(islands, 0, 1.0)
        for island in islands:
            assert (await pin(island, 6, {0: 1})).is_accepted
        await publish(islands, 1, 2.0)  # in flight at the checkpoint
        await publish(islands, 2, 4.0)
        assert await islands[0].published(3) == [-7.0, -7.0]

        run.records.clear()
        await run.resume(6)
        zombie, *again = RawIsland(run, "a"), RawIsland(run, "a", 2), RawIsland(run, "b", 2)
        for island in again:
            island.grant.timeline = 1
        assert (await zombie.poll()).is_fenced
        (state,) = (await again[0].poll()).fragments
        assert (state.version, state.attempt, state.is_open) == (1, 0, False)
        assert state.sent_at_inner_step == 4
        assert not state.wants_initial

        await again[1].poll()
        assert await again[0].published(1) == [-1.0, -1.0]
        await publish(again, 1, 2.0, timeline=1)
        await publish(again, 2, 8.0, timeline=1)

        assert await again[0].published(3) == [-11.0, -11.0]
        timelines = {header["version"]: header["timeline"] for header in run.records}
        assert timelines == {0: 0, 1: 0, 2: 1, 3: 1}
        for island in again:
            assert (await pin(island, 10, {0: 3})).is_accepted
        assert valid_pins(setting.directory, setting.plan()) == [6, 10]

    run_virtual(scenario())


# -- a disk that fails -----------------------------------------------------------------------------


def broken(*_: object) -> None:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("what", ["grant", "founding", "pin"])
def test_a_broken_disk_ends_the_syncer_and_not_the_island_that_called(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        a, b = RawIsland(run, "a"), RawIsland(run, "b")
        await b.poll()
        store = run.incarnations.store
        if what != "grant":
            await a.poll()
        if what == "pin":
            await a.upload()
        run.incarnations.store = broken  # type: ignore[method-assign]
        with monkeypatch.context() as patch:
            patch.setattr(FragmentStore, "commit", broken)
            patch.setattr(FragmentStore, "pin", broken)
            calls = {"grant": a.poll, "founding": a.upload, "pin": lambda: pin(a, 4, {0: 0})}
            calling = asyncio.create_task(calls[what]())
            await run.syncer.ended.wait()
        assert isinstance(run.syncer.failure, OSError)
        assert run.syncer.fatal is None
        assert not calling.done()

        run.incarnations.store = store  # type: ignore[method-assign]
        await restart(run)

        with pytest.raises(PeerReset):
            await calling
        await a.poll()
        await a.upload()
        assert (await pin(a, 4, {0: 0})).is_accepted

    run_virtual(scenario())


def test_a_run_of_several_fragments_pins_them_all_or_is_told_which_not(tmp_path: Path) -> None:
    setting = Setting({"v": [0.0], "w": [0.0]}, stay, tmp_path, inner_steps=8, num_fragments=2)

    async def scenario() -> wire.Ack:
        run = VirtualRun(setting)
        await run.start_syncer()
        a, b = run.island("a"), run.island("b")
        await asyncio.gather(a.start(), b.start())
        raw = RawIsland(run, "a")
        assert (await pin(raw, 4, {0: 0, 1: 0})).is_accepted
        ack = await pin(raw, 4, {0: 0, 1: 1})
        assert not (await pin(raw, 8, {0: 0, 1: 1})).is_accepted
        for island in (a, b):
            await island.exchange.stop()
        return ack

    assert run_virtual(scenario()).message.startswith("fragment 1: the checkpoint of inner step 4")
    assert valid_pins(tmp_path, setting.plan()) == pinned_steps(tmp_path) == [4]
