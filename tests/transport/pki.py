"""Certificates for tests: a CA of a run and the files of its identities, valid or spoilt."""

from __future__ import annotations

import datetime
from pathlib import Path

from diloco.transport.identity import Identity, Role
from diloco.transport.security.certificates import (
    Authority,
    certificate_pem,
    issue,
    make_authority,
)
from diloco.transport.security.tls import CA_FILE, ISSUER_FILE, Tls

RUN = "test"
COORDINATOR = Identity(RUN, Role.COORDINATOR)
SYNCER = Identity(RUN, Role.SYNCER)
OPERATOR = Identity(RUN, Role.OPERATOR)
EAST = Identity(RUN, Role.ISLAND, "east")
WEST = Identity(RUN, Role.ISLAND, "west")


def days_ago(days: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days)


class Pki:
    """A run's CA, and a directory with the files of all its identities."""

    def __init__(self, directory: Path, run: str = RUN) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.authority: Authority = make_authority(run, days_ago(300), 4000)
        self.serials: dict[Identity, int] = {}
        (directory / CA_FILE).write_bytes(certificate_pem(self.authority.certificate))

    def issue(self, identity: Identity, *, age_days: float = 0, days: int = 90) -> Path:
        """Write a new certificate of an identity in place of its last one."""
        issued = issue(self.authority, identity, days_ago(age_days), days)
        self.serials[identity] = issued.certificate.serial_number
        path = self.directory / f"{identity.file_stem}.pem"
        written = path.with_suffix(".new")
        written.touch(mode=0o600)
        written.write_bytes(issued.pem)
        written.replace(path)
        return path

    def tls(self, identity: Identity) -> Tls:
        """Issue a certificate, if there is none, and load it as its process would.

        The issuer in the same directory issues the leaf, without a call.
        """
        if COORDINATOR not in self.serials and not (self.directory / ISSUER_FILE).exists():
            self.issue(COORDINATOR)
        if identity not in self.serials and identity.role is not Role.SYNCER:
            self.issue(identity)
        return Tls(self.directory, identity)
