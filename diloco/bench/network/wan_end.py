"""One end of a measured transfer, as a process of its own; its only argument is ORDER.

ORDER is JSON. Receivers print {"address": ...} and live until their standard input ends; senders
print what they measured. A burst is what a round sends at once: all lanes of a contribution, or as
many bytes over plain TCP; it is over when every part was acknowledged.

    {"do": "receive", "kind", "host", "certs", "key"}
    {"do": "send", "kind", "address", "certs", "parts", "part_bytes", "bursts", "every_s"}

Kinds: grpc and hivemind are the transports of the product as a run makes them; tcp is one plain
connection a part, the standard library's sockets and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

from diloco.security.security import Security
from diloco.transport.calls.limits import Limits
from diloco.transport.contracts import IncomingCall, Reply
from diloco.transport.identity import Identity, Role
from diloco.transport.libp2p.daemon import Swarm

_METHOD = "bench.submit"
_DEADLINE_S = 300.0
_SIZE = struct.Struct("<Q")
_DONE = b"."
_READ_BYTES = 1 << 20

Order = dict[str, Any]  # JSON values


def main(order: Order) -> None:
    """Do what an order says."""
    if order["do"] == "send":
        is_plain = order["kind"] == "tcp"
        seconds, receiver_cpu_s = _send_tcp(order) if is_plain else asyncio.run(_send_lanes(order))
        _send({"seconds": seconds, "cpu_s": _cpu_s(), "receiver_cpu_s": receiver_cpu_s})
    elif order["kind"] == "tcp":
        _receive_tcp(order["host"])
    else:
        asyncio.run(_receive_calls(order))


def _send(message: Order) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _cpu_s() -> float:
    """CPU seconds of this process so far, all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _security(order: Order, role: Role) -> Security:
    name = "bench" if role is Role.ISLAND else ""
    if order["kind"] == "hivemind":
        key = Path(order["key"]) if order.get("key") else None
        return Security(insecure=True, swarm=Swarm(), key=key)
    certs = order.get("certs", "")
    return (
        Security.open(Identity("", role, name), certs=certs) if certs else Security(insecure=True)
    )


# -- the product's transports ------------------------------------------------------------------


async def _receive_calls(order: Order) -> None:
    async def submit(call: IncomingCall) -> Reply:
        payload = await call.read_payload()
        report = {"bytes": memoryview(payload).nbytes, "cpu_s": _cpu_s()}
        return Reply(json.dumps(report).encode())

    security = _security(order, Role.SYNCER)
    server = security.server(f"{order['host']}:0", {_METHOD: submit}, limits=Limits())
    await server.start()
    _send({"address": server.address})
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0.0)


async def _send_lanes(order: Order) -> tuple[list[float], float]:
    """Send bursts of lanes, all of a burst at once.

    Returns:
        The seconds of each burst, and the CPU seconds that the receiver has used by then.
    """
    lane, seconds = bytes(order["part_bytes"]), []
    receiver_cpu_s = 0.0
    security = _security(order, Role.ISLAND)
    transport = security.transport(order["address"], Role.SYNCER, channels=0)

    async def submit() -> None:
        nonlocal receiver_cpu_s
        reply = await transport.call(_METHOD, b"", lane, deadline_s=_DEADLINE_S)
        report = json.loads(reply.header)
        assert report["bytes"] == len(lane)
        receiver_cpu_s = max(receiver_cpu_s, report["cpu_s"])

    try:
        began = time.monotonic()
        for number in range(order["bursts"]):
            await asyncio.sleep(began + number * order["every_s"] - time.monotonic())
            burst = time.monotonic()
            await asyncio.gather(*(submit() for _ in range(order["parts"])))
            seconds.append(time.monotonic() - burst)
    finally:
        await transport.close()
    return seconds, receiver_cpu_s


# -- plain TCP -----------------------------------------------------------------------------------


def _receive_tcp(host: str) -> None:
    listener = socket.create_server((host, 0))
    _send({"address": "{}:{}".format(*listener.getsockname())})

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_drain, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()


def _drain(connection: socket.socket) -> None:
    """Read parts, each behind its size, and acknowledge each."""
    buffer = bytearray(_READ_BYTES)
    with connection:
        while head := connection.recv(_SIZE.size, socket.MSG_WAITALL):
            (left,) = _SIZE.unpack(head)
            while left:
                left -= connection.recv_into(buffer, min(left, len(buffer)))
            connection.sendall(_DONE)


def _send_tcp(order: Order) -> tuple[list[float], float]:
    """Send bursts, a part over each connection; returns the seconds of each, and nothing else."""
    host, _, port = order["address"].rpartition(":")
    part, seconds = bytes(order["part_bytes"]), []
    connections = [socket.create_connection((host, int(port))) for _ in range(order["parts"])]

    def submit(connection: socket.socket) -> None:
        connection.sendall(_SIZE.pack(len(part)))
        connection.sendall(part)
        connection.recv(1)

    began = time.monotonic()
    for number in range(order["bursts"]):
        time.sleep(max(0.0, began + number * order["every_s"] - time.monotonic()))
        threads = [threading.Thread(target=submit, args=(each,)) for each in connections]
        burst = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds.append(time.monotonic() - burst)
    for connection in connections:
        connection.close()
    return seconds, 0.0


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
