"""mTLS on real sockets: who gets in, who does not and hears why, and what changes under way."""

from __future__ import annotations

import asyncio
import datetime
import logging
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtensionOID

from diloco.transport.contracts import IncomingCall, Reply
from diloco.transport.errors import ConnectError, Unauthorised
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.identity import Identity, Role
from diloco.transport.retry import RetryPolicy, retry
from diloco.transport.security.certificates import (
    CertificateError,
    certificate_pem,
    issue,
    make_authority,
)
from diloco.transport.security.tls import Tls
from tests.transport.pki import COORDINATOR, EAST, OPERATOR, RUN, SYNCER, WEST, Pki, days_ago

DEADLINE_S = 30.0


async def whoami(call: IncomingCall) -> Reply:
    assert call.caller is not None
    return Reply(call.caller.uri.encode(), await call.read_payload())


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path / "certs")


def serving(tls: Tls, claim: Callable[[str], Awaitable[None]]) -> None:
    async def run() -> None:
        server = GrpcServer("127.0.0.1:0", {"whoami": whoami}, tls=tls)
        await server.start()
        try:
            await claim(server.address)
        finally:
            await server.stop(0.0)

    asyncio.run(run())


async def ask(transport: GrpcTransport) -> str:
    return (await transport.call("whoami", b"", deadline_s=DEADLINE_S)).header.decode()


async def ask_once(address: str, tls: Tls | None, expects: Role = Role.COORDINATOR) -> str:
    transport = GrpcTransport(address, tls=tls, expects=expects)
    try:
        return await ask(transport)
    finally:
        await transport.close()


async def ask_raw(address: str, pem: bytes | None, ca: bytes) -> None:
    """Ask as somebody who ignores what our own client checks before."""
    credentials = grpc.ssl_channel_credentials(ca, pem, pem)
    options = (("grpc.ssl_target_name_override", "coordinator.diloco"),)
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        call = channel.stream_stream("/diloco.wire.v1/whoami", None, None)(iter([b""]))
        await asyncio.wait_for(call.read(), DEADLINE_S)


def self_signed_pem(identity: Identity) -> bytes:
    """Certificate and key of somebody who says himself that he is `identity`."""
    shown = issue(make_authority(RUN, days_ago(1), 90), identity, days_ago(0), 30).certificate
    key = ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateBuilder(
        issuer_name=shown.subject,
        subject_name=shown.subject,
        public_key=key.public_key(),
        serial_number=shown.serial_number,
        not_valid_before=shown.not_valid_before_utc,
        not_valid_after=shown.not_valid_after_utc,
        extensions=[
            extension
            for extension in shown.extensions
            if extension.oid != ExtensionOID.AUTHORITY_KEY_IDENTIFIER
        ],
    )
    return certificate_pem(builder.sign(key, hashes.SHA256())) + key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )


def test_the_server_knows_its_caller(pki: Pki) -> None:
    async def claim(address: str) -> None:
        assert await ask_once(address, pki.tls(EAST)) == f"diloco://{RUN}/island/east"
        assert await ask_once(address, pki.tls(OPERATOR)) == f"diloco://{RUN}/operator"

    serving(pki.tls(COORDINATOR), claim)


