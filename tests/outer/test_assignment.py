"""Which syncer gets which fragments of a plan."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import ConfigError
from diloco.outer.assignment import assign_fragments, deal_fragments
from diloco.outer.fragments import Plan, TensorSpec, make_plan


def plan_of(numels: list[int]) -> Plan:
    specs = [TensorSpec(f"t{i}", (numel,)) for i, numel in enumerate(numels)]
    groups = [[spec.name] for spec in specs]
    return make_plan(specs, num_fragments=len(numels), pattern="explicit", explicit=groups)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6).flatmap(
        lambda blocks: st.tuples(st.just(blocks), st.integers(1, min(3, len(blocks))))
    )
)
def test_every_fragment_has_one_syncer_and_none_has_4_3_of_the_best(
    drawn: tuple[list[int], int],
) -> None:
    blocks, num_syncers = drawn
    plan = plan_of([128 * count for count in blocks])
    sizes = [fragment.padded_numel for fragment in plan.fragments]

    assigned = assign_fragments(plan, (1.0,) * num_syncers)

    assert len(assigned) == num_syncers and all(assigned)
    assert sorted(itertools.chain(*assigned)) == list(range(len(sizes)))
    assert assign_fragments(plan, (1.0,) * num_syncers) == assigned
    best = min(
        max(sum(s for s, at in zip(sizes, way, strict=True) if at == n) for n in range(num_syncers))
        for way in itertools.product(range(num_syncers), repeat=len(sizes))
    )
    assert max(sum(sizes[p] for p in own) for own in assigned) * 3 <= best * 4


@pytest.mark.parametrize("num_syncers", [0, 3])
def test_a_syncer_without_a_fragment_is_refused(num_syncers: int) -> None:
    with pytest.raises(ConfigError, match=r"\d syncers .* outside \[1, 2\]"):
        assign_fragments(plan_of([128, 256]), (1.0,) * num_syncers)


@given(
    st.lists(st.integers(1, 40), min_size=3, max_size=12),
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=3),
)
def test_every_syncer_has_a_fragment_whatever_its_share(
    blocks: list[int], shares: list[float]
) -> None:
    assigned = assign_fragments(plan_of([128 * count for count in blocks]), shares)

    assert all(assigned)
    assert sorted(itertools.chain(*assigned)) == list(range(len(blocks)))


def test_fragments_are_dealt_in_proportion_to_the_shares() -> None:
    eight = plan_of([128] * 8)

    assert [len(own) for own in assign_fragments(eight, (1.0, 3.0))] == [2, 6]
    assert [len(own) for own in assign_fragments(eight, (1.0, 1.0, 2.0))] == [2, 2, 4]


def test_what_moves_is_dealt_by_size_and_share_and_everything_else_stays() -> None:
    plan = plan_of([128 * blocks for blocks in (8, 2, 4, 1, 1, 3)])
    assigned = ((0, 1, 3), (2,), (4, 5))

    assert deal_fragments(plan, (1.0, 1.0, 1.0), assigned, {0, 1, 3}, {1, 2}) == {0: 1, 1: 2, 3: 2}
    assert deal_fragments(plan, (1.0, 1.0, 4.0), assigned, {0, 1, 3}, {1, 2}) == {0: 2, 1: 2, 3: 2}
    assert deal_fragments(plan, (1.0, 1.0, 1.0), assigned, {5, 2}, {0}) == {2: 0, 5: 0}
