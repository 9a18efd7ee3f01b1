"""Leaves: issued to islands by the coordinator, short-lived, renewed while calls go on."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

import diloco.transport.grpc.listener
from diloco.security.security import Security
from diloco.transport.calls.limits import Limits
from diloco.transport.contracts import IncomingCall, Reply
from diloco.transport.errors import ConnectError, Unauthorised
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.grpc.wire import ISSUE_METHOD
from diloco.transport.identity import Identity, Role
from diloco.transport.retry import RetryPolicy, retry
from diloco.transport.security.certificates import make_request
from diloco.transport.security.tls import Tls
from tests.transport.pki import COORDINATOR, EAST, OPERATOR, SYNCER, WEST, Pki

DEADLINE_S = 30.0


async def whoami(call: IncomingCall) -> Reply:
    assert call.caller is not None
    return Reply(call.caller.short.encode())


class Run:
    """A coordinator, a syncer and what islands of other sites have."""

    def __init__(self, directory: Path, lifetime_s: float = 86400.0) -> None:
        self.pki, self.lifetime_s = Pki(directory / "certs"), lifetime_s
        self.pki.issue(COORDINATOR)
        self.revoked = set[int]()
        self.skew_s = 0.0
        self.transports: list[GrpcTransport] = []

    def clock(self) -> float:
        return time.time() + self.skew_s

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        who, place = (COORDINATOR, SYNCER), self.pki.directory
        tls = [Tls(place, identity, self.clock, self.lifetime_s) for identity in who]
        tls[0].is_revoked = self.revoked.__contains__
        servers = [GrpcServer("127.0.0.1:0", {"whoami": whoami}, tls=each) for each in tls]
        try:
            for server in servers:
                await server.start()
            self.coordinator, self.syncer = (server.address for server in servers)
            yield
        finally:
            for each in self.transports:
                await each.close()
            for server in servers:
                await server.stop(0.0)

    def site(self, identity: Identity) -> Tls:
        """Load what an island has: its own files, and where the coordinator is."""
        self.pki.issue(identity)
        site = self.pki.directory.parent / identity.name
        site.mkdir(exist_ok=True)
        for name in ("ca.pem", f"{identity.file_stem}.pem"):
            (self.pki.directory / name).rename(site / name)
            if name == "ca.pem":
                (self.pki.directory / name).write_bytes((site / name).read_bytes())
        tls = Tls(site, identity, self.clock)
        Security(tls).knowing(self.coordinator)
        return tls

    def way(self, address: str, tls: Tls, expects: Role) -> GrpcTransport:
        self.transports.append(GrpcTransport(address, tls=tls, expects=expects))
        return self.transports[-1]

    def to_syncer(self, tls: Tls) -> GrpcTransport:
        return self.way(self.syncer, tls, Role.SYNCER)

    def to_coordinator(self, tls: Tls) -> GrpcTransport:
        return self.way(self.coordinator, tls, Role.COORDINATOR)


async def ask_once(way: GrpcTransport) -> str:
    return (await way.call("whoami", b"", deadline_s=DEADLINE_S)).header.decode()


async def ask(way: GrpcTransport) -> str:
    """Call as every caller does: gRPC cuts off a call that arrives as a listener is replaced."""
    return await retry(lambda: ask_once(way), RetryPolicy(budget_s=DEADLINE_S), random.Random(0))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose leaves last for three seconds, with listeners that keep up."""
    monkeypatch.setattr(diloco.transport.grpc.listener, "_BETWEEN_S", 0.3)
    monkeypatch.setattr(diloco.transport.grpc.listener, "_LOOK_S", 0.1)
    return Run(tmp_path, lifetime_s=3.0)


def test_leaves_of_both_ends_are_renewed_many_times_and_no_call_fails(short: Run) -> None:
    run = short
    stamps = set[object]()

    async def claim() -> None:
        async with run.serving():
            east, west = run.site(EAST), run.site(WEST)
            ways = [run.to_syncer(east), run.to_syncer(west), run.to_coordinator(east)]
            while len(stamps) < 6:  # of two islands: each at least two renewals, or one four
                said = await asyncio.gather(*map(ask, ways))
                assert said == ["island/east", "island/west", "island/east"]
                stamps.update((east.stamp, west.stamp))
                await asyncio.sleep(0.02)

    asyncio.run(claim())


