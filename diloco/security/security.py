"""The credentials of one process, and those it asks of others: certificates, tokens or none.

Between machines there is TLS with certificates at both ends, unless `transport.insecure` says that
the network is trusted; on loopback nothing is needed. One place decides this for every server and
every client of the product.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from diloco.config.network import OWN_TRANSPORTS
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.extensions import extension, load
from diloco.security.run_ca import read_revoked
from diloco.telemetry.protection import Protection
from diloco.transport.addresses import is_loopback, split_address, split_candidates
from diloco.transport.calls.limits import Limits
from diloco.transport.contracts import Handlers, Server, Transport, TransportKind
from diloco.transport.framing import DEFAULT_CHUNK_BYTES
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.grpc.wire import ISSUE_METHOD
from diloco.transport.identity import SERVERS, Identity, Role
from diloco.transport.libp2p.address import is_peer_address
from diloco.transport.libp2p.client import HivemindTransport
from diloco.transport.libp2p.daemon import HivemindMissing, Swarm, daemon_path
from diloco.transport.libp2p.rendezvous import find_by_name
from diloco.transport.libp2p.server import HivemindServer
from diloco.transport.security.tls import LIFETIME_S, Tls
from diloco.transport.security.tokens import TABLE_FILE, TokenTable, read_token
from diloco.transport.shaping.pacing import Pacer
from diloco.transport.tcp_counters import can_count

logger = logging.getLogger(__name__)

_ISSUE_S = 20.0

INSECURE_WARNING = (
    "transport.insecure = true: traffic between the sites is not encrypted, and anyone who reaches "
    "the ports can read and change it; make certificates instead: diloco certs init RUN.toml"
)


@dataclass(frozen=True, slots=True)
class Security:
    """One process's part. The defaults are those of a run on loopback."""

    tls: Tls | None = None
    token: str = field(default="", repr=False)
    tokens: TokenTable | None = None
    insecure: bool = False
    swarm: Swarm | None = None
    key: Path | None = None
    run: str = ""  # as whose coordinator this process lets itself be found
    added: TransportKind | None = None  # of another package, in the place of gRPC
    pacer: Pacer = field(default_factory=Pacer, compare=False)  # of all payloads of this process

    @classmethod
    def of(cls, config: Config, role: Role, island: str = "", *, syncer: str = "") -> Security:
        """Read the files that the run file names.

        Args:
            config: The run.
            role: What this process is.
            island: Of which island, for a role of islands.
            syncer: Name of the syncer, for that role: each is a libp2p peer of its own.

        Raises:
            ConfigError: If a file is missing or cannot be used; says what to type.
        """
        transport, chosen = config.transport, config.transport.hivemind
        security = cls.open(
            Identity(config.run.name, role, island),
            certs=transport.certs,
            tokens=transport.tokens,
            insecure=transport.insecure,
            lifetime_s=transport.certificate_lifetime.seconds,
        )
        pacer = Pacer(transport.rate.bps, transport.snapshot_rate.bps)
        security = replace(security, pacer=pacer, added=added_transport(transport.kind))
        if transport.kind != "hivemind":
            return security
        swarm = Swarm(
            initial_peers=chosen.initial_peers,
            is_relayed=chosen.relayed,
            maps_port=chosen.map_port,
        )
        stem = syncer or Identity(config.run.name, role, island).file_stem
        key = Path(config.coordinator.state_dir).absolute() / f"{stem}.p2p-key"
        run = config.run.name if role is Role.COORDINATOR else ""
        return replace(security, swarm=swarm, key=key, run=run)

    def knowing(self, coordinator: str) -> Security:
        """Find others through the coordinator, too, where its address is not empty.

        It issues the certificates that this process shows to others.
        """
        if not coordinator:
            return self
        if self.tls is not None:
            self.tls.ask = functools.partial(self._issued, coordinator)
        if self.swarm is None:
            return self
        peers = (coordinator, *self.swarm.initial_peers)
        return replace(self, swarm=replace(self.swarm, initial_peers=peers))

    async def _issued(self, coordinator: str, request: bytes) -> bytes:
        way = self.transport(coordinator, Role.COORDINATOR)
        try:
            return (await way.call(ISSUE_METHOD, request, deadline_s=_ISSUE_S)).header
        finally:
            await way.close()

    def one_of(self, num_processes: int) -> Security:
        """Take an equal part of the rates, which that many processes share."""
        rates = (self.pacer.rate_bps, self.pacer.bulk_rate_bps)
        return replace(self, pacer=Pacer(*(rate / num_processes for rate in rates)))

    def within_site(self) -> Security:
        """Leave the rates aside, for ways on which nothing leaves the site."""
        return replace(self, pacer=Pacer())

    @classmethod
    def open(
        cls,
        identity: Identity,
        *,
        certs: str,
        tokens: str = "",
        insecure: bool = False,
        lifetime_s: float = LIFETIME_S,
    ) -> Security:
        """Read the files of one identity; an empty run means that of the certificates.

        What is issued here lasts for `lifetime_s` seconds.

        Raises:
            ConfigError: If a file is missing or cannot be used; says what to type.
        """
        if insecure:
            logger.warning("%s", INSECURE_WARNING)
        # Syncers have the coordinator's file.
        holder = Role.COORDINATOR if identity.role in SERVERS else identity.short
        try:
            tls = Tls(Path(certs), identity, lifetime_s=lifetime_s) if certs else None
        except ValueError as error:
            raise ConfigError(
                f"transport.certs = {certs}: {error}. What there is: diloco certs show --dir "
                f"{certs}, where the CA is; a missing one: diloco certs issue {holder}; one that "
                f"is not valid: diloco certs rotate {holder}"
            ) from error
        if tls is not None and identity.role is Role.COORDINATOR:
            tls.is_revoked = read_revoked(Path(certs)).__contains__
        serves = identity.role in SERVERS
        calls = identity.role is not Role.COORDINATOR
        try:
            table = TokenTable(Path(tokens) / TABLE_FILE) if tokens and serves else None
            token_file = Path(tokens) / f"{identity.file_stem}.token"
            token = read_token(token_file) if tokens and calls else ""
        except ValueError as error:
            raise ConfigError(
                f"transport.tokens = {tokens}: {error}. Make it where the CA is: diloco certs "
                f"token {identity.short}"
            ) from error
        return cls(tls, token, table, insecure)

    def transport(
        self,
        address: str,
        expects: Role,
        *,
        channels: int = 1,
    ) -> Transport:
        """Make the way to a server.

        Args:
            address: HOST:PORT, or several to be tried in order; or the multiaddr of a libp2p peer,
                which is always encrypted and proves who it is.
            expects: What the server must prove to be, where there are certificates.
            channels: Connections among which calls are dealt; 0: chosen by the loss, where the
                system counts it. libp2p has one, another package's transport its own.

        Raises:
            ConfigError: If it is beyond this machine, and neither certificates nor a declaration
                are there. Or if hivemind is needed, and not installed.
        """
        if is_peer_address(address):
            _check_hivemind()
            return HivemindTransport(
                address,
                self.swarm or Swarm(),
                token=self.token,
                pacer=self.pacer,
            )
        hosts = [split_address(candidate)[0] for candidate in split_candidates(address)]
        is_local = all(is_loopback(host) for host in hosts)
        if not (self.tls or self.insecure or is_local):
            raise ConfigError(
                f"{address} is beyond this machine, and traffic would not be encrypted: set "
                f"transport.certs (--certs) to the directory of this site's certificates, or "
                f"transport.insecure = true (--insecure) on a network that you trust"
            )
        if self.added is not None:
            return self.added.connect(address, chunk_bytes=DEFAULT_CHUNK_BYTES)
        if channels == 0 and not can_count():
            logger.warning('transport.channels = "auto": this system counts no losses, so it is 1')
            channels = 1
        return GrpcTransport(
            address,
            channels=channels,
            pacer=self.pacer,
            tls=self.tls,
            expects=expects,
            token=self.token,
            proxy="" if is_local else _proxy(),
        )

    async def found_by_name(self, run: str, *, wait_s: float) -> str:
        """Return the address of who proves to be a run's coordinator; it needs swarm and token.

        Raises:
            TransportError: If nobody does within `wait_s` seconds.
            ConfigError: If hivemind is not installed.
        """
        assert self.swarm is not None and self.token, "asked for where nothing can be proven"
        _check_hivemind()
        return await find_by_name(run, self.token, self.swarm, wait_s=wait_s)

    def server(self, bind: str, handlers: Handlers, *, limits: Limits) -> Server:
        """Make a server, over libp2p where the run file says so.

        Args:
            bind: HOST:PORT.
            handlers: Coroutines by method name.
            limits: What is borne from callers.

        Raises:
            ConfigError: If hivemind is needed, and not installed; or if it cannot listen there.
        """
        if self.added is not None:
            return self.added.serve(bind, handlers, chunk_bytes=DEFAULT_CHUNK_BYTES)
        if self.swarm is None or self.key is None:
            return GrpcServer(
                bind,
                handlers,
                tls=self.tls,
                tokens=self.tokens,
                insecure=self.insecure,
                limits=limits,
                pacer=self.pacer,
            )
        _check_hivemind()
        try:
            return HivemindServer(
                bind,
                handlers,
                identity=self.key,
                swarm=self.swarm,
                tokens=self.tokens,
                run=self.run,
                limits=limits,
                pacer=self.pacer,
            )
        except ValueError as error:
            raise ConfigError(f"coordinator.listen, coordinator.syncer_listen: {error}") from error


