"""What strangers, hung daemons and hurried callers cannot do to a libp2p peer."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.transport.calls.limits import Limits
from diloco.transport.calls.serving import Answer
from diloco.transport.contracts import Reply
from diloco.transport.deadlines import Movement
from diloco.transport.errors import DeadlineExceeded, MessageTooLarge, TransportError, Unauthorised
from diloco.transport.framing import FrameReader, Resumption
from diloco.transport.libp2p import client as hivemind_client
from diloco.transport.libp2p import daemon as hivemind_daemon
from diloco.transport.libp2p import directory as hivemind_directory
from diloco.transport.libp2p.address import PeerAddress, parse_peer_address
from diloco.transport.libp2p.client import HivemindTransport
from diloco.transport.libp2p.daemon import Daemon, DaemonFailed, Stream, Swarm
from diloco.transport.libp2p.directory import SocketDirectory, sweep
from diloco.transport.libp2p.server import HivemindServer, _Stream
from diloco.transport.libp2p.wire import ACCEPTED, Opening, read_message
from diloco.transport.security.tokens import TokenTable
from tests.transport.test_hivemind import DEADLINE_S, daemons_of, echo, echoed, make, serving

NOBODY = "12D3KooWN5P2Q2iiazQx4nT1YLy7dtk141rSerXCWfCod4awDsn9"


@pytest.fixture(autouse=True)
def _own_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other tests' daemons come and go in the common place while these look."""
    with tempfile.TemporaryDirectory(dir=hivemind_directory.PLACE) as place:
        monkeypatch.setattr(hivemind_directory, "PLACE", Path(place))
        yield


def directories() -> set[Path]:
    return set(hivemind_directory.PLACE.glob(f"{hivemind_directory.PREFIX}*"))


def test_a_stranger_holds_half_of_the_streams_and_others_get_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def claim(server: HivemindServer) -> None:
        stranger = await Daemon.start(Swarm())
        streams = [await stranger.open(parse_peer_address(server.address)) for _ in range(12)]
        async with asyncio.timeout(DEADLINE_S):
            answers = await asyncio.gather(*(reader.read(1) for reader, _, _ in streams))
        assert answers.count(ACCEPTED) == 4
        assert answers.count(b"") == 8
        assert len(server._calls) == 4
        assert caplog.text.count("closed unheard: 4 are open, 4 of them of peer=") == 1

        transport = HivemindTransport(server.address)
        await echoed(transport)
        await transport.close()
        for _, writer, _ in streams:
            writer.transport.abort()
        await stranger.stop()

    serving(tmp_path, claim, limits=Limits(connections=8))


def test_refused_streams_that_never_end_are_cut_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokens.json").write_text("{}")
    refused = Opening("echo", "a guess", DEADLINE_S).to_bytes()

    async def claim(server: HivemindServer) -> None:
        stranger = await Daemon.start(Swarm())
        streams = []
        for _ in range(8):
            reader, writer, _ = await stranger.open(parse_peer_address(server.address))
            writer.write(refused)
            streams.append((reader, writer))

        async def heard(reader: asyncio.StreamReader) -> bool:
            assert await reader.readexactly(len(ACCEPTED)) == ACCEPTED
            try:
                message = await read_message(reader)
            except EOFError:
                return False
            with pytest.raises(Unauthorised):
                FrameReader(message)
            return True

        async with asyncio.timeout(DEADLINE_S):
            told = await asyncio.gather(*(heard(reader) for reader, _ in streams))
        assert told.count(True) == 2
        assert caplog.text.count("call refused") == 1
        for _, writer in streams:
            writer.transport.abort()
        await stranger.stop()

    limits = Limits(refused=2, refusals_logged_per_s=0.1)
    serving(tmp_path, claim, limits=limits, tokens=TokenTable(tmp_path / "tokens.json"))


def test_a_caller_that_takes_nothing_is_not_written_to_without_end() -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            pipe = await asyncio.open_connection(sock=ours)
            stream = _Stream(PeerAddress(NOBODY, ()), *pipe, Movement())
            stream.silence_s = 0.05
            async with asyncio.timeout(DEADLINE_S):
                with pytest.raises(TimeoutError):
                    await stream.write(bytes(8 << 20))
            stream.writer.transport.abort()

    asyncio.run(run())


RELAYED = f"/ip4/192.0.2.9/tcp/4711/p2p/{NOBODY}/p2p-circuit"
OVER_A_RELAY = bytes((256 << 20) + 1)
NOT_OVER_A_RELAY = r"268435457 bytes cannot travel through a relay, at most 256 MiB: dial"


