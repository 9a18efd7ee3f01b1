"""Fragments spread over several syncers, on a virtual clock: whose loss stalls what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.errors import CoordinatorUnavailable
from diloco.island.exchange.exchange import SyncerConnection
from diloco.transport.calls.loopback import run_virtual
from diloco.transport.contracts import Transport
from diloco.transport.errors import ConnectError
from diloco.versions.pins import valid_pins
from tests.several_syncers import MOVING_S, Several, killing
from tests.virtual_run import Setting, VirtualIsland, VirtualRun

DESCENT = {"a": 1.0, "b": 3.0, "c": 2.0}
STEPS = 24


def descend(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    for parameter in parameters.values():
        parameter.sub_(DESCENT[island])


@pytest.fixture
def scheduled(tmp_path: Path) -> Setting:
    return Setting(
        {name: [16.0] * numel for name, numel in zip("uvwx", (2, 300, 40, 700), strict=True)},
        descend,
        tmp_path,
        inner_steps=STEPS,
        islands=tuple(DESCENT),
        num_fragments=4,
        inner_steps_per_round=8,
        overlap_steps=2,
        flush=True,
    )


@pytest.fixture
def on_arrival(scheduled: Setting) -> Setting:
    """K = 1, so that nobody waits for anybody; the flush is due after `STEPS` of each."""
    setting = replace(scheduled, min_members=1, quorum=1, total_tokens=STEPS * len(DESCENT))
    return replace(setting, timing=setting.measured())


def published_at(run: Several) -> dict[int, list[float]]:
    """Times at which versions of the kept syncer's fragments came, before anything was flushed."""
    times: dict[int, list[float]] = {p: [] for p in run.kept.own}
    for at, header in run.came:
        if not header["is_flush"]:
            times[header["fragment_id"]].append(at)
    return times


def values(islands: dict[str, VirtualIsland]) -> dict[str, list[list[float]]]:
    return {
        name: [tensor.tolist() for tensor in island.parameters.values()]
        for name, island in islands.items()
    }


def test_a_scheduled_run_waits_for_the_lost_syncer_alone_and_comes_to_the_same_bits(
    scheduled: Setting,
) -> None:
    alone = run_virtual(VirtualRun(replace(scheduled, directory=scheduled.directory / "one")).run())
    run = Several(scheduled)

    islands = run_virtual(run.run(killing(every_s=3.0)))

    assert run.parts[1].epoch > 3
    assert values(islands) == values(alone)
    assert len({i.session.digests for i in (*islands.values(), *alone.values())}) == 1
    waited = {
        event["fragment_id"]
        for island in islands.values()
        for event in island.kinds("fragment_merged")
        if event["blocked_s"] > 1.0 and not event["is_flush"]
    }
    assert waited and waited <= set(run.parts[1].own)


def moving(
    every_s: float, *moves: tuple[int, int]
) -> Callable[[Several], Coroutine[Any, Any, None]]:
    """Move fragments, one after the other, each to a part by number; then lose the second."""

    async def move(run: Several) -> None:
        for fragment_id, target in moves:
            await asyncio.sleep(every_s)
            await asyncio.shield(run.move(fragment_id, target))
        await asyncio.sleep(every_s)
        await asyncio.shield(run.lose(1, 0))

    return move


@pytest.mark.parametrize(
    ("is_scheduled", "num_moves"),
    [(True, 2), (False, 2), (True, 0)],
    ids=["scheduled", "on-arrival", "lost-with-what-had-come"],
)
def test_fragments_move_between_syncers_while_islands_go_on_to_the_same_end(
    scheduled: Setting, on_arrival: Setting, is_scheduled: bool, num_moves: int
) -> None:
    setting, every_s = (scheduled, 3.0) if is_scheduled else (on_arrival, 1.0)
    if is_scheduled:  # of what the others have sent, syncers wait for the slow one
        setting = replace(setting, steps_s={"c": 2.5})
    alone = VirtualRun(replace(setting, directory=setting.directory / "one"))
    undisturbed, run = run_virtual(alone.run()), Several(setting)
    run.parts[1].epoch = 100  # counts nothing at the other
    kept, other = (list(part.own) for part in run.parts)
    moves = (other[0], 0), (kept[0], 1)

    islands = run_virtual(run.run(moving(every_s, *moves[:num_moves])))

    assert run.parts[0].own == list(range(setting.num_fragments))
    assert len({island.session.digests for island in islands.values()}) == 1
    made = [(r["fragment_id"], r["version"], r["digest"]) for r in run.records]
    assert len({each[:2] for each in made}) == len(set(made)), "no version is two things"
    if is_scheduled:
        assert values(islands) == values(undisturbed)
        assert not any(r["attempt"] for r in run.records), "what had come was sent again in time"
    else:
        assert all(island.session.blocked_s == 0.0 for island in islands.values())
        for p in range(setting.num_fragments):
            headers = {r["version"]: r for r in run.records if r["fragment_id"] == p}
            assert sorted(headers) == list(range(len(headers))), "none is lost"
            merged = sum(c["weight_tokens"] for h in headers.values() for c in h["contributors"])
            assert merged >= setting.total_tokens


