"""The graph of an emulated network: nodes, wires, addresses, routes. Pure.

    star      island ── core                     mesh   island ── island, every pair
    two-tier  island ── region ── core

Every node has one address; a packet takes the path of least delay, over at most a few wires, and
each wire shapes it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from diloco.simulations.emulate.config import CORE, ChangeConfig, Wan
from diloco.transport.shaping.link import Link, LinkProfile

_MIN_QUEUE_S = 0.010


@dataclass(frozen=True, slots=True)
class Wire:
    """A link between two nodes; up is from `near` to `far`."""

    name: str
    near: str
    far: str
    profile: LinkProfile

    def direction(self, way: str) -> tuple[str, str, Link]:
        """Give source, target and link of "up" or "down"."""
        if way == "up":
            return self.near, self.far, self.profile.up
        return self.far, self.near, self.profile.down

    @property
    def rtt_s(self) -> float:
        """Round trip over the empty wire, half of the jitter of either way included."""
        up, down = self.profile.up, self.profile.down
        return up.delay_s + down.delay_s + (up.jitter_s + down.jitter_s) / 2


@dataclass(frozen=True)
class EmulatedNetwork:
    """Who is joined to whom.

    Attributes:
        islands: Their names, sorted.
        coordinator: Node of coordinator and syncer.
        wires: All links.
        queue_s: Longest wait in front of a full link.
    """

    islands: tuple[str, ...]
    coordinator: str
    wires: tuple[Wire, ...]
    queue_s: float

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Every node, sorted; each is a namespace."""
        ends = {end for wire in self.wires for end in (wire.near, wire.far)}
        return tuple(sorted({*self.islands, self.coordinator, *ends}))

    def address(self, node: str) -> str:
        """The node's own address, 10.77.0.1 and on."""
        high, low = divmod(self.nodes.index(node) + 1, 250)
        return f"10.77.{high}.{low + 1}"

    def routes(self, node: str) -> dict[str, Wire]:
        """The first wire on the way to every other node."""
        return {target: wires[0] for target, wires in self.paths(node).items()}

    def paths(self, node: str) -> dict[str, tuple[Wire, ...]]:
        """The wires to every other node: least delay, then fewest wires."""
        found: dict[str, tuple[Wire, ...]] = {}
        order = itertools.count()
        queue: list[tuple[float, int, int, str, tuple[Wire, ...]]] = []
        heapq.heappush(queue, (0.0, 0, next(order), node, ()))
        while queue:
            delay_s, hops, _, at, wires = heapq.heappop(queue)
            if at in found:
                continue
            found[at] = wires
            for wire, way in self._neighbours[at]:
                _, target, link = wire.direction(way)
                if target not in found:
                    entry = (delay_s + link.delay_s, hops + 1, next(order), target, (*wires, wire))
                    heapq.heappush(queue, entry)
        del found[node]
        return found

    @cached_property
    def _neighbours(self) -> dict[str, list[tuple[Wire, str]]]:
        """Wires that leave each node, and which way."""
        wires: dict[str, list[tuple[Wire, str]]] = {node: [] for node in self.nodes}
        for wire in self.wires:
            wires[wire.near].append((wire, "up"))
            wires[wire.far].append((wire, "down"))
        return wires


def build_network(wan: Wan) -> EmulatedNetwork:
    """Lay out the nodes and wires that a file asks for."""
    config, profiles = wan.config, wan.profiles
    islands = tuple(sorted(config.islands))
    if config.topology == "mesh":
        own = {frozenset(path.between): path for path in config.paths.values()}
        wires = []
        for pair in itertools.combinations(islands, 2):
            path = own.get(frozenset(pair))
            near, far = path.between if path else pair
            profile = profiles[path.link if path else config.link]
            wires.append(Wire(f"{near}/{far}", near, far, profile))
    else:
        wires = [
            Wire(name, name, config.islands[name].region or CORE, profiles[site.link])
            for name, site in sorted(config.islands.items())
        ]
        wires += [
            Wire(name, name, CORE, profiles[region.link])
            for name, region in sorted(config.regions.items())
        ]
    network = EmulatedNetwork(islands, config.coordinator_at, tuple(wires), 0.0)
    ends = {*islands, config.coordinator_at}
    longest_s = max(
        (
            sum(wire.rtt_s for wire in path)
            for node in ends
            for target, path in network.paths(node).items()
            if target in ends
        ),
        default=0.0,
    )
    queue_s = config.queue.seconds if config.queue else max(longest_s, _MIN_QUEUE_S)
    return replace(network, queue_s=queue_s)


@dataclass(frozen=True, slots=True)
class WireState:
    """One direction at one moment."""

    link: Link
    is_up: bool = True

    def as_dict(self) -> dict[str, float | bool]:
        """Give it as JSON values."""
        return {**asdict(self.link), "is_up": self.is_up}


def link_state(wire: Wire, way: str, changes: Iterable[ChangeConfig], now_s: float) -> WireState:
    """Say what one direction is at `now_s`: its profile, all changes that last laid over it."""
    state = WireState(wire.direction(way)[2])
    for change in changes:
        is_meant = change.link == wire.name and change.direction in ("both", way)
        if is_meant and change.at.seconds <= now_s < change.until_s:
            state = WireState(change.applied_to(state.link), state.is_up and not change.outage)
    return state


def change_times(changes: Iterable[ChangeConfig]) -> list[float]:
    """Seconds at which something changes, in order, each once."""
    times = {time for change in changes for time in (change.at.seconds, change.until_s)}
    return sorted(time for time in times if time < float("inf"))
