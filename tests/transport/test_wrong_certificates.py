"""Every wrong certificate, shown to coordinator and syncer, and by anyone who poses as a server."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID as Usage

from diloco.transport.addresses import split_address
from diloco.transport.contracts import IncomingCall, Reply
from diloco.transport.errors import ConnectError
from diloco.transport.framing import frame_whole
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.identity import Identity, Role, server_name
from diloco.transport.security.certificates import (
    Authority,
    certificate_pem,
    issue,
    key_pem,
    read_key,
)
from tests.transport.pki import COORDINATOR, EAST, OPERATOR, SYNCER, Pki, days_ago

DEADLINE_S = 30.0
HUNG_UP = ""  # in the handshake, without a word
ALONE = "is for the coordinator alone"


async def whoami(call: IncomingCall) -> Reply:
    assert call.caller is not None
    return Reply(f"let in as {call.caller.short}".encode())


class Forger:
    """Makes certificates as anyone who has keys of the run, or of one that is called the same."""

    def __init__(self, pki: Pki) -> None:
        self.pki, others = pki, Pki(pki.directory.parent / "others")
        self.issuer, self.other = (
            Authority(issued.certificate, read_key(issued.pem, "issuer"))
            for each in (pki, others)
            for issued in [issue(each.authority, COORDINATOR, days_ago(0), 30)]
        )

    def below(
        self,
        name: str,
        above: Authority | None = None,
        *,
        age_days: float = 0.5,
        usages: Sequence[x509.ObjectIdentifier] = (Usage.CLIENT_AUTH, Usage.SERVER_AUTH),
        uris: Sequence[str] = (EAST.uri,),
        is_ca: bool = False,
    ) -> Authority:
        """Make a certificate of one day below `above` (None: the issuer), with its key."""
        key, above = ec.generate_private_key(ec.SECP256R1()), above or self.issuer
        names = [*map(x509.UniformResourceIdentifier, uris), x509.DNSName(name)]
        start = days_ago(age_days)
        builder = (
            x509.CertificateBuilder()
            .issuer_name(above.certificate.subject)
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(start + datetime.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=True)
        )
        return Authority(builder.sign(above.key, hashes.SHA256()), key)

    def leaf(self, name: str, **wrong: object) -> bytes:
        """Make a leaf of the issuer with something wrong, and show the issuer with it."""
        return pem(self.below(name, **wrong), self.issuer)  # type: ignore[arg-type]

    def deeper(self, name: str, *, is_ca: bool) -> bytes:
        """Make a leaf below another, which says that it is an issuer or not."""
        middle = self.below("middle", is_ca=is_ca)
        return pem(self.below(name, middle), middle, self.issuer)

    def file(self, identity: Identity) -> bytes:
        """Make what the operator brings to a site."""
        return self.pki.issue(identity).read_bytes()


def pem(*chain: Authority) -> bytes:
    shown = b"".join(certificate_pem(each.certificate) for each in chain)
    return shown + key_pem(chain[0].key)


#: What is shown, by the name of the server as which it would do.
BY_ANYBODY: dict[str, Callable[[Forger, str], bytes]] = {
    "expired": lambda forger, name: forger.leaf(name, age_days=3),
    "not yet valid": lambda forger, name: forger.leaf(name, age_days=-1),
    "of another CA": lambda f, name: pem(f.below(name, f.other), f.other),
    "of another CA's issuer": lambda f, name: pem(f.below(name, f.other), f.issuer),
    "without its issuer": lambda forger, name: pem(forger.below(name)),
    "the issuer itself": lambda forger, name: pem(forger.issuer),
    "the CA itself": lambda forger, name: pem(forger.pki.authority),
    "below a leaf": lambda forger, name: forger.deeper(name, is_ca=False),
    "path too long": lambda forger, name: forger.deeper(name, is_ca=True),
    "wrong usage": lambda forger, name: forger.leaf(name, usages=[Usage.CODE_SIGNING]),
}
BY_CALLERS: dict[str, tuple[Callable[[Forger, str], bytes], str, str]] = {
    **{what: (make, HUNG_UP, HUNG_UP) for what, make in BY_ANYBODY.items()},
    "server only": (lambda f, n: f.leaf(n, usages=[Usage.SERVER_AUTH]), HUNG_UP, HUNG_UP),
    "two identities": (
        lambda forger, name: forger.leaf(name, uris=[EAST.uri, SYNCER.uri]),
        "names no identity", "names no identity",
    ),
    "a line break": (
        lambda f, name: f.leaf(name, uris=[f"{EAST.uri}\n"]),
        "names no identity", "names no identity",
    ),
    "an island's leaf": (lambda f, n: f.leaf(n), "is foreign", "let in as island/east"),
    "an island's file": (lambda f, n: f.file(EAST), "let in as island/east", ALONE),
    "the operator's file": (lambda f, n: f.file(OPERATOR), "let in as operator", ALONE),
}  # fmt: skip
#: And how a client words it.
BY_SERVERS: dict[str, tuple[Callable[[Forger, str], bytes], str]] = {
    **{what: (make, "VERIFY_FAILED|BAD_SIGN|KEY_USAGE") for what, make in BY_ANYBODY.items()},
    "expired": (BY_ANYBODY["expired"], "is one wrong, here or there"),
    "not yet valid": (BY_ANYBODY["not yet valid"], "is one wrong, here or there"),
    "client only": (lambda f, n: f.leaf(n, usages=[Usage.CLIENT_AUTH]), "certificate purpose"),
    "of another role": (lambda f, name: f.leaf(f"x{name}"), "of another role"),
    "an island's file": (lambda f, name: f.file(EAST), "certificate purpose"),
}


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path / "certs")


def is_agreed(address: str, shown: Path | None, most: ssl.TLSVersion) -> bool:
    """Whether a server agrees to a handshake; our own libraries would refuse some of it before."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        context.minimum_version = context.maximum_version = most
    context.set_ciphers("ALL:@SECLEVEL=0")
    if shown is not None:
        context.load_cert_chain(shown)
    with socket.create_connection(split_address(address), DEADLINE_S) as plain:
        try:
            with context.wrap_socket(plain) as connection:
                return bool(connection.recv(1))  # of its HTTP/2 settings
        except OSError:
            return False


