"""Islands behind a router that translates addresses and lets nobody in, as most are.

The router is the middle of an emulated star, with the kernel's own NAT (nftables). A server behind
such a router needs a relay (`transport.hivemind.relayed`), which is not tried here.
"""

import asyncio
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diloco.simulations.emulate.emulation import Emulation
from diloco.simulations.emulate.namespaces import inside
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.libp2p.client import HivemindTransport
from diloco.transport.retry import RetryPolicy, retry
from tests.simulations.emulated_site import make_emulation, needs_namespaces, star

pytestmark = [needs_namespaces, pytest.mark.slow, pytest.mark.timeout(120)]

LINK = 'bandwidth = "50Mbit/s", delay = "5ms"'
PAYLOAD = bytes(range(250)) * 4000
DEADLINE_S = 60.0

SERVER = """
import asyncio, json, sys
from pathlib import Path
from diloco.transport.contracts import Reply
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.libp2p.server import HivemindServer
async def echo(call):
    return Reply(call.header, await call.read_payload())
async def main():
    kind, bind, key = sys.argv[1:]
    if kind == "grpc":
        server = GrpcServer(bind, {"echo": echo}, insecure=True)
    else:
        server = HivemindServer(bind, {"echo": echo}, identity=Path(key))
    await server.start()
    print(json.dumps(server.address), flush=True)
    await asyncio.sleep(1e6)
asyncio.run(main())
"""


@contextmanager
def line_of(emulation: Emulation, node: str, command: list[str], mark: str) -> Iterator[str]:
    """Run a program in a node; gives its first line that has a mark in it."""
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    process = emulation.popen(
        node, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    )
    assert process.stdout is not None
    try:
        said = []
        for line in iter(process.stdout.readline, b""):
            said.append(line.decode())
            if mark in said[-1]:
                yield said[-1]
                break
        else:
            pytest.fail("".join(said))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def close_the_way_in(emulation: Emulation, node: str) -> None:
    """Have the router translate what the node sends, and refuse what others begin."""
    router = emulation.network.address("core")
    device = next(
        f"wan{index}" for index, wire in enumerate(emulation.network.wires) if wire.near == node
    )
    rules = f"""
table ip home {{
  chain out {{
    type nat hook postrouting priority 100
    ip saddr {emulation.network.address(node)} oifname != "{device}" snat to {router}
  }}
  chain in {{
    type filter hook forward priority 0
    oifname "{device}" ct state new drop
  }}
}}
"""
    command = ["nft", "-f", "-"]
    with inside(emulation.namespaces.path("core")):
        subprocess.run(command, input=rules, text=True, check=True)


@pytest.mark.skipif(shutil.which("nft") is None, reason="no nftables: apt install nftables")
@pytest.mark.parametrize("kind", ["grpc", "hivemind"])
def test_an_island_behind_nat_calls_a_server_that_cannot_call_it(kind: str, tmp_path: Path) -> None:
    with make_emulation(tmp_path, star(up=LINK, down=LINK)) as emulation:
        address = emulation.network.address
        close_the_way_in(emulation, "b")
        with inside(emulation.namespaces.path("b")):
            listener = socket.create_server((address("b"), 4711))
        bind, key = f"{address('a')}:0", str(tmp_path / "key")
        server = [sys.executable, "-c", SERVER, kind, bind, key]

        with listener, line_of(emulation, "a", server, '"') as line:
            reached = json.loads(line)
            with inside(emulation.namespaces.path("a")), pytest.raises(TimeoutError):
                socket.create_connection((address("b"), 4711), timeout=1.0)
            with inside(emulation.namespaces.path("b")):
                reply = asyncio.run(echoed(kind, reached))

    assert reply == PAYLOAD


async def echoed(kind: str, address: str) -> bytes:
    transport = GrpcTransport(address) if kind == "grpc" else HivemindTransport(address)
    try:
        reply = await retry(
            lambda: transport.call(
                "echo", b"", PAYLOAD, deadline_s=DEADLINE_S, max_reply_bytes=len(PAYLOAD)
            ),
            RetryPolicy(budget_s=DEADLINE_S),
            random.Random(0),
        )
    finally:
        await transport.close()
    return bytes(reply.payload)
