"""X.509 of a run: its certificate authority, what it issues, what it takes back.

Owns contents and judgement, no file and no clock: `now` is given. Keys are EC P-256, signatures
SHA-256. A certificate names one identity as a URI; those of servers also have the name of their
role, which clients insist on. Every refusal is a `CertificateError` that says why in words.

Source: RFC 5280 (certificates and revocation lists).
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from transport.identity import MAY_SERVE, Identity, Role, server_name

#: Clocks of sites differ: what is issued here is valid there at once.
CLOCK_SKEW = datetime.timedelta(hours=1)
_PEM_KEY = b"-----BEGIN PRIVATE KEY-----"


class CertificateError(ValueError):
    """A certificate, key or revocation list that cannot be used; says which and why."""


@dataclass(frozen=True, slots=True)
class Authority:
    """The run's certificate authority with its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def run(self) -> str:
        """Name of the run that it speaks for."""
        return identity_of(self.certificate).run


@dataclass(frozen=True, slots=True)
class Issued:
    """A new certificate and its private key, both in one PEM text."""

    pem: bytes
    certificate: x509.Certificate


def make_authority(run: str, now: datetime.datetime, days: int) -> Authority:
    """Make the authority of a new run; it signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    identity = Identity(run, Role.CA)
    builder = _builder(identity, now, days, key).issuer_name(_name(identity))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    # Two CAs of a run have one name: whoever verifies tells them apart by their keys.
    key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = builder.add_extension(key_id, critical=False)
    return Authority(builder.sign(key, hashes.SHA256()), key)


def issue(authority: Authority, identity: Identity, now: datetime.datetime, days: int) -> Issued:
    """Issue a certificate with a new key to `identity`, at most as long as the authority lasts."""
    key = ec.generate_private_key(ec.SECP256R1())
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if identity.role in MAY_SERVE:
        usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
    days = min(days, (expiry_of(authority.certificate) - now).days)
    certificate = (
        _builder(identity, now, days, key)
        .issuer_name(authority.certificate.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
        .sign(authority.key, hashes.SHA256())
    )
    return Issued(certificate_pem(certificate) + key_pem(key), certificate)


@dataclass(frozen=True, slots=True)
class Revoked:
    """A revocation list: of two, the one with the larger number holds.

    Attributes:
        serials: Serial numbers that are taken back.
        number: Counts the lists of a run from 1 on; 0: there is none.
        pem: The list as it was read; empty: there is none.
    """

    serials: frozenset[int] = frozenset()
    number: int = 0
    pem: bytes = b""


def make_revocation_list(
    authority: Authority, serials: Iterable[int], now: datetime.datetime, number: int
) -> bytes:
    """Sign list `number` of a run, with all serial numbers that are taken back, as PEM."""
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.certificate.subject)
        .last_update(now)
        .next_update(expiry_of(authority.certificate))
        .add_extension(x509.CRLNumber(number), critical=False)
    )
    for serial in sorted(serials):
        revoked = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now)
        builder = builder.add_revoked_certificate(revoked.build())
    return builder.sign(authority.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def read_certificates(pem: bytes, where: str) -> tuple[x509.Certificate, ...]:
    """Read all certificates of a PEM text, at least one; `where` names it in the message.

    Raises:
        CertificateError: If there is none.
    """
    try:
        return tuple(x509.load_pem_x509_certificates(pem))
    except ValueError as error:
        raise CertificateError(f"{where} holds no certificate: {error}") from error


def read_key(pem: bytes, where: str) -> ec.EllipticCurvePrivateKey:
    """Read the private key of a PEM text, the first if there are several.

    Raises:
        CertificateError: If there is none, or none of this kind.
    """
    return read_keys(pem, where)[0]


def read_keys(pem: bytes, where: str) -> tuple[ec.EllipticCurvePrivateKey, ...]:
    """Read all private keys of a PEM text, at least one.

    Raises:
        CertificateError: If there is none, or none of this kind.
    """
    _, *texts = pem.split(_PEM_KEY)
    keys = []
    for text in texts or [b""]:
        try:
            key = serialization.load_pem_private_key(_PEM_KEY + text, None)
        except (ValueError, TypeError) as error:
            raise CertificateError(f"{where} holds no private key without a password") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise CertificateError(f"{where} holds a key that is not of an elliptic curve")
        keys.append(key)
    return tuple(keys)


def read_revoked(pem: bytes, cas: Sequence[x509.Certificate], where: str) -> Revoked:
    """Read a revocation list.

    Raises:
        CertificateError: If it is none, or not signed by one of `cas`.
    """
    try:
        revocations = x509.load_pem_x509_crl(pem)
        number = revocations.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    except (ValueError, x509.ExtensionNotFound) as error:
        raise CertificateError(f"{where} is no revocation list: {error}") from error
    keys = [ca.public_key() for ca in cas]
    if not any(
        isinstance(key, ec.EllipticCurvePublicKey) and revocations.is_signature_valid(key)
        for key in keys
    ):
        raise CertificateError(f"{where} is not signed by the CA of this run")
    return Revoked(frozenset(revoked.serial_number for revoked in revocations), number, pem)


def identity_of(certificate: x509.Certificate) -> Identity:
    """Return whom a certificate names.

    Raises:
        CertificateError: If it names nobody, or several.
    """
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        (uri,) = uris
        return Identity.from_uri(uri)
    except (x509.ExtensionNotFound, ValueError) as error:
        raise CertificateError("the certificate names no identity of a run") from error


def insist_on_valid(
    certificate: x509.Certificate,
    cas: Sequence[x509.Certificate],
    revoked: frozenset[int],
    now: datetime.datetime,
) -> Identity:
    """Judge a certificate; returns whom it names.

    Args:
        certificate: What somebody shows.
        cas: The run's authority, and while it is replaced the earlier one, too.
        revoked: Serial numbers that are taken back.
        now: In UTC.

    Raises:
        CertificateError: If it is foreign, self-signed, expired, not valid yet or revoked.
    """
    if not any(is_issued_by(certificate, ca) for ca in cas):
        what = "self-signed" if certificate.issuer == certificate.subject else "foreign"
        raise CertificateError(f"the certificate is {what}: the CA of this run did not issue it")
    identity = identity_of(certificate)
    start, end = certificate.not_valid_before_utc, expiry_of(certificate)
    if now > end:
        raise CertificateError(f"the certificate of {identity.short} expired at {end:%F %R} UTC")
    if now < start:
        raise CertificateError(
            f"the certificate of {identity.short} is valid from {start:%F %R} UTC on: is a clock "
            f"wrong?"
        )
    if certificate.serial_number in revoked:
        raise CertificateError(f"the certificate of {identity.short} was revoked")
    return identity


@lru_cache(maxsize=1024)
def is_issued_by(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    """Whether `ca` has signed a certificate."""
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def expiry_of(certificate: x509.Certificate) -> datetime.datetime:
    """Return the last instant at which a certificate is valid."""
    return certificate.not_valid_after_utc


def certificate_pem(certificate: x509.Certificate) -> bytes:
    """Write a certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def certificate_der(certificate: x509.Certificate) -> bytes:
    """Write a certificate as DER."""
    return certificate.public_bytes(serialization.Encoding.DER)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Write a private key as PEM, without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _name(identity: Identity) -> x509.Name:
    # A common name has at most 64 characters; nothing is decided by it.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.uri[:64])])


def _builder(
    identity: Identity, now: datetime.datetime, days: int, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri)]
    if identity.role in MAY_SERVE:
        names.append(x509.DNSName(server_name(identity.role)))
    return (
        x509.CertificateBuilder()
        .subject_name(_name(identity))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
    )
