"""What reports say of an island's link: rates of counters, and calls that broke."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from diloco.bounded_text import MOST_REASON
from diloco.island.exchange.calls import SyncerCalls
from diloco.island.link_report import LinkReport, LinkSettings
from diloco.protos.control_pb2 import LinkUse, SyncerLinkUse
from diloco.protos.fragment_pb2 import Ack
from diloco.telemetry.events import AlarmCleared, AlarmRaised
from diloco.telemetry.link_figures import link_figures
from diloco.transport.calls.loopback import run_virtual
from diloco.transport.contracts import Buffer, Reply
from diloco.transport.errors import PeerReset
from diloco.transport.retry import RetryPolicy
from diloco.transport.transfer import Transfer
from tests.virtual_run import grant


@dataclass
class Counted:
    """Counters of two syncers."""

    peers: list[str] = field(default_factory=lambda: ["127.0.0.1:1", "in-memory"])
    moved: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0), (0, 0)])
    failed_calls: list[int] = field(default_factory=lambda: [0, 0])


def test_rates_are_those_of_the_last_ten_seconds_and_of_each_syncer() -> None:
    counted = Counted()
    report = LinkReport(counted, LinkSettings(up_bps=1600.0, down_bps=1e99, added_s=0.06))
    for second in range(41):
        up = 100 * min(second, 30)
        counted.moved = [(up, 0), (0, 2 * up)]
        counted.failed_calls = [0, second // 20]
        if second == 20:
            busy = report.use(float(second), None)
        else:
            idle = report.use(float(second), None)

    assert busy.interval_s == 10.0
    assert [(s.up_bps, s.down_bps) for s in busy.syncers] == [(800.0, 0.0), (0.0, 1600.0)]
    assert [s.recent_failed_calls for s in busy.syncers] == [0, 1]
    assert link_figures(busy).fullness == 0.5
    assert link_figures(busy).round_trip_s == 0.0, "nothing is connected: it is not known"
    assert busy.down_capacity_bps == pytest.approx(1e15), (
        "what the coordinator refuses is never said"
    )
    assert link_figures(idle).up_bps == 0.0
    assert [s.failed_calls for s in idle.syncers] == [0, 2]


def test_a_link_with_little_room_for_ten_minutes_is_an_alarm_until_it_has_more() -> None:
    counted = Counted(peers=["a"], moved=[(0, 0)], failed_calls=[0])
    report, said = LinkReport(counted, LinkSettings(up_bps=1000.0, down_bps=1e6)), {}

    for second in range(900):  # full for nine of ten minutes, then for none
        counted.moved = [(125 * (min(second, 680) - min(second, 680) // 600 * 60), 0)]
        report.use(float(second), None)
        if (alarm := report.alarm("eu")) is not None:
            said[second] = alarm

    raised, again, *_, cleared = said.values()
    assert isinstance(raised, AlarmRaised) and isinstance(again, AlarmRaised)
    assert isinstance(cleared, AlarmCleared) and raised.about == cleared.about == "eu"
    first, second, *_, last = said
    assert 600 <= first <= 615 and second == first + 60 and 700 < last < 860
    assert "1 kbit/s up, 90% were used" in raised.text
    assert "diloco stop HOST:PORT" in raised.text and len(raised.text) <= MOST_REASON


def test_ranks_that_wait_and_sum_up_nothing_raise_no_alarm_of_what_was() -> None:
    report = LinkReport(Counted(peers=["a"], failed_calls=[0]), LinkSettings(up_bps=1000.0))
    sums = [((120 * second, 0),) for second in range(30)]

    for second in range(2000):
        use = report.use(float(second), sums[min(second, 29)])
        assert report.alarm("eu") is None
    assert link_figures(use).fullness == pytest.approx(0.96)


def test_rates_of_several_ranks_are_those_between_their_sums_however_seldom() -> None:
    counted = Counted(peers=["a"], failed_calls=[0])
    report, sums = LinkReport(counted, LinkSettings()), [((n * 1000, 0),) for n in range(4)]

    first = report.use(0.0, ())
    for second in range(100):
        last = report.use(float(second), sums[second // 30])

    assert [s.up_bps for s in first.syncers] == [0.0]
    assert last.syncers[0].up_bps == pytest.approx(8 * 1000 / 30)
    assert link_figures(last).fullness is None


def test_a_lane_on_its_way_and_an_attempt_that_broke_are_counted() -> None:
    class Slow:
        peer = "syncer"
        num_calls = 0

        async def call(
            self, method: str, header: bytes, payload: Buffer, *, transfer: Transfer, **_: object
        ) -> Reply:
            self.num_calls += 1
            transfer.sent_bytes += 100
            await asyncio.sleep(10.0)
            if self.num_calls == 1:
                raise PeerReset("cut", peer=self.peer)
            return Reply(Ack(is_accepted=True).SerializeToString())

        async def close(self) -> None:
            pass

    async def run() -> list[int]:
        calls = SyncerCalls(
            Slow(),  # type: ignore[arg-type]
            Slow(),  # type: ignore[arg-type]
            grant("a"),
            rpc_deadline_s=60.0,
            policy=RetryPolicy(budget_s=600.0),
            rng=random.Random(0),
        )
        upload = asyncio.create_task(calls.upload(0, 0, b"lane"))
        await asyncio.sleep(5.0)
        under_way = calls.moved[0]
        await upload
        header = under_way - 100
        return [calls.moved[0] - 2 * header, calls.num_failed]

    assert run_virtual(run()) == [200, 1]


def test_what_islands_say_is_summed_up_over_syncers() -> None:
    use = LinkUse(
        down_capacity_bps=10.0,
        syncers=[
            SyncerLinkUse(up_bps=5.0, down_bps=8.0, round_trip_s=0.25, failed_calls=2),
            SyncerLinkUse(up_bps=1.0, down_bps=9.0, recent_failed_calls=1),
        ],
    )

    figures = link_figures(use)

    assert (figures.up_bps, figures.down_bps, figures.fullness) == (6.0, 17.0, 1.0)
    assert (figures.round_trip_s, figures.failed_calls, figures.recent_failed_calls) == (0.25, 2, 1)
