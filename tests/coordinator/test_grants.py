"""Grants: what is signed cannot be changed, and the secret is its owner's alone."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from diloco.coordinator.grants import (
    SECRET_BYTES,
    is_valid,
    load_or_create_secret,
    load_secret,
    sign,
)
from diloco.errors import ConfigError
from diloco.protos.control_pb2 import ROLE_ISLAND, ROLE_OPERATOR, ROLE_SYNCER, Grant

SECRET = bytes(range(SECRET_BYTES))


def grant(**changes) -> Grant:
    fields = {
        "run": "demo",
        "timeline": 3,
        "island": "east",
        "incarnation": 2,
        "roles": [ROLE_ISLAND],
        **changes,
    }
    return Grant(**fields)


def check(signed: Grant, *, secret: bytes = SECRET, **changes) -> bool:
    return is_valid(
        signed, secret, **{"run": "demo", "role": ROLE_ISLAND, "now_unix_s": 1e9, **changes}
    )


def test_signed_grant_is_valid_and_the_original_is_untouched() -> None:
    original = grant()

    signed = sign(original, SECRET)

    assert check(signed)
    assert not original.mac
    assert check(Grant.FromString(signed.SerializeToString()))


@pytest.mark.parametrize(
    "change",
    [
        {"run": "other"},
        {"timeline": 4},
        {"island": "west"},
        {"incarnation": 3},
        {"roles": [ROLE_ISLAND, ROLE_OPERATOR]},
        {"expiry_unix_s": 2e9},
        {"mac": b""},
        {"mac": bytes(32)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_any_changed_field_makes_it_void(change: dict[str, object]) -> None:
    mac = sign(grant(), SECRET).mac

    forged = grant(**{"mac": mac, **change})

    assert not check(forged, run=forged.run)


@pytest.mark.parametrize(
    ("asked", "is_accepted"),
    [
        ({}, True),
        ({"secret": bytes(SECRET_BYTES)}, False),
        ({"run": "other"}, False),
        ({"role": ROLE_SYNCER}, False),
    ],
    ids=["as-signed", "other-secret", "other-run", "other-role"],
)
def test_it_counts_for_one_run_and_its_roles(asked: dict[str, object], is_accepted: bool) -> None:
    assert check(sign(grant(), SECRET), **asked) is is_accepted


@pytest.mark.parametrize(
    ("expiry_unix_s", "now_unix_s", "is_accepted"),
    [(0, 1e12, True), (100.0, 99.9, True), (100.0, 100.0, False)],
    ids=["never", "before", "at"],
)
def test_it_expires_unless_expiry_is_zero(
    expiry_unix_s: float, now_unix_s: float, is_accepted: bool
) -> None:
    signed = sign(grant(expiry_unix_s=expiry_unix_s), SECRET)

    assert check(signed, now_unix_s=now_unix_s) is is_accepted


def test_order_of_roles_does_not_matter() -> None:
    signed = sign(grant(roles=[ROLE_SYNCER, ROLE_ISLAND]), SECRET)

    assert check(grant(roles=[ROLE_ISLAND, ROLE_SYNCER], mac=signed.mac))


def test_secret_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "secret"

    first = load_or_create_secret(path)

    assert len(first) == SECRET_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_create_secret(path) == first == load_secret(path)
    assert load_or_create_secret(tmp_path / "another") != first


@pytest.mark.parametrize("content", [b"", b"00ff", b"not hexadecimal", b"\xff\xfe"])
def test_file_that_holds_no_secret_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=str(path)):
        load_or_create_secret(path)
