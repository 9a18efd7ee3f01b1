"""Finds what is wrong with a site before a run, each with the command that fixes it.

Pure: `machine_facts` reads what is judged here.

    broken   the run cannot work so
    slow     it works, and a long or lossy path carries less than it could
    unknown  could not be found out here
    ok

A connection carries at most a window a round trip, and the kernel gives half of a buffer to the
window: rate = 8 buffer / 2 / round trip. See tcp(7), ip-sysctl.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from diloco.doctor.site_facts import Facts, PathFacts, TcpFacts
from diloco.transport.addresses import is_loopback, split_address
from diloco.transport.security.tls import WARN_DAYS
from diloco.transport.units import format_bandwidth, format_bytes, format_duration

#: What one connection should be able to carry, and over which round trip where none is known.
_RATE_BPS, _RTT_S = 1e9, 0.100
_BUFFER_BYTES = 64 * 2**20
#: Clocks are compared in logs and in certificates, whose start allows for some minutes.
_SLOW_CLOCK_S, _WRONG_CLOCK_S = 5.0, 240.0
_LOSS_PROOF = ("bbr", "bbr2", "bbr3")


class State(StrEnum):
    """How a finding is to be taken."""

    OK = "ok"
    UNKNOWN = "unknown"
    SLOW = "slow"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class SiteFinding:
    """One thing that was looked at.

    Attributes:
        what: In a word or two.
        state: How it is to be taken.
        found: What was found, values included.
        fix: The command to type; empty where there is nothing to do.
    """

    what: str
    state: State
    found: str
    fix: str = ""

    def as_text(self) -> str:
        """Say it in a line."""
        return f"{self.what}: {self.found}" + (f"; fix it: {self.fix}" if self.fix else "")

    def as_dict(self) -> dict[str, str]:
        """Give it as JSON values."""
        return {key: str(value) for key, value in asdict(self).items()}


def diagnose(facts: Facts) -> list[SiteFinding]:
    """Judge everything, in the order of the command's table."""
    return [
        *tcp_findings(facts),
        *_coordinator_findings(facts),
        *_syncer_findings(facts),
        *_mtu_findings(facts),
        *_clock_findings(facts),
        *_port_findings(facts),
        *_certificate_findings(facts),
        *_token_findings(facts),
        *_stranger_findings(facts),
    ]


def tcp_findings(facts: Facts) -> Iterator[SiteFinding]:
    """Judge what the kernel does with every connection."""
    tcp = facts.tcp
    if tcp is None:
        yield SiteFinding("tcp", State.UNKNOWN, "this system does not say how its TCP is set")
        return
    algorithms = sorted({path.congestion_control for path in facts.reached} - {""})
    algorithm = algorithms[0] if len(algorithms) == 1 else tcp.congestion_control
    is_loss_proof = algorithm in _LOSS_PROOF
    if is_loss_proof:
        yield SiteFinding("congestion control", State.OK, algorithm)
    else:
        load = "" if "bbr" in tcp.available else "sudo modprobe tcp_bbr && "
        yield SiteFinding(
            "congestion control",
            State.SLOW,
            f"{algorithm}: 0.1 % of loss over 100 ms leaves one connection 17 of 100 Mbit/s, bbr "
            f"leaves it 87",
            f"{load}sudo sysctl -w net.ipv4.tcp_congestion_control=bbr",
        )
    if not tcp.slow_start_after_idle:
        yield SiteFinding("slow start after idle", State.OK, "off")
    elif is_loss_proof:
        yield SiteFinding("slow start after idle", State.OK, f"on, which {algorithm} ignores")
    else:
        yield SiteFinding(
            "slow start after idle",
            State.SLOW,
            f"on: with {algorithm} every round begins slowly again, at a third of the rate of a "
            f"long fast path",
            "sudo sysctl -w net.ipv4.tcp_slow_start_after_idle=0",
        )
    yield from _buffer_findings(tcp, max((path.rtt_s for path in facts.reached), default=0.0))


def _buffer_findings(tcp: TcpFacts, rtt_s: float) -> Iterator[SiteFinding]:
    named = "" if rtt_s else ", the round trip being unknown"
    rtt_s = rtt_s or _RTT_S
    for what, parameter, lowest, num_bytes in (
        ("send buffer", "tcp_wmem", "4096 65536", tcp.send_bytes),
        ("receive buffer", "tcp_rmem", "4096 131072", tcp.receive_bytes),
    ):
        rate_bps = 8 * num_bytes / 2 / rtt_s
        found = (
            f"at most {format_bytes(num_bytes)}: up to {format_bandwidth(float(f'{rate_bps:.2g}'))}"
            f" a connection over {format_duration(rtt_s)}{named}"
        )
        needed = max(_BUFFER_BYTES, int(2 * _RATE_BPS * rtt_s / 8))
        fix = f'sudo sysctl -w net.ipv4.{parameter}="{lowest} {needed}"'
        is_enough = rate_bps >= _RATE_BPS
        yield SiteFinding(
            what, State.OK if is_enough else State.SLOW, found, "" if is_enough else fix
        )


