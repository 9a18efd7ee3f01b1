"""A server whose certificate was revoked is refused by its clients, who never see its handshake."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.transport.pki import COORDINATOR, EAST, SYNCER, WEST, Pki, days_ago
from transport.certificates import CertificateError, make_revocation_list, read_certificates
from transport.contracts import IncomingCall, Reply
from transport.errors import ConnectError, TransportClosed, Unauthorised
from transport.grpc_client import GrpcTransport
from transport.grpc_server import GrpcServer, _Context
from transport.grpc_wire import (
    ACCEPTED_METADATA,
    CHALLENGE_METADATA,
    PROOF_METADATA,
    PROVE_METHOD,
    SERVICE,
)
from transport.identity import Identity
from transport.limits import Limits
from transport.pacing import Pacer
from transport.proof import make_challenge, read_proof
from transport.tls import MAX_HANDED_BYTES, Tls

DEADLINE_S = 30.0
PAYLOAD = b"pseudo-gradient"


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    pki = Pki(tmp_path / "certs")
    for identity in (COORDINATOR, SYNCER, EAST, WEST):
        pki.issue(identity)
    return pki


def copied(pki: Pki, name: str, *identities: Identity) -> Path:
    """What a site, or a thief, has of the certificates of this moment."""
    directory = pki.directory.parent / name
    directory.mkdir()
    for file in ("ca.pem", "revoked.pem", *(f"{i.file_stem}.pem" for i in identities)):
        shutil.copy2(pki.directory / file, directory / file)
    return directory


def rotate_and_revoke(pki: Pki, identity: Identity) -> None:
    pki.revoke([identity])
    pki.issue(identity)


class Server(GrpcServer):
    """Keeps what it is told, and which methods it was asked for."""

    def __init__(self, tls: Tls, bind: str = "127.0.0.1:0") -> None:
        super().__init__(bind, {"tell": self._tell}, tls=tls)
        self.told: list[bytes] = []
        self.asked: list[tuple[str, bool]] = []

    async def _tell(self, call: IncomingCall) -> Reply:
        self.told.append(bytes(await call.read_payload()))
        return Reply(b"heard")

    async def _serve(self, method: str, context: _Context) -> None:
        metadata = dict(context.invocation_metadata() or ())
        self.asked.append((method, "diloco-token" in metadata))
        await super()._serve(method, context)


class Relay(Server):
    """Stands between: ends the client's TLS itself, and has the real server answer challenges."""

    def __init__(self, tls: Tls, real: str) -> None:
        super().__init__(tls)
        self._own, self._real = tls, real
        self.relayed = 0

    async def _serve(self, method: str, context: _Context) -> None:
        challenge = dict(context.invocation_metadata() or ())[CHALLENGE_METADATA]
        options = (("grpc.ssl_target_name_override", "coordinator.diloco"),)
        credentials = self._own.client_end().credentials()
        async with grpc.aio.secure_channel(self._real, credentials, options=options) as channel:
            call = channel.stream_stream(f"/{SERVICE}/{PROVE_METHOD}", None, None)(
                metadata=((CHALLENGE_METADATA, challenge),)
            )
            proof = dict(await call.initial_metadata())[PROOF_METADATA]
            self.relayed += 1
        await context.send_initial_metadata((ACCEPTED_METADATA, (PROOF_METADATA, proof)))


def serving(server: Server, claim: Callable[[str], Awaitable[None]]) -> None:
    async def run() -> None:
        await server.start()
        try:
            await claim(server.address)
        finally:
            await server.stop(0.0)

    asyncio.run(run())


async def tell(transport: GrpcTransport) -> bytes:
    return (await transport.call("tell", b"", PAYLOAD, deadline_s=DEADLINE_S)).header


@contextmanager
def refused(reason: str) -> Iterator[None]:
    with pytest.raises(ConnectError, match=f"the server is not believed: .*{reason}"):
        yield


def test_a_revoked_server_is_told_nothing(pki: Pki) -> None:
    thief = Server(Tls(copied(pki, "thief", COORDINATOR), COORDINATOR))
    rotate_and_revoke(pki, COORDINATOR)

    async def claim(address: str) -> None:
        transport = GrpcTransport(address, tls=pki.tls(EAST), token="t" * 43)
        for _ in range(2):
            with refused("coordinator was revoked"):
                await tell(transport)
        await transport.close()

    serving(thief, claim)
    assert thief.told == []
    assert thief.asked == [(PROVE_METHOD, False)] * 2


