"""Addresses of coordinator and syncer: a port drawn once is bound again at every restart.

Anyone who reached a process before it died reaches the next one under the same address.

Source: PROTOCOL.md, "Restart of a syncer".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections.abc import Callable
from pathlib import Path

from diloco.config.network import CoordinatorConfig, SyncerConfig
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.io_thread import IoThread
from diloco.protocol.run.admission import MOST_LANES
from diloco.protocol.run.peer_bounds import RunLimits
from diloco.refusals import Cause
from diloco.security.access import guarded
from diloco.security.security import Security
from diloco.state_dir import StateDir, read_endpoint
from diloco.transport.addresses import is_wildcard, split_address, split_candidates
from diloco.transport.calls.limits import Limits
from diloco.transport.contracts import Handlers, Server
from diloco.transport.errors import TransportError
from diloco.transport.grpc.wire import ISSUE_METHOD
from diloco.transport.identity import Role
from diloco.transport.libp2p.address import (
    PeerAddress,
    is_peer_address,
    parse_peer_address,
    tcp_port,
    to_multiaddr,
)

logger = logging.getLogger(__name__)

_RETRY_WAIT_S = 0.2
#: A join carries the whole plan and is written to the journal; an island that waits for the syncer
#: joins five times a second. What is new in a report is written, too; an island makes at most 20 a
#: second. Certificates are signed on the coordinator's loop; all ranks of an island that starts ask
#: at once.
_LIMITS = Limits(
    concurrent={"control.join": 32},
    rates={"control.join": 10.0, "control.report": 25.0, ISSUE_METHOD: 50.0},
)


async def listen(
    bind: str,
    recorded: str,
    handlers: Handlers,
    *,
    security: Security,
    limits: RunLimits | None = None,
    on_refused: Callable[[str, Cause], None] = lambda island, cause: None,
    around: Callable[[Handlers], Handlers] | None = None,
    busy_s: float = 10.0,
) -> Server:
    """Serve `handlers` at `bind`; where its port is 0, at the port of `recorded`.

    Args:
        bind: ``host:port`` of the configuration.
        recorded: ``host:port`` bound before a restart; empty: draw a free port.
        handlers: Coroutines by method name; each gets its rule of `access` before it.
        security: What this process shows and asks for.
        limits: What callers can say of this run, and how large an island is; None: of any.
        on_refused: Counts what says something else, by island and cause.
        around: Makes further handlers out of those, which have their rules before them.
        busy_s: Seconds for which a busy port is tried again: its last owner may be ending.

    Raises:
        ConfigError: If the address cannot be bound.
    """
    _raise_descriptor_limit()
    borne = borne_limits(limits)
    host, port = split_address(bind)
    if port == 0 and recorded:
        bind = f"{host}:{_port(recorded)}"
    loop = asyncio.get_running_loop()
    until = loop.time() + busy_s
    served = guarded(handlers, limits, on_refused)
    if around is not None:
        served = {**served, **guarded(around(served), limits, on_refused)}
    while True:
        server = security.server(bind, served, limits=borne)
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


def borne_limits(limits: RunLimits | None) -> Limits:
    """Give what a server bears from its callers; None: those of any run."""
    if limits is None:
        return _LIMITS
    num_lanes = min(limits.num_fragments * limits.num_lanes, MOST_LANES)
    return _LIMITS.for_processes(limits.num_ranks, limits.num_islands, num_lanes)


def _raise_descriptor_limit() -> None:
    """Let this process have as many connections as the system allows it at all."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # without an end, or more than the kernel gives
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def coordinator_address(bound: str, config: CoordinatorConfig) -> str:
    """Address under which islands reach the coordinator that listens on `bound`.

    It is `coordinator.address` where that is set, whatever is bound: behind a port forwarding or a
    Kubernetes service the two differ.

    Raises:
        ConfigError: If `bound` has a wildcard for a host, such as 0.0.0.0, and nothing is set.
    """
    return _advertised(bound, config.address, "coordinator.address")


def of_syncer(address: str, syncer_id: int) -> str:
    """Give one of several syncers its address: the port behind that of the syncer before it.

    Port 0 stays: each draws its own. So does an empty address.
    """
    if syncer_id == 0 or not address:
        return address
    split = [split_address(candidate) for candidate in split_candidates(address)]
    return ",".join(f"{host}:{port + syncer_id if port else 0}" for host, port in split)


def syncer_address(bound: str, config: CoordinatorConfig, syncer_id: int = 0) -> str:
    """Address under which islands reach the syncer that listens on `bound`.

    It is `coordinator.syncer_address` where that is set, else the host of `coordinator.address`
    with the port that is bound, else `bound`. Of several syncers each has a port (`of_syncer`).

    Raises:
        ConfigError: If `bound` has a wildcard for a host, such as 0.0.0.0, and nothing is set.
    """
    public = of_syncer(config.syncer_address, syncer_id)
    if not public and config.address and not is_peer_address(config.address):
        hosts = [split_address(candidate)[0] for candidate in split_candidates(config.address)]
        public = ",".join(f"{host}:0" for host in hosts)
    return _advertised(bound, public, "coordinator.syncer_address")


