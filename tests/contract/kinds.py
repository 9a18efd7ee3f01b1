"""The transports under test: how to run a coroutine, and how to make the two ends.

A new transport is one more entry of `KINDS`; the contract suite then runs over it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.transport.bucket.client import ObjectTransport
from diloco.transport.bucket.server import ObjectCalls
from diloco.transport.calls.loopback import LoopbackNetwork, run_virtual
from diloco.transport.contracts import Handlers, Server, Transport
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.libp2p.address import parse_peer_address, tcp_port
from diloco.transport.libp2p.client import HivemindTransport
from diloco.transport.libp2p.server import HivemindServer
from diloco.transport.shaping.faulty import Faults, FaultScript, FaultyTransport
from diloco.transport.shaping.link import Link, LinkQueue
from diloco.transport.shaping.pacing import Pacer
from diloco.transport.shaping.shaped import ShapedTransport
from tests.faulty_handlers import faulty_handlers
from tests.signed_store import SignedStore
from tests.transport.pki import COORDINATOR, EAST, Pki


@dataclass(frozen=True)
class Kind:
    """One transport.

    Attributes:
        run: Runs a coroutine in a loop of its own.
        serve: Makes a server of handlers, not started yet; at the address of an earlier one, or
            anywhere where that is empty.
        connect: Makes a way to a server's address.
        via: Gives the address under which a server is reached through a TCP port of this machine;
            None where there is no TCP.
        goes_around: Whether a connection that broke finds a way around that port.
    """

    run: Callable[[Coroutine[Any, Any, Any]], Any]
    serve: Callable[[Handlers, str], Server]
    connect: Callable[[str], Transport]
    via: Callable[[str, int], str] | None = None
    goes_around: bool = False


def grpc_kind(_: Path) -> Kind:
    return Kind(
        asyncio.run,
        lambda handlers, at: GrpcServer(at or "127.0.0.1:0", handlers),
        GrpcTransport,
        lambda address, port: f"127.0.0.1:{port}",
    )


def mtls_kind(directory: Path) -> Kind:
    pki = Pki(directory)
    server, client = pki.tls(COORDINATOR), pki.tls(EAST)
    return Kind(
        asyncio.run,
        lambda handlers, at: GrpcServer(at or "127.0.0.1:0", handlers, tls=server),
        lambda address: GrpcTransport(address, tls=client),
        lambda address, port: f"127.0.0.1:{port}",
    )


def loopback_kind(_: Path) -> Kind:
    network = LoopbackNetwork()
    return Kind(
        run_virtual, lambda handlers, at: network.server(at or "hub", handlers), network.connect
    )


def shaped_kind(directory: Path) -> Kind:
    inner = loopback_kind(directory)
    link = Link(bandwidth_bps=1e9, delay_s=0.03, jitter_s=0.002, loss=0.01)

    def connect(address: str) -> Transport:
        up, down = (LinkQueue(link, seed=seed) for seed in (1, 2))
        return ShapedTransport(inner.connect(address), up, down)

    return Kind(inner.run, inner.serve, connect)


def faultless_kind(directory: Path) -> Kind:
    """The fault wrapper at both ends, with no fault in its script."""
    inner = loopback_kind(directory)
    script = FaultScript(seed=1)
    return Kind(
        inner.run,
        lambda handlers, at: inner.serve(faulty_handlers(handlers, Faults(script, "down")), at),
        lambda address: FaultyTransport(inner.connect(address), Faults(script, "up")),
    )


def hivemind_kind(directory: Path) -> Kind:
    def serve(handlers: Handlers, at: str) -> Server:
        port = tcp_port(parse_peer_address(at)) if at else 0
        return HivemindServer(f"127.0.0.1:{port}", handlers, identity=directory / "peer.key")

    def via(address: str, port: int) -> str:
        return address.replace(f"/tcp/{tcp_port(parse_peer_address(address))}/", f"/tcp/{port}/")

    return Kind(asyncio.run, serve, HivemindTransport, via, goes_around=True)


def bucket_kind(_: Path) -> Kind:
    """Payloads as objects of a store, over real HTTP; all else over gRPC."""
    store = SignedStore()

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        with store.serving():
            return asyncio.run(coroutine)

    def serve(handlers: Handlers, at: str) -> Server:
        around = ObjectCalls(store).around(handlers)
        return GrpcServer(at or "127.0.0.1:0", {**handlers, **around})

    def connect(address: str) -> Transport:
        return ObjectTransport(GrpcTransport(address), pacer=Pacer())

    return Kind(run, serve, connect)


#: By name; each is given a directory of its own.
KINDS: dict[str, Callable[[Path], Kind]] = {
    "grpc": grpc_kind,
    "mtls": mtls_kind,
    "loopback": loopback_kind,
    "shaped": shaped_kind,
    "faultless": faultless_kind,
    "hivemind": hivemind_kind,
    "bucket": bucket_kind,
}
