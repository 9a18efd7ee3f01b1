"""Handlers behind their rules, served to real clients by a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from diloco.security.access import guarded
from diloco.transport.contracts import Handlers
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.security.tls import Tls


@contextlib.contextmanager
def serving(handlers: Handlers, tls: Tls | None = None, host: str = "127.0.0.1") -> Iterator[str]:
    """Serve until the block is left; gives the address. Beyond loopback only as plaintext."""
    addresses: list[str] = []
    is_up, is_over = threading.Event(), threading.Event()

    async def serve() -> None:
        server = GrpcServer(f"{host}:0", guarded(handlers), tls=tls, insecure=host != "127.0.0.1")
        await server.start()
        addresses.append(server.address)
        is_up.set()
        while not is_over.is_set():
            await asyncio.sleep(0.02)
        await server.stop(0.0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert is_up.wait(30)
        yield addresses[0]
    finally:
        is_over.set()
        thread.join()
