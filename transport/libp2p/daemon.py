"""One libp2p daemon (``p2pd``, which hivemind installs): its life, and its streams.

The daemon is a process of its own, started by exec and tied to this one by a socket: it ends with
it, whatever kills that. hivemind itself is not imported, nothing is forked, and processes with
threads may use this. Streams are pipes of bytes over local sockets; between the daemons they are
encrypted (TLS 1.3 or Noise), and each end proves the identity in its address.

`hivemind.p2p.P2P`, which is a client of the same daemon, is not used. Its streams are these pipes:
as fast (64 MiB over loopback: 261 to 595 MiB/s, ours 164 to 434, on a busy machine), and they hold
a writer up as these do. But it does not notice that its daemon has died (`is_alive` stays true, a
unary call waits for ever), its `shutdown` waits for ever for one that hangs, it does not start
while no initial peer answers, its daemon gets the Ctrl-C of the terminal while this process stops
in order, and its import loads torch: 3 s, and 285 MiB for 33 MiB.
tests/transport/test_hivemind_p2p.py shows each, and fails once one is otherwise.

Which peers there are is known to the Kademlia DHT of libp2p: a peer that is connected to one other
finds all by their identity.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from diloco.transport.framing import DEFAULT_CHUNK_BYTES
from diloco.transport.libp2p.address import PeerAddress, is_relayed_route, parse_peer_address
from diloco.transport.libp2p.control import (
    DaemonRefused,
    Whereabouts,
    accept_request,
    bind_life_request,
    connect_request,
    identify_request,
    open_request,
    parse_stream_peer,
    parse_whereabouts,
    provide_request,
    providers_request,
    read_provider,
    read_reply,
    read_stream_peer,
    write_request,
)
from diloco.transport.libp2p.directory import SocketDirectory, sweep

_log = logging.getLogger(__name__)

#: What both ends name their streams; a peer without it is no peer of ours.
PROTOCOL = "/diloco/wire/1"

_CONTROL = "control"
_READY = b"Peer ID:"
_START_S = 60.0
#: For what a daemon does alone.
_LOCAL_S = 30.0
#: For what it does with a peer, for which it gives itself 60 s.
_REMOTE_S = 70.0
_DHT_S = 10
_END_S = 5.0
_LAST_LINES = 5
_BACKOFF = "dial backoff"

_T = TypeVar("_T")
#: Its two ends, and whether it goes through a relay.
Stream: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Swarm:
    """How a process takes part in the peer-to-peer network.

    Attributes:
        initial_peers: Addresses of peers through which others are found.
        is_relayed: Whether a server asks the initial peers to relay calls to it: behind NAT, where
            nobody can dial it. A relayed connection is cut after 128 KiB or two minutes, so calls
            go on over many of them, in small chunks, at some 1 Mbit/s.
        maps_port: Whether a server asks its router to forward its port (UPnP, NAT-PMP).
    """

    initial_peers: tuple[str, ...] = ()
    is_relayed: bool = False
    maps_port: bool = False


class HivemindMissing(ImportError):
    """hivemind, which brings the daemon, is not installed."""


class DaemonFailed(Exception):
    """The daemon did not do what it was asked: the peer cannot be reached, or the daemon died."""

    @property
    def is_backoff(self) -> bool:
        """Whether it did not even try, because it failed at that peer a moment ago."""
        return _BACKOFF in str(self)


class Daemon:
    """A running daemon; made by `start`."""

    def __init__(
        self, child: asyncio.subprocess.Process, directory: SocketDirectory, swarm: Swarm
    ) -> None:
        """Take over a daemon that runs."""
        self._child = child
        self._directory = directory
        self._sockets = directory.path
        self._initial = [parse_peer_address(peer) for peer in swarm.initial_peers]
        self._known: set[str] = set()
        self._life: asyncio.StreamWriter | None = None
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[Any]] = set()  # of whatever result
        self._ending: asyncio.Task[None] | None = None
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._output: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, swarm: Swarm, *, listen: str = "", identity: Path | None = None) -> Daemon:
        """Start a daemon.

        Args:
            swarm: How it takes part.
            listen: Multiaddr to listen on; empty: on none.
            identity: File of its private key, made when missing; None: nobody in particular.

        Raises:
            DaemonFailed: If it does not start, `listen` being in use included, or this process
                having no file left.
            HivemindMissing: If it is not installed.
        """
        program = daemon_path()
        try:
            if listen:
                _check_free(listen)
            if identity is not None:
                _make_identity(identity)
            sweep()
            directory = SocketDirectory()
        except OSError as error:
            raise DaemonFailed(f"cannot prepare the libp2p daemon: {error}") from error
        try:
            child = await asyncio.create_subprocess_exec(
                program,
                *_arguments(swarm, listen, identity, directory.path),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which may still need it
            )
        except BaseException as error:
            directory.remove()
            if isinstance(error, OSError):
                raise DaemonFailed(f"cannot execute {program}: {error}") from error
            raise
        daemon = cls(child, directory, swarm)
        try:
            await daemon._begin()
        except BaseException:
            await daemon.stop()
            raise
        return daemon

    @property
    def is_alive(self) -> bool:
        """Whether the daemon's process runs."""
        return self._child.returncode is None

    @property
    def is_connected(self) -> bool:
        """Whether the daemon runs and its sockets are there: whatever tidies /tmp takes them."""
        return self.is_alive and (self._sockets / _CONTROL).exists()

    async def wait(self) -> None:
        """Return when the daemon has ended."""
        await self._child.wait()

    async def whereabouts(self) -> Whereabouts:
        """Ask who it is and where."""
        reply, _, writer = await self._ask(identify_request(), within_s=_LOCAL_S)
        writer.transport.abort()
        return parse_whereabouts(reply)

    async def meet(self) -> None:
        """Connect to those initial peers that are not connected; one that is away is for later."""
        await asyncio.gather(*self._meetings())

    async def meet_any(self) -> None:
        """Connect to an initial peer; the others are met meanwhile, for the next attempt."""
        for meeting in asyncio.as_completed(self._meetings()):
            if await meeting:
                break

    async def provide(self, key: bytes) -> None:
        """Enter this peer in the DHT under a key, a CID; peers forget that when they restart.

        Raises:
            DaemonFailed: If no peer takes it.
        """
        _, _, writer = await self._ask(provide_request(key, _DHT_S), within_s=_REMOTE_S)
        writer.transport.abort()

    async def providers(self, key: bytes, most: int) -> set[str]:
        """Return the identities of peers that have entered themselves under a key.

        Raises:
            DaemonFailed: If the DHT cannot be asked.
        """
        request = providers_request(key, most, _DHT_S)
        _, reader, writer = await self._ask(request, within_s=_REMOTE_S)
        found: set[str] = set()
        try:
            async with asyncio.timeout(_REMOTE_S):
                while len(found) < most and (peer_id := await read_provider(reader)):
                    found.add(peer_id)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            raise DaemonFailed(f"the libp2p daemon of this process broke off: {error}") from error
        finally:
            writer.transport.abort()
        return found

    async def open(self, peer: PeerAddress, protocol: str = PROTOCOL) -> Stream:
        """Open a stream to a peer, by the routes of its address, else those that the DHT knows.

        Raises:
            DaemonFailed: If it cannot be reached.
        """
        if peer.peer_id not in self._known and not await self._reach(peer):
            await self.meet_any()
        request = open_request(peer.peer_id, protocol)
        try:
            reply, reader, writer = await self._ask(request, within_s=_REMOTE_S)
        except DaemonFailed:
            self._known.discard(peer.peer_id)
            raise
        self._known.add(peer.peer_id)
        try:
            routes = parse_stream_peer(reply).routes
        except ValueError as error:
            writer.transport.abort()
            raise DaemonFailed(f"the libp2p daemon opened a stream to nobody: {error}") from error
        return reader, writer, any(map(is_relayed_route, routes))

    async def accept(
        self,
        handle: Callable[[PeerAddress, asyncio.StreamReader, asyncio.StreamWriter], None],
        protocol: str = PROTOCOL,
    ) -> None:
        """Have `handle` called with the peer and the pipe of every stream that others open.

        Raises:
            DaemonFailed: If the daemon refuses.
        """

        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                async with asyncio.timeout(_LOCAL_S):
                    peer = await read_stream_peer(reader)
            except (OSError, EOFError, ValueError):
                writer.transport.abort()
            else:
                handle(peer, reader, writer)

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._own(greet(reader, writer))

        path = str(self._sockets / f"streams-{len(self._servers)}")
        try:
            self._servers.append(
                await asyncio.start_unix_server(accepted, path, limit=DEFAULT_CHUNK_BYTES)
            )
        except OSError as error:
            raise DaemonFailed(f"cannot accept streams at {path}: {error}") from error
        _, _, writer = await self._ask(accept_request(path, protocol), within_s=_LOCAL_S)
        writer.transport.abort()

    async def stop(self) -> None:
        """End the daemon; its streams break. Anyone who gives up waiting does not stop its end."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        if self._life is not None:
            self._life.transport.abort()
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                self._child.terminate()
        try:
            async with asyncio.timeout(_END_S):
                await self._child.wait()
        except TimeoutError:
            self._child.kill()
            await self._child.wait()
        if self._output is not None:
            await asyncio.wait({self._output})
        self._directory.remove()

    async def _begin(self) -> None:
        """Wait until the daemon listens, and tie its life to this process."""
        ready = asyncio.get_running_loop().create_future()
        self._output = asyncio.get_running_loop().create_task(self._read_output(ready))
        try:
            async with asyncio.timeout(_START_S):
                is_ready = await ready
        except TimeoutError:
            is_ready = False
        if not is_ready:
            said = " | ".join(self._last_lines)
            raise DaemonFailed(f"the libp2p daemon did not start: {said or 'it said nothing'}")
        _, _, self._life = await self._ask(bind_life_request(), within_s=_LOCAL_S)

    async def _read_output(self, ready: asyncio.Future[bool]) -> None:
        assert self._child.stdout is not None
        while True:
            try:
                line = await self._child.stdout.readline()
            except ValueError:  # longer than asyncio keeps; what it kept is dropped
                continue
            if not line:
                break
            if line.startswith(_READY) and not ready.done():
                ready.set_result(True)
            text = line.decode(errors="replace").rstrip()
            self._last_lines.append(text)
            _log.debug("p2pd: %s", text)
        if not ready.done():
            ready.set_result(False)

    def _own(self, work: Coroutine[object, object, _T]) -> asyncio.Task[_T]:
        """Run `work` until it ends or the daemon is stopped."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _meetings(self) -> list[asyncio.Task[bool]]:
        """Begin to connect to all initial peers."""
        return [self._own(self._reach(peer)) for peer in self._initial]

    async def _reach(self, peer: PeerAddress) -> bool:
        """Whether a peer is connected now, by the routes of its address."""
        if not peer.routes:
            return False
        try:
            _, _, writer = await self._ask(connect_request(peer), within_s=_REMOTE_S)
        except DaemonFailed as error:
            _log.debug("cannot connect peer=%s: %s", peer, error)
            return False
        writer.transport.abort()
        return True

    async def _ask(
        self, request: bytes, *, within_s: float
    ) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
        """Ask the daemon; the socket stays open, for the caller to use or to end.

        Raises:
            DaemonFailed: If it refuses, is gone, or says nothing for `within_s`.
        """
        try:
            async with asyncio.timeout(within_s):
                return await self._exchange(request)
        except TimeoutError as error:
            silence = f"the libp2p daemon of this process said nothing for {within_s:g} s"
            raise DaemonFailed(silence) from error

    async def _exchange(
        self, request: bytes
    ) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            reader, writer = await asyncio.open_unix_connection(
                self._sockets / _CONTROL, limit=DEFAULT_CHUNK_BYTES
            )
        except OSError as error:
            raise DaemonFailed(f"the libp2p daemon of this process is gone: {error}") from error
        try:
            await write_request(writer, request)
            return await read_reply(reader), reader, writer
        except (OSError, EOFError, ValueError) as error:
            writer.transport.abort()
            raise DaemonFailed(f"the libp2p daemon of this process broke off: {error}") from error
        except DaemonRefused as error:
            writer.transport.abort()
            raise DaemonFailed(str(error)) from error
        except BaseException:
            writer.transport.abort()
            raise