def _coordinator_findings(facts: Facts) -> Iterator[SiteFinding]:
    if facts.is_proxied:
        for path in facts.paths:
            found = f"{path.address} is not reached from here but answers calls: through grpc_proxy"
            yield SiteFinding("coordinator", State.OK, found)
    else:
        yield from _path_findings("coordinator", "coordinator.address", facts, facts.paths)
    call = facts.call
    if call is None:
        return
    if not call.error:
        yield SiteFinding("call to the coordinator", State.OK, "answered")
    elif facts.is_libp2p and all(path.error for path in facts.paths):
        yield SiteFinding(
            "call to the coordinator",
            State.BROKEN,
            call.error,
            "start it: diloco coordinator RUN.toml; or set transport.hivemind.initial_peers",
        )
    elif not all(path.error for path in facts.paths):
        yield SiteFinding(
            "call to the coordinator",
            State.BROKEN,
            call.error,
            "diloco certs show, where the CA is; on the coordinator's site: diloco doctor RUN.toml",
        )


def _syncer_findings(facts: Facts) -> Iterator[SiteFinding]:
    call = facts.call
    if not facts.asks_syncer or call is None or call.error:
        return
    for address, paths in zip(call.syncers, facts.syncer_paths, strict=True):
        if not address:
            found = "the coordinator does not know yet where it is: look again when it has started"
            yield SiteFinding("syncer", State.UNKNOWN, found)
        elif facts.is_proxied:
            found = f"{address}: calls to it go through grpc_proxy, which was not tried"
            yield SiteFinding("syncer", State.UNKNOWN, found)
        elif not paths:
            found = f"{address} is reached through the libp2p network, which was not tried"
            yield SiteFinding("syncer", State.UNKNOWN, found)
        else:
            yield from _path_findings("syncer", "coordinator.syncer_address", facts, paths)


def _path_findings(
    what: str, key: str, facts: Facts, paths: Sequence[PathFacts]
) -> Iterator[SiteFinding]:
    is_reached = not all(path.error for path in paths)
    for path in paths:
        if path.error and facts.is_libp2p:
            found = (
                f"{path.address} is not reached directly: {path.error}; libp2p may find another "
                f"way, or a relay, which is slow"
            )
            yield SiteFinding(what, State.UNKNOWN, found, _mend_path(path, key, is_libp2p=True))
        elif path.error:
            # Another address that answers is enough: they are tried in order.
            state = State.SLOW if is_reached else State.BROKEN
            found = f"{path.address} is not reached: {path.error}"
            yield SiteFinding(what, state, found, _mend_path(path, key, is_libp2p=False))
        else:
            found = f"{path.address} is reached, round trip {format_duration(path.rtt_s)}"
            yield SiteFinding(what, State.OK, found)


def _mend_path(path: PathFacts, key: str, *, is_libp2p: bool) -> str:
    host, port = split_address(path.address)
    if "refused" in path.error.lower():
        return f"start it: diloco coordinator RUN.toml; or correct {key}"
    if "resolve" in path.error.lower() or "name" in path.error.lower():
        given = f"{key} (--coordinator)" if key == "coordinator.address" else key
        return f"getent hosts {host}; correct {given}"
    fix = (
        f"open TCP port {port} towards {host} in the firewalls between (nc -vz {host} {port} tries "
        f"it)"
    )
    return fix if is_libp2p else f"{fix}, or set grpc_proxy"


def _mtu_findings(facts: Facts) -> Iterator[SiteFinding]:
    """Judge the way to every host once."""
    by_host = {split_address(path.address)[0]: path for path in reversed(facts.reached)}
    for path in reversed(by_host.values()):
        yield _mtu_finding(path, facts.tcp)


def _mtu_finding(path: PathFacts, tcp: TcpFacts | None) -> SiteFinding:
    if not path.answered_bytes:
        return SiteFinding(
            "MTU",
            State.UNKNOWN,
            f"{path.address}: {path.mtu_bytes} bytes by the kernel's account; echo requests are "
            f"not answered or not allowed, so it was not probed",
        )
    if path.answered_bytes >= path.mtu_bytes:
        found = f"{path.address}: packets of {path.mtu_bytes} bytes pass"
        return SiteFinding("MTU", State.OK, found)
    found = (
        f"{path.address}: packets of {path.mtu_bytes} bytes are lost in silence, "
        f"{path.answered_bytes} bytes pass: a tunnel drops what it should refuse"
    )
    if tcp is not None and tcp.mtu_probing:
        return SiteFinding("MTU", State.SLOW, f"{found}; tcp_mtu_probing finds its way around it")
    return SiteFinding("MTU", State.BROKEN, found, "sudo sysctl -w net.ipv4.tcp_mtu_probing=1")


