"""Handlers served over libp2p streams, through hivemind's daemon, in checksummed chunks."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

from diloco.transport.addresses import is_own, split_address
from diloco.transport.calls.limits import Limits, Lines, Refusals, Turnstile
from diloco.transport.calls.serving import Answer, ArrivingCall, Attempt
from diloco.transport.contracts import Buffer, Handlers
from diloco.transport.deadlines import Movement
from diloco.transport.errors import (
    DamagedFrame,
    DeadlineExceeded,
    MessageTooLarge,
    PeerReset,
    TransportError,
    Unauthorised,
)
from diloco.transport.framing import DEFAULT_CHUNK_BYTES, FrameReader, check_chunk_bytes
from diloco.transport.identity import Identity
from diloco.transport.libp2p.address import (
    PeerAddress,
    direct_host,
    is_loopback_route,
    is_relayed_route,
    parse_peer_address,
    tcp_port,
    through,
    to_multiaddr,
)
from diloco.transport.libp2p.control import Whereabouts
from diloco.transport.libp2p.daemon import Daemon, DaemonFailed, Swarm
from diloco.transport.libp2p.rendezvous import (
    NAME_BYTES,
    NONCE_BYTES,
    entry_of,
    statement_of,
)
from diloco.transport.libp2p.rendezvous import PROTOCOL as RENDEZVOUS
from diloco.transport.libp2p.wire import (
    ACCEPTED,
    Opening,
    largest_chunk,
    read_message,
    read_opening,
    write_message,
)
from diloco.transport.security.tokens import TokenTable
from diloco.transport.shaping.pacing import Pacer
from diloco.transport.shaping.packing import Packer, Packers
from diloco.transport.transfer import TransferTable

_log = logging.getLogger(__name__)

#: Seconds between two looks whether the initial peers are connected.
MEET_INTERVAL_S = 5.0
_RESTART_WAIT_S = 0.5
#: Seconds after which peers that have restarted have this one's entry again.
_ENTRY_INTERVAL_S = 60.0
#: Seconds within which a stream says what it wants, and a caller that was refused hangs up.
_OPENING_S = 10.0


class HivemindServer:
    """A libp2p peer that serves calls; its identity outlives it, wherever it listens next."""

    def __init__(
        self,
        bind: str,
        handlers: Handlers,
        *,
        identity: Path,
        swarm: Swarm = Swarm(),  # noqa: B008 - frozen
        tokens: TokenTable | None = None,
        run: str = "",
        limits: Limits | None = None,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        pacer: Pacer | None = None,
    ) -> None:
        """Keep where to listen and what to serve; nothing is bound before `start`.

        Args:
            bind: ``host:port`` of an interface; port 0 draws a free one.
            handlers: Coroutines by method name. A handler is cancelled when its caller goes away.
            identity: File of the private key, made when missing.
            swarm: How it takes part in the network.
            tokens: What every call must carry; None: no token is asked for.
            run: By whose name this one is found as its coordinator, by the initial peers and with
                tokens; empty: it is not.
            limits: What is borne from callers; None: the usual limits.
            chunk_bytes: Chunk size of replies, at most.
            pacer: Of this process; None: one without a rate.

        Raises:
            ValueError: If `bind` is not ``host:port``, the host an IP address or localhost.
        """
        host, port = split_address(bind)
        check_chunk_bytes(chunk_bytes)
        self._bind = bind
        self._listen = to_multiaddr(f"127.0.0.1:{port}" if host == "localhost" else bind)
        if not self._listen.startswith("/ip"):
            raise ValueError(f"bind = {bind!r}: libp2p listens on IP addresses, not on names")
        self._handlers = handlers
        self._identity = identity
        self._swarm = swarm
        self._tokens = tokens
        self._run = run if swarm.initial_peers and tokens is not None else ""
        self._peer_id = ""
        self._limits = limits or Limits()
        self._turnstile = Turnstile(self._limits)
        self._refusals = Refusals(self._limits)
        self._failures = Lines(self._limits.refusals_logged_per_s)
        self._transfers = TransferTable(
            kept_bytes=self._limits.kept_bytes, kept_s=self._limits.kept_s
        )
        self._chunk_bytes = chunk_bytes
        self._packers = Packers(pacer or Pacer())
        self._address: PeerAddress | None = None
        self._daemon: Daemon | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._peers: Counter[str] = Counter()
        self._movements: WeakValueDictionary[str, Movement] = WeakValueDictionary()  # by peer
        self._is_full = False
        self._is_stopping = False

    @property
    def address(self) -> str:
        """The peer's multiaddr, or several, identity included; only after `start`."""
        assert self._address, "address asked for before start"
        return str(self._address)

    async def start(self) -> None:
        """Start the daemon and accept calls.

        Raises:
            OSError: If the address cannot be bound, another process using it included.
        """
        try:
            daemon, found = await self._start_daemon()
        except DaemonFailed as error:
            raise OSError(
                errno.EADDRINUSE,
                f"cannot listen on {self._bind}: is another process using it? ({error})",
            ) from error
        beyond = tuple(route for route in found.routes if not is_loopback_route(route))
        # A daemon that dies is started again where it was.
        address = PeerAddress(found.peer_id, beyond or found.routes)
        base, _, asked = self._listen.rpartition("/")
        self._listen = f"{base}/{tcp_port(address) or asked}"
        if self._swarm.is_relayed:
            relays = map(parse_peer_address, self._swarm.initial_peers)
            relayed = (route for relay in relays for route in through(relay))
            address = replace(address, routes=tuple(dict.fromkeys((*address.routes, *relayed))))
        self._address = address
        self._is_stopping = False
        self._keeper = asyncio.get_running_loop().create_task(self._keep(daemon))
        self._keeper.add_done_callback(self._kept)
        _log.info("listening address=%s", self._address)

    async def stop(self, drain_timeout_s: float) -> None:
        """Accept nothing new, let calls finish for `drain_timeout_s`, then cancel the rest."""
        self._is_stopping = True
        if self._calls and drain_timeout_s > 0:
            await asyncio.wait(self._calls, timeout=drain_timeout_s)
        keeper, self._keeper = self._keeper, None
        for task in (*self._calls, *((keeper,) if keeper else ())):
            task.cancel()
        await asyncio.gather(*self._calls, *((keeper,) if keeper else ()), return_exceptions=True)
        daemon, self._daemon = self._daemon, None
        if daemon is not None:
            await daemon.stop()

    async def _start_daemon(self) -> tuple[Daemon, Whereabouts]:
        daemon = await Daemon.start(self._swarm, listen=self._listen, identity=self._identity)
        try:
            found = await daemon.whereabouts()
            self._peer_id = found.peer_id
            await daemon.accept(functools.partial(self._take, self._serve))
            if self._run:
                await daemon.accept(functools.partial(self._take, self._prove), RENDEZVOUS)
        except BaseException:
            await daemon.stop()
            raise
        self._daemon = daemon
        return daemon, found

    async def _keep(self, daemon: Daemon) -> None:
        """Keep the daemon alive, and known to the initial peers."""
        loop = asyncio.get_running_loop()
        enter_at = loop.time() if self._run else math.inf
        while True:
            await daemon.meet()
            if loop.time() >= enter_at:
                try:
                    await daemon.provide(entry_of(self._run))
                    enter_at = loop.time() + _ENTRY_INTERVAL_S
                except DaemonFailed as error:
                    _log.debug("not entered under run=%s yet: %s", self._run, error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(daemon.wait(), MEET_INTERVAL_S)
            while not daemon.is_connected:
                _log.warning(
                    "the libp2p daemon died, or its sockets are gone; starting it again listen=%s",
                    self._listen,
                )
                await daemon.stop()
                try:
                    daemon, _ = await self._start_daemon()
                except (DaemonFailed, OSError) as error:
                    _log.warning("%s", error)
                    await asyncio.sleep(_RESTART_WAIT_S)

    def _kept(self, keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            _log.error(
                "nobody keeps the libp2p daemon any more listen=%s: start this process again",
                self._listen,
                exc_info=error,
            )

    def _take(
        self,
        serve: Callable[[_Stream], Coroutine[object, object, None]],
        address: PeerAddress,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        peer = address.peer_id
        if self._is_stopping or not self._has_room(peer):
            writer.transport.abort()
            return
        movement = self._movements.setdefault(peer, Movement())
        stream = _Stream(address, reader, writer, movement)
        task = asyncio.get_running_loop().create_task(serve(stream))
        self._calls.add(task)
        self._peers[peer] += 1
        task.add_done_callback(lambda task: self._done(task, peer))

    def _done(self, task: asyncio.Task[None], peer: str) -> None:
        self._calls.discard(task)
        self._peers[peer] -= 1
        if not self._peers[peer]:
            del self._peers[peer]

    def _has_room(self, peer: str) -> bool:
        """Whether a stream is taken; a peer has half of them at most, so that others get in."""
        most, own = self._limits.connections, self._peers[peer]
        was_full, self._is_full = self._is_full, len(self._calls) >= most or own >= (most + 1) // 2
        if self._is_full and not was_full:
            _log.warning(
                "streams are closed unheard: %d are open, %d of them of peer=%s, %d are allowed",
                len(self._calls), own, peer, most,
            )  # fmt: skip
        return not self._is_full

    async def _serve(self, stream: _Stream) -> None:
        limits = self._limits
        stream.silence_s = limits.silence_s
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limits.call_s) as scope:
                stream.writer.write(ACCEPTED)
                try:
                    opening = await stream.opening()
                except TransportError as error:
                    await self._refuse("", stream, stream.peer, error)
                    return
                # The caller keeps its deadline; past it nobody waits for the answer.
                scope.reschedule(loop.time() + min(opening.deadline_s + 1.0, limits.call_s))
                await self._answer(opening, stream)
        except TimeoutError:
            _log.info("call ended by its deadline peer=%s", stream.peer)
        except (EOFError, OSError, TransportError) as error:
            _log.debug("caller is gone peer=%s: %s", stream.peer, error)
        finally:
            stream.writer.transport.abort()

    async def _prove(self, stream: _Stream) -> None:
        """Prove to a site of the run that this is its coordinator; see `rendezvous`."""
        assert self._tokens is not None
        try:
            async with asyncio.timeout(_OPENING_S):
                name = await stream.reader.readexactly(NAME_BYTES)
                nonce = await stream.reader.readexactly(NONCE_BYTES)
                statement = statement_of(self._run, self._peer_id, nonce)
                stream.writer.write(self._tokens.prove(name, statement))
                await stream.reader.read(1)  # it hangs up when it has the answer
        except (EOFError, OSError, TimeoutError, Unauthorised) as error:
            _log.debug("nothing proven to peer=%s: %s", stream.peer, error)
        finally:
            stream.writer.transport.abort()

    async def _answer(self, opening: Opening, stream: _Stream) -> None:
        caller, method = None, opening.method
        try:
            if self._tokens is not None:
                caller = self._tokens.identify(opening.token)
            key = caller.uri if caller else stream.peer
            self._turnstile.enter(key, method, asyncio.get_running_loop().time())
        except TransportError as error:
            await self._refuse(method, stream, stream.peer, error)
            return
        held_bytes = 0
        try:
            try:
                frames = FrameReader(await stream.read())
                held_bytes = self._turnstile.hold(key, frames.held_bytes)
            except PeerReset:
                raise
            except TransportError as error:
                await self._refuse(method, stream, key, error)
            else:
                await self._reply(method, frames, stream, caller)
        finally:
            self._turnstile.leave(key, method, held_bytes)

    async def _refuse(
        self, method: str, stream: _Stream, caller: str, error: TransportError
    ) -> None:
        self._refusals.log(method, caller, error, asyncio.get_running_loop().time())
        if not self._refusals.enter():
            return  # the stream is cut off
        try:
            stream.silence_s = min(stream.silence_s, _OPENING_S)
            await self._send(Answer.failure(error), stream, self._packers.of("", ""))
        finally:
            self._refusals.leave()

    async def _reply(
        self, method: str, frames: FrameReader, stream: _Stream, caller: Identity | None
    ) -> None:
        attempt = Attempt(self._transfers, caller.uri if caller else "", frames, stream)
        try:
            try:
                answer = await self._handle(_HivemindCall(method, attempt, stream, caller), attempt)
            except TransportError as error:
                answer = Answer.failure(error)
            known = method if method in self._handlers else ""
            packer = self._packers.of(caller.uri if caller else stream.peer, known)
            await self._send(answer, stream, packer)
            attempt.is_sent = True
        finally:
            attempt.close()

    async def _send(self, answer: Answer, stream: _Stream, packer: Packer) -> None:
        """Write a reply to the end and hear the caller out: it hangs up when it has the reply."""
        size, chunk_bytes = memoryview(answer.reply.payload).nbytes, self._chunk_bytes
        try:
            chunk_bytes = largest_chunk(chunk_bytes, size, is_relayed=stream.is_relayed)
        except MessageTooLarge as error:
            answer = Answer.failure(error)
        await answer.send(stream.write, chunk_bytes, packer)
        async with asyncio.timeout(stream.silence_s):
            while await stream.reader.read(DEFAULT_CHUNK_BYTES):
                pass

    async def _handle(self, call: _HivemindCall, attempt: Attempt) -> Answer:
        """Run the handler, and end it when its caller goes away."""
        loop = asyncio.get_running_loop()
        work = loop.create_task(attempt.answer(self._handlers, call, self._failures))
        gone = loop.create_task(call.until_gone())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                gone.result()
            else:
                return work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        raise EOFError("the caller went away")


class _Stream:
    """The pipe of one call, nothing of it waited for without end."""

    def __init__(
        self,
        address: PeerAddress,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        movement: Movement,
    ) -> None:
        self._movement = movement
        self.peer = address.peer_id
        self.hosts = [direct_host(route) for route in address.routes]
        self.is_relayed = any(map(is_relayed_route, address.routes))
        self.writer = writer
        self.reader = reader
        self.silence_s = 0.0

    async def opening(self) -> Opening:
        """Return what the caller wants.

        Raises:
            DeadlineExceeded: If it does not say so in time.
            DamagedFrame: If it is nothing of ours.
            EOFError: If it went away.
        """
        within_s = min(self.silence_s, _OPENING_S)
        try:
            async with asyncio.timeout(within_s):
                return await read_opening(self.reader)
        except TimeoutError:
            raise DeadlineExceeded(f"the caller sent no opening for {within_s:g} s") from None

    async def read(self) -> bytes:
        """Return the next message.

        Raises:
            PeerReset: If the caller went away.
            DeadlineExceeded: If none comes.
            DamagedFrame: If it is none.
        """
        try:
            async with self._movement.within(self.silence_s):
                return await read_message(self.reader)
        except TimeoutError:
            raise DeadlineExceeded(f"the caller sent nothing for {self.silence_s:g} s") from None
        except (EOFError, OSError) as error:
            raise PeerReset(f"the caller went away: {error}") from error

    async def write(self, message: bytes) -> None:
        async with self._movement.within(self.silence_s):
            await write_message(self.writer, message)


class _HivemindCall(ArrivingCall):
    """A call over libp2p."""

    has_end = False

    def __init__(
        self, method: str, attempt: Attempt, stream: _Stream, caller: Identity | None
    ) -> None:
        super().__init__(method, attempt, stream.peer, caller)
        self._stream = stream
        self._has_all = asyncio.Event()
        if not self.payload_bytes:
            self._has_all.set()

    @property
    def is_local(self) -> bool:
        return any(map(is_own, self._stream.hosts))

    async def read_payload(self) -> Buffer:
        payload = await super().read_payload()
        self._has_all.set()
        return payload

    async def until_gone(self) -> None:
        """Return when the caller has hung up; seen once its payload has been read.

        Raises:
            DamagedFrame: If it sends more than it declared.
        """
        await self._has_all.wait()
        with contextlib.suppress(OSError):
            if await self._stream.reader.read(1):
                raise DamagedFrame(f"the caller sent more than the {self.payload_bytes} declared")
