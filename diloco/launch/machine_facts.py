"""What a site is like: its kernel's TCP, the way to the coordinator, clock, ports, certificates.

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
from pathlib import Path

from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.launch.address import find_coordinator
from diloco.launch.diagnosis import (
    CallFacts,
    CertificateFacts,
    Facts,
    PathFacts,
    PortFacts,
    TcpFacts,
)
from diloco.launch.security import Security
from diloco.launch.state_dir import StateDir, holder, read_endpoint
from protos.control_pb2 import ClockReply, ClockRequest
from transport.addresses import is_loopback, split_address, split_candidates
from transport.certificates import CertificateError
from transport.contracts import PROTOCOL_VERSION
from transport.errors import TransportError
from transport.hivemind_address import is_peer_address, parse_peer_address
from transport.identity import Identity, Role
from transport.tls import Tls

_PARAMETERS = Path("/proc/sys/net/ipv4")
_CONNECT_S, _CALL_S, _PING_S = 5.0, 10.0, 0.5
#: linux/in.h
_IP_MTU_DISCOVER, _IP_PMTUDISC_DO, _IP_MTU = 10, 2, 14
_ICMP_ECHO, _ICMP_ECHO_REPLY = 8, 0
_IP_ICMP_BYTES = 28
#: Sizes below the device's that tunnels leave; the last is what every IPv4 path carries.
_PACKET_BYTES = (1500, 1492, 1450, 1420, 1380, 1280, 1200, 576)
#: adjtimex(2): the kernel's word that nobody keeps the clock.
_TIME_ERROR, _TIMEX_BYTES = 5, 512


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
    return all(is_loopback(split_address(host)[0]) for host in _hosts_of(address))


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
        address = find_coordinator(config, coordinator)
    except ConfigError:
        if config.island_id:
            raise
        address = ""  # of a coordinator that was never started: this is its site
    paths: tuple[PathFacts, ...] = ()
    call = None
    if address and (config.island_id or _is_running(config)):
        paths = tuple(try_path(candidate) for candidate in _hosts_of(address))
        call = _try_call(config, address)
    else:
        address = ""
    return Facts(
        tcp=read_tcp(),
        is_clock_kept=_is_clock_kept(),
        insecure=config.transport.insecure,
        certificates=tuple(_certificates(config)),
        ports=() if config.island_id else tuple(_ports(config)),
        coordinator=address,
        paths=paths,
        call=call,
    )


def _is_running(config: Config) -> bool:
    lock = StateDir(Path(config.coordinator.state_dir)).coordinator_lock
    return lock.exists() and holder(lock) is not None


def _hosts_of(address: str) -> list[str]:
    """Give the HOST:PORT that lead to the coordinator."""
    if not is_peer_address(address):
        return split_candidates(address)
    hosts = []
    for way in parse_peer_address(address).ways:
        parts = way.split("/")
        if parts[1:2] and parts[1] in ("ip4", "ip6", "dns4", "dns6", "dns") and "tcp" in parts:
            host = f"[{parts[2]}]" if parts[1] == "ip6" else parts[2]
            hosts.append(f"{host}:{parts[parts.index('tcp') + 1]}")
    return hosts


def try_path(address: str) -> PathFacts:
    """Connect to one address, and probe the longest packet on the way."""
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
    mtu_bytes, answered_bytes = 0, 0
    if family == socket.AF_INET:
        mtu_bytes, answered_bytes = _probe_mtu(str(place[0]), rtt_s)
    return PathFacts(
        address=address,
        rtt_s=rtt_s,
        congestion_control=algorithm,
        mtu_bytes=mtu_bytes,
        answered_bytes=answered_bytes,
    )


def _congestion_control(connection: socket.socket) -> str:
    text = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return text.rstrip(b"\0").decode()


def _probe_mtu(host: str, rtt_s: float) -> tuple[int, int]:
    """Send echo requests that may not be fragmented, from the longest down.

    Returns:
        What the kernel takes for the longest packet afterwards (routers that refuse longer ones
        have told it by then), and the longest that was answered, 0 without any answer.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as known:
            known.connect((host, 9))
            mtu_bytes = known.getsockopt(socket.IPPROTO_IP, _IP_MTU)
            longest = 0
            with _echo_socket() as echo:
                echo.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DO)
                echo.connect((host, 0))
                sizes = [mtu_bytes, *(size for size in _PACKET_BYTES if size < mtu_bytes)]
                if is_loopback(host):
                    sizes = sizes[:1]
                longest = max(_answered(echo, sizes, rtt_s), default=0)
            return known.getsockopt(socket.IPPROTO_IP, _IP_MTU), longest
    except OSError:  # neither raw nor ping sockets are allowed to us
        return mtu_bytes, 0


def _echo_socket() -> socket.socket:
    """Open a socket for echo requests: the kernel's own kind, or a raw one."""
    try:
        return socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
    except PermissionError:
        return socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)


