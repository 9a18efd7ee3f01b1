"""X.509 of a run: its certificate authority, what is issued below it, and how that is judged.

    authority (ca.key, with the operator; may be offline)
      +- IDENTITY.pem     of an island or operator, as long as the operator says: shown to the
      |                   coordinator alone, who looks up at every call whether it was revoked
      +- coordinator.pem  the issuer, with its key, at the coordinator's site
           +- leaf        of coordinator, syncer or island, 24 h: shown to everybody else

Who holds IDENTITY.pem asks the coordinator for leaves. What is revoked gets none, so only the
coordinator knows what is revoked, and whatever else a thief has ends by itself. Nobody can pose as
a server: a leaf alone has the extended key usage serverAuth and the name of its role, which TLS
compares, and the issuer takes the name from the certificate of anyone who asks.

Owns contents and judgement, no file and no clock: `now` is given. Keys are EC P-256, signatures
SHA-256. Every refusal is a `CertificateError` that says why in words.

See RFC 5280 (certificates), RFC 2986 (requests).
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from diloco.transport.identity import Identity, Role, server_name

#: Clocks of sites differ: what is issued here is valid there at once.
CLOCK_SKEW = datetime.timedelta(hours=1)
_PEM_KEY = b"-----BEGIN PRIVATE KEY-----"
#: Ours has some 300; to parse one of a megabyte takes the coordinator 0.1 s and more.
_MOST_REQUEST_BYTES = 4096


class CertificateError(ValueError):
    """A certificate, key or request that cannot be used; says which and why."""


@dataclass(frozen=True, slots=True)
class Authority:
    """Who issues, with the key: the run's certificate authority, or the issuer below it."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def run(self) -> str:
        """Name of the run that it speaks for."""
        return identity_of(self.certificate).run

    @property
    def ends(self) -> datetime.datetime:
        """Until when it may issue."""
        return expiry_of(self.certificate)


@dataclass(frozen=True, slots=True)
class Issued:
    """A new certificate and its private key, both in one PEM text."""

    pem: bytes
    certificate: x509.Certificate


def make_authority(run: str, now: datetime.datetime, days: int) -> Authority:
    """Make the authority of a new run; it signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    identity, lifetime = Identity(run, Role.CA), datetime.timedelta(days=days)
    builder = _builder(identity, now, lifetime, key.public_key()).issuer_name(_name(identity))
    return Authority(_as_issuer(builder, key, path_length=1).sign(key, hashes.SHA256()), key)


def issue(authority: Authority, identity: Identity, now: datetime.datetime, days: int) -> Issued:
    """Issue a certificate with a new key to `identity`, at most as long as the authority lasts.

    That of the coordinator is an issuer; all others are good for a client only.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _below(authority, identity, now, datetime.timedelta(days=days), key.public_key())
    if identity.role is Role.COORDINATOR:
        builder = _as_issuer(builder, key, path_length=0)
    else:
        builder = _as_end(builder, [ExtendedKeyUsageOID.CLIENT_AUTH])
    certificate = builder.sign(authority.key, hashes.SHA256())
    return Issued(certificate_pem(certificate) + key_pem(key), certificate)


def issue_leaf(
    issuer: Authority,
    identity: Identity,
    public_key: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    lifetime: datetime.timedelta,
) -> bytes:
    """Issue a leaf for `public_key`, good for client and server; with the issuer's, as PEM.

    Raises:
        CertificateError: If the issuer has expired.
    """
    check_dates(issuer.certificate, now)
    name = server_name(identity.role)
    builder = _below(issuer, identity, now, lifetime, public_key, name)
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
    leaf = _as_end(builder, usages).sign(issuer.key, hashes.SHA256())
    return certificate_pem(leaf) + certificate_pem(issuer.certificate)


def make_request(identity: Identity) -> tuple[ec.EllipticCurvePrivateKey, bytes]:
    """Draw a key, and write the request for a leaf for it (DER)."""
    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity.uri)])
    builder = x509.CertificateSigningRequestBuilder(_name(identity)).add_extension(names, False)
    request = builder.sign(key, hashes.SHA256())
    return key, request.public_bytes(serialization.Encoding.DER)


def read_request(request: bytes, caller: Identity) -> ec.EllipticCurvePublicKey:
    """Return the key for which `caller` asks for a leaf.

    Raises:
        CertificateError: If it is no request, or for somebody else, or its key is not of P-256, or
            it is not signed with that key.
    """
    if len(request) > _MOST_REQUEST_BYTES:
        raise CertificateError(
            f"a request for a certificate has {_MOST_REQUEST_BYTES} bytes at most, not "
            f"{len(request)}"
        )
    try:
        read = x509.load_der_x509_csr(request)
        key = read.public_key()
        # Of another kind a signature takes up to a hundred times as long to verify.
        is_usual = isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name == "secp256r1"
        is_signed = is_usual and read.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise CertificateError(f"this is no request for a certificate: {error}") from error
    if (asked := identity_of(read)) != caller:
        raise CertificateError(f"{caller.uri} asks for a certificate of {asked.uri}")
    if not (is_signed and isinstance(key, ec.EllipticCurvePublicKey)):
        raise CertificateError("the request is not signed with its key, or that is of another kind")
    return key


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


