"""Emulated networks for real: namespaces, devices, the relay, the kernel's TCP; all torn down."""

import random
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco.simulations.emulate import kernel
from diloco.simulations.emulate.check import LinkFinding, check
from diloco.simulations.emulate.emulation import Emulation
from diloco.simulations.emulate.measure import End, measure_rate_bps, measure_rtt_s
from diloco.simulations.emulate.namespaces import NAMESPACES, OWNERS, inside
from diloco.simulations.emulate.network import WireState
from diloco.transport.shaping.link import Link
from tests.simulations.emulated_site import Transfer, make_emulation, needs_namespaces, star
from tests.waiting import said_by

pytestmark = [needs_namespaces, pytest.mark.timeout(120)]

LOSSY = star(
    up='bandwidth = "50Mbit/s", delay = "10ms", loss = 0.02',
    down='bandwidth = "20Mbit/s", delay = "15ms", jitter = "4ms"',
)


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulation]:
    with make_emulation(tmp_path_factory.mktemp("wan"), LOSSY) as emulation:
        yield emulation


def end(emulation: Emulation, node: str) -> End:
    return End(emulation.namespaces.path(node), emulation.network.address(node))


def missed(findings: list[LinkFinding]) -> set[tuple[str, str, str]]:
    return {(f.link, f.way, f.figure) for f in findings if not f.is_met}


@pytest.mark.slow
def test_every_link_does_what_was_asked_of_it(lossy: Emulation) -> None:
    findings = check(lossy)

    assert len(findings) == 2 * 5
    assert not missed(findings), [finding.cells() for finding in findings]


@pytest.mark.slow
def test_the_check_finds_exactly_what_is_not_as_asked(lossy: Emulation) -> None:
    first, second = lossy.network.wires
    up, down = first.profile.up, first.profile.down
    lossy.change(first, "up", WireState(replace(up, loss=0.03)))
    lossy.change(first, "down", WireState(replace(down, bandwidth_bps=18e6)))
    lossy.change(second, "down", WireState(replace(down, delay_s=0.020)))

    findings = check(lossy)

    for wire in (first, second):
        lossy.change(wire, "up", WireState(up))
        lossy.change(wire, "down", WireState(down))
    assert missed(findings) == {
        ("a", "up", "loss"),
        ("a", "down", "rate"),
        ("b", "both", "round trip"),
    }


def test_tcp_arrives_whole_although_packets_inside_super_packets_are_lost(
    lossy: Emulation,
) -> None:
    payload = random.Random(1).randbytes(4 * 2**20)
    before = lossy.carried()["a", "up"]

    with Transfer(lossy, "a", "core") as transfer:
        assert transfer.carry(payload)

    carried = lossy.carried()["a", "up"].since(before)
    assert carried.bytes > len(payload)
    # 2 % of about 2,900 packets, at four standard errors.
    assert 28 <= carried.lost <= 0.02 * carried.packets + 32


def test_an_outage_stops_a_link_and_its_end_brings_it_back(lossy: Emulation) -> None:
    wire = lossy.network.wires[0]
    rtt = {"count": 5, "spacing_s": 0.02, "wait_s": 0.5, "on_look": lambda: None}
    for way in ("up", "down"):
        lossy.change(wire, way, WireState(wire.direction(way)[2], is_up=False))

    cut = measure_rtt_s(end(lossy, "a"), end(lossy, "core"), **rtt)
    other = measure_rtt_s(end(lossy, "b"), end(lossy, "core"), **rtt)
    for way in ("up", "down"):
        lossy.change(wire, way, WireState(wire.direction(way)[2]))
    back = measure_rtt_s(end(lossy, "a"), end(lossy, "core"), **rtt)

    assert cut == float("inf")
    assert 0.025 <= other < float("inf") and 0.025 <= back < float("inf")


def test_islands_reach_each_other_through_both_their_links(lossy: Emulation) -> None:
    rtt_s = measure_rtt_s(
        end(lossy, "a"), end(lossy, "b"), count=5, spacing_s=0.02, wait_s=2, on_look=lambda: None
    )

    assert 0.050 <= rtt_s < float("inf")


