"""Tokens: 256 random bits by which a caller is known, with or without a certificate.

    tokens.json      sha256 of each token by identity; where a server runs
    IDENTITY.token   the token itself, 0600; where that identity runs

A token travels with every call and is judged once a call, never a chunk. Over plaintext anyone who
listens learns it: it keeps strangers out of a private network, it does not make a public one safe.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import stat
from pathlib import Path

from diloco.transport.errors import Unauthorised
from diloco.transport.identity import Identity

TABLE_FILE = "tokens.json"


def make_token() -> str:
    """Draw a token."""
    return secrets.token_urlsafe(32)


def digest_of(token: str) -> str:
    """Return what a server keeps of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def name_of(digest: str) -> bytes:
    """Return by what a server finds the digest of a token that it is asked to prove.

    It tells a stranger nothing: neither whose token it is nor anything else of it.
    """
    return proof_of(digest, b"diloco token")


def proof_of(digest: str, statement: bytes) -> bytes:
    """Prove a statement to the holder of a token, who has or makes the digest, too."""
    return hmac.digest(bytes.fromhex(digest), statement, "sha256")


def read_token(path: Path) -> str:
    """Read a token from its file.

    Raises:
        ValueError: If there is none, or everybody may read it.
    """
    try:
        token = path.read_text(encoding="ascii").strip()
        mode = stat.S_IMODE(path.stat().st_mode)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the token {path}: {error}") from error
    if mode & 0o007:
        raise ValueError(f"{path} is open to everybody: chmod 600 {path}")
    if len(token) < 16:
        raise ValueError(f"{path} holds {len(token)} characters: a token has 16 or more")
    return token


class TokenTable:
    """What a server knows of tokens; read again when its file changes."""

    def __init__(self, path: Path) -> None:
        """Read the table.

        Raises:
            ValueError: If it is not there, or none.
        """
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._table: dict[str, Identity] = {}
        self._refresh()

    def identify(self, token: str) -> Identity:
        """Say whose token this is, in a time that does not depend on it.

        Raises:
            Unauthorised: If it is nobody's, or empty.
        """
        try:
            self._refresh()
        except ValueError as error:
            raise Unauthorised(f"nobody is admitted: {error}") from error
        if not token:
            raise Unauthorised("this call carries no token, and this run asks for one")
        presented = digest_of(token)
        found: Identity | None = None
        for digest, identity in self._table.items():
            if hmac.compare_digest(presented, digest):
                found = identity
        if found is None:
            raise Unauthorised("the token is not one of this run, or not any more")
        return found

    def prove(self, name: bytes, statement: bytes) -> bytes:
        """Prove a statement to the holder of the token that is called so (`name_of`).

        Raises:
            Unauthorised: If it is nobody's.
        """
        try:
            self._refresh()
        except ValueError as error:
            raise Unauthorised(f"nothing is proven: {error}") from error
        for digest in self._table:
            if hmac.compare_digest(name, name_of(digest)):
                return proof_of(digest, statement)
        raise Unauthorised("nothing is proven to the holder of a token that is not of this run")

    def _refresh(self) -> None:
        """Read a changed table; one that cannot be read admits nobody."""
        try:
            found = self._path.stat()
            # Two writes may share one tick of the clock of a disk.
            stamp = found.st_mtime_ns, found.st_ino, found.st_size
            if stamp != self._stamp:
                table = json.loads(self._path.read_text(encoding="utf-8"))
                self._table = {_digest(text): Identity.from_uri(uri) for uri, text in table.items()}
                self._stamp = stamp
        except (OSError, ValueError, AttributeError) as error:
            self._table, self._stamp = {}, None
            raise ValueError(f"cannot read the tokens in {self._path}: {error}") from error


def _digest(text: object) -> str:
    """Insist on what `digest_of` writes."""
    if not (isinstance(text, str) and re.fullmatch(r"[0-9a-f]{64}", text)):
        raise ValueError("an entry is no sha256")
    return text