def placed_address(bound: str, config: SyncerConfig) -> str:
    """Address under which islands reach the syncer of a table of its own that listens on `bound`.

    Raises:
        ConfigError: If `bound` has a wildcard for a host, such as 0.0.0.0, and nothing is set.
    """
    return _advertised(bound, config.address, "syncers.NAME.address")


def local_address(bound: str) -> str:
    """Address under which this machine reaches what listens on `bound`."""
    if is_peer_address(bound):
        return bound
    host, port = split_address(bound)
    if not is_wildcard(host):
        return bound
    return f"{'[::1]' if ':' in host else '127.0.0.1'}:{port}"


def _advertised(bound: str, public: str, key: str) -> str:
    """Prefer `public`, each of its addresses with the bound port where its own is 0."""
    if is_peer_address(public):
        own, said = parse_peer_address(bound).peer_id, parse_peer_address(public).peer_id
        if own != said:
            raise ConfigError(
                f"{key} names the peer {said}, this one is {own}, by the key in "
                f"coordinator.state_dir: bring that key back, or correct the address"
            )
        return public
    port = _port(bound)
    if public:
        candidates = [split_address(candidate) for candidate in split_candidates(public)]
        public = ",".join(f"{host}:{own_port or port}" for host, own_port in candidates)
    if is_peer_address(bound):
        routes = tuple(to_multiaddr(candidate) for candidate in public.split(",") if candidate)
        peer = parse_peer_address(bound)
        return str(PeerAddress(peer.peer_id, routes or peer.routes))
    if public:
        return public
    host, _ = split_address(bound)
    if is_wildcard(host):
        raise ConfigError(
            f"{bound} listens on every address of this machine, which tells islands none: set "
            f'{key} = "HOST:PORT" as they reach it'
        )
    return bound


def _port(bound: str) -> int:
    if is_peer_address(bound):
        return tcp_port(parse_peer_address(bound))
    return split_address(bound)[1]


def find_coordinator(config: Config, given: str, *, wait_s: float | None = None) -> str:
    """Find out where a run's coordinator is reached.

    Args:
        config: The run.
        given: HOST:PORT, or several that are tried in order, or a peer's multiaddr; empty:
            `coordinator.address` of the run file, or what `coordinator.state_dir` records where
            it runs on this machine, or for an island over libp2p who proves to be it
            (`transport.libp2p.rendezvous`).
        wait_s: Seconds for which that is looked for; None: `transport.unreachable`.

    Raises:
        ConfigError: If nothing says so, or it is no address.
    """
    address = given or config.coordinator.address
    if not address:
        state = StateDir(Path(config.coordinator.state_dir))
        endpoint = read_endpoint(state.coordinator)
        address = "" if endpoint is None else endpoint.address
        if not address and config.island_id and config.transport.hivemind.initial_peers:
            wait_s = config.transport.unreachable.seconds if wait_s is None else wait_s
            address = _find_by_name(config, wait_s)
        if not address:
            raise ConfigError(
                f"where is the coordinator? {state.coordinator} does not say, so none was started "
                f"on this machine. Start it (diloco coordinator RUN.toml); on another machine give "
                f"its HOST:PORT as it printed it: --coordinator, diloco.connect(config, ...) or "
                f"coordinator.address; over libp2p an island needs none with transport.tokens and "
                f"transport.hivemind.initial_peers"
            )
    if is_peer_address(address) != (config.transport.kind == "hivemind"):
        raise ConfigError(
            f"the coordinator's address {address} is not of transport.kind = "
            f'"{config.transport.kind}": give both sites the same kind'
        )
    try:
        if is_peer_address(address):
            parse_peer_address(address)
        else:
            split_candidates(address)
    except ValueError as error:
        raise ConfigError(
            f"the coordinator's address {error}: as `diloco coordinator` printed it"
        ) from error
    return address


def _find_by_name(config: Config, wait_s: float) -> str:
    """Find the coordinator by the run's name; empty where nothing can prove to be it.

    Raises:
        ConfigError: If it is not found.
    """
    security = Security.of(config, Role.ISLAND, config.island_id)
    if security.swarm is None or not security.token:
        return ""
    io = IoThread()
    io.start()
    try:
        return io.run(security.found_by_name(config.run.name, wait_s=wait_s))
    except TransportError as error:
        raise ConfigError(
            f"where is the coordinator? transport.hivemind.initial_peers = "
            f"{', '.join(security.swarm.initial_peers)}: {error}. Is it started (diloco "
            f"coordinator RUN.toml), with the same initial_peers, and its table of tokens of now? "
            f"Or give its multiaddr as it printed it: --coordinator"
        ) from error
    finally:
        io.stop()