def _clock_findings(facts: Facts) -> Iterator[SiteFinding]:
    keep = "sudo timedatectl set-ntp true"
    call = facts.call
    if call is not None and not call.error:
        off_s = max(0.0, abs(call.clock_s) - call.uncertain_s)
        ahead = "ahead of" if call.clock_s > 0 else "behind"
        found = f"{format_duration(float(f'{abs(call.clock_s):.2g}'))} {ahead} the coordinator's"
        state = State.OK
        if off_s > _SLOW_CLOCK_S:
            state = State.BROKEN if off_s > _WRONG_CLOCK_S else State.SLOW
            found += ": certificates and grants are judged by it"
        yield SiteFinding("clock", state, found, keep if state is not State.OK else "")
    elif facts.is_clock_kept is None:
        yield SiteFinding("clock", State.UNKNOWN, "not compared with the coordinator's")
    elif facts.is_clock_kept:
        yield SiteFinding("clock", State.OK, "kept by the system")
    else:
        found = "nothing keeps it right, and it was not compared with the coordinator's"
        yield SiteFinding("clock", State.UNKNOWN, found, keep)


def _port_findings(facts: Facts) -> Iterator[SiteFinding]:
    for port in facts.ports:
        if port.is_ours:
            yield SiteFinding("port", State.OK, f"{port.key}: {port.address} is held by this run")
        elif port.error:
            number = split_address(port.address)[1]
            yield SiteFinding(
                "port",
                State.BROKEN,
                f"{port.key} = {port.address} cannot be bound: {port.error}",
                f"ss -ltnp 'sport = :{number}' shows who has it; end that, or choose another",
            )
        else:
            yield SiteFinding("port", State.OK, f"{port.key}: {port.address} can be bound")


def _certificate_findings(facts: Facts) -> Iterator[SiteFinding]:
    for shown in facts.certificates:
        renew = f"diloco certs rotate {shown.short}, where the CA is; bring it to {shown.directory}"
        if shown.error:
            yield SiteFinding("certificate", State.BROKEN, shown.error, renew)
        elif shown.days_left < WARN_DAYS:
            found = f"{shown.short} expires in {shown.days_left:.1f} days"
            yield SiteFinding("certificate", State.SLOW, found, renew)
        else:
            found = f"{shown.short} is valid for {shown.days_left:.0f} days"
            yield SiteFinding("certificate", State.OK, found)


def _token_findings(facts: Facts) -> Iterator[SiteFinding]:
    for held in facts.tokens:
        if held.error:
            fix = f"diloco certs token {held.short}, where the CA is; bring it to {held.directory}"
            yield SiteFinding("token", State.BROKEN, held.error, fix)
        else:
            yield SiteFinding("token", State.OK, f"that of {held.short} can be read")


def _stranger_findings(facts: Facts) -> Iterator[SiteFinding]:
    """Judge what keeps strangers out where there are no certificates."""
    if facts.certificates or not (facts.ports or facts.coordinator):
        return
    is_found_only = bool(facts.coordinator) and not facts.paths  # by its identity, or a relay
    hosts = [split_address(port.address)[0] for port in facts.ports]
    hosts += [split_address(path.address)[0] for path in facts.all_paths]
    fix = "diloco certs init RUN.toml"
    if facts.insecure:
        found = "transport.insecure = true: "
        if facts.is_libp2p:
            found += "anyone who reaches the ports can call"
        else:
            found += "anyone who reaches the ports can read and change the traffic"
        yield SiteFinding("certificate", State.SLOW, found, fix)
    elif not is_found_only and all(is_loopback(host) for host in hosts):
        yield SiteFinding("certificate", State.OK, "none; everything is on this machine's loopback")
    elif facts.is_libp2p and facts.tokens:
        yield SiteFinding("certificate", State.OK, "none: libp2p encrypts, tokens say who calls")
    elif facts.is_libp2p:
        found = "no tokens, and not all is loopback: libp2p encrypts, but knows no callers"
        fix = "diloco certs token IDENTITY, for each of the run; then set transport.tokens"
        yield SiteFinding("token", State.BROKEN, found, fix)
    else:
        yield SiteFinding("certificate", State.BROKEN, "none, and not all is loopback", fix)
