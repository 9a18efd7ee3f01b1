"""Findings from facts: what is broken, what is slow, and the command that fixes it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco.doctor.diagnosis import State, diagnose
from diloco.doctor.site_facts import (
    CallFacts,
    CertificateFacts,
    Facts,
    PathFacts,
    PortFacts,
    TcpFacts,
    TokenFacts,
)

GOOD_TCP = TcpFacts("bbr", ("reno", "bbr"), False, 64 << 20, 64 << 20, 0)
PATH = PathFacts("10.0.0.5:4711", "", 0.1, "bbr", 1500, 1500)
CALL = CallFacts(PATH.address, clock_s=0.01, uncertain_s=0.05, syncers=("10.0.0.5:4712",))
GOOD = Facts(
    tcp=GOOD_TCP,
    is_clock_kept=True,
    certificates=(CertificateFacts("island/east", "certs", days_left=90),),
    coordinator=PATH.address,
    paths=(PATH,),
    call=CALL,
    asks_syncer=True,
    syncer_paths=((replace(PATH, address="10.0.0.5:4712"),),),
)
LIBP2P = replace(GOOD, certificates=(), is_libp2p=True)


def test_a_good_site_has_nothing_to_fix() -> None:
    findings = diagnose(GOOD)

    assert {finding.state for finding in findings} == {State.OK}
    assert not any(finding.fix for finding in findings)
    assert [finding.what for finding in findings] == [
        "congestion control", "slow start after idle", "send buffer", "receive buffer",
        "coordinator", "call to the coordinator", "syncer", "MTU", "clock", "certificate",
    ]  # fmt: skip


def tcp(**changes: object) -> Facts:
    path = replace(PATH, congestion_control=str(changes.get("congestion_control", "bbr")))
    return replace(GOOD, tcp=replace(GOOD_TCP, **changes), paths=(path,))  # type: ignore[arg-type]


def path(**changes: object) -> Facts:
    return replace(GOOD, paths=(replace(PATH, **changes),))  # type: ignore[arg-type]


def syncer(**changes: object) -> Facts:
    ((reached,),) = GOOD.syncer_paths
    return replace(GOOD, syncer_paths=((replace(reached, **changes),),))  # type: ignore[arg-type]


def test_the_way_to_a_host_is_judged_once_and_an_all_reduce_has_no_syncer() -> None:
    elsewhere = replace(PATH, address="10.0.0.6:4712")

    def found(facts: Facts) -> list[str]:
        return [finding.what for finding in diagnose(facts)]

    assert found(GOOD).count("MTU") == 1
    assert found(replace(GOOD, syncer_paths=((elsewhere,),))).count("MTU") == 2
    assert "syncer" not in found(replace(GOOD, asks_syncer=False, syncer_paths=()))


def test_one_syncer_that_is_reached_stands_for_no_other() -> None:
    call = replace(CALL, syncers=("a:1,b:1", "c:2", ""))
    away = replace(PATH, address="c:2", error="Connection refused after 0.1 s")
    first = (replace(away, address="a:1"), replace(PATH, address="b:1"))

    found = diagnose(replace(GOOD, call=call, syncer_paths=(first, (away,), ())))

    states = [finding.state for finding in found if finding.what == "syncer"]
    assert states == [State.SLOW, State.OK, State.BROKEN, State.UNKNOWN]


def test_no_proxy_is_named_over_libp2p_which_heeds_none() -> None:
    unreached = (replace(PATH, error="timed out after 5.0 s"),)

    for call in (GOOD.call, CallFacts(PATH.address, error="no way to it")):
        findings = diagnose(replace(LIBP2P, paths=unreached, syncer_paths=(unreached,), call=call))
        assert not any("grpc_proxy" in finding.as_text() for finding in findings)


def port(**changes: object) -> Facts:
    facts = PortFacts("coordinator.listen", "0.0.0.0:4711")
    return replace(GOOD, ports=(replace(facts, **changes),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "what", "state", "found", "fix"),
    [
        pytest.param(
            tcp(congestion_control="cubic"), "congestion control", State.SLOW, "cubic",
            "sudo sysctl -w net.ipv4.tcp_congestion_control=bbr", id="cubic",
        ),
        pytest.param(
            tcp(congestion_control="cubic", available=("reno", "cubic")),
            "congestion control", State.SLOW, "cubic", "sudo modprobe tcp_bbr && ",
            id="bbr-not-loaded",
        ),
        pytest.param(
            tcp(congestion_control="cubic", slow_start_after_idle=True),
            "slow start after idle", State.SLOW, "every round begins slowly",
            "sudo sysctl -w net.ipv4.tcp_slow_start_after_idle=0", id="slow-start",
        ),
        pytest.param(
            tcp(slow_start_after_idle=True), "slow start after idle", State.OK, "ignores",
            "", id="bbr-does-not-start-slowly",
        ),
        pytest.param(
            tcp(send_bytes=4 << 20), "send buffer", State.SLOW,
            "at most 4 MiB: up to 170 Mbit/s a connection over 100 ms",
            'sudo sysctl -w net.ipv4.tcp_wmem="4096 65536 67108864"', id="send-buffer",
        ),
        pytest.param(
            tcp(receive_bytes=6 << 20), "receive buffer", State.SLOW, "up to 250 Mbit/s",
            'sudo sysctl -w net.ipv4.tcp_rmem="4096 131072 67108864"', id="receive-buffer",
        ),
        pytest.param(
            replace(
                tcp(send_bytes=4 << 20), paths=(replace(PATH, rtt_s=0.01),), syncer_paths=((),)
            ),
            "send buffer", State.OK, "over 10 ms", "", id="enough-for-a-short-path",
        ),
        pytest.param(
            replace(GOOD, tcp=None), "tcp", State.UNKNOWN, "does not say", "", id="no-sysctl",
        ),
        pytest.param(
            replace(path(error="Connection refused after 0.1 s"), call=None),
            "coordinator", State.BROKEN, "10.0.0.5:4711 is not reached: Connection refused",
            "diloco coordinator RUN.toml",
            id="nobody-listens",
        ),
        pytest.param(
            replace(path(error="timed out after 5.0 s"), call=CallFacts("a:1", error="no answer")),
            "coordinator", State.BROKEN, "timed out",
            "nc -vz 10.0.0.5 4711", id="firewall",
        ),
        pytest.param(
            replace(GOOD, paths=(replace(PATH, address="a:1", error="timed out"), PATH)),
            "coordinator", State.SLOW, "a:1 is not reached", "open TCP port 1",
            id="another-address-answers",
        ),
        pytest.param(
            path(error="timed out after 5.0 s"), "coordinator", State.OK, "through grpc_proxy", "",
            id="behind-a-proxy",
        ),
        pytest.param(
            path(answered_bytes=1380), "MTU", State.BROKEN,
            "packets of 1500 bytes are lost in silence, 1380 bytes pass",
            "sudo sysctl -w net.ipv4.tcp_mtu_probing=1", id="black-hole",
        ),
        pytest.param(
            replace(path(answered_bytes=1380), tcp=replace(GOOD_TCP, mtu_probing=1)), "MTU",
            State.SLOW, "finds its way", "", id="black-hole-with-probing",
        ),
        pytest.param(
            path(mtu_bytes=1380, answered_bytes=1380), "MTU", State.OK, "1380 bytes pass", "",
            id="a-router-said-so",
        ),
        pytest.param(
            path(answered_bytes=0), "MTU", State.UNKNOWN, "was not probed", "", id="no-ping",
        ),
        pytest.param(
            replace(GOOD, call=CallFacts("a:1", error="revoked")), "call to the coordinator",
            State.BROKEN, "revoked", "diloco certs show", id="refused-call",
        ),
        pytest.param(
            replace(GOOD, call=replace(CALL, clock_s=-30.0, uncertain_s=0.1)), "clock",
            State.SLOW, "30 s behind the coordinator's", "sudo timedatectl set-ntp true",
            id="clock-behind",
        ),
        pytest.param(
            replace(GOOD, call=replace(CALL, clock_s=3600.0, uncertain_s=0.1)), "clock",
            State.BROKEN, "ahead of the coordinator's", "sudo timedatectl set-ntp true",
            id="clock-wrong",
        ),
        pytest.param(
            replace(GOOD, call=replace(CALL, clock_s=6.0, uncertain_s=4.0)), "clock", State.OK,
            "6 s ahead", "", id="a-slow-call-proves-nothing",
        ),
        pytest.param(
            replace(GOOD, call=None, is_clock_kept=False), "clock", State.UNKNOWN,
            "nothing keeps it", "timedatectl", id="clock-not-kept",
        ),
        pytest.param(
            port(error="Address already in use"), "port", State.BROKEN,
            "coordinator.listen = 0.0.0.0:4711 cannot be bound: Address already in use",
            "ss -ltnp 'sport = :4711'", id="port-taken",
        ),
        pytest.param(
            port(error="Address already in use", is_ours=True), "port", State.OK,
            "held by this run", "", id="our-own-port",
        ),
        pytest.param(
            replace(GOOD, certificates=(CertificateFacts("island/a", "c", "it expired"),)),
            "certificate", State.BROKEN, "it expired", "diloco certs rotate island/a",
            id="certificate-expired",
        ),
        pytest.param(
            replace(GOOD, certificates=(CertificateFacts("island/a", "c", days_left=5),)),
            "certificate", State.SLOW, "expires in 5.0 days", "diloco certs rotate island/a",
            id="certificate-ends-soon",
        ),
        pytest.param(
            replace(GOOD, certificates=(), insecure=True), "certificate", State.SLOW,
            "insecure = true", "diloco certs init", id="insecure",
        ),
        pytest.param(
            replace(GOOD, certificates=()), "certificate", State.BROKEN, "none, and not all is",
            "diloco certs init", id="no-certificates",
        ),
        pytest.param(
            replace(
                GOOD, certificates=(), paths=(replace(PATH, address="127.0.0.1:1"),),
                syncer_paths=((),),
            ),
            "certificate", State.OK, "on this machine's loopback", "", id="loopback",
        ),
        pytest.param(
            syncer(error="timed out after 5.0 s"), "syncer", State.BROKEN,
            "10.0.0.5:4712 is not reached: timed out", "open TCP port 4712 towards 10.0.0.5",
            id="firewall-before-the-syncer",
        ),
        pytest.param(
            syncer(error="Connection refused after 0.1 s"), "syncer", State.BROKEN, "refused",
            "correct coordinator.syncer_address", id="syncer-elsewhere",
        ),
        pytest.param(
            replace(GOOD, call=CallFacts("a:1", syncers=("",)), syncer_paths=((),)), "syncer",
            State.UNKNOWN,
            "does not know yet where it is", "", id="no-syncer-yet",
        ),
        pytest.param(
            replace(path(error="timed out"), syncer_paths=((replace(PATH, error="timed out"),),)),
            "syncer", State.UNKNOWN, "go through grpc_proxy, which was not tried", "",
            id="syncer-behind-a-proxy",
        ),
        pytest.param(
            replace(GOOD, call=CallFacts("a:1", syncers=("/p2p/QmQ",)), syncer_paths=((),)),
            "syncer", State.UNKNOWN, "through the libp2p network", "", id="syncer-by-its-identity",
        ),
        pytest.param(
            replace(GOOD, tokens=(TokenFacts("island/a", "c", "it is open to all"),)), "token",
            State.BROKEN, "it is open to all", "diloco certs token island/a", id="bad-token",
        ),
        pytest.param(
            replace(LIBP2P, paths=(replace(PATH, error="timed out"),)), "coordinator",
            State.UNKNOWN, "10.0.0.5:4711 is not reached directly: timed out; libp2p may find",
            "nc -vz 10.0.0.5 4711 tries it)", id="libp2p-finds-another-way",
        ),
        pytest.param(
            replace(LIBP2P, syncer_paths=((replace(PATH, error="timed out"),),)), "syncer",
            State.UNKNOWN, "is not reached directly", "open TCP port",
            id="libp2p-finds-another-way-to-the-syncer",
        ),
        pytest.param(
            replace(LIBP2P, paths=(), call=CallFacts("/p2p/QmQ", error="no way to it")),
            "call to the coordinator", State.BROKEN, "no way to it",
            "transport.hivemind.initial_peers",
            id="libp2p-finds-no-way",
        ),
        pytest.param(
            replace(LIBP2P, paths=(), syncer_paths=((),)), "token", State.BROKEN,
            "knows no callers",
            "transport.tokens", id="libp2p-by-a-relay-is-no-loopback",
        ),
        pytest.param(
            replace(LIBP2P, tokens=(TokenFacts("island/a", "c"),)), "certificate", State.OK,
            "libp2p encrypts, tokens say who calls", "", id="libp2p-with-tokens",
        ),
        pytest.param(
            LIBP2P, "token", State.BROKEN, "knows no callers", "transport.tokens",
            id="libp2p-without-tokens",
        ),
        pytest.param(
            replace(LIBP2P, insecure=True), "certificate", State.SLOW, "can call",
            "diloco certs init", id="libp2p-insecure",
        ),
    ],
)  # fmt: skip
def test_every_finding_says_what_was_found_and_what_to_type(
    facts: Facts, what: str, state: State, found: str, fix: str
) -> None:
    finding = next(finding for finding in diagnose(facts) if finding.what == what)

    assert finding.state is state
    assert found in finding.found
    assert fix in finding.fix if fix else not finding.fix
    # What works and what cannot be known need no hand; what is broken always has a command.
    assert finding.fix or state is not State.BROKEN
