"""How a peer is reached: candidates in order, IPv6, proxies, names that move."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc.aio
import pytest

from diloco.simulations.emulate.namespaces import Namespaces, inside
from diloco.transport.addresses import is_own, split_address, split_candidates
from diloco.transport.contracts import IncomingCall, Reply
from diloco.transport.errors import ConnectError, HandlerFailed
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.grpc.wire import CHANNEL_OPTIONS
from diloco.transport.retry import RetryPolicy, retry
from diloco.transport.security.tls import Tls
from tests.simulations.emulated_site import needs_namespaces
from tests.transport.pki import COORDINATOR, EAST, Pki

DEADLINE_S = 30.0


async def fail(call: IncomingCall) -> Reply:
    raise ValueError("on purpose")


@asynccontextmanager
async def served(
    name: str, bind: str = "127.0.0.1:0", tls: Tls | None = None
) -> AsyncIterator[str]:
    async def tell(call: IncomingCall) -> Reply:
        return Reply(name.encode())

    server = GrpcServer(bind, {"name": tell, "fail": fail}, tls=tls)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(0.0)


async def ask(transport: GrpcTransport) -> str:
    return (await transport.call("name", b"", deadline_s=DEADLINE_S)).header.decode()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "::ffff:127.0.0.1"])
def test_this_machines_addresses_are_known(host: str) -> None:
    assert is_own(host)


@pytest.mark.parametrize(
    "host", ["192.0.2.7", "2001:db8::7", "0.0.0.0", "::", "example.org", "", "::ffff:192.0.2.7"]
)
def test_addresses_elsewhere_are_not_taken_for_ours(host: str) -> None:
    assert not is_own(host)


_ASK = """
import asyncio, sys
from diloco.transport.grpc.client import GrpcTransport

async def ask(address):
    transport = GrpcTransport(address)
    print((await transport.call("whence", b"", deadline_s=30.0)).header.decode())
    await transport.close()

for address in sys.argv[1:]:
    asyncio.run(ask(address))
"""


@needs_namespaces
def test_a_server_tells_calls_of_its_own_machine_from_others() -> None:
    async def whence(call: IncomingCall) -> Reply:
        return Reply(f"{call.is_local}".encode())

    async def answers(node: str, port: str) -> list[str]:
        places = [f"{host}:{port}" for host in ("10.98.0.1", "[fd98::1]")]
        child = await asyncio.create_subprocess_exec(
            *spaces.enter(node), sys.executable, "-c", _ASK, *places, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await child.communicate()
        return said.decode().split()

    async def run() -> tuple[list[str], list[str]]:
        server = GrpcServer("[::]:0", {"whence": whence}, insecure=True)
        await server.start()
        port = server.address.rpartition(":")[2]
        try:
            return await answers("near", port), await answers("far", port)
        finally:
            await server.stop(0.0)

    with Namespaces(["near", "far"]) as spaces:
        near, far = spaces.name("near"), spaces.name("far")
        for line in [
            f"link add wire netns {near} type veth peer name wire netns {far}",
            f"-n {near} address add 10.98.0.1/24 dev wire",
            f"-n {far} address add 10.98.0.2/24 dev wire",
            f"-n {near} address add fd98::1/64 dev wire nodad",
            f"-n {far} address add fd98::2/64 dev wire nodad",
            f"-n {near} link set lo up",
            f"-n {far} link set lo up",  # gRPC speaks IPv6 only where ::1 is there
            f"-n {near} link set wire up",
            f"-n {far} link set wire up",
        ]:
            subprocess.run(["ip", *line.split()], check=True)
        with inside(spaces.path("near")):
            here, elsewhere = asyncio.run(run())

    assert (here, elsewhere) == (["True", "True"], ["False", "False"])


@contextmanager
def nobody() -> Iterator[str]:
    """An address at which nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


def test_candidates_are_tried_in_order_and_the_one_that_answers_is_kept() -> None:
    async def run() -> None:
        with nobody() as closed:
            async with served("second") as second, served("third") as third:
                transport = GrpcTransport(f"{closed}, {second},{third}")
                assert [await ask(transport) for _ in range(3)] == ["second"] * 3
                with pytest.raises(HandlerFailed, match="on purpose"):  # an answer is an answer
                    await transport.call("fail", b"", deadline_s=DEADLINE_S)
                assert transport.peer == f"{closed}, {second},{third}"
            with pytest.raises(ConnectError):
                await ask(transport)
            async with served("back", second):
                policy = RetryPolicy(budget_s=DEADLINE_S)
                assert await retry(lambda: ask(transport), policy, random.Random(0)) == "back"
            await transport.close()

    asyncio.run(run())


