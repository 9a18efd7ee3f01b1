"""Tokens: whose they are, and what a call without a good one hears."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from diloco.transport.contracts import IncomingCall, Reply
from diloco.transport.errors import Unauthorised
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.identity import Identity
from diloco.transport.security.tls import Tls
from diloco.transport.security.tokens import (
    TABLE_FILE,
    TokenTable,
    digest_of,
    make_token,
    read_token,
)
from tests.transport.pki import COORDINATOR, EAST, WEST, Pki

DEADLINE_S = 30.0


async def whoami(call: IncomingCall) -> Reply:
    return Reply(call.caller.short.encode() if call.caller else b"nobody")


async def echo(call: IncomingCall) -> Reply:
    return Reply(b"", await call.read_payload())


def write_table(directory: Path, tokens: dict[Identity, str]) -> Path:
    path = directory / TABLE_FILE
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(json.dumps({i.uri: digest_of(token) for i, token in tokens.items()}))
    os.utime(path, ns=(before + 10**9, before + 10**9))  # two writes may share one tick of a disk
    return path


def serving(
    table: TokenTable, claim: Callable[[str], Awaitable[None]], tls: Tls | None = None
) -> None:
    async def run() -> None:
        handlers = {"whoami": whoami, "echo": echo}
        server = GrpcServer("127.0.0.1:0", handlers, tokens=table, tls=tls)
        await server.start()
        try:
            await claim(server.address)
        finally:
            await server.stop(0.0)

    asyncio.run(run())


async def ask(address: str, token: str, tls: Tls | None = None) -> str:
    transport = GrpcTransport(address, token=token, tls=tls)
    try:
        return (await transport.call("whoami", b"", deadline_s=DEADLINE_S)).header.decode()
    finally:
        await transport.close()


def test_a_token_names_its_caller_and_a_wrong_one_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token, wrong = make_token(), make_token()
    table = TokenTable(write_table(tmp_path, {EAST: token}))

    async def claim(address: str) -> None:
        assert await ask(address, token) == "island/east"
        for given, reason in ((wrong, "not one of this run"), ("", "carries no token")):
            with pytest.raises(Unauthorised, match=reason):
                await ask(address, given)

    with caplog.at_level(logging.DEBUG):
        serving(table, claim)
    assert "call refused method=whoami" in caplog.text
    assert not any(secret in caplog.text for secret in (token, wrong, digest_of(token)))


def test_a_token_is_judged_once_a_stream_however_many_chunks_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = make_token()
    table = TokenTable(write_table(tmp_path, {EAST: token}))
    judged: list[str] = []
    payload = bytes(5 << 20)

    def identify(given: str) -> Identity:
        judged.append(given)
        return TokenTable.identify(table, given)

    async def claim(address: str) -> None:
        transport = GrpcTransport(address, token=token, chunk_bytes=64 << 10)
        for _ in range(2):
            reply = await transport.call(
                "echo", b"", payload, deadline_s=DEADLINE_S, max_reply_bytes=len(payload)
            )
            assert reply.payload == payload
        await transport.close()

    monkeypatch.setattr(table, "identify", identify)
    serving(table, claim)
    assert judged == [token] * 2


def test_a_replaced_token_is_refused_at_its_next_call(tmp_path: Path) -> None:
    old, new = make_token(), make_token()
    table = TokenTable(write_table(tmp_path, {EAST: old}))

    async def claim(address: str) -> None:
        await ask(address, old)
        write_table(tmp_path, {EAST: new})
        with pytest.raises(Unauthorised, match="or not any more"):
            await ask(address, old)
        assert await ask(address, new) == "island/east"

    serving(table, claim)


def test_a_table_that_cannot_be_read_admits_nobody(tmp_path: Path) -> None:
    token = make_token()
    path = write_table(tmp_path, {EAST: token})
    table = TokenTable(path)

    path.write_text("half a")
    with pytest.raises(Unauthorised, match="nobody is admitted"):
        table.identify(token)
    path.unlink()
    with pytest.raises(Unauthorised, match="nobody is admitted"):
        table.identify(token)
    write_table(tmp_path, {EAST: token})
    assert table.identify(token) == EAST


def test_a_table_replaced_within_one_tick_of_the_clock_is_read(tmp_path: Path) -> None:
    old, new = make_token(), make_token()
    path = write_table(tmp_path, {EAST: old})
    table, before = TokenTable(path), path.stat().st_mtime_ns

    path.rename(tmp_path / "before")
    os.utime(write_table(tmp_path, {EAST: new}), ns=(before, before))

    assert table.identify(new) == EAST
    with pytest.raises(Unauthorised, match="or not any more"):
        table.identify(old)


@pytest.mark.parametrize("digest", [7, None, "", "\u00e9" * 64, "A" * 64])
def test_an_entry_that_is_no_digest_admits_nobody(digest: object, tmp_path: Path) -> None:
    path = tmp_path / TABLE_FILE
    path.write_text(json.dumps({EAST.uri: digest}))

    with pytest.raises(ValueError, match="an entry is no sha256"):
        TokenTable(path)


def test_token_and_certificate_must_be_of_the_same(tmp_path: Path) -> None:
    pki = Pki(tmp_path / "certs")
    tokens = {EAST: make_token(), WEST: make_token()}
    table = TokenTable(write_table(tmp_path, tokens))

    async def claim(address: str) -> None:
        assert await ask(address, tokens[EAST], pki.tls(EAST)) == "island/east"
        with pytest.raises(Unauthorised, match="that of island/east, the token that of"):
            await ask(address, tokens[WEST], pki.tls(EAST))
        with pytest.raises(Unauthorised, match="carries no token"):
            await ask(address, "", pki.tls(EAST))

    serving(table, claim, pki.tls(COORDINATOR))


def test_every_entry_is_compared_in_constant_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = {EAST: make_token(), WEST: make_token()}
    table = TokenTable(write_table(tmp_path, tokens))
    compared: list[str] = []

    def counted(a: str, b: str) -> bool:
        compared.append(b)
        return a == b

    monkeypatch.setattr("diloco.transport.security.tokens.hmac.compare_digest", counted)

    assert table.identify(tokens[EAST]) == EAST
    assert len(compared) == 2  # no early end tells how far a guess came


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [("short", 0o600, "a token has 16 or more"), ("x" * 43, 0o644, "chmod 600"), ("", 0, "")],
    ids=["short", "open", "missing"],
)
def test_a_token_file_is_kept_private(text: str, mode: int, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "east.token"
    if text:
        path.write_text(text)
        path.chmod(mode)

    with pytest.raises(ValueError, match=reason or "cannot read the token"):
        read_token(path)
