"""Reports of a syncer over a loopback network and a virtual clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest

from diloco.bounded_text import MOST_NAMES
from diloco.errors import RunReturned
from diloco.protocol.rounds import terms
from diloco.protocol.rounds.orders import Orders
from diloco.protocol.run.plan_bytes import packed, unpacked
from diloco.protos.control_pb2 import (
    FragmentStatus,
    Grant,
    RefusalCount,
    Roster,
    RoundReport,
    RoundReportReply,
    StateTransfer,
    SyncerHelloReply,
    SyncerHelloRequest,
)
from diloco.protos.fragment_pb2 import FragmentState
from diloco.syncer.reporter import HELLO_INTERVAL_S, Reporter
from diloco.telemetry.round_events import RoundExpired
from diloco.transport.calls.loopback import LoopbackNetwork, run_virtual
from diloco.transport.contracts import IncomingCall, Reply, Server


class FakeRounds:
    """Two fragments; `versions` may be changed at any time."""

    def __init__(self) -> None:
        self.versions = [0, 0]
        self.kept: list[list[int]] = []
        self.repairs: list[tuple[int, str, str]] = []
        self.orders: list[Orders] = []
        self.pinned_cut = 0
        self.transfers: list[tuple[str, str, int]] = []
        self.heard_indexed: tuple[dict[int, int], dict[int, str]] = {}, {}
        self.cuts: list[tuple[int, list[int]]] = []

    @property
    def states(self) -> list[FragmentState]:
        return [
            FragmentState(
                fragment_id=p, version=version, attempt=1, digest=bytes([p]), contributors=["east"]
            )
            for p, version in enumerate(self.versions)
        ]

    @property
    def refusals(self) -> list[RefusalCount]:
        return [RefusalCount(service="syncer", island="east", cause="size", count=2)]

    def keep_checkpoints(self, steps: Sequence[int]) -> None:
        self.kept.append(list(steps))

    def keep_cut(self, number: int, versions: Sequence[int]) -> None:
        self.cuts.append((number, list(versions)))

    def set_orders(self, orders: Orders) -> None:
        self.orders.append(orders)

    def set_transfers(self, named: Sequence[StateTransfer]) -> None:
        self.transfers = [(each.source, each.island, each.checkpoint) for each in named]

    def indexed(self, num_versions: Mapping[int, int], digests: Mapping[int, str]) -> None:
        self.heard_indexed = dict(num_versions), dict(digests)

    def repair(self, fragment_id: int, island: str, record_json: str) -> None:
        self.repairs.append((fragment_id, island, record_json))

    def damage(self, fragment_id: int) -> str:
        return ("", "version 7 cannot be read")[fragment_id % 2]

    def awaits(self, fragment_id: int) -> FragmentStatus:
        if fragment_id % 2 == 0:
            return FragmentStatus()
        return FragmentStatus(lost_version=7, holders=["east"], wants_header=True)

    def phase(self, fragment_id: int) -> str:
        return ("open", "closing")[fragment_id % 2]

    def rounds_of(self, fragment_id: int) -> tuple[int, int]:
        return 7, fragment_id


class FakeCoordinator:
    """Remembers what it heard; `plan_after_s` is when it knows the plan."""

    def __init__(self, network: LoopbackNetwork, *, plan_after_s: float = 0.0) -> None:
        self.network = network
        self.plan_after_s = plan_after_s
        self.hellos: list[tuple[float, SyncerHelloRequest]] = []
        self.reports: list[tuple[float, RoundReport]] = []
        self.answer_s = 0.0
        self.refused_reports = 0
        self.checkpoint_steps: list[int] = []
        self.roster: Roster | None = None
        self.hello = SyncerHelloReply()

    async def up(self) -> Server:
        handlers = {"control.syncer_hello": self._hello, "control.round_report": self._report}
        server = self.network.server("coordinator", handlers)
        await server.start()
        return server

    @property
    def records(self) -> list[str]:
        return [report.record_json for _, report in self.reports if report.record_json]

    async def _hello(self, call: IncomingCall) -> Reply:
        now = asyncio.get_running_loop().time()
        self.hellos.append((now, SyncerHelloRequest.FromString(call.header)))
        plan = "the plan" if now >= self.plan_after_s else ""
        reply = SyncerHelloReply(
            plan=packed(plan), fragment_ids=[0, 1], num_indexed=[0, 3], indexed_digests=["", "ab"]
        )
        reply.MergeFrom(self.hello)
        return Reply(reply.SerializeToString())

    async def _report(self, call: IncomingCall) -> Reply:
        await asyncio.sleep(self.answer_s)
        if self.refused_reports:
            self.refused_reports -= 1
            raise RuntimeError("disk full")
        now = asyncio.get_running_loop().time()
        self.reports.append((now, RoundReport.FromString(call.header)))
        reply = RoundReportReply(checkpoint_steps=self.checkpoint_steps, roster=self.roster)
        return Reply(reply.SerializeToString())


class Scene:
    """One reporter, its coordinator and its rounds."""

    def __init__(self, **coordinator: Any) -> None:
        network = LoopbackNetwork()
        self.rounds = FakeRounds()
        self.coordinator = FakeCoordinator(network, **coordinator)
        self.reporter = Reporter(
            connect=lambda: network.connect("coordinator"),
            grant=Grant(run="demo"),
            syncer_epoch=3,
            pid=17,
        )

    def run(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.reporter.run(self.rounds, "here:1"))

    def commit(self, fragment_id: int, version: int) -> None:
        self.rounds.versions[fragment_id] = version
        self.reporter.add_record({"fragment_id": fragment_id, "version": version})


def play(story: Callable[[Scene], Coroutine[Any, Any, None]], **coordinator: Any) -> Scene:
    async def told() -> Scene:
        scene = Scene(**coordinator)
        await story(scene)
        return scene

    return run_virtual(told())


def test_plan_is_asked_for_until_an_island_has_joined_and_while_nobody_answers() -> None:
    async def story(scene: Scene) -> None:
        learning = asyncio.create_task(scene.reporter.learn_plan())
        await asyncio.sleep(10)
        assert not learning.done()
        await scene.coordinator.up()
        assert unpacked((await learning).plan) == "the plan"

    scene = play(story, plan_after_s=12.0)

    times = [at for at, _ in scene.coordinator.hellos]
    assert 12.0 <= times[-1] < 12.5
    assert len(times) > 4
    assert {hello.address for _, hello in scene.coordinator.hellos} == {""}


def test_idle_syncer_repeats_its_address_and_all_states_every_two_seconds() -> None:
    async def story(scene: Scene) -> None:
        await scene.coordinator.up()
        running = scene.run()
        await asyncio.sleep(5 * HELLO_INTERVAL_S + 1)
        running.cancel()

    coordinator = play(story).coordinator

    assert [at for at, _ in coordinator.hellos] == [2.0 * i for i in range(6)]
    assert [at for at, _ in coordinator.reports] == [2.0 * i for i in range(6)]
    _, hello = coordinator.hellos[-1]
    assert (hello.address, hello.syncer_epoch, hello.pid) == ("here:1", 3, 17)
    _, report = coordinator.reports[-1]
    assert (report.syncer_epoch, report.record_json, report.fatal_reason) == (3, "", "")
    assert [(f.fragment_id, f.phase) for f in report.fragments] == [(0, "open"), (1, "closing")]
    assert [(f.rounds, f.solo_rounds) for f in report.fragments] == [(7, 0), (7, 1)]
    first = report.fragments[0]
    assert (first.attempt, first.digest, list(first.contributors)) == (1, "00", ["east"])


def test_what_the_coordinator_has_indexed_is_handed_on_with_the_digest_of_the_newest() -> None:
    async def story(scene: Scene) -> None:
        await scene.coordinator.up()
        running = scene.run()
        await asyncio.sleep(1.0)
        running.cancel()

    assert play(story).rounds.heard_indexed == ({0: 0, 1: 3}, {0: "", 1: "ab"})


def test_change_is_told_at_once_and_a_burst_in_one_report() -> None:
    async def story(scene: Scene) -> None:
        await scene.coordinator.up()
        running = scene.run()
        await asyncio.sleep(1)
        for version in range(1, 50):
            scene.rounds.versions[0] = version
            scene.reporter.changed()
        assert await scene.reporter.drain(1)
        running.cancel()

    reports = play(story).coordinator.reports

    assert [report.fragments[0].version for _, report in reports] == [0, 49]
    assert reports[1][0] - 1.0 < 0.2


def test_age_counts_from_the_publication() -> None:
    async def story(scene: Scene) -> None:
        await scene.coordinator.up()
        running = scene.run()
        await asyncio.sleep(3)
        scene.commit(1, 1)
        await asyncio.sleep(5)
        running.cancel()

    at, report = play(story).coordinator.reports[-1]

    assert [fragment.age_s for fragment in report.fragments] == [0.0, at - 3.0]


def test_records_are_told_once_and_in_order_however_often_the_coordinator_dies() -> None:
    async def story(scene: Scene) -> None:
        running = scene.run()
        scene.commit(0, 1)
        for version in range(2, 6):
            scene.commit(1, version)
            server = await scene.coordinator.up()
            assert await scene.reporter.drain(5)
            await server.stop(0)
            scene.commit(0, version)
            await asyncio.sleep(7)
        await scene.coordinator.up()
        scene.coordinator.refused_reports = 3
        assert await scene.reporter.drain(10)
        running.cancel()

    scene = play(story)

    expected = [(0, 1)]
    for version in range(2, 6):
        expected += [(1, version), (0, version)]
    assert scene.coordinator.records == [
        f'{{"fragment_id": {p}, "version": {version}}}' for p, version in expected
    ]


def test_record_that_was_not_acknowledged_is_told_again() -> None:
    async def story(scene: Scene) -> None:
        server = await scene.coordinator.up()
        scene.coordinator.answer_s = 1.0
        scene.commit(0, 1)
        running = scene.run()
        await asyncio.sleep(0.5)
        await server.stop(0)  # in the middle of the report
        scene.coordinator.answer_s = 0.0
        await scene.coordinator.up()
        assert await scene.reporter.drain(5)
        running.cancel()

    assert len(play(story).coordinator.records) == 1


def test_coordinator_that_hangs_does_not_hold_up_who_reports() -> None:
    async def story(scene: Scene) -> None:
        await scene.coordinator.up()
        scene.coordinator.answer_s = 1e6
        running = scene.run()
        before = asyncio.get_running_loop().time()
        for version in range(1, 1000):
            scene.commit(0, version)
        assert asyncio.get_running_loop().time() == before
        assert not await scene.reporter.drain(2)
        scene.coordinator.answer_s = 0.0
        assert await scene.reporter.drain(60)
        running.cancel()

    assert len(play(story).coordinator.records) == 999


def test_failure_is_told_with_every_report_from_then_on() -> None:
    async def story(scene: Scene) -> None:
        await scene.coordinator.up()
        running = scene.run()
        await asyncio.sleep(1)
        scene.reporter.fail("quorum lost", 50)
        await asyncio.sleep(5)
        running.cancel()

    reports = [report for _, report in play(story).coordinator.reports]

    fatal = [(report.fatal_reason, report.fatal_exit_code) for report in reports]
    assert fatal == [("", 0), *[("quorum lost", 50)] * 3]


def test_version_is_indexed_once_it_was_acknowledged_and_not_when_it_was_told() -> None:
    async def story(scene: Scene) -> None:
        await scene.coordinator.up()
        scene.coordinator.answer_s = 1.0
        running = scene.run()
        scene.commit(1, 4)
        scene.commit(1, 5)
        await asyncio.sleep(0.9)
        assert not scene.reporter.is_indexed(1, 4)
        await asyncio.sleep(0.2)
        assert [scene.reporter.is_indexed(1, version) for version in (3, 4, 5)] == [
            True,
            True,
            False,
        ]
        assert not scene.reporter.is_indexed(0, 0)
        running.cancel()

    play(story)


def test_complete_checkpoints_are_handed_on() -> None:
    async def story(scene: Scene) -> None:
        await scene.coordinator.up()
        running = scene.run()
        await asyncio.sleep(1)
        scene.coordinator.checkpoint_steps = [30, 60]
        await asyncio.sleep(HELLO_INTERVAL_S)
        running.cancel()

    assert play(story).rounds.kept == [[], [30, 60]]


def test_orders_are_handed_on_with_every_report_and_none_while_nobody_answers() -> None:
    async def story(scene: Scene) -> None:
        server = await scene.coordinator.up()
        running = scene.run()
        await asyncio.sleep(1)
        fenced, live = {"west": 3}, ["west", "east"]
        scene.coordinator.roster = Roster(
            generation=7, live=live, fenced=fenced, is_paused=True, min_islands=2
        )
        await asyncio.sleep(HELLO_INTERVAL_S)
        await server.stop(0)
        await asyncio.sleep(60)
        running.cancel()

    assert play(story).rounds.orders == [
        Orders(),
        Orders(terms.Roster(("east", "west"), {"west": 3}, True, 2, 7)),
    ]


def test_what_was_last_known_of_checkpoints_holds_while_the_coordinator_is_away() -> None:
    async def story(scene: Scene) -> None:
        running = scene.run()
        await asyncio.sleep(5)
        assert scene.rounds.kept == [], "nothing was heard: nothing may be removed"
        scene.coordinator.checkpoint_steps = [30]
        server = await scene.coordinator.up()
        await asyncio.sleep(1)
        await server.stop(0)
        del scene.rounds.kept[:]
        await asyncio.sleep(60)
        running.cancel()

    kept = play(story).rounds.kept
    assert len(kept) > 10
    assert all(steps == [30] for steps in kept)


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (
            {"merge": {"scales": [0.1] * 200_000}, "refused": {"east": "late"}},
            {"refused": {"east": "late"}},
        ),
        (
            {"refused": {"east": "\x01" * 180_000}, "merge": {}, "lane_digests": ["00"]},
            {"lane_digests": ["00"]},
        ),
        (
            {
                "lane_digests": ["00"],
                "contributors": [{"island": "a", "lane_digests": ["0"] * 300_000}],
            },
            {"lane_digests": ["00"], "contributors": [{"island": "a", "lane_digests": []}]},
        ),
        ({"refused": {}, "lane_digests": ["00" * 32] * 20_000, "contributors": []}, {}),
        ({"last_included": {f"i{i}": [1, 0, 0] for i in range(100_000)}}, {}),
    ],
    ids=["coefficients", "reasons", "contributions", "digests", "inclusions"],
)
def test_a_record_that_no_message_holds_is_told_without_what_is_too_much(
    header: dict[str, Any], told: dict[str, Any]
) -> None:
    key = {"timeline": 0, "fragment_id": 0, "version": 1}

    async def story(scene: Scene) -> None:
        await scene.coordinator.up()
        scene.rounds.versions[0] = 1
        scene.reporter.add_record({**key, **header})
        scene.commit(1, 1)
        scene.reporter.fail("quorum lost", 50)
        running = scene.run()
        assert await scene.reporter.drain(30)
        running.cancel()

    scene = play(story)

    assert [json.loads(record) for record in scene.coordinator.records] == [
        {**key, **told},
        {"fragment_id": 1, "version": 1},
    ]
    assert scene.coordinator.reports[-1][1].fatal_reason == "quorum lost"


def test_what_is_told_of_a_thousand_islands_fits_in_a_message_whatever_the_record(
    caplog: pytest.LogCaptureFixture,
) -> None:
    islands = [f"datacenter-{i:04d}" for i in range(1000)]
    merged = [{"island": island, "lane_digests": ["00" * 32] * 12} for island in islands]

    class ManyIslands(FakeRounds):
        @property
        def states(self) -> list[FragmentState]:
            return [
                FragmentState(fragment_id=p, version=1, digest=bytes(32), contributors=islands)
                for p in range(1000)
            ]

    async def story(scene: Scene) -> None:
        scene.rounds = ManyIslands()
        scene.coordinator.refused_reports = 2
        await scene.coordinator.up()
        scene.reporter.add_record({"fragment_id": 0, "version": 1, "contributors": merged})
        running = scene.run()
        assert await scene.reporter.drain(30)
        running.cancel()

    scene = play(story)

    ((told,),) = [[json.loads(record)["contributors"] for record in scene.coordinator.records]]
    assert told == [{"island": island, "lane_digests": []} for island in islands]
    status = scene.coordinator.reports[-1][1].fragments[999]
    assert (status.num_contributors, list(status.contributors)) == (1000, islands[:MOST_NAMES])
    assert caplog.text.count("too large to be reported") == 1, "said once, told three times"


def test_expiries_are_told_once_though_the_coordinator_was_away() -> None:
    async def story(scene: Scene) -> None:
        running = scene.run()
        for attempt in range(3):
            scene.reporter.add_expiry(RoundExpired(1, 4, attempt, ("a", "b"), ("b",), "deadline"))
        await asyncio.sleep(1)
        await scene.coordinator.up()
        await asyncio.sleep(10)
        running.cancel()

    reports = play(story).coordinator.reports

    told = [report.expiry for _, report in reports if report.HasField("expiry")]
    assert [(e.fragment_id, e.version, e.attempt) for e in told] == [(1, 4, n) for n in range(3)]
    assert {(tuple(e.missing), e.reason) for e in told} == {(("b",), "deadline")}


def test_a_new_timeline_ends_this_start_before_it_is_told_anything() -> None:
    async def story(scene: Scene) -> None:
        await scene.coordinator.up()
        scene.coordinator.hello.timeline = 1
        with pytest.raises(RunReturned, match="to timeline 1; this start serves 0"):
            await scene.run()

    assert not play(story).coordinator.reports


def test_all_end_when_the_coordinator_says_so_and_that_is_the_last_word() -> None:
    async def story(scene: Scene) -> None:
        await scene.coordinator.up()
        running = scene.run()
        await asyncio.sleep(1)
        assert not scene.reporter.ends.is_set()
        scene.coordinator.hello.ends = True
        await asyncio.wait_for(scene.reporter.ends.wait(), 2 * HELLO_INTERVAL_S)
        running.cancel()
        await scene.reporter.say_ended(1.0)

    said = [hello.has_ended for _, hello in play(story).coordinator.hellos]
    assert said[-1] and not any(said[:-1])


def test_a_coordinator_whose_place_another_has_taken_orders_nothing() -> None:
    async def story(scene: Scene) -> None:
        await scene.coordinator.up()
        scene.coordinator.hello.lease = 7
        running = scene.run()
        await asyncio.sleep(1)
        assert len(scene.rounds.orders) == 1
        scene.coordinator.hello.lease = 3
        await asyncio.sleep(10)
        assert len(scene.rounds.orders) == 1
        scene.coordinator.hello.lease = 12
        await asyncio.sleep(10)
        assert len(scene.rounds.orders) > 1
        running.cancel()

    play(story)


def test_another_policy_of_the_coordinator_ends_this_start() -> None:
    async def story(scene: Scene) -> None:
        await scene.coordinator.up()
        network = scene.coordinator.network
        reporter = Reporter(
            connect=lambda: network.connect("coordinator"),
            grant=Grant(run="demo"),
            syncer_epoch=3,
            pid=17,
            policy_digest="ab",
        )
        scene.coordinator.hello.policy_digest = "ab"
        await reporter.learn_plan()
        scene.coordinator.hello.policy_digest = "cd"
        with pytest.raises(RunReturned, match="another policy"):
            await reporter.learn_plan()

    play(story)
