"""How often a line damages what travels, and when that is too much; on a virtual clock."""

from __future__ import annotations

import asyncio

from diloco.island.exchange.damage import USUAL, WINDOW_S, LineDamage
from diloco.telemetry.events import AlarmRaised, DamagedOnTheWay, Event
from diloco.transport.calls.loopback import run_virtual
from diloco.transport.errors import ChecksumMismatch


def found_at(*times: float) -> tuple[LineDamage, list[Event]]:
    events: list[Event] = []
    damage = LineDamage("east", events.append)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for time in times:
            await asyncio.sleep(time - loop.time())
            damage.found(ChecksumMismatch("a chunk", peer="there:1", method="fragment.submit"))

    run_virtual(run())
    return damage, events


def test_a_damaged_message_now_and_then_is_counted_and_no_alarm() -> None:
    damage, events = found_at(*(n * WINDOW_S for n in range(20)))

    assert damage.count == 20 and not damage.is_too_much
    told = [event for event in events if isinstance(event, DamagedOnTheWay)]
    assert [event.damaged for event in told] == list(range(1, 21))
    assert len(told) == len(events), "no alarm"
    assert {(event.peer, event.method, event.recent) for event in told} == {
        ("there:1", "fragment.submit", 1)
    }


def test_several_within_minutes_are_too_much_and_events_are_few() -> None:
    damage, events = found_at(*(0.001 * n for n in range(1000)), 5.0)

    assert damage.is_too_much and damage.count == 1001
    told = [event for event in events if isinstance(event, DamagedOnTheWay)]
    assert [event.damaged for event in told] == [1, USUAL + 1, 1001]
    assert [event.is_too_much for event in told] == [False, True, True]
    first, alarm = [event for event in events if isinstance(event, AlarmRaised)]
    assert first.text.startswith(f"{USUAL + 1} messages"), "a burst is told at once"
    assert (alarm.alarm, alarm.about) == ("damaged_on_the_way", "east")
    assert "1001 messages between island 'east' and its syncer" in alarm.text
