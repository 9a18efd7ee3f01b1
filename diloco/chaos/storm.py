"""Strangers that connect to a server, many at once: silent, or as far as a TLS handshake goes."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import threading
from collections import deque
from enum import StrEnum
from pathlib import Path

from diloco.transport.addresses import split_address

#: Seconds for which a stranger waits.
_TIMEOUT_S = 5.0
#: What a client of HTTP/2 says first.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class Manner(StrEnum):
    """How far an unknown connection goes."""

    SILENT = "silent"
    HELLO = "hello"
    WHOLE = "whole"


class Storm:
    """Connections to one server, from `begin` to `end`.

    Each of `num_threads` keeps its newest `held` open. Whole handshakes are made with `certificate`
    and left out without one.
    """

    def __init__(
        self,
        address: str,
        *,
        certificate: Path | None = None,
        manners: tuple[Manner, ...] = tuple(Manner),
        most: int = 0,
        num_threads: int = 24,
        held: int = 20,
        source: str = "",
    ) -> None:
        """Connect to nothing yet.

        Args:
            address: ``host:port``.
            certificate: File with the certificate and key of one who may connect.
            manners: How they connect, in turns.
            most: Connections in all; 0: as many as there is time.
            num_threads: Connections that are made at once.
            held: Of each of them.
            source: Address to come from; empty: the system's choice.
        """
        host, port = split_address(address)
        self._place = host.strip("[]"), port
        self._certificate = certificate
        self._manners = [m for m in manners if certificate or m is not Manner.WHOLE]
        self._most = most
        self._held = held
        self._source = (source, 0) if source else None
        self._numbers = itertools.count()
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(num_threads)]
        self.num_connected = 0
        self.num_handshakes = 0

    def begin(self) -> None:
        """Start."""
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stop, and close what is open."""
        self._is_over.set()
        self.wait()
        for each in self._open:
            each.close()

    @property
    def is_blowing(self) -> bool:
        """Whether connections are still being made."""
        return any(thread.is_alive() for thread in self._threads)

    def wait(self) -> None:
        """Wait until there were `most` connections; the newest stay open."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        held: deque[socket.socket] = deque()
        try:
            while not self._is_over.is_set():
                number = next(self._numbers)
                if self._most and number >= self._most:
                    break
                with contextlib.suppress(OSError):  # refused, or closed: what a stranger may expect
                    held.append(self._connect(self._manners[number % len(self._manners)]))
                if len(held) > self._held:
                    held.popleft().close()
        finally:
            with self._lock:
                self._open.extend(held)

    def _connect(self, manner: Manner) -> socket.socket:
        stranger = socket.create_connection(self._place, _TIMEOUT_S, self._source)
        with self._lock:
            self.num_connected += 1
        try:
            if manner is Manner.HELLO:
                stranger.sendall(_hello())
            elif manner is Manner.WHOLE and self._certificate is not None:
                greet(stranger, self._certificate)
                with self._lock:
                    self.num_handshakes += 1
        except OSError:
            stranger.close()
            raise
        return stranger


def greet(raw: socket.socket, certificate: Path) -> bytes:
    """Shake hands, begin HTTP/2 and wait for an answer; returns the server's certificate (DER).

    By hand: `wrap_socket` leaves a connection open that was reset before it.

    Raises:
        OSError: If the server ends it.
    """
    context = _trusting()
    context.load_cert_chain(certificate)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing)
    for step in (tls.do_handshake, lambda: tls.write(_PREFACE), lambda: tls.read(1)):
        while True:
            try:
                step()
                break
            except ssl.SSLWantReadError:
                raw.sendall(outgoing.read())
                if not (data := raw.recv(1 << 16)):
                    raise ConnectionResetError("the server ended the handshake") from None
                incoming.write(data)
    return tls.getpeercert(binary_form=True) or b""


def _trusting() -> ssl.SSLContext:
    """Believe any server: strangers do not care whom they disturb."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def _hello() -> bytes:
    """Return what a TLS client says first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        _trusting().wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()