def test_a_long_move_is_asked_about_less_and_less_often(on_arrival: Setting) -> None:
    run, seen = Several(on_arrival), dict[str, int]()

    async def move(run: Several) -> None:
        await asyncio.sleep(1.0)  # before it was founded: every island sends all lanes of it
        before = [island.exchange.bytes_up for island in run.made]
        await run.move(run.kept.own[0], 1, moving_s=900.0)
        seen["looks"] = run.num_looks
        seen["sent"] = sum(island.exchange.bytes_up for island in run.made) - sum(before)

    islands = run_virtual(run.run(move))

    assert len({island.session.digests for island in islands.values()}) == 1
    assert seen["looks"] < len(islands) * 900 / 30
    assert seen["sent"] < 2_000_000


def test_a_pin_waits_for_who_asks_too_few_of_a_syncer_to_which_all_fragments_have_moved(
    scheduled: Setting,
) -> None:
    run, pinned = Several(scheduled), list[int]()

    async def pinning(run: Several) -> None:
        await asyncio.sleep(3.0)
        losing = asyncio.create_task(run.lose(1, 0))
        await asyncio.sleep(1.5 * MOVING_S)  # all are there, and no island knows
        exchange = run.made[0].exchange
        views = map(exchange.view, range(scheduled.num_fragments))
        exchange.pin(8, [view.anchor_version for view in views])
        await exchange.wait_until_pinned(8, 60.0)
        pinned.append(exchange.pinned_step)
        await losing

    islands = run_virtual(run.run(pinning))

    assert pinned == [8]
    assert valid_pins(run.kept.setting.directory, scheduled.plan()) == [8]
    assert len({island.session.digests for island in islands.values()}) == 1


def test_on_arrival_the_loss_of_a_syncer_holds_up_its_own_fragments_alone(
    on_arrival: Setting,
) -> None:
    calm, run = (
        Several(replace(on_arrival, directory=on_arrival.directory / name))
        for name in ("calm", "killed")
    )
    run_virtual(calm.run())

    islands = run_virtual(run.run(killing(every_s=12.0)))

    assert run.parts[1].epoch > 2
    assert published_at(calm) and published_at(run) == published_at(calm), "as if nothing had died"
    assert all(island.session.blocked_s == 0.0 for island in islands.values())
    assert len({island.session.digests for island in islands.values()}) == 1
    for part in run.parts:
        for p in part.own:
            headers = {r["version"]: r for r in part.records if r["fragment_id"] == p}
            merged = sum(c["weight_tokens"] for h in headers.values() for c in h["contributors"])
            assert merged >= on_arrival.total_tokens


def test_an_island_returns_though_the_fragments_of_one_syncer_have_not_moved(
    scheduled: Setting,
) -> None:
    async def scenario() -> None:
        run = Several(scheduled)
        await run.start()
        islands = {name: run.island(name) for name in scheduled.islands}
        await asyncio.gather(*(island.start() for island in islands.values()))
        phases = scheduled.schedule()
        first = min(step for step in range(1, STEPS) if phases.due(step))
        await asyncio.gather(*(island.train(first + 2) for island in islands.values()))
        moved = {p.name: max(r["version"] for r in p.records) for p in run.parts}
        assert sorted(moved.values()) == [0, 1], "one of them only"
        await islands["a"].drop()

        back = run.island("a", incarnation=2)
        with torch.no_grad():
            for parameter in back.parameters.values():
                parameter.add_(1.0)  # of its own, as after a crash: no reason to refuse it
        await back.start(last_inner_step=first + 2)

        assert back.session.digests == islands["b"].session.digests
        for island in (back, islands["b"], islands["c"]):
            await island.exchange.stop()
        await run.kill()

    run_virtual(scenario())


def test_a_resumed_run_with_two_syncers_goes_on_as_if_it_had_not_been_stopped(
    scheduled: Setting,
) -> None:
    step = 12
    whole = run_virtual(Several(replace(scheduled, directory=scheduled.directory / "w")).run())

    async def scenario() -> dict[str, VirtualIsland]:
        run = Several(scheduled)
        await run.start()
        islands = {name: run.island(name) for name in scheduled.islands}
        await asyncio.gather(*(island.start() for island in islands.values()))
        await asyncio.gather(*(island.train(step) for island in islands.values()))
        taken = await asyncio.gather(*(island.checkpoint() for island in islands.values()))
        kept = dict(zip(islands, taken, strict=True))
        await asyncio.gather(*(island.train(6) for island in islands.values()))
        for island in islands.values():
            await island.drop()
        await run.resume(step)
        run.setting = replace(scheduled, start_step=step)
        islands = {name: run.island(name) for name in scheduled.islands}
        await asyncio.gather(*(islands[name].resume(kept[name]) for name in islands))
        await asyncio.gather(*(island.go_on() for island in islands.values()))
        for island in islands.values():
            await island.exchange.stop()
        await run.kill()
        return islands

    assert values(run_virtual(scenario())) == values(whole)