def test_a_request_that_no_relay_carries_is_refused_before_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()

        async def relayed(_: HivemindTransport) -> Stream:
            return *await asyncio.open_connection(sock=ours), True

        monkeypatch.setattr(HivemindTransport, "_open", relayed)
        transport = HivemindTransport(f"/p2p/{NOBODY}")
        with theirs:
            with pytest.raises(MessageTooLarge, match=NOT_OVER_A_RELAY) as caught:
                await transport.call("echo", b"", OVER_A_RELAY, deadline_s=DEADLINE_S)
            assert not caught.value.is_retryable
            reader, writer = await asyncio.open_connection(sock=theirs)
            assert await reader.read() == b""
            writer.close()
        await transport.close()

    asyncio.run(run())


def test_a_reply_that_no_relay_carries_is_refused_by_name(tmp_path: Path) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        address = PeerAddress(NOBODY, (RELAYED,))
        stream = _Stream(address, *await asyncio.open_connection(sock=ours), Movement())
        stream.silence_s = DEADLINE_S
        server = make(tmp_path, {})
        reader, writer = await asyncio.open_connection(sock=theirs)
        answer = Answer(Reply(b"", OVER_A_RELAY), Resumption())
        sending = asyncio.create_task(server._send(answer, stream, server._packers.of("", "")))
        with pytest.raises(MessageTooLarge, match=NOT_OVER_A_RELAY):
            FrameReader(await read_message(reader))
        writer.close()
        await sending
        stream.writer.close()

    asyncio.run(run())


def test_the_keeper_outlives_a_lack_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Daemon.start
    failures = [OSError(errno.EMFILE, "too many open files")]

    async def claim(server: HivemindServer) -> None:
        async def starting(*args: Any, **options: Any) -> Daemon:
            if failures:
                raise failures.pop()
            return await start(*args, **options)

        monkeypatch.setattr("diloco.transport.libp2p.server.Daemon.start", starting)
        (own,) = daemons_of(os.getpid())
        os.kill(own, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            while failures or not set(daemons_of(os.getpid())) - {own}:
                await asyncio.sleep(0.02)
        monkeypatch.setattr("diloco.transport.libp2p.server.Daemon.start", start)
        transport = HivemindTransport(server.address)
        await echoed(transport)
        await transport.close()

    serving(tmp_path, claim)


def test_a_keeper_that_fails_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def meet(daemon: Daemon) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Daemon, "meet", meet)

    async def claim(server: HivemindServer) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while "nobody keeps the libp2p daemon" not in caplog.text:
                await asyncio.sleep(0.02)

    serving(tmp_path, claim)


def test_a_server_that_cannot_accept_leaves_no_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def accept(daemon: Daemon, handle: object) -> None:
        raise DaemonFailed("handler already set")

    monkeypatch.setattr(Daemon, "accept", accept)
    before = directories()

    with pytest.raises(OSError, match="handler already set"):
        asyncio.run(make(tmp_path, {}).start())

    assert daemons_of(os.getpid()) == []
    assert directories() <= before


def test_a_worn_daemon_is_replaced_once_and_ended_in_nobodys_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hivemind_daemon, "_END_S", 0.2)
    monkeypatch.setattr(hivemind_client, "_KEEP_S", 0.0)
    before = directories()
    both_failed = asyncio.Barrier(2)

    async def worn(daemon: Daemon, peer: PeerAddress) -> None:
        await both_failed.wait()
        raise DaemonFailed("dial backoff")

    async def claim(server: HivemindServer) -> None:
        (own,) = daemons_of(os.getpid())
        transport = HivemindTransport(server.address)
        await echoed(transport)
        assert transport._starting is not None
        daemon = await transport._starting
        (old,) = set(daemons_of(os.getpid())) - {own}
        os.kill(old, signal.SIGSTOP)  # it does not heed SIGTERM
        monkeypatch.setattr(daemon, "open", worn.__get__(daemon))

        await asyncio.gather(echoed(transport, b"one"), echoed(transport, b"two"))

        assert len(set(daemons_of(os.getpid())) - {own, old}) == 1
        await transport.close()
        assert daemons_of(os.getpid()) == [own]

    serving(tmp_path, claim)
    assert directories() <= before


def test_what_a_killed_process_left_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hivemind_directory, "PLACE", tmp_path)
    alive, fresh = SocketDirectory(), tmp_path / f"{hivemind_directory.PREFIX}fresh"
    left, file = (tmp_path / f"{hivemind_directory.PREFIX}{name}" for name in ("left", "file"))
    for path in (fresh, left):
        path.mkdir()
    (left / "control").touch()
    file.touch()
    for path in (alive.path, left, file):
        os.utime(path, (time.time() - 3600,) * 2)

    sweep()

    assert set(tmp_path.iterdir()) == {alive.path, fresh, file}
    alive.remove()
    alive.remove()
    assert set(tmp_path.iterdir()) == {fresh, file}


