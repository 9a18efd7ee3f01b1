"""Measures a site: its kernel's TCP, the routes out, clock, ports, certificates, tokens.

Reads and tries; judges nothing (`diagnosis` does). Every wait has an end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.config.schema import Config
from diloco.coordinator.status import ask_run_state
from diloco.doctor.site_facts import (
    CallFacts,
    CertificateFacts,
    Facts,
    PathFacts,
    PortFacts,
    TcpFacts,
    TokenFacts,
)
from diloco.durable import read_json
from diloco.errors import ConfigError, CoordinatorUnavailable
from diloco.protos.control_pb2 import ClockReply, ClockRequest
from diloco.security.address import find_coordinator, of_syncer
from diloco.security.security import Security
from diloco.state_dir import StateDir, holder, read_endpoint
from diloco.transport.addresses import is_loopback, split_address, split_candidates
from diloco.transport.contracts import PROTOCOL_VERSION
from diloco.transport.errors import TransportError
from diloco.transport.identity import Identity, Role
from diloco.transport.libp2p.address import is_peer_address, is_relayed_route, parse_peer_address
from diloco.transport.security.certificates import CertificateError
from diloco.transport.security.tls import Tls

#: Seconds for which a coordinator is looked for by the name of its run.
_FIND_S = 10.0
_PARAMETERS = Path("/proc/sys/net/ipv4")
_CONNECT_S, _CALL_S, _PING_S = 5.0, 10.0, 0.5
#: Sizes below the device's that tunnels leave.
_PACKET_BYTES = (1500, 1492, 1450, 1420, 1380, 1280, 1200, 576)
#: adjtimex(2): the kernel's word that nobody keeps the clock.
_TIME_ERROR, _TIMEX_BYTES = 5, 512


@dataclass(frozen=True, slots=True)
class _Ping:
    """How one IP version asks for an echo that may not be fragmented (linux/in.h, in6.h)."""

    protocol: int
    level: int
    discover: int
    mtu: int
    header_bytes: int  # IP and ICMP
    lowest_bytes: int  # that every path carries
    request: int
    reply: int


_PROBE_ONLY_WHOLE = 2  # IP_PMTUDISC_DO, IPV6_PMTUDISC_DO
_PINGS = {
    socket.AF_INET: _Ping(socket.IPPROTO_ICMP, socket.IPPROTO_IP, 10, 14, 28, 576, 8, 0),
    socket.AF_INET6: _Ping(socket.IPPROTO_ICMPV6, socket.IPPROTO_IPV6, 23, 24, 48, 1280, 128, 129),
}


def read_tcp() -> TcpFacts | None:
    """Read what the kernel does with new connections of this thread's network; None: not Linux."""
    try:
        values = {
            name: (_PARAMETERS / name).read_text().split()
            for name in (
                "tcp_available_congestion_control",
                "tcp_slow_start_after_idle",
                "tcp_wmem",
                "tcp_rmem",
                "tcp_mtu_probing",
            )
        }
        with socket.socket() as fresh:
            algorithm = _congestion_control(fresh)
    except OSError:
        return None
    return TcpFacts(
        congestion_control=algorithm,
        available=tuple(values["tcp_available_congestion_control"]),
        slow_start_after_idle=values["tcp_slow_start_after_idle"] != ["0"],
        send_bytes=int(values["tcp_wmem"][2]),
        receive_bytes=int(values["tcp_rmem"][2]),
        mtu_probing=int(values["tcp_mtu_probing"][0]),
    )


def are_local(address: str) -> bool:
    """Whether only this machine's loopback is meant by an address of a peer, or several."""
    hosts = _hosts_of(address, with_relays=True)
    return all(is_loopback(split_address(host)[0]) for host in hosts)


def gather(config: Config | None, *, coordinator: str = "") -> Facts:
    """Find out everything about this site.

    Args:
        config: The run, with `island_id` where this is the site of an island; else it is the
            coordinator's. None: only the machine is looked at.
        coordinator: Its address, if it is not that of the run file.
    """
    if config is None:
        return Facts(tcp=read_tcp(), is_clock_kept=_is_clock_kept())
    try:
        address = find_coordinator(config, coordinator, wait_s=_FIND_S)
    except ConfigError:
        if config.island_id:
            raise
        address = ""  # of a coordinator that was never started: this is its site
    call = None
    if address and (config.island_id or _is_running(config)):
        call = _try_call(config, address)
    else:
        address = ""
    syncers = call.syncers if call is not None else ()
    return Facts(
        tcp=read_tcp(),
        is_clock_kept=_is_clock_kept(),
        insecure=config.transport.insecure,
        certificates=tuple(_certificates(config)),
        tokens=tuple(_tokens(config)),
        is_libp2p=config.transport.kind == "hivemind",
        ports=tuple(_ports(config)),
        coordinator=address,
        paths=tuple(map(try_path, _hosts_of(address))),
        call=call,
        asks_syncer=bool(config.island_id),
        syncer_paths=tuple(tuple(map(try_path, _hosts_of(syncer))) for syncer in syncers),
    )