def test_who_was_revoked_gets_no_leaf_and_its_last_one_ends(short: Run) -> None:
    run = short

    async def until_refused(way: GrpcTransport) -> None:
        while True:
            await ask(way)
            await asyncio.sleep(0.1)

    async def claim() -> None:
        async with run.serving():
            east, west = run.site(EAST), run.site(WEST)
            way, other = run.to_syncer(east), run.to_syncer(west)
            assert await ask(way) == "island/east"
            run.revoked.add(run.pki.serials[EAST])
            with pytest.raises(Unauthorised, match="island/east was revoked"):
                await ask(run.to_coordinator(east))
            # The syncer sees that the leaf has ended, or the island that it gets no new one.
            ended = r"no certificate for .*was revoked|island/east expired at"
            with pytest.raises(Unauthorised, match=ended):
                await until_refused(way)
            assert await ask(other) == "island/west"  # whose leaf has ended, too
            run.site(EAST)  # a new one, where the old one lies
            assert await ask(way) == "island/east"

    asyncio.run(claim())


def test_a_leaf_that_expired_ends_its_open_connection(run: Run) -> None:
    async def claim() -> None:
        async with run.serving():
            east = run.site(EAST)
            way = run.to_syncer(east)
            assert await ask(way) == "island/east"
            east._clock = time.time  # its clock stands while the syncer's goes on
            run.skew_s = 86400.0 + 60.0
            with pytest.raises(Unauthorised, match="island/east expired at"):
                await ask(way)

    asyncio.run(claim())


def test_a_renewal_that_fails_is_tried_again_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, lifetime_s=3000.0)

    async def claim() -> None:
        async with run.serving():
            east = run.site(EAST)
            way, issued = run.to_syncer(east), east.ask
            assert await ask(way) == "island/east"
            before, told = east.stamp, list[str]()
            east.on_failure = told.append

            async def refuse(request: bytes) -> bytes:
                raise ConnectError("the coordinator is away")

            east.ask = refuse
            run.skew_s = 0.7 * 3000.0
            for _ in range(3):
                assert await ask(way) == "island/east"
            (text,) = told
            assert "the present one ends in 7" in text  # 0.95 x 3,000 s are shown
            assert text in caplog.text
            run.skew_s += 31.0
            east.ask = issued
            while east.stamp == before:
                assert await ask(way) == "island/east"
            run.skew_s += 3000.0
            east.ask = refuse
            with pytest.raises(ConnectError, match="no certificate for island/east: the coordin"):
                await ask_once(way)

    asyncio.run(claim())


def test_the_name_is_that_of_who_asks(run: Run) -> None:
    async def claim() -> None:
        async with run.serving():
            east, operator = run.site(EAST), run.pki.tls(OPERATOR)
            for who, named, reason in [
                (east, WEST, "island/east asks for a certificate of diloco://test/island/west"),
                (east, SYNCER, "island/east asks for a certificate of diloco://test/syncer"),
                (operator, OPERATOR, "operator needs no certificate of the coordinator"),
            ]:
                request = make_request(named)[1]
                with pytest.raises(Unauthorised, match=reason):
                    await run.to_coordinator(who).call(ISSUE_METHOD, request, deadline_s=DEADLINE_S)
            with pytest.raises(Exception, match=ISSUE_METHOD):  # a syncer issues nothing
                await run.to_syncer(east).call(ISSUE_METHOD, b"", deadline_s=DEADLINE_S)

    asyncio.run(claim())


async def ask_raw(address: str, pem: bytes, ca: bytes, name: str) -> bytes:
    """Ask as somebody who shows what he likes."""
    credentials = grpc.ssl_channel_credentials(ca, pem, pem)
    options = (("grpc.ssl_target_name_override", name),)
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        call = channel.stream_stream("/diloco.wire.v1/whoami", None, None)(iter([b"\0" * 200]))
        return b"".join([bytes(m) async for m in call])


def test_each_certificate_is_good_for_its_own_end_only(run: Run) -> None:
    async def claim() -> None:
        async with run.serving():
            east = run.site(EAST)
            assert await ask(run.to_syncer(east)) == "island/east"
            ca = (run.pki.directory / "ca.pem").read_bytes()
            own = (run.pki.directory.parent / "east" / "island-east.pem").read_bytes()
            for address, pem, name, reason in [
                (run.syncer, own, "syncer", b"is for the coordinator alone"),
                (run.coordinator, east.leaf_pem, "coordinator", b"is foreign"),
            ]:
                assert reason in await ask_raw(address, pem, ca, f"{name}.diloco")
            issuer = (run.pki.directory / "coordinator.pem").read_bytes()
            with pytest.raises(grpc.aio.AioRpcError, match=r"handshake|Socket closed"):
                await ask_raw(run.syncer, issuer, ca, "syncer.diloco")

    asyncio.run(claim())


