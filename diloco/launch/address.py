"""Addresses of coordinator and syncer: a port drawn once is bound again at every restart.

Whoever reached a process before it died reaches the next one under the same address.

Source: protocol.md section 8.
"""

from __future__ import annotations

import asyncio
import logging

from diloco.errors import ConfigError
from transport.addresses import is_wildcard, split_address
from transport.contracts import Handlers
from transport.grpc_server import GrpcServer

logger = logging.getLogger(__name__)

_RETRY_WAIT_S = 0.2


async def listen(
    bind: str,
    recorded: str,
    handlers: Handlers,
    *,
    insecure: bool,
    chunk_bytes: int,
    busy_s: float = 10.0,
) -> GrpcServer:
    """Serve `handlers` at `bind`; where its port is 0, at the port of `recorded`.

    Args:
        bind: ``host:port`` of the configuration.
        recorded: ``host:port`` bound before a restart; empty: draw a free port.
        handlers: Coroutines by method name.
        insecure: Allow an address that other machines can reach, without encryption.
        chunk_bytes: Chunk size of replies.
        busy_s: Seconds for which a busy port is tried again: its last owner may be ending.

    Raises:
        ConfigError: If the address cannot be bound.
    """
    host, port = split_address(bind)
    if port == 0 and recorded:
        bind = f"{host}:{split_address(recorded)[1]}"
    loop = asyncio.get_running_loop()
    until = loop.time() + busy_s
    while True:
        server = GrpcServer(bind, handlers, insecure=insecure, chunk_bytes=chunk_bytes)
        try:
            await server.start()
        except OSError as error:
            if loop.time() >= until:
                raise ConfigError(
                    f"{error.strerror}. Islands expect this run at {bind}: end the process that "
                    f"holds it (ss -ltnp shows which), then start again"
                ) from error
            await asyncio.sleep(_RETRY_WAIT_S)
        else:
            return server


def advertised(bound: str, public: str) -> str:
    """Address under which other machines reach what listens on `bound`.

    Args:
        bound: ``host:port`` really bound.
        public: ``host:port`` at which this machine is reached; its host replaces a wildcard.

    Raises:
        ConfigError: If `bound` has a wildcard for a host, such as 0.0.0.0, and `public` is empty.
    """
    host, port = split_address(bound)
    if not is_wildcard(host):
        return bound
    if not public:
        raise ConfigError(
            f"{bound} listens on every address of this machine, which tells islands none: set "
            f'coordinator.address = "HOST:PORT" as they reach the coordinator'
        )
    return f"{split_address(public)[0]}:{port}"