def test_a_revoked_server_that_takes_a_broken_connection_over_is_told_nothing(pki: Pki) -> None:
    stolen = copied(pki, "thief", COORDINATOR)
    rotate_and_revoke(pki, COORDINATOR)

    async def run() -> list[tuple[str, bool]]:
        server = Server(Tls(pki.directory, COORDINATOR))
        await server.start()
        transport = GrpcTransport(server.address, tls=pki.tls(EAST), token="t" * 43)
        assert await tell(transport) == b"heard"
        await server.stop(0.0)
        with pytest.raises(ConnectError):
            await tell(transport)
        thief = Server(Tls(stolen, COORDINATOR), server.address)
        await thief.start()
        (channel,) = transport._channels.values()
        async with asyncio.timeout(DEADLINE_S):
            while (state := channel.get_state(True)) is not grpc.ChannelConnectivity.READY:
                await channel.wait_for_state_change(state)
        for _ in range(2):
            with refused("coordinator was revoked"):
                await tell(transport)
        await transport.close()
        await thief.stop(0.0)
        return thief.asked

    assert asyncio.run(run()) == [(PROVE_METHOD, False)] * 2


class HeldPacer(Pacer):
    """Lets nothing leave while it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.may_leave, self.is_asked = asyncio.Event(), asyncio.Event()
        self.may_leave.set()

    async def admit(self, num_bytes: int, *, is_bulk: bool) -> None:
        self.is_asked.set()
        await self.may_leave.wait()

    async def holding(self, transport: GrpcTransport) -> asyncio.Task[bytes]:
        """Begin a call, and return when it waits here."""
        self.may_leave.clear()
        self.is_asked.clear()
        telling = asyncio.create_task(tell(transport))
        await self.is_asked.wait()
        return telling


def test_a_revoked_server_that_takes_over_while_a_payload_waits_is_told_nothing(pki: Pki) -> None:
    stolen = copied(pki, "thief", COORDINATOR)
    rotate_and_revoke(pki, COORDINATOR)

    async def run() -> list[tuple[str, bool]]:
        server, pacer = Server(Tls(pki.directory, COORDINATOR)), HeldPacer()
        await server.start()
        transport = GrpcTransport(server.address, tls=pki.tls(EAST), token="t" * 43, pacer=pacer)
        assert await tell(transport) == b"heard"
        telling = await pacer.holding(transport)
        await server.stop(0.0)
        with pytest.raises(ConnectError):
            await transport.call("tell", b"", deadline_s=DEADLINE_S)  # waits for no turn
        thief = Server(Tls(stolen, COORDINATOR), server.address)
        await thief.start()
        (channel,) = transport._channels.values()
        async with asyncio.timeout(DEADLINE_S):
            while (state := channel.get_state(True)) is not grpc.ChannelConnectivity.READY:
                await channel.wait_for_state_change(state)
        pacer.may_leave.set()
        with refused("coordinator was revoked"):
            await telling
        await transport.close()
        await thief.stop(0.0)
        return thief.asked

    assert asyncio.run(run()) == [(PROVE_METHOD, False)]


def test_a_server_proves_itself_anew_after_a_call_that_broke_however_late_grpc_says_so(
    pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(Tls(pki.directory, COORDINATOR))

    async def claim(address: str) -> None:
        transport = GrpcTransport(address, tls=pki.tls(EAST))
        assert await tell(transport) == b"heard"
        (channel,) = transport._channels.values()
        monkeypatch.setattr(
            type(channel), "get_state", lambda channel: grpc.ChannelConnectivity.READY
        )
        await server.stop(0.0)
        with pytest.raises(ConnectError):
            await tell(transport)
        assert not transport._ends[channel].is_proved
        await transport.close()

    serving(server, claim)


def test_new_certificates_while_a_payload_waits_cost_it_nothing(pki: Pki) -> None:
    async def claim(address: str) -> None:
        pacer = HeldPacer()
        transport = GrpcTransport(address, tls=pki.tls(EAST), pacer=pacer)
        assert await tell(transport) == b"heard"
        telling = await pacer.holding(transport)
        pki.issue(EAST)
        await transport.call("tell", b"", deadline_s=DEADLINE_S)
        pacer.may_leave.set()
        assert await telling == b"heard"
        await transport.close()

    serving(Server(Tls(pki.directory, COORDINATOR)), claim)


def test_a_transport_closed_while_a_payload_waits_says_so(pki: Pki) -> None:
    async def claim(address: str) -> None:
        pacer = HeldPacer()
        transport = GrpcTransport(address, tls=pki.tls(EAST), pacer=pacer)
        telling = await pacer.holding(transport)
        await transport.close()
        pacer.may_leave.set()
        with pytest.raises(TransportClosed):
            await telling

    serving(Server(Tls(pki.directory, COORDINATOR)), claim)


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "new certificates"])
def test_a_connection_that_is_closed_while_its_server_proves_itself_is_named(
    is_closed: bool, pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def claim(address: str) -> None:
        transport = GrpcTransport(address, tls=pki.tls(EAST))
        prove = GrpcTransport._prove

        async def prove_late(*arguments: Any) -> None:
            await prove(*arguments)
            monkeypatch.undo()
            if is_closed:
                await transport.close()
            else:
                pki.issue(EAST)
                assert await tell(transport) == b"heard"  # over another connection

        monkeypatch.setattr(GrpcTransport, "_prove", prove_late)
        kind, reason = (
            (TransportClosed, "this transport was closed")
            if is_closed
            else (ConnectError, "its connection was replaced, with the certificates")
        )
        with pytest.raises(kind, match=reason):
            await tell(transport)
        await transport.close()

    serving(Server(Tls(pki.directory, COORDINATOR)), claim)


def test_a_server_is_refused_as_soon_as_it_is_revoked_on_an_open_connection(pki: Pki) -> None:
    server = Server(Tls(copied(pki, "server", COORDINATOR), COORDINATOR))

    async def claim(address: str) -> None:
        transport = GrpcTransport(address, tls=pki.tls(EAST))
        assert await tell(transport) == b"heard"
        pki.revoke([COORDINATOR])
        with refused("coordinator was revoked"):
            await tell(transport)
        await transport.close()

    serving(server, claim)


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    """Return a frame of HTTP/2 (RFC 9113, 4.1)."""
    return (
        struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body
    )


async def ask_without_reading(address: str, context: ssl.SSLContext | None, num_calls: int) -> None:
    """Ask for proofs over one connection that gives the server no room for a byte of them."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    fields = {
        ":method": "POST",
        ":scheme": "https" if context else "http",
        ":path": f"/{SERVICE}/{PROVE_METHOD}",
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    headers = b"".join(
        b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in field)
        for field in fields.items()
    )
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    writer.write(frame(4, 0, 0, struct.pack(">HI", 4, 0)))  # SETTINGS_INITIAL_WINDOW_SIZE = 0
    for n in range(num_calls):
        writer.write(frame(1, 4, 2 * n + 1, headers))
    try:
        await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("is_tls", [True, False], ids=["TLS", "plaintext"])