PATIENCE_S = 8.0


def test_islands_stay_while_one_syncer_is_away_for_longer_than_their_patience(
    on_arrival: Setting,
) -> None:
    setting = replace(on_arrival, unreachable_s=PATIENCE_S)

    async def scenario() -> None:
        run = Several(setting)
        await run.start()
        islands = [run.island(name) for name in setting.islands]
        training = [asyncio.create_task(island.run()) for island in islands]
        await asyncio.sleep(8.0)
        await run.parts[1].kill_syncer()
        before = len(run.kept.records)
        await asyncio.sleep(3 * PATIENCE_S)

        assert [island.exchange.failure for island in islands] == [None] * 3
        assert len(run.kept.records) > before, "the others' fragments are published on"
        await run.parts[1].start_syncer()
        await asyncio.gather(*training)
        assert len({island.session.digests for island in islands}) == 1
        for island in islands:
            await island.exchange.stop()
        await run.kill()

    run_virtual(scenario())


@pytest.mark.parametrize("is_coordinator_there", [False, True])
def test_islands_end_once_neither_a_syncer_nor_the_coordinator_answers(
    on_arrival: Setting, is_coordinator_there: bool
) -> None:
    async def scenario() -> None:
        run = Several(replace(on_arrival, unreachable_s=PATIENCE_S))
        await run.start()
        island = run.island("a")
        training = asyncio.create_task(island.run())
        await asyncio.sleep(8.0)
        await run.parts[1].kill_syncer()
        await asyncio.sleep(2 * PATIENCE_S)
        await run.kept.kill_syncer()
        for _ in range(3 * int(PATIENCE_S) if is_coordinator_there else 0):
            island.exchange.coordinator_answered()
            await asyncio.sleep(1.0)
        assert island.exchange.failure is None
        loop = asyncio.get_running_loop()
        alone_at = loop.time()

        with pytest.raises(CoordinatorUnavailable, match=r"the syncer at syncer-\d gave no answer"):
            await training
        assert PATIENCE_S - 2 < loop.time() - alone_at < PATIENCE_S + 2
        await island.exchange.stop()

    run_virtual(scenario())


class Cut:
    """A way on which nothing arrives."""

    peer = "cut"

    async def call(self, method: str, *_: object, **__: object) -> None:
        raise ConnectError("nobody listens", peer=self.peer, method=method)

    async def close(self) -> None:
        pass


def test_a_start_that_never_reaches_a_syncer_ends_though_others_answer(
    on_arrival: Setting,
) -> None:
    async def scenario() -> None:
        setting = replace(on_arrival, unreachable_s=PATIENCE_S)
        run = Several(setting)
        await run.start()
        cut: Transport = Cut()  # type: ignore[assignment]
        first, other = run.parts
        kept = SyncerConnection(
            first.own, run.network.connect(first.name), run.network.connect(first.name)
        )
        connections = [kept, SyncerConnection(other.own, cut, cut)]
        unused = run.network.connect("nobody")
        island = VirtualIsland("a", setting, unused, unused, connections=connections)
        training = asyncio.create_task(island.run())
        for _ in range(int(PATIENCE_S) + 4):
            island.exchange.coordinator_answered()
            await asyncio.sleep(1.0)

        with pytest.raises(CoordinatorUnavailable, match="the syncer at cut gave no answer"):
            await asyncio.wait_for(training, 1.0)
        await island.exchange.stop()
        await run.kill()

    run_virtual(scenario())


def test_a_way_for_data_that_is_cut_alone_ends_the_island_though_others_answer(
    on_arrival: Setting,
) -> None:
    async def scenario() -> None:
        setting = replace(on_arrival, unreachable_s=PATIENCE_S)
        run = Several(setting)
        await run.start()
        data: list[Transport] = [run.network.connect("syncer-0"), Cut()]  # type: ignore[list-item]
        connections = [
            SyncerConnection(p.own, run.network.connect(p.name), each)
            for p, each in zip(run.parts, data, strict=True)
        ]
        unused = run.network.connect("nobody")
        island = VirtualIsland("a", setting, unused, unused, connections=connections)

        with pytest.raises(CoordinatorUnavailable, match="the syncer at cut gave no answer"):
            await island.run()
        await island.exchange.stop()
        await run.kill()

    run_virtual(scenario())
