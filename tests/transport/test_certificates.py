"""What a run's CA says, and every way in which a certificate is refused by name."""

from __future__ import annotations

import datetime

import pytest

from tests.transport.pki import COORDINATOR, EAST, RUN
from transport.certificates import (
    Authority,
    CertificateError,
    expiry_of,
    identity_of,
    insist_on_valid,
    issue,
    key_pem,
    make_authority,
    make_revocation_list,
    read_certificates,
    read_key,
    read_revoked,
)
from transport.identity import Identity, Role

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return make_authority(RUN, NOW, 1000)


def test_a_certificate_names_its_identity_and_is_judged_valid(authority: Authority) -> None:
    issued = issue(authority, EAST, NOW, 30)

    (read,) = read_certificates(issued.pem, "file")

    assert insist_on_valid(read, [authority.certificate], frozenset(), NOW) == EAST
    assert identity_of(authority.certificate) == Identity(RUN, Role.CA)
    assert read_key(issued.pem, "file").public_key() == read.public_key()
    assert authority.run == RUN


def test_a_site_whose_clock_is_behind_accepts_it_at_once(authority: Authority) -> None:
    issued = issue(authority, EAST, NOW, 30)
    behind = NOW - datetime.timedelta(minutes=50)

    insist_on_valid(issued.certificate, [authority.certificate], frozenset(), behind)


def test_nothing_outlives_its_authority(authority: Authority) -> None:
    issued = issue(authority, EAST, NOW + 990 * DAY, 365)

    assert expiry_of(issued.certificate) <= expiry_of(authority.certificate)


def test_a_server_is_one_of_its_own_role_only(authority: Authority) -> None:
    operator = Identity(RUN, Role.OPERATOR)
    who = (operator, EAST, COORDINATOR)
    texts = [str(issue(authority, i, NOW, 30).certificate.extensions) for i in who]

    assert ["serverAuth" in text for text in texts] == [False, True, True]
    assert ["coordinator.diloco" in text for text in texts] == [False, False, True]


def test_every_spoilt_certificate_is_refused_by_name(authority: Authority) -> None:
    other = make_authority(RUN, NOW, 1000)
    mine = issue(authority, EAST, NOW, 30).certificate
    revoked = frozenset([mine.serial_number])
    cases = [
        (issue(other, EAST, NOW, 30).certificate, frozenset(), NOW, "foreign"),
        (other.certificate, frozenset(), NOW, "self-signed"),
        (mine, frozenset(), NOW + 31 * DAY, "island/east expired at 2026-01-31"),
        (mine, frozenset(), NOW - DAY, "is a clock wrong"),
        (mine, revoked, NOW, "island/east was revoked"),
    ]

    for certificate, taken, now, reason in cases:
        with pytest.raises(CertificateError, match=reason):
            insist_on_valid(certificate, [authority.certificate], taken, now)


def test_a_revocation_list_is_believed_from_the_ca_alone(authority: Authority) -> None:
    other = make_authority(RUN, NOW, 1000)
    text = make_revocation_list(authority, [7, 3], NOW, 5)
    empty = make_revocation_list(other, [], NOW, 1)

    read = read_revoked(text, [other.certificate, authority.certificate], "list")
    assert (read.serials, read.number, read.pem) == ({3, 7}, 5, text)
    assert not read_revoked(empty, [other.certificate], "list").serials
    with pytest.raises(CertificateError, match="list is not signed by the CA"):
        read_revoked(text, [other.certificate], "list")
    with pytest.raises(CertificateError, match="list is no revocation list"):
        read_revoked(b"junk", [authority.certificate], "list")


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
