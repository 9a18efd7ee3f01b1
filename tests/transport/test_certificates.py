"""What a run's CA says, and every way in which a certificate is refused by name."""

from __future__ import annotations

import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from diloco.transport.identity import Identity, Role
from diloco.transport.security.certificates import (
    Authority,
    CertificateError,
    check_dates,
    check_issuer,
    check_valid,
    expiry_of,
    identity_of,
    issue,
    issue_leaf,
    key_pem,
    make_authority,
    make_request,
    read_certificates,
    read_key,
    read_request,
)
from tests.transport.pki import COORDINATOR, EAST, RUN, WEST

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return make_authority(RUN, NOW, 1000)


def test_a_certificate_names_its_identity_and_is_judged_valid(authority: Authority) -> None:
    issued = issue(authority, EAST, NOW, 30)

    (read,) = read_certificates(issued.pem, "file")

    assert check_valid(read, [authority.certificate], NOW) == EAST
    assert identity_of(authority.certificate) == Identity(RUN, Role.CA)
    assert read_key(issued.pem, "file").public_key() == read.public_key()
    assert authority.run == RUN


def test_a_site_whose_clock_is_behind_accepts_it_at_once(authority: Authority) -> None:
    issued = issue(authority, EAST, NOW, 30)
    behind = NOW - datetime.timedelta(minutes=50)

    check_valid(issued.certificate, [authority.certificate], behind)


def test_nothing_outlives_its_authority(authority: Authority) -> None:
    issued = issue(authority, EAST, NOW + 990 * DAY, 365)

    assert expiry_of(issued.certificate) <= expiry_of(authority.certificate)


def test_only_a_leaf_serves_and_only_under_the_name_of_its_role(authority: Authority) -> None:
    issued = [issue(authority, i, NOW, 30) for i in (Identity(RUN, Role.OPERATOR), EAST)]
    coordinator = issue(authority, COORDINATOR, NOW, 30)
    issuer = Authority(coordinator.certificate, read_key(coordinator.pem, "issuer"))
    key, _ = make_request(EAST)
    day = datetime.timedelta(days=1)
    leaf, above = read_certificates(issue_leaf(issuer, EAST, key.public_key(), NOW, day), "leaf")

    assert above == coordinator.certificate
    assert expiry_of(leaf) == NOW + day
    assert check_dates(leaf, NOW) == EAST
    with pytest.raises(CertificateError, match="foreign"):
        check_valid(leaf, [authority.certificate], NOW)
    shown = [str(c.extensions) for c in (*(i.certificate for i in issued), above, leaf)]
    assert ["serverAuth" in text for text in shown] == [False, False, False, True]
    assert ["island.diloco" in text for text in shown] == [False, False, False, True]
    assert ["ca=True, path_length=0" in text for text in shown] == [False, False, True, False]
    check_issuer(above)
    check_issuer(authority.certificate, length=1)
    for earlier, length in ((issued[1].certificate, 0), (above, 1)):
        with pytest.raises(CertificateError, match="is of an earlier release"):
            check_issuer(earlier, length)
    with pytest.raises(CertificateError, match="coordinator expired at 2026-01-31"):
        issue_leaf(issuer, EAST, key.public_key(), NOW + 31 * DAY, day)


def test_every_spoilt_certificate_is_refused_by_name(authority: Authority) -> None:
    other = make_authority(RUN, NOW, 1000)
    mine = issue(authority, EAST, NOW, 30).certificate
    cases = [
        (issue(other, EAST, NOW, 30).certificate, NOW, "foreign"),
        (other.certificate, NOW, "self-signed"),
        (mine, NOW + 31 * DAY, "island/east expired at 2026-01-31"),
        (mine, NOW - DAY, "is a clock wrong"),
    ]

    for certificate, now, reason in cases:
        with pytest.raises(CertificateError, match=reason):
            check_valid(certificate, [authority.certificate], now)


