"""The relay: a process that carries frames between TUN devices, as late as the links say.

    namespace a: TUN, rate by TBF ──read──> Line a to b ──write──> TUN of namespace b, and back

Real-time priority where it may be had, so that a busy machine makes no packet late; super-packets
(`IFF_VNET_HDR`), so that 1 Gbit/s is two thousand reads a second and not eighty thousand. It takes
lines of JSON from its standard input and answers each on its standard output; when the input ends,
its owner has, and so does it: the devices go with it.

    {"do": "open", "lines": [{name, source, target, device, settings, seed}]}  {"is_realtime": ...}
    {"do": "change", "name": ..., "settings": {...}}                           {}
    {"do": "report"}                                                           {name: {...}, ...}
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.simulations.emulate.line import EmulatedLine, LineSettings
from diloco.simulations.emulate.namespaces import inside
from diloco.simulations.emulate.packets import MAX_FRAME_BYTES
from diloco.simulations.emulate.realtime import be_realtime

#: linux/if_tun.h
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
#: Checksums, TCP over IPv4 and IPv6, ECN: super-packets that the kernel may hand over.
_OFFLOADS = 0x01 | 0x02 | 0x04 | 0x08
#: The same of UDP; Linux 6.2 or later.
_UDP_OFFLOADS = 0x20 | 0x40
#: Frames of one line read before the others have their turn.
_BATCH = 16
_FOREVER_S = 3600.0

Message = dict[str, Any]  # JSON values


def open_tun(namespace: Path, device: str) -> int:
    """Make a TUN device in a namespace; it lives as long as the returned descriptor is open.

    Raises:
        OSError: If it cannot be made.
    """
    with inside(namespace):
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
        fcntl.ioctl(descriptor, _TUNSETIFF, request)
        try:
            fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _OFFLOADS | _UDP_OFFLOADS)
        except OSError:  # the kernel then cuts UDP's itself: slower, the same packets
            fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _OFFLOADS)
    return descriptor


class Relay:
    """The lines of some links, and the devices they join."""

    def __init__(self, specs: Sequence[Message]) -> None:
        """Open every device; both directions of a link share its two."""
        self._devices: dict[tuple[str, str], int] = {}
        self.lines: dict[str, EmulatedLine] = {}
        self._ways: list[tuple[int, int, EmulatedLine]] = []
        for spec in specs:
            line = EmulatedLine(LineSettings(**spec["settings"]), seed=spec["seed"])
            self.lines[spec["name"]] = line
            source = self._open(spec["source"], spec["device"])
            target = self._open(spec["target"], spec["device"])
            self._ways.append((source, target, line))

    def _open(self, namespace: str, device: str) -> int:
        key = (namespace, device)
        if key not in self._devices:
            self._devices[key] = open_tun(Path(namespace), device)
        return self._devices[key]

    def carry(self, control: int) -> None:
        """Carry frames until `control` has something to read."""
        by_source = {source: line for source, _, line in self._ways}
        watched = [control, *by_source]
        while True:
            due = min(line.next_due() for line in by_source.values())
            wait_s = min(max(0.0, due - time.monotonic()), _FOREVER_S)
            ready, _, _ = select.select(watched, [], [], wait_s)
            if control in ready:
                return
            for source in ready:
                _take_in(source, by_source[source])
            for _, target, line in self._ways:
                _put_out(target, line)


def _take_in(source: int, line: EmulatedLine) -> None:
    for _ in range(_BATCH):
        try:
            frame = os.read(source, MAX_FRAME_BYTES)
        except BlockingIOError:
            return
        line.accept(frame, time.monotonic())


def _put_out(target: int, line: EmulatedLine) -> None:
    held = line.held
    while held and held[0][0] <= (now := time.monotonic()):
        due, frame = held.popleft()
        try:
            os.write(target, frame)
        except OSError:  # a device that is down, a frame that the kernel will not have
            line.counters.refused_frames += 1
        line.note_late(now - due)


def _answer(relay: Relay, message: Message) -> Mapping[str, object]:
    if message["do"] == "change":
        relay.lines[message["name"]].change(LineSettings(**message["settings"]))
        return {}
    return {name: line.report() for name, line in relay.lines.items()}


def main() -> None:
    """Serve until the standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the owner decides, by closing the input
    with open(0, "rb", buffering=0) as messages:  # select must see all that is unread
        relay = Relay(json.loads(messages.readline())["lines"])
        gc.disable()  # nothing here makes cycles
        _send({"is_realtime": be_realtime()})
        while True:
            relay.carry(messages.fileno())
            line = messages.readline()
            if not line:
                return
            _send(_answer(relay, json.loads(line)))


def _send(reply: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
