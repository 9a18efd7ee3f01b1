"""TLS of one process: its certificates, the CA it believes, and whom it lets in.

    ca.pem            certificate of the run's CA; while it is replaced  everywhere
                      the new one first, then the earlier one
    IDENTITY.pem      certificate and private key of one identity, 0600  where that identity runs
    coordinator.pem   those of the issuer, 0600           where coordinator and syncers run

`certificates` says what each is for. IDENTITY.pem is shown to the coordinator; everybody else is
shown a leaf, which lies in no file and has a key of its own. Coordinator and syncers issue theirs
themselves, islands ask the coordinator: when they first need one, and again after one to two thirds
of its time, drawn at random, so that the processes of a run do not come at once. What fails is
tried again and logged while the last leaf is shown. How old a leaf is, each process counts by its
own clock.

Files are read again when they change, and new connections use the new ones. On open connections an
IDENTITY.pem is judged at each call by the CAs that are believed then; a leaf by its dates only, as
its handshake has judged its issuer: one below a CA that was retired is accepted until it expires. A
change that cannot be read is logged and the last good files stay in force.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from diloco.transport.errors import ConnectError, TransportError, Unauthorised
from diloco.transport.identity import SERVERS, Identity, Role
from diloco.transport.security.certificates import (
    CLOCK_SKEW,
    Authority,
    CertificateError,
    check_dates,
    check_issuer,
    check_valid,
    expiry_of,
    identity_of,
    is_issued_by,
    issue_leaf,
    key_pem,
    make_request,
    read_certificates,
    read_key,
    read_request,
)

_log = logging.getLogger(__name__)

CA_FILE = "ca.pem"
KEY_FILE = "ca.key"  # of the CA
ISSUER_FILE = "coordinator.pem"
#: From so many days before the end on, a process warns once a day.
WARN_DAYS = 21
#: Seconds for which a leaf is valid.
LIFETIME_S = _DAY_S = 86400.0
#: Of its time a leaf is shown so long, for clocks differ.
_SHOWN_SHARE = 0.95
#: Until a failed renewal is tried again: this share of its lifetime, so many seconds at most.
_AGAIN_SHARE, _AGAIN_S = 0.01, 60.0

_Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Files of one moment, judged; `own` is an issuer where coordinator or syncer run."""

    stamp: _Stamp
    cas: tuple[x509.Certificate, ...]
    ca_pem: bytes
    pem: bytes
    own: Authority


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf, its issuer's certificate and its key as PEM; times by this process's clock."""

    pem: bytes
    serial: int
    issuer: x509.Certificate
    since: float
    renew_at: float
    until: float


class Tls:
    """One process's side of every TLS connection; safe for use by several threads.

    Attributes:
        identity: Whose process this is.
        ask: Has the coordinator issue a leaf for a request; None: the issuer that lies next to the
            other files does, as where everything is on one machine.
        on_failure: Hears of a renewal that failed, in the event loop that needed it.
        is_revoked: Whether a certificate with this serial number was revoked.
    """

    def __init__(
        self,
        directory: Path,
        identity: Identity,
        clock: Callable[[], float] = time.time,
        lifetime_s: float = LIFETIME_S,
    ) -> None:
        """Read and judge the files.

        Args:
            directory: Where they lie.
            identity: Whose process this is; an empty run means that of the CA.
            clock: Seconds since 1970.
            lifetime_s: Of leaves that are issued here.

        Raises:
            CertificateError: If a file is missing, unreadable for this process or readable for
                everybody, or its certificate is not valid, or somebody else's.
        """
        self.ask: Callable[[bytes], Awaitable[bytes]] | None = None
        self.on_failure: Callable[[str], None] = lambda text: None
        self.is_revoked: Callable[[int], bool] = lambda serial: False
        self._directory = directory
        self._is_server = identity.role in SERVERS
        self._file = ISSUER_FILE if self._is_server else f"{identity.file_stem}.pem"
        self._clock = clock
        self._lifetime_s = lifetime_s
        self._lock = threading.Lock()
        self._warned_at = float("-inf")
        self._refused: _Stamp | None = None
        self._leaf: _Leaf | None = None
        self._is_doubted = False
        self._asking: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}
        self._ask_again_at = float("-inf")
        self._failure: Exception | None = None
        self.identity = identity
        self._loaded = self._load(self._stamp())
        self.identity = Identity(self._loaded.own.run, identity.role, identity.name)
        self._warn()

    @property
    def days_left(self) -> float:
        """Days until this process's file expires; negative once it has."""
        return self._days_until_end(self._current().own.certificate)

    @property
    def problem(self) -> str:
        """What ends within `WARN_DAYS`, and what to do; empty: nothing does."""
        self._current()
        return "; ".join(self._endings())

    @property
    def stamp(self) -> object:
        """Something that changes when other files or another leaf come into force."""
        loaded, leaf = self._current(), self._leaf
        return loaded.stamp, leaf.serial if leaf else 0

    @property
    def leaf_pem(self) -> bytes:
        """The leaf with its issuer's certificate and its key; islands await `ready` before.

        Raises:
            CertificateError: If there is none.
        """
        self._current()
        if self._leaf is None:
            raise CertificateError(f"no certificate was issued to {self.identity.short} yet")
        return self._leaf.pem

    def client_credentials(self, expects: Role) -> grpc.ChannelCredentials:
        """Return what a connection to a server of role `expects` is made with."""
        loaded = self._current()
        is_own = expects is Role.COORDINATOR and not self._is_server
        pem = loaded.pem if is_own else self.leaf_pem
        return grpc.ssl_channel_credentials(loaded.ca_pem, pem, pem)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return what a server listens with from now on: it insists on a client's certificate.

        It does not change when the files do (`grpc_listener`).
        """
        loaded, pem = self._current(), self.leaf_pem
        return grpc.ssl_server_credentials([(pem, pem)], loaded.ca_pem, require_client_auth=True)

    def identify(self, pem: bytes) -> Identity:
        """Say who a caller is, by the certificate of its connection, whose handshake has judged it.

        The coordinator takes leaves from its own site, and else what the CA itself has issued; all
        others take leaves.

        Raises:
            Unauthorised: If it is of the other kind, revoked, or not valid any more.
        """
        try:
            certificate, loaded, now = _parsed(pem), self._current(), self._now()
            identity = check_dates(certificate, now)
            if self.is_revoked(certificate.serial_number):
                raise CertificateError(f"the certificate of {identity.short} was revoked")
            if self.identity.role is Role.COORDINATOR and identity.role not in SERVERS:
                return check_valid(certificate, loaded.cas, now)
            if any(is_issued_by(certificate, ca) for ca in loaded.cas):
                raise CertificateError(
                    f"{identity.short} shows a certificate that is for the coordinator alone"
                )
        except CertificateError as error:
            raise Unauthorised(str(error)) from error
        return identity

    def issue(self, request: bytes, caller: Identity) -> bytes:
        """Issue a leaf to an island that asks for one; returns it and its issuer's, as PEM.

        Raises:
            Unauthorised: If it is no island, or asks for another's, or for what is none.
        """
        try:
            if caller.role is not Role.ISLAND:
                raise CertificateError(f"{caller.uri} needs no certificate of the coordinator")
            key = read_request(request, caller)
            return self._issue(self._current().own, caller, key)
        except CertificateError as error:
            raise Unauthorised(str(error)) from error

    async def ready(self) -> None:
        """See to a leaf that is not due; waits where there is none that is valid.

        Raises:
            Unauthorised: If the coordinator issues none.
            ConnectError: If it is not reached, or what it issues is not valid here.
        """
        self._current()
        now = self._clock()
        is_valid = self._leaf is not None and now < self._leaf.until
        is_due = not self._is_server and self._is_due(now)
        if not is_due or (is_valid and now < self._ask_again_at):
            return
        loop = asyncio.get_running_loop()
        asking = self._asking.get(loop)
        if asking is None or asking.done():
            asking = self._asking[loop] = loop.create_task(self._ask(now))
            asking.add_done_callback(lambda task: self._asked(loop, task))
        if is_valid:
            return
        await asyncio.shield(asking)
        if self._is_due(self._clock()):
            kind = Unauthorised if isinstance(self._failure, Unauthorised) else ConnectError
            raise kind(f"no certificate for {self.identity.short}: {self._failure}")

    def doubt(self) -> None:
        """Ask whether the leaf with which a server was not reached has another issuer by now.

        The server may know another CA. If the issuer is the same the leaf stays, so a server that
        answers badly does not have connections and listeners replaced.
        """
        if self._clock() >= self._ask_again_at:
            self._is_doubted = True

    def _asked(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
        if self._asking.get(loop) is task:
            del self._asking[loop]

    async def _ask(self, now: float) -> None:
        """Get a leaf; a failure is logged."""
        key, request = make_request(self.identity)
        try:
            if self.ask is not None:
                pem = await self.ask(request)
            else:
                issuer = self._read_own(self._directory / ISSUER_FILE)[1]
                pem = self._issue(issuer, self.identity, key.public_key())
            self._take(pem, key)
        except (TransportError, CertificateError) as error:
            self._failure, leaf = error, self._leaf
            lifetime_s, left_s = (leaf.until - leaf.since, leaf.until - now) if leaf else (0.0, 0.0)
            self._ask_again_at = now + min(_AGAIN_S, _AGAIN_SHARE * lifetime_s)
            text = (
                f"no new certificate for {self.identity.short}, the present one ends in "
                f"{max(0.0, left_s):.0f} s: {error}"
            )
            _log.warning("%s", text)
            self.on_failure(text)
        else:
            _log.info("certificate issued to %s", self.identity.short)

    def _take(self, pem: bytes, key: ec.EllipticCurvePrivateKey) -> None:
        """Judge a leaf, and show it from now on, unless only the issuer of the last was in doubt.

        Raises:
            CertificateError: If it is not for this process, or not below the CA.
        """
        now = self._clock()
        leaf, *above = read_certificates(pem, "what was issued")
        if not above or not is_issued_by(leaf, above[0]) or leaf.public_key() != key.public_key():
            raise CertificateError("what was issued is no certificate for the key that was sent")
        check_valid(above[0], self._loaded.cas, self._now())
        if check_dates(leaf, self._now()) != self.identity:
            raise CertificateError(f"what was issued is not for {self.identity.uri}")
        end = expiry_of(leaf)
        valid = min(end - leaf.not_valid_before_utc - CLOCK_SKEW, end - self._now())
        lifetime_s = _SHOWN_SHARE * valid.total_seconds()
        renew_s = max(1.0, lifetime_s * secrets.SystemRandom().uniform(1 / 3, 2 / 3))
        self._ask_again_at = now + min(_AGAIN_S, _AGAIN_SHARE * lifetime_s)
        self._is_doubted = False
        shown = self._leaf
        if shown is None or shown.issuer != above[0] or self._is_due(now):
            self._leaf = _Leaf(
                pem + key_pem(key), leaf.serial_number, above[0], now, now + renew_s,
                now + lifetime_s,
            )  # fmt: skip

    def _is_due(self, now: float) -> bool:
        leaf = self._leaf
        return self._is_doubted or leaf is None or not leaf.since <= now < leaf.renew_at

    def _issue(
        self, issuer: Authority, identity: Identity, key: ec.EllipticCurvePublicKey
    ) -> bytes:
        lifetime = datetime.timedelta(seconds=self._lifetime_s)
        return issue_leaf(issuer, identity, key, self._now(), lifetime)

    def _current(self) -> _Loaded:
        """Return the newest good files; a server's leaf is renewed here."""
        stamp = self._stamp()
        with self._lock:
            if stamp not in (self._loaded.stamp, self._refused):
                try:
                    self._loaded = self._load(stamp)
                    self._warned_at, self._refused = float("-inf"), None
                    self._ask_again_at = float("-inf")
                    self.doubt()
                    _log.info("certificates read again, directory=%s", self._directory)
                except CertificateError as error:
                    self._refused = stamp
                    _log.error("certificates changed, the last good ones stay: %s", error)
            own = self._loaded.own
            if self._is_server and self._is_due(self._clock()) and self._now() < own.ends:
                key, _ = make_request(self.identity)
                self._take(self._issue(own, self.identity, key.public_key()), key)
        self._warn()
        return self._loaded

    def _stamp(self) -> _Stamp:
        return tuple(_stamp(self._directory / name) for name in (CA_FILE, self._file))

    def _load(self, stamp: _Stamp) -> _Loaded:
        ca_path, own_path = self._directory / CA_FILE, self._directory / self._file
        ca_pem, _ = _read(ca_path)
        cas = read_certificates(ca_pem, str(ca_path))
        pem, own = self._read_own(own_path)
        try:
            identity = check_valid(own.certificate, cas, self._now())
        except CertificateError as error:
            raise CertificateError(f"{own_path}: {error}") from error
        role = Role.COORDINATOR if self._is_server else self.identity.role
        run = self.identity.run or identity_of(cas[0]).run
        expected = Identity(run, role, self.identity.name)
        if identity != expected:
            raise CertificateError(
                f"{own_path} is the certificate of {identity.uri}, this process is {expected.uri}"
            )
        if self._is_server:
            check_issuer(own.certificate)
        return _Loaded(stamp, cas, ca_pem, pem, own)

    def _read_own(self, path: Path) -> tuple[bytes, Authority]:
        """Read a file with a certificate and its key."""
        pem, mode = _read(path)
        if stat.S_IMODE(mode) & 0o007:
            raise CertificateError(f"{path} is open to everybody: chmod 600 {path}")
        certificate, *_ = read_certificates(pem, str(path))
        key = read_key(pem, str(path))
        if key.public_key() != certificate.public_key():
            raise CertificateError(f"{path}: the key does not belong to the certificate")
        return pem, Authority(certificate, key)

    def _warn(self) -> None:
        now = self._clock()
        if now - self._warned_at < _DAY_S:
            return
        self._warned_at = now
        for text in self._endings():
            _log.warning("%s", text)

    def _endings(self) -> Iterator[str]:
        loaded = self._loaded
        short = identity_of(loaded.own.certificate).short
        for what, certificate, remedy in (
            (
                f"certificate of {short}",
                loaded.own.certificate,
                f"diloco certs rotate {short}, then bring {self._file} here; it is taken up "
                f"without a restart",
            ),
            ("CA of this run", loaded.cas[0], "diloco certs rotate ca, which says the rest"),
        ):
            left = self._days_until_end(certificate)
            if left < WARN_DAYS:
                when = f"expires in {left:.1f} days" if left > 0 else "has expired"
                yield f"the {what} {when}: {remedy}"

    def _days_until_end(self, certificate: x509.Certificate) -> float:
        return (expiry_of(certificate) - self._now()).total_seconds() / _DAY_S

    def _now(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self._clock(), datetime.UTC)


@lru_cache(maxsize=8192)  # of each rank that calls
def _parsed(pem: bytes) -> x509.Certificate:
    certificate, *_ = read_certificates(pem, "the connection")
    return certificate


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> tuple[bytes, int]:
    """Return what a file holds, and its mode."""
    try:
        with path.open("rb") as file:
            return file.read(), os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise CertificateError(f"cannot read {path}: {error.strerror}") from error