async def words_for(address: str, role: Role, shown: bytes, ca: bytes) -> str:
    """Return what a server says to anyone who it agreed to a handshake with."""
    credentials = grpc.ssl_channel_credentials(ca, shown, shown)
    options = (("grpc.ssl_target_name_override", server_name(role)),)
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        ask = channel.unary_stream("/diloco.wire.v1/whoami", None, None)
        call = ask(frame_whole(b"", b""), timeout=DEADLINE_S)
        return b"".join([bytes(message) async for message in call]).decode(errors="replace")


@pytest.mark.parametrize("server", [COORDINATOR, SYNCER], ids=lambda server: server.short)
def test_a_wrong_certificate_lets_nobody_in(pki: Pki, server: Identity, tmp_path: Path) -> None:
    async def claim() -> None:
        forger, shown = Forger(pki), tmp_path / "shown.pem"
        ca = (pki.directory / "ca.pem").read_bytes()
        listening = GrpcServer("127.0.0.1:0", {"whoami": whoami}, tls=pki.tls(server))
        await listening.start()
        address = listening.address

        async def agrees(path: Path | None, most: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> bool:
            return await asyncio.to_thread(is_agreed, address, path, most)

        for what, (make, *heard) in BY_CALLERS.items():
            text, expected = make(forger, "island.diloco"), heard[server is SYNCER]
            shown.write_bytes(text)
            assert await agrees(shown) == bool(expected), what
            if expected:
                assert expected in await words_for(address, server.role, text, ca), what
        assert not await agrees(None)
        shown.write_bytes(forger.leaf("island.diloco"))
        assert await agrees(shown, ssl.TLSVersion.TLSv1_2)
        assert not await agrees(shown, ssl.TLSVersion.TLSv1_1)
        await listening.stop(0.0)

    asyncio.run(claim())


@pytest.mark.parametrize("role", [Role.COORDINATOR, Role.SYNCER, Role.ISLAND])
def test_nobody_serves_with_a_wrong_certificate(pki: Pki, role: Role, tmp_path: Path) -> None:
    async def refused(way: GrpcTransport, reason: str) -> None:
        with pytest.raises(ConnectError, match=reason):
            await way.call("whoami", b"", deadline_s=DEADLINE_S)
        await way.close()

    async def claim() -> None:
        forger, tls, shown = Forger(pki), pki.tls(EAST), tmp_path / "shown.pem"
        for make, reason in BY_SERVERS.values():
            shown.write_bytes(make(forger, server_name(role)))
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.set_alpn_protocols(["h2"])
            context.load_cert_chain(shown)
            impostor = await asyncio.start_server(hang_up, "127.0.0.1", 0, ssl=context)
            port = impostor.sockets[0].getsockname()[1]
            await refused(GrpcTransport(f"127.0.0.1:{port}", tls=tls, expects=role), reason)
            impostor.close()
        plain = GrpcServer("127.0.0.1:0", {"whoami": whoami})
        await plain.start()
        await refused(GrpcTransport(plain.address, tls=tls, expects=role), "does not speak TLS")
        await plain.stop(0.0)

    asyncio.run(claim())


def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()
