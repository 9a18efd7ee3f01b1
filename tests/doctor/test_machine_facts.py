"""`diloco doctor` on real systems: namespaces, sockets, servers, certificates that ended."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.cli.run.doctor import _show, show_at_start
from diloco.config.load import load_config
from diloco.doctor.diagnosis import SiteFinding, State
from diloco.doctor.machine_facts import _hosts_of, are_local, gather, read_tcp, try_path
from diloco.durable import write_json
from diloco.protos.control_pb2 import ClockReply, RunStateReply
from diloco.security.run_ca import RunCa
from diloco.simulations.emulate.namespaces import Namespaces, inside
from diloco.state_dir import Endpoint, StateDir, acquire, write_pid
from diloco.transport.contracts import IncomingCall, Reply
from diloco.transport.security.tls import Tls
from tests.guarded_server import serving
from tests.run_files import write_run
from tests.simulations.emulated_site import needs_namespaces
from tests.transport.pki import COORDINATOR, EAST, Pki

#: Serial numbers that the coordinator knows to be revoked.
REVOKED = set[int]()


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run(tmp_path, {"east": "", "west": ""})


def coordinator(
    tls: Tls | None = None, ahead_s: float = 0.0, syncer: str = ""
) -> contextlib.AbstractContextManager[str]:
    """A coordinator whose clock is ahead of ours, and that knows a syncer; gives its address."""

    async def clock(_: IncomingCall) -> Reply:
        return Reply(ClockReply(unix_s=time.time() + ahead_s).SerializeToString())

    async def run_state(_: IncomingCall) -> Reply:
        return Reply(RunStateReply(syncer_addresses=[syncer]).SerializeToString())

    return serving({"control.clock": clock, "control.standing": run_state}, tls)


def doctor(*words: object) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """What `diloco doctor ... --json` found, by what it looked at; and its exit code."""
    result = CliRunner().invoke(app, ["doctor", *map(str, words), "--json"])
    found: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(result.stdout)["findings"]:
        found.setdefault(finding["what"], []).append(finding)
    return result.exit_code, found


@needs_namespaces
def test_tcp_is_read_where_the_process_is() -> None:
    with Namespaces(["here"]) as spaces, inside(spaces.path("here")):
        for name, value in {
            "tcp_slow_start_after_idle": "0",
            "tcp_wmem": "4096 65536 1048576",
            "tcp_rmem": "4096 131072 2097152",
            "tcp_congestion_control": "reno",
            "tcp_mtu_probing": "1",
        }.items():
            Path("/proc/sys/net/ipv4", name).write_text(value)

        facts = read_tcp()

    assert facts is not None
    assert facts.congestion_control == "reno" and "reno" in facts.available
    assert not facts.slow_start_after_idle
    assert (facts.send_bytes, facts.receive_bytes, facts.mtu_probing) == (1 << 20, 2 << 20, 1)


@needs_namespaces
@pytest.mark.parametrize(
    ("one", "other"),
    [("10.99.0.1/24", "10.99.0.2"), ("fd99::1/64", "fd99::2")],
    ids=["IPv4", "IPv6"],
)
def test_a_black_hole_for_long_packets_is_found(one: str, other: str) -> None:
    """A device drops in silence what is longer than its own MTU, as a badly set tunnel does."""
    nodad = ["nodad"] if ":" in other else []
    with Namespaces(["near", "far"]) as spaces:
        near, far = spaces.name("near"), spaces.name("far")
        for line in [
            f"link add hole netns {near} type veth peer name hole netns {far}",
            " ".join([f"-n {near} address add {one} dev hole", *nodad]),
            " ".join([f"-n {far} address add {other}/{one[-2:]} dev hole", *nodad]),
            f"-n {far} link set hole mtu 1400 up",
            f"-n {near} link set hole up",
        ]:
            subprocess.run(["ip", *line.split()], check=True)
        with inside(spaces.path("far")):
            family = socket.AF_INET6 if nodad else socket.AF_INET
            listener = socket.create_server((other, 0), family=family)
        port = listener.getsockname()[1]
        address = f"[{other}]:{port}" if nodad else f"{other}:{port}"

        with listener, inside(spaces.path("near")):
            path = try_path(address)

    assert path.error == ""
    assert path.mtu_bytes == 1500 and path.answered_bytes == 1380


def test_an_island_with_good_certificates_is_answered(run_file: Path, tmp_path: Path) -> None:
    pki = Pki(tmp_path / "certs")
    pki.issue(EAST)
    with coordinator(pki.tls(COORDINATOR)) as address:
        code, found = doctor(
            run_file, "--island", "east", "--coordinator", address,
            "--set", f"transport.certs={pki.directory}",
        )  # fmt: skip

    assert code == 0, found
    assert [f["state"] for f in found["call to the coordinator"]] == ["ok"]
    assert [f["state"] for f in found["clock"]] == ["ok"]
    assert "island/east is valid for 90 days" in found["certificate"][0]["found"] or (
        "island/east is valid for 89 days" in found["certificate"][0]["found"]
    )
    assert "round trip" in found["coordinator"][0]["found"]
    assert found["MTU"][0]["state"] in ("ok", "unknown")


@pytest.mark.parametrize(
    ("spoil", "what", "found", "fix"),
    [
        pytest.param(
            lambda pki: pki.issue(EAST, age_days=100, days=90), "certificate", "expired at",
            "diloco certs rotate island/east", id="expired",
        ),
        pytest.param(
            lambda pki: (pki.directory / "island-east.pem").unlink(), "certificate", "cannot read",
            "diloco certs rotate island/east", id="missing",
        ),
        pytest.param(
            lambda pki: REVOKED.add(pki.serials[EAST]), "call to the coordinator", "was revoked",
            "diloco certs show", id="revoked",
        ),
    ],
)  # fmt: skip
def test_a_bad_certificate_is_broken(
    run_file: Path,
    tmp_path: Path,
    spoil: Callable[[Pki], object],
    what: str,
    found: str,
    fix: str,
) -> None:
    pki = Pki(tmp_path / "certs")
    pki.issue(EAST)
    tls = pki.tls(COORDINATOR)
    tls.is_revoked = REVOKED.__contains__
    with coordinator(tls) as address:
        spoil(pki)
        code, findings = doctor(
            run_file, "--island", "east", "--coordinator", address,
            "--set", f"transport.certs={pki.directory}",
        )  # fmt: skip

    assert code == 1
    broken = next(f for f in findings[what] if f["state"] == "broken")
    assert found in broken["found"] and fix in broken["fix"]


def test_a_clock_that_is_an_hour_off_is_broken(run_file: Path) -> None:
    with coordinator(ahead_s=3600.0) as address:
        code, found = doctor(run_file, "--island", "east", "--coordinator", address)

    assert code == 1
    assert found["clock"][0]["state"] == "broken"
    assert "behind the coordinator's" in found["clock"][0]["found"]


def test_a_coordinator_that_is_not_there_is_broken(run_file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    code, found = doctor(run_file, "--island", "east", "--coordinator", f"127.0.0.1:{port}")

    assert code == 1
    assert "refused" in found["coordinator"][0]["found"]
    assert "diloco coordinator RUN.toml" in found["coordinator"][0]["fix"]


def test_a_port_that_another_process_has_is_broken_and_our_own_is_not(
    run_file: Path, tmp_path: Path
) -> None:
    state = StateDir(tmp_path / "state")
    state.create()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"coordinator.listen=127.0.0.1:{taken.getsockname()[1]}"
        code, found = doctor(run_file, "--set", listen)
        lock = acquire(state.coordinator_lock)
        write_pid(lock, 1)
        (own,) = [
            port
            for port in gather(load_config(run_file, [listen])).ports
            if port.key == "coordinator.listen"
        ]
        os.close(lock)

    assert code == 1
    assert [f["state"] for f in found["port"]] == ["broken", "ok"]
    assert "ss -ltnp" in found["port"][0]["fix"]
    assert own.is_ours


def test_ports_drawn_by_an_earlier_start_are_the_ones_that_are_tried(
    run_file: Path, tmp_path: Path
) -> None:
    state = StateDir(tmp_path / "state")
    state.create()
    Endpoint("127.0.0.1:4711", 1).write(state.coordinator)
    write_json(state.bound, "127.0.0.1:4712")

    ports = gather(load_config(run_file)).ports

    assert {port.key: port.address for port in ports} == {
        "coordinator.listen": "127.0.0.1:4711",
        "coordinator.syncer_listen": "127.0.0.1:4712",
    }


@pytest.mark.parametrize("is_there", [True, False], ids=["there", "away"])
def test_the_way_to_the_syncer_is_tried_as_the_coordinator_tells_it(
    run_file: Path, is_there: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        syncer = f"127.0.0.1:{listener.getsockname()[1]}"
        if not is_there:
            listener.close()
        with coordinator(syncer=syncer) as address:
            code, found = doctor(run_file, "--island", "east", "--coordinator", address)

    assert (code, [f["state"] for f in found["syncer"]]) == (
        (0, ["ok"]) if is_there else (1, ["broken"])
    )
    assert syncer in found["syncer"][0]["found"]


def test_what_peers_say_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    found = "[fd00::2]:4710 is not reached: [/x] [bold]\x1b[2J"

    _show([SiteFinding("coordinator", State.BROKEN, found, "[fd00::2] [/x]\x1b")])

    shown = " ".join(capsys.readouterr().out.split())
    assert r"broken [fd00::2]:4710 is not reached: [/x] [bold]\x1b[2J coordinator:" in shown
    assert shown.endswith(r"[fd00::2] [/x]\x1b")


def test_a_relay_is_not_taken_for_the_peer() -> None:
    peer, relay = "/p2p/" + "1" * 46, "/p2p/" + "2" * 46
    relayed = f"/ip4/192.0.2.9/tcp/4711{relay}/p2p-circuit{peer}"

    assert _hosts_of(f"/ip6/fd00::2/tcp/4710{peer},{relayed}") == ["[fd00::2]:4710"]
    assert _hosts_of(relayed) == []
    assert not are_local(relayed)


@pytest.mark.parametrize("missing", ["", "tokens.json", "syncer.token"])
def test_over_libp2p_tokens_stand_for_certificates(
    run_file: Path, tmp_path: Path, missing: str
) -> None:
    certs = tmp_path / "certs"
    ca = RunCa(certs, lambda: datetime.datetime.now(datetime.UTC))
    ca.create("test", 100)
    for short in ("coordinator", "syncer", "island/east"):
        ca.make_token(short)
    if missing:
        (certs / missing).unlink()
    settings = [
        "transport.kind=hivemind", f"transport.tokens={certs}",
        "coordinator.listen=0.0.0.0:0", "coordinator.syncer_listen=0.0.0.0:0",
    ]  # fmt: skip

    code, found = doctor(run_file, *(word for value in settings for word in ("--set", value)))

    assert code == (1 if missing else 0), found
    broken = [f for f in found["token"] if f["state"] == "broken"]
    assert bool(broken) == bool(missing)
    assert all(missing in f["found"] and "diloco certs token" in f["fix"] for f in broken)
    assert [f["state"] for f in found["certificate"]] == ["ok"]


def test_the_coordinators_site_judges_its_issuer(run_file: Path, tmp_path: Path) -> None:
    pki = Pki(tmp_path / "certs")
    setting = f"transport.certs={pki.directory}"

    pki.issue(COORDINATOR, days=10)
    assert [f["state"] for f in doctor(run_file, "--set", setting)[1]["certificate"]] == ["slow"]
    pki.issue(COORDINATOR, age_days=100, days=90)
    code, found = doctor(run_file, "--set", setting)

    assert code == 1
    assert [f["state"] for f in found["certificate"]] == ["broken"]


def test_the_machine_alone_is_looked_at_without_a_run() -> None:
    result = CliRunner().invoke(app, ["doctor"])

    assert result.exit_code == 0, result.output
    assert "congestion control" in result.output and "port" not in result.output


@needs_namespaces
@pytest.mark.parametrize(
    ("peers", "warned"),
    [
        pytest.param("10.0.0.5:4711", True, id="beyond-this-machine"),
        pytest.param("127.0.0.1:4711,[::1]:4711", False, id="loopback"),
        pytest.param("0.0.0.0:0", True, id="wildcard"),
    ],
)
def test_a_slow_tcp_is_told_at_start_where_peers_are_elsewhere(
    peers: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with Namespaces(["here"]) as spaces, inside(spaces.path("here")):
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")

        show_at_start(peers)

    said = capsys.readouterr().err
    assert ("sudo sysctl -w net.ipv4.tcp_congestion_control=bbr" in said) == warned
    assert bool(said) == warned
