"""Input of `ip` and `tc`, and their output: text only. Nothing here runs them.

The rate of a direction is a token bucket at its source. What holds packets back comes before it
(netem) or behind it (the relay, which reads the device).

See tc-tbf(8), tc-netem(8).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from diloco.simulations.emulate.network import EmulatedNetwork, Wire, WireState
from diloco.transport.shaping.link import Link

MTU_BYTES = 1500
#: What passes at once after a pause; a millisecond's worth keeps rates exact and bursts short.
_BURST_S = 0.001
_MIN_BURST_BYTES, _MAX_BURST_BYTES = 2 * 1600, 128 * 1024
_MAX_SUPER_PACKET_BYTES = 65536
_MIN_QUEUE_PACKETS = 10
#: Frames between the bucket and the relay, should it be late.
_DEVICE_QUEUE = 4096
#: netem's limit in packets: all that may be on the way, it shall never be the one to drop.
_NETEM_PACKETS = 1_000_000


def burst_bytes(link: Link) -> int:
    """Size of the token bucket."""
    wanted = int(link.bandwidth_bps * _BURST_S / 8)
    return min(max(wanted, _MIN_BURST_BYTES), _MAX_BURST_BYTES)


def super_packet_bytes(link: Link) -> int:
    """Longest super-packet: one that the bucket lets through whole."""
    return min(burst_bytes(link), _MAX_SUPER_PACKET_BYTES)


def device(index: int) -> str:
    """Name of a wire's device, the same at both ends."""
    return f"wan{index}"


def veth_lines(network: EmulatedNetwork, name_of: dict[str, str]) -> list[str]:
    """Make every wire of pairs of virtual Ethernet devices, for netem.

    Both ends have one hardware address and no ARP, so that a route needs no gateway.
    """
    return [
        f"link add name {device(i)} address {mac} netns {name_of[wire.near]} type veth "
        f"peer name {device(i)} address {mac} netns {name_of[wire.far]}"
        for i, wire in enumerate(network.wires)
        for mac in [f"02:00:00:00:{i >> 8:02x}:{i & 255:02x}"]
    ]


def interface(network: EmulatedNetwork, node: str) -> str:
    """Name the device that has a node's address: its first wire's, the loopback without any.

    Programs that get an interface and take its first address (gloo, NCCL) get that one.
    """
    indices = (i for i, wire in enumerate(network.wires) if node in (wire.near, wire.far))
    return next((device(i) for i in indices), "lo")


def node_lines(network: EmulatedNetwork, node: str, congestion_control: str) -> Iterator[str]:
    """Bring a node's devices up, give it its address and its routes."""
    yield "link set dev lo up"
    yield f"address add {network.address(node)}/32 dev {interface(network, node)}"
    for index, wire in enumerate(network.wires):
        if node in (wire.near, wire.far):
            link = wire.profile.up if node == wire.near else wire.profile.down
            yield (
                f"link set dev {device(index)} mtu {MTU_BYTES} txqueuelen {_DEVICE_QUEUE} "
                f"gso_max_size {super_packet_bytes(link)} arp off addrgenmode none up"
            )
    suffix = f" congctl {congestion_control}" if congestion_control else ""
    for target, wire in sorted(network.routes(node).items()):
        yield (
            f"route add {network.address(target)}/32 dev {device(network.wires.index(wire))} "
            f"src {network.address(node)}{suffix}"
        )


def qdisc_lines(
    network: EmulatedNetwork, wire: Wire, state: WireState, *, with_netem: bool, verb: str = "add"
) -> list[str]:
    """Shape one direction at its source.

    Args:
        network: Says how long packets may wait.
        wire: The wire.
        state: What the direction is to be.
        with_netem: Whether the kernel holds packets back, too; else the relay does.
        verb: "add" the first time, "change" later.
    """
    link, name = state.link, device(network.wires.index(wire))
    packets = max(link.bandwidth_bps * network.queue_s / 8 / MTU_BYTES, _MIN_QUEUE_PACKETS)
    limit = max(int(packets * MTU_BYTES), burst_bytes(link))
    bucket = f"tbf rate {link.bandwidth_bps:.0f}bit burst {burst_bytes(link)} limit {limit}"
    if not with_netem:
        return [f"qdisc {verb} dev {name} root handle 10: {bucket}"]
    loss = 100.0 * link.loss if state.is_up else 100.0
    return [
        f"qdisc {verb} dev {name} root handle 1: netem limit {_NETEM_PACKETS} "
        f"delay {link.delay_s * 1e6:.0f}us loss {loss:.6f}%",
        f"qdisc {verb} dev {name} parent 1:1 handle 10: {bucket}",
    ]


def parse_counters(text: str, name: str) -> tuple[int, int, int, int]:
    """Read `tc -s -j qdisc show` of a device.

    Returns:
        Of the bucket bytes, packets of the wire and those that it dropped; packets netem lost.
    """
    rows = {row["kind"]: row for row in json.loads(text) if row.get("dev") == name}
    bucket, lost = rows["tbf"], rows["netem"]["drops"] if "netem" in rows else 0
    return bucket["bytes"], bucket["packets"], bucket["drops"], lost