def test_proofs_that_nobody_reads_are_bounded_in_number_and_time(pki: Pki, is_tls: bool) -> None:
    most = finished = under_way = 0

    class Counting(GrpcServer):
        async def _serve(self, method: str, context: _Context) -> None:
            nonlocal most, finished, under_way
            under_way += 1
            try:
                await super()._serve(method, context)
            finally:
                under_way -= 1
                finished += 1

        def _proof(self, context: _Context) -> tuple[tuple[str, bytes], ...]:
            nonlocal most
            most += 1
            return super()._proof(context)

    async def run() -> None:
        limits = Limits(silence_s=1.0, call_s=1.0, calls_per_caller=4)
        tls = Tls(pki.directory, COORDINATOR) if is_tls else None
        server = Counting("127.0.0.1:0", {}, tls=tls, limits=limits)
        await server.start()
        context = None
        if is_tls:
            context = ssl.create_default_context(cafile=pki.directory / "ca.pem")
            context.check_hostname = False
            context.load_cert_chain(pki.directory / "island-east.pem")
            context.set_alpn_protocols(["h2"])
        asking = asyncio.create_task(ask_without_reading(server.address, context, 20))
        async with asyncio.timeout(DEADLINE_S):
            while finished < 20:
                await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await server.stop(0.0)

    asyncio.run(run())
    assert under_way == 0
    if is_tls:
        assert most == 4


def test_a_relayed_proof_is_not_believed(pki: Pki) -> None:
    stolen = copied(pki, "thief", COORDINATOR)
    rotate_and_revoke(pki, COORDINATOR)

    async def claim(real: str) -> None:
        relay = Relay(Tls(stolen, COORDINATOR), real)
        await relay.start()
        transport = GrpcTransport(relay.address, tls=pki.tls(EAST))
        with refused("somebody stands between"):
            await tell(transport)
        await transport.close()
        await relay.stop(0.0)
        assert relay.relayed == 1

    serving(Server(Tls(pki.directory, COORDINATOR)), claim)


