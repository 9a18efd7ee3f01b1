"""A server in a process of its own, which a storm may end: CERTS ROTATE_S DESCRIPTORS PROCESSES.

It prints its address, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import faulthandler
import resource
import sys
from pathlib import Path

import diloco.transport.grpc.listener
from diloco.transport.calls.limits import Limits
from diloco.transport.contracts import IncomingCall, Reply
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.security.tls import Tls
from tests.transport.pki import COORDINATOR


async def echo(call: IncomingCall) -> Reply:
    return Reply(call.header, await call.read_payload())


async def serve(certs: Path, between_s: float, num_processes: int) -> None:
    diloco.transport.grpc.listener._BETWEEN_S = between_s
    diloco.transport.grpc.listener._LOOK_S = min(between_s, diloco.transport.grpc.listener._LOOK_S)
    limits = Limits().for_processes(num_processes)
    tls = Tls(certs, COORDINATOR)
    server = GrpcServer("127.0.0.1:0", {"echo": echo}, tls=tls, limits=limits)
    await server.start()
    sys.stdout.write(f"{server.address}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0.0)


if __name__ == "__main__":
    faulthandler.enable()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]), hard))
    asyncio.run(serve(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[4])))
