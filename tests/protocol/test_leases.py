"""Transitions of a lease one by one, and the time that an island may be silent."""

from __future__ import annotations

import pytest

from diloco.protocol.run.leases import TRANSITIONS, Lease, LeaseEvent, Leases
from diloco.protocol.run.members import Member

ACTIVE, LAPSED, DRAINING, LEFT = Lease.ACTIVE, Lease.LAPSED, Lease.DRAINING, Lease.LEFT
ABSENT, KICKED = Lease.ABSENT, Lease.KICKED
#: What becomes of absent, active, lapsed, draining, left and kicked islands; None: nothing.
EXPECTED = {
    LeaseEvent.JOINED: (ACTIVE, ACTIVE, ACTIVE, DRAINING, ACTIVE, None),
    LeaseEvent.REPORTED: (ACTIVE, ACTIVE, ACTIVE, DRAINING, LEFT, None),
    LeaseEvent.EXPIRED: (None, LAPSED, None, LEFT, None, None),
    LeaseEvent.FAILED: (None, LAPSED, LAPSED, DRAINING, LEFT, None),
    LeaseEvent.LEFT: (None, LEFT, LEFT, LEFT, LEFT, None),
    LeaseEvent.DRAINED: (None, DRAINING, LEFT, DRAINING, LEFT, None),
    LeaseEvent.KICKED: (KICKED, KICKED, KICKED, KICKED, KICKED, KICKED),
    LeaseEvent.READMITTED: (None, None, None, None, None, ABSENT),
}


@pytest.mark.parametrize("event", LeaseEvent)
@pytest.mark.parametrize("before", Lease)
def test_every_event_does_to_every_lease_what_the_table_says(
    before: Lease, event: LeaseEvent
) -> None:
    after = EXPECTED[event][list(Lease).index(before)]

    assert TRANSITIONS.get((before, event)) == after
    assert Member(0, {"a": 1}, lease=before).after(event, 0).lease is (after or before)


def test_a_new_timeline_begins_with_nobody() -> None:
    kicked = Member(0, {"a": 1}).kicked("why", 0)

    assert kicked.lease_in(0) is KICKED
    assert kicked.lease_in(1) is ABSENT
    assert kicked.started("b", 2, 1).lease is ACTIVE


def test_a_lease_ends_a_term_after_the_last_word() -> None:
    leases = Leases(10.0)
    leases.restarted(["a", "b"], 100.0)
    leases.renewed("a", 105.0)

    assert leases.expired(["a", "b"], 109.9) == ()
    assert leases.expired(["a", "b"], 110.0) == ("b",)
    assert (leases.left_s("a", 110.0), leases.left_s("b", 112.0)) == (5.0, 0.0)
    assert leases.expired(["a", "b"], 115.0) == ("a", "b")
    assert leases.expired(["never heard of"], 1e9) == ()


def test_a_new_term_counts_at_once() -> None:
    leases = Leases(10.0)
    leases.renewed("a", 0.0)
    leases.term_s = 3.0

    assert leases.expired(["a"], 3.0) == ("a",)


def test_what_the_observer_slept_through_is_nobodys_silence() -> None:
    leases = Leases(10.0)
    leases.looked(0.0)
    leases.renewed("a", 0.0)
    leases.renewed("b", 0.5)

    leases.looked(60.0)  # frozen for a minute; the reports wait in its sockets

    assert leases.expired(["a", "b"], 60.0) == ()
    leases.renewed("a", 60.1)
    assert leases.expired(["a", "b"], 70.0) == ("b",), "which has said nothing since"


@pytest.mark.parametrize(("term_s", "stall_s"), [(3.0, 4.4), (3.0, 60.0), (10.0, 9.0), (2.0, 1.9)])
def test_a_stall_of_the_observer_ends_no_lease_whatever_the_term(
    term_s: float, stall_s: float
) -> None:
    leases = Leases(term_s)
    leases.looked(100.0)
    leases.renewed("a", 99.0)  # it reports once a second: its next word waits in the socket

    leases.looked(100.0 + stall_s)

    assert leases.expired(["a"], 100.0 + stall_s) == ()


def test_who_is_gone_loses_its_lease_though_every_look_is_late() -> None:
    leases, now = Leases(3.0), 0.0
    leases.looked(now)
    leases.renewed("a", now)

    for expected in ((), (), (), ("a",)):
        now += 60.0
        leases.looked(now)
        assert leases.expired(["a"], now) == expected


def test_who_comes_first_where_nobody_was_does_not_find_the_others_lost() -> None:
    leases = Leases(10.0)
    leases.restarted(["a", "b", "c"], 0.0)

    leases.renewed("a", 500.0)  # people start one island after the other

    assert leases.expired(["a", "b", "c"], 509.0) == ()
    leases.renewed("a", 505.0)
    assert leases.expired(["a", "b", "c"], 510.0) == ("b", "c")
