"""TLS of one process: its certificate, the CA it believes, and what that CA took back.

    ca.pem            certificate of the run's CA                        everywhere
    IDENTITY.pem      certificate and private key of one identity, 0600  where that identity runs
    revoked.pem       revocation list, signed by the CA                  where a server runs

Files are read again when they change, so certificates are rotated and revoked under a running
process: new connections use the new ones, and a server judges the certificate of every call, on old
connections too. A change that cannot be read is logged and the last good files stay in force.

A client does not see the serial number of a server: a *server's* stolen key is answered by a new CA
(README.md of this directory).
"""

from __future__ import annotations

import datetime
import logging
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import grpc
from cryptography import x509

from transport.certificates import (
    CertificateError,
    expiry_of,
    identity_of,
    insist_on_valid,
    read_certificate,
    read_key,
    read_revoked,
)
from transport.errors import Unauthorised
from transport.identity import SERVERS, Identity

_log = logging.getLogger(__name__)

CA_FILE = "ca.pem"
REVOKED_FILE = "revoked.pem"
#: From so many days before the end on, a process warns once a day.
WARN_DAYS = 21
_DAY_S = 86400.0

_Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Files of one moment, judged."""

    stamp: _Stamp
    ca: x509.Certificate
    ca_pem: bytes
    pem: bytes
    certificate: x509.Certificate
    revoked: frozenset[int]


class Tls:
    """One process's side of every TLS connection; safe for use by several threads."""

    def __init__(
        self, directory: Path, identity: Identity, clock: Callable[[], float] = time.time
    ) -> None:
        """Read and judge the files.

        Args:
            directory: Where they lie.
            identity: Whose process this is; an empty run means that of the CA.
            clock: Seconds since 1970.

        Raises:
            CertificateError: If a file is missing, unreadable for this process or readable for
                everybody, or its certificate is not valid, or somebody else's.
        """
        self._directory = directory
        self._role, self._name, self._run = identity.role, identity.name, identity.run
        self._clock = clock
        self._lock = threading.Lock()
        self._warned_at = float("-inf")
        self._refused: _Stamp | None = None
        self._loaded = self._load(self._stamp())
        self.identity = identity_of(self._loaded.certificate)
        self._warn()

    @property
    def days_left(self) -> float:
        """Days until this process's certificate expires; negative once it has."""
        return (expiry_of(self._current().certificate) - self._now()).total_seconds() / _DAY_S

    @property
    def stamp(self) -> object:
        """Something that changes when other files come into force."""
        return self._current().stamp

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return what a client connects with."""
        loaded = self._current()
        return grpc.ssl_channel_credentials(loaded.ca_pem, loaded.pem, loaded.pem)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return what a server listens with: it insists on a client's certificate."""
        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(),
            self._server_configuration,
            require_client_authentication=True,
        )

    def identify(self, pem: bytes) -> Identity:
        """Say who a caller is, by the certificate of its connection.

        Raises:
            Unauthorised: If that is not valid, or not any more.
        """
        loaded = self._current()
        try:
            # The handshake has judged it; it may have expired or been revoked since.
            certificate = _parsed(pem)
            return insist_on_valid(certificate, loaded.ca, loaded.revoked, self._now())
        except CertificateError as error:
            raise Unauthorised(str(error)) from error

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        loaded = self._current()
        pair = (loaded.pem, loaded.pem)
        return grpc.ssl_server_certificate_configuration([pair], loaded.ca_pem)

    def _current(self) -> _Loaded:
        """Return the newest good files."""
        stamp = self._stamp()
        with self._lock:
            if stamp not in (self._loaded.stamp, self._refused):
                try:
                    self._loaded = self._load(stamp)
                    self._warned_at, self._refused = float("-inf"), None
                    _log.info("certificates read again, directory=%s", self._directory)
                except CertificateError as error:
                    self._refused = stamp
                    _log.error("certificates changed, the last good ones stay: %s", error)
        self._warn()
        return self._loaded

    def _stamp(self) -> _Stamp:
        return tuple(_stamp(self._directory / name) for name in self._files())

    def _files(self) -> tuple[str, ...]:
        return CA_FILE, REVOKED_FILE, f"{Identity('', self._role, self._name).file_stem}.pem"

    def _load(self, stamp: _Stamp) -> _Loaded:
        ca_path, revoked_path, own_path = (self._directory / name for name in self._files())
        ca_pem, pem = _read(ca_path), _read(own_path)
        if stat.S_IMODE(own_path.stat().st_mode) & 0o007:
            raise CertificateError(f"{own_path} is open to everybody: chmod 600 {own_path}")
        ca, certificate = (
            read_certificate(ca_pem, str(ca_path)),
            read_certificate(pem, str(own_path)),
        )
        revoked: frozenset[int] = frozenset()
        if self._role in SERVERS or revoked_path.exists():
            revoked = read_revoked(_read(revoked_path), ca, str(revoked_path))
        if read_key(pem, str(own_path)).public_key() != certificate.public_key():
            raise CertificateError(f"{own_path}: the key does not belong to the certificate")
        try:
            identity = insist_on_valid(certificate, ca, revoked, self._now())
        except CertificateError as error:
            raise CertificateError(f"{own_path}: {error}") from error
        expected = Identity(self._run or identity_of(ca).run, self._role, self._name)
        if identity != expected:
            raise CertificateError(
                f"{own_path} is the certificate of {identity.uri}, this process is {expected.uri}"
            )
        return _Loaded(stamp, ca, ca_pem, pem, certificate, revoked)

    def _warn(self) -> None:
        now = self._clock()
        if now - self._warned_at < _DAY_S:
            return
        self._warned_at = now
        left = (expiry_of(self._loaded.certificate) - self._now()).total_seconds() / _DAY_S
        if left < WARN_DAYS:
            short = Identity("", self._role, self._name).short
            _log.warning(
                "the certificate of %s %s: diloco certs rotate %s, then bring %s here; it is taken "
                "up without a restart",
                short,
                f"expires in {left:.1f} days" if left > 0 else "has expired",
                short,
                self._files()[2],
            )

    def _now(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self._clock(), datetime.UTC)


@lru_cache(maxsize=256)
def _parsed(pem: bytes) -> x509.Certificate:
    return read_certificate(pem, "the connection")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(f"cannot read {path}: {error.strerror}") from error
