"""What is libp2p's own: daemons that die, peers found by identity, streams that are no calls."""

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diloco.transport.calls.limits import Limits
from diloco.transport.contracts import Handlers, IncomingCall, Reply
from diloco.transport.errors import ConnectError, PeerReset, TransportError, Unauthorised
from diloco.transport.framing import FrameReader
from diloco.transport.identity import Identity, Role
from diloco.transport.libp2p.address import PeerAddress, parse_peer_address, tcp_port
from diloco.transport.libp2p.client import HivemindTransport
from diloco.transport.libp2p.daemon import (
    Daemon,
    DaemonFailed,
    HivemindMissing,
    Swarm,
    _arguments,
    daemon_path,
)
from diloco.transport.libp2p.directory import PLACE, PREFIX
from diloco.transport.libp2p.server import HivemindServer
from diloco.transport.libp2p.wire import ACCEPTED, Opening, read_message
from diloco.transport.retry import RetryPolicy, retry
from diloco.transport.security.tokens import TokenTable, digest_of

DEADLINE_S = 30.0


async def echo(call: IncomingCall) -> Reply:
    return Reply(call.header, await call.read_payload())


async def whence(call: IncomingCall) -> Reply:
    return Reply(f"{call.is_local}".encode())


async def whoami(call: IncomingCall) -> Reply:
    return Reply((call.caller.uri if call.caller else "nobody").encode())


def serving(
    directory: Path, claim: Callable[[HivemindServer], Awaitable[None]], **options: object
) -> None:
    async def run() -> None:
        handlers = {"echo": echo, "whoami": whoami, "whence": whence}
        server = make(directory, handlers, **options)
        await server.start()
        try:
            await claim(server)
        finally:
            await server.stop(0.0)

    asyncio.run(run())


def make(
    directory: Path, handlers: Handlers, bind: str = "127.0.0.1:0", **options: object
) -> HivemindServer:
    return HivemindServer(bind, handlers, identity=directory / "key", **options)  # type: ignore[arg-type]


async def echoed(transport: HivemindTransport, text: bytes = b"hello") -> None:
    reply = await retry(
        lambda: transport.call("echo", text, deadline_s=DEADLINE_S),
        RetryPolicy(budget_s=DEADLINE_S),
        random.Random(0),
    )
    assert reply.header == text


def daemons_of(pid: int) -> list[int]:
    """Processes of p2pd whose parent is `pid`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text() if entry.name.isdigit() else ""
        except OSError:
            continue
        name, _, rest = stat.partition(") ")
        if name.endswith("(p2pd") and rest.split()[:2] != [] and int(rest.split()[1]) == pid:
            found.append(int(entry.name))
    return found


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return False
    return state not in "ZX"


@contextmanager
def peer_process(key: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "tests.transport.hivemind_peer", str(key), str(port)]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_a_killed_peer_is_a_reset_at_once_and_its_successor_is_found(tmp_path: Path) -> None:
    key = tmp_path / "key"

    async def run() -> None:
        with peer_process(key) as (process, address):
            transport = HivemindTransport(address)
            await echoed(transport)
            (daemon,) = daemons_of(process.pid)
            call = asyncio.create_task(
                transport.call("hold", b"", bytes(1 << 20), deadline_s=DEADLINE_S * 100)
            )
            assert process.stdout is not None
            await asyncio.to_thread(process.stdout.readline)
            process.kill()
            # A daemon that ends may drop what it has not delivered, the sign of acceptance too.
            with pytest.raises((PeerReset, ConnectError)) as caught:
                await asyncio.wait_for(call, DEADLINE_S)
            assert (caught.value.peer, caught.value.method) == (address, "hold")
        with pytest.raises(ConnectError):
            await transport.call("echo", b"", deadline_s=DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            while is_running(daemon):  # its daemon ends with it and frees the port
                await asyncio.sleep(0.05)

        with peer_process(key, tcp_port(parse_peer_address(address))) as (_, again):
            assert again == address
            await echoed(transport)
        await transport.close()

    asyncio.run(run())


def test_a_servers_daemon_that_dies_is_started_again_where_it_was(tmp_path: Path) -> None:
    async def claim(server: HivemindServer) -> None:
        (before,) = daemons_of(os.getpid())
        transport = HivemindTransport(server.address)
        await echoed(transport)
        here = await transport.call("whence", b"", deadline_s=DEADLINE_S)
        assert here.header == b"True"
        os.kill(before, signal.SIGKILL)
        await echoed(transport)
        assert before not in daemons_of(os.getpid())
        await transport.close()

    serving(tmp_path, claim)
    assert daemons_of(os.getpid()) == []


def test_a_callers_daemon_that_dies_is_replaced_by_the_next_call(tmp_path: Path) -> None:
    async def claim(server: HivemindServer) -> None:
        (own,) = daemons_of(os.getpid())
        transport = HivemindTransport(server.address)
        await echoed(transport)
        (before,) = set(daemons_of(os.getpid())) - {own}
        os.kill(before, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            while is_running(before):
                await asyncio.sleep(0.01)
        await echoed(transport)
        await transport.close()

    serving(tmp_path, claim)


def test_a_daemon_whose_sockets_vanish_is_replaced_at_either_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by something that tidies /tmp."""
    monkeypatch.setattr("diloco.transport.libp2p.server.MEET_INTERVAL_S", 0.1)

    async def claim(server: HivemindServer) -> None:
        own = {*PLACE.glob(f"{PREFIX}*")}
        transport = HivemindTransport(server.address)
        await echoed(transport)
        (callers,) = {*PLACE.glob(f"{PREFIX}*")} - own
        shutil.rmtree(callers)
        await transport.call("echo", b"", deadline_s=DEADLINE_S)

        assert server._daemon is not None
        shutil.rmtree(server._daemon._sockets)
        await echoed(transport)
        await transport.close()

    serving(tmp_path, claim)
    assert daemons_of(os.getpid()) == []