def test_a_mesh_joins_each_pair_by_a_link_of_its_own(tmp_path: Path) -> None:
    text = """
topology = "mesh"
coordinator_at = "a"
link = "near"
[links.near]
source = "a test"
up = { bandwidth = "50Mbit/s", delay = "10ms" }
down = { bandwidth = "50Mbit/s", delay = "10ms" }
[links.far]
source = "a test"
up = { bandwidth = "50Mbit/s", delay = "15ms" }
down = { bandwidth = "50Mbit/s", delay = "15ms" }
[islands.a]
[islands.b]
[islands.c]
[paths.ocean]
between = ["b", "c"]
link = "far"
"""
    rtt = {"count": 5, "spacing_s": 0.02, "wait_s": 2.0, "on_look": lambda: None}

    with make_emulation(tmp_path, text) as emulation:
        near_s = measure_rtt_s(end(emulation, "a"), end(emulation, "b"), **rtt)
        before = emulation.carried()
        far_s = measure_rtt_s(end(emulation, "b"), end(emulation, "c"), **rtt)
        carried = {w: now.since(before[w]).packets for w, now in emulation.carried().items()}

    assert len(emulation.network.wires) == 3
    assert 0.020 <= near_s < float("inf") and 0.030 <= far_s < float("inf")
    # The far pair has its own link, and does not go by way of a, which would take 40 ms.
    assert carried["b/c", "up"] >= 5 and carried["b/c", "down"] >= 5
    assert all(carried[name, way] < 5 for name in ("a/b", "a/c") for way in ("up", "down"))


def test_tcp_is_as_the_file_says_in_every_node(tmp_path: Path) -> None:
    head = """
[tcp]
congestion_control = "reno"
max_buffer = "48MiB"
slow_start_after_idle = false
"""
    link = 'bandwidth = "10Mbit/s", delay = "1ms"'

    with make_emulation(tmp_path, star(up=link, down=link, head=head)) as emulation:
        with Transfer(emulation, "a", "core") as transfer:
            assert transfer.congestion_control == ("reno", "reno")
        for node in emulation.network.nodes:
            with inside(emulation.namespaces.path(node)):
                values = {
                    name: Path("/proc/sys/net/ipv4", name).read_text().split()
                    for name in ("tcp_wmem", "tcp_rmem", "tcp_slow_start_after_idle")
                }
            assert values["tcp_wmem"][2] == values["tcp_rmem"][2] == str(48 * 2**20)
            assert values["tcp_slow_start_after_idle"] == ["0"]


def test_an_unknown_congestion_control_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    link = 'bandwidth = "10Mbit/s", delay = "1ms"'
    text = star(up=link, down=link, head='[tcp]\ncongestion_control = "wishful"')
    emulation = make_emulation(tmp_path, text)

    with pytest.raises(ConfigError, match="wishful"), emulation:
        pass

    assert not [*NAMESPACES.glob(f"diloco-{emulation.namespaces.id}-*")]
    assert not [*OWNERS.glob(f"{emulation.namespaces.id}*")]


@pytest.mark.slow
def test_two_tiers_share_the_bottleneck_between_regions(tmp_path: Path) -> None:
    text = """
topology = "two-tier"
coordinator_at = "a"
[links.near]
source = "a test"
up = { bandwidth = "100Mbit/s", delay = "1ms" }
down = { bandwidth = "100Mbit/s", delay = "1ms" }
[links.far]
source = "a test"
up = { bandwidth = "8Mbit/s", delay = "10ms" }
down = { bandwidth = "8Mbit/s", delay = "10ms" }
[regions.eu]
link = "far"
[regions.us]
link = "far"
[islands.a]
region = "eu"
link = "near"
[islands.b]
region = "eu"
link = "near"
[islands.c]
region = "us"
link = "near"
"""

    with make_emulation(tmp_path, text) as emulation:
        rates = [
            measure_rate_bps(
                end(emulation, source),
                end(emulation, "a"),
                super_bytes=3200,
                buffer_bytes=8192,
                settle_s=0.3,
                seconds=1.0,
                on_look=lambda: None,
            )
            for source in ("b", "c")
        ]
        rtt_s = measure_rtt_s(
            end(emulation, "c"), end(emulation, "a"),
            count=5, spacing_s=0.02, wait_s=2, on_look=lambda: None,
        )  # fmt: skip
        carried = emulation.carried()

    assert rates[0] == pytest.approx(100e6, rel=0.05)
    assert rates[1] == pytest.approx(8e6, rel=0.05)
    assert rtt_s >= 0.044
    assert carried["us", "up"].bytes > 1e6 and carried["eu", "up"].bytes < 1e5