def added_transport(kind: str) -> TransportKind | None:
    """Return what another package adds under this name; None for a kind of diloco itself.

    Raises:
        ConfigError: If there is nothing of that name, or more than one thing, or it is no
            `TransportKind`.
    """
    added = extension("diloco.transports", kind, OWN_TRANSPORTS)
    if added is None:
        return None
    found = load(added)
    if lacking := [name for name in ("connect", "serve") if not hasattr(found, name)]:
        raise ConfigError(
            f"the {added} cannot be used: it has no {' and no '.join(lacking)} "
            f"(diloco.transport.contracts.TransportKind says what one is)"
        )
    return cast(TransportKind, found)


def _proxy() -> str:
    """Return the proxy that the environment asks for; empty: none.

    Raises:
        ConfigError: If it is none that gRPC understands: that would go past it in silence.
    """
    # gRPC's own name for it; other variables of proxies are left alone.
    proxy = os.environ.get("grpc_proxy", "")  # noqa: SIM112
    try:
        parts = urlsplit(proxy)
        is_good = parts.scheme == "http" and parts.hostname and parts.port
        is_good = is_good and parts.path in ("", "/") and not any(map(str.isspace, proxy))
    except ValueError:
        is_good = False
    if proxy and not is_good:
        raise ConfigError(  # without the value: it may hold a password
            "the environment's grpc_proxy is not http://[user:password@]HOST:PORT: correct it, or "
            "leave it out (unset grpc_proxy)"
        )
    return proxy


def _check_hivemind() -> None:
    try:
        daemon_path()
    except HivemindMissing as error:
        raise ConfigError(f'transport.kind = "hivemind": {error}') from error


def metrics_protection(config: Config, security: Security) -> Protection:
    """Give what a server of metrics asks for and shows.

    Raises:
        ConfigError: If `telemetry.metrics_token` cannot be read.
    """
    chosen, tls = config.telemetry.metrics_token, security.tls
    try:
        token = read_token(Path(chosen)) if chosen else ""
    except ValueError as error:
        raise ConfigError(f"telemetry.metrics_token = {chosen}: {error}") from error
    return Protection(token, None if tls is None else lambda: tls.leaf_pem)