def test_a_port_is_mapped_by_a_server_that_was_told_to_and_by_nobody_else(tmp_path: Path) -> None:
    def switches(maps_port: bool, listen: str) -> list[str]:
        given = _arguments(Swarm(maps_port=maps_port), listen, None, tmp_path)
        return [argument for argument in given if argument.startswith("-natPortMap")]

    assert switches(True, "/ip4/0.0.0.0/tcp/4711") == ["-natPortMap=1"]
    assert switches(False, "/ip4/0.0.0.0/tcp/4711") == ["-natPortMap=0"]
    assert switches(True, "") == ["-natPortMap=0"]  # a caller listens at no port


def test_a_peer_is_found_by_its_identity_alone(tmp_path: Path) -> None:
    """Both know a third peer; nobody tells the caller where the server is."""

    async def run() -> None:
        (tmp_path / "third").mkdir()
        third = make(tmp_path / "third", {})
        await third.start()
        swarm = Swarm(initial_peers=(third.address,))
        server = make(tmp_path, {"echo": echo}, swarm=swarm)
        await server.start()
        identity = parse_peer_address(server.address).peer_id
        transport = HivemindTransport(str(PeerAddress(identity, ())), swarm)
        await echoed(transport)

        # It moves: same identity, another port, and the old address is wrong.
        await server.stop(0.0)
        moved = make(tmp_path, {"echo": echo}, swarm=swarm)
        await moved.start()
        assert tcp_port(parse_peer_address(moved.address)) != tcp_port(
            parse_peer_address(server.address)
        )
        stale = HivemindTransport(server.address, swarm)
        await echoed(stale)
        for end in (transport, stale):
            await end.close()
        for peer in (moved, third):
            await peer.stop(0.0)

    asyncio.run(run())


def test_another_peer_at_the_same_place_is_not_believed(tmp_path: Path) -> None:
    async def claim(server: HivemindServer) -> None:
        real = parse_peer_address(server.address)
        other = PeerAddress("12D3KooWN5P2Q2iiazQx4nT1YLy7dtk141rSerXCWfCod4awDsn9", real.routes)
        transport = HivemindTransport(str(other))
        with pytest.raises(ConnectError):
            await transport.call("echo", b"", deadline_s=DEADLINE_S)
        await transport.close()

    serving(tmp_path, claim)