def test_an_answer_to_another_challenge_is_not_believed(pki: Pki) -> None:
    server, east, west = pki.tls(COORDINATOR), pki.tls(EAST), pki.tls(WEST)
    certificates = {
        i: (pki.directory / f"{i.file_stem}.pem").read_bytes() for i in (EAST, WEST, COORDINATOR)
    }
    end = east.client_end()
    challenge = end.challenge()
    proof, _ = server.prove(challenge, certificates[EAST])

    end.insist_on_proof(challenge, proof, b"", COORDINATOR.role)
    for other_challenge, other_proof, reason in [
        (end.challenge(), proof, "somebody stands between"),
        (challenge, server.prove(challenge, certificates[WEST])[0], "somebody stands between"),
        (challenge, b"", "does not prove who it is"),
        (challenge, proof[:40], "does not prove who it is"),
        (challenge, west.prove(challenge, certificates[EAST])[0], "the peer is island/west"),
    ]:
        with pytest.raises(CertificateError, match=reason):
            end.insist_on_proof(other_challenge, other_proof, b"", COORDINATOR.role)
    with pytest.raises(Unauthorised, match="a challenge has 40 bytes"):
        server.prove(b"short", certificates[EAST])
    (client,) = read_certificates(certificates[EAST], "file")
    with pytest.raises(CertificateError):
        read_proof(b"\xff" * 300, bytes(32), client)


def test_a_client_is_handed_the_newest_list_and_keeps_it_for_its_site(pki: Pki) -> None:
    site = copied(pki, "site", EAST, WEST)
    leader, other = Tls(site, EAST), Tls(site, WEST)
    stolen = copied(pki, "thief", SYNCER)
    pki.revoke([SYNCER])
    newest = (pki.directory / "revoked.pem").read_bytes()

    async def claim(address: str) -> None:
        transport = GrpcTransport(address, tls=leader)
        await tell(transport)
        assert (site / "revoked.pem").read_bytes() == newest
        assert await tell(transport) == b"heard"  # over a new connection
        await transport.close()

        thief = Server(Tls(stolen, SYNCER))
        await thief.start()
        second = GrpcTransport(thief.address, tls=other, expects=SYNCER.role)
        with refused("syncer was revoked"):
            await tell(second)
        await second.close()
        await thief.stop(0.0)

    serving(Server(Tls(pki.directory, COORDINATOR)), claim)
    assert not list(site.glob("revoked.pem?*"))


def test_only_a_newer_list_of_the_runs_own_ca_is_taken_over(pki: Pki, tmp_path: Path) -> None:
    old = (pki.directory / "revoked.pem").read_bytes()
    pki.revoke([WEST])
    tls = pki.tls(EAST)
    other = Pki(tmp_path / "other")
    other.list_number = 50
    other.revoke(())

    for handed in (old, (other.directory / "revoked.pem").read_bytes(), b"junk"):
        tls.take_list(handed)
        assert tls.list_number == 2
    # Nor is a file of another day.
    (pki.directory / "revoked.pem").write_bytes(old)
    with pytest.raises(Unauthorised, match="island/west was revoked"):
        tls.identify((pki.directory / "island-west.pem").read_bytes())


@pytest.mark.parametrize("place", ["where the CA is", "where a server runs", "read-only"])
def test_a_handed_list_is_kept_in_memory_where_it_must_not_be_written(
    place: str, pki: Pki, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    identity = SYNCER if place == "where a server runs" else EAST
    site = copied(pki, "site", identity)
    if place == "where the CA is":
        (site / "ca.key").touch()
    if place == "read-only":  # root may write anywhere

        def refuse(path: Path, text: bytes) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("transport.tls._replace", refuse)
    before = (site / "revoked.pem").read_bytes()
    tls = Tls(site, identity)
    pki.revoke([WEST])

    tls.take_list((pki.directory / "revoked.pem").read_bytes())

    assert tls.list_number == 2
    assert (site / "revoked.pem").read_bytes() == before
    with pytest.raises(Unauthorised, match="island/west was revoked"):
        tls.identify((pki.directory / "island-west.pem").read_bytes())
    assert ("forgotten when this process ends" in caplog.text) == (place == "read-only")


def test_a_list_too_long_for_a_call_is_not_handed_out(pki: Pki) -> None:
    server, pem = pki.tls(COORDINATOR), (pki.directory / "island-east.pem").read_bytes()
    challenge = make_challenge(bytes(32), 0)
    assert server.prove(challenge, pem)[1]
    text = make_revocation_list(pki.authority, range(1, 400), days_ago(0), 9)
    assert len(text) > MAX_HANDED_BYTES

    (pki.directory / "revoked.pem").write_bytes(text)

    assert not server.prove(challenge, pem)[1]
    assert server.list_number == 9


def test_a_server_that_is_revoked_itself_still_refuses_the_others_of_its_list(pki: Pki) -> None:
    server = pki.tls(COORDINATOR)
    west = (pki.directory / "island-west.pem").read_bytes()
    server.identify(west)

    pki.revoke([COORDINATOR, WEST])

    with pytest.raises(Unauthorised, match="island/west was revoked"):
        server.identify(west)
