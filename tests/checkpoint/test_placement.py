"""Placement of copies and probability of recovery, against the definition by enumeration."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.checkpoint.placement import hosts_of_copies, ranks_of_copies, recovery_probability

PLACEMENTS = st.integers(1, 10).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@given(PLACEMENTS)
def test_every_state_lies_on_its_own_host_and_others_and_every_host_keeps_equally_many(
    placement: tuple[int, int],
) -> None:
    num_hosts, copies = placement

    kept = hosts_of_copies(num_hosts, copies)

    assert [hosts[0] for hosts in kept] == list(range(num_hosts))
    assert all(len(set(hosts)) == copies for hosts in kept)
    load = Counter(host for hosts in kept for host in hosts)
    assert load == dict.fromkeys(range(num_hosts), copies)


@given(PLACEMENTS)
def test_groups_where_copies_divide_hosts_else_one_ring_besides_groups(
    placement: tuple[int, int],
) -> None:
    num_hosts, copies = placement

    sets = Counter(frozenset(hosts) for hosts in hosts_of_copies(num_hosts, copies))

    groups = [members for members, count in sets.items() if count == copies]
    in_ring = sum(count for count in sets.values() if count == 1) if copies > 1 else 0
    if num_hosts % copies == 0:
        assert len(groups) * copies == num_hosts
    elif copies > 1:
        assert in_ring == copies + num_hosts % copies
        assert len(groups) == num_hosts // copies - 1


@given(PLACEMENTS, st.data())
def test_probability_is_that_of_counting_every_loss(
    placement: tuple[int, int], data: st.DataObject
) -> None:
    num_hosts, copies = placement
    num_lost = data.draw(st.integers(0, num_hosts))

    kept = [set(hosts) for hosts in hosts_of_copies(num_hosts, copies)]
    losses = [set(lost) for lost in combinations(range(num_hosts), num_lost)]
    harmless = sum(not any(hosts <= lost for hosts in kept) for lost in losses)

    assert recovery_probability(num_hosts, copies, num_lost) == Fraction(harmless, len(losses))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 1600))
def test_groups_are_never_below_the_bound_of_the_paper(
    num_groups: int, copies: int, num_lost: int
) -> None:
    num_hosts = num_groups * copies
    num_lost = min(num_lost, num_hosts)
    found = recovery_probability(num_hosts, copies, num_lost)

    if num_lost < copies:
        assert found == 1
    else:
        costly = num_groups * comb(num_hosts - copies, num_lost - copies)
        assert found >= max(Fraction(0), 1 - Fraction(costly, comb(num_hosts, num_lost)))


@pytest.mark.parametrize(
    ("num_hosts", "copies", "num_lost", "expected"),
    [
        pytest.param(16, 2, 2, Fraction(14, 15), id="paper-93.3-percent"),
        pytest.param(16, 2, 1, Fraction(1), id="fewer-than-copies"),
        pytest.param(1, 1, 1, Fraction(0), id="the-only-host"),
        pytest.param(5, 2, 2, Fraction(6, 10), id="a-pair-and-a-ring-of-three"),
        pytest.param(3, 2, 2, Fraction(0), id="a-ring-of-three"),
    ],
)
def test_known_probabilities(
    num_hosts: int, copies: int, num_lost: int, expected: Fraction
) -> None:
    assert recovery_probability(num_hosts, copies, num_lost) == expected


def test_a_rank_is_kept_by_its_counterparts_on_other_hosts() -> None:
    assert ranks_of_copies(4, 2, 2) == ((0, 2), (1, 3), (2, 0), (3, 1))
    assert ranks_of_copies(3, 3, 2) == ((0, 1), (1, 2), (2, 0))
    assert ranks_of_copies(2, 1, 1) == ((0,), (1,))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        pytest.param(lambda: hosts_of_copies(2, 3), "3 copies on 2 hosts", id="copies"),
        pytest.param(lambda: recovery_probability(2, 0, 1), "0 copies on 2 hosts", id="none"),
        pytest.param(lambda: recovery_probability(2, 1, 3), "3 lost hosts", id="lost"),
        pytest.param(lambda: ranks_of_copies(3, 2, 1), "3 ranks cannot be spread", id="ranks"),
    ],
)
def test_numbers_out_of_range_are_refused(call: object, text: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=text):
        call()