def test_a_port_in_use_is_an_error_of_start(tmp_path: Path) -> None:
    async def claim(server: HivemindServer) -> None:
        (tmp_path / "second").mkdir()
        port = tcp_port(parse_peer_address(server.address))
        with pytest.raises(OSError, match="another process using it"):
            await make(tmp_path / "second", {}, f"127.0.0.1:{port}").start()

    serving(tmp_path, claim)
    assert daemons_of(os.getpid()) == []


@pytest.mark.parametrize("bind", ["example.org:80", "127.0.0.1", ":80"])
def test_a_bind_that_libp2p_cannot_is_refused(tmp_path: Path, bind: str) -> None:
    with pytest.raises(ValueError, match=r"IP addresses|HOST:PORT"):
        make(tmp_path, {}, bind)


def test_a_token_says_who_calls_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "tokens.json"
    uri = Identity("run", Role.ISLAND, "east").uri
    table.write_text(f'{{"{uri}": "{digest_of("a token of the east")}"}}')

    async def claim(server: HivemindServer) -> None:
        for token, expected in (("a token of the east", uri), ("another", None), ("", None)):
            transport = HivemindTransport(server.address, token=token)
            if expected:
                reply = await transport.call("whoami", b"", deadline_s=DEADLINE_S)
                assert reply.header.decode() == expected
            else:
                with pytest.raises(Unauthorised):
                    await transport.call("whoami", b"", bytes(3 << 20), deadline_s=DEADLINE_S)
            await transport.close()

    serving(tmp_path, claim, tokens=TokenTable(table))


def test_streams_that_are_no_calls_are_told_so_and_the_server_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opening = Opening("echo", "", 5.0).to_bytes()
    garbage = {
        b"": r"no opening for 0\.5 s",
        b"GET / HTTP/1.1\r\n\r\n": "a call opens with .* texts of",
        opening[:7]: r"no opening for 0\.5 s",
        Opening("\0", "", 5.0).to_bytes()[:-1] + b"\xff": "bytes that are no text",
        opening + b"\xff\xff\xff\xff": "a message of 4294967295 bytes is announced",
        opening + b"\x08\x00\x00\x00garbage!": "too few for a frame",
    }

    async def claim(server: HivemindServer) -> None:
        daemon = await Daemon.start(Swarm())
        for sent, reason in garbage.items():
            caplog.clear()
            reader, writer, _ = await daemon.open(parse_peer_address(server.address))
            writer.write(sent)
            async with asyncio.timeout(DEADLINE_S):
                assert await reader.readexactly(len(ACCEPTED)) == ACCEPTED
                with pytest.raises(TransportError, match=reason):
                    FrameReader(await read_message(reader))
            assert caplog.text.count("call refused") == 1
            writer.transport.abort()
        await daemon.stop()
        transport = HivemindTransport(server.address)
        await echoed(transport)
        await transport.close()

    serving(tmp_path, claim, limits=Limits(silence_s=0.5))


def test_the_key_is_made_once_and_read_by_nobody_else(tmp_path: Path) -> None:
    addresses = []

    async def claim(server: HivemindServer) -> None:
        addresses.append(parse_peer_address(server.address).peer_id)

    serving(tmp_path, claim)
    serving(tmp_path, claim)

    assert len(set(addresses)) == 1
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_without_hivemind_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HivemindMissing, match=r"pip install 'diloco\[hivemind\]'"):
        daemon_path()


def test_a_daemon_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"not a key")
    with pytest.raises(DaemonFailed, match=r"did not start: .+"):
        asyncio.run(Daemon.start(Swarm(), identity=tmp_path / "key"))
    assert daemons_of(os.getpid()) == []


def test_nothing_else_than_transport_errors_reaches_a_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "p2pd"
    script.write_text("#!/bin/sh\necho cannot; exit 1\n")
    script.chmod(0o700)
    monkeypatch.setattr("diloco.transport.libp2p.daemon.daemon_path", lambda: script)

    async def run() -> None:
        peer = "/p2p/12D3KooWN5P2Q2iiazQx4nT1YLy7dtk141rSerXCWfCod4awDsn9"
        transport = HivemindTransport(peer)
        for _ in range(2):
            with pytest.raises(TransportError, match=r"did not start: cannot") as caught:
                await transport.call("echo", b"", deadline_s=DEADLINE_S)
            assert (type(caught.value), caught.value.peer) == (ConnectError, peer)
        await transport.close()

    asyncio.run(run())