def _is_running(config: Config) -> bool:
    lock = StateDir(Path(config.coordinator.state_dir)).coordinator_lock
    return lock.exists() and holder(lock) is not None


def _hosts_of(address: str, *, with_relays: bool = False) -> list[str]:
    """Give the HOST:PORT that lead to a server, or to its relays; none where it is unknown."""
    if not address:
        return []
    if not is_peer_address(address):
        return split_candidates(address)
    hosts = []
    for route in parse_peer_address(address).routes:
        if is_relayed_route(route) and not with_relays:
            continue
        parts = route.split("/")
        if parts[1:2] and parts[1] in ("ip4", "ip6", "dns4", "dns6", "dns") and "tcp" in parts:
            host = f"[{parts[2]}]" if parts[1] == "ip6" else parts[2]
            hosts.append(f"{host}:{parts[parts.index('tcp') + 1]}")
    return hosts


def try_path(address: str) -> PathFacts:
    """Connect to one address, and probe the longest packet on the route."""
    host, port = split_address(address)
    began = time.monotonic()
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        family, _, _, _, place = found[0]
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(_CONNECT_S)
            began = time.monotonic()
            connection.connect(place)
            rtt_s = time.monotonic() - began
            algorithm = _congestion_control(connection)
    except socket.gaierror as error:
        return PathFacts(address, error=f"the name does not resolve ({error.strerror})")
    except OSError as error:
        waited = f" after {time.monotonic() - began:.1f} s"
        return PathFacts(address, error=f"{error.strerror or error}{waited}")
    mtu_bytes, answered_bytes = _probe_mtu(family, place, rtt_s)
    return PathFacts(
        address=address,
        rtt_s=rtt_s,
        congestion_control=algorithm,
        mtu_bytes=mtu_bytes,
        answered_bytes=answered_bytes,
    )


def _congestion_control(connection: socket.socket) -> str:
    """Ask for the algorithm of a connection; empty where the system does not say (macOS)."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return ""
    text = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return text.rstrip(b"\0").decode()


def _probe_mtu(family: socket.AddressFamily, place: Any, rtt_s: float) -> tuple[int, int]:
    """Send echo requests that may not be fragmented, from the longest down.

    `place` is an address as getaddrinfo gives it, hence any.

    Returns:
        What the kernel takes for the longest packet afterwards (routers that refuse longer ones
        have told it by then), and the longest that was answered, 0 without any answer.
    """
    ping, mtu_bytes = _PINGS[family], 0
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as known:
            known.connect(place)
            mtu_bytes = known.getsockopt(ping.level, ping.mtu)
            with _echo_socket(family) as echo:
                echo.setsockopt(ping.level, ping.discover, _PROBE_ONLY_WHOLE)
                echo.connect((place[0], 0, *place[2:]))
                sizes = [mtu_bytes]
                if not is_loopback(place[0]):
                    sizes += [n for n in _PACKET_BYTES if ping.lowest_bytes <= n < mtu_bytes]
                longest = max(_answered(echo, sizes, rtt_s), default=0)
            return known.getsockopt(ping.level, ping.mtu), longest
    except OSError:  # neither raw nor ping sockets are allowed to us
        return mtu_bytes, 0


def _echo_socket(family: socket.AddressFamily) -> socket.socket:
    """Open a socket for echo requests: the kernel's own kind, or a raw one."""
    try:
        return socket.socket(family, socket.SOCK_DGRAM, _PINGS[family].protocol)
    except PermissionError:
        return socket.socket(family, socket.SOCK_RAW, _PINGS[family].protocol)


def _answered(echo: socket.socket, sizes: Sequence[int], rtt_s: float) -> set[int]:
    """Send an echo request of every length, twice, and see which are answered."""
    ping = _PINGS[echo.family]
    answered: set[int] = set()
    for _ in range(2):
        for number, size in enumerate(sizes):
            # What comes at once is an error: the kernel knows by now that it is too long.
            with contextlib.suppress(OSError):
                echo.send(_echo_request(ping.request, number, size - ping.header_bytes))
        until = time.monotonic() + _PING_S + 2 * rtt_s
        while 0 not in answered and (left := until - time.monotonic()) > 0:
            if select.select([echo], [], [], left)[0]:
                with contextlib.suppress(OSError):  # such as a router's word: too long
                    answered.add(_answered_number(echo, ping.reply))
    return {size for number, size in enumerate(sizes) if number in answered}


def _answered_number(echo: socket.socket, reply: int) -> int:
    """Read an answer: the number that the request bore; -1 if it is something else."""
    answer = echo.recv(1 << 17)
    # Raw sockets of IPv4 alone show the header of IP.
    has_header = echo.type == socket.SOCK_RAW and echo.family == socket.AF_INET
    start = 4 * (answer[0] & 0x0F) if has_header else 0
    kind, _, _, _, number = struct.unpack_from("!BBHHH", answer, start)
    return int(number) if kind == reply else -1


