"""Which alarms hold at a process: raised, cleared, expired, bounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from diloco.island.self_check import SelfCheck
from diloco.protocol.run.alarms import Alarm, AlarmKind, Alarms
from diloco.telemetry.events import AlarmCleared, AlarmRaised, Event, TextUntold

REFUSED = Alarm(AlarmKind.CONTRIBUTION_REFUSED, "norm 3e9", "west", 1)


def test_an_alarm_holds_until_it_is_cleared() -> None:
    alarms = Alarms()

    assert alarms.raise_(REFUSED, 1.0)
    assert not alarms.raise_(REFUSED, 5.0), "it holds already"

    (held,) = alarms.holding(6.0)
    assert (held.first, held.last, held.count) == (1.0, 5.0, 2)
    alarms.clear(AlarmKind.CONTRIBUTION_REFUSED, "west")
    assert alarms.holding(6.0), "that was about no fragment"
    alarms.clear(AlarmKind.CONTRIBUTION_REFUSED, "west", 1)
    assert not alarms.holding(6.0)


def test_an_alarm_that_is_not_raised_again_expires() -> None:
    alarms = Alarms(lasting_s=10.0)
    alarms.raise_(REFUSED, 0.0)
    alarms.raise_(REFUSED, 5.0)

    assert alarms.holding(15.0)
    assert not alarms.holding(15.1)
    assert alarms.raise_(REFUSED, 16.0), "it begins again"


def test_so_many_alarms_hold_and_a_further_one_takes_the_place_of_the_oldest() -> None:
    alarms = Alarms(most=2)
    for moment, island in enumerate(["i0", "i1", "i0", "i2"]):
        alarms.raise_(Alarm(AlarmKind.ISLAND_DECLINES, "", island), float(moment))

    assert [held.alarm.island for held in alarms.holding(3.0)] == ["i2", "i0"]


def test_the_loss_watch_clears_no_alarm_of_a_loss_that_was_accepted() -> None:
    alarms, kept = Alarms(), list[Event]()
    parts: Any = SimpleNamespace(
        exchange=SimpleNamespace(island="west"),
        agreement=None,
        on_event=kept.append,
        schedule=SimpleNamespace(inner_steps_per_round=4),
        plan=SimpleNamespace(fragments=[None]),
    )
    check = SelfCheck(parts, parts)
    check._accept("its loss is high", 8)
    for event in kept:
        alarms.on_event(event, 0.0)

    alarms.on_event(AlarmCleared(AlarmKind.LOSS_RISES, "west"), 1.0)

    assert [held.alarm.kind for held in alarms.holding(1.0)] == [AlarmKind.LOSS_ACCEPTED]


def test_events_raise_and_clear() -> None:
    alarms = Alarms()

    assert alarms.on_event(AlarmRaised("loss_rises", "2.5 -> 5.5 nats a byte"), 0.0)
    assert [held.alarm.text for held in alarms.holding(0.0)] == ["2.5 -> 5.5 nats a byte"]
    assert alarms.on_event(AlarmCleared("loss_rises"), 1.0)
    assert not alarms.holding(1.0)
    assert not alarms.on_event(TextUntold(1, 2, 3), 1.0)
