"""The certificate authority of a run, as a directory: issues, rotates, revokes, hands out tokens.

    ca.pem                    public; every site has it
    ca.key        0600        stays where certificates are issued, and goes nowhere else
    issued.json               serial number, identity, end and CA of all that was issued
    revoked.json              serial numbers that were taken back; for the coordinator's site: it is
                              told of them under way, and reads the file when it starts
    IDENTITY.pem  0600        certificate and key of one identity, for its site; coordinator.pem
                              issues what lasts a day (`diloco.transport.security.certificates`), to
                              syncers, too
    tokens.json               digests; for coordinator and syncer, where join tokens are used
    IDENTITY.token 0600       for its site

While the CA itself is replaced, ca.pem and ca.key hold the new one first, then the earlier one:
sites believe both until all have certificates of the new one.

Every file is old or new after a crash. What a certificate says is
`diloco.transport.security.certificates`'.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from cryptography import x509

from diloco.durable import read_json, write_durably, write_json
from diloco.errors import ConfigError
from diloco.state_dir import Held, hold, make_directory
from diloco.transport.identity import Identity, Role
from diloco.transport.security.certificates import (
    Authority,
    CertificateError,
    certificate_pem,
    check_issuer,
    check_valid,
    expiry_of,
    identity_of,
    issue,
    key_pem,
    make_authority,
    read_certificates,
    read_keys,
)
from diloco.transport.security.tls import CA_FILE, KEY_FILE
from diloco.transport.security.tokens import TABLE_FILE, digest_of, make_token

ISSUED_FILE = "issued.json"
_REVOKED_FILE = "revoked.json"
_LOCK_FILE = "ca.lock"

Clock: TypeAlias = Callable[[], datetime.datetime]


def read_revoked(directory: Path) -> set[int]:
    """Read the serial numbers that were taken back; none where the file is not there.

    Raises:
        ConfigError: If it cannot be read.
    """
    path = directory / _REVOKED_FILE
    try:
        return set(read_json(path) or ())
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}. Copy it from where the CA is") from error


@dataclass(frozen=True, slots=True)
class IssuedEntry:
    """One certificate that was issued."""

    identity: Identity
    serial: int
    expires: datetime.datetime
    is_revoked: bool
    #: Whether it is the newest of its identity: the one in its file.
    is_current: bool
    #: Whether the newest CA issued it; an earlier one is on its way out.
    is_of_newest_ca: bool

    def days_left(self, now: datetime.datetime) -> float:
        """Days until it expires; negative once it has."""
        return (self.expires - now).total_seconds() / 86400


@dataclass(frozen=True, slots=True)
class Taken:
    """What was taken back of an identity: serial numbers, and now its token."""

    serials: Sequence[int]
    has_token: bool


class RunCa:
    """One run's authority. Each change holds a lock on the directory."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        """Assign only; `clock` tells UTC."""
        self.directory = directory
        self._clock = clock

    def create(self, run: str, days: int) -> None:
        """Make the authority of a new run.

        Raises:
            ConfigError: If there is one already.
        """
        make_directory(self.directory, "the directory of certificates")
        with self._changing():
            if (self.directory / CA_FILE).exists():
                raise ConfigError(
                    f"{self.directory} holds a CA already: use it (diloco certs issue NAME), or "
                    f"choose another --dir. A new CA makes every certificate of the old one useless"
                )
            authority = make_authority(run, self._clock(), days)
            write_json(self.directory / ISSUED_FILE, [])
            self._write(KEY_FILE, key_pem(authority.key), mode=0o600)
            # Last: without it the directory holds no CA, and the next attempt begins again.
            self._write(CA_FILE, certificate_pem(authority.certificate))

    def issue(self, short: str, days: int, *, again: bool) -> Path:
        """Issue a certificate with a new key; returns its file.

        Args:
            short: Whose: coordinator, operator or island/NAME.
            days: How long it is valid, at most until the CA's own end.
            again: Whether there must be one already (a rotation), or must not.

        Raises:
            ConfigError: If there is one and `again` is false, or none and it is true.
        """
        with self._changing():
            authority = self._authority()
            identity = _identity(authority.run, short)
            if identity.role is Role.SYNCER:
                raise ConfigError(
                    "syncers issue their certificates with coordinator.pem, at its site: diloco "
                    "certs rotate coordinator makes a new one"
                )
            path = self.directory / f"{identity.file_stem}.pem"
            if path.exists() and not again:
                raise ConfigError(f"{path} is there: diloco certs rotate {short} replaces it")
            if again and not path.exists():
                raise ConfigError(f"{path} is not there: diloco certs issue {short} makes it")
            if (self.expires - self._clock()).days < 1:
                raise ConfigError(
                    f"the CA in {self.directory} itself ends at {self.expires:%F %R} UTC: replace "
                    f"it first: diloco certs rotate ca --dir {self.directory}"
                )
            issued = issue(authority, identity, self._clock(), days)
            expires = expiry_of(issued.certificate).isoformat()
            row = [
                _serial(issued.certificate),
                identity.uri,
                expires,
                _serial(authority.certificate),
            ]
            # Recorded first: what was handed out can be revoked, whatever happens next.
            write_json(self.directory / ISSUED_FILE, [*self._issued(), row])
            self._write(path.name, issued.pem, mode=0o600)
            return path

    def revoke(self, short: str, *, keep_newest: bool) -> Taken:
        """Take certificates of an identity back, and its token; says what that is by now.

        Args:
            short: Whose.
            keep_newest: Whether the newest certificate and the token stay, as after a rotation.

        Raises:
            ConfigError: If it never had one, or it is the coordinator's.
        """
        with self._changing():
            identity = _identity(self.run, short)
            if identity.role is Role.COORDINATOR:
                raise ConfigError(
                    "anyone who has coordinator.pem has issued certificates that nobody knows of: "
                    f"replace the CA, diloco certs rotate ca --dir {self.directory}"
                )
            mine = [int(serial, 16) for serial, uri, *_ in self._issued() if uri == identity.uri]
            has_token = not keep_newest and self._forget_token(identity)
            if not (mine or has_token):
                raise ConfigError(
                    f"no certificate was issued to {short}, and no token: diloco certs show --dir "
                    f"{self.directory}"
                )
            revoked, taken = self._revoked(), mine[:-1] if keep_newest else mine
            write_json(self.directory / _REVOKED_FILE, sorted(revoked.union(taken)))
            return Taken([serial for serial in mine if serial in revoked.union(taken)], has_token)

    def replace_authority(self, days: int) -> None:
        """Make a new CA, believed next to the present one until `retire_authority`.

        Raises:
            ConfigError: If the last replacement has not ended.
        """
        with self._changing():
            authority, earlier = self._authority(), self._authorities()[1:]
            if earlier:
                raise ConfigError(
                    f"the CA in {self.directory} is being replaced already: diloco certs rotate ca "
                    f"--finish --dir {self.directory} ends that"
                )
            new = make_authority(authority.run, self._clock(), days)
            # The key of a CA that ca.pem does not name is never used, should this end here.
            keys = key_pem(new.key) + key_pem(authority.key)
            self._write(KEY_FILE, keys, mode=0o600)
            both = certificate_pem(new.certificate) + certificate_pem(authority.certificate)
            self._write(CA_FILE, both)

    def retire_authority(self) -> None:
        """End the replacement of the CA: what the earlier one issued is not believed any more.

        Raises:
            ConfigError: If there is none, or an identity still has a certificate of the earlier CA.
        """
        with self._changing():
            authority, earlier = self._authority(), self._authorities()[1:]
            if not earlier:
                raise ConfigError(
                    f"{self.directory} holds one CA, so none is to be retired: diloco certs rotate "
                    f"ca --dir {self.directory} begins to replace it"
                )
            now = self._clock()
            waiting = [
                entry.identity.short
                for entry in self.entries()
                if entry.is_current and not (entry.is_of_newest_ca or entry.is_revoked)
                if entry.days_left(now) > 0
            ]
            if waiting:
                raise ConfigError(
                    f"{', '.join(waiting)}: the certificates are of the earlier CA, and would not "
                    f"be believed any more: diloco certs rotate NAME (or revoke NAME), bring them "
                    f"to their sites, then again"
                )
            self._write(CA_FILE, certificate_pem(authority.certificate))
            self._write(KEY_FILE, key_pem(authority.key), mode=0o600)

    def make_token(self, short: str) -> Path:
        """Draw a token for an identity, in place of its last one; returns its file."""
        with self._changing():
            identity = _identity(self.run, short)
            token = make_token()
            path = self.directory / f"{identity.file_stem}.token"
            table = read_json(self.directory / TABLE_FILE) or {}
            table[identity.uri] = digest_of(token)
            self._write(path.name, token.encode(), mode=0o600)
            write_json(self.directory / TABLE_FILE, table)
            return path

    @property
    def run(self) -> str:
        """Name of the run."""
        return self._authority().run

    @property
    def expires(self) -> datetime.datetime:
        """End of the CA itself."""
        return expiry_of(self._authority().certificate)

    def entries(self) -> Sequence[IssuedEntry]:
        """Return everything that was issued, oldest first."""
        newest_ca, revoked = _serial(self._authority().certificate), self._revoked()
        issued = self._issued()
        newest = {uri: serial for serial, uri, *_ in issued}
        return [
            IssuedEntry(
                Identity.from_uri(uri),
                int(serial, 16),
                datetime.datetime.fromisoformat(expires),
                is_revoked=int(serial, 16) in revoked,
                is_current=newest[uri] == serial,
                is_of_newest_ca=ca == newest_ca,
            )
            for serial, uri, expires, ca in issued
        ]

    @property
    def is_being_replaced(self) -> bool:
        """Whether there is an earlier CA that is still believed."""
        return len(self._authorities()) > 1

    def _authority(self) -> Authority:
        """Return the one that issues."""
        path, key_path = self.directory / CA_FILE, self.directory / KEY_FILE
        try:
            newest, *_ = self._authorities()
            check_issuer(newest, length=1)
            for key in read_keys(key_path.read_bytes(), str(key_path)):
                if key.public_key() == newest.public_key():
                    return Authority(newest, key)
        except OSError as error:
            raise ConfigError(_no_ca(self.directory, error)) from error
        except CertificateError as error:
            raise ConfigError(str(error)) from error
        raise ConfigError(f"{key_path} is not the key of {path}: bring the right one back")

    def _authorities(self) -> tuple[x509.Certificate, ...]:
        """Return the CAs that are believed, the newest first."""
        path = self.directory / CA_FILE
        try:
            return read_certificates(path.read_bytes(), str(path))
        except OSError as error:
            raise ConfigError(_no_ca(self.directory, error)) from error
        except CertificateError as error:
            raise ConfigError(str(error)) from error

    def _issued(self) -> list[tuple[str, str, str, str]]:
        rows = read_json(self.directory / ISSUED_FILE) or []
        return [(serial, uri, expires, ca) for serial, uri, expires, ca in rows]

    def _revoked(self) -> set[int]:
        return read_revoked(self.directory)

    def _forget_token(self, identity: Identity) -> bool:
        table = read_json(self.directory / TABLE_FILE) or {}
        if table.pop(identity.uri, None) is None:
            return False
        write_json(self.directory / TABLE_FILE, table)
        return True

    def _write(self, name: str, text: bytes, mode: int = 0o644) -> None:
        write_durably(self.directory / name, [text], mode=mode)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        try:
            with hold(self.directory / _LOCK_FILE):
                yield
        except FileNotFoundError as error:
            raise ConfigError(_no_ca(self.directory, error)) from error
        except Held as error:
            raise ConfigError(f"another command changes {self.directory}: {error}") from error
        except OSError as error:
            raise ConfigError(f"cannot change {self.directory}: {error}") from error


