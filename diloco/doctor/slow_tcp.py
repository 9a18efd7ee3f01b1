"""Names what makes TCP slow on this machine."""

from __future__ import annotations

from diloco.doctor.diagnosis import State, tcp_findings
from diloco.doctor.machine_facts import are_local, read_tcp
from diloco.doctor.site_facts import Facts


def slow_tcp(peers: str) -> list[str]:
    """Say what is slow and how to fix it; empty where all peers are on this machine.

    Args:
        peers: HOST:PORT of them, or several, or a multiaddr.
    """
    findings = [] if are_local(peers) else tcp_findings(Facts(tcp=read_tcp()))
    return [finding.as_text() for finding in findings if finding.state is State.SLOW]
