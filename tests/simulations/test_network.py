"""The graph: who reaches whom over which links, and what a link is at which moment."""

from pathlib import Path

import pytest

from diloco.simulations.emulate import kernel
from diloco.simulations.emulate.config import ChangeConfig, load_wan
from diloco.simulations.emulate.network import (
    EmulatedNetwork,
    WireState,
    build_network,
    change_times,
    link_state,
)
from diloco.transport.shaping.link import Link
from tests.simulations.test_wan_file import LINK, MESH, STAR, write

TWO_TIER = f"""
topology = "two-tier"
{LINK}
[links.far]
source = "a test"
up = {{ bandwidth = "1Mbit/s", delay = "100ms", jitter = "10ms" }}
down = {{ bandwidth = "2Mbit/s", delay = "50ms" }}
[regions.eu]
link = "far"
[regions.us]
link = "far"
[islands.a]
region = "eu"
link = "thin"
[islands.b]
region = "eu"
link = "thin"
[islands.c]
region = "us"
link = "thin"
"""


def network_of(directory: Path, text: str) -> EmulatedNetwork:
    return build_network(load_wan(write(directory, text)))


def names(network: EmulatedNetwork, source: str, target: str) -> list[str]:
    return [wire.name for wire in network.paths(source)[target]]


def test_a_star_joins_all_through_the_core(tmp_path: Path) -> None:
    network = network_of(tmp_path, STAR)

    assert network.nodes == ("a", "b", "core")
    assert network.coordinator == "core"
    assert names(network, "a", "b") == ["a", "b"]
    assert len({network.address(node) for node in network.nodes}) == 3
    assert network.queue_s == pytest.approx(0.12)  # the longest round trip, a to b


def test_two_tiers_share_the_way_out_of_a_region(tmp_path: Path) -> None:
    network = network_of(tmp_path, TWO_TIER)

    assert names(network, "a", "b") == ["a", "b"]
    assert names(network, "a", "c") == ["a", "eu", "us", "c"]
    assert names(network, "core", "c") == ["us", "c"]
    assert network.queue_s == pytest.approx(2 * 0.06 + 2 * (0.15 + 0.005))


def test_a_mesh_takes_the_quickest_way_even_around_a_slow_pair(tmp_path: Path) -> None:
    slow = '\n[links.slow]\nsource = "t"\n' + "\n".join(
        f'{way} = {{ bandwidth = "1Mbit/s", delay = "900ms" }}' for way in ("up", "down")
    )
    paths = '\n[paths.ab]\nbetween = ["b", "a"]\nlink = "slow"'
    network = network_of(tmp_path, MESH + "[islands.c]" + slow + paths)

    assert [wire.name for wire in network.wires] == ["b/a", "a/c", "b/c"]
    assert names(network, "a", "b") == ["a/c", "b/c"]
    assert network.wires[0].direction("up")[:2] == ("b", "a")


def test_many_nodes_have_addresses_of_their_own(tmp_path: Path) -> None:
    islands = "".join(f'[islands.i{n}]\nlink = "thin"\n' for n in range(300))
    network = network_of(tmp_path, STAR + islands)

    addresses = [network.address(node) for node in network.nodes]
    assert len({*addresses}) == 303
    assert all(0 < int(address.rpartition(".")[2]) < 255 for address in addresses)


def test_changes_lay_over_one_another_and_end(tmp_path: Path) -> None:
    wire = network_of(tmp_path, STAR).wires[0]
    changes = [
        ChangeConfig(at="10s", lasts="20s", link="a", bandwidth="1Mbit/s", delay="1s"),
        ChangeConfig(at="20s", lasts="5s", link="a", direction="up", outage=True, loss=0.5),
        ChangeConfig(at="20s", link="b", jitter="1s"),
    ]
    thin = wire.profile.up
    slow = Link(1e6, 1.0)

    def seen(way: str, now_s: float) -> WireState:
        return link_state(wire, way, changes, now_s)

    assert change_times(changes) == [10.0, 20.0, 25.0, 30.0]
    assert seen("up", 9.9) == WireState(thin)
    assert seen("down", 10.0) == WireState(slow)
    assert seen("up", 20.0) == WireState(Link(1e6, 1.0, 0.0, 0.5), is_up=False)
    assert seen("down", 20.0) == WireState(slow)
    assert seen("up", 25.0) == WireState(slow)
    assert seen("up", 30.0) == WireState(thin)


def test_netem_is_told_delay_loss_and_outage_and_the_bucket_follows_it(tmp_path: Path) -> None:
    network = network_of(tmp_path, STAR)
    wire = network.wires[1]
    state = WireState(Link(100e6, 0.03, loss=0.001))

    lines = kernel.qdisc_lines(network, wire, state, with_netem=True)
    cut = kernel.qdisc_lines(
        network, wire, WireState(state.link, is_up=False), with_netem=True, verb="change"
    )

    assert lines == [
        "qdisc add dev wan1 root handle 1: netem limit 1000000 delay 30000us loss 0.100000%",
        "qdisc add dev wan1 parent 1:1 handle 10: tbf rate 100000000bit burst 12500 limit 1500000",
    ]
    assert cut[0].startswith("qdisc change dev wan1 root handle 1: netem")
    assert cut[0].endswith("loss 100.000000%")


@pytest.mark.parametrize(
    ("bandwidth_bps", "burst", "super_packet"),
    [(1e5, 3200, 3200), (1e8, 12500, 12500), (1e9, 125000, 65536), (1e11, 131072, 65536)],
)
def test_bursts_are_a_millisecond_and_hold_a_super_packet(
    bandwidth_bps: float, burst: int, super_packet: int
) -> None:
    link = Link(bandwidth_bps, 0.0)

    assert kernel.burst_bytes(link) == burst
    assert kernel.super_packet_bytes(link) == super_packet