def _answered(echo: socket.socket, sizes: Sequence[int], rtt_s: float) -> set[int]:
    """Send an echo request of every length, twice, and see which are answered."""
    answered: set[int] = set()
    for _ in range(2):
        for size in sizes:
            # What comes at once is an error: the kernel knows by now that it is too long.
            with contextlib.suppress(OSError):
                echo.send(_echo_request(os.getpid() & 0xFFFF, size, size - _IP_ICMP_BYTES))
        until = time.monotonic() + _PING_S + 2 * rtt_s
        while sizes[0] not in answered and (left := until - time.monotonic()) > 0:
            if select.select([echo], [], [], left)[0]:
                with contextlib.suppress(OSError):  # such as a router's word: too long
                    answered.add(_answered_bytes(echo))
    return answered & {*sizes}


def _answered_bytes(echo: socket.socket) -> int:
    """Read an answer: its number is the length that was asked; 0 if it is something else."""
    answer = echo.recv(65536)
    start = 4 * (answer[0] & 0x0F) if echo.type == socket.SOCK_RAW else 0
    kind, _, _, _, number = struct.unpack_from("!BBHHH", answer, start)
    return int(number) if kind == _ICMP_ECHO_REPLY else 0


def _echo_request(identifier: int, sequence: int, num_bytes: int) -> bytes:
    body = struct.pack("!BBHHH", _ICMP_ECHO, 0, 0, identifier, sequence) + bytes(num_bytes)
    total = sum(struct.unpack("!4H", body[:8]))
    total = (total & 0xFFFF) + (total >> 16)
    return body[:2] + struct.pack("!H", ~total & 0xFFFF) + body[4:]


def _try_call(config: Config, address: str) -> CallFacts:
    """Ask the coordinator what time it is, as this site's process would call it."""
    role = Role.ISLAND if config.island_id else Role.SYNCER
    try:
        security = Security.of(config, role, config.island_id).knowing(address)
        return asyncio.run(_ask_clock(security, address))
    except ConfigError as error:
        return CallFacts(address, error=str(error))


async def _ask_clock(security: Security, address: str) -> CallFacts:
    transport = security.transport(address, Role.COORDINATOR)
    request = ClockRequest(protocol_version=PROTOCOL_VERSION).SerializeToString()
    try:
        # The first call makes the connection; the second is as fast as the path.
        await transport.call("control.clock", request, deadline_s=_CALL_S)
        began = time.time()
        reply = await transport.call("control.clock", request, deadline_s=_CALL_S)
        took_s = time.time() - began
    except TransportError as error:
        return CallFacts(address, error=str(error))
    finally:
        await transport.close()
    theirs = ClockReply.FromString(reply.header).unix_s
    return CallFacts(address, clock_s=began + took_s / 2 - theirs, uncertain_s=took_s / 2)


def _is_clock_kept() -> bool | None:
    """Ask the kernel whether its clock is kept right; None: it does not say."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(
            ctypes.create_string_buffer(_TIMEX_BYTES)
        )
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR


def _certificates(config: Config) -> Iterator[CertificateFacts]:
    directory = config.transport.certs
    if not directory:
        return
    run, name = config.run.name, config.island_id
    identities = [Identity(run, Role.ISLAND, name)]
    if not name:
        identities = [Identity(run, Role.COORDINATOR), Identity(run, Role.SYNCER)]
    for identity in identities:
        try:
            left = Tls(Path(directory), identity).days_left
        except CertificateError as error:
            yield CertificateFacts(identity.short, directory, error=str(error))
        else:
            yield CertificateFacts(identity.short, directory, days_left=left)


def _ports(config: Config) -> Iterator[PortFacts]:
    """Try every port that coordinator and syncer listen at; port 0 is the one drawn before."""
    state = StateDir(Path(config.coordinator.state_dir))
    chosen, telemetry = config.coordinator, config.telemetry
    owned = (
        ("coordinator.listen", chosen.listen, state.coordinator, state.coordinator_lock),
        ("coordinator.syncer_listen", chosen.syncer_listen, state.bound, state.store_lock),
        ("telemetry.coordinator_metrics", telemetry.coordinator_metrics, None,
         state.coordinator_lock),
        ("telemetry.syncer_metrics", telemetry.syncer_metrics, None, state.store_lock),
    )  # fmt: skip
    for key, address, record, lock in owned:
        if not address:
            continue
        host, port = split_address(address)
        before = read_endpoint(record) if record is not None and port == 0 else None
        if before is not None and not is_peer_address(before.address):
            address = f"{host}:{split_address(before.address)[1]}"
        error = _bind_error(address)
        is_held = bool(error) and lock.exists() and holder(lock) is not None
        yield PortFacts(key, address, error, is_held)


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
