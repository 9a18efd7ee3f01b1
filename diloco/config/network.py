"""The sections of how bytes travel, and of where coordinator and syncer listen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from diloco.config.classes import Local, Named, Needs, Policy, Section
from diloco.config.fields import (
    AutoDeadline,
    Bandwidth,
    Deadline,
    Duration,
    Lifetime,
    Memory,
    OptionalRate,
    Problem,
    Size,
    tuples,
)
from diloco.transport.addresses import is_loopback, split_address
from diloco.transport.libp2p.address import is_peer_address, parse_peer_address

NOT_LOOPBACK = (
    "is not on this machine's loopback, and there are no certificates: make them (diloco certs "
    "init RUN.toml) and set transport.certs, or set transport.insecure = true on a network that "
    "you trust"
)
UNKNOWN_CALLERS = (
    "is not on this machine's loopback, and hivemind encrypts but knows no callers: make tokens "
    "(diloco certs token) and set transport.tokens, or set transport.insecure = true on a network "
    "that you trust"
)
UNKNOWN_PROTECTION = (
    "is not on this machine's loopback, and what the transport of another package protects is not "
    "known: set transport.insecure = true on a network that you trust"
)
OWN_TRANSPORTS = ("grpc", "hivemind")
NO_TOKEN = "is not on this machine's loopback: set metrics_token to a file with a token"


class HivemindConfig(Section):
    """The peer-to-peer network, where `transport.kind` is hivemind."""

    initial_peers: Local[Annotated[tuple[str, ...], BeforeValidator(tuples)]] = Field(
        default=(),
        description="Multiaddrs (/ip4/.../tcp/.../p2p/IDENTITY) of peers through which others are "
        "found, and which relay; the coordinator is always one. With transport.tokens an island "
        "that is given no address finds it through them by the run's name",
    )
    relayed: Annotated[Local[bool], Needs("initial_peers")] = Field(
        default=False,
        description="Whether coordinator and syncer have initial_peers relay calls to them: behind "
        "NAT, where nobody can dial them; a relayed connection is cut after 128 KiB or two "
        "minutes, so payloads go on over many of them, at some 1 Mbit/s in all",
    )
    map_port: Local[bool] = Field(
        default=False,
        description="Whether coordinator and syncer ask their router to forward their ports "
        "(UPnP, NAT-PMP)",
    )

    @field_validator("initial_peers")
    @classmethod
    def _check_peers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for peer in value:
            if not parse_peer_address(peer).routes:
                raise ValueError(f"{peer} does not say where the first peers are: /ip4/.../p2p/...")
        return value


class TransportConfig(Section):
    """How bytes travel."""

    kind: Annotated[Local[str], Named("diloco.transports", OWN_TRANSPORTS)] = Field(
        default="grpc", description="Wire between islands, coordinator and syncer"
    )
    hivemind: HivemindConfig = Field(
        default=HivemindConfig(), description="The peer-to-peer network of kind hivemind"
    )
    certs: Annotated[Local[str], Needs("kind", *OWN_TRANSPORTS)] = Field(
        default="",
        description="Directory of this site's certificates (diloco certs); empty: none, which "
        "loopback needs not",
    )
    tokens: Annotated[Local[str], Needs("kind", *OWN_TRANSPORTS)] = Field(
        default="",
        description="Directory of this site's tokens (diloco certs token); empty: none are asked "
        "for or sent",
    )
    certificate_lifetime: Local[Lifetime] = Field(
        default=Duration("24h"),
        description="How long certificates are valid that coordinator, syncers and islands show to "
        "each other; longer than clocks differ. The coordinator issues them, and none to whom was "
        "revoked",
    )
    insecure: Local[bool] = Field(
        default=False,
        description="Whether unencrypted traffic beyond this machine is accepted; it is warned of, "
        "and without tokens `diloco status` is answered on the coordinator's machine alone",
    )
    link: Local[Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$")]] = Field(
        default="",
        description="Profile of configs/links that shapes the traffic; empty: the real link",
    )
    rate: Annotated[Local[OptionalRate], Needs("kind", *OWN_TRANSPORTS)] = Field(
        default=Bandwidth(""),
        description="Bandwidth that payloads may take together, headers of all kinds included: an "
        "island's, divided evenly among its carriers, or the syncer's; some per cent below the "
        "link's, it keeps queues short and heartbeats quick; empty: what TCP takes",
    )
    snapshot_rate: Annotated[Local[OptionalRate], Needs("kind", *OWN_TRANSPORTS)] = Field(
        default=Bandwidth(""),
        description="The same for whole models, which at all times let payloads of rounds go "
        "first; empty: what those leave",
    )
    payloads: Local[Literal["direct", "bucket"]] = Field(
        default="direct",
        description="How this island's payloads travel: to the syncer and from it, or as objects "
        "of the run's object store (run.state at the coordinator: s3, gs or az), at addresses that "
        "the syncer signs; the island then needs HTTPS and no credentials, and what a version "
        "costs the syncer's line does not grow with the islands",
    )
    channels: Annotated[Local[int | Literal["auto"]], Needs("kind", *OWN_TRANSPORTS)] = Field(
        default="auto",
        description="Connections that carry payloads to a peer; auto: 1 to 16, by the loss that "
        "the kernel counts on them",
    )
    rpc_timeout: Local[Deadline] = Field(
        default=Duration("60s"),
        description="Deadline of one call, besides its payload's time at 1 Mbit/s; a call that "
        "breaks is made again, and one of over 256 KiB goes on where it was",
    )
    unreachable: Local[Deadline] = Field(
        default=Duration("600s"),
        description="Time without coordinator and syncer after which an island stops, and without "
        "coordinator and islands a syncer; at the coordinator, that for which a stop or a cut "
        "waits for an island",
    )

    @field_validator("payloads")
    @classmethod
    def _check_payloads(cls, value: str, info: ValidationInfo) -> str:
        if value == "bucket" and info.data.get("link"):
            raise ValueError("transport.link shapes what goes to the syncer: leave one of them")
        return value

    @field_validator("insecure")
    @classmethod
    def _check_insecure(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("certs"):
            raise ValueError("transport.certs is set, so traffic is encrypted: leave one of them")
        return value

    @field_validator("channels", mode="before")
    @classmethod
    def _check_channels(cls, value: object, info: ValidationInfo) -> object:
        if value != "auto" and not (type(value) is int and 1 <= value <= 64):
            raise ValueError('must be "auto" or a whole number from 1 to 64')
        if info.data.get("kind") == "hivemind" and value not in ("auto", 1):
            raise ValueError("hivemind has one connection to a peer: leave it out")
        return value

    @property
    def open_listener(self) -> str:
        """What is said of a listener beyond this machine; empty: callers there are known."""
        if self.insecure:
            return ""
        if self.kind == "hivemind":
            return "" if self.tokens else UNKNOWN_CALLERS
        if self.kind not in OWN_TRANSPORTS:
            return UNKNOWN_PROTECTION
        return "" if self.certs else NOT_LOOPBACK

    @property
    def num_channels(self) -> int:
        """Connections for payloads; 0: chosen by the loss."""
        return 0 if self.channels == "auto" else self.channels


_MOST_PORT = 65535
_ANY_HOST = ("0.0.0.0", "[::]")
#: Processes on one machine, each with a core for its rounds.
MOST_SYNCERS = 64


class CoordinatorConfig(Section):
    """Where coordinator and syncers listen, and what they keep."""

    listen: Local[str] = Field(
        default="127.0.0.1:0",
        description="HOST:PORT of the coordinator; port 0: any free one, then kept",
    )
    syncer_listen: Local[str] = Field(
        default="127.0.0.1:0", description="HOST:PORT of the syncer it starts; port 0: any free one"
    )
    num_syncers: Local[int] = Field(
        default=1,
        ge=1,
        le=MOST_SYNCERS,
        description="Syncers that it starts, and spreads the fragments over: the loss of one "
        "stalls its fragments only. Each listens one port behind the one before it. It cannot be "
        "changed in the life of a run",
    )
    address: Local[str] = Field(
        default="",
        description="HOST:PORT at which islands reach the coordinator, or several, separated by "
        "commas, that they try in order, or its multiaddr (hivemind); empty: from state_dir, or "
        "for an island by the run's name, see transport.hivemind.initial_peers",
    )
    syncer_address: Local[str] = Field(
        default="",
        description="HOST:PORT at which islands reach the syncer, or several; empty: the hosts of "
        "address, if any, and the port it listens on; port 0: that port",
    )
    state_dir: Local[str] = Field(
        min_length=1, description="Directory of journal, records and logs; survives restarts"
    )
    lease: Policy[AutoDeadline] = Field(
        default=Duration("auto"),
        description="Time without a word after which an island counts as lost; auto: 10s with "
        "outer.merge on_arrival, where nobody waits for it, else 5min",
    )
    spool_memory: Local[Memory] = Field(
        default=Size("1GiB"),
        description="Contributions that a syncer keeps in memory until their rounds close, beyond "
        "it on disk; as much again, at least 64 MiB, may be arriving. While more than that may "
        "come at once, of all members of the open rounds, each lane costs a round trip more: it is "
        "sent when it is its turn",
    )

    @field_validator("listen", "syncer_listen", "address", "syncer_address")
    @classmethod
    def _check_address(cls, value: str, info: ValidationInfo) -> str:
        is_bind = info.field_name in ("listen", "syncer_listen")
        if not is_bind and is_peer_address(value):
            parse_peer_address(value)
            return value
        for address in [value] if is_bind else value.split(",") if value else []:
            host_of(address.strip())
        return value


class SyncerConfig(Section):
    """A syncer on a machine of its own: `diloco syncer RUN.toml --name NAME` there."""

    listen: Local[str] = Field(
        default="127.0.0.1:0",
        description="HOST:PORT of this syncer; port 0: any free one, then kept",
    )
    address: Local[str] = Field(
        default="",
        description="HOST:PORT at which islands reach it, or several, separated by commas, that "
        "they try in order; port 0: the one it listens on; empty: what it listens on. Over libp2p "
        "its identity is added",
    )
    share: Local[float] = Field(
        default=1.0,
        gt=0,
        le=1e6,
        description="Part of the model that it has, in proportion to the shares of the others, by "
        "the coordinator's file; decided with the first join, and for good",
    )

    @field_validator("listen", "address")
    @classmethod
    def _check_address(cls, value: str, info: ValidationInfo) -> str:
        for address in value.split(",") if value else []:
            host_of(address.strip())
        if info.field_name == "listen":
            host_of(value)
        return value


def placed_problems(
    value: Mapping[str, SyncerConfig],
    transport: TransportConfig | None,
    num_fragments: int,
    state: str,
) -> Iterator[Problem]:
    """Name what syncers on machines of their own lack, or cannot be."""
    if not value:
        return
    names = ", ".join(sorted(value))
    first = names.partition(",")[0]
    if not state:
        yield (
            first,
            names,
            (
                "needs run.state: each keeps what is durable in the run's object store, so that "
                "another machine can take its place; set it (file:///PATH for a trial)"
            ),
        )
    if len(value) > min(num_fragments, MOST_SYNCERS):
        text = f"{len(value)} of them, each serves whole fragments, and outer.num_fragments = "
        yield first, names, f"{text}{num_fragments}; at most {MOST_SYNCERS}"
    if transport is None:
        return
    if message := transport.open_listener:
        for name, each in sorted(value.items()):
            for key in beyond_loopback(each, ["listen"]):
                yield f"{name}.{key}", each.listen, message


def own_syncer_problems(value: CoordinatorConfig) -> list[Problem]:
    """Name what is said of syncers that the coordinator does not start: others have tables."""
    keys = ("num_syncers", "syncer_listen", "syncer_address")
    said = [key for key in keys if getattr(value, key) != type(value).model_fields[key].default]
    message = "the coordinator starts no syncer, as there are tables [syncers.NAME]: leave it out"
    return [(key, getattr(value, key), message) for key in said]


def syncer_problems(value: CoordinatorConfig, num_fragments: int) -> Iterator[Problem]:
    """Name what several syncers cannot be, and where they cannot listen."""
    if (num_syncers := value.num_syncers) == 1:
        return
    if num_syncers > num_fragments:
        message = f"each serves whole fragments, and outer.num_fragments = {num_fragments}"
        yield "num_syncers", num_syncers, message
    if is_peer_address(value.syncer_address):
        message = f"names one peer, and each of {num_syncers} syncers is another: give HOST:PORT"
        yield "syncer_address", value.syncer_address, message
        return
    for address in filter(None, value.syncer_address.split(",")):
        if message := _beyond_ports(address.strip(), num_syncers):
            yield "syncer_address", value.syncer_address, message


def port_problems(listeners: Iterable[tuple[str, str, int]]) -> Iterator[Problem]:
    """Name those listeners of one machine that have no port, or that of another one before them.

    Args:
        listeners: Dotted key, HOST:PORT (empty: nowhere) and number of each: so many listen there
            and at the ports behind. Port 0 is drawn, and nobody's.
    """
    taken: list[tuple[str, str, range]] = []
    for key, address, number in listeners:
        if not address:
            continue
        host, port = split_address(address)
        name, ports = key.rpartition(".")[2], range(port, port + number if port else port)
        if message := _beyond_ports(address, number):
            yield name, address, message
        for other_host, other, theirs in taken:
            is_shared = host == other_host or not {host, other_host}.isdisjoint(_ANY_HOST)
            if is_shared and (both := sorted({*ports}.intersection(theirs))):
                whose = f"{number} syncers have {ports[0]} to {ports[-1]}; " if number > 1 else ""
                yield name, address, f"{whose}port {both[0]} is {other}'s too: give it another one"
        taken.append((host, key, ports))


def _beyond_ports(address: str, number: int) -> str:
    _, port = split_address(address)
    if not port or port + number - 1 <= _MOST_PORT:
        return ""
    last = f"the last of {number} syncers has port {port + number - 1}"
    return f"{last}; {_MOST_PORT} is the highest"


def host_of(address: str) -> str:
    """Give the host of HOST:PORT."""
    try:
        host, _ = split_address(address)
    except ValueError:
        raise ValueError('must be HOST:PORT, such as "127.0.0.1:0", port 0 to 65535') from None
    return host


def beyond_loopback(section: Section, names: Sequence[str]) -> list[str]:
    """Give those fields of a section whose HOST:PORT other machines reach."""
    addresses = {name: getattr(section, name) for name in names}
    return [n for n, address in addresses.items() if address and not is_loopback(host_of(address))]
