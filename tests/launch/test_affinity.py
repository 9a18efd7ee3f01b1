"""Which CPUs are next to a device, as Linux says it in files."""

import os
from pathlib import Path

import pytest
import torch

from diloco.launch.rank.affinity import bind_next_to, cpus_next_to

ADDRESS = "0000:3b:00.0"


def system(place: Path, node: str, cpus: str) -> Path:
    device = place / "bus/pci/devices" / ADDRESS
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    of_node = place / "devices/system/node/node1"
    of_node.mkdir(parents=True)
    (of_node / "cpulist").write_text(f"{cpus}\n")
    return place


@pytest.mark.parametrize(
    ("node", "cpus", "found"),
    [
        ("1", "8-11,24", {8, 9, 10, 11, 24}),
        ("-1", "8-11", set()),
        ("7", "8-11", set()),
        ("1", "", set()),
        ("1", "eight", set()),
    ],
    ids=["two-parts", "one-node", "no-such-node", "memory-alone", "unreadable"],
)
def test_cpus_are_those_of_the_node_of_the_device(tmp_path, node, cpus, found):
    assert cpus_next_to(ADDRESS, system(tmp_path, node, cpus)) == found
    assert cpus_next_to("0000:ff:00.0", tmp_path) == set()


def test_a_rank_on_a_processor_is_bound_to_nothing():
    before = os.sched_getaffinity(0)

    bind_next_to(torch.device("cpu"))

    assert os.sched_getaffinity(0) == before
