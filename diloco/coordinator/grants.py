"""Grants: the coordinator's signed word that one start of one process may take part in a run.

    mac = HMAC-SHA256(secret, canonical JSON of run, timeline, island, incarnation, roles, expiry,
                      tokens_per_inner_step where an island declared it)

The secret is random, one a run, mode 0600, shared by the coordinator and its syncers only.

Source: PROTOCOL.md, "Incarnations and grants".
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from pathlib import Path

from diloco.durable import write_durably
from diloco.errors import ConfigError
from diloco.protos.control_pb2 import Grant

SECRET_BYTES = 32


def sign(grant: Grant, secret: bytes) -> Grant:
    """Return a copy of `grant` that carries its mac."""
    signed = Grant()
    signed.CopyFrom(grant)
    signed.mac = _mac(grant, secret)
    return signed


def is_valid(grant: Grant, secret: bytes, *, run: str, role: int, now_unix_s: float) -> bool:
    """Whether `grant` was signed with `secret` for `run` and `role`, and has not expired."""
    return (
        hmac.compare_digest(grant.mac, _mac(grant, secret))
        and grant.run == run
        and role in grant.roles
        and (grant.expiry_unix_s == 0 or now_unix_s < grant.expiry_unix_s)
    )


def load_or_create_secret(path: Path) -> bytes:
    """Read the run secret, or make one readable by its owner only; one caller at a time.

    Raises:
        ConfigError: If the file exists and does not hold a secret.
    """
    if not path.exists():
        write_durably(path, [secrets.token_hex(SECRET_BYTES).encode()], mode=0o600)
    return load_secret(path)


def load_secret(path: Path) -> bytes:
    """Read the run secret.

    Raises:
        ConfigError: If the file does not hold a secret; says what to do.
    """
    try:
        secret = bytes.fromhex(path.read_text(encoding="ascii").strip())
        if len(secret) == SECRET_BYTES:
            return secret
        problem = f"it holds {len(secret)} bytes, not {SECRET_BYTES}"
    except (OSError, ValueError) as error:
        problem = str(error)
    raise ConfigError(
        f"the run secret {path}, which signs what islands may do, is damaged: {problem}. Bring it "
        f"back from a copy (diloco backup --with-secret); or remove it (rm {path}), end this run's "
        f"syncers and start the coordinator again: it makes another, and every island has to be "
        f"started again"
    )


def _mac(grant: Grant, secret: bytes) -> bytes:
    fields = [
        grant.run,
        grant.timeline,
        grant.island,
        grant.incarnation,
        sorted(grant.roles),
        grant.expiry_unix_s,
    ]
    if grant.tokens_per_inner_step:
        fields.append(grant.tokens_per_inner_step)
    message = json.dumps(fields, separators=(",", ":")).encode()
    return hmac.new(secret, message, hashlib.sha256).digest()
