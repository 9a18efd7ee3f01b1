"""An emulated network in being: namespaces, devices, buckets, relays. Everything goes on exit."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError
from diloco.simulations.emulate import kernel
from diloco.simulations.emulate.config import Wan
from diloco.simulations.emulate.line import LATE_BOUNDS_S, LineSettings, late_quantile_s
from diloco.simulations.emulate.namespaces import (
    OWNERS,
    Namespaces,
    check_privileges,
    inside,
    run_tool,
)
from diloco.simulations.emulate.network import EmulatedNetwork, Wire, WireState, build_network
from diloco.transport.units import format_bytes, format_duration

WAYS = ("up", "down")
_ANSWER_S = 30.0
_END_S = 5.0

Message = dict[str, Any]  # JSON values


@dataclass(frozen=True, slots=True)
class Carried:
    """What one direction of a wire has done so far; packets are those of the wire.

    Attributes:
        bytes: IP packets that left the source, retransmissions and lost ones included.
        packets: Their number.
        queue_dropped: Packets that found the queue in front of the link full.
        lost: Packets that the link lost, in outages too.
        ack_bytes: Of `bytes`, in TCP packets that only acknowledge; None with netem.
        late: Frames by how much later than due the relay delivered them; none with netem.
    """

    bytes: int
    packets: int
    queue_dropped: int
    lost: int
    ack_bytes: int | None = None
    late: tuple[int, ...] = (0,) * len(LATE_BOUNDS_S)

    def since(self, before: Carried) -> Carried:
        """Give what was carried after `before` was read."""
        return Carried(
            self.bytes - before.bytes,
            self.packets - before.packets,
            self.queue_dropped - before.queue_dropped,
            self.lost - before.lost,
            None if self.ack_bytes is None else self.ack_bytes - (before.ack_bytes or 0),
            tuple(now - then for now, then in zip(self.late, before.late, strict=True)),
        )

    def as_text(self) -> str:
        """Say it in a line."""
        p99_s = late_quantile_s(self.late, 0.99)
        return (
            f"{format_bytes(self.bytes)} in {self.packets:,} packets; {self.lost:,} lost, "
            f"{self.queue_dropped:,} dropped by a full queue; 99 % at most "
            f"{format_duration(p99_s)} late"
        )

    def as_dict(self) -> Message:
        """Give it as JSON values, lateness as upper bounds of its median and 99th percentile."""
        return {
            "bytes": self.bytes,
            "packets": self.packets,
            "queue_dropped": self.queue_dropped,
            "lost": self.lost,
            "ack_bytes": self.ack_bytes,
            "late_p50_s": late_quantile_s(self.late, 0.5),
            "late_p99_s": late_quantile_s(self.late, 0.99),
        }


@dataclass(slots=True)
class Emulation:
    """A network in use; a context manager.

    Attributes:
        wan: What was asked for.
        network: Its graph.
        namespaces: Where each node is.
        delay_by: "netem" or "relay".
        is_realtime: Whether the relay has priority over everything else; True with netem.
        states: What every direction is now, by wire name and "up" or "down".
        ended: Processes that had to be ended at the close.
    """

    wan: Wan
    network: EmulatedNetwork = field(init=False)
    namespaces: Namespaces = field(init=False)
    delay_by: str = ""
    is_realtime: bool = True
    states: dict[tuple[str, str], WireState] = field(init=False)
    ended: list[int] = field(default_factory=list)
    _relays: list[_RelayProcess] = field(default_factory=list)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        """Lay out the network; nothing is made yet."""
        self.network = build_network(self.wan)
        self.namespaces = Namespaces(self.network.nodes)
        self.states = {
            (wire.name, way): WireState(wire.direction(way)[2])
            for wire in self.network.wires
            for way in WAYS
        }

    def __enter__(self) -> Emulation:
        """Make everything.

        Raises:
            ConfigError: If this machine cannot: says what to do.
        """
        check_privileges()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.namespaces)
            self.delay_by = self._choose()
            if self.delay_by == "relay":
                self._start_relays(stack)
            else:
                run_tool(
                    ["ip", "-batch", "-"], _script(kernel.veth_lines(self.network, self._names))
                )
            self._configure()
            self.describe()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End what still runs inside, and take everything down."""
        self.ended = self.namespaces.close()
        self._stack.close()

    @property
    def description_path(self) -> Path:
        """File that says where everything is, for programs inside."""
        return OWNERS / f"{self.namespaces.id}.json"

    def describe(self, **more: object) -> None:
        """Write, for programs inside, what is where, how to enter an island, and `more`."""
        description = {
            "wan": str(self.wan.path),
            "delay_by": self.delay_by,
            "coordinator": self.network.address(self.network.coordinator),
            "islands": {
                island: {
                    "address": self.network.address(island),
                    "interface": kernel.interface(self.network, island),
                    "enter": self.namespaces.enter(island),
                }
                for island in self.network.islands
            },
            **more,
        }
        self.description_path.write_text(json.dumps(description))

    def as_dict(self) -> Message:
        """Say what was asked for, as JSON values."""
        return {
            "wan": str(self.wan.path),
            "topology": self.wan.config.topology,
            "coordinator_at": self.network.coordinator,
            "delay_by": self.delay_by,
            "is_realtime": self.is_realtime,
            "queue_s": self.network.queue_s,
            "tcp": self.wan.config.tcp.model_dump(),
            "links": [asdict(wire) for wire in self.network.wires],
        }

    def popen(self, node: str, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process in a node; `options` are Popen's, hence `Any`."""
        with inside(self.namespaces.path(node)):
            return subprocess.Popen(command, **options)

    def change(self, wire: Wire, way: str, state: WireState) -> None:
        """Make one direction what `state` says, at once; packets on their way stay as they are.

        Raises:
            ConfigError: If the kernel refuses.
        """
        name = self.namespaces.name(wire.direction(way)[0])
        lines = kernel.qdisc_lines(
            self.network, wire, state, with_netem=self.delay_by == "netem", verb="change"
        )
        run_tool(["tc", "-n", name, "-batch", "-"], _script(lines))
        for relay in self._relays:
            if (key := f"{wire.name} {way}") in relay.lines:
                relay.ask({"do": "change", "name": key, "settings": _settings(state)})
        self.states[wire.name, way] = state

    def carried(self) -> dict[tuple[str, str], Carried]:
        """Read the counters of every direction, by wire name and "up" or "down"."""
        reports: dict[str, Any] = {}
        for relay in self._relays:
            reports |= relay.ask({"do": "report"})
        shown = {
            node: run_tool(["tc", "-n", name, "-s", "-j", "qdisc", "show"])
            for node, name in self._names.items()
        }
        found = {}
        for index, wire in enumerate(self.network.wires):
            for way in WAYS:
                text = shown[wire.direction(way)[0]]
                seen = Carried(*kernel.parse_counters(text, kernel.device(index)))
                if line := reports.get(f"{wire.name} {way}"):
                    lost = line["lost_packets"] + line["outage_packets"]
                    late, acks = tuple(line["late"]), line["ack_bytes"]
                    seen = replace(seen, lost=lost, ack_bytes=acks, late=late)
                found[wire.name, way] = seen
        return found

    # -- bringing up ---------------------------------------------------------------------------

    @property
    def _names(self) -> dict[str, str]:
        return {node: self.namespaces.name(node) for node in self.network.nodes}

    def _choose(self) -> str:
        """Say what holds packets back; netem reorders under jitter, so the relay does then."""
        asked = self.wan.config.delay_by
        if asked == "relay":
            return "relay"
        directions = [wire.direction(way)[2] for wire in self.network.wires for way in WAYS]
        has_jitter = any(link.jitter_s for link in directions) or any(
            change.jitter for change in self.wan.config.changes.values()
        )
        has_netem = self._has_netem()
        if asked == "netem" and (has_jitter or not has_netem):
            why = "it would reorder packets under jitter" if has_jitter else "this kernel has none"
            raise ConfigError(f'delay_by = "netem": {why}; use delay_by = "auto" or "relay"')
        return "netem" if has_netem and not has_jitter else "relay"

    def _has_netem(self) -> bool:
        """Try it on the loopback of a namespace that has no other use for it."""
        name = self._names[self.network.nodes[0]]
        try:
            run_tool(
                ["tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
            )
        except ConfigError:
            return False
        run_tool(["tc", "-n", name, "qdisc", "del", "dev", "lo", "root"])
        return True

    def _start_relays(self, stack: contextlib.ExitStack) -> None:
        """Start a relay a processor, at most, and deal the wires to them."""
        wires = list(enumerate(self.network.wires))
        count = max(1, min(len(wires), (os.cpu_count() or 1)))
        for number in range(count):
            specs = [
                spec for index, wire in wires[number::count] for spec in self._specs(index, wire)
            ]
            self._relays.append(stack.enter_context(_RelayProcess(specs)))
        self.is_realtime = all(relay.is_realtime for relay in self._relays)

    def _specs(self, index: int, wire: Wire) -> Iterable[Message]:
        for number, way in enumerate(WAYS):
            source, target, link = wire.direction(way)
            yield {
                "name": f"{wire.name} {way}",
                "source": str(self.namespaces.path(source)),
                "target": str(self.namespaces.path(target)),
                "device": kernel.device(index),
                "settings": _settings(WireState(link)),
                "seed": (self.wan.config.seed << 16) + 2 * index + number,
            }

    def _configure(self) -> None:
        tcp, with_netem = self.wan.config.tcp, self.delay_by == "netem"
        for node, name in self._names.items():
            lines = list(kernel.node_lines(self.network, node, tcp.congestion_control))
            run_tool(["ip", "-n", name, "-batch", "-"], _script(lines))
            with inside(self.namespaces.path(node)):
                self._set_parameters()
        for wire in self.network.wires:
            for way in WAYS:
                source, _, link = wire.direction(way)
                lines = kernel.qdisc_lines(
                    self.network, wire, WireState(link), with_netem=with_netem
                )
                run_tool(["tc", "-n", self._names[source], "-batch", "-"], _script(lines))

    def _set_parameters(self) -> None:
        """Set the kernel parameters of the namespace that this thread is in."""
        tcp = self.wan.config.tcp
        values = {"ip_forward": "1", "conf/all/rp_filter": "0", "tcp_no_metrics_save": "1"}
        values["tcp_slow_start_after_idle"] = str(int(tcp.slow_start_after_idle))
        if tcp.max_buffer:
            largest = tcp.max_buffer.num_bytes
            values["tcp_wmem"] = f"4096 65536 {largest}"
            values["tcp_rmem"] = f"4096 131072 {largest}"
        for name, value in values.items():
            Path("/proc/sys/net/ipv4", name).write_text(value)


def _settings(state: WireState) -> Message:
    link = state.link
    return asdict(LineSettings(link.delay_s, link.jitter_s, link.loss, state.is_up))


def _script(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"


class _RelayProcess:
    """A relay as a child; it ends when its standard input does, so also when we are killed."""

    def __init__(self, specs: Sequence[Message]) -> None:
        """Note the lines; `with` starts the process."""
        self.lines = {spec["name"] for spec in specs}
        self.is_realtime = False
        self._specs = specs
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _RelayProcess:
        """Start it; its devices are there afterwards."""
        command = [sys.executable, "-m", "diloco.simulations.emulate.relay"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        try:
            self.is_realtime = self.ask({"do": "open", "lines": self._specs})["is_realtime"]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Close its input and wait for its end."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def ask(self, message: Mapping[str, object]) -> Message:
        """Tell it something and return its answer.

        Raises:
            ConfigError: If it has died, or does not answer.
        """
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        line = b""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
            if select.select([process.stdout], [], [], _ANSWER_S)[0]:
                line = process.stdout.readline()
        if not line:
            raise ConfigError(
                f"the relay of the emulated links (process {process.pid}) does not answer, exit "
                f"code {process.poll()}; its last words are above"
            )
        return dict(json.loads(line))