def _echo_request(kind: int, number: int, num_bytes: int) -> bytes:
    """Write an echo request; the checksum is IPv4's, the kernel writes that of IPv6 itself."""
    body = struct.pack("!BBHHH", kind, 0, 0, os.getpid() & 0xFFFF, number) + bytes(num_bytes)
    total = sum(struct.unpack("!4H", body[:8]))
    total = (total & 0xFFFF) + (total >> 16)
    return body[:2] + struct.pack("!H", ~total & 0xFFFF) + body[4:]


def _try_call(config: Config, address: str) -> CallFacts:
    """Ask the coordinator what time it is, as this site's process would call it.

    An island also asks where the syncers are.
    """
    role = Role.ISLAND if config.island_id else Role.SYNCER
    try:
        security = Security.of(config, role, config.island_id).knowing(address)
        return asyncio.run(_ask(security, address, config.island_id))
    except ConfigError as error:
        return CallFacts(address, error=str(error))


async def _ask(security: Security, address: str, island: str) -> CallFacts:
    transport = security.transport(address, Role.COORDINATOR)
    request = ClockRequest(protocol_version=PROTOCOL_VERSION).SerializeToString()
    try:
        # The first call makes the connection; the second is as fast as the path.
        await transport.call("control.clock", request, deadline_s=_CALL_S)
        began = time.time()
        reply = await transport.call("control.clock", request, deadline_s=_CALL_S)
        took_s = time.time() - began
        syncers = (await ask_run_state(transport, island)).syncer_addresses if island else ()
    except TransportError as error:
        return CallFacts(address, error=str(error))
    except CoordinatorUnavailable as error:
        return CallFacts(address, error=str(error.__cause__))
    finally:
        await transport.close()
    theirs = ClockReply.FromString(reply.header).unix_s
    return CallFacts(
        address, clock_s=began + took_s / 2 - theirs, uncertain_s=took_s / 2, syncers=tuple(syncers)
    )


def _is_clock_kept() -> bool | None:
    """Ask the kernel whether its clock is kept right; None: it does not say."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(
            ctypes.create_string_buffer(_TIMEX_BYTES)
        )
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR


def _identities(config: Config) -> list[Identity]:
    """Give those of this site's processes."""
    run = config.run.name
    if config.island_id:
        return [Identity(run, Role.ISLAND, config.island_id)]
    return [Identity(run, role) for role in (Role.COORDINATOR, Role.SYNCER)]


def _certificates(config: Config) -> Iterator[CertificateFacts]:
    directory = config.transport.certs
    for identity in _identities(config) if directory else ():
        if identity.role is Role.SYNCER:  # it has the coordinator's
            continue
        try:
            left = Tls(Path(directory), identity).days_left
        except CertificateError as error:
            yield CertificateFacts(identity.short, directory, error=str(error))
        else:
            yield CertificateFacts(identity.short, directory, days_left=left)


def _tokens(config: Config) -> Iterator[TokenFacts]:
    directory = config.transport.tokens
    for identity in _identities(config) if directory else ():
        error = ""
        try:
            Security.open(identity, certs="", tokens=directory)
        except ConfigError as refusal:
            error = str(refusal)
        yield TokenFacts(identity.short, directory, error)


def _ports(config: Config) -> Iterator[PortFacts]:
    """Try every port that this site's processes listen at; port 0 is the one drawn before."""
    state = StateDir(Path(config.coordinator.state_dir))
    for key, address, before, lock in _listeners(config, state):
        if not address:
            continue
        host, port = split_address(address)
        if port == 0 and before and not is_peer_address(before):
            address = f"{host}:{split_address(before)[1]}"
        error = _bind_error(address)
        is_held = bool(error) and lock.exists() and holder(lock) is not None
        yield PortFacts(key, address, error, is_held)


def _listeners(config: Config, state: StateDir) -> Iterator[tuple[str, str, str, Path]]:
    """Give key and value of every address, the one bound before, and what its owner locks."""
    chosen, telemetry = config.coordinator, config.telemetry
    if config.island_id:
        return
    earlier, lock = read_endpoint(state.coordinator), state.coordinator_lock
    yield "coordinator.listen", chosen.listen, earlier.address if earlier else "", lock
    yield "telemetry.coordinator_metrics", telemetry.coordinator_metrics, "", lock
    for each in state.of_syncers(config.own_syncers):
        listens = of_syncer(chosen.syncer_listen, each.syncer_id)
        yield "coordinator.syncer_listen", listens, _bound(each), each.store_lock
        metrics = of_syncer(telemetry.syncer_metrics, each.syncer_id)
        yield "telemetry.syncer_metrics", metrics, "", each.store_lock


def _bound(state: StateDir) -> str:
    return str(read_json(state.bound) or "")


def _bind_error(address: str) -> str:
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        for family, _, _, _, place in found:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
                probe.listen(1)  # a listener of somebody's shows only here
    except OSError as error:
        return str(error.strerror or error)
    return ""