def test_a_silent_first_candidate_costs_seconds_not_the_call() -> None:
    async def run() -> None:
        with socket.socket() as silent:  # a backlog that is full: connections hang
            silent.bind(("127.0.0.1", 0))
            silent.listen(0)
            async with served("second") as second:
                transport = GrpcTransport(f"127.0.0.1:{silent.getsockname()[1]},{second}")
                assert await ask(transport) == "second"
                await transport.close()

    asyncio.run(run())


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_ipv6_is_served_and_reached() -> None:
    async def run() -> None:
        async with served("six", "[::1]:0") as address:
            assert address.startswith("[::1]:")
            transport = GrpcTransport(address)
            assert await ask(transport) == "six"
            await transport.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "text",
    [
        "::1:80", "2001:db8::1:4711", "host", ":80", "host:http", "host:65536", "ho st:1",
        "http://host:1", "a:1,", "a:1;b:2", "[::1]:x", "",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        split_candidates(text)


def test_addresses_are_split() -> None:
    assert split_address("[2001:db8::1]:80") == ("[2001:db8::1]", 80)
    assert split_candidates("10.0.0.5:1, eu.example.org:2") == ["10.0.0.5:1", "eu.example.org:2"]


class ConnectProxy:
    """An HTTP proxy that knows CONNECT and nothing else; keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._pumps: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.asked.append(head)
        host, port = head.split()[1].rsplit(":", 1)
        there = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for source, target in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._pump(source, target))
            self._pumps.add(task)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
        target.close()

    async def stop(self) -> None:
        await asyncio.gather(*self._pumps)


@pytest.mark.parametrize("is_secure", [False, True], ids=["plaintext", "mTLS"])
def test_calls_go_through_an_http_proxy(is_secure: bool, tmp_path: Path) -> None:
    pki = Pki(tmp_path / "certs")

    async def run() -> None:
        proxy = ConnectProxy()
        listening = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        server_tls, client_tls = (
            (pki.tls(COORDINATOR), pki.tls(EAST)) if is_secure else (None, None)
        )
        async with served("behind", tls=server_tls) as address:
            transport = GrpcTransport(
                address, tls=client_tls, proxy=f"http://user:word@127.0.0.1:{port}"
            )
            assert await ask(transport) == "behind"
            assert len(proxy.asked) == 1
            assert proxy.asked[0].startswith(f"CONNECT {address} ")
            assert "proxy-authorization: basic" in proxy.asked[0].lower()
            await transport.close()
        await proxy.stop()
        listening.close()
        await listening.wait_closed()

    asyncio.run(run())


def test_the_environments_proxies_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    with nobody() as closed:
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://{closed}")

        async def run() -> None:
            async with served("direct") as address:
                transport = GrpcTransport(address)
                assert await ask(transport) == "direct"
                await transport.close()

        asyncio.run(run())


class NameServer:
    """Answers every question for an IPv4 address with `address`."""

    def __init__(self) -> None:
        self.address = "127.0.0.1"
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def stop(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as closer:
            closer.sendto(b"end", ("127.0.0.1", self.port))
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            question, sender = self._socket.recvfrom(4096)
            if question == b"end":
                return
            end = question.index(b"\0", 12) + 5
            is_a = question[end - 4 : end - 2] == b"\0\x01"
            header = question[:2] + struct.pack(">5H", 0x8180, 1, int(is_a), 0, 0)
            answer = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 0, 4) if is_a else b""
            address = socket.inet_aton(self.address) if is_a else b""
            self._socket.sendto(header + question[12:end] + answer + address, sender)


def test_a_name_is_resolved_again_when_its_server_moves() -> None:
    names = NameServer()

    async def name_at(channel: grpc.aio.Channel) -> str:
        transport = GrpcTransport("unused.example:1")
        transport._channels["unused.example:1", 0] = (
            channel  # a target of gRPC's with a name server
        )
        return await ask(transport)

    async def run() -> None:
        async with served("first") as first:
            port = split_address(first)[1]
            target = f"dns://127.0.0.1:{names.port}/coordinator.example:{port}"
            channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
            assert await name_at(channel) == "first"
        names.address = "127.0.0.2"
        async with served("moved", f"127.0.0.2:{port}"):
            policy = RetryPolicy(budget_s=DEADLINE_S)
            assert await retry(lambda: name_at(channel), policy, random.Random(0)) == "moved"
        await channel.close()

    async def run_where_the_port_is_free() -> None:
        while True:  # another process may have drawn the same at the other address
            try:
                return await run()
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                names.address = "127.0.0.1"

    try:
        asyncio.run(run_where_the_port_is_free())
    finally:
        names.stop()