def site_certificates(directory: Path, now: datetime.datetime) -> dict[str, str]:
    """Say of each certificate at a site, by file, whether it is valid, or why not.

    Raises:
        ConfigError: If ca.pem cannot be read.
    """
    try:
        cas = read_certificates((directory / CA_FILE).read_bytes(), str(directory / CA_FILE))
    except (OSError, CertificateError) as error:
        raise ConfigError(f"cannot read what a site needs: {error}") from error
    found = {CA_FILE: _state_of_ca(cas, now)}
    for path in sorted(directory.glob("*.pem")):
        if path.name == CA_FILE:
            continue
        try:
            certificate, *_ = read_certificates(path.read_bytes(), str(path))
            identity = check_valid(certificate, cas, now)
            if identity.role is Role.COORDINATOR:
                check_issuer(certificate)
        except (OSError, CertificateError) as error:
            found[path.name] = str(error)
        else:
            found[path.name] = (
                f"valid until {expiry_of(certificate):%F %R} UTC, of {identity.short}"
            )
    return found


def _state_of_ca(cas: Sequence[x509.Certificate], now: datetime.datetime) -> str:
    run, ends = identity_of(cas[0]).run, expiry_of(cas[0])
    replaced = ", and the earlier one" if len(cas) > 1 else ""
    return f"{'valid until' if now < ends else 'expired at'} {ends:%F}, of run {run!r}{replaced}"


def _serial(certificate: x509.Certificate) -> str:
    return f"{certificate.serial_number:x}"


def _no_ca(directory: Path, error: OSError) -> str:
    return (
        f"no CA with its key in {directory} ({error}): go where it was made, give --dir, or make "
        f"one: diloco certs init RUN.toml"
    )


def _identity(run: str, short: str) -> Identity:
    try:
        return Identity.from_short(run, short)
    except ValueError as error:
        raise ConfigError(str(error)) from error
