"""Facts of a site: `machine_facts` measures them, `diagnosis` judges them. No IO."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TcpFacts:
    """The kernel's TCP, as a new connection of this process gets it.

    Attributes:
        congestion_control: Algorithm of a sender.
        available: Algorithms that are loaded.
        slow_start_after_idle: Whether a connection begins slowly again after a pause.
        send_bytes: Largest send buffer.
        receive_bytes: Largest receive buffer.
        mtu_probing: net.ipv4.tcp_mtu_probing: 0 never, 1 after a black hole, 2 always.
    """

    congestion_control: str
    available: tuple[str, ...]
    slow_start_after_idle: bool
    send_bytes: int
    receive_bytes: int
    mtu_probing: int


@dataclass(frozen=True, slots=True)
class PathFacts:
    """The way to one address of coordinator or syncer.

    Attributes:
        address: HOST:PORT.
        error: Why no connection was made; empty: one was.
        rtt_s: Round trip, of the handshake.
        congestion_control: Algorithm on this route; a route may have its own.
        mtu_bytes: What the kernel takes for the longest packet.
        answered_bytes: Longest unfragmented echo request that was answered; 0: none was.
    """

    address: str
    error: str = ""
    rtt_s: float = 0.0
    congestion_control: str = ""
    mtu_bytes: int = 0
    answered_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CallFacts:
    """A call to the coordinator, with this site's certificates and tokens.

    Attributes:
        address: Where it went.
        error: Why there was no answer; empty: there was one.
        clock_s: How far this clock is ahead of the coordinator's.
        uncertain_s: By how much `clock_s` may be off: half of the call's duration.
        syncers: Where islands are told that each syncer is, empty if that is not known yet; none:
            not asked.
    """

    address: str
    error: str = ""
    clock_s: float = 0.0
    uncertain_s: float = 0.0
    syncers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PortFacts:
    """A port that this site's processes listen at.

    Attributes:
        key: Key of the run file.
        address: HOST:PORT.
        error: Why it cannot be bound; empty: it can.
        is_ours: Whether a process of this very run holds it.
    """

    key: str
    address: str
    error: str = ""
    is_ours: bool = False


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """What one identity of this site shows to others.

    Attributes:
        short: Identity, such as island/eu.
        directory: Where its files lie.
        error: Why they cannot be used; empty: they can.
        days_left: Until the certificate expires.
    """

    short: str
    directory: str
    error: str = ""
    days_left: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """By what token one identity of this site calls, and whose tokens it knows if it is called.

    Attributes:
        short: Identity, such as island/eu.
        directory: Where its files lie.
        error: Why they cannot be used; empty: they can.
    """

    short: str
    directory: str
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was found out at a site; what does not apply is empty.

    Attributes:
        tcp: The kernel's TCP; None: this system does not say.
        is_clock_kept: Whether something keeps this clock right (NTP); None: not said.
        insecure: Whether the run file declares its network trusted.
        certificates: Of every identity of this site.
        tokens: Of every identity of this site.
        is_libp2p: Whether the run goes over libp2p, which encrypts and knows no certificates.
        ports: That this site's processes listen at.
        coordinator: Its address, as far as it is known.
        paths: To every address of the coordinator; over libp2p those without a relay.
        call: To the coordinator.
        asks_syncer: Whether this site's processes call a syncer.
        syncer_paths: To every address of each of `call.syncers`; as `paths`.
    """

    tcp: TcpFacts | None = None
    is_clock_kept: bool | None = None
    insecure: bool = False
    certificates: tuple[CertificateFacts, ...] = ()
    tokens: tuple[TokenFacts, ...] = ()
    is_libp2p: bool = False
    ports: tuple[PortFacts, ...] = ()
    coordinator: str = ""
    paths: tuple[PathFacts, ...] = ()
    call: CallFacts | None = None
    asks_syncer: bool = False
    syncer_paths: tuple[tuple[PathFacts, ...], ...] = ()

    @property
    def reached(self) -> list[PathFacts]:
        """The ways on which a connection was made."""
        return [path for path in self.all_paths if not path.error]

    @property
    def all_paths(self) -> tuple[PathFacts, ...]:
        """The ways to the coordinator, and to every syncer."""
        return (*self.paths, *(path for paths in self.syncer_paths for path in paths))

    @property
    def is_proxied(self) -> bool:
        """Whether the coordinator answers though no address of it is reached: by grpc_proxy."""
        is_answered = self.call is not None and not self.call.error
        is_dialled = bool(self.paths) and not self.is_libp2p  # which ignores grpc_proxy
        return is_answered and is_dialled and all(path.error for path in self.paths)

    def as_dict(self) -> dict[str, Any]:
        """Give them as JSON values, hence `Any`."""
        return asdict(self)
