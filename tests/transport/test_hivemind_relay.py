"""A server that nobody can dial, called through a peer that both ends reach.

Three network namespaces in a row: caller - relay - server, with no route from one end to the other.
"""

import asyncio
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.simulations.emulate.namespaces import inside
from diloco.transport.libp2p.address import PeerAddress, parse_peer_address, tcp_port
from diloco.transport.libp2p.client import HivemindTransport
from diloco.transport.libp2p.daemon import Swarm
from diloco.transport.retry import RetryPolicy, retry
from diloco.transport.transfer import Transfer
from tests.transport.test_hivemind import DEADLINE_S, echo, make, whence

HERE = f"dh{os.getpid()}"


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


@pytest.fixture
def row() -> Iterator[dict[str, Path]]:
    """Make the namespaces; the relay is 10.99.1.1 to the caller, 10.99.2.1 to the server."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = {name: f"{HERE}{name}" for name in ("caller", "relay", "server")}
    try:
        for name in names.values():
            ip(f"netns add {name}")
            ip(f"-n {name} link set lo up")
        for number, end in ((1, "caller"), (2, "server")):
            near, far = names["relay"], names[end]
            ip(f"link add dh{number} netns {near} type veth peer name dh0 netns {far}")
            for namespace, link, host in ((near, f"dh{number}", 1), (far, "dh0", 2)):
                ip(f"-n {namespace} addr add 10.99.{number}.{host}/24 dev {link}")
                ip(f"-n {namespace} link set {link} up")
        yield {name: Path("/run/netns") / full for name, full in names.items()}
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "delete", name], check=False)


@pytest.mark.slow
def test_a_server_behind_nat_is_called_through_a_relay(
    row: dict[str, Path], tmp_path: Path
) -> None:
    async def run() -> None:
        for name in ("relay", "server"):
            (tmp_path / name).mkdir()
        with inside(row["relay"]):
            relay = make(tmp_path / "relay", {}, "0.0.0.0:0")
            await relay.start()
        known = parse_peer_address(relay.address)
        to_server, to_caller = (
            str(PeerAddress(known.peer_id, (f"/ip4/10.99.{number}.1/tcp/{tcp_port(known)}",)))
            for number in (2, 1)
        )
        with inside(row["server"]):
            swarm = Swarm(initial_peers=(to_server,), is_relayed=True)
            handlers = {"echo": echo, "whence": whence}
            server = make(tmp_path / "server", handlers, "10.99.2.2:0", swarm=swarm)
            await server.start()
        *direct, relayed = parse_peer_address(server.address).routes
        assert all("10.99.2.2" in way for way in direct)
        assert relayed == f"{to_server}/p2p-circuit"

        # The caller knows the relay by another address than the server does.
        identity = parse_peer_address(server.address).peer_id
        address = f"{to_caller}/p2p-circuit/p2p/{identity}"
        with inside(row["caller"]):
            transport = HivemindTransport(address)
            for index in range(20):  # six times what one relayed connection may carry
                payload = random.Random(index).randbytes(20_000)
                reply = await retry(
                    lambda payload=payload: transport.call(
                        "echo", b"", payload, deadline_s=DEADLINE_S, max_reply_bytes=len(payload)
                    ),
                    RetryPolicy(budget_s=120.0),
                    random.Random(0),
                )
                assert reply.payload == payload
            elsewhere = await transport.call("whence", b"", deadline_s=DEADLINE_S)
            assert elsewhere.header == b"False"
            # More than one connection carries: both ways it goes on over many.
            large, transfer = random.Random(0).randbytes(512 << 10), Transfer()
            reply = await retry(
                lambda: transport.call(
                    "echo",
                    b"",
                    large,
                    deadline_s=DEADLINE_S,
                    max_reply_bytes=len(large),
                    transfer=transfer,
                ),
                RetryPolicy(budget_s=60.0),
                random.Random(0),
                progress=lambda: transfer.acknowledged_bytes + transfer.received_bytes,
            )
            assert reply.payload == large
            await transport.close()
        for peer in (server, relay):
            await peer.stop(0.0)

    asyncio.run(run())
