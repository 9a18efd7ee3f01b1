"""An island's link divided among its carriers."""

import pytest

from diloco.forecast.build import carrier_link
from diloco.transport.shaping.link import Link, LinkProfile

ISLAND = LinkProfile("path", Link(8e6, 0.03, 0.002, 0.01), Link(2e6, 0.05), source="test")


@pytest.mark.parametrize(
    ("carriers", "up_bps", "down_bps"),
    [([0, 0, 0], 8e6, 2e6), ([0, 1, 0, 1], 4e6, 1e6), ([3, 1, 2, 0], 2e6, 0.5e6)],
    ids=["one", "two", "four"],
)
def test_carriers_divide_the_bandwidth_and_keep_the_delay(
    carriers: list[int], up_bps: float, down_bps: float
) -> None:
    part = carrier_link(ISLAND, carriers)

    assert part.up == Link(up_bps, 0.03, 0.002, 0.01)
    assert part.down == Link(down_bps, 0.05)
    assert (part.name, part.source) == ("path", "test")