def test_strangers_are_refused_in_the_handshake_and_the_log_says_why(
    pki: Pki, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ca = (pki.directory / "ca.pem").read_bytes()
    foreign = issue(make_authority(RUN, days_ago(1), 90), EAST, days_ago(0), 30).pem
    expired = issue(pki.authority, EAST, days_ago(60), 30).pem
    strangers = {
        "certificate has expired": expired,
        "unable to get local issuer certificate": foreign,
        "self signed certificate": self_signed_pem(EAST),
        "PEER_DID_NOT_RETURN_A_CERTIFICATE": None,
    }

    async def claim(address: str) -> None:
        for pem in strangers.values():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask_raw(address, pem, ca)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(ConnectError, match="give them: --certs"):  # plaintext
            await ask_once(address, None)
        assert await ask_once(address, pki.tls(EAST))

    serving(pki.tls(COORDINATOR), claim)
    said = capfd.readouterr().err
    for reason in strangers:
        assert reason in said


def test_a_client_insists_on_the_role_and_the_run_of_its_server(pki: Pki, tmp_path: Path) -> None:
    other = Pki(tmp_path / "other")

    async def claim(address: str) -> None:
        with pytest.raises(ConnectError, match="of another role: is this the right address"):
            await ask_once(address, pki.tls(EAST), Role.SYNCER)
        with pytest.raises(ConnectError, match="not valid for this run"):
            await ask_once(address, other.tls(EAST))
        # An island's certificate makes nobody a coordinator.
        impostor = GrpcServer("127.0.0.1:0", {"whoami": whoami}, tls=pki.tls(WEST))
        await impostor.start()
        with pytest.raises(ConnectError):
            await ask_once(impostor.address, pki.tls(EAST))
        await impostor.stop(0.0)

    serving(pki.tls(COORDINATOR), claim)


def test_islands_serve_each_other_under_their_own_role(pki: Pki) -> None:
    async def claim(address: str) -> None:
        asked = await ask_once(address, pki.tls(WEST), expects=Role.ISLAND)
        assert asked == f"diloco://{RUN}/island/west"
        with pytest.raises(ConnectError):
            await ask_once(address, pki.tls(WEST), expects=Role.COORDINATOR)

    serving(pki.tls(EAST), claim)


def test_a_revoked_certificate_is_refused_on_an_open_connection(
    pki: Pki, caplog: pytest.LogCaptureFixture
) -> None:
    async def claim(address: str) -> None:
        east, west = (GrpcTransport(address, tls=pki.tls(i)) for i in (EAST, WEST))
        await ask(east)
        revoked.add(pki.serials[EAST])
        with pytest.raises(Unauthorised, match="island/east was revoked") as caught:
            await ask(east)
        assert not caught.value.is_retryable
        assert await ask(west)
        await east.close()
        await west.close()

    revoked = set[int]()
    tls = pki.tls(COORDINATOR)
    tls.is_revoked = revoked.__contains__
    with caplog.at_level(logging.WARNING):
        serving(tls, claim)
    assert "was revoked" in caplog.text


def test_a_certificate_that_expires_is_refused_on_an_open_connection(pki: Pki) -> None:
    now = datetime.datetime.now(datetime.UTC).timestamp()
    later = [0.0]
    pki.issue(COORDINATOR, days=2000)
    server = Tls(pki.directory, COORDINATOR, clock=lambda: now + later[0])

    async def claim(address: str) -> None:
        east = GrpcTransport(address, tls=pki.tls(EAST))
        await ask(east)
        later[0] = 91 * 86400.0
        with pytest.raises(Unauthorised, match="island/east expired at"):
            await ask(east)
        await east.close()

    serving(server, claim)


def test_certificates_of_both_ends_are_rotated_under_way(pki: Pki) -> None:
    async def claim(address: str) -> None:
        tls = pki.tls(EAST)
        east = GrpcTransport(address, tls=tls)
        await ask(east)
        pki.issue(COORDINATOR)
        revoked.add(pki.serials[EAST])
        pki.issue(EAST)
        assert await ask(east)  # with the new one: the old one is revoked
        await east.close()

    revoked = set[int]()
    server = pki.tls(COORDINATOR)
    server.is_revoked = revoked.__contains__
    serving(server, claim)


def test_calls_in_progress_survive_a_rotation(pki: Pki) -> None:
    async def run() -> None:
        started, may_end = asyncio.Event(), asyncio.Event()

        async def hold(call: IncomingCall) -> Reply:
            started.set()
            await may_end.wait()
            return Reply(b"done")

        handlers = {"hold": hold, "whoami": whoami}
        server = GrpcServer("127.0.0.1:0", handlers, tls=pki.tls(COORDINATOR))
        await server.start()
        east = GrpcTransport(server.address, tls=pki.tls(EAST))
        held = asyncio.create_task(east.call("hold", b"", deadline_s=DEADLINE_S))
        await started.wait()
        pki.issue(EAST)
        await ask(east)
        may_end.set()
        assert (await held).header == b"done"
        await east.close()
        await server.stop(0.0)

    asyncio.run(run())


def test_files_that_cannot_be_read_change_nothing(
    pki: Pki, caplog: pytest.LogCaptureFixture
) -> None:
    async def claim(address: str) -> None:
        east = GrpcTransport(address, tls=pki.tls(EAST))
        await ask(east)
        (pki.directory / "ca.pem").write_bytes(b"half a fi")
        assert await ask(east)
        assert await ask(east)
        await east.close()

    serving(pki.tls(COORDINATOR), claim)
    complaints = [r for r in caplog.records if "the last good ones stay" in r.getMessage()]
    assert len(complaints) == 2  # one a process: client and server


def test_a_server_that_returns_under_another_certificate_is_found(pki: Pki) -> None:
    async def run() -> None:
        tls = pki.tls(COORDINATOR)
        server = GrpcServer("127.0.0.1:0", {"whoami": whoami}, tls=tls)
        await server.start()
        east = GrpcTransport(server.address, tls=pki.tls(EAST))
        await ask(east)
        await server.stop(0.0)
        pki.issue(COORDINATOR)
        again = GrpcServer(server.address, {"whoami": whoami}, tls=Tls(pki.directory, COORDINATOR))
        await again.start()
        assert await retry(lambda: ask(east), RetryPolicy(budget_s=DEADLINE_S), random.Random(0))
        await east.close()
        await again.stop(0.0)

    asyncio.run(run())


# -- what a process refuses to start with ----------------------------------------------------------


def spoil(pki: Pki, what: str) -> None:
    path = pki.issue(COORDINATOR)
    match what:
        case "expired":
            pki.issue(COORDINATOR, age_days=60, days=30)
        case "not yet":
            pki.issue(COORDINATOR, age_days=-30)
        case "foreign":
            authority = make_authority(RUN, days_ago(1), 90)
            path.write_bytes(issue(authority, COORDINATOR, days_ago(0), 30).pem)
        case "another's":
            path.write_bytes(pki.issue(EAST).read_bytes())
        case "other key":
            own, other = path.read_bytes(), pki.issue(EAST).read_bytes()
            start = b"-----BEGIN PRIVATE"
            path.write_bytes(own[: own.index(start)] + other[other.index(start) :])
        case "open":
            path.chmod(0o644)
        case "missing":
            path.unlink()
        case "no key":
            own = path.read_bytes()
            path.write_bytes(own[: own.index(b"-----BEGIN PRIVATE")])


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("expired", "coordinator expired at"),
        ("not yet", "is a clock wrong"),
        ("foreign", "is foreign"),
        ("another's", "is the certificate of diloco://test/island/east, this process is"),
        ("other key", "the key does not belong to the certificate"),
        ("open", "is open to everybody: chmod 600"),
        ("missing", r"cannot read .*coordinator\.pem: No such file"),
        ("no key", "holds no private key"),
    ],
)
def test_a_process_says_at_its_start_what_is_wrong_with_its_own_files(
    pki: Pki, what: str, reason: str
) -> None:
    spoil(pki, what)

    with pytest.raises(CertificateError, match=reason):
        Tls(pki.directory, SYNCER)


def test_a_certificate_of_another_run_is_refused(pki: Pki, tmp_path: Path) -> None:
    pki.issue(EAST)

    with pytest.raises(CertificateError, match="this process is diloco://other/island/east"):
        Tls(pki.directory, Identity("other", Role.ISLAND, "east"))
    assert Tls(pki.directory, Identity("", Role.ISLAND, "east")).identity == EAST


def test_an_end_in_sight_is_warned_of_once_a_day(
    pki: Pki, caplog: pytest.LogCaptureFixture
) -> None:
    now = datetime.datetime.now(datetime.UTC).timestamp()
    later = [0.0]
    pki.issue(EAST, days=30)
    tls = Tls(pki.directory, EAST, clock=lambda: now + later[0])
    assert not caplog.records

    for day in (10.0, 10.5, 11.5, 31.0):
        later[0] = day * 86400
        assert tls.days_left == pytest.approx(30 - day, abs=1e-3)

    said = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in said] == [
        "the certificate of island/east expires in 20.0 days",
        "the certificate of island/east expires in 18.5 days",
        "the certificate of island/east has expired",
    ]
    assert "diloco certs rotate island/east" in said[0]
