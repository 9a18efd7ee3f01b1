"""Metrics beyond loopback: a token, the run's certificate, and peers that hold nothing up."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.core import GaugeMetricFamily

from diloco.telemetry.prometheus import MetricsServer
from diloco.telemetry.protection import Protection
from diloco.transport.security.certificates import read_certificates
from diloco.transport.security.tokens import make_token
from tests.transport.pki import COORDINATOR, Pki

TIMEOUT_S = 30.0


def serving(protection: Protection, claim: Callable[[str], None]) -> None:
    async def run() -> None:
        server = MetricsServer(
            "127.0.0.1:0",
            lambda: [GaugeMetricFamily("answer", "it", 42)],
            setting="test.metrics",
            protection=protection,
        )
        await server.start(is_restart=False)
        try:
            await asyncio.to_thread(claim, server.address)
        finally:
            await server.stop()

    asyncio.run(run())


def scrape(url: str, token: str = "", context: ssl.SSLContext | None = None) -> str:
    request = urllib.request.Request(url)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as reply:
        return str(reply.read().decode())


def test_a_scrape_without_the_token_gets_nothing() -> None:
    token = make_token()

    def claim(address: str) -> None:
        url = f"http://{address}/metrics"
        for given in ("", make_token(), token[:-1]):
            with pytest.raises(urllib.error.HTTPError) as caught:
                scrape(url, given)
            assert caught.value.code == 401
            assert "answer" not in caught.value.read().decode()
        assert "answer 42.0" in scrape(url, token)

    serving(Protection(token), claim)


def test_with_certificates_it_is_https_under_the_name_of_the_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = Pki(tmp_path).tls(COORDINATOR)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))  # the key is in no file
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    context.check_hostname = False  # urllib knows no other name than the address

    def claim(address: str) -> None:
        assert "answer 42.0" in scrape(f"https://{address}/metrics", context=context)
        with (
            socket.create_connection(address.split(":"), timeout=TIMEOUT_S) as raw,
            ssl.create_default_context(cafile=str(tmp_path / "ca.pem")).wrap_socket(
                raw, server_hostname="coordinator.diloco"
            ) as secured,
        ):
            assert secured.version() == "TLSv1.3"
        with pytest.raises(OSError):
            scrape(f"http://{address}/metrics")

    serving(Protection(certificate=lambda: tls.leaf_pem), claim)


def test_a_peer_that_says_nothing_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("diloco.telemetry.prometheus._SILENCE_S", 0.3)

    def claim(address: str) -> None:
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as silent:
            assert "answer 42.0" in scrape(f"http://{address}/metrics")
            assert silent.recv(1) == b""  # closed by the server

    serving(Protection(), claim)


def test_peers_that_trickle_hold_up_neither_scrapes_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diloco.telemetry.prometheus._MAX_SCRAPES", 2)
    monkeypatch.setattr("diloco.telemetry.prometheus._SCRAPE_S", 0.5)

    async def run() -> None:
        server = MetricsServer("127.0.0.1:0", list, setting="test.metrics")
        await server.start(is_restart=False)
        host, port = server.address.split(":")
        tricklers = [socket.create_connection((host, int(port))) for _ in range(8)]

        def trickle(trickler: socket.socket) -> None:
            with contextlib.suppress(OSError):
                trickler.sendall(b"GET /metrics HTTP/1.1\r\n")
                while True:
                    trickler.sendall(b"a: b\r\n")
                    time.sleep(0.05)

        ended = [asyncio.create_task(asyncio.to_thread(trickle, t)) for t in tricklers]
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*ended)  # each is cut off
            await asyncio.to_thread(scrape, f"http://{server.address}/metrics")
            again = [socket.create_connection((host, int(port))) for _ in range(8)]
            await server.stop()
        for connection in (*tricklers, *again):
            connection.close()

    asyncio.run(run())


def test_a_renewed_certificate_is_taken_up(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    pems = [pki.tls(COORDINATOR).leaf_pem for _ in range(2)]

    def shown(address: str) -> int:
        host, port = address.split(":")
        pem = ssl.get_server_certificate((host, int(port)), timeout=TIMEOUT_S)
        return read_certificates(pem.encode(), "shown")[0].serial_number

    def claim(address: str) -> None:
        before = shown(address)
        del pems[0]
        after = shown(address)
        pems[0] = b"half a fi"
        assert before != after == shown(address)

    serving(Protection(certificate=lambda: pems[0]), claim)


def test_the_token_is_not_shown_by_what_is_printed_of_it() -> None:
    token = make_token()

    assert token not in repr(Protection(token))