@contextlib.contextmanager
def silent_peer() -> Any:
    """Listen and never answer; yields the socket and the multiaddr of a peer there."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        port = listening.getsockname()[1]
        yield listening, f"/ip4/127.0.0.1/tcp/{port}/p2p/{NOBODY}"


def test_a_caller_may_read_the_run_file_of_relayed_servers(tmp_path: Path) -> None:
    async def claim(server: HivemindServer) -> None:
        swarm = Swarm(initial_peers=(server.address,), is_relayed=True)
        transport = HivemindTransport(server.address, swarm)
        await transport.call("echo", b"", deadline_s=DEADLINE_S)
        await transport.close()

    serving(tmp_path, claim)


def test_a_peer_that_can_be_dialled_is_not_asked_others_for(tmp_path: Path) -> None:
    async def claim(server: HivemindServer) -> None:
        with silent_peer() as (listening, silent):
            transport = HivemindTransport(server.address, Swarm(initial_peers=(silent,)))
            await echoed(transport)
            await transport.close()
            with pytest.raises(BlockingIOError):
                listening.accept()

    serving(tmp_path, claim)


def test_an_initial_peer_that_hangs_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach = Daemon._reach

    async def reaching(daemon: Daemon, peer: PeerAddress) -> bool:
        if peer.peer_id == NOBODY:
            await asyncio.sleep(1e6)
        return await reach(daemon, peer)

    monkeypatch.setattr(Daemon, "_reach", reaching)

    async def claim(third: HivemindServer) -> None:
        known = Swarm(initial_peers=(third.address,))
        (tmp_path / "server").mkdir()
        server = make(tmp_path / "server", {"echo": echo}, swarm=known)
        await server.start()
        identity = parse_peer_address(server.address).peer_id
        silent = f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}"
        transport = HivemindTransport(
            f"/p2p/{identity}", Swarm(initial_peers=(silent, third.address))
        )
        await echoed(transport)
        await transport.close()
        await server.stop(0.0)

    serving(tmp_path, claim)


@pytest.fixture
def hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """A daemon that says a very long line, begins, and answers nothing; returns who runs it."""
    pids = tmp_path / "pids"
    script = tmp_path / "p2pd"
    script.write_text(
        "#!/usr/bin/env python3\n"
        "import os, socket, sys, time\n"
        f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
        "(path,) = [a.removeprefix('-listen=/unix') for a in sys.argv if a.startswith('-listen')]\n"
        "s = socket.socket(socket.AF_UNIX); s.bind(path); s.listen()\n"
        "print('x' * 200_000); print('Peer ID: none', flush=True); time.sleep(1000)\n"
    )
    script.chmod(0o700)
    monkeypatch.setattr(hivemind_daemon, "daemon_path", lambda: script)
    return lambda: [int(pid) for pid in pids.read_text().split()] if pids.exists() else []


def test_a_daemon_that_answers_nothing_is_given_up(
    hung: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hivemind_daemon, "_LOCAL_S", 0.2)
    left = Path(tempfile.mkdtemp(prefix=hivemind_directory.PREFIX, dir=hivemind_directory.PLACE))
    os.utime(left, (time.time() - 3600,) * 2)
    before = directories() - {left}

    with pytest.raises(DaemonFailed, match=r"of this process said nothing for 0\.2 s"):
        asyncio.run(Daemon.start(Swarm()))

    (pid,) = hung()
    assert not Path(f"/proc/{pid}").exists()
    assert directories() <= before


def test_closing_does_not_wait_for_a_start(hung: Callable[[], list[int]]) -> None:
    before = directories()

    async def run() -> None:
        transport = HivemindTransport(f"/p2p/{NOBODY}")
        call = asyncio.create_task(transport.call("echo", b"", deadline_s=1000.0))
        async with asyncio.timeout(DEADLINE_S):
            while not hung():
                await asyncio.sleep(0.02)
            await transport.close()
        with pytest.raises(TransportError, match="closed"):
            await call

    asyncio.run(run())
    (pid,) = hung()
    assert not Path(f"/proc/{pid}").exists()
    assert directories() <= before


def test_without_hivemind_a_call_is_a_transport_error_that_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    async def run() -> None:
        transport = HivemindTransport(f"/p2p/{NOBODY}")
        with pytest.raises(TransportError, match=r"pip install 'diloco\[hivemind\]'") as caught:
            await transport.call("echo", b"", deadline_s=DEADLINE_S)
        assert not caught.value.is_retryable
        await transport.close()

    asyncio.run(run())


def test_a_lack_of_files_is_an_error_of_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_none(**_: object) -> str:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr("tempfile.mkdtemp", make_none)

    async def run() -> None:
        transport = HivemindTransport(f"/p2p/{NOBODY}")
        with pytest.raises(TransportError, match="too many open files") as caught:
            await transport.call("echo", b"", deadline_s=DEADLINE_S)
        assert not isinstance(caught.value, DeadlineExceeded)
        await transport.close()

    asyncio.run(run())