@pytest.mark.slow
def test_the_same_seed_loses_the_same_packets(tmp_path: Path) -> None:
    link = 'bandwidth = "50Mbit/s", delay = "1ms", loss = 0.05'
    lost = []
    for _ in range(2):
        with make_emulation(tmp_path, star(up=link, down=link, head="seed = 9")) as emulation:
            received = []
            with inside(emulation.namespaces.path("core")):
                receive = ["python3", "-c", RECEIVE, emulation.network.address("core")]
                process = subprocess.Popen(receive, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            emulation.popen("a", ["python3", "-c", SEND, emulation.network.address("core")]).wait()
            received = said_by(process, 30)[0].split()
            lost.append(sorted({*range(1000)} - {*map(int, received)}))

    assert lost[0] == lost[1]
    assert 20 <= len(lost[0]) <= 80  # 50 expected


RECEIVE = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind((sys.argv[1], 5000)); s.settimeout(2)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
print("ready", flush=True)
try:
    while True: print(s.recv(100).decode())
except TimeoutError: pass
"""
SEND = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for n in range(1000):
    s.sendto(str(n).encode(), (sys.argv[1], 5000)); time.sleep(0.0002)
"""


def test_netem_is_not_pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Emulation, "_has_netem", lambda self: False)
    link = 'bandwidth = "10Mbit/s", delay = "1ms"'

    with (
        pytest.raises(ConfigError, match="this kernel has none"),
        make_emulation(tmp_path, star(up=link, down=link, head='delay_by = "netem"')),
    ):
        pass


def test_netem_is_refused_under_jitter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Emulation, "_has_netem", lambda self: True)

    text = LOSSY.replace('"star"', '"star"\ndelay_by = "netem"', 1)

    with pytest.raises(ConfigError, match="reorder"), make_emulation(tmp_path, text):
        pass


def test_devices_for_netem_join_the_nodes_and_the_bucket_holds_their_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything but netem itself, which few kernels under test have: virtual Ethernet pairs."""
    whole = kernel.qdisc_lines

    def without_netem(*arguments: object, with_netem: bool, **more: object) -> list[str]:
        return whole(*arguments, with_netem=False, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Emulation, "_has_netem", lambda self: True)
    monkeypatch.setattr(kernel, "qdisc_lines", without_netem)
    link = 'bandwidth = "20Mbit/s", delay = "500ms"'

    with make_emulation(tmp_path, star(up=link, down=link)) as emulation:
        assert emulation.delay_by == "netem"
        rtt_s = measure_rtt_s(
            end(emulation, "a"), end(emulation, "b"),
            count=5, spacing_s=0.02, wait_s=2, on_look=lambda: None,
        )  # fmt: skip
        before = emulation.carried()["a", "up"]
        with Transfer(emulation, "a", "core") as transfer:
            began = time.monotonic()
            assert transfer.carry(bytes(2 * 2**20))
            took_s = time.monotonic() - began
        emulation.change(emulation.network.wires[0], "up", WireState(Link(10e6, 0.5)))
        carried = emulation.carried()["a", "up"].since(before)

    assert rtt_s < 0.5  # the way is open; what netem would hold back is not
    assert took_s >= 8 * 2 * 2**20 / 21e6
    assert carried.bytes >= 2 * 2**20
