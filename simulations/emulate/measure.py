"""Measuring a link from its two ends: rate, round trip, loss; with nothing but sockets.

    rate        UDP as fast as it will go; what arrived between the first and the last look
    round trip  echo requests that the far kernel answers
    loss        small datagrams at half the rate; what did not arrive

Sockets are made inside the two namespaces and used from here. UDP goes in super-packets
(`UDP_SEGMENT`, `UDP_GRO`), so that Python keeps up with 1 Gbit/s.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from diloco.simulations.emulate.namespaces import inside
from diloco.simulations.emulate.realtime import realtime

#: linux/udp.h.
_SOL_UDP, _UDP_SEGMENT, _UDP_GRO = 17, 103, 104
#: asm-generic/socket.h: buffers beyond net.core.wmem_max and rmem_max.
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_MAX_SEGMENTS = 64
_UDP_IP_BYTES = 28
_MAX_DATAGRAM_BYTES = 1472
_MAX_SUPER_BYTES = 65507
#: Payload of the datagrams that are counted: small, so that many pass.
_COUNTED_BYTES = 16
_RECEIVE_BYTES = 32 * 2**20
_ICMP_ECHO, _ICMP_ECHO_REPLY = 8, 0
_LOOK_S = 0.05

OnLook: TypeAlias = Callable[[], None]


@dataclass(frozen=True, slots=True)
class End:
    """One end of a path: its namespace and its address there."""

    namespace: Path
    address: str


def measure_rtt_s(
    source: End,
    target: End,
    *,
    count: int,
    spacing_s: float,
    wait_s: float,
    on_look: OnLook,
) -> float:
    """Median round trip of echo requests.

    Args:
        source: Who asks.
        target: Whose kernel answers.
        count: Requests.
        spacing_s: Between two of them.
        wait_s: How long the last answers may take.
        on_look: Called often; what it raises ends the measuring.

    Returns:
        Seconds; infinite when most requests were not answered.
    """
    with inside(source.namespace):
        echo = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    identifier = os.getpid() & 0xFFFF
    sent: dict[int, float] = {}
    trips: dict[int, float] = {}
    with echo, realtime():
        echo.bind((source.address, 0))
        until = time.monotonic() + spacing_s * count + wait_s
        next_s = time.monotonic()
        while len(trips) < count and (now := time.monotonic()) < until:
            on_look()
            if len(sent) < count and now >= next_s:
                sequence = len(sent)
                sent[sequence] = time.monotonic()
                echo.sendto(_echo_request(identifier, sequence), (target.address, 0))
                next_s += spacing_s
            wait = max(0.0, min((next_s if len(sent) < count else until) - now, _LOOK_S))
            if not select.select([echo], [], [], wait)[0]:
                continue
            packet = echo.recv(2048)
            arrived = time.monotonic()
            kind, _, _, name, sequence = struct.unpack_from("!BBHHH", packet, 20)
            if kind == _ICMP_ECHO_REPLY and name == identifier and sequence in sent:
                trips.setdefault(sequence, arrived - sent[sequence])
    return statistics.median([*trips.values(), *[float("inf")] * (count - len(trips))])


def _echo_request(identifier: int, sequence: int) -> bytes:
    body = struct.pack("!BBHHH", _ICMP_ECHO, 0, 0, identifier, sequence) + bytes(24)
    total = sum(struct.unpack(f"!{len(body) // 2}H", body))
    total = (total & 0xFFFF) + (total >> 16)
    return body[:2] + struct.pack("!H", ~(total + (total >> 16)) & 0xFFFF) + body[4:]


def measure_rate_bps(
    source: End,
    target: End,
    *,
    super_bytes: int,
    buffer_bytes: int,
    settle_s: float,
    seconds: float,
    on_look: OnLook,
) -> float:
    """Rate of IP packets that arrive while the source sends all it can.

        rate = 8 bytes after the first look / (last arrival - first look)

    Args:
        source: Who sends; its socket blocks when the link is full.
        target: Who counts.
        super_bytes: Longest super-packet that the link takes whole.
        buffer_bytes: What the sender may have waiting; less than the link's queue, so that it
            blocks before anything is dropped.
        settle_s: Time from the first arrival to the first look.
        seconds: From the first to the last look.
        on_look: Called often; what it raises ends the measuring.

    Returns:
        Bits per second; 0 when nothing arrived.
    """
    segments = max(1, min(_MAX_SEGMENTS, min(super_bytes, _MAX_SUPER_BYTES) // 1500))
    stop = threading.Event()
    with _udp_pair(source, target) as (sender, receiver):
        sender.setsockopt(_SOL_UDP, _UDP_SEGMENT, _MAX_DATAGRAM_BYTES)
        _set_buffer(sender, socket.SO_SNDBUF, _SO_SNDBUFFORCE, buffer_bytes)
        payload = bytes(segments * _MAX_DATAGRAM_BYTES)

        def send() -> None:
            with realtime():
                while not stop.is_set():
                    if select.select([], [sender], [], _LOOK_S)[1]:
                        sender.send(payload)

        thread = threading.Thread(target=send, name="measure-rate")
        thread.start()
        try:
            with realtime():
                return _received_bps(receiver, settle_s, seconds, on_look)
        finally:
            stop.set()
            thread.join()


def _received_bps(
    receiver: socket.socket, settle_s: float, seconds: float, on_look: OnLook
) -> float:
    begin = last = 0.0
    num_bytes = 0
    deadline = time.monotonic() + 10.0 + settle_s + seconds
    while time.monotonic() < deadline:
        on_look()
        if not select.select([receiver], [], [], _LOOK_S)[0]:
            continue
        payload = receiver.recv(65536)
        now = time.monotonic()
        if not begin:
            begin, settled = now + settle_s, False
        if now < begin:
            continue
        if not settled:  # what it has stands before the window
            begin, settled = now, True
            continue
        packets = -(-len(payload) // _MAX_DATAGRAM_BYTES)
        num_bytes += len(payload) + packets * _UDP_IP_BYTES
        last = now
        if now - begin >= seconds:
            break
    return 8 * num_bytes / (last - begin) if last > begin else 0.0


def packets_in(seconds: float, rate_bps: float) -> float:
    """Say how many of the datagrams of `measure_loss` are sent in a time."""
    return seconds * rate_bps / (8 * (_COUNTED_BYTES + _UDP_IP_BYTES))


def measure_loss(
    source: End,
    target: End,
    *,
    packets: int,
    rate_bps: float,
    super_bytes: int,
    wait_s: float,
    on_look: OnLook,
) -> float:
    """Share of small datagrams that did not arrive.

    Args:
        source: Who sends.
        target: Who counts.
        packets: How many, rounded up to whole super-packets.
        rate_bps: At which rate; well below the link's, so that no queue drops any.
        super_bytes: Longest super-packet that the link takes whole.
        wait_s: How long the last ones may take.
        on_look: Called often; what it raises ends the measuring.
    """
    on_wire = _COUNTED_BYTES + _UDP_IP_BYTES
    segments = max(1, min(_MAX_SEGMENTS, super_bytes // on_wire))
    bursts = -(-packets // segments)
    spacing_s = 8 * segments * on_wire / rate_bps
    received = [0]
    with _udp_pair(source, target) as (sender, receiver):
        sender.setsockopt(_SOL_UDP, _UDP_SEGMENT, _COUNTED_BYTES)
        done = threading.Event()

        def count() -> None:
            until = float("inf")
            while time.monotonic() < until:
                if select.select([receiver], [], [], _LOOK_S)[0]:
                    received[0] += len(receiver.recv(65536)) // _COUNTED_BYTES
                elif done.is_set() and until == float("inf"):
                    until = time.monotonic() + wait_s

        thread = threading.Thread(target=count, name="measure-loss")
        thread.start()
        payload = bytes(segments * _COUNTED_BYTES)
        begin = time.monotonic()
        try:
            for number in range(bursts):
                ahead = begin + number * spacing_s - time.monotonic()
                on_look()
                if ahead > 0:
                    time.sleep(ahead)
                sender.send(payload)
        finally:
            done.set()
            thread.join()
    return 1.0 - received[0] / (bursts * segments)


@contextlib.contextmanager
def _udp_pair(source: End, target: End) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A sender in one namespace, connected to a receiver in the other."""
    with inside(target.namespace):
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with inside(source.namespace):
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with sender, receiver:
        receiver.setsockopt(_SOL_UDP, _UDP_GRO, 1)
        _set_buffer(receiver, socket.SO_RCVBUF, _SO_RCVBUFFORCE, _RECEIVE_BYTES)
        receiver.bind((target.address, 0))
        sender.bind((source.address, 0))
        sender.connect(receiver.getsockname())
        yield sender, receiver


def _set_buffer(end: socket.socket, option: int, forced: int, num_bytes: int) -> None:
    """Set a buffer's size; in a user namespace at most what the machine allows everybody."""
    try:
        end.setsockopt(socket.SOL_SOCKET, forced, num_bytes)
    except PermissionError:
        end.setsockopt(socket.SOL_SOCKET, option, num_bytes)
