"""Which rank of an island carries which lane."""

from __future__ import annotations

from collections import Counter

import pytest

from diloco.island.lanes.carriers import carriers_of, hosts_first
from diloco.outer.fragments import TensorSpec, make_plan


def test_ranks_are_dealt_to_host_by_host() -> None:
    assert hosts_first(["a", "a", "a", "b", "b", "c"]) == (0, 3, 5, 1, 4, 2)
    assert hosts_first(["a"] * 3) == (0, 1, 2)


def test_of_so_many_hosts_the_first_ones_carry() -> None:
    hosts = ["a", "b", "a", "c", "b", "c"]
    assert hosts_first(hosts, 1) == (0, 2)
    assert hosts_first(hosts, 2) == (0, 1, 2, 4)
    assert hosts_first(hosts, 9) == hosts_first(hosts) == (0, 1, 3, 2, 4, 5)


@pytest.mark.parametrize("num_hosts", [2, 8, 64])
@pytest.mark.parametrize(("num_fragments", "num_lanes"), [(24, 16), (2, 16), (80, 16), (3, 7)])
def test_hosts_have_as_many_lanes_and_each_rank_of_them_too(
    num_hosts: int, num_fragments: int, num_lanes: int
) -> None:
    hosts = [f"host-{rank // 8}" for rank in range(8 * num_hosts)]
    specs = [TensorSpec(f"layer.{n}", (1 << 16,)) for n in range(num_fragments)]
    plan = make_plan(specs, num_fragments=num_fragments, num_lanes=num_lanes)

    carriers = carriers_of(plan.fragments, hosts_first(hosts))

    assert len(carriers) == sum(len(fragment.lanes) for fragment in plan.fragments)
    of_hosts = Counter(dict.fromkeys(hosts, 0)) + Counter(hosts[r] for r in carriers.values())
    counts = [of_hosts[host] for host in set(hosts)]
    assert max(counts) - min(counts) <= 1
    of_ranks = [Counter(carriers.values())[rank] for rank in range(len(hosts))]
    assert max(of_ranks) - min(of_ranks) <= 1