def request_of(
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, *uris: str, more: tuple[str, ...] = ()
) -> bytes:
    """Write a request as somebody does who asks for more than his due."""
    names = [x509.UniformResourceIdentifier(uri) for uri in uris or (EAST.uri,)]
    builder = (
        x509.CertificateSigningRequestBuilder(x509.Name([]))
        .add_extension(x509.SubjectAlternativeName([*names, *map(x509.DNSName, more)]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
    )
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def test_a_leaf_has_nothing_that_the_request_asks_for_but_its_key(authority: Authority) -> None:
    coordinator = issue(authority, COORDINATOR, NOW, 30)
    issuer = Authority(coordinator.certificate, read_key(coordinator.pem, "issuer"))
    key = ec.generate_private_key(ec.SECP256R1())
    asked = read_request(request_of(key, more=("coordinator.diloco", "syncer.diloco")), EAST)

    leaf, _ = read_certificates(issue_leaf(issuer, EAST, asked, NOW, DAY), "leaf")

    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["island.diloco"]
    assert identity_of(leaf) == EAST
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert leaf.public_key() == key.public_key()


def test_a_request_is_for_who_asks_and_for_a_key_that_it_has() -> None:
    key, request = make_request(EAST)
    _, of_west = make_request(WEST)

    assert read_request(request, EAST) == key.public_key()
    for bad, reason in [
        (of_west, "island/east asks for a certificate of diloco://test/island/west"),
        (b"junk", "is no request"),
        (b"", "is no request"),
        (request[:-1] + bytes([request[-1] ^ 1]), "is not signed with its key"),
        (request.replace(b"\x02\x01\x00", b"\x02\x01\x09", 1), "not a valid CSR version"),
        (request.replace(b"\x3d\x03\x01\x07", b"\x3d\x03\x01\x2e"), "Curve .* is not supported"),
        (request_of(rsa.generate_private_key(65537, 1024)), "that is of another kind"),
        (request_of(ec.generate_private_key(ec.SECP521R1())), "that is of another kind"),
        (request_of(key, EAST.uri, WEST.uri), "names no identity"),
        (request_of(key, f"{EAST.uri}\n"), "names no identity"),
        (request_of(key, "diloco://test/island/*"), "names no identity"),
        (request + bytes(4096), "has 4096 bytes at most, not 43"),
    ]:
        with pytest.raises(CertificateError, match=reason):
            read_request(bad, EAST)


@pytest.mark.parametrize("text", [b"", b"junk", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_junk_is_no_certificate_and_no_key(text: bytes, authority: Authority) -> None:
    with pytest.raises(CertificateError, match="file holds no certificate"):
        read_certificates(text, "file")
    with pytest.raises(CertificateError, match="file holds no private key"):
        read_key(text, "file")
    assert b"PRIVATE" in key_pem(authority.key)


@pytest.mark.parametrize(
    "uri",
    [
        "", "diloco://", "diloco://run", "diloco://run/island", "diloco://run/island/",
        "diloco://run/island/EU", "diloco://run/island/a/b", "http://run/coordinator",
        "diloco://run/coordinator/x", "diloco:///coordinator", "diloco://run/coordinator\n",
    ],
)  # fmt: skip
def test_only_identities_are_identities(uri: str) -> None:
    with pytest.raises(ValueError, match="is no identity"):
        Identity.from_uri(uri)


@pytest.mark.parametrize("short", ["coordinator", "syncer", "operator", "island/eu-west-1"])
def test_an_identity_is_written_and_read(short: str) -> None:
    identity = Identity.from_short("run.1", short)

    assert identity.short == short
    assert Identity.from_uri(identity.uri) == identity
    assert "/" not in identity.file_stem


@pytest.mark.parametrize("short", ["ca", "island", "island/", "islands/a", "root", "island/../x"])
def test_the_ca_and_strangers_are_given_nothing(short: str) -> None:
    with pytest.raises(ValueError, match="write coordinator, syncer, operator or island/NAME"):
        Identity.from_short(RUN, short)
