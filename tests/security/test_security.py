"""Which protection a process gets from its run file, and a whole run under certificates."""

from __future__ import annotations

import asyncio
import datetime
import logging
import random
import shutil
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.launch.local import LocalRun
from diloco.protos.control_pb2 import StatusReply, StatusRequest
from diloco.security.run_ca import RunCa
from diloco.security.security import Security, metrics_protection
from diloco.transport.contracts import PROTOCOL_VERSION
from diloco.transport.errors import ConnectError, Unauthorised
from diloco.transport.identity import Role
from diloco.transport.retry import RetryPolicy, retry
from diloco.transport.security.tokens import make_token
from tests.run_files import run_to_end, write_run
from tests.waiting import wait_until, written

CERTIFIED = ("coordinator", "operator", "island/east", "island/west")
SHORTS = (*CERTIFIED, "syncer")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A run file, and a directory with certificates and tokens of everybody."""
    run_file = write_run(tmp_path, {"east": "", "west": ""})
    ca = RunCa(tmp_path / "certs", lambda: datetime.datetime.now(datetime.UTC))
    ca.create("test", 100)
    for short in CERTIFIED:
        ca.issue(short, 30, again=False)
    for short in SHORTS:
        ca.make_token(short)
    return run_file


def config(run_file: Path, *overrides: str) -> Config:
    return load_config(run_file, overrides)


def certs_of(run_file: Path) -> str:
    return f"transport.certs={run_file.parent / 'certs'}"


def tokens_of(run_file: Path) -> str:
    return f"transport.tokens={run_file.parent / 'certs'}"


def test_loopback_needs_nothing_and_other_machines_need_certificates(site: Path) -> None:
    plain = Security.of(config(site), Role.ISLAND, "east")

    assert plain == Security()
    for address in ("127.0.0.1:1", "localhost:1,[::1]:2"):
        assert plain.transport(address, Role.SYNCER).peer == address
    for address in ("10.0.0.5:1", "127.0.0.1:1,eu.example.org:2"):
        with pytest.raises(ConfigError, match=r"transport\.certs.*transport\.insecure = true"):
            plain.transport(address, Role.SYNCER)


def test_plaintext_between_machines_is_declared_and_warned_of(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        declared = Security.of(config(site, "transport.insecure=true"), Role.ISLAND, "east")

    assert declared.transport("10.0.0.5:1", Role.SYNCER)
    assert "traffic between the sites is not encrypted" in caplog.text
    with pytest.raises(ConfigError, match=r"transport\.certs is set, so traffic is encrypted"):
        config(site, "transport.insecure=true", certs_of(site))


def test_each_role_takes_its_own_files(site: Path) -> None:
    configured = config(site, certs_of(site), tokens_of(site))

    island = Security.of(configured, Role.ISLAND, "east")
    syncer = Security.of(configured, Role.SYNCER)
    coordinator = Security.of(configured, Role.COORDINATOR)

    assert island.tls is not None
    assert island.tls.identity.uri == "diloco://test/island/east"
    assert island.token
    assert island.tokens is None
    assert syncer.token
    assert syncer.tokens is not None
    assert not coordinator.token
    assert coordinator.tokens is not None


@pytest.mark.parametrize(
    ("missing", "role", "command"),
    [
        ("island-east.pem", Role.ISLAND, "diloco certs issue island/east"),
        ("island-east.token", Role.ISLAND, "diloco certs token island/east"),
        ("coordinator.pem", Role.SYNCER, "diloco certs issue coordinator"),
        ("tokens.json", Role.COORDINATOR, "tokens.json"),
    ],
)
def test_a_missing_file_is_named_with_the_command(
    missing: str, role: Role, command: str, site: Path
) -> None:
    (site.parent / "certs" / missing).unlink()
    configured = config(site, certs_of(site), tokens_of(site))

    with pytest.raises(ConfigError, match=command):
        Security.of(configured, role, "east" if role is Role.ISLAND else "")


def test_no_secret_is_shown_by_what_is_printed_of_it(site: Path) -> None:
    island = Security.of(config(site, tokens_of(site)), Role.ISLAND, "east")

    assert island.token not in repr(island)


def test_metrics_beyond_loopback_have_a_token_and_the_runs_certificate(site: Path) -> None:
    path = site.parent / "metrics.token"
    path.touch(mode=0o600)
    path.write_text(make_token())
    setting = f"telemetry.metrics_token={path}"

    secured = config(site, certs_of(site), setting)
    security = Security.of(secured, Role.COORDINATOR)
    protection = metrics_protection(secured, security)

    assert protection.token == path.read_text()
    assert protection.certificate is not None
    assert security.tls is not None
    assert protection.certificate() == security.tls.leaf_pem
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"metrics_token.*chmod 600"):
        metrics_protection(config(site, setting), Security())


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_a_run_under_certificates_and_tokens_keeps_its_secrets(site: Path) -> None:
    finished = run_to_end(site, [certs_of(site), tokens_of(site)])

    assert len(finished.ending_digests()) == 1
    certs, written = site.parent / "certs", ""
    for path in finished.state.root.rglob("*"):
        if path.is_file():
            written += path.read_bytes().decode("latin-1")
    secret = finished.state.secret.read_text()
    assert written.count(secret) == 1  # in its own file
    for short in SHORTS:
        stem = certs / short.replace("/", "-")
        assert stem.with_suffix(".token").read_text() not in written
        if short not in CERTIFIED:
            continue
        key = stem.with_suffix(".pem").read_text().split("PRIVATE KEY-----\n")[1][:60]
        assert key not in written


@pytest.mark.parametrize(
    ("proxy", "is_good"),
    [
        ("http://proxy.example:3128", True),
        ("http://user:word@10.0.0.1:80/", True),
        ("", True),
        ("user:word@10.0.0.1:80", False),
        ("https://user:word@10.0.0.1:80", False),
        ("http://user:word@10.0.0.1", False),
        ("http://user:word@10.0.0.1:port", False),
        ("http://user:wo rd@10.0.0.1:80", False),
    ],
)
def test_a_proxy_that_would_be_passed_by_is_refused_without_its_password(
    proxy: str, is_good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("grpc_proxy", proxy)
    declared = Security(insecure=True)

    if is_good:
        assert declared.transport("10.0.0.5:1", Role.SYNCER)
    else:
        with pytest.raises(ConfigError, match=r"grpc_proxy is not http://\[user") as caught:
            declared.transport("10.0.0.5:1", Role.SYNCER)
        assert "word@" not in str(caught.value).replace("password@", "")
    assert declared.transport("127.0.0.1:1", Role.SYNCER)


def certs(site: Path, *arguments: str) -> str:
    """Type `diloco certs`, where the CA is."""
    directory = str(site.parent / "certs")
    result = CliRunner().invoke(app, ["certs", *arguments, "--dir", directory])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.timeout(600)
@pytest.mark.parametrize("renewing_s", [0.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_a_run_under_way_refuses_strangers_takes_up_what_is_rotated_and_fences_the_revoked(
    site: Path, renewing_s: float
) -> None:
    lifetime = "transport.certificate_lifetime=20s"
    configured = config(site, certs_of(site), tokens_of(site), lifetime, "run.inner_steps=100000")
    ca = RunCa(site.parent / "certs", lambda: datetime.datetime.now(datetime.UTC))
    stolen = shutil.copytree(ca.directory, site.parent / "stolen")
    ca.issue("operator", 30, again=True)
    ca.revoke("operator", keep_newest=True)  # before the run, whose journal does not know of it
    thief = config(site, f"transport.certs={stolen}", tokens_of(site))

    async def status(security: Security, address: str) -> StatusReply:
        transport = security.transport(address, Role.COORDINATOR)
        header = StatusRequest(protocol_version=PROTOCOL_VERSION).SerializeToString()
        try:
            reply = await transport.call("control.status", header, deadline_s=20.0)
        finally:
            await transport.close()
        return StatusReply.FromString(reply.header)

    def shown(address: str) -> StatusReply:
        async def ask() -> StatusReply:  # a listener that is replaced hangs up on who just comes
            operator = Security.of(configured, Role.OPERATOR)
            policy = RetryPolicy(budget_s=30.0)
            return await retry(lambda: status(operator, address), policy, random.Random(0))

        return asyncio.run(ask())

    def versions(address: str) -> int:
        return min((fragment.version for fragment in shown(address).fragments), default=0)

    def lease_of(island: str, address: str) -> str:
        return next(each.lease for each in shown(address).islands if each.island == island)

    def wait_for_version(version: int, address: str) -> None:
        going_on = written(configured.telemetry_dir)
        wait_until(lambda: versions(address) >= version, progress=going_on)

    with LocalRun(configured) as run:
        run.start()
        address = run.address
        wait_for_version(1, address)
        with pytest.raises(ConnectError):
            asyncio.run(status(Security(), address))
        with pytest.raises(Unauthorised, match=r"may not call control\.status"):
            asyncio.run(status(Security.of(configured, Role.ISLAND, "east"), address))
        with pytest.raises(Unauthorised, match="operator was revoked"):
            asyncio.run(status(Security.of(thief, Role.OPERATOR), address))

        for short in CERTIFIED:
            ca.issue(short, 30, again=True)
        # A call that is on its way under what is then revoked is refused for good.
        wait_for_version(versions(address) + 2, address)
        tokens = ("--tokens", str(site.parent / "certs"))
        for short in CERTIFIED[1:]:
            said = certs(site, "revoke", short, address, "--earlier", *tokens)
            assert "its newest one is not" in said
        until = time.monotonic() + renewing_s  # every leaf is renewed several times meanwhile
        wait_for_version(versions(address) + 3, address)
        while time.monotonic() < until:
            wait_for_version(versions(address) + 1, address)
            assert all(process.poll() is None for process in run.islands.values())

        said = certs(site, "revoke", "island/east", address, *tokens)
        assert "east is out" in said
        wait_until(lambda: lease_of("east", address) == "kicked")
        log = configured.telemetry_dir / "east-0.log"
        refused = "control.join of island 'east': the certificate of island/east was revoked"
        wait_until(lambda: refused in log.read_text())  # when it would come back
        with pytest.raises(Unauthorised, match="island/east was revoked"):
            asyncio.run(status(Security.of(configured, Role.ISLAND, "east"), address))
        wait_for_version(versions(address) + 1, address)  # west goes on
        if not renewing_s:
            return
        certs(site, "rotate", "island/east")
        certs(site, "token", "island/east")
        undo = ["kick", address, "east", "--undo", "--certs", str(site.parent / "certs"), *tokens]
        assert CliRunner().invoke(app, undo).exit_code == 0
        wait_until(lambda: lease_of("east", address) == "active")