def daemon_path() -> Path:
    """Find the daemon's program.

    Raises:
        HivemindMissing: If hivemind is not installed; says how to.
    """
    found = importlib.util.find_spec("hivemind")
    for place in (found.submodule_search_locations or ()) if found else ():
        path = Path(place) / "hivemind_cli" / "p2pd"
        if path.is_file():
            return path
    raise HivemindMissing(
        "hivemind, which brings the libp2p daemon, is not installed: pip install 'diloco[hivemind]'"
    )


def _arguments(swarm: Swarm, listen: str, identity: Path | None, sockets: Path) -> list[str]:
    switches = {
        "noListenAddrs": not listen,
        "dhtServer": bool(listen),
        "dhtClient": not listen,
        "autonat": bool(listen) and swarm.is_relayed,
        "autoRelay": bool(listen) and swarm.is_relayed,
        "forceReachabilityPrivate": bool(listen) and swarm.is_relayed,
        # A daemon relays whatever is said here, within libp2p's usual limits: p2pd registers that
        # service itself. With this one on, the two race, and the limits are those of the last.
        "relayService": False,
        # The initial peers and nobody else; discovery would wait minutes for more of them.
        "relayDiscovery": False,
        "natPortMap": bool(listen) and swarm.maps_port,
        "relay": True,
        "tls": True,
        "noise": True,
        "connManager": True,
    }
    arguments = [f"-{name}={int(on)}" for name, on in switches.items()]
    arguments += [f"-listen=/unix{sockets / _CONTROL}", f"-idleTimeout={_START_S:g}s"]
    arguments += [f"-hostAddrs={listen}"] if listen else []
    if listen and swarm.is_relayed:
        arguments.append(f"-trustedRelays={','.join(swarm.initial_peers)}")
    if identity is not None:
        arguments.append(f"-id={identity}")
    return arguments


def _check_free(listen: str) -> None:
    """Refuse a port that somebody listens on: libp2p would share it in silence (SO_REUSEPORT).

    Raises:
        DaemonFailed: If somebody does, or the address is none of this machine.
    """
    _, _, host, _, port = listen.split("/")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            raise DaemonFailed(f"cannot bind {listen}: {error}") from error


def _make_identity(path: Path) -> None:
    """Write a new private key, unless there is one; whole or not at all."""
    if path.exists():
        return
    key = Ed25519PrivateKey.generate()
    raw = key.private_bytes_raw() + key.public_key().public_bytes_raw()
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    # protobuf of libp2p's PrivateKey: type 1 (Ed25519), 64 bytes
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(b"\x08\x01\x12\x40" + raw)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