def identity_of(certificate: x509.Certificate | x509.CertificateSigningRequest) -> Identity:
    """Return whom a certificate or a request names.

    Raises:
        CertificateError: If it names nobody, or several.
    """
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        (uri,) = uris
        return Identity.from_uri(uri)
    except (
        x509.ExtensionNotFound,
        x509.DuplicateExtension,
        x509.UnsupportedGeneralNameType,
        ValueError,
    ) as error:
        raise CertificateError("the certificate names no identity of a run") from error


def check_dates(certificate: x509.Certificate, now: datetime.datetime) -> Identity:
    """Judge the dates of a certificate whose issuer is known; returns whom it names.

    Raises:
        CertificateError: If it has expired, or is not valid yet.
    """
    identity = identity_of(certificate)
    start, end = certificate.not_valid_before_utc, expiry_of(certificate)
    if now > end:
        raise CertificateError(f"the certificate of {identity.short} expired at {end:%F %R} UTC")
    if now < start:
        raise CertificateError(
            f"the certificate of {identity.short} is valid from {start:%F %R} UTC on: is a clock "
            f"wrong?"
        )
    return identity


def check_valid(
    certificate: x509.Certificate, cas: Sequence[x509.Certificate], now: datetime.datetime
) -> Identity:
    """Judge a certificate that the authority itself issued; returns whom it names.

    Args:
        certificate: What somebody shows.
        cas: The run's authority, and while it is replaced the earlier one, too.
        now: In UTC.

    Raises:
        CertificateError: If it is foreign, self-signed, expired or not valid yet.
    """
    if not any(is_issued_by(certificate, ca) for ca in cas):
        what = "self-signed" if certificate.issuer == certificate.subject else "foreign"
        raise CertificateError(f"the certificate is {what}: the CA of this run did not issue it")
    return check_dates(certificate, now)


def check_issuer(certificate: x509.Certificate, length: int = 0) -> None:
    """Refuse an authority of an earlier release: what is issued below it would not be believed.

    Args:
        certificate: Of the coordinator, or of the CA.
        length: Authorities that stand between it and a leaf.

    Raises:
        CertificateError: If it is none of an authority, or not of that many.
    """
    found = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    if not found.ca or (found.path_length is not None and found.path_length < length):
        raise CertificateError(
            f"the certificate of {identity_of(certificate).short} is of an earlier release, and "
            f"nothing that lasts a day can be issued below it: make all of them again, in another "
            f"directory (diloco certs init RUN.toml --dir DIR)"
        )


@lru_cache(maxsize=8192)
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


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Write a private key as PEM, without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _name(identity: Identity, server: str = "") -> x509.Name:
    # Of 64 characters at most. Nothing is decided by it, but issuers are found by it: the leaf of
    # the coordinator has another than the issuer, or it would be taken for self-signed.
    common = server or identity.short
    names = ((NameOID.ORGANIZATION_NAME, identity.run), (NameOID.COMMON_NAME, common))
    return x509.Name([x509.NameAttribute(oid, text[:64]) for oid, text in names])


def _builder(
    identity: Identity,
    now: datetime.datetime,
    lifetime: datetime.timedelta,
    public_key: ec.EllipticCurvePublicKey,
    server: str = "",
) -> x509.CertificateBuilder:
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri)]
    if server:
        names.append(x509.DNSName(server))
    return (
        x509.CertificateBuilder()
        .subject_name(_name(identity, server))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
    )


def _below(
    authority: Authority,
    identity: Identity,
    now: datetime.datetime,
    lifetime: datetime.timedelta,
    public_key: ec.EllipticCurvePublicKey,
    server: str = "",
) -> x509.CertificateBuilder:
    lifetime = min(lifetime, expiry_of(authority.certificate) - now)
    # Two issuers of a run have one name: anyone who verifies tells them apart by their keys.
    key_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    return (
        _builder(identity, now, lifetime, public_key, server)
        .issuer_name(authority.certificate.subject)
        .add_extension(key_id, critical=False)
    )


def _as_issuer(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, *, path_length: int
) -> x509.CertificateBuilder:
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
    key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=path_length), True)
        .add_extension(usage, critical=True)
        .add_extension(key_id, critical=False)
    )


def _as_end(
    builder: x509.CertificateBuilder, usages: Sequence[x509.ObjectIdentifier]
) -> x509.CertificateBuilder:
    return builder.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    ).add_extension(x509.ExtendedKeyUsage(usages), critical=True)