@pytest.mark.parametrize("shown", ["own", "leaf"])
def test_nobody_poses_as_a_server_with_what_an_island_has(run: Run, shown: str) -> None:
    async def claim() -> None:
        async with run.serving():
            east, west = run.site(EAST), run.site(WEST)
            assert await ask(run.to_syncer(east)) == "island/east"
            pem = {
                "own": (run.pki.directory.parent / "east" / "island-east.pem").read_bytes(),
                "leaf": east.leaf_pem,
            }[shown]
            impostor = grpc.aio.server()
            ca = (run.pki.directory / "ca.pem").read_bytes()
            credentials = grpc.ssl_server_credentials([(pem, pem)], ca, require_client_auth=True)
            port = impostor.add_secure_port("127.0.0.1:0", credentials)
            await impostor.start()
            for role in (Role.COORDINATOR, Role.SYNCER):
                with pytest.raises(ConnectError):
                    await ask_once(run.way(f"127.0.0.1:{port}", west, role))
            if shown != "leaf":  # nor as an island that others pull from
                with pytest.raises(ConnectError):
                    await ask_once(run.way(f"127.0.0.1:{port}", west, Role.ISLAND))
            await impostor.stop(None)

    asyncio.run(claim())


def test_an_answer_that_is_not_for_this_process_is_not_shown(run: Run) -> None:
    answers: list[Callable[[], bytes]] = [
        lambda: b"junk",
        lambda: run.pki.tls(SYNCER).leaf_pem,
        lambda: (run.pki.directory / "ca.pem").read_bytes(),
    ]

    async def claim() -> None:
        async with run.serving():
            east = run.site(EAST)
            for answer in answers:

                async def answered(request: bytes, answer: Callable[[], bytes] = answer) -> bytes:
                    return answer()

                east.ask = answered
                with pytest.raises(ConnectError, match="no certificate for island/east"):
                    await ask_once(run.to_syncer(east))

    asyncio.run(claim())


def test_calls_that_begin_together_ask_once(run: Run) -> None:
    async def claim() -> None:
        async with run.serving():
            east = run.site(EAST)
            issue, asked = east.ask, list[bytes]()
            assert issue is not None

            async def counted(request: bytes) -> bytes:
                asked.append(request)
                return await issue(request)

            east.ask = counted
            await asyncio.gather(*(ask(run.to_syncer(east)) for _ in range(5)))
            assert len(asked) == 1

    asyncio.run(claim())


@pytest.mark.parametrize(("answers", "num_asked"), [(False, 0), (True, 3)], ids=["away", "no-tls"])
def test_a_server_that_is_not_reached_has_no_leaf_and_no_connection_replaced(
    run: Run, answers: bool, num_asked: int
) -> None:
    async def claim() -> None:
        hangs_up = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1")
        bad = f"127.0.0.1:{hangs_up.sockets[0].getsockname()[1] if answers else 1}"
        async with run.serving():
            east = run.site(EAST)
            way, not_reached = run.to_syncer(east), run.way(bad, east, Role.SYNCER)
            assert await ask(way) == "island/east"
            before, issue, asked = east.stamp, east.ask, list[bytes]()
            assert issue is not None

            async def counted(request: bytes) -> bytes:
                asked.append(request)
                return await issue(request)

            east.ask = counted
            for _ in range(3):
                run.skew_s += 61.0  # from when on a leaf may be doubted
                with pytest.raises(ConnectError):
                    await ask_once(not_reached)
                assert await ask(way) == "island/east"
                await asyncio.gather(*east._asking.values())
                assert east.stamp == before
            assert len(asked) == num_asked
        hangs_up.close()

    asyncio.run(claim())


async def ready(site: Tls) -> None:
    """Get a leaf from a coordinator whose listener may be replaced just then."""
    while True:
        with contextlib.suppress(ConnectError):
            return await site.ready()


def test_strangers_are_bounded_while_no_leaf_comes(short: Run) -> None:
    async def no_answer(request: bytes) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    async def claim() -> None:
        async with short.serving():
            east = short.site(EAST)
            limits = Limits(strangers_per_address=2)
            server = GrpcServer("127.0.0.1:0", {"whoami": whoami}, tls=east, limits=limits)
            await ready(east)
            await server.start()
            east.ask = no_answer
            short.skew_s += 10.0  # its leaf has ended
            await asyncio.sleep(0.3)  # the listener has looked for one
            opened = [await asyncio.open_connection(*server.address.split(":")) for _ in range(3)]
            try:
                ends = [asyncio.create_task(reader.read()) for reader, _ in opened]
                first = asyncio.FIRST_COMPLETED  # after 20 s gRPC itself gives a handshake up
                closed, _ = await asyncio.wait(ends, timeout=10.0, return_when=first)
                assert len(closed) == 1
            finally:
                for _, writer in opened:
                    writer.close()
                await asyncio.gather(*ends, return_exceptions=True)
                await server.stop(0.0)

    asyncio.run(claim())
