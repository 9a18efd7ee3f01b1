"""The outer loop of an island: order of sends and merges, flush, expiry, what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from diloco.errors import AggregationError, QuorumLost
from diloco.protocol.island.ledger import LocalMix, Verdict
from diloco.transport.calls.loopback import run_virtual
from tests.virtual_run import Setting, VirtualIsland, VirtualRun

DESCENT = {"a": 1.0, "b": 3.0}


def descend(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    for parameter in parameters.values():
        parameter.sub_(DESCENT[island])


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """w starts at 16; due after 4, 8, ...; merged one step later; outer SGD with lr 1."""
    return Setting({"w": [16.0]}, descend, tmp_path, inner_steps=40, overlap_steps=1)


async def started(setting: Setting) -> tuple[VirtualRun, VirtualIsland, VirtualIsland]:
    run = VirtualRun(setting)
    await run.start_syncer()
    a, b = run.island("a"), run.island("b")
    await asyncio.gather(a.start(), b.start())
    return run, a, b


def spoiling(spoiled: Callable[[int], bool]) -> Callable[[str, int, dict[str, Tensor]], None]:
    """Inner steps that are not finite on island a where `spoiled` says so."""

    def inner_step(island: str, step: int, parameters: dict[str, Tensor]) -> None:
        descend(island, step, parameters)
        if island == "a" and spoiled(step):
            parameters["w"].fill_(float("nan"))

    return inner_step


# -- order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap_steps", [0, 1, 3])
def test_merges_of_earlier_sends_come_before_sends(setting: Setting, overlap_steps: int) -> None:
    several = replace(
        setting,
        initial={name: [16.0] for name in "uvwx"},
        num_fragments=4,
        overlap_steps=overlap_steps,
    )

    async def scenario() -> VirtualIsland:
        _, a, b = await started(several)
        await asyncio.gather(a.train(12), b.train(12))
        return a

    island = run_virtual(scenario())

    order = [
        (event["inner_step"], event["kind"], event["fragment_id"])
        for event in (event.as_dict() for event in island.events)
        if event["kind"] in ("fragment_sent", "fragment_merged")
    ]
    for (step, kind, _), (next_step, next_kind, _) in pairwise(order):
        assert step <= next_step
        if step == next_step and overlap_steps:
            assert (kind, next_kind) == ("fragment_merged", "fragment_sent")
    sent = [(step, p) for step, kind, p in order if kind == "fragment_sent"]
    merged = [(step, p) for step, kind, p in order if kind == "fragment_merged"]
    # Fragment p is due after p + 1, p + 5, ...
    assert sent == [(step, (step - 1) % 4) for step in range(1, 13)]
    assert merged == [(step + overlap_steps, p) for step, p in sent if step + overlap_steps <= 12]


def test_a_session_says_where_it_stands(setting: Setting) -> None:
    async def scenario() -> None:
        _, a, b = await started(setting)
        await asyncio.gather(a.train(4), b.train(4))
        assert repr(a.session) == "OuterLoop(inner_step=4, versions=[0], in_flight=1)"
        assert a.session.num_in_flight == 1
        await asyncio.gather(a.train(1), b.train(1))
        assert repr(a.session) == "OuterLoop(inner_step=5, versions=[1], in_flight=0)"

    run_virtual(scenario())


def test_the_end_of_another_contribution_is_not_taken_for_this_ones(setting: Setting) -> None:
    # The IO thread may lag: what it shows can be of what was outstanding before.
    async def scenario() -> None:
        _, a, _ = await started(setting)
        await a.train(4)
        sent = a.session.state.ledgers[0].outstanding
        assert sent is not None
        view = replace(a.exchange.view(0), verdict=Verdict.EXPIRED)
        for key, verdict in ((sent.key, Verdict.EXPIRED), (replace(sent.key, attempt=7), None)):
            a.exchange._views[0] = replace(view, key=key)
            assert a.session._vote().votes[0].verdict is verdict

    run_virtual(scenario())


def test_published_parameters_are_in_place_only_inside_the_context(setting: Setting) -> None:
    async def scenario() -> None:
        _, a, b = await started(setting)
        await asyncio.gather(a.train(6), b.train(6))

        with pytest.raises(ValueError, match="the evaluation"), a.session.global_parameters():
            assert a.values() == {"w": [8.0]}
            raise ValueError("the evaluation")

        assert a.values() == {"w": [7.0]}

    run_virtual(scenario())


# -- expiry --------------------------------------------------------------------------------------


def test_after_an_expiry_nobody_merges_and_the_next_due_send_carries_all(setting: Setting) -> None:
    async def scenario() -> tuple[VirtualIsland, VirtualIsland]:
        _, a, b = await started(setting)
        # b makes its first four steps while a's first contribution expires; then both go on.
        training = asyncio.create_task(a.train(9))
        await asyncio.sleep(70.0)
        await b.train(9)
        await training
        return a, b

    a, b = run_virtual(scenario())

    for island in (a, b):
        (expired,) = island.kinds("round_expired")
        assert (expired["inner_step"], expired["attempt"]) == (5, 0)
        assert island.kinds("fragment_merged")[0]["inner_step"] == 9
        sends = [(e["inner_step"], e["attempt"], e["weight_steps"])
                 for e in island.kinds("fragment_sent")]  # fmt: skip
        assert sends == [(4, 0, 4), (8, 1, 8)]
    # a alone waited: a deadline less the step in between. 16 - (8 * 1 + 8 * 3) / 2 = 0.
    assert a.kinds("round_expired")[0]["blocked_s"] == pytest.approx(59.0)
    assert a.values() == b.values() == {"w": [0.0]}


@pytest.mark.parametrize("num_expired", [1, 2])
def test_an_island_that_is_late_for_attempts_keeps_in_step_with_the_others(
    setting: Setting, num_expired: int
) -> None:
    """Each attempt is served by the same due step of everybody, dead or alive."""
    shorter = replace(setting, inner_steps=18, flush=True)

    async def scenario() -> tuple[VirtualIsland, VirtualIsland]:
        _, a, b = await started(shorter)
        late_s = 66.0 * num_expired  # a's deadline runs out after 64 s, and again after 128 s

        async def follow() -> None:
            await asyncio.sleep(late_s)
            await b.go_on()

        await asyncio.gather(a.go_on(), follow())
        return a, b

    islands = run_virtual(scenario())

    for island in islands:
        sent = island.kinds("fragment_sent")
        assert [(e["inner_step"], e["version"], e["attempt"]) for e in sent] == [
            *[(4 * (attempt + 1), 0, attempt) for attempt in range(num_expired + 1)],
            *[(4 * due, due - num_expired - 1, 0) for due in range(num_expired + 2, 5)],
            (18, 4 - num_expired, 0),
        ]
        expired = island.kinds("round_expired")
        assert [event["inner_step"] for event in expired] == [5, 9][:num_expired]
    late = islands[1].kinds("round_expired")
    assert all(event["blocked_s"] == 0 for event in late), "answered at once"
    assert islands[0].session.digests == islands[1].session.digests


def test_what_was_trained_since_the_send_is_kept_and_sent_next(setting: Setting) -> None:
    kept = replace(setting, overlap_steps=3, local_mix="since_send")

    async def scenario() -> None:
        _, a, b = await started(kept)
        await asyncio.gather(a.train(7), b.train(7))
        # Of 16, sent after four steps: 12 and 4, which are 8 published; three steps each since.
        assert (a.values(), b.values()) == ({"w": [8.0 - 3 * 1.0]}, {"w": [8.0 - 3 * 3.0]})
        await asyncio.gather(a.train(8), b.train(8))
        sent = [event["lanes_norm"] for event in a.kinds("fragment_sent")]
        assert sent == [4.0, 4.0, 4.0], "four steps, though three were made before the merge"

    run_virtual(scenario())


def test_of_the_published_values_that_an_island_took_meanwhile_nothing_is_kept_twice(
    setting: Setting,
) -> None:
    kept = replace(setting, overlap_steps=3, local_mix="since_send")

    async def scenario() -> None:
        _, a, b = await started(kept)
        await asyncio.gather(a.train(5), b.train(5))
        a.session.merging.take_published(a.session.state.ledgers[0])
        await asyncio.gather(a.train(2), b.train(2))
        assert (a.values(), b.values()) == ({"w": [8.0]}, {"w": [8.0 - 3 * 3.0]})

    run_virtual(scenario())


# -- flush ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("local_mix", [0.0, 0.5, 1.0, "since_send"])
def test_a_flush_merges_with_alpha_0_whatever_alpha_is(
    setting: Setting, local_mix: LocalMix
) -> None:
    islands = run_virtual(
        VirtualRun(replace(setting, inner_steps=6, flush=True, local_mix=local_mix)).run()
    )

    assert islands["a"].values() == islands["b"].values()
    assert islands["a"].published[-1] != islands["a"].values()


def test_finishing_early_merges_what_is_outstanding_then_flushes(setting: Setting) -> None:
    async def scenario() -> VirtualIsland:
        _, a, b = await started(replace(setting, flush=True, overlap_steps=3))
        await asyncio.gather(a.train(6), b.train(6))
        assert a.session.num_in_flight == 1
        await asyncio.gather(a.finish(), b.finish())
        assert a.values() == b.values()
        return a

    merged = run_virtual(scenario()).kinds("fragment_merged")

    assert [(e["version"], e["is_flush"], e["inner_step"]) for e in merged] == [
        (1, False, 6),
        (2, True, 6),
    ]


def test_a_flush_right_after_a_merge_moves_nothing(setting: Setting) -> None:
    async def scenario() -> VirtualIsland:
        _, a, b = await started(replace(setting, flush=True))
        await asyncio.gather(a.train(5), b.train(5))
        before = a.values()
        await asyncio.gather(a.finish(), b.finish())
        assert a.values() == b.values() == before
        return a

    sent = run_virtual(scenario()).kinds("fragment_sent")

    assert [(e["is_flush"], e["weight_tokens"], e["declined"]) for e in sent] == [
        (False, 4, ""),
        (True, 1, ""),
    ]


def test_a_flush_that_expired_is_tried_again(setting: Setting) -> None:
    async def scenario() -> tuple[VirtualIsland, VirtualIsland]:
        _, a, b = await started(replace(setting, flush=True))
        await asyncio.gather(a.train(7), b.train(7))
        finishing = asyncio.create_task(a.finish())
        await asyncio.sleep(70.0)
        await asyncio.gather(b.finish(), finishing)
        return a, b

    a, b = run_virtual(scenario())

    assert a.values() == b.values()
    assert [event["attempt"] for event in a.kinds("round_expired")] == [0]
    assert a.kinds("fragment_merged")[-1]["is_flush"]


def test_one_island_that_finishes_alone_is_told_that_the_quorum_is_lost(setting: Setting) -> None:
    async def scenario() -> float:
        _, a, b = await started(replace(setting, flush=True))
        await asyncio.gather(a.train(7), b.train(7))
        with pytest.raises(QuorumLost, match="missing: b"):
            await a.finish()
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == pytest.approx(7 + 3 * 60)


# -- what is declined and counted ------------------------------------------------------------------


def test_without_tokens_an_island_declines(setting: Setting) -> None:
    async def scenario() -> list[dict[str, Any]]:
        _, a, b = await started(replace(setting, tokens={"a": 0}))
        await asyncio.gather(a.train(17), b.train(17))
        assert a.values() == b.values()
        return a.kinds("fragment_sent") + a.kinds("fragment_merged")

    events = run_virtual(scenario())

    assert {e["declined"] for e in events[:4]} == {"no tokens were counted since the last merge"}
    assert {e["outcome"] for e in events[4:]} == {"declined"}
    assert {e["contributors"] for e in events[4:]} == {("b",)}


def test_a_finite_pseudo_gradient_starts_the_count_of_broken_ones_again(setting: Setting) -> None:
    # Sends after 4, 8, 12, 16, 20: broken, broken, fine, broken, broken.
    async def scenario() -> None:
        _, a, b = await started(replace(setting, inner_step=spoiling({4, 8, 16, 20}.__contains__)))
        await asyncio.gather(a.train(22), b.train(22))

        declined = [bool(event["declined"]) for event in a.kinds("fragment_sent")]
        assert declined == [True, True, False, True, True]

    run_virtual(scenario())


def test_three_broken_ones_in_a_row_end_the_island_though_the_others_go_on(
    setting: Setting,
) -> None:
    async def scenario() -> int:
        _, a, b = await started(replace(setting, inner_step=spoiling(lambda step: step >= 4)))
        others = asyncio.create_task(b.train(12))
        with pytest.raises(AggregationError, match="fragment 0: 3 pseudo-gradients in a row"):
            await a.train(40)
        others.cancel()
        return a.session.inner_step

    assert run_virtual(scenario()) == 13


@pytest.mark.parametrize(("local_mix", "overwritten"), [(0.0, 2 * 3), (0.5, 0), ("since_send", 0)])
def test_overwritten_steps_are_those_a_merge_replaced(
    setting: Setting, local_mix: LocalMix, overwritten: int
) -> None:
    async def scenario() -> int:
        _, a, b = await started(replace(setting, overlap_steps=3, local_mix=local_mix))
        await asyncio.gather(a.train(12), b.train(12))
        return a.session.merging.overwritten_steps

    assert run_virtual(scenario()) == overwritten
