"""TLS of one process: its certificate, the CA it believes, and what that CA took back.

    ca.pem            certificate of the run's CA; while it is replaced  everywhere
                      the new one first, then the earlier one
    IDENTITY.pem      certificate and private key of one identity, 0600  where that identity runs
    revoked.pem       revocation list, signed by the CA                  where a server runs;
                                                    clients are handed it and keep it there, too

Files are read again when they change, so certificates are rotated and revoked under a running
process: new connections use the new ones, and both ends judge the other's certificate at every
call, on old connections too: a server by what the connection shows, a client by a `proof`. A change
that cannot be read is logged and the last good files stay in force.
"""

from __future__ import annotations

import datetime
import logging
import os
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from transport.certificates import (
    CertificateError,
    Revoked,
    expiry_of,
    identity_of,
    insist_on_valid,
    read_certificates,
    read_key,
    read_revoked,
)
from transport.errors import Unauthorised
from transport.identity import SERVERS, Identity, Role
from transport.proof import NONCE_BYTES, make_challenge, make_proof, read_challenge, read_proof

_log = logging.getLogger(__name__)

CA_FILE = "ca.pem"
KEY_FILE = "ca.key"  # of the CA; where it lies no process writes
REVOKED_FILE = "revoked.pem"
#: From so many days before the end on, a process warns once a day.
WARN_DAYS = 21
#: Longest revocation list that is handed to clients, about 90 serial numbers: it travels as
#: metadata of a call. A longer one is brought to the sites by hand.
MAX_HANDED_BYTES = 5 << 10
_DAY_S = 86400.0

_Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Files of one moment, judged."""

    stamp: _Stamp
    cas: tuple[x509.Certificate, ...]
    ca_pem: bytes
    pem: bytes
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


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
        self._revoked = Revoked()
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

    def client_end(self) -> ClientEnd:
        """Return a client's end of a new connection."""
        return ClientEnd(self, self._current())

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return what a server listens with from now on: it insists on a client's certificate.

        It does not change when the files do (`grpc_listener`).
        """
        loaded = self._current()
        pair = (loaded.pem, loaded.pem)
        return grpc.ssl_server_credentials([pair], loaded.ca_pem, require_client_auth=True)

    def identify(self, pem: bytes) -> Identity:
        """Say who a caller is, by the certificate of its connection.

        Raises:
            Unauthorised: If that is not valid, or not any more.
        """
        try:
            # The handshake has judged it; it may have expired or been revoked since.
            return self.judge(_parsed(pem))
        except CertificateError as error:
            raise Unauthorised(str(error)) from error

    def judge(self, certificate: x509.Certificate) -> Identity:
        """Say whom a certificate names.

        Raises:
            CertificateError: If it is not valid, or not any more.
        """
        cas = self._current().cas
        return insist_on_valid(certificate, cas, self._revoked.serials, self._now())

    def prove(self, challenge: bytes, pem: bytes) -> tuple[bytes, bytes]:
        """Answer a client's challenge.

        Args:
            challenge: What it sent.
            pem: The certificate that its connection shows.

        Returns:
            The proof, and the revocation list if the client's is older; else empty.

        Raises:
            Unauthorised: If the challenge is none, or the certificate.
        """
        loaded = self._current()
        try:
            nonce, list_number = read_challenge(challenge)
            proof = make_proof(loaded.key, loaded.certificate, nonce, _parsed(pem))
        except ValueError as error:
            raise Unauthorised(str(error)) from error
        is_news = list_number < self._revoked.number
        fits = len(self._revoked.pem) <= MAX_HANDED_BYTES
        return proof, self._revoked.pem if is_news and fits else b""

    @property
    def list_number(self) -> int:
        """Number of the revocation list in force; 0: none is."""
        return self._revoked.number

    def take_list(self, pem: bytes) -> None:
        """Take over a revocation list that a server has handed out, if it is signed and newer.

        It is written beside the certificates, for other processes of this site and later ones; not
        where a server runs or certificates are issued, for there it is brought by people.
        """
        try:
            handed = read_revoked(pem, self._current().cas, "the revocation list of the peer")
        except CertificateError as error:
            _log.warning("not taken over: %s", error)
            return
        with self._lock:
            if handed.number <= self._revoked.number:
                return
            self._revoked = handed
        _log.info("revocation list taken over, number=%d", handed.number)
        path = self._directory / REVOKED_FILE
        if self._role in SERVERS or (self._directory / KEY_FILE).exists():
            return
        try:
            _replace(path, pem)
        except OSError as error:
            _log.warning(
                "cannot keep the revocation list in %s, it is forgotten when this process ends: %s",
                path,
                error.strerror,
            )

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
        cas = read_certificates(ca_pem, str(ca_path))
        certificate, *_ = read_certificates(pem, str(own_path))
        revoked = Revoked()
        if self._role in SERVERS or revoked_path.exists():
            revoked = read_revoked(_read(revoked_path), cas, str(revoked_path))
        # In force whatever else is wrong here: a list that takes back this process's certificate
        # takes others back, too. An older list is a copy from another day, or another CA's.
        if revoked.number >= self._revoked.number or not _is_signed(self._revoked, cas):
            self._revoked = revoked
        key = read_key(pem, str(own_path))
        if key.public_key() != certificate.public_key():
            raise CertificateError(f"{own_path}: the key does not belong to the certificate")
        try:
            identity = insist_on_valid(certificate, cas, self._revoked.serials, self._now())
        except CertificateError as error:
            raise CertificateError(f"{own_path}: {error}") from error
        expected = Identity(self._run or identity_of(cas[0]).run, self._role, self._name)
        if identity != expected:
            raise CertificateError(
                f"{own_path} is the certificate of {identity.uri}, this process is {expected.uri}"
            )
        return _Loaded(stamp, cas, ca_pem, pem, certificate, key)

    def _warn(self) -> None:
        now = self._clock()
        if now - self._warned_at < _DAY_S:
            return
        self._warned_at = now
        short = Identity("", self._role, self._name).short
        file = self._files()[2]
        for what, certificate, remedy in (
            (
                f"certificate of {short}",
                self._loaded.certificate,
                f"diloco certs rotate {short}, then bring {file} here; it is taken up without a "
                f"restart",
            ),
            ("CA of this run", self._loaded.cas[0], "diloco certs rotate ca, which says the rest"),
        ):
            left = (expiry_of(certificate) - self._now()).total_seconds() / _DAY_S
            if left < WARN_DAYS:
                when = f"expires in {left:.1f} days" if left > 0 else "has expired"
                _log.warning("the %s %s: %s", what, when, remedy)

    def _now(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self._clock(), datetime.UTC)


class ClientEnd:
    """A client's end of one connection: what it shows there, and how its server proves itself.

    `is_proved` says whether the server has, since the connection was made; who uses it keeps it.
    """

    def __init__(self, tls: Tls, loaded: _Loaded) -> None:
        """Keep the files of this moment: the connection shows them as long as it lasts."""
        self._tls = tls
        self._loaded = loaded
        self.is_proved = False

    def credentials(self) -> grpc.ChannelCredentials:
        """Return what the connection is made with."""
        loaded = self._loaded
        return grpc.ssl_channel_credentials(loaded.ca_pem, loaded.pem, loaded.pem)

    def challenge(self) -> bytes:
        """Draw what the server must answer, once."""
        return make_challenge(secrets.token_bytes(NONCE_BYTES), self._tls.list_number)

    def insist_on_proof(
        self, challenge: bytes, proof: bytes, revocations: bytes, expects: Role
    ) -> None:
        """Judge a server by its answer to `challenge`, and take over the list that it hands out.

        Raises:
            CertificateError: If it has not proved to be `expects`, with a certificate that is valid
                and not revoked.
        """
        certificate = read_proof(proof, read_challenge(challenge)[0], self._loaded.certificate)
        if revocations:
            self._tls.take_list(revocations)
        identity = self._tls.judge(certificate)
        if identity.role is not expects:
            raise CertificateError(f"the peer is {identity.short}, not the {expects}")


@lru_cache(maxsize=256)
def _parsed(pem: bytes) -> x509.Certificate:
    certificate, *_ = read_certificates(pem, "the connection")
    return certificate


def _is_signed(revoked: Revoked, cas: tuple[x509.Certificate, ...]) -> bool:
    try:
        read_revoked(revoked.pem, cas, "the list in force")
    except CertificateError:
        return False
    return True


def _replace(path: Path, text: bytes) -> None:
    """Write a file that others may be reading: old or new, never half."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as written:
        written.write(text)
        written.flush()
        os.fsync(written.fileno())
    os.chmod(written.name, 0o644)
    os.replace(written.name, path)


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
